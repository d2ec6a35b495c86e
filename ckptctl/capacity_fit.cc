// What does not fit or does not keep up, and what to change.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/units.h"
#include "ckptctl/capacity.h"
#include "ckptctl/render.h"

namespace holdfast {
namespace {

std::string SpanText(double seconds) {
  constexpr double kSecondsMax = 1e12;
  return FormatAge(static_cast<int64_t>(std::llround(std::min(seconds, kSecondsMax) * 1000)));
}

void DoesNotFit(const std::string& place, uint64_t needed, uint64_t there,
                const std::string& change, CapacityPlan& plan) {
  if (there > 0 && needed > there) {
    plan.problems.push_back({absl::StrCat(place, ": ", FormatBytes(needed), " are needed, ",
                                          FormatBytes(there), " are there"),
                             change});
  }
}

// Of how many steps one must go, so that each is done before the next one comes.
uint64_t StepsFor(double seconds, const CapacityInput& input) {
  const double saves =
      std::ceil(seconds / (input.step_seconds * static_cast<double>(input.save_every_steps)));
  constexpr double kStepsFitMax = 1e15;
  return static_cast<uint64_t>(
      std::min(std::max(saves, 1.0) * static_cast<double>(input.save_every_steps), kStepsFitMax));
}

void DoesNotKeepUp(const std::string& tier, const TierLoad& load, const std::string& change,
                   CapacityPlan& plan) {
  if (load.on && load.time > load.interval) {
    plan.problems.push_back(
        {absl::StrCat(tier, ": one step takes ", SpanText(load.time),
                      ", and the next one comes after ", SpanText(load.interval)),
         change});
  }
}

std::string LessMemory(const CapacityInput& input, const CapacityPlan& plan) {
  std::vector<std::string> ways;
  if (input.slots_per_rank > 2) {
    const uint64_t two = plan.slots_bytes / input.slots_per_rank * 2 + plan.peer_bytes;
    ways.push_back(absl::StrCat("--slots-per-rank 2 needs ", FormatBytes(two)));
  }
  if (input.replicas > 0) {
    ways.push_back(absl::StrCat("--replicas 0 needs ", FormatBytes(plan.slots_bytes)));
  }
  ways.emplace_back("more nodes: twice as many need half as much on each");
  return absl::StrJoin(ways, "; ");
}

}  // namespace

void AddProblems(const CapacityInput& input, CapacityPlan& plan) {
  DoesNotFit("memory of a node", plan.memory_bytes(), input.memory_bytes, LessMemory(input, plan),
             plan);
  DoesNotFit("nvme of a node", plan.nvme_budget_bytes, input.nvme_bytes,
             input.nvme_keep > 1
                 ? absl::StrCat("--nvme-keep-last 1 needs ",
                                FormatBytes(NvmeBudget(input, plan, 1)), "; or larger drives")
                 : "larger drives, or more nodes",
             plan);
  DoesNotFit("remote", plan.remote_capacity_bytes, input.remote_bytes,
             "keep less there (--remote-keep-last), or ask for more", plan);
  if (plan.save_time > plan.save_interval) {
    plan.problems.push_back(
        {absl::StrCat("saves: the copy takes ", SpanText(plan.save_time),
                      ", and the next one comes after ", SpanText(plan.save_interval)),
         absl::StrCat("--save-every ", StepsFor(plan.save_time, input))});
  }
  DoesNotKeepUp("replicas", plan.peers,
                absl::StrCat("--save-every ", StepsFor(plan.peers.time, input),
                             ", a faster network, or fewer replicas"),
                plan);
  DoesNotKeepUp(
      "nvme", plan.nvme,
      absl::StrCat("--nvme-every-steps ", StepsFor(plan.nvme.time, input), ", or faster drives"),
      plan);
  DoesNotKeepUp("remote", plan.remote,
                absl::StrCat("--remote-every-ms ",
                             static_cast<uint64_t>(std::ceil(std::min(plan.remote.time, 1e12))),
                             "s, or a faster file system"),
                plan);
  if (input.drive_writes_max > 0 && plan.nvme.on &&
      plan.drive_writes_a_day > input.drive_writes_max) {
    const double least = plan.nvme.interval * plan.drive_writes_a_day / input.drive_writes_max;
    plan.problems.push_back({absl::StrFormat("drives: %.2f drive writes a day, made for %.2f",
                                             plan.drive_writes_a_day, input.drive_writes_max),
                             absl::StrCat("--nvme-every-steps ", StepsFor(least, input))});
  }
  for (size_t i = 0; i < kLosses; ++i) {
    if (plan.losses[i].possible && !plan.losses[i].survives) {
      plan.problems.push_back(
          {absl::StrCat("nothing survives the loss of ",
                        static_cast<Loss>(i) == Loss::kCluster  ? "all nodes"
                        : static_cast<Loss>(i) == Loss::kDomain ? "a failure domain"
                        : static_cast<Loss>(i) == Loss::kNode   ? "a node"
                                                                : "a node's memory"),
           "--remote-every-ms TIME, or as far as it goes --replicas 1"});
    }
  }
}

}  // namespace holdfast
