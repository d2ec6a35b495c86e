// Seeded simulation of the control logic. A failure prints the command that repeats it; with
// HOLDFAST_SIM_TRACE=1 it tells what happened. HOLDFAST_SIM_SEEDS says how many seeds the long run
// takes.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "tests/sim/sim_client.h"
#include "tests/sim/sim_world.h"

namespace holdfast::sim {
namespace {

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

void RunSeeds(uint64_t first, uint64_t count, WorldOptions options) {
  options.trace = std::getenv("HOLDFAST_SIM_TRACE") != nullptr;
  const uint64_t only = FromEnvironment("HOLDFAST_SIM_SEED", 0);
  for (uint64_t seed = only != 0 ? only : first; seed < (only != 0 ? only + 1 : first + count);
       ++seed) {
    World world(seed, options);
    world.Run();
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    ASSERT_EQ(world.violation(), "")
        << "seed " << seed << " (" << world.Summary()
        << "); repeat it with\n  HOLDFAST_SIM_TRACE=1 HOLDFAST_SIM_SEED=" << seed << " "
        << "build/<tree>/tests/sim_test"
        << " --gtest_filter=" << test->test_suite_name() << "." << test->name();
    if (only != 0) {
      ::testing::Test::RecordProperty("summary", world.Summary());
    }
  }
}

TEST(Simulation, Seeds) {
  RunSeeds(1, FromEnvironment("HOLDFAST_SIM_SEEDS", HOLDFAST_SIM_SEEDS_DEFAULT), {});
}

}  // namespace
}  // namespace holdfast::sim
