#include "tiers/image/record.h"

#include <algorithm>
#include <limits>
#include <protozero/pbf_writer.hpp>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/status.h"
#include "tiers/image/kept.h"
#include "tiers/image/wire.h"

namespace holdfast {
namespace {

using image_internal::WireField;
using image_internal::WireReader;

// docs/formats.md, "Record": magic, version, reserved, body length; body; CRC-64/XZ of all that.
constexpr std::string_view kMagic = "HFRECORD";
constexpr size_t kVersionAt = 8;
constexpr size_t kReservedAt = 12;
constexpr size_t kBodyLengthAt = 16;
constexpr size_t kBodyAt = 24;
constexpr size_t kCrcBytes = 8;

constexpr uint64_t kAny = std::numeric_limits<uint64_t>::max();

void AppendLittleEndian(uint64_t value, size_t bytes, std::string& out) {
  for (size_t i = 0; i < bytes; ++i) {
    out.push_back(static_cast<char>(value >> (8 * i)));
  }
}

uint64_t LittleEndianAt(std::string_view bytes, size_t at, size_t count) {
  uint64_t value = 0;
  for (size_t i = 0; i < count; ++i) {
    value |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[at + i])) << (8 * i);
  }
  return value;
}

void PutUnsigned(protozero::pbf_writer& writer, uint32_t field, uint64_t value) {
  if (value != 0) {
    writer.add_uint64(field, value);
  }
}

std::string EncodeKept(const KeptSlices& kept) {
  std::string bytes;
  protozero::pbf_writer writer(bytes);
  PutUnsigned(writer, 1, kept.image_bytes);
  PutUnsigned(writer, 2, kept.header_bytes);
  if (!kept.header_digests.empty()) {
    writer.add_packed_fixed64(3, kept.header_digests.begin(), kept.header_digests.end());
  }
  if (!kept.runs.empty()) {
    writer.add_packed_uint64(4, kept.runs.begin(), kept.runs.end());
  }
  if (!kept.owners.empty()) {
    writer.add_packed_uint32(5, kept.owners.begin(), kept.owners.end());
  }
  writer.add_bytes(6, reinterpret_cast<const char*>(kept.plan.data()), kept.plan.size());
  return bytes;
}

// Ascending field numbers, no defaults: byte for byte what protobuf's deterministic serialisation
// gives.
std::string EncodeBody(const ShardRecord& record) {
  std::string body;
  body.reserve(record.layout_bytes.size() + record.digests.size() * sizeof(uint64_t) + 4096);
  protozero::pbf_writer writer(body);
  writer.add_bytes(1, record.id.job.ToBytes());
  if (!record.job_name.empty()) {
    writer.add_string(2, record.job_name);
  }
  PutUnsigned(writer, 3, record.id.attempt);
  PutUnsigned(writer, 4, record.id.step);
  PutUnsigned(writer, 5, record.id.rank);
  PutUnsigned(writer, 6, record.world_size);
  PutUnsigned(writer, 7, record.generation);
  PutUnsigned(writer, 8, record.image_bytes);
  PutUnsigned(writer, 9, record.header_bytes);
  writer.add_bytes(10, reinterpret_cast<const char*>(record.layout_hash.data()),
                   record.layout_hash.size());
  if (!record.layout_bytes.empty()) {
    writer.add_bytes(11, record.layout_bytes);
  }
  if (!record.digests.empty()) {
    writer.add_packed_fixed64(12, record.digests.begin(), record.digests.end());
  }
  for (const Descent& descent : record.descent) {
    std::string bytes;  // apart: protozero's nested writer would drop a message without fields
    protozero::pbf_writer nested(bytes);
    PutUnsigned(nested, 1, descent.attempt);
    PutUnsigned(nested, 2, descent.parent.attempt);
    PutUnsigned(nested, 3, descent.parent.step);
    writer.add_message(13, bytes);
  }
  PutUnsigned(writer, 14, static_cast<uint64_t>(record.sealed_unix_ms));
  if (record.kept.has_value()) {
    writer.add_message(15, EncodeKept(*record.kept));
  }
  return body;
}

