// What is done with copies where they lie: verified, named by a manifest, removed, found.
#include <algorithm>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/errno_status.h"
#include "base/log.h"
#include "base/status.h"
#include "base/sync_point.h"
#include "base/utf8.h"
#include "server/runtime/found_state.h"
#include "server/runtime/tiers/operation_parts.h"
#include "tiers/transfer/direct_copy.h"

namespace holdfast {

namespace {

// `replaced`: what was found wrong was so before a good copy was put in its place.
absl::StatusOr<std::string> VerifyWhatLiesThere(const Context& context, size_t drive,
                                                const ReadableShard& shard, Pacer* pacer,
                                                Operation& operation, bool& replaced) {
  const bool nvme = shard.tier == TierKind::kNvme;
  TierPlace& place = nvme ? *context->drives[drive] : *context->remote;
  const absl::StatusOr<std::shared_ptr<CopyStore>> store = StoreOf(place, operation);
  if (!store.ok()) {
    Judge(*context, place, store.status());
    return store.status();
  }
  const TransferControl::Call call(operation.control().get(), "verify a copy in", place.dir());
  CopyStore::ReadOptions options;
  options.past_cache = true;
  absl::StatusOr<std::unique_ptr<CopyStore::Reading>> reading =
      (*store)->OpenCopy({shard.copy.id, shard.copy.job_name, shard.copy.world_size}, options);
  if (absl::IsNotFound(reading.status())) {
    return reading.status();  // of a directory that is away the store says something else
  }
  const auto judged = [&](const absl::Status& status) -> absl::StatusOr<std::string> {
    Judge(*context, place, status);
    return IsCopysFault(status, shard.tier) ? absl::StatusOr<std::string>(Message(status)) : status;
  };
  if (!reading.ok()) {
    return judged(reading.status());
  }
  const absl::StatusOr<RecordAndLayout> image = DecodeRecordAndLayout((*reading)->record_file());
  if (!image.ok()) {
    return judged(image.status());
  }
  const RecordAndLayout file = FileImage(*image);
  // As much in flight as keeps it reading while a piece is digested, and no more: others have the
  // drive, too, and buffers that stay in the processor's cache are filled faster than more of them
  // would be. In the mount what hangs holds a thread, as all its calls do.
  // Unpacking takes a core, here and in the threads that read for this one: of those there are
  // fewer.
  const RunsBesideTraining beside(*context->training_cores, (*reading)->compressed());
  BlockIoOptions io_options;
  io_options.mode = nvme ? ModeOf(context->nvme) : BlockIoMode::kThreads;
  io_options.depth = 2;
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<BlockIo> io, CreateBlockIo(io_options));
  DirectCopyOptions copy;
  copy.piece_bytes = size_t{2} << 20;
  copy.alignment = (*reading)->alignment();
  copy.control = operation.control().get();
  copy.pacer = pacer;
  copy.count_bad = true;
  const MonotonicTime began = Clock::System()->Now();
  const TransferResult result =
      VerifyFile(*io, (*reading)->image(), file.record, file.layout, ReadBack::kAll, copy);
  place.CountRead(result.bytes, Clock::System()->Now() - began);
  if (!result.ok() && result.faulty != FaultySide::kSource) {
    return result.status;  // given up, or never begun: nothing is known of the copy
  }
  const absl::Status confirmed = result.ok() ? (*reading)->Confirm() : result.status;
  if (!confirmed.ok()) {
    replaced = (*reading)->WasReplaced();
    return judged(confirmed);
  }
  if (image->record.kept) {
    // What other files have of it is verified with those; here, that they say so. (One that cannot
    // be read is bad itself, and this one is as it should be.)
    const absl::Status whole =
        OpenWhole(*store, {shard.copy.id, shard.copy.job_name, shard.copy.world_size},
                  *std::move(reading), *image, *operation.control())
            .status();
    if (!whole.ok() && !(IsOwnersFault(whole) && IsCopysFault(whole, shard.tier))) {
      return judged(whole);
    }
  }
  Judge(*context, place, confirmed);
  return std::string();
}

}  // namespace

absl::StatusOr<std::string> VerifyCopy(const Context& context, size_t drive,
                                       const ReadableShard& shard, Pacer* pacer,
                                       Operation& operation) {
  bool replaced = false;
  absl::StatusOr<std::string> verdict =
      VerifyWhatLiesThere(context, drive, shard, pacer, operation, replaced);
  // (Once: what lies there is judged in the end also where a mount tells files apart by nothing.)
  if (std::exchange(replaced, false) && !operation.control()->cancelled()) {
    verdict = VerifyWhatLiesThere(context, drive, shard, pacer, operation, replaced);
  }
  // Nothing is condemned on one reading: a cable, a cache or a bus may have flipped the bit.
  const bool condemned = verdict.ok() && !verdict->empty();
  return condemned && !operation.control()->cancelled()
             ? VerifyWhatLiesThere(context, drive, shard, pacer, operation, replaced)
             : std::move(verdict);
}

