// What ckptctl asks here and another node can answer, and the other way round. The host's agent
// answers it as if it had been asked there; the caller's uid goes with it (all nodes of a cluster
// trust each other).
#include <algorithm>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/router.h"

namespace holdfast {
namespace {

// The job that a request names; empty: none, or one that every node answers by itself.
std::string JobOf(const ForwardedRequest& request) {
  return std::visit(
      [](const auto& one) -> std::string {
        if constexpr (requires { one.job(); }) {
          return one.job();
        } else {
          return "";
        }
      },
      request);
}

// The node that is to answer; empty: the job's host. (What is asked of a job about a node, that
// node does not answer.)
std::string NodeOf(const ForwardedRequest& request) {
  return std::visit(
      [](const auto& one) -> std::string {
        using Request = std::decay_t<decltype(one)>;
        if constexpr (requires { one.node(); } && !std::is_same_v<Request, v1::ReplaceRequest>) {
          return one.node();
        } else {
          return "";
        }
      },
      request);
}

std::optional<ForwardedRequest> Forwardable(const AdminRequest& e) {
  return std::visit(
      [](const auto& request) -> std::optional<ForwardedRequest> {
        if constexpr (std::is_constructible_v<ForwardedRequest, decltype(request)>) {
          return ForwardedRequest(request);
        } else {
          return std::nullopt;
        }
      },
      e.request);
}

ReturnedReply Returned(const AdminReply& reply) {
  return std::visit(
      [](const auto& one) -> ReturnedReply {
        if constexpr (std::is_constructible_v<ReturnedReply, decltype(one)>) {
          return one;
        } else {
          return std::monostate();
        }
      },
      reply.reply);
}

Caller AskerOf(uint32_t uid, uint32_t gid) {
  Caller caller;
  caller.uid = uid;
  caller.gid = gid;
  return caller;
}

}  // namespace

// ---- Asked here ----

bool Router::TakesOver(const AdminRequest& e, EventTime time) {
  time_ = time;
  if (e.token == 0) {
    return false;  // the daemon's own, of this node
  }
  if (std::holds_alternative<v1::GetNodesRequest>(e.request)) {
    AnswerNodes(e);
    return true;
  }
  const std::optional<ForwardedRequest> request = Forwardable(e);
  if (!request) {
    return false;
  }
  if (const std::string node = NodeOf(*request); !node.empty()) {
    if (peers_.count(node) == 0) {
      return false;
    }
    AskNode(e, *request, node);
    return true;
  }
  const std::string name = JobOf(*request);
  if (name.empty()) {
    if (!std::holds_alternative<v1::GetStatusRequest>(*request) || peers_.empty() ||
        forwarded_.size() >= kForwardedMax) {
      return false;
    }
    AskAll(e, *request);
    return true;
  }
  if (Hosts(name) || !CheckJobName(name).ok()) {
    return false;
  }
  if (Overloaded(e)) {
    return true;
  }
  const uint64_t id = NewForwarded();
  forwarded_[id] = {
      e.token,
      {name, "", e.caller.uid, e.caller.gid, *request},
      time.now + (std::holds_alternative<v1::RemoveJobRequest>(*request) ? kRemovalDeadline
                                                                         : kForwardDeadline)};
  forwarded_[id].unreached_until = time_.now + kUnreachedWait;
  Job& job = jobs_[name];
  if (!job.asked) {
    job.asked =
        true;  // (not watched for its own sake: nobody campaigns for a name that was mistyped)
    owner_.Act(WatchHost{name});
  }
  if (job.nobody && !job.watched) {
    FailForwarded(id, NoSuchJob(name));
    return true;
  }
  SendForwarded(id);
  return true;
}

bool Router::Overloaded(const AdminRequest& e) {
  if (forwarded_.size() < kForwardedMax) {
    return false;
  }
  owner_.Act(AdminReply{
      e.token,
      absl::ResourceExhaustedError("too many requests are on their way to other nodes; try again"),
      std::monostate()});
  return true;
}

void Router::AskNode(const AdminRequest& e, const ForwardedRequest& request,
                     const std::string& node) {
  if (Overloaded(e)) {
    return;
  }
  const uint64_t id = NewForwarded();
  Forwarded& one = forwarded_[id];
  one = {e.token, {"", node, e.caller.uid, e.caller.gid, request}, time_.now + kForwardDeadline};
  one.unreached_until = time_.now + kUnreachedWait;
  one.sent_to = node;
  one.waits_for.insert(node);  // it is asked again over each new channel
  if (ChannelTo(node) == 0) {
    return owner_.Act(ConnectPeer{node});
  }
  Say(node, PeerHeader{}, NodeMessage(AdminForwarded{id, e.caller.uid, e.caller.gid, request}));
}

absl::Status Router::NoSuchJob(const std::string& name) const {
  return absl::NotFoundError(absl::StrCat("there is no job '", name,
                                          "' in this cluster that any node hosts; ckptctl status "
                                          "shows the jobs there are"));
}

// As soon as its host is known and can be spoken to.
void Router::SendForwarded(uint64_t id) {
  Forwarded& forwarded = forwarded_.at(id);
  const Job* job = Find(forwarded.ask.job);
  if (job == nullptr || !job->host || forwarded.sent_to == job->host->node) {
    return;
  }
  if (job->host->node == self_) {
    if (!Hosts(forwarded.ask.job)) {
      return;  // it is about to
    }
    forwarded.sent_to = self_;
    const uint64_t token = NewAnswering("", id);
    return AskAgent(token, forwarded.ask.uid, forwarded.ask.gid, forwarded.ask.request);
  }
  if (ChannelTo(job->host->node) == 0) {
    return owner_.Act(ConnectPeer{job->host->node});
  }
  forwarded.sent_to = job->host->node;
  Say(job->host->node, PeerHeader{forwarded.ask.job, {}, job->host->epoch},
      NodeMessage(AdminForwarded{id, forwarded.ask.uid, forwarded.ask.gid, forwarded.ask.request}));
}

// Each node tells of itself and of the jobs that it hosts.
void Router::AskAll(const AdminRequest& e, const ForwardedRequest& request) {
  const uint64_t id = NewForwarded();
  Forwarded& all = forwarded_[id];
  all = {e.token, {"", "", e.caller.uid, e.caller.gid, request}, time_.now + kForwardDeadline};
  all.unreached_until = time_.now + kUnreachedWait;
  for (const auto& [node, peer] : peers_) {
    all.waits_for.insert(node);
    if (peer.channel == 0) {
      owner_.Act(ConnectPeer{node});
    } else {
      Say(node, PeerHeader{}, NodeMessage(AdminForwarded{id, e.caller.uid, e.caller.gid, request}));
    }
  }
  all.waits_for.insert(self_);
  AskAgent(NewAnswering("", id), e.caller.uid, e.caller.gid, request);
}

void Router::ForwardedMayGoOn() {
  for (auto& [id, forwarded] : forwarded_) {
    if (!forwarded.ask.job.empty()) {
      SendForwarded(id);
    }
  }
}

// Another node hosts the job, or the same one again since: what the one before was asked may never
// be answered.
void Router::SendForwardedAgain(const std::string& job) {
  for (auto& [id, forwarded] : forwarded_) {
    if (forwarded.ask.job == job) {
      forwarded.sent_to.clear();
      SendForwarded(id);
    }
  }
}

// There is a channel to it now; what was said in the one before may be lost.
void Router::AskAgain(const std::string& node) {
  for (const auto& [id, forwarded] : forwarded_) {
    if (forwarded.waits_for.count(node) > 0) {
      Say(node, PeerHeader{},
          NodeMessage(
              AdminForwarded{id, forwarded.ask.uid, forwarded.ask.gid, forwarded.ask.request}));
    }
  }
}

void Router::FailForwarded(uint64_t id, absl::Status status) {
  const Forwarded failed = std::move(forwarded_.at(id));
  forwarded_.erase(id);
  MaybeForget(failed.ask.job);
  owner_.Act(AdminReply{failed.token, std::move(status), std::monostate()});
}

// Whoever hosts the job then is asked; if nobody is to, there is none to ask.
void Router::GiveUpForwarded(const std::string& node) {
  std::vector<uint64_t> lost;
  for (auto& [id, forwarded] : forwarded_) {
    if (!forwarded.ask.job.empty() && forwarded.sent_to == node) {
      forwarded.sent_to.clear();
      const Job* job = Find(forwarded.ask.job);
      if (job == nullptr || (job->nobody && !job->watched)) {
        lost.push_back(id);
      }
    }
  }
  for (const uint64_t id : lost) {
    const std::string name = forwarded_.at(id).ask.job;
    FailForwarded(id, NoSuchJob(name));
  }
}

void Router::TakeReply(const std::string& node, uint64_t id, absl::Status status,
                       ReturnedReply reply) {
  const auto it = forwarded_.find(id);
  if (it == forwarded_.end()) {
    return;
  }
  Forwarded& forwarded = it->second;
  if (forwarded.ask.job.empty() && forwarded.ask.node.empty()) {
    return TakePart(id, node, status, reply);
  }
  if (forwarded.sent_to != node) {
    return;
  }
  if (auto* told = std::get_if<v1::GetStatusReply>(&reply)) {  // of the job, not of its host
    *told->mutable_daemon() = owner_.DescribeDaemon(AskerOf(forwarded.ask.uid, forwarded.ask.gid));
  }
  AdminReply answer{forwarded.token, std::move(status), std::monostate()};
  std::visit(
      [&answer](auto& one) {
        if constexpr (!std::is_same_v<decltype(one), std::monostate&>) {
          answer.reply = std::move(one);
        }
      },
      reply);
  const std::string name = forwarded.ask.job;
  forwarded_.erase(it);
  MaybeForget(name);
  owner_.Act(std::move(answer));
}

// What one of all nodes has to say.
void Router::TakePart(uint64_t id, const std::string& node, const absl::Status& status,
                      ReturnedReply& reply) {
  Forwarded& all = forwarded_.at(id);
  if (all.waits_for.erase(node) == 0) {
    return;
  }
  if (auto* told = std::get_if<v1::GetStatusReply>(&reply)) {
    if (node == self_) {
      *all.all.mutable_daemon() = told->daemon();
    }
    for (v1::JobStatus& job : *told->mutable_jobs()) {
      *all.all.add_jobs() = std::move(job);
    }
  } else {
    all.problems.push_back(absl::StrCat("the jobs of ", node, " are not shown: ", Message(status)));
  }
  if (all.waits_for.empty()) {
    AnswerAll(id);
  }
}

std::string Router::WhyNoAnswer(const std::string& node) const {
  const auto problem = peer_problems_.find(node);
  return problem == peer_problems_.end()
             ? "did not answer in time"
             : absl::StrCat("cannot be reached (", problem->second, ")");
}

void Router::AnswerAll(uint64_t id) {
  Forwarded forwarded = std::move(forwarded_.at(id));
  forwarded_.erase(id);
  for (const std::string& node : forwarded.waits_for) {
    forwarded.problems.push_back(
        absl::StrCat("the jobs of ", node, " are not shown: it ", WhyNoAnswer(node)));
  }
  for (std::string& problem : forwarded.problems) {
    forwarded.all.add_not_shown(problem);
    forwarded.all.mutable_daemon()->add_problems(std::move(problem));
  }
  auto& jobs = *forwarded.all.mutable_jobs();
  std::sort(jobs.begin(), jobs.end(),
            [](const v1::JobStatus& a, const v1::JobStatus& b) { return a.name() < b.name(); });
  owner_.Act(AdminReply{forwarded.token, absl::OkStatus(), std::move(forwarded.all)});
}

// Nothing gets there, and nothing has come of waiting a little for that to end. (A job's host is
// waited for where another node may take its place.)
void Router::GiveUpUnreached() {
  for (auto it = forwarded_.begin(); it != forwarded_.end();) {
    const uint64_t id = it->first;
    Forwarded& forwarded = it->second;
    ++it;  // it may be answered now
    if (time_.now < forwarded.unreached_until) {
      continue;
    }
    if (const Job* job = Find(forwarded.ask.job);
        fixed_host_ && job != nullptr && job->host && peer_problems_.count(job->host->node) > 0) {
      FailForwarded(id, HostIsSilent(forwarded.ask.job, job->host->node));
      continue;
    }
    const bool of_node = !forwarded.ask.node.empty();
    std::vector<std::string> unreached;
    for (const std::string& node : forwarded.waits_for) {
      if (peer_problems_.count(node) > 0) {
        unreached.push_back(node);
      }
    }
    for (const std::string& node : unreached) {
      TakeReply(node, id,
                absl::UnavailableError(absl::StrCat(of_node ? node : "it", " ", WhyNoAnswer(node))),
                {});
    }
  }
}

absl::Status Router::HostIsSilent(const std::string& job, const std::string& host) const {
  return absl::UnavailableError(absl::StrCat(
      "job '", job, "': its host, ", host, ", ", WhyNoAnswer(host),
      fixed_host_ ? "; no other node of a list takes its place: start its ckptd, or mend what is "
                    "named"
                  : "; if it is gone, another node takes its place within seconds: try again"));
}

void Router::ExpireForwarded() {
  GiveUpUnreached();
  std::vector<uint64_t> late;
  for (const auto& [id, forwarded] : forwarded_) {
    if (forwarded.until <= time_.now) {
      late.push_back(id);
    }
  }
  for (const uint64_t id : late) {
    const std::string name = forwarded_.at(id).ask.job;
    if (const std::string node = forwarded_.at(id).ask.node; !node.empty()) {
      FailForwarded(id, absl::UnavailableError(absl::StrCat(node, " ", WhyNoAnswer(node))));
      continue;
    }
    if (name.empty()) {
      AnswerAll(id);
      continue;
    }
    const Job* job = Find(name);
    FailForwarded(id, job != nullptr && job->host
                          ? HostIsSilent(name, job->host->node)
                          : absl::UnavailableError(absl::StrCat("which node hosts job '", name,
                                                                "' is not known: ", HostOf(name),
                                                                "; try again")));
  }
}

void Router::AnswerNodes(const AdminRequest& e) {
  v1::GetNodesReply reply;
  reply.set_problem(problem_);
  for (const NodeInfo& member : Members()) {
    v1::NodeStatus& node = *reply.add_nodes();
    node.set_name(member.name);
    node.set_address(member.address);
    for (const NodeLabel& label : member.labels) {
      v1::NodeStatus::Label& added = *node.add_labels();
      added.set_name(label.name);
      added.set_value(label.value);
    }
    node.set_capacity_bytes(member.capacity_bytes);
    node.set_version(member.version);
    node.set_here(member.name == self_);
    const auto problem = peer_problems_.find(member.name);
    node.set_reachable(problem == peer_problems_.end());
    if (problem != peer_problems_.end()) {
      node.set_unreachable(problem->second);
    }
    for (const auto& [name, job] : jobs_) {
      if (job.host && job.host->node == member.name && owner_.MayTouch(name, e.caller)) {
        node.add_jobs(name);
      }
    }
  }
  auto& nodes = *reply.mutable_nodes();
  std::sort(nodes.begin(), nodes.end(),
            [](const v1::NodeStatus& a, const v1::NodeStatus& b) { return a.name() < b.name(); });
  owner_.Act(AdminReply{e.token, absl::OkStatus(), std::move(reply)});
}

// ---- Asked by others ----

uint64_t Router::NewForwarded() {
  if (last_forwarded_ == 0) {
    last_forwarded_ = static_cast<uint64_t>(std::max<int64_t>(time_.unix_ms, 1)) * 1024;
  }
  return ++last_forwarded_;
}

uint64_t Router::NewAnswering(const std::string& node, uint64_t their) {
  const uint64_t token = next_answering_++;
  answering_[token] = {node, their};
  return token;
}

void Router::AskAgent(AdminToken token, uint32_t uid, uint32_t gid,
                      const ForwardedRequest& request) {
  AdminRequest ask;
  ask.token = token;
  ask.caller = AskerOf(uid, gid);
  std::visit([&ask](const auto& one) { ask.request = one; }, request);
  owner_.AskAgent(ask);
}

void Router::On(const std::string& node, const PeerHeader&, const AdminForwarded& m) {
  const std::string name = JobOf(m.request);
  const bool of_node = !NodeOf(m.request).empty();
  absl::Status refused;
  if (of_node && NodeOf(m.request) != self_) {
    refused = absl::InternalError(absl::StrCat("this is ", self_));
  } else if (!of_node && !name.empty() && !Hosts(name)) {
    const Job* job = Find(name);
    const bool nowhere = fixed_host_ && IsMember() && (job == nullptr || !job->watched);
    refused = nowhere
                  ? NoSuchJob(name)
                  : absl::UnavailableError(absl::StrCat(
                        self_, " does not host job '", name, "' now",
                        problem_.empty() ? "" : absl::StrCat(" (", problem_, ")"), "; try again"));
  } else if (answering_.size() >= kForwardedMax) {
    refused = absl::ResourceExhaustedError(
        absl::StrCat(self_, " answers too many requests of other nodes; try again"));
  }
  if (!refused.ok()) {
    return Answer(node, PeerHeader{}, NodeMessage(AdminReturned{m.token, refused, {}}));
  }
  const uint64_t token = NewAnswering(node, m.token);
  if (!of_node || std::holds_alternative<v1::DrainRequest>(m.request)) {
    return AskAgent(token, m.uid, m.gid, m.request);
  }
  PeerReads reads;
  reads.token = token;
  reads.caller = AskerOf(m.uid, m.gid);
  std::visit(
      [&reads](const auto& one) {
        if constexpr (std::is_constructible_v<decltype(reads.request), decltype(one)>) {
          reads.request = one;
        }
      },
      m.request);
  owner_.Act(std::move(reads));
}

void Router::Handle(const ReadForPeer& event, EventTime time) {
  time_ = time;
  AdminReply reply{event.token, event.status, std::monostate()};
  std::visit([&reply](const auto& one) { reply.reply = one; }, event.reply);
  TakesReply(reply);
}

void Router::On(const std::string& node, const PeerHeader&, const AdminReturned& m) {
  TakeReply(node, m.token, m.status, m.reply);
}

bool Router::TakesReply(const AdminReply& reply) {
  const auto it = answering_.find(reply.token);
  if (it == answering_.end()) {
    return false;
  }
  const auto [node, their] = it->second;
  answering_.erase(it);
  if (node.empty()) {
    TakeReply(self_, their, reply.status, Returned(reply));
  } else {
    absl::StatusOr<std::string> bytes =
        EncodePeer({}, NodeMessage(AdminReturned{their, reply.status, Returned(reply)}));
    if (!bytes.ok()) {  // (whoever asked would wait in vain)
      bytes = EncodePeer(
          {},
          NodeMessage(AdminReturned{
              their,
              absl::ResourceExhaustedError(absl::StrCat(
                  "the answer cannot be sent from one node to another (", Message(bytes.status()),
                  "); ask for less of it, one step ", "of the job say, or ask on ", self_)),
              {}}));
    }
    Answer(node, std::move(bytes));
  }
  return true;
}

}  // namespace holdfast
