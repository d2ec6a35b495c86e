// A pull's bytes, as the one who reads has them brought (docs/protocol.md §19).
//
//   HF_ASSIGN_OR_RETURN(const PullOffer offer, ReadPullOffer(*stream, slot_bytes, &control));
//   HF_RETURN_IF_ERROR(PullByFabric(port, *stream, offer, into, node, …));
//   HF_RETURN_IF_ERROR(ConfirmPull(*stream));
//
// Plain functions that block, for workers' threads. What a source says is believed as far as the
// record bears it out: DataLoss when it contradicts that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "holdfast/v1/peer.pb.h"
#include "server/peers/pull_client.h"
#include "tiers/image/record.h"
#include "tiers/transfer/pacer.h"
#include "tiers/transfer/transfer_control.h"

namespace holdfast {

class FabricPort;

// What the source has, as it says.
struct PullOffer {
  v1::PullSource source;
  RecordAndLayout image;
};
// However long the source takes to bring it into memory, if it says so; `control` may be null.
absl::StatusOr<PullOffer> ReadPullOffer(PullStream& stream, uint64_t image_bytes_max,
                                        TransferControl* control);

// By one-sided reads. `pacer` null: as fast as it goes. The slot is held until `deadline`.
// `another_way`: as PullOptions has it.
absl::Status PullByFabric(FabricPort& port, const PullStream& stream, const PullOffer& offer,
                          std::span<std::byte> into, const std::string& node,
                          MonotonicTime deadline, Pacer* pacer, TransferControl& control,
                          bool another_way);
// Over the daemons' own connection: where no fabric carries it.
absl::Status PullByStream(PullStream& stream, const PullOffer& offer, std::span<std::byte> into,
                          const std::string& node, Pacer* pacer, TransferControl& control);
// After the last byte, by whatever way.
absl::Status ConfirmPull(PullStream& stream);

}  // namespace holdfast
