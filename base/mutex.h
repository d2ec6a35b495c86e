// std::mutex and std::condition_variable with clang's thread-safety annotations: what a lock
// protects is said with GUARDED_BY and checked at compile time in the clang leg.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

// Abseil of this age has some of these names too, with the same meaning: let it come first.
#include "absl/base/thread_annotations.h"

#if defined(__clang__)
#define HF_TSA_(x) __attribute__((x))
#else
#define HF_TSA_(x)
#endif
#define CAPABILITY(x) HF_TSA_(capability(x))
#define SCOPED_CAPABILITY HF_TSA_(scoped_lockable)
#ifndef GUARDED_BY
#define GUARDED_BY(x) HF_TSA_(guarded_by(x))
#endif
#ifndef PT_GUARDED_BY
#define PT_GUARDED_BY(x) HF_TSA_(pt_guarded_by(x))
#endif
#define REQUIRES(...) HF_TSA_(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) HF_TSA_(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) HF_TSA_(acquire_capability(__VA_ARGS__))
#define RELEASE(...) HF_TSA_(release_capability(__VA_ARGS__))
#ifndef NO_THREAD_SAFETY_ANALYSIS
#define NO_THREAD_SAFETY_ANALYSIS HF_TSA_(no_thread_safety_analysis)
#endif

namespace holdfast {

class CAPABILITY("mutex") Mutex {
 public:
  void Lock() ACQUIRE() { mutex_.lock(); }
  void Unlock() RELEASE() { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.Lock(); }
  ~MutexLock() RELEASE() { mutex_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// while (!condition) cv.Wait(mutex);
class CondVar {
 public:
  void Wait(Mutex& mutex) REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    cv_.wait(lock);
    lock.release();
  }
  // False when `until` passed.
  bool WaitUntil(Mutex& mutex, std::chrono::steady_clock::time_point until) REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    const bool in_time = cv_.wait_until(lock, until) == std::cv_status::no_timeout;
    lock.release();
    return in_time;
  }
  void NotifyOne() { cv_.notify_one(); }
  void NotifyAll() { cv_.notify_all(); }

 private:
  std::condition_variable cv_;
};

}  // namespace holdfast
