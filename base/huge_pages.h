// Huge pages for files on a tmpfs. The process that has the kernel make them is charged for them:
// so ckptd alone does, for its slots (docs/kubernetes.md#memory).
//
//   std::byte* const at = ReserveAligned(bytes);  // null: errno
//   ::mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
//   huge_pages.Use(at, bytes);
//
// Thread-safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/clock.h"

namespace holdfast {

inline constexpr size_t kHugePageBytes = size_t{2} << 20;

// Addresses for `bytes`, in whole pages, that begin where a huge page can. Nothing can be read or
// written there until something is mapped over them. Null, and errno: there are none.
std::byte* ReserveAligned(size_t bytes);

class HugePages {
 public:
  explicit HugePages(const Clock& clock) : clock_(clock) {}

  // Has the kernel put a shared mapping, from such an address on, on huge pages (MADV_COLLAPSE,
  // Linux 6.1 and later). They stay with the file: a process that maps it takes one page fault
  // instead of 512. No byte changes. Where the kernel has none, makes them only slowly, or the
  // control group has no room for one more, the rest stays as it is, and nothing is asked for in
  // the next minute.
  void Use(std::byte* begin, size_t bytes);

 private:
  bool paused() const { return clock_.Now().ns < paused_until_ns_.load(); }

  const Clock& clock_;
  std::atomic<int64_t> paused_until_ns_{INT64_MIN};
};

}  // namespace holdfast
