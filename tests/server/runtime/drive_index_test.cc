// Which drives have which copies.
#include "server/runtime/tiers/drive_index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

const JobUuid kJob = JobUuid::FromBytes(std::string(16, 'a')).value();
const JobUuid kOther = JobUuid::FromBytes(std::string(16, 'b')).value();

TEST(DriveIndexTest, OneCopyMayLieOnTwoDrives) {
  DriveIndex index;
  index.Put({kJob, 1, 10, 0}, 0);
  index.Put({kJob, 1, 10, 1}, 1);
  index.Put({kJob, 1, 10, 0}, 1);
  EXPECT_EQ(index.Find({kJob, 1, 10, 0}), 1u) << "the one that was told last";
  EXPECT_THAT(index.RanksOf(kJob, {1, 10}, 0), ElementsAre(0));
  EXPECT_THAT(index.RanksOf(kJob, {1, 10}, 1), ElementsAre(0, 1));
  index.Erase(kJob, {1, 10}, 1);
  EXPECT_EQ(index.Find({kJob, 1, 10, 0}), 0u);
  EXPECT_EQ(index.Find({kJob, 1, 10, 1}), std::nullopt);
}

TEST(DriveIndexTest, AJobThatWasRemovedLeavesNothing) {
  DriveIndex index;
  for (const JobUuid& job : {kJob, kOther}) {
    for (Step step = 1; step <= 3; ++step) {
      index.Put({job, step, step, 0}, 0);
      index.Put({job, step, step, 1}, 1);
    }
  }
  index.EraseJob(kJob, 0);
  EXPECT_THAT(index.RanksOf(kJob, {2, 2}, std::nullopt), ElementsAre(1));
  index.EraseJob(kJob, 1);
  for (Step step = 1; step <= 3; ++step) {
    EXPECT_THAT(index.RanksOf(kJob, {step, step}, std::nullopt), IsEmpty());
    EXPECT_THAT(index.RanksOf(kOther, {step, step}, std::nullopt), ElementsAre(0, 1));
  }
}

}  // namespace
}  // namespace holdfast
