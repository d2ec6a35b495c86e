// One checkpoint as its coordinator knows it: which ranks have sealed it, where copies of each
// shard lie, and how far it has come on its way into the durable tiers. Counts are kept up by its
// own calls, so that nobody has to go through the ranks to know whether it is whole.
//
//   Checkpoint checkpoint(world_size, now);
//   checkpoint.AddShard(rank, bytes, unix_ms);
//   checkpoint.SetGood(rank, {TierKind::kMemory, node}, {});
//   if (checkpoint.Whole()) …
//
// Owned by a Coordinator; not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/status/status.h"
#include "base/clock.h"
#include "base/ids.h"
#include "recovery/checkpoint_view.h"
#include "server/copy_place.h"
#include "server/flush_queue.h"
#include "server/flush_waits.h"
#include "server/node_names.h"
#include "server/rank_set.h"
#include "tiers/image/record.h"

namespace holdfast {

// What a durable copy's tier says of it: what a manifest repeats, and what people want to know.
struct CopyDetail {
  uint64_t record_bytes = 0;
  uint64_t record_crc = 0;
  LayoutHash layout_hash{};
  std::string location;
  MonotonicTime since{};  // when it was written, by this daemon; else 0
  // Remote, of a file that leaves slices out: its length, and under which plan (0: only a manifest
  // told of it). 0: it has all.
  uint64_t file_bytes = 0;
  LayoutHash plan{};
};

struct CopyState {
  // kAway: on a node that cannot be reached now.
  enum class Kind : uint8_t { kNone, kGood, kBad, kAway } kind = Kind::kNone;
  CopyDetail detail;
  std::string why;  // kBad
};

struct ShardState {
  struct Copy {
    CopyPlace place;
    CopyState state;
  };
  uint64_t bytes = 0;
  int64_t unix_ms = 0;
  bool time_sure = true;            // unix_ms is when it was sealed; else, not before that
  Likeness likeness{};              // not known: of a version that had none
  std::vector<Copy> copies;         // ordered by place; never kNone
  uint32_t sharers = 0;             // the checkpoint's own number of those that hold the same
  int64_t scrub_known_unix_ms = 0;  // remote: since then scrubs have it read; 0: none asked yet
  int64_t scrub_read_unix_ms = 0;   // remote: read by one, and good; 0: not yet
  const CopyState& at(CopyPlace place) const;
  // What the tier has of it, on any node: a good copy if there is one, else a bad one, one that is
  // away, none.
  const CopyState& at(TierKind tier) const;
};

// The way of one checkpoint into one tier.
struct Drain {
  enum class Phase : uint8_t {
    kNone,      // not wanted there, or it is there
    kWanted,    // waits for its turn, or for the next try
    kRunning,   // copies are being written
    kManifest,  // all are there, the manifest is being published
  } phase = Phase::kNone;
  FlushWaits waiting;        // flushes that have not ended, and what they read from
  FlushQueue unasked;        // those of them that wait for a ticket
  absl::Status failure;      // of this try, the first one
  MonotonicTime retry_at{};  // kWanted: not before
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
  // kPeer: nodes that could not take a replica, in this try, why the last one could not, and nodes
  // that they did not get one from.
  std::set<NodeId> full;
  absl::Status refusal;
  std::set<NodeId> unreadable;
  bool Busy() const { return phase == Phase::kRunning || phase == Phase::kManifest; }
};

struct Checkpoint {
  uint32_t world_size = 0;
  bool committed = false;       // every rank has a good copy somewhere
  bool dead = false;            // it was whole or never can be, and is not now
  bool cut_off = false;         // it was whole, and is again when nodes can be reached again
  bool contradictory = false;   // its shards contradict each other: that does not mend
  bool is_protected = false;    // its predecessor was shed: it gets its chance
  bool manifest = false;        // its remote copies are committed
  bool begun_there = false;     // a scan found its remote copies marked as being written
  bool promised_there = false;  // … without that mark: it was committed there, or is
  bool removing = false;        // in one of the durable tiers, or from peers, just now
  bool replicated = false;      // it was told that it is whole in peers' memory, and it still is
  uint32_t good = 0;            // ranks with a good copy somewhere
  uint64_t bytes = 0;           // of all its shards
  int64_t unix_ms = 0;          // of the newest shard
  int64_t begun_unix_ms = 0;
  MonotonicTime begun{};
  std::string divergence;  // not empty: which replicas hold other bytes than the rest
  RankSet writing;         // began it and have not sealed it
  absl::btree_map<Rank, ShardState> shards;
  std::array<Drain, kTierKinds> drains;  // kMemory's is never used

