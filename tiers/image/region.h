// Parts of one tensor, whoever holds them: as boxes, and how a box's elements lie in the bytes of a
// slice. A box of one slice is found in another one's bytes, and copied, by strides alone.
//
//   const Dims shape = DimsOf(slice.global_shape);
//   for (const Region& region : RegionsOf(slice)) …            // a flat range is several boxes
//   if (auto both = Intersection(a, b)) {
//     const StridedCopy copy = CopyOf(*both, PlacementOf(from), PlacementOf(to));
//     copy.ForEachRun([&](uint64_t at, uint64_t to, uint64_t elements) { … });
//   }
//
// Everything counts elements, not bytes. Slices are of a checked layout, or checked by CheckSlice:
// their extents do not overflow. Pure functions, thread-safe, they own nothing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "tiers/image/layout.h"

namespace holdfast {

// One number for each dimension of a tensor; most have at most four.
using Dims = absl::InlinedVector<uint64_t, 4>;
Dims DimsOf(std::span<const uint64_t> numbers);

// The elements from `offset` to just before `offset + shape`. 0-dim: the one element.
struct Region {
  Dims offset;
  Dims shape;
  uint64_t elements() const;
  bool operator==(const Region&) const = default;
};

std::optional<Region> Intersection(const Region& a, const Region& b);
bool Meets(const Region& a, const Region& b);
// What is left of `from` without `what`: at most two boxes for each dimension.
std::vector<Region> Without(const Region& from, const Region& what);

// Calls `meet` for each pair of them that share elements, the smaller number first, in any order,
// until it says false. All are of one tensor.
void ForEachMeeting(std::span<const Region> regions,
                    const std::function<bool(uint32_t, uint32_t)>& meet);

// The boxes that the slice consists of, in the order of its bytes, each with elements: a box or a
// whole tensor is one, a flat range of a tensor with d dimensions at most 2 d - 1; of a slice
// without elements none.
std::vector<Region> RegionsOf(const Slice& slice);

// Where the elements of a slice lie in its own bytes: element x at the sum of x[d] * stride[d],
// less `base`. (Modulo 2^64: of elements that the slice has the result is below its count.)
struct ElementPlaces {
  Dims strides;
  uint64_t base = 0;
  uint64_t Of(const Dims& position) const;
};
ElementPlaces PlacesIn(const Slice& slice);

// Copies that are alike but for where they begin: `run` elements, as often as the loops say, the
// last one innermost.
struct StridedCopy {
  struct Loop {
    uint64_t count = 0;
    uint64_t from_stride = 0;
    uint64_t to_stride = 0;
    bool operator==(const Loop&) const = default;
  };
  uint64_t from = 0;  // the first element, in the bytes of the one slice
  uint64_t to = 0;    // and of the other
  uint64_t run = 0;
  absl::InlinedVector<Loop, 2> loops;

  uint64_t runs() const;
  uint64_t elements() const { return run * runs(); }
  // do_run(from, to, elements), in the order of the region's elements.
  template <typename Do>
  void ForEachRun(const Do& do_run) const {
    ForEachRunOf(0, from, to, do_run);
  }
  // The same of what is copied from the elements `begin` to just before `end`, runs cut short to
  // that. O(what there is of it), if whatever comes later in the loops lies behind in what is
  // copied from, as it does in every slice.
  template <typename Do>
  void ForEachRunWithin(uint64_t begin, uint64_t end, const Do& do_run) const {
    ForEachRunWithinOf(0, from, to, begin, end, do_run);
  }
  bool operator==(const StridedCopy&) const = default;

 private:
  // From the first element of the loops from `loop` on to just behind the last one.
  uint64_t Extent(size_t loop) const {
    uint64_t extent = run;
    for (size_t i = loop; i < loops.size(); ++i) {
      extent += (loops[i].count - 1) * loops[i].from_stride;
    }
    return extent;
  }
  template <typename Do>
  void ForEachRunWithinOf(size_t loop, uint64_t from_at, uint64_t to_at, uint64_t begin,
                          uint64_t end, const Do& do_run) const {
    if (loop == loops.size()) {
      const uint64_t first = std::max(begin, from_at);
      const uint64_t behind = std::min(end, from_at + run);
      if (first < behind) {
        do_run(first, to_at + (first - from_at), behind - first);
      }
      return;
    }
    const Loop& its = loops[loop];
    const uint64_t inner = Extent(loop + 1);
    uint64_t i = begin < from_at + inner ? 0 : (begin - from_at - inner) / its.from_stride + 1;
    for (; i < its.count && from_at + i * its.from_stride < end; ++i) {
      ForEachRunWithinOf(loop + 1, from_at + i * its.from_stride, to_at + i * its.to_stride, begin,
                         end, do_run);
    }
  }
  template <typename Do>
  void ForEachRunOf(size_t loop, uint64_t from_at, uint64_t to_at, const Do& do_run) const {
    if (loop == loops.size()) {
      do_run(from_at, to_at, run);
      return;
    }
    for (uint64_t i = 0; i < loops[loop].count; ++i) {
      ForEachRunOf(loop + 1, from_at, to_at, do_run);
      from_at += loops[loop].from_stride;
      to_at += loops[loop].to_stride;
    }
  }
};

// Of a region that both slices have, in as few runs as there are: what follows on in both is one.
StridedCopy CopyOf(const Region& region, const ElementPlaces& from, const ElementPlaces& to);

// "[0:128, 512:1024]", for messages.
std::string ToText(const Region& region);

}  // namespace holdfast
