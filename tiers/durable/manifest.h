// The manifest of a checkpoint in the remote tier (docs/formats.md, "Manifest"): that it is there
// is the commit. Pure functions; encoded without a protobuf runtime, a test proves them compatible
// with proto/holdfast/v1/record.proto.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/ids.h"
#include "tiers/image/record.h"

namespace holdfast {

// One rank's copy as the manifest names it.
struct ManifestShard {
  Rank rank = 0;
  uint64_t image_bytes = 0;   // of the image's file
  uint64_t record_bytes = 0;  // of the record file
  uint64_t record_crc = 0;    // RecordCrcOf
  LayoutHash layout_hash{};
  uint64_t shard_bytes = 0;  // of the whole image, where the file leaves slices out; else 0
  Likeness likeness{};       // which ranks hold the same; not known: of an older version
  uint64_t WholeBytes() const { return shard_bytes != 0 ? shard_bytes : image_bytes; }
  bool operator==(const ManifestShard&) const = default;
};

struct Manifest {
  JobUuid job;
  std::string job_name;
  CheckpointId checkpoint;
  uint32_t world_size = 0;
  std::vector<Descent> descent;  // youngest first
  int64_t committed_unix_ms = 0;
  std::vector<ManifestShard> shards;  // one per rank, in the order of ranks
  bool operator==(const Manifest&) const = default;
};

// The CRC at a record file's end, computed: CRC-64/XZ of all bytes before it. (Over the whole file,
// its own CRC included, the CRC would be the same number for every record.)
uint64_t RecordCrcOf(std::string_view record_file);

inline constexpr uint64_t kManifestBytesMax = uint64_t{128} << 20;

// OK if it does not contradict itself and can be written; InvalidArgument says what is wrong.
absl::Status CheckManifest(const Manifest& manifest);
// The whole file, of a manifest that CheckManifest accepts.
std::string EncodeManifest(const Manifest& manifest);
// DataLoss: torn, damaged, or contradicts itself. FailedPrecondition: of a newer format version.
absl::StatusOr<Manifest> DecodeManifest(std::string_view bytes);
// The first difference in what two manifests promise (all but the time, and who holds the same),
// for people; empty if none.
std::string DifferenceOf(const Manifest& a, const Manifest& b);
// manifest.json: the same for people.
std::string ManifestJson(const Manifest& manifest);

}  // namespace holdfast
