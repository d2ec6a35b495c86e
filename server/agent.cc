// Connections, processes, requests and their deadlines.
#include "server/agent.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast {
namespace {

Failure NotJoined() {
  return {
      absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_UNKNOWN_SESSION,
      "this connection has not joined a job here (the daemon may have been restarted): join first"};
}

}  // namespace

Agent::Agent(const v1::DaemonConfig& config, std::string node_name, uint64_t seed,
             uint32_t daemon_uid)
    : config_(config), nodes_(std::move(node_name)), daemon_uid_(daemon_uid), random_(seed) {}

void Agent::Handle(const Event& event, EventTime time) {
  time_ = time;
  struct Visitor {
    Agent& agent;
    void operator()(const Started& e) { agent.Start(e, agent.time_); }
    void operator()(const ConnectionOpened& e) { agent.OnConnectionOpened(e); }
    void operator()(const ClientRequest& e) { agent.OnRequest(e); }
    void operator()(const ConnectionClosed& e) { agent.OnConnectionClosed(e.connection); }
    void operator()(const ProcessEnded& e) { agent.OnProcessEnded(e.process); }
    void operator()(const SlotCreated& e) { agent.OnSlotCreated(e); }
    void operator()(const SlotPopulated& e) { agent.OnSlotPopulated(e); }
    void operator()(const NoteWritten& e) { agent.OnNoteWritten(e); }
    void operator()(const RecordPublished& e) { agent.OnRecordPublished(e); }
    void operator()(const RecordRemoved& e) { agent.OnRecordRemoved(e); }
    void operator()(const SlotDeleted& e) { agent.OnSlotDeleted(e); }
    void operator()(const JobStateWritten& e) {
      if (agent.Hosted(e.job) != nullptr) {
        agent.Send(e.job, StateWritten{e.version, e.status});
      } else if (!e.status.ok() && agent.jobs_.count(e.job) > 0) {
        agent.states_again_[e.job] = agent.time_.now + kStateRetry;
      }
    }
    void operator()(const JobStateRemoved& e) { agent.OnJobStateRemoved(e); }
    void operator()(const SettingsChanged& e) { agent.OnSettingsChanged(e); }
    void operator()(const CopyFoundBad& e) { agent.OnCopyFoundBad(e); }
    void operator()(const DurableCopyJudged& e) {
      if (agent.jobs_.count(e.id.job) == 0) {
        return;
      }
      agent.NoteBad(e.id, e.tier, !e.what.empty());
      if (e.what.empty()) {
        agent.Send(e.id.job, ShardGood{e.id.checkpoint(), e.id.rank, e.tier});
      } else {
        agent.Send(e.id.job, ShardBad{e.id.checkpoint(), e.id.rank, e.what, e.tier, {}, e.leave});
      }
    }
    void operator()(const SlotFileGone& e) { agent.OnSlotFileGone(e); }
    void operator()(const CopyFoundGood& e) { agent.OnCopyFoundGood(e); }
    void operator()(const HandOverFailed& e) { agent.OnHandOverFailed(e); }
    void operator()(const AdminRequest& e) { agent.OnAdminRequest(e); }
    void operator()(const AdminReadDone& e) { agent.OnAdminReadDone(e); }
    void operator()(const FlushEnded& e) { agent.OnFlushEnded(e); }
    void operator()(const FetchEnded& e) { agent.OnFetchEnded(e); }
    void operator()(const DurableOpened& e) { agent.OnDurableOpened(e); }
    void operator()(const PartsRead& e) { agent.OnPartsRead(e); }
    void operator()(const RecordsGathered& e) { agent.OnRecordsGathered(e); }
    void operator()(const DrainStalled& e) { agent.OnDrainStalled(e); }
    void operator()(const ManifestPublished& e) { agent.OnManifestPublished(e); }
    void operator()(const CopiesRemoved& e) { agent.OnCopiesRemoved(e); }
    void operator()(const TierAway& e) { agent.OnTierAway(e); }
    void operator()(const TierScanned& e) { agent.OnTierScanned(e); }
    void operator()(const TimerFired&) { agent.Expire(agent.time_); }
    void operator()(const ReadForPeer&) {}
    void operator()(const MembershipTold&) {}  // not the agent's to know
    void operator()(const PeerTold&) {}
  };
  std::visit(Visitor{*this}, event);
}

