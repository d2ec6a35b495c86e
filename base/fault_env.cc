#include "base/fault_env.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/env_checks.h"
#include "base/fault_file.h"
#include "base/fault_state.h"
#include "base/fault_tree.h"
#include "base/status.h"

namespace holdfast {
namespace {

constexpr uint64_t kBlockBytes = 4096;

absl::Status RenameIn(FaultState& state, const std::string& from, const std::string& to,
                      bool replace) REQUIRES(state.mutex) {
  HF_RETURN_IF_ERROR(state.BeginTwo("rename", from, to));
  if (!replace && !state.rename_no_replace) {
    return absl::UnimplementedError(absl::StrCat(
        "rename '", from, "' to '", to, "': this file system cannot rename without replacing"));
  }
  FaultTree::Place source;
  FaultTree::Place target;
  int error = state.tree.FindPlace(from, source);
  if (error == 0) {
    error = state.tree.FindPlace(to, target);
  }
  if (error == 0 && source.inode != nullptr && target.inode != nullptr && !replace) {
    error = EEXIST;
  }
  if (error == 0) {
    error = state.tree.Rename(source, target);
  }
  return error == 0 ? absl::OkStatus() : ErrnoStatus(error, "rename", TwoPaths(from, to));
}

}  // namespace

absl::StatusOr<std::unique_ptr<File>> FaultEnv::Open(const std::string& path, OpenMode mode,
                                                     OpenOptions options) {
  MutexLock lock(state_->mutex);
  const bool create = mode == OpenMode::kCreateExclusive;
  const std::string_view operation = create ? "create" : "open";
  HF_RETURN_IF_ERROR(state_->Begin(operation, path));
  FaultTree::Place place;
  int error = state_->tree.FindPlace(path, place);
  if (error == 0 && create && place.inode != nullptr) {
    error = EEXIST;
  } else if (error == 0 && !create && place.inode == nullptr) {
    error = ENOENT;
  }
  if (error != 0) {
    return ErrnoStatus(error, operation, path);
  }
  if (options.direct && state_->direct_alignment == 0) {
    return NoDirect(operation, path);
  }
  if (create) {
    state_->tree.CreateFile(place);
  } else if (place.inode->is_directory()) {
    return absl::FailedPreconditionError(absl::StrCat("open '", path, "': not a regular file"));
  }
  return std::make_unique<FaultFile>(state_, place.inode, path, state_->epoch,
                                     mode != OpenMode::kRead,
                                     options.direct ? state_->direct_alignment : 0);
}

absl::StatusOr<std::unique_ptr<Mapping>> FaultEnv::Map(File& file, uint64_t offset, uint64_t bytes,
                                                       bool writable) {
  auto* const fault_file = dynamic_cast<FaultFile*>(&file);
  if (fault_file == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("map '", file.path(), "': the file is not one of this Env's"));
  }
  return fault_file->Map(offset, bytes, writable);
}

absl::Status FaultEnv::Populate(Mapping& mapping, uint64_t offset, uint64_t bytes) {
  auto* const fault_mapping = dynamic_cast<FaultMapping*>(&mapping);
  if (fault_mapping == nullptr) {
    return absl::InvalidArgumentError("populate: the mapping is not one of this Env's");
  }
  return fault_mapping->Populate(offset, bytes);
}

absl::Status FaultEnv::Rename(const std::string& from, const std::string& to) {
  MutexLock lock(state_->mutex);
  return RenameIn(*state_, from, to, true);
}

absl::Status FaultEnv::RenameNoReplace(const std::string& from, const std::string& to) {
  MutexLock lock(state_->mutex);
  return RenameIn(*state_, from, to, false);
}

