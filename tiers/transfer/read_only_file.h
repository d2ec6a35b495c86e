// A File that is read and nothing else: what has no one file of its own underneath, since its bytes
// lie in several, or are opened when they are read. Never open for direct I/O.
//
// Thread-safe as what derives from it.
#pragma once

#include "base/env.h"

namespace holdfast {

class ReadOnlyFile : public File {
 public:
  absl::Status WriteAt(uint64_t offset, std::span<const std::byte> data) override;
  absl::Status Allocate(uint64_t offset, uint64_t bytes) override;
  absl::Status Truncate(uint64_t bytes) override;
  absl::Status SyncData() override;
  absl::Status Sync() override;
  absl::Status SetOwner(uint32_t uid, uint32_t gid) override;
  absl::Status SetMode(uint32_t mode) override;
  absl::StatusOr<DirectAlignment> Alignment() override;
  absl::StatusOr<bool> NobodyElseHasIt() override;

 private:
  absl::Status ReadOnly() const;
};

}  // namespace holdfast
