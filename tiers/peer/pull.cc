#include "tiers/peer/pull.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/status.h"
#include "tiers/peer/remote_range.h"
#include "tiers/transfer/digest_blocks.h"
#include "tiers/transfer/file_pieces.h"

namespace holdfast {
namespace {

absl::Status CheckOptions(const PullOptions& options) {
  if (options.piece_bytes < kPullPieceBytesMin || options.piece_bytes > kPullPieceBytesMax ||
      options.window == 0 || options.window > kPullWindowMax ||
      options.stall_timeout <= Duration(0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "pull: pieces of ", options.piece_bytes, " bytes, ", options.window,
        " at a time, a stall of ", options.stall_timeout.count(), " ns: not to be had"));
  }
  return absl::OkStatus();
}

// One image on its way. Run once.
class Pull {
 public:
  Pull(Fabric& fabric, const PullSource& source, std::span<std::byte> into,
       const ShardRecord& record, const Layout& layout, const PullOptions& options)
      : source_(source),
        image_(into),
        record_(record),
        to_verify_(layout),
        range_(fabric, source, 0, into, options) {}

  TransferResult Run() {
    const double cpu_before = ThreadCpuSeconds();
    result_.status = Move();
    if (!result_.ok() && result_.faulty == FaultySide::kNone) {
      result_.faulty = range_.faulty();
    }
    result_.cpu_seconds = ThreadCpuSeconds() - cpu_before;
    return std::move(result_);
  }

 private:
  absl::Status Move() {
    HF_RETURN_IF_ERROR(range_.Begin());
    while (!to_verify_.done()) {
      HF_RETURN_IF_ERROR(range_.Advance());
      HF_ASSIGN_OR_RETURN(const bool verified, VerifyNext());
      if (!verified) {
        HF_RETURN_IF_ERROR(range_.Wait());
      }
    }
    return absl::OkStatus();
  }

  // Digests what has arrived, about one MiB of it; the rest of a block when that is there too.
  // False when nothing is.
  absl::StatusOr<bool> VerifyNext() {
    uint64_t left = kDigestBlockBytes;
    while (left > 0 && !to_verify_.done()) {
      const uint64_t begin = to_verify_.offset() + digested_;
      const uint64_t there = std::min(to_verify_.end(), range_.arrived());
      if (there <= begin && digested_ < to_verify_.bytes()) {
        break;
      }
      const uint64_t bytes = there - begin;
      digest_ = Crc64(image_.data() + begin, bytes, digest_);
      digested_ += bytes;
      left -= std::min(left, bytes);
      if (range_.faulted()) {
        result_.faulty = FaultySide::kDestination;
        return range_.CutShort();
      }
      if (digested_ == to_verify_.bytes()) {
        HF_RETURN_IF_ERROR(EndBlock());
      }
    }
    return left < kDigestBlockBytes;
  }

  absl::Status EndBlock() {
    if (std::optional<BadBlock> bad = CompareBlock(record_, to_verify_, digest_)) {
      result_.faulty = FaultySide::kSource;
      result_.bad_block = *bad;
      return BadBlockError(record_, *bad, absl::StrCat("the memory of '", source_.name, "'"));
    }
    result_.bytes = to_verify_.end();
    to_verify_.Next();
    digest_ = 0;
    digested_ = 0;
    return absl::OkStatus();
  }

  const PullSource& source_;
  const std::span<std::byte> image_;
  const ShardRecord& record_;
  DigestBlocks to_verify_;
  uint64_t digest_ = 0;  // of the first digested_ bytes of that block
  uint64_t digested_ = 0;
  TransferResult result_;
  RemoteRange range_;  // gone first
};

}  // namespace

TransferResult PullImage(Fabric& fabric, const PullSource& source, std::span<std::byte> into,
                         const ShardRecord& record, const Layout& layout,
                         const PullOptions& options) {
  TransferResult refused;
  refused.status = CheckIsLayoutOf(record, layout);
  if (refused.ok()) {
    refused.status = CheckOptions(options);
  }
  if (refused.ok() && into.size() < record.image_bytes) {
    refused.status = absl::InvalidArgumentError(
        absl::StrCat("pull of ", record.id.ToString(), ": ", into.size(),
                     " bytes of memory cannot hold ", record.image_bytes));
  }
  if (!refused.ok()) {
    return refused;
  }
  const TransferControl::Call call(options.control, "read from", source.name);
  return Pull(fabric, source, into.first(record.image_bytes), record, layout, options).Run();
}

absl::Status ReadRemote(Fabric& fabric, const PullSource& source, uint64_t offset,
                        std::span<std::byte> into, const PullOptions& options) {
  HF_RETURN_IF_ERROR(CheckOptions(options));
  if (into.empty()) {
    return absl::OkStatus();
  }
  const TransferControl::Call call(options.control, "read from", source.name);
  RemoteRange range(fabric, source, offset, into, options);
  HF_RETURN_IF_ERROR(range.Begin());
  while (true) {
    HF_RETURN_IF_ERROR(range.Advance());
    if (range.done()) {
      return range.faulted() ? range.CutShort() : absl::OkStatus();
    }
    HF_RETURN_IF_ERROR(range.Wait());
  }
}

}  // namespace holdfast
