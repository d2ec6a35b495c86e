#include "bench/cases.h"
#include "bench/harness.h"
#include "bench/memory.h"

namespace holdfast::bench {
namespace {

constexpr int kSlots = 3;
constexpr double kBarMs = 5, kBarMsPerTensor = 0.005;
constexpr double kGoalMs = 2, kGoalMsPerTensor = 0.001;

}  // namespace

// How long an overlapped save keeps its caller, layout cached: against 5 ms + 5 µs per tensor.
Report RunOverlap(const CaseOptions& options) {
  Report report{"overlap", Better::kLower, {}};
  struct Shape {
    size_t tensors, tensor_bytes;
  };
  const std::vector<Shape> shapes = {
      {64, 16 * kMiB}, {10'000, size_t{48} * 1024}, {100'000, size_t{4} * 1024}};
  Progress progress("overlap", static_cast<int>(shapes.size()) * options.rounds);
  for (const Shape& shape : shapes) {
    const size_t bytes = shape.tensors * shape.tensor_bytes;
    const Memory tensors(bytes, Memory::Kind::kPrivate);
    const State state = MakeState(tensors, bytes, shape.tensor_bytes);
    const Daemon daemon(kSlots * (bytes + 128 * kMiB), kSlots);
    const std::unique_ptr<Job> job = OpenJob(daemon, "overlap", options.threads);
    MustSucceed(job->Reserve(state, kCallDeadline), "reserve");
    MustSucceed(job->Save(0, state), "save");
    std::vector<double> kept;
    for (int round = 0; round < options.rounds; ++round) {
      const Stopwatch watch;
      const std::unique_ptr<SaveHandle> handle =
          job->SaveAsync(static_cast<uint64_t>(round) + 1, state);
      kept.push_back(watch.Seconds() * 1e3);
      MustSucceed(handle->Wait(Stage::kCommitted, kCallDeadline), "wait until committed");
      progress.Advance(std::to_string(shape.tensors) + " tensors");
    }
    const auto count = static_cast<double>(shape.tensors);
    Row row{"caller kept, " + std::to_string(shape.tensors) + " tensors", "ms"};
    row.value = Median(kept);
    row.ratio = row.value;
    row.ratio_low = *std::min_element(kept.begin(), kept.end());
    row.ratio_high = *std::max_element(kept.begin(), kept.end());
    row.bar = kBarMs + kBarMsPerTensor * count;
    row.goal = kGoalMs + kGoalMsPerTensor * count;
    report.rows.push_back(row);
  }
  return report;
}

}  // namespace holdfast::bench
