// Removal: manifest, records, bytes, each durably gone before the next goes.
#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tiers/durable/copy_store_impl.h"

namespace holdfast {
namespace {

constexpr int kTriesMax = 8;  // to find nothing in a job's directory that others write to

void Add(const RemovalReport& part, RemovalReport& sum) {
  sum.copies += part.copies;
  sum.bytes_freed += part.bytes_freed;
  sum.bytes_recycled += part.bytes_recycled;
  if (sum.unfinished.empty()) {
    sum.unfinished = part.unfinished;
  }
  sum.left_alone.insert(sum.left_alone.end(), part.left_alone.begin(), part.left_alone.end());
}

absl::Status GoesOn(const CopyStore::MayGoOn& may_go_on, const std::string& directory) {
  return may_go_on == nullptr || may_go_on()
             ? absl::OkStatus()
             : absl::CancelledError(
                   absl::StrCat("remove from '", directory, "': it was given up before the end"));
}

}  // namespace

absl::StatusOr<RemovalReport> CopyStore::Impl::RemoveRanks(const CheckpointName& name,
                                                           uint32_t world_size,
                                                           std::vector<Rank> ranks, bool manifest,
                                                           const MayGoOn& may_go_on) {
  const std::string directory = StepDirectory(name.job_name, name.id);
  const BusyShards shards(*this, name.job, name.id, ranks);
  if (!shards.taken()) {
    return absl::AbortedError(
        absl::StrCat("remove from '", directory, "': another call is busy with these copies"));
  }
  // 1. The intent names what goes, before anything does.
  Intent intent;
  intent.kind = IntentKind::kRemove;
  intent.unique = NewUnique();
  intent.job = name.job;
  intent.job_name = name.job_name;
  intent.checkpoint = name.id;
  intent.world_size = world_size;
  intent.ranks = std::move(ranks);
  intent.manifest_first = manifest;
  LiveIntent live_intent(*this, intent);
  HF_RETURN_IF_ERROR(live_intent.Write());
  // 2. The manifest, or the records. What is done about the bytes follows from which records are
  // gone: that is the same after a crash, and after an error here.
  const auto begin = [&]() -> absl::Status {
    if (manifest) {
      HF_RETURN_IF_ERROR(GoesOn(may_go_on, directory));
      return RemoveIfThere(JoinPath(directory, kManifestName));
    }
    for (const Rank rank : intent.ranks) {
      HF_RETURN_IF_ERROR(GoesOn(may_go_on, directory));
      HF_RETURN_IF_ERROR(RemoveIfThere(
          JoinPath(directory, RecordFileName(options.kind, rank, intent.world_size))));
    }
    return absl::OkStatus();
  };
  const absl::Status begun = begin();
  if (const absl::Status goes_on = GoesOn(may_go_on, directory); manifest && !goes_on.ok()) {
    // What is whole but for its manifest may be committed anew. (Its removal may have been done
    // although that failed.)
    live_intent.Finish();
    return begun.ok() ? goes_on : begun;
  }
  // 3. The rest.
  RemovalReport report;
  const absl::Status resolved = live_intent.Resolve(Standing::kUnknown, report);
  HF_RETURN_IF_ERROR(begun);
  HF_RETURN_IF_ERROR(resolved);
  bool refill = false;
  {
    MutexLock hold(mutex);
    refill = reserve_given_up;
  }
  if (refill) {
    FillReserve().IgnoreError();
  }
  return report;
}

// Whether an intent of this node names the temporary file: else nobody will ever remove it.
absl::StatusOr<bool> CopyStore::Impl::HasIntent(std::string_view temporary_name) {
  constexpr size_t kTailBytes = 32 + 4;  // "<unique>.tmp"
  const std::string_view unique = temporary_name.substr(temporary_name.size() - kTailBytes, 32);
  return Exists(JoinPath(intents_dir, IntentFileName(unique)));
}

absl::StatusOr<CopyName> CopyStore::Impl::FindWorldSize(const CopyName& name) {
  if (!remote() || name.world_size != 0) {
    CopyName known = name;
    known.world_size = remote() ? name.world_size : std::max(name.world_size, name.id.rank + 1);
    return known;
  }
  const std::string directory = StepDirectory(name.job_name, name.id.checkpoint());
  HF_ASSIGN_OR_RETURN(const std::vector<std::string> names, env.List(directory, kStepNamesMax));
  for (const std::string& file_name : names) {
    const StepFile file = ParseStepFileName(options.kind, file_name);
    if (file.role == StepFileRole::kRecord && file.rank == name.id.rank) {
      CopyName found = name;
      found.world_size = file.world_size;
      return found;
    }
  }
  return absl::NotFoundError(
      absl::StrCat("'", directory, "' has no record of rank ", name.id.rank));
}

absl::StatusOr<RemovalReport> CopyStore::Impl::RemoveCopy(const CopyName& copy) {
  HF_RETURN_IF_ERROR(CheckJobName(copy.job_name));
  HF_RETURN_IF_ERROR(Prepare());
  HF_RETURN_IF_ERROR(CheckMount());
  SweepIfNeeded();
  HF_RETURN_IF_ERROR(CheckJobIs(copy.id.job, copy.job_name).status());
  HF_ASSIGN_OR_RETURN(const CopyName name, FindWorldSize(copy));
  HF_ASSIGN_OR_RETURN(const bool there, Exists(RecordPath(name)));
  if (!there) {
    return absl::NotFoundError(
        absl::StrCat("remove ", name.id.ToString(), ": there is no '", RecordPath(name), "'"));
  }
  const std::string directory = StepDirectory(name.job_name, name.id.checkpoint());
  if (remote()) {
    HF_ASSIGN_OR_RETURN(const bool committed, Exists(JoinPath(directory, kManifestName)));
    if (committed) {
      return absl::FailedPreconditionError(absl::StrCat(
          "remove ", name.id.ToString(), ": its step has a manifest; remove the whole step"));
    }
  }
  return RemoveRanks({name.id.job, name.job_name, name.id.checkpoint()}, name.world_size,
                     {name.id.rank}, false, nullptr);
}

absl::StatusOr<RemovalReport> CopyStore::Impl::RemoveCheckpoint(const CheckpointName& name,
                                                                const MayGoOn& may_go_on) {
  HF_RETURN_IF_ERROR(CheckJobName(name.job_name));
  HF_RETURN_IF_ERROR(Prepare());
  HF_RETURN_IF_ERROR(CheckMount());
  SweepIfNeeded();
  HF_RETURN_IF_ERROR(CheckJobIs(name.job, name.job_name).status());
  const std::string directory = StepDirectory(name.job_name, name.id);
  HF_RETURN_IF_ERROR(CheckDirectory(directory));
  HF_ASSIGN_OR_RETURN(const std::vector<std::string> names, env.List(directory, kStepNamesMax));

  // 1. What is ours, by its name: whole or damaged. World sizes: one, unless somebody meddled.
  std::map<uint32_t, std::vector<Rank>> ranks;
  bool manifest = false;
  bool json = false;
  for (const std::string& file_name : names) {
    const StepFile file = ParseStepFileName(options.kind, file_name);
    manifest = manifest || file.role == StepFileRole::kManifest;
    json = json || file.role == StepFileRole::kManifestJson;
    if (file.role == StepFileRole::kRecord || file.role == StepFileRole::kImage) {
      ranks[remote() ? file.world_size : kWorldSizeMax].push_back(file.rank);
    }
  }
  if (manifest && ranks.empty()) {
    ranks[1] = {};
  }
  // 2. The manifest goes with the first; without it the others are copies of no committed step.
  RemovalReport report;
  for (auto& [world_size, list] : ranks) {
    std::sort(list.begin(), list.end());
    list.erase(std::unique(list.begin(), list.end()), list.end());
    HF_ASSIGN_OR_RETURN(const RemovalReport part,
                        RemoveRanks(name, world_size, std::move(list), manifest, may_go_on));
    manifest = false;
    Add(part, report);
  }
  if (json) {
    HF_RETURN_IF_ERROR(RemoveIfThere(JoinPath(directory, kManifestJsonName)));
  }
  HF_RETURN_IF_ERROR(RemoveStepIfEmpty(directory));
  // 3. What keeps the directory.
  const auto left = env.List(directory, kStepNamesMax);
  if (!left.ok() && !absl::IsNotFound(left.status())) {
    return left.status();
  }
  if (left.ok()) {
    for (const std::string& file_name : *left) {
      const std::string path = JoinPath(directory, file_name);
      const StepFileRole role = ParseStepFileName(options.kind, file_name).role;
      const bool unfinished = role == StepFileRole::kTemporary;
      if (role == StepFileRole::kMark) {
        continue;  // of what is being written
      }
      if (unfinished && !remote() && report.unfinished.empty()) {
        HF_ASSIGN_OR_RETURN(const bool somebodys, HasIntent(file_name));
        report.unfinished = somebodys ? path : "";
      }
      if (report.left_alone.size() < kScanProblemsMax) {
        report.left_alone.push_back(
            {path, unfinished ? "a copy that is being written, or an intent's of another node"
                              : "not a name of ours"});
      }
    }
  }
  return report;
}

// Of a job that goes whole, in a remote directory, also what any node was writing: it may have
// died, and if it has not it finds nothing to give a name to. (NVMe's are this process's own, which
// is about to end them.) Whether there was anything of ours, of whatever kind.
absl::StatusOr<bool> CopyStore::Impl::RemoveTemporaries(const std::string& directory) {
  const absl::StatusOr<std::vector<std::string>> files = env.List(directory, kStepNamesMax);
  if (!files.ok()) {
    const bool none = absl::IsNotFound(files.status()) ||
                      absl::IsFailedPrecondition(files.status());  // no directory
    return none ? absl::StatusOr<bool>(false) : files.status();
  }
  bool any = false;
  for (const std::string& file : *files) {
    const StepFileRole role = ParseStepFileName(options.kind, file).role;
    if (role == StepFileRole::kTemporary && remote()) {
      HF_RETURN_IF_ERROR(RemoveIfThere(JoinPath(directory, file)));
    }
    any = any || (role != StepFileRole::kUnknown && (role != StepFileRole::kTemporary || remote()));
  }
  return any;
}

// One look at all steps, and the removal of what is there. False: there was nothing of ours.
absl::StatusOr<bool> CopyStore::Impl::RemoveSteps(const JobUuid& job, const std::string& job_name,
                                                  const MayGoOn& may_go_on, RemovalReport& report) {
  const std::string directory = JobDirectory(job_name);
  HF_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                      env.List(directory, kDirectoryNamesMax));
  report.left_alone.clear();
  bool any = false;
  for (const std::string& name : names) {
    const std::string path = JoinPath(directory, name);
    HF_RETURN_IF_ERROR(GoesOn(may_go_on, directory));
    if (const auto id = ParseStepDirectoryName(name)) {
      HF_RETURN_IF_ERROR(CheckJobIs(job, job_name).status());
      HF_ASSIGN_OR_RETURN(const bool holds, RemoveTemporaries(path));
      any = any || holds;
      const auto part = RemoveCheckpoint({job, job_name, *id}, may_go_on);
      if (part.ok()) {
        Add(*part, report);
      } else if (absl::IsFailedPrecondition(part.status())) {
        report.left_alone.push_back({path, Message(part.status())});
      } else if (!absl::IsNotFound(part.status())) {
        return part.status();
      }
    } else if (remote() && ParseTemporaryName(name).has_value()) {
      any = true;  // of a claim, or of a JOB: whoever makes it begins anew
      HF_RETURN_IF_ERROR(RemoveIfThere(path));
    } else if (name != kJobFileName && !(remote() && (ParseClaimName(name).has_value() ||
                                                      ParseRemovedName(name).has_value()))) {
      report.left_alone.push_back({path, "not a name of ours"});
    }
  }
  // Of what is ours somebody must be able to say whose it is.
  if (!report.unfinished.empty()) {
    // (Of these files, not of the file system: Unavailable says that.)
    return absl::AbortedError(absl::StrCat("remove '", directory, "': '", report.unfinished,
                                           "' is still being written; try again"));
  }
  return any;
}

