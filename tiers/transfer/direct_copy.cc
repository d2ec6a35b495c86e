#include "tiers/transfer/direct_copy.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/fault_guard.h"
#include "base/status.h"
#include "base/units.h"
#include "tiers/transfer/digest_blocks.h"
#include "tiers/transfer/direct_copy_checks.h"
#include "tiers/transfer/file_pieces.h"

namespace holdfast {
namespace {

// Mappings begin at pages; no device wants more of memory than that.
constexpr uint64_t kMemoryAlignmentMax = 4096;
constexpr uint32_t kAlignmentMax = uint32_t{1} << 20;
// Verified in one go, before the ring is looked at again.
constexpr uint64_t kVerifyBytes = kDigestBlockBytes;

// One image on its way, in one direction. Run once.
class DirectCopy {
 public:
  DirectCopy(BlockOp op, BlockIo& io, std::span<std::byte> image, File& file,
             const ShardRecord& record, const Layout& layout, const DirectCopyOptions& options)
      : op_(op),
        io_(io),
        image_(image),
        file_(file),
        record_(record),
        options_(options),
        whole_bytes_(record.image_bytes / options.alignment * options.alignment),
        pieces_(static_cast<size_t>((record.image_bytes + options.piece_bytes - 1) /
                                    options.piece_bytes)),
        to_verify_(layout),
        arrived_(pieces_ + 1) {}

  TransferResult Run() {
    const double cpu_before = ThreadCpuSeconds();
    const TransferControl::Call call(options_.control, op_ == BlockOp::kWrite ? "write" : "read",
                                     file_.path());
    {
      const FaultGuard guard(image_.data(), static_cast<size_t>(record_.image_bytes));
      guard_ = &guard;
      if (!guard.ok()) {
        Fail(absl::ResourceExhaustedError("transfer: too many guarded mappings"),
             FaultySide::kNone);
      }
      const bool file_registered = options_.register_file && io_.RegisterFile(file_);
      const bool memory_registered =
          options_.register_memory &&
          io_.RegisterMemory(image_.data(), RoundUp(record_.image_bytes, kMemoryAlignmentMax));
      MovePieces();
      io_.Drain();
      if (memory_registered) {
        io_.UnregisterMemory(image_.data());
      }
      if (file_registered) {
        io_.UnregisterFile(file_);
      }
      guard_ = nullptr;
    }
    result_.cpu_seconds += ThreadCpuSeconds() - cpu_before;
    return std::move(result_);
  }

 private:
  struct Range {
    uint64_t offset;
    size_t bytes;
  };

  FaultySide MemorySide() const {
    return op_ == BlockOp::kWrite ? FaultySide::kSource : FaultySide::kDestination;
  }
  FaultySide FileSide() const {
    return op_ == BlockOp::kWrite ? FaultySide::kDestination : FaultySide::kSource;
  }

  // Only the first failure counts: the others follow from it.
  void Fail(absl::Status status, FaultySide faulty) {
    if (result_.status.ok()) {
      result_.status = std::move(status);
      result_.faulty = faulty;
    }
  }

  void FailCancelled() {
    Fail(absl::CancelledError(absl::StrCat(op_ == BlockOp::kWrite ? "write '" : "read '",
                                           file_.path(), "': cancelled after ", result_.bytes,
                                           " of ", record_.image_bytes, " bytes")),
         FaultySide::kNone);
  }

  void MovePieces() {
    size_t next = 0;
    while (result_.ok()) {
      if (options_.control != nullptr && options_.control->cancelled()) {
        return FailCancelled();
      }
      // 1. What has come in; 2. new pieces in its place; 3. only then the digests, a little at a
      // time.
      while (std::optional<BlockCompletion> done = io_.Poll()) {
        Arrived(*done);
      }
      while (result_.ok() && next <= pieces_ && io_.in_flight() < io_.depth()) {
        Begin(next++);
      }
      if (!result_.ok() || VerifySome()) {
        continue;
      }
      if (io_.in_flight() == 0) {
        if (next <= pieces_) {
          continue;
        }
        if (!to_verify_.done()) {
          Fail(absl::InternalError("transfer: bytes that no piece brought"), FaultySide::kNone);
        }
        return;
      }
      Arrived(io_.Wait());
    }
  }

