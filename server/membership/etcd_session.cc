// The connection, and what all requests have in common.
#include "server/membership/etcd_session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/utf8.h"

namespace holdfast {
namespace {

constexpr Duration kFirstDelay = std::chrono::milliseconds(100);
constexpr Duration kDelayMax = std::chrono::seconds(3);
constexpr Duration kIdle = std::chrono::hours(1);

// Not this request's fault, nor will another one fare better here.
bool IsConnectionFault(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kUnknown:
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kDataLoss:
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kUnimplemented:
      return true;
    default:
      return false;
  }
}

// The token has expired, or users and roles have changed since it was given.
bool WantsNewToken(const absl::Status& status) {
  return absl::IsUnauthenticated(status) ||
         (absl::IsInvalidArgument(status) &&
          absl::StrContains(status.message(), "revision of auth store is old"));
}

struct HeaderOf {
  template <typename T>
  const etcd::ResponseHeader* operator()(const T& response) const {
    return &response.header();
  }
  const etcd::ResponseHeader* operator()(std::monostate) const { return nullptr; }
};

}  // namespace

EtcdSession::EtcdSession(Options options)
    : options_(std::move(options)),
      keys_(options_.prefix),
      random_(options_.seed),
      endpoint_(options_.endpoints.size() - 1),
      old_leases_(options_.noted_leases) {
  // One more is to fit into the note.
  if (old_leases_.size() >= kNotedLeasesMax) {
    old_leases_.erase(old_leases_.begin(), old_leases_.end() - (kNotedLeasesMax - 1));
  }
  members_range_ = Follow(keys_.Nodes(), EndOfPrefix(keys_.Nodes()));
  members_range_->on_list = [this](const Range& range) { OnMembers(range); };
  members_range_->on_event = [this](const etcd::Event& event) { OnMemberEvent(event); };
}

MonotonicTime EtcdSession::next_timer() const {
  return wake_at_;
}

std::vector<EtcdAction> EtcdSession::Handle(Event event, MonotonicTime now) {
  now_ = now;
  actions_.clear();
  // 1. What time alone has decided, before anything that comes too late for it.
  if (lease_state_ == Lease::kHeld && now_ >= valid_until_) {
    LoseLease("it could not be renewed in time");
  }
  const auto late = [&](MonotonicTime sent) { return now_ >= sent + options_.request_timeout; };
  if (link_ != Link::kDown &&
      ((link_ == Link::kOpening && late(opened_at_)) ||
       std::any_of(calls_.begin(), calls_.end(),
                   [&](const auto& call) { return late(call.second.sent); }) ||
       std::any_of(watches_.begin(), watches_.end(), [&](const auto& watch) {
         const std::shared_ptr<Range> range = watch.second.lock();
         return range != nullptr && !range->confirmed && late(range->asked);
       }))) {
    GiveUpConnection("no answer in time", Then::kNextEndpoint);
  }
  // 2. What happened.
  Process(event);
  // 3. What can be done now, and when there is more to do.
  Pump();
  TellProblems();
  return std::move(actions_);
}

void EtcdSession::Process(Event& event) {
  if (std::holds_alternative<Begin>(event)) {
    begun_ = true;
  } else if (const auto* slept = std::get_if<Slept>(&event)) {
    OnSlept(slept->duration);
  } else if (const auto* opened = std::get_if<ConnectionOpened>(&event)) {
    OnConnectionOpened(*opened);
  } else if (auto* call = std::get_if<CallEnded>(&event)) {
    OnCallEnded(*call);
  } else if (const auto* message = std::get_if<WatchMessage>(&event)) {
    if (message->stream == stream_ && stream_ != 0) {
      OnWatchMessage(message->message);
    }
  } else if (const auto* ended = std::get_if<WatchEnded>(&event)) {
    if (ended->stream == stream_ && stream_ != 0) {
      OnWatchEnded(ended->status);
    }
  } else if (const auto* written = std::get_if<NoteWritten>(&event)) {
    OnNoteWritten(*written);
  } else if (std::holds_alternative<AskLeave>(event)) {
    Leave();
  } else if (const auto* watch = std::get_if<AskWatchHost>(&event)) {
    Ask(*watch);
  } else if (const auto* unwatch = std::get_if<AskUnwatchHost>(&event)) {
    Ask(*unwatch);
  } else if (const auto* campaign = std::get_if<AskCampaign>(&event)) {
    Ask(*campaign);
  } else if (const auto* resign = std::get_if<AskResign>(&event)) {
    Ask(*resign);
  } else if (auto* store = std::get_if<AskStoreState>(&event)) {
    Ask(*store);
  } else if (const auto* read = std::get_if<AskReadState>(&event)) {
    Ask(*read);
  } else if (const auto* forget = std::get_if<AskForgetJob>(&event)) {
    Ask(*forget);
  } else if (const auto* note = std::get_if<AskNote>(&event)) {
    Ask(*note);
  } else if (const auto* remote = std::get_if<AskNoteRemote>(&event)) {
    Ask(*remote);
  }
}

