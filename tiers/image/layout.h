// What one rank saves: slices, and where their bytes lie in the image (docs/formats.md, "Image" and
// "Layout").
//
//   HF_ASSIGN_OR_RETURN(ImagePlan plan, PlanImage(std::move(slices), rank));
//   // write plan.header at 0, slice i's bytes at plan.layout.slices[i].image_offset
//
// Pure and without I/O, thread-safe, no exception leaves: used by the client library (which has no
// protobuf runtime), the daemon and ckptctl alike.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "base/ids.h"

namespace holdfast {

// Numbers as in proto/holdfast/v1/record.proto.
enum class DType : uint8_t {
  kBool = 1,
  kU8,
  kI8,
  kF8E4M3,
  kF8E5M2,
  kU16,
  kI16,
  kF16,
  kBF16,
  kU32,
  kI32,
  kF32,
  kU64,
  kI64,
  kF64,
  kC64,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
};
std::string_view DTypeName(
    DType dtype);  // safetensors' name: "BF16"; "?" for a value outside the enum
absl::StatusOr<DType> ParseDType(std::string_view name);
uint32_t DTypeBytes(DType dtype);

struct BoxPlace {
  std::vector<uint64_t> offset;
  std::vector<uint64_t> shape;
  bool operator==(const BoxPlace&) const = default;
};
struct FlatPlace {
  uint64_t start = 0;  // elements of the row-major flattening
  uint64_t length = 0;
  bool operator==(const FlatPlace&) const = default;
};
enum class SliceKind : uint8_t { kTensor = 0, kJson = 1, kOpaque = 2 };

struct Slice {
  std::string name;
  DType dtype = DType::kU8;
  std::vector<uint64_t> global_shape;
  std::variant<std::monostate, BoxPlace, FlatPlace> place;  // monostate: the whole tensor
  SliceKind kind = SliceKind::kTensor;
  std::string codec;  // kOpaque only: 1 to 64 of [A-Za-z0-9._+-]
  std::string key;    // filled by PlanImage: empty if the header's key is the name; else HeaderKey
  uint64_t image_offset = 0;  // filled by PlanImage
  uint64_t bytes = 0;         // filled by PlanImage
  bool operator==(const Slice&) const = default;
};

// The shape that the slice's own bytes have: the box's, {length} for a flat range, else the global
// shape.
std::vector<uint64_t> LocalShape(const Slice& slice);

// Elements of LocalShape; the slice must be one of a Layout (its shapes are checked then).
uint64_t ElementCount(const Slice& slice);

// The slice's key in the safetensors header of that rank's image: its name, or, when `key` is not
// empty, "holdfast:<rank, 7 digits>:<key>:<name>", which no other rank's image uses. The layout
// holds only the part that does not depend on the rank, so that ranks with the same slices have the
// same layout hash.
std::string HeaderKey(const Slice& slice, Rank rank);

using LayoutHash = std::array<uint8_t, 16>;
std::string ToHex(const LayoutHash& hash);

struct Layout {
  std::vector<Slice> slices;  // in image order
  uint64_t header_bytes = 0;  // not part of the encoding: the record carries it
  uint64_t image_bytes = 0;
  bool operator==(const Layout&) const = default;
};

struct ImagePlan {
  Layout layout;
  std::string header;                // the image's first bytes: length, JSON, padding
  std::string layout_bytes;          // encoded holdfast.v1.Layout
  LayoutHash layout_hash{};          // of layout_bytes
  std::vector<uint32_t> from_input;  // layout.slices[i] was the caller's slice from_input[i]
};

// Limits. The header's is safetensors' own, and counts the JSON with its padding.
inline constexpr uint64_t kHeaderBytesMax = 100'000'000;
inline constexpr uint64_t kImageAlignment = 4096;  // where data starts
inline constexpr size_t kDimensionsMax = 32;
inline constexpr size_t kNameBytesMax = 16 * 1024;
inline constexpr size_t kCodecBytesMax = 64;
inline constexpr size_t kSlicesMax = 4'000'000;
inline constexpr uint64_t kImageBytesMax = uint64_t{1} << 46;

// Checks every slice (name: valid UTF-8, not empty, not "__metadata__", not starting with
// "holdfast:", within limits; box within the global shape; flat range within its element count;
// objects are whole, U8 and one-dimensional; no overflow), refuses slices of one tensor that
// contradict each other in dtype, global shape or kind, the same slice given twice, and an empty
// list; orders by element size, largest first, then name, then place; assigns keys, offsets and the
// header. Overlapping slices of one tensor are allowed here (their bytes are compared by the
// caller: FindOverlaps). Every refusal is InvalidArgument. The result depends on slices and rank
// alone, never on step or attempt: it may be kept from save to save. The rank shows in the header
// only (HeaderKey), never in the layout.
absl::StatusOr<ImagePlan> PlanImage(std::vector<Slice> slices, Rank rank);

// Pairs (first < second, indices into layout.slices) of slices of the same tensor that share
// elements, sorted. The layout is in image order.
std::vector<std::pair<uint32_t, uint32_t>> FindOverlaps(const Layout& layout);

std::string EncodeLayout(const Layout& layout);
LayoutHash HashLayout(std::string_view layout_bytes);
// Checks everything that PlanImage promises, offsets, order and contiguity included; trusts
// nothing.
absl::StatusOr<Layout> DecodeLayout(std::string_view layout_bytes, uint64_t header_bytes,
                                    uint64_t image_bytes);

}  // namespace holdfast
