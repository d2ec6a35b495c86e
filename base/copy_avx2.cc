// Streams 64-byte lines with AVX2 and folds them into the CRC with PCLMULQDQ: copy_avx512.cc with each 64-byte
// accumulator cut into four of 16 bytes. That is sixteen registers, so the compiler keeps some of them in memory;
// it costs a few per cent against AVX-512, and fewer lanes cost more.
#if defined(__x86_64__)

#include <immintrin.h>

#include "base/copy_kernels.h"
#include "base/crc64_math.h"
#include "base/digest.h"

namespace holdfast {
namespace {

#define HF_AVX2 __attribute__((target("avx2,pclmul")))
#define HF_AVX2_INLINE inline __attribute__((always_inline, target("avx2,pclmul")))

constexpr size_t kLine = kCopyLineBytes;
constexpr size_t kLanes = 4;
constexpr size_t kLaneBytesLarge = 64 * 1024;
constexpr size_t kLaneBytesSmall = 4 * 1024;
constexpr size_t kPrefetchBytes = 1024;

// A line's worth of message, folded or not.
struct Line {
  __m128i part[4];
};

HF_AVX2_INLINE __m128i Factors(crc64_math::FoldFactors factors) {
  return _mm_set_epi64x(static_cast<long long>(factors.late), static_cast<long long>(factors.early));
}

// accumulator * x^(8 * distance) + next, the distance being in `factors`.
HF_AVX2_INLINE __m128i Fold(__m128i accumulator, __m128i factors, __m128i next) {
  const __m128i early = _mm_clmulepi64_si128(accumulator, factors, 0x00);
  const __m128i late = _mm_clmulepi64_si128(accumulator, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(early, late), next);
}

HF_AVX2_INLINE void FoldInto(Line& sum, const Line& accumulator, __m128i factors) {
#pragma GCC unroll 4
  for (size_t i = 0; i < 4; ++i) {
    sum.part[i] = Fold(accumulator.part[i], factors, sum.part[i]);
  }
}

// Copies one line and, when digesting, folds it into `accumulator`.
template <bool kDigest>
HF_AVX2_INLINE void CopyLine(char* to, const char* from, Line& accumulator, __m128i by_line) {
#pragma GCC unroll 2
  for (size_t half = 0; half < 2; ++half) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + half * 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + half * 32), bytes);
    if constexpr (kDigest) {
      __m128i& early = accumulator.part[2 * half];
      __m128i& late = accumulator.part[2 * half + 1];
      early = Fold(early, by_line, _mm256_castsi256_si128(bytes));
      late = Fold(late, by_line, _mm256_extracti128_si256(bytes, 1));
    }
  }
}

// Copies kLanes * kLaneBytes and folds these bytes into the carry.
template <size_t kLaneBytes, bool kDigest>
HF_AVX2_INLINE void CopyGroup(char* to, const char* from, Line& carry) {
  static constexpr crc64_math::FoldFactors kByLine = crc64_math::FoldBy(kLine);
  static constexpr crc64_math::FoldFactors kByLane = crc64_math::FoldBy(kLaneBytes);
  static constexpr crc64_math::FoldFactors kByTwoLanes = crc64_math::FoldBy(2 * kLaneBytes);
  static constexpr crc64_math::FoldFactors kByThreeLanes = crc64_math::FoldBy(3 * kLaneBytes);
  const __m128i by_line = Factors(kByLine);
  const __m128i zero = _mm_setzero_si128();
  const Line none = {{zero, zero, zero, zero}};
  Line accumulator[kLanes] = {carry, none, none, none};
  for (size_t offset = 0; offset < kLaneBytes; offset += kLine) {
#pragma GCC unroll 4
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const size_t at = lane * kLaneBytes + offset;
      if constexpr (kDigest) {
        _mm_prefetch(from + at + kPrefetchBytes, _MM_HINT_T0);
      }
      CopyLine<kDigest>(to + at, from + at, accumulator[lane], by_line);
    }
  }
  if constexpr (kDigest) {
    carry = accumulator[3];
    FoldInto(carry, accumulator[2], Factors(kByLane));
    FoldInto(carry, accumulator[1], Factors(kByTwoLanes));
    FoldInto(carry, accumulator[0], Factors(kByThreeLanes));
  }
}

template <bool kDigest>
HF_AVX2_INLINE void CopyLines(char* to, const char* from, size_t bytes, Line& carry) {
  for (; bytes >= kLanes * kLaneBytesLarge; bytes -= kLanes * kLaneBytesLarge) {
    CopyGroup<kLaneBytesLarge, kDigest>(to, from, carry);
    to += kLanes * kLaneBytesLarge;
    from += kLanes * kLaneBytesLarge;
  }
  for (; bytes >= kLanes * kLaneBytesSmall; bytes -= kLanes * kLaneBytesSmall) {
    CopyGroup<kLaneBytesSmall, kDigest>(to, from, carry);
    to += kLanes * kLaneBytesSmall;
    from += kLanes * kLaneBytesSmall;
  }
  static constexpr crc64_math::FoldFactors kByLine = crc64_math::FoldBy(kLine);
  const __m128i by_line = Factors(kByLine);
  for (size_t offset = 0; offset < bytes; offset += kLine) {
    CopyLine<kDigest>(to + offset, from + offset, carry, by_line);
  }
  _mm_sfence();
}

HF_AVX2 uint64_t CopyAndDigestLines(char* to, const char* from, size_t bytes, uint64_t crc) {
  if (bytes == 0) {
    return crc;
  }
  static constexpr uint64_t kEnter = crc64_math::EnterFactor(kLine);
  const __m128i state = _mm_cvtsi64_si128(static_cast<long long>(~crc));
  const __m128i enter = _mm_cvtsi64_si128(static_cast<long long>(kEnter));
  const __m128i zero = _mm_setzero_si128();
  Line carry = {{_mm_clmulepi64_si128(state, enter, 0x00), zero, zero, zero}};
  CopyLines<true>(to, from, bytes, carry);
  // All the bytes are now congruent to these 64, with a register that starts at zero: the digest "before" is ~0.
  return Crc64(&carry, sizeof(carry), ~uint64_t{0});
}

HF_AVX2 void CopyLinesOnly(char* to, const char* from, size_t bytes) {
  Line unused = {};
  CopyLines<false>(to, from, bytes, unused);
}

bool Supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("pclmul"); }

}  // namespace

const CopyKernel kAvx2CopyKernel = {"avx2", Supported, CopyAndDigestLines, CopyLinesOnly, 0, 0};

}  // namespace holdfast

#endif
