#include "server/drive_copies.h"

#include <gtest/gtest.h>

namespace holdfast {
namespace {

using State = DriveCopies::State;

JobUuid Job(uint8_t n) {
  JobUuid uuid;
  uuid.bytes[0] = n;
  return uuid;
}

DurableCopy Copy(Step step, Rank rank, const std::string& dir = "/a", uint64_t bytes = 10) {
  DurableCopy copy;
  copy.copy.id = {Job(1), 1, step, rank};
  copy.copy.image_bytes = bytes;
  copy.location = dir + "/" + std::to_string(step);
  return copy;
}

constexpr MonotonicTime At(int64_t ns) {
  return MonotonicTime{ns};
}

TEST(DriveCopies, WhatGoesTakesItsRoomToTheEnd) {
  DriveCopies copies;
  copies.Written(Copy(1, 0), At(5));
  copies.Written(Copy(1, 1), At(5));
  copies.Written(Copy(2, 0), At(6));
  EXPECT_EQ(copies.Bytes(), 30u);
  copies.Remove(Job(1), {1, 1});
  EXPECT_EQ(copies.Bytes(), 30u);
  EXPECT_EQ(copies.Find({Job(1), 1, 1, 0})->state, State::kGoing);
  EXPECT_FALSE(copies.Seen(Copy(1, 0), At(7))) << "on its way out";
  // It fails, and leaves one.
  copies.Removed(Job(1), {1, 1}, std::vector<Rank>{1}, At(8));
  EXPECT_EQ(copies.Bytes(), 20u);
  copies.Removed(Job(1), {1, 1}, std::nullopt, At(9));
  EXPECT_EQ(copies.Bytes(), 10u);
  // A scan that began before that may have seen it.
  EXPECT_FALSE(copies.Seen(Copy(1, 0), At(9)));
  EXPECT_TRUE(copies.Seen(Copy(1, 0), At(10)));
  copies.Forget(Job(1));
  EXPECT_EQ(copies.Bytes(), 0u);
  EXPECT_FALSE(copies.Any(Job(1)));
}

TEST(DriveCopies, WhatWasWrittenSinceIsNotWhatAnOlderScanSaw) {
  DriveCopies copies;
  copies.Written(Copy(1, 0, "/a", 20), At(5));
  EXPECT_FALSE(copies.Seen(Copy(1, 0, "/b", 10), At(4)));
  EXPECT_EQ(copies.Find({Job(1), 1, 1, 0})->copy.location, "/a/1");
  EXPECT_EQ(copies.Bytes(), 20u);
  EXPECT_TRUE(copies.Seen(Copy(1, 0, "/b", 10), At(6)));
  EXPECT_EQ(copies.Bytes(), 10u);
}

TEST(DriveCopies, WhatIsOutOfReachTakesItsRoomUntilItsDriveHasBeenRead) {
  DriveCopies copies;
  copies.Written(Copy(1, 0, "/a"), At(5));
  copies.Written(Copy(1, 1, "/ab"), At(5));
  copies.SetAway("/a");
  EXPECT_EQ(copies.Find({Job(1), 1, 1, 0})->state, State::kAway);
  EXPECT_EQ(copies.Find({Job(1), 1, 1, 1})->state, State::kThere);
  copies.Remove(Job(1), {1, 1});  // reaches only the other one
  copies.Removed(Job(1), {1, 1}, std::nullopt, At(6));
  EXPECT_EQ(copies.Bytes(), 10u);
  EXPECT_TRUE(copies.Seen(Copy(1, 0, "/a"), At(7)));
  copies.DropAway("/a");
  EXPECT_EQ(copies.Bytes(), 10u);
  copies.SetAway("/a");
  copies.DropAway("/a");
  EXPECT_EQ(copies.Bytes(), 0u);
}

TEST(DriveCopies, ScansThatDidNotSeeItDropWhatIsOlder) {
  DriveCopies copies;
  copies.Seen(Copy(1, 0), At(5));
  copies.Written(Copy(2, 0), At(5));
  copies.Written(Copy(3, 0), At(9));
  copies.DropUnseen(Job(1), At(7), {{Job(1), 1, 1, 0}});
  EXPECT_NE(copies.Find({Job(1), 1, 1, 0}), nullptr);
  EXPECT_EQ(copies.Find({Job(1), 1, 2, 0}), nullptr);
  EXPECT_NE(copies.Find({Job(1), 1, 3, 0}), nullptr);
  copies.DropUnseen(Job(1), {}, {});
  EXPECT_EQ(copies.Bytes(), 20u) << "nothing is known of when";
}

TEST(DriveCopies, ACopyThatIsWrittenAgainIsGoodAndCountsOnce) {
  DriveCopies copies;
  copies.Written(Copy(1, 0), At(5));
  copies.SetBad({Job(1), 1, 1, 0}, true);
  copies.Seen(Copy(1, 0), At(6));
  EXPECT_TRUE(copies.Find({Job(1), 1, 1, 0})->bad) << "it is not good because it still lies there";
  copies.Written(Copy(1, 0, "/b", 12), At(7));
  EXPECT_FALSE(copies.Find({Job(1), 1, 1, 0})->bad);
  EXPECT_EQ(copies.Bytes(), 12u);
}

}  // namespace
}  // namespace holdfast
