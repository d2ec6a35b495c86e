#include "tiers/transfer/thread_cores.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <memory>

#include "base/errno_status.h"
#include "base/status.h"

namespace holdfast {
namespace {

constexpr int kCoresMax = 1 << 16;

// As many as the kernel may have, which are more than fit into a cpu_set_t.
struct FreeSet {
  void operator()(cpu_set_t* set) const { CPU_FREE(set); }
};
using CoreMask = std::unique_ptr<cpu_set_t, FreeSet>;

absl::Status Failed(const char* doing) {
  return errno == ESRCH ? absl::NotFoundError(ErrnoStatus(errno, doing, "thread").message())
                        : ErrnoStatus(errno, doing, "thread");
}

}  // namespace

absl::StatusOr<Cores> CoresOf(pid_t thread) {
  for (int count = 1024; count <= kCoresMax; count *= 2) {
    const CoreMask mask(CPU_ALLOC(count));
    const size_t bytes = CPU_ALLOC_SIZE(count);
    CPU_ZERO_S(bytes, mask.get());
    if (::sched_getaffinity(thread, bytes, mask.get()) == 0) {
      Cores cores;
      for (int core = 0; core < count; ++core) {
        if (CPU_ISSET_S(core, bytes, mask.get())) {
          cores.insert(cores.end(), core);
        }
      }
      return cores;
    }
    if (errno != EINVAL) {
      break;
    }
  }
  return Failed("ask for the cores of");
}

Cores CoresBeside(const Cores& own, const std::vector<Cores>& others) {
  Cores left = own;
  for (const Cores& theirs : others) {
    if (std::includes(theirs.begin(), theirs.end(), own.begin(), own.end())) {
      continue;
    }
    std::erase_if(left, [&](int core) { return theirs.count(core) > 0; });
  }
  return left.empty() ? own : left;
}

absl::Status SetThreadCores(pid_t thread, const Cores& cores) {
  const int count = cores.empty() ? 1 : *cores.rbegin() + 1;
  const CoreMask mask(CPU_ALLOC(count));
  const size_t bytes = CPU_ALLOC_SIZE(count);
  CPU_ZERO_S(bytes, mask.get());
  for (const int core : cores) {
    CPU_SET_S(core, bytes, mask.get());
  }
  return ::sched_setaffinity(thread, bytes, mask.get()) == 0 ? absl::OkStatus()
                                                             : Failed("set the cores of");
}

}  // namespace holdfast
