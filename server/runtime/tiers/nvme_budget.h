#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/env.h"
#include "holdfast/v1/config.pb.h"
#include "server/runtime/tiers/directory_look.h"

namespace holdfast {

// The budget of all drives together as configured, or 80 % of their size; with what the files kept
// for reuse may take of it. Asks the drives, all at once and for `timeout` at most: one that does
// not answer counts for nothing, and is a problem. `env` lives as long as the process.
struct NvmeBudget {
  uint64_t bytes_max = 0;   // for copies
  uint64_t pool_bytes = 0;  // for files kept, per drive
  std::vector<std::string> problems;
};
NvmeBudget AskNvmeBudget(Env& env, const v1::NvmeConfig& config,
                         Duration timeout = std::chrono::seconds(5));

}  // namespace holdfast
