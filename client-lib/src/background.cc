#include "client-lib/src/background.h"

#include <utility>

#include "client-lib/src/worker_pool.h"

namespace holdfast::client {

Background::~Background() {
  WaitIdle();
  {
    const MutexLock lock(mutex_);
    stop_ = true;
    changed_.NotifyAll();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

void Background::Submit(std::function<void()> work) {
  if (!thread_.joinable()) {
    thread_ = StartQuietThread([this] { Serve(); });
  }
  if (!thread_.joinable()) {
    work();
    return;
  }
  const MutexLock lock(mutex_);
  work_ = std::move(work);
  busy_ = true;
  changed_.NotifyAll();
}

void Background::WaitIdle() {
  const MutexLock lock(mutex_);
  while (busy_) {
    changed_.Wait(mutex_);
  }
}

bool Background::WaitIdleUntil(Deadline deadline) {
  const MutexLock lock(mutex_);
  while (busy_) {
    if (!changed_.WaitUntil(mutex_, deadline.at()) && busy_) {
      return false;
    }
  }
  return true;
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
    mutex_.Lock();
    busy_ = false;
    changed_.NotifyAll();
  }
}

}  // namespace holdfast::client
