// From memory to a drive, from memory or a drive to the remote tier.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/sync_point.h"
#include "server/runtime/found_state.h"
#include "server/runtime/tiers/compression_choice.h"
#include "server/runtime/tiers/operation_parts.h"
#include "server/runtime/tiers/slot_source.h"
#include "server/runtime/tiers/source_file.h"
#include "tiers/compressed/seek_table.h"
#include "tiers/transfer/assembled_file.h"
#include "tiers/transfer/direct_copy.h"

namespace holdfast {
namespace {

ReadBack ReadBackOf(v1::TierPolicy::Verify verify) {
  return verify == v1::TierPolicy::VERIFY_ALL ? ReadBack::kAll : ReadBack::kSample;
}

JobIdentity IdentityOf(const FlushShard& action) {
  return {action.key.id.job, action.key.job_name, action.uid, action.gid};
}

NewCopy NewCopyOf(const FlushShard& action, uint64_t image_bytes) {
  return {action.key.id, action.key.job_name, action.key.world_size,
          image_bytes,   action.uid,          action.gid};
}

DurableCopy CopyOf(const ShardRecord& record) {
  DurableCopy copy;
  copy.copy = ToSealedCopy(record);
  copy.copy.generation = 0;
  if (record.kept) {
    copy.file_bytes = record.kept->image_bytes;
    copy.plan = record.kept->plan;
  }
  return copy;
}

DurableCopy Published(const ShardRecord& record, const PublishedCopy& published) {
  DurableCopy copy = CopyOf(record);
  copy.record_bytes = published.record_bytes;
  copy.record_crc = published.record_crc;
  copy.location = published.location;
  return copy;
}

// There is such a copy already: published by a try whose end nobody heard. It is as good as one of
// ours if it says the same; whether its file leaves out the same slices is the coordinator's to
// judge, who knows the other ranks'.
absl::StatusOr<DurableCopy> Adopt(CopyStore& store, const CopyKey& key, const ShardRecord& record) {
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<CopyStore::Reading> there,
                      store.OpenCopy({key.id, key.job_name, key.world_size}, {}));
  ShardRecord same = there->record();
  ShardRecord ours = record;
  same.generation = ours.generation = 0;
  same.kept.reset();
  ours.kept.reset();
  if (!(same == ours)) {
    return absl::AlreadyExistsError(
        absl::StrCat("'", there->info().location, "' is there already and says something else"));
  }
  DurableCopy copy = CopyOf(there->record());
  copy.record_bytes = there->record_file().size();
  copy.record_crc = RecordCrcOf(there->record_file());
  copy.location = there->info().location;
  return copy;
}

FlushEnded Failed(const FlushShard& action, absl::Status status, bool source_bad = false) {
  return {action.drain, std::move(status), source_bad, {}};
}

// No room: what was kept to be overwritten goes, then once more.
absl::StatusOr<std::unique_ptr<CopyStore::Writing>> BeginWriting(CopyStore& store,
                                                                 const NewCopy& copy) {
  absl::StatusOr<std::unique_ptr<CopyStore::Writing>> writing = store.Begin(copy);
  if (absl::IsResourceExhausted(writing.status()) && store.pool_bytes() > 0) {
    HF_RETURN_IF_ERROR(store.TrimPool(0));
    writing = store.Begin(copy);
  }
  return writing;
}

absl::StatusOr<DurableCopy> EndWriting(CopyStore& store, CopyStore::Writing& writing,
                                       const CopyKey& key, const ShardRecord& record,
                                       const std::string& record_file) {
  HF_SYNC_POINT("daemon.flush.data_written");
  absl::StatusOr<PublishedCopy> published = writing.Publish(record_file);
  if (absl::IsAlreadyExists(published.status())) {
    return Adopt(store, key, record);
  }
  HF_RETURN_IF_ERROR(published.status());
  HF_SYNC_POINT("daemon.flush.published");
  return Published(record, *published);
}

// As the policy says, of what is on the disk by then.
absl::Status ReadBackWritten(CopyStore::Writing& writing, const FlushShard& action,
                             const RecordAndLayout& image, BlockIo& io, DirectCopyOptions options) {
  HF_RETURN_IF_ERROR(writing.FinishImage());
  HF_RETURN_IF_ERROR(writing.image().SyncData());
  writing.DropCached();
  options.sample_seed = action.drain;
  return VerifyFile(io, writing.image(), image.record, image.layout, ReadBackOf(action.verify),
                    options)
      .status;
}

}  // namespace

