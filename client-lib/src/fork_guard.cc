#include "client-lib/src/fork_guard.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace holdfast::client {
namespace {

std::atomic<uint64_t> g_generation{1};  // one more in every child

// Never destroyed: objects may outlive static destructors, and a process may fork while it exits.
struct Registry {
  Mutex mutex;
  std::vector<int> fds GUARDED_BY(mutex);
};
Registry& GetRegistry() {
  static Registry* const registry = new Registry();
  return *registry;
}

// Held across the fork, so that the child finds the list whole.
void BeforeFork() NO_THREAD_SAFETY_ANALYSIS {
  GetRegistry().mutex.Lock();
}
void AfterForkInParent() NO_THREAD_SAFETY_ANALYSIS {
  GetRegistry().mutex.Unlock();
}
void AfterForkInChild() NO_THREAD_SAFETY_ANALYSIS {
  g_generation.fetch_add(1, std::memory_order_relaxed);
  Registry& registry = GetRegistry();
  for (const int fd : registry.fds) {
    ::close(fd);
  }
  registry.fds.clear();
  registry.mutex.Unlock();
}

void InstallOnce() {
  static std::once_flag once;
  std::call_once(once, [] { ::pthread_atfork(BeforeFork, AfterForkInParent, AfterForkInChild); });
}

}  // namespace

ForkOwner::ForkOwner()
    : generation_((InstallOnce(), g_generation.load(std::memory_order_relaxed))) {}

bool ForkOwner::forked() const {
  return g_generation.load(std::memory_order_relaxed) != generation_;
}

ForkClosedFd::ForkClosedFd(UniqueFd fd) : fd_(std::move(fd)) {
  InstallOnce();
  Registry& registry = GetRegistry();
  const MutexLock lock(registry.mutex);
  registry.fds.push_back(fd_.get());
}

ForkClosedFd::~ForkClosedFd() {
  Registry& registry = GetRegistry();
  const MutexLock lock(registry.mutex);
  std::erase(registry.fds, fd_.get());
  fd_.reset();  // under the lock: otherwise a child forked in between would have it
}

}  // namespace holdfast::client
