#include "server/tier_limits.h"

#include "base/units.h"

namespace holdfast {
namespace {

using Unit = SettingRange::Unit;

constexpr uint64_t kTiB = 1024 * kGiB;
constexpr uint64_t kPiB = 1024 * kTiB;
// Sums over all drives stay far below what 64 bits hold.
constexpr uint64_t kDrivesMax = 64;
constexpr uint64_t kBudgetMax = 1024 * kPiB;
constexpr uint64_t kPoolMax = kBudgetMax / kDrivesMax;
// Below, a single piece would take minutes.
constexpr uint64_t kBandwidthMin = kMiB;
constexpr uint64_t kBandwidthMax = kTiB;
constexpr uint64_t kDayMs = uint64_t{24} * 3'600'000;

}  // namespace

std::vector<SettingRange> TierRanges(const v1::NvmeConfig& nvme, const v1::RemoteConfig& remote,
                                     const v1::FabricConfig& fabric) {
  const uint64_t high = nvme.high_watermark_percent();
  return {
      {"nvme.dirs", static_cast<uint64_t>(nvme.dirs_size()), 0, kDrivesMax},
      {"nvme.bytes_max", nvme.bytes_max(), kMiB, kBudgetMax, Unit::kBytes, true},
      {"nvme.high_watermark_percent", high, 1, 100},
      // (Up to the high one, which has just been found to be sound.)
      {"nvme.low_watermark_percent", nvme.low_watermark_percent(), 1, high, Unit::kCount, false, 1,
       "", "nvme.high_watermark_percent"},
      {"nvme.recycle_bytes_max", nvme.recycle_bytes_max(), 0, kPoolMax, Unit::kBytes},
      {"nvme.bandwidth_bytes_per_s_max", nvme.bandwidth_bytes_per_s_max(), kBandwidthMin,
       kBandwidthMax, Unit::kBytes, true},
      {"nvme.piece_bytes", nvme.piece_bytes(), kMiB, 4 * kMiB, Unit::kBytes, false, 4 * kKiB},
      {"fabric.dscp", fabric.dscp(), 0, 63},
      {"fabric.devices", static_cast<uint64_t>(fabric.devices_size()), 0, 8},
      {"fabric.bandwidth_bytes_per_s_max", fabric.bandwidth_bytes_per_s_max(), kBandwidthMin,
       kBandwidthMax, Unit::kBytes, true},
      {"nvme.depth", nvme.depth(), 4, 32},
      {"nvme.io_priority", nvme.io_priority(), 0, 8},
      {"nvme.nice", nvme.nice(), 0, 19},
      {"nvme.stall_timeout_ms", nvme.stall_timeout_ms(), 10, kDayMs, Unit::kMs},
      {"remote.bytes_max", remote.bytes_max(), kMiB, kBudgetMax, Unit::kBytes, true},
      {"remote.writers", remote.writers(), 1, 64},
      {"remote.job_writes_max", remote.job_writes_max(), 1, 1'000'000},
      {"remote.piece_bytes", remote.piece_bytes(), kMiB, 16 * kMiB, Unit::kBytes},
      {"remote.bandwidth_bytes_per_s_max", remote.bandwidth_bytes_per_s_max(), kBandwidthMin,
       kBandwidthMax, Unit::kBytes, true},
      {"remote.io_priority", remote.io_priority(), 0, 8},
      {"remote.nice", remote.nice(), 0, 19},
      {"remote.stall_timeout_ms", remote.stall_timeout_ms(), 10, kDayMs, Unit::kMs},
      {"remote.stripe_count", remote.stripe_count(), 0, 2000},
      {"remote.stripe_bytes", remote.stripe_bytes(), 64 * kKiB, kGiB, Unit::kBytes, true,
       64 * kKiB},
  };
}

}  // namespace holdfast
