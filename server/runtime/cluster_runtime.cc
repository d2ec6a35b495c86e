#include "server/runtime/cluster_runtime.h"

#include <chrono>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "base/sync_point.h"
#include "base/units.h"
#include "base/utf8.h"
#include "client-lib/include/holdfast/version.h"
#include "server/membership/cluster_config.h"

namespace holdfast {
namespace {

// Less than a stop of the daemon may take.
constexpr Duration kLeaveDeadline = std::chrono::seconds(3);
constexpr size_t kPeerProblemsShown = 8;

uint64_t RandomBits() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

// Other machines have a say in the words, and in how often there are some.
void LogLine(LogLevel level, const std::string& text) {
  LogFrom(level, "cluster", absl::StrCat("cluster: ", text));
}

std::string NotReached(const std::string& node, const std::string& why) {
  return absl::StrCat("node '", node, "' is not reached: ", why, "; tried again by itself");
}

// What the nodes of a cluster have in common: whoever says something else belongs to another one.
std::string MembershipText(const v1::ClusterConfig& cluster) {
  if (cluster.members_size() > 0) {
    return absl::StrCat("a list that begins with ", cluster.members(0).name(), " at ",
                        cluster.members(0).address());
  }
  return cluster.has_etcd() ? "an etcd" : "neither a list nor an etcd";
}

// The kernel keeps the port for a killed ckptd until the call returns in which that hangs.
std::string ListensElsewhere(const v1::ClusterConfig& cluster, const std::string& listening) {
  return absl::StrCat(
      "the ckptd from before was killed, hangs in a call and keeps cluster.listen_address '",
      cluster.listen_address(), "'; this one listens at '", listening, "' until it is restarted, ",
      cluster.has_etcd() ? "and tells so to the other nodes, which have to reach that port"
                         : "where the other nodes, which have cluster.members, do not reach it; "
                           "restart it when that call has returned");
}

PeerNetworkOptions NetworkOptions(const v1::DaemonConfig& config, Env* env, uint64_t incarnation,
                                  const LinkLimits& limits) {
  const v1::ClusterTlsConfig& tls = config.cluster().tls();
  return {.self = config.node_name(),
          .incarnation = incarnation,
          .cluster = config.cluster().name(),
          .membership = MembershipText(config.cluster()),
          .listen = config.cluster().listen_address(),
          .tls = {tls.ca_file(), tls.cert_file(), tls.key_file()},
          .env = env,
          .limits = limits};
}

PullClient::Options PullOptionsOf(const v1::DaemonConfig& config, Env* env, uint64_t incarnation) {
  const PeerNetworkOptions network = NetworkOptions(config, env, incarnation, {});
  return {.self = network.self,
          .incarnation = incarnation,
          .cluster = network.cluster,
          .membership = network.membership,
          .tls = network.tls,
          .env = env};
}

}  // namespace

class ClusterRuntime::Gate {
 public:
  // Waits for room; false: the gate is closed. Whatever comes to an empty one has room.
  bool Enter(size_t bytes) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    while (!closed_ && messages_ > 0 &&
           (messages_ >= kUntakenMessagesMax || bytes_ + bytes > kUntakenBytesMax)) {
      changed_.Wait(mutex_);
    }
    if (closed_) {
      return false;
    }
    ++messages_;
    bytes_ += bytes;
    return true;
  }
  void Take(size_t bytes) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    --messages_;
    bytes_ -= bytes;
    changed_.NotifyAll();
  }
  void Close() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    closed_ = true;
    changed_.NotifyAll();
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  size_t messages_ GUARDED_BY(mutex_) = 0;
  size_t bytes_ GUARDED_BY(mutex_) = 0;
  bool closed_ GUARDED_BY(mutex_) = false;
};

ClusterRuntime::ClusterRuntime(const v1::DaemonConfig& config, Env* env, const LinkLimits& limits)
    : config_(config),
      env_(env),
      limits_(limits),
      incarnation_(RandomBits()),
      gate_(std::make_shared<Gate>()),
      pulls_(std::make_shared<PullClient>(PullOptionsOf(config, env, incarnation_))) {}

