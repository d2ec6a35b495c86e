#include "tiers/image/region.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace holdfast {
namespace {

uint64_t Product(std::span<const uint64_t> numbers) {
  uint64_t product = 1;
  for (const uint64_t number : numbers) {
    product *= number;
  }
  return product;
}

Dims RowMajorStrides(std::span<const uint64_t> shape) {
  Dims strides(shape.size());
  uint64_t stride = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= shape[d];
  }
  return strides;
}

// A flat range, dimension by dimension: what is left of a first row, whole rows, what there is of a
// last one.
class FlatRangeBoxes {
 public:
  FlatRangeBoxes(std::span<const uint64_t> shape, std::vector<Region>& out)
      : shape_(shape), out_(out) {
    fixed_.offset = Dims(shape.size(), 0);
    fixed_.shape = Dims(shape.begin(), shape.end());
  }

  // The elements from `begin` to just before `end` of dimensions d and later, in row-major order;
  // what comes before d is fixed.
  void Add(size_t d, uint64_t begin, uint64_t end) {
    if (begin == end) {
      return;
    }
    const uint64_t row = d < shape_.size() ? Product(shape_.subspan(d + 1)) : 1;
    if (d == shape_.size() || (begin % row == 0 && end % row == 0)) {
      AddRows(d, begin / row, end / row);
      return;
    }
    uint64_t next = begin / row;
    const uint64_t last = end / row;
    if (next == last) {
      return AddInRow(d, next, begin % row, end % row);
    }
    if (begin % row != 0) {
      AddInRow(d, next++, begin % row, row);
    }
    AddRows(d, next, last);
    AddInRow(d, last, 0, end % row);
  }

 private:
  void AddRows(size_t d, uint64_t begin, uint64_t end) {
    if (begin == end) {
      return;
    }
    Region region = fixed_;
    if (d < shape_.size()) {
      region.offset[d] = begin;
      region.shape[d] = end - begin;
    }
    out_.push_back(std::move(region));
  }
  void AddInRow(size_t d, uint64_t at, uint64_t begin, uint64_t end) {
    fixed_.offset[d] = at;
    fixed_.shape[d] = 1;
    Add(d + 1, begin, end);
    fixed_.offset[d] = 0;
    fixed_.shape[d] = shape_[d];
  }

  const std::span<const uint64_t> shape_;
  std::vector<Region>& out_;
  Region fixed_;
};

// Where a region begins and ends in one dimension.
struct Interval {
  uint64_t begin = 0;
  uint64_t end = 0;
  uint32_t region = 0;
};

