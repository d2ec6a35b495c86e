#include "server/coordinator.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/node_ranges.h"

namespace holdfast {

Coordinator::Coordinator(const CoordinatorSettings& settings, JobUuid uuid, std::string name,
                         uint32_t uid, uint32_t gid, uint64_t first_session)
    : settings_(settings),
      uuid_(uuid),
      name_(std::move(name)),
      uid_(uid),
      gid_(gid),
      next_session_(first_session) {
  // (What lies in peers' memory each of them tells when it comes.)
  inventory_[static_cast<size_t>(TierKind::kPeer)] = {TierKind::kPeer, InventoryState::Kind::kKnown,
                                                      ""};
}

absl::Status Coordinator::Load(const v1::JobState& state) {
  const auto bad = [&](const std::string& what) {
    return absl::DataLossError(absl::StrCat("state of job '", name_, "': ", what));
  };
  for (const v1::AttemptState& a : state.attempts()) {
    if (a.attempt() == 0 || a.world_size() == 0 || a.world_size() > kWorldSizeMax ||
        a.parent_attempt() >= a.attempt()) {
      return bad(absl::StrCat("attempt ", a.attempt(), " (world size ", a.world_size(), ", parent ",
                              a.parent_attempt(), ") contradicts itself"));
    }
    AttemptInfo info;
    info.launch = a.launch();
    info.world_size = a.world_size();
    info.decided = a.decided();
    info.parent = {a.parent_attempt(), a.parent_step()};
    info.any_committed = a.any_committed();
    info.last_committed_step = a.last_committed_step();
    info.opened_unix_ms = a.opened_unix_ms();
    info.opening = a.opening();
    if (a.has_last_nvme_step()) {
      info.last_nvme_step = a.last_nvme_step();
    }
    if (a.has_last_remote_step()) {
      info.last_remote_step = a.last_remote_step();
    }
    if (!attempts_.emplace(a.attempt(), info).second) {
      return bad(absl::StrCat("attempt ", a.attempt(), " is there twice"));
    }
    highest_attempt_ = std::max(highest_attempt_, a.attempt());
    if (a.attempt() == attempts_.rbegin()->first) {
      if (const absl::Status joined = joined_before_.Load(a, *settings_.nodes); !joined.ok()) {
        return bad(absl::StrCat("attempt ", a.attempt(), ": ", Message(joined)));
      }
    }
  }
  highest_attempt_ = std::max(highest_attempt_, state.highest_attempt());
  highest_epoch_ = state.highest_epoch();
  restore_point_ = state.restore_point();
  policy_ = state.policy();
  policy_set_ = state.policy_set();
  for (v1::Policy* policy : {&policy_, &policy_set_}) {  // (of a daemon that still took "none")
    if (!v1::TierPolicy::Verify_IsValid(policy->nvme().verify())) {
      policy->mutable_nvme()->clear_verify();
    }
    if (!v1::TierPolicy::Verify_IsValid(policy->remote().verify())) {
      policy->mutable_remote()->clear_verify();
    }
  }
  for (const v1::Pin& pin : state.pins()) {
    pins_.insert({pin.attempt(), pin.step()});
  }
  for (const std::string& bytes : state.removed_before()) {
    const absl::StatusOr<JobUuid> uuid = JobUuid::FromBytes(bytes);
    if (!uuid.ok() || removed_before_.size() >= kRemovedBeforeMax) {
      return bad("the jobs that had its name before are too many, or one is no uuid");
    }
    removed_before_.push_back(*uuid);
  }
  const absl::Status nodes = CheckNodeRanges(state.nodes());
  if (!nodes.ok() || (!state.writer().empty() && !CheckJobName(state.writer()).ok())) {
    return bad(nodes.ok() ? "who wrote it has no name that a node can have" : Message(nodes));
  }
  history_known_ = !state.history_unknown();
  LoadStepWait(state.step_wait());
  version_ = durable_version_ = state.version();
  if (state.epoch() != 0) {
    // Of a cluster's nodes some may have been told it before it was agreed on, and perhaps it never
    // was: nobody hears of anything in it before this host has had it agreed on.
    decision_version_ = ++version_;
  }
  needed_version_ = version_;
  LoadMembers(state);
  ComputeLine();
  if (restore_point_.set() && !restore_point_.from_scratch()) {
    prefetch_.emplace(CheckpointId{restore_point_.attempt(), restore_point_.step()});
  }
  return absl::OkStatus();
}

// Those whose process lives are taken to be there still, silent as they may be; the agent watches
// them.
void Coordinator::LoadMembers(const v1::JobState& state) {
  loaded_attempt_ = attempt();
  const NodeId writer = state.writer().empty() ? kHere : settings_.nodes->Number(state.writer());
  for (const v1::MemberState& m : state.members()) {
    if (m.rank() < world_size()) {
      const ProcessId process{m.process().pid(), m.process().start_ticks(), writer};
      members_.Set(m.rank(), {process, 0, !m.gone(), true});
    }
  }
  for (const std::string& name : NodesIn(state.nodes())) {
    const NodeId node = settings_.nodes->Number(name);
    to_tell_.insert(node);
    if (node != kHere) {
      unheard_.insert(node);
      Miss(node, true, "it has not been heard of yet");
    }
  }
  if (!unheard_.empty()) {
    SumUpNvme();
  }
}

void Coordinator::Resume(const std::vector<FoundShard>& shards, EventTime time,
                         std::vector<ForAgent>& out) {
  Turn t{time, out};
  TakeShards(shards, t);
  FlushState(t);
}

// Every copy speaks for itself: what it says of its attempts fills gaps in a state that was lost or
// is old.
void Coordinator::Learn(const SealedCopy& copy, bool& learned) {
  for (const Descent& d : copy.descent) {
    if (d.attempt == 0 || d.parent.attempt >= d.attempt || d.attempt > copy.id.attempt) {
      continue;
    }
    auto [it, fresh] = attempts_.try_emplace(d.attempt);
    if (fresh) {
      it->second.world_size = copy.world_size;
      it->second.opened_unix_ms = copy.sealed_unix_ms;
    }
    if (!it->second.decided) {
      it->second.decided = true;
      it->second.parent = d.parent;
      learned = true;
    }
    learned = learned || fresh;
  }
  highest_attempt_ = std::max(highest_attempt_, copy.id.attempt);
}

void Coordinator::Handle(const ToCoordinator& message, NodeId from, EventTime time,
                         std::vector<ForAgent>& out) {
  Turn t{time, out, from};
  if (!std::holds_alternative<SessionAsked>(message)) {
    runs_read_on_.clear();
  }
  LookForPrefetch(message, from);
  LookForRepairs(message);
  std::visit([&](const auto& m) { On(m, t); }, message);
  if (!readers_.empty() && !InventoryPending()) {
    RetryReaders(t);
  }
  AdvancePrefetch(t);
  AdvanceRepairs(t);
  AdvanceSourceWaits(t);
}

void Coordinator::On(const StateWritten& m, Turn& t) {
  if (m.version != in_flight_version_) {
    return;
  }
  in_flight_version_ = 0;
  if (!m.status.ok()) {
    if (write_problem_.empty()) {
      Tell(Report::Kind::kTrouble,
           absl::StrCat("the job's state could not be written, trying again: ", Message(m.status)),
           0, t);
    }
    write_problem_ = Message(m.status);
    if (!removed_ || removal_version_) {
      write_due_ = t.time.now + kStateRetry;
    }
    return;
  }
  write_problem_.clear();
  durable_version_ = m.version;
  if (removal_version_ && durable_version_ >= *removal_version_) {
    t.Say(RemovalAgreed{});
  }
  if (durable_version_ >= decision_version_ && !held_until_durable_.empty()) {
    held_until_durable_.clear();
    On(CollectGarbageAsked{}, t);  // it waited for the decision
  }
  while (!durable_waits_.empty() && durable_waits_.front().version <= durable_version_) {
    Answer(std::move(durable_waits_.front().message), t);
    durable_waits_.pop_front();
  }
  const auto durable = [&](const auto& u) { return u.second <= durable_version_; };
  if (std::erase_if(unpinned_, durable) > 0) {
    On(CollectGarbageAsked{}, t);
  }
  FlushState(t);
}

void Coordinator::On(const WakeUp&, Turn& t) {
  std::vector<CheckpointId> late;
  for (const auto& [id, checkpoint] : checkpoints_) {
    if (id.attempt == attempt() && checkpoint.Open() && !MayBeFound(checkpoint) &&
        checkpoint.begun + settings_.commit_deadline <= t.time.now) {
      late.push_back(id);
    }
  }
  for (const CheckpointId& id : late) {
    Abandon(id,
            absl::StrCat("not all ranks had sealed it ",
                         settings_.commit_deadline / std::chrono::milliseconds(1),
                         " ms after the first one began (save.commit_deadline_ms)"),
            t);
  }
  ChooseLastStep(t);
  RetryRoom(t);
  GoOnWithSession(t);
  EndGrace(t.time.now);
  RetainDurable(t);
  PumpDrains(t);
  FlushState(t);
}

void Coordinator::On(const JobRemoved& m, Turn& t) {
  removed_ = m.removed;
  if (!removed_) {
    ForgetDurable(t);
    // It stays: what was not written for its sake is written now.
    if (version_ != durable_version_) {
      write_due_ = t.time.now;
    }
    return FlushState(t);
  }
  EndPrefetch(t);
  EndFetchAhead(t);
  // Nothing is written any more: no write may be due, and nobody may wait for one.
  write_due_.reset();
  const Failure removed{absl::StatusCode::kAborted, v1::Failure::REASON_SHED,
                        absl::StrCat("job '", name_, "' was removed")};
  for (const CheckpointId& id : AllCheckpoints()) {
    for (const TierKind tier : kAllTiers) {
      Unwant(id, tier, "the job was removed", t);
    }
    if (!m.agreed_first) {  // (else nothing is given up before that)
      LetGo(id, removed, t);
    }
  }
  for (const DurableWait& wait : durable_waits_) {
    Refuse(wait.token, removed, t);
  }
  durable_waits_.clear();
  RetryReaders(t);
  while (const auto waits = joins_.Next(0, std::nullopt)) {
    Refuse(joins_.TakeAt(*waits).token, removed, t);
  }
  if (m.agreed_first) {
    removal_version_ = version_ + 1;
    write_due_ = t.time.now;  // not after what failed before: no later time would be set
    Persist(t);
  }
}

void Coordinator::On(const RequestExpired& m, Turn& t) {
  Failure failure{absl::StatusCode::kDeadlineExceeded, v1::Failure::REASON_UNSPECIFIED,
                  "the deadline passed"};
  if (const std::optional<JoinAsked> join = joins_.Take(m.token)) {
    const Failure now = Judge(*join).failure;
    return Refuse(m.token, now.message.empty() ? failure : now, t);
  }
  for (const DurableWait& wait : durable_waits_) {
    if (wait.token == m.token) {
      failure.code = absl::StatusCode::kUnavailable;
      failure.message = absl::StrCat(
          "the state of job '", name_, "' is not written yet",
          write_problem_.empty() ? "" : absl::StrCat(": ", write_problem_), "; ask again");
      const std::set<Rank> gone = ForgetDurableWaits(m.token, t);
      Refuse(m.token, failure, t);
      return RetryJoinsFor(gone, t);
    }
  }
  if (session_ && session_->IsWaiting(m.token)) {
    failure.message = absl::StrCat(
        "restore of job '", name_, "', attempt ", attempt(),
        ": the deadline passed while waiting for ",
        waits_for_inventory_
            ? absl::StrCat(fall_back_.waiting() ? fall_back_.places() : WhatTheSessionWaitsFor(),
                           HowNotToWait())
            : absl::StrCat(session_->MissingRanks(),
                           session_->loading() ? " to load" : " to enter"));
    return FailSession(failure, t);
  }
  if (readers_.erase(m.token) > 0) {
    failure.message =
        "the durable tiers are still being read, and may hold the step, or a newer one; try again, "
        "or name a step";
    return Refuse(m.token, failure, t);
  }
  if (const auto it = awaits_.find(m.token); it != awaits_.end()) {
    const auto found = checkpoints_.find({attempt(), it->second.step});
    failure.reason = v1::Failure::REASON_NOT_YET;
    failure.message =
        absl::StrCat("step ", it->second.step, " is not there yet",
                     found == checkpoints_.end() ? "" : HowFar(found->second, it->second.stage));
    ForgetAwait(m.token);
  }
  Refuse(m.token, failure, t);
}

void Coordinator::On(const RequestCancelled& m, Turn& t) {
  readers_.erase(m.token);
  std::erase_if(room_waits_, [&m](const auto& wait) { return wait.asked.token == m.token; });
  joins_.Take(m.token);
  ForgetAwait(m.token);
  if (session_) {
    session_->StopWaiting(m.token);
  }
  RetryJoinsFor(ForgetDurableWaits(m.token, t), t);
}

void Coordinator::On(const RestorePointAsked& m, Turn& t) {
  if (removed_) {
    return Refuse(
        m.token,
        {absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_UNSPECIFIED,
         absl::StrCat("job '", name_, "' is being removed: it restores nothing any more")},
        t);
  }
  const v1::SetRestorePointRequest& request = m.request;
  v1::RestorePoint point;
  std::string text = "the next restore uses the newest step again";
  if (request.from_scratch()) {
    point.set_set(true);
    point.set_from_scratch(true);
    text = "the next restore of the job starts from scratch";
  } else if (!request.clear()) {
    const absl::StatusOr<CheckpointId> found =
        FindCommitted(CheckpointId{request.attempt(), request.step()});
    if (!found.ok()) {
      return Refuse(
          m.token,
          {found.status().code(), v1::Failure::REASON_UNSPECIFIED, Message(found.status())}, t);
    }
    point.set_set(true);
    point.set_attempt(found->attempt);
    point.set_step(found->step);
    text = absl::StrCat("the next restore of the job uses step ", found->step, " of attempt ",
                        found->attempt);
  }
  EndPrefetch(t);
  EndFetchAhead(t);
  restore_point_ = point;
  ++restore_point_changes_;
  Persist(t);
  BeginPrefetch(t);
  if (prefetch_) {
    const v1::Prefetch state = PrefetchState();
    absl::StrAppend(&text, "; ", state.text(),
                    state.under_way() > 0
                        ? absl::StrCat("; ckptctl explain ", name_, " shows how far it is")
                        : "");
  }
  AnswerWhenDurable(m.token, RestorePointSet{m.token, text}, t);
  if (session_ && !session_->loading()) {
    GoOnWithSession(t);  // it waits for what may be newer: what was chosen is what it is
  }
}

void Coordinator::Persist(Turn& t) {
  ++version_;
  needed_version_ = version_;
  FlushState(t);
}

void Coordinator::PersistLazily(Turn& t) {
  ++version_;
  if (!write_due_ && !removed_) {
    write_due_ = t.time.now + kStateLaziness;
  }
}

// One write at a time: two could be performed in either order, and the older one would win.
void Coordinator::FlushState(Turn& t) {
  const bool due = write_due_ && *write_due_ <= t.time.now;
  const bool repeating = !write_problem_.empty() && !due;  // wait before the next try
  if ((removed_ && !removal_version_) || in_flight_version_ != 0 || version_ == durable_version_ ||
      repeating || (needed_version_ <= durable_version_ && !due)) {
    return;
  }
  write_due_.reset();
  if (named_version_ == version_) {
    ++version_;  // it failed, and may have happened all the same: what is told now may differ
  }
  in_flight_version_ = version_;
  named_ = NodesOfIt();
  named_version_ = version_;
  t.Say(PersistState{State(named_, t.time.now), on_disk_version_ > durable_version_});
}

// Where its ranks are, and where something of it lies, as far as is known or was before.
NodeMarks Coordinator::NodesOfIt() const {
  NodeMarks nodes;
  for (const std::set<NodeId>* others : {&missing_, &to_tell_}) {
    for (const NodeId node : *others) {
      nodes.Set(node);
    }
  }
  for (const auto& [node, ranks] : members_.by_node()) {
    nodes.Set(node);
  }
  for (const auto& [id, checkpoint] : checkpoints_) {
    checkpoint.AddNodes(nodes);
  }
  return nodes;
}

v1::JobState Coordinator::State(const NodeMarks& nodes, MonotonicTime now) const {
  v1::JobState state;
  state.set_job_uuid(uuid_.ToBytes());
  state.set_name(name_);
  state.set_uid(uid_);
  state.set_gid(gid_);
  state.set_version(version_);
  state.set_highest_attempt(highest_attempt_);
  state.set_highest_epoch(highest_epoch_);
  if (restore_point_.set()) {
    *state.mutable_restore_point() = restore_point_;
  }
  state.set_history_unknown(!history_known_);
  SaveStepWait(now, state);
  state.set_removed(removal_version_.has_value());
  for (const JobUuid& before : removed_before_) {
    state.add_removed_before(before.ToBytes());
  }
  *state.mutable_policy() = policy_;
  *state.mutable_policy_set() = policy_set_;
  for (const CheckpointId& pinned : pins_) {
    v1::Pin& pin = *state.add_pins();
    pin.set_attempt(pinned.attempt);
    pin.set_step(pinned.step);
  }
  for (const auto& [number, info] : attempts_) {
    v1::AttemptState& a = *state.add_attempts();
    a.set_attempt(number);
    a.set_launch(info.launch);
    a.set_world_size(info.world_size);
    a.set_decided(info.decided);
    a.set_parent_attempt(info.parent.attempt);
    a.set_parent_step(info.parent.step);
    a.set_any_committed(info.any_committed);
    a.set_last_committed_step(info.last_committed_step);
    a.set_opened_unix_ms(info.opened_unix_ms);
    a.set_opening(info.opening);
    if (info.last_nvme_step) {
      a.set_last_nvme_step(*info.last_nvme_step);
    }
    if (info.last_remote_step) {
      a.set_last_remote_step(*info.last_remote_step);
    }
    if (number == attempt() && NamesWhoJoined()) {
      joined_before_.Save(number, members_, *settings_.nodes, a);
    }
  }
  if (settings_.nodes->Several()) {
    std::vector<std::string> names;
    for (const NodeId node : nodes.All()) {
      names.push_back(settings_.nodes->Name(node));
    }
    SetNodeRanges(std::move(names), state.mutable_nodes());
    state.set_writer(settings_.nodes->Name(kHere));
  }
  for (const Rank rank : members_.OnNode(kHere)) {
    const Member& member = *members_.Find(rank);
    v1::MemberState& m = *state.add_members();
    m.set_rank(rank);
    m.mutable_process()->set_pid(member.process.pid);
    m.mutable_process()->set_start_ticks(member.process.start_ticks);
    m.set_gone(!member.alive);
  }
  return state;
}

void Coordinator::Answer(ToAgent message, Turn& t) {
  if (const auto* accepted = std::get_if<JoinAccepted>(&message);
      accepted != nullptr && accepted->attempt == attempt()) {
    const Member* member = members_.Find(accepted->rank);
    if (NamesWhoJoined() && member != nullptr && !member->told) {
      PersistLazily(t);  // which still says that it was not
    }
    members_.SetTold(accepted->rank);
  }
  t.Say(std::move(message));
}

void Coordinator::AnswerWhenDurable(RequestToken token, ToAgent message, Turn& t,
                                    std::optional<uint64_t> version) {
  const uint64_t needed = version.value_or(needed_version_);
  if (needed <= durable_version_) {
    return Answer(std::move(message), t);
  }
  const auto behind = std::upper_bound(
      durable_waits_.begin(), durable_waits_.end(), needed,
      [](uint64_t wanted, const DurableWait& wait) { return wanted < wait.version; });
  durable_waits_.insert(behind, {needed, token, std::move(message)});
}

std::set<Rank> Coordinator::ForgetDurableWaits(RequestToken token, Turn& t) {
  std::set<Rank> forgotten;
  if (durable_waits_.empty()) {
    return forgotten;
  }
  std::erase_if(durable_waits_, [&](const DurableWait& wait) {
    const auto* accepted = std::get_if<JoinAccepted>(&wait.message);
    if (wait.token == token && accepted != nullptr && accepted->attempt == attempt()) {
      forgotten.insert(accepted->rank);
    }
    return wait.token == token;
  });
  // It may have asked twice, and hear of the other one.
  for (const DurableWait& wait : durable_waits_) {
    if (const auto* accepted = std::get_if<JoinAccepted>(&wait.message)) {
      forgotten.erase(accepted->rank);
    }
  }
  // A rank that was admitted but will never hear of it is not there: nobody would ever say that its
  // seat was lost.
  for (const Rank rank : forgotten) {
    if (const Member* member = members_.Find(rank); member != nullptr && !member->told) {
      members_.SetAlive(rank, false);
      PersistLazily(t);
    }
  }
  return forgotten;
}

void Coordinator::Refuse(RequestToken token, Failure failure, Turn& t) {
  if (token != 0) {
    t.Say(Refused{token, std::move(failure)});
  }
}

void Coordinator::Tell(Report::Kind kind, std::string text, uint64_t bytes, Turn& t,
                       TierKind tier) {
  events_.push_back({t.time.unix_ms, text});
  if (events_.size() > kEventsMax) {
    events_.pop_front();
  }
  t.Say(Reported{{kind, name_, std::move(text), bytes, tier}});
}

// Attempts that no copy and no line needs any more are forgotten, oldest first.
void Coordinator::PruneAttempts() {
  if (attempts_.size() <= kAttemptsMax) {
    return;
  }
  std::set<Attempt> with_copies;
  for (const auto& [id, checkpoint] : checkpoints_) {
    with_copies.insert(id.attempt);
  }
  std::set<Attempt> on_line;
  for (const Descent& d : line_) {
    on_line.insert(d.attempt);
  }
  const Attempt newest_decided = line_.empty() ? 0 : line_.front().attempt;
  const auto prune = [&](bool line_too) {
    for (auto it = attempts_.begin(); it != attempts_.end() && attempts_.size() > kAttemptsMax;) {
      const Attempt number = it->first;
      const bool needed =
          number == attempt() || number == newest_decided || with_copies.count(number) > 0;
      if (needed && line_too) {
        break;  // whatever is younger connects this one to the young end
      }
      it = needed || (!line_too && on_line.count(number) > 0) ? std::next(it) : attempts_.erase(it);
    }
  };
  prune(false);
  prune(true);
}

std::optional<MonotonicTime> Coordinator::NextWake() const {
  std::optional<MonotonicTime> wake = in_flight_version_ == 0 ? write_due_ : std::nullopt;
  for (auto it = checkpoints_.lower_bound({attempt(), 0}); it != checkpoints_.end(); ++it) {
    if (it->second.Open() && !MayBeFound(it->second)) {
      const MonotonicTime due = it->second.begun + settings_.commit_deadline;
      wake = wake ? std::min(*wake, due) : due;
    }
  }
  const auto also = [&wake](MonotonicTime due) { wake = wake ? std::min(*wake, due) : due; };
  for (const RoomWait& wait : room_waits_) {
    also(wait.until);
  }
  for (const auto& [id, checkpoint] : checkpoints_) {
    for (const Drain& drain : checkpoint.drains) {
      if (drain.phase == Drain::Phase::kWanted && drain.retry_at != MonotonicTime{} && !removed_) {
        also(drain.retry_at);
      }
    }
  }
  for (const TierKind tier : kAllTiers) {
    const Removals& removals = RemovalsOf(tier);
    if (removals.current || removed_ || Inventory(tier).kind == InventoryState::Kind::kPending) {
      continue;
    }
    for (const Going& going : removals.waiting) {
      if (going.not_before != MonotonicTime{}) {
        also(going.not_before);
      }
    }
  }
  for (const std::optional<MonotonicTime>& due :
       {PrefetchWake(), stop_.NextWake(), RepairWake(), SourceWaitsWake(),
        waits_for_inventory_ ? fall_back_.NextWake() : std::nullopt,
        removed_ ? std::nullopt : grace_ends_}) {
    if (due) {
      also(*due);
    }
  }
  return wake;
}

bool Coordinator::Idle() const {
  return joins_.empty() && awaits_.empty() && durable_waits_.empty() && !session_;
}

}  // namespace holdfast
