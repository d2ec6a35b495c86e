#include "base/log_queue.h"

#include <pthread.h>
#include <signal.h>

#include <deque>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/program.h"
#include "base/status.h"

namespace holdfast {
namespace {

// What a line takes beside its text, roughly.
constexpr size_t kLineOverheadBytes = 64;

std::chrono::steady_clock::time_point DeadlineAfter(Duration at_most) {
  return std::chrono::steady_clock::now() + at_most;
}

size_t SizeOf(const LogLine& line) {
  return line.text.size() + kLineOverheadBytes;
}

}  // namespace

struct LogQueue::State {
  State(const Limits& bounds, Write to) : limits(bounds), write(std::move(to)) {}

  // The thread.
  void Run() {
    MutexLock lock(mutex);
    for (;;) {
      while (lines.empty() && !stopping) {
        pushed_cv.Wait(mutex);
      }
      if (lines.empty()) {
        break;
      }
      const bool written = WriteFirst();
      if (lines.empty() && lost > 0 && written) {
        TellLost();
      }
    }
    ended = true;
    written_cv.NotifyAll();
  }

  // A line counts until it is out: one that hangs takes room too.
  bool WriteFirst() REQUIRES(mutex) {
    LogLine& line = lines.front();  // only the thread takes lines away; a deque keeps their places
    mutex.Unlock();
    const bool ok = write(line);
    mutex.Lock();
    if (!ok) {
      ++lost;
    }
    bytes -= SizeOf(line);
    lines.pop_front();
    ++done;
    written_cv.NotifyAll();
    return ok;
  }

  // After a gap nothing is accepted until the queue is empty: so the line about it stands where it
  // is.
  void TellLost() REQUIRES(mutex) {
    const uint64_t count = std::exchange(lost, 0);
    const LogLine line{std::chrono::system_clock::now(), LogLevel::kWarning,
                       absl::StrCat("log: ", count,
                                    " lines were dropped: they could not be written, or not as "
                                    "fast as they came")};
    mutex.Unlock();
    const bool ok = write(line);
    mutex.Lock();
    if (!ok) {
      lost += count;
    }
  }

  const Limits limits;
  const Write write;
  Mutex mutex;
  CondVar pushed_cv;
  CondVar written_cv;
  std::deque<LogLine> lines GUARDED_BY(mutex);
  size_t bytes GUARDED_BY(mutex) = 0;
  uint64_t pushed GUARDED_BY(mutex) = 0;  // accepted lines, and of those
  uint64_t done GUARDED_BY(mutex) = 0;    // the ones that write() has returned from
  uint64_t lost GUARDED_BY(mutex) = 0;
  bool overflowing GUARDED_BY(mutex) = false;
  bool stopping GUARDED_BY(mutex) = false;
  bool ended GUARDED_BY(mutex) = false;
};

absl::StatusOr<std::unique_ptr<LogQueue>> LogQueue::Start(const Limits& limits, Write write) {
  std::unique_ptr<LogQueue> queue(new LogQueue(std::make_shared<State>(limits, std::move(write))));
  // Signals are for the program's other threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  absl::Status status;
  try {
    queue->thread_ = std::thread([state = queue->state_] {
      ::pthread_setname_np(::pthread_self(), "log");
      state->Run();
    });
  } catch (const std::system_error& error) {
    status = ThreadError(error, "for the log");
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  HF_RETURN_IF_ERROR(status);
  return queue;
}

LogQueue::~LogQueue() {
  Stop(Duration(0));
}

bool LogQueue::Push(LogLine line) {
  State& state = *state_;
  MutexLock lock(state.mutex);
  if (state.ended) {
    return false;
  }
  const size_t size = SizeOf(line);
  state.overflowing = (state.overflowing && !state.lines.empty()) ||
                      state.lines.size() >= state.limits.lines_max ||
                      state.bytes + size > state.limits.bytes_max;
  if (state.overflowing) {
    ++state.lost;
    return true;
  }
  state.bytes += size;
  state.lines.push_back(std::move(line));
  ++state.pushed;
  state.pushed_cv.NotifyOne();
  return true;
}

bool LogQueue::Flush(Duration at_most) {
  const auto until = DeadlineAfter(at_most);
  MutexLock lock(state_->mutex);
  const uint64_t all = state_->pushed;
  while (state_->done < all) {
    if (!state_->written_cv.WaitUntil(state_->mutex, until)) {
      return state_->done >= all;
    }
  }
  return true;
}

bool LogQueue::Stop(Duration at_most) {
  if (!thread_.joinable()) {
    MutexLock lock(state_->mutex);
    return state_->ended;
  }
  const auto until = DeadlineAfter(at_most);
  bool ended = false;
  {
    MutexLock lock(state_->mutex);
    state_->stopping = true;
    state_->pushed_cv.NotifyOne();
    while (!state_->ended && state_->written_cv.WaitUntil(state_->mutex, until)) {
    }
    ended = state_->ended;
  }
  if (ended) {
    thread_.join();
  } else {
    thread_.detach();
  }
  return ended;
}

}  // namespace holdfast
