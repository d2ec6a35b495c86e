// Restore sessions (docs/protocol.md §6).
#include "tests/server/core_harness.h"

namespace holdfast::testing {
namespace {

using v1::Failure;

// Two ranks that committed steps 10, 20 and 30, and were restarted.
struct Restarted {
  CoreHarness h;
  std::vector<TestClient> ranks;
  Restarted() {
    Run({10, 20, 30});
    Restart();
  }
  void Run(const std::vector<Step>& steps) {
    if (ranks.empty()) {
      Connect(100);
    }
    for (const Step step : steps) {
      EXPECT_TRUE(ranks[0].Save(step));
      EXPECT_TRUE(ranks[1].Save(step));
      EXPECT_TRUE(ranks[1].Committed(step));
    }
  }
  void Connect(int32_t pid) {
    ranks = {h.Connect(pid), h.Connect(pid + 1)};
    EXPECT_TRUE(ranks[0].Join("job", 0, 2));
    EXPECT_TRUE(ranks[1].Join("job", 1, 2));
  }
  void Restart() {
    h.Kill(ranks[0]);
    h.Kill(ranks[1]);
    Connect(ranks[0].process().pid + 10);
  }
  // Both enter; what each is told.
  std::pair<v1::DaemonFrame, v1::DaemonFrame> Enter(
      std::optional<CheckpointId> wanted = std::nullopt) {
    const uint64_t id = ranks[0].Send(TestClient::EnterFrame(1000, wanted));
    const v1::DaemonFrame second = ranks[1].Call(TestClient::EnterFrame(1000, wanted));
    const auto first = ranks[0].Take(id);
    EXPECT_TRUE(first);
    return {first ? first->frame : v1::DaemonFrame(), second};
  }
  std::pair<v1::DaemonFrame, v1::DaemonFrame> Report(const v1::DaemonFrame& a, bool a_loaded,
                                                     const v1::DaemonFrame& b, bool b_loaded) {
    const uint64_t id =
        ranks[0].Send(TestClient::ReportFrame(a.enter_session(), a_loaded, !a_loaded));
    const v1::DaemonFrame second =
        ranks[1].Call(TestClient::ReportFrame(b.enter_session(), b_loaded, !b_loaded));
    const auto first = ranks[0].Take(id);
    EXPECT_TRUE(first);
    return {first ? first->frame : v1::DaemonFrame(), second};
  }
  bool RestoreNewest() {
    const auto [a, b] = Enter();
    const auto [x, y] = Report(a, true, b, true);
    for (const v1::DaemonFrame* frame : {&a, &b}) {
      ranks[frame == &a ? 0 : 1].Release(frame->enter_session().source());
    }
    return x.enter_session().done() && y.enter_session().done();
  }
};

TEST(Sessions, AllRanksGetTheirShardOfTheNewestStep) {
  Restarted t;
  const auto [a, b] = t.Enter();
  EXPECT_EQ(a.enter_session().step(), 30u);
  EXPECT_EQ(b.enter_session().step(), 30u);
  EXPECT_EQ(a.enter_session().source().rank(), 0u);
  EXPECT_EQ(b.enter_session().source().rank(), 1u);
  EXPECT_FALSE(a.enter_session().done());
  const SlotFile& file = t.h.files.at(a.enter_session().source().slot());
  EXPECT_EQ(file.record->id.step, 30u);
  EXPECT_EQ(file.record->id.rank, 0u);
  ASSERT_EQ(file.note.readers_size(), 1);
  EXPECT_EQ(file.note.readers(0).pid(), t.ranks[0].process().pid);
  const auto [x, y] = t.Report(a, true, b, true);
  EXPECT_TRUE(x.enter_session().done());
  EXPECT_TRUE(y.enter_session().done());
  EXPECT_EQ(x.enter_session().descent(0).parent_step(), 30u);
  EXPECT_EQ(x.enter_session().descent(0).attempt(), 2u);
}

TEST(Sessions, NobodyHearsDoneBeforeTheDecisionIsDurable) {
  Restarted t;
  const auto [a, b] = t.Enter();
  t.h.delay = [](const Action& action) { return std::holds_alternative<WriteJobState>(action); };
  const uint64_t first = t.ranks[0].Send(TestClient::ReportFrame(a.enter_session(), true));
  const uint64_t second = t.ranks[1].Send(TestClient::ReportFrame(b.enter_session(), true));
  EXPECT_FALSE(t.ranks[0].Take(first));
  EXPECT_FALSE(t.ranks[1].Take(second));
  t.h.PerformDelayed();
  EXPECT_TRUE(t.ranks[0].Take(first)->frame.enter_session().done());
  EXPECT_TRUE(t.ranks[1].Take(second)->frame.enter_session().done());
}

TEST(Sessions, ADecisionThatCannotBeWrittenIsToldToNobodyAndAskedForAgain) {
  Restarted t;
  const auto [a, b] = t.Enter();
  t.h.fail = [](const Action& x) {
    return std::holds_alternative<WriteJobState>(x) ? absl::ResourceExhaustedError("full")
                                                    : absl::OkStatus();
  };
  const uint64_t first = t.ranks[0].Send(TestClient::ReportFrame(a.enter_session(), true));
  const uint64_t second = t.ranks[1].Send(TestClient::ReportFrame(b.enter_session(), true));
  t.h.Advance(std::chrono::milliseconds(1100));
  EXPECT_EQ(t.ranks[0].Take(first)->frame.failure().code(),
            static_cast<int>(absl::StatusCode::kUnavailable));
  EXPECT_TRUE(t.ranks[1].Take(second)->frame.has_failure());
  t.h.fail = nullptr;
  t.h.Advance(std::chrono::seconds(2));
  const v1::DaemonFrame again = t.ranks[0].Call(TestClient::EnterFrame());
  EXPECT_EQ(again.enter_session().step(), 30u);
  EXPECT_TRUE(
      t.ranks[0].Call(TestClient::ReportFrame(again.enter_session(), true)).enter_session().done());
}

TEST(Sessions, AnExplicitStepOnTheLine) {
  Restarted t;
  const auto [a, b] = t.Enter(CheckpointId{0, 20});
  EXPECT_EQ(a.enter_session().step(), 20u);
  const auto [x, y] = t.Report(a, true, b, true);
  EXPECT_TRUE(y.enter_session().done());
  // Step 30 is discarded for good.
  EXPECT_EQ(t.h.Committed("job"), (std::vector<std::string>{"1:20", "1:10"}));
  t.Restart();
  EXPECT_EQ(t.Enter().first.enter_session().step(), 20u);
}

TEST(Sessions, AnExplicitStepThatIsNotThere) {
  Restarted t;
  const auto [a, b] = t.Enter(CheckpointId{0, 25});
  EXPECT_EQ(a.failure().code(), static_cast<int>(absl::StatusCode::kNotFound));
  EXPECT_NE(b.failure().message().find("30, 20, 10"), std::string::npos) << b.failure().message();
  EXPECT_TRUE(t.RestoreNewest()) << "the attempt is still gathering";
}

TEST(Sessions, AnotherBranchByNameOnly) {
  Restarted t;
  t.Report(t.Enter(CheckpointId{0, 20}).first, true, t.Enter(CheckpointId{0, 20}).second, true);
  t.Restart();
  EXPECT_TRUE(t.Enter(CheckpointId{0, 30}).first.has_failure());
  EXPECT_EQ(t.Enter(CheckpointId{1, 30}).first.enter_session().step(), 30u);
}

TEST(Sessions, RanksThatDisagreeAreBothNamed) {
  Restarted t;
  const uint64_t id = t.ranks[0].Send(TestClient::EnterFrame(1000));
  const v1::DaemonFrame second = t.ranks[1].Call(TestClient::EnterFrame(1000, CheckpointId{0, 20}));
  const auto first = t.ranks[0].Take(id);
  ASSERT_TRUE(first);
  for (const v1::DaemonFrame* frame : {&first->frame, &second}) {
    EXPECT_EQ(frame->failure().code(), static_cast<int>(absl::StatusCode::kInvalidArgument));
    EXPECT_NE(frame->failure().message().find("rank 0"), std::string::npos);
    EXPECT_NE(frame->failure().message().find("rank 1"), std::string::npos);
    EXPECT_NE(frame->failure().message().find("step 20"), std::string::npos);
  }
  EXPECT_TRUE(t.RestoreNewest());
}

TEST(Sessions, WhoDoesNotWaitIsToldAtOnceWhoIsMissing) {
  Restarted t;
  const v1::DaemonFrame answer = t.ranks[0].Call(TestClient::EnterFrame(0));
  EXPECT_EQ(answer.failure().code(), static_cast<int>(absl::StatusCode::kDeadlineExceeded));
  EXPECT_NE(answer.failure().message().find("rank 1"), std::string::npos);
  v1::ClientFrame odd = TestClient::EnterFrame();
  odd.mutable_enter_session()->set_choice(static_cast<v1::EnterSession::Choice>(99));
  EXPECT_EQ(t.ranks[0].Call(odd).failure().code(),
            static_cast<int>(absl::StatusCode::kInvalidArgument));
}

TEST(Sessions, AMissingRankIsNamedAtTheDeadline) {
  Restarted t;
  const uint64_t id = t.ranks[0].Send(TestClient::EnterFrame(500));
  t.h.Advance(std::chrono::milliseconds(600));
  const auto answer = t.ranks[0].Take(id);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->frame.failure().code(), static_cast<int>(absl::StatusCode::kDeadlineExceeded));
  EXPECT_NE(answer->frame.failure().message().find("rank 1"), std::string::npos);
  EXPECT_TRUE(t.RestoreNewest());
}

TEST(Sessions, ARankThatNeverReportsIsNamedAtTheDeadline) {
  Restarted t;
  const auto [a, b] = t.Enter();
  const uint64_t id = t.ranks[0].Send(TestClient::ReportFrame(a.enter_session(), true, false, 500));
  t.h.Advance(std::chrono::milliseconds(600));
  const auto answer = t.ranks[0].Take(id);
  ASSERT_TRUE(answer);
  EXPECT_NE(answer->frame.failure().message().find("rank 1"), std::string::npos);
  // The late one hears why, and all can begin again.
  EXPECT_EQ(t.ranks[1].Call(TestClient::ReportFrame(b.enter_session(), true)).failure().code(),
            static_cast<int>(absl::StatusCode::kDeadlineExceeded));
  EXPECT_TRUE(t.RestoreNewest());
}

TEST(Sessions, ABadCopySendsAllRanksBackTogether) {
  Restarted t;
  const auto [a, b] = t.Enter();
  // Rank 0 has loaded step 30 and waits; rank 1 finds its copy bad.
  const auto [x, y] = t.Report(a, true, b, false);
  EXPECT_EQ(x.enter_session().step(), 20u);
  EXPECT_EQ(y.enter_session().step(), 20u);
  EXPECT_EQ(x.enter_session().round(), 2u);
  EXPECT_FALSE(x.enter_session().done());
  const auto [p, q] = t.Report(x, true, y, true);
  EXPECT_TRUE(p.enter_session().done());
  EXPECT_EQ(p.enter_session().step(), 20u);
  EXPECT_EQ(q.enter_session().step(), 20u);
  EXPECT_EQ(t.h.CountReports(Report::Kind::kCopyBad), 1u);
  EXPECT_EQ(t.h.CountReports(Report::Kind::kSessionFellBack), 2u)
      << "when it happens, and in the end, for all ranks";
  for (const v1::DaemonFrame& frame : {p, q}) {
    const std::string& said = frame.enter_session().passed_over();
    EXPECT_EQ(said.rfind("the newer step 30 of attempt 1 is passed over: ", 0), 0u) << said;
  }
  EXPECT_EQ(t.h.Committed("job").front(), "1:20");
}

TEST(Sessions, AReportOfAnEarlierRoundGetsTheCurrentSource) {
  Restarted t;
  const auto [a, b] = t.Enter();
  const v1::DaemonFrame moved =
      t.ranks[1].Call(TestClient::ReportFrame(b.enter_session(), false, true));
  EXPECT_EQ(moved.enter_session().step(), 20u);
  const v1::DaemonFrame late = t.ranks[0].Call(TestClient::ReportFrame(a.enter_session(), true));
  EXPECT_EQ(late.enter_session().step(), 20u);
  EXPECT_EQ(late.enter_session().round(), 2u);
}

TEST(Sessions, NothingLeftIsUnreadableAndStartsNobodyFromScratch) {
  Restarted t;
  auto [a, b] = t.Enter();
  for (int i = 0; i < 2; ++i) {
    std::tie(a, b) = t.Report(a, true, b, false);
  }
  const uint64_t id = t.ranks[0].Send(TestClient::ReportFrame(a.enter_session(), true));
  const v1::DaemonFrame last =
      t.ranks[1].Call(TestClient::ReportFrame(b.enter_session(), false, true));
  EXPECT_EQ(last.failure().reason(), Failure::REASON_UNREADABLE);
  EXPECT_EQ(t.ranks[0].Take(id)->frame.failure().reason(), Failure::REASON_UNREADABLE);
  // A save now would discard the line for good: it must be asked for.
  EXPECT_EQ(t.ranks[0].Call(TestClient::BeginFrame(1)).failure().code(),
            static_cast<int>(absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(t.Enter().first.failure().reason(), Failure::REASON_UNREADABLE);
  v1::SetRestorePointRequest request;
  request.set_job("job");
  request.set_from_scratch(true);
  ASSERT_TRUE(t.h.Admin<v1::SetRestorePointReply>(request).ok());
  EXPECT_EQ(t.Enter().first.failure().reason(), Failure::REASON_NOTHING_TO_RESTORE);
  EXPECT_TRUE(t.ranks[0].Save(1));
}

// Forgetting to restore, or not being able to, must not cost a job its history.
TEST(Sessions, ASaveWithoutARestoreIsRefusedWhileThereIsSomethingToRestore) {
  Restarted t;
  const v1::DaemonFrame refused = t.ranks[1].Call(TestClient::BeginFrame(1));
  EXPECT_EQ(refused.failure().code(), static_cast<int>(absl::StatusCode::kFailedPrecondition));
  EXPECT_NE(refused.failure().message().find("ckptctl restore job --from-scratch"),
            std::string::npos);
  EXPECT_TRUE(t.RestoreNewest()) << "the other ranks' restore is not disturbed";
  EXPECT_TRUE(t.ranks[1].Save(31));
}

TEST(Sessions, ASaveBeginsAnewWhenThatWasAskedFor) {
  Restarted t;
  v1::SetRestorePointRequest request;
  request.set_job("job");
  request.set_from_scratch(true);
  ASSERT_TRUE(t.h.Admin<v1::SetRestorePointReply>(request).ok());
  EXPECT_TRUE(t.ranks[0].Save(1));
  EXPECT_TRUE(t.ranks[1].Save(1));
  EXPECT_EQ(t.h.Committed("job"), std::vector<std::string>{"2:1"});
}

TEST(Sessions, WhatTheCallerWantsWronglyEndsTheSessionForAllAndHarmsNothing) {
  Restarted t;
  const auto [a, b] = t.Enter();
  const uint64_t id = t.ranks[0].Send(TestClient::ReportFrame(a.enter_session(), true));
  v1::ClientFrame mismatch = TestClient::ReportFrame(b.enter_session(), false);
  mismatch.mutable_report_load()->set_wants_mismatch(true);
  mismatch.mutable_report_load()->set_problem("tensor w is F32 [4], not F32 [5]");
  const v1::DaemonFrame refused = t.ranks[1].Call(mismatch);
  EXPECT_EQ(refused.failure().code(), static_cast<int>(absl::StatusCode::kInvalidArgument));
  const auto other = t.ranks[0].Take(id);
  EXPECT_NE(other->frame.failure().message().find("rank 1"), std::string::npos);
  EXPECT_NE(other->frame.failure().message().find("tensor w"), std::string::npos);
  EXPECT_EQ(t.h.Committed("job").front(), "1:30");
  EXPECT_TRUE(t.RestoreNewest());
}

TEST(Sessions, TheFirstStartHasNothingToRestore) {
  CoreHarness h;
  TestClient a = h.Connect(100);
  ASSERT_TRUE(a.Join("job", 0, 1));
  EXPECT_EQ(a.Reason(TestClient::EnterFrame()), Failure::REASON_NOTHING_TO_RESTORE);
  EXPECT_TRUE(h.states.begin()->second.attempts(0).decided());
  EXPECT_EQ(a.Reason(TestClient::EnterFrame()), Failure::REASON_NOTHING_TO_RESTORE);
  EXPECT_TRUE(a.Save(1));
  EXPECT_EQ(a.Call(TestClient::EnterFrame()).failure().code(),
            static_cast<int>(absl::StatusCode::kFailedPrecondition));
}

TEST(Sessions, MemoryGoneIsUnreadableNotNothing) {
  Restarted t;
  t.h.living.clear();
  t.h.Restart(true);
  t.Connect(300);
  const auto [a, b] = t.Enter();
  EXPECT_EQ(a.failure().reason(), Failure::REASON_UNREADABLE);
  EXPECT_NE(a.failure().message().find("step 30"), std::string::npos) << a.failure().message();
  EXPECT_EQ(a.failure().message().find("--from-scratch"), std::string::npos)
      << "no way out that destroys something: " << a.failure().message();
  EXPECT_NE(a.failure().message().find("ckptctl explain job"), std::string::npos);
}

TEST(Sessions, AnotherWorldSizeIsSaidSo) {
  Restarted t;
  t.h.Kill(t.ranks[0]);
  t.h.Kill(t.ranks[1]);
  TestClient alone = t.h.Connect(300);
  ASSERT_TRUE(alone.Join("job", 0, 1));
  const v1::DaemonFrame newest = alone.Call(TestClient::EnterFrame());
  EXPECT_EQ(newest.failure().reason(), Failure::REASON_UNREADABLE);
  EXPECT_NE(newest.failure().message().find("2 ranks"), std::string::npos);
  EXPECT_EQ(alone.Reason(TestClient::EnterFrame(1000, CheckpointId{0, 20})),
            Failure::REASON_TOPOLOGY);
}

TEST(Sessions, ARankThatDiesWhileLoadingIsReplacedInTheSameRound) {
  Restarted t;
  const auto [a, b] = t.Enter();
  const uint64_t id = t.ranks[0].Send(TestClient::ReportFrame(a.enter_session(), true));
  t.h.Kill(t.ranks[1]);
  EXPECT_FALSE(t.ranks[0].Take(id));
  TestClient replacement = t.h.Connect(300);
  ASSERT_TRUE(replacement.Join("job", 1, 2));
  EXPECT_EQ(replacement.joined().attempt(), 2u);
  const v1::DaemonFrame source = replacement.Call(TestClient::EnterFrame());
  EXPECT_EQ(source.enter_session().step(), 30u);
  EXPECT_EQ(source.enter_session().session(), a.enter_session().session());
  EXPECT_TRUE(replacement.Call(TestClient::ReportFrame(source.enter_session(), true))
                  .enter_session()
                  .done());
  EXPECT_TRUE(t.ranks[0].Take(id)->frame.enter_session().done());
}

TEST(Sessions, ARankThatDiesAfterLoadingDoesNotCount) {
  Restarted t;
  const auto [a, b] = t.Enter();
  t.ranks[0].Send(TestClient::ReportFrame(a.enter_session(), true));
  t.h.Kill(t.ranks[0]);
  const uint64_t waiting =
      t.ranks[1].Send(TestClient::ReportFrame(b.enter_session(), true, false, 5000));
  EXPECT_FALSE(t.ranks[1].Take(waiting)) << "its replacement has not loaded anything";
  TestClient replacement = t.h.Connect(300);
  ASSERT_TRUE(replacement.Join("job", 0, 2));
  const v1::DaemonFrame source = replacement.Call(TestClient::EnterFrame());
  EXPECT_TRUE(replacement.Call(TestClient::ReportFrame(source.enter_session(), true))
                  .enter_session()
                  .done());
  EXPECT_TRUE(t.ranks[1].Take(waiting)->frame.enter_session().done());
}

TEST(Sessions, NoSaveWhileASessionIsOpen) {
  Restarted t;
  t.ranks[0].Send(TestClient::EnterFrame());
  EXPECT_EQ(t.ranks[1].Call(TestClient::BeginFrame(31)).failure().code(),
            static_cast<int>(absl::StatusCode::kFailedPrecondition));
}

TEST(Sessions, TheRestorePointIsUsedOnceAndClearedWithTheDecision) {
  Restarted t;
  v1::SetRestorePointRequest request;
  request.set_job("job");
  request.set_step(10);
  ASSERT_TRUE(t.h.Admin<v1::SetRestorePointReply>(request).ok());
  EXPECT_EQ(t.h.Status("job").restore_point(), "attempt 1 step 10");
  const auto [a, b] = t.Enter();
  EXPECT_EQ(a.enter_session().step(), 10u);
  t.Report(a, true, b, true);
  EXPECT_EQ(t.h.Status("job").restore_point(), "");
  EXPECT_FALSE(t.h.states.begin()->second.restore_point().set());
  for (Rank rank = 0; rank < 2; ++rank) {
    t.ranks[rank].Release((rank == 0 ? a : b).enter_session().source());
  }
  t.Run({11});
  t.Restart();
  EXPECT_EQ(t.Enter().first.enter_session().step(), 11u) << "the discarded branch came back";
}

TEST(Sessions, CandidatesAreHeldWhileOthersWantMemory) {
  Restarted t;
  const auto [a, b] = t.Enter();
  t.h.bytes_max = 0;
  TestClient greedy = t.h.Connect(900);
  ASSERT_TRUE(greedy.Join("greedy", 0, 1));
  EXPECT_EQ(greedy.Reason(TestClient::BeginFrame(1, 999 * kSlot)), Failure::REASON_NO_ROOM);
  EXPECT_EQ(t.h.Committed("job").size(), 3u) << "what the session may fall back to was given up";
  t.Report(a, true, b, true);
}

TEST(Sessions, AHeldCopyIsNotFilledAgain) {
  Restarted t;
  const auto [a, b] = t.Enter();
  t.Report(a, true, b, true);
  const uint32_t held = a.enter_session().source().slot();
  for (Step step = 31; step < 40; ++step) {
    ASSERT_TRUE(t.ranks[0].Save(step));
    EXPECT_NE(t.ranks[0].grant().slot(), held);
    ASSERT_TRUE(t.ranks[1].Save(step));
    EXPECT_TRUE(t.ranks[1].Committed(step));
  }
  v1::ClientFrame confirm;
  confirm.mutable_confirm_read()->set_slot(held);
  confirm.mutable_confirm_read()->set_generation(a.enter_session().source().generation());
  EXPECT_FALSE(t.ranks[0].Call(confirm).has_failure());
  t.ranks[0].Release(a.enter_session().source());
  EXPECT_TRUE(t.ranks[0].Call(confirm).has_failure());
}

TEST(Sessions, AnAttemptThatEndsUndecidedLeavesNoTrace) {
  Restarted t;
  t.Enter(CheckpointId{0, 10});
  t.Restart();
  EXPECT_EQ(t.Enter().first.enter_session().step(), 30u);
}

TEST(Sessions, AnUnknownSessionIsSaidSo) {
  Restarted t;
  v1::SessionOutcome made_up;
  made_up.set_session(4711);
  made_up.set_round(1);
  EXPECT_EQ(t.ranks[0].Reason(TestClient::ReportFrame(made_up, true)),
            Failure::REASON_UNKNOWN_SESSION);
}

}  // namespace
}  // namespace holdfast::testing
