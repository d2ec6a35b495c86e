// The inodes of FaultEnv: what is visible, and what would be left after a power loss. Not
// thread-safe: FaultEnv holds its lock around every call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace holdfast {

struct FaultUsage {
  uint64_t bytes = 0;  // sizes of all contents of the file system, unlinked but open ones included
};

// A file's visible bytes. They move into a memfd when somebody wants a descriptor or a mapping, so
// that reads, writes and mappings share the same memory as they do in a kernel.
class FaultContent {
 public:
  FaultContent(std::shared_ptr<FaultUsage> usage, std::string bytes);
  ~FaultContent();
  FaultContent(const FaultContent&) = delete;
  FaultContent& operator=(const FaultContent&) = delete;

  uint64_t Size();
  // The range must lie within the size.
  void Read(uint64_t offset, std::span<std::byte> out);
  void Write(uint64_t offset, std::span<const std::byte> data);  // grows as needed
  void Resize(uint64_t bytes);
  std::string Snapshot();
  int Fd();  // -1 when the process has no descriptors left

 private:
  void Account();

  std::shared_ptr<FaultUsage> usage_;
  uint64_t accounted_ = 0;
  std::string bytes_;  // unless fd_ is valid
  UniqueFd fd_;
};

struct FaultInode {
  using Entries = std::map<std::string, std::shared_ptr<FaultInode>>;

  uint64_t number = 0;
  uint64_t born_ns = 0;
  uint32_t mode = 0;
  uint32_t links = 0;
  uint64_t lock_epoch = 0;  // the epoch in which somebody holds the lock
  uint32_t uid = 0;
  uint32_t gid = 0;
  // Who has it open, in the epoch that they opened it in; and mapped, whichever process.
  uint64_t opens_epoch = 0;
  int opens = 0;
  int mappings = 0;

  // A file. After a failed sync the kernel may call the lost pages clean, so later ones report
  // success and make nothing durable.
  std::shared_ptr<FaultContent> content;
  std::string durable;
  bool sync_failed = false;

  // A directory.
  Entries entries;
  Entries durable_entries;

  bool is_directory() const;
  void SetAccess(uint32_t new_uid, uint32_t new_gid, uint32_t new_mode);
};

// The file system below a root: lookups give errno values, 0 for success.
class FaultTree {
 public:
  FaultTree();

  struct Place {
    std::shared_ptr<FaultInode> directory;
    std::string name;
    std::shared_ptr<FaultInode> inode;  // null if there is none of that name
  };
  int Find(const std::string& path, std::shared_ptr<FaultInode>& inode) const;
  int FindPlace(const std::string& path, Place& place) const;  // the root has no place: EBUSY

  void CreateFile(Place& place);
  void CreateDirectory(Place& place, uint32_t mode);
  void RemoveDirectory(const Place& place);
  int Rename(const Place& from, const Place& to);

  void LosePower();  // every file and directory becomes what it durably is
  void LoseAll();

  FaultUsage& usage() { return *usage_; }
  bool reuses_numbers = false;  // a new directory has the number of the one that was removed last
  bool has_birth_times = true;

 private:
  void Restore(FaultInode& inode, std::map<const FaultInode*, bool>& visited);

  std::shared_ptr<FaultUsage> usage_;
  std::shared_ptr<FaultInode> root_;
  uint64_t next_number_ = 2;
  uint64_t born_ = 0;
  uint64_t freed_number_ = 0;
};

}  // namespace holdfast
