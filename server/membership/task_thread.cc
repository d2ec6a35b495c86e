#include "server/membership/task_thread.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace holdfast {

TaskThread::TaskThread(std::function<void()> on_timer)
    : on_timer_(std::move(on_timer)), thread_([this] { Run(); }) {}

void TaskThread::Post(std::function<void()> task) {
  MutexLock lock(mutex_);
  tasks_.push_back(std::move(task));
  changed_.NotifyOne();
}

void TaskThread::WakeAt(MonotonicTime at) {
  MutexLock lock(mutex_);
  wake_at_ = at;
}

void TaskThread::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyOne();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

void TaskThread::Run() {
  constexpr Duration kSleepMax = std::chrono::seconds(1);
  while (true) {
    std::function<void()> task;
    {
      MutexLock lock(mutex_);
      while (!stopping_ && tasks_.empty()) {
        const Duration left = wake_at_ - Clock::System()->Now();
        if (left <= Duration(0)) {
          break;
        }
        changed_.WaitUntil(mutex_, std::chrono::steady_clock::now() + std::min(left, kSleepMax));
      }
      if (stopping_) {
        return;
      }
      if (tasks_.empty()) {
        task = on_timer_;
      } else {
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
    }
    task();
  }
}

}  // namespace holdfast
