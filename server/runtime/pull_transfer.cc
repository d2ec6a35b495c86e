#include "server/runtime/pull_transfer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/status.h"
#include "server/runtime/fabric_port.h"
#include "tiers/peer/pull.h"
#include "tiers/transfer/digest_blocks.h"

namespace holdfast {
namespace {

// A record tells less of each tensor than the image's own header does, and of each digest block 8
// bytes.
constexpr uint64_t kRecordBytesOfNothing = uint64_t{1} << 20;
// (A load has as long at the source: kPrefetchDeadline.)
constexpr Duration kLoadingLongest = std::chrono::minutes(11);
constexpr uint64_t kPullAskBytes = uint64_t{16} << 20;  // of a stream, at a time

// Each block is compared with the record as soon as the last of it is there.
class BlockCheck {
 public:
  BlockCheck(const RecordAndLayout& image, std::span<const std::byte> memory)
      : image_(image), memory_(memory), next_(image.layout) {}

  // All below `end` has arrived.
  absl::Status Arrived(uint64_t end, const std::string& node) {
    for (; !next_.done() && next_.end() <= end; next_.Next()) {
      const uint64_t digest = Crc64(&memory_[next_.offset()], next_.bytes());
      if (const auto bad = CompareBlock(image_.record, next_, digest)) {
        return BadBlockError(image_.record, *bad, absl::StrCat("the memory of ", node));
      }
    }
    return absl::OkStatus();
  }

