// Nodes that are being drained (ckptctl drain): what lies there alone gets elsewhere, and nothing
// new there (docs/protocol.md §23).
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/coordinator.h"

namespace holdfast {

void Coordinator::On(const NodeLeaving& m, Turn& t) {
  m.leaving ? void(leaving_.insert(t.from)) : void(leaving_.erase(t.from));
  Rescue(t);
}

const std::pair<const CheckpointId, Checkpoint>* Coordinator::NewestCommitted() const {
  const auto newest = std::find_if(
      checkpoints_.rbegin(), checkpoints_.rend(),
      [&](const auto& each) { return each.second.committed && OnLine(line_, each.first); });
  return newest == checkpoints_.rend() ? nullptr : &*newest;
}

// No other node has it, and remote does not.
bool Coordinator::LiesOnLeaving(const Checkpoint& checkpoint, Rank rank) const {
  const std::vector<ShardState::Copy>& copies = checkpoint.shards.at(rank).copies;
  return !checkpoint.Readable(rank, TierKind::kRemote) &&
         std::none_of(copies.begin(), copies.end(), [&](const ShardState::Copy& copy) {
           return copy.state.kind == CopyState::Kind::kGood &&
                  copy.place.tier != TierKind::kRemote && leaving_.count(copy.place.node) == 0;
         });
}

bool Coordinator::AnyLiesOnLeaving(const Checkpoint& checkpoint) const {
  return !leaving_.empty() &&
         std::any_of(checkpoint.shards.begin(), checkpoint.shards.end(),
                     [&](const auto& shard) { return LiesOnLeaving(checkpoint, shard.first); });
}

bool Coordinator::GoesToRemoteAtAll() const {
  const v1::Policy policy = EffectivePolicy();
  return Configured(TierKind::kRemote) &&
         (policy.remote().every_steps() > 0 || policy.remote().every_ms() > 0);
}

// The newest committed step gets to where it outlives the nodes that go.
void Coordinator::Rescue(Turn& t) {
  const auto* newest = NewestCommitted();
  if (leaving_.empty() || newest == nullptr || removed_) {
    return;
  }
  const auto& [id, checkpoint] = *newest;
  const Drain& drain = checkpoint.drain(TierKind::kRemote);
  if (GoesToRemoteAtAll() && Inventory(TierKind::kRemote).kind == InventoryState::Kind::kKnown &&
      drain.phase == Drain::Phase::kNone && !IsGoing(id, TierKind::kRemote) &&
      AnyLiesOnLeaving(checkpoint)) {
    Want(id, TierKind::kRemote, t);
  }
  ReplicateAgain(t);
  PumpDrains(t);
}

// What keeps its shards from getting elsewhere; empty: nothing, they are on their way.
std::string Coordinator::WhyNotElsewhere(const Checkpoint& checkpoint) const {
  if (!GoesToRemoteAtAll() && ReplicasWanted() == 0) {
    return absl::StrCat("the job keeps nothing in remote, and no replicas: ckptctl set ", name_,
                        " replicas=1");
  }
  const Drain& peer = checkpoint.drain(TierKind::kPeer);
  const Drain& remote = checkpoint.drain(TierKind::kRemote);
  if (peer.phase == Drain::Phase::kNone && remote.phase == Drain::Phase::kNone) {
    return "no node that stays lends memory for them (memory.peer_bytes_max)";
  }
  return absl::StrCat(remote.problem, remote.problem.empty() || peer.problem.empty() ? "" : "; ",
                      peer.problem);
}

v1::Leaving Coordinator::LeavingState(NodeId node) const {
  v1::Leaving state;
  state.set_node(settings_.nodes->Name(node));
  const std::set<Rank>& ranks = members_.OnNode(node);
  state.set_ranks(static_cast<uint32_t>(std::count_if(
      ranks.begin(), ranks.end(), [&](Rank rank) { return members_.Find(rank)->alive; })));
  const auto* newest = NewestCommitted();
  if (newest == nullptr) {
    return state;
  }
  const auto& [id, checkpoint] = *newest;
  state.set_step(id.step);
  for (const auto& [rank, shard] : checkpoint.shards) {
    const bool here = std::any_of(shard.copies.begin(), shard.copies.end(), [&](const auto& copy) {
      return copy.place.node == node && copy.place.tier != TierKind::kRemote &&
             copy.state.kind == CopyState::Kind::kGood;
    });
    if (here && LiesOnLeaving(checkpoint, rank)) {
      state.set_shards_left(state.shards_left() + 1);
      state.set_bytes_left(state.bytes_left() + shard.bytes);
    }
  }
  if (state.shards_left() > 0) {
    state.set_problem(WhyNotElsewhere(checkpoint));
  }
  return state;
}

}  // namespace holdfast
