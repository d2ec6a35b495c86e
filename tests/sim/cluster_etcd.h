// What etcd and each node's Membership promise to the control logic (docs/protocol.md §12), as a
// fake: leases that end by etcd's clock, members and hosts told late and each by its own watch,
// campaigns with epochs, states that only the host can store, outcomes that are not known at
// first, outages, erased data. (server/membership has model tests of its own.)
//
//   etcd.Start(node);                       // its daemon: a lease, its name, what there is
//   etcd.Do(node, CampaignFor{"job", 3});   // → Elected or CampaignLost, told by node.Post
//   etcd.SetDown(true);  etcd.CutOff(node.index, true);  etcd.Wipe();
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "server/events.h"

namespace holdfast::sim::cluster {

class World;
class Node;

class Etcd {
 public:
  explicit Etcd(World& world) : w_(world) {}

  void Start(Node& node);
  void Stop(Node& node);  // its daemon is gone, its lease is not
  // All members at once, before anything happens (large clusters).
  void Register(Node& node);

  void Do(Node& node, const WatchHost& a);
  void Do(Node& node, const UnwatchHost& a);
  void Do(Node& node, const CampaignFor& a);
  void Do(Node& node, const ResignFrom& a);
  void Do(Node& node, const StoreAgreedState& a);

  void SetDown(bool down);
  void CutOff(uint32_t node, bool cut);
  void SetLate(bool late) { late_ = late; }
  void SetLossy(double lost) { lost_ = lost; }
  void Wipe();
  // The key that says who hosts the job is removed; that node hears of it so late.
  void RemoveHost(const std::string& job, Duration told_after);
  void Calm();

  bool IsMember(uint32_t node) const;
  // When its membership ended last, for whatever reason.
  int64_t LeftAt(uint32_t node) const;
  int64_t WipedAt() const { return wiped_at_; }
  std::string HostOf(const std::string& job) const;

 private:
  enum Stream { kOwn, kMembers, kHosts, kStreams };
  struct Lease {
    uint32_t node = 0;
    int64_t ends = 0;
  };
  struct Member {
    NodeInfo info;
    uint64_t lease = 0;
  };
  struct Host {
    JobHost host;
    uint64_t lease = 0;
  };
  struct State {
    Epoch epoch = 0;
    uint64_t version = 0;
    std::string bytes;
  };
  struct JobClient {
    bool campaigning = false;
    Epoch floor = 0;
    Epoch hosting = 0;   // as this client knows
    uint64_t round = 0;  // grows when what was asked before is void
    bool resigning = false;
    std::deque<StoreAgreedState> storing;
    bool storing_asked = false;
    bool campaign_asked = false;
  };
  // A daemon's Membership, in one life of it.
  struct Client {
    explicit Client(Node& of) : node(of) {}
    Node& node;
    uint64_t life = 0;
    bool running = false;
    uint64_t data = 0;  // which of etcd's it knows; 0: none yet
    uint64_t lease = 0;
    bool asking = false;  // for a lease
    MonotonicTime until{};
    std::map<std::string, JobClient> jobs;
    std::set<std::string> watched;
    std::deque<Event> told[kStreams];
    bool pumping[kStreams] = {};
    int64_t left_at = 0;
  };
  using ClientPtr = std::shared_ptr<Client>;

  bool Reaches(const Client& client) const;
  bool Lives(const ClientPtr& client, uint64_t life) const;
  void Ask(const ClientPtr& client, std::function<void()> at_etcd, std::function<void()> answer);
  void Tell(const ClientPtr& client, Stream stream, Event event);
  void Pump(const ClientPtr& client, Stream stream);
  void TellAll(Stream stream, const Event& event, const std::string& job);
  MembersAre Members() const;
  Event HostEvent(const std::string& job) const;

  void Greet(const ClientPtr& client);
  void GetLease(const ClientPtr& client);
  void KeepAlive(const ClientPtr& client);
  void LoseLease(const ClientPtr& client, const std::string& why);
  void EndHosting(const ClientPtr& client, const std::string& job, JobClient& of);
  void EndLease(uint64_t lease);
  void Watch(uint64_t lease);
  void DropHost(const std::string& job);
  void PumpJob(const ClientPtr& client, const std::string& job);
  void AskElection(const ClientPtr& client, const std::string& job);
  void AskStore(const ClientPtr& client, const std::string& job);

  World& w_;
  // etcd's data.
  uint64_t data_ = 1;
  std::map<uint64_t, Lease> leases_;
  std::map<std::string, Member> members_;
  std::map<std::string, Host> hosts_;
  std::map<std::string, Epoch> epochs_;
  std::map<std::string, State> states_;
  uint64_t next_lease_ = 1;

  std::vector<ClientPtr> clients_;  // by node
  std::set<uint32_t> cut_off_;
  bool down_ = false;
  bool late_ = false;
  double lost_ = 0;
  int64_t wiped_at_ = 0;
};

}  // namespace holdfast::sim::cluster
