#include "base/copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/cpu_features.h"
#include "base/digest.h"
#include "tests/base/bitwise_crc64.h"

namespace holdfast {
namespace {

constexpr size_t kGuardBytes = 256;
constexpr unsigned char kGuard = 0xA5;

// A source of random bytes and a destination between guards, both at chosen offsets from a cache
// line.
class CopyTest : public ::testing::TestWithParam<std::string_view> {
 protected:
  void SetUp() override {
    before_ = CopyKernelName();
    ASSERT_TRUE(SelectCopyKernelForTesting(GetParam()));
    ASSERT_EQ(CopyKernelName(), GetParam());
  }
  void TearDown() override { ASSERT_TRUE(SelectCopyKernelForTesting(before_)); }

  void Prepare(size_t bytes_max) {
    std::mt19937_64 random(7);
    source_.resize(bytes_max + 64);
    std::generate(source_.begin(), source_.end(),
                  [&] { return static_cast<unsigned char>(random()); });
    target_.assign(bytes_max + 2 * kGuardBytes + 128, kGuard);
  }

  static size_t ToLine(const unsigned char* p) { return -reinterpret_cast<uintptr_t>(p) % 64; }

  // Runs `copy(to, from)`, and checks the bytes copied and those around them.
  template <typename Copy>
  void Check(size_t bytes, size_t to_offset, size_t from_offset, Copy copy) {
    unsigned char* to = target_.data() + ToLine(target_.data()) + kGuardBytes + to_offset;
    const unsigned char* from = source_.data() + from_offset;
    std::memset(to - kGuardBytes, kGuard, bytes + 2 * kGuardBytes);
    copy(to, from);
    const std::string what = std::to_string(bytes) + " bytes to +" + std::to_string(to_offset) +
                             " from +" + std::to_string(from_offset);
    ASSERT_TRUE(bytes == 0 || std::memcmp(to, from, bytes) == 0) << what;
    const auto is_guard = [](unsigned char c) { return c == kGuard; };
    ASSERT_TRUE(std::all_of(to - kGuardBytes, to, is_guard)) << what;
    ASSERT_TRUE(std::all_of(to + bytes, to + bytes + kGuardBytes, is_guard)) << what;
  }

  void CheckBoth(size_t bytes, size_t to_offset, size_t from_offset, uint64_t digest) {
    uint64_t got = 0;
    ASSERT_NO_FATAL_FAILURE(Check(bytes, to_offset, from_offset, [&](void* to, const void* from) {
      got = CopyAndDigest(to, from, bytes);
    }));
    ASSERT_EQ(got, digest) << bytes << " bytes to +" << to_offset << " from +" << from_offset;
    ASSERT_NO_FATAL_FAILURE(Check(bytes, to_offset, from_offset, [&](void* to, const void* from) {
      StreamCopy(to, from, bytes);
    }));
  }

  std::string_view before_;
  std::vector<unsigned char> source_;
  std::vector<unsigned char> target_;
};

TEST_P(CopyTest, AgreesBitByBitAtRandomLengthsAndAlignments) {
  constexpr size_t kBytesMax = 70'000;
  Prepare(kBytesMax);
  std::mt19937 random(11);
  for (int i = 0; i < 150; ++i) {
    const size_t bytes = random() % (kBytesMax + 1);
    const size_t from_offset = random() % 64;
    ASSERT_NO_FATAL_FAILURE(CheckBoth(bytes, random() % 64, from_offset,
                                      BitwiseCrc64(source_.data() + from_offset, bytes)));
  }
}

TEST_P(CopyTest, EveryLengthUpToAFewGroups) {
  constexpr size_t kBytesMax = 6'000;
  Prepare(kBytesMax);
  for (size_t bytes = 0; bytes <= kBytesMax; ++bytes) {
    const size_t from_offset = bytes * 5 % 64;
    ASSERT_NO_FATAL_FAILURE(
        CheckBoth(bytes, bytes * 11 % 64, from_offset, Crc64(source_.data() + from_offset, bytes)));
  }
}

TEST_P(CopyTest, EveryAlignmentOfSourceAndDestination) {
  constexpr size_t kBytes = 2 * 4096 + 100;
  Prepare(kBytes);
  for (size_t from_offset = 0; from_offset < 64; ++from_offset) {
    const uint64_t digest = Crc64(source_.data() + from_offset, kBytes);
    for (size_t to_offset = 0; to_offset < 64; ++to_offset) {
      ASSERT_NO_FATAL_FAILURE(CheckBoth(kBytes, to_offset, from_offset, digest));
    }
  }
}

TEST_P(CopyTest, DigestBlocksAndWhatIsLongerThanOne) {
  const size_t block = kDigestBlockBytes;
  Prepare(3 * block + 17);
  for (const size_t bytes : {block - 1, block, block + 1, size_t{4 * 65 * 1024},
                             size_t{4 * 65 * 1024 + 64}, 2 * block, 3 * block + 17}) {
    ASSERT_NO_FATAL_FAILURE(CheckBoth(bytes, 0, 0, Crc64(source_.data(), bytes)));
    ASSERT_NO_FATAL_FAILURE(CheckBoth(bytes, 9, 2, Crc64(source_.data() + 2, bytes)));
  }
}

TEST_P(CopyTest, NothingAtAll) {
  EXPECT_EQ(CopyAndDigest(nullptr, nullptr, 0), 0u);
  StreamCopy(nullptr, nullptr, 0);
}

TEST_P(CopyTest, OneFlippedBitChangesTheDigest) {
  constexpr size_t kBytes = 40'000;
  Prepare(kBytes);
  const uint64_t digest = CopyAndDigest(target_.data(), source_.data(), kBytes);
  for (const size_t at : {0, 1, 63, 64, 4'095, 10'240, 20'000, 39'935, 39'936, 39'999}) {
    source_[at] ^= 0x10;
    EXPECT_NE(CopyAndDigest(target_.data(), source_.data(), kBytes), digest) << at;
    source_[at] ^= 0x10;
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, CopyTest, ::testing::ValuesIn(CopyKernelNames()),
                         [](const auto& test) { return std::string(test.param); });

TEST(CopyKernelTest, TheFastestIsInUseAndThePortableIsAlwaysThere) {
  const std::vector<std::string_view> names = CopyKernelNames();
  ASSERT_FALSE(names.empty());
  EXPECT_EQ(CopyKernelName(), names.front());
  EXPECT_EQ(names.back(), "portable");
}

TEST(CopyKernelTest, AnUnknownKernelIsRefusedAndNothingChanges) {
  const std::string_view before = CopyKernelName();
  EXPECT_FALSE(SelectCopyKernelForTesting("avx1024"));
  EXPECT_EQ(CopyKernelName(), before);
}

#if defined(__x86_64__)
TEST(CpuFeaturesTest, AreWhatTheCompilersOwnLookSays) {
  EXPECT_EQ(CpuFeatures().pclmul, __builtin_cpu_supports("pclmul") != 0);
  EXPECT_EQ(CpuFeatures().avx2, __builtin_cpu_supports("avx2") != 0);
  EXPECT_EQ(CpuFeatures().avx512f, __builtin_cpu_supports("avx512f") != 0);
  EXPECT_EQ(CpuFeatures().vpclmulqdq, __builtin_cpu_supports("vpclmulqdq") != 0);
}
#endif

}  // namespace
}  // namespace holdfast
