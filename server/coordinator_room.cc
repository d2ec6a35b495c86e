// What is given up for room in memory (docs/protocol.md §5).
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "recovery/eviction.h"
#include "recovery/shedding.h"
#include "server/coordinator.h"

namespace holdfast {
namespace {

Failure Shed(std::string message) {
  return {absl::StatusCode::kAborted, v1::Failure::REASON_SHED, std::move(message)};
}

}  // namespace

bool Coordinator::Held(CheckpointId id) const {
  return (session_ && session_->Holds(id)) || HeldUntilDurable(id);
}

bool Coordinator::HeldUntilDurable(CheckpointId id) const {
  if (held_until_durable_.empty()) {
    return false;
  }
  // Until then another host may decide otherwise: that goes also for what turns out only now to be
  // whole, since a node is back.
  const auto it = checkpoints_.find(id);
  return (it != checkpoints_.end() && it->second.committed && id.attempt < attempt()) ||
         std::find(held_until_durable_.begin(), held_until_durable_.end(), id) !=
             held_until_durable_.end();
}

std::vector<ShedChoice> Coordinator::Choices(const std::vector<CheckpointId>* useful) const {
  std::vector<ShedChoice> choices;
  choices.reserve(checkpoints_.size());
  std::optional<CheckpointId> first_drain;
  std::optional<CheckpointId> newest_on_line;  // committed
  std::optional<CheckpointId> newest_durable;  // likewise, and whole in a durable tier
  const auto durable = [](const Checkpoint& checkpoint) {
    return checkpoint.committed &&
           (checkpoint.CommittedAt(TierKind::kNvme) || checkpoint.CommittedAt(TierKind::kRemote));
  };
  for (const auto& [id, checkpoint] : checkpoints_) {
    if (!first_drain && DrainsFromMemory(checkpoint)) {
      first_drain = id;
    }
    if (checkpoint.committed && OnLine(line_, id)) {
      newest_on_line = id;
      newest_durable = durable(checkpoint) ? id : newest_durable;
    }
  }
  for (const auto& [id, checkpoint] : checkpoints_) {
    if (!checkpoint.AnyAt(TierKind::kMemory) && checkpoint.writing.empty()) {
      continue;  // it has nothing here to give
    }
    ShedChoice choice;
    choice.id = id;
    choice.kind = checkpoint.dead     ? ShedChoice::Kind::kDead
                  : checkpoint.Open() ? ShedChoice::Kind::kUncommitted
                  : OnLine(line_, id) ? ShedChoice::Kind::kOnLine
                                      : ShedChoice::Kind::kOffLine;
    choice.useful =
        useful != nullptr && std::find(useful->begin(), useful->end(), id) != useful->end();
    choice.held = Held(id);
    if (checkpoint.cut_off && OnLine(line_, id) && !(newest_on_line > id)) {
      // The newest one, when its nodes are back: it stays, and nothing whole goes for its sake.
      choice.kind = ShedChoice::Kind::kDead;
      choice.held = true;
    } else if (checkpoint.cut_off && !OnLine(line_, id)) {
      choice.kind = ShedChoice::Kind::kDead;  // discarded for good, and not whole
    }
    // What a pin keeps is the step; its memory is free when it is whole without that.
    choice.pinned = Pinned(id) && !checkpoint.View(id).Without(TierKind::kMemory).Restorable();
    choice.durable = durable(checkpoint);
    choice.superseded = newest_durable > id;
    choice.is_protected = checkpoint.is_protected;
    if (DrainsFromMemory(checkpoint) || WaitsForMemory(checkpoint)) {
      // One step at a time is let finish on its way, where the ranks have a slot to spare for that.
      choice.drain = id == first_drain && settings_.slots_per_rank > 2 ? ShedChoice::Drain::kFirst
                                                                       : ShedChoice::Drain::kOther;
    }
    choices.push_back(choice);
  }
  return choices;
}

// Its copies in memory are being read for another tier.
bool Coordinator::DrainsFromMemory(const Checkpoint& checkpoint) {
  return std::any_of(checkpoint.drains.begin(), checkpoint.drains.end(),
                     [](const Drain& drain) { return drain.waiting.ReadFrom(TierKind::kMemory); });
}

// It is to go to a tier, and could not without them.
bool Coordinator::WaitsForMemory(const Checkpoint& checkpoint) {
  const Drain& to_peers = checkpoint.drain(TierKind::kPeer);
  return checkpoint.drain(TierKind::kNvme).phase == Drain::Phase::kWanted ||
         (to_peers.phase == Drain::Phase::kWanted && to_peers.problem.empty() &&
          !checkpoint.CommittedAt(TierKind::kPeer)) ||
         (checkpoint.drain(TierKind::kRemote).phase == Drain::Phase::kWanted &&
          !checkpoint.CommittedAt(TierKind::kNvme));
}

std::string Coordinator::ShedReason(const Victim& victim, const RoomAsked& m) const {
  const std::string need = absl::StrCat("rank ", m.rank, " needed a slot for step ", m.step);
  switch (victim.rule) {
    case ShedRule::kDead:
      return absl::StrCat(
          need, ", and a copy of this one is bad, or out of reach on a branch that ", "was left");
    case ShedRule::kOffLine:
      return absl::StrCat(need, ", and this one is on a branch that was left");
    case ShedRule::kOlderCommitted:
      return absl::StrCat(need, ", and a newer step is committed");
    case ShedRule::kDraining:
      return absl::StrCat(need,
                          ", and nothing but this one, which was on its way to another tier, ",
                          "was left to give up");
    case ShedRule::kPinned:
      return absl::StrCat(need, ", and nothing but this restore point was left to give up");
    case ShedRule::kUncommitted:
      break;
  }
  return absl::StrCat(need, ", and this one was not committed yet");
}

void Coordinator::On(const RoomAsked& m, Turn& t) {
  if (MakeRoom(m, t.from, t)) {
    t.Say(RoomAnswered{m.token, true});
  } else if (missing_.empty() && unheard_.empty()) {
    t.Say(RoomAnswered{m.token, false});
  } else {
    room_waits_.push_back({m, t.from, t.time.now + kRoomWait});
  }
}

// A copy of a rank that ran there before goes before any step does, if the rank has it in memory
// where it runs now: of the newest committed step nothing else could ever go.
bool Coordinator::LetGoOfLeft(const RoomAsked& m, NodeId node, Turn& t) {
  const CopyPlace there{TierKind::kMemory, node};
  for (const RoomAsked::Left& left : m.left) {
    const auto found = checkpoints_.find(left.checkpoint);
    const Member* member = members_.Find(left.rank);
    if (found == checkpoints_.end() || found->second.shards.count(left.rank) == 0 ||
        member == nullptr || member->process.node == node) {
      continue;
    }
    Checkpoint& checkpoint = found->second;
    const ShardState& shard = checkpoint.shards.at(left.rank);
    const CopyPlace where_it_runs{TierKind::kMemory, member->process.node};
    const bool read =
        std::any_of(checkpoint.drains.begin(), checkpoint.drains.end(), [&](const Drain& drain) {
          const CopyPlace* from = drain.waiting.Find(left.rank);
          return from != nullptr && *from == there;
        });
    if (read || shard.at(there).kind != CopyState::Kind::kGood ||
        shard.at(where_it_runs).kind != CopyState::Kind::kGood) {
      continue;
    }
    checkpoint.SetNone(left.rank, there);
    t.Say(CopyUnneeded{left.checkpoint, left.rank}, node);
    return true;
  }
  return false;
}

void Coordinator::NoteReleased(CheckpointId id) {
  std::erase_if(released_, [id](const Released& each) { return each.id == id; });
  Released& released = released_.emplace_back(Released{id});
  for (const auto* nodes : {&missing_, &unheard_, &unreachable_}) {
    released.untold.insert(nodes->begin(), nodes->end());
  }
  if (released_.size() > kReleasedMax) {
    released_.pop_front();
  }
}

// Who asked had not heard yet what was given up for somebody else: that is before the answer, and
// makes room there as well. It names the step no more when it asks again, so that this ends.
bool Coordinator::ComesAnyway(const std::vector<CheckpointId>& useful, NodeId node) const {
  return std::any_of(released_.begin(), released_.end(), [&](const Released& each) {
    const auto known = checkpoints_.find(each.id);
    const bool again = known != checkpoints_.end() && known->second.InMemoryOf(node);
    return !again && each.kept_on.count(node) == 0 &&
           std::find(useful.begin(), useful.end(), each.id) != useful.end();
  });
}

// A node is back, or it took too long.
void Coordinator::RetryRoom(Turn& t) {
  for (const RoomWait& wait : std::exchange(room_waits_, {})) {
    if (MakeRoom(wait.asked, wait.node, t)) {
      t.Say(RoomAnswered{wait.asked.token, true});
    } else if (wait.until <= t.time.now || (missing_.empty() && unheard_.empty())) {
      t.Say(RoomAnswered{wait.asked.token, false});
    } else {
      room_waits_.push_back(wait);
    }
  }
}

// `node`: where the rank is.
bool Coordinator::MakeRoom(const RoomAsked& m, NodeId node, Turn& t) {
  if (ComesAnyway(m.useful, node) || LetGoOfLeft(m, node, t)) {
    return true;
  }
  const CheckpointId begun{m.attempt, m.step};
  std::optional<Victim> victim;
  if (m.attempt == attempt() && checkpoints_.count(begun) > 0) {
    const std::vector<ShedChoice> choices = Choices(&m.useful);
    victim = m.spare_only ? ChooseSpare(choices) : ChooseVictim(choices, begun);
  }
  if (!victim) {
    return false;
  }
  if (victim->protect) {
    // (One that was before, and is not now that it is cut off, may be open again later.)
    for (auto& [id, checkpoint] : checkpoints_) {
      checkpoint.is_protected = id == *victim->protect;
    }
  }
  const uint64_t bytes = checkpoints_.at(victim->id).bytes;
  const bool retired = victim->rule == ShedRule::kOffLine ||
                       victim->rule == ShedRule::kOlderCommitted ||
                       victim->rule == ShedRule::kDraining;
  const Failure failure =
      Shed(absl::StrCat("step ", victim->id.step, " of attempt ", victim->id.attempt,
                        retired ? " retired: " : " shed: ", ShedReason(*victim, m)));
  if (retired) {
    Tell(Report::Kind::kStepRetired, failure.message, bytes, t);
    Retire(victim->id, failure, t);
  } else {
    Tell(Report::Kind::kStepShed, failure.message, bytes, t);
    LetGo(victim->id, failure, t);
  }
  return true;
}

// What another job may have of this one, and why it goes.
std::optional<std::pair<CheckpointId, std::string>> Coordinator::ForAnother(
    const SpareAsked& m) const {
  const std::vector<ShedChoice> choices = Choices(&m.useful);
  const auto stage = static_cast<EvictionStage>(m.stage);
  if (stage == EvictionStage::kSpare) {
    const std::optional<Victim> spare = ChooseSpare(choices);
    return spare ? std::optional(std::pair(
                       spare->id, std::string("this was not the newest committed step of the job")))
                 : std::nullopt;
  }
  if (RanksAlive() > 0 || !joins_.empty()) {
    return std::nullopt;  // somebody asked who did not know
  }
  if (stage == EvictionStage::kVerified) {
    const std::optional<CheckpointId> durable = ChooseDurable(choices);
    return durable ? std::optional(std::pair(
                         *durable, std::string("the job has ended, and a durable tier has it")))
                   : std::nullopt;
  }
  const std::optional<CheckpointId> last = ChooseLast(choices, stage == EvictionStage::kDraining);
  if (!last) {
    return std::nullopt;
  }
  std::string why = "the job has ended";
  if (!checkpoints_.at(*last).View(*last).Without(TierKind::kMemory).Restorable()) {
    absl::StrAppend(&why, ", and it lay nowhere else; 'ckptctl pin ", name_, " --step ", last->step,
                    "' would have kept it");
  }
  return std::pair(*last, why);
}

void Coordinator::On(const SpareAsked& m, Turn& t) {
  if (ComesAnyway(m.useful, t.from)) {
    t.Say(RoomAnswered{m.token, true});
    return;
  }
  const auto given = ForAnother(m);
  if (given) {
    const auto& [id, why] = *given;
    const bool durable = static_cast<EvictionStage>(m.stage) == EvictionStage::kVerified;
    const std::string whose =
        m.for_job == name_ ? "a job of another user" : absl::StrCat("job '", m.for_job, "'");
    const Failure failure = Shed(absl::StrCat("step ", id.step, " of attempt ", id.attempt,
                                              durable ? " left memory: " : " shed: ", whose,
                                              " needed the memory, and ", why));
    Tell(durable ? Report::Kind::kStepRetired : Report::Kind::kStepShed, failure.message,
         checkpoints_.at(id).bytes, t);
    durable ? Retire(id, failure, t) : LetGo(id, failure, t);
  }
  t.Say(RoomAnswered{m.token, given.has_value()});
}

}  // namespace holdfast
