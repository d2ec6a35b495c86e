// What lies in the durable tiers, as their scans tell it, and what cannot be decided before that is
// known (docs/protocol.md §10).
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/coordinator.h"
#include "server/tier_lists.h"

namespace holdfast {
namespace {

bool IsGoodBelow(const CopyState& copy, const std::string& dir) {
  return copy.kind == CopyState::Kind::kGood &&
         copy.detail.location.rfind(absl::StrCat(dir, "/"), 0) == 0;
}

}  // namespace

CopyDetail Coordinator::DetailOf(const DurableCopy& copy) {
  return {copy.record_bytes, copy.record_crc, copy.copy.layout_hash, copy.location, {},
          copy.file_bytes,   copy.plan};
}

bool Coordinator::InventoryPending() const {
  return std::any_of(std::begin(kDurable), std::end(kDurable), [&](TierKind tier) {
    return Configured(tier) && Inventory(tier).kind == InventoryState::Kind::kPending;
  });
}

void Coordinator::On(const InventoryState& m, Turn& t) {
  const auto before = Inventory(m.tier).kind;
  if (m.tier == TierKind::kNvme) {
    nvme_on_.Set(t.from, m);
    SumUpNvme();
    if (m.kind == InventoryState::Kind::kKnown) {
      to_tell_.erase(t.from);
    }
  } else {
    inventory_[static_cast<size_t>(m.tier)] = m;
  }
  if (m.kind == InventoryState::Kind::kPending) {
    return;
  }
  if (m.kind == InventoryState::Kind::kFailed && before != m.kind) {
    Tell(Report::Kind::kTierTrouble,
         absl::StrCat("what lies in ", Name(m.tier), " could not be read: ", m.why), 0, t, m.tier);
  }
  if (t.from != kHere) {
    if (m.tier == TierKind::kNvme && m.kind == InventoryState::Kind::kKnown) {
      DropLost(t.from, m.tier, {CopyState::Kind::kAway}, "which lost them", t);
    }
    RecheckCutOff(t);
  }
  if (m.tier == TierKind::kNvme) {
    AbandonLost(t.from, t);
  } else {
    std::vector<NodeId> nodes;
    for (const auto& [node, ranks] : members_.by_node()) {
      nodes.push_back(node);
    }
    for (const NodeId node : nodes) {
      AbandonLost(node, t);
    }
  }
  GoOnWithTier(m.tier, t);
}

// What waited for the tier to be read may go on.
void Coordinator::GoOnWithTier(TierKind tier, Turn& t) {
  MendFound(t);
  if (AllInventoriesKnown() && !history_known_) {
    history_known_ = true;
    Persist(t);
  }
  PruneIncomplete(t);
  ChooseForMissing(tier, t);
  PumpDrains(t);
  GoOnWithSession(t);
  RetainDurable(t);
  RetryJoins(t);
  RetryReaders(t);
}

// Those that are gone are not waited for.
void Coordinator::SumUpNvme() {
  inventory_[static_cast<size_t>(TierKind::kNvme)] = nvme_on_.Sum(*settings_.nodes);
}

// What the ranks waited for may be known now.
void Coordinator::GoOnWithSession(Turn& t) {
  if (!session_ || !waits_for_inventory_) {
    return;
  }
  if (session_->loading() && session_->failed()) {
    GoOnWithFallBack(!InventoryPending(), t);
  } else if (!session_->loading() && session_->AllEntered()) {
    BeginSession(t);
  }
}

// All its copies are in the remote tier, and it is not committed there yet.
bool Coordinator::ManifestMissing(const Checkpoint& checkpoint) const {
  return Inventory(TierKind::kRemote).kind == InventoryState::Kind::kKnown &&
         !checkpoint.manifest && checkpoint.Complete() &&
         checkpoint.GoodAt(TierKind::kRemote) == checkpoint.world_size;
}

// A manifest that is about to be published makes a step whole that is newer than the candidates.
bool Coordinator::ManifestComing(const std::vector<CheckpointId>& candidates) const {
  return std::any_of(checkpoints_.begin(), checkpoints_.end(), [&](const auto& c) {
    const auto& [id, checkpoint] = c;
    const Drain& drain = checkpoint.drain(TierKind::kRemote);
    return !checkpoint.committed && OnLine(line_, id) && ManifestMissing(checkpoint) &&
           (candidates.empty() || candidates.front() < id) && drain.phase != Drain::Phase::kNone &&
           drain.problem.empty() && drain.stalled.empty();
  });
}

// The newest step of the line among those that `last_of` names per attempt.
std::optional<CheckpointId> Coordinator::NewestOnLine(
    const std::function<std::optional<Step>(const AttemptInfo&)>& last_of) const {
  std::optional<CheckpointId> newest;
  std::optional<Step> limit;  // of an attempt that a younger one descends from
  for (const Descent& d : line_) {
    if (const auto info = attempts_.find(d.attempt); info != attempts_.end()) {
      if (const std::optional<Step> last = last_of(info->second)) {
        const CheckpointId there{d.attempt, std::min(*last, limit.value_or(*last))};
        newest = newest ? std::max(*newest, there) : there;
      }
    }
    limit = d.parent.step;
  }
  return newest;
}

// The newest step on the line that may lie there, whether the tier can be read or not.
std::optional<CheckpointId> Coordinator::NewestIn(TierKind tier) const {
  return NewestOnLine([tier](const AttemptInfo& info) {
    return tier == TierKind::kNvme ? info.last_nvme_step : info.last_remote_step;
  });
}

// Whether the tier may have something newer than all candidates.
bool Coordinator::MayHoldNewer(TierKind tier, const std::vector<CheckpointId>& candidates) const {
  const auto newer = [&](const std::optional<CheckpointId>& there) {
    return there && (candidates.empty() || candidates.front() < *there);
  };
  const bool pending = Inventory(tier).kind == InventoryState::Kind::kPending;
  if (!history_known_ || newer(NewestIn(tier)) || (candidates.empty() && pending)) {
    return true;  // (a session without candidates waits for the tiers being read)
  }
  // The rest of what lies there in parts may be where it cannot be read.
  if (!pending && newer(NewestInParts(tier))) {
    return true;
  }
  // What the node published just before it went down, it may not have noted. As long as the tier
  // is going to be read, that is waited for: on the drives for anything, at the remote tier for
  // what is known to have been committed, and for a step of which parts are left: a host that is
  // gone may have brought it there before it could be agreed on that it was committed.
  if (!rebooted_ || !pending) {
    return false;
  }
  return tier == TierKind::kNvme || newer(NewestInParts(std::nullopt)) ||
         newer(NewestOnLine([](const AttemptInfo& info) {
           return info.any_committed ? std::optional(info.last_committed_step) : std::nullopt;
         }));
}

// The newest step of the line that some ranks' shards are known of, there if a tier is named, and
// not all.
std::optional<CheckpointId> Coordinator::NewestInParts(std::optional<TierKind> tier) const {
  const auto newest =
      std::find_if(checkpoints_.rbegin(), checkpoints_.rend(), [&](const auto& known) {
        const auto& [id, checkpoint] = known;
        return OnLine(line_, id) && checkpoint.good > 0 && (!tier || checkpoint.AnyAt(*tier)) &&
               checkpoint.good < checkpoint.world_size && !checkpoint.contradictory;
      });
  return newest == checkpoints_.rend() ? std::nullopt : std::optional(newest->first);
}

// What runs here was opened without knowing of an attempt that a tier turns out to have: its state
// was lost, and the tier could not be read. It is over, and its ranks start again above that one.
void Coordinator::GiveWay(const CopiesFound& m, Turn& t) {
  Attempt newest = 0;
  for (const DurableCopy& found : m.copies) {
    newest = std::max(newest, found.copy.id.attempt);
  }
  for (const BadDurableCopy& bad : m.bad) {
    newest = std::max(newest, bad.copy.copy.world_size > 0 ? bad.copy.copy.id.attempt : 0);
  }
  if (members_.empty() || newest < attempt() ||
      (newest == attempt() && attempts_.rbegin()->second.decided)) {
    return;
  }
  Failure over = SupersededFailure(attempt());
  over.message =
      absl::StrCat("attempt ", attempt(), " of job '", name_, "' was opened while ", Name(m.tier),
                   ", which has attempt ", newest, ", could not be read; start all ranks again");
  if (newest == attempt()) {
    attempts_.erase(newest);  // the one that is learned now bears the number
  }
  highest_attempt_ = std::max(highest_attempt_, newest);
  EndAttempt(highest_attempt_ + 1, over, t);
  Persist(t);
}

// A scan may have seen what was removed while it went on. (Of drives their node knows that.)
bool Coordinator::MayLieThere(const CopiesFound& m, CheckpointId id, const Turn& t) {
  Removals& removals = RemovalsOf(m.tier);
  const auto& ended = removals.ended;
  const auto removed = ended.find(id);
  // One that was away when the others were asked is asked when they have answered.
  const auto ask_too = [&](Going& going) {
    if (going.id == id && going.asked.count(PlaceOf(m.tier, t.from).node) == 0) {
      going.nodes.insert(PlaceOf(m.tier, t.from).node);
    }
  };
  if (removals.current) {
    ask_too(*removals.current);
  }
  std::for_each(removals.stuck.begin(), removals.stuck.end(), ask_too);
  std::for_each(removals.waiting.begin(), removals.waiting.end(), ask_too);
  const bool past =
      m.tier == TierKind::kRemote && removed != ended.end() && !(removed->second < m.began);
  return !IsGoing(id, m.tier) && !past;
}

// Whether a copy that was found is one of the step that is known by its name.
bool Coordinator::MayCount(const CopiesFound& m, const DurableCopy& found, Turn& t) {
  const SealedCopy& copy = found.copy;
  const CheckpointId id = copy.id.checkpoint();
  if (!MayLieThere(m, id, t)) {
    return false;
  }
  const auto known = checkpoints_.find(id);
  if (known == checkpoints_.end() || known->second.shards.count(copy.id.rank) == 0) {
    return true;
  }
  if (IsAnotherSave(copy, m.tier, found.location, !found.from_manifest, t)) {
    return false;
  }
  const ShardState& shard = known->second.shards.at(copy.id.rank);
  // What was found bad is not good again because it still lies there.
  return shard.at(PlaceOf(m.tier, t.from)).kind != CopyState::Kind::kBad;
}

// Of an attempt that had this number before the job's state was lost; or of digests that are not
// the ones that the rank sealed, whatever its own record says.
bool Coordinator::IsAnotherSave(const SealedCopy& copy, TierKind tier, const std::string& location,
                                bool time_known, Turn& t) {
  const CheckpointId id = copy.id.checkpoint();
  const auto known = checkpoints_.find(id);
  if (known == checkpoints_.end() || known->second.shards.count(copy.id.rank) == 0) {
    return false;
  }
  const ShardState& shard = known->second.shards.at(copy.id.rank);
  const bool other_time = shard.time_sure && time_known && shard.unix_ms != copy.sealed_unix_ms;
  const bool other_digests = shard.likeness.any() && copy.likeness.any() &&
                             shard.likeness.content != copy.likeness.content;
  if (!other_time && !other_digests && shard.bytes == copy.image_bytes) {
    return false;
  }
  Tell(Report::Kind::kTierTrouble,
       absl::StrCat("step ", id.step, " of attempt ", id.attempt, " rank ", copy.id.rank,
                    ": what lies in ", Name(tier), " (", location,
                    ") is another save than the one that is known by this name; left alone"),
       0, t, tier);
  return true;
}

// That it lies there says that it was saved.
void Coordinator::NoteBegun(const SealedCopy& copy) {
  if (copy.id.attempt == attempt()) {
    any_save_ = true;
    Step& last = last_begun_.try_emplace(copy.id.rank, copy.id.step).first->second;
    last = std::max(last, copy.id.step);
  }
}

void Coordinator::On(const CopiesFound& m, Turn& t) {
  // (What another node began may have been before this one's clock began.)
  const bool forgotten = forgotten_at_ != MonotonicTime{} && m.began < forgotten_at_;
  if (removed_ || forgotten) {
    return;
  }
  GiveWay(m, t);
  bool learned = m.highest_claim > highest_attempt_;
  highest_attempt_ = std::max(highest_attempt_, m.highest_claim);
  std::set<std::pair<CheckpointId, Rank>> there;
  for (const DurableCopy& found : m.copies) {
    Learn(found.copy, learned);
  }
  for (const BadDurableCopy& bad : m.bad) {
    there.insert({bad.copy.copy.id.checkpoint(), bad.copy.copy.id.rank});
    // (Nobody else's save may get the name of what is damaged.)
    learned = learned || bad.copy.copy.id.attempt > highest_attempt_;
    highest_attempt_ = std::max(highest_attempt_, bad.copy.copy.id.attempt);
    if (bad.copy.copy.world_size > 0) {
      Learn(bad.copy.copy, learned);
    }
  }
  ComputeLine();
  const std::set<CheckpointId> begun(m.begun.begin(), m.begun.end());
  for (const DurableCopy& found : m.copies) {
    const SealedCopy& copy = found.copy;
    const CheckpointId id = copy.id.checkpoint();
    there.insert({id, copy.id.rank});
    if (!MayCount(m, found, t)) {
      continue;
    }
    NoteBegun(copy);
    AddShard({copy.id.attempt, copy.id.rank, copy.id.step, copy.world_size, copy.image_bytes,
              copy.sealed_unix_ms, !found.from_manifest, copy.likeness},
             m.tier, DetailOf(found), t);
    if (const auto it = checkpoints_.find(id);
        it != checkpoints_.end() && m.tier == TierKind::kRemote) {
      it->second.begun_there = begun.count(id) > 0;
      it->second.promised_there = !it->second.begun_there;
    }
  }
  TakeBad(m, t);
  for (const BadDurableCopy& bad : m.bad) {
    if (const auto it = checkpoints_.find(bad.copy.copy.id.checkpoint());
        it != checkpoints_.end() && m.tier == TierKind::kRemote) {
      it->second.promised_there = true;  // (what is only begun there is never told as damaged)
    }
  }
  for (const CheckpointId& id : m.manifests) {
    if (const auto it = checkpoints_.find(id);
        it != checkpoints_.end() && it->second.AnyAt(m.tier)) {
      it->second.SetManifest(true);
      Recheck(id, t);
      if (id.attempt == attempt()) {
        AnswerAwaits(id.step, t);
      }
    }
  }
  const auto not_seen = [&](CheckpointId id, Rank rank, const CopyState& copy) {
    return copy.detail.since < m.as_of && there.count({id, rank}) == 0;
  };
  for (const CheckpointId& id : DropCopies(PlaceOf(m.tier, t.from), not_seen)) {
    Tell(Report::Kind::kCopyBad,
         absl::StrCat("copies of step ", id.step, " of attempt ", id.attempt, " are not in ",
                      Name(m.tier), " any more: somebody else removed them"),
         0, t);
    Recheck(id, t);
    EraseIfGone(id,
                {absl::StatusCode::kAborted, v1::Failure::REASON_SHED,
                 absl::StrCat("the copies of step ", id.step, " were removed from outside")},
                t);
  }
  for (const TierKind tier : kDurable) {
    LastDrained& last = last_drained_[static_cast<size_t>(tier)];
    for (const auto& [id, checkpoint] : checkpoints_) {
      if (!checkpoint.CommittedAt(tier)) {
        continue;
      }
      if (OnLine(line_, id) && (!last.id || *last.id < id)) {
        last = {id, checkpoint.unix_ms};
      }
      learned = NoteThere(id, tier) || learned;
    }
  }
  PruneIncomplete(t);
  PruneAttempts();
  if (learned) {
    Persist(t);
  }
}

// They do not count any more. Returns the checkpoints that had some.
std::vector<CheckpointId> Coordinator::DropCopies(
    CopyPlace place, const std::function<bool(CheckpointId, Rank, const CopyState&)>& which) {
  std::vector<CheckpointId> changed;
  for (auto& [id, checkpoint] : checkpoints_) {
    bool any = false;
    std::vector<Rank> ranks;
    if (place.tier == TierKind::kRemote) {
      for (const auto& [rank, shard] : checkpoint.shards) {
        ranks.push_back(rank);
      }
    } else {
      ranks = checkpoint.RanksOn(place.node);
    }
    for (const Rank rank : ranks) {
      const CopyState& copy = checkpoint.shards.at(rank).at(place);
      if (copy.kind != CopyState::Kind::kNone && which(id, rank, copy)) {
        checkpoint.SetNone(rank, place);
        any = true;
      }
    }
    if (any) {
      changed.push_back(id);
    }
  }
  return changed;
}

// Nothing is judged by what cannot be read. What was found bad is not forgotten: it would be good
// again when the directory is back.
void Coordinator::On(const CopiesAway& m, Turn& t) {
  ForgetNamedBad([&](const RepairKey& key, const std::string& location) {
    return key.place == PlaceOf(m.tier, t.from) && location.rfind(m.dir + "/", 0) == 0;
  });
  const auto lies_there = [&](CheckpointId, Rank, const CopyState& copy) {
    return IsGoodBelow(copy, m.dir);
  };
  for (const CheckpointId& id : DropCopies(PlaceOf(m.tier, t.from), lies_there)) {
    // It may be whole with what lies there, so nothing older is taken for the newest.
    if (checkpoints_.at(id).committed && NoteThere(id, m.tier)) {
      Persist(t);
    }
    if (m.tier == TierKind::kRemote) {
      checkpoints_.at(id).SetManifest(false);
    }
    Recheck(id, t);
    EraseIfGone(id,
                {absl::StatusCode::kAborted, v1::Failure::REASON_SHED,
                 absl::StrCat("the last copies of step ", id.step, " are out of reach: '", m.dir,
                              "' is away")},
                t);
  }
}

std::string Coordinator::WhyUnread(TierKind tier) const {
  const InventoryState& inventory = Inventory(tier);
  if (tier == TierKind::kMemory || !Configured(tier) ||
      inventory.kind == InventoryState::Kind::kKnown) {
    return "";
  }
  return absl::StrCat("what lies in ", Name(tier),
                      inventory.kind == InventoryState::Kind::kPending
                          ? std::string(" is still being read")
                          : absl::StrCat(" cannot be read now (", inventory.why, ")"));
}

uint64_t Coordinator::BytesBelow(TierKind tier, const std::string& dir) const {
  uint64_t bytes = 0;
  for (const auto& [id, checkpoint] : checkpoints_) {
    for (const auto& [rank, shard] : checkpoint.shards) {
      bytes += IsGoodBelow(shard.at(PlaceOf(tier, kHere)), dir) ? shard.bytes : 0;
    }
  }
  return bytes;
}

std::vector<ShardId> Coordinator::GoodAt(TierKind tier, NodeId node) const {
  std::vector<ShardId> good;
  for (const auto& [id, checkpoint] : checkpoints_) {
    for (const Rank rank : checkpoint.RanksOn(node)) {
      if (checkpoint.shards.at(rank).at(PlaceOf(tier, node)).kind == CopyState::Kind::kGood) {
        good.push_back({uuid_, id.attempt, id.step, rank});
      }
    }
  }
  return good;
}

// A removal of everything has ended halfway: what is left is what the tiers' next scans find.
void Coordinator::ForgetDurable(Turn& t) {
  forgotten_at_ = t.time.now;
  named_bad_.clear();
  for (const TierKind tier : kDrained) {
    Removals fresh;
    fresh.ended = std::move(RemovalsOf(tier).ended);
    RemovalsOf(tier) = std::move(fresh);
    if (Configured(tier) && tier != TierKind::kPeer) {
      inventory_[static_cast<size_t>(tier)] = {tier, InventoryState::Kind::kPending, ""};
    }
  }
  nvme_on_.SetAllPending();
  for (const CheckpointId& id : AllCheckpoints()) {
    Checkpoint& checkpoint = checkpoints_.at(id);
    checkpoint.removing = false;
    for (const TierKind tier : kDrained) {
      checkpoint.Clear(tier);
    }
    Recheck(id, t);
    EraseIfGone(id,
                {absl::StatusCode::kAborted, v1::Failure::REASON_SHED,
                 absl::StrCat("step ", id.step, " of attempt ", id.attempt,
                              " went when the job was to be removed")},
                t);
  }
}

// Steps of older attempts that are incomplete are not written any more: what memory has of them
// goes. What a durable tier has of one stays, and with it what memory has until that is needed
// (recovery/deletion.h): the rest may come back, and then it is whole. As long as a tier has not
// been read, it may have what is missing.
void Coordinator::PruneIncomplete(Turn& t) {
  if (!AllInventoriesKnown()) {
    return;
  }
  std::vector<CheckpointId> incomplete;
  for (auto& [id, checkpoint] : checkpoints_) {
    const bool open = checkpoint.Open();
    // Of the current attempt: what lies in a durable tier alone was whole in memory once.
    const bool left_over = !checkpoint.AnyAt(TierKind::kMemory) && checkpoint.writing.empty();
    const bool over = id.attempt != attempt() || left_over;
    if (open && over && OnLine(line_, id) && ManifestMissing(checkpoint)) {
      checkpoint.dead = true;  // until its manifest is there
    } else if (open && CutOff(id, checkpoint)) {
      checkpoint.cut_off = true;
      checkpoint.is_protected = false;
    } else if (open && over && checkpoint.AnythingDurable()) {
      checkpoint.dead = true;  // until what is missing is back, or what is corrupt is repaired
    } else if (open && over) {
      incomplete.push_back(id);
    }
  }
  for (const CheckpointId& id : incomplete) {
    LetGo(id,
          Failure{absl::StatusCode::kAborted, v1::Failure::REASON_ABANDONED,
                  absl::StrCat("only parts of step ", id.step, " of attempt ", id.attempt,
                               " were found")},
          t);
  }
}

// Nobody writes it, and what it lacks may be in a tier that has not been read.
bool Coordinator::MayBeFound(const Checkpoint& checkpoint) const {
  return !AllInventoriesKnown() && checkpoint.writing.empty() &&
         !checkpoint.AnyAt(TierKind::kMemory);
}

// A durable tier that cannot be read (yet) may have something newer than what is seen.
std::optional<Failure> Coordinator::WaitForInventory(
    const std::vector<CheckpointId>& candidates) const {
  for (const TierKind tier : {TierKind::kNvme, TierKind::kRemote}) {
    const InventoryState& inventory = Inventory(tier);
    if (!Configured(tier) || inventory.kind == InventoryState::Kind::kKnown) {
      continue;
    }
    if (!MayHoldNewer(tier, candidates)) {
      continue;  // what is here is as new as anything there
    }
    const bool others = !CommittedOnLine().empty();  // than the one that was asked for
    return Failure{
        absl::StatusCode::kUnavailable, v1::Failure::REASON_UNSPECIFIED,
        absl::StrCat(
            "restore of job '", name_, "': ", ToAbsl(TierName(tier)),
            inventory.kind == InventoryState::Kind::kPending
                ? " is still being read"
                : absl::StrCat(" cannot be read now (", inventory.why, ")"),
            candidates.empty() && others
                ? absl::StrCat(", and may hold the step; elsewhere there are ", CommittedText())
            : candidates.empty() ? std::string(", and may hold a step; elsewhere there is none")
                                 : absl::StrCat(", and may hold a newer step than step ",
                                                candidates.front().step, ", the newest elsewhere"),
            "; restore again when it can be read",
            candidates.empty() && !others
                ? absl::StrCat("; what there is: ckptctl explain ", name_)
                : absl::StrCat(", or choose what there is: ckptctl restore ", name_, " --step N"))};
  }
  return std::nullopt;
}

}  // namespace holdfast
