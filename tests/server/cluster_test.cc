// Jobs over several nodes: from clients to a coordinator elsewhere and back, on the real control
// logic of each node (docs/protocol.md §13, §16).
#include <gtest/gtest.h>

#include "server/router.h"
#include "tests/server/cluster_world.h"

namespace holdfast::testing {
namespace {

using std::chrono::seconds;

void WithRemote(v1::DaemonConfig& config) {
  config.mutable_remote()->set_dir("/remote");
}

class ClusterTest : public ::testing::Test {
 protected:
  explicit ClusterTest(std::function<void(v1::DaemonConfig&)> adjust = WithRemote)
      : w({"a", "b", "c"}, std::move(adjust)) {}

  // A node without ranks of the job hosts it.
  void HostOnC() {
    TestClient visitor = w["c"].Connect(99);
    ASSERT_TRUE(visitor.Join("job", 0, 1));
    w["c"].Kill(visitor);
    w.Run();
  }
  // Ranks 0 and 1 of the job, on a and b.
  std::pair<TestClient, TestClient> TwoRanks() {
    TestClient r0 = w["a"].Connect(100);
    TestClient r1 = w["b"].Connect(100);
    EXPECT_TRUE(r0.Join("job", 0, 2));
    EXPECT_TRUE(r1.Join("job", 1, 2));
    return {r0, r1};
  }
  // Enters the session, and loads what it is offered.
  ::testing::AssertionResult Restore(std::vector<TestClient*> ranks, Step step) {
    std::vector<uint64_t> asked;
    for (TestClient* rank : ranks) {
      asked.push_back(rank->Send(TestClient::EnterFrame(60'000)));
    }
    for (size_t i = 0; i < ranks.size(); ++i) {
      const std::optional<Answer> offered = ranks[i]->Take(asked[i]);
      if (!offered || offered->frame.has_failure()) {
        return ::testing::AssertionFailure()
               << "rank " << i << ": "
               << (offered ? offered->frame.ShortDebugString() : "not answered");
      }
      if (offered->frame.enter_session().step() != step) {
        return ::testing::AssertionFailure() << offered->frame.ShortDebugString();
      }
      asked[i] = ranks[i]->Send(
          TestClient::ReportFrame(offered->frame.enter_session(), true, false, 60'000));
    }
    for (size_t i = 0; i < ranks.size(); ++i) {
      const std::optional<Answer> done = ranks[i]->Take(asked[i]);
      if (!done || !done->frame.enter_session().done()) {
        return ::testing::AssertionFailure()
               << "rank " << i << ": " << (done ? done->frame.ShortDebugString() : "not answered");
      }
    }
    return ::testing::AssertionSuccess();
  }

  ClusterWorld w;
};

TEST_F(ClusterTest, RanksOnTwoNodesCommitTogether) {
  auto [r0, r1] = TwoRanks();
  EXPECT_EQ(r0.joined().job_uuid(), r1.joined().job_uuid());
  ASSERT_TRUE(r0.Save(10));
  EXPECT_FALSE(r0.Committed(10));
  ASSERT_TRUE(r1.Save(10));
  EXPECT_TRUE(r0.Committed(10));
  EXPECT_TRUE(r1.Committed(10));
  EXPECT_EQ(w[w.HostOf("job")].Committed("job"), std::vector<std::string>{"1:10"});
  EXPECT_EQ(w.remote().Whole(2), std::vector<Step>{10});
}

// Whoever hosts the job.
TEST_F(ClusterTest, EachNodeReportsWhatItsOwnRanksSealed) {
  HostOnC();
  auto [r0, r1] = TwoRanks();
  ASSERT_TRUE(r0.Save(10));
  ASSERT_TRUE(r1.Save(10));
  ASSERT_TRUE(r1.Committed(10));
  EXPECT_EQ(w["a"].CountReports(Report::Kind::kShardSealed), 1u);
  EXPECT_EQ(w["b"].CountReports(Report::Kind::kShardSealed), 1u);
  EXPECT_EQ(w["c"].CountReports(Report::Kind::kShardSealed), 0u);
}

// Each node has its new rank's copy of the newest step, which stays, and its old rank's.
TEST_F(ClusterTest, RanksThatChangedPlacesFindRoom) {
  for (const char* node : {"a", "b"}) {
    w[node].bytes_max = 2 * kSlot;
    w.Kill(node);
    w.Start(node);
  }
  w.Advance(seconds(2));
  HostOnC();
  auto [r0, r1] = TwoRanks();
  for (const Step step : {10, 20}) {
    ASSERT_TRUE(r0.Save(step));
    ASSERT_TRUE(r1.Save(step));
    ASSERT_TRUE(r0.Committed(step));
  }
  w["a"].Kill(r0);
  w["b"].Kill(r1);
  w.Run();
  TestClient b0 = w["b"].Connect(200);
  TestClient a1 = w["a"].Connect(200);
  ASSERT_TRUE(b0.Join("job", 0, 2));
  ASSERT_TRUE(a1.Join("job", 1, 2));
  ASSERT_TRUE(Restore({&b0, &a1}, 20));
  ASSERT_TRUE(b0.Save(30));
  ASSERT_TRUE(a1.Save(30));
  EXPECT_TRUE(b0.Committed(30));
}

// What its ranks do at about the same time a node says at once: of a step that is what they begin,
// and one message of what they sealed.
TEST(OneNodesRanksTest, WhatTheySealTogetherIsOneMessage) {
  ClusterWorld w({"a", "c"});
  TestClient visitor = w["c"].Connect(99);
  ASSERT_TRUE(visitor.Join("job", 0, 1));
  w["c"].Kill(visitor);
  w.Run();
  std::vector<TestClient> ranks;
  for (Rank rank = 0; rank < 8; ++rank) {
    ranks.push_back(w["a"].Connect(100 + rank));
    ASSERT_TRUE(ranks.back().Join("job", rank, 8));
  }
  for (TestClient& rank : ranks) {
    ASSERT_TRUE(rank.Save(10));
  }
  ASSERT_TRUE(ranks[0].Committed(10));
  w.Advance(seconds(1));

  w["a"].after_request = [&w] { w.Run(); };  // no time passes
  const uint64_t before = w.Said("a", "c");
  for (TestClient& rank : ranks) {
    ASSERT_TRUE(rank.Begin(20));
  }
  const uint64_t begun = w.Said("a", "c");
  EXPECT_LE(begun - before, 8u);
  for (TestClient& rank : ranks) {
    ASSERT_TRUE(rank.Seal(20));
  }
  EXPECT_EQ(w.Said("a", "c") - begun, 1u);
  EXPECT_EQ(w["c"].Committed("job").size(), 2u);

  // What waits to be said when the channel breaks is told with all that is here.
  ASSERT_TRUE(ranks[0].Begin(25));
  ASSERT_TRUE(ranks[0].Seal(25));
  w.Break("a", "c");
  w.Reopen("a", "c");
  for (Rank rank = 1; rank < 8; ++rank) {
    ASSERT_TRUE(ranks[rank].Begin(25));
    ASSERT_TRUE(ranks[rank].Seal(25));
  }
  w.Advance(seconds(1));
  EXPECT_EQ(w["c"].Committed("job").size(), 3u);

  // Who comes late is not waited for long.
  for (Rank rank = 0; rank < 7; ++rank) {
    ASSERT_TRUE(ranks[rank].Begin(30));
    ASSERT_TRUE(ranks[rank].Seal(30));
  }
  w.Advance(seconds(1));
  const uint64_t late = w.Said("a", "c");
  ASSERT_TRUE(ranks[7].Begin(30));
  ASSERT_TRUE(ranks[7].Seal(30));
  // And who waits is not kept waiting by that.
  const uint64_t asked = ranks[0].Send(TestClient::AwaitFrame(30, v1::AwaitSave::STAGE_COMMITTED));
  const std::optional<Answer> answer = ranks[0].Take(asked);
  ASSERT_TRUE(answer && answer->frame.has_await_save());
  EXPECT_GT(w.Said("a", "c"), late);
}

// While ranks join the state changes with each node, or, when others save already, with each rank,
// and all nodes keep it: they are not told each time.
TEST(ManyNodesTest, ThatRanksJoinIsNotToldToAllNodesOneByOne) {
  std::vector<std::string> nodes;
  for (int i = 0; i < 16; ++i) {
    nodes.push_back("n" + std::to_string(i));
  }
  for (const bool saves : {false, true}) {
    SCOPED_TRACE(saves);
    ClusterWorld w(nodes);
    TestClient first = w["n0"].Connect(100);
    ASSERT_TRUE(first.Join("job", 0, 16));
    if (saves) {
      ASSERT_TRUE(first.Begin(1));
    }
    const std::string host = w.HostOf("job");
    w.Advance(seconds(1));
    for (const std::string& node : nodes) {
      w[node].after_request = [&w] { w.Run(); };  // no time passes
    }
    const uint64_t version = w.AgreedState("job").version();
    const uint64_t before = w.Said(host, "n1");
    std::vector<TestClient> ranks;
    for (Rank rank = 1; rank < 16; ++rank) {
      ranks.push_back(w[nodes[rank]].Connect(100));
      ASSERT_TRUE(ranks.back().Join("job", rank, 16));
    }
    EXPECT_GE(w.AgreedState("job").version(), version + 10);
    EXPECT_LE(w.Said(host, "n1") - before, 3u);  // that, and what it says to its own rank
    w.Advance(seconds(1));
    for (const std::string& node : nodes) {
      ASSERT_EQ(w[node].states.size(), 1u) << node;
      EXPECT_EQ(w[node].states.begin()->second.version(), w.AgreedState("job").version()) << node;
    }
  }
}

// Whose ranks come at about the same time on all nodes: each job has an order of its own.
TEST_F(ClusterTest, JobsSpreadOverTheNodes) {
  const std::vector<std::string> nodes = {"a", "b", "c"};
  for (const std::string& node : nodes) {
    w[node].after_request = [this] { w.Run(); };  // no time passes
  }
  std::map<std::string, int> hosted;
  for (int i = 0; i < 30; ++i) {
    const std::string job = "job-" + std::to_string(i);
    std::vector<std::pair<TestClient, uint64_t>> asked;
    for (Rank rank = 0; rank < nodes.size(); ++rank) {
      TestClient client = w[nodes[rank]].Connect(100 + i);
      const uint64_t question = client.Send(TestClient::JoinFrame(job, rank, 3));
      asked.emplace_back(std::move(client), question);
    }
    w.Advance(seconds(2));
    for (auto& [client, question] : asked) {
      ASSERT_TRUE(client.Take(question)) << job;
    }
    ++hosted[w.HostOf(job)];
  }
  for (const std::string& node : nodes) {
    EXPECT_GE(hosted[node], 5) << node;  // of 10
  }
}

// Somebody removed the file: the node that wrote it does not go by what it remembers of that.
TEST_F(ClusterTest, AFileThatIsGoneBeforeItsManifestIsWrittenAgain) {
  HostOnC();
  auto [r0, r1] = TwoRanks();
  w["c"].fail = [](const Action& a) {
    return std::holds_alternative<PublishManifest>(a) ? absl::UnavailableError("EIO")
                                                      : absl::OkStatus();
  };
  ASSERT_TRUE(r0.Save(10));
  ASSERT_TRUE(r1.Save(10));
  ASSERT_EQ(w.remote().Whole(2), std::vector<Step>{10});
  ASSERT_TRUE(w.remote().manifests.empty());
  std::erase_if(w.remote().copies, [](const auto& copy) { return copy.first.rank == 1; });
  w["c"].fail = nullptr;
  w.Advance(seconds(30));
  EXPECT_EQ(w.remote().Whole(2), std::vector<Step>{10});
  EXPECT_EQ(w.remote().manifests.size(), 1u);
}

// Its host dies; another node takes over, and no commit is lost.
TEST_F(ClusterTest, AnotherNodeTakesOver) {
  auto [r0, r1] = TwoRanks();
  const std::string first = w.HostOf("job");
  const Epoch epoch = w.EpochOf("job");
  ASSERT_TRUE(r0.Save(10));
  ASSERT_TRUE(r1.Save(10));
  ASSERT_TRUE(r0.Committed(10));

  w.Kill(first);
  w.Advance(2 * kLease);
  EXPECT_NE(w.HostOf("job"), first);
  EXPECT_NE(w.HostOf("job"), "");
  EXPECT_GT(w.EpochOf("job"), epoch);
  CoreHarness& host = w[w.HostOf("job")];
  EXPECT_EQ(host.Committed("job"), std::vector<std::string>{"1:10"});
}

// A node without ranks hosts the job, dies, and the ranks go on without noticing.
TEST_F(ClusterTest, RanksGoOnUnderAnotherHost) {
  // The first to ask is the first to host.
  TestClient visitor = w["c"].Connect(99);
  ASSERT_TRUE(visitor.Join("job", 0, 1));
  ASSERT_EQ(w.HostOf("job"), "c");
  w["c"].Kill(visitor);
  w.Run();
  auto [r0, r1] = TwoRanks();
  EXPECT_EQ(r0.joined().attempt(), 2u);
  ASSERT_TRUE(r0.Save(10));
  ASSERT_TRUE(r1.Save(10));
  ASSERT_TRUE(r0.Committed(10));

  ASSERT_TRUE(r0.Begin(20));
  w.Kill("c");
  w.Advance(2 * kLease);
  ASSERT_NE(w.HostOf("job"), "c");
  ASSERT_TRUE(r0.Seal(20));
  ASSERT_TRUE(r1.Save(20));
  EXPECT_TRUE(r0.Committed(20));
  EXPECT_TRUE(r1.Committed(20));
  EXPECT_EQ(w[w.HostOf("job")].Committed("job"), (std::vector<std::string>{"2:20", "2:10"}));
}

// While nobody hosts the job, and nobody can be elected, ranks go on saving in their own memory.
TEST_F(ClusterTest, SavesWaitForNoHost) {
  HostOnC();
  auto [r0, r1] = TwoRanks();
  ASSERT_TRUE(r0.Save(10));
  ASSERT_TRUE(r1.Save(10));
  ASSERT_TRUE(r0.Committed(10));
  for (const char* node : {"a", "b", "c"}) {
    w.CutFromMembership(node);
  }
  w.Advance(2 * kLease);
  ASSERT_EQ(w.HostOf("job"), "");
  ASSERT_TRUE(r0.Save(20));
  ASSERT_TRUE(r1.Save(20));
  for (const char* node : {"a", "b", "c"}) {
    w.HealMembership(node);
  }
  w.Advance(seconds(5));
  EXPECT_TRUE(r0.Committed(20));
  EXPECT_TRUE(r1.Committed(20));
}

// An attempt that is over goes on saving where its node could not hear that: it is given up.
TEST_F(ClusterTest, WhatAZombieSavesIsGivenUp) {
  HostOnC();
  auto [r0, r1] = TwoRanks();
  ASSERT_TRUE(r0.Save(10));
  ASSERT_TRUE(r1.Save(10));
  w.Cut("b", "a");
  w.Cut("b", "c");
  w.CutFromMembership("b");
  w.Advance(2 * kLease);
  w["a"].Kill(r0);
  w.Run();
  TestClient n0 = w["a"].Connect(200);
  TestClient n1 = w["c"].Connect(200);
  ASSERT_TRUE(n0.Join("job", 0, 2));
  ASSERT_TRUE(n1.Join("job", 1, 2));
  ASSERT_TRUE(Restore({&n0, &n1}, 10));
  ASSERT_TRUE(r1.Save(20));  // it cannot know better
  ASSERT_TRUE(n0.Save(20));
  ASSERT_TRUE(n1.Save(20));
  w.Heal("b", "a");
  w.Heal("b", "c");
  w.HealMembership("b");
  w.Advance(seconds(2));
  EXPECT_EQ(r1.Reason(TestClient::BeginFrame(30)), v1::Failure::REASON_SUPERSEDED);
  EXPECT_EQ(w[w.HostOf("job")].Committed("job"), (std::vector<std::string>{"3:20", "2:10"}));
}

// Requests that the old host did not answer are answered by the new one.
TEST_F(ClusterTest, WhoWaitsIsAnsweredByTheNextHost) {
  HostOnC();
  auto [r0, r1] = TwoRanks();
  ASSERT_TRUE(r0.Save(10));
  const uint64_t waits =
      r0.Send(TestClient::AwaitFrame(10, v1::AwaitSave::STAGE_COMMITTED, 600'000));
  EXPECT_FALSE(r0.Take(waits));
  w.Kill("c");
  w.Advance(2 * kLease);
  ASSERT_TRUE(r1.Save(10));
  const std::optional<Answer> answer = r0.Take(waits);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->frame.await_save().stage(), v1::AwaitSave::STAGE_COMMITTED);
}

// A node dies with its rank; the rank runs on another one, and all get the step from the remote
// tier and from memory.
TEST_F(ClusterTest, WhoIsDeposedByAccidentIsElectedAgain) {
  ClusterWorld alone({"a"});
  TestClient rank = alone["a"].Connect(100);
  ASSERT_TRUE(rank.Join("job", 0, 1));
  ASSERT_TRUE(rank.Save(1));
  const Epoch before = alone.EpochOf("job");
  alone.DeposeHost("job");
  alone.Advance(kLease);
  EXPECT_EQ(alone.HostOf("job"), "a");
  EXPECT_GT(alone.EpochOf("job"), before);
  ASSERT_TRUE(rank.Save(2));
  EXPECT_TRUE(rank.Committed(2));
}

TEST_F(ClusterTest, ALostNodesRankGoesOnElsewhere) {
  HostOnC();
  auto [r0, r1] = TwoRanks();
  ASSERT_TRUE(r0.Save(10));
  ASSERT_TRUE(r1.Save(10));
  ASSERT_EQ(w.remote().Whole(2), std::vector<Step>{10});

  w.Kill("b");
  w.Advance(2 * kLease);
  w["a"].Kill(r0);
  w.Run();
  TestClient n0 = w["a"].Connect(200);
  TestClient n1 = w["c"].Connect(200);
  ASSERT_TRUE(n0.Join("job", 0, 2));
  ASSERT_TRUE(n1.Join("job", 1, 2));
  EXPECT_EQ(n0.joined().attempt(), n1.joined().attempt());
  EXPECT_TRUE(Restore({&n0, &n1}, 10));

  // What was thought dead wakes up: it is told so, and changes nothing.
  w.Start("b");
  TestClient woken = w["b"].Connect(100);
  EXPECT_EQ(woken.Reason(TestClient::JoinFrame("job", 1, 2, 0, "", r1.joined().attempt())),
            v1::Failure::REASON_SUPERSEDED);
}

// Cut off from the host, a node catches up when it is heard again.
TEST_F(ClusterTest, ANodeThatWasCutOffCatchesUp) {
  HostOnC();
  auto [r0, r1] = TwoRanks();
  ASSERT_TRUE(r0.Begin(10));
  ASSERT_TRUE(r1.Begin(10));
  w.Cut("b", "c");
  ASSERT_TRUE(r0.Seal(10));
  ASSERT_TRUE(r1.Seal(10));
  EXPECT_FALSE(r0.Committed(10));
  w.Heal("b", "c");
  EXPECT_TRUE(r0.Committed(10));
  EXPECT_TRUE(r1.Committed(10));
}

// A host that cannot reach a node counts nothing of what it has, and takes nothing that it says
// meanwhile: what it says then is of things that it has to tell first.
TEST_F(ClusterTest, WhatANodeSaysThatCannotBeReachedIsToldAgain) {
  HostOnC();
  auto [r0, r1] = TwoRanks();
  ASSERT_TRUE(r0.Begin(10));
  ASSERT_TRUE(r1.Begin(10));
  w.Break("c", "b");
  ASSERT_TRUE(r0.Seal(10));
  ASSERT_TRUE(r1.Seal(10));
  EXPECT_EQ(w["c"].Committed("job"), std::vector<std::string>{});
  w.Reopen("c", "b");
  EXPECT_EQ(w["c"].Committed("job"), std::vector<std::string>{"2:10"});
  EXPECT_TRUE(r0.Committed(10));
  EXPECT_TRUE(r1.Committed(10));
}

// The daemon of a node is started anew: its ranks are who they were.
TEST_F(ClusterTest, ADaemonIsStartedAnew) {
  HostOnC();
  auto [r0, r1] = TwoRanks();
  ASSERT_TRUE(r0.Save(10));
  ASSERT_TRUE(r1.Save(10));
  w.Kill("b");
  w.Start("b");
  EXPECT_EQ(w["c"].Committed("job"), std::vector<std::string>{"2:10"});
  TestClient again = w["b"].Connect(100);
  const v1::DaemonFrame joined =
      again.Call(TestClient::JoinFrame("job", 1, 2, 0, "", r1.joined().attempt()));
  EXPECT_EQ(joined.join().attempt(), r1.joined().attempt()) << joined.ShortDebugString();
  ASSERT_TRUE(r0.Save(20));
  ASSERT_TRUE(again.Save(20));
  EXPECT_TRUE(r0.Committed(20));
}

// So are those of a node whose daemon was started anew together with the host's.
TEST_F(ClusterTest, AllDaemonsAreStartedAnew) {
  HostOnC();
  auto [r0, r1] = TwoRanks();
  ASSERT_TRUE(r0.Save(10));
  ASSERT_TRUE(r1.Save(10));
  for (const std::string node : {"a", "b", "c"}) {
    w.Kill(node);
  }
  for (const std::string node : {"c", "a", "b"}) {
    w.Start(node);
  }
  w.Advance(seconds(2));
  TestClient first = w["a"].Connect(100);
  const v1::DaemonFrame joined =
      first.Call(TestClient::JoinFrame("job", 0, 2, 0, "", r0.joined().attempt()));
  EXPECT_EQ(joined.join().attempt(), r0.joined().attempt()) << joined.ShortDebugString();
  ASSERT_TRUE(first.Save(20));  // (the other one has not said a word since)
  TestClient second = w["b"].Connect(100);
  const v1::DaemonFrame again =
      second.Call(TestClient::JoinFrame("job", 1, 2, 0, "", r1.joined().attempt()));
  EXPECT_EQ(again.join().attempt(), r1.joined().attempt()) << again.ShortDebugString();
  ASSERT_TRUE(second.Save(20));
  EXPECT_TRUE(first.Committed(20));
}

// The host loses its lease and does not know it yet by anybody but its clock.
TEST_F(ClusterTest, AHostWithoutALeaseStepsDownByItself) {
  TestClient visitor = w["c"].Connect(99);
  ASSERT_TRUE(visitor.Join("job", 0, 1));
  ASSERT_EQ(w.HostOf("job"), "c");
  w.CutFromMembership("c");
  w.Advance(2 * kLease);
  EXPECT_NE(w.HostOf("job"), "c");
  EXPECT_TRUE(w["c"].Committed("job").empty());
  w.HealMembership("c");
  w.Advance(seconds(2));
  ASSERT_TRUE(visitor.Save(10));
  EXPECT_TRUE(visitor.Committed(10));
}

// etcd was erased: epochs begin anew, and the nodes remember better.
TEST_F(ClusterTest, AWipedMembershipCannotTurnBackTime) {
  auto [r0, r1] = TwoRanks();
  ASSERT_TRUE(r0.Save(10));
  ASSERT_TRUE(r1.Save(10));
  ASSERT_TRUE(r0.Committed(10));
  const Epoch before = w.EpochOf("job");
  w.WipeMembership();
  w.Advance(seconds(5));
  EXPECT_GT(w.EpochOf("job"), before);
  ASSERT_NE(w.HostOf("job"), "");
  EXPECT_EQ(w[w.HostOf("job")].Committed("job"), std::vector<std::string>{"1:10"});
  ASSERT_TRUE(r0.Save(20));
  ASSERT_TRUE(r1.Save(20));
  EXPECT_TRUE(r0.Committed(20));
}

// A new host meets a node before that hears that the job has no host.
TEST_F(ClusterTest, LateNewsLosesNoMeeting) {
  HostOnC();
  auto [r0, r1] = TwoRanks();
  w.DelayNews("b");
  w.Kill("c");
  w.Advance(2 * kLease);
  ASSERT_EQ(w.HostOf("job"), "a");
  w.DeliverNews("b");
  w.Advance(seconds(5));
  EXPECT_EQ(w.HostOf("job"), "a");
  ASSERT_TRUE(r0.Save(10));
  ASSERT_TRUE(r1.Save(10));
  EXPECT_TRUE(r0.Committed(10));
}

// What was told before an election does not end it.
TEST_F(ClusterTest, OldNewsMovesNoHost) {
  HostOnC();
  TestClient r0 = w["a"].Connect(100);
  ASSERT_TRUE(r0.Join("job", 0, 1));
  const Epoch before = w.EpochOf("job");
  w.Tell("c", MembershipTold{NoHost{"job"}});
  w.Tell("a", MembershipTold{NoHost{"job"}});
  w.Advance(seconds(5));
  EXPECT_EQ(w.HostOf("job"), "c");
  EXPECT_EQ(w.EpochOf("job"), before);
  ASSERT_TRUE(r0.Save(10));
  EXPECT_TRUE(r0.Committed(10));
}

// What it keeps of the job is lost with the channel in which it said so, and nothing else breaks:
// who was elected asks it again when it is heard anew. (Else nobody would ever act as the host.)
TEST_F(ClusterTest, WhoWasElectedAsksAgainWhoseAnswerWasLost) {
  HostOnC();
  auto [r0, r1] = TwoRanks();
  ASSERT_EQ(w.HostOf("job"), "c");
  ASSERT_TRUE(r0.Save(10));
  ASSERT_TRUE(r1.Save(10));
  ASSERT_TRUE(r0.Committed(10));
  w.LoseMessages("b", "a");
  w.Kill("c");
  w.Advance(2 * kLease);
  ASSERT_EQ(w.HostOf("job"), "a");
  ASSERT_TRUE(w["a"].Committed("job").empty());  // it has heard of nobody
  w.Reopen("b", "a");
  w.Advance(seconds(5));
  EXPECT_EQ(w.HostOf("job"), "a");
  EXPECT_EQ(w["a"].Committed("job"), std::vector<std::string>{"2:10"});
}

// Its answer was lost: the epoch that the node has noted is the host's own.
TEST_F(ClusterTest, AHostThatAsksTwiceKeepsItsEpoch) {
  HostOnC();
  auto [r0, r1] = TwoRanks();
  w.LoseMessages("b", "a");
  w.DelayNews("b");
  w.Kill("c");
  w.Advance(2 * kLease);
  ASSERT_EQ(w.HostOf("job"), "a");
  ASSERT_TRUE(w["a"].Committed("job").empty()) << "it acts without having heard b";
  const Epoch elected = w.EpochOf("job");
  w.Cut("a", "b");
  w.Heal("a", "b");
  w.DeliverNews("b");
  w.Advance(seconds(5));
  EXPECT_EQ(w.EpochOf("job"), elected);
  ASSERT_TRUE(r0.Save(10));
  ASSERT_TRUE(r1.Save(10));
  EXPECT_TRUE(r0.Committed(10));
}

// etcd was erased while the only node that knew the job was away: whoever hosts it meanwhile gives
// way to what that node has.
TEST_F(ClusterTest, AnEpochThatIsTooLowEndsWithTheNodeThatKnowsBetter) {
  w.Kill("a");
  w.Kill("c");
  w.Advance(2 * kLease);
  TestClient r0 = w["b"].Connect(100);
  ASSERT_TRUE(r0.Join("job", 0, 1));
  ASSERT_TRUE(r0.Save(10));
  for (int i = 0; i < 2; ++i) {  // each start is an election
    w.Kill("b");
    w.Start("b");
    w.Advance(seconds(5));
  }
  const Epoch noted = w.EpochOf("job");
  ASSERT_GT(noted, 2u);
  w.Kill("b");
  w.WipeMembership();
  w.Advance(2 * kLease);
  w.Start("a");
  w.Start("c");
  TestClient other = w["a"].Connect(100);
  ASSERT_TRUE(other.Join("job", 0, 1));
  ASSERT_LT(w.EpochOf("job"), noted);
  w.Start("b");
  w.Advance(seconds(10));
  EXPECT_GT(w.EpochOf("job"), noted);
  ASSERT_NE(w.HostOf("job"), "");
  EXPECT_EQ(w[w.HostOf("job")].Committed("job"), std::vector<std::string>{"1:10"});
}

// etcd was erased, and gives an epoch to a node that was away when another had it. Those that are
// asked have heard of it as the host before it asks.
TEST(ClusterOfFourTest, AnEpochThatIsGivenTwiceIsActedUnderByOneNodeAlone) {
  ClusterWorld w({"a", "b", "c", "d"});
  TestClient rank = w["c"].Connect(100);
  ASSERT_TRUE(rank.Join("job", 0, 1));
  ASSERT_TRUE(rank.Save(10));
  const Epoch first = w.EpochOf("job");
  w.Kill("d");
  w.DeposeHost("job");
  w.Advance(seconds(3));
  ASSERT_EQ(w.EpochOf("job"), first + 1);
  const std::string second = w.HostOf("job");
  ASSERT_FALSE(w[second].Committed("job").empty()) << "it acts";
  w.Kill(second);
  for (const std::string name : {"a", "b", "c"}) {
    w.CutFromMembership(name);
  }
  w.WipeMembership();
  w.Advance(2 * kLease);
  w.Start("d");
  w.Advance(seconds(3));
  ASSERT_EQ(w.HostOf("job"), "d");
  ASSERT_EQ(w.EpochOf("job"), first + 1) << "the same";
  for (const std::string name : {"a", "b", "c"}) {
    w.HealMembership(name);
  }
  w.Advance(seconds(5));
  EXPECT_GT(w.EpochOf("job"), first + 1);
}

// What all agreed on is of no use: the nodes keep better ones.
TEST_F(ClusterTest, AStateThatContradictsItselfIsPassedOver) {
  HostOnC();
  TestClient r0 = w["a"].Connect(100);
  ASSERT_TRUE(r0.Join("job", 0, 1));
  ASSERT_TRUE(r0.Save(10));
  v1::JobState state = w.AgreedState("job");
  ASSERT_GT(state.attempts_size(), 0);
  *state.add_attempts() = state.attempts(0);
  state.set_version(state.version() + 100);
  w.SetAgreedState("job", state);
  w.Kill("c");
  w.Advance(2 * kLease);
  ASSERT_NE(w.HostOf("job"), "");
  ASSERT_TRUE(r0.Save(20));
  EXPECT_TRUE(r0.Committed(20));
}

// etcd was erased, and hears of one node before all others, which knows an old state only.
TEST_F(ClusterTest, ANodeThatIsAloneInAMembershipThatWasErasedDoesNotTurnBackTime) {
  auto [r0, r1] = TwoRanks();
  ASSERT_TRUE(r0.Save(10));
  ASSERT_TRUE(r1.Save(10));
  w.Cut("c", "a");
  w.Cut("c", "b");
  w["a"].Kill(r0);
  w["b"].Kill(r1);
  w.Run();
  TestClient n0 = w["a"].Connect(200);
  TestClient n1 = w["b"].Connect(200);
  ASSERT_TRUE(n0.Join("job", 0, 2));
  ASSERT_TRUE(n1.Join("job", 1, 2));
  ASSERT_EQ(n0.joined().attempt(), 2u);

  w.CutFromMembership("a");
  w.CutFromMembership("b");
  w.WipeMembership();
  w.Advance(kLease + seconds(5));
  EXPECT_EQ(w.HostOf("job"), "c");
  EXPECT_TRUE(w["c"].Committed("job").empty());  // it waits for those that the state names
  w.HealMembership("a");
  w.HealMembership("b");
  w.Heal("c", "a");
  w.Heal("c", "b");
  w.Advance(seconds(30));
  EXPECT_EQ(w.AgreedState("job").highest_attempt(), 2u);
  EXPECT_EQ(w[w.HostOf("job")].Committed("job"), std::vector<std::string>{"1:10"});
}

// Likewise one that keeps nothing of the job, so that no state says who may: those that were
// members when it was erased.
TEST_F(ClusterTest, ANodeThatKeepsNothingDoesNotBeginAnewInAMembershipThatWasErased) {
  w.Kill("c");
  w.Advance(2 * kLease);
  auto [r0, r1] = TwoRanks();
  ASSERT_TRUE(r0.Save(10));
  ASSERT_TRUE(r1.Save(10));
  w.Advance(seconds(10));
  const v1::JobState before = w.AgreedState("job");
  ASSERT_EQ(before.attempts_size(), 1);
  w.Start("c");
  w.Cut("c", "a");
  w.Cut("c", "b");
  w.CutFromMembership("a");
  w.CutFromMembership("b");
  w.WipeMembership();
  w.Advance(kLease + seconds(5));
  ASSERT_EQ(w.HostOf("job"), "c");
  w.HealMembership("a");
  w.HealMembership("b");
  w.Heal("c", "a");
  w.Heal("c", "b");
  w.Advance(seconds(30));
  const v1::JobState after = w.AgreedState("job");
  EXPECT_EQ(after.job_uuid(), before.job_uuid());
  ASSERT_EQ(after.attempts_size(), 1);
  EXPECT_EQ(after.attempts(0).opening(), before.attempts(0).opening());
  EXPECT_EQ(w[w.HostOf("job")].Committed("job"), std::vector<std::string>{"1:10"});
}

class ClusterDrivesTest : public ClusterTest {
 protected:
  ClusterDrivesTest()
      : ClusterTest([](v1::DaemonConfig& config) {
          WithRemote(config);
          config.mutable_nvme()->add_dirs("/nvme");
          config.mutable_policy()->mutable_nvme()->set_every_steps(1);
          config.mutable_policy()->mutable_nvme()->set_keep_last(1);
          config.mutable_policy()->mutable_remote()->set_every_steps(1);
          config.mutable_policy()->mutable_remote()->set_keep_last(1);
        }) {}
};

// Its memory is lost, and its drives have been read before it meets the host: nothing that the
// others have of the same step is taken for a part that nobody needs. (This world has just begun:
// by the host's clock what another node did a moment ago may have been before that.)
TEST_F(ClusterDrivesTest, ANodeThatIsRebootedCostsNoCopyOnOtherDrives) {
  HostOnC();
  auto [r0, r1] = TwoRanks();
  ASSERT_TRUE(r0.Save(10));
  ASSERT_TRUE(r1.Save(10));
  w.Run();
  ASSERT_EQ(w["a"].nvme.copies.size(), 1u);
  ASSERT_EQ(w["b"].nvme.copies.size(), 1u);
  w.Kill("a");
  w.Start("a", true);
  w.Advance(seconds(30));
  EXPECT_EQ(w["a"].nvme.copies.size(), 1u);
  EXPECT_EQ(w["b"].nvme.copies.size(), 1u);
}

// Two users, one name.
TEST_F(ClusterTest, ANameBelongsToOneUser) {
  TestClient mine = w["a"].Connect(100, 1000);
  TestClient theirs = w["b"].Connect(100, 1001);
  ASSERT_TRUE(mine.Join("job", 0, 1));
  EXPECT_EQ(theirs.Reason(TestClient::JoinFrame("job", 0, 1)), v1::Failure::REASON_OTHER_OWNER);
}

// One rank, started on two nodes.
TEST_F(ClusterTest, ARankIsOneProcessInTheWholeCluster) {
  TestClient one = w["a"].Connect(100);
  TestClient other = w["b"].Connect(100);
  ASSERT_TRUE(one.Join("job", 0, 2));
  EXPECT_EQ(other.Reason(TestClient::JoinFrame("job", 0, 2)), v1::Failure::REASON_RANK_TAKEN);
  EXPECT_EQ(other.Reason(TestClient::JoinFrame("job", 1, 3)), v1::Failure::REASON_TOPOLOGY);
}

// ---- Readers on any node ----

v1::ClientFrame AttachFrame(Rank rank, std::optional<Step> step = std::nullopt,
                            const std::string& job = "job", uint64_t deadline_ms = 30'000) {
  v1::ClientFrame frame;
  v1::Attach& attach = *frame.mutable_attach();
  attach.set_job(job);
  attach.set_rank(rank);
  attach.set_any_tier(true);
  attach.set_deadline_ms(deadline_ms);
  attach.set_hold(1000 + rank);
  if (step) {
    attach.set_choice(v1::Attach::CHOICE_STEP);
    attach.set_step(*step);
  }
  return frame;
}
v1::ClientFrame ListFrame(const std::string& job = "job") {
  v1::ClientFrame frame;
  frame.mutable_list()->set_job(job);
  frame.mutable_list()->set_deadline_ms(30'000);
  return frame;
}
int Code(absl::StatusCode code) {
  return static_cast<int>(code);
}

class ClusterReadersTest : public ClusterTest {
 protected:
  explicit ClusterReadersTest(std::function<void(v1::DaemonConfig&)> adjust = WithRemote)
      : ClusterTest(std::move(adjust)) {}

  // Ranks 0 on a and 1 on b, hosted by c.
  void SaveTen() {
    HostOnC();
    r0_ = w["a"].Connect(100);
    r1_ = w["b"].Connect(100);
    ASSERT_TRUE(r0_->Join("job", 0, 2));
    ASSERT_TRUE(r1_->Join("job", 1, 2));
    ASSERT_TRUE(r0_->Save(10));
    ASSERT_TRUE(r1_->Save(10));
    ASSERT_TRUE(r0_->Committed(10));
  }
  TestClient Reader(const std::string& node, uint32_t uid = 1000) {
    return w[node].Connect(next_pid_++, uid);
  }

  std::optional<TestClient> r0_;
  std::optional<TestClient> r1_;
  int32_t next_pid_ = 500;
};

TEST_F(ClusterReadersTest, AnyNodeListsAndReads) {
  SaveTen();
  for (const char* node : {"a", "b", "c"}) {
    TestClient reader = Reader(node);
    const v1::DaemonFrame listed = reader.Call(ListFrame());
    ASSERT_EQ(listed.list().checkpoints_size(), 1) << node << listed.ShortDebugString();
    EXPECT_EQ(listed.list().checkpoints(0).step(), 10u);
    for (const Rank rank : {0, 1}) {
      const bool here = std::string(node) == (rank == 0 ? "a" : "b");
      const v1::DaemonFrame got = reader.Call(AttachFrame(rank));
      EXPECT_EQ(got.attach().tier(), here ? "memory" : "remote")
          << node << " " << got.ShortDebugString();
      EXPECT_EQ(got.attach().rank(), rank);
      EXPECT_EQ(got.attach().world_size(), 2u);
      EXPECT_EQ(got.attach().step(), 10u);
    }
  }
  EXPECT_EQ(Reader("a").Call(AttachFrame(1)).attach().why(), "memory copy on b, not on a");
  EXPECT_EQ(Reader("a").Call(AttachFrame(0, 9)).failure().code(),
            Code(absl::StatusCode::kNotFound));
  EXPECT_EQ(Reader("a").Reason(AttachFrame(2)), v1::Failure::REASON_TOPOLOGY);
  EXPECT_EQ(Reader("a", 2000).Reason(AttachFrame(0)), v1::Failure::REASON_OTHER_OWNER);
}

// A client of before there were other tiers.
TEST_F(ClusterReadersTest, WhoKnowsMemoryAloneGetsThatOfItsNode) {
  SaveTen();
  v1::ClientFrame old = AttachFrame(0);
  old.mutable_attach()->clear_any_tier();
  EXPECT_EQ(Reader("a").Call(old).attach().tier(), "memory");
  EXPECT_EQ(Reader("b").Reason(old), v1::Failure::REASON_TOPOLOGY);
}

TEST_F(ClusterReadersTest, ACopyThatIsDamagedIsPassedOverAndItsHostHearsOfIt) {
  SaveTen();
  const ShardId shard = w.remote().copies.begin()->first;  // of rank 0
  w.remote().damaged.insert(shard);
  TestClient reader = Reader("b");
  const v1::Failure failure = reader.Call(AttachFrame(0)).failure();
  EXPECT_EQ(failure.code(), Code(absl::StatusCode::kUnavailable)) << failure.message();
  EXPECT_NE(failure.message().find("remote copy bad: the image was cut"), std::string::npos)
      << failure.message();
  EXPECT_NE(failure.message().find("it lies in memory of a"), std::string::npos)
      << failure.message();
  // The host knows it now, and has had it written anew from what a has in memory.
  EXPECT_TRUE(w.remote().damaged.empty());
  EXPECT_EQ(reader.Call(AttachFrame(0)).attach().tier(), "remote");
}

TEST_F(ClusterReadersTest, ACopyThatIsDamagedAndCannotBeMendedIsNotOfferedAgain) {
  SaveTen();
  w.Cut("a", "b");
  w.Cut("a", "c");
  const ShardId shard = w.remote().copies.begin()->first;
  w.remote().damaged.insert(shard);
  w.Advance(seconds(60));  // another host, to which a's memory is out of reach
  TestClient reader = Reader("b");
  EXPECT_TRUE(reader.Call(AttachFrame(0)).has_failure());
  const size_t opened = w["b"].opened.size();
  EXPECT_TRUE(reader.Call(AttachFrame(0)).has_failure());
  EXPECT_EQ(w["b"].opened.size(), opened);
  EXPECT_EQ(w.remote().damaged.count(shard), 1u);
}

TEST_F(ClusterReadersTest, WhoReadsIsAnsweredByTheNextHost) {
  SaveTen();
  w.Cut("a", "c");
  TestClient reader = Reader("a");
  const uint64_t shard = reader.Send(AttachFrame(1, std::nullopt, "job", 60'000));
  const uint64_t list = reader.Send(ListFrame());
  EXPECT_FALSE(reader.Take(shard));
  EXPECT_FALSE(reader.Take(list));
  w.Kill("c");
  w.Advance(2 * kLease);
  const std::optional<Answer> got = reader.Take(shard);
  ASSERT_TRUE(got);
  EXPECT_EQ(got->frame.attach().tier(), "remote") << got->frame.ShortDebugString();
  const std::optional<Answer> listed = reader.Take(list);
  ASSERT_TRUE(listed);
  EXPECT_EQ(listed->frame.list().checkpoints_size(), 1) << listed->frame.ShortDebugString();
}

TEST_F(ClusterReadersTest, AHostThatCannotBeHeardIsWaitedForUntilTheDeadline) {
  SaveTen();
  w.Cut("a", "c");
  TestClient reader = Reader("a");
  const uint64_t asked = reader.Send(AttachFrame(0, std::nullopt, "job", 5'000));
  EXPECT_FALSE(reader.Take(asked));
  w.Advance(seconds(8));
  const std::optional<Answer> answer = reader.Take(asked);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->frame.failure().code(), Code(absl::StatusCode::kUnavailable))
      << answer->frame.ShortDebugString();
}

// All is answered at once where no node and no tier knows the name, on the node that finds that
// out and on all others; and nothing is opened.
TEST_F(ClusterReadersTest, AJobThatThereIsNotIsNotFoundFromAnyNode) {
  for (const char* node : {"a", "b", "c", "a"}) {
    EXPECT_EQ(Reader(node).Reason(AttachFrame(0, std::nullopt, "none")),
              v1::Failure::REASON_NOTHING_TO_RESTORE)
        << node;
    EXPECT_EQ(Reader(node).Reason(ListFrame("none")), v1::Failure::REASON_NOTHING_TO_RESTORE)
        << node;
  }
  for (const char* node : {"a", "b", "c"}) {
    EXPECT_TRUE(w[node].states.empty()) << node;
  }
  // Who joins under that name opens it, and then it is there.
  TestClient rank = w["b"].Connect(100);
  ASSERT_TRUE(rank.Join("none", 0, 1));
  ASSERT_TRUE(rank.Save(1));
  EXPECT_EQ(Reader("a").Call(ListFrame("none")).list().checkpoints_size(), 1);
}

// Only the remote tier knows it.
TEST_F(ClusterReadersTest, AJobThatNoNodeKnowsIsReadFromTheRemoteTier) {
  SaveTen();
  for (const char* node : {"a", "b", "c"}) {
    w.Kill(node);
  }
  w.Advance(2 * kLease);
  w.WipeMembership();
  for (const char* node : {"a", "b", "c"}) {
    w[node].states.clear();
    w[node].living.clear();
    w.Start(node, true);
  }
  const v1::DaemonFrame got = Reader("b").Call(AttachFrame(0));
  EXPECT_EQ(got.attach().tier(), "remote") << got.ShortDebugString();
  EXPECT_EQ(Reader("c").Call(ListFrame()).list().checkpoints_size(), 1);
}

class ClusterReadersOfNvmeTest : public ClusterReadersTest {
 protected:
  ClusterReadersOfNvmeTest()
      : ClusterReadersTest([](v1::DaemonConfig& config) {
          WithRemote(config);
          config.mutable_nvme()->add_dirs("/nvme");
        }) {}
};

TEST_F(ClusterReadersOfNvmeTest, ItsOwnDriveThenTheRemoteTier) {
  SaveTen();
  TestClient reader = Reader("a");
  const auto without_memory = [](Rank rank) {
    v1::ClientFrame frame = AttachFrame(rank);
    frame.mutable_attach()->add_without("memory");
    return frame;
  };
  EXPECT_EQ(reader.Call(without_memory(0)).attach().tier(), "nvme");
  const v1::Source other = reader.Call(without_memory(1)).attach();
  EXPECT_EQ(other.tier(), "remote");
  EXPECT_EQ(other.why(), "nvme copy on b, not on a");
  // A drive that cannot be read just now is passed over, and is not called bad.
  w["a"].nvme.unreadable.insert(w["a"].nvme.copies.begin()->first);
  EXPECT_EQ(reader.Call(without_memory(0)).attach().tier(), "remote");
  w["a"].nvme.unreadable.clear();
  EXPECT_EQ(reader.Call(without_memory(0)).attach().tier(), "nvme");
}

// What is still being read on some node may hold the step.
TEST_F(ClusterReadersOfNvmeTest, DrivesOfOtherNodesThatAreStillBeingReadAreWaitedFor) {
  SaveTen();
  w.Kill("b");
  w["b"].late_drives = true;
  w.Start("b");
  TestClient reader = Reader("a");
  const uint64_t named = reader.Send(AttachFrame(0, 11));
  const uint64_t list = reader.Send(ListFrame());
  const uint64_t hasty = reader.Send(AttachFrame(0, 11, "job", 2'000));
  EXPECT_FALSE(reader.Take(named));
  EXPECT_FALSE(reader.Take(list));
  w.Advance(seconds(3));
  const std::optional<Answer> late = reader.Take(hasty);
  ASSERT_TRUE(late);
  EXPECT_EQ(late->frame.failure().code(), Code(absl::StatusCode::kDeadlineExceeded))
      << late->frame.ShortDebugString();
  w["b"].AnswerDrives();
  w.Run();
  const std::optional<Answer> got = reader.Take(named);
  ASSERT_TRUE(got);
  EXPECT_EQ(got->frame.failure().code(), Code(absl::StatusCode::kNotFound))
      << got->frame.ShortDebugString();
  const std::optional<Answer> listed = reader.Take(list);
  ASSERT_TRUE(listed);
  EXPECT_EQ(listed->frame.list().checkpoints_size(), 1);
}

class ClusterReadersWithoutRemoteTest : public ClusterReadersTest {
 protected:
  ClusterReadersWithoutRemoteTest() : ClusterReadersTest([](v1::DaemonConfig&) {}) {}
};

TEST_F(ClusterReadersWithoutRemoteTest, WhatLiesOnAnotherNodeAloneIsNamed) {
  SaveTen();
  EXPECT_EQ(Reader("b").Call(AttachFrame(1)).attach().tier(), "memory");
  const v1::Failure failure = Reader("a").Call(AttachFrame(1)).failure();
  EXPECT_EQ(failure.code(), Code(absl::StatusCode::kUnavailable));
  EXPECT_EQ(failure.message(),
            "attach: no copy of step 10 of attempt 2, rank 1, can be read on a: memory copy on b, "
            "not on a; it lies in memory of b: read it on that node, or here when it is in the "
            "remote tier");
}

// ---- What is inspected and verified ----

template <typename Request>
Request OfJob(Step step = 0) {
  Request request;
  request.set_job("job");
  if constexpr (requires { request.set_step(step); }) {
    request.set_step(step);
  }
  return request;
}

TEST_F(ClusterReadersTest, AnyNodeKnowsWhoHasTheShardsAndAsksThem) {
  SaveTen();
  for (const char* node : {"a", "b", "c"}) {
    const auto plan = w[node].Admin<v1::PlanVerifyReply>(OfJob<v1::PlanVerifyRequest>(10));
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(std::vector<std::string>(plan->nodes().begin(), plan->nodes().end()),
              (std::vector<std::string>{"a", "b", "c"}))  // c: what is in the remote tier
        << node;
    EXPECT_EQ(plan->attempt(), 2u);
    EXPECT_EQ(plan->step(), 10u);
    v1::FindShardRequest find = OfJob<v1::FindShardRequest>();
    find.set_newest(true);
    find.set_rank(1);
    const auto found = w[node].Admin<v1::FindShardReply>(find);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->node(), "b");
    EXPECT_EQ(found->step(), 10u);
    EXPECT_TRUE(absl::IsNotFound(
        w[node].Admin<v1::PlanVerifyReply>(OfJob<v1::PlanVerifyRequest>(10), 2000).status()));
  }
  v1::PlanVerifyRequest memory = OfJob<v1::PlanVerifyRequest>(10);
  memory.set_tier("memory");
  EXPECT_EQ(w["a"].Admin<v1::PlanVerifyReply>(memory)->nodes_size(), 2);
}

// Each node lists what lies there, and needs no coordinator for it.
TEST_F(ClusterReadersTest, EachNodeVerifiesWhatItHas) {
  SaveTen();
  v1::VerifyRequest exact = OfJob<v1::VerifyRequest>(10);
  exact.set_attempt(2);
  for (const auto& [node, tier] :
       {std::pair("a", TierKind::kMemory), std::pair("b", TierKind::kMemory),
        std::pair("c", TierKind::kRemote)}) {
    const auto listed = w[node].Admin<ListedShards>(exact);
    ASSERT_TRUE(listed.ok()) << node << listed.status();
    EXPECT_EQ(listed->shards.size(), tier == TierKind::kMemory ? 1u : 2u) << node;
    EXPECT_EQ(listed->shards[0].tier, tier) << node;
  }
  EXPECT_TRUE(absl::IsNotFound(w["a"].Admin<ListedShards>(exact, 2000).status()));
}

// That the host's own node was rebooted says nothing of the memory of another.
TEST_F(ClusterReadersTest, WhatIsAbsentOnAnotherNodeIsNotForTheHostsReboot) {
  SaveTen();
  v1::RemoveCheckpointRequest remove = OfJob<v1::RemoveCheckpointRequest>(10);
  remove.set_tier("memory");
  remove.set_force(true);
  ASSERT_TRUE(w["a"].Admin<v1::RemoveCheckpointReply>(remove).ok());
  w.Kill("c");
  w.Start("a", true);
  w.Advance(2 * kLease);
  ASSERT_EQ(w.HostOf("job"), "a");
  const v1::DaemonFrame got = Reader("b").Call(AttachFrame(1));
  EXPECT_EQ(got.attach().tier(), "remote") << got.ShortDebugString();
  EXPECT_EQ(got.attach().why(), "memory copy absent (given up, or the memory was emptied)");
  EXPECT_EQ(Reader("a").Call(AttachFrame(0)).attach().why(), "memory copy absent (node rebooted)");
}

TEST_F(ClusterReadersTest, WhatOnlyARuntimeCanReadIsAskedOfTheNodeThatIsNamed) {
  SaveTen();
  std::vector<PeerReads> asked;
  w["b"].read_for_peer = [&](const PeerReads& reads) {
    asked.push_back(reads);
    v1::ReadShardReply reply;
    reply.set_record("its record");
    return ReadForPeer{reads.token, absl::OkStatus(), reply};
  };
  v1::ReadShardRequest read = OfJob<v1::ReadShardRequest>(10);
  read.set_attempt(2);
  read.set_rank(1);
  read.set_node("b");
  const auto got = w["a"].Admin<v1::ReadShardReply>(read);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->record(), "its record");
  ASSERT_EQ(asked.size(), 1u);
  EXPECT_EQ(asked[0].caller.uid, 1000u);
  EXPECT_EQ(std::get<v1::ReadShardRequest>(asked[0].request).rank(), 1u);
  w["b"].read_for_peer = [](const PeerReads& reads) {
    return ReadForPeer{reads.token, absl::NotFoundError("gone"), {}};
  };
  v1::VerifyMoreRequest more = OfJob<v1::VerifyMoreRequest>(10);
  more.set_node("b");
  EXPECT_TRUE(absl::IsNotFound(w["a"].Admin<v1::VerifyMoreReply>(more).status()));
  // One that is not a member, or does not answer, is named.
  read.set_node("nobody");
  EXPECT_TRUE(absl::IsUnavailable(w["a"].Admin<v1::ReadShardReply>(read).status()));
  read.set_node("b");
  w["b"].read_for_peer = nullptr;
  EXPECT_FALSE(w["a"].Admin<v1::ReadShardReply>(read).ok());
  w.Advance(kForwardDeadline + seconds(1));
  const AdminReply late = w["a"].admin_replies.rbegin()->second;
  EXPECT_EQ(late.status.message(), "b did not answer in time");
}

}  // namespace
}  // namespace holdfast::testing
