// Reading: the record is believed only where it fits the name that it was found under, its image,
// and the manifest.
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/errno_status.h"
#include "base/status.h"
#include "tiers/compressed/compressed_file.h"
#include "tiers/durable/copy_store_impl.h"
#include "tiers/durable/record_check.h"
#include "tiers/image/kept.h"

namespace holdfast {
namespace {

// A file system that does not say in what units it is read directly (FUSE, NFS, Lustre) is taken to
// want its preferred ones, which may be megabytes. No device has such: pages are tried there.
constexpr uint32_t kUnitMax = 1U << 16;
constexpr uint32_t kPage = 4096;

class ReadingCopy : public CopyStore::Reading {
 public:
  ReadingCopy(CopyStore::Impl& store, CopyName name, ImageForm form, ShardRecord record,
              std::string record_file)
      : store_(store),
        name_(std::move(name)),
        form_(form),
        record_path_(store.RecordPath(name_)),
        info_{record.id, record.world_size, FileBytes(record), record.sealed_unix_ms,
              store.ImagePath(name_, form)},
        record_(std::move(record)),
        record_file_(std::move(record_file)) {}

  absl::Status OpenImage(const CopyStore::ReadOptions& options) {
    absl::StatusOr<std::unique_ptr<File>> file = absl::UnimplementedError("");
    if ((options.direct || options.past_cache) && !compressed()) {
      file = store_.env.Open(info_.location, OpenMode::kRead, {.direct = true, .no_symlink = true});
      absl::StatusOr<DirectAlignment> alignment = file.ok() ? (*file)->Alignment() : file.status();
      if (alignment.ok()) {
        alignment_ = std::max(alignment->memory_bytes, alignment->offset_bytes);
        if (options.past_cache && alignment_ > kUnitMax) {
          alignment_ = kPage;
        }
      } else if (absl::IsUnimplemented(alignment.status())) {
        file = alignment.status();
      } else {
        return alignment.status();
      }
      // Nobody asked beforehand, as for `direct`, what this file system can do, and some that open
      // a file so refuse to read it. (One that is shorter than a unit is read otherwise, too.)
      if (file.ok() && options.past_cache) {
        const absl::Status first = ReadFirst(**file);
        if (absl::IsInvalidArgument(first) || absl::IsUnimplemented(first) ||
            absl::IsOutOfRange(first)) {
          file = absl::UnimplementedError("");
          alignment_ = 1;
        } else {
          HF_RETURN_IF_ERROR(first);  // of what lies there, and the page cache would hide it
        }
      }
    }
    if (absl::IsUnimplemented(file.status())) {
      file = store_.OpenImage(info_.location, form_, info_.image_bytes);
    }
    HF_RETURN_IF_ERROR(file.status());
    image_ = *std::move(file);
    HF_ASSIGN_OR_RETURN(opened_, image_->Info());
    return CheckImageLength(info_.location, opened_.bytes, info_.image_bytes);
  }

  const CopyInfo& info() const override { return info_; }
  const ShardRecord& record() const override { return record_; }
  const std::string& record_file() const override { return record_file_; }
  absl::StatusOr<std::unique_ptr<File>> OpenRecord() override {
    HF_ASSIGN_OR_RETURN(std::unique_ptr<File> file,
                        store_.env.Open(record_path_, OpenMode::kRead, {.no_symlink = true}));
    HF_ASSIGN_OR_RETURN(const FileInfo info, file->Info());
    std::string now(info.bytes == record_file_.size() ? record_file_.size() : 0, '\0');
    HF_RETURN_IF_ERROR(file->ReadAt(0, std::as_writable_bytes(std::span(now))));
    if (now != record_file_) {
      return absl::AbortedError(
          absl::StrCat("'", record_path_, "': the record was replaced just now"));
    }
    return file;
  }
  File& image() override { return *image_; }
  std::unique_ptr<File> TakeImage() override { return std::move(image_); }
  uint32_t alignment() const override { return alignment_; }
  bool direct() const override { return alignment_ != 1; }
  bool compressed() const override { return form_ == ImageForm::kCompressed; }

  absl::Status Confirm() override {
    HF_ASSIGN_OR_RETURN(const FileInfo now, image_->Info());
    return CheckImageLength(info_.location, now.bytes, info_.image_bytes);
  }

