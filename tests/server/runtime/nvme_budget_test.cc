// What NVMe may hold when the configuration leaves it open.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "base/fault_env.h"
#include "server/runtime/tiers/nvme_budget.h"

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

TEST_F(NvmeBudgetTest, WhatIsConfiguredIsNotAskedFor) {
  config_.set_bytes_max(500);
  env_.FailMatching("statfs", EIO);
  const NvmeBudget budget = Ask();
  EXPECT_TRUE(budget.problems.empty());
  EXPECT_EQ(budget.bytes_max + 2 * budget.pool_bytes, 500u);
}

TEST_F(NvmeBudgetTest, FilesKeptForReuseThatLeaveNoRoomAreAProblem) {
  config_.set_recycle_bytes_max(400);
  const NvmeBudget budget = Ask();
  EXPECT_EQ(budget.bytes_max, 1u);
  EXPECT_THAT(budget.problems,
              ::testing::ElementsAre(
                  "nvme.recycle_bytes_max: 400 B on each of 2 drives leave no room for copies in "
                  "the budget of 800 B (nvme.bytes_max); lower the one, or raise the other"));
}

TEST_F(NvmeBudgetTest, ADriveThatFailsCountsForNothing) {
  env_.SetDevice(7, "/b");
  env_.FailMatching("statfs /b", EIO);
  const NvmeBudget budget = Ask();
  EXPECT_EQ(budget.bytes_max + 2 * budget.pool_bytes, 8 * kTotal / 10);
  ASSERT_EQ(budget.problems.size(), 1u);
  EXPECT_THAT(budget.problems[0], ::testing::StartsWith("nvme.dirs: statfs '/b': "));
}

// A mount that hangs: it is not waited for longer than that, and the other drive counts.
TEST_F(NvmeBudgetTest, ADriveThatNeverAnswersCountsForNothing) {
  static FaultEnv& env = *new FaultEnv;  // not destroyed: the thread that hung is still in it
  env.SetBytesTotal(kTotal);
  ASSERT_TRUE(env.CreateDirectories("/a", 0700).ok());
  ASSERT_TRUE(env.CreateDirectories("/b", 0700).ok());
  env.SetDevice(7, "/b");
  env.StallMatching("statfs /b");
  const NvmeBudget budget = AskNvmeBudget(env, config_, std::chrono::seconds(10));
  EXPECT_TRUE(env.WaitForStalled(1, std::chrono::seconds(0))) << "it is still asked";
  EXPECT_EQ(budget.bytes_max + 2 * budget.pool_bytes, 8 * kTotal / 10);
  EXPECT_THAT(budget.problems,
              ::testing::ElementsAre("nvme.dirs: '/b/holdfast' did not answer within 10 s"));
  env.ReleaseStalled("statfs /b");
}

}  // namespace
}  // namespace holdfast
