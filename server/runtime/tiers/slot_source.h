// The slots as the durable tiers' operations see them: a sealed shard to read, a slot to fill.
//
// Plain functions over a SlotStore; any thread.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/events.h"
#include "server/runtime/tiers/drain_operations.h"
#include "tiers/image/record.h"
#include "tiers/memory/slot_store.h"

namespace holdfast {

// A sealed shard in its slot: mapped, with its record.
struct SlotImage {
  std::unique_ptr<File> file;
  std::unique_ptr<Mapping> mapping;  // of the whole slot, writable: only so can it be registered
  std::shared_ptr<const RecordAndLayout> image;
  std::string record_file;
};

// Aborted when the slot holds another filling by now; DataLoss when its files are gone or damaged.
absl::StatusOr<SlotImage> OpenSealedSlot(SlotStore& slots, Env& env, const FlushShard& action);

// A slot to be filled, mapped for writing; no peer reads it any more that was told of it while it
// was another job's. DataLoss when its file is gone or too short.
struct SlotToFill {
  std::unique_ptr<File> file;
  std::unique_ptr<Mapping> mapping;
};
absl::StatusOr<SlotToFill> OpenSlotToFill(DrainContext& context, const FetchShard& action);

// The slot holds the image now, verified: its record, and what that says. A bad copy of the same
// shard in another slot loses its record first.
absl::StatusOr<FetchEnded> PublishFetched(SlotStore& slots, const FetchShard& action,
                                          const ShardRecord& record);

}  // namespace holdfast
