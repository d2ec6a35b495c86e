// Carries what agents and coordinators of different nodes say to each other, and finds out which
// node hosts a job: the part of a node's control logic that exists only in a cluster
// (docs/protocol.md §16).
//
//   Router router(owner, names, "node-a");
//   router.Handle(membership_event, time);     // who lives, who hosts what, elections
//   router.Handle(peer_event, time);           // channels, and what comes over them
//   router.Handle(notice, time);               // JobWanted: a client here asks for a job
//   router.FromAgent(job, message, time);      // → the job's host, wherever that is
//   router.FromCoordinator(job, out, time);    // of a job hosted here → the agents of its nodes
//   router.Settle(time); router.Flush(time);   // when nobody has anything to say any more
//
// A node and a host meet: the host says JobHosted, the node answers with NodeArrived, which is all
// that a coordinator must know of it. Whenever anything may have been lost between the two (a
// channel broke, a daemon was started anew, another node became the host) they meet again; so
// nothing else is ever repeated, but for requests of clients that were not answered.
//
// Every message carries the epoch of the host. A node takes commands of the highest epoch that it
// has heard of, and of no other; a host steps down when its lease ends by its own clock.
//
// Owned by NodeCore; not thread-safe; no I/O, no clock.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/agent.h"
#include "server/events.h"
#include "server/messages.h"
#include "server/node_messages.h"
#include "server/node_names.h"
#include "server/peer_codec.h"

namespace holdfast {

// How long a new host waits for all that live to tell what they keep; then for more than half.
inline constexpr Duration kCollectAll = std::chrono::seconds(3);
// … and, where few of the nodes that the job's state names are there, for those that were not told
// to have left: a membership that has lost its memory hears of them again within that time.
inline constexpr Duration kCollectKnown = std::chrono::seconds(20);
// Who campaigns for a job without a host: the first in the job's own order of the living at once,
// the others so much later, that one of them is enough.
inline constexpr Duration kCampaignStep = std::chrono::milliseconds(20);
inline constexpr size_t kCampaignStepsMax = 50;
inline constexpr Duration kCampaignAgain = std::chrono::seconds(1);
// A host that no more than half of the members can hear, or be heard by, for so long gives way.
inline constexpr Duration kAloneGrace = std::chrono::seconds(30);
// So does one whose own daemon has failed for so long to write what all have agreed on.
inline constexpr Duration kUnwrittenGrace = std::chrono::seconds(15);
// A node that could not host a job lets others try for so long.
inline constexpr Duration kHostAgain = std::chrono::seconds(30);
// What the ranks of a node begin and seal at about the same time goes to the host together.
inline constexpr Duration kGather = std::chrono::milliseconds(20);
// A state in which nothing but ranks and nodes differs from what the nodes were told last is told
// with the next ones, so much later: while thousands of ranks join there are hundreds.
inline constexpr Duration kTellStates = std::chrono::milliseconds(500);
// A message may have been on its way for so long.
inline constexpr Duration kPeerSlack = std::chrono::seconds(15);
inline constexpr Duration kGoneGrace = std::chrono::seconds(1);        // of a node without a lease
inline constexpr Duration kForwardDeadline = std::chrono::seconds(4);  // of what ckptctl asks
inline constexpr Duration kRemovalDeadline = std::chrono::minutes(5);  // … of the end of a removal
// … of all nodes, or of one, where nothing gets to it: it may be about to be reached.
inline constexpr Duration kUnreachedWait = std::chrono::milliseconds(500);
inline constexpr size_t kForwardedMax = 1024;         // either way
inline constexpr size_t kAnswerBytesMax = 16u << 20;  // to one node, that wait for a channel to it
// Who asks another node for a job waits so long, if that was not said; at most:
inline constexpr Duration kSoughtFor = std::chrono::seconds(60);
inline constexpr uint64_t kSoughtForMaxMs = 3'600'000;
// Of a list, when so many names are watched, those that nobody needs any more are looked for; then
// when there are twice as many as were left.
inline constexpr size_t kWatchedMin = 64;

// What the router needs of the node it is in.
class RouterOwner {
 public:
  virtual ~RouterOwner() = default;
  virtual void Act(Action action) = 0;
  // The agent (server/agent.h).
  // False: it cannot be hosted here.
  virtual bool BeginHosting(const std::string& name, const v1::JobState* state) = 0;
  virtual void EndHosting(const std::string& name) = 0;
  virtual void Want(const std::string& name, const JobWanter& wanter) = 0;  // on another node
  virtual void WantHere(const std::string& name) = 0;
  virtual void Meet(const std::string& name, const JobUuid& job, const JobHosted& hosted) = 0;
  virtual std::optional<v1::JobState> KeptState(const std::string& name) = 0;
  virtual void KeepState(const v1::JobState& state) = 0;
  virtual absl::Status CheckState(const std::string& name, const v1::JobState& state) = 0;
  virtual std::string JobName(const JobUuid& job) = 0;  // empty: it is not known here
  virtual void TellAgent(const JobUuid& job, const ToAgent& message) = 0;
  virtual bool Waits(RequestToken token) = 0;  // whether a client still does
  virtual uint64_t RanksHere(const JobUuid& job) = 0;
  // Clients that wait until a host of that name is met: to join, or to read.
  virtual bool JoinsWait(const std::string& name) = 0;
  virtual bool ReadersWait(const std::string& name) = 0;
  virtual std::optional<JobWanter> WhoJoins(const std::string& name) = 0;
  virtual void AskAgent(const AdminRequest& request) = 0;  // → Router::TakesReply
  virtual v1::DaemonStatus DescribeDaemon(const Caller& caller) = 0;
  virtual bool MayTouch(const std::string& name, const Caller& caller) = 0;
  virtual bool IsAbsent(const std::string& name) = 0;  // hosted here, looked for, and not there
  virtual void SayAbsent(const std::string& name) = 0;
  virtual void LetGo(const std::string& name, const std::vector<JobUuid>& jobs) = 0;
  virtual void OthersLetGo(const JobUuid& job, uint64_t bytes) = 0;
  virtual void OthersAreLate(const JobUuid& job, const absl::Status& why) = 0;
  virtual std::vector<JobUuid> RemovedBefore(const std::string& name) = 0;
  // A coordinator that lives here. What it answers comes by FromCoordinator.
  virtual void TellCoordinator(const JobUuid& job, NodeId from, const ToCoordinator& message) = 0;
  // For that node; nothing if there is no such coordinator any more.
  virtual std::optional<JobHosted> Describe(const JobUuid& job, NodeId to) = 0;
};

class Router {
 public:
  // `fixed_host`: the cluster is a list, and no other node can ever be elected in this one's place.
  Router(RouterOwner& owner, NodeNames& names, bool fixed_host);

