// Whether this node's background network traffic waits, because training processes say that their
// network is busy (docs/protocol.md §21).
//
//   windows.Says(connection, NetworkFlag::Of(word), now);   // of each, as it is read
//   if (windows.Holds(now)) …   // wait a moment, and look again
//   windows.NobodyWaits(now);   // what waited has gone on, or was cancelled
//
// Nothing that a process says keeps traffic waiting for ever: a stretch of windows without a gap
// counts for kBusyStretchMax, and all together may hold traffic for kHeldMax of any kHeldPeriod.
// What counts there is time in which something did wait, from one look to the next.
//
// A state machine without I/O, threads or clock. Owner: NetworkFlags; one caller at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>

#include "base/clock.h"
#include "base/network_flag.h"

namespace holdfast {

inline constexpr Duration kBusyStretchMax = std::chrono::seconds(10);
inline constexpr Duration kHeldPeriod = std::chrono::seconds(10);
inline constexpr Duration kHeldMax = std::chrono::seconds(9);

class QuietWindows {
 public:
  void Says(uint64_t who, NetworkFlag flag, MonotonicTime now);
  void Gone(uint64_t who);

  // Somebody wants to move bytes at this moment: whether they are to wait.
  bool Holds(MonotonicTime now);
  void NobodyWaits(MonotonicTime now);

  // Who says that the network is busy, and is listened to.
  size_t busy(MonotonicTime now) const;
  bool holding() const { return holding_; }
  Duration held() const { return held_; }  // in all

 private:
  // Held time is noted in parts of a period. Those that a period can touch are one more.
  static constexpr size_t kParts = 100;
  static constexpr Duration kPart = kHeldPeriod / kParts;
  struct Speaker {
    NetworkFlag flag;
    MonotonicTime since;  // that this stretch was first seen
  };
  struct Part {
    int64_t number = -int64_t{kParts} - 1;  // of the clock's parts, from its origin on
    Duration held{0};
  };

  static bool Counts(const Speaker& speaker, MonotonicTime now);
  void Note(MonotonicTime now);
  Duration HeldLately(MonotonicTime now) const;

  std::map<uint64_t, Speaker> speakers_;
  std::array<Part, kParts + 1> parts_;
  bool holding_ = false;
  MonotonicTime noted_until_;  // while holding_
  Duration held_{0};
};

}  // namespace holdfast
