#include "tests/sim/cluster_network.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/sim/cluster_world.h"

namespace holdfast::sim::cluster {

using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

constexpr Duration kCallDeadline = seconds(3);

}  // namespace

// One call from its making to its end at the caller, which may be before it arrives.
struct Network::Call {
  uint32_t from = 0;
  uint32_t to = 0;
  std::string to_name;
  uint64_t from_incarnation = 0;
  uint64_t to_incarnation = 0;
  uint64_t number = 0;  // of the link
  uint64_t request = 0;
  bool opens = false;
  SendBatch batch;
  bool ended = false;
  // The answer.
  bool wrong_node = false;
  std::string refused;
  uint64_t channel = 0;
  BatchAnswer taken = BatchAnswer::kTaken;
};

void Network::Forget(Node& node) {
  peers_.erase(node.index);
}

void Network::ChangePeers(Node& node, const holdfast::ChangePeers& a) {
  Peers& peers = peers_[node.index];
  for (const std::string& name : a.down) {
    if (const auto it = peers.find(name); it != peers.end()) {
      Drop(node, name, it->second, "it is no peer any more");
      peers.erase(it);
    }
  }
  for (const auto& [name, address] : a.up) {
    Peer& peer = peers[name];
    if (peer.incarnation != address.incarnation) {
      Drop(node, name, peer, "it was started anew");
      peer.incarnation = address.incarnation;
      peer.in.reset();
      if (peer.wanted) {
        Open(node, peer);
        peer.out->link.Connect(node.Local());
        Pump(node, name, *peer.out);
      }
    }
  }
}

void Network::Connect(Node& node, const std::string& to) {
  const auto peer = peers_[node.index].find(to);
  if (peer == peers_[node.index].end()) {
    return;
  }
  peer->second.wanted = true;
  if (peer->second.out == nullptr) {
    Open(node, peer->second);
  }
  peer->second.out->link.Connect(node.Local());
  Pump(node, to, *peer->second.out);
}

void Network::Say(Node& node, const SayToPeer& a) {
  const auto peer = peers_[node.index].find(a.node);
  if (peer == peers_[node.index].end() || peer->second.out == nullptr ||
      peer->second.out->channel != a.channel || !peer->second.out->link.reached()) {
    return;
  }
  peer->second.out->link.Say(a.message, node.Local());
  Pump(node, a.node, *peer->second.out);
}

void Network::Open(Node&, Peer& peer) {
  peer.out = std::make_unique<Out>(next_++);
}

void Network::Drop(Node& node, const std::string& to, Peer& peer, const std::string& why) {
  if (peer.out != nullptr && peer.out->channel != 0) {
    node.Post(PeerTold{PeerLost{to, peer.out->channel, why}});
  }
  peer.out.reset();
}

Network::Out* Network::Find(Node& node, const std::string& to, uint64_t number) {
  const auto peers = peers_.find(node.index);
  if (peers == peers_.end()) {
    return nullptr;
  }
  const auto peer = peers->second.find(to);
  return peer == peers->second.end() || peer->second.out == nullptr ||
                 peer->second.out->number != number
             ? nullptr
             : peer->second.out.get();
}

void Network::Pump(Node& node, const std::string& to, Out& out) {
  for (const SendLink::Change change : out.link.TakeChanges()) {
    if (change == SendLink::Change::kReached) {
      if (out.channel != 0) {
        w_.truth.Violated(absl::StrCat(node.name, " has another channel to ", to,
                                       ", and was not told that the one before was lost"));
      }
      out.channel = next_channel_++;
      w_.counts.states["channel: reached"]++;
      node.Post(PeerTold{PeerReached{to, out.channel}});
    } else if (out.channel != 0) {
      w_.counts.states["channel: lost"]++;
      node.Post(PeerTold{PeerLost{to, std::exchange(out.channel, 0), out.link.problem()}});
    }
  }
  for (LinkRequest& request : out.link.TakeRequests()) {
    Make(node, to, out, std::move(request));
  }
  const std::optional<MonotonicTime> next = out.link.NextTime();
  if (!next || (out.timer && *out.timer <= node.TrueOf(*next) && *out.timer > w_.t.now())) {
    return;  // (an earlier one asks again)
  }
  out.timer = node.TrueOf(*next);
  w_.t.At(*out.timer, [this, &node, to, number = out.number, at = *out.timer] {
    node.WhenAwake([this, &node, to, number, at] {
      Out* link = Find(node, to, number);
      if (link != nullptr && link->timer == at) {
        link->timer.reset();
        link->link.OnTime(node.Local());
        Pump(node, to, *link);
      }
    });
  });
}

Duration Network::Travel(const Road& road) {
  return w_.t.Millis(0, 2) + (road.slow_ms > 0 ? w_.t.Millis(0, road.slow_ms) : Duration(0));
}

