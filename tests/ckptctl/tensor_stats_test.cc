// Elements of every type as numbers, by bits that are written down here; what is said of them, and
// however they are cut. (tests/python/stats_diff_test.py compares all of it with torch.)
#include "ckptctl/tensor_stats.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "ckptctl/element_values.h"

namespace holdfast {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

template <typename T>
std::span<const std::byte> Bytes(const std::vector<T>& values) {
  return std::as_bytes(std::span<const T>(values));
}

double ValueOf(Type type, uint64_t bits) {
  double value = 0;
  VisitElements(type, [&](auto elements) {
    using Elements = decltype(elements);
    if constexpr (std::is_arithmetic_v<typename Elements::Value>) {
      value = static_cast<double>(Elements::At(reinterpret_cast<const std::byte*>(&bits)));
    }
  });
  return value;
}

TEST(Elements, FloatsOfTwoBytes) {
  EXPECT_EQ(ValueOf(Type::kF16, 0x3c00), 1.0);
  EXPECT_EQ(ValueOf(Type::kF16, 0xc000), -2.0);
  EXPECT_EQ(ValueOf(Type::kF16, 0x7bff), 65504.0);
  EXPECT_EQ(ValueOf(Type::kF16, 0x0001), 0x1p-24);
  EXPECT_EQ(ValueOf(Type::kF16, 0x83ff), -1023 * 0x1p-24);
  EXPECT_EQ(ValueOf(Type::kF16, 0x7c00), kInf);
  EXPECT_EQ(ValueOf(Type::kF16, 0xfc00), -kInf);
  EXPECT_TRUE(std::isnan(ValueOf(Type::kF16, 0x7c01)));
  EXPECT_TRUE(std::signbit(ValueOf(Type::kF16, 0x8000)));
  EXPECT_EQ(ValueOf(Type::kBF16, 0x3f80), 1.0);
  EXPECT_EQ(ValueOf(Type::kBF16, 0xc049), -3.140625);
  EXPECT_EQ(ValueOf(Type::kBF16, 0x7f80), kInf);
  EXPECT_TRUE(std::isnan(ValueOf(Type::kBF16, 0xffc0)));
}

TEST(Elements, FloatsOfOneByte) {
  EXPECT_EQ(ValueOf(Type::kF8E4M3, 0x38), 1.0);
  EXPECT_EQ(ValueOf(Type::kF8E4M3, 0x7e), 448.0);
  EXPECT_EQ(ValueOf(Type::kF8E4M3, 0x01), 0x1p-9);
  EXPECT_TRUE(std::isnan(ValueOf(Type::kF8E4M3, 0x7f)));
  EXPECT_TRUE(std::isnan(ValueOf(Type::kF8E4M3, 0xff)));
  EXPECT_EQ(ValueOf(Type::kF8E5M2, 0x3c), 1.0);
  EXPECT_EQ(ValueOf(Type::kF8E5M2, 0x7b), 57344.0);
  EXPECT_EQ(ValueOf(Type::kF8E5M2, 0x7c), kInf);
  EXPECT_EQ(ValueOf(Type::kF8E5M2, 0xfc), -kInf);
  EXPECT_TRUE(std::isnan(ValueOf(Type::kF8E5M2, 0x7d)));
  EXPECT_EQ(ValueOf(Type::kF8E4M3Fnuz, 0x40), 1.0);
  EXPECT_EQ(ValueOf(Type::kF8E4M3Fnuz, 0x7f), 240.0);
  EXPECT_TRUE(std::isnan(ValueOf(Type::kF8E4M3Fnuz, 0x80)));
  EXPECT_EQ(ValueOf(Type::kF8E5M2Fnuz, 0x40), 1.0);
  EXPECT_EQ(ValueOf(Type::kF8E5M2Fnuz, 0xff), -57344.0);
  EXPECT_TRUE(std::isnan(ValueOf(Type::kF8E5M2Fnuz, 0x80)));
  EXPECT_EQ(ValueOf(Type::kF8E8M0, 127), 1.0);
  EXPECT_EQ(ValueOf(Type::kF8E8M0, 0), 0x1p-127);
  EXPECT_EQ(ValueOf(Type::kF8E8M0, 254), 0x1p127);
  EXPECT_TRUE(std::isnan(ValueOf(Type::kF8E8M0, 255)));
}

TEST(Elements, TheOthers) {
  EXPECT_EQ(ValueOf(Type::kBool, 1), 1.0);
  EXPECT_EQ(ValueOf(Type::kBool, 7), 1.0) << "whatever bits true has";
  EXPECT_EQ(ValueOf(Type::kI8, 0xff), -1.0);
  EXPECT_EQ(ValueOf(Type::kU8, 0xff), 255.0);
  EXPECT_EQ(ValueOf(Type::kI16, 0x8000), -32768.0);
  EXPECT_EQ(ValueOf(Type::kU16, 0x8000), 32768.0);
  EXPECT_EQ(ValueOf(Type::kI32, 0xffffffff), -1.0);
  EXPECT_EQ(ValueOf(Type::kU32, 0xffffffff), 4294967295.0);
  EXPECT_EQ(ValueOf(Type::kF32, 0xbf800000), -1.0);
  EXPECT_EQ(ValueOf(Type::kF64, 0x4000000000000000), 2.0);
}

TEST(Stats, ByHand) {
  const float nan = std::nanf("");
  const float inf = std::numeric_limits<float>::infinity();
  StatsOf stats(Type::kF32);
  stats.Add(Bytes<float>({1, -3, 0, nan}));
  stats.Add(Bytes<float>({}));
  stats.Add(Bytes<float>({-0.0F, inf, -inf, 4.5F}));
  const TensorStats told = stats.Finish();
  EXPECT_EQ(told.elements, 8U);
  EXPECT_EQ(told.nan, 1U);
  EXPECT_EQ(told.inf, 2U);
  EXPECT_EQ(told.zeros, 2U);
  EXPECT_EQ(told.min, ElementNumber(-3.0));
  EXPECT_EQ(told.max, ElementNumber(4.5));
  EXPECT_EQ(told.abs_max, ElementNumber(4.5));
  EXPECT_EQ(told.mean, 0.5);  // (1 - 3 + 0 - 0 + 4.5) / 5
}

TEST(Stats, IntegersAreExact) {
  StatsOf most(Type::kU64);
  most.Add(Bytes<uint64_t>({UINT64_MAX, UINT64_MAX - 2}));
  EXPECT_EQ(most.Finish().min, ElementNumber(UINT64_MAX - 2));
  EXPECT_EQ(most.Finish().max, ElementNumber(UINT64_MAX));
  EXPECT_EQ(most.Finish().abs_max, ElementNumber(UINT64_MAX));
  StatsOf least(Type::kI64);
  least.Add(Bytes<int64_t>({INT64_MIN, 1, -1, 0}));
  EXPECT_EQ(least.Finish().min, ElementNumber(INT64_MIN));
  EXPECT_EQ(least.Finish().abs_max, ElementNumber(uint64_t{1} << 63));
  EXPECT_EQ(least.Finish().mean, -0x1p61);
}

TEST(Stats, SumsDoNotOverflow) {
  const double huge = std::numeric_limits<double>::max();
  StatsOf stats(Type::kF64);
  stats.Add(Bytes<double>({huge, huge, huge}));
  EXPECT_EQ(stats.Finish().mean, huge);
}

TEST(Stats, OfNothingNothingIsSaid) {
  StatsOf none(Type::kF32);
  EXPECT_EQ(none.Finish().elements, 0U);
  EXPECT_FALSE(none.Finish().min || none.Finish().max || none.Finish().mean ||
               none.Finish().abs_max);
  StatsOf nan(Type::kF32);
  nan.Add(Bytes<float>({std::nanf("")}));
  EXPECT_FALSE(nan.Finish().min || nan.Finish().max || nan.Finish().mean || nan.Finish().abs_max);
}

TEST(Stats, HoweverTheyAreCut) {
  std::vector<float> values(10'000);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] =
        std::ldexp(static_cast<float>(i * 7919 % 1000) - 500, static_cast<int>(i % 60) - 30);
  }
  StatsOf whole(Type::kF32);
  whole.Add(Bytes(values));
  StatsOf cut(Type::kF32);
  for (size_t at = 0, some = 1; at < values.size(); at += some, some = some % 97 + 1) {
    cut.Add(Bytes(values).subspan(at * 4, std::min(some, values.size() - at) * 4));
  }
  EXPECT_EQ(cut.Finish().mean, whole.Finish().mean);
  EXPECT_EQ(cut.Finish().max, whole.Finish().max);
}

TensorDifference Difference(const std::vector<float>& a, const std::vector<float>& b) {
  DifferenceOf difference(Type::kF32);
  difference.Add(Bytes(a), Bytes(b));
  return difference.Finish();
}

TEST(Difference, ByHand) {
  const float nan = std::nanf("");
  const float inf = std::numeric_limits<float>::infinity();
  const TensorDifference told =
      Difference({3, 4, nan, 0, inf, 1, 0}, {3, 4.5F, nan, -0.0F, 1, nan, -0.0F});
  EXPECT_EQ(told.elements, 7U);
  EXPECT_EQ(told.differing, 5U) << "NaN is the same where its bits are, and a zero has a sign";
  EXPECT_EQ(told.nan_a, 1U);
  EXPECT_EQ(told.nan_b, 2U);
  EXPECT_EQ(told.inf_a, 1U);
  EXPECT_EQ(told.inf_b, 0U);
  EXPECT_EQ(told.max_abs, 0.5);
  EXPECT_EQ(told.relative_norm, 0.1);  // 0.5 / ||(3, 4, 0)||
}

TEST(Difference, WhereThereIsNoNorm) {
  EXPECT_EQ(Difference({0, 0}, {0, 0}).relative_norm, 0.0);
  EXPECT_EQ(Difference({0, 0}, {0, 1}).max_abs, 1.0);
  EXPECT_FALSE(Difference({0, 0}, {0, 1}).relative_norm.has_value());
  EXPECT_FALSE(Difference({std::nanf("")}, {1}).max_abs.has_value());
  EXPECT_FALSE(Difference({}, {}).max_abs.has_value());
}

TEST(Difference, OfLargeNumbers) {
  DifferenceOf integers(Type::kI64);
  integers.Add(Bytes<int64_t>({INT64_MIN}), Bytes<int64_t>({INT64_MAX}));
  EXPECT_EQ(integers.Finish().max_abs, 0x1p64);
  const double huge = std::numeric_limits<double>::max();
  DifferenceOf doubles(Type::kF64);
  doubles.Add(Bytes<double>({huge}), Bytes<double>({-huge}));
  EXPECT_FALSE(doubles.Finish().max_abs.has_value()) << "it is no double";
  EXPECT_EQ(doubles.Finish().relative_norm, 2.0) << "its squares are none either";
  DifferenceOf unsigned_ones(Type::kU8);
  unsigned_ones.Add(Bytes<uint8_t>({0, 255}), Bytes<uint8_t>({255, 0}));
  EXPECT_EQ(unsigned_ones.Finish().max_abs, 255.0);
}

}  // namespace
}  // namespace holdfast
