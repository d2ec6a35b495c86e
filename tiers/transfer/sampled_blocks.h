// Which digest blocks of an image are read back after it was written: a few, spread over all of it.
//
//   const std::vector<size_t> digests = SampledBlocks(layout, seed, unit);
//
// Pure; sorted. Goes through the layout once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tiers/image/record.h"

namespace holdfast {

inline constexpr size_t kSampledBlocksMax = 8;
// At most one part in so many is read: with the record, which is read back whole, 5 %.
inline constexpr uint64_t kSampledShare = 21;

// At most eight blocks, and no more than one part in kSampledShare; at least one. `unit`: what a
// read of a block brings begins and ends at multiples of it.
std::vector<size_t> SampledBlocks(const Layout& layout, uint64_t seed, uint64_t unit);

}  // namespace holdfast
