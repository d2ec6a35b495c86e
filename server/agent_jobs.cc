// Joining, leaving, and what the coordinators say.
#include <algorithm>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "recovery/policy.h"
#include "server/agent.h"

namespace holdfast {
namespace {

template <typename Repeated>
void AddDescent(const std::vector<Descent>& descent, Repeated* out) {
  for (const Descent& d : descent) {
    v1::Descent& added = *out->Add();
    added.set_attempt(d.attempt);
    added.set_parent_attempt(d.parent.attempt);
    added.set_parent_step(d.parent.step);
  }
}

}  // namespace

void Agent::OnJoin(ConnectionId id, Connection& connection, const v1::ClientFrame& frame,
                   std::optional<MonotonicTime> until) {
  const v1::Join& join = frame.join();
  const auto refuse = [&](absl::StatusCode code, v1::Failure::Reason reason, std::string why) {
    RefuseNow(id, frame.id(), {code, reason, absl::StrCat("join: ", why)});
  };
  if (const absl::Status name = CheckJobName(join.job()); !name.ok()) {
    return refuse(name.code(), v1::Failure::REASON_UNSPECIFIED, Message(name));
  }
  if (join.world_size() == 0 || join.world_size() > kWorldSizeMax ||
      join.rank() >= join.world_size()) {
    return refuse(
        absl::StatusCode::kInvalidArgument, v1::Failure::REASON_TOPOLOGY,
        absl::StrCat("rank ", join.rank(), " of world size ", join.world_size(),
                     ": the rank must be below the world size, which is 1 to ", kWorldSizeMax));
  }
  if (join.launch().size() > kLaunchBytesMax) {
    return refuse(absl::StatusCode::kInvalidArgument, v1::Failure::REASON_UNSPECIFIED,
                  absl::StrCat("the launch id has ", join.launch().size(), " bytes, at most ",
                               kLaunchBytesMax, " are allowed"));
  }
  if (draining_ && join.attempt() == 0 && join.leave_attempt() == 0) {
    return refuse(absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_UNSPECIFIED,
                  absl::StrCat(nodes_.Name(kHere),
                               " is being drained, and lets no rank in; start it on another node, "
                               "or let ranks in again: ckptctl drain ",
                               nodes_.Name(kHere), " --undo"));
  }
  if (const absl::Status policy = CheckPolicy(join.policy()); !policy.ok()) {
    return refuse(policy.code(), v1::Failure::REASON_UNSPECIFIED, Message(policy));
  }
  KnownJob* job = FindJob(join.job());
  if (const Seat* seat = FindSeat(connection.seat)) {
    if (job == nullptr || seat->job != job->uuid || seat->rank != join.rank()) {
      return refuse(absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_UNSPECIFIED,
                    absl::StrCat("this connection is rank ", seat->rank, " of job '",
                                 JobName(seat->job), "'; open another one"));
    }
  }
  // (It keeps what is left of it, wherever it waits: a client that gave up would hear nothing.)
  const MonotonicTime deadline =
      until.value_or(join.deadline_ms() == 0 ? time_.now + kSettle : Deadline(join.deadline_ms()));
  if (clustered() && (job == nullptr || !Told(*job))) {
    if (job == nullptr && !MayOpenJob(connection.caller.uid) &&
        !ForgetAJob(connection.caller.uid)) {
      return refuse(
          absl::StatusCode::kResourceExhausted, v1::Failure::REASON_UNSPECIFIED,
          absl::StrCat("there are too many jobs on this node already (", kJobsMax, " a node, ",
                       kJobsPerUidMax, " a user); remove one that has ended: ckptctl rm <job>"));
    }
    if (job != nullptr && ReturnsByItself(*job, connection.caller, join)) {
      return ReturnByItself(*job, id, frame);
    }
    return WaitForHost(id, frame, deadline);
  }
  if (job == nullptr && (join.attempt() != 0 || join.leave_attempt() != 0)) {
    return refuse(absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_UNSPECIFIED,
                  absl::StrCat("this daemon knows no job '", join.job(),
                               "': its state was lost or it was removed; start the rank anew"));
  }
  const bool tiers_asked = until || (!HasTier(TierKind::kNvme) && !HasTier(TierKind::kRemote));
  if (job == nullptr && !tiers_asked) {
    return LookUp(id, frame, deadline);
  }
  if (job == nullptr && !MayOpenJob(connection.caller.uid) && !ForgetAJob(connection.caller.uid)) {
    return refuse(absl::StatusCode::kResourceExhausted, v1::Failure::REASON_UNSPECIFIED,
                  absl::StrCat("there are too many jobs already that run or have copies (",
                               kJobsMax, " a node, ", kJobsPerUidMax,
                               " a user); remove one that has ended: ckptctl rm <job>"));
  }
  if (const absl::Status sits = MaySit(connection.caller); !sits.ok()) {
    return refuse(sits.code(), v1::Failure::REASON_UNSPECIFIED, Message(sits));
  }
  if (job != nullptr && removals_.count(job->uuid) > 0) {
    return refuse(absl::StatusCode::kUnavailable, v1::Failure::REASON_UNSPECIFIED,
                  absl::StrCat("job '", join.job(), "' is being removed; try again"));
  }
  if (job == nullptr) {
    job = &OpenJob(join.job(), connection.caller.uid, connection.caller.gid);
  }
  const RequestToken token = NewPending(id, frame, deadline);
  pending_.at(token).job = job->uuid;
  Send(job->uuid, JoinAsked{token, id, connection.caller, join.rank(), join.world_size(),
                            join.launch(), join.attempt(), join.leave_attempt(),
                            join.deadline_ms() > 0, join.policy(), NewOpening()});
}

uint64_t Agent::NewOpening() {
  const JobUuid random = NewUuid();
  uint64_t opening = 0;
  for (const uint8_t byte : random.bytes) {
    opening = opening << 8 | byte;
  }
  return opening | 1;
}

absl::Status Agent::MaySit(const Caller& caller) const {
  const auto full = [](std::string_view whose, size_t max, std::string_view way_out) {
    return absl::ResourceExhaustedError(
        absl::StrCat(ToAbsl(whose), " ", max, " ranks on this node already; ", ToAbsl(way_out)));
  };
  if (seats_.OfProcess(caller.process).size() >= kSeatsPerProcessMax) {
    return full(absl::StrCat(caller.process.ToString(), " has"), kSeatsPerProcessMax,
                "close jobs that it is done with");
  }
  if (seats_.CountOfUid(caller.uid) >= kSeatsPerUidMax) {
    return full(absl::StrCat("uid ", caller.uid, " has"), kSeatsPerUidMax,
                "end processes that are done");
  }
  if (seats_.size() >= kSeatsMax) {
    return full("all users together have", kSeatsMax, "wait until others have ended");
  }
  return absl::OkStatus();
}

// Those that are being removed are as good as gone.
bool Agent::MayOpenJob(uint32_t uid) const {
  return jobs_.size() - removals_.size() < kJobsMax && JobsOf(uid) < kJobsPerUidMax;
}

size_t Agent::JobsOf(uint32_t uid) const {
  return static_cast<size_t>(std::count_if(jobs_.begin(), jobs_.end(), [&](const auto& j) {
    return j.second.uid == uid && removals_.count(j.first) == 0;
  }));
}

// Names of jobs that ended and left no copy are kept until their number is needed: of the user's,
// first those that never committed anything, then the longest ended.
bool Agent::ForgetAJob(uint32_t uid) {
  if (clustered()) {
    return ForgetElsewhere(uid) || (JobsOf(uid) < kJobsPerUidMax && ForgetElsewhere(std::nullopt));
  }
  const std::map<JobUuid, uint64_t> bytes = BytesByJob();
  std::optional<std::tuple<bool, int64_t, JobUuid>> oldest;
  for (const auto& [uuid, job] : jobs_) {
    const Coordinator* hosted = job.coordinator.get();
    if (job.uid != uid || removals_.count(uuid) > 0 || bytes.count(uuid) > 0 ||
        seats_.AnyOf(uuid) || drive_copies_.Any(uuid) || hosted == nullptr || !hosted->Idle() ||
        hosted->AnyDurable() || !hosted->AllInventoriesKnown()) {
      continue;
    }
    const std::tuple candidate(hosted->AnythingCommitted(), hosted->LastOpenedUnixMs(), uuid);
    oldest = oldest ? std::min(*oldest, candidate) : candidate;
  }
  if (!oldest) {
    return false;
  }
  RemoveJob(std::get<JobUuid>(*oldest), 0);
  return true;
}

KnownJob& Agent::AddJob(const JobUuid& uuid, const std::string& name, uint32_t uid, uint32_t gid) {
  names_.try_emplace(name, uuid);
  return jobs_.insert_or_assign(uuid, KnownJob{uuid, name, uid, gid}).first->second;
}

Coordinator& Agent::MakeCoordinator(KnownJob& job) {
  job.coordinator = std::make_unique<Coordinator>(Settings(), job.uuid, job.name, job.uid, job.gid,
                                                  first_session_);
  return *job.coordinator;
}

KnownJob& Agent::OpenJob(const std::string& name, uint32_t uid, uint32_t gid) {
  KnownJob& job = AddJob(NewUuid(), name, uid, gid);
  // Nothing of it lies anywhere: its name was looked up before.
  MakeCoordinator(job).SetOpenedHere();
  remote_known_.insert(job.uuid);
  TellInventory(job.uuid, TierKind::kNvme);  // (in a cluster: when the job is met)
  TellInventory(job.uuid, TierKind::kRemote);
  return job;
}

JobUuid Agent::NewUuid() {
  JobUuid uuid;
  do {
    for (size_t i = 0; i < uuid.bytes.size(); i += 8) {
      // splitmix64
      uint64_t z = (random_ += 0x9e3779b97f4a7c15u);
      z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
      z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
      z ^= z >> 31;
      for (size_t byte = 0; byte < 8; ++byte) {
        uuid.bytes[i + byte] = static_cast<uint8_t>(z >> (8 * byte));
      }
    }
    uuid.bytes[6] = static_cast<uint8_t>((uuid.bytes[6] & 0x0f) | 0x40);
    uuid.bytes[8] = static_cast<uint8_t>((uuid.bytes[8] & 0x3f) | 0x80);
  } while (jobs_.count(uuid) > 0);
  return uuid;
}

void Agent::OnLeave(ConnectionId id, Connection& connection, const v1::ClientFrame& frame) {
  if (const Seat* found = FindSeat(connection.seat)) {
    const Seat seat = *found;
    for (auto& [slot_id, slot] : slots_) {
      if (slot.owned && slot.job == seat.job && slot.rank == seat.rank &&
          slot.writer == seat.process) {
        ReleaseWriter(slot, absl::StrCat("rank ", seat.rank, " left"));
        if (slot.state != SlotState::kDeleting) {
          NoteSlot(slot);
        }
      }
    }
    Send(seat.job, SeatLost{seat.attempt, seat.rank, seat.process, id, SeatLost::How::kLeft});
    EraseSeat(connection.seat, SeatEnd::kLeft);
    connection.seat = 0;
    // A rank that has left waits for nothing.
    const std::set<RequestToken> waiting = connection.pending;
    for (const RequestToken token : waiting) {
      const Pending& pending = pending_.at(token);
      if (pending.where == Where::kCoordinator || pending.where == Where::kAsking) {
        Send(pending.job, RequestCancelled{token});
      }
      Refuse(token, {absl::StatusCode::kCancelled, v1::Failure::REASON_UNSPECIFIED,
                     absl::StrCat("rank ", seat.rank, " has left")});
    }
  }
  ReplyDone(id, frame);
}

void Agent::Take(const JobUuid& job, const ToAgent& message, EventTime time) {
  time_ = time;
  std::visit([&](const auto& m) { TakeMessage(job, m); }, message);
}

void Agent::Take(const JobUuid& job, const std::vector<ForAgent>& messages, EventTime time) {
  for (const ForAgent& each : messages) {
    Take(job, each.message, time);
  }
}

void Agent::TakeMessage(const JobUuid&, const Refused& m) {
  cancelled_joins_.erase(m.token);
  if (const auto wait = admin_waits_.find(m.token); wait != admin_waits_.end()) {
    const AdminToken token = wait->second.token;
    deadlines_.erase({*wait->second.deadline, m.token});
    admin_waits_.erase(wait);
    return RefuseAdmin(token, absl::Status(m.failure.code, ToAbsl(m.failure.message)));
  }
  Refuse(m.token, m.failure);
}

void Agent::TakeMessage(const JobUuid& job, const JoinAccepted& m) {
  Pending* pending = FindPending(m.token);
  if (pending == nullptr || pending->kind != v1::ClientFrame::kJoin) {
    return TakeCancelled(m);
  }
  Connection& connection = connections_.at(pending->connection);
  const ProcessId process = connection.caller.process;
  // The same process had the rank before, over this or a lost connection: one seat is enough.
  std::vector<SeatId> old;
  for (const SeatId id : seats_.OfRank(job, m.rank)) {
    const Seat& seat = *seats_.Find(id);
    if (seat.process == process &&
        (seat.connection == 0 || seat.connection == pending->connection)) {
      old.push_back(id);
    }
  }
  // What waits in the old seat's name would find nobody to give it to.
  std::vector<RequestToken> orphaned;
  for (const auto& [token, waiting] : pending_) {
    if (old.empty()) {
      break;
    }
    const bool by_seat = waiting.where == Where::kSlot || waiting.where == Where::kRoom ||
                         waiting.where == Where::kAsking || waiting.where == Where::kStanding;
    if (by_seat && std::find(old.begin(), old.end(), waiting.seat) != old.end()) {
      orphaned.push_back(token);
    }
  }
  for (const RequestToken token : orphaned) {
    const Failure failure{absl::StatusCode::kAborted, v1::Failure::REASON_UNSPECIFIED,
                          "the rank has joined again since"};
    pending_.at(token).kind == v1::ClientFrame::kBeginSave ? RefuseSave(token, failure)
                                                           : Refuse(token, failure);
  }
  Ref(process);
  Seat seat{
      job,   m.attempt,  m.rank, m.world_size, process, connection.caller.uid, pending->connection,
      false, m.last_step};
  seat.passed = pending->passed;
  connection.seat = SeatRank(seat);
  for (const SeatId id : old) {
    EraseSeat(id, SeatEnd::kJoinedAgain);
  }
  Reclaim(*FindSeat(connection.seat));

  v1::DaemonFrame frame;
  v1::JoinReply& reply = *frame.mutable_join();
  reply.set_job_uuid(job.ToBytes());
  reply.set_attempt(m.attempt);
  reply.set_decided(m.decided);
  AddDescent(m.descent, reply.mutable_descent());
  if (m.last_step) {
    reply.set_any_step(true);
    reply.set_last_step(*m.last_step);
  }
  Reply(m.token, std::move(frame));
}

void Agent::NoteCancelled(RequestToken token, const Pending& pending, const Caller& caller) {
  if (!clustered() || pending.kind != v1::ClientFrame::kJoin) {
    return;  // (where the host is this node's own, it hears that at once)
  }
  cancelled_joins_[token] = {pending.job, caller.process, caller.uid, pending.connection};
  if (cancelled_joins_.size() > kCancelledJoinsMax) {
    cancelled_joins_.erase(cancelled_joins_.begin());
  }
}

// The host believes that the rank is there. Its process may have ended long ago, and nobody else
// would ever say so.
void Agent::TakeCancelled(const JoinAccepted& m) {
  const auto found = cancelled_joins_.find(m.token);
  if (found == cancelled_joins_.end()) {
    return;
  }
  const CancelledJoin join = found->second;
  cancelled_joins_.erase(found);
  const std::set<SeatId>& seats = seats_.OfRank(join.job, m.rank);
  const bool there = std::any_of(seats.begin(), seats.end(), [&](SeatId id) {
    return seats_.Find(id)->process == join.process && seats_.Find(id)->attempt >= m.attempt;
  });
  if (there) {
    return;  // it has asked again since, over another connection
  }
  Ref(join.process);  // reported at once if it ended meanwhile
  SeatRank(
      {join.job, m.attempt, m.rank, m.world_size, join.process, join.uid, 0, false, m.last_step});
  Send(join.job,
       SeatLost{m.attempt, m.rank, join.process, join.connection, SeatLost::How::kDisconnected});
}

void Agent::TakeMessage(const JobUuid&, const SavePermitted& m) {
  Pending* pending = FindPending(m.token);
  if (pending == nullptr || pending->kind != v1::ClientFrame::kBeginSave ||
      pending->where != Where::kCoordinator) {
    return;  // it has been told before
  }
  seats_.SetLine(pending->seat, m.descent);
  TakePermission(m.token, m.descent);
}

void Agent::TakePermission(RequestToken token, std::vector<Descent> line) {
  Pending& pending = pending_.at(token);
  seats_.SetLastBegun(pending.seat, pending.step);
  pending.descent = std::move(line);
  pending.where = Where::kRoom;
  waiting_for_room_.insert(token);
  Place(token);
}

void Agent::TakeMessage(const JobUuid& job, const RoomAnswered& m) {
  Pending* pending = FindPending(m.token);
  if (pending == nullptr || pending->where != Where::kAsking || pending->asking.job != job) {
    return;
  }
  pending->where = Where::kRoom;
  if (!m.made) {
    pending->asked.insert(pending->asking);
  }
  // (If nothing was given up for it: what went for other reasons while it asked may be enough.)
  pending->fetch ? PlaceFetch(m.token) : Place(m.token);
}

void Agent::TakeMessage(const JobUuid&, const StageReached& m) {
  v1::DaemonFrame frame;
  frame.mutable_await_save()->set_stage(m.stage);
  frame.mutable_await_save()->set_unix_ms(m.unix_ms);
  Reply(m.token, std::move(frame));
}

void Agent::TakeMessage(const JobUuid& job, const SourceOffered& m) {
  Pending* pending = FindPending(m.token);
  if (pending == nullptr || pending->where != Where::kCoordinator) {
    return;
  }
  Slot* slot = FindSealed({job, m.checkpoint.attempt, m.checkpoint.step, m.rank});
  pending->fetch.reset();
  pending->source_tier = TierKind::kMemory;
  pending->source_why = m.why;
  if (m.from != TierKind::kMemory && (slot == nullptr || slot->bad)) {
    pending->source_tier = m.from;
    return FetchSource(m.token, m);
  }
  if (slot == nullptr) {
    // The host counts on what is not here (it was told of it while it gave it up): it learns, and
    // names the rank's next source, or another step for all.
    return Send(job,
                FetchFailed{m.token, m.attempt, m.rank, m.session, m.round, m.checkpoint,
                            TierKind::kMemory, absl::NotFoundError("its copy is gone"), false});
  }
  pending->fetch = m;
  OfferSession(m.token, *slot);
}

// The slot holds the source that the request's session named.
void Agent::OfferSession(RequestToken token, Slot& slot) {
  Adopt(slot);
  const SourceOffered source = *std::exchange(pending_.at(token).fetch, std::nullopt);
  v1::DaemonFrame frame;
  v1::SessionOutcome& outcome = *frame.mutable_enter_session();
  outcome.set_session(source.session);
  outcome.set_round(source.round);
  outcome.set_attempt(source.checkpoint.attempt);
  outcome.set_step(source.checkpoint.step);
  Offer(token, slot, std::move(frame));
}

void Agent::TakeMessage(const JobUuid&, const StepOffered& m) {
  v1::DaemonFrame frame;
  v1::SessionOutcome& outcome = *frame.mutable_enter_session();
  outcome.set_session(m.session);
  outcome.set_round(m.round);
  outcome.set_attempt(m.checkpoint.attempt);
  outcome.set_step(m.checkpoint.step);
  outcome.set_reshard(m.world_size);
  Reply(m.token, std::move(frame));
}

void Agent::TakeMessage(const JobUuid&, const SessionEnded& m) {
  if (const Pending* pending = FindPending(m.token)) {
    seats_.SetLine(pending->seat, m.descent);
  }
  v1::DaemonFrame frame;
  v1::SessionOutcome& outcome = *frame.mutable_enter_session();
  outcome.set_session(m.session);
  outcome.set_round(m.round);
  outcome.set_done(true);
  outcome.set_attempt(m.checkpoint.attempt);
  outcome.set_step(m.checkpoint.step);
  AddDescent(m.descent, outcome.mutable_descent());
  outcome.set_passed_over(m.passed_over);
  Reply(m.token, std::move(frame));
}

void Agent::TakeMessage(const JobUuid& job, const GiveUp& m) {
  GiveUpSlots(job, m, false);
}

// All shards of the checkpoint go; its writers are told when they seal, at the latest. What is kept
// for other nodes goes by RemovalWanted.
void Agent::GiveUpSlots(const JobUuid& job, const GiveUp& m, bool replicas_too) {
  const ShardId first{job, m.checkpoint.attempt, m.checkpoint.step, 0};
  std::vector<SlotId> affected;
  for (auto it = shards_.lower_bound(first);
       it != shards_.end() && it->first.job == job && it->first.checkpoint() == m.checkpoint;
       ++it) {
    affected.push_back(it->second);
  }
  for (const SlotId id : affected) {
    Slot& slot = slots_.at(id);
    if (slot.lent && !replicas_too) {
      continue;
    }
    if (slot.state == SlotState::kSealed) {
      CancelDrainsOf(slot);
      Unpublish(slot);
      continue;
    }
    slot.lost = m.failure;
    ForgetShard(slot);
    if (slot.state == SlotState::kNoting) {
      Refuse(std::exchange(slot.token, 0), m.failure);
    }
  }
  // What is being brought into memory of it is of no use any more.
  std::vector<ShardId> ahead;
  for (const auto& [shard, prefetch] : prefetches_) {
    if (shard.job == job && shard.checkpoint() == m.checkpoint && !prefetch.slot) {
      ahead.push_back(shard);
    }
  }
  for (const ShardId& shard : ahead) {
    EndPrefetch(shard, absl::AbortedError(ToAbsl(m.failure.message)));
  }
  for (auto& [shard, fetch] : fetches_) {
    const bool kept = slots_.at(fetch.slot).lent && !replicas_too;
    if (shard.job == job && shard.checkpoint() == m.checkpoint && !kept) {
      slots_.at(fetch.slot).lost = m.failure;
      if (fetch.drain != 0) {
        Act(CancelDrain{fetch.drain});
      }
    }
  }
  // Nor does a save of it wait any longer, for room or for the word that it may begin.
  std::vector<RequestToken> over;
  for (const auto& [token, pending] : pending_) {
    const Seat* seat = pending.kind == v1::ClientFrame::kBeginSave &&
                               pending.where != Where::kSlot && pending.job == job &&
                               pending.step == m.checkpoint.step
                           ? FindSeat(pending.seat)
                           : nullptr;
    if (seat != nullptr && seat->attempt == m.checkpoint.attempt) {
      over.push_back(token);
    }
  }
  for (const RequestToken token : over) {
    Refuse(token, m.failure);
  }
}

void Agent::TakeMessage(const JobUuid& job, const Superseded& m) {
  const Failure failure{absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_SUPERSEDED,
                        absl::StrCat("job '", JobName(job), "' has a newer attempt, ", m.by,
                                     "; this process should end")};
  seats_.Supersede(job, m.by);
  EndStopBelow(job, m.by, failure);
  const std::set<RequestToken> waiting = waiting_for_room_;
  for (const RequestToken token : waiting) {
    const Seat* seat = FindSeat(pending_.at(token).seat);
    if (seat == nullptr || (seat->job == job && seat->superseded)) {
      Refuse(token, failure);
    }
  }
  // Nobody is let into a slot for it any more.
  for (auto& [id, slot] : slots_) {
    const Pending* pending =
        slot.state == SlotState::kNoting && !slot.lost ? FindPending(slot.token) : nullptr;
    if (pending == nullptr || pending->kind != v1::ClientFrame::kBeginSave) {
      continue;
    }
    const Seat* seat = FindSeat(pending->seat);
    if (seat == nullptr || (seat->job == job && seat->superseded)) {
      slot.lost = failure;
      ForgetShard(slot);
      Refuse(std::exchange(slot.token, 0), failure);
    }
  }
  slots_changed_ = true;
}

void Agent::TakeMessage(const JobUuid& job, const CopyUnneeded& m) {
  if (Slot* slot = FindSealed({job, m.checkpoint.attempt, m.checkpoint.step, m.rank})) {
    CancelDrainsOf(*slot);
    Unpublish(*slot);
    slots_changed_ = true;
  }
}

void Agent::TakeMessage(const JobUuid& job, const CopyDoubted& m) {
  if (Slot* slot = FindSealed({job, m.checkpoint.attempt, m.checkpoint.step, m.rank})) {
    slot->bad = true;
  }
}

void Agent::TakeMessage(const JobUuid& job, const PersistState& m) {
  if (const auto known = jobs_.find(job); clustered() && known != jobs_.end()) {
    known->second.state = m.state;
  }
  Act(WriteJobState{m.state, m.on_disk});
}

void Agent::TakeMessage(const JobUuid&, const RestorePointSet& m) {
  const auto wait = admin_waits_.find(m.token);
  if (wait == admin_waits_.end()) {
    return;
  }
  v1::SetRestorePointReply reply;
  reply.set_text(m.text);
  Act(AdminReply{wait->second.token, absl::OkStatus(), std::move(reply)});
  deadlines_.erase({*wait->second.deadline, m.token});
  admin_waits_.erase(wait);
}

void Agent::TakeMessage(const JobUuid&, const Reported& m) {
  Act(m.report);
}

}  // namespace holdfast
