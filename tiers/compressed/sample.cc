#include "tiers/compressed/sample.h"

#include <algorithm>
#include <vector>

#include "base/status.h"
#include "base/units.h"
#include "tiers/compressed/frame_codec.h"
#include "tiers/compressed/seek_table.h"

namespace holdfast {
namespace {

constexpr uint64_t kStretches = 8;
constexpr uint64_t kStretchBytes = 256 * kKiB;
constexpr uint64_t kUnit = 64 * kKiB;
// Higher ones take seconds, and find little more.
constexpr int kSampleLevelMax = 3;

}  // namespace

absl::StatusOr<CompressionSample> SampleCompression(
    uint64_t image_bytes, int level,
    const std::function<absl::Status(uint64_t offset, std::span<std::byte> into)>& read) {
  CompressionSample sample;
  std::vector<std::byte> part(kStretchBytes);
  std::vector<std::byte> stored(kStoredFrameBytesMax);
  // Evenly, in the middle of each eighth, where they do not overlap; else one behind the other. (At
  // the front lies the header, which says nothing of the rest.)
  const bool spread = image_bytes > kStretches * kStretchBytes;
  const uint64_t every =
      spread ? std::max(image_bytes / kStretches / kUnit * kUnit, kStretchBytes) : kStretchBytes;
  const uint64_t begin = spread ? (every - kStretchBytes) / 2 / kUnit * kUnit : 0;
  for (uint64_t i = 0; i < kStretches && i * every < image_bytes; ++i) {
    const uint64_t offset = begin + i * every;
    auto bytes = static_cast<size_t>(std::min<uint64_t>(kStretchBytes, image_bytes - offset));
    bytes = bytes > kUnit ? bytes / kUnit * kUnit : bytes;
    const std::span<std::byte> into = std::span(part).first(bytes);
    HF_RETURN_IF_ERROR(read(offset, into));
    HF_ASSIGN_OR_RETURN(const size_t compressed,
                        CompressFrame(std::min(level, kSampleLevelMax), into, stored));
    sample.bytes += bytes;
    sample.stored_bytes += compressed;
  }
  return sample;
}

}  // namespace holdfast
