// Streams with pairs of 128-bit registers and folds with PMULL: copy_avx2.cc in ARM's words. There
// are 32 registers, so the sixteen accumulators of the four lanes fit.
#if defined(__aarch64__)

#include <arm_neon.h>

#include "base/copy_kernels.h"
#include "base/cpu_features.h"
#include "base/digest.h"

namespace holdfast {
namespace {

// (PMULL. GCC 12 has its intrinsics under the name that also covers SHA, which nothing here uses.)
#define HF_NEON __attribute__((target("+crypto")))
#define HF_NEON_INLINE inline __attribute__((always_inline, target("+crypto")))

// A line's worth of message.
struct Line {
  uint64x2_t part[4];
};

HF_NEON_INLINE uint64x2_t Load(const crc64_math::FoldFactors& factors) {
  return vcombine_u64(vcreate_u64(factors.early), vcreate_u64(factors.late));
}

HF_NEON_INLINE uint64x2_t Multiply(uint64_t a, uint64_t b) {
  return vreinterpretq_u64_p128(vmull_p64(static_cast<poly64_t>(a), static_cast<poly64_t>(b)));
}

// accumulator * x^(8 * distance) + next, the distance being in `factors`.
HF_NEON_INLINE uint64x2_t Fold(uint64x2_t accumulator, uint64x2_t factors, uint64x2_t next) {
  const uint64x2_t early = Multiply(vgetq_lane_u64(accumulator, 0), vgetq_lane_u64(factors, 0));
  const uint64x2_t late = vreinterpretq_u64_p128(
      vmull_high_p64(vreinterpretq_p64_u64(accumulator), vreinterpretq_p64_u64(factors)));
  return veorq_u64(veorq_u64(early, late), next);
}

HF_NEON_INLINE void FoldInto(Line& sum, const Line& accumulator, uint64x2_t factors) {
#pragma GCC unroll 4
  for (size_t i = 0; i < 4; ++i) {
    sum.part[i] = Fold(accumulator.part[i], factors, sum.part[i]);
  }
}

// Past the caches, as far as the processor takes the hint.
HF_NEON_INLINE void StorePair(char* to, uint8x16_t first, uint8x16_t second) {
  __asm__ volatile("stnp %q1, %q2, [%0]" : : "r"(to), "w"(first), "w"(second) : "memory");
}

// Copies one line and, when digesting, folds it into `accumulator`.
template <bool kDigest>
HF_NEON_INLINE void CopyLine(char* to, const char* from, Line& accumulator, uint64x2_t by_line) {
#pragma GCC unroll 2
  for (size_t half = 0; half < 2; ++half) {
    const auto* source = reinterpret_cast<const uint8_t*>(from + half * 32);
    const uint8x16_t first = vld1q_u8(source);
    const uint8x16_t second = vld1q_u8(source + 16);
    StorePair(to + half * 32, first, second);
    if constexpr (kDigest) {
      uint64x2_t& early = accumulator.part[2 * half];
      uint64x2_t& late = accumulator.part[2 * half + 1];
      early = Fold(early, by_line, vreinterpretq_u64_u8(first));
      late = Fold(late, by_line, vreinterpretq_u64_u8(second));
    }
  }
}

// Copies kCopyLanes lanes of `units` and folds these bytes into the carry.
template <bool kDigest, bool kPrefetch>
HF_NEON_INLINE void CopyGroup(char* to, const char* from, size_t units, Line& carry) {
  const size_t lane_bytes = units * kCopyLaneUnitBytes;
  const uint64x2_t by_line = Load(kCopyFoldByLine);
  const uint64x2_t zero = vdupq_n_u64(0);
  const Line none = {{zero, zero, zero, zero}};
  Line accumulator[kCopyLanes] = {carry, none, none, none};
  for (size_t offset = 0; offset < lane_bytes; offset += kCopyLineBytes) {
#pragma GCC unroll 4
    for (size_t lane = 0; lane < kCopyLanes; ++lane) {
      const size_t at = lane * lane_bytes + offset;
      if constexpr (kPrefetch) {
        __builtin_prefetch(from + at + kCopyPrefetchBytes);
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
HF_NEON_INLINE void CopyLines(char* to, const char* from, size_t bytes, Line& carry) {
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
  const uint64x2_t by_line = Load(kCopyFoldByLine);
  for (size_t offset = 0; offset < bytes; offset += kCopyLineBytes) {
    CopyLine<kDigest>(to + offset, from + offset, carry, by_line);
  }
  __asm__ volatile("dmb ishst" : : : "memory");  // (as copy_kernels.h promises)
}

HF_NEON uint64_t CopyAndDigestLines(char* to, const char* from, size_t bytes, uint64_t crc) {
  if (bytes == 0) {
    return crc;
  }
  const uint64x2_t zero = vdupq_n_u64(0);
  Line carry = {{Multiply(~crc, kCopyEnterFactor), zero, zero, zero}};
  CopyLines<true>(to, from, bytes, carry);
  // These 64 bytes stand for all of them to a register that starts at zero: after a "digest" of ~0.
  return Crc64(&carry, sizeof(carry), ~uint64_t{0});
}

HF_NEON void CopyLinesOnly(char* to, const char* from, size_t bytes) {
  Line unused = {};
  CopyLines<false>(to, from, bytes, unused);
}

bool Supported() {
  return CpuHasPmull();
}

}  // namespace

const CopyKernel kNeonCopyKernel = {"neon", Supported, CopyAndDigestLines, CopyLinesOnly};

}  // namespace holdfast

#endif
