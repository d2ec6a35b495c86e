#include "bench/cases.h"
#include "bench/harness.h"
#include "bench/memory.h"

namespace holdfast::bench {
namespace {

constexpr double kBar = 2;
constexpr double kGoal = 1.1;
constexpr int kSaves = 10;
constexpr int kSlots = 3;

}  // namespace

// A fresh daemon each round: `reserve` until it says ready, then ten saves; the first over the
// tenth.
Report RunFirstSave(const CaseOptions& options) {
  Report report{"first-save", Better::kLower, {}};
  const size_t bytes = std::min(kGiB, options.bytes_max);
  const Memory tensors(bytes, Memory::Kind::kPrivate);
  const State state = MakeState(tensors, bytes, 16 * kMiB);
  std::vector<double> first, tenth, ratios, ready;
  const int rounds = std::min(options.rounds, 5);
  Progress progress("first-save", rounds);
  for (int round = 0; round < rounds; ++round) {
    const Daemon daemon(kSlots * (bytes + 64 * kMiB), kSlots);
    const std::unique_ptr<Job> job = OpenJob(daemon, "first-save", options.threads);
    const Stopwatch reserving;
    MustSucceed(job->Reserve(state, kCallDeadline), "reserve");
    ready.push_back(reserving.Seconds());
    std::vector<double> saves;
    for (uint64_t step = 0; step < kSaves; ++step) {
      const Stopwatch watch;
      MustSucceed(job->Save(step, state), "save");
      saves.push_back(watch.Seconds());
    }
    first.push_back(saves.front());
    tenth.push_back(saves.back());
    ratios.push_back(saves.front() / saves.back());
    progress.Advance("round " + std::to_string(round + 1));
  }
  Row row{"first save after reserve / tenth save", "ms"};
  row.value = Median(first) * 1e3;
  row.ceiling = Median(tenth) * 1e3;
  row.ratio = Median(ratios);
  row.ratio_low = *std::min_element(ratios.begin(), ratios.end());
  row.ratio_high = *std::max_element(ratios.begin(), ratios.end());
  row.bar = kBar;
  row.goal = kGoal;
  report.rows.push_back(row);
  Row reserve{"reserve until ready, 3 slots of " + std::to_string(bytes / kMiB) + " MiB", "ms"};
  reserve.value = Median(ready) * 1e3;
  reserve.ratio = reserve.value;
  report.rows.push_back(reserve);
  return report;
}

}  // namespace holdfast::bench
