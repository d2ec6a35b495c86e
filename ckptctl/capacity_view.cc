// What plan-capacity shows: text, settings to paste, JSON.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/units.h"
#include "ckptctl/capacity.h"
#include "ckptctl/json.h"
#include "ckptctl/render.h"

namespace holdfast {
namespace {

using nlohmann::ordered_json;

int64_t WholeMs(double seconds) {
  constexpr double kMost = 1e15;
  return static_cast<int64_t>(std::llround(std::min(seconds * 1000, kMost)));
}

std::string TimeText(double seconds) {
  return FormatAge(seconds > 0 ? std::max<int64_t>(WholeMs(seconds), 1) : 0);
}

std::string RateText(double bytes_per_s) {
  constexpr double kMost = 1.8e19;
  return FormatRate(static_cast<uint64_t>(std::min(bytes_per_s, kMost)), std::chrono::seconds(1));
}

std::string ShareText(double of_one) {
  return absl::StrFormat("%.*f %%", of_one < 0.1 ? 2 : 0, std::min(of_one * 100, 1e9));
}

std::string HoursText(double hours) {
  return absl::StrFormat("%.*f h", hours < 10 ? 2 : 0, std::min(hours, 1e15));
}

void AddMemoryRows(const CapacityInput& input, const CapacityPlan& plan, Table& facts) {
  facts.AddRow({"state", absl::StrCat(FormatBytes(input.state_bytes), " on ",
                                      Count(input.ranks, "rank", "ranks"), " and ",
                                      Count(plan.nodes, "node", "nodes"))});
  facts.AddRow(
      {"a rank", absl::StrCat("image ", FormatBytes(plan.image_bytes), ", slot ",
                              FormatBytes(plan.slot_bytes), ", ", input.slots_per_rank, " slots")});
  facts.AddRow({"a save", absl::StrCat("every ", TimeText(plan.save_interval), "; the copy takes ",
                                       TimeText(plan.save_time), ": ",
                                       ShareText(plan.save_time / plan.save_interval),
                                       " of the time, if nothing overlaps it")});
  facts.AddRow(
      {"memory",
       absl::StrCat(FormatBytes(plan.memory_bytes()), " a node: ", FormatBytes(plan.slots_bytes),
                    " of slots, ", FormatBytes(plan.peer_bytes), " for other nodes' replicas")});
}

void AddTierRows(const CapacityInput& input, const CapacityPlan& plan, Table& facts) {
  const auto behind = [](const TierLoad& load) {
    return absl::StrCat("; a step is there ", TimeText(load.lag),
                        " after its save, the newest one ", TimeText(load.lag + load.interval),
                        " old at most");
  };
  if (plan.peers.on) {
    facts.AddRow({"network",
                  absl::StrCat(FormatBytes(plan.peers.save_bytes), " in and out of a node a save, ",
                               TimeText(plan.peers.time), ": ", ShareText(plan.peers.busy()),
                               " of the link", behind(plan.peers))});
  }
  if (plan.nvme.on) {
    facts.AddRow(
        {"nvme", absl::StrCat(FormatBytes(plan.nvme_budget_bytes), " a node; one step every ",
                              TimeText(plan.nvme.interval), ", ", TimeText(plan.nvme.time), ": ",
                              ShareText(plan.nvme.busy()), " of the drives", behind(plan.nvme))});
    facts.AddRow(
        {"  wear", absl::StrCat(FormatBytes(plan.nvme_day_bytes), " a day and node, ",
                                absl::StrFormat("%.2f", std::min(plan.drive_writes_a_day, 1e9)),
                                " drive writes a day of ",
                                input.nvme_bytes > 0 ? FormatBytes(input.nvme_bytes)
                                                     : std::string("that budget"))});
  }
  if (plan.remote.on) {
    facts.AddRow({"remote", absl::StrCat(FormatBytes(plan.remote_capacity_bytes), "; ",
                                         FormatBytes(plan.remote.save_bytes), " every ",
                                         TimeText(plan.remote.interval), ", ",
                                         TimeText(plan.remote.time), behind(plan.remote))});
    facts.AddRow({"  needs", absl::StrCat(RateText(plan.remote_bytes_per_s),
                                          " of all nodes together: ", ShareText(plan.remote.busy()),
                                          " of what there is")});
    if (plan.remote_day_bytes > 0) {
      facts.AddRow({"  grows", absl::StrCat("by ", FormatBytes(plan.remote_day_bytes),
                                            " a day, by what stays for ever")});
    }
  }
}

std::string LossTitle(Loss loss) {
  constexpr std::array<const char*, kLosses> kTitles = {
      "a process dies", "a node reboots", "a node dies", "a failure domain dies", "all nodes die"};
  return kTitles[static_cast<size_t>(loss)];
}

std::string RenderLosses(const CapacityPlan& plan) {
  Table table({{"IF", Align::kLeft},
               {"A YEAR", Align::kRight},
               {"FROM", Align::kLeft},
               {"HALF INTERVAL", Align::kRight},
               {"LAG", Align::kRight},
               {"RESTORE", Align::kRight},
               {"LOST EACH", Align::kRight},
               {"LOST A YEAR", Align::kRight}});
  for (size_t i = 0; i < kLosses; ++i) {
    const LossCost& cost = plan.losses[i];
    if (!cost.possible) {
      continue;
    }
    const std::string often = absl::StrFormat("%.*f", cost.failures_a_year < 10 ? 2 : 0,
                                              std::min(cost.failures_a_year, 1e12));
    if (!cost.survives) {
      table.AddRow(
          {LossTitle(static_cast<Loss>(i)), often, "nothing", "", "", "", "everything", ""});
      continue;
    }
    table.AddRow({LossTitle(static_cast<Loss>(i)), often, cost.from, TimeText(cost.half_interval),
                  TimeText(cost.lag), TimeText(cost.restore), TimeText(cost.lost()),
                  HoursText(cost.hours_a_year())});
  }
  return table.Render("  ");
}

std::string Assumptions(const CapacityInput& input, const CapacityPlan& plan) {
  std::vector<std::string> assumed;
  std::vector<std::string> told;
  for (size_t i = 0; i < kLosses; ++i) {
    if (plan.losses[i].possible) {
      (input.mtbf_told[i] ? told : assumed)
          .push_back(absl::StrFormat("%s every %.6g days%s", LossTitle(static_cast<Loss>(i)),
                                     input.mtbf_days[i],
                                     static_cast<Loss>(i) == Loss::kCluster ? "" : ", each"));
    }
  }
  const std::vector<std::string>& names = input.rates.told;
  for (const PlanRateName& rate : PlanRateNames()) {
    const bool is_told = std::find(names.begin(), names.end(), rate.name) != names.end();
    (is_told ? told : assumed)
        .push_back(absl::StrCat(std::string(rate.name), " ",
                                RateText(static_cast<double>(input.rates.*rate.rate)), " ",
                                std::string(rate.unit_of)));
  }
  std::string out;
  if (!told.empty()) {
    absl::StrAppend(&out, "told:    ", absl::StrJoin(told, "; "), "\n");
  }
  if (!assumed.empty()) {
    absl::StrAppend(&out, "assumed: ", absl::StrJoin(assumed, "; "), "\n");
  }
  return out;
}

// Whole GiB where that rounds by little, and never down.
std::string SettingText(uint64_t bytes) {
  const uint64_t unit = bytes >= 100 * kGiB ? kGiB : kMiB;
  return absl::StrCat(bytes / unit + (bytes % unit == 0 ? 0 : 1), unit == kGiB ? "GiB" : "MiB");
}

std::string EveryOf(const TierCadence& cadence) {
  return cadence.steps > 0 ? absl::StrCat("every_steps: ", cadence.steps, ", every_ms: 0")
                           : absl::StrCat("every_steps: 0, every_ms: ",
                                          WholeMs(cadence.seconds) % 1000 == 0
                                              ? absl::StrCat(WholeMs(cadence.seconds) / 1000, "s")
                                              : absl::StrCat(WholeMs(cadence.seconds), "ms"));
}

ordered_json LoadToJson(const TierLoad& load) {
  if (!load.on) {
    return nullptr;
  }
  return {{"save_bytes", load.save_bytes},
          {"interval_ms", WholeMs(load.interval)},
          {"time_ms", WholeMs(load.time)},
          {"lag_ms", WholeMs(load.lag)},
          {"busy", load.busy()}};
}

ordered_json LossesToJson(const CapacityInput& input, const CapacityPlan& plan) {
  ordered_json losses = ordered_json::array();
  for (size_t i = 0; i < kLosses; ++i) {
    const LossCost& cost = plan.losses[i];
    if (!cost.possible) {
      continue;
    }
    ordered_json one;
    one["kind"] = LossName(static_cast<Loss>(i));
    one["mtbf_days"] = input.mtbf_days[i];
    one["mtbf_told"] = input.mtbf_told[i];
    one["failures_a_year"] = cost.failures_a_year;
    one["survives"] = cost.survives;
    one["from"] = cost.from;
    one["half_interval_ms"] = WholeMs(cost.half_interval);
    one["lag_ms"] = WholeMs(cost.lag);
    one["restore_ms"] = WholeMs(cost.restore);
    one["hours_a_year"] = cost.survives ? ordered_json(cost.hours_a_year()) : ordered_json(nullptr);
    losses.push_back(std::move(one));
  }
  return losses;
}

}  // namespace

std::string CapacitySettings(const CapacityInput& input, const CapacityPlan& plan) {
  // (Sums of what was rounded up: each part fits.)
  std::string out = absl::StrCat(
      "memory: {slots_per_rank: ", input.slots_per_rank,
      ", bytes_max: ", SettingText(plan.memory_bytes()),
      ", peer_bytes_max: ", plan.peer_bytes == 0 ? "0" : SettingText(plan.peer_bytes), "}\n");
  std::string policy = absl::StrCat("policy:\n  replicas: ", input.replicas, "\n");
  if (plan.nvme.on) {
    std::vector<std::string> dirs;
    for (uint32_t i = 0; i < input.nvme_drives; ++i) {
      dirs.push_back(absl::StrCat("/mnt/nvme", i, "/holdfast"));
    }
    absl::StrAppend(&out, "nvme: {dirs: [", absl::StrJoin(dirs, ", "),
                    "], bytes_max: ", SettingText(plan.nvme_budget_bytes),
                    ", recycle_bytes_max: ", SettingText(plan.nvme_recycle_bytes), "}\n");
    absl::StrAppend(&policy, "  nvme: {", EveryOf(input.nvme), ", keep_last: ", input.nvme_keep,
                    "}\n");
  }
  if (plan.remote.on) {
    absl::StrAppend(&out, "remote: {dir: /mnt/remote/holdfast}\n");
    absl::StrAppend(&policy, "  remote: {", EveryOf(input.remote),
                    ", keep_last: ", input.remote_keep,
                    input.remote_keep_every_steps > 0
                        ? absl::StrCat(", keep_every_steps: ", input.remote_keep_every_steps)
                        : "",
                    input.share_replicas ? "" : ", share_replicas: false", "}\n");
  }
  return out + policy;
}

std::string RenderCapacity(const CapacityInput& input, const CapacityPlan& plan) {
  Table facts({{"", Align::kLeft}, {"", Align::kLeft}});
  AddMemoryRows(input, plan, facts);
  AddTierRows(input, plan, facts);
  std::string out =
      absl::StrCat(facts.RenderWithoutTitles(""), "\n", RenderLosses(plan), "\n",
                   "lost a year, of the whole cluster: ", HoursText(plan.hours_a_year),
                   "; with everything twice as often ", HoursText(plan.hours_a_year_twice_as_often),
                   ", half as often ", HoursText(plan.hours_a_year_half_as_often), "\n",
                   Assumptions(input, plan), "\n", "# ckptd.yaml\n", CapacitySettings(input, plan));
  if (!plan.problems.empty()) {
    absl::StrAppend(&out, "\n");
  }
  for (const CapacityPlan::Problem& problem : plan.problems) {
    absl::StrAppend(&out, "PROBLEM: ", problem.what, "\n         change: ", problem.change, "\n");
  }
  return out;
}

std::string CapacityToJson(const CapacityInput& input, const CapacityPlan& plan) {
  ordered_json json;
  json["fits"] = plan.problems.empty();
  json["state_bytes"] = input.state_bytes;
  json["ranks"] = input.ranks;
  json["nodes"] = plan.nodes;
  json["domains"] = plan.domains;
  json["image_bytes"] = plan.image_bytes;
  json["slot_bytes"] = plan.slot_bytes;
  json["node_bytes"] = plan.node_bytes;
  json["save_interval_ms"] = WholeMs(plan.save_interval);
  json["save_time_ms"] = WholeMs(plan.save_time);
  json["memory_bytes"] = plan.memory_bytes();
  json["slots_bytes"] = plan.slots_bytes;
  json["peer_bytes"] = plan.peer_bytes;
  json["peers"] = LoadToJson(plan.peers);
  json["nvme"] = LoadToJson(plan.nvme);
  json["nvme_budget_bytes"] = plan.nvme_budget_bytes;
  json["nvme_recycle_bytes"] = plan.nvme_recycle_bytes;
  json["nvme_bytes_a_day"] = plan.nvme_day_bytes;
  json["drive_writes_a_day"] = plan.drive_writes_a_day;
  json["remote"] = LoadToJson(plan.remote);
  json["remote_capacity_bytes"] = plan.remote_capacity_bytes;
  json["remote_bytes_a_day"] = plan.remote_day_bytes;
  json["remote_bytes_per_s"] = plan.remote_bytes_per_s;
  json["losses"] = LossesToJson(input, plan);
  json["hours_a_year"] = plan.hours_a_year;
  json["hours_a_year_twice_as_often"] = plan.hours_a_year_twice_as_often;
  json["hours_a_year_half_as_often"] = plan.hours_a_year_half_as_often;
  for (const PlanRateName& rate : PlanRateNames()) {
    json["rates_bytes_per_s"][std::string(rate.name)] = input.rates.*rate.rate;
  }
  json["rates_told"] = input.rates.told;
  json["settings"] = CapacitySettings(input, plan);
  json["problems"] = ordered_json::array();
  for (const CapacityPlan::Problem& problem : plan.problems) {
    json["problems"].push_back({{"what", problem.what}, {"change", problem.change}});
  }
  return DumpJson(json) + "\n";
}

}  // namespace holdfast
