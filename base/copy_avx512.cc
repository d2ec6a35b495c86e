// Streams 64-byte lines with AVX-512 and folds them into the CRC with VPCLMULQDQ as they pass through.
//
// Four lanes far apart are copied side by side: one stream alone leaves a fifth of the memory's bandwidth unused,
// because the hardware prefetcher starts anew at each page. Each lane has its own accumulator of 64 bytes,
// congruent to all that the lane has passed; at the end of a group the accumulators are folded over the distance
// between lanes into one, which enters the next group's first lane.
#if defined(__x86_64__)

#include <immintrin.h>

#include "base/copy_kernels.h"
#include "base/crc64_math.h"
#include "base/digest.h"

namespace holdfast {
namespace {

#define HF_AVX512 __attribute__((target("avx512f,vpclmulqdq,pclmul")))
#define HF_AVX512_INLINE inline __attribute__((always_inline, target("avx512f,vpclmulqdq,pclmul")))

constexpr size_t kLine = kCopyLineBytes;
constexpr size_t kLanes = 4;
constexpr size_t kLaneBytesLarge = 64 * 1024;
constexpr size_t kLaneBytesSmall = 4 * 1024;
// How far ahead the source is fetched while digesting; without the digest the hardware keeps up by itself.
constexpr size_t kPrefetchBytes = 1024;

HF_AVX512_INLINE __m512i Broadcast(crc64_math::FoldFactors factors) {
  return _mm512_set_epi64(static_cast<long long>(factors.late), static_cast<long long>(factors.early),
                          static_cast<long long>(factors.late), static_cast<long long>(factors.early),
                          static_cast<long long>(factors.late), static_cast<long long>(factors.early),
                          static_cast<long long>(factors.late), static_cast<long long>(factors.early));
}

// accumulator * x^(8 * distance) + next, the distance being in `factors`.
HF_AVX512_INLINE __m512i Fold(__m512i accumulator, __m512i factors, __m512i next) {
  const __m512i early = _mm512_clmulepi64_epi128(accumulator, factors, 0x00);
  const __m512i late = _mm512_clmulepi64_epi128(accumulator, factors, 0x11);
  return _mm512_ternarylogic_epi64(early, late, next, 0x96);  // xor of the three
}

// Copies kLanes * kLaneBytes; returns the carry with these bytes folded in.
template <size_t kLaneBytes, bool kDigest>
HF_AVX512_INLINE __m512i CopyGroup(char* to, const char* from, __m512i carry) {
  static constexpr crc64_math::FoldFactors kByLine = crc64_math::FoldBy(kLine);
  static constexpr crc64_math::FoldFactors kByLane = crc64_math::FoldBy(kLaneBytes);
  static constexpr crc64_math::FoldFactors kByTwoLanes = crc64_math::FoldBy(2 * kLaneBytes);
  static constexpr crc64_math::FoldFactors kByThreeLanes = crc64_math::FoldBy(3 * kLaneBytes);
  const __m512i by_line = Broadcast(kByLine);
  __m512i accumulator[kLanes] = {carry, _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
  for (size_t offset = 0; offset < kLaneBytes; offset += kLine) {
#pragma GCC unroll 4
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const size_t at = lane * kLaneBytes + offset;
      const __m512i line = _mm512_loadu_si512(from + at);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), line);
      if constexpr (kDigest) {
        _mm_prefetch(from + at + kPrefetchBytes, _MM_HINT_T0);
        accumulator[lane] = Fold(accumulator[lane], by_line, line);
      }
    }
  }
  if constexpr (kDigest) {
    __m512i sum = Fold(accumulator[2], Broadcast(kByLane), accumulator[3]);
    sum = Fold(accumulator[1], Broadcast(kByTwoLanes), sum);
    return Fold(accumulator[0], Broadcast(kByThreeLanes), sum);
  }
  return carry;
}

template <bool kDigest>
HF_AVX512_INLINE __m512i CopyLines(char* to, const char* from, size_t bytes, __m512i carry) {
  for (; bytes >= kLanes * kLaneBytesLarge; bytes -= kLanes * kLaneBytesLarge) {
    carry = CopyGroup<kLaneBytesLarge, kDigest>(to, from, carry);
    to += kLanes * kLaneBytesLarge;
    from += kLanes * kLaneBytesLarge;
  }
  for (; bytes >= kLanes * kLaneBytesSmall; bytes -= kLanes * kLaneBytesSmall) {
    carry = CopyGroup<kLaneBytesSmall, kDigest>(to, from, carry);
    to += kLanes * kLaneBytesSmall;
    from += kLanes * kLaneBytesSmall;
  }
  static constexpr crc64_math::FoldFactors kByLine = crc64_math::FoldBy(kLine);
  const __m512i by_line = Broadcast(kByLine);
  for (size_t offset = 0; offset < bytes; offset += kLine) {
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
  static constexpr uint64_t kEnter = crc64_math::EnterFactor(kLine);
  const __m128i state = _mm_cvtsi64_si128(static_cast<long long>(~crc));
  const __m128i enter = _mm_cvtsi64_si128(static_cast<long long>(kEnter));
  const __m512i carry = _mm512_zextsi128_si512(_mm_clmulepi64_si128(state, enter, 0x00));
  alignas(kLine) char folded[kLine];
  _mm512_store_si512(folded, CopyLines<true>(to, from, bytes, carry));
  // All the bytes are now congruent to these 64, with a register that starts at zero: the digest "before" is ~0.
  return Crc64(folded, kLine, ~uint64_t{0});
}

HF_AVX512 void CopyLinesOnly(char* to, const char* from, size_t bytes) {
  CopyLines<false>(to, from, bytes, _mm512_setzero_si512());
}

bool Supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("pclmul");
}

}  // namespace

const CopyKernel kAvx512CopyKernel = {"avx512", Supported, CopyAndDigestLines, CopyLinesOnly, 0, 0};

}  // namespace holdfast

#endif
