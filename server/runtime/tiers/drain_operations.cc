#include "server/runtime/tiers/drain_operations.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/errno_status.h"
#include "base/log.h"
#include "base/status.h"
#include "base/sync_point.h"
#include "server/runtime/found_state.h"
#include "server/runtime/tiers/slot_source.h"
#include "server/runtime/tiers/source_file.h"
#include "tiers/transfer/direct_copy.h"

namespace holdfast {
namespace {

constexpr size_t kProblemsToldMax = 32;

absl::StatusOr<std::shared_ptr<CopyStore>> StoreOf(TierPlace& place, Operation& operation,
                                                   std::vector<std::string>* told = nullptr) {
  const TransferControl::Call call(operation.control().get(), "open", place.dir());
  std::vector<std::string> lines;
  absl::StatusOr<std::shared_ptr<CopyStore>> store = place.Store(&lines);
  for (const std::string& line : lines) {
    LogInfo(absl::StrCat(place.dir(), ": ", line));
  }
  if (told != nullptr) {
    *told = std::move(lines);
  }
  return store;
}

// The ring belongs to the thread: it is made with its first transfer, and ends with it.
absl::StatusOr<BlockIo*> ThreadIo(DrainContext& context, TierPlace& place) {
  thread_local std::unique_ptr<BlockIo> io;
  thread_local ThreadPriority has;
  const v1::NvmeConfig& config = context.nvme;
  const ThreadPriority wanted = context.nvme_priority.Get();
  if (io == nullptr) {
    BlockIoOptions options;
    options.depth = config.depth();
    options.mode = config.engine() == v1::NvmeConfig::IO_ENGINE_IO_URING  ? BlockIoMode::kIoUring
                   : config.engine() == v1::NvmeConfig::IO_ENGINE_THREADS ? BlockIoMode::kThreads
                                                                          : BlockIoMode::kAuto;
    HF_ASSIGN_OR_RETURN(io, CreateBlockIo(options));
    place.SetEngine(io->description());
    LogInfo(absl::StrCat("nvme ", place.dir(), ": ", io->description()));
    has = wanted;  // its threads take this one's
  }
  if (!(has == wanted)) {
    if (const absl::Status set = io->SetPriority(wanted); !set.ok()) {
      LogWarning(absl::StrCat("nvme ", place.dir(), ": ", Message(set)));
    }
    has = wanted;
  }
  return io.get();
}

// Whether it says something of the drive or the mount, and not of one job's files there (another
// run's directory, a name that is taken), of a copy, or of its source.
bool IsPlacesFault(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kInternal:
      return true;
    case absl::StatusCode::kDataLoss:
      return Message(status).find("(EIO)") != std::string::npos;
    default:
      return false;
  }
}

// An operation that was cancelled, or came to nothing for reasons of its own, leaves what was known
// of the place as it is.
void Judge(TierPlace& place, const absl::Status& status) {
  if (status.ok() || IsPlacesFault(status)) {
    place.Note(status);
  }
}

ReadBack ReadBackOf(v1::TierPolicy::Verify verify) {
  switch (verify) {
    case v1::TierPolicy::VERIFY_ALL:
      return ReadBack::kAll;
    case v1::TierPolicy::VERIFY_SAMPLE:
      return ReadBack::kSample;
    default:
      return ReadBack::kNone;
  }
}

JobIdentity IdentityOf(const FlushShard& action) {
  return {action.key.id.job, action.key.job_name, action.uid, action.gid};
}

NewCopy NewCopyOf(const FlushShard& action, uint64_t image_bytes) {
  return {action.key.id, action.key.job_name, action.key.world_size,
          image_bytes,   action.uid,          action.gid};
}

std::string OpeningText(uint64_t opening) {
  std::string bytes(sizeof(opening), '\0');
  for (size_t i = 0; i < sizeof(opening); ++i) {
    bytes[i] = static_cast<char>(opening >> (8 * i));
  }
  return bytes;
}

DurableCopy Published(const ShardRecord& record, const PublishedCopy& published) {
  DurableCopy copy;
  copy.copy = ToSealedCopy(record);
  copy.copy.generation = 0;
  copy.record_bytes = published.record_bytes;
  copy.record_crc = published.record_crc;
  copy.location = published.location;
  return copy;
}

// There is such a copy already: published by a try whose end nobody heard. It is as good as one of
// ours if it says the same.
absl::StatusOr<DurableCopy> Adopt(CopyStore& store, const CopyKey& key, const ShardRecord& record) {
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<CopyStore::Reading> there,
                      store.OpenCopy({key.id, key.job_name, key.world_size}, {}));
  ShardRecord same = there->record();
  ShardRecord ours = record;
  same.generation = ours.generation = 0;
  if (!(same == ours)) {
    return absl::AlreadyExistsError(
        absl::StrCat("'", there->info().location, "' is there already and says something else"));
  }
  DurableCopy copy;
  copy.copy = ToSealedCopy(there->record());
  copy.copy.generation = 0;
  copy.record_bytes = there->record_file().size();
  copy.record_crc = RecordCrcOf(there->record_file());
  copy.location = there->info().location;
  return copy;
}

