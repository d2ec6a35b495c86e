// What may be deleted from a tier, in which order, and why everything else stays
// (docs/deletion.md). Nothing else orders a removal but a person, and an intent that was not
// finished.
//
// Pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "recovery/checkpoint_view.h"
#include "recovery/lineage.h"

namespace holdfast {

// How far it goes when room is short: what the stages before it take, and then this.
enum class RoomStage : uint32_t {
  kUsual = 0,          // as kIncomplete; a job's own bytes_max takes what kLeftBranches does
  kIncomplete = 1,     // superseded steps, then incomplete ones
  kEndedInRemote = 2,  // nvme, of an ended job: its newest step, too, if remote has it whole
  kLeftBranches = 3,   // steps of branches that were left, within their grace time
  kEndedJobs = 4,      // nvme, of a job that ended long ago: its last steps
};

struct DeletionRules {
  uint32_t keep_last = 1;         // complete here, on the line; 0 counts as 1
  uint64_t keep_every_steps = 0;  // steps that it divides stay for ever; 0: none do
  uint64_t bytes_max = 0;         // of this job in this tier; 0: no limit
  bool unread = false;  // a tier or a node cannot be read, and may have the missing shards
  int64_t now_unix_ms = 0;
  // Nvme, remote: incomplete steps, and those of a branch that was left, stay at least so long.
  int64_t grace_ms = 0;
  RoomStage room_stage = RoomStage::kUsual;
  bool ended = false;         // none of the job's processes lives
  int64_t keep_ended_ms = 0;  // how long an ended job keeps its newest step; 0: for ever
};

struct DeletionVerdict {
  CheckpointId id;
  bool goes = false;
  std::string why;  // a sentence for people, without a full stop
  uint64_t bytes = 0;
};

// A verdict for each checkpoint of the job of which `tier` has anything: first those that go, in
// the order in which to remove them, then those that stay, newest first. Removing the former one by
// one, and ending anywhere, even within one of them, leaves every line of the protection table as
// it was.
//
//   for (const DeletionVerdict& v : PlanDeletion(TierKind::kNvme, views, line, rules, 0)) …
//
// The rule for nvme and remote. A step is *covered* when the line of descent has keep_last complete
// steps here that are later by (attempt, step). Only what is covered goes:
// - complete steps on the line, at once;
// - steps of a branch that was left, and incomplete steps (shards that are missing, corrupt or not
//   named by a manifest), when the grace time has passed, too. That a step "can never be restored"
//   is no reason: what is missing may come back, or be repaired by a person.
// In remote, where often no budget limits what lies there, a job keeps the newest eight steps of
// its line whose writing did not end; what was whole there once does not count.
// Never goes, even if it is covered: what is held, pinned, being written here or read for another
// tier; the newest complete step on the line; what a line of the protection table stands on (while
// the line of descent has nothing that survives a failure: the newest of any branch that does);
// steps that keep_every_steps divides; incomplete steps while `unread`.
//
// If the job takes more than bytes_max, or `bytes_wanted` > 0 bytes must become free, no more than
// needed goes in this order, oldest first: complete steps that have at least one later complete
// step on the line; incomplete steps older than the newest complete one; all but the two newest
// incomplete steps; of an ended job in nvme what remote has, too; steps of branches that were left,
// within their grace time; of a job that ended longer ago than keep_ended_ms everything in nvme.
// (What is held, pinned or being written stays even then.)
//
// In the memory of peers (kPeer), which is no safe place anyway, shards of steps that cannot be
// restored go at once, and there is no grace time.
//
// `checkpoints` are all that is known of the job, each id once, in any order. Do not call it while
// a tier is still being scanned: its copies would not count. Removals that have begun must show in
// the views already (CheckpointView::Without), those in other tiers too: two tiers planned from the
// same views could each rely on the other's copy.
std::vector<DeletionVerdict> PlanDeletion(TierKind tier,
                                          std::span<const CheckpointView> checkpoints,
                                          std::span<const Descent> line, const DeletionRules& rules,
                                          uint64_t bytes_wanted);

}  // namespace holdfast
