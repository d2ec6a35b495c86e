#include "client-lib/python/src/wait.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <thread>

namespace holdfast::python {
namespace {

constexpr std::chrono::seconds kLettingIn{5};

std::atomic<unsigned long> main_thread{0};
std::atomic<bool> ending{false};
std::atomic<int> entering{0};

}  // namespace

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