  void Handle(const MembershipEvent& event, EventTime time);
  void Handle(const PeerEvent& event, EventTime time);
  void Handle(const AgentNotice& notice, EventTime time);
  void FromAgent(const JobUuid& job, ToCoordinator message, EventTime time);
  void FromCoordinator(const JobUuid& job, const std::vector<ForAgent>& messages, EventTime time);

  // Whether it is for other nodes to answer; then its AdminReply comes when they have.
  bool TakesOver(const AdminRequest& request, EventTime time);
  // Whether another node, or this one for it, waits for that.
  bool TakesReply(const AdminReply& reply);
  void Handle(const ReadForPeer& event, EventTime time);

  // Requests that the present host has not heard; after all that the agent had to say.
  void Settle(EventTime time);
  // What was said to hosts goes on its way.
  void Flush(EventTime time);
  void Expire(EventTime time);
  std::optional<MonotonicTime> NextDeadline() const;

  bool Hosts(const std::string& name) const;
  // For errors and the status: the node that hosts the job, or why nobody does.
  std::string HostOf(const std::string& name) const;
  // Why nothing is heard of the job's host, as far as it is known here: else empty.
  std::string WhyNotHeard(const std::string& name) const;
  std::vector<NodeInfo> Members() const;

  std::string CheckInvariants() const;

