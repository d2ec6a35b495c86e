// One checkpoint as the decisions about it see it: how many of its shards lie where, and who needs
// it. The coordinator makes these; what follows from them (recovery/deletion.h, protection.h,
// drain_schedule.h, explain.h) are pure functions over them.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "base/ids.h"

namespace holdfast {

// A set of tiers, one bit each.
using TierSet = uint8_t;
inline constexpr size_t kTierSets = size_t{1} << kTierKinds;
inline constexpr TierSet kEveryTier = kTierSets - 1;
constexpr TierSet SetOf(TierKind tier) {
  return TierSet(1u << static_cast<unsigned>(tier));
}
constexpr bool Has(TierSet set, TierKind tier) {
  return (set & SetOf(tier)) != 0;
}

struct TierPresence {
  uint32_t good = 0;      // ranks with a good copy here; remote: none before its manifest is there
  uint32_t bad = 0;       // ranks whose copy here contradicted its digests or cannot be read
  uint32_t unlisted = 0;  // remote: copies that no manifest names yet
  bool promised = false;  // remote: it has, or has lost, what made it whole: it is no beginning
  // Remote: good copies that leave out what other ranks' copies have, of which one is bad or gone.
  uint32_t doubted = 0;
  uint64_t bytes = 0;     // what all that lies here takes
  bool flushing = false;  // copies are being written here
  bool wanted = false;    // chosen for this tier, and waits for its turn
  bool source = false;    // copies here are being read for another tier
};

struct CheckpointView {
  CheckpointId id;
  uint32_t world_size = 0;
  int64_t unix_ms = 0;       // sealed by its last rank
  int64_t left_unix_ms = 0;  // not on the line: when its branch was left; 0: not known
  bool consistent = true;    // false: its shards disagree about the world size
  bool complete = false;     // every rank has sealed it, once
  uint32_t restorable = 0;   // ranks with a good copy in any tier
  bool held = false;         // a session's candidate
  bool pinned = false;       // by `ckptctl pin`, or as the restore point
  // Of every rank that has a copy in a peer's memory that, or one of those, lies in another failure
  // domain than what is in its own memory and nvme.
  bool apart = false;
  std::array<TierPresence, kTierKinds> tiers;
  // Which ranks lie where cannot be told from counts per tier, and several tiers may have a step
  // only together: so the ranks are counted by the exact set of tiers in which their good copies
  // lie, [SetOf(kMemory) | SetOf(kNvme)] being those with one in memory and one in nvme. AddRank
  // fills it.
  std::array<uint32_t, kTierSets> ranks_in{};

  const TierPresence& at(TierKind tier) const { return tiers[static_cast<size_t>(tier)]; }
  TierPresence& at(TierKind tier) { return tiers[static_cast<size_t>(tier)]; }
  bool CommittedAt(TierKind tier) const {
    return consistent && world_size > 0 && at(tier).good == world_size;
  }
  bool Restorable() const { return consistent && world_size > 0 && restorable == world_size; }

  // One rank whose good copies lie in `in`: counted in `good` of each, `restorable`, `ranks_in`.
  void AddRank(TierSet in) {
    for (TierKind tier : kAllTiers) {
      at(tier).good += Has(in, tier) ? 1 : 0;
    }
    restorable += in != 0 ? 1 : 0;
    ++ranks_in[in];
  }
  // Ranks with a good copy in at least one of these tiers.
  uint32_t RanksIn(TierSet any_of) const {
    uint32_t ranks = 0;
    for (size_t in = 0; in < kTierSets; ++in) {
      ranks += (in & any_of) != 0 ? ranks_in[in] : 0;
    }
    return ranks;
  }
  // Every rank has a good copy in at least one of these tiers.
  bool WholeIn(TierSet any_of) const {
    return consistent && world_size > 0 && RanksIn(any_of) == world_size;
  }
  // As it will be when nothing of it lies in `tier` any more.
  CheckpointView Without(TierKind tier) const {
    CheckpointView left = *this;
    left.at(tier) = {};
    left.ranks_in = {};
    for (size_t in = 0; in < kTierSets; ++in) {
      left.ranks_in[in & ~size_t{SetOf(tier)}] += ranks_in[in];
    }
    left.restorable = left.RanksIn(kEveryTier);
    return left;
  }
};

}  // namespace holdfast
