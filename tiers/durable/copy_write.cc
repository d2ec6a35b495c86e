// Publication: data, name, record, each durable before the next (docs/formats.md, "Order of
// changes in durable tiers").
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tiers/durable/copy_store_impl.h"
#include "tiers/image/kept.h"

namespace holdfast {
namespace {

constexpr int kTriesMax = 4;  // when the step's directory is removed just after it was made

absl::Status CheckNewCopy(const NewCopy& copy) {
  HF_RETURN_IF_ERROR(CheckJobName(copy.job_name));
  if (copy.id.job.IsZero() || copy.id.attempt == 0 || copy.world_size == 0 ||
      copy.world_size > kWorldSizeMax || copy.id.rank >= copy.world_size || copy.image_bytes == 0 ||
      copy.image_bytes > kImageBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("write a copy of ", copy.id.ToString(), " of ",
                                                   copy.world_size, " with ", copy.image_bytes,
                                                   " bytes: not a shard that there can be"));
  }
  return absl::OkStatus();
}

Intent PublishIntent(const NewCopy& copy) {
  Intent intent;
  intent.kind = IntentKind::kPublish;
  intent.unique = NewUnique();
  intent.job = copy.id.job;
  intent.job_name = copy.job_name;
  intent.checkpoint = copy.id.checkpoint();
  intent.world_size = copy.world_size;
  intent.ranks = {copy.id.rank};
  return intent;
}

class WritingCopy : public CopyStore::Writing {
 public:
  WritingCopy(CopyStore::Impl& store, NewCopy copy)
      : store_(store),
        copy_(std::move(copy)),
        name_{copy_.id, copy_.job_name, copy_.world_size},
        directory_(store.StepDirectory(copy_.job_name, copy_.id.checkpoint())),
        intent_(store, PublishIntent(copy_)) {}

  ~WritingCopy() override {
    if (!done_) {
      image_.reset();
      intent_.Resolve(Standing::kTemporaries).IgnoreError();  // else the next sweep does it
    }
  }

  // Intent, directory, file: what Begin does after its checks.
  absl::Status Start(bool direct) {
    HF_RETURN_IF_ERROR(intent_.Write());
    const JobIdentity job{copy_.id.job, copy_.job_name, copy_.uid, copy_.gid};
    for (int tries = 1;; ++tries) {
      absl::Status status = store_.EnsureStepDirectory(job, copy_.id.checkpoint());
      if (status.ok()) {
        status = OpenImage(direct);
      }
      if (status.ok()) {
        return store_.CheckGoesOn(job.job, job.name);
      }
      if (!absl::IsNotFound(status) || tries == kTriesMax) {
        return status;
      }
      // Somebody removed the directory, or the job's, while it was empty.
      store_.ForgetJob(job.name);
      HF_RETURN_IF_ERROR(store_.OpenJob(job));
    }
  }

  const NewCopy& copy() const override { return copy_; }
  File& image() override { return *image_; }
  uint32_t alignment() const override { return alignment_; }
  bool direct() const override { return alignment_ != 1; }
  bool recycled() const override { return recycled_; }

  absl::StatusOr<PublishedCopy> Publish(std::string_view record_file) override {
    if (done_) {
      return absl::FailedPreconditionError(
          absl::StrCat("publish ", copy_.id.ToString(), ": it is published, or failed before"));
    }
    HF_ASSIGN_OR_RETURN(ShardRecord record, CheckRecord(record_file));
    record.generation = 0;
    const std::string bytes = EncodeRecord(record);
    done_ = true;
    const BusyShards shard(store_, copy_.id.job, copy_.id.checkpoint(), {copy_.id.rank});
    Standing standing = Standing::kTemporaries;
    const absl::Status status =
        shard.taken() ? PublishFiles(bytes, standing)
                      : absl::AlreadyExistsError(absl::StrCat("publish ", copy_.id.ToString(),
                                                              ": another call is busy with it"));
    image_.reset();
    if (!status.ok()) {
      intent_.Resolve(standing).IgnoreError();
      // What it lay in may have been removed with the job: then that is what is wrong.
      const absl::Status going = absl::IsNotFound(status)
                                     ? store_.CheckGoesOn(copy_.id.job, copy_.job_name)
                                     : absl::OkStatus();
      return going.ok() ? status : going;
    }
    intent_.Finish();
    return PublishedCopy{store_.ImagePath(name_), copy_.image_bytes, bytes.size(),
                         RecordCrcOf(bytes), record.layout_hash};
  }

