// What this rank says of its network, in a page that its daemon reads (base/network_flag.h).
//
//   BusyFlag busy;
//   busy.Attach(page.get());             // whenever there is a new connection
//   busy.Enter();                        // windows are counted: of all threads, nested ones too
//   busy.Leave();
//
// Enter and Leave are a few instructions, in any thread and any handler of a signal; they wait for
// nothing and cannot fail, and say it to the next daemon that gives a page. Not in a forked child,
// which has no part in the job and does not have the page mapped. Owner: the DaemonLink.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/mutex.h"
#include "base/network_flag.h"

namespace holdfast::client {

class BusyFlag {
 public:
  BusyFlag() = default;
  ~BusyFlag();
  BusyFlag(const BusyFlag&) = delete;
  BusyFlag& operator=(const BusyFlag&) = delete;

  void Enter() noexcept;
  void Leave() noexcept;
  // Instead of the one before. A page that is no page is passed over: nothing is said then.
  void Attach(int page) EXCLUDES(mutex_);
  void Detach() noexcept { page_.store(nullptr); }

 private:
  void Say() noexcept;

  std::atomic<uint64_t> said_{0};  // NetworkFlag's word
  std::atomic<NetworkFlagWord*> page_{nullptr};
  Mutex mutex_;
  // All that there were: somebody may be writing into one that was replaced.
  std::vector<void*> mapped_ GUARDED_BY(mutex_);
};

}  // namespace holdfast::client
