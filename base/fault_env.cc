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

int FaultState::Count(const std::string& call) {
  ++calls;
  if (crash_at != 0 && calls >= crash_at) {
    return EIO;
  }
  if (const auto found = fail_at.find(calls); found != fail_at.end()) {
    return found->second;
  }
  for (const auto& [text, error] : fail_text) {
    if (call.find(text) != std::string::npos) {
      return error;
    }
  }
  return 0;
}

absl::Status FaultState::Begin(std::string_view operation, const std::string& path) {
  const int error = Count(absl::StrCat(ToAbsl(operation), " ", path));
  return error != 0 ? ErrnoStatus(error, operation, path) : CheckPath(operation, path);
}

absl::Status FaultState::BeginTwo(std::string_view operation, const std::string& from,
                                  const std::string& to) {
  const int error = Count(absl::StrCat(ToAbsl(operation), " ", from, " ", to));
  if (error != 0) {
    return ErrnoStatus(error, operation, TwoPaths(from, to));
  }
  HF_RETURN_IF_ERROR(CheckPath(operation, from));
  return CheckPath(operation, to);
}

int FaultState::CheckRoom(FaultContent& content, uint64_t bytes) {
  const uint64_t now = content.Size();
  if (bytes <= now) {
    return 0;
  }
  if (bytes > kFaultFileBytesMax) {
    return EFBIG;
  }
  const uint64_t used = tree.usage().bytes;
  return used > bytes_total || bytes - now > bytes_total - used ? ENOSPC : 0;
}

void FaultState::EndProcess() {
  ++epoch;
  crash_at = 0;
  fail_at.clear();
  fail_text.clear();
}

FaultEnv::FaultEnv(Durability durability) : state_(std::make_shared<FaultState>(durability)) {}
FaultEnv::~FaultEnv() = default;

int FaultEnv::calls() const {
  MutexLock lock(state_->mutex);
  return state_->calls;
}

void FaultEnv::FailCall(int nth_from_now, int error) {
  MutexLock lock(state_->mutex);
  state_->fail_at[state_->calls + nth_from_now] = error;
}

void FaultEnv::FailMatching(const std::string& text, int error) {
  MutexLock lock(state_->mutex);
  if (error == 0) {
    state_->fail_text.erase(text);
  } else {
    state_->fail_text[text] = error;
  }
}

void FaultEnv::CrashAtCall(int nth_from_now) {
  MutexLock lock(state_->mutex);
  state_->crash_at = state_->calls + nth_from_now;
}

void FaultEnv::Crash() {
  MutexLock lock(state_->mutex);
  state_->EndProcess();
  if (state_->durability == Durability::kNone) {
    state_->tree.LoseAll();
  } else {
    state_->tree.LosePower();
  }
}

void FaultEnv::KillProcess() {
  MutexLock lock(state_->mutex);
  state_->EndProcess();
}

absl::Status FaultEnv::FlipBit(const std::string& path, uint64_t byte_offset, int bit) {
  MutexLock lock(state_->mutex);
  std::shared_ptr<FaultInode> inode;
  int error = state_->tree.Find(path, inode);
  if (error == 0 && inode->is_directory()) {
    error = EISDIR;
  }
  if (error != 0) {
    return ErrnoStatus(error, "flip bit", path);
  }
  if (bit < 0 || bit > 7 || byte_offset >= inode->content->Size()) {
    return absl::OutOfRangeError(absl::StrCat("flip bit '", path, "': bit ", bit, " of byte ",
                                              byte_offset, " of ", inode->content->Size()));
  }
  std::byte byte{};
  inode->content->Read(byte_offset, {&byte, 1});
  byte ^= static_cast<std::byte>(1 << bit);
  inode->content->Write(byte_offset, {&byte, 1});
  if (byte_offset < inode->durable.size()) {
    inode->durable[byte_offset] = static_cast<char>(inode->durable[byte_offset] ^ (1 << bit));
  }
  return absl::OkStatus();
}

void FaultEnv::SetBytesTotal(uint64_t bytes) {
  MutexLock lock(state_->mutex);
  state_->bytes_total = bytes;
}

absl::StatusOr<std::unique_ptr<File>> FaultEnv::Open(const std::string& path, OpenMode mode) {
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
  if (create) {
    state_->tree.CreateFile(place);
  } else if (place.inode->is_directory()) {
    return absl::FailedPreconditionError(absl::StrCat("open '", path, "': not a regular file"));
  }
  return std::make_unique<FaultFile>(state_, place.inode, path, state_->epoch,
                                     mode != OpenMode::kRead);
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
  place.directory->entries.erase(place.name);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> FaultEnv::List(const std::string& directory) {
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
  return FaultInfo(*inode);
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
  info.type = state_->durability == Durability::kNone ? "tmpfs" : "ext4";
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
