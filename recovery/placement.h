// On which other nodes' memory the replicas of a job's shards lie (docs/formats.md, "Placement of
// replicas").
//
//   HF_ASSIGN_OR_RETURN(const Placement placement,
//                       Place(PlacementSeed(job), nodes, shards, policy.replicas));
//   for (const uint32_t node : placement.TargetsOf(i)) …  // a copy of shards[i] on nodes[node]
//
// Every node computes it by itself from the same input, and gets the same answer: no message is
// needed, and nothing in it depends on the order of the input, on what was placed before, or on a
// library's hashes. Steps with the same nodes and shards lie alike; a node that comes or goes moves
// about three times its own share.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/ids.h"

namespace holdfast {

// Sizes are counted in these: shards rounded up, what nodes lend rounded down. Slots are multiples
// of it, so that a few bytes more in one step move nothing.
inline constexpr uint64_t kPlacementUnitBytes = uint64_t{2} << 20;
inline constexpr uint32_t kPlacementReplicasMax = 8;
inline constexpr size_t kPlacementLevelsMax = 8;
// Shards times nodes: what one computation takes at most (about 2.5 ns each).
inline constexpr uint64_t kPlacementPairsMax = uint64_t{1} << 30;
inline constexpr uint32_t kNoNode = std::numeric_limits<uint32_t>::max();

struct PlacementNode {
  std::string name;
  // Its failure domains by level, coarsest first; every node has as many. Empty: it has no value
  // for that level, and shares no domain of that level with anybody.
  std::vector<std::string> domains;
  // What it lends to one step's replicas of this job. It must not depend on what lies there now.
  // 0: it takes none, but may be a home.
  uint64_t capacity_bytes = 0;
  bool operator==(const PlacementNode&) const = default;
};

// `labels`: anything with name and value. `levels`: the keys of labels that are failure domains,
// coarsest first.
template <typename Labels>
std::vector<std::string> DomainsOf(const Labels& labels, std::span<const std::string> levels) {
  std::vector<std::string> domains(levels.size());
  for (const auto& label : labels) {
    for (size_t level = 0; level < levels.size(); ++level) {
      if (levels[level] == label.name) {
        domains[level] = label.value;
      }
    }
  }
  return domains;
}

struct PlacementShard {
  Rank rank = 0;
  uint32_t home = kNoNode;  // index of the node whose rank saved it; kNoNode: it has none
  uint64_t bytes = 0;       // what it takes: its slot's, better than its image's, as slots stay
  bool operator==(const PlacementShard&) const = default;
};

// A value that never changes once computed. Any thread may read it.
class Placement {
 public:
  // Indices of nodes, the first copy first. `shard`: which of those given to Place.
  std::span<const uint32_t> TargetsOf(size_t shard) const {
    return std::span(targets_).subspan(shard * replicas_, counts_[shard]);
  }
  size_t shards() const { return counts_.size(); }
  uint32_t replicas() const { return replicas_; }

  // Shards with fewer copies than asked for, by rank: capacity or nodes are short.
  struct Short {
    Rank rank = 0;
    uint32_t copies = 0;
    bool operator==(const Short&) const = default;
  };
  std::span<const Short> shortages() const { return short_; }

  // Of what nodes[node] lends, how much its copies take: whole units.
  uint64_t LoadBytes(size_t node) const { return load_bytes_[node]; }

  // What the computation took, for tests of how it grows.
  struct Work {
    uint64_t scans = 0;      // choices for which all nodes were looked at
    uint64_t tries = 0;      // shards without a copy for which an exchange was looked for
    uint64_t exchanges = 0;  // copies that were moved so that another shard got one at all
  };
  const Work& work() const { return work_; }

 private:
  friend class Placer;
  uint32_t replicas_ = 0;
  std::vector<uint32_t> targets_;  // replicas_ for each shard
  std::vector<uint32_t> counts_;   // how many of these there are
  std::vector<Short> short_;
  std::vector<uint64_t> load_bytes_;
  Work work_;
};

uint64_t PlacementSeed(const JobUuid& job);

// `shards`: all of the job's, each rank once. No copy lies on the shard's home, nor two on one
// node; copies, the home's included, share no failure domain while a node elsewhere has room; the
// load is spread by what nodes lend: of nodes in domains that are equally good, none gets more than
// 17/16 of its fair share and one shard while another is below that.
//
// O(shards × nodes): 12,288 shards, 1,536 nodes and 2 replicas take about 45 ms, and up to 120 ms
// where domains force the load apart or are nearly as many as nodes.
//
// InvalidArgument: a name or rank twice, a name that is empty, domains of different lengths, a home
// that is none of the nodes, a shard beyond kImageBytesMax, a limit above exceeded.
// ResourceExhausted: above kPlacementPairsMax.
absl::StatusOr<Placement> Place(uint64_t seed, std::span<const PlacementNode> nodes,
                                std::span<const PlacementShard> shards, uint32_t replicas);

// The parts of the rule that its golden vectors name.
namespace placement_internal {
// A permutation of all numbers: splitmix64's finalizer.
uint64_t Mix(uint64_t value);
uint64_t PairHash(uint64_t shard, uint64_t node);
// -log2 of (hash | 1) / 2^64, nearly, times 2^48. Never grows with the hash.
uint64_t DrawOf(uint64_t hash);
uint64_t NodeHash(const std::string& name);
uint64_t ShardHash(uint64_t seed, Rank rank);
}  // namespace placement_internal

}  // namespace holdfast
