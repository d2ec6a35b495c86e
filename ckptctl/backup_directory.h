// A directory with jobs' copies in the form of the remote tier (docs/formats.md, "Remote
// directory"): a backup, or the remote.dir of a cluster that a backup is brought into. ckptctl
// writes there under a node's name of its own, as a daemon would, so that a run that was ended at
// any point leaves nothing half done.
//
//   HF_ASSIGN_OR_RETURN(auto to, BackupDirectory::OpenToWrite(env, path, job));
//   HF_ASSIGN_OR_RETURN(std::optional<ManifestShard> there, to->Find(record));
//   if (!there) {
//     HF_ASSIGN_OR_RETURN(auto writing, to->Begin(record));
//     … HF_RETURN_IF_ERROR(to->Write(*writing, at, bytes)); …
//     HF_ASSIGN_OR_RETURN(there, to->Publish(*writing, record));
//   }
//   HF_RETURN_IF_ERROR(to->Commit(manifest));
//
// Errors: DataLoss: what lies there of that step is damaged, or is no file of ours. AlreadyExists:
// it is of other content, or of a newer Holdfast. Both say nothing of other steps. The others do:
// FailedPrecondition: the directory is not there, not ours, or failing; none of them says anything
// of a daemon. Used by one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/env.h"
#include "base/ids.h"
#include "tiers/durable/copy_store.h"

namespace holdfast {

// What has a step's name, or nearly, and is none: nothing of it is read.
struct StrayStep {
  CheckpointId id;  // as its name says
  absl::Status why;
};

class BackupDirectory {
 public:
  // As it lies there, read-only mounts included. NotFound: it has no such job; the message says
  // which it has.
  static absl::StatusOr<std::unique_ptr<BackupDirectory>> OpenToRead(Env& env,
                                                                     const std::string& path,
                                                                     const std::string& job_name);
  // Makes the job's directory, if there is none; else the job's owner is as that says. One run at a
  // time writes of a job.
  static absl::StatusOr<std::unique_ptr<BackupDirectory>> OpenToWrite(Env& env,
                                                                      const std::string& path,
                                                                      const JobIdentity& job);

  const std::string& path() const { return path_; }
  const JobIdentity& job() const { return job_; }
  // What of the job lay there when it was opened: by attempt, then by step. Every directory that
  // has a step's name is among it.
  const JobScan& scan() const { return scan_; }
  const std::vector<StrayStep>& strays() const { return strays_; }
  // Of one step; null: nothing.
  const CheckpointScan* Scanned(const CheckpointId& id) const;
  // Whether that is this directory, too.
  absl::StatusOr<bool> IsSame(const std::string& path) const;
  absl::StatusOr<bool> Contains(const std::string& path) const;  // as this one, or deep in it

  // Null: there is none, the step is not whole.
  absl::StatusOr<std::shared_ptr<const Manifest>> FindManifest(const CheckpointId& id);
  absl::StatusOr<std::unique_ptr<CopyStore::Reading>> OpenCopy(
      const CheckpointId& id, Rank rank, std::shared_ptr<const Manifest> manifest);

  // The shard as a manifest names it, if a copy with the same record lies there, which is read;
  // what its file leaves out makes no difference.
  absl::StatusOr<std::optional<ManifestShard>> Find(const ShardRecord& record);
  // Claims the attempt, as does Commit: no daemon of the job writes of it there, and none will.
  // AlreadyExists: it is there by now.
  absl::StatusOr<std::unique_ptr<CopyStore::Writing>> Begin(const ShardRecord& record);
  // The next bytes, durable when it returns: all of them at the end would take as long as the disk,
  // and that call nobody could end.
  absl::Status Write(CopyStore::Writing& writing, uint64_t at, std::span<const std::byte> bytes);
  absl::Status Sync(CopyStore::Writing& writing);
  absl::StatusOr<ManifestShard> Publish(CopyStore::Writing& writing, const ShardRecord& record);
  absl::Status Commit(const Manifest& manifest);
  // What was written of a step that cannot be completed goes, if it is ours and not committed.
  absl::Status Discard(const CheckpointId& id);
  // What this one has claimed, and of which nothing lies there, is nobody's again. The last call.
  absl::Status ReleaseClaims();

 private:
  BackupDirectory(Env& env, std::string path, std::unique_ptr<CopyStore> store)
      : env_(env), path_(std::move(path)), store_(std::move(store)) {}
  static absl::StatusOr<std::unique_ptr<BackupDirectory>> Open(Env& env, const std::string& path,
                                                               const std::string& node_name);
  absl::Status TakeName(const std::string& node_name);
  absl::StatusOr<JobIdentity> CheckJob(const JobIdentity& job) const;
  absl::Status Scan();
  absl::Status LookForStrays();
  absl::Status NoJob(const std::string& job_name) const;
  absl::StatusOr<std::string> JobsThere() const;
  std::string JobPath() const { return JoinPath(path_, job_.name); }
  std::string StepPath(const CheckpointId& id) const;
  CopyName NameOf(const CheckpointId& id, Rank rank, uint32_t world_size) const;
  absl::Status Claim(Attempt attempt);
  absl::Status CheckKind(const std::string& path, uint32_t kind) const;
  bool HadClaim(Attempt attempt) const;  // when it was opened
  absl::StatusOr<std::optional<ManifestShard>> FindShard(const ShardRecord& record);
  absl::Status CheckMayBegin(const CopyName& name, const Manifest* manifest,
                             const std::string& record_file) const;

  Env& env_;
  const std::string path_;
  const std::unique_ptr<CopyStore> store_;
  JobIdentity job_;
  JobScan scan_;
  std::vector<StrayStep> strays_;
  std::set<Attempt> claimed_;  // by this one, and not before
  // Of the step that was looked at last: each of its ranks asks for it.
  struct OfStep {
    CheckpointId id;
    std::shared_ptr<const Manifest> manifest;
  };
  std::optional<OfStep> last_;
};

// What a directory's file system fails with, said of it alone.
absl::Status OfBackup(const absl::Status& status);

// The shard's own record, whatever its file in the remote tier leaves out, and whichever slot it
// lies in.
ShardRecord WholeRecord(ShardRecord record);

// The shard as a manifest names it, by the record that lies beside its file.
ManifestShard ManifestShardOf(const ShardRecord& record, const std::string& record_file);

}  // namespace holdfast