absl::Status FaultEnv::Link(const std::string& from, const std::string& to) {
  MutexLock lock(state_->mutex);
  HF_RETURN_IF_ERROR(state_->BeginTwo("link", from, to));
  if (!state_->hard_links) {
    return ErrnoStatus(EPERM, "link", TwoPaths(from, to));  // as vfat and many a FUSE say it
  }
  std::shared_ptr<FaultInode> inode;
  FaultTree::Place target;
  int error = state_->tree.Find(from, inode);
  if (error == 0) {
    error = state_->tree.FindPlace(to, target);
  }
  if (error == 0 && target.inode != nullptr) {
    error = EEXIST;
  } else if (error == 0 && inode->is_directory()) {
    error = EPERM;
  }
  if (error != 0) {
    return ErrnoStatus(error, "link", TwoPaths(from, to));
  }
  ++inode->links;
  target.directory->entries[target.name] = std::move(inode);
  return absl::OkStatus();
}

absl::Status FaultEnv::Unlink(const std::string& path) {
  MutexLock lock(state_->mutex);
  HF_RETURN_IF_ERROR(state_->Begin("unlink", path));
  FaultTree::Place place;
  int error = state_->tree.FindPlace(path, place);
  if (error == 0 && place.inode == nullptr) {
    error = ENOENT;
  } else if (error == 0 && place.inode->is_directory()) {
    error = EISDIR;
  }
  if (error != 0) {
    return ErrnoStatus(error, "unlink", path);
  }
  --place.inode->links;
  place.directory->entries.erase(place.name);
  return absl::OkStatus();
}

absl::Status FaultEnv::SyncDirectory(const std::string& path) {
  MutexLock lock(state_->mutex);
  HF_RETURN_IF_ERROR(state_->Begin("sync directory", path));
  std::shared_ptr<FaultInode> inode;
  int error = state_->tree.Find(path, inode);
  if (error == 0 && !inode->is_directory()) {
    error = ENOTDIR;
  }
  if (error != 0) {
    return ErrnoStatus(error, "sync directory", path);
  }
  inode->durable_entries = inode->entries;
  return absl::OkStatus();
}

absl::Status FaultEnv::CreateDirectory(const std::string& path, uint32_t mode) {
  MutexLock lock(state_->mutex);
  HF_RETURN_IF_ERROR(state_->Begin("create directory", path));
  FaultTree::Place place;
  int error = state_->tree.FindPlace(path, place);
  if (error == EBUSY || (error == 0 && place.inode != nullptr)) {
    error = EEXIST;  // the root is there too
  }
  if (error != 0) {
    return ErrnoStatus(error, "create directory", path);
  }
  state_->tree.CreateDirectory(place, mode);
  return absl::OkStatus();
}

absl::Status FaultEnv::CreateDirectories(const std::string& path, uint32_t mode) {
  HF_RETURN_IF_ERROR(CheckPath("create directory", path));
  for (size_t end = 1; end <= path.size(); ++end) {
    if ((end < path.size() && path[end] != '/') || path[end - 1] == '/') {
      continue;
    }
    // Through the public calls, so that each is a place to fail or crash at.
    const std::string prefix = path.substr(0, end);
    const absl::Status made = CreateDirectory(prefix, mode);
    if (made.ok()) {
      HF_RETURN_IF_ERROR(SyncDirectory(ParentDirectory(prefix)));
      continue;
    }
    if (!absl::IsAlreadyExists(made)) {
      return made;
    }
    HF_ASSIGN_OR_RETURN(const FileInfo info, Info(prefix));
    if (!S_ISDIR(info.mode)) {
      return ErrnoStatus(ENOTDIR, "create directory", prefix);
    }
  }
  return absl::OkStatus();
}

absl::Status FaultEnv::RemoveDirectory(const std::string& path) {
  MutexLock lock(state_->mutex);
  HF_RETURN_IF_ERROR(state_->Begin("remove directory", path));
  FaultTree::Place place;
  int error = state_->tree.FindPlace(path, place);
  if (error == 0 && place.inode == nullptr) {
    error = ENOENT;
  } else if (error == 0 && !place.inode->is_directory()) {
    error = ENOTDIR;
  } else if (error == 0 && !place.inode->entries.empty()) {
    error = ENOTEMPTY;
  }
  if (error != 0) {
    return ErrnoStatus(error, "remove directory", path);
  }
  state_->tree.RemoveDirectory(place);
  return absl::OkStatus();
}

