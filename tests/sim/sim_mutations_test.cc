// What the simulator is worth: it must find every mutation of mutations/mutations.txt within a
// fixed number of seeds. The program is linked with copies of the state machines that hold all
// mutations, each behind its number.
//
// HOLDFAST_SIM_SEEDS says how many seeds a mutation gets at most; the run stops at the first that
// finds it.
#include <gtest/gtest.h>

#include <cstdlib>
#include <exception>
#include <iterator>
#include <string>

#include "tests/sim/sim_world.h"

namespace holdfast::sim {

int active_mutation = 0;  // 0: none, the core as it is

bool Mutated(int number) {
  return active_mutation == number;
}

namespace {

constexpr int kSeedsDefault = 400;
constexpr int kUnmutatedSeeds = 10;

enum class Where { kAnywhere, kCramped };
struct Mutation {
  const char* name;
  const char* says;
  Where where;
};
constexpr Mutation kMutations[] = {
#include "mutations.inc"
};

int Seeds() {
  const char* text = std::getenv("HOLDFAST_SIM_SEEDS");
  return text == nullptr ? kSeedsDefault : std::atoi(text);
}

std::string ViolationOf(uint64_t seed, Where where = Where::kAnywhere) {
  try {
    WorldOptions options;
    options.cramped = where == Where::kCramped;
    World world(seed, options);
    world.Run();
    return world.violation();
  } catch (const std::exception& e) {  // it would have taken the daemon down
    return std::string("thrown: ") + e.what();
  }
}

class Mutated : public ::testing::TestWithParam<int> {};

TEST_P(Mutated, IsFound) {
  const Mutation& mutation = kMutations[GetParam()];
  active_mutation = GetParam() + 1;
  int seed = 1;
  std::string violation;
  while (seed <= Seeds() &&
         (violation = ViolationOf(static_cast<uint64_t>(seed), mutation.where)).empty()) {
    ++seed;
  }
  active_mutation = 0;
  if (violation.empty()) {
    FAIL() << "not found within " << Seeds() << " seeds: " << mutation.says;
  }
  // It is the mutation that was found, not something else.
  ASSERT_EQ(ViolationOf(static_cast<uint64_t>(seed), mutation.where), "")
      << "seed " << seed << ", unmutated";
  RecordProperty("seed", seed);
  RecordProperty("violation", violation);
  std::printf("  seed %d: %s\n", seed, violation.c_str());
}

INSTANTIATE_TEST_SUITE_P(All, Mutated, ::testing::Range(0, static_cast<int>(std::size(kMutations))),
                         [](const auto& mutation) { return kMutations[mutation.param].name; });

// The switches themselves change nothing.
TEST(Unmutated, HasNoViolation) {
  for (uint64_t seed = 1; seed <= kUnmutatedSeeds; ++seed) {
    ASSERT_EQ(ViolationOf(seed), "") << "seed " << seed;
  }
}

}  // namespace
}  // namespace holdfast::sim
