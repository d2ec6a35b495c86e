#include <algorithm>
#include <array>
#include <limits>
#include <protozero/pbf_writer.hpp>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tiers/image/layout.h"
#include "tiers/image/layout_rules.h"
#include "tiers/image/layout_scan.h"
#include "tiers/image/wire.h"

#define XXH_INLINE_ALL  // nothing of xxHash is exported from the client library
#include <xxhash.h>

namespace holdfast {
namespace {

using image_internal::WireField;
using image_internal::WireReader;

// What a slice takes in a header at the very least ("a":{"dtype":"U8",… and its sharding info): a
// layout cannot have more slices than its header has room for, whatever it says.
constexpr uint64_t kHeaderBytesPerSliceMin = 64;

void PutUnsigned(protozero::pbf_writer& writer, uint32_t field, uint64_t value) {
  if (value != 0) {
    writer.add_uint64(field, value);
  }
}

void PutText(protozero::pbf_writer& writer, uint32_t field, const std::string& text) {
  if (!text.empty()) {
    writer.add_string(field, text);
  }
}

void PutPacked(protozero::pbf_writer& writer, uint32_t field, const std::vector<uint64_t>& values) {
  if (!values.empty()) {
    writer.add_packed_uint64(field, values.begin(), values.end());
  }
}

// Encoded apart and then added, because protozero's nested writer drops a message without fields:
// the box of a 0-dim tensor and the flat range 0, 0 are such.
void PutPlace(protozero::pbf_writer& writer, const Slice& slice) {
  std::string bytes;
  protozero::pbf_writer place(bytes);
  if (const auto* box = std::get_if<BoxPlace>(&slice.place)) {
    PutPacked(place, 1, box->offset);
    PutPacked(place, 2, box->shape);
    writer.add_message(4, bytes);
  } else if (const auto* flat = std::get_if<FlatPlace>(&slice.place)) {
    PutUnsigned(place, 1, flat->start);
    PutUnsigned(place, 2, flat->length);
    writer.add_message(5, bytes);
  }
}

// Field numbers are those of proto/holdfast/v1/record.proto, in ascending order and without
// defaults, as protobuf's own deterministic serialisation has them.
void PutSlice(protozero::pbf_writer& writer, const Slice& slice) {
  PutText(writer, 1, slice.name);
  PutUnsigned(writer, 2, static_cast<uint64_t>(slice.dtype));
  PutPacked(writer, 3, slice.global_shape);
  PutPlace(writer, slice);
  PutUnsigned(writer, 6, slice.image_offset);
  PutUnsigned(writer, 7, slice.bytes);
  PutText(writer, 8, slice.key);
  PutUnsigned(writer, 9, static_cast<uint64_t>(slice.kind));
  PutText(writer, 10, slice.codec);
}

absl::StatusOr<BoxPlace> ReadBox(std::string_view bytes) {
  BoxPlace box;
  WireReader reader("Box", bytes);
  for (WireField field; reader.Next(field);) {
    switch (field.number) {
      case 1:
        HF_RETURN_IF_ERROR(reader.PackedUnsigned(field, kDimensionsMax, box.offset));
        break;
      case 2:
        HF_RETURN_IF_ERROR(reader.PackedUnsigned(field, kDimensionsMax, box.shape));
        break;
      default:
        break;
    }
  }
  HF_RETURN_IF_ERROR(reader.status());
  return box;
}

absl::StatusOr<FlatPlace> ReadFlat(std::string_view bytes) {
  constexpr uint64_t kAny = std::numeric_limits<uint64_t>::max();
  FlatPlace flat;
  WireReader reader("FlatRange", bytes);
  for (WireField field; reader.Next(field);) {
    switch (field.number) {
      case 1:
        HF_RETURN_IF_ERROR(reader.Unsigned(field, kAny, flat.start));
        break;
      case 2:
        HF_RETURN_IF_ERROR(reader.Unsigned(field, kAny, flat.length));
        break;
      default:
        break;
    }
  }
  HF_RETURN_IF_ERROR(reader.status());
  return flat;
}

absl::Status ReadPlace(WireReader& reader, const WireField& field, Slice& slice) {
  std::string_view bytes;
  HF_RETURN_IF_ERROR(reader.Bytes(field, bytes));
  if (!std::holds_alternative<std::monostate>(slice.place)) {
    return absl::InvalidArgumentError("read Slice: it has both a box and a flat range");
  }
  if (field.number == 4) {
    HF_ASSIGN_OR_RETURN(slice.place, ReadBox(bytes));
  } else {
    HF_ASSIGN_OR_RETURN(slice.place, ReadFlat(bytes));
  }
  return absl::OkStatus();
}

absl::Status ReadSlice(std::string_view bytes, Slice& slice) {
  uint64_t dtype = 0;
  uint64_t kind = 0;
  WireReader reader("Slice", bytes);
  for (WireField field; reader.Next(field);) {
    switch (field.number) {
      case 1:
        HF_RETURN_IF_ERROR(reader.Bytes(field, slice.name));
        break;
      case 2:
        HF_RETURN_IF_ERROR(reader.Unsigned(field, 0xFF, dtype));
        break;
      case 3:
        HF_RETURN_IF_ERROR(reader.PackedUnsigned(field, kDimensionsMax, slice.global_shape));
        break;
      case 4:
      case 5:
        HF_RETURN_IF_ERROR(ReadPlace(reader, field, slice));
        break;
      case 6:
        HF_RETURN_IF_ERROR(reader.Unsigned(field, kImageBytesMax, slice.image_offset));
        break;
      case 7:
        HF_RETURN_IF_ERROR(reader.Unsigned(field, kImageBytesMax, slice.bytes));
        break;
      case 8:
        HF_RETURN_IF_ERROR(reader.Bytes(field, slice.key));
        break;
      case 9:
        HF_RETURN_IF_ERROR(reader.Unsigned(field, 0xFF, kind));
        break;
      case 10:
        HF_RETURN_IF_ERROR(reader.Bytes(field, slice.codec));
        break;
      default:
        break;
    }
  }
  HF_RETURN_IF_ERROR(reader.status());
  slice.dtype = static_cast<DType>(dtype);
  slice.kind = static_cast<SliceKind>(kind);
  HF_ASSIGN_OR_RETURN(const uint64_t length, image_internal::CheckSlice(slice));
  if (length != slice.bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("slice ", image_internal::QuoteName(slice.name), ": its length ", slice.bytes,
                     " contradicts its shape and dtype, which make ", length));
  }
  return absl::OkStatus();
}

// So that the slices are not moved again and again while they are read. What is malformed is found
// then.
size_t CountSlices(std::string_view layout_bytes) {
  size_t count = 0;
  WireReader reader("Layout", layout_bytes);
  for (WireField field; reader.Next(field);) {
    count += field.number == 1 ? 1 : 0;
  }
  return count;
}

absl::Status CheckOrderAndOffsets(const Layout& layout) {
  uint64_t offset = layout.header_bytes;
  for (size_t i = 0; i < layout.slices.size(); ++i) {
    const Slice& slice = layout.slices[i];
    if (i > 0 && image_internal::CompareSlices(layout.slices[i - 1], slice) >= 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("slice ", image_internal::QuoteName(slice.name), " (number ", i,
                       "): it is out of order or there twice"));
    }
    if (slice.image_offset != offset || slice.bytes > layout.image_bytes - offset) {
      return absl::InvalidArgumentError(absl::StrCat(
          "slice ", image_internal::QuoteName(slice.name), ": ", slice.bytes, " bytes at ",
          slice.image_offset, " leave a gap, overlap or leave the image; expected at ", offset,
          " of ", layout.image_bytes));
    }
    offset += slice.bytes;
  }
  if (offset != layout.image_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the slices end at ", offset, ", the image at ", layout.image_bytes));
  }
  return absl::OkStatus();
}