  // Piece pieces_ is the tail: the part of the last block that no direct I/O moves by itself.
  Range RangeOf(size_t piece) const {
    if (piece == pieces_) {
      return {whole_bytes_, static_cast<size_t>(record_.image_bytes - whole_bytes_)};
    }
    const uint64_t offset = uint64_t{piece} * options_.piece_bytes;
    return {offset, offset >= whole_bytes_ ? 0
                                           : static_cast<size_t>(std::min<uint64_t>(
                                                 options_.piece_bytes, whole_bytes_ - offset))};
  }

  void Begin(size_t piece) {
    const Range range = RangeOf(piece);
    if (range.bytes == 0) {
      arrived_[piece] = true;
      return;
    }
    if (options_.pacer != nullptr && !options_.pacer->Acquire(range.bytes, options_.control)) {
      return FailCancelled();
    }
    BlockRequest request{op_,         &file_, range.offset, image_.data() + range.offset,
                         range.bytes, piece};
    if (piece == pieces_) {
      // The file's last block holds nothing but this image and zeros.
      tail_.emplace(options_.alignment);
      std::memset(tail_->data(), 0, options_.alignment);
      if (op_ == BlockOp::kWrite) {
        std::memcpy(tail_->data(), image_.data() + range.offset, range.bytes);
      }
      request.memory = tail_->data();
      request.bytes = options_.alignment;
      request.bytes_min = op_ == BlockOp::kRead ? range.bytes : 0;
    }
    if (absl::Status submitted = io_.Submit(request); !submitted.ok()) {
      Fail(std::move(submitted), FileSide());
    }
  }

  void Arrived(const BlockCompletion& done) {
    result_.cpu_seconds += done.cpu_seconds;
    const auto piece = static_cast<size_t>(done.tag);
    const Range range = RangeOf(piece);
    if (!done.status.ok()) {
      if (MappingCutShort(range)) {
        FailCutShort();
      } else {
        Fail(done.status, FileSide());
      }
      return;
    }
    if (op_ == BlockOp::kRead && piece == pieces_) {
      std::memcpy(image_.data() + range.offset, tail_->data(), range.bytes);
    }
    arrived_[piece] = true;
    if (options_.control != nullptr) {
      options_.control->Advance(range.bytes);
    }
  }

  // The next blocks all of whose bytes have arrived, about kVerifyBytes of them. False when there
  // were none.
  bool VerifySome() {
    while (arrived_pieces_ < arrived_.size() && arrived_[arrived_pieces_]) {
      const Range range = RangeOf(arrived_pieces_++);
      arrived_bytes_ += range.bytes;
    }
    uint64_t verified = 0;
    while (verified < kVerifyBytes && !to_verify_.done() && to_verify_.end() <= arrived_bytes_) {
      const uint64_t digest = Crc64(image_.data() + to_verify_.offset(), to_verify_.bytes());
      if (guard_->faulted()) {
        FailCutShort();
        return true;
      }
      if (std::optional<BadBlock> bad = CompareBlock(record_, to_verify_, digest)) {
        const bool memory_is_bad = op_ == BlockOp::kWrite;
        Fail(BadBlockError(record_, *bad, memory_is_bad ? "memory" : Quoted()),
             FaultySide::kSource);
        result_.bad_block = std::move(bad);
        return true;
      }
      verified += to_verify_.bytes();
      result_.bytes = to_verify_.end();
      to_verify_.Next();
    }
    return verified > 0;
  }

  // An I/O error may be the mapping's: the kernel could not reach its pages. Touching them tells.
  bool MappingCutShort(const Range& range) const {
    for (uint64_t at = 0; at < range.bytes && !guard_->faulted(); at += kMemoryAlignmentMax) {
      static_cast<void>(*static_cast<volatile std::byte*>(image_.data() + range.offset + at));
    }
    return guard_->faulted();
  }

