// Where a copy of a shard lies.
#pragma once

#include <compare>

#include "base/ids.h"
#include "server/node_names.h"

namespace holdfast {

// What is in the remote tier lies nowhere in particular: kHere.
struct CopyPlace {
  TierKind tier = TierKind::kMemory;
  NodeId node = kHere;
  auto operator<=>(const CopyPlace&) const = default;
};
// The place in that tier to which a node can bring a copy, or from which it can tell of one.
constexpr CopyPlace PlaceOf(TierKind tier, NodeId node) {
  return {tier, tier == TierKind::kRemote ? kHere : node};
}

}  // namespace holdfast
