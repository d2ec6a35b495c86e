// What this node reads from files in the remote tier while its ranks are brought back, kept at hand
// for other nodes that need the same bytes: so a cold start reads each of them once
// (docs/protocol.md §20).
//
//   auto file = std::make_shared<PassedOnFile>(slots, slot, generation, places, memory);
//   passed_on.Begin(shard, file);
//   file->Arrived(offset, bytes);                      // whoever reads, as it comes
//   file->End(true);                                   // the slot is sealed
//   …
//   HF_ASSIGN_OR_RETURN(auto file, passed_on.Await(shard, until, gone));   // others
//   HF_RETURN_IF_ERROR(file->Read(offset, into, until, gone));
//
// Owner: the daemon's DrainContext. Thread-safe. Nothing is held for those who read: what they get
// of a slot that has been given away meanwhile is an error, never other bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/ids.h"
#include "base/mutex.h"
#include "tiers/image/kept.h"
#include "tiers/memory/slot_store.h"
#include "tiers/transfer/revocable_memory.h"

namespace holdfast {

// One rank's file.
class PassedOnFile {
 public:
  // `places`: where the file's bytes lie in the slot (source 0); its header lies nowhere.
  PassedOnFile(std::shared_ptr<SlotStore> slots, SlotId slot, Generation generation,
               std::shared_ptr<const ImageMap> places, std::shared_ptr<RevocableMemory> memory);

  uint64_t bytes() const { return places_->image_bytes; }
  // It may still be read: it arrives, or the slot has it.
  bool lives(const ShardId& shard) EXCLUDES(mutex_);
  // That part of the file is in the slot.
  void Arrived(uint64_t offset, uint64_t bytes) EXCLUDES(mutex_);
  // Nothing more arrives. `sealed`: the slot has the whole shard, and its record is published.
  void End(bool sealed) EXCLUDES(mutex_);
  // Waits until the bytes have arrived. Unavailable: they have not by then, or never will, or are
  // gone again; Cancelled: `gone` said so. No digest has been looked at.
  absl::Status Read(uint64_t offset, std::span<std::byte> out, MonotonicTime until,
                    const std::function<bool()>& gone) EXCLUDES(mutex_);

 private:
  enum class State { kArriving, kSealed, kGone };

  absl::StatusOr<State> Wait(uint64_t offset, uint64_t bytes, MonotonicTime until,
                             const std::function<bool()>& gone) EXCLUDES(mutex_);
  bool Has(uint64_t offset, uint64_t bytes) const REQUIRES(mutex_);
  absl::Status FromMemory(uint64_t offset, std::span<std::byte> out) EXCLUDES(mutex_);
  absl::Status FromSlot(uint64_t offset, std::span<std::byte> out);

  const std::shared_ptr<SlotStore> slots_;
  const SlotId slot_;
  const Generation generation_;
  const std::shared_ptr<const ImageMap> places_;
  Mutex mutex_;
  CondVar changed_;
  State state_ GUARDED_BY(mutex_) = State::kArriving;
  std::shared_ptr<RevocableMemory> memory_ GUARDED_BY(mutex_);
  std::vector<uint32_t> arrived_ GUARDED_BY(mutex_);  // bytes, of each kPartBytes of the file
};

class PassedOn {
 public:
  void Begin(const ShardId& shard, std::shared_ptr<PassedOnFile> file) EXCLUDES(mutex_);
  // The rank's file, as soon as somebody reads it here; Unavailable when nobody does by then.
  absl::StatusOr<std::shared_ptr<PassedOnFile>> Await(const ShardId& shard, MonotonicTime until,
                                                      const std::function<bool()>& gone)
      EXCLUDES(mutex_);

 private:
  // Of each shard the last one: their slots say what they are worth.
  static constexpr size_t kKnownMax = 256;
  Mutex mutex_;
  CondVar changed_;
  std::map<ShardId, std::shared_ptr<PassedOnFile>> files_ GUARDED_BY(mutex_);
  std::list<ShardId> order_ GUARDED_BY(mutex_);  // in which they began
};

}  // namespace holdfast
