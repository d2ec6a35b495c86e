// The record beside every copy (docs/formats.md, "Record"), and verification of an image against
// it.
//
//   const std::string file = EncodeRecord(record);            // what lies beside the image
//   HF_ASSIGN_OR_RETURN(ShardRecord record, DecodeRecord(file));
//
// Plain functions, thread-safe; the caller owns what it gets. Encoding and decoding here use no
// protobuf runtime; a test proves them wire-compatible with proto/holdfast/v1/record.proto.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/ids.h"
#include "tiers/image/layout.h"

namespace holdfast {

// `attempt` restored `parent`; parent.attempt 0: it began from nothing.
struct Descent {
  Attempt attempt = 0;
  CheckpointId parent;
  bool operator==(const Descent&) const = default;
};

// Which shards hold the same tensors with the same bytes, so that their copies in the remote tier
// can share them (docs/formats.md, "Ownership of identical slices"). All zero: not known.
struct Likeness {
  LayoutHash tensors{};  // of the tensor slices: names, dtypes, shapes, places
  LayoutHash content{};  // of that, and of their digests
  bool any() const { return content != LayoutHash{}; }
  bool operator==(const Likeness&) const = default;
};

// What the file beside a record has of the shard's image, where that leaves slices out that other
// ranks' files have (docs/formats.md, "Images that leave slices out"; tiers/image/kept.h).
struct KeptSlices {
  uint64_t image_bytes = 0;   // of the file
  uint64_t header_bytes = 0;  // of the file
  std::vector<uint64_t> header_digests;
  std::vector<uint64_t> runs;  // so many slices kept, so many left out, so many kept, …
  std::vector<Rank> owners;    // of each slice that is left out, in order: whose file has it
  LayoutHash plan{};           // PlanHash: among whom the slices were given out
  bool operator==(const KeptSlices&) const = default;
};

struct ShardRecord {
  ShardId id;
  std::string job_name;
  uint32_t world_size = 0;
  Generation generation = 0;
  uint64_t image_bytes = 0;
  uint64_t header_bytes = 0;
  LayoutHash layout_hash{};
  std::string layout_bytes;
  std::vector<uint64_t> digests;  // header's blocks, then each slice's in layout order
  std::vector<Descent> descent;   // youngest first
  int64_t sealed_unix_ms = 0;
  // Lengths, layout and digests above are of the whole image in any case.
  std::optional<KeptSlices> kept;
  Likeness likeness{};  // what decoding made of layout and digests; not encoded, not compared
  bool operator==(const ShardRecord& other) const;
};

// Records are written in the oldest version that says what they have to say: 2 with `kept`, else 1.
inline constexpr uint32_t kRecordFormatVersion = 2;
inline constexpr uint64_t kRecordBytesMax = uint64_t{1} << 30;
inline constexpr size_t kDescentMax = 4096;

// The whole record file: magic, version, length, body, CRC.
std::string EncodeRecord(const ShardRecord& record);
// DataLoss: torn or damaged. FailedPrecondition: of a newer format version (the message names both
// versions). InvalidArgument: whole, but contradicts itself (layout hash, digest count, limits).
absl::StatusOr<ShardRecord> DecodeRecord(std::string_view bytes);
// The same with the layout, which is decoded to be checked in any case.
struct RecordAndLayout {
  ShardRecord record;
  Layout layout;
};
absl::StatusOr<RecordAndLayout> DecodeRecordAndLayout(std::string_view bytes);
// Only the framing and the CRC: what a daemon checks before it publishes a client's record.
absl::Status CheckRecordFraming(std::string_view bytes);

// One run of bytes of the image that digests[first_digest …] cover, block by block.
struct DigestedRange {
  uint64_t image_offset = 0;
  uint64_t bytes = 0;
  size_t first_digest = 0;
};
// Range 0 is the header, range i+1 is layout.slices[i].
std::vector<DigestedRange> DigestedRanges(const Layout& layout);
// How many digests they have together.
size_t DigestCount(const Layout& layout);

// Where an image differs from its record.
struct BadBlock {
  std::string slice;  // name, or "(header)"
  uint64_t image_offset = 0;
  uint64_t bytes = 0;
  uint64_t expected = 0;
  uint64_t actual = 0;
};

// Reads the image through `read` (offset, out) in pieces of at most 1 MiB and compares every
// digest. Returns the bad blocks found, at most `bad_max`; a failing read is the error. `progress`
// (may be null) gets bytes done; returning false cancels with CancelledError.
using ReadAtFunction = std::function<absl::Status(uint64_t, std::span<std::byte>)>;
absl::StatusOr<std::vector<BadBlock>> VerifyImage(const ShardRecord& record, const Layout& layout,
                                                  const ReadAtFunction& read, size_t bad_max,
                                                  const std::function<bool(uint64_t)>& progress);

}  // namespace holdfast
