#include "tiers/compressed/sample.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "base/units.h"
#include "tests/tiers/compressed/compressed_harness.h"

namespace holdfast {
namespace {

absl::StatusOr<CompressionSample> Sample(
    const std::string& image, std::vector<std::pair<uint64_t, uint64_t>>* parts = nullptr) {
  return SampleCompression(image.size(), 3, [&](uint64_t offset, std::span<std::byte> into) {
    if (parts != nullptr) {
      parts->emplace_back(offset, into.size());
    }
    EXPECT_LE(offset + into.size(), image.size());
    std::memcpy(into.data(), image.data() + offset, into.size());
    return absl::OkStatus();
  });
}

std::string Noise(uint64_t bytes) {
  std::mt19937_64 random(5);
  std::string noise(bytes, '\0');
  std::generate(noise.begin(), noise.end(), [&] { return static_cast<char>(random()); });
  return noise;
}

TEST(CompressionSample, SaysWhatSavesSomething) {
  EXPECT_TRUE(Sample(HalfNoise(30 * kMiB))->worth_it());
  EXPECT_FALSE(Sample(Noise(30 * kMiB))->worth_it());
  EXPECT_TRUE(Sample(std::string(10, 'x') + std::string(100, 'y'))->worth_it());
  EXPECT_FALSE(Sample(Noise(1))->worth_it());
}

TEST(CompressionSample, FivePercentIsTheBorder) {
  EXPECT_TRUE((CompressionSample{1000, 950}.worth_it()));
  EXPECT_FALSE((CompressionSample{1000, 951}.worth_it()));
}

// The header alone, or a few slices at the front, would say little.
TEST(CompressionSample, LooksAllOverTheImage) {
  std::vector<std::pair<uint64_t, uint64_t>> parts;
  const uint64_t bytes = 100 * kMiB + 12'345;
  const auto sample = Sample(std::string(bytes, 'x'), &parts);
  ASSERT_TRUE(sample.ok());
  ASSERT_EQ(parts.size(), 8u);
  EXPECT_EQ(sample->bytes, 2 * kMiB);
  EXPECT_GT(parts[0].first, 5 * kMiB) << "behind the header";
  EXPECT_GT(parts[7].first, bytes / 8 * 7);
  for (size_t i = 0; i < parts.size(); ++i) {
    EXPECT_EQ(parts[i].first % (64 * kKiB), 0u);
    EXPECT_EQ(parts[i].second, 256 * kKiB);
    EXPECT_TRUE(i == 0 || parts[i].first >= parts[i - 1].first + parts[i - 1].second);
  }
}

TEST(CompressionSample, OfASmallImageAllIsTaken) {
  std::vector<std::pair<uint64_t, uint64_t>> parts;
  ASSERT_TRUE(Sample(std::string(700 * kKiB, 'x'), &parts).ok());
  EXPECT_EQ(parts, (std::vector<std::pair<uint64_t, uint64_t>>{
                       {0, 256 * kKiB}, {256 * kKiB, 256 * kKiB}, {512 * kKiB, 128 * kKiB}}));
  parts.clear();
  ASSERT_TRUE(Sample("tiny", &parts).ok());
  EXPECT_EQ(parts, (std::vector<std::pair<uint64_t, uint64_t>>{{0, 4}}));
}

TEST(CompressionSample, WhatCannotBeReadIsTold) {
  const auto sample = SampleCompression(
      kMiB, 3, [](uint64_t, std::span<std::byte>) { return absl::DataLossError("gone"); });
  EXPECT_TRUE(absl::IsDataLoss(sample.status()));
}

}  // namespace
}  // namespace holdfast
