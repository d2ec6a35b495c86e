// PlanRetention of recovery/retention.h.
#include <algorithm>
#include <array>
#include <optional>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "recovery/protection.h"
#include "recovery/retention.h"

namespace holdfast {
namespace {

// What is to be done with what lies here of one checkpoint, in the order in which things go.
enum class Fate {
  kDead,        // goes: of no use here
  kOffLine,     // goes: of another branch
  kOnLine,      // goes: older than the rules keep
  kMayOffLine,  // stays, unless room is short
  kMayOnLine,   // likewise, after the former
  kStays
};

struct Judged {
  const CheckpointView* checkpoint = nullptr;
  Fate fate = Fate::kStays;
  std::string why;
  bool by_keep_every = false;
};

bool Lies(const TierPresence& here) {
  return here.good + here.bad + here.unlisted + here.doubted > 0 || here.bytes > 0 || here.flushing;
}

std::string_view Outlives(FailureKind kind) {
  switch (kind) {
    case FailureKind::kProcess:
      return "the end of its processes";
    case FailureKind::kReboot:
      return "a reboot of the node";
    case FailureKind::kNode:
      return "the loss of the node";
    case FailureKind::kDomain:
      return "the loss of its failure domain";
    case FailureKind::kAllNodes:
      return "the loss of all nodes";
  }
  return "";
}

// The lines that may not be lowered, and what stands on them.
class Guard {
 public:
  Guard(std::span<const CheckpointView> checkpoints, std::span<const Descent> line) {
    for (const ProtectionLine& entry : ProtectionTable(checkpoints, line, kEveryTier)) {
      Entry& mine = entries_[static_cast<size_t>(entry.kind)];
      mine.newest = entry.survives;
      if (mine.newest) {
        continue;
      }
      // A job that was started anew has nothing of its own yet. What it left is all there is, and
      // can still be asked for.
      mine.any_branch = true;
      for (const CheckpointView& checkpoint : checkpoints) {
        if (WholeAfter(checkpoint, entry.kind) && (!mine.newest || checkpoint.id > *mine.newest)) {
          mine.newest = checkpoint.id;
        }
      }
    }
  }

  // Why it may not lose what it has in `tier`; empty: it may. Of each line only the newest step
  // counts, so that one removal cannot change what the next one may do.
  std::string Forbids(const CheckpointView& checkpoint, TierKind tier) const {
    const CheckpointView left = checkpoint.Without(tier);
    // The worst failure first: it says most.
    for (size_t i = kFailureKinds; i-- > 0;) {
      const auto kind = static_cast<FailureKind>(i);
      if (entries_[i].newest == checkpoint.id && !WholeAfter(left, kind)) {
        return absl::StrCat("newest step ",
                            entries_[i].any_branch ? "of any branch" : "on the line",
                            " that would outlive ", std::string(Outlives(kind)));
      }
    }
    return "";
  }

 private:
  struct Entry {
    std::optional<CheckpointId> newest;
    bool any_branch = false;
  };
  std::array<Entry, kFailureKinds> entries_;
};

class Planner {
 public:
  Planner(TierKind tier, std::span<const CheckpointView> checkpoints, std::span<const Descent> line,
          const RetentionRules& rules)
      : tier_(tier),
        name_(TierName(tier)),
        line_(line),
        rules_(rules),
        keep_last_(std::max<size_t>(rules.keep_last, 1)),
        guard_(checkpoints, line) {
    for (const CheckpointView& checkpoint : checkpoints) {
      if (!OnLine(line, checkpoint.id)) {
        continue;
      }
      if (checkpoint.CommittedAt(tier)) {
        on_line_here_.push_back(checkpoint.id);
      }
      if (checkpoint.CommittedAt(tier) || WentBad(checkpoint)) {
        were_whole_.push_back(checkpoint.id);
      }
    }
    std::sort(on_line_here_.rbegin(), on_line_here_.rend());
    std::sort(were_whole_.rbegin(), were_whole_.rend());
    nothing_left_ = std::none_of(checkpoints.begin(), checkpoints.end(),
                                 [](const CheckpointView& c) { return c.Restorable(); });
  }

