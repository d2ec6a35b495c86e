// Which policies make sense (proto/holdfast/v1/policy.proto).
//
// Pure function, thread-safe.
#pragma once

#include "absl/status/status.h"
#include "holdfast/v1/policy.pb.h"

namespace holdfast {

// InvalidArgument, naming the setting and what it may be.
absl::Status CheckPolicy(const v1::Policy& policy);

}  // namespace holdfast
