#include "client-lib/src/state_plan.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/digest.h"
#include "base/status.h"
#include "base/units.h"
#include "client-lib/src/errors.h"
#include "client-lib/src/json_check.h"
#include "tiers/image/layout_rules.h"

namespace holdfast::client {
namespace {

constexpr uint64_t kSlotMultiple = 2 * kMiB;
// A line of descent at its longest, names, fixed fields and framing.
constexpr uint64_t kRecordExtraBytes = kDescentMax * 40 + 8192;

void AppendNumber(std::string& out, uint64_t value) {
  char bytes[sizeof(value)];
  std::memcpy(bytes, &value, sizeof(value));
  out.append(bytes, sizeof(bytes));
}

void AppendNumbers(std::string& out, const std::vector<uint64_t>& values) {
  AppendNumber(out, values.size());
  out.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(uint64_t));
}

// Two tensors with the same signature are the same slice. Every part says its length, so none can
// pass for another.
void AppendSignature(std::string& out, const Tensor& tensor) {
  AppendNumber(out, tensor.name.size());
  out.append(tensor.name);
  out.push_back(static_cast<char>(tensor.type));
  out.push_back(static_cast<char>(tensor.place));
  AppendNumbers(out, tensor.global_shape);
  if (tensor.place == Tensor::Place::kBox) {
    AppendNumbers(out, tensor.box_offset);
    AppendNumbers(out, tensor.box_shape);
  } else if (tensor.place == Tensor::Place::kFlat) {
    AppendNumber(out, tensor.flat_start);
    AppendNumber(out, tensor.flat_length);
  }
}

Slice ObjectSlice(const Object& object) {
  Slice slice;
  slice.name = object.name;
  slice.dtype = DType::kU8;
  slice.global_shape = {object.bytes.size()};
  slice.kind = object.json ? SliceKind::kJson : SliceKind::kOpaque;
  if (!object.json) {
    slice.codec = object.codec;
  }
  return slice;
}

Status CheckMemory(const Tensor& tensor, uint64_t bytes) {
  if (tensor.device < -1) {
    return Status(Code::kInvalidArgument,
                  absl::StrCat(NameOf(tensor), " is said to be on device ", tensor.device,
                               "; -1 is host memory, and devices count from 0"));
  }
  if (tensor.bytes != 0 && tensor.bytes != bytes) {
    return Status(Code::kInvalidArgument,
                  absl::StrCat(NameOf(tensor), " is said to have ", tensor.bytes, " bytes, but ",
                               Describe(ToSlice(tensor)), " has ", bytes));
  }
  if (tensor.data == nullptr && bytes != 0) {
    return Status(Code::kInvalidArgument, absl::StrCat(NameOf(tensor), " has ", bytes,
                                                       " bytes and no memory (data is null)"));
  }
  return Status();
}

// What follows from the image's plan.
Result<std::shared_ptr<const StatePlan>> Complete(StatePlan plan, std::vector<Slice> slices,
                                                  Rank rank) {
  absl::StatusOr<ImagePlan> image = PlanImage(std::move(slices), rank);
  if (!image.ok()) {
    return FromAbslStatus(image.status(), "the state");
  }
  plan.image = *std::move(image);
  const Layout& layout = plan.image.layout;
  plan.ranges = DigestedRanges(layout);
  plan.digest_count = plan.ranges.back().first_digest + DigestBlockCount(plan.ranges.back().bytes);
  AppendBlockDigests(std::as_bytes(std::span(plan.image.header)), plan.header_digests);
  plan.overlaps = FindOverlaps(layout);
  plan.input_bytes.resize(layout.slices.size());
  for (size_t i = 0; i < layout.slices.size(); ++i) {
    plan.input_bytes[plan.image.from_input[i]] = layout.slices[i].bytes;
  }
  const uint64_t record_bytes_max =
      plan.image.layout_bytes.size() + plan.digest_count * sizeof(uint64_t) + kRecordExtraBytes;
  if (record_bytes_max > kRecordBytesMax) {
    return Status(Code::kInvalidArgument,
                  absl::StrCat("the state: its record would exceed the limit of ", kRecordBytesMax,
                               " bytes: save fewer tensors a rank"));
  }
  plan.slot_bytes = RoundUp(RecordOffset(layout.image_bytes) + record_bytes_max, kSlotMultiple);
  return std::make_shared<const StatePlan>(std::move(plan));
}

Result<std::shared_ptr<const StatePlan>> PlanSlices(const std::vector<Tensor>& tensors,
                                                    const std::vector<Object>& objects, Rank rank) {
  StatePlan plan;
  std::vector<Slice> slices;
  slices.reserve(tensors.size() + objects.size());
  for (const Tensor& tensor : tensors) {
    AppendSignature(plan.signature, tensor);
    slices.push_back(ToSlice(tensor));
  }
  for (const Object& object : objects) {
    slices.push_back(ObjectSlice(object));
  }
  HF_TRY_ASSIGN(std::shared_ptr<const StatePlan> complete,
                Complete(std::move(plan), std::move(slices), rank));
  for (size_t i = 0; i < tensors.size(); ++i) {
    HF_TRY(CheckMemory(tensors[i], complete->input_bytes[i]));
  }
  return complete;
}

}  // namespace

