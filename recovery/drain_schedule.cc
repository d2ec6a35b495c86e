#include "recovery/drain_schedule.h"

namespace holdfast {
namespace {

bool DueByCount(uint64_t every_steps, CheckpointId last, CheckpointId committed) {
  if (every_steps == 0) {
    return false;
  }
  // An attempt that went back writes its own steps, although the last one of the branch that it
  // left was further on.
  const bool went_back = committed.attempt != last.attempt && committed.step <= last.step;
  return went_back || committed.step / every_steps != last.step / every_steps;
}

bool DueByTime(uint64_t every_ms, int64_t last_unix_ms, int64_t unix_ms) {
  if (every_ms == 0) {
    return false;
  }
  if (unix_ms < last_unix_ms) {
    return true;  // the clock went back: waiting for the old time to come again could take for ever
  }
  // Unsigned, since the difference of two int64 may not fit one.
  return static_cast<uint64_t>(unix_ms) - static_cast<uint64_t>(last_unix_ms) >= every_ms;
}

}  // namespace

bool IsDue(const TierSchedule& schedule, const LastDrained& last, CheckpointId committed,
           int64_t unix_ms) {
  if (!last.id) {
    return schedule.every_steps > 0 || schedule.every_ms > 0;
  }
  if (*last.id == committed) {
    return false;
  }
  return DueByCount(schedule.every_steps, *last.id, committed) ||
         DueByTime(schedule.every_ms, last.unix_ms, unix_ms);
}

}  // namespace holdfast
