// The protection table: per kind of failure, the newest step that would survive it.
//
//   for (const ProtectionLine& line : ProtectionTable(views, line, kEveryTier)) …
//
// Pure functions, thread-safe.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/ids.h"
#include "recovery/checkpoint_view.h"
#include "recovery/lineage.h"

namespace holdfast {

enum class FailureKind {
  kProcess,
  kReboot,  // the node comes back with its drives, without its memory
  kNode,
  kDomain,
  kAllNodes
};
inline constexpr size_t kFailureKinds = 5;

// Whether a rank whose good copies lie in these tiers has one left after it. A copy in a peer's
// memory is on another node than the rank's own; so is each one whole if either is lost. `apart`:
// and in another failure domain.
bool Survives(FailureKind kind, TierSet good_in, bool apart);
// Whether all of it is left after it, of what lies in the tiers of `allowed`.
bool WholeAfter(const CheckpointView& checkpoint, FailureKind kind, TierSet allowed = kEveryTier);

struct ProtectionLine {
  FailureKind kind = FailureKind::kProcess;
  std::optional<CheckpointId> survives;  // absent: nothing would
  // Where it would come from: the nearest tier that has all of it, or the tiers that have it
  // together, nearest first: "memory", "nvme", "memory+peer", "remote", … Empty: nothing would
  // survive.
  std::string from;
};

// One line per kind, in the enum's order: the newest step on the line of which every rank has a
// good copy that outlives the failure. Whatever its world size: the data survives, even
// if this attempt could not load it as it is. Copies in tiers outside `configured` do not count.
std::vector<ProtectionLine> ProtectionTable(std::span<const CheckpointView> checkpoints,
                                            std::span<const Descent> line, TierSet configured);

// The smallest set out of `allowed` that has every rank of it, nearest tiers first; 0: none has.
TierSet NearestWhole(const CheckpointView& checkpoint, TierSet allowed);
// The same of those that have every rank of it after that failure.
TierSet NearestWholeAfter(const CheckpointView& checkpoint, FailureKind kind, TierSet allowed);
std::string TierNames(TierSet tiers);  // "memory+nvme"

}  // namespace holdfast
