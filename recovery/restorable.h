// Which checkpoints are whole, given what copies there are. A checkpoint is committed because its
// sealed copies were counted, never because files or names exist (design.md §6, 4).
//
//   std::vector<CheckpointSummary> all = Summarize(shards);
//   std::vector<CheckpointId> candidates = Candidates(all, line, world_size);
//
// Pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/ids.h"
#include "recovery/checkpoint_view.h"
#include "recovery/lineage.h"

namespace holdfast {

// One sealed copy that somebody has.
struct ShardPresence {
  CheckpointId checkpoint;
  Rank rank = 0;
  uint32_t world_size = 0;
  bool bad = false;  // its bytes contradicted its digests
};

struct CheckpointSummary {
  CheckpointId id;
  uint32_t world_size = 0;
  uint32_t sealed = 0;  // ranks with a good copy
  uint32_t bad = 0;     // ranks whose only copies are bad
  bool consistent =
      true;  // false: its shards disagree about the world size, or a rank lies outside it
  bool committed() const { return consistent && world_size > 0 && sealed == world_size; }
};

// One summary per checkpoint, ordered by id. Several copies of one rank count once, and a good one
// outweighs bad ones.
std::vector<CheckpointSummary> Summarize(std::span<const ShardPresence> shards);

// Committed checkpoints on the line that this world size can load (none: any can), newest first:
// what a session tries in turn.
std::vector<CheckpointId> Candidates(std::span<const CheckpointSummary> checkpoints,
                                     std::span<const Descent> line,
                                     std::optional<uint32_t> world_size);
// The same where copies lie in several tiers: those that are whole in all of them together.
std::vector<CheckpointId> Candidates(std::span<const CheckpointView> checkpoints,
                                     std::span<const Descent> line,
                                     std::optional<uint32_t> world_size);

}  // namespace holdfast
