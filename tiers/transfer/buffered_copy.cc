// How a piece is copied through a buffer: CopyOperation.
#include "tiers/transfer/buffered_copy.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/copy.h"
#include "base/digest.h"
#include "base/fault_guard.h"
#include "base/status.h"
#include "base/units.h"
#include "tiers/transfer/copy_operation.h"

namespace holdfast {
namespace {

// Copied and then digested from the first-level cache; streaming past the caches, as base/copy.h
// does, would make the write that follows fetch it all again.
constexpr size_t kCachedBytes = 16 * 1024;

uint64_t CopyCachedAndDigest(std::byte* to, const std::byte* from, size_t bytes, uint64_t crc) {
  for (size_t at = 0; at < bytes; at += kCachedBytes) {
    const size_t now = std::min(kCachedBytes, bytes - at);
    std::memcpy(to + at, from + at, now);
    crc = Crc64(to + at, now, crc);
  }
  return crc;
}

absl::Status CheckInMemory(const BufferedCopySpec& spec, const ImageMap& map,
                           const RevocableMemory* memory) {
  bool fits = memory != nullptr && map.image_bytes == spec.image->record.image_bytes;
  uint64_t next = map.header.size();
  for (const ImageRun& run : map.runs) {
    fits = fits && run.offset == next && run.source == 0 && run.source_offset <= memory->bytes() &&
           run.bytes <= memory->bytes() - run.source_offset;
    next += run.bytes;
  }
  return fits && next == map.image_bytes
             ? absl::OkStatus()
             : absl::InvalidArgumentError(absl::StrCat("copy of ", spec.image->record.id.ToString(),
                                                       ": a part of it has no place in memory"));
}

bool IsPowerOfTwo(uint32_t value) {
  return value != 0 && (value & (value - 1)) == 0;
}

}  // namespace

// The digests of one piece's bytes, which come in order: blocks within the piece are compared here,
// those that its edges cut are put together with the neighbours' parts.
class CopyOperation::PieceDigests {
 public:
  PieceDigests(CopyOperation& operation, const Piece& piece)
      : operation_(operation),
        block_(piece.first_block),
        piece_end_(piece.offset + piece.bytes),
        run_begin_(piece.offset) {}

  // `digest(at, n, crc)`: of n bytes, `at` bytes into this part, after others with digest `crc`.
  template <typename Digest>
  void Feed(uint64_t offset, size_t bytes, Digest digest) {
    const uint64_t end = offset + bytes;
    for (uint64_t at = offset; at < end;) {
      const uint64_t run_end = std::min(block_.end(), piece_end_);
      const uint64_t now = std::min(run_end, end) - at;
      run_crc_ = digest(static_cast<size_t>(at - offset), static_cast<size_t>(now), run_crc_);
      at += now;
      if (at == run_end) {
        EndRun(run_end);
      }
    }
  }

 private:
  void EndRun(uint64_t run_end) {
    const auto run_bytes = static_cast<size_t>(run_end - run_begin_);
    if (run_bytes == block_.bytes()) {
      operation_.BlockDone(block_, run_crc_);
    } else if (const std::optional<uint64_t> whole =
                   operation_.split_blocks_.Add(block_, run_begin_, run_bytes, run_crc_)) {
      operation_.BlockDone(block_, *whole);
    }
    run_begin_ = run_end;
    run_crc_ = 0;
    if (run_end == block_.end()) {
      block_.Next();
    }
  }

