#include <algorithm>
#include <optional>
#include <thread>

#include "bench/cases.h"
#include "bench/ceiling.h"
#include "bench/harness.h"
#include "bench/memory.h"

namespace holdfast::bench {
namespace {

constexpr double kBar = 0.5;
constexpr uint32_t kSavedBy = 4;
constexpr size_t kTensorBytes = 16 * kMiB;

// Tensors of float that lie one after the other in this memory; of each the columns of one rank of
// kSavedBy, or all of it.
State StateOf(const Memory& memory, size_t bytes, size_t run_bytes, std::optional<uint32_t> rank) {
  const uint64_t columns = kSavedBy * run_bytes / sizeof(float);
  const uint64_t rows = kTensorBytes / (columns * sizeof(float));
  State state;
  char* at = memory.data();
  for (size_t i = 0; i < bytes / kTensorBytes; ++i) {
    const std::string name = "tensor." + std::to_string(i);
    if (rank.has_value()) {
      state.tensors.push_back(Tensor::Box(name, Type::kF32, {rows, columns},
                                          {0, *rank * columns / kSavedBy},
                                          {rows, columns / kSavedBy}, at));
      at += kTensorBytes / kSavedBy;
    } else {
      state.tensors.emplace_back(name, Type::kF32, std::vector{rows, columns}, at);
      at += kTensorBytes;
    }
  }
  return state;
}

std::unique_ptr<Job> OpenRank(const Daemon& daemon, uint32_t rank, uint32_t ranks, int threads) {
  JobOptions options;
  options.job = "reshard";
  options.rank = rank;
  options.world_size = ranks;
  options.socket = daemon.socket();
  options.copy_threads = static_cast<uint32_t>(threads);
  return MustSucceed(Job::Open(options), "open the job");
}

void SaveByAll(const Daemon& daemon, size_t bytes, size_t run_bytes, bool reserved) {
  std::vector<std::thread> ranks;
  for (uint32_t rank = 0; rank < kSavedBy; ++rank) {
    ranks.emplace_back([&, rank] {
      const Memory memory(bytes / kSavedBy, Memory::Kind::kPrivate);
      const std::unique_ptr<Job> job = OpenRank(daemon, rank, kSavedBy, 1);
      const State state = StateOf(memory, bytes, run_bytes, rank);
      if (reserved) {
        MustSucceed(job->Reserve(state, kCallDeadline), "reserve");
      }
      const std::unique_ptr<SaveHandle> saved = job->SaveAsync(1, state);
      MustSucceed(saved->Wait(Stage::kCommitted, kCallDeadline), "save");
    });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
}

// `reserved`: slots were made ahead, on huge pages where the kernel has them.
void Measure(size_t bytes, size_t run_bytes, bool reserved, double bar, const CaseOptions& options,
             Report& report, Progress& progress) {
  const std::string name = std::to_string(bytes / kMiB) + " MiB in runs of " +
                           std::to_string(run_bytes / 1024) + " KiB" +
                           (reserved ? "" : ", slots not reserved");
  const Daemon daemon(3 * (bytes + 256 * kMiB), 2);
  SaveByAll(daemon, bytes, run_bytes, reserved);
  const Memory tensors(bytes, Memory::Kind::kPrivate);
  const Memory source(bytes, Memory::Kind::kShared);
  State state = StateOf(tensors, bytes, run_bytes, std::nullopt);
  const std::unique_ptr<Job> job = OpenRank(daemon, 0, 1, options.threads);
  std::vector<double> copied;
  std::vector<double> whole;
  CeilingRounds ceiling;
  for (int round = 0; round < options.rounds; ++round) {
    ceiling.Measure(PiecesFrom(source, state), options.threads);
    const Stopwatch watch;
    const Restored restored = MustSucceed(job->Restore(state), "restore");
    whole.push_back(watch.Seconds());
    copied.push_back(std::chrono::duration<double>(restored.copied).count());
    if (restored.resharded_from != kSavedBy) {
      MustSucceed(Status(Code::kInternal, "it was not resharded"), "restore");
    }
    progress.Advance(name);
  }
  report.rows.push_back(
      RateRow("planned, verified, copied: " + name, bytes, copied, ceiling.Seconds(), bar, 0));
  report.rows.push_back(RateRow("whole call: " + name, bytes, whole, ceiling.Seconds(), 0, 0));
}

}  // namespace

// One rank restores what four have saved, each a fourth of the columns, from its node's memory,
// against the fastest plain copy of as many bytes out of shared memory into the same tensors.
Report RunReshardMemory(const CaseOptions& options) {
  Report report{"reshard-memory", Better::kHigher, {}};
  const size_t bytes = std::min<size_t>(options.bytes_max, kGiB);
  Progress progress("reshard-memory", 4 * options.rounds);
  Measure(bytes, 64 * 1024, true, kBar, options, report, progress);
  Measure(bytes, kMiB, true, kBar, options, report, progress);
  Measure(bytes, 4 * 1024, true, 0, options, report, progress);
  Measure(bytes, 64 * 1024, false, 0, options, report, progress);
  return report;
}

}  // namespace holdfast::bench
