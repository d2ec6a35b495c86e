#include "server/flush_queue.h"

#include <algorithm>
#include <map>

namespace holdfast {
namespace {

// A part of a flush names its own groups: the others mean nothing there.
void KeepNamedGroups(FlushWanted& flush) {
  std::vector<FlushWanted::Group> named;
  std::map<uint32_t, uint32_t> renumbered{{0, 0}};
  for (FlushWanted::Shard& shard : flush.shards) {
    const auto [number, fresh] = renumbered.try_emplace(shard.group, named.size() + 1);
    if (fresh) {
      named.push_back(std::move(flush.groups[shard.group - 1]));
    }
    shard.group = number->second;
  }
  flush.groups = std::move(named);
}

}  // namespace

void FlushQueue::Add(NodeId node, FlushWanted flush) {
  if (!flush.shards.empty()) {
    size_ += flush.shards.size();
    flushes_.emplace(node, std::move(flush));
  }
}

std::optional<std::pair<NodeId, FlushWanted>> FlushQueue::Take(size_t shards_max) {
  if (flushes_.empty() || shards_max == 0) {
    return std::nullopt;
  }
  const auto first = flushes_.begin();
  std::vector<FlushWanted::Shard>& shards = first->second.shards;
  std::pair<NodeId, FlushWanted> taken = *first;
  if (shards.size() <= shards_max) {
    flushes_.erase(first);
  } else {
    const auto rest = shards.begin() + static_cast<std::ptrdiff_t>(shards_max);
    taken.second.shards.assign(shards.begin(), rest);
    shards.erase(shards.begin(), rest);
    KeepNamedGroups(taken.second);
    KeepNamedGroups(first->second);
  }
  size_ -= taken.second.shards.size();
  return taken;
}

void FlushQueue::Drop(NodeId node, Rank rank) {
  const auto flush = flushes_.find(node);
  if (flush == flushes_.end()) {
    return;
  }
  size_ -= std::erase_if(flush->second.shards,
                         [rank](const FlushWanted::Shard& shard) { return shard.rank == rank; });
  if (flush->second.shards.empty()) {
    flushes_.erase(flush);
  } else {
    KeepNamedGroups(flush->second);
  }
}

std::vector<Rank> FlushQueue::Clear() {
  std::vector<Rank> ranks;
  for (const auto& [node, flush] : flushes_) {
    for (const FlushWanted::Shard& shard : flush.shards) {
      ranks.push_back(shard.rank);
    }
  }
  flushes_.clear();
  size_ = 0;
  return ranks;
}

}  // namespace holdfast
