// The memory tier behind the contract that all tiers share: copies in slots, for whoever moves
// copies between tiers.
//
// It reads every sealed copy that its SlotStore knows, whoever published it. It makes, refills and
// deletes only slots with ids in [slots_begin, slots_end), so that it can stand beside an owner of
// other slots (the daemon's core). A slot that comes free keeps its pages and is refilled by the
// next copy of the same rounded size.
//
//   HF_ASSIGN_OR_RETURN(auto tier, MemoryTier::Start({.store = store.get()}));
//   HF_ASSIGN_OR_RETURN(auto writer, tier->Create({.id = id, .image_bytes = …}));
//   writer->WriteAt(…); writer->Publish(EncodeRecord(record));
//
// Publish stamps the slot's generation into the record: apart from that field (and the CRC)
// ReadRecord gives back what was published. Thread-safe. The store outlives the tier, the tier its
// readers and writers.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string_view>

#include "absl/status/statusor.h"
#include "tiers/memory/slot_store.h"
#include "tiers/tier.h"

namespace holdfast {

class MemoryTier : public Tier {
 public:
  struct Options {
    SlotStore* store = nullptr;
    SlotId slots_begin = 0;
    SlotId slots_end = std::numeric_limits<SlotId>::max();
  };
  // Scans the store; slots of its range that nobody alive may touch and that hold no copy are its
  // to refill.
  static absl::StatusOr<std::unique_ptr<MemoryTier>> Start(const Options& options);
  ~MemoryTier() override;

  std::string_view kind() const override { return "memory"; }
  // AlreadyExists if there is a copy of the shard. ResourceExhausted when neither budget nor tmpfs
  // has room.
  absl::StatusOr<std::unique_ptr<CopyWriter>> Create(const NewCopy& copy) override;
  absl::StatusOr<std::unique_ptr<CopyReader>> Open(const ShardId& id) override;
  // FailedPrecondition while a reader of this tier holds the copy, or when its slot is outside the
  // range.
  absl::Status Remove(const ShardId& id) override;
  absl::StatusOr<Inventory> Scan() override;

  // Slots that are ready to be refilled, and giving their memory back.
  uint64_t bytes_free_slots() const;
  absl::Status DeleteFreeSlots();

 private:
  class Reader;
  class Writer;
  struct Impl;
  explicit MemoryTier(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast
