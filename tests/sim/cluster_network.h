// The network between simulated nodes: the channels of server/links.h, whose calls and answers are
// lost, late, or come when their caller has given them up long ago.
//
//   net.ChangePeers(node, peers);  net.Connect(node, "b");  net.Say(node, "b", channel, bytes);
//   net.Cut(a, b);              // what a says does not reach b
//
// What a PeerNetwork would tell is posted to the node as PeerTold.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "server/events.h"
#include "server/links.h"

namespace holdfast::sim::cluster {

class World;
class Node;

// How calls go from one node to another now.
struct Road {
  bool cut = false;
  double lost = 0;
  double late = 0;
  uint64_t slow_ms = 0;
};

class Network {
 public:
  explicit Network(World& world) : w_(world) {}

  void ChangePeers(Node& node, const holdfast::ChangePeers& a);
  void Connect(Node& node, const std::string& to);
  void Say(Node& node, const SayToPeer& a);
  // Its daemon is gone.
  void Forget(Node& node);

  Road& road(uint32_t from, uint32_t to) { return roads_[Key(from, to)]; }
  void ClearRoads() { roads_.clear(); }
  // Whether a call and its answer get through.
  bool Reaches(uint32_t a, uint32_t b) const { return !IsCut(a, b) && !IsCut(b, a); }

 private:
  struct Out {
    explicit Out(uint64_t n) : link(LinkLimits{}), number(n) {}
    SendLink link;
    const uint64_t number;  // no other has it: what was asked by an older one means nothing
    PeerChannel channel = 0;
    std::optional<int64_t> timer;
  };
  struct Peer {
    uint64_t incarnation = 0;
    bool wanted = false;
    std::unique_ptr<Out> out;
    std::unique_ptr<ReceiveLink> in;
    uint64_t opened = 0;  // the channel that it was given last
    uint64_t said = 0;    // messages of that channel that came, each counted once
    uint64_t taken = 0;   // and that were handed on
  };
  using Peers = std::unordered_map<std::string, Peer>;
  struct Call;

  static uint64_t Key(uint32_t from, uint32_t to) { return (uint64_t{from} << 32) | to; }
  bool IsCut(uint32_t from, uint32_t to) const {
    const auto road = roads_.find(Key(from, to));
    return road != roads_.end() && road->second.cut;
  }
  Road RoadOf(uint32_t from, uint32_t to) const {
    const auto road = roads_.find(Key(from, to));
    return road == roads_.end() ? Road{} : road->second;
  }
  Out* Find(Node& node, const std::string& to, uint64_t number);
  void Open(Node& node, Peer& peer);
  void Drop(Node& node, const std::string& to, Peer& peer, const std::string& why);
  void Pump(Node& node, const std::string& to, Out& out);
  void Make(Node& node, const std::string& to, Out& out, LinkRequest request);
  void Arrive(const std::shared_ptr<Call>& call);
  void Take(Node& node, const std::string& from, Peer& peer, Call& call);
  void Listen(Node& node, const std::string& from, uint64_t opened);
  void Answer(const std::shared_ptr<Call>& call);
  void End(const std::shared_ptr<Call>& call, const std::string& why);
  Duration Travel(const Road& road);

  World& w_;
  std::map<uint32_t, Peers> peers_;
  std::unordered_map<uint64_t, Road> roads_;
  uint64_t next_ = 1;
  PeerChannel next_channel_ = 1;
};

}  // namespace holdfast::sim::cluster
