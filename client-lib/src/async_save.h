// What a SaveHandle and the background thread share: how far one save has come.
//
//   auto progress = std::make_shared<SaveProgress>(link, step);
//   background.Submit([progress] { …; progress->Copied(bytes); …; progress->Finished(status); });
//   return MakeSaveHandle(progress);
//
// Thread-safe. A progress that was made finishes exactly once.
#pragma once

#include <chrono>
#include <memory>

#include "base/mutex.h"
#include "client-lib/src/daemon_link.h"
#include "client-lib/src/fork_guard.h"
#include "holdfast/job.h"

namespace holdfast::client {

class SaveProgress {
 public:
  SaveProgress(std::shared_ptr<DaemonLink> link, uint64_t step)
      : link_(std::move(link)), step_(step) {}

  // By the one who saves.
  void Granted(uint64_t attempt);
  void Copied(uint64_t image_bytes);
  void Finished(const Status& status);

  // By those who wait.
  bool forked() const { return owner_.forked(); }
  void WaitUntilTensorsAreFree();
  Status WaitSnapshot(Milliseconds wait);
  Status Wait(Stage stage, Milliseconds wait);
  StageTimes times();

 private:
  Status WaitSealed(Deadline deadline);
  Status AskDaemon(Stage stage, Deadline deadline);
  Status NotYet(Stage stage) const;

  const ForkOwner owner_;
  const std::shared_ptr<DaemonLink> link_;
  const uint64_t step_;
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  Mutex mutex_;
  CondVar changed_;
  bool copied_ GUARDED_BY(mutex_) = false;
  bool finished_ GUARDED_BY(mutex_) = false;
  uint64_t attempt_ GUARDED_BY(mutex_) = 0;
  Status status_ GUARDED_BY(mutex_);
  StageTimes times_ GUARDED_BY(mutex_);
};

std::unique_ptr<SaveHandle> MakeSaveHandle(std::shared_ptr<SaveProgress> progress);

}  // namespace holdfast::client
