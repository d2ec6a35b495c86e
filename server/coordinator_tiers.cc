// The way of a checkpoint into the durable tiers: which steps go there, flushes, the manifest, what
// is found there (docs/protocol.md §10).
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "server/coordinator.h"
#include "server/tier_lists.h"

namespace holdfast {
namespace {

absl::Status WentAway(TierKind tier) {
  return absl::UnavailableError(
      absl::StrCat("what lies in ", Name(tier), " went out of reach meanwhile"));
}

}  // namespace

bool Coordinator::Configured(TierKind tier) const {
  switch (tier) {
    case TierKind::kMemory:
      return true;
    case TierKind::kNvme:
      return settings_.nvme;
    case TierKind::kPeer:
      return settings_.peers;
    case TierKind::kRemote:
      return settings_.remote;
  }
  return false;
}

v1::Policy Coordinator::EffectivePolicy() const {
  v1::Policy policy = settings_.policy;
  policy.MergeFrom(policy_);
  policy.MergeFrom(policy_set_);
  return policy;
}

const v1::TierPolicy& Coordinator::TierPolicyOf(const v1::Policy& policy, TierKind tier) const {
  static const v1::TierPolicy peer = [] {  // how many replicas there are says `replicas`
    v1::TierPolicy every_step;
    every_step.set_every_steps(1);
    every_step.set_keep_last(1);
    return every_step;
  }();
  return tier == TierKind::kNvme ? policy.nvme() : tier == TierKind::kPeer ? peer : policy.remote();
}

std::string Coordinator::PolicyText(TierKind tier) const {
  const v1::Policy policy = EffectivePolicy();
  const v1::TierPolicy& rules = TierPolicyOf(policy, tier);
  std::string text;
  if (rules.every_steps() == 1) {
    text = "every step";
  } else if (rules.every_steps() > 1) {
    text = absl::StrCat("the first of each ", rules.every_steps(), " steps");
  }
  if (rules.every_ms() > 0) {
    absl::StrAppend(&text, text.empty() ? "" : " and ", "one every ",
                    FormatDuration(std::chrono::milliseconds(rules.every_ms())));
  }
  return text.empty() ? "none" : text;
}

// ---- Which steps go there ----

void Coordinator::ChooseTiers(CheckpointId id, Turn& t) {
  const v1::Policy policy = EffectivePolicy();
  for (const TierKind tier : kDrained) {
    Checkpoint& checkpoint = checkpoints_.at(id);
    Drain& drain = checkpoint.drain(tier);
    // Before it is known what lies there nothing can be chosen; ChooseForMissing does it then.
    if (!Configured(tier) || drain.decided || checkpoint.CommittedAt(tier) || !OnLine(line_, id) ||
        Inventory(tier).kind == InventoryState::Kind::kPending ||
        (tier == TierKind::kPeer && policy.replicas() == 0)) {
      continue;
    }
    const v1::TierPolicy& rules = TierPolicyOf(policy, tier);
    const LastDrained& last = last_drained_[static_cast<size_t>(tier)];
    const bool older = last.id && id < *last.id;  // found in another tier, after a restart
    drain.decided = true;
    const bool goes_at_all = rules.every_steps() > 0 || rules.every_ms() > 0;
    const bool must =
        IsLastStep(id, t.time.now) || (tier != TierKind::kNvme && AnyLiesOnLeaving(checkpoint));
    if (!older &&
        (must ? goes_at_all
              : IsDue({rules.every_steps(), rules.every_ms()}, last, id, t.time.unix_ms))) {
      Want(id, tier, t);
    }
  }
  PumpDrains(t);
}

// Of what was committed before the tier was known: in order, as if it was committed now. What is
// there but for its manifest gets that.
void Coordinator::ChooseForMissing(TierKind tier, Turn& t) {
  if (tier == TierKind::kRemote) {
    for (auto& [id, checkpoint] : checkpoints_) {
      if (ManifestMissing(checkpoint) && OnLine(line_, id) &&
          checkpoint.drain(tier).phase == Drain::Phase::kNone) {
        checkpoint.drain(tier).decided = true;
        checkpoint.drain(tier).phase = Drain::Phase::kWanted;
        LastDrained& last = last_drained_[static_cast<size_t>(tier)];
        if (!last.id || *last.id < id) {
          last = {id, checkpoint.unix_ms};  // nothing older is wanted beside it
        }
      }
    }
  }
  for (const CheckpointId& id : AllCheckpoints()) {
    if (checkpoints_.at(id).committed) {
      ChooseTiers(id, t);
      if (id.attempt == attempt()) {
        AnswerAwaits(id.step, t);  // who waits for it there hears that it does not go
      }
    }
  }
}

// It waits for its turn, and has more to write than its manifest. (What is pinned, and would be
// lost with a node that is drained, waits beside newer ones.)
bool Coordinator::MayGiveWay(CheckpointId id, TierKind tier) const {
  const Checkpoint& checkpoint = checkpoints_.at(id);
  return checkpoint.drain(tier).phase == Drain::Phase::kWanted &&
         (checkpoint.GoodAt(tier) < checkpoint.world_size || tier == TierKind::kPeer) &&
         !(tier == TierKind::kRemote && Pinned(id) && AnyLiesOnLeaving(checkpoint));
}

// One step waits at a time: a newer one takes its place, so that a tier that is slower than the
// saves gets the newest there is whenever it is ready for one.
void Coordinator::Want(CheckpointId id, TierKind tier, Turn& t) {
  for (const CheckpointId& other : AllCheckpoints()) {
    if (other < id && MayGiveWay(other, tier)) {
      const std::string& problem = checkpoints_.at(other).drain(tier).problem;
      Unwant(other, tier,
             absl::StrCat("step ", id.step, " takes its place",
                          problem.empty() ? ", since the tier is slower than the saves"
                                          : absl::StrCat(" (", problem, ")")),
             t);
    }
  }
  last_drained_[static_cast<size_t>(tier)] = {id, t.time.unix_ms};
  BeginWanting(id, tier);
}

void Coordinator::BeginWanting(CheckpointId id, TierKind tier) {
  Drain& drain = checkpoints_.at(id).drain(tier);
  drain.phase = Drain::Phase::kWanted;
  drain.retry_at = {};
  drain.backoff = {};
  drain.problem.clear();
  drain.not_from_nvme.clear();
  drain.full.clear();
}

// It does not get there: what is under way is stopped, and what comes of it all the same is nothing
// that counts.
void Coordinator::Unwant(CheckpointId id, TierKind tier, const std::string& why, Turn& t) {
  Checkpoint& checkpoint = checkpoints_.at(id);
  Drain& drain = checkpoint.drain(tier);
  for (const Rank rank : drain.unasked.Clear()) {
    drain.waiting.Erase(rank);
  }
  if (drain.phase == Drain::Phase::kRunning && drain.waiting.empty()) {
    drain.phase = Drain::Phase::kWanted;  // nobody has been asked: nothing is under way
  }
  if (drain.Busy()) {
    drain.unwanted = why;
    std::set<NodeId> nodes{kHere};  // (the manifest is published here)
    for (const auto& [rank, from] : drain.waiting) {
      nodes.insert(from.node);
    }
    for (const NodeId node : nodes) {
      t.Say(FlushUnwanted{id, tier}, node);
    }
  }
  if (drain.phase != Drain::Phase::kWanted) {
    return;
  }
  drain.phase = Drain::Phase::kNone;
  drain.shed = why;
  NoteStage(id, Name(tier), t.time.unix_ms, t.time.unix_ms, absl::StrCat("shed: ", why), 0);
  Tell(Report::Kind::kTierShed,
       absl::StrCat("step ", id.step, " of attempt ", id.attempt, " does not go to ", Name(tier),
                    ": ", why),
       checkpoint.bytes, t, tier);
  AnswerAwaits(id.step, t);
}

// ---- Flushes ----

std::optional<CopyPlace> Coordinator::FlushSource(const Checkpoint& checkpoint, Rank rank,
                                                  TierKind to, bool nvme_moves) {
  const std::optional<CopyPlace> memory = checkpoint.GoodPlace(rank, TierKind::kMemory);
  // From nvme, so that the slot is free again; but not while something hangs there.
  const bool avoid_nvme =
      memory && (checkpoint.drain(to).not_from_nvme.count(rank) > 0 || !nvme_moves);
  if (to == TierKind::kRemote && !avoid_nvme && checkpoint.Readable(rank, TierKind::kNvme)) {
    return checkpoint.GoodPlace(rank, TierKind::kNvme);
  }
  return memory || to == TierKind::kNvme ? memory : checkpoint.GoodPlace(rank, TierKind::kPeer);
}

// Starts what may start: oldest first, a few at a time. The last step of a job that is told to end
// waits for no other, but for one that was taken for the last one before it.
void Coordinator::PumpDrains(Turn& t) {
  for (const TierKind tier : kDrained) {
    if (!Configured(tier) || removed_) {
      continue;
    }
    size_t busy = 0;
    size_t open = 0;
    bool last_under_way = false;
    std::vector<CheckpointId> wanted;
    const auto is_last = [&](CheckpointId id) { return IsLastStep(id, t.time.now); };
    const bool nvme_moves = NvmeMoves();
    for (auto& [id, checkpoint] : checkpoints_) {
      Drain& drain = checkpoint.drain(tier);
      open += drain.Busy() ? 1 : 0;
      busy += drain.Busy() && drain.stalled.empty() ? 1 : 0;
      last_under_way = last_under_way || (drain.Busy() && EndsAttempt(id));
      const Drain& before = checkpoint.drain(TierKind::kNvme);
      // From nvme, if it is on its way there.
      const bool behind = tier == TierKind::kRemote && before.phase != Drain::Phase::kNone &&
                          before.problem.empty() && before.stalled.empty() && nvme_moves;
      if (drain.phase == Drain::Phase::kWanted && drain.retry_at <= t.time.now) {
        drain.retry_at = {};  // from now on it waits for others, not for the time
        if ((!behind || is_last(id)) && !checkpoint.removing) {
          wanted.push_back(id);
        }
      }
    }
    std::stable_partition(wanted.begin(), wanted.end(), is_last);
    for (const CheckpointId& id : wanted) {
      const bool ahead = is_last(id) && !last_under_way;
      const bool may = ahead || (busy < kDrainsMax && open < kDrainsOpenMax);
      if (may && StartDrain(id, tier, t)) {
        ++busy;
        ++open;
      }
    }
  }
}

// Whether what is on its way to nvme can be waited for: not while anything hangs there.
bool Coordinator::NvmeMoves() const {
  return std::all_of(checkpoints_.begin(), checkpoints_.end(),
                     [](const auto& c) { return c.second.drain(TierKind::kNvme).stalled.empty(); });
}

// True if it is under way now.
bool Coordinator::StartDrain(CheckpointId id, TierKind tier, Turn& t) {
  if (tier == TierKind::kPeer) {
    return StartReplication(id, t);
  }
  Checkpoint& checkpoint = checkpoints_.at(id);
  Drain& drain = checkpoint.drain(tier);
  FlushWanted flush;
  flush.checkpoint = id;
  flush.to = tier;
  flush.world_size = checkpoint.world_size;
  const v1::Policy policy = EffectivePolicy();
  flush.verify = TierPolicyOf(policy, tier).verify();
  if (tier == TierKind::kRemote &&
      policy.remote().compression() == v1::TierPolicy::COMPRESSION_ZSTD) {
    flush.zstd_level = policy.remote().compression_level();
    flush.zstd_threads = policy.remote().compression_threads();
  }
  if (const auto info = attempts_.find(id.attempt); info != attempts_.end()) {
    flush.opening = info->second.opening;
  }
  const Sharing sharing = tier == TierKind::kRemote && policy.remote().share_replicas()
                              ? Sharing(checkpoint)
                              : Sharing();
  std::map<NodeId, FlushWanted> by_node;             // each copies on what it has
  std::vector<std::pair<NodeId, FlushWanted>> anew;  // in the place of what is bad there
  const bool nvme_moves = NvmeMoves();
  for (const auto& [rank, shard] : checkpoint.shards) {
    if (shard.at(tier).kind == CopyState::Kind::kGood) {
      continue;
    }
    const std::optional<CopyPlace> from = FlushSource(checkpoint, rank, tier, nvme_moves);
    if (!from) {
      drain.waiting.Clear();
      if (checkpoint.cut_off) {
        return false;  // when the nodes that have one are back
      }
      LoseDrain(id, tier, absl::StrCat("rank ", rank, " has no copy to take it from any more"), t);
      return false;
    }
    drain.waiting.Set(rank, *from);
    if (shard.at(PlaceOf(tier, from->node)).kind == CopyState::Kind::kBad) {
      anew.emplace_back(from->node, flush);
      anew.back().second.replace = true;
      anew.back().second.shards.push_back({rank, from->tier, shard.bytes, 0});
      sharing.AddGroup(anew.back().second);
      continue;
    }
    const auto [its, fresh] = by_node.try_emplace(from->node, flush);
    its->second.shards.push_back({rank, from->tier, shard.bytes, 0});
    sharing.AddGroup(its->second);
  }
  drain.retry_at = {};
  drain.failure = absl::OkStatus();
  if (tier == TierKind::kRemote) {
    TellDivergence(id, sharing, t);
  }
  if (drain.begun_unix_ms == 0) {
    drain.begun_unix_ms = t.time.unix_ms;
  }
  for (auto& [node, its] : anew) {
    t.Say(std::move(its), node);
  }
  if (drain.waiting.empty()) {
    drain.phase = Drain::Phase::kRunning;
    EndDrainRound(id, tier, t);
    const auto left = checkpoints_.find(id);
    return left != checkpoints_.end() && left->second.drain(tier).Busy();
  }
  drain.phase = Drain::Phase::kRunning;
  if (tier == TierKind::kRemote) {
    to_remote_.insert(id);
  }
  for (auto& [node, its] : by_node) {
    tier == TierKind::kRemote ? drain.unasked.Add(node, std::move(its))
                              : t.Say(std::move(its), node);
  }
  AskForFlushes(t);
  return true;
}

// Once a step: replicas that differ are nothing that a checkpoint could mend, and something that
// the job's owner wants to know.
void Coordinator::TellDivergence(CheckpointId id, const Sharing& sharing, Turn& t) {
  Checkpoint& checkpoint = checkpoints_.at(id);
  if (std::string text = sharing.DivergenceText(); checkpoint.divergence.empty() && !text.empty()) {
    Tell(Report::Kind::kReplicasDiverged,
         absl::StrCat("step ", id.step, " of attempt ", id.attempt, ": ", text,
                      ": replicas have diverged, and those that differ write their own"),
         0, t, TierKind::kRemote);
    checkpoint.divergence = std::move(text);
  }
}

// As many as may be on their way into the remote tier at a time; oldest steps first, but a last one
// before them.
void Coordinator::AskForFlushes(Turn& t) {
  size_t asked = 0;
  std::erase_if(to_remote_, [&](CheckpointId id) {
    const auto it = checkpoints_.find(id);
    return it == checkpoints_.end() || it->second.drain(TierKind::kRemote).waiting.empty();
  });
  for (const CheckpointId& id : to_remote_) {
    const Drain& drain = checkpoints_.at(id).drain(TierKind::kRemote);
    asked += drain.waiting.size() - drain.unasked.size();
  }
  std::vector<CheckpointId> in_turn(to_remote_.begin(), to_remote_.end());
  std::stable_partition(in_turn.begin(), in_turn.end(),
                        [&](auto id) { return IsLastStep(id, t.time.now); });
  for (const CheckpointId& id : in_turn) {
    FlushQueue& unasked = checkpoints_.at(id).drain(TierKind::kRemote).unasked;
    while (asked < settings_.remote_writes_max) {
      std::optional<std::pair<NodeId, FlushWanted>> next =
          unasked.Take(settings_.remote_writes_max - asked);
      if (!next) {
        break;
      }
      asked += next->second.shards.size();
      t.Say(std::move(next->second), next->first);
    }
  }
}

void Coordinator::On(const ShardDrained& m, Turn& t) {
  const auto it = checkpoints_.find(m.checkpoint);
  const CopyPlace* from =
      it == checkpoints_.end() ? nullptr : it->second.drain(m.to).waiting.Find(m.rank);
  if (from == nullptr || from->node != t.from) {
    return m.to == TierKind::kPeer ? TakeLateReplica(m, t) : EndRepair(m, t);
  }
  Checkpoint& checkpoint = it->second;
  Drain& drain = checkpoint.drain(m.to);
  // (It may have been begun as a repair: the node answers once.)
  if (const auto repair = repairs_.find({m.checkpoint, m.rank, PlaceOf(m.to, t.from)});
      repair != repairs_.end() && repair->second.asked == t.from) {
    StopMending(repair->first, repair->second);
  }
  const bool left_bad =
      m.status.ok() && !m.replaced && m.to != TierKind::kPeer &&
      checkpoint.shards.at(m.rank).at(PlaceOf(m.to, t.from)).kind == CopyState::Kind::kBad;
  drain.waiting.Erase(m.rank);
  drain.unasked.Drop(t.from, m.rank);
  if (m.to == TierKind::kRemote) {
    AskForFlushes(t);
  }
  if (!m.status.ok() && m.from == TierKind::kNvme) {
    drain.not_from_nvme.insert(m.rank);
  }
  if (m.status.ok() && !drain.unwanted.empty() && m.to == TierKind::kPeer) {
    TakeLateReplica(m, t);
  } else if (m.status.ok() && !drain.unwanted.empty()) {
    // It goes again with the rest of the step; until then it takes its room.
    for (Going& going : RemovalsOf(m.to).waiting) {
      if (going.id == m.checkpoint && going.counted.insert(m.rank)) {
        going.bytes +=
            m.copy.file_bytes != 0 ? m.copy.file_bytes : checkpoint.shards.at(m.rank).bytes;
      }
    }
  } else if (left_bad) {
    // One that knows of no replacement finds a copy there, and says that all is well.
    drain.failure =
        absl::UnimplementedError("the ckptd there is of a version that mends no copies");
  } else if (m.status.ok()) {
    if (checkpoint.shards.at(m.rank).at(PlaceOf(m.to, t.from)).kind == CopyState::Kind::kBad) {
      EndRepair(m, t);  // it is told that it was mended with the rest
      if (checkpoints_.count(m.checkpoint) == 0) {
        return;
      }
    }
    CopyDetail detail = DetailOf(m.copy);
    detail.since = t.time.now;
    checkpoint.SetGood(m.rank, PlaceOf(m.to, t.from), std::move(detail));
    if (checkpoint.CommittedAt(m.to)) {
      drain.whole_unix_ms = t.time.unix_ms;
    }
  } else {
    if (drain.failure.ok() || absl::IsCancelled(drain.failure)) {
      drain.failure = m.status;
    }
    if (m.to == TierKind::kPeer) {
      NoteRefusal(m, drain, t.from);
    }
    if (m.replaced && absl::IsNotFound(m.status) && !m.source_bad) {
      checkpoint.SetNone(m.rank, PlaceOf(m.to, t.from));  // it is written as any other
    }
    if (m.source_bad) {
      On(ShardBad{m.checkpoint, m.rank, Message(m.status), m.from, m.peer}, t);
    }
  }
  if (checkpoints_.count(m.checkpoint) == 0) {
    return;
  }
  const bool round_goes_on = !drain.waiting.empty();
  const bool awaited = !round_goes_on || !m.status.ok() || checkpoint.removing;
  if (!round_goes_on) {
    EndDrainRound(m.checkpoint, m.to, t);
  }
  if (checkpoints_.count(m.checkpoint) > 0) {
    Recheck(m.checkpoint, t);
  }
  if (awaited) {  // else it is one of thousands, perhaps, and changes nothing
    RetainDurable(t);
    PumpDrains(t);
    GoOnWithSession(t);
  }
}

// A node did not get a replica: another one is asked first, and another one read from.
void Coordinator::NoteRefusal(const ShardDrained& m, Drain& drain, NodeId target) const {
  if (absl::IsCancelled(m.status) || absl::IsAborted(m.status) ||
      absl::IsFailedPrecondition(m.status)) {
    return;  // that is over, or its rank has come there
  }
  drain.full.insert(target);
  drain.refusal = m.status;
  const std::optional<NodeId> source = settings_.nodes->Find(m.peer);
  if (source && !absl::IsResourceExhausted(m.status)) {
    drain.unreadable.insert(*source);
  }
}

// All flushes of this try have ended.
void Coordinator::EndDrainRound(CheckpointId id, TierKind tier, Turn& t) {
  Checkpoint& checkpoint = checkpoints_.at(id);
  Drain& drain = checkpoint.drain(tier);
  drain.stalled.clear();
  if (!drain.unwanted.empty()) {
    return EndUnwanted(id, tier, t);
  }
  if (removed_) {
    drain.phase = Drain::Phase::kNone;
    return EraseIfGone(id,
                       {absl::StatusCode::kAborted, v1::Failure::REASON_SHED,
                        absl::StrCat("step ", id.step, " went with its job")},
                       t);
  }
  if (tier == TierKind::kPeer) {
    return EndReplicationRound(id, t);
  }
  if (checkpoint.GoodAt(tier) == checkpoint.world_size) {
    return tier == TierKind::kRemote && !checkpoint.manifest ? BeginManifest(id, t)
                                                             : TierCommitted(id, tier, t);
  }
  DrainFailed(id, tier, drain.failure.ok() ? WentAway(tier) : drain.failure, t);
}

// Nothing is left that it could be taken from; perhaps nothing of it at all.
void Coordinator::LoseDrain(CheckpointId id, TierKind tier, const std::string& why, Turn& t) {
  Unwant(id, tier, why, t);
  EraseIfGone(id,
              {absl::StatusCode::kAborted, v1::Failure::REASON_SHED,
               absl::StrCat("step ", id.step, " of attempt ", id.attempt, " left memory before it ",
                            "was whole anywhere else: ", why)},
              t);
}

// What was under way has ended, and is not wanted any more.
void Coordinator::EndUnwanted(CheckpointId id, TierKind tier, Turn& t) {
  Drain& drain = checkpoints_.at(id).drain(tier);
  drain.phase = Drain::Phase::kNone;
  drain.shed = std::exchange(drain.unwanted, "");
  AnswerAwaits(id.step, t);
  EraseIfGone(id,
              {absl::StatusCode::kAborted, v1::Failure::REASON_SHED,
               absl::StrCat("step ", id.step, " of attempt ", id.attempt, ": ", drain.shed)},
              t);
}

void Coordinator::DrainFailed(CheckpointId id, TierKind tier, const absl::Status& status, Turn& t) {
  Checkpoint& checkpoint = checkpoints_.at(id);
  Drain& drain = checkpoint.drain(tier);
  drain.phase = Drain::Phase::kWanted;
  // What is cut off waits for its nodes, if there is anything left that could wait.
  const bool waits =
      checkpoint.cut_off && (checkpoint.AnyAt(TierKind::kMemory) || checkpoint.AnyAway() ||
                             checkpoint.AnythingDurable() || !checkpoint.writing.empty());
  const bool nvme_moves = NvmeMoves();
  for (const auto& [rank, shard] : checkpoint.shards) {
    if (!waits && shard.at(tier).kind != CopyState::Kind::kGood &&
        !FlushSource(checkpoint, rank, tier, nvme_moves)) {
      return LoseDrain(id, tier,
                       absl::IsCancelled(status)
                           ? absl::StrCat("its memory was needed for newer steps")
                           : absl::StrCat("rank ", rank, " has no copy to take it from any more (",
                                          Message(status), ")"),
                       t);
    }
  }
  const bool full = tier != TierKind::kPeer && absl::IsResourceExhausted(status);
  drain.backoff =
      std::clamp(drain.backoff * 2, kDrainRetryMin, full ? kDrainRetryFullMax : kDrainRetryMax);
  drain.retry_at = t.time.now + drain.backoff;
  // (Its rank has come to where a replica was to be: the next try asks others, nothing is wrong.)
  const bool moved = tier == TierKind::kPeer && absl::IsFailedPrecondition(status);
  const std::string problem = moved ? drain.problem : Message(status);
  if (drain.problem != problem) {
    Tell(Report::Kind::kTierTrouble,
         absl::StrCat("step ", id.step, " of attempt ", id.attempt, " could not be written to ",
                      Name(tier), " yet, trying again: ", problem),
         checkpoint.bytes, t, tier);
  }
  drain.problem = problem;
  // A newer step that waits takes its place, as it would have when this one waited for its turn.
  for (const CheckpointId& other : AllCheckpoints()) {
    if (id < other && MayGiveWay(id, tier) &&
        checkpoints_.at(other).drain(tier).phase == Drain::Phase::kWanted) {
      return Unwant(id, tier,
                    absl::StrCat("step ", other.step, " takes its place",
                                 problem.empty() ? "" : absl::StrCat(" (", problem, ")")),
                    t);
    }
  }
}

void Coordinator::On(const FlushStalled& m, Turn& t) {
  const auto it = checkpoints_.find(m.checkpoint);
  if (it == checkpoints_.end() || !it->second.drain(m.to).Busy()) {
    return;
  }
  Drain& drain = it->second.drain(m.to);
  const bool was = !drain.stalled.empty();
  drain.stalled = m.stalled ? m.what : "";
  if (was != m.stalled) {
    Tell(m.stalled ? Report::Kind::kTierTrouble : Report::Kind::kTierWell,
         m.stalled ? absl::StrCat("step ", m.checkpoint.step, " on its way to ", Name(m.to),
                                  " is stalled: ", m.what)
                   : absl::StrCat("step ", m.checkpoint.step, " on its way to ", Name(m.to),
                                  " gets on again"),
         it->second.bytes, t, m.to);
  }
  PumpDrains(t);
  GoOnWithSession(t);
}

void Coordinator::On(const MemoryCopyGained& m, Turn& t) {
  const auto it = checkpoints_.find(m.checkpoint);
  if (it == checkpoints_.end() || it->second.shards.count(m.rank) == 0) {
    t.Say(GiveUp{m.checkpoint,
                 {absl::StatusCode::kAborted, v1::Failure::REASON_SHED,
                  "the step was given up meanwhile"}},
          t.from);
    return;
  }
  it->second.NoteLikeness(m.rank, m.likeness);
  it->second.SetGood(m.rank, {TierKind::kMemory, t.from}, {});
  for (Released& each : released_) {
    if (each.id == m.checkpoint) {
      each.untold.insert(t.from);  // that one was brought there since
    }
  }
  const CopyPlace lent{TierKind::kPeer, t.from};
  const bool adopted = it->second.shards.at(m.rank).at(lent).kind != CopyState::Kind::kNone;
  it->second.SetNone(m.rank, lent);  // it was that replica
  Recheck(m.checkpoint, t);
  if (adopted) {
    ReplicateAgain(t);
  }
}

// ---- The remote commit ----

void Coordinator::BeginManifest(CheckpointId id, Turn& t) {
  const Checkpoint& checkpoint = checkpoints_.at(id);
  if (const std::string why = WhyNotTogether(checkpoint); !why.empty()) {
    checkpoints_.at(id).drain(TierKind::kRemote).phase = Drain::Phase::kWanted;
    return LoseDrain(id, TierKind::kRemote, why, t);
  }
  checkpoints_.at(id).drain(TierKind::kRemote).phase = Drain::Phase::kManifest;
  checkpoints_.at(id).drain(TierKind::kRemote).manifest_begun_unix_ms = t.time.unix_ms;
  ManifestWanted manifest;
  manifest.checkpoint = id;
  manifest.world_size = checkpoint.world_size;
  if (const auto info = attempts_.find(id.attempt); info != attempts_.end()) {
    manifest.opening = info->second.opening;
  }
  std::map<Attempt, AttemptParent> parents;
  for (const auto& [number, info] : attempts_) {
    parents[number] = {info.decided, info.parent};
  }
  manifest.descent = LineOf(parents, id.attempt, kLineMax);
  for (const auto& [rank, shard] : checkpoint.shards) {
    DurableCopy copy;
    copy.copy.id = {uuid_, id.attempt, id.step, rank};
    copy.copy.job_name = name_;
    copy.copy.world_size = checkpoint.world_size;
    copy.copy.image_bytes = shard.bytes;
    copy.copy.sealed_unix_ms = shard.unix_ms;
    copy.copy.likeness = shard.likeness;
    const CopyDetail& detail = shard.at(TierKind::kRemote).detail;
    copy.copy.layout_hash = detail.layout_hash;
    copy.record_bytes = detail.record_bytes;
    copy.record_crc = detail.record_crc;
    copy.file_bytes = detail.file_bytes;
    copy.plan = detail.plan;
    manifest.shards.push_back(std::move(copy));
  }
  t.Say(std::move(manifest));
}

void Coordinator::On(const ManifestDone& m, Turn& t) {
  const auto it = checkpoints_.find(m.checkpoint);
  if (it == checkpoints_.end() ||
      it->second.drain(TierKind::kRemote).phase != Drain::Phase::kManifest) {
    return;
  }
  Drain& drain = it->second.drain(TierKind::kRemote);
  drain.stalled.clear();
  if (!drain.unwanted.empty()) {
    EndUnwanted(m.checkpoint, TierKind::kRemote, t);
  } else if (m.status.ok() && it->second.GoodAt(TierKind::kRemote) < it->second.world_size) {
    if (NoteThere(m.checkpoint, TierKind::kRemote)) {
      Persist(t);
    }
    DrainFailed(m.checkpoint, TierKind::kRemote, WentAway(TierKind::kRemote), t);
  } else if (m.status.ok()) {
    it->second.SetManifest(true);
    drain.whole_unix_ms = t.time.unix_ms;
    Recheck(m.checkpoint, t);
    NoteStage(m.checkpoint, "manifest", drain.manifest_begun_unix_ms, t.time.unix_ms, "done", 0);
    TierCommitted(m.checkpoint, TierKind::kRemote, t);
  } else if (!m.missing.empty()) {
    WriteAgain(m, t);
  } else if (absl::IsFailedPrecondition(m.status) && m.checkpoint.attempt < attempt()) {
    // Of an attempt that is over, and that another daemon opened there: no try will ever succeed.
    drain.phase = Drain::Phase::kWanted;  // what was under way has ended
    LoseDrain(m.checkpoint, TierKind::kRemote,
              absl::StrCat("it is not this daemon's to commit (", Message(m.status), ")"), t);
  } else {
    DrainFailed(m.checkpoint, TierKind::kRemote, m.status, t);
  }
  GoOnWithSession(t);
  RetainDurable(t);
  PumpDrains(t);
  GoOnWithSession(t);  // a manifest that it waits for may not come after all
}

// Files that the manifest was to name were removed: from outside, or for an earlier host, of which
// the nodes that wrote them have not heard. They write them anew, and not from memory of having
// done so; what nobody has any more loses the step its way there.
void Coordinator::WriteAgain(const ManifestDone& m, Turn& t) {
  Checkpoint& checkpoint = checkpoints_.at(m.checkpoint);
  for (const Rank rank : m.missing) {
    if (checkpoint.shards.count(rank) > 0) {
      checkpoint.SetNone(rank, PlaceOf(TierKind::kRemote, kHere));
    }
  }
  t.Say(FlushUnwanted{m.checkpoint, TierKind::kRemote}, kEveryNode);
  Recheck(m.checkpoint, t);
  DrainFailed(m.checkpoint, TierKind::kRemote, m.status, t);
}

// True if it is newer than what the job's state says of that tier: the caller persists it. Who is
// told of it may lose the power next, and then find that tier unreadable; that the step lies there
// must be known all the same.
bool Coordinator::NoteThere(CheckpointId id, TierKind tier) {
  const auto info = attempts_.find(id.attempt);
  if (info == attempts_.end() || tier == TierKind::kPeer) {
    return false;
  }
  std::optional<Step>& last =
      tier == TierKind::kNvme ? info->second.last_nvme_step : info->second.last_remote_step;
  if (last && *last >= id.step) {
    return false;
  }
  last = id.step;
  on_disk_version_ = version_ + 1;
  return true;
}

void Coordinator::TierCommitted(CheckpointId id, TierKind tier, Turn& t) {
  Checkpoint& checkpoint = checkpoints_.at(id);
  Drain& drain = checkpoint.drain(tier);
  drain.phase = Drain::Phase::kNone;
  drain.problem.clear();
  drain.shed.clear();
  drain.not_from_nvme.clear();
  if (NoteThere(id, tier)) {
    Persist(t);  // that there is something must be known even while the tier cannot be read
  }
  NoteStage(id, Name(tier), drain.begun_unix_ms, t.time.unix_ms, "done", checkpoint.bytes);
  Tell(Report::Kind::kTierCommitted,
       absl::StrCat("step ", id.step, " of attempt ", id.attempt, " is whole in ", Name(tier)),
       checkpoint.bytes, t, tier);
  removals_[static_cast<size_t>(tier)].collect = true;
  AnswerAwaits(id.step, t);
  if (tier != TierKind::kPeer) {
    ForgetGone(id, t);
  }
}

// ---- Times ----

void Coordinator::NoteStage(CheckpointId id, const std::string& stage, int64_t begin_ms,
                            int64_t end_ms, const std::string& outcome, uint64_t bytes) {
  const auto checkpoint = checkpoints_.find(id);
  Times& times = times_[id];
  if (checkpoint != checkpoints_.end()) {
    times.bytes = checkpoint->second.bytes;
    times.world_size = checkpoint->second.world_size;
  }
  times.stages.push_back({stage, begin_ms, end_ms, outcome, bytes});
  if (times.stages.size() > kStagesMax) {  // replicas are made again and again
    times.stages.erase(times.stages.begin());
  }
  if (times_.size() > kTimelineMax) {
    times_.erase(times_.begin());
  }
}

}  // namespace holdfast
