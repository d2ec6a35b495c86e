// A whole job is removed (`ckptctl rm JOB`; docs/protocol.md §18): its records first, then its
// bytes, then the state that says whose they were, so that a crash in between leaves a smaller job.
//
// In a cluster the state that says so is agreed on first; then the other nodes let go of what they
// keep; then the host does, and the remote tier is emptied. Nodes that are away let go when they
// are back: whoever hosts the name then knows from the agreed state which jobs had it before.
#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/agent.h"
#include "server/state_order.h"

namespace holdfast {

// Those that have memory of the job mapped, here.
std::set<ProcessId> Agent::UsersOf(const JobUuid& job) const {
  std::set<ProcessId> users;
  for (const auto& [id, slot] : slots_) {
    if (!slot.owned || slot.job != job) {
      continue;
    }
    if (slot.writer) {
      users.insert(*slot.writer);
    }
    for (const ReadHold& hold : slot.readers) {
      users.insert(hold.process);
    }
  }
  return users;
}

absl::Status Agent::WhyInUse(const Coordinator& job) const {
  std::set<ProcessId> users = UsersOf(job.uuid());
  for (const auto& [id, seat] : seats_.all()) {
    if (seat.job == job.uuid()) {
      users.insert(seat.process);
    }
  }
  const bool admin = std::any_of(slots_.begin(), slots_.end(), [&](const auto& s) {
    return s.second.owned && s.second.job == job.uuid() && !s.second.admin_readers.empty();
  });
  for (const auto& [rank, process] : job.LivingMembers()) {
    users.insert(process);  // of other nodes, too
  }
  if (users.empty() && !admin && job.Idle()) {
    if (const std::optional<NodeId> silent = job.SilentNode()) {
      return absl::UnavailableError(absl::StrCat(
          "ranks of job '", job.name(), "' may live on ", nodes_.Name(*silent),
          ", which has not been heard of yet; try again when it is back or its lease has ended, "
          "or take it off the list of members"));
    }
    return absl::OkStatus();
  }
  std::string who;
  size_t named = 0;
  for (const ProcessId& process : users) {
    if (++named <= 8) {
      absl::StrAppend(&who, named == 1 ? "" : ", ", nodes_.Who(process));
    }
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "job '", job.name(), "' is in use by ",
      users.empty() ? "a verification, another node that reads a shard, or a rank that "
                      "is joining; try again soon"
                    : absl::StrCat(who, named > 8 ? " and others" : "", "; end that first")));
}

void Agent::Admin(const AdminRequest& e, const v1::RemoveJobRequest& request) {
  const KnownJob* known = FindJob(request.job());
  const auto going =
      known != nullptr && Visible(e.caller, *known) ? removals_.find(known->uuid) : removals_.end();
  if (going != removals_.end()) {
    const auto already = [&](std::string_view more) {
      return absl::AlreadyExistsError(
          absl::StrCat("job '", request.job(), "' is being removed already", ToAbsl(more)));
    };
    if (!clustered() || going->second.for_host) {
      return RefuseAdmin(e.token, already(""));
    }
    // Who asked before may have given up waiting for the end of it.
    if (const AdminToken before = std::exchange(going->second.token, e.token); before != 0) {
      RefuseAdmin(before, already(", and was asked for again since"));
    }
    going->second.again.reset();
    if (going->second.waits && going->second.agreed) {
      notices_.push_back(JobRemovalAgreed{known->name, known->uuid});
    }
    return AdvanceRemoval(known->uuid);
  }
  const auto job = FindVisible(e.caller, request.job());
  if (!job.ok()) {
    return RefuseAdmin(e.token, job.status());
  }
  if (const absl::Status in_use = WhyInUse(**job); !in_use.ok()) {
    return RefuseAdmin(e.token, in_use);
  }
  RemoveJob((*job)->uuid(), e.token);
}

Agent::Removal& Agent::BeginRemoval(const JobUuid& uuid, const std::vector<TierKind>& tiers) {
  const std::map<JobUuid, uint64_t> bytes = BytesByJob();
  const auto held = bytes.find(uuid);
  Removal& removal = removals_[uuid];
  removal.bytes = held == bytes.end() ? 0 : held->second;
  removal.bytes += drive_copies_.Bytes(uuid);
  for (const TierKind tier : tiers) {
    if (HasTier(tier)) {
      removal.tiers_left.insert(tier);
    }
  }
  return removal;
}

