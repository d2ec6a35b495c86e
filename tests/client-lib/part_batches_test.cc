// How ranges of a shard elsewhere are brought here, a memory-full at a time: every byte of every
// range once, from where it was put.
#include "client-lib/src/part_batches.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "base/digest.h"

namespace holdfast::client {
namespace {

struct Image {
  explicit Image(size_t size) : bytes(size) {
    std::mt19937_64 random(size);
    for (std::byte& each : bytes) {
      each = static_cast<std::byte>(random());
    }
  }
  std::vector<std::byte> bytes;
};

// Does what a daemon does.
void Bring(const Image& image, const PartBatch& batch, std::vector<std::byte>& memory) {
  std::fill(memory.begin(), memory.end(), std::byte{0xEE});
  uint64_t used = 0;
  for (const PartRun& run : batch.runs) {
    ASSERT_GT(run.bytes, 0u);
    ASSERT_LE(run.offset + run.bytes, image.bytes.size());
    ASSERT_LE(run.place + run.bytes, memory.size());
    ASSERT_GE(run.place, used) << "what is there is written over";
    EXPECT_EQ(run.place % 64, run.offset % 64);
    used = run.place + run.bytes;
    std::memcpy(&memory[run.place], &image.bytes[run.offset], run.bytes);
  }
  ASSERT_LE(batch.runs.size(), PartBatches::kRunsMax);
}

struct Seen {
  size_t batches = 0;
  size_t runs = 0;
  uint64_t bytes = 0;  // that were read
};

// All of them, compared with the image.
Seen GoThrough(const Image& image, const std::vector<CopyOutRange>& ranges, size_t memory_bytes) {
  Seen seen;
  std::vector<std::byte> memory(memory_bytes);
  std::vector<uint64_t> done(ranges.size());
  PartBatches batches(ranges, image.bytes.data(), memory);
  while (const std::optional<PartBatch> batch = batches.Next()) {
    Bring(image, *batch, memory);
    if (::testing::Test::HasFatalFailure()) {
      return seen;
    }
    ++seen.batches;
    seen.runs += batch->runs.size();
    for (const PartRun& run : batch->runs) {
      seen.bytes += run.bytes;
    }
    EXPECT_EQ(batch->ranges.size(), batch->range_of.size());
    for (size_t i = 0; i < batch->ranges.size(); ++i) {
      const CopyOutRange& part = batch->ranges[i];
      const size_t index = batch->range_of[i];
      const CopyOutRange& of = ranges[index];
      const auto* const from = static_cast<const std::byte*>(part.from);
      EXPECT_GE(from, memory.data());
      EXPECT_LE(from + part.bytes, memory.data() + memory.size());
      EXPECT_EQ(std::memcmp(from, static_cast<const std::byte*>(of.from) + done[index], part.bytes),
                0)
          << "range " << index << " at " << done[index];
      EXPECT_EQ(done[index] % kDigestBlockBytes, 0u);
      EXPECT_EQ(part.digests, of.digests + done[index] / kDigestBlockBytes);
      EXPECT_EQ(part.in_slice, of.in_slice + done[index]);
      EXPECT_EQ(part.to, of.to == nullptr ? nullptr : static_cast<std::byte*>(of.to) + done[index]);
      done[index] += part.bytes;
    }
  }
  for (size_t i = 0; i < ranges.size(); ++i) {
    EXPECT_EQ(done[i], ranges[i].bytes) << "range " << i;
  }
  return seen;
}

CopyOutRange Range(const Image& image, uint64_t offset, uint64_t bytes, void* to = nullptr) {
  CopyOutRange range;
  range.from = image.bytes.data() + offset;
  range.bytes = bytes;
  range.to = to;
  return range;
}

TEST(PartBatches, NothingIsNoBatch) {
  const Image image(100);
  EXPECT_EQ(GoThrough(image, {}, 4 << 20).batches, 0u);
  EXPECT_EQ(GoThrough(image, {Range(image, 100, 0), Range(image, 0, 0)}, 4 << 20).batches, 0u);
}

TEST(PartBatches, NeighboursAreOneRunAndSmallGapsAreReadOver) {
  const Image image(3 << 20);
  auto seen = GoThrough(image, {Range(image, 0, 1000), Range(image, 1000, 5000)}, 4 << 20);
  EXPECT_EQ(seen.runs, 1u);
  EXPECT_EQ(seen.bytes, 6000u);
  seen = GoThrough(image, {Range(image, 10, 1000), Range(image, 1010 + PartBatches::kGapBytes, 1)},
                   4 << 20);
  EXPECT_EQ(seen.runs, 1u);
  seen = GoThrough(image, {Range(image, 10, 1000), Range(image, 1011 + PartBatches::kGapBytes, 1)},
                   4 << 20);
  EXPECT_EQ(seen.runs, 2u);
  EXPECT_EQ(seen.bytes, 1001u);
}

TEST(PartBatches, ALongRangeIsCutBetweenBlocks) {
  const Image image((9 << 20) + 777);
  const std::vector<uint64_t> digests(10);
  std::vector<std::byte> to(image.bytes.size());
  CopyOutRange range = Range(image, 77, (9 << 20) + 700, to.data());
  range.digests = digests.data();
  const Seen seen = GoThrough(image, {range}, (4 << 20) + 100);
  EXPECT_EQ(seen.batches, 3u);
  EXPECT_EQ(seen.bytes, range.bytes);
}

TEST(PartBatches, ManySmallRangesFitIntoARequest) {
  const Image image(48 << 20);
  std::vector<CopyOutRange> ranges;
  for (uint64_t at = 0; at + 100 < image.bytes.size(); at += (40 << 10) + 3) {
    ranges.push_back(Range(image, at, 1 + at % 97));
  }
  ASSERT_GT(ranges.size(), PartBatches::kRunsMax);
  EXPECT_EQ(GoThrough(image, ranges, 16 << 20).batches, 2u);
}

TEST(PartBatches, WhateverTheRangesAre) {
  std::mt19937_64 random(7);
  const Image image(12 << 20);
  const std::vector<uint64_t> digests(64);
  for (int round = 0; round < 200; ++round) {
    std::vector<CopyOutRange> ranges;
    for (uint64_t i = 0; i < 1 + random() % 20; ++i) {
      const uint64_t offset = random() % image.bytes.size();
      const uint64_t most = random() % 3 == 0 ? image.bytes.size() : 70'000;
      CopyOutRange range =
          Range(image, offset, random() % std::min(most, image.bytes.size() - offset + 1));
      range.digests = digests.data();
      range.in_slice = (random() % 4) << 20;
      ranges.push_back(range);  // in any order, some over others
    }
    GoThrough(image, ranges, (2 << 20) + random() % (3 << 20));
    ASSERT_FALSE(::testing::Test::HasFailure()) << "round " << round;
  }
}

}  // namespace
}  // namespace holdfast::client
