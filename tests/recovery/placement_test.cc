#include "recovery/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tests/recovery/placement_cases.h"
#include "tiers/image/layout.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kUnit = kPlacementUnitBytes;
constexpr uint64_t kSeed = 20'240'607;

using Targets = std::map<Rank, std::vector<std::string>>;

Targets TargetsIn(const Placement& placement, std::span<const PlacementNode> nodes,
                  std::span<const PlacementShard> shards) {
  Targets targets;
  for (size_t i = 0; i < shards.size(); ++i) {
    std::vector<std::string>& names = targets[shards[i].rank];
    for (const uint32_t target : placement.TargetsOf(i)) {
      names.push_back(nodes[target].name);
    }
  }
  return targets;
}

// Nodes with shards of one size at each, in racks.
struct Cluster {
  std::vector<PlacementNode> nodes;
  std::vector<PlacementShard> shards;
  uint32_t replicas = 2;

  Placement Compute(uint64_t seed = kSeed) const {
    return Place(seed, nodes, shards, replicas).value();
  }
  Targets ComputeTargets(uint64_t seed = kSeed) const {
    return TargetsIn(Compute(seed), nodes, shards);
  }
  // The shards keep their homes, but for those of the node, which go to `heir`.
  void Remove(uint32_t node, uint32_t heir) {
    nodes.erase(nodes.begin() + node);
    for (PlacementShard& shard : shards) {
      uint32_t home = shard.home == node ? heir : shard.home;
      shard.home = home != kNoNode && home > node ? home - 1 : home;
    }
  }
};

constexpr uint64_t kShardUnits = 1000;

Cluster ClusterOf(uint32_t nodes, uint32_t ranks_each, uint32_t spares, uint32_t rack_size,
                  const std::function<uint64_t(uint32_t)>& lent) {
  Cluster cluster;
  for (uint32_t i = 0; i < nodes + spares; ++i) {
    cluster.nodes.push_back({absl::StrCat("gpu-", 1000 + i), {}, lent(i) * kShardUnits * kUnit});
    if (rack_size > 0) {
      cluster.nodes.back().domains.push_back(absl::StrCat("rack", i / rack_size));
    }
  }
  for (uint32_t i = 0; i < nodes * ranks_each; ++i) {
    cluster.shards.push_back({i, i / ranks_each, kShardUnits * kUnit});
  }
  return cluster;
}

// Copies that lie where none of their shard lay before.
size_t Moved(const Targets& before, const Targets& after) {
  size_t moved = 0;
  for (const auto& [rank, nodes] : after) {
    const std::vector<std::string>& old = before.at(rank);
    moved +=
        static_cast<size_t>(std::count_if(nodes.begin(), nodes.end(), [&old](const std::string& n) {
          return std::find(old.begin(), old.end(), n) == old.end();
        }));
  }
  return moved;
}

size_t CopiesOn(const Targets& targets, const std::string& node) {
  size_t copies = 0;
  for (const auto& [rank, nodes] : targets) {
    copies += static_cast<size_t>(std::count(nodes.begin(), nodes.end(), node));
  }
  return copies;
}

bool ShareDomain(const PlacementNode& a, const PlacementNode& b, size_t level) {
  return !a.domains[level].empty() && a.domains[level] == b.domains[level];
}

// By level: how many of `copies` share a domain with `node`.
std::vector<int> CrowdOf(std::span<const PlacementNode> nodes, std::span<const uint32_t> copies,
                         uint32_t node) {
  std::vector<int> crowd;
  for (size_t level = 0; level < nodes[node].domains.size(); ++level) {
    crowd.push_back(static_cast<int>(std::count_if(copies.begin(), copies.end(), [&](uint32_t c) {
      return ShareDomain(nodes[c], nodes[node], level);
    })));
  }
  return crowd;
}

uint64_t UnitsOf(const PlacementShard& shard) {
  return std::max<uint64_t>(1, (shard.bytes + kUnit - 1) / kUnit);
}

void ForRandomCases(int count, const std::function<void(PlacementCase&, const Placement&)>& check) {
  std::mt19937_64 random(7);
  for (int i = 0; i < count && !testing::Test::HasFailure(); ++i) {
    PlacementCase c = RandomPlacementCase(random);
    c.name = absl::StrCat("random case ", i);
    SCOPED_TRACE(c.name);
    const absl::StatusOr<Placement> placement = c.Compute();
    ASSERT_TRUE(placement.ok()) << placement.status();
    check(c, *placement);
  }
}

