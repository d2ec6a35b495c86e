#include "base/posix_file.h"

#include <fcntl.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/env_checks.h"
#include "base/status.h"
#include "base/units.h"

namespace holdfast {

FileInfo ToFileInfo(const struct statx& st) {
  FileInfo info;
  info.bytes = st.stx_size;
  info.inode = st.stx_ino;
  info.links = st.stx_nlink;
  info.device = makedev(st.stx_dev_major, st.stx_dev_minor);
  info.mode = st.stx_mode;
  info.uid = st.stx_uid;
  info.gid = st.stx_gid;
  if ((st.stx_mask & STATX_BTIME) != 0) {
    info.born_ns =
        static_cast<uint64_t>(st.stx_btime.tv_sec) * 1'000'000'000 + st.stx_btime.tv_nsec;
  }
  return info;
}

int AskInfo(int fd, const char* path, struct statx& st) {
  return ::statx(fd, path, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS | STATX_BTIME,
                 &st);
}

namespace {

class PosixFile : public File {
 public:
  PosixFile(UniqueFd fd, std::string path, bool direct)
      : fd_(std::move(fd)), path_(std::move(path)), direct_(direct) {}

  int fd() const override { return fd_.get(); }
  const std::string& path() const override { return path_; }

  absl::Status ReadAt(uint64_t offset, std::span<std::byte> out) override {
    HF_RETURN_IF_ERROR(CheckRange("read", path_, offset, out.size()));
    size_t done = 0;
    while (done < out.size()) {
      const ssize_t got = RetryInterrupted([&] {
        return ::pread(fd_.get(), out.data() + done, out.size() - done,
                       static_cast<off_t>(offset + done));
      });
      if (got < 0) {
        return ErrnoStatus(errno, "read", path_);
      }
      if (got == 0) {
        return absl::OutOfRangeError(absl::StrCat("read '", path_, "': wanted ", out.size(),
                                                  " bytes at offset ", offset,
                                                  ", the file ends after ", done));
      }
      done += static_cast<size_t>(got);
    }
    return absl::OkStatus();
  }

  absl::Status WriteAt(uint64_t offset, std::span<const std::byte> data) override {
    HF_RETURN_IF_ERROR(CheckRange("write", path_, offset, data.size()));
    size_t done = 0;
    while (done < data.size()) {
      const ssize_t put = RetryInterrupted([&] {
        return ::pwrite(fd_.get(), data.data() + done, data.size() - done,
                        static_cast<off_t>(offset + done));
      });
      if (put < 0) {
        return ErrnoStatus(errno, "write", path_);
      }
      if (put == 0) {
        return ErrnoStatus(EIO, "write", path_);
      }
      done += static_cast<size_t>(put);
    }
    return absl::OkStatus();
  }

  absl::Status Allocate(uint64_t offset, uint64_t bytes) override {
    HF_RETURN_IF_ERROR(CheckRange("allocate", path_, offset, bytes));
    // tmpfs gives back what it got when a signal comes in between, so under a profiler's timer a
    // large request would never end: ask for less at a time whenever that happens.
    constexpr uint64_t kPieceBytesMin = 2 * kMiB;
    uint64_t piece = bytes;
    for (uint64_t done = 0; done < bytes;) {
      const uint64_t now = std::min(piece, bytes - done);
      if (::fallocate(fd_.get(), 0, static_cast<off_t>(offset + done), static_cast<off_t>(now)) ==
          0) {
        done += now;
      } else if (errno == EINTR) {
        piece = std::max(piece / 2, kPieceBytesMin);
      } else if (errno == EOPNOTSUPP) {
        return NoAllocate(path_);
      } else {
        return ErrnoStatus(errno, "allocate", path_);
      }
    }
    return absl::OkStatus();
  }

  absl::Status Truncate(uint64_t bytes) override {
    HF_RETURN_IF_ERROR(CheckRange("truncate", path_, bytes, 0));
    if (RetryInterrupted([&] { return ::ftruncate(fd_.get(), static_cast<off_t>(bytes)); }) != 0) {
      return ErrnoStatus(errno, "truncate", path_);
    }
    return absl::OkStatus();
  }

  // Syncs are not repeated: after a failed one the kernel may have dropped the dirty pages and
  // marked them clean.
  absl::Status SyncData() override {
    return ::fdatasync(fd_.get()) == 0 ? absl::OkStatus() : ErrnoStatus(errno, "fdatasync", path_);
  }
  absl::Status Sync() override {
    return ::fsync(fd_.get()) == 0 ? absl::OkStatus() : ErrnoStatus(errno, "fsync", path_);
  }

  absl::StatusOr<FileInfo> Info() override {
    struct statx st = {};
    if (AskInfo(fd_.get(), "", st) != 0) {
      return ErrnoStatus(errno, "stat", path_);
    }
    return ToFileInfo(st);
  }

  absl::Status SetOwner(uint32_t uid, uint32_t gid) override {
    return ::fchown(fd_.get(), uid, gid) == 0 ? absl::OkStatus()
                                              : ErrnoStatus(errno, "set owner", path_);
  }
  absl::Status SetMode(uint32_t mode) override {
    return ::fchmod(fd_.get(), mode) == 0 ? absl::OkStatus()
                                          : ErrnoStatus(errno, "set mode", path_);
  }

  absl::StatusOr<DirectAlignment> Alignment() override {
    if (!direct_) {
      return absl::UnimplementedError(
          absl::StrCat("alignment of '", path_, "': it was not opened for direct I/O"));
    }
    struct statx st = {};
    if (::statx(fd_.get(), "", AT_EMPTY_PATH, STATX_BASIC_STATS | STATX_DIOALIGN, &st) != 0) {
      return ErrnoStatus(errno, "statx", path_);
    }
    if ((st.stx_mask & STATX_DIOALIGN) == 0) {  // a kernel, or a file system, that does not say
      const uint32_t safe = std::max<uint32_t>(4096, st.stx_blksize);
      return DirectAlignment{safe, safe};
    }
    if (st.stx_dio_mem_align == 0 || st.stx_dio_offset_align == 0) {
      return absl::UnimplementedError(
          absl::StrCat("alignment of '", path_, "': this file cannot do direct I/O"));
    }
    return DirectAlignment{st.stx_dio_mem_align, st.stx_dio_offset_align};
  }

  absl::StatusOr<bool> NobodyElseHasIt() override {
    if (::fcntl(fd_.get(), F_SETLEASE, F_WRLCK) != 0) {
      // EAGAIN: somebody has it. EINVAL, EACCES: no leases on this file system, or not for us.
      return errno == EAGAIN || errno == EINVAL || errno == EACCES || errno == EOPNOTSUPP
                 ? absl::StatusOr<bool>(false)
                 : ErrnoStatus(errno, "lease", path_);
    }
    return ::fcntl(fd_.get(), F_SETLEASE, F_UNLCK) == 0
               ? absl::StatusOr<bool>(true)
               : ErrnoStatus(errno, "give back the lease of", path_);
  }

 private:
  UniqueFd fd_;
  std::string path_;
  bool direct_;
};

}  // namespace

std::unique_ptr<File> NewPosixFile(UniqueFd fd, std::string path, bool direct) {
  return std::make_unique<PosixFile>(std::move(fd), std::move(path), direct);
}

}  // namespace holdfast
