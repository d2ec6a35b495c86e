// Streams with AVX2 and folds with PCLMULQDQ: copy_avx512.cc with every line cut into four parts of
// 16 bytes. The sixteen accumulators do not all fit into registers, which costs 5 to 15 % against
// AVX-512; fewer lanes cost more.
#if defined(__x86_64__)

#include <immintrin.h>

#include "base/copy_kernels.h"
#include "base/cpu_features.h"
#include "base/digest.h"

namespace holdfast {
namespace {

#define HF_AVX2 __attribute__((target("avx2,pclmul")))
#define HF_AVX2_INLINE inline __attribute__((always_inline, target("avx2,pclmul")))

// A line's worth of message.
struct Line {
  __m128i part[4];
};

HF_AVX2_INLINE __m128i Load(const crc64_math::FoldFactors& factors) {
  return _mm_set_epi64x(static_cast<long long>(factors.late),
                        static_cast<long long>(factors.early));
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

// Copies kCopyLanes lanes of `units` and folds these bytes into the carry.
template <bool kDigest, bool kPrefetch>
HF_AVX2_INLINE void CopyGroup(char* to, const char* from, size_t units, Line& carry) {
  const size_t lane_bytes = units * kCopyLaneUnitBytes;
  const __m128i by_line = Load(kCopyFoldByLine);
  const __m128i zero = _mm_setzero_si128();
  const Line none = {{zero, zero, zero, zero}};
  Line accumulator[kCopyLanes] = {carry, none, none, none};
  for (size_t offset = 0; offset < lane_bytes; offset += kCopyLineBytes) {
#pragma GCC unroll 4
    for (size_t lane = 0; lane < kCopyLanes; ++lane) {
      const size_t at = lane * lane_bytes + offset;
      if constexpr (kPrefetch) {
        _mm_prefetch(from + at + kCopyPrefetchBytes, _MM_HINT_T0);
      }
      CopyLine<kDigest>(to + at, from + at, accumulator[lane], by_line);
    }
  }
  if constexpr (kDigest) {
    carry = accumulator[3];
    FoldInto(carry, accumulator[2], Load(kCopyFolds[units]));
    FoldInto(carry, accumulator[1], Load(kCopyFolds[2 * units]));
    FoldInto(carry, accumulator[0], Load(kCopyFolds[3 * units]));
  }
}

template <bool kDigest>
HF_AVX2_INLINE void CopyLines(char* to, const char* from, size_t bytes, Line& carry) {
  while (const size_t units = CopyLaneUnits(bytes)) {
    if (kDigest && units * kCopyLaneUnitBytes >= kCopyPrefetchLaneBytesMin) {
      CopyGroup<kDigest, kDigest>(to, from, units, carry);
    } else {
      CopyGroup<kDigest, false>(to, from, units, carry);
    }
    const size_t group = kCopyLanes * units * kCopyLaneUnitBytes;
    to += group;
    from += group;
    bytes -= group;
  }
  const __m128i by_line = Load(kCopyFoldByLine);
  for (size_t offset = 0; offset < bytes; offset += kCopyLineBytes) {
    CopyLine<kDigest>(to + offset, from + offset, carry, by_line);
  }
  _mm_sfence();
}

HF_AVX2 uint64_t CopyAndDigestLines(char* to, const char* from, size_t bytes, uint64_t crc) {
  if (bytes == 0) {
    return crc;
  }
  const __m128i state = _mm_cvtsi64_si128(static_cast<long long>(~crc));
  const __m128i enter = _mm_cvtsi64_si128(static_cast<long long>(kCopyEnterFactor));
  const __m128i zero = _mm_setzero_si128();
  Line carry = {{_mm_clmulepi64_si128(state, enter, 0x00), zero, zero, zero}};
  CopyLines<true>(to, from, bytes, carry);
  // These 64 bytes stand for all of them to a register that starts at zero: after a "digest" of ~0.
  return Crc64(&carry, sizeof(carry), ~uint64_t{0});
}

HF_AVX2 void CopyLinesOnly(char* to, const char* from, size_t bytes) {
  Line unused = {};
  CopyLines<false>(to, from, bytes, unused);
}

bool Supported() {
  return CpuFeatures().avx2 && CpuFeatures().pclmul;
}

}  // namespace

const CopyKernel kAvx2CopyKernel = {"avx2", Supported, CopyAndDigestLines, CopyLinesOnly};

}  // namespace holdfast

#endif
