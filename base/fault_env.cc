#include "base/fault_env.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/env_checks.h"
#include "base/fault_tree.h"
#include "base/mutex.h"
#include "base/status.h"

namespace holdfast {
namespace {

constexpr uint64_t kBytesTotalDefault = uint64_t{1} << 40;
constexpr uint64_t kFileBytesMax = uint64_t{1} << 32;  // contents are held in memory
constexpr uint64_t kBlockBytes = 4096;

FileInfo InfoOf(FaultInode& inode) {
  FileInfo info;
  info.bytes = inode.is_directory() ? 0 : inode.content->Size();
  info.inode = inode.number;
  info.links = inode.links;
  info.mode = inode.mode;
  info.uid = ::getuid();
  info.gid = ::getgid();
  return info;
}

}  // namespace

struct FaultEnv::State {
  explicit State(Durability d) : durability(d) {}

  const Durability durability;
  Mutex mutex;
  FaultTree tree GUARDED_BY(mutex);
  uint64_t bytes_total GUARDED_BY(mutex) = kBytesTotalDefault;
  uint64_t epoch GUARDED_BY(mutex) = 1;  // grows when the process "dies": what was opened before is stale
  int calls GUARDED_BY(mutex) = 0;
  int crash_at GUARDED_BY(mutex) = 0;                    // 0: never
  std::map<int, int> fail_at GUARDED_BY(mutex);          // call number → errno
  std::map<std::string, int> fail_text GUARDED_BY(mutex);  // text in "operation path" → errno

  // Counts the call; the errno with which it is to fail, or 0.
  int Count(std::string_view operation, const std::string& thing) REQUIRES(mutex) {
    ++calls;
    if (crash_at != 0 && calls >= crash_at) {
      return EIO;
    }
    if (const auto found = fail_at.find(calls); found != fail_at.end()) {
      return found->second;
    }
    const std::string call = absl::StrCat(ToAbsl(operation), " ", thing);
    for (const auto& [text, error] : fail_text) {
      if (call.find(text) != std::string::npos) {
        return error;
      }
    }
    return 0;
  }

  absl::Status Begin(std::string_view operation, const std::string& path) REQUIRES(mutex) {
    const int error = Count(operation, path);
    if (error != 0) {
      return ErrnoStatus(error, operation, path);
    }
    return CheckPath(operation, path);
  }

  absl::Status BeginTwo(std::string_view operation, const std::string& from, const std::string& to) REQUIRES(mutex) {
    const int error = Count(operation, absl::StrCat(from, " ", to));
    if (error != 0) {
      return ErrnoStatus(error, operation, TwoPaths(from, to));
    }
    HF_RETURN_IF_ERROR(CheckPath(operation, from));
    return CheckPath(operation, to);
  }

  // Room for a file that grows to `bytes`.
  int CheckRoom(FaultContent& content, uint64_t bytes) REQUIRES(mutex) {
    const uint64_t now = content.Size();
    if (bytes <= now) {
      return 0;
    }
    if (bytes > kFileBytesMax) {
      return EFBIG;
    }
    const uint64_t used = tree.usage().bytes;
    return used > bytes_total || bytes - now > bytes_total - used ? ENOSPC : 0;
  }

  // The process is gone: its files are stale, its locks are free, and the faults have done their work.
  void EndProcess() REQUIRES(mutex) {
    ++epoch;
    crash_at = 0;
    fail_at.clear();
    fail_text.clear();
  }

  absl::Status RenameLocked(const std::string& from, const std::string& to, bool replace) REQUIRES(mutex) {
    HF_RETURN_IF_ERROR(BeginTwo("rename", from, to));
    FaultTree::Place source;
    FaultTree::Place target;
    int error = tree.FindPlace(from, source);
    if (error == 0) {
      error = tree.FindPlace(to, target);
    }
    if (error == 0 && source.inode == nullptr) {
      error = ENOENT;
    }
    if (error == 0 && !replace && target.inode != nullptr) {
      error = EEXIST;
    }
    if (error == 0) {
      error = tree.Rename(source, target);
    }
    return error == 0 ? absl::OkStatus() : ErrnoStatus(error, "rename", TwoPaths(from, to));
  }
};

namespace {

// FaultEnv::State is private; files, mappings and locks are told its type by FaultEnv.
template <typename State>
class FaultFile : public File {
 public:
  FaultFile(std::shared_ptr<State> state, std::shared_ptr<FaultInode> inode, std::string path, uint64_t epoch,
            bool writable)
      : state_(std::move(state)), inode_(std::move(inode)), path_(std::move(path)), epoch_(epoch), writable_(writable) {}

  int fd() const override {
    MutexLock lock(state_->mutex);
    return inode_->content->Fd();
  }
  const std::string& path() const override { return path_; }

