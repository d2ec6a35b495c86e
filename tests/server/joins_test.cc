// Attempts (docs/protocol.md §2).
#include "tests/server/core_harness.h"

namespace holdfast::testing {
namespace {

using v1::Failure;

// Two ranks, saved at step 10, so that the attempt has decided.
struct TwoRanks {
  CoreHarness h;
  TestClient a = h.Connect(100);
  TestClient b = h.Connect(101);
  TwoRanks() {
    EXPECT_TRUE(a.Join("job", 0, 2));
    EXPECT_TRUE(b.Join("job", 1, 2));
    EXPECT_TRUE(a.Save(10));
    EXPECT_TRUE(b.Save(10));
    EXPECT_TRUE(a.Committed(10));
  }
};

TEST(Joins, FirstJoinOpensAttemptOneDurably) {
  CoreHarness h;
  h.delay = [](const Action& action) { return std::holds_alternative<WriteJobState>(action); };
  TestClient a = h.Connect(100);
  const uint64_t id = a.Send(TestClient::JoinFrame("job", 0, 2));
  EXPECT_FALSE(a.Take(id)) << "told before the attempt was durable";
  h.PerformDelayed();
  const auto answer = a.Take(id);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->frame.join().attempt(), 1u);
  EXPECT_FALSE(answer->frame.join().decided());
  EXPECT_EQ(answer->frame.join().job_uuid().size(), 16u);
  EXPECT_EQ(h.states.begin()->second.highest_attempt(), 1u);
}

TEST(Joins, AFailedWriteIsRepeatedAndNobodyHangs) {
  CoreHarness h;
  h.fail = [](const Action& a) {
    return std::holds_alternative<WriteJobState>(a) ? absl::ResourceExhaustedError("disk full")
                                                    : absl::OkStatus();
  };
  TestClient a = h.Connect(100);
  TestClient b = h.Connect(101);
  const uint64_t first = a.Send(TestClient::JoinFrame("job", 0, 2, 500));
  const uint64_t second = b.Send(TestClient::JoinFrame("job", 1, 2, 5000));
  h.Advance(std::chrono::milliseconds(600));
  const auto refused = a.Take(first);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->frame.failure().code(), static_cast<int>(absl::StatusCode::kUnavailable));
  EXPECT_NE(refused->frame.failure().message().find("disk full"), std::string::npos);
  h.fail = nullptr;
  h.Advance(std::chrono::milliseconds(1500));
  const auto joined = b.Take(second);
  ASSERT_TRUE(joined);
  EXPECT_EQ(joined->frame.join().attempt(), 1u);
}

TEST(Joins, HostileArgumentsAreRefused) {
  CoreHarness h;
  TestClient a = h.Connect(100);
  EXPECT_EQ(a.Reason(TestClient::JoinFrame("job", 2, 2)), Failure::REASON_TOPOLOGY);
  EXPECT_EQ(a.Reason(TestClient::JoinFrame("job", 0, 0)), Failure::REASON_TOPOLOGY);
  EXPECT_EQ(a.Reason(TestClient::JoinFrame("job", 0, kWorldSizeMax + 1)), Failure::REASON_TOPOLOGY);
  for (const std::string name : {"", "a/b", "..", "-x", "a\nb"}) {
    EXPECT_EQ(a.Call(TestClient::JoinFrame(name, 0, 1)).failure().code(),
              static_cast<int>(absl::StatusCode::kInvalidArgument))
        << name;
  }
  EXPECT_TRUE(a.Call(TestClient::JoinFrame("job", 0, 1, 0, std::string(1000, 'x'))).has_failure());
  EXPECT_TRUE(a.Call(TestClient::JoinFrame("job", 0, 1, 0, "", 3)).has_failure());
  EXPECT_TRUE(a.Call(TestClient::JoinFrame("job", 0, 1, 0, "", 0, 3)).has_failure());
  EXPECT_TRUE(h.states.empty());
}

