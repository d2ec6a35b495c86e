// What lies in a tier and need not: which checkpoints go, and why each of the others stays.
//
// Pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "recovery/checkpoint_view.h"
#include "recovery/lineage.h"
#include "recovery/shedding.h"

namespace holdfast {

// What to remove so that at most `keep` committed checkpoints remain, in the order in which to
// remove them: other branches first, oldest first. Never the untouchable one, a held or a pinned
// one. `keep` 0: no cap, nothing is surplus.
std::vector<CheckpointId> Surplus(std::span<const ShedChoice> checkpoints, uint32_t keep);

struct RetentionRules {
  uint32_t keep_last = 1;         // committed here, on the line; 0 counts as 1
  uint64_t keep_every_steps = 0;  // steps that it divides stay for ever; 0: none do
  uint64_t bytes_max = 0;         // of this job in this tier; 0: no limit
  bool parts_stay = false;        // a directory cannot be read, and may have what parts here lack
};

struct RetentionVerdict {
  CheckpointId id;
  bool goes = false;
  std::string why;  // a sentence for people, without a full stop
  uint64_t bytes = 0;
};

// A verdict for each checkpoint of the job of which anything lies in `tier`: first those that go,
// in the order in which to remove them, then those that stay, newest first. Removing the former one
// by one, and ending anywhere, even within one of them, leaves every line of the protection table
// as it was.
//
//   for (const RetentionVerdict& v : PlanRetention(TierKind::kNvme, views, line, rules, 0)) …
//
// Never goes: what is held, pinned, being written here or read for another tier; the newest one on
// the line that is committed here; what a line of the protection table stands on (while the line of
// descent has nothing that survives a failure: the newest of any branch that does); what is
// committed here and keep_every_steps divides. While nothing of the job can be restored: the newest
// step that every rank has sealed, if with the copies that are bad, and those that are of no use
// without one of them, it would be whole.
// Goes: what can never become whole here and is not needed to make the step whole together with
// other tiers; other branches, once the line has keep_last committed here; older ones on the line.
// When the job takes more than bytes_max, or `bytes_wanted` > 0 bytes must become free here: also
// what else there is that the first paragraph does not keep, other branches first, oldest first,
// and no more than needed.
//
// `checkpoints` are all that is known of the job, each id once, in any order; it must not be called
// while a tier is still being scanned, since what lies there would not count; with `parts_stay`, in
// which case only what is whole goes, it may be called while some of it cannot be read. Removals
// that have begun must show in them already (CheckpointView::Without), those in other tiers too:
// two tiers planned from the same views could each rely on the other's copy.
std::vector<RetentionVerdict> PlanRetention(TierKind tier,
                                            std::span<const CheckpointView> checkpoints,
                                            std::span<const Descent> line,
                                            const RetentionRules& rules, uint64_t bytes_wanted);

}  // namespace holdfast