std::vector<Interval> IntervalsIn(std::span<const Region> regions, size_t d) {
  std::vector<Interval> intervals;
  intervals.reserve(regions.size());
  for (uint32_t i = 0; i < regions.size(); ++i) {
    if (regions[i].elements() > 0) {
      const uint64_t begin = regions[i].offset[d];
      intervals.push_back({begin, begin + regions[i].shape[d], i});
    }
  }
  std::sort(intervals.begin(), intervals.end(),
            [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  return intervals;
}

// How many pairs of them meet; sorted by begin.
uint64_t CountMeetings(std::span<const Interval> intervals) {
  std::vector<uint64_t> ends;
  ends.reserve(intervals.size());
  for (const Interval& interval : intervals) {
    ends.push_back(interval.end);
  }
  std::sort(ends.begin(), ends.end());
  uint64_t meetings = 0;
  size_t ended = 0;
  for (size_t i = 0; i < intervals.size(); ++i) {
    while (ended < i && ends[ended] <= intervals[i].begin) {
      ++ended;
    }
    meetings += i - ended;
  }
  return meetings;
}

// In the dimension in which the fewest of them meet: a grid of any shape then costs about what it
// must.
std::vector<Interval> BestIntervals(std::span<const Region> regions, size_t dimensions) {
  std::vector<Interval> best;
  uint64_t best_meetings = 0;
  for (size_t d = 0; d < dimensions; ++d) {
    std::vector<Interval> intervals = IntervalsIn(regions, d);
    const uint64_t meetings = CountMeetings(intervals);
    if (d == 0 || meetings < best_meetings) {
      best = std::move(intervals);
      best_meetings = meetings;
    }
  }
  return best;
}

}  // namespace

void ForEachMeeting(std::span<const Region> regions,
                    const std::function<bool(uint32_t, uint32_t)>& meet) {
  if (regions.empty()) {
    return;
  }
  std::vector<Interval> intervals;
  if (regions[0].offset.empty()) {  // 0-dim: each is the one element
    for (uint32_t i = 0; i < regions.size(); ++i) {
      intervals.push_back({0, 1, i});
    }
  } else {
    intervals = BestIntervals(regions, regions[0].offset.size());
  }
  std::vector<const Interval*> active;  // earlier ones that have not ended
  for (const Interval& next : intervals) {
    std::erase_if(active, [&](const Interval* earlier) { return earlier->end <= next.begin; });
    for (const Interval* earlier : active) {
      if (Meets(regions[earlier->region], regions[next.region]) &&
          !meet(std::min(earlier->region, next.region), std::max(earlier->region, next.region))) {
        return;
      }
    }
    active.push_back(&next);
  }
}

Dims DimsOf(std::span<const uint64_t> numbers) {
  return {numbers.begin(), numbers.end()};
}

uint64_t Region::elements() const {
  return Product(shape);
}

bool Meets(const Region& a, const Region& b) {
  for (size_t d = 0; d < a.offset.size(); ++d) {
    if (a.offset[d] >= b.offset[d] + b.shape[d] || b.offset[d] >= a.offset[d] + a.shape[d]) {
      return false;
    }
  }
  return a.elements() > 0 && b.elements() > 0;
}

std::optional<Region> Intersection(const Region& a, const Region& b) {
  if (!Meets(a, b)) {
    return std::nullopt;
  }
  Region both = a;
  for (size_t d = 0; d < a.offset.size(); ++d) {
    both.offset[d] = std::max(a.offset[d], b.offset[d]);
    both.shape[d] = std::min(a.offset[d] + a.shape[d], b.offset[d] + b.shape[d]) - both.offset[d];
  }
  return both;
}

std::vector<Region> Without(const Region& from, const Region& what) {
  const std::optional<Region> both = Intersection(from, what);
  std::vector<Region> left;
  if (!both) {
    left.push_back(from);
    return left;
  }
  // Dimension by dimension: what lies before and after it, and then only what is beside it there.
  Region rest = from;
  for (size_t d = 0; d < from.offset.size(); ++d) {
    const uint64_t begin = both->offset[d];
    const uint64_t end = begin + both->shape[d];
    if (rest.offset[d] < begin) {
      left.push_back(rest);
      left.back().shape[d] = begin - rest.offset[d];
    }
    if (end < rest.offset[d] + rest.shape[d]) {
      left.push_back(rest);
      left.back().offset[d] = end;
      left.back().shape[d] = rest.offset[d] + rest.shape[d] - end;
    }
    rest.offset[d] = begin;
    rest.shape[d] = both->shape[d];
  }
  return left;
}

std::vector<Region> RegionsOf(const Slice& slice) {
  std::vector<Region> regions;
  if (const auto* flat = std::get_if<FlatPlace>(&slice.place)) {
    FlatRangeBoxes(slice.global_shape, regions).Add(0, flat->start, flat->start + flat->length);
    return regions;
  }
  Region region;
  if (const auto* box = std::get_if<BoxPlace>(&slice.place)) {
    region = {DimsOf(box->offset), DimsOf(box->shape)};
  } else {
    region = {Dims(slice.global_shape.size(), 0), DimsOf(slice.global_shape)};
  }
  if (region.elements() > 0) {
    regions.push_back(std::move(region));
  }
  return regions;
}

uint64_t ElementPlaces::Of(const Dims& position) const {
  uint64_t at = 0 - base;
  for (size_t d = 0; d < position.size(); ++d) {
    at += position[d] * strides[d];
  }
  return at;
}

ElementPlaces PlacesIn(const Slice& slice) {
  ElementPlaces places;
  if (const auto* box = std::get_if<BoxPlace>(&slice.place)) {
    places.strides = RowMajorStrides(box->shape);
    places.base = places.Of(DimsOf(box->offset));
    return places;
  }
  places.strides = RowMajorStrides(slice.global_shape);
  if (const auto* flat = std::get_if<FlatPlace>(&slice.place)) {
    places.base = flat->start;
  }
  return places;
}

uint64_t StridedCopy::runs() const {
  uint64_t product = 1;
  for (const Loop& loop : loops) {
    product *= loop.count;
  }
  return product;
}

StridedCopy CopyOf(const Region& region, const ElementPlaces& from, const ElementPlaces& to) {
  StridedCopy copy;
  copy.from = from.Of(region.offset);
  copy.to = to.Of(region.offset);
  copy.run = 1;
  absl::InlinedVector<StridedCopy::Loop, 4> inner_first;
  for (size_t d = region.shape.size(); d-- > 0;) {
    const StridedCopy::Loop loop{region.shape[d], from.strides[d], to.strides[d]};
    if (loop.count == 1) {
      continue;
    }
    if (inner_first.empty() && loop.from_stride == copy.run && loop.to_stride == copy.run) {
      copy.run *= loop.count;
      continue;
    }
    // Where a loop goes on in both just where the one inside it ends, they are one.
    if (!inner_first.empty()) {
      StridedCopy::Loop& inner = inner_first.back();
      if (loop.from_stride == inner.count * inner.from_stride &&
          loop.to_stride == inner.count * inner.to_stride) {
        inner.count *= loop.count;
        continue;
      }
    }
    inner_first.push_back(loop);
  }
  copy.loops.assign(inner_first.rbegin(), inner_first.rend());
  return copy;
}

std::string ToText(const Region& region) {
  std::string text = "[";
  for (size_t d = 0; d < region.offset.size(); ++d) {
    absl::StrAppend(&text, d == 0 ? "" : ", ", region.offset[d], ":",
                    region.offset[d] + region.shape[d]);
  }
  return text + "]";
}

}  // namespace holdfast
