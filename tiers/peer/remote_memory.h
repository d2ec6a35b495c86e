// A peer's registered memory as one range of bytes, checked: what it says of it is not to be
// trusted. Internal to tiers/peer/. A value.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tiers/peer/fabric_address.h"
#include "tiers/peer/pull.h"

namespace holdfast {

class RemoteMemory {
 public:
  // `bytes` from source.offset + `offset` on must be there. InvalidArgument when they are not on
  // any device, or when it contradicts itself.
  static absl::StatusOr<RemoteMemory> Make(const PullSource& source, const FabricAddress& peer,
                                           uint64_t offset, uint64_t bytes);

  // The devices of the peer's that have the memory, in its order.
  const std::vector<uint32_t>& devices() const { return devices_; }

  // Where byte `at` of the range is for a device, and how many from there on are together.
  struct Place {
    uint64_t address;
    uint64_t key;
    uint64_t bytes;
  };
  Place At(uint32_t device, uint64_t at) const;

 private:
  struct Region {
    uint64_t begin;  // in the peer's memory
    RemoteRegion remote;
  };
  uint64_t offset_ = 0;
  std::vector<std::vector<Region>> regions_;  // by device
  std::vector<uint32_t> devices_;
};

}  // namespace holdfast
