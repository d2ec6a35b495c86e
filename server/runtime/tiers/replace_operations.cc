// A good copy in the place of a bad one in a durable tier. The good one is only read, and every
// block of it compared with its digest on the way; the new one is written aside, read back whole,
// and only then put in place.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/sync_point.h"
#include "server/runtime/found_state.h"
#include "server/runtime/tiers/operation_parts.h"
#include "server/runtime/tiers/slot_source.h"
#include "server/runtime/tiers/source_file.h"
#include "tiers/transfer/assembled_file.h"
#include "tiers/transfer/direct_copy.h"

namespace holdfast {
namespace {

// The whole image of the shard, and where it is read.
struct GoodCopy {
  std::shared_ptr<const RecordAndLayout> image;  // generation 0, nothing left out
  std::shared_ptr<RevocableMemory> memory;
  std::shared_ptr<CopyStore> store;  // before what reads from it: it ends after that
  std::shared_ptr<CopyStore::Reading> reading;
  WholeCopy whole;  // of a file in the remote tier that leaves slices out
  std::shared_ptr<File> file;
  uint32_t alignment = 1;
};

FlushEnded NotReplaced(const FlushShard& action, absl::Status status, bool source_bad = false) {
  return {action.drain, std::move(status), source_bad, {}};
}

CopyName CopyNameOf(const FlushShard& action) {
  return {action.key.id, action.key.job_name, action.key.world_size};
}

absl::StatusOr<GoodCopy> OpenGoodSlot(const Context& context, const FlushShard& action,
                                      Operation& operation) {
  HF_ASSIGN_OR_RETURN(SlotImage slot, OpenSealedSlot(*context->slots, *context->env, action));
  GoodCopy good;
  RecordAndLayout image = *slot.image;
  image.record.generation = 0;
  good.image = std::make_shared<const RecordAndLayout>(std::move(image));
  good.memory =
      std::make_shared<RevocableMemory>(std::move(slot.mapping), good.image->record.image_bytes);
  if (!operation.LendMemory(good.memory)) {
    return Cancelled("the replacement");
  }
  return good;
}

absl::StatusOr<GoodCopy> OpenGoodFile(TierPlace& place, const FlushShard& action,
                                      Operation& operation) {
  const Operation::SourceCall call(operation, absl::StrCat("open a copy in '", place.dir(), "'"));
  GoodCopy good;
  HF_ASSIGN_OR_RETURN(good.store, StoreOf(place, operation));
  HF_ASSIGN_OR_RETURN(good.reading, good.store->OpenCopy(CopyNameOf(action), {}));
  HF_ASSIGN_OR_RETURN(RecordAndLayout image, DecodeRecordAndLayout(good.reading->record_file()));
  std::shared_ptr<File> file = ImageOf(good.reading);
  good.alignment = good.reading->alignment();
  if (image.record.kept) {
    absl::StatusOr<WholeCopy> whole =
        OpenWhole(good.store, action.key, good.reading, image, *operation.control());
    if (!whole.ok()) {
      // (Another rank's file is bad then, and not this copy.)
      return IsOwnersFault(whole.status()) ? absl::UnavailableError(whole.status().message())
                                           : whole.status();
    }
    good.whole = *std::move(whole);
    file = good.whole.file;
    good.alignment = 1;
    image.record.kept.reset();
  }
  image.record.generation = 0;
  good.image = std::make_shared<const RecordAndLayout>(std::move(image));
  good.file = std::make_shared<SourceFile>(std::move(file), operation.shared_from_this());
  return good;
}

absl::StatusOr<GoodCopy> OpenGoodCopy(const Context& context, std::optional<size_t> drive,
                                      const FlushShard& action, Operation& operation) {
  switch (action.from) {
    case TierKind::kMemory:
      return OpenGoodSlot(context, action, operation);
    case TierKind::kRemote:
      return context->remote != nullptr ? OpenGoodFile(*context->remote, action, operation)
                                        : absl::StatusOr<GoodCopy>(absl::FailedPreconditionError(
                                              "there is no remote tier here"));
    default:
      return drive ? OpenGoodFile(*context->drives[*drive], action, operation)
                   : absl::StatusOr<GoodCopy>(absl::NotFoundError(
                         absl::StrCat(action.key.id.ToString(), " is on none of the drives")));
  }
}

// Of each tensor slice of the image, in order, who has it by the file's record.
std::vector<Rank> OwnersAsIn(const RecordAndLayout& file) {
  const KeptSlices& kept = *file.record.kept;
  std::vector<Rank> owners;
  size_t run = 0;
  uint64_t left = kept.runs.empty() ? 0 : kept.runs.front();
  size_t left_out = 0;
  for (const Slice& slice : file.layout.slices) {
    while (left == 0 && run + 1 < kept.runs.size()) {
      left = kept.runs[++run];
    }
    const bool stays = run % 2 == 0;
    left -= left > 0 ? 1 : 0;
    const Rank owner =
        stays || left_out >= kept.owners.size() ? file.record.id.rank : kept.owners[left_out++];
    if (slice.kind == SliceKind::kTensor) {
      owners.push_back(owner);
    }
  }
  return owners;
}

// What the file to be written has: what the record beside the bad image says, where that is not
// damaged; else what a flush of it would write. Nothing: the whole image.
absl::StatusOr<std::optional<PartImage>> PartToWrite(const Context& context, CopyStore& store,
                                                     const FlushShard& action,
                                                     const RecordAndLayout& whole) {
  if (action.to != TierKind::kRemote) {
    return std::optional<PartImage>();
  }
  const absl::StatusOr<std::string> record = store.ReadRecordFile(CopyNameOf(action));
  const absl::StatusOr<RecordAndLayout> there =
      record.ok() ? DecodeRecordAndLayout(*record)
                  : absl::StatusOr<RecordAndLayout>(record.status());
  if (!there.ok()) {
    return PartOf(context->owners, action, whole);
  }
  if (!there->record.kept) {
    return std::optional<PartImage>();
  }
  return PlanPart(whole, OwnersAsIn(*there), there->record.kept->plan);
}

absl::Status ReadReplacementBack(DrainContext& context, CopyStore::Writing& writing,
                                 const RecordAndLayout& image, bool nvme, Operation& operation) {
  HF_RETURN_IF_ERROR(writing.image().SyncData());
  writing.DropCached();
  BlockIoOptions io_options;
  io_options.mode = nvme ? ModeOf(context.nvme) : BlockIoMode::kThreads;
  io_options.depth = 2;
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<BlockIo> io, CreateBlockIo(io_options));
  DirectCopyOptions options;
  options.alignment = writing.alignment();
  options.pacer = nvme ? nullptr : context.read_back_pacer.get();
  options.control = operation.control().get();
  return VerifyFile(*io, writing.image(), image.record, image.layout, ReadBack::kAll, options)
      .status;
}

// What no manifest names is the attempt's first opening's to write, as with flushes.
absl::Status OpenJobToMend(CopyStore& store, const FlushShard& action) {
  const JobIdentity job{action.key.id.job, action.key.job_name, action.uid, action.gid};
  HF_RETURN_IF_ERROR(store.OpenJob(job));
  if (action.to != TierKind::kRemote) {
    return absl::OkStatus();
  }
  const absl::Status manifest =
      store.ReadManifest({action.key.id.job, action.key.job_name, action.key.id.checkpoint()})
          .status();
  return absl::IsNotFound(manifest)
             ? store.ClaimAttempt(job, action.key.id.attempt, OpeningText(action.opening))
             : absl::OkStatus();  // (what else is wrong with it, the replacement finds)
}

struct ReplaceOutcome {
  absl::Status status;
  bool source_bad = false;
  DurableCopy copy{};
};

// Through the threads that the remote tier has: one of the two lies there, or nobody waits for it.
CopyPool* ReplacingPool(DrainContext& context, std::optional<size_t> drive) {
  return drive && *drive < context.relays.size() ? context.relays[*drive].get()
                                                 : context.pool.get();
}

ReplaceOutcome WriteAndPlace(const Context& context, TierPlace& place, CopyPool& pool,
                             CopyStore& store, const GoodCopy& good, const FlushShard& action,
                             Operation& operation) {
  const bool nvme = action.to == TierKind::kNvme;
  absl::StatusOr<std::optional<PartImage>> part = PartToWrite(context, store, action, *good.image);
  if (!part.ok()) {
    return {part.status()};
  }
  const ShardRecord& record = *part ? (*part)->record : good.image->record;
  const auto image = *part ? std::make_shared<const RecordAndLayout>((*part)->file) : good.image;
  absl::StatusOr<std::unique_ptr<CopyStore::Writing>> begun =
      store.BeginReplacement({action.key.id, action.key.job_name, action.key.world_size,
                              FileBytes(record), action.uid, action.gid});
  if (!begun.ok()) {
    return {begun.status()};
  }
  const std::shared_ptr<CopyStore::Writing> writing = *std::move(begun);
  BufferedCopySpec spec;
  spec.from_memory = good.memory;
  spec.from_file = good.file;
  spec.from_alignment = good.alignment;
  spec.source_name = good.whole.path_at;
  if (*part) {
    const auto gather = std::make_shared<const ImageMap>((*part)->from_whole);
    if (good.file != nullptr) {
      spec.from_file =
          std::make_shared<AssembledFile>(*gather, std::vector<std::shared_ptr<File>>{good.file});
      spec.from_alignment = 1;
    } else {
      spec.gather = gather;
    }
  }
  spec.to_file = ImageOf(writing);
  spec.to_alignment = writing->alignment();
  spec.image = image;
  spec.pacer = nvme ? context->nvme_pacer : context->remote_pacer;
  spec.control = operation.control();
  if (good.reading != nullptr && good.reading->compressed()) {
    spec.cores = context->training_cores->Beside();
  }
  const MonotonicTime began = Clock::System()->Now();
  const TransferResult result = pool.Copy(std::move(spec));
  place.CountWritten(result.bytes, Clock::System()->Now() - began);
  HF_SYNC_POINT("daemon.replace.data_written");
  if (!result.ok()) {
    const bool owners =
        result.bad_block && good.whole.path_at != nullptr &&
        good.whole.path_at(result.bad_block->image_offset) != good.reading->info().location;
    const bool sources = result.faulty == FaultySide::kSource;
    return owners ? ReplaceOutcome{absl::UnavailableError(result.status.message())}
                  : ReplaceOutcome{sources && good.reading != nullptr
                                       ? OfWhatLiesThere(result.status, *good.reading)
                                       : result.status,
                                   sources};
  }
  const absl::Status confirmed =
      good.reading != nullptr ? good.reading->Confirm() : absl::OkStatus();
  if (!confirmed.ok()) {
    return {confirmed, true};
  }
  if (operation.control()->cancelled()) {
    return {Cancelled("the replacement")};
  }
  if (absl::Status read = ReadReplacementBack(*context, *writing, *image, nvme, operation);
      !read.ok()) {
    return {Annotate(read, "what was written could not be read back")};
  }
  // From here on its end is told as it is. (In a mount that hangs nobody waits for that: as with
  // flushes.)
  if (nvme ? !operation.Pin() : operation.control()->cancelled()) {
    return {Cancelled("the replacement")};
  }
  absl::StatusOr<PublishedCopy> published = writing->Publish(EncodeRecord(record));
  if (!published.ok()) {
    return {published.status()};
  }
  HF_SYNC_POINT("daemon.replace.placed");
  ReplaceOutcome done;
  done.copy.copy = ToSealedCopy(record);
  done.copy.copy.generation = 0;
  if (record.kept) {
    done.copy.file_bytes = record.kept->image_bytes;
    done.copy.plan = record.kept->plan;
  }
  done.copy.record_bytes = published->record_bytes;
  done.copy.record_crc = published->record_crc;
  done.copy.location = published->location;
  return done;
}

}  // namespace

