// Intents: written before the first change, deleted after the last, and put right when a crash or
// an error came in between. What a crash left and what a failed call left is put right by the same
// code.
#include <sys/stat.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/errno_status.h"
#include "base/status.h"
#include "tiers/durable/copy_store_impl.h"

namespace holdfast {
namespace {

constexpr uint64_t kReserveBytes = uint64_t{256} << 10;

std::string Describe(const Intent& intent) {
  const std::string where =
      absl::StrCat("job '", intent.job_name, "' step ", intent.checkpoint.step, " attempt ",
                   intent.checkpoint.attempt);
  switch (intent.kind) {
    case IntentKind::kPublish:
      return absl::StrCat("unfinished copy of ", where, " rank ", intent.ranks.front());
    case IntentKind::kReplace:
      return absl::StrCat("unfinished replacement of the copy of ", where, " rank ",
                          intent.ranks.front());
    case IntentKind::kRemove:
      return absl::StrCat("unfinished removal of ", where);
    case IntentKind::kCreateJob:
      return absl::StrCat("unfinished directory of job '", intent.job_name, "'");
    case IntentKind::kClaim:
      return absl::StrCat("unfinished claim of job '", intent.job_name, "' attempt ",
                          intent.checkpoint.attempt);
    case IntentKind::kManifest:
      return absl::StrCat("unfinished manifest of ", where);
    case IntentKind::kRemoveJob:
      return absl::StrCat("unfinished removal of job '", intent.job_name, "'");
  }
  return "";
}

}  // namespace

absl::Status CopyStore::Impl::WriteIntent(const Intent& intent) {
  HF_RETURN_IF_ERROR(CheckIntent(intent));
  const std::string name = IntentFileName(intent.unique);
  const std::string temporary = JoinPath(intents_dir, TemporaryName(name, intent.unique));
  {
    HF_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                        env.Open(temporary, OpenMode::kCreateExclusive, {.no_symlink = true}));
    const std::string bytes = EncodeIntent(intent);
    HF_RETURN_IF_ERROR(file->WriteAt(0, std::as_bytes(std::span<const char>(bytes))));
    HF_RETURN_IF_ERROR(file->Sync());
  }
  HF_RETURN_IF_ERROR(env.Rename(temporary, JoinPath(intents_dir, name)));
  // This also makes durable that earlier intents are gone: none of them comes back to undo what is
  // done from here on.
  return env.SyncDirectory(intents_dir);
}

// Not every file system can reserve; then a full one may have to be emptied by hand.
absl::Status CopyStore::Impl::FillReserve() {
  const std::string path = JoinPath(home, kHomeReserveName);
  absl::StatusOr<std::unique_ptr<File>> file =
      env.Open(path, OpenMode::kReadWrite, {.no_symlink = true});
  if (absl::IsNotFound(file.status())) {
    file = env.Open(path, OpenMode::kCreateExclusive, {.no_symlink = true});
  }
  HF_RETURN_IF_ERROR(file.status());
  const absl::Status status = (*file)->Allocate(0, kReserveBytes);
  MutexLock hold(mutex);
  reserve_given_up = absl::IsResourceExhausted(status);
  return reserve_given_up || absl::IsUnimplemented(status) ? absl::OkStatus() : status;
}

void CopyStore::Impl::GiveUpReserve() {
  {
    MutexLock hold(mutex);
    reserve_given_up = true;
  }
  const absl::StatusOr<std::unique_ptr<File>> file =
      env.Open(JoinPath(home, kHomeReserveName), OpenMode::kReadWrite, {.no_symlink = true});
  if (file.ok()) {
    (*file)->Truncate(0).IgnoreError();
  }
}

// ---- What an intent left ----

absl::StatusOr<bool> CopyStore::Impl::IsStillThere(const Intent& intent) {
  const absl::StatusOr<JobIdentity> there = ReadJobFile(intent.job_name);
  if (there.ok() || absl::IsNotFound(there.status())) {
    return there.ok() && there->job == intent.job;
  }
  // (A JOB that is damaged says nothing; nobody else can have begun anything there.)
  return absl::IsDataLoss(there.status()) && !IsErrno(there.status()) ? absl::StatusOr<bool>(true)
                                                                      : there.status();
}