 private:
  // A recycled file or a fresh one, as long as the image in whole units of its alignment.
  absl::Status OpenImage(bool direct) {
    const std::string path =
        Temporary(ImageFileName(store_.options.kind, name_.id.rank, name_.world_size));
    if (!store_.remote()) {
      HF_ASSIGN_OR_RETURN(image_, store_.TakeFromPool(path, copy_.image_bytes, direct));
      recycled_ = image_ != nullptr;
    }
    if (image_ == nullptr) {
      HF_ASSIGN_OR_RETURN(image_, store_.env.Open(path, OpenMode::kCreateExclusive,
                                                  {.direct = direct, .no_symlink = true}));
    }
    if (direct) {
      HF_ASSIGN_OR_RETURN(const DirectAlignment alignment, image_->Alignment());
      alignment_ = std::max(alignment.memory_bytes, alignment.offset_bytes);
    }
    const uint64_t rounded = (copy_.image_bytes + alignment_ - 1) / alignment_ * alignment_;
    return store_.Reserve(*image_, rounded);
  }

  std::string Temporary(std::string_view final_name) const {
    return JoinPath(directory_, TemporaryName(final_name, intent_.intent().unique));
  }

  // The record is whole, and this copy's.
  absl::StatusOr<ShardRecord> CheckRecord(std::string_view record_file) const {
    const std::string what = absl::StrCat("publish ", copy_.id.ToString());
    absl::StatusOr<ShardRecord> record = DecodeRecord(record_file);
    if (!record.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(what, ": ", record.status().message()));
    }
    if (record->id != copy_.id || record->job_name != copy_.job_name ||
        record->world_size != copy_.world_size || FileBytes(*record) != copy_.image_bytes ||
        (record->kept && !store_.remote())) {
      return absl::InvalidArgumentError(absl::StrCat(
          what, " of ", copy_.world_size, " of job '", copy_.job_name, "' with ", copy_.image_bytes,
          " bytes: the record is of ", record->id.ToString(), " of ", record->world_size,
          " of job '", record->job_name, "' with ", FileBytes(*record), " bytes",
          record->kept ? ", and leaves slices out" : ""));
    }
    return record;
  }

  absl::Status PublishFiles(const std::string& record, Standing& standing) {
    const DurableKind kind = store_.options.kind;
    const std::string image_path = store_.ImagePath(name_);
    const std::string record_path = store_.RecordPath(name_);
    HF_RETURN_IF_ERROR(store_.CheckMount());
    // 1. The image as it is to be, durable. Should this fail, nothing of it is tried again.
    HF_RETURN_IF_ERROR(image_->Truncate(copy_.image_bytes));
    HF_RETURN_IF_ERROR(store_.GiveToOwner(*image_, copy_.uid, copy_.gid));
    HF_RETURN_IF_ERROR(image_->SyncData());
    // 2. Its name. After an error that does not say whether it was moved, that is looked at.
    standing = Standing::kUnknown;
    const absl::Status moved = store_.MoveWithoutReplacing(
        Temporary(ImageFileName(kind, name_.id.rank, name_.world_size)), image_path);
    if (absl::IsAlreadyExists(moved)) {
      standing = Standing::kTemporaries;
    }
    HF_RETURN_IF_ERROR(moved);
    standing = Standing::kImageInPlace;
    HF_RETURN_IF_ERROR(store_.env.SyncDirectory(directory_));
    // 3. The record: from the moment that it has its name the copy is there.
    const std::string temporary = Temporary(RecordFileName(kind, name_.id.rank, name_.world_size));
    HF_RETURN_IF_ERROR(store_.WriteNewFile(temporary, record, copy_.uid, copy_.gid));
    HF_RETURN_IF_ERROR(store_.CheckGoesOn(copy_.id.job, copy_.job_name));
    const absl::Status named = store_.MoveWithoutReplacing(temporary, record_path);
    if (!absl::IsAlreadyExists(named)) {
      standing = Standing::kRecordInPlace;  // or perhaps, if that failed: then it is looked for
    }
    HF_RETURN_IF_ERROR(named);
    HF_RETURN_IF_ERROR(store_.env.SyncDirectory(directory_));
    // 4. What the record stands beside is what was written.
    HF_ASSIGN_OR_RETURN(const FileInfo written, image_->Info());
    HF_ASSIGN_OR_RETURN(const FileInfo there, store_.env.Info(image_path));
    if (written.inode != there.inode || there.bytes != copy_.image_bytes) {
      return absl::DataLossError(
          absl::StrCat("publish '", image_path, "': somebody changed it while it was published"));
    }
    return absl::OkStatus();
  }