void EtcdSession::Pump() {
  wake_at_ = now_ + kIdle;
  if (!begun_ || lease_state_ == Lease::kLeft) {
    return;
  }
  if (link_ == Link::kDown && Due(connect_backoff_)) {
    Connect();
  }
  PumpLease();
  if (link_ == Link::kUp && !probed_ && !probing_ && Due(probe_backoff_)) {
    Probe();
  }
  if (ready()) {
    PumpNote();
    PumpWatches();
    PumpJobs();
  }
  if (link_ == Link::kOpening) {
    WakeAt(opened_at_ + options_.request_timeout);
  }
  for (const auto& [id, call] : calls_) {
    WakeAt(call.sent + options_.request_timeout);
  }
  for (const auto& [id, watch] : watches_) {
    if (const std::shared_ptr<Range> range = watch.lock(); range != nullptr && !range->confirmed) {
      WakeAt(range->asked + options_.request_timeout);
    }
  }
  if (lease_state_ == Lease::kHeld) {
    WakeAt(valid_until_);
  }
}

// --- The connection
// -------------------------------------------------------------------------------

void EtcdSession::Connect() {
  link_ = Link::kOpening;
  opened_at_ = now_;
  connection_ = ++last_id_;
  actions_.emplace_back(EtcdConnect{connection_, endpoint_});
}

void EtcdSession::GiveUpConnection(const std::string& problem, Then then) {
  if (link_ == Link::kDown) {
    return;
  }
  link_ = Link::kDown;
  probed_ = false;
  token_.clear();
  LeaveStream();
  if (!problem.empty()) {
    SetProblem("connection",
               absl::StrCat("etcd at ", options_.endpoints[endpoint_], ": ", problem));
  }
  if (then == Then::kNextEndpoint) {
    endpoint_ = (endpoint_ + 1) % options_.endpoints.size();
  }
  // A round over all endpoints goes fast, the next ones slower and slower.
  connect_backoff_.failures = std::min<uint32_t>(connect_backoff_.failures, 1'000'000);
  Backoff round{static_cast<uint32_t>(connect_backoff_.failures / options_.endpoints.size()), {}};
  Failed(round, kDelayMax);
  ++connect_backoff_.failures;
  connect_backoff_.not_before = round.not_before;
  actions_.emplace_back(EtcdDisconnect{});
  // Whether what was asked has happened is not known. Each asks again, when there is a connection.
  std::map<uint64_t, CallInFlight> unanswered;
  unanswered.swap(calls_);
  for (auto& [id, call] : unanswered) {
    Response none;
    call.answer(absl::UnavailableError("the connection was given up"), none);
  }
}

void EtcdSession::OnConnectionOpened(const ConnectionOpened& event) {
  if (link_ != Link::kOpening || event.connection != connection_) {
    return;
  }
  if (!event.status.ok()) {
    GiveUpConnection(Message(event.status), Then::kNextEndpoint);
    return;
  }
  if (options_.user.empty()) {
    link_ = Link::kUp;
    return;
  }
  link_ = Link::kAuthenticating;
  Authenticate(event.password);
}

void EtcdSession::Authenticate(const std::string& password) {
  etcd::AuthenticateRequest request;
  request.set_name(options_.user);
  request.set_password(password);
  Send(std::move(request), [this](const absl::Status& status, Response& response) {
    if (link_ != Link::kAuthenticating) {
      return;
    }
    // An etcd that asks nobody who he is wants no token either.
    if (absl::IsFailedPrecondition(status) &&
        absl::StrContains(status.message(), "authentication is not enabled")) {
      link_ = Link::kUp;
      return;
    }
    auto* authenticated = std::get_if<etcd::AuthenticateResponse>(&response);
    if (!status.ok() || authenticated == nullptr) {
      GiveUpConnection(absl::StrCat("user '", options_.user, "': ", Message(status)),
                       Then::kNextEndpoint);
      return;
    }
    token_ = std::move(*authenticated->mutable_token());
    link_ = Link::kUp;
  });
}

// Asks whether this is the etcd that is known: the key `id` holds something that only its first
// client made up, so it differs when the data was erased. The first answer also shows a revision
// that went back.
void EtcdSession::Probe() {
  probing_ = true;
  const std::string own =
      absl::StrCat(absl::Hex(random_(), absl::kZeroPad16), absl::Hex(random_(), absl::kZeroPad16));
  etcd::TxnRequest request;
  etcd::Compare* absent = request.add_compare();
  absent->set_target(etcd::Compare::CREATE);
  absent->set_key(keys_.Id());
  absent->set_create_revision(0);
  etcd::PutRequest* put = request.add_success()->mutable_request_put();
  put->set_key(keys_.Id());
  put->set_value(own);
  request.add_failure()->mutable_request_range()->set_key(keys_.Id());
  Send(std::move(request), [this, own](const absl::Status& status, Response& response) {
    probing_ = false;
    if (Refused(status)) {
      return;
    }
    const auto* txn = std::get_if<etcd::TxnResponse>(&response);
    if (!status.ok() || txn == nullptr) {
      SetProblem("connection",
                 absl::StrCat("etcd at ", options_.endpoints[endpoint_], ": ", Message(status)));
      Failed(probe_backoff_, kDelayMax);
      return;
    }
    std::string id = own;
    if (!txn->succeeded()) {
      if (txn->responses_size() != 1 || txn->responses(0).response_range().kvs_size() != 1) {
        GiveUpConnection("an answer that makes no sense", Then::kNextEndpoint);
        return;
      }
      id = txn->responses(0).response_range().kvs(0).value().substr(0, kForeignTextBytesMax);
    }
    if (!cluster_id_.empty() && cluster_id_ != id) {
      Wiped("etcd's data was erased, or another etcd answers");
    }
    cluster_id_ = id;
    probed_ = true;
    probe_backoff_ = {};
    connect_backoff_ = {};
    SetProblem("connection", "");
  });
}

