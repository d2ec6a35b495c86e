// Members, channels, and who hosts what.
#include "server/router.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/status.h"

namespace holdfast {

Router::Router(RouterOwner& owner, NodeNames& names, bool fixed_host)
    : owner_(owner), names_(names), self_(names.Name(kHere)), fixed_host_(fixed_host) {}

void Router::Handle(const MembershipEvent& event, EventTime time) {
  time_ = time;
  std::visit([this](const auto& e) { On(e); }, event);
}

void Router::Handle(const PeerEvent& event, EventTime time) {
  time_ = time;
  std::visit([this](const auto& e) { On(e); }, event);
}

void Router::Handle(const AgentNotice& notice, EventTime time) {
  time_ = time;
  std::visit([this](const auto& e) { On(e); }, notice);
}

// ---- The lease ----

void Router::On(const LeaseHolds& e) {
  lease_until_ = std::max(lease_until_, e.until);
  for (auto& [name, job] : jobs_) {
    PlanCampaign(name, job);
  }
}

void Router::On(const LeaseLost&) {
  lease_until_ = MonotonicTime{};
  Expire(time_);
}

// (The floor of the next campaign is what the nodes remember: an epoch that is not above it is
// found out by asking them.)
void Router::On(const ClusterWiped& e) {
  if (left_counts_from_ <= time_.now) {
    before_wipe_.clear();
  }
  left_.clear();
  left_counts_from_ = time_.now + kCollectKnown;
  for (const auto& [name, peer] : peers_) {
    before_wipe_.insert(name);
  }
  Complain("", absl::StrCat("what the cluster agreed on is not there any more: ", e.what));
}

void Router::On(const MembershipProblem& e) {
  problem_ = e.text;
}

// ---- Members ----

void Router::On(const MembersAre& e) {
  std::set<std::string> there;
  for (const NodeInfo& member : e.members) {
    there.insert(member.name);
    PutMember(member);
  }
  std::vector<std::string> gone;
  for (const auto& [name, peer] : peers_) {
    if (there.count(name) == 0) {
      gone.push_back(name);
    }
  }
  for (const std::string& name : gone) {
    DropMember(name);
  }
}

void Router::On(const MemberUp& e) {
  PutMember(e.member);
}

void Router::On(const MemberGone& e) {
  DropMember(e.name);
}

void Router::PutMember(const NodeInfo& member) {
  if (member.name == self_) {
    own_ = member;
    return;
  }
  const auto [it, fresh] = peers_.try_emplace(member.name);
  gone_.erase(member.name);
  left_.erase(member.name);
  const bool anew = !fresh && it->second.info.incarnation != member.incarnation;
  const bool moved = !fresh && it->second.info.address != member.address;
  it->second.info = member;
  if (fresh || anew || moved) {
    owner_.Act(ChangePeers{{{member.name, {member.address, member.incarnation}}}, {}});
  }
  if (anew || moved) {
    peer_problems_.erase(member.name);  // of where, or what, it was
  }
  if (!fresh && !anew) {
    return;
  }
  JudgeReach();
  if (anew) {  // its daemon was started anew: its processes live on
    SetReach(it->second, 0, false);
    it->second.answers.clear();
    it->second.answer_bytes = 0;
    NodeIsLost(member.name, false, "its ckptd was started anew");
  }
  GreetMember(member.name);
}

void Router::GreetMember(const std::string& member) {
  if (fixed_host_) {  // of a list, a handful: what is wrong between two of them shows at once
    owner_.Act(ConnectPeer{member});
  }
  for (auto& [name, job] : jobs_) {
    if (job.hosting) {
      Ask(name, job, member);
    } else if (job.host && job.host->node == member) {
      owner_.Act(ConnectPeer{member});
    }
  }
}

void Router::DropMember(const std::string& name) {
  const auto peer = peers_.find(name);
  if (peer == peers_.end()) {
    return;
  }
  SetReach(peer->second, 0, false);
  peers_.erase(peer);
  JudgeReach();
  peer_problems_.erase(name);
  owner_.Act(ChangePeers{{}, {name}});
  // A daemon that is started anew ends its last lease and is a member again at once: its ranks
  // live.
  NodeIsLost(name, false, "its lease has ended");
  gone_[name] = std::max(time_.now + kGoneGrace, left_counts_from_);
  if (left_counts_from_ <= time_.now) {
    left_.insert(name);
  }
  for (auto& [job_name, job] : jobs_) {
    if (job.host && job.host->node == name) {
      Unmeet(job);
      job.host.reset();
      owner_.Act(WatchHost{job_name});  // that it hosts no more may have been told before
    }
    NeedsNoWord(job, name);
    MaybeAct(job_name, job);
  }
  GiveUpForwarded(name);
}

void Router::SetReach(Peer& peer, PeerChannel channel, bool heard) {
  if (channel != peer.channel) {
    // What waits to be said to a host there is told with all that is here, when they meet again.
    for (auto& [name, job] : jobs_) {
      if (!job.hosting && job.host && job.host->node == peer.info.name) {
        ForgetOutgoing(job);
      }
    }
  }
  reached_ -= InReach(peer) ? 1 : 0;
  peer.channel = channel;
  peer.heard = heard;
  reached_ += InReach(peer) ? 1 : 0;
  JudgeReach();
}

void Router::JudgeReach() {
  if ((reached_ + 1) * 2 > peers_.size() + 1) {
    alone_since_.reset();
  } else if (!alone_since_) {
    alone_since_ = time_.now;
  }
}

std::vector<NodeInfo> Router::Members() const {
  std::vector<NodeInfo> members;
  if (!own_.name.empty()) {
    members.push_back(own_);
  }
  for (const auto& [name, peer] : peers_) {
    members.push_back(peer.info);
  }
  return members;
}

// ---- Channels ----

void Router::On(const PeerReached& e) {
  const auto peer = peers_.find(e.node);
  if (peer == peers_.end()) {
    return;
  }
  SetReach(peer->second, e.channel, peer->second.heard);
  for (const std::string& bytes : std::exchange(peer->second.answers, {})) {
    Say(e.node, bytes);
  }
  peer->second.answer_bytes = 0;
  peer_problems_.erase(e.node);
  ForwardedMayGoOn();
  AskAgain(e.node);
  for (auto& [name, job] : jobs_) {
    if (job.hosting) {
      Ask(name, job, e.node);
    } else if (job.host && job.host->node == e.node) {
      Seek(name, job);
      TryMeet(name, job);
    }
  }
}

void Router::On(const PeerLost& e) {
  const auto peer = peers_.find(e.node);
  if (peer == peers_.end() || peer->second.channel != e.channel) {
    return;
  }
  SetReach(peer->second, 0, peer->second.heard);
  peer_problems_[e.node] = e.why;  // (nothing more is told until the cause is another one)
  for (auto& [id, forwarded] : forwarded_) {  // another channel may come at once
    forwarded.unreached_until = std::max(forwarded.unreached_until, time_.now + kUnreachedWait);
  }
  NodeIsLost(e.node, false, e.why);
}

void Router::On(const PeerProblem& e) {
  if (e.why.empty() || peers_.count(e.node) == 0) {
    peer_problems_.erase(e.node);
  } else {
    peer_problems_[e.node] = e.why;
    GiveUpUnreached();
  }
}

// What it had said as a host may be lost, and what it had said of itself to hosts here: it says
// all of that again. What it keeps of a job it tells when it is asked alone.
void Router::On(const PeerBegan& e) {
  const auto peer = peers_.find(e.node);
  if (peer == peers_.end()) {
    return;
  }
  SetReach(peer->second, peer->second.channel, true);
  const NodeId node = names_.Number(e.node);
  for (auto& [name, job] : jobs_) {
    if (job.hosting && !job.hosting->acts && job.hosting->told.count(e.node) == 0) {
      Ask(name, job, e.node);
    }
    if (job.hosting && job.hosting->arrived.erase(node) > 0) {
      ForgetTokens(*job.hosting, node);
    }
    if (!job.hosting && job.host && job.host->node == e.node) {
      Unmeet(job);
      Seek(name, job);
    }
    // That it has let go may have been lost with the channel before.
    if (job.hosting && job.hosting->removing && job.hosting->removing->waits_for.count(e.node)) {
      TellRemoved(name, job, e.node);
    }
  }
}

// What it has to say of what happens there does not come: it is out of reach until it opens a
// channel again, and then it tells all anew, wherever it was known to have told.
void Router::On(const PeerSilent& e) {
  const auto peer = peers_.find(e.node);
  if (peer == peers_.end() || !peer->second.heard) {
    return;
  }
  const bool was_told = peer->second.channel == 0;  // by PeerLost
  SetReach(peer->second, peer->second.channel, false);
  const NodeId node = names_.Number(e.node);
  for (auto& [name, job] : jobs_) {
    if (job.hosting && job.hosting->job && (!was_told || job.hosting->arrived.count(node) > 0)) {
      JobLoses(job, node, false, "nothing is heard of it any more");
    }
  }
}

void Router::On(const PeerSpoke& e) {
  if (peers_.count(e.node) == 0) {
    return;  // it is no member any more: what it had said before comes too late
  }
  const absl::StatusOr<PeerSaid> said =
      DecodePeer(e.message, {names_.Number(e.node), time_, kPeerSlack});
  if (!said.ok()) {
    return Complain(
        "", absl::StrCat("a message of ", e.node, " was not understood: ", Message(said.status())));
  }
  struct Visitor {
    Router& router;
    const std::string& node;
    const PeerHeader& header;
    void operator()(const std::vector<ToCoordinator>& messages) {
      router.FromNode(node, header, messages);
    }
    void operator()(const ToAgent& message) { router.FromHost(node, header, message); }
    void operator()(const NodeMessage& message) {
      std::visit([this](const auto& m) { router.On(node, header, m); }, message);
    }
  };
  std::visit(Visitor{*this, e.node, said->header}, said->messages);
}

PeerChannel Router::ChannelTo(const std::string& node) const {
  const auto peer = peers_.find(node);
  return peer == peers_.end() ? 0 : peer->second.channel;
}

void Router::Say(const std::string& node, const PeerHeader& header, const NodeMessage& message) {
  Say(node, EncodePeer(header, message));
}

void Router::Say(const std::string& node, const absl::StatusOr<std::string>& bytes) {
  if (!bytes.ok()) {
    return Complain(
        "", absl::StrCat("a message to ", node, " could not be sent: ", Message(bytes.status())));
  }
  if (const PeerChannel channel = ChannelTo(node); channel != 0) {
    owner_.Act(SayToPeer{node, channel, *bytes});
  }
}

// Whoever asks need not be known by a channel back.
void Router::Answer(const std::string& node, const PeerHeader& header, const NodeMessage& message) {
  Answer(node, EncodePeer(header, message));
}

void Router::Answer(const std::string& node, absl::StatusOr<std::string> bytes) {
  const auto peer = peers_.find(node);
  if (peer == peers_.end()) {
    return;
  }
  if (peer->second.channel != 0 || !bytes.ok()) {
    return Say(node, bytes);
  }
  owner_.Act(ConnectPeer{node});
  if (peer->second.answer_bytes + bytes->size() <= kAnswerBytesMax) {
    peer->second.answer_bytes += bytes->size();
    peer->second.answers.push_back(*std::move(bytes));
  }
}

void Router::Complain(const std::string& job, std::string text) {
  Report report;
  report.kind = Report::Kind::kTrouble;
  report.job = job;
  report.text = std::move(text);
  owner_.Act(std::move(report));
}

// ---- Who hosts ----

Router::Job* Router::Find(const std::string& name) {
  const auto it = jobs_.find(name);
  return it == jobs_.end() ? nullptr : &it->second;
}

// Membership is asked who hosts it. That alone is no reason to host it.
Router::Job& Router::Ask(const std::string& name) {
  Job& job = jobs_[name];
  if (!job.asked) {
    job.asked = true;
    owner_.Act(WatchHost{name});
  }
  return job;
}

Router::Job& Router::Watch(const std::string& name) {
  Job& job = Ask(name);
  if (!job.watched) {
    job.watched = true;
    if (const std::optional<v1::JobState> kept = owner_.KeptState(name)) {
      job.highest = std::max(job.highest, kept->highest_epoch());
    }
    PlanCampaign(name, job);
  }
  return job;
}

void Router::On(const JobNoticed& e) {
  Watch(e.name);
}

void Router::On(const HostIs& e) {
  if (Job* job = Find(e.job)) {
    SetHost(e.job, *job, e.host);
  }
}

void Router::SetHost(const std::string& name, Job& job, const JobHost& host) {
  if (host.epoch != 0 && host.epoch < job.highest) {
    return;  // it will learn that there was a newer one, or is old news
  }
  if (job.hosting && (host.node != self_ || host.epoch > job.hosting->epoch)) {
    StepDown(name, job, host.node != self_);  // (of its own it may hold the newer one already)
  }
  job.nobody = false;
  job.campaign_at.reset();
  const bool same = job.host && job.host->node == host.node &&
                    (job.host->epoch == host.epoch || host.epoch == 0 || job.host->epoch == 0);
  if (same) {
    job.host->epoch = std::max(job.host->epoch, host.epoch);
    return;
  }
  Unmeet(job);
  job.host = host;
  if (host.node != self_) {
    owner_.Act(ConnectPeer{host.node});
    Seek(name, job);
  }
  SendForwardedAgain(name);
}

void Router::On(const NoHost& e) {
  Job* job = Find(e.job);
  if (job == nullptr) {
    return;
  }
  if (job->hosting) {
    return;  // news of before the election, or Deposed comes
  }
  job->nobody = true;
  if (!job->hosted) {
    job->host.reset();
  }  // (else the host was heard itself, and this may be older; another one ends that)
  PlanCampaign(e.job, *job);
  if (job->watched) {
    return;
  }
  // Nobody has anything of it here: only ckptctl asked. (Who was asked may have hosted it, and
  // answers yet.)
  std::vector<uint64_t> asked;
  for (const auto& [id, forwarded] : forwarded_) {
    if (forwarded.ask.job == e.job && peers_.count(forwarded.sent_to) == 0) {
      asked.push_back(id);
    }
  }
  for (const uint64_t id : asked) {
    FailForwarded(id, NoSuchJob(e.job));
  }
  MaybeForget(e.job);
}

// A name that nobody hosts and nobody here asks for. (Of a list's nodes none but the first is ever
// told that nobody hosts it.)
void Router::MaybeForget(const std::string& name) {
  Job* job = Find(name);
  const bool asked = std::any_of(forwarded_.begin(), forwarded_.end(), [&](const auto& forwarded) {
    return forwarded.second.ask.job == name;
  });
  if (job == nullptr || asked) {
    return;
  }
  if (fixed_host_ ? !IsNeeded(name, *job) : job->nobody && !job->watched) {
    owner_.Act(UnwatchHost{name});
    jobs_.erase(name);
  }
}

// Something of it is here or may be, or somebody waits for it.
bool Router::IsNeeded(const std::string& name, Job& job) {
  const bool wanted = (job.wanted && owner_.JoinsWait(name)) ||
                      (job.read && owner_.ReadersWait(name)) || !job.sought.empty() ||
                      !job.readers.empty();
  const bool hosts = job.hosting || job.campaigning || job.campaign_at;
  const bool met = job.hosted || !job.unanswered.empty() || to_settle_.count(name) > 0;
  return wanted || hosts || met || owner_.KeptState(name);
}

// Nobody says that a request for a name was given up before its host had answered.
void Router::ForgetUnneeded() {
  if (!fixed_host_ || jobs_.size() < forget_above_) {
    return;
  }
  std::vector<std::string> names;
  for (const auto& [name, job] : jobs_) {
    names.push_back(name);
  }
  for (const std::string& name : names) {
    MaybeForget(name);
  }
  forget_above_ = std::max(kWatchedMin, 2 * jobs_.size());
}

// Each job has an order of the nodes of its own, so that the jobs spread over them, and that not
// all ask at once.
void Router::PlanCampaign(const std::string& name, Job& job) {
  if (!job.nobody || !job.watched || job.hosting || job.campaigning || job.campaign_at ||
      !IsMember()) {
    return;
  }
  const auto place = [&name](const std::string& node) {
    const std::string both = absl::StrCat(name, "/", node);
    return Crc64(both.data(), both.size());
  };
  const uint64_t own = place(self_);
  const auto before = std::count_if(peers_.begin(), peers_.end(),
                                    [&](const auto& peer) { return place(peer.first) < own; });
  job.campaign_at =
      std::max(job.not_before,
               time_.now + kCampaignStep * std::min<int64_t>(before, int64_t{kCampaignStepsMax}));
  if (*job.campaign_at <= time_.now) {
    Campaign(name, job);
  }
}

void Router::Campaign(const std::string& name, Job& job) {
  job.campaign_at.reset();
  job.campaigning = true;
  owner_.Act(CampaignFor{name, job.highest});
}

void Router::On(const Elected& e) {
  Job* found = Find(e.job);
  if (found == nullptr) {
    return owner_.Act(ResignFrom{e.job});
  }
  Job& job = *found;
  job.campaigning = false;
  job.campaign_at.reset();
  if (e.epoch <= job.highest) {  // what the cluster agreed on was lost
    owner_.Act(ResignFrom{e.job});
    return Campaign(e.job, job);
  }
  Unmeet(job);
  job.nobody = false;
  job.host = JobHost{self_, own_.incarnation, e.epoch};
  Hosting& hosting = job.hosting.emplace(Hosting());
  hosting.epoch = e.epoch;
  hosting.since = time_.now;
  hosting.collect_until = time_.now + kCollectAll;
  if (const std::optional<v1::JobState> kept = owner_.KeptState(e.job)) {
    hosting.highest = kept->highest_epoch();
    Consider(e.job, hosting, *kept);
  }
  if (v1::JobState state; e.state_version != 0 && state.ParseFromString(e.state)) {
    state.set_epoch(e.state_epoch);
    Consider(e.job, hosting, state);
  }
  Note(job, e.job, self_, e.epoch);
  for (const auto& [node, peer] : peers_) {
    owner_.Act(ConnectPeer{node});
    Ask(e.job, job, node);
  }
  MaybeAct(e.job, job);
}

void Router::On(const CampaignLost& e) {
  Job* job = Find(e.job);
  if (job == nullptr || !job->campaigning) {
    return;
  }
  job->campaigning = false;
  // (Who won the watch tells, or has told: this answer may be the older of the two.)
  if (e.winner.node.empty() && !e.why.empty()) {
    Complain(e.job, absl::StrCat("no host could be found: ", e.why, "; tried again"));
  }
  job->campaign_at = time_.now + kCampaignAgain;
}

void Router::On(const Deposed& e) {
  Job* job = Find(e.job);
  if (job == nullptr) {
    return;
  }
  // As far as is known: of another host it would have been told before.
  if (job->hosting && job->hosting->epoch == e.epoch) {
    job->nobody = true;
    StepDown(e.job, *job, false);
  } else if (!job->hosting && (!job->host || job->host->node == self_)) {
    job->nobody = true;  // it stepped down by itself when its lease had ended
    job->host.reset();
    PlanCampaign(e.job, *job);
  }
}

// From now on no command of an older host is taken here; also not after a restart.
void Router::Note(Job& job, const std::string& name, const std::string& host, Epoch epoch) {
  if (epoch == job.highest && job.highest_of.empty()) {
    job.highest_of = host;
  }
  if (epoch <= job.highest) {
    return;
  }
  job.highest = epoch;
  job.highest_of = host;
  if (std::optional<v1::JobState> kept = owner_.KeptState(name);
      kept && kept->highest_epoch() < epoch) {
    kept->set_highest_epoch(epoch);
    owner_.KeepState(*kept);
  }
}

// ---- Time ----

void Router::Expire(EventTime time) {
  time_ = time;
  for (auto& [name, job] : jobs_) {
    if (job.hosting && !IsMember()) {
      StepDown(name, job, true);
    }
    if (job.campaign_at && *job.campaign_at <= time.now) {
      job.campaign_at.reset();
      if (job.nobody && IsMember()) {
        Campaign(name, job);
      }
    }
    MaybeAct(name, job);
    if (job.gather_until && *job.gather_until <= time.now) {
      to_settle_.insert(name);
    }
    if (job.hosting && job.hosting->untold && job.hosting->tell_at <= time.now) {
      TellState(name, *job.hosting, v1::JobState(*job.hosting->untold));
    }
    if (job.hosting) {
      if (const auto at = GivesWayAt(*job.hosting); at && *at <= time.now) {
        Complain(name, "it is hosted here no more: too few of the other nodes can be reached");
        CannotHost(name, job);
      }
    }
  }
  for (auto it = gone_.begin(); it != gone_.end();) {
    if (it->second <= time.now) {
      const std::string node = it->first;
      it = gone_.erase(it);
      NodeIsLost(node, true, "its lease has ended");
    } else {
      ++it;
    }
  }
  ExpireForwarded();
  ForgetUnneeded();
}

std::optional<MonotonicTime> Router::NextDeadline() const {
  std::optional<MonotonicTime> next;
  const auto at = [&next](MonotonicTime time) { next = next ? std::min(*next, time) : time; };
  for (const auto& [name, job] : jobs_) {
    if (job.campaign_at) {
      at(*job.campaign_at);
    }
    if (job.gather_until) {
      at(*job.gather_until);
    }
    if (job.hosting) {
      at(lease_until_);
      if (job.hosting->untold) {
        at(job.hosting->tell_at);
      }
      if (const auto until = WaitsUntil(*job.hosting)) {
        at(*until);
      }
      if (const auto until = GivesWayAt(*job.hosting)) {
        at(*until);
      }
    }
  }
  for (const auto& [id, forwarded] : forwarded_) {
    at(time_.now < forwarded.unreached_until ? forwarded.unreached_until : forwarded.until);
  }
  for (const auto& [node, when] : gone_) {
    at(when);
  }
  return next;
}

// ---- What others ask ----

bool Router::Hosts(const std::string& name) const {
  const auto it = jobs_.find(name);
  return it != jobs_.end() && it->second.hosting && it->second.hosting->acts;
}

std::string Router::HostOf(const std::string& name) const {
  const auto it = jobs_.find(name);
  if (it == jobs_.end() || !it->second.host) {
    return problem_.empty() ? "no node hosts it yet" : problem_;
  }
  return it->second.host->node;
}

std::string Router::WhyNotHeard(const std::string& name) const {
  if (const auto job = jobs_.find(name); job != jobs_.end() && job->second.host) {
    const std::string& node = job->second.host->node;
    if (const auto why = peer_problems_.find(node); why != peer_problems_.end()) {
      return absl::StrCat("its host, node '", node, "', is not reached: ", why->second);
    }
  }
  return problem_;
}

std::string Router::CheckInvariants() const {
  const auto reached = std::count_if(peers_.begin(), peers_.end(),
                                     [](const auto& peer) { return InReach(peer.second); });
  if (static_cast<size_t>(reached) != reached_) {
    return absl::StrCat("channels lead to and from ", reached, " nodes, not ", reached_);
  }
  for (const auto& [name, job] : jobs_) {
    if (job.hosting && job.host && job.host->node != self_) {
      return absl::StrCat("job '", name, "' is hosted here and by ", job.host->node);
    }
    if (job.hosting && job.hosting->epoch < job.highest) {
      return absl::StrCat("job '", name, "' is hosted under epoch ", job.hosting->epoch, ", and ",
                          job.highest, " was noted");
    }
    if (job.hosting && job.hosting->tokens.size() != job.hosting->origins.size()) {
      return absl::StrCat("job '", name, "': requests of other nodes are counted twice");
    }
    if (!job.outgoing.empty() && !CanTell(job)) {
      return absl::StrCat("job '", name, "' has messages for a host that was not met");
    }
  }
  return "";
}

}  // namespace holdfast
