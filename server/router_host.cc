// Jobs that this node hosts: it hears what others keep of the job, makes its coordinator, and meets
// the nodes.
#include <algorithm>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/message_tokens.h"
#include "server/node_ranges.h"
#include "server/router.h"
#include "server/state_order.h"

namespace holdfast {

// ---- Before it acts ----

// What that node keeps, or it is told who hosts the job.
void Router::Ask(const std::string& name, Job& job, const std::string& node) {
  if (ChannelTo(node) == 0) {
    return owner_.Act(ConnectPeer{node});
  }
  if (job.hosting->acts) {
    TellRemoved(name, job, node);
    return Introduce(name, job, node);
  }
  Say(node, PeerHeader{name, {}, job.hosting->epoch}, NodeMessage(StateAsked{}));
}

void Router::Consider(const std::string& name, Hosting& hosting, const v1::JobState& state) {
  if (hosting.best && !IsNewerState(state, *hosting.best)) {
    return;
  }
  if (const absl::Status loads = owner_.CheckState(name, state); !loads.ok()) {
    return Complain(name, absl::StrCat("a state of it is of no use: ", Message(loads)));
  }
  hosting.best = state;
  hosting.best_names = NodesIn(state.nodes());
}

void Router::On(const std::string& node, const PeerHeader& header, const StateTold& m) {
  Job* job = Find(header.job_name);
  if (job == nullptr || !job->hosting || job->hosting->epoch != header.epoch) {
    return;
  }
  Hosting& hosting = *job->hosting;
  if (hosting.acts) {
    if (m.highest_epoch >= hosting.epoch) {  // (of this very one: that of another host)
      CampaignAbove(header.job_name, *job, m.highest_epoch);
    }
    return;
  }
  hosting.told.insert(node);
  hosting.highest = std::max(hosting.highest, m.highest_epoch);
  if (m.state) {
    Consider(header.job_name, hosting, *m.state);
  }
  MaybeAct(header.job_name, *job);
}

// Nodes that are no members now and may keep something newer than what was told.
size_t Router::OthersThatMayKnow(const Hosting& hosting) const {
  std::set<std::string> others;
  for (const std::string& node : hosting.best_names) {
    if (node != self_ && left_.count(node) == 0) {
      others.insert(node);
    }
  }
  if (time_.now < left_counts_from_) {
    others.insert(before_wipe_.begin(), before_wipe_.end());
  }
  size_t known = 0;
  for (const std::string& node : others) {
    known += peers_.count(node) == 0 ? 1 : 0;
  }
  return known;
}

// All that live have told what they keep; or, after a while, more than half of them: one that
// cannot be reached must not keep the job from going on. (Where nobody else can be elected, nobody
// else has agreed on anything since.) Nodes that the state names, and that were not told to have
// left, count, too, and for a while those that were members when membership lost its memory: few
// are members then, and what these keep may be old, or nothing at all.
void Router::MaybeAct(const std::string& name, Job& job) {
  if (!job.hosting || job.hosting->acts) {
    return;
  }
  Hosting& hosting = *job.hosting;
  if (hosting.highest >= hosting.epoch) {
    // The cluster's memory was lost: its epochs began anew. Above all that the nodes have noted.
    return CampaignAbove(name, job, hosting.highest);
  }
  const size_t all = peers_.size() + 1;
  if (hosting.told.size() + 1 < all && time_.now < hosting.collect_until) {
    return;  // (before what takes time: each event comes by here)
  }
  const auto told = std::count_if(peers_.begin(), peers_.end(), [&](const auto& peer) {
    return hosting.told.count(peer.first) > 0;
  });
  const size_t have = static_cast<size_t>(told) + 1;
  const size_t known = all + OthersThatMayKnow(hosting);
  const bool most = have * 2 > all || fixed_host_;
  const bool most_known = have * 2 > known || fixed_host_;
  const bool acts = (have == all && most_known) ||
                    (most && most_known && hosting.collect_until <= time_.now) ||
                    (most && hosting.collect_until + kCollectKnown <= time_.now);
  if (!acts || !RemovalIsAgreed(name, hosting)) {
    return;
  }
  hosting.acts = true;
  hosting.writing = 0;
  if (!owner_.BeginHosting(name, hosting.best ? &*hosting.best : nullptr)) {
    return CannotHost(name, job);
  }
  for (const auto& [user, until] : std::exchange(job.sought, {})) {
    owner_.Want(name, {user.first, user.second, until});
  }
  Seek(name, job);
  for (const auto& [node, peer] : peers_) {
    TellRemoved(name, job, node);
  }
  ForwardedMayGoOn();
}

// When what has been told may be enough by then; none: not by time alone, or it acts.
std::optional<MonotonicTime> Router::WaitsUntil(const Hosting& hosting) const {
  for (const Duration more : {Duration(0), kCollectKnown}) {
    if (!hosting.acts && hosting.collect_until + more > time_.now) {
      return hosting.collect_until + more;
    }
  }
  return std::nullopt;
}

// When it lets another node try, unless it hears and reaches more of the members by then: it may be
// cut off from them, or they from it, and not from what elected it. (Of two members neither is more
// than half.)
std::optional<MonotonicTime> Router::GivesWayAt(const Hosting& hosting) const {
  if (fixed_host_ || peers_.size() < 2) {
    return std::nullopt;
  }
  if (!hosting.acts) {
    return hosting.collect_until + kCollectKnown + kAloneGrace;
  }
  return alone_since_ ? std::optional(std::max(*alone_since_, hosting.since) + kAloneGrace)
                      : std::nullopt;
}

void Router::CannotHost(const std::string& name, Job& job) {
  job.not_before = time_.now + kHostAgain;
  StepDown(name, job, true);
}

void Router::CampaignAbove(const std::string& name, Job& job, Epoch floor) {
  StepDown(name, job, true);
  if (floor > job.highest) {
    job.highest = floor;
    job.highest_of.clear();
  }
  Campaign(name, job);
}

void Router::On(const std::string& node, const PeerHeader& header, const JobSought& m) {
  Job& job = Watch(header.job_name);  // of a list's first node: nobody else campaigns
  if (job.hosting && job.hosting->acts && job.hosting->job && !job.hosting->removing) {
    const NodeId from = names_.Number(node);
    if (job.hosting->arrived.erase(from) > 0) {  // it has forgotten it: there are many
      ForgetTokens(*job.hosting, from);
    }
    // (Or it had no room for it when it heard of it first, and never answered.)
    return Introduce(header.job_name, job, node);
  }
  const Duration left = std::chrono::milliseconds(std::min(m.wait_ms, kSoughtForMaxMs));
  const JobWanter wanter{m.uid, m.gid, time_.now + (m.wait_ms == 0 ? kSoughtFor : left)};
  if (m.reads) {
    job.readers.insert(node);
    if (owner_.IsAbsent(header.job_name)) {
      On(JobMissed{header.job_name});
    }
  } else if (job.hosting && job.hosting->acts) {
    owner_.Want(header.job_name, wanter);
  } else {
    NoteWanter(job.sought, wanter, time_.now);
  }
}

void Router::On(const JobMissed& e) {
  Job* job = Find(e.name);
  if (job == nullptr || !job->hosting || !owner_.IsAbsent(e.name)) {
    return;  // (somebody has wanted it since, and it was opened)
  }
  for (const std::string& node : std::exchange(job->readers, {})) {
    Answer(node, PeerHeader{e.name, {}, job->hosting->epoch}, NodeMessage(JobAbsent{}));
  }
  job->read = false;
  if (job->hosting->acts && job->sought.empty()) {
    Retire(e.name, *job);
  }
}

// ---- Its nodes ----

void Router::On(const JobOpened& e) {
  Job* job = Find(e.name);
  if (job == nullptr || !job->hosting) {
    return;
  }
  const std::optional<JobHosted> here = owner_.Describe(e.uuid, kHere);
  if (!here) {
    return;
  }
  job->hosting->job = e.uuid;
  job->readers.clear();  // they hear of it as all do
  Unmeet(*job);
  job->uuid = e.uuid;
  job->hosted = *here;
  job->hosting->arrived.insert(kHere);
  TryMeet(e.name, *job);
  for (const auto& [node, peer] : peers_) {
    Ask(e.name, *job, node);
  }
  for (const std::string& node : job->hosting->best_names) {
    if (node == self_ || peers_.count(node) > 0) {
      continue;
    }
    if (time_.now < left_counts_from_ && left_.count(node) == 0) {
      gone_.try_emplace(node, left_counts_from_);  // membership has lost its memory, not the node
    }
    const bool ended = gone_.count(node) == 0;  // (else that is said when it counts as gone)
    owner_.TellCoordinator(e.uuid, names_.Number(node),
                           NodeLeft{ended, "it is not a member of the cluster"});
  }
}

void Router::Introduce(const std::string& name, Job& job, const std::string& node) {
  if (!job.hosting->job) {
    return;  // there is no such job yet
  }
  if (const auto hosted = owner_.Describe(*job.hosting->job, names_.Number(node))) {
    Say(node, PeerHeader{name, *job.hosting->job, job.hosting->epoch}, NodeMessage(*hosted));
  }
}

void Router::FromNode(const std::string& node, const PeerHeader& header,
                      const std::vector<ToCoordinator>& messages) {
  const std::string name = header.job_name.empty() ? owner_.JobName(header.job) : header.job_name;
  const NodeId from = names_.Number(node);
  if (fixed_host_ && !header.job_name.empty() && Find(name) == nullptr) {
    Watch(name);  // it was hosted here by a life that has left nothing behind (see Seek)
  }
  for (ToCoordinator message : messages) {
    Job* job = Find(name);
    if (job == nullptr || !job->hosting || job->hosting->job != header.job ||
        job->hosting->epoch != header.epoch) {
      return;
    }
    Hosting& hosting = *job->hosting;
    if (std::holds_alternative<NodeArrived>(message)) {
      ForgetTokens(hosting, from);
      hosting.arrived.insert(from);
    }
    if (hosting.arrived.count(from) == 0) {
      continue;  // said before it was lost: it tells all again
    }
    const bool ends = std::holds_alternative<RequestExpired>(message) ||
                      std::holds_alternative<RequestCancelled>(message);
    if (RequestToken* token = TokenIn(message)) {
      auto known = hosting.tokens.find({from, *token});
      if (known == hosting.tokens.end() && ends) {
        continue;  // it was answered meanwhile
      }
      if (known == hosting.tokens.end()) {
        known = hosting.tokens.emplace(std::pair(from, *token), next_token_).first;
        hosting.origins[next_token_++] = {from, *token};
      }
      *token = known->second;
      if (std::holds_alternative<RequestCancelled>(message)) {  // (One that expired is answered.)
        hosting.origins.erase(known->second);
        hosting.tokens.erase(known);
      }
    }
    owner_.TellCoordinator(header.job, from, message);
  }
}

void Router::FromCoordinator(const JobUuid& uuid, const std::vector<ForAgent>& messages,
                             EventTime time) {
  time_ = time;
  const std::string name = owner_.JobName(uuid);
  Job* job = Find(name);
  if (job == nullptr || !job->hosting || job->hosting->job != uuid) {
    return;
  }
  Hosting& hosting = *job->hosting;
  const PeerHeader header{name, uuid, hosting.epoch};
  for (const ForAgent& each : messages) {
    ToAgent message = each.message;
    if (auto* persist = std::get_if<PersistState>(&message)) {
      persist->state.set_epoch(hosting.epoch);
      persist->state.set_highest_epoch(hosting.epoch);
      hosting.writing = persist->state.version();
      hosting.written_here = hosting.agreed = false;
      hosting.failure = absl::OkStatus();
      if (hosting.stored == hosting.writing) {
        hosting.agreed = true;  // only the write here failed
      } else {
        owner_.Act(StoreAgreedState{name, hosting.epoch, hosting.writing,
                                    persist->state.SerializeAsString()});
      }
      TellState(name, hosting, persist->state);
      DeliverToAgent(*job, message);
      continue;
    }
    NodeId to = each.to;
    if (RequestToken* token = TokenIn(message)) {  // an answer goes to whoever asked
      to = kHere;
      if (*token >= kFirstForeignToken) {
        const auto origin = hosting.origins.find(*token);
        if (origin == hosting.origins.end()) {
          continue;
        }
        std::tie(to, *token) = origin->second;
        hosting.tokens.erase(origin->second);
        hosting.origins.erase(origin);
      }
    }
    if (to != kHere) {
      SayToArrived(hosting, to, EncodePeer(header, message));
    }
    if (to == kHere || to == kEveryNode) {
      DeliverToAgent(*job, message);
    }
  }
}

// `to`: one node, or kEveryNode. (Encoded once, however many they are.)
void Router::SayToArrived(const Hosting& hosting, NodeId to,
                          const absl::StatusOr<std::string>& bytes) {
  if (to != kEveryNode) {
    return hosting.arrived.count(to) > 0 ? Say(names_.Name(to), bytes) : void();
  }
  for (const NodeId node : hosting.arrived) {
    if (node != kHere) {
      Say(names_.Name(node), bytes);
    }
  }
}

// The nodes keep it, too. At once, if it says anything that somebody may build on. (Who joined is
// what each join of a large attempt changes: with that they may be a moment behind.)
void Router::TellState(const std::string& name, Hosting& hosting, const v1::JobState& state) {
  v1::JobState essence = state;
  essence.clear_version();
  essence.clear_nodes();
  essence.clear_members();
  for (v1::AttemptState& attempt : *essence.mutable_attempts()) {
    attempt.clear_joined();
    attempt.clear_untold();
  }
  std::string text = essence.SerializeAsString();
  if (text == hosting.told_state && time_.now < hosting.tell_at) {
    hosting.untold = state;
    return;
  }
  hosting.told_state = std::move(text);
  hosting.untold.reset();
  hosting.tell_at = time_.now + kTellStates;
  SayToArrived(
      hosting, kEveryNode,
      EncodePeer(PeerHeader{name, *hosting.job, hosting.epoch}, NodeMessage(StateKept{state})));
}

void Router::ForgetTokens(Hosting& hosting, NodeId node) {
  std::vector<RequestToken> forgotten;
  for (auto it = hosting.tokens.lower_bound({node, 0});
       it != hosting.tokens.end() && it->first.first == node;) {
    forgotten.push_back(it->second);
    hosting.origins.erase(it->second);
    it = hosting.tokens.erase(it);
  }
  for (const RequestToken token : forgotten) {
    owner_.TellCoordinator(*hosting.job, node, RequestCancelled{token});
  }
}

void Router::NodeIsLost(const std::string& node, bool ended, const std::string& why) {
  const NodeId id = names_.Number(node);
  for (auto& [name, job] : jobs_) {
    if (job.hosting && job.hosting->job) {
      JobLoses(job, id, ended, why);
    }
  }
}

void Router::JobLoses(Job& job, NodeId node, bool ended, const std::string& why) {
  if (job.hosting->arrived.erase(node) > 0) {
    ForgetTokens(*job.hosting, node);
  }
  owner_.TellCoordinator(*job.hosting->job, node, NodeLeft{ended, why});
}

// ---- The end, and what is durable ----

void Router::StepDown(const std::string& name, Job& job, bool resign) {
  const bool acted = job.hosting->acts;
  job.hosting.reset();
  job.sought.clear();  // they ask the next host
  job.readers.clear();
  Unmeet(job);
  job.host.reset();
  if (resign) {
    owner_.Act(ResignFrom{name});
  }
  if (acted) {
    owner_.EndHosting(name);
  }
  PlanCampaign(name, job);
}

void Router::On(const StateStored& e) {
  Job* job = Find(e.job);
  if (job != nullptr && job->hosting && job->hosting->epoch == e.epoch &&
      job->hosting->writing == e.version) {
    if (!job->hosting->acts) {
      job->hosting->stored = e.version;
      return MaybeAct(e.job, *job);
    }
    job->hosting->agreed = true;
    job->hosting->stored = e.version;
    StateDone(e.job, *job);
  }
}

void Router::On(const StateFenced& e) {
  On(StateFailed{e.job, e.epoch, e.version, "another node hosts the job since"});
}

void Router::On(const StateFailed& e) {
  Job* job = Find(e.job);
  if (job != nullptr && job->hosting && job->hosting->epoch == e.epoch &&
      job->hosting->writing == e.version) {
    if (!job->hosting->acts) {
      return CannotHost(e.job, *job);
    }
    job->hosting->agreed = true;
    job->hosting->failure.Update(absl::UnavailableError(
        absl::StrCat("the state of job '", e.job, "' could not be agreed on: ", ToAbsl(e.why))));
    StateDone(e.job, *job);
  }
}

// What all have agreed on, and this daemon alone fails to write, time and again: another node can
// do better. (It is tried again every second.)
void Router::StateDone(const std::string& name, Job& job) {
  Hosting& hosting = *job.hosting;
  if (hosting.writing == 0 || !hosting.written_here || !hosting.agreed) {
    return;
  }
  if (hosting.unwritten_since && hosting.stored == hosting.writing && !fixed_host_ &&
      !peers_.empty() && *hosting.unwritten_since + kUnwrittenGrace <= time_.now) {
    Complain(name, absl::StrCat("it is hosted here no more: its state cannot be written here: ",
                                Message(hosting.failure)));
    return CannotHost(name, job);
  }
  const uint64_t version = std::exchange(hosting.writing, 0);
  owner_.TellCoordinator(*hosting.job, kHere, StateWritten{version, hosting.failure});
}

}  // namespace holdfast
