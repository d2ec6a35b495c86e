#include "server/runtime/serial_executor.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <utility>

namespace holdfast {
namespace {

constexpr int kSlotThreads = 2;
constexpr int kPopulateNice = 10;
constexpr int kRegisterThreads = 2;

}  // namespace

SerialExecutor::SerialExecutor() {
  for (int i = 0; i < kSlotThreads; ++i) {
    threads_.emplace_back([this] { Work(Lane::kSlots, 0); });
  }
  threads_.emplace_back([this] { Work(Lane::kAllocate, 0); });
  threads_.emplace_back([this] { Work(Lane::kState, 0); });
  threads_.emplace_back([this] { Work(Lane::kPopulate, kPopulateNice); });
  for (int i = 0; i < kRegisterThreads; ++i) {
    threads_.emplace_back([this] { Work(Lane::kRegister, 0); });
  }
}

SerialExecutor::~SerialExecutor() {
  {
    MutexLock lock(mutex_);
    while (!keys_.empty()) {
      idle_cv_.Wait(mutex_);
    }
    stopping_ = true;
  }
  for (CondVar& cv : ready_cv_) {
    cv.NotifyAll();
  }
  for (std::thread& thread : threads_) {
    thread.join();
  }
}

void SerialExecutor::MakeReady(Key key) {
  const size_t lane = static_cast<size_t>(keys_[key].front().lane);
  ready_[lane].push_back(key);
  ready_cv_[lane].NotifyOne();
}

void SerialExecutor::Submit(Key key, Lane lane, Task task) {
  MutexLock lock(mutex_);
  std::deque<Item>& items = keys_[key];
  items.push_back(Item{lane, std::move(task)});
  if (items.size() == 1) {
    MakeReady(key);
  }
}

bool SerialExecutor::WaitIdle(Duration at_most) {
  const auto until = std::chrono::steady_clock::now() + at_most;
  MutexLock lock(mutex_);
  while (!keys_.empty()) {
    if (!idle_cv_.WaitUntil(mutex_, until)) {
      return keys_.empty();
    }
  }
  return true;
}

void SerialExecutor::Work(Lane lane, int nice) {
  if (nice != 0) {
    // Of this thread alone: Linux keeps niceness per thread. Without it the work is only less
    // polite.
    ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), nice);
  }
  const size_t index = static_cast<size_t>(lane);
  for (;;) {
    Key key = 0;
    Task task;
    {
      MutexLock lock(mutex_);
      while (ready_[index].empty() && !stopping_) {
        ready_cv_[index].Wait(mutex_);
      }
      if (ready_[index].empty()) {
        return;
      }
      key = ready_[index].front();
      ready_[index].pop_front();
      task = std::move(keys_[key].front().task);
    }
    task();
    task = nullptr;  // what it holds goes before the key counts as done
    MutexLock lock(mutex_);
    const auto found = keys_.find(key);
    found->second.pop_front();
    if (found->second.empty()) {
      keys_.erase(found);
      if (keys_.empty()) {
        idle_cv_.NotifyAll();
      }
    } else {
      MakeReady(key);
    }
  }
}

}  // namespace holdfast
