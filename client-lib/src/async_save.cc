#include "client-lib/src/async_save.h"

#include <algorithm>
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

void SaveProgress::FirstCopied() {
  const MutexLock lock(mutex_);
  first_copied_ = true;
  changed_.NotifyAll();
}

void SaveProgress::Copied(uint64_t image_bytes) {
  const MutexLock lock(mutex_);
  copied_ = true;
  times_.snapshot = std::chrono::steady_clock::now() - began_;
  times_.bytes = image_bytes;
  changed_.NotifyAll();
}

void SaveProgress::Finished(const Status& status) {
  if (fence_ != nullptr) {
    fence_->Over();
  }
  const MutexLock lock(mutex_);
  finished_ = true;
  status_ = status;
  if (status.ok()) {
    times_.sealed = std::chrono::steady_clock::now() - began_;
  }
  changed_.NotifyAll();
}

bool SaveProgress::finished() {
  const MutexLock lock(mutex_);
  return finished_;
}

void SaveProgress::WaitUntilTensorsAreFree() {
  const MutexLock lock(mutex_);
  while (!copied_ && !finished_) {
    changed_.Wait(mutex_);  // a copy always ends
  }
}

Status SaveProgress::WaitFirst(Milliseconds wait) {
  const Deadline deadline = Deadline::In(wait);
  const MutexLock lock(mutex_);
  while (!first_copied_ && !copied_ && !finished_) {
    if (!changed_.WaitUntil(mutex_, deadline.NextLook()) && deadline.passed()) {
      return NotYet(Stage::kSnapshot);
    }
  }
  return Status();
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
    if (!changed_.WaitUntil(mutex_, deadline.NextLook()) && !copied_ && !finished_) {
      return NotYet(Stage::kSnapshot);
    }
  }
  return copied_ ? Status() : status_;
}

Status SaveProgress::WaitSealed(Deadline deadline) {
  const MutexLock lock(mutex_);
  while (!finished_) {
    if (!changed_.WaitUntil(mutex_, deadline.NextLook()) && !finished_) {
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

Status SaveProgress::FenceStreams(const std::vector<DeviceStream>& streams, Milliseconds wait) {
  if (fence_ == nullptr) {
    return Status();
  }
  return WithContext(fence_->Fence(streams, Deadline::In(wait)),
                     absl::StrCat("fence the streams behind the copy of step ", step_));
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
    const Result<Answer<wire::SaveProgress>> answer =
        connection->Call<wire::SaveProgress>(await, exchange);
    const Status reached = answer.status();
    if (answer.ok()) {
      Told(stage, answer->message.unix_ms);
    }
    // A daemon that was restarted in between knows the step from its record.
    if (reached.code() != Code::kUnavailable || connection->alive() || deadline.passed()) {
      return reached.ok() ? reached
                          : WithContext(reached, absl::StrCat("step ", step_, " waits to be ",
                                                              StageName(stage)));
    }
  }
}

void SaveProgress::Told(Stage stage, int64_t unix_ms) {
  const std::chrono::nanoseconds after =
      std::max(Milliseconds(0), Milliseconds(unix_ms - began_unix_ms_));
  const MutexLock lock(mutex_);
  (stage == Stage::kCommitted ? times_.committed
   : stage == Stage::kNvme    ? times_.nvme
                              : times_.remote) = after;
}

StageTimes SaveProgress::times() {
  const MutexLock lock(mutex_);
  return times_;
}

namespace {

class SharedSaveHandle : public SaveHandle {
 public:
  SharedSaveHandle(std::shared_ptr<SaveProgress> progress, std::weak_ptr<HeldSaves> held)
      : progress_(std::move(progress)), held_(std::move(held)) {}

  ~SharedSaveHandle() override {
    if (progress_->forked()) {
      new std::shared_ptr<SaveProgress>(
          std::move(progress_));  // its locks may be held by threads that are not here
      return;
    }
    progress_->WaitUntilTensorsAreFree();
    static_cast<void>(NoThrow([this]() -> Status {
      if (const std::shared_ptr<HeldSaves> held = held_.lock()) {
        held->DiscardHeld(*progress_);
      }
      return Status();
    }));
  }
  Status WaitFirst(Milliseconds deadline) override {
    return progress_->forked() ? ForkedError() : progress_->WaitFirst(deadline);
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
  Status FenceStreams(const std::vector<DeviceStream>& streams, Milliseconds deadline) override {
    if (progress_->forked()) {
      return ForkedError();
    }
    return NoThrow([&]() -> Status { return progress_->FenceStreams(streams, deadline); });
  }

  Status Seal(Milliseconds deadline) override {
    if (progress_->forked()) {
      return ForkedError();
    }
    return NoThrow([&]() -> Status {
      const Deadline until = Deadline::In(deadline);
      HF_TRY(progress_->Wait(Stage::kSnapshot, deadline));
      HF_TRY_ASSIGN(const std::shared_ptr<HeldSaves> held, Held());
      return held->SealHeld(*progress_, until);
    });
  }
  void Discard() override {
    if (progress_->forked()) {
      return;
    }
    static_cast<void>(NoThrow([&]() -> Status {
      progress_->WaitUntilTensorsAreFree();
      HF_TRY_ASSIGN(const std::shared_ptr<HeldSaves> held, Held());
      held->DiscardHeld(*progress_);
      return Status();
    }));
  }
  Result<std::shared_ptr<const StagedTensors>> Staged() override {
    if (progress_->forked()) {
      return ForkedError();
    }
    return NoThrow([&]() -> Result<std::shared_ptr<const StagedTensors>> {
      HF_TRY(progress_->Wait(Stage::kSnapshot, Milliseconds(0)));
      HF_TRY_ASSIGN(const std::shared_ptr<HeldSaves> held, Held());
      return held->StagedOf(*progress_);
    });
  }

 private:
  Result<std::shared_ptr<HeldSaves>> Held() const {
    if (std::shared_ptr<HeldSaves> held = held_.lock()) {
      return held;
    }
    return Status(Code::kRefused,
                  absl::StrCat("step ", progress_->step(),
                               " is not a save that was held (SaveOptions::hold) of a job that is "
                               "still open"));
  }

  std::shared_ptr<SaveProgress> progress_;
  const std::weak_ptr<HeldSaves> held_;
};

}  // namespace

std::unique_ptr<SaveHandle> MakeSaveHandle(std::shared_ptr<SaveProgress> progress,
                                           std::weak_ptr<HeldSaves> held) {
  return std::make_unique<SharedSaveHandle>(std::move(progress), std::move(held));
}

}  // namespace holdfast::client
