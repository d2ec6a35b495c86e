// This node's part in its cluster: membership and the channels to the other nodes, as the daemon
// runs them. What comes of them goes to the core as events, what the core wants of them comes as
// actions.
//
//   ClusterRuntime cluster(config, env);
//   HF_RETURN_IF_ERROR(cluster.Start([&](Event event, std::function<void()> taken) {
//     reactor.Post([&, event, taken] { Feed(event); taken(); });
//   }));
//   cluster.Perform(SayToPeer{"node-2", channel, message});
//   cluster.Stop([&] { reactor.Post(…); });   // leaves the cluster, and ends its threads
//
// Owner: the Daemon. View may be called from any thread; all else, the destructor too, from one,
// and none of it waits but Start (for files) and the destructor (for its threads). Without Stop
// the destructor leaves nothing: other nodes wait until this one's lease ends.
//
// What peers say is posted only while the core keeps up: beyond kUntakenMessagesMax and
// kUntakenBytesMax it waits in PeerNetwork's inbox, and then at its senders. Membership is told at
// once.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/env.h"
#include "base/mutex.h"
#include "holdfast/v1/config.pb.h"
#include "server/events.h"
#include "server/membership/cluster_note.h"
#include "server/membership/membership.h"
#include "server/membership/task_thread.h"
#include "server/peers/peer_network.h"
#include "server/peers/pull_client.h"

namespace holdfast {

struct ClusterView {
  bool member = false;  // its lease holds, or it needs none
  size_t members = 0;   // that live, as membership last said
  size_t reached = 0;   // nodes to which the last that was said got
  // What does not work now, for people: membership first, then the nodes that are not reached, the
  // first few by name.
  std::vector<std::string> problems;
};

class ClusterRuntime {
 public:
  static constexpr size_t kUntakenMessagesMax = 1024;
  static constexpr size_t kUntakenBytesMax = size_t{32} << 20;  // one message may be larger alone

  // Any thread: has the core handle the event, in the order posted, and calls `taken` then.
  using PostEvent = std::function<void(Event event, std::function<void()> taken)>;

  // Complete and sound, with a cluster.
  ClusterRuntime(const v1::DaemonConfig& config, Env* env, const LinkLimits& limits = {});
  // Offered to the other nodes, too, at the same address. Before Start; it outlives this object.
  void AddService(grpc::Service* service) { services_.push_back(service); }
  ~ClusterRuntime();
  ClusterRuntime(const ClusterRuntime&) = delete;
  ClusterRuntime& operator=(const ClusterRuntime&) = delete;

  // Once. An error says why it cannot listen; what it cannot reach it waits for. With
  // `predecessor_hangs` (base/daemon_lock.h) it listens at another port where its own is taken.
  absl::Status Start(PostEvent post, bool predecessor_hangs = false);
  // What the cluster agrees on for good (ClusterNotes); without etcd nobody is told anything.
  // Before Start; from any thread, later, comes what the observer is told.
  void FollowNote(std::string remembered, ClusterNotes::Observer observer);
  void AskNote();
  void NoteRemote(std::string id, std::string instead_of);
  // Where it listens, with the port that it got.
  const std::string& address() const { return network_->address(); }
  // Of this start, as membership tells it to the other nodes.
  uint64_t incarnation() const { return incarnation_; }

  void Perform(WatchHost action);
  void Perform(UnwatchHost action);
  void Perform(CampaignFor action);
  void Perform(ResignFrom action);
  void Perform(StoreAgreedState action);
  void Perform(ForgetAgreedState action);
  void Perform(ChangePeers action) EXCLUDES(mutex_);
  void Perform(ConnectPeer action);
  void Perform(SayToPeer action);

  // Once, after Start. Gives name and jobs back, waiting for etcd no longer than a few seconds, and
  // ends everything; then calls `done`, on a thread of its own. No more of what peers say is
  // posted; what membership tells is, until then. Nothing is performed any more.
  void Stop(std::function<void()> done);

  ClusterView View() EXCLUDES(mutex_);

  // Any thread. To read from the memory of other nodes; and whether one that asks for that belongs
  // to this cluster, and means this start of this node.
  const std::shared_ptr<PullClient>& pulls() const { return pulls_; }
  absl::Status CheckCaller(const v1::OpenRequest& who) const;
  bool IsPeer(const std::string& node) EXCLUDES(mutex_);

 private:
  // Lets through what peers say as long as the core takes it. Outlives this object in what was
  // posted and is not taken yet.
  class Gate;
  struct Peer {
    bool reached = false;
    std::string problem;
  };

  absl::Status Listen(const v1::ClusterConfig& cluster);
  void OnMembership(const MembershipEvent& event) EXCLUDES(mutex_);
  void OnPeer(PeerEvent event) EXCLUDES(mutex_);
  void Note(const MembershipEvent& event) REQUIRES(mutex_);
  void Note(const PeerEvent& event) REQUIRES(mutex_);
  void NotePeer(const std::string& node, bool reached, const std::string& why) REQUIRES(mutex_);
  void Leave() EXCLUDES(mutex_);

  const v1::DaemonConfig config_;
  Env* const env_;
  const LinkLimits limits_;
  const uint64_t incarnation_;
  const std::shared_ptr<Gate> gate_;
  const std::shared_ptr<PullClient> pulls_;
  std::vector<grpc::Service*> services_;
  PostEvent post_;
  bool stopping_ = false;  // the owner's thread's
  std::string elsewhere_;  // at which other port, and why; set at the start
  std::string remembered_;
  ClusterNotes::Observer note_observer_;
  ClusterNotes* notes_ = nullptr;  // membership_'s, where it has etcd

  Mutex mutex_;
  CondVar left_changed_;
  bool left_ GUARDED_BY(mutex_) = false;
  bool leaving_ GUARDED_BY(mutex_) = false;
  bool member_ GUARDED_BY(mutex_) = false;
  std::set<std::string> members_ GUARDED_BY(mutex_);
  std::string problem_ GUARDED_BY(mutex_);                // membership's
  std::map<std::string, Peer> peers_ GUARDED_BY(mutex_);  // as ChangePeers names them

  // Their threads use what is above.
  std::unique_ptr<PeerNetwork> network_;
  std::unique_ptr<Membership> membership_;
  TaskThread ender_;
};

}  // namespace holdfast