 private:
  const RecordAndLayout& image_;
  const std::span<const std::byte> memory_;
  DigestBlocks next_;
};

PullSource SourceOf(const PullOffer& offer, const std::string& node) {
  PullSource source;
  source.name = node;
  source.address = offer.source.fabric_address();
  for (const v1::RemoteRegion& region : offer.source.regions()) {
    source.regions.push_back({region.device(), region.base(), region.key(), region.bytes()});
  }
  return source;
}

// `arrived` is told how many bytes of the part there are, and how many of them came just now.
template <typename Arrived>
absl::Status ReadFromStream(PullStream& stream, const PulledPart& part, TransferControl& control,
                            Arrived arrived) {
  for (uint64_t at = 0; at < part.into.size();) {
    v1::PullAsked asked;
    v1::PullRead& read = *asked.mutable_read();
    read.set_offset(part.offset + at);
    read.set_bytes(std::min<uint64_t>(kPullAskBytes, part.into.size() - at));
    HF_RETURN_IF_ERROR(stream.Ask(asked));
    // All that was asked for is taken from the stream, also after a bad block: what is said next,
    // the confirmation, comes behind it.
    absl::Status judged;
    for (const uint64_t end = at + read.bytes(); at < end;) {
      HF_ASSIGN_OR_RETURN(const v1::PullTold told, stream.Next());
      if (told.data().empty() || told.data().size() > end - at) {
        return absl::DataLossError("its bytes come in other pieces than were asked for");
      }
      std::copy(told.data().begin(), told.data().end(), reinterpret_cast<char*>(&part.into[at]));
      at += told.data().size();
      control.Advance(told.data().size());
      if (judged.ok()) {
        judged = arrived(at, told.data().size());
      }
    }
    HF_RETURN_IF_ERROR(judged);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<PullOffer> ReadPullOffer(PullStream& stream, uint64_t image_bytes_max,
                                        TransferControl* control) {
  HF_ASSIGN_OR_RETURN(v1::PullTold told, stream.Next());
  const MonotonicTime until = Clock::System()->Now() + kLoadingLongest;
  while (told.has_loading()) {
    if (Clock::System()->Now() > until) {
      return absl::UnavailableError("it takes too long to bring it into its memory");
    }
    if (control != nullptr && control->cancelled()) {
      return absl::CancelledError("as asked");
    }
    if (control != nullptr) {
      control->Touch();  // it does not hang
    }
    HF_ASSIGN_OR_RETURN(told, stream.Next());
  }
  if (!told.has_source()) {
    return absl::DataLossError("it begins with something else than what there is");
  }
  PullOffer offered;
  offered.source = std::move(*told.mutable_source());
  const uint64_t bytes = offered.source.record_bytes();
  if (bytes > std::min(kRecordBytesMax, kRecordBytesOfNothing + 2 * image_bytes_max) ||
      offered.source.image_bytes() > image_bytes_max) {
    return absl::DataLossError(absl::StrCat("it has a record of ", bytes, " bytes and an image of ",
                                            offered.source.image_bytes(),
                                            ", more than it was said to have"));
  }
  std::string record;
  while (record.size() < bytes) {
    HF_ASSIGN_OR_RETURN(told, stream.Next());
    if (told.record().empty() || told.record().size() > bytes - record.size()) {
      return absl::DataLossError("its record comes in other pieces than it said");
    }
    record.append(told.record());
  }
  absl::StatusOr<RecordAndLayout> image = DecodeRecordAndLayout(record);
  if (!image.ok()) {
    return absl::DataLossError(absl::StrCat("its record: ", Message(image.status())));
  }
  offered.image = *std::move(image);
  if (offered.image.record.image_bytes != offered.source.image_bytes()) {
    return absl::DataLossError("its record is of an image of another length");
  }
  offered.record = std::move(record);
  return offered;
}

absl::Status CheckIsOf(const PullOffer& offer, const CopyKey& key, TierKind tier) {
  const ShardRecord& its = offer.image.record;
  if (its.id != key.id || its.world_size != key.world_size || its.job_name != key.job_name ||
      (its.kept.has_value() && tier != TierKind::kRemote)) {
    return absl::DataLossError(
        absl::StrCat("its record is of ", its.id.ToString(), ", another shard"));
  }
  return absl::OkStatus();
}

absl::Status PullByStream(PullStream& stream, const PullOffer& offer, std::span<std::byte> into,
                          const std::string& node, Pacer* pacer, TransferControl& control) {
  const uint64_t bytes = offer.image.record.image_bytes;
  BlockCheck check(offer.image, into);
  const auto arrived = [&](uint64_t at, uint64_t more) {
    HF_RETURN_IF_ERROR(check.Arrived(at, node));
    return pacer == nullptr || pacer->Acquire(more, &control)
               ? absl::OkStatus()
               : absl::CancelledError("pull: cancelled");
  };
  HF_RETURN_IF_ERROR(ReadFromStream(stream, {0, into.first(bytes)}, control, arrived));
  return check.Arrived(bytes, node);
}

absl::Status PullPartsByStream(PullStream& stream, const std::vector<PulledPart>& parts,
                               TransferControl& control) {
  for (const PulledPart& part : parts) {
    HF_RETURN_IF_ERROR(ReadFromStream(stream, part, control, [&](uint64_t, uint64_t) {
      return control.cancelled() ? absl::CancelledError("pull: cancelled") : absl::OkStatus();
    }));
  }
  return absl::OkStatus();
}

absl::Status PullPartsByFabric(FabricPort& port, const PullStream& stream, const PullOffer& offer,
                               const std::vector<PulledPart>& parts, const std::string& node,
                               const Registration* registration, TransferControl& control) {
  const PullSource source = SourceOf(offer, node);
  PullOptions options;
  options.control = &control;
  options.another_way = true;
  options.registration = registration;
  options.source_gone = [&stream] { return stream.node_gone(); };
  for (const PulledPart& part : parts) {
    HF_RETURN_IF_ERROR(ReadRemote(port.fabric(), source, part.offset, part.into, options));
  }
  return absl::OkStatus();
}

absl::Status PullByFabric(FabricPort& port, const PullStream& stream, const PullOffer& offer,
                          std::span<std::byte> into, const std::string& node,
                          MonotonicTime deadline, Pacer* pacer, TransferControl& control,
                          bool another_way) {
  const PullSource source = SourceOf(offer, node);
  PullOptions options;
  options.deadline = deadline;
  options.pacer = pacer;
  options.control = &control;
  options.another_way = another_way;
  options.source_gone = [&stream] { return stream.node_gone(); };
  return PullImage(port.fabric(), source, into, offer.image.record, offer.image.layout, options)
      .status;
}

absl::Status ConfirmPull(PullStream& stream, AfterConfirm then) {
  v1::PullAsked asked;
  asked.mutable_confirm()->set_goes_on(then == AfterConfirm::kGoesOn);
  HF_RETURN_IF_ERROR(stream.Ask(asked));
  HF_ASSIGN_OR_RETURN(const v1::PullTold told, stream.Next());
  return told.has_confirmed()
             ? absl::OkStatus()
             : absl::UnavailableError("it did not confirm that its slot is what it was");
}

}  // namespace holdfast
