#include "recovery/deletion.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "recovery/protection.h"

namespace holdfast {
namespace {

// In the order in which things go.
enum class Fate {
  kUseless,      // goes: of no use in memory
  kOffLine,      // goes: of a branch that was left
  kOnLine,       // goes: older than the rules keep
  kParts,        // goes: incomplete, and older than that
  kInRemote,     // goes: of an ended job, and remote has it, too; where nothing else makes room
  kLeft,         // goes: of a branch that was left not long ago, likewise
  kEnded,        // goes: of a job that ended long ago, likewise
  kRoomOffLine,  // stays, unless room is short; in this order
  kRoomOnLine,
  kRoomOldParts,
  kRoomParts,
  kRoomInRemote,
  kRoomLeft,
  kRoomEnded,
  kStays
};
constexpr Fate kFirstThatStays = Fate::kRoomOffLine;

// Of the incomplete steps that are newer than every complete one, so many stay though room is
// short.
constexpr size_t kPartsKept = 2;
// Of a job's incomplete steps on the line, so many stay in remote: most often nothing limits it.
constexpr size_t kRemotePartsMax = 8;

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
          const DeletionRules& rules)
      : tier_(tier),
        name_(TierName(tier)),
        durable_(tier == TierKind::kNvme || tier == TierKind::kRemote),
        line_(line),
        rules_(rules),
        keep_last_(std::max<size_t>(rules.keep_last, 1)),
        guard_(checkpoints, line) {
    for (const CheckpointView& checkpoint : checkpoints) {
      newest_ms_ = std::max(newest_ms_, checkpoint.unix_ms);
      if (checkpoint.CommittedAt(tier) && OnLine(line, checkpoint.id)) {
        complete_.push_back(checkpoint.id);
      }
    }
    std::sort(complete_.rbegin(), complete_.rend());
    for (const CheckpointView& checkpoint : checkpoints) {
      if (!checkpoint.CommittedAt(tier) && Lies(checkpoint.at(tier)) &&
          NeverGoes(checkpoint).empty()) {
        parts_.push_back(checkpoint.id);
      }
    }
    std::sort(parts_.rbegin(), parts_.rend());
    for (const CheckpointView& checkpoint : checkpoints) {
      if (IsUnfinished(checkpoint) && NeverGoes(checkpoint).empty()) {
        unfinished_.push_back(checkpoint.id);
      }
    }
    std::sort(unfinished_.rbegin(), unfinished_.rend());
  }

  Judged Judge(const CheckpointView& checkpoint) const {
    Judged judged{&checkpoint, Fate::kStays, NeverGoes(checkpoint), false};
    if (!judged.why.empty()) {
      judged.fate = FateOfEnded(checkpoint);
      return judged;
    }
    if (!checkpoint.CommittedAt(tier_)) {
      durable_ ? JudgeParts(judged) : JudgePartsInMemory(judged);
    } else if (KeptForEver(checkpoint)) {
      judged.why = absl::StrCat("divisible by keep_every_steps ", rules_.keep_every_steps);
      judged.by_keep_every = true;
    } else if (OnLine(line_, checkpoint.id)) {
      JudgeOnLine(judged);
    } else {
      JudgeLeft(judged);
    }
    return judged;
  }

 private:
  std::string NeverGoes(const CheckpointView& checkpoint) const {
    if (std::string why = InUse(checkpoint); !why.empty()) {
      return why;
    }
    if (!complete_.empty() && checkpoint.id == complete_.front()) {
      return absl::StrCat("newest step on the line in ", name_);
    }
    if (std::string why = guard_.Forbids(checkpoint, tier_); !why.empty()) {
      return why;
    }
    return StillToCome(checkpoint);
  }

  std::string InUse(const CheckpointView& checkpoint) const {
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
    return "";
  }

  std::string StillToCome(const CheckpointView& checkpoint) const {
    if (checkpoint.CommittedAt(tier_)) {
      return "";
    }
    if (checkpoint.at(tier_).wanted) {
      return absl::StrCat("waits for the rest to be written to ", name_);
    }
    // What a newer attempt finds unfinished is not written any more; the newest one's may be.
    const bool newest = line_.empty() || checkpoint.id.attempt >= line_.front().attempt;
    return !checkpoint.complete && checkpoint.consistent && newest ? "is still being saved" : "";
  }