absl::Status CheckKeys(const Layout& layout) {
  for (size_t i = 0; i < layout.slices.size(); ++i) {
    const Slice& slice = layout.slices[i];
    if (slice.key != image_internal::KeyFor(layout.slices, i)) {
      return absl::InvalidArgumentError(
          absl::StrCat("slice ", image_internal::QuoteName(slice.name), ": its key ",
                       image_internal::QuoteName(slice.key), " should be '",
                       image_internal::KeyFor(layout.slices, i), "'"));
    }
  }
  return absl::OkStatus();
}

absl::Status ReadSlices(std::string_view layout_bytes, Layout& layout) {
  const size_t slices_max =
      std::min<uint64_t>(kSlicesMax, layout.header_bytes / kHeaderBytesPerSliceMin);
  layout.slices.reserve(std::min(slices_max, CountSlices(layout_bytes)));
  WireReader reader("Layout", layout_bytes);
  for (WireField field; reader.Next(field);) {
    if (field.number != 1) {
      continue;
    }
    std::string_view bytes;
    HF_RETURN_IF_ERROR(reader.Repeated(field, bytes));
    if (layout.slices.size() == slices_max) {
      return absl::InvalidArgumentError(absl::StrCat("it has more slices than its header of ",
                                                     layout.header_bytes,
                                                     " bytes can hold, or more than ", kSlicesMax));
    }
    HF_RETURN_IF_ERROR(ReadSlice(bytes, layout.slices.emplace_back()));
  }
  HF_RETURN_IF_ERROR(reader.status());
  return layout.slices.empty() ? absl::InvalidArgumentError("it has no slices") : absl::OkStatus();
}

