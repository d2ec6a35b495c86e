// Whose scrub reads which copies in the remote tier: each node's those of its ranks, the host's the
// rest (docs/operations.md, "Mend a copy").
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/scrub_part.h"
#include "tests/server/cluster_world.h"

namespace holdfast::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Node c hosts the job; rank 0 is on a, rank 1 on b.
class ClusterScrub : public ::testing::Test {
 protected:
  ClusterScrub()
      : w_({"a", "b", "c"}, [](v1::DaemonConfig& config) {
          config.mutable_remote()->set_dir("/remote");
          config.mutable_policy()->mutable_remote()->set_keep_last(10);
        }) {
    TestClient visitor = w_["c"].Connect(99);
    EXPECT_TRUE(visitor.Join("job", 0, 1));
    EXPECT_EQ(w_.HostOf("job"), "c");
    w_["c"].Kill(visitor);
    w_.Run();
    r0_ = std::make_unique<TestClient>(w_["a"].Connect(100));
    r1_ = std::make_unique<TestClient>(w_["b"].Connect(100));
    EXPECT_TRUE(r0_->Join("job", 0, 2));
    EXPECT_TRUE(r1_->Join("job", 1, 2));
    for (const Step step : {Step{1}, Step{2}}) {
      EXPECT_TRUE(r0_->Save(step));
      EXPECT_TRUE(r1_->Save(step));
      EXPECT_TRUE(r0_->Committed(step));
    }
    w_.Run();
  }

  template <typename Reply, typename Request>
  absl::StatusOr<Reply> Ask(const std::string& node, Request request, uint32_t uid = 0) {
    CoreHarness& h = w_[node];
    const AdminToken token = h.next_token++;
    h.Feed(AdminRequest{token, Caller{{1, 1}, uid, 0}, std::move(request)});
    w_.Run();
    const auto reply = h.admin_replies.find(token);
    if (reply == h.admin_replies.end()) {
      return absl::InternalError("it was not answered");
    }
    if (!reply->second.status.ok()) {
      return reply->second.status;
    }
    return std::get<Reply>(reply->second.reply);
  }
  // Rank, step.
  using Copies = std::vector<std::pair<Rank, Step>>;
  v1::PlanScrubReply Plan(const std::string& node) {
    v1::PlanScrubRequest request;
    request.set_job("job");
    request.set_reader(node);
    const auto reply = Ask<v1::PlanScrubReply>(node, request);
    EXPECT_TRUE(reply.ok()) << reply.status();
    return reply.ok() ? *reply : v1::PlanScrubReply();
  }
  Copies PartOf(const std::string& node) {
    Copies copies;
    const v1::PlanScrubReply plan = Plan(node);
    for (const v1::ScrubCopy& copy : plan.copies()) {
      copies.emplace_back(copy.rank(), copy.step());
    }
    return copies;
  }
  Copies HostsPart() {
    const auto listed = Ask<ListedShards>("c", ListCopies{});
    EXPECT_TRUE(listed.ok()) << listed.status();
    Copies copies;
    for (const ReadableShard& shard : listed.ok() ? listed->shards : ListedShards().shards) {
      if (shard.tier == TierKind::kRemote) {
        copies.emplace_back(shard.copy.id.rank, shard.copy.id.step);
      }
    }
    return copies;
  }
  ShardId Shard(Step step, Rank rank) {
    const auto uuid = JobUuid::FromBytes(Plan("c").job_uuid());
    EXPECT_TRUE(uuid.ok());
    return {uuid.ok() ? *uuid : JobUuid(), 2, step, rank};
  }

  ClusterWorld w_;
  std::unique_ptr<TestClient> r0_;
  std::unique_ptr<TestClient> r1_;
};

TEST_F(ClusterScrub, WhoTakesPartReadsItsRanksCopiesAndTheHostTheRest) {
  EXPECT_THAT(HostsPart(),
              ElementsAre(std::pair(0, 1), std::pair(1, 1), std::pair(0, 2), std::pair(1, 2)));
  EXPECT_THAT(PartOf("a"), ElementsAre(std::pair(0, 1), std::pair(0, 2)));
  EXPECT_THAT(HostsPart(), ElementsAre(std::pair(1, 1), std::pair(1, 2)));
  EXPECT_THAT(PartOf("b"), ElementsAre(std::pair(1, 1), std::pair(1, 2)));
  EXPECT_THAT(HostsPart(), IsEmpty());
}

TEST_F(ClusterScrub, ANodeIsToldWhichJobsToAskOthersFor) {
  const auto at_a = Ask<ListedShards>("a", ListCopies{});
  const auto at_c = Ask<ListedShards>("c", ListCopies{});
  ASSERT_TRUE(at_a.ok() && at_c.ok());
  EXPECT_THAT(at_a->hosted_elsewhere, ElementsAre("job"));
  EXPECT_THAT(at_c->hosted_elsewhere, IsEmpty());
}