ManifestPublished PublishRemoteManifest(const Context& context,
                                        const holdfast::PublishManifest& action,
                                        Operation& operation) {
  TierPlace& place = *context->remote;
  const absl::StatusOr<std::shared_ptr<CopyStore>> store = StoreOf(place, operation);
  if (!store.ok()) {
    Judge(*context, place, store.status());
    return {action.drain, store.status()};
  }
  const TransferControl::Call call(operation.control().get(), "publish a manifest in", place.dir());
  const JobIdentity job{action.job, action.job_name, action.uid, action.gid};
  std::vector<Rank> missing;
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
      const bool part = shard.file_bytes != 0;
      manifest.shards.push_back({shard.copy.id.rank,
                                 part ? shard.file_bytes : shard.copy.image_bytes,
                                 shard.record_bytes, shard.record_crc, shard.copy.layout_hash,
                                 part ? shard.copy.image_bytes : 0, shard.copy.likeness});
    }
    HF_SYNC_POINT("daemon.manifest.begun");
    status = (*store)->PublishManifest(manifest, nullptr, &missing);
    HF_SYNC_POINT("daemon.manifest.published");
  }
  return {action.drain, Judged(*context, place, status), std::move(missing)};
}

namespace {

CopyStore::MayGoOn UntilCancelled(Operation& operation) {
  return [control = operation.control()] { return !control->cancelled(); };
}

// What a newer program committed is its to remove, and what cannot be read just now is not judged.
absl::Status MayRemove(CopyStore& store, const CheckpointName& name) {
  const absl::Status read = store.ReadManifest(name).status();
  const bool damaged = absl::IsDataLoss(read) && !IsErrno(read);
  return absl::IsNotFound(read) || damaged ? absl::OkStatus() : read;
}

}  // namespace

absl::Status RemoveFrom(const Context& context, std::optional<size_t> drive,
                        const RemoveCopies& action, Operation& operation) {
  TierPlace& place = PlaceOf(*context, drive);
  const absl::StatusOr<std::shared_ptr<CopyStore>> store = StoreOf(place, operation);
  if (!store.ok()) {
    return Judged(*context, place, store.status());
  }
  const TransferControl::Call call(operation.control().get(), "remove a step in", place.dir());
  const CheckpointName name{action.job, action.job_name, action.checkpoint};
  absl::Status removed = drive ? absl::OkStatus() : MayRemove(**store, name);
  if (removed.ok()) {
    removed = (*store)->RemoveCheckpoint(name, UntilCancelled(operation)).status();
  }
  const absl::Status ended = Judged(*context, place, removed);
  if (drive && (ended.ok() || absl::IsNotFound(ended))) {
    context->index.Erase(action.job, action.checkpoint, *drive);
  }
  HF_SYNC_POINT("daemon.removal.done");
  return ended;
}

absl::Status RemoveJobFrom(const Context& context, std::optional<size_t> drive,
                           const RemoveJobCopies& action, Operation& operation) {
  TierPlace& place = PlaceOf(*context, drive);
  const absl::StatusOr<std::shared_ptr<CopyStore>> store = StoreOf(place, operation);
  if (!store.ok()) {
    return Judged(*context, place, store.status());
  }
  const TransferControl::Call call(operation.control().get(), "remove a job in", place.dir());
  const absl::Status removed =
      (*store)->RemoveJob(action.job, action.job_name, UntilCancelled(operation)).status();
  // The directory of that name is another run's: there is nothing of this one.
  const absl::Status ended =
      absl::IsFailedPrecondition(removed) ? absl::OkStatus() : Judged(*context, place, removed);
  if (drive && (ended.ok() || absl::IsNotFound(ended))) {
    context->index.EraseJob(action.job, *drive);
    if (!absl::IsFailedPrecondition(removed)) {  // (the other run's drive is still expected)
      context->witnesses->JobGone(*drive, action.job_name);
    }
  }
  return ended;
}