// `token` 0: nobody waits for the end. (A job whose name is merely forgotten then has no copies,
// and what nobody asked for is not removed.)
void Agent::RemoveJob(const JobUuid& uuid, AdminToken token) {
  const std::vector<TierKind> tiers = {TierKind::kNvme, TierKind::kRemote};
  Removal& removal = BeginRemoval(uuid, token != 0 ? tiers : std::vector<TierKind>());
  removal.token = token;
  removal.bytes += Hosted(uuid)->BytesAt(TierKind::kRemote);
  removal.waits = clustered();
  removal.away = Hosted(uuid)->NodesAway();
  Send(uuid, JobRemoved{true, clustered()});
  AdvanceRemoval(uuid);
}

// In a cluster: what lies in memory here, and what is still on its way somewhere. A rank that lives
// on (its node was taken to be gone) seals nothing any more.
void Agent::GiveUpAll(const JobUuid& uuid) {
  seats_.Supersede(uuid, std::numeric_limits<Attempt>::max());
  std::set<CheckpointId> checkpoints;
  for (auto it = shards_.lower_bound({uuid, 0, 0, 0}); it != shards_.end() && it->first.job == uuid;
       ++it) {
    checkpoints.insert(it->first.checkpoint());
  }
  const Failure failure{absl::StatusCode::kAborted, v1::Failure::REASON_SHED,
                        absl::StrCat("job '", JobName(uuid), "' was removed")};
  for (const CheckpointId& checkpoint : checkpoints) {
    GiveUpSlots(uuid, GiveUp{checkpoint, failure}, true);
  }
  StopReplicas(uuid, std::nullopt, failure);
  StopFetches(uuid, failure);
  for (const auto& [id, op] : drains_) {
    if (op.job == uuid && op.kind == DrainOp::Kind::kFlush) {
      Act(CancelDrain{id});
    }
  }
}

// What is on its way here for nobody who could still use it.
void Agent::StopFetches(const JobUuid& uuid, const Failure& why) {
  std::set<ShardId> ahead;
  for (const auto& [shard, fetch] : fetches_) {
    if (shard.job == uuid) {
      slots_.at(fetch.slot).lost = why;
      if (fetch.drain != 0) {
        Act(CancelDrain{fetch.drain});
      }
    }
  }
  for (const auto& [shard, prefetch] : prefetches_) {
    ahead.insert(shard);
  }
  for (const auto& [shard, load] : loads_) {
    ahead.insert(shard);
  }
  for (const ShardId& shard : ahead) {
    if (shard.job == uuid) {
      const absl::Status status(why.code, ToAbsl(why.message));
      EndPrefetch(shard, status);
      EndLoad(shard, status);
    }
  }
}

void Agent::AdvanceRemoval(const JobUuid& uuid) {
  Removal& removal = removals_.at(uuid);
  if (removal.waits || removal.again) {
    return;
  }
  bool empty = true;
  for (auto& [id, slot] : slots_) {
    if (!slot.owned || slot.job != uuid) {
      continue;
    }
    empty = false;
    if (Deletable(slot)) {
      Delete(slot);
    }
  }
  // (A scan that began before would bring back what is being removed.)
  const std::string name = JobName(uuid);
  const bool busy = std::any_of(drains_.begin(), drains_.end(), [&](const auto& d) {
    return d.second.job == uuid ||
           (d.second.kind == DrainOp::Kind::kScan && d.second.job_name == name);
  });
  const Coordinator* hosted = Hosted(uuid);
  if (!empty && !busy) {
    TellOfHolds(uuid);
  }
  if (!empty || busy || removal.state_removed || (hosted != nullptr && hosted->WriteInFlight())) {
    return;
  }
  if (!removal.tiers_left.empty()) {
    for (const TierKind tier : std::exchange(removal.tiers_left, {})) {
      DrainOp op;
      op.kind = DrainOp::Kind::kRemoveJob;
      op.job = uuid;
      op.tier = tier;
      Act(RemoveJobCopies{BeginDrain(std::move(op)), tier, uuid, name});
      for (const JobUuid& before :
           tier == TierKind::kRemote ? RemovedBefore(name) : std::vector<JobUuid>()) {
        RemoveAgain(name, before);
      }
    }
    return UnindexJob(uuid);  // (they are drains: it goes on when they have ended)
  }
  if (!removal.failure.ok()) {
    return RemovalFailed(
        uuid, Annotate(removal.failure, absl::StrCat("not all copies of the job could be removed",
                                                     clustered() ? "" : "; try again")));
  }
  removal.state_removed = true;
  UnindexJob(uuid);  // what ended since, too
  Act(RemoveJobState{uuid});
}

