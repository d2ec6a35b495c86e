// On which step a job that is told to end saves for the last time (docs/protocol.md, "The last
// step"): the agreement by itself, over several nodes, and the way of that step into the tiers.
#include <gtest/gtest.h>

#include "server/coordinator.h"
#include "server/stop_agreement.h"
#include "tests/server/cluster_world.h"

namespace holdfast::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr MonotonicTime kNow{1'000'000'000'000};

TEST(StopAgreement, ItIsTheStepAfterTheHighestThatAnyoneIsBeyond) {
  StopAgreement agreement;
  const uint64_t round = agreement.BeginRound({1, 2, 3}, kNow);
  agreement.Held(1, round, 7);
  agreement.Held(2, round, std::nullopt);
  EXPECT_FALSE(agreement.Complete(kNow));
  agreement.Held(3, round, 9);
  ASSERT_TRUE(agreement.Complete(kNow));
  agreement.Choose(8);
  EXPECT_EQ(agreement.last(), 10u);
  EXPECT_FALSE(agreement.asking());
}

TEST(StopAgreement, WhatARankHasBegunToSaveCountsToo) {
  StopAgreement agreement;
  agreement.Held(1, agreement.BeginRound({1}, kNow), 7);
  agreement.Choose(12);
  EXPECT_EQ(agreement.last(), 13u);
}

TEST(StopAgreement, NobodyHasPassedAnything) {
  StopAgreement agreement;
  agreement.Held(1, agreement.BeginRound({1}, kNow), std::nullopt);
  agreement.Choose(std::nullopt);
  EXPECT_EQ(agreement.last(), 0u);
}

TEST(StopAgreement, TheHighestStepThereIsHasNoneAfterIt) {
  StopAgreement agreement;
  agreement.Held(1, agreement.BeginRound({1}, kNow), UINT64_MAX);
  agreement.Choose(std::nullopt);
  EXPECT_EQ(agreement.last(), UINT64_MAX);
}

TEST(StopAgreement, WhoIsSilentIsWaitedForOnlySoLong) {
  StopAgreement agreement;
  const uint64_t round = agreement.BeginRound({1, 2}, kNow);
  agreement.Held(1, round, 3);
  EXPECT_FALSE(agreement.Complete(kNow + (StopAgreement::kRoundMax - milliseconds(1))));
  EXPECT_EQ(agreement.NextWake(), kNow + StopAgreement::kRoundMax);
  EXPECT_TRUE(agreement.Complete(*agreement.NextWake()));
}

TEST(StopAgreement, WhoIsLostIsNotWaitedFor) {
  StopAgreement agreement;
  const uint64_t round = agreement.BeginRound({1, 2}, kNow);
  agreement.Held(1, round, 3);
  agreement.Gone(2);
  EXPECT_TRUE(agreement.Complete(kNow));
}

TEST(StopAgreement, AnAnswerToAnEarlierRoundDoesNotCount) {
  StopAgreement agreement;
  const uint64_t first = agreement.BeginRound({1}, kNow);
  const uint64_t second = agreement.BeginRound({1}, kNow);
  agreement.Held(1, first, 100);
  EXPECT_FALSE(agreement.Complete(kNow));
  agreement.Held(1, second, 4);
  agreement.Choose(std::nullopt);
  EXPECT_EQ(agreement.last(), 5u);
}

TEST(StopAgreement, WhatWasChosenStays) {
  StopAgreement agreement;
  EXPECT_TRUE(agreement.Adopt(5));
  EXPECT_FALSE(agreement.Adopt(9));
  EXPECT_EQ(agreement.last(), 5u);
}

TEST(StopAgreement, TheEarliestEndCounts) {
  StopAgreement agreement;
  agreement.Notice(3, kNow + seconds(30));
  agreement.Notice(4, kNow + seconds(20));
  agreement.Notice(5, kNow + seconds(40));
  EXPECT_EQ(agreement.rank(), 3u);
  EXPECT_EQ(agreement.by(), kNow + seconds(20));
}

