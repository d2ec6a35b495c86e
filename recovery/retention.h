// Which committed checkpoints a setting such as memory.keep_committed makes surplus, even when
// there is room.
//
// Pure function, thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "recovery/shedding.h"

namespace holdfast {

// What to remove so that at most `keep` committed checkpoints remain, in the order in which to
// remove them: other branches first, oldest first. Never the untouchable one, a held or a pinned
// one. `keep` 0: no cap, nothing is surplus.
std::vector<CheckpointId> Surplus(std::span<const ShedChoice> checkpoints, uint32_t keep);

}  // namespace holdfast
