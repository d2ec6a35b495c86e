// The protection table: per kind of failure, the newest step that would survive it.
//
// Pure function, thread-safe.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "base/ids.h"
#include "recovery/restorable.h"

namespace holdfast {

enum class FailureKind { kProcess, kNode, kDomain, kAllNodes };

struct ProtectionLine {
  FailureKind kind = FailureKind::kProcess;
  std::optional<CheckpointId> survives;  // absent: nothing would
};

// One line per kind, in the enum's order, for copies that all lie in the memory of one node: a
// process's death costs nothing that was committed; the node's costs everything.
std::vector<ProtectionLine> ProtectionOnOneNode(std::span<const CheckpointSummary> checkpoints,
                                                std::span<const Descent> line);

}  // namespace holdfast
