// What a job of some size costs with Holdfast: memory, drives, network, remote; how far each tier
// lags behind; what is lost to failures. docs/capacity.md has each formula, with one example.
//
//   CapacityInput input{.state_bytes = 5'670'000'000'000, .ranks = 1024, …};
//   HF_ASSIGN_OR_RETURN(const CapacityPlan plan, PlanCapacity(input));
//   out << RenderCapacity(input, plan);
//
// Pure and thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "ckptctl/plan_time.h"

namespace holdfast {

inline constexpr uint32_t kShareUnits = 100'000;  // of CapacityInput::alike_share: all of it

// Which steps go to a tier: the first one of each so many, or one whenever so much time has passed.
struct TierCadence {
  bool on = true;
  uint64_t steps = 0;  // 0: by time
  double seconds = 0;
  bool told = false;  // not the default
};

// As the protection table has them (docs/operations.md, "What survives what").
enum class Loss : uint8_t { kProcess, kReboot, kNode, kDomain, kCluster };
inline constexpr size_t kLosses = 5;

struct CapacityInput {
  uint64_t state_bytes = 0;  // each byte of the job's state once
  uint32_t ranks = 0;
  uint32_t ranks_per_node = 8;
  uint32_t data_parallel = 1;  // replicas that hold `alike_share` of the state alike
  uint32_t alike_share = 0;    // of kShareUnits; the rest is split over all ranks
  bool share_replicas = true;  // policy.remote.share_replicas

  double step_seconds = 0;
  uint64_t save_every_steps = 1;
  uint32_t slots_per_rank = 3;
  uint32_t replicas = 0;
  TierCadence nvme{.on = true, .steps = 1};
  TierCadence remote{.on = true, .steps = 0, .seconds = 600};
  uint64_t nvme_keep = 2;
  uint64_t remote_keep = 3;
  uint64_t remote_keep_every_steps = 0;  // 0: none stays for ever

  uint32_t nvme_drives = 1;     // of a node
  uint64_t memory_bytes = 0;    // what a node has for checkpoints; 0: not told, nothing is judged
  uint64_t nvme_bytes = 0;      // all drives of a node; likewise
  uint64_t remote_bytes = 0;    // likewise
  double drive_writes_max = 0;  // drive writes a day that the drives are made for; likewise
  PlanRates rates;

  uint32_t nodes_per_domain = 0;  // 0: no domains
  // Days between two failures: of one node's processes, of one node (twice), of one domain, of all.
  std::array<double, kLosses> mtbf_days = {250, 500, 1000, 20'000, 365};
  std::array<bool, kLosses> mtbf_told = {};
};

// One tier's traffic. Times in seconds.
struct TierLoad {
  bool on = false;
  uint64_t save_bytes = 0;  // what one step puts there: of nvme and peers a node, of remote all
  double interval = 0;      // between two steps that go there
  double time = 0;          // that one takes
  double lag = 0;           // from the save until it is committed there
  double busy() const { return interval > 0 ? time / interval : 0; }
};

// A kind of failure: what it costs.
struct LossCost {
  bool possible = true;        // there is such a thing (no domains: no domain fails)
  bool survives = false;       // some tier still has a step
  std::string from;            // that tier
  double failures_a_year = 0;  // of the whole cluster
  double half_interval = 0;
  double lag = 0;
  double restore = 0;
  double lost() const { return half_interval + lag + restore; }
  double hours_a_year() const { return failures_a_year * lost() / 3600; }
};

struct CapacityPlan {
  uint32_t nodes = 0;
  uint32_t domains = 0;
  uint64_t image_bytes = 0;  // of a rank; the largest
  uint64_t slot_bytes = 0;
  uint64_t node_bytes = 0;  // of a node's ranks together
  double save_interval = 0;
  double save_time = 0;  // the copy into the slots: what a loop waits for at most

  uint64_t slots_bytes = 0;  // of a node
  uint64_t peer_bytes = 0;
  uint64_t memory_bytes() const { return slots_bytes + peer_bytes; }

  TierLoad peers;
  TierLoad nvme;
  TierLoad remote;
  uint64_t nvme_recycle_bytes = 0;  // of one drive
  uint64_t nvme_budget_bytes = 0;
  uint64_t nvme_day_bytes = 0;    // written to a node's drives in a day
  double drive_writes_a_day = 0;  // by nvme_bytes, else by the budget
  uint64_t remote_capacity_bytes = 0;
  uint64_t remote_day_bytes = 0;  // by which it grows: keep_every_steps
  double remote_bytes_per_s = 0;  // that all nodes together must be able to write

  std::array<LossCost, kLosses> losses;
  // Cluster hours a year, of the losses that something survives: as asked for, saves and tiers
  // twice as often, half as often.
  double hours_a_year = 0;
  double hours_a_year_twice_as_often = 0;
  double hours_a_year_half_as_often = 0;

  struct Problem {
    std::string what;
    std::string change;
  };
  std::vector<Problem> problems;  // what does not fit, or does not keep up
};

// InvalidArgument: an input that makes no sense, or sizes beyond 16 EiB.
absl::StatusOr<CapacityPlan> PlanCapacity(const CapacityInput& input);

// What nvme.bytes_max must be to keep `keep` steps.
uint64_t NvmeBudget(const CapacityInput& input, const CapacityPlan& plan, uint64_t keep);

// Parts of PlanCapacity, each in its own file.
void AddLosses(const CapacityInput& input, CapacityPlan& plan);
void AddProblems(const CapacityInput& input, CapacityPlan& plan);

std::string_view LossName(Loss loss);

// For people, with the settings to paste; and as JSON, one line.
std::string RenderCapacity(const CapacityInput& input, const CapacityPlan& plan);
std::string CapacityToJson(const CapacityInput& input, const CapacityPlan& plan);

// The part of ckptd.yaml that follows.
std::string CapacitySettings(const CapacityInput& input, const CapacityPlan& plan);

}  // namespace holdfast
