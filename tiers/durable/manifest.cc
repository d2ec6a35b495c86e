#include "tiers/durable/manifest.h"

#include <algorithm>
#include <limits>
#include <protozero/pbf_writer.hpp>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/status.h"
#include "tiers/image/frame.h"
#include "tiers/image/wire.h"

namespace holdfast {
namespace {

using image_internal::WireField;
using image_internal::WireReader;

constexpr uint64_t kAny = std::numeric_limits<uint64_t>::max();

void PutUnsigned(protozero::pbf_writer& writer, uint32_t field, uint64_t value) {
  if (value != 0) {
    writer.add_uint64(field, value);
  }
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

absl::Status ReadCrc(WireReader& reader, const WireField& field, uint64_t& crc) {
  // A fixed64 of its own: the reader knows them packed only.
  if (field.type != image_internal::WireType::kFixed64) {
    return absl::InvalidArgumentError("read ManifestShard: field 4: it has the wrong wire type");
  }
  crc = field.value;
  return reader.status();
}

absl::Status ReadLikeness(std::string_view bytes, Likeness& likeness) {
  if (bytes.size() != likeness.tensors.size() + likeness.content.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("read ManifestShard: a likeness of ", bytes.size(), " bytes, not 32"));
  }
  const auto content = bytes.begin() + static_cast<ptrdiff_t>(likeness.tensors.size());
  std::copy(bytes.begin(), content, reinterpret_cast<char*>(likeness.tensors.data()));
  std::copy(content, bytes.end(), reinterpret_cast<char*>(likeness.content.data()));
  return absl::OkStatus();
}

absl::StatusOr<ManifestShard> ReadShard(std::string_view bytes) {
  ManifestShard shard;
  uint64_t value = 0;
  std::string_view hash;
  bool has_crc = false;
  WireReader reader("ManifestShard", bytes);
  for (WireField field; reader.Next(field);) {
    switch (field.number) {
      case 1:
        HF_RETURN_IF_ERROR(reader.Unsigned(field, kWorldSizeMax - 1, value));
        shard.rank = static_cast<Rank>(value);
        break;
      case 2:
        HF_RETURN_IF_ERROR(reader.Unsigned(field, kImageBytesMax, shard.image_bytes));
        break;
      case 3:
        HF_RETURN_IF_ERROR(reader.Unsigned(field, kRecordBytesMax, shard.record_bytes));
        break;
      case 4:
        if (has_crc) {
          return absl::InvalidArgumentError("read ManifestShard: field 4: it is given twice");
        }
        has_crc = true;
        HF_RETURN_IF_ERROR(ReadCrc(reader, field, shard.record_crc));
        break;
      case 5:
        HF_RETURN_IF_ERROR(reader.Bytes(field, hash));
        break;
      case 6:
        HF_RETURN_IF_ERROR(reader.Unsigned(field, kImageBytesMax, shard.shard_bytes));
        break;
      case 7: {
        std::string_view likeness;
        HF_RETURN_IF_ERROR(reader.Bytes(field, likeness));
        HF_RETURN_IF_ERROR(ReadLikeness(likeness, shard.likeness));
        break;
      }
      default:
        break;
    }
  }
  HF_RETURN_IF_ERROR(reader.status());
  if (hash.size() != shard.layout_hash.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("read ManifestShard: a layout hash of ", hash.size(), " bytes, not 16"));
  }
  std::copy(hash.begin(), hash.end(), reinterpret_cast<char*>(shard.layout_hash.data()));
  return shard;
}

absl::Status ReadField(WireReader& reader, const WireField& field, Manifest& manifest) {
  std::string_view bytes;
  uint64_t value = 0;
  switch (field.number) {
    case 1: {
      HF_RETURN_IF_ERROR(reader.Bytes(field, bytes));
      HF_ASSIGN_OR_RETURN(manifest.job, JobUuid::FromBytes(bytes));
      return absl::OkStatus();
    }
    case 2:
      return reader.Bytes(field, manifest.job_name);
    case 3:
      return reader.Unsigned(field, kAny, manifest.checkpoint.attempt);
    case 4:
      return reader.Unsigned(field, kAny, manifest.checkpoint.step);
    case 5:
      HF_RETURN_IF_ERROR(reader.Unsigned(field, kWorldSizeMax, value));
      manifest.world_size = static_cast<uint32_t>(value);
      return absl::OkStatus();
    case 6: {
      HF_RETURN_IF_ERROR(reader.Repeated(field, bytes));
      if (manifest.descent.size() == kDescentMax) {
        return absl::InvalidArgumentError("its line of descent is too long");
      }
      HF_ASSIGN_OR_RETURN(const Descent ancestor, ReadDescent(bytes));
      manifest.descent.push_back(ancestor);
      return absl::OkStatus();
    }
    case 7:
      HF_RETURN_IF_ERROR(reader.Unsigned(field, kAny, value));
      manifest.committed_unix_ms = static_cast<int64_t>(value);
      return absl::OkStatus();
    case 8: {
      HF_RETURN_IF_ERROR(reader.Repeated(field, bytes));
      if (manifest.shards.size() == kWorldSizeMax) {
        return absl::InvalidArgumentError("it names too many shards");
      }
      HF_ASSIGN_OR_RETURN(const ManifestShard shard, ReadShard(bytes));
      manifest.shards.push_back(shard);
      return absl::OkStatus();
    }
    default:
      return absl::OkStatus();  // of a later version
  }
}

// Every attempt comes from an older one, and the list follows the parents without a gap.
absl::Status CheckDescent(const Manifest& manifest) {
  if (manifest.descent.size() > kDescentMax) {
    return absl::InvalidArgumentError("manifest: its line of descent is too long");
  }
  Attempt expected = manifest.checkpoint.attempt;
  for (const Descent& descent : manifest.descent) {
    if (descent.attempt != expected || descent.attempt == 0 ||
        descent.parent.attempt >= descent.attempt) {
      return absl::InvalidArgumentError(absl::StrCat("manifest: its line of descent names attempt ",
                                                     descent.attempt, " where attempt ", expected,
                                                     " from an older one is expected"));
    }
    expected = descent.parent.attempt;
  }
  return absl::OkStatus();
}

template <typename Value>
std::string Differs(absl::string_view what, const Value& a, const Value& b) {
  return absl::StrCat(what, " is ", a, " in one, ", b, " in the other");
}

}  // namespace

