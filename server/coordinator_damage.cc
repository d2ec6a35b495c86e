// Copies that a look at a tier found to be bad (docs/protocol.md §10): cut, damaged, or gone,
// though a manifest or their names say that they belong there. They count for nothing, are told,
// and are mended as any that is bad (coordinator_repair.cc).
#include <functional>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/coordinator.h"
#include "server/tier_lists.h"

namespace holdfast {

void Coordinator::TakeBad(const CopiesFound& m, Turn& t) {
  if (m.as_of != MonotonicTime{}) {  // it tells all that there is
    ForgetNamedBad([&](const RepairKey& key, const std::string&) {
      return key.place == PlaceOf(m.tier, t.from);
    });
  }
  for (const BadDurableCopy& bad : m.bad) {
    TakeBad(bad, m, t);
  }
  if (!m.bad.empty()) {
    MendFound(t);
  }
}

void Coordinator::TakeBad(const BadDurableCopy& bad, const CopiesFound& m, Turn& t) {
  const SealedCopy& copy = bad.copy.copy;
  const CheckpointId id = copy.id.checkpoint();
  const RepairKey key{id, copy.id.rank, PlaceOf(m.tier, t.from)};
  const bool told = copy.world_size > 0;  // by its record, or a manifest
  if (!MayLieThere(m, id, t) ||
      (told && IsAnotherSave(copy, m.tier, bad.copy.location, !bad.copy.from_manifest, t))) {
    return;
  }
  const auto known = checkpoints_.find(id);
  if (known != checkpoints_.end() && known->second.shards.count(key.rank) > 0) {
    const CopyState& now = known->second.shards.at(key.rank).at(key.place);
    const bool good = now.kind == CopyState::Kind::kGood;
    const bool written_since = good && !(now.detail.since < m.began);
    // (Of an image in the remote tier the name says how it is stored.)
    const bool on_another_drive =
        good && m.tier == TierKind::kNvme && now.detail.location != bad.copy.location;
    return written_since || on_another_drive ? void()
                                             : CountAsBad(key, bad.copy.location, bad.what, t);
  }
  if (!told) {  // nor is it known how large the shard is
    if (named_bad_.size() < kBadCopiesMax) {
      named_bad_.try_emplace(key, NamedBad{bad.copy.location, bad.what});
    }
    return;
  }
  NoteBegun(copy);
  AddCopy({id.attempt, key.rank, id.step, copy.world_size, copy.image_bytes, copy.sealed_unix_ms,
           !bad.copy.from_manifest, copy.likeness},
          m.tier, {CopyState::Kind::kBad, DetailOf(bad.copy), bad.what}, t);
  if (checkpoints_.count(id) > 0) {
    TellBad(id, key.rank, key.place, bad.what, t);
    to_mend_.insert(key);
  }
}

// Something else tells of the shard now: what lies under its names is a bad copy of it.
void Coordinator::TakeNamedBad(CheckpointId id, Rank rank, Turn& t) {
  std::map<RepairKey, NamedBad> found;
  for (auto it = named_bad_.lower_bound({id, rank, {}});
       it != named_bad_.end() && it->first.id == id && it->first.rank == rank;) {
    found.insert(named_bad_.extract(it++));
  }
  for (const auto& [key, bad] : found) {
    const auto known = checkpoints_.find(id);
    const bool there = known != checkpoints_.end() && known->second.shards.count(rank) > 0;
    // (A good one may have come there since.)
    if (there && known->second.shards.at(rank).at(key.place).kind == CopyState::Kind::kNone) {
      CountAsBad(key, bad.location, bad.what, t);
    }
  }
  if (!found.empty()) {
    MendFound(t);
  }
}

void Coordinator::CountAsBad(const RepairKey& key, const std::string& location,
                             const std::string& what, Turn& t) {
  Checkpoint& checkpoint = checkpoints_.at(key.id);
  const CopyState& now = checkpoint.shards.at(key.rank).at(key.place);
  if (now.kind == CopyState::Kind::kBad) {
    return;
  }
  CopyDetail detail = now.detail;
  detail.location = location;
  checkpoint.SetFoundBad(key.rank, key.place, std::move(detail), what);
  TellBad(key.id, key.rank, key.place, what, t);
  to_mend_.insert(key);
  Recheck(key.id, t);
}

void Coordinator::ForgetNamedBad(
    const std::function<bool(const RepairKey&, const std::string&)>& which) {
  std::erase_if(named_bad_, [&](const auto& bad) { return which(bad.first, bad.second.location); });
}

// What is good is known when all tiers have been read: before that nobody would be told right that
// there is none.
void Coordinator::MendFound(Turn& t) {
  if (InventoryPending()) {
    return;
  }
  for (const RepairKey& key : to_mend_) {
    const auto known = checkpoints_.find(key.id);
    if (known != checkpoints_.end() && known->second.shards.count(key.rank) > 0 &&
        known->second.shards.at(key.rank).at(key.place).kind == CopyState::Kind::kBad) {
      WantRepair(key, false);
    }
  }
  to_mend_.clear();
  for (auto& [key, bad] : named_bad_) {
    if (AllInventoriesKnown() && !std::exchange(bad.told, true)) {
      Tell(Report::Kind::kCopyUnmended,
           absl::StrCat("step ", key.id.step, " of attempt ", key.id.attempt, " rank ", key.rank,
                        ": its ", Name(key.place.tier), " copy is bad (", bad.what,
                        ") and stays as it is: nothing else tells of that shard"),
           0, t, key.place.tier);
    }
  }
}

}  // namespace holdfast
