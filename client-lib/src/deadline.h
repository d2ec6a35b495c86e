// A point in time until which a call may wait. A value; thread-safe.
//
//   const Deadline deadline = Deadline::In(options.call_deadline);
//   poll(&fd, 1, deadline.PollMillis());
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "holdfast/job.h"

namespace holdfast::client {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline In(Milliseconds wait) {
    constexpr Milliseconds kLongest = std::chrono::hours(24 * 365);
    return Deadline(Clock::now() + std::clamp(wait, Milliseconds(0), kLongest));
  }

  Clock::time_point at() const { return at_; }
  bool passed() const { return Clock::now() >= at_; }
  Milliseconds left() const {
    return std::max(Milliseconds(0), std::chrono::ceil<Milliseconds>(at_ - Clock::now()));
  }
  Deadline Earlier(Deadline other) const { return Deadline(std::min(at_, other.at_)); }

  // For poll(): at least 1 as long as it has not passed.
  int PollMillis() const { return static_cast<int>(std::min<int64_t>(left().count(), 1 << 30)); }

  // What to tell the daemon: a little less, so that its answer, which knows the reason, comes
  // before this side gives up.
  uint64_t DaemonMillis() const {
    const int64_t all = left().count();
    return static_cast<uint64_t>(std::max<int64_t>(1, all - std::min<int64_t>(all / 8, 250)));
  }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

}  // namespace holdfast::client
