// One thread that does one piece of work at a time, made at the first Submit and parked in between.
// Where the system gives no thread, Submit does the work itself.
//
//   Background background;
//   background.WaitIdle();
//   background.Submit([&] { Save(); });
//
// Submit and WaitIdle from one thread at a time; the destructor waits for the work and joins.
#pragma once

#include <functional>
#include <thread>

#include "base/mutex.h"
#include "client-lib/src/deadline.h"

namespace holdfast::client {

class Background {
 public:
  Background() = default;
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  void Submit(std::function<void()> work);  // idle before
  void WaitIdle();
  bool WaitIdleUntil(Deadline deadline);

 private:
  void Serve();

  std::thread thread_;
  Mutex mutex_;
  CondVar changed_;
  std::function<void()> work_ GUARDED_BY(mutex_);  // not begun yet
  bool busy_ GUARDED_BY(mutex_) = false;           // from Submit until it is done
  bool stop_ GUARDED_BY(mutex_) = false;
};

}  // namespace holdfast::client
