// The commit of a step in the remote tier.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/errno_status.h"
#include "base/status.h"
#include "tiers/durable/copy_store_impl.h"

namespace holdfast {
namespace {

// What the manifest names and is not among `names`, which are sorted: the first such file, and of
// which ranks there are some.
std::string Missing(const std::vector<std::string>& names, const Manifest& manifest,
                    std::vector<Rank>& ranks) {
  std::string first;
  for (const ManifestShard& shard : manifest.shards) {
    const auto name = [&](ImageForm form) {
      return ImageFileName(DurableKind::kRemote, shard.rank, manifest.world_size, form);
    };
    const auto there = [&](const std::string& wanted) {
      return std::binary_search(names.begin(), names.end(), wanted);
    };
    const std::string record =
        RecordFileName(DurableKind::kRemote, shard.rank, manifest.world_size);
    const bool image = there(name(ImageForm::kPlain)) || there(name(ImageForm::kCompressed));
    if (!image || !there(record)) {
      const std::string wanted = image ? record : name(ImageForm::kPlain);
      first = first.empty() ? wanted : first;
      ranks.push_back(shard.rank);
    }
  }
  return first;
}

}  // namespace

absl::StatusOr<Manifest> CopyStore::Impl::ReadManifest(const CheckpointName& name) {
  HF_RETURN_IF_ERROR(CheckJobName(name.job_name));
  const std::string path = JoinPath(StepDirectory(name.job_name, name.id), kManifestName);
  absl::StatusOr<Manifest> manifest = ReadTwice(
      path, kManifestBytesMax, [](const std::string& bytes) { return DecodeManifest(bytes); });
  if (absl::IsNotFound(manifest.status()) || IsErrno(manifest.status())) {
    return manifest.status();
  }
  if (!manifest.ok()) {
    return Annotate(manifest.status(), absl::StrCat("'", path, "'"));
  }
  if (manifest->job != name.job || manifest->job_name != name.job_name ||
      manifest->checkpoint != name.id) {
    return absl::DataLossError(absl::StrCat("'", path, "': it is the manifest of job '",
                                            manifest->job_name, "' ", manifest->job.ToString(),
                                            " attempt ", manifest->checkpoint.attempt, " step ",
                                            manifest->checkpoint.step, ", put here by hand"));
  }
  return manifest;
}

absl::StatusOr<Manifest> CopyStore::ReadManifest(const CheckpointName& name) {
  if (!impl_->remote()) {
    return absl::NotFoundError("only the remote tier has manifests");
  }
  absl::StatusOr<Manifest> manifest = impl_->ReadManifest(name);
  if (manifest.ok()) {
    return manifest;
  }
  return impl_->SinceMounted(manifest.status());
}

absl::Status CopyStore::PublishManifest(const Manifest& manifest, bool* adopted,
                                        std::vector<Rank>* missing) {
  Impl& m = *impl_;
  if (!m.remote()) {
    return absl::FailedPreconditionError("only the remote tier has manifests");
  }
  // 1. It is whole, ours to publish, and what it names is there.
  HF_RETURN_IF_ERROR(CheckManifest(manifest));
  HF_RETURN_IF_ERROR(m.Prepare());
  HF_RETURN_IF_ERROR(m.CheckMount());
  HF_RETURN_IF_ERROR(m.CheckClaimed(manifest.job, manifest.checkpoint.attempt));
  m.SweepIfNeeded();
  HF_ASSIGN_OR_RETURN(const JobIdentity job, m.CheckJobIs(manifest.job, manifest.job_name));
  const std::string directory = m.StepDirectory(manifest.job_name, manifest.checkpoint);
  const std::string path = JoinPath(directory, kManifestName);
  HF_RETURN_IF_ERROR(m.CheckDirectory(directory));
  HF_ASSIGN_OR_RETURN(const std::vector<std::string> names, m.env.List(directory, kStepNamesMax));
  std::vector<Rank> ranks;
  if (const std::string first = Missing(names, manifest, ranks); !first.empty()) {
    if (missing != nullptr) {
      *missing = std::move(ranks);
    }
    return absl::FailedPreconditionError(
        absl::StrCat("publish '", path, "': '", first, "', which it names, is not there"));
  }
  // 2. Its name, if nobody has it yet.
  Intent intent;
  intent.kind = IntentKind::kManifest;
  intent.unique = NewUnique();
  intent.job = manifest.job;
  intent.job_name = manifest.job_name;
  intent.checkpoint = manifest.checkpoint;
  LiveIntent live_intent(m, intent);
  HF_RETURN_IF_ERROR(live_intent.Write());
  const absl::StatusOr<bool> made =
      m.PublishOnce(directory, kManifestName, intent.unique, EncodeManifest(manifest), job.uid,
                    job.gid, [&] { return m.CheckGoesOn(job.job, job.name); });
  if (made.ok() && *made) {
    // 3. The same for people. Without it the step is as committed.
    const std::string temporary =
        JoinPath(directory, TemporaryName(kManifestJsonName, intent.unique));
    absl::Status told = m.WriteNewFile(temporary, ManifestJson(manifest), job.uid, job.gid);
    if (told.ok()) {
      told = m.env.Rename(temporary, JoinPath(directory, kManifestJsonName));
    }
    told.IgnoreError();
  }
  const absl::Status resolved = live_intent.Resolve(Standing::kUnknown);
  resolved.IgnoreError();  // nothing of the commit is open any more; the next sweep tidies up
  HF_RETURN_IF_ERROR(made.status());
  if (adopted != nullptr) {
    *adopted = !*made;
  }
  if (*made) {
    return absl::OkStatus();
  }
  // 4. Another was first: the same promise, or not.
  HF_ASSIGN_OR_RETURN(const Manifest winner,
                      m.ReadManifest({manifest.job, manifest.job_name, manifest.checkpoint}));
  const std::string difference = DifferenceOf(winner, manifest);
  return difference.empty()
             ? absl::OkStatus()
             : absl::AlreadyExistsError(absl::StrCat(
                   "publish '", path, "': another one is there, and differs: ", difference));
}

}  // namespace holdfast
