// Seeded simulation of whole clusters. A failure prints the command that repeats it, and with
// --trace tells all that happened. The long run is cluster_sim (docs/simulator.md).
//
// HOLDFAST_SIM_SEEDS says how many seeds there are.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "tests/sim/cluster_world.h"

namespace holdfast::sim::cluster {
namespace {

uint64_t Seeds() {
  const char* text = std::getenv("HOLDFAST_SIM_SEEDS");
  return text == nullptr ? HOLDFAST_CLUSTER_SEEDS_DEFAULT : std::strtoull(text, nullptr, 10);
}

// So many come through all that is expected of them together.
constexpr uint64_t kSeedsForAll = 20;
constexpr const char* kOfResharding[] = {
    "job: comes back with more ranks",
    "job: comes back with fewer ranks",
    "reshard: by more ranks",
    "reshard: by fewer ranks",
    "reshard: another layout",
    "reshard: records told",
    "reshard: shard from memory",
    "reshard: shard from nvme",
    "reshard: shard from remote",
    "reshard: shard from remote, in parts",
    "reshard: shard from peer, in parts",
    "reshard: parts read",
    "reshard: a bad copy is passed over",
    "reshard: a copy that cannot be read is passed over",
    "reshard: could not load",
    "reshard: shards are bad",
    "reshard: dies",
    "reshard: hangs",
    "reshard: loses its connection",
    "reshard: lets go over the next connection",
    "records: of all ranks",
    "records: some are left out",
    "records: not gathered",
    "parts: called off",
    "parts: not opened",
    "parts: the next node is asked",
    "parts: let go while nothing is read",
};

Counts RunSeeds(Options options, uint64_t seeds) {
  Counts all;
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    options.seed = seed;
    World world(options);
    world.Run();
    all.Add(world.counts);
    EXPECT_EQ(world.violation(), "")
        << "(" << world.Summary() << ")\n  repeat it with: " << world.Command() << " --trace";
    if (!world.violation().empty()) {
      break;
    }
  }
  return all;
}

TEST(ClusterSimulation, WithoutFaults) {
  Options options;
  options.rates = Rates::kNone;
  options.stormy = std::chrono::minutes(1);
  RunSeeds(options, 1 + Seeds() / 10);
}

TEST(ClusterSimulation, AbsurdRates) {
  Options options;
  options.stormy = std::chrono::minutes(5);
  const Counts counts = RunSeeds(options, Seeds());
  // It is a storm: a run that meets few faults proves nothing.
  EXPECT_GT(counts.Faults(), 50 * Seeds());
  EXPECT_GT(counts.restores, Seeds());
  if (Seeds() >= kSeedsForAll) {
    EXPECT_GT(counts.states.count("reshard: loaded"), 0u);  // in two of seven seeds
  }
  std::printf("%s", counts.Report().c_str());
}

// Jobs that come back with other numbers of ranks, which read what those before them saved, in
// every way in which that goes well and badly.
TEST(ClusterSimulation, Reshards) {
  Options options;
  options.rates = Rates::kReshards;
  options.stormy = std::chrono::minutes(5);
  const Counts counts = RunSeeds(options, 1 + Seeds() * 3 / 4);
  EXPECT_GT(counts.states.count("reshard: loaded"), 0u);
  for (const char* state : kOfResharding) {
    EXPECT_TRUE(counts.states.count(state) > 0 || Seeds() < kSeedsForAll) << state;
  }
}

// Nodes that are drained, jobs that are told to end, settings that are read again.
TEST(ClusterSimulation, Operators) {
  Options options;
  options.rates = Rates::kOperators;
  options.stormy = std::chrono::minutes(5);
  const Counts counts = RunSeeds(options, 1 + Seeds() / 2);
  EXPECT_GT(counts.states.count("end: the last step is in remote"), 0u);
  for (const Fault fault : {Fault::kDrained, Fault::kToldToEnd, Fault::kSettingsRead}) {
    EXPECT_GT(counts.faults[static_cast<size_t>(fault)], 0u) << NameOf(fault);
  }
}

// Copies in the durable tiers that go bad, are found so, and are written anew.
TEST(ClusterSimulation, Rot) {
  Options options;
  options.rates = Rates::kRot;
  options.stormy = std::chrono::minutes(5);
  const Counts counts = RunSeeds(options, 1 + Seeds() / 8);
  for (const char* state : {"scan: a bad copy", "scrub: bad", "repair: from memory",
                            "repair: from nvme", "repair: from remote", "replacement: written"}) {
    EXPECT_TRUE(counts.states.count(state) > 0 || Seeds() < kSeedsForAll) << state;
  }
}

TEST(ClusterSimulation, RealisticRates) {
  Options options;
  options.rates = Rates::kRealistic;
  options.stormy = std::chrono::minutes(30);
  RunSeeds(options, 1 + Seeds() / 4);
}

// The same seed, the same run: else no failure could be repeated.
TEST(ClusterSimulation, ASeedReplaysExactly) {
  Options options;
  options.seed = 7;
  options.stormy = std::chrono::minutes(1);
  World first(options);
  first.Run();
  World second(options);
  second.Run();
  EXPECT_EQ(first.Summary(), second.Summary());
  EXPECT_EQ(first.counts.Report(), second.counts.Report());
}

}  // namespace
}  // namespace holdfast::sim::cluster
