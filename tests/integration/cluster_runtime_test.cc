// The daemon's part in a cluster, without the daemon: what membership and channels tell, what they
// are told, and how they end.
#include "server/runtime/cluster_runtime.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <typeindex>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/membership/cluster_config.h"
#include "tests/integration/etcd_server.h"

namespace holdfast {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Stands for the reactor and the core: takes what is posted at once, or when it is let go on.
class Core {
 public:
  void Post(Event event, const std::function<void()>& taken) EXCLUDES(mutex_) {
    {
      MutexLock lock(mutex_);
      events_.push_back(std::move(event));
      untaken_.push_back(taken);
      untaken_most_ = std::max(untaken_most_, untaken_.size());
      changed_.NotifyAll();
    }
    TakeAll();
  }
  // From the next one on.
  void Hold() EXCLUDES(mutex_) {
    EXPECT_TRUE(Await([&]() REQUIRES(mutex_) {
      held_ = untaken_.empty();
      return held_;
    }));
  }
  void GoOn() EXCLUDES(mutex_) {
    {
      MutexLock lock(mutex_);
      held_ = false;
    }
    TakeAll();
  }
  bool AwaitUntaken(size_t count) EXCLUDES(mutex_) {
    return Await([&]() REQUIRES(mutex_) { return untaken_.size() >= count; });
  }
  size_t untaken_most() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return untaken_most_;
  }

  // The next one of this kind, behind the one that was found last, for which `so` holds.
  template <typename Told, typename Of>
  std::optional<Of> Next(const std::function<bool(const Of&)>& so) EXCLUDES(mutex_) {
    std::optional<Of> found;
    Await([&]() REQUIRES(mutex_) {
      for (size_t& i = seen_[typeid(Of)]; i < events_.size();) {
        const auto* told = std::get_if<Told>(&events_[i++]);
        const Of* event = told == nullptr ? nullptr : std::get_if<Of>(&told->event);
        if (event != nullptr && so(*event)) {
          found = *event;
          return true;
        }
      }
      return false;
    });
    return found;
  }
  template <typename Of>
  std::optional<Of> Membership(const std::function<bool(const Of&)>& so = [](const Of&) {
    return true;
  }) {
    return Next<MembershipTold, Of>(so);
  }
  template <typename Of>
  std::optional<Of> Peer(const std::function<bool(const Of&)>& so = [](const Of&) {
    return true;
  }) {
    return Next<PeerTold, Of>(so);
  }

 private:
  void TakeAll() EXCLUDES(mutex_) {
    std::deque<std::function<void()>> taken;
    {
      MutexLock lock(mutex_);
      if (held_) {
        return;
      }
      taken.swap(untaken_);
      changed_.NotifyAll();
    }
    for (const std::function<void()>& one : taken) {
      one();
    }
  }
  bool Await(const std::function<bool()>& so) EXCLUDES(mutex_) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    MutexLock lock(mutex_);
    while (!so()) {
      if (!changed_.WaitUntil(mutex_, until)) {
        return false;
      }
    }
    return true;
  }

  Mutex mutex_;
  CondVar changed_;
  std::vector<Event> events_ GUARDED_BY(mutex_);
  std::map<std::type_index, size_t> seen_ GUARDED_BY(mutex_);
  std::deque<std::function<void()>> untaken_ GUARDED_BY(mutex_);
  size_t untaken_most_ GUARDED_BY(mutex_) = 0;
  bool held_ GUARDED_BY(mutex_) = false;
};

// The static list's addresses are never used: the test says which they are (ChangePeers), as the
// core does.
v1::ClusterConfig ListOfAAndB() {
  v1::ClusterConfig cluster;
  for (const char* name : {"a", "b"}) {
    v1::ClusterMember* member = cluster.add_members();
    member->set_name(name);
    member->set_address(absl::StrCat("127.0.0.1:", cluster.members_size()));
  }
  return cluster;
}

v1::ClusterConfig WithEtcd(const EtcdServer& etcd) {
  v1::ClusterConfig cluster;
  cluster.set_advertise_address("127.0.0.1:0");
  cluster.mutable_etcd()->add_endpoints(etcd.endpoint());
  cluster.mutable_etcd()->set_lease_ttl_ms(3'600'000);  // nobody goes because of it
  v1::Label* label = cluster.add_labels();
  label->set_name("rack");
  label->set_value("r7");
  return cluster;
}

