// The restore point on its way into the memory of the nodes where its ranks run, or ran last, ahead
// of the restore (docs/protocol.md §10). Best effort: nobody waits for it, and nothing is given up
// for its sake.
#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "server/coordinator.h"

namespace holdfast {

void Coordinator::BeginPrefetch(Turn& t) {
  if (restore_point_.set() && !restore_point_.from_scratch()) {
    prefetch_.emplace(CheckpointId{restore_point_.attempt(), restore_point_.step()});
    AdvancePrefetch(t);
  }
}

void Coordinator::EndPrefetch(Turn& t) {
  if (!prefetch_) {
    return;
  }
  std::set<NodeId> asked;
  for (const auto& [rank, shard] : prefetch_->shards) {
    if (shard.asked) {
      asked.insert(shard.node);
    }
  }
  for (const NodeId node : asked) {
    t.Say(PrefetchUnwanted{prefetch_->checkpoint}, node);
  }
  prefetch_.reset();
}

// The node that the rank runs on, or ran on last; of those that nobody remembers, one where it left
// something of the step.
std::optional<NodeId> Coordinator::LastSeatOf(const Checkpoint& checkpoint, Rank rank) const {
  if (const Member* member = members_.Find(rank)) {
    return member->process.node;
  }
  if (!settings_.nodes->Several()) {
    return kHere;
  }
  const auto shard = checkpoint.shards.find(rank);
  for (const ShardState::Copy& copy : shard->second.copies) {
    if (copy.place.tier != TierKind::kRemote) {
      return copy.place.node;
    }
  }
  return std::nullopt;
}

// Whether what is being said may change what there is to ask for.
void Coordinator::LookForPrefetch(const ToCoordinator& message, NodeId from) {
  if (!prefetch_) {
    return;
  }
  const bool came = std::holds_alternative<NodeArrived>(message);
  if (came || std::holds_alternative<NodeLeft>(message)) {
    // What it was asked for may be lost with its channel, and its memory with its daemon.
    for (auto& [rank, shard] : prefetch_->shards) {
      if (shard.node == from) {
        shard.asked = false;
        shard.done = shard.done && !came;
      }
    }
  }
  prefetch_->look = prefetch_->look || came || std::holds_alternative<NodeLeft>(message) ||
                    std::holds_alternative<CopiesFound>(message) ||
                    std::holds_alternative<ManifestDone>(message);
}

void Coordinator::AdvancePrefetch(Turn& t) {
  if (!prefetch_ || prefetch_->over || removed_) {
    return;
  }
  Prefetch& prefetch = *prefetch_;
  if (!prefetch.until) {
    prefetch.until = t.time.now + kPrefetchDeadline;
  }
  if (*prefetch.until <= t.time.now) {  // (the nodes know by themselves)
    prefetch.over = true;
    for (auto& [rank, shard] : prefetch.shards) {
      shard.asked = false;
    }
    return;
  }
  if (prefetch.retry && *prefetch.retry <= t.time.now) {
    prefetch.retry.reset();  // (a time that has come must not be waited for again)
    prefetch.look = true;
  }
  // Each look goes through the ranks, and a new host hears of a thousand nodes one by one.
  const MonotonicTime next_look = prefetch.looked_at + kPrefetchLook;
  if (prefetch.look && world_size() > kPrefetchFewRanks && t.time.now < next_look) {
    prefetch.retry = std::min(prefetch.retry.value_or(next_look), next_look);
    return;
  }
  const auto found = checkpoints_.find(prefetch.checkpoint);
  if (!prefetch.look || found == checkpoints_.end() || found->second.world_size != world_size()) {
    return;
  }
  prefetch.look = false;
  prefetch.looked_at = t.time.now;
  prefetch.retry.reset();
  const Checkpoint& checkpoint = found->second;
  std::map<NodeId, PrefetchWanted> wanted;
  for (const auto& [rank, there] : checkpoint.shards) {
    Prefetch::Shard& shard = prefetch.shards[rank];
    const std::optional<NodeId> node = LastSeatOf(checkpoint, rank);
    if (shard.known && shard.node != node) {
      shard = {};  // the rank has moved
    }
    shard.known = node.has_value();
    shard.node = node.value_or(kHere);
    if (!node || shard.done || shard.asked || missing_.count(*node) > 0) {
      continue;
    }
    if (checkpoint.ReadableOn(*node, rank, TierKind::kMemory)) {
      shard.done = true;
      continue;
    }
    if (shard.retry_at > t.time.now) {
      prefetch.retry = std::min(prefetch.retry.value_or(shard.retry_at), shard.retry_at);
      continue;
    }
    const std::optional<TierKind> from = NearestFor(checkpoint, rank, *node, shard.without);
    if (!from && !shard.without.empty()) {  // all over again, later
      shard.without.clear();
      shard.retry_at = t.time.now + kPrefetchRetry;
      prefetch.retry = std::min(prefetch.retry.value_or(shard.retry_at), shard.retry_at);
    }
    if (from) {
      shard.asked = true;
      shard.from = *from;
      const std::vector<std::string> peers = *from == TierKind::kPeer
                                                 ? PeerNames(checkpoint, rank, *node)
                                                 : std::vector<std::string>{""};
      wanted[*node].shards.push_back({rank, *from, there.bytes, peers[shard.tries % peers.size()]});
      shard.last_peer = (shard.tries + 1) % peers.size() == 0;
    }
  }
  for (auto& [node, message] : wanted) {
    message.checkpoint = prefetch.checkpoint;
    message.world_size = checkpoint.world_size;
    t.Say(std::move(message), node);
  }
}

void Coordinator::On(const PrefetchEnded& m, Turn& t) {
  if (absl::IsNotFound(m.status) && m.from != TierKind::kPeer) {
    On(ShardBad{m.checkpoint, m.rank, Message(m.status), m.from}, t);
  }
  if (!prefetch_ || prefetch_->checkpoint != m.checkpoint) {
    return;
  }
  const auto found = prefetch_->shards.find(m.rank);
  if (found == prefetch_->shards.end() || !found->second.asked || found->second.node != t.from) {
    return;
  }
  Prefetch::Shard& shard = found->second;
  shard.asked = false;
  if (absl::IsDeadlineExceeded(m.status)) {
    return;  // so it is here, or is about to be
  }
  shard.problem = m.status.ok() ? "" : Message(m.status);
  if (m.status.ok() || absl::IsAborted(m.status)) {  // it is there, or was given up since
    shard.done = true;
  } else if (absl::IsResourceExhausted(m.status)) {
    shard.retry_at = t.time.now + kPrefetchRetry;
    prefetch_->retry = std::min(prefetch_->retry.value_or(shard.retry_at), shard.retry_at);
  } else {
    shard.problem = absl::StrCat(ToAbsl(TierName(m.from)), " copy: ", shard.problem);
    ++shard.tries;
    if (shard.last_peer) {  // else another one is asked
      shard.without.insert(m.from);
    }
    prefetch_->look = true;
  }
}

std::optional<MonotonicTime> Coordinator::PrefetchWake() const {
  if (!prefetch_ || prefetch_->over || removed_ || !prefetch_->until) {
    return std::nullopt;
  }
  return std::min(*prefetch_->until, prefetch_->retry.value_or(*prefetch_->until));
}

// "it is being brought into memory on 2 nodes; 6 of 8 ranks have it there"
v1::Prefetch Coordinator::PrefetchState() const {
  v1::Prefetch state;
  const auto found = checkpoints_.find(prefetch_->checkpoint);
  if (found == checkpoints_.end()) {
    state.set_text("it is not brought into memory ahead: none of its copies is known now");
    return state;
  }
  const Checkpoint& checkpoint = found->second;
  state.set_ranks(checkpoint.world_size);
  if (checkpoint.world_size != world_size()) {
    state.set_text(absl::StrCat("it is not brought into memory ahead: ", checkpoint.world_size,
                                " ranks have saved it, and the job has ", world_size(), " now"));
    return state;
  }
  std::set<NodeId> nodes;
  std::string problem;
  uint32_t problems = 0;
  for (const auto& [rank, there] : checkpoint.shards) {
    const auto known = prefetch_->shards.find(rank);
    const Prefetch::Shard shard =
        known == prefetch_->shards.end() ? Prefetch::Shard{} : known->second;
    if (shard.known && checkpoint.ReadableOn(shard.node, rank, TierKind::kMemory)) {
      state.set_in_memory(state.in_memory() + 1);
      continue;
    }
    if (shard.asked) {
      state.set_under_way(state.under_way() + 1);
      nodes.insert(shard.node);
      continue;
    }
    const std::string why =
        !shard.known ? "it is not known where it ran last"
        : missing_.count(shard.node) > 0
            ? absl::StrCat(settings_.nodes->Name(shard.node), " is out of reach")
        : !shard.problem.empty() ? shard.problem
        : !NearestFor(checkpoint, rank, shard.node, {})
            ? absl::StrCat("no tier that ", settings_.nodes->Name(shard.node),
                           " reaches has a good copy")
            : "";
    if (!why.empty() && problems++ == 0) {
      problem = absl::StrCat("rank ", rank, ": ", why);
    }
  }
  const std::string share =
      absl::StrCat(state.in_memory(), " of ", state.ranks(), " ranks have it there");
  state.set_text(state.in_memory() == state.ranks() ? "all ranks have it in memory"
                 : state.under_way() > 0
                     ? absl::StrCat("it is being brought into memory on ", nodes.size(),
                                    nodes.size() == 1 ? " node; " : " nodes; ", share)
                     : absl::StrCat("it is not being brought into memory now; ", share));
  if (prefetch_->over && state.in_memory() < state.ranks()) {
    absl::StrAppend(state.mutable_text(), "; the time for that, ",
                    FormatDuration(kPrefetchDeadline), ", is up");
  }
  if (problems > 0) {
    absl::StrAppend(state.mutable_text(), "; ", problem,
                    problems > 1 ? absl::StrCat(" (and ", problems - 1, " more)") : "");
  }
  return state;
}

}  // namespace holdfast
