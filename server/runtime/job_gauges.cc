#include "server/runtime/job_gauges.h"

#include <algorithm>

#include "absl/strings/string_view.h"

namespace holdfast {
namespace {

using Jobs = google::protobuf::RepeatedPtrField<v1::JobStatus>;

constexpr double kMillisOfASecond = 1000;
constexpr char kRanks[] = "holdfast_job_ranks";
constexpr char kRanksAlive[] = "holdfast_job_ranks_alive";
constexpr char kLossFrom[] = "holdfast_job_loss_from_timestamp_seconds";
constexpr char kTierLag[] = "holdfast_job_tier_lag_seconds";
constexpr char kStepsWaiting[] = "holdfast_job_tier_steps_waiting";

const std::map<absl::string_view, const char*>& JobHelp() {
  static const auto* const kHelp = new std::map<absl::string_view, const char*>{
      {kRanks, "Ranks of a job's newest attempt."},
      {kRanksAlive, "Of them, those whose processes live; 0: the job has ended."},
      {kLossFrom,
       "Unix time from which on a job's training would be lost if this happened now: when the "
       "newest step that survives it was saved (of an earlier attempt: without the pause since); "
       "if none does, when this node first saw the attempt."},
      {kTierLag,
       "How much older the newest step that is whole in a tier is than the newest committed one; "
       "while none is there, how much newer the latter has become since."},
      {kStepsWaiting, "Steps of a job on their way into a tier, or waiting for their turn."},
  };
  return *kHelp;
}

const char* FailureName(v1::Protection::FailureKind kind) {
  switch (kind) {
    case v1::Protection::FAILURE_KIND_PROCESS:
      return "process";
    case v1::Protection::FAILURE_KIND_REBOOT:
      return "reboot";
    case v1::Protection::FAILURE_KIND_NODE:
      return "node";
    case v1::Protection::FAILURE_KIND_DOMAIN:
      return "domain";
    case v1::Protection::FAILURE_KIND_ALL_NODES:
      return "all_nodes";
    default:
      return nullptr;
  }
}

// The newest step that all ranks have: what outlives the processes. Null: there is none.
const v1::Protection* NewestOf(const v1::JobStatus& job) {
  for (const v1::Protection& line : job.protection()) {
    if (line.kind() == v1::Protection::FAILURE_KIND_PROCESS && line.any()) {
      return &line;
    }
  }
  return nullptr;
}

}  // namespace

JobGauges::JobGauges(Metrics& registry)
    : registry_(registry),
      jobs_(registry.AddGauge("holdfast_jobs", "Jobs that this node hosts, ended ones too.")) {}

void JobGauges::Set(const Jobs& jobs, int64_t unix_ms) {
  jobs_.Set(jobs.size());
  std::set<std::string> names;
  for (const v1::JobStatus& job : jobs) {
    names.insert(job.name());
  }
  std::erase_if(since_, [&names](const auto& one) { return names.count(one.first) == 0; });
  std::erase_if(named_, [&names](const std::string& name) { return names.count(name) == 0; });
  ChooseNamed(jobs);
  std::set<Series> shown;
  std::optional<Values> others;
  lags_.clear();
  for (const v1::JobStatus& job : jobs) {
    const Values values = ValuesOf(job, unix_ms);
    if (job.ranks_alive() > 0) {
      for (const auto& [tier, at] : values.tiers) {
        lags_[{job.name(), tier}] = at.lag_seconds;
      }
    }
    if (named_.count(job.name()) > 0) {
      Show(job.name(), values, shown);
    } else {
      if (!others) {
        others.emplace();
      }
      Merge(values, *others);
    }
  }
  if (others) {
    Show(kOthers, *others, shown);
  }
  std::erase_if(shown_, [&](const auto& one) {
    const bool gone = shown.count(one.first) == 0;
    if (gone) {
      registry_.RemoveGauge(one.first.first, one.first.second);
    }
    return gone;
  });
}

// By name, those that run before those that have ended.
void JobGauges::ChooseNamed(const Jobs& jobs) {
  std::set<std::string> running;
  std::set<std::string> ended;
  for (const v1::JobStatus& job : jobs) {
    (job.ranks_alive() > 0 ? running : ended).insert(job.name());
  }
  for (const std::string& name : running) {
    if (named_.size() >= kNamedMax && named_.count(name) == 0) {
      const auto idle = std::find_if(named_.begin(), named_.end(),
                                     [&ended](const auto& one) { return ended.count(one) > 0; });
      if (idle == named_.end()) {
        return;
      }
      named_.erase(idle);
    }
    named_.insert(name);
  }
  for (const std::string& name : ended) {
    if (named_.size() >= kNamedMax) {
      return;
    }
    named_.insert(name);
  }
}

JobGauges::Since& JobGauges::Remember(const v1::JobStatus& job, int64_t unix_ms) {
  const auto [known, fresh] = since_.try_emplace(job.name());
  Since& since = known->second;
  if (fresh || since.attempt != job.attempt()) {
    const v1::Protection* newest = NewestOf(job);
    const bool before = newest != nullptr && newest->attempt() < job.attempt();
    since.attempt = job.attempt();
    since.attempt_seen_unix_ms = unix_ms;
    since.idle_ms = before ? newest->age_ms() : 0;
  }
  return since;
}

JobGauges::Values JobGauges::ValuesOf(const v1::JobStatus& job, int64_t unix_ms) {
  Since& since = Remember(job, unix_ms);
  Values values{static_cast<double>(job.world_size()), static_cast<double>(job.ranks_alive())};
  for (const v1::Protection& line : job.protection()) {
    if (const char* failure = FailureName(line.kind())) {
      const int64_t idle = line.attempt() < job.attempt() ? since.idle_ms : 0;
      const int64_t from = line.any() ? unix_ms - line.age_ms() + idle : since.attempt_seen_unix_ms;
      values.lost_from[failure] = static_cast<double>(from) / kMillisOfASecond;
    }
  }
  const v1::Protection* newest = NewestOf(job);
  for (const v1::TierProgress& progress : job.tiers()) {
    Tier& tier = values.tiers[progress.tier()];
    tier.steps_waiting = progress.flushing_size() + (progress.waiting() ? 1 : 0);
    if (progress.any()) {
      since.none_in_tier.erase(progress.tier());
    }
    if (newest != nullptr) {
      const int64_t saved = unix_ms - newest->age_ms();
      const int64_t there =
          progress.any() ? unix_ms - progress.age_ms()
                         : since.none_in_tier.try_emplace(progress.tier(), saved).first->second;
      tier.lag_seconds =
          static_cast<double>(std::max<int64_t>(0, saved - there)) / kMillisOfASecond;
    }
  }
  return values;
}

void JobGauges::Merge(const Values& one, Values& all) {
  all.ranks += one.ranks;
  all.ranks_alive += one.ranks_alive;
  if (one.ranks_alive == 0) {
    return;
  }
  for (const auto& [failure, from] : one.lost_from) {
    double& worst = all.lost_from.try_emplace(failure, from).first->second;
    worst = std::min(worst, from);
  }
  for (const auto& [name, tier] : one.tiers) {
    Tier& together = all.tiers[name];
    together.lag_seconds = std::max(together.lag_seconds, tier.lag_seconds);
    together.steps_waiting += tier.steps_waiting;
  }
}

void JobGauges::Show(const std::string& name, const Values& values, std::set<Series>& shown) {
  SetGauge(kRanks, {{"job_name", name}}, values.ranks, shown);
  SetGauge(kRanksAlive, {{"job_name", name}}, values.ranks_alive, shown);
  for (const auto& [failure, from] : values.lost_from) {
    SetGauge(kLossFrom, {{"job_name", name}, {"failure", failure}}, from, shown);
  }
  for (const auto& [tier, at] : values.tiers) {
    SetGauge(kTierLag, {{"job_name", name}, {"tier", tier}}, at.lag_seconds, shown);
    SetGauge(kStepsWaiting, {{"job_name", name}, {"tier", tier}}, at.steps_waiting, shown);
  }
}

void JobGauges::SetGauge(const char* metric, Metrics::Labels labels, double value,
                         std::set<Series>& shown) {
  Series series{metric, std::move(labels)};
  Gauge*& gauge = shown_[series];
  if (gauge == nullptr) {
    gauge = &registry_.AddGauge(metric, JobHelp().at(metric), series.second);
  }
  gauge->Set(value);
  shown.insert(std::move(series));
}

}  // namespace holdfast