 private:
  struct Peer {
    NodeInfo info;
    PeerChannel channel = 0;             // to it; 0: none now
    bool heard = false;                  // there is one from it, too
    std::vector<std::string> answers{};  // that wait for one
    size_t answer_bytes = 0;
  };
  struct Unanswered {
    ToCoordinator message;
    uint64_t said_in = 0;  // the meeting in which it was said; 0: none
  };
  // The job is being removed: these nodes are to let go of it first.
  struct Removing {
    JobUuid job;
    std::set<std::string> waits_for;
    uint64_t bytes = 0;  // that the others had
  };
  // This node was elected.
  struct Hosting {
    Epoch epoch = 0;
    // Until it acts: what others keep of the job.
    bool acts = false;
    MonotonicTime since{};
    std::set<std::string> told;
    MonotonicTime collect_until{};
    Epoch highest = 0;  // that any of them had noted
    std::optional<v1::JobState> best;
    std::vector<std::string> best_names;  // of its nodes
    // Then: those that have told what they have, over the present channel.
    std::optional<JobUuid> job;
    std::set<NodeId> arrived;
    std::map<std::pair<NodeId, RequestToken>, RequestToken> tokens;  // theirs → here
    std::map<RequestToken, std::pair<NodeId, RequestToken>> origins;
    // The state that is being made durable: here, and in what all agree on.
    uint64_t writing = 0;
    uint64_t stored = 0;  // the newest that all agree on
    bool written_here = false;
    bool agreed = false;
    absl::Status failure;
    // What the nodes were told of it last, but for ranks and nodes; and what they are told next.
    std::string told_state;
    std::optional<v1::JobState> untold;
    MonotonicTime tell_at{};
    std::optional<MonotonicTime> unwritten_since;  // no write here has succeeded
    std::optional<Removing> removing;
  };
  struct Job {
    bool watched = false;  // something of it is here, or a client asks for it
    bool asked = false;    // membership was, who hosts it
    std::optional<JobHost> host;
    bool nobody = false;  // hosts it, as far as the cluster knows
    Epoch highest = 0;    // no command of a lower one is taken
    // Which node said that it hosts the job under that one; empty: known from the drive, or by a
    // campaign. (Not what membership says: an etcd that was erased may give an epoch twice.)
    std::string highest_of;
    std::optional<MonotonicTime> campaign_at;
    MonotonicTime not_before{};  // does it campaign: it could not host it
    bool campaigning = false;
    std::optional<JobWanter> wanted;  // by a client here, which has no job yet
    JobWanters sought;  // by clients of other nodes, which believe that the job is hosted here
    bool read = false;  // clients here wait to read it, and it is not known here
    std::set<std::string> readers;  // other nodes of which that is so, and who believe as above
    // What the host said of itself over its present channel, and whether this node has answered
    // over the present channel to it.
    std::optional<JobUuid> uuid;
    std::optional<JobHosted> hosted;
    PeerChannel met_over = 0;
    uint64_t meeting = 0;
    std::map<RequestToken, Unanswered> unanswered;
    std::vector<ToCoordinator> outgoing;
    bool urgent = false;                          // one of them waits for no others
    std::optional<MonotonicTime> gather_until{};  // the others wait for more
    std::optional<Hosting> hosting;
  };
  using Jobs = std::map<std::string, Job>;
  // What ckptctl asked here.
  struct Forwarded {
    struct Ask {
      std::string job;   // it is for that job's host
      std::string node;  // for that node. Neither: all nodes are asked for what they host
      uint32_t uid = 0;
      uint32_t gid = 0;
      ForwardedRequest request;
    };
    AdminToken token = 0;
    Ask ask;
    MonotonicTime until{};
    std::string sent_to{};
    std::set<std::string> waits_for{};  // of all nodes, or of one: those that have not answered
    // From when on those that nothing gets to are given up.
    MonotonicTime unreached_until{};
    v1::GetStatusReply all{};
    std::vector<std::string> problems{};
  };

