// A node that is being drained: nothing new comes there, and what lies there alone gets elsewhere
// (docs/protocol.md §23).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/server/cluster_world.h"

namespace holdfast::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

v1::DrainRequest Drain(const std::string& node, bool undo = false) {
  v1::DrainRequest request;
  request.set_node(node);
  request.set_undo(undo);
  return request;
}

struct Uses {
  uint64_t remote_every = 0;
  uint32_t replicas = 0;
};

class LeavingTest : public ::testing::Test {
 protected:
  explicit LeavingTest(Uses uses = {})
      : w({"a", "b", "c"}, [=](v1::DaemonConfig& config) {
          config.mutable_remote()->set_dir("/remote");
          config.mutable_policy()->mutable_remote()->set_every_steps(uses.remote_every);
          config.mutable_policy()->mutable_remote()->set_every_ms(0);
          config.mutable_policy()->set_replicas(uses.replicas);
        }) {}

  // Ranks 0 and 1, on a and b; step 1 is committed.
  void Begin() {
    r0.emplace(w["a"].Connect(100));
    r1.emplace(w["b"].Connect(100));
    ASSERT_TRUE(r0->Join("job", 0, 2));
    ASSERT_TRUE(r1->Join("job", 1, 2));
    SaveAll(1);
  }
  void SaveAll(Step step) {
    ASSERT_TRUE(r0->Save(step));
    ASSERT_TRUE(r1->Save(step));
    w.Run();
  }
  absl::Status Told(const std::string& asked, const v1::DrainRequest& request, uint32_t uid = 0) {
    const absl::Status status = w[asked].Admin<v1::DrainReply>(request, uid).status();
    w.Advance(seconds(1));
    return status;
  }
  v1::JobStatus Job() { return w[w.HostOf("job")].Status("job"); }
  // Of the one node that is being drained.
  v1::Leaving Left() {
    const v1::JobStatus job = Job();
    EXPECT_EQ(job.leaving_size(), 1);
    return job.leaving_size() == 1 ? job.leaving(0) : v1::Leaving();
  }
  std::set<std::string> NodesWith(Step step, Rank rank) {
    std::set<std::string> nodes;
    for (const char* node : {"a", "b", "c"}) {
      for (const auto& [slot, file] : w[node].files) {
        if (file.record && file.record->id.step == step && file.record->id.rank == rank) {
          nodes.insert(node);
        }
      }
    }
    return nodes;
  }
  bool InRemote(Step step) {
    const std::vector<Step> whole = w.remote().Whole(2);
    return std::find(whole.begin(), whole.end(), step) != whole.end();
  }

  ClusterWorld w;
  std::optional<TestClient> r0;
  std::optional<TestClient> r1;
};

class LeavingWithReplicasTest : public LeavingTest {
 protected:
  LeavingWithReplicasTest() : LeavingTest({.replicas = 1}) {}
};

// It is said what is missing, and nothing that nobody asked for is made.
TEST_F(LeavingTest, AJobThatKeepsNothingElsewhereIsToldHow) {
  Begin();
  ASSERT_TRUE(Told("c", Drain("a")).ok());
  EXPECT_EQ(NodesWith(1, 0), std::set<std::string>{"a"});
  EXPECT_EQ(Left().shards_left(), 1u);
  EXPECT_GT(Left().bytes_left(), 0u);
  EXPECT_THAT(Left().problem(), HasSubstr("ckptctl set job replicas=1"));
  v1::SetOptionsRequest set;
  set.set_job("job");
  v1::SetOptionsRequest::Option& option = *set.add_options();
  option.set_name("replicas");
  option.set_value("1");
  ASSERT_TRUE(w["a"].Admin<v1::SetOptionsReply>(set, 1000).ok());
  w.Advance(seconds(1));
  EXPECT_EQ(Left().shards_left(), 0u) << Left().ShortDebugString();
}

