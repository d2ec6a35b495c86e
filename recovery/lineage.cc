#include "recovery/lineage.h"

#include <algorithm>

namespace holdfast {

std::vector<Descent> LineOf(const std::map<Attempt, AttemptParent>& attempts, Attempt attempt,
                            size_t entries_max) {
  std::vector<Descent> line;
  while (line.size() < entries_max) {
    const auto found = attempts.find(attempt);
    if (found == attempts.end() || !found->second.decided) {
      break;
    }
    const CheckpointId parent = found->second.parent;
    line.push_back({attempt, parent});
    // Attempts are numbered upwards, so a parent that is not older is damage, and following it
    // might never end.
    if (parent.attempt == 0 || parent.attempt >= attempt) {
      break;
    }
    attempt = parent.attempt;
  }
  return line;
}

bool OnLine(std::span<const Descent> line, CheckpointId checkpoint) {
  if (line.empty() || checkpoint.attempt == 0) {
    return false;
  }
  if (checkpoint.attempt == line.front().attempt) {
    return true;
  }
  return std::any_of(line.begin(), line.end(), [&](const Descent& d) {
    return d.parent.attempt == checkpoint.attempt && d.parent.attempt < d.attempt &&
           checkpoint.step <= d.parent.step;
  });
}

bool LineRestoredAnything(std::span<const Descent> line) {
  return std::any_of(line.begin(), line.end(),
                     [](const Descent& d) { return d.parent.attempt != 0; });
}

Attempt NewestDecided(const std::map<Attempt, AttemptParent>& attempts) {
  for (auto it = attempts.rbegin(); it != attempts.rend(); ++it) {
    if (it->second.decided) {
      return it->first;
    }
  }
  return 0;
}

}  // namespace holdfast
