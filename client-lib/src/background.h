// Whose turn it is with a job's slots and copy engine, or with those of a view, and one thread to
// finish a turn on.
//
//   HF_TRY_ASSIGN(Background::Turn turn, background.Take("step 5", deadline));  // no other has it
//   …                                                                  // done: the turn ends here
//   turn.HandTo([&] { Save(); });                                      // or: it ends with the work
//
// The thread is made at the first HandTo and parked in between; where the system gives none, HandTo
// does the work itself. Take may be called by any thread; the destructor waits for the turn that is
// under way and joins.
#pragma once

#include <functional>
#include <string>
#include <thread>

#include "base/mutex.h"
#include "client-lib/src/deadline.h"
#include "client-lib/src/errors.h"

namespace holdfast::client {

class Background {
 public:
  class Turn {
   public:
    Turn(Turn&& other) noexcept : background_(other.background_) { other.background_ = nullptr; }
    Turn& operator=(Turn&&) = delete;
    ~Turn();
    void HandTo(std::function<void()> work);

   private:
    friend class Background;
    explicit Turn(Background* background) : background_(background) {}
    Background* background_;
  };

  Background() = default;
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // kDeadlineExceeded: something was still under way. kRefused: it is this thread that has the turn
  // (a signal's handler that came in the middle of a call), and would wait for itself.
  // `what` is what others that wait are told.
  Result<Turn> Take(std::string what, Deadline deadline);
  // What has the turn now; "": nothing.
  std::string holder();

 private:
  void Finish();
  void Serve();

  std::thread thread_;
  Mutex mutex_;
  CondVar changed_;
  std::function<void()> work_ GUARDED_BY(mutex_);  // not begun yet
  bool taken_ GUARDED_BY(mutex_) = false;          // until the turn ends, or the work handed over
  std::thread::id taker_ GUARDED_BY(mutex_);       // none: the background thread has it
  std::string what_ GUARDED_BY(mutex_);
  bool stop_ GUARDED_BY(mutex_) = false;
};

}  // namespace holdfast::client
