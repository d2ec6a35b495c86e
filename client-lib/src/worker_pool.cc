#include "client-lib/src/worker_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <system_error>
#include <utility>

namespace holdfast::client {
namespace {

constexpr uint32_t kDefaultThreadsMax = 4;
constexpr uint32_t kThreadsMax = 256;

}  // namespace

std::thread StartQuietThread(std::function<void()> body) {
  sigset_t quiet;
  ::sigfillset(&quiet);
  for (const int fault : {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGTRAP}) {
    ::sigdelset(&quiet, fault);
  }
  sigset_t before;
  ::pthread_sigmask(SIG_BLOCK, &quiet,
                    &before);  // a thread inherits the mask of the one that makes it
  std::thread thread;
  try {
    thread = std::thread(std::move(body));
  } catch (const std::system_error&) {
    // No thread to be had (a limit): the caller does without.
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

uint32_t CopyThreads(uint32_t wanted) {
  if (wanted != 0) {
    return std::min(wanted, kThreadsMax);
  }
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  const int cpus = ::sched_getaffinity(0, sizeof(allowed), &allowed) == 0
                       ? CPU_COUNT(&allowed)
                       : static_cast<int>(std::thread::hardware_concurrency());
  return std::clamp<uint32_t>(static_cast<uint32_t>(std::max(cpus, 1)), 1, kDefaultThreadsMax);
}

WorkerPool::~WorkerPool() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
    changed_.NotifyAll();
  }
  for (std::thread& helper : helpers_) {
    helper.join();
  }
}

void WorkerPool::Run(uint32_t threads, const std::function<void()>& work) {
  const uint32_t helpers = std::min(threads, threads_max_) - (threads == 0 ? 0 : 1);
  while (helpers_.size() < helpers) {
    std::thread helper = StartQuietThread([this] { Serve(); });
    if (!helper.joinable()) {
      break;
    }
    helpers_.push_back(std::move(helper));
  }
  {
    const MutexLock lock(mutex_);
    work_ = &work;
    wanted_ = helpers;
    changed_.NotifyAll();
  }
  work();
  const MutexLock lock(mutex_);
  wanted_ = 0;  // what the caller finished alone needs no helper any more
  work_ = nullptr;
  while (working_ != 0) {
    changed_.Wait(mutex_);
  }
}

void WorkerPool::Serve() {
  const MutexLock lock(mutex_);
  while (true) {
    while (wanted_ == 0 && !stop_) {
      changed_.Wait(mutex_);
    }
    if (stop_) {
      return;
    }
    --wanted_;
    ++working_;
    const std::function<void()>* const work = work_;
    mutex_.Unlock();
    (*work)();
    mutex_.Lock();
    --working_;
    changed_.NotifyAll();
  }
}

}  // namespace holdfast::client
