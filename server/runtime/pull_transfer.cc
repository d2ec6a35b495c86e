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
  return offered;
}

absl::Status PullByStream(PullStream& stream, const PullOffer& offer, std::span<std::byte> into,
                          const std::string& node, Pacer* pacer, TransferControl& control) {
  const uint64_t bytes = offer.image.record.image_bytes;
  BlockCheck check(offer.image, into);
  for (uint64_t at = 0; at < bytes;) {
    v1::PullAsked asked;
    v1::PullRead& read = *asked.mutable_read();
    read.set_offset(at);
    read.set_bytes(std::min(kPullAskBytes, bytes - at));
    HF_RETURN_IF_ERROR(stream.Ask(asked));
    for (const uint64_t end = at + read.bytes(); at < end;) {
      HF_ASSIGN_OR_RETURN(const v1::PullTold told, stream.Next());
      if (told.data().empty() || told.data().size() > end - at) {
        return absl::DataLossError("its bytes come in other pieces than were asked for");
      }
      std::copy(told.data().begin(), told.data().end(), reinterpret_cast<char*>(&into[at]));
      at += told.data().size();
      HF_RETURN_IF_ERROR(check.Arrived(at, node));
      control.Advance(told.data().size());
      if (pacer != nullptr && !pacer->Acquire(told.data().size(), &control)) {
        return absl::CancelledError("pull: cancelled");
      }
    }
  }
  return check.Arrived(bytes, node);
}

absl::Status PullByFabric(FabricPort& port, const PullStream& stream, const PullOffer& offer,
                          std::span<std::byte> into, const std::string& node,
                          MonotonicTime deadline, Pacer* pacer, TransferControl& control,
                          bool another_way) {
  PullSource source;
  source.name = node;
  source.address = offer.source.fabric_address();
  for (const v1::RemoteRegion& region : offer.source.regions()) {
    source.regions.push_back({region.device(), region.base(), region.key(), region.bytes()});
  }
  PullOptions options;
  options.deadline = deadline;
  options.pacer = pacer;
  options.control = &control;
  options.another_way = another_way;
  options.source_gone = [&stream] { return stream.node_gone(); };
  return PullImage(port.fabric(), source, into, offer.image.record, offer.image.layout, options)
      .status;
}

absl::Status ConfirmPull(PullStream& stream) {
  v1::PullAsked asked;
  asked.mutable_confirm();
  HF_RETURN_IF_ERROR(stream.Ask(asked));
  HF_ASSIGN_OR_RETURN(const v1::PullTold told, stream.Next());
  return told.has_confirmed()
             ? absl::OkStatus()
             : absl::UnavailableError("it did not confirm that its slot is what it was");
}

}  // namespace holdfast
