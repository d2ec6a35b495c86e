// What a copy kernel is, for copy.cc, which cuts ranges to fit and picks one. Internal to base/.
#pragma once

#include <cstddef>
#include <cstdint>

namespace holdfast {

inline constexpr size_t kCopyLineBytes = 64;

// Both functions want `to` aligned to kCopyLineBytes and `bytes` a multiple of it; `from` may lie anywhere.
// `crc` is the digest of what came before (0 for nothing). When they return, everything is visible to whatever
// is ordered after the call, non-temporal stores included.
struct CopyKernel {
  const char* name;
  bool (*supported)();
  uint64_t (*copy_and_digest)(char* to, const char* from, size_t bytes, uint64_t crc);
  void (*copy)(char* to, const char* from, size_t bytes);
  // Ranges below these sizes go through the cache instead (memcpy, then the digest): measured.
  size_t digest_stream_bytes_min;
  size_t copy_stream_bytes_min;
};

#if defined(__x86_64__)
extern const CopyKernel kAvx512CopyKernel;
extern const CopyKernel kAvx2CopyKernel;
#endif

}  // namespace holdfast
