// The life of a slot: made, noted, filled, emptied, quarantined, deleted (docs/protocol.md §3).
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/agent.h"

namespace holdfast {

Agent::Slot* Agent::FindSlot(SlotId id) {
  const auto it = slots_.find(id);
  return it == slots_.end() ? nullptr : &it->second;
}

bool Agent::Filling(SlotState state) {
  return state == SlotState::kNoting || state == SlotState::kWriting ||
         state == SlotState::kPublishing;
}

uint32_t Agent::SavesBeingWritten() const {
  return static_cast<uint32_t>(std::count_if(slots_.begin(), slots_.end(), [](const auto& each) {
    const Slot& slot = each.second;
    return Filling(slot.state) && !slot.fetch && slot.writer && !slot.lost;
  }));
}

Agent::Slot& Agent::CreateSlotFor(const Seat& seat, uint64_t bytes, bool populate,
                                  RequestToken token) {
  SlotId id = 0;
  for (const auto& [used, slot] : slots_) {  // the smallest id that is not in use
    if (used != id) {
      break;
    }
    ++id;
  }
  Slot& slot = slots_[id];
  slot.id = id;
  slot.bytes = bytes;
  slot.state = SlotState::kCreating;
  slot.populate = populate;
  slot.owned = true;
  slot.job = seat.job;
  slot.rank = seat.rank;
  slot.uid = seat.uid;
  slot.token = token;
  // Whoever kept a generation of an earlier slot by this number must not find it again.
  if (const auto retired = retired_.find(id); retired != retired_.end()) {
    slot.generation = retired->second;
  }
  bytes_used_ += bytes;  // reserved before it is made
  Act(CreateSlot{id, bytes});
  return slot;
}

void Agent::OnSlotCreated(const SlotCreated& e) {
  Slot* slot = FindSlot(e.slot);
  if (slot == nullptr || slot->state != SlotState::kCreating) {
    return;
  }
  const RequestToken token = std::exchange(slot->token, 0);
  Pending* pending = FindPending(token);
  if (!e.status.ok()) {
    const bool ahead = slot->ahead;
    bytes_used_ -= slot->bytes;
    retired_[slot->id] = slot->generation;
    slots_.erase(e.slot);
    if (ahead) {
      return PrefetchSlotFailed(e.slot, e.status);
    }
    if (pending != nullptr) {
      pending->no_create = true;
      pending->create_problem = Message(e.status);
      if (pending->where == Where::kReserve) {
        return PlaceReserve(token);
      }
      if (pending->where == Where::kSlot) {
        pending->where = Where::kRoom;
        waiting_for_room_.insert(token);
        pending->fetch ? PlaceFetch(token) : Place(token);
      }
    }
    return;
  }
  const JobUuid job = slot->job;
  const Rank rank = slot->rank;
  if (slot->ahead) {
    PrefetchSlotMade(*slot);
  } else if (pending != nullptr && pending->where == Where::kSlot &&
             FindSeat(pending->seat) != nullptr) {
    pending->fetch ? StartFetch(*slot, token) : StartFilling(*slot, token);
  } else {
    BecomeFree(*slot);
  }
  PopulateNext(job, rank);
}

// One slot of a rank after the other, so that a save that comes early finds one that is not being
// populated.
void Agent::PopulateNext(const JobUuid& job, Rank rank) {
  Slot* next = nullptr;
  for (auto& [id, slot] : slots_) {
    if (!slot.owned || slot.job != job || slot.rank != rank) {
      continue;
    }
    if (slot.state == SlotState::kPopulating) {
      return;
    }
    if (next == nullptr && slot.state == SlotState::kFree && slot.populate && !slot.populated) {
      next = &slot;
    }
  }
  if (next != nullptr) {
    next->state = SlotState::kPopulating;
    Act(PopulateSlot{next->id, next->bytes});
  }
}

void Agent::OnSlotPopulated(const SlotPopulated& e) {
  Slot* slot = FindSlot(e.slot);
  if (slot == nullptr || slot->state != SlotState::kPopulating) {
    return;
  }
  const JobUuid job = slot->job;
  const Rank rank = slot->rank;
  // Not tried again: a failure that repeats itself must not keep the node busy.
  slot->populated = true;
  slot->populate = false;
  if (!e.status.ok()) {
    // Usable still, only slower; unless its file is what fails.
    slot->bad = e.status.code() == absl::StatusCode::kDataLoss ||
                e.status.code() == absl::StatusCode::kNotFound ||
                e.status.code() == absl::StatusCode::kOutOfRange;
    Tell(Report::Kind::kTrouble, job,
         absl::StrCat("slot ", slot->id, " could not be populated ahead: ", Message(e.status)),
         slot->bytes);
  }
  BecomeFree(*slot);
  PopulateNext(job, rank);
}

void Agent::NoteSlot(Slot& slot) {
  v1::SlotNote note;
  note.set_generation(slot.generation);
  note.set_slot_bytes(slot.bytes);
  note.set_replica(slot.lent);
  if (slot.writer) {
    note.mutable_writer()->set_pid(slot.writer->pid);
    note.mutable_writer()->set_start_ticks(slot.writer->start_ticks);
  }
  for (const ReadHold& hold : slot.readers) {
    v1::Reader& reader = *note.add_readers();
    reader.set_pid(hold.process.pid);
    reader.set_start_ticks(hold.process.start_ticks);
    reader.set_hold(hold.id);
  }
  Act(WriteNote{slot.id, ++slot.note_version, std::move(note), slot.fetch});
}

void Agent::OnNoteWritten(const NoteWritten& e) {
  Slot* slot = FindSlot(e.slot);
  if (slot == nullptr) {
    return;
  }
  if (slot->state == SlotState::kNoting && slot->grant_note == e.note_version) {
    slot->fetch ? FetchNoted(*slot, e.status) : GrantFilling(*slot, e.status);
  }
  if (slot->state == SlotState::kHanding && slot->grant_note == e.note_version) {
    FinishHanding(*slot, e.status);
  }
  std::vector<ReadWait> ready;
  for (size_t i = 0; i < slot->read_waits.size();) {
    if (slot->read_waits[i].note_version == e.note_version) {
      ready.push_back(std::move(slot->read_waits[i]));
      slot->read_waits.erase(slot->read_waits.begin() + static_cast<ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
  FinishReleases(*slot, e);
  for (const ReadWait& wait : ready) {
    FinishOffer(*slot, wait, e.status);
  }
}

void Agent::SetWriter(Slot& slot, std::optional<ProcessId> writer) {
  if (slot.writer == writer) {
    return;
  }
  if (writer) {
    Ref(*writer);
  }
  if (slot.writer) {
    Unref(*slot.writer);
  }
  slot.writer = writer;
  slot.mapped_on = 0;
}

// A record lies in memory beside its slot. Up to a sixteenth of the slot it is not counted, as a
// record of tensors that one trains is much smaller; what it takes beyond that is memory like
// slots.
uint64_t Agent::BesideSlot(const Slot& slot, uint64_t record_bytes) {
  return record_bytes - std::min(record_bytes, slot.bytes / 16);
}

void Agent::HasCopy(Slot& slot, const SealedCopy& copy, uint64_t record_bytes) {
  bytes_used_ -= slot.beside;
  slot.copy = copy;
  slot.beside = BesideSlot(slot, record_bytes);
  bytes_used_ += slot.beside;
}

void Agent::ForgetShard(Slot& slot) {
  const auto it = shards_.find(slot.shard);
  if (it != shards_.end() && it->second == slot.id) {
    shards_.erase(it);
  }
}

// Record first, bytes later: from now on nobody is given this copy, and at a crash it is not found
// again.
void Agent::Unpublish(Slot& slot) {
  if (slot.state == SlotState::kSealed) {
    Act(UnindexShard{slot.shard});
  }
  ForgetShard(slot);
  slot.state = SlotState::kUnpublishing;
  slot.removing = true;
  Act(RemoveRecord{slot.id, slot.generation});
}

void Agent::OnRecordRemoved(const RecordRemoved& e) {
  Slot* slot = FindSlot(e.slot);
  if (slot == nullptr || slot->state != SlotState::kUnpublishing || !slot->removing ||
      slot->generation != e.generation) {
    return;
  }
  slot->removing = false;
  if (!e.status.ok() && e.status.code() != absl::StatusCode::kNotFound) {
    // Its record may still be there, so the slot is not filled again: deleting takes the record
    // first.
    Tell(Report::Kind::kSlotLost, slot->job,
         absl::StrCat("slot ", slot->id, ": its record could not be removed: ", Message(e.status)),
         slot->bytes);
    slot->bad = true;
  }
  AfterHold(*slot);
}

// Nothing of value is in it and nobody reads it. A writer that is noted may have it mapped.
void Agent::BecomeFree(Slot& slot) {
  slot.state = SlotState::kFree;
  slot.ahead = false;
  slot.shard = {};
  slot.filled_by = 0;
  slot.token = 0;
  slot.lost.reset();
  slot.descent.clear();
  HasCopy(slot, {}, 0);
  slots_changed_ = true;
  if (slot.bad && slot.writer) {
    return Quarantine(slot, "its file misbehaved and a process may have it mapped");
  }
  if (slot.bad) {
    return Delete(slot);
  }
  if (slot.extra && !slot.lent && !slot.writer) {
    return Delete(slot);
  }
  const JobUuid job = slot.job;
  if (removals_.count(job) > 0) {
    AdvanceRemoval(job);
  }
}

void Agent::Quarantine(Slot& slot, const std::string& why) {
  slot.state = SlotState::kQuarantined;
  slots_changed_ = true;
  Tell(Report::Kind::kSlotQuarantined, slot.job,
       absl::StrCat("slot ", slot.id, " waits for ",
                    slot.writer ? slot.writer->ToString() : "its readers", ": ", why),
       slot.bytes);
}

void Agent::LeaveQuarantine(Slot& slot) {
  if (slot.foreign || slot.writer || HeldByAnybody(slot)) {
    return;
  }
  Tell(Report::Kind::kSlotReleased, slot.job,
       absl::StrCat("slot ", slot.id, " is nobody's any more"), slot.bytes);
  // Found at start without a copy: whose bytes are in it is unknown, so nobody may get to see them.
  if (!slot.owned) {
    return Delete(slot);
  }
  BecomeFree(slot);
}

void Agent::Delete(Slot& slot) {
  slot.state = SlotState::kDeleting;
  Act(DeleteSlot{slot.id});
}

void Agent::OnSlotDeleted(const SlotDeleted& e) {
  Slot* slot = FindSlot(e.slot);
  if (slot == nullptr || slot->state != SlotState::kDeleting) {
    return;
  }
  if (!e.status.ok() && e.status.code() != absl::StatusCode::kNotFound) {
    deletes_again_.insert({time_.now + kDeleteRetry, slot->id});
    return;
  }
  bytes_used_ -= slot->bytes + slot->beside;
  retired_[slot->id] = slot->generation;
  const JobUuid job = slot->job;
  slots_.erase(e.slot);
  slots_changed_ = true;
  for (const RequestToken token : waiting_for_room_) {
    pending_.at(token).no_create = false;  // memory came back
  }
  if (removals_.count(job) > 0) {
    AdvanceRemoval(job);
  }
}

// Its writer has ended, or has unmapped it.
void Agent::ReleaseWriter(Slot& slot, const std::string& why) {
  SetWriter(slot, std::nullopt);
  slots_changed_ = true;
  switch (slot.state) {
    case SlotState::kNoting:
      if (!slot.fetch) {
        LoseFilling(slot, why);  // it becomes free when the note has been written
      }
      break;
    case SlotState::kWriting:
      LoseFilling(slot, why);
      BecomeFree(slot);
      break;
    case SlotState::kQuarantined:
      LeaveQuarantine(slot);
      break;
    case SlotState::kFree:
      if (slot.bad) {
        Delete(slot);
      }
      break;
    default:
      break;
  }
}

void Agent::OnReleaseSlots(ConnectionId id, const Caller& caller, const v1::ClientFrame& frame) {
  for (const uint32_t released : frame.release_slots().slots()) {
    Slot* slot = FindSlot(released);
    if (slot == nullptr || slot->writer != caller.process) {
      continue;
    }
    if (slot->state == SlotState::kNoting || slot->state == SlotState::kHanding) {
      slot->mapped_on = 0;  // if it is granted now, its descriptor comes again
    } else {
      ReleaseWriter(*slot, absl::StrCat(caller.process.ToString(), " released slot ", released));
      if (slot->state != SlotState::kDeleting) {
        NoteSlot(*slot);
      }
    }
  }
  ReplyDone(id, frame);
}

// A process that joins again says thereby that nothing of it writes any more into what it got on an
// earlier connection.
void Agent::Reclaim(const Seat& seat) {
  const uint32_t max = config_.memory().slots_per_rank();
  for (auto& [id, slot] : slots_) {
    if (slot.writer != seat.process || slot.bad || slot.foreign) {
      continue;
    }
    const bool mine = slot.owned && slot.job == seat.job && slot.rank == seat.rank;
    if (mine && slot.state == SlotState::kWriting && slot.lost) {
      BecomeFree(slot);
    }
    if (slot.state != SlotState::kQuarantined || HeldByAnybody(slot)) {
      continue;
    }
    if (!slot.owned && CountForRank(seat) < max) {
      slot.owned = true;
      slot.job = seat.job;
      slot.rank = seat.rank;
      slot.uid = seat.uid;
      BecomeFree(slot);
    } else if (mine) {
      BecomeFree(slot);
    }
  }
}

}  // namespace holdfast