FlushEnded Failed(const FlushShard& action, absl::Status status, bool source_bad = false) {
  return {action.drain, std::move(status), source_bad, {}};
}

// What an operation ends with that does not come to its end.
absl::Status NotYet() {
  return absl::InternalError("the copy was not written");
}

absl::Status Cancelled(std::string_view what) {
  return absl::CancelledError(absl::StrCat(ToAbsl(what), " was cancelled"));
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

}  // namespace

void DriveIndex::Put(const ShardId& id, size_t drive) {
  MutexLock lock(mutex_);
  drives_[id] = drive;
}

void DriveIndex::Erase(const ShardId& id) {
  MutexLock lock(mutex_);
  drives_.erase(id);
}

std::optional<size_t> DriveIndex::Find(const ShardId& id) {
  MutexLock lock(mutex_);
  const auto it = drives_.find(id);
  return it == drives_.end() ? std::nullopt : std::optional(it->second);
}

// ---- Memory → NVMe: straight from the slot ----

FlushEnded FlushToDrive(const Context& context, size_t drive, const FlushShard& action,
                        Operation& operation) {
  TierPlace& place = *context->drives[drive];
  const absl::StatusOr<std::shared_ptr<CopyStore>> store = StoreOf(place, operation);
  if (!store.ok()) {
    Judge(place, store.status());
    return Failed(action, store.status());
  }
  const absl::StatusOr<BlockIo*> io = ThreadIo(*context, place);
  if (!io.ok()) {
    Judge(place, io.status());
    return Failed(action, io.status());
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
    options.read_back = ReadBackOf(action.verify);
    options.sample_seed = action.drain;
    options.pacer = context->nvme_pacer.get();
    options.control = operation.control().get();
    const TransferResult result =
        WriteImage(**io, {slot->mapping->data(), slot->mapping->bytes()}, (*writing)->image(),
                   record, slot->image->layout, options);
    source_bad = result.faulty == FaultySide::kSource;
    place.CountWritten(result.bytes);
    const TransferControl::Call call(operation.control().get(), "publish a copy in", place.dir());
    copy = result.ok() ? EndWriting(**store, **writing, action.key, record, slot->record_file)
                       : absl::StatusOr<DurableCopy>(result.status);
  }
  if (!source_bad) {
    Judge(place, copy.status());
  }
  if (!copy.ok()) {
    return Failed(action, copy.status(), source_bad);
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
  HF_ASSIGN_OR_RETURN(const std::shared_ptr<CopyStore> store, StoreOf(place, operation));
  CopyStore::ReadOptions options;
  options.direct = true;
  HF_ASSIGN_OR_RETURN(
      source.reading,
      store->OpenCopy({action.key.id, action.key.job_name, action.key.world_size}, options));
  source.record_file = source.reading->record_file();
  HF_ASSIGN_OR_RETURN(RecordAndLayout image, DecodeRecordAndLayout(source.record_file));
  source.image = std::make_shared<const RecordAndLayout>(std::move(image));
  return source;
}

// A File that keeps what it belongs to: a thread that hangs in it may outlive everything else.
template <typename Owner>
std::shared_ptr<File> ImageOf(const std::shared_ptr<Owner>& owner) {
  return std::shared_ptr<File>(owner, &owner->image());
}

}  // namespace

