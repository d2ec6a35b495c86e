#include "client-lib/src/daemon_link.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/sync_point.h"
#include "client-lib/src/socket.h"

namespace holdfast::client {
namespace {

constexpr Milliseconds kFirstPause{20};
constexpr Milliseconds kLongestPause{500};

}  // namespace

uint64_t DaemonLink::attempt() {
  const MutexLock lock(mutex_);
  return attempt_;
}

JobUuid DaemonLink::job_uuid() {
  const MutexLock lock(mutex_);
  return job_uuid_;
}

Status DaemonLink::Open(Deadline deadline) {
  return Get(deadline, Patience::kUntilDeadline).status();
}

// What is asked for so that this rank has its place; the requests that are unanswered stay so until
// somebody has the time. `connection` and `sent` change under the link's lock, all else is of the
// one who connects.
struct DaemonLink::Joining {
  const uint64_t attempt;
  const uint64_t leave_attempt;
  Deadline::Clock::time_point sent = Deadline::Clock::now();  // what is unanswered now
  std::shared_ptr<Connection> connection = nullptr;
  bool greeted = false;
  uint64_t hello = 0;  // requests that are unanswered; 0: not sent
  uint64_t join = 0;
};

struct DaemonLink::ConnectingEnds {
  DaemonLink& link;
  bool goes_on = false;  // by the next one
  ~ConnectingEnds() {
    const MutexLock lock(link.mutex_);
    link.connecting_ = false;
    if (!goes_on) {
      link.joining_ = nullptr;
    }
    link.changed_.NotifyAll();
  }
};

// Lets the lock go while it waits.
Status DaemonLink::WaitUntilNobodyConnects(Deadline deadline) {
  while (connecting_) {
    const Deadline wait = deadline.Bearing(joining_->sent);
    if (wait.passed()) {
      return deadline.passed()
                 ? Status(Code::kDeadlineExceeded, "another call was still connecting to ckptd")
                 : Status(Code::kUnavailable, "ckptd has not answered another call yet");
    }
    if (!changed_.WaitUntil(mutex_, wait.NextLook())) {
      mutex_.Unlock();
      deadline.Look();
      mutex_.Lock();
    }
  }
  return Status();
}

Result<std::shared_ptr<Connection>> DaemonLink::Get(Deadline deadline, Patience patience) {
  return Connect(Purpose::kThisAttempt, deadline, patience);
}

std::shared_ptr<Connection> DaemonLink::Current() {
  const MutexLock lock(mutex_);
  return !connecting_ && connection_ != nullptr && connection_->alive() ? connection_ : nullptr;
}

// The join itself may be cut off by a restart of the daemon; asking again is harmless
// (docs/protocol.md §2).
Status DaemonLink::NextAttempt(Deadline deadline) {
  return Connect(Purpose::kNextAttempt, deadline, Patience::kUntilDeadline).status();
}

Result<std::shared_ptr<Connection>> DaemonLink::Connect(Purpose purpose, Deadline deadline,
                                                        Patience patience) {
  Status cause;  // what the daemon itself said last: more telling than that time ran out
  for (Milliseconds pause = kFirstPause;; pause = std::min(pause * 2, kLongestPause)) {
    Result<std::shared_ptr<Connection>> tried = Try(purpose, deadline);
    if (tried.ok()) {
      return tried;
    }
    Status status = tried.status();
    // (A join that another caller sent may end by that one's deadline.)
    const bool again =
        status.code() == Code::kUnavailable || status.code() == Code::kDeadlineExceeded;
    if (!again || patience == Patience::kOnce || deadline.passed()) {
      if (status.code() == Code::kDeadlineExceeded && !cause.ok()) {
        status = Status(status.code(),
                        absl::StrCat(status.message(), "; before that: ", cause.message()));
      }
      return WithContext(status, absl::StrCat("join job '", identity_.job, "' as rank ",
                                              identity_.rank, " of ", identity_.world_size));
    }
    cause = status;
    std::this_thread::sleep_for(std::min(pause, deadline.left()));
    deadline.Look();
  }
}

Result<std::shared_ptr<Connection>> DaemonLink::Try(Purpose purpose, Deadline deadline) {
  if (const std::shared_ptr<Connection> silent = WaitedInVainFor(); silent != nullptr) {
    LeaveIfReplaced(*silent);
  }
  std::shared_ptr<Joining> joining;
  {
    const MutexLock lock(mutex_);
    HF_TRY(WaitUntilNobodyConnects(deadline));
    if (closed_) {
      return Status(Code::kRefused, "the job was closed in this process");
    }
    if (purpose == Purpose::kThisAttempt && connection_ != nullptr && connection_->alive()) {
      return connection_;
    }
    BeginJoining(purpose);
    joining = joining_;
  }
  ConnectingEnds ends{*this};
  const Result<wire::JoinReply> reply = GoOn(*joining, deadline);

  const MutexLock lock(mutex_);
  Status status = reply.status();
  if (status.ok()) {
    status = closed_ ? Status(Code::kRefused, "the job was closed in this process")
                     : Accept(*reply, joining->attempt);
  }
  trouble_ = status;
  if (status.ok()) {
    connection_ = joining->connection;
  }
  // A daemon whose queue of new connections is full has none; there may be room next time.
  const bool later =
      joining->connection == nullptr
          ? status.code() == Code::kDeadlineExceeded
          : joining->connection->alive() &&
                (status.code() == Code::kUnavailable || status.code() == Code::kDeadlineExceeded);
  ends.goes_on = later && purpose == Purpose::kThisAttempt;
  if (!status.ok()) {
    return status;
  }
  return connection_;
}

void DaemonLink::BeginJoining(Purpose purpose) {
  const bool next = purpose == Purpose::kNextAttempt;
  const uint64_t attempt = next ? 0 : attempt_;
  const bool goes_on = !next && joining_ != nullptr && joining_->attempt == attempt &&
                       (joining_->connection == nullptr || joining_->connection->alive());
  if (!goes_on) {
    joining_ = std::make_shared<Joining>(Joining{attempt, next ? attempt_ : 0});
    if (next && connection_ != nullptr && connection_->alive()) {
      joining_->connection = connection_;
      joining_->greeted = true;
    }
  }
  connecting_ = true;
}

Result<wire::JoinReply> DaemonLink::GoOn(Joining& joining, Deadline deadline) {
  // 1. A connection.
  if (joining.connection == nullptr) {
    successor_.Connecting(identity_.socket);
    HF_TRY_ASSIGN(std::shared_ptr<Connection> fresh,
                  Connection::Connect(identity_.socket, deadline.Bearing(joining.sent)));
    const MutexLock lock(mutex_);
    joining.connection = std::move(fresh);
  }
  HF_TRY(Greet(joining, deadline));
  // 2. The rank's place.
  if (joining.join == 0) {
    HF_TRY_ASSIGN(joining.join, joining.connection->Send(JoinOf(joining, deadline), deadline));
    SentNow(joining);
    HF_SYNC_POINT("client.join.sent");
  }
  if (joining.leave_attempt == 0) {
    HF_TRY(Answered(joining, joining.join, deadline));
  }
  HF_TRY_ASSIGN(Answer<wire::JoinReply> answer, joining.connection->Receive<wire::JoinReply>(
                                                    std::exchange(joining.join, 0), deadline));
  return std::move(answer.message);
}

Status DaemonLink::Greet(Joining& joining, Deadline deadline) {
  if (joining.greeted) {
    return Status();
  }
  if (joining.hello == 0) {
    HF_TRY_ASSIGN(joining.hello, joining.connection->SayHello(/*wants_busy_flag=*/true, deadline));
    SentNow(joining);
  }
  HF_TRY(Answered(joining, joining.hello, deadline));
  HF_TRY(joining.connection->TakeHello(std::exchange(joining.hello, 0), identity_.socket, deadline,
                                       &busy_));
  joining.greeted = true;
  return Status();
}

// Waits for the reply, for as long as this caller may.
Status DaemonLink::Answered(const Joining& joining, uint64_t id, Deadline deadline) {
  const Status there = joining.connection->WaitFor(id, deadline.Bearing(joining.sent));
  if (there.code() == Code::kDeadlineExceeded && !deadline.passed()) {
    const std::string hang = joining.connection->HangText();
    return Status(
        Code::kUnavailable,
        hang.empty() ? "ckptd has not answered yet; the next call looks whether it has" : hang);
  }
  return there;
}

void DaemonLink::SentNow(Joining& joining) {
  const MutexLock lock(mutex_);
  joining.sent = Deadline::Clock::now();
}

wire::Join DaemonLink::JoinOf(const Joining& joining, Deadline deadline) {
  wire::Join join;
  join.job = identity_.job;
  join.rank = identity_.rank;
  join.world_size = identity_.world_size;
  join.launch = identity_.launch;
  join.policy = identity_.policy;
  join.attempt = joining.attempt;
  join.leave_attempt = joining.leave_attempt;
  join.deadline_ms = deadline.DaemonMillis();
  if (joining.attempt != 0) {
    const MutexLock lock(mutex_);
    join.passed_step = passed_;
  }
  return join;
}

// The one that is being made, or the one there is.
std::shared_ptr<Connection> DaemonLink::Newest() {
  const MutexLock lock(mutex_);
  return joining_ != nullptr && joining_->connection != nullptr ? joining_->connection
                                                                : connection_;
}

// Null: there is none, or something has come since, or another call still waits for it.
std::shared_ptr<Connection> DaemonLink::WaitedInVainFor() {
  std::shared_ptr<Connection> joined;
  {
    const MutexLock lock(mutex_);
    if (connecting_) {
      return nullptr;
    }
    if (joining_ != nullptr && joining_->connection != nullptr) {
      return joining_->connection;  // left by a call for which it took too long
    }
    joined = connection_;
  }
  return joined == nullptr || joined->Answers() ? nullptr : joined;
}

// Whoever waits for the silent one goes on, too: with the next Get.
void DaemonLink::LeaveIfReplaced(Connection& silent) {
  if (silent.alive() && successor_.Serves(identity_.socket, silent.Process())) {
    silent.Break(Status(Code::kUnavailable, absl::StrCat("ckptd hangs, and another one serves at '",
                                                         identity_.socket, "' in its place")));
  }
}

void DaemonLink::Ask() {
  if (const std::shared_ptr<Connection> newest = Newest(); newest != nullptr && newest->alive()) {
    newest->Ask();
  }
}

std::string DaemonLink::Holdup() {
  if (const std::shared_ptr<Connection> newest = Newest(); newest != nullptr && newest->alive()) {
    const std::string hang = newest->HangText();
    if (!hang.empty()) {
      LeaveIfReplaced(*newest);
    }
    return hang;
  }
  const MutexLock lock(mutex_);
  return trouble_.message();
}

Status DaemonLink::Accept(const wire::JoinReply& reply, uint64_t wanted_attempt) {
  const absl::StatusOr<JobUuid> uuid = JobUuid::FromBytes(reply.job_uuid);
  if (!uuid.ok()) {
    return FromAbslStatus(uuid.status(), "ckptd answered with a job id that is none");
  }
  if (reply.attempt == 0 || (wanted_attempt != 0 && reply.attempt != wanted_attempt)) {
    return Status(Code::kInternal, absl::StrCat("ckptd answered with attempt ", reply.attempt,
                                                " to a rank of attempt ", wanted_attempt));
  }
  if (!job_uuid_.IsZero() && *uuid != job_uuid_) {
    return Status(Code::kSuperseded,
                  absl::StrCat("the job was removed, and there is another of its name now (",
                               uuid->ToString(), " instead of ", job_uuid_.ToString(),
                               "): end this process"));
  }
  job_uuid_ = *uuid;
  if (attempt_ != reply.attempt) {
    passed_.reset();
  }
  attempt_ = reply.attempt;
  return Status();
}

void DaemonLink::SetPassed(uint64_t step) {
  const MutexLock lock(mutex_);
  passed_ = step;
}

std::optional<uint64_t> DaemonLink::passed() {
  const MutexLock lock(mutex_);
  return passed_;
}

void DaemonLink::Disconnect(const Status& why) {
  const MutexLock lock(mutex_);
  if (connection_ != nullptr) {
    connection_->Break(why);
  }
}

void DaemonLink::Close() {
  const MutexLock lock(mutex_);
  closed_ = true;
  busy_.Detach();
  if (connection_ != nullptr) {
    connection_->Break(Status(Code::kRefused, "the job was closed in this process"));
    connection_.reset();
  }
  if (joining_ != nullptr && joining_->connection != nullptr) {
    joining_->connection->Break(Status(Code::kRefused, "the job was closed in this process"));
  }
}

}  // namespace holdfast::client
