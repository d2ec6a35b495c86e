// One image on its way through a CopyPool, piece by piece. Internal to tiers/transfer/.
//
// The pool says which thread copies which piece when; this says how, and what became of it.
// Thread-safe, but for TakePiece, EndPiece and may_begin, whose calls the pool orders.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>

#include "base/mutex.h"
#include "tiers/transfer/buffered_copy.h"
#include "tiers/transfer/digest_blocks.h"
#include "tiers/transfer/file_pieces.h"

namespace holdfast {

// What goes through a thread's buffer at once: it stays in the cache between being digested and
// being written.
inline constexpr size_t kChunkBytes = size_t{1} << 20;
inline constexpr uint32_t kBufferedAlignmentMax = uint32_t{1} << 16;
inline constexpr size_t kBounceBytes = kChunkBytes + kBufferedAlignmentMax;

// Told when a call that may hang begins and ends.
class CallWatcher {
 public:
  virtual ~CallWatcher() = default;
  virtual void Begin(const char* operation, const std::string& path) = 0;
  virtual void End() = 0;
};

class CopyOperation {
 public:
  CopyOperation(BufferedCopySpec spec, size_t piece_bytes);

  static absl::Status Check(const BufferedCopySpec& spec, size_t piece_bytes);

  struct Piece {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    DigestBlocks first_block;  // the one that holds the piece's first byte
  };
  bool has_pieces() const { return next_offset_ < image_bytes_; }
  // Whether the next piece may begin: neither too many are under way, nor is it too far ahead of
  // the first of them.
  bool may_begin() const;
  Piece TakePiece();
  void EndPiece(const Piece& piece) { under_way_.erase(piece.offset); }

  // In a pool's thread, through its buffer of kBounceBytes.
  void CopyPiece(const Piece& piece, AlignedBuffer& bounce, CallWatcher& watcher);

  // Notices a cancellation. True when no further piece is worth beginning.
  bool Over();
  void Fail(absl::Status status, FaultySide faulty) EXCLUDES(mutex_);
  TransferResult result() const EXCLUDES(mutex_);
  const BufferedCopySpec& spec() const { return spec_; }

 private:
  class PieceDigests;

  bool CopyChunk(uint64_t offset, size_t bytes, AlignedBuffer& bounce, CallWatcher& watcher,
                 PieceDigests& digests);
  bool FillFromMemory(uint64_t offset, size_t bytes, std::byte* bounce, PieceDigests& digests);
  bool FillFromFile(uint64_t offset, size_t bytes, std::byte* bounce, CallWatcher& watcher);
  bool DrainToMemory(uint64_t offset, size_t bytes, const std::byte* bounce, PieceDigests& digests);
  bool DrainToFile(uint64_t offset, size_t bytes, std::byte* bounce, CallWatcher& watcher);
  // Runs `copy` with the slot's bytes from `offset` on; false when they were taken back or cut
  // short.
  bool WithMemory(RevocableMemory& memory, FaultySide side, uint64_t offset, size_t bytes,
                  const std::function<void(std::byte*)>& copy);
  void FailCutShort(FaultySide side) EXCLUDES(mutex_);
  void FailCancelled() EXCLUDES(mutex_);
  void BlockDone(const DigestBlocks& block, uint64_t digest) EXCLUDES(mutex_);

  const BufferedCopySpec spec_;
  const uint64_t image_bytes_;
  const size_t piece_bytes_;
  // Of TakePiece and EndPiece.
  uint64_t next_offset_ = 0;
  DigestBlocks next_block_;
  std::set<uint64_t> under_way_;  // offsets
  SplitBlocks split_blocks_;
  std::atomic<bool> over_{false};
  mutable Mutex mutex_;
  TransferResult result_ GUARDED_BY(mutex_);
};

}  // namespace holdfast
