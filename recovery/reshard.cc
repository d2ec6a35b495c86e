#include "recovery/reshard.h"

#include <algorithm>
#include <map>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "recovery/reshard_internal.h"
#include "recovery/reshard_state.h"
#include "tiers/image/layout_rules.h"

namespace holdfast {

using reshard_internal::Candidate;
using reshard_internal::Is;
using reshard_internal::kNameBits;
using reshard_internal::kSeenMax;
using reshard_internal::Part;
using reshard_internal::PartKey;
using reshard_internal::SavedTensor;
using reshard_internal::WantedTensor;
using reshard_internal::WantState;

namespace reshard_internal {

std::string ShapeText(std::span<const uint64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

std::string Is(DType dtype, std::span<const uint64_t> shape) {
  return absl::StrCat(ToAbsl(DTypeName(dtype)), " of ", ShapeText(shape));
}

bool MeetsAny(std::span<const Region> regions, std::span<const Region> others) {
  return std::any_of(regions.begin(), regions.end(), [&](const Region& region) {
    return std::any_of(others.begin(), others.end(),
                       [&](const Region& other) { return Meets(region, other); });
  });
}

}  // namespace reshard_internal

namespace {

PartKey KeyOf(const Slice& slice) {
  if (const auto* flat = std::get_if<FlatPlace>(&slice.place)) {
    return {true, {flat->start}, {flat->length}};
  }
  const auto* box = std::get_if<BoxPlace>(&slice.place);
  const Dims shape = DimsOf(box != nullptr ? box->shape : slice.global_shape);
  const Dims offset = box != nullptr ? DimsOf(box->offset) : Dims(shape.size(), 0);
  // Contiguous, if all dimensions behind the first one with several positions are whole.
  size_t d = 0;
  while (d < shape.size() && shape[d] == 1) {
    ++d;
  }
  for (size_t behind = d + 1; behind < shape.size(); ++behind) {
    if (shape[behind] != slice.global_shape[behind]) {
      return {false, offset, shape};
    }
  }
  uint64_t first = 0;
  uint64_t elements = 1;
  for (size_t i = 0; i < shape.size(); ++i) {
    first = first * slice.global_shape[i] + offset[i];
    elements *= shape[i];
  }
  return {true, {first}, {elements}};
}

// Two wants of the same own name, which is one tensor of the reader's.
absl::Status CheckDisjoint(const std::vector<WantState>& wants) {
  std::map<std::string_view, std::vector<uint32_t>> by_name;
  for (uint32_t i = 0; i < wants.size(); ++i) {
    by_name[wants[i].want.slice.name].push_back(i);
  }
  for (const auto& [name, its] : by_name) {
    if (its.size() < 2) {
      continue;
    }
    std::vector<Candidate> all;
    for (const uint32_t i : its) {
      const Slice& slice = wants[i].want.slice;
      if (slice.dtype != wants[its[0]].want.slice.dtype ||
          slice.global_shape != wants[its[0]].want.slice.global_shape) {
        const Slice& first = wants[its[0]].want.slice;
        return absl::InvalidArgumentError(absl::StrCat(
            "restore: tensor ", image_internal::QuoteName(name), " is wanted as ",
            Is(first.dtype, first.global_shape), " and as ", Is(slice.dtype, slice.global_shape)));
      }
      for (const Region& region : wants[i].regions) {
        all.push_back({i, region});
      }
    }
    if (const auto pair = reshard_internal::AnyMeeting(all)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "restore: tensor ", image_internal::QuoteName(name),
          " is wanted twice: ", ToText(all[pair->first].region), " and ",
          ToText(all[pair->second].region), " share elements; ask for each element once"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

// Nearly all slices of a tensor are those of other ranks once more: these are not decoded again.
absl::Status ReshardPlanner::State::Note(WantedTensor& tensor, const ScannedSlice& scanned) {
  const std::string_view bytes = PartBytes(scanned.bytes);
  Part* part = nullptr;
  if (const auto seen = tensor.seen.find(ToAbsl(bytes)); seen != tensor.seen.end()) {
    part = seen->second;
  } else {
    HF_ASSIGN_OR_RETURN(part, PartOf(tensor, scanned.bytes));
    if (!bytes.empty() && tensor.seen.size() < kSeenMax) {
      tensor.seen.emplace(bytes, part);
    }
  }
  if (part != nullptr) {
    part->holders.push_back({static_cast<uint32_t>(ranks_of.size() - 1), scanned.number});
  }
  return absl::OkStatus();
}

// Nothing: it is of no use here.
absl::StatusOr<Part*> ReshardPlanner::State::PartOf(WantedTensor& tensor, std::string_view bytes) {
  HF_ASSIGN_OR_RETURN(const Slice slice, DecodeSlice(bytes));
  if (slice.kind != SliceKind::kTensor) {
    return nullptr;
  }
  const Rank rank = ranks_of.back().front();
  SavedTensor& saved = tensor.saved;
  if (!tensor.known) {
    tensor.known = true;
    saved.dtype = slice.dtype;
    saved.global_shape = slice.global_shape;
    saved.said_by = rank;
  } else if (slice.dtype != saved.dtype || slice.global_shape != saved.global_shape) {
    if (!tensor.contradiction) {
      tensor.contradiction = {
          ReshardProblem::Kind::kContradiction, slice.name,
          absl::StrCat("tensor ", image_internal::QuoteName(slice.name), " was saved as ",
                       Is(saved.dtype, saved.global_shape), " by rank ", saved.said_by, " and as ",
                       Is(slice.dtype, slice.global_shape), " by rank ", rank)};
    }
    return nullptr;
  }
  std::vector<Region> regions = RegionsOf(slice);
  if (!Wanted(tensor, slice, regions)) {
    return nullptr;
  }
  Part& part = saved.parts[KeyOf(slice)];
  if (part.regions.empty()) {
    if (++parts > kReshardPartsMax) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "more than ", kReshardPartsMax, " saved slices meet what one rank wants, at ",
          image_internal::QuoteName(slice.name)));
    }
    part.regions = std::move(regions);
    part.places = PlacesIn(slice);
    part.bytes = slice.bytes;
  }
  return &part;
}

ReshardPlanner::ReshardPlanner(std::unique_ptr<State> state) : state_(std::move(state)) {}
ReshardPlanner::ReshardPlanner(ReshardPlanner&&) noexcept = default;
ReshardPlanner& ReshardPlanner::operator=(ReshardPlanner&&) noexcept = default;
ReshardPlanner::~ReshardPlanner() = default;

absl::StatusOr<ReshardPlanner> ReshardPlanner::For(std::vector<Want> wants) {
  if (wants.size() > kReshardWantsMax) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "restore: ", wants.size(), " slices are wanted, at most ", kReshardWantsMax, " can be"));
  }
  auto state = std::make_unique<State>();
  state->wants.reserve(wants.size());
  for (Want& want : wants) {
    if (want.slice.kind != SliceKind::kTensor) {
      return absl::InvalidArgumentError(
          absl::StrCat("restore: ", image_internal::QuoteName(want.slice.name),
                       " is an object: only tensors have parts"));
    }
    HF_RETURN_IF_ERROR(image_internal::CheckSlice(want.slice).status());
    WantState its;
    its.regions = RegionsOf(want.slice);
    its.places = PlacesIn(want.slice);
    its.elements = ElementCount(want.slice);
    const std::string& name = want.saved_as.empty() ? want.slice.name : want.saved_as;
    state->tensors[name].wants.push_back(static_cast<uint32_t>(state->wants.size()));
    state->names[NameHash(name) % kNameBits] = true;
    its.want = std::move(want);
    state->wants.push_back(std::move(its));
  }
  HF_RETURN_IF_ERROR(CheckDisjoint(state->wants));
  return ReshardPlanner(std::move(state));
}

absl::Status ReshardPlanner::Add(std::string_view layout_bytes, std::span<const Rank> ranks) {
  if (ranks.empty()) {
    return absl::OkStatus();
  }
  state_->ranks_of.emplace_back(ranks.begin(), ranks.end());
  std::sort(state_->ranks_of.back().begin(), state_->ranks_of.back().end());
  return ScanLayout(layout_bytes, [this](const ScannedSlice& scanned) {
    if (!state_->names[scanned.name_hash % kNameBits]) {
      return absl::OkStatus();
    }
    const auto tensor = state_->tensors.find(ToAbsl(scanned.name));
    return tensor == state_->tensors.end() ? absl::OkStatus()
                                           : state_->Note(tensor->second, scanned);
  });
}

}  // namespace holdfast
