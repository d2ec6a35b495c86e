#include "recovery/drain_schedule.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

namespace holdfast {
namespace {

TEST(DrainSchedule, NeverWhenNothingIsSet) {
  EXPECT_FALSE(IsDue({}, {}, {1, 10}, 1000));
  EXPECT_FALSE(IsDue({}, {CheckpointId{1, 5}, 0}, {1, 10}, 1'000'000));
}

TEST(DrainSchedule, TheFirstOneGoes) {
  EXPECT_TRUE(IsDue({.every_steps = 100}, {}, {1, 3}, 1000));
  EXPECT_TRUE(IsDue({.every_ms = 60'000}, {}, {1, 3}, 0));
}

TEST(DrainSchedule, ByCountTheFirstOfEachGroup) {
  const TierSchedule schedule{.every_steps = 10};
  const LastDrained last{CheckpointId{1, 20}, 0};
  EXPECT_FALSE(IsDue(schedule, last, {1, 20}, 0)) << "it is the last itself";
  EXPECT_FALSE(IsDue(schedule, last, {1, 29}, 0));
  EXPECT_TRUE(IsDue(schedule, last, {1, 30}, 0));
  // Saves that skip the round numbers still get their turn, once.
  EXPECT_TRUE(IsDue(schedule, last, {1, 33}, 0));
  EXPECT_FALSE(IsDue(schedule, {CheckpointId{1, 33}, 0}, {1, 39}, 0));
  EXPECT_TRUE(IsDue({.every_steps = 1}, last, {1, 21}, 0));
}

TEST(DrainSchedule, ANewAttemptThatWentBackDrainsItsOwn) {
  const TierSchedule schedule{.every_steps = 10};
  const LastDrained last{CheckpointId{1, 25}, 0};
  EXPECT_TRUE(IsDue(schedule, last, {2, 21}, 0)) << "same group, but of the branch that was left";
  EXPECT_TRUE(IsDue(schedule, last, {2, 25}, 0));
  EXPECT_TRUE(IsDue(schedule, last, {2, 3}, 0));
  EXPECT_FALSE(IsDue(schedule, last, {2, 26}, 0)) << "it went on from there";
}

TEST(DrainSchedule, ByTime) {
  const TierSchedule schedule{.every_ms = 1000};
  const LastDrained last{CheckpointId{1, 20}, 5000};
  EXPECT_FALSE(IsDue(schedule, last, {1, 21}, 5999));
  EXPECT_TRUE(IsDue(schedule, last, {1, 21}, 6000));
  EXPECT_FALSE(IsDue(schedule, last, {1, 20}, 6000)) << "it is the last itself";
  // Either is enough.
  EXPECT_TRUE(IsDue({.every_steps = 1000, .every_ms = 1000}, last, {1, 21}, 6000));
  EXPECT_TRUE(IsDue({.every_steps = 10, .every_ms = 1000}, last, {1, 30}, 5000));
}

TEST(DrainSchedule, AClockThatGoesBackDoesNotStopIt) {
  const TierSchedule schedule{.every_ms = 1000};
  EXPECT_TRUE(IsDue(schedule, {CheckpointId{1, 20}, 5'000'000}, {1, 21}, 1000));
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  EXPECT_TRUE(IsDue(schedule, {CheckpointId{1, 20}, kMin}, {1, 21}, kMax));
  EXPECT_TRUE(IsDue(schedule, {CheckpointId{1, 20}, kMax}, {1, 21}, kMin));
}

// However the steps grow and attempts go back: a step is due within every_steps steps of the last.
TEST(DrainSchedule, NoGroupIsLeftOut) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 200; ++round) {
    const TierSchedule schedule{.every_steps = 1 + random() % 20};
    LastDrained last;
    CheckpointId at{1, random() % 50};
    Step since = at.step;  // first step of the attempt that has not been drained
    for (int i = 0; i < 200; ++i) {
      if (IsDue(schedule, last, at, 0)) {
        last.id = at;
        since = at.step;
      }
      ASSERT_LT(at.step - since, schedule.every_steps);
      if (random() % 20 == 0) {
        at = {at.attempt + 1, at.step - random() % (at.step + 1)};
        since = at.step;
      } else {
        ++at.step;
      }
    }
  }
}

}  // namespace
}  // namespace holdfast
