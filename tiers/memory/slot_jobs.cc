// Job states: what each job's history is, beside its copies.
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tiers/image/frame.h"
#include "tiers/memory/slot_note.h"
#include "tiers/memory/slot_store_impl.h"

namespace holdfast {

absl::Status SlotStore::WriteJobState(const JobUuid& job, std::string_view encoded) {
  Impl& m = *impl_;
  const std::string path = JoinPath(m.options.dir, JobStateName(job));
  if (encoded.size() > kJobStateBytesMax - kFrameOverheadBytes) {
    return absl::ResourceExhaustedError(absl::StrCat("write '", path, "': a job state of ",
                                                     encoded.size(), " bytes; at most ",
                                                     kJobStateBytesMax - kFrameOverheadBytes));
  }
  HF_ASSIGN_OR_RETURN(const JobIdentity identity, DecodeJobIdentity(encoded));
  if (identity.job != job) {
    return absl::InvalidArgumentError(
        absl::StrCat("write '", path, "': the state is of job ", identity.job.ToString()));
  }
  const std::shared_lock<std::shared_mutex> changing(m.directory_mutex);
  HF_RETURN_IF_ERROR(m.PrepareSmallFile(path, EncodeFrame(FrameKind::kJobState, encoded)));
  return CommitFile(m.env, path);
}

absl::Status SlotStore::RemoveJobState(const JobUuid& job) {
  const std::shared_lock<std::shared_mutex> changing(impl_->directory_mutex);
  return RemoveFile(impl_->env, JoinPath(impl_->options.dir, JobStateName(job)));
}

absl::StatusOr<std::vector<std::string>> SlotStore::JobStates() {
  Impl& m = *impl_;
  const std::shared_lock<std::shared_mutex> changing(m.directory_mutex);
  HF_ASSIGN_OR_RETURN(const std::vector<std::string> names, m.env.List(m.options.dir));
  std::vector<std::string> states;
  for (const std::string& name : names) {
    if (ParseFileName(name).role != FileRole::kJobState) {
      continue;
    }
    const absl::StatusOr<std::string> bytes =
        ReadFile(m.env, JoinPath(m.options.dir, name), kJobStateBytesMax);
    if (absl::IsNotFound(bytes.status())) {
      continue;  // removed meanwhile
    }
    HF_RETURN_IF_ERROR(bytes.status());
    const absl::StatusOr<std::string_view> body = DecodeFrame(FrameKind::kJobState, *bytes);
    if (body.ok()) {  // of the others the scan has told
      states.emplace_back(*body);
    }
  }
  return states;
}

}  // namespace holdfast
