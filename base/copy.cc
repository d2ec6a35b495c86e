// Cuts a range into a head that aligns the destination, whole lines for the kernel, and a tail.
#include "base/copy.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>

#include "base/copy_kernels.h"
#include "base/digest.h"

namespace holdfast {
namespace {

// The digest reads again what memcpy has just brought into the first-level cache.
constexpr size_t kCachedPieceBytes = 16 * 1024;

uint64_t CachedCopyAndDigest(char* to, const char* from, size_t bytes, uint64_t crc) {
  while (bytes != 0) {
    const size_t piece = std::min(bytes, kCachedPieceBytes);
    std::memcpy(to, from, piece);
    crc = Crc64(from, piece, crc);
    to += piece;
    from += piece;
    bytes -= piece;
  }
  return crc;
}

void CachedCopy(char* to, const char* from, size_t bytes) {
  if (bytes != 0) {  // memcpy wants pointers that point somewhere even then
    std::memcpy(to, from, bytes);
  }
}

constexpr CopyKernel kPortableCopyKernel = {"portable", [] { return true; }, CachedCopyAndDigest, CachedCopy, 0, 0};

#if defined(__x86_64__)
constexpr std::array kKernels = {&kAvx512CopyKernel, &kAvx2CopyKernel, &kPortableCopyKernel};  // fastest first
#else
constexpr std::array kKernels = {&kPortableCopyKernel};
#endif

const CopyKernel* Fastest() {
  return *std::find_if(kKernels.begin(), kKernels.end(), [](const CopyKernel* kernel) { return kernel->supported(); });
}

std::atomic<const CopyKernel*>& Selected() {
  static std::atomic<const CopyKernel*> selected{Fastest()};
  return selected;
}

const CopyKernel& Kernel() { return *Selected().load(std::memory_order_relaxed); }

// Bytes in front of the first whole line at `to`.
size_t HeadBytes(const char* to, size_t bytes) {
  return std::min(bytes, -reinterpret_cast<uintptr_t>(to) % kCopyLineBytes);
}

}  // namespace

uint64_t CopyAndDigest(void* to_bytes, const void* from_bytes, size_t bytes) {
  char* to = static_cast<char*>(to_bytes);
  const char* from = static_cast<const char*>(from_bytes);
  const CopyKernel& kernel = Kernel();
  if (bytes < kernel.digest_stream_bytes_min) {
    return CachedCopyAndDigest(to, from, bytes, 0);
  }
  const size_t head = HeadBytes(to, bytes);
  const size_t lines = (bytes - head) / kCopyLineBytes * kCopyLineBytes;
  uint64_t crc = CachedCopyAndDigest(to, from, head, 0);
  crc = kernel.copy_and_digest(to + head, from + head, lines, crc);
  return CachedCopyAndDigest(to + head + lines, from + head + lines, bytes - head - lines, crc);
}

void StreamCopy(void* to_bytes, const void* from_bytes, size_t bytes) {
  char* to = static_cast<char*>(to_bytes);
  const char* from = static_cast<const char*>(from_bytes);
  const CopyKernel& kernel = Kernel();
  if (bytes < kernel.copy_stream_bytes_min) {
    CachedCopy(to, from, bytes);
    return;
  }
  const size_t head = HeadBytes(to, bytes);
  const size_t lines = (bytes - head) / kCopyLineBytes * kCopyLineBytes;
  CachedCopy(to, from, head);
  kernel.copy(to + head, from + head, lines);
  CachedCopy(to + head + lines, from + head + lines, bytes - head - lines);
}

std::string_view CopyKernelName() { return Kernel().name; }

std::vector<std::string_view> CopyKernelNames() {
  std::vector<std::string_view> names;
  for (const CopyKernel* kernel : kKernels) {
    if (kernel->supported()) {
      names.emplace_back(kernel->name);
    }
  }
  return names;
}

bool SelectCopyKernelForTesting(std::string_view name) {
  for (const CopyKernel* kernel : kKernels) {
    if (kernel->name == name && kernel->supported()) {
      Selected().store(kernel, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

}  // namespace holdfast
