#include "client-lib/src/background.h"

#include <utility>

#include "client-lib/src/worker_pool.h"

namespace holdfast::client {

Background::Turn::~Turn() {
  if (background_ != nullptr) {
    background_->Finish();
  }
}

void Background::Turn::HandTo(std::function<void()> work) {
  Background& background = *background_;
  if (!background.thread_.joinable()) {
    background.thread_ = StartQuietThread([&background] { background.Serve(); });
  }
  if (!background.thread_.joinable()) {
    work();
    return;  // the turn ends with this object
  }
  background_ = nullptr;
  const MutexLock lock(background.mutex_);
  background.work_ = std::move(work);
  background.taker_ = std::thread::id();
  background.changed_.NotifyAll();
}

Background::~Background() {
  {
    const MutexLock lock(mutex_);
    while (taken_) {
      changed_.Wait(mutex_);
    }
    stop_ = true;
    changed_.NotifyAll();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

Result<Background::Turn> Background::Take(std::string what, Deadline deadline) {
  while (true) {
    {
      const MutexLock lock(mutex_);
      while (taken_ && taker_ != std::this_thread::get_id()) {
        if (!changed_.WaitUntil(mutex_, deadline.NextLook())) {
          break;
        }
      }
      if (!taken_) {
        taken_ = true;
        what_ = std::move(what);
        taker_ = std::this_thread::get_id();
        return Turn(this);
      }
      if (taker_ == std::this_thread::get_id()) {
        return Status(
            Code::kRefused,
            "called in the middle of another call on the same object and thread, as from a "
            "signal's handler: set a flag there, and call when that call has returned");
      }
    }
    deadline.Look();
    if (deadline.passed()) {
      return Status(Code::kDeadlineExceeded, "an earlier call was still under way");
    }
  }
}

std::string Background::holder() {
  const MutexLock lock(mutex_);
  return taken_ ? what_ : "";
}

void Background::Finish() {
  const MutexLock lock(mutex_);
  taken_ = false;
  taker_ = std::thread::id();
  changed_.NotifyAll();
}

void Background::Serve() {
  const MutexLock lock(mutex_);
  while (true) {
    while (!work_ && !stop_) {
      changed_.Wait(mutex_);
    }
    if (stop_) {
      return;
    }
    std::function<void()> work = std::exchange(work_, nullptr);
    mutex_.Unlock();
    work();
    work = nullptr;  // and what it holds
    Finish();
    mutex_.Lock();
  }
}

}  // namespace holdfast::client
