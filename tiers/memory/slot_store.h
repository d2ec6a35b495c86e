// Slots on tmpfs: the thin I/O under the memory tier (docs/formats.md, "Memory tier directory").
//
//   <dir>/lock                 one daemon at a time
//   <dir>/slot-000017          the image, a multiple of 2 MiB, reserved by fallocate, mode 0600
//   <dir>/slot-000017.note     who may touch it (holdfast.v1.SlotNote, framed, CRC)
//   <dir>/slot-000017.record   present exactly while the slot holds a sealed copy
//   <dir>/job-<uuid>           holdfast.v1.JobState, framed, CRC
//
// Which slot may be created, filled or removed when is the core's decision (server/); this class only does it, and
// keeps the budget as a second line of defence. Thread-safe; calls for one slot must not overlap, except reads.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/env.h"
#include "base/ids.h"
#include "base/unique_fd.h"
#include "tiers/image/record.h"

namespace holdfast {

inline constexpr uint64_t kSlotBytesMultiple = 2ull << 20;

// holdfast.v1.SlotNote as a value.
struct SlotNote {
  std::string boot_id;
  Generation generation = 0;
  std::optional<ProcessId> writer;
  std::vector<ProcessId> readers;
  uint64_t slot_bytes = 0;
};

struct StoredSlot {
  SlotId slot = 0;
  uint64_t bytes = 0;
  SlotNote note;
  std::optional<ShardRecord> record;  // without layout_bytes and digests, to bound memory; absent if there is none that is good
};

// What the record in a slot must say to be published.
struct RecordExpectation {
  ShardId id;
  std::string job_name;
  uint32_t world_size = 0;
  Generation generation = 0;
  std::vector<Descent> descent;
};

struct MemoryScan {
  std::vector<StoredSlot> slots;
  std::vector<std::string> job_states;  // encoded holdfast.v1.JobState, framing checked
  std::vector<std::string> problems;    // files that were left alone, and why
};

class SlotStore {
 public:
  struct Options {
    Env* env = nullptr;
    std::string dir;
    uint64_t bytes_max = 0;
    std::string boot_id;
  };
  // Creates the directory (0700) if needed, takes the lock. Fails clearly when `dir` is not on tmpfs or too small.
  static absl::StatusOr<std::unique_ptr<SlotStore>> Open(const Options& options);
  ~SlotStore();

  // All that is there. A record counts only with a note of this boot, the same generation and lengths that fit; a record that does
  // not is removed (torn) or, if of a newer format version or foreign, reported and its slot left alone.
  absl::StatusOr<MemoryScan> Scan();

  absl::Status Create(SlotId slot, uint64_t bytes);  // multiple of 2 MiB; ResourceExhausted beyond budget or tmpfs
  absl::Status Populate(SlotId slot, uint64_t offset, uint64_t bytes);
  absl::Status WriteNote(SlotId slot, const SlotNote& note);
  absl::StatusOr<UniqueFd> OpenImage(SlotId slot, bool writable);
  absl::StatusOr<UniqueFd> OpenRecord(SlotId slot);
  // Reads [offset, offset+bytes) of the slot, decodes it as a record, checks it (and its layout) against `expected`, publishes it.
  absl::StatusOr<ShardRecord> PublishRecord(SlotId slot, const RecordExpectation& expected, uint64_t offset, uint64_t bytes);
  absl::StatusOr<std::string> ReadRecord(SlotId slot);
  absl::Status ReadAt(SlotId slot, uint64_t offset, std::span<std::byte> out);
  absl::Status RemoveRecord(SlotId slot);  // NotFound if there is none
  absl::Status Delete(SlotId slot);        // record, note, image: in this order
  absl::Status WriteJobState(const JobUuid& job, std::string_view encoded);
  absl::Status RemoveJobState(const JobUuid& job);

  uint64_t bytes_used() const;

 private:
  struct Impl;
  explicit SlotStore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast
