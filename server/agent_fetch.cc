// Copies brought into memory for a restore (docs/protocol.md §10): the rank gets a slot as for a
// save, the runtime fills it from another tier and verifies it, and then it is a sealed copy like
// any other.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "server/agent.h"

namespace holdfast {

void Agent::FetchSource(RequestToken token, const SourceOffered& m) {
  Pending& pending = pending_.at(token);
  const ShardId id{pending.job, m.checkpoint.attempt, m.checkpoint.step, m.rank};
  pending.fetch = m;
  if (JoinFetch(token, id)) {
    return;
  }
  if (m.bytes > UserBytesMax()) {
    return FailFetch(
        token, m.from,
        absl::ResourceExhaustedError(absl::StrCat(
            "the shard has ", FormatBytes(m.bytes),
            ", more than all of its user's slots on this node may hold, ", UserBytesMaxText())),
        false);
  }
  pending.bytes = std::max(RoundUp(m.bytes, kSlotBytesUnit), kSlotBytesUnit);
  pending.where = Where::kRoom;
  pending.asked.clear();
  waiting_for_room_.insert(token);
  PlaceFetch(token);
}

// The shard is on its way for somebody else already, or has come meanwhile.
bool Agent::JoinFetch(RequestToken token, const ShardId& id) {
  Pending& pending = pending_.at(token);
  if (const auto fetch = fetches_.find(id); fetch != fetches_.end()) {
    pending.where = Where::kFetch;
    waiting_for_room_.erase(token);
    if (fetch->second.waiting.empty() && fetch->second.drain != 0) {
      Act(HurryFetch{fetch->second.drain});
    }
    fetch->second.waiting.insert(token);
    return true;
  }
  if (Slot* slot = FindSealed(id); slot != nullptr && !slot->bad) {
    waiting_for_room_.erase(token);
    OfferSession(token, *slot);
    return true;
  }
  return false;
}

void Agent::PlaceFetch(RequestToken token) {
  Pending& pending = pending_.at(token);
  const SourceOffered& wanted = *pending.fetch;
  if (JoinFetch(token,
                {pending.job, wanted.checkpoint.attempt, wanted.checkpoint.step, wanted.rank})) {
    return;
  }
  const Seat* seat = FindSeat(pending.seat);
  if (seat == nullptr || seat->superseded) {
    return Refuse(token, {absl::StatusCode::kAborted, v1::Failure::REASON_UNSPECIFIED,
                          "the rank has joined again since"});
  }
  const Allocation got = Allocate(*seat, pending, token);
  if (got.slot != nullptr) {
    return StartFetch(*got.slot, token);
  }
  if (got.coming) {
    if (got.limit == Limit::kNone) {
      pending.where = Where::kSlot;  // a slot is being made for it
    }
    return;
  }
  pending.limit = got.limit;
  if (!TakeFromPrefetches(*seat, pending.bytes, got.limit) &&
      !TakeFromReplicas(pending.bytes, got.limit) && !AskForRoom(token, *seat)) {
    FetchWithoutRoom(token, *seat);
  }
}

// Nobody gives up anything for it.
void Agent::FetchWithoutRoom(RequestToken token, const Seat& seat) {
  Pending& pending = pending_.at(token);
  if (DropWhatItReplaces({pending.job, pending.fetch->checkpoint.attempt,
                          pending.fetch->checkpoint.step, pending.fetch->rank})) {
    pending.where = Where::kRoom;  // its slot is on its way
    return;
  }
  if (RoomMayCome(pending, seat)) {
    pending.where = Where::kRoom;
    room_again_ = room_again_.value_or(time_.now + kRoomLook);
    return;
  }
  const TierKind from = pending.fetch->from;
  const Failure failure = NoRoom(pending, seat);
  waiting_for_room_.erase(token);
  FailFetch(token, from, absl::ResourceExhaustedError(ToAbsl(failure.message)), false);
}

// The bad copy of the shard, which is kept only until room is needed. All else that the rank holds
// may be what the restore falls back to.
bool Agent::DropWhatItReplaces(const ShardId& shard) {
  Slot* slot = FindSealed(shard);
  if (slot == nullptr || !slot->bad) {
    return false;
  }
  CancelDrainsOf(*slot);
  Unpublish(*slot);
  return true;
}

// The slot is free, and nobody but the rank's own process can have it mapped.
void Agent::StartFetch(Slot& slot, RequestToken token) {
  Pending& pending = pending_.at(token);
  const Seat& seat = *FindSeat(pending.seat);
  const SourceOffered& source = *pending.fetch;
  if (JoinFetch(token,
                {seat.job, source.checkpoint.attempt, source.checkpoint.step, source.rank})) {
    return BecomeFree(slot);
  }
  const ShardId shard{seat.job, source.checkpoint.attempt, source.checkpoint.step, source.rank};
  if (slot.writer && *slot.writer != seat.process) {
    SetWriter(slot, std::nullopt);
  }
  pending.where = Where::kFetch;
  waiting_for_room_.erase(token);
  FillFrom(slot, shard, seat.uid, seat.world_size, source.from, source.peers);
  fetches_.at(shard).readers = source.readers;
  fetches_.at(shard).waiting.insert(token);
}

void Agent::FillFrom(Slot& slot, const ShardId& shard, uint32_t uid, uint32_t world_size,
                     TierKind from, std::vector<std::string> peers) {
  slot.state = SlotState::kNoting;
  slot.fetch = true;
  slot.owned = true;
  slot.job = shard.job;
  slot.rank = shard.rank;
  slot.uid = uid;
  ++slot.generation;
  slot.shard = shard;
  slot.world_size = world_size;
  slot.filled_by = 0;
  slot.token = 0;
  slot.lost.reset();
  slot.loaded = false;
  Fetch& fetch = fetches_[shard];
  fetch.slot = slot.id;
  fetch.from = from;
  fetch.peers = std::move(peers);
  NoteSlot(slot);
  slot.grant_note = slot.note_version;
}

void Agent::FetchNoted(Slot& slot, const absl::Status& noted) {
  if (!noted.ok() || slot.lost) {
    const absl::Status why =
        noted.ok() ? absl::AbortedError(ToAbsl(slot.lost->message))
                   : Annotate(noted, absl::StrCat("slot ", slot.id, " could not be noted"));
    if (!noted.ok()) {
      CountFailure(slot, noted);
    }
    const ShardId shard = slot.shard;
    const Fetch fetch = TakeFetch(slot);
    BecomeFree(slot);
    EndAhead(shard, why);
    for (const RequestToken token : fetch.waiting) {
      FailFetch(token, fetch.from, why, false);
    }
    return;
  }
  slot.state = SlotState::kFetching;
  Fetch& fetch = fetches_.at(slot.shard);
  const Slot* before = FindSealed(slot.shard);
  DrainOp op;
  op.kind = DrainOp::Kind::kFetch;
  op.job = slot.shard.job;
  op.checkpoint = slot.shard.checkpoint();
  op.rank = slot.shard.rank;
  op.tier = fetch.from;
  op.bytes = slot.bytes;
  fetch.drain = BeginDrain(std::move(op));
  FetchShard action;
  action.drain = fetch.drain;
  action.from = fetch.from;
  action.key = {slot.shard, JobName(slot.shard.job), slot.world_size};
  action.slot = slot.id;
  action.generation = slot.generation;
  action.slot_bytes = slot.bytes;
  action.peers = fetch.peers;
  action.readers = fetch.readers;
  action.background = slot.lent && fetch.waiting.empty();
  if (before != nullptr) {
    action.replaces = before->id;
    slots_.at(before->id).drains.insert(fetch.drain);  // it stays what it is until then
    drains_.at(fetch.drain).replaces = before->id;
  }
  Act(std::move(action));
}

// Who waits for it ahead of a restore, or is to keep it for another node, hears.
void Agent::EndAhead(const ShardId& shard, const absl::Status& status, const std::string& peer) {
  EndPrefetch(shard, status);
  EndReplica(shard, status, peer);
  EndLoad(shard, status);
}

// It has ended, one way or the other.
Agent::Fetch Agent::TakeFetch(Slot& slot) {
  slot.fetch = false;
  const auto it = fetches_.find(slot.shard);
  if (it == fetches_.end() || it->second.slot != slot.id) {
    return {};  // given up before: another one may be under way
  }
  Fetch fetch = std::move(it->second);
  fetches_.erase(it);
  return fetch;
}

// Its tier does not answer. Who waits for it tries the next source, with another slot; this one is
// let go of when the tier does.
void Agent::GiveUpFetch(const DrainOp& op, DrainId drain, const std::string& why) {
  const auto it = fetches_.find({op.job, op.checkpoint.attempt, op.checkpoint.step, op.rank});
  if (it == fetches_.end() || it->second.drain != drain) {
    return;
  }
  const Fetch fetch = std::move(it->second);
  fetches_.erase(it);
  slots_.at(fetch.slot).lost =
      Failure{absl::StatusCode::kUnavailable, v1::Failure::REASON_UNSPECIFIED, why};
  Act(CancelDrain{drain});
  EndAhead({op.job, op.checkpoint.attempt, op.checkpoint.step, op.rank},
           absl::UnavailableError(why));
  for (const RequestToken token : fetch.waiting) {
    FailFetch(token, fetch.from, absl::UnavailableError(why), false);
  }
}

void Agent::OnFetchEnded(const FetchEnded& e) {
  const std::optional<DrainOp> op = EndDrain(e.drain);
  Slot* slot = FindSlot(e.slot);
  if (!op || slot == nullptr || slot->state != SlotState::kFetching ||
      slot->generation != e.generation) {
    return;
  }
  absl::Status status = e.status;
  if (status.ok() && (e.copy.id != slot->shard || e.copy.generation != slot->generation)) {
    status = absl::InternalError("another shard was fetched than was asked for");
  }
  if (status.ok() && slot->lost) {
    status = absl::AbortedError(ToAbsl(slot->lost->message));
  }
  const Fetch fetch = TakeFetch(*slot);
  const bool from_peer = op->tier == TierKind::kPeer;
  for (const std::string& peer : e.bad_peers) {
    Send(op->job, ShardBad{op->checkpoint, op->rank,
                           "what was read from there contradicts its digests", op->tier, peer});
  }
  if (!status.ok()) {
    Unpublish(*slot);  // part of it may have reached the directory
    const bool heard =
        std::any_of(fetch.waiting.begin(), fetch.waiting.end(),
                    [&](RequestToken token) { return FindPending(token) != nullptr; });
    if (e.source_bad && !from_peer) {
      NoteBad(slot->shard, op->tier, true);
    }
    if (fetch.slot == slot->id && fetch.drain == e.drain) {
      EndAhead(slot->shard, status, e.peer);
    }
    // One that had joined what came from fewer nodes than it was told of: from those that are left.
    const auto goes_on = [&](RequestToken token) {
      const Pending* pending = FindPending(token);
      if (!from_peer || pending == nullptr || !pending->fetch ||
          pending->fetch->from != TierKind::kPeer) {
        return false;
      }
      SourceOffered source = *pending->fetch;
      std::erase_if(source.peers, [&](const std::string& peer) {
        return std::find(fetch.peers.begin(), fetch.peers.end(), peer) != fetch.peers.end();
      });
      if (source.peers.empty()) {
        return false;
      }
      FetchSource(token, source);
      return true;
    };
    for (const RequestToken token : fetch.waiting) {
      if (!goes_on(token)) {
        FailFetch(token, fetch.from, status, e.source_bad && !from_peer);
      }
    }
    if (!heard && e.source_bad && !from_peer) {
      Send(op->job, ShardBad{op->checkpoint, op->rank, Message(status), op->tier});
    }
    return;
  }
  if (Slot* before = FindSealed(slot->shard); before != nullptr && before != slot) {
    // The bad copy that it replaces: its record is gone already.
    ForgetShard(*before);
    before->state = SlotState::kUnpublishing;
    before->removing = false;
    CancelDrainsOf(*before);
    AfterHold(*before);
  }
  slot->state = SlotState::kSealed;
  slot->ahead = false;
  slot->populated = true;
  slot->failures = 0;
  HasCopy(*slot, e.copy, e.record_bytes);
  shards_[slot->shard] = slot->id;
  slots_changed_ = true;
  Act(IndexShard{slot->copy, TierKind::kMemory, slot->id, ""});
  if (!slot->lent) {
    Send(op->job, MemoryCopyGained{op->checkpoint, op->rank, slot->copy.image_bytes,
                                   slot->copy.sealed_unix_ms, slot->copy.likeness});
  }
  if (replicas_.count(slot->shard) > 0) {
    slot->loaded = false;  // it stays
  }
  if (prefetches_.count(slot->shard) > 0) {
    Adopt(*slot);
  }
  // What is lent, and nobody asked for any more, would be known to nobody.
  const bool wanted =
      !slot->lent || replicas_.count(slot->shard) > 0 || Awaited(slot->shard, fetch);
  EndAhead(slot->shard, absl::OkStatus(), e.peer);
  for (const RequestToken token : fetch.waiting) {
    if (FindPending(token) != nullptr) {
      OfferSession(token, *slot);
    }
  }
  if (!wanted) {
    Unpublish(*slot);
  }
}

// The coordinator knows the next source, or ends it for all.
void Agent::FailFetch(RequestToken token, TierKind from, const absl::Status& status,
                      bool source_bad) {
  Pending* pending = FindPending(token);
  if (pending == nullptr || !pending->fetch) {
    return;
  }
  pending->where = Where::kCoordinator;
  const SourceOffered source = *pending->fetch;
  pending->fetch.reset();
  Send(pending->job, FetchFailed{token, source.attempt, source.rank, source.session, source.round,
                                 source.checkpoint, from, status, source_bad});
}

}  // namespace holdfast
