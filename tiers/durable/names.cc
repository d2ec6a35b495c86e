#include "tiers/durable/names.h"

#include <algorithm>
#include <random>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/attempts.h"
#include "base/status.h"

namespace holdfast {
namespace {

constexpr std::string_view kImageSuffix = ".safetensors";
constexpr std::string_view kCompressedSuffix = ".safetensors.zst";
constexpr std::string_view kRecordSuffix = ".record";
constexpr std::string_view kIntentSuffix = ".intent";
constexpr std::string_view kTemporarySuffix = ".tmp";
constexpr std::string_view kClaimPrefix = "attempt-";
constexpr std::string_view kRemovedPrefix = "REMOVED-";
constexpr std::string_view kShardPrefix = "shard-";
constexpr std::string_view kOf = "-of-";
constexpr size_t kUniqueBytes = 32;

bool TakeSuffix(std::string_view& name, std::string_view suffix) {
  if (!name.ends_with(suffix)) {
    return false;
  }
  name.remove_suffix(suffix.size());
  return true;
}

bool TakePrefix(std::string_view& name, std::string_view prefix) {
  if (!name.starts_with(prefix)) {
    return false;
  }
  name.remove_prefix(prefix.size());
  return true;
}

std::string CopyStem(DurableKind kind, Rank rank, uint32_t world_size) {
  return kind == DurableKind::kNvme
             ? absl::StrCat(rank)
             : absl::StrCat(ToAbsl(kShardPrefix), absl::Dec(rank, absl::kZeroPad5), ToAbsl(kOf),
                            absl::Dec(world_size, absl::kZeroPad5));
}

// A number as it may stand in a name; whether it is in the exact form is seen by writing it again.
template <typename Number>
bool ParseNumber(std::string_view text, Number& out) {
  return absl::SimpleAtoi(ToAbsl(text), &out);
}

bool ParseAttempt(std::string_view text, Attempt& out) {
  return ParseNumber(text, out) && out != 0 && out <= kAttemptMax;
}

}  // namespace

HomeEntry ParseHomeName(DurableKind kind, std::string_view name) {
  const bool nvme = kind == DurableKind::kNvme;
  if (name == kHomeIntentsName || (nvme && name == kHomePoolName)) {
    return HomeEntry::kDirectory;
  }
  // The owner is replaced through a temporary of WriteFileAtomically (base/env.h).
  const bool file =
      name == kHomeLockName || name == kHomeReserveName || name.starts_with(kHomeProbePrefix) ||
      (nvme ? name == kHomeIdName || name == kHomeWitnessName
            : name == kHomeOwnerName || name == absl::StrCat(ToAbsl(kHomeOwnerName), ".tmp"));
  return file ? HomeEntry::kFile : HomeEntry::kUnknown;
}

HomeEntry ParseSharedHomeName(std::string_view name) {
  if (name == kHomeNodesName) {
    return HomeEntry::kDirectory;
  }
  return name == kHomeIdName || name == kHomeClusterName ? HomeEntry::kFile : HomeEntry::kUnknown;
}

std::string StepDirectoryName(const CheckpointId& id) {
  return absl::StrCat(id.step, "-a", id.attempt);
}

std::optional<CheckpointId> ParseStepDirectoryName(std::string_view name) {
  const size_t dash = name.find("-a");
  CheckpointId id;
  if (dash == std::string_view::npos || !ParseNumber(name.substr(0, dash), id.step) ||
      !ParseAttempt(name.substr(dash + 2), id.attempt) || StepDirectoryName(id) != name) {
    return std::nullopt;
  }
  return id;
}

std::string ClaimName(Attempt attempt) {
  return absl::StrCat(ToAbsl(kClaimPrefix), attempt);
}

std::optional<Attempt> ParseClaimName(std::string_view name) {
  Attempt attempt = 0;
  std::string_view number = name;
  if (!TakePrefix(number, kClaimPrefix) || !ParseAttempt(number, attempt) ||
      ClaimName(attempt) != name) {
    return std::nullopt;
  }
  return attempt;
}

std::string RemovedName(const JobUuid& job) {
  return absl::StrCat(ToAbsl(kRemovedPrefix), job.ToString());
}

std::optional<JobUuid> ParseRemovedName(std::string_view name) {
  std::string_view text = name;
  if (!TakePrefix(text, kRemovedPrefix)) {
    return std::nullopt;
  }
  const absl::StatusOr<JobUuid> job = JobUuid::FromString(text);
  return job.ok() && RemovedName(*job) == name ? std::optional(*job) : std::nullopt;
}

std::string ImageFileName(DurableKind kind, Rank rank, uint32_t world_size, ImageForm form) {
  return absl::StrCat(CopyStem(kind, rank, world_size),
                      ToAbsl(form == ImageForm::kPlain ? kImageSuffix : kCompressedSuffix));
}

std::string RecordFileName(DurableKind kind, Rank rank, uint32_t world_size) {
  return absl::StrCat(CopyStem(kind, rank, world_size), ToAbsl(kRecordSuffix));
}

StepFile ParseStepFileName(DurableKind kind, std::string_view name) {
  if (ParseTemporaryName(name).has_value()) {
    return {StepFileRole::kTemporary};
  }
  if (kind == DurableKind::kRemote && name == kManifestName) {
    return {StepFileRole::kManifest};
  }
  if (kind == DurableKind::kRemote && name == kManifestJsonName) {
    return {StepFileRole::kManifestJson};
  }
  if (kind == DurableKind::kRemote && name == kMarkName) {
    return {StepFileRole::kMark};
  }
  StepFile file;
  std::string_view stem = name;
  if (TakeSuffix(stem, kImageSuffix)) {
    file.role = StepFileRole::kImage;
  } else if (kind == DurableKind::kRemote && TakeSuffix(stem, kCompressedSuffix)) {
    file.role = StepFileRole::kImage;
    file.form = ImageForm::kCompressed;
  } else if (TakeSuffix(stem, kRecordSuffix)) {
    file.role = StepFileRole::kRecord;
  } else {
    return {};
  }
  std::string_view rest = stem;
  if (kind == DurableKind::kRemote) {
    const size_t of = stem.find(kOf);
    if (of == std::string_view::npos ||
        !ParseNumber(stem.substr(of + kOf.size()), file.world_size)) {
      return {};
    }
    rest = stem.substr(0, of);
    if (!TakePrefix(rest, kShardPrefix) || file.world_size > kWorldSizeMax) {
      return {};
    }
  }
  const uint32_t ranks = kind == DurableKind::kRemote ? file.world_size : kWorldSizeMax;
  if (!ParseNumber(rest, file.rank) || file.rank >= ranks ||
      CopyStem(kind, file.rank, file.world_size) != stem) {
    return {};
  }
  return file;
}

std::string NewUnique() {
  std::random_device random;  // the kernel's: unlike on all nodes, and after every start
  std::string out;
  for (int i = 0; i < 4; ++i) {
    absl::StrAppend(&out, absl::Hex(static_cast<uint32_t>(random()), absl::kZeroPad8));
  }
  return out;
}

bool IsUnique(std::string_view text) {
  return text.size() == kUniqueBytes && std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

std::string TemporaryName(std::string_view final_name, std::string_view unique) {
  return absl::StrCat(".", ToAbsl(final_name), ".", ToAbsl(unique), ToAbsl(kTemporarySuffix));
}

std::optional<std::string_view> ParseTemporaryName(std::string_view name) {
  std::string_view rest = name;
  if (!TakePrefix(rest, ".") || !TakeSuffix(rest, kTemporarySuffix) ||
      rest.size() < kUniqueBytes + 2 || rest[rest.size() - kUniqueBytes - 1] != '.' ||
      !IsUnique(rest.substr(rest.size() - kUniqueBytes))) {
    return std::nullopt;
  }
  return rest.substr(0, rest.size() - kUniqueBytes - 1);
}

std::string IntentFileName(std::string_view unique) {
  return absl::StrCat(ToAbsl(unique), ToAbsl(kIntentSuffix));
}

std::optional<std::string_view> ParseIntentFileName(std::string_view name) {
  std::string_view unique = ParseTemporaryName(name).value_or(name);
  if (!TakeSuffix(unique, kIntentSuffix) || !IsUnique(unique)) {
    return std::nullopt;
  }
  return unique;
}

}  // namespace holdfast
