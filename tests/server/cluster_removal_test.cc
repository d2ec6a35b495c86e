// A whole job is removed from all nodes of a cluster (docs/protocol.md §18), and names that nobody
// keeps anything of.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/server/cluster_world.h"

namespace holdfast::testing {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

void WithTiers(v1::DaemonConfig& config) {
  config.mutable_remote()->set_dir("/remote");
  config.mutable_nvme()->add_dirs("/nvme");
  config.mutable_policy()->mutable_nvme()->set_every_steps(1);
  config.mutable_policy()->mutable_remote()->set_every_steps(1);
}

class ClusterRemovalTest : public ::testing::Test {
 protected:
  ClusterRemovalTest() : w({"a", "b", "c"}, WithTiers) {}

  // Step 10 of ranks 0 on a and 1 on b, everywhere; hosted by c.
  std::pair<TestClient, TestClient> RanksThatSavedTen() {
    TestClient visitor = w["c"].Connect(99);
    EXPECT_TRUE(visitor.Join("job", 0, 1));
    w["c"].Kill(visitor);
    w.Run();
    TestClient r0 = w["a"].Connect(100);
    TestClient r1 = w["b"].Connect(100);
    EXPECT_TRUE(r0.Join("job", 0, 2));
    EXPECT_TRUE(r1.Join("job", 1, 2));
    EXPECT_TRUE(r0.Save(10));
    EXPECT_TRUE(r1.Save(10));
    EXPECT_TRUE(r0.Committed(10));
    EXPECT_EQ(w["a"].nvme.copies.size(), 1u);
    EXPECT_EQ(w.remote().Whole(2), std::vector<Step>{10});
    EXPECT_EQ(w.HostOf("job"), "c");
    return {r0, r1};
  }
  // And the ranks have ended.
  void SaveTen() {
    auto [r0, r1] = RanksThatSavedTen();
    w["a"].Kill(r0);
    w["b"].Kill(r1);
    w.Run();
    ASSERT_EQ(w.HostOf("job"), "c");
  }
  absl::StatusOr<v1::RemoveJobReply> Remove(const std::string& node, uint32_t uid = 1000) {
    v1::RemoveJobRequest request;
    request.set_job("job");
    return w[node].Admin<v1::RemoveJobReply>(request, uid);
  }
  // What lies there of it.
  std::vector<std::string> LeftAt(const std::string& node) {
    std::vector<std::string> left;
    for (const auto& [id, file] : w[node].files) {
      if (file.record) {
        left.push_back("memory");
      }
    }
    left.insert(left.end(), w[node].nvme.copies.size(), "nvme");
    left.insert(left.end(), w[node].states.size(), "state");
    return left;
  }
  void ExpectNothingLeft(const std::vector<std::string>& nodes) {
    for (const std::string& node : nodes) {
      EXPECT_THAT(LeftAt(node), IsEmpty()) << node;
    }
    EXPECT_TRUE(w.remote().copies.empty());
    EXPECT_TRUE(w.remote().jobs.empty());
  }
  // The name is free: another user's job begins with its first attempt.
  void ExpectFree() {
    TestClient theirs = w["b"].Connect(200, 2000);
    ASSERT_TRUE(theirs.Join("job", 0, 1));
    EXPECT_EQ(theirs.joined().attempt(), 1u);
    ASSERT_TRUE(theirs.Save(1));
    EXPECT_TRUE(theirs.Committed(1));
    EXPECT_EQ(w.remote().Whole(1), std::vector<Step>{1});
  }

