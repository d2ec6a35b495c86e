// What happened on this node, the last of it: for `ckptctl events`, and whoever else is to be told.
//
//   EventJournal journal(seed, {root, own_uid});
//   journal.Add(event, owner);
//   v1::EventBatch batch = journal.Read(request, caller_uid);     // those that the caller may see
//   journal.AwaitAfter(batch.next_after(), 5s);
//
// Bounded: when it is full, the oldest one goes of whoever has most in it, so that a user who makes
// many pushes nobody else's out, and none of the node's. Thread-safe; AwaitAfter blocks, for
// threads that may.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "holdfast/v1/admin.pb.h"
#include "server/events.h"

namespace holdfast {

// As `ckptctl events` and the command of events.command call it.
const char* EventKindName(Report::Kind kind);
// What is told of a report; none of those that each rank's every save causes.
std::optional<v1::DaemonEvent> EventOf(const Report& report);
// "info", "warning", "error".
const char* SeverityName(v1::Severity severity);
std::optional<v1::Severity> ParseSeverity(const std::string& name);

class EventJournal {
 public:
  static constexpr size_t kEventsMax = 4096;
  static constexpr size_t kTextBytesMax = 1024;
  static constexpr size_t kBatchMax = 256;

  // `journal` tells this one's numbers from those of an earlier daemon's. Operators see all.
  EventJournal(uint64_t journal, std::vector<uint32_t> operators)
      : journal_(journal), operators_(std::move(operators)) {}

  // Its number is given here. `owner`: of its job, if that is known; else as that of the job's
  // events before. Without one, or without a job, only operators see it. `cause`: the user at whose
  // pace they come; none: the owner, or the node.
  void Add(v1::DaemonEvent event, std::optional<uint32_t> owner,
           std::optional<uint32_t> cause = std::nullopt) EXCLUDES(mutex_);
  // At most kBatchMax; next_after tells whether there are more.
  v1::EventBatch Read(const v1::WatchEventsRequest& request, uint32_t caller) const
      EXCLUDES(mutex_);
  // False: nothing came after that one by then, or it was stopped.
  bool AwaitAfter(uint64_t number, Duration at_most) EXCLUDES(mutex_);
  // Whoever waits, now or later, returns at once.
  void Stop() EXCLUDES(mutex_);
  uint64_t last() const EXCLUDES(mutex_);
  bool stopped() const EXCLUDES(mutex_);

 private:
  using Cause = std::optional<uint32_t>;  // none: the node
  struct Kept {
    v1::DaemonEvent event;
    std::optional<uint32_t> owner;
    Cause cause;
  };
  void MakeRoom() REQUIRES(mutex_);
  bool MaySee(const Kept& kept, uint32_t caller) const;
  static bool Matches(const v1::DaemonEvent& event, const v1::WatchEventsRequest& request);

  const uint64_t journal_;
  const std::vector<uint32_t> operators_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::map<uint64_t, Kept> kept_ GUARDED_BY(mutex_);  // by their numbers
  std::map<Cause, std::deque<uint64_t>> of_cause_ GUARDED_BY(mutex_);
  uint64_t last_ GUARDED_BY(mutex_) = 0;
  bool stopped_ GUARDED_BY(mutex_) = false;
};

}  // namespace holdfast
