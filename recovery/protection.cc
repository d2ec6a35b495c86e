#include "recovery/protection.h"

namespace holdfast {

std::vector<ProtectionLine> ProtectionOnOneNode(std::span<const CheckpointSummary> checkpoints,
                                                std::span<const Descent> line) {
  std::optional<CheckpointId> newest;
  for (const CheckpointSummary& checkpoint : checkpoints) {
    // Whatever its world size: the data survives, even if this attempt could not load it as it is.
    if (checkpoint.committed() && OnLine(line, checkpoint.id) &&
        (!newest || checkpoint.id > *newest)) {
      newest = checkpoint.id;
    }
  }
  return {{FailureKind::kProcess, newest},
          {FailureKind::kNode, std::nullopt},
          {FailureKind::kDomain, std::nullopt},
          {FailureKind::kAllNodes, std::nullopt}};
}

}  // namespace holdfast
