#include "ckptctl/capacity_arguments.h"

#include <array>
#include <string_view>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/ids.h"
#include "base/status.h"
#include "base/units.h"

namespace holdfast {
namespace {

constexpr uint64_t kStepsMax = 1'000'000'000;
constexpr uint64_t kKeepMax = 1'000'000;  // policy's keep_last
constexpr uint64_t kStateBytesMax = uint64_t{1} << 60;
constexpr double kSecondsADay = 86'400;
constexpr uint64_t kThousandth = 1000;

absl::Status NotA(const std::string& text, const std::string& expected) {
  return absl::InvalidArgumentError(absl::StrCat("'", text.substr(0, 64), "' is not ", expected));
}

template <typename Number>
absl::Status SetWhole(const std::string& text, uint64_t least, uint64_t most, Number& target) {
  uint64_t value = 0;
  const bool digits = !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
  if (!digits || !absl::SimpleAtoi(text, &value) || value < least || value > most) {
    return NotA(text, absl::StrCat("a whole number from ", least, " to ", most));
  }
  target = static_cast<Number>(value);
  return absl::OkStatus();
}

// Thousandths of a decimal number: "12.5" is 12500.
absl::StatusOr<uint64_t> Thousandths(const std::string& text, uint64_t least, uint64_t most,
                                     const std::string& what) {
  const bool plain = !text.empty() && text.find_first_not_of("0123456789.") == std::string::npos;
  const absl::StatusOr<uint64_t> value = ParseBytes(text + "kB");
  if (!plain || !value.ok() || *value < least || *value > most) {
    return NotA(text, what);
  }
  return *value;
}

absl::Status SetSize(const std::string& text, uint64_t& target) {
  const absl::StatusOr<uint64_t> bytes = ParseBytes(text);
  if (!bytes.ok() || *bytes == 0 || *bytes > kStateBytesMax) {
    return NotA(text, "a size above 0, at most 1EiB (80GB, 1.5TiB)");
  }
  target = *bytes;
  return absl::OkStatus();
}

// "405B" parameters: the letter counts thousands, as it does of decimal bytes.
absl::Status SetParams(const std::string& text, CapacityArguments& arguments) {
  constexpr std::array<std::pair<char, std::string_view>, 5> kLetters = {
      {{'K', "kB"}, {'M', "MB"}, {'B', "GB"}, {'G', "GB"}, {'T', "TB"}}};
  std::string scaled = text;
  for (const auto& [letter, unit] : kLetters) {
    if (!text.empty() && text.back() == letter) {
      scaled = absl::StrCat(text.substr(0, text.size() - 1), std::string(unit));
    }
  }
  const bool plain = !text.empty() &&
                     text.find_first_not_of("0123456789.KMBGT") == std::string::npos &&
                     text.find_first_of("KMBGT") >= text.size() - 1;
  const absl::StatusOr<uint64_t> params = ParseBytes(scaled);
  constexpr uint64_t kMost = 1'000'000'000'000'000;
  if (!plain || !params.ok() || *params == 0 || *params > kMost) {
    return NotA(text, "a number of parameters from 1 to 1000T (7B, 405B, 1.8T)");
  }
  arguments.params = *params;
  return absl::OkStatus();
}

absl::StatusOr<double> ParseTime(const std::string& text, Duration least) {
  const absl::StatusOr<Duration> time = ParseDuration(text);
  if (!time.ok() || *time < least) {
    return NotA(text, absl::StrCat("a time of ", FormatDuration(least),
                                   " or more (800ms, 12s, 10min, 1000d)"));
  }
  return std::chrono::duration<double>(*time).count();
}

// A plan has one cadence of a tier: by steps or by time.
absl::Status ToldOnce(TierCadence& cadence, const std::string& tier) {
  if (cadence.told) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--", tier, "-every-steps and --", tier, "-every-ms exclude each other: use one of them"));
  }
  cadence = TierCadence{.on = false, .told = true};
  return absl::OkStatus();
}

absl::Status SetEverySteps(const std::string& text, const std::string& tier, TierCadence& cadence) {
  HF_RETURN_IF_ERROR(ToldOnce(cadence, tier));
  HF_RETURN_IF_ERROR(SetWhole(text, 0, kStepsMax, cadence.steps));
  cadence.on = cadence.steps > 0;
  return absl::OkStatus();
}

absl::Status SetEveryMs(const std::string& text, const std::string& tier, TierCadence& cadence) {
  HF_RETURN_IF_ERROR(ToldOnce(cadence, tier));
  if (text == "0") {
    return absl::OkStatus();
  }
  const absl::StatusOr<double> seconds = ParseTime(text, std::chrono::milliseconds(1));
  constexpr double kMost = 365 * kSecondsADay;
  if (!seconds.ok() || *seconds > kMost) {
    return NotA(text, "a time of 1 ms to 365 d (800ms, 10min, 4h), or 0");
  }
  cadence.seconds = *seconds;
  cadence.on = true;
  return absl::OkStatus();
}

absl::Status SetDays(const std::string& text, Loss loss, CapacityArguments& arguments) {
  const size_t i = static_cast<size_t>(loss);
  if (arguments.input.mtbf_told[i]) {
    return absl::InvalidArgumentError(
        "--node-mtbf and --node-failures say the same: tell one of them");
  }
  HF_ASSIGN_OR_RETURN(const double seconds, ParseTime(text, std::chrono::minutes(1)));
  arguments.input.mtbf_days[i] = seconds / kSecondsADay;
  arguments.input.mtbf_told[i] = true;
  return absl::OkStatus();
}

absl::Status SetNodeFailures(const std::string& text, CapacityArguments& arguments) {
  constexpr size_t kNode = static_cast<size_t>(Loss::kNode);
  if (arguments.input.mtbf_told[kNode]) {
    return absl::InvalidArgumentError(
        "--node-mtbf and --node-failures say the same: tell one of them");
  }
  constexpr uint64_t kMost = 1'000'000;
  HF_ASSIGN_OR_RETURN(const uint64_t thousandths,
                      Thousandths(text, 1, kMost * kThousandth,
                                  "a number of failures in 1000 node-days, 0.001 to 1000000"));
  // 1000 days / (thousandths / 1000).
  arguments.input.mtbf_days[kNode] = 1e6 / static_cast<double>(thousandths);
  arguments.input.mtbf_told[kNode] = true;
  return absl::OkStatus();
}

constexpr char kJob[] = "The job";
constexpr char kSaves[] = "Saves and tiers";
constexpr char kThere[] = "What there is (without it nothing is said of whether it fits)";
constexpr char kFailures[] = "Failures (assumed where not told; the answer says which)";

const std::array<CapacityProfile, 5> kProfiles = {{
    {"bf16-adam", 14, "bf16 weights, fp32 master weights, two fp32 moments"},
    {"fp32-adam", 12, "fp32 weights, two fp32 moments"},
    {"bf16-adam-8bit", 8, "bf16 weights, fp32 master weights, two 8-bit moments"},
    {"fp32-momentum", 8, "fp32 weights, one fp32 moment"},
    {"bf16-weights", 2, "bf16 weights alone"},
}};

std::vector<std::string> ProfileNames() {
  std::vector<std::string> names;
  for (const CapacityProfile& profile : kProfiles) {
    names.push_back(profile.name);
  }
  return names;
}

std::string AboutProfiles() {
  std::string about = "Bytes that are saved for each parameter:";
  for (const CapacityProfile& profile : kProfiles) {
    absl::StrAppend(&about, profile.name == kProfiles[0].name ? " " : "; ", profile.name, " ",
                    profile.bytes_per_param, " (", profile.about, ")");
  }
  return absl::StrCat(about, "; default ", kProfiles[0].name);
}

std::vector<CapacityOption> JobOptions() {
  return {
      {"--params", "N", kJob, "Parameters of the model: 7B, 405B, 1.8T", {}, SetParams},
      {"--profile", "NAME", kJob, AboutProfiles(), ProfileNames(),
       [](const std::string& text, CapacityArguments& a) {
         a.profile = text;
         return absl::OkStatus();
       }},
      {"--bytes-per-param",
       "X",
       kJob,
       "Instead of a profile: 14, 10.5",
       {},
       [](const std::string& text, CapacityArguments& a) -> absl::Status {
         HF_ASSIGN_OR_RETURN(
             a.thousandths_of_byte_a_param,
             Thousandths(text, 1, 1024 * kThousandth, "a number of bytes from 0.001 to 1024"));
         return absl::OkStatus();
       }},
      {"--state-bytes",
       "SIZE",
       kJob,
       "Instead of parameters: all that is saved at a step, each byte once",
       {},
       [](const std::string& text, CapacityArguments& a) -> absl::Status {
         uint64_t bytes = 0;
         HF_RETURN_IF_ERROR(SetSize(text, bytes));
         a.state_bytes = bytes;
         return absl::OkStatus();
       }},
      {"--ranks",
       "N",
       kJob,
       "Training processes (needed)",
       {},
       [](const std::string& text, CapacityArguments& a) {
         return SetWhole(text, 1, kWorldSizeMax, a.input.ranks);
       }},
      {"--ranks-per-node",
       "N",
       kJob,
       "Of them on a node (default 8)",
       {},
       [](const std::string& text, CapacityArguments& a) {
         return SetWhole(text, 1, 1024, a.input.ranks_per_node);
       }},
      {"--data-parallel",
       "D",
       kJob,
       "Replicas of the model among the ranks (default 1); it divides the ranks",
       {},
       [](const std::string& text, CapacityArguments& a) {
         return SetWhole(text, 1, kWorldSizeMax, a.input.data_parallel);
       }},
      {"--alike",
       "PERCENT",
       kJob,
       "Share of the state that each of these replicas holds alike; the rest is split over all "
       "ranks (default 0)",
       {},
       [](const std::string& text, CapacityArguments& a) -> absl::Status {
         const bool sign = !text.empty() && text.back() == '%';
         HF_ASSIGN_OR_RETURN(a.input.alike_share,
                             Thousandths(sign ? text.substr(0, text.size() - 1) : text, 0,
                                         kShareUnits, "a share from 0 to 100 percent"));
         return absl::OkStatus();
       }},
      {"--step-time",
       "TIME",
       kJob,
       "Of one training step (needed): 800ms, 12s",
       {},
       [](const std::string& text, CapacityArguments& a) -> absl::Status {
         HF_ASSIGN_OR_RETURN(a.input.step_seconds, ParseTime(text, std::chrono::milliseconds(1)));
         return absl::OkStatus();
       }},
  };
}

std::vector<CapacityOption> SaveOptions() {
  return {
      {"--save-every",
       "STEPS",
       kSaves,
       "A save each so many steps (default 1)",
       {},
       [](const std::string& text, CapacityArguments& a) {
         return SetWhole(text, 1, kStepsMax, a.input.save_every_steps);
       }},
      {"--slots-per-rank",
       "N",
       kSaves,
       "memory.slots_per_rank (default 3)",
       {},
       [](const std::string& text, CapacityArguments& a) {
         return SetWhole(text, 2, 1024, a.input.slots_per_rank);
       }},
      {"--replicas",
       "N",
       kSaves,
       "policy.replicas: other nodes that keep each shard (default 0)",
       {},
       [](const std::string& text, CapacityArguments& a) {
         return SetWhole(text, 0, 8, a.input.replicas);
       }},
      {"--nvme-every-steps",
       "N",
       kSaves,
       "policy.nvme.every_steps: one of so many steps goes to nvme; 0: none (default 1)",
       {},
       [](const std::string& text, CapacityArguments& a) {
         return SetEverySteps(text, "nvme", a.input.nvme);
       }},
      {"--nvme-every-ms",
       "TIME",
       kSaves,
       "policy.nvme.every_ms: instead, one whenever so much time has passed: 10min",
       {},
       [](const std::string& text, CapacityArguments& a) {
         return SetEveryMs(text, "nvme", a.input.nvme);
       }},
      {"--nvme-keep-last",
       "N",
       kSaves,
       "policy.nvme.keep_last (default 2)",
       {},
       [](const std::string& text, CapacityArguments& a) {
         return SetWhole(text, 1, kKeepMax, a.input.nvme_keep);
       }},
      {"--nvme-drives",
       "N",
       kSaves,
       "Drives of a node (default 1)",
       {},
       [](const std::string& text, CapacityArguments& a) {
         return SetWhole(text, 1, 64, a.input.nvme_drives);
       }},
      {"--remote-every-steps",
       "N",
       kSaves,
       "policy.remote.every_steps: one of so many steps goes to remote; 0: none",
       {},
       [](const std::string& text, CapacityArguments& a) {
         return SetEverySteps(text, "remote", a.input.remote);
       }},
      {"--remote-every-ms",
       "TIME",
       kSaves,
       "policy.remote.every_ms: instead, one whenever so much time has passed (default 10min)",
       {},
       [](const std::string& text, CapacityArguments& a) {
         return SetEveryMs(text, "remote", a.input.remote);
       }},
      {"--remote-keep-last",
       "N",
       kSaves,
       "policy.remote.keep_last (default 3)",
       {},
       [](const std::string& text, CapacityArguments& a) {
         return SetWhole(text, 1, kKeepMax, a.input.remote_keep);
       }},
      {"--remote-keep-every-steps",
       "N",
       kSaves,
       "policy.remote.keep_every_steps: these stay for ever; 0: none (default 0)",
       {},
       [](const std::string& text, CapacityArguments& a) {
         return SetWhole(text, 0, kStepsMax, a.input.remote_keep_every_steps);
       }},
      {"--remote-share-replicas",
       "TRUE|FALSE",
       kSaves,
       "policy.remote.share_replicas: what replicas hold alike is written once (default true)",
       {"true", "false"},
       [](const std::string& text, CapacityArguments& a) {
         a.input.share_replicas = text == "true";
         return absl::OkStatus();
       }},
  };
}

std::vector<CapacityOption> PlaceOptions() {
  return {
      {"--memory",
       "SIZE",
       kThere,
       "Memory of a node that checkpoints may take",
       {},
       [](const std::string& text, CapacityArguments& a) {
         return SetSize(text, a.input.memory_bytes);
       }},
      {"--nvme",
       "SIZE",
       kThere,
       "All drives of a node together",
       {},
       [](const std::string& text, CapacityArguments& a) {
         return SetSize(text, a.input.nvme_bytes);
       }},
      {"--remote",
       "SIZE",
       kThere,
       "Room in the remote file system",
       {},
       [](const std::string& text, CapacityArguments& a) {
         return SetSize(text, a.input.remote_bytes);
       }},
      {"--drive-writes",
       "X",
       kThere,
       "Drive writes a day that the drives are made for: 1, 0.3",
       {},
       [](const std::string& text, CapacityArguments& a) -> absl::Status {
         HF_ASSIGN_OR_RETURN(
             const uint64_t thousandths,
             Thousandths(text, 1, 1000 * kThousandth, "a number from 0.001 to 1000"));
         a.input.drive_writes_max = static_cast<double>(thousandths) / kThousandth;
         return absl::OkStatus();
       }},
  };
}

std::vector<CapacityOption> FailureOptions() {
  return {
      {"--process-mtbf",
       "TIME",
       kFailures,
       "Between two crashes of training on one node (250d): 100d, 2000h",
       {},
       [](const std::string& text, CapacityArguments& a) {
         return SetDays(text, Loss::kProcess, a);
       }},
      {"--reboot-mtbf",
       "TIME",
       kFailures,
       "Between two reboots of one node (500d)",
       {},
       [](const std::string& text, CapacityArguments& a) {
         return SetDays(text, Loss::kReboot, a);
       }},
      {"--node-mtbf",
       "TIME",
       kFailures,
       "Until one node is lost for good (1000d)",
       {},
       [](const std::string& text, CapacityArguments& a) { return SetDays(text, Loss::kNode, a); }},
      {"--node-failures",
       "X",
       kFailures,
       "Instead of it: nodes lost in 1000 node-days",
       {},
       SetNodeFailures},
      {"--nodes-per-domain",
       "N",
       kFailures,
       "Nodes that one failure domain takes with it, by cluster.labels (default: no domains)",
       {},
       [](const std::string& text, CapacityArguments& a) {
         return SetWhole(text, 1, kWorldSizeMax, a.input.nodes_per_domain);
       }},
      {"--domain-mtbf",
       "TIME",
       kFailures,
       "Until one failure domain is lost (20000d)",
       {},
       [](const std::string& text, CapacityArguments& a) {
         return SetDays(text, Loss::kDomain, a);
       }},
      {"--cluster-mtbf",
       "TIME",
       kFailures,
       "Until all nodes are lost at once (365d)",
       {},
       [](const std::string& text, CapacityArguments& a) {
         return SetDays(text, Loss::kCluster, a);
       }},
  };
}

std::vector<CapacityOption> AllOptions() {
  std::vector<CapacityOption> all = JobOptions();
  for (auto* more : {SaveOptions, PlaceOptions, FailureOptions}) {
    for (CapacityOption& option : more()) {
      all.push_back(std::move(option));
    }
  }
  return all;
}

absl::StatusOr<uint64_t> StateBytes(const CapacityArguments& arguments) {
  if (arguments.params.has_value() == arguments.state_bytes.has_value()) {
    return absl::InvalidArgumentError(
        "tell the size of the state: either --params 405B or --state-bytes 5.67TB");
  }
  const bool told = !arguments.profile.empty();
  const bool by_number = arguments.thousandths_of_byte_a_param.has_value();
  if (arguments.state_bytes) {
    if (told || by_number) {
      return absl::InvalidArgumentError(
          "--profile and --bytes-per-param belong to --params, not to --state-bytes");
    }
    return *arguments.state_bytes;
  }
  if (told && by_number) {
    return absl::InvalidArgumentError("tell --profile or --bytes-per-param, not both");
  }
  uint64_t thousandths = kProfiles[0].bytes_per_param * kThousandth;
  for (const CapacityProfile& profile : kProfiles) {
    if (profile.name == arguments.profile) {
      thousandths = profile.bytes_per_param * kThousandth;
    }
  }
  thousandths = arguments.thousandths_of_byte_a_param.value_or(thousandths);
  // Parameters are at most 10^15, thousandths about 10^6: the product does not fit, its parts do.
  const uint64_t params = *arguments.params;
  const uint64_t bytes = params / kThousandth * thousandths +
                         (params % kThousandth * thousandths + kThousandth - 1) / kThousandth;
  if (bytes > kStateBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("--params with so many bytes each come to ",
                                                   FormatBytes(bytes),
                                                   "; at most 1 EiB is planned for"));
  }
  return bytes;
}

}  // namespace

