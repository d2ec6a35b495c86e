#include "base/env_checks.h"

#include <climits>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast {

absl::Status CheckPath(std::string_view operation, const std::string& path) {
  const char* problem = nullptr;
  if (path.empty() || path.front() != '/') {
    problem = "the path must be absolute";
  } else if (path.size() >= PATH_MAX) {
    problem = "the path is too long";
  } else if (path.find('\0') != std::string::npos) {
    problem = "the path holds a zero byte";
  }
  if (problem == nullptr) {
    return absl::OkStatus();
  }
  constexpr size_t kShownBytesMax = 256;
  const char* more = path.size() > kShownBytesMax ? "…" : "";
  return absl::InvalidArgumentError(
      absl::StrCat(ToAbsl(operation), " '", path.substr(0, kShownBytesMax), more, "': ", problem));
}

absl::Status CheckRange(std::string_view operation, const std::string& path, uint64_t offset,
                        uint64_t bytes) {
  constexpr uint64_t kOffsetMax = INT64_MAX;
  if (offset > kOffsetMax || bytes > kOffsetMax - offset) {
    return absl::InvalidArgumentError(absl::StrCat(ToAbsl(operation), " '", path,
                                                   "': the range of ", bytes, " bytes at offset ",
                                                   offset, " is beyond any file"));
  }
  return absl::OkStatus();
}

std::string TwoPaths(const std::string& from, const std::string& to) {
  return absl::StrCat(from, "' to '", to);
}

}  // namespace holdfast
