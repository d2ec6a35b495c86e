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
  if (job->coordinator == nullptr && removals_.count(job->uuid) > 0) {
    return absl::UnavailableError(absl::StrCat("job '", name, "' is being removed; try again"));
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

std::optional<uint32_t> Agent::OwnerOf(const std::string& name) const {
  const auto it = names_.find(name);
  return it == names_.end() ? std::nullopt : std::optional(jobs_.at(it->second).uid);
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

v1::DaemonStatus Agent::DescribeDaemon(const Caller& caller, EventTime time) const {
  v1::DaemonStatus daemon;
  daemon.set_node_name(nodes_.Name(kHere));
  daemon.set_unix_ms(time.unix_ms);
  daemon.set_memory_bytes_max(bytes_max_);
  daemon.set_memory_bytes_used(bytes_used_);
  daemon.set_slots(static_cast<uint32_t>(slots_.size()));
  for (const auto& [id, slot] : slots_) {
    daemon.set_slots_free(daemon.slots_free() + (slot.state == SlotState::kFree ? 1 : 0));
    daemon.set_slots_quarantined(daemon.slots_quarantined() +
                                 (slot.state == SlotState::kQuarantined ? 1 : 0));
  }
  daemon.set_connections(static_cast<uint32_t>(connections_.size()));
  daemon.set_draining(draining_);
  FillTierStatus(daemon);
  // They name jobs of all users.
  if (caller.uid == 0 || caller.uid == daemon_uid_) {
    for (const std::string& problem : problems_.All()) {
      daemon.add_problems(problem);
    }
  }
  return daemon;
}

void Agent::Admin(const AdminRequest& e, const v1::GetStatusRequest& request) {
  v1::GetStatusReply reply;
  *reply.mutable_daemon() = DescribeDaemon(e.caller, time_);
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

}  // namespace holdfast
