// What a SaveHandle and the background thread share: how far one save has come.
//
//   auto progress = std::make_shared<SaveProgress>(link, step);
//   turn.HandTo([progress] { …; progress->Copied(bytes); …; progress->Finished(status); });
//   return MakeSaveHandle(progress, held_saves);
//
// Thread-safe. A progress that was made finishes exactly once.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>

#include "base/clock.h"
#include "base/mutex.h"
#include "client-lib/src/daemon_link.h"
#include "client-lib/src/device_fence.h"
#include "client-lib/src/fork_guard.h"
#include "client-lib/src/wait_notice.h"
#include "holdfast/job.h"

namespace holdfast::client {

class SaveProgress {
 public:
  // `interrupted`, `warn`: those of JobOptions.
  SaveProgress(std::shared_ptr<DaemonLink> link, uint64_t step,
               std::function<bool()> interrupted = {}, Warn warn = {})
      : link_(std::move(link)),
        step_(step),
        interrupted_(std::move(interrupted)),
        warn_(std::move(warn)) {}

  uint64_t step() const { return step_; }
  // Before anybody waits.
  void set_fence(std::shared_ptr<DeviceFence> fence) { fence_ = std::move(fence); }

  // By the one who saves.
  void Granted(uint64_t attempt);
  void FirstRead();
  void Copied(uint64_t image_bytes);
  void Finished(const Status& status);

  // By those who wait.
  bool forked() const { return owner_.forked(); }
  bool finished();
  // Nobody wants it any more: if it still waits for a slot, it does so no longer.
  void Cancel() { cancelled_ = true; }
  bool cancelled() const { return cancelled_.load(); }
  // Cancels it when the program is interrupted.
  void WaitUntilTensorsAreFree();
  Status WaitFirst(Milliseconds wait);
  Status WaitSnapshot(Milliseconds wait);
  Status Wait(Stage stage, Milliseconds wait);
  Status FenceStreams(const std::vector<DeviceStream>& streams, Milliseconds wait);
  StageTimes times();
  // Says what keeps a caller, now and then, once that has been a second in all. By a caller that
  // waits for that stage, since the save began.
  void Kept(Stage stage);

 private:
  // What is known here without asking the daemon, each with those before it.
  enum class Point { kFirstRead, kCopied, kFinished };
  class Caller;

  // False: not by then.
  bool Await(Point point, Deadline deadline);
  bool ReachedLocked(Point point) const REQUIRES(mutex_);
  void Say(std::chrono::nanoseconds kept, Stage stage);
  Waiting WaitingFor(Stage stage);
  bool Copying();
  Status WaitStage(Stage stage, Deadline deadline);
  Status AskDaemon(Stage stage, Deadline deadline);
  // The times of the stages before it, as far as the daemon knows them now.
  void AskForEarlier(Stage stage);
  void AskInPassing(Stage stage);
  uint64_t attempt();
  wire::AwaitSave AwaitOf(Stage stage, uint64_t deadline_ms) const;
  Status NotYet(Stage stage);
  void Told(Stage stage, int64_t unix_ms);

  const ForkOwner owner_;
  const std::shared_ptr<DaemonLink> link_;
  const uint64_t step_;
  const std::function<bool()> interrupted_;
  const Warn warn_;
  std::atomic<bool> cancelled_{false};
  std::shared_ptr<DeviceFence> fence_;  // null: nothing is on a device
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  const int64_t began_unix_ms_ = Clock::System()->UnixMillis();
  Mutex mutex_;
  CondVar changed_;
  bool first_read_ GUARDED_BY(mutex_) = false;
  bool copied_ GUARDED_BY(mutex_) = false;
  bool finished_ GUARDED_BY(mutex_) = false;
  uint64_t attempt_ GUARDED_BY(mutex_) = 0;
  Status status_ GUARDED_BY(mutex_);
  StageTimes times_ GUARDED_BY(mutex_);
  WaitNotice notice_ GUARDED_BY(mutex_);
  std::chrono::nanoseconds kept_ GUARDED_BY(mutex_){0};  // by waits that have ended
};

// What a handle asks of the job about a save that is held. Thread-safe.
class HeldSaves {
 public:
  virtual ~HeldSaves() = default;
  // Returns when sealing has begun; the progress tells the rest.
  virtual Status SealHeld(SaveProgress& progress, Deadline deadline) = 0;
  virtual void DiscardHeld(SaveProgress& progress) = 0;
  virtual Result<std::shared_ptr<const StagedTensors>> StagedOf(SaveProgress& progress) = 0;
};

// `held`: null unless the save is to be held.
std::unique_ptr<SaveHandle> MakeSaveHandle(std::shared_ptr<SaveProgress> progress,
                                           std::weak_ptr<HeldSaves> held);

}  // namespace holdfast::client
