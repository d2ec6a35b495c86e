// The tiers that outlive a node's memory, those that checkpoints are brought to, and what a tier is
// called in a text.
#pragma once

#include <string>

#include "base/ids.h"

namespace holdfast {

inline constexpr TierKind kDurable[] = {TierKind::kNvme, TierKind::kRemote};
// To which a policy sends steps, and from which retention removes them.
inline constexpr TierKind kDrained[] = {TierKind::kNvme, TierKind::kPeer, TierKind::kRemote};

inline std::string Name(TierKind tier) {
  return std::string(TierName(tier));
}

}  // namespace holdfast
