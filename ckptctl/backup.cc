// `backup`: every committed step of a job, from wherever it lies, into a directory in the form of
// the remote tier.
#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "ckptctl/backup_directory.h"
#include "ckptctl/backup_report.h"
#include "ckptctl/commands.h"
#include "ckptctl/open_step.h"
#include "ckptctl/progress.h"
#include "ckptctl/render.h"
#include "ckptctl/text.h"
#include "ckptctl/way_out.h"
#include "client-lib/src/connection.h"
#include "client-lib/src/shard_image.h"
#include "client-lib/src/step_records.h"
#include "holdfast/v1/admin.pb.h"
#include "holdfast/view.h"

namespace holdfast {
namespace {

// A window may come from a drive or a mount that is slow.
constexpr std::chrono::minutes kShardWindowTimeMin(5);

// The user's own group: which one the job's processes had no daemon says. Who is not known here has
// one of the same number, as is usual.
uint32_t GroupOf(uint32_t uid) {
  if (uid != 0 && uid == ::geteuid()) {
    return ::getegid();
  }
  const passwd* const user = ::getpwuid(uid);
  return user == nullptr ? uid : user->pw_gid;
}

// Whose job it is: in another cluster that user has it.
absl::StatusOr<JobIdentity> FindJobOf(const Context& context, const std::string& name) {
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<AdminClient> client, ConnectAdmin(context));
  v1::GetStatusRequest request;
  request.set_job(name);
  v1::GetStatusReply reply;
  HF_RETURN_IF_ERROR(client->GetStatus(request, reply));
  for (const v1::JobStatus& job : reply.jobs()) {
    if (job.name() == name) {
      HF_ASSIGN_OR_RETURN(const JobUuid uuid, JobUuid::FromString(job.uuid()));
      return JobIdentity{uuid, name, job.uid(), GroupOf(job.uid())};
    }
  }
  return absl::NotFoundError(absl::StrCat("there is no job '", name, "'"));
}

class Backup {
 public:
  Backup(const Context& context, const BackupArguments& arguments)
      : context_(context),
        arguments_(arguments),
        line_(context, Duration(0)),
        report_(context, line_) {}

  absl::Status Run();
  ExitCode Show() const;

 private:
  // A step, and what has been written of it.
  struct Shards {
    CheckpointInfo info;
    std::optional<client::StepRecords> records;
    Manifest manifest;
    CopiedStep copied;
  };

  absl::Status Open();
  absl::StatusOr<std::vector<CheckpointInfo>> List() const;
  absl::Status Choose(const std::vector<CheckpointInfo>& all);
  absl::Status DiscardUnfinished(const std::vector<CheckpointInfo>& all);
  // An error ends the run; what is wrong with this step alone is in `fault`.
  absl::Status CopyStep(const CheckpointInfo& info, StepFault& fault);
  absl::Status CopyRank(Shards& step, Rank rank, StepFault& fault);
  static std::optional<ShardRecord> RecordOf(const Shards& step, Rank rank);
  absl::Status OpenShard(const Shards& step, Rank rank, std::unique_ptr<client::ShardImage>& image,
                         StepFault& fault) const;
  absl::Status WriteShard(Shards& step, client::ShardImage& image, StepFault& fault);
  absl::Status WriteBytes(client::ShardImage& image, CopyStore::Writing& writing, StepFault& fault);
  absl::Status AddFailed(const CheckpointInfo& info, const StepFault& fault);
  absl::StatusOr<bool> IsListed(const CheckpointId& id) const;
  // What the source fails with: an error that ends the run, or one of this step alone.
  static absl::Status Sort(const absl::Status& status, StepFault& fault);
  absl::Status OfSource(const Status& status) const {
    return FromClient(context_, socket_, status);
  }
  Milliseconds WindowTime() const;
  client::Deadline WindowDeadline() const {
    return client::Deadline::In(WindowTime()).Or(*interrupt_);
  }
  absl::Status Explain(const absl::Status& failed) const;
  absl::Status Advance(uint64_t bytes);

