// How wanted regions are made up of those that there are. For recovery/reshard.cc and its tests.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "tiers/image/region.h"

namespace holdfast::reshard_internal {

// A region of some part; those of one part share no elements.
struct Candidate {
  uint32_t part = 0;
  Region region;
};

// The first pair found that shares elements: indices of `candidates`.
std::optional<std::pair<size_t, size_t>> AnyMeeting(std::span<const Candidate> candidates);

struct Cover {
  // Elements that two parts have: `other` is not used for them.
  struct Twice {
    uint32_t part = 0;
    uint32_t other = 0;
    Region region;
  };
  std::vector<Candidate> pieces;  // disjoint
  std::vector<Twice> twice;
  std::vector<Region> gaps;  // disjoint; what no candidate has
  bool too_many = false;     // more pieces, gaps or overlaps than `most`: the rest is void
};

// `wanted`: disjoint. `candidates`: all within it; of elements that several have the first one is
// used.
Cover CoverOf(std::span<const Region> wanted, std::span<const Candidate> candidates, size_t most);

}  // namespace holdfast::reshard_internal
