// Nodes that come and go (docs/protocol.md, "Many nodes"). What a node has counts from when it
// tells all of it; what it had is kept in mind while it is out of reach, and counts for nothing.
#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/coordinator.h"

namespace holdfast {

// Copies in the node's memory: those that were found there at start, or that it tells when it
// comes.
// The node is to give up what it has of the step, or was told so and had not heard it yet when it
// told of that: it counts as there no more, whatever it would make whole, since it goes.
std::optional<Failure> Coordinator::WhyGivenUp(CheckpointId id, NodeId node) {
  if (checkpoints_.count(id) > 0) {
    return std::nullopt;
  }
  const auto fate = id.attempt == attempt() ? fates_.find(id.step) : fates_.end();
  const auto released = std::find_if(released_.begin(), released_.end(),
                                     [id](const Released& each) { return each.id == id; });
  const bool told = released != released_.end() && released->untold.count(node) == 0;
  if (fate == fates_.end() && !told) {
    return std::nullopt;
  }
  if (released != released_.end()) {
    released->untold.erase(node);
  }
  return fate != fates_.end() ? fate->second.failure
                              : Failure{absl::StatusCode::kAborted, v1::Failure::REASON_ABANDONED,
                                        absl::StrCat("step ", id.step, " of attempt ", id.attempt,
                                                     " was given up before")};
}

// A step that goes on in another tier: the node was told that its copies in memory go, and had not
// heard it yet when it told of them.
bool Coordinator::GoesFromMemory(CheckpointId id, NodeId node) const {
  return std::any_of(released_.begin(), released_.end(), [&](const Released& each) {
    return each.id == id && each.untold.count(node) == 0;
  });
}

void Coordinator::TakeShards(const std::vector<FoundShard>& shards, Turn& t) {
  bool learned = false;
  for (const FoundShard& found : shards) {
    Learn(found.copy, learned);
  }
  ComputeLine();
  for (const FoundShard& found : shards) {
    const SealedCopy& copy = found.copy;
    const bool current = copy.id.attempt == attempt();
    const TierKind tier = found.replica ? TierKind::kPeer : TierKind::kMemory;
    if (const std::optional<Failure> why = WhyGivenUp(copy.id.checkpoint(), t.from)) {
      found.replica ? t.Say(RemovalWanted{copy.id.checkpoint(), tier, copy.world_size}, t.from)
                    : t.Say(GiveUp{copy.id.checkpoint(), *why}, t.from);
      continue;
    }
    if (found.replica && IsGoing(copy.id.checkpoint(), tier)) {
      t.Say(RemovalWanted{copy.id.checkpoint(), tier, copy.world_size}, t.from);
      continue;  // it goes with the others, and was taken off the books with them
    }
    const CopyPlace place{tier, t.from};
    const auto known = checkpoints_.find(copy.id.checkpoint());
    if (IsAnotherSave(copy, tier, settings_.nodes->Name(t.from), true, t)) {
      for (Released& each : released_) {
        if (each.id == copy.id.checkpoint()) {
          each.kept_on.insert(t.from);
        }
      }
      if (known->second.shards.at(copy.id.rank).at(place).kind == CopyState::Kind::kAway) {
        known->second.SetNone(copy.id.rank, place);  // it took the place of the one that was there
      }
      continue;
    }
    if (!found.replica && known != checkpoints_.end() &&
        GoesFromMemory(copy.id.checkpoint(), t.from)) {
      known->second.SetNone(copy.id.rank, place);
      t.Say(GiveUp{copy.id.checkpoint(),
                   {absl::StatusCode::kAborted, v1::Failure::REASON_SHED,
                    absl::StrCat("step ", copy.id.step, " of attempt ", copy.id.attempt,
                                 " was given up in memory before")}},
            t.from);
      continue;
    }
    if (known != checkpoints_.end() && known->second.shards.count(copy.id.rank) > 0 &&
        known->second.shards.at(copy.id.rank).at(place).kind == CopyState::Kind::kBad) {
      continue;  // it is not good again because it still lies there
    }
    AddShard({copy.id.attempt, copy.id.rank, copy.id.step, copy.world_size, copy.image_bytes,
              copy.sealed_unix_ms, true, copy.likeness},
             tier, {}, t);
    if (!current) {
      continue;
    }
    any_save_ = true;
    Step& last = last_begun_.try_emplace(copy.id.rank, copy.id.step).first->second;
    last = std::max(last, copy.id.step);
    if (found.writer) {  // says who the rank is when the state that said so was lost
      if (members_.Find(copy.id.rank) == nullptr) {
        members_.Set(copy.id.rank, {*found.writer, 0, true, true});
        learned = learned || IsToBeNamed(copy.id.rank);
      }
    }
  }
  PruneIncomplete(t);
  // Nor will those of the newest one that lack a rank which is known to be gone.
  for (const Rank rank : members_.gone()) {
    AbandonWithout(rank, std::nullopt, absl::StrCat(HowGone(rank), ", without having sealed it"),
                   t);
  }
  PruneAttempts();
  if (learned) {
    Persist(t);
  }
}

// What is there of a node's that took part cannot be told now. (SumUpNvme is the caller's.)
void Coordinator::Miss(NodeId node, bool comes_back, const std::string& why) {
  missing_.insert(node);
  if (comes_back) {
    unreachable_.insert(node);
    nvme_on_.Set(node, {TierKind::kNvme, InventoryState::Kind::kPending, why});
  } else {
    unreachable_.erase(node);
    nvme_on_.Erase(node);
  }
}

// Whether a step that is newer than the candidates is whole again when a node is back that may be.
bool Coordinator::MayComeBack(const std::vector<CheckpointId>& candidates) const {
  return !unreachable_.empty() && AnyCutOffAbove(candidates);
}

bool Coordinator::AnyCutOffAbove(const std::vector<CheckpointId>& candidates) const {
  return std::any_of(checkpoints_.begin(), checkpoints_.end(), [&](const auto& c) {
    return c.second.cut_off && OnLine(line_, c.first) &&
           (candidates.empty() || candidates.front() < c.first);
  });
}

// Whether it was whole, and what it lacks is on nodes that are not there, as far as is known.
bool Coordinator::CutOff(CheckpointId id, const Checkpoint& checkpoint) const {
  if (checkpoint.contradictory || !checkpoint.writing.empty()) {
    return false;
  }
  // The state says of the last commits a little later that they were: before all nodes have been
  // heard, any step may have been whole. But none of an attempt that this coordinator has opened:
  // of that such a node has nothing.
  return (!unheard_.empty() && id.attempt <= loaded_attempt_) ||
         ((checkpoint.committed || CommittedOnce(id)) && StillToTell()) ||
         checkpoint.WholeWithAway();
}

bool Coordinator::CommittedOnce(CheckpointId id) const {
  const auto info = attempts_.find(id.attempt);
  return info != attempts_.end() && info->second.any_committed &&
         id.step <= info->second.last_committed_step;
}

// Whether another node may have copies that are not known now.
bool Coordinator::StillToTell() const {
  return !missing_.empty() || (Configured(TierKind::kNvme) && nvme_on_.AnyPendingElsewhere());
}

// Whether it has, or may have, anything to do with the job.
bool Coordinator::TakesPart(NodeId node) const {
  if (missing_.count(node) > 0 || nvme_on_.MayHaveMore(node) || !members_.OnNode(node).empty() ||
      std::any_of(checkpoints_.begin(), checkpoints_.end(),
                  [node](const auto& c) { return !c.second.RanksOn(node).empty(); })) {
    return true;
  }
  return std::any_of(kAllTiers.begin(), kAllTiers.end(), [&](TierKind tier) {
    const std::vector<const Going*> all = AllGoing(tier);
    return std::any_of(all.begin(), all.end(),
                       [node](const Going* going) { return going->nodes.count(node) > 0; });
  });
}

// Whether a process on another node has the rank: what this one says in its name is of a process
// that lost it.
bool Coordinator::SeatedElsewhere(Rank rank, NodeId node) const {
  const Member* member = members_.Find(rank);
  return member != nullptr && member->process.node != node;
}

Failure Coordinator::TakenElsewhere(Rank rank) const {
  return {absl::StatusCode::kFailedPrecondition, v1::Failure::REASON_RANK_TAKEN,
          absl::StrCat("rank ", rank, " of job '", name_, "' is ",
                       settings_.nodes->Who(members_.Find(rank)->process),
                       " since this process was out of reach; it can change nothing any more, and "
                       "should end")};
}

// The node has something of a newer attempt than this coordinator knows: its state is old. What
// runs under an older number is over, whoever it is.
void Coordinator::GiveWay(const NodeArrived& m, Turn& t) {
  Attempt told = 0;  // by copies, which name its line of descent
  for (const FoundShard& found : m.shards) {
    told = std::max(told, found.copy.id.attempt);
  }
  Attempt newest = told;
  for (const NodeArrived::Seat& seat : m.seats) {
    newest = std::max(newest, seat.attempt);
  }
  if (newest <= attempt() || newest < highest_attempt_) {
    return;
  }
  Failure over = SupersededFailure(attempt());
  over.message = absl::StrCat(
      "attempt ", attempt(), " of job '", name_, "' is over: ", settings_.nodes->Name(t.from),
      " has something of attempt ", newest, ", which was not known here; start all ranks again");
  highest_attempt_ = newest;
  // Of an attempt that has saved nothing too little is known to go on with it. Of one that goes on,
  // nodes that have not been heard of may have ranks.
  loaded_attempt_ = told == newest ? newest : loaded_attempt_;
  EndAttempt(told == newest ? newest : newest + 1, over, t);
  Persist(t);
}

// Those that were cut off by what is known now, or not any more.
void Coordinator::RecheckCutOff(Turn& t) {
  for (const CheckpointId& id : AllCheckpoints()) {
    const auto it = checkpoints_.find(id);
    if (it == checkpoints_.end() || !it->second.cut_off) {
      continue;
    }
    Recheck(id, t);
    if (id.attempt == attempt()) {
      AnswerAwaits(id.step, t);
    }
  }
  PruneIncomplete(t);
}

// What was out of reach there, and is not there or not expected any more.
void Coordinator::DropLost(NodeId node, TierKind tier, std::set<CopyState::Kind> kinds,
                           const std::string& why, Turn& t) {
  const auto lost = [&](CheckpointId, Rank, const CopyState& copy) {
    return kinds.count(copy.kind) > 0;
  };
  for (const CheckpointId& id : DropCopies({tier, node}, lost)) {
    Recheck(id, t);
    EraseIfGone(id,
                {absl::StatusCode::kAborted, v1::Failure::REASON_SHED,
                 absl::StrCat("the last copies of step ", id.step, " were on ",
                              settings_.nodes->Name(node), ", ", why)},
                t);
  }
}

// Nodes that are gone for good are not expected any more when a newer step than all that may be
// whole with them is safe.
void Coordinator::ForgetGone(CheckpointId safe, Turn& t) {
  const bool newer = std::any_of(checkpoints_.begin(), checkpoints_.end(), [&](const auto& c) {
    return c.second.cut_off && OnLine(line_, c.first) && safe < c.first;
  });
  std::vector<NodeId> gone;
  for (const NodeId node : missing_) {
    if (unreachable_.count(node) == 0) {
      gone.push_back(node);
    }
  }
  if (gone.empty() || newer || safe.attempt != attempt()) {
    return;
  }
  for (const NodeId node : gone) {
    missing_.erase(node);
    absent_.erase(node);
    unheard_.erase(node);
    to_tell_.erase(node);
    for (const TierKind tier : {TierKind::kMemory, TierKind::kNvme, TierKind::kPeer}) {
      DropLost(node, tier, {CopyState::Kind::kAway, CopyState::Kind::kBad}, "which is gone", t);
    }
  }
  RecheckCutOff(t);
  PersistLazily(t);
}

void Coordinator::On(const NodeArrived& m, Turn& t) {
  const bool fresh = !TakesPart(t.from);
  missing_.erase(t.from);
  unreachable_.erase(t.from);
  absent_.erase(t.from);
  unheard_.erase(t.from);
  if (Configured(TierKind::kNvme)) {
    nvme_on_.Set(t.from, {TierKind::kNvme, InventoryState::Kind::kPending, ""});
    SumUpNvme();
  } else {
    to_tell_.erase(t.from);
  }
  const absl::Status anew = absl::UnavailableError(
      absl::StrCat(settings_.nodes->Name(t.from), " was started anew, or could not be heard"));
  LoseWork(anew, anew, t);
  GiveWay(m, t);
  // 1. What it does not tell of is not there any more.
  std::map<TierKind, std::set<std::pair<CheckpointId, Rank>>> there;
  for (const FoundShard& found : m.shards) {
    there[found.replica ? TierKind::kPeer : TierKind::kMemory].insert(
        {found.copy.id.checkpoint(), found.copy.id.rank});
  }
  std::vector<CheckpointId> changed;
  for (const TierKind tier : {TierKind::kMemory, TierKind::kPeer}) {
    const auto not_told = [&](CheckpointId id, Rank rank, const CopyState&) {
      return there[tier].count({id, rank}) == 0;
    };
    for (const CheckpointId& id : DropCopies({tier, t.from}, not_told)) {
      changed.push_back(id);
    }
  }
  std::sort(changed.begin(), changed.end());
  changed.erase(std::unique(changed.begin(), changed.end()), changed.end());
  lenders_[t.from] = {m.lends_bytes, m.labels, m.reads_remote};
  m.leaving ? void(leaving_.insert(t.from)) : void(leaving_.erase(t.from));
  domains_.clear();
  for (auto& [id, checkpoint] : checkpoints_) {
    checkpoint.ForgetApart();
    checkpoint.drain(TierKind::kPeer).full.erase(t.from);
  }
  for (const CheckpointId& id : changed) {
    Recheck(id, t);  // before anything is given up for its sake
  }

  // 2. What it has, and who lives there.
  TakeJoining(m);
  for (Released& each : released_) {
    each.kept_on.erase(t.from);
  }
  TakeShards(m.shards, t);
  TakeSeats(m, t);
  RecheckCutOff(t);
  for (const CheckpointId& id : changed) {
    EraseIfGone(id,
                {absl::StatusCode::kAborted, v1::Failure::REASON_SHED,
                 absl::StrCat("the copies of step ", id.step, " were in the memory of ",
                              settings_.nodes->Name(t.from), ", which lost them")},
                t);
  }
  AbandonLost(t.from, t);
  if (fresh && !m.shards.empty()) {
    PersistLazily(t);  // the next coordinator waits for it, too
  }
  RetryJoins(t);
  for (const RoomWait& wait : std::exchange(room_waits_, {})) {
    // Slots came free, or may now: it looks, and asks again.
    t.Say(RoomAnswered{wait.asked.token, true});
  }
  TellOfStop(t.from, t);
  Rescue(t);
  GoOnWithSession(t);
  ReplicateAgain(t);
  PumpDrains(t);
  RetainDurable(t);
  FlushState(t);
}

// Whom this coordinator has let in, and then taken for gone because the answer was not on its way
// before the node met it anew.
void Coordinator::TakeJoining(const NodeArrived& m) {
  for (const NodeArrived::Joining& joining : m.joining) {
    const Member* member = members_.Find(joining.rank);
    if (member != nullptr && !member->told && member->process == joining.process) {
      members_.SetAlive(joining.rank, true);
    }
  }
}

void Coordinator::TakeSeats(const NodeArrived& m, Turn& t) {
  std::map<Rank, const NodeArrived::Seat*> seats;
  bool superseded = false;
  for (const NodeArrived::Seat& seat : m.seats) {
    superseded = superseded || seat.attempt < attempt();
    if (seat.attempt == attempt()) {
      seats[seat.rank] = &seat;
    }
  }
  if (superseded) {
    t.Say(Superseded{attempt()}, t.from);
  }
  bool to_be_named = false;
  for (const auto& [rank, seat] : seats) {
    if (members_.Find(rank) == nullptr) {
      members_.Set(rank, {seat->process, 0, true, true});
      to_be_named = to_be_named || IsToBeNamed(rank);
    }
    if (members_.Find(rank)->process != seat->process) {
      continue;  // another process has taken the rank since
    }
    members_.SetAlive(rank, true);  // it may have counted as ended with its node
    members_.SetConnection(rank, seat->connection);
    TakeLastBegun(*seat);
    for (const Step step : seat->writing) {
      const CheckpointId id{attempt(), step};
      if (const auto fate = fates_.find(step);
          fate != fates_.end() && checkpoints_.count(id) == 0) {
        t.Say(GiveUp{id, fate->second.failure}, t.from);
        continue;
      }
      const auto [it, fresh] = checkpoints_.try_emplace(id);
      if (fresh) {
        it->second.world_size = world_size();
        it->second.begun = t.time.now;
        it->second.begun_unix_ms = t.time.unix_ms;
      }
      if (it->second.shards.count(rank) == 0) {
        it->second.writing.insert(rank);
      }
    }
  }
  if (to_be_named) {
    Persist(t);
  }
  EndWhoIsNotThere(m, seats, t);
}

// Who is not there any more ended while nobody heard of it; so did what they, or those who live on,
// were writing. Whom this coordinator has let in, and who has not heard it, is about to ask again.
void Coordinator::EndWhoIsNotThere(const NodeArrived& m,
                                   const std::map<Rank, const NodeArrived::Seat*>& seats, Turn& t) {
  std::set<std::pair<Rank, ProcessId>> join_again;
  for (const NodeArrived::Joining& joining : m.joining) {
    join_again.emplace(joining.rank, joining.process);
  }
  std::vector<SeatLost> ended;
  std::vector<std::pair<CheckpointId, Rank>> lost;
  for (const Rank rank : members_.OnNode(t.from)) {
    const Member& member = *members_.Find(rank);
    const auto seat = seats.find(rank);
    if (!member.alive) {
      continue;
    }
    if ((seat == seats.end() || seat->second->process != member.process) &&
        join_again.count({rank, member.process}) == 0) {
      ended.push_back({attempt(), rank, member.process, 0, SeatLost::How::kProcessEnded});
    }
    for (auto it = checkpoints_.lower_bound({attempt(), 0}); it != checkpoints_.end(); ++it) {
      const bool goes_on = seat != seats.end() && seat->second->writing.count(it->first.step) > 0;
      if (it->second.writing.count(rank) > 0 && !goes_on) {
        lost.emplace_back(it->first, rank);
      }
    }
  }
  for (const SeatLost& seat : ended) {
    On(seat, t);
  }
  for (const auto& [id, rank] : lost) {
    Abandon(id,
            absl::StrCat("rank ", rank, " lost it while ", settings_.nodes->Name(t.from),
                         " was out of reach"),
            t);
  }
}

// What this coordinator has let the rank begin, and its node has never heard of, is asked for
// again: the rank has not begun it.
void Coordinator::TakeLastBegun(const NodeArrived::Seat& seat) {
  any_save_ = any_save_ || seat.last_begun.has_value();
  std::optional<Step> last = seat.last_begun;
  for (auto it = checkpoints_.lower_bound({attempt(), 0}); it != checkpoints_.end(); ++it) {
    if (it->second.shards.count(seat.rank) > 0) {
      last = std::max(last, std::optional(it->first.step));
    }
  }
  const auto known = last_begun_.find(seat.rank);
  const bool asks_again = seat.connection != 0;  // else who asked is not there any more
  if (known == last_begun_.end() || last >= known->second || !asks_again) {
    if (last) {
      Step& begun = last_begun_.try_emplace(seat.rank, *last).first->second;
      begun = std::max(begun, *last);
    }
    return;
  }
  auto it = checkpoints_.lower_bound({attempt(), last ? *last + 1 : 0});
  while (it != checkpoints_.end()) {
    Checkpoint& checkpoint = it->second;
    checkpoint.writing.erase(seat.rank);
    // What nobody else has begun is as if it had never been.
    const bool nothing = checkpoint.writing.empty() && checkpoint.shards.empty();
    it = nothing ? checkpoints_.erase(it) : std::next(it);
  }
  last ? void(known->second = *last) : void(last_begun_.erase(known));
}

// Nothing of what the node was to do will be told; who waited there asks again. `removal`: what its
// removals have come to.
void Coordinator::LoseWork(const absl::Status& why, const absl::Status& removal, Turn& t) {
  for (auto place = joins_.Next(0, std::nullopt); place;
       place = joins_.Next(*place + 1, std::nullopt)) {
    if (joins_.At(*place).caller.process.node == t.from) {
      Refuse(joins_.TakeAt(*place).token,
             {absl::StatusCode::kUnavailable, v1::Failure::REASON_UNSPECIFIED,
              absl::StrCat("join of job '", name_, "': ", Message(why), "; ask again")},
             t);
    }
  }
  LoseRepairs(t.from, Message(why), t);
  std::vector<ShardDrained> drained;
  for (const auto& [id, checkpoint] : checkpoints_) {
    for (const TierKind tier : kAllTiers) {
      for (const auto& [rank, from] : checkpoint.drain(tier).waiting) {
        if (from.node == t.from) {
          drained.push_back({id, rank, tier, from.tier, why, false, {}});
        }
      }
    }
  }
  for (const ShardDrained& each : drained) {
    On(each, t);
  }
  std::vector<RemovalDone> removals;
  for (const TierKind tier : kAllTiers) {
    for (const Going* going : AllGoing(tier)) {
      if (going->asked.count(t.from) > 0) {
        removals.push_back({going->id, tier, removal, std::nullopt});
      }
    }
  }
  for (const RemovalDone& each : removals) {
    On(each, t);
  }
}

void Coordinator::On(const NodeLeft& m, Turn& t) {
  const std::string who = settings_.nodes->Name(t.from);
  const absl::Status away = absl::UnavailableError(absl::StrCat(who, " is out of reach: ", m.why));
  leaving_.erase(t.from);
  stop_.Gone(t.from);
  ChooseLastStep(t);
  lenders_.erase(t.from);
  domains_.clear();
  for (auto& [id, checkpoint] : checkpoints_) {
    checkpoint.ForgetApart();
  }
  if (!TakesPart(t.from)) {
    nvme_on_.Erase(t.from);  // (nothing of the job is there: nobody waits for it)
    SumUpNvme();
    return LoseWork(away, absl::OkStatus(), t);
  }
  // 1. What it has counts for nothing, and nobody is sent there. (What it has not removed it tells
  // again when it is back, and that is judged anew.)
  const bool was_pending = Inventory(TierKind::kNvme).kind == InventoryState::Kind::kPending;
  Miss(t.from, !m.ended, m.why);
  SumUpNvme();
  const MonotonicTime since = absent_.try_emplace(t.from, Absence{t.time.now}).first->second.since;
  absent_[t.from] = {since, m.ended};
  for (const CheckpointId& id : AllCheckpoints()) {
    const auto it = checkpoints_.find(id);
    if (it != checkpoints_.end() && it->second.SetAway(t.from)) {
      Recheck(id, t);
    }
  }
  for (Removals& removals : removals_) {
    if (removals.current) {
      removals.current->nodes.erase(t.from);
    }
    for (Going& going : removals.stuck) {
      going.nodes.erase(t.from);
    }
    for (Going& going : removals.waiting) {
      going.nodes.erase(t.from);
    }
  }

  // 2. Nothing that it was to do will be told; and if its drives were all that had to be read
  // still, what the others have is known to be all there is.
  LoseWork(away, absl::OkStatus(), t);
  if (m.ended) {
    PruneIncomplete(t);
  }

  // 3. Its ranks, if it is gone for good.
  std::vector<SeatLost> ended;
  for (const Rank rank : members_.OnNode(t.from)) {
    const Member& member = *members_.Find(rank);
    if (m.ended && member.alive) {
      ended.push_back({attempt(), rank, member.process, 0, SeatLost::How::kProcessEnded});
    }
  }
  for (const SeatLost& seat : ended) {
    On(seat, t);
  }
  if (m.ended) {
    RetryJoins(t);  // who may have lived there does not
  }
  Tell(Report::Kind::kTrouble,
       absl::StrCat(who, m.ended ? " is gone: " : " is out of reach: ", m.why,
                    ended.empty() ? "" : absl::StrCat("; ", ended.size(), " ranks with it")),
       0, t);
  if (m.ended) {  // (else it may be back in a moment, with what it keeps)
    ReplicateAgain(t);
  }
  if (was_pending && Inventory(TierKind::kNvme).kind != InventoryState::Kind::kPending) {
    return GoOnWithTier(TierKind::kNvme, t);  // it was the last one that had not told
  }
  GoOnWithSession(t);
  PumpDrains(t);
  RetainDurable(t);
}

// Of what is whole nowhere and lies on nodes that are out of reach nothing is expected any more
// when a newer step was committed.
void Coordinator::ForgetAwayBelow(CheckpointId id, Turn& t) {
  std::vector<CheckpointId> older;
  for (const auto& [other, checkpoint] : checkpoints_) {
    const bool nowhere = !checkpoint.AnyAt(TierKind::kMemory) && checkpoint.writing.empty() &&
                         !checkpoint.AnythingDurable();
    if (other < id && nowhere && checkpoint.AnyAway()) {
      older.push_back(other);
    }
  }
  for (const CheckpointId& other : older) {
    Erase(
        other,
        {absl::StatusCode::kAborted, v1::Failure::REASON_SHED,
         absl::StrCat("step ", other.step, " of attempt ", other.attempt,
                      " lies on nodes that are out of reach, and step ", id.step, " is committed")},
        t);
  }
}

std::vector<std::string> Coordinator::NodesAway() const {
  std::vector<std::string> names;
  for (const NodeId node : missing_) {
    names.push_back(settings_.nodes->Name(node));
  }
  return names;
}

}  // namespace holdfast
