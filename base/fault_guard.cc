#include "base/fault_guard.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <mutex>

namespace holdfast {
namespace {

// One guarded range. `version` is odd while the range is valid and grows with every change, so that
// the handler can tell a range that changed under its eyes. `claimed` belongs to the guards; the
// handler never looks at it.
struct Range {
  std::atomic<bool> claimed{false};
  std::atomic<bool> faulted{false};
  std::atomic<uint64_t> version{0};
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};
};

static_assert(std::atomic<uint64_t>::is_always_lock_free &&
              std::atomic<uintptr_t>::is_always_lock_free &&
              std::atomic<bool>::is_always_lock_free);

// Constant-initialised: guards may be used from static constructors, and the handler until the very
// end.
constinit Range g_ranges[kFaultGuardsMax];
constinit std::atomic<int> g_high_water{0};  // ranges at or above were never used
constinit std::atomic<int> g_maybe_free{0};  // below it all are most likely claimed
constinit std::once_flag g_install_once;
struct sigaction g_previous;  // written before our handler is in place, never after
uintptr_t g_page_bytes = 4096;

// A consistent view of a range, or false when it is not valid now.
bool ReadRange(const Range& range, uintptr_t& begin, uintptr_t& end) {
  const uint64_t version = range.version.load(std::memory_order_acquire);
  if (version % 2 == 0) {
    return false;
  }
  begin = range.begin.load(std::memory_order_acquire);
  end = range.end.load(std::memory_order_acquire);
  return range.version.load(std::memory_order_relaxed) == version;
}

// Where the guarded range that holds `address` ends (the farthest, if there are several); 0 if none
// does.
uintptr_t GuardedUntil(uintptr_t address, int count) {
  uintptr_t until = 0;
  for (int i = 0; i < count; ++i) {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    if (ReadRange(g_ranges[i], begin, end) && begin <= address && address < end) {
      until = std::max(until, end);
    }
  }
  return until;
}

// Replaces the pages from the one that faulted to the end of its guarded range. False if nobody
// guards it.
bool Survive(uintptr_t address) {
  const int count = g_high_water.load(std::memory_order_acquire);
  const uintptr_t until = GuardedUntil(address, count);
  if (until == 0) {
    return false;
  }
  const uintptr_t first_page = address / g_page_bytes * g_page_bytes;
  const uintptr_t past_page = (until + g_page_bytes - 1) / g_page_bytes * g_page_bytes;
  // Mark first, and everybody whose pages go: another thread may read the zeros the moment they are
  // there, and must not find its guard silent afterwards.
  for (int i = 0; i < count; ++i) {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    if (ReadRange(g_ranges[i], begin, end) && begin < past_page && end > first_page) {
      g_ranges[i].faulted.store(true, std::memory_order_seq_cst);
    }
  }
  void* const replaced =
      ::mmap(reinterpret_cast<void*>(first_page), past_page - first_page, PROT_READ | PROT_WRITE,
             MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return replaced != MAP_FAILED;
}

void PassOn(int signal_number, siginfo_t* info, void* context) {
  if ((g_previous.sa_flags & SA_SIGINFO) != 0) {
    g_previous.sa_sigaction(signal_number, info, context);
    return;
  }
  const bool from_the_kernel = info->si_code > 0;
  if (g_previous.sa_handler == SIG_IGN && !from_the_kernel) {
    return;
  }
  if (g_previous.sa_handler != SIG_DFL && g_previous.sa_handler != SIG_IGN) {
    g_previous.sa_handler(signal_number);
    return;
  }
  // The default is to die. A fault repeats itself when the handler returns, with the true address
  // in the core file (and is fatal even where SIGBUS is ignored); a signal that was sent must be
  // sent again.
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  ::sigaction(signal_number, &action, nullptr);
  if (!from_the_kernel) {
    ::raise(signal_number);
  }
}

void OnSigbus(int signal_number, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  const bool at_an_address = info->si_code == BUS_ADRERR || info->si_code == BUS_MCEERR_AR ||
                             info->si_code == BUS_MCEERR_AO;
  if (!at_an_address || !Survive(reinterpret_cast<uintptr_t>(info->si_addr))) {
    PassOn(signal_number, info, context);
  }
  errno = saved_errno;
}

// In a forked child the guarded slots are not mapped (MADV_DONTFORK): what lies there is somebody
// else's.
void ForgetRangesInChild() {
  const int count = g_high_water.load(std::memory_order_relaxed);
  for (int i = 0; i < count; ++i) {
    g_ranges[i].begin.store(0, std::memory_order_relaxed);
    g_ranges[i].end.store(0, std::memory_order_relaxed);
  }
}

void InstallHandler() {
  ::pthread_atfork(nullptr, nullptr, ForgetRangesInChild);
  g_page_bytes = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  ::sigaction(SIGBUS, nullptr, &g_previous);
  struct sigaction action = {};
  action.sa_sigaction = OnSigbus;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(SIGBUS, &action, nullptr);
}

int ClaimRange() {
  const int first = g_maybe_free.load(std::memory_order_relaxed);
  for (int tried = 0; tried < kFaultGuardsMax; ++tried) {
    const int i = (first + tried) % kFaultGuardsMax;
    bool expected = false;
    if (!g_ranges[i].claimed.load(std::memory_order_relaxed) &&
        g_ranges[i].claimed.compare_exchange_strong(expected, true, std::memory_order_acquire)) {
      g_maybe_free.store(i + 1 < kFaultGuardsMax ? i + 1 : 0, std::memory_order_relaxed);
      return i;
    }
  }
  return -1;
}

void ReleaseRange(int index) {
  g_ranges[index].claimed.store(false, std::memory_order_release);
  int first = g_maybe_free.load(std::memory_order_relaxed);
  while (index < first && !g_maybe_free.compare_exchange_weak(first, index)) {
  }
}

}  // namespace

FaultGuard::FaultGuard(void* begin, size_t bytes) {
  std::call_once(g_install_once, InstallHandler);
  const uintptr_t from = reinterpret_cast<uintptr_t>(begin);
  if (bytes > UINTPTR_MAX - from) {
    return;
  }
  index_ = ClaimRange();
  if (index_ < 0) {
    return;
  }
  Range& range = g_ranges[index_];
  range.faulted.store(false, std::memory_order_relaxed);
  range.begin.store(from, std::memory_order_release);
  range.end.store(from + bytes, std::memory_order_release);
  range.version.fetch_add(1, std::memory_order_release);
  int high_water = g_high_water.load(std::memory_order_relaxed);
  while (high_water <= index_ && !g_high_water.compare_exchange_weak(high_water, index_ + 1)) {
  }
}

FaultGuard::~FaultGuard() {
  if (index_ < 0) {
    return;
  }
  Range& range = g_ranges[index_];
  range.version.fetch_add(1, std::memory_order_acq_rel);
  ReleaseRange(index_);
}

bool FaultGuard::faulted() const {
  return index_ >= 0 && g_ranges[index_].faulted.load(std::memory_order_seq_cst);
}

}  // namespace holdfast