ClusterRuntime::~ClusterRuntime() {
  // An observer that waits for room is one that PeerNetwork's end would wait for.
  gate_->Close();
  ender_.Stop();
  membership_ = nullptr;
  network_ = nullptr;
}

absl::Status ClusterRuntime::Listen(const v1::ClusterConfig& cluster) {
  PeerNetworkOptions options = NetworkOptions(config_, env_, incarnation_, limits_);
  options.listen = cluster.listen_address();
  options.services = services_;
  network_ = std::make_unique<PeerNetwork>(std::move(options));
  return Annotate(network_->Start([this](PeerEvent event) { OnPeer(std::move(event)); }),
                  "cluster");
}

absl::Status ClusterRuntime::Start(PostEvent post, bool predecessor_hangs) {
  post_ = std::move(post);
  // 1. The port, which membership publishes.
  v1::ClusterConfig cluster = config_.cluster();
  absl::Status listens = Listen(cluster);
  if (!listens.ok() && predecessor_hangs) {
    UseAnyPort(cluster);
    listens = Listen(cluster);
    if (listens.ok()) {
      elsewhere_ = ListensElsewhere(config_.cluster(), network_->address());
      LogLine(LogLevel::kWarning, elsewhere_);
    }
  }
  HF_RETURN_IF_ERROR(listens);
  // 2. This node, under the incarnation that its peers ask for.
  NodeInfo self;
  self.name = config_.node_name();
  self.address = PublishedAddress(cluster, network_->address());
  self.labels = LabelsOf(config_.cluster().labels());
  self.capacity_bytes = config_.memory().bytes_max();
  self.version = HOLDFAST_VERSION_STRING;
  self.incarnation = incarnation_;
  HF_ASSIGN_OR_RETURN(membership_, CreateMembership({.config = config_.cluster(),
                                                     .self = self,
                                                     .state_dir = config_.state_dir(),
                                                     .env = env_}));
  LogInfo(absl::StrCat("cluster name=", config_.cluster().name(), " listen=", network_->address(),
                       " address=", self.address, " membership=",
                       config_.cluster().has_etcd()           ? "etcd"
                       : config_.cluster().members_size() > 0 ? "static"
                                                              : "alone"));
  notes_ = membership_->notes();
  if (notes_ != nullptr && note_observer_) {
    notes_->FollowNote(remembered_, note_observer_);
  }
  membership_->Start([this](const MembershipEvent& event) { OnMembership(event); });
  return absl::OkStatus();
}

void ClusterRuntime::FollowNote(std::string remembered, ClusterNotes::Observer observer) {
  remembered_ = std::move(remembered);
  note_observer_ = std::move(observer);
}

void ClusterRuntime::AskNote() {
  if (notes_ != nullptr && !stopping_) {
    notes_->AskNote();
  }
}

void ClusterRuntime::NoteRemote(std::string id, std::string instead_of) {
  if (notes_ != nullptr && !stopping_) {
    notes_->NoteRemote(std::move(id), std::move(instead_of));
  }
}

// ---- Actions ----

void ClusterRuntime::Perform(WatchHost action) {
  if (!stopping_) {
    membership_->WatchHost(action.job);
  }
}

void ClusterRuntime::Perform(UnwatchHost action) {
  if (!stopping_) {
    membership_->UnwatchHost(action.job);
  }
}

void ClusterRuntime::Perform(CampaignFor action) {
  HF_SYNC_POINT("daemon.host.campaigns");
  if (!stopping_) {
    membership_->Campaign(action.job, action.floor);
  }
}

void ClusterRuntime::Perform(ResignFrom action) {
  if (!stopping_) {
    membership_->Resign(action.job);
  }
}

void ClusterRuntime::Perform(StoreAgreedState action) {
  HF_SYNC_POINT("daemon.host.stores");
  if (!stopping_) {
    membership_->StoreState(action.job, action.epoch, action.version, std::move(action.state));
  }
}

