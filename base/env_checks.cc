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

absl::Status NoDirect(std::string_view operation, const std::string& path) {
  return absl::UnimplementedError(absl::StrCat(ToAbsl(operation), " '", path,
                                               "': this file system has no direct I/O (O_DIRECT)"));
}

absl::Status NoAllocate(const std::string& path) {
  return absl::UnimplementedError(
      absl::StrCat("allocate '", path, "': this file system cannot reserve space (fallocate)"));
}

absl::Status IsSymlink(std::string_view operation, const std::string& path) {
  return absl::FailedPreconditionError(
      absl::StrCat(ToAbsl(operation), " '", path, "': a symbolic link; none is followed here"));
}

absl::Status TooManyNames(const std::string& directory, size_t names_max) {
  return absl::ResourceExhaustedError(absl::StrCat("list '", directory, "': more than ", names_max,
                                                   " names; move some of them elsewhere"));
}

std::string EncodeLustreStriping(const Striping& striping) {
  constexpr uint32_t kMagicV1 = 0x0BD10BD0;
  constexpr uint32_t kRaid0 = 1;
  std::string out;
  const auto append = [&out](uint64_t value, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) {
      out.push_back(i < sizeof(value) ? static_cast<char>((value >> (8 * i)) & 0xff) : '\0');
    }
  };
  append(kMagicV1, 4);
  append(kRaid0, 4);
  append(0, 16);  // the object's id: the servers'
  append(striping.bytes, 4);
  append(static_cast<uint16_t>(striping.count), 2);  // 0xffff: all servers
  append(0xffff, 2);                                 // the first one: any
  return out;
}

}  // namespace holdfast