  ClusterWorld w;
};

TEST_F(ClusterRemovalTest, AllNodesLetGoWhicheverIsAsked) {
  for (const char* node : {"a", "b", "c"}) {
    SaveTen();
    const auto removed = Remove(node);
    ASSERT_TRUE(removed.ok()) << node << ": " << removed.status();
    // Two ranks' slots, and their images of half a slot, on drives and in the remote tier.
    EXPECT_EQ(removed->bytes_freed(), 4 * kSlot);
    EXPECT_EQ(removed->nodes_away_size(), 0);
    ExpectNothingLeft({"a", "b", "c"});
    EXPECT_TRUE(w.AgreedState("job").removed());
    EXPECT_EQ(w.HostOf("job"), "");
    EXPECT_EQ(Remove(node).status().code(), absl::StatusCode::kNotFound);
  }
  ExpectFree();
}

TEST_F(ClusterRemovalTest, RefusedWhileARankOfAnyNodeLives) {
  SaveTen();
  TestClient rank = w["a"].Connect(101);
  ASSERT_TRUE(rank.Join("job", 0, 1));
  EXPECT_THAT(std::string(Remove("b").status().message()), HasSubstr("in use by pid 101 on a"));
  EXPECT_EQ(Remove("b", 2000).status().code(), absl::StatusCode::kNotFound);  // another user's
  w["a"].Kill(rank);
  w.Run();
  EXPECT_TRUE(Remove("b").ok());
}

// Its new host has not heard of all nodes where ranks may live.
TEST_F(ClusterRemovalTest, RefusedWhileANodeThatMayHaveRanksIsSilent) {
  ClusterWorld four({"a", "b", "c", "d"}, WithTiers);
  TestClient visitor = four["c"].Connect(99);
  ASSERT_TRUE(visitor.Join("job", 0, 1));
  four["c"].Kill(visitor);
  four.Run();
  TestClient r0 = four["a"].Connect(100);
  TestClient r1 = four["b"].Connect(101);
  ASSERT_TRUE(r0.Join("job", 0, 2));
  ASSERT_TRUE(r1.Join("job", 1, 2));
  ASSERT_EQ(four.HostOf("job"), "c");
  four.DelayNews("b");  // another one is elected
  for (const char* other : {"a", "c", "d"}) {
    four.Cut("b", other);
  }
  four["a"].Kill(r0);
  four.Kill("c");
  four.Advance(2 * kLease);
  ASSERT_EQ(four.HostOf("job"), "a");
  v1::RemoveJobRequest request;
  request.set_job("job");
  const auto refused = four["a"].Admin<v1::RemoveJobReply>(request, 1000);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kUnavailable) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("may live on b"));
  EXPECT_FALSE(four.AgreedState("job").removed());
  four.Heal("a", "b");
  four.Advance(seconds(1));
  EXPECT_THAT(std::string(four["a"].Admin<v1::RemoveJobReply>(request, 1000).status().message()),
              HasSubstr("in use by pid 101 on b"));
}

// Its node was taken to be gone: it may seal nothing any more, or the removal would never end.
TEST_F(ClusterRemovalTest, ARankThatLivesOnThroughItSavesNothingMore) {
  auto [r0, r1] = RanksThatSavedTen();
  w.CutFromMembership("b");
  w.Cut("b", "a");
  w.Cut("b", "c");
  w["a"].Kill(r0);
  w.Advance(2 * kLease);
  const auto removed = Remove("a");
  ASSERT_TRUE(removed.ok()) << removed.status();
  EXPECT_THAT(removed->nodes_away(), ElementsAre("b"));
  w.HealMembership("b");
  w.Heal("b", "a");
  w.Heal("b", "c");
  w.Advance(seconds(30));
  EXPECT_FALSE(r1.Save(12));
  w["b"].Kill(r1);
  w.Advance(seconds(30));
  ExpectNothingLeft({"a", "b", "c"});
  ExpectFree();
}

