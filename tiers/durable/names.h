// The names in a durable tier's directory (docs/formats.md, "NVMe directory", "Remote directory").
// Only the exact form that is written counts: "007.record" is nobody's. Pure functions.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/ids.h"
#include "tiers/durable/copy_store.h"

namespace holdfast {

inline constexpr std::string_view kHomeName = ".holdfast";
// In it, on NVMe, or in it below nodes/<node>, in a remote directory.
inline constexpr std::string_view kHomeIntentsName = "intents";
inline constexpr std::string_view kHomePoolName = "pool";
inline constexpr std::string_view kHomeLockName = "lock";
inline constexpr std::string_view kHomeReserveName = "reserve";
inline constexpr std::string_view kHomeOwnerName = "owner";
inline constexpr std::string_view kHomeProbePrefix = "probe-";
inline constexpr std::string_view kHomeWitnessName = "witness";  // NVMe only
// In it, whatever the kind; nodes in a remote directory only.
inline constexpr std::string_view kHomeIdName = "id";
inline constexpr std::string_view kHomeNodesName = "nodes";
inline constexpr std::string_view kHomeClusterName = "cluster";  // remote: whose it is
inline constexpr std::string_view kDoctorPrefix = ".holdfast-doctor-";
inline constexpr std::string_view kJobFileName = "JOB";
inline constexpr std::string_view kManifestName = "MANIFEST";
inline constexpr std::string_view kManifestJsonName = "manifest.json";
// In a remote step's directory from before its first shard until there is a manifest.
inline constexpr std::string_view kMarkName = "writing";

enum class StepFileRole { kUnknown, kImage, kRecord, kManifest, kManifestJson, kMark, kTemporary };
struct StepFile {
  StepFileRole role = StepFileRole::kUnknown;
  Rank rank = 0;                       // kImage, kRecord
  uint32_t world_size = 0;             // the same, in the remote tier
  ImageForm form = ImageForm::kPlain;  // kImage
};

enum class HomeEntry { kUnknown, kFile, kDirectory };
// What a name in one node's home is to be: `.holdfast` of a drive, `.holdfast/nodes/<node>` of a
// remote directory.
HomeEntry ParseHomeName(DurableKind kind, std::string_view name);
// The same in the `.holdfast` of a remote directory, which all nodes share.
HomeEntry ParseSharedHomeName(std::string_view name);

std::string StepDirectoryName(const CheckpointId& id);  // "900-a3"
std::optional<CheckpointId> ParseStepDirectoryName(std::string_view name);
std::string ClaimName(Attempt attempt);  // "attempt-3"
std::optional<Attempt> ParseClaimName(std::string_view name);
// In a remote job's directory while that job is being removed: "REMOVED-<uuid>".
std::string RemovedName(const JobUuid& job);
std::optional<JobUuid> ParseRemovedName(std::string_view name);

// NVMe: "1.safetensors". Remote: "shard-00001-of-00004.safetensors", and, compressed, the same with
// ".zst" behind it.
std::string ImageFileName(DurableKind kind, Rank rank, uint32_t world_size,
                          ImageForm form = ImageForm::kPlain);
std::string RecordFileName(DurableKind kind, Rank rank, uint32_t world_size);
StepFile ParseStepFileName(DurableKind kind, std::string_view name);

// 32 hex digits that nobody has had before.
std::string NewUnique();
bool IsUnique(std::string_view text);
std::string TemporaryName(std::string_view final_name, std::string_view unique);
// The final name of a temporary, or nothing if it is not one.
std::optional<std::string_view> ParseTemporaryName(std::string_view name);
std::string IntentFileName(std::string_view unique);  // "<unique>.intent"
// The unique part of that name, or of its temporary.
std::optional<std::string_view> ParseIntentFileName(std::string_view name);

}  // namespace holdfast
