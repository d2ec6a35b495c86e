#include "server/durable_room.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

namespace holdfast {
namespace {

using ::testing::Pair;

constexpr TierKind kNvme = TierKind::kNvme;
constexpr TierKind kRemote = TierKind::kRemote;

JobUuid Job(uint8_t n) {
  JobUuid uuid;
  uuid.bytes[0] = n;
  return uuid;
}
const JobUuid kJob = Job(1);

// Whoever needs room, and when: each call comes a good while after the one before.
class DurableRoomTest : public ::testing::Test {
 protected:
  std::pair<JobUuid, RoomStage> Next(TierKind tier, const std::vector<DurableRoom::Ended>& ended,
                                     const JobUuid& job = kJob) {
    now_ = now_ + kRoomPatience;
    const auto ask = room_.Next(tier, job, ended, false, now_);
    return ask ? std::pair(ask->job, ask->stage) : std::pair(JobUuid(), RoomStage::kUsual);
  }

  DurableRoom room_;
  MonotonicTime now_{};
};

TEST_F(DurableRoomTest, AJobAloneIsAskedForWhatItCanSpareFirst) {
  EXPECT_THAT(Next(kNvme, {}), Pair(kJob, RoomStage::kIncomplete));
  EXPECT_THAT(Next(kNvme, {}), Pair(kJob, RoomStage::kLeftBranches));
  EXPECT_THAT(Next(kNvme, {}), Pair(kJob, RoomStage::kIncomplete))
      << "and again, as long as there is no room";
}

// So that no more goes than is needed: the largest first.
TEST_F(DurableRoomTest, OneJobAfterTheOtherIsAskedInEachStage) {
  const std::vector<DurableRoom::Ended> ended{
      {Job(2), true, 10}, {Job(3), false, 30}, {Job(4), true, 0}, {Job(5), false, 20}};
  const std::vector<std::pair<uint8_t, RoomStage>> order{
      {1, RoomStage::kIncomplete},    {2, RoomStage::kIncomplete},
      {3, RoomStage::kEndedInRemote}, {5, RoomStage::kEndedInRemote},
      {2, RoomStage::kEndedInRemote}, {1, RoomStage::kLeftBranches},
      {2, RoomStage::kLeftBranches},  {3, RoomStage::kEndedJobs},
      {5, RoomStage::kEndedJobs},     {2, RoomStage::kEndedJobs},
      {1, RoomStage::kIncomplete},
  };
  for (const auto& [job, stage] : order) {
    EXPECT_THAT(Next(kNvme, ended), Pair(Job(job), stage));
  }
}

TEST_F(DurableRoomTest, NothingMoreIsAskedForWhileSomethingIsOnItsWayOut) {
  EXPECT_THAT(Next(kNvme, {}), Pair(kJob, RoomStage::kIncomplete));
  now_ = now_ + kRoomPatience;
  EXPECT_FALSE(room_.Next(kNvme, kJob, {}, true, now_).has_value());
  EXPECT_THAT(Next(kNvme, {}), Pair(kJob, RoomStage::kLeftBranches));
}

// Eight ranks that find no room at the same time are one reason to ask, not eight.
TEST_F(DurableRoomTest, WhoeverIsAskedHasTimeToBegin) {
  EXPECT_THAT(Next(kNvme, {}), Pair(kJob, RoomStage::kIncomplete));
  const MonotonicTime asked = now_;
  for (const JobUuid& job : {kJob, Job(2)}) {
    EXPECT_FALSE(room_.Next(kNvme, job, {}, false, asked + kRoomPatience / 2).has_value());
  }
  EXPECT_TRUE(room_.Next(kRemote, kJob, {}, false, asked).has_value());
  EXPECT_THAT(Next(kNvme, {}), Pair(kJob, RoomStage::kLeftBranches));
}

TEST_F(DurableRoomTest, WhoFoundRoomBeginsAnewAndNobodyElse) {
  Next(kNvme, {});
  Next(kRemote, {});
  Next(kNvme, {}, Job(2));
  room_.Found(kNvme, kJob);
  EXPECT_THAT(Next(kNvme, {}), Pair(kJob, RoomStage::kIncomplete));
  EXPECT_THAT(Next(kRemote, {}), Pair(kJob, RoomStage::kLeftBranches));
  EXPECT_THAT(Next(kNvme, {}, Job(2)), Pair(Job(2), RoomStage::kLeftBranches));
}

// Nobody's copies in remote go because a job has ended.
TEST_F(DurableRoomTest, RemoteTakesNothingOfOtherUsers) {
  const std::vector<DurableRoom::Ended> ended{{Job(3), false, 30}};
  for (int i = 0; i < 6; ++i) {
    EXPECT_THAT(Next(kRemote, ended),
                Pair(kJob, i % 2 == 0 ? RoomStage::kIncomplete : RoomStage::kLeftBranches));
  }
}

}  // namespace
}  // namespace holdfast
