// Daemons that speak with each other over loopback: what comes, in which order, and what is told
// when one of them stops, hangs, is another than it should be, or is none at all.
#include "server/peers/peer_network.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/env.h"
#include "base/mutex.h"
#include "base/unique_fd.h"
#include "holdfast/v1/peer.grpc.pb.h"
#include "server/peers/peer_inbox.h"
#include "tests/base/temporary_directory.h"
#include "tests/base/test_certificates.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::chrono::seconds kPatience(30);

std::string Text(const PeerEvent& event) {
  if (const auto* reached = std::get_if<PeerReached>(&event)) {
    return absl::StrCat("reached ", reached->node);
  }
  if (const auto* lost = std::get_if<PeerLost>(&event)) {
    return absl::StrCat("lost ", lost->node, ": ", lost->why);
  }
  if (const auto* problem = std::get_if<PeerProblem>(&event)) {
    return absl::StrCat("problem ", problem->node, ": ", problem->why);
  }
  if (const auto* began = std::get_if<PeerBegan>(&event)) {
    return absl::StrCat("began ", began->node);
  }
  if (const auto* silent = std::get_if<PeerSilent>(&event)) {
    return absl::StrCat("silent ", silent->node);
  }
  const auto& spoke = std::get<PeerSpoke>(event);
  return absl::StrCat(spoke.node, " says ", spoke.message);
}

// What an observer was told. It can be made to block, as one does that waits for a disk.
class Told {
 public:
  void Take(const PeerEvent& event) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (const auto* reached = std::get_if<PeerReached>(&event)) {
      channels_[reached->node] = reached->channel;
    }
    events_.push_back(event);
    changed_.NotifyAll();
    while (blocked_) {
      changed_.Wait(mutex_);
    }
  }
  void Block(bool blocked) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    blocked_ = blocked;
    changed_.NotifyAll();
  }
  // Until an event that begins so has come, behind those that were awaited before.
  std::string Await(const std::string& begins) EXCLUDES(mutex_) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    MutexLock lock(mutex_);
    while (true) {
      for (; seen_ < events_.size(); ++seen_) {
        if (const std::string text = Text(events_[seen_]); text.starts_with(begins)) {
          ++seen_;
          return text;
        }
      }
      if (!changed_.WaitUntil(mutex_, until)) {
        ADD_FAILURE() << "no '" << begins << "' has come, but: " << AllLocked();
        return "";
      }
    }
  }
  bool AwaitCount(size_t said) EXCLUDES(mutex_) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    MutexLock lock(mutex_);
    while (CountLocked() < said) {
      if (!changed_.WaitUntil(mutex_, until)) {
        ADD_FAILURE() << CountLocked() << " of " << said << " messages have come";
        return false;
      }
    }
    return true;
  }
  std::vector<std::string> Said(const std::string& by) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    std::vector<std::string> all;
    for (const PeerEvent& event : events_) {
      if (const auto* spoke = std::get_if<PeerSpoke>(&event); spoke && spoke->node == by) {
        all.push_back(spoke->message);
      }
    }
    return all;
  }
  size_t Count(const std::string& begins) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return static_cast<size_t>(
        std::count_if(events_.begin(), events_.end(),
                      [&](const PeerEvent& event) { return Text(event).starts_with(begins); }));
  }
  PeerChannel channel(const std::string& node) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return channels_[node];
  }

 private:
  size_t CountLocked() const REQUIRES(mutex_) {
    return static_cast<size_t>(std::count_if(
        events_.begin(), events_.end(),
        [](const PeerEvent& event) { return std::holds_alternative<PeerSpoke>(event); }));
  }
  std::string AllLocked() const REQUIRES(mutex_) {
    std::string all;
    for (const PeerEvent& event : events_) {
      absl::StrAppend(&all, "\n  ", Text(event).substr(0, 300));
    }
    return all;
  }

  Mutex mutex_;
  CondVar changed_;
  std::vector<PeerEvent> events_ GUARDED_BY(mutex_);
  size_t seen_ GUARDED_BY(mutex_) = 0;
  std::map<std::string, PeerChannel> channels_ GUARDED_BY(mutex_);
  bool blocked_ GUARDED_BY(mutex_) = false;
};

LinkLimits Brisk() {
  return {.deadline = std::chrono::milliseconds(600),
          .keep_alive = std::chrono::milliseconds(50),
          .retry_min = std::chrono::milliseconds(5),
          .retry_max = std::chrono::milliseconds(50)};
}

// Links that do not end by time, but by what the other side does.
LinkLimits Patient() {
  LinkLimits limits = Brisk();
  limits.deadline = std::chrono::minutes(5);
  return limits;
}

PeerNetworkOptions Options(const std::string& self, const LinkLimits& limits = Brisk()) {
  return {.self = self,
          .listen = "127.0.0.1:0",
          .limits = limits,
          .call_deadline = std::chrono::seconds(10)};
}

// For tests where somebody hangs.
PeerNetworkOptions ShortCalls(const std::string& self) {
  PeerNetworkOptions options = Options(self);
  options.call_deadline = options.limits.deadline;
  return options;
}

struct Node {
  explicit Node(const PeerNetworkOptions& options) : network(new PeerNetwork(options)) {
    const absl::Status started =
        network->Start([this](const PeerEvent& event) { told.Take(event); });
    EXPECT_TRUE(started.ok()) << started;
  }
  ~Node() {
    told.Block(false);
    network = nullptr;
  }
  const std::string& address() const { return network->address(); }
  void Say(const std::string& node, std::string message) {
    network->Say(node, told.channel(node), std::move(message));
  }
  void Reach(const std::string& node) {
    network->Connect(node);
    told.Await("reached " + node);
  }
  Told told;
  std::unique_ptr<PeerNetwork> network;
};

void Acquaint(Node& a, Node& b) {
  a.network->ChangePeers({{{"b", {b.address()}}}});
  b.network->ChangePeers({{{"a", {a.address()}}}});
}

// ---- The network itself ----

sockaddr_in Loopback(uint16_t port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

// A port that takes connections, as far as the kernel can tell.
class Listener {
 public:
  Listener() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in at = Loopback(0);
    socklen_t size = sizeof(at);
    EXPECT_EQ(::bind(fd_.get(), reinterpret_cast<sockaddr*>(&at), size), 0);
    EXPECT_EQ(::listen(fd_.get(), 16), 0);
    EXPECT_EQ(::getsockname(fd_.get(), reinterpret_cast<sockaddr*>(&at), &size), 0);
    address_ = absl::StrCat("127.0.0.1:", ntohs(at.sin_port));
  }
  int fd() const { return fd_.get(); }
  const std::string& address() const { return address_; }

 private:
  UniqueFd fd_;
  std::string address_;
};

