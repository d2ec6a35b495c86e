#include "tiers/transfer/sampled_blocks.h"

#include <algorithm>
#include <array>

#include "base/units.h"
#include "tiers/transfer/digest_blocks.h"

namespace holdfast {
namespace {

struct Candidate {
  uint64_t turn = 0;
  size_t digest = 0;
  uint64_t bytes = 0;  // that a read of it brings
};

// splitmix64's finalizer.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

std::vector<size_t> SampledBlocks(const Layout& layout, uint64_t seed, uint64_t unit) {
  // 1. A place in each eighth of the image, and the block that has it.
  const uint64_t image_bytes = layout.image_bytes;
  const uint64_t mixed = Mix(seed);
  std::array<uint64_t, kSampledBlocksMax> places{};
  for (size_t i = 0; i < places.size(); ++i) {
    const uint64_t begin = image_bytes / places.size() * i;
    const uint64_t end =
        i + 1 == places.size() ? image_bytes : image_bytes / places.size() * (i + 1);
    places[i] = begin + Mix(mixed ^ i) % std::max<uint64_t>(1, end - begin);
  }
  std::vector<Candidate> candidates;
  size_t place = 0;
  for (DigestBlocks block(layout); !block.done() && place < places.size(); block.Next()) {
    if (places[place] >= block.end()) {
      continue;
    }
    candidates.push_back({Mix(mixed + block.digest()), block.digest(),
                          RoundUp(block.end(), unit) - block.offset() / unit * unit});
    while (place < places.size() && places[place] < block.end()) {
      ++place;
    }
  }
  // 2. Of those as many as may be, whichever they are.
  std::sort(candidates.begin(), candidates.end(),
            [](const Candidate& a, const Candidate& b) { return a.turn < b.turn; });
  std::vector<size_t> digests;
  uint64_t bytes = 0;
  for (const Candidate& candidate : candidates) {
    if (digests.empty() || bytes + candidate.bytes <= image_bytes / kSampledShare) {
      digests.push_back(candidate.digest);
      bytes += candidate.bytes;
    }
  }
  std::sort(digests.begin(), digests.end());
  return digests;
}

}  // namespace holdfast