// Before the job's first shard lies there, the others know that it may. No room: as for an image.
absl::Status NoteJob(DrainContext& context, size_t drive, CopyStore& store, const JobIdentity& job,
                     Operation& operation) {
  const TransferControl::Call call(operation.control().get(), "note a job in", store.dir());
  absl::Status noted = context.witnesses->Note(drive, store, job, *operation.control());
  if (absl::IsResourceExhausted(noted) && store.pool_bytes() > 0) {
    HF_RETURN_IF_ERROR(store.TrimPool(0));
    noted = context.witnesses->Note(drive, store, job, *operation.control());
  }
  return noted;
}

// ---- Memory → NVMe: straight from the slot ----

FlushEnded FlushToDrive(const Context& context, size_t drive, const FlushShard& action,
                        Operation& operation) {
  TierPlace& place = *context->drives[drive];
  const absl::StatusOr<std::shared_ptr<CopyStore>> store = StoreOf(place, operation);
  if (!store.ok()) {
    Judge(*context, place, store.status());
    return Failed(action, store.status());
  }
  const absl::StatusOr<BlockIo*> io = ThreadIo(*context, place);
  if (!io.ok()) {
    Judge(*context, place, io.status());
    return Failed(action, io.status());
  }
  if (absl::Status noted = NoteJob(*context, drive, **store, IdentityOf(action), operation);
      !noted.ok()) {
    return Failed(action, Judged(*context, place, noted));
  }
  if (!operation.Pin()) {
    return Failed(action, Cancelled("the flush"));
  }
  absl::StatusOr<SlotImage> slot = OpenSealedSlot(*context->slots, *context->env, action);
  if (!slot.ok()) {
    return Failed(action, slot.status(), absl::IsDataLoss(slot.status()));
  }
  const ShardRecord& record = slot->image->record;
  absl::Status status = (*store)->OpenJob(IdentityOf(action));
  absl::StatusOr<std::unique_ptr<CopyStore::Writing>> writing =
      status.ok() ? BeginWriting(**store, NewCopyOf(action, record.image_bytes))
                  : absl::StatusOr<std::unique_ptr<CopyStore::Writing>>(status);
  absl::StatusOr<DurableCopy> copy = writing.ok() ? NotYet() : writing.status();
  bool source_bad = false;
  if (absl::IsAlreadyExists(writing.status())) {
    copy = Adopt(**store, action.key, record);
  } else if (writing.ok()) {
    DirectCopyOptions options;
    options.piece_bytes = context->nvme.piece_bytes();
    options.alignment = (*writing)->alignment();
    options.pacer = context->nvme_pacer.get();
    options.control = operation.control().get();
    const MonotonicTime begun = Clock::System()->Now();
    const TransferResult result =
        WriteImage(**io, {slot->mapping->data(), slot->mapping->bytes()}, (*writing)->image(),
                   record, slot->image->layout, options);
    source_bad = result.faulty == FaultySide::kSource;
    const TransferControl::Call call(operation.control().get(), "publish a copy in", place.dir());
    const absl::Status written =
        result.ok() ? ReadBackWritten(**writing, action, *slot->image, **io, options)
                    : result.status;
    copy = written.ok() ? EndWriting(**store, **writing, action.key, record, slot->record_file)
                        : absl::StatusOr<DurableCopy>(written);
    place.CountWritten(result.bytes, Clock::System()->Now() - begun);
  }
  const absl::Status ended = source_bad ? copy.status() : Judged(*context, place, copy.status());
  if (!ended.ok()) {
    return Failed(action, ended, source_bad);
  }
  context->index.Put(action.key.id, drive);
  return {action.drain, absl::OkStatus(), false, *std::move(copy)};
}

