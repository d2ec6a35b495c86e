// Slots ahead of the first save: made, populated, and mapped by their process (docs/protocol.md
// §3).
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "server/agent.h"

namespace holdfast {

void Agent::OnReserve(ConnectionId id, const Seat& seat, SeatId seat_id,
                      const v1::ClientFrame& frame) {
  const v1::Reserve& reserve = frame.reserve();
  if (reserve.slot_bytes() == 0) {
    return RefuseNow(id, frame.id(),
                     {absl::StatusCode::kInvalidArgument, v1::Failure::REASON_UNSPECIFIED,
                      "reserve: slot_bytes is 0"});
  }
  if (reserve.slot_bytes() > UserBytesMax()) {
    return RefuseNow(
        id, frame.id(),
        {absl::StatusCode::kResourceExhausted, v1::Failure::REASON_TOO_LARGE,
         absl::StrCat("reserve: a slot of ", FormatBytes(reserve.slot_bytes()),
                      " is more than a user may have on this node, ", UserBytesMaxText())});
  }
  const uint32_t max = config_.memory().slots_per_rank();
  const RequestToken token = NewPending(
      id, frame,
      reserve.deadline_ms() == 0 ? time_.now + kSettle : Deadline(reserve.deadline_ms()));
  Pending& pending = pending_.at(token);
  pending.where = Where::kReserve;
  pending.job = seat.job;
  pending.seat = seat_id;
  pending.bytes = RoundUp(reserve.slot_bytes(), kSlotBytesUnit);
  pending.slots = reserve.slots() == 0 ? max : std::min(reserve.slots(), max);
  pending.may_wait = reserve.deadline_ms() > 0;
  waiting_for_room_.insert(token);
  PlaceReserve(token);
}

void Agent::PlaceReserve(RequestToken token) {
  Pending& pending = pending_.at(token);
  const Seat* seat = FindSeat(pending.seat);
  if (seat == nullptr) {
    return Refuse(token, {absl::StatusCode::kAborted, v1::Failure::REASON_UNSPECIFIED,
                          "the rank has joined again since"});
  }
  uint32_t ready = 0;
  uint32_t coming = 0;
  for (auto& [id, slot] : slots_) {
    if (!slot.owned || slot.job != seat->job || slot.rank != seat->rank || slot.bad || slot.extra ||
        Stuck(slot, *seat) || !Fits(slot, pending.bytes)) {
      continue;
    }
    if (slot.state == SlotState::kFree && !slot.populated) {
      slot.populate = true;
    }
    const bool unready = slot.state == SlotState::kCreating ||
                         slot.state == SlotState::kPopulating ||
                         (slot.state == SlotState::kFree && !slot.populated);
    ++(unready ? coming : ready);
  }
  bool space_coming = false;
  while (ready + coming < pending.slots) {
    const uint32_t count = CountForRank(*seat);
    const bool may_have_more = count < config_.memory().slots_per_rank();
    if (may_have_more && !pending.no_create && BudgetHas(*seat, pending.bytes, count)) {
      CreateSlotFor(*seat, pending.bytes, true, token);
      ++coming;
      continue;
    }
    Slot* adopted = nullptr;
    for (auto& [id, slot] : slots_) {
      if (may_have_more && Fits(slot, pending.bytes) && Adoptable(slot, *seat) &&
          !MineFree(slot, *seat)) {
        adopted = &slot;
        break;
      }
    }
    if (adopted == nullptr) {
      space_coming = MakeSpace(*seat, pending.bytes) ||
                     (may_have_more && TakeFromReplicas(pending.bytes, Limit::kBudget));
      break;
    }
    adopted->job = seat->job;
    adopted->rank = seat->rank;
    adopted->populate = !adopted->populated;
    ++(adopted->populated ? ready : coming);
  }
  PopulateNext(seat->job, seat->rank);
  if (ready < pending.slots && (coming > 0 || space_coming) && pending.may_wait) {
    return;
  }
  HandOver(token, std::min(ready, pending.slots));
}

// Answers, with the descriptor of one free slot that the process has not mapped. It becomes the
// slot's writer: noted first.
void Agent::HandOver(RequestToken token, uint32_t ready) {
  Pending& pending = pending_.at(token);
  const Seat& seat = *FindSeat(pending.seat);
  pending.ready = ready;
  waiting_for_room_.erase(token);
  for (auto& [id, slot] : slots_) {
    const bool mapped = slot.writer == seat.process && slot.mapped_on == pending.connection;
    if (pending.expired || mapped || !slot.populated || !MineFree(slot, seat) ||
        !Fits(slot, pending.bytes) || !(slot.writer || MayMap(seat, pending.bytes))) {
      continue;
    }
    slot.state = SlotState::kHanding;
    slot.token = token;
    slot.uid = seat.uid;
    SetWriter(slot, seat.process);
    pending.where = Where::kHanding;
    NoteSlot(slot);
    slot.grant_note = slot.note_version;
    return;
  }
  AnswerReserve(token, nullptr);
}

void Agent::AnswerReserve(RequestToken token, const Slot* handed) {
  const Pending& pending = pending_.at(token);
  v1::DaemonFrame frame;
  v1::ReserveReply& reply = *frame.mutable_reserve();
  reply.set_ready(pending.ready);
  reply.set_wanted(pending.slots);
  reply.set_slot_bytes(pending.bytes);
  if (handed != nullptr) {
    reply.set_with_descriptor(true);
    reply.set_slot(handed->id);
  }
  Reply(token, std::move(frame),
        handed != nullptr ? Descriptors::kWritableImage : Descriptors::kNone, handed);
}

void Agent::FinishHanding(Slot& slot, const absl::Status& noted) {
  const RequestToken token = std::exchange(slot.token, 0);
  const Pending* pending = FindPending(token);
  const Seat* seat = pending == nullptr ? nullptr : FindSeat(pending->seat);
  const bool hand =
      seat != nullptr && !seat->superseded && noted.ok() && slot.writer == seat->process;
  if (hand) {
    slot.mapped_on = pending->connection;
    AnswerReserve(token, &slot);
  } else if (seat != nullptr && seat->superseded) {
    Refuse(token, {absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_SUPERSEDED,
                   "a newer attempt exists; this process should end"});
  } else if (pending != nullptr) {
    AnswerReserve(token, nullptr);
  }
  BecomeFree(slot);
}

}  // namespace holdfast