void Agent::OnConnectionOpened(const ConnectionOpened& e) {
  if (connections_.emplace(e.connection, Connection{e.caller, 0, {}}).second) {
    Ref(e.caller.process);
  }
}

void Agent::OnConnectionClosed(ConnectionId id) {
  const auto it = connections_.find(id);
  if (it == connections_.end()) {
    return;
  }
  const Connection connection = std::move(it->second);
  connections_.erase(it);
  // 1. Nobody hears the answers any more.
  for (const RequestToken token : connection.pending) {
    const Pending pending = pending_.at(token);
    ErasePending(token);
    for (auto& [shard, fetch] : fetches_) {
      fetch.waiting.erase(token);
    }
    for (auto& [gather, gathering] : gatherings_) {
      gathering.waiting.erase(token);
    }
    if (pending.where == Where::kCoordinator || pending.where == Where::kAsking) {
      NoteCancelled(token, pending, connection.caller);
      Send(pending.job, RequestCancelled{token});
    }
    if (pending.where == Where::kOpening) {
      Act(CancelDrain{pending.attach->opening});
    }
    if (pending.kind == v1::ClientFrame::kBeginSave) {
      if (const Seat* seat = FindSeat(pending.seat)) {
        Send(seat->job, SaveLost{seat->attempt, seat->rank, pending.step,
                                 absl::StrCat("rank ", seat->rank, " (", seat->process.ToString(),
                                              ") closed its connection")});
      }
    }
  }
  EndPartsOf(id);
  // 2. What it was writing is lost; the process may go on writing into the slot, so nobody else
  // gets that.
  for (auto& [slot_id, slot] : slots_) {
    if (slot.filled_by != id ||
        (slot.state != SlotState::kNoting && slot.state != SlotState::kWriting)) {
      continue;
    }
    const std::string why =
        absl::StrCat("rank ", slot.shard.rank, " (", connection.caller.process.ToString(),
                     ") closed its connection while writing");
    LoseFilling(slot, why);
    slot.token = 0;
    if (slot.state == SlotState::kWriting) {
      Quarantine(slot, why);
    }
  }
  // 3. Its seat is kept for its process.
  if (const Seat* seat = FindSeat(connection.seat)) {
    seats_.Disconnect(connection.seat);
    Send(seat->job,
         SeatLost{seat->attempt, seat->rank, seat->process, id, SeatLost::How::kDisconnected});
  }
  Unref(connection.caller.process);
}

void Agent::OnProcessEnded(ProcessId process) {
  // A descriptor of its connection may live on in a child; the process itself is gone, and that is
  // what counts.
  std::vector<ConnectionId> open;
  for (const auto& [id, connection] : connections_) {
    if (connection.caller.process == process) {
      open.push_back(id);
    }
  }
  const std::string why = absl::StrCat(process.ToString(), " ended");
  for (auto& [id, slot] : slots_) {
    if (slot.writer == process) {
      ReleaseWriter(slot, absl::StrCat("rank ", slot.shard.rank, " (", process.ToString(),
                                       ") ended while writing"));
    }
  }
  for (const ConnectionId id : open) {
    Act(CloseConnection{id, why});
    OnConnectionClosed(id);
  }
  const std::set<SeatId> seats = seats_.OfProcess(process);
  for (const SeatId id : seats) {
    const Seat seat = *seats_.Find(id);
    Send(seat.job, SeatLost{seat.attempt, seat.rank, process, 0, SeatLost::How::kProcessEnded});
    EraseSeat(id, SeatEnd::kProcessEnded);
  }
  for (auto& [id, slot] : slots_) {
    const size_t ended =
        std::erase_if(slot.readers, [&](const ReadHold& hold) { return hold.process == process; });
    for (size_t i = 0; i < ended; ++i) {
      Unref(process);
    }
    if (ended > 0) {
      AfterHold(slot);
    }
  }
  processes_.erase(process);
}