v1::ClientFrame Reach(Step step, bool told = false, uint64_t grace_ms = 30'000) {
  v1::ClientFrame frame;
  frame.mutable_reach_step()->set_step(step);
  frame.mutable_reach_step()->set_told_to_stop(told);
  frame.mutable_reach_step()->set_grace_ms(told ? grace_ms : 0);
  return frame;
}

void WithTiers(v1::DaemonConfig& config) {
  config.mutable_remote()->set_dir("/remote");
}

class LastStepTest : public ::testing::Test {
 protected:
  explicit LastStepTest(std::function<void(v1::DaemonConfig&)> adjust = WithTiers)
      : w({"a", "b", "c"}, std::move(adjust)) {}

  // Ranks 0 and 1 of the job, on a and b; c has none, and hosts it if `on_c`.
  void Begin(bool on_c = true) {
    if (on_c) {
      TestClient visitor = w["c"].Connect(99);
      ASSERT_TRUE(visitor.Join("job", 0, 1));
      w["c"].Kill(visitor);
      w.Run();
      ASSERT_EQ(w.HostOf("job"), "c");
    }
    r0.emplace(w["a"].Connect(100));
    r1.emplace(w["b"].Connect(100));
    ASSERT_TRUE(r0->Join("job", 0, 2));
    ASSERT_TRUE(r1->Join("job", 1, 2));
  }
  // Answered at once; and says so.
  static v1::StepReached Reached(TestClient& rank, Step step, bool told = false) {
    const v1::DaemonFrame frame = rank.Call(Reach(step, told));
    EXPECT_FALSE(frame.has_failure()) << frame.ShortDebugString();
    return frame.reach_step();
  }
  static bool Stops(TestClient& rank, Step step, bool told = false) {
    return Reached(rank, step, told).stop();
  }
  v1::JobStatus Job() { return w[w.HostOf("job")].Status("job"); }

  // Messages go on at once, time does not.
  void StopTheClock() {
    for (const char* node : {"a", "b", "c"}) {
      w[node].after_request = [this] { w.Run(); };
    }
  }
  bool InRemote(Step step) {
    const std::vector<Step> whole = w.remote().Whole(2);
    return std::find(whole.begin(), whole.end(), step) != whole.end();
  }
  void SaveAll(Step step) {
    ASSERT_TRUE(r0->Save(step));
    ASSERT_TRUE(r1->Save(step));
    w.Run();
  }

  ClusterWorld w;
  std::optional<TestClient> r0;
  std::optional<TestClient> r1;
};

TEST_F(LastStepTest, NobodyIsToldAndEverybodyGoesOn) {
  Begin();
  for (Step step = 1; step < 5; ++step) {
    EXPECT_FALSE(Reached(*r0, step).stopping());
    EXPECT_FALSE(Reached(*r1, step).stopping());
  }
  EXPECT_FALSE(Job().has_stopping());
}