void Network::Make(Node& node, const std::string& to, Out& out, LinkRequest request) {
  auto call = std::make_shared<Call>();
  call->from = node.index;
  call->to = w_.IndexOf(to);
  call->to_name = to;
  call->from_incarnation = node.incarnation();
  call->to_incarnation = peers_[node.index].at(to).incarnation;
  call->number = out.number;
  if (const auto* open = std::get_if<OpenChannel>(&request)) {
    call->opens = true;
    call->request = open->request;
  } else {
    call->batch = std::move(std::get<SendBatch>(request));
    call->request = call->batch.request;
  }
  w_.t.At(node.TrueOf(node.Local() + kCallDeadline),
          [this, call] { End(call, "it was not answered in time"); });
  const Road road = RoadOf(call->from, call->to);
  if (road.cut || w_.t.Chance(road.lost)) {
    w_.Count(Fault::kCallLost);
    return;
  }
  const bool late = w_.t.Chance(road.late);
  if (late) {
    w_.Count(Fault::kCallLate);
  }
  w_.t.After(late ? w_.t.Millis(2000, 15'000) : Travel(road), [this, call] { Arrive(call); });
}

void Network::Arrive(const std::shared_ptr<Call>& call) {
  Node& node = w_.node(call->to);
  if (!node.powered()) {
    return;
  }
  if (node.suspended()) {  // it waits there, perhaps longer than its caller
    return node.WhenAwake([this, call] { Arrive(call); });
  }
  const std::string from = w_.node(call->from).name;
  const auto peer = peers_[call->to].find(from);
  if (!node.up()) {
    call->refused = "nobody listens there";
  } else if (call->to_incarnation != node.incarnation()) {
    call->wrong_node = true;
  } else if (peer == peers_[call->to].end() || peer->second.incarnation != call->from_incarnation) {
    call->refused = "it does not know this caller";
  } else if (call->opens) {
    if (peer->second.in == nullptr) {
      peer->second.in = std::make_unique<ReceiveLink>(w_.t.Random());
    }
    call->channel = peer->second.opened = peer->second.in->Open();
    peer->second.said = peer->second.taken = 0;
    node.Post(PeerTold{PeerBegan{from}});
    Listen(node, from, call->channel);
  } else if (peer->second.in == nullptr) {
    call->taken = BatchAnswer::kUnknownChannel;
  } else {
    Take(node, from, peer->second, *call);
  }
  const Road road = RoadOf(call->to, call->from);
  if (road.cut || w_.t.Chance(road.lost)) {
    w_.Count(Fault::kAnswerLost);
    return;
  }
  w_.t.After(Travel(road), [this, call] { Answer(call); });
}

// Nothing of a channel that is over, and each message once.
void Network::Take(Node& node, const std::string& from, Peer& peer, Call& call) {
  std::vector<std::string> messages;
  call.taken = peer.in->Take(call.batch, messages);
  if (call.taken == BatchAnswer::kTaken) {
    if (call.batch.channel != peer.opened) {
      w_.truth.Violated(node.name + " takes what " + from + " says in a channel that is over");
    }
    const uint64_t last = call.batch.first + call.batch.messages.size() - 1;
    if (last <= peer.said) {
      w_.counts.states["channel: a batch came again"]++;
    }
    peer.said = std::max(peer.said, last);
    peer.taken += messages.size();
    if (peer.taken != peer.said) {
      w_.truth.Violated(absl::StrCat(node.name, " takes ", peer.taken, " messages of the ",
                                     peer.said, " that ", from, " said in a channel"));
    }
  }
  for (std::string& message : messages) {
    ++w_.counts.messages;
    node.Post(PeerTold{PeerSpoke{from, node.AsUnderstood(std::move(message))}});
  }
}

// Until that channel is over.
void Network::Listen(Node& node, const std::string& from, uint64_t opened) {
  w_.t.At(node.TrueOf(node.Local() + kHearingTick), [this, &node, from, opened] {
    node.WhenAwake([this, &node, from, opened] {
      const auto peers = peers_.find(node.index);
      const auto peer = peers == peers_.end() ? Peers::iterator() : peers->second.find(from);
      if (peers == peers_.end() || peer == peers->second.end() || peer->second.in == nullptr ||
          peer->second.opened != opened || !peer->second.in->open()) {
        return;
      }
      if (peer->second.in->OnTick()) {
        w_.counts.states["channel: silent"]++;
        return node.Post(PeerTold{PeerSilent{from}});
      }
      Listen(node, from, opened);
    });
  });
}

void Network::Answer(const std::shared_ptr<Call>& call) {
  Node& node = w_.node(call->from);
  if (node.suspended()) {
    return node.WhenAwake([this, call] { Answer(call); });
  }
  Out* out = node.up() && node.incarnation() == call->from_incarnation
                 ? Find(node, call->to_name, call->number)
                 : nullptr;
  if (out == nullptr || std::exchange(call->ended, true)) {
    return;
  }
  const MonotonicTime now = node.Local();
  if (call->wrong_node) {
    out->link.OnRefused(call->request, "another start of it listens there", now);
  } else if (!call->refused.empty()) {
    out->link.OnFailed(call->request, call->refused, now);
  } else if (call->opens) {
    out->link.OnOpened(call->request, call->channel, now);
  } else {
    out->link.OnBatchAnswered(call->request, call->taken, now);
  }
  Pump(node, call->to_name, *out);
}

void Network::End(const std::shared_ptr<Call>& call, const std::string& why) {
  if (call->ended) {
    return;
  }
  if (Node& node = w_.node(call->from); node.suspended()) {
    return node.WhenAwake([this, call, why] { End(call, why); });
  }
  call->refused = why;
  call->wrong_node = false;
  Answer(call);
}

}  // namespace holdfast::sim::cluster
