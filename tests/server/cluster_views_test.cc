// What people see of a job over several nodes, and the restore point that they set: from any node,
// through the host (docs/ckptctl.md: jobs, explain, where, restore).
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "server/router.h"
#include "tests/server/cluster_world.h"

namespace holdfast::testing {
namespace {

using std::chrono::seconds;
using Texts = std::vector<std::string>;

// Node c hosts the job; its ranks are on a and b.
class ClusterViews : public ::testing::Test {
 protected:
  explicit ClusterViews(std::function<void(v1::DaemonConfig&)> adjust = nullptr)
      : w({"a", "b", "c"}, std::move(adjust)) {
    TestClient visitor = w["c"].Connect(99);
    EXPECT_TRUE(visitor.Join("job", 0, 1));
    EXPECT_EQ(w.HostOf("job"), "c");
    w["c"].Kill(visitor);
    w.Run();
    r0 = std::make_unique<TestClient>(w["a"].Connect(100));
    r1 = std::make_unique<TestClient>(w["b"].Connect(100));
    EXPECT_TRUE(r0->Join("job", 0, 2));
    EXPECT_TRUE(r1->Join("job", 1, 2));
    EXPECT_EQ(r0->joined().attempt(), 2u);
  }
  void Save(Step step) {
    ASSERT_TRUE(r0->Save(step));
    ASSERT_TRUE(r1->Save(step));
    ASSERT_TRUE(r0->Committed(step));
  }
  template <typename Reply, typename Request>
  Reply AskFrom(const std::string& node, Request request) {
    CoreHarness& h = w[node];
    const AdminToken token = h.next_token++;
    h.Feed(AdminRequest{token, Caller{{1, 1}, 0, 0}, std::move(request)});
    w.Run();
    const auto reply = h.admin_replies.find(token);
    if (reply == h.admin_replies.end() || !reply->second.status.ok()) {
      ADD_FAILURE() << (reply == h.admin_replies.end() ? "not answered"
                                                       : reply->second.status.ToString());
      return {};
    }
    return std::get<Reply>(reply->second.reply);
  }
  v1::ExplainReply Explain(Step step, const std::string& node = "a") {
    v1::ExplainRequest request;
    request.set_job("job");
    request.set_step(step);
    return AskFrom<v1::ExplainReply>(node, request);
  }
  static Texts Reasons(const v1::ExplainReply& reply) {
    return reply.steps_size() == 1
               ? Texts(reply.steps(0).reasons().begin(), reply.steps(0).reasons().end())
               : Texts{};
  }
  std::string SetPoint(Step step, const std::string& node = "a") {
    v1::SetRestorePointRequest request;
    request.set_job("job");
    request.set_step(step);
    return AskFrom<v1::SetRestorePointReply>(node, request).text();
  }
  std::vector<Step> InMemory(const std::string& node) {
    std::vector<Step> steps;
    for (const auto& [id, file] : w[node].files) {
      if (file.record) {
        steps.push_back(file.record->id.step);
      }
    }
    std::sort(steps.begin(), steps.end());
    return steps;
  }

