#include "tiers/peer/remote_memory.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast {
namespace {

absl::Status Contradiction(const char* what) {
  return absl::InvalidArgumentError(absl::StrCat("its memory: ", what));
}

bool Overflows(uint64_t a, uint64_t b) {
  return a + b < a;
}

}  // namespace

absl::StatusOr<RemoteMemory> RemoteMemory::Make(const PullSource& source, const FabricAddress& peer,
                                                uint64_t offset, uint64_t bytes) {
  if (source.regions.size() > kRemoteRegionsMax) {
    return Contradiction("too many regions");
  }
  if (Overflows(source.offset, offset) || Overflows(source.offset + offset, bytes)) {
    return Contradiction("an offset without end");
  }
  RemoteMemory memory;
  memory.offset_ = source.offset + offset;
  memory.regions_.resize(peer.endpoints.size());
  std::vector<uint64_t> totals(peer.endpoints.size());
  for (const RemoteRegion& region : source.regions) {
    if (region.device >= peer.endpoints.size()) {
      return Contradiction("a region of a device that its address does not name");
    }
    uint64_t& total = totals[region.device];
    if (region.bytes == 0 || Overflows(region.base, region.bytes) ||
        Overflows(total, region.bytes)) {
      return Contradiction("a region without bytes, or without end");
    }
    memory.regions_[region.device].push_back({total, region});
    total += region.bytes;
  }
  for (uint32_t device = 0; device < totals.size(); ++device) {
    if (totals[device] >= memory.offset_ + bytes) {
      memory.devices_.push_back(device);
    }
  }
  if (memory.devices_.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "its memory: ", totals.empty() ? 0 : *std::max_element(totals.begin(), totals.end()),
        " bytes, of which ", bytes, " from ", memory.offset_, " on are wanted"));
  }
  return memory;
}

RemoteMemory::Place RemoteMemory::At(uint32_t device, uint64_t at) const {
  const uint64_t wanted = offset_ + at;
  const std::vector<Region>& regions = regions_[device];
  const auto after =
      std::upper_bound(regions.begin(), regions.end(), wanted,
                       [](uint64_t value, const Region& region) { return value < region.begin; });
  const Region& region = *(after - 1);
  const uint64_t inside = wanted - region.begin;
  return {region.remote.base + inside, region.remote.key, region.remote.bytes - inside};
}

}  // namespace holdfast
