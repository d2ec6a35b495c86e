#include "tiers/transfer/uring_parts.h"

#include <algorithm>

namespace holdfast {

uint64_t RequestTags::Issue(uint32_t place) {
  return uint64_t{++generations_[place]} << 32 | place;
}

std::optional<uint32_t> RequestTags::PlaceOf(uint64_t tag) const {
  const auto place = static_cast<uint32_t>(tag);
  if (tag == kNobody || place >= generations_.size() ||
      generations_[place] != static_cast<uint32_t>(tag >> 32)) {
    return std::nullopt;
  }
  return place;
}

std::vector<MemorySlice> RegisteredSlices(uint64_t bytes) {
  std::vector<MemorySlice> slices;
  for (uint64_t at = 0; at < bytes; at += kRegisteredBytesMax) {
    slices.push_back({at, std::min(kRegisteredBytesMax, bytes - at)});
  }
  return slices;
}

}  // namespace holdfast
