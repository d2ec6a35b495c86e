// Slots in this process's address space.
//
// SlotMapping is one mapping of one descriptor: shared, not inherited by forked children, where
// huge pages fit, unmapped by the destructor. SlotMappings keeps the writable ones from save to
// save, so that a slot that comes around again needs no descriptor and faults no page.
//
//   HF_TRY_ASSIGN(SlotMapping* mapping, mappings.Writable(grant, std::move(descriptors)));
//   std::memcpy(mapping->data(), …);                     // under a FaultGuard: the file may be cut
//   short at any time mappings.Drop(grant.slot);                           // something went wrong
//   with it: unmap, and tell the daemon
//
// Where devices write into a slot it is pinned, once, and unpinned before it is unmapped. A mapping
// that a device may still write into, because a copy that was given up could not be ended, is
// neither unmapped nor released until that is over.
//
// SlotMappings is not thread-safe: the job lets one operation at a time use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "client-lib/src/devices.h"
#include "client-lib/src/fork_guard.h"
#include "client-lib/src/wire.h"
#include "holdfast/status.h"

namespace holdfast::client {

class SlotMapping {
 public:
  enum class Access { kReadOnly, kWritable };

  // kCorrupt: the file is not a regular one of at least `bytes`. kInternal: it can't be mapped
  // here.
  static Result<std::unique_ptr<SlotMapping>> Map(int fd, uint64_t bytes, Access access);
  ~SlotMapping();
  SlotMapping(const SlotMapping&) = delete;
  SlotMapping& operator=(const SlotMapping&) = delete;

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  // Of the very file behind this descriptor?
  bool SameFile(int fd) const;
  bool SameFile(const SlotMapping& other) const {
    return device_ == other.device_ && inode_ == other.inode_;
  }

  // Whether every page of [0, bytes) is in this process's page tables already.
  bool populated(uint64_t bytes) const { return populated_bytes_ >= bytes; }
  void set_populated(uint64_t bytes) { populated_bytes_ = bytes; }
  // Makes them so ahead of time; what can't be done is left to the copy, which notices.
  void Populate();

  // Pins the slot for these devices, if that was not tried before. False: it cannot be.
  bool Pin(const std::shared_ptr<Devices>& devices);
  // A device may still write into it.
  bool written_by_device() const;

 private:
  SlotMapping(std::byte* data, uint64_t bytes, uint64_t device, uint64_t inode)
      : data_(data), bytes_(bytes), device_(device), inode_(inode) {}

  std::byte* const data_;
  const uint64_t bytes_;
  const uint64_t device_;
  const uint64_t inode_;
  uint64_t populated_bytes_ = 0;
  std::shared_ptr<Devices> devices_;  // that it was tried to be pinned for
  bool pinned_ = false;
  ForkOwner owner_;
};

class SlotMappings {
 public:
  // The mapping of the slot that was granted: the one there is, or a new one of the descriptor that
  // came.
  Result<SlotMapping*> Writable(uint32_t slot, uint64_t slot_bytes,
                                const std::vector<ForkClosedFd>& descriptors);
  // What this process has mapped of the file behind `fd` from saving into it; null if nothing, or
  // less than `bytes`.
  SlotMapping* Find(uint32_t slot, uint64_t bytes, int fd) const;
  // The caller's from now on, to read from. For a slot of a daemon that has gone: the rank has its
  // place at the next one, and so has let go of it (docs/protocol.md §3). Null if it is not mapped.
  std::unique_ptr<SlotMapping> Take(uint32_t slot);
  // Unmaps; the slot is released with the next ReleaseSlots. Later, if a device still writes.
  void Drop(uint32_t slot);
  // False: devices still write into some, which stay mapped until the process ends.
  bool DropAll();
  // Those that the daemon would not grant for a save of that size (docs/protocol.md §3): as long as
  // they are mapped it can't make others in their place.
  void DropUnfit(uint64_t slot_bytes);
  // Slots that were unmapped and not released yet; the caller tells the daemon.
  std::vector<uint32_t> TakeDropped();
  void PutBackDropped(const std::vector<uint32_t>& slots);  // the daemon could not be told

 private:
  using Map = std::map<uint32_t, std::unique_ptr<SlotMapping>>;
  void Retire(Map::iterator mapping);

  Map mappings_;
  std::multimap<uint32_t, std::unique_ptr<SlotMapping>> written_;  // by devices, after Drop
  std::vector<uint32_t> dropped_;
};

}  // namespace holdfast::client