// --- Golden vectors.

class PlacementVectors : public testing::TestWithParam<const char*> {};

TEST_P(PlacementVectors, AreAnsweredAsWritten) {
  const std::string path =
      absl::StrCat(HOLDFAST_SOURCE_DIR, "/tests/fixtures/placement/", GetParam());
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  const absl::StatusOr<std::vector<PlacementCase>> cases = ParsePlacementCases(text.str());
  ASSERT_TRUE(cases.ok()) << path << ": " << cases.status();
  ASSERT_FALSE(cases->empty()) << path;
  for (const PlacementCase& c : *cases) {
    SCOPED_TRACE(c.name);
    const Placement placement = c.Compute().value();
    EXPECT_EQ(TargetsIn(placement, c.nodes, c.shards), c.targets);
    EXPECT_EQ(c.loads.size(), c.nodes.size());
    for (size_t i = 0; i < c.nodes.size(); ++i) {
      EXPECT_EQ(placement.LoadBytes(i), c.loads.at(c.nodes[i].name) * kUnit) << c.nodes[i].name;
    }
    for (const PlacementCase::Hash& entry : c.hashes) {
      const uint64_t hash = placement_internal::PairHash(
          placement_internal::ShardHash(PlacementSeed(c.job), entry.rank),
          placement_internal::NodeHash(entry.node));
      EXPECT_EQ(hash, entry.hash) << entry.rank << " " << entry.node;
      EXPECT_EQ(placement_internal::DrawOf(hash), entry.draw) << entry.rank << " " << entry.node;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Files, PlacementVectors,
                         testing::Values("example.txt", "small.txt", "larger.txt"),
                         [](const auto& file) {
                           const std::string name = file.param;
                           return name.substr(0, name.find('.'));
                         });

TEST(Placement, DrawsAreLogarithms) {
  using placement_internal::DrawOf;
  std::mt19937_64 random(1);
  const auto check = [](uint64_t hash) {
    const double expected = -std::log2(static_cast<double>(hash | 1) / std::ldexp(1, 64));
    EXPECT_NEAR(static_cast<double>(DrawOf(hash)) / std::ldexp(1, 48), expected, 4e-5) << hash;
  };
  for (int i = 0; i < 10'000; ++i) {
    check(random() >> (random() % 60));
    const uint64_t hash = random();
    const uint64_t more = hash + (random() >> (random() % 64));
    EXPECT_GE(DrawOf(std::min(hash, more)), DrawOf(std::max(hash, more)));
  }
  EXPECT_GT(DrawOf(~uint64_t{0}), 0u);
  EXPECT_EQ(DrawOf(0), uint64_t{64} << 48);
  EXPECT_EQ(DrawOf(uint64_t{1} << 63), (uint64_t{1} << 48));
}

// --- What holds for every input.

TEST(Placement, CopiesLieOnOtherNodesThatLendEnough) {
  int full = 0;
  ForRandomCases(600, [&full](PlacementCase& c, const Placement& placement) {
    std::vector<uint64_t> loads(c.nodes.size(), 0);
    std::vector<Placement::Short> shortages;
    for (size_t i = 0; i < c.shards.size(); ++i) {
      const std::span<const uint32_t> targets = placement.TargetsOf(i);
      EXPECT_EQ(std::set<uint32_t>(targets.begin(), targets.end()).size(), targets.size());
      EXPECT_LE(targets.size(), c.replicas);
      for (const uint32_t target : targets) {
        EXPECT_NE(target, c.shards[i].home);
        ASSERT_LT(target, c.nodes.size());
        loads[target] += UnitsOf(c.shards[i]);
      }
      if (targets.size() < c.replicas) {
        shortages.push_back({c.shards[i].rank, static_cast<uint32_t>(targets.size())});
      }
    }
    for (size_t i = 0; i < c.nodes.size(); ++i) {
      EXPECT_EQ(placement.LoadBytes(i), loads[i] * kUnit);
      EXPECT_LE(placement.LoadBytes(i), c.nodes[i].capacity_bytes);
    }
    std::sort(shortages.begin(), shortages.end(),
              [](const auto& a, const auto& b) { return a.rank < b.rank; });
    EXPECT_EQ(
        std::vector<Placement::Short>(placement.shortages().begin(), placement.shortages().end()),
        shortages);
    full += shortages.empty() ? 0 : 1;
  });
  EXPECT_GT(full, 50) << "nothing is ever short in the random cases";
}

TEST(Placement, CopiesShareADomainOnlyWhereNobodyElseHasRoom) {
  int compared = 0;
  int shared = 0;
  ForRandomCases(600, [&](PlacementCase& c, const Placement& placement) {
    const bool alike = std::all_of(c.shards.begin(), c.shards.end(), [&](const auto& shard) {
      return UnitsOf(shard) == UnitsOf(c.shards[0]);
    });
    if (placement.work().exchanges > 0 && !alike) {
      return;  // an exchange of different sizes leaves room that was not there before
    }
    uint64_t smallest = ~uint64_t{0};
    for (const PlacementShard& shard : c.shards) {
      smallest = std::min(smallest, UnitsOf(shard));
    }
    for (size_t i = 0; i < c.shards.size(); ++i) {
      const std::span<const uint32_t> targets = placement.TargetsOf(i);
      std::vector<uint32_t> copies;
      if (c.shards[i].home != kNoNode) {
        copies.push_back(c.shards[i].home);
      }
      for (size_t nth = 0; nth <= targets.size() && nth < c.replicas; ++nth) {
        for (uint32_t other = 0; other < c.nodes.size(); ++other) {
          // Loads only grow: what has room now had it then.
          const uint64_t lent = c.nodes[other].capacity_bytes / kUnit;
          if (other == c.shards[i].home || lent < smallest ||
              placement.LoadBytes(other) / kUnit + UnitsOf(c.shards[i]) > lent ||
              std::find(targets.begin(), targets.end(), other) != targets.end()) {
            continue;
          }
          ASSERT_LT(nth, targets.size()) << "rank " << c.shards[i].rank << " has no copy " << nth
                                         << " but " << c.nodes[other].name << " has room";
          EXPECT_LE(CrowdOf(c.nodes, copies, targets[nth]), CrowdOf(c.nodes, copies, other))
              << "rank " << c.shards[i].rank << " copy " << nth << " lies on "
              << c.nodes[targets[nth]].name << ", better is " << c.nodes[other].name;
          ++compared;
        }
        if (nth < targets.size()) {
          const std::vector<int> crowd = CrowdOf(c.nodes, copies, targets[nth]);
          shared += std::any_of(crowd.begin(), crowd.end(), [](int n) { return n > 0; }) ? 1 : 0;
          copies.push_back(targets[nth]);
        }
      }
    }
  });
  EXPECT_GT(compared, 10'000);
  EXPECT_GT(shared, 1000) << "the random cases have domains enough for all";
}

TEST(Placement, NobodyHasMoreThanItsShareAndAShardWhileOthersHaveLess) {
  int over = 0;
  ForRandomCases(600, [&over](PlacementCase& c, const Placement& placement) {
    if (placement.work().exchanges > 0) {
      return;
    }
    uint64_t demand = 0;
    uint64_t largest = 0;
    uint64_t smallest = ~uint64_t{0};
    for (const PlacementShard& shard : c.shards) {
      demand += UnitsOf(shard) * c.replicas;
      largest = std::max(largest, UnitsOf(shard));
      smallest = std::min(smallest, UnitsOf(shard));
    }
    uint64_t all_lent = 0;
    for (const PlacementNode& node : c.nodes) {
      const uint64_t lent = node.capacity_bytes / kUnit;
      all_lent += lent >= smallest ? lent : 0;
    }
    const auto at_most = [&](uint32_t node) {  // without its part of a shard
      return 17 * demand * (c.nodes[node].capacity_bytes / kUnit) / (16 * all_lent);
    };
    for (size_t i = 0; i < c.shards.size(); ++i) {
      std::vector<uint32_t> copies;
      if (c.shards[i].home != kNoNode) {
        copies.push_back(c.shards[i].home);
      }
      const std::span<const uint32_t> targets = placement.TargetsOf(i);
      for (size_t nth = 0; nth < targets.size(); ++nth) {
        const uint32_t target = targets[nth];
        // Only the last shard that a node was given has put it above its limit: in the last round,
        // the last in the order of ranks.
        const bool last = std::none_of(c.shards.begin(), c.shards.end(), [&](const auto& shard) {
          const auto index = static_cast<size_t>(&shard - c.shards.data());
          const std::span<const uint32_t> its = placement.TargetsOf(index);
          const auto at = std::find(its.begin(), its.end(), target);
          return at != its.end() &&
                 std::make_pair(at - its.begin(), shard.rank) >
                     std::make_pair(static_cast<ptrdiff_t>(nth), c.shards[i].rank);
        });
        if (last && placement.LoadBytes(target) / kUnit > at_most(target) + largest) {
          ++over;
          for (uint32_t other = 0; other < c.nodes.size(); ++other) {
            const uint64_t with_it = placement.LoadBytes(other) / kUnit + UnitsOf(c.shards[i]);
            if (other != c.shards[i].home &&
                std::find(targets.begin(), targets.end(), other) == targets.end() &&
                with_it <= c.nodes[other].capacity_bytes / kUnit &&
                c.nodes[other].capacity_bytes / kUnit >= smallest) {
              EXPECT_FALSE(with_it <= at_most(other) &&
                           CrowdOf(c.nodes, copies, other) <= CrowdOf(c.nodes, copies, target))
                  << c.nodes[target].name << " is above its limit, " << c.nodes[other].name
                  << " below";
            }
          }
        }
        copies.push_back(target);
      }
    }
  });
  EXPECT_GT(over, 30) << "no limit ever gives way to the domains";
}

TEST(Placement, DoesNotDependOnTheOrderOfTheInput) {
  std::mt19937_64 random(3);
  ForRandomCases(400, [&random](PlacementCase& c, const Placement& placement) {
    const Targets before = TargetsIn(placement, c.nodes, c.shards);
    std::vector<uint32_t> order(c.nodes.size());
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.end(), random);
    std::vector<PlacementNode> nodes;
    std::vector<uint32_t> now(order.size());
    for (const uint32_t old : order) {
      now[old] = static_cast<uint32_t>(nodes.size());
      nodes.push_back(c.nodes[old]);
    }
    c.nodes = nodes;
    for (PlacementShard& shard : c.shards) {
      shard.home = shard.home == kNoNode ? kNoNode : now[shard.home];
    }
    std::shuffle(c.shards.begin(), c.shards.end(), random);
    EXPECT_EQ(TargetsIn(c.Compute().value(), c.nodes, c.shards), before);
  });
}

TEST(Placement, NamesOfDomainsDoNotMatterNorThoseOfOneNode) {
  ForRandomCases(300, [](PlacementCase& c, const Placement& placement) {
    const Targets before = TargetsIn(placement, c.nodes, c.shards);
    for (PlacementNode& node : c.nodes) {
      for (std::string& domain : node.domains) {
        domain = domain.empty() ? absl::StrCat("own domain of ", node.name)
                                : std::string(domain.rbegin(), domain.rend());
      }
    }
    EXPECT_EQ(TargetsIn(c.Compute().value(), c.nodes, c.shards), before);
  });
}

TEST(Placement, AFewBytesMoreMoveNothing) {
  Cluster cluster = ClusterOf(60, 8, 4, 4, [](uint32_t) { return 20; });
  const Targets before = cluster.ComputeTargets();
  std::mt19937_64 random(1);
  for (PlacementShard& shard : cluster.shards) {
    shard.bytes -= random() % kUnit;
  }
  for (PlacementNode& node : cluster.nodes) {
    node.capacity_bytes += random() % kUnit;
  }
  EXPECT_EQ(cluster.ComputeTargets(), before);
}

TEST(Placement, JobsLieDifferently) {
  const Cluster cluster = ClusterOf(60, 8, 4, 4, [](uint32_t) { return 20; });
  JobUuid job;
  job.bytes[3] = 1;
  JobUuid other = job;
  other.bytes[15] = 1;
  EXPECT_NE(PlacementSeed(job), PlacementSeed(other));
  EXPECT_GT(Moved(cluster.ComputeTargets(PlacementSeed(job)),
                  cluster.ComputeTargets(PlacementSeed(other))),
            800u);
}

// --- Domains.

TEST(Placement, SpreadsOverTheCoarsestLevelFirst) {
  // Three zones of six racks of four: the copies of every shard are in all three zones.
  Cluster cluster = ClusterOf(72, 4, 0, 4, [](uint32_t) { return 12; });
  for (uint32_t i = 0; i < 72; ++i) {
    PlacementNode& node = cluster.nodes[i];
    node.domains.insert(node.domains.begin(), absl::StrCat("zone", i / 24));
  }
  Placement placement = cluster.Compute();
  for (size_t i = 0; i < cluster.shards.size(); ++i) {
    std::set<std::string> zones = {cluster.nodes[cluster.shards[i].home].domains[0]};
    for (const uint32_t target : placement.TargetsOf(i)) {
      zones.insert(cluster.nodes[target].domains[0]);
    }
    EXPECT_EQ(zones.size(), 3u);
  }

  // With two more replicas than zones they are in all zones, and all in different racks.
  cluster.replicas = 4;
  for (PlacementNode& node : cluster.nodes) {
    node.capacity_bytes *= 2;
  }
  placement = cluster.Compute();
  for (size_t i = 0; i < cluster.shards.size(); ++i) {
    std::map<std::string, int> zones = {{cluster.nodes[cluster.shards[i].home].domains[0], 1}};
    std::set<std::string> racks = {cluster.nodes[cluster.shards[i].home].domains[1]};
    for (const uint32_t target : placement.TargetsOf(i)) {
      ++zones[cluster.nodes[target].domains[0]];
      racks.insert(cluster.nodes[target].domains[1]);
    }
    EXPECT_EQ(zones.size(), 3u);
    EXPECT_TRUE(std::all_of(zones.begin(), zones.end(), [](auto& z) { return z.second <= 2; }));
    EXPECT_EQ(racks.size(), 5u);
  }
}

TEST(Placement, LabelsBecomeDomains) {
  struct Label {
    std::string name;
    std::string value;
  };
  const std::vector<Label> labels = {{"gpu", "h100"}, {"rack", "r1"}, {"zone", "z"}};
  EXPECT_THAT(DomainsOf(labels, std::vector<std::string>{"zone", "row", "rack"}),
              ElementsAre("z", "", "r1"));
  EXPECT_THAT(DomainsOf(labels, std::vector<std::string>{}), IsEmpty());
}

// --- Load.

TEST(Placement, SpreadsByWhatNodesLend) {
  for (const uint32_t rack_size : {0u, 16u}) {
    const Cluster cluster =
        ClusterOf(384, 8, 0, rack_size, [](uint32_t i) { return 24 + 24 * (i % 3); });
    const Placement placement = cluster.Compute();
    EXPECT_THAT(placement.shortages(), IsEmpty());
    double most = 0;
    double least = 100;
    for (uint32_t i = 0; i < 384; ++i) {
      const double share = 16.0 * (24 + 24 * (i % 3)) / 48;
      const double load = static_cast<double>(placement.LoadBytes(i) / kUnit) / kShardUnits;
      EXPECT_LE(load, share * 17 / 16 + 1);
      EXPECT_GE(load, share * 0.2);
      most = std::max(most, load / share);
      least = std::min(least, load / share);
    }
    RecordProperty("most", absl::StrCat(most));
    RecordProperty("least", absl::StrCat(least));
  }
}

TEST(Placement, WhoLendsThreeTimesAsMuchIsDrawnThreeTimesAsOften) {
  // One replica each of few shards among many nodes: no limit is met.
  int large = 0;
  int small = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Cluster cluster =
        ClusterOf(40, 1, 0, 0, [](uint32_t i) { return i % 2 == 0 ? 100'000u : 300'000u; });
    cluster.replicas = 1;
    cluster.shards.resize(1);
    cluster.shards[0].home = kNoNode;
    (cluster.Compute(seed).TargetsOf(0)[0] % 2 == 0 ? small : large) += 1;
  }
  EXPECT_NEAR(large, 225, 30);
  EXPECT_EQ(large + small, 300);
}

TEST(Placement, FillsTheLastByte) {
  // Who lends exactly what is needed is enough, whatever the number of nodes.
  for (uint32_t nodes = 3; nodes < 40; ++nodes) {
    for (const uint32_t replicas : {1u, 2u}) {
      Cluster cluster = ClusterOf(nodes, 8, 0, 0, [=](uint32_t) { return 8 * replicas; });
      cluster.replicas = replicas;
      EXPECT_THAT(cluster.Compute().shortages(), IsEmpty()) << nodes << " nodes";
    }
  }
}

TEST(Placement, FirstCopiesComeBeforeSecondOnes) {
  Cluster cluster = ClusterOf(10, 8, 0, 0, [](uint32_t i) { return i < 9 ? 10 : 0; });
  const Placement placement = cluster.Compute();
  uint32_t copies = 0;
  for (size_t i = 0; i < cluster.shards.size(); ++i) {
    EXPECT_GE(placement.TargetsOf(i).size(), 1u);
    copies += static_cast<uint32_t>(placement.TargetsOf(i).size());
  }
  EXPECT_EQ(copies, 90u);
  EXPECT_EQ(placement.shortages().size(), 70u);
  EXPECT_EQ(placement.shortages()[0].copies, 1u);
  EXPECT_EQ(placement.LoadBytes(9), 0u);
}

// --- Nodes that come and go.

struct Change {
  size_t moved = 0;
  size_t own = 0;  // of these had to, as they lay or lie on the node itself
};

Change WhenTheLastSpareGoes(Cluster cluster) {
  const Targets with = cluster.ComputeTargets();
  const size_t own = CopiesOn(with, cluster.nodes.back().name);
  cluster.Remove(static_cast<uint32_t>(cluster.nodes.size() - 1), kNoNode);
  const Targets without = cluster.ComputeTargets();
  // Coming is going, read backwards.
  EXPECT_EQ(Moved(with, without), Moved(without, with));
  return {Moved(with, without), own};
}

Change WhenANodeDies(Cluster cluster, uint32_t node) {
  const Targets before = cluster.ComputeTargets();
  const size_t own = CopiesOn(before, cluster.nodes[node].name);
  cluster.Remove(node, static_cast<uint32_t>(cluster.nodes.size() - 1));
  return {Moved(before, cluster.ComputeTargets()), own};
}

TEST(Placement, ANodeThatComesOrGoesMovesLittle) {
  for (const uint32_t rack_size : {0u, 16u}) {
    const Cluster cluster = ClusterOf(384, 8, 2, rack_size, [](uint32_t) { return 20; });
    const Change gone = WhenTheLastSpareGoes(cluster);
    EXPECT_NEAR(static_cast<double>(gone.own), 16, 8);
    EXPECT_LE(gone.moved, 5 * 16u);
    size_t moved = 0;
    for (const uint32_t node : {7u, 100u, 250u, 300u, 383u}) {
      const Change died = WhenANodeDies(cluster, node);
      EXPECT_GE(died.moved, died.own);
      EXPECT_LE(died.moved, 7 * 16u) << node;
      moved += died.moved;
    }
    EXPECT_LE(moved, 5 * 4 * 16u);
    RecordProperty("moved", absl::StrCat(moved / 5));
  }
}

// One that lends as much as each of the others, in whose place another comes, or nobody, as the
// number of nodes passes all values: no number is special.
TEST(Placement, NoNumberOfNodesIsSpecial) {
  size_t most = 0;
  size_t all = 0;
  for (uint32_t spares = 1; spares < 40; ++spares) {
    const Change gone =
        WhenTheLastSpareGoes(ClusterOf(120, 8, spares, 0, [](uint32_t) { return 24; }));
    most = std::max(most, gone.moved);
    all += gone.moved;
  }
  EXPECT_LE(most, 8 * 16u);
  EXPECT_LE(all, 39 * 4 * 16u);
  RecordProperty("most", absl::StrCat(most));
  RecordProperty("mean", absl::StrCat(all / 39));
}

TEST(Placement, RanksThatMoveTakeTheirReplicasNowhere) {
  Cluster cluster = ClusterOf(100, 8, 2, 0, [](uint32_t) { return 20; });
  const Targets before = cluster.ComputeTargets();
  // The ranks of node 5 go to a spare; the node stays, and lends.
  size_t on_spare = 0;
  for (PlacementShard& shard : cluster.shards) {
    if (shard.home == 5) {
      shard.home = 100;
      const std::vector<std::string>& targets = before.at(shard.rank);
      on_spare +=
          static_cast<size_t>(std::count(targets.begin(), targets.end(), cluster.nodes[100].name));
    }
  }
  EXPECT_LE(Moved(before, cluster.ComputeTargets()), on_spare + 24);
}

// --- Cost and refusals.

TEST(Placement, LooksAtAllNodesOnlyWhereItMust) {
  const Cluster cluster = ClusterOf(1536, 8, 0, 16, [](uint32_t) { return 20; });
  const Placement placement = cluster.Compute();
  EXPECT_THAT(placement.shortages(), IsEmpty());
  EXPECT_LE(placement.work().scans, 100u);
  EXPECT_EQ(placement.work().exchanges, 0u);
}

TEST(Placement, LooksForExchangesOnlySoOften) {
  // Only their home has room: nothing that lies on the other nodes may go there.
  Cluster cluster = ClusterOf(3, 1000, 0, 0, [](uint32_t i) { return i == 0 ? 10'000 : 10; });
  for (PlacementShard& shard : cluster.shards) {
    shard.home = 0;
  }
  const Placement placement = cluster.Compute();
  EXPECT_EQ(placement.shortages().size(), 3000u);
  EXPECT_EQ(placement.work().tries, 1024u);
  EXPECT_EQ(placement.work().exchanges, 0u);
}

absl::Status WhyNot(const std::function<void(Cluster&)>& spoil) {
  Cluster cluster = ClusterOf(3, 2, 0, 1, [](uint32_t) { return 20; });
  spoil(cluster);
  return Place(kSeed, cluster.nodes, cluster.shards, cluster.replicas).status();
}

TEST(Placement, RefusesWhatContradictsItself) {
  const auto refused = [](const std::function<void(Cluster&)>& spoil, const std::string& why) {
    const absl::Status status = WhyNot(spoil);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(Message(status), HasSubstr(why));
  };
  EXPECT_EQ(WhyNot([](Cluster&) {}), absl::OkStatus());
  refused([](Cluster& c) { c.replicas = 9; }, "9 replicas");
  refused([](Cluster& c) { c.nodes[2].name = c.nodes[0].name; }, "gpu-1000 is given twice");
  refused([](Cluster& c) { c.nodes[1].name.clear(); }, "node 1 has no name");
  refused([](Cluster& c) { c.nodes[1].domains.clear(); }, "0 levels");
  refused(
      [](Cluster& c) {
        for (PlacementNode& node : c.nodes) {
          node.domains.resize(9);
        }
      },
      "9 levels");
  refused([](Cluster& c) { c.shards[3].rank = 4; }, "rank 4 is given twice");
  refused([](Cluster& c) { c.shards[3].rank = kWorldSizeMax; }, "not below the limit");
  refused([](Cluster& c) { c.shards[3].home = 3; }, "home of rank 3 is node 3 of 3");
  refused([](Cluster& c) { c.shards[3].bytes = kImageBytesMax + 1; }, "bytes, the limit is");
  EXPECT_EQ(WhyNot([](Cluster& c) {
              c.shards.clear();
              for (Rank rank = 0; rank < (1u << 15); ++rank) {
                c.shards.push_back({rank, kNoNode, 1});
              }
              c.nodes.clear();
              for (int i = 0; i <= (1 << 15); ++i) {
                c.nodes.push_back({absl::StrCat(i), {}, 1});
              }
            }).code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(Placement, OfNothingIsNothing) {
  EXPECT_EQ(Place(1, {}, {}, 2)->shards(), 0u);
  Cluster cluster = ClusterOf(3, 2, 0, 1, [](uint32_t) { return 20; });
  cluster.replicas = 0;
  EXPECT_THAT(cluster.Compute().TargetsOf(5), IsEmpty());
  EXPECT_THAT(cluster.Compute().shortages(), IsEmpty());
  cluster.replicas = 2;
  cluster.nodes.clear();
  for (PlacementShard& shard : cluster.shards) {
    shard.home = kNoNode;
  }
  EXPECT_EQ(cluster.Compute().shortages().size(), 6u);
  // The largest of everything.
  cluster.shards.assign(1, {kWorldSizeMax - 1, kNoNode, kImageBytesMax});
  cluster.nodes = {{"a", {}, ~uint64_t{0}}, {"b", {}, ~uint64_t{0}}, {"c", {}, 1}};
  EXPECT_EQ(cluster.Compute().TargetsOf(0).size(), 2u);
}

}  // namespace
}  // namespace holdfast
