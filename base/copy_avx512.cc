// Streams 64-byte lines with AVX-512 and folds them into the CRC with VPCLMULQDQ as they pass
// through.
#if defined(__x86_64__)

#include <immintrin.h>

#include "base/copy_kernels.h"
#include "base/cpu_features.h"
#include "base/digest.h"

namespace holdfast {
namespace {

// Attributes on the functions, not flags on the file: nothing that other files could link to is
// compiled for a CPU that they may not have.
#if defined(__clang__) && __clang_major__ >= 18 && __clang_major__ < 22
#define HF_AVX512_FEATURES "avx512f,evex512,vpclmulqdq,pclmul"  // (zig has it off)
#else
#define HF_AVX512_FEATURES "avx512f,vpclmulqdq,pclmul"
#endif
#define HF_AVX512 __attribute__((target(HF_AVX512_FEATURES)))
#define HF_AVX512_INLINE inline __attribute__((always_inline, target(HF_AVX512_FEATURES)))

HF_AVX512_INLINE __m512i Broadcast(const crc64_math::FoldFactors& factors) {
  const long long early = static_cast<long long>(factors.early);
  const long long late = static_cast<long long>(factors.late);
  return _mm512_set_epi64(late, early, late, early, late, early, late, early);
}

// accumulator * x^(8 * distance) + next, the distance being in `factors`.
HF_AVX512_INLINE __m512i Fold(__m512i accumulator, __m512i factors, __m512i next) {
  const __m512i early = _mm512_clmulepi64_epi128(accumulator, factors, 0x00);
  const __m512i late = _mm512_clmulepi64_epi128(accumulator, factors, 0x11);
  return _mm512_ternarylogic_epi64(early, late, next, 0x96);  // xor of the three
}

// Copies kCopyLanes lanes of `units`; returns the carry with these bytes folded in.
template <bool kDigest, bool kPrefetch>
HF_AVX512_INLINE __m512i CopyGroup(char* to, const char* from, size_t units, __m512i carry) {
  const size_t lane_bytes = units * kCopyLaneUnitBytes;
  const __m512i by_line = Broadcast(kCopyFoldByLine);
  const __m512i zero = _mm512_setzero_si512();
  __m512i accumulator[kCopyLanes] = {carry, zero, zero, zero};
  for (size_t offset = 0; offset < lane_bytes; offset += kCopyLineBytes) {
#pragma GCC unroll 4
    for (size_t lane = 0; lane < kCopyLanes; ++lane) {
      const size_t at = lane * lane_bytes + offset;
      const __m512i line = _mm512_loadu_si512(from + at);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), line);
      if constexpr (kPrefetch) {
        _mm_prefetch(from + at + kCopyPrefetchBytes, _MM_HINT_T0);
      }
      if constexpr (kDigest) {
        accumulator[lane] = Fold(accumulator[lane], by_line, line);
      }
    }
  }
  if constexpr (kDigest) {
    carry = Fold(accumulator[2], Broadcast(kCopyFolds[units]), accumulator[3]);
    carry = Fold(accumulator[1], Broadcast(kCopyFolds[2 * units]), carry);
    carry = Fold(accumulator[0], Broadcast(kCopyFolds[3 * units]), carry);
  }
  return carry;
}

template <bool kDigest>
HF_AVX512_INLINE __m512i CopyLines(char* to, const char* from, size_t bytes, __m512i carry) {
  while (const size_t units = CopyLaneUnits(bytes)) {
    if (kDigest && units * kCopyLaneUnitBytes >= kCopyPrefetchLaneBytesMin) {
      carry = CopyGroup<kDigest, kDigest>(to, from, units, carry);
    } else {
      carry = CopyGroup<kDigest, false>(to, from, units, carry);
    }
    const size_t group = kCopyLanes * units * kCopyLaneUnitBytes;
    to += group;
    from += group;
    bytes -= group;
  }
  const __m512i by_line = Broadcast(kCopyFoldByLine);
  for (size_t offset = 0; offset < bytes; offset += kCopyLineBytes) {
    const __m512i line = _mm512_loadu_si512(from + offset);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + offset), line);
    if constexpr (kDigest) {
      carry = Fold(carry, by_line, line);
    }
  }
  _mm_sfence();
  return carry;
}

HF_AVX512 uint64_t CopyAndDigestLines(char* to, const char* from, size_t bytes, uint64_t crc) {
  if (bytes == 0) {
    return crc;
  }
  const __m128i state = _mm_cvtsi64_si128(static_cast<long long>(~crc));
  const __m128i enter = _mm_cvtsi64_si128(static_cast<long long>(kCopyEnterFactor));
  const __m512i carry = _mm512_zextsi128_si512(_mm_clmulepi64_si128(state, enter, 0x00));
  alignas(kCopyLineBytes) char folded[kCopyLineBytes];
  _mm512_store_si512(folded, CopyLines<true>(to, from, bytes, carry));
  // These 64 bytes stand for all of them to a register that starts at zero: after a "digest" of ~0.
  return Crc64(folded, sizeof(folded), ~uint64_t{0});
}

HF_AVX512 void CopyLinesOnly(char* to, const char* from, size_t bytes) {
  CopyLines<false>(to, from, bytes, _mm512_setzero_si512());
}

bool Supported() {
  return CpuFeatures().avx512f && CpuFeatures().vpclmulqdq && CpuFeatures().pclmul;
}

}  // namespace

const CopyKernel kAvx512CopyKernel = {"avx512", Supported, CopyAndDigestLines, CopyLinesOnly};

}  // namespace holdfast

#endif
