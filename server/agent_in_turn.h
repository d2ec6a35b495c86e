// How replicas, loads and prefetches get their slots: a few at a time, in the order in which they
// were asked for. So a job that saves all the time does not keep another's from ever beginning, and
// what its host named first comes first.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "server/agent.h"

namespace holdfast {

template <typename Waiting>
void Agent::StartInTurn(const Waiting& waiting, size_t at_once,
                        void (Agent::*place)(const ShardId&)) {
  size_t under_way = 0;
  std::vector<std::pair<uint64_t, ShardId>> queue;
  for (const auto& [shard, each] : waiting) {
    under_way += each.slot ? 1 : 0;
    if (!each.slot) {
      queue.emplace_back(each.turn, shard);
    }
  }
  std::sort(queue.begin(), queue.end());
  for (const auto& [turn, shard] : queue) {
    if (under_way >= at_once) {
      return;
    }
    (this->*place)(shard);
    const auto placed = waiting.find(shard);
    under_way += placed != waiting.end() && placed->second.slot ? 1 : 0;
  }
}

}  // namespace holdfast
