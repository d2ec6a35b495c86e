// Saves: which steps are open, sealed, committed, lost; and who waits for that (docs/protocol.md
// §4).
#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "recovery/shedding.h"
#include "server/coordinator.h"

namespace holdfast {
namespace {

Failure Lost(v1::Failure::Reason reason, std::string message) {
  return {absl::StatusCode::kAborted, reason, std::move(message)};
}

TierKind TierOf(v1::AwaitSave::Stage stage) {
  return stage == v1::AwaitSave::STAGE_NVME   ? TierKind::kNvme
         : stage == v1::AwaitSave::STAGE_PEER ? TierKind::kPeer
                                              : TierKind::kRemote;
}

// It is reached in a tier, to which the step may not go.
bool OfTier(v1::AwaitSave::Stage stage) {
  return stage == v1::AwaitSave::STAGE_NVME || stage == v1::AwaitSave::STAGE_PEER ||
         stage == v1::AwaitSave::STAGE_REMOTE;
}

}  // namespace

void Coordinator::On(const SaveAsked& m, Turn& t) {
  if (m.attempt != attempt()) {
    return RefuseSave(m, SupersededFailure(m.attempt), t);
  }
  const AttemptInfo& info = attempts_.rbegin()->second;
  const auto refuse = [&](absl::StatusCode code, std::string why,
                          v1::Failure::Reason reason = v1::Failure::REASON_UNSPECIFIED) {
    RefuseSave(
        m, {code, reason, absl::StrCat("save of step ", m.step, " by rank ", m.rank, ": ", why)},
        t);
  };
  if (SeatedElsewhere(m.rank, t.from)) {
    return RefuseSave(m, TakenElsewhere(m.rank), t);
  }
  if (SessionOpen()) {
    return refuse(absl::StatusCode::kFailedPrecondition,
                  "a restore of this attempt is under way; wait for its outcome first");
  }
  const bool from_scratch = restore_point_.set() && restore_point_.from_scratch();
  if (!info.decided && !history_known_ && !from_scratch) {
    return refuse(absl::StatusCode::kUnavailable,
                  absl::StrCat("what job '", name_,
                               "' has in the durable tiers is not known yet, "
                               "and it may have to restore that; restore first"));
  }
  if (!info.decided && (EverCommitted() || AnythingSaved() || restore_point_.set()) &&
      !from_scratch) {
    // It would start a line of descent from nothing, and discard for good what is there.
    return refuse(
        absl::StatusCode::kFailedPrecondition,
        absl::StrCat("attempt ", m.attempt, " has not restored anything, and job '", name_, "' ",
                     restore_point_.set() ? "has a restore point" : "has committed steps",
                     last_failure_
                         ? absl::StrCat(" (its restore failed: ", last_failure_->message, ")")
                         : "",
                     last_failure_ ? absl::StrCat("; see ckptctl explain ", name_)
                                   : absl::StrCat("; restore first, or decide to begin anew: "
                                                  "ckptctl restore ",
                                                  name_, " --from-scratch")),
        v1::Failure::REASON_NOT_RESTORED);
  }
  const auto last = last_begun_.find(m.rank);
  if (last != last_begun_.end() && m.step <= last->second) {
    if (m.token == 0) {
      return;  // its node has told of it otherwise meanwhile, when it arrived
    }
    return refuse(absl::StatusCode::kInvalidArgument,
                  absl::StrCat("the last step of this rank in attempt ", m.attempt, " was ",
                               last->second, "; steps must grow"));
  }
  if (const auto lost = RankLostFor({m.attempt, m.step}); info.decided && lost) {
    // It may live on there, and be heard again.
    const bool away = absent_.count(members_.Find(*lost)->process.node) > 0;
    return RefuseSave(
        m,
        Lost(v1::Failure::REASON_ABANDONED,
             absl::StrCat("save of step ", m.step, " by rank ", m.rank, ": ", HowGone(*lost),
                          " without it, so attempt ", m.attempt,
                          away ? " commits nothing unless that node comes back; wait for it, or "
                                 "start all ranks again"
                               : " commits nothing any more; start all ranks again")),
        t);
  }
  // What this rank skipped it can never seal: those steps are over for all.
  AbandonWithout(m.rank, m.step,
                 absl::StrCat("rank ", m.rank, " went on to step ", m.step, " without it"), t);
  last_begun_[m.rank] = m.step;
  any_save_ = true;
  if (const auto fate = fates_.find(m.step); fate != fates_.end()) {
    return RefuseSave(m, fate->second.failure, t);
  }
  const CheckpointId id{m.attempt, m.step};
  auto found = checkpoints_.find(id);
  if (found == checkpoints_.end()) {
    const auto ahead = std::find_if(last_begun_.begin(), last_begun_.end(),
                                    [&](const auto& begun) { return begun.second > m.step; });
    if (ahead != last_begun_.end()) {
      return RefuseSave(
          m,
          Lost(v1::Failure::REASON_ABANDONED,
               absl::StrCat("save of step ", m.step, " by rank ", m.rank, ": rank ", ahead->first,
                            " went on to step ", ahead->second,
                            " without it, so it can never be committed; all ranks have to save "
                            "the same steps")),
          t);
    }
    const auto open = std::count_if(checkpoints_.begin(), checkpoints_.end(),
                                    [](const auto& c) { return c.second.Open(); });
    if (static_cast<size_t>(open) >= kOpenStepsMax) {
      return refuse(absl::StatusCode::kResourceExhausted,
                    absl::StrCat(open, " steps are begun and not committed"));
    }
    Checkpoint fresh;
    fresh.world_size = info.world_size;
    fresh.begun = t.time.now;
    fresh.begun_unix_ms = t.time.unix_ms;
    found = checkpoints_.emplace(id, fresh).first;
  }
  found->second.writing.insert(m.rank);
  if (!info.decided) {
    Decide({}, restore_point_changes_, t);
  }
  if (m.token == 0) {
    return;
  }
  // Whatever else is being written, a save waits for the attempt's decision alone.
  AnswerWhenDurable(m.token, SavePermitted{m.token, line_}, t, decision_version_);
}

void Coordinator::RefuseSave(const SaveAsked& m, Failure failure, Turn& t) {
  if (m.token != 0) {
    return Refuse(m.token, std::move(failure), t);
  }
  // The node, which let the rank begin, gives up all that it has of the step, also what it has not
  // told of yet: so it is over for all.
  const CheckpointId id{m.attempt, m.step};
  if (m.attempt == attempt() && !SeatedElsewhere(m.rank, t.from) && fates_.count(m.step) == 0) {
    const auto [known, fresh] = checkpoints_.try_emplace(id);
    if (fresh) {
      known->second.world_size = world_size();
      known->second.begun = t.time.now;
      known->second.begun_unix_ms = t.time.unix_ms;
    }
    if (!known->second.committed) {
      return Abandon(id, failure.message, t);
    }
  }
  t.Say(GiveUp{id, std::move(failure)}, t.from);
}

void Coordinator::On(const SaveLost& m, Turn& t) {
  if (m.attempt == attempt() && !SeatedElsewhere(m.rank, t.from)) {
    Abandon({m.attempt, m.step}, m.why, t);
  }
}

void Coordinator::On(const ShardSealed& m, Turn& t) {
  const CheckpointId id{m.attempt, m.step};
  if (m.attempt != attempt()) {
    t.Say(GiveUp{id, SupersededFailure(m.attempt)}, t.from);
    return;
  }
  if (const auto fate = fates_.find(m.step); fate != fates_.end() && checkpoints_.count(id) == 0) {
    t.Say(GiveUp{id, fate->second.failure}, t.from);
    return;
  }
  AddShard(m, TierKind::kMemory, {}, t);
}

// A copy of the shard is in that tier: sealed just now, found there, or copied there.
void Coordinator::AddShard(const ShardSealed& m, TierKind tier, CopyDetail detail, Turn& t) {
  AddCopy(m, tier, {CopyState::Kind::kGood, std::move(detail), ""}, t);
}

// The same, good or bad.
void Coordinator::AddCopy(const ShardSealed& m, TierKind tier, CopyState copy, Turn& t) {
  const CheckpointId id{m.attempt, m.step};
  auto [it, fresh] = checkpoints_.try_emplace(id);
  Checkpoint& checkpoint = it->second;
  // How far it is, as far as that concerns more than the rank whose copy this is.
  const auto stage = [&] {
    const auto now = checkpoints_.find(id);
    return now == checkpoints_.end()
               ? std::array<bool, 3>{}
               : std::array{now->second.committed, now->second.dead, now->second.CommittedAt(tier)};
  };
  const std::array<bool, 3> before = stage();
  if (fresh) {
    checkpoint.world_size = m.world_size;
    checkpoint.begun = t.time.now;
    checkpoint.begun_unix_ms = m.unix_ms;
    if (id.attempt == attempt()) {
      fates_.erase(id.step);  // given up in memory before a durable tier was known to have it
    }
  }
  if (m.world_size != checkpoint.world_size || m.rank >= checkpoint.world_size) {
    checkpoint.dead = checkpoint.contradictory = true;  // fail closed
  }
  checkpoint.writing.erase(m.rank);
  checkpoint.AddShard(m.rank, m.bytes, m.unix_ms, m.time_sure, m.likeness);
  const CopyPlace place = PlaceOf(tier, t.from);
  if (copy.kind == CopyState::Kind::kGood) {
    checkpoint.SetGood(m.rank, place, std::move(copy.detail));
  } else {
    checkpoint.SetFoundBad(m.rank, place, std::move(copy.detail), std::move(copy.why));
  }
  Recheck(id, t);
  if (!named_bad_.empty()) {
    TakeNamedBad(id, m.rank, t);
  }
  if (before == stage()) {
    AnswerAwaitsOf(m.rank, id.step, t);
  } else {
    AnswerAwaits(id.step, t);
  }
}

// After any change of its copies: whether every rank has one now.
void Coordinator::Recheck(CheckpointId id, Turn& t) {
  Checkpoint& checkpoint = checkpoints_.at(id);
  const bool whole = checkpoint.Whole();
  for (Removals& removals : removals_) {
    removals.collect = true;
  }
  checkpoint.dead = checkpoint.dead || checkpoint.contradictory;
  if ((checkpoint.committed || checkpoint.cut_off) && !whole) {
    // Of what all ranks have not been seen to seal, the rest may still come, or it is pruned.
    const bool once = checkpoint.committed || checkpoint.dead || checkpoint.Complete();
    checkpoint.cut_off = CutOff(id, checkpoint);
    checkpoint.committed = false;
    checkpoint.dead = !checkpoint.cut_off && once;
  } else if (!checkpoint.committed && whole) {
    checkpoint.dead = checkpoint.cut_off = false;
    Commit(id, checkpoint, t);  // it may be retired at once: nothing of it is touched after that
  } else if (checkpoint.Open() && CutOff(id, checkpoint)) {
    checkpoint.cut_off = true;
    checkpoint.is_protected = false;  // the next one is, if there is need; it may be open again
  }
}

void Coordinator::Commit(CheckpointId id, Checkpoint& checkpoint, Turn& t) {
  checkpoint.committed = true;
  checkpoint.is_protected = false;
  const auto info = attempts_.find(id.attempt);
  if (info != attempts_.end() &&
      (!info->second.any_committed || info->second.last_committed_step < id.step)) {
    const bool first = !info->second.any_committed;
    info->second.any_committed = true;
    info->second.last_committed_step = id.step;
    if (first) {
      Persist(t);  // that there is something must be known even when memory is gone
    } else {
      PersistLazily(t);
    }
  }
  Tell(Report::Kind::kStepCommitted,
       absl::StrCat("step ", id.step, " of attempt ", id.attempt, " committed by ",
                    checkpoint.world_size, checkpoint.world_size == 1 ? " rank" : " ranks"),
       checkpoint.bytes, t);
  NoteStage(id, "write", checkpoint.begun_unix_ms, checkpoint.unix_ms, "done", checkpoint.bytes);
  NoteStage(id, "commit", t.time.unix_ms, t.time.unix_ms, "done", 0);
  ForgetAwayBelow(id, t);
  if (!settings_.nvme && !settings_.remote) {
    ForgetGone(id, t);  // else when a durable tier has it
  }
  ChooseTiers(id, t);
  Retain(t);
}

void Coordinator::Retain(Turn& t) {
  std::vector<ShedChoice> choices = Choices(nullptr);
  for (ShedChoice& choice : choices) {
    // (Nor what is to be restored next, if it was brought here for that.)
    choice.held = choice.held || choice.drain != ShedChoice::Drain::kNone ||
                  (prefetch_ && prefetch_->checkpoint == choice.id);
  }
  for (const CheckpointId& id : Surplus(choices, settings_.keep_committed)) {
    Retire(id,
           Lost(v1::Failure::REASON_SHED,
                absl::StrCat("step ", id.step, " of attempt ", id.attempt,
                             " retired: memory.keep_committed is ", settings_.keep_committed)),
           t);
  }
}

// ": 7 of 8 ranks have sealed it, rank 3 has not; nvme: no space left"
std::string Coordinator::HowFar(const Checkpoint& checkpoint, v1::AwaitSave::Stage stage) const {
  const size_t sealed = checkpoint.shards.size();
  const std::string away = NamesOf(missing_);
  std::string text =
      absl::StrCat(": ", sealed, " of ", checkpoint.world_size, " ranks have sealed it");
  std::vector<Rank> missing;
  for (Rank rank = 0; rank < checkpoint.world_size; ++rank) {
    if (checkpoint.shards.count(rank) == 0) {
      missing.push_back(rank);
    }
  }
  if (!missing.empty()) {
    absl::StrAppend(&text, ", ", RanksText(missing),
                    missing.size() == 1 ? " has not" : " have not");
  }
  if (checkpoint.AnyAway() && sealed > checkpoint.good) {
    absl::StrAppend(&text, ", and ", sealed - checkpoint.good, " of these ",
                    sealed - checkpoint.good == 1 ? "is" : "are", " out of reach",
                    away.empty() ? "" : " with ", away);
  }
  if (OfTier(stage)) {
    const Drain& drain = checkpoint.drain(TierOf(stage));
    const std::string& problem = drain.stalled.empty() ? drain.problem : drain.stalled;
    if (!problem.empty()) {
      absl::StrAppend(&text, "; ", ToAbsl(TierName(TierOf(stage))), ": ", problem);
    }
  }
  return text;
}

void Coordinator::On(const ShardBad& m, Turn& t) {
  const auto it = checkpoints_.find(m.checkpoint);
  // Whoever read it from another node does not know what that keeps it for.
  const std::optional<NodeId> other = settings_.nodes->Find(m.node);
  if (!other && !m.node.empty()) {
    return;  // a node that is none of ours
  }
  const NodeId node = other.value_or(t.from);
  const bool bad =
      it != checkpoints_.end() &&
      (it->second.SetBad(m.rank, PlaceOf(m.tier, node), m.what) ||
       (m.tier == TierKind::kPeer && it->second.SetBad(m.rank, {TierKind::kMemory, node}, m.what)));
  const CopyPlace place = PlaceOf(m.tier, node);
  const bool mends = m.tier == TierKind::kNvme || m.tier == TierKind::kRemote;
  if (!bad) {
    // What was left as it is, and is found again, is mended unless that is not wanted either.
    const bool was = it != checkpoints_.end() && it->second.shards.count(m.rank) > 0 &&
                     it->second.shards.at(m.rank).at(place).kind == CopyState::Kind::kBad;
    return was && mends && !m.leave ? WantRepair({m.checkpoint, m.rank, place}, false) : void();
  }
  if (other) {
    t.Say(CopyDoubted{m.checkpoint, m.rank}, node);
  }
  Checkpoint& checkpoint = it->second;
  TellBad(m.checkpoint, m.rank, place, m.what, t);
  if (checkpoint.Open()) {
    return Abandon(m.checkpoint, absl::StrCat("the copy of rank ", m.rank, " is bad: ", m.what), t);
  }
  if (mends) {
    WantRepair({m.checkpoint, m.rank, place}, m.leave);
  }
  Recheck(m.checkpoint, t);
  ReplicateAgain(t);
}

void Coordinator::TellBad(CheckpointId id, Rank rank, CopyPlace place, const std::string& what,
                          Turn& t) {
  Tell(Report::Kind::kCopyBad,
       absl::StrCat("step ", id.step, " of attempt ", id.attempt, " rank ", rank, ": its ",
                    ToAbsl(TierName(place.tier)), " copy",
                    settings_.nodes->Several() && place.tier != TierKind::kRemote
                        ? absl::StrCat(" on ", settings_.nodes->Name(place.node))
                        : "",
                    ": ", what),
       checkpoints_.at(id).shards.at(rank).bytes, t);
}

void Coordinator::On(const ShardGood& m, Turn& t) {
  const auto it = checkpoints_.find(m.checkpoint);
  if (it == checkpoints_.end()) {
    return;
  }
  Checkpoint& checkpoint = it->second;
  const auto shard = checkpoint.shards.find(m.rank);
  const CopyPlace place = PlaceOf(m.tier, t.from);
  if (shard == checkpoint.shards.end()) {
    return;
  }
  if (m.tier == TierKind::kRemote) {
    shard->second.scrub_read_unix_ms = t.time.unix_ms;
  }
  if (shard->second.at(place).kind != CopyState::Kind::kBad) {
    return;
  }
  checkpoint.SetGood(m.rank, place, shard->second.at(place).detail);
  const bool was = checkpoint.committed;
  const uint64_t bytes = shard->second.bytes;
  Recheck(m.checkpoint, t);
  Tell(Report::Kind::kCopyGood,
       absl::StrCat("step ", m.checkpoint.step, " of attempt ", m.checkpoint.attempt, " rank ",
                    m.rank, ": every digest of its ", ToAbsl(TierName(m.tier)), " copy is right",
                    IsCommitted(m.checkpoint) && !was ? "; the step can be restored again" : ""),
       bytes, t);
}

// The step will never become whole: all its shards go.
void Coordinator::Abandon(CheckpointId id, const std::string& why, Turn& t) {
  const auto it = checkpoints_.find(id);
  if (it == checkpoints_.end() || it->second.committed) {
    return;
  }
  const Failure failure =
      Lost(v1::Failure::REASON_ABANDONED,
           absl::StrCat("step ", id.step, " of attempt ", id.attempt, " abandoned: ", why));
  Tell(Report::Kind::kStepAbandoned, failure.message, it->second.bytes, t);
  LetGo(id, failure, t);
}

// The rank will never begin the open steps (below `below`, if given) that it has not begun. Those
// that it has begun end by its seal, or by what its agent says of them. One that is cut off, and
// may have been committed for all that is known of other nodes, was not if it lacks this rank.
void Coordinator::AbandonWithout(Rank rank, std::optional<Step> below, const std::string& why,
                                 Turn& t) {
  const bool known = AllOfItIsKnown(rank);
  std::vector<CheckpointId> without;
  for (auto it = checkpoints_.lower_bound({attempt(), 0});
       it != checkpoints_.end() && (!below || it->first.step < *below); ++it) {
    const auto& [id, checkpoint] = *it;
    const bool never_whole = checkpoint.cut_off && known && !CommittedOnce(id);
    if ((checkpoint.Open() || never_whole) && checkpoint.shards.count(rank) == 0 &&
        checkpoint.writing.count(rank) == 0) {
      without.push_back(id);
    }
  }
  for (const CheckpointId& id : without) {
    Abandon(id, why, t);
  }
}

// What ranks that were heard have begun, and neither have nor write: it was lost while nobody heard
// of it, or given up by the host before this one, which some node has not heard.
void Coordinator::AbandonLost(NodeId node, Turn& t) {
  for (const Rank rank : std::set<Rank>(members_.OnNode(node))) {
    if (const auto last = last_begun_.find(rank);
        last != last_begun_.end() && AllOfItIsKnown(rank)) {
      AbandonWithout(rank, last->second + 1, absl::StrCat("rank ", rank, " has lost it"), t);
    }
  }
}

// Whether nothing that the rank has sealed in this attempt can turn up any more. It saved, so no
// other process had its place in the attempt before, and all that it sealed was in the memory of
// this one's node; from there it went to that node's drives or to the remote tier, if anywhere.
bool Coordinator::AllOfItIsKnown(Rank rank) const {
  const Member* member = members_.Find(rank);
  if (member == nullptr || last_begun_.count(rank) == 0) {
    return false;
  }
  const NodeId node = member->process.node;
  return unheard_.count(node) == 0 && missing_.count(node) == 0 &&
         (!Configured(TierKind::kNvme) || nvme_on_.Knows(node)) &&
         (!Configured(TierKind::kRemote) ||
          Inventory(TierKind::kRemote).kind == InventoryState::Kind::kKnown);
}

// Before its time: somebody may ask where it went.
void Coordinator::LetGo(CheckpointId id, Failure failure, Turn& t) {
  if (checkpoints_.count(id) > 0) {
    losses_.push_front({id, failure.message, t.time.unix_ms});
    if (losses_.size() > kLossesMax) {
      losses_.pop_back();
    }
  }
  Retire(id, std::move(failure), t);
}

// All its shards in memory go. What lies in durable tiers, or is on its way there from there,
// stays.
void Coordinator::Retire(CheckpointId id, Failure failure, Turn& t) {
  const auto it = checkpoints_.find(id);
  if (it == checkpoints_.end()) {
    return;
  }
  Checkpoint& checkpoint = it->second;
  t.Say(GiveUp{id, failure}, kEveryNode);
  NoteReleased(id);
  if (!checkpoint.AnythingDurable()) {
    return Erase(id, std::move(failure), t);
  }
  const bool open = checkpoint.Open();
  // Nobody writes it any more. It is whole again if a durable tier turns out to have the rest.
  checkpoint.dead = checkpoint.dead || (open && AllInventoriesKnown());
  checkpoint.writing.clear();
  checkpoint.is_protected = false;
  checkpoint.Clear(TierKind::kMemory);
  const bool nvme_moves = NvmeMoves();
  for (const TierKind tier : kAllTiers) {
    const auto lost = [&](const auto& shard) {
      return shard.second.at(tier).kind != CopyState::Kind::kGood &&
             !FlushSource(checkpoint, shard.first, tier, nvme_moves);
    };
    if (checkpoint.drain(tier).phase == Drain::Phase::kWanted &&
        std::any_of(checkpoint.shards.begin(), checkpoint.shards.end(), lost)) {
      Unwant(id, tier, "its memory was needed for newer steps", t);
    }
  }
  Recheck(id, t);
  if (id.attempt == attempt()) {
    AnswerAwaits(id.step, t);
  }
}

void Coordinator::Erase(CheckpointId id, Failure failure, Turn& t) {
  const auto it = checkpoints_.find(id);
  if (const auto times = times_.find(id); times != times_.end()) {
    times->second.fate = failure.message;
  }
  for (const TierKind tier : kAllTiers) {
    Unwant(id, tier, failure.message, t);
  }
  if (id.attempt == attempt()) {
    fates_[id.step] = {it->second.committed || it->second.Complete(), it->second.unix_ms,
                       std::move(failure), ++last_fate_};
    if (fates_.size() > kFatesMax) {
      fates_.erase(std::min_element(fates_.begin(), fates_.end(), [](const auto& a, const auto& b) {
        return a.second.order < b.second.order;
      }));
    }
  }
  checkpoints_.erase(it);
  if (id.attempt == attempt()) {
    AnswerAwaits(id.step, t);
  }
}

// When the last copy of it is gone, wherever it lay.
void Coordinator::EraseIfGone(CheckpointId id, const Failure& failure, Turn& t) {
  const auto it = checkpoints_.find(id);
  if (it == checkpoints_.end() || it->second.AnythingDurable() ||
      it->second.AnyAt(TierKind::kMemory) || it->second.AnyAway() || !it->second.writing.empty()) {
    return;
  }
  Erase(id, failure, t);
}

void Coordinator::On(const AwaitAsked& m, Turn& t) {
  if (!IsCurrent(m.attempt, m.token, t)) {
    return;
  }
  const auto refuse = [&](absl::StatusCode code, std::string why) {
    Refuse(m.token, {code, v1::Failure::REASON_UNSPECIFIED, std::move(why)}, t);
  };
  const bool durable = OfTier(m.stage);
  if (durable && !Configured(TierOf(m.stage))) {
    return refuse(
        absl::StatusCode::kFailedPrecondition,
        absl::StrCat("step ", m.step, " cannot reach the ", ToAbsl(TierName(TierOf(m.stage))),
                     " tier: this daemon has none configured"));
  }
  if (!durable && m.stage != v1::AwaitSave::STAGE_SEALED &&
      m.stage != v1::AwaitSave::STAGE_COMMITTED) {
    return refuse(absl::StatusCode::kInvalidArgument,
                  absl::StrCat("stage ", static_cast<int>(m.stage), " is unknown"));
  }
  const AwaitWaiter waiter{m.rank, m.step, m.stage};
  if (AnswerAwait(m.token, waiter, t)) {
    return;
  }
  const auto found = checkpoints_.find({m.attempt, m.step});
  if (found == checkpoints_.end() ||
      (found->second.writing.count(m.rank) == 0 && found->second.shards.count(m.rank) == 0)) {
    const auto last = last_begun_.find(m.rank);
    if (last == last_begun_.end() || m.step > last->second) {
      return refuse(absl::StatusCode::kInvalidArgument,
                    absl::StrCat("rank ", m.rank, " has not begun step ", m.step));
    }
    return Refuse(m.token,
                  Lost(v1::Failure::REASON_ABANDONED,
                       absl::StrCat("step ", m.step, " of attempt ", m.attempt,
                                    " is not known any more: it was lost long ago, or while it was "
                                    "being written the daemon was restarted")),
                  t);
  }
  ForgetAwait(m.token);  // who says a token twice is answered for the last one
  awaits_[m.token] = waiter;
  awaits_of_.insert({m.step, m.rank, m.token});
}

bool Coordinator::AnswerAwait(RequestToken token, const AwaitWaiter& waiter, Turn& t) {
  const auto found = checkpoints_.find({attempt(), waiter.step});
  if (found != checkpoints_.end()) {
    const Checkpoint& checkpoint = found->second;
    const auto shard = checkpoint.shards.find(waiter.rank);
    const bool durable = OfTier(waiter.stage);
    if (durable && AnswerDurableAwait(token, waiter, checkpoint, t)) {
      return true;
    }
    if (checkpoint.committed && !durable) {
      t.Say(StageReached{token, v1::AwaitSave::STAGE_COMMITTED, checkpoint.unix_ms});
      return true;
    }
    if (checkpoint.dead) {
      Refuse(token,
             {absl::StatusCode::kDataLoss, v1::Failure::REASON_ABANDONED,
              checkpoint.contradictory
                  ? absl::StrCat("step ", waiter.step, ": its shards contradict each other")
                  : WhyNotWhole(found->first, checkpoint)},
             t);
      return true;
    }
    if (waiter.stage == v1::AwaitSave::STAGE_SEALED && shard != checkpoint.shards.end()) {
      t.Say(StageReached{token, v1::AwaitSave::STAGE_SEALED, shard->second.unix_ms});
      return true;
    }
    return false;
  }
  const auto fate = fates_.find(waiter.step);
  if (fate == fates_.end()) {
    return false;
  }
  if (fate->second.committed && (waiter.stage == v1::AwaitSave::STAGE_SEALED ||
                                 waiter.stage == v1::AwaitSave::STAGE_COMMITTED)) {
    t.Say(StageReached{token, v1::AwaitSave::STAGE_COMMITTED, fate->second.unix_ms});
  } else {
    Refuse(token, fate->second.failure, t);
  }
  return true;
}

// Of a step whose way into the tier is decided.
bool Coordinator::AnswerDurableAwait(RequestToken token, const AwaitWaiter& waiter,
                                     const Checkpoint& checkpoint, Turn& t) {
  const TierKind tier = TierOf(waiter.stage);
  if (checkpoint.CommittedAt(tier)) {
    // Whoever asks late hears when it was; what was found there by a scan, nobody knows of.
    const StageReached reached{token, waiter.stage, checkpoint.drain(tier).whole_unix_ms};
    if (tier == TierKind::kPeer) {
      t.Say(reached);
    } else {  // a restore that cannot read the tier must know that the step lies there
      AnswerWhenDurable(token, reached, t);
    }
    return true;
  }
  const Drain& drain = checkpoint.drain(tier);
  if (checkpoint.committed && tier == TierKind::kPeer && ReplicasWanted() == 0) {
    Refuse(token,
           {absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_UNSPECIFIED,
            absl::StrCat("step ", waiter.step, " is kept by no other node: the job's policy has ",
                         "no replicas; ckptctl set ", name_, " replicas=1 changes that")},
           t);
    return true;
  }
  if (!checkpoint.committed || !drain.decided || drain.phase != Drain::Phase::kNone) {
    return false;
  }
  if (!drain.shed.empty()) {
    Refuse(token,
           Lost(v1::Failure::REASON_SHED, absl::StrCat("step ", waiter.step, " does not go to ",
                                                       ToAbsl(TierName(tier)), ": ", drain.shed)),
           t);
  } else {
    Refuse(token,
           {absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_UNSPECIFIED,
            absl::StrCat("step ", waiter.step, " does not go to ", ToAbsl(TierName(tier)),
                         ": the job's policy sends ", PolicyText(tier), "; ckptctl set ", name_,
                         " changes that")},
           t);
  }
  return true;
}

void Coordinator::AnswerAwaits(Step step, Turn& t) {
  AnswerAwaitsOf(std::nullopt, step, t);
}

// Those of one rank: what it did itself concerns no other.
void Coordinator::AnswerAwaitsOf(std::optional<Rank> rank, Step step, Turn& t) {
  auto it = awaits_of_.lower_bound({step, rank.value_or(0), 0});
  while (it != awaits_of_.end() && it->step == step && (!rank || it->rank == *rank)) {
    const auto waiter = awaits_.find(it->token);
    if (AnswerAwait(waiter->first, waiter->second, t)) {
      awaits_.erase(waiter);
      it = awaits_of_.erase(it);
    } else {
      ++it;
    }
  }
}

void Coordinator::ForgetAwait(RequestToken token) {
  const auto it = awaits_.find(token);
  if (it == awaits_.end()) {
    return;
  }
  awaits_of_.erase({it->second.step, it->second.rank, token});
  awaits_.erase(it);
}

}  // namespace holdfast
