#include "tiers/transfer/pacer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/units.h"
#include "tests/tiers/transfer/transfer_harness.h"
#include "tiers/transfer/transfer_control.h"

namespace holdfast {
namespace {

double Since(MonotonicTime began) {
  return std::chrono::duration<double>(Clock::System()->Now() - began).count();
}

TEST(PacerTest, NoLimitNeverWaits) {
  Pacer pacer;
  for (int i = 0; i < 1000; ++i) {
    EXPECT_TRUE(pacer.Acquire(kGiB, nullptr));
  }
}

TEST(PacerTest, NoMoreThanTheRate) {
  Pacer pacer(10 * kMiB);
  const MonotonicTime began = Clock::System()->Now();
  uint64_t bytes = 0;
  for (int i = 0; i < 8; ++i) {
    EXPECT_TRUE(pacer.Acquire(kMiB, nullptr));
    bytes += kMiB;
    // One piece goes ahead, and what a bucket holds.
    EXPECT_LE(static_cast<double>(bytes), (Since(began) + 0.1) * 10 * kMiB + kMiB);
  }
}

TEST(PacerTest, CancelEndsWaiting) {
  Pacer pacer(1);
  ASSERT_TRUE(pacer.Acquire(kGiB, nullptr));  // it goes, and is paid for in decades
  TransferControl control;
  std::thread canceller([&] {
    EXPECT_TRUE(Eventually([&] { return pacer.waiting() == 1; }));
    control.Cancel();
  });
  EXPECT_FALSE(pacer.Acquire(kMiB, &control));
  canceller.join();
  EXPECT_EQ(pacer.waiting(), 0u);
  EXPECT_FALSE(pacer.Acquire(1, &control));
}

TEST(PacerTest, WhoIsHurriedWaitsNoLongerAndTakesNothingFromOthers) {
  Pacer pacer(1);
  ASSERT_TRUE(pacer.Acquire(kGiB, nullptr));  // it goes, and is paid for in decades
  TransferControl control;
  TransferControl other;
  std::thread hurries([&] {
    EXPECT_TRUE(Eventually([&] { return pacer.waiting() == 2; }));
    control.Hurry();
  });
  std::thread waits([&] { EXPECT_FALSE(pacer.Acquire(kMiB, &other)); });
  EXPECT_TRUE(pacer.Acquire(kMiB, &control));
  EXPECT_TRUE(pacer.Acquire(kGiB, &control));
  hurries.join();
  EXPECT_EQ(pacer.waiting(), 1u);
  other.Cancel();
  waits.join();
}

TEST(PacerTest, RateChangesWhileSomebodyWaits) {
  Pacer pacer(1);
  ASSERT_TRUE(pacer.Acquire(kMiB, nullptr));  // in debt for days
  std::atomic<int> done{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      EXPECT_TRUE(pacer.Acquire(kMiB, nullptr));
      ++done;
    });
  }
  EXPECT_TRUE(Eventually([&] { return pacer.waiting() == 3; }));
  EXPECT_EQ(done, 0);
  pacer.SetRate(0);
  EXPECT_EQ(pacer.rate(), 0u);
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(done, 3);
  // A debt from a slow past does not outlive a second of the new rate.
  pacer.SetRate(100 * kMiB);
  EXPECT_TRUE(pacer.Acquire(1, nullptr));
}

TEST(PacerTest, WhoeverComesGetsAnEqualShare) {
  Pacer pacer(200 * kMiB);
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> pieces[3] = {};
  std::vector<std::thread> threads;
  for (auto& count : pieces) {
    threads.emplace_back([&] {
      TransferControl control;
      while (!stop && pacer.Acquire(kMiB, &control)) {
        ++count;
      }
    });
  }
  EXPECT_TRUE(Eventually([&] { return pieces[0] + pieces[1] + pieces[2] >= 90; }));
  stop = true;
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const auto& count : pieces) {
    EXPECT_GE(count, 15u);
  }
}

}  // namespace
}  // namespace holdfast
