// SlotStore's state, shared by the files that implement it. Internal to tiers/memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <shared_mutex>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "base/daemon_lock.h"
#include "base/env.h"
#include "base/mutex.h"
#include "tiers/memory/slot_files.h"
#include "tiers/memory/slot_reserve.h"
#include "tiers/memory/slot_store.h"

namespace holdfast {

// What the store knows of a slot without asking the file system.
struct SlotEntry {
  enum class State {
    kCreating,
    kReady,
    kNotOurs
  };  // the last: left alone by the scan, or not scanned yet
  State state = State::kReady;
  uint64_t bytes = 0;
  bool has_note = false;
  SlotNote note;
  std::optional<ShardRecord> record;  // sealed; without layout_bytes and digests
};

struct SlotStore::Impl {
  explicit Impl(const Options& o)
      : options(o), bytes_max(o.bytes_max), env(*o.env), reserve(env, options.dir) {}

  const Options options;
  std::atomic<uint64_t> bytes_max;  // options.bytes_max, until SetBytesMax
  Env& env;
  DaemonLock lock;
  SlotReserve reserve;

  // Shared by calls that change the directory, exclusive for Scan: what it sees is then never half
  // of a change.
  std::shared_mutex directory_mutex;

  Mutex mutex;
  std::map<SlotId, SlotEntry> entries GUARDED_BY(mutex);
  std::set<ShardId> publishing GUARDED_BY(mutex);

  std::string ImagePath(SlotId slot) const { return JoinPath(options.dir, ImageName(slot)); }
  std::string NotePath(SlotId slot) const { return JoinPath(options.dir, NoteName(slot)); }
  std::string RecordPath(SlotId slot) const { return JoinPath(options.dir, RecordName(slot)); }

  uint64_t BytesUsed() REQUIRES(mutex) {
    uint64_t used = 0;
    for (const auto& [slot, entry] : entries) {
      used += entry.bytes;
    }
    return used;
  }

  // What is known of a slot that may be used; NotFound or FailedPrecondition.
  absl::StatusOr<SlotEntry> Ready(SlotId slot) EXCLUDES(mutex);
  absl::Status CountWhatIsThere() EXCLUDES(mutex);
  // PrepareFile for what must be written even when others filled the tmpfs.
  absl::Status PrepareSmallFile(const std::string& path, std::string_view data) {
    return reserve.Write(data.size(), [&] { return PrepareFile(env, path, data); });
  }
  absl::Status ReserveBudget(SlotId slot, uint64_t bytes) EXCLUDES(mutex);
  uint64_t RecordRoom() EXCLUDES(mutex);
  absl::Status MakeImage(SlotId slot, uint64_t bytes);
  absl::Status NoRoom(uint64_t wanted, std::string_view what);
  // Opens the image of a ready slot, if it is what CheckImage wants.
  absl::StatusOr<std::unique_ptr<File>> OpenWhole(SlotId slot, bool writable, SlotEntry& entry);
  // DataLoss unless the open file is still the slot's, and still `bytes` long.
  absl::Status CheckImage(SlotId slot, uint64_t bytes, File& image);
  // Until the claim is erased from `publishing`, nobody else publishes that shard.
  absl::Status ClaimShard(SlotId slot, const ShardId& shard) EXCLUDES(mutex);
  absl::StatusOr<ShardRecord> Publish(SlotId slot, const RecordExpectation& expected,
                                      uint64_t image_room, std::string_view bytes,
                                      const SlotEntry& entry, File& image);
  absl::Status PublishFile(SlotId slot, std::string_view bytes, uint64_t slot_bytes, File& image);
};

}  // namespace holdfast
