#include "server/runtime/step_times.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace holdfast {
namespace {

constexpr double kMicrosOfASecond = 1e6;
constexpr int64_t kMicrosOfAMilli = 1000;
constexpr char kWrite[] = "write";
constexpr char kCommit[] = "commit";

const std::vector<double> kCommitBounds = {0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300};
// A remote tier may be hours behind.
const std::vector<double> kWholeBounds = {0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 900, 3600, 14400};

const v1::StageTime* FindStage(const v1::StepTimeline& step, const std::string& stage) {
  const auto found =
      std::find_if(step.stages().begin(), step.stages().end(), [&stage](const v1::StageTime& one) {
        return one.stage() == stage && one.outcome() == "done";
      });
  return found == step.stages().end() ? nullptr : &*found;
}

// (Wall clocks of several nodes: what is told of one may be ahead of the other's.)
double SecondsFrom(int64_t begin_us, int64_t end_us) {
  return static_cast<double>(std::max<int64_t>(0, end_us - begin_us)) / kMicrosOfASecond;
}

}  // namespace

StepTimes::StepTimes(Metrics& registry)
    : committed_(registry.AddHistogram(
          "holdfast_step_commit_seconds",
          "Time from the first rank that began to save a step until all ranks had sealed it.",
          kCommitBounds)) {
  for (const TierKind tier : {TierKind::kPeer, TierKind::kNvme, TierKind::kRemote}) {
    const std::string name(TierName(tier));
    whole_[name] = &registry.AddHistogram(
        "holdfast_step_tier_seconds",
        "Time from the last rank's seal of a step until the step was whole in a tier.",
        kWholeBounds, {{"tier", name}});
  }
}

void StepTimes::Count(const Report& report, int64_t unix_ms) {
  if (report.job.empty() || (jobs_.size() >= kJobsMax && jobs_.count(report.job) == 0)) {
    return;
  }
  jobs_.try_emplace(report.job, Job{unix_ms});
  if (report.kind == Report::Kind::kStepCommitted || report.kind == Report::Kind::kTierCommitted) {
    due_.insert(report.job);
  }
}

std::vector<std::string> StepTimes::TakeDue() {
  std::vector<std::string> taken;
  while (!due_.empty() && taken.size() < kDueAtOnceMax) {
    auto next = due_.upper_bound(asked_last_);
    next = next == due_.end() ? due_.begin() : next;
    asked_last_ = *next;
    due_.erase(next);
    taken.push_back(asked_last_);
  }
  return taken;
}

void StepTimes::KeepOnly(const std::set<std::string>& jobs) {
  std::erase_if(jobs_, [&jobs](const auto& job) { return jobs.count(job.first) == 0; });
  std::erase_if(due_, [&jobs](const std::string& job) { return jobs.count(job) == 0; });
}

void StepTimes::Count(const std::string& job, const v1::TimelineReply& timeline) {
  const auto known = jobs_.find(job);
  if (known == jobs_.end()) {
    return;
  }
  std::set<Stage> seen;
  for (const v1::StepTimeline& step : timeline.steps()) {
    CountStep(known->second, step, seen);
  }
  known->second.counted = std::move(seen);
}

void StepTimes::CountStep(Job& job, const v1::StepTimeline& step, std::set<Stage>& seen) {
  const v1::StageTime* write = FindStage(step, kWrite);
  if (write == nullptr || write->begin_unix_us() < job.hosted_since_unix_ms * kMicrosOfAMilli) {
    return;
  }
  const auto first = [&](const std::string& stage) {
    Stage one{step.attempt(), step.step(), stage};
    const bool counted = job.counted.count(one) > 0;
    return seen.insert(std::move(one)).second && !counted;
  };
  if (const v1::StageTime* commit = FindStage(step, kCommit); commit != nullptr && first(kCommit)) {
    committed_.Observe(SecondsFrom(write->begin_unix_us(), commit->end_unix_us()));
  }
  for (const auto& [tier, times] : whole_) {
    const v1::StageTime* whole = FindStage(step, tier);
    // (One without a beginning was found there.)
    if (whole != nullptr && whole->begin_unix_us() > 0 && first(tier)) {
      times->Observe(SecondsFrom(write->end_unix_us(), whole->end_unix_us()));
    }
  }
}

}  // namespace holdfast
