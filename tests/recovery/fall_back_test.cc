#include "recovery/fall_back.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace holdfast {
namespace {

using std::chrono::minutes;
using std::chrono::seconds;
using ::testing::HasSubstr;
using Kind = FallBackRule::Kind;

const CheckpointId kNewest{2, 40};

class FallBackTest : public ::testing::Test {
 protected:
  static MonotonicTime At(Duration since_start) { return MonotonicTime{} + since_start; }
  static NewerStep Unread(CheckpointId id = kNewest) {
    return {id, {}, {"remote cannot be read now (ESTALE)"}, "rank 3 has no copy"};
  }
  static NewerStep Coming() { return {kNewest, {"nvme is still being read"}, {}, ""}; }
  FallBackRule::Decision Judge(const NewerStep& newer, Duration at,
                               std::optional<MonotonicTime> deadline = std::nullopt) {
    return fall_back.Judge(newer, At(at), deadline, settings);
  }

  FallBackRule::Settings settings{minutes(2), true};
  FallBackRule fall_back;
};

TEST_F(FallBackTest, WhatWasReadEverywhereIsNotWaitedFor) {
  const FallBackRule::Decision decision =
      Judge({kNewest, {}, {}, "rank 3's record is corrupt"}, {});
  EXPECT_EQ(decision.kind, Kind::kUse);
  EXPECT_EQ(decision.text, "rank 3's record is corrupt");
  EXPECT_FALSE(fall_back.NextWake());
}

TEST_F(FallBackTest, APlaceThatCannotBeReadIsWaitedForAsLongAsIsSet) {
  const FallBackRule::Decision first = Judge(Unread(), {});
  EXPECT_EQ(first.kind, Kind::kWait);
  EXPECT_TRUE(first.tell);
  EXPECT_THAT(first.text, HasSubstr("step 40 of attempt 2"));
  EXPECT_THAT(first.text, HasSubstr("ESTALE"));
  EXPECT_EQ(Judge(Unread(), minutes(2) - seconds(1)).kind, Kind::kWait);
  const FallBackRule::Decision last = Judge(Unread(), minutes(2));
  EXPECT_EQ(last.kind, Kind::kUse);
  EXPECT_THAT(last.text, HasSubstr("ESTALE"));
  EXPECT_THAT(last.text, HasSubstr("rank 3 has no copy"));
}

TEST_F(FallBackTest, WhatItWaitsForIsToldEveryTenSeconds) {
  EXPECT_TRUE(Judge(Unread(), {}).tell);
  EXPECT_EQ(fall_back.NextWake(), At(kWaitIsTold));
  EXPECT_FALSE(Judge(Unread(), kWaitIsTold - seconds(1)).tell) << "something else woke it";
  EXPECT_EQ(fall_back.NextWake(), At(kWaitIsTold));
  EXPECT_TRUE(Judge(Unread(), kWaitIsTold).tell);
  settings.wait = kWaitIsTold + seconds(5);
  EXPECT_FALSE(Judge(Unread(), kWaitIsTold + seconds(1)).tell);
  EXPECT_EQ(fall_back.NextWake(), At(settings.wait)) << "when the time is up";
}

TEST_F(FallBackTest, NoTimeIsNotWaited) {
  settings.wait = {};
  EXPECT_EQ(Judge(Unread(), {}).kind, Kind::kUse);
}

TEST_F(FallBackTest, WhatIsBeingReadIsWaitedForWhateverIsSet) {
  settings.wait = {};
  EXPECT_EQ(Judge(Coming(), {}).kind, Kind::kWait);
  EXPECT_EQ(Judge(Coming(), kComingWait - seconds(1)).kind, Kind::kWait);
  EXPECT_EQ(Judge(Coming(), kComingWait).kind, Kind::kUse) << "it hangs";
}

TEST_F(FallBackTest, TheTimeOfOneStepCountsOverRestarts) {
  Judge(Unread(), {});
  fall_back.Stop(At(seconds(50)));
  EXPECT_EQ(fall_back.SoFar(At(seconds(70))).time, seconds(50)) << "nobody waited";
  FallBackRule after;
  after.Load(fall_back.SoFar(At(seconds(70))));
  EXPECT_EQ(after.Judge(Unread(), At(minutes(5)), {}, settings).kind, Kind::kWait);
  EXPECT_EQ(after.Judge(Unread(), At(minutes(5) + seconds(69)), {}, settings).kind, Kind::kWait);
  EXPECT_EQ(after.Judge(Unread(), At(minutes(5) + seconds(70)), {}, settings).kind, Kind::kUse);
  EXPECT_EQ(after.Judge(Unread(), At(minutes(9)), {}, settings).kind, Kind::kUse) << "once";
}

TEST_F(FallBackTest, AnotherStepHasATimeOfItsOwn) {
  Judge(Unread(), {});
  EXPECT_EQ(Judge(Unread(), minutes(2)).kind, Kind::kUse);
  EXPECT_EQ(Judge(Unread({3, 50}), minutes(2)).kind, Kind::kWait);
  EXPECT_EQ(Judge(Unread({3, 50}), minutes(4)).kind, Kind::kUse);
}

TEST_F(FallBackTest, SomeOfTheCallersTimeIsLeftForTheRestore) {
  const MonotonicTime deadline = At(minutes(1));
  EXPECT_EQ(Judge(Unread(), {}, deadline).kind, Kind::kWait);
  EXPECT_EQ(Judge(Unread(), minutes(1) - kLeftForRestore - seconds(1), deadline).kind, Kind::kWait);
  EXPECT_EQ(Judge(Unread(), minutes(1) - kLeftForRestore, deadline).kind, Kind::kUse);
}

// A rank came late, and another one's time is almost over.
TEST_F(FallBackTest, WhoHasTooLittleTimeLeftIsNotHeldUp) {
  EXPECT_EQ(Judge(Unread(), {}, At(seconds(25))).kind, Kind::kUse);
}

TEST_F(FallBackTest, WhoIsHurriedWaitsToTheEndAndThatCounts) {
  settings.hurried = true;
  EXPECT_EQ(Judge(Unread(), {}, At(seconds(20))).kind, Kind::kWait);
  EXPECT_EQ(fall_back.NextWake(), At(kWaitIsTold));
  EXPECT_EQ(Judge(Unread(), seconds(20), At(seconds(20))).kind, Kind::kWait) << "its end ends it";
  EXPECT_GT(*fall_back.NextWake(), At(seconds(20)));
  fall_back.Stop(At(seconds(20)));
  EXPECT_EQ(Judge(Unread(), seconds(30), At(seconds(50))).kind, Kind::kWait);
  fall_back.Stop(At(seconds(50)));
  settings.wait = seconds(40);
  EXPECT_EQ(Judge(Unread(), seconds(60), At(seconds(80))).kind, Kind::kUse);
}

TEST_F(FallBackTest, WhatWasNotInVainIsForgotten) {
  Judge(Unread(), {});
  fall_back.Stop(At(seconds(110)));
  fall_back.Forget();
  EXPECT_EQ(fall_back.SoFar(At(minutes(3))).time, Duration{});
  EXPECT_EQ(Judge(Unread(), minutes(3)).kind, Kind::kWait);
  EXPECT_EQ(Judge(Unread(), minutes(5) - seconds(1)).kind, Kind::kWait) << "two minutes anew";
}

TEST_F(FallBackTest, ItIsRefusedWhereItIsNotAllowed) {
  settings.allowed = false;
  EXPECT_EQ(Judge(Unread(), {}).kind, Kind::kWait);
  EXPECT_EQ(Judge(Unread(), minutes(2)).kind, Kind::kRefuse);
  EXPECT_EQ(Judge({kNewest, {}, {}, "rank 3's record is corrupt"}, minutes(2)).kind, Kind::kRefuse);
}

TEST_F(FallBackTest, WhatNobodyKnowsByNameIsWaitedForOnce) {
  const NewerStep unknown{{}, {}, {"remote cannot be read now (ESTALE)"}, ""};
  EXPECT_THAT(Judge(unknown, {}).text, HasSubstr("a newer step"));
  EXPECT_EQ(Judge(unknown, minutes(2)).kind, Kind::kUse);
  EXPECT_EQ(Judge(unknown, minutes(7)).kind, Kind::kUse);
}

TEST_F(FallBackTest, OfManyPlacesSomeAreNamed) {
  NewerStep newer = Unread();
  newer.unread.assign(1000, "a place with a long name that cannot be read");
  const std::string text = Judge(newer, {}).text;
  EXPECT_THAT(text, HasSubstr("and 992 more"));
  EXPECT_LT(text.size(), 1000u);
}

}  // namespace
}  // namespace holdfast