  CopyOperation& operation_;
  DigestBlocks block_;
  const uint64_t piece_end_;
  uint64_t run_begin_;  // of the bytes of block_ that were seen
  uint64_t run_crc_ = 0;
};

CopyOperation::CopyOperation(BufferedCopySpec spec, size_t piece_bytes)
    : spec_(std::move(spec)),
      image_bytes_(spec_.image->record.image_bytes),
      piece_bytes_(static_cast<size_t>(RoundUp(piece_bytes, spec_.piece_unit))),
      next_block_(spec_.image->layout) {}

absl::Status CopyOperation::Check(const BufferedCopySpec& spec, size_t piece_bytes) {
  if ((spec.from_memory != nullptr) == (spec.from_file != nullptr) ||
      (spec.to_memory != nullptr) == (spec.to_file != nullptr) ||
      (spec.from_memory != nullptr && spec.to_memory != nullptr) || spec.image == nullptr) {
    return absl::InvalidArgumentError(
        "copy: wants one source, one destination, one of them a "
        "file, and an image");
  }
  const ShardRecord& record = spec.image->record;
  if (spec.piece_unit == 0 || kChunkBytes % spec.piece_unit != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("copy: pieces of a multiple of ", spec.piece_unit, " bytes"));
  }
  HF_RETURN_IF_ERROR(CheckIsLayoutOf(record, spec.image->layout));
  if (spec.gather != nullptr) {
    HF_RETURN_IF_ERROR(CheckInMemory(spec, *spec.gather, spec.from_memory.get()));
  }
  if (spec.scatter != nullptr) {
    HF_RETURN_IF_ERROR(CheckInMemory(spec, *spec.scatter, spec.to_memory.get()));
  }
  for (const RevocableMemory* memory : {spec.from_memory.get(), spec.to_memory.get()}) {
    if (memory != nullptr && memory->bytes() < record.image_bytes && spec.gather == nullptr &&
        spec.scatter == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("copy of ", record.id.ToString(), ": ", memory->bytes(),
                       " bytes of memory for an image of ", record.image_bytes));
    }
  }
  for (const uint32_t alignment : {spec.from_alignment, spec.to_alignment}) {
    if (!IsPowerOfTwo(alignment) || alignment > kBufferedAlignmentMax ||
        piece_bytes % alignment != 0) {
      return absl::InvalidArgumentError(absl::StrCat("copy: an alignment of ", alignment,
                                                     " for pieces of ", piece_bytes, " bytes"));
    }
  }
  return absl::OkStatus();
}

bool CopyOperation::may_begin() const {
  return under_way_.empty() ||
         ((spec_.threads_max == 0 || under_way_.size() < spec_.threads_max) &&
          (spec_.ahead_max == 0 || next_offset_ - *under_way_.begin() < spec_.ahead_max));
}

CopyOperation::Piece CopyOperation::TakePiece() {
  Piece piece{next_offset_, std::min<uint64_t>(piece_bytes_, image_bytes_ - next_offset_),
              next_block_};
  under_way_.insert(piece.offset);
  next_offset_ += piece.bytes;
  while (!next_block_.done() && next_block_.end() <= next_offset_) {
    next_block_.Next();
  }
  return piece;
}

void CopyOperation::CopyPiece(const Piece& piece, AlignedBuffer& bounce, CallWatcher& watcher) {
  const double cpu_before = ThreadCpuSeconds();
  PieceDigests digests(*this, piece);
  uint64_t done = 0;
  while (done < piece.bytes && !Over()) {
    const auto chunk = static_cast<size_t>(std::min<uint64_t>(kChunkBytes, piece.bytes - done));
    if (!CopyChunk(piece.offset + done, chunk, bounce, watcher, digests)) {
      break;
    }
    done += chunk;
    if (spec_.control != nullptr) {
      spec_.control->Advance(chunk);
    }
  }
  MutexLock lock(mutex_);
  result_.bytes += done;
  result_.cpu_seconds += ThreadCpuSeconds() - cpu_before;
}