// What was cancelled for it may still be in its last call to that tier. False: it hangs there.
bool Agent::AwaitEnding(Removal& removal, TierKind tier) {
  if (!removal.busy_until) {
    removal.busy_until = time_.now + kSettle;
  }
  if (time_.now >= *removal.busy_until) {
    return false;
  }
  removal.tiers_left.insert(tier);
  removal.again = time_.now + kEndingLook;
  return true;
}

// Whoever waits for the end hears once what it waits for, which may take long.
void Agent::TellOfHolds(const JobUuid& uuid) {
  Removal& removal = removals_.at(uuid);
  const std::set<ProcessId> users = UsersOf(uuid);
  if (!clustered() || removal.holds_told || users.empty()) {
    return;
  }
  removal.holds_told = true;
  const absl::Status why = absl::UnavailableError(absl::StrCat(
      "its memory is in use by ", nodes_.Who(*users.begin()),
      users.size() == 1 ? "" : absl::StrCat(" and ", users.size() - 1, " others"), "; end that"));
  if (removal.for_host) {
    notices_.push_back(JobGoing{JobName(uuid), uuid, 0, why});
  } else {
    RemovalIsLate(uuid, std::exchange(removal.token, 0), why);
  }
}

void Agent::RemovalFailed(const JobUuid& uuid, const absl::Status& why) {
  Removal& removal = removals_.at(uuid);
  const AdminToken token = std::exchange(removal.token, 0);
  if (!clustered()) {
    removals_.erase(uuid);
    KeepJob(uuid);
    return RefuseAdmin(token, why);
  }
  removal.failure = absl::OkStatus();
  removal.busy_until.reset();
  removal.state_removed = false;
  removal.again = time_.now + kRescan;
  removal.tiers_left = removal.for_host ? std::set<TierKind>{TierKind::kNvme}
                                        : std::set<TierKind>{TierKind::kNvme, TierKind::kRemote};
  std::erase_if(removal.tiers_left, [this](TierKind tier) { return !HasTier(tier); });
  if (removal.for_host) {
    notices_.push_back(JobGoing{JobName(uuid), uuid, 0, why});
  } else {
    RemovalIsLate(uuid, token, why);
  }
}

// Whoever asked for it hears why; it goes on.
void Agent::RemovalIsLate(const JobUuid& uuid, AdminToken token, const absl::Status& why) {
  const absl::Status late = absl::UnavailableError(absl::StrCat(
      "job '", JobName(uuid), "' is removed, and not all of it is gone: ", Message(why),
      "; it is tried again until it is"));
  token != 0 ? RefuseAdmin(token, late) : AddProblem(Message(late));
}

void Agent::RetryRemovals() {
  for (auto& [uuid, removal] : removals_) {
    if (removal.again && *removal.again <= time_.now) {
      removal.again.reset();  // (Settle goes on with it)
    }
  }
}

// A removal failed halfway. What is left of the job only its tiers can tell.
void Agent::KeepJob(const JobUuid& uuid) {
  Send(uuid, JobRemoved{false});
  drive_copies_.Forget(uuid);
  if (HasTier(TierKind::kNvme)) {
    for (auto& [dir, drive] : drives_) {
      drive.answered = false;
      drive.first_scan = next_drain_;
    }
    ScanDrives();
  }
  if (HasTier(TierKind::kRemote)) {
    remote_known_.erase(uuid);
    remote_problems_.erase(uuid);
    remote_away_bytes_.erase(uuid);
    if (rebuild_) {
      rebuild_->asked_anew.insert(uuid);
    }
    ScanRemoteFor(JobName(uuid));
  }
}

void Agent::UnindexJob(const JobUuid& job) {
  for (const DriveCopies::Copy& copy : drive_copies_.Of(job)) {
    drive_copies_.Remove(job, copy.copy.copy.id.checkpoint());
  }
  std::erase_if(flushed_, [&](const auto& flushed) { return flushed.first.job == job; });
  for (const TierKind tier : {TierKind::kNvme, TierKind::kRemote}) {
    ChangeIndex(UnindexCopies{tier, job, std::nullopt});
  }
}

