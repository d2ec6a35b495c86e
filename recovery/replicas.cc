#include "recovery/replicas.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace holdfast {
Replicas FindReplicas(std::vector<RankLikeness> ranks) {
  std::erase_if(ranks, [](const RankLikeness& one) { return !one.likeness.any(); });
  std::sort(ranks.begin(), ranks.end(), [](const RankLikeness& a, const RankLikeness& b) {
    return std::tie(a.likeness.tensors, a.likeness.content, a.rank) <
           std::tie(b.likeness.tensors, b.likeness.content, b.rank);
  });
  Replicas found;
  for (auto tensors = ranks.begin(); tensors != ranks.end();) {
    const auto tensors_end = std::find_if(tensors, ranks.end(), [&](const RankLikeness& one) {
      return one.likeness.tensors != tensors->likeness.tensors;
    });
    std::vector<std::vector<Rank>> contents;
    for (auto content = tensors; content != tensors_end;) {
      std::vector<Rank>& same = contents.emplace_back();
      const LayoutHash hash = content->likeness.content;
      for (; content != tensors_end && content->likeness.content == hash; ++content) {
        same.push_back(content->rank);
      }
      if (same.size() > 1) {
        found.groups.push_back({hash, same});
      }
    }
    if (contents.size() > 1) {
      std::sort(contents.begin(), contents.end(), [](const auto& a, const auto& b) {
        return a.size() != b.size() ? a.size() > b.size() : a.front() < b.front();
      });
      found.divergence.push_back({std::move(contents)});
    }
    tensors = tensors_end;
  }
  std::sort(found.groups.begin(), found.groups.end(),
            [](const auto& a, const auto& b) { return a.ranks.front() < b.ranks.front(); });
  const auto lowest = [](const Divergence& divergence) {
    Rank rank = divergence.contents.front().front();
    for (const std::vector<Rank>& content : divergence.contents) {
      rank = std::min(rank, content.front());
    }
    return rank;
  };
  std::sort(found.divergence.begin(), found.divergence.end(),
            [&](const auto& a, const auto& b) { return lowest(a) < lowest(b); });
  return found;
}

std::optional<std::vector<RankRun>> RunsOf(std::span<const Rank> ranks) {
  std::vector<RankRun> runs;
  for (const Rank rank : ranks) {
    if (!runs.empty()) {
      RankRun& last = runs.back();
      if (last.count == 1) {
        last.stride = rank - last.first;
        ++last.count;
        continue;
      }
      if (rank == last.first + last.stride * last.count) {
        ++last.count;
        continue;
      }
    }
    if (runs.size() == kRankRunsMax) {
      return std::nullopt;
    }
    runs.push_back({rank, 1, 1});
  }
  return runs;
}

std::optional<std::vector<Rank>> RanksOf(std::span<const RankRun> runs, uint32_t world_size) {
  std::vector<Rank> ranks;
  uint64_t least = 0;  // that the next one may be
  for (const RankRun& run : runs) {
    const uint64_t last = uint64_t{run.first} + uint64_t{run.stride} * (uint64_t{run.count} - 1);
    if (run.count == 0 || run.stride == 0 || run.count > world_size || run.first < least ||
        last >= world_size) {
      return std::nullopt;
    }
    for (uint32_t i = 0; i < run.count; ++i) {
      ranks.push_back(run.first + run.stride * i);
    }
    least = last + 1;
  }
  return ranks;
}

}  // namespace holdfast
