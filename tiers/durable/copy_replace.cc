// Replacement: a good copy in the place of a bad one (docs/formats.md, "Order of changes in durable
// tiers"). The bad one is not touched before the good one is on the disk, whole; then each of its
// names passes from the old file to the new one at once, the image's first. Its record is, as a
// rule, the one that is there already: then that is all. The new image is never compressed: where
// the old one was, it goes when the new one, which is read before it, has its name.
#include <fcntl.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/errno_status.h"
#include "base/status.h"
#include "tiers/durable/copy_store_impl.h"
#include "tiers/durable/record_check.h"
#include "tiers/image/kept.h"

namespace holdfast {
namespace {

Intent ReplaceIntent(const NewCopy& copy) {
  Intent intent;
  intent.kind = IntentKind::kReplace;
  intent.unique = NewUnique();
  intent.job = copy.id.job;
  intent.job_name = copy.job_name;
  intent.checkpoint = copy.id.checkpoint();
  intent.world_size = copy.world_size;
  intent.ranks = {copy.id.rank};
  return intent;
}

class ReplacingCopy : public CopyStore::Writing {
 public:
  ReplacingCopy(CopyStore::Impl& store, NewCopy copy)
      : store_(store),
        copy_(std::move(copy)),
        name_{copy_.id, copy_.job_name, copy_.world_size},
        directory_(store.StepDirectory(copy_.job_name, copy_.id.checkpoint())),
        intent_(store, ReplaceIntent(copy_)) {}

  ~ReplacingCopy() override {
    if (!done_) {
      image_.file.reset();
      intent_.Resolve(Standing::kTemporaries).IgnoreError();  // else the next sweep does it
    }
  }

  // Intent and file: what BeginReplacement does after its checks.
  absl::Status Start(bool direct) {
    HF_RETURN_IF_ERROR(intent_.Write());
    HF_ASSIGN_OR_RETURN(image_,
                        store_.OpenNewImage(TemporaryOf(ImagePath()), copy_.image_bytes, direct));
    return store_.CheckGoesOn(copy_.id.job, copy_.job_name);
  }

  const NewCopy& copy() const override { return copy_; }
  File& image() override { return *image_.file; }
  absl::Status FinishImage() override { return absl::OkStatus(); }
  void DropCached() override {
    (void)::posix_fadvise(image_.file->fd(), 0, 0, POSIX_FADV_DONTNEED);
  }
  uint64_t stored_bytes() const override { return copy_.image_bytes; }
  uint32_t alignment() const override { return image_.alignment; }
  bool direct() const override { return image_.alignment != 1; }
  bool recycled() const override { return image_.recycled; }

  absl::StatusOr<PublishedCopy> Publish(std::string_view record_file) override {
    if (done_) {
      return absl::FailedPreconditionError(
          absl::StrCat("replace ", copy_.id.ToString(), ": it is done, or failed before"));
    }
    HF_ASSIGN_OR_RETURN(ShardRecord record, store_.CheckOwnRecord("replace", copy_, record_file));
    record.generation = 0;
    const std::string bytes = EncodeRecord(record);
    done_ = true;
    const BusyShards shard(store_, copy_.id.job, copy_.id.checkpoint(), {copy_.id.rank});
    const absl::Status status =
        shard.taken() ? PutInPlace(bytes)
                      : absl::AbortedError(absl::StrCat("replace ", copy_.id.ToString(),
                                                        ": another call is busy with it"));
    image_.file.reset();
    // Whatever became of it, only its temporaries are left to be done away with.
    const absl::Status tidy = intent_.Resolve(Standing::kTemporaries);
    HF_RETURN_IF_ERROR(status);
    tidy.IgnoreError();  // (the next sweep does it)
    return PublishedCopy{ImagePath(),  copy_.image_bytes,  copy_.image_bytes,
                         bytes.size(), RecordCrcOf(bytes), record.layout_hash};
  }

 private:
  std::string ImagePath() const { return store_.ImagePath(name_, ImageForm::kPlain); }

  std::string TemporaryOf(const std::string& path) const {
    return JoinPath(directory_,
                    TemporaryName(path.substr(directory_.size() + 1), intent_.intent().unique));
  }

  // Whether the record that is there has to go: it is not this one. An undamaged one that says
  // something else is another save's, unless the manifest says that it is none of the step's.
  absl::StatusOr<bool> RecordHasToGo(const std::string& record, bool committed) {
    const std::string path = store_.RecordPath(name_);
    const absl::StatusOr<std::string> there = store_.ReadSmallFile(path, kRecordBytesMax);
    if (!there.ok()) {
      const bool damaged = absl::IsNotFound(there.status()) ||
                           absl::IsFailedPrecondition(there.status()) ||
                           absl::IsDataLoss(there.status());
      return damaged ? absl::StatusOr<bool>(true) : there.status();
    }
    if (*there == record) {
      return false;
    }
    const absl::Status sound = CheckRecordFile(path, *there, name_).status();
    if (absl::IsFailedPrecondition(sound)) {
      return sound;  // of a newer version
    }
    if (sound.ok() && !committed) {
      return absl::AlreadyExistsError(
          absl::StrCat("replace '", path,
                       "': it is undamaged, and of another save; nothing was "
                       "touched (to be rid of that copy: ckptctl rm)"));
    }
    return true;
  }