void Agent::OnRequest(const ClientRequest& e) {
  const auto it = connections_.find(e.connection);
  if (it == connections_.end()) {
    return;
  }
  const uint32_t max = config_.socket().requests_per_connection_max();
  if (max > 0 && it->second.pending.size() >= max) {
    return RefuseNow(
        e.connection, e.frame.id(),
        {absl::StatusCode::kResourceExhausted, v1::Failure::REASON_UNSPECIFIED,
         absl::StrCat(
             max,
             " requests of this connection are unanswered (socket.requests_per_connection_max)")});
  }
  Dispatch(e.connection, it->second, e.frame);
}

void Agent::Dispatch(ConnectionId id, Connection& connection, const v1::ClientFrame& frame) {
  using Frame = v1::ClientFrame;
  switch (frame.request_case()) {
    case Frame::kJoin:
      return OnJoin(id, connection, frame);
    case Frame::kLeave:
      return OnLeave(id, connection, frame);
    case Frame::kAttach:
      return OnAttach(id, frame);
    case Frame::kList:
      return OnList(id, frame);
    case Frame::kConfirmRead:
      return OnConfirmRead(id, connection.caller, frame);
    case Frame::kReleaseRead:
      return OnReleaseRead(id, connection.caller, frame);
    case Frame::kReadParts:
      return OnReadParts(id, frame);
    case Frame::kReadRecords:
      return OnReadRecords(id, frame);
    case Frame::kReleaseSlots:
      return OnReleaseSlots(id, connection.caller, frame);
    case Frame::kHello:
    case Frame::REQUEST_NOT_SET:
      return RefuseNow(id, frame.id(),
                       {absl::StatusCode::kInvalidArgument, v1::Failure::REASON_UNSPECIFIED,
                        "the frame holds no request known here"});
    default:
      break;
  }
  const Seat* seat = FindSeat(connection.seat);
  if (seat == nullptr) {
    return RefuseNow(id, frame.id(), NotJoined());
  }
  if (frame.request_case() == Frame::kAbortSave) {
    return OnAbortSave(id, *seat, frame);
  }
  if (frame.request_case() == Frame::kSeal) {
    return OnSeal(id, *seat, frame);
  }
  if (seat->superseded) {
    return RefuseNow(id, frame.id(),
                     {absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_SUPERSEDED,
                      absl::StrCat("attempt ", seat->attempt, " of job '", JobName(seat->job),
                                   "' was superseded by a newer one; this process should end")});
  }
  switch (frame.request_case()) {
    case Frame::kReserve:
      return OnReserve(id, *seat, connection.seat, frame);
    case Frame::kBeginSave:
      return OnBeginSave(id, *seat, connection.seat, frame);
    case Frame::kEnterSession:
      return OnEnterSession(id, *seat, connection.seat, frame);
    case Frame::kReportLoad:
      return OnReportLoad(id, *seat, connection.seat, frame);
    case Frame::kReachStep:
      return OnReachStep(id, *seat, connection.seat, frame);
    default: {
      // (Who does not wait, and says so by a millisecond, takes a daemon that is silent for a tenth
      // of a second for one that hangs.)
      const bool elsewhere = clustered() && Hosted(seat->job) == nullptr;
      const MonotonicTime asked = Deadline(frame.await_save().deadline_ms());
      const MonotonicTime soonest = time_.now + kHostAtOnce;
      const bool at_once = elsewhere && asked < soonest;
      const RequestToken token = NewPending(id, frame, at_once ? soonest : asked);
      Pending& pending = pending_.at(token);
      pending.at_once = at_once;
      pending.job = seat->job;
      pending.seat = connection.seat;
      Send(seat->job, AwaitAsked{token, seat->attempt, seat->rank, frame.await_save().step(),
                                 frame.await_save().stage()});
    }
  }
}

RequestToken Agent::NewPending(ConnectionId connection, const v1::ClientFrame& frame,
                               std::optional<MonotonicTime> deadline) {
  const RequestToken token = next_token_++;
  Pending pending;
  pending.connection = connection;
  pending.frame_id = frame.id();
  pending.kind = frame.request_case();
  if (frame.join().has_passed_step()) {
    pending.passed = frame.join().passed_step();
  }
  pending_.emplace(token, std::move(pending));
  connections_.at(connection).pending.insert(token);
  SetDeadline(token, deadline);
  return token;
}

