// Whether the settings of the durable tiers can be: by themselves, beside each other, and for what
// lies at the places that they name.
//
//   HF_RETURN_IF_ERROR(CheckTierConfig(config));       // asks no file system
//   std::vector<std::string> unanswered;
//   HF_RETURN_IF_ERROR(CheckTierPlaces(*Env::System(), config, timeout, unanswered));
//
// Plain functions, called once at start. Every error names the setting, its value and the way out.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"
#include "base/env.h"
#include "holdfast/v1/config.pb.h"

namespace holdfast {

// "setting: problem", for whoever wrote the settings.
absl::Status BadSetting(std::string_view setting, const std::string& problem);

// Ranges, and directories that are no absolute paths, are named twice, or lie inside one another.
absl::Status CheckTierConfig(const v1::DaemonConfig& config);

// Directories that are files, lie on a file system that keeps none, or turn out to be one and the
// same under two names, or inside one another. What does not exist yet is made later. What cannot
// be looked at, or has not answered within `timeout`, is told in `unanswered`: it is no fault of
// the settings. `env` lives as long as the process.
absl::Status CheckTierPlaces(Env& env, const v1::DaemonConfig& config, Duration timeout,
                             std::vector<std::string>& unanswered);

// Why `drives` times `pool_bytes` of files kept for reuse leave no room in a budget.
std::string NoRoomBesideKeptFiles(uint64_t pool_bytes, uint64_t drives, uint64_t bytes_max);

}  // namespace holdfast
