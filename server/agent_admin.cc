// Answers to ckptctl. A caller sees the jobs of its own uid; root and the daemon's user see all.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/agent.h"

namespace holdfast {

void Agent::OnAdminRequest(const AdminRequest& e) {
  std::visit([&](const auto& request) { Admin(e, request); }, e.request);
}

bool Agent::Visible(const Caller& caller, const KnownJob& job) const {
  return caller.uid == job.uid || caller.uid == 0 || caller.uid == daemon_uid_;
}

// A job of somebody else does not exist for the caller.
absl::StatusOr<Coordinator*> Agent::FindVisible(const Caller& caller, const std::string& name) {
  const KnownJob* job = FindJob(name);
  if (const auto hosting = hosting_.find(name);
      job == nullptr && hosting != hosting_.end() && !hosting->second.looked_up) {
    return absl::UnavailableError(
        absl::StrCat("whether there is a job '", name, "' is still being looked for; try again"));
  }
  if (job == nullptr || !Visible(caller, *job)) {
    return absl::NotFoundError(absl::StrCat("there is no job '", name.substr(0, kJobNameBytesMax),
                                            "' on this node (that uid ", caller.uid,
                                            " may see); ckptctl status shows the jobs there are"));
  }
  if (job->coordinator == nullptr) {
    return HostedElsewhere(job->name);
  }
  return job->coordinator.get();
}

bool Agent::MayTouch(const std::string& name, const Caller& caller) const {
  const auto it = names_.find(name);
  return it != names_.end() && Visible(caller, jobs_.at(it->second));
}

// (In a cluster the router answers.)
void Agent::Admin(const AdminRequest& e, const v1::GetNodesRequest&) {
  v1::GetNodesReply reply;
  v1::NodeStatus& here = *reply.add_nodes();
  here.set_name(nodes_.Name(kHere));
  here.set_here(true);
  here.set_capacity_bytes(bytes_max_);
  for (const auto& [name, uuid] : names_) {
    if (Visible(e.caller, jobs_.at(uuid))) {
      here.add_jobs(name);
    }
  }
  Act(AdminReply{e.token, absl::OkStatus(), std::move(reply)});
}

void Agent::RefuseAdmin(AdminToken token, absl::Status status) {
  Act(AdminReply{token, std::move(status), std::monostate()});
}

void Agent::Admin(const AdminRequest& e, const v1::GetStatusRequest& request) {
  v1::GetStatusReply reply;
  v1::DaemonStatus& daemon = *reply.mutable_daemon();
  daemon.set_node_name(nodes_.Name(kHere));
  daemon.set_unix_ms(time_.unix_ms);
  daemon.set_memory_bytes_max(bytes_max_);
  daemon.set_memory_bytes_used(bytes_used_);
  daemon.set_slots(static_cast<uint32_t>(slots_.size()));
  for (const auto& [id, slot] : slots_) {
    daemon.set_slots_free(daemon.slots_free() + (slot.state == SlotState::kFree ? 1 : 0));
    daemon.set_slots_quarantined(daemon.slots_quarantined() +
                                 (slot.state == SlotState::kQuarantined ? 1 : 0));
  }
  daemon.set_connections(static_cast<uint32_t>(connections_.size()));
  FillTierStatus(daemon);
  // They name jobs of all users.
  if (e.caller.uid == 0 || e.caller.uid == daemon_uid_) {
    for (const std::string& problem : problems_) {
      daemon.add_problems(problem);
    }
  }
  if (!request.job().empty()) {
    if (const auto job = FindVisible(e.caller, request.job()); !job.ok()) {
      return RefuseAdmin(e.token, job.status());
    }
  }
  const std::map<JobUuid, uint64_t> bytes = BytesByJob();
  for (const auto& [name, uuid] : names_) {
    const KnownJob& job = jobs_.at(uuid);
    if ((!request.job().empty() && request.job() != name) || !Visible(e.caller, job) ||
        job.coordinator == nullptr) {
      continue;
    }
    v1::JobStatus& status = *reply.add_jobs();
    job.coordinator->FillStatus(
        status, time_,
        request.job().empty() ? Coordinator::Detail::kOverview : Coordinator::Detail::kWhole);
    if (const auto held = bytes.find(uuid); held != bytes.end()) {
      status.set_bytes_held(held->second);
    }
  }
  Act(AdminReply{e.token, absl::OkStatus(), std::move(reply)});
}

void Agent::Admin(const AdminRequest& e, const v1::ListCheckpointsRequest& request) {
  const auto job = FindVisible(e.caller, request.job());
  if (!job.ok()) {
    return RefuseAdmin(e.token, job.status());
  }
  v1::ListCheckpointsReply reply;
  (*job)->FillList(reply);
  Act(AdminReply{e.token, absl::OkStatus(), std::move(reply)});
}

void Agent::HandShard(AdminToken token, Slot& slot) {
  slot.admin_readers.insert(token);
  admin_reads_[token].insert(slot.id);
  Act(AdminReply{token, absl::OkStatus(),
                 ReadableShards{{{slot.copy, slot.id, TierKind::kMemory, ""}}}});
}

void Agent::OnAdminReadDone(const AdminReadDone& e) {
  const auto reads = admin_reads_.find(e.token);
  if (reads == admin_reads_.end()) {
    return;
  }
  const std::set<SlotId> slots = std::move(reads->second);
  admin_reads_.erase(reads);
  for (const SlotId id : slots) {
    if (Slot* slot = FindSlot(id)) {
      slot->admin_readers.erase(e.token);
      AfterHold(*slot);
    }
  }
}

void Agent::Admin(const AdminRequest& e, const v1::SetRestorePointRequest& request) {
  const auto job = FindVisible(e.caller, request.job());
  if (!job.ok()) {
    return RefuseAdmin(e.token, job.status());
  }
  if (request.clear() && request.from_scratch()) {
    return RefuseAdmin(e.token,
                       absl::InvalidArgumentError(
                           "a restore point is either cleared or set to 'from scratch', not both"));
  }
  const RequestToken token = next_token_++;
  const uint32_t timeout_ms = config_.admin().request_timeout_ms();
  const MonotonicTime deadline =
      time_.now +
      (timeout_ms > 0 ? Duration(std::chrono::milliseconds(timeout_ms)) : Duration(kSettle));
  admin_waits_[token] = {e.token, deadline, (*job)->uuid()};
  deadlines_.insert({deadline, token});
  Send((*job)->uuid(), RestorePointAsked{token, request});
}

absl::Status Agent::WhyInUse(const Coordinator& job) const {
  std::set<ProcessId> users;
  for (const auto& [id, seat] : seats_.all()) {
    if (seat.job == job.uuid()) {
      users.insert(seat.process);
    }
  }
  bool admin = false;
  for (const auto& [id, slot] : slots_) {
    if (!slot.owned || slot.job != job.uuid()) {
      continue;
    }
    if (slot.writer) {
      users.insert(*slot.writer);
    }
    for (const ReadHold& hold : slot.readers) {
      users.insert(hold.process);
    }
    admin = admin || !slot.admin_readers.empty();
  }
  if (users.empty() && !admin && job.Idle()) {
    return absl::OkStatus();
  }
  std::string who;
  size_t named = 0;
  for (const ProcessId& process : users) {
    if (++named <= 8) {
      absl::StrAppend(&who, named == 1 ? "" : ", ", process.ToString());
    }
  }
  return absl::FailedPreconditionError(
      absl::StrCat("job '", job.name(), "' is in use by ",
                   users.empty() ? "a verification, or a rank that is joining" : who,
                   named > 8 ? " and others" : "", "; end that first"));
}

void Agent::Admin(const AdminRequest& e, const v1::RemoveJobRequest& request) {
  const auto job = FindVisible(e.caller, request.job());
  if (!job.ok()) {
    return RefuseAdmin(e.token, job.status());
  }
  if (removals_.count((*job)->uuid()) > 0) {
    return RefuseAdmin(e.token, absl::AlreadyExistsError(absl::StrCat(
                                    "job '", request.job(), "' is being removed already")));
  }
  if (const absl::Status in_use = WhyInUse(**job); !in_use.ok()) {
    return RefuseAdmin(e.token, in_use);
  }
  RemoveJob((*job)->uuid(), e.token);
}

// `token` 0: nobody waits for the end.
void Agent::RemoveJob(const JobUuid& uuid, AdminToken token) {
  const std::map<JobUuid, uint64_t> bytes = BytesByJob();
  const auto held = bytes.find(uuid);
  Removal& removal = removals_[uuid];
  removal.token = token;
  removal.bytes = held == bytes.end() ? 0 : held->second;
  removal.bytes += drive_copies_.Bytes(uuid) + Hosted(uuid)->BytesAt(TierKind::kRemote);
  // Records first, then bytes, then the state that says whose they were: a crash in between leaves
  // a smaller job.
  Send(uuid, JobRemoved{});
  AdvanceRemoval(uuid);
}

void Agent::AdvanceRemoval(const JobUuid& uuid) {
  Removal& removal = removals_.at(uuid);
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
  if (!empty || busy || removal.state_removed || Hosted(uuid)->WriteInFlight()) {
    return;
  }
  // A job whose name is merely forgotten has no copies, and what nobody asked for is not removed.
  if (!removal.tiers_begun && removal.token != 0) {
    removal.tiers_begun = true;
    for (const TierKind tier : {TierKind::kNvme, TierKind::kRemote}) {
      if (HasTier(tier)) {
        DrainOp op;
        op.kind = DrainOp::Kind::kRemoveJob;
        op.job = uuid;
        op.tier = tier;
        const DrainId id = BeginDrain(std::move(op));
        removal.tiers.insert(id);
        Act(RemoveJobCopies{id, tier, uuid, name});
      }
    }
    UnindexJob(uuid);
    if (!removal.tiers.empty()) {
      return;
    }
  }
  if (!removal.failure.ok()) {
    const AdminToken token = removal.token;
    const absl::Status failure = removal.failure;
    removals_.erase(uuid);
    KeepJob(uuid);
    return RefuseAdmin(token,
                       Annotate(failure, "not all copies of the job could be removed; try again"));
  }
  removal.state_removed = true;
  Act(RemoveJobState{uuid});
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
  v1::WhereReply where;
  Hosted(job)->FillWhere(std::nullopt, where);
  for (const v1::ShardCopy& copy : where.copies()) {
    for (const TierKind tier : {TierKind::kNvme, TierKind::kRemote}) {
      if (copy.tier() == TierName(tier)) {
        ChangeIndex(UnindexShard{{job, copy.attempt(), copy.step(), copy.rank()}, tier});
      }
    }
  }
}

void Agent::OnJobStateRemoved(const JobStateRemoved& e) {
  const auto it = removals_.find(e.job);
  if (it == removals_.end()) {
    return;
  }
  const Removal removal = it->second;
  removals_.erase(it);
  if (!e.status.ok() && e.status.code() != absl::StatusCode::kNotFound) {
    KeepJob(e.job);
    return RefuseAdmin(
        removal.token,
        Annotate(e.status, "the job's copies are gone, its state could not be removed; try again"));
  }
  const std::string name = JobName(e.job);
  removed_jobs_[e.job] = time_.now;
  if (removed_jobs_.size() > kJobsMax) {
    removed_jobs_.erase(
        std::min_element(removed_jobs_.begin(), removed_jobs_.end(),
                         [](const auto& a, const auto& b) { return a.second < b.second; }));
  }
  Tell(Report::Kind::kJobRemoved, e.job, absl::StrCat("job '", name, "' was removed"),
       removal.bytes);
  if (const auto named = names_.find(name); named != names_.end() && named->second == e.job) {
    names_.erase(named);
  }
  jobs_.erase(e.job);
  if (const auto hosting = hosting_.find(name); hosting != hosting_.end()) {
    hosting->second = {next_drain_, true, std::nullopt};  // it is opened anew when it is wanted
  }
  remote_known_.erase(e.job);
  remote_problems_.erase(e.job);
  remote_away_bytes_.erase(e.job);
  v1::RemoveJobReply reply;
  reply.set_bytes_freed(removal.bytes);
  Act(AdminReply{removal.token, absl::OkStatus(), std::move(reply)});
}

}  // namespace holdfast