TEST(Joins, AnotherUsersJobIsRefused) {
  CoreHarness h;
  TestClient a = h.Connect(100, 1000);
  TestClient b = h.Connect(101, 1001);
  ASSERT_TRUE(a.Join("job", 0, 2));
  EXPECT_EQ(b.Reason(TestClient::JoinFrame("job", 1, 2)), Failure::REASON_OTHER_OWNER);
}

TEST(Joins, ARankStartedTwiceIsRefusedAndTheHealthyRunGoesOn) {
  TwoRanks t;
  TestClient again = t.h.Connect(200);
  const v1::DaemonFrame refused = again.Call(TestClient::JoinFrame("job", 0, 2));
  EXPECT_EQ(refused.failure().reason(), Failure::REASON_RANK_TAKEN);
  EXPECT_NE(refused.failure().message().find("pid 100"), std::string::npos);
  const uint64_t waiting = again.Send(TestClient::JoinFrame("job", 0, 2, 5000));
  EXPECT_FALSE(again.Take(waiting));
  t.h.Advance(std::chrono::seconds(6));
  const auto late = again.Take(waiting);
  ASSERT_TRUE(late);
  EXPECT_EQ(late->frame.failure().reason(), Failure::REASON_RANK_TAKEN);
  EXPECT_TRUE(t.a.Save(11));
  EXPECT_TRUE(t.b.Save(11));
  EXPECT_TRUE(t.a.Committed(11));
}

TEST(Joins, ASecondOpenConnectionOfTheSameProcessIsRefused) {
  TwoRanks t;
  TestClient twin = t.h.Connect(100);
  EXPECT_EQ(twin.Reason(TestClient::JoinFrame("job", 0, 2)), Failure::REASON_RANK_TAKEN);
  EXPECT_TRUE(t.a.Save(11));
}

TEST(Joins, BothRanksDieAndRestart) {
  TwoRanks t;
  t.h.Kill(t.a);
  t.h.Kill(t.b);
  TestClient a = t.h.Connect(200);
  TestClient b = t.h.Connect(201);
  ASSERT_TRUE(a.Join("job", 0, 2));
  ASSERT_TRUE(b.Join("job", 1, 2));
  EXPECT_EQ(a.joined().attempt(), 2u);
  EXPECT_EQ(b.joined().attempt(), 2u);
  EXPECT_FALSE(b.joined().decided());
}

TEST(Joins, OneIsKilledTheOtherLingersRestartInAnyOrder) {
  for (const bool dead_first : {true, false}) {
    TwoRanks t;
    t.h.Kill(t.a);  // rank 0 is dead, rank 1 still dying
    TestClient a = t.h.Connect(200);
    TestClient b = t.h.Connect(201);
    const auto join_a = [&] {
      ASSERT_TRUE(a.Join("job", 0, 2));
      EXPECT_EQ(a.joined().attempt(), 2u);
    };
    uint64_t waiting = 0;
    if (dead_first) {
      join_a();
      ASSERT_TRUE(b.Join("job", 1, 2)) << "the attempt that its predecessor holds is over";
    } else {
      waiting = b.Send(TestClient::JoinFrame("job", 1, 2, 5000));
      EXPECT_FALSE(b.Take(waiting))
          << "its predecessor lives, and nothing says that the run is over";
      join_a();
      const auto joined = b.Take(waiting);
      ASSERT_TRUE(joined);
      EXPECT_EQ(joined->frame.join().attempt(), 2u);
    }
    // The lingering process can change nothing.
    EXPECT_EQ(t.b.Reason(TestClient::BeginFrame(11)), Failure::REASON_SUPERSEDED);
  }
}

TEST(Joins, AWaitingRankGetsInWhenItsPredecessorIsGone) {
  TwoRanks t;
  TestClient a = t.h.Connect(200);
  const uint64_t waiting = a.Send(TestClient::JoinFrame("job", 0, 2, 5000));
  EXPECT_FALSE(a.Take(waiting));
  t.h.Kill(t.a);
  const auto joined = a.Take(waiting);
  ASSERT_TRUE(joined);
  EXPECT_EQ(joined->frame.join().attempt(), 2u);
}