  ClusterWorld w;
  std::unique_ptr<TestClient> r0;
  std::unique_ptr<TestClient> r1;
};

class ClusterViewsWithRemote : public ClusterViews {
 protected:
  ClusterViewsWithRemote()
      : ClusterViews([](v1::DaemonConfig& config) {
          config.mutable_remote()->set_dir("/remote");
          config.mutable_policy()->mutable_remote()->set_keep_last(10);
        }) {}
};

TEST_F(ClusterViews, TheStatusNamesTheHostAndWhereTheRanksAre) {
  Save(10);
  for (const std::string node : {"a", "b", "c"}) {
    const auto status = AskFrom<v1::GetStatusReply>(node, v1::GetStatusRequest());
    ASSERT_EQ(status.jobs_size(), 1);
    EXPECT_EQ(status.jobs(0).host(), "c");
    EXPECT_EQ(status.jobs(0).nodes(), 2u);
    EXPECT_EQ(Texts(status.jobs(0).node_names().begin(), status.jobs(0).node_names().end()),
              (Texts{"a", "b"}));
    EXPECT_EQ(status.jobs(0).ranks_alive(), 2u);
  }
}

// Of a job that another node hosts: what is said of a daemon is said of the one that was asked.
TEST_F(ClusterViews, TheStatusOfAJobTellsOfTheDaemonThatWasAsked) {
  Save(10);
  for (const std::string node : {"a", "b", "c"}) {
    v1::GetStatusRequest request;
    request.set_job("job");
    const auto status = AskFrom<v1::GetStatusReply>(node, request);
    ASSERT_EQ(status.jobs_size(), 1);
    EXPECT_EQ(status.jobs(0).host(), "c");
    EXPECT_EQ(status.daemon().node_name(), node);
    EXPECT_EQ(status.daemon().slots() > 0, node != "c") << node;  // where the ranks are
  }
}

// What cannot be reached is waited for a moment, and named with the cause.
TEST_F(ClusterViews, ANodeThatCannotBeReachedIsNotWaitedForLong) {
  w.Kill("b");
  w.Tell("a", PeerTold{PeerProblem{"b", "b:1: connection refused"}});
  CoreHarness& a = w["a"];
  const auto ask = [&](auto request) {
    const AdminToken token = a.next_token++;
    a.Feed(AdminRequest{token, Caller{{1, 1}, 0, 0}, std::move(request)});
    w.Run();
    return token;
  };
  const AdminToken all = ask(v1::GetStatusRequest());
  v1::ReadShardRequest read;
  read.set_job("job");
  read.set_node("b");
  const AdminToken one = ask(read);
  EXPECT_EQ(a.admin_replies.count(all) + a.admin_replies.count(one), 0u);
  w.Advance(kUnreachedWait);
  ASSERT_EQ(a.admin_replies.count(all) + a.admin_replies.count(one), 2u);
  const auto& status = std::get<v1::GetStatusReply>(a.admin_replies.at(all).reply);
  EXPECT_EQ(status.jobs_size(), 1) << "those of the others are shown";
  ASSERT_EQ(status.daemon().problems_size(), 1);
  EXPECT_EQ(status.daemon().problems(0),
            "the jobs of b are not shown: it cannot be reached (b:1: connection refused)");
  EXPECT_EQ(a.admin_replies.at(one).status.message(),
            "b cannot be reached (b:1: connection refused)");
}

// The same when that is found out later, of one or of all others.
TEST_F(ClusterViews, NodesThatTurnOutNotToBeReachedAreGivenUp) {
  w.Cut("a", "b");
  w.Cut("a", "c");
  CoreHarness& a = w["a"];
  w.Tell("a", PeerTold{PeerProblem{"b", ""}});  // there is none any more
  w.Tell("a", PeerTold{PeerProblem{"c", ""}});
  const AdminToken all = a.next_token++;
  a.Feed(AdminRequest{all, Caller{{1, 1}, 0, 0}, v1::GetStatusRequest()});
  w.Advance(kUnreachedWait);
  EXPECT_EQ(a.admin_replies.count(all), 0u);
  w.Tell("a", PeerTold{PeerProblem{"b", "refused"}});
  EXPECT_EQ(a.admin_replies.count(all), 0u) << "c may answer";
  w.Tell("a", PeerTold{PeerProblem{"c", "refused, too"}});
  ASSERT_EQ(a.admin_replies.count(all), 1u);
  const auto& status = std::get<v1::GetStatusReply>(a.admin_replies.at(all).reply);
  EXPECT_EQ(Texts(status.daemon().problems().begin(), status.daemon().problems().end()),
            (Texts{"the jobs of b are not shown: it cannot be reached (refused)",
                   "the jobs of c are not shown: it cannot be reached (refused, too)"}));
}

// One that is about to be reached again is.
TEST_F(ClusterViews, ANodeThatIsReachedInTimeAnswers) {
  w.Cut("a", "b");
  w.Tell("a", PeerTold{PeerProblem{"b", "b:1: connection refused"}});
  CoreHarness& a = w["a"];
  const AdminToken all = a.next_token++;
  a.Feed(AdminRequest{all, Caller{{1, 1}, 0, 0}, v1::GetStatusRequest()});
  w.Heal("a", "b");
  ASSERT_EQ(a.admin_replies.count(all), 1u);
  EXPECT_EQ(std::get<v1::GetStatusReply>(a.admin_replies.at(all).reply).daemon().problems_size(),
            0);
}

TEST_F(ClusterViews, AHostThatDoesNotAnswerIsNamedWithTheCause) {
  w.Cut("a", "c");
  w.Tell("a", PeerTold{PeerProblem{"c", "c:1: connection refused"}});
  CoreHarness& a = w["a"];
  v1::GetStatusRequest request;
  request.set_job("job");
  const AdminToken token = a.next_token++;
  a.Feed(AdminRequest{token, Caller{{1, 1}, 0, 0}, request});
  w.Advance(kUnreachedWait);
  EXPECT_EQ(a.admin_replies.count(token), 0u) << "another node may take its place";
  w.Advance(kForwardDeadline);
  ASSERT_EQ(a.admin_replies.count(token), 1u);
  EXPECT_EQ(a.admin_replies.at(token).status.message(),
            "job 'job': its host, c, cannot be reached (c:1: connection refused); if it is gone, "
            "another node takes its place within seconds: try again");
}

TEST_F(ClusterViews, AShardOnANodeThatIsGoneIsNamed) {
  Save(10);
  EXPECT_EQ(Reasons(Explain(10)), (Texts{"whole: memory for 2 ranks", "memory: all of 2 shards"}));
  const MonotonicTime killed = w["c"].now;
  w.Kill("b");
  w.Advance(2 * kLease);
  const std::string since = FormatDuration(w["c"].now - killed);
  const v1::ExplainReply reply = Explain(10);
  EXPECT_EQ(Reasons(reply),
            (Texts{"cannot be restored: no tier has a good copy of 1 of 2 shards",
                   "rank 1: its shard is only in the memory of b, which is gone since " + since,
                   "memory: 1 of 2 shards good, 1 missing"}));
  EXPECT_EQ(reply.next_restore(),
            "none: no step on the line of descent can be used; the newest, step 10 of attempt 2: "
            "cannot be restored: no tier has a good copy of 1 of 2 shards");

  v1::WhereRequest where;
  where.set_job("job");
  where.set_step(10);
  const auto copies = AskFrom<v1::WhereReply>("a", where);
  ASSERT_EQ(copies.copies_size(), 2);
  EXPECT_EQ(copies.copies(0).node(), "a");
  EXPECT_EQ(copies.copies(0).state(), "good");
  EXPECT_EQ(copies.copies(1).node(), "b");
  EXPECT_EQ(copies.copies(1).state(), "out of reach: the node is gone since " + since);

  w.Start("b");
  EXPECT_EQ(Reasons(Explain(10)), (Texts{"whole: memory for 2 ranks", "memory: all of 2 shards"}));
}

TEST_F(ClusterViews, ARankThatMovedReadsTheCopyThatItLeft) {
  // (What is read ahead of the restore comes too late.)
  w["c"].delay = [](const Action& action) { return std::holds_alternative<FetchShard>(action); };
  Save(10);
  w["a"].Kill(*r0);
  w["b"].Kill(*r1);
  w.Run();
  TestClient again = w["a"].Connect(200);
  TestClient moved = w["c"].Connect(200);
  ASSERT_TRUE(again.Join("job", 0, 2));
  ASSERT_TRUE(moved.Join("job", 1, 2));
  v1::ExplainReply reply = Explain(10);
  EXPECT_EQ(Reasons(reply),
            (Texts{"whole: memory for 1 rank, peer for 1 rank", "memory: all of 2 shards"}));
  ASSERT_EQ(reply.steps_size(), 1);
  EXPECT_TRUE(reply.steps(0).restorable());

  const MonotonicTime killed = w["c"].now;
  w.Kill("b");
  w.Advance(2 * kLease);
  reply = Explain(10);
  EXPECT_EQ(
      Reasons(reply),
      (Texts{"cannot be restored: no tier has a good copy of 1 of 2 shards",
             absl::StrCat("rank 1: its shard is only in the memory of b, which is gone since ",
                          FormatDuration(w["c"].now - killed), "; the rank runs on c now"),
             "memory: 1 of 2 shards good, 1 missing"}));
}

TEST_F(ClusterViewsWithRemote, ARankThatMovedTakesItsShardFromAPeerElseFromRemote) {
  // (What is read ahead of the restore comes too late.)
  w["c"].delay = [](const Action& action) { return std::holds_alternative<FetchShard>(action); };
  Save(10);
  w["a"].Kill(*r0);
  w["b"].Kill(*r1);
  w.Run();
  TestClient again = w["a"].Connect(200);
  TestClient moved = w["c"].Connect(200);
  ASSERT_TRUE(again.Join("job", 0, 2));
  ASSERT_TRUE(moved.Join("job", 1, 2));
  EXPECT_EQ(Explain(10).next_restore(), "step 10 of attempt 2: memory for 1 rank, peer for 1 rank");
  w.Kill("b");
  w.Advance(2 * kLease);
  EXPECT_EQ(Explain(10).next_restore(),
            "step 10 of attempt 2: memory for 1 rank, remote for 1 rank");
}

TEST_F(ClusterViewsWithRemote, TheRestorePointIsBroughtIntoMemoryWhereTheRanksWere) {
  Save(10);
  Save(20);
  w["a"].Kill(*r0);
  w["b"].Kill(*r1);
  w.Run();
  w.Start("a", true);
  w.Start("b", true);
  ASSERT_EQ(InMemory("a"), std::vector<Step>{});
  EXPECT_EQ(SetPoint(10, "b"),
            "the next restore of the job uses step 10 of attempt 2; it is being brought into "
            "memory on 2 nodes; 0 of 2 ranks have it there; ckptctl explain job shows how far it "
            "is");
  EXPECT_EQ(InMemory("a"), std::vector<Step>{10});
  EXPECT_EQ(InMemory("b"), std::vector<Step>{10});
  EXPECT_EQ(InMemory("c"), std::vector<Step>{});
  EXPECT_EQ(Explain(10).prefetch().text(), "all ranks have it in memory");
}

TEST_F(ClusterViewsWithRemote, ANodeThatIsBackGetsItsShardsThen) {
  Save(10);
  Save(20);
  w["a"].Kill(*r0);
  w["b"].Kill(*r1);
  w.Run();
  w.Start("a", true);
  w.Kill("b");
  EXPECT_EQ(SetPoint(10),
            "the next restore of the job uses step 10 of attempt 2; it is being brought into "
            "memory on 1 node; 0 of 2 ranks have it there; rank 1: b is out of reach; ckptctl "
            "explain job shows how far it is");
  EXPECT_EQ(InMemory("a"), std::vector<Step>{10});
  w.Start("b", true);
  EXPECT_EQ(InMemory("b"), std::vector<Step>{10});
}

TEST_F(ClusterViewsWithRemote, ItIsGivenUpOnAllNodesWhenItIsTakenBack) {
  Save(10);
  Save(20);
  w["a"].Kill(*r0);
  w["b"].Kill(*r1);
  w.Run();
  for (const std::string node : {"a", "b"}) {
    w.Start(node, true);
    w[node].delay = [](const Action& action) { return std::holds_alternative<FetchShard>(action); };
  }
  SetPoint(10);
  ASSERT_EQ(w["a"].delayed.size(), 1u);
  ASSERT_EQ(w["b"].delayed.size(), 1u);
  v1::SetRestorePointRequest clear;
  clear.set_job("job");
  clear.set_clear(true);
  AskFrom<v1::SetRestorePointReply>("a", clear);
  EXPECT_EQ(w["a"].delayed.size(), 0u);
  EXPECT_EQ(w["b"].delayed.size(), 0u);
}

// What nodes have begun needs no host, and is not begun again by the next one.
TEST_F(ClusterViewsWithRemote, WhatNodesHaveBegunOutlivesTheHost) {
  Save(10);
  Save(20);
  w["a"].Kill(*r0);
  w["b"].Kill(*r1);
  w.Run();
  w.Start("a", true);
  w.Start("b", true);
  size_t asked = 0;
  for (const std::string node : {"a", "b"}) {
    w[node].delay = [&asked](const Action& action) {
      const bool fetch = std::holds_alternative<FetchShard>(action);
      asked += fetch ? 1 : 0;
      return fetch;
    };
  }
  SetPoint(10);
  ASSERT_EQ(asked, 2u);
  w.Kill("c");
  w.Advance(2 * kLease);
  ASSERT_NE(w.HostOf("job"), "");
  for (const std::string node : {"a", "b"}) {
    w[node].PerformDelayed();
  }
  w.Run();
  EXPECT_EQ(asked, 2u);
  EXPECT_EQ(InMemory("a"), std::vector<Step>{10});
  EXPECT_EQ(InMemory("b"), std::vector<Step>{10});
}

}  // namespace
}  // namespace holdfast::testing
