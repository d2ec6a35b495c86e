#include "ckptctl/open_step.h"

#include <signal.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/status.h"
#include "ckptctl/progress.h"
#include "ckptctl/sockets.h"

namespace holdfast {
namespace {

// A window may come from many shards, of drives and mounts that are slow.
constexpr std::chrono::minutes kWindowTimeMin(5);
constexpr std::chrono::seconds kAliveTime(2);

bool WasInterrupted(const Context& context) {
  return context.interrupted != nullptr && *context.interrupted;
}

}  // namespace

absl::Status FromClient(const Context& context, const std::string& socket, const Status& status) {
  if (status.ok()) {
    return absl::OkStatus();
  }
  if (WasInterrupted(context)) {
    return absl::CancelledError("interrupted");
  }
  const std::string& message = status.message();
  switch (status.code()) {
    case Code::kNotFound:
    case Code::kNothingToRestore:
      return absl::NotFoundError(message);
    case Code::kCorrupt:
      return absl::DataLossError(message);
    case Code::kUnavailable:
    case Code::kDeadlineExceeded:
      if (!IsClientSocket(socket, kAliveTime)) {
        return absl::UnavailableError(message);
      }
      return absl::FailedPreconditionError(message);
    case Code::kNoRoom:
      return absl::ResourceExhaustedError(message);
    case Code::kInternal:
      return absl::InternalError(message);
    default:
      return absl::FailedPreconditionError(message);
  }
}

std::string NameOfStep(const CheckpointReader& reader, const std::string& job) {
  return absl::StrCat("step ", reader.step(), " (attempt ", reader.attempt(), ") of job ", job);
}

// The helper fills one buffer while the caller has the other one.
struct WindowReader::Reading {
  Reading(const Context& its_context, std::string its_socket, Fill its_fill)
      : context(its_context), socket(std::move(its_socket)), fill(std::move(its_fill)) {
    for (std::unique_ptr<std::byte[]>& buffer : buffers) {
      buffer = std::make_unique_for_overwrite<std::byte[]>(kWindowBytes);
    }
    // Signals are for the thread that waits.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      thread = std::thread([this] { Run(); });
    } catch (...) {
      ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw;
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  ~Reading() {
    {
      const MutexLock lock(mutex);
      ended = true;
      changed.NotifyAll();
    }
    thread.join();
  }

  void Run() {
    for (size_t number = 0;; ++number) {
      {
        const MutexLock lock(mutex);
        while (!ended && number > given + 1) {
          changed.Wait(mutex);
        }
        if (ended) {
          return;
        }
      }
      Result<uint64_t> got = fill(buffers[number % 2].get());
      const MutexLock lock(mutex);
      last = got;
      read = number + 1;
      changed.NotifyAll();
      if (!got.ok() || *got == 0) {
        return;
      }
      bytes[number % 2] = *got;
    }
  }

  absl::StatusOr<std::span<const std::byte>> Next() {
    const MutexLock lock(mutex);
    given = next;  // those before are the helper's again
    changed.NotifyAll();
    while (read <= next) {
      changed.Wait(mutex);
    }
    // What `last` says is of the newest window; a failure or the end comes behind all others.
    if (read == next + 1 && (!last.ok() || *last == 0)) {
      if (!last.ok()) {
        return FromClient(context, socket, last.status());
      }
      return std::span<const std::byte>();
    }
    const size_t buffer = next++ % 2;
    return std::span<const std::byte>(buffers[buffer].get(), bytes[buffer]);
  }

  const Context& context;
  const std::string socket;
  const Fill fill;
  std::array<std::unique_ptr<std::byte[]>, 2> buffers;
  Mutex mutex;
  CondVar changed;
  size_t next GUARDED_BY(mutex) = 0;   // window that the caller gets next
  size_t given GUARDED_BY(mutex) = 0;  // the caller may still look at the one before this
  size_t read GUARDED_BY(mutex) = 0;   // how many there are, the last answer counted
  bool ended GUARDED_BY(mutex) = false;
  Result<uint64_t> last GUARDED_BY(mutex) = uint64_t{0};
  std::array<uint64_t, 2> bytes GUARDED_BY(mutex) = {};
  std::thread thread;  // last: it uses the others
};

WindowReader::WindowReader(const Context& context, const std::string& socket, Fill fill)
    : reading_(std::make_unique<Reading>(context, socket, std::move(fill))) {}
WindowReader::WindowReader(WindowReader&&) noexcept = default;
WindowReader::~WindowReader() = default;

absl::StatusOr<std::span<const std::byte>> WindowReader::Next() {
  return reading_->Next();
}

absl::StatusOr<WindowReader> OpenedStep::Read(std::vector<ElementRange> ranges) const {
  Result<std::unique_ptr<ElementStream>> stream = reader_->Stream(std::move(ranges), kWindowBytes);
  HF_RETURN_IF_ERROR(FromClient(*context_, socket_, stream.status()));
  return WindowReader(*context_, socket_,
                      [stream = std::shared_ptr<ElementStream>(*std::move(stream))](std::byte* to) {
                        return stream->Next(to);
                      });
}

absl::StatusOr<std::string> OpenedStep::ReadItem(size_t item, uint64_t bytes_max) const {
  const SavedItem& its = items()[item];
  if (its.bytes > bytes_max) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "'", its.name, "' has ", its.bytes, " bytes: at most ", bytes_max, " are looked at"));
  }
  HF_ASSIGN_OR_RETURN(WindowReader windows, Read({{item, 0, its.elements}}));
  std::string all;
  while (true) {
    HF_ASSIGN_OR_RETURN(const std::span<const std::byte> some, windows.Next());
    if (some.empty()) {
      return all;
    }
    all.append(reinterpret_cast<const char*>(some.data()), some.size());
  }
}

absl::StatusOr<std::string> FindClient(const Context& context, const std::string& client_socket) {
  std::string socket = FindClientSocket(client_socket, context.socket);
  // Who is not there is told in the words that all commands have for it.
  if (const absl::Status there = ConnectSocket(socket).status(); !there.ok()) {
    const std::string beside =
        client_socket.empty() && !context.socket.empty()
            ? absl::StrCat(
                  " (what was saved comes through the socket of training processes, which "
                  "is looked for beside ",
                  context.socket, "; --client-socket names another one)")
            : "";
    return absl::Status(there.code(), absl::StrCat(Message(there), beside));
  }
  return socket;
}

absl::StatusOr<OpenedStep> OpenStep(const Context& context, const StepArguments& step) {
  HF_ASSIGN_OR_RETURN(const std::string socket, FindClient(context, step.client_socket));
  CheckpointOptions options;
  options.job = step.job;
  options.step = step.step;
  options.attempt = step.attempt;
  options.socket = socket;
  options.deadline = std::chrono::duration_cast<Milliseconds>(context.timeout);
  options.window_deadline = std::max<Milliseconds>(kWindowTimeMin, options.deadline);
  options.threads = std::max(1U, std::thread::hardware_concurrency());
  options.interrupted = [&context] { return WasInterrupted(context); };
  const WaitingLine waiting(context, "looking at what was saved");
  Result<std::unique_ptr<CheckpointReader>> reader = OpenCheckpoint(options);
  HF_RETURN_IF_ERROR(FromClient(context, socket, reader.status()));
  return OpenedStep(context, socket, *std::move(reader));
}

}  // namespace holdfast