std::span<const CapacityProfile> CapacityProfiles() {
  return kProfiles;
}

std::span<const CapacityOption> CapacityOptions() {
  static const std::vector<CapacityOption> all = AllOptions();
  return all;
}

absl::StatusOr<CapacityInput> CompleteCapacity(const CapacityArguments& arguments) {
  CapacityInput input = arguments.input;
  HF_ASSIGN_OR_RETURN(input.state_bytes, StateBytes(arguments));
  if (input.ranks == 0) {
    return absl::InvalidArgumentError("tell --ranks, the number of training processes");
  }
  if (input.step_seconds == 0) {
    return absl::InvalidArgumentError("tell --step-time, of one training step");
  }
  if (input.ranks % input.data_parallel != 0) {
    return absl::InvalidArgumentError(absl::StrCat("--data-parallel ", input.data_parallel, ": ",
                                                   input.ranks, " ranks cannot be divided by it"));
  }
  if (input.mtbf_told[static_cast<size_t>(Loss::kDomain)] && input.nodes_per_domain == 0) {
    return absl::InvalidArgumentError(
        "--domain-mtbf is of a failure domain: tell --nodes-per-domain, how large one is");
  }
  if (input.alike_share > 0 && input.data_parallel == 1) {
    return absl::InvalidArgumentError(
        "--alike says what replicas hold alike: tell --data-parallel, how many there are");
  }
  return input;
}

}  // namespace holdfast
