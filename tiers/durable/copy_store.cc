#include "tiers/durable/copy_store.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <span>

#include "absl/strings/str_cat.h"
#include "base/errno_status.h"
#include "base/status.h"
#include "tiers/durable/copy_store_impl.h"

namespace holdfast {
namespace {

std::string HomeOf(const CopyStore::Options& options) {
  const std::string home = JoinPath(options.dir, kHomeName);
  return options.kind == DurableKind::kNvme
             ? home
             : JoinPath(JoinPath(home, kHomeNodesName), options.node_name);
}

}  // namespace

bool MeansNotHere(const absl::Status& status) {
  return absl::IsUnimplemented(status) || absl::IsPermissionDenied(status) ||
         absl::IsInvalidArgument(status);
}

CopyStore::Impl::Impl(const Options& o)
    : options(o),
      env(*o.env),
      home(HomeOf(o)),
      intents_dir(JoinPath(home, kHomeIntentsName)),
      pool_dir(JoinPath(home, kHomePoolName)) {}

// ---- Paths ----

std::string CopyStore::Impl::JobDirectory(std::string_view job_name) const {
  return JoinPath(options.dir, job_name);
}
std::string CopyStore::Impl::StepDirectory(std::string_view job_name,
                                           const CheckpointId& id) const {
  return JoinPath(JobDirectory(job_name), StepDirectoryName(id));
}
std::string CopyStore::Impl::ImagePath(const CopyName& name, ImageForm form) const {
  return JoinPath(StepDirectory(name.job_name, name.id.checkpoint()),
                  ImageFileName(options.kind, name.id.rank, name.world_size, form));
}
std::string CopyStore::Impl::RecordPath(const CopyName& name) const {
  return JoinPath(StepDirectory(name.job_name, name.id.checkpoint()),
                  RecordFileName(options.kind, name.id.rank, name.world_size));
}

// ---- Small steps ----

void CopyStore::Impl::Note(const std::string& note) {
  MutexLock hold(mutex);
  std::vector<std::string>& notes = capabilities.notes;
  constexpr size_t kNotesMax = 16;
  if (notes.size() < kNotesMax && std::find(notes.begin(), notes.end(), note) == notes.end()) {
    notes.push_back(note);
  }
}

absl::StatusOr<bool> CopyStore::Impl::Exists(const std::string& path) {
  const absl::StatusOr<FileInfo> info = env.Info(path);
  if (info.ok() || absl::IsNotFound(info.status())) {
    return info.ok();
  }
  return info.status();
}

std::span<const ImageForm> CopyStore::Impl::Forms() const {
  static constexpr ImageForm kForms[] = {ImageForm::kPlain, ImageForm::kCompressed};
  return std::span(kForms).first(remote() ? 2 : 1);
}

absl::Status CopyStore::Impl::OpenForm(const CopyName& name,
                                       const std::function<absl::Status(ImageForm)>& open) {
  if (Forms().size() == 1) {
    return open(Forms().front());
  }
  // (Once more plain: a repair may have put it there, and taken the other away, in between.)
  absl::Status first;
  for (const ImageForm form : {ImageForm::kPlain, ImageForm::kCompressed, ImageForm::kPlain}) {
    HF_ASSIGN_OR_RETURN(const bool there, Exists(ImagePath(name, form)));
    const absl::Status opened = there ? open(form) : absl::OkStatus();
    if (there && (!absl::IsDataLoss(opened) || IsErrno(opened))) {
      return opened;
    }
    first = first.ok() ? opened : first;
  }
  return first.ok() ? open(ImageForm::kPlain) : first;  // it is gone, which that says
}

absl::Status CopyStore::Impl::CheckDirectory(const std::string& path) {
  HF_ASSIGN_OR_RETURN(const FileInfo info, env.Info(path));
  return S_ISDIR(info.mode) ? absl::OkStatus()
                            : absl::FailedPreconditionError(
                                  absl::StrCat("'", path, "': not a directory; move it elsewhere"));
}

absl::Status CopyStore::Impl::RemoveIfThere(const std::string& path) {
  const absl::Status status = env.Unlink(path);
  return absl::IsNotFound(status) ? absl::OkStatus() : status;
}

absl::Status CopyStore::Impl::RemoveIfEmpty(const std::string& directory) {
  const absl::Status removed = env.RemoveDirectory(directory);
  if (absl::IsFailedPrecondition(removed) || absl::IsAlreadyExists(removed)) {
    return absl::OkStatus();  // not empty (ENOTEMPTY, EEXIST)
  }
  if (!removed.ok() && !absl::IsNotFound(removed)) {
    return removed;
  }
  const absl::Status synced = env.SyncDirectory(ParentDirectory(directory));
  return absl::IsNotFound(synced) ? absl::OkStatus() : synced;
}

absl::StatusOr<std::string> CopyStore::Impl::ReadSmallFile(const std::string& path,
                                                           uint64_t bytes_max) {
  absl::StatusOr<std::string> bytes = ReadFile(env, path, bytes_max, {.no_symlink = true});
  if (absl::IsResourceExhausted(bytes.status()) && !IsErrno(bytes.status())) {
    return absl::DataLossError(bytes.status().message());  // no file of ours is as long
  }
  return bytes;
}

void CopyStore::Impl::DropCached(const std::string& path) {
  const absl::StatusOr<std::unique_ptr<File>> file =
      env.Open(path, OpenMode::kRead, {.no_symlink = true});
  if (file.ok() && (*file)->fd() >= 0) {
    (void)::posix_fadvise((*file)->fd(), 0, 0, POSIX_FADV_DONTNEED);
  }
}

// A file system that has no owners, or squashes root, keeps its own; that is told and no error.
absl::Status CopyStore::Impl::GiveToOwner(File& file, uint32_t uid, uint32_t gid) {
  for (const absl::Status& status :
       {options.set_owner ? file.SetOwner(uid, gid) : absl::OkStatus(), file.SetMode(kFileMode)}) {
    if (!status.ok() && !MeansNotHere(status)) {
      return status;
    }
    if (!status.ok()) {
      Note(absl::StrCat("files cannot be given to their jobs' users here: ",
                        status.code() == absl::StatusCode::kPermissionDenied ? "not permitted"
                                                                             : "not supported"));
    }
  }
  return absl::OkStatus();
}

absl::Status CopyStore::Impl::GiveDirectoryToOwner(const std::string& path, uint32_t gid) {
  // The directory stays the daemon's: its group may read it, and nobody puts names into it.
  const absl::Status status = env.SetDirectoryAccess(
      path, kKeepOwner, options.set_owner ? gid : kKeepOwner, kDirectoryMode);
  if (MeansNotHere(status)) {
    Note("directories cannot be given to their jobs' groups here");
    return absl::OkStatus();
  }
  return status;
}

absl::Status CopyStore::Impl::WriteNewFile(const std::string& path, std::string_view bytes,
                                           uint32_t uid, uint32_t gid) {
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                      env.Open(path, OpenMode::kCreateExclusive, {.no_symlink = true}));
  HF_RETURN_IF_ERROR(file->WriteAt(0, std::as_bytes(std::span<const char>(bytes))));
  HF_RETURN_IF_ERROR(GiveToOwner(*file, uid, gid));
  return file->Sync();
}

