#include "ckptctl/backup_directory.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/errno_status.h"
#include "base/status.h"
#include "base/sync_point.h"
#include "tiers/durable/names.h"
#include "tiers/image/kept.h"

namespace holdfast {
namespace {

constexpr size_t kJobsNamed = 10;
constexpr size_t kEntriesMax = size_t{1} << 16;
// Before the job's uuid: of several jobs several runs may write.
constexpr char kNodePrefix[] = "backup-";
// Any run, on any machine, may take the name when nobody has its lock.
constexpr char kOwnerState[] = "ckptctl";

// The same in all runs, so that one goes on with what another began; no daemon's openings are text.
std::string OpeningOf(const JobUuid& job) {
  return absl::StrCat("backup of ", job.ToString());
}

}  // namespace

// It says nothing of ckptd, nor, by itself, of a copy.
absl::Status OfBackup(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kDataLoss:
      return IsErrno(status) ? absl::FailedPreconditionError(Message(status)) : status;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kAborted:
      return absl::FailedPreconditionError(Message(status));
    default:
      return status;
  }
}

ShardRecord WholeRecord(ShardRecord record) {
  record.generation = 0;
  record.kept.reset();
  return record;
}

ManifestShard ManifestShardOf(const ShardRecord& record, const std::string& record_file) {
  ManifestShard shard;
  shard.rank = record.id.rank;
  shard.image_bytes = FileBytes(record);
  shard.record_bytes = record_file.size();
  shard.record_crc = RecordCrcOf(record_file);
  shard.layout_hash = record.layout_hash;
  shard.shard_bytes = record.kept ? record.image_bytes : 0;
  shard.likeness = record.likeness;
  return shard;
}

// ---- Opening ----

absl::StatusOr<std::unique_ptr<BackupDirectory>> BackupDirectory::Open(
    Env& env, const std::string& path, const std::string& node_name) {
  std::error_code error;
  std::string absolute = std::filesystem::absolute(path, error).lexically_normal().string();
  if (error) {
    return ErrnoStatus(error.value(), "look for", path);
  }
  while (absolute.size() > 1 && absolute.back() == '/') {
    absolute.pop_back();
  }
  const absl::StatusOr<FileInfo> there = env.Info(JoinPath(absolute, "."));
  if (absl::IsNotFound(there.status())) {
    return absl::FailedPreconditionError(
        absl::StrCat(Message(there.status()), ": mount it, or make it"));
  }
  HF_RETURN_IF_ERROR(OfBackup(there.status()));
  CopyStore::Options options;
  options.env = &env;
  options.kind = DurableKind::kRemote;
  options.dir = absolute;
  options.node_name = node_name;
  options.set_owner = ::geteuid() == 0;
  options.owner.state = kOwnerState;
  absl::StatusOr<std::unique_ptr<CopyStore>> store = CopyStore::Open(options);
  HF_RETURN_IF_ERROR(OfBackup(store.status()));
  return std::unique_ptr<BackupDirectory>(
      new BackupDirectory(env, std::move(absolute), *std::move(store)));
}

absl::StatusOr<std::unique_ptr<BackupDirectory>> BackupDirectory::OpenToRead(
    Env& env, const std::string& path, const std::string& job_name) {
  HF_ASSIGN_OR_RETURN(std::unique_ptr<BackupDirectory> directory, Open(env, path, "backup"));
  const absl::StatusOr<JobIdentity> job = directory->store_->FindJob(job_name);
  if (absl::IsNotFound(job.status())) {
    HF_ASSIGN_OR_RETURN(const std::string jobs, directory->JobsThere());
    return absl::NotFoundError(
        absl::StrCat("'", directory->path_, "' has no job '", job_name, "'; ", jobs));
  }
  HF_RETURN_IF_ERROR(OfBackup(job.status()));
  directory->job_ = *job;
  HF_RETURN_IF_ERROR(directory->Scan());
  return directory;
}

absl::StatusOr<std::unique_ptr<BackupDirectory>> BackupDirectory::OpenToWrite(
    Env& env, const std::string& path, const JobIdentity& job) {
  const std::string node_name = kNodePrefix + job.job.ToString();
  HF_ASSIGN_OR_RETURN(std::unique_ptr<BackupDirectory> directory, Open(env, path, node_name));
  // Whose it is, before anything is made there.
  HF_ASSIGN_OR_RETURN(directory->job_, directory->CheckJob(job));
  HF_RETURN_IF_ERROR(directory->TakeName(node_name));
  HF_RETURN_IF_ERROR(OfBackup(directory->store_->OpenJob(directory->job_)));
  HF_RETURN_IF_ERROR(directory->Scan());
  HF_SYNC_POINT("ckptctl.backup.begun");
  return directory;
}

