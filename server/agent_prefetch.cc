// Copies brought into memory ahead of a restore (docs/protocol.md §10), as the job's host asks when
// a restore point was set. Only memory that nobody is entitled to is taken for it, a few at a time,
// and whoever needs it in the meantime gets it back. Once it is there it is a sealed copy like any
// other; a restore that comes earlier waits for the same fetch.
#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "server/agent_in_turn.h"

namespace holdfast {

void Agent::TakeMessage(const JobUuid& job, const PrefetchWanted& m) {
  // Another restore point was set since.
  std::map<ShardId, Prefetch> others;
  for (const auto& [shard, prefetch] : prefetches_) {
    if (shard.job == job && shard.checkpoint() != m.checkpoint) {
      others.emplace(shard, prefetch);
    }
  }
  for (const auto& [shard, prefetch] : others) {
    TakeMessage(job, PrefetchUnwanted{shard.checkpoint()});
  }
  for (const PrefetchWanted::Shard& wanted : m.shards) {
    const ShardId shard{job, m.checkpoint.attempt, m.checkpoint.step, wanted.rank};
    const uint64_t bytes = std::max(RoundUp(wanted.bytes, kSlotBytesUnit), kSlotBytesUnit);
    absl::Status refused;
    if (jobs_.count(job) == 0 || removals_.count(job) > 0) {
      refused = absl::AbortedError("the job is not known here (any more)");
    } else if (prefetches_.count(shard) == 0 && prefetches_.size() >= kSeatsMax) {
      refused = absl::ResourceExhaustedError("too many shards are being waited for here");
    }
    if (!refused.ok()) {
      Send(job, PrefetchEnded{m.checkpoint, wanted.rank, wanted.from, std::move(refused)});
      continue;
    }
    const auto [entry, fresh] = prefetches_.try_emplace(shard);
    Prefetch& prefetch = entry->second;
    prefetch.turn = fresh ? ++turns_ : prefetch.turn;
    if (!prefetch.slot) {
      prefetch.from = wanted.from;
      prefetch.peer = wanted.peer;
    }
    prefetch.bytes = bytes;
    prefetch.world_size = m.world_size;
    prefetch.until = time_.now + kPrefetchDeadline;
  }
  prefetch_due_ = true;
}

void Agent::TakeMessage(const JobUuid& job, const PrefetchUnwanted& m) {
  static const Failure kUnwanted{absl::StatusCode::kAborted, v1::Failure::REASON_UNSPECIFIED,
                                 "it is not to be restored any more"};
  auto it = prefetches_.lower_bound({job, m.checkpoint.attempt, m.checkpoint.step, 0});
  while (it != prefetches_.end() && it->first.job == job &&
         it->first.checkpoint() == m.checkpoint) {
    StopPrefetch(it->first, it->second, kUnwanted);
    it = prefetches_.erase(it);
  }
  prefetch_due_ = true;
}

// Whoever waits for room comes first.
void Agent::AdvancePrefetches() {
  if (prefetch_due_ && waiting_for_room_.empty()) {
    prefetch_due_ = false;
    StartInTurn(prefetches_, kPrefetchesAtOnce, &Agent::PlacePrefetch);
  }
}

void Agent::PlacePrefetch(const ShardId& shard) {
  if (Slot* slot = FindSealed(shard); slot != nullptr && !slot->bad) {
    if (slot->loaded) {
      Adopt(*slot);  // it stays
    }
    return EndPrefetch(shard, absl::OkStatus());
  }
  if (fetches_.count(shard) > 0) {
    return;  // for a restore; its end is this one's, too
  }
  const auto job = jobs_.find(shard.job);
  if (job == jobs_.end() || removals_.count(shard.job) > 0) {
    return EndPrefetch(shard, absl::AbortedError("the job is not known here (any more)"));
  }
  Prefetch& prefetch = prefetches_.at(shard);
  if (Slot* free = FreeSlotFor(shard, job->second.uid, prefetch.bytes)) {
    return StartPrefetch(*free, shard);
  }
  // A rank that lives keeps what it is entitled to, and gets this beside it.
  const uint32_t own_max = config_.memory().slots_per_rank();
  Seat seat;
  seat.job = shard.job;
  seat.rank = shard.rank;
  seat.uid = job->second.uid;
  const bool extra = AnySeatOf(shard.job, shard.rank) || CountForRank(seat) >= own_max;
  const auto extras = std::count_if(slots_.begin(), slots_.end(), [&](const auto& s) {
    return s.second.extra && !s.second.lent && s.second.job == shard.job &&
           s.second.rank == shard.rank;
  });
  const uint64_t promised = BytesPromised(prefetch.bytes);
  if (!MemoryHas(seat.uid, promised + prefetch.bytes) ||
      slots_.size() >= config_.memory().slots_max() || extras >= int64_t{own_max}) {
    return EndPrefetch(
        shard, absl::ResourceExhaustedError(absl::StrCat(
                   "no free room for ", FormatBytes(prefetch.bytes), ": the node holds ",
                   FormatBytes(bytes_used_), " of ", FormatBytes(bytes_max_), " (memory.bytes_max)",
                   promised > 0 ? absl::StrCat(", and keeps ", FormatBytes(promised),
                                               " for the next saves of ranks that run here")
                                : "")));
  }
  Slot& slot = CreateSlotFor(seat, prefetch.bytes, false, 0);
  slot.ahead = true;
  slot.extra = extra;
  prefetch.slot = slot.id;
}

// One that only ended ranks could use.
Agent::Slot* Agent::FreeSlotFor(const ShardId& shard, uint32_t uid, uint64_t bytes) {
  if (AnySeatOf(shard.job, shard.rank)) {
    return nullptr;
  }
  Slot* best = nullptr;
  for (auto& [id, slot] : slots_) {
    if (!slot.owned || slot.lent || slot.uid != uid || !Deletable(slot) || !Fits(slot, bytes) ||
        !Orphan(slot)) {
      continue;
    }
    const bool own = slot.job == shard.job && slot.rank == shard.rank;
    if (own || best == nullptr) {
      best = &slot;
    }
    if (own) {
      break;
    }
  }
  return best;
}

// What the ranks that live here may still make of slots.
uint64_t Agent::BytesPromised(uint64_t bytes_at_least) const {
  struct Has {
    uint32_t slots = 0;
    uint64_t largest = 0;
  };
  std::map<std::pair<JobUuid, Rank>, Has> ranks;
  for (const auto& [id, seat] : seats_.all()) {
    if (!seat.superseded) {
      ranks[{seat.job, seat.rank}];
    }
  }
  for (const auto& [id, slot] : slots_) {
    const auto rank = ranks.find({slot.job, slot.rank});
    if (slot.owned && !slot.extra && slot.state != SlotState::kDeleting && rank != ranks.end()) {
      ++rank->second.slots;
      rank->second.largest = std::max(rank->second.largest, slot.bytes);
    }
  }
  const uint32_t max = config_.memory().slots_per_rank();
  uint64_t bytes = 0;
  for (const auto& [rank, has] : ranks) {
    const uint64_t size = has.slots > 0 ? has.largest : bytes_at_least;
    bytes += (max - std::min(max, has.slots)) * size;
  }
  return bytes;
}

void Agent::StartPrefetch(Slot& slot, const ShardId& shard) {
  Prefetch& prefetch = prefetches_.at(shard);
  slot.ahead = true;
  prefetch.slot = slot.id;
  FillFrom(
      slot, shard, jobs_.at(shard.job).uid, prefetch.world_size, prefetch.from,
      prefetch.peer.empty() ? std::vector<std::string>() : std::vector<std::string>{prefetch.peer});
}

void Agent::PrefetchSlotMade(Slot& slot) {
  if (ReplicaSlotMade(slot)) {
    return;
  }
  for (const auto& [shard, prefetch] : prefetches_) {
    if (prefetch.slot != slot.id) {
      continue;
    }
    const ShardId wanted = shard;
    const Slot* sealed = FindSealed(wanted);
    if (fetches_.count(wanted) > 0 || (sealed != nullptr && !sealed->bad) ||
        jobs_.count(wanted.job) == 0) {
      break;  // a restore was faster
    }
    return StartPrefetch(slot, wanted);
  }
  for (auto& [shard, prefetch] : prefetches_) {
    if (prefetch.slot == slot.id) {
      prefetch.slot.reset();
    }
  }
  BecomeFree(slot);
}

void Agent::PrefetchSlotFailed(SlotId id, const absl::Status& status) {
  if (ReplicaSlotFailed(id, status)) {
    return;
  }
  for (const auto& [shard, prefetch] : prefetches_) {
    if (prefetch.slot == id) {
      return EndPrefetch(ShardId(shard), absl::ResourceExhaustedError(absl::StrCat(
                                             "making a slot failed: ", Message(status))));
    }
  }
}

// What it has begun ends soon. Not if a restore waits for it: then that is the restore's. True if
// its memory comes back.
bool Agent::StopPrefetch(const ShardId& shard, const Prefetch& prefetch, const Failure& why) {
  Slot* slot = prefetch.slot ? FindSlot(*prefetch.slot) : nullptr;
  if (slot == nullptr) {
    return false;
  }
  if (slot->state == SlotState::kCreating) {
    return true;
  }
  const auto fetch = fetches_.find(shard);
  if (fetch == fetches_.end() || fetch->second.slot != slot->id || Awaited(shard, fetch->second)) {
    return false;
  }
  slot->lost = why;
  if (fetch->second.drain != 0) {
    Act(CancelDrain{fetch->second.drain});
  }
  fetches_.erase(fetch);  // who restores it now has a fetch of its own
  return true;
}

void Agent::EndPrefetch(const ShardId& shard, const absl::Status& status) {
  const auto it = prefetches_.find(shard);
  if (it == prefetches_.end()) {
    return;
  }
  Send(shard.job, PrefetchEnded{shard.checkpoint(), shard.rank, it->second.from, status});
  prefetches_.erase(it);
  prefetch_due_ = true;
}

// A save or a restore is short of room: what prefetches have taken comes back to it. True if it is
// on its way; what hangs is not waited for.
bool Agent::TakeFromPrefetches(const Seat& seat, uint64_t bytes, Limit limit) {
  const auto of_use = [&](const Slot& slot) {
    return limit == Limit::kBudget || (limit == Limit::kUser && slot.uid == seat.uid) ||
           (slot.job == seat.job && slot.rank == seat.rank && !slot.extra);
  };
  const auto comes_back = [&](const Slot& slot) {
    const bool hangs = std::any_of(drains_.begin(), drains_.end(), [&](const auto& d) {
      const DrainOp& op = d.second;
      return op.kind == DrainOp::Kind::kFetch && !op.stalled.empty() && op.job == slot.shard.job &&
             op.checkpoint == slot.shard.checkpoint() && op.rank == slot.shard.rank;
    });
    const bool wanted = std::any_of(prefetches_.begin(), prefetches_.end(),
                                    [&](const auto& p) { return p.second.slot == slot.id; });
    return slot.ahead && !slot.lent && of_use(slot) && !hangs && !wanted;
  };
  uint64_t coming = 0;
  for (const auto& [id, slot] : slots_) {
    coming += comes_back(slot) && !fetches_.count(slot.shard) ? slot.bytes : 0;
  }
  static const Failure kTaken{absl::StatusCode::kAborted, v1::Failure::REASON_UNSPECIFIED,
                              "a save or a restore needs the room"};
  const std::map<ShardId, Prefetch> all = prefetches_;
  for (const auto& [shard, prefetch] : all) {
    const Slot* slot = prefetch.slot ? FindSlot(*prefetch.slot) : nullptr;
    if (coming < bytes && slot != nullptr && of_use(*slot) &&
        StopPrefetch(shard, prefetch, kTaken)) {
      EndPrefetch(shard, absl::ResourceExhaustedError(ToAbsl(kTaken.message)));
      coming += comes_back(*slot) ? slot->bytes : 0;
    }
  }
  return coming > 0;
}

bool Agent::HasExtra(const JobUuid& job) const {
  return std::any_of(slots_.begin(), slots_.end(), [&](const auto& s) {
    return s.second.extra && !s.second.lent && s.second.job == job;
  });
}

void Agent::ExpirePrefetches() {
  static const Failure kLate{absl::StatusCode::kDeadlineExceeded, v1::Failure::REASON_UNSPECIFIED,
                             "the time for it is up"};
  const std::map<ShardId, Prefetch> all = prefetches_;
  for (const auto& [shard, prefetch] : all) {
    if (prefetch.until <= time_.now) {
      StopPrefetch(shard, prefetch, kLate);
      EndPrefetch(shard, absl::DeadlineExceededError(ToAbsl(kLate.message)));
    }
  }
}

}  // namespace holdfast
