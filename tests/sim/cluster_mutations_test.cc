// What the simulator of a cluster is worth: it must find every mutation of
// mutations/cluster_mutations.txt within a fixed number of seeds. The program is linked with copies
// of the sources that the catalogue names, in which all mutations are, each behind its number.
//
// HOLDFAST_SIM_SEEDS says how many seeds a mutation gets at most; the run stops at the first that
// finds it.
#include <gtest/gtest.h>

#include <cstdlib>
#include <exception>
#include <iterator>
#include <string>

#include "tests/sim/cluster_world.h"

namespace holdfast::sim {

int active_mutation = 0;  // 0: none, the core as it is

namespace cluster {
namespace {

constexpr uint64_t kSeedsDefault = 300;
constexpr uint64_t kUnmutatedSeeds = 5;

struct Mutation {
  const char* name;
  const char* says;
  bool cramped;
};
constexpr Mutation kMutations[] = {
#include "mutations.inc"
};

uint64_t Seeds() {
  const char* text = std::getenv("HOLDFAST_SIM_SEEDS");
  return text == nullptr ? kSeedsDefault : std::strtoull(text, nullptr, 10);
}

std::string ViolationOf(uint64_t seed) {
  try {
    Options options;
    options.seed = seed;
    options.stormy = std::chrono::minutes(5);
    World world(options);
    world.Run();
    return world.violation();
  } catch (const std::exception& e) {  // it would have taken a daemon down
    return std::string("thrown: ") + e.what();
  }
}

class ClusterMutated : public ::testing::TestWithParam<int> {};

TEST_P(ClusterMutated, IsFound) {
  const Mutation& mutation = kMutations[GetParam()];
  std::string violation;
  uint64_t seed = 0;
  while (violation.empty() && seed < Seeds()) {
    active_mutation = GetParam() + 1;
    violation = ViolationOf(++seed);
    active_mutation = 0;
  }
  ASSERT_NE(violation, "") << "not found within " << Seeds() << " seeds: " << mutation.says;
  // It is the mutation that was found, not something else.
  ASSERT_EQ(ViolationOf(seed), "") << "seed " << seed << ", unmutated";
  RecordProperty("violation", violation);
  std::printf("  seed %d: %s\n", static_cast<int>(seed), violation.c_str());
}

INSTANTIATE_TEST_SUITE_P(All, ClusterMutated,
                         ::testing::Range(0, static_cast<int>(std::size(kMutations))),
                         [](const auto& mutation) { return kMutations[mutation.param].name; });

// The switches themselves change nothing.
TEST(ClusterUnmutated, HasNoViolation) {
  for (uint64_t seed = 1; seed <= kUnmutatedSeeds; ++seed) {
    ASSERT_EQ(ViolationOf(seed), "") << "seed " << seed;
  }
}

}  // namespace
}  // namespace cluster
}  // namespace holdfast::sim
