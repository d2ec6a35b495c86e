// How much of what was written is read back: little, all over the image, and never nothing.
#include "tiers/transfer/sampled_blocks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "tests/tiers/image/sample_image.h"
#include "tiers/transfer/digest_blocks.h"

namespace holdfast {
namespace {

using ::testing::Each;
using ::testing::IsEmpty;
using ::testing::Le;
using ::testing::Not;
using ::testing::SizeIs;

Layout PlanOf(const std::vector<Slice>& slices) {
  const absl::StatusOr<ImagePlan> plan = PlanImage(slices, 1);
  EXPECT_TRUE(plan.ok());
  return plan.ok() ? plan->layout : Layout();
}

Layout OneTensor(uint64_t bytes) {
  return PlanOf({Whole("w", DType::kU8, {bytes})});
}

// Half of it in tensors of `each` bytes, the rest in one.
Layout Mixed(uint64_t bytes, uint64_t each) {
  std::vector<Slice> slices = {Whole("w", DType::kU8, {bytes / 2})};
  for (uint64_t i = 0; i < bytes / 2 / each; ++i) {
    slices.push_back(Whole(absl::StrCat("t", i), DType::kU8, {each}));
  }
  return PlanOf(slices);
}

// What reads of these blocks bring.
uint64_t BytesOf(const Layout& layout, const std::vector<size_t>& digests, uint64_t unit) {
  uint64_t bytes = 0;
  for (DigestBlocks block(layout); !block.done(); block.Next()) {
    if (std::binary_search(digests.begin(), digests.end(), block.digest())) {
      bytes += RoundUp(block.end(), unit) - block.offset() / unit * unit;
    }
  }
  return bytes;
}

TEST(SampledBlocks, OfLargeShardsFivePercentAtMost) {
  for (const uint64_t mib : {64, 65, 100, 256, 1024}) {
    for (const Layout& layout :
         {OneTensor(mib * kMiB), Mixed(mib * kMiB, 3 * kMiB + 7), Mixed(mib * kMiB, 50 * kKiB)}) {
      for (const uint64_t unit : {uint64_t{1}, uint64_t{4096}, kMiB}) {
        uint64_t most = 0;
        for (uint64_t seed = 1; seed <= 40; ++seed) {
          const std::vector<size_t> digests = SampledBlocks(layout, seed, unit);
          ASSERT_THAT(digests, Not(IsEmpty()));
          EXPECT_THAT(digests, SizeIs(Le(kSampledBlocksMax)));
          most = std::max(most, BytesOf(layout, digests, unit));
        }
        constexpr uint64_t kRecordBytes = 100 * kKiB;  // of some thousand slices
        EXPECT_LE((most + kRecordBytes) * 20, layout.image_bytes)
            << mib << " MiB, in units of " << unit;
        RecordProperty(
            absl::StrCat("mib", mib, "slices", layout.slices.size(), "unit", unit),
            absl::StrCat(
                100.0 * static_cast<double>(most) / static_cast<double>(layout.image_bytes), "%"));
      }
    }
  }
}

TEST(SampledBlocks, EightWhereThatIsNotTooMuch) {
  EXPECT_THAT(SampledBlocks(OneTensor(256 * kMiB), 7, 4096), SizeIs(8));
  EXPECT_THAT(SampledBlocks(OneTensor(64 * kMiB), 7, 4096), SizeIs(3)) << "of 3.2 MiB";
  EXPECT_THAT(SampledBlocks(OneTensor(4 * kMiB), 7, 4096), SizeIs(1)) << "never none";
  EXPECT_THAT(SampledBlocks(OneTensor(1), 7, 4096), SizeIs(1));
}

TEST(SampledBlocks, EveryBlockHasItsTurn) {
  const Layout layout = OneTensor(24 * kMiB);
  std::set<size_t> seen;
  for (uint64_t seed = 1; seed <= 3000; ++seed) {
    const std::vector<size_t> digests = SampledBlocks(layout, seed, 4096);
    EXPECT_EQ(digests, SampledBlocks(layout, seed, 4096)) << "the same seed, the same blocks";
    seen.insert(digests.begin(), digests.end());
  }
  size_t blocks = 0;
  for (DigestBlocks block(layout); !block.done(); block.Next()) {
    ++blocks;
    EXPECT_TRUE(seen.contains(block.digest()) || block.bytes() < kMiB) << block.digest();
  }
  EXPECT_THAT(seen, Each(testing::Lt(blocks)));
}

}  // namespace
}  // namespace holdfast
