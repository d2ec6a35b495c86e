// Time, chance, and what happens next in a simulated cluster. Everything follows from one seed.
//
//   Timeline t(seed);
//   t.After(std::chrono::seconds(1), [] { … });
//   while (t.Step()) …
//
// Two things at the same instant happen in the order in which they were planned.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "base/clock.h"

namespace holdfast::sim::cluster {

class Timeline {
 public:
  explicit Timeline(uint64_t seed) : random_(seed) {}

  // True time; no node's clock shows it.
  int64_t now() const { return now_; }
  void After(Duration delay, std::function<void()> what) {
    At(now_ + std::max<int64_t>(delay.count(), 0), std::move(what));
  }
  void At(int64_t when, std::function<void()> what) {
    queue_.push_back({std::max(when, now_), next_++, std::move(what)});
    std::push_heap(queue_.begin(), queue_.end(), Later);
  }
  // False when nothing is planned any more.
  bool Step() {
    if (queue_.empty()) {
      return false;
    }
    std::pop_heap(queue_.begin(), queue_.end(), Later);
    const Planned planned = std::move(queue_.back());
    queue_.pop_back();
    now_ = planned.when;
    ++steps_;
    planned.what();
    return true;
  }
  uint64_t steps() const { return steps_; }

  bool Chance(double probability) {
    return static_cast<double>(random_() >> 11) * 0x1.0p-53 < probability;
  }
  uint64_t Below(uint64_t limit) { return limit == 0 ? 0 : random_() % limit; }
  uint64_t Random() { return random_(); }
  Duration Millis(uint64_t least, uint64_t most) {
    return std::chrono::microseconds(1000 * least + Below(1000 * (most - least) + 1));
  }

 private:
  struct Planned {
    int64_t when = 0;
    uint64_t number = 0;
    std::function<void()> what;
  };
  static bool Later(const Planned& a, const Planned& b) {
    return std::pair(a.when, a.number) > std::pair(b.when, b.number);
  }

  std::mt19937_64 random_;
  int64_t now_ = 1'000'000'000;
  uint64_t next_ = 0;
  uint64_t steps_ = 0;
  std::vector<Planned> queue_;
};

// A node's own clocks: the monotonic one runs a few percent fast or slow and begins anew at each
// boot, the wall clock is minutes off and jumps.
class NodeClock {
 public:
  void Boot(int64_t now, int64_t origin, double rate) {
    booted_ = now;
    origin_ = origin;
    rate_ = rate;
  }
  MonotonicTime Local(int64_t now) const {
    return {origin_ + static_cast<int64_t>(static_cast<double>(now - booted_) * rate_)};
  }
  // The first instant at which the local clock shows that, or more.
  int64_t TrueOf(MonotonicTime local) const {
    return booted_ + static_cast<int64_t>(static_cast<double>(local.ns - origin_) / rate_) + 1;
  }
  int64_t UnixMs(int64_t now) const { return 1'700'000'000'000 + now / 1'000'000 + wall_ms_; }
  void SetWall(int64_t off_ms) { wall_ms_ = off_ms; }

 private:
  int64_t booted_ = 0;
  int64_t origin_ = 0;
  double rate_ = 1;
  int64_t wall_ms_ = 0;
};

}  // namespace holdfast::sim::cluster
