#include "base/huge_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

namespace holdfast {
namespace {

constexpr int kMadvCollapse = 25;  // since Linux 6.1; older headers lack the name
// In one call: each makes the kernel look after all processors' lists of pages.
constexpr size_t kPieceBytes = 8 * kHugePageBytes;
// A huge page takes longer where memory is scarce or in pieces, or must come from a virtual
// machine's host first.
constexpr std::chrono::milliseconds kTimePerPage{10};
constexpr std::chrono::minutes kPause{1};

}  // namespace

std::byte* ReserveAligned(size_t bytes) {
  const size_t page_bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  if (bytes > SIZE_MAX - kHugePageBytes - page_bytes) {
    errno = ENOMEM;
    return nullptr;
  }
  const size_t reserved_bytes = bytes + kHugePageBytes;
  void* const reserved = ::mmap(nullptr, reserved_bytes, PROT_NONE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) {
    return nullptr;
  }
  std::byte* const first = static_cast<std::byte*>(reserved);
  const size_t lead = -reinterpret_cast<uintptr_t>(reserved) % kHugePageBytes;
  const size_t end = (lead + bytes + page_bytes - 1) / page_bytes * page_bytes;
  if (lead != 0) {
    ::munmap(first, lead);
  }
  if (end < reserved_bytes) {
    ::munmap(first + end, reserved_bytes - end);
  }
  return first + lead;
}

// The pages that there were go as the huge page comes: a control group is charged for one huge page
// more at a time, and where it has no room for that the kernel refuses (EBUSY) and kills nobody.
void HugePages::Use(std::byte* begin, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(begin) % kHugePageBytes != 0) {
    return;
  }
  const size_t whole_bytes = bytes / kHugePageBytes * kHugePageBytes;
  for (size_t at = 0; at < whole_bytes && !paused(); at += kPieceBytes) {
    const size_t piece_bytes = std::min(kPieceBytes, whole_bytes - at);
    const MonotonicTime began = clock_.Now();
    // EAGAIN: somebody else uses some of these pages just now.
    const bool made = ::madvise(begin + at, piece_bytes, kMadvCollapse) == 0 || errno == EAGAIN;
    const MonotonicTime ended = clock_.Now();
    if (!made || ended - began > kTimePerPage * (piece_bytes / kHugePageBytes)) {
      paused_until_ns_ = (ended + kPause).ns;
    }
  }
}

}  // namespace holdfast
