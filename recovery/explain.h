// Sentences for `ckptctl explain`: why a step can or cannot be restored, and what the next restore
// takes.
//
//   const StepReasons r = ExplainStep(view, {.line = line, .world_size = 8, .configured = tiers});
//
// Pure functions, thread-safe.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "recovery/checkpoint_view.h"
#include "recovery/lineage.h"

namespace holdfast {

// What keeps a step from being restored.
struct Unreadable {
  std::string what;                 // "no tier has a good copy of 1 of 4 shards"
  std::vector<std::string> shards;  // one sentence each: what there is of it, and where
};
using Unreadables = std::map<CheckpointId, Unreadable>;

// What the next restore is asked for and by whom.
struct RestoreContext {
  std::span<const Descent> line;
  uint32_t world_size = 0;  // of the newest attempt; 0: not known, any fits
  TierSet configured = kEveryTier;
  std::optional<CheckpointId> restore_point;  // set by `ckptctl restore`
  bool from_scratch = false;                  // likewise
  // Of steps that are not restorable, where more is known than their views tell.
  const Unreadables* unreadable = nullptr;
};

struct StepReasons {
  CheckpointId id;
  bool restorable = false;  // whole; a restore may still not take it, as the reasons say
  bool on_line = false;
  std::vector<std::string> reasons;  // one sentence each, the most important first
};

StepReasons ExplainStep(const CheckpointView& checkpoint, const RestoreContext& context);

// "step 1200 of attempt 3: memory for 6 ranks, nvme for 2", or why there is none.
std::string ExplainChoice(std::span<const CheckpointView> checkpoints,
                          const RestoreContext& context);

// "memory for 6 ranks, nvme for 2": each rank from the nearest tier that has it.
std::string SourcesOf(const CheckpointView& checkpoint, TierSet configured);

}  // namespace holdfast