void Agent::SetDeadline(RequestToken token, std::optional<MonotonicTime> deadline) {
  Pending& pending = pending_.at(token);
  if (pending.deadline) {
    deadlines_.erase({*pending.deadline, token});
  }
  pending.deadline = deadline;
  if (deadline) {
    deadlines_.insert({*deadline, token});
  }
}

Agent::Pending* Agent::FindPending(RequestToken token) {
  const auto it = pending_.find(token);
  return it == pending_.end() ? nullptr : &it->second;
}

void Agent::ErasePending(RequestToken token) {
  const auto it = pending_.find(token);
  if (it == pending_.end()) {
    return;
  }
  if (it->second.deadline) {
    deadlines_.erase({*it->second.deadline, token});
  }
  if (const auto connection = connections_.find(it->second.connection);
      connection != connections_.end()) {
    connection->second.pending.erase(token);
  }
  waiting_for_room_.erase(token);
  pending_.erase(it);
}

void Agent::Reply(RequestToken token, v1::DaemonFrame frame, Descriptors descriptors,
                  const Slot* slot) {
  const Pending* pending = FindPending(token);
  if (pending == nullptr) {
    return;
  }
  frame.set_id(pending->frame_id);
  SendReply reply{pending->connection, std::move(frame), descriptors, 0, 0};
  if (slot != nullptr) {
    reply.slot = slot->id;
    reply.generation = slot->generation;
    reply.hold = {connections_.at(pending->connection).caller.process, pending->hold};
    reply.attach = pending->attach ? pending->request : nullptr;
  }
  Act(std::move(reply));
  ErasePending(token);
}

void Agent::Refuse(RequestToken token, const Failure& failure) {
  if (const Pending* pending = FindPending(token)) {
    RefuseNow(pending->connection, pending->frame_id, failure);
    ErasePending(token);
  }
}

void Agent::RefuseNow(ConnectionId connection, uint64_t frame_id, const Failure& failure) {
  v1::DaemonFrame frame;
  frame.set_id(frame_id);
  frame.mutable_failure()->set_code(static_cast<int32_t>(failure.code));
  frame.mutable_failure()->set_reason(failure.reason);
  frame.mutable_failure()->set_message(failure.message.substr(0, 4096));
  Act(SendReply{connection, std::move(frame), Descriptors::kNone, 0, 0});
}

void Agent::ReplyDone(ConnectionId connection, const v1::ClientFrame& frame) {
  v1::DaemonFrame reply;
  reply.set_id(frame.id());
  switch (frame.request_case()) {
    case v1::ClientFrame::kAbortSave:
      reply.mutable_abort_save();
      break;
    case v1::ClientFrame::kConfirmRead:
      reply.mutable_confirm_read();
      break;
    case v1::ClientFrame::kReleaseRead:
      reply.mutable_release_read();
      break;
    case v1::ClientFrame::kReleaseSlots:
      reply.mutable_release_slots();
      break;
    default:
      reply.mutable_leave();
  }
  Act(SendReply{connection, std::move(reply), Descriptors::kNone, 0, 0});
}

// Answers every request whose deadline has come, and what the agent itself put off.
void Agent::Expire(EventTime time) {
  time_ = time;
  while (!deadlines_.empty() && deadlines_.begin()->first <= time.now) {
    const RequestToken token = deadlines_.begin()->second;
    if (admin_waits_.count(token) > 0) {
      deadlines_.erase(deadlines_.begin());
      const AdminWait wait = admin_waits_.at(token);
      admin_waits_.erase(token);
      Send(wait.job, RequestCancelled{token});
      RefuseAdmin(wait.token, absl::UnavailableError(
                                  "the job's state could not be written in time; ask again"));
      continue;
    }
    ExpireRequest(token);
  }
  while (!deletes_again_.empty() && deletes_again_.begin()->first <= time.now) {
    Act(DeleteSlot{deletes_again_.begin()->second});
    deletes_again_.erase(deletes_again_.begin());
  }
  ExpirePrefetches();
  ExpireLoads();
  if (room_again_ && *room_again_ <= time.now) {
    room_again_.reset();
    slots_changed_ = true;
  }
  if (drives_again_ && *drives_again_ <= time.now) {
    drives_again_.reset();
    std::vector<std::string> failed;
    for (const auto& [dir, drive] : drives_) {
      if (!drive.problem.empty() || !drive.hidden.empty()) {
        failed.push_back(dir);
      }
    }
    if (!failed.empty()) {
      ScanDrives(std::move(failed));
    }
  }
  std::vector<std::string> rescans;
  for (const auto& [name, at] : rescan_at_) {
    if (at <= time.now) {
      rescans.push_back(name);
    }
  }
  for (const std::string& name : rescans) {
    rescan_at_.erase(name);
    if (const KnownJob* job = FindJob(name); job != nullptr && job->coordinator != nullptr) {
      ScanRemoteFor(name);
    } else if (hosting_.count(name) > 0) {
      LookUpHosted(name);
    }
  }
  WriteAgain();
  RetryRemovals();
}

