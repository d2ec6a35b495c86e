#include "server/runtime/admin_gateway.h"

#include <chrono>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

namespace holdfast {
namespace {

constexpr char kUnanswered[] = "holdfast/unanswered";  // a status's payload

absl::Status Unanswered(absl::Status why) {
  why.SetPayload(kUnanswered, absl::Cord());
  return why;
}

absl::Status Stopping() {
  return Unanswered(absl::UnavailableError("the daemon is stopping"));
}

}  // namespace

bool IsUnanswered(const absl::Status& status) {
  return status.GetPayload(kUnanswered).has_value();
}

absl::StatusOr<AdminAnswer> AdminGateway::Ask(decltype(AdminRequest::request) request,
                                              const Caller& caller, Duration at_most) {
  const auto until = std::chrono::steady_clock::now() + at_most;
  AdminRequest event;
  event.caller = caller;
  event.request = std::move(request);
  {
    MutexLock lock(mutex_);
    if (stopped_) {
      return Stopping();
    }
    event.token = next_token_++;
    waiting_.emplace(event.token, Waiting());
  }
  const AdminToken token = event.token;
  post_(std::move(event));

  MutexLock lock(mutex_);
  Waiting& waiting = waiting_.find(token)->second;
  while (!waiting.answered && !stopped_) {
    if (!answered_.WaitUntil(mutex_, until)) {
      break;
    }
  }
  const bool answered = waiting.answered;
  AdminReply reply = std::move(waiting.reply);
  waiting_.erase(token);  // an answer that comes now finds nobody: Deliver ends its hold
  if (!answered) {
    return stopped_ ? Stopping()
                    : Unanswered(absl::DeadlineExceededError(absl::StrCat(
                          "the daemon did not answer within ",
                          std::chrono::duration_cast<std::chrono::milliseconds>(at_most).count(),
                          " ms")));
  }
  if (!reply.status.ok()) {
    return reply.status;
  }
  AdminAnswer answer;
  if (std::holds_alternative<ReadableShards>(reply.reply)) {
    answer.lease = Lease(token);
  }
  answer.reply = std::move(reply.reply);
  return answer;
}

std::unique_ptr<ReadLease> AdminGateway::Lease(AdminToken token) {
  return std::make_unique<ReadLease>([post = post_, token] { post(AdminReadDone{token}); });
}

void AdminGateway::ReportBadCopy(const ReadableShard& shard, const std::string& what, bool leave) {
  if (shard.tier != TierKind::kMemory) {
    return post_(DurableCopyJudged{shard.tier, shard.copy.id, what, leave});
  }
  post_(CopyFoundBad{shard.slot, shard.copy.generation, what});
}

void AdminGateway::ReportGoodCopy(const ReadableShard& shard) {
  if (shard.tier != TierKind::kMemory) {
    return post_(DurableCopyJudged{shard.tier, shard.copy.id, "", false});
  }
  post_(CopyFoundGood{shard.slot, shard.copy.generation});
}

void AdminGateway::Deliver(AdminReply reply) {
  MutexLock lock(mutex_);
  const auto found = waiting_.find(reply.token);
  if (found != waiting_.end()) {
    found->second.reply = std::move(reply);
    found->second.answered = true;
    answered_.NotifyAll();
  } else if (reply.status.ok() && std::holds_alternative<ReadableShards>(reply.reply)) {
    post_(AdminReadDone{reply.token});
  }
}

void AdminGateway::Stop() {
  MutexLock lock(mutex_);
  stopped_ = true;
  answered_.NotifyAll();
}

}  // namespace holdfast
