// Which node hosts a job when nodes, membership and channels disagree (docs/protocol.md §16).
#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "server/agent.h"
#include "server/router.h"
#include "tests/server/cluster_world.h"

namespace holdfast::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class ClusterHostsTest : public ::testing::Test {
 protected:
  explicit ClusterHostsTest(const std::vector<std::string>& nodes = {"a", "b", "c"},
                            std::function<void(v1::DaemonConfig&)> adjust = nullptr)
      : w(nodes, std::move(adjust)) {}

  // A node without ranks of the job hosts it.
  void HostOn(const std::string& node, const std::string& job = "job") {
    TestClient visitor = w[node].Connect(99);
    ASSERT_TRUE(visitor.Join(job, 0, 1));
    w[node].Kill(visitor);
    w.Run();
    ASSERT_EQ(w.HostOf(job), node);
  }
  std::pair<TestClient, TestClient> TwoRanks(const std::string& job = "job") {
    TestClient r0 = w["a"].Connect(100);
    TestClient r1 = w["b"].Connect(100);
    EXPECT_TRUE(r0.Join(job, 0, 2));
    EXPECT_TRUE(r1.Join(job, 1, 2));
    return {r0, r1};
  }
  ::testing::AssertionResult Commits(TestClient& r0, TestClient& r1, Step step) {
    for (TestClient* rank : {&r0, &r1}) {
      if (const ::testing::AssertionResult saved = rank->Save(step); !saved) {
        return saved;
      }
    }
    return ::testing::AssertionResult(r0.Committed(step)) << "not committed";
  }
  void Hear(const std::string& node, const std::string& from, const std::string& job, Epoch epoch,
            const NodeMessage& message) {
    w.Tell(node, PeerTold{PeerSpoke{from, *EncodePeer(PeerHeader{job, {}, epoch}, message)}});
  }

  ClusterWorld w;
};

// etcd answers it, the other nodes do not. (Those that wait 20 ms longer each to be elected have
// orders of their own for each job: of some jobs the host would be the first again.)
TEST_F(ClusterHostsTest, AHostThatIsCutOffFromTheOthersGivesWay) {
  const std::vector<std::string> jobs = {"job0", "job1", "job2", "job3", "job4", "job5"};
  std::vector<std::pair<TestClient, TestClient>> ranks;
  for (const std::string& job : jobs) {
    HostOn("c", job);
    ranks.push_back(TwoRanks(job));
  }
  w.Cut("c", "a");
  w.Cut("c", "b");
  w.Advance(kAloneGrace - seconds(5));
  EXPECT_EQ(w.HostOf("job0"), "c") << "it may be back in a moment";
  w.Advance(seconds(25));
  for (size_t i = 0; i < jobs.size(); ++i) {
    EXPECT_NE(w.HostOf(jobs[i]), "c");
    EXPECT_TRUE(Commits(ranks[i].first, ranks[i].second, 10)) << jobs[i];
  }
}

TEST_F(ClusterHostsTest, WhoIsRefusedForWantOfAHostHearsWhatIsWrongWithTheMembership) {
  w.CutFromMembership("a");
  w.Tell("a", MembershipTold{MembershipProblem{"etcd at etcd-1:2379 does not answer"}});
  TestClient rank = w["a"].Connect(100);
  const uint64_t id = rank.Send(TestClient::JoinFrame("job", 0, 1, 1000));
  w.Advance(seconds(3));
  const auto refused = rank.Take(id);
  ASSERT_TRUE(refused);
  EXPECT_TRUE(
      absl::StrContains(refused->frame.failure().message(), "etcd at etcd-1:2379 does not answer"))
      << refused->frame.DebugString();
}

TEST_F(ClusterHostsTest, AHostThatReachesMostOfThemStays) {
  HostOn("c");
  auto [r0, r1] = TwoRanks();
  w.Cut("c", "b");
  w.Advance(2 * kAloneGrace);
  EXPECT_EQ(w.HostOf("job"), "c");
  w.Heal("c", "b");
  EXPECT_TRUE(Commits(r0, r1, 10));
}

