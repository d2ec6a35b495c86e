#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "bench/cases.h"
#include "bench/cost.h"
#include "bench/model_layouts.h"
#include "recovery/reshard.h"

namespace holdfast::bench {
namespace {

constexpr Mesh kSaved{.tensor = 8, .data = 96, .pipeline = 16};   // 12,288 ranks
constexpr Mesh kWanted{.tensor = 8, .data = 64, .pipeline = 16};  // 8,192
constexpr Mesh kOtherSplit{.tensor = 16, .data = 64, .pipeline = 8};
constexpr uint32_t kSampled = 16;  // ranks that are planned for in each round
constexpr double kPlanBarMs = 50;
constexpr double kPlanBarMb = 50;

// What a reader of all layouts has before it: encoded, each with the ranks that have it.
std::vector<std::string> EncodedLayouts(const Model& model, const Mesh& mesh) {
  std::vector<std::string> layouts;
  for (Rank rank = 0; rank < mesh.ranks(); ++rank) {
    const auto image = PlanImage(SlicesOf(model, mesh, rank), rank);
    if (!image.ok()) {
      std::fprintf(stderr, "reshard: %s\n", ToString(image.status()).c_str());
      std::exit(1);
    }
    layouts.push_back(image->layout_bytes);
  }
  return layouts;
}

struct Planned {
  double ms = 0;
  double mb = 0;
  double amplification = 0;  // bytes read from what was saved, by bytes wanted
};

// For one rank, from layouts to what is read of whom.
Planned PlanFor(const std::vector<std::string>& saved, std::vector<Want> wants, uint64_t reader) {
  const double heap = HeapMb();
  const double before = CpuMs();
  auto planner = ReshardPlanner::For(std::move(wants));
  absl::Status status = planner.status();
  for (Rank rank = 0; status.ok() && rank < saved.size(); ++rank) {
    status = planner->Add(saved[rank], std::span(&rank, 1));
  }
  if (!status.ok()) {
    std::fprintf(stderr, "reshard: %s\n", ToString(status).c_str());
    std::exit(1);
  }
  const ReshardPlan plan =
      planner->Plan({[](Rank) { return std::optional<uint64_t>(0); }, nullptr, reader});
  const auto reads = ReadsOf(plan, 0);
  Planned planned{CpuMs() - before, HeapMb() - heap, 0};
  if (!plan.problems.empty()) {
    std::fprintf(stderr, "reshard: %s\n", plan.problems[0].text.c_str());
    std::exit(1);
  }
  uint64_t read = 0;
  for (const auto& runs : reads) {
    for (const ByteRun& run : runs) {
      read += run.bytes;
    }
  }
  planned.amplification = static_cast<double>(read) / static_cast<double>(plan.bytes);
  return planned;
}

struct Sample {
  std::vector<double> ms;
  std::vector<double> mb;
  std::vector<double> amplification;
};

// Ranks from all over the mesh.
void PlanForSome(const Model& model, const Mesh& mesh, const std::vector<std::string>& saved,
                 Sample& sample) {
  for (uint32_t i = 0; i < kSampled; ++i) {
    const Rank rank = static_cast<Rank>(uint64_t{mesh.ranks() - 1} * i / (kSampled - 1));
    std::vector<Want> wants;
    for (Slice& slice : SlicesOf(model, mesh, rank)) {
      wants.push_back({std::move(slice), "", false});
    }
    const Planned planned = PlanFor(saved, std::move(wants), rank);
    sample.ms.push_back(planned.ms);
    sample.mb.push_back(planned.mb);
    sample.amplification.push_back(planned.amplification);
  }
}

}  // namespace

// Llama-3 405B with all of its optimizer's state, from 12,288 ranks to 8,192, on one core.
Report RunReshard(const CaseOptions& options) {
  Report report{"reshard", Better::kLower, {}};
  Progress progress("reshard", 1 + options.rounds);
  const Model model = Llama405B();
  const std::vector<std::string> saved = EncodedLayouts(model, kSaved);
  progress.Advance("layouts of 12288 ranks");
  Sample same_split;
  Sample other_split;
  for (int round = 0; round < options.rounds; ++round) {
    PlanForSome(model, kWanted, saved, same_split);
    PlanForSome(model, kOtherSplit, saved, other_split);
    progress.Advance("plans");
  }
  report.rows.push_back(CostRow("plan for one rank of 8192: CPU", "ms", same_split.ms, kPlanBarMs));
  report.rows.push_back(
      CostRow("plan for one rank of 8192: memory", "MB", same_split.mb, kPlanBarMb));
  report.rows.push_back(
      CostRow("  twice the tensor split, half the stages: CPU", "ms", other_split.ms, kPlanBarMs));
  report.rows.push_back(CostRow("  twice the tensor split, half the stages: memory", "MB",
                                other_split.mb, kPlanBarMb));
  std::vector<double> cluster;
  for (const double ms : same_split.ms) {
    cluster.push_back(ms * kWanted.ranks() / 1e3);
  }
  report.rows.push_back(CostRow("all ranks together: CPU", "s", cluster));
  report.rows.push_back(
      CostRow("a lone reader: bytes read by bytes wanted", "", same_split.amplification));
  report.rows.push_back(
      CostRow("  twice the tensor split, half the stages", "", other_split.amplification));
  return report;
}

}  // namespace holdfast::bench
