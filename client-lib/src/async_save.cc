#include "client-lib/src/async_save.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace holdfast::client {
namespace {

constexpr Milliseconds kAnswerTime{100};

}  // namespace

void SaveProgress::Granted(uint64_t attempt) {
  const MutexLock lock(mutex_);
  attempt_ = attempt;
}

void SaveProgress::Copied(uint64_t image_bytes) {
  const MutexLock lock(mutex_);
  copied_ = true;
  times_.snapshot = std::chrono::steady_clock::now() - began_;
  times_.bytes = image_bytes;
  changed_.NotifyAll();
}

void SaveProgress::Finished(const Status& status) {
  const MutexLock lock(mutex_);
  finished_ = true;
  status_ = status;
  if (status.ok()) {
    times_.sealed = std::chrono::steady_clock::now() - began_;
  }
  changed_.NotifyAll();
}

void SaveProgress::WaitUntilTensorsAreFree() {
  const MutexLock lock(mutex_);
  while (!copied_ && !finished_) {
    changed_.Wait(mutex_);  // a copy always ends
  }
}

Status SaveProgress::NotYet(Stage stage) const {
  return Status(
      Code::kDeadlineExceeded,
      absl::StrCat("step ", step_, " has not reached the stage '", StageName(stage), "' yet"));
}

Status SaveProgress::WaitSnapshot(Milliseconds wait) {
  const Deadline deadline = Deadline::In(wait);
  const MutexLock lock(mutex_);
  while (!copied_ && !finished_) {
    if (!changed_.WaitUntil(mutex_, deadline.at()) && !copied_ && !finished_) {
      return NotYet(Stage::kSnapshot);
    }
  }
  return copied_ ? Status() : status_;
}

Status SaveProgress::WaitSealed(Deadline deadline) {
  const MutexLock lock(mutex_);
  while (!finished_) {
    if (!changed_.WaitUntil(mutex_, deadline.at()) && !finished_) {
      return NotYet(Stage::kSealed);
    }
  }
  return status_;
}

Status SaveProgress::Wait(Stage stage, Milliseconds wait) {
  if (stage == Stage::kSnapshot) {
    return WaitSnapshot(wait);
  }
  const Deadline deadline = Deadline::In(wait);
  HF_TRY(WaitSealed(deadline));
  return stage == Stage::kSealed ? Status() : AskDaemon(stage, deadline);
}

Status SaveProgress::AskDaemon(Stage stage, Deadline deadline) {
  uint64_t attempt = 0;
  {
    const MutexLock lock(mutex_);
    attempt = attempt_;
  }
  wire::AwaitSave await;
  await.step = step_;
  await.stage = static_cast<wire::Stage>(static_cast<uint32_t>(stage) - 1);
  static_assert(
      static_cast<uint32_t>(Stage::kSealed) - 1 == static_cast<uint32_t>(wire::Stage::kSealed) &&
      static_cast<uint32_t>(Stage::kRemote) - 1 == static_cast<uint32_t>(wire::Stage::kRemote));
  while (true) {
    HF_TRY_ASSIGN(const std::shared_ptr<Connection> connection,
                  link_->Get(deadline, Patience::kUntilDeadline));
    if (link_->attempt() != attempt) {
      return Status(Code::kSuperseded,
                    absl::StrCat("step ", step_, " belongs to attempt ", attempt,
                                 "; this rank has gone on to attempt ", link_->attempt()));
    }
    await.deadline_ms = deadline.DaemonMillis();
    // The daemon answers by the caller's deadline; a moment more for the answer's way, so that even
    // a wait of nothing learns how things stand, and leaves no request behind.
    const Deadline exchange = Deadline::In(deadline.left() + kAnswerTime);
    const Status reached = connection->Call<wire::SaveProgress>(await, exchange).status();
    // A daemon that was restarted in between knows the step from its record.
    if (reached.code() != Code::kUnavailable || connection->alive() || deadline.passed()) {
      return reached.ok() ? reached
                          : WithContext(reached, absl::StrCat("step ", step_, " waits to be ",
                                                              StageName(stage)));
    }
  }
}

StageTimes SaveProgress::times() {
  const MutexLock lock(mutex_);
  return times_;
}

namespace {

class SharedSaveHandle : public SaveHandle {
 public:
  explicit SharedSaveHandle(std::shared_ptr<SaveProgress> progress)
      : progress_(std::move(progress)) {}

  ~SharedSaveHandle() override {
    if (progress_->forked()) {
      new std::shared_ptr<SaveProgress>(
          std::move(progress_));  // its locks may be held by threads that are not here
      return;
    }
    progress_->WaitUntilTensorsAreFree();
  }
  Status WaitSnapshot(Milliseconds deadline) override { return Wait(Stage::kSnapshot, deadline); }
  Status Wait(Stage stage, Milliseconds deadline) override {
    if (progress_->forked()) {
      return ForkedError();
    }
    return NoThrow([&]() -> Status { return progress_->Wait(stage, deadline); });
  }
  StageTimes times() const override {
    return progress_->forked() ? StageTimes() : progress_->times();
  }

 private:
  std::shared_ptr<SaveProgress> progress_;
};

}  // namespace

std::unique_ptr<SaveHandle> MakeSaveHandle(std::shared_ptr<SaveProgress> progress) {
  return std::make_unique<SharedSaveHandle>(std::move(progress));
}

}  // namespace holdfast::client
