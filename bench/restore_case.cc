#include "bench/cases.h"
#include "bench/fresh_restore.h"
#include "bench/harness.h"
#include "bench/memory.h"

namespace holdfast::bench {
namespace {

constexpr double kBar = 0.85;
constexpr double kGoal = 0.95;
constexpr int kFreshRoundsMax = 5;  // each builds its state anew

// The bar speaks of bytes; very many small tensors are reported beside it.
bool HasBar(const Size& size) {
  return size.bytes / size.tensor_bytes < 10'000;
}

void AddRows(const std::string& what, const Size& size, const std::vector<double>& copied,
             const std::vector<double>& whole, const CeilingRounds& ceiling, bool bar,
             Report& report) {
  report.rows.push_back(RateRow(what + ", verified " + size.name, size.bytes, copied,
                                ceiling.Seconds(), bar ? kBar : 0, bar ? kGoal : 0));
  report.rows.push_back(
      RateRow("whole call, " + what + " " + size.name, size.bytes, whole, ceiling.Seconds(), 0, 0));
}

// In the process that saved, which has the slot mapped.
void MeasureInPlace(const Size& size, const CaseOptions& options, Report& report,
                    Progress& progress) {
  const Memory tensors(size.bytes, Memory::Kind::kPrivate);
  const Memory source(size.bytes, Memory::Kind::kShared);
  State state = MakeState(tensors, size.bytes, size.tensor_bytes);
  const Daemon daemon(2 * (size.bytes + 64 * kMiB), 2);
  const std::unique_ptr<Job> job = OpenJob(daemon, "restore", options.threads);
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
  AddRows("in place", size, copied, whole, ceiling, HasBar(size), report);
}

enum class Slots { kReserved, kNotReserved };

// In a process that was just started, every round another one. What saved has ended.
void MeasureFresh(const Size& size, Slots slots, const CaseOptions& options, Report& report,
                  Progress& progress) {
  const Daemon daemon(2 * (size.bytes + 64 * kMiB), 2);
  {
    const Memory tensors(size.bytes, Memory::Kind::kPrivate);
    const State state = MakeState(tensors, size.bytes, size.tensor_bytes);
    const std::unique_ptr<Job> job = OpenJob(daemon, "restore", options.threads);
    if (slots == Slots::kReserved) {
      MustSucceed(job->Reserve(state, kCallDeadline), "reserve");
    }
    MustSucceed(job->Save(1, state), "save");
  }
  std::vector<double> whole, copied;
  CeilingRounds ceiling;
  const int rounds = std::min(options.rounds, kFreshRoundsMax);
  for (int round = 0; round < rounds; ++round) {
    const FreshRestore restored = RestoreInFreshProcess(daemon, "restore", size, options.threads);
    ceiling.Add(restored.ceiling);
    whole.push_back(restored.whole);
    copied.push_back(restored.copied);
    progress.Advance("fresh process, " + size.name);
  }
  const bool reserved = slots == Slots::kReserved;
  AddRows(reserved ? "fresh process" : "fresh process, slots not reserved", size, copied, whole,
          ceiling, reserved && HasBar(size), report);
}

}  // namespace

// Restore into tensors that are there, every block verified, against the fastest plain copy out of
// shared memory into the same tensors. `Restored::copied` is what the library spent mapping and
// copying; the whole call is reported too.
Report RunRestore(const CaseOptions& options) {
  Report report{"restore", Better::kHigher, {}};
  const std::vector<Size> sizes = Sizes(options);
  const int fresh_rounds = std::min(options.rounds, kFreshRoundsMax);
  const auto count = static_cast<int>(sizes.size());
  Progress progress("restore", count * (options.rounds + fresh_rounds) + fresh_rounds);
  for (const Size& size : sizes) {
    MeasureInPlace(size, options, report, progress);
  }
  for (const Size& size : sizes) {
    MeasureFresh(size, Slots::kReserved, options, report, progress);
  }
  MeasureFresh(sizes.front(), Slots::kNotReserved, options, report, progress);
  return report;
}

}  // namespace holdfast::bench
