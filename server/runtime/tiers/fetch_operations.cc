// From a drive or the remote tier back into memory.
#include <fcntl.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "base/sync_point.h"
#include "server/runtime/tiers/operation_parts.h"
#include "server/runtime/tiers/read_once.h"
#include "server/runtime/tiers/shared_slices.h"
#include "server/runtime/tiers/slot_source.h"
#include "tiers/transfer/direct_copy.h"

namespace holdfast {
namespace {

FetchEnded FetchFailed(const FetchShard& action, absl::Status status, bool source_bad) {
  return {action.drain, action.slot, action.generation, std::move(status), source_bad, {}};
}

absl::Status CheckFits(const ShardRecord& record, const FetchShard& action) {
  if (record.image_bytes > action.slot_bytes) {
    return absl::DataLossError(
        absl::StrCat("the copy has ", record.image_bytes, " bytes, more than it was said to have"));
  }
  return absl::OkStatus();
}

// What is read of it next is what lies there.
void DropCached(const File& file) {
  if (file.fd() >= 0) {
    (void)::posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED);
  }
}

}  // namespace

FetchEnded FetchFromDrive(const Context& context, size_t drive, const FetchShard& action,
                          Operation& operation) {
  TierPlace& place = *context->drives[drive];
  const absl::StatusOr<std::shared_ptr<CopyStore>> store = StoreOf(place, operation);
  if (!store.ok()) {
    Judge(*context, place, store.status());
    return FetchFailed(action, store.status(), false);
  }
  CopyStore::ReadOptions options;
  options.direct = true;
  absl::StatusOr<std::unique_ptr<CopyStore::Reading>> reading =
      (*store)->OpenCopy({action.key.id, action.key.job_name, action.key.world_size}, options);
  if (!reading.ok()) {
    Judge(*context, place, reading.status());
    return FetchFailed(action, reading.status(), IsCopysFault(reading.status(), TierKind::kNvme));
  }
  absl::StatusOr<RecordAndLayout> image = DecodeRecordAndLayout((*reading)->record_file());
  absl::Status status = image.ok() ? CheckFits(image->record, action) : image.status();
  if (!status.ok()) {
    return FetchFailed(action, status, true);
  }
  const absl::StatusOr<BlockIo*> io = ThreadIo(*context, place);
  if (!io.ok()) {
    Judge(*context, place, io.status());
    return FetchFailed(action, io.status(), false);
  }
  if (!operation.Pin()) {
    return FetchFailed(action, Cancelled("the fetch"), false);
  }
  absl::StatusOr<SlotToFill> slot = OpenSlotToFill(*context, action);
  if (!slot.ok()) {
    return FetchFailed(action, absl::UnavailableError(slot.status().message()), false);
  }
  DirectCopyOptions copy;
  copy.piece_bytes = context->nvme.piece_bytes();
  copy.alignment = (*reading)->alignment();
  copy.control = operation.control().get();
  const MonotonicTime began = Clock::System()->Now();
  const auto read = [&] {
    return ReadImage(**io, (*reading)->image(), {slot->mapping->data(), slot->mapping->bytes()},
                     image->record, image->layout, copy);
  };
  TransferResult result = read();
  if (result.bad_block && result.faulty == FaultySide::kSource && !copy.control->cancelled()) {
    // Nothing is condemned on one reading: a cable or a bus may have flipped the bit.
    LogWarning(absl::StrCat("fetch of ", action.key.id.ToString(), ": ", Message(result.status),
                            "; read once more"));
    result = read();
  }
  place.CountRead(result.bytes, Clock::System()->Now() - began);
  if (result.ok() || result.faulty == FaultySide::kSource) {
    Judge(*context, place, result.status);
  }
  if (!result.ok()) {
    status = result.faulty == FaultySide::kSource ? OfWhatLiesThere(result.status, **reading)
                                                  : result.status;
    return FetchFailed(
        action, status,
        result.faulty == FaultySide::kSource && IsCopysFault(status, TierKind::kNvme));
  }
  status = (*reading)->Confirm();
  if (!status.ok()) {
    return FetchFailed(action, status, IsCopysFault(status, TierKind::kNvme));
  }
  absl::StatusOr<FetchEnded> sealed = PublishFetched(*context->slots, action, image->record);
  if (!sealed.ok()) {
    return FetchFailed(action, absl::UnavailableError(sealed.status().message()), false);
  }
  HF_SYNC_POINT("daemon.fetch.published");
  return *std::move(sealed);
}