TEST_F(LastStepTest, AllEndWithTheSameStepWhoeverIsTold) {
  Begin();
  ASSERT_FALSE(Stops(*r0, 7));
  ASSERT_FALSE(Stops(*r1, 8));  // ahead
  const v1::StepReached told = Reached(*r0, 8, /*told=*/true);
  EXPECT_FALSE(told.stop()) << "rank 1 is beyond that";
  EXPECT_TRUE(told.stopping());
  EXPECT_GT(told.left_ms(), 29'000u);
  EXPECT_TRUE(Stops(*r1, 9));
  EXPECT_TRUE(Stops(*r0, 9, true));
  const v1::Stopping stopping = Job().stopping();
  EXPECT_EQ(stopping.rank(), 0u);
  EXPECT_TRUE(stopping.chosen());
  EXPECT_EQ(stopping.last_step(), 9u);
}

TEST_F(LastStepTest, TheFirstStepThatIsReachedCountsWhereNotEachIsAsked) {
  Begin();
  ASSERT_FALSE(Stops(*r0, 100));
  ASSERT_FALSE(Stops(*r1, 100));
  EXPECT_TRUE(Stops(*r0, 110, true));
  EXPECT_TRUE(Stops(*r1, 110));
}

TEST_F(LastStepTest, WhatWasBegunToBeSavedIsBehindEverybody) {
  Begin();
  ASSERT_TRUE(r0->Begin(20));
  EXPECT_FALSE(Stops(*r1, 20, true));
  EXPECT_FALSE(Stops(*r0, 20));
  EXPECT_TRUE(Stops(*r0, 21));
  EXPECT_TRUE(Stops(*r1, 21, true));
}

TEST_F(LastStepTest, ARankStandsUntilItIsAgreedOn) {
  Begin();
  StopTheClock();
  ASSERT_FALSE(Stops(*r1, 5));
  w.Hold("c", "b");  // (the question to rank 1's node is on its way)
  const uint64_t asked = r0->Send(Reach(6, true));
  w.Run();
  EXPECT_FALSE(r0->Take(asked)) << "rank 1 may be beyond";
  w.Release("c", "b");
  w.Run();
  const std::optional<Answer> answer = r0->Take(asked);
  ASSERT_TRUE(answer);
  EXPECT_TRUE(answer->frame.reach_step().stop());
  EXPECT_TRUE(Stops(*r1, 6));
}

TEST_F(LastStepTest, WithoutItsHostARankGoesOnSoonAndAsksAgainLater) {
  Begin();
  StopTheClock();
  ASSERT_FALSE(Stops(*r0, 1));
  w.Cut("a", "c");
  const uint64_t asked = r0->Send(Reach(2, true));
  w["a"].Advance(seconds(2));
  const std::optional<Answer> answer = r0->Take(asked);
  ASSERT_TRUE(answer) << "it stands for ever";
  EXPECT_FALSE(answer->frame.reach_step().stop());
  EXPECT_FALSE(Stops(*r0, 3, true)) << "and not at every step";
  w.Heal("a", "c");
  w.Advance(seconds(10));
  EXPECT_TRUE(Stops(*r0, 4, true));
  EXPECT_TRUE(Stops(*r1, 4));
}

TEST_F(LastStepTest, ANodeThatIsSilentIsNotWaitedForLong) {
  Begin();
  StopTheClock();
  ASSERT_FALSE(Stops(*r1, 5));
  w.Hold("b", "c");
  const uint64_t asked = r0->Send(Reach(6, true));
  w["c"].Advance(milliseconds(1500));
  w.Run();
  const std::optional<Answer> answer = r0->Take(asked);
  ASSERT_TRUE(answer);
  EXPECT_TRUE(answer->frame.reach_step().stop());
  EXPECT_TRUE(Stops(*r1, 6)) << "it had stood";
}

TEST_F(LastStepTest, ANewHostHearsWhatTheOldOneHasChosen) {
  Begin();
  ASSERT_FALSE(Stops(*r0, 3));
  ASSERT_FALSE(Stops(*r1, 3));
  ASSERT_TRUE(Stops(*r0, 4, true));
  w.Kill("c");
  w.Advance(kLease + seconds(2));
  ASSERT_NE(w.HostOf("job"), "c");
  EXPECT_EQ(Job().stopping().last_step(), 4u);
  EXPECT_TRUE(Stops(*r1, 4));
}

TEST_F(LastStepTest, ADaemonThatIsStartedAnewHearsItAgain) {
  Begin();
  ASSERT_FALSE(Stops(*r0, 3));
  ASSERT_FALSE(Stops(*r1, 3));
  ASSERT_TRUE(r0->Save(3));
  ASSERT_TRUE(r1->Save(3));
  ASSERT_TRUE(Stops(*r0, 4, true));
  w.Kill("b");
  w.Start("b");
  w.Advance(seconds(3));
  TestClient again = w["b"].Connect(100);
  v1::ClientFrame join = TestClient::JoinFrame("job", 1, 2, 5000, "", r1->joined().attempt());
  join.mutable_join()->set_passed_step(3);
  ASSERT_TRUE(Outcome(again.Call(join)));
  EXPECT_TRUE(Stops(again, 4));
}

// Its daemon was started anew between the step and the question: what it says when it joins counts.
TEST_F(LastStepTest, WhoComesAgainSaysHowFarItIs) {
  Begin();
  ASSERT_FALSE(Stops(*r0, 5));
  ASSERT_FALSE(Stops(*r1, 6));
  w["b"].Close(*r1);
  TestClient again = w["b"].Connect(100);
  v1::ClientFrame join = TestClient::JoinFrame("job", 1, 2, 5000, "", r1->joined().attempt());
  join.mutable_join()->set_passed_step(6);
  ASSERT_TRUE(Outcome(again.Call(join)));
  EXPECT_FALSE(Stops(*r0, 6, true));
  EXPECT_TRUE(Stops(*r0, 7, true));
  EXPECT_TRUE(Stops(again, 7));
}

// As one does whose daemon did not answer for a while.
TEST_F(LastStepTest, WhoWentOnUnheardSaysHowFarItIs) {
  Begin();
  ASSERT_FALSE(Stops(*r0, 3));
  ASSERT_FALSE(Stops(*r1, 3));
  v1::ClientFrame reach = Reach(9, true);
  reach.mutable_reach_step()->set_passed_step(8);
  EXPECT_TRUE(r1->Call(reach).reach_step().stop());
  EXPECT_FALSE(Stops(*r0, 4)) << "the other one will end with 9, and saves nothing before that";
  EXPECT_TRUE(Stops(*r0, 9));
}

TEST_F(LastStepTest, ThatOneWasBeyondItAlreadyIsSaidOnce) {
  Begin();
  ASSERT_FALSE(Stops(*r0, 3));
  ASSERT_FALSE(Stops(*r1, 3));
  ASSERT_TRUE(Stops(*r0, 4, true));
  v1::ClientFrame reach = Reach(9);
  reach.mutable_reach_step()->set_passed_step(8);
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(r1->Call(reach).reach_step().stop());
    EXPECT_EQ(w["b"].CountReports(Report::Kind::kTrouble), 1u);
  }
}

