// What is found in the durable tiers, and joins of jobs that only such a tier may know
// (docs/protocol.md §10).
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/agent.h"

namespace holdfast {
namespace {

// Of several drives.
void AddBad(const std::vector<BadDurableCopy>& bad, CopiesFound& all) {
  const size_t room = kBadCopiesMax - std::min(kBadCopiesMax, all.bad.size());
  const auto count = static_cast<std::ptrdiff_t>(std::min(bad.size(), room));
  all.bad.insert(all.bad.end(), bad.begin(), bad.begin() + count);
}

}  // namespace

void Agent::OnTierScanned(const TierScanned& e) {
  if (e.status.ok()) {  // (else it says nothing of what it could not look at)
    for (const std::string& problem :
         problems_.Now(absl::StrCat(e.dir, "/", e.job_name), e.problems)) {
      Act(Report{Report::Kind::kTierTrouble, "", problem, 0, e.tier});
    }
  }
  for (const std::string& file : e.unknown_files) {
    if (unknown_files_.size() < kUnknownFilesMax) {
      unknown_files_.insert(file);  // a scan that was repeated tells of it again
    }
  }
  if (e.tier == TierKind::kNvme) {
    OnDriveScanned(e);
  } else {
    OnRemoteScanned(e);
  }
  AdvanceRebuild();
}

// Anew. What was asked for before and is told later is known by its number.
void Agent::ScanDrives(std::vector<std::string> dirs) {
  const DrainId scan = next_drain_++;
  drive_scans_[scan] = time_.now;
  if (drive_scans_.size() > kDriveScansMax) {
    drive_scans_.erase(drive_scans_.begin());
  }
  Act(ScanNvme{scan, std::move(dirs)});
}

// Of one that is not remembered, or that the runtime did by itself at the start: at the earliest.
MonotonicTime Agent::DriveScanBegan(DrainId scan) const {
  const auto found = drive_scans_.find(scan);
  return found == drive_scans_.end() ? started_ : found->second;
}

void Agent::OnDriveScanned(const TierScanned& e) {
  Drive& drive = drives_[e.dir];
  if (e.drain < drive.first_scan) {
    return;
  }
  MonotonicTime began = DriveScanBegan(e.drain);
  drive.answered = true;
  drive.was_read = drive.was_read || e.status.ok();
  drive.problem = e.status.ok() ? "" : Message(e.status);
  drive.hidden = e.hidden;
  if (!e.status.ok() || !e.hidden.empty()) {
    drives_again_ = time_.now + kRescan;
  }
  const bool again =
      rebuild_ && e.drain >= rebuild_->nvme_scan && rebuild_->drives.erase(e.dir) > 0;
  if (again) {
    began = std::max(began, rebuild_->since);  // (when it began may not be remembered)
    rebuild_->nvme_read = rebuild_->nvme_read && e.status.ok();
  }
  for (const FoundJob& found : e.jobs) {
    const bool adopted = AdoptFound(found, began) != nullptr;
    TellAnotherRun(found, e, began);
    if (!adopted) {
      continue;
    }
    CopiesFound copies = TakeDriveCopies(found, began);
    if (again) {
      // (What is gone is judged when all drives have answered. What was written since it began is
      // not; to a host elsewhere the times of the two may come out as one.)
      for (const DurableCopy& copy : found.copies) {
        if (const DriveCopies::Copy* known = drive_copies_.Find(copy.copy.id);
            known != nullptr && known->state == DriveCopies::State::kThere) {
          rebuild_->nvme[found.uuid].copies.push_back(known->copy);
        }
      }
      AddBad(copies.bad, rebuild_->nvme[found.uuid]);
    }
    if (Tells(jobs_.at(found.uuid), TierKind::kNvme)) {
      Send(found.uuid, std::move(copies));
    }
  }
  if (e.status.ok()) {
    drive_copies_.DropAway(e.dir);
  }
  for (const auto& [uuid, job] : jobs_) {
    TellInventory(uuid, TierKind::kNvme);
  }
  AdvanceLookups();
}

// What is there now of what the scan found. What was removed since nobody hears of: a host that was
// not told of the removal's end, since this node was out of reach, would count it.
CopiesFound Agent::TakeDriveCopies(const FoundJob& found, MonotonicTime began) {
  CopiesFound there;
  there.tier = TierKind::kNvme;
  there.began = began;
  for (const DurableCopy& copy : found.copies) {
    if (drive_copies_.Seen(copy, began)) {
      Act(IndexShard{copy.copy, TierKind::kNvme, 0, copy.location});
      there.copies.push_back(copy);
    }
  }
  for (const BadDurableCopy& bad : found.bad) {
    if (!drive_copies_.IsPast(bad.copy.copy.id, began)) {
      drive_copies_.SeenBad(bad, began);
      there.bad.push_back(bad);
    }
  }
  return there;
}

// Told as often as it is noticed. It is looked for again as what could not be read is; what scans
// tell that began before is past.
void Agent::OnTierAway(const TierAway& e) {
  const std::string why = Message(e.status);
  if (e.tier == TierKind::kNvme) {
    Drive& drive = drives_[e.dir];
    drive.answered = true;
    drive.problem = why;
    drive.first_scan = drive.first_flush = next_drain_;
    drives_again_ = std::min(drives_again_.value_or(time_.now + kRescan), time_.now + kRescan);
    drive_copies_.SetAway(e.dir);
    if (rebuild_ && rebuild_->nvme_scan != 0) {
      rebuild_->drives.erase(e.dir);
      rebuild_->nvme_read = false;
    }
  } else {
    remote_first_scan_ = next_drain_;
    flushed_.clear();
    if (rebuild_ && rebuild_->remote_asked) {  // what it has answered is past, too
      rebuild_->remote_read = false;
      rebuild_->in_remote.clear();
    }
  }
  for (const auto& [uuid, job] : jobs_) {
    if (e.tier == TierKind::kRemote && remote_known_.erase(uuid) > 0) {
      remote_problems_[uuid] = why;
      rescan_at_[job.name] = time_.now + kRescan;
    }
    if (!Tells(job, e.tier)) {
      continue;
    }
    if (e.tier == TierKind::kRemote) {
      remote_away_bytes_[uuid] += job.coordinator->BytesBelow(e.tier, e.dir);
    }
    Send(uuid, CopiesAway{e.tier, e.dir});
    TellInventory(uuid, e.tier);
  }
  AdvanceLookups();
  AdvanceRebuild();
}

void Agent::OnRemoteScanned(const TierScanned& e) {
  const std::optional<DrainOp> op = EndDrain(e.drain);
  if (!op) {
    return;  // it hung, and has been answered; whoever wants to know has asked again since
  }
  if (e.status.ok() && e.drain < remote_first_scan_) {
    TierScanned past;
    past.tier = TierKind::kRemote;
    past.drain = e.drain;
    past.job_name = e.job_name;
    past.status = absl::UnavailableError("the directory went away while it was being read");
    return TakeRemoteScan(past, *op);
  }
  TakeRemoteScan(e, *op);
}

void Agent::TakeRemoteScan(const TierScanned& e, const DrainOp& op) {
  const auto hosting = hosting_.find(e.job_name);
  if (clustered() && !e.job_name.empty() &&
      (hosting == hosting_.end() || e.drain < hosting->second.first_scan)) {
    return;  // asked for when this node hosted the job, once
  }
  bool all = false;  // that lies there, of all jobs
  if (rebuild_ && rebuild_->remote == e.drain) {
    rebuild_->remote = 0;
    all = rebuild_->remote_read = e.status.ok();
    rebuild_->hidden_in_remote = e.hidden;
    if (!all) {
      rebuild_->reply.add_problems(Message(e.status));
    }
  }
  for (const FoundJob& found : e.jobs) {
    const bool adopted = TakesRemote(found) && AdoptFound(found, op.begun) != nullptr;
    TellAnotherRun(found, e, op.begun);
    if (!adopted) {
      continue;
    }
    CopiesFound copies;
    copies.tier = TierKind::kRemote;
    copies.copies = found.copies;
    copies.manifests = found.manifests;
    copies.highest_claim = found.highest_claim;
    copies.bad = found.bad;
    copies.begun = found.begun;
    copies.began = op.begun;
    for (const DurableCopy& copy : found.copies) {
      Act(IndexShard{copy.copy, TierKind::kRemote, 0, copy.location});
    }
    if (all) {
      rebuild_->in_remote[found.uuid] = copies;
    }
    Send(found.uuid, std::move(copies));
  }
  if (e.job_name.empty()) {
    return;  // all jobs, for a rebuild
  }
  if (const KnownJob* job = FindJob(e.job_name); job != nullptr && job->coordinator != nullptr) {
    const JobUuid uuid = job->uuid;
    if (e.status.ok()) {
      remote_known_.insert(uuid);
      remote_problems_.erase(uuid);
      remote_away_bytes_.erase(uuid);
      rescan_at_.erase(e.job_name);
    } else if (remote_known_.count(uuid) == 0) {
      remote_problems_[uuid] = Message(e.status);
      rescan_at_[e.job_name] = time_.now + kRescan;
    }
    TellInventory(uuid, TierKind::kRemote);
  }
  if (const auto lookup = lookups_.find(e.job_name);
      lookup != lookups_.end() && lookup->second.scan == e.drain) {
    lookup->second.scan = 0;
    lookup->second.failure = e.status.ok() ? "" : Message(e.status);
  }
  AdvanceLookups();
}

// What lies under the job's name there is of another run of it. It is of no use to this one, and
// whoever would start over hears of it: the newest of it is told as a copy that cannot be used.
void Agent::TellAnotherRun(const FoundJob& found, const TierScanned& e, MonotonicTime began) {
  const auto here = names_.find(found.name);
  const bool goes = removed_jobs_.count(found.uuid) + removals_.count(found.uuid) > 0 ||
                    (clustered() && WasRemoved(found.name, found.uuid));
  if (here == names_.end() || here->second == found.uuid || goes || found.copies.empty() ||
      !Tells(jobs_.at(here->second), e.tier)) {
    return;
  }
  const DurableCopy& newest = *std::max_element(
      found.copies.begin(), found.copies.end(), [](const DurableCopy& a, const DurableCopy& b) {
        return a.copy.id.checkpoint() < b.copy.id.checkpoint();
      });
  BadDurableCopy bad{newest,
                     absl::StrCat("it is of another run of job '", found.name, "', ",
                                  found.uuid.ToString(), "; the job is ", here->second.ToString(),
                                  " here. To go back to that run: ckptctl rm ", found.name,
                                  " --yes, which takes the present run alone, and start the job "
                                  "again; else move that directory elsewhere")};
  bad.copy.copy.id.job = here->second;
  bad.copy.copy.world_size = 0;  // of the present one's shards it tells nothing
  CopiesFound told;
  told.tier = e.tier;
  told.began = began;
  told.bad = {std::move(bad)};
  Send(here->second, std::move(told));
}

// The job as its tier knows it, here too from now on. Null: its name is another job's here.
KnownJob* Agent::AdoptFound(const FoundJob& found, MonotonicTime began) {
  if (const auto removed = removed_jobs_.find(found.uuid);
      removed != removed_jobs_.end() && !(removed->second < began)) {
    return nullptr;
  }
  if (const auto job = jobs_.find(found.uuid); job != jobs_.end()) {
    if (removals_.count(found.uuid) > 0) {
      return nullptr;
    }
    // A directory's user may write what they like into it: it adds nothing to another's job.
    if (job->second.name != found.name || job->second.uid != found.uid) {
      AddProblem(absl::StrCat("the directory of a job '", found.name, "' of uid ", found.uid,
                              " says that it is job '", job->second.name, "' of uid ",
                              job->second.uid, ": its copies were left alone"));
      return nullptr;
    }
    if (hosting_.count(found.name) > 0 && names_.at(found.name) == found.uuid &&
        job->second.coordinator == nullptr) {
      OpenHosted(job->second, nullptr);
    }
    return &job->second;
  }
  if (!CheckJobName(found.name).ok() || found.uuid.IsZero() || jobs_.size() >= kJobsMax) {
    return nullptr;
  }
  if (clustered() && WasRemoved(found.name, found.uuid)) {
    KnownJob& removed = AddJob(found.uuid, found.name, found.uid, found.gid);
    LetGo(found.name, {found.uuid}, time_);
    return &removed;
  }
  if (const KnownJob* other = FindJob(found.name)) {
    AddProblem(absl::StrCat("copies of a job '", found.name, "' with uuid ", found.uuid.ToString(),
                            " were left alone: the job of that name is ", other->uuid.ToString(),
                            " here"));
    if (!clustered()) {
      return nullptr;
    }
  }
  KnownJob& job = AddJob(found.uuid, found.name, found.uid, found.gid);
  if (clustered()) {
    notices_.push_back(JobNoticed{found.name});
    if (hosting_.count(found.name) > 0 && names_.at(found.name) == found.uuid) {
      OpenHosted(job, nullptr);
    }
    return &job;
  }
  std::vector<ForAgent> out;
  MakeCoordinator(job).Resume({}, time_, out);
  Take(found.uuid, out, time_);
  TellInventory(found.uuid, TierKind::kNvme);
  const auto lookup = lookups_.find(found.name);
  if (HasTier(TierKind::kRemote) && (lookup == lookups_.end() || lookup->second.scan == 0)) {
    ScanRemoteFor(found.name);
  }
  return &job;
}

// Why not all of the job could be read on some drive.
std::string Agent::HiddenOnDrives(const std::string& job_name) const {
  for (const auto& [dir, drive] : drives_) {
    if (const auto hidden = drive.hidden.find(job_name); hidden != drive.hidden.end()) {
      return hidden->second;
    }
  }
  return "";
}

void Agent::TellInventory(const JobUuid& job, TierKind tier) {
  if (const auto known = jobs_.find(job);
      !HasTier(tier) || known == jobs_.end() || !Tells(known->second, tier)) {
    return;
  }
  const bool asked =
      rebuild_ && (tier == TierKind::kNvme ? rebuild_->nvme_scan != 0 : rebuild_->remote_asked);
  if (asked && !rebuild_->told) {
    return;  // when all of it has been read
  }
  InventoryState state{tier, InventoryState::Kind::kKnown, ""};
  if (tier == TierKind::kNvme) {
    for (const auto& [dir, drive] : drives_) {
      if (!drive.answered) {
        return;  // still to come
      }
      if (!drive.problem.empty()) {
        state.kind = InventoryState::Kind::kFailed;
        state.why = drive.problem;
      }
    }
    if (const std::string why = HiddenOnDrives(JobName(job));
        !why.empty() && state.kind == InventoryState::Kind::kKnown) {
      state.kind = InventoryState::Kind::kFailed;
      state.why = why;
    }
  } else if (const auto problem = remote_problems_.find(job); problem != remote_problems_.end()) {
    state.kind = InventoryState::Kind::kFailed;
    state.why = problem->second;
  } else if (remote_known_.count(job) == 0) {
    return;
  }
  Send(job, std::move(state));
}

void Agent::ScanRemoteFor(const std::string& name) {
  DrainOp op;
  op.kind = DrainOp::Kind::kScan;
  op.tier = TierKind::kRemote;
  op.job_name = name;
  const DrainId id = BeginDrain(std::move(op));
  if (const auto lookup = lookups_.find(name); lookup != lookups_.end()) {
    lookup->second.scan = id;
  }
  Act(ScanRemote{id, name});
}

// ---- Joins of jobs that only a durable tier may know ----

const std::string& Agent::JobAskedFor(const v1::ClientFrame& frame) {
  return frame.has_join()   ? frame.join().job()
         : frame.has_list() ? frame.list().job()
                            : frame.attach().job();
}

void Agent::LookUp(ConnectionId id, const v1::ClientFrame& frame, MonotonicTime until) {
  const std::string& name = JobAskedFor(frame);
  if (lookups_.size() >= kLookupsMax && lookups_.count(name) == 0) {
    return RefuseNow(
        id, frame.id(),
        {absl::StatusCode::kResourceExhausted, v1::Failure::REASON_UNSPECIFIED,
         absl::StrCat(kLookupsMax, " jobs are being looked for in the durable tiers; try again")});
  }
  const auto [lookup, fresh] = lookups_.try_emplace(name);
  std::erase_if(lookup->second.waiting,
                [&](RequestToken gone) { return FindPending(gone) == nullptr; });
  const RequestToken token = NewPending(id, frame, until);
  Pending& pending = pending_.at(token);
  pending.where = Where::kLookup;
  pending.request = std::make_shared<const v1::ClientFrame>(frame);
  lookup->second.waiting.push_back(token);
  if (fresh && HasTier(TierKind::kRemote)) {
    ScanRemoteFor(name);
  }
  AdvanceLookups();  // the drives may have answered long ago
}

Failure Agent::NotLookedUp(const std::string& name, const std::string& why) {
  return {absl::StatusCode::kUnavailable, v1::Failure::REASON_UNSPECIFIED,
          absl::StrCat("whether there are checkpoints of a job '", name,
                       "', which this daemon does not know, cannot be told now: ", why,
                       "; try again when that can be read")};
}

// Those whose tiers have all answered go on now: with the job that was found, or a new one.
void Agent::AdvanceLookups() {
  const bool drives =
      std::all_of(drives_.begin(), drives_.end(), [](const auto& d) { return d.second.answered; });
  for (auto it = lookups_.begin(); it != lookups_.end();) {
    if (!drives || it->second.scan != 0) {
      ++it;
      continue;
    }
    const std::string name = it->first;
    Lookup lookup = std::move(it->second);
    it = lookups_.erase(it);
    if (!lookup.failure.empty()) {
      lookup.failure = absl::StrCat(config_.remote().dir(), ": ", lookup.failure,
                                    "; take it out of the configuration if it is gone for good");
    }
    for (const auto& [dir, drive] : drives_) {
      if (!drive.problem.empty() && !drive.was_read) {
        lookup.failure = absl::StrCat(dir, ": ", drive.problem);
      }
    }
    if (const std::string hidden = HiddenOnDrives(name); !hidden.empty()) {
      lookup.failure = hidden;
    }
    EndLookup(name, lookup.failure);
    for (const RequestToken token : lookup.waiting) {
      const Pending* pending = FindPending(token);
      if (pending == nullptr) {
        continue;
      }
      if (!lookup.failure.empty() && FindJob(name) == nullptr) {
        Refuse(token, NotLookedUp(name, lookup.failure));
        continue;
      }
      if (pending->kind != v1::ClientFrame::kJoin) {
        GoOnReading(token);
        continue;
      }
      const std::shared_ptr<const v1::ClientFrame> frame = pending->request;
      const ConnectionId connection = pending->connection;
      const std::optional<MonotonicTime> until = pending->deadline;
      ErasePending(token);
      OnJoin(connection, connections_.at(connection), *frame, until);
    }
  }
}

}  // namespace holdfast
