// The way from gRPC's threads to the core on the reactor's thread, and back: one question, one
// answer, one deadline.
//
//   HF_ASSIGN_OR_RETURN(AdminAnswer answer, gateway.Ask(request, caller, deadline));
//   // answer.lease ends the hold on the shards that the core let us read
//
// Owner: the Daemon. Ask and everything about leases: any thread. Deliver: the reactor's.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <variant>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "server/events.h"

namespace holdfast {

// While it lives, the shards of an answer may be read.
class ReadLease {
 public:
  explicit ReadLease(std::function<void()> end) : end_(std::move(end)) {}
  ~ReadLease() { end_(); }
  ReadLease(const ReadLease&) = delete;
  ReadLease& operator=(const ReadLease&) = delete;

 private:
  const std::function<void()> end_;
};

struct AdminAnswer {
  decltype(AdminReply::reply) reply;
  std::unique_ptr<ReadLease> lease;  // with ReadableShards
};

// Of Ask's errors: nobody answered (the daemon stops, or the core took too long). Any other is the
// core's answer.
bool IsUnanswered(const absl::Status& status);

class AdminGateway {
 public:
  using PostEvent = std::function<void(Event)>;  // any thread: has the core handle it

  explicit AdminGateway(PostEvent post) : post_(std::move(post)) {}

  absl::StatusOr<AdminAnswer> Ask(decltype(AdminRequest::request) request, const Caller& caller,
                                  Duration at_most) EXCLUDES(mutex_);
  // `leave`: it is not written anew by itself.
  void ReportBadCopy(const ReadableShard& shard, const std::string& what, bool leave = false);
  void ReportGoodCopy(const ReadableShard& shard);
  void Deliver(AdminReply reply) EXCLUDES(mutex_);
  // Whoever waits is told that the daemon stops; so is whoever asks later.
  void Stop() EXCLUDES(mutex_);

 private:
  struct Waiting {
    bool answered = false;
    AdminReply reply;
  };
  std::unique_ptr<ReadLease> Lease(AdminToken token);

  const PostEvent post_;
  Mutex mutex_;
  CondVar answered_;
  AdminToken next_token_ GUARDED_BY(mutex_) = 1;
  std::map<AdminToken, Waiting> waiting_ GUARDED_BY(mutex_);
  bool stopped_ GUARDED_BY(mutex_) = false;
};

}  // namespace holdfast