// It speaks to all of them, and they cannot speak to it: its certificate has ended, say.
TEST_F(ClusterHostsTest, AHostThatNobodyCanSpeakToGivesWay) {
  HostOn("c");
  auto [r0, r1] = TwoRanks();
  ASSERT_TRUE(Commits(r0, r1, 10));
  w.Break("a", "c");
  w.Break("b", "c");
  w.Advance(kAloneGrace);
  EXPECT_EQ(w.HostOf("job"), "c") << "they may be back in a moment";
  w.Advance(kUntilSilent + seconds(10));
  EXPECT_NE(w.HostOf("job"), "c");
  ASSERT_NE(w.HostOf("job"), "");
  EXPECT_TRUE(Commits(r0, r1, 20));
}

TEST_F(ClusterHostsTest, AHostThatMostOfThemCanSpeakToStays) {
  HostOn("c");
  auto [r0, r1] = TwoRanks();
  ASSERT_TRUE(Commits(r0, r1, 10));
  w.Break("b", "c");
  w.Advance(3 * kAloneGrace);
  EXPECT_EQ(w.HostOf("job"), "c");
  w.Reopen("b", "c");
  EXPECT_TRUE(Commits(r0, r1, 20));
}

// What it had asked for is not waited for, and what it has counts for nothing, until it is back.
TEST_F(ClusterHostsTest, ANodeThatIsNotHeardAnyMoreIsOutOfReach) {
  HostOn("c");
  auto [r0, r1] = TwoRanks();
  ASSERT_TRUE(Commits(r0, r1, 10));
  const auto told = [&] {
    return std::any_of(w["c"].reports.begin(), w["c"].reports.end(), [](const Report& report) {
      return absl::StrContains(report.text, "b is out of reach");
    });
  };
  w.Break("b", "c");
  w.Advance(seconds(5));
  EXPECT_FALSE(told());
  w.Advance(kUntilSilent);
  EXPECT_TRUE(told());
  w.Reopen("b", "c");
  EXPECT_TRUE(Commits(r0, r1, 20));
}

class FourNodesTest : public ClusterHostsTest {
 protected:
  FourNodesTest() : ClusterHostsTest({"a", "b", "c", "d"}) {}
};

// It speaks to all, and hears none: what they keep of the job is never known to it.
TEST_F(FourNodesTest, WhoWasElectedAndHearsNobodyGivesWay) {
  HostOn("d");
  auto [r0, r1] = TwoRanks();
  ASSERT_TRUE(Commits(r0, r1, 10));
  TestClient other = w["c"].Connect(100);  // so that all three would host it
  EXPECT_EQ(other.Reason(TestClient::JoinFrame("job", 0, 2, 0, "", r0.joined().attempt())),
            v1::Failure::REASON_RANK_TAKEN);
  w.LoseMessages("a", "c");
  w.LoseMessages("b", "c");
  w.Kill("d");
  w.Tell("c", MembershipTold{MemberGone{"d"}});
  w.Tell("c", MembershipTold{Elected{"job", 77, 0, 0, ""}});
  w.Advance(kCollectAll + kCollectKnown + kAloneGrace - seconds(5));
  const auto before = w["c"].Committed("job");
  EXPECT_TRUE(before.empty());
  w.Advance(3 * kLease);
  ASSERT_NE(w.HostOf("job"), "");
  EXPECT_NE(w.HostOf("job"), "c");
  EXPECT_TRUE(Commits(r0, r1, 20));
}

// etcd's key says that this node hosts the job, and another was elected since: etcd was put back,
// say. Nobody could be elected while that key lives.
TEST_F(ClusterHostsTest, AHostThatHearsOfANewerOneLetsGoOfItsPlace) {
  HostOn("c");
  auto [r0, r1] = TwoRanks();
  const Epoch epoch = w.EpochOf("job");
  Hear("c", "a", "job", epoch + 5, NodeMessage(StateAsked{}));
  w.Advance(seconds(5));
  ASSERT_NE(w.HostOf("job"), "");
  EXPECT_GT(w.EpochOf("job"), epoch + 5);
  EXPECT_TRUE(Commits(r0, r1, 10));
}

