// A point in time until which a call may wait. A value; thread-safe.
//
//   const Deadline deadline = Deadline::In(options.call_deadline);
//   poll(&fd, 1, deadline.PollMillis());
//
// One that knows of an Interrupt comes as soon as that says so. Whoever waits without a lock looks
// now and then (Look); whoever holds one sees only what was seen (passed). One that minds silence
// also ends a wait for a daemon that hangs; the Connection judges that. It may be patient first.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <utility>

#include "holdfast/job.h"

namespace holdfast::client {

// Asks the program whether the call that it waits for should end early; asked by that call's
// thread alone.
class Interrupt {
 public:
  explicit Interrupt(std::function<bool()> asks) : asks_(std::move(asks)) {}
  void Reset() { hit_.store(false, std::memory_order_relaxed); }
  void Look() {
    if (asks_ && !hit() && asks_()) {
      hit_.store(true, std::memory_order_relaxed);
    }
  }
  bool hit() const { return hit_.load(std::memory_order_relaxed); }
  bool asks() const { return static_cast<bool>(asks_); }

 private:
  const std::function<bool()> asks_;
  std::atomic<bool> hit_{false};
};

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr Milliseconds kBetweenLooks{50};

  static Deadline In(Milliseconds wait) {
    return Deadline(Clock::now() + std::clamp(wait, Milliseconds(0), kLongest));
  }
  static Deadline Never() { return In(kLongest); }
  // Until then, or until the interrupt.
  Deadline Or(Interrupt& interrupt) const {
    Deadline one = *this;
    one.interrupt_ = interrupt.asks() ? &interrupt : nullptr;
    return one;
  }
  // The caller must not be kept for longer by a daemon that says nothing at all. With `patience` it
  // waits for such a daemon at least until then; silence before that counts.
  Deadline OrSilence(Milliseconds longest) const {
    return OrSilence(longest, Deadline(Clock::time_point()));
  }
  Deadline OrSilence(Milliseconds longest, Deadline patience) const {
    Deadline one = *this;
    one.silence_ = longest;
    one.patient_until_ = patience.at_;
    return one;
  }

  bool passed() const {
    return Clock::now() >= at_ || (interrupt_ != nullptr && interrupt_->hit());
  }
  Milliseconds left() const {
    return passed()
               ? Milliseconds(0)
               : std::max(Milliseconds(0), std::chrono::ceil<Milliseconds>(at_ - Clock::now()));
  }
  // Whether it came early.
  bool interrupted() const { return interrupt_ != nullptr && interrupt_->hit(); }
  Interrupt* interrupt() const { return interrupt_; }  // or null
  // Of the other one, only the time.
  Deadline Earlier(Deadline other) const {
    Deadline one = *this;
    one.at_ = std::min(at_, other.at_);
    return one;
  }
  // Whether it minds silence now; may_mind_silence: or will, once its patience is over.
  bool minds_silence() const { return may_mind_silence() && Clock::now() >= patient_until_; }
  bool may_mind_silence() const { return silence_.count() > 0; }
  // Until then a daemon that hangs is waited for, and for `moment` in any case.
  Deadline Patience(Milliseconds moment) const {
    return may_mind_silence() ? Earlier(Deadline(std::max(patient_until_, Clock::now() + moment)))
                              : *this;
  }
  Milliseconds silence() const { return silence_; }  // 0: however long
  // For one request that was sent then and is not answered yet.
  Deadline Bearing(Clock::time_point since) const {
    return may_mind_silence() ? Earlier(Deadline(std::max(patient_until_, since + silence_)))
                              : *this;
  }

  // How long to wait before the next Look.
  Clock::time_point NextLook() const {
    return interrupt_ == nullptr ? at_ : std::min(at_, Clock::now() + kBetweenLooks);
  }
  void Look() const {
    if (interrupt_ != nullptr) {
      interrupt_->Look();
    }
  }

  // For poll(), until the next look: at least 1 as long as it has not passed.
  int PollMillis() const {
    const int64_t most = interrupt_ == nullptr ? 1 << 30 : kBetweenLooks.count();
    return static_cast<int>(std::min<int64_t>(left().count(), most));
  }

  // What to tell the daemon: a little less, so that its answer, which knows the reason, comes
  // before this side gives up.
  uint64_t DaemonMillis() const {
    const int64_t all = left().count();
    return static_cast<uint64_t>(std::max<int64_t>(1, all - std::min<int64_t>(all / 8, 250)));
  }

 private:
  static constexpr Milliseconds kLongest = std::chrono::hours(24 * 365);
  explicit Deadline(Clock::time_point at) : at_(at) {}

  Clock::time_point at_;
  Interrupt* interrupt_ = nullptr;
  Milliseconds silence_{0};
  Clock::time_point patient_until_;
};

}  // namespace holdfast::client
