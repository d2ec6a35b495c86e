// Copies in the memory of other nodes (docs/protocol.md §19), on the real control logic of each
// node: who keeps whose, what is restored from them, what happens to them when nodes go or memory
// is short.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>

#include "base/status.h"
#include "server/agent.h"
#include "tests/server/cluster_world.h"

namespace holdfast::testing {
namespace {

using std::chrono::seconds;

v1::SetOptionsRequest SetReplicas(uint32_t replicas) {
  v1::SetOptionsRequest request;
  request.set_job("job");
  v1::SetOptionsRequest::Option& option = *request.add_options();
  option.set_name("replicas");
  option.set_value(absl::StrCat(replicas));
  return request;
}

class ReplicasTest : public ::testing::Test {
 protected:
  explicit ReplicasTest(uint32_t replicas = 1,
                        std::vector<std::string> names = {"a", "b", "c", "d"},
                        std::function<void(v1::DaemonConfig&)> adjust = nullptr)
      : w(names, [replicas, adjust](v1::DaemonConfig& config) {
          config.mutable_policy()->set_replicas(replicas);
          if (adjust) {
            adjust(config);
          }
        }) {
    for (const std::string& name : names) {
      nodes.push_back(name);
    }
  }

  // Ranks 0 and 1 of the job, on a and b.
  void TwoRanks(const std::string& first = "a", const std::string& second = "b") {
    r0.emplace(w[first].Connect(++pid));
    r1.emplace(w[second].Connect(++pid));
    home0 = first;
    home1 = second;
    const uint64_t asked = r0->Send(TestClient::JoinFrame("job", 0, 2, 60'000));
    ASSERT_TRUE(r1->Join("job", 1, 2));
    ASSERT_TRUE(r0->Take(asked));
  }
  void Save(Step step) {
    ASSERT_TRUE(r0->Save(step));
    ASSERT_TRUE(r1->Save(step));
    w.RunSoon();
  }
  // The nodes that have a copy of it in memory, replicas marked: "a c*".
  std::string Where(Rank rank, Step step) {
    std::string text;
    for (const std::string& name : nodes) {
      for (const auto& [slot, file] : w[name].files) {
        if (file.record && file.record->id.rank == rank && file.record->id.step == step) {
          text += (text.empty() ? "" : " ") + name + (file.note.replica() ? "*" : "");
        }
      }
    }
    return text;
  }
  size_t Replicas(Rank rank, Step step) {
    const std::string where = Where(rank, step);
    return static_cast<size_t>(std::count(where.begin(), where.end(), '*'));
  }
  std::string KeptBy(Rank rank, Step step) {
    for (const std::string& name : nodes) {
      for (const auto& [slot, file] : w[name].files) {
        if (file.record && file.note.replica() && file.record->id.rank == rank &&
            file.record->id.step == step) {
          return name;
        }
      }
    }
    return "";
  }
  // That lives, and has no copy in memory.
  std::string NodeWithout(Rank rank, Step step) {
    const std::string where = Where(rank, step);
    for (const std::string& name : nodes) {
      if (where.find(name) == std::string::npos &&
          std::find(lost.begin(), lost.end(), name) == lost.end()) {
        return name;
      }
    }
    return "";
  }
  v1::JobStatus Status() { return w[w.HostOf("job")].Status("job"); }
  std::string Survives(v1::Protection::FailureKind kind) {
    const v1::JobStatus status = Status();
    for (const v1::Protection& line : status.protection()) {
      if (line.kind() == kind) {
        return line.any() ? absl::StrCat(line.step(), " from ", line.from()) : "";
      }
    }
    return "no such line";
  }
  // Its processes end, and its lease.
  void LoseForGood(const std::string& name) {
    w.Kill(name);
    lost.push_back(name);
    w.Advance(kLease + seconds(5));
  }
  void EndRanks() {
    for (const auto& [home, rank] : {std::pair(home0, &r0), std::pair(home1, &r1)}) {
      if (std::find(lost.begin(), lost.end(), home) == lost.end()) {
        w[home].Kill(**rank);
      }
    }
    w.RunSoon();
  }
  // Both enter and load; the tier that each got its copy from.
  std::vector<std::string> Restore(Step step) {
    std::vector<TestClient*> ranks{&*r0, &*r1};
    std::vector<uint64_t> asked;
    std::vector<std::string> tiers;
    for (TestClient* rank : ranks) {
      asked.push_back(rank->Send(TestClient::EnterFrame(60'000)));
    }
    w.RunSoon();
    for (size_t i = 0; i < ranks.size(); ++i) {
      const std::optional<Answer> offered = ranks[i]->Take(asked[i]);
      if (!offered || offered->frame.enter_session().step() != step) {
        ADD_FAILURE() << "rank " << i << ": "
                      << (offered ? offered->frame.ShortDebugString() : "not answered");
        return {};
      }
      tiers.push_back(offered->frame.enter_session().source().tier());
      asked[i] = ranks[i]->Send(
          TestClient::ReportFrame(offered->frame.enter_session(), true, false, 60'000));
    }
    for (size_t i = 0; i < ranks.size(); ++i) {
      const std::optional<Answer> done = ranks[i]->Take(asked[i]);
      EXPECT_TRUE(done && done->frame.enter_session().done())
          << (done ? done->frame.ShortDebugString() : "not answered");
    }
    return tiers;
  }

  ClusterWorld w;
  std::vector<std::string> nodes;
  std::vector<std::string> lost;
  std::optional<TestClient> r0;
  std::optional<TestClient> r1;
  std::string home0;
  std::string home1;
  int32_t pid = 100;
};

TEST_F(ReplicasTest, EachShardLiesInAnotherNodesMemory) {
  TwoRanks();
  Save(10);
  EXPECT_EQ(Replicas(0, 10), 1u) << Where(0, 10);
  EXPECT_EQ(Replicas(1, 10), 1u) << Where(1, 10);
  EXPECT_NE(KeptBy(0, 10), "a");
  EXPECT_NE(KeptBy(1, 10), "b");
  EXPECT_EQ(Survives(v1::Protection::FAILURE_KIND_NODE), "10 from memory+peer");
  EXPECT_EQ(Survives(v1::Protection::FAILURE_KIND_ALL_NODES), "");
}

TEST_F(ReplicasTest, OnlyTheNewestReplicatedStepIsKept) {
  TwoRanks();
  for (const Step step : {10, 11, 12, 13}) {
    Save(step);
  }
  EXPECT_EQ(Replicas(0, 13) + Replicas(1, 13), 2u);
  for (const Step step : {10, 11, 12}) {
    EXPECT_EQ(Replicas(0, step) + Replicas(1, step), 0u) << "step " << step;
  }
}

TEST_F(ReplicasTest, ANodeThatIsLostIsMadeUpForByItsPeers) {
  TwoRanks();
  Save(10);
  LoseForGood("a");
  EndRanks();
  const std::string spare = NodeWithout(0, 10);
  w[spare].pulls.clear();
  TwoRanks(spare, "b");
  EXPECT_EQ(Restore(10), (std::vector<std::string>{"memory", "memory"})) << "it came ahead";
  EXPECT_EQ(w[spare].pulls[false], 1) << "somebody will wait for it: no ceiling holds it back";
  EXPECT_GT(w[KeptBy(0, 10)].pulls[true], 0);
  // And what it lost is made up for: the step is safe again.
  w.Advance(seconds(5));
  EXPECT_EQ(Survives(v1::Protection::FAILURE_KIND_NODE), "10 from memory+peer");
  Save(11);
  EXPECT_EQ(Survives(v1::Protection::FAILURE_KIND_NODE), "11 from memory+peer");
}

TEST_F(ReplicasTest, ASpareGetsWhatTheLostNodeHeldBeforeItsRanksCome) {
  TwoRanks();
  Save(10);
  LoseForGood("a");
  w.Advance(seconds(5));
  EXPECT_EQ(Replicas(0, 10), 2u) << "for its own, too: " << Where(0, 10);
  // Of the two that have no rank of the job the first one by name: they lend as much.
  EXPECT_NE(Where(0, 10).find("c*"), std::string::npos) << Where(0, 10);
  EndRanks();
  TwoRanks("c", "b");
  EXPECT_EQ(Restore(10), (std::vector<std::string>{"memory", "memory"}));
}

TEST_F(ReplicasTest, ASpareThatIsGoneHasAnother) {
  TwoRanks();
  Save(10);
  LoseForGood("a");
  w.Advance(seconds(5));
  LoseForGood("c");
  w.Advance(seconds(5));
  EXPECT_NE(Where(0, 10).find("d*"), std::string::npos) << Where(0, 10);
}

v1::ReplaceRequest Replace(const std::string& node, const std::string& with) {
  v1::ReplaceRequest request;
  request.set_job("job");
  request.set_node(node);
  request.set_with(with);
  return request;
}

TEST_F(ReplicasTest, ANodeThatIsToBeTakenOutHasTheSpareThatWasNamed) {
  TwoRanks();
  Save(10);
  const auto replaced = w["b"].Admin<v1::ReplaceReply>(Replace("a", "d"), 1000);
  ASSERT_TRUE(replaced.ok()) << replaced.status();
  EXPECT_EQ(replaced->ranks(), 1u);
  w.Advance(seconds(5));
  EXPECT_NE(Where(0, 10).find("d*"), std::string::npos) << Where(0, 10);
  Save(11);
  EXPECT_NE(Where(0, 11).find("d*"), std::string::npos) << "each step: " << Where(0, 11);
  EndRanks();
  TwoRanks("d", "b");
  EXPECT_EQ(Restore(11), (std::vector<std::string>{"memory", "memory"}));
  // It is over when they run elsewhere.
  EXPECT_EQ(w["b"].Admin<v1::ReplaceReply>(Replace("a", "c"), 1000)->ranks(), 0u);
}

TEST_F(ReplicasTest, WhatCannotStandInIsRefusedAndSaid) {
  TwoRanks();
  Save(10);
  const auto why = [&](const std::string& node, const std::string& with) {
    return std::string(
        w["a"].Admin<v1::ReplaceReply>(Replace(node, with), 1000).status().message());
  };
  EXPECT_NE(why("x", "c").find("no node is called 'x'"), std::string::npos) << why("x", "c");
  EXPECT_NE(why("a", "x").find("no node is called 'x'"), std::string::npos) << why("a", "x");
  EXPECT_NE(why("a", "a").find("for itself"), std::string::npos) << why("a", "a");
  EXPECT_EQ(w["a"].Admin<v1::ReplaceReply>(Replace("a", "d"), 2000).status().code(),
            absl::StatusCode::kNotFound)
      << "another user's";
  LoseForGood("d");
  EXPECT_NE(why("a", "d").find("out of reach"), std::string::npos) << why("a", "d");
}

TEST_F(ReplicasTest, ANodeThatIsOnlyAwayHasNoSpare) {
  TwoRanks();
  Save(10);
  const std::string before = Where(0, 10);
  w.Kill("a");
  w.Advance(kLease / 2);
  EXPECT_EQ(Where(0, 10), before) << "it may be back in a moment";
}

TEST_F(ReplicasTest, ARankThatComesToItsReplicaHasItAtOnce) {
  TwoRanks();
  Save(10);
  const std::string keeper = KeptBy(0, 10);
  LoseForGood("a");
  EndRanks();
  TwoRanks(keeper, "b");
  EXPECT_EQ(Restore(10), (std::vector<std::string>{"memory", "memory"}))
      << "it lies in its node's memory";
  w.Advance(seconds(5));
  EXPECT_EQ(Replicas(0, 10), 1u) << "another node keeps it now: " << Where(0, 10);
  EXPECT_NE(KeptBy(0, 10), keeper);
}

TEST_F(ReplicasTest, ARestoreThatJoinsAReplicasFetchLetsNoCeilingHoldIt) {
  TwoRanks();
  const auto is_fetch = [](const Action& action) {
    return std::holds_alternative<FetchShard>(action);
  };
  for (const std::string& name : nodes) {
    w[name].delay = is_fetch;
  }
  Save(10);
  std::string keeper;
  DrainId drain = 0;
  for (const std::string& name : nodes) {
    for (const Action& action : w[name].delayed) {
      const auto& fetch = std::get<FetchShard>(action);
      if (fetch.key.id.rank == 0) {
        EXPECT_TRUE(fetch.background);
        keeper = name;
        drain = fetch.drain;
      }
    }
  }
  ASSERT_NE(keeper, "");
  EndRanks();
  TwoRanks(keeper, "b");
  EXPECT_EQ(w[keeper].hurried, std::vector<DrainId>()) << "nobody waits yet";
  const uint64_t asked = r0->Send(TestClient::EnterFrame(60'000));
  r1->Send(TestClient::EnterFrame(60'000));
  w.RunSoon();
  EXPECT_EQ(w[keeper].hurried, std::vector<DrainId>{drain});
  w[keeper].PerformDelayed();
  const std::optional<Answer> offered = r0->Take(asked);
  ASSERT_TRUE(offered);
  EXPECT_EQ(offered->frame.enter_session().step(), 10u);
}

TEST_F(ReplicasTest, ARanksShardIsOnItsWayBeforeTheOthersHaveCome) {
  TwoRanks();
  Save(10);
  const std::string elsewhere = NodeWithout(1, 10);
  ASSERT_NE(elsewhere, "");
  EndRanks();
  r1.emplace(w[elsewhere].Connect(++pid));
  home1 = elsewhere;
  const uint64_t asked = r1->Send(TestClient::JoinFrame("job", 1, 2, 60'000));
  w.RunSoon();
  EXPECT_EQ(NodeWithout(1, 10) == elsewhere, false) << "not there yet: " << Where(1, 10);
  // The other one comes: nothing more is read for the first.
  r0.emplace(w["a"].Connect(++pid));
  ASSERT_TRUE(r0->Join("job", 0, 2));
  ASSERT_TRUE(r1->Take(asked));
  EXPECT_EQ(Restore(10), (std::vector<std::string>{"memory", "memory"}));
}

TEST_F(ReplicasTest, ANodeThatDoesNotReachTheShardIsPassedOver) {
  TwoRanks();
  Save(10);
  const std::string keeper = KeptBy(1, 10);
  w[keeper].read_peer = [](const std::string&, const FetchShard&) {
    return absl::UnavailableError("it does not answer");
  };
  Save(11);
  w.Advance(seconds(30));
  EXPECT_EQ(Replicas(1, 11), 1u);
  EXPECT_NE(KeptBy(1, 11), keeper);
}

class OneKeeperTest : public ReplicasTest {
 protected:
  OneKeeperTest() : ReplicasTest(1, {"a", "b"}) {}
};

class ThreeNodesTwoReplicasTest : public ReplicasTest {
 protected:
  ThreeNodesTwoReplicasTest() : ReplicasTest(2, {"a", "b", "c"}) {}
};

// What it waits for was begun as a replica, from one node.
TEST_F(ThreeNodesTwoReplicasTest, ARestoreThatJoinedAPullFromALostNodeGetsItFromAnother) {
  TwoRanks();
  LoseForGood("c");
  Save(10);
  ASSERT_EQ(Where(1, 10), "a* b");
  lost.clear();
  w["c"].delay = [](const Action& action) { return std::holds_alternative<FetchShard>(action); };
  w.Start("c");
  w.Advance(seconds(5));
  ASSERT_FALSE(w["c"].delayed.empty()) << "it is to keep the second ones";
  LoseForGood("b");
  EndRanks();
  TwoRanks("a", "c");
  const uint64_t first = r0->Send(TestClient::EnterFrame(60'000));
  const uint64_t second = r1->Send(TestClient::EnterFrame(60'000));
  w.RunSoon();
  w["c"].PerformDelayed();
  w.RunSoon();
  EXPECT_EQ(Where(1, 10), "a* b c") << "(b is gone, and all that is there)";
  for (const auto& [rank, asked] : {std::pair(&r0, first), std::pair(&r1, second)}) {
    const std::optional<Answer> answer = (*rank)->Take(asked);
    ASSERT_TRUE(answer);
    EXPECT_EQ(answer->frame.enter_session().step(), 10u) << answer->frame.ShortDebugString();
  }
}

// Whoever saves all the time would keep another job from ever having one.
TEST_F(OneKeeperTest, ReplicasAreMadeInTheOrderInWhichTheyWereAskedFor) {
  std::vector<std::string> begun;
  w["b"].delay = [](const Action& action) { return std::holds_alternative<FetchShard>(action); };
  w["b"].read_peer = [&, read = w["b"].read_peer](const std::string& from,
                                                  const FetchShard& wanted) {
    begun.push_back(wanted.key.job_name);
    return read(from, wanted);
  };
  std::vector<std::string> saved;
  std::deque<TestClient> ranks;
  for (int i = 0; i < 9; ++i) {
    saved.push_back(absl::StrCat("job-", i));
    ranks.push_back(w["a"].Connect(++pid));
    ASSERT_TRUE(ranks.back().Join(saved.back(), 0, 1));
    ASSERT_TRUE(ranks.back().Save(10));
    w.RunSoon();
  }
  EXPECT_EQ(w["b"].delayed.size(), kReplicasAtOnce) << "so many at a time";
  w["b"].PerformDelayed();
  w.RunSoon();
  EXPECT_EQ(begun, saved);
}

class DrivesTest : public ReplicasTest {
 protected:
  DrivesTest()
      : ReplicasTest(0, {"a", "b", "c"},
                     [](v1::DaemonConfig& config) { config.mutable_nvme()->add_dirs("/nvme0"); }) {}
  // Its ranks end, and it is there again with its drive alone.
  void LoseMemoryOf(const std::string& name) {
    EndRanks();
    w.Kill(name);
    w.Start(name, true);
    w.Advance(seconds(5));
  }
  ShardId Shard(Rank rank, Step step) {
    for (const auto& [id, copy] : w["a"].nvme.copies) {
      if (id.rank == rank && id.step == step) {
        return id;
      }
    }
    ADD_FAILURE() << "a has no such shard on its drive";
    return {};
  }
};

TEST_F(DrivesTest, WhatLiesOnAnotherNodesDriveComesThroughItsMemory) {
  TwoRanks();
  Save(10);
  LoseMemoryOf("a");
  EXPECT_EQ(Where(0, 10), "");
  TwoRanks("c", "b");
  EXPECT_EQ(w["c"].pulls[false], 0) << "ahead of the session comes only what is in memory";
  EXPECT_EQ(Restore(10), (std::vector<std::string>{"peer", "memory"}));
  EXPECT_EQ(Where(0, 10), "c") << "a's slot was for as long as it was read";
  Save(11);
  EXPECT_EQ(Survives(v1::Protection::FAILURE_KIND_PROCESS), "11 from memory");
}

TEST_F(DrivesTest, WhatIsBadThereIsNotTakenAndSaid) {
  TwoRanks();
  Save(10);
  const ShardId shard = Shard(0, 10);
  LoseMemoryOf("a");
  w["a"].nvme.damaged.insert(shard);
  TwoRanks("c", "b");
  const uint64_t first = r0->Send(TestClient::EnterFrame(20'000));
  r1->Send(TestClient::EnterFrame(20'000));
  w.Advance(seconds(25));
  const std::optional<Answer> answer = r0->Take(first);
  ASSERT_TRUE(answer);
  EXPECT_NE(answer->frame.enter_session().step(), 10u) << answer->frame.ShortDebugString();
  EXPECT_EQ(Where(0, 10), "");
  const auto where = w[w.HostOf("job")].Admin<v1::WhereReply>(
      [] {
        v1::WhereRequest request;
        request.set_job("job");
        request.set_step(10);
        return request;
      }(),
      0);
  ASSERT_TRUE(where.ok()) << where.status();
  bool said = false;
  for (const v1::ShardCopy& copy : where->copies()) {
    said = said || (copy.rank() == 0 && copy.node() == "a" && copy.tier() == "nvme" &&
                    copy.state() != "good");
  }
  EXPECT_TRUE(said) << where->ShortDebugString();
}

// Both come back with their drives alone, and each other's ranks: what one reads ahead, or waits
// for, must not keep it from giving the other what that one waits for.
TEST_F(DrivesTest, NodesThatNeedEachOthersDrivesDoNotWaitInACircle) {
  constexpr Rank kRanks = 2 * (kPrefetchesAtOnce + 1);
  std::vector<TestClient> ranks;
  std::vector<uint64_t> asked;
  const auto start = [&](const std::string& even, const std::string& odd) {
    ranks.clear();
    asked.clear();
    for (Rank rank = 0; rank < kRanks; ++rank) {
      ranks.push_back(w[rank % 2 == 0 ? even : odd].Connect(++pid));
      asked.push_back(ranks.back().Send(TestClient::JoinFrame("job", rank, kRanks, 60'000)));
    }
    w.RunSoon();
  };
  start("a", "b");
  for (TestClient& rank : ranks) {
    ASSERT_TRUE(rank.Save(10));
  }
  w.RunSoon();
  for (const char* name : {"a", "b"}) {
    for (Rank rank = 0; rank < kRanks; ++rank) {
      if ((rank % 2 == 0) == (name == nodes[0])) {
        w[name].Kill(ranks[rank]);
      }
    }
    w.Kill(name);
    w.Start(name, true);
  }
  w.Advance(seconds(5));
  // No fetch from the other node ends before all that can be asked for has been.
  for (const char* name : {"a", "b"}) {
    w[name].delay = [](const Action& action) {
      const auto* fetch = std::get_if<FetchShard>(&action);
      return fetch != nullptr && fetch->from == TierKind::kPeer;
    };
  }
  start("b", "a");
  for (Rank rank = 0; rank < kRanks; ++rank) {
    asked[rank] = ranks[rank].Send(TestClient::EnterFrame(60'000));
  }
  w.RunSoon();
  for (int round = 0; round < 2 * static_cast<int>(kRanks); ++round) {
    for (const char* name : {"a", "b"}) {
      w[name].PerformDelayed();
    }
    w.Advance(seconds(1));
  }
  for (Rank rank = 0; rank < kRanks; ++rank) {
    const std::optional<Answer> offered = ranks[rank].Take(asked[rank]);
    ASSERT_TRUE(offered) << "rank " << rank << " waits";
    EXPECT_EQ(offered->frame.enter_session().step(), 10u) << offered->frame.ShortDebugString();
  }
}

TEST_F(DrivesTest, AnotherJobsShardIsNotLoaded) {
  TwoRanks();
  Save(10);
  const ShardId shard = Shard(0, 10);
  LoseMemoryOf("a");
  TestClient other = w["a"].Connect(++pid);
  ASSERT_TRUE(other.Join("other", 0, 1));
  const absl::Status others =
      w["a"].Admin<ReadableShards>(HoldShard{"other", shard, 0, true}, 0).status();
  EXPECT_TRUE(absl::IsNotFound(others)) << others;
  EXPECT_TRUE(w["a"].Admin<ReadableShards>(HoldShard{"job", shard, 0, true}, 0).ok());
}

// What is in memory for a reader alone goes with it: the job's host, when it hears of the node anew
// just then, must not count on it.
TEST_F(DrivesTest, WhatIsLoadedForAReaderIsNoReplica) {
  TwoRanks();
  Save(10);
  ShardId shard = Shard(0, 10);
  shard.rank = 1;
  LoseMemoryOf("b");
  const std::string host = w.HostOf("job");
  ASSERT_NE(host, "b");
  ASSERT_TRUE(w["b"].Admin<ReadableShards>(HoldShard{"job", shard, 0, true}, 0).ok());
  ASSERT_EQ(Where(1, 10), "b*") << "it is held";
  w.Cut("b", host);
  w.Advance(seconds(30));
  w.Heal("b", host);
  w.Advance(seconds(30));
  v1::WhereRequest request;
  request.set_job("job");
  request.set_step(10);
  const auto where = w[host].Admin<v1::WhereReply>(request, 1000);
  ASSERT_TRUE(where.ok()) << where.status();
  std::vector<std::string> on_b;
  for (const v1::ShardCopy& copy : where->copies()) {
    if (copy.rank() == 1 && copy.node() == "b") {
      on_b.push_back(absl::StrCat(copy.tier(), " ", copy.state()));
    }
  }
  EXPECT_EQ(Where(1, 10), "b*") << "it is held still";
  EXPECT_EQ(on_b, std::vector<std::string>{"nvme good"});
}

TEST_F(DrivesTest, AJobIsRemovedWhileItsShardIsLoaded) {
  TwoRanks();
  Save(10);
  const ShardId shard = Shard(0, 10);
  LoseMemoryOf("a");
  w["a"].delay = [](const Action& action) { return std::holds_alternative<FetchShard>(action); };
  EXPECT_FALSE(w["a"].Admin<ReadableShards>(HoldShard{"job", shard, 0, true}, 0).ok());
  ASSERT_EQ(w["a"].delayed.size(), 1u) << "it is on its way";
  v1::RemoveJobRequest request;
  request.set_job("job");
  static_cast<void>(w[w.HostOf("job")].Admin<v1::RemoveJobReply>(request, 1000));
  w["a"].PerformDelayed();
  w.Advance(seconds(5));
  EXPECT_EQ(Where(0, 10), "");
  EXPECT_TRUE(w["a"].nvme.copies.empty());
}

// What other nodes have is opened for no reader: such ranks load what all of them reach.
TEST_F(DrivesTest, RanksThatReadByThemselvesGetAStepThatTheyReach) {
  TwoRanks();
  Save(10);
  EndRanks();
  TwoRanks();
  v1::ClientFrame frame = TestClient::EnterFrame(20'000);
  frame.mutable_enter_session()->set_reads_by_itself(true);
  const uint64_t first = r0->Send(frame);
  r1->Send(frame);
  w.Advance(seconds(25));
  const std::optional<Answer> answer = r0->Take(first);
  ASSERT_TRUE(answer);
  EXPECT_NE(answer->frame.enter_session().step(), 10u) << answer->frame.ShortDebugString();
}

// Nobody keeps anything of another's: a has one shard of the step, b the other.
class NoReplicasTest : public ReplicasTest {
 protected:
  NoReplicasTest() : ReplicasTest(0, {"a", "b"}) {}
};

// A rank that reshards wants of both: what lies on b it reads there, in parts.
TEST_F(NoReplicasTest, AnotherNumberOfRanksGetsAStepThatLiesOnSeveralNodes) {
  TwoRanks();
  Save(10);
  EndRanks();
  r0.emplace(w["a"].Connect(++pid));
  const uint64_t joined = r0->Send(TestClient::JoinFrame("job", 0, 1, 60'000));
  w.Advance(seconds(5));
  ASSERT_TRUE(r0->Take(joined));
  v1::ClientFrame frame = TestClient::EnterFrame(20'000);
  frame.mutable_enter_session()->set_may_reshard(true);
  frame.mutable_enter_session()->set_reads_parts(true);
  const uint64_t entered = r0->Send(frame);
  w.Advance(seconds(25));
  const std::optional<Answer> answer = r0->Take(entered);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->frame.enter_session().step(), 10u) << answer->frame.ShortDebugString();
  EXPECT_EQ(answer->frame.enter_session().reshard(), 2u);
}

// The rank has run on b before, and left a copy on its drive there: a replica beside it would go
// with it.
class MovedTest : public ReplicasTest {
 protected:
  MovedTest()
      : ReplicasTest(1, {"a", "b"},
                     [](v1::DaemonConfig& config) { config.mutable_nvme()->add_dirs("/nvme0"); }) {}
};

TEST_F(MovedTest, AReplicaDoesNotLieBesideACopyOfTheRanksOwn) {
  TwoRanks("b", "a");
  Save(10);
  ASSERT_EQ(KeptBy(0, 10), "a");
  EndRanks();
  w.Kill("b");
  w.Start("b", true);
  w.Advance(seconds(5));
  TwoRanks("a", "a");
  Restore(10);
  w.Advance(seconds(70));
  EXPECT_EQ(Where(0, 10), "a");
  EXPECT_EQ(Where(1, 10), "a b*");
}

TEST_F(ReplicasTest, OneThatIsFoundBadIsMadeAnew) {
  TwoRanks();
  Save(10);
  const std::string keeper = KeptBy(0, 10);
  for (const auto& [id, file] : w[keeper].files) {
    if (file.record && file.record->id.rank == 0) {
      w[keeper].Feed(CopyFoundBad{id, file.record->generation, "a digest differs"});
      break;
    }
  }
  w.RunSoon();
  w.Advance(seconds(5));
  EXPECT_EQ(Survives(v1::Protection::FAILURE_KIND_NODE), "10 from memory+peer");
}

// Its own ranks are entitled to all that it has.
TEST_F(DrivesTest, WithoutRoomThereItIsRefusedAndNobodyWaitsForLong) {
  TwoRanks();
  Save(10);
  w["a"].bytes_max = 0;
  LoseMemoryOf("a");
  TwoRanks("c", "b");
  const uint64_t first = r0->Send(TestClient::EnterFrame(60'000));
  r1->Send(TestClient::EnterFrame(60'000));
  w.Advance(seconds(12));  // room may be made meanwhile
  const std::optional<Answer> answer = r0->Take(first);
  ASSERT_TRUE(answer) << "it waits";
  EXPECT_NE(answer->frame.enter_session().step(), 10u) << answer->frame.ShortDebugString();
}

// Where a and b lend nothing, c and d keep what they have.
class TwoKeepersTest : public ReplicasTest {
 protected:
  TwoKeepersTest()
      : ReplicasTest(1, {"a", "b", "c", "d"}, [](v1::DaemonConfig& config) {
          const bool runs_ranks = config.node_name() == "a" || config.node_name() == "b";
          config.mutable_memory()->set_peer_bytes_max(runs_ranks ? 0 : 8 * kSlot);
        }) {}
};

TEST_F(TwoKeepersTest, WhatOneOfThemKeptTheOtherKeepsWhenItIsLost) {
  TwoRanks();
  Save(10);
  const std::string keeper = KeptBy(0, 10);
  const std::string other = keeper == "c" ? "d" : "c";
  LoseForGood(keeper);
  w.Advance(seconds(5));
  EXPECT_NE(Where(0, 10).find(other + "*"), std::string::npos) << Where(0, 10);
  EXPECT_EQ(Survives(v1::Protection::FAILURE_KIND_NODE), "10 from memory+peer");
}

// A peer that has it no more says so: the next source is asked, and not that one for ever.
TEST_F(ReplicasTest, WhatNoPeerHasAnyMoreIsNotAskedForAgainAndAgain) {
  TwoRanks();
  Save(10);
  LoseForGood("a");
  w.Advance(seconds(5));
  const std::string spare = NodeWithout(0, 10);
  for (const std::string& name : nodes) {
    for (auto& [slot, file] : w[name].files) {
      if (file.record && file.record->id.rank == 0) {
        file.record.reset();  // gone, and nobody has said so
      }
    }
  }
  EndRanks();
  TwoRanks(spare, "b");
  const uint64_t first = r0->Send(TestClient::EnterFrame(20'000));
  r1->Send(TestClient::EnterFrame(20'000));
  w.RunSoon();
  const std::optional<Answer> answer = r0->Take(first);
  ASSERT_TRUE(answer);
  EXPECT_TRUE(answer->frame.has_failure()) << answer->frame.ShortDebugString();
}

TEST_F(ReplicasTest, ThePolicyOfARunningJobHoldsForWhatItHas) {
  TwoRanks();
  Save(10);
  ASSERT_EQ(Replicas(0, 10) + Replicas(1, 10), 2u);
  ASSERT_TRUE(w["a"].Admin<v1::SetOptionsReply>(SetReplicas(0), 1000).ok());
  w.Advance(seconds(5));
  EXPECT_EQ(Replicas(0, 10) + Replicas(1, 10), 0u) << Where(0, 10) << ", " << Where(1, 10);
  Save(11);
  EXPECT_EQ(Replicas(0, 11) + Replicas(1, 11), 0u);
  const auto set = w["a"].Admin<v1::SetOptionsReply>(SetReplicas(2), 1000);
  ASSERT_TRUE(set.ok());
  EXPECT_EQ(set->text(), "job 'job': replicas=2");
  w.Advance(seconds(5));
  EXPECT_EQ(Replicas(0, 11), 2u) << "without another save: " << Where(0, 11);
  EXPECT_EQ(Replicas(1, 11), 2u) << Where(1, 11);
}

TEST_F(ReplicasTest, MoreReplicasThanThereAreNodesForIsSaid) {
  TwoRanks();
  Save(10);
  const auto set = w["a"].Admin<v1::SetOptionsReply>(SetReplicas(8), 1000);
  ASSERT_TRUE(set.ok());
  EXPECT_NE(set->text().find("replicas=8; 4 nodes lend memory now"), std::string::npos)
      << set->text();
  w.Advance(seconds(5));
  EXPECT_EQ(Replicas(0, 10), 3u) << Where(0, 10);
}

TEST_F(ReplicasTest, WhatNothingElseHasStaysWhateverThePolicySays) {
  TwoRanks();
  Save(10);
  LoseForGood("a");
  w.Advance(seconds(5));
  ASSERT_TRUE(w["b"].Admin<v1::SetOptionsReply>(SetReplicas(0), 1000).ok());
  w.Advance(seconds(5));
  EXPECT_GE(Replicas(0, 10), 1u) << Where(0, 10);
}

TEST_F(ReplicasTest, ADaemonThatIsStartedAnewKeepsWhatItKept) {
  TwoRanks();
  Save(10);
  const std::string keeper = KeptBy(0, 10);
  const std::string before = Where(0, 10);
  w.Kill(keeper);
  w.Start(keeper);
  w.Advance(seconds(5));
  EXPECT_EQ(Where(0, 10), before);
  EXPECT_EQ(Survives(v1::Protection::FAILURE_KIND_NODE), "10 from memory+peer");
}

TEST_F(ReplicasTest, WhatIsReadAndIsBadIsNotTaken) {
  TwoRanks();
  Save(10);
  const std::string keeper = KeptBy(0, 10);
  for (const auto& [slot, file] : w[keeper].files) {
    if (file.record && file.note.replica()) {
      w[keeper].damaged_in_memory.insert(file.record->id);
    }
  }
  LoseForGood("a");
  EndRanks();
  TwoRanks(keeper == "c" ? "d" : "c", "b");
  const uint64_t first = r0->Send(TestClient::EnterFrame(20'000));
  r1->Send(TestClient::EnterFrame(20'000));
  w.RunSoon();
  const std::optional<Answer> answer = r0->Take(first);
  ASSERT_TRUE(answer);
  EXPECT_TRUE(answer->frame.has_failure()) << answer->frame.ShortDebugString();
  EXPECT_EQ(Survives(v1::Protection::FAILURE_KIND_PROCESS), "")
      << "nothing has rank 0's shard, good, any more";
}

TEST_F(ReplicasTest, TheJobsRemovalTakesThemToo) {
  TwoRanks();
  Save(10);
  EndRanks();
  v1::RemoveJobRequest remove;
  remove.set_job("job");
  const auto removed = w["a"].Admin<v1::RemoveJobReply>(remove, 1000);
  EXPECT_TRUE(removed.ok()) << removed.status();
  w.Advance(seconds(5));
  EXPECT_EQ(Where(0, 10) + Where(1, 10), "");
  for (const std::string& name : nodes) {
    EXPECT_EQ(w[name].Daemon().slots(), 0u) << name;
  }
}

class TwoReplicasTest : public ReplicasTest {
 protected:
  TwoReplicasTest()
      : ReplicasTest(2, {"a", "b", "c", "d"},
                     [](v1::DaemonConfig& config) { config.mutable_nvme()->add_dirs("/nvme"); }) {}
};

TEST_F(TwoReplicasTest, LieOnTwoOtherNodes) {
  TwoRanks();
  Save(10);
  w.Advance(seconds(5));
  EXPECT_EQ(Replicas(0, 10), 2u) << Where(0, 10);
  EXPECT_EQ(Replicas(1, 10), 2u) << Where(1, 10);
}

TEST_F(TwoReplicasTest, AreTwoAgainWhenANodeThatKeptSomeIsLost) {
  TwoRanks();
  Save(10);
  w.Advance(seconds(5));
  const std::string keeper = Where(0, 10).find('c') != std::string::npos ? "c" : "d";
  LoseForGood(keeper);
  w.Advance(seconds(5));
  const std::string other = keeper == "c" ? "d" : "c";
  for (const Rank rank : {0u, 1u}) {
    EXPECT_NE(Where(rank, 10).find(other + "*"), std::string::npos) << Where(rank, 10);
  }
}

class LittleLentTest : public ReplicasTest {
 protected:
  LittleLentTest()
      : ReplicasTest(1, {"a", "b"}, [](v1::DaemonConfig& config) {
          config.mutable_memory()->set_peer_bytes_max(kSlot);
        }) {}
};

TEST_F(LittleLentTest, WhatDoesNotFitIsSaidAndHurtsNobody) {
  TwoRanks();
  Save(10);
  Save(11);
  EXPECT_EQ(Survives(v1::Protection::FAILURE_KIND_PROCESS), "11 from memory");
  EXPECT_EQ(Survives(v1::Protection::FAILURE_KIND_NODE), "");
  bool said = false;
  const v1::JobStatus status = Status();
  for (const v1::TierProgress& tier : status.tiers()) {
    said = said || (tier.tier() == "peer" &&
                    tier.problem().find("memory.peer_bytes_max") != std::string::npos);
  }
  EXPECT_TRUE(said) << status.ShortDebugString();
}

class LittleSpareTest : public ReplicasTest {
 protected:
  LittleSpareTest()
      : ReplicasTest(1, {"a", "b", "c"}, [](v1::DaemonConfig& config) {
          config.mutable_memory()->set_peer_bytes_max(config.node_name() == "c" ? kSlot / 2
                                                                                : 8 * kSlot);
        }) {}
};

// It would get nothing, and nobody would know before the node is lost.
TEST_F(LittleSpareTest, OneThatHasNoRoomForAShardIsRefused) {
  TwoRanks();
  Save(10);
  const absl::Status refused = w["b"].Admin<v1::ReplaceReply>(Replace("a", "c"), 1000).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_NE(Message(refused).find(
                "c lends 1 MiB (memory.peer_bytes_max), and a step of a's ranks takes 2 MiB"),
            std::string::npos)
      << refused;
  EXPECT_TRUE(w["b"].Admin<v1::ReplaceReply>(Replace("a", "b"), 1000).ok());
}

class ShortOfMemoryTest : public ReplicasTest {
 protected:
  ShortOfMemoryTest()
      : ReplicasTest(1, {"a", "b"}, [](v1::DaemonConfig& config) {
          config.mutable_memory()->set_peer_bytes_max(4 * kSlot);
        }) {}
};

// (A node has room for eight slots: see CoreHarness. Rank 0 is entitled to three of a's, and what
// another rank then wants is not there but for the replicas.)
TEST_F(ShortOfMemoryTest, ReplicasThatAreOnTheirWayGoBeforeOwnCopies) {
  w["a"].bytes_max = 4 * kSlot;
  w.Kill("a");
  w.Start("a");
  w["a"].delay = [](const Action& action) { return std::holds_alternative<FetchShard>(action); };
  TwoRanks();
  Save(10);
  ASSERT_EQ(w["a"].delayed.size(), 1u) << "rank 1's replica is on its way to a";
  TestClient other = w["a"].Connect(++pid);
  ASSERT_TRUE(other.Join("other", 0, 1));
  ASSERT_TRUE(other.Save(1));
  ASSERT_TRUE(other.Save(2));
  const uint64_t third = other.Send(TestClient::BeginFrame(3, kSlot, 60'000));
  w.RunSoon();
  w["a"].PerformDelayed();
  w.RunSoon();
  const std::optional<Answer> begun = other.Take(third);
  ASSERT_TRUE(begun && !begun->frame.has_failure());
  EXPECT_EQ(Where(0, 1), "a") << "its own step was given up";
  EXPECT_EQ(Where(1, 10).find("a*"), std::string::npos) << Where(1, 10);
}

TEST_F(ShortOfMemoryTest, ReplicasGoBeforeOwnCopies) {
  w["b"].bytes_max = 4 * kSlot;
  w.Kill("b");
  w.Start("b");
  TwoRanks();
  Save(10);
  ASSERT_EQ(KeptBy(0, 10), "b") << Where(0, 10);
  // Another job comes to b, and needs what is left and what is lent.
  TestClient other = w["b"].Connect(900, 2000);
  ASSERT_TRUE(other.Join("other", 0, 1));
  for (const Step step : {1, 2, 3}) {
    ASSERT_TRUE(other.Save(step)) << "step " << step;
  }
  w.Advance(seconds(2));
  EXPECT_EQ(KeptBy(0, 10), "") << Where(0, 10);
  EXPECT_EQ(Where(1, 10), "a* b") << "b's own copies are there";
  EXPECT_EQ(Survives(v1::Protection::FAILURE_KIND_NODE), "");
}

// ---- Every subset of four nodes is lost ----

enum class Lost { kMemoryWithoutNvme, kMemory, kMemoryAndNvme };

class LossMatrixTest : public ::testing::TestWithParam<std::tuple<uint32_t, Lost>> {
 protected:
  static constexpr Step kStep = 10;
  const std::vector<std::string> nodes{"a", "b", "c", "d"};

  void Run(uint32_t mask) {
    const auto [replicas, what] = GetParam();
    ClusterWorld w(nodes, [replicas = replicas, what = what](v1::DaemonConfig& config) {
      config.mutable_policy()->set_replicas(replicas);
      if (what != Lost::kMemoryWithoutNvme) {
        config.mutable_nvme()->add_dirs("/nvme0");
      }
    });
    // 1. A rank on each node saves; what the job is promised then.
    std::vector<TestClient> ranks;
    std::vector<uint64_t> asked;
    for (const std::string& name : nodes) {
      ranks.push_back(w[name].Connect(100));
      asked.push_back(ranks.back().Send(
          TestClient::JoinFrame("job", static_cast<Rank>(asked.size()), 4, 60'000)));
      w.RunSoon();
    }
    for (TestClient& rank : ranks) {
      ASSERT_TRUE(rank.Save(kStep));
    }
    w.RunSoon();
    const v1::JobStatus before = w[w.HostOf("job")].Status("job");
    const bool survives = Survives(w, mask, what == Lost::kMemory);

    // 2. Those nodes come back empty, and all ranks are started again.
    for (size_t i = 0; i < nodes.size(); ++i) {
      w[nodes[i]].Kill(ranks[i]);
    }
    for (size_t i = 0; i < nodes.size(); ++i) {
      if ((mask >> i & 1) != 0) {
        w.Kill(nodes[i]);
      }
    }
    for (size_t i = 0; i < nodes.size(); ++i) {
      if ((mask >> i & 1) != 0) {
        if (what == Lost::kMemoryAndNvme) {
          w[nodes[i]].nvme.Wipe();
        }
        w.Start(nodes[i], true);
      }
    }
    w.Advance(seconds(5));
    std::vector<uint64_t> entered;
    for (size_t i = 0; i < nodes.size(); ++i) {
      ranks[i] = w[nodes[i]].Connect(200);
      asked[i] = ranks[i].Send(TestClient::JoinFrame("job", static_cast<Rank>(i), 4, 60'000));
    }
    w.Advance(seconds(5));
    for (size_t i = 0; i < nodes.size(); ++i) {
      const std::optional<Answer> joined = ranks[i].Take(asked[i]);
      ASSERT_TRUE(joined && !joined->frame.has_failure())
          << (joined ? joined->frame.ShortDebugString() : "not answered");
    }
    for (TestClient& rank : ranks) {
      entered.push_back(rank.Send(TestClient::EnterFrame(20'000)));
    }
    w.Advance(seconds(25));
    size_t restored = 0;
    for (size_t i = 0; i < nodes.size(); ++i) {
      const std::optional<Answer> answer = ranks[i].Take(entered[i]);
      ASSERT_TRUE(answer);
      restored += answer->frame.enter_session().step() == kStep ? 1 : 0;
    }

    // 3. As the copies promised; and of one node, or all, as the table did.
    EXPECT_EQ(restored, survives ? nodes.size() : 0u) << "of the nodes " << mask;
    const auto promised = [&](v1::Protection::FailureKind kind) {
      return std::any_of(before.protection().begin(), before.protection().end(),
                         [&](const v1::Protection& line) {
                           return line.kind() == kind && line.any() && line.step() == kStep;
                         });
    };
    const bool one = (mask & (mask - 1)) == 0;
    const v1::Protection::FailureKind kind = what == Lost::kMemory
                                                 ? v1::Protection::FAILURE_KIND_REBOOT
                                             : one ? v1::Protection::FAILURE_KIND_NODE
                                                   : v1::Protection::FAILURE_KIND_ALL_NODES;
    if (one || mask == 15) {
      EXPECT_EQ(promised(kind), survives) << before.ShortDebugString();
    }
  }

  // Whether every rank has a copy on a node that is not lost, or on a drive that is kept.
  bool Survives(ClusterWorld& w, uint32_t mask, bool nvme_stays) {
    for (Rank rank = 0; rank < nodes.size(); ++rank) {
      bool left = false;
      for (size_t i = 0; i < nodes.size(); ++i) {
        const bool gone = (mask >> i & 1) != 0;
        for (const auto& [slot, file] : w[nodes[i]].files) {
          left = left || (!gone && file.record && file.record->id.rank == rank &&
                          file.record->id.step == kStep);
        }
        for (const auto& [id, copy] : w[nodes[i]].nvme.copies) {
          left = left || ((!gone || nvme_stays) && id.rank == rank && id.step == kStep);
        }
      }
      if (!left) {
        return false;
      }
    }
    return true;
  }
};

TEST_P(LossMatrixTest, ItIsRestoredIfAndOnlyIfThatWasPromised) {
  for (uint32_t mask = 1; mask < 16; ++mask) {
    SCOPED_TRACE(absl::StrCat("nodes ", mask));
    ASSERT_NO_FATAL_FAILURE(Run(mask));
  }
}

INSTANTIATE_TEST_SUITE_P(All, LossMatrixTest,
                         ::testing::Combine(::testing::Values(0u, 1u, 2u),
                                            ::testing::Values(Lost::kMemoryWithoutNvme,
                                                              Lost::kMemory,
                                                              Lost::kMemoryAndNvme)));

}  // namespace
}  // namespace holdfast::testing