absl::StatusOr<RemovalReport> CopyStore::Impl::RemoveJob(const JobUuid& job,
                                                         const std::string& job_name,
                                                         const MayGoOn& may_go_on) {
  HF_RETURN_IF_ERROR(CheckJobName(job_name));
  HF_RETURN_IF_ERROR(Prepare());
  HF_RETURN_IF_ERROR(CheckMount());
  SweepIfNeeded();
  HF_ASSIGN_OR_RETURN(const JobIdentity identity, CheckJobIs(job, job_name));
  const std::string directory = JobDirectory(job_name);
  Intent intent;
  intent.kind = IntentKind::kRemoveJob;
  intent.unique = NewUnique();
  intent.job = job;
  intent.job_name = job_name;
  LiveIntent live_intent(*this, intent);
  HF_RETURN_IF_ERROR(live_intent.Write());
  ForgetJob(job_name);
  RemovalReport report;
  // 1. The mark, for whoever else writes there; then the steps, until a look that began with the
  // mark there finds nothing. What is made after that is given up by who made it.
  const auto empty = [&]() -> absl::Status {
    for (int tries = 0; tries < kTriesMax; ++tries) {
      bool marked = !remote();
      if (remote()) {
        HF_ASSIGN_OR_RETURN(const bool made,
                            PublishOnce(directory, RemovedName(job), intent.unique,
                                        EncodeJobFile(identity), kKeepOwner, identity.gid));
        marked = !made;
      }
      HF_ASSIGN_OR_RETURN(const bool any, RemoveSteps(job, job_name, may_go_on, report));
      if (marked && !any) {
        return absl::OkStatus();
      }
    }
    return absl::AbortedError(absl::StrCat("remove '", directory, "': it is written to as fast as ",
                                           "it is emptied; try again"));
  };
  // 2. Claims, then JOB, then the directory; JOB says for how long it is this job's.
  const auto finish = [&]() -> absl::Status {
    HF_RETURN_IF_ERROR(GoesOn(may_go_on, directory));
    HF_RETURN_IF_ERROR(CheckJobIs(job, job_name).status());
    HF_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                        env.List(directory, kDirectoryNamesMax));
    for (const std::string& name : names) {
      const bool stale = ParseRemovedName(name).has_value() && name != RemovedName(job);
      if (remote() && (ParseClaimName(name).has_value() || stale)) {
        HF_RETURN_IF_ERROR(RemoveIfThere(JoinPath(directory, name)));
      }
    }
    HF_RETURN_IF_ERROR(env.SyncDirectory(directory));
    return RemoveIfThere(JoinPath(directory, kJobFileName));
  };
  absl::Status status = empty();
  if (status.ok()) {
    status = finish();
  }
  const absl::Status resolved = live_intent.Resolve(Standing::kUnknown);
  if (absl::IsNotFound(status) && CheckJobIs(job, job_name).ok()) {
    return absl::AbortedError(
        absl::StrCat("remove '", directory, "': another call is at work there: ", Message(status)));
  }
  HF_RETURN_IF_ERROR(status);
  HF_RETURN_IF_ERROR(resolved);
  return report;
}

absl::StatusOr<RemovalReport> CopyStore::RemoveCopy(const CopyName& copy) {
  absl::StatusOr<RemovalReport> report = impl_->RemoveCopy(copy);
  return report.ok() ? report : impl_->SinceMounted(report.status());
}

absl::StatusOr<RemovalReport> CopyStore::RemoveCheckpoint(const CheckpointName& name,
                                                          const MayGoOn& may_go_on) {
  absl::StatusOr<RemovalReport> report = impl_->RemoveCheckpoint(name, may_go_on);
  return report.ok() ? report : impl_->SinceMounted(report.status());
}

absl::StatusOr<RemovalReport> CopyStore::RemoveJob(const JobUuid& job, const std::string& job_name,
                                                   const MayGoOn& may_go_on) {
  absl::StatusOr<RemovalReport> report = impl_->RemoveJob(job, job_name, may_go_on);
  return report.ok() ? report : impl_->SinceMounted(report.status());
}

}  // namespace holdfast
