#include "server/runtime/sealed_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "base/status.h"

namespace holdfast {

absl::StatusOr<UniqueFd> SealedMemory(const char* name, uint64_t bytes,
                                      std::span<const std::string_view> content) {
  UniqueFd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) {
    return ErrnoStatus(errno, "memfd_create", name);
  }
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return ErrnoStatus(errno, "make", name);
  }
  off_t at = 0;
  for (std::string_view piece : content) {
    while (!piece.empty()) {
      const ssize_t written = ::pwrite(fd.get(), piece.data(), piece.size(), at);
      if (written < 0 && errno != EINTR) {
        return ErrnoStatus(errno, "fill", name);
      }
      at += written > 0 ? written : 0;
      piece.remove_prefix(written > 0 ? static_cast<size_t>(written) : 0);
    }
  }
  const int write_too = content.empty() ? 0 : F_SEAL_WRITE;
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | write_too) != 0) {
    return ErrnoStatus(errno, "seal", name);
  }
  return fd;
}

uint64_t SealedBytes(int fd) {
  // (A file on tmpfs, as a slot is, says that no seals can be put on it.)
  const int seals = ::fcntl(fd, F_GET_SEALS);
  struct stat st = {};
  const bool sealed = seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && ::fstat(fd, &st) == 0;
  return sealed ? static_cast<uint64_t>(st.st_size) : 0;
}

}  // namespace holdfast
