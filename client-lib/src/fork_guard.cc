#include "client-lib/src/fork_guard.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <vector>

#include "base/mutex.h"

namespace holdfast::client {
namespace {

std::atomic<uint64_t> g_generation{1};  // one more in every child

struct Range {
  void* begin = nullptr;
  size_t bytes = 0;
};

// Never destroyed: objects may outlive static destructors, and a process may fork while it exits.
struct Registry {
  Mutex no_fork;  // before `mutex`
  Mutex mutex;
  std::vector<int> fds GUARDED_BY(mutex);
  std::vector<Range> being_mapped GUARDED_BY(mutex);
};
Registry& GetRegistry() {
  static Registry* const registry = new Registry();
  return *registry;
}

// Held across the fork, so that the child finds the lists whole.
void BeforeFork() NO_THREAD_SAFETY_ANALYSIS {
  GetRegistry().no_fork.Lock();
  GetRegistry().mutex.Lock();
}
void AfterForkInParent() NO_THREAD_SAFETY_ANALYSIS {
  GetRegistry().mutex.Unlock();
  GetRegistry().no_fork.Unlock();
}
void AfterForkInChild() NO_THREAD_SAFETY_ANALYSIS {
  g_generation.fetch_add(1, std::memory_order_relaxed);
  Registry& registry = GetRegistry();
  for (const int fd : registry.fds) {
    ::close(fd);
  }
  registry.fds.clear();
  for (const Range& range : registry.being_mapped) {
    ::munmap(range.begin, range.bytes);
  }
  registry.being_mapped.clear();
  registry.mutex.Unlock();
  registry.no_fork.Unlock();
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

NoFork::NoFork() NO_THREAD_SAFETY_ANALYSIS {
  InstallOnce();
  GetRegistry().no_fork.Lock();
}

NoFork::~NoFork() NO_THREAD_SAFETY_ANALYSIS {
  GetRegistry().no_fork.Unlock();
}

ForkClosedFd::ForkClosedFd(UniqueFd fd) : fd_(std::move(fd)) {
  if (fd_.valid()) {
    Registry& registry = GetRegistry();
    const MutexLock lock(registry.mutex);
    registry.fds.push_back(fd_.get());
  }
}

ForkClosedFd& ForkClosedFd::operator=(ForkClosedFd&& other) noexcept {
  if (this != &other) {
    Close();
    owner_ = other.owner_;
    fd_ = std::move(other.fd_);
  }
  return *this;
}

void ForkClosedFd::Close() {
  if (owner_.forked()) {
    static_cast<void>(fd_.release());  // closed already, and the number may be another file's
    return;
  }
  if (!fd_.valid()) {
    return;
  }
  // To close a file may mean to wait for its file system, and a fork must not wait for that. Here
  // the kernel puts another file in its place before it waits. A child closes whichever it gets.
  if (const UniqueFd other(::eventfd(0, EFD_CLOEXEC)); other.valid()) {
    ::dup3(other.get(), fd_.get(), O_CLOEXEC);
  }
  Registry& registry = GetRegistry();
  const MutexLock lock(registry.mutex);
  std::erase(registry.fds, fd_.get());
  fd_.reset();  // under the lock: otherwise a child forked in between would have it
}

void* MapNotInherited(void* at, size_t bytes, int protection, int flags, int fd) {
  InstallOnce();
  Registry& registry = GetRegistry();
  {
    const MutexLock lock(registry.mutex);
    registry.being_mapped.push_back({at, bytes});
  }
  void* mapped = ::mmap(at, bytes, protection, flags | MAP_FIXED, fd, 0);
  if (mapped != MAP_FAILED && ::madvise(mapped, bytes, MADV_DONTFORK) != 0) {
    mapped = MAP_FAILED;
  }
  const int error = errno;
  {
    const MutexLock lock(registry.mutex);
    std::erase_if(registry.being_mapped, [&](const Range& range) { return range.begin == at; });
  }
  errno = error;
  return mapped;
}

}  // namespace holdfast::client
