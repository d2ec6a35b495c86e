#include "recovery/placement.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tiers/image/layout.h"

namespace holdfast {
namespace placement_internal {
namespace {

__extension__ typedef unsigned __int128 Wide;

constexpr int kLogTableBits = 8;
constexpr size_t kLogSteps = size_t{1} << kLogTableBits;

// floor(2^16 × log2(1 + i / 256)): digit after digit, by squaring.
constexpr std::array<uint64_t, kLogSteps + 1> MakeLogTable() {
  std::array<uint64_t, kLogSteps + 1> table{};
  for (size_t i = 0; i < kLogSteps; ++i) {
    uint64_t mantissa = (kLogSteps + i) << 55;  // 1 to 2, with 63 bits behind the point
    for (int bit = 15; bit >= 0; --bit) {
      const Wide square = (Wide{mantissa} * mantissa) >> 63;
      const bool doubled = (square >> 64) != 0;
      table[i] |= uint64_t{doubled} << bit;
      mantissa = static_cast<uint64_t>(doubled ? square >> 1 : square);
    }
  }
  table[kLogSteps] = uint64_t{1} << 16;
  return table;
}
constexpr std::array<uint64_t, kLogSteps + 1> kLogTable = MakeLogTable();

inline uint64_t MixBits(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Of two numbers that are mixed already; the high bits are good.
inline uint64_t HashPair(uint64_t a, uint64_t b) {
  const uint64_t z = (a ^ b) * 0xbf58476d1ce4e5b9u;
  return (z ^ (z >> 32)) * 0x94d049bb133111ebu;
}

// The i for which the hash with nodes[i] is at least from[i]. By itself: nearly all the time that a
// placement takes is spent here, and inlined it lacks registers.
__attribute__((noinline)) size_t HashesFrom(uint64_t shard, std::span<const uint64_t> nodes,
                                            std::span<const uint64_t> from, uint32_t* found) {
  size_t count = 0;
  for (uint32_t i = 0; i < nodes.size(); ++i) {
    found[count] = i;
    count += HashPair(shard, nodes[i]) >= from[i] ? 1 : 0;
  }
  return count;
}

inline uint64_t Draw(uint64_t hash) {
  hash |= 1;
  const auto zeros = static_cast<uint64_t>(std::countl_zero(hash));
  const uint64_t mantissa = hash << zeros;
  const size_t i = (mantissa >> 55) & (kLogSteps - 1);
  const uint64_t fraction = (mantissa >> 23) & 0xffffffffu;
  return ((zeros + 1) << 48) - (kLogTable[i] << 32) - (kLogTable[i + 1] - kLogTable[i]) * fraction;
}

}  // namespace

uint64_t Mix(uint64_t value) {
  return MixBits(value);
}

uint64_t PairHash(uint64_t shard, uint64_t node) {
  return HashPair(shard, node);
}

uint64_t DrawOf(uint64_t hash) {
  return Draw(hash);
}

uint64_t NodeHash(const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const char c : name) {
    hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  }
  return MixBits(hash);
}

uint64_t ShardHash(uint64_t seed, Rank rank) {
  return MixBits(seed + 0x9e3779b97f4a7c15u * (uint64_t{rank} + 1));
}

}  // namespace placement_internal

// Computes one Placement. Here nodes go by their place in the order of names, shards by their place
// in the order of ranks.
class Placer {
 public:
  absl::StatusOr<Placement> Run(uint64_t seed, std::span<const PlacementNode> nodes,
                                std::span<const PlacementShard> shards, uint32_t replicas) {
    if (replicas > kPlacementReplicasMax) {
      return Refuse(absl::StrCat(replicas, " replicas are asked for, at most ",
                                 kPlacementReplicasMax, " are placed"));
    }
    if (!shards.empty() && nodes.size() > kPlacementPairsMax / shards.size()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("placement of replicas: ", shards.size(), " shards on ", nodes.size(),
                       " nodes, at most ", kPlacementPairsMax, " pairs of these are looked at"));
    }
    replicas_ = replicas;
    HF_RETURN_IF_ERROR(TakeNodes(nodes));
    HF_RETURN_IF_ERROR(TakeShards(seed, shards));
    GroupNodes(nodes);
    SetLimits(seed);
    FindNearest();
    for (uint32_t round = 0; round < replicas_; ++round) {
      PlaceRound();
    }
    return Answer();
  }

