// Sessions of ranks that read by themselves: the step is agreed on and decided as ever, and no rank
// needs a shard (docs/protocol.md §6, "Ranks that read by themselves").
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/server/saved_world.h"

namespace holdfast::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
using v1::Failure;

v1::ClientFrame Adopt(uint64_t deadline_ms = 60'000,
                      std::optional<CheckpointId> wanted = std::nullopt) {
  v1::ClientFrame frame = TestClient::EnterFrame(deadline_ms, wanted);
  frame.mutable_enter_session()->set_reads_by_itself(true);
  return frame;
}
int Code(absl::StatusCode code) {
  return static_cast<int>(code);
}

struct Saved : SavedWorld {
  std::vector<v1::DaemonFrame> EnterAll(std::optional<CheckpointId> wanted = std::nullopt) {
    std::vector<uint64_t> ids;
    for (TestClient& rank : ranks) {
      ids.push_back(rank.Send(Adopt(60'000, wanted)));
    }
    std::vector<v1::DaemonFrame> frames;
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto answer = ranks[i].Take(ids[i]);
      frames.push_back(answer ? answer->frame : v1::DaemonFrame());
      EXPECT_TRUE(answer) << "rank " << i;
      EXPECT_EQ(answer ? answer->descriptors : Descriptors::kNone, Descriptors::kNone);
    }
    return frames;
  }
};

void ExpectAdopted(const std::vector<v1::DaemonFrame>& frames, Attempt attempt, Step step) {
  for (const v1::DaemonFrame& frame : frames) {
    EXPECT_TRUE(frame.enter_session().done()) << frame.ShortDebugString();
    EXPECT_FALSE(frame.enter_session().has_source());
    EXPECT_EQ(frame.enter_session().attempt(), attempt);
    EXPECT_EQ(frame.enter_session().step(), step);
    EXPECT_GE(frame.enter_session().descent_size(), 2);
  }
}

TEST(ReadsByItself, AllRanksHearTheNewestStepAndItIsTheParent) {
  Saved w;
  w.Again(2);
  const uint64_t first = w.ranks[0].Send(Adopt());
  EXPECT_FALSE(w.ranks[0].Take(first)) << "it waits for the other rank";
  const uint64_t second = w.ranks[1].Send(Adopt());
  ExpectAdopted({w.ranks[0].Take(first)->frame, w.ranks[1].Take(second)->frame}, 1, 2);
  EXPECT_TRUE(w.Newest().decided());
  EXPECT_EQ(w.Newest().parent_attempt(), 1u);
  EXPECT_EQ(w.Newest().parent_step(), 2u);
  EXPECT_TRUE(w.h.opened.empty());
  ASSERT_TRUE(w.Save(3)) << "and it goes on";
  EXPECT_EQ(w.h.Committed("job").front(), "2:3");
}

TEST(ReadsByItself, AnotherWorldSizeIsNoHindranceInSuchASessionOnly) {
  Saved w;
  w.Again(3);
  const uint64_t usual = w.ranks[0].Send(TestClient::EnterFrame(60'000));
  for (int i : {1, 2}) {
    w.ranks[static_cast<size_t>(i)].Send(TestClient::EnterFrame(60'000));
  }
  ASSERT_EQ(w.ranks[0].Take(usual)->frame.failure().reason(), Failure::REASON_UNREADABLE);
  ExpectAdopted(w.EnterAll(), 1, 2);
  EXPECT_EQ(w.Newest().world_size(), 3u);
  // Who wants a shard of it now cannot be served: it would be another rank's.
  EXPECT_EQ(w.ranks[0].Reason(TestClient::EnterFrame(1000)), Failure::REASON_TOPOLOGY);
  ASSERT_TRUE(w.Save(3));
  // The line now has steps of two world sizes.
  w.Again(2);
  ExpectAdopted(w.EnterAll(), 2, 3);
}

TEST(ReadsByItself, TheDecisionIsDurableBeforeAnyRankHearsIt) {
  Saved w;
  w.Again(2);
  w.h.delay = [](const Action& a) { return std::holds_alternative<WriteJobState>(a); };
  const uint64_t first = w.ranks[0].Send(Adopt());
  const uint64_t second = w.ranks[1].Send(Adopt());
  EXPECT_FALSE(w.ranks[0].Take(first));
  EXPECT_FALSE(w.ranks[1].Take(second));
  w.h.PerformDelayed();
  EXPECT_TRUE(w.ranks[0].Take(first));
  EXPECT_TRUE(w.ranks[1].Take(second));
}

TEST(ReadsByItself, AllRanksSayTheSame) {
  Saved w;
  w.Again(2);
  const uint64_t first = w.ranks[0].Send(Adopt());
  const uint64_t second = w.ranks[1].Send(TestClient::EnterFrame(60'000));
  for (const auto& [rank, id] : {std::pair{0, first}, {1, second}}) {
    const auto answer = w.ranks[static_cast<size_t>(rank)].Take(id);
    ASSERT_TRUE(answer);
    EXPECT_EQ(answer->frame.failure().code(), Code(absl::StatusCode::kInvalidArgument));
    EXPECT_THAT(answer->frame.failure().message(), HasSubstr("by itself"));
  }
  EXPECT_FALSE(w.Newest().decided());
  ExpectAdopted(w.EnterAll(), 1, 2);
}

TEST(ReadsByItself, ARankThatChangesItsMindWhileOthersLoadEndsThatSession) {
  Saved w;
  w.Again(2);
  std::vector<uint64_t> ids;
  for (TestClient& rank : w.ranks) {
    ids.push_back(rank.Send(TestClient::EnterFrame(60'000)));
  }
  const v1::SessionOutcome offered = w.ranks[0].Take(ids[0])->frame.enter_session();
  ASSERT_TRUE(offered.has_source());
  const uint64_t report = w.ranks[0].Send(TestClient::ReportFrame(offered, true, false, 60'000));
  const uint64_t anew = w.ranks[1].Send(Adopt());
  EXPECT_EQ(w.ranks[0].Take(report)->frame.failure().code(), Code(absl::StatusCode::kAborted));
  EXPECT_FALSE(w.ranks[1].Take(anew)) << "it is the first of a new one";
  const uint64_t other = w.ranks[0].Send(Adopt());
  ExpectAdopted({w.ranks[0].Take(other)->frame, w.ranks[1].Take(anew)->frame}, 1, 2);
}

TEST(ReadsByItself, AnExplicitStepAndTheRestorePoint) {
  Saved w;
  w.Again(3);
  ExpectAdopted(w.EnterAll(CheckpointId{0, 1}), 1, 1);
  ASSERT_TRUE(w.Save(5));
  v1::SetRestorePointRequest point;
  point.set_job("job");
  point.set_step(2);
  point.set_attempt(1);
  ASSERT_TRUE(w.h.Admin<v1::SetRestorePointReply>(point).ok());
  w.Again(1);
  ExpectAdopted(w.EnterAll(), 1, 2);
  EXPECT_FALSE(w.h.states.at(w.Uuid().ToBytes()).restore_point().set()) << "cleared with it";
}

TEST(ReadsByItself, FromScratchAndNothingThere) {
  TierWorld w(2);  // whose first session found nothing
  w.Launch();
  w.Join();
  for (TestClient& rank : w.ranks) {
    rank.Send(Adopt());
  }
  ASSERT_TRUE(w.Save(1));
  v1::SetRestorePointRequest scratch;
  scratch.set_job("job");
  scratch.set_from_scratch(true);
  ASSERT_TRUE(w.h.Admin<v1::SetRestorePointReply>(scratch).ok());
  w.Launch();
  w.Join();
  const uint64_t first = w.ranks[0].Send(Adopt());
  const uint64_t second = w.ranks[1].Send(Adopt());
  EXPECT_EQ(w.ranks[0].Take(first)->frame.failure().reason(), Failure::REASON_NOTHING_TO_RESTORE);
  EXPECT_EQ(w.ranks[1].Take(second)->frame.failure().reason(), Failure::REASON_NOTHING_TO_RESTORE);
}

TEST(ReadsByItself, TheDeadlineNamesWhoIsMissingAndTheNextSessionMayBegin) {
  Saved w;
  w.Again(2);
  const uint64_t first = w.ranks[0].Send(Adopt(5'000));
  w.h.Advance(seconds(6));
  const auto answer = w.ranks[0].Take(first);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->frame.failure().code(), Code(absl::StatusCode::kDeadlineExceeded));
  EXPECT_THAT(answer->frame.failure().message(), HasSubstr("rank 1"));
  ExpectAdopted(w.EnterAll(), 1, 2);
}

TEST(ReadsByItself, ARankThatDiesInTheSessionIsWaitedFor) {
  Saved w;
  w.Again(3);
  const uint64_t first = w.ranks[0].Send(Adopt());
  w.ranks[1].Send(Adopt());
  w.h.Kill(w.ranks[1]);
  const uint64_t third = w.ranks[2].Send(Adopt());
  EXPECT_FALSE(w.ranks[0].Take(first));
  TestClient replacement = w.h.Connect(w.next_pid++);
  ASSERT_TRUE(replacement.Join("job", 1, 3));
  const uint64_t second = replacement.Send(Adopt());
  ExpectAdopted({w.ranks[0].Take(first)->frame, replacement.Take(second)->frame,
                 w.ranks[2].Take(third)->frame},
                1, 2);
}

TEST(ReadsByItself, WhoHeardNothingHearsTheDecisionWhenItEntersAgain) {
  Saved w;
  w.Again(3);
  ExpectAdopted(w.EnterAll(), 1, 2);
  w.RestartDaemon();
  std::vector<TestClient> again;
  for (Rank rank = 0; rank < 3; ++rank) {
    TestClient client = w.h.Connect(w.ranks[rank].process().pid);
    const v1::DaemonFrame back =
        client.Call(TestClient::JoinFrame("job", rank, 3, 1000, "", w.Newest().attempt()));
    ASSERT_FALSE(back.has_failure()) << back.ShortDebugString();
    ExpectAdopted({client.Call(Adopt())}, 1, 2);
    again.push_back(client);
  }
  EXPECT_EQ(again[0].Call(Adopt(1000, CheckpointId{0, 1})).failure().code(),
            Code(absl::StatusCode::kFailedPrecondition))
      << "it has decided for another";
  ASSERT_TRUE(again[0].Save(3));
  EXPECT_EQ(again[0].Call(Adopt()).failure().code(), Code(absl::StatusCode::kFailedPrecondition))
      << "it has saved since";
}

TEST(ReadsByItself, ADaemonThatDiesInTheSessionLeavesItUndecided) {
  Saved w;
  w.Again(2);
  w.ranks[0].Send(Adopt());
  const Attempt attempt = w.Newest().attempt();
  w.RestartDaemon();
  EXPECT_FALSE(w.Newest().decided());
  std::vector<uint64_t> ids;
  for (Rank rank = 0; rank < 2; ++rank) {
    w.ranks[rank] = w.h.Connect(w.ranks[rank].process().pid);
    ASSERT_FALSE(
        w.ranks[rank].Call(TestClient::JoinFrame("job", rank, 2, 1000, "", attempt)).has_failure());
  }
  ExpectAdopted(w.EnterAll(), 1, 2);
}

TEST(ReadsByItself, ASupersededAttemptHearsThatItIs) {
  Saved w;
  w.Again(2);
  const uint64_t waiting = w.ranks[0].Send(Adopt());
  TestClient next = w.h.Connect(w.next_pid++);
  const v1::DaemonFrame joined = next.Call(TestClient::JoinFrame("job", 0, 2, 0, "launch-2"));
  ASSERT_FALSE(joined.has_failure()) << joined.ShortDebugString();
  const auto answer = w.ranks[0].Take(waiting);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->frame.failure().reason(), Failure::REASON_SUPERSEDED);
  EXPECT_EQ(w.ranks[1].Reason(Adopt()), Failure::REASON_SUPERSEDED);
}

TEST(ReadsByItself, TiersThatAreStillBeingReadAreWaitedFor) {
  Saved w;
  w.EndAll();
  w.h.late_drives = true;
  w.h.Restart(true);
  w.world = 3;
  w.Launch();
  w.Join();
  ASSERT_TRUE(w.joined) << w.join_failure.message();
  std::vector<uint64_t> ids;
  for (TestClient& rank : w.ranks) {
    ids.push_back(rank.Send(Adopt()));
  }
  EXPECT_FALSE(w.ranks[0].Take(ids[0]));
  w.h.AnswerDrives();
  std::vector<v1::DaemonFrame> frames;
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto answer = w.ranks[i].Take(ids[i]);
    ASSERT_TRUE(answer);
    frames.push_back(answer->frame);
  }
  ExpectAdopted(frames, 1, 2);
}

}  // namespace
}  // namespace holdfast::testing
