#include <fcntl.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/env.h"
#include "base/status.h"
#include "base/unique_fd.h"

namespace holdfast {

absl::StatusOr<std::string> ReadFile(Env& env, const std::string& path, uint64_t bytes_max,
                                     OpenOptions options) {
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, env.Open(path, OpenMode::kRead, options));
  HF_ASSIGN_OR_RETURN(const FileInfo info, file->Info());
  if (info.bytes > bytes_max) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "read '", path, "': ", info.bytes, " bytes; at most ", bytes_max, " are accepted here"));
  }
  std::string data(static_cast<size_t>(info.bytes), '\0');
  HF_RETURN_IF_ERROR(file->ReadAt(0, std::as_writable_bytes(std::span<char>(data))));
  return data;
}

absl::Status WriteFileAtomically(Env& env, const std::string& path, std::string_view data) {
  const std::string temporary = path + ".tmp";
  absl::StatusOr<std::unique_ptr<File>> file = env.Open(temporary, OpenMode::kCreateExclusive);
  if (absl::IsAlreadyExists(file.status())) {  // left by a crash
    HF_RETURN_IF_ERROR(env.Unlink(temporary));
    file = env.Open(temporary, OpenMode::kCreateExclusive);
  }
  HF_RETURN_IF_ERROR(file.status());
  absl::Status status = (*file)->WriteAt(0, std::as_bytes(std::span<const char>(data)));
  if (status.ok()) {
    status = (*file)->Sync();
  }
  if (status.ok()) {
    status = env.Rename(temporary, path);
  }
  if (!status.ok()) {
    // Frees the space at once; if this fails too, the next write replaces what is left.
    env.Unlink(temporary).IgnoreError();
    return status;
  }
  return env.SyncDirectory(ParentDirectory(path));
}

absl::StatusOr<std::string> ReadKernelFile(const std::string& path) {
  constexpr size_t kBytesMax = size_t{1} << 20;
  constexpr size_t kChunkBytes = 4096;
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY));
  if (!fd.valid()) {
    return ErrnoStatus(errno, "open", path);
  }
  std::string text;
  while (text.size() < kBytesMax) {
    const size_t before = text.size();
    text.resize(before + kChunkBytes);
    ssize_t got = 0;
    do {
      got = ::read(fd.get(), text.data() + before, kChunkBytes);
    } while (got < 0 && errno == EINTR);
    if (got < 0) {
      return ErrnoStatus(errno, "read", path);
    }
    text.resize(before + static_cast<size_t>(got));
    if (got == 0) {
      break;
    }
  }
  return text;
}

std::string JoinPath(std::string_view directory, std::string_view name) {
  if (directory.empty()) {
    return std::string(name);
  }
  const char* separator = directory.ends_with('/') ? "" : "/";
  return absl::StrCat(ToAbsl(directory), separator, ToAbsl(name));
}

std::string ParentDirectory(const std::string& path) {
  size_t end = path.size();
  while (end > 1 && path[end - 1] == '/') {
    --end;
  }
  const size_t slash = path.rfind('/', end - 1);
  if (slash == std::string::npos) {
    return ".";
  }
  size_t parent_end = slash;
  while (parent_end > 1 && path[parent_end - 1] == '/') {
    --parent_end;
  }
  return path.substr(0, parent_end == 0 ? 1 : parent_end);
}

}  // namespace holdfast