// Carries bytes between whoever connects and one address; frozen, it keeps all connections and
// carries nothing.
class Proxy {
 public:
  explicit Proxy(const std::string& to)
      : port_(static_cast<uint16_t>(std::atoi(to.substr(to.rfind(':') + 1).c_str()))),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        thread_([this] { Run(); }) {}
  ~Proxy() {
    Set(stopping_, true);
    thread_.join();
  }
  const std::string& address() const { return listener_.address(); }
  void Freeze(bool frozen) { Set(frozen_, frozen); }
  // The connections that there are stay, and carry nothing; new ones do.
  void Abandon() { Set(abandon_, true); }

 private:
  void Set(std::atomic<bool>& what, bool to) {
    what = to;
    const uint64_t one = 1;
    EXPECT_EQ(::write(wake_.get(), &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
  }
  void Run() {
    std::vector<std::pair<UniqueFd, UniqueFd>> pairs;
    std::vector<std::pair<UniqueFd, UniqueFd>> abandoned;
    while (!stopping_) {
      if (abandon_.exchange(false)) {
        std::move(pairs.begin(), pairs.end(), std::back_inserter(abandoned));
        pairs.clear();
      }
      std::vector<pollfd> polled = {{wake_.get(), POLLIN, 0}};
      if (!frozen_) {
        polled.push_back({listener_.fd(), POLLIN, 0});
        for (const auto& [one, other] : pairs) {
          polled.push_back({one.get(), POLLIN, 0});
          polled.push_back({other.get(), POLLIN, 0});
        }
      }
      ::poll(polled.data(), polled.size(), -1);
      uint64_t count = 0;
      static_cast<void>(!::read(wake_.get(), &count, sizeof(count)));
      if (frozen_ || polled.size() == 1) {
        continue;
      }
      const size_t before = pairs.size();
      if (polled[1].revents != 0) {
        UniqueFd one(::accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC));
        UniqueFd other(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        const sockaddr_in to = Loopback(port_);
        if (::connect(other.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)) == 0) {
          pairs.emplace_back(std::move(one), std::move(other));
        }
      }
      std::vector<bool> ended(pairs.size());
      for (size_t i = 0; i < before; ++i) {
        const auto& [one, other] = pairs[i];
        ended[i] = (polled[2 + 2 * i].revents != 0 && !Carry(one.get(), other.get())) ||
                   (polled[3 + 2 * i].revents != 0 && !Carry(other.get(), one.get()));
      }
      for (size_t i = before; i-- > 0;) {
        if (ended[i]) {
          pairs.erase(pairs.begin() + static_cast<ptrdiff_t>(i));
        }
      }
    }
  }
  static bool Carry(int from, int to) {
    std::array<char, 65536> bytes;
    const ssize_t size = ::recv(from, bytes.data(), bytes.size(), MSG_DONTWAIT);
    return size > 0 && ::send(to, bytes.data(), static_cast<size_t>(size), MSG_NOSIGNAL) == size;
  }

  Listener listener_;
  const uint16_t port_;
  UniqueFd wake_;
  std::atomic<bool> frozen_{false};
  std::atomic<bool> abandon_{false};
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

// ---- What comes ----

TEST(PeerNetworkTest, AllThatIsSaidComesInOrderAndOnce) {
  constexpr int kThreads = 4;
  constexpr int kEach = 3000;
  std::map<std::string, std::unique_ptr<Node>> nodes;
  std::map<std::string, PeerAddress> addresses;
  for (const std::string name : {"a", "b", "c"}) {
    nodes[name] = std::make_unique<Node>(Options(name, Patient()));
    addresses[name] = {nodes[name]->address()};
  }
  for (auto& [name, node] : nodes) {
    node->network->ChangePeers({addresses});
    for (const auto& [other, address] : addresses) {
      node->network->Connect(other);
    }
  }
  std::vector<std::thread> speakers;
  for (auto& [name, node] : nodes) {
    for (const auto& [other, address] : addresses) {
      if (other != name) {
        node->told.Await("reached ");
      }
    }
    for (int thread = 0; thread < kThreads; ++thread) {
      speakers.emplace_back([&, thread, me = name, speaker = node.get()] {
        for (int i = 0; i < kEach; ++i) {
          for (const auto& [other, address] : addresses) {
            if (other != me) {
              speaker->Say(other, absl::StrCat(thread, " ", i));
            }
          }
        }
      });
    }
  }
  for (std::thread& speaker : speakers) {
    speaker.join();
  }
  for (auto& [name, node] : nodes) {
    ASSERT_TRUE(node->told.AwaitCount(2 * kThreads * kEach));
    for (const auto& [other, address] : addresses) {
      std::array<int, kThreads> next = {};
      for (const std::string& message : node->told.Said(other)) {
        const int thread = message[0] - '0';
        EXPECT_EQ(message, absl::StrCat(thread, " ", next[thread]++));
      }
      EXPECT_EQ(next[0], other == name ? 0 : kEach);
    }
    EXPECT_EQ(node->told.Count("lost"), 0u);
  }
}

TEST(PeerNetworkTest, ALargeMessageAndAnEmptyOneCome) {
  Node a(Options("a", Patient()));
  Node b(Options("b", Patient()));
  Acquaint(a, b);
  a.Reach("b");
  const std::string large(size_t{16} << 20, 'x');
  a.Say("b", large);
  a.Say("b", "");
  a.Say("b", std::string("\xff\0\x80", 3));
  ASSERT_TRUE(b.told.AwaitCount(3));
  EXPECT_TRUE(b.told.Said("a") ==
              (std::vector<std::string>{large, "", std::string("\xff\0\x80", 3)}));
}

TEST(PeerNetworkTest, WhatIsSaidToAnOlderChannelIsNotSaidToTheNextOne) {
  Node a(Options("a", Patient()));
  Node b(Options("b"));
  Acquaint(a, b);
  a.network->Say("b", 1, "before there is one");
  a.Reach("b");
  const PeerChannel first = a.told.channel("b");
  a.network->ChangePeers({{{"b", {b.address(), 5}}}});
  a.told.Await("lost b: it was started anew");
  a.told.Await("reached b");
  a.network->Say("b", first, "old");
  a.network->Say("b", 0, "none");
  a.network->Say("nobody", a.told.channel("b"), "x");
  a.Say("b", "new");
  ASSERT_TRUE(b.told.AwaitCount(1));
  EXPECT_THAT(b.told.Said("a"), ElementsAre("new"));
}

// ---- Who stops, and who is not there ----

TEST(PeerNetworkTest, AReceiverThatIsStartedAnewHearsNothingOld) {
  Node a(Options("a"));
  auto b = std::make_unique<Node>(Options("b"));
  Acquaint(a, *b);
  a.Reach("b");
  b->Reach("a");
  a.told.Await("began b");
  a.Say("b", "first life");
  ASSERT_TRUE(b->told.AwaitCount(1));
  PeerNetworkOptions again = Options("b");
  again.listen = b->address();
  b = nullptr;
  a.Say("b", "into the void");
  a.told.Await("lost b");
  b = std::make_unique<Node>(again);
  b->network->ChangePeers({{{"a", {a.address()}}}});
  a.told.Await("reached b");
  b->told.Await("began a");
  b->Reach("a");
  a.told.Await("began b");
  a.Say("b", "second life");
  b->Say("a", "here");
  ASSERT_TRUE(b->told.AwaitCount(1));
  EXPECT_THAT(b->told.Said("a"), ElementsAre("second life"));
  ASSERT_TRUE(a.told.AwaitCount(1));
  EXPECT_EQ(a.told.Count("lost b"), 1u);
  EXPECT_EQ(a.told.Count("reached b"), 2u);
}

// It is back before anybody misses it: only what it answers tells.
TEST(PeerNetworkTest, AReceiverThatWasStartedAnewInAMomentIsNoticed) {
  Node a(Options("a", Patient()));
  auto b = std::make_unique<Node>(Options("b"));
  Acquaint(a, *b);
  a.Reach("b");
  PeerNetworkOptions again = Options("b");
  again.listen = b->address();
  b = nullptr;
  b = std::make_unique<Node>(again);
  b->network->ChangePeers({{{"a", {a.address()}}}});
  EXPECT_THAT(a.told.Await("lost b"), HasSubstr("started anew"));
  a.told.Await("reached b");
  b->told.Await("began a");
}

TEST(PeerNetworkTest, AnAddressWhereNobodyListensIsReachedOnceSomebodyDoes) {
  Node a(Options("a"));
  PeerNetworkOptions later = Options("b");
  {
    Node taken(Options("x"));
    later.listen = taken.address();
  }
  a.network->ChangePeers({{{"b", {later.listen}}}});
  a.network->Connect("b");
  EXPECT_THAT(a.told.Await("problem b"), HasSubstr(later.listen + ": UNAVAILABLE"));
  Node b(later);
  b.network->ChangePeers({{{"a", {a.address()}}}});
  a.told.Await("reached b");
  EXPECT_EQ(a.told.Count("lost"), 0u);
}

TEST(PeerNetworkTest, AnAddressOfAnotherNodeIsNoChannelToThisOne) {
  Node a(Options("a"));
  PeerNetworkOptions second_start = Options("c");
  second_start.incarnation = 2;
  Node c(second_start);
  c.network->ChangePeers({{{"a", {a.address()}}}});
  a.network->ChangePeers({{{"b", {c.address()}}, {"c", {c.address(), 1}}}});
  a.network->Connect("b");
  EXPECT_THAT(a.told.Await("problem b"), HasSubstr("belongs to another node than 'b'"));
  a.network->Connect("c");
  EXPECT_THAT(a.told.Await("problem c"), HasSubstr("or to another start of it"));
  a.network->ChangePeers({{{"c", {c.address(), 2}}}, {"b"}});
  a.told.Await("reached c");
  c.told.Await("began a");
  EXPECT_EQ(c.told.Count("began"), 1u);
}

TEST(PeerNetworkTest, AnAddressThatAnotherNodeGetsIsGivenUpAtOnce) {
  Node a(Options("a", Patient()));
  auto b = std::make_unique<Node>(Options("b"));
  Acquaint(a, *b);
  a.Reach("b");
  PeerNetworkOptions taker = Options("c");
  taker.listen = b->address();
  b = nullptr;
  Node c(taker);
  c.network->ChangePeers({{{"a", {a.address()}}}});
  a.Say("b", "secret");
  EXPECT_THAT(a.told.Await("lost b"), HasSubstr("belongs to another node than 'b'"));
  EXPECT_EQ(c.told.Count("began"), 0u);
}

TEST(PeerNetworkTest, WhoIsNoMemberIsNotHeardAndLostOnce) {
  Node a(Options("a"));
  Node b(Options("b"));
  a.network->ChangePeers({{{"b", {b.address()}}}});
  a.network->Connect("b");
  EXPECT_THAT(a.told.Await("problem b"), HasSubstr("node 'b' knows of no node 'a'"));
  b.network->ChangePeers({{{"a", {a.address()}}}});
  a.told.Await("reached b");
  b.told.Await("began a");
  b.network->ChangePeers({{}, {"a"}});
  EXPECT_THAT(a.told.Await("lost b"), HasSubstr("knows of no node 'a'"));
  // The other way round: whoever takes it off the list hears at once that it is lost.
  b.network->ChangePeers({{{"a", {a.address()}}}});
  a.told.Await("reached b");
  a.network->ChangePeers({{}, {"b"}});
  EXPECT_THAT(a.told.Await("lost b"), HasSubstr("no member"));
  a.network->ChangePeers({{{"b", {b.address()}}}});
  a.Reach("b");
  EXPECT_EQ(a.told.Count("lost b"), 2u);
}

// Two lists that differ in who hosts, or where, two clusters, a list and an etcd.
TEST(PeerNetworkTest, WhoBelongsElsewhereIsNotHeardAndIsTold) {
  const auto of = [](const std::string& self, const std::string& cluster,
                     const std::string& membership) {
    PeerNetworkOptions options = Options(self);
    options.cluster = cluster;
    options.membership = membership;
    return options;
  };
  Node a(of("a", "prod", "a list that begins with a at h:1"));
  Node b(of("b", "prod", "a list that begins with a at h:2"));
  Node c(of("c", "test", "a list that begins with a at h:1"));
  Node d(of("d", "prod", "an etcd"));
  Node e(of("e", "prod", "a list that begins with a at h:1"));
  Node f(of("f", "", ""));  // one that does not say it
  std::map<std::string, PeerAddress> all;
  for (const auto& [name, node] : std::map<std::string, Node*>{
           {"a", &a}, {"b", &b}, {"c", &c}, {"d", &d}, {"e", &e}, {"f", &f}}) {
    all[name] = {node->address()};
  }
  for (Node* node : {&a, &b, &c, &d, &e, &f}) {
    node->network->ChangePeers({all});
  }
  a.network->Connect("b");
  EXPECT_THAT(
      a.told.Await("problem b"),
      HasSubstr("node 'b' belongs to cluster 'prod' (a list that begins with a at h:2), and "
                "node 'a' to cluster 'prod' (a list that begins with a at h:1): make the "
                "section 'cluster' of their configurations the same"));
  b.network->Connect("a");
  EXPECT_THAT(b.told.Await("problem a"), HasSubstr("node 'a' belongs to cluster 'prod'"));
  a.network->Connect("c");
  EXPECT_THAT(a.told.Await("problem c"), HasSubstr("node 'c' belongs to cluster 'test'"));
  a.network->Connect("d");
  EXPECT_THAT(a.told.Await("problem d"), HasSubstr("cluster 'prod' (an etcd), and node 'a'"));
  a.Reach("e");
  a.Reach("f");
  f.Reach("a");
  EXPECT_EQ(a.told.Count("reached"), 2u);
}

TEST(PeerNetworkTest, AnotherStartThanMembershipTellsIsNotHeard) {
  PeerNetworkOptions started = Options("a");
  started.incarnation = 2;
  Node a(started);
  Node b(Options("b"));
  b.network->ChangePeers({{{"a", {a.address(), 1}}}});
  a.network->ChangePeers({{{"b", {b.address()}}}});
  a.network->Connect("b");
  EXPECT_THAT(a.told.Await("problem b"), HasSubstr("another start of node 'a'"));
  b.network->ChangePeers({{{"a", {a.address(), 2}}}});
  a.told.Await("reached b");
  // A later start is told of: this one is heard no more.
  b.network->ChangePeers({{{"a", {a.address(), 3}}}});
  EXPECT_THAT(a.told.Await("lost b"), HasSubstr("does not know the channel"));
}

// ---- Who hangs ----

TEST(PeerNetworkTest, AnAddressThatTakesConnectionsAndNeverAnswersIsAProblem) {
  Node a(ShortCalls("a"));
  const Listener silent;
  a.network->ChangePeers({{{"b", {silent.address()}}}});
  a.network->Connect("b");
  EXPECT_THAT(a.told.Await("problem b"), HasSubstr(silent.address()));
}

TEST(PeerNetworkTest, ALinkThatHangsIsGivenUpAndBeginsAnew) {
  LinkLimits limits = Brisk();
  limits.deadline = std::chrono::seconds(3);  // long enough for "one" on a slow machine
  PeerNetworkOptions options = Options("a", limits);
  options.call_deadline = limits.deadline;
  Node a(options);
  Node b(Options("b"));
  Proxy proxy(b.address());
  a.network->ChangePeers({{{"b", {proxy.address()}}}});
  b.network->ChangePeers({{{"a", {a.address()}}}});
  a.Reach("b");
  a.Say("b", "one");
  ASSERT_TRUE(b.told.AwaitCount(1));
  proxy.Freeze(true);
  a.Say("b", "two");
  EXPECT_THAT(a.told.Await("lost b"), HasSubstr("DEADLINE_EXCEEDED"));
  const PeerChannel first = a.told.channel("b");
  proxy.Freeze(false);
  a.told.Await("reached b");
  EXPECT_GT(a.told.channel("b"), first);
  // Said again whenever the channel is another one.
  PeerChannel said_on = 0;
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (b.told.Count("a says three") == 0 && std::chrono::steady_clock::now() < until) {
    if (const PeerChannel channel = a.told.channel("b"); channel != said_on) {
      a.network->Say("b", channel, "three");
      said_on = channel;
    }
    std::this_thread::yield();
  }
  EXPECT_GT(b.told.Count("a says three"), 0u);
}

// Long before the channel is given up; and that it was nothing.
TEST(PeerNetworkTest, ThatNothingGetsThroughIsAProblem) {
  PeerNetworkOptions options = Options("a", Patient());
  options.call_deadline = std::chrono::milliseconds(200);
  Node a(options);
  Node b(Options("b"));
  Proxy proxy(b.address());
  a.network->ChangePeers({{{"b", {proxy.address()}}}});
  b.network->ChangePeers({{{"a", {a.address()}}}});
  a.Reach("b");
  proxy.Freeze(true);
  EXPECT_THAT(a.told.Await("problem b"), HasSubstr("DEADLINE_EXCEEDED"));
  proxy.Freeze(false);
  while (a.told.Await("problem b") != "problem b: " && !::testing::Test::HasFailure()) {
  }
  EXPECT_EQ(a.told.Count("lost b"), 0u);
  EXPECT_EQ(a.told.Count("reached b"), 1u);
}

TEST(PeerNetworkTest, ALinkThatHangsIsNoticedWithNothingToSay) {
  Node a(ShortCalls("a"));
  Node b(Options("b"));
  Proxy proxy(b.address());
  a.network->ChangePeers({{{"b", {proxy.address()}}}});
  b.network->ChangePeers({{{"a", {a.address()}}}});
  a.Reach("b");
  proxy.Freeze(true);
  a.told.Await("lost b");
}

TEST(PeerNetworkTest, TooMuchToSayGivesTheChannelUpWhileACallIsUnderWay) {
  LinkLimits limits = Patient();
  limits.queue_messages_max = 10;
  PeerNetworkOptions options = Options("a", limits);
  options.call_deadline = std::chrono::minutes(5);
  Node a(options);
  Node b(Options("b"));
  Proxy proxy(b.address());
  a.network->ChangePeers({{{"b", {proxy.address()}}}});
  b.network->ChangePeers({{{"a", {a.address()}}}});
  a.Reach("b");
  proxy.Abandon();
  const PeerChannel channel = a.told.channel("b");
  for (int i = 0; i < 20; ++i) {
    a.network->Say("b", channel, "x");
  }
  EXPECT_THAT(a.told.Await("lost b"), HasSubstr("wait to be taken"));
  a.told.Await("reached b");
  EXPECT_EQ(a.told.Count("lost"), 1u);
}

// ---- Backpressure ----

TEST(PeerNetworkTest, AnObserverThatBlocksHoldsTheSenderBackAndLosesNothing) {
  constexpr int kMessages = 400;
  PeerNetworkOptions narrow = Options("b", Patient());
  narrow.inbox_messages_max = 10;
  LinkLimits small = Patient();
  small.batch_messages_max = 4;
  Node a(Options("a", small));
  Node b(narrow);
  Acquaint(a, b);
  a.Reach("b");
  b.told.Await("began a");
  b.told.Block(true);
  for (int i = 0; i < kMessages; ++i) {
    a.Say("b", absl::StrCat(i));
  }
  ASSERT_TRUE(b.told.AwaitCount(1));  // the one that it is busy with
  b.told.Block(false);
  ASSERT_TRUE(b.told.AwaitCount(kMessages));
  const std::vector<std::string> said = b.told.Said("a");
  ASSERT_EQ(said.size(), static_cast<size_t>(kMessages));
  for (int i = 0; i < kMessages; ++i) {
    EXPECT_EQ(said[static_cast<size_t>(i)], absl::StrCat(i));
  }
  EXPECT_EQ(a.told.Count("lost"), 0u);
}

// A caller of our own making, which may say whatever the wire can carry.
class RawCaller {
 public:
  explicit RawCaller(const std::string& address)
      : stub_(
            v1::Peers::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()))) {}