void Agent::OnJobStateRemoved(const JobStateRemoved& e) {
  const auto it = removals_.find(e.job);
  if (it == removals_.end()) {
    return;
  }
  if (!e.status.ok() && e.status.code() != absl::StatusCode::kNotFound) {
    return RemovalFailed(
        e.job,
        Annotate(e.status, absl::StrCat("the job's copies are gone, its state could not be removed",
                                        clustered() ? "" : "; try again")));
  }
  const Removal removal = std::move(it->second);
  removals_.erase(it);
  const std::string name = JobName(e.job);
  removed_jobs_[e.job] = time_.now;
  if (removed_jobs_.size() > kJobsMax) {
    removed_jobs_.erase(
        std::min_element(removed_jobs_.begin(), removed_jobs_.end(),
                         [](const auto& a, const auto& b) { return a.second < b.second; }));
  }
  if (!clustered() || removal.token != 0 || removal.bytes > 0) {  // (else there was nothing here)
    Tell(Report::Kind::kJobRemoved, e.job, absl::StrCat("job '", name, "' was removed"),
         removal.bytes);
  }
  std::set<std::string> away(removal.away.begin(), removal.away.end());
  if (const Coordinator* hosted = Hosted(e.job)) {  // those that went meanwhile, too
    const std::vector<std::string> now = hosted->NodesAway();
    away.insert(now.begin(), now.end());
  }
  ForgetRemoved(e.job, name);
  if (removal.for_host) {
    notices_.push_back(JobGoing{name, e.job, removal.bytes, absl::OkStatus()});
    notices_.push_back(JobGone{name, e.job});
  }
  v1::RemoveJobReply reply;
  reply.set_bytes_freed(removal.bytes);
  reply.mutable_nodes_away()->Assign(away.begin(), away.end());
  Act(AdminReply{removal.token, absl::OkStatus(), std::move(reply)});
}

void Agent::ForgetRemoved(const JobUuid& uuid, const std::string& name) {
  const bool was_hosted = Hosted(uuid) != nullptr;
  if (const auto named = names_.find(name); named != names_.end() && named->second == uuid) {
    names_.erase(named);
  }
  states_again_.erase(uuid);
  found_unmet_.erase(uuid);
  jobs_.erase(uuid);
  ended_jobs_.Forget(uuid);
  remote_known_.erase(uuid);
  remote_problems_.erase(uuid);
  remote_away_bytes_.erase(uuid);
  const auto hosting = hosting_.find(name);
  if (hosting == hosting_.end() || names_.count(name) > 0) {
    return;  // its name is another's since
  }
  if (was_hosted) {
    notices_.push_back(JobGone{name, uuid});
    return;
  }
  // It had been removed before this node became the host of its name.
  hosting->second.looked_up = true;
  LookedUp(name);
}

// ---- In a cluster: at the host ----

std::vector<JobUuid> Agent::RemovedIn(const v1::JobState& state) {
  std::vector<JobUuid> jobs;
  for (const std::string& bytes : state.removed_before()) {
    if (const absl::StatusOr<JobUuid> uuid = JobUuid::FromBytes(bytes); uuid.ok()) {
      jobs.push_back(*uuid);
    }
  }
  return jobs;
}

// It was removed under an earlier host. What is still here of it, or in the remote tier, goes
// before anybody may have the name.
bool Agent::FinishRemoval(const std::string& name, const v1::JobState& state) {
  const JobUuid uuid = *JobUuid::FromBytes(state.job_uuid());
  KnownJob* job = KnowJob(uuid, name, state.uid(), state.gid());
  if (job == nullptr) {
    return false;
  }
  std::vector<JobUuid>& removed = hosting_.at(name).removed;
  removed = RemovedIn(state);
  removed.insert(removed.begin(), uuid);
  removed.resize(std::min(removed.size(), kRemovedBeforeMax));
  hosting_.at(name).version = state.version();
  if (!job->state || IsNewerState(state, *job->state)) {
    job->state = state;
  }
  if (const auto going = removals_.find(uuid); going != removals_.end()) {
    going->second.for_host = false;
    if (HasTier(TierKind::kRemote)) {
      going->second.tiers_left.insert(TierKind::kRemote);
    }
  } else {
    BeginRemoval(uuid, {TierKind::kNvme, TierKind::kRemote});
  }
  GiveUpAll(uuid);
  AdvanceRemoval(uuid);
  return true;
}

