#include "tiers/image/layout.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tiers/image/image_header.h"
#include "tiers/image/layout_rules.h"

namespace holdfast {
namespace {

struct DTypeFacts {
  std::string_view name;
  uint32_t bytes;
};
// Indexed by the enum's numbers.
constexpr std::array<DTypeFacts, 20> kDTypes = {{
    {"?", 0},       {"BOOL", 1}, {"U8", 1},      {"I8", 1},          {"F8_E4M3", 1},
    {"F8_E5M2", 1}, {"U16", 2},  {"I16", 2},     {"F16", 2},         {"BF16", 2},
    {"U32", 4},     {"I32", 4},  {"F32", 4},     {"U64", 8},         {"I64", 8},
    {"F64", 8},     {"C64", 8},  {"F8_E8M0", 1}, {"F8_E4M3FNUZ", 1}, {"F8_E5M2FNUZ", 1},
}};

const DTypeFacts& Facts(DType dtype) {
  const auto number = static_cast<size_t>(dtype);
  return kDTypes[number < kDTypes.size() ? number : 0];
}

absl::Status CheckCounts(size_t slices, Rank rank) {
  if (slices == 0) {
    return absl::InvalidArgumentError(
        "the shard is empty: a save needs at least one tensor or object");
  }
  if (slices > kSlicesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("the shard has ", slices, " slices, at most ", kSlicesMax, " are allowed"));
  }
  if (rank >= kWorldSizeMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank, " is not below the limit of ", kWorldSizeMax));
  }
  return absl::OkStatus();
}

// Sorts `slices` into image order; says where each one came from.
std::vector<uint32_t> SortIntoImageOrder(std::vector<Slice>& slices) {
  std::vector<uint32_t> from(slices.size());
  std::iota(from.begin(), from.end(), 0u);
  std::stable_sort(from.begin(), from.end(), [&slices](uint32_t a, uint32_t b) {
    return image_internal::CompareSlices(slices[a], slices[b]) < 0;
  });
  std::vector<Slice> sorted;
  sorted.reserve(slices.size());
  for (const uint32_t i : from) {
    sorted.push_back(std::move(slices[i]));
  }
  slices = std::move(sorted);
  return from;
}

// Header first, then the slices without gaps. Returns the image's length.
absl::StatusOr<uint64_t> AssignOffsets(std::vector<Slice>& slices, uint64_t header_bytes) {
  uint64_t offset = header_bytes;
  for (Slice& slice : slices) {
    slice.image_offset = offset;
    offset +=
        slice.bytes;  // each is at most kImageBytesMax, so this cannot overflow before the check
    if (offset > kImageBytesMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("the shard's slices exceed the limit of ", kImageBytesMax,
                       " bytes for an image, first with ", image_internal::QuoteName(slice.name)));
    }
  }
  return offset;
}

}  // namespace

std::string_view DTypeName(DType dtype) {
  return Facts(dtype).name;
}

uint32_t DTypeBytes(DType dtype) {
  return Facts(dtype).bytes;
}

absl::StatusOr<DType> ParseDType(std::string_view name) {
  for (size_t i = 1; i < kDTypes.size(); ++i) {
    if (kDTypes[i].name == name) {
      return static_cast<DType>(i);
    }
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "unknown dtype ", image_internal::QuoteName(name),
      ": safetensors' names are BOOL, U8, I8, F8_E4M3, F8_E5M2, F8_E8M0, F8_E4M3FNUZ, F8_E5M2FNUZ, "
      "U16, I16, F16, BF16, U32, I32, F32, U64, I64, F64 and C64"));
}

std::vector<uint64_t> LocalShape(const Slice& slice) {
  if (const auto* box = std::get_if<BoxPlace>(&slice.place)) {
    return box->shape;
  }
  if (const auto* flat = std::get_if<FlatPlace>(&slice.place)) {
    return {flat->length};
  }
  return slice.global_shape;
}

uint64_t ElementCount(const Slice& slice) {
  if (const auto* flat = std::get_if<FlatPlace>(&slice.place)) {
    return flat->length;
  }
  const auto* box = std::get_if<BoxPlace>(&slice.place);
  uint64_t count = 0;
  image_internal::CheckedElementCount(box != nullptr ? box->shape : slice.global_shape, count);
  return count;
}

std::string ToHex(const LayoutHash& hash) {
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(hash.data()), hash.size()));
}

absl::StatusOr<ImagePlan> PlanImage(std::vector<Slice> slices, Rank rank) {
  // 1. Every slice by itself, then all together.
  HF_RETURN_IF_ERROR(CheckCounts(slices.size(), rank));
  for (Slice& slice : slices) {
    HF_ASSIGN_OR_RETURN(slice.bytes, image_internal::CheckSlice(slice));
  }
  ImagePlan plan;
  plan.from_input = SortIntoImageOrder(slices);
  HF_RETURN_IF_ERROR(image_internal::CheckAgreement(slices));

  // 2. The header's length, counted before anything is allocated for it.
  for (size_t i = 0; i < slices.size(); ++i) {
    slices[i].key = image_internal::KeyFor(slices, i);
  }
  const uint64_t header_bytes = image_internal::ImageHeaderBytes(slices, rank);
  if (header_bytes - sizeof(uint64_t) > kHeaderBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the header of these ", slices.size(), " slices would exceed safetensors' limit of ",
        kHeaderBytesMax, " bytes: save fewer tensors a rank, or give them shorter names"));
  }

  // 3. Offsets, header, layout.
  HF_ASSIGN_OR_RETURN(plan.layout.image_bytes, AssignOffsets(slices, header_bytes));
  plan.header = image_internal::BuildImageHeader(slices, rank, header_bytes);
  plan.layout.header_bytes = header_bytes;
  plan.layout.slices = std::move(slices);
  plan.layout_bytes = EncodeLayout(plan.layout);
  plan.layout_hash = HashLayout(plan.layout_bytes);
  return plan;
}

}  // namespace holdfast
