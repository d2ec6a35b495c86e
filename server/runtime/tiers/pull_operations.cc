// Out of the memory of another node into a slot here (docs/protocol.md §19).
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/fault_guard.h"
#include "base/log.h"
#include "base/status.h"
#include "base/sync_point.h"
#include "base/units.h"
#include "server/peers/pull_client.h"
#include "server/quiet_windows.h"
#include "server/runtime/fabric_port.h"
#include "server/runtime/pull_service.h"
#include "server/runtime/pull_transfer.h"
#include "server/runtime/tiers/operation_parts.h"
#include "server/runtime/tiers/slot_source.h"

namespace holdfast {
namespace {

// No slower than this, whatever the size: else the source is given up, and the next one tried.
constexpr uint64_t kPullBytesPerSecondMin = uint64_t{4} << 20;
constexpr Duration kPullStart = std::chrono::seconds(30);
constexpr uint64_t kPullsTogether = 4;  // replicas, at a time
constexpr size_t kBadPeersBelieved = 1;

// The source holds its slot for so long. What is held back shares its rate with others, and has it
// for as little of the time as quiet windows leave.
Duration LongestPull(uint64_t bytes, const Pacer* pacer) {
  const uint64_t rate = pacer == nullptr ? 0 : pacer->rate() / kPullsTogether;
  const uint64_t slowest =
      rate == 0 ? kPullBytesPerSecondMin : std::min(kPullBytesPerSecondMin, rate);
  const int64_t times = pacer == nullptr ? 1 : kHeldPeriod / (kHeldPeriod - kHeldMax);
  const std::chrono::seconds longest(bytes / slowest);
  return std::min<Duration>(kPullStart + std::min<Duration>(longest, kPullLongest) * times,
                            kPullLongest - kPullStart);
}

// What it says of itself, or of the way to it, is no verdict on the copy, nor on this node's
// memory; nor is it for the source to say that nobody wants it.
absl::Status OfTheSource(const absl::Status& status, const TransferControl& control) {
  return absl::IsDataLoss(status) || (absl::IsCancelled(status) && control.cancelled())
             ? status
             : absl::UnavailableError(Message(status));
}

// Of the shard that is wanted.
absl::StatusOr<PullOffer> ReadOffer(PullStream& stream, const FetchShard& action,
                                    TransferControl& control) {
  HF_ASSIGN_OR_RETURN(PullOffer offered, ReadPullOffer(stream, action.slot_bytes, &control));
  HF_RETURN_IF_ERROR(CheckIsOf(offered, action.key));
  return offered;
}

// The whole way from one node. DataLoss: what it has is bad, or was when it came here.
absl::StatusOr<ShardRecord> PullFrom(DrainContext& context, const std::string& node,
                                     const FetchShard& action, std::span<std::byte> into,
                                     Operation& operation) {
  v1::PullOpen open;
  open.set_job_name(action.key.job_name);
  open.set_job_uuid(action.key.id.job.ToBytes());
  open.set_attempt(action.key.id.attempt);
  open.set_step(action.key.id.step);
  open.set_rank(action.key.id.rank);
  open.set_load(true);
  if (context.fabric != nullptr) {
    open.set_provider(context.fabric->fabric().info().provider);
  }
  const std::shared_ptr<TransferControl>& control = operation.control();
  const TransferControl::Call call(control.get(), "pull from", node);
  Pacer* const pacer = action.background ? context.peer_pacer.get() : nullptr;
  const Duration at_most = LongestPull(action.slot_bytes, pacer);
  const MonotonicTime deadline = Clock::System()->Now() + at_most;
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<PullStream> stream,
                      context.pulls->Open(node, std::move(open), at_most, control));
  HF_ASSIGN_OR_RETURN(const PullOffer offered, ReadOffer(*stream, action, *control));
  HF_SYNC_POINT("daemon.pull.offered");
  absl::Status pulled = absl::UnavailableError("no fabric");
  const bool by_fabric = context.fabric != nullptr && offered.source.regions_size() > 0;
  if (by_fabric) {
    pulled = PullByFabric(*context.fabric, *stream, offered, into, node, deadline, pacer, *control,
                          true);
  }
  // Bytes that contradict their digests, too: a device may call a read done that was not (soft-RoCE
  // of Linux 6.1 does, when packets are dropped). What the node has is bad only if what comes the
  // other way is.
  if (!pulled.ok() && !control->cancelled() && !stream->node_gone()) {
    if (by_fabric && !absl::IsFailedPrecondition(pulled)) {  // (that was said when it began)
      LogWarning(absl::StrCat("fabric: pull from ", node, ": ", Message(pulled),
                              "; read over the daemons' own connection, which is slower"));
    }
    pulled = PullByStream(*stream, offered, into, node, pacer, *control);
  }
  if (absl::IsDataLoss(pulled) && !control->cancelled() && !stream->node_gone()) {
    // Nothing is condemned on one reading.
    LogWarning(absl::StrCat("pull from ", node, ": ", Message(pulled), "; read once more"));
    pulled = PullByStream(*stream, offered, into, node, pacer, *control);
  }
  if (pulled.ok() || absl::IsDataLoss(pulled)) {  // (what was refilled meanwhile is not bad)
    HF_RETURN_IF_ERROR(ConfirmPull(*stream));
  }
  HF_RETURN_IF_ERROR(pulled);
  return offered.image.record;
}

}  // namespace

