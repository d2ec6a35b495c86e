// Flushes of one checkpoint into a tier that have not ended: whose shard, and what it is read from.
// How many are read from which tier is counted as they come and go: it is asked for every save that
// needs room.
//
//   waits.Set(rank, {TierKind::kMemory, node});
//   if (waits.ReadFrom(TierKind::kMemory)) …
//   waits.Erase(rank);
//
// Owned by a Checkpoint's Drain; not thread-safe.
#pragma once

#include <array>
#include <cstdint>

#include "absl/container/btree_map.h"
#include "base/ids.h"
#include "server/copy_place.h"

namespace holdfast {

class FlushWaits {
 public:
  using Map = absl::btree_map<Rank, CopyPlace>;

  void Set(Rank rank, CopyPlace from) {
    Erase(rank);
    all_.emplace(rank, from);
    ++from_[static_cast<size_t>(from.tier)];
  }
  void Erase(Rank rank) {
    if (const auto it = all_.find(rank); it != all_.end()) {
      --from_[static_cast<size_t>(it->second.tier)];
      all_.erase(it);
    }
  }
  void Clear() {
    all_.clear();
    from_ = {};
  }
  // Null: none of that rank's is under way.
  const CopyPlace* Find(Rank rank) const {
    const auto it = all_.find(rank);
    return it == all_.end() ? nullptr : &it->second;
  }
  bool ReadFrom(TierKind tier) const { return from_[static_cast<size_t>(tier)] > 0; }
  bool empty() const { return all_.empty(); }
  size_t size() const { return all_.size(); }
  Map::const_iterator begin() const { return all_.begin(); }
  Map::const_iterator end() const { return all_.end(); }

 private:
  Map all_;
  std::array<uint32_t, kTierKinds> from_{};
};

}  // namespace holdfast
