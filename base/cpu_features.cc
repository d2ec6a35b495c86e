#include "base/cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace holdfast {
namespace {

X86Features Ask() {
  X86Features features;
#if defined(__x86_64__)
  constexpr uint32_t kOsSavesRegisters = bit_OSXSAVE;
  constexpr uint32_t kSse = 1U << 1;
  constexpr uint32_t kAvx = 1U << 2;
  constexpr uint32_t kAvx512 = 7U << 5;  // masks, upper halves, upper registers
  uint32_t a = 0;
  uint32_t b = 0;
  uint32_t c = 0;
  uint32_t d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) {
    return features;
  }
  features.pclmul = (c & bit_PCLMUL) != 0;
  if ((c & kOsSavesRegisters) == 0) {
    return features;
  }
  uint32_t saved = 0;
  uint32_t saved_high = 0;
  __asm__("xgetbv" : "=a"(saved), "=d"(saved_high) : "c"(0));
  const bool avx = (c & bit_AVX) != 0 && (saved & (kSse | kAvx)) == (kSse | kAvx);
  if (!avx || __get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) {
    return features;
  }
  features.avx2 = (b & bit_AVX2) != 0;
  features.vpclmulqdq = (c & bit_VPCLMULQDQ) != 0;
  features.avx512f = (b & bit_AVX512F) != 0 && (saved & kAvx512) == kAvx512;
#endif
  return features;
}

}  // namespace

const X86Features& CpuFeatures() {
  static const X86Features features = Ask();
  return features;
}

bool CpuHasPmull() {
#if defined(__aarch64__)
  return (::getauxval(AT_HWCAP) & HWCAP_PMULL) != 0;
#else
  return false;
#endif
}

}  // namespace holdfast