absl::Status ReadName(std::string_view bytes, std::string_view& name) {
  WireReader reader("Slice", bytes);
  for (WireField field; reader.Next(field);) {
    if (field.number == 1) {
      return reader.Bytes(field, name);
    }
  }
  name = {};
  return reader.status();
}

// Field 1, of bytes, at the front of `rest`, its length in one or two bytes: as nearly all slices
// and names are. False: it is something else, and nothing has been taken.
bool TakeShortField1(std::string_view& rest, std::string_view& bytes) {
  constexpr uint8_t kField1OfBytes = 0x0A;
  const auto* p = reinterpret_cast<const uint8_t*>(rest.data());
  if (rest.size() < 3 || p[0] != kField1OfBytes || (p[1] >= 0x80 && p[2] >= 0x80)) {
    return false;
  }
  const size_t before = p[1] < 0x80 ? 2 : 3;
  const size_t length = p[1] < 0x80 ? p[1] : (p[1] & 0x7Fu) | size_t{p[2]} << 7;
  if (length > rest.size() - before) {
    return false;
  }
  bytes = rest.substr(before, length);
  rest.remove_prefix(before + length);
  return true;
}

absl::StatusOr<Layout> ReadLayout(std::string_view layout_bytes, uint64_t header_bytes,
                                  uint64_t image_bytes) {
  HF_RETURN_IF_ERROR(image_internal::CheckImageLengths(header_bytes, image_bytes));
  Layout layout;
  layout.header_bytes = header_bytes;
  layout.image_bytes = image_bytes;
  HF_RETURN_IF_ERROR(ReadSlices(layout_bytes, layout));
  HF_RETURN_IF_ERROR(CheckOrderAndOffsets(layout));
  HF_RETURN_IF_ERROR(image_internal::CheckAgreement(layout.slices));
  HF_RETURN_IF_ERROR(CheckKeys(layout));
  return layout;
}

}  // namespace

std::string EncodeLayout(const Layout& layout) {
  std::string bytes;
  protozero::pbf_writer writer(bytes);
  for (const Slice& slice : layout.slices) {
    protozero::pbf_writer nested(writer, 1);
    PutSlice(nested, slice);
  }
  return bytes;
}

LayoutHash HashLayout(std::string_view layout_bytes) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(layout_bytes.data(), layout_bytes.size()));
  LayoutHash hash;
  static_assert(sizeof(canonical.digest) == std::tuple_size_v<LayoutHash>);
  std::copy(std::begin(canonical.digest), std::end(canonical.digest), hash.begin());
  return hash;
}

absl::StatusOr<Layout> DecodeLayout(std::string_view layout_bytes, uint64_t header_bytes,
                                    uint64_t image_bytes) {
  absl::StatusOr<Layout> layout = ReadLayout(layout_bytes, header_bytes, image_bytes);
  if (!layout.ok()) {
    return Annotate(layout.status(), "decode layout");
  }
  return layout;
}

uint64_t NameHash(std::string_view name) {
  return XXH3_64bits(name.data(), name.size());
}

absl::Status ScanLayout(std::string_view layout_bytes,
                        absl::FunctionRef<absl::Status(const ScannedSlice&)> take) {
  ScannedSlice slice;
  std::string_view rest = layout_bytes;
  while (!rest.empty()) {
    if (!TakeShortField1(rest, slice.bytes)) {
      WireReader reader("Layout", rest);
      WireField field;
      if (!reader.Next(field)) {
        return reader.status();
      }
      rest = reader.rest();
      if (field.number != 1) {
        continue;
      }
      HF_RETURN_IF_ERROR(reader.Repeated(field, slice.bytes));
    }
    std::string_view in_slice = slice.bytes;
    if (!TakeShortField1(in_slice, slice.name)) {
      HF_RETURN_IF_ERROR(ReadName(slice.bytes, slice.name));
    }
    slice.name_hash = NameHash(slice.name);
    HF_RETURN_IF_ERROR(take(slice));
    ++slice.number;
  }
  return absl::OkStatus();
}

std::string_view PartBytes(std::string_view slice_bytes) {
  constexpr uint32_t kPlaceFieldMax = 5;  // of name, dtype, global_shape, box, flat
  size_t part = 0;
  uint32_t last = 0;
  WireReader reader("Slice", slice_bytes);
  for (WireField field; reader.Next(field);) {
    if (field.number > kPlaceFieldMax) {
      break;
    }
    if (field.number <= last) {
      return {};
    }
    last = field.number;
    part = slice_bytes.size() - reader.rest().size();
  }
  return reader.status().ok() ? slice_bytes.substr(0, part) : std::string_view();
}

absl::StatusOr<Slice> DecodeSlice(std::string_view slice_bytes) {
  Slice slice;
  HF_RETURN_IF_ERROR(ReadSlice(slice_bytes, slice));
  return slice;
}

}  // namespace holdfast
