#include <algorithm>

#include "recovery/reshard_internal.h"

namespace holdfast::reshard_internal {
namespace {

std::vector<Region> RegionsIn(std::span<const Candidate> candidates) {
  std::vector<Region> regions;
  regions.reserve(candidates.size());
  for (const Candidate& candidate : candidates) {
    regions.push_back(candidate.region);
  }
  return regions;
}

// Takes `candidate` off `open`, and calls `found` with what it has of that.
template <typename Found>
void TakeOff(std::vector<Region>& open, const Region& candidate, const Found& found) {
  std::vector<Region> left;
  left.reserve(open.size());
  for (Region& region : open) {
    std::optional<Region> both = Intersection(region, candidate);
    if (!both) {
      left.push_back(std::move(region));
      continue;
    }
    for (Region& rest : Without(region, *both)) {
      left.push_back(std::move(rest));
    }
    found(std::move(*both));
  }
  open = std::move(left);
}

}  // namespace

std::optional<std::pair<size_t, size_t>> AnyMeeting(std::span<const Candidate> candidates) {
  std::optional<std::pair<size_t, size_t>> pair;
  ForEachMeeting(RegionsIn(candidates), [&](uint32_t a, uint32_t b) {
    if (candidates[a].part != candidates[b].part) {
      pair.emplace(a, b);
    }
    return !pair.has_value();
  });
  return pair;
}

Cover CoverOf(std::span<const Region> wanted, std::span<const Candidate> candidates, size_t most) {
  Cover cover;
  const auto note_twice = [&](uint32_t a, uint32_t b) {
    if (candidates[a].part != candidates[b].part) {
      cover.twice.push_back({candidates[a].part, candidates[b].part,
                             *Intersection(candidates[a].region, candidates[b].region)});
    }
    cover.too_many = cover.twice.size() > most;
    return !cover.too_many;
  };
  ForEachMeeting(RegionsIn(candidates), note_twice);
  cover.too_many = cover.too_many || candidates.size() > most;
  if (cover.too_many) {
    return cover;
  }
  uint64_t open_elements = 0;
  for (const Region& region : wanted) {
    open_elements += region.elements();
  }
  if (cover.twice.empty()) {  // as nearly always: then counting is enough
    for (const Candidate& candidate : candidates) {
      open_elements -= candidate.region.elements();
    }
    cover.pieces.assign(candidates.begin(), candidates.end());
    if (open_elements == 0) {
      return cover;
    }
    cover.pieces.clear();
  }
  std::vector<Region> open(wanted.begin(), wanted.end());
  for (const Candidate& candidate : candidates) {
    TakeOff(open, candidate.region, [&](Region piece) {
      cover.pieces.push_back({candidate.part, std::move(piece)});
    });
    if (cover.pieces.size() + open.size() > most) {
      cover.too_many = true;
      return cover;
    }
  }
  cover.gaps = std::move(open);
  return cover;
}

}  // namespace holdfast::reshard_internal
