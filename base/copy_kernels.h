// What a copy kernel is, for copy.cc, which cuts ranges to fit and picks one; and how the streaming
// kernels lay out their work. Internal to base/.
//
// A streaming kernel copies four lanes far apart side by side: one stream alone leaves a fifth of
// the memory's bandwidth unused, because the hardware prefetcher starts anew at each page. Each
// lane has an accumulator of one line (64 bytes), congruent modulo the CRC's polynomial to all that
// the lane has passed; at the end of such a group the accumulators are folded over the distance
// between the lanes into one, the carry, which enters the next group.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "base/crc64_math.h"

namespace holdfast {

inline constexpr size_t kCopyLineBytes = 64;

// Both functions want `to` aligned to kCopyLineBytes and `bytes` a multiple of it, unless the
// kernel takes any (the portable one); `from` may lie anywhere. `crc` is the digest of what came
// before (0 for nothing). Their stores, non-temporal ones included, are ordered before every store
// that follows the call.
struct CopyKernel {
  const char* name;
  bool (*supported)();
  uint64_t (*copy_and_digest)(char* to, const char* from, size_t bytes, uint64_t crc);
  void (*copy)(char* to, const char* from, size_t bytes);
};

inline constexpr size_t kCopyLanes = 4;
// Lanes are as long as the range allows, so that little is left for the single stream at the end,
// and at most 65 KiB: a distance that is no multiple of a page spreads the lanes over the cache's
// sets (measured: 3 %).
inline constexpr size_t kCopyLaneUnitBytes = 256;
inline constexpr size_t kCopyLaneUnitsMax = 65 * 1024 / kCopyLaneUnitBytes;
// While digesting, long lanes fetch their source this far ahead; short ones would mostly fetch what
// they have had.
inline constexpr size_t kCopyPrefetchBytes = 1024;
inline constexpr size_t kCopyPrefetchLaneBytesMin = 16 * 1024;

// Units in each lane of the next group, for a range of `bytes`; 0 when it is too short for a group.
inline size_t CopyLaneUnits(size_t bytes) {
  return std::min(bytes / (kCopyLanes * kCopyLaneUnitBytes), kCopyLaneUnitsMax);
}

// kCopyFolds[n] folds by n lane units (n ≥ 1); three lanes' distance is the longest.
using CopyFoldTable = std::array<crc64_math::FoldFactors, (kCopyLanes - 1) * kCopyLaneUnitsMax + 1>;
extern const CopyFoldTable kCopyFolds;

inline constexpr crc64_math::FoldFactors kCopyFoldByLine = crc64_math::FoldBy(kCopyLineBytes);
// Multiplies the CRC register's state into a carry that has its effect on the line that follows.
inline constexpr uint64_t kCopyEnterFactor = crc64_math::EnterFactor(kCopyLineBytes);

#if defined(__x86_64__)
extern const CopyKernel kAvx512CopyKernel;
extern const CopyKernel kAvx2CopyKernel;
#elif defined(__aarch64__)
extern const CopyKernel kNeonCopyKernel;
#endif

}  // namespace holdfast
