#include "base/populate.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "base/fault_guard.h"

namespace holdfast {
namespace {

// Since Linux 5.14; older headers lack the names.
constexpr int kMadvPopulateRead = 22;
constexpr int kMadvPopulateWrite = 23;

// A page is made writable by writing the value that it has: a compare-and-swap, so that a byte
// which another thread stores at the same moment is not lost, and volatile, so that the compiler
// keeps it.
int TouchPages(std::byte* begin, size_t bytes, bool writable) {
  const FaultGuard guard(begin, bytes);
  if (!guard.ok()) {
    return EAGAIN;
  }
  const size_t page_bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  std::byte* const end = begin + bytes;
  for (std::byte* at = begin; at < end;) {
    volatile uint8_t* const byte = reinterpret_cast<volatile uint8_t*>(at);
    uint8_t value = __atomic_load_n(byte, __ATOMIC_RELAXED);
    if (writable) {
      __atomic_compare_exchange_n(byte, &value, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }
    if (guard.faulted()) {
      return EFAULT;
    }
    const size_t to_next_page = page_bytes - reinterpret_cast<uintptr_t>(at) % page_bytes;
    at += std::min<size_t>(to_next_page, static_cast<size_t>(end - at));
  }
  return 0;
}

}  // namespace

int PopulatePages(std::byte* begin, size_t bytes, bool writable, PopulateMethod method) {
  if (bytes == 0) {
    return 0;
  }
  if (method == PopulateMethod::kTouch) {
    return TouchPages(begin, bytes, writable);
  }
  const size_t page_bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t before =
      reinterpret_cast<uintptr_t>(begin) % page_bytes;  // madvise wants a page's start
  const int advice = writable ? kMadvPopulateWrite : kMadvPopulateRead;
  int result = 0;
  do {
    result = ::madvise(begin - before, bytes + before, advice);
  } while (result != 0 && (errno == EINTR || errno == EAGAIN));
  if (result == 0) {
    return 0;
  }
  // A kernel that does not know the advice says EINVAL before it touches anything; so does a
  // mapping that it does not apply to. Touching works for both.
  return errno == EINVAL ? TouchPages(begin, bytes, writable) : errno;
}

}  // namespace holdfast
