// Env::System: thin over the system calls. What it adds is what every caller would need: whole
// ranges, EINTR, messages, and refusing what cannot be meant.
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/dying.h"
#include "base/env.h"
#include "base/env_checks.h"
#include "base/filesystem.h"
#include "base/huge_pages.h"
#include "base/populate.h"
#include "base/posix_file.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "base/units.h"

namespace holdfast {
namespace {

class PosixMapping : public Mapping {
 public:
  PosixMapping(std::byte* data, uint64_t bytes, uint64_t file_offset, bool writable,
               std::string path)
      : data_(data),
        bytes_(bytes),
        file_offset_(file_offset),
        writable_(writable),
        path_(std::move(path)) {}
  ~PosixMapping() override { ::munmap(data_, static_cast<size_t>(bytes_)); }
  PosixMapping(const PosixMapping&) = delete;
  PosixMapping& operator=(const PosixMapping&) = delete;

  std::byte* data() const override { return data_; }
  uint64_t bytes() const override { return bytes_; }
  uint64_t file_offset() const { return file_offset_; }
  bool writable() const { return writable_; }
  const std::string& path() const { return path_; }

 private:
  std::byte* data_;
  uint64_t bytes_;
  uint64_t file_offset_;
  bool writable_;
  std::string path_;
};

class PosixFileLock : public FileLock {
 public:
  explicit PosixFileLock(UniqueFd fd) : fd_(std::move(fd)) {}

 private:
  UniqueFd fd_;
};

absl::Status LockHeld(int fd, const std::string& path) {
  char text[24] = {};
  const ssize_t got = ::pread(fd, text, sizeof(text) - 1, 0);
  int pid = 0;
  std::string holder = "another process";
  if (got > 0 && absl::SimpleAtoi(absl::string_view(text, static_cast<size_t>(got)), &pid) &&
      pid > 0) {
    struct stat st = {};
    if (::fstat(fd, &st) == 0 && FindDyingHolder(pid, st.st_ino)) {
      return absl::UnavailableError(
          absl::StrCat("lock '", path, "': held by pid ", pid,
                       ", which was killed and hangs in a call; it is free when that call returns: "
                       "look at the mount or drive that does not answer ('cat /proc/",
                       pid, "/task/*/stack')"));
    }
    holder = pid == ::getpid() ? absl::StrCat("this process (pid ", pid, ")")
                               : absl::StrCat("pid ", pid);
  }
  return absl::UnavailableError(absl::StrCat("lock '", path, "': held by ", holder,
                                             "; stop it first, or use another directory"));
}

// The pid is for people and for the message above; the lock holds without it, on a full file system
// for example. Written over the old one, whose block is there already, and cut to length after.
void WritePid(int fd) {
  const std::string pid = absl::StrCat(::getpid(), "\n");
  const bool written = ::pwrite(fd, pid.data(), pid.size(), 0) == static_cast<ssize_t>(pid.size());
  // With neither written nor cut, an old pid may stay: then the message names a process that is
  // gone.
  [[maybe_unused]] const int cut = ::ftruncate(fd, written ? static_cast<off_t>(pid.size()) : 0);
}

class PosixEnv : public Env {
 public:
  using Env::List;
  using Env::Open;

  absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode,
                                             OpenOptions options) override {
    HF_RETURN_IF_ERROR(CheckPath("open", path));
    // O_NONBLOCK: a FIFO that somebody put there must not hang us; it means nothing for regular
    // files.
    int flags = O_CLOEXEC | O_NOCTTY | O_NONBLOCK;
    std::string_view operation = "open";
    switch (mode) {
      case OpenMode::kRead:
        flags |= O_RDONLY;
        break;
      case OpenMode::kReadWrite:
        flags |= O_RDWR;
        break;
      case OpenMode::kCreateExclusive:
        flags |= O_RDWR | O_CREAT | O_EXCL;
        operation = "create";
        break;
    }
    flags |= (options.direct ? O_DIRECT : 0) | (options.no_symlink ? O_NOFOLLOW : 0);
    UniqueFd fd(RetryInterrupted([&] { return ::open(path.c_str(), flags, 0600); }));
    if (!fd.valid() && errno == EINVAL && options.direct) {
      // Some file systems refuse the flag only after they made the file.
      if (mode == OpenMode::kCreateExclusive) {
        ::unlink(path.c_str());
      }
      return NoDirect(operation, path);
    }
    if (!fd.valid() && errno == ELOOP && options.no_symlink) {
      return IsSymlink(operation, path);
    }
    if (!fd.valid()) {
      return ErrnoStatus(errno, operation, path);
    }
    struct stat st = {};
    if (::fstat(fd.get(), &st) != 0) {
      return ErrnoStatus(errno, "stat", path);
    }
    if (!S_ISREG(st.st_mode)) {
      return absl::FailedPreconditionError(
          absl::StrCat(ToAbsl(operation), " '", path, "': not a regular file"));
    }
    return NewPosixFile(std::move(fd), path, options.direct);
  }