  // Bookkeeping of one shard. AddShard keeps what it knew if the shard is there already.
  void AddShard(Rank rank, uint64_t shard_bytes, int64_t sealed_unix_ms, bool time_sure,
                const Likeness& likeness = {});
  void SetGood(Rank rank, CopyPlace place, CopyDetail detail);
  // False if there was no good copy to be called bad.
  bool SetBad(Rank rank, CopyPlace place, std::string why);
  // It lies there, and nobody has ever seen it good.
  void SetFoundBad(Rank rank, CopyPlace place, CopyDetail detail, std::string why);
  void SetNone(Rank rank, CopyPlace place);
  // What the shard holds, as soon as anybody has read its record.
  void NoteLikeness(Rank rank, const Likeness& likeness);
  void SetManifest(bool there);
  // All of a tier's copies are gone.
  void Clear(TierKind tier);
  // What lies on that node is out of reach: it counts for nothing until it is told of again. False
  // if there was nothing.
  bool SetAway(NodeId node);

  // It may still become whole by what its ranks do.
  bool Open() const { return !committed && !dead && !cut_off; }
  bool Whole() const { return !contradictory && world_size > 0 && good == world_size; }
  // Whole, if what is away was there.
  bool WholeWithAway() const;
  // Every rank has sealed it, once.
  bool Complete() const { return !contradictory && shards.size() == world_size; }
  uint32_t GoodAt(TierKind tier) const { return good_at_[static_cast<size_t>(tier)]; }
  uint32_t BadAt(TierKind tier) const { return bad_at_[static_cast<size_t>(tier)]; }
  bool AnyAt(TierKind tier) const { return GoodAt(tier) + BadAt(tier) > 0; }
  bool AnyAway() const { return away_ > 0; }
  // Whole in that tier alone; remote: with its manifest.
  bool CommittedAt(TierKind tier) const;
  uint64_t BytesAt(TierKind tier) const { return bytes_at_[static_cast<size_t>(tier)]; }
  // Copies in durable tiers, or on their way there.
  bool AnythingDurable() const;
  Drain& drain(TierKind tier) { return drains[static_cast<size_t>(tier)]; }
  const Drain& drain(TierKind tier) const { return drains[static_cast<size_t>(tier)]; }
  // Whether the shard can be read from that tier, on whatever node: there, good, and remote: named
  // by a manifest, and what its file leaves out is not in files that are bad or gone.
  bool Readable(Rank rank, TierKind tier) const;
  // The same for a reader on that node: in its own memory or nvme, in the memory or nvme of any
  // other node (peer), or in the remote tier.
  bool ReadableOn(NodeId node, Rank rank, TierKind tier) const;
  // The nearest tier that has it for a reader on that node, but for those excluded.
  std::optional<TierKind> Nearest(Rank rank, NodeId node, const std::set<TierKind>& without) const;
  // The nodes in whose memory it lies for a reader on that node, be it as a peer's copy or as their
  // own: those that keep it for others first, and that node itself before all.
  std::vector<NodeId> PeersWith(Rank rank, NodeId node) const;
  // Other nodes that have it in nvme, and not in memory.
  std::vector<NodeId> DrivesWith(Rank rank, NodeId node) const;
  // Whether there is a good copy in the memory of any node.
  bool InMemory(Rank rank) const;
  // Good copies in the memory of nodes that keep it for others, and have none of the rank's own.
  uint32_t PeerCopies(Rank rank, const std::set<NodeId>& but_on = {}) const;
  // Nodes that have a good copy of the rank's own, in memory or nvme: a peer's there would be lost
  // with it.
  std::vector<NodeId> OwnNodes(Rank rank) const;
  // Whether of every rank with a peer's copy one lies in another failure domain than its own. What
  // `domain` says of a node is remembered until ForgetApart. (Goes through the ranks.)
  bool PeersApart(const std::function<NodeId(NodeId)>& domain) const;
  void ForgetApart() { apart_.reset(); }
  // Whether any copy of it, good or bad, is known in that node's memory.
  bool InMemoryOf(NodeId node) const;
  bool BadInMemoryOf(NodeId node) const;
  // Where it can be copied on from: a good copy in that tier.
  std::optional<CopyPlace> GoodPlace(Rank rank, TierKind tier) const;
  // Ranks that have a bad copy somewhere.
  const absl::btree_set<Rank>& Bad() const { return bad_; }
  // The rank has a good copy in remote that leaves slices out, and another rank's copy there, which
  // may have them, is bad or gone: of use again when that is good. (Exactly whom it needs only its
  // record says; who holds the same is known of those of which a record or the manifest told. Of
  // others it may be anybody.)
  bool Doubted(Rank rank) const;
  // The ranks that hold the same, itself among them, ascending; none: it is not known.
  const std::vector<Rank>& SharersOf(Rank rank) const;
  // Whose copy that is; a bad one first. (Goes through the ranks.)
  std::optional<Rank> DoubtedFor(Rank rank) const;
  // The ranks that have copies in memory or nvme of that node.
  const std::vector<Rank>& RanksOn(NodeId node) const;
  // Those that have copies in memory or nvme, be they out of reach.
  void AddNodes(NodeMarks& nodes) const {
    for (const auto& [node, ranks] : ranks_on_) {
      nodes.Set(node);
    }
  }
  // The nodes that have copies in that tier, good or bad, or are writing some.
  std::set<NodeId> NodesWith(TierKind tier) const;