absl::StatusOr<JobIdentity> BackupDirectory::CheckJob(const JobIdentity& job) const {
  const absl::StatusOr<JobIdentity> there = store_->FindJob(job.name);
  if (absl::IsNotFound(there.status())) {
    return job;
  }
  HF_RETURN_IF_ERROR(OfBackup(there.status()));
  if (there->job == job.job) {
    return *there;
  }
  return absl::FailedPreconditionError(
      absl::StrCat("'", JoinPath(path_, job.name), "' has another run of job '", job.name, "', ",
                   there->job.ToString(), "; this one is ", job.job.ToString(),
                   ": name another directory, or remove that one"));
}

// What an earlier run left half done is put right, unless one is still at it.
absl::Status BackupDirectory::TakeName(const std::string& node_name) {
  const absl::Status swept = store_->Sweep().status();
  if (swept.ok() || store_->refusal().empty()) {
    return OfBackup(swept);
  }
  const std::string home =
      absl::StrCat(path_, "/", std::string(kHomeName), "/", std::string(kHomeNodesName), "/",
                   node_name, "/", std::string(kHomeLockName));
  return absl::FailedPreconditionError(
      absl::StrCat("another run writes of this job there just now (it has '", home,
                   "' locked): let it end, or end it"));
}

absl::Status BackupDirectory::Scan() {
  absl::StatusOr<DurableScan> scan = store_->ScanJob(job_.name);
  HF_RETURN_IF_ERROR(OfBackup(scan.status()));
  if (!scan->hidden.empty()) {
    return OfBackup(scan->hidden.begin()->second);
  }
  scan_ = scan->jobs.empty() ? JobScan{} : std::move(scan->jobs.front());
  return absl::OkStatus();
}

absl::StatusOr<std::string> BackupDirectory::JobsThere() const {
  absl::StatusOr<std::vector<std::string>> names = env_.List(path_, kEntriesMax);
  HF_RETURN_IF_ERROR(OfBackup(names.status()));
  std::erase_if(*names, [&](const std::string& name) { return !store_->FindJob(name).ok(); });
  if (names->empty()) {
    return "it has none at all";
  }
  const size_t shown = std::min(names->size(), kJobsNamed);
  return absl::StrCat(
      "it has ",
      absl::StrJoin(names->begin(), names->begin() + static_cast<ptrdiff_t>(shown), ", "),
      names->size() > shown ? absl::StrCat(" and ", names->size() - shown, " more") : "");
}

// One that is not there is another.
absl::StatusOr<bool> BackupDirectory::IsSame(const std::string& path) const {
  const absl::StatusOr<FileInfo> ours = env_.Info(JoinPath(path_, "."));
  HF_RETURN_IF_ERROR(OfBackup(ours.status()));
  const absl::StatusOr<FileInfo> theirs = env_.Info(JoinPath(path, "."));
  return theirs.ok() && ours->device == theirs->device && ours->inode == theirs->inode;
}

// ---- What lies there ----

CopyName BackupDirectory::NameOf(const CheckpointId& id, Rank rank, uint32_t world_size) const {
  return {{job_.job, id.attempt, id.step, rank}, job_.name, world_size};
}

const CheckpointScan* BackupDirectory::Scanned(const CheckpointId& id) const {
  const auto at = std::lower_bound(
      scan_.checkpoints.begin(), scan_.checkpoints.end(), id,
      [](const CheckpointScan& each, const CheckpointId& wanted) { return each.id < wanted; });
  return at != scan_.checkpoints.end() && at->id == id ? &*at : nullptr;
}

absl::StatusOr<Manifest> BackupDirectory::ReadManifest(const CheckpointId& id) {
  absl::StatusOr<Manifest> manifest = store_->ReadManifest({job_.job, job_.name, id});
  HF_RETURN_IF_ERROR(OfBackup(manifest.status()));
  return manifest;
}

absl::StatusOr<std::unique_ptr<CopyStore::Reading>> BackupDirectory::OpenCopy(
    const CheckpointId& id, Rank rank, std::shared_ptr<const Manifest> manifest) {
  const CopyName name = NameOf(id, rank, manifest->world_size);
  absl::StatusOr<std::unique_ptr<CopyStore::Reading>> reading =
      store_->OpenCopy(name, {.manifest = std::move(manifest)});
  if (absl::IsNotFound(reading.status())) {  // the manifest names it
    return absl::DataLossError(Message(reading.status()));
  }
  return reading;
}

