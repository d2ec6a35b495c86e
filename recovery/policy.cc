#include "recovery/policy.h"

#include <string_view>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast {
namespace {

constexpr uint64_t kEveryMsMax = uint64_t{365} * 24 * 3600 * 1000;  // a year
constexpr uint32_t kKeepMax = 1'000'000;
constexpr uint32_t kReplicasMax = 8;

absl::Status Check(std::string_view tier, const v1::TierPolicy& policy) {
  const auto bad = [&](std::string_view setting, const std::string& problem) {
    return absl::InvalidArgumentError(
        absl::StrCat("policy: ", ToAbsl(tier), ".", ToAbsl(setting), ": ", problem));
  };
  if (policy.has_keep_last() && (policy.keep_last() == 0 || policy.keep_last() > kKeepMax)) {
    return bad("keep_last", absl::StrCat(policy.keep_last(), " is not within 1 to ", kKeepMax,
                                         ": the newest one always stays"));
  }
  if (policy.every_ms() > kEveryMsMax) {
    return bad("every_ms", absl::StrCat(policy.every_ms(), " ms is not within 0 to ", kEveryMsMax,
                                        " ms, a year; 0: never by time"));
  }
  if (policy.has_verify() && !v1::TierPolicy::Verify_IsValid(policy.verify())) {
    return bad("verify", "expected none, sample or all");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckPolicy(const v1::Policy& policy) {
  if (policy.nvme().has_share_replicas()) {
    return absl::InvalidArgumentError(
        "policy: nvme.share_replicas: only the remote tier is shared by ranks of several nodes; "
        "expected remote.share_replicas");
  }
  if (policy.replicas() > kReplicasMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("policy: replicas: ", policy.replicas(), " is not within 0 to ", kReplicasMax,
                     ": so many other nodes keep each shard in memory; 0: none"));
  }
  if (absl::Status nvme = Check("nvme", policy.nvme()); !nvme.ok()) {
    return nvme;
  }
  return Check("remote", policy.remote());
}

}  // namespace holdfast
