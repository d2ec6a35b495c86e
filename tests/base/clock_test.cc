#include "base/clock.h"

#include <gtest/gtest.h>

namespace holdfast {
namespace {

TEST(ClockTest, SystemTimeDoesNotGoBack) {
  Clock& clock = *Clock::System();
  MonotonicTime last = clock.Now();
  for (int i = 0; i < 1000; ++i) {
    const MonotonicTime now = clock.Now();
    EXPECT_GE(now, last);
    last = now;
  }
}

TEST(ClockTest, WallTimeIsInMilliseconds) {
  EXPECT_GT(Clock::System()->UnixMillis(), 1'600'000'000'000);
  EXPECT_LT(Clock::System()->UnixMillis(), 16'000'000'000'000);
}

TEST(ClockTest, ManualClockMovesOnlyWhenTold) {
  ManualClock clock;
  const MonotonicTime begin = clock.Now();
  const int64_t millis = clock.UnixMillis();
  EXPECT_EQ(clock.Now(), begin);
  clock.Advance(std::chrono::seconds(3));
  EXPECT_EQ(clock.Now() - begin, std::chrono::seconds(3));
  EXPECT_EQ(clock.Now(), begin + std::chrono::seconds(3));
  EXPECT_EQ(clock.UnixMillis(), millis + 3000);
}

}  // namespace
}  // namespace holdfast