// As the policy says. What a mount's cache gives back says little about its servers; it is what can
// be asked.
absl::Status ReadRemoteBack(CopyStore::Writing& writing, const FlushShard& action,
                            const RecordAndLayout& image, Operation& operation) {
  const ReadBack how = ReadBackOf(action.verify);
  if (how == ReadBack::kNone) {
    return absl::OkStatus();
  }
  HF_RETURN_IF_ERROR(writing.image().SyncData());
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<BlockIo> io,
                      CreateBlockIo({.mode = BlockIoMode::kThreads, .depth = 2}));
  DirectCopyOptions options;
  options.alignment = writing.alignment();
  options.sample_seed = action.drain;
  options.control = operation.control().get();
  return VerifyFile(*io, writing.image(), image.record, image.layout, how, options).status;
}

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
  const ShardRecord& record = source->image->record;
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
  absl::StatusOr<std::unique_ptr<CopyStore::Writing>> begun =
      status.ok() ? (*store)->Begin(NewCopyOf(action, record.image_bytes))
                  : absl::StatusOr<std::unique_ptr<CopyStore::Writing>>(status);
  absl::StatusOr<DurableCopy> copy = begun.ok() ? NotYet() : begun.status();
  bool source_bad = false;
  if (absl::IsAlreadyExists(begun.status())) {
    copy = Adopt(**store, action.key, record);
  } else if (begun.ok()) {
    const std::shared_ptr<CopyStore::Writing> writing = *std::move(begun);
    BufferedCopySpec spec;
    spec.from_memory = source->memory;
    if (source->reading != nullptr) {
      spec.from_file =
          std::make_shared<SourceFile>(ImageOf(source->reading), operation.shared_from_this());
      spec.from_alignment = source->reading->alignment();
    }
    spec.to_file = ImageOf(writing);
    spec.to_alignment = writing->alignment();
    spec.image = source->image;
    spec.pacer = context->remote_pacer;
    spec.control = operation.control();
    CopyPool& pool = source->reading != nullptr ? *context->relays[*drive] : *context->pool;
    const TransferResult result = pool.Copy(std::move(spec));
    source_bad = result.faulty == FaultySide::kSource;
    place.CountWritten(result.bytes);
    if (!result.ok()) {
      copy = result.status;
    } else if (operation.control()->cancelled()) {
      copy = Cancelled("the flush");
    } else if (absl::Status read = ReadRemoteBack(*writing, action, *source->image, operation);
               !read.ok()) {
      copy = read;
    } else {
      copy = EndWriting(**store, *writing, action.key, record, source->record_file);
    }
  }
  if (!source_bad) {
    Judge(place, copy.status());
  }
  if (!copy.ok()) {
    return Failed(action, copy.status(),
                  source_bad && action.from == TierKind::kMemory ? absl::IsDataLoss(copy.status())
                                                                 : source_bad);
  }
  return {action.drain, absl::OkStatus(), false, *std::move(copy)};
}

// ---- NVMe or remote → memory ----

