// Slices of one tensor that share elements must have the same bytes there: otherwise what comes
// back would depend on which of them is read. The shared elements are walked in runs that are
// contiguous in both.
#include <algorithm>
#include <cstring>
#include <optional>
#include <span>

#include "absl/strings/str_cat.h"
#include "client-lib/src/errors.h"
#include "client-lib/src/state_plan.h"
#include "tiers/image/layout_rules.h"

namespace holdfast::client {
namespace {

// A slice as a box of its tensor with its bytes; flat ranges are treated apart.
struct Box {
  std::vector<uint64_t> begin;
  std::vector<uint64_t> end;
  const std::byte* bytes = nullptr;
};

Box ToBox(const Slice& slice, const void* bytes) {
  Box box{std::vector<uint64_t>(slice.global_shape.size(), 0), slice.global_shape,
          static_cast<const std::byte*>(bytes)};
  if (const auto* place = std::get_if<BoxPlace>(&slice.place)) {
    box.begin = place->offset;
    for (size_t d = 0; d < box.end.size(); ++d) {
      box.end[d] = place->offset[d] + place->shape[d];
    }
  }
  return box;
}

// Where the element at `position` lies in the box's own row-major bytes, in elements.
uint64_t IndexIn(const Box& box, std::span<const uint64_t> position) {
  uint64_t index = 0;
  for (size_t d = 0; d < position.size(); ++d) {
    index = index * (box.end[d] - box.begin[d]) + (position[d] - box.begin[d]);
  }
  return index;
}

uint64_t GlobalIndex(std::span<const uint64_t> shape, std::span<const uint64_t> position) {
  uint64_t index = 0;
  for (size_t d = 0; d < shape.size(); ++d) {
    index = index * shape[d] + position[d];
  }
  return index;
}

// Calls on(position, length) for each innermost row of [begin, end), until it returns false. Not
// empty, at least one dimension.
template <typename OnRow>
bool ForEachRow(const std::vector<uint64_t>& begin, const std::vector<uint64_t>& end,
                const OnRow& on) {
  std::vector<uint64_t> position = begin;
  const size_t last = begin.size() - 1;
  while (true) {
    if (!on(position, end[last] - begin[last])) {
      return false;
    }
    size_t d = last;
    while (d > 0) {
      --d;
      if (++position[d] < end[d]) {
        break;
      }
      position[d] = begin[d];
      if (d == 0) {
        return true;
      }
    }
    if (last == 0) {
      return true;
    }
  }
}

bool SameBytes(const std::byte* a, const std::byte* b, uint64_t bytes) {
  return a == b || std::memcmp(a, b, bytes) == 0;
}

bool BoxesAgree(const Box& a, const Box& b, uint64_t element_bytes) {
  std::vector<uint64_t> begin(a.begin.size());
  std::vector<uint64_t> end(a.begin.size());
  for (size_t d = 0; d < begin.size(); ++d) {
    begin[d] = std::max(a.begin[d], b.begin[d]);
    end[d] = std::min(a.end[d], b.end[d]);
  }
  return ForEachRow(begin, end, [&](const std::vector<uint64_t>& position, uint64_t length) {
    return SameBytes(a.bytes + IndexIn(a, position) * element_bytes,
                     b.bytes + IndexIn(b, position) * element_bytes, length * element_bytes);
  });
}

bool BoxAndFlatAgree(const Box& box, std::span<const uint64_t> shape, const FlatPlace& flat,
                     const std::byte* flat_bytes, uint64_t element_bytes) {
  return ForEachRow(
      box.begin, box.end, [&](const std::vector<uint64_t>& position, uint64_t length) {
        const uint64_t row = GlobalIndex(shape, position);
        const uint64_t from = std::max(row, flat.start);
        const uint64_t to = std::min(row + length, flat.start + flat.length);
        return from >= to ||
               SameBytes(box.bytes + (IndexIn(box, position) + (from - row)) * element_bytes,
                         flat_bytes + (from - flat.start) * element_bytes,
                         (to - from) * element_bytes);
      });
}

bool FlatsAgree(const FlatPlace& a, const std::byte* a_bytes, const FlatPlace& b,
                const std::byte* b_bytes, uint64_t element_bytes) {
  const uint64_t from = std::max(a.start, b.start);
  const uint64_t to = std::min(a.start + a.length, b.start + b.length);
  return from >= to ||
         SameBytes(a_bytes + (from - a.start) * element_bytes,
                   b_bytes + (from - b.start) * element_bytes, (to - from) * element_bytes);
}

bool Agree(const Slice& a, const void* a_data, const Slice& b, const void* b_data) {
  const auto* a_bytes = static_cast<const std::byte*>(a_data);
  const auto* b_bytes = static_cast<const std::byte*>(b_data);
  const uint64_t element_bytes = DTypeBytes(a.dtype);
  const auto* a_flat = std::get_if<FlatPlace>(&a.place);
  const auto* b_flat = std::get_if<FlatPlace>(&b.place);
  if (a_flat != nullptr && b_flat != nullptr) {
    return FlatsAgree(*a_flat, a_bytes, *b_flat, b_bytes, element_bytes);
  }
  if (a.global_shape.empty()) {  // 0-dim: one element
    return SameBytes(a_bytes, b_bytes, element_bytes);
  }
  if (a_flat != nullptr) {
    return BoxAndFlatAgree(ToBox(b, b_bytes), a.global_shape, *a_flat, a_bytes, element_bytes);
  }
  if (b_flat != nullptr) {
    return BoxAndFlatAgree(ToBox(a, a_bytes), a.global_shape, *b_flat, b_bytes, element_bytes);
  }
  return BoxesAgree(ToBox(a, a_bytes), ToBox(b, b_bytes), element_bytes);
}

}  // namespace

Status CompareOverlaps(const StatePlan& plan, const std::vector<const void*>& sources) {
  const std::vector<Slice>& slices = plan.image.layout.slices;
  for (const auto& [first, second] : plan.overlaps) {
    if (!Agree(slices[first], sources[plan.image.from_input[first]], slices[second],
               sources[plan.image.from_input[second]])) {
      return Status(
          Code::kInvalidArgument,
          absl::StrCat("tensor ", image_internal::QuoteName(slices[first].name), ": its slices ",
                       Describe(slices[first]), " and ", Describe(slices[second]),
                       " share elements and have different bytes there: which are right?"));
    }
  }
  return Status();
}

}  // namespace holdfast::client
