// What lies on this node's drives, for other nodes that want to read it: through a slot (docs/
// protocol.md §19). Each is filled from the drive, verified, handed to who asked, and goes when the
// last of them has let go. It waits for nobody: nodes that read from each other do not wait in a
// circle.
#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "server/agent_in_turn.h"

namespace holdfast {

void Agent::LoadFor(AdminToken token, const ShardId& shard) {
  const DriveCopies::Copy* copy = drive_copies_.Find(shard);
  if (copy == nullptr || copy->bad || copy->state != DriveCopies::State::kThere) {
    return RefuseAdmin(token, absl::NotFoundError(absl::StrCat(
                                  shard.ToString(), " lies neither in memory nor on a drive of ",
                                  nodes_.Name(kHere), " (any more)")));
  }
  if (loads_.count(shard) == 0 && loads_.size() >= kSeatsMax) {
    return RefuseAdmin(token,
                       absl::ResourceExhaustedError("too many shards are being waited for here"));
  }
  const auto [entry, fresh] = loads_.try_emplace(shard);
  Load& load = entry->second;
  load.waiting.push_back(token);
  if (!fresh) {
    return;
  }
  load.turn = ++turns_;
  load.bytes = std::max(RoundUp(copy->copy.copy.image_bytes, kSlotBytesUnit), kSlotBytesUnit);
  load.world_size = copy->copy.copy.world_size;
  load.until = time_.now + kPrefetchDeadline;
  loads_due_ = true;
}

void Agent::AdvanceLoads() {
  if (std::exchange(loads_due_, false)) {
    StartInTurn(loads_, kLoadsAtOnce, &Agent::PlaceLoad);
  }
}

// Beside what the node lends to replicas, and of what is promised to saves: they get it back soon.
void Agent::PlaceLoad(const ShardId& shard) {
  if (const Slot* slot = FindSealed(shard); slot != nullptr && !slot->bad) {
    return EndLoad(shard, absl::OkStatus());
  }
  if (fetches_.count(shard) > 0) {
    return;  // its end is this one's, too
  }
  const auto job = jobs_.find(shard.job);
  if (job == jobs_.end() || removals_.count(shard.job) > 0) {
    return EndLoad(shard, absl::AbortedError("the job is not known here (any more)"));
  }
  Load& load = loads_.at(shard);
  if (Slot* free = FreeLentSlot(shard, job->second.uid, load.bytes)) {
    load.slot = free->id;
    FillFrom(*free, shard, job->second.uid, load.world_size, TierKind::kNvme, {});
    free->loaded = true;
    return;
  }
  if (bytes_used_ + load.bytes > bytes_max_ || slots_.size() >= config_.memory().slots_max()) {
    uint64_t coming = 0;
    for (auto& [id, slot] : slots_) {
      if (slot.lent && Deletable(slot)) {
        Delete(slot);
      }
      coming += slot.lent && ComesBack(slot) ? slot.bytes : 0;
    }
    if (coming < load.bytes && !TakeFromReplicas(load.bytes, Limit::kBudget)) {
      EndLoad(shard, absl::ResourceExhaustedError(
                         absl::StrCat("no free room for ", FormatBytes(load.bytes),
                                      ": the node holds ", FormatBytes(bytes_used_), " of ",
                                      FormatBytes(bytes_max_), " (memory.bytes_max)")));
    }
    return;  // when it has gone
  }
  Seat seat;
  seat.job = shard.job;
  seat.rank = shard.rank;
  seat.uid = job->second.uid;
  Slot& slot = CreateSlotFor(seat, load.bytes, false, 0);
  slot.ahead = slot.extra = slot.lent = true;
  load.slot = slot.id;
}

bool Agent::LoadSlotMade(Slot& slot) {
  const auto load = std::find_if(loads_.begin(), loads_.end(),
                                 [&](const auto& each) { return each.second.slot == slot.id; });
  if (load == loads_.end()) {
    return false;
  }
  const ShardId shard = load->first;
  const Slot* sealed = FindSealed(shard);
  const auto job = jobs_.find(shard.job);
  if (fetches_.count(shard) > 0 || (sealed != nullptr && !sealed->bad) || job == jobs_.end()) {
    load->second.slot.reset();  // a restore was faster
    loads_due_ = true;
    return false;
  }
  FillFrom(slot, shard, job->second.uid, load->second.world_size, TierKind::kNvme, {});
  slot.loaded = true;
  return true;
}

bool Agent::LoadSlotFailed(SlotId id, const absl::Status& status) {
  const auto load = std::find_if(loads_.begin(), loads_.end(),
                                 [&](const auto& each) { return each.second.slot == id; });
  if (load == loads_.end()) {
    return false;
  }
  EndLoad(ShardId(load->first),
          absl::ResourceExhaustedError(absl::StrCat("making a slot failed: ", Message(status))));
  return true;
}

// (What is wrong with it here is no verdict on what the other node has read: that was nothing.)
void Agent::EndLoad(const ShardId& shard, const absl::Status& status) {
  auto ended = loads_.extract(shard);
  if (ended.empty()) {
    return;
  }
  loads_due_ = true;
  Slot* slot = FindSealed(shard);
  for (const AdminToken token : ended.mapped().waiting) {
    if (slot != nullptr && !slot->bad) {
      HandShard(token, *slot);
    } else {
      RefuseAdmin(token, absl::UnavailableError(absl::StrCat(
                             "its copy on a drive of ", nodes_.Name(kHere), ": ",
                             status.ok() ? "it was given up meanwhile" : Message(status))));
    }
  }
}

void Agent::ExpireLoads() {
  const std::map<ShardId, Load> all = loads_;
  for (const auto& [shard, load] : all) {
    if (load.until <= time_.now) {
      EndLoad(shard, absl::DeadlineExceededError("the time for it is up"));
    }
  }
}

// Somebody waits for what is on its way.
bool Agent::Awaited(const ShardId& shard, const Fetch& fetch) const {
  return !fetch.waiting.empty() || loads_.count(shard) > 0;
}

}  // namespace holdfast
