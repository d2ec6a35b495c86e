// Replicas: shards of other nodes that are kept in this one's memory (docs/protocol.md §19), as the
// jobs' hosts ask. They are read from where they lie into slots of their own, lent out of
// memory.peer_bytes_max; what runs here comes first, and takes them back when memory is short.
#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "server/agent_in_turn.h"

namespace holdfast {

uint64_t Agent::LendsBytes() const {
  if (!clustered()) {
    return 0;
  }
  const v1::MemoryConfig& memory = config_.memory();
  return std::min(memory.has_peer_bytes_max() ? memory.peer_bytes_max() : bytes_max_ / 2,
                  bytes_max_);
}

uint64_t Agent::LentBytes() const {
  uint64_t bytes = 0;
  for (const auto& [id, slot] : slots_) {
    bytes += slot.lent ? slot.bytes : 0;
  }
  return bytes;
}

// Coarsest first, as the operator wrote them.
google::protobuf::RepeatedPtrField<v1::Label> Agent::OwnLabels() const {
  for (const v1::ClusterMember& member : config_.cluster().members()) {
    if (member.name() == nodes_.Name(kHere) && member.labels_size() > 0) {
      return member.labels();
    }
  }
  return config_.cluster().labels();
}

void Agent::TakeReplicas(const JobUuid& job, const FlushWanted& m) {
  for (const FlushWanted::Shard& wanted : m.shards) {
    const ShardId shard{job, m.checkpoint.attempt, m.checkpoint.step, wanted.rank};
    const uint64_t bytes = std::max(RoundUp(wanted.bytes, kSlotBytesUnit), kSlotBytesUnit);
    absl::Status refused;
    if (jobs_.count(job) == 0 || removals_.count(job) > 0) {
      refused = absl::NotFoundError("the job is not known here (any more)");
    } else if (draining_) {
      refused = absl::ResourceExhaustedError(
          absl::StrCat(nodes_.Name(kHere), " is being drained (ckptctl drain)"));
    } else if (bytes > LendsBytes()) {
      refused = absl::ResourceExhaustedError(
          absl::StrCat("the shard has ", FormatBytes(wanted.bytes), ", and ", nodes_.Name(kHere),
                       " lends ", FormatBytes(LendsBytes()), " (memory.peer_bytes_max)"));
    } else if (replicas_.count(shard) == 0 && replicas_.size() >= kSeatsMax) {
      refused = absl::ResourceExhaustedError("too many replicas are being waited for here");
    }
    if (!refused.ok()) {
      AnswerReplica(shard, wanted.from, std::move(refused), wanted.peer);
      continue;
    }
    const auto [entry, fresh] = replicas_.try_emplace(shard);
    Replica& replica = entry->second;  // (of one that is under way the end answers)
    replica.turn = fresh ? ++turns_ : replica.turn;
    replica.from = wanted.from;
    replica.peer = wanted.peer;
    replica.bytes = bytes;
    replica.world_size = m.world_size;
  }
  replicas_due_ = true;
}

// Whoever waits for room comes first.
void Agent::AdvanceReplicas() {
  if (replicas_due_ && waiting_for_room_.empty()) {
    replicas_due_ = false;
    StartInTurn(replicas_, kReplicasAtOnce, &Agent::PlaceReplica);
  }
}

void Agent::PlaceReplica(const ShardId& shard) {
  if (Slot* slot = FindSealed(shard); slot != nullptr && !slot->bad) {
    slot->loaded = false;  // it stays
    return EndReplica(shard, absl::OkStatus(), "");
  }
  if (fetches_.count(shard) > 0) {
    return;  // its end is this one's, too
  }
  const auto job = jobs_.find(shard.job);
  if (job == jobs_.end() || removals_.count(shard.job) > 0) {
    return EndReplica(shard, absl::NotFoundError("the job is not known here (any more)"), "");
  }
  Replica& replica = replicas_.at(shard);
  if (Slot* free = FreeLentSlot(shard, job->second.uid, replica.bytes)) {
    replica.slot = free->id;
    return FillFrom(*free, shard, job->second.uid, replica.world_size, TierKind::kPeer,
                    {replica.peer});
  }
  // What other jobs, or replicas of another size, have left goes first.
  uint64_t coming = 0;
  for (auto& [id, slot] : slots_) {
    const bool short_of = LentBytes() - coming + replica.bytes > LendsBytes();
    if (slot.lent && slot.state == SlotState::kDeleting) {
      coming += slot.bytes;
    } else if (slot.lent && short_of && Deletable(slot)) {
      coming += slot.bytes;
      Delete(slot);
    } else if (slot.lent && slot.state == SlotState::kUnpublishing) {
      coming += slot.bytes;
    }
  }
  if (LentBytes() + replica.bytes > LendsBytes()) {
    if (coming > 0 && LentBytes() - coming + replica.bytes <= LendsBytes()) {
      return;  // when it has gone
    }
    return EndReplica(shard,
                      absl::ResourceExhaustedError(absl::StrCat(
                          nodes_.Name(kHere), " keeps ", FormatBytes(LentBytes()), " of the ",
                          FormatBytes(LendsBytes()), " that it lends (memory.peer_bytes_max), and ",
                          FormatBytes(replica.bytes), " more are wanted")),
                      "");
  }
  const uint64_t promised = BytesPromised(replica.bytes);
  if (bytes_used_ + promised + replica.bytes > bytes_max_ ||
      slots_.size() >= config_.memory().slots_max()) {
    return EndReplica(
        shard,
        absl::ResourceExhaustedError(absl::StrCat(
            nodes_.Name(kHere), " has no free room for ", FormatBytes(replica.bytes), ": it holds ",
            FormatBytes(bytes_used_), " of ", FormatBytes(bytes_max_), " (memory.bytes_max)",
            promised > 0 ? absl::StrCat(", and keeps ", FormatBytes(promised),
                                        " for the next saves of ranks that run there")
                         : "")),
        "");
  }
  Seat seat;
  seat.job = shard.job;
  seat.rank = shard.rank;
  seat.uid = job->second.uid;
  Slot& slot = CreateSlotFor(seat, replica.bytes, false, 0);
  slot.ahead = slot.extra = slot.lent = true;
  replica.slot = slot.id;
}

// (Another user's bytes are never handed on.)
Agent::Slot* Agent::FreeLentSlot(const ShardId& shard, uint32_t uid, uint64_t bytes) {
  for (auto& [id, slot] : slots_) {
    if (slot.lent && slot.job == shard.job && slot.uid == uid && Deletable(slot) &&
        Fits(slot, bytes)) {
      return &slot;
    }
  }
  return nullptr;
}

bool Agent::ReplicaSlotMade(Slot& slot) {
  if (!slot.lent) {
    return false;
  }
  slot.ahead = false;
  if (LoadSlotMade(slot)) {
    return true;
  }
  for (auto& [shard, replica] : replicas_) {
    if (replica.slot != slot.id) {
      continue;
    }
    const Slot* sealed = FindSealed(shard);
    const auto job = jobs_.find(shard.job);
    if (fetches_.count(shard) > 0 || (sealed != nullptr && !sealed->bad) || job == jobs_.end()) {
      replica.slot.reset();  // a restore was faster
      break;
    }
    FillFrom(slot, shard, job->second.uid, replica.world_size, TierKind::kPeer, {replica.peer});
    return true;
  }
  BecomeFree(slot);
  return true;
}

bool Agent::ReplicaSlotFailed(SlotId id, const absl::Status& status) {
  if (LoadSlotFailed(id, status)) {
    return true;
  }
  for (const auto& [shard, replica] : replicas_) {
    if (replica.slot == id) {
      EndReplica(
          ShardId(shard),
          absl::ResourceExhaustedError(absl::StrCat("making a slot failed: ", Message(status))),
          "");
      return true;
    }
  }
  return false;
}

void Agent::EndReplica(const ShardId& shard, const absl::Status& status, const std::string& peer) {
  const auto it = replicas_.find(shard);
  if (it == replicas_.end()) {
    return;
  }
  const Replica replica = it->second;
  replicas_.erase(it);
  replicas_due_ = true;
  AnswerReplica(shard, replica.from, status, peer.empty() ? replica.peer : peer);
}

void Agent::AnswerReplica(const ShardId& shard, TierKind from, absl::Status status,
                          const std::string& peer) {
  ShardDrained ended;
  ended.checkpoint = shard.checkpoint();
  ended.rank = shard.rank;
  ended.to = TierKind::kPeer;
  ended.from = from;
  ended.peer = peer;
  const Slot* slot = FindSealed(shard);
  if (status.ok() && slot != nullptr && slot->lent) {
    ended.copy.copy = slot->copy;
    ended.copy.copy.generation = 0;
  } else if (status.ok()) {
    status = absl::FailedPreconditionError("its rank runs here, and has it in memory");
  }
  ended.status = std::move(status);
  Send(shard.job, std::move(ended));
}

// What is on its way ends soon; unless a restore waits for it.
void Agent::StopReplicas(const JobUuid& job, std::optional<CheckpointId> checkpoint,
                         const Failure& why) {
  std::vector<ShardId> over;
  for (const auto& [shard, replica] : replicas_) {
    if (shard.job == job && (!checkpoint || shard.checkpoint() == *checkpoint)) {
      over.push_back(shard);
    }
  }
  for (const ShardId& shard : over) {
    StopReplica(shard, why);
  }
}

void Agent::StopReplica(const ShardId& shard, const Failure& why) {
  const auto fetch = fetches_.find(shard);
  Slot* slot = replicas_.at(shard).slot ? FindSlot(*replicas_.at(shard).slot) : nullptr;
  if (slot != nullptr && fetch != fetches_.end() && fetch->second.slot == slot->id &&
      !Awaited(shard, fetch->second)) {
    slot->lost = why;
    if (fetch->second.drain != 0) {
      Act(CancelDrain{fetch->second.drain});
    }
    fetches_.erase(fetch);  // who restores it now has a fetch of its own
  }
  EndReplica(shard, absl::Status(why.code, ToAbsl(why.message)), "");
}

void Agent::RemoveReplicas(const JobUuid& job, const RemovalWanted& m) {
  static const Failure kGoes{absl::StatusCode::kAborted, v1::Failure::REASON_SHED,
                             "it is not kept any more"};
  StopReplicas(job, m.checkpoint, kGoes);
  std::vector<SlotId> going;
  for (auto it = shards_.lower_bound({job, m.checkpoint.attempt, m.checkpoint.step, 0});
       it != shards_.end() && it->first.job == job && it->first.checkpoint() == m.checkpoint;
       ++it) {
    const Slot& slot = slots_.at(it->second);
    if (slot.lent && slot.state == SlotState::kSealed) {
      going.push_back(slot.id);
    }
  }
  for (const SlotId id : going) {
    CancelDrainsOf(slots_.at(id));
    Unpublish(slots_.at(id));
  }
  Send(job, RemovalDone{m.checkpoint, m.tier, absl::OkStatus(), std::nullopt});
}

// Those that are on their way, as many as it takes: how many bytes come back.
uint64_t Agent::StopFillingReplicas(uint64_t bytes) {
  static const Failure kTaken{absl::StatusCode::kResourceExhausted, v1::Failure::REASON_SHED,
                              "a save or a restore there needed the memory"};
  uint64_t coming = 0;
  std::vector<ShardId> stopped;
  for (const auto& [shard, replica] : replicas_) {
    const Slot* slot = replica.slot ? FindSlot(*replica.slot) : nullptr;
    const auto fetch = fetches_.find(shard);
    const bool awaited = fetch != fetches_.end() && Awaited(shard, fetch->second);
    if (slot != nullptr && !awaited && coming < bytes) {
      coming += slot->bytes;
      stopped.push_back(shard);
    }
  }
  for (const ShardId& shard : stopped) {
    StopReplica(shard, kTaken);
  }
  return coming;
}

// It is lent, and is empty soon: nobody waits for what it was made for, or gets.
bool Agent::ComesBack(const Slot& slot) const {
  switch (slot.state) {
    case SlotState::kDeleting:
      return true;
    case SlotState::kUnpublishing:
      return !HeldByAnybody(slot);
    case SlotState::kNoting:
    case SlotState::kFetching:
      return slot.lost.has_value();
    case SlotState::kCreating: {
      const auto made_for = [&](const auto& each) { return each.second.slot == slot.id; };
      return std::none_of(replicas_.begin(), replicas_.end(), made_for) &&
             std::none_of(loads_.begin(), loads_.end(), made_for);
    }
    default:
      return false;
  }
}

// The slot is being made, or is being filled with it.
bool Agent::ComesInto(const ShardId& shard, const Slot& slot) const {
  const auto fetch = fetches_.find(shard);
  return slot.state == SlotState::kCreating ||
         (fetch != fetches_.end() && fetch->second.slot == slot.id);
}

// A save or a restore on this node is short of room: what is kept for others goes before anything
// of its own does, the oldest steps first. True if memory is on its way back.
bool Agent::TakeFromReplicas(uint64_t bytes, Limit limit) {
  if (limit != Limit::kBudget) {
    return false;
  }
  uint64_t coming = 0;
  std::vector<const Slot*> sealed;
  for (const auto& [id, slot] : slots_) {
    coming += slot.lent && ComesBack(slot) ? slot.bytes : 0;
    if (slot.lent && slot.state == SlotState::kSealed && slot.readers.empty() &&
        slot.admin_readers.empty()) {
      sealed.push_back(&slot);
    }
  }
  if (coming < bytes) {
    coming += StopFillingReplicas(bytes - coming);
  }
  std::sort(sealed.begin(), sealed.end(), [](const Slot* a, const Slot* b) {
    return std::tuple(a->copy.sealed_unix_ms, a->id) < std::tuple(b->copy.sealed_unix_ms, b->id);
  });
  std::map<std::pair<JobUuid, CheckpointId>, std::vector<Rank>> dropped;
  for (const Slot* each : sealed) {
    if (coming >= bytes) {
      break;
    }
    Slot& slot = slots_.at(each->id);
    coming += slot.bytes;
    dropped[{slot.shard.job, slot.shard.checkpoint()}].push_back(slot.shard.rank);
    CancelDrainsOf(slot);
    Unpublish(slot);
  }
  for (auto& [of, ranks] : dropped) {
    std::sort(ranks.begin(), ranks.end());
    Send(of.first, ReplicasDropped{of.second, std::move(ranks),
                                   "a save or a restore there needed the memory"});
  }
  return coming > 0;
}

// Its rank runs here now: it is the rank's own from now on.
void Agent::Adopt(Slot& slot) {
  if (!slot.lent || slot.state != SlotState::kSealed) {
    return;
  }
  slot.lent = slot.loaded = false;
  NoteSlot(slot);
  Send(slot.shard.job,
       MemoryCopyGained{slot.shard.checkpoint(), slot.shard.rank, slot.copy.image_bytes,
                        slot.copy.sealed_unix_ms, slot.copy.likeness});
}

}  // namespace holdfast
