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
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "holdfast/v1/peer.pb.h"
#include "server/events.h"
#include "server/peers/pull_client.h"
#include "tiers/image/record.h"
#include "tiers/peer/registration.h"
#include "tiers/transfer/pacer.h"
#include "tiers/transfer/transfer_control.h"

namespace holdfast {

class FabricPort;

// What the source has, as it says.
struct PullOffer {
  v1::PullSource source;
  RecordAndLayout image;
  std::string record;  // as it came
};
// Whether it is of what was asked for; else DataLoss. A file in the remote tier may leave slices
// out, which a copy in memory never does.
absl::Status CheckIsOf(const PullOffer& offer, const CopyKey& key, TierKind tier = TierKind::kPeer);
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
// Parts of the image alone, each to where it belongs, unverified: their digests are for the caller
// to compare.
struct PulledPart {
  uint64_t offset = 0;  // in the image
  std::span<std::byte> into;
};
absl::Status PullPartsByFabric(FabricPort& port, const PullStream& stream, const PullOffer& offer,
                               const std::vector<PulledPart>& parts, const std::string& node,
                               const Registration* registration, TransferControl& control);
absl::Status PullPartsByStream(PullStream& stream, const std::vector<PulledPart>& parts,
                               TransferControl& control);
// After the last byte, by whatever way; of parts: after the last that was asked for so far.
enum class AfterConfirm : uint8_t { kEnds, kGoesOn };
absl::Status ConfirmPull(PullStream& stream, AfterConfirm then = AfterConfirm::kEnds);

}  // namespace holdfast