absl::StatusOr<Descent> ReadDescent(std::string_view bytes) {
  Descent descent;
  WireReader reader("Descent", bytes);
  for (WireField field; reader.Next(field);) {
    switch (field.number) {
      case 1:
        HF_RETURN_IF_ERROR(reader.Unsigned(field, kAny, descent.attempt));
        break;
      case 2:
        HF_RETURN_IF_ERROR(reader.Unsigned(field, kAny, descent.parent.attempt));
        break;
      case 3:
        HF_RETURN_IF_ERROR(reader.Unsigned(field, kAny, descent.parent.step));
        break;
      default:
        break;
    }
  }
  HF_RETURN_IF_ERROR(reader.status());
  return descent;
}

absl::Status ReadUuid(WireReader& reader, const WireField& field, JobUuid& job) {
  std::string_view bytes;
  HF_RETURN_IF_ERROR(reader.Bytes(field, bytes));
  HF_ASSIGN_OR_RETURN(job, JobUuid::FromBytes(bytes));
  return absl::OkStatus();
}

absl::Status ReadHash(WireReader& reader, const WireField& field, LayoutHash& hash) {
  std::string_view bytes;
  HF_RETURN_IF_ERROR(reader.Bytes(field, bytes));
  if (bytes.size() != hash.size()) {
    return absl::InvalidArgumentError(absl::StrCat("a hash has ", bytes.size(), " bytes, not 16"));
  }
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(hash.data()));
  return absl::OkStatus();
}

// What it says is checked when the layout is known (CheckKept).
absl::StatusOr<KeptSlices> ReadKept(std::string_view bytes) {
  KeptSlices kept;
  std::vector<uint64_t> owners;
  WireReader reader("KeptSlices", bytes);
  for (WireField field; reader.Next(field);) {
    switch (field.number) {
      case 1:
        HF_RETURN_IF_ERROR(reader.Unsigned(field, kImageBytesMax, kept.image_bytes));
        break;
      case 2:
        HF_RETURN_IF_ERROR(
            reader.Unsigned(field, kHeaderBytesMax + sizeof(uint64_t), kept.header_bytes));
        break;
      case 3:
        HF_RETURN_IF_ERROR(reader.PackedFixed64(field, kept.header_digests));
        break;
      case 4:
        HF_RETURN_IF_ERROR(reader.PackedUnsigned(field, kSlicesMax + 1, kept.runs));
        break;
      case 5:
        HF_RETURN_IF_ERROR(reader.PackedUnsigned(field, kSlicesMax, owners));
        break;
      case 6:
        HF_RETURN_IF_ERROR(ReadHash(reader, field, kept.plan));
        break;
      default:
        break;
    }
  }
  HF_RETURN_IF_ERROR(reader.status());
  kept.owners.reserve(owners.size());
  for (const uint64_t owner : owners) {
    if (owner >= kWorldSizeMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("read KeptSlices: rank ", owner, " owns a slice: there is no such rank"));
    }
    kept.owners.push_back(static_cast<Rank>(owner));
  }
  return kept;
}

absl::Status ReadAncestor(WireReader& reader, const WireField& field,
                          std::vector<Descent>& descent) {
  std::string_view bytes;
  HF_RETURN_IF_ERROR(reader.Repeated(field, bytes));
  if (descent.size() == kDescentMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("its line of descent has more than ", kDescentMax, " attempts"));
  }
  HF_ASSIGN_OR_RETURN(const Descent ancestor, ReadDescent(bytes));
  descent.push_back(ancestor);
  return absl::OkStatus();
}

// Unsigned fields, by number, where they go and how large they may be.
absl::Status ReadNumber(WireReader& reader, const WireField& field, ShardRecord& record) {
  uint64_t value = 0;
  switch (field.number) {
    case 3:
      return reader.Unsigned(field, kAny, record.id.attempt);
    case 4:
      return reader.Unsigned(field, kAny, record.id.step);
    case 5:
      HF_RETURN_IF_ERROR(reader.Unsigned(field, kWorldSizeMax - 1, value));
      record.id.rank = static_cast<Rank>(value);
      return absl::OkStatus();
    case 6:
      HF_RETURN_IF_ERROR(reader.Unsigned(field, kWorldSizeMax, value));
      record.world_size = static_cast<uint32_t>(value);
      return absl::OkStatus();
    case 7:
      return reader.Unsigned(field, kAny, record.generation);
    case 8:
      return reader.Unsigned(field, kImageBytesMax, record.image_bytes);
    case 9:
      return reader.Unsigned(field, kHeaderBytesMax + sizeof(uint64_t), record.header_bytes);
    default:
      HF_RETURN_IF_ERROR(reader.Unsigned(field, kAny, value));
      record.sealed_unix_ms = static_cast<int64_t>(value);
      return absl::OkStatus();
  }
}

