// This node and the hosts of its jobs.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/message_tokens.h"
#include "server/router.h"

namespace holdfast {
namespace {

// Met with the host in this very process.
constexpr PeerChannel kOwnChannel = UINT64_MAX;

bool EndsRequest(const ToCoordinator& message) {
  return std::holds_alternative<RequestExpired>(message) ||
         std::holds_alternative<RequestCancelled>(message);
}

}  // namespace

// ---- To find the host ----

void Router::On(const JobWanted& e) {
  Job& job = Watch(e.name);
  job.wanted = JobWanter{e.uid, e.gid};
  Seek(e.name, job);
}

void Router::On(const JobRead& e) {
  Job& job = Watch(e.name);
  job.read = true;
  Seek(e.name, job);
}

// The host is to find the job, or to open it. (A list's first node hosts what it knows of, and
// nobody else ever will: should it have lost all that it had, it hears of its jobs from those that
// keep their states.)
void Router::Seek(const std::string& name, Job& job) {
  if (job.wanted) {
    job.wanted = owner_.WhoJoins(name);  // (nobody: nothing happens later behind their backs)
  }
  job.read = job.read && owner_.ReadersWait(name);
  const bool kept = fixed_host_ && !job.hosted && owner_.KeptState(name);
  if (!job.host || (!job.wanted && !job.read && !kept)) {
    return;
  }
  if (job.hosting) {
    return job.hosting->acts && job.wanted ? owner_.WantHere(name) : void();
  }
  const PeerHeader header{name, {}, job.host->epoch};
  if (job.wanted) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(job.wanted->until - time_.now);
    JobSought sought{job.wanted->uid, job.wanted->gid};
    sought.wait_ms = static_cast<uint64_t>(std::max<int64_t>(left.count(), 1));
    Say(job.host->node, header, NodeMessage(sought));
  }
  if (job.read || (kept && !job.wanted)) {
    Say(job.host->node, header, NodeMessage(JobSought{0, 0, true}));
  }
}

void Router::On(const std::string& node, const PeerHeader& header, const JobAbsent&) {
  Job* job = Find(header.job_name);
  if (job != nullptr && job->host && job->host->node == node && header.epoch >= job->highest) {
    job->read = false;
    owner_.SayAbsent(header.job_name);
    MaybeForget(header.job_name);
  }
}

// ---- To meet it ----

bool Router::CanTell(const Job& job) const {
  if (!job.hosted || job.met_over == 0 || !job.host) {
    return false;
  }
  return job.hosting ? job.met_over == kOwnChannel : job.met_over == ChannelTo(job.host->node);
}

void Router::Unmeet(Job& job) {
  job.hosted.reset();
  job.met_over = 0;
  ForgetOutgoing(job);
}

void Router::ForgetOutgoing(Job& job) {
  job.outgoing.clear();
  job.urgent = false;
  job.gather_until.reset();
}

// The host has said who it is, and there is a way to it: it hears all that it must know.
void Router::TryMeet(const std::string& name, Job& job) {
  const PeerChannel channel = job.hosting ? kOwnChannel : ChannelTo(job.host->node);
  if (!job.hosted || channel == 0 || job.met_over == channel) {
    return;
  }
  job.met_over = channel;
  ForgetOutgoing(job);
  ++job.meeting;

  job.wanted.reset();
  job.read = false;
  to_settle_.insert(name);
  owner_.Meet(name, *job.uuid, *job.hosted);
  job.hosted->ranks.clear();  // (of those it believed in then)
}

// The highest epoch was that of another node than this.
bool Router::OfAnother(const Job& job, const std::string& node) {
  return !job.highest_of.empty() && job.highest_of != node;
}

