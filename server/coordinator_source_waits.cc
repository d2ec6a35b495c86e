// Ranks of a restore whose only source is another node that cannot be read just now: it is being
// started anew, or membership has not told all of it yet. They wait a moment, and it is tried
// again, before the restore ends for all (docs/protocol.md §10).
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "server/coordinator.h"

namespace holdfast {
namespace {

constexpr Duration kSourceWait = std::chrono::seconds(10);
constexpr Duration kSourceAgain = std::chrono::milliseconds(500);

bool MayPass(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsFailedPrecondition(status) ||
         absl::IsDeadlineExceeded(status);
}

}  // namespace

// Of the session's round that goes on; the rank has no other source.
bool Coordinator::WaitsForSource(const FetchFailed& m, Turn& t) {
  if (m.from != TierKind::kPeer || m.source_bad || !MayPass(m.status)) {
    return false;
  }
  const auto [it, first] = source_waits_.try_emplace(m.rank);
  SourceWait& wait = it->second;
  if (first) {
    wait.until = t.time.now + kSourceWait;
    Tell(Report::Kind::kTrouble,
         absl::StrCat("restore: step ", m.checkpoint.step, " of attempt ", m.checkpoint.attempt,
                      ", rank ", m.rank, " waits up to ", FormatDuration(kSourceWait), ": ",
                      Message(m.status)),
         0, t);
  }
  if (wait.until <= t.time.now) {
    source_waits_.erase(it);
    return false;
  }
  wait.failed = m;
  wait.again = std::min(wait.until, t.time.now + kSourceAgain);
  return true;
}

bool Coordinator::LoadsInRound(const FetchFailed& m) const {
  const Member* member = members_.Find(m.rank);
  return session_ && session_->loading() && session_->id() == m.session &&
         session_->round() == m.round && session_->checkpoint() == m.checkpoint &&
         member != nullptr && session_->Has(m.rank, member->process);
}

void Coordinator::AdvanceSourceWaits(Turn& t) {
  std::vector<FetchFailed> due;
  for (auto& [rank, wait] : source_waits_) {
    if (wait.failed && (wait.again <= t.time.now || !LoadsInRound(*wait.failed))) {
      due.push_back(*std::exchange(wait.failed, std::nullopt));
    }
  }
  for (const FetchFailed& m : due) {
    TryAgain(m, t);
  }
  if (!session_) {
    source_waits_.clear();
  }
}

void Coordinator::TryAgain(const FetchFailed& m, Turn& t) {
  if (!IsCurrent(m.attempt, m.token, t)) {
    source_waits_.erase(m.rank);
    return;
  }
  if (!LoadsInRound(m)) {
    source_waits_.erase(m.rank);
    return NextSource(m, t);
  }
  const auto it = checkpoints_.find(m.checkpoint);
  std::set<TierKind> without;
  for (const auto& [tier, why] : failed_sources_[m.rank]) {
    without.insert(tier);
  }
  without.erase(TierKind::kPeer);
  const bool there = it != checkpoints_.end() &&
                     NearestFor(it->second, m.rank, SeatOf(m.rank), without).has_value();
  if (there) {
    failed_sources_[m.rank].erase(TierKind::kPeer);
    return OfferSource(m.token, m.rank, m.session, m.round, m.checkpoint, t);
  }
  NextSource(m, t);  // it is not told of now: it may be in a moment
}

// The rank enters anew.
void Coordinator::EndSourceWait(Rank rank, const Failure& why, Turn& t) {
  const auto it = source_waits_.find(rank);
  if (it == source_waits_.end()) {
    return;
  }
  const std::optional<FetchFailed> failed = std::move(it->second.failed);
  source_waits_.erase(it);
  if (failed) {
    Refuse(failed->token, why, t);
  }
}

std::optional<MonotonicTime> Coordinator::SourceWaitsWake() const {
  std::optional<MonotonicTime> wake;
  for (const auto& [rank, wait] : source_waits_) {
    if (wait.failed) {
      wake = wake ? std::min(*wake, wait.again) : wait.again;
    }
  }
  return wake;
}

}  // namespace holdfast
