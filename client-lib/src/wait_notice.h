// When a call that keeps its caller says so: after about a second, then every ten.
//
//   WaitNotice notice;
//   switch (notice.Look(kept)) {             // for so long in all
//     case WaitNotice::Next::kAsk: link.Ask(); break;   // so that the line can say who hangs
//     case WaitNotice::Next::kSay: warn(WaitLine(job, kept, waiting, link.Holdup())); break;
//     case WaitNotice::Next::kNothing: break;
//   }
//
// A value, of whoever waits.
#pragma once

#include <chrono>
#include <functional>
#include <string>

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
    if (kept >= next_) {
      next_ = kept + kBetween;
      asked_ = false;
      return Next::kSay;
    }
    if (!asked_ && kept >= next_ - kAskBefore) {
      asked_ = true;
      return Next::kAsk;
    }
    return Next::kNothing;
  }

 private:
  std::chrono::nanoseconds next_ = kFirst;
  bool asked_ = false;
};

// Gets one line: JobOptions::warn, or the standard error.
using Warn = std::function<void(const std::string& line)>;

struct Waiting {
  std::string what;  // "the save of step 5"
  std::string
      why;  // unless the daemon hangs: "ckptd has granted no slot yet: see `ckptctl status`"
};

// After a Look that said so. By the thread that is kept, without a lock.
void Tell(WaitNotice::Next next, std::chrono::nanoseconds kept, DaemonLink& link, const Warn& warn,
          const Waiting& waiting);

}  // namespace holdfast::client
