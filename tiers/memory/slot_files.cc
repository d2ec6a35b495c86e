#include "tiers/memory/slot_files.h"

#include <span>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/daemon_lock.h"
#include "base/status.h"

namespace holdfast {
namespace {

constexpr std::string_view kLaterLockPrefix = "lock.";
constexpr std::string_view kSlotPrefix = "slot-";
constexpr std::string_view kNoteSuffix = ".note";
constexpr std::string_view kRecordSuffix = ".record";
constexpr std::string_view kJobPrefix = "job-";
constexpr std::string_view kTemporarySuffix = ".tmp";

bool TakeSuffix(std::string_view& name, std::string_view suffix) {
  if (!name.ends_with(suffix)) {
    return false;
  }
  name.remove_suffix(suffix.size());
  return true;
}

// "lock.1", … (base/daemon_lock.h).
bool IsLaterLock(std::string_view name) {
  int index = 0;
  return name.starts_with(kLaterLockPrefix) &&
         absl::SimpleAtoi(ToAbsl(name.substr(kLaterLockPrefix.size())), &index) && index > 0 &&
         index < kDaemonLocksMax && name == absl::StrCat(ToAbsl(kLaterLockPrefix), index);
}

}  // namespace

std::string ImageName(SlotId slot) {
  return absl::StrCat(ToAbsl(kSlotPrefix), absl::Dec(slot, absl::kZeroPad6));
}
std::string NoteName(SlotId slot) {
  return absl::StrCat(ImageName(slot), ToAbsl(kNoteSuffix));
}
std::string RecordName(SlotId slot) {
  return absl::StrCat(ImageName(slot), ToAbsl(kRecordSuffix));
}
std::string JobStateName(const JobUuid& job) {
  return absl::StrCat(ToAbsl(kJobPrefix), job.ToString());
}

ParsedName ParseFileName(std::string_view name) {
  if (name == kLockName || IsLaterLock(name)) {
    return {FileRole::kLock, 0, {}};
  }
  if (name == kReserveName) {
    return {FileRole::kReserve, 0, {}};
  }
  std::string_view stem = name;
  const bool temporary = TakeSuffix(stem, kTemporarySuffix);
  if (stem.starts_with(kJobPrefix)) {
    const absl::StatusOr<JobUuid> job = JobUuid::FromString(stem.substr(kJobPrefix.size()));
    if (!job.ok() || JobStateName(*job) != stem) {
      return {};
    }
    return {temporary ? FileRole::kTemporary : FileRole::kJobState, 0, *job};
  }
  FileRole role = FileRole::kImage;
  if (TakeSuffix(stem, kNoteSuffix)) {
    role = FileRole::kNote;
  } else if (TakeSuffix(stem, kRecordSuffix)) {
    role = FileRole::kRecord;
  }
  SlotId slot = 0;
  if (!stem.starts_with(kSlotPrefix) ||
      !absl::SimpleAtoi(ToAbsl(stem.substr(kSlotPrefix.size())), &slot) ||
      ImageName(slot) != stem) {
    return {};
  }
  if (temporary) {
    // Images are never written under a temporary name.
    return {role == FileRole::kImage ? FileRole::kUnknown : FileRole::kTemporary, slot, {}};
  }
  return {role, slot, {}};
}

absl::Status PrepareFile(Env& env, const std::string& path, std::string_view data) {
  const std::string temporary = absl::StrCat(path, ToAbsl(kTemporarySuffix));
  absl::StatusOr<std::unique_ptr<File>> file = env.Open(temporary, OpenMode::kCreateExclusive);
  if (absl::IsAlreadyExists(file.status())) {
    HF_RETURN_IF_ERROR(env.Unlink(temporary));
    file = env.Open(temporary, OpenMode::kCreateExclusive);
  }
  HF_RETURN_IF_ERROR(file.status());
  absl::Status status = (*file)->WriteAt(0, std::as_bytes(std::span<const char>(data)));
  if (status.ok()) {
    status = (*file)->SyncData();
  }
  if (!status.ok()) {
    env.Unlink(temporary).IgnoreError();  // what is left, the next write or scan removes
  }
  return status;
}

absl::Status CommitFile(Env& env, const std::string& path) {
  const std::string temporary = absl::StrCat(path, ToAbsl(kTemporarySuffix));
  if (absl::Status status = env.Rename(temporary, path); !status.ok()) {
    env.Unlink(temporary).IgnoreError();
    return status;
  }
  return env.SyncDirectory(ParentDirectory(path));
}

absl::Status RemoveFile(Env& env, const std::string& path) {
  HF_RETURN_IF_ERROR(env.Unlink(path));
  return env.SyncDirectory(ParentDirectory(path));
}

}  // namespace holdfast
