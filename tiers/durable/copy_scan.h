// What lies in a durable tier's directory, as CopyStore::ScanAll and ScanJob find it. Small per
// copy: layouts, digests and paths are left out, so that a directory of thousands of steps by
// thousands of ranks fits in memory.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tiers/durable/manifest.h"
#include "tiers/tier.h"

namespace holdfast {

// How an image lies in its file: as it is, or as seekable Zstandard (tiers/compressed).
enum class ImageForm { kPlain, kCompressed };

struct CopyEntry {
  Rank rank = 0;
  uint64_t image_bytes = 0;  // of the file, as it is without compression
  uint64_t record_bytes = 0;
  uint64_t record_crc = 0;     // RecordCrcOf (manifest.h)
  int64_t sealed_unix_ms = 0;  // 0 when no record was read (a manifest told)
  LayoutHash layout_hash{};
  uint64_t shard_bytes = 0;  // of the whole image: more than the file has if that leaves slices out
  LayoutHash plan{};         // KeptSlices::plan, where a record was read that has it
  Likeness likeness{};       // where a record was read, or the manifest tells
  ImageForm form = ImageForm::kPlain;
  bool operator==(const CopyEntry&) const = default;
};

// A copy that belongs there, because the step's manifest or its own names say so, and is of no use:
// its image or record is damaged, cut or gone. (What could not be read just now, and what a newer
// program wrote, is none.)
struct DamagedEntry {
  CopyEntry entry;
  uint32_t world_size = 0;       // 0: but for its rank, and how long its image is, nothing is known
  std::vector<Descent> descent;  // where the world size is known
  std::string why;
};

struct CheckpointScan {
  CheckpointId id;
  uint32_t world_size = 0;
  std::vector<Descent> descent;
  // Remote only: there is a manifest, so the step is committed. Its entries are `copies`, but for
  // those whose files are missing or of another length.
  bool has_manifest = false;
  // There is one that could not be read: `copies` are as their records say, which may not be all,
  // and nothing here is to be removed because of what a scan says.
  bool manifest_unreadable = false;
  absl::Status manifest_why;  // damaged, of a newer version, not readable just now
  int64_t committed_unix_ms = 0;
  // Remote only: marked as being written, without a manifest: `copies` were promised to nobody.
  bool begun = false;
  std::vector<CopyEntry> copies;  // image and record there, lengths right; by rank
  std::vector<DamagedEntry> damaged;
};

struct JobScan {
  JobIdentity job;
  std::vector<Attempt> claims;  // remote only: attempts that were claimed
  std::vector<CheckpointScan> checkpoints;
};

// A name that is none of ours, or that nothing of ours explains. Left alone.
struct UnknownFile {
  std::string path;
  std::string why;
};

struct DurableScan {
  std::vector<JobScan> jobs;               // by name
  std::vector<UnreadableCopy> unreadable;  // copies, manifests, JOB files; at most kScanProblemsMax
  std::vector<UnknownFile> unknown;        // at most kScanProblemsMax
  // How many there were of both, also beyond what is listed.
  uint64_t unreadable_count = 0;
  uint64_t unknown_count = 0;
  // Jobs by name, of which something may not be listed although it is whole: the first directory or
  // file that could not be read just now, or that a newer program wrote. Of others, what is not
  // listed is not there.
  std::map<std::string, absl::Status> hidden;
};

inline constexpr size_t kScanProblemsMax = 1000;
inline constexpr size_t kScanDamagedMax = 4096;  // of all checkpoints; more are only counted

}  // namespace holdfast