absl::StatusOr<ShardRecord> ReadBody(std::string_view body) {
  ShardRecord record;
  WireReader reader("ShardRecord", body);
  for (WireField field; reader.Next(field);) {
    switch (field.number) {
      case 1:
        HF_RETURN_IF_ERROR(ReadUuid(reader, field, record.id.job));
        break;
      case 2:
        HF_RETURN_IF_ERROR(reader.Bytes(field, record.job_name));
        break;
      case 10:
        HF_RETURN_IF_ERROR(ReadHash(reader, field, record.layout_hash));
        break;
      case 11:
        HF_RETURN_IF_ERROR(reader.Bytes(field, record.layout_bytes));
        break;
      case 12:
        HF_RETURN_IF_ERROR(reader.PackedFixed64(field, record.digests));
        break;
      case 13:
        HF_RETURN_IF_ERROR(ReadAncestor(reader, field, record.descent));
        break;
      case 15: {
        std::string_view bytes;
        HF_RETURN_IF_ERROR(reader.Bytes(field, bytes));
        HF_ASSIGN_OR_RETURN(record.kept, ReadKept(bytes));
        break;
      }
      case 3:
      case 4:
      case 5:
      case 6:
      case 7:
      case 8:
      case 9:
      case 14:
        HF_RETURN_IF_ERROR(ReadNumber(reader, field, record));
        break;
      default:
        break;
    }
  }
  HF_RETURN_IF_ERROR(reader.status());
  return record;
}

absl::Status CheckIdentity(const ShardRecord& record) {
  HF_RETURN_IF_ERROR(CheckJobName(record.job_name));
  if (record.id.job.IsZero() || record.id.attempt == 0) {
    return absl::InvalidArgumentError("it names no job uuid, or no attempt");
  }
  if (record.id.rank >= record.world_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", record.id.rank, " is not below its world size of ", record.world_size));
  }
  return absl::OkStatus();
}

// Every attempt comes from an older one, and the list follows the parents without a gap.
absl::Status CheckDescent(const ShardRecord& record) {
  Attempt expected = record.id.attempt;
  for (const Descent& descent : record.descent) {
    if (descent.attempt != expected || descent.attempt == 0 ||
        descent.parent.attempt >= descent.attempt) {
      return absl::InvalidArgumentError(absl::StrCat(
          "its line of descent names attempt ", descent.attempt, " from attempt ",
          descent.parent.attempt, " where attempt ", expected, " from an older one is expected"));
    }
    expected = descent.parent.attempt;
  }
  return absl::OkStatus();
}

absl::StatusOr<Layout> CheckLayout(const ShardRecord& record) {
  if (const LayoutHash hash = HashLayout(record.layout_bytes); hash != record.layout_hash) {
    return absl::InvalidArgumentError(absl::StrCat(
        "its layout's hash is ", ToHex(hash), ", the record says ", ToHex(record.layout_hash)));
  }
  absl::StatusOr<Layout> layout =
      DecodeLayout(record.layout_bytes, record.header_bytes, record.image_bytes);
  if (layout.ok() && record.digests.size() != DigestCount(*layout)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "it has ", record.digests.size(), " digests, its layout needs ", DigestCount(*layout)));
  }
  return layout;
}

absl::StatusOr<RecordAndLayout> ReadAndCheckBody(std::string_view body) {
  RecordAndLayout read;
  HF_ASSIGN_OR_RETURN(read.record, ReadBody(body));
  HF_RETURN_IF_ERROR(CheckIdentity(read.record));
  HF_RETURN_IF_ERROR(CheckDescent(read.record));
  HF_ASSIGN_OR_RETURN(read.layout, CheckLayout(read.record));
  HF_RETURN_IF_ERROR(image_internal::CheckKept(read.record, read.layout));
  read.record.likeness = LikenessOf(read.record, read.layout);
  return read;
}

