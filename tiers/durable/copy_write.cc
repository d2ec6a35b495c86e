// Publication: data, name, record, each durable before the next (docs/formats.md, "Order of
// changes in durable tiers").
#include <fcntl.h>

#include <algorithm>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tiers/compressed/compressing_file.h"
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

Intent PublishIntent(const NewCopy& copy, ImageForm form) {
  Intent intent;
  intent.kind = IntentKind::kPublish;
  intent.unique = NewUnique();
  intent.job = copy.id.job;
  intent.job_name = copy.job_name;
  intent.checkpoint = copy.id.checkpoint();
  intent.world_size = copy.world_size;
  intent.ranks = {copy.id.rank};
  intent.compressed = form == ImageForm::kCompressed;
  return intent;
}

class WritingCopy : public CopyStore::Writing {
 public:
  WritingCopy(CopyStore::Impl& store, NewCopy copy, std::optional<int> zstd_level)
      : store_(store),
        copy_(std::move(copy)),
        zstd_level_(zstd_level),
        form_(zstd_level ? ImageForm::kCompressed : ImageForm::kPlain),
        name_{copy_.id, copy_.job_name, copy_.world_size},
        directory_(store.StepDirectory(copy_.job_name, copy_.id.checkpoint())),
        intent_(store, PublishIntent(copy_, form_)),
        stored_bytes_(copy_.image_bytes) {}

