// A few parked threads that help the caller with one piece of work at a time. Threads are made at
// the first Run that wants them; where the system gives none, the caller works alone.
//
//   WorkerPool pool(4);                       // the caller and three more
//   pool.Run(4, [&] { while (TakeTask()) … });  // returns when all have returned
//
// One Run at a time; the destructor joins. All signals but those of faults are blocked in the
// threads: they belong to the training program.
#pragma once

#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "base/mutex.h"

namespace holdfast::client {

// Starts a thread with signals blocked; not joinable if there is none to be had.
std::thread StartQuietThread(std::function<void()> body);

// Up to 4, as the CPUs allowed to this process permit; or what the user wants.
uint32_t CopyThreads(uint32_t wanted);

class WorkerPool {
 public:
  explicit WorkerPool(uint32_t threads) : threads_max_(threads == 0 ? 1 : threads) {}
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  uint32_t threads_max() const { return threads_max_; }
  void Run(uint32_t threads, const std::function<void()>& work);

 private:
  void Serve();

  const uint32_t threads_max_;
  std::vector<std::thread> helpers_;  // touched by the caller of Run alone
  Mutex mutex_;
  CondVar changed_;
  const std::function<void()>* work_ GUARDED_BY(mutex_) = nullptr;
  uint32_t wanted_ GUARDED_BY(mutex_) = 0;   // helpers that may still take the work
  uint32_t working_ GUARDED_BY(mutex_) = 0;  // helpers that have it
  bool stop_ GUARDED_BY(mutex_) = false;
};

}  // namespace holdfast::client