absl::StatusOr<std::string> CheckJobFileIn(const Context& context, std::optional<size_t> drive,
                                           const std::string& job_name, const JobOwner& owner,
                                           Operation& operation) {
  TierPlace& place = PlaceOf(*context, drive);
  HF_ASSIGN_OR_RETURN(const std::shared_ptr<CopyStore> store, StoreOf(place, operation));
  const TransferControl::Call call(operation.control().get(), "look for JOB in", place.dir());
  const absl::StatusOr<JobIdentity> job = store->FindJob(job_name);
  if (!job.ok() || (job->uid == owner.uid && job->gid == owner.gid)) {
    return std::string();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("the one in ", place.dir(), " says that the job is ", job->uid, ":", job->gid,
                   "'s; to write the others like it: ckptctl rebuild ", job_name, " --owner ",
                   job->uid, ":", job->gid));
}

absl::StatusOr<std::string> WriteJobFileIn(const Context& context, std::optional<size_t> drive,
                                           const std::string& job_name, const JobOwner& owner,
                                           Operation& operation) {
  TierPlace& place = PlaceOf(*context, drive);
  HF_ASSIGN_OR_RETURN(const std::shared_ptr<CopyStore> store, StoreOf(place, operation));
  const TransferControl::Call call(operation.control().get(), "write JOB in", place.dir());
  HF_ASSIGN_OR_RETURN(const CopyStore::JobFileWritten file, store->WriteJobFile(job_name, owner));
  return absl::StrCat("JOB ", file.written ? "was written" : "is as it was", ": job ",
                      file.job.job.ToString(), " of ", file.job.uid, ":", file.job.gid);
}

absl::StatusOr<std::string> AdoptRemoteDirectory(const Context& context, const std::string& from,
                                                 Operation& operation) {
  TierPlace& place = PlaceOf(*context, std::nullopt);
  const TransferControl::Call call(operation.control().get(), "adopt", place.dir());
  HF_RETURN_IF_ERROR(place.Adopt(from));
  Judge(*context, place, absl::OkStatus());
  return std::string();
}

void LookAt(const Context& context, std::optional<size_t> drive, Operation& operation) {
  TierPlace& place = PlaceOf(*context, drive);
  const TransferControl::Call call(operation.control().get(), "look at", place.dir());
  const bool was_open = place.OpenStore() != nullptr;
  const absl::StatusOr<std::shared_ptr<CopyStore>> store = StoreOf(place, operation);
  absl::Status looked = store.status();
  if (store.ok()) {
    looked = (*store)->Space().status();
    if (looked.ok() && was_open && !place.health().problem.empty()) {
      return;  // what failed there is well again when something like it succeeds
    }
  }
  const std::string before = place.health().problem;
  const TierPlace::Noted noted = Noted(*context, place, looked);
  if (!noted.away.ok() && !noted.went_away) {
    // Once more: what ended there at the same time may have been told after it.
    context->outlet->Post(AwayEvent(*context, place, noted.away));
  }
  if (const std::string now = place.health().problem; !now.empty() && now != before) {
    LogWarning(absl::StrCat(place.dir(), ": ", now));  // nobody has asked for it who would say so
  }
}

// ---- What there is ----