// Of a publication that has published no record. In a remote directory another node may be
// publishing the same shard: what has the image's name may be that node's.
absl::StatusOr<bool> CopyStore::Impl::GaveImageItsName(const UnfinishedCopy& copy) {
  const absl::StatusOr<FileInfo> there = env.Info(copy.image);
  if (absl::IsNotFound(there.status())) {
    return false;
  }
  HF_RETURN_IF_ERROR(there.status());
  const absl::StatusOr<FileInfo> aside = env.Info(copy.temporary_image);
  if (aside.ok()) {
    return aside->inode == there->inode;  // a link, its second half to come
  }
  if (!absl::IsNotFound(aside.status())) {
    return aside.status();
  }
  // The temporary image was moved there, was never made, or was removed. The temporary record tells
  // which: it is made before the image is moved, and removed before the temporary image is.
  return remote() ? Exists(copy.temporary_record) : absl::StatusOr<bool>(true);
}

// A file that this intent gave its final name has its temporary one again. So a crash before all is
// gone leaves what the next sweep knows for ours.
absl::Status CopyStore::Impl::MoveBack(const std::string& path, const std::string& temporary) {
  const absl::StatusOr<FileInfo> there = env.Info(path);
  if (absl::IsNotFound(there.status())) {
    return absl::OkStatus();
  }
  HF_RETURN_IF_ERROR(there.status());
  const absl::StatusOr<FileInfo> aside = env.Info(temporary);
  if (aside.ok()) {  // a link, its second half to come; else what lies there is not ours
    return aside->inode == there->inode ? RemoveIfThere(path) : absl::OkStatus();
  }
  if (!absl::IsNotFound(aside.status())) {
    return aside.status();
  }
  const absl::Status moved = env.Rename(path, temporary);
  return absl::IsNotFound(moved) ? absl::OkStatus() : moved;
}

absl::Status CopyStore::Impl::ResolvePublish(const Intent& intent, Standing standing) {
  const std::string directory = StepDirectory(intent.job_name, intent.checkpoint);
  const ShardId id{intent.job, intent.checkpoint.attempt, intent.checkpoint.step,
                   intent.ranks.front()};
  const CopyName name{id, intent.job_name, intent.world_size};
  const auto temporary = [&](const std::string& path) {
    return JoinPath(directory, TemporaryName(path.substr(directory.size() + 1), intent.unique));
  };
  UnfinishedCopy copy;
  copy.image = ImagePath(name, intent.compressed ? ImageForm::kCompressed : ImageForm::kPlain);
  copy.record = RecordPath(name);
  copy.temporary_image = temporary(copy.image);
  copy.temporary_record = temporary(copy.record);

  // 1. Which of the final names are this intent's, and to go.
  bool still_there = false;
  if (standing != Standing::kTemporaries) {
    HF_ASSIGN_OR_RETURN(still_there, IsStillThere(intent));
  }
  bool take_back = still_there && standing != Standing::kUnknown;
  if (still_there && standing == Standing::kUnknown) {
    HF_ASSIGN_OR_RETURN(const bool complete, Exists(copy.record));
    if (!complete) {
      HF_ASSIGN_OR_RETURN(take_back, GaveImageItsName(copy));
    }
  }
  // 2. The record first, durably; then the image.
  if (take_back) {
    if (standing == Standing::kRecordInPlace) {
      HF_RETURN_IF_ERROR(MoveBack(copy.record, copy.temporary_record));
    }
    HF_RETURN_IF_ERROR(SyncIfThere(directory));
    HF_RETURN_IF_ERROR(MoveBack(copy.image, copy.temporary_image));
    HF_RETURN_IF_ERROR(SyncIfThere(directory));
  }
  HF_RETURN_IF_ERROR(RemoveIfThere(copy.temporary_record));  // (first: see GaveImageItsName)
  HF_RETURN_IF_ERROR(RemoveIfThere(copy.temporary_image));
  HF_RETURN_IF_ERROR(DropMarkOfCommitted(directory));
  HF_RETURN_IF_ERROR(SyncIfThere(directory));
  return RemoveStepIfEmpty(directory);
}

