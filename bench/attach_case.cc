#include "bench/cases.h"
#include "bench/harness.h"
#include "bench/memory.h"

namespace holdfast::bench {
namespace {

constexpr double kBarMs = 10;
constexpr double kGoalMs = 2;

}  // namespace

// Read-only views of a committed shard, before verification, any size.
Report RunAttach(const CaseOptions& options) {
  Report report{"attach", Better::kLower, {}};
  const std::vector<Size> sizes = Sizes(options);
  Progress progress("attach", static_cast<int>(sizes.size()) * options.rounds);
  for (const Size& size : sizes) {
    const Memory tensors(size.bytes, Memory::Kind::kPrivate);
    const State state = MakeState(tensors, size.bytes, size.tensor_bytes);
    const Daemon daemon(2 * (size.bytes + 64 * kMiB), 2);
    const std::unique_ptr<Job> job = OpenJob(daemon, "attach", options.threads);
    MustSucceed(job->Save(1, state), "save");
    std::vector<double> ms;
    for (int round = 0; round < options.rounds; ++round) {
      AttachOptions attach;
      attach.job = "attach";
      attach.socket = daemon.socket();
      const Stopwatch watch;
      const std::unique_ptr<View> view = MustSucceed(Attach(attach), "attach");
      ms.push_back(watch.Seconds() * 1e3);
      if (view->tensors().size() != state.tensors.size()) {
        MustSucceed(Status(Code::kInternal, "the view lacks tensors"), "attach");
      }
      progress.Advance(size.name);
    }
    Row row{"attach " + size.name, "ms"};
    row.value = Median(ms);
    row.ratio = row.value;
    row.ratio_low = *std::min_element(ms.begin(), ms.end());
    row.ratio_high = *std::max_element(ms.begin(), ms.end());
    // The row speaks of bytes, whatever their number; very many tensors are reported beside it.
    const bool few_tensors = state.tensors.size() < 10'000;
    row.bar = few_tensors ? kBarMs : 0;
    row.goal = few_tensors ? kGoalMs : 0;
    report.rows.push_back(row);
  }
  return report;
}

}  // namespace holdfast::bench