// A node that is dead is one soon.
LinkLimits Brisk() {
  return {.deadline = std::chrono::milliseconds(600),
          .keep_alive = std::chrono::milliseconds(50),
          .retry_min = std::chrono::milliseconds(5),
          .retry_max = std::chrono::milliseconds(50)};
}

// Channels that do not end by time.
LinkLimits Patient() {
  LinkLimits limits;
  limits.deadline = std::chrono::minutes(5);
  return limits;
}

class ANode {
 public:
  ANode(const std::string& name, v1::ClusterConfig cluster, const LinkLimits& limits = {}) {
    cluster.set_listen_address("127.0.0.1:0");
    v1::DaemonConfig config;
    config.set_node_name(name);
    config.set_state_dir(state_.path());
    config.mutable_memory()->set_bytes_max(4096);
    CompleteClusterConfig(name, &cluster);
    *config.mutable_cluster() = cluster;
    runtime_ = std::make_unique<ClusterRuntime>(config, Env::System(), limits);
    const absl::Status started =
        runtime_->Start([this](Event event, const std::function<void()>& taken) {
          core.Post(std::move(event), taken);
        });
    EXPECT_TRUE(started.ok()) << started;
  }
  ~ANode() { End(); }
  void End() { runtime_ = nullptr; }
  // Until it has ended; how long it took is kPatience's to limit.
  bool Stop() {
    struct Done {
      Mutex mutex;
      CondVar changed;
      bool done GUARDED_BY(mutex) = false;
    };
    const auto done = std::make_shared<Done>();
    runtime_->Stop([done] {
      MutexLock lock(done->mutex);
      done->done = true;
      done->changed.NotifyAll();
    });
    const auto until = std::chrono::steady_clock::now() + kPatience;
    MutexLock lock(done->mutex);
    while (!done->done) {
      if (!done->changed.WaitUntil(done->mutex, until)) {
        return false;
      }
    }
    return true;
  }
  ClusterRuntime* operator->() { return runtime_.get(); }
  std::string address() const { return runtime_->address(); }

  Core core;

 private:
  TemporaryDirectory state_;
  std::unique_ptr<ClusterRuntime> runtime_;
};

void Acquaint(ANode& a, ANode& b) {
  a->Perform(ChangePeers{{{"b", {b.address()}}}});
  b->Perform(ChangePeers{{{"a", {a.address()}}}});
}

PeerChannel Reach(ANode& from, const std::string& to) {
  from->Perform(ConnectPeer{to});
  const auto reached =
      from.core.Peer<PeerReached>([&](const PeerReached& event) { return event.node == to; });
  EXPECT_TRUE(reached) << to << " is not reached";
  return reached ? reached->channel : 0;
}

TEST(ClusterRuntime, NodesOfAListSpeakWithEachOther) {
  ANode a("a", ListOfAAndB());
  ANode b("b", ListOfAAndB());
  EXPECT_EQ(a.core.Membership<MembersAre>()->members.size(), 2u);
  EXPECT_TRUE(a.core.Membership<LeaseHolds>());
  EXPECT_TRUE(b.core.Membership<LeaseHolds>());
  Acquaint(a, b);
  a->Perform(SayToPeer{"b", Reach(a, "b"), "from a"});
  b->Perform(SayToPeer{"a", Reach(b, "a"), "from b"});
  const auto at_b = b.core.Peer<PeerSpoke>();
  ASSERT_TRUE(at_b);
  EXPECT_EQ(at_b->node, "a");
  EXPECT_EQ(at_b->message, "from a");
  const auto at_a = a.core.Peer<PeerSpoke>();
  ASSERT_TRUE(at_a);
  EXPECT_EQ(at_a->message, "from b");
  const ClusterView view = a->View();
  EXPECT_TRUE(view.member);
  EXPECT_EQ(view.members, 2u);
  EXPECT_EQ(view.reached, 1u);
  EXPECT_THAT(view.problems, IsEmpty());
}

