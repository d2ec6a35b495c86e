// `restore-backup`: a job out of a directory of backups into a cluster's remote.dir. No daemon is
// asked.
#include <signal.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/status.h"
#include "base/units.h"
#include "ckptctl/backup_directory.h"
#include "ckptctl/backup_report.h"
#include "ckptctl/commands.h"
#include "ckptctl/progress.h"
#include "ckptctl/render.h"
#include "ckptctl/text.h"
#include "ckptctl/way_out.h"
#include "tiers/image/kept.h"
#include "tiers/transfer/buffered_copy.h"

namespace holdfast {
namespace {

constexpr size_t kCopyThreads = 4;
constexpr uint64_t kSyncBytes = 64 << 20;
constexpr std::chrono::milliseconds kCopyLook(50);

// A copy that goes on in a thread of its own, so that whoever started it can look after it.
class CopyUnderWay {
 public:
  CopyUnderWay(CopyPool& pool, BufferedCopySpec spec)
      : control_(spec.control), thread_([this, &pool, spec = std::move(spec)]() mutable {
          TransferResult result = pool.Copy(std::move(spec));
          const MutexLock lock(mutex_);
          result_ = std::move(result);
          ended_.NotifyAll();
        }) {}
  ~CopyUnderWay() {
    control_->Cancel();
    thread_.join();
  }

  // Waits a moment at most; null: it goes on.
  const TransferResult* Wait() {
    const MutexLock lock(mutex_);
    if (!result_) {
      ended_.WaitUntil(mutex_, std::chrono::steady_clock::now() + kCopyLook);
    }
    return result_ ? &*result_ : nullptr;
  }

 private:
  const std::shared_ptr<TransferControl> control_;
  Mutex mutex_;
  CondVar ended_;
  std::optional<TransferResult> result_ GUARDED_BY(mutex_);
  std::thread thread_;  // last: it uses the others
};

class RestoreBackup {
 public:
  RestoreBackup(const Context& context, const RestoreBackupArguments& arguments)
      : context_(context),
        arguments_(arguments),
        line_(context, Duration(0)),
        report_(context, line_) {}

  absl::Status Run();
  ExitCode Show() const;

 private:
  absl::Status Open();
  absl::Status CheckApart() const;
  bool IsWanted(Step step) const;
  absl::Status Choose();
  // An error ends the run; what is wrong with this step alone is in `fault`.
  absl::Status CopyStep(const CheckpointScan& scanned, StepFault& fault);
  absl::Status CopyRank(const std::shared_ptr<const Manifest>& manifest, Rank rank,
                        CopiedStep& copied, StepFault& fault);
  absl::Status CopyFile(std::shared_ptr<CopyStore::Reading> reading, CopiedStep& copied,
                        StepFault& fault);
  absl::Status CopyBytes(const std::shared_ptr<CopyStore::Reading>& reading,
                         const std::shared_ptr<CopyStore::Writing>& writing, StepFault& fault);
  absl::Status AddFailed(const CheckpointScan& scanned, const StepFault& fault);
  absl::Status Advance(uint64_t bytes);
  absl::Status Explain(const absl::Status& failed) const;

