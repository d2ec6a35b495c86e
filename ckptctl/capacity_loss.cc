// What failures cost: of each kind, how often it comes, from where the job would be back, how much
// training it repeats (docs/capacity.md, "Lost work").
#include <algorithm>

#include "ckptctl/capacity.h"

namespace holdfast {
namespace {

constexpr double kDaysAYear = 365;

double SecondsToMove(uint64_t bytes, uint64_t rate) {
  return static_cast<double>(bytes) / static_cast<double>(rate);
}

struct Restores {
  double memory = 0;
  double peers = 0;
  double nvme = 0;
  double remote = 0;
};

// One part after the other, as a restore goes; all nodes at once.
Restores RestoreTimes(const CapacityInput& input, const CapacityPlan& plan) {
  Restores times;
  times.memory = SecondsToMove(plan.node_bytes, input.rates.memory);
  times.peers = SecondsToMove(plan.node_bytes, input.rates.network) + times.memory;
  times.nvme = SecondsToMove(plan.node_bytes, input.rates.nvme) + times.memory;
  const bool passed_on = input.data_parallel > 1 && input.alike_share > 0 && input.share_replicas;
  times.remote = plan.remote.time +
                 (passed_on ? SecondsToMove(plan.node_bytes, input.rates.network) : 0) +
                 times.memory;
  return times;
}

void ComesFrom(const char* tier, double interval, double lag, double restore, LossCost& cost) {
  // The better one of two that survive: the one whose newest step is less old on average.
  if (cost.survives && cost.half_interval + cost.lag <= interval / 2 + lag) {
    return;
  }
  cost.survives = true;
  cost.from = tier;
  cost.half_interval = interval / 2;
  cost.lag = lag;
  cost.restore = restore;
}

double HoursAYear(const CapacityPlan& plan, double interval_factor) {
  double hours = 0;
  for (const LossCost& cost : plan.losses) {
    if (cost.possible && cost.survives) {
      hours += cost.failures_a_year *
               (cost.half_interval * interval_factor + cost.lag + cost.restore) / 3600;
    }
  }
  return hours;
}

}  // namespace

std::string_view LossName(Loss loss) {
  constexpr std::array<std::string_view, kLosses> kNames = {"process", "reboot", "node", "domain",
                                                            "all_nodes"};
  return kNames[static_cast<size_t>(loss)];
}

void AddLosses(const CapacityInput& input, CapacityPlan& plan) {
  const Restores restores = RestoreTimes(input, plan);
  const bool elsewhere = plan.peers.on && plan.nodes > input.replicas;
  const std::array<double, kLosses> units = {
      static_cast<double>(plan.nodes), static_cast<double>(plan.nodes),
      static_cast<double>(plan.nodes), static_cast<double>(plan.domains), 1};
  for (size_t i = 0; i < kLosses; ++i) {
    const Loss loss = static_cast<Loss>(i);
    LossCost& cost = plan.losses[i];
    cost.possible = loss != Loss::kDomain || plan.domains > 0;
    cost.failures_a_year = units[i] * kDaysAYear / input.mtbf_days[i];
    if (loss == Loss::kProcess) {
      ComesFrom("memory", plan.save_interval, plan.save_time, restores.memory, cost);
      continue;
    }
    const bool peers =
        loss == Loss::kDomain ? elsewhere && plan.domains > 1 : elsewhere && loss != Loss::kCluster;
    if (peers) {
      ComesFrom("peer", plan.peers.interval, plan.peers.lag, restores.peers, cost);
    }
    if (loss == Loss::kReboot && plan.nvme.on) {
      ComesFrom("nvme", plan.nvme.interval, plan.nvme.lag, restores.nvme, cost);
    }
    if (plan.remote.on) {
      ComesFrom("remote", plan.remote.interval, plan.remote.lag, restores.remote, cost);
    }
  }
  plan.hours_a_year = HoursAYear(plan, 1);
  plan.hours_a_year_twice_as_often = HoursAYear(plan, 0.5);
  plan.hours_a_year_half_as_often = HoursAYear(plan, 2);
}

}  // namespace holdfast
