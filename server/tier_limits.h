// What the settings of the durable tiers may be (holdfast/v1/config.proto): one table, for the
// configuration at start and for what `ckptctl set` changes later.
//
//   for (const SettingRange& range : TierRanges(config.nvme(), config.remote(), config.fabric())) {
//     HF_RETURN_IF_ERROR(CheckRange(range));
//   }
//
// Plain functions, thread-safe.
#pragma once

#include <vector>

#include "base/setting_range.h"
#include "holdfast/v1/config.pb.h"

namespace holdfast {

std::vector<SettingRange> TierRanges(const v1::NvmeConfig& nvme, const v1::RemoteConfig& remote,
                                     const v1::FabricConfig& fabric);

}  // namespace holdfast