uint64_t RecordCrcOf(std::string_view record_file) {
  constexpr size_t kCrcBytes = 8;
  return Crc64(record_file.substr(0, record_file.size() - std::min(record_file.size(), kCrcBytes)));
}

absl::Status CheckManifest(const Manifest& manifest) {
  HF_RETURN_IF_ERROR(CheckJobName(manifest.job_name));
  if (manifest.job.IsZero() || manifest.checkpoint.attempt == 0) {
    return absl::InvalidArgumentError("manifest: it names no job uuid, or no attempt");
  }
  if (manifest.world_size == 0 || manifest.world_size > kWorldSizeMax ||
      manifest.shards.size() != manifest.world_size) {
    return absl::InvalidArgumentError(absl::StrCat("manifest: ", manifest.shards.size(),
                                                   " shards, and a world size of ",
                                                   manifest.world_size));
  }
  for (size_t i = 0; i < manifest.shards.size(); ++i) {
    const ManifestShard& shard = manifest.shards[i];
    if (shard.rank != i || shard.image_bytes == 0 || shard.image_bytes > kImageBytesMax ||
        shard.record_bytes == 0 || shard.record_bytes > kRecordBytesMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("manifest: shard ", i, " is of rank ", shard.rank, ", with an image of ",
                       shard.image_bytes, " and a record of ", shard.record_bytes, " bytes"));
    }
    if (shard.shard_bytes != 0 && shard.shard_bytes <= shard.image_bytes) {
      return absl::InvalidArgumentError(absl::StrCat("manifest: rank ", i, " leaves slices out of ",
                                                     shard.shard_bytes, " bytes, and its file has ",
                                                     shard.image_bytes));
    }
  }
  return CheckDescent(manifest);
}

