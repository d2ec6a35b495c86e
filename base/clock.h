// Time as the program sees it. Logic takes times as arguments; only runtimes own a Clock.
#pragma once

#include <chrono>
#include <cstdint>

namespace holdfast {

using Duration = std::chrono::nanoseconds;

// Monotonic, from an arbitrary origin, never persisted.
struct MonotonicTime {
  int64_t ns = 0;
  auto operator<=>(const MonotonicTime&) const = default;
  friend MonotonicTime operator+(MonotonicTime t, Duration d) { return {t.ns + d.count()}; }
  friend Duration operator-(MonotonicTime a, MonotonicTime b) { return Duration(a.ns - b.ns); }
};

class Clock {
 public:
  virtual ~Clock() = default;
  virtual MonotonicTime Now() const = 0;
  virtual int64_t UnixMillis()
      const = 0;  // wall time, for records and people; never compared for decisions
  static Clock* System();
};

// A clock that stands still until told; for tests and the simulator.
class ManualClock : public Clock {
 public:
  MonotonicTime Now() const override { return now_; }
  int64_t UnixMillis() const override { return 1'700'000'000'000 + now_.ns / 1'000'000; }
  void Advance(Duration d) { now_ = now_ + d; }

 private:
  MonotonicTime now_;
};

}  // namespace holdfast
