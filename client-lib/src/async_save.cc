#include "client-lib/src/async_save.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace holdfast::client {
namespace {

constexpr Milliseconds kAnswerTime{100};
// Its exchanges have deadlines.
constexpr Milliseconds kCopyAlwaysEnds = std::chrono::hours(24 * 365);

}  // namespace

void SaveProgress::Granted(uint64_t attempt) {
  const MutexLock lock(mutex_);
  attempt_ = attempt;
}

void SaveProgress::FirstRead() {
  const MutexLock lock(mutex_);
  first_read_ = true;
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

// A wait of one caller. A stage is often waited for in many short calls, so that the program can be
// asked in between: what a line is about is all of them.
class SaveProgress::Caller {
 public:
  Caller(SaveProgress& progress, Stage stage, std::function<bool()> interrupted = {})
      : progress_(progress), stage_(stage), interrupt_([this, asks = std::move(interrupted)] {
          Say();
          return asks && asks();
        }) {}
  ~Caller() {
    const MutexLock lock(progress_.mutex_);
    progress_.kept_ += Deadline::Clock::now() - began_;
  }
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

  Deadline In(Milliseconds wait) { return Deadline::In(wait).Or(interrupt_); }
  // As it ends in vain: the next one may be as short.
  Status Passed(const Status& status) {
    if (status.code() == Code::kDeadlineExceeded || status.code() == Code::kUnavailable) {
      Say();
    }
    return status;
  }

 private:
  void Say() { progress_.Say(Deadline::Clock::now() - began_, stage_); }

  SaveProgress& progress_;
  const Stage stage_;
  const Deadline::Clock::time_point began_ = Deadline::Clock::now();
  Interrupt interrupt_;
};

void SaveProgress::Kept(Stage stage) {
  Say(Deadline::Clock::now() - began_, stage);
}

void SaveProgress::Say(std::chrono::nanoseconds kept, Stage stage) {
  WaitNotice::Next next = WaitNotice::Next::kNothing;
  {
    const MutexLock lock(mutex_);
    kept += kept_;
    next = notice_.Look(kept);
  }
  if (next != WaitNotice::Next::kNothing) {
    Tell(next, kept, *link_, warn_, WaitingFor(stage));
  }
}

Waiting SaveProgress::WaitingFor(Stage stage) {
  const std::string see = absl::StrCat(": see `ckptctl status ", link_->identity().job, "`");
  const MutexLock lock(mutex_);
  std::string why;
  if (finished_ && stage == Stage::kCommitted) {
    why = absl::StrCat("other ranks have not sealed it yet", see);
  } else if (finished_) {
    why = absl::StrCat("it has not come to '", StageName(stage), "' yet", see);
  } else if (copied_) {
    why = absl::StrCat("ckptd has not sealed it yet", see);
  } else if (attempt_ != 0) {
    why = "it is being copied";
  } else {
    why =
        "ckptd has no free slot yet. `ckptctl status` shows your jobs. If they do not fill the "
        "memory, ask the operator, who sees all jobs there. To wait less: timeout= "
        "(SaveOptions::wait_for_room)";
  }
  return {absl::StrCat("the save of step ", step_), std::move(why)};
}

bool SaveProgress::Copying() {
  const MutexLock lock(mutex_);
  return attempt_ != 0 && !copied_ && !finished_;
}

bool SaveProgress::ReachedLocked(Point point) const {
  return finished_ || (point != Point::kFinished && copied_) ||
         (point == Point::kFirstRead && first_read_);
}

bool SaveProgress::Await(Point point, Deadline deadline) {
  while (true) {
    {
      const MutexLock lock(mutex_);
      while (!ReachedLocked(point)) {
        if (!changed_.WaitUntil(mutex_, deadline.NextLook())) {
          break;
        }
      }
      if (ReachedLocked(point)) {
        return true;
      }
    }
    deadline.Look();
    if (deadline.passed()) {
      return false;
    }
  }
}

void SaveProgress::WaitUntilTensorsAreFree() {
  Caller caller(*this, Stage::kSnapshot, interrupted_);
  if (!Await(Point::kCopied, caller.In(kCopyAlwaysEnds))) {
    Cancel();
    static_cast<void>(Await(Point::kCopied, Deadline::Never()));
  }
}

Status SaveProgress::WaitFirst(Milliseconds wait) {
  Caller caller(*this, Stage::kSnapshot);
  const Deadline deadline = caller.In(wait);
  if (!Await(Point::kFirstRead, deadline)) {
    return caller.Passed(NotYet(Stage::kSnapshot));
  }
  if (fence_ == nullptr || fence_->FenceFirst().ok()) {
    return Status();
  }
  // There is no stream that could wait: so the caller does.
  const Status copied = WaitStage(Stage::kSnapshot, deadline);
  return finished() ? Status() : caller.Passed(copied);
}

Status SaveProgress::NotYet(Stage stage) {
  const std::string holdup = link_->Holdup();
  const bool copying = holdup.empty() && Copying();
  return Status(Code::kDeadlineExceeded,
                absl::StrCat("step ", step_, " has not reached the stage '", StageName(stage),
                             "' yet: ", holdup.empty() ? WaitingFor(stage).why : holdup),
                copying ? Reason::kCopying : Reason::kNone);
}

Status SaveProgress::WaitSnapshot(Milliseconds wait) {
  return Wait(Stage::kSnapshot, wait);
}

Status SaveProgress::Wait(Stage stage, Milliseconds wait) {
  Caller caller(*this, stage);
  return caller.Passed(WaitStage(stage, caller.In(wait)));
}

Status SaveProgress::WaitStage(Stage stage, Deadline deadline) {
  if (!Await(stage == Stage::kSnapshot ? Point::kCopied : Point::kFinished, deadline)) {
    return NotYet(stage == Stage::kSnapshot ? stage : Stage::kSealed);
  }
  {
    const MutexLock lock(mutex_);
    if (stage == Stage::kSnapshot) {
      return copied_ ? Status() : status_;
    }
    HF_TRY(status_);
  }
  if (stage == Stage::kSealed) {
    return Status();
  }
  HF_TRY(AskDaemon(stage, deadline));
  AskForEarlier(stage);
  return Status();
}

void SaveProgress::AskForEarlier(Stage stage) {
  const StageTimes known = times();
  if (stage > Stage::kCommitted && known.committed.count() < 0) {
    AskInPassing(Stage::kCommitted);
  }
  // It may not be there: the policy may send the step to remote alone.
  if (stage == Stage::kRemote && known.nvme.count() < 0) {
    AskInPassing(Stage::kNvme);
  }
}

// Nobody needs the answer: a daemon that is slow with it does not hang for that.
void SaveProgress::AskInPassing(Stage stage) {
  const Deadline moment = Deadline::In(kAnswerTime);
  const Result<std::shared_ptr<Connection>> connection = link_->Get(moment, Patience::kOnce);
  if (!connection.ok() || link_->attempt() != attempt()) {
    return;
  }
  const Result<Answer<wire::SaveProgress>> answer =
      (*connection)->CallInPassing<wire::SaveProgress>(AwaitOf(stage, 1), moment);
  if (answer.ok()) {
    Told(stage, answer->message.unix_ms);
  }
}

Status SaveProgress::FenceStreams(const std::vector<DeviceStream>& streams, Milliseconds wait) {
  if (fence_ == nullptr) {
    return Status();
  }
  return WithContext(fence_->Fence(streams, Deadline::In(wait)),
                     absl::StrCat("fence the streams behind the copy of step ", step_));
}

uint64_t SaveProgress::attempt() {
  const MutexLock lock(mutex_);
  return attempt_;
}

wire::AwaitSave SaveProgress::AwaitOf(Stage stage, uint64_t deadline_ms) const {
  static_assert(
      static_cast<uint32_t>(Stage::kSealed) - 1 == static_cast<uint32_t>(wire::Stage::kSealed) &&
      static_cast<uint32_t>(Stage::kPeer) - 1 == static_cast<uint32_t>(wire::Stage::kPeer));
  wire::AwaitSave await;
  await.step = step_;
  await.stage = static_cast<wire::Stage>(static_cast<uint32_t>(stage) - 1);
  await.deadline_ms = deadline_ms;
  return await;
}

Status SaveProgress::AskDaemon(Stage stage, Deadline deadline) {
  const uint64_t own = attempt();
  while (true) {
    HF_TRY_ASSIGN(const std::shared_ptr<Connection> connection,
                  link_->Get(deadline, Patience::kUntilDeadline));
    if (link_->attempt() != own) {
      return Status(Code::kSuperseded,
                    absl::StrCat("step ", step_, " belongs to attempt ", own,
                                 "; this rank has gone on to attempt ", link_->attempt()));
    }
    // The daemon answers by the caller's deadline; a moment more for the answer's way, so that even
    // a wait of nothing learns how things stand, and leaves no request behind.
    Deadline exchange = Deadline::In(deadline.left() + kAnswerTime);
    if (Interrupt* const caller = deadline.interrupt()) {
      exchange = exchange.Or(*caller);
    }
    // A call that does not wait must not count a slow daemon as one that hangs.
    const bool in_passing = deadline.passed();
    const wire::AwaitSave await = AwaitOf(stage, deadline.DaemonMillis());
    const Result<Answer<wire::SaveProgress>> answer =
        in_passing ? connection->CallInPassing<wire::SaveProgress>(await, exchange)
                   : connection->Call<wire::SaveProgress>(await, exchange);
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
  if (unix_ms == 0) {
    return;  // when that was nobody knows any more
  }
  const std::chrono::nanoseconds after = Milliseconds(unix_ms - began_unix_ms_);
  const MutexLock lock(mutex_);
  // By another clock, and coarser: still not before what it includes.
  (stage == Stage::kCommitted ? times_.committed
   : stage == Stage::kNvme    ? times_.nvme
   : stage == Stage::kPeer    ? times_.peer
                              : times_.remote) = std::max(times_.sealed, after);
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
    if (held_.expired()) {
      progress_->WaitUntilTensorsAreFree();
    } else {
      Discard();
    }
  }
  Status WaitFirst(Milliseconds deadline) override {
    if (progress_->forked()) {
      return ForkedError();
    }
    return NoThrow([&]() -> Status { return progress_->WaitFirst(deadline); });
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
      if (!sealing_.exchange(true)) {
        if (Status begun = BeginSealing(until); !begun.ok()) {
          sealing_ = false;
          return begun;
        }
      }
      Status sealed = progress_->Wait(Stage::kSealed, until.left());
      if (sealed.code() != Code::kDeadlineExceeded) {
        sealing_ = false;
      }
      return sealed;
    });
  }
  void Discard() override {
    if (progress_->forked()) {
      return;
    }
    static_cast<void>(NoThrow([&]() -> Status {
      if (sealing_) {
        return Status();  // it has been let go, and goes on
      }
      HF_TRY_ASSIGN(const std::shared_ptr<HeldSaves> held, Held());
      progress_->Cancel();
      progress_->WaitUntilTensorsAreFree();
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
  Status BeginSealing(Deadline deadline) {
    HF_TRY_ASSIGN(const std::shared_ptr<HeldSaves> held, Held());
    return held->SealHeld(*progress_, deadline);
  }
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
  std::atomic<bool> sealing_{false};  // since a Seal that has not told how it ended
};

}  // namespace

std::unique_ptr<SaveHandle> MakeSaveHandle(std::shared_ptr<SaveProgress> progress,
                                           std::weak_ptr<HeldSaves> held) {
  return std::make_unique<SharedSaveHandle>(std::move(progress), std::move(held));
}

}  // namespace holdfast::client
