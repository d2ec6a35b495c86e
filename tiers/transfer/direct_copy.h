// Images between a slot's mapping and a file on a local drive, without a copy in between: pieces go
// straight from or to the mapping, and every digest block is compared with the record by the same
// thread while other pieces are under way.
//
//   HF_ASSIGN_OR_RETURN(DirectAlignment direct, file->Alignment());
//   DirectCopyOptions options{.alignment = std::max(direct.memory_bytes, direct.offset_bytes)};
//   TransferResult result = WriteImage(*io, memory, *file, record, layout, options);
//   // result.status OK: every byte was written, and every block of memory was good after that.
//   file->Truncate(record.image_bytes); file->SyncData(); …      // the caller's
//
// Plain functions that block; the thread is the one that owns `io`, which must have nothing in
// flight and has nothing in flight afterwards, whatever happens. Memory stays mapped until they
// return; that its file is cut short meanwhile is an error (FaultGuard), never SIGBUS.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/env.h"
#include "tiers/image/record.h"
#include "tiers/transfer/block_io.h"
#include "tiers/transfer/pacer.h"
#include "tiers/transfer/transfer_control.h"
#include "tiers/transfer/transfer_result.h"

namespace holdfast {

// kSample: sampled_blocks.h.
enum class ReadBack : uint8_t { kSample, kAll };

inline constexpr size_t kPieceBytesMin = size_t{64} << 10;
inline constexpr size_t kPieceBytesMax = size_t{16} << 20;

struct DirectCopyOptions {
  size_t piece_bytes = size_t{4} << 20;  // a multiple of `alignment`, of pages too
  // Of offsets, lengths and memory, a power of two up to 1 MiB (File::Alignment); 1: the file is
  // not open for direct I/O.
  uint32_t alignment = 1;
  // Registers file and memory for as long as it takes, where they are not yet and it is allowed.
  bool register_file = true;
  bool register_memory = true;
  uint64_t sample_seed = 0;  // VerifyFile: which blocks a sample has
  // What a read of the file brings begins and ends at multiples of it: frames of a compressed one.
  // 0: of `alignment`.
  uint32_t sample_unit = 0;
  // VerifyFile: goes on behind a bad block, to tell how many there are.
  bool count_bad = false;
  Pacer* pacer = nullptr;
  TransferControl* control = nullptr;
};

// Writes image_bytes rounded up to the alignment; what lies behind the image is zeros. The file is
// allocated or overwritten, truncated and synced by the caller.
// kSource: a block contradicts the record (DataLoss, bad_block), or the mapping was cut short
// (DataLoss). kDestination: the file's error. What was written is read back by VerifyFile, when the
// file has been synced.
TransferResult WriteImage(BlockIo& io, std::span<std::byte> image, File& file,
                          const ShardRecord& record, const Layout& layout,
                          const DirectCopyOptions& options);

// The same backwards: `image` is a writable mapping of at least image_bytes; nothing behind that is
// written. The file must be of image_bytes exactly. kSource: the file's error, length or content.
// kDestination: the mapping was cut short (DataLoss).
TransferResult ReadImage(BlockIo& io, File& file, std::span<std::byte> image,
                         const ShardRecord& record, const Layout& layout,
                         const DirectCopyOptions& options);

// Compares a file with its record, through buffers of its own (depth × piece_bytes, at most 32
// MiB). `how`: kAll or kSample as above. A bad block is kSource. Files longer than the image are
// fine (one that is not truncated yet).
TransferResult VerifyFile(BlockIo& io, File& file, const ShardRecord& record, const Layout& layout,
                          ReadBack how, const DirectCopyOptions& options);

}  // namespace holdfast