namespace {

constexpr size_t kProblemsToldMax = 32;

// What the core is told of names that were found is text: it goes on to clients, people and logs.
absl::Status Shown(const absl::Status& status) {
  return status.ok() ? status : absl::Status(status.code(), Utf8Text(Message(status)));
}

bool Whole(const CheckpointScan& step) {
  return step.world_size > 0 && step.copies.size() == step.world_size;
}

// Nobody will ever read it. (What the system says about a call may be another tomorrow.)
bool IsDamage(const absl::Status& why) {
  return absl::IsDataLoss(why) && !IsErrno(why);
}

constexpr size_t kWhatBytesMax = 512;

DurableCopy CopyOf(const JobScan& job, const CheckpointScan& step, const CopyEntry& entry,
                   uint32_t world_size, const std::vector<Descent>& descent, CopyStore& store) {
  DurableCopy copy;
  copy.copy.id = {job.job.job, step.id.attempt, step.id.step, entry.rank};
  copy.copy.job_name = job.job.name;
  copy.copy.world_size = world_size;
  copy.copy.image_bytes = entry.shard_bytes;
  copy.copy.likeness = entry.likeness;
  copy.file_bytes = entry.image_bytes != entry.shard_bytes ? entry.image_bytes : 0;
  copy.plan = entry.plan;
  copy.copy.layout_hash = entry.layout_hash;
  copy.copy.descent = descent;
  copy.copy.sealed_unix_ms =
      entry.sealed_unix_ms != 0 ? entry.sealed_unix_ms : step.committed_unix_ms;
  copy.from_manifest = entry.sealed_unix_ms == 0;
  copy.record_bytes = entry.record_bytes;
  copy.record_crc = entry.record_crc;
  copy.location = store.ImagePath({copy.copy.id, job.job.name, world_size}, entry.form);
  return copy;
}

// Nothing else tells that there was such a step: it is known by the name of its manifest.
BadDurableCopy NothingButItsManifest(const JobScan& job, const CheckpointScan& step,
                                     CopyStore& store) {
  BadDurableCopy bad;
  bad.copy = CopyOf(job, step, CopyEntry(), 0, {}, store);
  bad.copy.location =
      absl::StrCat(bad.copy.location.substr(0, bad.copy.location.rfind('/') + 1), "MANIFEST");
  bad.what =
      Utf8Text(absl::StrCat(Message(step.manifest_why), "; no other file of the step is there")
                   .substr(0, kWhatBytesMax));
  return bad;
}

void Convert(const DurableScan& scan, TierScanned& out, CopyStore& store,
             const std::function<void(const ShardId&)>& each,
             const std::function<void(const ShardId&)>& each_bad) {
  for (const JobScan& job : scan.jobs) {
    FoundJob found{job.job.job, job.job.name, job.job.uid, job.job.gid, {}, {}};
    for (const Attempt claim : job.claims) {
      found.highest_claim = std::max(found.highest_claim, claim);
    }
    for (const CheckpointScan& step : job.checkpoints) {
      // What else was committed is not known, and may be tomorrow: it is told below.
      if (step.manifest_unreadable && !Whole(step) && !IsDamage(step.manifest_why)) {
        continue;
      }
      // With a manifest that is there it was committed; also with one that is no use, if every
      // rank's copy is there. Whoever opens a copy of a step whose manifest is newer, or cannot be
      // read just now, is told so.
      if (step.has_manifest || (step.manifest_unreadable && Whole(step))) {
        found.manifests.push_back(step.id);
      }
      if (step.begun) {
        found.begun.push_back(step.id);
      }
      if (step.manifest_unreadable && step.copies.empty() && step.damaged.empty()) {
        found.bad.push_back(NothingButItsManifest(job, step, store));
      }
      for (const CopyEntry& entry : step.copies) {
        found.copies.push_back(CopyOf(job, step, entry, step.world_size, step.descent, store));
        each(found.copies.back().copy.id);
      }
      for (const DamagedEntry& damaged : step.damaged) {
        if (found.bad.size() == kBadCopiesMax) {
          break;
        }
        found.bad.push_back(
            {CopyOf(job, step, damaged.entry, damaged.world_size, damaged.descent, store),
             Utf8Text(damaged.why.substr(0, kWhatBytesMax))});
        each_bad(found.bad.back().copy.copy.id);
      }
    }
    out.jobs.push_back(std::move(found));
  }
  for (const UnreadableCopy& bad : scan.unreadable) {
    if (out.problems.size() < kProblemsToldMax) {
      out.problems.push_back(Utf8Text(absl::StrCat("'", bad.location, "': ", Message(bad.why))));
    }
  }
  for (const UnknownFile& file : scan.unknown) {
    out.unknown_files.push_back(Utf8Text(absl::StrCat(file.path, ": ", file.why)));
  }
  for (const auto& [job, why] : scan.hidden) {
    out.hidden[job] = Utf8Text(Message(why));
  }
}

// What a newer program wrote, or what cannot be read just now, may be the job's newest step. With
// nothing of it told, this scan says nothing about what there is not. (A damaged manifest is
// another matter.)
absl::Status WhatWasNotJudged(const DurableScan& scan, const std::string& job) {
  if (!scan.hidden.empty()) {
    return scan.hidden.begin()->second;
  }
  if (scan.jobs.empty() && !scan.unreadable.empty()) {
    return Annotate(scan.unreadable.front().why, absl::StrCat("job '", job, "'"));
  }
  for (const JobScan& found : scan.jobs) {
    for (const CheckpointScan& step : found.checkpoints) {
      if (!step.manifest_why.ok() && !IsDamage(step.manifest_why) && !Whole(step)) {
        return step.manifest_why;
      }
    }
  }
  return absl::OkStatus();
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
  scanned.status = Shown(Judged(*context, place, scan.status()));
  if (scanned.status.ok()) {
    Convert(
        *scan, scanned, **store, [&](const ShardId& id) { context->index.Put(id, drive); },
        [&](const ShardId& id) {
          if (!context->index.Find(id)) {  // (another drive may have a good one)
            context->index.Put(id, drive);
          }
        });
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
  scanned.status = Shown(Judged(*context, place, scan.status()));
  if (scanned.status.ok()) {
    const auto nothing = [](const ShardId&) {};
    Convert(*scan, scanned, **store, nothing, nothing);
    if (!only_job.empty()) {
      scanned.status = Shown(WhatWasNotJudged(*scan, only_job));
    }
  }
  return scanned;
}

}  // namespace holdfast
