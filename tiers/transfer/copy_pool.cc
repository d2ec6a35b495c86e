// The threads of a CopyPool, and whose piece is next.
#include <algorithm>
#include <deque>
#include <list>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/status.h"
#include "tiers/transfer/buffered_copy.h"
#include "tiers/transfer/copy_operation.h"

namespace holdfast {
namespace {

constexpr size_t kThreadsMax = 64;
constexpr size_t kPieceBytesMin = size_t{64} << 10;
constexpr size_t kPieceBytesMax = size_t{64} << 20;
// Who waits for a copy looks so often after cancellations and stuck threads.
constexpr std::chrono::milliseconds kLook{20};

struct Operation {
  Operation(BufferedCopySpec spec, size_t piece_bytes) : copy(std::move(spec), piece_bytes) {}

  CopyOperation copy;
  // Of the pool's lock:
  size_t pieces_under_way = 0;
  size_t threads_stuck = 0;
};

struct Worker {
  std::thread thread;
  pid_t id = 0;  // 0: not running yet
  bool ended = false;
  bool stuck = false;
  // The call that it is in, if any.
  bool in_call = false;
  Operation* operation = nullptr;  // whose
  std::string call;
  MonotonicTime call_began;
};

// The cores that a worker's own thread runs on, which change with what it copies.
class OwnCores {
 public:
  void Change(const Cores& wanted) {
    if (wanted != now_ && SetThreadCores(0, wanted).ok()) {  // else it runs where it did
      now_ = wanted;
    }
  }

 private:
  Cores now_ = CoresOf(0).value_or(Cores());
};

// A file that is not as long as the record says is not the copy that it describes.
absl::Status CheckSourceLength(const BufferedCopySpec& spec) {
  if (spec.from_file == nullptr) {
    return absl::OkStatus();
  }
  const TransferControl::Call call(spec.control.get(), "stat", spec.from_file->path());
  HF_ASSIGN_OR_RETURN(const FileInfo info, spec.from_file->Info());
  const ShardRecord& record = spec.image->record;
  if (info.bytes != record.image_bytes) {
    return absl::DataLossError(absl::StrCat("read '", spec.from_file->path(), "': it is of ",
                                            info.bytes, " bytes, the record of ",
                                            record.id.ToString(), " says ", record.image_bytes));
  }
  return absl::OkStatus();
}

}  // namespace

struct CopyPool::State : public std::enable_shared_from_this<CopyPool::State> {
  explicit State(const CopyPoolOptions& o) : options(o), priority(o.priority) {}

  class Watcher;

  absl::Status StartWorker() REQUIRES(mutex);
  void Run(Worker& worker) EXCLUDES(mutex);
  std::shared_ptr<Operation> NextOperation() REQUIRES(mutex);
  void ReplaceStuck() REQUIRES(mutex);
  size_t WorkersNotStuck() const REQUIRES(mutex);
  void JoinEnded() REQUIRES(mutex);

  const CopyPoolOptions options;
  // Where the pool was made; a thread would begin where the one that starts it runs just then.
  const Cores cores = CoresOf(0).value_or(Cores());
  mutable Mutex mutex;
  CondVar work_cv;   // there are pieces, or the end has come
  CondVar ended_cv;  // a piece, a call or a thread has ended
  ThreadPriority priority GUARDED_BY(mutex);
  std::list<Worker> workers GUARDED_BY(mutex);  // a list: each thread knows its own
  std::deque<std::shared_ptr<Operation>> waiting GUARDED_BY(mutex);  // with pieces to begin
  std::set<std::shared_ptr<Operation>> running GUARDED_BY(mutex);
  bool stopping GUARDED_BY(mutex) = false;
};

class CopyPool::State::Watcher : public CallWatcher {
 public:
  Watcher(State& state, Worker& worker, Operation& operation)
      : state_(state), worker_(worker), operation_(operation) {}

  void Begin(const char* name, const std::string& path) override {
    call_.emplace(operation_.copy.spec().control.get(), name, path);
    MutexLock lock(state_.mutex);
    worker_.in_call = true;
    worker_.operation = &operation_;
    worker_.call = absl::StrCat(name, " '", path, "'");
    worker_.call_began = Clock::System()->Now();
    state_.ended_cv.NotifyAll();  // the destructor waits for this one no longer
  }