  // What it stays for is that somebody may go on with it, but the job has ended, and others run.
  Fate FateOfEnded(const CheckpointView& checkpoint) const {
    if (!rules_.ended || tier_ != TierKind::kNvme || !InUse(checkpoint).empty() ||
        !StillToCome(checkpoint).empty()) {
      return Fate::kStays;
    }
    if (checkpoint.CommittedAt(TierKind::kRemote) && guard_.Forbids(checkpoint, tier_).empty()) {
      return Fate::kRoomInRemote;
    }
    return EndedLongAgo() ? Fate::kRoomEnded : Fate::kStays;
  }

  bool EndedLongAgo() const {
    return rules_.ended && tier_ == TierKind::kNvme && rules_.keep_ended_ms > 0 && newest_ms_ > 0 &&
           rules_.now_unix_ms - newest_ms_ >= rules_.keep_ended_ms;
  }

  bool KeptForEver(const CheckpointView& checkpoint) const {
    return rules_.keep_every_steps > 0 && checkpoint.id.step % rules_.keep_every_steps == 0;
  }

  // How many complete steps the line has here that are later.
  size_t Later(CheckpointId id) const {
    return static_cast<size_t>(
        std::lower_bound(complete_.begin(), complete_.end(), id, std::greater<>()) -
        complete_.begin());
  }
  bool Covered(CheckpointId id) const { return Later(id) >= keep_last_; }

  // When its grace time began: when its newest shard was saved, or its branch was left after that.
  static int64_t Since(const CheckpointView& checkpoint) {
    return std::max(checkpoint.unix_ms, checkpoint.left_unix_ms);
  }
  // Whether the grace time that began then continues. An unknown beginning (0) means that it does.
  bool InGrace(int64_t since_unix_ms) const {
    return durable_ && rules_.grace_ms > 0 &&
           (since_unix_ms == 0 || rules_.now_unix_ms - since_unix_ms < rules_.grace_ms);
  }
  std::string Grace() const {
    return absl::StrCat("for retention.grace_ms (",
                        FormatDuration(std::chrono::milliseconds(rules_.grace_ms)), ")");
  }

  // All its shards are here.
  void JudgeOnLine(Judged& judged) const {
    const CheckpointView& checkpoint = *judged.checkpoint;
    if (!Covered(checkpoint.id)) {
      judged.fate = Fate::kRoomOnLine;
      judged.why = absl::StrCat("keep_last ", keep_last_, " keeps it");
    } else if (const TierSet waiting = WaitsFor(checkpoint); waiting != 0) {
      judged.fate = Fate::kRoomOnLine;
      judged.why = absl::StrCat("is to be written to ", TierNames(waiting), " from here");
    } else {
      judged.fate = Fate::kOnLine;
      judged.why = absl::StrCat("older than the ", keep_last_, " that keep_last keeps");
    }
  }

  void JudgeLeft(Judged& judged) const {
    const CheckpointView& checkpoint = *judged.checkpoint;
    const bool grace = InGrace(Since(checkpoint));
    // (In memory that others lend there may be no room for a later one before this one goes.)
    const size_t later = durable_ ? Later(checkpoint.id) : complete_.size();
    if (grace) {
      judged.fate = Fate::kRoomLeft;
      judged.why = absl::StrCat("of a branch that was left, which stays ", Grace());
    } else if (later >= keep_last_) {
      judged.fate = Fate::kOffLine;
      judged.why =
          absl::StrCat("of a branch that was left; the line has ", later, " later in ", name_);
    } else {
      judged.fate = later > 0 || !durable_ ? Fate::kRoomOffLine : Fate::kRoomLeft;
      judged.why = absl::StrCat("of a branch that was left, which stays until the line has ",
                                keep_last_, " later in ", name_);
    }
  }

