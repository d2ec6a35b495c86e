// One checkpoint as its coordinator knows it: which ranks have sealed it, where a copy of each
// shard lies, and how far it has come on its way into the durable tiers. Counts are kept up by its
// own calls, so that nobody has to go through the ranks to know whether it is whole.
//
//   Checkpoint checkpoint(world_size, now);
//   checkpoint.AddShard(rank, bytes, unix_ms);
//   checkpoint.SetGood(rank, TierKind::kMemory, {});
//   if (checkpoint.Whole()) …
//
// Owned by a Coordinator; not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "base/clock.h"
#include "base/ids.h"
#include "recovery/checkpoint_view.h"
#include "tiers/image/layout.h"

namespace holdfast {

// What a durable copy's tier says of it: what a manifest repeats, and what people want to know.
struct CopyDetail {
  uint64_t record_bytes = 0;
  uint64_t record_crc = 0;
  LayoutHash layout_hash{};
  std::string location;
  MonotonicTime since{};  // when it was written, by this daemon; else 0
};

struct CopyState {
  enum class Kind : uint8_t { kNone, kGood, kBad } kind = Kind::kNone;
  CopyDetail detail;
  std::string why;  // kBad
};

struct ShardState {
  uint64_t bytes = 0;
  int64_t unix_ms = 0;
  bool time_sure = true;  // unix_ms is when it was sealed; else, not before that
  std::array<CopyState, kTierKinds> copies;
  const CopyState& at(TierKind tier) const { return copies[static_cast<size_t>(tier)]; }
};

// The way of one checkpoint into one tier.
struct Drain {
  enum class Phase : uint8_t {
    kNone,      // not wanted there, or it is there
    kWanted,    // waits for its turn, or for the next try
    kRunning,   // copies are being written
    kManifest,  // all are there, the manifest is being published
  } phase = Phase::kNone;
  std::map<Rank, TierKind> waiting;  // flushes that have not ended, and what they read from
  absl::Status failure;              // of this try, the first one
  MonotonicTime retry_at{};          // kWanted: not before
  Duration backoff{};
  std::string problem;  // why the last try failed
  int64_t begun_unix_ms = 0;
  int64_t manifest_begun_unix_ms = 0;
  int64_t whole_unix_ms = 0;     // when what this daemon brought there made it whole; 0: unknown
  std::string stalled;           // not empty: what hangs
  bool decided = false;          // whether it goes there
  std::string shed;              // it was to go there, and does not: why
  std::string unwanted;          // not empty: what is under way is of no use any more, and why
  std::set<Rank> not_from_nvme;  // it went wrong from there: from memory, as long as that has it
  bool Busy() const { return phase == Phase::kRunning || phase == Phase::kManifest; }
};

struct Checkpoint {
  uint32_t world_size = 0;
  bool committed = false;      // every rank has a good copy somewhere
  bool dead = false;           // it was whole or never can be, and is not now
  bool contradictory = false;  // its shards contradict each other: that does not mend
  bool is_protected = false;   // its predecessor was shed: it gets its chance
  bool given_up = false;       // nothing of it may stay: what is left of it is being removed
  bool manifest = false;       // its remote copies are committed
  bool removing = false;       // in one of the durable tiers, just now
  uint32_t good = 0;           // ranks with a good copy somewhere
  uint64_t bytes = 0;          // of all its shards
  int64_t unix_ms = 0;         // of the newest shard
  int64_t begun_unix_ms = 0;
  MonotonicTime begun{};
  std::set<Rank> writing;  // began it and have not sealed it
  std::map<Rank, ShardState> shards;
  std::array<Drain, kTierKinds> drains;  // kMemory's is never used

  // Bookkeeping of one shard. AddShard keeps what it knew if the shard is there already.
  void AddShard(Rank rank, uint64_t shard_bytes, int64_t sealed_unix_ms, bool time_sure);
  void SetGood(Rank rank, TierKind tier, CopyDetail detail);
  // False if there was no good copy to be called bad.
  bool SetBad(Rank rank, TierKind tier, std::string why);
  void SetNone(Rank rank, TierKind tier);
  void SetManifest(bool there);
  // All of a tier's copies are gone.
  void Clear(TierKind tier);

  bool Whole() const { return !contradictory && world_size > 0 && good == world_size; }
  // Every rank has sealed it, once.
  bool Complete() const { return !contradictory && shards.size() == world_size; }
  uint32_t GoodAt(TierKind tier) const { return good_at_[static_cast<size_t>(tier)]; }
  uint32_t BadAt(TierKind tier) const { return bad_at_[static_cast<size_t>(tier)]; }
  bool AnyAt(TierKind tier) const { return GoodAt(tier) + BadAt(tier) > 0; }
  // Whole in that tier alone; remote: with its manifest.
  bool CommittedAt(TierKind tier) const;
  uint64_t BytesAt(TierKind tier) const;
  // Copies in durable tiers, or on their way there.
  bool AnythingDurable() const;
  Drain& drain(TierKind tier) { return drains[static_cast<size_t>(tier)]; }
  const Drain& drain(TierKind tier) const { return drains[static_cast<size_t>(tier)]; }
  // Whether the shard can be read from that tier: there, good, and remote: named by a manifest.
  bool Readable(Rank rank, TierKind tier) const;
  // The nearest tier that has it, but for those excluded.
  std::optional<TierKind> Nearest(Rank rank, const std::set<TierKind>& without) const;

  // What the pure decisions see of it. `held` and `pinned` are the coordinator's to say.
  CheckpointView View(CheckpointId id) const;
  // Whether the counts are those of the shards; empty if they are, else what is wrong.
  std::string CheckCounts() const;

 private:
  void Set(Rank rank, TierKind tier, CopyState state);
  bool Usable(const ShardState& shard) const;

  std::array<uint32_t, kTierKinds> good_at_{};
  std::array<uint32_t, kTierKinds> bad_at_{};
};

}  // namespace holdfast
