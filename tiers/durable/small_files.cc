#include "tiers/durable/small_files.h"

#include <limits>
#include <protozero/pbf_writer.hpp>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tiers/durable/names.h"
#include "tiers/image/frame.h"
#include "tiers/image/wire.h"

namespace holdfast {
namespace {

using image_internal::WireField;
using image_internal::WireReader;

constexpr uint64_t kAny = std::numeric_limits<uint64_t>::max();
constexpr uint64_t kAny32 = std::numeric_limits<uint32_t>::max();

constexpr uint64_t kPublishCompressed = 8;  // as in the proto

void PutUnsigned(protozero::pbf_writer& writer, uint32_t field, uint64_t value) {
  if (value != 0) {
    writer.add_uint64(field, value);
  }
}

absl::Status ReadUuid(WireReader& reader, const WireField& field, JobUuid& job) {
  std::string_view bytes;
  HF_RETURN_IF_ERROR(reader.Bytes(field, bytes));
  HF_ASSIGN_OR_RETURN(job, JobUuid::FromBytes(bytes));
  return absl::OkStatus();
}

template <typename Number>
absl::Status ReadNumber(WireReader& reader, const WireField& field, uint64_t max, Number& out) {
  uint64_t value = 0;
  HF_RETURN_IF_ERROR(reader.Unsigned(field, max, value));
  out = static_cast<Number>(value);
  return absl::OkStatus();
}

// What is whole and yet not what any writer makes is damage to a reader.
template <typename T>
absl::StatusOr<T> AsDamage(absl::StatusOr<T> value) {
  return value.ok() ? std::move(value) : absl::DataLossError(value.status().message());
}

absl::StatusOr<Intent> ReadIntent(std::string_view body) {
  Intent intent;
  uint64_t kind = 0;
  uint64_t flag = 0;
  std::vector<uint64_t> ranks;
  WireReader reader("Intent", body);
  for (WireField field; reader.Next(field);) {
    switch (field.number) {
      case 1:
        HF_RETURN_IF_ERROR(reader.Unsigned(field, kAny32, kind));
        break;
      case 2:
        HF_RETURN_IF_ERROR(reader.Bytes(field, intent.unique));
        break;
      case 3:
        HF_RETURN_IF_ERROR(ReadUuid(reader, field, intent.job));
        break;
      case 4:
        HF_RETURN_IF_ERROR(reader.Bytes(field, intent.job_name));
        break;
      case 5:
        HF_RETURN_IF_ERROR(reader.Unsigned(field, kAny, intent.checkpoint.attempt));
        break;
      case 6:
        HF_RETURN_IF_ERROR(reader.Unsigned(field, kAny, intent.checkpoint.step));
        break;
      case 7:
        HF_RETURN_IF_ERROR(ReadNumber(reader, field, kWorldSizeMax, intent.world_size));
        break;
      case 8:
        HF_RETURN_IF_ERROR(reader.PackedUnsigned(field, kWorldSizeMax, ranks));
        break;
      case 9:
        HF_RETURN_IF_ERROR(reader.Unsigned(field, 1, flag));
        break;
      default:
        break;  // of a later version
    }
  }
  HF_RETURN_IF_ERROR(reader.status());
  // (In the file a kind of its own: a version that does not know it leaves it alone.)
  intent.compressed = kind == kPublishCompressed;
  intent.kind = intent.compressed ? IntentKind::kPublish : static_cast<IntentKind>(kind);
  intent.manifest_first = flag != 0;
  intent.ranks.reserve(ranks.size());
  for (const uint64_t rank : ranks) {
    if (rank >= kWorldSizeMax) {
      return absl::InvalidArgumentError(absl::StrCat("intent: rank ", rank));
    }
    intent.ranks.push_back(static_cast<Rank>(rank));
  }
  HF_RETURN_IF_ERROR(CheckIntent(intent));
  return intent;
}

absl::StatusOr<JobIdentity> ReadJob(std::string_view body) {
  JobIdentity job;
  WireReader reader("JobIdentity", body);
  for (WireField field; reader.Next(field);) {
    switch (field.number) {
      case 1:
        HF_RETURN_IF_ERROR(ReadUuid(reader, field, job.job));
        break;
      case 2:
        HF_RETURN_IF_ERROR(reader.Bytes(field, job.name));
        break;
      case 3:
        HF_RETURN_IF_ERROR(ReadNumber(reader, field, kAny32, job.uid));
        break;
      case 4:
        HF_RETURN_IF_ERROR(ReadNumber(reader, field, kAny32, job.gid));
        break;
      default:
        break;
    }
  }
  HF_RETURN_IF_ERROR(reader.status());
  HF_RETURN_IF_ERROR(CheckJob(job));
  return job;
}

absl::StatusOr<AttemptClaim> ReadClaim(std::string_view body) {
  AttemptClaim claim;
  WireReader reader("AttemptClaim", body);
  for (WireField field; reader.Next(field);) {
    switch (field.number) {
      case 1:
        HF_RETURN_IF_ERROR(ReadUuid(reader, field, claim.job));
        break;
      case 2:
        HF_RETURN_IF_ERROR(reader.Unsigned(field, kAny, claim.attempt));
        break;
      case 3:
        HF_RETURN_IF_ERROR(reader.Bytes(field, claim.opening));
        break;
      default:
        break;
    }
  }
  HF_RETURN_IF_ERROR(reader.status());
  HF_RETURN_IF_ERROR(CheckClaim(claim));
  return claim;
}

bool NamesStep(IntentKind kind) {
  return kind == IntentKind::kPublish || kind == IntentKind::kReplace ||
         kind == IntentKind::kRemove || kind == IntentKind::kManifest;
}

absl::Status CheckRanks(const Intent& intent) {
  const bool names_one = intent.kind == IntentKind::kPublish || intent.kind == IntentKind::kReplace;
  if (!names_one && intent.kind != IntentKind::kRemove) {
    return intent.ranks.empty() && intent.world_size == 0
               ? absl::OkStatus()
               : absl::InvalidArgumentError("intent: ranks where none are meant");
  }
  if (names_one && intent.ranks.size() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("intent: it publishes ", intent.ranks.size(), " ranks, not one"));
  }
  uint64_t next = 0;
  for (const Rank rank : intent.ranks) {
    if (rank < next || rank >= intent.world_size) {
      return absl::InvalidArgumentError(absl::StrCat(
          "intent: rank ", rank, " of ", intent.world_size, " is out of range or out of order"));
    }
    next = uint64_t{rank} + 1;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckIntent(const Intent& intent) {
  if (intent.kind < IntentKind::kPublish || intent.kind > IntentKind::kReplace) {
    return absl::InvalidArgumentError(
        absl::StrCat("intent: of kind ", static_cast<uint32_t>(intent.kind)));
  }
  if (!IsUnique(intent.unique)) {
    return absl::InvalidArgumentError("intent: its unique part is not 32 hex digits");
  }
  HF_RETURN_IF_ERROR(CheckJobName(intent.job_name));
  if (intent.job.IsZero()) {
    return absl::InvalidArgumentError("intent: it names no job uuid");
  }
  const bool names_attempt = NamesStep(intent.kind) || intent.kind == IntentKind::kClaim;
  if (names_attempt != (intent.checkpoint.attempt != 0) ||
      (!NamesStep(intent.kind) && intent.checkpoint.step != 0) ||
      (intent.manifest_first && intent.kind != IntentKind::kRemove) ||
      (intent.compressed && intent.kind != IntentKind::kPublish)) {
    return absl::InvalidArgumentError(
        "intent: its attempt, step and flags are not those of its kind");
  }
  if (intent.world_size > kWorldSizeMax) {
    return absl::InvalidArgumentError(absl::StrCat("intent: a world size of ", intent.world_size));
  }
  return CheckRanks(intent);
}

std::string EncodeIntent(const Intent& intent) {
  std::string body;
  protozero::pbf_writer writer(body);
  PutUnsigned(writer, 1,
              intent.compressed ? kPublishCompressed : static_cast<uint32_t>(intent.kind));
  writer.add_string(2, intent.unique);
  writer.add_bytes(3, intent.job.ToBytes());
  writer.add_string(4, intent.job_name);
  PutUnsigned(writer, 5, intent.checkpoint.attempt);
  PutUnsigned(writer, 6, intent.checkpoint.step);
  PutUnsigned(writer, 7, intent.world_size);
  if (!intent.ranks.empty()) {
    writer.add_packed_uint32(8, intent.ranks.begin(), intent.ranks.end());
  }
  PutUnsigned(writer, 9, intent.manifest_first ? 1 : 0);
  return EncodeFrame(FrameKind::kIntent, body);
}

absl::StatusOr<Intent> DecodeIntent(std::string_view bytes) {
  HF_ASSIGN_OR_RETURN(const std::string_view body, DecodeFrame(FrameKind::kIntent, bytes));
  return AsDamage(ReadIntent(body));
}

absl::Status CheckJob(const JobIdentity& job) {
  HF_RETURN_IF_ERROR(CheckJobName(job.name));
  return job.job.IsZero() ? absl::InvalidArgumentError("job identity: it names no job uuid")
                          : absl::OkStatus();
}

std::string EncodeJobFile(const JobIdentity& job) {
  std::string body;
  protozero::pbf_writer writer(body);
  writer.add_bytes(1, job.job.ToBytes());
  writer.add_string(2, job.name);
  PutUnsigned(writer, 3, job.uid);
  PutUnsigned(writer, 4, job.gid);
  return EncodeFrame(FrameKind::kJobIdentity, body);
}

absl::StatusOr<JobIdentity> DecodeJobFile(std::string_view bytes) {
  HF_ASSIGN_OR_RETURN(const std::string_view body, DecodeFrame(FrameKind::kJobIdentity, bytes));
  return AsDamage(ReadJob(body));
}

absl::Status CheckClaim(const AttemptClaim& claim) {
  if (claim.job.IsZero() || claim.attempt == 0) {
    return absl::InvalidArgumentError("attempt claim: it names no job uuid, or no attempt");
  }
  if (claim.opening.empty() || claim.opening.size() > kOpeningBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("attempt claim: an opening of ",
                                                   claim.opening.size(), " bytes; 1 to ",
                                                   kOpeningBytesMax, " are allowed"));
  }
  return absl::OkStatus();
}

std::string EncodeClaim(const AttemptClaim& claim) {
  std::string body;
  protozero::pbf_writer writer(body);
  writer.add_bytes(1, claim.job.ToBytes());
  PutUnsigned(writer, 2, claim.attempt);
  writer.add_bytes(3, claim.opening);
  return EncodeFrame(FrameKind::kAttemptClaim, body);
}

absl::StatusOr<AttemptClaim> DecodeClaim(std::string_view bytes) {
  HF_ASSIGN_OR_RETURN(const std::string_view body, DecodeFrame(FrameKind::kAttemptClaim, bytes));
  return AsDamage(ReadClaim(body));
}

}  // namespace holdfast
