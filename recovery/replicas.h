// Which ranks of a step are replicas of each other: the same tensors with the same bytes
// (docs/formats.md, "Ownership of identical slices"). Those share what they write to the remote
// tier.
//
//   const Replicas found = FindReplicas(likenesses);
//   for (const std::vector<Rank>& group : found.groups) …
//
// Pure functions, thread-safe; nothing in the answer depends on the order of the input.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/ids.h"
#include "tiers/image/record.h"

namespace holdfast {

struct RankLikeness {
  Rank rank = 0;
  Likeness likeness;
};

// Replicas that hold the same tensors, and not the same bytes.
struct Divergence {
  // By content: most ranks first, of several the lowest rank first. At least two.
  std::vector<std::vector<Rank>> contents;
};

struct Replicas {
  struct Group {
    LayoutHash content{};
    std::vector<Rank> ranks;  // ascending, at least two
  };
  std::vector<Group> groups;           // by lowest rank
  std::vector<Divergence> divergence;  // by lowest rank
};
// Each rank once. Whose likeness is not known is nobody's replica.
Replicas FindReplicas(std::vector<RankLikeness> ranks);

// Ranks as they are told: first, first + stride, … count of them.
struct RankRun {
  Rank first = 0;
  uint32_t stride = 1;  // at least 1
  uint32_t count = 1;   // at least 1
  bool operator==(const RankRun&) const = default;
};
// Replicas of a regular mesh are one run or a few. Groups of more are not told: their ranks write
// everything.
inline constexpr size_t kRankRunsMax = 64;

// `ranks` ascend. Nothing: it takes more than kRankRunsMax runs.
std::optional<std::vector<RankRun>> RunsOf(std::span<const Rank> ranks);
// Nothing: the runs do not ascend, or some rank is not below the world size.
std::optional<std::vector<Rank>> RanksOf(std::span<const RankRun> runs, uint32_t world_size);

}  // namespace holdfast
