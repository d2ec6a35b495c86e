// Sources and read holds: who reads a sealed copy is noted before it gets the descriptors
// (docs/protocol.md §3, §6).
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/agent.h"

namespace holdfast {
namespace {

// Cut short or taken away. Whatever else fails leaves the slot as good as it was.
bool IsFilesFault(const absl::Status& status) {
  return absl::IsDataLoss(status) || absl::IsNotFound(status);
}

Failure UnknownChoice(std::string_view operation, int choice) {
  return {absl::StatusCode::kInvalidArgument, v1::Failure::REASON_UNSPECIFIED,
          absl::StrCat(ToAbsl(operation), ": choice ", choice,
                       " is unknown; a newer client library may be talking to an older ckptd")};
}

}  // namespace

Agent::Slot* Agent::FindSealed(const ShardId& shard) {
  const auto it = shards_.find(shard);
  if (it == shards_.end()) {
    return nullptr;
  }
  Slot& slot = slots_.at(it->second);
  return slot.state == SlotState::kSealed ? &slot : nullptr;
}

void Agent::OnEnterSession(ConnectionId id, const Seat& seat, SeatId seat_id,
                           const v1::ClientFrame& frame) {
  const v1::EnterSession& enter = frame.enter_session();
  if (!v1::EnterSession::Choice_IsValid(enter.choice())) {
    return RefuseNow(id, frame.id(), UnknownChoice("restore", enter.choice()));
  }
  if (enter.label().size() > kLabelBytesMax) {
    return RefuseNow(id, frame.id(),
                     {absl::StatusCode::kInvalidArgument, v1::Failure::REASON_UNSPECIFIED,
                      absl::StrCat("restore: a label has at most ", kLabelBytesMax, " bytes")});
  }
  const RequestToken token = NewPending(
      id, frame, enter.deadline_ms() == 0 ? time_.now + kSettle : Deadline(enter.deadline_ms()));
  Pending& pending = pending_.at(token);
  pending.job = seat.job;
  pending.seat = seat_id;
  pending.hold = enter.hold();
  std::optional<CheckpointId> wanted;
  if (enter.choice() == v1::EnterSession::CHOICE_STEP) {
    wanted = CheckpointId{enter.attempt(), enter.step()};
  }
  Send(seat.job,
       SessionAsked{token, seat.attempt, seat.rank, seat.process, wanted, enter.deadline_ms() > 0,
                    enter.reads_by_itself(), enter.may_reshard(), enter.reads_parts(),
                    static_cast<uint64_t>((Deadline(enter.deadline_ms()) - time_.now) /
                                          std::chrono::milliseconds(1)),
                    enter.label()});
  seats_.SetLine(seat_id, std::nullopt);
}

void Agent::OnReportLoad(ConnectionId id, const Seat& seat, SeatId seat_id,
                         const v1::ClientFrame& frame) {
  const v1::ReportLoad& report = frame.report_load();
  const RequestToken token = NewPending(
      id, frame, report.deadline_ms() == 0 ? time_.now + kSettle : Deadline(report.deadline_ms()));
  Pending& pending = pending_.at(token);
  pending.job = seat.job;
  pending.seat = seat_id;
  pending.hold = report.hold();
  Send(seat.job, LoadReported{token, seat.attempt, seat.rank, report.session(), report.round(),
                              report.loaded(), report.copy_is_bad(), report.wants_mismatch(),
                              report.problem().substr(0, kProblemBytesMax), report.shards_are_bad(),
                              report.of_another_run()});
}

// Notes the reader; the answer with the descriptors follows when the note is there.
void Agent::Offer(RequestToken token, Slot& slot, v1::DaemonFrame frame) {
  Pending& pending = pending_.at(token);
  const ReadHold hold{connections_.at(pending.connection).caller.process, pending.hold};
  if (hold.id == 0 || FindHeld(hold) != nullptr) {
    return Refuse(token,
                  {absl::StatusCode::kInvalidArgument, v1::Failure::REASON_UNSPECIFIED,
                   absl::StrCat("hold ", hold.id, " of ", hold.process.ToString(),
                                hold.id == 0 ? " is no name for one"
                                             : " is taken: each needs a number of its own")});
  }
  if (slot.readers.size() >= kReadersPerSlotMax) {
    return Refuse(token, {absl::StatusCode::kResourceExhausted, v1::Failure::REASON_UNSPECIFIED,
                          absl::StrCat("slot ", slot.id, " is read ", slot.readers.size(),
                                       " times already; release some of them")});
  }
  v1::Source& source = pending.kind == v1::ClientFrame::kAttach
                           ? *frame.mutable_attach()
                           : *frame.mutable_enter_session()->mutable_source();
  source.set_slot(slot.id);
  source.set_generation(slot.generation);
  source.set_image_bytes(slot.copy.image_bytes);
  source.set_attempt(slot.copy.id.attempt);
  source.set_step(slot.copy.id.step);
  source.set_job_uuid(slot.copy.id.job.ToBytes());
  source.set_rank(slot.copy.id.rank);
  source.set_world_size(slot.copy.world_size);
  source.set_hold(hold.id);
  source.set_tier(std::string(TierName(pending.source_tier)));
  source.set_why(pending.source_why);
  pending.where = Where::kSource;
  slot.readers.insert(hold);
  Ref(hold.process);
  NoteSlot(slot);
  slot.read_waits.push_back({slot.note_version, token, hold, std::move(frame)});
}

void Agent::FinishOffer(Slot& slot, const ReadWait& wait, const absl::Status& noted) {
  const Pending* pending = FindPending(wait.token);
  const Seat* seat = pending == nullptr ? nullptr : FindSeat(pending->seat);
  const bool superseded = pending != nullptr && pending->kind != v1::ClientFrame::kAttach &&
                          (seat == nullptr || seat->superseded);
  if (pending != nullptr && noted.ok() && slot.state == SlotState::kSealed && !superseded) {
    return Reply(wait.token, wait.frame, Descriptors::kReadOnlyImageAndRecord, &slot);
  }
  const bool file_gone = noted.code() == absl::StatusCode::kDataLoss;  // cut short or taken away
  if (file_gone && pending != nullptr && pending->kind != v1::ClientFrame::kAttach && !superseded &&
      slot.state == SlotState::kSealed) {
    // As if the rank had found out: the session goes on with another step, for all ranks.
    const v1::SessionOutcome& offered = wait.frame.enter_session();
    pending_.at(wait.token).where = Where::kCoordinator;
    DropHold(slot, wait.hold);
    return Send(seat->job, LoadReported{wait.token, seat->attempt, seat->rank, offered.session(),
                                        offered.round(), false, true, false, Message(noted)});
  }
  if (pending != nullptr && pending->attach && (file_gone || slot.state != SlotState::kSealed)) {
    if (slot.state == SlotState::kSealed) {
      MarkBad(slot, Message(noted));
    }
    DropHold(slot, wait.hold);
    return AttachFailed(wait.token, TierKind::kMemory,
                        file_gone ? noted : absl::AbortedError("it was given up just now"));
  }
  if (pending != nullptr && pending->kind != v1::ClientFrame::kAttach && !superseded &&
      slot.state != SlotState::kSealed && (noted.ok() || file_gone)) {
    // It went while the note was written: the host names the rank's next source, or another step.
    const v1::SessionOutcome& offered = wait.frame.enter_session();
    pending_.at(wait.token).where = Where::kCoordinator;
    DropHold(slot, wait.hold);
    return Send(seat->job, FetchFailed{wait.token,
                                       seat->attempt,
                                       seat->rank,
                                       offered.session(),
                                       offered.round(),
                                       {offered.source().attempt(), offered.source().step()},
                                       TierKind::kMemory,
                                       absl::NotFoundError("its copy is gone"),
                                       false});
  }
  Failure failure{absl::StatusCode::kAborted, v1::Failure::REASON_UNSPECIFIED,
                  "the copy was given up just now; ask again"};
  if (superseded) {
    failure = {absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_SUPERSEDED,
               "a newer attempt exists; this process should end"};
  } else if (file_gone) {
    failure = {absl::StatusCode::kDataLoss, v1::Failure::REASON_UNREADABLE, Message(noted)};
    if (slot.state == SlotState::kSealed) {
      MarkBad(slot, Message(noted));
    }
  } else if (!noted.ok()) {
    failure = {absl::StatusCode::kUnavailable, v1::Failure::REASON_UNSPECIFIED,
               absl::StrCat("who reads slot ", slot.id, " could not be noted: ", Message(noted),
                            "; try again")};
  }
  Refuse(wait.token, failure);
  DropHold(slot, wait.hold);
}

Agent::Slot* Agent::FindHeld(const ReadHold& hold) {
  const auto held = std::find_if(slots_.begin(), slots_.end(),
                                 [&](const auto& s) { return s.second.readers.count(hold) > 0; });
  return held == slots_.end() ? nullptr : &held->second;
}

void Agent::DropHold(Slot& slot, ReadHold hold) {
  if (slot.readers.erase(hold) == 0) {
    return;  // its process ended meanwhile
  }
  Unref(hold.process);
  if (slot.state != SlotState::kDeleting) {
    NoteSlot(slot);
  }
  AfterHold(slot);
}

// A hold has ended, or the record is gone: whatever waited for both goes on.
void Agent::AfterHold(Slot& slot) {
  slots_changed_ = true;
  if (HeldByAnybody(slot)) {
    return;
  }
  if (slot.state == SlotState::kUnpublishing && !slot.removing) {
    BecomeFree(slot);
  } else if (slot.state == SlotState::kQuarantined) {
    LeaveQuarantine(slot);
  } else if (slot.state == SlotState::kSealed && slot.loaded) {
    Unpublish(slot);
  }
}

void Agent::OnConfirmRead(ConnectionId id, const Caller& caller, const v1::ClientFrame& frame) {
  const v1::ConfirmRead& confirm = frame.confirm_read();
  const Slot* slot = FindSlot(confirm.slot());
  const auto of_process = [&](const ReadHold& hold) { return hold.process == caller.process; };
  if (slot != nullptr && slot->generation == confirm.generation() &&
      std::any_of(slot->readers.begin(), slot->readers.end(), of_process)) {
    return ReplyDone(id, frame);
  }
  RefuseNow(
      id, frame.id(),
      {absl::StatusCode::kDataLoss, v1::Failure::REASON_UNSPECIFIED,
       absl::StrCat(
           "slot ", confirm.slot(), " generation ", confirm.generation(),
           " is not held by this process: what was read from it may belong to another step")});
}

void Agent::OnReleaseRead(ConnectionId id, const Caller& caller, const v1::ClientFrame& frame) {
  if (ReleaseParts(id, frame.release_read().hold())) {
    return ReplyDone(id, frame);
  }
  const ReadHold hold{caller.process, frame.release_read().hold()};
  Slot* slot = FindHeld(hold);
  // A hold that is only being noted is not the client's yet; it cannot let go of it.
  const bool noting =
      slot != nullptr && std::any_of(slot->read_waits.begin(), slot->read_waits.end(),
                                     [&](const ReadWait& wait) { return wait.hold == hold; });
  if (slot == nullptr || noting || slot->state == SlotState::kDeleting) {
    return ReplyDone(id, frame);
  }
  // The client forgets the hold when it is answered: a daemon that is started again must not find
  // it in the note any more.
  const RequestToken token = NewPending(id, frame, time_.now + kSettle);
  pending_.at(token).where = Where::kSource;
  slot->release_waits.emplace_back(slot->note_version + 1, token);
  DropHold(*slot, hold);
}

void Agent::FinishReleases(Slot& slot, const NoteWritten& e) {
  for (auto& [version, token] : slot.release_waits) {
    const Pending* pending = FindPending(token);
    if (version > e.note_version || pending == nullptr) {
      continue;
    }
    if (e.status.ok()) {
      v1::DaemonFrame done;
      done.mutable_release_read();
      Reply(token, std::move(done));
    } else {
      Refuse(token,
             {absl::StatusCode::kUnavailable, v1::Failure::REASON_UNSPECIFIED,
              absl::StrCat("that slot ", slot.id,
                           " is not read any more could not be noted: ", Message(e.status))});
    }
  }
  std::erase_if(slot.release_waits,
                [&](const auto& wait) { return FindPending(wait.second) == nullptr; });
}

void Agent::OnCopyFoundBad(const CopyFoundBad& e) {
  Slot* slot = FindSlot(e.slot);
  if (slot == nullptr || slot->generation != e.generation) {
    return;
  }
  if (slot->state == SlotState::kSealed) {
    MarkBad(*slot, e.what);
  } else if (slot->state ==
             SlotState::kWriting) {  // its file is not what it was when it was granted
    slot->bad = true;
    Tell(Report::Kind::kSlotLost, slot->job, absl::StrCat("slot ", slot->id, ": ", e.what),
         slot->bytes);
    LoseFilling(*slot, e.what);
    BecomeFree(*slot);
  } else if (slot->state == SlotState::kFree) {  // handed out by a Reserve, or was to be
    slot->bad = true;
    Tell(Report::Kind::kSlotLost, slot->job, absl::StrCat("slot ", slot->id, ": ", e.what),
         slot->bytes);
    BecomeFree(*slot);
  }
}

void Agent::OnSlotFileGone(const SlotFileGone& e) {
  Slot* slot = FindSlot(e.slot);
  if (slot == nullptr || slot->state == SlotState::kCreating ||
      slot->state == SlotState::kDeleting || slot->bad) {
    return;
  }
  slot->bad = true;  // whatever is being done with it just now, it is not filled again
  OnCopyFoundBad({slot->id, slot->generation, "its file was deleted or moved away"});
}

// Whoever called it bad was wrong, or read through bad memory of its own.
void Agent::OnCopyFoundGood(const CopyFoundGood& e) {
  Slot* slot = FindSlot(e.slot);
  if (slot != nullptr && slot->generation == e.generation && slot->state == SlotState::kSealed &&
      slot->bad) {
    slot->bad = false;
    Send(slot->shard.job, ShardGood{slot->shard.checkpoint(), slot->shard.rank, TierOf(*slot)});
  }
}

// What was to be passed could not be: neither may the core believe that the client has it, nor the
// client wait for it.
void Agent::OnHandOverFailed(const HandOverFailed& e) {
  const SendReply& reply = e.reply;
  if (reply.descriptors == Descriptors::kReadOnlyImageAndRecord) {
    return ReadingFailed(reply, e.status);
  }
  if (connections_.count(reply.connection) == 0) {
    return;  // what it was writing was lost with the connection
  }
  if (reply.descriptors == Descriptors::kOpenedCopy) {  // its user keeps too much passed memory
    if (reply.frame.attach().hold() != 0) {
      ReleaseParts(reply.connection, reply.frame.attach().hold());
    }
    return RefuseNow(reply.connection, reply.frame.id(),
                     {e.status.code(), v1::Failure::REASON_UNSPECIFIED, Message(e.status)});
  }
  if (IsFilesFault(e.status)) {
    RefuseNow(reply.connection, reply.frame.id(),
              {e.status.code(), v1::Failure::REASON_UNSPECIFIED, Message(e.status)});
    return OnCopyFoundBad({reply.slot, reply.generation, Message(e.status)});
  }
  // The slot is as good as before and noted as the client's: only a new connection sets that right.
  Act(CloseConnection{reply.connection, Message(e.status)});
  OnConnectionClosed(reply.connection);
}

void Agent::ReadingFailed(const SendReply& reply, const absl::Status& status) {
  Slot* slot = FindSlot(reply.slot);
  const bool there = slot != nullptr && slot->generation == reply.generation;
  if (there) {
    DropHold(*slot, reply.hold);
  }
  const auto connection = connections_.find(reply.connection);
  const Seat* seat = connection == connections_.end() ? nullptr : FindSeat(connection->second.seat);
  if (connection != connections_.end() && reply.frame.has_enter_session() && seat != nullptr &&
      !seat->superseded) {
    // As if the rank had found out: the session goes on with another step, or ends, for all ranks.
    const v1::SessionOutcome& offered = reply.frame.enter_session();
    v1::ClientFrame asked;
    asked.set_id(reply.frame.id());
    asked.mutable_enter_session();
    const RequestToken token = NewPending(reply.connection, asked, time_.now + kSettle);
    pending_.at(token).job = seat->job;
    pending_.at(token).seat = connection->second.seat;
    pending_.at(token).hold = reply.hold.id;
    return Send(seat->job,
                LoadReported{token, seat->attempt, seat->rank, offered.session(), offered.round(),
                             false, IsFilesFault(status), false, Message(status)});
  }
  if (there && IsFilesFault(status) && slot->state == SlotState::kSealed) {
    MarkBad(*slot, Message(status));
  }
  if (connection != connections_.end() && IsFilesFault(status) && reply.attach != nullptr) {
    // What the reader was to get is known, and so is its next copy.
    const v1::Source& offered = reply.frame.attach();
    const RequestToken token = NewPending(reply.connection, *reply.attach, time_.now + kSettle);
    Pending& pending = pending_.at(token);
    pending.job = JobUuid::FromBytes(offered.job_uuid()).value();
    pending.hold = reply.hold.id;
    pending.request = reply.attach;
    pending.attach = Attaching(reply.attach->attach(), time_.now + kSettle);
    pending.attach->checkpoint = {offered.attempt(), offered.step()};
    return AttachFailed(token, TierKind::kMemory, absl::DataLossError(status.message()));
  }
  if (connection != connections_.end()) {
    RefuseNow(
        reply.connection, reply.frame.id(),
        IsFilesFault(status)
            ? Failure{absl::StatusCode::kDataLoss, v1::Failure::REASON_UNREADABLE, Message(status)}
            : Failure{absl::StatusCode::kUnavailable, v1::Failure::REASON_UNSPECIFIED,
                      absl::StrCat("slot ", reply.slot, " could not be passed: ", Message(status),
                                   "; try again")});
  }
}

// The bytes stay until room is needed: whoever called them bad may be the one that is wrong.
void Agent::MarkBad(Slot& slot, const std::string& what) {
  slot.bad = true;
  Send(slot.shard.job, ShardBad{slot.shard.checkpoint(), slot.shard.rank, what, TierOf(slot)});
}

}  // namespace holdfast
