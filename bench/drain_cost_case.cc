// What draining takes from a training loop on the same machine: a busy loop is timed while nothing
// else goes on, while a shard is flushed to the drive, and while one is written to the remote
// directory, in turns; and the CPU seconds that a drained gigabyte takes.
#include <algorithm>
#include <atomic>
#include <functional>
#include <numeric>
#include <thread>

#include "base/units.h"
#include "bench/cases.h"
#include "bench/durable.h"
#include "bench/harness.h"
#include "tiers/transfer/buffered_copy.h"
#include "tiers/transfer/direct_copy.h"
#include "tiers/transfer/thread_priority.h"

namespace holdfast::bench {
namespace {

constexpr ThreadPriority kDrainPriority{.io = 6, .nice = 10};  // ckptd's defaults
constexpr double kBytesPerGb = 1e9;
constexpr double kQuietSeconds = 1.0;

// One unit of "training": arithmetic over an array that does not fit the first caches.
class Loop {
 public:
  Loop() : weights_(size_t{1} << 20, 1.0F), gradients_(size_t{1} << 20, 1e-6F) {}
  void Step() {
    for (size_t i = 0; i < weights_.size(); ++i) {
      weights_[i] = weights_[i] * 0.999F - gradients_[i];
    }
  }
  float sum() const { return std::accumulate(weights_.begin(), weights_.end(), 0.0F); }

 private:
  std::vector<float> weights_;
  std::vector<float> gradients_;
};

// Seconds of each step while `other` runs in a thread of its own, at the priority that ckptd
// drains with; without one, for kQuietSeconds.
std::vector<double> TimeSteps(Loop& loop, const std::function<void()>& other) {
  std::atomic<bool> ended{false};
  std::thread drain;
  if (other != nullptr) {
    drain = std::thread([&] {
      SetThreadPriority(CurrentThreadId(), kDrainPriority).IgnoreError();
      other();
      ended = true;
    });
  }
  std::vector<double> steps;
  const Stopwatch all;
  while (other != nullptr ? !ended.load() : all.Seconds() < kQuietSeconds) {
    const Stopwatch watch;
    loop.Step();
    steps.push_back(watch.Seconds());
  }
  if (drain.joinable()) {
    drain.join();
  }
  return steps;
}

double Mean(const std::vector<double>& values) {
  return values.empty() ? 0
                        : std::accumulate(values.begin(), values.end(), 0.0) /
                              static_cast<double>(values.size());
}

class Drains {
 public:
  explicit Drains(const CaseOptions& options)
      : options_(options),
        shard_(options.bytes),
        dir_(options.dir, 2 * shard_.bytes()),
        pool_(MustBeOk(CopyPool::Start({.threads = static_cast<size_t>(options.threads),
                                        .piece_bytes = options.piece_bytes,
                                        .priority = kDrainPriority}),
                       "start the pool")) {
    Flush(OpenMode::kCreateExclusive);
  }

  // CPU seconds that it took, the kernel's work for it included.
  double Flush(OpenMode mode = OpenMode::kReadWrite) {
    const std::unique_ptr<BlockIo> io =
        MustBeOk(CreateBlockIo({.depth = options_.depth}), "make a ring");
    const DirectFile direct = OpenDirect(dir_.Path("nvme"), mode);
    DirectCopyOptions copy;
    copy.piece_bytes = options_.piece_bytes;
    copy.alignment = direct.alignment;
    const TransferResult result = WriteImage(*io, shard_.memory(), *direct.file,
                                             shard_.image()->record, shard_.image()->layout, copy);
    MustBeOk(result.status, "flush");
    MustBeOk(direct.file->Truncate(shard_.bytes()), "truncate");
    MustBeOk(direct.file->SyncData(), "fdatasync");
    return result.cpu_seconds;
  }

  double Remote() {
    static_cast<void>(Env::System()->Unlink(dir_.Path("remote")));
    const std::shared_ptr<File> file =
        MustBeOk(Env::System()->Open(dir_.Path("remote"), OpenMode::kCreateExclusive), "create");
    BufferedCopySpec spec;
    spec.image = shard_.image();
    spec.from_memory =
        std::make_shared<RevocableMemory>(shard_.memory().data(), shard_.memory().size());
    spec.to_file = file;
    const TransferResult result = pool_->Copy(std::move(spec));
    MustBeOk(result.status, "remote write");
    MustBeOk(file->SyncData(), "fdatasync");
    return result.cpu_seconds;
  }

  double gigabytes() const { return static_cast<double>(shard_.bytes()) / kBytesPerGb; }

 private:
  const CaseOptions options_;
  const ShardInMemory shard_;
  const ScratchDirectory dir_;
  const std::unique_ptr<CopyPool> pool_;
};

Row SpreadRow(const std::string& name, const std::string& unit, const std::vector<double>& values,
              const std::string& note) {
  Row row{name, unit};
  row.better = Better::kLower;
  row.value = row.ratio = Median(values);
  row.ratio_low = *std::min_element(values.begin(), values.end());
  row.ratio_high = *std::max_element(values.begin(), values.end());
  row.note = note;
  return row;
}

}  // namespace

Report RunDrainCost(const CaseOptions& options) {
  Report report{"drain-cost", Better::kLower, {}};
  Loop loop;
  Drains drains(options);
  std::vector<double> by_flush, by_remote, flush_cpu, remote_cpu;
  Progress progress("drain-cost", options.rounds);
  for (int round = 0; round < options.rounds; ++round) {
    const double quiet = Mean(TimeSteps(loop, nullptr));
    by_flush.push_back(
        Mean(TimeSteps(loop, [&] { flush_cpu.push_back(drains.Flush() / drains.gigabytes()); })) /
        quiet);
    const double quiet_again = Mean(TimeSteps(loop, nullptr));
    by_remote.push_back(
        Mean(TimeSteps(loop, [&] { remote_cpu.push_back(drains.Remote() / drains.gigabytes()); })) /
        quiet_again);
    progress.Advance("round " + std::to_string(round + 1));
  }
  report.rows.push_back(SpreadRow("a busy loop while a shard is flushed", "x as long", by_flush,
                                  "mean time of a step, against the same loop alone"));
  report.rows.push_back(SpreadRow("a busy loop while a shard goes to remote", "x as long",
                                  by_remote, std::to_string(options.threads) + " writers"));
  report.rows.push_back(SpreadRow("flush, CPU", "s per GB", flush_cpu, "threads of ours"));
  report.rows.push_back(SpreadRow("remote, CPU", "s per GB", remote_cpu, "threads of ours"));
  if (loop.sum() == 0.0F) {  // the loop's work is not to be optimised away
    report.rows.back().note += ".";
  }
  return report;
}

}  // namespace holdfast::bench
