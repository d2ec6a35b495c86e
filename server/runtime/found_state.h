// What the daemon finds when it starts, as the core's first event; and the small translations
// between what the memory tier stores and what the core speaks of.
//
//   HF_ASSIGN_OR_RETURN(Started started, FindState(*store, *catalog, config.memory().bytes_max()));
//
// Plain functions; FindState is called once, before any other thread uses store or catalog.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/ids.h"
#include "holdfast/v1/state.pb.h"
#include "server/events.h"
#include "server/runtime/catalog.h"
#include "tiers/memory/slot_store.h"

namespace holdfast {

inline constexpr std::string_view kMemoryTier = "memory";

// Scans memory.dir, and merges the job states found there with the catalog's: of two, the larger
// version wins, and memory.dir is brought up to it. (The catalog is brought up by its writer, which
// begins with that.) What fails of this is a problem, and what lies in memory is served all the
// same.
absl::StatusOr<Started> FindState(SlotStore& store, Catalog& catalog, uint64_t memory_bytes_max);

SealedCopy ToSealedCopy(const ShardRecord& record);
v1::SlotNote ToMessage(const SlotNote& note);
SlotNote FromMessage(const v1::SlotNote& note);
v1::CatalogShard ToCatalogShard(const SealedCopy& copy, SlotId slot);
std::string SlotLocation(SlotId slot);  // "slot-000017"

}  // namespace holdfast
