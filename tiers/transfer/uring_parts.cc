#include "tiers/transfer/uring_parts.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>

namespace holdfast {
namespace {

constexpr int kSubmitTriesMax = 1000;

}  // namespace

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

int SubmitQueued(const std::function<int()>& submit, const std::function<unsigned()>& queued) {
  int error = 0;
  for (int tries = 0; queued() > 0 && tries < kSubmitTriesMax; ++tries) {
    const int taken = submit();
    error = taken < 0 ? -taken : EAGAIN;
    if (taken > 0) {
      continue;
    }
    if (error != EINTR && error != EAGAIN && error != EBUSY) {
      break;
    }
    ::sched_yield();  // the kernel is short of memory for a moment
  }
  return queued() == 0 ? 0 : error;
}

std::vector<MemorySlice> RegisteredSlices(uint64_t bytes) {
  std::vector<MemorySlice> slices;
  for (uint64_t at = 0; at < bytes; at += kRegisteredBytesMax) {
    slices.push_back({at, std::min(kRegisteredBytesMax, bytes - at)});
  }
  return slices;
}

}  // namespace holdfast