// ---- Memory or NVMe → remote: through buffers, the slot revocable at any time ----

namespace {

struct RemoteSource {
  std::shared_ptr<const RecordAndLayout> image;
  std::string record_file;
  std::shared_ptr<RevocableMemory> memory;
  std::shared_ptr<CopyStore> store;  // before what reads from it: it ends after that
  std::shared_ptr<CopyStore::Reading> reading;
};

absl::StatusOr<RemoteSource> OpenRemoteSource(const Context& context, std::optional<size_t> drive,
                                              const FlushShard& action, Operation& operation) {
  RemoteSource source;
  if (action.from == TierKind::kMemory) {
    HF_ASSIGN_OR_RETURN(SlotImage slot, OpenSealedSlot(*context->slots, *context->env, action));
    source.image = slot.image;
    source.record_file = std::move(slot.record_file);
    source.memory =
        std::make_shared<RevocableMemory>(std::move(slot.mapping), slot.image->record.image_bytes);
    if (!operation.LendMemory(source.memory)) {
      return Cancelled("the flush");
    }
    return source;
  }
  if (!drive) {
    return absl::NotFoundError(absl::StrCat(action.key.id.ToString(), " is on none of the drives"));
  }
  TierPlace& place = *context->drives[*drive];
  const Operation::SourceCall call(operation, absl::StrCat("open a copy in '", place.dir(), "'"));
  HF_ASSIGN_OR_RETURN(source.store, StoreOf(place, operation));
  CopyStore::ReadOptions options;
  options.direct = action.replicas == nullptr;  // else parts of it are read, as they lie
  HF_ASSIGN_OR_RETURN(
      source.reading,
      source.store->OpenCopy({action.key.id, action.key.job_name, action.key.world_size}, options));
  source.record_file = source.reading->record_file();
  HF_ASSIGN_OR_RETURN(RecordAndLayout image, DecodeRecordAndLayout(source.record_file));
  source.image = std::make_shared<const RecordAndLayout>(std::move(image));
  return source;
}

absl::Status ReadRemoteBack(DrainContext& context, CopyStore::Writing& writing,
                            const FlushShard& action, const RecordAndLayout& image, bool compressed,
                            Operation& operation) {
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<BlockIo> io,
                      CreateBlockIo({.mode = BlockIoMode::kThreads, .depth = 2}));
  DirectCopyOptions options;
  options.alignment = writing.alignment();
  options.sample_unit = compressed ? static_cast<uint32_t>(kFrameBytes) : 0;
  options.pacer = context.read_back_pacer.get();
  options.control = operation.control().get();
  return ReadBackWritten(writing, action, image, *io, options);
}

// Of an image, compressed or not, in memory because what is in front of it is not there yet.
constexpr uint64_t kCompressedAheadMax = uint64_t{32} << 20;

}  // namespace

