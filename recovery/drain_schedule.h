// Which steps go to a durable tier by themselves (docs/operations.md, "Policy").
//
//   if (IsDue({.every_steps = 100, .every_ms = 600'000}, last, committed, now_unix_ms)) …
//
// Pure function, thread-safe.
#pragma once

#include <cstdint>
#include <optional>

#include "base/ids.h"

namespace holdfast {

struct TierSchedule {
  uint64_t every_steps = 0;  // 0: never by count
  uint64_t every_ms = 0;     // 0: never by time
};

// The last step of the job that was chosen for the tier, whether or not it has got there yet.
struct LastDrained {
  std::optional<CheckpointId> id;  // absent: none ever was
  int64_t unix_ms = 0;
};

// Whether a step that was just committed goes to the tier. By count: when it is the first one of
// its `every_steps` steps (step / n differs from the last one's), or when a rollback made the job
// pass here again (another attempt, not above the last). By time: when `every_ms` passed since the
// last, or the clock went back. Nothing went yet: yes, unless both are 0. The last one itself: no.
bool IsDue(const TierSchedule& schedule, const LastDrained& last, CheckpointId committed,
           int64_t unix_ms);

}  // namespace holdfast
