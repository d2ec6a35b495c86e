#include "server/runtime/reactor.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast {
namespace {

// epoll's 64 bits of user data: the descriptor, and the low half of its serial.
uint64_t Tag(int fd, uint64_t serial) {
  return (serial << 32) | static_cast<uint32_t>(fd);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Reactor>> Reactor::Create(const Clock* clock) {
  UniqueFd epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) {
    return ErrnoStatus(errno, "epoll_create1", "reactor");
  }
  UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) {
    return ErrnoStatus(errno, "eventfd", "reactor");
  }
  UniqueFd timer(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  if (!timer.valid()) {
    return ErrnoStatus(errno, "timerfd_create", "reactor");
  }
  std::unique_ptr<Reactor> reactor(
      new Reactor(clock, std::move(epoll), std::move(wake), std::move(timer)));
  HF_RETURN_IF_ERROR(reactor->Watch(reactor->wake_.get(), EPOLLIN,
                                    [r = reactor.get()](uint32_t) { r->RunPosted(); }));
  HF_RETURN_IF_ERROR(reactor->Watch(reactor->timer_fd_.get(), EPOLLIN,
                                    [r = reactor.get()](uint32_t) { r->RunTimers(); }));
  return reactor;
}

Reactor::Reactor(const Clock* clock, UniqueFd epoll, UniqueFd wake, UniqueFd timer)
    : clock_(clock),
      epoll_(std::move(epoll)),
      wake_(std::move(wake)),
      timer_fd_(std::move(timer)) {}

absl::Status Reactor::Watch(int fd, uint32_t events, FdCallback callback) {
  const uint64_t serial = next_serial_++;
  epoll_event event = {};
  event.events = events;
  event.data.u64 = Tag(fd, serial);
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return ErrnoStatus(errno, "epoll_ctl", absl::StrCat("descriptor ", fd));
  }
  watched_[fd] = Watched{serial, std::make_shared<FdCallback>(std::move(callback))};
  return absl::OkStatus();
}

void Reactor::Change(int fd, uint32_t events) {
  const auto found = watched_.find(fd);
  if (found == watched_.end()) {
    return;
  }
  epoll_event event = {};
  event.events = events;
  event.data.u64 = Tag(fd, found->second.serial);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Reactor::Unwatch(int fd) {
  if (watched_.erase(fd) > 0) {
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  }
}

Reactor::TimerId Reactor::AddTimer(std::function<void()> callback) {
  timers_.push_back(Timer{std::move(callback), false, {}});
  return static_cast<TimerId>(timers_.size() - 1);
}

void Reactor::Arm(TimerId timer, MonotonicTime at) {
  timers_[timer].armed = true;
  timers_[timer].at = at;
  SetTimerFd();
}

void Reactor::Disarm(TimerId timer) {
  timers_[timer].armed = false;
  SetTimerFd();
}

void Reactor::SetTimerFd() {
  bool any = false;
  MonotonicTime first;
  for (const Timer& timer : timers_) {
    if (timer.armed && (!any || timer.at < first)) {
      any = true;
      first = timer.at;
    }
  }
  if (any == timer_fd_set_ && (!any || first == timer_fd_at_)) {
    return;
  }
  timer_fd_set_ = any;
  timer_fd_at_ = first;
  itimerspec spec = {};
  if (any) {
    // All zero would disarm it: what is due at once gets one nanosecond.
    const int64_t ns = std::max<int64_t>(first.ns, 1);
    spec.it_value.tv_sec = ns / 1'000'000'000;
    spec.it_value.tv_nsec = ns % 1'000'000'000;
  }
  ::timerfd_settime(timer_fd_.get(), TFD_TIMER_ABSTIME, &spec, nullptr);
}

void Reactor::RunTimers() {
  uint64_t expirations = 0;
  [[maybe_unused]] const ssize_t got = ::read(timer_fd_.get(), &expirations, sizeof(expirations));
  timer_fd_set_ = false;
  const MonotonicTime now = clock_->Now();
  for (size_t i = 0; i < timers_.size(); ++i) {
    if (timers_[i].armed && timers_[i].at <= now) {
      timers_[i].armed = false;
      timers_[i].callback();
    }
  }
  SetTimerFd();
}

void Reactor::Post(std::function<void()> closure) {
  bool first = false;
  {
    MutexLock lock(mutex_);
    first = posted_.empty();
    posted_.push_back(std::move(closure));
  }
  if (first) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t put = ::write(wake_.get(), &one, sizeof(one));
  }
}

void Reactor::RunPosted() {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &count, sizeof(count));
  std::vector<std::function<void()>> batch;
  {
    MutexLock lock(mutex_);
    batch.swap(posted_);
  }
  for (std::function<void()>& closure : batch) {
    closure();
  }
}

void Reactor::Stop() {
  Post([this] { stopped_ = true; });
}

void Reactor::Run() {
  constexpr int kEventsMax = 64;
  std::array<epoll_event, kEventsMax> events;
  while (!stopped_) {
    const int count = ::epoll_wait(epoll_.get(), events.data(), kEventsMax, -1);
    for (int i = 0; i < count; ++i) {
      const int fd = static_cast<int>(events[i].data.u64 & 0xffffffffu);
      const auto found = watched_.find(fd);
      if (found == watched_.end() || Tag(fd, found->second.serial) != events[i].data.u64) {
        continue;  // unwatched by an earlier callback of this round
      }
      // Held: the callback may unwatch itself.
      const std::shared_ptr<FdCallback> callback = found->second.callback;
      (*callback)(events[i].events);
    }
  }
}

}  // namespace holdfast
