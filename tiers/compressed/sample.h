// Whether an image is worth compressing, told from some of it.
//
//   HF_ASSIGN_OR_RETURN(CompressionSample sample, SampleCompression(image_bytes, level, read));
//   if (sample.worth_it()) …
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "absl/status/statusor.h"

namespace holdfast {

// Below this it is not worth the time to read it back, and the cores.
inline constexpr uint64_t kWorthPercent = 5;

struct CompressionSample {
  uint64_t bytes = 0;
  uint64_t stored_bytes = 0;
  bool worth_it() const { return stored_bytes * 100 <= bytes * (100 - kWorthPercent); }
};

// Compresses stretches that lie evenly over the image, 2 MiB in all, or all of a small one. `read`:
// fills a stretch from that offset on; offset and length are multiples of 64 KiB, but in an image
// that is shorter than that.
absl::StatusOr<CompressionSample> SampleCompression(
    uint64_t image_bytes, int level,
    const std::function<absl::Status(uint64_t offset, std::span<std::byte> into)>& read);

}  // namespace holdfast
