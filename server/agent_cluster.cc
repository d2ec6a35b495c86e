// Jobs of a cluster (docs/protocol.md §16): each is hosted by one node at a time, whose daemon has
// its coordinator, and known to all that have something of it. Here is what an agent does for jobs
// that other nodes host, and what it does when its own node becomes the host. Between nodes
// everything may be lost and come again: so when a host says who it is, it is told all that is
// here.
#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/agent.h"
#include "server/node_ranges.h"
#include "server/state_order.h"

namespace holdfast {
// Whether the job's coordinator has heard of all that is here: what changes is told since.
bool Agent::Told(const KnownJob& job) const {
  return clustered() ? job.met : job.coordinator != nullptr;
}

// What lies in the remote tier the host's own agent tells, and nobody else.
bool Agent::Tells(const KnownJob& job, TierKind tier) const {
  return tier == TierKind::kRemote ? job.coordinator != nullptr : Told(job);
}

absl::Status Agent::HostedElsewhere(const std::string& name) const {
  return absl::UnavailableError(
      absl::StrCat("job '", name,
                   "' is hosted by another node; ask there, or try again if that "
                   "node was lost just now"));
}

// As the coordinator that it may become would judge it.
absl::Status Agent::CheckLoads(const KnownJob& job, const v1::JobState& state) const {
  NodeNames names(nodes_.Name(kHere));  // what the state names is not heard of by that
  CoordinatorSettings settings;
  settings.nodes = &names;
  HF_RETURN_IF_ERROR(CheckNodeRanges(state.nodes()));
  v1::JobState checked = state;
  checked.clear_nodes();  // (which would only be heard of)
  return Coordinator(settings, job.uuid, job.name, job.uid, job.gid, first_session_).Load(checked);
}

// As its host, or what the hosts agreed on, tells it: the name is this job's from now on. Null:
// there are too many.
KnownJob* Agent::KnowJob(const JobUuid& uuid, const std::string& name, uint32_t uid, uint32_t gid) {
  auto it = jobs_.find(uuid);
  if (it == jobs_.end() && jobs_.size() >= kJobsMax && !ForgetElsewhere(uid) &&
      !ForgetElsewhere(std::nullopt)) {
    AddProblem(absl::StrCat("job '", name, "' is not taken part in: this node knows ", kJobsMax,
                            " jobs already"));
    return nullptr;
  }
  if (it != jobs_.end() && it->second.name != name) {
    AddProblem(absl::StrCat("job ", uuid.ToString(), " is '", it->second.name, "' here and '", name,
                            "' elsewhere: it was left alone"));
    return nullptr;
  }
  const auto named = names_.find(name);
  if (named != names_.end() && named->second != uuid) {
    const KnownJob& other = jobs_.at(named->second);
    if (HasAnything(other.uuid) && removals_.count(other.uuid) == 0) {
      NameSecond(other, uuid);
    }
  }
  names_[name] = uuid;
  if (it == jobs_.end()) {
    return &AddJob(uuid, name, uid, gid);
  }
  KnownJob& job = it->second;
  if (job.uid != uid || job.gid != gid) {
    for (auto& [id, slot] : slots_) {
      slot.uid = slot.owned && slot.job == uuid && slot.uid == job.uid ? uid : slot.uid;
    }
    const bool other_owner = job.uid != uid;
    job.uid = uid;
    job.gid = gid;
    if (other_owner && HasTier(TierKind::kNvme)) {
      // What was left alone as another user's may be its own. Until then nothing is told as known.
      for (auto& [dir, drive] : drives_) {
        drive.answered = false;
        drive.first_scan = next_drain_;
      }
      ScanDrives();
    }
  }
  return &job;
}

void Agent::NameSecond(const KnownJob& other, const JobUuid& uuid) {
  AddProblem(absl::StrCat("what this node has of job '", other.name, "' with uuid ",
                          other.uuid.ToString(), " is left alone: there is one of that name with ",
                          "uuid ", uuid.ToString()));
}

bool Agent::HasAnything(const JobUuid& job) const {
  return drive_copies_.Any(job) || seats_.AnyOf(job) ||
         std::any_of(slots_.begin(), slots_.end(),
                     [&](const auto& slot) { return slot.second.owned && slot.second.job == job; });
}

uint64_t Agent::RanksHere(const JobUuid& job) const {
  std::set<Rank> ranks;
  for (const auto& [id, seat] : seats_.all()) {
    if (seat.job == job && !seat.superseded) {
      ranks.insert(seat.rank);
    }
  }
  return ranks.size();
}

// ---- This node is the host ----

absl::Status Agent::CheckState(const std::string& name, const v1::JobState& state) const {
  const absl::StatusOr<JobUuid> uuid = JobUuid::FromBytes(state.job_uuid());
  if (!uuid.ok() || uuid->IsZero() || state.name() != name) {
    return uuid.ok() ? absl::DataLossError("it is another job's") : uuid.status();
  }
  return CheckLoads({*uuid, name, state.uid(), state.gid()}, state);
}

bool Agent::BeginHosting(const std::string& name, const v1::JobState* state, EventTime time) {
  time_ = time;
  EndHosting(name);
  const auto refuse = [&](const absl::Status& why) {
    hosting_.erase(name);
    AddProblem(absl::StrCat("job '", name, "' cannot be hosted here: ", Message(why)));
    return false;
  };
  if (const absl::Status valid = CheckJobName(name); !valid.ok()) {
    return refuse(valid);
  }
  hosting_[name].first_scan = next_drain_;
  KnownJob* job = FindJob(name);
  if (state == nullptr && job != nullptr && job->state) {
    state = &*job->state;
  }
  if (state != nullptr) {
    if (const absl::Status useful = CheckState(name, *state); !useful.ok()) {
      return refuse(useful);
    }
    LetGo(name, RemovedIn(*state), time);
    if (state->removed()) {
      return FinishRemoval(name, v1::JobState(*state)) ||
             refuse(absl::ResourceExhaustedError("it is not known here, and cannot be"));
    }
    job = KnowJob(*JobUuid::FromBytes(state->job_uuid()), name, state->uid(), state->gid());
    if (job == nullptr) {
      return refuse(absl::ResourceExhaustedError("it is not known here, and cannot be"));
    }
    if (!job->state || IsNewerState(*state, *job->state)) {
      job->state = *state;
      Act(WriteJobState{*state});
    }
  }
  if (job == nullptr) {
    LookUpHosted(name);
    return true;
  }
  if (!OpenHosted(*job, state)) {
    hosting_.erase(name);
    return false;
  }
  if (HasTier(TierKind::kRemote)) {
    ScanRemoteFor(name);
  }
  return true;
}

// It knows nothing of any node, this one included, before that has told (Meet).
bool Agent::OpenHosted(KnownJob& job, const v1::JobState* state) {
  Coordinator& coordinator = MakeCoordinator(job);
  job.met = false;
  if (state != nullptr) {
    if (const absl::Status loaded = coordinator.Load(*state); !loaded.ok()) {
      job.coordinator.reset();
      AddProblem(absl::StrCat("job '", job.name, "' cannot be hosted here: ", Message(loaded)));
      return false;
    }
    coordinator.SetRebooted();  // whether other nodes were started anew since is not known
  }
  notices_.push_back(JobOpened{job.name, job.uuid});
  return true;
}

void Agent::EndHosting(const std::string& name) {
  if (hosting_.erase(name) == 0) {
    return;
  }
  lookups_.erase(name);
  problems_.Over(absl::StrCat("lookup ", name));
  rescan_at_.erase(name);
  KnownJob* job = FindJob(name);
  for (const auto& [id, op] : drains_) {
    const bool removes = op.kind == DrainOp::Kind::kRemove || op.kind == DrainOp::Kind::kRemoveJob;
    const bool of_it = op.job_name == name || (job != nullptr && op.job == job->uuid);
    if (removes && of_it && op.tier == TierKind::kRemote) {
      Act(CancelDrain{id});  // the next host decides what goes there
    }
  }
  if (job == nullptr) {
    return;
  }
  if (const auto going = removals_.find(job->uuid);
      going != removals_.end() && job->coordinator == nullptr) {
    going->second.for_host = true;  // what is in the remote tier is the next host's to remove
    going->second.tiers_left.erase(TierKind::kRemote);
  }
  if (job->coordinator == nullptr) {
    return;
  }
  if (const auto removal = removals_.find(job->uuid); removal != removals_.end()) {
    const AdminToken token = removal->second.token;
    removals_.erase(removal);
    if (token != 0) {
      RefuseAdmin(token, absl::UnavailableError(absl::StrCat(
                             "job '", name, "' is hosted by another node now; remove it again")));
    }
  }
  remote_known_.erase(job->uuid);
  remote_problems_.erase(job->uuid);
  remote_away_bytes_.erase(job->uuid);
  job->coordinator.reset();
  job->met = false;
}

// Whether a tier that can be read here knows a job of that name.
void Agent::LookUpHosted(const std::string& name) {
  lookups_[name];
  if (HasTier(TierKind::kRemote)) {
    ScanRemoteFor(name);
  }
  AdvanceLookups();
}

void Agent::EndLookup(const std::string& name, const std::string& failure) {
  problems_.Over(absl::StrCat("lookup ", name));
  const auto hosting = hosting_.find(name);
  if (hosting == hosting_.end() || FindJob(name) != nullptr) {
    return;
  }
  hosting->second.unread = failure;
  if (!failure.empty()) {
    problems_.Now(absl::StrCat("lookup ", name),
                  {absl::StrCat("whether there are checkpoints of a job '", name,
                                "' could not be told, and it is asked again: ", failure)});
    rescan_at_[name] = time_.now + kRescan;
    return;
  }
  hosting->second.looked_up = true;
  LookedUp(name);
}

// There is none of that name: whoever wants it gets a new one.
void Agent::LookedUp(const std::string& name) {
  OpenWanted(name);
  if (IsAbsent(name)) {
    RefuseReaders(name);
    notices_.push_back(JobMissed{name});
  }
}

bool Agent::IsAbsent(const std::string& name) const {
  const auto hosting = hosting_.find(name);
  return hosting != hosting_.end() && hosting->second.looked_up && names_.count(name) == 0;
}

void Agent::SayAbsent(const std::string& name, EventTime time) {
  time_ = time;
  if (FindJob(name) == nullptr) {
    RefuseReaders(name);
  }
}

bool Agent::AnyWaitsForHost(const std::string& name, bool joins) const {
  const auto wait = host_waits_.find(name);
  return wait != host_waits_.end() &&
         std::any_of(wait->second.waiting.begin(), wait->second.waiting.end(),
                     [&](RequestToken token) {
                       const auto pending = pending_.find(token);
                       return pending != pending_.end() &&
                              (pending->second.kind == v1::ClientFrame::kJoin) == joins;
                     });
}

std::vector<JobWanter> Agent::Joining(const std::string& name) const {
  std::vector<JobWanter> joining;
  const auto wait = host_waits_.find(name);
  if (wait == host_waits_.end()) {
    return joining;
  }
  for (const RequestToken token : wait->second.waiting) {
    const auto pending = pending_.find(token);
    if (pending != pending_.end() && pending->second.kind == v1::ClientFrame::kJoin) {
      const Caller& caller = connections_.at(pending->second.connection).caller;
      joining.push_back({caller.uid, caller.gid, *pending->second.deadline});
    }
  }
  return joining;
}

std::optional<JobWanter> Agent::WhoJoins(const std::string& name) const {
  const std::vector<JobWanter> joining = Joining(name);
  const auto last =
      std::max_element(joining.begin(), joining.end(),
                       [](const auto& a, const auto& b) { return a.until < b.until; });
  return last == joining.end() ? std::nullopt : std::optional(*last);
}

// Joins go on waiting: their job is about to be opened.
void Agent::RefuseReaders(const std::string& name) {
  const auto wait = host_waits_.find(name);
  if (wait == host_waits_.end()) {
    return;
  }
  const std::vector<RequestToken> waiting = wait->second.waiting;
  for (const RequestToken token : waiting) {
    const Pending* pending = FindPending(token);
    if (pending != nullptr && pending->kind != v1::ClientFrame::kJoin) {
      Refuse(token, {absl::StatusCode::kNotFound, v1::Failure::REASON_NOTHING_TO_RESTORE,
                     absl::StrCat("there is no job '", name, "' in this cluster")});
    }
  }
}

void Agent::Want(const std::string& name, const JobWanter& wanter, EventTime time) {
  time_ = time;
  const auto hosting = hosting_.find(name);
  if (hosting == hosting_.end()) {
    return;
  }
  NoteWanter(hosting->second.wanted, wanter, time.now);
  OpenWanted(name);
}

void Agent::WantHere(const std::string& name, EventTime time) {
  time_ = time;
  if (hosting_.count(name) > 0) {
    OpenWanted(name);
  }
}

// For the first of those that wait still: the tiers may have taken longer than whoever asked first
// had time, and the job would be that user's.
void Agent::OpenWanted(const std::string& name) {
  Hosting& hosting = hosting_.at(name);
  if (!hosting.looked_up || FindJob(name) != nullptr) {
    return;
  }
  std::vector<JobWanter> wanters = Joining(name);
  for (const auto& [user, until] : std::exchange(hosting.wanted, {})) {
    if (until > time_.now) {
      wanters.push_back({user.first, user.second, until});
    }
  }
  std::set<uint32_t> refused;
  for (const auto& [uid, gid, until] : wanters) {
    if (refused.count(uid) > 0) {
      continue;
    }
    if (MayOpenJob(uid) || ForgetAJob(uid)) {
      KnownJob& job = OpenJob(name, uid, gid);
      job.coordinator->SetRemovedBefore(hosting.removed, hosting.version);
      notices_.push_back(JobOpened{name, job.uuid});
      return;
    }
    refused.insert(uid);
    Tell(
        Report::Kind::kTrouble, {},
        absl::StrCat("job '", name, "' of uid ", uid, " was not opened: there are too many jobs (",
                     kJobsMax, " a node, ", kJobsPerUidMax, " a user); remove one that has ended"));
  }
}

// In a cluster the remote tier is read for jobs that are hosted here, and their names are theirs.
bool Agent::TakesRemote(const FoundJob& found) {
  if (!clustered()) {
    return true;
  }
  if (hosting_.count(found.name) == 0) {
    return false;
  }
  const std::vector<JobUuid> removed = RemovedBefore(found.name);
  if (std::find(removed.begin(), removed.end(), found.uuid) != removed.end()) {
    RemoveAgain(found.name, found.uuid);
    return false;
  }
  if (const KnownJob* other = FindJob(found.name); other != nullptr && other->uuid != found.uuid) {
    NameSecond({found.uuid, found.name}, other->uuid);
    return false;
  }
  return true;
}

// ---- Another node is, perhaps ----

// What that process sealed last as that rank, if it lies in memory and nothing here is of a newer
// attempt.
const SealedCopy* Agent::NewestOf(const JobUuid& job, const Caller& caller, Rank rank) const {
  const Slot* newest = nullptr;
  Attempt attempt = 0;
  for (auto it = shards_.lower_bound({job, 0, 0, 0}); it != shards_.end() && it->first.job == job;
       ++it) {
    const Slot& slot = slots_.at(it->second);
    attempt = it->first.attempt;
    if (it->first.rank == rank && slot.state == SlotState::kSealed &&
        slot.writer == caller.process) {
      newest = &slot;
    }
  }
  return newest != nullptr && newest->shard.attempt == attempt ? &newest->copy : nullptr;
}

// This daemon was started anew under a rank that goes on in its attempt, and no host has been heard
// yet: what the rank has sealed says who it is. As a rank whose seat was never lost it can fill
// slots of this node and nothing else (docs/protocol.md §17).
bool Agent::ReturnsByItself(const KnownJob& job, const Caller& caller, const v1::Join& join) const {
  if (join.attempt() == 0 || caller.uid != job.uid || !MaySit(caller).ok() ||
      removals_.count(job.uuid) > 0 ||
      (job.state && job.state->highest_attempt() > join.attempt())) {
    return false;
  }
  const SealedCopy* newest = NewestOf(job.uuid, caller, join.rank());
  return newest != nullptr && newest->id.attempt == join.attempt() &&
         newest->world_size == join.world_size();
}

void Agent::ReturnByItself(const KnownJob& job, ConnectionId id, const v1::ClientFrame& frame) {
  const Connection& connection = connections_.at(id);
  const SealedCopy& newest = *NewestOf(job.uuid, connection.caller, frame.join().rank());
  const RequestToken token = NewPending(id, frame, time_.now + kSettle);
  pending_.at(token).job = job.uuid;
  JoinAccepted accepted{token, newest.id.attempt, newest.id.rank, newest.world_size,
                        true,  newest.descent,    newest.id.step};
  TakeMessage(job.uuid, accepted);
  seats_.SetLine(connection.seat, newest.descent);
}

void Agent::WaitForHost(ConnectionId id, const v1::ClientFrame& frame, MonotonicTime until) {
  const std::string& name = JobAskedFor(frame);
  if (host_waits_.size() >= kLookupsMax && host_waits_.count(name) == 0) {
    std::erase_if(host_waits_, [&](const auto& wait) {
      return std::all_of(wait.second.waiting.begin(), wait.second.waiting.end(),
                         [&](RequestToken token) { return pending_.count(token) == 0; });
    });
  }
  if (host_waits_.size() >= kLookupsMax && host_waits_.count(name) == 0) {
    return RefuseNow(id, frame.id(),
                     {absl::StatusCode::kResourceExhausted, v1::Failure::REASON_UNSPECIFIED,
                      absl::StrCat("the hosts of ", kLookupsMax,
                                   " jobs are being looked for already; try again")});
  }
  HostWait& wait = host_waits_[name];
  std::erase_if(wait.waiting, [&](RequestToken gone) { return FindPending(gone) == nullptr; });
  const bool first = !AnyWaitsForHost(name, frame.has_join());
  const RequestToken token = NewPending(id, frame, until);
  Pending& pending = pending_.at(token);
  pending.where = Where::kHost;
  pending.request = std::make_shared<const v1::ClientFrame>(frame);
  wait.waiting.push_back(token);
  // (Readers open nothing: its host is looked for, and is there if any tier or node knows the job.
  // It may have been met before, and forgotten here since: it hears that it is asked for again.)
  if (first && frame.has_join()) {
    const Caller& caller = connections_.at(id).caller;
    notices_.push_back(JobWanted{name, caller.uid, caller.gid});
  } else if (first) {
    notices_.push_back(JobRead{name});
  }
}

// A node that hosts the name opens no job before it knows that no tier has one.
Failure Agent::NotHosted(const v1::ClientFrame& frame) const {
  const std::string& name = JobAskedFor(frame);
  const auto hosting = hosting_.find(name);
  if (hosting != hosting_.end() && !hosting->second.unread.empty() && names_.count(name) == 0) {
    return NotLookedUp(name, hosting->second.unread);
  }
  const std::string why = why_not_heard_ ? why_not_heard_(name) : "";
  return {absl::StatusCode::kUnavailable, v1::Failure::REASON_UNSPECIFIED,
          absl::StrCat("no node was heard of in time that hosts job '", name, "': ",
                       why.empty() ? "none is in reach, or its host cannot read all tiers; ckptctl "
                                     "status there says which"
                                   : why,
                       "; try again")};
}

void Agent::GoOnWithHost(const std::string& name) {
  const auto it = host_waits_.find(name);
  if (it == host_waits_.end()) {
    return;
  }
  const HostWait wait = std::move(it->second);
  host_waits_.erase(it);
  for (const RequestToken token : wait.waiting) {
    const Pending* pending = FindPending(token);
    if (pending == nullptr) {
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

void Agent::Meet(const MeetJob& m, EventTime time) {
  time_ = time;
  if (!CheckJobName(m.name).ok() || m.uuid.IsZero()) {
    return;
  }
  KnownJob* job = KnowJob(m.uuid, m.name, m.uid, m.gid);
  if (job == nullptr) {
    return;
  }
  job->met = true;
  std::erase_if(cancelled_joins_, [&](const auto& join) { return join.second.job == m.uuid; });
  // 1. Who lives here, as far as it knows and this daemon does not (it was started anew).
  AddSeats(m, *job);
  // 2. All that lies here: memory and ranks, then the drives.
  Send(job->uuid, Arrival(job->uuid));
  for (const auto& [shard, id] : shards_) {
    const Slot& slot = slots_.at(id);
    if (shard.job == job->uuid && slot.state == SlotState::kSealed && slot.bad) {
      Send(job->uuid, ShardBad{shard.checkpoint(), shard.rank, "it was found bad before"});
    }
  }
  TellDrives(*job);
  TellStopAnew(job->uuid);
  // 3. Who waited for it.
  GoOnWithHost(m.name);
}

// Those that the host believes to live here. At the first meeting also those that wrote what was
// found here: the host may not know them, for its state names the ranks of the node that wrote it
// only.
void Agent::AddSeats(const MeetJob& m, const KnownJob& known) {
  for (const auto& [rank, process] : m.ranks) {
    if (process.node == kHere && rank < m.world_size) {
      AddSeat({m.uuid, m.attempt, rank, m.world_size, process, known.uid, 0, false});
    }
  }
  if (found_unmet_.erase(m.uuid) == 0) {
    return;
  }
  std::map<Rank, const Slot*> newest;  // of the newest attempt
  for (auto it = shards_.lower_bound({m.uuid, m.attempt, 0, 0});
       it != shards_.end() && it->first.job == m.uuid; ++it) {
    const Slot& slot = slots_.at(it->second);
    if (slot.state != SlotState::kSealed || !slot.writer) {
      continue;
    }
    if (!newest.empty() && newest.begin()->second->shard.attempt < slot.shard.attempt) {
      newest.clear();
    }
    newest[slot.shard.rank] = &slot;  // its later steps come later
  }
  for (const auto& [rank, slot] : newest) {
    if (seats_.OfRank(m.uuid, rank).empty()) {
      AddSeat({m.uuid, slot->shard.attempt, rank, slot->world_size, *slot->writer, known.uid, 0,
               false});
    }
  }
}

void Agent::AddSeat(const Seat& seat) {
  const std::set<SeatId>& seats = seats_.OfRank(seat.job, seat.rank);
  const bool there = std::any_of(seats.begin(), seats.end(), [&](SeatId id) {
    return seats_.Find(id)->process == seat.process;
  });
  if (!there && seats_.size() < kSeatsMax) {
    Ref(seat.process);  // reported at once if it ended meanwhile
    SeatRank(seat);
  }
}

NodeArrived Agent::Arrival(const JobUuid& job) const {
  NodeArrived arrived;
  arrived.lends_bytes = LendsBytes();
  arrived.reads_remote = !config_.remote().dir().empty();
  arrived.leaving = draining_;
  for (const v1::Label& label : OwnLabels()) {
    arrived.labels.push_back({label.name(), label.value()});
  }
  for (auto it = shards_.lower_bound({job, 0, 0, 0}); it != shards_.end() && it->first.job == job;
       ++it) {
    const Slot& slot = slots_.at(it->second);
    if (slot.state == SlotState::kSealed && !slot.loaded) {  // (which goes with its last reader)
      arrived.shards.push_back({slot.copy, slot.writer, slot.lent});
    }
  }
  for (const auto& [id, seat] : seats_.all()) {
    if (seat.job == job && !seat.superseded) {
      arrived.seats.push_back({seat.attempt, seat.rank, seat.process, seat.connection,
                               WritingOf(id, seat), seat.last_begun});
    }
  }
  return arrived;
}

// The steps that it has begun, and that are neither sealed nor lost.
std::set<Step> Agent::WritingOf(SeatId id, const Seat& seat) const {
  std::set<Step> writing;
  for (auto it = shards_.lower_bound({seat.job, seat.attempt, 0, 0});
       it != shards_.end() && it->first.job == seat.job && it->first.attempt == seat.attempt;
       ++it) {
    const Slot& slot = slots_.at(it->second);
    if (it->first.rank == seat.rank && Filling(slot.state) && !slot.fetch && !slot.lost) {
      writing.insert(it->first.step);
    }
  }
  for (const auto& [token, pending] : pending_) {
    const bool permitted = pending.where == Where::kRoom || pending.where == Where::kAsking ||
                           pending.where == Where::kSlot;
    if (pending.kind == v1::ClientFrame::kBeginSave && pending.seat == id && permitted) {
      writing.insert(pending.step);
    }
  }
  return writing;
}

void Agent::TellDrives(const KnownJob& job) {
  if (!HasTier(TierKind::kNvme)) {
    return;
  }
  const bool all_read = std::all_of(drives_.begin(), drives_.end(), [](const auto& drive) {
    return drive.second.answered && drive.second.problem.empty();
  });
  CopiesFound copies;
  copies.tier = TierKind::kNvme;
  copies.began = time_.now;
  copies.as_of = all_read && HiddenOnDrives(job.name).empty() ? time_.now : MonotonicTime();
  std::vector<ShardBad> bad;
  for (const DriveCopies::Copy& each : drive_copies_.Of(job.uuid)) {
    const ShardId& id = each.copy.copy.id;
    if (each.state == DriveCopies::State::kGoing &&
        !OnTheWay(DrainOp::Kind::kRemove, job.uuid, id.checkpoint(), TierKind::kNvme)) {
      // Its removal has failed, and this host may never have heard of it.
      drive_copies_.Keep(job.uuid, id.checkpoint());
      ChangeIndex(IndexShard{each.copy.copy, TierKind::kNvme, 0, each.copy.location});
    } else if (each.state != DriveCopies::State::kThere) {
      continue;
    }
    if (!each.unread.empty()) {
      if (copies.bad.size() < kBadCopiesMax) {
        copies.bad.push_back({each.copy, each.unread});
      }
      continue;
    }
    copies.copies.push_back(each.copy);
    if (each.bad) {
      bad.push_back({id.checkpoint(), id.rank, "it was found bad before", TierKind::kNvme});
    }
  }
  if (!copies.copies.empty() || !copies.bad.empty() || copies.as_of != MonotonicTime()) {
    Send(job.uuid, std::move(copies));
  }
  for (ShardBad& each : bad) {
    Send(job.uuid, std::move(each));
  }
  TellInventory(job.uuid, TierKind::kNvme);
}

// ---- States ----

std::optional<v1::JobState> Agent::KeptState(const std::string& name) const {
  const auto named = names_.find(name);
  if (named == names_.end()) {
    return std::nullopt;
  }
  const KnownJob& job = jobs_.at(named->second);
  if (job.state || (!HasAnything(job.uuid) && !job.met)) {
    return job.state;
  }
  v1::JobState state;
  state.set_job_uuid(job.uuid.ToBytes());
  state.set_name(job.name);
  state.set_uid(job.uid);
  state.set_gid(job.gid);
  state.set_history_unknown(true);
  return state;
}

void Agent::KeepState(const v1::JobState& state, EventTime time) {
  time_ = time;
  const absl::StatusOr<JobUuid> uuid = JobUuid::FromBytes(state.job_uuid());
  if (!uuid.ok() || uuid->IsZero() || !CheckJobName(state.name()).ok()) {
    return;
  }
  const auto known = jobs_.find(*uuid);
  if (known != jobs_.end() && known->second.state && !IsNewerState(state, *known->second.state)) {
    return;
  }
  if (const absl::Status loads = CheckLoads({*uuid, state.name(), state.uid(), state.gid()}, state);
      !loads.ok()) {
    return AddProblem(absl::StrCat("a job's state was not kept: ", Message(loads)));
  }
  if (KnownJob* job = KnowJob(*uuid, state.name(), state.uid(), state.gid())) {
    job->state = state;
    states_again_.erase(*uuid);
    Act(WriteJobState{state});
  }
}

void Agent::WriteAgain() {
  for (auto it = states_again_.begin(); it != states_again_.end();) {
    if (time_.now < it->second) {
      ++it;
      continue;
    }
    const auto job = jobs_.find(it->first);
    if (job != jobs_.end() && job->second.state) {
      Act(WriteJobState{*job->second.state});
    }
    it = states_again_.erase(it);
  }
}

// Jobs that others host and that have left nothing here are forgotten here when their number is
// needed: of that user, or of any, first those that never committed anything, then the longest
// ended. (Who asks their host for them hears of them again.)
bool Agent::ForgetElsewhere(std::optional<uint32_t> uid) {
  std::optional<std::tuple<bool, int64_t, JobUuid>> oldest;
  for (const auto& [uuid, job] : jobs_) {
    const JobUuid& its = uuid;
    const bool asked = std::any_of(pending_.begin(), pending_.end(),
                                   [&](const auto& pending) { return pending.second.job == its; });
    const bool busy = std::any_of(drains_.begin(), drains_.end(),
                                  [&](const auto& drain) { return drain.second.job == its; });
    if ((uid && job.uid != *uid) || job.coordinator != nullptr || hosting_.count(job.name) > 0 ||
        removals_.count(uuid) > 0 || HasAnything(uuid) || asked || busy) {
      continue;
    }
    bool committed = false;
    int64_t opened = 0;
    if (job.state) {
      for (const v1::AttemptState& attempt : job.state->attempts()) {
        committed = committed || attempt.any_committed();
        opened = std::max(opened, attempt.opened_unix_ms());
      }
    }
    const std::tuple candidate(committed, opened, uuid);
    oldest = oldest ? std::min(*oldest, candidate) : candidate;
  }
  if (!oldest) {
    return false;
  }
  const JobUuid uuid = std::get<JobUuid>(*oldest);
  const KnownJob& job = jobs_.at(uuid);
  if (const auto named = names_.find(job.name); named->second == uuid) {
    names_.erase(named);
  }
  if (job.state) {
    Act(RemoveJobState{uuid});
  }
  states_again_.erase(uuid);
  jobs_.erase(uuid);
  ended_jobs_.Forget(uuid);
  return true;
}

// ---- What a host may ask for twice ----

bool Agent::OnTheWay(DrainOp::Kind kind, const JobUuid& job, CheckpointId checkpoint, TierKind tier,
                     std::optional<Rank> rank) const {
  return std::any_of(drains_.begin(), drains_.end(), [&](const auto& drain) {
    const DrainOp& op = drain.second;
    return op.kind == kind && op.job == job && op.checkpoint == checkpoint && op.tier == tier &&
           (!rank || op.rank == *rank);
  });
}

// The copy that such a flush has left. (Alone, a node's coordinator knows them all: it asks again
// for what it wants written again.)
const DurableCopy* Agent::FlushedBefore(const ShardId& shard, TierKind tier, uint64_t bytes) const {
  if (!clustered()) {
    return nullptr;
  }
  const DurableCopy* copy = nullptr;
  if (tier == TierKind::kNvme) {
    const DriveCopies::Copy* there = drive_copies_.Find(shard);
    const bool good = there != nullptr && there->state == DriveCopies::State::kThere && !there->bad;
    copy = good ? &there->copy : nullptr;
  } else if (const auto flushed = flushed_.find(shard); flushed != flushed_.end()) {
    copy = &flushed->second;
  }
  return copy != nullptr && copy->copy.image_bytes == bytes ? copy : nullptr;
}

void Agent::NoteFlushed(const DurableCopy& copy) {
  if (!clustered()) {
    return;
  }
  flushed_[copy.copy.id] = copy;
  if (flushed_.size() > kFlushedMax) {  // what belongs to another step than this one
    flushed_.erase(flushed_.begin()->first == copy.copy.id ? std::next(flushed_.begin())
                                                           : flushed_.begin());
  }
}

void Agent::ForgetFlushed(const JobUuid& job, CheckpointId checkpoint) {
  std::erase_if(flushed_, [&](const auto& flushed) {
    return flushed.first.job == job && flushed.first.checkpoint() == checkpoint;
  });
}

void Agent::NoteBad(const ShardId& shard, TierKind tier, bool bad) {
  if (tier == TierKind::kNvme) {
    drive_copies_.SetBad(shard, bad);
  } else if (bad) {
    flushed_.erase(shard);
  }
}

}  // namespace holdfast