namespace {

FetchEnded FetchFailed(const FetchShard& action, absl::Status status, bool source_bad) {
  return {action.drain, action.slot, action.generation, std::move(status), source_bad, {}};
}

// What says that the copy itself is of no use, whoever reads it. A drive whose sectors cannot be
// read says EIO; a mount says so too when it has lost its servers for a minute, so there only what
// was read is judged.
bool IsCopysFault(const absl::Status& status, TierKind tier) {
  const bool fault = absl::IsDataLoss(status) || absl::IsNotFound(status) ||
                     absl::IsInvalidArgument(status) || absl::IsOutOfRange(status);
  return fault && (tier == TierKind::kNvme || absl::IsNotFound(status) || !IsErrno(status));
}

absl::Status CheckFits(const ShardRecord& record, const FetchShard& action) {
  if (record.image_bytes > action.slot_bytes) {
    return absl::DataLossError(
        absl::StrCat("the copy has ", record.image_bytes, " bytes, more than it was said to have"));
  }
  return absl::OkStatus();
}

}  // namespace

FetchEnded FetchFromDrive(const Context& context, size_t drive, const FetchShard& action,
                          Operation& operation) {
  TierPlace& place = *context->drives[drive];
  const absl::StatusOr<std::shared_ptr<CopyStore>> store = StoreOf(place, operation);
  if (!store.ok()) {
    Judge(place, store.status());
    return FetchFailed(action, store.status(), false);
  }
  CopyStore::ReadOptions options;
  options.direct = true;
  absl::StatusOr<std::unique_ptr<CopyStore::Reading>> reading =
      (*store)->OpenCopy({action.key.id, action.key.job_name, action.key.world_size}, options);
  if (!reading.ok()) {
    Judge(place, reading.status());
    return FetchFailed(action, reading.status(), IsCopysFault(reading.status(), TierKind::kNvme));
  }
  absl::StatusOr<RecordAndLayout> image = DecodeRecordAndLayout((*reading)->record_file());
  absl::Status status = image.ok() ? CheckFits(image->record, action) : image.status();
  if (!status.ok()) {
    return FetchFailed(action, status, true);
  }
  const absl::StatusOr<BlockIo*> io = ThreadIo(*context, place);
  if (!io.ok()) {
    Judge(place, io.status());
    return FetchFailed(action, io.status(), false);
  }
  if (!operation.Pin()) {
    return FetchFailed(action, Cancelled("the fetch"), false);
  }
  absl::StatusOr<SlotToFill> slot = OpenSlotToFill(*context->slots, *context->env, action);
  if (!slot.ok()) {
    return FetchFailed(action, absl::UnavailableError(slot.status().message()), false);
  }
  DirectCopyOptions copy;
  copy.piece_bytes = context->nvme.piece_bytes();
  copy.alignment = (*reading)->alignment();
  copy.control = operation.control().get();
  const TransferResult result =
      ReadImage(**io, (*reading)->image(), {slot->mapping->data(), slot->mapping->bytes()},
                image->record, image->layout, copy);
  place.CountRead(result.bytes);
  if (result.ok() || result.faulty == FaultySide::kSource) {
    Judge(place, result.status);
  }
  if (!result.ok()) {
    return FetchFailed(
        action, result.status,
        result.faulty == FaultySide::kSource && IsCopysFault(result.status, TierKind::kNvme));
  }
  status = (*reading)->Confirm();
  if (!status.ok()) {
    return FetchFailed(action, status, IsCopysFault(status, TierKind::kNvme));
  }
  absl::StatusOr<SealedCopy> sealed = PublishFetched(*context->slots, action, image->record);
  if (!sealed.ok()) {
    return FetchFailed(action, absl::UnavailableError(sealed.status().message()), false);
  }
  HF_SYNC_POINT("daemon.fetch.published");
  return {action.drain, action.slot, action.generation, absl::OkStatus(), false, *sealed};
}