absl::Status CopyStore::Impl::MoveWithoutReplacing(const std::string& from, const std::string& to) {
  DurableCapabilities can;
  {
    MutexLock hold(mutex);
    can = capabilities;
  }
  // (Before anything was tried: whatever works.)
  if (can.rename_no_replace || !can.known) {
    const absl::Status renamed = env.RenameNoReplace(from, to);
    if (can.known || !MeansNotHere(renamed)) {
      return renamed;
    }
  }
  if (can.hard_links || !can.known) {
    const absl::Status linked = env.Link(from, to);
    if (!can.known && MeansNotHere(linked)) {
      return RenameIfFree(from, to);
    }
    if (absl::IsAlreadyExists(linked)) {
      // A network file system may say so of a link that it made itself, when an answer got lost.
      HF_ASSIGN_OR_RETURN(const FileInfo ours, env.Info(from));
      HF_ASSIGN_OR_RETURN(const FileInfo there, env.Info(to));
      if (ours.inode != there.inode) {
        return linked;
      }
    } else {
      HF_RETURN_IF_ERROR(linked);
    }
    return env.Unlink(from);
  }
  return RenameIfFree(from, to);
}

absl::Status CopyStore::Impl::RenameIfFree(const std::string& from, const std::string& to) {
  HF_ASSIGN_OR_RETURN(const bool taken, Exists(to));
  if (taken) {
    return absl::AlreadyExistsError(absl::StrCat("rename '", from, "' to '", to, "': it exists"));
  }
  return env.Rename(from, to);
}

