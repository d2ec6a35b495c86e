// Whether a tier falls behind a job that runs, as an event: for whoever acts on events and has no
// alerts. The bounds are those of deploy/prometheus/alerts.yaml (HoldfastTierLags,
// HoldfastReplicasNotPlaced).
//
//   for (const LagWatch::Change& change : watch.Look(gauges.lags())) { … }
//
// Told once when a tier is further behind than it may be, and once when it has caught up: is within
// half of that. Not thread-safe; no I/O, no clock.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace holdfast {

// By job and tier, of those whose ranks live: how much older its newest step there is than the
// newest that was committed.
using TierLags = std::map<std::pair<std::string, std::string>, double>;

class LagWatch {
 public:
  struct Change {
    std::string job;
    bool behind = false;
    std::string text;
  };
  std::vector<Change> Look(const TierLags& lags);

 private:
  TierLags behind_;  // told, and not caught up
};

}  // namespace holdfast