uint64_t RecordOffset(uint64_t image_bytes) {
  return RoundUp(image_bytes, kImageAlignment);
}

Slice ToSlice(const Tensor& tensor) {
  Slice slice;
  slice.name = tensor.name;
  slice.dtype = static_cast<DType>(tensor.type);
  slice.global_shape = tensor.global_shape;
  if (tensor.place == Tensor::Place::kBox) {
    slice.place = BoxPlace{tensor.box_offset, tensor.box_shape};
  } else if (tensor.place == Tensor::Place::kFlat) {
    slice.place = FlatPlace{tensor.flat_start, tensor.flat_length};
  }
  return slice;
}

std::string NameOf(const Tensor& tensor) {
  return absl::StrCat("tensor ", image_internal::QuoteName(tensor.name));
}
std::string NameOf(const Object& object) {
  return absl::StrCat("object ", image_internal::QuoteName(object.name));
}

std::string Describe(const Slice& slice) {
  std::string text = absl::StrCat(ToAbsl(DTypeName(slice.dtype)), " [",
                                  absl::StrJoin(slice.global_shape, ", "), "]");
  if (const auto* box = std::get_if<BoxPlace>(&slice.place)) {
    absl::StrAppend(&text, " box at [", absl::StrJoin(box->offset, ", "), "] of shape [",
                    absl::StrJoin(box->shape, ", "), "]");
  } else if (const auto* flat = std::get_if<FlatPlace>(&slice.place)) {
    absl::StrAppend(&text, " elements ", flat->start, " to ", flat->start + flat->length);
  }
  return text;
}

Status CheckObjects(const std::vector<Object>& objects) {
  for (const Object& object : objects) {
    if (object.json) {
      HF_TRY(WithContext(CheckJson(object.bytes), NameOf(object)));
    }
  }
  return Status();
}

Result<std::shared_ptr<const StatePlan>> PlanState(const State& state, Rank rank) {
  HF_TRY(CheckObjects(state.objects));
  return PlanSlices(state.tensors, state.objects, rank);
}

Result<std::shared_ptr<const StatePlan>> PlanWithObjects(const StatePlan& plan,
                                                         const std::vector<Object>& objects,
                                                         Rank rank) {
  // The tensors' slices, back in the caller's order.
  size_t tensors = 0;
  for (const Slice& slice : plan.image.layout.slices) {
    tensors += slice.kind == SliceKind::kTensor ? 1 : 0;
  }
  std::vector<Slice> slices(tensors);
  for (size_t i = 0; i < plan.image.layout.slices.size(); ++i) {
    const Slice& slice = plan.image.layout.slices[i];
    if (slice.kind == SliceKind::kTensor) {
      slices[plan.image.from_input[i]] = slice;
    }
  }
  for (const Object& object : objects) {
    slices.push_back(ObjectSlice(object));
  }
  StatePlan next;
  next.signature = plan.signature;
  return Complete(std::move(next), std::move(slices), rank);
}

bool FitsObjects(const StatePlan& plan, const std::vector<Object>& objects) {
  const std::vector<Slice>& slices = plan.image.layout.slices;
  size_t found = 0;
  for (size_t i = 0; i < slices.size(); ++i) {
    if (slices[i].kind == SliceKind::kTensor) {
      continue;
    }
    const size_t tensors = slices.size() - objects.size();
    const size_t input = plan.image.from_input[i];
    if (slices.size() < objects.size() || input < tensors) {
      return false;
    }
    const Object& object = objects[input - tensors];
    if (object.name != slices[i].name || object.json != (slices[i].kind == SliceKind::kJson) ||
        object.bytes.size() != slices[i].bytes ||
        (!object.json && object.codec != slices[i].codec)) {
      return false;
    }
    ++found;
  }
  return found == objects.size();
}

Result<std::shared_ptr<const StatePlan>> PlanCache::Get(const State& state) {
  HF_TRY(CheckObjects(state.objects));
  return Get(state.tensors, state.objects);
}

Result<std::shared_ptr<const StatePlan>> PlanCache::GetForTensors(
    const std::vector<Tensor>& tensors) {
  return Get(tensors, {});
}

Result<std::shared_ptr<const StatePlan>> PlanCache::Get(const std::vector<Tensor>& tensors,
                                                        const std::vector<Object>& objects) {
  if (plan_ != nullptr) {
    // One pass over the tensors; the signature is read in order, which keeps it in cache.
    const std::string& signature = plan_->signature;
    size_t at = 0;
    size_t i = 0;
    for (; i < tensors.size() && i < plan_->input_bytes.size(); ++i) {
      scratch_.clear();
      AppendSignature(scratch_, tensors[i]);
      if (signature.size() - at < scratch_.size() ||
          std::memcmp(signature.data() + at, scratch_.data(), scratch_.size()) != 0) {
        break;
      }
      at += scratch_.size();
      HF_TRY(CheckMemory(tensors[i], plan_->input_bytes[i]));
    }
    if (i == tensors.size() && at == signature.size()) {
      return plan_;
    }
  }
  HF_TRY_ASSIGN(plan_, PlanSlices(tensors, objects, rank_));
  return plan_;
}

}  // namespace holdfast::client
