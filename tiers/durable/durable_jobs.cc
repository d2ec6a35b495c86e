// Whose directory a job's name is, which attempts may write there, and the directories of steps.
#include <sys/stat.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/errno_status.h"
#include "base/status.h"
#include "tiers/durable/copy_store_impl.h"
#include "tiers/image/record.h"

namespace holdfast {
namespace {

// Another node may remove an empty directory just when this one is about to use it.
constexpr int kTriesMax = 4;
// Read to find out whose a directory without a file JOB is: so many, and more if none can be read.
constexpr size_t kRecordsAskedMax = 64;
constexpr size_t kRecordsMax = 4096;

}  // namespace

std::string CopyStore::Impl::JobFilePath(std::string_view job_name) const {
  return JoinPath(JobDirectory(job_name), kJobFileName);
}

absl::StatusOr<JobIdentity> CopyStore::Impl::ReadJobFile(const std::string& job_name) {
  HF_RETURN_IF_ERROR(CheckJobName(job_name));
  const std::string directory = JobDirectory(job_name);
  HF_RETURN_IF_ERROR(CheckDirectory(directory));
  const std::string path = JobFilePath(job_name);
  absl::StatusOr<JobIdentity> job = ReadTwice(
      path, kJobFileBytesMax, [](const std::string& bytes) { return DecodeJobFile(bytes); });
  if (absl::IsNotFound(job.status()) || IsErrno(job.status())) {
    return job.status();
  }
  if (!job.ok()) {
    return Annotate(job.status(), absl::StrCat("'", path, "'"));
  }
  if (job->name != job_name) {
    return absl::DataLossError(
        absl::StrCat("'", path, "': it is of job '", job->name, "': put here by hand"));
  }
  return job;
}

// The file JOB is made by `make`, under an intent that a crash leaves behind.
absl::Status CopyStore::Impl::WithJobIntent(
    const JobIdentity& job, const std::function<absl::Status(const std::string& unique)>& make) {
  Intent intent;
  intent.kind = IntentKind::kCreateJob;
  intent.unique = NewUnique();
  intent.job = job.job;
  intent.job_name = job.name;
  LiveIntent live_intent(*this, intent);
  HF_RETURN_IF_ERROR(live_intent.Write());
  const absl::Status status = make(intent.unique);
  const absl::Status resolved = live_intent.Resolve(Standing::kUnknown);
  return status.ok() ? resolved : status;
}

absl::Status CopyStore::Impl::CreateJob(const JobIdentity& job) {
  return WithJobIntent(job, [&](const std::string& unique) -> absl::Status {
    const std::string directory = JobDirectory(job.name);
    const absl::Status made = env.CreateDirectory(directory, kDirectoryMode);
    if (!made.ok() && !absl::IsAlreadyExists(made)) {
      return made;
    }
    HF_RETURN_IF_ERROR(CheckDirectory(directory));
    HF_RETURN_IF_ERROR(GiveDirectoryToOwner(directory, job.gid));
    // Whoever could write it could hide all copies of the job: its users read it.
    return PublishOnce(directory, kJobFileName, unique, EncodeJobFile(job), kKeepOwner, job.gid)
        .status();
  });
}

absl::StatusOr<CopyStore::Impl::RecordsSay> CopyStore::Impl::AskRecords(
    const std::string& job_name) {
  const std::string directory = JobDirectory(job_name);
  HF_ASSIGN_OR_RETURN(const std::vector<std::string> entries,
                      env.List(directory, kDirectoryNamesMax));
  std::vector<CheckpointId> steps;
  for (const std::string& entry : entries) {
    if (const auto id = ParseStepDirectoryName(entry)) {
      steps.push_back(*id);
    } else if (remote() && ParseRemovedName(entry).has_value()) {
      return absl::NotFoundError(absl::StrCat("'", directory, "': its job is being removed"));
    }
  }
  std::sort(steps.rbegin(), steps.rend());
  RecordsSay say;
  for (const CheckpointId& step : steps) {
    const absl::StatusOr<std::vector<std::string>> names =
        env.List(StepDirectory(job_name, step), kStepNamesMax);
    if (!names.ok() && !absl::IsNotFound(names.status())) {
      return names.status();  // something of the job may lie there
    }
    for (const std::string& name : names.value_or(std::vector<std::string>())) {
      const StepFile file = ParseStepFileName(options.kind, name);
      say.anything = say.anything || file.role == StepFileRole::kImage ||
                     file.role == StepFileRole::kRecord || file.role == StepFileRole::kManifest;
      if (file.role == StepFileRole::kRecord &&
          say.asked < (say.job ? kRecordsAskedMax : kRecordsMax)) {
        ++say.asked;
        AskRecord(job_name, step, name, file.rank, say);
      }
    }
  }
  return say;
}

void CopyStore::Impl::AskRecord(const std::string& job_name, const CheckpointId& step,
                                const std::string& name, Rank rank, RecordsSay& say) {
  const std::string path = JoinPath(StepDirectory(job_name, step), name);
  const absl::StatusOr<std::string> bytes = ReadSmallFile(path, kRecordBytesMax);
  const absl::StatusOr<FileInfo> info = env.Info(path);
  if (!bytes.ok() || !info.ok()) {
    return;
  }
  const absl::StatusOr<ShardRecord> record = DecodeRecord(*bytes);
  if (!record.ok() || record->id.checkpoint() != step || record->id.rank != rank) {
    return;
  }
  if (record->job_name != job_name) {
    say.other_name = record->job_name;
    return;
  }
  const JobIdentity says{record->id.job, job_name, info->uid, info->gid};
  say.two_jobs = say.two_jobs || (say.job && say.job->job != says.job);
  say.two_owners = say.two_owners || (say.job && !(*say.job == says));
  say.job = says;
}

absl::StatusOr<JobIdentity> CopyStore::Impl::RebuildJob(const std::string& job_name,
                                                        const absl::Status& why,
                                                        const std::optional<JobOwner>& owner) {
  const std::string directory = JobDirectory(job_name);
  HF_ASSIGN_OR_RETURN(RecordsSay say, AskRecords(job_name));
  const auto lost = [&](std::string_view but, const std::string& way_out) {
    return absl::DataLossError(absl::StrCat("'", directory, "': its file JOB is gone or damaged (",
                                            Message(why), "), and ", std::string(but), "; ",
                                            way_out));
  };
  const std::string say_whose = absl::StrCat(
      "put the file back, or say whose the job is: ckptctl rebuild ", job_name, " --owner UID:GID");
  if (say.two_jobs) {
    return lost("its records name more than one job",
                "move the steps of the other job elsewhere, then: ckptctl rebuild");
  }
  if (!say.job && !say.other_name.empty()) {  // a copy, or a directory that somebody has renamed
    return absl::NotFoundError(
        absl::StrCat("'", directory, "': its records are of job '", say.other_name, "'"));
  }
  if (!say.job) {
    return say.anything || !absl::IsNotFound(why)
               ? lost("no record in it can be read",
                      "put JOB or one of the records back, or move the directory elsewhere, then: "
                      "ckptctl rebuild")
               : absl::NotFoundError(
                     absl::StrCat("'", directory, "': a directory without a file JOB"));
  }
  HF_RETURN_IF_ERROR(Prepare());
  if (owner) {
    say.job->uid = owner->uid;
    say.job->gid = owner->gid;
  } else if (say.two_owners) {
    return lost("its records name more than one owner", say_whose);
  } else if (options.set_owner) {
    HF_ASSIGN_OR_RETURN(const uint32_t made_by, OwnerOfWhatWeMake(home));
    if (made_by != 0) {
      return lost("this file system keeps no owners that would tell whose it is", say_whose);
    }
  }
  const absl::Status written = WriteJobAgain(*say.job, !absl::IsNotFound(why));
  if (owner) {  // somebody waits for it
    HF_RETURN_IF_ERROR(written);
    return ReadJobFile(job_name);
  }
  Note(absl::StrCat(
      "'", JobFilePath(job_name), "' was gone or damaged (", Message(why), "): rebuilt from ",
      say.asked, say.asked == 1 ? " record" : " records",
      written.ok() ? "" : absl::StrCat("; it could not be written: ", Message(written))));
  const absl::StatusOr<JobIdentity> there = ReadJobFile(job_name);  // (another node may be faster)
  return there.ok() ? there : *say.job;
}

// In place of a damaged one, or where there is none; never in a directory that is not there.
absl::Status CopyStore::Impl::WriteJobAgain(const JobIdentity& job, bool damaged) {
  const std::string directory = JobDirectory(job.name);
  return WithJobIntent(job, [&](const std::string& unique) -> absl::Status {
    if (!damaged) {
      return PublishOnce(directory, kJobFileName, unique, EncodeJobFile(job), kKeepOwner, job.gid,
                         [&]() -> absl::Status {
                           HF_ASSIGN_OR_RETURN(const bool going,
                                               Exists(JoinPath(directory, RemovedName(job.job))));
                           return going ? absl::AbortedError("its job is being removed")
                                        : absl::OkStatus();
                         })
          .status();
    }
    const std::string temporary = JoinPath(directory, TemporaryName(kJobFileName, unique));
    HF_RETURN_IF_ERROR(WriteNewFile(temporary, EncodeJobFile(job), kKeepOwner, job.gid));
    if (!absl::IsDataLoss(ReadJobFile(job.name).status())) {
      return absl::OkStatus();  // somebody has put it right, or taken it away
    }
    HF_RETURN_IF_ERROR(env.Rename(temporary, JobFilePath(job.name)));
    return env.SyncDirectory(directory);
  });
}

// (What the system says about a call does not make the file a damaged one.)
absl::StatusOr<CopyStore::JobFileWritten> CopyStore::WriteJobFile(const std::string& job_name,
                                                                  const JobOwner& owner) {
  HF_RETURN_IF_ERROR(impl_->CheckMount());
  absl::StatusOr<JobIdentity> there = impl_->ReadJobFile(job_name);
  if (there.ok()) {
    return JobFileWritten{*std::move(there), false};
  }
  const bool damaged = absl::IsDataLoss(there.status()) && !IsErrno(there.status());
  if (!absl::IsNotFound(there.status()) && !damaged) {
    return there.status();
  }
  HF_ASSIGN_OR_RETURN(JobIdentity job, impl_->RebuildJob(job_name, there.status(), owner));
  return JobFileWritten{std::move(job), true};
}

// A directory that has lost its file JOB and has copies of another job is not this one's: with its
// JOB they would be nobody's. (A scan writes JOB again from the records, where they agree.)
absl::Status CopyStore::Impl::CheckNothingIsThere(const JobIdentity& job) {
  const absl::StatusOr<RecordsSay> say = AskRecords(job.name);
  if (absl::IsNotFound(say.status())) {
    return absl::OkStatus();  // no directory, or one that is being removed
  }
  HF_RETURN_IF_ERROR(say.status());
  if (!say->anything || (say->job && !say->two_jobs && say->job->job == job.job)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "'", JobDirectory(job.name), "' has no file JOB, and copies that are not of this job",
      say->other_name.empty() ? "" : absl::StrCat(" (of job '", say->other_name, "')"),
      ": put JOB back, move the directory elsewhere, or give this job another name"));
}

