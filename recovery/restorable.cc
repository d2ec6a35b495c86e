#include "recovery/restorable.h"

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

namespace holdfast {

std::vector<CheckpointSummary> Summarize(std::span<const ShardPresence> shards) {
  struct Gathered {
    CheckpointSummary summary;
    std::map<Rank, bool> good;
  };
  std::map<CheckpointId, Gathered> gathered;
  for (const ShardPresence& shard : shards) {
    auto [it, fresh] = gathered.try_emplace(shard.checkpoint);
    CheckpointSummary& summary = it->second.summary;
    if (fresh) {
      summary.id = shard.checkpoint;
      summary.world_size = shard.world_size;
    }
    if (shard.world_size != summary.world_size || shard.rank >= shard.world_size) {
      summary.consistent = false;
      continue;
    }
    bool& good = it->second.good[shard.rank];
    good = good || !shard.bad;
  }
  std::vector<CheckpointSummary> result;
  result.reserve(gathered.size());
  for (auto& [id, entry] : gathered) {
    for (const auto& [rank, good] : entry.good) {
      ++(good ? entry.summary.sealed : entry.summary.bad);
    }
    result.push_back(entry.summary);
  }
  return result;
}

namespace {

std::vector<CheckpointId> NewestFirst(std::vector<CheckpointId> ids) {
  // Attempts grow towards the young end of a line, so the ids' order is the line's.
  std::sort(ids.begin(), ids.end(), std::greater<>());
  return ids;
}

}  // namespace

std::vector<CheckpointId> Candidates(std::span<const CheckpointSummary> checkpoints,
                                     std::span<const Descent> line,
                                     std::optional<uint32_t> world_size) {
  std::vector<CheckpointId> result;
  for (const CheckpointSummary& checkpoint : checkpoints) {
    if (checkpoint.committed() &&
        checkpoint.world_size == world_size.value_or(checkpoint.world_size) &&
        OnLine(line, checkpoint.id)) {
      result.push_back(checkpoint.id);
    }
  }
  return NewestFirst(std::move(result));
}

std::vector<CheckpointId> Candidates(std::span<const CheckpointView> checkpoints,
                                     std::span<const Descent> line,
                                     std::optional<uint32_t> world_size) {
  std::vector<CheckpointId> result;
  for (const CheckpointView& checkpoint : checkpoints) {
    if (checkpoint.Restorable() &&
        checkpoint.world_size == world_size.value_or(checkpoint.world_size) &&
        OnLine(line, checkpoint.id)) {
      result.push_back(checkpoint.id);
    }
  }
  return NewestFirst(std::move(result));
}

}  // namespace holdfast