std::string EncodeManifest(const Manifest& manifest) {
  std::string body;
  protozero::pbf_writer writer(body);
  writer.add_bytes(1, manifest.job.ToBytes());
  writer.add_string(2, manifest.job_name);
  PutUnsigned(writer, 3, manifest.checkpoint.attempt);
  PutUnsigned(writer, 4, manifest.checkpoint.step);
  PutUnsigned(writer, 5, manifest.world_size);
  std::string nested;
  for (const Descent& descent : manifest.descent) {
    nested.clear();
    protozero::pbf_writer part(nested);
    PutUnsigned(part, 1, descent.attempt);
    PutUnsigned(part, 2, descent.parent.attempt);
    PutUnsigned(part, 3, descent.parent.step);
    writer.add_message(6, nested);
  }
  PutUnsigned(writer, 7, static_cast<uint64_t>(manifest.committed_unix_ms));
  for (const ManifestShard& shard : manifest.shards) {
    nested.clear();
    protozero::pbf_writer part(nested);
    PutUnsigned(part, 1, shard.rank);
    PutUnsigned(part, 2, shard.image_bytes);
    PutUnsigned(part, 3, shard.record_bytes);
    if (shard.record_crc != 0) {
      part.add_fixed64(4, shard.record_crc);
    }
    part.add_bytes(5, reinterpret_cast<const char*>(shard.layout_hash.data()),
                   shard.layout_hash.size());
    PutUnsigned(part, 6, shard.shard_bytes);
    if (shard.likeness.any()) {
      const auto text = [](const LayoutHash& hash) {
        return std::string(reinterpret_cast<const char*>(hash.data()), hash.size());
      };
      part.add_bytes(7, text(shard.likeness.tensors) + text(shard.likeness.content));
    }
    writer.add_message(8, nested);
  }
  return EncodeFrame(FrameKind::kManifest, body);
}

absl::StatusOr<Manifest> DecodeManifest(std::string_view bytes) {
  HF_ASSIGN_OR_RETURN(const std::string_view body, DecodeFrame(FrameKind::kManifest, bytes));
  Manifest manifest;
  absl::Status status;
  WireReader reader("Manifest", body);
  for (WireField field; status.ok() && reader.Next(field);) {
    status = ReadField(reader, field, manifest);
  }
  if (status.ok()) {
    status = reader.status();
  }
  if (status.ok()) {
    status = CheckManifest(manifest);
  }
  if (!status.ok()) {
    return absl::DataLossError(absl::StrCat("manifest: damaged: ", status.message()));
  }
  return manifest;
}

std::string DifferenceOf(const Manifest& a, const Manifest& b) {
  if (a.job != b.job) {
    return Differs("the job", a.job.ToString(), b.job.ToString());
  }
  if (a.job_name != b.job_name) {
    return Differs("the job's name", a.job_name, b.job_name);
  }
  if (a.checkpoint.attempt != b.checkpoint.attempt) {
    return Differs("the attempt", a.checkpoint.attempt, b.checkpoint.attempt);
  }
  if (a.checkpoint.step != b.checkpoint.step) {
    return Differs("the step", a.checkpoint.step, b.checkpoint.step);
  }
  if (a.world_size != b.world_size) {
    return Differs("the world size", a.world_size, b.world_size);
  }
  if (a.descent != b.descent) {
    return "the line of descent is another";
  }
  for (size_t i = 0; i < std::min(a.shards.size(), b.shards.size()); ++i) {
    ManifestShard other = b.shards[i];
    other.likeness = a.shards[i].likeness;  // (one of them may be of a version without)
    if (a.shards[i] != other) {
      return absl::StrCat("rank ", i, "'s copy is another: record ",
                          absl::Hex(a.shards[i].record_crc, absl::kZeroPad16), " in one, ",
                          absl::Hex(b.shards[i].record_crc, absl::kZeroPad16), " in the other");
    }
  }
  return a.shards.size() == b.shards.size() ? "" : "the number of shards is another";
}

std::string ManifestJson(const Manifest& manifest) {
  std::string out = absl::StrCat(
      "{\n  \"job\": \"", manifest.job_name, "\",\n  \"job_uuid\": \"", manifest.job.ToString(),
      "\",\n  \"attempt\": ", manifest.checkpoint.attempt,
      ",\n  \"step\": ", manifest.checkpoint.step, ",\n  \"world_size\": ", manifest.world_size,
      ",\n  \"committed_unix_ms\": ", manifest.committed_unix_ms, ",\n  \"shards\": [");
  const char* separator = "\n";
  for (const ManifestShard& shard : manifest.shards) {
    absl::StrAppend(
        &out, separator, "    {\"rank\": ", shard.rank, ", \"image_bytes\": ", shard.image_bytes,
        ", \"record_bytes\": ", shard.record_bytes, ", \"record_crc64\": \"",
        absl::Hex(shard.record_crc, absl::kZeroPad16), "\", \"layout_hash\": \"",
        ToHex(shard.layout_hash), "\"",
        shard.shard_bytes == 0 ? "" : absl::StrCat(", \"shard_bytes\": ", shard.shard_bytes), "}");
    separator = ",\n";
  }
  absl::StrAppend(&out, "\n  ]\n}\n");
  return out;
}

}  // namespace holdfast
