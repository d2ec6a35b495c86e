// Which policies make sense (proto/holdfast/v1/policy.proto).
//
// Pure functions, thread-safe.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "base/setting_range.h"
#include "holdfast/v1/policy.pb.h"

namespace holdfast {

inline constexpr uint32_t kZstdLevelMax = 19;  // beyond it memory grows faster than what it saves
inline constexpr uint32_t kZstdThreadsMax = 64;

// InvalidArgument, naming the setting and what it may be.
absl::Status CheckPolicy(const v1::Policy& policy);

// Of what the policy says, named as in "nvme.keep_last".
std::vector<SettingRange> PolicyRanges(const v1::Policy& policy);

}  // namespace holdfast