// Its record is gone. False: there was none.
absl::StatusOr<bool> CopyStore::Impl::RemoveImage(const std::string& path, RemovalReport& report) {
  const absl::StatusOr<FileInfo> info = env.Info(path);
  if (absl::IsNotFound(info.status())) {
    return false;
  }
  HF_RETURN_IF_ERROR(info.status());
  // Under a second name (which a crash amid a move can leave) it is not to be overwritten.
  const bool alone = info->links == 1;
  if (alone && !remote()) {
    HF_RETURN_IF_ERROR(Recycle(path, info->bytes, report));
  } else {
    HF_RETURN_IF_ERROR(RemoveIfThere(path));
    report.bytes_freed += info->bytes;
  }
  return true;
}

absl::Status CopyStore::Impl::ResolveRemove(const Intent& intent, RemovalReport& report) {
  const std::string directory = StepDirectory(intent.job_name, intent.checkpoint);
  HF_ASSIGN_OR_RETURN(const bool still_there, IsStillThere(intent));
  if (!still_there) {
    return absl::OkStatus();  // what lies under these names is not what was to go
  }
  HF_ASSIGN_OR_RETURN(const bool there, Exists(directory));
  if (!there) {
    return RemoveStepIfEmpty(directory);  // durably gone
  }
  if (intent.manifest_first) {
    HF_ASSIGN_OR_RETURN(const bool committed, Exists(JoinPath(directory, kManifestName)));
    if (committed) {
      return absl::OkStatus();  // it was not begun: the step stays
    }
  }
  const auto name_of = [&](Rank rank) {
    return CopyName{{intent.job, intent.checkpoint.attempt, intent.checkpoint.step, rank},
                    intent.job_name,
                    intent.world_size};
  };
  // 1. A step whose manifest is gone goes whole. Else a copy whose record is there stays: its
  // removal was not begun.
  HF_RETURN_IF_ERROR(env.SyncDirectory(directory));
  std::vector<Rank> bare;
  for (const Rank rank : intent.ranks) {
    const std::string record = RecordPath(name_of(rank));
    if (intent.manifest_first) {
      HF_RETURN_IF_ERROR(RemoveIfThere(record));
    } else {
      HF_ASSIGN_OR_RETURN(const bool stays, Exists(record));
      if (stays) {
        continue;
      }
    }
    bare.push_back(rank);
  }
  // 2. No record comes back; then the bytes may go.
  if (intent.manifest_first) {
    HF_RETURN_IF_ERROR(env.SyncDirectory(directory));
  }
  for (const Rank rank : bare) {
    bool any = false;
    for (const ImageForm form : Forms()) {
      HF_ASSIGN_OR_RETURN(const bool gone, RemoveImage(ImagePath(name_of(rank), form), report));
      any = any || gone;
    }
    report.copies += any ? 1 : 0;
  }
  if (intent.manifest_first) {
    HF_RETURN_IF_ERROR(RemoveIfThere(JoinPath(directory, kManifestJsonName)));
  }
  HF_RETURN_IF_ERROR(env.SyncDirectory(directory));
  return RemoveStepIfEmpty(directory);
}

absl::Status CopyStore::Impl::SyncIfThere(const std::string& directory) {
  const absl::Status synced = env.SyncDirectory(directory);
  return absl::IsNotFound(synced) ? absl::OkStatus() : synced;
}