bool CopyOperation::CopyChunk(uint64_t offset, size_t bytes, AlignedBuffer& bounce,
                              CallWatcher& watcher, PieceDigests& digests) {
  if (spec_.pacer != nullptr && !spec_.pacer->Acquire(bytes, spec_.control.get())) {
    FailCancelled();  // here: there may be no other piece whose turn would say so
    return false;
  }
  std::byte* const buffer = bounce.data();
  if (spec_.from_memory != nullptr) {
    return FillFromMemory(offset, bytes, buffer, digests) &&
           DrainToFile(offset, bytes, buffer, watcher);
  }
  if (!FillFromFile(offset, bytes, buffer, watcher)) {
    return false;
  }
  if (spec_.to_memory != nullptr) {
    return DrainToMemory(offset, bytes, buffer, digests);
  }
  digests.Feed(offset, bytes,
               [buffer](size_t at, size_t n, uint64_t crc) { return Crc64(buffer + at, n, crc); });
  return !Over() && DrainToFile(offset, bytes, buffer, watcher);
}

bool CopyOperation::FillFromMemory(uint64_t offset, size_t bytes, std::byte* bounce,
                                   PieceDigests& digests) {
  // `bytes` of the image at `offset`, which lie at `from` in the slot.
  const auto fill = [&](uint64_t at, size_t n, uint64_t from) {
    std::byte* const to = bounce + (at - offset);
    return WithMemory(*spec_.from_memory, FaultySide::kSource, from, n,
                      [&](const std::byte* memory) {
                        digests.Feed(at, n, [&](size_t part, size_t length, uint64_t crc) {
                          return CopyCachedAndDigest(to + part, memory + part, length, crc);
                        });
                      });
  };
  if (spec_.gather == nullptr) {
    return fill(offset, bytes, offset) && !Over();
  }
  const auto gather = [&](uint64_t at, uint64_t n, std::optional<uint32_t> source, uint64_t from) {
    if (source) {
      return fill(at, static_cast<size_t>(n), from);
    }
    const auto* const header =
        reinterpret_cast<const std::byte*>(spec_.gather->header.data()) + from;
    std::byte* const to = bounce + (at - offset);
    digests.Feed(at, static_cast<size_t>(n), [&](size_t part, size_t length, uint64_t crc) {
      return CopyCachedAndDigest(to + part, header + part, length, crc);
    });
    return true;
  };
  return spec_.gather->ForEach(offset, bytes, gather) && !Over();
}

bool CopyOperation::FillFromFile(uint64_t offset, size_t bytes, std::byte* bounce,
                                 CallWatcher& watcher) {
  File& file = *spec_.from_file;
  const auto aligned = static_cast<size_t>(RoundUp(bytes, spec_.from_alignment));
  watcher.Begin("read", file.path());
  absl::Status read = ReadAtLeast(file, offset, {bounce, aligned}, aligned == bytes ? 0 : bytes);
  watcher.End();
  if (!read.ok()) {
    Fail(std::move(read), FaultySide::kSource);
    return false;
  }
  return true;
}

bool CopyOperation::DrainToMemory(uint64_t offset, size_t bytes, const std::byte* bounce,
                                  PieceDigests& digests) {
  // `bytes` of the image at `offset`, which go to `to` in the slot.
  const auto drain = [&](uint64_t at, size_t n, uint64_t to) {
    const std::byte* const from = bounce + (at - offset);
    return WithMemory(*spec_.to_memory, FaultySide::kDestination, to, n, [&](std::byte* memory) {
      digests.Feed(at, n, [&](size_t begin, size_t length, uint64_t crc) {
        const uint64_t part = CopyAndDigest(memory + begin, from + begin, length);
        return crc == 0 ? part : Crc64Combine(crc, part, length);
      });
    });
  };
  const auto scatter = [&](uint64_t at, uint64_t n, std::optional<uint32_t> source, uint64_t to) {
    if (source) {
      return drain(at, static_cast<size_t>(n), to);
    }
    const std::byte* const from = bounce + (at - offset);
    digests.Feed(at, static_cast<size_t>(n), [from](size_t begin, size_t length, uint64_t crc) {
      return Crc64(from + begin, length, crc);
    });
    return true;
  };
  const bool drained = spec_.scatter == nullptr ? drain(offset, bytes, offset)
                                                : spec_.scatter->ForEach(offset, bytes, scatter);
  if (drained && spec_.arrived) {
    spec_.arrived(offset, bytes);
  }
  return drained && !Over();
}