absl::Status CopyStore::Impl::OpenJob(const JobIdentity& job) {
  HF_RETURN_IF_ERROR(CheckJob(job));
  const auto another = [&](const JobUuid& theirs) {
    return absl::FailedPreconditionError(
        absl::StrCat("'", JobDirectory(job.name), "' belongs to another run of job '", job.name,
                     "', ", theirs.ToString(), "; this one is ", job.job.ToString(),
                     ": give it another name, or remove the other (ckptctl rm)"));
  };
  HF_ASSIGN_OR_RETURN(const std::optional<JobIdentity> known, KnownJob(job.name));
  if (known.has_value()) {
    return known->job == job.job ? absl::OkStatus() : another(known->job);
  }
  for (int tries = 0;; ++tries) {
    // Before it is read: of one that replaces it in between, nothing is taken for known.
    const absl::StatusOr<FileInfo> file = env.Info(JobFilePath(job.name));
    const absl::StatusOr<JobIdentity> there = ReadJobFile(job.name);
    if (there.ok() && absl::IsNotFound(file.status()) && tries < kTriesMax) {
      continue;  // somebody made it just now
    }
    if (there.ok()) {
      HF_RETURN_IF_ERROR(file.status());
      if (there->job != job.job) {
        return another(there->job);
      }
      // Whoever made it, a moment ago or long ago, may not have come so far as to make it durable.
      HF_RETURN_IF_ERROR(env.SyncDirectory(JobDirectory(job.name)));
      HF_RETURN_IF_ERROR(env.SyncDirectory(options.dir));
      MutexLock hold(mutex);
      jobs[job.name] = {*there, file->inode};
      return absl::OkStatus();
    }
    if (!absl::IsNotFound(there.status())) {
      return there.status();
    }
    HF_RETURN_IF_ERROR(CheckNothingIsThere(job));
    const absl::Status made = CreateJob(job);
    if (!made.ok() && !(absl::IsNotFound(made) && tries < kTriesMax)) {
      return made;
    }
    if (tries >= kTriesMax) {
      return absl::UnavailableError(
          absl::StrCat("'", JobDirectory(job.name), "' vanishes as often as it is made"));
    }
  }
}

