// A file system in memory that misbehaves on demand: for tests of every commit path.
//
// It keeps, per file and per directory, what is durable and what is only visible. Crash() drops
// everything that was not synced: file data since its last Sync/SyncData, directory entries
// (creations, renames, links, unlinks) since the directory's last SyncDirectory. Faults are told by
// rule. A write that is told to fail leaves its first half; after a sync that was told to fail,
// later ones of that file say OK and make nothing durable, as kernels do. Only "/" exists at first.
// Thread-safe.
//
//   FaultEnv env;
//   env.FailCall(7, ENOSPC);          // the 7th call from now fails
//   env.CrashAtCall(n);               // call n and all after it fail, then Crash() is the reboot
//   for (int n = 1; n <= env.calls(); ++n) { … one run per crash point … }
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/env.h"

namespace holdfast {

struct FaultState;

class FaultEnv : public Env {
 public:
  enum class Durability {
    kSyncedOnly,  // a disk: Crash() keeps what was synced
    kNone,        // tmpfs across a reboot: Crash() loses all; KillProcess() keeps all
  };
  explicit FaultEnv(Durability durability = Durability::kSyncedOnly);
  ~FaultEnv() override;

  // How many files were open at once, at most, since this was asked last; and how many are.
  int TakeMostOpenFiles();
  int open_files() const;
  // Number of calls so far that could fail (opens, reads, writes, syncs, renames …).
  int calls() const;
  // "operation path" of every call since, in order: what a test of an order compares.
  void RecordCalls();
  std::vector<std::string> TakeCalls();
  void FailCall(int nth_from_now, int error);
  // Calls whose "operation path" ("write /a/b", "rename /a/b.tmp /a/b"; the operation as in Env's
  // errors) contains the text fail with `error` until cleared. error 0 clears.
  void FailMatching(const std::string& text, int error);
  // Calls whose "operation path" contains the text do not return until they are released (or the
  // process ends): a mount that hangs. Other calls go on.
  void StallMatching(const std::string& text);
  void ReleaseStalled(const std::string& text);
  // Waits until that many calls are stalled; false if they are not within the time.
  bool WaitForStalled(int calls, std::chrono::milliseconds at_most);
  // The nth call from now and all later ones fail with EIO until Crash() or KillProcess().
  void CrashAtCall(int nth_from_now);
  // Power loss: unsynced data and entries vanish, open files go stale, mappings come loose, locks
  // are free, faults are cleared.
  void Crash();
  // The process dies, the kernel lives: all that was written stays, open files go stale, locks are
  // free, faults are cleared. Mappings keep showing the file, as those of another process do.
  void KillProcess();
  // Flips one bit of what a file holds, durable and visible.
  absl::Status FlipBit(const std::string& path, uint64_t byte_offset, int bit);
  void SetBytesTotal(uint64_t bytes);  // the file system's size: writes beyond it fail with ENOSPC

  // What the file system can do. At first: hard links, renames without replacing, leases, room
  // reserved beforehand, direct I/O with an alignment of 512; "ext4" (or "tmpfs") on device 1.
  void SetHardLinks(bool has);
  void SetRenameNoReplace(bool has);
  void SetLeases(bool has);
  void SetAllocate(bool has);
  void SetDirectAlignment(uint32_t bytes);  // 0: no direct I/O
  void SetFilesystemType(const std::string& type);
  // A new directory has the inode number of the one that was removed last, as on ext4. Without
  // birth times (as on many network file systems) nothing tells the two apart.
  void ReuseDirectoryNumbers(bool has_birth_times);
  // As if something else were mounted there; "": everywhere.
  void SetDevice(uint64_t device, const std::string& below = "");
  // What SetStriping was called with, when the type is "lustre".
  std::vector<std::pair<std::string, Striping>> stripings() const;

  using Env::List;
  using Env::Open;
  absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode,
                                             OpenOptions options) override;
  absl::StatusOr<std::unique_ptr<Mapping>> Map(File& file, uint64_t offset, uint64_t bytes,
                                               bool writable) override;
  absl::Status Populate(Mapping& mapping, uint64_t offset, uint64_t bytes) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status RenameNoReplace(const std::string& from, const std::string& to) override;
  absl::Status Link(const std::string& from, const std::string& to) override;
  absl::Status Unlink(const std::string& path) override;
  absl::Status SyncDirectory(const std::string& path) override;
  absl::Status CreateDirectory(const std::string& path, uint32_t mode) override;
  absl::Status CreateDirectories(const std::string& path, uint32_t mode) override;
  absl::Status RemoveDirectory(const std::string& path) override;
  absl::Status SetDirectoryAccess(const std::string& path, uint32_t uid, uint32_t gid,
                                  uint32_t mode) override;
  absl::Status SetStriping(const std::string& directory, const Striping& striping) override;
  absl::StatusOr<std::vector<std::string>> List(const std::string& directory,
                                                size_t names_max) override;
  absl::StatusOr<FileInfo> Info(const std::string& path) override;
  absl::StatusOr<FilesystemInfo> Filesystem(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<FileLock>> Lock(const std::string& path) override;

 private:
  std::shared_ptr<FaultState> state_;
};

}  // namespace holdfast
