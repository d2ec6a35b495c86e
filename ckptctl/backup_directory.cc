#include "ckptctl/backup_directory.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <utility>

#include "absl/strings/numbers.h"
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
constexpr size_t kEntriesMax = size_t{1} << 20;
// Before the job's uuid: of several jobs several runs may write.
constexpr char kNodePrefix[] = "backup-";
// Any run, on any machine, may take the name when nobody has its lock.
constexpr char kOwnerState[] = "ckptctl";

// The same in all runs, so that one goes on with what another began; no daemon's openings are text.
std::string OpeningOf(const JobUuid& job) {
  return absl::StrCat("backup of ", job.ToString());
}

const char* KindText(uint32_t mode) {
  return S_ISLNK(mode)   ? "a symbolic link"
         : S_ISDIR(mode) ? "a directory"
         : S_ISREG(mode) ? "a file"
                         : "neither a file nor a directory";
}

// "05-a1" and "5-a0", too: who made them by hand takes them for steps.
std::optional<CheckpointId> LooksLikeStep(const std::string& name) {
  const size_t dash = name.find("-a");
  CheckpointId id;
  return dash != std::string::npos && absl::SimpleAtoi(name.substr(0, dash), &id.step) &&
                 absl::SimpleAtoi(name.substr(dash + 2), &id.attempt)
             ? std::optional(id)
             : std::nullopt;
}

// What reading the files of one step fails with. What a drive cannot read of it is as bad as what
// is damaged; and what is not of our version is not ours to compare.
absl::Status OfReading(const absl::Status& status) {
  if (absl::IsFailedPrecondition(status) && !IsErrno(status)) {
    return absl::AlreadyExistsError(Message(status));
  }
  return absl::IsDataLoss(status) ? status : OfBackup(status);
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
    return directory->NoJob(job_name);
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
  // (Where only some step could not be read, whoever wants that one is told.)
  if (scan->jobs.empty() && !scan->hidden.empty()) {
    return OfBackup(scan->hidden.begin()->second);
  }
  scan_ = scan->jobs.empty() ? JobScan{} : std::move(scan->jobs.front());
  return LookForStrays();
}

// What the scan has no word for: a step of which there is nothing that it could read, and what is
// none.
absl::Status BackupDirectory::LookForStrays() {
  const absl::StatusOr<std::vector<std::string>> names = env_.List(JobPath(), kEntriesMax);
  HF_RETURN_IF_ERROR(OfBackup(names.status()));
  std::vector<CheckpointScan> unread;
  for (const std::string& name : *names) {
    const std::optional<CheckpointId> id = LooksLikeStep(name);
    if (!id || (ParseStepDirectoryName(name) && Scanned(*id) != nullptr)) {
      continue;
    }
    const std::string path = JoinPath(JobPath(), name);
    absl::Status why = CheckKind(path, S_IFDIR);
    if (why.ok() && ParseStepDirectoryName(name)) {
      unread.emplace_back().id = *id;
      continue;
    }
    if (why.ok()) {
      why = absl::DataLossError(absl::StrCat(
          "'", path, "': no step has such a name (900-a3); give it its own, or take it away"));
    }
    strays_.push_back({*id, std::move(why)});
  }
  std::move(unread.begin(), unread.end(), std::back_inserter(scan_.checkpoints));
  std::sort(scan_.checkpoints.begin(), scan_.checkpoints.end(),
            [](const CheckpointScan& a, const CheckpointScan& b) { return a.id < b.id; });
  return absl::OkStatus();
}

