#include "tiers/image/layout_rules.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"

namespace holdfast::image_internal {
namespace {

constexpr uint64_t kElementsMax = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());

absl::Status Refuse(const Slice& slice, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("slice ", QuoteName(slice.name), ": ", why));
}

std::string ShapeText(std::span<const uint64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape.begin(), shape.end(), ", "), "]");
}

absl::Status CheckName(std::string_view name) {
  if (name.empty()) {
    return absl::InvalidArgumentError(
        "slice with an empty name: give every tensor and object a name");
  }
  if (name.size() > kNameBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("slice ", QuoteName(name), ": the name has ",
                                                   name.size(), " bytes, at most ", kNameBytesMax,
                                                   " are allowed"));
  }
  if (!IsValidUtf8(name)) {
    return absl::InvalidArgumentError(
        absl::StrCat("slice ", QuoteName(name), ": the name is not valid UTF-8"));
  }
  if (name == kMetadataKey || name.substr(0, kReservedPrefix.size()) == kReservedPrefix) {
    return absl::InvalidArgumentError(
        absl::StrCat("slice ", QuoteName(name), ": the name '", ToAbsl(kMetadataKey),
                     "' and names that start with '", ToAbsl(kReservedPrefix),
                     "' are reserved: choose another"));
  }
  return absl::OkStatus();
}

absl::Status CheckCodec(const Slice& slice) {
  if (slice.kind != SliceKind::kOpaque) {
    return slice.codec.empty()
               ? absl::OkStatus()
               : Refuse(slice, "only opaque bytes have a codec; this is none: leave it empty");
  }
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '+' || c == '-';
  };
  if (slice.codec.empty() || slice.codec.size() > kCodecBytesMax ||
      !std::all_of(slice.codec.begin(), slice.codec.end(), allowed)) {
    return Refuse(slice, absl::StrCat("opaque bytes need a codec of 1 to ", kCodecBytesMax,
                                      " characters of [A-Za-z0-9._+-] that says how to read them"));
  }
  return absl::OkStatus();
}

absl::Status CheckKind(const Slice& slice) {
  if (slice.kind > SliceKind::kOpaque) {
    return Refuse(slice, absl::StrCat("unknown kind ", static_cast<int>(slice.kind)));
  }
  if (slice.kind != SliceKind::kTensor) {
    const bool whole = std::holds_alternative<std::monostate>(slice.place);
    if (slice.dtype != DType::kU8 || slice.global_shape.size() != 1 || !whole) {
      return Refuse(slice, "JSON and opaque objects are whole, of dtype U8 and one-dimensional");
    }
  }
  return CheckCodec(slice);
}

