// The daemon's worker threads. Tasks with the same key run one after another, in the order
// submitted; tasks with different keys in parallel. Each task names the lane (a small group of
// threads) that runs it, so that a long populate never stands in the way of slot work. None
// of them waits for a disk.
//
//   executor.Submit(SlotKey(slot), Lane::kSlots, [this] { …; reactor.Post(…); });
//
// Owner: the Daemon. Submit may be called from any thread, tasks included.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"

namespace holdfast {

class SerialExecutor {
 public:
  enum class Lane : uint8_t {
    kSlots,     // small files on tmpfs: two threads
    kAllocate,  // reserving and freeing slots: seconds for large ones
    kState,     // job states, small files on tmpfs
    kPopulate,  // long, low priority
    kRegister,  // of slots with the fabric, in parallel: seconds for large ones
  };
  using Key = uint64_t;
  using Task = std::function<void()>;

  SerialExecutor();
  ~SerialExecutor();  // runs what was submitted, then ends
  SerialExecutor(const SerialExecutor&) = delete;
  SerialExecutor& operator=(const SerialExecutor&) = delete;

  void Submit(Key key, Lane lane, Task task) EXCLUDES(mutex_);
  // Waits until nothing is queued or running; false at the deadline.
  bool WaitIdle(Duration at_most) EXCLUDES(mutex_);

 private:
  static constexpr size_t kLanes = 5;
  struct Item {
    Lane lane;
    Task task;
  };

  void Work(Lane lane, int nice) EXCLUDES(mutex_);
  void MakeReady(Key key) REQUIRES(mutex_);

  Mutex mutex_;
  std::array<CondVar, kLanes> ready_cv_;
  CondVar idle_cv_;
  // A key is in here while it has tasks; its front is ready or running.
  std::unordered_map<Key, std::deque<Item>> keys_ GUARDED_BY(mutex_);
  std::array<std::deque<Key>, kLanes> ready_ GUARDED_BY(mutex_);
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace holdfast
