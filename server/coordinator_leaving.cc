// Nodes that are being drained (ckptctl drain): what lies there alone gets elsewhere, and nothing
// new there (docs/protocol.md §23).
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/coordinator.h"

namespace holdfast {
namespace {

bool HasCopyOn(const ShardState& shard, NodeId node, bool also_out_of_reach) {
  return std::any_of(shard.copies.begin(), shard.copies.end(), [&](const auto& copy) {
    const CopyState::Kind kind = copy.state.kind;
    return copy.place.node == node && copy.place.tier != TierKind::kRemote &&
           (kind == CopyState::Kind::kGood ||
            (also_out_of_reach && kind == CopyState::Kind::kAway));
  });
}

}  // namespace

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

// The newest committed step, and what is pinned, get to where they outlive the nodes that go.
void Coordinator::Rescue(Turn& t) {
  const auto* newest = NewestCommitted();
  if (leaving_.empty() || newest == nullptr || removed_) {
    return;
  }
  std::vector<CheckpointId> wanted;
  for (const auto& [id, checkpoint] : checkpoints_) {
    if ((id == newest->first || (checkpoint.committed && Pinned(id))) &&
        checkpoint.drain(TierKind::kRemote).phase == Drain::Phase::kNone &&
        !IsGoing(id, TierKind::kRemote) && AnyLiesOnLeaving(checkpoint)) {
      wanted.push_back(id);
    }
  }
  if (GoesToRemoteAtAll() && Inventory(TierKind::kRemote).kind == InventoryState::Kind::kKnown) {
    for (const CheckpointId& id : wanted) {
      if (id == newest->first) {
        Want(id, TierKind::kRemote, t);
      } else {
        BeginWanting(id, TierKind::kRemote);
      }
    }
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

// Whether what the node has may turn out to be the newest step: together with what other nodes have
// that are not there now, or on drives of its own that have not been read.
std::string Coordinator::NotKnownOf(NodeId node) const {
  const auto* newest = NewestCommitted();
  for (auto it = checkpoints_.rbegin(); it != checkpoints_.rend(); ++it) {
    const auto& [id, checkpoint] = *it;
    if (newest != nullptr && id <= newest->first) {
      break;
    }
    const bool may_be_whole =
        OnLine(line_, id) && (checkpoint.cut_off || (checkpoint.Open() && id.attempt < attempt()));
    const bool here =
        std::any_of(checkpoint.shards.begin(), checkpoint.shards.end(),
                    [&](const auto& shard) { return HasCopyOn(shard.second, node, true); });
    if (may_be_whole && here) {
      const std::string away = NamesOf(missing_.empty() ? unheard_ : missing_);
      return absl::StrCat("step ", id.step, " has copies there, and it cannot be told now whether ",
                          "it is whole without them",
                          away.empty() ? "" : absl::StrCat(": out of reach is ", away));
    }
  }
  if (Configured(TierKind::kNvme) && nvme_on_.MayHaveMore(node)) {
    return "its drives may hold a newer step, and have not all been read";
  }
  return "";
}

v1::Leaving Coordinator::LeavingState(NodeId node) const {
  v1::Leaving state;
  state.set_node(settings_.nodes->Name(node));
  const std::set<Rank>& ranks = members_.OnNode(node);
  state.set_ranks(static_cast<uint32_t>(std::count_if(
      ranks.begin(), ranks.end(), [&](Rank rank) { return members_.Find(rank)->alive; })));
  state.set_not_known(NotKnownOf(node));
  const auto* newest = NewestCommitted();
  if (newest == nullptr) {
    return state;
  }
  const auto alone = [&](const Checkpoint& checkpoint, const auto& of_rank) {
    return HasCopyOn(of_rank.second, node, false) && LiesOnLeaving(checkpoint, of_rank.first);
  };
  state.set_step(newest->first.step);
  for (const auto& [id, checkpoint] : checkpoints_) {
    for (const auto& shard : checkpoint.shards) {
      if (id == newest->first && alone(checkpoint, shard)) {
        state.set_shards_left(state.shards_left() + 1);
        state.set_bytes_left(state.bytes_left() + shard.second.bytes);
      } else if (checkpoint.committed && Pinned(id) && alone(checkpoint, shard)) {
        state.add_pinned(id.step);
        break;
      }
    }
  }
  if (state.shards_left() > 0) {
    state.set_problem(WhyNotElsewhere(newest->second));
  } else if (state.pinned_size() > 0 && !GoesToRemoteAtAll()) {
    state.set_problem(absl::StrCat("the job keeps nothing in remote: ckptctl set ", name_,
                                   " remote.every_steps=N, or ckptctl unpin"));
  }
  return state;
}

}  // namespace holdfast