  void End() override {
    call_.reset();
    MutexLock lock(state_.mutex);
    worker_.in_call = false;
    if (worker_.stuck) {
      worker_.stuck = false;
      --operation_.threads_stuck;
      state_.work_cv.NotifyAll();
    }
  }

 private:
  State& state_;
  Worker& worker_;
  Operation& operation_;
  std::optional<TransferControl::Call> call_;
};

absl::Status CopyPool::State::StartWorker() {
  Worker& worker = workers.emplace_back();
  absl::Status started = StartThread(
      "copy", [self = shared_from_this(), &worker] { self->Run(worker); }, worker.thread);
  if (!started.ok()) {
    workers.pop_back();
  }
  return started;
}

void CopyPool::State::Run(Worker& worker) {
  AlignedBuffer bounce(kBounceBytes);
  OwnCores own_cores;
  MutexLock lock(mutex);
  worker.id = CurrentThreadId();
  static_cast<void>(SetThreadPriority(worker.id, priority));  // said by whoever sets it
  for (;;) {
    // One that took a stuck thread's place goes when that one is back.
    if (stopping || WorkersNotStuck() > options.threads) {
      break;
    }
    const std::shared_ptr<Operation> operation = NextOperation();
    if (operation == nullptr) {
      work_cv.Wait(mutex);
      continue;
    }
    const CopyOperation::Piece piece = operation->copy.TakePiece();
    ++operation->pieces_under_way;
    if (operation->copy.has_pieces()) {
      waiting.push_back(operation);
    }
    mutex.Unlock();
    {
      const Cores& wanted = operation->copy.spec().cores;
      own_cores.Change(wanted.empty() ? cores : wanted);
      Watcher watcher(*this, worker, *operation);
      operation->copy.CopyPiece(piece, bounce, watcher);
    }
    mutex.Lock();
    operation->copy.EndPiece(piece);
    --operation->pieces_under_way;
    if (operation->copy.has_pieces()) {
      work_cv.NotifyAll();  // the next one may have waited for this one
    }
    ended_cv.NotifyAll();
  }
  worker.ended = true;
  ended_cv.NotifyAll();
}

// The first in line that may begin a piece, taken out of the line. Those that are over leave it.
std::shared_ptr<Operation> CopyPool::State::NextOperation() {
  for (auto it = waiting.begin(); it != waiting.end();) {
    if ((*it)->copy.Over()) {
      it = waiting.erase(it);
      ended_cv.NotifyAll();
    } else if ((*it)->threads_stuck > 0 || !(*it)->copy.may_begin()) {
      ++it;
    } else {
      std::shared_ptr<Operation> operation = std::move(*it);
      waiting.erase(it);
      return operation;
    }
  }
  return nullptr;
}

void CopyPool::State::ReplaceStuck() {
  JoinEnded();
  const MonotonicTime now = Clock::System()->Now();
  for (Worker& worker : workers) {
    if (worker.in_call && !worker.stuck && now - worker.call_began >= options.stuck_after) {
      worker.stuck = true;
      ++worker.operation->threads_stuck;
    }
  }
  while (!stopping && WorkersNotStuck() < options.threads && workers.size() < options.threads_max) {
    if (!StartWorker().ok()) {
      return;  // tried again at the next look
    }
  }
}

size_t CopyPool::State::WorkersNotStuck() const {
  return static_cast<size_t>(std::count_if(workers.begin(), workers.end(),
                                           [](const Worker& w) { return !w.stuck && !w.ended; }));
}

void CopyPool::State::JoinEnded() {
  for (auto it = workers.begin(); it != workers.end();) {
    if (it->ended) {
      if (it->thread.joinable()) {
        it->thread.join();  // takes no lock any more
      }
      it = workers.erase(it);
    } else {
      ++it;
    }
  }
}

CopyPool::CopyPool(std::shared_ptr<State> state) : state_(std::move(state)) {}

absl::StatusOr<std::unique_ptr<CopyPool>> CopyPool::Start(const CopyPoolOptions& options) {
  if (options.threads == 0 || options.threads > kThreadsMax ||
      options.threads_max < options.threads || options.threads_max > 4 * kThreadsMax ||
      options.piece_bytes < kPieceBytesMin || options.piece_bytes > kPieceBytesMax ||
      options.piece_bytes % 4096 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("copy pool: ", options.threads, " threads (at most ", options.threads_max,
                     "), pieces of ", options.piece_bytes, " bytes: not to be had"));
  }
  HF_RETURN_IF_ERROR(CheckThreadPriority(options.priority));
  std::unique_ptr<CopyPool> pool(new CopyPool(std::make_shared<State>(options)));
  MutexLock lock(pool->state_->mutex);
  for (size_t i = 0; i < options.threads; ++i) {
    const absl::Status started = pool->state_->StartWorker();
    if (!started.ok() && i == 0) {
      return started;  // with fewer it works too
    }
  }
  return pool;
}