FetchEnded FetchFromRemote(const Context& context, const FetchShard& action, Operation& operation) {
  TierPlace& place = *context->remote;
  // 1. The slot, revocable from the first moment on.
  absl::StatusOr<SlotToFill> slot = OpenSlotToFill(*context->slots, *context->env, action);
  if (!slot.ok()) {
    return FetchFailed(action, absl::UnavailableError(slot.status().message()), false);
  }
  const auto memory =
      std::make_shared<RevocableMemory>(std::move(slot->mapping), action.slot_bytes);
  if (!operation.LendMemory(memory)) {
    return FetchFailed(action, Cancelled("the fetch"), false);
  }
  // 2. The copy.
  const absl::StatusOr<std::shared_ptr<CopyStore>> store = StoreOf(place, operation);
  if (!store.ok()) {
    Judge(place, store.status());
    return FetchFailed(action, store.status(), false);
  }
  std::shared_ptr<CopyStore::Reading> reading;
  {
    const TransferControl::Call call(operation.control().get(), "open a copy in", place.dir());
    absl::StatusOr<std::unique_ptr<CopyStore::Reading>> opened =
        (*store)->OpenCopy({action.key.id, action.key.job_name, action.key.world_size}, {});
    if (!opened.ok()) {
      Judge(place, opened.status());
      return FetchFailed(action, opened.status(), IsCopysFault(opened.status(), TierKind::kRemote));
    }
    reading = *std::move(opened);
  }
  absl::StatusOr<RecordAndLayout> image = DecodeRecordAndLayout(reading->record_file());
  absl::Status status = image.ok() ? CheckFits(image->record, action) : image.status();
  if (!status.ok()) {
    return FetchFailed(action, status, true);
  }
  // 3. Its bytes.
  BufferedCopySpec spec;
  spec.from_file = ImageOf(reading);
  spec.from_alignment = reading->alignment();
  spec.to_memory = memory;
  spec.image = std::make_shared<const RecordAndLayout>(*std::move(image));
  spec.control = operation.control();
  const std::shared_ptr<const RecordAndLayout> kept = spec.image;
  const TransferResult result = context->pool->Copy(std::move(spec));
  place.CountRead(result.bytes);
  if (result.ok() || result.faulty == FaultySide::kSource) {
    Judge(place, result.status);  // a slot that was cut is not the mount's doing
  }
  if (!result.ok()) {
    return FetchFailed(
        action, result.status,
        result.faulty == FaultySide::kSource && IsCopysFault(result.status, TierKind::kRemote));
  }
  status = reading->Confirm();
  if (!status.ok()) {
    return FetchFailed(action, status, IsCopysFault(status, TierKind::kRemote));
  }
  // 4. From here on the slot is spoken for.
  if (!operation.Pin()) {
    return FetchFailed(action, Cancelled("the fetch"), false);
  }
  absl::StatusOr<SealedCopy> sealed = PublishFetched(*context->slots, action, kept->record);
  if (!sealed.ok()) {
    return FetchFailed(action, absl::UnavailableError(sealed.status().message()), false);
  }
  HF_SYNC_POINT("daemon.fetch.published");
  return {action.drain, action.slot, action.generation, absl::OkStatus(), false, *sealed};
}

absl::StatusOr<std::string> VerifyCopy(const Context& context, size_t drive,
                                       const ReadableShard& shard, Operation& operation) {
  const bool nvme = shard.tier == TierKind::kNvme;
  TierPlace& place = nvme ? *context->drives[drive] : *context->remote;
  HF_ASSIGN_OR_RETURN(const std::shared_ptr<CopyStore> store, StoreOf(place, operation));
  const TransferControl::Call call(operation.control().get(), "verify a copy in", place.dir());
  CopyStore::ReadOptions options;
  options.direct = nvme;
  absl::StatusOr<std::unique_ptr<CopyStore::Reading>> reading =
      store->OpenCopy({shard.copy.id, shard.copy.job_name, shard.copy.world_size}, options);
  if (absl::IsNotFound(reading.status())) {
    return reading.status();
  }
  const auto judged = [&shard](const absl::Status& status) -> absl::StatusOr<std::string> {
    return IsCopysFault(status, shard.tier) ? absl::StatusOr<std::string>(Message(status)) : status;
  };
  if (!reading.ok()) {
    return judged(reading.status());
  }
  const absl::StatusOr<RecordAndLayout> image = DecodeRecordAndLayout((*reading)->record_file());
  if (!image.ok()) {
    return judged(image.status());
  }
  // The mount has no ring of its own: reads that hang there hold a thread, as all its calls do.
  std::unique_ptr<BlockIo> own;
  BlockIo* io = nullptr;
  if (nvme) {
    HF_ASSIGN_OR_RETURN(io, ThreadIo(*context, place));
  } else {
    HF_ASSIGN_OR_RETURN(own, CreateBlockIo({.mode = BlockIoMode::kThreads, .depth = 2}));
    io = own.get();
  }
  DirectCopyOptions copy;
  copy.piece_bytes = size_t{4} << 20;
  copy.alignment = (*reading)->alignment();
  copy.control = operation.control().get();
  const TransferResult result =
      VerifyFile(*io, (*reading)->image(), image->record, image->layout, ReadBack::kAll, copy);
  place.CountRead(result.bytes);
  if (!result.ok()) {
    return judged(result.status);
  }
  const absl::Status confirmed = (*reading)->Confirm();
  return confirmed.ok() ? absl::StatusOr<std::string>("") : judged(confirmed);
}

