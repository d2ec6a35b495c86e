// Several NodeCores with a network and a membership between them, all of it plain values: what is
// sent comes at once and in order, unless a test cuts it.
//
//   ClusterWorld w({"a", "b", "c"});
//   TestClient rank = w["b"].Connect(100);
//   w.Run();                                  // until nobody has anything to say
//   w.Cut("a", "b");  w.Kill("c");  w.Start("c");  w.Advance(std::chrono::seconds(10));
//
// Membership gives leases of kLease, which Advance renews for those that reach it. Where the
// nodes' settings have a list, its first node hosts every job, and nobody's lease ends.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/server/core_harness.h"

namespace holdfast::testing {

inline constexpr Duration kLease = std::chrono::seconds(10);
// After so long without its channel a node counts as silent where it spoke.
inline constexpr Duration kUntilSilent = std::chrono::seconds(15);

class ClusterWorld {
 public:
  explicit ClusterWorld(const std::vector<std::string>& names,
                        std::function<void(v1::DaemonConfig&)> adjust = nullptr)
      : remote_(std::make_shared<FakeTier>()) {
    for (const std::string& name : names) {
      Node& node = nodes_[name];
      node.core = std::make_unique<CoreHarness>(
          [&](v1::DaemonConfig& config) {
            config.set_node_name(name);
            config.mutable_cluster()->set_name("test");
            if (adjust) {
              adjust(config);
            }
          },
          remote_);
      node.core->after_request = [this] { RunSoon(); };
      node.core->read_peer = [this, name](const std::string& other, const FetchShard& wanted) {
        return ReadPeer(name, other, wanted.key.job_name, wanted.key.id);
      };
    }
    if (const auto& listed = nodes_.begin()->second.core->config.cluster().members();
        !listed.empty()) {
      first_ = listed[0].name();
    }
    for (const std::string& name : names) {
      Appear(name);
    }
    Run();
  }

  CoreHarness& operator[](const std::string& name) { return *nodes_.at(name).core; }
  FakeTier& remote() { return *remote_; }

