// A filling, from BeginSave to Seal (docs/protocol.md §4).
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "server/agent.h"

namespace holdfast {
namespace {

Failure Invalid(std::string message) {
  return {absl::StatusCode::kInvalidArgument, v1::Failure::REASON_UNSPECIFIED, std::move(message)};
}

Failure Gone(std::string message) {
  return {absl::StatusCode::kAborted, v1::Failure::REASON_ABANDONED, std::move(message)};
}

}  // namespace

void Agent::OnBeginSave(ConnectionId id, const Seat& seat, SeatId seat_id,
                        const v1::ClientFrame& frame) {
  const v1::BeginSave& save = frame.begin_save();
  if (save.slot_bytes() == 0) {
    return RefuseNow(id, frame.id(),
                     Invalid(absl::StrCat("save of step ", save.step(), ": slot_bytes is 0")));
  }
  const bool may_wait = save.deadline_ms() > 0;
  const RequestToken token =
      NewPending(id, frame, may_wait ? Deadline(save.deadline_ms()) : time_.now + kSettle);
  Pending& pending = pending_.at(token);
  pending.job = seat.job;
  pending.seat = seat_id;
  pending.step = save.step();
  pending.may_wait = may_wait;
  if (save.slot_bytes() > UserBytesMax()) {
    return RefuseSave(token, {absl::StatusCode::kResourceExhausted, v1::Failure::REASON_TOO_LARGE,
                              absl::StrCat("save of step ", save.step(), " by rank ", seat.rank,
                                           " needs ", FormatBytes(save.slot_bytes()),
                                           ", more than all of its user's slots on this node may "
                                           "hold, ",
                                           UserBytesMaxText())});
  }
  pending.bytes = RoundUp(save.slot_bytes(), kSlotBytesUnit);
  // Of a job that another node hosts a save waits for nobody: whether the attempt still may, it is
  // told later, and what it has written is given up then.
  const bool permitted = clustered() && Hosted(seat.job) == nullptr && seat.line &&
                         !seat.superseded && save.step() > seat.last_begun.value_or(0) &&
                         seat.last_begun;
  Send(seat.job, SaveAsked{permitted ? 0 : token, seat.attempt, seat.rank, save.step()});
  if (permitted) {
    TakePermission(token, std::vector<Descent>(*seat.line));
  }
}

// The save's step is lost with it, for all ranks.
void Agent::RefuseSave(RequestToken token, const Failure& failure) {
  const Pending* pending = FindPending(token);
  if (pending == nullptr) {
    return;
  }
  if (const Seat* seat = FindSeat(pending->seat)) {
    Send(seat->job, SaveLost{seat->attempt, seat->rank, pending->step,
                             absl::StrCat("rank ", seat->rank, " was refused: ", failure.message)});
    Tell(Report::Kind::kSaveRefused, seat->job, failure.message);
  }
  Refuse(token, failure);
}

// The slot is free, and nobody else can have it mapped. The note comes before the descriptor.
void Agent::StartFilling(Slot& slot, RequestToken token) {
  Pending& pending = pending_.at(token);
  const Seat& seat = *FindSeat(pending.seat);
  slot.state = SlotState::kNoting;
  slot.owned = true;
  slot.job = seat.job;
  slot.rank = seat.rank;
  slot.uid = seat.uid;
  ++slot.generation;
  slot.shard = {seat.job, seat.attempt, pending.step, seat.rank};
  slot.world_size = seat.world_size;
  slot.filled_by = pending.connection;
  slot.token = token;
  slot.lost.reset();
  slot.descent = pending.descent;
  if (slot.writer != seat.process) {
    slot.mapped_on = 0;
  }
  SetWriter(slot, seat.process);
  shards_[slot.shard] = slot.id;
  pending.where = Where::kSlot;
  waiting_for_room_.erase(token);
  NoteSlot(slot);
  slot.grant_note = slot.note_version;
}

void Agent::GrantFilling(Slot& slot, const absl::Status& noted) {
  const RequestToken token = std::exchange(slot.token, 0);
  const Pending* pending = FindPending(token);
  if (!noted.ok() && !slot.lost) {
    LoseFilling(slot,
                absl::StrCat("who writes slot ", slot.id, " could not be noted: ", Message(noted)));
    RefuseSave(token, {absl::StatusCode::kUnavailable, v1::Failure::REASON_UNSPECIFIED,
                       slot.lost->message});
    CountFailure(slot, noted);
  }
  if (slot.lost || pending == nullptr) {
    ForgetShard(slot);
    // Nobody got a descriptor for this filling. The writer stays noted: it may have the slot mapped
    // from before.
    return BecomeFree(slot);
  }
  slot.state = SlotState::kWriting;
  v1::DaemonFrame frame;
  v1::Grant& grant = *frame.mutable_begin_save();
  grant.set_slot(slot.id);
  grant.set_generation(slot.generation);
  grant.set_slot_bytes(slot.bytes);
  grant.set_job_uuid(slot.shard.job.ToBytes());
  grant.set_attempt(slot.shard.attempt);
  for (const Descent& d : slot.descent) {
    v1::Descent& added = *grant.add_descent();
    added.set_attempt(d.attempt);
    added.set_parent_attempt(d.parent.attempt);
    added.set_parent_step(d.parent.step);
  }
  const bool descriptor = slot.mapped_on != slot.filled_by;
  grant.set_with_descriptor(descriptor);
  slot.mapped_on = slot.filled_by;
  Reply(token, std::move(frame), descriptor ? Descriptors::kWritableImage : Descriptors::kNone,
        &slot);
}

// A file that was cut short or taken away is never filled again, nor is one that fails time after
// time while others may be healthy. A full file system is nobody's fault in particular.
void Agent::CountFailure(Slot& slot, const absl::Status& status) {
  const absl::StatusCode code = status.code();
  if (code == absl::StatusCode::kInvalidArgument || code == absl::StatusCode::kResourceExhausted) {
    return;  // the client's record; a full file system
  }
  const bool file_gone = code == absl::StatusCode::kDataLoss ||
                         code == absl::StatusCode::kOutOfRange ||
                         code == absl::StatusCode::kNotFound;
  if (file_gone || ++slot.failures >= kSlotFailuresMax) {
    slot.bad = true;
    Tell(Report::Kind::kSlotLost, slot.job, absl::StrCat("slot ", slot.id, ": ", Message(status)),
         slot.bytes);
  }
}

// The filling will never be sealed, and that is this rank's doing.
void Agent::LoseFilling(Slot& slot, const std::string& why) {
  if (slot.lost) {
    return;
  }
  slot.lost = Gone(absl::StrCat("step ", slot.shard.step, " of attempt ", slot.shard.attempt,
                                " is lost: ", why));
  ForgetShard(slot);
  Send(slot.shard.job, SaveLost{slot.shard.attempt, slot.shard.rank, slot.shard.step, why});
}

// The slot in which this seat filled that generation of that step, over this connection; in
// whatever state.
Agent::Slot* Agent::FindFilling(const Seat& seat, SlotId id, Generation generation, Step step) {
  Slot* slot = FindSlot(id);
  const bool same = slot != nullptr && slot->writer == seat.process &&
                    slot->generation == generation && slot->shard.job == seat.job &&
                    slot->shard.attempt == seat.attempt && slot->shard.rank == seat.rank &&
                    slot->shard.step == step;
  return same ? slot : nullptr;
}

void Agent::OnSeal(ConnectionId id, const Seat& seat, const v1::ClientFrame& frame) {
  const v1::Seal& seal = frame.seal();
  Slot* slot = FindFilling(seat, seal.slot(), seal.generation(), seal.step());
  const bool open = slot != nullptr && slot->state == SlotState::kWriting && slot->filled_by == id;
  if (seat.superseded || (open && slot->lost)) {
    const Failure failure =
        seat.superseded
            ? Failure{absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_SUPERSEDED,
                      absl::StrCat("step ", seal.step(), " was not sealed: attempt ", seat.attempt,
                                   " of job '", JobName(seat.job),
                                   "' was superseded by a newer one; this process should end")}
            : *slot->lost;
    if (open) {
      LoseFilling(*slot, failure.message);
      BecomeFree(*slot);
    }
    return RefuseNow(id, frame.id(), failure);
  }
  if (slot != nullptr && slot->state == SlotState::kSealed) {
    v1::DaemonFrame reply;
    reply.set_id(frame.id());
    reply.mutable_seal()->set_sealed_unix_ms(slot->copy.sealed_unix_ms);
    return Act(SendReply{id, std::move(reply), Descriptors::kNone, 0, 0});
  }
  if (!open) {
    return RefuseNow(
        id, frame.id(),
        slot != nullptr && slot->state == SlotState::kPublishing
            ? Failure{absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_UNSPECIFIED,
                      absl::StrCat("step ", seal.step(), " is being sealed already")}
        : slot != nullptr && slot->lost
            ? *slot->lost
            : Gone(absl::StrCat("slot ", seal.slot(), " generation ", seal.generation(),
                                " is not being filled with step ", seal.step(),
                                " by this rank (any more)")));
  }
  if (seal.record_bytes() == 0 || seal.record_bytes() > kRecordBytesMax ||
      seal.record_offset() > slot->bytes ||
      seal.record_bytes() > slot->bytes - seal.record_offset()) {
    const std::string why = absl::StrCat("seal of step ", seal.step(), ": a record of ",
                                         seal.record_bytes(), " bytes at ", seal.record_offset(),
                                         " is not within the slot of ", slot->bytes);
    LoseFilling(*slot, why);
    BecomeFree(*slot);
    return RefuseNow(id, frame.id(), Invalid(why));
  }
  const uint64_t beside = BesideSlot(*slot, seal.record_bytes());
  if (beside > 0 && !MemoryHas(seat.uid, beside)) {
    const std::string why =
        absl::StrCat("seal of step ", seal.step(), ": its record of ",
                     FormatBytes(seal.record_bytes()), " takes ", FormatBytes(beside),
                     " of memory beside the slot, and there is none left: the "
                     "node holds ",
                     FormatBytes(bytes_used_), " of ", FormatBytes(bytes_max_),
                     " (memory.bytes_max); save fewer, larger tensors");
    LoseFilling(*slot, why);
    BecomeFree(*slot);
    return RefuseNow(id, frame.id(),
                     {absl::StatusCode::kResourceExhausted, v1::Failure::REASON_NO_ROOM, why});
  }
  const RequestToken token = NewPending(id, frame, std::nullopt);
  Pending& pending = pending_.at(token);
  pending.job = seat.job;
  pending.where = Where::kSlot;
  slot->token = token;
  slot->state = SlotState::kPublishing;
  SealedCopy expected;
  expected.id = slot->shard;
  expected.job_name = JobName(seat.job);
  expected.world_size = slot->world_size;
  expected.generation = slot->generation;
  expected.descent = slot->descent;
  Act(PublishRecord{slot->id, slot->generation, seal.record_offset(), seal.record_bytes(),
                    slot->bytes, std::move(expected)});
}

void Agent::OnRecordPublished(const RecordPublished& e) {
  Slot* slot = FindSlot(e.slot);
  if (slot == nullptr || slot->state != SlotState::kPublishing ||
      slot->generation != e.generation) {
    return;
  }
  const RequestToken token = std::exchange(slot->token, 0);
  absl::Status status = e.status;
  if (status.ok() && (e.copy.id != slot->shard || e.copy.generation != slot->generation ||
                      e.copy.world_size != slot->world_size || e.copy.image_bytes > slot->bytes)) {
    status =
        absl::InvalidArgumentError("the record names another shard than the one that was begun");
  }
  if (!status.ok()) {
    const Failure failure{status.code() == absl::StatusCode::kInvalidArgument
                              ? absl::StatusCode::kInvalidArgument
                              : absl::StatusCode::kUnavailable,
                          v1::Failure::REASON_UNSPECIFIED,
                          absl::StrCat("seal of step ", slot->shard.step, " by rank ",
                                       slot->shard.rank, ": ", Message(status))};
    LoseFilling(*slot, failure.message);
    Refuse(token, failure);
    CountFailure(*slot, status);
    return Unpublish(*slot);  // part of it may have reached the directory
  }
  if (slot->lost) {
    // Given up while its record was on the way: it must not stay behind.
    Refuse(token, *slot->lost);
    return Unpublish(*slot);
  }
  slot->state = SlotState::kSealed;
  slot->populated = true;
  slot->failures = 0;
  HasCopy(*slot, e.copy, e.record_bytes);
  slots_changed_ = true;
  Act(IndexShard{slot->copy, TierKind::kMemory, slot->id, ""});
  Tell(Report::Kind::kShardSealed, slot->shard.job,
       absl::StrCat("step ", slot->shard.step, " of attempt ", slot->shard.attempt,
                    " sealed by rank ", slot->shard.rank),
       slot->copy.image_bytes);
  Send(slot->shard.job,
       ShardSealed{slot->shard.attempt, slot->shard.rank, slot->shard.step, slot->world_size,
                   slot->copy.image_bytes, slot->copy.sealed_unix_ms, true, slot->copy.likeness});
  v1::DaemonFrame frame;
  frame.mutable_seal()->set_sealed_unix_ms(slot->copy.sealed_unix_ms);
  Reply(token, std::move(frame));
}

void Agent::OnAbortSave(ConnectionId id, const Seat& seat, const v1::ClientFrame& frame) {
  const v1::AbortSave& abort = frame.abort_save();
  Slot* slot = FindFilling(seat, abort.slot(), abort.generation(), abort.step());
  if (slot != nullptr &&
      (slot->state == SlotState::kSealed || slot->state == SlotState::kPublishing)) {
    return RefuseNow(
        id, frame.id(),
        {absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_UNSPECIFIED,
         absl::StrCat("step ", abort.step(), " is sealed, or being sealed: it cannot be aborted")});
  }
  if (slot != nullptr && slot->state == SlotState::kWriting && slot->filled_by == id) {
    LoseFilling(*slot, absl::StrCat("rank ", seat.rank,
                                    " gave it up: ", abort.why().substr(0, kWhyBytesMax)));
    BecomeFree(*slot);
  }
  ReplyDone(id, frame);
}

}  // namespace holdfast