TEST(ClusterRuntime, JobsAreCampaignedForStoredAndForgotten) {
  ANode a("a", ListOfAAndB());
  a->Perform(WatchHost{"x"});
  EXPECT_TRUE(a.core.Membership<NoHost>());
  a->Perform(CampaignFor{"x", 41});
  const auto elected = a.core.Membership<Elected>();
  ASSERT_TRUE(elected);
  EXPECT_GT(elected->epoch, 41u);
  EXPECT_EQ(a.core.Membership<HostIs>()->host.epoch, elected->epoch);
  a->Perform(StoreAgreedState{"x", elected->epoch, 3, "state"});
  EXPECT_EQ(a.core.Membership<StateStored>()->version, 3u);
  a->Perform(ForgetAgreedState{"x", elected->epoch});
  EXPECT_TRUE(a.core.Membership<JobForgotten>()->forgotten);
  EXPECT_TRUE(a.core.Membership<NoHost>());
  a->Perform(CampaignFor{"x", 0});
  ASSERT_TRUE(a.core.Membership<Elected>());
  a->Perform(ResignFrom{"x"});
  EXPECT_TRUE(a.core.Membership<NoHost>());
  a->Perform(UnwatchHost{"x"});
}

TEST(ClusterRuntime, ANodeThatIsAwayIsAProblemUntilItIsBackOrNoMember) {
  ANode a("a", ListOfAAndB(), Brisk());
  {
    ANode b("b", ListOfAAndB(), Brisk());
    Acquaint(a, b);
    Reach(a, "b");
  }
  ASSERT_TRUE(a.core.Peer<PeerLost>());
  ClusterView view = a->View();
  EXPECT_EQ(view.reached, 0u);
  EXPECT_THAT(view.problems, ElementsAre(HasSubstr("cluster: node 'b' is not reached: ")));
  ANode again("b", ListOfAAndB(), Brisk());
  Acquaint(a, again);
  ASSERT_TRUE(a.core.Peer<PeerReached>());
  view = a->View();
  EXPECT_EQ(view.reached, 1u);
  EXPECT_THAT(view.problems, IsEmpty());
  again.End();
  ASSERT_TRUE(a.core.Peer<PeerLost>());
  EXPECT_FALSE(a->View().problems.empty());
  a->Perform(ChangePeers{{}, {"b"}});
  EXPECT_THAT(a->View().problems, IsEmpty());
}

TEST(ClusterRuntime, ManyNodesThatAreAwayAreAFewLines) {
  ANode a("a", ListOfAAndB());
  const std::string nobody = absl::StrCat("127.0.0.1:", FreePort());
  ChangePeers peers;
  for (int i = 10; i < 30; ++i) {
    peers.up[absl::StrCat("n", i)] = {nobody};
  }
  a->Perform(peers);
  for (const auto& [node, at] : peers.up) {
    a->Perform(ConnectPeer{node});
  }
  std::set<std::string> away;
  while (away.size() < peers.up.size()) {
    const auto problem = a.core.Peer<PeerProblem>();
    ASSERT_TRUE(problem);
    away.insert(problem->node);
  }
  const std::vector<std::string> problems = a->View().problems;
  ASSERT_EQ(problems.size(), 9u);
  EXPECT_THAT(problems.front(), HasSubstr("node 'n10' is not reached: "));
  EXPECT_EQ(problems.back(), "cluster: 12 more nodes are not reached");
}

TEST(ClusterRuntime, WhatPeersSayWaitsForTheCore) {
  ANode a("a", ListOfAAndB(), Patient());
  ANode b("b", ListOfAAndB());
  EXPECT_TRUE(b.core.Membership<LeaseHolds>());  // the last that is told unasked
  Acquaint(a, b);
  const PeerChannel channel = Reach(a, "b");
  ASSERT_TRUE(b.core.Peer<PeerBegan>());
  b.core.Hold();
  constexpr size_t kSaid = 3 * ClusterRuntime::kUntakenMessagesMax;
  for (size_t i = 0; i < kSaid; ++i) {
    a->Perform(SayToPeer{"b", channel, absl::StrCat(i)});
  }
  ASSERT_TRUE(b.core.AwaitUntaken(ClusterRuntime::kUntakenMessagesMax));
  b.core.GoOn();
  for (size_t i = 0; i < kSaid; ++i) {
    const auto spoke = b.core.Peer<PeerSpoke>();
    ASSERT_TRUE(spoke);
    ASSERT_EQ(spoke->message, absl::StrCat(i));
  }
  EXPECT_EQ(b.core.untaken_most(), ClusterRuntime::kUntakenMessagesMax);
}