void Agent::ExpireRequest(RequestToken token) {
  Pending& pending = pending_.at(token);
  SetDeadline(token, std::nullopt);  // whoever owns the request answers it now
  Failure late{absl::StatusCode::kDeadlineExceeded, v1::Failure::REASON_UNSPECIFIED,
               "the daemon could not write what it must note first in time; try again"};
  switch (pending.where) {
    case Where::kCoordinator:
      if (pending.kind == v1::ClientFrame::kBeginSave) {
        Send(pending.job, RequestCancelled{token});
        late.code = absl::StatusCode::kUnavailable;
        return RefuseSave(token, late);
      }
      if (clustered() && Hosted(pending.job) == nullptr && pending.overdue) {
        NoteCancelled(token, pending, connections_.at(pending.connection).caller);
        Send(pending.job, RequestCancelled{token});
        late.code = absl::StatusCode::kUnavailable;
        late.message = absl::StrCat("the node that hosts job '", JobName(pending.job),
                                    "' does not answer; try again");
        return Refuse(token, late);
      }
      if (clustered() && Hosted(pending.job) == nullptr && pending.at_once) {
        Send(pending.job, RequestCancelled{token});
        late.reason = v1::Failure::REASON_NOT_YET;
        late.message = "not as far as this node knows yet";
        return Refuse(token, late);
      }
      Send(pending.job, RequestExpired{token});
      if (clustered() && Hosted(pending.job) == nullptr) {
        // (The client itself gives up a tenth of a second later, and would take this daemon for one
        // that hangs.)
        pending.overdue = true;
        SetDeadline(token, time_.now + kHostGrace);
      }
      return;
    case Where::kHost:
      return Refuse(token, NotHosted(*pending.request));
    case Where::kLookup:
      late.message = "the durable tiers, which may know the job, have not been read yet; try again";
      return Refuse(token, late);
    case Where::kOpening:
      return GiveUpOpening(token, "it takes long");
    case Where::kParts:
      return GiveUpParts(token);
    case Where::kRecords:
      return GiveUpRecords(token);
    case Where::kStanding:
      return AnswerReached(token);  // it goes on
    case Where::kFetch:
      for (auto& [shard, fetch] : fetches_) {
        fetch.waiting.erase(token);  // it goes on: whoever asks again finds it in memory
      }
      late.message = "the shard is still being brought into memory; restore again";
      return Refuse(token, late);
    case Where::kRoom:
    case Where::kAsking:
      if (pending.where == Where::kAsking) {
        Send(pending.job, RequestCancelled{token});
      }
      if (pending.fetch) {
        const Seat* reader = FindSeat(pending.seat);
        late.message = reader == nullptr ? "the rank has joined again since"
                                         : NoRoom(pending, *reader).message + "; restore again";
        return Refuse(token, late);
      }
      if (const Seat* seat = FindSeat(pending.seat)) {
        return RefuseSave(token, NoRoom(pending, *seat));
      }
      return Refuse(token, late);
    case Where::kSlot:
      if (pending.fetch) {
        const Seat* reader = FindSeat(pending.seat);
        late.message = reader == nullptr ? "the rank has joined again since"
                                         : NoRoom(pending, *reader).message + "; restore again";
        return Refuse(token, late);
      }
      for (auto& [id, slot] : slots_) {
        if (slot.token == token) {
          slot.token = 0;
          if (Filling(slot.state)) {
            LoseFilling(slot, absl::StrCat("rank ", slot.shard.rank, " waited past its deadline"));
          }
        }
      }
      return RefuseSave(token, late);
    case Where::kSource:
      return Refuse(token, late);  // the hold goes when the note has been written
    case Where::kReserve:
      pending.may_wait = false;
      pending.expired = true;
      return PlaceReserve(token);
    case Where::kHanding:
      return AnswerReserve(token,
                           nullptr);  // the slot is free again when its note has been written
  }
}