uint32_t VersionOf(const ShardRecord& record) {
  return record.kept.has_value() ? 2 : 1;
}

absl::Status Torn(const std::string& why) {
  return absl::DataLossError(
      absl::StrCat("read record: ", why, "; it is torn or damaged: use another copy"));
}

}  // namespace

bool ShardRecord::operator==(const ShardRecord& other) const {
  const auto all = [](const ShardRecord& r) {
    return std::tie(r.id, r.job_name, r.world_size, r.generation, r.image_bytes, r.header_bytes,
                    r.layout_hash, r.layout_bytes, r.digests, r.descent, r.sealed_unix_ms, r.kept);
  };
  return all(*this) == all(other);
}

std::string EncodeRecord(const ShardRecord& record) {
  const std::string body = EncodeBody(record);
  std::string file;
  file.reserve(kBodyAt + body.size() + kCrcBytes);
  file.append(kMagic);
  AppendLittleEndian(VersionOf(record), 4, file);
  AppendLittleEndian(0, 4, file);
  AppendLittleEndian(body.size(), 8, file);
  file.append(body);
  AppendLittleEndian(Crc64(file), kCrcBytes, file);
  return file;
}

absl::Status CheckRecordFraming(std::string_view bytes) {
  if (bytes.size() < kBodyAt + kCrcBytes) {
    return Torn(absl::StrCat("it has ", bytes.size(), " bytes, fewer than any record"));
  }
  if (bytes.substr(0, kMagic.size()) != kMagic) {
    return Torn("it does not begin with HFRECORD");
  }
  // Magic and version stay where they are for ever; what follows may change with the version. So
  // the version is judged before the CRC.
  const uint64_t version = LittleEndianAt(bytes, kVersionAt, 4);
  if (version > kRecordFormatVersion) {
    return absl::FailedPreconditionError(absl::StrCat(
        "read record: it has format version ", version, ", this program reads up to version ",
        kRecordFormatVersion, ": use a newer Holdfast"));
  }
  const uint64_t body_bytes = LittleEndianAt(bytes, kBodyLengthAt, 8);
  if (body_bytes != bytes.size() - kBodyAt - kCrcBytes) {
    return Torn(absl::StrCat("its length field says ", body_bytes, " bytes of body, ",
                             bytes.size() - kBodyAt - kCrcBytes, " are there"));
  }
  const std::string_view covered = bytes.substr(0, kBodyAt + body_bytes);
  if (Crc64(covered) != LittleEndianAt(bytes, covered.size(), kCrcBytes)) {
    return Torn("its CRC does not match");
  }
  if (version == 0 || LittleEndianAt(bytes, kReservedAt, 4) != 0 ||
      bytes.size() > kRecordBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("read record: format version ", version,
                                                   ", reserved field ",
                                                   LittleEndianAt(bytes, kReservedAt, 4), " and ",
                                                   bytes.size(), " bytes: no writer makes these"));
  }
  return absl::OkStatus();
}

absl::StatusOr<RecordAndLayout> DecodeRecordAndLayout(std::string_view bytes) {
  HF_RETURN_IF_ERROR(CheckRecordFraming(bytes));
  absl::StatusOr<RecordAndLayout> read =
      ReadAndCheckBody(bytes.substr(kBodyAt, bytes.size() - kBodyAt - kCrcBytes));
  if (!read.ok()) {
    return Annotate(read.status(), "read record");
  }
  if (VersionOf(read->record) != LittleEndianAt(bytes, kVersionAt, 4)) {
    return absl::InvalidArgumentError(
        absl::StrCat("read record: it is of format version ", LittleEndianAt(bytes, kVersionAt, 4),
                     ", and it ", read->record.kept ? "leaves" : "does not leave",
                     " slices out, which is what version 2 is for: no writer makes this"));
  }
  return read;
}

absl::StatusOr<ShardRecord> DecodeRecord(std::string_view bytes) {
  HF_ASSIGN_OR_RETURN(RecordAndLayout read, DecodeRecordAndLayout(bytes));
  return std::move(read.record);
}

}  // namespace holdfast
