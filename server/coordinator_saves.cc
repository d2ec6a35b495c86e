// Saves: which steps are open, sealed, committed, lost; and what is given up for room
// (docs/protocol.md §4, §5).
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "recovery/retention.h"
#include "server/coordinator.h"

namespace holdfast {
namespace {

Failure Lost(v1::Failure::Reason reason, std::string message) {
  return {absl::StatusCode::kAborted, reason, std::move(message)};
}

}  // namespace

void Coordinator::On(const SaveAsked& m, Turn& t) {
  if (!IsCurrent(m.attempt, m.token, t)) {
    return;
  }
  const AttemptInfo& info = attempts_.rbegin()->second;
  const auto refuse = [&](absl::StatusCode code, std::string why) {
    Refuse(m.token,
           {code, v1::Failure::REASON_UNSPECIFIED,
            absl::StrCat("save of step ", m.step, " by rank ", m.rank, ": ", why)},
           t);
  };
  if (SessionOpen()) {
    return refuse(absl::StatusCode::kFailedPrecondition,
                  "a restore of this attempt is under way; wait for its outcome first");
  }
  const bool from_scratch = restore_point_.set() && restore_point_.from_scratch();
  if (!info.decided && (EverCommitted() || restore_point_.set()) && !from_scratch) {
    // It would start a line of descent from nothing, and discard for good what is there.
    return refuse(
        absl::StatusCode::kFailedPrecondition,
        absl::StrCat("attempt ", m.attempt, " has not restored anything, and job '", name_, "' ",
                     restore_point_.set() ? "has a restore point" : "has committed steps",
                     last_failure_
                         ? absl::StrCat(" (its restore failed: ", last_failure_->message, ")")
                         : "",
                     "; restore first, or decide to begin anew: ckptctl restore ", name_,
                     " --from-scratch"));
  }
  const auto last = last_begun_.find(m.rank);
  if (last != last_begun_.end() && m.step <= last->second) {
    return refuse(absl::StatusCode::kInvalidArgument,
                  absl::StrCat("the last step of this rank in attempt ", m.attempt, " was ",
                               last->second, "; steps must grow"));
  }
  if (const auto lost = RankLostFor({m.attempt, m.step}); info.decided && lost) {
    return Refuse(m.token,
                  Lost(v1::Failure::REASON_ABANDONED,
                       absl::StrCat("save of step ", m.step, " by rank ", m.rank, ": rank ", *lost,
                                    " (", members_.at(*lost).process.ToString(),
                                    ") ended or left without it, so attempt ", m.attempt,
                                    " commits nothing any more; start all ranks again")),
                  t);
  }
  last_begun_[m.rank] = m.step;
  any_save_ = true;
  // What this rank skipped it can never seal: those steps are over for all.
  AbandonWithout(m.rank, m.step,
                 absl::StrCat("rank ", m.rank, " went on to step ", m.step, " without it"), t);
  if (const auto fate = fates_.find(m.step); fate != fates_.end()) {
    return Refuse(m.token, fate->second.failure, t);
  }
  const CheckpointId id{m.attempt, m.step};
  auto found = checkpoints_.find(id);
  if (found == checkpoints_.end()) {
    const auto open = std::count_if(checkpoints_.begin(), checkpoints_.end(), [](const auto& c) {
      return !c.second.committed && !c.second.dead;
    });
    if (static_cast<size_t>(open) >= kOpenStepsMax) {
      return refuse(absl::StatusCode::kResourceExhausted,
                    absl::StrCat(open, " steps are begun and not committed"));
    }
    Checkpoint fresh;
    fresh.world_size = info.world_size;
    fresh.begun = t.time.now;
    found = checkpoints_.emplace(id, fresh).first;
  }
  found->second.writing.insert(m.rank);
  if (!info.decided) {
    Decide({}, restore_point_changes_, t);
  }
  // Whatever else is being written, a save waits for the attempt's decision alone.
  AnswerWhenDurable(m.token, SavePermitted{m.token, line_}, t, decision_version_);
}

void Coordinator::On(const SaveLost& m, Turn& t) {
  if (m.attempt == attempt()) {
    Abandon({m.attempt, m.step}, m.why, t);
  }
}

void Coordinator::On(const ShardSealed& m, Turn& t) {
  const CheckpointId id{m.attempt, m.step};
  if (m.attempt != attempt()) {
    t.out.push_back(GiveUp{id, SupersededFailure(m.attempt)});
    return;
  }
  if (const auto fate = fates_.find(m.step); fate != fates_.end() && checkpoints_.count(id) == 0) {
    t.out.push_back(GiveUp{id, fate->second.failure});
    return;
  }
  t.out.push_back(Reported{
      {Report::Kind::kShardSealed, name_,
       absl::StrCat("step ", m.step, " of attempt ", m.attempt, " sealed by rank ", m.rank),
       m.bytes}});
  AddShard(id, m, t);
}

void Coordinator::AddShard(CheckpointId id, const ShardSealed& m, Turn& t) {
  auto [it, fresh] = checkpoints_.try_emplace(id);
  Checkpoint& checkpoint = it->second;
  if (fresh) {
    checkpoint.world_size = m.world_size;
    checkpoint.begun = t.time.now;
  }
  if (m.world_size != checkpoint.world_size || m.rank >= checkpoint.world_size) {
    checkpoint.dead = checkpoint.contradictory = true;  // fail closed
  }
  checkpoint.writing.erase(m.rank);
  if (checkpoint.shards.try_emplace(m.rank, ShardState{m.bytes, m.unix_ms, false}).second) {
    ++checkpoint.good;
    checkpoint.bytes += m.bytes;
  }
  checkpoint.unix_ms = std::max(checkpoint.unix_ms, m.unix_ms);
  if (!checkpoint.committed && !checkpoint.dead && checkpoint.good == checkpoint.world_size) {
    Commit(id, checkpoint, t);
  }
  AnswerAwaits(id.step, t);
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
  Retain(t);
}

void Coordinator::Retain(Turn& t) {
  for (const CheckpointId& id : Surplus(Choices(nullptr), settings_.keep_committed)) {
    Retire(id,
           Lost(v1::Failure::REASON_SHED,
                absl::StrCat("step ", id.step, " of attempt ", id.attempt,
                             " retired: memory.keep_committed is ", settings_.keep_committed)),
           t);
  }
}

void Coordinator::On(const ShardBad& m, Turn& t) {
  const auto it = checkpoints_.find(m.checkpoint);
  if (it == checkpoints_.end()) {
    return;
  }
  Checkpoint& checkpoint = it->second;
  const auto shard = checkpoint.shards.find(m.rank);
  if (shard == checkpoint.shards.end() || shard->second.bad) {
    return;
  }
  shard->second.bad = true;
  --checkpoint.good;
  Tell(Report::Kind::kCopyBad,
       absl::StrCat("step ", m.checkpoint.step, " of attempt ", m.checkpoint.attempt, " rank ",
                    m.rank, ": ", m.what),
       shard->second.bytes, t);
  if (!checkpoint.committed) {
    return Abandon(m.checkpoint, absl::StrCat("the copy of rank ", m.rank, " is bad: ", m.what), t);
  }
  checkpoint.committed = false;
  checkpoint.dead = true;
}

void Coordinator::On(const ShardGood& m, Turn& t) {
  const auto it = checkpoints_.find(m.checkpoint);
  if (it == checkpoints_.end()) {
    return;
  }
  Checkpoint& checkpoint = it->second;
  const auto shard = checkpoint.shards.find(m.rank);
  if (shard == checkpoint.shards.end() || !shard->second.bad) {
    return;
  }
  shard->second.bad = false;
  ++checkpoint.good;
  const bool whole = !checkpoint.contradictory && checkpoint.good == checkpoint.world_size;
  if (whole) {
    checkpoint.dead = false;
    checkpoint.committed = true;
  }
  Tell(Report::Kind::kCopyGood,
       absl::StrCat("step ", m.checkpoint.step, " of attempt ", m.checkpoint.attempt, " rank ",
                    m.rank, ": every digest of its copy is right",
                    whole ? "; the step can be restored again" : ""),
       shard->second.bytes, t);
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
// that it has begun end by its seal, or by what its agent says of them.
void Coordinator::AbandonWithout(Rank rank, std::optional<Step> below, const std::string& why,
                                 Turn& t) {
  std::vector<CheckpointId> without;
  for (auto it = checkpoints_.lower_bound({attempt(), 0});
       it != checkpoints_.end() && (!below || it->first.step < *below); ++it) {
    const Checkpoint& checkpoint = it->second;
    if (!checkpoint.committed && !checkpoint.dead && checkpoint.shards.count(rank) == 0 &&
        checkpoint.writing.count(rank) == 0) {
      without.push_back(it->first);
    }
  }
  for (const CheckpointId& id : without) {
    Abandon(id, why, t);
  }
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

// All its shards go.
void Coordinator::Retire(CheckpointId id, Failure failure, Turn& t) {
  const auto it = checkpoints_.find(id);
  if (it == checkpoints_.end()) {
    return;
  }
  if (id.attempt == attempt()) {
    fates_[id.step] = {it->second.committed, it->second.unix_ms, failure};
    if (fates_.size() > kFatesMax) {
      fates_.erase(fates_.begin());
    }
  }
  checkpoints_.erase(it);
  t.out.push_back(GiveUp{id, std::move(failure)});
  if (id.attempt == attempt()) {
    AnswerAwaits(id.step, t);
  }
}

bool Coordinator::Held(CheckpointId id) const {
  return (session_ && session_->Holds(id)) ||
         std::find(held_until_durable_.begin(), held_until_durable_.end(), id) !=
             held_until_durable_.end();
}

std::vector<ShedChoice> Coordinator::Choices(const std::vector<CheckpointId>* useful) const {
  std::vector<ShedChoice> choices;
  choices.reserve(checkpoints_.size());
  for (const auto& [id, checkpoint] : checkpoints_) {
    ShedChoice choice;
    choice.id = id;
    choice.kind = checkpoint.dead         ? ShedChoice::Kind::kDead
                  : !checkpoint.committed ? ShedChoice::Kind::kUncommitted
                  : OnLine(line_, id)     ? ShedChoice::Kind::kOnLine
                                          : ShedChoice::Kind::kOffLine;
    choice.useful =
        useful != nullptr && std::find(useful->begin(), useful->end(), id) != useful->end();
    choice.held = Held(id);
    choice.pinned = restore_point_.set() && !restore_point_.from_scratch() &&
                    restore_point_.attempt() == id.attempt && restore_point_.step() == id.step;
    choice.is_protected = checkpoint.is_protected;
    choices.push_back(choice);
  }
  return choices;
}

std::string Coordinator::ShedReason(const Victim& victim, const RoomAsked& m) const {
  const std::string need = absl::StrCat("rank ", m.rank, " needed a slot for step ", m.step);
  switch (victim.rule) {
    case ShedRule::kDead:
      return absl::StrCat(need, ", and a copy of this one is bad");
    case ShedRule::kOffLine:
      return absl::StrCat(need, ", and this one is on a branch that was left");
    case ShedRule::kOlderCommitted:
      return absl::StrCat(need, ", and a newer step is committed");
    case ShedRule::kPinned:
      return absl::StrCat(need, ", and nothing but this restore point was left to give up");
    case ShedRule::kUncommitted:
      break;
  }
  return absl::StrCat(need, ", and this one was not committed yet");
}

void Coordinator::On(const RoomAsked& m, Turn& t) {
  const CheckpointId begun{m.attempt, m.step};
  std::optional<Victim> victim;
  if (m.attempt == attempt() && checkpoints_.count(begun) > 0) {
    victim = ChooseVictim(Choices(&m.useful), begun);
  }
  if (!victim) {
    t.out.push_back(RoomAnswered{m.token, false});
    return;
  }
  if (victim->protect) {
    checkpoints_.at(*victim->protect).is_protected = true;
  }
  const uint64_t bytes = checkpoints_.at(victim->id).bytes;
  const bool retired =
      victim->rule == ShedRule::kOffLine || victim->rule == ShedRule::kOlderCommitted;
  const Failure failure =
      Lost(v1::Failure::REASON_SHED,
           absl::StrCat("step ", victim->id.step, " of attempt ", victim->id.attempt,
                        retired ? " retired: " : " shed: ", ShedReason(*victim, m)));
  if (retired) {
    Tell(Report::Kind::kStepRetired, failure.message, bytes, t);
    Retire(victim->id, failure, t);
  } else {
    Tell(Report::Kind::kStepShed, failure.message, bytes, t);
    LetGo(victim->id, failure, t);
  }
  t.out.push_back(RoomAnswered{m.token, true});
}

void Coordinator::On(const SpareAsked& m, Turn& t) {
  const std::optional<Victim> victim = ChooseSpare(Choices(&m.useful));
  if (!victim) {
    t.out.push_back(RoomAnswered{m.token, false});
    return;
  }
  const Failure failure = Lost(
      v1::Failure::REASON_SHED,
      absl::StrCat("step ", victim->id.step, " of attempt ", victim->id.attempt, " shed: job '",
                   m.for_job,
                   "' needed the memory, and this was not the newest committed step of the job"));
  Tell(Report::Kind::kStepShed, failure.message, checkpoints_.at(victim->id).bytes, t);
  LetGo(victim->id, failure, t);
  t.out.push_back(RoomAnswered{m.token, true});
}

void Coordinator::On(const AwaitAsked& m, Turn& t) {
  if (!IsCurrent(m.attempt, m.token, t)) {
    return;
  }
  const auto refuse = [&](absl::StatusCode code, std::string why) {
    Refuse(m.token, {code, v1::Failure::REASON_UNSPECIFIED, std::move(why)}, t);
  };
  if (m.stage == v1::AwaitSave::STAGE_NVME || m.stage == v1::AwaitSave::STAGE_REMOTE) {
    return refuse(absl::StatusCode::kFailedPrecondition,
                  absl::StrCat("step ", m.step, " cannot reach the ",
                               m.stage == v1::AwaitSave::STAGE_NVME ? "nvme" : "remote",
                               " tier: this daemon has none configured"));
  }
  if (m.stage != v1::AwaitSave::STAGE_SEALED && m.stage != v1::AwaitSave::STAGE_COMMITTED) {
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
  awaits_[m.token] = waiter;
}

bool Coordinator::AnswerAwait(RequestToken token, const AwaitWaiter& waiter, Turn& t) {
  const auto found = checkpoints_.find({attempt(), waiter.step});
  if (found != checkpoints_.end()) {
    const Checkpoint& checkpoint = found->second;
    const auto shard = checkpoint.shards.find(waiter.rank);
    if (checkpoint.committed) {
      t.out.push_back(StageReached{token, v1::AwaitSave::STAGE_COMMITTED, checkpoint.unix_ms});
      return true;
    }
    if (checkpoint.dead) {
      Refuse(token,
             {absl::StatusCode::kDataLoss, v1::Failure::REASON_ABANDONED,
              absl::StrCat("a copy of step ", waiter.step, " is bad")},
             t);
      return true;
    }
    if (waiter.stage == v1::AwaitSave::STAGE_SEALED && shard != checkpoint.shards.end()) {
      t.out.push_back(StageReached{token, v1::AwaitSave::STAGE_SEALED, shard->second.unix_ms});
      return true;
    }
    return false;
  }
  const auto fate = fates_.find(waiter.step);
  if (fate == fates_.end()) {
    return false;
  }
  if (fate->second.committed) {
    t.out.push_back(StageReached{token, v1::AwaitSave::STAGE_COMMITTED, fate->second.unix_ms});
  } else {
    Refuse(token, fate->second.failure, t);
  }
  return true;
}

void Coordinator::AnswerAwaits(Step step, Turn& t) {
  for (auto it = awaits_.begin(); it != awaits_.end();) {
    it = it->second.step == step && AnswerAwait(it->first, it->second, t) ? awaits_.erase(it)
                                                                          : std::next(it);
  }
}

}  // namespace holdfast
