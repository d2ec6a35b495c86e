#include "recovery/kept_placement.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace holdfast {
namespace {

constexpr uint64_t kSeed = 7;
constexpr uint64_t kShardBytes = 100 * kPlacementUnitBytes;

struct Job {
  uint64_t seed = kSeed;
  std::vector<PlacementNode> nodes;
  std::vector<PlacementShard> shards;
  uint32_t replicas = 1;

  Job() {
    for (uint32_t i = 0; i < 8; ++i) {
      nodes.push_back({absl::StrCat("n", i), {absl::StrCat("rack", i / 2)}, 20 * kShardBytes});
      shards.push_back({2 * i, i, kShardBytes});
      shards.push_back({2 * i + 1, i, kShardBytes});
    }
  }
};

std::vector<std::vector<uint32_t>> TargetsOf(const Placement& placement) {
  std::vector<std::vector<uint32_t>> targets;
  for (size_t i = 0; i < placement.shards(); ++i) {
    targets.emplace_back(placement.TargetsOf(i).begin(), placement.TargetsOf(i).end());
  }
  return targets;
}

std::vector<std::vector<uint32_t>> Ask(KeptPlacement& kept, const Job& job) {
  return TargetsOf(**kept.For(job.seed, job.nodes, job.shards, job.replicas));
}

std::vector<std::vector<uint32_t>> Computed(const Job& job) {
  return TargetsOf(*Place(job.seed, job.nodes, job.shards, job.replicas));
}

TEST(KeptPlacement, IsComputedOnceForAsLongAsNothingChanges) {
  KeptPlacement kept;
  Job job;
  for (uint64_t step = 0; step < 10; ++step) {
    for (PlacementShard& shard : job.shards) {
      shard.bytes = kShardBytes - step * 1000;  // a step's objects are longer or shorter
    }
    EXPECT_EQ(Ask(kept, job), Computed(job));
  }
  EXPECT_EQ(kept.computed(), 1u);
}

TEST(KeptPlacement, IsComputedAnewWhateverChanges) {
  const std::map<std::string, std::function<void(Job&)>> changes{
      {"the job", [](Job& job) { ++job.seed; }},
      {"a node comes",
       [](Job& job) {
         job.nodes.push_back({"n8", {"rack4"}, 20 * kShardBytes});
       }},
      {"the last node goes",
       [](Job& job) {
         job.nodes.pop_back();
         job.shards.resize(14);
       }},
      {"another node has its place", [](Job& job) { job.nodes[3].name = "spare"; }},
      {"a node lends nothing", [](Job& job) { job.nodes[3].capacity_bytes = 0; }},
      {"a node moves to another rack", [](Job& job) { job.nodes[3].domains[0] = "rack0"; }},
      {"a rank moves", [](Job& job) { job.shards[5].home = 7; }},
      {"a rank has no home", [](Job& job) { job.shards[5].home = kNoNode; }},
      {"another rank", [](Job& job) { job.shards[15].rank = 99; }},
      {"a shard grows", [](Job& job) { job.shards[5].bytes += 1; }},
      {"a rank is not asked for", [](Job& job) { job.shards.pop_back(); }},
  };
  for (const auto& [name, change] : changes) {
    SCOPED_TRACE(name);
    KeptPlacement kept;
    Job job;
    Ask(kept, job);
    change(job);
    EXPECT_EQ(Ask(kept, job), Computed(job));
    EXPECT_EQ(kept.computed(), 2u);
    EXPECT_EQ(Ask(kept, job), Computed(job));
    EXPECT_EQ(kept.computed(), 2u);
  }
}

TEST(KeptPlacement, RanksThatWantMoreReplicasDoNotEndWhatIsKeptForTheOthers) {
  KeptPlacement kept;
  Job one;
  Job two;
  two.replicas = 2;
  two.shards.resize(4);
  for (int step = 0; step < 3; ++step) {
    EXPECT_EQ(Ask(kept, one), Computed(one));
    EXPECT_EQ(Ask(kept, two), Computed(two));
  }
  EXPECT_EQ(kept.computed(), 2u);
}

TEST(KeptPlacement, WhatIsRefusedIsRefusedAndNotKept) {
  KeptPlacement kept;
  Job job;
  Ask(kept, job);
  job.shards[5].bytes = UINT64_MAX;
  EXPECT_FALSE(kept.For(job.seed, job.nodes, job.shards, job.replicas).ok());
  job.shards[5].bytes = kShardBytes;
  EXPECT_EQ(Ask(kept, job), Computed(job));
  EXPECT_EQ(kept.computed(), 1u);
}

}  // namespace
}  // namespace holdfast
