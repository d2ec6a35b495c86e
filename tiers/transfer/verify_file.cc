// VerifyFile: blocks of a file against the record, through buffers.
#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/status.h"
#include "base/units.h"
#include "tiers/transfer/digest_blocks.h"
#include "tiers/transfer/direct_copy.h"
#include "tiers/transfer/direct_copy_checks.h"
#include "tiers/transfer/file_pieces.h"
#include "tiers/transfer/sampled_blocks.h"

namespace holdfast {
namespace {

constexpr size_t kBuffersBytesMax = size_t{32} << 20;

// Which blocks are looked at.
class Selection {
 public:
  Selection(ReadBack how, const DirectCopyOptions& options, const Layout& layout)
      : all_(how == ReadBack::kAll),
        sampled_(all_ ? std::vector<size_t>()
                      : SampledBlocks(
                            layout, options.sample_seed,
                            options.sample_unit != 0 ? options.sample_unit : options.alignment)) {}
  bool Has(size_t digest) const {
    return all_ || std::binary_search(sampled_.begin(), sampled_.end(), digest);
  }

 private:
  const bool all_;
  const std::vector<size_t> sampled_;
};

class FileCheck {
 public:
  FileCheck(BlockIo& io, File& file, const ShardRecord& record, const Layout& layout, ReadBack how,
            const DirectCopyOptions& options)
      : io_(io),
        file_(file),
        record_(record),
        options_(options),
        selection_(how, options, layout),
        next_(layout),
        read_bytes_max_(std::max(options.piece_bytes, kDigestBlockBytes)) {
    SkipUnselected(next_);
    // A read begins and ends at blocks of the file system, not of the image.
    const size_t buffer_bytes = read_bytes_max_ + 2 * size_t{options.alignment};
    // One more than are read at a time: what has arrived makes room for the next read at once, and
    // is digested while that goes on.
    const size_t count =
        std::clamp<size_t>(kBuffersBytesMax / buffer_bytes, 1, size_t{io.depth()} + 1);
    for (size_t i = 0; i < count && !(next_.done() && i > 0); ++i) {
      reads_.push_back({AlignedBuffer(buffer_bytes), next_, 0, 0});
    }
  }

  TransferResult Run() {
    const double cpu_before = ThreadCpuSeconds();
    const TransferControl::Call call(options_.control, "read", file_.path());
    const bool registered = options_.register_file && io_.RegisterFile(file_);
    std::vector<size_t> idle;
    std::vector<std::byte*> pinned;  // what is not is pinned, page by page, for each read
    for (size_t i = 0; i < reads_.size(); ++i) {
      idle.push_back(i);
      const AlignedBuffer& buffer = reads_[i].buffer;
      if (options_.register_memory && io_.RegisterMemory(buffer.data(), buffer.bytes())) {
        pinned.push_back(buffer.data());
      }
    }
    while (result_.ok() && (!next_.done() || io_.in_flight() > 0)) {
      if (options_.control != nullptr && options_.control->cancelled()) {
        result_.status = absl::CancelledError(absl::StrCat(
            "read '", file_.path(), "': cancelled after ", result_.bytes, " bytes were verified"));
        break;
      }
      BeginWhatFits(idle);
      if (result_.ok() && io_.in_flight() > 0) {
        const BlockCompletion done = io_.Wait();
        result_.cpu_seconds += done.cpu_seconds;
        if (!done.status.ok()) {
          Fail(done.status);
          break;
        }
        BeginWhatFits(idle);
        Verify(reads_[done.tag]);
        idle.push_back(static_cast<size_t>(done.tag));
      }
    }
    io_.Drain();
    for (std::byte* const memory : pinned) {
      io_.UnregisterMemory(memory);
    }
    if (registered) {
      io_.UnregisterFile(file_);
    }
    result_.cpu_seconds += ThreadCpuSeconds() - cpu_before;
    TellBadBlocks();
    return std::move(result_);
  }

