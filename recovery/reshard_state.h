// What a planner keeps of the wants and of the layouts that it was shown. For recovery/reshard.cc,
// which fills it, and reshard_plan.cc, which plans from it.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/node_hash_map.h"
#include "absl/hash/hash.h"
#include "recovery/reshard.h"
#include "tiers/image/layout_scan.h"
#include "tiers/image/region.h"

namespace holdfast {
namespace reshard_internal {

// What two slices must share to be the same part, in whatever way they say it: a range of the
// row-major flattening where the elements are one, else a box.
struct PartKey {
  bool flat = false;
  Dims first;  // flat: the first element; else the box's offset
  Dims extent;
  auto Fields() const { return std::tie(flat, first, extent); }
  bool operator==(const PartKey& other) const { return Fields() == other.Fields(); }
  bool operator<(const PartKey& other) const { return Fields() < other.Fields(); }
  template <typename H>
  friend H AbslHashValue(H state, const PartKey& key) {
    return H::combine(std::move(state), key.flat, key.first, key.extent);
  }
};

struct Holder {
  uint32_t layout = 0;  // in the order of Add
  uint32_t slice = 0;
};

// Elements that were saved as one slice, by one rank or several.
struct Part {
  std::vector<Region> regions;
  ElementPlaces places;
  uint64_t bytes = 0;
  std::vector<Holder> holders;
};

struct SavedTensor {
  DType dtype = DType::kU8;
  std::vector<uint64_t> global_shape;
  Rank said_by = 0;
  absl::node_hash_map<PartKey, Part> parts;
};

struct WantedTensor {
  std::vector<uint32_t> wants;
  bool known = false;
  SavedTensor saved;
  std::optional<ReshardProblem> contradiction;  // between ranks
  // By PartBytes; null: of no use.
  absl::flat_hash_map<std::string, Part*> seen;
};

struct WantState {
  Want want;
  std::vector<Region> regions;
  ElementPlaces places;
  uint64_t elements = 0;
};

std::string ShapeText(std::span<const uint64_t> shape);
std::string Is(DType dtype, std::span<const uint64_t> shape);  // "F32 of [4, 4]"
bool MeetsAny(std::span<const Region> regions, std::span<const Region> others);

inline constexpr size_t kNameBits = size_t{1} << 16;
// Of each wanted tensor: what is remembered of slices by their bytes, so that those of other ranks
// need not be decoded.
inline constexpr size_t kSeenMax = 4096;

}  // namespace reshard_internal

struct ReshardPlanner::State {
  std::vector<reshard_internal::WantState> wants;
  absl::flat_hash_map<std::string, reshard_internal::WantedTensor>
      tensors;  // by the name they were saved by
  // By NameHash: whether any of them may be meant.
  std::vector<bool> names = std::vector<bool>(reshard_internal::kNameBits);
  std::vector<std::vector<Rank>> ranks_of;  // by layout, ascending
  size_t parts = 0;

  bool Wanted(const reshard_internal::WantedTensor& tensor, const Slice& slice,
              std::span<const Region> regions) const {
    return std::any_of(tensor.wants.begin(), tensor.wants.end(), [&](uint32_t want) {
      return wants[want].want.slice.global_shape == slice.global_shape &&
             reshard_internal::MeetsAny(regions, wants[want].regions);
    });
  }
  // A slice of the layout that was added last.
  absl::Status Note(reshard_internal::WantedTensor& tensor, const ScannedSlice& scanned);
  absl::StatusOr<reshard_internal::Part*> PartOf(reshard_internal::WantedTensor& tensor,
                                                 std::string_view bytes);
};

}  // namespace holdfast
