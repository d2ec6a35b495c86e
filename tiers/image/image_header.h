// Writes the safetensors header of an image (docs/formats.md, "Image"). Internal to tiers/image;
// pure, thread-safe.
//
//   const uint64_t bytes = ImageHeaderBytes(slices, rank);   // allocates nothing
//   std::string header = BuildImageHeader(slices, rank, bytes);
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/ids.h"
#include "tiers/image/layout.h"

namespace holdfast::image_internal {

// "holdfast:<rank>:", what every header key that is not a name begins with.
std::string KeyPrefix(Rank rank);

// Length of the whole header: 8 bytes, JSON, padding. The slices are in image order, with `bytes`
// and `key` filled. Stops counting, and returns some length above the limit, once the limit is
// passed.
uint64_t ImageHeaderBytes(const std::vector<Slice>& slices, Rank rank);

// The header itself; header_bytes is what ImageHeaderBytes said.
std::string BuildImageHeader(const std::vector<Slice>& slices, Rank rank, uint64_t header_bytes);

}  // namespace holdfast::image_internal