  absl::Status PutInPlace(const std::string& record) {
    const std::string image_path = ImagePath();
    const std::string record_path = store_.RecordPath(name_);
    HF_RETURN_IF_ERROR(store_.CheckMount());
    // 1. Whether it still is the copy that is to be mended.
    HF_RETURN_IF_ERROR(store_.CheckManifestNames(name_, record, copy_.image_bytes));
    HF_ASSIGN_OR_RETURN(const bool committed, Committed());
    HF_ASSIGN_OR_RETURN(const bool new_record, RecordHasToGo(record, committed));
    HF_RETURN_IF_ERROR(IsStillThere());
    // 2. All of the new one, durable, beside the old one.
    HF_RETURN_IF_ERROR(image_.file->Truncate(copy_.image_bytes));
    HF_RETURN_IF_ERROR(store_.GiveToOwner(*image_.file, copy_.uid, copy_.gid));
    HF_RETURN_IF_ERROR(image_.file->SyncData());
    const std::string record_aside = TemporaryOf(record_path);
    if (new_record) {
      HF_RETURN_IF_ERROR(store_.WriteRecord(record_aside, record, copy_.uid, copy_.gid));
    }
    HF_RETURN_IF_ERROR(store_.CheckGoesOn(copy_.id.job, copy_.job_name));
    HF_RETURN_IF_ERROR(IsStillThere());
    HF_ASSIGN_OR_RETURN(const FileInfo written, image_.file->Info());
    // 3. The image's name. With the record that is there, if that is the same, the copy is good.
    HF_RETURN_IF_ERROR(store_.env.Rename(TemporaryOf(image_path), image_path));
    HF_RETURN_IF_ERROR(store_.env.SyncDirectory(directory_));
    // 4. The record's.
    if (new_record) {
      HF_RETURN_IF_ERROR(store_.env.Rename(record_aside, record_path));
      HF_RETURN_IF_ERROR(store_.env.SyncDirectory(directory_));
    }
    HF_RETURN_IF_ERROR(IsInPlace(image_path, written, committed, new_record ? record : ""));
    // 5. What was bad under the name of a compressed one. (A crash before leaves it, unread.)
    if (store_.remote()) {
      store_.RemoveIfThere(store_.ImagePath(name_, ImageForm::kCompressed)).IgnoreError();
    }
    return absl::OkStatus();
  }