  void FailCutShort() {
    Fail(absl::DataLossError(absl::StrCat(
             "transfer of ", record_.id.ToString(),
             ": its slot was cut short while it was in use (the other side is ", Quoted(), ")")),
         MemorySide());
  }

  std::string Quoted() const { return absl::StrCat("'", file_.path(), "'"); }

  const BlockOp op_;
  BlockIo& io_;
  const std::span<std::byte> image_;
  File& file_;
  const ShardRecord& record_;
  const DirectCopyOptions& options_;
  const uint64_t whole_bytes_;  // of the image, in whole blocks of the file system
  const size_t pieces_;         // and the tail
  DigestBlocks to_verify_;
  std::vector<bool> arrived_;  // by piece
  size_t arrived_pieces_ = 0;  // without a gap from the beginning
  uint64_t arrived_bytes_ = 0;
  std::optional<AlignedBuffer> tail_;
  const FaultGuard* guard_ = nullptr;
  TransferResult result_;
};

TransferResult Refused(absl::Status status, FaultySide faulty = FaultySide::kNone) {
  TransferResult result;
  result.status = std::move(status);
  result.faulty = faulty;
  return result;
}

absl::Status CheckMemory(std::span<std::byte> image, const ShardRecord& record,
                         const DirectCopyOptions& options) {
  const uint64_t alignment = std::min<uint64_t>(options.alignment, kMemoryAlignmentMax);
  if (image.size() < record.image_bytes ||
      reinterpret_cast<uintptr_t>(image.data()) % alignment != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "transfer of ", record.id.ToString(), ": ", image.size(), " bytes of memory, aligned to ",
        alignment, ", cannot hold ", record.image_bytes, " bytes"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckDirectCopy(const ShardRecord& record, const Layout& layout,
                             const DirectCopyOptions& options) {
  HF_RETURN_IF_ERROR(CheckIsLayoutOf(record, layout));
  const uint32_t alignment = options.alignment;
  if (alignment == 0 || alignment > kAlignmentMax || (alignment & (alignment - 1)) != 0 ||
      options.piece_bytes < kPieceBytesMin || options.piece_bytes > kPieceBytesMax ||
      options.piece_bytes % std::max<uint64_t>(alignment, kMemoryAlignmentMax) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("transfer: pieces of ", options.piece_bytes,
                                                   " bytes aligned to ", alignment,
                                                   ": not to be had"));
  }
  return absl::OkStatus();
}

TransferResult WriteImage(BlockIo& io, std::span<std::byte> image, File& file,
                          const ShardRecord& record, const Layout& layout,
                          const DirectCopyOptions& options) {
  absl::Status check = CheckDirectCopy(record, layout, options);
  if (check.ok()) {
    check = CheckMemory(image, record, options);
  }
  if (!check.ok()) {
    return Refused(std::move(check));
  }
  return DirectCopy(BlockOp::kWrite, io, image, file, record, layout, options).Run();
}

TransferResult ReadImage(BlockIo& io, File& file, std::span<std::byte> image,
                         const ShardRecord& record, const Layout& layout,
                         const DirectCopyOptions& options) {
  absl::Status check = CheckDirectCopy(record, layout, options);
  if (check.ok()) {
    check = CheckMemory(image, record, options);
  }
  if (!check.ok()) {
    return Refused(std::move(check));
  }
  const absl::StatusOr<FileInfo> info = file.Info();
  if (!info.ok()) {
    return Refused(info.status(), FaultySide::kSource);
  }
  if (info->bytes != record.image_bytes) {
    return Refused(absl::DataLossError(absl::StrCat(
                       "read '", file.path(), "': it is of ", info->bytes, " bytes, the record of ",
                       record.id.ToString(), " says ", record.image_bytes)),
                   FaultySide::kSource);
  }
  return DirectCopy(BlockOp::kRead, io, image, file, record, layout, options).Run();
}

}  // namespace holdfast