  absl::StatusOr<std::unique_ptr<Mapping>> Map(File& file, uint64_t offset, uint64_t bytes,
                                               bool writable) override {
    HF_RETURN_IF_ERROR(CheckRange("map", file.path(), offset, bytes));
    HF_ASSIGN_OR_RETURN(const FileInfo info, file.Info());
    if (bytes == 0 || offset > info.bytes || bytes > info.bytes - offset) {
      return absl::OutOfRangeError(absl::StrCat("map '", file.path(), "': ", bytes,
                                                " bytes at offset ", offset, " of a file of ",
                                                info.bytes, " bytes"));
    }
    // Where huge pages can be, if there is any. (No room for that: then wherever it fits.)
    std::byte* const at = offset % kHugePageBytes == 0 && bytes >= kHugePageBytes
                              ? ReserveAligned(static_cast<size_t>(bytes))
                              : nullptr;
    void* const data = ::mmap(
        at, static_cast<size_t>(bytes), writable ? PROT_READ | PROT_WRITE : PROT_READ,
        at != nullptr ? MAP_SHARED | MAP_FIXED : MAP_SHARED, file.fd(), static_cast<off_t>(offset));
    if (data == MAP_FAILED) {
      const int error = errno;
      if (at != nullptr) {
        ::munmap(at, static_cast<size_t>(bytes));
      }
      return ErrnoStatus(error, "map", file.path());
    }
    return std::make_unique<PosixMapping>(static_cast<std::byte*>(data), bytes, offset, writable,
                                          file.path());
  }

  absl::Status Populate(Mapping& mapping, uint64_t offset, uint64_t bytes) override {
    const auto* posix = dynamic_cast<const PosixMapping*>(&mapping);
    if (posix == nullptr) {
      return absl::InvalidArgumentError("populate: the mapping is not one of this Env's");
    }
    if (offset > posix->bytes() || bytes > posix->bytes() - offset) {
      return absl::OutOfRangeError(absl::StrCat("populate '", posix->path(), "': ", bytes,
                                                " bytes at offset ", offset, " of a mapping of ",
                                                posix->bytes(), " bytes"));
    }
    // First: what then lies on huge pages is mapped at once.
    if (posix->writable()) {
      huge_pages_.Use(posix->data() + offset, static_cast<size_t>(bytes));
    }
    const int error = PopulatePages(posix->data() + offset, static_cast<size_t>(bytes),
                                    posix->writable(), PopulateMethod::kBest);
    return error == 0 ? absl::OkStatus() : PopulateFailed(*posix, offset + bytes, error);
  }

  absl::Status Rename(const std::string& from, const std::string& to) override {
    HF_RETURN_IF_ERROR(CheckPath("rename", from));
    HF_RETURN_IF_ERROR(CheckPath("rename", to));
    if (::rename(from.c_str(), to.c_str()) != 0) {
      return ErrnoStatus(errno, "rename", TwoPaths(from, to));
    }
    return absl::OkStatus();
  }

  absl::Status RenameNoReplace(const std::string& from, const std::string& to) override {
    HF_RETURN_IF_ERROR(CheckPath("rename", from));
    HF_RETURN_IF_ERROR(CheckPath("rename", to));
    if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) {
      return absl::OkStatus();
    }
    if (errno == EINVAL || errno == ENOSYS) {
      return absl::UnimplementedError(absl::StrCat(
          "rename '", from, "' to '", to, "': this file system cannot rename without replacing"));
    }
    return ErrnoStatus(errno, "rename", TwoPaths(from, to));
  }