  Judged Judge(const CheckpointView& checkpoint) const {
    Judged judged{&checkpoint, Fate::kStays, NeverGoes(checkpoint), false};
    if (!judged.why.empty()) {
      return judged;
    }
    if (!checkpoint.CommittedAt(tier_)) {
      JudgeParts(judged);
    } else if (KeptForEver(checkpoint)) {
      judged.why = absl::StrCat("divisible by keep_every_steps ", rules_.keep_every_steps);
      judged.by_keep_every = true;
    } else {
      JudgeWhole(judged);
    }
    return judged;
  }

 private:
  // It was whole, and if what was found bad of it, and what that is needed for, is not so it is
  // again. (A rank may count for several tiers: too many steps stay, then, and none too few.)
  static bool MayProveWhole(const CheckpointView& checkpoint) {
    uint64_t perhaps = checkpoint.restorable;
    for (const TierKind tier : kAllTiers) {
      perhaps += checkpoint.at(tier).bad + checkpoint.at(tier).doubted;
    }
    return checkpoint.complete && checkpoint.consistent && perhaps >= checkpoint.world_size;
  }

  // Some of it lies here.
  bool WentBad(const CheckpointView& checkpoint) const {
    return Lies(checkpoint.at(tier_)) && !checkpoint.Restorable() && MayProveWhole(checkpoint);
  }

  // What is bad of it may prove good, or be put back from elsewhere: its turn comes as if it were
  // whole, but it takes no place of one that is.
  bool KeptThoughBad(const CheckpointView& checkpoint) const {
    const auto place = std::find(were_whole_.begin(), were_whole_.end(), checkpoint.id);
    return WentBad(checkpoint) && place != were_whole_.end() &&
           (KeptForEver(checkpoint) ||
            static_cast<size_t>(place - were_whole_.begin()) < keep_last_);
  }

  std::string NeverGoes(const CheckpointView& checkpoint) const {
    const TierPresence& here = checkpoint.at(tier_);
    if (here.flushing) {
      return absl::StrCat("is being written to ", name_);
    }
    if (here.source) {
      return absl::StrCat("is being read for another tier");
    }
    if (checkpoint.held) {
      return "a restore may be using it";
    }
    if (checkpoint.pinned) {
      return "pinned";
    }
    if (!on_line_here_.empty() && checkpoint.id == on_line_here_.front()) {
      return absl::StrCat("newest step on the line in ", name_);
    }
    if (std::string why = guard_.Forbids(checkpoint, tier_); !why.empty()) {
      return why;
    }
    if (nothing_left_ && MayProveWhole(checkpoint)) {
      return "nothing can be restored, and what is bad of this step may prove good";
    }
    if (!checkpoint.CommittedAt(tier_)) {
      if (here.wanted) {
        return absl::StrCat("waits for the rest to be written to ", name_);
      }
      // What a newer attempt finds unfinished can never become whole; the newest one's may.
      if (!checkpoint.complete && checkpoint.consistent &&
          (line_.empty() || checkpoint.id.attempt >= line_.front().attempt)) {
        return "is still being saved";
      }
    }
    return "";
  }

  bool KeptForEver(const CheckpointView& checkpoint) const {
    return rules_.keep_every_steps > 0 && checkpoint.id.step % rules_.keep_every_steps == 0;
  }

  bool LineHasItsOwn() const { return on_line_here_.size() >= keep_last_; }

  bool OfLeftBranch(const CheckpointView& checkpoint) const {
    return !OnLine(line_, checkpoint.id);
  }