  absl::Status ReadAt(uint64_t offset, std::span<std::byte> out) override {
    MutexLock lock(state_->mutex);
    HF_RETURN_IF_ERROR(Begin("read", false));
    HF_RETURN_IF_ERROR(CheckRange("read", path_, offset, out.size()));
    const uint64_t size = inode_->content->Size();
    if (offset + out.size() > size && !out.empty()) {
      return absl::OutOfRangeError(absl::StrCat("read '", path_, "': wanted ", out.size(), " bytes at offset ", offset,
                                                ", the file ends after ", size > offset ? size - offset : 0));
    }
    inode_->content->Read(offset, out);
    return absl::OkStatus();
  }

  absl::Status WriteAt(uint64_t offset, std::span<const std::byte> data) override {
    MutexLock lock(state_->mutex);
    const absl::Status begun = Begin("write", true);
    HF_RETURN_IF_ERROR(CheckRange("write", path_, offset, data.size()));
    if (!begun.ok() && !Usable(true)) {
      return begun;
    }
    const std::span<const std::byte> done = begun.ok() ? data : data.first(data.size() / 2);  // a torn write
    const int error = done.empty() ? 0 : state_->CheckRoom(*inode_->content, offset + done.size());
    if (error == 0) {
      inode_->content->Write(offset, done);
    }
    HF_RETURN_IF_ERROR(begun);
    return error == 0 ? absl::OkStatus() : ErrnoStatus(error, "write", path_);
  }

  absl::Status Allocate(uint64_t offset, uint64_t bytes) override {
    MutexLock lock(state_->mutex);
    HF_RETURN_IF_ERROR(Begin("allocate", true));
    HF_RETURN_IF_ERROR(CheckRange("allocate", path_, offset, bytes));
    if (const int error = state_->CheckRoom(*inode_->content, offset + bytes); error != 0) {
      return ErrnoStatus(error, "allocate", path_);
    }
    if (offset + bytes > inode_->content->Size()) {
      inode_->content->Resize(offset + bytes);
    }
    return absl::OkStatus();
  }

  absl::Status Truncate(uint64_t bytes) override {
    MutexLock lock(state_->mutex);
    HF_RETURN_IF_ERROR(Begin("truncate", true));
    HF_RETURN_IF_ERROR(CheckRange("truncate", path_, bytes, 0));
    if (bytes > kFileBytesMax) {
      return ErrnoStatus(EFBIG, "truncate", path_);
    }
    inode_->content->Resize(bytes);  // takes no room yet: a hole
    return absl::OkStatus();
  }

  absl::Status SyncData() override { return SyncAs("fdatasync"); }
  absl::Status Sync() override { return SyncAs("fsync"); }

  absl::StatusOr<FileInfo> Info() override {
    MutexLock lock(state_->mutex);
    HF_RETURN_IF_ERROR(Begin("stat", false));
    return InfoOf(*inode_);
  }

  // For Map and Populate.
  FaultInode& inode() { return *inode_; }

 private:
  bool Usable(bool for_writing) REQUIRES(state_->mutex) {
    return epoch_ == state_->epoch && (writable_ || !for_writing);
  }

  absl::Status Begin(std::string_view operation, bool for_writing) REQUIRES(state_->mutex) {
    HF_RETURN_IF_ERROR(state_->Begin(operation, path_));
    if (epoch_ != state_->epoch) {
      return ErrnoStatus(ESTALE, operation, path_);
    }
    return Usable(for_writing) ? absl::OkStatus() : ErrnoStatus(EBADF, operation, path_);
  }

  absl::Status SyncAs(std::string_view operation) {
    MutexLock lock(state_->mutex);
    const absl::Status begun = Begin(operation, false);
    if (!begun.ok()) {
      inode_->sync_failed = true;
      return begun;
    }
    if (!inode_->sync_failed) {
      inode_->durable = inode_->content->Snapshot();
    }
    return absl::OkStatus();
  }

  const std::shared_ptr<State> state_;
  const std::shared_ptr<FaultInode> inode_;
  const std::string path_;
  const uint64_t epoch_;
  const bool writable_;
};

class FaultMapping : public Mapping {
 public:
  FaultMapping(std::byte* data, uint64_t bytes, uint64_t file_end, std::shared_ptr<FaultContent> content,
               std::string path)
      : data_(data), bytes_(bytes), file_end_(file_end), content_(std::move(content)), path_(std::move(path)) {}
  ~FaultMapping() override { ::munmap(data_, static_cast<size_t>(bytes_)); }
  FaultMapping(const FaultMapping&) = delete;
  FaultMapping& operator=(const FaultMapping&) = delete;

  std::byte* data() const override { return data_; }
  uint64_t bytes() const override { return bytes_; }
  uint64_t file_end() const { return file_end_; }
  FaultContent& content() { return *content_; }
  const std::string& path() const { return path_; }

