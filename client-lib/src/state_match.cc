#include "client-lib/src/state_match.h"

#include <string_view>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client-lib/src/errors.h"
#include "client-lib/src/state_plan.h"
#include "tiers/image/layout_rules.h"

namespace holdfast::client {
namespace {

constexpr size_t kNamesShown = 5;

// Slices by name: [first, second) of layout.slices is one run of a name, which is one group, as all
// slices of a tensor have one type.
using Groups = std::unordered_map<std::string_view, std::pair<size_t, size_t>>;

Groups GroupByName(const Layout& layout) {
  Groups groups;
  groups.reserve(layout.slices.size());
  for (size_t i = 0; i < layout.slices.size(); ++i) {
    auto [at, fresh] = groups.try_emplace(layout.slices[i].name, i, i + 1);
    if (!fresh) {
      at->second.second = i + 1;
    }
  }
  return groups;
}

Status NotSaved(const std::string& wanted, const Layout& layout) {
  std::string message = absl::StrCat(wanted, " was not saved; what was: ");
  for (size_t i = 0; i < layout.slices.size() && i < kNamesShown; ++i) {
    absl::StrAppend(&message, i == 0 ? "" : ", ", image_internal::QuoteName(layout.slices[i].name));
  }
  if (layout.slices.size() > kNamesShown) {
    absl::StrAppend(&message, " and ", layout.slices.size() - kNamesShown, " more");
  }
  return Status(Code::kInvalidArgument, message);
}

Result<size_t> FindTensor(const Tensor& tensor, const Layout& layout, const Groups& groups) {
  const Slice wanted = ToSlice(tensor);
  const auto group = groups.find(wanted.name);
  if (group == groups.end()) {
    return NotSaved(NameOf(tensor), layout);
  }
  const auto [begin, end] = group->second;
  for (size_t i = begin; i < end; ++i) {
    const Slice& saved = layout.slices[i];
    if (saved.kind == SliceKind::kTensor && saved.dtype == wanted.dtype &&
        saved.global_shape == wanted.global_shape && saved.place == wanted.place) {
      return i;
    }
  }
  const Slice& saved = layout.slices[begin];
  return Status(
      Code::kInvalidArgument,
      absl::StrCat(NameOf(tensor), " was saved as ",
                   saved.kind == SliceKind::kTensor ? Describe(saved) : "an object",
                   end - begin > 1 ? absl::StrCat(" and ", end - begin - 1, " other slice(s)") : "",
                   ", wanted is ", Describe(wanted)));
}

Result<size_t> FindObject(const Object& object, const Layout& layout, const Groups& groups) {
  const auto group = groups.find(object.name);
  if (group == groups.end()) {
    return NotSaved(NameOf(object), layout);
  }
  const Slice& saved = layout.slices[group->second.first];
  if (saved.kind == SliceKind::kTensor) {
    return Status(Code::kInvalidArgument,
                  absl::StrCat(NameOf(object), " was saved as a tensor: ", Describe(saved)));
  }
  if (!object.json && !object.codec.empty() && object.codec != saved.codec) {
    return Status(
        Code::kInvalidArgument,
        absl::StrCat(
            NameOf(object), " was saved as ",
            saved.kind == SliceKind::kJson ? "JSON" : absl::StrCat("codec '", saved.codec, "'"),
            ", wanted is codec '", ForWire(object.codec, kCodecBytesMax), "'"));
  }
  return group->second.first;
}

}  // namespace

Result<StateMatch> MatchState(const State& state, const Layout& layout) {
  const Groups groups = GroupByName(layout);
  StateMatch match;
  match.tensors.reserve(state.tensors.size());
  for (const Tensor& tensor : state.tensors) {
    HF_TRY_ASSIGN(const size_t slice, FindTensor(tensor, layout, groups));
    match.tensors.push_back(slice);
  }
  for (const Object& object : state.objects) {
    HF_TRY_ASSIGN(const size_t slice, FindObject(object, layout, groups));
    match.objects.push_back(slice);
  }
  if (state.objects.empty()) {
    for (size_t i = 0; i < layout.slices.size(); ++i) {
      if (layout.slices[i].kind != SliceKind::kTensor) {
        match.objects.push_back(i);
      }
    }
  }
  return match;
}

Tensor ToTensor(const Slice& slice) {
  Tensor tensor(slice.name, static_cast<Type>(slice.dtype), slice.global_shape, nullptr);
  tensor.bytes = slice.bytes;
  if (const auto* box = std::get_if<BoxPlace>(&slice.place)) {
    tensor.place = Tensor::Place::kBox;
    tensor.box_offset = box->offset;
    tensor.box_shape = box->shape;
  } else if (const auto* flat = std::get_if<FlatPlace>(&slice.place)) {
    tensor.place = Tensor::Place::kFlat;
    tensor.flat_start = flat->start;
    tensor.flat_length = flat->length;
  }
  return tensor;
}

Object ToObject(const Slice& slice) {
  Object object;
  object.name = slice.name;
  object.json = slice.kind == SliceKind::kJson;
  object.codec = slice.codec;
  return object;
}

}  // namespace holdfast::client