// ---- Manifests, removals ----

ManifestPublished PublishRemoteManifest(const Context& context,
                                        const holdfast::PublishManifest& action,
                                        Operation& operation) {
  TierPlace& place = *context->remote;
  const absl::StatusOr<std::shared_ptr<CopyStore>> store = StoreOf(place, operation);
  if (!store.ok()) {
    Judge(place, store.status());
    return {action.drain, store.status()};
  }
  const TransferControl::Call call(operation.control().get(), "publish a manifest in", place.dir());
  const JobIdentity job{action.job, action.job_name, action.uid, action.gid};
  absl::Status status = (*store)->OpenJob(job);
  if (status.ok()) {
    status = (*store)->ClaimAttempt(job, action.checkpoint.attempt, OpeningText(action.opening));
  }
  if (status.ok()) {
    Manifest manifest;
    manifest.job = action.job;
    manifest.job_name = action.job_name;
    manifest.checkpoint = action.checkpoint;
    manifest.world_size = action.world_size;
    manifest.descent = action.descent;
    manifest.committed_unix_ms = Clock::System()->UnixMillis();
    for (const DurableCopy& shard : action.shards) {
      manifest.shards.push_back({shard.copy.id.rank, shard.copy.image_bytes, shard.record_bytes,
                                 shard.record_crc, shard.copy.layout_hash});
    }
    HF_SYNC_POINT("daemon.manifest.begun");
    status = (*store)->PublishManifest(manifest);
    HF_SYNC_POINT("daemon.manifest.published");
  }
  Judge(place, status);
  return {action.drain, status};
}

absl::Status RemoveFrom(const Context& context, TierPlace& place, const RemoveCopies& action,
                        Operation& operation) {
  HF_ASSIGN_OR_RETURN(const std::shared_ptr<CopyStore> store, StoreOf(place, operation));
  const TransferControl::Call call(operation.control().get(), "remove a step in", place.dir());
  const absl::StatusOr<RemovalReport> removed =
      store->RemoveCheckpoint({action.job, action.job_name, action.checkpoint});
  if (action.tier == TierKind::kNvme) {
    for (Rank rank = 0; rank < action.world_size; ++rank) {
      context->index.Erase({action.job, action.checkpoint.attempt, action.checkpoint.step, rank});
    }
  }
  Judge(place, removed.status());
  HF_SYNC_POINT("daemon.removal.done");
  return removed.status();
}

absl::Status RemoveJobFrom(const Context&, TierPlace& place, const RemoveJobCopies& action,
                           Operation& operation) {
  HF_ASSIGN_OR_RETURN(const std::shared_ptr<CopyStore> store, StoreOf(place, operation));
  const TransferControl::Call call(operation.control().get(), "remove a job in", place.dir());
  const absl::Status removed = store->RemoveJob(action.job, action.job_name).status();
  // The directory of that name is another run's: there is nothing of this one.
  return absl::IsFailedPrecondition(removed) ? absl::OkStatus() : removed;
}

// ---- What there is ----