TEST(ClusterRuntime, FewLargeMessagesWaitToo) {
  ANode a("a", ListOfAAndB(), Patient());
  ANode b("b", ListOfAAndB(), Patient());
  EXPECT_TRUE(b.core.Membership<LeaseHolds>());
  Acquaint(a, b);
  const PeerChannel channel = Reach(a, "b");
  const PeerChannel back = Reach(b, "a");
  ASSERT_TRUE(b.core.Peer<PeerBegan>());
  b.core.Hold();
  constexpr size_t kMax = 16;
  constexpr size_t kSaid = 2 * kMax;
  const std::string large(ClusterRuntime::kUntakenBytesMax / kMax, 'x');
  for (size_t i = 0; i < kSaid; ++i) {
    a->Perform(SayToPeer{"b", channel, large});
  }
  ASSERT_TRUE(b.core.AwaitUntaken(kMax));
  // While so much goes the other way, more would have come.
  for (int i = 0; i < 300; ++i) {
    b->Perform(SayToPeer{"a", back, "tick"});
    ASSERT_TRUE(a.core.Peer<PeerSpoke>());
  }
  EXPECT_EQ(b.core.untaken_most(), kMax);
  b.core.GoOn();
  for (size_t i = 0; i < kSaid; ++i) {
    ASSERT_TRUE(b.core.Peer<PeerSpoke>());
  }
}

// The reactor has stopped, and takes nothing any more: an observer that waits for it holds nobody.
TEST(ClusterRuntime, EndsWhileMessagesAreUnderWay) {
  for (const bool cleanly : {true, false, true}) {
    ANode a("a", ListOfAAndB());
    ANode b("b", ListOfAAndB());
    EXPECT_TRUE(b.core.Membership<LeaseHolds>());
    Acquaint(a, b);
    const PeerChannel to_b = Reach(a, "b");
    const PeerChannel to_a = Reach(b, "a");
    b.core.Hold();
    for (size_t i = 0; i < 8 * ClusterRuntime::kUntakenMessagesMax; ++i) {
      a->Perform(SayToPeer{"b", to_b, "to b"});
      b->Perform(SayToPeer{"a", to_a, "to a"});
    }
    ASSERT_TRUE(b.core.AwaitUntaken(ClusterRuntime::kUntakenMessagesMax));
    if (cleanly) {
      EXPECT_TRUE(b.Stop());
      b->Perform(SayToPeer{"a", to_a, "dropped"});
      b->Perform(CampaignFor{"x", 0});
    }
    b.End();
    EXPECT_TRUE(a.Stop());
  }
}

TEST(ClusterRuntime, NodesOfAnEtcdClusterComeSpeakAndLeave) {
  EtcdServer etcd;
  ASSERT_TRUE(etcd.Start());
  ANode a("a", WithEtcd(etcd));
  EXPECT_TRUE(a.core.Membership<LeaseHolds>());
  ANode b("b", WithEtcd(etcd));
  const auto up =
      a.core.Membership<MemberUp>([](const MemberUp& event) { return event.member.name == "b"; });
  ASSERT_TRUE(up);
  EXPECT_EQ(up->member.address, b.address());
  EXPECT_EQ(up->member.labels, (std::vector<NodeLabel>{{"rack", "r7"}}));
  EXPECT_EQ(up->member.capacity_bytes, 4096u);
  EXPECT_FALSE(up->member.version.empty());
  ASSERT_NE(up->member.incarnation, 0u);
  std::map<std::string, PeerAddress> peers;
  const auto members = b.core.Membership<MembersAre>();
  ASSERT_TRUE(members);
  for (const NodeInfo& member : members->members) {
    peers[member.name] = {member.address, member.incarnation};
  }
  ASSERT_TRUE(peers.contains("a"));
  ASSERT_NE(peers["a"].incarnation, 0u);
  // Each asks for the start of the other that membership has told.
  b->Perform(ChangePeers{peers});
  a->Perform(ChangePeers{{{"b", {up->member.address, up->member.incarnation}}}});
  a->Perform(SayToPeer{"b", Reach(a, "b"), "hello"});
  EXPECT_EQ(b.core.Peer<PeerSpoke>()->message, "hello");
  Reach(b, "a");
  b->Perform(CampaignFor{"x", 0});
  ASSERT_TRUE(b.core.Membership<Elected>());
  // Its name and its jobs are free at once: its lease would last for an hour.
  EXPECT_TRUE(b.Stop());
  EXPECT_TRUE(b.core.Membership<Deposed>());
  EXPECT_TRUE(b.core.Membership<Left>());
  const auto gone = a.core.Membership<MemberGone>();
  ASSERT_TRUE(gone);
  EXPECT_EQ(gone->name, "b");
  a->Perform(CampaignFor{"x", 0});
  EXPECT_TRUE(a.core.Membership<Elected>());
  EXPECT_EQ(a->View().members, 1u);
}

