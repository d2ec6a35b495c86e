// BlockIo by as many threads as there may be requests under way, each in File::ReadAt or WriteAt.
#include <deque>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/status.h"
#include "tiers/transfer/block_io_impl.h"
#include "tiers/transfer/file_pieces.h"

namespace holdfast {
namespace {

class ThreadBlockIo : public BlockIo {
 public:
  ThreadBlockIo(size_t depth, std::string description)
      : depth_(depth), description_(std::move(description)) {}

  ~ThreadBlockIo() override {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
      begun_cv_.NotifyAll();
    }
    for (std::thread& thread : threads_) {
      thread.join();  // after the requests that it has, and those that wait
    }
  }

  absl::Status Start() {
    for (size_t i = 0; i < depth_; ++i) {
      std::thread thread;
      HF_RETURN_IF_ERROR(StartThread(
          "block-io", [this] { Run(); }, thread));
      threads_.push_back(std::move(thread));
    }
    MutexLock lock(mutex_);
    while (ids_.size() < depth_) {
      begun_cv_.Wait(mutex_);
    }
    return absl::OkStatus();
  }

  std::string_view name() const override { return "threads"; }
  const std::string& description() const override { return description_; }
  size_t depth() const override { return depth_; }
  size_t in_flight() const override { return in_flight_; }

  absl::Status Submit(const BlockRequest& request) override {
    HF_RETURN_IF_ERROR(CheckBlockRequest(request));
    if (in_flight_ == depth_) {
      return absl::ResourceExhaustedError(
          absl::StrCat("block I/O: ", depth_, " requests are under way already"));
    }
    ++in_flight_;
    MutexLock lock(mutex_);
    begun_.push_back(request);
    begun_cv_.NotifyOne();
    return absl::OkStatus();
  }

  BlockCompletion Wait() override {
    MutexLock lock(mutex_);
    while (ended_.empty()) {
      ended_cv_.Wait(mutex_);
    }
    return Take();
  }

  std::optional<BlockCompletion> Poll() override {
    MutexLock lock(mutex_);
    return ended_.empty() ? std::nullopt : std::optional<BlockCompletion>(Take());
  }

  absl::Status SetPriority(const ThreadPriority& priority) override {
    HF_RETURN_IF_ERROR(CheckThreadPriority(priority));
    MutexLock lock(mutex_);
    absl::Status first;
    for (const pid_t id : ids_) {
      first.Update(SetThreadPriority(id, priority));
    }
    return first;
  }

  bool RegisterFile(File& /*file*/) override { return false; }
  void UnregisterFile(File& /*file*/) override {}
  bool RegisterMemory(std::byte* /*memory*/, uint64_t /*bytes*/) override { return false; }
  void UnregisterMemory(std::byte* /*memory*/) override {}

 private:
  void Run() {
    MutexLock lock(mutex_);
    ids_.push_back(CurrentThreadId());
    begun_cv_.NotifyAll();
    for (;;) {
      while (begun_.empty() && !stopping_) {
        begun_cv_.Wait(mutex_);
      }
      if (begun_.empty()) {
        return;
      }
      const BlockRequest request = begun_.front();
      begun_.pop_front();
      mutex_.Unlock();
      const double cpu_before = ThreadCpuSeconds();
      absl::Status status = Perform(request);
      const double cpu = ThreadCpuSeconds() - cpu_before;
      mutex_.Lock();
      ended_.push_back({request.tag, std::move(status), cpu});
      ended_cv_.NotifyOne();
    }
  }

  static absl::Status Perform(const BlockRequest& request) {
    return request.op == BlockOp::kWrite
               ? request.file->WriteAt(request.offset, {request.memory, request.bytes})
               : ReadAtLeast(*request.file, request.offset, {request.memory, request.bytes},
                             request.bytes_min);
  }

  BlockCompletion Take() REQUIRES(mutex_) {
    BlockCompletion done = std::move(ended_.front());
    ended_.pop_front();
    --in_flight_;
    return done;
  }

  const size_t depth_;
  const std::string description_;
  size_t in_flight_ = 0;  // of the owner's thread
  Mutex mutex_;
  CondVar begun_cv_;
  CondVar ended_cv_;
  std::deque<BlockRequest> begun_ GUARDED_BY(mutex_);
  std::deque<BlockCompletion> ended_ GUARDED_BY(mutex_);
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::vector<pid_t> ids_ GUARDED_BY(mutex_);  // of those that run
  std::vector<std::thread> threads_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<BlockIo>> CreateThreadBlockIo(const BlockIoOptions& options,
                                                             const std::string& why) {
  auto io = std::make_unique<ThreadBlockIo>(
      options.depth, why.empty() ? "threads" : absl::StrCat("threads (", why, ")"));
  HF_RETURN_IF_ERROR(io->Start());
  return io;
}

}  // namespace holdfast
