// The contract that every tier fulfils; one conformance suite (tests/tiers/tier_conformance.h) runs
// against each.
//
// A tier holds copies. A copy appears whole (Publish is atomic: before it, nobody sees it; after
// it, image and record are complete), never changes, and disappears whole (record first, bytes
// later). Nothing but sealed copies is ever listed or read. Calls block on I/O and are made from
// worker threads; a tier is thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/ids.h"

namespace holdfast {

// One training run, and whose files its copies are.
struct JobIdentity {
  JobUuid job;
  std::string name;
  uint32_t uid = 0;
  uint32_t gid = 0;
  bool operator==(const JobIdentity&) const = default;
};

// A copy to be made.
struct NewCopy {
  ShardId id;
  std::string job_name;
  uint32_t world_size = 0;
  uint64_t image_bytes = 0;
  uint32_t uid = 0;  // the job's owner, for tiers whose files people look at
  uint32_t gid = 0;
};

struct CopyInfo {
  ShardId id;
  uint32_t world_size = 0;
  uint64_t image_bytes = 0;
  int64_t sealed_unix_ms = 0;
  std::string location;  // for people: slot or path
};

// An open copy. While it lives, its bytes stay; a tier that cannot promise that (the file was taken
// away by force) makes Confirm fail.
class CopyReader {
 public:
  virtual ~CopyReader() = default;
  virtual const CopyInfo& info() const = 0;
  virtual absl::StatusOr<std::string> ReadRecord() = 0;  // the record file's bytes
  virtual absl::Status ReadAt(uint64_t offset, std::span<std::byte> out) = 0;
  // After the last byte: OK if all that was read belonged to this copy's filling.
  virtual absl::Status Confirm() = 0;
};

// A copy that is not yet one. Destroyed without Publish, it leaves nothing behind.
class CopyWriter {
 public:
  virtual ~CopyWriter() = default;
  virtual absl::Status WriteAt(uint64_t offset, std::span<const std::byte> data) = 0;
  // Makes the copy visible, with this record. AlreadyExists if the shard has one here already.
  virtual absl::Status Publish(std::string_view record_bytes) = 0;
};

struct UnreadableCopy {
  std::string location;
  absl::Status why;  // torn, newer version, foreign
};
struct Inventory {
  std::vector<CopyInfo> copies;
  std::vector<UnreadableCopy> unreadable;  // reported, left alone
};

class Tier {
 public:
  virtual ~Tier() = default;
  virtual std::string_view kind() const = 0;  // memory, nvme, peer, remote
  virtual absl::StatusOr<std::unique_ptr<CopyWriter>> Create(const NewCopy& copy) = 0;
  // NotFound if there is none; DataLoss or FailedPrecondition if what is there cannot be read.
  virtual absl::StatusOr<std::unique_ptr<CopyReader>> Open(const ShardId& id) = 0;
  virtual absl::Status Remove(const ShardId& id) = 0;  // NotFound if there is none
  virtual absl::StatusOr<Inventory> Scan() = 0;
};

}  // namespace holdfast