 private:
  std::byte* data_;
  uint64_t bytes_;
  uint64_t file_end_;
  std::shared_ptr<FaultContent> content_;
  std::string path_;
};

template <typename State>
class FaultLock : public FileLock {
 public:
  FaultLock(std::shared_ptr<State> state, std::shared_ptr<FaultInode> inode, uint64_t epoch)
      : state_(std::move(state)), inode_(std::move(inode)), epoch_(epoch) {}
  ~FaultLock() override {
    MutexLock lock(state_->mutex);
    if (inode_->lock_epoch == epoch_) {
      inode_->lock_epoch = 0;
    }
  }

 private:
  const std::shared_ptr<State> state_;
  const std::shared_ptr<FaultInode> inode_;
  const uint64_t epoch_;
};

}  // namespace

FaultEnv::FaultEnv(Durability durability) : state_(std::make_shared<State>(durability)) {}
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
    return absl::OutOfRangeError(absl::StrCat("flip bit '", path, "': bit ", bit, " of byte ", byte_offset, " of ",
                                              inode->content->Size()));
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
  return std::make_unique<FaultFile<State>>(state_, place.inode, path, state_->epoch, mode != OpenMode::kRead);
}

absl::StatusOr<std::unique_ptr<Mapping>> FaultEnv::Map(File& file, uint64_t offset, uint64_t bytes, bool writable) {
  HF_ASSIGN_OR_RETURN(const FileInfo info, file.Info());  // also tells stale files
  MutexLock lock(state_->mutex);
  HF_RETURN_IF_ERROR(state_->Begin("map", file.path()));
  HF_RETURN_IF_ERROR(CheckRange("map", file.path(), offset, bytes));
  auto* const fault_file = dynamic_cast<FaultFile<State>*>(&file);
  if (fault_file == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("map '", file.path(), "': the file is not one of this Env's"));
  }
  if (bytes == 0 || offset > info.bytes || bytes > info.bytes - offset) {
    return absl::OutOfRangeError(absl::StrCat("map '", file.path(), "': ", bytes, " bytes at offset ", offset,
                                              " of a file of ", info.bytes, " bytes"));
  }
  const std::shared_ptr<FaultContent>& content = fault_file->inode().content;
  const int fd = content->Fd();
  if (fd < 0) {
    return ErrnoStatus(EMFILE, "map", file.path());
  }
  void* const data = ::mmap(nullptr, static_cast<size_t>(bytes), writable ? PROT_READ | PROT_WRITE : PROT_READ,
                            MAP_SHARED, fd, static_cast<off_t>(offset));
  if (data == MAP_FAILED) {
    return ErrnoStatus(errno, "map", file.path());
  }
  return std::make_unique<FaultMapping>(static_cast<std::byte*>(data), bytes, offset + bytes, content, file.path());
}

absl::Status FaultEnv::Populate(Mapping& mapping, uint64_t offset, uint64_t bytes) {
  MutexLock lock(state_->mutex);
  auto* const fault_mapping = dynamic_cast<FaultMapping*>(&mapping);
  if (fault_mapping == nullptr) {
    return absl::InvalidArgumentError("populate: the mapping is not one of this Env's");
  }
  const std::string& path = fault_mapping->path();
  HF_RETURN_IF_ERROR(state_->Begin("populate", path));
  if (offset > mapping.bytes() || bytes > mapping.bytes() - offset) {
    return absl::OutOfRangeError(absl::StrCat("populate '", path, "': ", bytes, " bytes at offset ", offset,
                                              " of a mapping of ", mapping.bytes(), " bytes"));
  }
  const uint64_t file_end = fault_mapping->file_end() - mapping.bytes() + offset + bytes;
  if (fault_mapping->content().Size() < file_end) {
    return absl::DataLossError(absl::StrCat("populate '", path, "': the file was cut short while it was in use"));
  }
  if (state_->tree.usage().bytes > state_->bytes_total) {
    return ErrnoStatus(ENOSPC, "populate", path);
  }
  return absl::OkStatus();
}

absl::Status FaultEnv::Rename(const std::string& from, const std::string& to) {
  MutexLock lock(state_->mutex);
  return state_->RenameLocked(from, to, true);
}

absl::Status FaultEnv::RenameNoReplace(const std::string& from, const std::string& to) {
  MutexLock lock(state_->mutex);
  return state_->RenameLocked(from, to, false);
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
  return InfoOf(*inode);
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
    return absl::UnavailableError(absl::StrCat("lock '", path, "': held by this process (pid ", ::getpid(),
                                               "); stop it first, or use another directory"));
  }
  place.inode->lock_epoch = state_->epoch;
  const std::string pid = absl::StrCat(::getpid(), "\n");
  place.inode->content->Resize(0);
  place.inode->content->Write(0, std::as_bytes(std::span<const char>(pid)));
  return std::make_unique<FaultLock<State>>(state_, place.inode, state_->epoch);
}

}  // namespace holdfast