FetchEnded FetchFromPeers(const Context& context, const FetchShard& action, Operation& operation) {
  FetchEnded ended{action.drain, action.slot, action.generation, absl::OkStatus(), false, {}};
  const auto failed = [&](absl::Status status) {
    ended.status = std::move(status);
    return ended;
  };
  // From here on the slot is spoken for: whatever happens, this ends by itself.
  if (!operation.Pin()) {
    return failed(Cancelled("the fetch"));
  }
  absl::StatusOr<SlotToFill> slot = OpenSlotToFill(*context, action);
  if (!slot.ok()) {
    return failed(absl::UnavailableError(slot.status().message()));
  }
  const std::span<std::byte> into(slot->mapping->data(), slot->mapping->bytes());
  const FaultGuard guard(into.data(), into.size());
  absl::StatusOr<ShardRecord> record = absl::UnavailableError("no node was named");
  for (const std::string& node : action.peers) {
    ended.peer = node;
    record = PullFrom(*context, node, action, into, operation);
    if (!record.ok()) {
      record = OfTheSource(record.status(), *operation.control());
    }
    if (record.ok() || absl::IsCancelled(record.status()) || guard.faulted()) {
      break;
    }
    if (absl::IsDataLoss(record.status())) {
      ended.bad_peers.push_back(node);
    }
  }
  if (!record.ok() && ended.bad_peers.size() > kBadPeersBelieved) {  // rather this node
    record = absl::UnavailableError(absl::StrCat(
        "what came from ", absl::StrJoin(ended.bad_peers, " and from "),
        " contradicts its digests: they are hardly all bad, this node's memory or network may be "
        "(ckptctl verify finds out)"));
    ended.bad_peers.clear();
  }
  if (guard.faulted()) {
    ended.bad_peers.clear();
    return failed(absl::UnavailableError(absl::StrCat("slot ", action.slot, " was cut short")));
  }
  if (!record.ok()) {
    ended.source_bad = absl::IsDataLoss(record.status());
    return failed(record.status());
  }
  absl::StatusOr<FetchEnded> sealed = PublishFetched(*context->slots, action, *record);
  if (!sealed.ok()) {
    return failed(absl::UnavailableError(sealed.status().message()));
  }
  HF_SYNC_POINT("daemon.fetch.published");
  ended.copy = std::move(sealed->copy);
  ended.record_bytes = sealed->record_bytes;
  return ended;
}

}  // namespace holdfast