  absl::Status Link(const std::string& from, const std::string& to) override {
    HF_RETURN_IF_ERROR(CheckPath("link", from));
    HF_RETURN_IF_ERROR(CheckPath("link", to));
    if (::link(from.c_str(), to.c_str()) == 0) {
      return absl::OkStatus();
    }
    if (errno == EOPNOTSUPP || errno == ENOSYS) {
      return absl::UnimplementedError(
          absl::StrCat("link '", from, "' to '", to, "': this file system has no hard links"));
    }
    return ErrnoStatus(errno, "link", TwoPaths(from, to));
  }

  absl::Status Unlink(const std::string& path) override {
    HF_RETURN_IF_ERROR(CheckPath("unlink", path));
    return ::unlink(path.c_str()) == 0 ? absl::OkStatus() : ErrnoStatus(errno, "unlink", path);
  }

  absl::Status SyncDirectory(const std::string& path) override {
    HF_RETURN_IF_ERROR(CheckPath("sync directory", path));
    const UniqueFd fd(
        RetryInterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
    if (!fd.valid()) {
      return ErrnoStatus(errno, "open directory", path);
    }
    return ::fsync(fd.get()) == 0 ? absl::OkStatus() : ErrnoStatus(errno, "sync directory", path);
  }

  absl::Status CreateDirectory(const std::string& path, uint32_t mode) override {
    HF_RETURN_IF_ERROR(CheckPath("create directory", path));
    return ::mkdir(path.c_str(), mode) == 0 ? absl::OkStatus()
                                            : ErrnoStatus(errno, "create directory", path);
  }

  absl::Status CreateDirectories(const std::string& path, uint32_t mode) override {
    HF_RETURN_IF_ERROR(CheckPath("create directory", path));
    for (size_t end = 1; end <= path.size(); ++end) {
      if ((end < path.size() && path[end] != '/') || path[end - 1] == '/') {
        continue;
      }
      const std::string prefix = path.substr(0, end);
      const absl::Status made = CreateDirectory(prefix, mode);
      if (made.ok()) {
        HF_RETURN_IF_ERROR(SyncDirectory(ParentDirectory(prefix)));
        continue;
      }
      // Whatever mkdir says about a parent (it may be read-only, or not ours to look at): that it
      // is there is enough.
      struct stat st = {};
      if (::stat(prefix.c_str(), &st) != 0) {
        return made;
      }
      if (!S_ISDIR(st.st_mode)) {
        return ErrnoStatus(ENOTDIR, "create directory", prefix);
      }
    }
    return absl::OkStatus();
  }

  absl::Status RemoveDirectory(const std::string& path) override {
    HF_RETURN_IF_ERROR(CheckPath("remove directory", path));
    return ::rmdir(path.c_str()) == 0 ? absl::OkStatus()
                                      : ErrnoStatus(errno, "remove directory", path);
  }

  absl::Status SetDirectoryAccess(const std::string& path, uint32_t uid, uint32_t gid,
                                  uint32_t mode) override {
    HF_RETURN_IF_ERROR(CheckPath("set access", path));
    const UniqueFd fd(RetryInterrupted(
        [&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); }));
    if (!fd.valid()) {
      return ErrnoStatus(errno, "open directory", path);
    }
    if ((uid != kKeepOwner || gid != kKeepOwner) && ::fchown(fd.get(), uid, gid) != 0) {
      return ErrnoStatus(errno, "set owner", path);
    }
    return ::fchmod(fd.get(), mode) == 0 ? absl::OkStatus() : ErrnoStatus(errno, "set mode", path);
  }

  absl::Status SetStriping(const std::string& directory, const Striping& striping) override {
    HF_RETURN_IF_ERROR(CheckPath("set striping", directory));
    const std::string value = EncodeLustreStriping(striping);
    if (::setxattr(directory.c_str(), "lustre.lov", value.data(), value.size(), 0) == 0) {
      return absl::OkStatus();
    }
    return errno == EOPNOTSUPP ? absl::UnimplementedError(absl::StrCat(
                                     "set striping '", directory, "': not a Lustre file system"))
                               : ErrnoStatus(errno, "set striping", directory);
  }

