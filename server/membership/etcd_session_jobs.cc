// Who hosts which job, and the jobs' agreed states.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/ids.h"
#include "base/status.h"
#include "base/utf8.h"
#include "server/membership/etcd_session_job.h"

namespace holdfast {
namespace {

constexpr size_t kSupersededMax = 1024;

void CompareCreated(etcd::TxnRequest* request, const std::string& key, int64_t revision) {
  etcd::Compare* compare = request->add_compare();
  compare->set_target(etcd::Compare::CREATE);
  compare->set_key(key);
  compare->set_create_revision(revision);
}

void CompareModified(etcd::TxnRequest* request, const std::string& key, int64_t revision) {
  etcd::Compare* compare = request->add_compare();
  compare->set_target(etcd::Compare::MOD);
  compare->set_key(key);
  compare->set_mod_revision(revision);
}

void Put(etcd::RequestOp* op, const std::string& key, std::string value, int64_t lease) {
  op->mutable_request_put()->set_key(key);
  op->mutable_request_put()->set_value(std::move(value));
  op->mutable_request_put()->set_lease(lease);
}

// What a range of one key among the answers says: nothing when the key is not there.
const etcd::KeyValue* Value(const etcd::TxnResponse& response, int index) {
  if (index >= response.responses_size() ||
      response.responses(index).response_range().kvs_size() != 1) {
    return nullptr;
  }
  return &response.responses(index).response_range().kvs(0);
}

bool HasRanges(const etcd::TxnResponse& response, int count) {
  if (response.responses_size() != count) {
    return false;
  }
  return std::all_of(response.responses().begin(), response.responses().end(),
                     [](const etcd::ResponseOp& op) { return op.has_response_range(); });
}

// Of a key whose value cannot be read. (What it said the nodes know, too.)
std::string WayOut(const std::string& key) {
  return absl::StrCat(". If no newer ckptd put it there, remove it: etcdctl del ", key);
}

}  // namespace

EtcdSession::~EtcdSession() = default;

// --- The table
// ------------------------------------------------------------------------------------

std::shared_ptr<EtcdSession::Job> EtcdSession::JobFor(const std::string& name, std::string* why) {
  if (const auto known = jobs_.find(name); known != jobs_.end()) {
    return known->second;
  }
  if (const absl::Status status = CheckJobName(name); !status.ok()) {
    *why = Message(status);
    return nullptr;
  }
  if (jobs_.size() >= kHostedJobsMax) {
    *why =
        absl::StrCat("this node takes part in ", jobs_.size(), " jobs already, which is the limit");
    return nullptr;
  }
  auto job = std::make_shared<Job>();
  job->name = name;
  jobs_[name] = job;
  return job;
}

void EtcdSession::PumpJobs() {
  for (auto it = jobs_.begin(); it != jobs_.end();) {
    const std::shared_ptr<Job> job = it->second;
    PumpJob(*job);
    if (!job->FollowsHost() && job->range != nullptr) {
      Unfollow(*job->range);
      job->range = nullptr;
      job->host_known = false;
      job->told.reset();
    }
    it = job->Idle() ? jobs_.erase(it) : std::next(it);
  }
}

void EtcdSession::PumpJob(Job& job) {
  if (job.FollowsHost()) {
    if (job.range == nullptr) {
      FollowHost(jobs_.at(job.name));
    }
    PumpRange(job.range);
  }
  // A removal goes first: an election after it must not find the old key.
  if (job.removal) {
    if (!job.removal->asked && Due(job.backoff)) {
      RemoveHost(job);
    }
  } else if (job.campaign == Job::Campaign::kToRead && member() && Due(job.backoff)) {
    ReadForCampaign(job);
  }
  if (job.hosting && job.storing && !job.storing_asked && Due(job.store_backoff)) {
    PutState(job);
  }
  if (job.read_wanted && !job.read_asked && Due(job.read_backoff)) {
    ReadState(job);
  }
}

// The answer is for the job as it is now: once it lost its lease, or was told to stop, it means
// nothing.
void EtcdSession::SendForJob(Job& job, etcd::TxnRequest request,
                             void (EtcdSession::*answer)(Job&, const absl::Status&,
                                                         etcd::TxnResponse&)) {
  Send(std::move(request), [this, weak = std::weak_ptr<Job>(jobs_.at(job.name)), round = job.round,
                            answer](const absl::Status& status, Response& response) {
    const bool refused = Refused(status);
    const std::shared_ptr<Job> asked = weak.lock();
    if (asked == nullptr || asked->round != round) {
      return;
    }
    etcd::TxnResponse none;
    auto* txn = std::get_if<etcd::TxnResponse>(&response);
    absl::Status outcome = status;
    if (refused) {
      outcome = absl::UnavailableError(status.message());
    } else if (status.ok() && txn == nullptr) {
      outcome = absl::InvalidArgumentError("an answer that makes no sense");
    }
    (this->*answer)(*asked, outcome, txn == nullptr ? none : *txn);
  });
}

// Whether it is to be tried again. Problems with the connection have been told already.
bool EtcdSession::Retry(Job& job, Backoff& backoff, const absl::Status& status) {
  const std::string about = absl::StrCat("job ", job.name);
  if (status.ok()) {
    SetProblem(about, "");
    return false;
  }
  if (!absl::IsUnavailable(status)) {
    SetProblem(about, absl::StrCat("job '", job.name, "': etcd: ", Message(status)));
    Failed(backoff, kRetryMax);
  }
  return true;
}

// --- The host, as the watch shows it
// -----------------------------------------------------------------

void EtcdSession::FollowHost(const std::shared_ptr<Job>& job) {
  job->range = Follow(keys_.Host(job->name), "");
  job->range->on_list = [this, weak = std::weak_ptr<Job>(job)](const Range& range) {
    if (const std::shared_ptr<Job> of = weak.lock(); of != nullptr) {
      OnHost(*of, range.listed.empty() ? nullptr : &range.listed.front(), range.list_revision);
    }
  };
  job->range->on_event = [this, weak = std::weak_ptr<Job>(job)](const etcd::Event& event) {
    if (const std::shared_ptr<Job> of = weak.lock(); of != nullptr) {
      OnHost(*of, event.type() == etcd::Event::DELETE ? nullptr : &event.kv(),
             event.kv().mod_revision());
    }
  };
}

void EtcdSession::OnHost(Job& job, const etcd::KeyValue* value, int64_t at_revision) {
  std::optional<JobHost> host;
  if (value != nullptr) {
    const absl::StatusOr<JobHost> decoded = DecodeHost(value->value());
    // Hosts put their keys on their leases: one without is a stale copy, which the next campaign
    // removes. Any other key is in the way, whatever it says.
    if (!decoded.ok() || value->lease() != 0) {
      host = decoded.ok() ? *decoded : JobHost{};
    }
    SetProblem(absl::StrCat("host ", job.name),
               decoded.ok()
                   ? ""
                   : absl::StrCat("job '", job.name, "': the key of its host cannot be read: ",
                                  Message(decoded.status()), WayOut(keys_.Host(job.name))));
  }
  job.host = host;
  job.host_known = true;
  TellHost(job);
  // 1. Somebody removed or replaced our key, or took it off our lease.
  if (job.hosting && at_revision > job.host_revision &&
      (value == nullptr || value->create_revision() != job.host_revision ||
       value->value() != job.host_value || value->lease() != lease_)) {
    EndHosting(job);
  }
  // 2. An election that was given up has taken place all the same.
  if (value != nullptr && lease_ != 0 && value->lease() == lease_ && !job.hosting &&
      job.campaign == Job::Campaign::kNone && !job.removal) {
    job.removal = Job::Removal{value->create_revision(), value->value()};
  }
}

void EtcdSession::TellHost(Job& job) {
  if (!job.watched || !job.host_known || (job.told && *job.told == job.host)) {
    return;
  }
  job.told = job.host;
  if (job.host) {
    Tell(HostIs{job.name, *job.host});
  } else {
    Tell(NoHost{job.name});
  }
}

// --- Elections
// ------------------------------------------------------------------------------------

void EtcdSession::ReadForCampaign(Job& job) {
  job.campaign = Job::Campaign::kReading;
  etcd::TxnRequest request;
  for (const std::string& key :
       {keys_.Host(job.name), keys_.EpochOf(job.name), keys_.State(job.name)}) {
    request.add_success()->mutable_request_range()->set_key(key);
  }
  SendForJob(job, std::move(request), &EtcdSession::OnCampaignRead);
}

void EtcdSession::OnCampaignRead(Job& job, const absl::Status& status,
                                 etcd::TxnResponse& response) {
  job.campaign = Job::Campaign::kToRead;
  if (!Retry(job, job.backoff, status)) {
    JudgeCampaign(job, response);
  }
}

// A view of host, epoch and state, at one revision.
void EtcdSession::JudgeCampaign(Job& job, const etcd::TxnResponse& view) {
  if (!HasRanges(view, 3)) {
    Retry(job, job.backoff, absl::InvalidArgumentError("an answer that makes no sense"));
    return;
  }
  const etcd::KeyValue* host = Value(view, 0);
  const etcd::KeyValue* epoch = Value(view, 1);
  const etcd::KeyValue* state = Value(view, 2);
  if (host != nullptr) {
    const absl::StatusOr<JobHost> winner = DecodeHost(host->value());
    if (host->lease() == 0 && winner.ok()) {
      // It was put back from a copy of etcd's data. If the host that it names lives, that one gives
      // it up itself, when it sees so: until then nobody else may host the job.
      const auto named = members_.find(winner->node);
      if (named != members_.end() && named->second.incarnation == winner->incarnation &&
          winner->node != options_.self.name) {
        Retry(job, job.backoff,
              absl::UnavailableError(
                  absl::StrCat("the key of its host has no lease, and names node '", winner->node,
                               "', which is there", WayOut(keys_.Host(job.name)))));
        return;
      }
      job.removal = Job::Removal{host->create_revision(), host->value()};
      return;
    }
    if (host->lease() == lease_ && winner.ok()) {
      // Ours: an earlier try of which no answer came. If it was told before, or lies too low,
      // another one is needed.
      if (winner->epoch > std::max(job.floor, job.last_elected)) {
        Win(job, winner->epoch, host->value(), host->create_revision(), state);
      } else {
        job.removal = Job::Removal{host->create_revision(), host->value()};
      }
      return;
    }
    if (!winner.ok()) {
      Retry(job, job.backoff,
            absl::InvalidArgumentError(
                absl::StrCat("the key of its host cannot be read: ", winner.status().message(),
                             WayOut(keys_.Host(job.name)))));
      return;
    }
    job.campaign = Job::Campaign::kNone;
    Tell(CampaignLost{job.name, *winner, ""});
    return;
  }
  Epoch last = job.floor;
  if (epoch != nullptr) {
    const absl::StatusOr<Epoch> given = DecodeEpoch(epoch->value());
    if (!given.ok()) {
      Retry(job, job.backoff,
            absl::InvalidArgumentError(
                absl::StrCat("the key of its epoch cannot be read: ", given.status().message(),
                             WayOut(keys_.EpochOf(job.name)))));
      return;
    }
    last = std::max(last, *given);
  }
  // Should the counter have been lost, what was stored under it is left.
  if (state != nullptr) {
    if (const absl::StatusOr<StoredState> stored = DecodeState(state->value()); stored.ok()) {
      last = std::max(last, stored->epoch);
    }
  }
  if (last >= kEpochMax) {
    job.campaign = Job::Campaign::kNone;
    Tell(CampaignLost{job.name, {}, absl::StrCat("no epoch is left above ", last)});
    return;
  }
  // The election: nobody hosts it, nobody was elected since, and this node is a member under its
  // name.
  job.campaign = Job::Campaign::kTrying;
  job.trying = {options_.self.name, options_.self.incarnation, last + 1};
  etcd::TxnRequest request;
  CompareCreated(&request, keys_.Host(job.name), 0);
  CompareModified(&request, keys_.EpochOf(job.name), epoch == nullptr ? 0 : epoch->mod_revision());
  CompareCreated(&request, keys_.Node(options_.self.name), published_revision_);
  Put(request.add_success(), keys_.Host(job.name), EncodeHost(job.trying), lease_);
  Put(request.add_success(), keys_.EpochOf(job.name), EncodeEpoch(last + 1), 0);
  request.add_success()->mutable_request_range()->set_key(keys_.State(job.name));
  for (const std::string& key :
       {keys_.Host(job.name), keys_.EpochOf(job.name), keys_.State(job.name)}) {
    request.add_failure()->mutable_request_range()->set_key(key);
  }
  SendForJob(job, std::move(request), &EtcdSession::OnElection);
}

void EtcdSession::OnElection(Job& job, const absl::Status& status, etcd::TxnResponse& response) {
  job.campaign = Job::Campaign::kToRead;
  if (absl::IsNotFound(status)) {
    ListAllAgain();
    LoseLease("etcd does not know it any more");
    return;
  }
  if (Retry(job, job.backoff, status)) {
    return;
  }
  if (response.succeeded()) {
    if (job.trying.epoch > job.floor) {
      Win(job, job.trying.epoch, EncodeHost(job.trying), response.header().revision(),
          Value(response, 2));
    } else {  // the floor was raised meanwhile
      job.removal = Job::Removal{response.header().revision(), EncodeHost(job.trying)};
    }
    return;
  }
  // Somebody was faster, or our own earlier try was.
  if (Value(response, 0) != nullptr) {
    JudgeCampaign(job, response);
  } else {
    Failed(job.backoff, kRetryMax);
  }
}

void EtcdSession::Win(Job& job, Epoch epoch, std::string host_value, int64_t create_revision,
                      const etcd::KeyValue* state) {
  job.campaign = Job::Campaign::kNone;
  job.backoff = {};
  job.hosting = true;
  job.epoch = epoch;
  job.last_elected = epoch;
  job.host_value = std::move(host_value);
  job.host_revision = create_revision;
  job.state_revision = state == nullptr ? 0 : state->mod_revision();
  job.stored_version = 0;
  Elected elected{job.name, epoch, 0, 0, ""};
  if (state != nullptr) {
    if (absl::StatusOr<StoredState> stored = DecodeState(state->value()); stored.ok()) {
      elected.state_epoch = stored->epoch;
      elected.state_version = stored->version;
      elected.state = std::move(stored->state);
    } else {
      SetProblem(absl::StrCat("job ", job.name),
                 absl::StrCat("job '", job.name,
                              "': the state in etcd cannot be read: ", Message(stored.status())));
    }
  }
  Tell(std::move(elected));
}

// Every store that has no answer yet gets one.
void EtcdSession::EndHosting(Job& job) {
  if (!job.hosting) {
    return;
  }
  job.hosting = false;
  job.told.reset();
  job.BeginRound();
  job.AnswerStores([&](uint64_t version) {
    Tell(StateFailed{job.name, job.epoch, version,
                     "this node ceased to host the job before it was known"});
  });
  Tell(Deposed{job.name, job.epoch});
}

void EtcdSession::Ask(const AskWatchHost& ask) {
  std::string why;
  if (const std::shared_ptr<Job> job = JobFor(ask.job, &why); job != nullptr) {
    job->watched = true;
    job->told.reset();
    TellHost(*job);
  } else {
    SetProblem("watch host", absl::StrCat("the host of a job cannot be watched: ", why));
  }
}

void EtcdSession::Ask(const AskUnwatchHost& ask) {
  if (const auto job = jobs_.find(ask.job); job != jobs_.end()) {
    job->second->watched = false;
  }
}

void EtcdSession::Ask(const AskCampaign& ask) {
  std::string why;
  const std::shared_ptr<Job> job = JobFor(ask.job, &why);
  if (job == nullptr) {
    Tell(CampaignLost{ask.job, {}, why});
    return;
  }
  if (job->campaign != Job::Campaign::kNone) {
    job->floor = std::max(job->floor, ask.floor);
    return;
  }
  if (job->hosting) {
    return;
  }
  job->campaign = Job::Campaign::kToRead;
  job->floor = ask.floor;
  job->backoff = {};
}

void EtcdSession::Ask(const AskResign& ask) {
  const auto found = jobs_.find(ask.job);
  if (found == jobs_.end()) {
    return;
  }
  Job& job = *found->second;
  if (job.campaign != Job::Campaign::kNone) {
    job.may_be_elected |= job.campaign == Job::Campaign::kTrying;
    job.campaign = Job::Campaign::kNone;
    job.BeginRound();
  }
  if (job.hosting) {
    job.hosting = false;
    job.told.reset();
    job.BeginRound();
    job.AnswerStores([&](uint64_t version) {
      Tell(StateFailed{job.name, job.epoch, version, "this node resigned before it was known"});
    });
    job.removal = Job::Removal{job.host_revision, job.host_value};
    job.backoff = {};
  }
}

void EtcdSession::Ask(const AskForgetJob& ask) {
  const auto found = jobs_.find(ask.job);
  if (found == jobs_.end() || !found->second->hosting || found->second->epoch != ask.epoch) {
    Tell(JobForgotten{ask.job, ask.epoch, false});
    return;
  }
  Job& job = *found->second;
  Ask(AskResign{ask.job});
  job.removal->forget = true;
}

void EtcdSession::RemoveHost(Job& job) {
  job.removal->asked = true;
  etcd::TxnRequest request;
  job.Fence(&request, keys_, job.removal->create_revision, job.removal->value);
  request.add_success()->mutable_request_delete_range()->set_key(keys_.Host(job.name));
  if (job.removal->forget) {
    request.add_success()->mutable_request_delete_range()->set_key(keys_.State(job.name));
  }
  for (const std::string& key : {keys_.Host(job.name), keys_.State(job.name)}) {
    request.add_failure()->mutable_request_range()->set_key(key);
  }
  SendForJob(job, std::move(request), &EtcdSession::OnHostRemoved);
}

void EtcdSession::OnHostRemoved(Job& job, const absl::Status& status, etcd::TxnResponse& response) {
  job.removal->asked = false;
  if (Retry(job, job.backoff, status)) {
    return;
  }
  // That of which no answer came may have done it.
  const bool gone =
      response.succeeded() ||
      (HasRanges(response, 2) && Value(response, 0) == nullptr && Value(response, 1) == nullptr);
  if (job.removal->forget) {
    Tell(JobForgotten{job.name, job.epoch, gone});
  }
  job.removal.reset();
  job.backoff = {};
}

// The lease takes its keys with it, so nothing has to be removed, and no try can succeed any more.
void EtcdSession::JobsLoseLease() {
  for (auto& [name, job] : jobs_) {
    EndHosting(*job);
    job->BeginRound();
    job->may_be_elected = false;
    if (job->campaign != Job::Campaign::kNone) {
      job->campaign = Job::Campaign::kToRead;
    }
    if (job->removal) {
      if (job->removal->forget) {
        Tell(JobForgotten{name, job->epoch, false});
      }
      job->removal.reset();
    }
  }
}

// Their floors are of a time when etcd itself remembered the epochs.
void EtcdSession::JobsEndCampaigns(const std::string& why) {
  for (auto& [name, job] : jobs_) {
    if (job->campaign != Job::Campaign::kNone) {
      job->may_be_elected |= job->campaign == Job::Campaign::kTrying;
      job->campaign = Job::Campaign::kNone;
      job->BeginRound();
      Tell(CampaignLost{name, {}, why});
    }
  }
}

// --- States
// ---------------------------------------------------------------------------------------

void EtcdSession::Ask(AskStoreState& ask) {
  const StoredState& state = ask.state;
  if (state.state.size() > kAgreedStateBytesMax || state.version == 0) {
    Tell(StateFailed{ask.job, state.epoch, state.version,
                     state.version == 0 ? "versions begin at 1"
                                        : absl::StrCat(state.state.size(), " bytes; at most ",
                                                       kAgreedStateBytesMax, " can be stored")});
    return;
  }
  const auto found = jobs_.find(ask.job);
  if (found == jobs_.end() || !found->second->hosting || found->second->epoch != state.epoch) {
    Tell(StateFenced{ask.job, state.epoch, state.version});
    return;
  }
  Job& job = *found->second;
  if (state.version <= job.NewestVersion() || job.superseded.size() >= kSupersededMax) {
    Tell(StateFailed{
        ask.job, state.epoch, state.version,
        absl::StrCat("version ", job.NewestVersion(), " was given before, or too many wait")});
    return;
  }
  if (!job.storing) {
    job.storing = std::move(ask.state);
    return;
  }
  if (job.next) {
    job.superseded.push_back(job.next->version);
  }
  job.next = std::move(ask.state);
}

// Fenced twice: by the host's key, which is this election's and no other's; and by the state's
// revision, so that a put that was delayed on its way cannot come after a newer one.
void EtcdSession::PutState(Job& job) {
  job.storing_asked = true;
  etcd::TxnRequest request;
  job.Fence(&request, keys_, job.host_revision, job.host_value);
  CompareModified(&request, keys_.State(job.name), job.state_revision);
  Put(request.add_success(), keys_.State(job.name), EncodeState(*job.storing), 0);
  for (const std::string& key : {keys_.Host(job.name), keys_.State(job.name)}) {
    request.add_failure()->mutable_request_range()->set_key(key);
  }
  SendForJob(job, std::move(request), &EtcdSession::OnStatePut);
}

void EtcdSession::OnStatePut(Job& job, const absl::Status& status, etcd::TxnResponse& response) {
  job.storing_asked = false;
  if (absl::IsInvalidArgument(status)) {
    // etcd's own limit (max-request-bytes) may be lower than ours.
    const std::string why = absl::StrCat("etcd refuses it: ", status.message());
    const uint64_t version = job.storing->version;
    job.storing = std::exchange(job.next, std::nullopt);
    Tell(StateFailed{job.name, job.epoch, version, why});
    while (!job.superseded.empty() && job.superseded.front() < version) {
      Tell(StateFailed{job.name, job.epoch, job.superseded.front(), why});
      job.superseded.pop_front();
    }
    return;
  }
  if (Retry(job, job.store_backoff, status)) {
    return;
  }
  if (response.succeeded()) {
    job.state_revision = response.header().revision();
  } else {
    const etcd::KeyValue* host = Value(response, 0);
    const etcd::KeyValue* state = Value(response, 1);
    if (host == nullptr || host->create_revision() != job.host_revision ||
        host->value() != job.host_value) {
      job.AnswerStores([&](uint64_t version) { Tell(StateFenced{job.name, job.epoch, version}); });
      EndHosting(job);
      return;
    }
    job.state_revision = state == nullptr ? 0 : state->mod_revision();
    if (state == nullptr || state->value() != EncodeState(*job.storing)) {
      Failed(job.store_backoff,
             kRetryMax);  // an earlier put of ours came in between: now above that
      return;
    }
    // Our own, of which no answer came.
  }
  job.store_backoff = {};
  const uint64_t version = job.storing->version;
  job.stored_version = version;
  job.storing = std::exchange(job.next, std::nullopt);
  Tell(StateStored{job.name, job.epoch, version});
  while (!job.superseded.empty() && job.superseded.front() < version) {
    Tell(StateStored{job.name, job.epoch, job.superseded.front()});
    job.superseded.pop_front();
  }
}

void EtcdSession::Ask(const AskReadState& ask) {
  std::string why;
  const std::shared_ptr<Job> job = JobFor(ask.job, &why);
  if (job == nullptr) {
    Tell(StateIs{ask.job, 0, 0, "", why});
    return;
  }
  job->read_wanted = true;
}

void EtcdSession::ReadState(Job& job) {
  job.read_asked = true;
  etcd::TxnRequest request;
  request.add_success()->mutable_request_range()->set_key(keys_.State(job.name));
  SendForJob(job, std::move(request), &EtcdSession::OnStateRead);
}

void EtcdSession::OnStateRead(Job& job, const absl::Status& status, etcd::TxnResponse& response) {
  job.read_asked = false;
  if (Retry(job, job.read_backoff, status)) {
    return;
  }
  job.read_wanted = false;
  job.read_backoff = {};
  StateIs is{job.name, 0, 0, "", ""};
  if (const etcd::KeyValue* value = Value(response, 0); value != nullptr) {
    if (absl::StatusOr<StoredState> stored = DecodeState(value->value()); stored.ok()) {
      is = {job.name, stored->epoch, stored->version, std::move(stored->state), ""};
    } else {
      is.why = absl::StrCat("the state in etcd cannot be read: ", stored.status().message());
    }
  }
  Tell(std::move(is));
}

void EtcdSession::ListAllAgain() {
  ListAgain(*members_range_);
  for (auto& [name, job] : jobs_) {
    if (job->range != nullptr) {
      ListAgain(*job->range);
    }
  }
}

}  // namespace holdfast