  // Some shards are here, not all good ones, or no manifest names them.
  void JudgeParts(Judged& judged) const {
    const CheckpointView& checkpoint = *judged.checkpoint;
    const auto counts = [&] {
      const TierPresence& here = checkpoint.at(tier_);
      const uint32_t world = checkpoint.world_size;
      return here.good == 0 && here.unlisted >= world
                 ? absl::StrCat("no manifest names its shards")
                 : absl::StrCat("only ", here.good + here.unlisted, " of ", world,
                                " shards are good here");
    };
    if (rules_.unread) {
      judged.why = "the rest of it may lie where nothing can be read now";
      return;
    }
    const bool covered = Covered(checkpoint.id);
    const bool grace = InGrace(Since(checkpoint));
    if (covered && !grace && !KeptForEver(checkpoint)) {
      judged.fate = Fate::kParts;
      judged.why =
          absl::StrCat(counts(), "; the line has ", Later(checkpoint.id), " later in ", name_);
      return;
    }
    if (BeyondRemoteLimit(checkpoint)) {
      judged.fate = Fate::kParts;
      judged.why = absl::StrCat(counts(), "; ", name_, " keeps the newest ", kRemotePartsMax,
                                " steps of a job whose writing there did not end");
      return;
    }
    const bool old = !complete_.empty() && checkpoint.id < complete_.front();
    const auto place = std::find(parts_.begin(), parts_.end(), checkpoint.id) - parts_.begin();
    judged.fate = old                                        ? Fate::kRoomOldParts
                  : static_cast<size_t>(place) >= kPartsKept ? Fate::kRoomParts
                  : EndedLongAgo()                           ? Fate::kRoomEnded
                                                             : Fate::kStays;
    judged.why = absl::StrCat(
        counts(), "; it stays ",
        covered && KeptForEver(checkpoint)
            ? absl::StrCat("as keep_every_steps ", rules_.keep_every_steps, " asks")
        : covered ? Grace()
                  : absl::StrCat("until the line has ", keep_last_, " later in ", name_),
        ", to be repaired or put back");
  }

  // Nobody was ever told that it is safe in remote. (What was whole there and is damaged may be
  // repaired; what a restore passed over is not on the line any more: neither counts, both stay.)
  bool IsUnfinished(const CheckpointView& checkpoint) const {
    const TierPresence& there = checkpoint.at(TierKind::kRemote);
    return tier_ == TierKind::kRemote && !checkpoint.CommittedAt(tier_) && Lies(there) &&
           !there.promised && OnLine(line_, checkpoint.id) && !KeptForEver(checkpoint);
  }
  bool BeyondRemoteLimit(const CheckpointView& checkpoint) const {
    return IsUnfinished(checkpoint) && unfinished_.size() > kRemotePartsMax &&
           checkpoint.id < unfinished_[kRemotePartsMax - 1];
  }

