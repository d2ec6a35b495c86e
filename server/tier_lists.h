// The tiers that outlive a node's memory, and what a tier is called in a text.
#pragma once

#include <string>

#include "base/ids.h"

namespace holdfast {

inline constexpr TierKind kDurable[] = {TierKind::kNvme, TierKind::kRemote};

inline std::string Name(TierKind tier) {
  return std::string(TierName(tier));
}

}  // namespace holdfast
