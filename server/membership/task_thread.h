// A thread that runs what it is given, one after another, in the order given; and one timer.
//
//   TaskThread thread([&] { Tick(); });
//   thread.Post([&] { …; thread.WakeAt(at); });
//
// Post from any thread; WakeAt from its own. The destructor ends it after the task that runs; what
// still waits is dropped.
#pragma once

#include <deque>
#include <functional>
#include <thread>

#include "base/clock.h"
#include "base/mutex.h"

namespace holdfast {

class TaskThread {
 public:
  explicit TaskThread(std::function<void()> on_timer = nullptr);
  ~TaskThread() { Stop(); }
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  void Post(std::function<void()> task) EXCLUDES(mutex_);
  // The newest call wins; the timer then fires again and again until it is set anew.
  void WakeAt(MonotonicTime at) EXCLUDES(mutex_);
  void Stop() EXCLUDES(mutex_);

 private:
  void Run() EXCLUDES(mutex_);

  const std::function<void()> on_timer_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> tasks_ GUARDED_BY(mutex_);
  bool stopping_ GUARDED_BY(mutex_) = false;
  MonotonicTime wake_at_ GUARDED_BY(mutex_){INT64_MAX};
  std::thread thread_;
};

}  // namespace holdfast
