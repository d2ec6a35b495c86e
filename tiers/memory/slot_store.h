// Slots on tmpfs: the thin I/O under the memory tier (docs/formats.md, "Memory tier directory").
//
//   <dir>/lock                 one daemon at a time (lock.1, …: base/daemon_lock.h)
//   <dir>/reserve              1 MiB, given up for the small files when others filled the tmpfs
//   <dir>/slot-000017          the image, a multiple of 2 MiB, reserved by fallocate, mode 0600
//   <dir>/slot-000017.note     who may touch it (holdfast.v1.SlotNote, framed, CRC)
//   <dir>/slot-000017.record   present exactly while the slot holds a sealed copy
//   <dir>/job-<uuid>           holdfast.v1.JobState, framed, CRC
//
// Which slot may be created, filled or removed when is the core's decision (server/); this class
// only does it, and keeps the budget and the order of a refill as a second line of defence.
// Thread-safe; calls for one slot must not overlap, except reads.
//
//   store->Create(17, bytes); store->Populate(17, 0, bytes);
//   store->WriteNote(17, {.generation = 1, .writer = client, .slot_bytes = bytes});
//   … pass store->OpenImage(17, true) to the client, which writes image and record …
//   store->PublishRecord(17, expected, record_offset, record_bytes);     // sealed
//   store->RemoveRecord(17); store->WriteNote(17, {.generation = 2, …});  // the next filling
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/daemon_lock.h"
#include "base/env.h"
#include "base/ids.h"
#include "base/unique_fd.h"
#include "tiers/image/record.h"
#include "tiers/tier.h"

namespace holdfast {

inline constexpr uint64_t kSlotBytesMultiple = 2ull << 20;

// holdfast.v1.SlotNote as a value.
struct SlotNote {
  std::string boot_id;
  Generation generation = 0;
  std::optional<ProcessId> writer;
  std::vector<ReadHold> readers;
  uint64_t slot_bytes = 0;
  bool replica = false;  // what it holds is kept for another node
};

struct StoredSlot {
  SlotId slot = 0;
  uint64_t bytes = 0;
  SlotNote note;
  // Without layout_bytes and digests, to bound memory; absent if there is none that is good.
  std::optional<ShardRecord> record;
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
  // What was left alone, removed, or found cut short, and why: for people.
  std::vector<std::string> problems;
  std::vector<UnreadableCopy> unreadable;  // those of the problems that cost a copy
  // Image bytes of the slots that were left alone: their numbers are taken, and they count.
  std::map<SlotId, uint64_t> left_alone;
};

class SlotStore {
 public:
  struct Options {
    Env* env = nullptr;
    std::string dir;
    uint64_t bytes_max = 0;
    std::string boot_id;
    DaemonLock::Judge find_dying = FindDyingHolder;  // another one in tests
  };
  // Creates the directory (0700) if needed, takes the lock, from dying daemons too (dying()). Fails
  // clearly when `dir` is not on tmpfs or too small.
  static absl::StatusOr<std::unique_ptr<SlotStore>> Open(const Options& options);
  ~SlotStore();

  // All that is there. A record counts only with a note of this boot, the same generation and
  // lengths that fit; a record that does not is removed (torn) or, if of a newer format version or
  // foreign, reported and its slot left alone. Call it first: slots that were there when the store
  // opened can't be used before. Later calls wait for changes under way.
  absl::StatusOr<MemoryScan> Scan();

  // `bytes`: a multiple of 2 MiB. ResourceExhausted beyond the budget or what the tmpfs has.
  absl::Status Create(SlotId slot, uint64_t bytes);
  absl::Status Populate(SlotId slot, uint64_t offset, uint64_t bytes);
  // FailedPrecondition while the slot has a record and the generation changes, or when the
  // generation goes back; DataLoss when the slot file is not of note.slot_bytes any more. An empty
  // boot_id means this boot.
  absl::Status WriteNote(SlotId slot, const SlotNote& note);
  absl::StatusOr<UniqueFd> OpenImage(SlotId slot, bool writable);
  absl::StatusOr<UniqueFd> OpenRecord(SlotId slot);
  // The same image, through Env: for those that read or write it inside the daemon.
  absl::StatusOr<std::unique_ptr<File>> OpenImageFile(SlotId slot, bool writable);
  // Reads [offset, offset+bytes) of the slot, decodes it as a record, checks it (and its layout)
  // against `expected`, publishes it. InvalidArgument: torn, hostile or not the one expected.
  // FailedPrecondition: of a newer format version, or the slot is at another generation.
  // AlreadyExists: the slot, or another one, holds that shard. DataLoss: the slot file was cut
  // short or deleted meanwhile. After any error but AlreadyExists the slot holds no record. The
  // record returned is without layout_bytes and digests.
  absl::StatusOr<ShardRecord> PublishRecord(SlotId slot, const RecordExpectation& expected,
                                            uint64_t offset, uint64_t bytes);
  // The same for a record that did not come through the slot: a copy that the daemon itself wrote
  // there.
  absl::StatusOr<ShardRecord> PublishRecordBytes(SlotId slot, const RecordExpectation& expected,
                                                 std::string_view record_bytes);
  absl::StatusOr<std::string> ReadRecord(SlotId slot);
  absl::Status ReadAt(SlotId slot, uint64_t offset, std::span<std::byte> out);
  absl::Status RemoveRecord(SlotId slot);  // NotFound if there is none
  absl::Status Delete(SlotId slot);        // record, note, image: in this order
  // InvalidArgument unless `encoded` is the state of that job. Calls for one job must not overlap.
  absl::Status WriteJobState(const JobUuid& job, std::string_view encoded);
  absl::Status RemoveJobState(const JobUuid& job);
  // All that are there and read (encoded holdfast.v1.JobState), as Scan gives them.
  absl::StatusOr<std::vector<std::string>> JobStates();

  // The slot that holds a sealed copy of the shard, by what this store knows (no I/O). NotFound if
  // there is none.
  absl::StatusOr<StoredSlot> Find(const ShardId& shard) const;
  std::vector<StoredSlot> Sealed() const;  // all of them, as Find
  std::vector<SlotId> Slots() const;       // that can be used, sealed or not; likewise without I/O
  // OK if all that was read through `image` (from OpenImageFile) belonged to this filling, which is
  // still sealed and whole. NotFound: removed or refilled meanwhile. DataLoss: cut short, deleted
  // or replaced underneath.
  absl::Status Confirm(SlotId slot, Generation generation, File& image);

  // Slots, those included that the scan left alone.
  uint64_t bytes_used() const;
  // Any thread. Below what is in use nothing is made until so much is free; what there is stays.
  void SetBytesMax(uint64_t bytes_max);
  uint64_t bytes_max() const;
  const std::string& dir() const;
  // The daemons that had the directory before and were dying when it was opened: their calls may
  // still read or write the slots that they were filling.
  const std::vector<ProcessId>& dying() const;

 private:
  struct Impl;
  explicit SlotStore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace holdfast
