// That the job is to end: this process was told (a signal), or the daemon says that another rank's
// was; and when it will be killed.
//
//   notice.Notice(Milliseconds(30'000));   // in SIGTERM's handler
//   if (notice.told()) …
//
// Lock-free; thread-safe, and safe in a signal's handler.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>

#include "holdfast/job.h"

namespace holdfast::client {

class StopNotice {
 public:
  // This process. The first one counts.
  void Notice(Milliseconds grace) noexcept {
    LiveUntil(grace);
    told_.store(true, std::memory_order_release);
  }
  bool told() const noexcept { return told_.load(std::memory_order_acquire); }
  // Another rank's process, as the daemon says; what this one was told itself counts before that.
  void LiveUntil(Milliseconds left) noexcept {
    int64_t none = kNever;
    until_.compare_exchange_strong(
        none, Now() + std::clamp(left, Milliseconds(0), kLongest) / std::chrono::nanoseconds(1));
  }
  // What a call may wait: all but what the process needs afterwards to end in good order, and half
  // where there is not much left. Absent: nobody was told.
  std::optional<Milliseconds> spare() const noexcept {
    const std::optional<Milliseconds> all = left();
    return all ? std::optional(std::max(*all - kEnd, *all / 2)) : std::nullopt;
  }
  // Absent: nobody was told.
  std::optional<Milliseconds> left() const noexcept {
    const int64_t until = until_.load(std::memory_order_acquire);
    if (until == kNever) {
      return std::nullopt;
    }
    return Milliseconds(std::max<int64_t>(0, until - Now()) / 1'000'000);
  }

 private:
  static constexpr int64_t kNever = INT64_MAX;
  static constexpr Milliseconds kEnd{2000};
  static constexpr Milliseconds kLongest = std::chrono::hours(24);
  static int64_t Now() noexcept {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  }

  std::atomic<int64_t> until_{kNever};
  std::atomic<bool> told_{false};
  static_assert(std::atomic<int64_t>::is_always_lock_free);
};

}  // namespace holdfast::client
