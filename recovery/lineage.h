// Lines of descent: which checkpoints an attempt may restore (docs/protocol.md §2).
//
// The line of attempt A is A's own steps; then, if A restored (P, s), P's steps up to s; and so on
// back. It is kept as a list of Descent, youngest first, of which only the first element's attempt
// is whole.
//
//   const std::vector<Descent> line = LineOf(attempts, newest_decided, kLineMax);
//   if (OnLine(line, {3, 900})) …
//
// Pure functions, thread-safe.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <vector>

#include "base/ids.h"
#include "tiers/image/record.h"

namespace holdfast {

// Entries of a line that are computed, sent and recorded; older ancestors are cut off (they have no
// copies by then). Below kDescentMax, and small enough for one client frame.
inline constexpr size_t kLineMax = 1024;

struct AttemptParent {
  bool decided = false;
  CheckpointId parent;  // parent.attempt 0: it began from nothing
};

// Empty when `attempt` is unknown or has not decided. Parents that are unknown, undecided or not
// older than their child end the line: what is left is still true. At most `entries_max` entries.
std::vector<Descent> LineOf(const std::map<Attempt, AttemptParent>& attempts, Attempt attempt,
                            size_t entries_max);

bool OnLine(std::span<const Descent> line, CheckpointId checkpoint);

// Whether anything on the line was ever committed, as far as the line itself shows it: a restored
// parent was.
bool LineRestoredAnything(std::span<const Descent> line);

// The newest attempt that has decided; 0 if none.
Attempt NewestDecided(const std::map<Attempt, AttemptParent>& attempts);

}  // namespace holdfast
