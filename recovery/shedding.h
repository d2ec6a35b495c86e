// What a job gives up when a rank has no slot for its next step (docs/protocol.md §5).
//
//   if (std::optional<Victim> victim = ChooseVictim(checkpoints, begun)) …  // for all ranks alike
//
// Pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/ids.h"

namespace holdfast {

struct ShedChoice {
  CheckpointId id;
  enum class Kind {
    kDead,        // bad or otherwise of no use to anybody
    kOffLine,     // committed, on no line that will be restored by itself
    kOnLine,      // committed, on the line
    kUncommitted  // of the current attempt, may still become whole
  } kind = Kind::kDead;
  bool useful = false;        // giving it up makes room where it is wanted
  bool held = false;          // a session's candidate
  bool pinned = false;        // the restore point that a user set
  bool durable = false;       // committed, and whole in a durable tier alone, too
  bool superseded = false;    // a later step of the line is whole in a durable tier
  bool is_protected = false;  // kUncommitted: its predecessor was shed, it gets its chance
  // Its copies in memory are needed to bring it into a durable tier.
  enum class Drain {
    kNone,
    kOther,  // given up after those that nobody needs
    kFirst   // the one that is let finish: given up only if the job could not save at all otherwise
  } drain = Drain::kNone;
};

enum class ShedRule {
  kDead = 1,
  kOffLine = 2,
  kOlderCommitted = 3,
  kUncommitted = 4,
  kPinned = 5,
  kDraining = 6
};

struct Victim {
  CheckpointId id;
  ShedRule rule = ShedRule::kDead;
  // kUncommitted: the step that must not be shed after this one, so that a healthy job commits
  // again.
  std::optional<CheckpointId> protect;
};

// `checkpoints` in any order, each id once. `begun` is the step that wants room: never given up.
// Absent: nothing may go.
std::optional<Victim> ChooseVictim(std::span<const ShedChoice> checkpoints, CheckpointId begun);

// For somebody else's need: only what rules 1 to 3 allow.
std::optional<Victim> ChooseSpare(std::span<const ShedChoice> checkpoints);

// Of a job that has ended, for somebody else's need: the oldest step that a durable tier has, too,
// and is not being read from memory. The newest one as well.
std::optional<CheckpointId> ChooseDurable(std::span<const ShedChoice> checkpoints);

// Of a job that has ended, for somebody else's need, when nothing else is left: its newest
// committed step. Not what a user pinned; what is read for another tier only if `draining`.
std::optional<CheckpointId> ChooseLast(std::span<const ShedChoice> checkpoints,
                                       bool draining = false);

// The checkpoint that is never given up: the newest committed one on the line, or, while the line
// has none, of the job. None of those that are superseded.
std::optional<CheckpointId> Untouchable(std::span<const ShedChoice> checkpoints);

// What to evict so that at most `keep` committed checkpoints remain in memory, in the order in
// which to evict them: other branches first, oldest first. Never the untouchable one, a held or a
// pinned one. `keep` 0: no cap, nothing is surplus.
std::vector<CheckpointId> Surplus(std::span<const ShedChoice> checkpoints, uint32_t keep);

}  // namespace holdfast
