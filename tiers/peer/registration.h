// Memory that devices may reach: what peers read from, what reads of ours land in.
//
//   HF_ASSIGN_OR_RETURN(auto slot, fabric->Register(memory, MemoryAccess::kReadByPeers));
//   tell the peer slot->regions();
//
// Immutable, thread-safe. Gone from the devices when the object is: hold it for as long as anybody
// was told of it or reads into it, let it go before the memory is unmapped or becomes another
// job's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "base/fault_guard.h"

struct fid_mr;

namespace holdfast {

class FabricDevice;

enum class MemoryAccess : uint8_t {
  kReadByPeers = 1,
  kFilledByReads = 2,  // ours
  kBoth = 3,
};

// What the owner tells of a piece of its memory. Of each device the regions lie one behind the
// other, in this order.
struct RemoteRegion {
  uint32_t device = 0;  // in the order of the owner's address
  uint64_t base = 0;    // where its first byte is, in the device's terms
  uint64_t key = 0;
  uint64_t bytes = 0;
  bool operator==(const RemoteRegion&) const = default;
};

inline constexpr size_t kRemoteRegionsMax = 4096;

class Registration {
 public:
  // With those devices that take it; an error if none does.
  static absl::StatusOr<std::shared_ptr<Registration>> Make(
      const std::vector<std::shared_ptr<FabricDevice>>& devices, std::span<std::byte> memory,
      MemoryAccess access, uint64_t piece_bytes_max);
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  std::span<std::byte> memory() const { return memory_; }
  const std::vector<RemoteRegion>& regions() const { return regions_; }
  bool Has(size_t device) const { return !pieces_[device].empty(); }
  // Why a device was left out; OK: none was.
  const absl::Status& left_out() const { return left_out_; }
  // The file underneath was cut short, and somebody noticed.
  bool faulted() const { return guard_.has_value() && guard_->faulted(); }

  // For reads of ours: what the device wants to know of `at`, and how many bytes from there on it
  // holds for. `at` lies in memory(), and the registration has the device.
  struct Local {
    void* descriptor;
    size_t bytes;
  };
  Local At(size_t device, const std::byte* at) const;

 private:
  struct Piece;

  Registration(const std::vector<std::shared_ptr<FabricDevice>>& devices,
               std::span<std::byte> memory);
  void LeaveOut(size_t device);
  absl::Status Add(size_t device, std::span<std::byte> piece, MemoryAccess access);

  const std::vector<std::shared_ptr<FabricDevice>> devices_;
  const std::span<std::byte> memory_;
  std::optional<FaultGuard> guard_;
  std::vector<std::vector<Piece>> pieces_;  // by device; gone before the guard is
  std::vector<RemoteRegion> regions_;
  absl::Status left_out_;
};

}  // namespace holdfast
