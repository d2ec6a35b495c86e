#include "client-lib/src/convert.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace holdfast::client {
namespace {

// As they lie in memory. Each is read as a double, which has all their values, and made from one.
struct F64 {
  using Bits = uint64_t;
  static double Read(Bits bits) { return std::bit_cast<double>(bits); }
  static Bits Make(double value) { return std::bit_cast<Bits>(value); }
};

struct F32 {
  using Bits = uint32_t;
  static double Read(Bits bits) { return std::bit_cast<float>(bits); }
  static Bits Make(double value) { return std::bit_cast<Bits>(static_cast<float>(value)); }
};

// Rounded to odd, so that another rounding of it to half as many bits comes out as one alone would.
uint32_t OddFloat(double value) {
  const auto near = static_cast<float>(value);
  auto bits = std::bit_cast<uint32_t>(near);
  if (std::isfinite(value) && static_cast<double>(near) != value && (bits & 1) == 0) {
    // Away from the even neighbour, to where the value lies.
    const bool beyond = std::isinf(near) || std::fabs(static_cast<double>(near)) > std::fabs(value);
    bits += beyond ? ~uint32_t{0} : 1;
  }
  return bits;
}

struct BF16 {
  using Bits = uint16_t;
  static double Read(Bits bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
  static Bits Make(double value) {
    const uint32_t bits = OddFloat(value);
    if (std::isnan(value)) {
      return static_cast<Bits>((bits >> 16) | 0x40);
    }
    return static_cast<Bits>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
};

struct F16 {
  using Bits = uint16_t;
  static constexpr int kBias = 15;
  static constexpr int kFraction = 10;
  static double Read(Bits bits) {
    const int exponent = (bits >> kFraction) & 0x1F;
    const int fraction = bits & 0x3FF;
    double value = 0;
    if (exponent == 0x1F) {
      value = fraction == 0 ? std::numeric_limits<double>::infinity()
                            : std::numeric_limits<double>::quiet_NaN();
    } else if (exponent == 0) {
      value = std::ldexp(fraction, 1 - kBias - kFraction);
    } else {
      value = std::ldexp(fraction + (1 << kFraction), exponent - kBias - kFraction);
    }
    return (bits & 0x8000) != 0 ? -value : value;
  }
  static Bits Make(double value) {
    const Bits sign = std::signbit(value) ? 0x8000 : 0;
    const double size = std::fabs(value);
    if (std::isnan(value)) {
      return sign | 0x7E00;
    }
    if (size >= 65520) {  // halfway to what would come after the largest
      return sign | 0x7C00;
    }
    // In units of the last place that such a number has; nearbyint takes ties to even.
    const int exponent = size < std::ldexp(1, 1 - kBias) ? 1 - kBias : std::ilogb(size);
    const auto units = static_cast<Bits>(std::nearbyint(std::ldexp(size, kFraction - exponent)));
    // (A fraction that was rounded up to the next power of two carries into the exponent.)
    const int offset = (exponent + kBias - 1) << kFraction;
    return static_cast<Bits>(sign | (offset + units));
  }
};

template <typename From, typename To>
void Convert(const std::byte* source, std::byte* target, uint64_t elements) {
  for (uint64_t i = 0; i < elements; ++i) {
    typename From::Bits from;
    std::memcpy(&from, source + i * sizeof(from), sizeof(from));
    const typename To::Bits to = To::Make(From::Read(from));
    std::memcpy(target + i * sizeof(to), &to, sizeof(to));
  }
}

template <typename From>
void ConvertFrom(DType to, const std::byte* source, std::byte* target, uint64_t elements) {
  switch (to) {
    case DType::kF16:
      return Convert<From, F16>(source, target, elements);
    case DType::kBF16:
      return Convert<From, BF16>(source, target, elements);
    case DType::kF32:
      return Convert<From, F32>(source, target, elements);
    default:
      return Convert<From, F64>(source, target, elements);
  }
}

}  // namespace

void ConvertElements(DType from, const std::byte* source, DType to, std::byte* target,
                     uint64_t elements) {
  if (from == to) {
    std::memcpy(target, source, elements * DTypeBytes(from));
    return;
  }
  switch (from) {
    case DType::kF16:
      return ConvertFrom<F16>(to, source, target, elements);
    case DType::kBF16:
      return ConvertFrom<BF16>(to, source, target, elements);
    case DType::kF32:
      return ConvertFrom<F32>(to, source, target, elements);
    default:
      return ConvertFrom<F64>(to, source, target, elements);
  }
}

}  // namespace holdfast::client
