// The one step from WRITING to SEALED. Everything that a client says is checked on a private copy
// of its record: it may go on writing into the slot, or cut it short, at any moment.
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/sync_point.h"
#include "tiers/memory/slot_record.h"
#include "tiers/memory/slot_store_impl.h"

namespace holdfast {

absl::StatusOr<ShardRecord> SlotStore::PublishRecord(SlotId slot, const RecordExpectation& expected,
                                                     uint64_t offset, uint64_t bytes) {
  Impl& m = *impl_;
  const std::shared_lock<std::shared_mutex> changing(m.directory_mutex);
  SlotEntry entry;
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<File> image, m.OpenWhole(slot, false, entry));
  if (bytes == 0 || bytes > kRecordBytesMax || offset > entry.bytes ||
      bytes > entry.bytes - offset) {
    return absl::InvalidArgumentError(absl::StrCat(
        "publish slot '", m.ImagePath(slot), "': a record of ", bytes, " bytes at offset ", offset,
        " in a slot of ", entry.bytes, " bytes; a record has 1 to ", kRecordBytesMax));
  }
  std::string record(static_cast<size_t>(bytes), '\0');
  const absl::Status read = image->ReadAt(offset, std::as_writable_bytes(std::span<char>(record)));
  if (absl::IsOutOfRange(read)) {
    return absl::DataLossError(absl::StrCat("publish slot '", m.ImagePath(slot),
                                            "': its file was cut short: ", read.message()));
  }
  HF_RETURN_IF_ERROR(read);
  return m.Publish(slot, expected, offset, record, entry, *image);
}

absl::StatusOr<ShardRecord> SlotStore::PublishRecordBytes(SlotId slot,
                                                          const RecordExpectation& expected,
                                                          std::string_view record_bytes) {
  Impl& m = *impl_;
  const std::shared_lock<std::shared_mutex> changing(m.directory_mutex);
  SlotEntry entry;
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<File> image, m.OpenWhole(slot, false, entry));
  return m.Publish(slot, expected, entry.bytes, record_bytes, entry, *image);
}

absl::Status SlotStore::Impl::ClaimShard(SlotId slot, const ShardId& shard) {
  MutexLock hold(mutex);
  for (const auto& [other, entry] : entries) {
    if (entry.record.has_value() && (other == slot || entry.record->id == shard)) {
      return absl::AlreadyExistsError(absl::StrCat("publish slot '", ImagePath(slot), "': slot '",
                                                   ImagePath(other), "' holds a sealed copy of ",
                                                   entry.record->id.ToString(), " already"));
    }
  }
  if (!publishing.insert(shard).second) {
    return absl::AlreadyExistsError(absl::StrCat("publish slot '", ImagePath(slot),
                                                 "': ", shard.ToString(),
                                                 " is being published from another slot"));
  }
  return absl::OkStatus();
}

absl::StatusOr<ShardRecord> SlotStore::Impl::Publish(SlotId slot, const RecordExpectation& expected,
                                                     uint64_t image_room, std::string_view bytes,
                                                     const SlotEntry& entry, File& image) {
  const std::string what = absl::StrCat("publish slot '", ImagePath(slot), "'");
  // 1. The slot is at the filling that the record is to be of.
  if (!entry.has_note || entry.note.generation != expected.generation) {
    return absl::FailedPreconditionError(absl::StrCat(
        what, ": it is at generation ", entry.note.generation, ", not at ", expected.generation));
  }
  // 2. The record is whole, of a version that we read, the one expected, and what it describes
  // fits.
  absl::StatusOr<ShardRecord> record = DecodeSlotRecord(bytes);
  if (absl::IsDataLoss(record.status())) {  // not a loss yet: nothing was sealed
    return absl::InvalidArgumentError(absl::StrCat(what, ": ", record.status().message()));
  }
  HF_RETURN_IF_ERROR(Annotate(record.status(), what));
  HF_RETURN_IF_ERROR(Annotate(CheckExpectation(*record, expected), what));
  if (record->image_bytes > image_room) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": an image of ", record->image_bytes,
                                                   " bytes does not fit into the ", image_room,
                                                   " before its record"));
  }
  // 3. Once per shard, also when two slots try at once.
  HF_RETURN_IF_ERROR(ClaimShard(slot, expected.id));
  const absl::Status published = PublishFile(slot, bytes, entry.bytes, image);
  MutexLock hold(mutex);
  publishing.erase(expected.id);
  HF_RETURN_IF_ERROR(published);
  entries[slot].record = *record;
  return record;
}

absl::Status SlotStore::Impl::PublishFile(SlotId slot, std::string_view bytes, uint64_t slot_bytes,
                                          File& image) {
  const std::string path = RecordPath(slot);
  HF_SYNC_POINT("memory.publish.before_write");
  HF_RETURN_IF_ERROR(PrepareSmallFile(path, bytes));
  HF_SYNC_POINT("memory.publish.before_rename");
  absl::Status status = CommitFile(env, path);
  HF_SYNC_POINT("memory.publish.after_rename");
  // The image may have been cut short since it was opened. Asked after the record is visible, so
  // that whoever cuts it later harms a copy that was whole when it was acknowledged.
  if (status.ok()) {
    status = CheckImage(slot, slot_bytes, image);
  }
  if (!status.ok()) {
    // Never acknowledged, so it must not appear later either.
    const absl::Status removed = env.Unlink(path);
    if (!removed.ok() && !absl::IsNotFound(removed)) {
      return Annotate(status,
                      absl::StrCat("its record could not be taken back (", removed.message(), ")"));
    }
    env.SyncDirectory(options.dir).IgnoreError();
  }
  return status;
}

}  // namespace holdfast
