// Which jobs of a node give up copies in memory when a save or a restore finds no slot, and in
// which order (docs/protocol.md §5).
//
//   for (const EvictionAsk& ask : EvictionOrder(wish, jobs, rules, now)) …  // the first one that
//   can
//
// Pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"

namespace holdfast {

// A job that died may come back: so long it counts as living for other users, and its own user's
// other jobs take its last copy last.
inline constexpr Duration kDiedLately = std::chrono::minutes(10);

// So long after a job has ended its last step is let finish on its way to a durable tier.
inline constexpr Duration kDrainIsAwaited = std::chrono::seconds(30);

// A job that has copies in the memory of this node.
struct MemoryJob {
  JobUuid job;
  uint32_t uid = 0;
  uint64_t bytes = 0;     // of its slots here
  bool living = false;    // some rank of it runs
  bool ahead = false;     // some of them were brought here ahead of a restore
  bool left = false;      // not living: all its ranks left in order
  MonotonicTime ended{};  // not living: when its last rank here ended
};

// Of another user's job: it keeps what it has until that time is over.
bool DiedLately(const MemoryJob& job, MonotonicTime now);

// Who has no slot.
struct EvictionWish {
  JobUuid job;
  uint32_t uid = 0;
  bool own_jobs_only = false;  // it is the user's own limit that is reached
};

struct EvictionRules {
  uint64_t bytes_max = 0;  // of the node
  Duration keep_ended{};   // so long an ended job's last copy gives its user a share; 0: for ever
};

// How much a job is asked to give up: one checkpoint at a time.
enum class EvictionStage : uint32_t {
  kSpare = 0,     // what nobody would restore: older steps, other branches, what is bad
  kVerified = 1,  // of an ended job: a copy that a durable tier has, too
  kLast = 2,      // of an ended job: its newest step, which lies nowhere else; of the wishing job
                  // itself: what it gives up before it goes without (recovery/shedding.h)
  kDraining = 3,  // of an ended job: likewise, a step that has been on its way to a durable tier
                  // for kDrainIsAwaited
};

struct EvictionAsk {
  JobUuid job;
  EvictionStage stage = EvictionStage::kSpare;
  bool operator==(const EvictionAsk&) const = default;
  auto operator<=>(const EvictionAsk&) const = default;
};

// In which order to ask. Copies of ended jobs that a durable tier has go first, then what is
// superseded, that of the wishing job before others', then last copies of ended jobs: those of jobs
// that left in order before those of jobs that died, each oldest first; last of all those that are
// on their way to a durable tier. Then it is the wishing job's turn.
//
// Within a user's share other users get none of its last copies. A share is `bytes_max` by the
// number of users who have a living job or a job that ended less than `keep_ended` ago; who has
// neither has no share. A living job gives up nothing but what is superseded, and that only for its
// own user, and what was brought here ahead of a restore.
std::vector<EvictionAsk> EvictionOrder(const EvictionWish& wish, std::span<const MemoryJob> jobs,
                                       const EvictionRules& rules, MonotonicTime now);

}  // namespace holdfast
