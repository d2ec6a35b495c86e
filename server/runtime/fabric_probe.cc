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

constexpr uint64_t kMiddleBytes = kMiB;
constexpr uint64_t kSmallBytes = 4096;
constexpr int kSmallReads = 21;
constexpr double kLargeForS = 1;

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

Duration LeftUntil(MonotonicTime until) {
  return std::max<Duration>(until - Clock::System()->Now(), std::chrono::milliseconds(1));
}

// One probe at the other end, and the way its bytes come.
struct Probe {
  std::unique_ptr<PullStream> stream;
  PullOffer offer;
  std::vector<std::byte> into;
};

absl::StatusOr<Probe> OpenProbe(const Measurer& measurer, const std::string& node, uint64_t bytes,
                                const std::shared_ptr<TransferControl>& control,
                                MonotonicTime until) {
  v1::PullOpen open;
  open.set_probe_bytes(bytes);
  if (measurer.fabric != nullptr) {
    open.set_provider(measurer.fabric->fabric().info().provider);
  }
  Probe probe;
  HF_ASSIGN_OR_RETURN(probe.stream,
                      measurer.pulls->Open(node, std::move(open), LeftUntil(until), control));
  HF_ASSIGN_OR_RETURN(probe.offer, ReadPullOffer(*probe.stream, 2 * kProbeBytesMax, nullptr));
  probe.into.resize(probe.offer.image.record.image_bytes);
  return probe;
}

double SecondsSince(SteadyClock::time_point begun) {
  return std::chrono::duration<double>(SteadyClock::now() - begun).count();
}

// Devices over which nothing can be read from there.
std::string ProblemsWith(FabricPort& port, const std::string& node) {
  std::string problems;
  for (const std::string& problem : port.fabric().Problems()) {
    if (problem.find(absl::StrCat("'", node, "'")) != std::string::npos) {
      absl::StrAppend(&problems, problems.empty() ? "" : "; ", problem);
    }
  }
  return problems;
}

absl::Status ReadOnce(const Measurer& measurer, const std::string& node, Probe& probe,
                      bool by_fabric, TransferControl& control, MonotonicTime until) {
  return by_fabric ? PullByFabric(*measurer.fabric, *probe.stream, probe.offer, probe.into, node,
                                  until, nullptr, control, false)
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
                           const std::shared_ptr<TransferControl>& control, MonotonicTime until,
                           v1::MeasureFabricReply& reply) {
  if (measurer.pulls == nullptr) {
    return absl::FailedPreconditionError("this node is alone: there is no cluster to read from");
  }
  if (node == measurer.node_name) {
    return absl::InvalidArgumentError(
        absl::StrCat(node, " is the node that was asked: name another one (ckptctl nodes)"));
  }
  // 1. Little ones, one by one. The first one opens connections, and is not counted. (Half of the
  // time is for the other way.)
  HF_ASSIGN_OR_RETURN(Probe small, OpenProbe(measurer, node, kSmallBytes, control, until));
  bool by_fabric = measurer.fabric != nullptr;
  if (!by_fabric) {
    reply.set_problem("there is no fabric here (ckptctl fabric says why)");
  }
  // (What is larger than another one may be more than may be pinned there.)
  const auto look_at = [&](const Probe& probe) {
    if (by_fabric && probe.offer.source.regions_size() == 0) {
      by_fabric = false;
      reply.set_problem(absl::StrCat(
          node,
          " has no fabric, another provider, or memory that cannot be registered (ckptctl "
          "fabric there says which)"));
    }
  };
  look_at(small);
  const MonotonicTime by_then = by_fabric ? Clock::System()->Now() + LeftUntil(until) / 2 : until;
  absl::Status first = ReadOnce(measurer, node, small, by_fabric, *control, by_then);
  if (by_fabric && !first.ok() && !control->cancelled()) {
    reply.set_problem(Message(first));
    by_fabric = false;
    first = ReadOnce(measurer, node, small, false, *control, until);
  }
  HF_RETURN_IF_ERROR(first);
  std::vector<double> each;
  for (int i = 0; i < kSmallReads; ++i) {
    const SteadyClock::time_point start = SteadyClock::now();
    HF_RETURN_IF_ERROR(ReadOnce(measurer, node, small, by_fabric, *control, until));
    each.push_back(std::chrono::duration<double, std::micro>(SteadyClock::now() - start).count());
  }
  std::sort(each.begin(), each.end());
  reply.set_latency_us(each[each.size() / 2]);
  small.stream.reset();  // (the other end has few probes at a time)

  // 2. One that tells how much comes in a second; then as much, again and again.
  HF_ASSIGN_OR_RETURN(Probe middle, OpenProbe(measurer, node, kMiddleBytes, control, until));
  look_at(middle);
  const SteadyClock::time_point tried = SteadyClock::now();
  HF_RETURN_IF_ERROR(ReadOnce(measurer, node, middle, by_fabric, *control, until));
  const double middle_s = SecondsSince(tried);
  middle.stream.reset();
  const auto large_bytes = static_cast<uint64_t>(
      std::clamp(static_cast<double>(kMiddleBytes) / std::max(middle_s, 1e-6),
                 static_cast<double>(kMiddleBytes), static_cast<double>(kProbeBytesMax)));
  HF_ASSIGN_OR_RETURN(Probe large, OpenProbe(measurer, node, large_bytes, control, until));
  look_at(large);
  HF_RETURN_IF_ERROR(ReadOnce(measurer, node, large, by_fabric, *control, until));  // (connects)
  const SteadyClock::time_point begun = SteadyClock::now();
  do {
    HF_RETURN_IF_ERROR(ReadOnce(measurer, node, large, by_fabric, *control, until));
    reply.set_bytes(reply.bytes() + large.into.size());
  } while (SecondsSince(begun) < kLargeForS);
  reply.set_bytes_per_s(
      static_cast<uint64_t>(static_cast<double>(reply.bytes()) / SecondsSince(begun)));
  if (by_fabric) {
    reply.set_problem(ProblemsWith(*measurer.fabric, node));
  }
  reply.set_from(node);
  reply.set_to(measurer.node_name);
  if (by_fabric) {
    reply.set_provider(measurer.fabric->fabric().info().provider);
  }
  return absl::OkStatus();
}

}  // namespace holdfast
