#include "bench/cases.h"
#include "bench/harness.h"
#include "bench/memory.h"

namespace holdfast::bench {
namespace {

constexpr double kBar = 0.85;
constexpr double kGoal = 0.95;

}  // namespace

// In-place restore into tensors that are there, every block verified, against the fastest plain
// copy out of shared memory into the same tensors. `Restored::copied` is what the library spent
// copying; the whole call is reported too.
Report RunRestore(const CaseOptions& options) {
  Report report{"restore", Better::kHigher, {}};
  const std::vector<Size> sizes = Sizes(options);
  Progress progress("restore", static_cast<int>(sizes.size()) * options.rounds);
  for (const Size& size : sizes) {
    const Memory tensors(size.bytes, Memory::Kind::kPrivate);
    const Memory source(size.bytes, Memory::Kind::kShared);
    State state = MakeState(tensors, size.bytes, size.tensor_bytes);
    const Daemon daemon(2 * (size.bytes + 64 * kMiB), 2);
    std::unique_ptr<Job> job = OpenJob(daemon, "restore", options.threads);
    MustSucceed(job->Save(1, state), "save");
    std::vector<double> whole, copied;
    CeilingRounds ceiling;
    for (int round = 0; round < options.rounds; ++round) {
      ceiling.Measure(PiecesFrom(source, state), options.threads);
      const Stopwatch watch;
      const Restored restored = MustSucceed(job->Restore(state), "restore");
      whole.push_back(watch.Seconds());
      copied.push_back(std::chrono::duration<double>(restored.copied).count());
      progress.Advance(size.name);
    }
    // The bar speaks of bytes; very many small tensors are reported beside it.
    const bool few_tensors = state.tensors.size() < 10'000;
    report.rows.push_back(RateRow("restore in place, verified " + size.name, size.bytes, copied,
                                  ceiling.Seconds(), few_tensors ? kBar : 0,
                                  few_tensors ? kGoal : 0));
    report.rows.push_back(
        RateRow("whole call " + size.name, size.bytes, whole, ceiling.Seconds(), 0, 0));
  }
  return report;
}

}  // namespace holdfast::bench
