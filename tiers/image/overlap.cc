// Which slices of one tensor share elements. Slices of one name are neighbours in image order, so
// each group is looked at alone. Within a group, whole tensors and boxes are boxes (region.h), flat
// ranges are intervals of the row-major order; candidates come from sweeping over intervals, and
// each is then checked exactly.
#include <algorithm>
#include <array>
#include <optional>
#include <span>

#include "tiers/image/layout.h"
#include "tiers/image/region.h"

namespace holdfast {
namespace {

using IndexPairs = std::vector<std::pair<uint32_t, uint32_t>>;

struct Interval {
  uint64_t begin = 0;
  uint64_t end = 0;  // not empty: begin < end
  uint32_t slice = 0;
};

// The slices of one tensor that have elements.
struct Group {
  std::vector<uint64_t> shape;  // the tensor's
  std::vector<Region> boxes;
  std::vector<uint32_t> box_slices;  // whose they are
  std::vector<Interval> flats;
};

void SortByBegin(std::vector<Interval>& intervals) {
  std::sort(intervals.begin(), intervals.end(),
            [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
}

// Calls `meet` for every earlier interval that `next` shares a point with; forgets those that
// ended.
template <class Meet>
void MeetActive(std::vector<const Interval*>& active, const Interval& next, const Meet& meet) {
  size_t kept = 0;
  for (const Interval* earlier : active) {
    if (earlier->end > next.begin) {
      active[kept++] = earlier;
      meet(*earlier);
    }
  }
  active.resize(kept);
}

// All pairs of `intervals` (sorted by begin) that meet.
template <class Meet>
void SweepPairs(std::span<const Interval> intervals, const Meet& meet) {
  std::vector<const Interval*> active;
  for (const Interval& next : intervals) {
    MeetActive(active, next, [&](const Interval& earlier) { meet(earlier.slice, next.slice); });
    active.push_back(&next);
  }
}

// All pairs of one from `a` and one from `b` (each sorted by begin) that meet; meet gets the index
// in `a` first.
template <class Meet>
void SweepBetween(std::span<const Interval> a, std::span<const Interval> b, const Meet& meet) {
  std::vector<const Interval*> active_a;
  std::vector<const Interval*> active_b;
  size_t i = 0;
  size_t j = 0;
  while (i < a.size() || j < b.size()) {
    if (j == b.size() || (i < a.size() && a[i].begin <= b[j].begin)) {
      MeetActive(active_b, a[i], [&](const Interval& other) { meet(a[i].slice, other); });
      active_a.push_back(&a[i++]);
    } else {
      MeetActive(active_a, b[j], [&](const Interval& other) { meet(other.slice, b[j]); });
      active_b.push_back(&b[j++]);
    }
  }
}

void AddPair(uint32_t a, uint32_t b, IndexPairs& out) {
  out.emplace_back(std::min(a, b), std::max(a, b));
}

uint64_t LinearIndex(std::span<const uint64_t> shape, std::span<const uint64_t> position) {
  uint64_t index = 0;
  for (size_t d = 0; d < shape.size(); ++d) {
    index = index * shape[d] + position[d];
  }
  return index;
}

// From the first to just after the last element of the box, in row-major order.
Interval Hull(const Group& group, uint32_t box_index) {
  const Region& box = group.boxes[box_index];
  Dims last = box.offset;
  for (size_t d = 0; d < last.size(); ++d) {
    last[d] += box.shape[d] - 1;
  }
  return {LinearIndex(group.shape, box.offset), LinearIndex(group.shape, last) + 1, box_index};
}

// The first element of the box at or after `index` in row-major order, as a linear index.
std::optional<uint64_t> FirstInBoxFrom(const Group& group, const Region& box, uint64_t index) {
  const size_t dimensions = group.shape.size();
  const auto end = [&](size_t d) { return box.offset[d] + box.shape[d]; };
  std::array<uint64_t, kDimensionsMax> position{};
  for (size_t d = dimensions; d-- > 0;) {
    position[d] = index % group.shape[d];
    index /= group.shape[d];
  }
  for (size_t d = 0; d < dimensions; ++d) {
    if (position[d] >= box.offset[d] && position[d] < end(d)) {
      continue;
    }
    size_t reset = d;  // from here on, the box's first position
    if (position[d] >= end(d)) {
      // Past the box in this dimension: carry into the nearest earlier one that has room.
      while (reset > 0 && position[reset - 1] + 1 >= end(reset - 1)) {
        --reset;
      }
      if (reset == 0) {
        return std::nullopt;
      }
      ++position[reset - 1];
    }
    std::copy(box.offset.begin() + static_cast<ptrdiff_t>(reset), box.offset.end(),
              position.begin() + static_cast<ptrdiff_t>(reset));
    break;
  }
  return LinearIndex(group.shape, std::span(position.data(), dimensions));
}

void OverlapBoxesAndFlats(const Group& group, IndexPairs& out) {
  std::vector<Interval> hulls;
  hulls.reserve(group.boxes.size());
  for (uint32_t i = 0; i < group.boxes.size(); ++i) {
    hulls.push_back(Hull(group, i));
  }
  SortByBegin(hulls);
  SweepBetween(hulls, group.flats, [&](uint32_t box_index, const Interval& flat) {
    const std::optional<uint64_t> first = FirstInBoxFrom(group, group.boxes[box_index], flat.begin);
    if (first.has_value() && *first < flat.end) {
      AddPair(group.box_slices[box_index], flat.slice, out);
    }
  });
}

Group MakeGroup(const Layout& layout, uint32_t begin, uint32_t end) {
  Group group;
  group.shape = layout.slices[begin].global_shape;
  for (uint32_t i = begin; i < end; ++i) {
    const Slice& slice = layout.slices[i];
    if (slice.bytes == 0) {
      continue;
    }
    if (const auto* flat = std::get_if<FlatPlace>(&slice.place)) {
      group.flats.push_back({flat->start, flat->start + flat->length, i});
      continue;
    }
    group.boxes.push_back(RegionsOf(slice).front());
    group.box_slices.push_back(i);
  }
  SortByBegin(group.flats);
  return group;
}

}  // namespace

std::vector<std::pair<uint32_t, uint32_t>> FindOverlaps(const Layout& layout) {
  IndexPairs out;
  const auto count = static_cast<uint32_t>(layout.slices.size());
  for (uint32_t begin = 0, end = 0; begin < count; begin = end) {
    end = begin + 1;
    while (end < count && layout.slices[end].name == layout.slices[begin].name) {
      ++end;
    }
    if (end - begin > 1) {
      const Group group = MakeGroup(layout, begin, end);
      ForEachMeeting(group.boxes, [&](uint32_t a, uint32_t b) {
        AddPair(group.box_slices[a], group.box_slices[b], out);
        return true;
      });
      OverlapBoxesAndFlats(group, out);
      SweepPairs(group.flats, [&](uint32_t a, uint32_t b) { AddPair(a, b, out); });
    }
  }
  std::sort(out.begin(), out.end());
  return out;
}

}  // namespace holdfast