void Router::On(const std::string& node, const PeerHeader& header, const JobHosted& m) {
  Job& job = Watch(header.job_name);
  const bool given_twice = header.epoch == job.highest && OfAnother(job, node);
  if (header.epoch < job.highest || given_twice) {
    // It was elected by what was lost since, and acts: it is to hear of that.
    return Answer(node, PeerHeader{header.job_name, {}, header.epoch},
                  NodeMessage(StateTold{job.highest, std::nullopt}));
  }
  if (job.uuid && *job.uuid != header.job) {
    RefuseUnanswered(header.job_name, job);
  }
  SetHost(header.job_name, job, {node, 0, header.epoch});
  Note(job, header.job_name, node, header.epoch);
  Unmeet(job);
  job.uuid = header.job;
  job.hosted = m;
  if (ChannelTo(node) == 0) {
    owner_.Act(ConnectPeer{node});
  }
  TryMeet(header.job_name, job);
}

void Router::On(const std::string& node, const PeerHeader& header, const StateAsked&) {
  // (Who keeps nothing of it has no reason to host it.)
  Job& job = owner_.KeptState(header.job_name) ? Watch(header.job_name) : Ask(header.job_name);
  StateTold told;
  // (If it asks twice, its own epoch is not that of another.)
  const bool again = header.epoch == job.highest && job.highest_of == node;
  told.highest_epoch = again ? 0 : job.highest;
  told.state = owner_.KeptState(header.job_name);
  PeerHeader answer{header.job_name, {}, header.epoch};
  if (told.state) {
    if (const absl::StatusOr<JobUuid> uuid = JobUuid::FromBytes(told.state->job_uuid());
        uuid.ok()) {
      answer.job = *uuid;
    }
  }
  if (header.epoch > job.highest) {
    SetHost(header.job_name, job, {node, 0, header.epoch});
    Note(job, header.job_name, node, header.epoch);
    Seek(header.job_name, job);
  }
  Answer(node, answer, NodeMessage(std::move(told)));
  if (fixed_host_) {
    MaybeForget(header.job_name);  // if it finds a job of that name it says so
  }
}

void Router::On(const std::string& node, const PeerHeader& header, const StateKept& m) {
  const Job* job = Find(header.job_name);
  if (job != nullptr && header.epoch == job->highest && job->host && job->host->node == node &&
      m.state.epoch() == header.epoch) {
    owner_.KeepState(m.state);
  }
}

// ---- What is said to it ----

void Router::FromAgent(const JobUuid& uuid, ToCoordinator message, EventTime time) {
  time_ = time;
  const std::string name = owner_.JobName(uuid);
  if (name.empty()) {
    return;
  }
  Job& job = Watch(name);
  if (job.uuid && *job.uuid != uuid) {
    return;  // another job of that name, which was left alone
  }
  if (const auto* written = std::get_if<StateWritten>(&message)) {
    if (job.hosting && job.hosting->writing == written->version) {
      std::optional<MonotonicTime>& failing = job.hosting->unwritten_since;
      failing = written->status.ok() ? std::nullopt : std::optional(failing.value_or(time.now));
      job.hosting->written_here = true;
      job.hosting->failure.Update(written->status);
      StateDone(name, job);
    }
    return;
  }
  const RequestToken token = TokenOf(message);
  const bool can_tell = CanTell(job);
  if (EndsRequest(message)) {
    for (auto& [other_name, other] : jobs_) {  // (it may have asked another job for room)
      other.unanswered.erase(token);
    }
  } else if (token != 0) {
    job.unanswered[token] = {message, can_tell ? job.meeting : 0};
  }
  if (can_tell) {
    Tell(name, job, std::move(message));
  }
}

void Router::Tell(const std::string& name, Job& job, ToCoordinator message) {
  if (auto* arrived = std::get_if<NodeArrived>(&message)) {
    arrived->joining = Joining(job);
  }
  if (job.hosting) {
    return owner_.TellCoordinator(*job.uuid, kHere, message);
  }
  const auto* begun = std::get_if<SaveAsked>(&message);
  const bool gathers =
      std::holds_alternative<ShardSealed>(message) || (begun != nullptr && begun->token == 0);
  job.urgent = job.urgent || !gathers;
  job.outgoing.push_back(std::move(message));
  to_settle_.insert(name);
}

