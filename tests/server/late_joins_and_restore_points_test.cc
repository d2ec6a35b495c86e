// What happens at the edges of joins, sessions and removals: answers that come too late, requests
// and restore points that change while ranks load, ranks that go and will never do their part.
#include "tests/server/core_harness.h"

namespace holdfast::testing {
namespace {

using v1::Failure;

int Code(absl::StatusCode code) {
  return static_cast<int>(code);
}

bool IsStateWrite(const Action& action) {
  return std::holds_alternative<WriteJobState>(action);
}

v1::SetRestorePointRequest PointAt(Attempt attempt, Step step) {
  v1::SetRestorePointRequest request;
  request.set_job("job");
  request.set_attempt(attempt);
  request.set_step(step);
  return request;
}

// Two ranks in an attempt that gathers, after one that committed steps 10, 20 and 30.
struct Gathering {
  CoreHarness h;
  std::vector<TestClient> ranks;
  int32_t next_pid = 100;
  Gathering() {
    Connect();
    for (const Step step : {10, 20, 30}) {
      EXPECT_TRUE(ranks[0].Save(step));
      EXPECT_TRUE(ranks[1].Save(step));
      EXPECT_TRUE(ranks[1].Committed(step));
    }
    Restart();
  }
  void Connect() {
    ranks = {h.Connect(next_pid), h.Connect(next_pid + 1)};
    next_pid += 10;
    EXPECT_TRUE(ranks[0].Join("job", 0, 2));
    EXPECT_TRUE(ranks[1].Join("job", 1, 2));
  }
  void Restart() {
    h.Kill(ranks[0]);
    h.Kill(ranks[1]);
    Connect();
  }
  std::vector<v1::DaemonFrame> Enter(std::optional<CheckpointId> wanted = std::nullopt) {
    return Both(TestClient::EnterFrame(1000, wanted), TestClient::EnterFrame(1000, wanted));
  }
  std::vector<v1::DaemonFrame> Loaded(const std::vector<v1::DaemonFrame>& sources) {
    return Both(TestClient::ReportFrame(sources[0].enter_session(), true),
                TestClient::ReportFrame(sources[1].enter_session(), true));
  }
  std::vector<v1::DaemonFrame> Both(const v1::ClientFrame& first, const v1::ClientFrame& second) {
    const uint64_t id = ranks[0].Send(first);
    const v1::DaemonFrame answer = ranks[1].Call(second);
    const auto waited = ranks[0].Take(id);
    EXPECT_TRUE(waited);
    return {waited ? waited->frame : v1::DaemonFrame(), answer};
  }
};

// ---- joins that are answered too late ----

TEST(LateJoins, ARankThatWasNeverToldThatItJoinedHoldsNoRank) {
  CoreHarness h;
  h.fail = [](const Action& action) {
    return IsStateWrite(action) ? absl::ResourceExhaustedError("disk full") : absl::OkStatus();
  };
  TestClient a = h.Connect(100);
  const uint64_t id = a.Send(TestClient::JoinFrame("job", 0, 1, 500));
  h.Advance(std::chrono::milliseconds(600));
  const auto late = a.Take(id);
  ASSERT_TRUE(late);
  EXPECT_EQ(late->frame.failure().code(), Code(absl::StatusCode::kUnavailable));
  h.fail = nullptr;
  h.Advance(std::chrono::seconds(2));
  // Its process lives on, and has nothing that could be lost.
  TestClient b = h.Connect(200);
  EXPECT_TRUE(b.Join("job", 0, 1));
}

TEST(LateJoins, AJoinThatWaitedForSuchARankGoesOn) {
  CoreHarness h;
  h.delay = IsStateWrite;
  TestClient a = h.Connect(100);
  const uint64_t first = a.Send(TestClient::JoinFrame("job", 0, 1, 500));
  TestClient b = h.Connect(200);
  const uint64_t second = b.Send(TestClient::JoinFrame("job", 0, 1, 5000));
  h.Advance(std::chrono::milliseconds(600));
  EXPECT_TRUE(a.Take(first)->frame.has_failure());
  h.PerformDelayed();
  const auto joined = b.Take(second);
  ASSERT_TRUE(joined);
  EXPECT_TRUE(Outcome(joined->frame));
}

// A daemon that is busy for longer than the client waits: the run that has begun goes on.
TEST(LateJoins, WhoWasLetInAndNeverHeardOfItEndsNoAttemptByAskingAgain) {
  CoreHarness h;
  TestClient first = h.Connect(100);
  ASSERT_TRUE(first.Join("job", 0, 2));
  ASSERT_TRUE(first.Save(10));  // from scratch: decided
  h.delay = IsStateWrite;
  TestClient late = h.Connect(200);
  const uint64_t id = late.Send(TestClient::JoinFrame("job", 1, 2, 500));
  h.Advance(std::chrono::milliseconds(600));
  ASSERT_TRUE(late.Take(id)->frame.has_failure());
  h.PerformDelayed();
  h.delay = nullptr;
  ASSERT_TRUE(late.Join("job", 1, 2));
  EXPECT_EQ(late.joined().attempt(), 1u);
  EXPECT_TRUE(late.Save(10));
  EXPECT_TRUE(first.Committed(10));
}

TEST(LateJoins, WhoLeftAndComesBackOpensTheNextAttempt) {
  CoreHarness h;
  TestClient first = h.Connect(100);
  ASSERT_TRUE(first.Join("job", 0, 2));
  ASSERT_TRUE(first.Save(10));
  TestClient late = h.Connect(200);
  ASSERT_TRUE(late.Join("job", 1, 2));
  v1::ClientFrame leave;
  leave.mutable_leave();
  ASSERT_FALSE(late.Call(leave).has_failure());
  ASSERT_TRUE(late.Join("job", 1, 2));
  EXPECT_EQ(late.joined().attempt(), 2u);
}

// ---- another request while a session is loading ----

TEST(ChangedRequests, AnExplicitStepIsNeverAnsweredWithAnother) {
  CoreHarness h;
  TestClient before = h.Connect(100);
  ASSERT_TRUE(before.Join("job", 0, 1));
  ASSERT_TRUE(before.Save(10));
  ASSERT_TRUE(before.Save(20));
  h.Kill(before);
  TestClient a = h.Connect(200);
  ASSERT_TRUE(a.Join("job", 0, 1));
  const v1::DaemonFrame newest = a.Call(TestClient::EnterFrame());
  EXPECT_EQ(newest.enter_session().step(), 20u);
  const v1::DaemonFrame explicit_step = a.Call(TestClient::EnterFrame(1000, CheckpointId{0, 10}));
  EXPECT_EQ(explicit_step.enter_session().step(), 10u);
  EXPECT_NE(explicit_step.enter_session().session(), newest.enter_session().session());
  // The same request again: the same session.
  const v1::DaemonFrame again = a.Call(TestClient::EnterFrame(1000, CheckpointId{0, 10}));
  EXPECT_EQ(again.enter_session().session(), explicit_step.enter_session().session());
  const v1::DaemonFrame done = a.Call(TestClient::ReportFrame(again.enter_session(), true));
  EXPECT_TRUE(done.enter_session().done());
  EXPECT_EQ(done.enter_session().step(), 10u);
}

TEST(ChangedRequests, TheOldSessionEndsForAllAndANewOneBegins) {
  Gathering t;
  const std::vector<v1::DaemonFrame> old = t.Enter();
  const uint64_t waiting = t.ranks[0].Send(TestClient::ReportFrame(old[0].enter_session(), true));
  const uint64_t entered = t.ranks[1].Send(TestClient::EnterFrame(1000, CheckpointId{0, 20}));
  const auto ended = t.ranks[0].Take(waiting);
  ASSERT_TRUE(ended);
  EXPECT_EQ(ended->frame.failure().code(), Code(absl::StatusCode::kAborted));
  EXPECT_NE(ended->frame.failure().message().find("rank 1"), std::string::npos);
  EXPECT_FALSE(t.ranks[1].Take(entered)) << "the others have not asked for it yet";
  // Nor does a late report of the old session decide anything.
  EXPECT_EQ(t.ranks[0].Call(TestClient::ReportFrame(old[0].enter_session(), true)).failure().code(),
            Code(absl::StatusCode::kAborted));
  const v1::DaemonFrame first = t.ranks[0].Call(TestClient::EnterFrame(1000, CheckpointId{0, 20}));
  const auto second = t.ranks[1].Take(entered);
  ASSERT_TRUE(second);
  EXPECT_EQ(first.enter_session().step(), 20u);
  EXPECT_EQ(second->frame.enter_session().step(), 20u);
  EXPECT_TRUE(t.Loaded({first, second->frame})[0].enter_session().done());
}

// ---- restore points that are set while ranks load ----

TEST(RestorePointsWhileLoading, OneThatWasSetMeanwhileIsForTheNextAttempt) {
  Gathering t;
  const std::vector<v1::DaemonFrame> sources = t.Enter();
  EXPECT_EQ(sources[0].enter_session().step(), 30u);
  ASSERT_TRUE(t.h.Admin<v1::SetRestorePointReply>(PointAt(1, 10)).ok());
  EXPECT_TRUE(t.Loaded(sources)[0].enter_session().done());
  EXPECT_TRUE(t.h.states.begin()->second.restore_point().set());
  t.Restart();
  const std::vector<v1::DaemonFrame> next = t.Enter();
  EXPECT_EQ(next[0].enter_session().step(), 10u);
  EXPECT_TRUE(t.Loaded(next)[1].enter_session().done());
  EXPECT_FALSE(t.h.states.begin()->second.restore_point().set()) << "it was used";
}

TEST(RestorePointsWhileLoading, OneThatReplacesTheOneInUseStays) {
  Gathering t;
  ASSERT_TRUE(t.h.Admin<v1::SetRestorePointReply>(PointAt(1, 20)).ok());
  const std::vector<v1::DaemonFrame> sources = t.Enter();
  EXPECT_EQ(sources[0].enter_session().step(), 20u);
  ASSERT_TRUE(t.h.Admin<v1::SetRestorePointReply>(PointAt(1, 10)).ok());
  EXPECT_TRUE(t.Loaded(sources)[0].enter_session().done());
  EXPECT_EQ(t.h.states.begin()->second.restore_point().step(), 10u);
}

// ---- loads that fail for a local reason ----

TEST(LocalLoadFailures, TheNewestStepIsNotLostByThem) {
  Gathering t;
  const std::vector<v1::DaemonFrame> sources = t.Enter();
  const uint64_t waiting =
      t.ranks[0].Send(TestClient::ReportFrame(sources[0].enter_session(), true));
  v1::ClientFrame local = TestClient::ReportFrame(sources[1].enter_session(), false, false);
  local.mutable_report_load()->set_problem("mmap: ENOMEM");
  const v1::DaemonFrame refused = t.ranks[1].Call(local);
  const auto other = t.ranks[0].Take(waiting);
  ASSERT_TRUE(other);
  for (const v1::DaemonFrame* frame : {&refused, &other->frame}) {
    EXPECT_EQ(frame->failure().code(), Code(absl::StatusCode::kUnavailable));
    EXPECT_NE(frame->failure().message().find("rank 1"), std::string::npos);
    EXPECT_NE(frame->failure().message().find("mmap: ENOMEM"), std::string::npos);
  }
  EXPECT_EQ(t.h.CountReports(Report::Kind::kSessionFellBack), 0u);
  EXPECT_EQ(t.h.CountReports(Report::Kind::kCopyBad), 0u);
  const std::vector<v1::DaemonFrame> again = t.Enter();
  EXPECT_EQ(again[0].enter_session().step(), 30u);
  EXPECT_TRUE(t.Loaded(again)[1].enter_session().done());
}

// ---- ranks that go and will never begin an open step ----

struct OpenStep {
  CoreHarness h;
  TestClient a = h.Connect(100);
  TestClient b = h.Connect(101);
  uint64_t waiting = 0;
  OpenStep() {
    EXPECT_TRUE(a.Join("job", 0, 2));
    EXPECT_TRUE(b.Join("job", 1, 2));
    EXPECT_TRUE(a.Save(1));
    EXPECT_TRUE(b.Save(1));
    EXPECT_TRUE(a.Save(2));
    waiting = a.Send(TestClient::AwaitFrame(2, v1::AwaitSave::STAGE_COMMITTED, 5000));
  }
  void ExpectAbandoned() {
    const auto answer = a.Take(waiting);
    ASSERT_TRUE(answer);
    EXPECT_EQ(answer->frame.failure().reason(), Failure::REASON_ABANDONED);
    EXPECT_NE(answer->frame.failure().message().find("rank 1"), std::string::npos);
    EXPECT_TRUE(a.Committed(1)) << "what is whole stays";
  }
};

TEST(RanksThatGo, AStepThatADeadRankNeverBeganIsOverAtOnce) {
  OpenStep t;
  t.h.Kill(t.b);
  t.ExpectAbandoned();
}

TEST(RanksThatGo, AStepThatARankLeavesBehindIsOverAtOnce) {
  OpenStep t;
  v1::ClientFrame leave;
  leave.mutable_leave();
  t.b.Call(leave);
  t.ExpectAbandoned();
}

TEST(RanksThatGo, ALostConnectionAloneEndsNothing) {
  OpenStep t;
  t.h.Close(t.b);
  EXPECT_FALSE(t.a.Take(t.waiting));
}

TEST(RanksThatGo, ARankThatGoesAfterItSealedHarmsNothing) {
  OpenStep t;
  ASSERT_TRUE(t.a.Save(3));
  ASSERT_TRUE(t.b.Save(2));
  t.h.Kill(t.a);
  ASSERT_TRUE(t.b.Save(3));
  EXPECT_TRUE(t.b.Committed(3));
}

// Nobody takes the rank's place in an attempt that has moved on: to wait for it would be in vain.
TEST(RanksThatGo, ASaveThatLacksARankForEverIsRefusedAtOnce) {
  OpenStep t;
  t.h.Kill(t.b);
  const v1::DaemonFrame refused = t.a.Call(TestClient::BeginFrame(50));
  EXPECT_EQ(refused.failure().reason(), Failure::REASON_ABANDONED);
  EXPECT_NE(refused.failure().message().find("rank 1"), std::string::npos);
}

// ---- a job that is being removed ----

struct Removing {
  CoreHarness h;
  Removing() {
    TestClient a = h.Connect(100);
    EXPECT_TRUE(a.Join("job", 0, 1));
    EXPECT_TRUE(a.Save(1));
    EXPECT_TRUE(a.Save(2));  // its commit is written lazily
    h.Kill(a);
    h.delay = [](const Action& x) { return std::holds_alternative<RemoveJobState>(x); };
    v1::RemoveJobRequest request;
    request.set_job("job");
    EXPECT_EQ(h.Admin<v1::RemoveJobReply>(request).status().code(), absl::StatusCode::kUnavailable)
        << "it is answered when the state is gone";
    EXPECT_EQ(h.delayed.size(), 1u);
  }
};

TEST(RemovedJobs, ALazyWriteThatWillNeverBeDoneWakesNobody) {
  Removing t;
  t.h.now = t.h.now + std::chrono::seconds(6);
  int fired = 0;
  while (fired < 100 && t.h.timer && *t.h.timer <= t.h.now) {
    ++fired;
    t.h.timer.reset();
    t.h.Feed(TimerFired{});
  }
  EXPECT_LT(fired, 10) << "the timer fires without an end";
}

TEST(RemovedJobs, ARestorePointIsRefused) {
  Removing t;
  v1::SetRestorePointRequest request;
  request.set_job("job");
  request.set_from_scratch(true);
  EXPECT_EQ(t.h.Admin<v1::SetRestorePointReply>(request).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(RemovedJobs, WhatWasNotWrittenIsWrittenWhenTheRemovalFails) {
  Removing t;
  EXPECT_EQ(t.h.states.begin()->second.attempts(0).last_committed_step(), 1u);
  t.h.fail = [](const Action& x) {
    return std::holds_alternative<RemoveJobState>(x) ? absl::DataLossError("EIO")
                                                     : absl::OkStatus();
  };
  t.h.PerformDelayed();
  ASSERT_EQ(t.h.states.size(), 1u);
  EXPECT_EQ(t.h.states.begin()->second.attempts(0).last_committed_step(), 2u);
}

}  // namespace
}  // namespace holdfast::testing
