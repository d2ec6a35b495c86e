#include "base/digest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "base/crc64_math.h"
#include "tests/base/bitwise_crc64.h"

namespace holdfast {
namespace {

std::vector<std::byte> RandomBytes(size_t count, uint32_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(count);
  std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<std::byte>(random()); });
  return bytes;
}

TEST(Crc64Test, HasThePublishedCheckValue) {
  EXPECT_EQ(Crc64("123456789"), 0x995dc9bbdf1939fau);
  EXPECT_EQ(BitwiseCrc64("123456789", 9), 0x995dc9bbdf1939fau);
}

TEST(Crc64Test, OfNothingIsZeroAndChangesNothing) {
  EXPECT_EQ(Crc64(nullptr, 0), 0u);
  EXPECT_EQ(Crc64(nullptr, 0, 0x1234), 0x1234u);
}

TEST(Crc64Test, AgreesBitByBitForEveryShortLengthAndOffset) {
  const std::vector<std::byte> data = RandomBytes(512, 1);
  for (size_t offset = 0; offset < 16; ++offset) {
    for (size_t bytes = 0; bytes <= 300; ++bytes) {
      ASSERT_EQ(Crc64(data.data() + offset, bytes), BitwiseCrc64(data.data() + offset, bytes))
          << offset << " " << bytes;
    }
  }
}

TEST(Crc64Test, ContinuesFromAnEarlierDigest) {
  const std::vector<std::byte> data = RandomBytes(10'000, 2);
  const uint64_t whole = Crc64(data.data(), data.size());
  for (const size_t cut : {0, 1, 63, 64, 4096, 9'999, 10'000}) {
    EXPECT_EQ(Crc64(data.data() + cut, data.size() - cut, Crc64(data.data(), cut)), whole) << cut;
  }
}

TEST(Crc64Test, CombinesToTheDigestOfTheWhole) {
  const std::vector<std::byte> data = RandomBytes(70'000, 3);
  const uint64_t whole = Crc64(data.data(), data.size());
  std::mt19937 random(4);
  for (int i = 0; i < 200; ++i) {
    const size_t cut = random() % (data.size() + 1);
    const size_t rest = data.size() - cut;
    ASSERT_EQ(Crc64Combine(Crc64(data.data(), cut), Crc64(data.data() + cut, rest), rest), whole)
        << cut;
  }
  EXPECT_EQ(Crc64Combine(whole, 0, 0), whole);
  EXPECT_EQ(Crc64Combine(0, whole, data.size()), whole);
}

TEST(Crc64Test, CombinesLengthsThatNoBufferHas) {
  // Doubling a range of zeros, from one byte up to 2^63, by combining it with itself; then any
  // split of a long range must give the same.
  const uint64_t a = Crc64("before");
  uint64_t zeros = BitwiseCrc64("", 1);
  uint64_t bytes = 1;
  for (int doubling = 0; doubling < 62; ++doubling) {
    const uint64_t once = Crc64Combine(a, zeros, bytes);
    const uint64_t twice = Crc64Combine(zeros, zeros, bytes);
    ASSERT_EQ(Crc64Combine(once, zeros, bytes), Crc64Combine(a, twice, 2 * bytes)) << doubling;
    zeros = twice;
    bytes *= 2;
  }
}

TEST(Crc64MathTest, PowersOfXHaveInverses) {
  for (const uint64_t exponent : {0u, 1u, 63u, 64u, 449u, 10'000u}) {
    EXPECT_EQ(
        crc64_math::Multiply(crc64_math::PowerOfX(exponent), crc64_math::InversePowerOfX(exponent)),
        crc64_math::kOne);
  }
}

TEST(BlockDigestsTest, OnePerBlockTheLastOneShort) {
  const std::vector<std::byte> data = RandomBytes(2 * kDigestBlockBytes + 5, 5);
  const size_t block = kDigestBlockBytes;
  for (const size_t bytes :
       {size_t{0}, size_t{1}, block - 1, block, block + 1, 2 * block, 2 * block + 5}) {
    std::vector<uint64_t> digests = {42};
    AppendBlockDigests(std::span(data).first(bytes), digests);
    ASSERT_EQ(digests.size(), 1 + DigestBlockCount(bytes)) << bytes;
    EXPECT_EQ(digests[0], 42u) << "what was there stays";
    uint64_t whole = 0;
    for (size_t i = 0; i + 1 < digests.size(); ++i) {
      const size_t length = std::min(block, bytes - i * block);
      EXPECT_EQ(digests[i + 1], Crc64(data.data() + i * block, length)) << bytes << " block " << i;
      whole = Crc64Combine(whole, digests[i + 1], length);
    }
    EXPECT_EQ(whole, Crc64(data.data(), bytes)) << bytes;
  }
}

TEST(BlockDigestsTest, CountsBlocks) {
  static_assert(DigestBlockCount(0) == 0);
  static_assert(DigestBlockCount(1) == 1);
  static_assert(DigestBlockCount(kDigestBlockBytes) == 1);
  static_assert(DigestBlockCount(kDigestBlockBytes + 1) == 2);
  static_assert(DigestBlockCount(uint64_t{1} << 50) == uint64_t{1} << 30);
}

}  // namespace
}  // namespace holdfast