absl::StatusOr<std::optional<JobIdentity>> CopyStore::Impl::KnownJob(const std::string& job_name) {
  OpenedJob known;
  {
    MutexLock hold(mutex);
    const auto at = jobs.find(job_name);
    if (at == jobs.end()) {
      return std::nullopt;
    }
    known = at->second;
  }
  const absl::StatusOr<FileInfo> info = env.Info(JobFilePath(job_name));
  if (!info.ok() && !absl::IsNotFound(info.status())) {
    return info.status();
  }
  if (info.ok() && info->inode == known.inode) {
    return std::optional(std::move(known.identity));
  }
  ForgetJob(job_name);
  return std::nullopt;
}

void CopyStore::Impl::ForgetJob(const std::string& job_name) {
  MutexLock hold(mutex);
  const auto known = jobs.find(job_name);
  if (known == jobs.end()) {
    return;
  }
  std::erase_if(claims,
                [&](const auto& claim) { return claim.first.first == known->second.identity.job; });
  jobs.erase(known);
}

absl::StatusOr<JobIdentity> CopyStore::Impl::CheckJobIs(const JobUuid& job,
                                                        const std::string& job_name) {
  HF_ASSIGN_OR_RETURN(JobIdentity there, ReadJobFile(job_name));
  if (there.job != job) {
    return absl::FailedPreconditionError(
        absl::StrCat("'", JobDirectory(job_name), "' belongs to run ", there.job.ToString(),
                     " of job '", job_name, "', not to ", job.ToString()));
  }
  return there;
}