TEST(Joins, OfTwoThatWaitTheFirstGetsIn) {
  TwoRanks t;
  TestClient first = t.h.Connect(200);
  TestClient second = t.h.Connect(201);
  const uint64_t one = first.Send(TestClient::JoinFrame("job", 0, 2, 5000));
  const uint64_t two = second.Send(TestClient::JoinFrame("job", 0, 2, 5000));
  t.h.Kill(t.a);
  EXPECT_TRUE(first.Take(one));
  EXPECT_FALSE(second.Take(two));
  t.h.Advance(std::chrono::seconds(6));
  EXPECT_EQ(second.Take(two)->frame.failure().reason(), Failure::REASON_RANK_TAKEN);
}

TEST(Joins, AJoinerThatGoesAwayLeavesNoTrace) {
  TwoRanks t;
  TestClient first = t.h.Connect(200);
  first.Send(TestClient::JoinFrame("job", 0, 2, 5000));
  t.h.Kill(first);
  TestClient second = t.h.Connect(201);
  const uint64_t two = second.Send(TestClient::JoinFrame("job", 0, 2, 5000));
  t.h.Kill(t.a);
  ASSERT_TRUE(second.Take(two));
}

TEST(Joins, ARankThatCrashesInTheSessionIsReplaced) {
  TwoRanks t;
  t.h.Kill(t.a);
  t.h.Kill(t.b);
  TestClient a = t.h.Connect(200);
  ASSERT_TRUE(a.Join("job", 0, 2));
  a.Send(TestClient::EnterFrame());
  t.h.Kill(a);
  TestClient b = t.h.Connect(201);
  ASSERT_TRUE(b.Join("job", 1, 2));
  TestClient a2 = t.h.Connect(202);
  ASSERT_TRUE(a2.Join("job", 0, 2));
  EXPECT_EQ(a2.joined().attempt(), b.joined().attempt());
}

TEST(Joins, ALaptopJobIsRestartedOverAndOver) {
  CoreHarness h;
  for (int i = 1; i <= 400; ++i) {
    TestClient a = h.Connect(100 + i);
    ASSERT_TRUE(a.Join("job", 0, 1));
    EXPECT_EQ(a.joined().attempt(), static_cast<uint64_t>(i));
    const v1::DaemonFrame entered = a.Call(TestClient::EnterFrame());
    if (i == 1) {
      EXPECT_EQ(entered.failure().reason(), Failure::REASON_NOTHING_TO_RESTORE);
    } else {
      EXPECT_EQ(entered.enter_session().step(), static_cast<uint64_t>(i - 1));
      ASSERT_TRUE(
          a.Call(TestClient::ReportFrame(entered.enter_session(), true)).enter_session().done());
    }
    ASSERT_TRUE(a.Save(static_cast<Step>(i)));
    h.Kill(a);
  }
  EXPECT_LE(h.states.begin()->second.attempts_size(), 256);
}

TEST(Joins, RanksStartSecondsApartAtTheVeryFirstStart) {
  CoreHarness h;
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 2));
  ASSERT_TRUE(a.Save(1));  // it does not restore: the attempt began from scratch
  h.Advance(std::chrono::seconds(7));
  TestClient b = h.Connect(101);
  ASSERT_TRUE(b.Join("job", 1, 2));
  EXPECT_EQ(b.joined().attempt(), 1u);
  EXPECT_TRUE(b.joined().decided());
  EXPECT_EQ(b.Reason(TestClient::EnterFrame()), Failure::REASON_NOTHING_TO_RESTORE);
  ASSERT_TRUE(b.Save(1));
  EXPECT_TRUE(a.Committed(1));
}