  const Context& context_;
  const BackupArguments& arguments_;
  ProgressLine line_;
  BackupReport report_;
  std::string socket_;
  JobIdentity job_;
  client::ShardSource source_;
  mutable std::optional<client::Interrupt> interrupt_;
  std::unique_ptr<BackupDirectory> directory_;
  std::vector<CheckpointInfo> steps_;  // newest first
  uint64_t bytes_total_ = 0;
  uint64_t bytes_done_ = 0;
  MonotonicTime begin_;
};

CheckpointId IdOf(const CheckpointInfo& info) {
  return {info.attempt, info.step};
}

absl::Status Backup::Run() {
  begin_ = context_.clock->Now();
  HF_RETURN_IF_ERROR(Open());
  for (const CheckpointInfo& info : steps_) {
    StepFault fault;
    HF_RETURN_IF_ERROR(Explain(CopyStep(info, fault)));
    if (!fault.why.ok()) {
      HF_RETURN_IF_ERROR(Explain(AddFailed(info, fault)));
    }
  }
  line_.Clear();
  return Explain(directory_->ReleaseClaims());
}

absl::Status Backup::Open() {
  HF_ASSIGN_OR_RETURN(socket_, FindClient(context_, arguments_.client_socket));
  HF_ASSIGN_OR_RETURN(job_, FindJobOf(context_, arguments_.job));
  source_.socket = socket_;
  source_.interrupted = [this] { return context_.interrupted != nullptr && *context_.interrupted; };
  interrupt_.emplace(source_.interrupted);
  auto connection = client::Connection::Dial(socket_, WindowDeadline());
  HF_RETURN_IF_ERROR(OfSource(connection.status()));
  source_.connection = *std::move(connection);
  HF_ASSIGN_OR_RETURN(const std::vector<CheckpointInfo> all, List());
  HF_RETURN_IF_ERROR(Choose(all));
  auto directory = BackupDirectory::OpenToWrite(*Env::System(), arguments_.directory, job_);
  HF_RETURN_IF_ERROR(Explain(directory.status()));
  directory_ = *std::move(directory);
  return Explain(DiscardUnfinished(all));
}

Milliseconds Backup::WindowTime() const {
  return std::max<Milliseconds>(kShardWindowTimeMin,
                                std::chrono::duration_cast<Milliseconds>(context_.timeout));
}

absl::StatusOr<std::vector<CheckpointInfo>> Backup::List() const {
  const WaitingLine waiting(context_, "looking at what was saved");
  ListOptions options;
  options.job = arguments_.job;
  options.socket = socket_;
  options.deadline = std::chrono::duration_cast<Milliseconds>(context_.timeout);
  options.interrupted = source_.interrupted;
  Result<std::vector<CheckpointInfo>> all = ListCheckpoints(options);
  HF_RETURN_IF_ERROR(OfSource(all.status()));
  return *std::move(all);
}

absl::Status Backup::Choose(const std::vector<CheckpointInfo>& all) {
  const std::vector<Step>& wanted = arguments_.steps;
  for (const Step step : wanted) {
    const auto is_it = [&](const CheckpointInfo& info) { return info.step == step; };
    if (std::none_of(all.begin(), all.end(), is_it)) {
      return absl::NotFoundError(absl::StrCat("job '", arguments_.job, "' has no step ", step,
                                              " that can be read now; ckptctl list ",
                                              arguments_.job, " says which there are"));
    }
  }
  std::copy_if(all.begin(), all.end(), std::back_inserter(steps_), [&](const auto& info) {
    return wanted.empty() || std::find(wanted.begin(), wanted.end(), info.step) != wanted.end();
  });
  if (steps_.empty()) {
    return absl::NotFoundError(
        absl::StrCat("job '", arguments_.job, "' has no committed step that can be read now"));
  }
  for (const CheckpointInfo& info : steps_) {
    bytes_total_ += info.bytes;
  }
  return absl::OkStatus();
}

// What a run that was ended had begun, and retention has removed since: nothing completes it.
absl::Status Backup::DiscardUnfinished(const std::vector<CheckpointInfo>& all) {
  for (const CheckpointScan& scanned : directory_->scan().checkpoints) {
    const bool goes_on = std::any_of(all.begin(), all.end(), [&](const CheckpointInfo& info) {
      return IdOf(info) == scanned.id;
    });
    const bool begun = !scanned.copies.empty() && !scanned.has_manifest;
    if (!goes_on && begun && !scanned.manifest_unreadable) {
      HF_RETURN_IF_ERROR(directory_->Discard(scanned.id));
    }
  }
  return absl::OkStatus();
}

absl::Status Backup::Sort(const absl::Status& status, StepFault& fault) {
  switch (status.code()) {
    case absl::StatusCode::kDataLoss:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kResourceExhausted:
      fault.why = status;
      return absl::OkStatus();
    default:
      return status;
  }
}

absl::Status Backup::CopyStep(const CheckpointInfo& info, StepFault& fault) {
  Shards step;
  step.info = info;
  step.manifest.job = job_.job;
  step.manifest.job_name = job_.name;
  step.manifest.checkpoint = IdOf(info);
  step.manifest.world_size = info.world_size;
  step.copied.id = IdOf(info);
  step.copied.ranks = info.world_size;
  Result<client::StepRecords> records = client::StepRecords::Read(
      source_, arguments_.job, IdOf(info), info.world_size, WindowDeadline());
  HF_RETURN_IF_ERROR(OfSource(records.status()));
  step.records = *std::move(records);
  for (Rank rank = 0; rank < info.world_size; ++rank) {
    HF_RETURN_IF_ERROR(CopyRank(step, rank, fault));
    if (!fault.why.ok()) {
      return absl::OkStatus();
    }
  }
  const CheckpointScan* const scanned = directory_->Scanned(step.copied.id);
  const bool was_there = scanned != nullptr && scanned->has_manifest && step.copied.bytes == 0;
  if (!was_there) {
    step.manifest.committed_unix_ms = context_.clock->UnixMillis();
    HF_RETURN_IF_ERROR(SortTarget(directory_->Commit(step.manifest), fault));
    if (!fault.why.ok()) {
      return absl::OkStatus();
    }
  }
  step.copied.state = was_there ? StepCopied::kWasThere : StepCopied::kWritten;
  report_.Add(std::move(step.copied));
  return absl::OkStatus();
}

// As the daemon has gathered it.
std::optional<ShardRecord> Backup::RecordOf(const Shards& step, Rank rank) {
  std::optional<client::StepRecord> gathered = step.records->Of(rank);
  if (!gathered) {
    return std::nullopt;
  }
  return WholeRecord(std::move(gathered->image.record));
}

absl::Status Backup::OpenShard(const Shards& step, Rank rank,
                               std::unique_ptr<client::ShardImage>& image, StepFault& fault) const {
  client::ShardImageOptions options;
  options.job = arguments_.job;
  options.checkpoint = IdOf(step.info);
  options.rank = rank;
  options.world_size = step.info.world_size;
  options.threads = std::max(1U, std::thread::hardware_concurrency());
  options.deadline = WindowTime();
  Result<std::unique_ptr<client::ShardImage>> opened = client::ShardImage::Open(source_, options);
  if (!opened.ok()) {
    return Sort(OfSource(opened.status()), fault);
  }
  image = *std::move(opened);
  return absl::OkStatus();
}

absl::Status Backup::CopyRank(Shards& step, Rank rank, StepFault& fault) {
  // 1. What the shard is.
  std::unique_ptr<client::ShardImage> image;
  std::optional<ShardRecord> record = RecordOf(step, rank);
  if (!record) {
    HF_RETURN_IF_ERROR(OpenShard(step, rank, image, fault));
    if (!fault.why.ok()) {
      return absl::OkStatus();
    }
    record = image->record();
  }
  if (record->id.job != job_.job) {
    fault.why = absl::NotFoundError("the job was removed, and made anew, meanwhile");
    return absl::OkStatus();
  }
  if (step.manifest.descent.empty()) {
    step.manifest.descent = record->descent;
  }
  // 2. Whether it is there.
  const absl::StatusOr<std::optional<ManifestShard>> there = directory_->Find(*record);
  HF_RETURN_IF_ERROR(SortTarget(there.status(), fault));
  if (!there.ok()) {
    return absl::OkStatus();
  }
  if (there->has_value()) {
    step.manifest.shards.push_back(**there);
    return Advance((*there)->WholeBytes());
  }
  // 3. Else it is written.
  if (image == nullptr) {
    HF_RETURN_IF_ERROR(OpenShard(step, rank, image, fault));
  }
  return fault.why.ok() ? WriteShard(step, *image, fault) : absl::OkStatus();
}

absl::Status Backup::WriteShard(Shards& step, client::ShardImage& image, StepFault& fault) {
  const ShardRecord& record = image.record();
  const absl::StatusOr<std::unique_ptr<CopyStore::Writing>> writing = directory_->Begin(record);
  HF_RETURN_IF_ERROR(SortTarget(writing.status(), fault));
  if (!writing.ok()) {
    return absl::OkStatus();
  }
  HF_RETURN_IF_ERROR(WriteBytes(image, **writing, fault));
  if (!fault.why.ok()) {
    return absl::OkStatus();
  }
  const absl::StatusOr<ManifestShard> shard = directory_->Publish(**writing, record);
  HF_RETURN_IF_ERROR(SortTarget(shard.status(), fault));
  if (!shard.ok()) {
    return absl::OkStatus();
  }
  step.manifest.shards.push_back(*shard);
  step.copied.bytes += record.image_bytes;
  if (!image.why().empty()) {
    step.copied.notes.push_back(absl::StrCat("rank ", record.id.rank, ": ", image.why()));
  }
  return absl::OkStatus();
}

absl::Status Backup::WriteBytes(client::ShardImage& image, CopyStore::Writing& writing,
                                StepFault& fault) {
  WindowReader windows(context_, socket_,
                       [&image](std::byte* to) { return image.Next(std::span(to, kWindowBytes)); });
  for (uint64_t at = 0;;) {
    const absl::StatusOr<std::span<const std::byte>> bytes = windows.Next();
    if (!bytes.ok()) {
      return Sort(bytes.status(), fault);
    }
    if (bytes->empty()) {
      return at == image.record().image_bytes
                 ? absl::OkStatus()
                 : absl::InternalError(absl::StrCat("an image of ", image.record().image_bytes,
                                                    " bytes came in ", at));
    }
    HF_RETURN_IF_ERROR(directory_->Write(writing, at, *bytes));
    at += bytes->size();
    HF_RETURN_IF_ERROR(Advance(bytes->size()));
  }
}

absl::StatusOr<bool> Backup::IsListed(const CheckpointId& id) const {
  HF_ASSIGN_OR_RETURN(const std::vector<CheckpointInfo> all, List());
  return std::any_of(all.begin(), all.end(),
                     [&](const CheckpointInfo& info) { return IdOf(info) == id; });
}

// Retention may have removed it while it was read, whatever reading it says.
absl::Status Backup::AddFailed(const CheckpointInfo& info, const StepFault& fault) {
  line_.Clear();
  const absl::StatusOr<bool> listed = IsListed(IdOf(info));
  const bool gone =
      !fault.of_target && (absl::IsNotFound(listed.status()) || (listed.ok() && !*listed));
  if (gone) {
    HF_RETURN_IF_ERROR(directory_->Discard(IdOf(info)));
  } else if (!absl::IsNotFound(listed.status())) {
    HF_RETURN_IF_ERROR(listed.status());
  }
  CopiedStep failed;
  failed.id = IdOf(info);
  failed.ranks = info.world_size;
  failed.why = fault.why;
  failed.state = gone && arguments_.steps.empty() ? StepCopied::kGone : StepCopied::kFailed;
  report_.Add(std::move(failed));
  return absl::OkStatus();
}

absl::Status Backup::Advance(uint64_t bytes) {
  bytes_done_ += bytes;
  line_.Draw([&] {
    const int64_t elapsed = (context_.clock->Now() - begin_) / std::chrono::milliseconds(1);
    return absl::StrCat("backup ", EscapeText(job_.name), " ",
                        ByteProgress(bytes_done_, bytes_total_, elapsed));
  });
  return source_.interrupted() ? absl::CancelledError("interrupted") : absl::OkStatus();
}

// With what was asked for, and what to do.
absl::Status Backup::Explain(const absl::Status& failed) const {
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
    way_out = "; name a directory that you may write to";
  } else if (absl::IsCancelled(failed) || absl::IsUnavailable(failed)) {
    way_out = absl::StrCat("; ", again);
  }
  return absl::Status(failed.code(),
                      absl::StrCat("back up job ", job_.name, " into '", arguments_.directory,
                                   "': ", Message(failed), way_out));
}

ExitCode Backup::Show() const {
  BackupReport::Ending ending;
  ending.job = job_;
  ending.directory = directory_->path();
  ending.elapsed_ms = (context_.clock->Now() - begin_) / std::chrono::milliseconds(1);
  return report_.Show(ending);
}

}  // namespace

ExitCode RunBackup(const Context& context, const BackupArguments& arguments) {
  Backup one(context, arguments);
  if (const absl::Status done = one.Run(); !done.ok()) {
    return ReportError(context, done);
  }
  return one.Show();
}

}  // namespace holdfast
