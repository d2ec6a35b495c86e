// What a job shows of itself, and what must always hold in it.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "recovery/protection.h"
#include "server/coordinator.h"

namespace holdfast {
namespace {

v1::Protection::FailureKind ToProto(FailureKind kind) {
  switch (kind) {
    case FailureKind::kProcess:
      return v1::Protection::FAILURE_KIND_PROCESS;
    case FailureKind::kReboot:
      return v1::Protection::FAILURE_KIND_REBOOT;
    case FailureKind::kNode:
      return v1::Protection::FAILURE_KIND_NODE;
    case FailureKind::kDomain:
      return v1::Protection::FAILURE_KIND_DOMAIN;
    case FailureKind::kAllNodes:
      return v1::Protection::FAILURE_KIND_ALL_NODES;
  }
  return v1::Protection::FAILURE_KIND_UNSPECIFIED;
}

}  // namespace

std::vector<CheckpointId> Coordinator::AllCheckpoints() const {
  std::vector<CheckpointId> all;
  for (const auto& [id, checkpoint] : checkpoints_) {
    all.push_back(id);
  }
  return all;
}

bool Coordinator::IsCommitted(CheckpointId id) const {
  const auto it = checkpoints_.find(id);
  return it != checkpoints_.end() && it->second.committed;
}

bool Coordinator::IsCommittedIn(TierKind tier, CheckpointId id) const {
  const auto it = checkpoints_.find(id);
  return it != checkpoints_.end() && it->second.CommittedAt(tier);
}

uint32_t Coordinator::WorldSizeOf(CheckpointId id) const {
  const auto it = checkpoints_.find(id);
  return it == checkpoints_.end() ? 0 : it->second.world_size;
}

void Coordinator::FillStatus(v1::JobStatus& status, EventTime time, Detail detail) const {
  status.set_name(name_);
  status.set_uuid(uuid_.ToString());
  status.set_uid(uid_);
  status.set_attempt(attempt());
  status.set_ranks_alive(static_cast<uint32_t>(RanksAlive()));
  status.set_host(settings_.nodes->Name(kHere));
  status.set_nodes(static_cast<uint32_t>(members_.by_node().size()));
  std::vector<std::string> named;
  for (const auto& [node, ranks] : members_.by_node()) {
    named.push_back(settings_.nodes->Name(node));
  }
  std::sort(named.begin(), named.end());
  named.resize(
      std::min(named.size(), detail == Detail::kWhole ? kNodesNamedMax : kNodesInOverview));
  status.mutable_node_names()->Add(named.begin(), named.end());
  if (!attempts_.empty()) {
    const AttemptInfo& info = attempts_.rbegin()->second;
    status.set_world_size(info.world_size);
    status.set_phase(RanksAlive() == 0                 ? v1::JobStatus::ATTEMPT_PHASE_ENDED
                     : info.decided                    ? v1::JobStatus::ATTEMPT_PHASE_RUNNING
                     : session_ && session_->loading() ? v1::JobStatus::ATTEMPT_PHASE_RESTORING
                                                       : v1::JobStatus::ATTEMPT_PHASE_GATHERING);
  }
  if (stop_.noticed()) {
    v1::Stopping& stopping = *status.mutable_stopping();
    stopping.set_rank(stop_.rank());
    stopping.set_left_ms(std::max(stop_.by() - time.now, Duration::zero()) /
                         std::chrono::milliseconds(1));
    stopping.set_chosen(stop_.last().has_value());
    stopping.set_last_step(stop_.last().value_or(0));
  }
  for (const NodeId node : leaving_) {
    *status.add_leaving() = LeavingState(node);
  }
  for (const auto& [id, checkpoint] : checkpoints_) {
    if (checkpoint.Open()) {
      v1::StepInFlight& open = *status.add_in_flight();
      open.set_attempt(id.attempt);
      open.set_step(id.step);
      open.set_ranks_sealed(static_cast<uint32_t>(checkpoint.shards.size()));
      open.set_world_size(checkpoint.world_size);
    }
  }
  TierSet configured = 0;
  for (const TierKind tier : kAllTiers) {
    configured |= Configured(tier) ? SetOf(tier) : TierSet{0};
  }
  for (const ProtectionLine& line : ProtectionTable(Views(), line_, configured)) {
    v1::Protection& protection = *status.add_protection();
    protection.set_kind(ToProto(line.kind));
    if (line.survives) {
      protection.set_any(true);
      protection.set_attempt(line.survives->attempt);
      protection.set_step(line.survives->step);
      protection.set_age_ms(
          std::max<int64_t>(0, time.unix_ms - checkpoints_.at(*line.survives).unix_ms));
      protection.set_from(line.from);
    }
  }
  FillTiers(status, time);
  const bool whole = detail == Detail::kWhole;
  for (const Loss& loss : losses_) {
    if (!whole && static_cast<size_t>(status.losses_size()) >= kLossesInOverview) {
      break;
    }
    v1::StepLoss& out = *status.add_losses();
    out.set_attempt(loss.id.attempt);
    out.set_step(loss.id.step);
    // The message names the step for whoever hears it alone; here it stands beside it.
    absl::string_view why = loss.why;
    absl::ConsumePrefix(&why,
                        absl::StrCat("step ", loss.id.step, " of attempt ", loss.id.attempt, " "));
    out.set_why(std::string(why));
    out.set_unix_ms(loss.unix_ms);
  }
  const size_t events = whole ? events_.size() : std::min(events_.size(), kEventsInOverview);
  for (auto it = events_.end() - static_cast<ptrdiff_t>(events); it != events_.end(); ++it) {
    const Past& past = *it;
    v1::Event& out = *status.add_events();
    out.set_unix_ms(past.unix_ms);
    out.set_text(past.text);
  }
  if (prefetch_) {
    *status.mutable_prefetch() = PrefetchState();
  }
  if (session_) {
    *status.mutable_restore() = RestoreState();
  }
  if (restore_point_.set()) {
    status.set_restore_point(
        restore_point_.from_scratch()
            ? "from scratch"
            : absl::StrCat("attempt ", restore_point_.attempt(), " step ", restore_point_.step()));
  }
}

v1::Restore Coordinator::RestoreState() const {
  v1::Restore state;
  const uint32_t ranks = world_size();
  const bool loading = session_->loading();
  state.set_ranks_done(static_cast<uint32_t>(loading ? session_->loaded() : session_->entered()));
  std::string what;
  if (loading) {
    const CheckpointId id = session_->checkpoint();
    state.set_attempt(id.attempt);
    state.set_step(id.step);
    state.set_saved_by(WorldSizeOf(id));
    what = absl::StrCat(
        "step ", id.step, " of attempt ", id.attempt,
        state.saved_by() == ranks ? "" : absl::StrCat(", which ", state.saved_by(), " ranks saved"),
        ": ");
  }
  state.set_text(absl::StrCat(
      what, state.ranks_done(), " of ", ranks, " ranks have ", loading ? "loaded it" : "asked",
      state.ranks_done() < ranks ? absl::StrCat("; waits for ", session_->MissingRanks())
      : loading                  ? ""
                                 : "; waits for what may be newer, and is not known yet"));
  return state;
}

void Coordinator::FillList(v1::ListCheckpointsReply& reply) const {
  for (const bool wanted_on_line : {true, false}) {
    for (auto it = checkpoints_.rbegin(); it != checkpoints_.rend(); ++it) {
      const auto& [id, checkpoint] = *it;
      const bool on_line = OnLine(line_, id);
      if (on_line != wanted_on_line) {
        continue;
      }
      v1::Checkpoint& out = *reply.add_checkpoints();
      out.set_attempt(id.attempt);
      out.set_step(id.step);
      // What lacks copies that are only out of reach is not bad.
      const bool unread = !AllInventoriesKnown() && !checkpoint.contradictory &&
                          checkpoint.BadAt(TierKind::kMemory) + checkpoint.BadAt(TierKind::kNvme) +
                                  checkpoint.BadAt(TierKind::kRemote) ==
                              0;
      out.set_state(checkpoint.dead && !unread ? v1::Checkpoint::STATE_BAD
                    : checkpoint.committed     ? v1::Checkpoint::STATE_COMMITTED
                                               : v1::Checkpoint::STATE_INCOMPLETE);
      out.set_on_line(on_line);
      out.set_shards(static_cast<uint32_t>(checkpoint.shards.size()));
      out.set_world_size(checkpoint.world_size);
      out.set_bytes(checkpoint.bytes);
      out.set_unix_ms(checkpoint.unix_ms);
      out.set_pinned(Pinned(id));
      for (const TierKind tier : kAllTiers) {
        if (checkpoint.AnyAt(tier)) {
          out.add_tiers(std::string(TierName(tier)));
        }
      }
    }
  }
}

std::string Coordinator::CheckInvariants() const {
  const auto broken = [&](const std::string& what) {
    return absl::StrCat("job '", name_, "': ", what);
  };
  size_t protected_steps = 0;
  for (const auto& [id, checkpoint] : checkpoints_) {
    const std::string where = absl::StrCat("attempt ", id.attempt, " step ", id.step);
    if (const std::string counts = checkpoint.CheckCounts(); !counts.empty()) {
      return broken(absl::StrCat(where, ": ", counts));
    }
    if (checkpoint.committed && (checkpoint.dead || !checkpoint.Whole())) {
      return broken(absl::StrCat(where, ": committed with ", checkpoint.good, " of ",
                                 checkpoint.world_size, " shards"));
    }
    const bool open = checkpoint.Open();
    if (open && id.attempt != attempt() && AllInventoriesKnown()) {
      return broken(absl::StrCat(where, ": still open although the attempt was superseded"));
    }
    if (open && checkpoint.Whole()) {
      return broken(absl::StrCat(where, ": whole but not committed"));
    }
    for (const Drain& drain : checkpoint.drains) {
      if (drain.phase == Drain::Phase::kRunning && drain.waiting.empty()) {
        return broken(absl::StrCat(where, ": a flush that nobody will end"));
      }
      if (!drain.waiting.empty() && drain.phase != Drain::Phase::kRunning) {
        return broken(absl::StrCat(where, ": flushes are under way that nobody counts"));
      }
    }
    if (Removing(id) != checkpoint.removing) {
      return broken(absl::StrCat(where, ": its removal is miscounted"));
    }
    if (!checkpoint.AnyAt(TierKind::kMemory) && checkpoint.writing.empty() &&
        !checkpoint.AnythingDurable() && !checkpoint.AnyAway()) {
      return broken(absl::StrCat(where, ": nothing of it is anywhere"));
    }
    protected_steps += checkpoint.is_protected ? 1 : 0;
    if (id.attempt == attempt() && fates_.count(id.step) > 0) {
      return broken(absl::StrCat(where, ": lost and still there"));
    }
  }
  if (protected_steps > 1) {
    return broken("more than one step is protected");
  }
  for (const auto& [node, absence] : absent_) {
    if (absence.ended && !LivingMembersOn(node).empty()) {
      return broken(absl::StrCat(settings_.nodes->Name(node), " is gone, and rank ",
                                 LivingMembersOn(node).front().first, " lives on there"));
    }
  }
  if (!attempts_.empty() && highest_attempt_ < attempt()) {
    return broken("an attempt is above the highest");
  }
  if (durable_version_ > version_ || needed_version_ > version_ || in_flight_version_ > version_) {
    return broken("the state's versions run backwards");
  }
  if (!durable_waits_.empty() && in_flight_version_ == 0 && !write_due_) {
    return broken("somebody waits for a write that nobody will do");
  }
  if (!readers_.empty() && (!InventoryPending() || removed_)) {
    return broken("readers wait for tiers that have been read");
  }
  if (session_ && (session_->attempt() != attempt() || attempts_.rbegin()->second.decided)) {
    return broken("a session is open for an attempt that is over or has decided");
  }
  if (joins_.size() > kPendingJoinsMax || readers_.size() > kReadersMax ||
      losses_.size() > kLossesMax || events_.size() > kEventsMax || fates_.size() > kFatesMax) {
    return broken("a list is over its limit");
  }
  return "";
}

}  // namespace holdfast
