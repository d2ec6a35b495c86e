#include "client-lib/src/state_match.h"

#include <algorithm>
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

// Slices by name: all of one name are one run of layout.slices, as those of a tensor have one type.
// States mostly name them in the image's order: then the next run is the one that is wanted, and no
// index is needed.
class Runs {
 public:
  explicit Runs(const std::vector<Slice>& slices) : slices_(slices) {}

  // [first, second) of the slices; empty when there is none of that name.
  std::pair<size_t, size_t> Find(const std::string& name) {
    size_t begin = next_;
    if (begin == slices_.size() || slices_[begin].name != name) {
      begin = Lookup(name);
    }
    next_ = begin;
    while (next_ < slices_.size() && slices_[next_].name == name) {
      ++next_;
    }
    return {begin, next_};
  }

 private:
  size_t Lookup(const std::string& name) {
    if (first_.empty()) {
      first_.reserve(slices_.size());
      for (size_t i = 0; i < slices_.size(); ++i) {
        first_.try_emplace(slices_[i].name, i);
      }
    }
    const auto found = first_.find(name);
    return found == first_.end() ? slices_.size() : found->second;
  }

  const std::vector<Slice>& slices_;
  size_t next_ = 0;
  std::unordered_map<std::string_view, size_t> first_;  // filled when first needed
};

// As ToSlice would say it, without the copies.
bool IsSlice(const Tensor& tensor, const Slice& slice) {
  if (slice.kind != SliceKind::kTensor || slice.dtype != static_cast<DType>(tensor.type) ||
      slice.global_shape != tensor.global_shape) {
    return false;
  }
  switch (tensor.place) {
    case Tensor::Place::kBox: {
      const auto* box = std::get_if<BoxPlace>(&slice.place);
      return box != nullptr && box->offset == tensor.box_offset && box->shape == tensor.box_shape;
    }
    case Tensor::Place::kFlat: {
      const auto* flat = std::get_if<FlatPlace>(&slice.place);
      return flat != nullptr && flat->start == tensor.flat_start &&
             flat->length == tensor.flat_length;
    }
    case Tensor::Place::kWhole:
      break;
  }
  return std::holds_alternative<std::monostate>(slice.place);
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

Result<size_t> FindTensor(const Tensor& tensor, const Layout& layout, Runs& runs) {
  const auto [begin, end] = runs.Find(tensor.name);
  if (begin == end) {
    return NotSaved(NameOf(tensor), layout);
  }
  for (size_t i = begin; i < end; ++i) {
    if (IsSlice(tensor, layout.slices[i])) {
      return i;
    }
  }
  const Slice& saved = layout.slices[begin];
  return Status(
      Code::kInvalidArgument,
      absl::StrCat(NameOf(tensor), " was saved as ",
                   saved.kind == SliceKind::kTensor ? Describe(saved) : "an object",
                   end - begin > 1 ? absl::StrCat(" and ", end - begin - 1, " other slice(s)") : "",
                   ", wanted is ", Describe(ToSlice(tensor))));
}

Result<size_t> FindObject(const Object& object, const Layout& layout, Runs& runs) {
  const auto [begin, end] = runs.Find(object.name);
  if (begin == end) {
    return NotSaved(NameOf(object), layout);
  }
  const Slice& saved = layout.slices[begin];
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
  return begin;
}

}  // namespace

Result<StateMatch> MatchState(const State& state, const Layout& layout) {
  Runs runs(layout.slices);
  StateMatch match;
  match.tensors.reserve(state.tensors.size());
  for (const Tensor& tensor : state.tensors) {
    HF_TRY_ASSIGN(const size_t slice, FindTensor(tensor, layout, runs));
    match.tensors.push_back(slice);
  }
  for (const Object& object : state.objects) {
    HF_TRY_ASSIGN(const size_t slice, FindObject(object, layout, runs));
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

bool MayBeElsewhere(const State& state, const Layout& layout, bool convert_types) {
  Runs runs(layout.slices);
  return std::none_of(state.tensors.begin(), state.tensors.end(), [&](const Tensor& tensor) {
    const auto [begin, end] = runs.Find(tensor.name);
    if (begin == end) {
      return false;
    }
    const Slice& saved = layout.slices[begin];
    return saved.kind != SliceKind::kTensor || saved.global_shape != tensor.global_shape ||
           (!convert_types && saved.dtype != static_cast<DType>(tensor.type));
  });
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
