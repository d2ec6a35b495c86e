#include "server/runtime/tiers/worker_group.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "base/units.h"
#include "tiers/transfer/file_pieces.h"

namespace holdfast {
namespace {

constexpr auto kLastWait = std::chrono::seconds(1);

}  // namespace

struct WorkerGroup::State {
  State(Options o, std::shared_ptr<EventOutlet> out)
      : options(std::move(o)), outlet(std::move(out)) {}

  struct Running {
    std::shared_ptr<Operation> operation;
    std::string stall;  // for how long, and where, it has got nowhere; empty: it gets on
  };

  const Options options;
  const std::shared_ptr<EventOutlet> outlet;
  mutable Mutex mutex;
  CondVar work_cv;
  CondVar ended_cv;
  std::deque<std::shared_ptr<Operation>> waiting GUARDED_BY(mutex);
  std::map<DrainId, Running> running GUARDED_BY(mutex);
  // Threads with an operation, or with what is left of one: to let go of that may be work for a
  // group, too (files are closed where they were opened).
  size_t busy GUARDED_BY(mutex) = 0;
  std::set<pid_t> threads GUARDED_BY(mutex);
  ThreadPriority priority GUARDED_BY(mutex);
  bool stopping GUARDED_BY(mutex) = false;
};

WorkerGroup::WorkerGroup(std::shared_ptr<State> state) : state_(std::move(state)) {}

absl::StatusOr<std::unique_ptr<WorkerGroup>> WorkerGroup::Create(
    Options options, std::shared_ptr<EventOutlet> outlet) {
  const auto state = std::make_shared<State>(std::move(options), std::move(outlet));
  {
    MutexLock lock(state->mutex);
    state->priority = state->options.priority;
  }
  // From here on its destructor ends what has been started.
  std::unique_ptr<WorkerGroup> group(new WorkerGroup(state));
  for (size_t i = 0; i < state->options.threads; ++i) {
    std::thread thread;
    HF_RETURN_IF_ERROR(StartThread(
        "tier", [state] { Run(state); }, thread));
    thread.detach();
  }
  return group;
}

WorkerGroup::~WorkerGroup() {
  CancelAll();
  const auto until = std::chrono::steady_clock::now() + kLastWait;
  MutexLock lock(state_->mutex);
  state_->stopping = true;
  state_->work_cv.NotifyAll();
  while (!state_->threads.empty() && state_->ended_cv.WaitUntil(state_->mutex, until)) {
  }
}

void WorkerGroup::Run(const std::shared_ptr<State>& state) {
  ::pthread_setname_np(::pthread_self(), state->options.name.substr(0, 15).c_str());
  const pid_t self = CurrentThreadId();
  ThreadPriority priority;
  {
    MutexLock lock(state->mutex);
    state->threads.insert(self);
    priority = state->priority;
  }
  if (const absl::Status set = SetThreadPriority(self, priority); !set.ok()) {
    LogWarning(absl::StrCat(state->options.name, ": ", Message(set)));
  }
  for (;;) {
    std::shared_ptr<Operation> operation;
    {
      MutexLock lock(state->mutex);
      while (state->waiting.empty() && !state->stopping) {
        state->work_cv.Wait(state->mutex);
      }
      if (state->stopping) {
        state->threads.erase(self);
        state->ended_cv.NotifyAll();
        return;
      }
      operation = std::move(state->waiting.front());
      state->waiting.pop_front();
      state->running[operation->drain()] = {operation, ""};
      ++state->busy;
    }
    RunOne(state, std::move(operation));
    MutexLock lock(state->mutex);
    --state->busy;
  }
}

void WorkerGroup::RunOne(const std::shared_ptr<State>& state,
                         std::shared_ptr<Operation> operation) {
  operation->control()->Touch();
  Event event = operation->control()->cancelled() ? operation->Cancelled() : operation->Work();
  {
    MutexLock lock(state->mutex);
    state->running.erase(operation->drain());
  }
  operation->EndLife();
  // What was published after it had been answered as cancelled is there all the same.
  const auto* flush = std::get_if<FlushEnded>(&event);
  const bool late = flush != nullptr && flush->status.ok();
  if (operation->TakeAnswer() || late) {
    state->outlet->Post(std::move(event));
  }
}

void WorkerGroup::Submit(std::shared_ptr<Operation> operation, bool urgent) {
  MutexLock lock(state_->mutex);
  if (urgent) {
    state_->waiting.push_front(std::move(operation));
  } else {
    state_->waiting.push_back(std::move(operation));
  }
  state_->work_cv.NotifyOne();
}

bool WorkerGroup::Cancel(DrainId drain) {
  std::shared_ptr<Operation> operation;
  bool ran = false;
  {
    MutexLock lock(state_->mutex);
    const auto queued =
        std::find_if(state_->waiting.begin(), state_->waiting.end(),
                     [&](const auto& waiting) { return waiting->drain() == drain; });
    if (queued != state_->waiting.end()) {
      operation = *queued;
      state_->waiting.erase(queued);
    } else if (const auto it = state_->running.find(drain); it != state_->running.end()) {
      operation = it->second.operation;
      ran = true;
    }
  }
  if (operation == nullptr) {
    return false;
  }
  operation->control()->Cancel();
  if (!ran) {
    operation->EndLife();
    if (operation->answers_itself()) {
      operation->Cancelled();
    }
  }
  if ((!ran || operation->Revoke()) && operation->TakeAnswer()) {
    if (ran && operation->when_left() != nullptr && !operation->source_call().empty()) {
      operation->when_left()();
    }
    state_->outlet->Post(operation->Cancelled());
  }
  return true;
}

void WorkerGroup::Hurry(DrainId drain) {
  MutexLock lock(state_->mutex);
  const auto queued = std::find_if(state_->waiting.begin(), state_->waiting.end(),
                                   [&](const auto& waiting) { return waiting->drain() == drain; });
  if (queued != state_->waiting.end()) {
    const std::shared_ptr<Operation> operation = *queued;
    state_->waiting.erase(queued);
    state_->waiting.push_front(operation);
    operation->control()->Hurry();
  } else if (const auto it = state_->running.find(drain); it != state_->running.end()) {
    it->second.operation->control()->Hurry();
  }
}

void WorkerGroup::CancelAll() {
  std::vector<DrainId> all;
  {
    MutexLock lock(state_->mutex);
    for (const auto& operation : state_->waiting) {
      all.push_back(operation->drain());
    }
    for (const auto& [drain, running] : state_->running) {
      all.push_back(drain);
    }
  }
  for (const DrainId drain : all) {
    Cancel(drain);
  }
}

void WorkerGroup::CheckStalls(MonotonicTime now) {
  std::vector<Event> changes;
  std::vector<std::shared_ptr<Operation>> dropped;
  {
    MutexLock lock(state_->mutex);
    bool all_stuck = state_->running.size() >= state_->options.threads;
    bool all_in_source = true;
    std::string what;
    for (auto& [drain, running] : state_->running) {
      const TransferControl& control = *running.operation->control();
      const Duration still = now - control.last_progress();
      const bool stalled = still >= state_->options.stall_timeout;
      all_stuck = all_stuck && stalled;
      const std::string source = running.operation->source_call();
      const std::string doing = source.empty() ? control.doing() : source;
      all_in_source = all_in_source && !source.empty();
      what = absl::StrCat("no progress for ", FormatDuration(still),
                          doing.empty() ? "" : absl::StrCat(": ", doing));
      const bool was_stalled = !running.stall.empty();
      running.stall = stalled ? what : "";
      if (stalled != was_stalled) {
        changes.push_back(DrainStalled{drain, stalled, what, stalled && !source.empty()});
        if (stalled && running.operation->when_stalled() != nullptr) {
          changes.push_back(running.operation->when_stalled()(what));
        }
      }
    }
    // What waits behind calls that all hang gets on no better.
    for (auto it = state_->waiting.begin(); it != state_->waiting.end();) {
      const std::shared_ptr<Operation> operation = *it;
      if (!all_stuck ||
          now - operation->control()->last_progress() < state_->options.stall_timeout) {
        ++it;
        continue;
      }
      const std::string behind = absl::StrCat("waits behind others: ", what);
      operation->control()->Touch();  // told again after the same time, not every second
      changes.push_back(DrainStalled{operation->drain(), true, behind, all_in_source});
      if (operation->when_stalled() == nullptr) {
        ++it;
        continue;
      }
      // Whoever asked asks again: it would only make the queue longer.
      if (operation->TakeAnswer()) {
        changes.push_back(operation->when_stalled()(behind));
      }
      dropped.push_back(operation);
      it = state_->waiting.erase(it);
    }
  }
  for (const std::shared_ptr<Operation>& operation : dropped) {
    operation->EndLife();
  }
  for (Event& change : changes) {
    state_->outlet->Post(std::move(change));
  }
}

absl::Status WorkerGroup::SetPriority(const ThreadPriority& priority) {
  MutexLock lock(state_->mutex);
  state_->priority = priority;
  absl::Status first;
  for (const pid_t thread : state_->threads) {
    first.Update(SetThreadPriority(thread, priority));
  }
  return Annotate(first, state_->options.name);
}

bool WorkerGroup::idle() const {
  MutexLock lock(state_->mutex);
  return state_->waiting.empty() && state_->busy == 0;
}

size_t WorkerGroup::stalled() const {
  MutexLock lock(state_->mutex);
  return static_cast<size_t>(
      std::count_if(state_->running.begin(), state_->running.end(),
                    [](const auto& running) { return !running.second.stall.empty(); }));
}

std::string WorkerGroup::stall() const {
  MutexLock lock(state_->mutex);
  for (const auto& [drain, running] : state_->running) {
    if (!running.stall.empty()) {
      return running.stall;
    }
  }
  return "";
}

}  // namespace holdfast