TEST_F(LastStepTest, TheNextAttemptKnowsNothingOfIt) {
  Begin();
  SaveAll(0);  // (an attempt that nobody has saved in goes on with new processes)
  ASSERT_TRUE(Stops(*r0, 1, true));
  w["a"].Kill(*r0);
  w["b"].Kill(*r1);
  w.Run();
  TestClient n0 = w["a"].Connect(200);
  TestClient n1 = w["b"].Connect(200);
  ASSERT_TRUE(n0.Join("job", 0, 2));
  ASSERT_TRUE(n1.Join("job", 1, 2));
  EXPECT_FALSE(Reached(n0, 2).stopping());
  EXPECT_FALSE(Job().has_stopping());
}

TEST_F(LastStepTest, WhoIsSupersededHearsThatWhileItStands) {
  Begin();
  StopTheClock();
  w.Hold("c", "b");
  const uint64_t asked = r0->Send(Reach(1, true));
  w.Run();
  ASSERT_FALSE(r0->Take(asked));
  w["b"].Kill(*r1);
  TestClient other = w["b"].Connect(300);
  const uint64_t joins = other.Send(TestClient::JoinFrame("job", 1, 2, 30'000, "launch-2"));
  w.Release("c", "b");
  w.Advance(milliseconds(100));
  ASSERT_TRUE(other.Take(joins));
  const std::optional<Answer> answer = r0->Take(asked);
  ASSERT_TRUE(answer);
  EXPECT_TRUE(answer->frame.reach_step().stop() ||
              answer->frame.failure().reason() == v1::Failure::REASON_SUPERSEDED)
      << answer->frame.ShortDebugString();
}

TEST_F(LastStepTest, WhoLeavesWhileItStandsIsAnswered) {
  Begin();
  StopTheClock();
  w.Hold("c", "b");
  const uint64_t asked = r0->Send(Reach(1, true));
  v1::ClientFrame leave;
  leave.mutable_leave();
  ASSERT_TRUE(Outcome(r0->Call(leave)));
  w["a"].Advance(seconds(2));
  const std::optional<Answer> answer = r0->Take(asked);
  ASSERT_TRUE(answer);
  EXPECT_TRUE(answer->frame.has_failure());
}

class RareStepsTest : public LastStepTest {
 protected:
  explicit RareStepsTest(uint64_t every_steps = 1000)
      : LastStepTest([=](v1::DaemonConfig& config) {
          WithTiers(config);
          config.mutable_policy()->mutable_remote()->set_every_steps(every_steps);
          config.mutable_policy()->mutable_remote()->set_every_ms(0);
        }) {}
};

TEST_F(RareStepsTest, ItGoesToRemoteWhenItIsNotDueThere) {
  Begin();
  SaveAll(1);
  EXPECT_TRUE(InRemote(1)) << "the first one always goes";
  SaveAll(2);
  EXPECT_FALSE(InRemote(2));
  ASSERT_FALSE(Stops(*r0, 2));
  ASSERT_FALSE(Stops(*r1, 2));
  ASSERT_TRUE(Stops(*r0, 3, true));
  ASSERT_TRUE(Stops(*r1, 3));
  SaveAll(3);
  EXPECT_TRUE(InRemote(3));
}

class NoStepsTest : public RareStepsTest {
 protected:
  NoStepsTest() : RareStepsTest(0) {}
};

TEST_F(NoStepsTest, ATierThatTheJobDoesNotUseStaysSo) {
  Begin();
  ASSERT_TRUE(Stops(*r0, 1, true));
  ASSERT_TRUE(Stops(*r1, 1));
  SaveAll(1);
  EXPECT_FALSE(InRemote(1));
}

TEST_F(LastStepTest, ItWaitsForNoOtherStep) {
  Begin();
  bool hang = true;
  for (const char* node : {"a", "b"}) {
    w[node].delay = [&](const Action& action) {
      const auto* flush = std::get_if<FlushShard>(&action);
      return hang && flush != nullptr && flush->key.id.step < 4;
    };
  }
  SaveAll(1);
  SaveAll(2);
  SaveAll(3);  // two are under way, and hang; this one waits
  EXPECT_TRUE(w.remote().Whole(2).empty());
  ASSERT_FALSE(Stops(*r0, 3));
  ASSERT_FALSE(Stops(*r1, 3));
  ASSERT_TRUE(Stops(*r0, 4, true));
  ASSERT_TRUE(Stops(*r1, 4));
  SaveAll(4);
  EXPECT_TRUE(InRemote(4));
  hang = false;
}

// A loop that hears it and goes on, or asks only after each hundredth step: what it saves is never
// more than one at a time beyond what may be under way.
TEST_F(LastStepTest, ThoseAfterItDoNotPileUp) {
  Begin();
  std::set<Step> begun;
  bool hang = true;
  for (const char* node : {"a", "b"}) {
    w[node].delay = [&](const Action& action) {
      const auto* flush = std::get_if<FlushShard>(&action);
      if (flush != nullptr) {
        begun.insert(flush->key.id.step);
      }
      return hang && flush != nullptr;
    };
  }
  ASSERT_TRUE(Stops(*r0, 1, true));
  ASSERT_TRUE(Stops(*r1, 1));
  for (Step step = 1; step <= 3; ++step) {  // (more than memory holds would be shed)
    SaveAll(step);
  }
  EXPECT_EQ(begun, (std::set<Step>{1, 2})) << "as many as of any job";
  hang = false;
}

TEST_F(RareStepsTest, WhoLivesOnIsAJobLikeOthers) {
  Begin();
  SaveAll(1);
  ASSERT_TRUE(Stops(*r0, 2, true));
  ASSERT_TRUE(Stops(*r1, 2));
  SaveAll(2);
  ASSERT_TRUE(InRemote(2));
  SaveAll(3);
  EXPECT_TRUE(InRemote(3)) << "it may be the last one";
  w.Advance(seconds(30) + kStopCounts);
  SaveAll(4);
  EXPECT_FALSE(InRemote(4)) << "as its policy says";
}

}  // namespace
}  // namespace holdfast::testing
