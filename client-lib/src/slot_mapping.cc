#include "client-lib/src/slot_mapping.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/populate.h"
#include "client-lib/src/errors.h"

namespace holdfast::client {
namespace {

constexpr uintptr_t kHugePageBytes = 2 << 20;
// Where huge pages cost more than this apiece (memory that is scarce, fragmented, or must come from
// the host first), nobody is to wait for them.
constexpr std::chrono::milliseconds kHugePageTime{10};
constexpr uint64_t kPagesBetweenLooks = 8;
constexpr int kMadvCollapse = 25;  // since Linux 6.1; older headers lack the name

// A mapping that begins where huge pages can: the kernel does that by itself only where they are
// the mount's own choice. MAP_FAILED, and errno, as mmap says it.
void* MapAligned(int fd, uint64_t bytes, int protection) {
  if (bytes > SIZE_MAX - kHugePageBytes) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  const size_t reserved_bytes = bytes + kHugePageBytes;
  void* const reserved = ::mmap(nullptr, reserved_bytes, PROT_NONE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) {
    return MAP_FAILED;
  }
  const size_t lead = -reinterpret_cast<uintptr_t>(reserved) % kHugePageBytes;
  std::byte* const begin = static_cast<std::byte*>(reserved) + lead;
  void* const mapped = ::mmap(begin, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    ::munmap(reserved, reserved_bytes);
    errno = error;
    return MAP_FAILED;
  }
  // What is left of the reservation, in front and behind, in whole pages.
  const size_t page_bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t end = (lead + bytes + page_bytes - 1) / page_bytes * page_bytes;
  if (lead != 0) {
    ::munmap(reserved, lead);
  }
  if (end < reserved_bytes) {
    ::munmap(static_cast<std::byte*>(reserved) + end, reserved_bytes - end);
  }
  return mapped;
}

}  // namespace

Result<std::unique_ptr<SlotMapping>> SlotMapping::Map(const UniqueFd& fd, uint64_t bytes,
                                                      Access access) {
  struct stat st = {};
  if (::fstat(fd.get(), &st) != 0) {
    return SystemError(CodeOfFileError(errno), errno, "look at the slot that ckptd sent");
  }
  if (!S_ISREG(st.st_mode) || bytes == 0 || static_cast<uint64_t>(st.st_size) < bytes) {
    return Status(Code::kCorrupt,
                  absl::StrCat("the slot that ckptd sent is not what it should be: a file of ",
                               st.st_size, " bytes instead of ", bytes, " (was it cut short?)"));
  }
  const int protection = access == Access::kWritable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* const address = MapAligned(fd.get(), bytes, protection);
  if (address == MAP_FAILED) {
    return SystemError(CodeOfFileError(errno), errno,
                       absl::StrCat("map a slot of ", bytes, " bytes"));
  }
  // A data loader's child must not write into a slot; a kernel that can't promise it is none that
  // we run on.
  if (::madvise(address, bytes, MADV_DONTFORK) != 0) {
    const int error = errno;
    ::munmap(address, bytes);
    return SystemError(Code::kInternal, error, "keep a slot from forked children (MADV_DONTFORK)");
  }
  return std::unique_ptr<SlotMapping>(
      new SlotMapping(static_cast<std::byte*>(address), bytes, st.st_dev, st.st_ino));
}

SlotMapping::~SlotMapping() {
  if (!owner_.forked()) {  // in a child something else may lie at that address
    ::munmap(data_, bytes_);
  }
}

bool SlotMapping::SameFile(const UniqueFd& fd) const {
  struct stat st = {};
  return ::fstat(fd.get(), &st) == 0 && st.st_dev == device_ && st.st_ino == inode_;
}

// By reading: pages of a shared mapping that the file system does not track writes to become
// writable as well, and reads are mapped many at a time, which takes less than half as long.
void SlotMapping::Populate() {
  if (!populated(bytes_) &&
      PopulatePages(data_, bytes_, /*writable=*/false, PopulateMethod::kBest) == 0) {
    populated_bytes_ = bytes_;
  }
}

bool SlotMapping::UseHugePages(Deadline deadline) {
  using Clock = std::chrono::steady_clock;
  populated_bytes_ = 0;  // the page tables are emptied where it works
  const Clock::time_point began = Clock::now();
  uint64_t pages = 0;
  for (uint64_t at = 0; bytes_ - at >= kHugePageBytes && !deadline.passed(); at += kHugePageBytes) {
    const int result = ::madvise(data_ + at, kHugePageBytes, kMadvCollapse);
    // EAGAIN, EBUSY: somebody else has one of these pages just now; the others may still be had.
    if (result != 0 && errno != EAGAIN && errno != EBUSY) {
      return false;
    }
    if (++pages % kPagesBetweenLooks == 0 && Clock::now() - began > pages * kHugePageTime) {
      return false;
    }
  }
  return true;
}

Result<SlotMapping*> SlotMappings::Writable(uint32_t slot, uint64_t slot_bytes,
                                            const std::vector<UniqueFd>& descriptors) {
  const auto known = mappings_.find(slot);
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
    mappings_.erase(known);  // of an earlier file, or of another size
  }
  Result<std::unique_ptr<SlotMapping>> mapping =
      SlotMapping::Map(descriptors.front(), slot_bytes, SlotMapping::Access::kWritable);
  if (!mapping.ok()) {
    Drop(slot);
    return WithContext(mapping.status(), absl::StrCat("slot ", slot));
  }
  return (mappings_[slot] = *std::move(mapping)).get();
}

SlotMapping* SlotMappings::Find(uint32_t slot, uint64_t bytes, const UniqueFd& fd) const {
  const auto known = mappings_.find(slot);
  const bool usable =
      known != mappings_.end() && known->second->bytes() >= bytes && known->second->SameFile(fd);
  return usable ? known->second.get() : nullptr;
}

void SlotMappings::Drop(uint32_t slot) {
  mappings_.erase(slot);
  dropped_.push_back(slot);
}

void SlotMappings::DropAll() {
  for (const auto& [slot, mapping] : mappings_) {
    dropped_.push_back(slot);
  }
  mappings_.clear();
}

std::vector<uint32_t> SlotMappings::TakeDropped() {
  return std::exchange(dropped_, {});
}

void SlotMappings::PutBackDropped(const std::vector<uint32_t>& slots) {
  dropped_.insert(dropped_.end(), slots.begin(), slots.end());
}

}  // namespace holdfast::client