FlushEnded FlushToRemote(const Context& context, std::optional<size_t> drive,
                         const FlushShard& action, Operation& operation) {
  TierPlace& place = *context->remote;
  absl::StatusOr<RemoteSource> source = OpenRemoteSource(context, drive, action, operation);
  if (!source.ok()) {
    return Failed(action, source.status(),
                  absl::IsDataLoss(source.status()) || absl::IsNotFound(source.status()));
  }
  if (operation.control()->cancelled()) {
    return Failed(action, Cancelled("the flush"));
  }
  // What the file will have, and its record.
  std::shared_ptr<const RecordAndLayout> image = source->image;
  std::shared_ptr<const ImageMap> gather;
  std::optional<PartImage> part = PartOf(context->owners, action, *source->image);
  if (part) {
    image = std::make_shared<const RecordAndLayout>(std::move(part->file));
    gather = std::make_shared<const ImageMap>(std::move(part->from_whole));
  }
  const ShardRecord& record = part ? part->record : source->image->record;
  const absl::StatusOr<std::shared_ptr<CopyStore>> store = StoreOf(place, operation);
  absl::Status status = store.status();
  const TransferControl::Call call(operation.control().get(), "write a copy in", place.dir());
  if (status.ok()) {
    status = (*store)->OpenJob(IdentityOf(action));
  }
  if (status.ok()) {
    status = (*store)->ClaimAttempt(IdentityOf(action), action.key.id.attempt,
                                    OpeningText(action.opening));
  }
  // What is read, where that is a file.
  std::shared_ptr<File> file = source->reading != nullptr ? ImageOf(source->reading) : nullptr;
  const uint32_t alignment = source->reading != nullptr ? source->reading->alignment() : 1;
  if (file != nullptr && gather != nullptr) {
    file = std::make_shared<AssembledFile>(*gather, std::vector<std::shared_ptr<File>>{file});
  }
  const RunsBesideTraining beside(*context->training_cores, action.zstd_level > 0);
  const std::optional<int> zstd_level =
      status.ok() ? ZstdLevelOf(action, {source->memory.get(), gather.get(), file.get(), alignment},
                                FileBytes(record), operation)
                  : std::nullopt;
  absl::StatusOr<std::unique_ptr<CopyStore::Writing>> begun =
      status.ok() ? (*store)->Begin(NewCopyOf(action, FileBytes(record)), zstd_level)
                  : absl::StatusOr<std::unique_ptr<CopyStore::Writing>>(status);
  absl::StatusOr<DurableCopy> copy = begun.ok() ? NotYet() : begun.status();
  bool of_source = false;  // why it failed
  bool source_bad = false;
  if (absl::IsAlreadyExists(begun.status())) {
    copy = Adopt(**store, action.key, record);
  } else if (begun.ok()) {
    const std::shared_ptr<CopyStore::Writing> writing = *std::move(begun);
    BufferedCopySpec spec;
    spec.from_memory = source->memory;
    if (file != nullptr) {
      spec.from_alignment = alignment;
      spec.from_file = std::make_shared<SourceFile>(std::move(file), operation.shared_from_this());
    } else {
      spec.gather = gather;
    }
    spec.to_file = ImageOf(writing);
    spec.to_alignment = writing->alignment();
    if (zstd_level) {
      spec.piece_unit = kFrameBytes;
      spec.ahead_max = kCompressedAheadMax;
      spec.threads_max = action.zstd_threads;
      spec.cores = context->training_cores->Beside();
    }
    spec.image = image;
    spec.pacer = context->remote_pacer;
    spec.control = operation.control();
    CopyPool& pool = source->reading != nullptr ? *context->relays[*drive] : *context->pool;
    const MonotonicTime began = Clock::System()->Now();
    const TransferResult result = pool.Copy(std::move(spec));
    of_source = result.faulty == FaultySide::kSource;
    if (!result.ok()) {
      const bool of_file = of_source && source->reading != nullptr;
      copy = of_file ? OfWhatLiesThere(result.status, *source->reading) : result.status;
      source_bad = of_source && !(of_file && absl::IsUnavailable(copy.status()));
    } else if (operation.control()->cancelled()) {
      copy = Cancelled("the flush");
    } else if (absl::Status read = ReadRemoteBack(*context, *writing, action, *image,
                                                  zstd_level.has_value(), operation);
               !read.ok()) {
      copy = read;
    } else {
      copy = EndWriting(**store, *writing, action.key, record,
                        record.kept ? EncodeRecord(record) : source->record_file);
      place.CountShared(copy.ok() ? record.image_bytes - FileBytes(record) : 0);
      const uint64_t stored = std::min(writing->stored_bytes(), FileBytes(record));
      place.CountCompressedAway(copy.ok() ? FileBytes(record) - stored : 0);
    }
    place.CountWritten(result.bytes, Clock::System()->Now() - began);
  }
  const absl::Status ended = of_source ? copy.status() : Judged(*context, place, copy.status());
  if (!ended.ok()) {
    return Failed(
        action, ended,
        source_bad && action.from == TierKind::kMemory ? absl::IsDataLoss(ended) : source_bad);
  }
  return {action.drain, absl::OkStatus(), false, *std::move(copy)};
}

}  // namespace holdfast