  // Another node may have removed the step at that very moment; then nothing of it comes back. (A
  // removal takes the manifest first, where there was one.) `new_record`: empty, if it is the old
  // one.
  absl::Status IsInPlace(const std::string& image_path, const FileInfo& written, bool was_committed,
                         const std::string& new_record) {
    const std::string record_path = store_.RecordPath(name_);
    HF_ASSIGN_OR_RETURN(const bool record_there, store_.Exists(record_path));
    HF_ASSIGN_OR_RETURN(const bool committed, Committed());
    const bool removed = was_committed ? !committed : !record_there && !committed;
    const absl::StatusOr<FileInfo> there = store_.env.Info(image_path);
    if (!there.ok() && !absl::IsNotFound(there.status())) {
      return there.status();
    }
    const bool ours = there.ok() && there->inode == written.inode;
    if (removed) {
      if (ours) {
        HF_RETURN_IF_ERROR(store_.RemoveIfThere(image_path));
      }
      if (!new_record.empty() &&
          store_.ReadSmallFile(record_path, kRecordBytesMax).value_or("") == new_record) {
        HF_RETURN_IF_ERROR(store_.RemoveIfThere(record_path));
      }
      return Gone();
    }
    if (!ours || there->bytes != copy_.image_bytes) {
      return absl::DataLossError(
          absl::StrCat("replace '", image_path, "': somebody changed it at the same time"));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<bool> Committed() const {
    return store_.remote() ? store_.Exists(JoinPath(directory_, kManifestName))
                           : absl::StatusOr<bool>(false);
  }

  absl::Status IsStillThere() {
    HF_ASSIGN_OR_RETURN(const bool any, store_.AnythingOf(name_));
    return any ? absl::OkStatus() : Gone();
  }

  absl::Status Gone() const {
    return absl::NotFoundError(
        absl::StrCat("replace '", ImagePath(), "': the copy was removed meanwhile"));
  }

  CopyStore::Impl& store_;
  const NewCopy copy_;
  const CopyName name_;
  const std::string directory_;
  LiveIntent intent_;
  CopyStore::Impl::NewImage image_;
  bool done_ = false;
};

}  // namespace

absl::StatusOr<bool> CopyStore::Impl::AnythingOf(const CopyName& name) {
  std::vector<std::string> paths = {RecordPath(name)};
  for (const ImageForm form : Forms()) {
    paths.push_back(ImagePath(name, form));
  }
  if (remote()) {
    paths.push_back(JoinPath(StepDirectory(name.job_name, name.id.checkpoint()), kManifestName));
  }
  for (const std::string& path : paths) {
    HF_ASSIGN_OR_RETURN(const bool there, Exists(path));
    if (there) {
      return true;
    }
  }
  return false;
}

absl::Status CopyStore::Impl::CheckManifestNames(const CopyName& name, std::string_view record,
                                                 uint64_t image_bytes) {
  if (!remote()) {
    return absl::OkStatus();
  }
  const absl::StatusOr<Manifest> manifest =
      ReadManifest({name.id.job, name.job_name, name.id.checkpoint()});
  if (absl::IsNotFound(manifest.status())) {
    return absl::OkStatus();  // it is not committed
  }
  if (!manifest.ok()) {
    return Annotate(manifest.status(), "replace: which record belongs there is not known");
  }
  const bool named = name.id.rank < manifest->shards.size();
  const ManifestShard* shard = named ? &manifest->shards[name.id.rank] : nullptr;
  if (shard == nullptr || shard->record_bytes != record.size() ||
      shard->record_crc != RecordCrcOf(record) || shard->image_bytes != image_bytes) {
    return absl::FailedPreconditionError(
        absl::StrCat("replace '", RecordPath(name),
                     "': the step's manifest names another record than this one "
                     "(of ",
                     record.size(), " bytes); nothing was touched"));
  }
  return absl::OkStatus();
}

// Only temporaries: what has its final name by now is whole, or as bad as it was.
absl::Status CopyStore::Impl::ResolveReplace(const Intent& intent) {
  const std::string directory = StepDirectory(intent.job_name, intent.checkpoint);
  const CopyName name{
      {intent.job, intent.checkpoint.attempt, intent.checkpoint.step, intent.ranks.front()},
      intent.job_name,
      intent.world_size};
  for (const std::string& path : {ImagePath(name, ImageForm::kPlain), RecordPath(name)}) {
    HF_RETURN_IF_ERROR(RemoveIfThere(
        JoinPath(directory, TemporaryName(path.substr(directory.size() + 1), intent.unique))));
  }
  const absl::Status synced = env.SyncDirectory(directory);
  if (!synced.ok() && !absl::IsNotFound(synced)) {
    return synced;
  }
  return RemoveStepIfEmpty(directory);
}

absl::StatusOr<std::unique_ptr<CopyStore::Writing>> CopyStore::Impl::BeginReplacement(
    const NewCopy& copy, bool direct) {
  HF_RETURN_IF_ERROR(CheckJobName(copy.job_name));
  HF_RETURN_IF_ERROR(Prepare());
  HF_RETURN_IF_ERROR(CheckMount());
  const CopyName name{copy.id, copy.job_name, copy.world_size};
  HF_ASSIGN_OR_RETURN(const bool any, AnythingOf(name));
  if (!any && !remote()) {
    return Begin(copy, direct, std::nullopt);
  }
  if (!any) {  // nor has its step a manifest: somebody removed it, and it does not come back in
               // parts
    return absl::NotFoundError(
        absl::StrCat("replace '", RecordPath(name),
                     "': nothing of the copy is there any more, nor of a manifest "
                     "that names it: somebody else removed it"));
  }
  SweepIfNeeded();
  HF_RETURN_IF_ERROR(CheckJobIs(copy.id.job, copy.job_name).status());
  auto replacing = std::make_unique<ReplacingCopy>(*this, copy);
  bool can_direct = false;
  {
    MutexLock hold(mutex);
    can_direct = capabilities.direct;
  }
  HF_RETURN_IF_ERROR(replacing->Start(direct && can_direct));
  return replacing;
}

absl::StatusOr<std::string> CopyStore::ReadRecordFile(const CopyName& name) {
  const std::string path = impl_->RecordPath(name);
  HF_ASSIGN_OR_RETURN(std::string bytes, impl_->ReadSmallFile(path, kRecordBytesMax));
  HF_RETURN_IF_ERROR(CheckRecordFile(path, bytes, name).status());
  return bytes;
}

absl::StatusOr<std::unique_ptr<CopyStore::Writing>> CopyStore::BeginReplacement(
    const NewCopy& copy) {
  return impl_->BeginReplacement(copy, impl_->options.direct);
}

}  // namespace holdfast