// Whoever removes the job says so first, and looks for what is there afterwards; so one of the two
// sees the other. In this order: JOB goes before the mark does.
absl::Status CopyStore::Impl::CheckGoesOn(const JobUuid& job, const std::string& job_name) {
  if (!remote()) {
    return absl::OkStatus();  // nobody else writes there
  }
  const std::string mark = JoinPath(JobDirectory(job_name), RemovedName(job));
  HF_ASSIGN_OR_RETURN(const bool going, Exists(mark));
  if (going) {
    return absl::FailedPreconditionError(absl::StrCat(
        "'", mark, "' is there: the job is being removed, and nothing more of it is written; if ",
        "its removal was broken off, end it (ckptctl rm)"));
  }
  const absl::Status ours = CheckJobIs(job, job_name).status();
  return absl::IsNotFound(ours) ? absl::AbortedError(absl::StrCat("'", JobDirectory(job_name),
                                                                  "' was removed just now"))
                                : ours;
}

absl::StatusOr<std::string> CopyStore::Impl::NameOf(const JobUuid& job) {
  {
    MutexLock hold(mutex);
    for (const auto& [name, known] : jobs) {
      if (known.identity.job == job) {
        return name;
      }
    }
  }
  HF_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                      env.List(options.dir, kDirectoryNamesMax));
  for (const std::string& name : names) {
    if (CheckJobName(name).ok()) {
      const absl::StatusOr<JobIdentity> there = ReadJobFile(name);
      if (there.ok() && there->job == job) {
        return name;
      }
    }
  }
  return absl::NotFoundError(
      absl::StrCat("'", options.dir, "' has no directory of job ", job.ToString()));
}

absl::Status CopyStore::Impl::CheckClaimed(const JobUuid& job, Attempt attempt) const {
  if (!remote()) {
    return absl::OkStatus();
  }
  MutexLock hold(mutex);
  return claims.contains({job, attempt})
             ? absl::OkStatus()
             : absl::FailedPreconditionError(absl::StrCat("write to '", options.dir, "': attempt ",
                                                          attempt, " of job ", job.ToString(),
                                                          " has not claimed its place there"));
}