// Who asked the host to be let in when they met before. It may have, and its answer be on the way.
std::vector<NodeArrived::Joining> Router::Joining(const Job& job) {
  std::vector<NodeArrived::Joining> joining;
  for (const auto& [token, request] : job.unanswered) {
    const auto* join = std::get_if<JoinAsked>(&request.message);
    if (join != nullptr && request.said_in != 0 && joining.size() < kSeatsMax) {
      joining.push_back({join->rank, join->caller.process});
    }
  }
  return joining;
}

// Whether what there is to say waits for what the other ranks here are about to do. Nobody waits
// for it: whoever does has said so, and that is urgent.
bool Router::Gathers(Job& job) {
  if (job.urgent || job.outgoing.size() >= owner_.RanksHere(*job.uuid)) {
    return false;
  }
  if (!job.gather_until) {
    job.gather_until = time_.now + kGather;
  }
  return time_.now < *job.gather_until;
}

void Router::Settle(EventTime time) {
  time_ = time;
  for (const std::string& name : to_settle_) {
    Job& job = jobs_.at(name);
    if (!CanTell(job)) {
      continue;
    }
    ForgetEnded(job);
    std::vector<ToCoordinator> again;
    for (auto& [token, request] : job.unanswered) {
      if (request.said_in != job.meeting) {
        request.said_in = job.meeting;
        again.push_back(request.message);
      }
    }
    for (ToCoordinator& message : again) {
      Tell(name, job, std::move(message));
    }
  }
}

void Router::Flush(EventTime time) {
  time_ = time;
  for (const std::string& name : std::exchange(to_settle_, {})) {
    Job& job = jobs_.at(name);
    if (CanTell(job) && !job.outgoing.empty() && Gathers(job)) {
      continue;
    }
    const std::vector<ToCoordinator> outgoing = std::exchange(job.outgoing, {});
    ForgetOutgoing(job);
    if (outgoing.empty() || !CanTell(job)) {
      continue;
    }
    const PeerHeader header{name, *job.uuid, job.host->epoch};
    if (const auto encoded = EncodePeer(header, outgoing, time); encoded.ok()) {
      for (const std::string& bytes : *encoded) {
        Say(job.host->node, bytes);
      }
      continue;
    }
    for (const ToCoordinator& message : outgoing) {  // but for what nobody could take
      Say(job.host->node, EncodePeer(header, message, time));
    }
  }
}

// ---- What it says ----

void Router::FromHost(const std::string& node, const PeerHeader& header, const ToAgent& message) {
  const std::string name = header.job_name.empty() ? owner_.JobName(header.job) : header.job_name;
  Job* job = Find(name);
  if (job == nullptr || job->hosting || !job->hosted || !job->host || job->host->node != node ||
      job->host->epoch != header.epoch || job->highest != header.epoch ||
      *job->uuid != header.job || job->met_over == 0) {
    return;
  }
  DeliverToAgent(*job, message);
}

// Another job has the name now: what was asked of the one before nobody answers.
void Router::RefuseUnanswered(const std::string& name, Job& job) {
  for (const auto& [token, request] : std::exchange(job.unanswered, {})) {
    owner_.TellAgent(*job.uuid,
                     Refused{token,
                             {absl::StatusCode::kAborted, v1::Failure::REASON_UNSPECIFIED,
                              absl::StrCat("job '", name, "' was made anew; join again")}});
  }
}

void Router::DeliverToAgent(Job& job, const ToAgent& message) {
  if (const RequestToken token = TokenOf(message); token != 0) {
    job.unanswered.erase(token);
  }
  owner_.TellAgent(*job.uuid, message);
  if (std::holds_alternative<GiveUp>(message) || std::holds_alternative<Superseded>(message)) {
    ForgetEnded(job);
  }
}

// The agent ends by itself what was asked for steps and attempts that are over.
void Router::ForgetEnded(Job& job) {
  std::erase_if(job.unanswered, [&](const auto& asked) { return !owner_.Waits(asked.first); });
}

}  // namespace holdfast
