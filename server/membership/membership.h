// Who belongs to the cluster, and who decides for which job. Three ways to know, behind one
// interface: embedded (this node alone), a static list (its first member hosts every job), and
// etcd.
//
//   HF_ASSIGN_OR_RETURN(auto membership, CreateMembership({.config = cluster, .self = node,
//                                                          .state_dir = dir, .env = env}));
//   membership->Start([&](const MembershipEvent& event) { reactor.Post([&, event] { … }); });
//   membership->WatchHost("llama");             // HostIs or NoHost, and again whenever it changes
//   membership->Campaign("llama", epoch_seen);  // Elected, or CampaignLost with the winner
//   membership->StoreState("llama", epoch, 7, bytes);  // StateStored, StateFenced or StateFailed
//
// Owner: the daemon. Every call may come from any thread and returns at once; all that comes of it
// is told to the observer, on one thread, one event at a time. The observer must not block. After
// the destructor has returned it is called no more. What a job's name may be is CheckJobName's to
// say; other names are answered as failed.
//
// This node is a *member* from the first LeaseHolds on and while its clock (CLOCK_MONOTONIC) is
// before the newest `until`: nobody else can take its name or its jobs before then. LeaseLost ends
// that, and every hosting with it (a Deposed for each); membership then begins anew by itself, for
// ever.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/one_of.h"
#include "server/membership/cluster_note.h"
#include "server/node_messages.h"

namespace holdfast {

class Env;
namespace v1 {
class ClusterConfig;
}

// Larger states are answered with StateFailed.
inline constexpr size_t kAgreedStateBytesMax = size_t{1} << 20;
inline constexpr size_t kMembersMax = 65'536;
inline constexpr size_t kNodeLabelsMax = 64;
inline constexpr size_t kNodeTextBytesMax = 255;  // of a name, an address, a label's name or value
inline constexpr size_t kHostedJobsMax = 65'536;  // names that one node may be interested in

struct NodeLabel {
  std::string name;
  std::string value;
  auto operator<=>(const NodeLabel&) const = default;
};

struct NodeInfo {
  std::string name;
  std::string address;            // host:port
  std::vector<NodeLabel> labels;  // ordered by name, each name once
  uint64_t capacity_bytes = 0;
  std::string version;
  uint64_t incarnation = 0;  // random, of one start of the daemon; 0: not known (static lists)
  bool operator==(const NodeInfo&) const = default;
};

struct JobHost {
  std::string node;
  uint64_t incarnation = 0;
  Epoch epoch = 0;  // 0: not known (static lists, on nodes that are not the first)
  bool operator==(const JobHost&) const = default;
};

// --- What the observer is told ----------------------------------------------------------------

// This node is a member until then at least. Told whenever it grows.
struct LeaseHolds {
  MonotonicTime until;
};
struct LeaseLost {
  std::string why;
};

// All that live, ordered by name, this node too: first of all, and again when changes may have been
// missed. In between one at a time.
struct MembersAre {
  std::vector<NodeInfo> members;
};
struct MemberUp {  // new, or changed (another incarnation: it was started anew)
  NodeInfo member;
};
struct MemberGone {
  std::string name;
};

// etcd's data is not what it was (erased, or set back to an earlier state, or another cluster
// answers): nothing that was agreed before can be relied on to be there.
struct ClusterWiped {
  std::string what;
};

// What keeps membership from working, in the words of the status; empty: nothing any more.
struct MembershipProblem {
  std::string text;
};

struct HostIs {
  std::string job;
  JobHost host;
};
struct NoHost {
  std::string job;
};

// This node is the job's host under this epoch: above the campaign's floor, and never given before
// as long as etcd keeps its data. An etcd that was erased may give one twice: a host acts only when
// a majority of the nodes has noted its epoch as the highest; else it resigns and campaigns above
// theirs. The state is what was stored last (version 0: there is none).
struct Elected {
  std::string job;
  Epoch epoch = 0;
  Epoch state_epoch = 0;  // under which it was stored
  uint64_t state_version = 0;
  std::string state;
};
struct CampaignLost {
  std::string job;
  JobHost winner;   // without a node: `why`
  std::string why;  // a bad name, too many jobs; or etcd's data was erased meanwhile: the floor is
                    // to be found anew
};
// This node is not the host any more: the lease was lost, or somebody removed the key. Not told
// after Resign and ForgetJob.
struct Deposed {
  std::string job;
  Epoch epoch = 0;
};

struct StateStored {  // this version; earlier ones that were still on their way are superseded by
                      // it
  std::string job;
  Epoch epoch = 0;
  uint64_t version = 0;
};
struct StateFenced {  // not stored, and never will be: this node does not host the job under this
                      // epoch
  std::string job;
  Epoch epoch = 0;
  uint64_t version = 0;
};
struct StateFailed {  // refused (`why` says what for), or the lease was lost before it was known:
                      // then it may be stored or not
  std::string job;
  Epoch epoch = 0;
  uint64_t version = 0;
  std::string why;
};
struct StateIs {  // answer to ReadState; version 0: there is none
  std::string job;
  Epoch epoch = 0;
  uint64_t version = 0;
  std::string state;
  std::string
      why;  // not empty: it could not be read, and never will (a bad name, bytes that are no state)
};
struct JobForgotten {
  std::string job;
  Epoch epoch = 0;
  bool forgotten = false;  // false: this node does not host it under this epoch
};
struct Left {};  // answer to Leave

using AnyMembershipEvent =
    std::variant<LeaseHolds, LeaseLost, MembersAre, MemberUp, MemberGone, ClusterWiped,
                 MembershipProblem, HostIs, NoHost, Elected, CampaignLost, Deposed, StateStored,
                 StateFenced, StateFailed, StateIs, JobForgotten, Left>;
extern template class OneOf<AnyMembershipEvent>;
struct MembershipEvent : OneOf<AnyMembershipEvent> {
  using OneOf::OneOf;
};
using MembershipObserver = std::function<void(const MembershipEvent&)>;

class Membership {
 public:
  virtual ~Membership() = default;

