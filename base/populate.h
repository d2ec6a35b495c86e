// Making the pages of a shared mapping present, without SIGBUS and without changing what they hold.
// Part of Env::System; apart so that tests reach the way that kernels before 5.14 take.
// Thread-safe.
#pragma once

#include <cstddef>

namespace holdfast {

enum class PopulateMethod {
  kBest,   // MADV_POPULATE_*, or touching where the kernel does not know it
  kTouch,  // one access a page under a FaultGuard
};

// 0, or the errno of what went wrong; EFAULT when a page could not be had (no room, or the file is
// shorter). Pages are made writable when `writable`; the mapping must then be.
int PopulatePages(std::byte* begin, size_t bytes, bool writable, PopulateMethod method);

}  // namespace holdfast