  // Memory that others lend is no place for what is of no use to anybody now.
  void JudgePartsInMemory(Judged& judged) const {
    const CheckpointView& checkpoint = *judged.checkpoint;
    const bool needed = checkpoint.Restorable() && NeededWithOthers(checkpoint);
    if (needed && !OnLine(line_, checkpoint.id) && complete_.size() >= keep_last_) {
      judged.fate = Fate::kOffLine;
      judged.why =
          absl::StrCat("of a branch that was left; the line has ", complete_.size(), " in ", name_);
      return;
    }
    if (rules_.unread || needed) {
      judged.fate = rules_.unread ? Fate::kStays : Fate::kRoomOnLine;
      judged.why = rules_.unread ? "the rest of it may lie where nothing can be read now"
                                 : "with what lies in other tiers it makes the step whole";
      return;
    }
    judged.fate = Fate::kUseless;
    judged.why = absl::StrCat(
        "only ", checkpoint.at(tier_).good, " of ", checkpoint.world_size,
        " shards are good here; ",
        checkpoint.Restorable()
            ? absl::StrCat(TierNames(NearestWhole(checkpoint, kEveryTier)), " has it whole")
            : std::string("the step cannot be restored from anywhere"));
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
  const bool durable_;
  const std::span<const Descent> line_;
  const DeletionRules rules_;
  const size_t keep_last_;
  const Guard guard_;
  std::vector<CheckpointId> complete_;    // here and on the line, newest first
  std::vector<CheckpointId> parts_;       // incomplete here, and may go, newest first
  std::vector<CheckpointId> unfinished_;  // of those, newest first: IsUnfinished
  int64_t newest_ms_ = 0;                 // when the job saved its newest step
};

// What goes for want of room, in this order.
struct RoomRule {
  Fate spared;
  Fate goes;
  RoomStage from;  // the stage that takes it
  const char* because;
};
constexpr RoomRule kRoomRules[] = {
    {Fate::kRoomOffLine, Fate::kOffLine, RoomStage::kIncomplete, ""},
    {Fate::kRoomOnLine, Fate::kOnLine, RoomStage::kIncomplete, ""},
    {Fate::kRoomOldParts, Fate::kParts, RoomStage::kIncomplete, ""},
    {Fate::kRoomParts, Fate::kParts, RoomStage::kIncomplete, ""},
    {Fate::kRoomInRemote, Fate::kInRemote, RoomStage::kEndedInRemote,
     ", the job has ended, and remote has it"},
    {Fate::kRoomLeft, Fate::kLeft, RoomStage::kLeftBranches, ""},
    {Fate::kRoomEnded, Fate::kEnded, RoomStage::kEndedJobs,
     ", and the job ended longer ago than nvme.keep_ended_ms"},
};

bool Takes(RoomStage stage, RoomStage from) {
  return stage == RoomStage::kUsual ? from == RoomStage::kIncomplete : from <= stage;
}

// Lets go of what room is short for. Returns how much is still missing.
uint64_t MakeRoom(TierKind tier, std::vector<Judged>& all, uint64_t needed, RoomStage stage,
                  const std::string& why) {
  for (Judged& judged : all) {
    const uint64_t bytes = judged.checkpoint->at(tier).bytes;
    if (judged.fate < kFirstThatStays) {
      needed -= std::min(needed, bytes);
    }
  }
  for (const RoomRule& rule : kRoomRules) {
    for (Judged& judged : all) {
      const uint64_t bytes = judged.checkpoint->at(tier).bytes;
      if (needed == 0) {
        return 0;
      }
      if (Takes(stage, rule.from) && judged.fate == rule.spared && bytes > 0) {
        judged.fate = rule.goes;
        judged.why = absl::StrCat(why, rule.because);
        needed -= std::min(needed, bytes);
      }
    }
  }
  return needed;
}

}  // namespace

std::vector<DeletionVerdict> PlanDeletion(TierKind tier,
                                          std::span<const CheckpointView> checkpoints,
                                          std::span<const Descent> line, const DeletionRules& rules,
                                          uint64_t bytes_wanted) {
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
  // (A job's own limit takes what is the job's own, whoever lacks room.)
  const bool own = excess >= bytes_wanted;
  const RoomStage stage = own && rules.room_stage < RoomStage::kLeftBranches && !rules.ended
                              ? RoomStage::kLeftBranches
                              : rules.room_stage;
  const uint64_t missing = MakeRoom(
      tier, all, std::max(excess, bytes_wanted), stage,
      own ? absl::StrCat("the job's bytes_max in ", name, " is ", FormatBytes(rules.bytes_max))
          : absl::StrCat("room is short in ", name));
  std::stable_sort(all.begin(), all.end(),
                   [](const Judged& a, const Judged& b) { return a.fate < b.fate; });
  const auto stays = std::partition_point(all.begin(), all.end(),
                                          [](const Judged& j) { return j.fate < kFirstThatStays; });
  std::sort(stays, all.end(), [&](const Judged& a, const Judged& b) { return older(b, a); });

  std::vector<DeletionVerdict> verdicts;
  for (auto it = all.begin(); it != all.end(); ++it) {
    DeletionVerdict& verdict = verdicts.emplace_back();
    verdict = {it->checkpoint->id, it < stays, std::move(it->why), it->checkpoint->at(tier).bytes};
    if (it->by_keep_every && missing > 0) {
      absl::StrAppend(&verdict.why, "; it stays although ", FormatBytes(missing),
                      " more should become free");
    }
  }
  return verdicts;
}

}  // namespace holdfast
