// Arithmetic on polynomials over GF(2) modulo the CRC-64/XZ polynomial, at compile time where it
// can be: every constant of the digest and copy kernels comes from here. Internal to base/.
//
// "Reflected" everywhere, as the CRC itself: bit i of a word is the coefficient of x^(63-i).
//
//   Multiply(crc_a, PowerOfX(8 * bytes_b)) ^ crc_b   // the digest of A‖B
#pragma once

#include <cstdint>

namespace holdfast::crc64_math {

// ECMA-182, reflected, without its x^64.
inline constexpr uint64_t kPolynomial = 0xC96C5795D7870F42;
inline constexpr uint64_t kOne = uint64_t{1} << 63;

constexpr uint64_t TimesX(uint64_t a) {
  return (a >> 1) ^ ((a & 1) != 0 ? kPolynomial : 0);
}

constexpr uint64_t Multiply(uint64_t a, uint64_t b) {
  uint64_t product = 0;
  for (; b != 0; b <<= 1) {
    product ^= (b & kOne) != 0 ? a : 0;
    a = TimesX(a);
  }
  return product;
}

constexpr uint64_t PowerOfX(uint64_t exponent) {
  uint64_t result = kOne;
  for (uint64_t square = TimesX(kOne); exponent != 0; exponent >>= 1) {
    if ((exponent & 1) != 0) {
      result = Multiply(result, square);
    }
    square = Multiply(square, square);
  }
  return result;
}

// x^-exponent: the polynomial has a constant term, so x has an inverse.
constexpr uint64_t InversePowerOfX(uint64_t exponent) {
  uint64_t result = kOne;
  for (; exponent != 0; --exponent) {
    result = (result & kOne) != 0 ? ((result ^ kPolynomial) << 1) | 1 : result << 1;
  }
  return result;
}

// Folding moves 128 bits of message `bytes` further towards its end: with `early` and `late` the
// halves of a 16-byte lane, early*early_factor + late*late_factor is congruent to the lane times
// x^(8*bytes). A carry-less product of reflected words comes out one power of x too high; the
// exponents take that back.
struct FoldFactors {
  uint64_t early = 0;
  uint64_t late = 0;
};
constexpr FoldFactors FoldBy(uint64_t bytes) {
  return {PowerOfX(8 * bytes + 63), PowerOfX(8 * bytes - 1)};
}

// The CRC register `state` enters a message as if it were xored into the next 8 bytes. The
// carry-less product of `state` and this factor is a 16-byte lane that, folded by `bytes`, has just
// that effect.
constexpr uint64_t EnterFactor(uint64_t bytes) {
  return InversePowerOfX(8 * bytes - 63);
}

}  // namespace holdfast::crc64_math
