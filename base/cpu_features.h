// Which vector instructions may be used here: this CPU has them, and the kernel saves their
// registers. (__builtin_cpu_supports says the same, but zig's runtime lacks what it calls.)
//
//   if (CpuFeatures().avx2 && CpuFeatures().pclmul) { … }
//
// From any thread.
#pragma once

namespace holdfast {

struct X86Features {
  bool pclmul = false;
  bool avx2 = false;
  bool avx512f = false;
  bool vpclmulqdq = false;
};

// All false on other machines than x86-64.
const X86Features& CpuFeatures();

// Multiplication of polynomials, on 64-bit ARM; false elsewhere.
bool CpuHasPmull();

}  // namespace holdfast