absl::Status FaultEnv::SetDirectoryAccess(const std::string& path, uint32_t uid, uint32_t gid,
                                          uint32_t mode) {
  MutexLock lock(state_->mutex);
  HF_RETURN_IF_ERROR(state_->Begin("set access", path));
  std::shared_ptr<FaultInode> inode;
  int error = state_->tree.Find(path, inode);
  if (error == 0 && !inode->is_directory()) {
    error = ENOTDIR;
  }
  if (error != 0) {
    return ErrnoStatus(error, "set access", path);
  }
  inode->SetAccess(uid, gid, mode);
  return absl::OkStatus();
}

absl::Status FaultEnv::SetStriping(const std::string& directory, const Striping& striping) {
  MutexLock lock(state_->mutex);
  HF_RETURN_IF_ERROR(state_->Begin("set striping", directory));
  if (state_->type != "lustre") {
    return absl::UnimplementedError(
        absl::StrCat("set striping '", directory, "': not a Lustre file system"));
  }
  state_->stripings.emplace_back(directory, striping);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> FaultEnv::List(const std::string& directory,
                                                        size_t names_max) {
  MutexLock lock(state_->mutex);
  HF_RETURN_IF_ERROR(state_->Begin("list", directory));
  std::shared_ptr<FaultInode> inode;
  int error = state_->tree.Find(directory, inode);
  if (error == 0 && !inode->is_directory()) {
    error = ENOTDIR;
  }
  if (error != 0) {
    return ErrnoStatus(error, "list", directory);
  }
  if (inode->entries.size() > names_max) {
    return TooManyNames(directory, names_max);
  }
  std::vector<std::string> names;
  for (const auto& [name, entry] : inode->entries) {
    names.push_back(name);
  }
  return names;
}

absl::StatusOr<FileInfo> FaultEnv::Info(const std::string& path) {
  MutexLock lock(state_->mutex);
  HF_RETURN_IF_ERROR(state_->Begin("stat", path));
  std::shared_ptr<FaultInode> inode;
  if (const int error = state_->tree.Find(path, inode); error != 0) {
    return ErrnoStatus(error, "stat", path);
  }
  return FaultInfo(*inode, state_->DeviceOf(path));
}

absl::StatusOr<FilesystemInfo> FaultEnv::Filesystem(const std::string& path) {
  MutexLock lock(state_->mutex);
  HF_RETURN_IF_ERROR(state_->Begin("statfs", path));
  std::shared_ptr<FaultInode> inode;
  if (const int error = state_->tree.Find(path, inode); error != 0) {
    return ErrnoStatus(error, "statfs", path);
  }
  const uint64_t used = state_->tree.usage().bytes;
  FilesystemInfo info;
  info.type = state_->type;
  info.bytes_total = state_->bytes_total;
  info.bytes_free = state_->bytes_total - std::min(used, state_->bytes_total);
  info.block_bytes = kBlockBytes;
  return info;
}

absl::StatusOr<std::unique_ptr<FileLock>> FaultEnv::Lock(const std::string& path) {
  MutexLock lock(state_->mutex);
  HF_RETURN_IF_ERROR(state_->Begin("lock", path));
  FaultTree::Place place;
  int error = state_->tree.FindPlace(path, place);
  if (error == 0 && place.inode != nullptr && place.inode->is_directory()) {
    error = EISDIR;
  }
  if (error != 0) {
    return ErrnoStatus(error, "lock", path);
  }
  if (place.inode == nullptr) {
    state_->tree.CreateFile(place);
  }
  if (place.inode->lock_epoch == state_->epoch) {
    return absl::UnavailableError(absl::StrCat("lock '", path, "': held by this process (pid ",
                                               ::getpid(),
                                               "); stop it first, or use another directory"));
  }
  place.inode->lock_epoch = state_->epoch;
  const std::string pid = absl::StrCat(::getpid(), "\n");
  place.inode->content->Resize(0);
  place.inode->content->Write(0, std::as_bytes(std::span<const char>(pid)));
  return std::make_unique<FaultLock>(state_, place.inode, state_->epoch);
}

}  // namespace holdfast
