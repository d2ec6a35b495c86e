#include "client-lib/src/daemon_link.h"

#include <algorithm>
#include <thread>

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

// Lets the lock go while it waits.
Status DaemonLink::WaitUntilConnected(Deadline deadline) {
  while (connecting_) {
    if (!changed_.WaitUntil(mutex_, deadline.NextLook())) {
      mutex_.Unlock();
      deadline.Look();
      mutex_.Lock();
      if (deadline.passed()) {
        return Status(Code::kDeadlineExceeded, "another call was still connecting to ckptd");
      }
    }
  }
  return Status();
}

Result<std::shared_ptr<Connection>> DaemonLink::Get(Deadline deadline, Patience patience) {
  uint64_t attempt = 0;
  {
    const MutexLock lock(mutex_);
    HF_TRY(WaitUntilConnected(deadline));
    if (closed_) {
      return Status(Code::kRefused, "the job was closed in this process");
    }
    if (connection_ != nullptr && connection_->alive()) {
      return connection_;
    }
    connecting_ = true;
    attempt = attempt_;
  }
  return Connect(attempt, 0, deadline, patience);
}

std::shared_ptr<Connection> DaemonLink::Current() {
  const MutexLock lock(mutex_);
  return !connecting_ && connection_ != nullptr && connection_->alive() ? connection_ : nullptr;
}

Status DaemonLink::NextAttempt(Deadline deadline) {
  // The join itself may be cut off by a restart of the daemon; asking again is harmless
  // (docs/protocol.md §2).
  uint64_t leaving = 0;
  {
    const MutexLock lock(mutex_);
    HF_TRY(WaitUntilConnected(deadline));
    connecting_ = true;
    leaving = attempt_;
  }
  return Connect(0, leaving, deadline, Patience::kUntilDeadline).status();
}

struct DaemonLink::ConnectingEnds {
  DaemonLink& link;
  ~ConnectingEnds() {
    const MutexLock lock(link.mutex_);
    link.connecting_ = false;
    link.changed_.NotifyAll();
  }
};

// Whoever has set connecting_ comes here; it is reset on every way out.
Result<std::shared_ptr<Connection>> DaemonLink::Connect(uint64_t attempt, uint64_t leave_attempt,
                                                        Deadline deadline, Patience patience) {
  const ConnectingEnds ends{*this};
  std::shared_ptr<Connection> connection;
  {
    const MutexLock lock(mutex_);
    connection = connection_;
  }
  Result<wire::JoinReply> joined = Status();
  Status cause;  // what the daemon itself said last: more telling than that time ran out
  for (Milliseconds pause = kFirstPause;; pause = std::min(pause * 2, kLongestPause)) {
    // 1. A connection: the one there is, if it lives.
    Status dialled;
    if (connection == nullptr || !connection->alive()) {
      Result<std::shared_ptr<Connection>> fresh =
          Connection::Dial(identity_.socket, deadline, &busy_);
      dialled = fresh.status();
      connection = fresh.ok() ? *fresh : nullptr;
    }
    // 2. The rank's place.
    joined = dialled.ok() ? JoinOn(*connection, attempt, leave_attempt, deadline)
                          : Result<wire::JoinReply>(dialled);
    if (joined.ok() || joined.status().code() != Code::kUnavailable ||
        patience == Patience::kOnce || deadline.passed()) {
      break;
    }
    cause = joined.status();
    std::this_thread::sleep_for(std::min(pause, deadline.left()));
    deadline.Look();
  }

  const MutexLock lock(mutex_);
  Status status = joined.status();
  if (status.code() == Code::kDeadlineExceeded && !cause.ok()) {
    status =
        Status(status.code(), absl::StrCat(status.message(), "; before that: ", cause.message()));
  }
  if (status.ok()) {
    status = Accept(*joined, attempt);
  }
  if (!status.ok()) {
    return WithContext(status, absl::StrCat("join job '", identity_.job, "' as rank ",
                                            identity_.rank, " of ", identity_.world_size));
  }
  connection_ = connection;
  return connection;
}

Result<wire::JoinReply> DaemonLink::JoinOn(Connection& connection, uint64_t attempt,
                                           uint64_t leave_attempt, Deadline deadline) {
  wire::Join join;
  join.job = identity_.job;
  join.rank = identity_.rank;
  join.world_size = identity_.world_size;
  join.launch = identity_.launch;
  join.policy = identity_.policy;
  join.attempt = attempt;
  join.leave_attempt = leave_attempt;
  join.deadline_ms = deadline.DaemonMillis();
  if (attempt != 0) {
    const MutexLock lock(mutex_);
    join.passed_step = passed_;
  }
  HF_TRY_ASSIGN(const uint64_t id, connection.Send(join, deadline));
  HF_SYNC_POINT("client.join.sent");
  HF_TRY_ASSIGN(Answer<wire::JoinReply> answer, connection.Receive<wire::JoinReply>(id, deadline));
  return std::move(answer.message);
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
}

}  // namespace holdfast::client