  // Once. Comes back at once, whatever the network does.
  virtual void Start(MembershipObserver observer) = 0;
  // Gives the name and the hosted jobs back, so that others need not wait for the lease to end: for
  // a clean stop. Nothing else may be called afterwards. If etcd does not answer, Left comes not:
  // wait with a deadline.
  virtual void Leave() = 0;

  // Tells the present host as soon as it is known, then every change.
  virtual void WatchHost(const std::string& job) = 0;
  virtual void UnwatchHost(const std::string& job) = 0;

  // Exactly one answer, Elected or CampaignLost, unless Resign comes first; it may take as long as
  // etcd is away. A floor is the highest epoch that this node remembers. While the campaign runs
  // another call raises its floor; while this node hosts the job it is ignored.
  virtual void Campaign(const std::string& job, Epoch floor) = 0;
  // Ends the hosting, or the campaign.
  virtual void Resign(const std::string& job) = 0;

  // Exactly one answer. Versions grow within an epoch.
  virtual void StoreState(const std::string& job, Epoch epoch, uint64_t version,
                          std::string state) = 0;
  virtual void ReadState(const std::string& job) = 0;
  // Removes state and host of a job that this node hosts; its epoch stays, so that it never goes
  // back. Ends the hosting.
  virtual void ForgetJob(const std::string& job, Epoch epoch) = 0;

  // What the cluster has agreed on for good. Null: nothing that all nodes share keeps it.
  virtual ClusterNotes* notes() { return nullptr; }
};

struct MembershipOptions {
  const v1::ClusterConfig& config;  // sound: CheckClusterConfig
  NodeInfo self;                    // without an incarnation: one is made here
  std::string state_dir;            // exists; a small file of ours lies there
  Env* env = nullptr;
  const Clock* clock = nullptr;  // default: the system's
};

// Touches neither network nor disk.
absl::StatusOr<std::unique_ptr<Membership>> CreateMembership(MembershipOptions options);

}  // namespace holdfast