// Its lease was lost, and its key in etcd with it; that there is no host was told before all that.
TEST(ClusterOfOneTest, WhoLosesItsLeaseAndThenItsPlaceIsElectedAgain) {
  ClusterWorld alone({"a"});
  TestClient rank = alone["a"].Connect(100);
  ASSERT_TRUE(rank.Join("job", 0, 1));
  const Epoch epoch = alone.EpochOf("job");
  alone.DelayNews("a");
  alone.Tell("a", MembershipTold{LeaseLost{"etcd does not know it any more"}});
  ASSERT_EQ(alone.HostOf("job"), "");
  alone.Tell("a", MembershipTold{Deposed{"job", epoch}});
  alone.Advance(kLease);
  EXPECT_EQ(alone.HostOf("job"), "a");
  ASSERT_TRUE(rank.Save(1));
  EXPECT_TRUE(rank.Committed(1));
}

// What the host had said was on its way when its end was told: nobody would look for another one.
class TwoNodesTest : public ClusterHostsTest {
 protected:
  TwoNodesTest() : ClusterHostsTest({"b", "c"}) {}
};

TEST_F(TwoNodesTest, WhoHearsTheHostAfterItsEndLooksForTheNextOne) {
  HostOn("c");
  TestClient rank = w["b"].Connect(100);
  ASSERT_TRUE(rank.Join("job", 0, 1));
  w.DelayNews("b");
  w.Tell("b", MembershipTold{NoHost{"job"}});
  w.Reopen("c", "b");  // it says that it hosts the job
  w.Kill("c");
  w.Advance(3 * kLease);
  EXPECT_EQ(w.HostOf("job"), "b");
  ASSERT_TRUE(rank.Save(1));
  EXPECT_TRUE(rank.Committed(1));
}

// Its daemon is started anew while another node becomes the host.
TEST_F(ClusterHostsTest, ANodeThatIsBackAtOnceIsNotGoneForTheNextHost) {
  HostOn("c");
  auto [r0, r1] = TwoRanks();
  ASSERT_TRUE(Commits(r0, r1, 10));
  ASSERT_TRUE(r0.Save(20));
  ASSERT_TRUE(r1.Begin(20));
  w.Cut("a", "b");
  w.Tell("a", MembershipTold{MemberGone{"b"}});
  w.Tell("c", MembershipTold{MemberGone{"b"}});
  w.Tell("c", MembershipTold{LeaseLost{"it ended"}});
  w.Advance(milliseconds(500));
  ASSERT_EQ(w.HostOf("job"), "a");
  NodeInfo back;
  back.name = "b";
  back.address = "b:1";
  back.incarnation = 1;
  w.Tell("a", MembershipTold{MemberUp{back}});
  w.Heal("a", "b");
  w.Advance(seconds(2));
  ASSERT_TRUE(r1.Seal(20));
  EXPECT_TRUE(r0.Committed(20));
}

// Nothing happens later behind the back of whoever was refused.
TEST_F(ClusterHostsTest, AJoinThatWasRefusedOpensNoJobLater) {
  for (const char* node : {"a", "b", "c"}) {
    w.CutFromMembership(node);
  }
  w.Advance(2 * kLease);
  TestClient rank = w["b"].Connect(100);
  const uint64_t asked = rank.Send(TestClient::JoinFrame("job", 0, 1));
  w.Advance(std::chrono::minutes(2));
  const std::optional<Answer> refused = rank.Take(asked);
  ASSERT_TRUE(refused && refused->frame.has_failure());
  for (const char* node : {"a", "b", "c"}) {
    w.HealMembership(node);
  }
  w.Advance(seconds(30));
  EXPECT_EQ(w["b"].Admin<v1::GetStatusReply>(v1::GetStatusRequest())->jobs_size(), 0);
  EXPECT_EQ(w.HostOf("job"), "");
}

