#include "base/clock.h"

#include <ctime>

namespace holdfast {
namespace {

// CLOCK_MONOTONIC, not CLOCK_BOOTTIME: a machine that was suspended has not used up anybody's
// deadline.
class SystemClock : public Clock {
 public:
  MonotonicTime Now() const override {
    timespec t{};
    ::clock_gettime(CLOCK_MONOTONIC, &t);
    return {static_cast<int64_t>(t.tv_sec) * 1'000'000'000 + t.tv_nsec};
  }
  int64_t UnixMillis() const override {
    timespec t{};
    ::clock_gettime(CLOCK_REALTIME, &t);
    return static_cast<int64_t>(t.tv_sec) * 1000 + t.tv_nsec / 1'000'000;
  }
};

}  // namespace

Clock* Clock::System() {
  static SystemClock clock;
  return &clock;
}

}  // namespace holdfast
