#include "ckptctl/capacity.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/units.h"

namespace holdfast {
namespace {

constexpr double kDaySeconds = 86'400;
constexpr uint64_t kSlotMultiple = 2 * kMiB;  // docs/formats.md: a slot's size
// Beside what keep_last keeps: one being written, and one that a newer one has replaced but whose
// files are not gone yet (docs/operations.md, "Budgets").
constexpr uint64_t kNvmeBeside = 2;
constexpr uint64_t kRemoteBeside = 1;
constexpr uint64_t kPeerSteps = 2;          // a step stays until the next one is there
constexpr uint64_t kWatermarkPercent = 90;  // nvme.high_watermark_percent's default

// WholeBytes bytes, and whether anything was ever beyond them.
class WholeBytes {
 public:
  uint64_t Times(uint64_t a, uint64_t b) {
    uint64_t result = 0;
    const bool overflow = __builtin_mul_overflow(a, b, &result);
    return Keep(overflow, result);
  }
  uint64_t Plus(uint64_t a, uint64_t b) {
    uint64_t result = 0;
    const bool overflow = __builtin_add_overflow(a, b, &result);
    return Keep(overflow, result);
  }
  // a × n / d without the product overflowing; rounded down.
  uint64_t Part(uint64_t a, uint64_t n, uint64_t d) {
    return Plus(Times(a / d, n), Times(a % d, n) / d);
  }
  uint64_t FromDouble(double value) {
    constexpr double kBeyond = 18'446'744'073'709'551'616.0;  // 2^64
    return Keep(!(value < kBeyond), value < kBeyond ? static_cast<uint64_t>(value) : 0);
  }
  bool beyond() const { return beyond_; }

