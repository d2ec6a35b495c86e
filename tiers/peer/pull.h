// Images out of other nodes' memory into ours, by one-sided reads, each digest block compared with
// the record by the same thread as it arrives, while the next pieces are under way.
//
//   PullSource source{.name = "n2", .address = …, .regions = …};
//   TransferResult pulled = PullImage(*fabric, source, slot, record, layout, {.control = control});
//   // pulled.status OK: all of the image is there, and every block was good.
//   … confirm at the source that its slot's generation is still the same …
//
// Plain functions that block; any number at a time, of any threads. When they return, whatever
// happened, nothing is in flight into the memory that they were given: a read that was not answered
// is ended by closing the connection that it was made on, which is nobody else's. It is the
// caller's to know that the source keeps the memory as it is meanwhile (a lease).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"
#include "tiers/image/record.h"
#include "tiers/peer/fabric.h"
#include "tiers/peer/registration.h"
#include "tiers/transfer/pacer.h"
#include "tiers/transfer/transfer_control.h"
#include "tiers/transfer/transfer_result.h"

namespace holdfast {

inline constexpr size_t kPullPieceBytesMin = size_t{4} << 10;
inline constexpr size_t kPullPieceBytesMax = size_t{16} << 20;
inline constexpr size_t kPullWindowMax = 64;

// Memory of a peer, as its owner told of it: not to be trusted.
struct PullSource {
  std::string name;                   // of the node, for people
  std::string address;                // its Fabric::address()
  std::vector<RemoteRegion> regions;  // its Registration::regions()
  uint64_t offset = 0;                // of the image in these
};

struct PullOptions {
  size_t piece_bytes = size_t{1} << 20;
  // Pieces on their way at a time, of each device; what the provider allows, if that is less (of
  // tcp four, each on a connection of its own).
  size_t window = 8;
  // Where the image goes lies in it. Without: registered for as long as it takes, where the
  // provider wants that.
  const Registration* registration = nullptr;
  // So long without a byte, and the source is given up.
  Duration stall_timeout = std::chrono::seconds(15);
  std::optional<MonotonicTime> deadline;
  Pacer* pacer = nullptr;
  TransferControl* control = nullptr;
  // There is another way to the bytes: where nothing could be read over any device a short while
  // ago, it is not tried (FailedPrecondition). A minute later one is let try, and so on.
  bool another_way = false;
  // Looked at now and then: whether the source is known to be gone. Then nothing is waited for.
  std::function<bool()> source_gone;
};

// `into` is writable and holds at least image_bytes; nothing behind that is written.
// kSource: Unavailable (gone, stalled, or it refused), DeadlineExceeded, DataLoss (a block
// contradicts the record; bad_block), InvalidArgument (address or regions are none, or too short).
// kDestination: `into` was cut short (DataLoss), or cannot be registered. kNone: cancelled, no
// connection was free (ResourceExhausted), another way is better (FailedPrecondition), called
// wrongly.
TransferResult PullImage(Fabric& fabric, const PullSource& source, std::span<std::byte> into,
                         const ShardRecord& record, const Layout& layout,
                         const PullOptions& options);

// Reads `into.size()` bytes at `offset` from source.offset on, unverified: what lies behind an
// image, or what is verified by the caller (records). Errors as PullImage's.
absl::Status ReadRemote(Fabric& fabric, const PullSource& source, uint64_t offset,
                        std::span<std::byte> into, const PullOptions& options);

}  // namespace holdfast