absl::Status CopyStore::Impl::EnsureStepDirectory(const JobIdentity& job, const CheckpointId& id) {
  const std::string directory = StepDirectory(job.name, id);
  const absl::Status made = env.CreateDirectory(directory, kDirectoryMode);
  if (!made.ok() && !absl::IsAlreadyExists(made)) {
    return made;
  }
  HF_ASSIGN_OR_RETURN(const FileInfo info, env.Info(directory));
  if (!S_ISDIR(info.mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat("'", directory, "': not a directory; move it elsewhere"));
  }
  if ((info.mode & 07777) != kDirectoryMode || (options.set_owner && info.gid != job.gid)) {
    HF_RETURN_IF_ERROR(GiveDirectoryToOwner(directory, job.gid));
  }
  if (made.ok() && remote()) {
    bool lustre = false;
    {
      MutexLock hold(mutex);
      lustre = capabilities.filesystem == "lustre";
    }
    if (lustre && options.striping) {
      if (absl::Status status = env.SetStriping(directory, *options.striping); !status.ok()) {
        Note(Message(status));  // slower, and as good
      }
    }
  }
  // Also when it was there: whoever made it may have died before it was durable.
  return env.SyncDirectory(JobDirectory(job.name));
}

absl::Status CopyStore::OpenJob(const JobIdentity& job) {
  HF_RETURN_IF_ERROR(impl_->Prepare());
  HF_RETURN_IF_ERROR(impl_->CheckMount());
  return impl_->OpenJob(job);
}

absl::StatusOr<JobIdentity> CopyStore::FindJob(const std::string& job_name) {
  absl::StatusOr<JobIdentity> job = impl_->ReadJobFile(job_name);
  if (job.ok()) {
    return job;
  }
  return impl_->SinceMounted(job.status());
}

absl::Status CopyStore::ClaimAttempt(const JobIdentity& job, Attempt attempt,
                                     std::string_view opening) {
  Impl& m = *impl_;
  if (!m.remote()) {
    return absl::OkStatus();
  }
  const AttemptClaim claim{job.job, attempt, std::string(opening)};
  HF_RETURN_IF_ERROR(CheckClaim(claim));
  HF_RETURN_IF_ERROR(OpenJob(job));  // a claim that is known goes with the job's directory
  {
    MutexLock hold(m.mutex);
    const auto known = m.claims.find({job.job, attempt});
    if (known != m.claims.end() && known->second == opening) {
      return absl::OkStatus();
    }
  }
  const std::string directory = m.JobDirectory(job.name);
  const std::string name = ClaimName(attempt);
  const std::string path = JoinPath(directory, name);
  absl::StatusOr<std::string> bytes = m.ReadSmallFile(path, kClaimBytesMax);
  if (absl::IsNotFound(bytes.status())) {
    Intent intent;
    intent.kind = IntentKind::kClaim;
    intent.unique = NewUnique();
    intent.job = job.job;
    intent.job_name = job.name;
    intent.checkpoint.attempt = attempt;
    LiveIntent live_intent(m, intent);
    HF_RETURN_IF_ERROR(live_intent.Write());
    const absl::Status status =
        m.PublishOnce(directory, name, intent.unique, EncodeClaim(claim), kKeepOwner, job.gid, [&] {
           return m.CheckGoesOn(job.job, job.name);
         }).status();
    const absl::Status resolved = live_intent.Resolve(Standing::kUnknown);
    if (absl::IsNotFound(status)) {
      m.ForgetJob(job.name);  // the directory went away: the caller may try again
    }
    HF_RETURN_IF_ERROR(status);
    HF_RETURN_IF_ERROR(resolved);
    bytes = m.ReadSmallFile(path, kClaimBytesMax);
  } else if (bytes.ok()) {
    HF_RETURN_IF_ERROR(m.env.SyncDirectory(directory));
  }
  HF_RETURN_IF_ERROR(bytes.status());
  const absl::StatusOr<AttemptClaim> there = DecodeClaim(*bytes);
  if (!there.ok()) {
    return Annotate(there.status(), absl::StrCat("'", path, "'"));
  }
  if (*there != claim) {
    return absl::FailedPreconditionError(absl::StrCat(
        "'", path, "': attempt ", attempt, " of job '", job.name,
        "' was claimed by another opening of it, on another node or before its daemon lost its "
        "state; this one may write nothing there. Start a new attempt"));
  }
  MutexLock hold(m.mutex);
  m.claims[{job.job, attempt}] = claim.opening;
  return absl::OkStatus();
}

}  // namespace holdfast
