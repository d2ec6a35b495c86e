// The daemon dies and starts again (docs/protocol.md §7).
#include "tests/server/core_harness.h"

namespace holdfast::testing {
namespace {

using v1::Failure;

struct TwoRanks {
  CoreHarness h;
  TestClient a = h.Connect(100);
  TestClient b = h.Connect(101);
  TwoRanks() {
    EXPECT_TRUE(a.Join("job", 0, 2));
    EXPECT_TRUE(b.Join("job", 1, 2));
    EXPECT_TRUE(a.Save(10));
    EXPECT_TRUE(b.Save(10));
  }
  // The same processes, over new connections.
  void Return() {
    a = h.Connect(a.process().pid);
    b = h.Connect(b.process().pid);
    ASSERT_FALSE(a.Call(TestClient::JoinFrame("job", 0, 2, 0, "", 1)).has_failure());
    ASSERT_FALSE(b.Call(TestClient::JoinFrame("job", 1, 2, 0, "", 1)).has_failure());
  }
};

TEST(Restart, RunningRanksGoOnInTheirAttempt) {
  TwoRanks t;
  t.h.Restart();
  EXPECT_EQ(t.h.Committed("job"), std::vector<std::string>{"1:10"});
  t.Return();
  for (Step step = 11; step < 20; ++step) {
    ASSERT_TRUE(t.a.Save(step));
    ASSERT_TRUE(t.b.Save(step));
    EXPECT_TRUE(t.b.Committed(step));
  }
  EXPECT_LE(t.h.files.size(), 6u) << "slots were lost over the restart";
}

TEST(Restart, ASecondRunDoesNotTakeOverWhileTheFirstIsSilent) {
  TwoRanks t;
  t.h.Restart();
  TestClient second = t.h.Connect(200);
  EXPECT_EQ(second.Reason(TestClient::JoinFrame("job", 0, 2)), Failure::REASON_RANK_TAKEN);
  t.Return();
  EXPECT_TRUE(t.a.Save(11));
}

// Ranks that restored and have sealed nothing yet hold no slot that would speak for them.
TEST(Restart, ASecondRunDoesNotTakeOverFromRanksThatHaveNotSavedYet) {
  TwoRanks t;
  t.h.Kill(t.a);
  t.h.Kill(t.b);
  t.a = t.h.Connect(110);
  t.b = t.h.Connect(111);
  ASSERT_TRUE(t.a.Join("job", 0, 2));
  ASSERT_TRUE(t.b.Join("job", 1, 2));
  t.h.Restart();
  TestClient second = t.h.Connect(200);
  EXPECT_EQ(second.Reason(TestClient::JoinFrame("job", 0, 2)), Failure::REASON_RANK_TAKEN);
  EXPECT_EQ(second.Reason(TestClient::JoinFrame("job", 3, 4)), Failure::REASON_TOPOLOGY);
  t.h.living.erase(t.a.process());
  t.h.living.erase(t.b.process());
  t.h.Restart();
  TestClient third = t.h.Connect(300);
  EXPECT_TRUE(third.Join("job", 0, 2));
}

TEST(Restart, WhoLeftIsNotTakenToBeThereStill) {
  TwoRanks t;
  for (TestClient* client : {&t.a, &t.b}) {
    v1::ClientFrame leave;
    leave.mutable_leave();
    client->Call(leave);
  }
  t.h.Restart();  // both processes live on
  TestClient second = t.h.Connect(200);
  ASSERT_TRUE(second.Join("job", 0, 2));
  EXPECT_EQ(second.joined().attempt(), 2u);
}

TEST(Restart, ASaveAfterARestoreThatFailedStillDoesNotBeginAnew) {
  TwoRanks t;
  t.h.Kill(t.a);
  t.h.Kill(t.b);
  t.a = t.h.Connect(110);
  t.b = t.h.Connect(111);
  ASSERT_TRUE(t.a.Join("job", 0, 2));
  ASSERT_TRUE(t.b.Join("job", 1, 2));
  const uint64_t id = t.a.Send(TestClient::EnterFrame(1000, CheckpointId{0, 77}));
  t.b.Call(TestClient::EnterFrame(1000, CheckpointId{0, 77}));
  ASSERT_TRUE(t.a.Take(id)->frame.has_failure());  // there is no step 77
  t.h.Restart();
  t.a = t.h.Connect(110);
  t.b = t.h.Connect(111);
  ASSERT_FALSE(t.a.Call(TestClient::JoinFrame("job", 0, 2, 0, "", 2)).has_failure());
  ASSERT_FALSE(t.b.Call(TestClient::JoinFrame("job", 1, 2, 0, "", 2)).has_failure());
  const v1::DaemonFrame refused = t.a.Call(TestClient::BeginFrame(1));
  EXPECT_EQ(refused.failure().code(), static_cast<int>(absl::StatusCode::kFailedPrecondition));
  EXPECT_NE(refused.failure().message().find("--from-scratch"), std::string::npos);
  EXPECT_EQ(t.h.Committed("job").front(), "1:10");
}

TEST(Restart, WhoDiedMeanwhileIsKnownToBeGone) {
  TwoRanks t;
  t.h.living.clear();
  t.h.Restart();
  TestClient a = t.h.Connect(200);
  ASSERT_TRUE(a.Join("job", 0, 2));
  EXPECT_EQ(a.joined().attempt(), 2u);
}

TEST(Restart, AnIncompleteStepCommitsIfItsRanksSealIt) {
  TwoRanks t;
  ASSERT_TRUE(t.a.Save(11));
  t.h.Restart();
  t.Return();
  ASSERT_TRUE(t.b.Save(11));
  EXPECT_TRUE(t.b.Committed(11));
  EXPECT_EQ(t.h.Committed("job").front(), "1:11");
}

TEST(Restart, AStepThatLacksARankWhichEndedIsOver) {
  TwoRanks t;
  ASSERT_TRUE(t.a.Save(11));
  // Rank 1 ends; the daemon hears of it and dies before it has emptied anything.
  t.h.delay = [](const Action& x) { return !std::holds_alternative<WriteJobState>(x); };
  v1::ClientFrame leave;
  leave.mutable_leave();
  t.b.Send(leave);
  t.h.delay = nullptr;
  t.h.Restart();
  EXPECT_EQ(t.h.Status("job").in_flight_size(), 0);
  EXPECT_EQ(t.h.Committed("job").front(), "1:10");
}

TEST(Restart, WhatWasBeingWrittenIsGoneAndItsSlotComesBack) {
  TwoRanks t;
  ASSERT_TRUE(t.a.Begin(11));
  t.h.Restart();
  EXPECT_GE(t.h.Daemon().slots_quarantined(), 1u);
  t.Return();
  EXPECT_EQ(t.h.Daemon().slots_quarantined(), 0u);
  EXPECT_EQ(t.a.Reason(TestClient::SealFrame(11, t.a.grant())), Failure::REASON_ABANDONED);
  ASSERT_TRUE(t.a.Save(12));
  ASSERT_TRUE(t.b.Save(12));
  EXPECT_TRUE(t.a.Committed(12));
}

TEST(Restart, AnEmptySlotOfADeadProcessIsDeletedNotHandedOn) {
  TwoRanks t;
  ASSERT_TRUE(t.a.Begin(11));
  const uint32_t slot = t.a.grant().slot();
  t.h.living.clear();
  t.h.Restart();
  EXPECT_EQ(t.h.files.count(slot), 0u);
  EXPECT_EQ(t.h.Committed("job"), std::vector<std::string>{"1:10"});
}

TEST(Restart, ASupersededAttemptStaysSuperseded) {
  TwoRanks t;
  TestClient a = t.h.Connect(200);
  a.Call(TestClient::JoinFrame("job", 0, 2, 0, "launch"));
  t.h.Restart();
  TestClient zombie = t.h.Connect(100);
  EXPECT_EQ(zombie.Reason(TestClient::JoinFrame("job", 0, 2, 0, "", 1)),
            Failure::REASON_SUPERSEDED);
}

TEST(Restart, ADecidedAttemptAnswersWithItsDecisionUntilItSaves) {
  TwoRanks t;
  t.h.Kill(t.a);
  t.h.Kill(t.b);
  t.a = t.h.Connect(200);
  t.b = t.h.Connect(201);
  ASSERT_TRUE(t.a.Join("job", 0, 2));
  ASSERT_TRUE(t.b.Join("job", 1, 2));
  const uint64_t id = t.a.Send(TestClient::EnterFrame());
  const v1::SessionOutcome to_b = t.b.Call(TestClient::EnterFrame()).enter_session();
  const v1::SessionOutcome to_a = t.a.Take(id)->frame.enter_session();
  t.a.Send(TestClient::ReportFrame(to_a, true));
  // The decision is written, and the daemon dies before it can say so.
  t.h.delay = [](const Action& action) { return std::holds_alternative<SendReply>(action); };
  t.b.Send(TestClient::ReportFrame(to_b, true));
  t.h.delay = nullptr;
  t.h.Restart();
  t.a = t.h.Connect(200);
  t.b = t.h.Connect(201);
  ASSERT_TRUE(t.a.Call(TestClient::JoinFrame("job", 0, 2, 0, "", 2)).join().decided());
  ASSERT_TRUE(t.b.Call(TestClient::JoinFrame("job", 1, 2, 0, "", 2)).join().decided());
  EXPECT_EQ(t.a.Reason(TestClient::ReportFrame(to_a, true)), Failure::REASON_UNKNOWN_SESSION);
  const v1::SessionOutcome again = t.a.Call(TestClient::EnterFrame()).enter_session();
  EXPECT_EQ(again.step(), 10u);
  EXPECT_FALSE(again.done());
  EXPECT_TRUE(t.a.Call(TestClient::ReportFrame(again, true)).enter_session().done());
  ASSERT_TRUE(t.b.Save(11));
  EXPECT_EQ(t.a.Call(TestClient::EnterFrame()).failure().code(),
            static_cast<int>(absl::StatusCode::kFailedPrecondition));
}

TEST(Restart, ReadHoldsAreKnownAgain) {
  TwoRanks t;
  TestClient reader = t.h.Connect(300);
  v1::ClientFrame attach;
  attach.mutable_attach()->set_job("job");
  const v1::Source source = reader.Call(attach).attach();
  ASSERT_EQ(source.step(), 10u);
  t.h.Restart();
  t.Return();
  for (Step step = 11; step < 20; ++step) {
    ASSERT_TRUE(t.a.Save(step));
    EXPECT_NE(t.a.grant().slot(), source.slot());
    ASSERT_TRUE(t.b.Save(step));
  }
  TestClient back = t.h.Connect(300);
  v1::ClientFrame confirm;
  confirm.mutable_confirm_read()->set_slot(source.slot());
  confirm.mutable_confirm_read()->set_generation(source.generation());
  EXPECT_FALSE(back.Call(confirm).has_failure());
  back.Release(source);
  EXPECT_TRUE(back.Call(confirm).has_failure());
}

TEST(Restart, CopiesSpeakForAJobWhoseStateIsLost) {
  TwoRanks t;
  t.h.living.clear();
  t.h.states.clear();
  t.h.Restart();
  EXPECT_EQ(t.h.Committed("job"), std::vector<std::string>{"1:10"});
  EXPECT_EQ(t.h.Status("job").uid(), 0u)
      << "the daemon's user owns it: the copies do not say whose it was";
  EXPECT_EQ(t.h.Daemon().problems_size(), 1);
  TestClient root = t.h.Connect(400, 0);
  ASSERT_TRUE(root.Join("job", 0, 2));
  EXPECT_EQ(root.joined().attempt(), 2u);
}

TEST(Restart, DamagedStatesAreLeftAloneAndReported) {
  TwoRanks t;
  v1::JobState broken = t.h.states.begin()->second;
  broken.mutable_attempts(0)->set_parent_attempt(9);
  broken.set_job_uuid(std::string(16, 'x'));
  broken.set_name("broken");
  t.h.states["broken"] = broken;
  v1::JobState hostile = t.h.states.begin()->second;
  hostile.set_name("../../etc");
  hostile.set_job_uuid(std::string(16, 'y'));
  t.h.states["hostile"] = hostile;
  v1::JobState short_uuid;
  short_uuid.set_job_uuid("abc");
  t.h.states["short"] = short_uuid;
  t.h.Restart();
  EXPECT_EQ(t.h.Daemon().problems_size(), 3);
  EXPECT_EQ(t.h.Admin<v1::GetStatusReply>(v1::GetStatusRequest(), 1000)->daemon().problems_size(),
            0)
      << "they name jobs of other users";
  EXPECT_EQ(t.h.Committed("job"), std::vector<std::string>{"1:10"});
}

TEST(Restart, OfTwoStatesTheLargerVersionIsTrue) {
  TwoRanks t;
  v1::JobState old = t.h.states.begin()->second;
  old.set_version(1);
  old.mutable_attempts(0)->set_decided(false);
  t.h.states["an older one"] = old;
  t.h.Restart();
  t.Return();
  EXPECT_TRUE(t.a.Save(11));
}

TEST(Restart, SlotsOfAnOlderAttemptThatNeverCommittedGo) {
  TwoRanks t;
  ASSERT_TRUE(t.a.Save(11));
  // The next attempt is opened, and the daemon dies before it could take the incomplete step away.
  t.h.delay = [](const Action& action) { return std::holds_alternative<RemoveRecord>(action); };
  TestClient next = t.h.Connect(200);
  next.Call(TestClient::JoinFrame("job", 0, 2, 0, "launch"));
  t.h.delay = nullptr;
  t.h.Restart();
  for (const auto& [id, file] : t.h.files) {
    EXPECT_TRUE(!file.record || file.record->id.step == 10);
  }
}

}  // namespace
}  // namespace holdfast::testing