absl::Status BackupDirectory::NoJob(const std::string& job_name) const {
  const std::string job = JoinPath(path_, job_name);
  if (const auto there = env_.Info(job); there.ok() && S_ISDIR(there->mode)) {
    return absl::NotFoundError(absl::StrCat(
        "'", job,
        "' is there, but its file JOB is not, which says whose it is: put it back there"));
  }
  HF_ASSIGN_OR_RETURN(const std::string jobs, JobsThere());
  return absl::NotFoundError(absl::StrCat("'", path_, "' has no job '", job_name, "'; ", jobs));
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

absl::StatusOr<bool> BackupDirectory::Contains(const std::string& path) const {
  std::error_code error;
  std::filesystem::path at = std::filesystem::canonical(path, error);
  if (error) {
    return false;  // which whoever opens it says
  }
  for (;; at = at.parent_path()) {
    HF_ASSIGN_OR_RETURN(const bool same, IsSame(at.string()));
    if (same || at == at.root_path()) {
      return same;
    }
  }
}

// ---- What lies there ----

std::string BackupDirectory::StepPath(const CheckpointId& id) const {
  return JoinPath(JobPath(), StepDirectoryName(id));
}

// Nothing is read through what has a name of ours and is something else, nor written over it.
// `kind`: S_IFDIR, S_IFREG.
absl::Status BackupDirectory::CheckKind(const std::string& path, uint32_t kind) const {
  const absl::StatusOr<FileInfo> info = env_.Info(path);
  if (absl::IsNotFound(info.status())) {
    return absl::OkStatus();
  }
  HF_RETURN_IF_ERROR(OfReading(info.status()));
  return (info->mode & S_IFMT) == kind
             ? absl::OkStatus()
             : absl::DataLossError(absl::StrCat("'", path, "': ", KindText(info->mode), ", where ",
                                                KindText(kind), " belongs"));
}

CopyName BackupDirectory::NameOf(const CheckpointId& id, Rank rank, uint32_t world_size) const {
  return {{job_.job, id.attempt, id.step, rank}, job_.name, world_size};
}

const CheckpointScan* BackupDirectory::Scanned(const CheckpointId& id) const {
  const auto at = std::lower_bound(
      scan_.checkpoints.begin(), scan_.checkpoints.end(), id,
      [](const CheckpointScan& each, const CheckpointId& wanted) { return each.id < wanted; });
  return at != scan_.checkpoints.end() && at->id == id ? &*at : nullptr;
}

absl::StatusOr<std::shared_ptr<const Manifest>> BackupDirectory::FindManifest(
    const CheckpointId& id) {
  if (last_ && last_->id == id) {
    return last_->manifest;
  }
  HF_RETURN_IF_ERROR(CheckKind(StepPath(id), S_IFDIR));
  HF_RETURN_IF_ERROR(CheckKind(JoinPath(StepPath(id), kManifestName), S_IFREG));
  absl::StatusOr<Manifest> manifest = store_->ReadManifest({job_.job, job_.name, id});
  last_.reset();
  if (absl::IsNotFound(manifest.status())) {
    last_ = OfStep{id, nullptr};
    return nullptr;
  }
  HF_RETURN_IF_ERROR(OfReading(manifest.status()));
  last_ = OfStep{id, std::make_shared<const Manifest>(*std::move(manifest))};
  return last_->manifest;
}

absl::StatusOr<std::unique_ptr<CopyStore::Reading>> BackupDirectory::OpenCopy(
    const CheckpointId& id, Rank rank, std::shared_ptr<const Manifest> manifest) {
  const CopyName name = NameOf(id, rank, manifest->world_size);
  absl::StatusOr<std::unique_ptr<CopyStore::Reading>> reading =
      store_->OpenCopy(name, {.manifest = std::move(manifest)});
  if (absl::IsNotFound(reading.status())) {  // the manifest names it
    return absl::DataLossError(Message(reading.status()));
  }
  HF_RETURN_IF_ERROR(OfReading(reading.status()));
  return reading;
}

absl::StatusOr<std::optional<ManifestShard>> BackupDirectory::Find(const ShardRecord& record) {
  absl::StatusOr<std::optional<ManifestShard>> found = FindShard(record);
  if (!absl::IsDataLoss(found.status())) {
    return found;
  }
  return absl::DataLossError(
      absl::StrCat(Message(found.status()), "; move '", StepPath(record.id.checkpoint()),
                   "' elsewhere, and the same command writes the step anew"));
}

absl::StatusOr<std::optional<ManifestShard>> BackupDirectory::FindShard(const ShardRecord& record) {
  const CheckpointId id = record.id.checkpoint();
  const ShardRecord whole = WholeRecord(record);
  HF_ASSIGN_OR_RETURN(const std::shared_ptr<const Manifest> manifest, FindManifest(id));
  const CopyName name = NameOf(id, record.id.rank, record.world_size);
  const absl::StatusOr<std::unique_ptr<CopyStore::Reading>> there =
      store_->OpenCopy(name, {.manifest = manifest});
  if (absl::IsNotFound(there.status())) {
    HF_RETURN_IF_ERROR(CheckMayBegin(name, manifest.get(), EncodeRecord(whole)));
    return std::nullopt;
  }
  HF_RETURN_IF_ERROR(OfReading(there.status()));
  // (Its file may leave slices out.)
  if (!(WholeRecord((*there)->record()) == whole)) {
    return absl::AlreadyExistsError(
        absl::StrCat("'", (*there)->info().location, "' is another save of that step"));
  }
  return ManifestShardOf((*there)->record(), (*there)->record_file());
}

// That nothing is in the way of a file that is not there; and what a manifest names is put back
// only as it was.
absl::Status BackupDirectory::CheckMayBegin(const CopyName& name, const Manifest* manifest,
                                            const std::string& record_file) const {
  for (const ImageForm form : {ImageForm::kPlain, ImageForm::kCompressed}) {
    const std::string image = store_->ImagePath(name, form);
    const absl::StatusOr<FileInfo> there = env_.Info(image);
    if (there.ok()) {
      return absl::DataLossError(
          absl::StrCat("'", image, "': ", KindText(there->mode), " without its record"));
    }
    HF_RETURN_IF_ERROR(absl::IsNotFound(there.status()) ? absl::OkStatus()
                                                        : OfBackup(there.status()));
  }
  if (manifest == nullptr) {
    return absl::OkStatus();
  }
  const Rank rank = name.id.rank;
  const ManifestShard* const named =
      rank < manifest->shards.size() ? &manifest->shards[rank] : nullptr;
  return named != nullptr && named->record_crc == RecordCrcOf(record_file) &&
                 named->record_bytes == record_file.size()
             ? absl::OkStatus()
             : absl::AlreadyExistsError(
                   absl::StrCat("the manifest that is there names another copy of rank ", rank,
                                ", which is gone"));
}

// ---- Writing ----

absl::Status BackupDirectory::Claim(Attempt attempt) {
  const std::string path = JoinPath(JobPath(), ClaimName(attempt));
  absl::Status claimed = CheckKind(path, S_IFREG);
  if (claimed.ok()) {
    claimed = store_->ClaimAttempt(job_, attempt, OpeningOf(job_.job));
  }
  if (claimed.ok() && !HadClaim(attempt)) {
    claimed_.insert(attempt);
  }
  if (absl::IsDataLoss(claimed) && !IsErrno(claimed)) {
    return absl::DataLossError(
        absl::StrCat(Message(claimed), "; move it elsewhere, and the same command goes on"));
  }
  if (!absl::IsFailedPrecondition(claimed)) {
    return OfBackup(claimed);
  }
  return absl::FailedPreconditionError(
      absl::StrCat(Message(claimed), "; is '", path_,
                   "' the remote.dir of a cluster that runs the job? Name another directory"));
}

absl::StatusOr<std::unique_ptr<CopyStore::Writing>> BackupDirectory::Begin(
    const ShardRecord& record) {
  HF_RETURN_IF_ERROR(Claim(record.id.attempt));
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
  HF_RETURN_IF_ERROR(Claim(manifest.checkpoint.attempt));
  HF_SYNC_POINT("ckptctl.backup.step_written");
  last_.reset();
  HF_RETURN_IF_ERROR(OfBackup(store_->PublishManifest(manifest)));
  HF_SYNC_POINT("ckptctl.backup.committed");
  return absl::OkStatus();
}

bool BackupDirectory::HadClaim(Attempt attempt) const {
  return std::binary_search(scan_.claims.begin(), scan_.claims.end(), attempt);
}

absl::Status BackupDirectory::Discard(const CheckpointId& id) {
  // 1. What was not claimed no run has written.
  if (!HadClaim(id.attempt) && claimed_.count(id.attempt) == 0) {
    return absl::OkStatus();
  }
  if (const auto manifest = FindManifest(id); !manifest.ok() || *manifest != nullptr) {
    return absl::OkStatus();
  }
  if (const absl::Status ours = Claim(id.attempt); !ours.ok()) {
    return absl::IsFailedPrecondition(ours) || absl::IsDataLoss(ours) ? absl::OkStatus() : ours;
  }
  // 2. What cannot be removed, such as what somebody has put there, only takes room.
  store_->RemoveCheckpoint({job_.job, job_.name, id}).status().IgnoreError();
  return absl::OkStatus();
}

absl::Status BackupDirectory::ReleaseClaims() {
  if (claimed_.empty()) {
    return absl::OkStatus();
  }
  const absl::StatusOr<std::vector<std::string>> names = env_.List(JobPath(), kEntriesMax);
  HF_RETURN_IF_ERROR(OfBackup(names.status()));
  for (const std::string& name : *names) {
    if (const auto id = ParseStepDirectoryName(name)) {
      claimed_.erase(id->attempt);
    }
  }
  for (const Attempt attempt : claimed_) {
    const absl::Status removed = env_.Unlink(JoinPath(JobPath(), ClaimName(attempt)));
    HF_RETURN_IF_ERROR(absl::IsNotFound(removed) ? absl::OkStatus() : OfBackup(removed));
  }
  return claimed_.empty() ? absl::OkStatus() : OfBackup(env_.SyncDirectory(JobPath()));
}

}  // namespace holdfast
