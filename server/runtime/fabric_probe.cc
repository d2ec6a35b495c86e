#include "server/runtime/fabric_probe.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/digest.h"
#include "base/status.h"
#include "base/units.h"
#include "server/peers/pull_client.h"
#include "server/runtime/fabric_port.h"
#include "server/runtime/pull_transfer.h"
#include "tiers/image/layout.h"
#include "tiers/image/record.h"
#include "tiers/transfer/digest_blocks.h"

namespace holdfast {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr uint64_t kLargeBytes = kProbeBytesMax;
constexpr uint64_t kSmallBytes = 4096;
constexpr int kSmallReads = 21;
constexpr Duration kLargeFor = std::chrono::seconds(1);
constexpr Duration kLongest = std::chrono::seconds(30);  // each of the two

ShardRecord RecordOf(const ImagePlan& plan, std::span<const std::byte> image) {
  ShardRecord record;
  record.id = {*JobUuid::FromBytes("holdfast's probe"), 1, 1, 0};
  record.job_name = "probe";
  record.world_size = 1;
  record.generation = 1;
  record.image_bytes = plan.layout.image_bytes;
  record.header_bytes = plan.layout.header_bytes;
  record.layout_hash = plan.layout_hash;
  record.layout_bytes = plan.layout_bytes;
  for (DigestBlocks at(plan.layout); !at.done(); at.Next()) {
    record.digests.push_back(Crc64(&image[at.offset()], at.bytes()));
  }
  return record;
}

// One probe at the other end, and the way its bytes come.
struct Probe {
  std::unique_ptr<PullStream> stream;
  PullOffer offer;
  std::vector<std::byte> into;
};

absl::StatusOr<Probe> OpenProbe(const Measurer& measurer, const std::string& node, uint64_t bytes,
                                const std::shared_ptr<TransferControl>& control) {
  v1::PullOpen open;
  open.set_probe_bytes(bytes);
  if (measurer.fabric != nullptr) {
    open.set_provider(measurer.fabric->fabric().info().provider);
  }
  Probe probe;
  HF_ASSIGN_OR_RETURN(probe.stream, measurer.pulls->Open(node, std::move(open), kLongest, control));
  HF_ASSIGN_OR_RETURN(probe.offer, ReadPullOffer(*probe.stream, 2 * kProbeBytesMax, nullptr));
  probe.into.resize(probe.offer.image.record.image_bytes);
  return probe;
}

absl::Status ReadOnce(const Measurer& measurer, const std::string& node, Probe& probe,
                      bool by_fabric, TransferControl& control) {
  return by_fabric ? PullByFabric(*measurer.fabric, *probe.stream, probe.offer, probe.into, node,
                                  Clock::System()->Now() + kLongest, nullptr, control)
                   : PullByStream(*probe.stream, probe.offer, probe.into, node, nullptr, control);
}

}  // namespace

absl::StatusOr<std::unique_ptr<FabricProbe>> FabricProbe::Make(FabricPort* port, uint64_t bytes) {
  if (bytes == 0 || bytes > kProbeBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("a probe has 1 to ", FormatBytes(kProbeBytesMax)));
  }
  Slice slice;
  slice.name = "probe";
  slice.dtype = DType::kU8;
  slice.global_shape = {bytes};
  HF_ASSIGN_OR_RETURN(const ImagePlan plan, PlanImage({std::move(slice)}, 0));
  std::unique_ptr<FabricProbe> probe(new FabricProbe);
  probe->image_.resize(plan.layout.image_bytes);
  std::memcpy(probe->image_.data(), plan.header.data(), plan.header.size());
  for (size_t at = plan.header.size(); at < probe->image_.size(); ++at) {
    probe->image_[at] = static_cast<std::byte>(at * 31 >> 3);
  }
  probe->record_ = EncodeRecord(RecordOf(plan, probe->image_));
  if (port != nullptr) {
    absl::StatusOr<std::shared_ptr<Registration>> registered =
        port->fabric().Register(probe->image_, MemoryAccess::kReadByPeers);
    if (registered.ok()) {  // (else the bytes go in the stream, and the measurement says so)
      probe->registration_ = *std::move(registered);
    }
  }
  return probe;
}

FabricProbe::~FabricProbe() {
  registration_.reset();
}

void FabricProbe::Offer(FabricPort* port, const std::string& provider,
                        v1::PullSource& source) const {
  if (registration_ != nullptr) {
    port->Describe(provider, *registration_, source);
  }
}

absl::Status MeasureFabric(const Measurer& measurer, const std::string& node,
                           v1::MeasureFabricReply& reply) {
  if (measurer.pulls == nullptr) {
    return absl::FailedPreconditionError("this node is alone: there is no cluster to read from");
  }
  if (node == measurer.node_name) {
    return absl::InvalidArgumentError(
        absl::StrCat(node, " is the node that was asked: name another one (ckptctl nodes)"));
  }
  const auto control = std::make_shared<TransferControl>();
  HF_ASSIGN_OR_RETURN(Probe large, OpenProbe(measurer, node, kLargeBytes, control));
  bool by_fabric = measurer.fabric != nullptr && large.offer.source.regions_size() > 0;
  if (measurer.fabric == nullptr) {
    reply.set_problem("there is no fabric here (ckptctl fabric says why)");
  } else if (!by_fabric) {
    reply.set_problem(absl::StrCat(
        node,
        " has no fabric, another provider, or memory that cannot be registered (ckptctl "
        "fabric there says which)"));
  }
  // 1. The first one opens connections, and is not counted.
  absl::Status first = ReadOnce(measurer, node, large, by_fabric, *control);
  if (by_fabric && !first.ok()) {
    reply.set_problem(Message(first));
    by_fabric = false;
    first = ReadOnce(measurer, node, large, false, *control);
  }
  HF_RETURN_IF_ERROR(first);
  const SteadyClock::time_point begun = SteadyClock::now();
  SteadyClock::duration took{};
  do {
    HF_RETURN_IF_ERROR(ReadOnce(measurer, node, large, by_fabric, *control));
    reply.set_bytes(reply.bytes() + large.into.size());
    took = SteadyClock::now() - begun;
  } while (took < kLargeFor);
  const double seconds = std::chrono::duration<double>(took).count();
  reply.set_bytes_per_s(static_cast<uint64_t>(static_cast<double>(reply.bytes()) / seconds));
  large.stream.reset();  // (the other end has one probe at a time)

  // 2. Little ones, one by one.
  HF_ASSIGN_OR_RETURN(Probe small, OpenProbe(measurer, node, kSmallBytes, control));
  std::vector<double> each;
  for (int i = 0; i < kSmallReads; ++i) {
    const SteadyClock::time_point start = SteadyClock::now();
    HF_RETURN_IF_ERROR(ReadOnce(measurer, node, small, by_fabric, *control));
    each.push_back(std::chrono::duration<double, std::micro>(SteadyClock::now() - start).count());
  }
  std::sort(each.begin(), each.end());
  reply.set_latency_us(each[each.size() / 2]);
  reply.set_from(node);
  reply.set_to(measurer.node_name);
  if (by_fabric) {
    reply.set_provider(measurer.fabric->fabric().info().provider);
  }
  return absl::OkStatus();
}

}  // namespace holdfast
