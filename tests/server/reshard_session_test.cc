// Sessions in which a step of another world size is a candidate: it is offered as a whole, each
// rank reads what it wants of it and reports, and all fall back together (docs/protocol.md §6).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/server/saved_world.h"

namespace holdfast::testing {
namespace {

using ::testing::HasSubstr;
using v1::Failure;

v1::ClientFrame ToEnter(std::optional<CheckpointId> wanted = std::nullopt) {
  v1::ClientFrame frame = TestClient::EnterFrame(60'000, wanted);
  frame.mutable_enter_session()->set_may_reshard(true);
  frame.mutable_enter_session()->set_reads_parts(true);
  return frame;
}
v1::ClientFrame ToReport(const v1::SessionOutcome& offered, bool loaded, bool shards_are_bad) {
  v1::ClientFrame frame = TestClient::ReportFrame(offered, loaded, false, 60'000);
  frame.mutable_report_load()->set_shards_are_bad(shards_are_bad);
  return frame;
}
int Code(absl::StatusCode code) {
  return static_cast<int>(code);
}

struct Saved : SavedWorld {
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
  std::vector<v1::SessionOutcome> EnterAll(std::optional<CheckpointId> wanted = std::nullopt) {
    std::vector<v1::SessionOutcome> outcomes;
    for (const v1::DaemonFrame& frame : All([&](size_t) { return ToEnter(wanted); })) {
      EXPECT_TRUE(frame.has_enter_session()) << frame.ShortDebugString();
      outcomes.push_back(frame.enter_session());
    }
    return outcomes;
  }
};

void ExpectOffered(const std::vector<v1::SessionOutcome>& outcomes, Step step, uint32_t saved_by) {
  for (const v1::SessionOutcome& outcome : outcomes) {
    EXPECT_FALSE(outcome.done());
    EXPECT_FALSE(outcome.has_source());
    EXPECT_EQ(outcome.attempt(), 1u);
    EXPECT_EQ(outcome.step(), step);
    EXPECT_EQ(outcome.reshard(), saved_by);
  }
}

TEST(ReshardSession, HowFarItIsIsShown) {
  Saved w;
  w.Again(3);
  EXPECT_FALSE(w.h.Status("job").has_restore());
  std::vector<uint64_t> asked;
  for (size_t i = 0; i < 2; ++i) {
    asked.push_back(w.ranks[i].Send(ToEnter()));
  }
  EXPECT_EQ(w.h.Status("job").restore().text(), "2 of 3 ranks have asked; waits for rank 2");
  asked.push_back(w.ranks[2].Send(ToEnter()));
  std::vector<v1::SessionOutcome> offered;
  for (size_t i = 0; i < asked.size(); ++i) {
    offered.push_back(w.ranks[i].Take(asked[i])->frame.enter_session());
  }
  ExpectOffered(offered, 2, 2);
  w.ranks[1].Send(ToReport(offered[1], true, false));
  const v1::Restore restore = w.h.Status("job").restore();
  EXPECT_EQ(restore.attempt(), 1u);
  EXPECT_EQ(restore.step(), 2u);
  EXPECT_EQ(restore.saved_by(), 2u);
  EXPECT_EQ(restore.ranks_done(), 1u);
  EXPECT_EQ(restore.text(),
            "step 2 of attempt 1, which 2 ranks saved: 1 of 3 ranks have loaded it; waits for "
            "ranks 0, 2");
  for (const size_t i : {0U, 2U}) {
    w.ranks[i].Send(ToReport(offered[i], true, false));
  }
  EXPECT_FALSE(w.h.Status("job").has_restore());
}

TEST(ReshardSession, AStepOfAnotherWorldSizeIsOfferedAsAWhole) {
  for (const uint32_t ranks_now : {1U, 3U, 5U}) {
    Saved w;
    w.Again(ranks_now);
    const auto offered = w.EnterAll();
    ExpectOffered(offered, 2, 2);
    EXPECT_FALSE(w.Newest().decided()) << "nobody has it yet";
    const auto ended = w.All([&](size_t i) { return ToReport(offered[i], true, false); });
    for (const v1::DaemonFrame& frame : ended) {
      EXPECT_TRUE(frame.enter_session().done()) << frame.ShortDebugString();
      EXPECT_EQ(frame.enter_session().step(), 2u);
    }
    EXPECT_EQ(w.Newest().parent_attempt(), 1u);
    EXPECT_EQ(w.Newest().parent_step(), 2u);
    ASSERT_TRUE(w.Save(3)) << "and it goes on";
    EXPECT_EQ(w.h.Committed("job").front(), "2:3");
  }
}

TEST(ReshardSession, WithAsManyRanksEachGetsItsOwn) {
  Saved w;
  w.Again(2);
  for (const v1::SessionOutcome& outcome : w.EnterAll()) {
    EXPECT_TRUE(outcome.has_source());
    EXPECT_EQ(outcome.reshard(), 0u);
  }
}

TEST(ReshardSession, OneRankThatCannotIsEnoughToPassItOver) {
  Saved w;
  w.Again(3);
  const auto answers =
      w.All([&](size_t i) { return i == 1 ? TestClient::EnterFrame(60'000) : ToEnter(); });
  for (const v1::DaemonFrame& frame : answers) {
    EXPECT_EQ(frame.failure().reason(), Failure::REASON_UNREADABLE);
    EXPECT_THAT(frame.failure().message(), HasSubstr("was saved by 2 ranks, this attempt has 3"));
  }
  EXPECT_FALSE(w.Newest().decided());
  ExpectOffered(w.EnterAll(), 2, 2);
}

TEST(ReshardSession, AReplacementThatCannotIsRefusedAndTheOthersWaitOn) {
  Saved w;
  w.Again(3);
  const auto offered = w.EnterAll();
  const uint64_t zero = w.ranks[0].Send(ToReport(offered[0], true, false));
  EXPECT_EQ(w.ranks[1].Reason(TestClient::EnterFrame(60'000)), Failure::REASON_TOPOLOGY);
  EXPECT_FALSE(w.ranks[0].Take(zero));
  // It enters again as it should, and gets the round's step.
  const v1::SessionOutcome again = w.ranks[1].Call(ToEnter()).enter_session();
  ExpectOffered({again}, 2, 2);
  const uint64_t one = w.ranks[1].Send(ToReport(again, true, false));
  const uint64_t two = w.ranks[2].Send(ToReport(offered[2], true, false));
  EXPECT_TRUE(w.ranks[0].Take(zero)->frame.enter_session().done());
  EXPECT_TRUE(w.ranks[1].Take(one)->frame.enter_session().done());
  EXPECT_TRUE(w.ranks[2].Take(two)->frame.enter_session().done());
}

TEST(ReshardSession, WhatOneCannotReadIsPassedOverByAll) {
  Saved w;
  w.Again(3);
  const auto offered = w.EnterAll();
  const auto next = w.All([&](size_t i) { return ToReport(offered[i], i != 2, i == 2); });
  std::vector<v1::SessionOutcome> second;
  for (const v1::DaemonFrame& frame : next) {
    second.push_back(frame.enter_session());
    EXPECT_EQ(second.back().round(), 2u);
  }
  ExpectOffered(second, 1, 2);
  // No copy of the rank with that number was called bad: it may have been any of them.
  EXPECT_EQ(w.h.Committed("job"), (std::vector<std::string>{"1:2", "1:1"}));
  for (const v1::DaemonFrame& frame :
       w.All([&](size_t i) { return ToReport(second[i], true, false); })) {
    EXPECT_TRUE(frame.enter_session().done());
    EXPECT_EQ(frame.enter_session().step(), 1u);
  }
}

TEST(ReshardSession, WhatIsWantedAndWasNotSavedEndsItForAll) {
  Saved w;
  w.Again(3);
  const auto offered = w.EnterAll();
  const uint64_t zero = w.ranks[0].Send(ToReport(offered[0], true, false));
  v1::ClientFrame mismatch = ToReport(offered[1], false, false);
  mismatch.mutable_report_load()->set_wants_mismatch(true);
  mismatch.mutable_report_load()->set_problem("tensor 'w' was not saved");
  const v1::DaemonFrame one = w.ranks[1].Call(mismatch);
  EXPECT_EQ(one.failure().code(), Code(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(w.ranks[0].Take(zero)->frame.failure().message(), HasSubstr("tensor 'w'"));
  EXPECT_FALSE(w.Newest().decided());
}

// As many ranks in another parallel layout: each was offered its own shard, and read others' too.
TEST(ReshardSession, ABadCopyOfAnothersIsNotCalledTheRanksOwn) {
  Saved w;
  w.Again(2);
  const auto offered = w.EnterAll();
  const auto next = w.All([&](size_t i) { return ToReport(offered[i], i == 0, i != 0); });
  for (const v1::DaemonFrame& frame : next) {
    EXPECT_EQ(frame.enter_session().step(), 1u) << frame.ShortDebugString();
  }
  EXPECT_EQ(w.h.Committed("job"), (std::vector<std::string>{"1:2", "1:1"}));
}

TEST(ReshardSession, ADecidedAttemptOffersItsStepAgain) {
  Saved w;
  w.Again(3);
  const auto offered = w.EnterAll();
  w.All([&](size_t i) { return ToReport(offered[i], true, false); });
  // One that did not hear it enters again.
  const v1::SessionOutcome again = w.ranks[1].Call(ToEnter()).enter_session();
  ExpectOffered({again}, 2, 2);
  EXPECT_TRUE(w.ranks[1].Call(ToReport(again, true, false)).enter_session().done());
  EXPECT_EQ(w.ranks[1].Reason(TestClient::EnterFrame(1000)), Failure::REASON_TOPOLOGY);
}

TEST(ReshardSession, AnExplicitStepAndTheRestorePoint) {
  Saved w;
  w.Again(3);
  ExpectOffered(w.EnterAll(CheckpointId{0, 1}), 1, 2);
}

}  // namespace
}  // namespace holdfast::testing
