#include "recovery/retention.h"

#include <algorithm>

namespace holdfast {

std::vector<CheckpointId> Surplus(std::span<const ShedChoice> checkpoints, uint32_t keep) {
  if (keep == 0) {
    return {};
  }
  const std::optional<CheckpointId> untouchable = Untouchable(checkpoints);
  size_t committed = 0;
  std::vector<CheckpointId> off_line;
  std::vector<CheckpointId> on_line;
  for (const ShedChoice& choice : checkpoints) {
    if (choice.kind != ShedChoice::Kind::kOnLine && choice.kind != ShedChoice::Kind::kOffLine) {
      continue;
    }
    ++committed;
    if (choice.held || choice.pinned || choice.id == untouchable) {
      continue;
    }
    (choice.kind == ShedChoice::Kind::kOnLine ? on_line : off_line).push_back(choice.id);
  }
  std::sort(off_line.begin(), off_line.end());
  std::sort(on_line.begin(), on_line.end());
  std::vector<CheckpointId> removable = std::move(off_line);
  removable.insert(removable.end(), on_line.begin(), on_line.end());
  const size_t surplus = committed > keep ? committed - keep : 0;
  removable.resize(std::min(removable.size(), surplus));
  return removable;
}

}  // namespace holdfast