TEST(Joins, AReconnectedRankTakesItsPlaceAgain) {
  TwoRanks t;
  t.h.Close(t.a);
  TestClient back = t.h.Connect(100);
  const v1::DaemonFrame joined = back.Call(TestClient::JoinFrame("job", 0, 2, 0, "", 1));
  ASSERT_TRUE(joined.has_join());
  EXPECT_EQ(joined.join().attempt(), 1u);
  EXPECT_EQ(joined.join().last_step(), 10u);
  EXPECT_TRUE(joined.join().any_step());
  ASSERT_TRUE(back.Save(11));
  ASSERT_TRUE(t.b.Save(11));
  EXPECT_TRUE(t.b.Committed(11));
}

TEST(Joins, AnAttemptIsTakenUpByItsOwnProcessOnly) {
  TwoRanks t;
  TestClient other = t.h.Connect(300);
  EXPECT_EQ(other.Reason(TestClient::JoinFrame("job", 0, 2, 0, "", 1)), Failure::REASON_RANK_TAKEN);
  t.h.Kill(t.a);
  EXPECT_EQ(other.Call(TestClient::JoinFrame("job", 0, 2, 0, "", 1)).failure().code(),
            static_cast<int>(absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(other.Reason(TestClient::JoinFrame("job", 0, 3, 0, "", 1)), Failure::REASON_TOPOLOGY);
  EXPECT_TRUE(other.Call(TestClient::JoinFrame("job", 0, 2, 0, "", 7)).has_failure());
  ASSERT_TRUE(other.Join("job", 0, 2));
  TestClient old = t.h.Connect(101);
  EXPECT_EQ(old.Reason(TestClient::JoinFrame("job", 1, 2, 0, "", 1)), Failure::REASON_SUPERSEDED);
}

TEST(Joins, RunningRanksLeaveForTheNextAttempt) {
  TwoRanks t;
  const v1::DaemonFrame a = t.a.Call(TestClient::JoinFrame("job", 0, 2, 0, "", 0, 1));
  EXPECT_EQ(a.join().attempt(), 2u);
  EXPECT_EQ(t.b.Reason(TestClient::BeginFrame(11)), Failure::REASON_SUPERSEDED);
  const v1::DaemonFrame b = t.b.Call(TestClient::JoinFrame("job", 1, 2, 0, "", 0, 1));
  EXPECT_EQ(b.join().attempt(), 2u);
  const uint64_t id = t.a.Send(TestClient::EnterFrame());
  EXPECT_EQ(t.b.Call(TestClient::EnterFrame()).enter_session().step(), 10u);
  EXPECT_TRUE(t.a.Take(id));
}

TEST(Joins, ANewLaunchIdOpensTheNextAttemptAndAnOldOneStaysOut) {
  CoreHarness h;
  TestClient a = h.Connect(100);
  TestClient b = h.Connect(101);
  EXPECT_EQ(a.Call(TestClient::JoinFrame("job", 0, 2, 0, "one")).join().attempt(), 1u);
  EXPECT_EQ(b.Call(TestClient::JoinFrame("job", 1, 2, 0, "one")).join().attempt(), 1u);
  ASSERT_TRUE(a.Save(1));
  TestClient a2 = h.Connect(200);
  EXPECT_EQ(a2.Call(TestClient::JoinFrame("job", 0, 2, 0, "two")).join().attempt(), 2u);
  EXPECT_EQ(b.Reason(TestClient::BeginFrame(1)), Failure::REASON_SUPERSEDED);
  TestClient late = h.Connect(201);
  EXPECT_EQ(late.Reason(TestClient::JoinFrame("job", 1, 2, 0, "one")), Failure::REASON_SUPERSEDED);
  EXPECT_EQ(late.Call(TestClient::JoinFrame("job", 1, 2, 0, "two")).join().attempt(), 2u);
}

TEST(Joins, TheSameLaunchDoesNotComeBackOnceItHasMovedOn) {
  CoreHarness h;
  TestClient a = h.Connect(100);
  TestClient b = h.Connect(101);
  a.Call(TestClient::JoinFrame("job", 0, 2, 0, "one"));
  b.Call(TestClient::JoinFrame("job", 1, 2, 0, "one"));
  h.Kill(a);
  TestClient a2 = h.Connect(200);
  EXPECT_EQ(a2.Call(TestClient::JoinFrame("job", 0, 2, 0, "one")).join().attempt(), 1u)
      << "nothing was decided yet";
  ASSERT_TRUE(a2.Save(1));
  h.Kill(a2);
  TestClient a3 = h.Connect(201);
  EXPECT_EQ(a3.Call(TestClient::JoinFrame("job", 0, 2, 0, "one")).failure().code(),
            static_cast<int>(absl::StatusCode::kFailedPrecondition));
}

TEST(Joins, AnotherWorldSizeWaitsForTheLivingAndThenOpensTheNext) {
  TwoRanks t;
  t.h.Kill(t.b);
  TestClient c = t.h.Connect(200);
  const v1::DaemonFrame refused = c.Call(TestClient::JoinFrame("job", 3, 4));
  EXPECT_EQ(refused.failure().reason(), Failure::REASON_TOPOLOGY);
  EXPECT_NE(refused.failure().message().find("4"), std::string::npos);
  EXPECT_NE(refused.failure().message().find("pid 100"), std::string::npos);
  const uint64_t waiting = c.Send(TestClient::JoinFrame("job", 3, 4, 5000));
  EXPECT_FALSE(c.Take(waiting));
  t.h.Kill(t.a);
  EXPECT_EQ(c.Take(waiting)->frame.join().attempt(), 2u);
}

TEST(Joins, LeavingInGoodOrderCountsAsTheEnd) {
  TwoRanks t;
  v1::ClientFrame leave;
  leave.mutable_leave();
  EXPECT_FALSE(t.a.Call(leave).has_failure());
  EXPECT_EQ(t.a.Reason(TestClient::BeginFrame(11)), Failure::REASON_UNKNOWN_SESSION);
  TestClient a = t.h.Connect(200);
  ASSERT_TRUE(a.Join("job", 0, 2));
  EXPECT_EQ(a.joined().attempt(), 2u);
}

TEST(Joins, TwoRanksOfOneProcessRestartTogether) {
  CoreHarness h;
  for (Attempt attempt = 1; attempt <= 3; ++attempt) {
    TestClient a = h.Connect(100);
    TestClient b = h.Connect(100);
    ASSERT_TRUE(a.Join("job", 0, 2));
    ASSERT_TRUE(b.Join("job", 1, 2));
    EXPECT_EQ(a.joined().attempt(), attempt);
    EXPECT_EQ(b.joined().attempt(), attempt);
    if (attempt > 1) {
      const uint64_t id = a.Send(TestClient::EnterFrame());
      const v1::SessionOutcome to_b = b.Call(TestClient::EnterFrame()).enter_session();
      const v1::SessionOutcome to_a = a.Take(id)->frame.enter_session();
      const uint64_t reported = a.Send(TestClient::ReportFrame(to_a, true));
      EXPECT_TRUE(b.Call(TestClient::ReportFrame(to_b, true)).enter_session().done());
      EXPECT_TRUE(a.Take(reported));
    }
    for (Step step = 10 * attempt; step < 10 * attempt + 5; ++step) {
      ASSERT_TRUE(a.Save(step));
      ASSERT_TRUE(b.Save(step));
    }
    h.Close(a);
    h.Close(b);
  }
}

TEST(Joins, OneUserCannotTakeAllTheJobsThereMayBe) {
  CoreHarness h;
  for (size_t i = 0; i < 1024; ++i) {
    TestClient a = h.Connect(static_cast<int32_t>(100 + i), 1000);
    ASSERT_TRUE(a.Join("job" + std::to_string(i), 0, 1));  // and stays
  }
  TestClient greedy = h.Connect(5000, 1000);
  EXPECT_EQ(greedy.Call(TestClient::JoinFrame("one-more", 0, 1)).failure().code(),
            static_cast<int>(absl::StatusCode::kResourceExhausted));
  TestClient other = h.Connect(5001, 2000);
  EXPECT_TRUE(other.Join("one-more", 0, 1));
}

TEST(Joins, NamesOfJobsThatLeftNothingMakeRoomForNewOnes) {
  CoreHarness h;
  for (size_t i = 0; i < 1024; ++i) {
    TestClient a = h.Connect(static_cast<int32_t>(100 + i), 1000);
    ASSERT_TRUE(a.Join("job" + std::to_string(i), 0, 1));
    if (i == 0) {
      ASSERT_TRUE(a.Save(1));
    }
    h.Kill(a);
    h.Advance(std::chrono::seconds(1));
  }
  TestClient next = h.Connect(5000, 1000);
  ASSERT_TRUE(next.Join("one-more", 0, 1));
  EXPECT_EQ(h.Committed("job0"), std::vector<std::string>{"1:1"}) << "it has a copy";
  EXPECT_EQ(h.Status("job1").name(), "") << "the one that ended first is forgotten";
  EXPECT_EQ(h.Status("job2").name(), "job2");
  EXPECT_EQ(h.states.size(), 1024u);
}

TEST(Joins, OneProcessCannotTakeAllTheSeats) {
  CoreHarness h;
  for (Rank rank = 0; rank < 1024; ++rank) {
    TestClient a = h.Connect(100);
    ASSERT_TRUE(a.Join("wide", rank, 5000));
    h.Close(a);
  }
  TestClient more = h.Connect(100);
  EXPECT_EQ(more.Call(TestClient::JoinFrame("wide", 1024, 5000)).failure().code(),
            static_cast<int>(absl::StatusCode::kResourceExhausted));
  TestClient other = h.Connect(200);
  EXPECT_TRUE(other.Join("wide", 1024, 5000));
}

TEST(Joins, APolicyThatCannotBeIsRefused) {
  CoreHarness h;
  TestClient a = h.Connect(100);
  v1::ClientFrame join = TestClient::JoinFrame("job", 0, 1);
  join.mutable_join()->mutable_policy()->mutable_remote()->set_keep_last(0);
  const v1::Failure failure = a.Call(join).failure();
  EXPECT_EQ(failure.code(), static_cast<int>(absl::StatusCode::kInvalidArgument));
  EXPECT_NE(failure.message().find("remote.keep_last: 0 is not within 1 to"), std::string::npos)
      << failure.message();
  EXPECT_TRUE(h.states.empty()) << "no job was opened";
  join.mutable_join()->mutable_policy()->mutable_remote()->set_keep_last(1);
  EXPECT_FALSE(a.Call(join).has_failure());
}

TEST(Joins, OneConnectionIsOneRank) {
  TwoRanks t;
  EXPECT_EQ(t.a.Call(TestClient::JoinFrame("other", 0, 1)).failure().code(),
            static_cast<int>(absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(t.a.Call(TestClient::JoinFrame("job", 1, 2)).failure().code(),
            static_cast<int>(absl::StatusCode::kFailedPrecondition));
}

TEST(Joins, RequestsOfAConnectionAreLimited) {
  CoreHarness h([](v1::DaemonConfig& config) {
    config.mutable_socket()->set_requests_per_connection_max(3);
  });
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 2));
  ASSERT_TRUE(a.Save(1));
  for (int i = 0; i < 3; ++i) {
    a.Send(TestClient::AwaitFrame(1, v1::AwaitSave::STAGE_COMMITTED, 1000));
  }
  EXPECT_EQ(
      a.Call(TestClient::AwaitFrame(1, v1::AwaitSave::STAGE_COMMITTED, 1000)).failure().code(),
      static_cast<int>(absl::StatusCode::kResourceExhausted));
}

}  // namespace
}  // namespace holdfast::testing