  ~WritingCopy() override {
    if (!done_) {
      image_.file.reset();
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
        status = store_.MarkBegun(directory_, copy_.gid);
      }
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
  File& image() override { return *image_.file; }
  absl::Status FinishImage() override {
    if (compressing_ != nullptr) {
      HF_RETURN_IF_ERROR(compressing_->Finish());
      stored_bytes_ = compressing_->stored_bytes();
    }
    return absl::OkStatus();
  }
  void DropCached() override {
    const int fd = compressing_ != nullptr ? compressing_->stored_fd() : image_.file->fd();
    (void)::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  }
  uint64_t stored_bytes() const override { return stored_bytes_; }
  uint32_t alignment() const override { return image_.alignment; }
  bool direct() const override { return image_.alignment != 1; }
  bool recycled() const override { return image_.recycled; }

  absl::StatusOr<PublishedCopy> Publish(std::string_view record_file) override {
    if (done_) {
      return absl::FailedPreconditionError(
          absl::StrCat("publish ", copy_.id.ToString(), ": it is published, or failed before"));
    }
    HF_ASSIGN_OR_RETURN(ShardRecord record, store_.CheckOwnRecord("publish", copy_, record_file));
    record.generation = 0;
    const std::string bytes = EncodeRecord(record);
    done_ = true;
    const BusyShards shard(store_, copy_.id.job, copy_.id.checkpoint(), {copy_.id.rank});
    Standing standing = Standing::kTemporaries;
    const absl::Status status =
        shard.taken() ? PublishFiles(bytes, standing)
                      : absl::AlreadyExistsError(absl::StrCat("publish ", copy_.id.ToString(),
                                                              ": another call is busy with it"));
    compressing_ = nullptr;
    image_.file.reset();
    if (!status.ok()) {
      intent_.Resolve(standing).IgnoreError();
      // What it lay in may have been removed with the job: then that is what is wrong.
      const absl::Status going = absl::IsNotFound(status)
                                     ? store_.CheckGoesOn(copy_.id.job, copy_.job_name)
                                     : absl::OkStatus();
      return going.ok() ? status : going;
    }
    intent_.Finish();
    return PublishedCopy{store_.ImagePath(name_, form_),
                         copy_.image_bytes,
                         stored_bytes_,
                         bytes.size(),
                         RecordCrcOf(bytes),
                         record.layout_hash};
  }

 private:
  absl::Status OpenImage(bool direct) {
    const std::string path = Temporary(ImageName());
    if (zstd_level_) {
      // (Nothing is reserved: how long it will be shows when it is written.)
      HF_ASSIGN_OR_RETURN(std::unique_ptr<File> file,
                          store_.env.Open(path, OpenMode::kCreateExclusive, {.no_symlink = true}));
      auto compressing =
          std::make_unique<CompressingFile>(std::move(file), copy_.image_bytes, *zstd_level_);
      compressing_ = compressing.get();
      image_.file = std::move(compressing);
      return absl::OkStatus();
    }
    HF_ASSIGN_OR_RETURN(image_, store_.OpenNewImage(path, copy_.image_bytes, direct));
    return absl::OkStatus();
  }

  std::string ImageName() const {
    return ImageFileName(store_.options.kind, name_.id.rank, name_.world_size, form_);
  }

  std::string Temporary(std::string_view final_name) const {
    return JoinPath(directory_, TemporaryName(final_name, intent_.intent().unique));
  }

  // Another node's image of the same shard has another name, if only one of the two is compressed:
  // whoever finds that of the other takes its own back.
  absl::Status CheckNoOtherForm() {
    for (const ImageForm form : store_.Forms()) {
      const std::string path = store_.ImagePath(name_, form);
      HF_ASSIGN_OR_RETURN(const bool there,
                          form == form_ ? absl::StatusOr<bool>(false) : store_.Exists(path));
      if (there) {
        return absl::AlreadyExistsError(
            absl::StrCat("publish ", copy_.id.ToString(), ": there is '", path, "'"));
      }
    }
    return absl::OkStatus();
  }

  absl::Status PublishFiles(const std::string& record, Standing& standing) {
    const DurableKind kind = store_.options.kind;
    const std::string image_path = store_.ImagePath(name_, form_);
    const std::string record_path = store_.RecordPath(name_);
    HF_RETURN_IF_ERROR(store_.CheckMount());
    // 1. The image as it is to be, durable. Should this fail, nothing of it is tried again.
    HF_RETURN_IF_ERROR(compressing_ != nullptr ? FinishImage()
                                               : image_.file->Truncate(copy_.image_bytes));
    HF_RETURN_IF_ERROR(store_.GiveToOwner(*image_.file, copy_.uid, copy_.gid));
    HF_RETURN_IF_ERROR(image_.file->SyncData());
    // 2. The record beside it, before the image has its name: a sweep tells by it whose image that
    // is (GaveImageItsName).
    const std::string temporary = Temporary(RecordFileName(kind, name_.id.rank, name_.world_size));
    HF_RETURN_IF_ERROR(store_.WriteRecord(temporary, record, copy_.uid, copy_.gid));
    HF_RETURN_IF_ERROR(store_.CheckGoesOn(copy_.id.job, copy_.job_name));
    if (store_.remote()) {
      HF_RETURN_IF_ERROR(store_.env.SyncDirectory(directory_));
    }
    // 3. The image's name. After an error that does not say whether it was moved, that is looked
    // at.
    HF_RETURN_IF_ERROR(store_.MarkStillBegun(directory_, copy_.gid));
    standing = Standing::kUnknown;
    const absl::Status moved = store_.MoveWithoutReplacing(Temporary(ImageName()), image_path);
    if (absl::IsAlreadyExists(moved)) {
      standing = Standing::kTemporaries;
    }
    HF_RETURN_IF_ERROR(moved);
    standing = Standing::kImageInPlace;
    HF_RETURN_IF_ERROR(CheckNoOtherForm());
    HF_RETURN_IF_ERROR(store_.env.SyncDirectory(directory_));
    // 4. The record's: from the moment that it has it the copy is there.
    HF_RETURN_IF_ERROR(store_.CheckGoesOn(copy_.id.job, copy_.job_name));
    const absl::Status named = store_.MoveWithoutReplacing(temporary, record_path);
    if (!absl::IsAlreadyExists(named)) {
      standing = Standing::kRecordInPlace;  // or perhaps, if that failed: then it is looked for
    }
    HF_RETURN_IF_ERROR(named);
    HF_RETURN_IF_ERROR(store_.env.SyncDirectory(directory_));
    // 5. What the record stands beside is what was written.
    HF_ASSIGN_OR_RETURN(const FileInfo written, image_.file->Info());
    HF_ASSIGN_OR_RETURN(const FileInfo there, store_.env.Info(image_path));
    if (written.inode != there.inode || there.bytes != stored_bytes_) {
      return absl::DataLossError(
          absl::StrCat("publish '", image_path, "': somebody changed it while it was published"));
    }
    return absl::OkStatus();
  }

  CopyStore::Impl& store_;
  const NewCopy copy_;
  const std::optional<int> zstd_level_;
  const ImageForm form_;
  const CopyName name_;
  const std::string directory_;
  LiveIntent intent_;
  CopyStore::Impl::NewImage image_;
  CompressingFile* compressing_ = nullptr;  // image_.file, where it is compressed
  uint64_t stored_bytes_;
  bool done_ = false;
};

}  // namespace

absl::StatusOr<CopyStore::Impl::NewImage> CopyStore::Impl::OpenNewImage(const std::string& path,
                                                                        uint64_t bytes,
                                                                        bool direct) {
  NewImage image;
  if (!remote()) {
    HF_ASSIGN_OR_RETURN(image.file, TakeFromPool(path, bytes, direct));
    image.recycled = image.file != nullptr;
  }
  if (image.file == nullptr) {
    HF_ASSIGN_OR_RETURN(image.file, env.Open(path, OpenMode::kCreateExclusive,
                                             {.direct = direct, .no_symlink = true}));
  }
  if (direct) {
    HF_ASSIGN_OR_RETURN(const DirectAlignment alignment, image.file->Alignment());
    image.alignment = std::max(alignment.memory_bytes, alignment.offset_bytes);
  }
  HF_RETURN_IF_ERROR(
      Reserve(*image.file, (bytes + image.alignment - 1) / image.alignment * image.alignment));
  return image;
}