void Agent::TakeMessage(const JobUuid& job, const RemovalAgreed&) {
  if (const auto removal = removals_.find(job);
      removal != removals_.end() && removal->second.waits) {
    removal->second.agreed = true;
    notices_.push_back(JobRemovalAgreed{JobName(job), job});
  }
}

void Agent::OthersLetGo(const JobUuid& job, uint64_t bytes, EventTime time) {
  time_ = time;
  if (const auto removal = removals_.find(job); removal != removals_.end()) {
    removal->second.waits = false;
    removal->second.bytes += bytes;
    GiveUpAll(job);
    AdvanceRemoval(job);
  }
}

void Agent::OthersAreLate(const JobUuid& job, const absl::Status& why, EventTime time) {
  time_ = time;
  if (const auto removal = removals_.find(job); removal != removals_.end()) {
    RemovalIsLate(job, std::exchange(removal->second.token, 0), why);
  }
}

std::vector<JobUuid> Agent::RemovedBefore(const std::string& name) const {
  const auto hosting = hosting_.find(name);
  if (hosting == hosting_.end()) {
    return {};
  }
  const auto named = names_.find(name);
  const Coordinator* hosted = named == names_.end() ? nullptr : Hosted(named->second);
  return hosted != nullptr ? hosted->removed_before() : hosting->second.removed;
}

// A flush that began late, on a node that could not be told, has made the directory of a removed
// job again in the remote tier, where its name is the next one's.
void Agent::RemoveAgain(const std::string& name, const JobUuid& uuid) {
  const bool busy = std::any_of(drains_.begin(), drains_.end(), [&](const auto& d) {
    return d.second.kind == DrainOp::Kind::kRemoveJob && d.second.job == uuid;
  });
  if (busy || removals_.count(uuid) > 0 || !HasTier(TierKind::kRemote)) {
    return;
  }
  DrainOp op;
  op.kind = DrainOp::Kind::kRemoveJob;
  op.job = uuid;
  op.job_name = name;
  op.tier = TierKind::kRemote;
  Act(RemoveJobCopies{BeginDrain(std::move(op)), TierKind::kRemote, uuid, name});
}

// Its directory may be such a one's: that is looked at.
void Agent::Overhear(const JobUuid& job, const ToCoordinator& message, EventTime time) {
  const auto* drained = std::get_if<ShardDrained>(&message);
  if (drained == nullptr || drained->to != TierKind::kRemote ||
      !absl::IsFailedPrecondition(drained->status)) {
    return;
  }
  time_ = time;
  const std::string name = JobName(job);
  if (HasTier(TierKind::kRemote) && !RemovedBefore(name).empty()) {
    rescan_at_.try_emplace(name, time_.now + kRescan);
  }
}

// ---- In a cluster: at any other node ----

// As the job that has its name now says.
bool Agent::WasRemoved(const std::string& name, const JobUuid& uuid) const {
  const auto named = names_.find(name);
  if (named == names_.end() || !jobs_.at(named->second).state) {
    return false;
  }
  const std::vector<JobUuid> removed = RemovedIn(*jobs_.at(named->second).state);
  return std::find(removed.begin(), removed.end(), uuid) != removed.end();
}

void Agent::LetGo(const std::string& name, const std::vector<JobUuid>& jobs, EventTime time) {
  time_ = time;
  for (const JobUuid& uuid : jobs) {
    const auto known = jobs_.find(uuid);
    if (known == jobs_.end()) {
      notices_.push_back(JobGoing{name, uuid, 0, absl::OkStatus()});
    } else if (const auto going = removals_.find(uuid); going != removals_.end()) {
      going->second.again.reset();
      going->second.holds_told = false;
      AdvanceRemoval(uuid);
    } else if (known->second.coordinator == nullptr && known->second.name == name) {
      BeginRemoval(uuid, {TierKind::kNvme}).for_host = true;
      GiveUpAll(uuid);
      AdvanceRemoval(uuid);
    }
  }
}

}  // namespace holdfast
