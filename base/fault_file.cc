#include "base/fault_file.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/env_checks.h"
#include "base/status.h"

namespace holdfast {

FileInfo FaultInfo(FaultInode& inode, uint64_t device) {
  FileInfo info;
  info.bytes = inode.is_directory() ? 0 : inode.content->Size();
  info.inode = inode.number;
  info.links = inode.links;
  info.device = device;
  info.mode = inode.mode;
  info.uid = inode.uid;
  info.gid = inode.gid;
  info.born_ns = inode.born_ns;
  return info;
}

FaultFile::FaultFile(std::shared_ptr<FaultState> state, std::shared_ptr<FaultInode> inode,
                     std::string path, uint64_t epoch, bool writable, uint32_t direct_alignment)
    : state_(std::move(state)),
      inode_(std::move(inode)),
      path_(std::move(path)),
      epoch_(epoch),
      writable_(writable),
      direct_alignment_(direct_alignment) {
  // Called by FaultEnv::Open, which holds the mutex.
  inode_->opens = inode_->opens_epoch == epoch_ ? inode_->opens + 1 : 1;
  inode_->opens_epoch = epoch_;
  state_->most_open_files = std::max(state_->most_open_files, ++state_->open_files);
}

FaultFile::~FaultFile() {
  MutexLock lock(state_->mutex);
  inode_->opens -= inode_->opens_epoch == epoch_ ? 1 : 0;
  --state_->open_files;
}

int FaultFile::fd() const {
  MutexLock lock(state_->mutex);
  return epoch_ == state_->epoch ? inode_->content->Fd() : -1;
}

absl::Status FaultFile::ReadAt(uint64_t offset, std::span<std::byte> out) {
  MutexLock lock(state_->mutex);
  HF_RETURN_IF_ERROR(Begin("read", false));
  HF_RETURN_IF_ERROR(CheckRange("read", path_, offset, out.size()));
  HF_RETURN_IF_ERROR(CheckAligned("read", offset, out));
  const uint64_t size = inode_->content->Size();
  if (!out.empty() && (offset > size || out.size() > size - offset)) {
    return absl::OutOfRangeError(absl::StrCat("read '", path_, "': wanted ", out.size(),
                                              " bytes at offset ", offset, ", the file ends after ",
                                              size > offset ? size - offset : 0));
  }
  inode_->content->Read(offset, out);
  return absl::OkStatus();
}

absl::Status FaultFile::WriteAt(uint64_t offset, std::span<const std::byte> data) {
  MutexLock lock(state_->mutex);
  const absl::Status begun = Begin("write", true);
  if (!begun.ok() && !Usable(true)) {
    return begun;
  }
  HF_RETURN_IF_ERROR(CheckRange("write", path_, offset, data.size()));
  HF_RETURN_IF_ERROR(CheckAligned("write", offset, data));
  // A write that is told to fail is torn: half of it is there.
  const std::span<const std::byte> done = begun.ok() ? data : data.first(data.size() / 2);
  const int error = done.empty() ? 0 : state_->CheckRoom(*inode_->content, offset + done.size());
  if (error == 0) {
    inode_->content->Write(offset, done);
  }
  HF_RETURN_IF_ERROR(begun);
  return error == 0 ? absl::OkStatus() : ErrnoStatus(error, "write", path_);
}

absl::Status FaultFile::Allocate(uint64_t offset, uint64_t bytes) {
  MutexLock lock(state_->mutex);
  HF_RETURN_IF_ERROR(Begin("allocate", true));
  HF_RETURN_IF_ERROR(CheckRange("allocate", path_, offset, bytes));
  if (!state_->allocate) {
    return NoAllocate(path_);
  }
  if (bytes == 0) {
    return absl::OkStatus();
  }
  if (const int error = state_->CheckRoom(*inode_->content, offset + bytes); error != 0) {
    return ErrnoStatus(error, "allocate", path_);
  }
  if (offset + bytes > inode_->content->Size()) {
    inode_->content->Resize(offset + bytes);
  }
  return absl::OkStatus();
}

absl::Status FaultFile::Truncate(uint64_t bytes) {
  MutexLock lock(state_->mutex);
  HF_RETURN_IF_ERROR(Begin("truncate", true));
  HF_RETURN_IF_ERROR(CheckRange("truncate", path_, bytes, 0));
  if (bytes > kFaultFileBytesMax) {
    return ErrnoStatus(EFBIG, "truncate", path_);
  }
  inode_->content->Resize(bytes);  // a hole: asks for no room
  return absl::OkStatus();
}

absl::StatusOr<FileInfo> FaultFile::Info() {
  MutexLock lock(state_->mutex);
  HF_RETURN_IF_ERROR(Begin("stat", false));
  return FaultInfo(*inode_, state_->DeviceOf(path_));
}

absl::Status FaultFile::SetOwner(uint32_t uid, uint32_t gid) {
  MutexLock lock(state_->mutex);
  HF_RETURN_IF_ERROR(Begin("set owner", false));
  inode_->SetAccess(uid, gid, inode_->mode);
  return absl::OkStatus();
}

absl::Status FaultFile::SetMode(uint32_t mode) {
  MutexLock lock(state_->mutex);
  HF_RETURN_IF_ERROR(Begin("set mode", false));
  inode_->SetAccess(kKeepOwner, kKeepOwner, mode);
  return absl::OkStatus();
}

absl::StatusOr<DirectAlignment> FaultFile::Alignment() {
  MutexLock lock(state_->mutex);
  HF_RETURN_IF_ERROR(Begin("statx", false));
  if (direct_alignment_ == 0) {
    return absl::UnimplementedError(
        absl::StrCat("alignment of '", path_, "': it was not opened for direct I/O"));
  }
  return DirectAlignment{direct_alignment_, direct_alignment_};
}

absl::StatusOr<bool> FaultFile::NobodyElseHasIt() {
  MutexLock lock(state_->mutex);
  HF_RETURN_IF_ERROR(Begin("lease", false));
  return state_->leases && inode_->opens == 1 && inode_->mappings == 0;
}

absl::Status FaultFile::CheckAligned(std::string_view operation, uint64_t offset,
                                     std::span<const std::byte> buffer) const {
  if (direct_alignment_ == 0) {
    return absl::OkStatus();
  }
  const auto address = reinterpret_cast<uintptr_t>(buffer.data());
  const bool aligned = offset % direct_alignment_ == 0 && buffer.size() % direct_alignment_ == 0 &&
                       address % direct_alignment_ == 0;
  return aligned ? absl::OkStatus() : ErrnoStatus(EINVAL, operation, path_);
}

absl::StatusOr<std::unique_ptr<Mapping>> FaultFile::Map(uint64_t offset, uint64_t bytes,
                                                        bool writable) {
  MutexLock lock(state_->mutex);
  HF_RETURN_IF_ERROR(Begin("map", writable));
  HF_RETURN_IF_ERROR(CheckRange("map", path_, offset, bytes));
  const std::shared_ptr<FaultContent>& content = inode_->content;
  const uint64_t size = content->Size();
  if (bytes == 0 || offset > size || bytes > size - offset) {
    return absl::OutOfRangeError(absl::StrCat("map '", path_, "': ", bytes, " bytes at offset ",
                                              offset, " of a file of ", size, " bytes"));
  }
  const int fd = content->Fd();
  if (fd < 0) {
    return ErrnoStatus(EMFILE, "map", path_);
  }
  void* const data =
      ::mmap(nullptr, static_cast<size_t>(bytes), writable ? PROT_READ | PROT_WRITE : PROT_READ,
             MAP_SHARED, fd, static_cast<off_t>(offset));
  if (data == MAP_FAILED) {
    return ErrnoStatus(errno, "map", path_);
  }
  return std::make_unique<FaultMapping>(state_, inode_, path_, static_cast<std::byte*>(data),
                                        offset, bytes);
}

bool FaultFile::Usable(bool for_writing) const {
  return epoch_ == state_->epoch && (writable_ || !for_writing);
}

absl::Status FaultFile::Begin(std::string_view operation, bool for_writing) {
  HF_RETURN_IF_ERROR(state_->Begin(operation, path_));
  if (epoch_ != state_->epoch) {
    return ErrnoStatus(ESTALE, operation, path_);
  }
  return Usable(for_writing) ? absl::OkStatus() : ErrnoStatus(EBADF, operation, path_);
}

absl::Status FaultFile::SyncAs(std::string_view operation) {
  MutexLock lock(state_->mutex);
  const absl::Status begun = Begin(operation, false);
  if (!begun.ok()) {
    inode_->sync_failed = inode_->sync_failed || Usable(false);
    return begun;
  }
  if (!inode_->sync_failed) {
    inode_->durable = inode_->content->Snapshot();
  }
  return absl::OkStatus();
}

FaultMapping::FaultMapping(std::shared_ptr<FaultState> state, std::shared_ptr<FaultInode> inode,
                           std::string path, std::byte* data, uint64_t offset, uint64_t bytes)
    : state_(std::move(state)),
      inode_(std::move(inode)),
      content_(inode_->content),
      path_(std::move(path)),
      data_(data),
      file_offset_(offset),
      bytes_(bytes) {
  ++inode_->mappings;  // called by FaultFile::Map, which holds the mutex
}

FaultMapping::~FaultMapping() {
  {
    MutexLock lock(state_->mutex);
    inode_->mappings -= inode_->content == content_ ? 1 : 0;  // else it came loose in a crash
  }
  ::munmap(data_, static_cast<size_t>(bytes_));
}

absl::Status FaultMapping::Populate(uint64_t offset, uint64_t bytes) {
  MutexLock lock(state_->mutex);
  HF_RETURN_IF_ERROR(state_->Begin("populate", path_));
  if (offset > bytes_ || bytes > bytes_ - offset) {
    return absl::OutOfRangeError(absl::StrCat("populate '", path_, "': ", bytes,
                                              " bytes at offset ", offset, " of a mapping of ",
                                              bytes_, " bytes"));
  }
  if (content_->Size() < file_offset_ + offset + bytes) {
    return absl::DataLossError(
        absl::StrCat("populate '", path_, "': the file was cut short while it was in use"));
  }
  // Room is counted by sizes, holes included; those become too much here and not before, as on
  // tmpfs.
  return state_->tree.usage().bytes <= state_->bytes_total ? absl::OkStatus()
                                                           : ErrnoStatus(ENOSPC, "populate", path_);
}

FaultLock::FaultLock(std::shared_ptr<FaultState> state, std::shared_ptr<FaultInode> inode,
                     uint64_t epoch)
    : state_(std::move(state)), inode_(std::move(inode)), epoch_(epoch) {}

FaultLock::~FaultLock() {
  MutexLock lock(state_->mutex);
  if (inode_->lock_epoch == epoch_) {
    inode_->lock_epoch = 0;
  }
}

}  // namespace holdfast