// The remote tier cannot be read for a while: until it can nobody knows whether there is such a
// job.
class SlowTierTest : public ClusterHostsTest {
 protected:
  SlowTierTest()
      : ClusterHostsTest({"a", "b", "c"}, [](v1::DaemonConfig& config) {
          config.mutable_remote()->set_dir("/remote");
        }) {
    w.remote().scan = absl::UnavailableError("Stale file handle");
  }
  // It is refused when its deadline has passed.
  void JoinInVain(const std::string& node, uint32_t uid) {
    TestClient client = w[node].Connect(static_cast<int32_t>(uid), uid);
    const uint64_t asked = client.Send(TestClient::JoinFrame("job", 0, 1, 5000));
    w.Advance(seconds(6));
    const std::optional<Answer> refused = client.Take(asked);
    ASSERT_TRUE(refused && refused->frame.has_failure());
  }
  void ReadTheTier() {
    w.remote().scan = absl::OkStatus();
    w.Advance(2 * kRescan);
  }
};

TEST_F(SlowTierTest, AJobBelongsToWhoStillWaitsForIt) {
  JoinInVain("c", 1001);  // c hosts the name from now on
  ASSERT_EQ(w.HostOf("job"), "c");
  JoinInVain("b", 1002);
  TestClient mine = w["b"].Connect(100, 1003);
  const uint64_t asked = mine.Send(TestClient::JoinFrame("job", 0, 1, 60'000));
  w.RunSoon();
  ReadTheTier();
  const std::optional<Answer> joined = mine.Take(asked);
  ASSERT_TRUE(joined);
  EXPECT_TRUE(joined->frame.has_join()) << joined->frame.ShortDebugString();
}

TEST_F(SlowTierTest, AtTheHostToo) {
  JoinInVain("c", 1001);
  TestClient mine = w["c"].Connect(100, 1003);
  const uint64_t asked = mine.Send(TestClient::JoinFrame("job", 0, 1, 60'000));
  w.RunSoon();
  ReadTheTier();
  const std::optional<Answer> joined = mine.Take(asked);
  ASSERT_TRUE(joined);
  EXPECT_TRUE(joined->frame.has_join()) << joined->frame.ShortDebugString();
}

TEST_F(SlowTierTest, WhenNobodyWaitsAnyMoreNoJobIsOpened) {
  JoinInVain("c", 1001);
  JoinInVain("b", 1002);
  ReadTheTier();
  EXPECT_EQ(w.HostOf("job"), "");
  EXPECT_EQ(w["c"].Admin<v1::GetStatusReply>(v1::GetStatusRequest())->jobs_size(), 0);
}

// The job is opened when its host has heard the nodes.
TEST_F(SlowTierTest, WhoAskedAHostThatDidNotActYetIsNotWaitedForLater) {
  w.remote().scan = absl::OkStatus();
  w.LoseMessages("a", "c");
  TestClient visitor = w["c"].Connect(99, 1001);
  const uint64_t asked = visitor.Send(TestClient::JoinFrame("job", 0, 1, 1000));
  TestClient other = w["b"].Connect(100, 1002);
  const uint64_t also = other.Send(TestClient::JoinFrame("job", 0, 1, 1000));
  w.Advance(kCollectAll + seconds(5));
  ASSERT_TRUE(visitor.Take(asked));
  ASSERT_TRUE(other.Take(also));
  EXPECT_EQ(w.HostOf("job"), "");
}

TEST_F(ClusterHostsTest, WhoAskedAHostThatDidNotActYetGetsItsJobWhenItDoes) {
  w.LoseMessages("a", "c");
  TestClient visitor = w["c"].Connect(99, 1001);
  const uint64_t asked = visitor.Send(TestClient::JoinFrame("job", 0, 1, 1000));
  TestClient other = w["b"].Connect(100, 1002);
  const uint64_t also = other.Send(TestClient::JoinFrame("job", 0, 1, 60'000));
  w.Advance(kCollectAll + seconds(5));
  ASSERT_TRUE(visitor.Take(asked));
  const std::optional<Answer> joined = other.Take(also);
  ASSERT_TRUE(joined);
  EXPECT_TRUE(joined->frame.has_join()) << joined->frame.ShortDebugString();
  EXPECT_EQ(w.HostOf("job"), "c");
}

// The host counts nothing that the node says, and the node does not know: it has met it before.
TEST_F(ClusterHostsTest, ANodeThatAsksIsMetThoughItsHostHasNotHeardItBefore) {
  HostOn("c");
  auto [r0, r1] = TwoRanks();
  w.Tell("c", PeerTold{PeerBegan{"b"}});
  Hear("c", "b", "job", w.EpochOf("job"), NodeMessage(JobSought{0, 0, true}));
  EXPECT_TRUE(Commits(r0, r1, 10));
}

// The host answers an earlier question of the node's, and the node tells it all that it has before
// it hears that: a rank that was let in meanwhile is none of that.
TEST_F(ClusterHostsTest, WhoIsLetInWhileItsNodeIsMetAgainHasNotEnded) {
  HostOn("c");
  TestClient r1 = w["b"].Connect(100);
  w.Hold("b", "c");
  w.Hold("c", "b");
  w.Reopen("b", "c");  // it tells all
  Hear("c", "b", "job", w.EpochOf("job"), NodeMessage(JobSought{0, 0, true}));
  const uint64_t joins = r1.Send(TestClient::JoinFrame("job", 1, 2));
  w.Release("b", "c");
  TestClient r0 = w["a"].Connect(100);
  ASSERT_TRUE(r0.Join("job", 0, 2));
  ASSERT_TRUE(r0.Save(10));
  w.Hold("b", "c");
  w.Release("c", "b");
  ASSERT_TRUE(r1.Take(joins));
  w.Release("b", "c");
  ASSERT_TRUE(r1.Save(10));
  EXPECT_TRUE(r0.Committed(10));
}

// There are more jobs of the user than a node keeps in mind: one that others host, and that has
// nothing here, is forgotten, and known again when it is asked for.
TEST_F(ClusterHostsTest, AJobThatWasForgottenIsMetAgain) {
  HostOn("c");
  w.Advance(seconds(1));
  for (size_t i = 0; i < kJobsPerUidMax - 1; ++i) {
    TestClient visitor = w["b"].Connect(99);
    ASSERT_TRUE(visitor.Join("job-" + std::to_string(i), 0, 1)) << i;
    if (i % 64 == 0) {
      w.Advance(milliseconds(10));  // leases go on
    }
  }
  TestClient visitor = w["a"].Connect(99);
  ASSERT_TRUE(visitor.Join("another", 0, 1));  // instead of the oldest
  TestClient rank = w["a"].Connect(100);
  EXPECT_TRUE(rank.Join("job", 0, 1));
  ASSERT_EQ(w.HostOf("job"), "c");
}

// What all others keep it cannot write itself: nobody could join before it can.
class FullDiskTest : public ClusterHostsTest {
 protected:
  static absl::Status Full(const Action& a) {
    return std::holds_alternative<WriteJobState>(a) ? absl::ResourceExhaustedError("ENOSPC")
                                                    : absl::OkStatus();
  }
};

TEST_F(FullDiskTest, AHostThatCannotWriteItsStateGivesWay) {
  HostOn("c");
  w["c"].fail = Full;
  TestClient r0 = w["a"].Connect(100);
  const uint64_t asked = r0.Send(TestClient::JoinFrame("job", 0, 1, 60'000));
  w.Advance(kUnwrittenGrace - seconds(5));
  EXPECT_EQ(w.HostOf("job"), "c") << "it may be over in a moment";
  w.Advance(seconds(15));
  EXPECT_NE(w.HostOf("job"), "c");
  ASSERT_NE(w.HostOf("job"), "");
  const std::optional<Answer> joined = r0.Take(asked);
  if (joined && joined->frame.has_failure()) {  // refused while c could not write: it tries again
    ASSERT_TRUE(r0.Join("job", 0, 1));
  } else {
    ASSERT_TRUE(joined);
  }
  ASSERT_TRUE(r0.Save(1));
  EXPECT_TRUE(r0.Committed(1));
}

TEST_F(FullDiskTest, AHostThatFailsNowAndThenStays) {
  HostOn("c");
  TestClient r0 = w["a"].Connect(100);
  ASSERT_TRUE(r0.Join("job", 0, 1));
  ASSERT_TRUE(r0.Save(1));
  for (Step step = 2; step <= 5; ++step) {
    w["c"].fail = Full;
    ASSERT_TRUE(r0.Save(step));
    w.Advance(kUnwrittenGrace / 2);
    w["c"].fail = nullptr;
    w.Advance(kUnwrittenGrace / 2);
  }
  EXPECT_EQ(w.HostOf("job"), "c");
}

TEST(ClusterOfOneTest, WhoIsAloneStaysHostThoughItCannotWrite) {
  ClusterWorld alone({"a"});
  TestClient rank = alone["a"].Connect(100);
  ASSERT_TRUE(rank.Join("job", 0, 1));
  ASSERT_TRUE(rank.Save(1));
  const Epoch epoch = alone.EpochOf("job");
  alone["a"].fail = [](const Action& a) {
    return std::holds_alternative<WriteJobState>(a) ? absl::ResourceExhaustedError("ENOSPC")
                                                    : absl::OkStatus();
  };
  ASSERT_TRUE(rank.Save(2));
  alone.Advance(3 * kUnwrittenGrace);
  EXPECT_TRUE(rank.Committed(2));
  EXPECT_EQ(alone.HostOf("job"), "a");
  EXPECT_EQ(alone.EpochOf("job"), epoch);
}

class ListTest : public ClusterHostsTest {
 protected:
  ListTest()
      : ClusterHostsTest({"a", "b", "c"}, [](v1::DaemonConfig& config) {
          for (const char* name : {"a", "b", "c"}) {
            config.mutable_cluster()->add_members()->set_name(name);
          }
        }) {}
  v1::ClientFrame ListFrame(const std::string& job, uint64_t deadline_ms) {
    v1::ClientFrame frame;
    frame.mutable_list()->set_job(job);
    frame.mutable_list()->set_deadline_ms(deadline_ms);
    return frame;
  }
};

// Nobody takes the place of a list's first node: there is nothing to wait for.
TEST_F(ListTest, AHostThatCannotBeReachedIsNotWaitedForLong) {
  w.Kill("a");
  w.Tell("b", PeerTold{PeerProblem{"a", "a:1: connection refused"}});
  CoreHarness& b = w["b"];
  v1::GetStatusRequest request;
  request.set_job("job");
  const AdminToken token = b.next_token++;
  b.Feed(AdminRequest{token, Caller{{1, 1}, 0, 0}, request});
  w.Run();
  EXPECT_EQ(b.admin_replies.count(token), 0u);
  w.Advance(kUnreachedWait);
  ASSERT_EQ(b.admin_replies.count(token), 1u);
  EXPECT_EQ(b.admin_replies.at(token).status.message(),
            "job 'job': its host, a, cannot be reached (a:1: connection refused); no other node of "
            "a list takes its place: start its ckptd, or mend what is named");
}

// No other node than the first is ever told that nobody hosts a name.
TEST_F(ListTest, NamesOfNoJobAreForgottenOnEveryNode) {
  TestClient reader = w["b"].Connect(100);
  for (int i = 0; i < 10; ++i) {
    const std::string name = "nothing" + std::to_string(i);
    EXPECT_EQ(reader.Reason(ListFrame(name, 30'000)), v1::Failure::REASON_NOTHING_TO_RESTORE);
    v1::GetStatusRequest mistyped;
    mistyped.set_job("mis" + name);
    const auto status = w["c"].Admin<v1::GetStatusReply>(mistyped).status();
    EXPECT_TRUE(absl::IsNotFound(status)) << status;
  }
  for (const char* node : {"a", "b", "c"}) {
    EXPECT_EQ(w.WatchedBy(node), 0u) << node;
  }
  // What there is goes on.
  auto [r0, r1] = TwoRanks();
  ASSERT_TRUE(Commits(r0, r1, 10));
  EXPECT_EQ(w.WatchedBy("b"), 1u);
}

// Nobody else hosts its jobs meanwhile, and nobody joins who would ask it to.
TEST_F(ListTest, AFirstNodeThatLostAllThatItHadHearsOfItsJobsFromTheOthers) {
  TestClient r0 = w["b"].Connect(100);
  TestClient r1 = w["c"].Connect(100);
  ASSERT_TRUE(r0.Join("job", 0, 2));
  ASSERT_TRUE(r1.Join("job", 1, 2));
  ASSERT_TRUE(Commits(r0, r1, 10));
  w.Kill("a");
  w["a"].states.clear();
  w.Start("a", true);
  w.Advance(seconds(20));
  EXPECT_TRUE(Commits(r0, r1, 20));
  v1::GetStatusRequest status;
  status.set_job("job");
  EXPECT_TRUE(w["c"].Admin<v1::GetStatusReply>(status).ok());
}

TEST_F(ListTest, NamesThatWereAskedForInVainDoNotPileUp) {
  auto [r0, r1] = TwoRanks();
  ASSERT_TRUE(Commits(r0, r1, 10));
  w.Cut("a", "b");
  TestClient reader = w["b"].Connect(100);
  for (int i = 0; i < 200; ++i) {
    const uint64_t asked = reader.Send(ListFrame("nothing" + std::to_string(i), 11'000));
    w.Advance(seconds(12));
    EXPECT_TRUE(reader.Take(asked)) << i;
  }
  EXPECT_LT(w.WatchedBy("b"), 2 * kWatchedMin);
  w.Heal("a", "b");
  EXPECT_TRUE(Commits(r0, r1, 20));
}

// What another node answers to an earlier life of this one answers nothing that is asked now.
TEST_F(ClusterHostsTest, AnswersToAnEarlierLifeAnswerNothing) {
  HostOn("b");
  auto [r0, r1] = TwoRanks();
  ASSERT_TRUE(Commits(r0, r1, 10));
  std::vector<AdminToken> asked;
  w["b"].read_for_peer = [&](const PeerReads& reads) -> std::optional<ReadForPeer> {
    asked.push_back(reads.token);
    return std::nullopt;
  };
  v1::ReadShardRequest read;
  read.set_job("job");
  read.set_step(10);
  read.set_attempt(r0.joined().attempt());
  read.set_rank(1);
  read.set_node("b");
  EXPECT_FALSE(w["a"].Admin<v1::ReadShardReply>(read).ok());
  w.Kill("a");
  w.Start("a");
  w.Advance(seconds(1));
  EXPECT_FALSE(w["a"].Admin<v1::ReadShardReply>(read).ok());
  ASSERT_EQ(asked.size(), 2u);
  const size_t answers = w["a"].admin_replies.size();
  v1::ReadShardReply old;
  old.set_record("of the first question");
  w["b"].Feed(ReadForPeer{asked[0], absl::OkStatus(), old});
  w.Run();
  EXPECT_EQ(w["a"].admin_replies.size(), answers);
}

// More than one message between daemons holds.
TEST_F(ClusterHostsTest, AnAnswerThatIsTooLargeIsSaidToBe) {
  HostOn("b");
  auto [r0, r1] = TwoRanks();
  ASSERT_TRUE(Commits(r0, r1, 10));
  w["b"].read_for_peer = [&](const PeerReads& reads) {
    v1::ReadShardReply reply;
    reply.set_record(std::string(17u << 20, 'x'));
    return ReadForPeer{reads.token, absl::OkStatus(), reply};
  };
  v1::ReadShardRequest read;
  read.set_job("job");
  read.set_step(10);
  read.set_attempt(r0.joined().attempt());
  read.set_rank(1);
  read.set_node("b");
  const auto answer = w["a"].Admin<v1::ReadShardReply>(read);
  EXPECT_TRUE(absl::IsResourceExhausted(answer.status())) << answer.status();
  EXPECT_TRUE(absl::StrContains(answer.status().message(), "on b")) << answer.status();
}

}  // namespace
}  // namespace holdfast::testing
