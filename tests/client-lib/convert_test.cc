#include "client-lib/src/convert.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace holdfast::client {
namespace {

template <typename To, typename From>
std::vector<To> Converted(DType from, const std::vector<From>& source, DType to) {
  std::vector<To> target(source.size());
  ConvertElements(from, reinterpret_cast<const std::byte*>(source.data()), to,
                  reinterpret_cast<std::byte*>(target.data()), source.size());
  return target;
}

std::vector<uint16_t> AllBits() {
  std::vector<uint16_t> all(1 << 16);
  for (size_t i = 0; i < all.size(); ++i) {
    all[i] = static_cast<uint16_t>(i);
  }
  return all;
}

// IEEE 754's definition of a binary format of so many bits.
double Defined(uint16_t bits, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> fraction_bits) & ((1 << exponent_bits) - 1);
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) {
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  const double significand = exponent == 0 ? std::ldexp(fraction, -fraction_bits)
                                           : 1 + std::ldexp(fraction, -fraction_bits);
  return sign * std::ldexp(significand, std::max(exponent, 1) - bias);
}

struct Half {
  DType dtype;
  int exponent_bits;
  int fraction_bits;
};
constexpr Half kF16 = {DType::kF16, 5, 10};
constexpr Half kBF16 = {DType::kBF16, 8, 7};

class ConvertHalf : public ::testing::TestWithParam<Half> {};
INSTANTIATE_TEST_SUITE_P(Types, ConvertHalf, ::testing::Values(kF16, kBF16));

TEST_P(ConvertHalf, EveryValueIsReadAsItIsDefined) {
  const std::vector<uint16_t> all = AllBits();
  const auto floats = Converted<float>(GetParam().dtype, all, DType::kF32);
  const auto doubles = Converted<double>(GetParam().dtype, all, DType::kF64);
  for (size_t i = 0; i < all.size(); ++i) {
    const double value = Defined(all[i], GetParam().exponent_bits, GetParam().fraction_bits);
    ASSERT_EQ(std::isnan(value), std::isnan(floats[i])) << i;
    if (!std::isnan(value)) {
      ASSERT_EQ(doubles[i], value) << i;
      ASSERT_EQ(std::signbit(doubles[i]), std::signbit(value)) << i;
      ASSERT_EQ(static_cast<double>(floats[i]), value) << i;
    }
  }
}

TEST_P(ConvertHalf, ThereAndBackIsTheSame) {
  const std::vector<uint16_t> all = AllBits();
  for (const DType wide : {DType::kF32, DType::kF64}) {
    std::vector<uint16_t> back;
    if (wide == DType::kF32) {
      back = Converted<uint16_t>(wide, Converted<float>(GetParam().dtype, all, wide),
                                 GetParam().dtype);
    } else {
      back = Converted<uint16_t>(wide, Converted<double>(GetParam().dtype, all, wide),
                                 GetParam().dtype);
    }
    for (size_t i = 0; i < all.size(); ++i) {
      if (!std::isnan(Defined(all[i], GetParam().exponent_bits, GetParam().fraction_bits))) {
        ASSERT_EQ(back[i], all[i]);
      } else {
        ASSERT_TRUE(
            std::isnan(Defined(back[i], GetParam().exponent_bits, GetParam().fraction_bits)));
      }
    }
  }
}

// Between each two neighbours: halfway goes to the even one, anything else to the nearer.
TEST_P(ConvertHalf, IsRoundedToTheNearestTiesToEven) {
  const Half type = GetParam();
  const auto infinity =
      static_cast<uint16_t>(((1 << type.exponent_bits) - 1) << type.fraction_bits);
  std::vector<double> values;
  std::vector<uint16_t> expected;
  for (uint16_t bits = 0; bits < infinity; ++bits) {
    const double low = Defined(bits, type.exponent_bits, type.fraction_bits);
    const auto next = static_cast<uint16_t>(bits + 1);
    // (Behind the largest: as if there were one more exponent.)
    const double high = next == infinity ? std::ldexp(1, 1 << (type.exponent_bits - 1))
                                         : Defined(next, type.exponent_bits, type.fraction_bits);
    const double middle = (low + high) / 2;
    const auto even = (bits & 1) == 0 ? bits : next;
    for (const double sign : {1.0, -1.0}) {
      const auto signed_bits = static_cast<uint16_t>(sign < 0 ? 0x8000 : 0);
      values.push_back(sign * middle);
      expected.push_back(even | signed_bits);
      values.push_back(sign * std::nextafter(middle, 0));
      expected.push_back(bits | signed_bits);
      values.push_back(sign * std::nextafter(middle, 1e300));
      expected.push_back(next | signed_bits);
    }
  }
  EXPECT_EQ(Converted<uint16_t>(DType::kF64, values, type.dtype), expected);
}

TEST(Convert, BetweenTheWideTypesItIsTheMachines) {
  std::mt19937_64 random(1);
  std::vector<double> doubles = {0,      -0.0,   1e300,
                                 -1e300, 1e-310, std::numeric_limits<double>::infinity()};
  std::vector<float> floats;
  for (int i = 0; i < 10'000; ++i) {
    doubles.push_back(std::bit_cast<double>(random() & ~(uint64_t{1} << 62)));
  }
  for (const double value : doubles) {
    floats.push_back(static_cast<float>(value));
  }
  const auto made = Converted<float>(DType::kF64, doubles, DType::kF32);
  EXPECT_EQ(std::memcmp(made.data(), floats.data(), made.size() * sizeof(float)), 0);
  const auto back = Converted<double>(DType::kF32, floats, DType::kF64);
  for (size_t i = 0; i < floats.size(); ++i) {
    EXPECT_EQ(back[i], static_cast<double>(floats[i]));
  }
}

TEST(Convert, NothingNeedBeAligned) {
  std::vector<std::byte> source(1 + 2 * sizeof(double));
  std::vector<std::byte> target(1 + 2 * sizeof(float));
  const double values[] = {1.5, -3};
  std::memcpy(source.data() + 1, values, sizeof(values));
  ConvertElements(DType::kF64, source.data() + 1, DType::kF32, target.data() + 1, 2);
  float got[2];
  std::memcpy(got, target.data() + 1, sizeof(got));
  EXPECT_EQ(got[0], 1.5F);
  EXPECT_EQ(got[1], -3.0F);
}

}  // namespace
}  // namespace holdfast::client
