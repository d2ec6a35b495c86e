// Sessions of ranks that say a label: if the newest step is of another run of the job, they start
// over (docs/protocol.md §6, "Labels").
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/server/saved_world.h"

namespace holdfast::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
using v1::Failure;

v1::ClientFrame ToEnter(const std::string& label) {
  v1::ClientFrame frame = TestClient::EnterFrame(60'000);
  frame.mutable_enter_session()->set_may_reshard(true);
  frame.mutable_enter_session()->set_label(label);
  return frame;
}
v1::ClientFrame OfAnotherRun(const v1::SessionOutcome& offered) {
  v1::ClientFrame frame = TestClient::ReportFrame(offered, false, false, 60'000);
  frame.mutable_report_load()->set_of_another_run(true);
  frame.mutable_report_load()->set_problem("it has no label");
  return frame;
}
int Code(absl::StatusCode code) {
  return static_cast<int>(code);
}

// Steps 1 and 2 are of a run without a label.
struct Saved : SavedWorld {
  Saved() { Again(2); }
  std::vector<v1::DaemonFrame> All(const std::function<v1::ClientFrame(size_t)>& frame) {
    std::vector<uint64_t> ids;
    for (size_t i = 0; i < ranks.size(); ++i) {
      ids.push_back(ranks[i].Send(frame(i)));
    }
    std::vector<v1::DaemonFrame> frames;
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto answer = ranks[i].Take(ids[i]);
      EXPECT_TRUE(answer) << "rank " << i;
      frames.push_back(answer ? answer->frame : v1::DaemonFrame());
    }
    return frames;
  }
  std::vector<v1::SessionOutcome> EnterAll() {
    std::vector<v1::SessionOutcome> outcomes;
    for (const v1::DaemonFrame& frame : All([](size_t) { return ToEnter("b"); })) {
      EXPECT_TRUE(frame.has_enter_session()) << frame.ShortDebugString();
      outcomes.push_back(frame.enter_session());
    }
    return outcomes;
  }
  // What all ranks hear of it.
  std::vector<v1::Failure> StartOver() {
    const auto offered = EnterAll();
    std::vector<v1::Failure> failures;
    for (const auto& frame : All([&](size_t i) { return OfAnotherRun(offered[i]); })) {
      failures.push_back(frame.failure());
    }
    return failures;
  }
  void ExpectAllStartOver() {
    for (const v1::Failure& failure : StartOver()) {
      EXPECT_EQ(failure.reason(), Failure::REASON_NOTHING_TO_RESTORE) << failure.message();
    }
    EXPECT_TRUE(Newest().decided());
    EXPECT_EQ(Newest().parent_attempt(), 0u);
  }
  void ExpectNothingToRestore() {
    for (const v1::DaemonFrame& frame : All([](size_t) { return ToEnter("b"); })) {
      EXPECT_EQ(frame.failure().reason(), Failure::REASON_NOTHING_TO_RESTORE)
          << frame.ShortDebugString();
    }
  }
};

TEST(StartsOver, IfAllRanksFindAnotherRunsStep) {
  Saved w;
  w.ExpectAllStartOver();
  ASSERT_TRUE(w.Save(1)) << "the steps count anew";
  w.Again(2);
  for (const v1::SessionOutcome& offered : w.EnterAll()) {
    EXPECT_EQ(offered.attempt(), 2u);
    EXPECT_EQ(offered.step(), 1u);
  }
}

TEST(StartsOver, NobodyHearsOfItBeforeItIsDurable) {
  Saved w;
  const auto offered = w.EnterAll();
  w.h.delay = [](const Action& a) { return std::holds_alternative<WriteJobState>(a); };
  const uint64_t first = w.ranks[0].Send(OfAnotherRun(offered[0]));
  const uint64_t second = w.ranks[1].Send(OfAnotherRun(offered[1]));
  EXPECT_FALSE(w.ranks[0].Take(first));
  EXPECT_FALSE(w.ranks[1].Take(second));
  w.h.PerformDelayed();
  EXPECT_TRUE(w.ranks[0].Take(first));
  EXPECT_TRUE(w.ranks[1].Take(second));
}

TEST(StartsOver, BeforeTheFirstCommitARestartStartsFromScratchAgain) {
  Saved w;
  w.ExpectAllStartOver();
  ASSERT_TRUE(w.ranks[0].Save(1));  // and rank 1 dies
  w.Again(2);
  w.ExpectNothingToRestore();
  // With the node's memory and the job's state gone, too, it is found as at the first start.
  w.EndAll();
  w.h.states.clear();
  w.Reboot();
  w.Again(2);
  w.ExpectAllStartOver();
}

TEST(StartsOver, NotIfOneRankFindsItsLabel) {
  Saved w;
  const auto offered = w.EnterAll();
  const auto ended = w.All([&](size_t i) {
    return i == 0 ? OfAnotherRun(offered[0])
                  : TestClient::ReportFrame(offered[1], true, false, 60'000);
  });
  for (const v1::DaemonFrame& frame : ended) {
    EXPECT_EQ(frame.failure().code(), Code(absl::StatusCode::kInvalidArgument));
    EXPECT_THAT(frame.failure().message(), HasSubstr("rank 0"));
    EXPECT_THAT(frame.failure().message(), HasSubstr("rank 1"));
  }
  EXPECT_FALSE(w.Newest().decided());
  EXPECT_EQ(w.EnterAll().front().step(), 2u) << "as before";
}

TEST(StartsOver, AllRanksSayTheSameLabel) {
  Saved w;
  for (const std::string other : {"c", ""}) {
    for (const v1::DaemonFrame& frame :
         w.All([&](size_t i) { return ToEnter(i == 0 ? "b" : other); })) {
      EXPECT_EQ(frame.failure().code(), Code(absl::StatusCode::kInvalidArgument));
      EXPECT_THAT(frame.failure().message(), HasSubstr("fresh='b'"));
    }
    EXPECT_FALSE(w.Newest().decided());
  }
  EXPECT_EQ(w.ranks[0].Call(ToEnter(std::string(257, 'x'))).failure().code(),
            Code(absl::StatusCode::kInvalidArgument));
  w.ExpectAllStartOver();
}

TEST(StartsOver, NotWhileADriveCannotBeRead) {
  Saved w;
  w.h.nvme.scan = absl::UnavailableError("'/nvme0' is away");
  w.h.Feed(TierAway{TierKind::kNvme, "/nvme0", w.h.nvme.scan});
  for (const v1::Failure& failure : w.StartOver()) {
    EXPECT_EQ(failure.code(), Code(absl::StatusCode::kUnavailable));
    EXPECT_THAT(failure.message(), HasSubstr("'/nvme0' is away"));
    EXPECT_THAT(failure.message(), HasSubstr("ckptctl restore job --from-scratch --yes"));
  }
  EXPECT_FALSE(w.Newest().decided());
  w.h.nvme.scan = absl::OkStatus();
  w.h.Advance(seconds(31));
  w.ExpectAllStartOver();
}

TEST(StartsOver, NotFromAStepThatAPersonChose) {
  Saved w;
  v1::SetRestorePointRequest point;
  point.set_job("job");
  point.set_step(1);
  ASSERT_TRUE(w.h.Admin<v1::SetRestorePointReply>(point).ok());
  for (const v1::Failure& failure : w.StartOver()) {
    EXPECT_EQ(failure.code(), Code(absl::StatusCode::kFailedPrecondition));
    EXPECT_THAT(failure.message(), HasSubstr("step 1 of attempt 1"));
    EXPECT_THAT(failure.message(), HasSubstr("ckptctl restore job --clear"));
  }
  EXPECT_FALSE(w.Newest().decided());
  EXPECT_EQ(w.EnterAll().front().step(), 1u) << "it is still what the next session loads";
}

TEST(StartsOver, WithAnotherNumberOfRanks) {
  Saved w;
  w.Again(3);
  w.ExpectAllStartOver();
}

TEST(StartsOver, OnlyWhenAllRanksHaveLookedAtTheSameStep) {
  Saved w;
  const auto offered = w.EnterAll();
  const uint64_t first = w.ranks[0].Send(OfAnotherRun(offered[0]));
  v1::SessionOutcome second = offered[1];
  while (second.step() == 2) {  // rank 1 can read no copy of it
    second = w.ranks[1].Call(TestClient::ReportFrame(second, false, true, 60'000)).enter_session();
  }
  EXPECT_FALSE(w.Newest().decided());
  const auto answer = w.ranks[0].Take(first);
  ASSERT_TRUE(answer);
  const v1::SessionOutcome next = answer->frame.enter_session();
  EXPECT_EQ(next.step(), 1u);
  EXPECT_EQ(second.step(), 1u);
  for (const auto& frame : w.All([&](size_t i) { return OfAnotherRun(i == 0 ? next : second); })) {
    EXPECT_EQ(frame.failure().reason(), Failure::REASON_NOTHING_TO_RESTORE);
  }
}

}  // namespace
}  // namespace holdfast::testing
