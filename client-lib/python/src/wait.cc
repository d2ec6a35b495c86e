#include "client-lib/python/src/wait.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <utility>

#include "client-lib/python/src/object.h"

namespace holdfast::python {
namespace {

constexpr std::chrono::seconds kLettingIn{5};

std::atomic<unsigned long> main_thread{0};
std::atomic<bool> ending{false};
std::atomic<int> entering{0};

// What a destructor has left to be raised; with the GIL, by the main thread.
struct LeftToRaise {
  PyObject* type = nullptr;  // null: nothing
  PyObject* value = nullptr;
  PyObject* trace = nullptr;
  bool asked = false;  // Python will come for it
} left;

bool TakeLeft() {
  if (left.type == nullptr) {
    return false;
  }
  PyErr_Restore(std::exchange(left.type, nullptr), std::exchange(left.value, nullptr),
                std::exchange(left.trace, nullptr));
  return true;
}

int RaiseLeft(void* /*unused*/) {
  left.asked = false;
  return TakeLeft() ? -1 : 0;
}

}  // namespace

bool SignalRaised() {
  if (!IsMainThread()) {
    return false;
  }
  const PyGILState_STATE before = PyGILState_Ensure();
  const bool raised = PyErr_Occurred() != nullptr || TakeLeft() || PyErr_CheckSignals() != 0;
  PyGILState_Release(before);
  return raised;
}

void WarnInPython(const std::string& line) {
  const GilReleased* const released = GilReleased::current();
  if (released == nullptr) {
    return;
  }
  const GilReleased::Held gil(*released);
  if (PyErr_Occurred() != nullptr) {
    return;  // the call is about to end with that
  }
  try {
    const Ref logger =
        Call(Attribute(Import("logging").get(), "getLogger").get(), {ToPython("holdfast")});
    Call(Attribute(logger.get(), "warning").get(), {ToPython("%s"), ToPython(line)});
  } catch (Raised& raised) {
    const bool unraisable = raised.Matches(PyExc_Exception);
    raised.Restore();
    if (unraisable) {  // (a KeyboardInterrupt stays pending)
      PyErr_WriteUnraisable(ToPython("the logger holdfast").get());
    }
  }
}

void RaiseLater() {
  if (!IsMainThread() || PyErr_Occurred() == nullptr) {
    return;
  }
  PyErr_Fetch(&left.type, &left.value, &left.trace);
  left.asked = left.asked || Py_AddPendingCall(RaiseLeft, nullptr) == 0;
  if (!left.asked && TakeLeft()) {
    PyErr_WriteUnraisable(nullptr);
  }
}

void NoteMainThread(unsigned long ident) {
  main_thread = ident;
}

bool IsMainThread() {
  return static_cast<unsigned long>(::pthread_self()) == main_thread;
}

void EnterPython(PyThreadState* state) {
  // Counted first, then the look: either this thread sees the end, or the end sees this thread.
  ++entering;
  if (ending.load() && !IsMainThread()) {
    --entering;
    while (true) {
      ::pause();
    }
  }
  PyEval_RestoreThread(state);
  --entering;
}

void EndOfInterpreter() {
  ending = true;
  PyThreadState* const state = PyEval_SaveThread();
  const auto until = std::chrono::steady_clock::now() + kLettingIn;
  while (entering.load() > 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::yield();
  }
  PyEval_RestoreThread(state);
}

}  // namespace holdfast::python