absl::Status CopyStore::Impl::ResolveSmallFiles(const Intent& intent) {
  const std::string job = JobDirectory(intent.job_name);
  std::string directory = job;
  std::vector<std::string> names;
  switch (intent.kind) {
    case IntentKind::kCreateJob:
      names = {std::string(kJobFileName)};
      break;
    case IntentKind::kClaim:
      names = {ClaimName(intent.checkpoint.attempt)};
      break;
    case IntentKind::kManifest:
      directory = StepDirectory(intent.job_name, intent.checkpoint);
      names = {std::string(kManifestName), std::string(kManifestJsonName)};
      break;
    case IntentKind::kRemoveJob:
      // The job has gone, or it goes on with what is left of it.
      names = {RemovedName(intent.job)};
      HF_RETURN_IF_ERROR(RemoveIfThere(JoinPath(job, names.front())));
      break;
    default:
      break;
  }
  for (const std::string& name : names) {
    HF_RETURN_IF_ERROR(RemoveIfThere(JoinPath(directory, TemporaryName(name, intent.unique))));
  }
  const bool of_a_step = intent.kind == IntentKind::kManifest;
  if (of_a_step) {
    HF_RETURN_IF_ERROR(DropMarkOfCommitted(directory));
  }
  HF_RETURN_IF_ERROR(SyncIfThere(directory));
  return of_a_step ? RemoveStepIfEmpty(directory) : RemoveIfEmpty(directory);
}

absl::Status CopyStore::Impl::Resolve(const Intent& intent, Standing standing,
                                      RemovalReport& report) {
  HF_RETURN_IF_ERROR(CheckMount());  // else nothing would be found, and all taken for done
  switch (intent.kind) {
    case IntentKind::kPublish:
      HF_RETURN_IF_ERROR(ResolvePublish(intent, standing));
      break;
    case IntentKind::kReplace:
      HF_RETURN_IF_ERROR(ResolveReplace(intent));
      break;
    case IntentKind::kRemove:
      HF_RETURN_IF_ERROR(ResolveRemove(intent, report));
      break;
    default:
      HF_RETURN_IF_ERROR(ResolveSmallFiles(intent));
      break;
  }
  return RemoveIfThere(JoinPath(intents_dir, IntentFileName(intent.unique)));
}

// ---- Intents of this process ----

LiveIntent::LiveIntent(CopyStore::Impl& store, Intent intent)
    : store_(store), intent_(std::move(intent)) {
  MutexLock hold(store_.mutex);
  store_.live.insert(intent_.unique);
}

LiveIntent::~LiveIntent() {
  MutexLock hold(store_.mutex);
  store_.live.erase(intent_.unique);
  store_.unswept = store_.unswept || written_;
}

absl::Status LiveIntent::Write() {
  written_ = true;  // from here on something may be there
  absl::Status status = store_.WriteIntent(intent_);
  if (absl::IsNotFound(status)) {  // somebody removed the directory of intents
    HF_RETURN_IF_ERROR(store_.PrepareAgain());
    status = store_.WriteIntent(intent_);
  }
  // While its temporary is still there, another try would only find that.
  if (absl::IsResourceExhausted(status) && DiscardTemporary()) {
    HF_RETURN_IF_ERROR(MakeRoom());
    status = store_.WriteIntent(intent_);
  }
  if (!status.ok()) {
    DiscardTemporary();
  }
  return status;
}

// What is written takes room from the pool; the reserve is for what frees room.
absl::Status LiveIntent::MakeRoom() {
  if (intent_.kind == IntentKind::kRemove || intent_.kind == IntentKind::kRemoveJob) {
    store_.GiveUpReserve();
    return absl::OkStatus();
  }
  uint64_t pooled = 0;
  {
    MutexLock hold(store_.mutex);
    pooled = store_.pool_bytes;
  }
  return store_.TrimPool(pooled / 2);
}

bool LiveIntent::DiscardTemporary() {
  const std::string name = IntentFileName(intent_.unique);
  const std::string path = JoinPath(store_.intents_dir, TemporaryName(name, intent_.unique));
  if (store_.RemoveIfThere(path).ok()) {
    return true;
  }
  MutexLock hold(store_.mutex);
  store_.unswept = true;
  return false;
}

void LiveIntent::Finish() {
  const std::string path = JoinPath(store_.intents_dir, IntentFileName(intent_.unique));
  written_ = !store_.RemoveIfThere(path).ok();
}

absl::Status LiveIntent::Resolve(Standing standing, RemovalReport& report) {
  HF_RETURN_IF_ERROR(store_.Resolve(intent_, standing, report));
  written_ = false;
  return absl::OkStatus();
}

