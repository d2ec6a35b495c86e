#include "server/runtime/lag_watch.h"

#include <chrono>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/units.h"

namespace holdfast {
namespace {

// Drives should be a step behind, remote a policy's period and one write; replicas take seconds.
double SecondsMax(const std::string& tier) {
  return tier == "remote" ? 7200 : tier == "peer" ? 600 : 900;
}

std::string ForPeople(double seconds) {
  return FormatDuration(std::chrono::seconds(static_cast<int64_t>(seconds)));
}

}  // namespace

std::vector<LagWatch::Change> LagWatch::Look(const TierLags& lags) {
  std::vector<Change> changes;
  for (const auto& [what, seconds] : lags) {
    const auto& [job, tier] = what;
    const auto known = behind_.find(what);
    if (known == behind_.end() && seconds > SecondsMax(tier)) {
      behind_[what] = seconds;
      changes.push_back({job, true,
                         absl::StrCat("its newest step in ", tier, " is ", ForPeople(seconds),
                                      " older than the newest that was committed")});
    } else if (known != behind_.end() && seconds <= SecondsMax(tier) / 2) {
      behind_.erase(known);
      changes.push_back({job, false, absl::StrCat(tier, " has caught up with it")});
    }
  }
  // Of one that ended, or is hosted elsewhere now, nothing more is told.
  std::erase_if(behind_, [&lags](const auto& told) { return lags.count(told.first) == 0; });
  return changes;
}

}  // namespace holdfast