TEST(ClusterRuntime, EtcdIsAwayAtFirstAndWhenItEnds) {
  EtcdServer etcd;
  ANode a("a", WithEtcd(etcd));
  ASSERT_TRUE(a.core.Membership<MembershipProblem>());
  ClusterView view = a->View();
  EXPECT_FALSE(view.member);
  EXPECT_THAT(view.problems, ElementsAre(HasSubstr("cluster: etcd at " + etcd.endpoint())));
  ASSERT_TRUE(etcd.Start());
  ASSERT_TRUE(a.core.Membership<MembershipProblem>(
      [](const MembershipProblem& event) { return event.text.empty(); }));
  ASSERT_TRUE(a.core.Membership<LeaseHolds>());
  view = a->View();
  EXPECT_TRUE(view.member);
  EXPECT_THAT(view.problems, IsEmpty());
  etcd.Kill();
  EXPECT_TRUE(a.Stop()) << "its leave is not waited for";
}

TEST(ClusterRuntime, WithTlsOnlyNodesWithACertificateAreHeard) {
  const TemporaryDirectory directory;
  const TestCertificates certificates(directory.path());
  ASSERT_TRUE(certificates.good);
  v1::ClusterConfig secure = ListOfAAndB();
  secure.mutable_tls()->set_ca_file(certificates.ca);
  secure.mutable_tls()->set_cert_file(certificates.client_cert);
  secure.mutable_tls()->set_key_file(certificates.client_key);
  ANode a("a", secure);
  ANode b("b", secure);
  Acquaint(a, b);
  a->Perform(SayToPeer{"b", Reach(a, "b"), "secret"});
  EXPECT_EQ(b.core.Peer<PeerSpoke>()->message, "secret");
  ANode plain("b", ListOfAAndB());
  plain->Perform(ChangePeers{{{"a", {a.address()}}}});
  plain->Perform(ConnectPeer{"a"});
  EXPECT_TRUE(plain.core.Peer<PeerProblem>());
  EXPECT_EQ(plain->View().reached, 0u);
}

TEST(ClusterRuntime, APortThatIsTakenIsAnErrorAtTheStart) {
  ANode a("a", ListOfAAndB());
  v1::DaemonConfig config;
  config.set_node_name("b");
  *config.mutable_cluster() = ListOfAAndB();
  config.mutable_cluster()->set_listen_address(a.address());
  CompleteClusterConfig("b", config.mutable_cluster());
  ClusterRuntime b(config, Env::System());
  const absl::Status started = b.Start([](const Event&, const std::function<void()>&) {});
  EXPECT_THAT(Message(started),
              HasSubstr("cluster: listen for other nodes on '" + a.address() + "'"));
}

TEST(ClusterRuntime, WhosePredecessorHangsListensElsewhereAndTellsSo) {
  EtcdServer etcd;
  ASSERT_TRUE(etcd.Start());
  // In the place of the one that hangs: it has the port.
  ANode a("a", WithEtcd(etcd));
  EXPECT_TRUE(a.core.Membership<LeaseHolds>());
  const ANode holder("b", ListOfAAndB());
  const TemporaryDirectory state;
  v1::DaemonConfig config;
  config.set_node_name("b");
  config.set_state_dir(state.path());
  *config.mutable_cluster() = WithEtcd(etcd);
  config.mutable_cluster()->set_listen_address(holder.address());
  config.mutable_cluster()->set_advertise_address(holder.address());
  CompleteClusterConfig("b", config.mutable_cluster());
  ClusterRuntime b(config, Env::System());
  const absl::Status started =
      b.Start([](const Event&, const std::function<void()>& taken) { taken(); }, true);
  ASSERT_TRUE(started.ok()) << started;
  EXPECT_NE(b.address(), holder.address());
  EXPECT_THAT(b.View().problems,
              Contains(AllOf(HasSubstr("keeps cluster.listen_address '" + holder.address()),
                             HasSubstr("listens at '" + b.address()))));
  const auto up =
      a.core.Membership<MemberUp>([](const MemberUp& event) { return event.member.name == "b"; });
  ASSERT_TRUE(up);
  EXPECT_EQ(up->member.address, b.address());
}

}  // namespace
}  // namespace holdfast