  // router.cc: members, channels, who hosts
  void On(const LeaseHolds& e);
  void On(const LeaseLost& e);
  void On(const MembersAre& e);
  void On(const MemberUp& e);
  void On(const MemberGone& e);
  void On(const ClusterWiped& e);
  void On(const MembershipProblem& e);
  void On(const HostIs& e);
  void On(const NoHost& e);
  void On(const Elected& e);
  void On(const CampaignLost& e);
  void On(const Deposed& e);
  void On(const StateStored& e);
  void On(const StateFenced& e);
  void On(const StateFailed& e);
  void On(const StateIs&) {}
  void On(const JobForgotten&) {}
  void On(const Left&) {}
  void On(const PeerReached& e);
  void On(const PeerLost& e);
  void On(const PeerProblem& e);
  void On(const PeerBegan& e);
  void On(const PeerSilent& e);
  void On(const PeerSpoke& e);
  void On(const JobNoticed& e);
  void On(const JobWanted& e);
  void On(const JobRead& e);
  void On(const JobMissed& e);
  void On(const JobOpened& e);
  void On(const JobRemovalAgreed& e);
  void On(const JobGoing& e);
  void On(const JobGone& e);
  void PutMember(const NodeInfo& member);
  void GreetMember(const std::string& name);
  void DropMember(const std::string& name);
  static bool InReach(const Peer& peer) { return peer.channel != 0 && peer.heard; }
  void SetReach(Peer& peer, PeerChannel channel, bool heard);
  void JudgeReach();
  Job& Watch(const std::string& name);
  Job& Ask(const std::string& name);
  void MaybeForget(const std::string& name);
  bool IsNeeded(const std::string& name, Job& job);
  void ForgetUnneeded();
  Job* Find(const std::string& name);
  void SetHost(const std::string& name, Job& job, const JobHost& host);
  void PlanCampaign(const std::string& name, Job& job);
  void Campaign(const std::string& name, Job& job);
  bool IsMember() const { return time_.now < lease_until_; }
  void Note(Job& job, const std::string& name, const std::string& host, Epoch epoch);
  static bool OfAnother(const Job& job, const std::string& node);
  PeerChannel ChannelTo(const std::string& node) const;
  void Say(const std::string& node, const PeerHeader& header, const NodeMessage& message);
  void Say(const std::string& node, const absl::StatusOr<std::string>& bytes);
  void Answer(const std::string& node, const PeerHeader& header, const NodeMessage& message);
  void Answer(const std::string& node, absl::StatusOr<std::string> bytes);
  void Complain(const std::string& job, std::string text);

  // router_node.cc: this node and the hosts of its jobs
  void Seek(const std::string& name, Job& job);
  bool CanTell(const Job& job) const;
  void TryMeet(const std::string& name, Job& job);
  void Unmeet(Job& job);
  void Tell(const std::string& name, Job& job, ToCoordinator message);
  void ForgetOutgoing(Job& job);
  static std::vector<NodeArrived::Joining> Joining(const Job& job);
  bool Gathers(Job& job);
  void FromHost(const std::string& node, const PeerHeader& header, const ToAgent& message);
  void RefuseUnanswered(const std::string& name, Job& job);
  void ForgetEnded(Job& job);
  void DeliverToAgent(Job& job, const ToAgent& message);
  void On(const std::string& node, const PeerHeader& header, const JobHosted& m);
  void On(const std::string& node, const PeerHeader& header, const JobAbsent& m);
  void On(const std::string& node, const PeerHeader& header, const StateKept& m);
  void On(const std::string& node, const PeerHeader& header, const StateAsked& m);

  // router_host.cc: jobs that this node hosts
  void On(const std::string& node, const PeerHeader& header, const StateTold& m);
  void On(const std::string& node, const PeerHeader& header, const JobSought& m);
  void Ask(const std::string& name, Job& job, const std::string& node);
  void Consider(const std::string& name, Hosting& hosting, const v1::JobState& state);
  void MaybeAct(const std::string& name, Job& job);
  size_t OthersThatMayKnow(const Hosting& hosting) const;
  std::optional<MonotonicTime> WaitsUntil(const Hosting& hosting) const;
  std::optional<MonotonicTime> GivesWayAt(const Hosting& hosting) const;
  void CannotHost(const std::string& name, Job& job);
  void CampaignAbove(const std::string& name, Job& job, Epoch floor);
  void Introduce(const std::string& name, Job& job, const std::string& node);
  void FromNode(const std::string& node, const PeerHeader& header,
                const std::vector<ToCoordinator>& messages);
  void SayToArrived(const Hosting& hosting, NodeId to, const absl::StatusOr<std::string>& bytes);
  void ForgetTokens(Hosting& hosting, NodeId node);
  void NodeIsLost(const std::string& node, bool ended, const std::string& why);
  void JobLoses(Job& job, NodeId node, bool ended, const std::string& why);
  void StepDown(const std::string& name, Job& job, bool resign);
  void StateDone(const std::string& name, Job& job);
  void TellState(const std::string& name, Hosting& hosting, const v1::JobState& state);

