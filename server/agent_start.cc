// What the daemon found when it started becomes the agent's and the coordinators' state
// (docs/protocol.md §7).
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/agent.h"
#include "server/state_order.h"

namespace holdfast {
namespace {

ProcessId FromProto(const v1::Process& process) {
  return {process.pid(), process.start_ticks()};
}

}  // namespace

void Agent::Start(const Started& event, EventTime time) {
  time_ = time;
  bytes_max_ = event.memory_bytes_max;
  nvme_bytes_max_ = event.nvme_bytes_max;
  boot_id_ = event.boot_id;
  started_ = time.now;
  ended_jobs_.Start(time.now);
  for (const std::string& dir : config_.nvme().dirs()) {
    drives_[dir];  // each is scanned by the runtime, which tells
  }
  problems_ = Problems();
  for (const std::string& problem : event.problems) {
    AddProblem(problem);
  }
  // Sessions of an earlier life of the daemon are never taken for ours.
  first_session_ = static_cast<uint64_t>(std::max<int64_t>(time.unix_ms, 1)) * 1024;
  StartJobs(event);
  StartSlots(event);
}

void Agent::AddProblem(std::string problem) {
  problems_.Add(std::move(problem));
}

void Agent::StartJobs(const Started& event) {
  std::vector<const v1::JobState*> states;
  for (const v1::JobState& state : event.jobs) {
    states.push_back(&state);
  }
  std::stable_sort(states.begin(), states.end(),
                   [](const auto* a, const auto* b) { return IsNewerState(*a, *b); });
  for (const v1::JobState* state : states) {
    const absl::StatusOr<JobUuid> uuid = JobUuid::FromBytes(state->job_uuid());
    absl::Status status = uuid.ok() ? CheckJobName(state->name()) : uuid.status();
    if (status.ok() &&
        (jobs_.count(*uuid) > 0 || (!clustered() && names_.count(state->name()) > 0))) {
      continue;  // an older version of the same
    }
    if (status.ok() && jobs_.size() >= kJobsMax) {
      status =
          absl::ResourceExhaustedError(absl::StrCat("there are more than ", kJobsMax, " jobs"));
    }
    if (status.ok()) {
      KnownJob job{*uuid, state->name(), state->uid(), state->gid()};
      if (clustered()) {
        status = CheckLoads(job, *state);
        job.state = *state;
      } else {
        Coordinator& coordinator = MakeCoordinator(job);
        status = coordinator.Load(*state);
        if (status.ok() && !boot_id_.empty() && state->boot_id() != boot_id_) {
          coordinator.SetRebooted();
        }
      }
      if (status.ok()) {
        names_.try_emplace(state->name(), *uuid);
        jobs_[*uuid] = std::move(job);
      }
    }
    if (!status.ok()) {
      AddProblem(absl::StrCat("a job's state was left alone: ", Message(status)));
    }
  }
}

// A copy whose job's state is lost: the copy speaks for the job, and as it does not name the owner,
// the daemon's user is.
KnownJob* Agent::AdoptJob(const SealedCopy& copy) {
  const KnownJob* other = FindJob(copy.job_name);
  if (!CheckJobName(copy.job_name).ok() || (other != nullptr && !clustered()) ||
      jobs_.size() >= kJobsMax || copy.id.job.IsZero()) {
    return nullptr;
  }
  if (clustered()) {  // whose it is, its host tells
    if (other != nullptr) {
      NameSecond(*other, copy.id.job);
    }
    return &AddJob(copy.id.job, copy.job_name, daemon_uid_, 0);
  }
  AddProblem(absl::StrCat("the state of job '", copy.job_name,
                          "' was lost; rebuilt from its copies, owned by uid ", daemon_uid_));
  KnownJob& job = AddJob(copy.id.job, copy.job_name, daemon_uid_, 0);
  MakeCoordinator(job);
  return &job;
}

void Agent::StartSlots(const Started& event) {
  for (const LeftAloneSlot& left : event.left_alone) {
    Slot& slot = slots_[left.slot];
    slot.id = left.slot;
    slot.bytes = left.bytes;
    slot.state = SlotState::kQuarantined;
    slot.foreign = true;
    bytes_used_ += left.bytes;
  }
  std::map<JobUuid, std::vector<FoundShard>> found_by_job;
  for (const FoundSlot& found : event.slots) {
    if (slots_.count(found.slot) > 0) {
      continue;
    }
    Slot& slot = slots_[found.slot];
    slot.id = found.slot;
    slot.bytes = found.bytes;
    slot.generation = found.note.generation();
    slot.populated = true;
    slot.state = SlotState::kQuarantined;
    bytes_used_ += found.bytes;
    if (found.note.has_writer()) {
      SetWriter(slot, FromProto(found.note.writer()));
    }
    for (const v1::Reader& reader : found.note.readers()) {
      const ReadHold hold{{reader.pid(), reader.start_ticks()}, reader.hold()};
      if (slot.readers.insert(hold).second) {
        Ref(hold.process);
      }
    }
    if (!found.sealed) {
      continue;
    }
    const SealedCopy& copy = *found.sealed;
    const auto job = jobs_.find(copy.id.job);
    const KnownJob* owner = job != jobs_.end() ? &job->second : AdoptJob(copy);
    if (owner == nullptr || shards_.count(copy.id) > 0) {
      slot.foreign = true;
      AddProblem(absl::StrCat(
          "slot ", found.slot, " holds ", copy.id.ToString(), " of job '", copy.job_name, "': ",
          owner == nullptr ? "that name belongs to another job" : "another slot has the same shard",
          "; it was left alone"));
      continue;
    }
    slot.state = SlotState::kSealed;
    slot.owned = true;
    slot.job = copy.id.job;
    slot.rank = copy.id.rank;
    slot.uid = owner->uid;
    slot.lent = slot.extra = clustered() && found.note.replica();
    slot.shard = copy.id;
    slot.world_size = copy.world_size;
    HasCopy(slot, copy, found.record_bytes);
    shards_[copy.id] = slot.id;
    Act(IndexShard{copy, TierKind::kMemory, slot.id, ""});
    found_by_job[copy.id.job].push_back({copy, slot.writer});
  }
  // The ranks of the newest attempt are known before they say a word.
  for (auto& [uuid, job] : jobs_) {
    if (clustered()) {
      notices_.push_back(JobNoticed{job.name});
      if (found_by_job.count(uuid) > 0) {
        found_unmet_.insert(uuid);
      }
      continue;
    }
    Coordinator& coordinator = *job.coordinator;
    std::vector<ForAgent> out;
    coordinator.Resume(found_by_job[uuid], time_, out);
    for (const auto& [rank, process] : coordinator.LivingMembers()) {
      if (process.node == kHere) {
        Ref(process);  // reported at once if it ended meanwhile
        SeatRank({uuid, coordinator.attempt(), rank, coordinator.world_size(), process, job.uid, 0,
                  false});
      }
    }
    Take(uuid, out, time_);
    if (HasTier(TierKind::kRemote)) {
      ScanRemoteFor(job.name);
    }
  }
  // What holds no copy waits for those that may still touch it; what nobody can touch goes: whose
  // bytes it had is unknown.
  for (auto& [id, slot] : slots_) {
    if (slot.state == SlotState::kQuarantined) {
      LeaveQuarantine(slot);
    }
  }
}

}  // namespace holdfast
