#include "recovery/kept_placement.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/status.h"

namespace holdfast {
namespace {

// In whole units: on a few bytes more or less nothing depends.
PlacementShard Counted(PlacementShard shard) {
  shard.bytes =
      shard.bytes / kPlacementUnitBytes + (shard.bytes % kPlacementUnitBytes == 0 ? 0 : 1);
  return shard;
}

}  // namespace

absl::StatusOr<const Placement*> KeptPlacement::For(uint64_t seed,
                                                    std::span<const PlacementNode> nodes,
                                                    std::span<const PlacementShard> shards,
                                                    uint32_t replicas) {
  const auto known = kept_.find(replicas);
  if (known != kept_.end() && known->second.seed == seed &&
      std::ranges::equal(known->second.nodes, nodes) &&
      std::ranges::equal(known->second.shards, shards,
                         [](const auto& kept, const auto& now) { return kept == Counted(now); })) {
    return &known->second.placement;
  }
  HF_ASSIGN_OR_RETURN(Placement placement, Place(seed, nodes, shards, replicas));
  ++computed_;
  Kept& kept =
      kept_[replicas];  // (what was refused is not kept, so there are no more than allowed)
  kept.seed = seed;
  kept.nodes.assign(nodes.begin(), nodes.end());
  kept.shards.clear();
  std::ranges::transform(shards, std::back_inserter(kept.shards), Counted);
  kept.placement = std::move(placement);
  return &kept.placement;
}

}  // namespace holdfast
