// A restore that could use an older step than the newest that was saved: whether it does, waits, or
// is refused (recovery/fall_back.h, docs/protocol.md §6).
#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "server/coordinator.h"
#include "server/tier_lists.h"

namespace holdfast {

// The newest step of the line that was saved, as far as is known. Only committed steps are flushed,
// so what a durable tier has of one was saved. `named`: it is known by the name of a damaged file
// alone. (What of these is not on the line has another attempt's number.)
std::optional<CheckpointId> Coordinator::NewestSaved(CheckpointId restored,
                                                     const NamedBad** named) const {
  *named = nullptr;
  std::optional<CheckpointId> newest = NewestOnLine([](const AttemptInfo& info) {
    return info.any_committed ? std::optional(info.last_committed_step) : std::nullopt;
  });
  for (const auto& [id, checkpoint] : checkpoints_) {
    const bool durable = checkpoint.AnyAt(TierKind::kNvme) || checkpoint.AnyAt(TierKind::kRemote);
    if (durable && OnLine(line_, id) && (!newest || *newest < id)) {
      newest = id;
    }
  }
  for (const auto& [key, bad] : named_bad_) {
    const bool counts = key.id.attempt > restored.attempt || OnLine(line_, key.id);
    if (counts && (!newest || *newest < key.id)) {
      newest = key.id;
      *named = &bad;
    }
  }
  return newest;
}

// Absent: nothing newer was saved, and no place that has still to be read may have anything newer.
std::optional<NewerStep> Coordinator::NewerThan(CheckpointId usable) const {
  NewerStep newer;
  const NamedBad* named = nullptr;
  const std::optional<CheckpointId> newest = NewestSaved(usable, &named);
  if (newest && usable < *newest) {
    newer.id = *newest;
    newer.why = WhyNotUsed(*newest, named);
  }
  AddUnread(usable, newer);
  if (newer.id.attempt == 0 && newer.coming.empty() && newer.unread.empty()) {
    return std::nullopt;
  }
  return newer;
}

std::string Coordinator::WhyNotUsed(CheckpointId id, const NamedBad* named) const {
  if (named != nullptr) {
    return absl::StrCat("'", named->location, "' is corrupt: ", named->what);
  }
  const auto known = checkpoints_.find(id);
  return known == checkpoints_.end()
             ? "nothing of it is left, nor of what was saved after it in memory only"
         : known->second.committed ? "not every rank could load it"
                                   : WhyNotWhole(id, known->second);
}

// Where the rest of what is newer than that step may be.
void Coordinator::AddUnread(CheckpointId usable, NewerStep& newer) const {
  const std::vector<CheckpointId> candidates = {usable};
  for (const TierKind tier : kDurable) {
    const InventoryState::Kind kind = Inventory(tier).kind;
    if (!Configured(tier) || kind == InventoryState::Kind::kKnown ||
        !MayHoldNewer(tier, candidates)) {
      continue;
    }
    const bool pending = kind == InventoryState::Kind::kPending;
    if (!pending) {
      newer.unread.push_back(WhyUnread(tier));
    } else if (tier != TierKind::kNvme || nvme_on_.empty() || nvme_on_.AnyPendingBut(missing_)) {
      newer.coming.push_back(WhyUnread(tier));
    } else {
      newer.coming.push_back(WhatTheSessionWaitsFor());
    }
  }
  if (ManifestComing(candidates)) {
    newer.coming.emplace_back("its manifest is being written in remote");
  }
  if (!AnyCutOffAbove(candidates)) {
    return;
  }
  if (MayComeBack(candidates)) {
    newer.coming.push_back(WhatTheSessionWaitsFor());
  }
  std::set<NodeId> gone;  // but for those of which somebody said that they are lost
  std::copy_if(missing_.begin(), missing_.end(), std::inserter(gone, gone.end()),
               [&](NodeId node) { return unreachable_.count(node) + replaced_.count(node) == 0; });
  if (!gone.empty()) {
    newer.unread.push_back(absl::StrCat("nodes that are gone: ", NamesOf(gone)));
  }
}

// Whether the session goes on with that step, although it may not be the newest that was saved.
// Otherwise it waits, or has failed.
bool Coordinator::MayUse(CheckpointId step, Turn& t) {
  const std::optional<NewerStep> newer = NewerThan(step);
  if (!newer) {
    ForgetWaitForCopies(t);
    return true;
  }
  const FallBackRule::Decision decision = fall_back_.Judge(
      *newer, t.time.now, session_->Deadline(),
      {settings_.wait_for_copies, settings_.fall_back, session_->AllWithin(kLeftForRestore)});
  const std::string how = absl::StrCat("ckptctl restore ", name_, " --step ", step.step);
  if (decision.kind == FallBackRule::Kind::kWait) {
    waits_for_inventory_ = true;
    if (decision.tell) {
      Tell(Report::Kind::kTrouble,
           absl::StrCat("restore: ", decision.text, "; to use step ", step.step, " now: ", how), 0,
           t);
      PersistLazily(t);
    }
    return false;
  }
  if (decision.kind == FallBackRule::Kind::kRefuse) {
    FailSession({absl::StatusCode::kDataLoss, v1::Failure::REASON_UNREADABLE,
                 absl::StrCat("restore of job '", name_, "': ", FallBackRule::NameOf(newer->id),
                              " cannot be restored: ", decision.text, "; step ", step.step,
                              " is not used instead, since restore.fall_back is false; to use it: ",
                              how, "; what there is: ckptctl explain ", name_)},
                t);
    return false;
  }
  PersistLazily(t);
  return true;
}

void Coordinator::EndWaitForCopies(Turn& t) {
  if (fall_back_.waiting()) {
    fall_back_.Stop(t.time.now);
    PersistLazily(t);
  }
}

void Coordinator::ForgetWaitForCopies(Turn& t) {
  if (fall_back_.SoFar(t.time.now).time > Duration{}) {
    fall_back_.Forget();
    PersistLazily(t);
  }
}

// What was saved and is newer than the one that is restored, and why it was not; empty: nothing.
std::string Coordinator::WhatIsPassedOver(CheckpointId restored) const {
  constexpr size_t kTextBytesMax = 1000;
  const std::optional<NewerStep> newer = NewerThan(restored);
  if (!newer) {
    return "";
  }
  std::vector<std::string> whys = newer->coming;
  whys.insert(whys.end(), newer->unread.begin(), newer->unread.end());
  if (!newer->why.empty()) {
    whys.push_back(newer->why);
  }
  return absl::StrCat(FallBackRule::NameOf(newer->id),
                      " is passed over: ", absl::StrJoin(whys, "; "))
      .substr(0, kTextBytesMax);
}

// ---- Over restarts: what earlier restores have waited counts ----

void Coordinator::LoadStepWait(const v1::StepWait& wait) {
  constexpr uint64_t kMax = std::chrono::milliseconds(std::chrono::hours(24)).count();
  fall_back_.Load(
      {{wait.attempt(), wait.step()}, std::chrono::milliseconds(std::min(wait.waited_ms(), kMax))});
}

void Coordinator::SaveStepWait(MonotonicTime now, v1::JobState& state) const {
  const FallBackRule::Waited waited = fall_back_.SoFar(now);
  if (waited.time > Duration{}) {
    state.mutable_step_wait()->set_attempt(waited.id.attempt);
    state.mutable_step_wait()->set_step(waited.id.step);
    state.mutable_step_wait()->set_waited_ms(
        static_cast<uint64_t>(waited.time / std::chrono::milliseconds(1)));
  }
}

}  // namespace holdfast
