#include "recovery/policy.h"

#include <string_view>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast {
namespace {

using Unit = SettingRange::Unit;

constexpr uint64_t kEveryMsMax = uint64_t{365} * 24 * 3600 * 1000;  // a year
constexpr uint32_t kKeepMax = 1'000'000;
constexpr uint32_t kReplicasMax = 8;

// Names of one tier's settings.
struct SettingNames {
  std::string_view every_steps;
  std::string_view every_ms;
  std::string_view keep_last;
  std::string_view keep_every_steps;
  std::string_view bytes_max;
};

void AddRanges(const v1::TierPolicy& policy, const SettingNames& names,
               std::vector<SettingRange>& ranges) {
  if (policy.has_every_steps()) {
    ranges.push_back({names.every_steps, policy.every_steps()});
  }
  if (policy.has_every_ms()) {
    ranges.push_back({.setting = names.every_ms,
                      .value = policy.every_ms(),
                      .max = kEveryMsMax,
                      .unit = Unit::kMs,
                      .note = "a year at most; 0: never by time"});
  }
  if (policy.has_keep_last()) {
    ranges.push_back({.setting = names.keep_last,
                      .value = policy.keep_last(),
                      .min = 1,
                      .max = kKeepMax,
                      .note = "the newest one always stays"});
  }
  if (policy.has_keep_every_steps()) {
    ranges.push_back({names.keep_every_steps, policy.keep_every_steps()});
  }
  if (policy.has_bytes_max()) {
    ranges.push_back(
        {.setting = names.bytes_max, .value = policy.bytes_max(), .unit = Unit::kBytes});
  }
}

// Of settings that the messages of both tiers have, those that only the remote one takes.
absl::Status CheckNvme(const v1::TierPolicy& policy) {
  if (policy.has_share_replicas()) {
    return absl::InvalidArgumentError(
        "policy: nvme.share_replicas: only the remote tier is shared by ranks of several nodes; "
        "expected remote.share_replicas");
  }
  if (policy.has_compression() || policy.has_compression_level() ||
      policy.has_compression_threads()) {
    return absl::InvalidArgumentError(
        "policy: nvme.compression: a local drive is faster than any compression; expected "
        "remote.compression");
  }
  return absl::OkStatus();
}

absl::Status CheckVerify(std::string_view tier, const v1::TierPolicy& policy) {
  if (policy.has_verify() && !v1::TierPolicy::Verify_IsValid(policy.verify())) {
    return absl::InvalidArgumentError(
        absl::StrCat("policy: ", ToAbsl(tier), ".verify: expected sample or all"));
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<SettingRange> PolicyRanges(const v1::Policy& policy) {
  std::vector<SettingRange> ranges;
  if (policy.has_replicas()) {
    ranges.push_back({.setting = "replicas",
                      .value = policy.replicas(),
                      .max = kReplicasMax,
                      .note = "so many other nodes keep each shard in memory; 0: none"});
  }
  AddRanges(policy.nvme(),
            {"nvme.every_steps", "nvme.every_ms", "nvme.keep_last", "nvme.keep_every_steps",
             "nvme.bytes_max"},
            ranges);
  AddRanges(policy.remote(),
            {"remote.every_steps", "remote.every_ms", "remote.keep_last", "remote.keep_every_steps",
             "remote.bytes_max"},
            ranges);
  if (policy.remote().has_compression_level()) {
    ranges.push_back({.setting = "remote.compression_level",
                      .value = policy.remote().compression_level(),
                      .min = 1,
                      .max = kZstdLevelMax});
  }
  if (policy.remote().has_compression_threads()) {
    ranges.push_back({.setting = "remote.compression_threads",
                      .value = policy.remote().compression_threads(),
                      .max = kZstdThreadsMax,
                      .note = "0: as many as remote.writers"});
  }
  return ranges;
}

absl::Status CheckPolicy(const v1::Policy& policy) {
  HF_RETURN_IF_ERROR(CheckNvme(policy.nvme()));
  const v1::TierPolicy& remote = policy.remote();
  if (remote.has_compression() && !v1::TierPolicy::Compression_IsValid(remote.compression())) {
    return absl::InvalidArgumentError("policy: remote.compression: expected none or zstd");
  }
  for (const SettingRange& range : PolicyRanges(policy)) {
    if (const absl::Status sound = CheckRange(range); !sound.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("policy: ", sound.message()));
    }
  }
  HF_RETURN_IF_ERROR(CheckVerify("nvme", policy.nvme()));
  return CheckVerify("remote", policy.remote());
}

}  // namespace holdfast
