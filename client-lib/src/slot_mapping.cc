#include "client-lib/src/slot_mapping.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/huge_pages.h"
#include "base/mutex.h"
#include "base/populate.h"
#include "client-lib/src/errors.h"

namespace holdfast::client {
namespace {

// Begins where a huge page can: the daemon may have put the slot on some. MAP_FAILED, and errno, as
// mmap says it.
void* MapAligned(int fd, uint64_t bytes, int protection) {
  std::byte* const at = ReserveAligned(bytes);
  if (at == nullptr) {
    return MAP_FAILED;
  }
  void* mapped = MapNotInherited(at, bytes, protection, MAP_SHARED, fd);
  if (mapped == MAP_FAILED && errno == ENODEV && (protection & PROT_WRITE) == 0) {
    // Some mounts keep no pages that several processes could share (FUSE without a cache).
    mapped = MapNotInherited(at, bytes, protection, MAP_PRIVATE, fd);
  }
  if (mapped == MAP_FAILED) {
    const int error = errno;
    ::munmap(at, bytes);
    errno = error;
  }
  return mapped;
}

// What a device may still write into outlives whoever mapped it.
void KeepForEver(std::unique_ptr<SlotMapping> mapping) {
  static Mutex* const mutex = new Mutex();
  static auto* const kept = new std::vector<std::unique_ptr<SlotMapping>>();
  const MutexLock lock(*mutex);
  kept->push_back(std::move(mapping));
}

}  // namespace

Result<std::unique_ptr<SlotMapping>> SlotMapping::Map(int fd, uint64_t bytes, Access access) {
  struct stat st = {};
  if (::fstat(fd, &st) != 0) {
    return SystemError(CodeOfFileError(errno), errno, "look at the slot that ckptd sent");
  }
  if (!S_ISREG(st.st_mode) || bytes == 0 || static_cast<uint64_t>(st.st_size) < bytes) {
    return Status(Code::kCorrupt,
                  absl::StrCat("the slot that ckptd sent is not what it should be: a file of ",
                               st.st_size, " bytes instead of ", bytes, " (was it cut short?)"));
  }
  // A data loader's child must not write into a slot.
  const int protection = access == Access::kWritable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* const address = MapAligned(fd, bytes, protection);
  if (address == MAP_FAILED) {
    return SystemError(CodeOfFileError(errno), errno,
                       absl::StrCat("map a slot of ", bytes, " bytes"));
  }
  return std::unique_ptr<SlotMapping>(
      new SlotMapping(static_cast<std::byte*>(address), bytes, st.st_dev, st.st_ino));
}

SlotMapping::~SlotMapping() {
  if (owner_.forked()) {  // something else may lie at that address, and devices are the parent's
    if (devices_ != nullptr) {
      new std::shared_ptr<Devices>(std::move(devices_));
    }
    return;
  }
  if (pinned_ && !devices_->Unregister(data_)) {
    // Nothing else may come to lie where the driver may think that the slot's pages are.
    ::mmap(data_, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
           0);
    return;
  }
  ::munmap(data_, bytes_);
}

bool SlotMapping::Pin(const std::shared_ptr<Devices>& devices) {
  if (devices_ == nullptr) {
    devices_ = devices;
    pinned_ = devices_->Register(data_, bytes_);
    populated_bytes_ = pinned_ ? bytes_ : populated_bytes_;
  }
  return pinned_;
}

bool SlotMapping::written_by_device() const {
  return pinned_ && devices_->AnyStuck();
}

bool SlotMapping::SameFile(int fd) const {
  struct stat st = {};
  return ::fstat(fd, &st) == 0 && st.st_dev == device_ && st.st_ino == inode_;
}

// By reading: pages of a shared mapping that the file system does not track writes to become
// writable as well, and reads are mapped many at a time, which takes less than half as long.
void SlotMapping::Populate() {
  if (!populated(bytes_) &&
      PopulatePages(data_, bytes_, /*writable=*/false, PopulateMethod::kBest) == 0) {
    populated_bytes_ = bytes_;
  }
}

Result<SlotMapping*> SlotMappings::Writable(uint32_t slot, uint64_t slot_bytes,
                                            const std::vector<ForkClosedFd>& descriptors) {
  auto known = mappings_.find(slot);
  if (const auto written = written_.find(slot);
      descriptors.empty() && known == mappings_.end() && written != written_.end()) {
    if (written->second->written_by_device()) {
      return Status(Code::kUnavailable,
                    absl::StrCat("slot ", slot,
                                 " is still being written by a device, for a save "
                                 "that gave up waiting"));
    }
    known = mappings_.emplace(slot, std::move(written->second)).first;
    written_.erase(written);
  }
  if (descriptors.empty()) {
    if (known == mappings_.end() || known->second->bytes() < slot_bytes) {
      Drop(slot);  // so that the next grant brings a descriptor
      return Status(Code::kInternal,
                    absl::StrCat("ckptd granted slot ", slot,
                                 " without a descriptor, and this process has no mapping of ",
                                 slot_bytes, " bytes of it"));
    }
    return known->second.get();
  }
  if (known != mappings_.end()) {
    Retire(known);  // of an earlier file, or of another size
  }
  Result<std::unique_ptr<SlotMapping>> mapping =
      SlotMapping::Map(descriptors.front().get(), slot_bytes, SlotMapping::Access::kWritable);
  if (!mapping.ok()) {
    Drop(slot);
    return WithContext(mapping.status(), absl::StrCat("slot ", slot));
  }
  return (mappings_[slot] = *std::move(mapping)).get();
}

SlotMapping* SlotMappings::Find(uint32_t slot, uint64_t bytes, int fd) const {
  const auto known = mappings_.find(slot);
  const bool usable =
      known != mappings_.end() && known->second->bytes() >= bytes && known->second->SameFile(fd);
  return usable ? known->second.get() : nullptr;
}

std::unique_ptr<SlotMapping> SlotMappings::Take(uint32_t slot) {
  const auto known = mappings_.find(slot);
  return known == mappings_.end() ? nullptr : std::move(mappings_.extract(known).mapped());
}

// Out of use; unmapped now, or when no device writes any more.
void SlotMappings::Retire(Map::iterator mapping) {
  if (mapping->second->written_by_device()) {
    written_.emplace(mapping->first, std::move(mapping->second));
  }
  mappings_.erase(mapping);
}

void SlotMappings::Drop(uint32_t slot) {
  if (const auto known = mappings_.find(slot); known != mappings_.end()) {
    Retire(known);
  }
  if (!written_.contains(slot)) {
    dropped_.push_back(slot);
  }
}

bool SlotMappings::DropAll() {
  while (!mappings_.empty()) {
    Drop(mappings_.begin()->first);
  }
  for (auto& [slot, mapping] : written_) {
    KeepForEver(std::move(mapping));
  }
  return std::exchange(written_, {}).empty();
}

void SlotMappings::DropUnfit(uint64_t slot_bytes) {
  std::vector<uint32_t> unfit;
  for (const auto& [slot, mapping] : mappings_) {
    if (mapping->bytes() < slot_bytes || mapping->bytes() / 2 > slot_bytes) {
      unfit.push_back(slot);
    }
  }
  for (const uint32_t slot : unfit) {
    Drop(slot);
  }
}

std::vector<uint32_t> SlotMappings::TakeDropped() {
  for (auto written = written_.begin(); written != written_.end();) {
    if (written->second->written_by_device()) {
      ++written;
      continue;
    }
    if (!mappings_.contains(written->first)) {  // another file may be that slot by now
      dropped_.push_back(written->first);
    }
    written = written_.erase(written);
  }
  return std::exchange(dropped_, {});
}

void SlotMappings::PutBackDropped(const std::vector<uint32_t>& slots) {
  dropped_.insert(dropped_.end(), slots.begin(), slots.end());
}

}  // namespace holdfast::client