  // What the pure decisions see of it. `held` and `pinned` are the coordinator's to say.
  CheckpointView View(CheckpointId id) const;
  // Whether the counts are those of the shards; empty if they are, else what is wrong.
  std::string CheckCounts() const;

 private:
  // Ranks that hold the same.
  struct Sharers {
    std::vector<Rank> ranks;  // ascending; of those of which it is not known none is listed
    uint32_t lacking = 0;     // of which remote has no good copy
    // Of which it has one that leaves slices out, by the set of tiers in which they have good ones.
    std::array<uint32_t, kTierSets> relying{};
    bool operator==(const Sharers&) const = default;
  };
  void Set(Rank rank, CopyPlace place, CopyState state);
  void Count(const ShardState& shard, int by);
  void CountSharers(const ShardState& shard, TierSet good_in, int by);
  void NoteOn(NodeId node, Rank rank, bool there);
  bool Readable(const ShardState& shard, const CopyState& copy, TierKind tier) const;
  static bool CountsAsPeers(const ShardState& shard, const ShardState::Copy& copy);
  static TierSet GoodIn(const ShardState& shard);
  bool Doubted(const ShardState& shard) const;
  bool Lacks(uint32_t sharers) const;
  bool Usable(const ShardState& shard) const;
  uint32_t DoubtedIn(TierSet in) const;
  std::array<uint32_t, kTierSets> UsableIn() const;
  void CountGood();

  std::array<uint32_t, kTierKinds> good_at_{};
  std::array<uint32_t, kTierKinds> bad_at_{};
  uint32_t away_ = 0;  // copies
  mutable std::optional<bool> apart_;
  std::array<uint64_t, kTierKinds> bytes_at_{};
  // Ranks by the set of tiers in which they have good copies, a manifest or not.
  std::array<uint32_t, kTierSets> ranks_in_{};
  // By ShardState::sharers. The first are those of which it is not known: they may need anybody.
  std::vector<Sharers> sharers_ = std::vector<Sharers>(1);
  absl::btree_map<LayoutHash, uint32_t> sharers_of_;  // by Likeness::content
  // Those of all the others that lack a copy: their `relying`, summed up.
  std::array<uint32_t, kTierSets> doubted_in_{};
  absl::btree_set<Rank> bad_;
  // That have copies in memory or nvme there: ordered, each once.
  std::map<NodeId, std::vector<Rank>> ranks_on_;
};

}  // namespace holdfast
