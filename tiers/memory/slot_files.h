// The names in the memory tier's directory, and how a small file there is replaced. For
// tiers/memory, and for the daemon's watch over the directory.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "base/env.h"
#include "base/ids.h"

namespace holdfast {

enum class FileRole { kUnknown, kLock, kReserve, kImage, kNote, kRecord, kJobState, kTemporary };

// What a name in the directory means. Only the exact form that is written counts: "slot-17" is
// unknown.
struct ParsedName {
  FileRole role = FileRole::kUnknown;
  SlotId slot = 0;  // kImage, kNote, kRecord
  JobUuid job;      // kJobState
};
ParsedName ParseFileName(std::string_view name);

std::string ImageName(SlotId slot);  // "slot-000017"
std::string NoteName(SlotId slot);
std::string RecordName(SlotId slot);
std::string JobStateName(const JobUuid& job);
inline constexpr std::string_view kLockName = "lock";
inline constexpr std::string_view kReserveName = "reserve";

// Replaces `path` by `data`, whole or not at all, in two halves with a place between them for a
// sync point: PrepareFile writes and syncs `<path>.tmp` (replacing one left by a crash), CommitFile
// renames it and syncs the directory. Each removes the temporary file when it fails. After a failed
// CommitFile either content may be there.
absl::Status PrepareFile(Env& env, const std::string& path, std::string_view data);
absl::Status CommitFile(Env& env, const std::string& path);
// NotFound when there is none. Durable when it returns OK.
absl::Status RemoveFile(Env& env, const std::string& path);

}  // namespace holdfast
