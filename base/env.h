// The only door to the file system. Nothing else calls open, rename, fsync and their like, so that
// FaultEnv (tests) can fail any call and forget what was not synced. Sockets, epoll and process
// calls stay with the runtimes that own them.
//
// Thread-safe. Paths are bytes; relative ones are refused. Every error carries operation, path and
// errno.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace holdfast {

struct FileInfo {
  uint64_t bytes = 0;
  uint64_t inode = 0;
  uint64_t links = 0;
  uint64_t device = 0;  // another one than before: another file system lies there
  uint32_t mode = 0;    // st_mode
  uint32_t uid = 0;
  uint32_t gid = 0;
  uint64_t born_ns = 0;  // when it was made: tells two apart that had one inode; 0: not known
};

struct FilesystemInfo {
  std::string type;  // "tmpfs", "ext4", "xfs", …; hex of f_type when unknown
  uint64_t bytes_total = 0;
  uint64_t bytes_free = 0;  // for an unprivileged user
  uint64_t block_bytes = 0;
  bool huge_pages = false;  // tmpfs mounted with huge=always or within_size/advise
};

enum class OpenMode {
  kRead,
  kReadWrite,
  kCreateExclusive
};  // the last: read-write, mode 0600, O_EXCL

struct OpenOptions {
  // O_DIRECT: data goes past the page cache, in ranges and buffers aligned as File::Alignment says.
  // Unimplemented where the file system has no such thing.
  bool direct = false;
  // FailedPrecondition when the name itself is a symbolic link (directories on the way may be).
  bool no_symlink = false;
};

// What direct reads and writes must be multiples of.
struct DirectAlignment {
  uint32_t memory_bytes = 0;  // the buffer's address
  uint32_t offset_bytes = 0;  // offset and length
};

// How a parallel file system (Lustre) spreads new files over its servers.
struct Striping {
  int32_t count = -1;  // -1: all of them
  uint32_t bytes = 0;  // a multiple of 64 KiB
};

inline constexpr uint32_t kKeepOwner = UINT32_MAX;
inline constexpr size_t kListNamesMax = size_t{1} << 20;

// An open file; closed by the destructor. Descriptors are O_CLOEXEC.
class File {
 public:
  virtual ~File() = default;
  virtual int fd() const = 0;
  virtual const std::string& path() const = 0;
  // Whole range or an error; a short file is OutOfRange.
  virtual absl::Status ReadAt(uint64_t offset, std::span<std::byte> out) = 0;
  virtual absl::Status WriteAt(uint64_t offset, std::span<const std::byte> data) = 0;
  virtual absl::Status Allocate(uint64_t offset,
                                uint64_t bytes) = 0;  // fallocate: extends the size
  virtual absl::Status Truncate(uint64_t bytes) = 0;
  virtual absl::Status SyncData() = 0;
  virtual absl::Status Sync() = 0;
  virtual absl::StatusOr<FileInfo> Info() = 0;
  // kKeepOwner leaves one as it is.
  virtual absl::Status SetOwner(uint32_t uid, uint32_t gid) = 0;
  virtual absl::Status SetMode(uint32_t mode) = 0;
  // Asked of the system for a file that was opened with `direct`; Unimplemented for others. Where
  // the kernel is too old to say (before 6.1): 4096, or the file system's block if that is larger.
  virtual absl::StatusOr<DirectAlignment> Alignment() = 0;
  // Whether nobody but this File has the file open or mapped, in any process: a write lease
  // (F_SETLEASE) was granted and given back. False also where leases are not to be had. Says
  // nothing about hard links, nor about who opens it next.
  virtual absl::StatusOr<bool> NobodyElseHasIt() = 0;
};

// A shared mapping of a file; unmapped by the destructor. Touching it may fault when the file is
// cut short: users hold a FaultGuard (base/fault_guard.h).
class Mapping {
 public:
  virtual ~Mapping() = default;
  virtual std::byte* data() const = 0;
  virtual uint64_t bytes() const = 0;
};

// An exclusive advisory lock on a file, held until destroyed (flock; freed by the kernel with the
// process).
class FileLock {
 public:
  virtual ~FileLock() = default;
};

class Env {
 public:
  virtual ~Env() = default;
  static Env* System();

  virtual absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode,
                                                     OpenOptions options) = 0;
  absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode) {
    return Open(path, mode, OpenOptions{});
  }
  virtual absl::StatusOr<std::unique_ptr<Mapping>> Map(File& file, uint64_t offset, uint64_t bytes,
                                                       bool writable) = 0;
  // Makes the range's pages present, in one blocking call (MADV_POPULATE_WRITE, or touching pages
  // where the kernel lacks it), and leaves what they hold as it is; those of a writable mapping on
  // huge pages, where the kernel has them at hand (base/huge_pages.h). ResourceExhausted when the
  // file system has no room, DataLoss when the file was cut short; never SIGBUS. After an error the
  // mapping is of no more use.
  virtual absl::Status Populate(Mapping& mapping, uint64_t offset, uint64_t bytes) = 0;

  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;  // replaces
  virtual absl::Status RenameNoReplace(const std::string& from, const std::string& to) = 0;
  virtual absl::Status Link(const std::string& from,
                            const std::string& to) = 0;  // AlreadyExists if there is one
  virtual absl::Status Unlink(const std::string& path) = 0;
  virtual absl::Status SyncDirectory(const std::string& path) = 0;
  // Modes are less the umask.
  virtual absl::Status CreateDirectory(const std::string& path,
                                       uint32_t mode) = 0;  // AlreadyExists if there is one
  // With its parents; OK if there is one. Those that it made are durable when it returns.
  virtual absl::Status CreateDirectories(const std::string& path, uint32_t mode) = 0;
  virtual absl::Status RemoveDirectory(const std::string& path) = 0;
  // Owner and mode (07777) of a directory; no symlink followed. kKeepOwner leaves one as it is.
  virtual absl::Status SetDirectoryAccess(const std::string& path, uint32_t uid, uint32_t gid,
                                          uint32_t mode) = 0;
  // How files that are made in the directory from now on are spread. Unimplemented but on Lustre.
  virtual absl::Status SetStriping(const std::string& directory, const Striping& striping) = 0;
  // Names, sorted. ResourceExhausted when there are more than `names_max`.
  virtual absl::StatusOr<std::vector<std::string>> List(const std::string& directory,
                                                        size_t names_max) = 0;
  absl::StatusOr<std::vector<std::string>> List(const std::string& directory) {
    return List(directory, kListNamesMax);
  }
  virtual absl::StatusOr<FileInfo> Info(const std::string& path) = 0;  // no symlink followed
  virtual absl::StatusOr<FilesystemInfo> Filesystem(const std::string& path) = 0;
  // Unavailable, naming the holder's pid if known, when another process has it.
  virtual absl::StatusOr<std::unique_ptr<FileLock>> Lock(const std::string& path) = 0;
};

// Whole-file conveniences over any Env.
// Text of a file of /proc or /sys, whose sizes say nothing; at most 1 MiB of it. Always the real
// system's.
absl::StatusOr<std::string> ReadKernelFile(const std::string& path);
// ResourceExhausted if the file is larger than `bytes_max`.
absl::StatusOr<std::string> ReadFile(Env& env, const std::string& path, uint64_t bytes_max,
                                     OpenOptions options = {});
// Atomically: `<path>.tmp` (replaced if a crash left one), data synced, renamed, directory synced.
absl::Status WriteFileAtomically(Env& env, const std::string& path, std::string_view data);
std::string JoinPath(std::string_view directory, std::string_view name);
std::string ParentDirectory(const std::string& path);

}  // namespace holdfast
