// What NVMe may hold when the configuration leaves it open.
#include <gtest/gtest.h>

#include "base/fault_env.h"
#include "server/runtime/tiers/durable_tiers.h"

namespace holdfast {
namespace {

constexpr uint64_t kTotal = 1000;

class NvmeBudgetTest : public ::testing::Test {
 protected:
  NvmeBudgetTest() {
    env_.SetBytesTotal(kTotal);
    config_.add_dirs("/a/holdfast");
    config_.add_dirs("/b/holdfast");
    EXPECT_TRUE(env_.CreateDirectories("/a", 0700).ok());
    EXPECT_TRUE(env_.CreateDirectories("/b", 0700).ok());
  }
  NvmeBudget Ask() { return AskNvmeBudget(env_, config_); }

  FaultEnv env_;
  v1::NvmeConfig config_;
};

TEST_F(NvmeBudgetTest, EachDriveCounts) {
  env_.SetDevice(7, "/b");
  const NvmeBudget budget = Ask();
  EXPECT_TRUE(budget.problems.empty());
  EXPECT_EQ(budget.bytes_max + 2 * budget.pool_bytes, 2 * 8 * kTotal / 10);
  EXPECT_EQ(budget.pool_bytes, 8 * kTotal / 100);
}

TEST_F(NvmeBudgetTest, AFileSystemWithTwoOfTheDirectoriesCountsOnce) {
  const NvmeBudget budget = Ask();
  EXPECT_EQ(budget.bytes_max + 2 * budget.pool_bytes, 8 * kTotal / 10);
}

TEST_F(NvmeBudgetTest, NothingIsRecycledIfTheSettingSaysSo) {
  config_.set_recycle_bytes_max(0);
  EXPECT_EQ(Ask().pool_bytes, 0u);
  EXPECT_EQ(Ask().bytes_max, 8 * kTotal / 10);
  config_.set_recycle_bytes_max(50);
  EXPECT_EQ(Ask().pool_bytes, 50u);
}

}  // namespace
}  // namespace holdfast
