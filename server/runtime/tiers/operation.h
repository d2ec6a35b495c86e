// One operation of a durable tier: queued, run by a worker, perhaps stuck in a call that never
// returns, answered once.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "base/mutex.h"
#include "server/events.h"
#include "tiers/transfer/revocable_memory.h"
#include "tiers/transfer/transfer_control.h"

namespace holdfast {

// Where the events of operations go. Outlives the daemon: what comes after Close is dropped.
class EventOutlet {
 public:
  explicit EventOutlet(std::function<void(Event)> post) : post_(std::move(post)) {}
  void Post(Event event) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (post_) {
      post_(std::move(event));
    }
  }
  void Close() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    post_ = nullptr;
  }

 private:
  Mutex mutex_;
  std::function<void(Event)> post_ GUARDED_BY(mutex_);
};

class Operation : public std::enable_shared_from_this<Operation> {
 public:
  // `work` runs on a worker and returns the event that answers. `cancelled` makes the answer of an
  // operation that never ran, or that is cancelled while it is stuck with its slot revoked.
  Operation(DrainId drain, std::function<Event(Operation&)> work, std::function<Event()> cancelled)
      : drain_(drain),
        control_(std::make_shared<TransferControl>()),
        work_(std::move(work)),
        cancelled_(std::move(cancelled)) {}

  DrainId drain() const { return drain_; }
  // What is said, besides, when it stalls: a scan that hangs is an answer of its own.
  void WhenStalled(std::function<Event(const std::string&)> say) { when_stalled_ = std::move(say); }
  const std::function<Event(const std::string&)>& when_stalled() const { return when_stalled_; }
  // Said when it is answered although it still hangs where it reads from: what it writes stands in
  // nobody's way any more but a removal's.
  void WhenLeft(std::function<void()> left) { when_left_ = std::move(left); }
  const std::function<void()>& when_left() const { return when_left_; }
  // A call to where it reads from, for as long as this object lives.
  class SourceCall {
   public:
    SourceCall(Operation& operation, std::string what) : operation_(operation) {
      MutexLock lock(operation_.mutex_);
      number_ = operation_.source_calls_begun_++;
      operation_.source_calls_[number_] = std::move(what);
    }
    ~SourceCall() {
      MutexLock lock(operation_.mutex_);
      operation_.source_calls_.erase(number_);
    }
    SourceCall(const SourceCall&) = delete;
    SourceCall& operator=(const SourceCall&) = delete;

   private:
    Operation& operation_;
    uint64_t number_ = 0;
  };
  // The one that began first, for people: "read '/mnt/…'"; empty when none is under way.
  std::string source_call() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return source_calls_.empty() ? "" : source_calls_.begin()->second;
  }
  // Held until the operation has really ended, however early it was answered.
  void Hold(std::shared_ptr<void> life) { life_ = std::move(life); }
  void EndLife() { life_.reset(); }
  const std::shared_ptr<TransferControl>& control() const { return control_; }
  Event Work() { return work_(*this); }
  Event Cancelled() const { return cancelled_(); }

  // Slot memory that the operation uses through revocable accesses only: once it is revoked, the
  // operation may be answered although it still hangs. False: it was revoked before; end.
  bool LendMemory(std::shared_ptr<RevocableMemory> memory) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    memory_ = std::move(memory);
    return !revoked_;
  }
  // From here on only its own end answers it: the kernel moves bytes to or from the slot, or the
  // slot's record is being published. False: it was revoked before; end.
  bool Pin() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    pinned_ = !revoked_;
    return pinned_;
  }
  // True if nothing of the operation touches a slot, now or later.
  bool Revoke() EXCLUDES(mutex_) {
    std::shared_ptr<RevocableMemory> memory;
    {
      MutexLock lock(mutex_);
      if (pinned_) {
        return false;
      }
      revoked_ = true;
      memory = memory_;
    }
    if (memory != nullptr) {
      memory->Revoke();
    }
    return true;
  }
  // `work` answers by itself, and so does `cancelled`: what they return is not posted.
  void AnswersItself() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    answered_ = true;
    answers_itself_ = true;
  }
  bool answers_itself() const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return answers_itself_;
  }
  // The first to ask may answer.
  bool TakeAnswer() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return !std::exchange(answered_, true);
  }

 private:
  const DrainId drain_;
  const std::shared_ptr<TransferControl> control_;
  const std::function<Event(Operation&)> work_;
  const std::function<Event()> cancelled_;
  std::function<Event(const std::string&)> when_stalled_;
  std::function<void()> when_left_;
  std::shared_ptr<void> life_;  // touched by whoever runs it, or took it out of the queue
  mutable Mutex mutex_;
  uint64_t source_calls_begun_ GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, std::string> source_calls_ GUARDED_BY(mutex_);
  std::shared_ptr<RevocableMemory> memory_ GUARDED_BY(mutex_);
  bool pinned_ GUARDED_BY(mutex_) = false;
  bool revoked_ GUARDED_BY(mutex_) = false;
  bool answered_ GUARDED_BY(mutex_) = false;
  bool answers_itself_ GUARDED_BY(mutex_) = false;
};

}  // namespace holdfast