  absl::StatusOr<std::vector<std::string>> List(const std::string& directory,
                                                size_t names_max) override {
    HF_RETURN_IF_ERROR(CheckPath("list", directory));
    const std::unique_ptr<DIR, int (*)(DIR*)> dir(::opendir(directory.c_str()), ::closedir);
    if (dir == nullptr) {
      return ErrnoStatus(errno, "list", directory);
    }
    std::vector<std::string> names;
    for (;;) {
      errno = 0;
      const dirent* entry = ::readdir(dir.get());
      if (entry == nullptr) {
        break;
      }
      const std::string_view name = entry->d_name;
      if (name == "." || name == "..") {
        continue;
      }
      if (names.size() == names_max) {
        return TooManyNames(directory, names_max);
      }
      names.emplace_back(name);
    }
    if (errno != 0) {
      return ErrnoStatus(errno, "list", directory);
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  absl::StatusOr<FileInfo> Info(const std::string& path) override {
    HF_RETURN_IF_ERROR(CheckPath("stat", path));
    struct statx st = {};
    if (AskInfo(AT_FDCWD, path.c_str(), st) != 0) {
      return ErrnoStatus(errno, "stat", path);
    }
    return ToFileInfo(st);
  }

  absl::StatusOr<FilesystemInfo> Filesystem(const std::string& path) override {
    HF_RETURN_IF_ERROR(CheckPath("statfs", path));
    return AskFilesystem(path);
  }

  absl::StatusOr<std::unique_ptr<FileLock>> Lock(const std::string& path) override {
    HF_RETURN_IF_ERROR(CheckPath("lock", path));
    for (;;) {
      UniqueFd fd(RetryInterrupted([&] {
        return ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
      }));
      if (!fd.valid()) {
        return ErrnoStatus(errno, "lock", path);
      }
      if (RetryInterrupted([&] { return ::flock(fd.get(), LOCK_EX | LOCK_NB); }) != 0) {
        return errno == EWOULDBLOCK ? LockHeld(fd.get(), path) : ErrnoStatus(errno, "lock", path);
      }
      // Somebody may have removed the file between open and flock: then others lock a new one of
      // that name.
      struct stat ours = {};
      struct stat named = {};
      if (::fstat(fd.get(), &ours) != 0) {
        return ErrnoStatus(errno, "lock", path);
      }
      if (::lstat(path.c_str(), &named) != 0 || ours.st_ino != named.st_ino ||
          ours.st_dev != named.st_dev) {
        continue;
      }
      WritePid(fd.get());
      return std::make_unique<PosixFileLock>(std::move(fd));
    }
  }

 private:
  // The kernel says only that a page could not be had; why is worth a look.
  absl::Status PopulateFailed(const PosixMapping& mapping, uint64_t end, int error) {
    const uint64_t file_end = mapping.file_offset() + end;
    struct stat st = {};
    if (error == EHWPOISON) {
      return absl::DataLossError(
          absl::StrCat("populate '", mapping.path(), "': a page has a hardware memory error"));
    }
    if (error != EFAULT && error != ENOMEM) {
      return ErrnoStatus(error, "populate", mapping.path());
    }
    if (::stat(mapping.path().c_str(), &st) == 0 && static_cast<uint64_t>(st.st_size) < file_end) {
      return absl::DataLossError(
          absl::StrCat("populate '", mapping.path(), "': the file was cut short to ", st.st_size,
                       " bytes while it was in use; ", file_end, " are needed"));
    }
    const absl::StatusOr<FilesystemInfo> fs = Filesystem(ParentDirectory(mapping.path()));
    const std::string room =
        fs.ok() ? absl::StrCat("; ", fs->type, " has ", FormatBytes(fs->bytes_free), " of ",
                               FormatBytes(fs->bytes_total), " free")
                : "";
    return absl::ResourceExhaustedError(absl::StrCat(
        "populate '", mapping.path(), "': no room for its pages on the file system or in memory",
        room, "; make it larger or lower the budget"));
  }

  HugePages huge_pages_{*Clock::System()};
};

}  // namespace

Env* Env::System() {
  static PosixEnv env;
  return &env;
}

}  // namespace holdfast
