#include "tests/tiers/memory/memory_harness.h"
#include "tests/tiers/tier_conformance.h"

namespace holdfast {
namespace {

std::string Name(const testing::TestParamInfo<HarnessFactory>& info) {
  return info.param.name;
}

INSTANTIATE_TEST_SUITE_P(Memory, TierConformance,
                         testing::Values(HarnessFactory{"FaultEnv", MakeFaultEnvHarness},
                                         HarnessFactory{"SharedMemory", MakeSharedMemoryHarness}),
                         Name);
INSTANTIATE_TEST_SUITE_P(Memory, TierCrashConformance,
                         testing::Values(HarnessFactory{"FaultEnv", MakeFaultEnvHarness}), Name);

}  // namespace
}  // namespace holdfast