// --- Requests
// -------------------------------------------------------------------------------------

bool EtcdSession::Send(EtcdRequest request, Answer answer) {
  if (link_ != Link::kUp && link_ != Link::kAuthenticating) {
    Response none;
    answer(absl::UnavailableError("there is no connection"), none);
    return false;
  }
  CallInFlight call;
  call.answer = std::move(answer);
  call.sent = now_;
  call.linearizable = std::holds_alternative<etcd::TxnRequest>(request) ||
                      std::holds_alternative<etcd::RangeRequest>(request);
  call.revision_then = revision_;
  const uint64_t id = ++last_id_;
  calls_.emplace(id, std::move(call));
  actions_.emplace_back(EtcdCall{id, std::move(request), token_});
  return true;
}

void EtcdSession::OnCallEnded(CallEnded& event) {
  const auto found = calls_.find(event.id);
  if (found == calls_.end()) {
    return;  // given up long ago, or answered before
  }
  const CallInFlight call = std::move(found->second);
  calls_.erase(found);
  if (event.status.ok()) {
    if (const etcd::ResponseHeader* header = std::visit(HeaderOf(), event.response);
        header != nullptr) {
      SeeHeader(*header, call);
    }
  }
  call.answer(event.status, event.response);
}

bool EtcdSession::SeeHeader(const etcd::ResponseHeader& header, const CallInFlight& call) {
  const uint64_t before = header_cluster_id_;
  header_cluster_id_ = header.cluster_id();
  bool same = true;
  if (before != 0 && before != header.cluster_id()) {
    Wiped("another etcd cluster answers");
    same = false;
  } else if (call.linearizable && header.revision() < call.revision_then) {
    Wiped(absl::StrCat("etcd's data went back from revision ", call.revision_then, " to ",
                       header.revision()));
    same = false;
  }
  revision_ = std::max(revision_, header.revision());
  return same;
}

void EtcdSession::Wiped(const std::string& what) {
  Tell(ClusterWiped{what});
  cluster_id_.clear();
  probed_ = false;
  revision_ = 0;
  for (auto& [id, call] : calls_) {
    call.revision_then = 0;
  }
  // Whether the lease is still there is what counts now.
  keep_alive_at_ = now_;
  JobsEndCampaigns(what);
  ListAllAgain();
  note_.wanted = note_.wanted || note_.told;
}

bool EtcdSession::Refused(const absl::Status& status) {
  if (WantsNewToken(status)) {
    GiveUpConnection(Message(status), Then::kSameEndpoint);
    return true;
  }
  if (IsConnectionFault(status)) {
    GiveUpConnection(Utf8Text(Message(status).substr(0, kForeignTextBytesMax)),
                     Then::kNextEndpoint);
    return true;
  }
  return false;
}

void EtcdSession::Failed(Backoff& backoff, Duration at_most) {
  const Duration delay =
      std::min(kFirstDelay * (int64_t{1} << std::min<uint32_t>(backoff.failures, 10)), at_most);
  ++backoff.failures;
  std::uniform_real_distribution<double> part(0.5, 1.0);
  backoff.not_before =
      now_ + Duration(static_cast<int64_t>(static_cast<double>(delay.count()) * part(random_)));
}

bool EtcdSession::DueAt(MonotonicTime at) {
  if (now_ >= at) {
    return true;
  }
  WakeAt(at);
  return false;
}

void EtcdSession::WakeAt(MonotonicTime at) {
  wake_at_ = std::min(wake_at_, at);
}

void EtcdSession::Tell(MembershipEvent event) {
  actions_.emplace_back(std::move(event));
}

void EtcdSession::SetProblem(const std::string& about, std::string text) {
  if (text.empty()) {
    problems_.erase(about);
  } else {
    problems_[about] = Utf8Text(text);
  }
}

void EtcdSession::TellProblems() {
  constexpr size_t kShownMax = 8;
  std::vector<std::string> shown;
  for (const auto& [about, text] : problems_) {
    if (shown.size() == kShownMax) {
      shown.push_back(absl::StrCat("and ", problems_.size() - kShownMax, " more"));
      break;
    }
    shown.push_back(text);
  }
  std::string text = absl::StrJoin(shown, "; ");
  if (text != told_problems_) {
    told_problems_ = text;
    Tell(MembershipProblem{std::move(text)});
  }
}

}  // namespace holdfast