  // Carries what was said, until nobody says anything.
  void Run() {
    bool any = true;
    for (int rounds = 0; any; ++rounds) {
      ASSERT_LT(rounds, 10'000) << "they never come to an end";
      any = false;
      for (auto& [name, node] : nodes_) {
        std::vector<Action> said;
        said.swap(node.core->to_cluster);
        for (const Action& action : said) {
          any = true;
          std::visit([&, &from = name](const auto& a) { Do(from, a); }, action);
        }
        while (!node.inbox.empty()) {
          any = true;
          const Event event = std::move(node.inbox.front());
          node.inbox.pop_front();
          node.core->Feed(event);
        }
      }
    }
  }

  // And what happens within a moment: who campaigns waits a little.
  void RunSoon() {
    Run();
    const Duration moment = std::chrono::milliseconds(1500);
    const MonotonicTime until = Now() + moment;
    for (std::optional<MonotonicTime> next = NextTimer(); next && *next <= until;
         next = NextTimer()) {
      const Duration by = std::max(*next - Now(), Duration(0));
      for (auto& [name, node] : nodes_) {
        node.up ? node.core->Advance(by) : void(node.core->now = node.core->now + by);
      }
      Run();
    }
  }

  void Advance(Duration by) {
    const Duration step = kLease / 4;
    for (Duration left = by; left.count() > 0; left -= std::min(left, step)) {
      for (auto& [name, node] : nodes_) {
        if (!node.up) {
          node.core->now = node.core->now + std::min(left, step);
          continue;
        }
        Renew(name);
        node.core->Advance(std::min(left, step));
      }
      EndLeases();
      for (auto it = silent_at_.begin(); it != silent_at_.end();) {
        const auto [from, to] = it->first;
        const bool due = it->second <= Now();
        it = due ? silent_at_.erase(it) : std::next(it);
        if (due) {
          Push(to, PeerTold{PeerSilent{from}});
        }
      }
      Run();
    }
  }

  // What the one node reads of the other's memory, or by that of its drives.
  absl::StatusOr<SealedCopy> ReadPeer(const std::string& from, const std::string& other,
                                      const std::string& job, const ShardId& shard) {
    const auto node = nodes_.find(other);
    if (node == nodes_.end() || !node->second.up || cut_.count({from, other}) > 0 ||
        cut_.count({other, from}) > 0) {
      return absl::UnavailableError("node " + other + " is not reached");
    }
    CoreHarness& core = *node->second.core;
    const auto in_memory = [&]() -> absl::StatusOr<SealedCopy> {
      for (const auto& [slot, file] : core.files) {
        if (file.record && file.record->id == shard) {
          return core.damaged_in_memory.count(shard) > 0
                     ? absl::StatusOr<SealedCopy>(absl::DataLossError("digests differ"))
                     : *file.record;
        }
      }
      return absl::NotFoundError("node " + other + " has no such copy");
    };
    if (const auto there = in_memory(); from == other || !absl::IsNotFound(there.status())) {
      return there;
    }
    const AdminToken token = core.next_token++;
    core.Feed(AdminRequest{token, Caller{}, HoldShard{job, shard, 0, true}});
    const auto reply = core.admin_replies.extract(token);
    if (reply.empty()) {
      return absl::UnavailableError("node " + other + " does not answer");
    }
    if (!reply.mapped().status.ok()) {
      return reply.mapped().status;
    }
    const absl::StatusOr<SealedCopy> held = in_memory();
    core.Feed(AdminReadDone{token});
    return held;
  }

  // The daemon is gone; its processes live on, and its lease until it ends.
  void Kill(const std::string& name) {
    Node& node = nodes_.at(name);
    node.up = false;
    node.inbox.clear();
    node.core->to_cluster.clear();
    for (auto& [other, peer] : nodes_) {
      Drop(name, other);
      Drop(other, name);
    }
    Run();
  }
  void Start(const std::string& name, bool memory_lost = false) {
    Node& node = nodes_.at(name);
    for (auto& [other, peer] : nodes_) {
      Drop(name, other);
      Drop(other, name);
    }
    node.inbox.clear();
    node.core->to_cluster.clear();
    node.for_membership.clear();
    node.named.clear();
    node.wants.clear();
    for (auto& [other, peer] : nodes_) {
      peer.wants.erase(name);  // it has to be connected to again
    }
    node.core->Restart(memory_lost);
    node.up = true;
    ++node.incarnation;
    Appear(name);
    Run();
  }

  // Neither hears the other any more.
  void Cut(const std::string& a, const std::string& b) {
    cut_.insert({a, b});
    cut_.insert({b, a});
    lossy_.erase({a, b});
    lossy_.erase({b, a});
    Drop(a, b);
    Drop(b, a);
    Run();
  }
  void Heal(const std::string& a, const std::string& b) {
    cut_.erase({a, b});
    cut_.erase({b, a});
    for (const auto& [from, to] : {std::pair(a, b), std::pair(b, a)}) {
      if (nodes_.at(from).wants.count(to) > 0) {
        Reach(from, to);
      }
    }
    Run();
  }
  // What it says there is lost, and nobody has noticed before they are cut.
  void LoseMessages(const std::string& from, const std::string& to) { lossy_.insert({from, to}); }
  // What it says there is on its way until it is released.
  void Hold(const std::string& from, const std::string& to) { held_.try_emplace({from, to}); }
  void Release(const std::string& from, const std::string& to) {
    const auto held = held_.extract({from, to});
    for (const Event& event : held.mapped()) {
      Push(to, event);
    }
    Run();
  }
  // The one way breaks, and it is noticed there; not the way back.
  void Break(const std::string& from, const std::string& to) {
    cut_.insert({from, to});
    Drop(from, to);
    Run();
  }
  // What is said next comes over a fresh channel, after one way broke or messages were lost there.
  void Reopen(const std::string& from, const std::string& to) {
    cut_.erase({from, to});
    lossy_.erase({from, to});
    Drop(from, to);
    Reach(from, to);
    Run();
  }
  // Who hosts what is told to that node later; all else comes at once.
  void DelayNews(const std::string& name) { nodes_.at(name).late_news.emplace(); }
  void DeliverNews(const std::string& name) {
    const std::optional<std::deque<Event>> news =
        std::exchange(nodes_.at(name).late_news, std::nullopt);
    for (const Event& event : *news) {
      Push(name, event);
    }
    Run();
  }
  // Something that it has heard before, or that is not true any more.
  void Tell(const std::string& name, const Event& event) {
    Push(name, event);
    Run();
  }
  void SetAgreedState(const std::string& job, const v1::JobState& state) {
    std::get<2>(states_.at(job)) = state.SerializeAsString();
  }
  void CutFromMembership(const std::string& name) { nodes_.at(name).no_membership = true; }
  void HealMembership(const std::string& name) {
    Node& node = nodes_.at(name);
    node.no_membership = false;
    if (!node.up) {
      return;
    }
    Appear(name);
    for (const auto& [job, watchers] : watchers_) {
      if (watchers.count(name) > 0) {
        TellHost(job, name);
      }
    }
    std::deque<Action> waiting;
    waiting.swap(node.for_membership);
    for (const Action& action : waiting) {
      std::visit([&](const auto& a) { Do(name, a); }, action);
    }
    Run();
  }

  std::string HostOf(const std::string& job) const {
    const auto it = hosts_.find(job);
    return it == hosts_.end() ? "" : it->second.node;
  }
  // Names of which that node asks membership who hosts them.
  size_t WatchedBy(const std::string& name) const {
    size_t watched = 0;
    for (const auto& [job, watchers] : watchers_) {
      watched += watchers.count(name);
    }
    return watched;
  }
  Epoch EpochOf(const std::string& job) const {
    const auto it = epochs_.find(job);
    return it == epochs_.end() ? 0 : it->second;
  }
  v1::JobState AgreedState(const std::string& job) const {
    v1::JobState state;
    const auto it = states_.find(job);
    if (it != states_.end()) {
      state.ParseFromString(std::get<2>(it->second));
    }
    return state;
  }
  // What was agreed on is gone, epochs too.
  void WipeMembership() {
    for (const auto& [name, node] : nodes_) {
      if (!node.no_membership) {
        Push(name, MembershipTold{ClusterWiped{"it was erased"}});
      }
    }
    epochs_.clear();
    states_.clear();
    for (const auto& [job, host] : std::exchange(hosts_, {})) {
      TellHosts(job);  // (in this order, as a session of etcd does)
      Push(host.node, MembershipTold{Deposed{job, host.epoch}});
    }
    Run();
  }
  // Somebody removes the key that says so; what was agreed on stays.
  void DeposeHost(const std::string& job) {
    const JobHost host = hosts_.at(job);
    hosts_.erase(job);
    TellHosts(job);
    Push(host.node, MembershipTold{Deposed{job, host.epoch}});
    Run();
  }

 private:
  struct Node {
    std::unique_ptr<CoreHarness> core;
    bool up = true;
    bool no_membership = false;
    uint64_t incarnation = 1;
    bool member = false;
    MonotonicTime lease_until{};
    std::deque<Event> inbox;
    std::optional<std::deque<Event>> late_news;
    std::deque<Action> for_membership;            // said while it could not be reached
    std::set<std::string> named;                  // its peers
    std::set<std::string> wants;                  // channels
    std::map<std::string, PeerChannel> channels;  // that it has
  };

  MonotonicTime Now() const { return nodes_.begin()->second.core->now; }
  std::optional<MonotonicTime> NextTimer() const {
    std::optional<MonotonicTime> next;
    for (const auto& [name, node] : nodes_) {
      if (node.up && node.core->timer) {
        next = next ? std::min(*next, *node.core->timer) : *node.core->timer;
      }
    }
    return next;
  }
  void Push(const std::string& to, Event event) {
    Node& node = nodes_.at(to);
    if (node.up) {
      node.inbox.push_back(std::move(event));
    }
  }

  // ---- Membership ----
  NodeInfo Info(const std::string& name) const {
    NodeInfo info;
    info.name = name;
    info.address = name + ":1";
    info.incarnation = nodes_.at(name).incarnation;
    return info;
  }
  void Appear(const std::string& name) {
    Node& node = nodes_.at(name);
    node.member = true;
    node.lease_until = first_.empty() ? node.core->now + kLease : MonotonicTime{INT64_MAX};
    MembersAre members;
    for (const auto& [other, info] : nodes_) {
      if (info.member) {
        members.members.push_back(Info(other));
      }
    }
    Push(name, MembershipTold{members});
    Push(name, MembershipTold{LeaseHolds{node.lease_until}});
    for (auto& [other, info] : nodes_) {
      if (other != name && info.up && !info.no_membership) {
        Push(other, MembershipTold{MemberUp{Info(name)}});
      }
    }
    // An earlier life of it hosts nothing any more.
    for (auto it = hosts_.begin(); it != hosts_.end();) {
      if (it->second.node == name && it->second.incarnation != node.incarnation) {
        const std::string job = it->first;
        it = hosts_.erase(it);
        TellHosts(job);
      } else {
        ++it;
      }
    }
  }
  void Renew(const std::string& name) {
    Node& node = nodes_.at(name);
    if (node.member && !node.no_membership && first_.empty()) {
      node.lease_until = node.core->now + kLease;
      Push(name, MembershipTold{LeaseHolds{node.lease_until}});
    }
  }
  void EndLeases() {
    for (auto& [name, node] : nodes_) {
      if (!node.member || node.core->now < node.lease_until || !first_.empty()) {
        continue;
      }
      node.member = false;
      if (!node.no_membership) {
        Push(name, MembershipTold{LeaseLost{"it ended"}});
      }
      for (auto& [other, info] : nodes_) {
        if (other != name && !info.no_membership) {
          Push(other, MembershipTold{MemberGone{name}});
        }
      }
      for (auto it = hosts_.begin(); it != hosts_.end();) {
        const std::string job = it->first;
        if (it->second.node == name) {
          it = hosts_.erase(it);
          TellHosts(job);
        } else {
          ++it;
        }
      }
    }
  }
  Event HostNews(const std::string& job, const std::string& to) const {
    if (!first_.empty() && to != first_) {
      return MembershipTold{HostIs{job, {first_, 0, 0}}};
    }
    const auto host = hosts_.find(job);
    return host == hosts_.end() ? MembershipTold{NoHost{job}}
                                : MembershipTold{HostIs{job, host->second}};
  }
  void TellHost(const std::string& job, const std::string& to) {
    const Event news = HostNews(job, to);
    if (std::optional<std::deque<Event>>& late = nodes_.at(to).late_news) {
      return late->push_back(news);
    }
    Push(to, news);
  }
  void TellHosts(const std::string& job) {
    for (const std::string& name : watchers_[job]) {
      if (!nodes_.at(name).no_membership && (first_.empty() || name == first_)) {
        TellHost(job, name);
      }
    }
  }
  template <typename A>
  bool Waits(const std::string& from, const A& a) {
    Node& node = nodes_.at(from);
    if (node.no_membership) {
      node.for_membership.push_back(a);
    }
    return node.no_membership;
  }
  bool IsHost(const std::string& name, const std::string& job, Epoch epoch) const {
    const auto host = hosts_.find(job);
    return host != hosts_.end() && host->second.node == name && host->second.epoch == epoch;
  }

  void Do(const std::string& from, const WatchHost& a) {
    watchers_[a.job].insert(from);
    if (!nodes_.at(from).no_membership) {
      Push(from, HostNews(a.job, from));  // (it asks: that is answered at once)
    }
  }
  void Do(const std::string& from, const UnwatchHost& a) { watchers_[a.job].erase(from); }
  void Do(const std::string& from, const CampaignFor& a) {
    if (Waits(from, a)) {
      return;
    }
    if (!first_.empty() && from != first_) {
      return Push(from, MembershipTold{CampaignLost{a.job, {first_, 0, 0}, ""}});
    }
    if (const auto host = hosts_.find(a.job); host != hosts_.end()) {
      return Push(from, MembershipTold{CampaignLost{a.job, host->second, ""}});
    }
    const Epoch epoch = epochs_[a.job] = std::max(epochs_[a.job], a.floor) + 1;
    hosts_[a.job] = {from, nodes_.at(from).incarnation, epoch};
    const auto& [state_epoch, version, state] = states_[a.job];
    Push(from, MembershipTold{Elected{a.job, epoch, state_epoch, version, state}});
    TellHosts(a.job);
  }
  void Do(const std::string& from, const ResignFrom& a) {
    if (Waits(from, a)) {
      return;
    }
    if (const auto host = hosts_.find(a.job); host != hosts_.end() && host->second.node == from) {
      hosts_.erase(host);
      TellHosts(a.job);
    }
  }
  void Do(const std::string& from, const StoreAgreedState& a) {
    if (Waits(from, a)) {
      return;
    }
    if (!IsHost(from, a.job, a.epoch)) {
      return Push(from, MembershipTold{StateFenced{a.job, a.epoch, a.version}});
    }
    if (a.version <= std::get<1>(states_[a.job])) {
      return Push(from, MembershipTold{StateFailed{a.job, a.epoch, a.version,
                                                   "that version was given before"}});
    }
    states_[a.job] = {a.epoch, a.version, a.state};
    Push(from, MembershipTold{StateStored{a.job, a.epoch, a.version}});
  }
  void Do(const std::string& from, const ForgetAgreedState& a) {
    if (!Waits(from, a) && IsHost(from, a.job, a.epoch)) {
      hosts_.erase(a.job);
      states_.erase(a.job);
      TellHosts(a.job);
    }
  }

  // ---- Channels ----
  void Do(const std::string& from, const ChangePeers& a) {
    Node& node = nodes_.at(from);
    for (const std::string& name : a.down) {
      if (node.named.erase(name) > 0) {
        Drop(from, name);
        node.wants.erase(name);
      }
    }
    for (const auto& [name, address] : a.up) {
      node.named.insert(name);
    }
  }
  void Do(const std::string& from, const ConnectPeer& a) {
    Node& node = nodes_.at(from);
    if (node.named.count(a.node) > 0 && node.wants.insert(a.node).second) {
      Reach(from, a.node);
    }
  }
  void Do(const std::string& from, const SayToPeer& a) {
    Node& node = nodes_.at(from);
    const auto channel = node.channels.find(a.node);
    if (channel != node.channels.end() && channel->second == a.channel) {
      ++messages;
      ++said_[{from, a.node}];
      if (lossy_.count({from, a.node}) > 0) {
        return;
      }
      const auto held = held_.find({from, a.node});
      if (held != held_.end()) {
        return held->second.push_back(PeerTold{PeerSpoke{from, a.message}});
      }
      Push(a.node, PeerTold{PeerSpoke{from, a.message}});
    }
  }
  template <typename A>
  void Do(const std::string& from, const A&) {
    ADD_FAILURE() << from << " says something to the cluster that is not known here";
  }
  void Reach(const std::string& from, const std::string& to) {
    Node& node = nodes_.at(from);
    if (cut_.count({from, to}) > 0 || !node.up || !nodes_.at(to).up) {
      return;
    }
    node.channels[to] = ++next_channel_;
    silent_at_.erase({from, to});
    Push(to, PeerTold{PeerBegan{from}});
    Push(from, PeerTold{PeerReached{to, next_channel_}});
  }
  void Drop(const std::string& from, const std::string& to) {
    Node& node = nodes_.at(from);
    const auto channel = node.channels.find(to);
    if (channel == node.channels.end()) {
      return;
    }
    Push(from, PeerTold{PeerLost{to, channel->second, "cut"}});
    node.channels.erase(channel);
    silent_at_[{from, to}] = Now() + kUntilSilent;
    // What was on its way is lost.
    std::erase_if(nodes_.at(to).inbox, [&](const Event& event) {
      const auto* told = std::get_if<PeerTold>(&event);
      const auto* spoke = told != nullptr ? std::get_if<PeerSpoke>(&told->event) : nullptr;
      return spoke != nullptr && spoke->node == from;
    });
  }

 public:
  uint64_t messages = 0;
  // How many of them went that way.
  uint64_t Said(const std::string& from, const std::string& to) const {
    const auto it = said_.find({from, to});
    return it == said_.end() ? 0 : it->second;
  }

 private:
  std::map<std::pair<std::string, std::string>, uint64_t> said_;
  const std::shared_ptr<FakeTier> remote_;
  std::string first_;  // of the list; empty: there is none
  std::map<std::string, Node> nodes_;
  std::set<std::pair<std::string, std::string>> cut_;
  std::set<std::pair<std::string, std::string>> lossy_;
  std::map<std::pair<std::string, std::string>, std::deque<Event>> held_;
  std::map<std::pair<std::string, std::string>, MonotonicTime> silent_at_;
  std::map<std::string, JobHost> hosts_;
  std::map<std::string, Epoch> epochs_;
  std::map<std::string, std::tuple<Epoch, uint64_t, std::string>> states_;
  std::map<std::string, std::set<std::string>> watchers_;
  PeerChannel next_channel_ = 0;
};

}  // namespace holdfast::testing
