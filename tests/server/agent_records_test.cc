// The records of a step, which are gathered once for all who ask on a node
// (server/agent_records.cc).
#include <gmock/gmock.h>

#include "tests/server/agent_world.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

class AgentRecordsTest : public AgentClusterTest {
 protected:
  void Ready() {
    started_.jobs.push_back(State(x_, "job", 1));
    Start();
    Meet(Host(x_));
    Said(x_);
  }
  void AskFor(ConnectionId connection, Step step, uint64_t deadline_ms = 10'000) {
    v1::ClientFrame frame;
    v1::ReadRecords& read = *frame.mutable_read_records();
    read.set_job("job");
    read.set_attempt(1);
    read.set_step(step);
    read.set_deadline_ms(deadline_ms);
    Ask(connection, frame);
  }
  // Ranks 0 and 1 with n1, 2 nowhere, 3 in remote, which n2 reads.
  std::vector<GatherRecords> Locate() {
    for (const RecordsAsked& asked : Only<RecordsAsked>(Said(x_))) {
      RecordsLocated located{asked.token, asked.checkpoint, 4, {{"n1", false}, {"n2", true}}, {}};
      located.runs = {{0, 2}, {2, 1}, {1, 1}};
      Tell(x_, located);
    }
    return Take<GatherRecords>();
  }
  v1::Failure Failed() {
    const auto replies = Take<SendReply>();
    EXPECT_EQ(replies.size(), 1u);
    return replies.empty() ? v1::Failure() : replies[0].frame.failure();
  }
  static int Code(absl::StatusCode code) { return static_cast<int>(code); }
};

TEST_F(AgentRecordsTest, AreGatheredOnceForAllWhoAskMeanwhile) {
  Ready();
  const ConnectionId first = Connect(100);
  const ConnectionId second = Connect(101);
  AskFor(first, 9);
  const auto gathers = Locate();
  ASSERT_EQ(gathers.size(), 1u);
  EXPECT_EQ(gathers[0].job_name, "job");
  EXPECT_EQ(gathers[0].checkpoint, (CheckpointId{1, 9}));
  EXPECT_EQ(gathers[0].world_size, 4u);
  ASSERT_EQ(gathers[0].holders.size(), 2u);
  using Runs = std::vector<std::pair<Rank, uint32_t>>;
  EXPECT_EQ(gathers[0].holders[0].ranks, (Runs{{0, 2}}));
  EXPECT_FALSE(gathers[0].holders[0].remote);
  EXPECT_EQ(gathers[0].holders[1].ranks, (Runs{{3, 1}}));
  EXPECT_TRUE(gathers[0].holders[1].remote);
  AskFor(second, 9);
  EXPECT_TRUE(Locate().empty()) << "it is under way";
  Feed(RecordsGathered{gathers[0].gather, absl::OkStatus(), 1000, nullptr});
  const auto replies = Take<SendReply>();
  ASSERT_EQ(replies.size(), 2u);
  for (const SendReply& reply : replies) {
    EXPECT_EQ(reply.frame.read_records().bytes(), 1000u);
    EXPECT_EQ(reply.frame.read_records().world_size(), 4u);
    EXPECT_EQ(reply.descriptors, Descriptors::kOpenedCopy);
  }
  AskFor(second, 9);
  EXPECT_EQ(Locate().size(), 1u) << "nothing is kept";
}

TEST_F(AgentRecordsTest, StepsAreGatheredEachForItself) {
  Ready();
  AskFor(Connect(100), 9);
  AskFor(Connect(101), 8);
  EXPECT_EQ(Locate().size(), 2u);
}

TEST_F(AgentRecordsTest, WhoIsGoneOrTooLateIsNotAnswered) {
  Ready();
  const ConnectionId gone = Connect(100);
  AskFor(gone, 9);
  AskFor(Connect(101), 9, 500);
  const auto gathers = Locate();
  ASSERT_EQ(gathers.size(), 1u);
  Feed(ConnectionClosed{gone});
  now_.ns += 501'000'000;
  Feed(TimerFired{});
  EXPECT_EQ(Failed().code(), Code(absl::StatusCode::kDeadlineExceeded));
  Feed(RecordsGathered{gathers[0].gather, absl::OkStatus(), 1000, nullptr});
  EXPECT_TRUE(Take<SendReply>().empty());
}

TEST_F(AgentRecordsTest, WhereNoneIsToBeHadThatIsSaid) {
  Ready();
  AskFor(Connect(100), 9);
  const auto gathers = Locate();
  ASSERT_EQ(gathers.size(), 1u);
  Feed(RecordsGathered{gathers[0].gather, absl::NotFoundError("nowhere"), 0, nullptr});
  const v1::Failure failed = Failed();
  EXPECT_EQ(failed.code(), Code(absl::StatusCode::kUnavailable));
  EXPECT_THAT(failed.message(), HasSubstr("nowhere"));
}

TEST_F(AgentRecordsTest, OthersJobsAreNotToldOf) {
  Ready();
  Feed(ConnectionOpened{77, {{200, 1}, kUser + 1, kUser + 1}});
  AskFor(77, 9);
  EXPECT_EQ(Failed().code(), Code(absl::StatusCode::kNotFound));
  EXPECT_TRUE(Said(x_).empty());
}

}  // namespace
}  // namespace holdfast
