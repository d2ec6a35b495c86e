// Elements of safetensors' types as numbers.
//
//   VisitElements(type, [&](auto elements) {
//     using Elements = decltype(elements);
//     for (size_t i = 0; i < bytes.size() / Elements::kBytes; ++i) {
//       const typename Elements::Value value = Elements::At(bytes.data() + i * Elements::kBytes);
//     }
//   });
//
// Values are exact: double holds every float of up to eight bytes, integers are themselves. Pure;
// bytes need not be aligned.
#pragma once

#include <array>
#include <bit>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "holdfast/state.h"

namespace holdfast {

// A float of one byte: how many bits of exponent and mantissa, and what stands for no number.
struct SmallFloat {
  enum class Special : uint8_t {
    kIeee,      // the highest exponent: infinity and NaN
    kOneNan,    // all bits but the sign: NaN; no infinity (E4M3)
    kMinusZero  // what would be minus zero is NaN; no infinity (…FNUZ)
  };
  int exponent_bits;
  int mantissa_bits;
  int bias;
  Special special;
};
std::array<float, 256> ValuesOf(const SmallFloat& type);
const std::array<float, 256>& ValuesOfE4M3();
const std::array<float, 256>& ValuesOfE5M2();
const std::array<float, 256>& ValuesOfE4M3Fnuz();
const std::array<float, 256>& ValuesOfE5M2Fnuz();
const std::array<float, 256>& ValuesOfE8M0();  // powers of two alone, and NaN
float ValueOfF16(uint16_t bits);

template <typename T>
struct PlainElements {
  using Value = T;
  static constexpr size_t kBytes = sizeof(T);
  static Value At(const std::byte* at) {
    T value;
    std::memcpy(&value, at, sizeof(T));
    return value;
  }
};
struct BoolElements {
  using Value = uint8_t;
  static constexpr size_t kBytes = 1;
  static Value At(const std::byte* at) { return *at == std::byte{0} ? 0 : 1; }
};
struct F16Elements {
  using Value = float;
  static constexpr size_t kBytes = 2;
  static Value At(const std::byte* at) { return ValueOfF16(PlainElements<uint16_t>::At(at)); }
};
struct Bf16Elements {
  using Value = float;
  static constexpr size_t kBytes = 2;
  static Value At(const std::byte* at) {
    return std::bit_cast<float>(uint32_t{PlainElements<uint16_t>::At(at)} << 16);
  }
};
template <const std::array<float, 256>& (*kValues)()>
struct ByteFloatElements {
  using Value = float;
  static constexpr size_t kBytes = 1;
  static Value At(const std::byte* at) { return kValues()[static_cast<uint8_t>(*at)]; }
};
struct ComplexElements {
  using Value = std::complex<float>;
  static constexpr size_t kBytes = 8;
  static Value At(const std::byte* at) {
    return {PlainElements<float>::At(at), PlainElements<float>::At(at + 4)};
  }
};

template <typename Visit>
void VisitElements(Type type, const Visit& visit) {
  switch (type) {
    case Type::kBool:
      return visit(BoolElements());
    case Type::kU8:
      return visit(PlainElements<uint8_t>());
    case Type::kI8:
      return visit(PlainElements<int8_t>());
    case Type::kF8E4M3:
      return visit(ByteFloatElements<ValuesOfE4M3>());
    case Type::kF8E5M2:
      return visit(ByteFloatElements<ValuesOfE5M2>());
    case Type::kU16:
      return visit(PlainElements<uint16_t>());
    case Type::kI16:
      return visit(PlainElements<int16_t>());
    case Type::kF16:
      return visit(F16Elements());
    case Type::kBF16:
      return visit(Bf16Elements());
    case Type::kU32:
      return visit(PlainElements<uint32_t>());
    case Type::kI32:
      return visit(PlainElements<int32_t>());
    case Type::kF32:
      return visit(PlainElements<float>());
    case Type::kU64:
      return visit(PlainElements<uint64_t>());
    case Type::kI64:
      return visit(PlainElements<int64_t>());
    case Type::kF64:
      return visit(PlainElements<double>());
    case Type::kC64:
      return visit(ComplexElements());
    case Type::kF8E8M0:
      return visit(ByteFloatElements<ValuesOfE8M0>());
    case Type::kF8E4M3Fnuz:
      return visit(ByteFloatElements<ValuesOfE4M3Fnuz>());
    case Type::kF8E5M2Fnuz:
      return visit(ByteFloatElements<ValuesOfE5M2Fnuz>());
  }
}

}  // namespace holdfast