FlushEnded ReplaceCopy(const Context& context, std::optional<size_t> drive,
                       const FlushShard& action, Operation& operation) {
  const bool nvme = action.to == TierKind::kNvme;
  if (nvme && !drive) {
    return NotReplaced(action, absl::UnavailableError(absl::StrCat(action.key.id.ToString(),
                                                                   " is on none of the drives")));
  }
  TierPlace& place = nvme ? *context->drives[*drive] : *context->remote;
  // 1. The good copy.
  absl::StatusOr<GoodCopy> good = OpenGoodCopy(context, drive, action, operation);
  if (!good.ok()) {
    const bool bad = action.from == TierKind::kMemory ? absl::IsDataLoss(good.status())
                                                      : IsCopysFault(good.status(), action.from);
    // (NotFound is said of the copy that was to be replaced.)
    return NotReplaced(action,
                       absl::IsNotFound(good.status()) && !bad
                           ? absl::UnavailableError(good.status().message())
                           : good.status(),
                       bad);
  }
  if (operation.control()->cancelled()) {
    return NotReplaced(action, Cancelled("the replacement"));
  }
  // 2. The place of the bad one.
  const absl::StatusOr<std::shared_ptr<CopyStore>> store = StoreOf(place, operation);
  const TransferControl::Call call(operation.control().get(), "replace a copy in", place.dir());
  absl::Status status = store.status();
  if (status.ok() && nvme && drive) {
    status = NoteJob(*context, *drive, **store,
                     {action.key.id.job, action.key.job_name, action.uid, action.gid}, operation);
  }
  if (status.ok()) {
    status = OpenJobToMend(**store, action);
  }
  if (!status.ok()) {
    return NotReplaced(action, Judged(*context, place, status));
  }
  // 3. Written aside, read back, put in place.
  std::unique_ptr<CopyPool> own;
  CopyPool* pool = ReplacingPool(*context, drive);
  if (pool == nullptr) {  // there is no remote tier, and nobody else needs one
    CopyPoolOptions options;
    options.threads = 1;
    absl::StatusOr<std::unique_ptr<CopyPool>> started = CopyPool::Start(options);
    if (!started.ok()) {
      return NotReplaced(action, started.status());
    }
    own = *std::move(started);
    pool = own.get();
  }
  ReplaceOutcome outcome = WriteAndPlace(context, place, *pool, **store, *good, action, operation);
  const absl::Status ended =
      outcome.source_bad ? outcome.status : Judged(*context, place, outcome.status);
  if (!ended.ok()) {
    const bool bad =
        outcome.source_bad && (action.from == TierKind::kMemory ? absl::IsDataLoss(ended)
                                                                : IsCopysFault(ended, action.from));
    return NotReplaced(action, ended, bad);
  }
  return {action.drain, absl::OkStatus(), false, std::move(outcome.copy)};
}

}  // namespace holdfast
