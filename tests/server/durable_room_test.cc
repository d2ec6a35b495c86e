#include "server/durable_room.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

constexpr TierKind kNvme = TierKind::kNvme;
constexpr TierKind kRemote = TierKind::kRemote;

JobUuid Job(uint8_t n) {
  JobUuid uuid;
  uuid.bytes[0] = n;
  return uuid;
}
const JobUuid kJob = Job(1);

std::vector<std::pair<JobUuid, RoomStage>> Next(DurableRoom& room, TierKind tier,
                                                const std::vector<DurableRoom::Ended>& ended,
                                                bool going = false) {
  std::vector<std::pair<JobUuid, RoomStage>> asks;
  for (const DurableRoom::Ask& ask : room.Next(tier, kJob, ended, going)) {
    asks.emplace_back(ask.job, ask.stage);
  }
  return asks;
}

TEST(DurableRoom, AJobAloneIsAskedForWhatItCanSpareFirst) {
  DurableRoom room;
  EXPECT_THAT(Next(room, kNvme, {}), ElementsAre(Pair(kJob, RoomStage::kIncomplete)));
  EXPECT_THAT(Next(room, kNvme, {}), ElementsAre(Pair(kJob, RoomStage::kLeftBranches)));
  EXPECT_THAT(Next(room, kNvme, {}), ElementsAre(Pair(kJob, RoomStage::kIncomplete)))
      << "and again, as long as there is no room";
}

TEST(DurableRoom, EndedJobsGiveTheirLastCopiesLastAndOneByOne) {
  DurableRoom room;
  const std::vector<DurableRoom::Ended> ended{
      {Job(2), true, 10}, {Job(3), false, 30}, {Job(4), true, 0}, {Job(5), false, 20}};
  EXPECT_THAT(Next(room, kNvme, ended), ElementsAre(Pair(kJob, RoomStage::kIncomplete),
                                                    Pair(Job(2), RoomStage::kIncomplete)));
  EXPECT_THAT(Next(room, kNvme, ended), ElementsAre(Pair(Job(3), RoomStage::kEndedInRemote),
                                                    Pair(Job(5), RoomStage::kEndedInRemote),
                                                    Pair(Job(2), RoomStage::kEndedInRemote)));
  EXPECT_THAT(Next(room, kNvme, ended), ElementsAre(Pair(kJob, RoomStage::kLeftBranches),
                                                    Pair(Job(2), RoomStage::kLeftBranches)));
  for (const uint8_t job : {3, 5, 2}) {
    EXPECT_THAT(Next(room, kNvme, ended), ElementsAre(Pair(Job(job), RoomStage::kEndedJobs)));
  }
  EXPECT_THAT(Next(room, kNvme, ended), ElementsAre(Pair(kJob, RoomStage::kIncomplete),
                                                    Pair(Job(2), RoomStage::kIncomplete)));
}

TEST(DurableRoom, NothingMoreIsAskedForWhileSomethingIsOnItsWayOut) {
  DurableRoom room;
  EXPECT_THAT(Next(room, kNvme, {}), ElementsAre(Pair(kJob, RoomStage::kIncomplete)));
  EXPECT_THAT(Next(room, kNvme, {}, true), IsEmpty());
  EXPECT_THAT(Next(room, kNvme, {}), ElementsAre(Pair(kJob, RoomStage::kLeftBranches)));
}

TEST(DurableRoom, WhoFoundRoomBeginsAnew) {
  DurableRoom room;
  Next(room, kNvme, {});
  Next(room, kRemote, {});
  room.Found(kNvme);
  EXPECT_THAT(Next(room, kNvme, {}), ElementsAre(Pair(kJob, RoomStage::kIncomplete)));
  EXPECT_THAT(Next(room, kRemote, {}), ElementsAre(Pair(kJob, RoomStage::kLeftBranches)));
}

// Nobody's copies in remote go because a job has ended.
TEST(DurableRoom, RemoteTakesNothingOfOtherUsers) {
  DurableRoom room;
  const std::vector<DurableRoom::Ended> ended{{Job(3), false, 30}};
  for (int i = 0; i < 6; ++i) {
    EXPECT_THAT(
        Next(room, kRemote, ended),
        ElementsAre(Pair(kJob, i % 2 == 0 ? RoomStage::kIncomplete : RoomStage::kLeftBranches)));
  }
}

}  // namespace
}  // namespace holdfast