  // Some shards lie here, not all.
  void JudgeParts(Judged& judged) const {
    if (rules_.parts_stay) {
      judged.why = "the rest of it may lie where nothing can be read now";
      return;
    }
    const CheckpointView& checkpoint = *judged.checkpoint;
    const TierPresence& here = checkpoint.at(tier_);
    const uint32_t listed_nowhere = checkpoint.at(TierKind::kRemote).unlisted;
    // (Whom a file needs is not known exactly, and what was found bad may prove good. But not for
    // ever: until this tier has something newer.)
    const bool doubt_counts = on_line_here_.empty() || on_line_here_.front() < checkpoint.id;
    const uint32_t doubted = doubt_counts ? checkpoint.at(TierKind::kRemote).doubted : 0;
    const bool perhaps_whole =
        checkpoint.consistent && !checkpoint.Restorable() &&
        uint64_t{checkpoint.restorable} + listed_nowhere + doubted >= checkpoint.world_size;
    const bool manifest_missing =
        checkpoint.consistent && uint64_t{here.good} + here.unlisted >= checkpoint.world_size;
    const bool needed = checkpoint.Restorable() && NeededWithOthers(checkpoint);
    const bool kept_though_bad = KeptThoughBad(checkpoint);
    if (!perhaps_whole && !manifest_missing && !needed && !kept_though_bad) {
      judged.fate = Fate::kDead;
      judged.why =
          !checkpoint.consistent
              ? (checkpoint.given_up
                     ? "its save was given up; it can never be restored"
                     : "its shards disagree about the world size; it can never be restored")
          : checkpoint.Restorable()
              ? absl::StrCat(Counts(checkpoint), "; ",
                             TierNames(NearestWhole(checkpoint, kEveryTier)), " has it whole")
              : absl::StrCat(Counts(checkpoint), "; the step cannot be restored from anywhere");
      return;
    }
    if (OfLeftBranch(checkpoint) && LineHasItsOwn()) {
      SayLeftBranch(judged);
      return;
    }
    judged.fate = OfLeftBranch(checkpoint) ? Fate::kMayOffLine : Fate::kMayOnLine;
    judged.why =
        needed        ? absl::StrCat("with what lies in other tiers it makes the step whole")
        : doubted > 0 ? absl::StrCat("may be whole: files leave out what is in others, which are ",
                                     "bad or gone now")
        : kept_though_bad
            ? absl::StrCat(Counts(checkpoint), ", the others bad; it stays as long as the ",
                           "rules would keep it, for them to be put back")
            : absl::StrCat("may become whole: no manifest names its shards yet");
  }

  // All shards lie here.
  void JudgeWhole(Judged& judged) const {
    const CheckpointView& checkpoint = *judged.checkpoint;
    if (OfLeftBranch(checkpoint)) {
      if (LineHasItsOwn()) {
        SayLeftBranch(judged);
        return;
      }
      judged.fate = Fate::kMayOffLine;
      judged.why = absl::StrCat("of a branch that was left, which stays until the line has ",
                                keep_last_, " in ", name_);
      return;
    }
    const auto place = std::find(on_line_here_.begin(), on_line_here_.end(), checkpoint.id);
    if (static_cast<size_t>(place - on_line_here_.begin()) < keep_last_) {
      judged.fate = Fate::kMayOnLine;
      judged.why = absl::StrCat("keep_last ", keep_last_, " keeps it");
      return;
    }
    if (const TierSet waiting = WaitsFor(checkpoint); waiting != 0) {
      judged.fate = Fate::kMayOnLine;
      judged.why = absl::StrCat("is to be written to ", TierNames(waiting), " from here");
      return;
    }
    judged.fate = Fate::kOnLine;
    judged.why = absl::StrCat("older than the ", keep_last_, " that keep_last keeps");
  }

  void SayLeftBranch(Judged& judged) const {
    judged.fate = Fate::kOffLine;
    judged.why = absl::StrCat("of a branch that was left; the line has ", on_line_here_.size(),
                              " in ", name_);
  }

  std::string Counts(const CheckpointView& checkpoint) const {
    return absl::StrCat("only ", checkpoint.at(tier_).good, " of ", checkpoint.world_size,
                        " shards are good here");
  }

  // Whether there is a failure that the step survives with what lies here, and not without.
  bool NeededWithOthers(const CheckpointView& checkpoint) const {
    const CheckpointView left = checkpoint.Without(tier_);
    for (size_t i = 0; i < kFailureKinds; ++i) {
      const auto kind = static_cast<FailureKind>(i);
      if (WholeAfter(checkpoint, kind) && !WholeAfter(left, kind)) {
        return true;
      }
    }
    return false;
  }