void ClusterRuntime::Perform(ForgetAgreedState action) {
  if (!stopping_) {
    membership_->ForgetJob(action.job, action.epoch);
  }
}

void ClusterRuntime::Perform(ChangePeers action) {
  if (stopping_) {
    return;
  }
  {
    MutexLock lock(mutex_);
    for (const std::string& node : action.down) {
      peers_.erase(node);
    }
    for (const auto& [node, at] : action.up) {
      peers_.try_emplace(node);
    }
  }
  pulls_->ChangePeers(action);
  network_->ChangePeers(std::move(action));
}

void ClusterRuntime::Perform(ConnectPeer action) {
  if (!stopping_) {
    network_->Connect(action.node);
  }
}

void ClusterRuntime::Perform(SayToPeer action) {
  if (!stopping_) {
    network_->Say(action.node, action.channel, std::move(action.message));
  }
}

// ---- Events ----

void ClusterRuntime::OnMembership(const MembershipEvent& event) {
  if (std::holds_alternative<Elected>(event)) {
    HF_SYNC_POINT("daemon.host.elected");
  } else if (std::holds_alternative<StateStored>(event)) {
    HF_SYNC_POINT("daemon.host.agreed");
  }
  {
    MutexLock lock(mutex_);
    Note(event);
  }
  post_(MembershipTold{event}, [] {});
}

void ClusterRuntime::OnPeer(PeerEvent event) {
  {
    MutexLock lock(mutex_);
    Note(event);
  }
  const auto* spoke = std::get_if<PeerSpoke>(&event);
  const size_t bytes = spoke == nullptr ? 0 : spoke->message.size();
  if (gate_->Enter(bytes)) {
    post_(PeerTold{std::move(event)}, [gate = gate_, bytes] { gate->Take(bytes); });
  }
}

void ClusterRuntime::Note(const MembershipEvent& event) {
  if (std::holds_alternative<LeaseHolds>(event)) {
    if (!std::exchange(member_, true)) {
      LogLine(LogLevel::kInfo, "this node is a member");
    }
  } else if (const auto* lost = std::get_if<LeaseLost>(&event)) {
    member_ = false;
    LogLine(leaving_ ? LogLevel::kInfo : LogLevel::kWarning,
            absl::StrCat("this node is no member any more: ", lost->why));
  } else if (const auto* are = std::get_if<MembersAre>(&event)) {
    members_.clear();
    for (const NodeInfo& member : are->members) {
      members_.insert(member.name);
    }
    LogLine(LogLevel::kInfo, absl::StrCat("members: ", members_.size()));
  } else if (const auto* up = std::get_if<MemberUp>(&event)) {
    members_.insert(up->member.name);
    LogLine(LogLevel::kInfo,
            absl::StrCat("member '", up->member.name, "' at ", up->member.address));
  } else if (const auto* gone = std::get_if<MemberGone>(&event)) {
    members_.erase(gone->name);
    LogLine(LogLevel::kInfo, absl::StrCat("member '", gone->name, "' is gone"));
  } else if (const auto* wiped = std::get_if<ClusterWiped>(&event)) {
    LogLine(LogLevel::kWarning, wiped->what);
  } else if (const auto* problem = std::get_if<MembershipProblem>(&event)) {
    problem_ = Utf8Text(problem->text);
    LogLine(problem_.empty() ? LogLevel::kInfo : LogLevel::kWarning,
            problem_.empty() ? "membership is well" : problem_);
  } else if (std::holds_alternative<Left>(event)) {
    left_ = true;
    left_changed_.NotifyAll();
  }
}