  grpc::Status Open(const v1::OpenRequest& request, v1::OpenReply* reply) const {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kPatience);
    return stub_->Open(&context, request, reply);
  }
  grpc::Status Deliver(const v1::Batch& batch, v1::BatchReply* reply,
                       std::chrono::milliseconds at_most = kPatience) const {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + at_most);
    return stub_->Deliver(&context, batch, reply);
  }
  uint64_t OpenAs(const std::string& from, const std::string& to) const {
    v1::OpenRequest request;
    request.set_from(from);
    request.set_to(to);
    v1::OpenReply reply;
    EXPECT_TRUE(Open(request, &reply).ok());
    EXPECT_EQ(reply.answer(), v1::PEER_ANSWER_TAKEN);
    return reply.channel();
  }

 private:
  const std::unique_ptr<v1::Peers::Stub> stub_;
};

v1::Batch BatchOf(uint64_t channel, uint64_t first, const std::vector<std::string>& messages) {
  v1::Batch batch;
  batch.set_from("a");
  batch.set_to("b");
  batch.set_channel(channel);
  batch.set_first(first);
  for (const std::string& message : messages) {
    batch.add_messages(message);
  }
  return batch;
}

TEST(PeerNetworkTest, ABatchWithoutRoomIsNotTakenAndAnEmptyOneIsAnswered) {
  PeerNetworkOptions narrow = Options("b");
  narrow.inbox_bytes_max = 10;
  Node b(narrow);
  b.network->ChangePeers({{{"a", {"127.0.0.1:1"}}}});
  const RawCaller caller(b.address());
  const uint64_t channel = caller.OpenAs("a", "b");
  b.told.Await("began a");
  b.told.Block(true);
  v1::BatchReply reply;
  ASSERT_TRUE(caller.Deliver(BatchOf(channel, 1, {"in hand"}), &reply).ok());
  b.told.Await("a says in hand");
  ASSERT_TRUE(caller.Deliver(BatchOf(channel, 2, {"123456"}), &reply).ok());
  EXPECT_EQ(caller.Deliver(BatchOf(channel, 3, {"78901"}), &reply, std::chrono::milliseconds(100))
                .error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  ASSERT_TRUE(caller.Deliver(BatchOf(channel, 3, {}), &reply).ok());
  EXPECT_EQ(reply.answer(), v1::PEER_ANSWER_TAKEN);
  // One that waits is taken as soon as there is room; a repetition is not taken twice.
  std::thread waits([&] {
    v1::BatchReply late;
    EXPECT_TRUE(caller.Deliver(BatchOf(channel, 3, {"78901"}), &late).ok());
    EXPECT_EQ(late.answer(), v1::PEER_ANSWER_TAKEN);
  });
  b.told.Block(false);
  waits.join();
  ASSERT_TRUE(caller.Deliver(BatchOf(channel, 3, {"78901", "!"}), &reply).ok());
  ASSERT_TRUE(b.told.AwaitCount(4));
  EXPECT_THAT(b.told.Said("a"), ElementsAre("in hand", "123456", "78901", "!"));
}

TEST(PeerNetworkTest, WhoNeedsLittleRoomDoesNotOvertakeWhoWaitsForMore) {
  PeerNetworkOptions narrow = Options("b");
  narrow.inbox_messages_max = size_t{1} << 40;
  narrow.inbox_bytes_max = 10;
  Node b(narrow);
  b.network->ChangePeers({{{"a", {"127.0.0.1:1"}}, {"c", {"127.0.0.1:1"}}}});
  const RawCaller caller(b.address());
  const uint64_t channel = caller.OpenAs("a", "b");
  const uint64_t other = caller.OpenAs("c", "b");
  b.told.Await("began c");
  b.told.Block(true);
  v1::BatchReply reply;
  ASSERT_TRUE(caller.Deliver(BatchOf(channel, 1, {"in hand"}), &reply).ok());
  b.told.Await("a says in hand");
  ASSERT_TRUE(caller.Deliver(BatchOf(channel, 2, {"123456"}), &reply).ok());
  std::thread waits([&] {
    v1::BatchReply late;
    EXPECT_TRUE(caller.Deliver(BatchOf(channel, 3, {"much more"}), &late).ok());
  });
  // Once that call waits, and not before, this one has to wait as well.
  v1::Batch little = BatchOf(other, 1, {});
  little.set_from("c");
  uint64_t first = 1;
  grpc::Status status;
  const auto until = std::chrono::steady_clock::now() + kPatience;
  do {
    little.clear_messages();
    little.add_messages("");
    little.set_first(first++);
    status = caller.Deliver(little, &reply, std::chrono::milliseconds(200));
  } while (status.ok() && std::chrono::steady_clock::now() < until);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  b.told.Block(false);
  waits.join();
  b.told.Await("a says much more");
}

// ---- Who means harm ----

TEST(PeerNetworkTest, CallsBeyondTheLimitsAreRefusedAndDoNoHarm) {
  LinkLimits limits = Brisk();
  limits.batch_messages_max = 100;
  Node b(Options("b", limits));
  b.network->ChangePeers({{{"a", {"127.0.0.1:1"}}}});
  const RawCaller caller(b.address());
  const uint64_t channel = caller.OpenAs("a", "b");
  v1::BatchReply reply;
  EXPECT_EQ(caller.Deliver(BatchOf(channel, 1, std::vector<std::string>(101)), &reply).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(
      caller.Deliver(BatchOf(channel, 1, {std::string((16u << 20) + 1, 'x')}), &reply).error_code(),
      grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(caller.Deliver(BatchOf(channel, 1, {std::string(20u << 20, 'x')}), &reply).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  v1::Batch named = BatchOf(channel, 1, {});
  named.set_from(std::string(256, 'n'));
  EXPECT_EQ(caller.Deliver(named, &reply).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  named.set_from(std::string(255, 'n'));
  EXPECT_EQ(caller.Deliver(named, &reply).error_code(), grpc::StatusCode::UNAVAILABLE);
  named.set_from("");
  EXPECT_EQ(caller.Deliver(named, &reply).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  named = BatchOf(channel, 1, {});
  named.set_to("c");
  ASSERT_TRUE(caller.Deliver(named, &reply).ok());
  EXPECT_EQ(reply.answer(), v1::PEER_ANSWER_WRONG_NODE);
  named = BatchOf(channel, 1, {"zombie"});
  named.set_incarnation(7);
  ASSERT_TRUE(caller.Deliver(named, &reply).ok());
  EXPECT_EQ(reply.answer(), v1::PEER_ANSWER_UNKNOWN_CHANNEL);
  for (const auto& [of, first] : std::vector<std::pair<uint64_t, uint64_t>>{
           {channel + 1, 1}, {0, 1}, {channel, 0}, {channel, 2}, {channel, UINT64_MAX}}) {
    ASSERT_TRUE(caller.Deliver(BatchOf(of, first, {"x"}), &reply).ok());
    EXPECT_EQ(reply.answer(), v1::PEER_ANSWER_UNKNOWN_CHANNEL);
  }
  v1::OpenRequest open;
  open.set_from("a");
  open.set_to("b");
  open.set_cluster(std::string(256, 'c'));
  v1::OpenReply refused;
  EXPECT_EQ(caller.Open(open, &refused).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  open.set_cluster("c");
  open.set_membership(std::string(600, 'm'));
  EXPECT_EQ(caller.Open(open, &refused).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  open.Clear();
  v1::OpenReply opened;
  open.set_to("b");
  EXPECT_EQ(caller.Open(open, &opened).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  open.set_from("\t\x01");
  EXPECT_THAT(caller.Open(open, &opened).error_message(), HasSubstr("'\\t\\x01'"));
  open.set_from("b");  // itself
  EXPECT_EQ(caller.Open(open, &opened).error_code(), grpc::StatusCode::UNAVAILABLE);
  ASSERT_TRUE(caller.Deliver(BatchOf(channel, 1, {"well"}), &reply).ok());
  ASSERT_TRUE(b.told.AwaitCount(1));
  EXPECT_THAT(b.told.Said("a"), ElementsAre("well"));
}

TEST(PeerNetworkTest, BytesThatAreNoBatchAreRefused) {
  Node b(Options("b"));
  b.network->ChangePeers({{{"a", {"127.0.0.1:1"}}}});
  const RawCaller caller(b.address());
  for (const std::string& bytes : {std::string("\x32\x05xx"), std::string("\xff\xff\xff"),
                                   std::string("\x0b"), std::string("\x32\xff\xff\xff\xff\x0f"),
                                   std::string("\x0a\x01\xff\x1a\x01"
                                               "b")}) {
    grpc::GenericStub stub(grpc::CreateChannel(b.address(), grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kPatience);
    const grpc::Slice slice(bytes);
    const grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer answer;
    std::promise<grpc::Status> ended;
    stub.UnaryCall(&context, "/holdfast.v1.Peers/Deliver", {}, &request, &answer,
                   [&](const grpc::Status& of) { ended.set_value(of); });
    const grpc::Status status = ended.get_future().get();
    EXPECT_FALSE(status.ok());
  }
  EXPECT_NE(caller.OpenAs("a", "b"), 0u);
}

// ---- TLS ----

// A CA, and a certificate by it for 127.0.0.1.
PeerTls MakeCertificates(const std::string& directory) {
  const std::string script = absl::StrCat("set -e; cd '", directory, R"('; exec >openssl.log 2>&1
printf 'subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n' >ext
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=test-ca -keyout ca.key -out ca.pem
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=node -keyout node.key -out node.csr
openssl x509 -req -days 2 -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile ext -out node.pem
)");
  EXPECT_EQ(std::system(script.c_str()), 0);
  return {directory + "/ca.pem", directory + "/node.pem", directory + "/node.key"};
}

PeerNetworkOptions Secured(PeerNetworkOptions options, const PeerTls& tls) {
  options.tls = tls;
  options.env = Env::System();
  return options;
}

TEST(PeerNetworkTest, WithTlsBothSidesProveThatTheyBelongToTheCluster) {
  const TemporaryDirectory cluster;
  const TemporaryDirectory others;
  const PeerTls tls = MakeCertificates(cluster.path());
  const PeerTls foreign = MakeCertificates(others.path());
  Node a(Secured(Options("a", Patient()), tls));
  Node b(Secured(Options("b", Patient()), tls));
  Node plain(Options("plain"));
  Node stranger(Secured(Options("stranger"), foreign));
  a.network->ChangePeers({{{"b", {b.address()}}, {"plain", {plain.address()}}}});
  b.network->ChangePeers(
      {{{"a", {a.address()}}, {"plain", {"127.0.0.1:1"}}, {"stranger", {stranger.address()}}}});
  a.Reach("b");
  a.Say("b", "in private");
  ASSERT_TRUE(b.told.AwaitCount(1));
  b.Reach("a");

  // Who has no certificate, or one by another CA, is not let in,
  plain.network->ChangePeers({{{"b", {b.address()}}}});
  plain.network->Connect("b");
  plain.told.Await("problem b");
  stranger.network->ChangePeers({{{"b", {b.address()}}}});
  stranger.network->Connect("b");
  stranger.told.Await("problem b");
  PeerTls half = tls;  // it trusts the cluster, which does not trust it
  half.cert_file = foreign.cert_file;
  half.key_file = foreign.key_file;
  Node impostor(Secured(Options("stranger"), half));
  impostor.network->ChangePeers({{{"b", {b.address()}}}});
  impostor.network->Connect("b");
  impostor.told.Await("problem b");
  // nor is it called.
  b.network->Connect("stranger");
  b.told.Await("problem stranger");
  a.network->Connect("plain");
  a.told.Await("problem plain");
  EXPECT_EQ(b.told.Count("began"), 1u);
  EXPECT_EQ(plain.told.Count("began") + stranger.told.Count("began"), 0u);
}

// What is wrong with whose certificate is said where the call comes from, too.
TEST(PeerNetworkTest, WhyACertificateIsNotTakenIsSaid) {
  const TestAuthority authority("ours");
  const TestAuthority other("theirs");
  const auto issue = [](const TestAuthority& by, const std::string& name,
                        TestCertificate certificate = {}) {
    certificate.names = certificate.names.empty() ? "IP:127.0.0.1" : certificate.names;
    const TlsFiles files = by.Issue(name, certificate);
    return PeerTls{files.ca, files.cert, files.key};
  };
  const PeerTls good = issue(authority, "good");
  const PeerTls expired = issue(authority, "expired", {.until = "-1 hour"});
  const PeerTls elsewhere = issue(authority, "elsewhere", {.names = "DNS:gpu-17"});
  PeerTls unknown = issue(other, "unknown");
  unknown.ca_file = good.ca_file;  // it takes ours, and we do not take its
  const auto what_a_hears = [](const PeerTls& of_a, const PeerTls& of_b, const std::string& what) {
    Node a(Secured(Options("a"), of_a));
    Node b(Secured(Options("b"), of_b));
    Acquaint(a, b);
    a.network->Connect("b");
    std::string problem;
    while (problem.find(" (TLS: ") == std::string::npos && !::testing::Test::HasFailure()) {
      problem = a.told.Await("problem b: ");
    }
    EXPECT_THAT(problem, HasSubstr(what));
  };
  what_a_hears(good, expired, "was good until");
  what_a_hears(good, elsewhere, "'gpu-17'");
  what_a_hears(good, unknown, "belongs into cluster.tls.ca_file here");
  what_a_hears(expired, good, expired.cert_file);
  what_a_hears(unknown, good, "belongs into cluster.tls.ca_file there");
  what_a_hears(good, {}, "is cluster.tls set there, too?");
}

TEST(PeerNetworkTest, CertificatesAreReadAnewForEachConnection) {
  const TemporaryDirectory cluster;
  const TemporaryDirectory others;
  const TemporaryDirectory mine;
  const PeerTls tls = MakeCertificates(cluster.path());
  const auto copy = [&](const PeerTls& from) {
    for (const auto& [source, name] :
         {std::pair{from.ca_file, "ca"}, {from.cert_file, "cert"}, {from.key_file, "key"}}) {
      std::filesystem::copy_file(source, mine.Path(name),
                                 std::filesystem::copy_options::overwrite_existing);
    }
  };
  copy(tls);
  Node a(Secured(Options("a"), {mine.Path("ca"), mine.Path("cert"), mine.Path("key")}));
  Node b(Secured(Options("b"), tls));
  copy(MakeCertificates(others.path()));
  Acquaint(a, b);
  a.network->Connect("b");
  a.told.Await("problem b: " + b.address());
  std::filesystem::remove(mine.Path("key"));
  EXPECT_THAT(a.told.Await("problem b: open"), HasSubstr(mine.Path("key")));
  copy(tls);
  a.told.Await("reached b");
}

// Also by whom it is called: another authority, and what it shows itself.
TEST(PeerNetworkTest, WhoIsCalledReadsItsCertificatesAgain) {
  const TemporaryDirectory before;
  const TemporaryDirectory after;
  const TemporaryDirectory mine;
  const PeerTls old = MakeCertificates(before.path());
  const PeerTls renewed = MakeCertificates(after.path());
  const PeerTls files{mine.Path("ca"), mine.Path("cert"), mine.Path("key")};
  const auto copy = [&](const PeerTls& from) {
    const auto replace = std::filesystem::copy_options::overwrite_existing;
    std::filesystem::copy_file(from.ca_file, files.ca_file, replace);
    std::filesystem::copy_file(from.cert_file, files.cert_file, replace);
    std::filesystem::copy_file(from.key_file, files.key_file, replace);
  };
  copy(old);
  PeerNetworkOptions called = Secured(Options("b"), files);
  called.tls_reload = std::chrono::seconds(1);
  Node b(called);
  Node was(Secured(Options("was"), old));
  Node a(Secured(Options("a"), renewed));
  b.network->ChangePeers({{{"a", {a.address()}}, {"was", {was.address()}}}});
  was.network->ChangePeers({{{"b", {b.address()}}}});
  was.Reach("b");
  a.network->ChangePeers({{{"b", {b.address()}}}});
  a.network->Connect("b");
  a.told.Await("problem b");
  copy(renewed);
  a.told.Await("reached b");
  was.Say("b", "still in");  // who was let in before stays
  ASSERT_TRUE(b.told.AwaitCount(1));
}

TEST(PeerNetworkTest, TlsFilesThatDoNotFitTogetherAreAnErrorAtTheStart) {
  const TemporaryDirectory one;
  const TemporaryDirectory other;
  PeerTls mixed = MakeCertificates(one.path());
  mixed.key_file = MakeCertificates(other.path()).key_file;
  PeerNetwork network(Secured(Options("a"), mixed));
  const absl::Status status = network.Start([](const PeerEvent&) {});
  EXPECT_THAT(std::string(status.message()), HasSubstr(mixed.key_file));
  EXPECT_THAT(std::string(status.message()), HasSubstr("do not fit together"));
}

TEST(PeerNetworkTest, TlsFilesThatAreMissingAreAnErrorAtTheStart) {
  const TemporaryDirectory empty;
  PeerNetwork network(Secured(
      Options("a"), {empty.Path("ca.pem"), empty.Path("node.pem"), empty.Path("node.key")}));
  const absl::Status status = network.Start([](const PeerEvent&) {});
  EXPECT_THAT(std::string(status.message()), HasSubstr(empty.Path("ca.pem")));
}

// It does not even say that it has nothing to say. Speaks it after all, it begins anew.
TEST(PeerNetworkTest, AChannelInWhichNothingComesIsOver) {
  PeerNetworkOptions speaks = Options("a", Patient());
  speaks.limits.keep_alive = std::chrono::minutes(5);
  PeerNetworkOptions hears = Options("b");
  hears.hearing_tick = std::chrono::milliseconds(20);
  Node a(speaks);
  Node b(hears);
  Acquaint(a, b);
  a.Reach("b");
  b.told.Await("began a");
  b.told.Await("silent a");
  a.Say("b", "void");
  a.told.Await("lost b");
  a.told.Await("reached b");
  b.told.Await("began a");
  EXPECT_TRUE(b.told.Said("a").empty());
}

// ---- What the inbox keeps ----

TEST(PeerInboxTest, ThatNothingIsHeardAnyMoreComesAfterWhatWasSaid) {
  Told told;
  PeerInbox inbox(
      {.messages_max = 4, .bytes_max = 100}, [&](const PeerEvent& event) { told.Take(event); },
      [] {});
  told.Block(true);
  inbox.Reached("x", 1);
  told.Await("reached x");
  inbox.Began("b");
  inbox.Spoke("b", {"one"});
  inbox.Silent("b");
  inbox.Began("c");
  inbox.Silent("c");
  inbox.Began("c");
  inbox.Spoke("c", {"two"});
  told.Block(false);
  told.Await("began b");
  told.Await("b says one");
  told.Await("silent b");
  told.AwaitCount(2);
  EXPECT_EQ(told.Count("silent"), 1u);
  EXPECT_EQ(told.Count("began c"), 1u);
}

TEST(PeerInboxTest, WhatNobodyHasHeardOfIsToldAsItCameOut) {
  Told told;
  PeerInbox inbox(
      {.messages_max = 4, .bytes_max = 100}, [&](const PeerEvent& event) { told.Take(event); },
      [] {});
  told.Block(true);
  inbox.Reached("x", 1);
  told.Await("reached x");
  inbox.Spoke("b", {"void"});
  inbox.Began("b");
  inbox.Spoke("b", {"one", "two"});
  inbox.Reached("b", 2);
  inbox.Lost("b", 2, "gone");
  inbox.Lost("x", 1, "slow");
  for (PeerChannel channel = 3; channel < 1000; ++channel) {
    inbox.Reached("x", channel);
    inbox.Lost("x", channel, "flaps");
  }
  inbox.Reached("x", 1000);
  EXPECT_FALSE(inbox.HasRoom({"1", "2", "3"}));
  EXPECT_TRUE(inbox.HasRoom({"1", "2"}));
  EXPECT_FALSE(inbox.HasRoom({std::string(95, 'x')}));
  told.Block(false);
  EXPECT_EQ(told.Await("lost x"), "lost x: slow");
  told.Await("b says two");
  EXPECT_THAT(told.Said("b"), ElementsAre("one", "two"));
  EXPECT_EQ(told.Count("began b"), 1u);
  EXPECT_EQ(told.Count("reached b"), 0u);
  EXPECT_EQ(told.Count("problem b: gone"), 1u);
  EXPECT_EQ(told.Count("lost"), 1u);
  EXPECT_EQ(told.Count("reached x"), 2u);
  EXPECT_EQ(told.channel("x"), 1000u);
  told.Block(true);  // a problem of the channel that was reached comes behind that
  inbox.Spoke("y", {"blocks"});
  told.Await("y says");
  inbox.Reached("b", 3);
  inbox.Problem("b", "slow");
  inbox.Problem("x", "slow");
  inbox.Lost("x", 1000, "too slow");
  told.Block(false);
  told.Await("reached b");
  told.Await("lost x");
  told.Await("problem b: slow");
  EXPECT_EQ(told.Count("problem x: slow"), 0u);
}

// ---- Start and end ----

TEST(PeerNetworkTest, AnAddressInUseIsAnErrorThatNamesIt) {
  Node a(Options("a"));
  PeerNetworkOptions options = Options("b");
  options.listen = a.address();
  PeerNetwork second(options);
  const absl::Status status = second.Start([](const PeerEvent&) {});
  EXPECT_THAT(std::string(status.message()), HasSubstr(a.address()));
}

size_t Entries(const std::string& directory) {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    static_cast<void>(entry);
    ++count;
  }
  return count;
}

TEST(PeerNetworkTest, TheDestructorEndsWhateverIsUnderWayAndLeavesNothing) {
  const Listener silent;
  Node peer(Options("b", Patient()));
  peer.network->ChangePeers({{{"a", {silent.address()}}}});
  size_t threads = 0;
  size_t files = 0;
  for (int round = 0; round < 50; ++round) {
    {
      PeerNetworkOptions options = Options("a", Patient());
      options.call_deadline = std::chrono::seconds(2);  // for so long gRPC keeps its connections
      Node a(options);
      a.network->ChangePeers({{{"b", {peer.address()}}, {"c", {silent.address()}}}});
      a.network->Connect("c");
      a.network->Connect("b");
      if (round % 2 == 0) {
        a.told.Await("reached b");
        for (int i = 0; i < 50; ++i) {
          a.Say("b", std::string(100'000, 'x'));
        }
      }
    }
    if (round == 10) {
      threads = Entries("/proc/self/task");
      files = Entries("/proc/self/fd");
    }
  }
  // gRPC closes what it closes in its own time, and keeps a few threads more or less. One that
  // were left by each round would be 39.
  constexpr size_t kSlack = 20;
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while ((Entries("/proc/self/task") > threads + kSlack ||
          Entries("/proc/self/fd") > files + kSlack) &&
         std::chrono::steady_clock::now() < until) {
    std::this_thread::yield();
  }
  EXPECT_LE(Entries("/proc/self/task"), threads + kSlack);
  EXPECT_LE(Entries("/proc/self/fd"), files + kSlack);
}

TEST(PeerNetworkTest, TheDestructorAnswersCallsThatWaitForRoom) {
  PeerNetworkOptions narrow = Options("b");
  narrow.inbox_messages_max = 1;
  auto b = std::make_unique<Node>(narrow);
  b->network->ChangePeers({{{"a", {"127.0.0.1:1"}}}});
  const RawCaller caller(b->address());
  const uint64_t channel = caller.OpenAs("a", "b");
  b->told.Await("began a");
  b->told.Block(true);
  v1::BatchReply reply;
  ASSERT_TRUE(caller.Deliver(BatchOf(channel, 1, {"in hand"}), &reply).ok());
  b->told.Await("a says in hand");
  ASSERT_TRUE(caller.Deliver(BatchOf(channel, 2, {"one"}), &reply).ok());
  auto first = std::async([&] {
    v1::BatchReply none;
    return caller.Deliver(BatchOf(channel, 3, {"two"}), &none);
  });
  // The second call ends the first one: whichever came later waits now.
  auto second = std::async([&] {
    v1::BatchReply none;
    return caller.Deliver(BatchOf(channel, 3, {"two"}), &none);
  });
  const auto until = std::chrono::steady_clock::now() + kPatience;
  const auto ended = [](std::future<grpc::Status>& call) {
    return call.wait_for(std::chrono::milliseconds(1)) == std::future_status::ready;
  };
  while (!ended(first) && !ended(second) && std::chrono::steady_clock::now() < until) {
  }
  // While the observer still blocks.
  std::thread ends([&] { b->network = nullptr; });
  std::vector<std::string> answers = {first.get().error_message(), second.get().error_message()};
  EXPECT_THAT(answers,
              ::testing::UnorderedElementsAre("another call has come", "the daemon stops"));
  b->told.Block(false);
  ends.join();
}

}  // namespace
}  // namespace holdfast