  // The tiers that still want it and could have it from here only.
  TierSet WaitsFor(const CheckpointView& checkpoint) const {
    TierSet waiting = 0;
    if (!checkpoint.Without(tier_).Restorable()) {
      for (TierKind tier : kAllTiers) {
        waiting |= tier != tier_ && checkpoint.at(tier).wanted ? SetOf(tier) : 0;
      }
    }
    return waiting;
  }

  const TierKind tier_;
  const std::string name_;
  const std::span<const Descent> line_;
  const RetentionRules rules_;
  const size_t keep_last_;
  const Guard guard_;
  std::vector<CheckpointId> on_line_here_;  // committed here, newest first
  std::vector<CheckpointId> were_whole_;    // those, and what has gone bad since, newest first
  bool nothing_left_ = false;               // that could be restored
};

// Lets go of what room is short for. Returns how much is still missing.
uint64_t MakeRoom(TierKind tier, std::vector<Judged>& all, uint64_t needed,
                  const std::string& why) {
  for (Judged& judged : all) {
    const uint64_t bytes = judged.checkpoint->at(tier).bytes;
    if (judged.fate < Fate::kMayOffLine) {
      needed -= std::min(needed, bytes);
    }
  }
  for (const Fate fate : {Fate::kMayOffLine, Fate::kMayOnLine}) {
    for (Judged& judged : all) {
      const uint64_t bytes = judged.checkpoint->at(tier).bytes;
      if (needed == 0) {
        return 0;
      }
      if (judged.fate == fate && bytes > 0) {
        judged.fate = fate == Fate::kMayOffLine ? Fate::kOffLine : Fate::kOnLine;
        judged.why = why;
        needed -= std::min(needed, bytes);
      }
    }
  }
  return needed;
}

}  // namespace

std::vector<RetentionVerdict> PlanRetention(TierKind tier,
                                            std::span<const CheckpointView> checkpoints,
                                            std::span<const Descent> line,
                                            const RetentionRules& rules, uint64_t bytes_wanted) {
  const Planner planner(tier, checkpoints, line, rules);
  std::vector<Judged> all;
  uint64_t bytes = 0;
  for (const CheckpointView& checkpoint : checkpoints) {
    if (Lies(checkpoint.at(tier))) {
      all.push_back(planner.Judge(checkpoint));
      bytes += checkpoint.at(tier).bytes;
    }
  }
  const auto older = [](const Judged& a, const Judged& b) {
    return a.checkpoint->id < b.checkpoint->id;
  };
  std::sort(all.begin(), all.end(), older);
  const uint64_t excess =
      rules.bytes_max > 0 && bytes > rules.bytes_max ? bytes - rules.bytes_max : 0;
  const std::string name(TierName(tier));
  const uint64_t missing = MakeRoom(
      tier, all, std::max(excess, bytes_wanted),
      excess >= bytes_wanted
          ? absl::StrCat("the job's bytes_max in ", name, " is ", FormatBytes(rules.bytes_max))
          : absl::StrCat("room is short in ", name));
  std::stable_sort(all.begin(), all.end(),
                   [](const Judged& a, const Judged& b) { return a.fate < b.fate; });
  const auto stays = std::partition_point(
      all.begin(), all.end(), [](const Judged& j) { return j.fate < Fate::kMayOffLine; });
  std::sort(stays, all.end(), [&](const Judged& a, const Judged& b) { return older(b, a); });

  std::vector<RetentionVerdict> verdicts;
  for (auto it = all.begin(); it != all.end(); ++it) {
    RetentionVerdict& verdict = verdicts.emplace_back();
    verdict = {it->checkpoint->id, it < stays, std::move(it->why), it->checkpoint->at(tier).bytes};
    if (it->by_keep_every && missing > 0) {
      absl::StrAppend(&verdict.why, "; it stays although ", FormatBytes(missing),
                      " more should become free");
    }
  }
  return verdicts;
}

}  // namespace holdfast