 private:
  // A run of selected blocks, in one buffer.
  struct Read {
    AlignedBuffer buffer;
    DigestBlocks first;
    uint64_t begin;  // in the file
    uint64_t end;    // of its last block
  };

  void SkipUnselected(DigestBlocks& block) const {
    while (!block.done() && !selection_.Has(block.digest())) {
      block.Next();
    }
  }

  void Fail(absl::Status status) {
    result_.status = std::move(status);
    result_.faulty = FaultySide::kSource;
  }

  // count_bad: what was found stays so, whatever ended the reading before its end.
  void TellBadBlocks() {
    if (!options_.count_bad || bad_blocks_ == 0) {
      return;
    }
    std::string what(
        BadBlockError(record_, *result_.bad_block, absl::StrCat("'", file_.path(), "'")).message());
    if (bad_blocks_ > 1) {
      absl::StrAppend(&what, "; ", bad_blocks_ - 1, " more such blocks");
    }
    if (!result_.ok()) {
      absl::StrAppend(&what, "; and then: ", result_.status.message());
    }
    Fail(absl::DataLossError(what));
  }

  void BeginWhatFits(std::vector<size_t>& idle) {
    while (result_.ok() && !next_.done() && !idle.empty() && io_.in_flight() < io_.depth()) {
      Begin(idle.back());
      idle.pop_back();
    }
  }

  void Begin(size_t index) {
    Read& read = reads_[index];
    read.first = next_;
    read.begin = next_.offset() / options_.alignment * options_.alignment;
    do {
      read.end = next_.end();
      next_.Next();
    } while (!next_.done() && next_.offset() == read.end && selection_.Has(next_.digest()) &&
             next_.end() - read.first.offset() <= read_bytes_max_);
    SkipUnselected(next_);
    const auto wanted = static_cast<size_t>(read.end - read.begin);
    const auto bytes = static_cast<size_t>(RoundUp(wanted, options_.alignment));
    if (options_.pacer != nullptr && !options_.pacer->Acquire(bytes, options_.control)) {
      result_.status = absl::CancelledError(absl::StrCat("read '", file_.path(), "': cancelled"));
      return;
    }
    absl::Status submitted = io_.Submit({BlockOp::kRead, &file_, read.begin, read.buffer.data(),
                                         bytes, index, bytes == wanted ? 0 : wanted});
    if (!submitted.ok()) {
      Fail(std::move(submitted));
    }
  }

  void Verify(const Read& read) {
    for (DigestBlocks block = read.first; !block.done() && block.end() <= read.end; block.Next()) {
      const uint64_t digest =
          Crc64(read.buffer.data() + (block.offset() - read.begin), block.bytes());
      if (std::optional<BadBlock> bad = CompareBlock(record_, block, digest)) {
        if (options_.count_bad) {
          if (++bad_blocks_ == 1 || bad->image_offset < result_.bad_block->image_offset) {
            result_.bad_block = std::move(bad);
          }
          continue;
        }
        Fail(BadBlockError(record_, *bad, absl::StrCat("'", file_.path(), "'")));
        result_.bad_block = std::move(bad);
        return;
      }
      result_.bytes += block.bytes();
    }
    if (options_.control != nullptr) {
      options_.control->Advance(read.end - read.first.offset());
    }
  }

  BlockIo& io_;
  File& file_;
  const ShardRecord& record_;
  const DirectCopyOptions& options_;
  const Selection selection_;
  DigestBlocks next_;
  const size_t read_bytes_max_;
  std::vector<Read> reads_;
  uint64_t bad_blocks_ = 0;  // count_bad
  TransferResult result_;
};

}  // namespace

TransferResult VerifyFile(BlockIo& io, File& file, const ShardRecord& record, const Layout& layout,
                          ReadBack how, const DirectCopyOptions& options) {
  TransferResult result;
  result.status = CheckDirectCopy(record, layout, options);
  if (!result.ok()) {
    return result;
  }
  return FileCheck(io, file, record, layout, how, options).Run();
}

}  // namespace holdfast
