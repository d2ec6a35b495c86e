// Waiting as Python waits: without the GIL, and so that Ctrl-C works.
#pragma once

#include <Python.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <utility>

#include "holdfast/job.h"

namespace holdfast::python {

// Seconds, as Python has them; what is not a number or below 0 is 0, too much is a year.
inline Milliseconds ToMilliseconds(double seconds) {
  constexpr double kLongest = 365 * 24 * 3600.0;
  return Milliseconds(std::isnan(seconds)
                          ? 0
                          : static_cast<int64_t>(std::clamp(seconds, 0.0, kLongest) * 1000 + 0.5));
}

// Coming back to Python. As the interpreter ends, Python makes a thread that wants the GIL exit in
// the middle of its C++ frames, which is std::terminate. So those that come after the end has begun
// (EndOfInterpreter, at exit, before Python's own end) are parked instead; those that had come are
// let in first.
void EnterPython(PyThreadState* state);
void NoteMainThread(unsigned long ident);  // as Python's threading has it
bool IsMainThread();
void EndOfInterpreter();

// Lets the GIL go.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()), outer_(std::exchange(current_, this)) {}
  ~GilReleased() {
    current_ = outer_;
    EnterPython(state_);
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

  // Within one of them: has the GIL again, for a moment.
  class Held {
   public:
    explicit Held(const GilReleased& released) : released_(released) {
      EnterPython(released.state_);
      current_ = nullptr;
    }
    ~Held() {
      current_ = &released_;
      static_cast<void>(PyEval_SaveThread());  // this thread's state, which it has already
    }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

   private:
    const GilReleased& released_;
  };

  // The one that this thread is in; null: it is none of Python's, or has the GIL.
  static const GilReleased* current() { return current_; }

 private:
  inline static thread_local const GilReleased* current_ = nullptr;

  PyThreadState* const state_;
  const GilReleased* const outer_;
};

// A warning of the logger `holdfast`. Without the GIL, by a thread that has let it go
// (GilReleased); by any other one nothing is said. A KeyboardInterrupt in it is pending then, as
// after SignalRaised.
void WarnInPython(const std::string& line);

// Runs Python's signal handlers, if this is the main thread. True: one has raised, and what it
// raised is pending. Takes the GIL.
bool SignalRaised();

// What is pending at the end of a destructor, where nothing can be raised, is raised as soon as
// Python next looks for signals. With the GIL.
void RaiseLater();

// The end of what may wait for the daemon as it ends. With the GIL.
template <typename Pointer>
void LetGo(Pointer& pointer) {
  {
    const GilReleased released;
    pointer.reset();
  }
  RaiseLater();
}

// Calls `wait` with short times until it says something else than kDeadlineExceeded, the time is
// over, or a signal's handler has raised. Called and returns with the GIL.
template <typename Wait>
Status WaitInSlices(double timeout, const Wait& wait) {
  constexpr Milliseconds kSlice{50};
  using Clock = std::chrono::steady_clock;
  const GilReleased released;
  const Clock::time_point until = Clock::now() + ToMilliseconds(timeout);
  while (true) {
    const auto left = std::chrono::ceil<Milliseconds>(until - Clock::now());
    const Status status = wait(std::clamp(left, Milliseconds(0), kSlice));
    if (status.code() != Code::kDeadlineExceeded || Clock::now() >= until || SignalRaised()) {
      return status;
    }
  }
}

}  // namespace holdfast::python
