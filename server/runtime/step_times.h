// How long steps take, from the first rank that begins to save until all have, and on to each tier:
// out of the timelines of the jobs that this node hosts (`ckptctl timeline` shows the same), which
// are asked for when something has happened to a step.
//
//   StepTimes times(registry);
//   times.Count(report, unix_ms);            // each report of the core
//   for (const std::string& job : times.TakeDue()) { … times.Count(job, timeline); }
//   times.KeepOnly(jobs);                    // that this node still hosts
//
// A step counts if this node hosted its job when it was begun: what a daemon that was just started,
// or that took a job over, finds done says nothing of how long it took. Each stage of a step counts
// once, though replicas may be made again. Owner: DaemonMetrics; the reactor's thread only.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "base/metrics.h"
#include "holdfast/v1/admin.pb.h"
#include "server/events.h"

namespace holdfast {

class StepTimes {
 public:
  static constexpr size_t kDueAtOnceMax = 8;  // timelines to ask for in a second
  static constexpr size_t kJobsMax = 4096;    // of more, the times are not counted

  explicit StepTimes(Metrics& registry);
  void Count(const Report& report, int64_t unix_ms);
  void Count(const std::string& job, const v1::TimelineReply& timeline);
  // Some of the jobs whose timelines have something new, each in its turn.
  std::vector<std::string> TakeDue();
  bool any_due() const { return !due_.empty(); }
  void KeepOnly(const std::set<std::string>& jobs);

 private:
  using Stage = std::tuple<uint64_t, uint64_t, std::string>;  // attempt, step, what was counted
  struct Job {
    int64_t hosted_since_unix_ms = 0;
    std::set<Stage> counted{};  // as long as the timeline has the step
  };

  void CountStep(Job& job, const v1::StepTimeline& step, std::set<Stage>& seen);

  std::map<std::string, Job> jobs_;
  std::set<std::string> due_;
  std::string asked_last_;  // TakeDue goes on behind it
  Histogram& committed_;
  std::map<std::string, Histogram*> whole_;  // by tier
};

}  // namespace holdfast
