// The small files of a durable tier: intents, JOB, attempts' claims. Framed protobuf messages
// (tiers/image/frame.h; Intent, JobIdentity, AttemptClaim of proto/holdfast/v1/state.proto),
// encoded without a protobuf runtime; a test proves them compatible. Pure functions.
//
// Decoding: DataLoss: torn, damaged, or contradicts itself. FailedPrecondition: of a newer format
// version.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/ids.h"
#include "tiers/tier.h"

namespace holdfast {

// Numbers as in the proto.
enum class IntentKind : uint32_t {
  kPublish = 1,
  kRemove = 2,
  kCreateJob = 3,
  kClaim = 4,
  kManifest = 5,
  kRemoveJob = 6,
  kReplace = 7,
};

struct Intent {
  IntentKind kind = IntentKind::kPublish;
  std::string unique;
  JobUuid job;
  std::string job_name;
  CheckpointId checkpoint;  // kClaim: the attempt only; kCreateJob, kRemoveJob: neither
  uint32_t world_size = 0;  // kPublish, kReplace, kRemove
  std::vector<Rank> ranks;  // kPublish, kReplace: one; kRemove: ascending
  bool manifest_first = false;
  bool compressed = false;  // kPublish: the image is, and has the name of one that is
  bool operator==(const Intent&) const = default;
};

struct AttemptClaim {
  JobUuid job;
  Attempt attempt = 0;
  std::string opening;
  bool operator==(const AttemptClaim&) const = default;
};

// Of whole files.
inline constexpr uint64_t kIntentBytesMax = uint64_t{4} << 20;
inline constexpr uint64_t kJobFileBytesMax = 4096;
inline constexpr uint64_t kClaimBytesMax = 4096;
inline constexpr size_t kOpeningBytesMax = 256;

absl::Status CheckIntent(const Intent& intent);
std::string EncodeIntent(const Intent& intent);
absl::StatusOr<Intent> DecodeIntent(std::string_view bytes);

absl::Status CheckJob(const JobIdentity& job);
std::string EncodeJobFile(const JobIdentity& job);
absl::StatusOr<JobIdentity> DecodeJobFile(std::string_view bytes);

absl::Status CheckClaim(const AttemptClaim& claim);
std::string EncodeClaim(const AttemptClaim& claim);
absl::StatusOr<AttemptClaim> DecodeClaim(std::string_view bytes);

}  // namespace holdfast