TEST_F(LeavingTest, ItLetsNoRankInButItsOwn) {
  Begin();
  ASSERT_TRUE(Told("a", Drain("")).ok()) << "the one that is asked";
  EXPECT_TRUE(w["a"].Daemon().draining());
  EXPECT_FALSE(w["b"].Daemon().draining());
  TestClient stranger = w["a"].Connect(300);
  const v1::Failure refused = stranger.Call(TestClient::JoinFrame("other", 0, 1)).failure();
  EXPECT_EQ(refused.code(), static_cast<int>(absl::StatusCode::kFailedPrecondition));
  EXPECT_THAT(refused.message(), HasSubstr("ckptctl drain a --undo"));
  w["a"].Close(*r0);
  TestClient again = w["a"].Connect(100);
  EXPECT_TRUE(
      Outcome(again.Call(TestClient::JoinFrame("job", 0, 2, 1000, "", r0->joined().attempt()))));
  ASSERT_TRUE(Told("b", Drain("a", /*undo=*/true)).ok());
  EXPECT_TRUE(stranger.Join("other", 0, 1));
  EXPECT_EQ(Job().leaving_size(), 0);
}

TEST_F(LeavingTest, OnlyRootMayAndOnlyOfANodeThatThereIs) {
  Begin();
  EXPECT_EQ(Told("a", Drain("a"), 1000).code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(Told("a", Drain("b"), 1000).code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(Told("a", Drain("nobody")).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Job().leaving_size(), 0);
}

TEST_F(LeavingWithReplicasTest, WhatCannotGetElsewhereIsSaid) {
  Begin();
  ASSERT_TRUE(Told("a", Drain("c")).ok());
  ASSERT_TRUE(w["a"].Admin<v1::DrainReply>(Drain("b"), 0).ok());
  ASSERT_TRUE(w["a"].Admin<v1::DrainReply>(Drain("a"), 0).ok());
  w.Advance(seconds(1));
  const v1::JobStatus job = Job();
  EXPECT_EQ(job.leaving_size(), 3);
  for (const v1::Leaving& leaving : job.leaving()) {
    EXPECT_GT(leaving.shards_left(), 0u) << "no node stays that could take them";
    EXPECT_THAT(leaving.problem(), HasSubstr("no node that stays"));
  }
}

TEST_F(LeavingTest, AHostThatComesAnewHearsOfIt) {
  Begin();
  ASSERT_TRUE(Told("a", Drain("a")).ok());
  const std::string host = w.HostOf("job");
  if (host != "a") {
    w.DeposeHost("job");
  } else {
    w.Cut("a", "b");
    w.DeposeHost("job");
    w.Heal("a", "b");
  }
  w.Advance(seconds(20));
  EXPECT_EQ(Left().node(), "a");
}

TEST_F(LeavingWithReplicasTest, NothingIsLostWithIt) {
  Begin();
  w.Advance(seconds(1));
  ASSERT_TRUE(Told("b", Drain("a")).ok());
  ASSERT_EQ(Left().shards_left(), 0u);
  EXPECT_EQ(Left().ranks(), 1u);
  EXPECT_EQ(Left().node(), "a");
  w.Kill("a");
  w.Advance(kLease + seconds(2));
  EXPECT_EQ(w[w.HostOf("job")].Committed("job"), std::vector<std::string>{"1:1"});
  EXPECT_EQ(Job().leaving_size(), 0) << "it is gone";
}

TEST_F(LeavingWithReplicasTest, ReplicasThatLieThereAreMadeElsewhere) {
  Begin();
  w.Advance(seconds(1));
  ASSERT_EQ(NodesWith(1, 0).size(), 2u);
  ASSERT_EQ(NodesWith(1, 1).size(), 2u);
  ASSERT_TRUE(Told("a", Drain("c")).ok());
  EXPECT_EQ(NodesWith(1, 0).count("b"), 1u);
  EXPECT_EQ(NodesWith(1, 1).count("a"), 1u);
  EXPECT_EQ(Left().shards_left(), 0u);
  SaveAll(2);
  w.Advance(seconds(1));
  EXPECT_EQ(NodesWith(2, 0), (std::set<std::string>{"a", "b"})) << "nothing new comes to c";
  EXPECT_EQ(NodesWith(2, 1), (std::set<std::string>{"a", "b"}));
}

// What ckptctl goes by: of each job that has something there, somebody must say what would be lost.
TEST_F(LeavingTest, TheNodeSaysWhichJobsHaveSomethingThere) {
  Begin();
  const auto look = [&](const std::string& node) {
    v1::DrainRequest request = Drain(node);
    request.set_look(true);
    return *w[node].Admin<v1::DrainReply>(request, 0);
  };
  EXPECT_FALSE(look("a").draining());
  EXPECT_EQ(Job().leaving_size(), 0) << "looking changes nothing";
  ASSERT_TRUE(Told("c", Drain("a")).ok());
  const v1::DrainReply there = look("a");
  EXPECT_TRUE(there.draining());
  ASSERT_EQ(there.jobs_size(), 1);
  EXPECT_EQ(there.jobs(0).name(), "job");
  EXPECT_EQ(there.jobs(0).uuid(), Job().uuid());
  ASSERT_TRUE(Told("a", Drain("c")).ok());
  EXPECT_EQ(look("c").jobs_size(), 0) << "nothing is there";
  w["a"].Restart();
  w.Advance(seconds(1));
  EXPECT_FALSE(look("a").draining()) << "it forgets";
}

// c has rank 1's shard of step 2, and is away for a moment: what a has of it is needed when c is
// back.
TEST_F(LeavingTest, WhatMayBeTheNewestStepWhenAnotherNodeIsBackIsNotSafe) {
  Begin();
  const std::string host = w.HostOf("job");
  const std::string other = host == "a" ? "b" : "a";  // has a rank, and does not host
  SaveAll(2);
  w.Kill(other);
  w.Advance(kLease + seconds(2));
  ASSERT_TRUE(Told("c", Drain(host)).ok());
  EXPECT_EQ(Left().shards_left(), 0u) << Left().ShortDebugString();
  EXPECT_THAT(Left().not_known(), HasSubstr("step 2 has copies there"));
  EXPECT_THAT(Left().not_known(), HasSubstr("out of reach is " + other));
  w.Start(other);
  w.Advance(seconds(5));
  EXPECT_EQ(Left().not_known(), "");
  EXPECT_EQ(Left().shards_left(), 1u);
}

class LeavingWithRemoteTest : public LeavingTest {
 protected:
  LeavingWithRemoteTest() : LeavingTest({.remote_every = 1000}) {}
};

TEST_F(LeavingWithRemoteTest, ItGoesToRemoteWhenItIsNotDueThere) {
  Begin();
  SaveAll(2);
  ASSERT_TRUE(InRemote(1));
  ASSERT_FALSE(InRemote(2));
  ASSERT_TRUE(Told("c", Drain("a")).ok());
  EXPECT_TRUE(InRemote(2));
  EXPECT_EQ(Left().shards_left(), 0u);
  EXPECT_EQ(NodesWith(2, 0), std::set<std::string>{"a"}) << "no replica besides";
  SaveAll(3);
  EXPECT_TRUE(InRemote(3)) << "as long as ranks run there";
  ASSERT_TRUE(Told("c", Drain("a", true)).ok());
  SaveAll(4);
  EXPECT_FALSE(InRemote(4));
}

// Step 1 is to stay, and of its shards in memory some lie there alone.
TEST_F(LeavingTest, PinnedStepsCountAsTheNewestOneDoes) {
  Begin();
  SaveAll(2);
  v1::PinRequest pin;
  pin.set_job("job");
  pin.set_step(1);
  ASSERT_TRUE(w["a"].Admin<v1::PinReply>(pin, 1000).ok());
  ASSERT_TRUE(Told("c", Drain("a")).ok());
  EXPECT_EQ(Left().step(), 2u);
  ASSERT_EQ(Left().pinned_size(), 1);
  EXPECT_EQ(Left().pinned(0), 1u);
}

TEST_F(LeavingWithRemoteTest, PinnedStepsGoToRemote) {
  Begin();
  SaveAll(2);
  SaveAll(3);
  ASSERT_FALSE(InRemote(2));
  v1::PinRequest pin;
  pin.set_job("job");
  pin.set_step(2);
  ASSERT_TRUE(w["a"].Admin<v1::PinReply>(pin, 1000).ok());
  ASSERT_TRUE(Told("c", Drain("a")).ok());
  EXPECT_TRUE(InRemote(2));
  EXPECT_TRUE(InRemote(3));
  EXPECT_EQ(Left().pinned_size(), 0);
}

}  // namespace
}  // namespace holdfast::testing