bool CopyOperation::DrainToFile(uint64_t offset, size_t bytes, std::byte* bounce,
                                CallWatcher& watcher) {
  File& file = *spec_.to_file;
  const auto aligned = static_cast<size_t>(RoundUp(bytes, spec_.to_alignment));
  std::memset(bounce + bytes, 0, aligned - bytes);
  watcher.Begin("write", file.path());
  absl::Status written = file.WriteAt(offset, {bounce, aligned});
  watcher.End();
  if (!written.ok()) {
    Fail(std::move(written), FaultySide::kDestination);
    return false;
  }
  return true;
}

bool CopyOperation::WithMemory(RevocableMemory& memory, FaultySide side, uint64_t offset,
                               size_t bytes, const std::function<void(std::byte*)>& copy) {
  const RevocableMemory::Access access = memory.Enter();
  if (!access) {
    Fail(absl::CancelledError(absl::StrCat("copy of ", spec_.image->record.id.ToString(),
                                           ": its slot was taken back")),
         FaultySide::kNone);
    return false;
  }
  std::byte* const data = access.data() + offset;
  const FaultGuard guard(data, bytes);
  if (!guard.ok()) {
    Fail(absl::ResourceExhaustedError("copy: too many guarded mappings"), FaultySide::kNone);
    return false;
  }
  copy(data);
  if (guard.faulted()) {
    FailCutShort(side);
    return false;
  }
  return true;
}

// Said also when the zeros in place of what is gone were already found to be wrong.
void CopyOperation::FailCutShort(FaultySide side) {
  MutexLock lock(mutex_);
  if (result_.status.ok() || result_.bad_block.has_value()) {
    result_.status = absl::DataLossError(absl::StrCat("copy of ", spec_.image->record.id.ToString(),
                                                      ": its slot was cut short while it was in "
                                                      "use"));
    result_.faulty = side;
    result_.bad_block.reset();
  }
  over_.store(true, std::memory_order_release);
}

void CopyOperation::BlockDone(const DigestBlocks& block, uint64_t digest) {
  const ShardRecord& record = spec_.image->record;
  std::optional<BadBlock> bad = CompareBlock(record, block, digest);
  if (!bad.has_value()) {
    return;
  }
  const std::string source =
      spec_.source_name            ? absl::StrCat("'", spec_.source_name(block.offset()), "'")
      : spec_.from_file != nullptr ? absl::StrCat("'", spec_.from_file->path(), "'")
                                   : "memory";
  MutexLock lock(mutex_);
  if (result_.status.ok()) {
    result_.status = BadBlockError(record, *bad, source);
    result_.faulty = FaultySide::kSource;
    result_.bad_block = std::move(bad);
  }
  over_.store(true, std::memory_order_release);
}

bool CopyOperation::Over() {
  if (spec_.control != nullptr && spec_.control->cancelled()) {
    FailCancelled();
  }
  return over_.load(std::memory_order_acquire);
}

void CopyOperation::FailCancelled() {
  Fail(absl::CancelledError(
           absl::StrCat("copy of ", spec_.image->record.id.ToString(), ": cancelled")),
       FaultySide::kNone);
}

// Only the first failure counts.
void CopyOperation::Fail(absl::Status status, FaultySide faulty) {
  MutexLock lock(mutex_);
  if (result_.status.ok()) {
    result_.status = std::move(status);
    result_.faulty = faulty;
  }
  over_.store(true, std::memory_order_release);
}

TransferResult CopyOperation::result() const {
  MutexLock lock(mutex_);
  return result_;
}

}  // namespace holdfast