  bool WasReplaced() override {
    bool another = false;
    for (const ImageForm form : store_.Forms()) {
      const absl::StatusOr<FileInfo> now = store_.env.Info(store_.ImagePath(name_, form));
      if (now.ok() && now->inode == opened_.inode && now->device == opened_.device) {
        return false;
      }
      another = another || now.ok();
    }
    return another;
  }

 private:
  absl::Status ReadFirst(File& file) const {
    const std::unique_ptr<std::byte, decltype(&std::free)> first(
        static_cast<std::byte*>(std::aligned_alloc(alignment_, alignment_)), &std::free);
    return first == nullptr ? absl::UnimplementedError("no memory for a unit")
                            : file.ReadAt(0, {first.get(), alignment_});
  }

  CopyStore::Impl& store_;
  const CopyName name_;
  const ImageForm form_;
  const std::string record_path_;
  const CopyInfo info_;
  const ShardRecord record_;
  const std::string record_file_;
  std::unique_ptr<File> image_;
  FileInfo opened_;
  uint32_t alignment_ = 1;
};

}  // namespace

absl::Status CheckImageLength(const std::string& path, uint64_t actual, uint64_t expected) {
  if (actual == expected) {
    return absl::OkStatus();
  }
  return absl::DataLossError(absl::StrCat("'", path, "': the image was ",
                                          actual < expected ? "cut" : "extended", " to ", actual,
                                          " bytes, its record says ", expected));
}

absl::Status CheckIsWhole(const std::string& path, const ShardRecord& record) {
  if (!record.kept) {
    return absl::OkStatus();
  }
  return absl::DataLossError(absl::StrCat(
      "'", path, "': it is of an image that leaves slices out, as only the remote tier has them"));
}

absl::StatusOr<std::unique_ptr<File>> CopyStore::Impl::OpenImageFile(const std::string& path) {
  absl::StatusOr<std::unique_ptr<File>> file =
      env.Open(path, OpenMode::kRead, {.no_symlink = true});
  if (absl::IsNotFound(file.status())) {
    HF_RETURN_IF_ERROR(CheckMount());
    return absl::DataLossError(
        absl::StrCat("'", path, "': the image is gone, its record is there"));
  }
  return file;
}

absl::StatusOr<std::unique_ptr<File>> CopyStore::Impl::OpenImage(const std::string& path,
                                                                 ImageForm form,
                                                                 uint64_t image_bytes) {
  HF_ASSIGN_OR_RETURN(std::unique_ptr<File> file, OpenImageFile(path));
  if (form == ImageForm::kCompressed) {
    HF_ASSIGN_OR_RETURN(file, CompressedFile::Open(std::move(file), image_bytes));
  }
  HF_ASSIGN_OR_RETURN(const FileInfo info, file->Info());
  HF_RETURN_IF_ERROR(CheckImageLength(path, info.bytes, image_bytes));
  return file;
}

absl::StatusOr<ShardRecord> CheckRecordFile(const std::string& path, std::string_view bytes,
                                            const CopyName& name) {
  absl::StatusOr<ShardRecord> record = DecodeRecord(bytes);
  if (absl::IsFailedPrecondition(record.status())) {  // newer
    return Annotate(record.status(), absl::StrCat("'", path, "'"));
  }
  if (!record.ok()) {
    return absl::DataLossError(absl::StrCat("'", path, "': ", record.status().message()));
  }
  const bool world_fits = name.world_size == 0 || record->world_size == name.world_size;
  if (record->id != name.id || record->job_name != name.job_name || !world_fits ||
      record->generation != 0) {
    return absl::DataLossError(absl::StrCat(
        "'", path, "': the record is of ", record->id.ToString(), " of ", record->world_size,
        " of job '", record->job_name, "', which is not what its name says"));
  }
  return record;
}

namespace {

// Something else lies under the name of one of the copy's files: then this is no copy.
absl::Status AsOfCopy(const absl::Status& opened) {
  return absl::IsFailedPrecondition(opened) ? absl::DataLossError(Message(opened)) : opened;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CopyStore::Reading>> CopyStore::Impl::OpenCopy(
    const CopyName& wanted, const ReadOptions& read_options) {
  HF_RETURN_IF_ERROR(CheckJobName(wanted.job_name));
  // 1. Its names. NVMe's have no world size in them; what the caller expects is compared all the
  // same.
  HF_ASSIGN_OR_RETURN(const CopyName named, FindWorldSize(wanted));
  const std::string record_path = RecordPath(named);
  const std::string directory = StepDirectory(named.job_name, named.id.checkpoint());
  for (const std::string& path : {JobDirectory(named.job_name), directory}) {
    HF_RETURN_IF_ERROR(CheckDirectory(path));
  }
  // 2. The record.
  CopyName expected = named;
  expected.world_size = remote() ? named.world_size : wanted.world_size;
  std::optional<std::string> read;
  const absl::StatusOr<ShardRecord> decoded =
      ReadTwice(record_path, kRecordBytesMax, [&](std::string there) {
        read = std::move(there);
        return CheckRecordFile(record_path, *read, expected);
      });
  if (!decoded.ok()) {
    return read ? decoded.status() : AsOfCopy(decoded.status());
  }
  const ShardRecord& record = *decoded;
  const std::string& bytes = *read;
  if (!remote()) {
    HF_RETURN_IF_ERROR(CheckIsWhole(record_path, record));
  }
  // 3. The manifest, if the step is committed.
  if (remote()) {
    std::shared_ptr<const Manifest> manifest = read_options.manifest;
    if (manifest == nullptr) {
      absl::StatusOr<Manifest> there =
          ReadManifest({named.id.job, named.job_name, named.id.checkpoint()});
      if (there.ok()) {
        manifest = std::make_shared<const Manifest>(*std::move(there));
      } else if (!absl::IsNotFound(there.status()) &&
                 (!absl::IsDataLoss(there.status()) || IsErrno(there.status()))) {
        return there.status();
      }  // else there is none that says anything: the record says what it is of
    }
    if (manifest != nullptr) {
      const bool fits = manifest->job == named.id.job &&
                        manifest->checkpoint == named.id.checkpoint() &&
                        named.id.rank < manifest->shards.size();
      const ManifestShard* shard = fits ? &manifest->shards[named.id.rank] : nullptr;
      if (shard == nullptr || shard->record_bytes != bytes.size() ||
          shard->record_crc != RecordCrcOf(bytes) || shard->image_bytes != FileBytes(record)) {
        return absl::DataLossError(
            absl::StrCat("'", record_path, "': not the record that the step's manifest names"));
      }
    }
  }
  // 4. The image.
  std::unique_ptr<ReadingCopy> reading;
  HF_RETURN_IF_ERROR(AsOfCopy(OpenForm(named, [&](ImageForm form) {
    reading = std::make_unique<ReadingCopy>(*this, named, form, record, bytes);
    return reading->OpenImage(read_options);
  })));
  return reading;
}

absl::StatusOr<std::unique_ptr<CopyStore::Reading>> CopyStore::OpenCopy(
    const CopyName& name, const ReadOptions& options) {
  ReadOptions effective = options;
  effective.direct = options.direct && impl_->options.direct;
  absl::StatusOr<std::unique_ptr<Reading>> reading = impl_->OpenCopy(name, effective);
  if (reading.ok()) {
    return reading;
  }
  return impl_->SinceMounted(reading.status());
}

absl::StatusOr<std::unique_ptr<File>> CopyStore::OpenImage(const CopyName& name,
                                                           uint64_t image_bytes) {
  std::unique_ptr<File> image;
  const absl::Status opened = impl_->OpenForm(name, [&](ImageForm form) -> absl::Status {
    HF_ASSIGN_OR_RETURN(image, impl_->OpenImage(impl_->ImagePath(name, form), form, image_bytes));
    return absl::OkStatus();
  });
  if (!opened.ok()) {
    return impl_->SinceMounted(AsOfCopy(opened));
  }
  return image;
}

absl::StatusOr<bool> CopyStore::HasCompressed(const CheckpointName& name) {
  if (!impl_->remote()) {
    return false;
  }
  const absl::StatusOr<std::vector<std::string>> names =
      impl_->env.List(impl_->StepDirectory(name.job_name, name.id), kStepNamesMax);
  if (!names.ok()) {
    return impl_->SinceMounted(names.status());
  }
  return std::any_of(names->begin(), names->end(), [](const std::string& file_name) {
    const StepFile file = ParseStepFileName(DurableKind::kRemote, file_name);
    return file.role == StepFileRole::kImage && file.form == ImageForm::kCompressed;
  });
}

}  // namespace holdfast