absl::Status LiveIntent::Resolve(Standing standing) {
  RemovalReport ignored;
  return Resolve(standing, ignored);
}

BusyShards::BusyShards(CopyStore::Impl& store, const JobUuid& job, const CheckpointId& id,
                       const std::vector<Rank>& ranks)
    : store_(store) {
  shards_.reserve(ranks.size());
  for (const Rank rank : ranks) {
    shards_.push_back({job, id.attempt, id.step, rank});
  }
  MutexLock hold(store_.mutex);
  taken_ = std::none_of(shards_.begin(), shards_.end(),
                        [&](const ShardId& shard)
                            REQUIRES(store_.mutex) { return store_.busy.contains(shard); });
  if (taken_) {
    store_.busy.insert(shards_.begin(), shards_.end());
  }
}

BusyShards::~BusyShards() {
  if (taken_) {
    MutexLock hold(store_.mutex);
    for (const ShardId& shard : shards_) {
      store_.busy.erase(shard);
    }
  }
}

// ---- The sweep ----

void CopyStore::Impl::SweepOne(const std::string& name, SweepReport& report) {
  const std::string path = JoinPath(intents_dir, name);
  const std::optional<std::string_view> unique = ParseIntentFileName(name);
  if (!unique.has_value()) {
    report.left_alone.push_back({path, "not a name of an intent; move it elsewhere"});
    return;
  }
  const auto leave = [&](const absl::Status& why) {
    report.left_alone.push_back({path, Message(why)});
    MutexLock hold(mutex);
    unswept = true;
  };
  {
    MutexLock hold(mutex);
    if (live.contains(std::string(*unique))) {
      return;
    }
  }
  const absl::StatusOr<FileInfo> info = env.Info(path);
  if (absl::IsNotFound(info.status())) {
    return;  // it was live when the directory was listed
  }
  if (!info.ok()) {
    return leave(info.status());
  }
  if (!S_ISREG(info->mode)) {  // not ours, whatever it is called: neither opened nor removed
    report.left_alone.push_back({path, "not a regular file; move it elsewhere"});
    return;
  }
  if (ParseTemporaryName(name).has_value()) {  // an intent that never was one
    if (absl::Status status = RemoveIfThere(path); !status.ok()) {
      leave(status);
    }
    return;
  }
  const absl::StatusOr<std::string> bytes = ReadSmallFile(path, kIntentBytesMax);
  if (absl::IsNotFound(bytes.status())) {
    return;
  }
  if (!bytes.ok()) {
    return leave(bytes.status());
  }
  const absl::StatusOr<Intent> intent = DecodeIntent(*bytes);
  if (!intent.ok() || intent->unique != *unique) {
    report.left_alone.push_back(
        {path, intent.ok() ? "the intent of another name" : Message(intent.status())});
    return;
  }
  const BusyShards shards(*this, intent->job, intent->checkpoint, intent->ranks);
  if (!shards.taken()) {
    return leave(absl::UnavailableError("another call is busy with its files"));
  }
  RemovalReport removal;
  if (absl::Status status = Resolve(*intent, Standing::kUnknown, removal); !status.ok()) {
    return leave(status);
  }
  report.done.push_back(absl::StrCat("put right: ", Describe(*intent)));
}

absl::StatusOr<SweepReport> CopyStore::Impl::SweepAll() {
  HF_RETURN_IF_ERROR(Prepare());
  {
    MutexLock hold(mutex);
    unswept = false;
  }
  SweepReport report;
  const absl::StatusOr<std::vector<std::string>> names = env.List(intents_dir, kDirectoryNamesMax);
  if (!names.ok()) {
    MutexLock hold(mutex);
    unswept = true;
    return names.status();
  }
  for (const std::string& name : *names) {
    SweepOne(name, report);
  }
  return report;
}

void CopyStore::Impl::SweepIfNeeded() {
  {
    MutexLock hold(mutex);
    if (!unswept) {
      return;
    }
  }
  SweepAll().IgnoreError();  // what it cannot do, the next one tries
}

absl::StatusOr<SweepReport> CopyStore::Sweep() {
  return impl_->SweepAll();
}

}  // namespace holdfast