  CopyStore::Impl& store_;
  const NewCopy copy_;
  const CopyName name_;
  const std::string directory_;
  LiveIntent intent_;
  std::unique_ptr<File> image_;
  uint32_t alignment_ = 1;
  bool recycled_ = false;
  bool done_ = false;
};

}  // namespace

absl::Status CopyStore::Impl::Reserve(File& file, uint64_t bytes) {
  absl::Status status = file.Allocate(0, bytes);
  if (absl::IsUnimplemented(status)) {
    // No reservation to be had: running out shows while writing.
    HF_ASSIGN_OR_RETURN(const FileInfo info, file.Info());
    return info.bytes >= bytes ? absl::OkStatus() : file.Truncate(bytes);
  }
  uint64_t pooled = 0;
  {
    MutexLock hold(mutex);
    pooled = pool_bytes;
  }
  for (const uint64_t keep : {pooled - std::min(pooled, bytes), uint64_t{0}}) {
    if (absl::IsResourceExhausted(status) && pooled > 0) {
      HF_RETURN_IF_ERROR(TrimPool(keep));
      status = file.Allocate(0, bytes);
    }
  }
  return status;
}

absl::StatusOr<std::unique_ptr<CopyStore::Writing>> CopyStore::Impl::Begin(const NewCopy& copy,
                                                                           bool direct) {
  // 1. Whether there is anything to be written, and by us.
  HF_RETURN_IF_ERROR(CheckNewCopy(copy));
  HF_RETURN_IF_ERROR(Prepare());
  HF_RETURN_IF_ERROR(CheckMount());
  SweepIfNeeded();
  HF_RETURN_IF_ERROR(OpenJob({copy.id.job, copy.job_name, copy.uid, copy.gid}));
  HF_RETURN_IF_ERROR(CheckClaimed(copy.id.job, copy.id.attempt));
  const CopyName name{copy.id, copy.job_name, copy.world_size};
  for (const std::string& path : {RecordPath(name), ImagePath(name)}) {
    HF_ASSIGN_OR_RETURN(const bool there, Exists(path));
    if (there) {
      return absl::AlreadyExistsError(
          absl::StrCat("write a copy of ", copy.id.ToString(), ": there is '", path, "'"));
    }
  }
  // 2. The intent, and the file that it names.
  auto writing = std::make_unique<WritingCopy>(*this, copy);
  bool can_direct = false;
  {
    MutexLock hold(mutex);
    can_direct = capabilities.direct;
  }
  HF_RETURN_IF_ERROR(writing->Start(direct && can_direct));
  return writing;
}

absl::StatusOr<std::unique_ptr<CopyStore::Writing>> CopyStore::Begin(const NewCopy& copy) {
  return impl_->Begin(copy, impl_->options.direct);
}

}  // namespace holdfast
