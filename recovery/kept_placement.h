// The placement of the step before, for as long as it is the same (recovery/placement.h): a job's
// steps have the same shards on the same nodes, and computing where each lies takes tens of
// milliseconds in a job of ten thousand ranks.
#pragma once

#include <map>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "recovery/placement.h"

namespace holdfast {

class KeptPlacement {
 public:
  // Place, computed anew only if anything that it depends on has changed since it was asked for so
  // many replicas. The answer is good until the next call.
  absl::StatusOr<const Placement*> For(uint64_t seed, std::span<const PlacementNode> nodes,
                                       std::span<const PlacementShard> shards, uint32_t replicas);
  // How often it was computed.
  uint64_t computed() const { return computed_; }

 private:
  struct Kept {
    uint64_t seed = 0;
    std::vector<PlacementNode> nodes;
    std::vector<PlacementShard> shards;  // `bytes`: in whole units, as Place counts
    Placement placement;
  };
  std::map<uint32_t, Kept> kept_;  // by replicas: at most kPlacementReplicasMax
  uint64_t computed_ = 0;
};

}  // namespace holdfast
