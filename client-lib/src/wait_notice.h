// When a call that keeps its caller says so: after about a second, then every ten.
//
//   WaitNotice notice;
//   Tell(notice.Look(kept), kept, link, warn, waiting);   // kept: for so long in all
//
// A value, of whoever waits.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <string_view>

#include "client-lib/src/daemon_link.h"

namespace holdfast::client {

class WaitNotice {
 public:
  enum class Next { kNothing, kAsk, kSay };

  // A little less than what a daemon that hangs may cost: so that there is a line of that, too.
  static constexpr std::chrono::milliseconds kFirst{900};
  static constexpr std::chrono::milliseconds kBetween{10'000};
  static constexpr std::chrono::milliseconds kAskBefore{450};

  Next Look(std::chrono::nanoseconds kept) {
    const bool answered = asked_ && kept - asked_at_ >= kAskBefore;  // or nobody answers
    if (kept >= next_ && (answered || kept >= next_ + kAskBefore)) {
      next_ = kept + kBetween;
      asked_ = false;
      return Next::kSay;
    }
    if (!asked_ && kept >= next_ - kAskBefore) {
      asked_ = true;
      asked_at_ = kept;
      return Next::kAsk;
    }
    return Next::kNothing;
  }

 private:
  std::chrono::nanoseconds next_ = kFirst;
  bool asked_ = false;
  std::chrono::nanoseconds asked_at_{0};
};

// Gets one line.
using Warn = std::function<void(const std::string& line)>;

// Who gets the lines of calls that have no JobOptions::warn; null, as at first: the standard error.
// Before any such call is made.
void SetDefaultWarn(Warn warn);

// Says that `what` has waited for so long, and why. By the thread that is kept, without a lock.
void SayWaiting(const Warn& warn, std::string_view what, std::chrono::nanoseconds kept,
                std::string_view why);

struct Waiting {
  std::string what;  // "the save of step 5"
  std::string why;   // unless the daemon hangs: "ckptd has no free slot yet: see `ckptctl status`"
};

// After a Look that said so. By the thread that is kept, without a lock.
void Tell(WaitNotice::Next next, std::chrono::nanoseconds kept, DaemonLink& link, const Warn& warn,
          const Waiting& waiting);

}  // namespace holdfast::client
