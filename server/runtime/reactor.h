// One thread's epoll loop: descriptors, timers and closures posted from other threads. Everything
// that the daemon decides happens in its callbacks, one at a time; so what they touch needs no
// locks.
//
//   HF_ASSIGN_OR_RETURN(auto reactor, Reactor::Create(Clock::System()));
//   HF_RETURN_IF_ERROR(reactor->Watch(fd, EPOLLIN, [&](uint32_t events) { … }));
//   reactor->Run();                       // until Stop()
//   reactor->Post([&] { … });             // from any thread: runs on the loop's
//
// Owner: the Daemon. Only Post and Stop may be called from other threads. A callback may unwatch
// any descriptor, its own included.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/unique_fd.h"

namespace holdfast {

class Reactor {
 public:
  using FdCallback = std::function<void(uint32_t events)>;
  using TimerId = uint32_t;

  static absl::StatusOr<std::unique_ptr<Reactor>> Create(const Clock* clock);
  Reactor(const Reactor&) = delete;
  Reactor& operator=(const Reactor&) = delete;

  // Level-triggered. The descriptor stays the caller's, who unwatches it before closing it.
  absl::Status Watch(int fd, uint32_t events, FdCallback callback);
  void Change(int fd, uint32_t events);
  void Unwatch(int fd);

  // A timer fires once each time it is armed, at or after the time given; the newest arming wins.
  TimerId AddTimer(std::function<void()> callback);
  void Arm(TimerId timer, MonotonicTime at);
  void Disarm(TimerId timer);

  // Any thread. Closures run in the order posted.
  void Post(std::function<void()> closure) EXCLUDES(mutex_);
  void Stop();

  void Run();

  const Clock& clock() const { return *clock_; }

 private:
  struct Watched {
    uint64_t serial = 0;
    std::shared_ptr<FdCallback> callback;
  };
  struct Timer {
    std::function<void()> callback;
    bool armed = false;
    MonotonicTime at;
  };

  Reactor(const Clock* clock, UniqueFd epoll, UniqueFd wake, UniqueFd timer);
  void RunPosted() EXCLUDES(mutex_);
  void RunTimers();
  void SetTimerFd();

  const Clock* const clock_;
  UniqueFd epoll_;
  UniqueFd wake_;
  UniqueFd timer_fd_;
  // The serial tells an event for a descriptor from one for its predecessor of the same number.
  std::unordered_map<int, Watched> watched_;
  uint64_t next_serial_ = 1;
  std::vector<Timer> timers_;
  MonotonicTime timer_fd_at_;
  bool timer_fd_set_ = false;
  bool stopped_ = false;

  Mutex mutex_;
  std::vector<std::function<void()>> posted_ GUARDED_BY(mutex_);
};

}  // namespace holdfast