CopyPool::~CopyPool() {
  State& state = *state_;
  std::list<Worker> ended;
  {
    MutexLock lock(state.mutex);
    state.stopping = true;
    for (const std::shared_ptr<Operation>& operation : state.running) {
      operation->copy.spec().control->Cancel();
    }
    state.work_cv.NotifyAll();
    state.ended_cv.NotifyAll();
    const auto leavable = [](const Worker& w) { return w.ended || w.in_call; };
    while (!std::all_of(state.workers.begin(), state.workers.end(), leavable)) {
      state.ended_cv.Wait(state.mutex);
    }
    for (auto it = state.workers.begin(); it != state.workers.end();) {
      const auto worker = it++;
      if (worker->ended) {
        ended.splice(ended.end(), state.workers, worker);
      } else {
        worker->thread.detach();
      }
    }
  }
  for (Worker& worker : ended) {
    worker.thread.join();
  }
}

TransferResult CopyPool::Copy(BufferedCopySpec spec) {
  const std::shared_ptr<State> state = state_;  // the pool may go while this waits
  TransferResult refused;
  refused.status = CopyOperation::Check(spec, state->options.piece_bytes);
  if (!refused.ok()) {
    return refused;
  }
  if (spec.control == nullptr) {
    spec.control = std::make_shared<TransferControl>();
  }
  if (absl::Status length = CheckSourceLength(spec); !length.ok()) {
    refused.status = std::move(length);
    refused.faulty = FaultySide::kSource;
    return refused;
  }
  const auto operation = std::make_shared<Operation>(std::move(spec), state->options.piece_bytes);
  MutexLock lock(state->mutex);
  if (state->stopping) {
    refused.status = absl::CancelledError("copy: the pool is being closed");
    return refused;
  }
  state->running.insert(operation);
  state->waiting.push_back(operation);
  state->work_cv.NotifyAll();
  while (operation->pieces_under_way > 0 ||
         (operation->copy.has_pieces() && !operation->copy.Over())) {
    state->ended_cv.WaitUntil(state->mutex, std::chrono::steady_clock::now() + kLook);
    state->ReplaceStuck();
  }
  std::erase(state->waiting, operation);
  state->running.erase(operation);
  return operation->copy.result();
}

std::vector<CopyPool::OldestCall> CopyPool::CallsUnderWay() const {
  std::vector<OldestCall> calls;
  MutexLock lock(state_->mutex);
  for (const Worker& worker : state_->workers) {
    if (worker.in_call) {
      calls.push_back({worker.call, worker.call_began});
    }
  }
  std::sort(calls.begin(), calls.end(),
            [](const OldestCall& a, const OldestCall& b) { return a.since < b.since; });
  return calls;
}

size_t CopyPool::threads_stuck() const {
  MutexLock lock(state_->mutex);
  return static_cast<size_t>(std::count_if(state_->workers.begin(), state_->workers.end(),
                                           [](const Worker& w) { return w.stuck; }));
}

absl::Status CopyPool::SetPriority(const ThreadPriority& priority) {
  HF_RETURN_IF_ERROR(CheckThreadPriority(priority));
  MutexLock lock(state_->mutex);
  state_->priority = priority;
  absl::Status first;
  for (const Worker& worker : state_->workers) {
    if (worker.id != 0 && !worker.ended) {
      first.Update(SetThreadPriority(worker.id, priority));
    }
  }
  return first;
}

}  // namespace holdfast