TEST_F(ClusterScrub, TheHostReadsForWhoAsksNoMore) {
  PartOf("a");
  PartOf("b");
  w_.Advance(std::chrono::minutes(90));
  PartOf("b");
  EXPECT_THAT(HostsPart(), IsEmpty());
  w_.Advance(std::chrono::minutes(45));
  EXPECT_THAT(HostsPart(), ElementsAre(std::pair(0, 1), std::pair(0, 2)));
  PartOf("a");
  EXPECT_THAT(HostsPart(), IsEmpty());
}

TEST_F(ClusterScrub, TheHostReadsForWhoIsGone) {
  PartOf("a");
  PartOf("b");
  w_.Kill("a");
  w_.Advance(std::chrono::minutes(1));
  EXPECT_THAT(HostsPart(), ElementsAre(std::pair(0, 1), std::pair(0, 2)));
}

// A rank that moves takes with it when its copies were read.
TEST_F(ClusterScrub, WhoReadsACopyNextIsToldWhenItWasReadLast) {
  v1::PlanScrubReply plan = Plan("a");
  ASSERT_EQ(plan.copies_size(), 2);
  const int64_t known = plan.copies(0).known_unix_ms();
  EXPECT_EQ(known, w_["c"].unix_ms());
  EXPECT_EQ(plan.copies(0).read_unix_ms(), 0);
  w_.Advance(std::chrono::minutes(10));
  w_["a"].Feed(DurableCopyJudged{TierKind::kRemote, Shard(1, 0), "", false});
  w_.Run();
  const int64_t read = w_["c"].unix_ms();
  w_.Advance(std::chrono::minutes(10));
  plan = Plan("a");
  EXPECT_EQ(plan.copies(0).known_unix_ms(), known);
  EXPECT_EQ(plan.copies(0).read_unix_ms(), read);
  EXPECT_EQ(plan.copies(1).read_unix_ms(), 0);
  const ReadableShard shard = InRemote("job", Shard(1, 0).job, plan.copies(0));
  EXPECT_EQ(shard.copy.id, Shard(1, 0));
  EXPECT_EQ(shard.tier, TierKind::kRemote);
  EXPECT_EQ(shard.read_unix_ms, read);
  EXPECT_EQ(shard.known_unix_ms, known);
}

TEST_F(ClusterScrub, WhatItFindsBadThereIsMended) {
  const ShardId shard = Shard(1, 0);
  w_.remote().damaged.insert(shard);
  w_["a"].Feed(DurableCopyJudged{TierKind::kRemote, shard, "a block differs", false});
  w_.Run();
  EXPECT_THAT(w_.remote().damaged, IsEmpty());
  EXPECT_EQ(w_["c"].CountReports(Report::Kind::kCopyBad), 1u);
  EXPECT_EQ(w_["c"].CountReports(Report::Kind::kCopyMended), 1u);
}

// Read meanwhile by whoever: is it still there?
TEST_F(ClusterScrub, ACopyThatIsNamedIsToldOfAloneAndOnlyIfItIsThere) {
  v1::PlanScrubRequest request;
  request.set_job("job");
  request.set_reader("a");
  request.mutable_only()->set_attempt(2);
  request.mutable_only()->set_step(2);
  request.mutable_only()->set_rank(1);
  auto reply = Ask<v1::PlanScrubReply>("a", request);
  ASSERT_TRUE(reply.ok());
  ASSERT_EQ(reply->copies_size(), 1);
  EXPECT_EQ(reply->copies(0).rank(), 1u);
  EXPECT_THAT(HostsPart(), ::testing::SizeIs(4)) << "who asks for one does not take part";
  for (const auto& [step, rank] : {std::pair(3, 1), std::pair(2, 7)}) {
    request.mutable_only()->set_step(static_cast<uint64_t>(step));
    request.mutable_only()->set_rank(static_cast<uint32_t>(rank));
    reply = Ask<v1::PlanScrubReply>("a", request);
    ASSERT_TRUE(reply.ok());
    EXPECT_EQ(reply->copies_size(), 0);
  }
}

TEST_F(ClusterScrub, StrangersAreToldNothing) {
  v1::PlanScrubRequest request;
  request.set_job("job");
  request.set_reader("a");
  EXPECT_TRUE(absl::IsNotFound(Ask<v1::PlanScrubReply>("a", request, 4711).status()));
  request.set_reader("nobody");
  EXPECT_TRUE(absl::IsNotFound(Ask<v1::PlanScrubReply>("a", request).status()));
  request.set_reader("a");
  request.set_job("other");
  EXPECT_TRUE(absl::IsNotFound(Ask<v1::PlanScrubReply>("a", request).status()));
}

}  // namespace
}  // namespace holdfast::testing