absl::Status CopyStore::Impl::WriteRecord(const std::string& path, std::string_view record,
                                          uint32_t uid, uint32_t gid) {
  // (Not opened again: once it is the user's, root without CAP_DAC_OVERRIDE may not.)
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                      env.Open(path, OpenMode::kCreateExclusive, {.no_symlink = true}));
  HF_RETURN_IF_ERROR(file->WriteAt(0, std::as_bytes(std::span<const char>(record))));
  HF_RETURN_IF_ERROR(GiveToOwner(*file, uid, gid));
  HF_RETURN_IF_ERROR(file->Sync());
  // It is synced: what the page cache has of it goes, and what lies there is read. (O_DIRECT reads
  // no file that is shorter than a unit, as most records are.)
  (void)::posix_fadvise(file->fd(), 0, 0, POSIX_FADV_DONTNEED);
  std::string there(record.size(), '\0');
  HF_RETURN_IF_ERROR(file->ReadAt(0, std::as_writable_bytes(std::span(there))));
  return there == record
             ? absl::OkStatus()
             : absl::DataLossError(absl::StrCat(
                   "'", path, "': the record reads back otherwise than it was written; ",
                   "nothing was published. Look for errors of the drive or the mount ",
                   "in the kernel's log (dmesg)"));
}

absl::StatusOr<ShardRecord> CopyStore::Impl::CheckOwnRecord(const char* what, const NewCopy& copy,
                                                            std::string_view record_file) const {
  absl::StatusOr<ShardRecord> record = DecodeRecord(record_file);
  if (!record.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " ", copy.id.ToString(), ": ", record.status().message()));
  }
  if (record->id != copy.id || record->job_name != copy.job_name ||
      record->world_size != copy.world_size || FileBytes(*record) != copy.image_bytes ||
      (record->kept && !remote())) {
    return absl::InvalidArgumentError(absl::StrCat(
        what, " ", copy.id.ToString(), " of ", copy.world_size, " of job '", copy.job_name,
        "' with ", copy.image_bytes, " bytes: the record is of ", record->id.ToString(), " of ",
        record->world_size, " of job '", record->job_name, "' with ", FileBytes(*record), " bytes",
        record->kept ? ", and leaves slices out" : ""));
  }
  return record;
}

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

absl::StatusOr<std::unique_ptr<CopyStore::Writing>> CopyStore::Impl::Begin(
    const NewCopy& copy, bool direct, std::optional<int> zstd_level) {
  // 1. Whether there is anything to be written, and by us.
  HF_RETURN_IF_ERROR(CheckNewCopy(copy));
  if (zstd_level && !remote()) {
    return absl::InvalidArgumentError(
        absl::StrCat("write a copy of ", copy.id.ToString(),
                     " compressed: only the remote tier has such copies"));
  }
  HF_RETURN_IF_ERROR(Prepare());
  HF_RETURN_IF_ERROR(CheckMount());
  SweepIfNeeded();
  HF_RETURN_IF_ERROR(OpenJob({copy.id.job, copy.job_name, copy.uid, copy.gid}));
  HF_RETURN_IF_ERROR(CheckClaimed(copy.id.job, copy.id.attempt));
  const CopyName name{copy.id, copy.job_name, copy.world_size};
  std::vector<std::string> paths = {RecordPath(name)};
  for (const ImageForm form : Forms()) {
    paths.push_back(ImagePath(name, form));
  }
  for (const std::string& path : paths) {
    HF_ASSIGN_OR_RETURN(const bool there, Exists(path));
    if (there) {
      return absl::AlreadyExistsError(
          absl::StrCat("write a copy of ", copy.id.ToString(), ": there is '", path, "'"));
    }
  }
  // 2. The intent, and the file that it names.
  auto writing = std::make_unique<WritingCopy>(*this, copy, zstd_level);
  bool can_direct = false;
  {
    MutexLock hold(mutex);
    can_direct = capabilities.direct;
  }
  HF_RETURN_IF_ERROR(writing->Start(direct && can_direct && !zstd_level));
  return writing;
}

absl::StatusOr<std::unique_ptr<CopyStore::Writing>> CopyStore::Begin(
    const NewCopy& copy, std::optional<int> zstd_level) {
  return impl_->Begin(copy, impl_->options.direct, zstd_level);
}

}  // namespace holdfast
