// A range of a peer's memory on its way into ours, in pieces, over all devices that both have.
// Where fails, what was under way over it is asked for again, over a new connection or other
// devices. Internal to tiers/peer/.
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
#include <map>
#include <memory>
#include <optional>
#include <set>
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
    enum class State : uint8_t { kWanted, kAsked, kArrived };
    uint64_t bytes = 0;
    State state = State::kWanted;
    uint64_t rail = 0;  // that it was asked over
  };
  // A connection, over one of our devices to one of the peer's.
  struct Rail {
    uint64_t number;
    size_t device;
    uint32_t peer_device;
    size_t window;
    ReaderPool::Lease lease;
    uint64_t got_bytes = 0;
    // When something came over it, or it was asked for something after it had nothing to do; and
    // how much had come over all of them by then.
    MonotonicTime since;
    uint64_t all_bytes_then = 0;
  };
  // One of ours.
  struct Device {
    int peer_device = -1;    // -1: the peer has none for it
    bool given_up = false;   // it leads nowhere
    int failures = 0;        // of rails, since it has brought much
    uint64_t got_bytes = 0;  // since the last of these
    std::string problem;     // given up because nothing can be read over it, and not noted yet: why
  };

  absl::Status Failed(absl::Status status, FaultySide faulty);
  absl::Status FromSource(const absl::Status& status);
  absl::Status RegisterInto();
  void PairWithPeers();

  // Rails.
  absl::Status FillRails();
  void FillRails(bool those_that_led_nowhere);
  bool OpenRail(size_t device, bool fresh);
  void DropRail(size_t index);
  absl::Status RailFailed(size_t index, const absl::Status& status);
  bool HasRails(size_t device) const;
  void NoteFailure(size_t device);
  void GiveUpThoseWithoutRails();
  void NoteThoseThatLedNowhere();
  std::string KeyOf(size_t device) const;
  absl::Status GoOnWithoutSilent();
  absl::Status DropRailThatLags();

  // Pieces.
  // False: the rail is gone.
  absl::StatusOr<bool> Take(size_t index);
  void Arrived(Rail& rail, uint64_t offset);
  // False: nothing more can be asked of it now.
  absl::StatusOr<bool> Ask(size_t index);
  uint64_t PiecesLeft() const;

  absl::Status CheckControl();
  absl::Status CheckStall();
  Duration Patience() const;
  bool IntoIsCutShort() const;
  std::string Doing() const;
  std::string After() const;

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

  std::map<uint64_t, Piece> pieces_;  // by offset, from the first that has not arrived on
  std::set<uint64_t> wanted_;         // of these, those that are to be asked for again
  uint64_t asked_ = 0;                // bytes asked for, from the beginning
  uint64_t paced_ = 0;                // of these, and of the next piece, paid for
  uint64_t arrived_ = 0;
  uint64_t all_bytes_ = 0;  // that came
  bool any_connected_ = false;
  MonotonicTime begun_;
  MonotonicTime last_arrival_;
  FaultySide faulty_ = FaultySide::kNone;

  std::vector<Device> devices_;
  std::vector<size_t> order_;  // of them, the nearest first
  absl::Status last_failure_;
  uint64_t last_rail_ = 0;
  std::vector<std::unique_ptr<Rail>> rails_;  // gone before what they read into is
  std::vector<FabricReader*> readers_;
};

}  // namespace holdfast
