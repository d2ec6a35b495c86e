// A range of a peer's memory on its way into ours, in pieces, over all devices that both have.
// Internal to tiers/peer/.
//
//   RemoteRange range(fabric, source, offset, into, options);
//   HF_RETURN_IF_ERROR(range.Begin());
//   while (!range.done()) {
//     HF_RETURN_IF_ERROR(range.Advance());
//     … look at what has arrived: into.first(range.arrived()) …
//     HF_RETURN_IF_ERROR(range.Wait());               // when there was nothing to look at
//   }
//
// Of one thread. When it is gone nothing is in flight into `into`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"
#include "base/fault_guard.h"
#include "tiers/peer/fabric.h"
#include "tiers/peer/pull.h"
#include "tiers/peer/reader_pool.h"
#include "tiers/peer/remote_memory.h"

namespace holdfast {

class RemoteRange {
 public:
  RemoteRange(Fabric& fabric, const PullSource& source, uint64_t offset, std::span<std::byte> into,
              const PullOptions& options);
  RemoteRange(const RemoteRange&) = delete;
  RemoteRange& operator=(const RemoteRange&) = delete;

  absl::Status Begin();
  // Takes what has come in, asks for more. Does not wait, but for the pacer.
  absl::Status Advance();
  // Until there may be more to take; an error when that lasts too long.
  absl::Status Wait();

  // Bytes that are there, without a gap from the beginning.
  uint64_t arrived() const { return arrived_; }
  bool done() const { return arrived_ == into_.size(); }
  // `into` was cut short underneath. What was read of it since is not what arrived.
  bool faulted() const { return guard_.has_value() && guard_->faulted(); }
  absl::Status CutShort() const;
  // Whose fault the last error is.
  FaultySide faulty() const { return faulty_; }

 private:
  struct Piece {
    uint64_t offset;
    uint64_t bytes;
    bool arrived;
  };
  struct Rail {
    size_t device;         // ours
    uint32_t peer_device;  // the peer's
    size_t window;
    ReaderPool::Lease lease;
  };

  absl::Status Failed(absl::Status status, FaultySide faulty);
  absl::Status FromSource(const absl::Status& status);
  absl::Status OpenRails(bool fresh);
  absl::Status Take(Rail& rail);
  void Arrived(uint64_t tag);
  absl::Status RailFailed(const Rail& rail, const absl::Status& status);
  // False: nothing more can be asked of it now.
  absl::StatusOr<bool> Ask(Rail& rail);
  absl::Status CheckControl();
  absl::Status CheckStall();
  bool IntoIsCutShort() const;
  std::string Doing() const;

  Fabric& fabric_;
  const PullSource& source_;
  const uint64_t offset_;
  const std::span<std::byte> into_;
  const PullOptions& options_;
  std::optional<FabricAddress> peer_;
  std::optional<RemoteMemory> memory_;
  std::optional<FaultGuard> guard_;
  std::shared_ptr<Registration> own_registration_;
  const Registration* registration_ = nullptr;  // where a device wants one

  std::deque<Piece> pieces_;  // from the first that has not arrived on
  uint64_t first_tag_ = 0;    // of pieces_.front()
  uint64_t asked_ = 0;        // bytes asked for, from the beginning
  uint64_t paced_ = 0;        // of these, and of the next piece, paid for
  uint64_t arrived_ = 0;
  bool anything_arrived_ = false;
  bool tried_again_ = false;
  bool try_again_ = false;
  MonotonicTime last_arrival_;
  FaultySide faulty_ = FaultySide::kNone;

  std::vector<Rail> rails_;  // gone before what they read into is
  std::vector<FabricReader*> readers_;
};

}  // namespace holdfast