 private:
  uint64_t Keep(bool overflow, uint64_t result) {
    beyond_ = beyond_ || overflow;
    return overflow ? UINT64_MAX : result;
  }
  bool beyond_ = false;
};

uint64_t DividedUp(uint64_t a, uint64_t b) {
  return a / b + (a % b == 0 ? 0 : 1);
}

double TimeToMove(uint64_t bytes, uint64_t rate) {
  return static_cast<double>(bytes) / static_cast<double>(rate);
}

absl::Status CheckInput(const CapacityInput& input) {
  const auto wrong = [](const std::string& what) { return absl::InvalidArgumentError(what); };
  if (input.state_bytes == 0) {
    return wrong("the state has no bytes: tell --params or --state-bytes");
  }
  if (input.ranks == 0 || input.ranks_per_node == 0 || input.slots_per_rank < 2 ||
      input.nvme_drives == 0) {
    return wrong(
        "there is at least one rank, one rank and one drive a node, and two slots a rank: tell "
        "--ranks");
  }
  if (input.data_parallel == 0 || input.ranks % input.data_parallel != 0) {
    return wrong(absl::StrCat("--data-parallel ", input.data_parallel, ": ", input.ranks,
                              " ranks cannot be divided by it"));
  }
  if (!(input.step_seconds > 0) || input.save_every_steps == 0) {
    return wrong("a step takes time, and steps are saved");
  }
  return absl::OkStatus();
}

void AddMemory(const CapacityInput& input, CapacityPlan& plan, WholeBytes& whole) {
  plan.nodes = static_cast<uint32_t>(DividedUp(input.ranks, input.ranks_per_node));
  plan.domains = input.nodes_per_domain == 0
                     ? 0
                     : static_cast<uint32_t>(DividedUp(plan.nodes, input.nodes_per_domain));
  const uint64_t alike = whole.Part(input.state_bytes, input.alike_share, kShareUnits);
  const uint64_t held =
      whole.Plus(input.state_bytes - alike, whole.Times(alike, input.data_parallel));
  plan.image_bytes = DividedUp(held, input.ranks);
  plan.slot_bytes = whole.Times(DividedUp(plan.image_bytes, kSlotMultiple), kSlotMultiple);
  const uint64_t on_node = std::min(input.ranks, input.ranks_per_node);
  plan.node_bytes = whole.Times(plan.image_bytes, on_node);
  plan.slots_bytes = whole.Times(whole.Times(plan.slot_bytes, on_node), input.slots_per_rank);
  const uint64_t slots_of_node = whole.Times(plan.slot_bytes, on_node);
  plan.peer_bytes = whole.Times(slots_of_node, kPeerSteps * input.replicas);
}

double IntervalOf(const TierCadence& cadence, const CapacityInput& input, double save_interval) {
  if (cadence.steps > 0) {
    // Of each `steps` steps the first one that is saved goes: one in so many, or each one that is.
    return input.step_seconds *
           static_cast<double>(std::max(cadence.steps, input.save_every_steps));
  }
  return std::max(std::ceil(cadence.seconds / save_interval), 1.0) * save_interval;
}

void AddPeersAndNvme(const CapacityInput& input, CapacityPlan& plan, WholeBytes& whole) {
  plan.peers.on = input.replicas > 0;
  if (plan.peers.on) {
    plan.peers.save_bytes = whole.Times(plan.node_bytes, input.replicas);
    plan.peers.interval = plan.save_interval;
    plan.peers.time = TimeToMove(plan.peers.save_bytes, input.rates.network);
    plan.peers.lag = plan.save_time + plan.peers.time;
  }
  plan.nvme.on = input.nvme.on;
  if (!plan.nvme.on) {
    return;
  }
  plan.nvme.save_bytes = plan.node_bytes;
  plan.nvme.interval = IntervalOf(input.nvme, input, plan.save_interval);
  plan.nvme.time = TimeToMove(plan.node_bytes, input.rates.nvme);
  plan.nvme.lag = plan.save_time + plan.nvme.time;
  // Rank modulo drives says which drive: one may have a rank more than another.
  const uint64_t on_node = std::min(input.ranks, input.ranks_per_node);
  plan.nvme_recycle_bytes = whole.Times(plan.image_bytes, DividedUp(on_node, input.nvme_drives));
  const uint64_t used =
      whole.Plus(whole.Times(plan.node_bytes, whole.Plus(input.nvme_keep, kNvmeBeside)),
                 whole.Times(plan.nvme_recycle_bytes, input.nvme_drives));
  whole.Times(used, 100);  // NvmeBudget's own
  plan.nvme_budget_bytes = whole.beyond() ? 0 : NvmeBudget(input, plan, input.nvme_keep);
  plan.nvme_day_bytes =
      whole.FromDouble(static_cast<double>(plan.node_bytes) * (kDaySeconds / plan.nvme.interval));
  plan.drive_writes_a_day =
      static_cast<double>(plan.nvme_day_bytes) /
      static_cast<double>(input.nvme_bytes > 0 ? input.nvme_bytes : plan.nvme_budget_bytes);
}

void AddRemote(const CapacityInput& input, CapacityPlan& plan, WholeBytes& whole) {
  plan.remote.on = input.remote.on;
  if (!plan.remote.on) {
    return;
  }
  plan.remote.save_bytes =
      input.share_replicas ? input.state_bytes : whole.Times(plan.image_bytes, input.ranks);
  plan.remote.interval = IntervalOf(input.remote, input, plan.save_interval);
  plan.remote.time =
      std::max(TimeToMove(plan.remote.save_bytes, input.rates.remote_all),
               TimeToMove(DividedUp(plan.remote.save_bytes, plan.nodes), input.rates.remote));
  // From nvme where the step goes there too, else from its slot.
  plan.remote.lag = (plan.nvme.on ? plan.nvme.lag : plan.save_time) + plan.remote.time;
  plan.remote_capacity_bytes =
      whole.Times(plan.remote.save_bytes, whole.Plus(input.remote_keep, kRemoteBeside));
  plan.remote_bytes_per_s = static_cast<double>(plan.remote.save_bytes) / plan.remote.interval;
  if (input.remote_keep_every_steps > 0) {
    const double between =
        input.step_seconds *
        static_cast<double>(std::max(input.remote_keep_every_steps, input.save_every_steps));
    plan.remote_day_bytes =
        whole.FromDouble(static_cast<double>(plan.remote.save_bytes) * (kDaySeconds / between));
  }
}

}  // namespace

uint64_t NvmeBudget(const CapacityInput& input, const CapacityPlan& plan, uint64_t keep) {
  const uint64_t used =
      plan.node_bytes * (keep + kNvmeBeside) + plan.nvme_recycle_bytes * input.nvme_drives;
  return DividedUp(used * 100, kWatermarkPercent);
}

absl::StatusOr<CapacityPlan> PlanCapacity(const CapacityInput& input) {
  if (absl::Status sense = CheckInput(input); !sense.ok()) {
    return sense;
  }
  CapacityPlan plan;
  WholeBytes whole;
  AddMemory(input, plan, whole);
  plan.save_interval = input.step_seconds * static_cast<double>(input.save_every_steps);
  plan.save_time = TimeToMove(plan.node_bytes, input.rates.memory);
  AddPeersAndNvme(input, plan, whole);
  AddRemote(input, plan, whole);
  if (whole.beyond()) {
    return absl::InvalidArgumentError(
        "what was asked for comes to more than 16 EiB in one place: is a number too large by a "
        "unit (--params, --state-bytes, --nvme-keep-last, --remote-keep-last)?");
  }
  AddLosses(input, plan);
  AddProblems(input, plan);
  return plan;
}

}  // namespace holdfast
