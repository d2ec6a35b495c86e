#include "bench/cases.h"
#include "bench/harness.h"
#include "bench/memory.h"

namespace holdfast::bench {
namespace {

constexpr double kBar = 0.85;
constexpr double kGoal = 0.95;
constexpr int kSlots = 3;

struct Rounds {
  std::vector<double> snapshot, save;
  CeilingRounds ceiling;
};

// One size: from the call until the bytes are in the slot with their digests ("snapshot"), and
// until Save has returned with the shard sealed ("blocking save"), against the fastest plain copy
// of the same tensors.
void MeasureSize(const Size& size, const CaseOptions& options, Report& report, Progress& progress) {
  const Memory tensors(size.bytes, Memory::Kind::kPrivate);
  const Memory target(size.bytes, Memory::Kind::kShared);
  const State state = MakeState(tensors, size.bytes, size.tensor_bytes);
  const Daemon daemon(kSlots * (size.bytes + 64 * kMiB), kSlots);
  const std::unique_ptr<Job> job = OpenJob(daemon, "snapshot", options.threads);
  MustSucceed(job->Reserve(state, kCallDeadline), "reserve");
  uint64_t step = 0;
  for (int i = 0; i < kSlots; ++i) {  // every slot mapped and filled once
    MustSucceed(job->Save(step++, state), "save");
  }
  Rounds rounds;
  for (int round = 0; round < options.rounds; ++round) {
    rounds.ceiling.Measure(PiecesInto(target, state), options.threads);
    const std::unique_ptr<SaveHandle> handle = job->SaveAsync(step++, state);
    MustSucceed(handle->Wait(Stage::kSealed, kCallDeadline), "wait until sealed");
    rounds.snapshot.push_back(std::chrono::duration<double>(handle->times().snapshot).count());
    const Stopwatch watch;
    MustSucceed(job->Save(step++, state), "save");
    rounds.save.push_back(watch.Seconds());
    progress.Advance(size.name);
  }
  Row row = RateRow("snapshot " + size.name, size.bytes, rounds.snapshot, rounds.ceiling.Seconds(),
                    kBar, kGoal);
  row.note = "ceiling: " + rounds.ceiling.Name();
  report.rows.push_back(row);
  report.rows.push_back(RateRow("blocking save, sealed " + size.name, size.bytes, rounds.save,
                                rounds.ceiling.Seconds(), 0, 0));
}

}  // namespace

Report RunSnapshot(const CaseOptions& options) {
  Report report{"snapshot", Better::kHigher, {}};
  const std::vector<Size> sizes = Sizes(options);
  Progress progress("snapshot", static_cast<int>(sizes.size()) * options.rounds);
  for (const Size& size : sizes) {
    MeasureSize(size, options, report, progress);
  }
  return report;
}

}  // namespace holdfast::bench
