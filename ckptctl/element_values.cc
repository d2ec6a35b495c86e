#include "ckptctl/element_values.h"

#include <cmath>

namespace holdfast {
namespace {

float ValueOf(const SmallFloat& type, uint8_t bits) {
  const int sign = bits >> 7;
  const int exponent = (bits & 0x7f) >> type.mantissa_bits;
  const int mantissa = bits & ((1 << type.mantissa_bits) - 1);
  const int highest = (1 << type.exponent_bits) - 1;
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  switch (type.special) {
    case SmallFloat::Special::kIeee:
      if (exponent == highest) {
        return mantissa != 0 ? kNan : sign != 0 ? -kInfinity : kInfinity;
      }
      break;
    case SmallFloat::Special::kOneNan:
      if ((bits & 0x7f) == 0x7f) {
        return kNan;
      }
      break;
    case SmallFloat::Special::kMinusZero:
      if (bits == 0x80) {
        return kNan;
      }
      break;
  }
  // Without an exponent the leading one is missing.
  const int significand = exponent == 0 ? mantissa : mantissa | (1 << type.mantissa_bits);
  const int scale = (exponent == 0 ? 1 : exponent) - type.bias - type.mantissa_bits;
  const float value = std::ldexp(static_cast<float>(significand), scale);
  return sign != 0 ? -value : value;
}

}  // namespace

std::array<float, 256> ValuesOf(const SmallFloat& type) {
  std::array<float, 256> values = {};
  for (size_t bits = 0; bits < values.size(); ++bits) {
    values[bits] = ValueOf(type, static_cast<uint8_t>(bits));
  }
  return values;
}

const std::array<float, 256>& ValuesOfE4M3() {
  static const auto values = ValuesOf({4, 3, 7, SmallFloat::Special::kOneNan});
  return values;
}

const std::array<float, 256>& ValuesOfE5M2() {
  static const auto values = ValuesOf({5, 2, 15, SmallFloat::Special::kIeee});
  return values;
}

const std::array<float, 256>& ValuesOfE4M3Fnuz() {
  static const auto values = ValuesOf({4, 3, 8, SmallFloat::Special::kMinusZero});
  return values;
}

const std::array<float, 256>& ValuesOfE5M2Fnuz() {
  static const auto values = ValuesOf({5, 2, 16, SmallFloat::Special::kMinusZero});
  return values;
}

const std::array<float, 256>& ValuesOfE8M0() {
  static const auto values = [] {
    std::array<float, 256> powers = {};
    for (int bits = 0; bits < 255; ++bits) {
      powers[static_cast<size_t>(bits)] = std::ldexp(1.0F, bits - 127);
    }
    powers[255] = std::numeric_limits<float>::quiet_NaN();
    return powers;
  }();
  return values;
}

float ValueOfF16(uint16_t bits) {
  const uint32_t sign = uint32_t{bits} >> 15 << 31;
  const uint32_t exponent = (bits >> 10) & 0x1f;
  const uint32_t mantissa = bits & 0x3ff;
  if (exponent == 0x1f) {
    return std::bit_cast<float>(sign | 0x7f800000U | mantissa << 13);
  }
  if (exponent == 0) {
    const float value = static_cast<float>(mantissa) * 0x1p-24F;
    return sign != 0 ? -value : value;
  }
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

}  // namespace holdfast