 private:
  using Wide = placement_internal::Wide;
  using DomainNumbers = std::array<uint32_t, kPlacementLevelsMax>;
  // How many copies share each level's domain, the coarsest level in the highest byte.
  using Crowd = uint64_t;

  struct Node {
    uint64_t hash = 0;
    uint64_t units = 0;  // what it lends; 0: nothing
    uint64_t load = 0;
    uint64_t limit = 0;  // up to which it is not full
    uint64_t step = 1;
    uint32_t group = 0;  // of nodes in the same domains
    uint32_t given = 0;  // its index in the input
  };
  struct Shard {
    uint64_t hash = 0;
    uint64_t units = 0;
    uint32_t home = kNoNode;
    uint32_t given = 0;
    uint32_t first_near = 0;  // in near_, up to the next one's
    uint32_t count = 0;       // of copies
  };
  struct Group {
    DomainNumbers domains{};  // 0: one of its own
    uint32_t open = 0;        // of its nodes have room for the smallest shard
  };
  struct Pair {
    uint64_t draw = 0;
    uint32_t node = 0;
  };

  static absl::Status Refuse(const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat("placement of replicas: ", why));
  }

  absl::Status TakeNodes(std::span<const PlacementNode> nodes) {
    std::vector<uint32_t> order(nodes.size());
    std::iota(order.begin(), order.end(), 0u);
    std::sort(order.begin(), order.end(),
              [nodes](uint32_t a, uint32_t b) { return nodes[a].name < nodes[b].name; });
    levels_ = nodes.empty() ? 0 : nodes[0].domains.size();
    if (levels_ > kPlacementLevelsMax) {
      return Refuse(absl::StrCat(levels_, " levels of failure domains, at most ",
                                 kPlacementLevelsMax, " are told apart"));
    }
    at_.resize(nodes.size());
    for (const uint32_t given : order) {
      const PlacementNode& node = nodes[given];
      if (node.name.empty()) {
        return Refuse(absl::StrCat("node ", given, " has no name"));
      }
      if (!nodes_.empty() && nodes[nodes_.back().given].name == node.name) {
        return Refuse(absl::StrCat("node ", node.name, " is given twice"));
      }
      if (node.domains.size() != levels_) {
        return Refuse(absl::StrCat("node ", node.name, " has ", node.domains.size(),
                                   " levels of failure domains, others have ", levels_));
      }
      at_[given] = static_cast<uint32_t>(nodes_.size());
      Node& taken = nodes_.emplace_back();
      taken.hash = placement_internal::NodeHash(node.name);
      taken.units = node.capacity_bytes / kPlacementUnitBytes;
      taken.given = given;
    }
    return absl::OkStatus();
  }

  absl::Status TakeShards(uint64_t seed, std::span<const PlacementShard> shards) {
    std::vector<uint32_t> order(shards.size());
    std::iota(order.begin(), order.end(), 0u);
    std::sort(order.begin(), order.end(),
              [shards](uint32_t a, uint32_t b) { return shards[a].rank < shards[b].rank; });
    for (const uint32_t given : order) {
      const PlacementShard& shard = shards[given];
      if (shard.rank >= kWorldSizeMax) {
        return Refuse(
            absl::StrCat("rank ", shard.rank, " is not below the limit of ", kWorldSizeMax));
      }
      if (!ranks_.empty() && ranks_.back() == shard.rank) {
        return Refuse(absl::StrCat("rank ", shard.rank, " is given twice"));
      }
      if (shard.home != kNoNode && shard.home >= nodes_.size()) {
        return Refuse(absl::StrCat("the home of rank ", shard.rank, " is node ", shard.home, " of ",
                                   nodes_.size()));
      }
      if (shard.bytes > kImageBytesMax) {
        return Refuse(absl::StrCat("the shard of rank ", shard.rank, " has ", shard.bytes,
                                   " bytes, the limit is ", kImageBytesMax));
      }
      ranks_.push_back(shard.rank);
      Shard& taken = shards_.emplace_back();
      taken.hash = placement_internal::ShardHash(seed, shard.rank);
      taken.units =
          std::max<uint64_t>(1, (shard.bytes + kPlacementUnitBytes - 1) / kPlacementUnitBytes);
      taken.home = shard.home == kNoNode ? kNoNode : at_[shard.home];
      taken.given = given;
      demand_ += taken.units * replicas_;
      smallest_ = std::min(smallest_, taken.units);
      largest_ = std::max(largest_, taken.units);
    }
    targets_.resize(shards_.size() * replicas_);
    return absl::OkStatus();
  }

  // Numbers the domains and gathers the nodes that are in the same ones. A domain of one node is as
  // good as none: that node gets no second copy anyway.
  void GroupNodes(std::span<const PlacementNode> nodes) {
    std::vector<DomainNumbers> numbers(nodes_.size());
    for (size_t level = 0; level < levels_; ++level) {
      absl::flat_hash_map<std::string_view, uint32_t> first;  // node with this value
      uint32_t last = 0;
      for (uint32_t i = 0; i < nodes_.size(); ++i) {
        const std::string& value = nodes[nodes_[i].given].domains[level];
        if (value.empty()) {
          continue;
        }
        const auto [it, fresh] = first.try_emplace(value, i);
        if (!fresh) {
          uint32_t& number = numbers[it->second][level];
          number = number != 0 ? number : ++last;
          numbers[i][level] = number;
        }
      }
    }
    absl::flat_hash_map<DomainNumbers, uint32_t> groups;
    for (uint32_t i = 0; i < nodes_.size(); ++i) {
      const auto [it, fresh] =
          groups.try_emplace(numbers[i], static_cast<uint32_t>(groups_.size()));
      if (fresh) {
        groups_.push_back({numbers[i], 0});
      }
      nodes_[i].group = it->second;
    }
    crowds_.resize(groups_.size());
  }

  void SetLimits(uint64_t seed) {
    for (Node& node : nodes_) {
      if (node.units < smallest_) {
        node.units = 0;
      }
      lent_ += node.units;
    }
    for (uint32_t i = 0; i < nodes_.size(); ++i) {
      Node& node = nodes_[i];
      if (node.units == 0) {
        continue;
      }
      lenders_.push_back(i);
      ++groups_[node.group].open;
      const Wide share = Wide{demand_} * node.units;
      const uint64_t part = placement_internal::HashPair(seed, node.hash) >> 32;
      node.limit =
          static_cast<uint64_t>(share * 17 / (Wide{lent_} * 16)) + ((largest_ * part) >> 32);
      node.step = std::max<uint64_t>(1, static_cast<uint64_t>(share / (Wide{lent_} * 8)));
    }
  }

  // For each shard the nodes that come first in its order, about kNear of them: those that it draws
  // below a number that is the same for all shards. For each node that is the same as a hash above
  // some number of its own, so that most pairs cost one hash and one comparison.
  void FindNearest() {
    constexpr uint64_t kNear = 24;
    constexpr uint64_t kDrawOfAll = 406'082'553'034'881;  // 2^48 / ln 2: the mean of all draws
    std::vector<uint64_t> hashes;
    std::vector<uint64_t> from;
    std::vector<uint32_t> who;
    for (const uint32_t i : lenders_) {
      const Wide most = Wide{kNear * kDrawOfAll} * nodes_[i].units / lent_;
      uint64_t below = 0;  // a hash whose draw is too large, unless all are small enough
      uint64_t above = std::numeric_limits<uint64_t>::max();
      if (placement_internal::Draw(above) > most) {
        continue;
      }
      while (above - below > 1) {
        const uint64_t middle = below + (above - below) / 2;
        (placement_internal::Draw(middle) > most ? below : above) = middle;
      }
      hashes.push_back(nodes_[i].hash);
      from.push_back(placement_internal::Draw(0) > most ? above : 0);
      who.push_back(i);
    }
    std::vector<uint32_t> found(who.size());
    std::vector<Pair> pairs;
    for (Shard& shard : shards_) {
      shard.first_near = static_cast<uint32_t>(near_.size());
      pairs.clear();
      const size_t count = placement_internal::HashesFrom(shard.hash, hashes, from, found.data());
      for (size_t i = 0; i < count; ++i) {
        pairs.push_back(PairOf(shard, who[found[i]]));
      }
      std::sort(pairs.begin(), pairs.end(),
                [this](const Pair& a, const Pair& b) { return Before(a, b); });
      for (const Pair& pair : pairs) {
        near_.push_back(pair.node);
      }
    }
  }

  Pair PairOf(const Shard& shard, uint32_t node) const {
    return {placement_internal::Draw(placement_internal::HashPair(shard.hash, nodes_[node].hash)),
            node};
  }
  // By draw per unit lent, then by name.
  bool Before(const Pair& a, const Pair& b) const {
    const Wide left = Wide{a.draw} * nodes_[b.node].units;
    const Wide right = Wide{b.draw} * nodes_[a.node].units;
    return left != right ? left < right : a.node < b.node;
  }

  std::span<uint32_t> TargetsOf(uint32_t shard) {
    return std::span(targets_).subspan(size_t{shard} * replicas_, shards_[shard].count);
  }
  bool HasCopy(uint32_t shard, uint32_t node) {
    const std::span<const uint32_t> targets = TargetsOf(shard);
    return shards_[shard].home == node ||
           std::find(targets.begin(), targets.end(), node) != targets.end();
  }
  bool HasRoom(uint32_t node, uint64_t units) const {
    return nodes_[node].units - nodes_[node].load >= units;
  }
  static uint64_t FullnessOf(const Node& node, uint64_t load) {
    return load <= node.limit ? 0 : 1 + (load - node.limit - 1) / node.step;
  }

  // The copies of the shard, its home's included, in the domains of `group`; but for `without`.
  Crowd CrowdOf(uint32_t shard, const Group& group, uint32_t without = kNoNode) {
    Crowd crowd = 0;
    const auto add = [&](uint32_t node) {
      if (node == kNoNode || node == without) {
        return;
      }
      const DomainNumbers& its = groups_[nodes_[node].group].domains;
      for (size_t level = 0; level < levels_; ++level) {
        if (its[level] != 0 && its[level] == group.domains[level]) {
          crowd += Crowd{1} << (8 * (kPlacementLevelsMax - 1 - level));
        }
      }
    };
    add(shards_[shard].home);
    for (const uint32_t target : TargetsOf(shard)) {
      add(target);
    }
    return crowd;
  }

  // Sets crowds_, of every group, for this shard; they are mostly those of the shard before.
  void SetCrowds(uint32_t shard) {
    std::vector<uint32_t>& key = crowds_key_next_;
    key.assign(1, shards_[shard].home == kNoNode ? kNoNode : nodes_[shards_[shard].home].group);
    for (const uint32_t target : TargetsOf(shard)) {
      key.push_back(nodes_[target].group);
    }
    if (key == crowds_key_) {
      return;
    }
    std::swap(crowds_key_, crowds_key_next_);
    for (size_t group = 0; group < groups_.size(); ++group) {
      crowds_[group] = CrowdOf(shard, groups_[group]);
    }
  }

  void PlaceRound() {
    std::vector<uint32_t> without;
    for (uint32_t shard = 0; shard < shards_.size(); ++shard) {
      if (!PlaceOne(shard)) {
        without.push_back(shard);
      }
    }
    // Each exchange may leave some room: so they are asked again.
    for (const uint32_t shard : without) {
      if (!PlaceOne(shard)) {
        Exchange(shard);
      }
    }
  }

  bool PlaceOne(uint32_t shard) {
    const uint32_t node = Choose(shard);
    if (node == kNoNode) {
      return false;
    }
    Give(shard, node);
    return true;
  }

  void Give(uint32_t shard, uint32_t node) {
    ++shards_[shard].count;
    TargetsOf(shard).back() = node;
    Load(shard, node);
  }

  void Load(uint32_t shard, uint32_t node) {
    const bool was_open = HasRoom(node, smallest_);
    nodes_[node].load += shards_[shard].units;
    groups_[nodes_[node].group].open -= was_open && !HasRoom(node, smallest_) ? 1 : 0;
    if (listed_) {
      std::vector<uint32_t>& on = on_[node];
      on.insert(std::lower_bound(on.begin(), on.end(), shard), shard);
    }
  }
  void Unload(uint32_t shard, uint32_t node) {
    const bool was_open = HasRoom(node, smallest_);
    nodes_[node].load -= shards_[shard].units;
    groups_[nodes_[node].group].open += !was_open && HasRoom(node, smallest_) ? 1 : 0;
    std::erase(on_[node], shard);
  }

  // The node with room for another copy that is the least crowded, of these the least full, of
  // these the first in the shard's order.
  uint32_t Choose(uint32_t shard) {
    SetCrowds(shard);
    Crowd least = std::numeric_limits<Crowd>::max();
    for (size_t group = 0; group < groups_.size(); ++group) {
      if (groups_[group].open > 0) {
        least = std::min(least, crowds_[group]);
      }
    }
    if (least == std::numeric_limits<Crowd>::max()) {
      return kNoNode;
    }
    // No node can be better than the first in the order that is as little crowded as any, and not
    // full at all.
    const size_t end = shard + 1 < shards_.size() ? shards_[shard + 1].first_near : near_.size();
    const uint64_t units = shards_[shard].units;
    for (size_t i = shards_[shard].first_near; i < end; ++i) {
      const Node& node = nodes_[near_[i]];
      if (crowds_[node.group] == least && node.load + units <= std::min(node.limit, node.units) &&
          !HasCopy(shard, near_[i])) {
        return near_[i];
      }
    }
    return ChooseOfAll(shard);
  }

  uint32_t ChooseOfAll(uint32_t shard) {
    ++work_.scans;
    const uint64_t units = shards_[shard].units;
    std::optional<Pair> best;
    Crowd crowd = 0;
    uint64_t fullness = 0;
    for (const uint32_t i : lenders_) {
      const Node& node = nodes_[i];
      const uint64_t load = node.load + units;
      const Crowd its = crowds_[node.group];
      if (load > node.units || (best && its > crowd)) {
        continue;
      }
      const bool less_crowded = !best || its < crowd;
      if (!less_crowded && load > node.limit && load - node.limit > fullness * node.step) {
        continue;  // it is fuller; without a division
      }
      if (HasCopy(shard, i)) {
        continue;
      }
      const uint64_t its_fullness = FullnessOf(node, load);
      const Pair pair = PairOf(shards_[shard], i);
      if (less_crowded || its_fullness < fullness || Before(pair, *best)) {
        best = pair;
        crowd = its;
        fullness = its_fullness;
      }
    }
    return best ? best->node : kNoNode;
  }

  // What exchanges may cost: shards that look for one in a placement, and copies of a node, by
  // rank, that are thought of.
  static constexpr uint64_t kExchangesMax = 1024;
  static constexpr size_t kExchangeCopiesMax = 64;

  // The shard found no node: only its home and its targets have room for it, if any have. So
  // another shard, at least as large, moves there and leaves its place.
  void Exchange(uint32_t shard) {
    std::vector<uint32_t> rooms;
    const auto look = [&](uint32_t node) {
      if (node != kNoNode && nodes_[node].units > 0 && HasRoom(node, shards_[shard].units)) {
        rooms.push_back(node);
      }
    };
    look(shards_[shard].home);
    for (const uint32_t target : TargetsOf(shard)) {
      look(target);
    }
    if (rooms.empty() || work_.tries == kExchangesMax) {
      return;
    }
    ++work_.tries;
    std::sort(rooms.begin(), rooms.end());
    ListShards();
    SetCrowds(shard);

    struct Move {
      Crowd crowd = 0;        // where the shard comes
      Crowd other_crowd = 0;  // where the other one goes
      Pair pair;
      uint32_t other = 0;
      uint32_t room = 0;
    };
    std::optional<Move> best;
    const auto better = [&](const Move& a, const Move& b) {
      if (std::tie(a.crowd, a.other_crowd) != std::tie(b.crowd, b.other_crowd)) {
        return std::tie(a.crowd, a.other_crowd) < std::tie(b.crowd, b.other_crowd);
      }
      if (a.pair.node != b.pair.node) {
        return Before(a.pair, b.pair);
      }
      return std::tie(a.other, a.room) < std::tie(b.other, b.room);
    };
    for (const uint32_t i : lenders_) {
      if (HasCopy(shard, i)) {
        continue;
      }
      Move move{crowds_[nodes_[i].group], 0, PairOf(shards_[shard], i), 0, 0};
      const std::span<const uint32_t> others(on_[i].data(),
                                             std::min(on_[i].size(), kExchangeCopiesMax));
      for (const uint32_t other : others) {
        if (shards_[other].units < shards_[shard].units) {
          continue;
        }
        for (const uint32_t room : rooms) {
          if (HasCopy(other, room) || !HasRoom(room, shards_[other].units)) {
            continue;
          }
          move.other_crowd = CrowdOf(other, groups_[nodes_[room].group], i);
          move.other = other;
          move.room = room;
          if (!best || better(move, *best)) {
            best = move;
          }
        }
      }
    }
    if (!best) {
      return;
    }
    ++work_.exchanges;
    const std::span<uint32_t> others = TargetsOf(best->other);
    *std::find(others.begin(), others.end(), best->pair.node) = best->room;
    Unload(best->other, best->pair.node);
    Load(best->other, best->room);
    Give(shard, best->pair.node);
  }

  void ListShards() {
    if (listed_) {
      return;
    }
    listed_ = true;
    on_.resize(nodes_.size());
    for (uint32_t shard = 0; shard < shards_.size(); ++shard) {
      for (const uint32_t target : TargetsOf(shard)) {
        on_[target].push_back(shard);
      }
    }
  }

  Placement Answer() {
    Placement answer;
    answer.replicas_ = replicas_;
    answer.targets_.resize(targets_.size(), kNoNode);
    answer.counts_.resize(shards_.size());
    for (uint32_t shard = 0; shard < shards_.size(); ++shard) {
      const Shard& its = shards_[shard];
      size_t next = size_t{its.given} * replicas_;
      for (const uint32_t target : TargetsOf(shard)) {
        answer.targets_[next++] = nodes_[target].given;
      }
      answer.counts_[its.given] = its.count;
      if (its.count < replicas_) {
        answer.short_.push_back({ranks_[shard], its.count});
      }
    }
    answer.load_bytes_.resize(nodes_.size());
    for (const Node& node : nodes_) {
      answer.load_bytes_[node.given] = node.load * kPlacementUnitBytes;
    }
    answer.work_ = work_;
    return answer;
  }

  uint32_t replicas_ = 0;
  size_t levels_ = 0;
  std::vector<Node> nodes_;
  std::vector<uint32_t> at_;       // by index in the input: in nodes_
  std::vector<uint32_t> lenders_;  // nodes that lend anything
  std::vector<Shard> shards_;
  std::vector<Rank> ranks_;
  std::vector<uint32_t> targets_;  // replicas_ for each shard
  std::vector<Group> groups_;
  std::vector<uint32_t> near_;  // of each shard, in its order
  uint64_t demand_ = 0;         // units, of all copies
  uint64_t lent_ = 0;
  uint64_t smallest_ = std::numeric_limits<uint64_t>::max();
  uint64_t largest_ = 0;
  std::vector<Crowd> crowds_;  // by group, for copies in the groups of crowds_key_
  std::vector<uint32_t> crowds_key_;
  std::vector<uint32_t> crowds_key_next_;
  bool listed_ = false;
  std::vector<std::vector<uint32_t>>
      on_;  // by node: shards with a copy there, by rank; once listed_
  Placement::Work work_;
};

uint64_t PlacementSeed(const JobUuid& job) {
  uint64_t halves[2] = {0, 0};
  for (size_t i = 0; i < job.bytes.size(); ++i) {
    halves[i / 8] |= uint64_t{job.bytes[i]} << (8 * (i % 8));
  }
  return placement_internal::Mix(placement_internal::Mix(halves[0]) ^ halves[1]);
}

absl::StatusOr<Placement> Place(uint64_t seed, std::span<const PlacementNode> nodes,
                                std::span<const PlacementShard> shards, uint32_t replicas) {
  return Placer().Run(seed, nodes, shards, replicas);
}

}  // namespace holdfast