namespace {

// Into `memory`, and from there on sealed. `anew`: it was read before, and found bad.
FetchEnded ReadFromRemote(const Context& context, const FetchShard& action,
                          const std::shared_ptr<RevocableMemory>& memory, Operation& operation,
                          bool anew) {
  TierPlace& place = *context->remote;
  // 1. The copy.
  const absl::StatusOr<std::shared_ptr<CopyStore>> store = StoreOf(place, operation);
  if (!store.ok()) {
    Judge(*context, place, store.status());
    return FetchFailed(action, store.status(), false);
  }
  std::shared_ptr<CopyStore::Reading> reading;
  {
    const TransferControl::Call call(operation.control().get(), "open a copy in", place.dir());
    absl::StatusOr<std::unique_ptr<CopyStore::Reading>> opened =
        (*store)->OpenCopy({action.key.id, action.key.job_name, action.key.world_size}, {});
    if (!opened.ok()) {
      Judge(*context, place, opened.status());
      return FetchFailed(action, opened.status(), IsCopysFault(opened.status(), TierKind::kRemote));
    }
    reading = *std::move(opened);
  }
  absl::StatusOr<RecordAndLayout> image = DecodeRecordAndLayout(reading->record_file());
  absl::Status status = image.ok() ? CheckFits(image->record, action) : image.status();
  if (!status.ok()) {
    return FetchFailed(action, status, true);
  }
  // 2. Its bytes, in its own file and in those of the ranks that have what it leaves out. Others
  // need some of them, too.
  std::shared_ptr<PassedOnFile> passed;
  bool sealed_here = false;
  const absl::Cleanup end_passed = [&passed, &sealed_here] {
    if (passed != nullptr) {
      passed->End(sealed_here);
    }
  };
  if (!action.readers.empty() && context->pulls != nullptr) {
    passed = std::make_shared<PassedOnFile>(context->slots, action.slot, action.generation,
                                            std::make_shared<const ImageMap>(PlacesInImage(*image)),
                                            memory);
    context->passed_on->Begin(action.key.id, passed);
  }
  BufferedCopySpec spec;
  spec.from_file = ImageOf(reading);
  spec.from_alignment = reading->alignment();
  spec.piece_unit = PieceUnitOf(*reading);
  WholeCopy whole;
  if (image->record.kept) {
    const TransferControl::Call call(operation.control().get(), "open copies in", place.dir());
    absl::StatusOr<WholeCopy> opened =
        OpenWhole(*store, action.key, reading, *image, *operation.control());
    if (!opened.ok()) {
      Judge(*context, place, opened.status());
      return FetchFailed(action, opened.status(), IsCopysFault(opened.status(), TierKind::kRemote));
    }
    whole = *std::move(opened);
    spec.from_file = whole.file;
    spec.from_alignment = 1;
    spec.source_name = whole.path_at;
  }
  if (anew) {
    DropCached(reading->image());
    std::for_each(whole.files.begin(), whole.files.end(),
                  [](const auto& file) { DropCached(*file); });
  }
  std::optional<TransferResult> together;
  if (whole.file != nullptr && passed != nullptr) {
    const MonotonicTime began = Clock::System()->Now();
    ReadOnceResult read = ReadOnce(context, action, whole, *image, *passed, memory, operation);
    place.CountRead(read.own.bytes + read.remote_bytes, Clock::System()->Now() - began);
    if (!read.own.ok() || read.rest.ok() || operation.control()->cancelled()) {
      together = std::move(read.own);
      together->status.Update(read.rest);
    } else {
      LogWarning(absl::StrCat("fetch of ", action.key.id.ToString(), ": ", Message(read.rest),
                              "; read from the remote tier alone"));
      passed->End(false);
    }
  } else {
    spec.arrived = [passed](uint64_t offset, uint64_t bytes) {
      if (passed != nullptr) {
        passed->Arrived(offset, bytes);
      }
      HF_SYNC_POINT("daemon.fetch.part_arrived");
    };
  }
  image->record.kept.reset();  // what is in memory is whole
  spec.to_memory = memory;
  spec.image = std::make_shared<const RecordAndLayout>(*std::move(image));
  spec.control = operation.control();
  const std::shared_ptr<const RecordAndLayout> kept = spec.image;
  if (!together) {
    const MonotonicTime began = Clock::System()->Now();
    together = context->pool->Copy(std::move(spec));
    place.CountRead(together->bytes, Clock::System()->Now() - began);
  }
  const TransferResult& result = *together;
  if (result.ok() || result.faulty == FaultySide::kSource) {
    Judge(*context, place, result.status);  // a slot that was cut is not the mount's doing
  }
  if (!result.ok()) {
    const TransferControl::Call call(operation.control().get(), "look at a copy in", place.dir());
    status = result.status;
    if (result.faulty == FaultySide::kSource) {
      const std::string owners = whole.OwnerWrittenAnew();
      status =
          owners.empty() ? OfWhatLiesThere(status, *reading) : WrittenAnewMeanwhile(owners, status);
    }
    return FetchFailed(
        action, status,
        result.faulty == FaultySide::kSource && IsCopysFault(status, TierKind::kRemote));
  }
  status = reading->Confirm();
  status.Update(whole.Confirm());
  if (!status.ok()) {
    return FetchFailed(action, status, IsCopysFault(status, TierKind::kRemote));
  }
  // 3. From here on the slot is spoken for.
  if (!operation.Pin()) {
    return FetchFailed(action, Cancelled("the fetch"), false);
  }
  absl::StatusOr<FetchEnded> sealed = PublishFetched(*context->slots, action, kept->record);
  if (!sealed.ok()) {
    return FetchFailed(action, absl::UnavailableError(sealed.status().message()), false);
  }
  sealed_here = true;
  HF_SYNC_POINT("daemon.fetch.published");
  return *std::move(sealed);
}

}  // namespace

FetchEnded FetchFromRemote(const Context& context, const FetchShard& action, Operation& operation) {
  // The slot, revocable from the first moment on.
  absl::StatusOr<SlotToFill> slot = OpenSlotToFill(*context, action);
  if (!slot.ok()) {
    return FetchFailed(action, absl::UnavailableError(slot.status().message()), false);
  }
  const auto memory =
      std::make_shared<RevocableMemory>(std::move(slot->mapping), action.slot_bytes);
  if (!operation.LendMemory(memory)) {
    return FetchFailed(action, Cancelled("the fetch"), false);
  }
  FetchEnded ended = ReadFromRemote(context, action, memory, operation, /*anew=*/false);
  if (ended.source_bad && !operation.control()->cancelled()) {
    // Nothing is condemned on one reading, nor for what came from other nodes.
    LogWarning(absl::StrCat("fetch of ", action.key.id.ToString(), ": ", Message(ended.status),
                            "; read once more, from the remote tier alone"));
    FetchShard alone = action;
    alone.readers.clear();
    ended = ReadFromRemote(context, alone, memory, operation, /*anew=*/true);
  }
  return ended;
}

}  // namespace holdfast