std::optional<MonotonicTime> Agent::NextDeadline() const {
  std::optional<MonotonicTime> next;
  if (!deadlines_.empty()) {
    next = deadlines_.begin()->first;
  }
  if (!deletes_again_.empty()) {
    const MonotonicTime again = deletes_again_.begin()->first;
    next = next ? std::min(*next, again) : again;
  }
  for (const auto& [name, at] : rescan_at_) {
    next = next ? std::min(*next, at) : at;
  }
  for (const std::optional<MonotonicTime>& again : {drives_again_, room_again_}) {
    if (again) {
      next = next ? std::min(*next, *again) : *again;
    }
  }
  for (const auto& [job, at] : states_again_) {
    next = next ? std::min(*next, at) : at;
  }
  for (const auto& [job, removal] : removals_) {
    if (removal.again) {
      next = next ? std::min(*next, *removal.again) : *removal.again;
    }
  }
  for (const auto& [shard, prefetch] : prefetches_) {
    next = next ? std::min(*next, prefetch.until) : prefetch.until;
  }
  for (const auto& [shard, load] : loads_) {
    next = next ? std::min(*next, load.until) : load.until;
  }
  return next;
}

void Agent::Tell(Report::Kind kind, const JobUuid& job, std::string text, uint64_t bytes) {
  Act(Report{kind, JobName(job), std::move(text), bytes});
}

void Agent::Ref(ProcessId process) {
  if (processes_[process].references++ == 0) {
    Act(WatchProcess{process});
  }
}

void Agent::Unref(ProcessId process) {
  const auto it = processes_.find(process);
  if (it != processes_.end() && --it->second.references == 0) {
    processes_.erase(it);
    Act(UnwatchProcess{process});
  }
}

MonotonicTime Agent::Deadline(uint64_t deadline_ms) const {
  const uint64_t max = config_.session().deadline_max_ms();
  return time_.now + std::chrono::milliseconds(max > 0
                                                   ? std::min(deadline_ms, max)
                                                   : std::min<uint64_t>(deadline_ms, 3'600'000));
}

SeatId Agent::SeatRank(const Seat& seat) {
  ended_jobs_.RankCame(seat.job);
  return seats_.Add(seat);
}

void Agent::EraseSeat(SeatId id, SeatEnd how) {
  if (const std::optional<Seat> seat = seats_.Erase(id)) {
    Unref(seat->process);
    if (how != SeatEnd::kJoinedAgain && !seat->superseded) {
      ended_jobs_.RankWent(seat->job, how == SeatEnd::kLeft, time_.now);
    }
    if (!seats_.AnyOf(seat->job)) {
      stops_.erase(seat->job);
    }
  }
}

std::string Agent::JobName(const JobUuid& job) const {
  const auto it = jobs_.find(job);
  return it == jobs_.end() ? std::string() : it->second.name;
}

KnownJob* Agent::FindJob(const std::string& name) {
  const auto it = names_.find(name);
  return it == names_.end() ? nullptr : &jobs_.at(it->second);
}

Coordinator* Agent::Hosted(const JobUuid& job) const {
  const auto it = jobs_.find(job);
  return it == jobs_.end() ? nullptr : it->second.coordinator.get();
}

// The job runs, as far as is known here.
bool Agent::AnyRankAlive(const KnownJob& job) const {
  if (job.coordinator != nullptr) {
    return job.coordinator->RanksAlive() > 0;
  }
  return seats_.AnyCurrentOf(job.uuid);
}

bool Agent::IsMember(const JobUuid& job, Rank rank, const ProcessId& process) const {
  if (const Coordinator* coordinator = Hosted(job)) {
    return coordinator->IsMember(rank, process);
  }
  const std::set<SeatId>& seats = seats_.OfRank(job, rank);
  return std::any_of(seats.begin(), seats.end(), [&](SeatId id) {
    const Seat& seat = *seats_.Find(id);
    return seat.process == process && !seat.superseded;
  });
}

}  // namespace holdfast
