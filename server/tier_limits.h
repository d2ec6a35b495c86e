// What the settings of the durable tiers may be (holdfast/v1/config.proto): one table, for the
// configuration at start and for what `ckptctl set` changes later.
//
//   for (const SettingRange& range : TierRanges(config.nvme(), config.remote(), config.fabric())) {
//     HF_RETURN_IF_ERROR(CheckRange(range));
//   }
//
// Plain functions, thread-safe.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "holdfast/v1/config.pb.h"

namespace holdfast {

struct SettingRange {
  enum class Unit { kCount, kBytes, kMs };
  std::string_view setting;  // "nvme.depth"
  uint64_t value = 0;
  uint64_t min = 0;
  uint64_t max = 0;
  Unit unit = Unit::kCount;
  bool or_zero = false;  // 0 says "none", or "as it is by default"
  uint64_t multiple_of = 1;
};

// InvalidArgument, naming the setting, its value and what it may be.
absl::Status CheckRange(const SettingRange& range);

std::vector<SettingRange> TierRanges(const v1::NvmeConfig& nvme, const v1::RemoteConfig& remote,
                                     const v1::FabricConfig& fabric);

}  // namespace holdfast
