// Speaks with the daemons of other nodes: the I/O under server/links.h (docs/protocol.md §14).
//
//   PeerNetwork network({.self = "a", .incarnation = 7, .listen = "10.0.0.1:7071"});
//   HF_RETURN_IF_ERROR(network.Start([&](PeerEvent event) { reactor.Post(…); }));
//   network.ChangePeers({{{"b", {"10.0.0.2:7071", 4711}}}});  // whenever membership has changed
//   network.Connect("b");                 // → PeerReached{"b", channel}, as soon as it can be had
//   network.Say("b", channel, message);   // at b: PeerBegan{"a"}, then PeerSpoke{"a", message}
//
// Owner: the daemon. Every call but Start may come from any thread and returns at once. All that
// comes of it is told to the observer, on one thread, one event at a time, in order for each node
// (events of different nodes in turn). The observer may block: its node's and all other messages
// then wait here, up to inbox_messages_max and inbox_bytes_max, and what is beyond waits at their
// senders, which give their channels up after LinkLimits::deadline. The destructor ends all calls;
// it waits for an observer that is running, and there is no event after it. It is called by none
// of the observer's or gRPC's threads, and while no other call runs.
//
// Who may speak: nodes that ChangePeers names, under the incarnation that it says (0: any); others
// are refused and try again, since membership may be late. A node that is not named any more, or
// under another address or incarnation, is lost (told once); what it says is taken no more unless
// only its address has changed. Nor may one that belongs to another cluster, or
// that goes by another membership (a list whose first node, which hosts all jobs, is another one,
// say): the caller hears why. One that is named again has
// to be connected to again, one that was named all along has not.
//
// Without TLS anybody who reaches the port may speak as any node: for networks that are trusted.
// With it both sides prove that they have a certificate by `ca`, and the caller that the one at the
// other end names the address's host; whether it belongs to the node of that name is not checked:
// all nodes of a cluster trust each other.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"
#include "server/links.h"
#include "server/peers/peer_events.h"
#include "server/peers/peer_tls_files.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace holdfast {

class Env;

struct PeerNetworkOptions {
  std::string self;             // this node's name
  uint64_t incarnation = 0;     // of this start of the daemon; 0: not known
  std::string cluster = {};     // its name; who says another one opens no channel. Empty: not said
  std::string membership = {};  // what it goes by, in words, likewise
  std::string listen;           // host:port; port 0: any
  PeerTls tls = {};
  Env* env = nullptr;  // reads the files; needed with TLS
  Duration tls_reload = kTlsReload;
  LinkLimits limits = {};
  Duration call_deadline = std::chrono::seconds(3);
  Duration hearing_tick = kHearingTick;
  size_t inbox_messages_max = 65'536;
  size_t inbox_bytes_max = 64u << 20;
  std::vector<grpc::Service*> services = {};  // at the same door; they outlive the network
};

class PeerNetwork {
 public:
  explicit PeerNetwork(PeerNetworkOptions options);
  ~PeerNetwork();
  PeerNetwork(const PeerNetwork&) = delete;
  PeerNetwork& operator=(const PeerNetwork&) = delete;

  // Once, before all else. Listens; an error says why it cannot.
  absl::Status Start(PeerObserver observer);
  // Where it listens, with the port that it got.
  const std::string& address() const;

  // All other nodes of the cluster. Its own name is passed over; so are those after the first
  // kMembersMax, and names longer than kNodeTextBytesMax.
  void ChangePeers(holdfast::ChangePeers change);
  // From now on a channel to it is wanted, for as long as it is a peer. Nothing happens if it
  // does not.
  void Connect(const std::string& node);
  // Within a channel that PeerReached told. Dropped when that is no longer there: the speaker has
  // been told, or is about to be. At most kPeerMessageBytesMax bytes, as EncodePeer makes them.
  void Say(const std::string& node, PeerChannel channel, std::string message);

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast
