// The open files, mappings and locks of FaultEnv.
#pragma once

#include <memory>
#include <string>

#include "base/env.h"
#include "base/fault_state.h"
#include "base/fault_tree.h"

namespace holdfast {

FileInfo FaultInfo(FaultInode& inode, uint64_t device);

class FaultFile : public File {
 public:
  FaultFile(std::shared_ptr<FaultState> state, std::shared_ptr<FaultInode> inode, std::string path,
            uint64_t epoch, bool writable, uint32_t direct_alignment);
  ~FaultFile() override;
  FaultFile(const FaultFile&) = delete;
  FaultFile& operator=(const FaultFile&) = delete;

  int fd() const override;  // -1 when stale
  const std::string& path() const override { return path_; }
  absl::Status ReadAt(uint64_t offset, std::span<std::byte> out) override;
  absl::Status WriteAt(uint64_t offset, std::span<const std::byte> data) override;
  absl::Status Allocate(uint64_t offset, uint64_t bytes) override;
  absl::Status Truncate(uint64_t bytes) override;
  absl::Status SyncData() override { return SyncAs("fdatasync"); }
  absl::Status Sync() override { return SyncAs("fsync"); }
  absl::StatusOr<FileInfo> Info() override;
  absl::Status SetOwner(uint32_t uid, uint32_t gid) override;
  absl::Status SetMode(uint32_t mode) override;
  absl::StatusOr<DirectAlignment> Alignment() override;
  absl::StatusOr<bool> NobodyElseHasIt() override;

  absl::StatusOr<std::unique_ptr<Mapping>> Map(uint64_t offset, uint64_t bytes, bool writable);

 private:
  bool Usable(bool for_writing) const REQUIRES(state_->mutex);
  absl::Status Begin(std::string_view operation, bool for_writing) REQUIRES(state_->mutex);
  absl::Status SyncAs(std::string_view operation);
  absl::Status CheckAligned(std::string_view operation, uint64_t offset,
                            std::span<const std::byte> buffer) const;

  const std::shared_ptr<FaultState> state_;
  const std::shared_ptr<FaultInode> inode_;
  const std::string path_;
  const uint64_t epoch_;
  const bool writable_;
  const uint32_t direct_alignment_;  // 0: buffered
};

class FaultMapping : public Mapping {
 public:
  FaultMapping(std::shared_ptr<FaultState> state, std::shared_ptr<FaultInode> inode,
               std::string path, std::byte* data, uint64_t offset, uint64_t bytes);
  ~FaultMapping() override;
  FaultMapping(const FaultMapping&) = delete;
  FaultMapping& operator=(const FaultMapping&) = delete;

  std::byte* data() const override { return data_; }
  uint64_t bytes() const override { return bytes_; }

  absl::Status Populate(uint64_t offset, uint64_t bytes);

 private:
  const std::shared_ptr<FaultState> state_;
  const std::shared_ptr<FaultInode> inode_;
  const std::shared_ptr<FaultContent> content_;
  const std::string path_;
  std::byte* const data_;
  const uint64_t file_offset_;
  const uint64_t bytes_;
};

class FaultLock : public FileLock {
 public:
  FaultLock(std::shared_ptr<FaultState> state, std::shared_ptr<FaultInode> inode, uint64_t epoch);
  ~FaultLock() override;

 private:
  const std::shared_ptr<FaultState> state_;
  const std::shared_ptr<FaultInode> inode_;
  const uint64_t epoch_;
};

}  // namespace holdfast