namespace {

void Convert(const DurableScan& scan, TierScanned& out, CopyStore& store,
             const std::function<void(const ShardId&)>& each) {
  for (const JobScan& job : scan.jobs) {
    FoundJob found{job.job.job, job.job.name, job.job.uid, job.job.gid, {}, {}};
    for (const Attempt claim : job.claims) {
      found.highest_claim = std::max(found.highest_claim, claim);
    }
    for (const CheckpointScan& step : job.checkpoints) {
      if (step.manifest_unreadable) {
        continue;  // perhaps committed: it is told below, and nobody touches it
      }
      if (step.has_manifest) {
        found.manifests.push_back(step.id);
      }
      for (const CopyEntry& entry : step.copies) {
        DurableCopy copy;
        copy.copy.id = {job.job.job, step.id.attempt, step.id.step, entry.rank};
        copy.copy.job_name = job.job.name;
        copy.copy.world_size = step.world_size;
        copy.copy.image_bytes = entry.image_bytes;
        copy.copy.layout_hash = entry.layout_hash;
        copy.copy.descent = step.descent;
        copy.copy.sealed_unix_ms =
            entry.sealed_unix_ms != 0 ? entry.sealed_unix_ms : step.committed_unix_ms;
        copy.from_manifest = entry.sealed_unix_ms == 0;
        copy.record_bytes = entry.record_bytes;
        copy.record_crc = entry.record_crc;
        copy.location = store.ImagePath({copy.copy.id, job.job.name, step.world_size});
        each(copy.copy.id);
        found.copies.push_back(std::move(copy));
      }
    }
    out.jobs.push_back(std::move(found));
  }
  for (const UnreadableCopy& bad : scan.unreadable) {
    if (out.problems.size() < kProblemsToldMax) {
      out.problems.push_back(absl::StrCat("'", bad.location, "': ", Message(bad.why)));
    }
  }
  for (const UnknownFile& file : scan.unknown) {
    out.unknown_files.push_back(absl::StrCat(file.path, ": ", file.why));
  }
}

}  // namespace

TierScanned ScanDrive(const Context& context, size_t drive, Operation& operation) {
  TierPlace& place = *context->drives[drive];
  TierScanned scanned;
  scanned.tier = TierKind::kNvme;
  scanned.dir = place.dir();
  const absl::StatusOr<std::shared_ptr<CopyStore>> store = StoreOf(place, operation);
  absl::StatusOr<DurableScan> scan = store.ok() ? NotYet() : store.status();
  if (store.ok()) {
    const TransferControl::Call call(operation.control().get(), "scan", place.dir());
    scan = (*store)->ScanAll();
  }
  scanned.status = scan.status();
  Judge(place, scan.status());
  if (scan.ok()) {
    Convert(*scan, scanned, **store, [&](const ShardId& id) { context->index.Put(id, drive); });
  }
  return scanned;
}

TierScanned ScanMount(const Context& context, DrainId drain, const std::string& only_job,
                      Operation& operation) {
  TierPlace& place = *context->remote;
  TierScanned scanned;
  scanned.tier = TierKind::kRemote;
  scanned.drain = drain;
  scanned.dir = place.dir();
  scanned.job_name = only_job;
  const absl::StatusOr<std::shared_ptr<CopyStore>> store = StoreOf(place, operation);
  absl::StatusOr<DurableScan> scan = store.ok() ? NotYet() : store.status();
  if (store.ok()) {
    const TransferControl::Call call(operation.control().get(), "scan", place.dir());
    scan = only_job.empty() ? (*store)->ScanAll() : (*store)->ScanJob(only_job);
    if (absl::IsNotFound(scan.status()) && (*store)->Space().ok()) {
      scan = DurableScan();  // the mount is there, and has no such job
    }
  }
  scanned.status = scan.status();
  Judge(place, scan.status());
  if (scan.ok()) {
    Convert(*scan, scanned, **store, [](const ShardId&) {});
  }
  return scanned;
}

}  // namespace holdfast