void ClusterRuntime::Note(const PeerEvent& event) {
  if (const auto* reached = std::get_if<PeerReached>(&event)) {
    NotePeer(reached->node, true, "");
  } else if (const auto* lost = std::get_if<PeerLost>(&event)) {
    NotePeer(lost->node, false, lost->why);
  } else if (const auto* problem = std::get_if<PeerProblem>(&event)) {
    NotePeer(problem->node, problem->why.empty(), problem->why);
  } else if (const auto* silent = std::get_if<PeerSilent>(&event)) {
    LogLine(LogLevel::kWarning,
            absl::StrCat("nothing is heard of node '", silent->node,
                         "' any more: if it lives, it cannot connect to this one"));
  }
}

// What is told late of a node that is no member any more is of no interest.
void ClusterRuntime::NotePeer(const std::string& node, bool reached, const std::string& why) {
  const std::string problem = Utf8Text(why);  // it may be the other side's
  const auto it = peers_.find(node);
  if (it == peers_.end() || (it->second.reached == reached && it->second.problem == problem)) {
    return;
  }
  it->second = {reached, problem};
  if (reached) {
    LogLine(LogLevel::kInfo, absl::StrCat("node '", node, "' is reached"));
  } else if (!problem.empty()) {
    LogLine(LogLevel::kWarning, NotReached(node, problem));
  }
}

ClusterView ClusterRuntime::View() {
  MutexLock lock(mutex_);
  ClusterView view;
  view.member = member_;
  view.members = members_.size();
  if (!problem_.empty()) {
    view.problems.push_back(absl::StrCat("cluster: ", problem_));
  }
  if (!elsewhere_.empty()) {
    view.problems.push_back(absl::StrCat("cluster: ", elsewhere_));
  }
  size_t more = 0;
  size_t shown = 0;
  for (const auto& [node, peer] : peers_) {
    view.reached += peer.reached ? 1 : 0;
    if (peer.problem.empty()) {
      continue;
    }
    if (shown == kPeerProblemsShown) {
      ++more;
      continue;
    }
    ++shown;
    view.problems.push_back(absl::StrCat("cluster: ", NotReached(node, peer.problem)));
  }
  if (more > 0) {
    view.problems.push_back(absl::StrCat("cluster: ", more, " more nodes are not reached"));
  }
  return view;
}

absl::Status ClusterRuntime::CheckCaller(const v1::OpenRequest& who) const {
  if (who.to() != config_.node_name() ||
      (who.to_incarnation() != 0 && who.to_incarnation() != incarnation_)) {
    return absl::FailedPreconditionError(
        absl::StrCat("node '", Utf8Text(who.from()), "' means node '", Utf8Text(who.to()),
                     "', or another start of it: membership has not told yet"));
  }
  if (who.cluster() != config_.cluster().name() ||
      who.membership() != MembershipText(config_.cluster())) {
    return absl::FailedPreconditionError(
        absl::StrCat("node '", Utf8Text(who.from()), "' belongs to cluster '",
                     Utf8Text(who.cluster()), "' (", Utf8Text(who.membership()), "), this one to '",
                     config_.cluster().name(), "' (", MembershipText(config_.cluster()), ")"));
  }
  return absl::OkStatus();
}

bool ClusterRuntime::IsPeer(const std::string& node) {
  MutexLock lock(mutex_);
  return peers_.count(node) > 0;
}

// ---- The end ----

void ClusterRuntime::Stop(std::function<void()> done) {
  stopping_ = true;
  gate_->Close();
  ender_.Post([this, done = std::move(done)] {
    Leave();
    membership_ = nullptr;
    network_ = nullptr;
    done();
  });
}

void ClusterRuntime::Leave() {
  const auto until = std::chrono::steady_clock::now() + kLeaveDeadline;
  {
    MutexLock lock(mutex_);
    leaving_ = true;
  }
  membership_->Leave();
  MutexLock lock(mutex_);
  while (!left_) {
    if (!left_changed_.WaitUntil(mutex_, until)) {
      LogLine(LogLevel::kWarning,
              absl::StrCat("etcd did not take this node's leave within ",
                           FormatDuration(kLeaveDeadline),
                           "; others can have its jobs when its lease has ended"));
      return;
    }
  }
}

}  // namespace holdfast
