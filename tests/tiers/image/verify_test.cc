#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "base/digest.h"
#include "base/status.h"
#include "tests/tiers/image/sample_image.h"

namespace holdfast {
namespace {

using ::testing::IsEmpty;

constexpr uint64_t kBig = 2 * kDigestBlockBytes + 5;

class VerifyImageTest : public ::testing::Test {
 protected:
  SampleImage sample_ =
      MakeSampleImage({Whole("big", DType::kF32, {kBig}), Whole("none", DType::kU8, {0}),
                       Whole("small", DType::kU8, {9})},
                      SampleRecord());
  std::string image_ = sample_.image;
  uint64_t read_max_ = 0;

  ReadAtFunction Reader() {
    return [this](uint64_t offset, std::span<std::byte> out) {
      read_max_ = std::max<uint64_t>(read_max_, out.size());
      if (offset + out.size() > image_.size()) {
        return absl::OutOfRangeError("short image");
      }
      std::memcpy(out.data(), image_.data() + offset, out.size());
      return absl::OkStatus();
    };
  }
  absl::StatusOr<std::vector<BadBlock>> Verify(size_t bad_max) {
    return VerifyImage(sample_.record, sample_.layout, Reader(), bad_max, nullptr);
  }
};

TEST_F(VerifyImageTest, AnIntactImageHasNoBadBlocks) {
  std::vector<uint64_t> progress;
  const auto bad = VerifyImage(sample_.record, sample_.layout, Reader(), 10, [&](uint64_t done) {
    progress.push_back(done);
    return true;
  });
  ASSERT_TRUE(bad.ok()) << ToString(bad.status());
  EXPECT_THAT(*bad, IsEmpty());
  EXPECT_EQ(read_max_, kDigestBlockBytes);
  ASSERT_EQ(progress.size(), sample_.record.digests.size());
  EXPECT_EQ(progress.back(), image_.size());
}

TEST_F(VerifyImageTest, NamesTheBlockThatDiffers) {
  const Slice& big = sample_.layout.slices[0];
  const uint64_t at = big.image_offset + kDigestBlockBytes + 17;
  image_[at] = static_cast<char>(image_[at] ^ 4);
  const auto bad = Verify(10);
  ASSERT_TRUE(bad.ok());
  ASSERT_EQ(bad->size(), 1u);
  EXPECT_EQ((*bad)[0].slice, "big");
  EXPECT_EQ((*bad)[0].image_offset, big.image_offset + kDigestBlockBytes);
  EXPECT_EQ((*bad)[0].bytes, kDigestBlockBytes);
  EXPECT_EQ((*bad)[0].expected, sample_.record.digests[2]);
  EXPECT_EQ((*bad)[0].actual,
            Crc64(std::string_view(image_).substr((*bad)[0].image_offset, kDigestBlockBytes)));
}

TEST_F(VerifyImageTest, HeaderAndLastByteAreCovered) {
  image_.front() = static_cast<char>(image_.front() ^ 1);
  image_.back() = static_cast<char>(image_.back() ^ 1);
  const auto bad = Verify(10);
  ASSERT_TRUE(bad.ok());
  ASSERT_EQ(bad->size(), 2u);
  EXPECT_EQ((*bad)[0].slice, "(header)");
  EXPECT_EQ((*bad)[0].image_offset, 0u);
  EXPECT_EQ((*bad)[1].slice, "small");
  EXPECT_EQ((*bad)[1].bytes, 9u);
}

TEST_F(VerifyImageTest, StopsAtTheNumberAskedFor) {
  image_.assign(image_.size(), 'x');
  ASSERT_TRUE(Verify(2).ok());
  EXPECT_EQ(Verify(2)->size(), 2u);
  EXPECT_EQ(Verify(100)->size(), sample_.record.digests.size());
  EXPECT_EQ(Verify(0).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(VerifyImageTest, AFailingReadIsTheError) {
  image_.pop_back();
  EXPECT_EQ(Verify(10).status().code(), absl::StatusCode::kOutOfRange);
}

TEST_F(VerifyImageTest, CanBeCancelled) {
  const auto bad =
      VerifyImage(sample_.record, sample_.layout, Reader(), 10, [](uint64_t) { return false; });
  EXPECT_EQ(bad.status().code(), absl::StatusCode::kCancelled);
}

TEST_F(VerifyImageTest, RefusesARecordOfAnotherLayout) {
  sample_.record.digests.pop_back();
  EXPECT_EQ(Verify(10).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace holdfast
