// What a number in the settings may be. Tables of them (recovery/policy.h, server/tier_limits.h,
// server/membership/cluster_config.h, server/runtime/daemon_config.h) are what settings are checked
// with, and what the reference of the settings shows.
//
//   for (const SettingRange& range : TierRanges(config.nvme(), config.remote(), config.fabric())) {
//     HF_RETURN_IF_ERROR(CheckRange(range));
//   }
//
// Plain functions, thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace holdfast {

struct SettingRange {
  enum class Unit { kCount, kBytes, kMs, kMode };
  std::string_view setting;  // "nvme.depth"; of a list its length
  uint64_t value = 0;
  uint64_t min = 0;
  uint64_t max = UINT64_MAX;  // of what is not bounded but by its type
  Unit unit = Unit::kCount;
  bool or_zero = false;  // 0 says "none", or "as it is by default"
  uint64_t multiple_of = 1;
  std::string_view min_is{};  // what `min` was taken from: "memory.slots_per_rank"
  std::string_view max_is{};  // likewise
  std::string_view note{};    // what whoever is refused should know
};

// InvalidArgument, naming the setting, its value and what it may be.
absl::Status CheckRange(const SettingRange& range);

// As it may stand in the file: "64 MiB", "10 min", "0660".
std::string SettingText(uint64_t value, SettingRange::Unit unit);

// "4 to 32", "1 MiB to 1 EiB, or 0", "at least 1"; empty: whatever its type can hold.
std::string RangeText(const SettingRange& range);

}  // namespace holdfast
