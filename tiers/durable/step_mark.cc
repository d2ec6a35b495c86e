// The mark of a step whose writing has only begun: shards beside it, and no manifest, were never
// promised to anybody. Made before the step's first file and durable before any of them has its
// name; gone after the manifest is durable, or after the last of them (docs/formats.md, "Remote
// directory").
//
// Several nodes write one step at a time, and one of them publishes the manifest. Whoever makes the
// mark looks for the manifest afterwards; whoever publishes the manifest looks for the mark
// afterwards: so one of the two takes it away.
#include <sys/stat.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/errno_status.h"
#include "base/status.h"
#include "tiers/durable/copy_store_impl.h"

namespace holdfast {

absl::Status CopyStore::Impl::MarkBegun(const std::string& step_directory, uint32_t gid) {
  if (!remote()) {
    return absl::OkStatus();
  }
  HF_ASSIGN_OR_RETURN(const bool committed, Exists(JoinPath(step_directory, kManifestName)));
  if (committed) {
    return absl::OkStatus();
  }
  const std::string mark = JoinPath(step_directory, kMarkName);
  HF_ASSIGN_OR_RETURN(const bool marked, Exists(mark));
  if (!marked) {
    // What lies there without a mark was whole, and has lost its manifest: it is no beginning.
    HF_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                        env.List(step_directory, kStepNamesMax));
    if (std::any_of(names.begin(), names.end(), [&](const std::string& name) {
          return ParseStepFileName(options.kind, name).role == StepFileRole::kRecord;
        })) {
      return absl::OkStatus();
    }
  }
  const absl::StatusOr<std::unique_ptr<File>> made =
      env.Open(mark, OpenMode::kCreateExclusive, {.no_symlink = true});
  if (made.ok()) {
    HF_RETURN_IF_ERROR(GiveToOwner(**made, kKeepOwner, gid));
  } else if (!absl::IsAlreadyExists(made.status())) {
    return made.status();
  }
  // Also when it was there: whoever made it may have died before it was durable.
  HF_RETURN_IF_ERROR(env.SyncDirectory(step_directory));
  return made.ok() ? DropMarkOfCommitted(step_directory) : absl::OkStatus();
}

absl::Status CopyStore::Impl::MarkStillBegun(const std::string& step_directory, uint32_t gid) {
  if (!remote()) {
    return absl::OkStatus();
  }
  HF_ASSIGN_OR_RETURN(const bool there, Exists(JoinPath(step_directory, kMarkName)));
  return there ? absl::OkStatus() : MarkBegun(step_directory, gid);
}

// It outlives no manifest that a loss of power could take back.
absl::Status CopyStore::Impl::DropMarkOfCommitted(const std::string& step_directory) {
  if (!remote()) {
    return absl::OkStatus();
  }
  HF_ASSIGN_OR_RETURN(const bool committed, Exists(JoinPath(step_directory, kManifestName)));
  HF_ASSIGN_OR_RETURN(const bool marked, Exists(JoinPath(step_directory, kMarkName)));
  if (!committed || !marked) {
    return absl::OkStatus();
  }
  HF_RETURN_IF_ERROR(env.SyncDirectory(step_directory));
  return RemoveIfThere(JoinPath(step_directory, kMarkName));
}

absl::Status CopyStore::Impl::RemoveStepIfEmpty(const std::string& step_directory) {
  if (!remote()) {
    return RemoveIfEmpty(step_directory);
  }
  const absl::StatusOr<std::vector<std::string>> names = env.List(step_directory, kStepNamesMax);
  const bool too_many = absl::IsResourceExhausted(names.status()) && !IsErrno(names.status());
  if (absl::IsFailedPrecondition(names.status()) || too_many) {
    return absl::OkStatus();  // no directory; not empty
  }
  if (!names.ok() && !absl::IsNotFound(names.status())) {
    return names.status();
  }
  bool marked = false;
  bool needs_it = false;
  for (const std::string& name : names.value_or(std::vector<std::string>())) {
    const StepFileRole role = ParseStepFileName(options.kind, name).role;
    marked = marked || role == StepFileRole::kMark;
    needs_it = needs_it || role == StepFileRole::kImage || role == StepFileRole::kRecord ||
               role == StepFileRole::kTemporary;
  }
  if (marked && !needs_it) {
    const std::string mark = JoinPath(step_directory, kMarkName);
    const absl::StatusOr<FileInfo> info = env.Info(mark);
    if (info.ok() && S_ISDIR(info->mode)) {
      return absl::OkStatus();  // somebody's, and with it the step's directory
    }
    HF_RETURN_IF_ERROR(RemoveIfThere(mark));
  }
  return RemoveIfEmpty(step_directory);
}

}  // namespace holdfast
