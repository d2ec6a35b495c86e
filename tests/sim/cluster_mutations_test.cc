// What the simulator of a cluster is worth: it must find every mutation of
// mutations/cluster_mutations.txt within a fixed number of seeds. The program is linked with copies
// of the sources that the catalogue names, in which all mutations are, each behind its number.
//
// A seed is run once as the core is, for all mutations together. That tells which switches were
// asked in it: where a mutation's was not, the mutated core would do the very same, so the seed
// need not be run again for it. What is asked in none is a lack of weather, and what is asked in
// many and not found is a lack of judgement: the two are told apart when a mutation is not found.
//
// HOLDFAST_SIM_SEEDS says how many seeds are looked at.
#include <gtest/gtest.h>

#include <bitset>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "tests/sim/cluster_world.h"

namespace holdfast::sim {
namespace {

enum class Where { kAnywhere, kErasures, kReshards, kRot };
struct Mutation {
  const char* name;
  const char* says;
  Where where;
};
constexpr Mutation kMutations[] = {
#include "mutations.inc"
};
using MutationSet = std::bitset<std::size(kMutations) + 1>;

int active_mutation = 0;  // 0: none, the core as it is
MutationSet asked;        // since the seed began

}  // namespace

bool Mutated(int number) {
  asked.set(static_cast<size_t>(number));
  return active_mutation == number;
}

namespace cluster {
namespace {

constexpr uint64_t kSeedsDefault = 400;

uint64_t Seeds() {
  const char* text = std::getenv("HOLDFAST_SIM_SEEDS");
  return text == nullptr ? kSeedsDefault : std::strtoull(text, nullptr, 10);
}

std::string ViolationOf(Where where, uint64_t seed, int mutation) {
  asked.reset();
  active_mutation = mutation;
  std::string violation;
  try {
    Options options;
    options.seed = seed;
    options.stormy = std::chrono::minutes(5);
    options.rates = where == Where::kErasures   ? Rates::kErasures
                    : where == Where::kReshards ? Rates::kReshards
                    : where == Where::kRot      ? Rates::kRot
                                                : Rates::kAbsurd;
    World world(options);
    world.Run();
    violation = world.violation();
  } catch (const std::exception& e) {  // it would have taken a daemon down
    violation = std::string("thrown: ") + e.what();
  }
  active_mutation = 0;
  return violation;
}

// What the core asks in each seed as it is; the first has 1.
const MutationSet& AskedIn(Where where, uint64_t seed) {
  static std::map<Where, std::vector<MutationSet>> worlds;
  std::vector<MutationSet>& seeds = worlds[where];
  while (seeds.size() < seed) {
    const std::string violation = ViolationOf(where, seeds.size() + 1, 0);
    EXPECT_EQ(violation, "") << "seed " << seeds.size() + 1 << ", unmutated";
    seeds.push_back(asked);
  }
  return seeds[seed - 1];
}

class ClusterMutated : public ::testing::TestWithParam<int> {};

TEST_P(ClusterMutated, IsFound) {
  const int number = GetParam() + 1;
  const Where where = kMutations[GetParam()].where;
  uint64_t tried = 0;
  for (uint64_t seed = 1; seed <= Seeds(); ++seed) {
    if (!AskedIn(where, seed).test(static_cast<size_t>(number))) {
      continue;
    }
    ++tried;
    if (const std::string violation = ViolationOf(where, seed, number); !violation.empty()) {
      RecordProperty("violation", violation);
      std::printf("  seed %d, the %d. that asks: %s\n", static_cast<int>(seed),
                  static_cast<int>(tried), violation.c_str());
      return;
    }
  }
  FAIL() << "not found within " << Seeds() << " seeds, of which " << tried
         << " ask: " << kMutations[GetParam()].says;
}

INSTANTIATE_TEST_SUITE_P(All, ClusterMutated,
                         ::testing::Range(0, static_cast<int>(std::size(kMutations))),
                         [](const auto& mutation) { return kMutations[mutation.param].name; });

}  // namespace
}  // namespace cluster
}  // namespace holdfast::sim
