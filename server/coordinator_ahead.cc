// What a rank will ask for is on its way before the others have come: a rank that comes up where
// its shard does not lie in memory gets it from its peers' (docs/protocol.md §19).
#include "server/coordinator.h"

namespace holdfast {

// Best effort, and once: the session asks again for what has not come. Only from memory: what tiers
// have takes its time, and may not be what the session chooses when all have been read.
void Coordinator::FetchAhead(Rank rank, Turn& t) {
  const AttemptInfo& info = attempts_.rbegin()->second;
  if (info.decided || restore_point_.set() || !Configured(TierKind::kPeer)) {
    return;
  }
  const std::vector<CheckpointId> committed = CommittedOnLine();
  const NodeId node = SeatOf(rank);
  if (committed.empty() || missing_.count(node) > 0) {
    return;
  }
  const Checkpoint& checkpoint = checkpoints_.at(committed.front());
  const auto shard = checkpoint.shards.find(rank);
  if (checkpoint.contradictory || checkpoint.world_size != info.world_size ||
      shard == checkpoint.shards.end() ||
      NearestFor(checkpoint, rank, node, {}) != TierKind::kPeer) {
    return;
  }
  const std::vector<NodeId> peers = checkpoint.PeersWith(rank, node);
  if (peers.empty() || peers.front() == node) {
    return;  // (it keeps the replica itself, which becomes the rank's own)
  }
  if (ahead_ && *ahead_ != committed.front()) {
    EndFetchAhead(t);
  }
  ahead_ = committed.front();
  ahead_nodes_.insert(node);
  PrefetchWanted wanted;
  wanted.checkpoint = *ahead_;
  wanted.world_size = checkpoint.world_size;
  wanted.shards.push_back(
      {rank, TierKind::kPeer, shard->second.bytes, settings_.nodes->Name(peers.front())});
  t.Say(std::move(wanted), node);
}

// The session has got what it wanted, or there is another attempt.
void Coordinator::EndFetchAhead(Turn& t) {
  for (const NodeId node : ahead_nodes_) {
    t.Say(PrefetchUnwanted{*ahead_}, node);
  }
  ahead_.reset();
  ahead_nodes_.clear();
}

}  // namespace holdfast
