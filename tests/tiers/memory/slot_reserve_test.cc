#include "tiers/memory/slot_reserve.h"

#include <gtest/gtest.h>

#include "base/fault_env.h"

namespace holdfast {
namespace {

class SlotReserveTest : public testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(env_.CreateDirectories("/shm/h", 0700).ok()); }
  uint64_t Size() { return env_.Info("/shm/h/reserve").value().bytes; }

  FaultEnv env_{FaultEnv::Durability::kNone};
  SlotReserve reserve_{env_, "/shm/h"};
};

TEST_F(SlotReserveTest, GivesUpWhatASmallFileNeedsAndTakesItBack) {
  reserve_.Refill();
  EXPECT_EQ(Size(), SlotReserve::kBytes);
  int calls = 0;
  uint64_t meanwhile = 0;
  EXPECT_TRUE(reserve_
                  .Write(100,
                         [&] {
                           meanwhile = Size();
                           return ++calls == 1 ? absl::ResourceExhaustedError("full")
                                               : absl::OkStatus();
                         })
                  .ok());
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(meanwhile, SlotReserve::kBytes - SlotReserve::kStepBytes);
  EXPECT_EQ(Size(), SlotReserve::kBytes);
}

TEST_F(SlotReserveTest, TriesOnceMoreAndOnlyWhenRoomIsWhatIsMissing) {
  reserve_.Refill();
  int calls = 0;
  const auto fails_with = [&](absl::Status status) {
    return [&calls, status] {
      ++calls;
      return status;
    };
  };
  EXPECT_FALSE(reserve_.Write(100, fails_with(absl::DataLossError("EIO"))).ok());
  EXPECT_EQ(calls, 1);
  EXPECT_FALSE(reserve_.Write(10 << 20, fails_with(absl::ResourceExhaustedError("full"))).ok());
  EXPECT_EQ(calls, 3);
  EXPECT_EQ(Size(), 0u) << "all of it was not enough";
  EXPECT_FALSE(reserve_.Write(100, fails_with(absl::ResourceExhaustedError("full"))).ok());
  EXPECT_EQ(calls, 4) << "there is none left";
}

TEST_F(SlotReserveTest, TheNextDaemonGoesOnWithIt) {
  reserve_.Refill();
  SlotReserve next(env_, "/shm/h");
  next.Refill();
  EXPECT_EQ(Size(), SlotReserve::kBytes);
}

}  // namespace
}  // namespace holdfast