absl::Status CheckBox(const Slice& slice, const BoxPlace& box) {
  const size_t dimensions = slice.global_shape.size();
  if (box.offset.size() != dimensions || box.shape.size() != dimensions) {
    return Refuse(slice,
                  absl::StrCat("its box has ", box.offset.size(), " offsets and ", box.shape.size(),
                               " lengths, its tensor ", dimensions, " dimensions"));
  }
  for (size_t d = 0; d < dimensions; ++d) {
    const uint64_t whole = slice.global_shape[d];
    if (box.shape[d] > whole || box.offset[d] > whole - box.shape[d]) {
      return Refuse(slice, absl::StrCat("its box at ", ShapeText(box.offset), " of shape ",
                                        ShapeText(box.shape), " leaves the global shape ",
                                        ShapeText(slice.global_shape)));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckPlace(const Slice& slice, uint64_t global_count) {
  if (const auto* box = std::get_if<BoxPlace>(&slice.place)) {
    return CheckBox(slice, *box);
  }
  if (const auto* flat = std::get_if<FlatPlace>(&slice.place)) {
    if (flat->length > global_count || flat->start > global_count - flat->length) {
      return Refuse(slice,
                    absl::StrCat("its flat range of ", flat->length, " elements from ", flat->start,
                                 " leaves the tensor's ", global_count, " elements"));
    }
  }
  return absl::OkStatus();
}

std::strong_ordering ComparePlaces(const Slice& a, const Slice& b) {
  if (a.place.index() != b.place.index()) {
    return a.place.index() <=> b.place.index();
  }
  if (const auto* box = std::get_if<BoxPlace>(&a.place)) {
    const auto& other = std::get<BoxPlace>(b.place);
    const auto by_offset = box->offset <=> other.offset;
    return by_offset != 0 ? by_offset : box->shape <=> other.shape;
  }
  if (const auto* flat = std::get_if<FlatPlace>(&a.place)) {
    const auto& other = std::get<FlatPlace>(b.place);
    const auto by_start = flat->start <=> other.start;
    return by_start != 0 ? by_start : flat->length <=> other.length;
  }
  return std::strong_ordering::equal;
}

absl::Status CheckPair(const Slice& a, const Slice& b) {
  if (a.kind != b.kind || a.codec != b.codec) {
    return Refuse(
        a, "the name is given both to a tensor and to an object, or to objects of different kinds");
  }
  if (a.dtype != b.dtype) {
    return Refuse(a, absl::StrCat("two slices of it have different dtypes, ",
                                  ToAbsl(DTypeName(a.dtype)), " and ", ToAbsl(DTypeName(b.dtype))));
  }
  if (a.global_shape != b.global_shape) {
    return Refuse(a, absl::StrCat("two slices of it have different global shapes, ",
                                  ShapeText(a.global_shape), " and ", ShapeText(b.global_shape)));
  }
  if (a.place == b.place) {
    return Refuse(
        a, "the same slice is given twice: every part of a tensor, and every object, only once");
  }
  return absl::OkStatus();
}

}  // namespace

bool IsValidUtf8(std::string_view text) {
  const auto* p = reinterpret_cast<const unsigned char*>(text.data());
  const auto* const end = p + text.size();
  while (p < end) {
    if (uint64_t eight = 0; end - p >= 8) {
      std::memcpy(&eight, p, 8);
      if ((eight & 0x8080808080808080) == 0) {
        p += 8;
        continue;
      }
    }
    if (*p < 0x80) {
      ++p;
      continue;
    }
    // By the table of well-formed sequences: the second byte's range excludes overlong forms,
    // surrogates and what lies above U+10FFFF.
    const unsigned char lead = *p;
    int more = 0;
    unsigned char low = 0x80;
    unsigned char high = 0xBF;
    if (lead >= 0xC2 && lead <= 0xDF) {
      more = 1;
    } else if (lead >= 0xE0 && lead <= 0xEF) {
      more = 2;
      low = lead == 0xE0 ? 0xA0 : 0x80;
      high = lead == 0xED ? 0x9F : 0xBF;
    } else if (lead >= 0xF0 && lead <= 0xF4) {
      more = 3;
      low = lead == 0xF0 ? 0x90 : 0x80;
      high = lead == 0xF4 ? 0x8F : 0xBF;
    } else {
      return false;
    }
    if (end - p <= more || p[1] < low || p[1] > high) {
      return false;
    }
    for (int i = 2; i <= more; ++i) {
      if (p[i] < 0x80 || p[i] > 0xBF) {
        return false;
      }
    }
    p += more + 1;
  }
  return true;
}

std::string QuoteName(std::string_view name) {
  constexpr size_t kShown = 96;
  std::string_view shown = name.substr(0, kShown);
  if (shown.size() < name.size()) {
    while (!shown.empty() && (static_cast<unsigned char>(name[shown.size()]) & 0xC0) == 0x80) {
      shown.remove_suffix(1);
    }
  }
  const std::string escaped = IsValidUtf8(shown) ? absl::Utf8SafeCHexEscape(ToAbsl(shown))
                                                 : absl::CHexEscape(ToAbsl(shown));
  return absl::StrCat("'", escaped, shown.size() < name.size() ? "…" : "", "'");
}

bool CheckedElementCount(std::span<const uint64_t> shape, uint64_t& count) {
  // Readers multiply dimension by dimension, so a 0 must not excuse an overflow before it.
  uint64_t product = 1;
  bool empty = false;
  for (const uint64_t dimension : shape) {
    if (dimension == 0) {
      empty = true;
    } else if (product > kElementsMax / dimension) {
      return false;
    } else {
      product *= dimension;
    }
  }
  count = empty ? 0 : product;
  return true;
}

absl::StatusOr<uint64_t> CheckSlice(const Slice& slice) {
  HF_RETURN_IF_ERROR(CheckName(slice.name));
  const uint64_t element_bytes = DTypeBytes(slice.dtype);
  if (element_bytes == 0) {
    return Refuse(slice, absl::StrCat("unknown dtype number ", static_cast<int>(slice.dtype)));
  }
  if (slice.global_shape.size() > kDimensionsMax) {
    return Refuse(slice, absl::StrCat("it has ", slice.global_shape.size(), " dimensions, at most ",
                                      kDimensionsMax, " are allowed"));
  }
  uint64_t global_count = 0;
  if (!CheckedElementCount(slice.global_shape, global_count)) {
    return Refuse(slice, absl::StrCat("global shape ", ShapeText(slice.global_shape),
                                      " has more than 2^63 - 1 elements"));
  }
  HF_RETURN_IF_ERROR(CheckKind(slice));
  HF_RETURN_IF_ERROR(CheckPlace(slice, global_count));
  const uint64_t count = ElementCount(slice);
  if (count > kImageBytesMax / element_bytes) {
    return Refuse(
        slice, absl::StrCat("its ", count, " elements of ", element_bytes,
                            " bytes exceed the limit of ", kImageBytesMax, " bytes for an image"));
  }
  return count * element_bytes;
}

std::strong_ordering CompareSlices(const Slice& a, const Slice& b) {
  if (const auto by_size = DTypeBytes(b.dtype) <=> DTypeBytes(a.dtype); by_size != 0) {
    return by_size;
  }
  // char_traits<char> compares as unsigned bytes.
  if (const int by_name = a.name.compare(b.name); by_name != 0) {
    return by_name < 0 ? std::strong_ordering::less : std::strong_ordering::greater;
  }
  return ComparePlaces(a, b);
}

absl::Status CheckAgreement(const std::vector<Slice>& slices) {
  // 1. Slices of one name and element size are neighbours.
  std::vector<size_t> sizes_begin;  // where the slices of each element size begin
  for (size_t i = 0; i < slices.size(); ++i) {
    if (i == 0 || DTypeBytes(slices[i].dtype) != DTypeBytes(slices[i - 1].dtype)) {
      sizes_begin.push_back(i);
    } else if (slices[i].name == slices[i - 1].name) {
      HF_RETURN_IF_ERROR(CheckPair(slices[i - 1], slices[i]));
    }
  }
  if (sizes_begin.size() < 2) {
    return absl::OkStatus();
  }
  // 2. The same name under another element size: those of one size are in the order of their names,
  // so merging brings such slices together.
  const auto by_name = [](const Slice* a, const Slice* b) { return a->name < b->name; };
  std::vector<const Slice*> merged;
  merged.reserve(slices.size());
  for (size_t size = 0; size < sizes_begin.size(); ++size) {
    const size_t end = size + 1 < sizes_begin.size() ? sizes_begin[size + 1] : slices.size();
    const auto before = static_cast<ptrdiff_t>(merged.size());
    for (size_t i = sizes_begin[size]; i < end; ++i) {
      merged.push_back(&slices[i]);
    }
    std::inplace_merge(merged.begin(), merged.begin() + before, merged.end(), by_name);
  }
  const auto contradict =
      std::adjacent_find(merged.begin(), merged.end(), [](const Slice* a, const Slice* b) {
        return a->name == b->name && DTypeBytes(a->dtype) != DTypeBytes(b->dtype);
      });
  return contradict == merged.end() ? absl::OkStatus()
                                    : CheckPair(**contradict, **(contradict + 1));
}

std::string KeyFor(const std::vector<Slice>& slices, size_t i) {
  const Slice& slice = slices[i];
  if (slice.kind == SliceKind::kJson) {
    return "json";
  }
  if (slice.kind == SliceKind::kOpaque) {
    return absl::StrCat("opaque:", slice.codec);
  }
  if (const auto* flat = std::get_if<FlatPlace>(&slice.place)) {
    return absl::StrCat("flat:", flat->start, ":", flat->length);
  }
  if (i == 0 || slices[i - 1].name != slice.name) {
    return "";
  }
  // Never the whole tensor: that is always the first of its name.
  const auto& box = std::get<BoxPlace>(slice.place);
  return absl::StrCat("box:", absl::StrJoin(box.offset, ","), ":", absl::StrJoin(box.shape, ","));
}

absl::Status CheckImageLengths(uint64_t header_bytes, uint64_t image_bytes) {
  if (header_bytes < kImageAlignment || header_bytes % kImageAlignment != 0 ||
      header_bytes - 8 > kHeaderBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("header length ", header_bytes, " is not a multiple of ", kImageAlignment,
                     " within safetensors' limit of ", kHeaderBytesMax, " bytes"));
  }
  if (image_bytes < header_bytes || image_bytes > kImageBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("image length ", image_bytes, " is less than its header's ", header_bytes,
                     " or more than the limit of ", kImageBytesMax, " bytes"));
  }
  return absl::OkStatus();
}

}  // namespace holdfast::image_internal