absl::StatusOr<std::optional<ManifestShard>> BackupDirectory::Find(const ShardRecord& record) {
  const ShardRecord whole = WholeRecord(record);
  const std::string record_file = EncodeRecord(whole);
  const ManifestShard wanted = ManifestShardOf(whole, record_file);
  // 1. As the scan found it: its files are there, of the right lengths.
  const CheckpointScan* const scanned = Scanned(record.id.checkpoint());
  if (scanned != nullptr) {
    const auto entry =
        std::find_if(scanned->copies.begin(), scanned->copies.end(),
                     [&](const CopyEntry& each) { return each.rank == wanted.rank; });
    if (entry != scanned->copies.end() && entry->record_crc == wanted.record_crc &&
        entry->record_bytes == wanted.record_bytes) {
      return wanted;
    }
  }
  // 2. As it lies there now, perhaps with slices left out.
  const CopyName name = NameOf(record.id.checkpoint(), record.id.rank, record.world_size);
  const absl::StatusOr<std::unique_ptr<CopyStore::Reading>> there = store_->OpenCopy(name, {});
  if (absl::IsNotFound(there.status())) {
    HF_RETURN_IF_ERROR(CheckMayComplete(record, record_file));
    return std::nullopt;
  }
  HF_RETURN_IF_ERROR(OfBackup(there.status()));
  if (!(WholeRecord((*there)->record()) == whole)) {
    return absl::AlreadyExistsError(
        absl::StrCat("'", (*there)->info().location, "' is another save of that step"));
  }
  return ManifestShardOf((*there)->record(), (*there)->record_file());
}

// A file that a manifest names is put back only as it was.
absl::Status BackupDirectory::CheckMayComplete(const ShardRecord& record,
                                               const std::string& record_file) {
  const CheckpointScan* const scanned = Scanned(record.id.checkpoint());
  if (scanned == nullptr || !scanned->has_manifest) {
    return absl::OkStatus();
  }
  HF_ASSIGN_OR_RETURN(const Manifest manifest, ReadManifest(record.id.checkpoint()));
  const Rank rank = record.id.rank;
  const ManifestShard* const named =
      rank < manifest.shards.size() ? &manifest.shards[rank] : nullptr;
  return named != nullptr && named->record_crc == RecordCrcOf(record_file) &&
                 named->record_bytes == record_file.size()
             ? absl::OkStatus()
             : absl::AlreadyExistsError(
                   absl::StrCat("the manifest that is there names another copy of rank ", rank,
                                ", which is gone"));
}

// ---- Writing ----

absl::Status BackupDirectory::Claim(Attempt attempt) {
  const absl::Status claimed = store_->ClaimAttempt(job_, attempt, OpeningOf(job_.job));
  if (!absl::IsFailedPrecondition(claimed)) {
    return OfBackup(claimed);
  }
  return absl::FailedPreconditionError(
      absl::StrCat(Message(claimed), "; is '", path_,
                   "' the remote.dir of a cluster that runs the job? Name another directory"));
}

absl::StatusOr<std::unique_ptr<CopyStore::Writing>> BackupDirectory::Begin(
    const ShardRecord& record) {
  absl::StatusOr<std::unique_ptr<CopyStore::Writing>> writing = store_->Begin(
      {record.id, record.job_name, record.world_size, FileBytes(record), job_.uid, job_.gid});
  HF_RETURN_IF_ERROR(OfBackup(writing.status()));
  return writing;
}

absl::Status BackupDirectory::Write(CopyStore::Writing& writing, uint64_t at,
                                    std::span<const std::byte> bytes) {
  HF_RETURN_IF_ERROR(OfBackup(writing.image().WriteAt(at, bytes)));
  HF_SYNC_POINT("ckptctl.backup.window_written");
  return Sync(writing);
}

absl::Status BackupDirectory::Sync(CopyStore::Writing& writing) {
  return OfBackup(writing.image().SyncData());
}

absl::StatusOr<ManifestShard> BackupDirectory::Publish(CopyStore::Writing& writing,
                                                       const ShardRecord& record) {
  HF_SYNC_POINT("ckptctl.backup.data_written");
  const std::string record_file = EncodeRecord(record);
  const absl::StatusOr<PublishedCopy> published = writing.Publish(record_file);
  HF_RETURN_IF_ERROR(OfBackup(published.status()));
  HF_SYNC_POINT("ckptctl.backup.published");
  return ManifestShardOf(record, record_file);
}

absl::Status BackupDirectory::Commit(const Manifest& manifest) {
  HF_SYNC_POINT("ckptctl.backup.step_written");
  HF_RETURN_IF_ERROR(OfBackup(store_->PublishManifest(manifest)));
  HF_SYNC_POINT("ckptctl.backup.committed");
  return absl::OkStatus();
}

absl::Status BackupDirectory::Discard(const CheckpointId& id) {
  const CheckpointName name{job_.job, job_.name, id};
  if (!absl::IsNotFound(store_->ReadManifest(name).status())) {
    return absl::OkStatus();
  }
  if (const absl::Status ours = Claim(id.attempt); !ours.ok()) {
    return absl::IsFailedPrecondition(ours) ? absl::OkStatus() : ours;
  }
  const absl::Status removed = store_->RemoveCheckpoint(name).status();
  return absl::IsNotFound(removed) ? absl::OkStatus() : OfBackup(removed);
}

}  // namespace holdfast
