// What the jobs that this node hosts would lose now, and how far each tier is behind, as gauges.
//
//   JobGauges gauges(registry);
//   gauges.Set(status.jobs(), unix_ms);   // all jobs, as the core describes them
//
// At most kNamedMax jobs have series of their own; the rest are one, named kOthers, which no job
// can be called. Who has a name keeps it as long as the job is there; only where there are more
// jobs than names does one that has ended give way to one that runs. Times are points in time: so
// they are right, too, while nothing happens and nothing is set. Owner: DaemonMetrics; the
// reactor's thread only.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/metrics.h"
#include "holdfast/v1/admin.pb.h"
#include "server/runtime/lag_watch.h"

namespace holdfast {

class JobGauges {
 public:
  static constexpr size_t kNamedMax = 64;
  static constexpr char kOthers[] = "(others)";

  explicit JobGauges(Metrics& registry);
  void Set(const google::protobuf::RepeatedPtrField<v1::JobStatus>& jobs, int64_t unix_ms);
  // As they were set; all jobs, named or not.
  const TierLags& lags() const { return lags_; }

 private:
  struct Tier {
    double lag_seconds = 0;
    double steps_waiting = 0;
  };
  // What one job shows, or several together: sums, and of those that run the worst times.
  struct Values {
    double ranks = 0;
    double ranks_alive = 0;
    std::map<std::string, double> lost_from{};  // by failure; Unix time, seconds
    std::map<std::string, Tier> tiers{};
  };
  // What must be remembered of a job to judge what it shows next.
  struct Since {
    uint64_t attempt = 0;
    int64_t attempt_seen_unix_ms = 0;
    int64_t idle_ms = 0;  // between the newest step of earlier attempts and this one
    // Tiers without a step: the time of its newest one when that was seen first.
    std::map<std::string, int64_t> none_in_tier{};
  };
  using Series = std::pair<std::string, Metrics::Labels>;

  void ChooseNamed(const google::protobuf::RepeatedPtrField<v1::JobStatus>& jobs);
  Since& Remember(const v1::JobStatus& job, int64_t unix_ms);
  Values ValuesOf(const v1::JobStatus& job, int64_t unix_ms);
  static void Merge(const Values& one, Values& all);
  void Show(const std::string& name, const Values& values, std::set<Series>& shown);
  void SetGauge(const char* metric, Metrics::Labels labels, double value, std::set<Series>& shown);

  Metrics& registry_;
  Gauge& jobs_;
  std::set<std::string> named_;
  std::map<std::string, Since> since_;  // by job
  TierLags lags_;
  std::map<Series, Gauge*> shown_;
};

}  // namespace holdfast
