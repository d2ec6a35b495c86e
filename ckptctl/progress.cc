#include "ckptctl/progress.h"

#include <signal.h>

#include <ostream>
#include <system_error>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "ckptctl/render.h"

namespace holdfast {
namespace {

constexpr std::chrono::milliseconds kRedraw(100);
constexpr std::chrono::milliseconds kWaitingRedraw(500);
constexpr char kClearLine[] = "\r\x1b[K";

bool SomebodyLooks(const Context& context) {
  return context.progress && !context.json;
}

}  // namespace

ProgressLine::ProgressLine(const Context& context, Duration first_after)
    : context_(context), next_(context.clock->Now() + first_after) {}

void ProgressLine::Draw(const std::function<std::string()>& text) {
  if (!SomebodyLooks(context_) || context_.clock->Now() < next_) {
    return;
  }
  *context_.err << kClearLine << text() << std::flush;
  drawn_ = true;
  next_ = context_.clock->Now() + kRedraw;
}

void ProgressLine::Clear() {
  if (drawn_) {
    *context_.err << kClearLine << std::flush;
    drawn_ = false;
  }
}

struct WaitingLine::Drawing {
  Drawing(std::ostream& err, std::string text, Duration first_after)
      : thread([this, &err, text = std::move(text), first_after] { Run(err, text, first_after); }) {
  }
  ~Drawing() {
    {
      MutexLock lock(mutex);
      ended = true;
      end.NotifyAll();
    }
    thread.join();
  }

  void Run(std::ostream& err, const std::string& text, Duration first_after) {
    const auto begin = std::chrono::steady_clock::now();
    bool drawn = false;
    auto next = begin + first_after;
    MutexLock lock(mutex);
    while (!ended) {
      if (std::chrono::steady_clock::now() < next) {
        end.WaitUntil(mutex, next);
        continue;
      }
      const auto waited = std::chrono::steady_clock::now() - begin;
      err << kClearLine << text << ", "
          << FormatAge(std::chrono::duration_cast<std::chrono::milliseconds>(waited).count())
          << std::flush;
      drawn = true;
      next = std::chrono::steady_clock::now() + kWaitingRedraw;
    }
    if (drawn) {
      err << kClearLine << std::flush;
    }
  }

  Mutex mutex;
  CondVar end;
  bool ended GUARDED_BY(mutex) = false;
  std::thread thread;  // last: it uses the others
};

WaitingLine::WaitingLine(const Context& context, const std::string& what, Duration first_after) {
  if (!SomebodyLooks(context)) {
    return;
  }
  // Signals are for the thread that waits: the watchdog's, and Ctrl-C.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    drawing_ = std::make_unique<Drawing>(*context.err, absl::StrCat(context.command, ": ", what),
                                         first_after);
  } catch (const std::system_error&) {
    // No thread to be had: the command goes on without a line.
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

WaitingLine::~WaitingLine() = default;

}  // namespace holdfast
