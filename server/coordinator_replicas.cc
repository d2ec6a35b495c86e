// Copies of a checkpoint in the memory of other nodes (docs/protocol.md §19): which node keeps
// whose shards, what is made anew when nodes go. The nodes read what they are asked to keep from
// where it lies (agent_replicas.cc).
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/coordinator.h"

namespace holdfast {

namespace {

// Or may have: out of reach, not bad.
bool HasInMemory(const ShardState& shard, NodeId node) {
  return std::any_of(shard.copies.begin(), shard.copies.end(), [node](const auto& copy) {
    return copy.state.kind != CopyState::Kind::kBad &&
           (copy.place == CopyPlace{TierKind::kPeer, node} ||
            copy.place == CopyPlace{TierKind::kMemory, node});
  });
}

void ForgetRefusals(Drain& drain) {
  drain.full.clear();
  drain.unreadable.clear();
  drain.refusal = absl::OkStatus();
}

}  // namespace

uint32_t Coordinator::ReplicasWanted() const {
  return Configured(TierKind::kPeer) ? EffectivePolicy().replicas() : 0;
}

bool Coordinator::GoneForGood(std::optional<NodeId> node) const {
  const auto absence = node ? absent_.find(*node) : absent_.end();
  return absence != absent_.end() && absence->second.ended;
}

// Some that could be made: what lies in no memory comes there with a restore.
bool Coordinator::LacksReplicas(const Checkpoint& checkpoint) const {
  const std::map<NodeId, NodeId> stand_ins = StandIns();
  const uint32_t wanted = ReplicasWanted();
  return std::any_of(checkpoint.shards.begin(), checkpoint.shards.end(), [&](const auto& s) {
    const std::optional<NodeId> home = HomeOf(checkpoint, s.first);
    const auto stand_in = home ? stand_ins.find(*home) : stand_ins.end();
    const bool lacks =
        checkpoint.PeerCopies(s.first, leaving_) < wanted + (GoneForGood(home) ? 1 : 0) ||
        (stand_in != stand_ins.end() && !HasInMemory(s.second, stand_in->second));
    return lacks && checkpoint.InMemory(s.first);
  });
}

// Where its own copy lies: a replica must not be lost with it.
std::optional<NodeId> Coordinator::HomeOf(const Checkpoint& checkpoint, Rank rank) const {
  for (const TierKind tier : {TierKind::kMemory, TierKind::kNvme}) {
    if (const std::optional<CopyPlace> own = checkpoint.GoodPlace(rank, tier)) {
      return own->node;
    }
  }
  const Member* member = members_.Find(rank);
  return member == nullptr ? std::nullopt : std::optional(member->process.node);
}

// The keys of labels that are failure domains, coarsest first: as the nodes, by name, have them.
std::vector<std::string> Coordinator::DomainLevels() const {
  std::map<std::string, const Lender*> by_name;
  for (const auto& [node, lender] : lenders_) {
    by_name[settings_.nodes->Name(node)] = &lender;
  }
  std::vector<std::string> levels;
  for (const auto& [name, lender] : by_name) {
    for (const NodeLabel& label : lender->labels) {
      const bool known = std::find(levels.begin(), levels.end(), label.name) != levels.end();
      if (!known && levels.size() < kPlacementLevelsMax) {
        levels.push_back(label.name);
      }
    }
  }
  return levels;
}

// Its coarsest failure domain, as the number of the first node there. (Numbered when somebody asks:
// a new host hears of a thousand nodes one by one.)
NodeId Coordinator::DomainOf(NodeId node) const {
  if (domains_.empty()) {
    const std::vector<std::string> levels = DomainLevels();
    std::map<std::string, NodeId> first;
    for (const auto& [each, lender] : lenders_) {
      const std::string domain =
          levels.empty() ? "" : DomainsOf(lender.labels, std::span(levels).first(1)).front();
      domains_[each] = domain.empty() ? each : first.try_emplace(domain, each).first->second;
    }
  }
  const auto known = domains_.find(node);
  return known == domains_.end() ? node : known->second;
}

// The nodes that are to keep each rank's shard, the first one first.
std::map<Rank, Coordinator::Targets> Coordinator::ReplicaTargets(const Checkpoint& checkpoint) {
  const Drain& drain = checkpoint.drain(TierKind::kPeer);
  std::vector<PlacementNode> nodes;
  std::vector<NodeId> numbers;
  std::map<NodeId, uint32_t> places;
  const std::vector<std::string> levels = DomainLevels();
  for (const auto& [node, lender] : lenders_) {
    places[node] = static_cast<uint32_t>(nodes.size());
    numbers.push_back(node);
    PlacementNode& place = nodes.emplace_back();
    place.name = settings_.nodes->Name(node);
    // (The step before stays until this one is there.)
    const bool takes_none = drain.full.count(node) > 0 || leaving_.count(node) > 0;
    place.capacity_bytes = takes_none ? 0 : lender.lends_bytes / 2;
    place.domains = DomainsOf(lender.labels, levels);
  }
  std::map<uint32_t, std::vector<PlacementShard>> shards;  // by how many are wanted
  const uint32_t replicas = ReplicasWanted();
  std::map<Rank, Targets> targets;
  const std::map<NodeId, NodeId> stand_ins = StandIns();
  for (const auto& [rank, shard] : checkpoint.shards) {
    const std::optional<NodeId> home = HomeOf(checkpoint, rank);
    // One whose own copy is lost for good is short of that one, too.
    targets[rank].wanted = replicas + (GoneForGood(home) ? 1 : 0);
    // Where else it has copies of its own none counts: so many more nodes are named.
    const std::vector<NodeId> own = checkpoint.OwnNodes(rank);
    const auto others = std::count_if(own.begin(), own.end(), [&](NodeId node) {
      return node != home && places.count(node) > 0;
    });
    PlacementShard& wanted =
        shards[targets[rank].wanted + static_cast<uint32_t>(others)].emplace_back();
    wanted.rank = rank;
    wanted.bytes = shard.bytes;
    if (home && places.count(*home) > 0) {
      wanted.home = places.at(*home);
    }
    if (home && stand_ins.count(*home) > 0 && drain.full.count(stand_ins.at(*home)) == 0) {
      targets[rank].stand_in.push_back(stand_ins.at(*home));
      targets[rank].all.push_back(stand_ins.at(*home));  // first: the rank may come up any moment
    }
  }
  for (const auto& [count, of] : shards) {
    const absl::StatusOr<const Placement*> placement =
        placement_.For(PlacementSeed(uuid_), nodes, of, std::min(count, kPlacementReplicasMax));
    for (size_t i = 0; i < of.size() && placement.ok(); ++i) {
      const std::vector<NodeId> own = checkpoint.OwnNodes(of[i].rank);
      for (const uint32_t node : (*placement)->TargetsOf(i)) {
        if (std::find(own.begin(), own.end(), numbers[node]) == own.end()) {
          targets[of[i].rank].all.push_back(numbers[node]);
        }
      }
    }
  }
  return targets;
}

// The next copy that is to be made of it; nothing, where no node is to keep one more, or none has
// it.
std::optional<FlushWanted::Shard> Coordinator::NextReplica(const Checkpoint& checkpoint, Rank rank,
                                                           const std::vector<NodeId>& targets,
                                                           NodeId& target) const {
  const ShardState& shard = checkpoint.shards.at(rank);
  const auto next = std::find_if(targets.begin(), targets.end(),
                                 [&](NodeId node) { return !HasInMemory(shard, node); });
  if (next == targets.end()) {
    return std::nullopt;
  }
  target = *next;
  const std::vector<NodeId> sources = checkpoint.PeersWith(rank, target);
  if (sources.empty()) {
    return std::nullopt;
  }
  // From its own node, if that has it: what others keep they may be about to lose. From one that
  // could not be read from in this try only if there is no other.
  const std::set<NodeId>& unreadable = checkpoint.drain(TierKind::kPeer).unreadable;
  const auto is_own = [&](NodeId node) {
    return shard.at({TierKind::kMemory, node}).kind == CopyState::Kind::kGood;
  };
  const NodeId source = *std::min_element(sources.begin(), sources.end(), [&](NodeId a, NodeId b) {
    const auto worth = [&](NodeId node) {
      return std::pair(unreadable.count(node) > 0, !is_own(node));
    };
    return worth(a) < worth(b);
  });
  return FlushWanted::Shard{rank, is_own(source) ? TierKind::kMemory : TierKind::kPeer, shard.bytes,
                            0, settings_.nodes->Name(source)};
}

// One more copy of each shard that lacks some: those of which there is the least first, and last of
// all those that are only to be where their ranks are expected. True if any is under way now.
bool Coordinator::StartReplication(CheckpointId id, Turn& t) {
  Checkpoint& checkpoint = checkpoints_.at(id);
  Drain& drain = checkpoint.drain(TierKind::kPeer);
  const std::map<Rank, Targets> targets = ReplicaTargets(checkpoint);
  std::map<NodeId, FlushWanted> by_node;
  const auto ask = [&](Rank rank, const std::vector<NodeId>& nodes) {
    NodeId target = kHere;
    if (auto replica = NextReplica(checkpoint, rank, nodes, target)) {
      drain.waiting.Set(rank, {replica->from, target});
      by_node[target].shards.push_back(*std::move(replica));
    }
  };
  std::map<uint32_t, std::vector<Rank>> by_copies;
  for (const auto& [rank, its_targets] : targets) {
    const uint32_t copies = checkpoint.PeerCopies(rank, leaving_);
    const bool lacks = copies < its_targets.wanted;
    by_copies[lacks ? copies : UINT32_MAX].push_back(rank);
  }
  for (const auto& [copies, ranks] : by_copies) {
    for (const Rank rank : ranks) {
      ask(rank, copies < UINT32_MAX ? targets.at(rank).all : targets.at(rank).stand_in);
    }
  }
  drain.retry_at = {};
  drain.failure = absl::OkStatus();
  if (drain.begun_unix_ms == 0) {
    drain.begun_unix_ms = t.time.unix_ms;
  }
  if (by_node.empty()) {  // as many as there are nodes for; those that could not are asked again
    const absl::Status refusal = drain.refusal;
    ForgetRefusals(drain);
    if (refusal.ok() && checkpoint.CommittedAt(TierKind::kPeer)) {
      drain.phase = Drain::Phase::kNone;
      return false;
    }
    DrainFailed(id, TierKind::kPeer,
                !refusal.ok()
                    ? refusal
                    : absl::ResourceExhaustedError(
                          "no other node lends twice what its shards take (memory.peer_bytes_max), "
                          "or none that has them is in reach"),
                t);
    return false;
  }
  drain.phase = Drain::Phase::kRunning;
  for (auto& [node, flush] : by_node) {
    flush.checkpoint = id;
    flush.to = TierKind::kPeer;
    flush.world_size = checkpoint.world_size;
    t.Say(std::move(flush), node);
  }
  return true;
}

// All that were asked have answered: whole, it may still lack second copies.
void Coordinator::EndReplicationRound(CheckpointId id, Turn& t) {
  Checkpoint& checkpoint = checkpoints_.at(id);
  Drain& drain = checkpoint.drain(TierKind::kPeer);
  const absl::Status failure = drain.failure;
  if (!checkpoint.CommittedAt(TierKind::kPeer)) {
    return DrainFailed(
        id, TierKind::kPeer,
        failure.ok() ? absl::UnavailableError("not every rank has a replica yet") : failure, t);
  }
  const bool told = checkpoint.replicated;
  checkpoint.replicated = true;
  if (told) {
    drain.phase = Drain::Phase::kNone;
  } else {
    TierCommitted(id, TierKind::kPeer, t);
  }
  if (!LacksReplicas(checkpoint)) {
    ForgetRefusals(drain);
    return;
  }
  drain.phase = Drain::Phase::kWanted;
  drain.retry_at = {};
  if (!failure.ok()) {
    DrainFailed(id, TierKind::kPeer, failure, t);
  }
}

// Nobody waits for it: it was asked for before its node, or this coordinator, came anew, or is not
// wanted any more.
void Coordinator::TakeLateReplica(const ShardDrained& m, Turn& t) {
  if (!m.status.ok()) {
    return;
  }
  const auto known = checkpoints_.find(m.checkpoint);
  if (known == checkpoints_.end() && (!missing_.empty() || !unheard_.empty())) {
    // Who has the rest of that step has not been heard by this host yet.
    return TakeShards({FoundShard{m.copy.copy, std::nullopt, true}}, t);
  }
  const bool counts = known != checkpoints_.end() && known->second.shards.count(m.rank) > 0 &&
                      known->second.drain(m.to).unwanted.empty() && !IsGoing(m.checkpoint, m.to);
  if (!counts) {
    t.Say(RemovalWanted{m.checkpoint, m.to, m.copy.copy.world_size}, t.from);
    return;
  }
  known->second.SetGood(m.rank, {m.to, t.from}, DetailOf(m.copy));
  Recheck(m.checkpoint, t);
}

void Coordinator::On(const ReplicasDropped& m, Turn& t) {
  const auto it = checkpoints_.find(m.checkpoint);
  if (it == checkpoints_.end()) {
    return;
  }
  uint64_t bytes = 0;
  for (const Rank rank : m.ranks) {
    const auto shard = it->second.shards.find(rank);
    if (shard != it->second.shards.end() &&
        shard->second.at({TierKind::kPeer, t.from}).kind != CopyState::Kind::kNone) {
      bytes += shard->second.bytes;
      it->second.SetNone(rank, {TierKind::kPeer, t.from});
    }
  }
  Tell(Report::Kind::kTierTrouble,
       absl::StrCat(settings_.nodes->Name(t.from), " keeps ", m.ranks.size(),
                    m.ranks.size() == 1 ? " replica" : " replicas", " of step ", m.checkpoint.step,
                    " no longer: ", m.why),
       bytes, t, TierKind::kPeer);
  it->second.drain(TierKind::kPeer).full.insert(t.from);
  Recheck(m.checkpoint, t);
  EraseIfGone(m.checkpoint,
              {absl::StatusCode::kAborted, v1::Failure::REASON_SHED,
               absl::StrCat("the last copies of step ", m.checkpoint.step, " were on ",
                            settings_.nodes->Name(t.from), ", which needed the memory")},
              t);
  ReplicateAgain(t);
}

// All of them go, but where nothing else has a shard any more.
void Coordinator::DropReplicas(const std::string& why, Turn& t) {
  for (const CheckpointId& id : AllCheckpoints()) {
    const auto it = checkpoints_.find(id);
    if (it == checkpoints_.end()) {
      continue;
    }
    Checkpoint& checkpoint = it->second;
    Drain& drain = checkpoint.drain(TierKind::kPeer);
    const bool needed =
        std::any_of(checkpoint.shards.begin(), checkpoint.shards.end(), [&](const auto& s) {
          return checkpoint.PeerCopies(s.first) > 0 &&
                 !checkpoint.Readable(s.first, TierKind::kMemory) &&
                 !checkpoint.Readable(s.first, TierKind::kNvme) &&
                 !checkpoint.Readable(s.first, TierKind::kRemote);
        });
    if (needed || IsGoing(id, TierKind::kPeer)) {
      continue;
    }
    Unwant(id, TierKind::kPeer, why, t);
    drain.decided = true;
    if (checkpoint.AnyAt(TierKind::kPeer) || drain.Busy()) {
      RemovalsOf(TierKind::kPeer).waiting.push_back(TakeFrom(id, TierKind::kPeer, t));
    }
    if (id.attempt == attempt()) {
      AnswerAwaits(id.step, t);
    }
  }
}

// What the cluster cannot give of what is wanted, for people; empty when it can.
std::string Coordinator::WhyFewerReplicas() const {
  const auto lend =
      static_cast<uint32_t>(std::count_if(lenders_.begin(), lenders_.end(), [](const auto& each) {
        return each.second.lends_bytes > 0;
      }));
  const uint32_t wanted = ReplicasWanted();
  return wanted < lend || wanted == 0 ? ""
         : lend == 0
             ? "; no node lends memory now"
             : absl::StrCat("; ", lend, lend == 1 ? " node lends" : " nodes lend",
                            " memory now, perhaps a shard's own among them: until more do, each "
                            "has as many replicas as there are others");
}

// Nodes came or went, or lost replicas: the newest step on the line gets what it lacks.
void Coordinator::ReplicateAgain(Turn& t) {
  if (ReplicasWanted() == 0 || removed_) {
    return;
  }
  for (auto it = checkpoints_.rbegin(); it != checkpoints_.rend(); ++it) {
    auto& [id, checkpoint] = *it;
    if (!checkpoint.committed || !OnLine(line_, id)) {
      continue;
    }
    Drain& drain = checkpoint.drain(TierKind::kPeer);
    if (drain.phase == Drain::Phase::kNone && drain.unwanted.empty() &&
        !IsGoing(id, TierKind::kPeer) && LacksReplicas(checkpoint)) {
      checkpoint.replicated = checkpoint.replicated && checkpoint.CommittedAt(TierKind::kPeer);
      drain.decided = true;
      drain.shed.clear();
      drain.phase = Drain::Phase::kWanted;
      drain.retry_at = {};
      drain.backoff = {};
    } else if (drain.phase == Drain::Phase::kWanted) {
      drain.retry_at = {};
    }
    if (checkpoint.Whole()) {  // (else what the job comes back with is an earlier one)
      break;
    }
  }
  PumpDrains(t);
}

}  // namespace holdfast