absl::StatusOr<bool> CopyStore::Impl::PublishOnce(const std::string& directory,
                                                  std::string_view name, std::string_view unique,
                                                  std::string_view bytes, uint32_t uid,
                                                  uint32_t gid,
                                                  const std::function<absl::Status()>& may) {
  const std::string temporary = JoinPath(directory, TemporaryName(name, unique));
  const std::string path = JoinPath(directory, name);
  HF_RETURN_IF_ERROR(WriteNewFile(temporary, bytes, uid, gid));
  if (may) {
    HF_RETURN_IF_ERROR(may());
  }
  bool links = false;
  {
    MutexLock hold(mutex);
    links = capabilities.hard_links;
  }
  absl::Status published =
      links ? env.Link(temporary, path) : MoveWithoutReplacing(temporary, path);
  if (links && absl::IsAlreadyExists(published)) {
    HF_ASSIGN_OR_RETURN(const FileInfo ours, env.Info(temporary));
    HF_ASSIGN_OR_RETURN(const FileInfo there, env.Info(path));
    if (ours.inode == there.inode) {  // as in MoveWithoutReplacing
      published = absl::OkStatus();
    }
  }
  if (!published.ok() && !absl::IsAlreadyExists(published)) {
    return published;
  }
  HF_RETURN_IF_ERROR(RemoveIfThere(temporary));
  HF_RETURN_IF_ERROR(env.SyncDirectory(directory));
  return published.ok();
}

// ---- CopyStore ----

CopyStore::CopyStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CopyStore::~CopyStore() = default;

absl::StatusOr<std::unique_ptr<CopyStore>> CopyStore::Open(const Options& options) {
  if (options.kind == DurableKind::kRemote) {
    HF_RETURN_IF_ERROR(Annotate(CheckJobName(options.node_name), "the node's name"));
  }
  auto impl = std::make_unique<Impl>(options);
  if (options.same_as) {
    HF_RETURN_IF_ERROR(impl->CheckSame(*options.same_as));  // before anything is made there
  }
  {
    MutexLock prepare(impl->preparing);
    const absl::Status locked = impl->TakeLock();
    if (absl::IsUnavailable(locked)) {
      return locked;
    }
    // Anything else (read-only, full): there may be something to read. Who writes tries again.
  }
  HF_RETURN_IF_ERROR(impl->See());
  if (options.cluster) {
    MutexLock prepare(impl->preparing);
    HF_RETURN_IF_ERROR(impl->ClaimCluster(Impl::Claiming::kReads));
  }
  return std::unique_ptr<CopyStore>(new CopyStore(std::move(impl)));
}

const std::string& CopyStore::dir() const {
  return impl_->options.dir;
}
DurableCapabilities CopyStore::capabilities() const {
  MutexLock hold(impl_->mutex);
  return impl_->capabilities;
}
KnownDirectory CopyStore::place() const {
  MutexLock hold(impl_->mutex);
  return {impl_->device, impl_->directory_id, impl_->own_mount};
}
std::string CopyStore::refusal() const {
  MutexLock hold(impl_->mutex);
  return impl_->refusal;
}
uint64_t CopyStore::pool_bytes() const {
  MutexLock hold(impl_->mutex);
  return impl_->pool_bytes;
}
absl::StatusOr<FilesystemInfo> CopyStore::Space() {
  HF_RETURN_IF_ERROR(impl_->CheckMount());
  HF_RETURN_IF_ERROR(impl_->CheckCluster());
  return impl_->env.Filesystem(impl_->options.dir);
}
std::string CopyStore::ImagePath(const CopyName& name, ImageForm form) const {
  return impl_->ImagePath(name, form);
}

}  // namespace holdfast