  // router_removal.cc: jobs that are removed, and names that nobody has
  void TellRemoved(const std::string& name, Job& job, const std::string& node);
  void NeedsNoWord(Job& job, const std::string& node);
  void MaybeRemoveHere(Job& job);
  bool RemovalIsAgreed(const std::string& name, Hosting& hosting);
  void Retire(const std::string& name, Job& job);
  void On(const std::string& node, const PeerHeader& header, const JobsRemoved& m);
  void On(const std::string& node, const PeerHeader& header, const JobLetGo& m);

  // router_admin.cc: what ckptctl asks
  void AskNode(const AdminRequest& e, const ForwardedRequest& request, const std::string& node);
  bool Overloaded(const AdminRequest& e);
  uint64_t NewForwarded();
  void SendForwarded(uint64_t id);
  void AskAll(const AdminRequest& e, const ForwardedRequest& request);
  void ForwardedMayGoOn();
  void SendForwardedAgain(const std::string& job);
  void AskAgain(const std::string& node);
  void GiveUpForwarded(const std::string& node);
  void GiveUpUnreached();
  void TakePart(uint64_t id, const std::string& node, const absl::Status& status,
                ReturnedReply& reply);
  std::string WhyNoAnswer(const std::string& node) const;
  absl::Status HostIsSilent(const std::string& job, const std::string& host) const;
  void FailForwarded(uint64_t id, absl::Status status);
  void TakeReply(const std::string& node, uint64_t id, absl::Status status, ReturnedReply reply);
  void AnswerAll(uint64_t id);
  void ExpireForwarded();
  void AnswerNodes(const AdminRequest& e);
  absl::Status NoSuchJob(const std::string& name) const;
  uint64_t NewAnswering(const std::string& node, uint64_t their);
  void AskAgent(AdminToken token, uint32_t uid, uint32_t gid, const ForwardedRequest& request);
  void On(const std::string& node, const PeerHeader& header, const AdminForwarded& m);
  void On(const std::string& node, const PeerHeader& header, const AdminReturned& m);

  RouterOwner& owner_;
  NodeNames& names_;
  const std::string self_;
  const bool fixed_host_;
  EventTime time_;
  MonotonicTime lease_until_{};
  std::string problem_;
  NodeInfo own_;
  std::map<std::string, Peer> peers_;         // the other living members
  size_t reached_ = 0;                        // of these, how many there are channels to and from
  std::optional<MonotonicTime> alone_since_;  // that is no more than half of the members
  Jobs jobs_;
  size_t forget_above_ = kWatchedMin;          // with that many jobs it is time to forget some
  std::map<std::string, MonotonicTime> gone_;  // nodes: when they count as gone for good
  std::set<std::string> left_;  // whose lease has ended, as far as what tells so can be relied on
  MonotonicTime left_counts_from_{};   // not before: membership has lost its memory
  std::set<std::string> before_wipe_;  // who were members when it did
  std::map<std::string, std::string> peer_problems_;
  std::map<uint64_t, Forwarded> forwarded_;
  uint64_t last_forwarded_ = 0;  // begins with the time: none of an earlier life's is used twice
  std::map<AdminToken, std::pair<std::string, uint64_t>> answering_;  // whom, and their number
  AdminToken next_answering_ = kFirstForeignToken;
  std::map<JobUuid, std::pair<std::string, Epoch>> letting_go_;  // at whose word
  std::set<std::string> to_settle_;  // jobs that met since, or have something for their host
  RequestToken next_token_ = kFirstForeignToken;
  // Tokens of other nodes' requests, as this node's coordinators see them; the agent's are below.
  static constexpr RequestToken kFirstForeignToken = RequestToken{1} << 63;
};

}  // namespace holdfast