// Whoever asked hears what it waits for.
TEST_F(ClusterRemovalTest, AReaderOnAnotherNodeIsNamed) {
  SaveTen();
  TestClient reader = w["b"].Connect(102);
  v1::ClientFrame attach;
  attach.mutable_attach()->set_job("job");
  attach.mutable_attach()->set_rank(1);
  attach.mutable_attach()->set_any_tier(true);
  attach.mutable_attach()->set_hold(1);
  attach.mutable_attach()->set_deadline_ms(60'000);
  const v1::DaemonFrame held = reader.Call(attach);
  ASSERT_EQ(held.attach().tier(), "memory") << held.ShortDebugString();
  EXPECT_THAT(std::string(Remove("a").status().message()), HasSubstr("pid 102"));
  w["b"].Kill(reader);
  w.Advance(seconds(30));
  ExpectNothingLeft({"a", "b", "c"});
}

TEST_F(ClusterRemovalTest, ThatANodeHasLetGoIsSaidAgainWhenItWasLost) {
  SaveTen();
  w.LoseMessages("b", "c");
  EXPECT_FALSE(Remove("a").ok());  // not answered
  EXPECT_THAT(LeftAt("b"), IsEmpty());
  EXPECT_FALSE(w.remote().copies.empty());
  w.Reopen("b", "c");
  ExpectNothingLeft({"a", "b", "c"});
}

TEST_F(ClusterRemovalTest, ANodeThatWasAwayLetsGoWhenItIsBack) {
  SaveTen();
  w.Kill("b");
  w.Advance(2 * kLease);
  const auto removed = Remove("a");
  ASSERT_TRUE(removed.ok()) << removed.status();
  EXPECT_THAT(removed->nodes_away(), ElementsAre("b"));
  ExpectNothingLeft({"a", "c"});
  EXPECT_THAT(LeftAt("b"), ElementsAre("memory", "nvme", "state"));
  w.Start("b");
  w.Advance(seconds(30));
  ExpectNothingLeft({"a", "b", "c"});
  EXPECT_EQ(w.HostOf("job"), "");
  ExpectFree();
}

TEST_F(ClusterRemovalTest, ANodeThatGoesMeanwhileIsNamedToo) {
  SaveTen();
  w.CutFromMembership("b");
  w.Cut("b", "a");
  w.Cut("b", "c");
  v1::RemoveJobRequest request;
  request.set_job("job");
  const AdminToken token = w["a"].next_token++;
  w["a"].Feed(AdminRequest{token, Caller{}, request});
  w.RunSoon();
  ASSERT_EQ(w["a"].admin_replies.count(token), 0u) << "it waits for b";
  w.Advance(2 * kLease);
  ASSERT_EQ(w["a"].admin_replies.count(token), 1u);
  const AdminReply& reply = w["a"].admin_replies.at(token);
  ASSERT_TRUE(reply.status.ok()) << reply.status;
  EXPECT_THAT(std::get<v1::RemoveJobReply>(reply.reply).nodes_away(), ElementsAre("b"));
}

TEST_F(ClusterRemovalTest, AlsoWhenTheNameIsAnotherJobsSince) {
  SaveTen();
  w.Kill("b");
  w.Advance(2 * kLease);
  ASSERT_TRUE(Remove("a").ok());
  TestClient theirs = w["a"].Connect(200, 2000);
  ASSERT_TRUE(theirs.Join("job", 0, 1));
  ASSERT_TRUE(theirs.Save(1));
  const std::string uuid = theirs.joined().job_uuid();
  w.Start("b");
  w.Advance(seconds(30));
  EXPECT_TRUE(w["b"].nvme.copies.empty());
  for (const auto& [id, file] : w["b"].files) {
    EXPECT_FALSE(file.record) << "in memory";
  }
  ASSERT_TRUE(theirs.Save(2));
  EXPECT_TRUE(theirs.Committed(2));
  // The next host of the name knows it, too.
  const std::string host = w.HostOf("job");
  ASSERT_NE(host, "");
  EXPECT_EQ(w.AgreedState("job").removed_before_size(), 1);
  EXPECT_EQ(w.AgreedState("job").job_uuid(), uuid);
}

// The copies of a removed job come into sight when its name is another's: a drive that was away.
TEST_F(ClusterRemovalTest, WhatIsFoundLaterGoesToo) {
  SaveTen();
  w["b"].failing_drive = "/nvme";
  w.Kill("b");
  w.Start("b");
  w.Advance(seconds(1));
  ASSERT_TRUE(Remove("a").ok());
  TestClient theirs = w["a"].Connect(200, 2000);
  ASSERT_TRUE(theirs.Join("job", 0, 1));
  ASSERT_TRUE(theirs.Save(1));
  w["b"].failing_drive.clear();
  w.Advance(seconds(120));
  for (const auto& [id, copy] : w["b"].nvme.copies) {
    EXPECT_EQ(id.job.ToBytes(), theirs.joined().job_uuid());
  }
}

TEST_F(ClusterRemovalTest, ANodeThatCannotBeReachedIsWaitedFor) {
  SaveTen();
  w.Cut("c", "b");
  EXPECT_THAT(std::string(Remove("c").status().message()), HasSubstr("not answered yet"));
  EXPECT_FALSE(w.remote().copies.empty());  // b may still be writing there
  w.Heal("c", "b");
  w.Advance(seconds(1));
  ExpectNothingLeft({"a", "b", "c"});
  EXPECT_EQ(w.HostOf("job"), "");
}

// Who joins meanwhile waits for the end of it, and gets another job.
TEST_F(ClusterRemovalTest, WhoJoinsMeanwhileGetsAnotherJob) {
  SaveTen();
  w.Cut("c", "b");
  EXPECT_FALSE(Remove("c").ok());
  TestClient other = w["a"].Connect(300);
  const uint64_t asked = other.Send(TestClient::JoinFrame("job", 0, 1, 60'000));
  w.Advance(seconds(2));
  EXPECT_FALSE(other.Take(asked));
  w.Heal("c", "b");
  w.Advance(seconds(5));
  const std::optional<Answer> joined = other.Take(asked);
  ASSERT_TRUE(joined);
  EXPECT_EQ(joined->frame.join().attempt(), 1u) << joined->frame.ShortDebugString();
  ASSERT_EQ(w.remote().copies.size(), 0u);
  EXPECT_TRUE(w["b"].nvme.copies.empty());
}

// What has begun another host ends.
TEST_F(ClusterRemovalTest, TheHostDiesInTheMiddleOfIt) {
  SaveTen();
  w.Cut("c", "b");
  EXPECT_FALSE(Remove("c").ok());
  w.Kill("c");
  w.Advance(2 * kLease);
  w.Start("c");
  w.Heal("c", "b");
  w.Advance(seconds(60));
  ExpectNothingLeft({"a", "b", "c"});
  EXPECT_EQ(w.HostOf("job"), "");
  ExpectFree();
}

TEST_F(ClusterRemovalTest, WhatCannotBeRemovedIsTriedAgainAndSaid) {
  SaveTen();
  bool broken = true;
  const auto fail = [&broken](const Action& action) {
    return broken && std::holds_alternative<RemoveJobCopies>(action)
               ? absl::InternalError("the drive is read-only")
               : absl::OkStatus();
  };
  w["b"].fail = fail;
  EXPECT_THAT(std::string(Remove("a").status().message()),
              AllOf(HasSubstr("b: not all copies of the job could be removed"),
                    HasSubstr("read-only"), HasSubstr("tried again")));
  EXPECT_FALSE(w["b"].nvme.copies.empty());
  broken = false;
  w.Advance(seconds(120));
  ExpectNothingLeft({"a", "b", "c"});
  // Likewise at the host, in the remote tier.
  SaveTen();
  w["b"].fail = nullptr;
  w["c"].fail = fail;
  broken = true;
  EXPECT_THAT(std::string(Remove("a").status().message()), HasSubstr("tried again"));
  broken = false;
  EXPECT_TRUE(Remove("b").ok());  // asked again, it does not wait
  ExpectNothingLeft({"a", "b", "c"});
}

// A node that nobody could tell was about to write there: its flush made the directory again.
class LateFlushTest : public ClusterRemovalTest {
 protected:
  void SetUp() override {
    SaveTen();
    late_ = *w.remote().copies.begin();
    ASSERT_TRUE(Remove("c").ok());
    ExpectNothingLeft({"a", "b", "c"});
  }
  // The next job has been opened since.
  void FlushLate() {
    const JobUuid removed = late_.first.job;
    w.remote().jobs[removed] = {"job", 1000, 1000};
    w.remote().copies.insert(late_);
    // As the directory: it is one job's.
    for (const char* node : {"a", "b", "c"}) {
      w[node].fail = [this, removed](const Action& action) {
        const auto* flush = std::get_if<FlushShard>(&action);
        const bool theirs = flush != nullptr && flush->to == TierKind::kRemote &&
                            flush->key.id.job != removed && w.remote().jobs.count(removed) > 0;
        return theirs ? absl::FailedPreconditionError("it belongs to another run")
                      : absl::OkStatus();
      };
    }
  }
  std::pair<ShardId, DurableCopy> late_;
};

TEST_F(LateFlushTest, WhatItMadeIsRemovedWhenTheNextJobMeetsIt) {
  TestClient theirs = w["b"].Connect(200, 2000);
  ASSERT_TRUE(theirs.Join("job", 0, 1));
  FlushLate();
  ASSERT_TRUE(theirs.Save(1));
  EXPECT_TRUE(theirs.Committed(1));
  w.Advance(seconds(120));
  EXPECT_EQ(w.remote().jobs.count(late_.first.job), 0u);
  EXPECT_EQ(w.remote().Whole(1), std::vector<Step>{1});
}

TEST_F(LateFlushTest, OrIsRemovedItself) {
  TestClient theirs = w["b"].Connect(200, 1000);
  ASSERT_TRUE(theirs.Join("job", 0, 1));
  FlushLate();
  w["b"].Kill(theirs);
  w.Run();
  ASSERT_TRUE(Remove("a").ok());
  w.Advance(seconds(1));
  ExpectNothingLeft({"a", "b", "c"});
}

// Nobody lets go before all have agreed on it.
TEST_F(ClusterRemovalTest, NothingGoesBeforeItIsAgreedOn) {
  SaveTen();
  w.CutFromMembership("c");
  EXPECT_FALSE(Remove("c").ok());
  EXPECT_THAT(LeftAt("a"), ElementsAre("memory", "nvme", "state"));
  EXPECT_FALSE(w.remote().copies.empty());
  w.HealMembership("c");
  w.Advance(seconds(5));
  ExpectNothingLeft({"a", "b", "c"});
}

// Nobody has to host a name for ever because somebody once asked for it.
TEST_F(ClusterRemovalTest, ANameThatNobodyHasIsHostedByNobody) {
  v1::ClientFrame list;
  list.mutable_list()->set_job("none");
  list.mutable_list()->set_deadline_ms(30'000);
  for (const char* node : {"a", "b", "c"}) {
    TestClient reader = w[node].Connect(500);
    EXPECT_EQ(reader.Reason(list), v1::Failure::REASON_NOTHING_TO_RESTORE);
    w.Advance(seconds(2));
    EXPECT_EQ(w.HostOf("none"), "");
    const Epoch epoch = w.EpochOf("none");
    w.Advance(seconds(30));
    EXPECT_EQ(w.EpochOf("none"), epoch) << "nobody campaigns for it";
  }
}

}  // namespace
}  // namespace holdfast::testing
