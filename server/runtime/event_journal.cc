#include "server/runtime/event_journal.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/utf8.h"

namespace holdfast {
namespace {

struct KindFacts {
  Report::Kind kind;
  const char* name;
  std::optional<v1::Severity> severity;  // none: each rank's every save causes it
};

constexpr std::optional<v1::Severity> kUntold;

const KindFacts& FactsOf(Report::Kind kind) {
  using Kind = Report::Kind;
  static constexpr std::array kFacts = {
      KindFacts{Kind::kShardSealed, "shard_sealed", kUntold},
      KindFacts{Kind::kStepCommitted, "step_committed", v1::SEVERITY_INFO},
      KindFacts{Kind::kStepShed, "step_shed", v1::SEVERITY_WARNING},
      KindFacts{Kind::kStepRetired, "step_retired", kUntold},
      KindFacts{Kind::kStepAbandoned, "step_abandoned", v1::SEVERITY_WARNING},
      KindFacts{Kind::kSaveRefused, "save_refused", v1::SEVERITY_WARNING},
      KindFacts{Kind::kAttemptOpened, "attempt_opened", v1::SEVERITY_INFO},
      KindFacts{Kind::kSessionDecided, "restore_decided", v1::SEVERITY_INFO},
      KindFacts{Kind::kSessionDone, "restore_done", v1::SEVERITY_INFO},
      KindFacts{Kind::kSessionFellBack, "restore_fell_back", v1::SEVERITY_WARNING},
      KindFacts{Kind::kSessionFailed, "restore_failed", v1::SEVERITY_WARNING},
      KindFacts{Kind::kCopyBad, "copy_bad", v1::SEVERITY_ERROR},
      KindFacts{Kind::kCopyGood, "copy_good", v1::SEVERITY_INFO},
      KindFacts{Kind::kCopyMended, "copy_mended", v1::SEVERITY_WARNING},
      KindFacts{Kind::kCopyUnmended, "copy_unmended", v1::SEVERITY_ERROR},
      KindFacts{Kind::kSlotQuarantined, "slot_quarantined", v1::SEVERITY_WARNING},
      KindFacts{Kind::kSlotReleased, "slot_released", kUntold},
      KindFacts{Kind::kSlotLost, "slot_lost", v1::SEVERITY_ERROR},
      KindFacts{Kind::kJobRemoved, "job_removed", v1::SEVERITY_INFO},
      KindFacts{Kind::kTierCommitted, "tier_committed", v1::SEVERITY_INFO},
      KindFacts{Kind::kTierShed, "tier_shed", v1::SEVERITY_WARNING},
      KindFacts{Kind::kTierTrouble, "tier_trouble", v1::SEVERITY_WARNING},
      KindFacts{Kind::kTierWell, "tier_well", v1::SEVERITY_INFO},
      KindFacts{Kind::kTierRemoved, "tier_removed", v1::SEVERITY_INFO},
      KindFacts{Kind::kReplicasDiverged, "replicas_diverged", v1::SEVERITY_WARNING},
      KindFacts{Kind::kJobStopping, "job_stopping", v1::SEVERITY_INFO},
      KindFacts{Kind::kProtocolError, "protocol_error", v1::SEVERITY_WARNING},
      KindFacts{Kind::kTrouble, "trouble", v1::SEVERITY_WARNING},
  };
  static_assert(kFacts.size() == static_cast<size_t>(Kind::kTrouble) + 1);
  return *std::find_if(kFacts.begin(), kFacts.end(),
                       [&](const KindFacts& facts) { return facts.kind == kind; });
}

}  // namespace

const char* EventKindName(Report::Kind kind) {
  return FactsOf(kind).name;
}

std::optional<v1::DaemonEvent> EventOf(const Report& report) {
  const KindFacts& facts = FactsOf(report.kind);
  if (!facts.severity) {
    return std::nullopt;
  }
  v1::DaemonEvent event;
  event.set_kind(facts.name);
  event.set_severity(*facts.severity);
  event.set_job(report.job);
  event.set_text(report.text);
  return event;
}

const char* SeverityName(v1::Severity severity) {
  switch (severity) {
    case v1::SEVERITY_WARNING:
      return "warning";
    case v1::SEVERITY_ERROR:
      return "error";
    default:
      return "info";
  }
}

std::optional<v1::Severity> ParseSeverity(const std::string& name) {
  for (const v1::Severity each : {v1::SEVERITY_INFO, v1::SEVERITY_WARNING, v1::SEVERITY_ERROR}) {
    if (name == SeverityName(each)) {
      return each;
    }
  }
  return std::nullopt;
}

void EventJournal::Add(v1::DaemonEvent event, std::optional<uint32_t> owner,
                       std::optional<uint32_t> cause) {
  event.set_job(Utf8Text(event.job()));
  event.set_text(Utf8Text(event.text().substr(0, kTextBytesMax)));
  const MutexLock lock(mutex_);
  if (!owner && !event.job().empty()) {
    // The last that is said of a job that was removed is its user's, too.
    const auto before = std::find_if(kept_.rbegin(), kept_.rend(), [&](const auto& kept) {
      return kept.second.event.job() == event.job();
    });
    owner = before == kept_.rend() ? std::nullopt : before->second.owner;
  }
  event.set_number(++last_);
  const Cause by = cause ? cause : owner;
  kept_.emplace(last_, Kept{std::move(event), owner, by});
  of_cause_[by].push_back(last_);
  if (kept_.size() > kEventsMax) {
    MakeRoom();
  }
  changed_.NotifyAll();
}

void EventJournal::MakeRoom() {
  const auto most = std::max_element(
      of_cause_.begin(), of_cause_.end(),
      [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  kept_.erase(most->second.front());
  most->second.pop_front();
  if (most->second.empty()) {
    of_cause_.erase(most);
  }
}

bool EventJournal::MaySee(const Kept& kept, uint32_t caller) const {
  if (std::find(operators_.begin(), operators_.end(), caller) != operators_.end()) {
    return true;
  }
  return !kept.event.job().empty() && kept.owner == caller;
}

bool EventJournal::Matches(const v1::DaemonEvent& event, const v1::WatchEventsRequest& request) {
  return event.severity() >= request.least() && event.unix_ms() >= request.since_unix_ms() &&
         (request.job().empty() || event.job() == request.job());
}

v1::EventBatch EventJournal::Read(const v1::WatchEventsRequest& request, uint32_t caller) const {
  v1::EventBatch batch;
  batch.set_journal(journal_);
  const uint64_t after = request.journal() == journal_ ? request.after() : 0;
  const MutexLock lock(mutex_);
  batch.set_next_after(std::max(after, last_));
  uint64_t there = 0;
  for (auto it = kept_.upper_bound(after); it != kept_.end(); ++it, ++there) {
    const auto& [number, kept] = *it;
    if (batch.events_size() == kBatchMax) {
      batch.set_next_after(number - 1);
      break;
    }
    if (MaySee(kept, caller) && Matches(kept.event, request)) {
      *batch.add_events() = kept.event;
    }
  }
  // (Of those, too, that the caller may not see: how many of each went is not known any more.)
  batch.set_lost(after == 0 ? 0 : batch.next_after() - after - there);
  return batch;
}

bool EventJournal::AwaitAfter(uint64_t number, Duration at_most) {
  const auto until = std::chrono::steady_clock::now() + at_most;
  const MutexLock lock(mutex_);
  while (!stopped_ && last_ <= number) {
    if (!changed_.WaitUntil(mutex_, until)) {
      break;
    }
  }
  return !stopped_ && last_ > number;
}

void EventJournal::Stop() {
  const MutexLock lock(mutex_);
  stopped_ = true;
  changed_.NotifyAll();
}

bool EventJournal::stopped() const {
  const MutexLock lock(mutex_);
  return stopped_;
}

uint64_t EventJournal::last() const {
  const MutexLock lock(mutex_);
  return last_;
}

}  // namespace holdfast
