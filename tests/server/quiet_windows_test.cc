#include "server/quiet_windows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <utility>
#include <vector>

namespace holdfast {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr MonotonicTime kStart{0};

class QuietWindowsTest : public ::testing::Test {
 protected:
  void Open(uint64_t who, uint32_t windows = 1) {
    NetworkFlag& flag = flags_[who];
    flag.stretch += flag.open == 0 ? 1 : 0;
    flag.open += windows;
  }
  void Close(uint64_t who) { flags_[who].open = 0; }
  // As the gate does it: all flags are read, then it is asked.
  bool Holds() {
    for (const auto& [who, flag] : flags_) {
      windows_.Says(who, flag, now_);
    }
    return windows_.Holds(now_);
  }
  // Looks every 2 ms for so long, while something waits. How long it was held.
  Duration HeldFor(Duration wait) {
    Duration held{0};
    const MonotonicTime end = now_ + wait;
    while (now_ < end) {
      const bool holds = Holds();
      now_ = now_ + milliseconds(2);
      held += holds ? milliseconds(2) : Duration(0);
    }
    return held;
  }

  std::map<uint64_t, NetworkFlag> flags_;
  QuietWindows windows_;
  MonotonicTime now_ = kStart;
};

TEST_F(QuietWindowsTest, TrafficWaitsWhileAnybodyIsBusy) {
  EXPECT_FALSE(Holds());
  Open(1);
  EXPECT_TRUE(Holds());
  EXPECT_TRUE(windows_.holding());
  Open(2);
  Close(1);
  EXPECT_TRUE(Holds());
  EXPECT_EQ(windows_.busy(now_), 1u);
  Close(2);
  EXPECT_FALSE(Holds());
  EXPECT_FALSE(windows_.holding());
}

TEST_F(QuietWindowsTest, WindowsAreCounted) {
  Open(1, 2);
  EXPECT_TRUE(Holds());
  flags_[1].open = 1;
  EXPECT_TRUE(Holds());
  flags_[1].open = 0;
  EXPECT_FALSE(Holds());
}

TEST_F(QuietWindowsTest, AProcessThatIsGoneHoldsNothing) {
  Open(1);
  EXPECT_TRUE(Holds());
  windows_.Gone(1);
  EXPECT_FALSE(windows_.Holds(now_));
}

TEST_F(QuietWindowsTest, AForgottenWindowEnds) {
  Open(1);
  EXPECT_EQ(HeldFor(seconds(60)), kHeldMax);
  EXPECT_EQ(windows_.busy(now_), 0u);
  // Nothing that is opened in it counts either: only a gap begins anew.
  ++flags_[1].open;
  EXPECT_FALSE(Holds());
  Close(1);
  EXPECT_FALSE(Holds());
  Open(1);
  EXPECT_TRUE(Holds());
}

// A gap between two looks is seen by the stretch's number.
TEST_F(QuietWindowsTest, AGapThatNobodySawBeginsANewStretch) {
  Open(1);
  EXPECT_TRUE(Holds());
  windows_.NobodyWaits(now_);
  now_ = now_ + kBusyStretchMax;
  EXPECT_FALSE(Holds());
  Close(1);
  Open(1);
  EXPECT_TRUE(Holds());
}

TEST_F(QuietWindowsTest, AStretchThatNobodyWaitedForIsCountedFromTheFirstLook) {
  Open(1);
  now_ = now_ + seconds(3600);
  EXPECT_TRUE(Holds());
}

// What was held is what something waited for, not how long a window was open.
TEST_F(QuietWindowsTest, WhereNothingWaitsNothingIsHeld) {
  Open(1);
  EXPECT_TRUE(Holds());
  now_ = now_ + milliseconds(5);
  windows_.NobodyWaits(now_);
  now_ = now_ + seconds(5);
  EXPECT_EQ(windows_.held(), milliseconds(5));
  EXPECT_TRUE(Holds());
  now_ = now_ + milliseconds(1);
  Close(1);
  EXPECT_FALSE(Holds());
  EXPECT_EQ(windows_.held(), milliseconds(6));
}

// Whoever begins a new window all the time holds no more than anybody else.
TEST_F(QuietWindowsTest, OneThatIsAlwaysBusyLeavesATenth) {
  Duration held{0};
  const MonotonicTime end = now_ + seconds(100);
  while (now_ < end) {
    Close(1);
    Open(1);
    held += HeldFor(milliseconds(10));
  }
  EXPECT_LE(held, seconds(90) + milliseconds(200));
  EXPECT_GE(held, seconds(88));
}

// By the whole history, against what is promised: of any ten seconds at least one is free, but for
// the time between two looks.
TEST_F(QuietWindowsTest, OfAnyTenSecondsATenthIsFree) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    windows_ = QuietWindows();
    flags_.clear();
    now_ = kStart;
    std::vector<std::pair<MonotonicTime, Duration>> held;  // from when, and how long
    while (now_ < kStart + seconds(60)) {
      const uint64_t who = random() % 3;
      if (flags_[who].open > 0 && random() % 4 == 0) {
        Close(who);
      } else {
        Open(who);
      }
      const bool holds = Holds();
      const MonotonicTime from = now_;
      now_ = now_ + milliseconds(1 + random() % 20);
      if (holds) {
        held.emplace_back(from, now_ - from);
      } else if (random() % 100 == 0) {
        windows_.NobodyWaits(now_);
        now_ = now_ + milliseconds(random() % 3000);
      }
    }
    size_t first = 0;
    Duration sum{0};
    Duration longest{0};
    for (const auto& [from, took] : held) {
      sum += took;
      while (held[first].first + kHeldPeriod < from + took) {
        sum -= held[first].second;
        ++first;
      }
      longest = std::max(longest, sum);
    }
    EXPECT_LE(longest, kHeldMax + milliseconds(20));
    EXPECT_GE(longest, kHeldMax - milliseconds(200));
  }
}

}  // namespace
}  // namespace holdfast