  const Context& context_;
  const RestoreBackupArguments& arguments_;
  ProgressLine line_;
  BackupReport report_;
  std::unique_ptr<BackupDirectory> from_;
  std::unique_ptr<BackupDirectory> to_;
  std::unique_ptr<CopyPool> pool_;
  std::vector<const CheckpointScan*> steps_;  // newest first
  std::vector<const StrayStep*> strays_;
  uint64_t bytes_total_ = 0;
  uint64_t bytes_done_ = 0;
  MonotonicTime begin_;
};

absl::Status RestoreBackup::Run() {
  begin_ = context_.clock->Now();
  HF_RETURN_IF_ERROR(Explain(Open()));
  for (const CheckpointScan* step : steps_) {
    StepFault fault;
    HF_RETURN_IF_ERROR(Explain(CopyStep(*step, fault)));
    if (!fault.why.ok()) {
      HF_RETURN_IF_ERROR(Explain(AddFailed(*step, fault)));
    }
  }
  for (const StrayStep* stray : strays_) {
    CopiedStep left_out;
    left_out.id = stray->id;
    left_out.state = StepCopied::kFailed;
    left_out.why = stray->why;
    report_.Add(std::move(left_out));
  }
  line_.Clear();
  return Explain(to_->ReleaseClaims());
}

absl::Status RestoreBackup::Open() {
  auto from = BackupDirectory::OpenToRead(*Env::System(), arguments_.directory, arguments_.job);
  HF_RETURN_IF_ERROR(from.status());
  from_ = *std::move(from);
  HF_RETURN_IF_ERROR(Choose());
  JobIdentity job = from_->job();
  if (arguments_.owner) {
    job.uid = arguments_.owner->uid;
    job.gid = arguments_.owner->gid;
  }
  HF_RETURN_IF_ERROR(CheckApart());
  auto to = BackupDirectory::OpenToWrite(*Env::System(), arguments_.to, job);
  HF_RETURN_IF_ERROR(to.status());
  to_ = *std::move(to);
  if (to_->job() != job && arguments_.owner) {
    return absl::FailedPreconditionError(
        absl::StrCat("the job is of uid ", to_->job().uid, " and gid ", to_->job().gid,
                     " there already: leave --owner out, or remove it there"));
  }
  CopyPoolOptions options;
  options.threads = kCopyThreads;
  HF_ASSIGN_OR_RETURN(pool_, CopyPool::Start(options));
  return absl::OkStatus();
}

// Nothing is written among the files of the backup that is read.
absl::Status RestoreBackup::CheckApart() const {
  HF_ASSIGN_OR_RETURN(const bool same, from_->IsSame(arguments_.to));
  if (same) {
    return absl::FailedPreconditionError("both are one directory");
  }
  HF_ASSIGN_OR_RETURN(const bool inside, from_->Contains(arguments_.to));
  return inside ? absl::FailedPreconditionError(
                      "that lies in the backup itself: name the remote.dir of the cluster that is "
                      "to have the job")
                : absl::OkStatus();
}

bool RestoreBackup::IsWanted(Step step) const {
  const std::vector<Step>& wanted = arguments_.steps;
  return wanted.empty() || std::find(wanted.begin(), wanted.end(), step) != wanted.end();
}

absl::Status RestoreBackup::Choose() {
  const std::vector<CheckpointScan>& there = from_->scan().checkpoints;
  for (auto scanned = there.rbegin(); scanned != there.rend(); ++scanned) {
    if (!IsWanted(scanned->id.step)) {
      continue;
    }
    steps_.push_back(&*scanned);
    for (const CopyEntry& copy : scanned->copies) {
      bytes_total_ += copy.image_bytes;
    }
  }
  for (const StrayStep& stray : from_->strays()) {
    if (IsWanted(stray.id.step)) {
      strays_.push_back(&stray);
    }
  }
  for (const Step step : arguments_.steps) {
    const auto is_it = [&](const auto* found) { return found->id.step == step; };
    if (std::none_of(steps_.begin(), steps_.end(), is_it) &&
        std::none_of(strays_.begin(), strays_.end(), is_it)) {
      return absl::NotFoundError(
          absl::StrCat("'", from_->path(), "' has no step ", step, " of that job"));
    }
  }
  return steps_.empty() && strays_.empty()
             ? absl::NotFoundError(absl::StrCat("'", from_->path(), "' has no step of that job"))
             : absl::OkStatus();
}

absl::Status RestoreBackup::CopyStep(const CheckpointScan& scanned, StepFault& fault) {
  CopiedStep copied;
  copied.id = scanned.id;
  copied.ranks = scanned.world_size;
  const absl::StatusOr<std::shared_ptr<const Manifest>> manifest = from_->FindManifest(scanned.id);
  if (!manifest.ok()) {
    fault.why = manifest.status();
    return absl::OkStatus();
  }
  if (*manifest == nullptr) {
    copied.state = arguments_.steps.empty() ? StepCopied::kIncomplete : StepCopied::kFailed;
    copied.why =
        absl::NotFoundError("the backup was ended before it was whole, and not gone on with");
    report_.Add(std::move(copied));
    return absl::OkStatus();
  }
  copied.ranks = (*manifest)->world_size;
  for (Rank rank = 0; rank < copied.ranks; ++rank) {
    HF_RETURN_IF_ERROR(CopyRank(*manifest, rank, copied, fault));
    if (!fault.why.ok()) {
      return absl::OkStatus();
    }
  }
  const CheckpointScan* const there = to_->Scanned(scanned.id);
  const bool was_there = there != nullptr && there->has_manifest && copied.bytes == 0;
  if (!was_there) {
    HF_RETURN_IF_ERROR(SortTarget(to_->Commit(**manifest), fault));
    if (!fault.why.ok()) {
      return absl::OkStatus();
    }
  }
  copied.state = was_there ? StepCopied::kWasThere : StepCopied::kWritten;
  report_.Add(std::move(copied));
  return absl::OkStatus();
}

absl::Status RestoreBackup::CopyRank(const std::shared_ptr<const Manifest>& manifest, Rank rank,
                                     CopiedStep& copied, StepFault& fault) {
  absl::StatusOr<std::unique_ptr<CopyStore::Reading>> reading =
      from_->OpenCopy(manifest->checkpoint, rank, manifest);
  if (!reading.ok()) {
    fault.why = reading.status();
    return absl::OkStatus();
  }
  const absl::StatusOr<std::optional<ManifestShard>> there = to_->Find((*reading)->record());
  HF_RETURN_IF_ERROR(SortTarget(there.status(), fault));
  if (!there.ok()) {
    return absl::OkStatus();
  }
  if (there->has_value()) {
    return Advance((*reading)->info().image_bytes);
  }
  return CopyFile(*std::move(reading), copied, fault);
}

absl::Status RestoreBackup::CopyFile(std::shared_ptr<CopyStore::Reading> reading,
                                     CopiedStep& copied, StepFault& fault) {
  const ShardRecord& record = reading->record();
  if (EncodeRecord(record) != reading->record_file()) {
    fault.why = absl::FailedPreconditionError(absl::StrCat(
        "the record beside '", reading->info().location,
        "' has more in it than this ckptctl knows: it was written by a newer Holdfast, whose "
        "ckptctl brings it back"));
    return absl::OkStatus();
  }
  absl::StatusOr<std::unique_ptr<CopyStore::Writing>> begun = to_->Begin(record);
  HF_RETURN_IF_ERROR(SortTarget(begun.status(), fault));
  if (!begun.ok()) {
    return absl::OkStatus();
  }
  const std::shared_ptr<CopyStore::Writing> writing = *std::move(begun);
  HF_RETURN_IF_ERROR(CopyBytes(reading, writing, fault));
  if (!fault.why.ok()) {
    return absl::OkStatus();
  }
  HF_RETURN_IF_ERROR(SortTarget(to_->Publish(*writing, record).status(), fault));
  copied.bytes += FileBytes(record);
  return absl::OkStatus();
}

// Every block is compared with the record on its way.
absl::Status RestoreBackup::CopyBytes(const std::shared_ptr<CopyStore::Reading>& reading,
                                      const std::shared_ptr<CopyStore::Writing>& writing,
                                      StepFault& fault) {
  HF_ASSIGN_OR_RETURN(const RecordAndLayout image, DecodeRecordAndLayout(reading->record_file()));
  const auto control = std::make_shared<TransferControl>();
  BufferedCopySpec spec;
  spec.from_file = std::shared_ptr<File>(reading, &reading->image());
  spec.from_alignment = reading->alignment();
  spec.to_file = std::shared_ptr<File>(writing, &writing->image());
  spec.to_alignment = writing->alignment();
  spec.image = std::make_shared<const RecordAndLayout>(FileImage(image));
  spec.control = control;
  CopyUnderWay copy(*pool_, std::move(spec));
  const TransferResult* result = nullptr;
  uint64_t told = 0;
  for (uint64_t synced = 0; result == nullptr;) {
    result = copy.Wait();
    const uint64_t done = std::min(control->bytes_done(), FileBytes(image.record));
    HF_RETURN_IF_ERROR(Advance(done - std::min(done, told)));
    told = std::max(told, done);
    if (result == nullptr && done - synced >= kSyncBytes) {
      synced = done;
      HF_RETURN_IF_ERROR(to_->Sync(*writing));
    }
  }
  if (result->faulty == FaultySide::kSource) {
    fault.why = result->status;
    return absl::OkStatus();
  }
  return OfBackup(result->status);
}

// One that is bad in the backup nothing completes: what was written of it would only take room.
absl::Status RestoreBackup::AddFailed(const CheckpointScan& scanned, const StepFault& fault) {
  CopiedStep failed;
  failed.id = scanned.id;
  failed.ranks = scanned.world_size;
  failed.state = StepCopied::kFailed;
  failed.why = fault.why;
  report_.Add(std::move(failed));
  return absl::IsDataLoss(fault.why) && !fault.of_target ? to_->Discard(scanned.id)
                                                         : absl::OkStatus();
}

absl::Status RestoreBackup::Advance(uint64_t bytes) {
  bytes_done_ += bytes;
  line_.Draw([&] {
    const int64_t elapsed = (context_.clock->Now() - begin_) / std::chrono::milliseconds(1);
    return absl::StrCat("restore-backup ", EscapeText(arguments_.job), " ",
                        ByteProgress(bytes_done_, bytes_total_, elapsed));
  });
  return context_.interrupted != nullptr && *context_.interrupted
             ? absl::CancelledError("interrupted")
             : absl::OkStatus();
}

absl::Status RestoreBackup::Explain(const absl::Status& failed) const {
  if (failed.ok()) {
    return failed;
  }
  const std::string again =
      report_.complete() == 0
          ? "the same command goes on"
          : absl::StrCat("the same command goes on behind the ",
                         Count(report_.complete(), "step that is", "steps that are"), " whole");
  std::string way_out =
      WayOutOfDirectory(failed, bytes_total_ - std::min(bytes_total_, bytes_done_), again);
  if (absl::IsPermissionDenied(failed)) {
    way_out = "; run it as the user that ckptd is there";
  } else if (absl::IsCancelled(failed)) {
    way_out = absl::StrCat("; ", again);
  }
  return absl::Status(failed.code(),
                      absl::StrCat("bring job ", arguments_.job, " from '", arguments_.directory,
                                   "' into '", arguments_.to, "': ", Message(failed), way_out));
}

ExitCode RestoreBackup::Show() const {
  BackupReport::Ending ending;
  ending.job = to_->job();
  ending.directory = to_->path();
  ending.elapsed_ms = (context_.clock->Now() - begin_) / std::chrono::milliseconds(1);
  ending.hint =
      "a ckptd that has it as remote.dir finds them when the job's first rank joins; at once by "
      "ckptctl rebuild --tier remote";
  return report_.Show(ending);
}

}  // namespace

ExitCode RunRestoreBackup(const Context& context, const RestoreBackupArguments& arguments) {
  RestoreBackup one(context, arguments);
  if (const absl::Status done = one.Run(); !done.ok()) {
    return ReportError(context, done);
  }
  return one.Show();
}

}  // namespace holdfast
