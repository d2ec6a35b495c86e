// Reads a durable tier's directory: every name is ours, or reported; every record is read, or told
// by a manifest.
#include "tiers/durable/copy_scan.h"

#include <sys/stat.h>

#include <algorithm>
#include <functional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/errno_status.h"
#include "base/status.h"
#include "tiers/durable/copy_store_impl.h"
#include "tiers/durable/record_check.h"
#include "tiers/image/kept.h"

namespace holdfast {
namespace {

class Scanner {
 public:
  explicit Scanner(CopyStore::Impl& store) : store_(store), env_(store.env) {}

  absl::StatusOr<DurableScan> All() {
    HF_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                        env_.List(store_.options.dir, kDirectoryNamesMax));
    for (const std::string& name : names) {
      if (name == kHomeName) {
        ScanHome();
      } else if (name.starts_with(kDoctorPrefix)) {
        continue;  // of a ckptctl doctor, at work or killed in a call that hung
      } else if (!CheckJobName(name).ok()) {
        Unknown(JoinPath(store_.options.dir, name), "not the name of a job");
      } else {
        ScanJob(name);
      }
    }
    return std::move(out_);
  }

  absl::StatusOr<DurableScan> One(const std::string& job_name) {
    HF_RETURN_IF_ERROR(CheckJobName(job_name));
    HF_ASSIGN_OR_RETURN(const bool there, store_.Exists(store_.JobDirectory(job_name)));
    if (!there) {
      return absl::NotFoundError(
          absl::StrCat("'", store_.options.dir, "' has no job '", job_name, "'"));
    }
    ScanJob(job_name);
    return std::move(out_);
  }

 private:
  // What a step's directory holds, by rank.
  struct StepNames {
    std::vector<std::pair<Rank, uint32_t>> records;  // with the world size in the name
    std::set<std::pair<Rank, uint32_t>> images;
    bool manifest = false;
  };

  void Unknown(const std::string& path, std::string why) {
    ++out_.unknown_count;
    if (out_.unknown.size() < kScanProblemsMax) {
      out_.unknown.push_back({path, std::move(why)});
    }
  }
  void Unreadable(const std::string& path, const absl::Status& why) {
    // (Of a newer version: in remote it is a manifest that says what there is, and for those the
    // step is told all the same.)
    const bool too_many_names = absl::IsResourceExhausted(why);
    if (MayPass(why) || too_many_names || (absl::IsFailedPrecondition(why) && !store_.remote())) {
      out_.hidden.try_emplace(job_, why);
    }
    ++out_.unreadable_count;
    if (out_.unreadable.size() < kScanProblemsMax) {
      out_.unreadable.push_back({path, why});
    }
  }

  bool IsDirectory(const std::string& path) {
    const absl::StatusOr<FileInfo> info = env_.Info(path);
    if (absl::IsNotFound(info.status())) {
      return false;  // removed meanwhile
    }
    if (!info.ok()) {
      Unreadable(path, info.status());
      return false;
    }
    if (!S_ISDIR(info->mode)) {
      Unknown(path, "not a directory");
    }
    return S_ISDIR(info->mode);
  }

  // What all share, and this node's part: another node tells of its own.
  void ScanHome() {
    if (store_.remote()) {
      const std::string nodes = ParentDirectory(store_.home);
      ScanHomeNames(ParentDirectory(nodes), ParseSharedHomeName);
      ScanNodeNames(nodes);
    }
    ScanHomeNames(store_.home, [this](std::string_view name) {
      return ParseHomeName(store_.options.kind, name);
    });
    const auto is_intent = [](std::string_view name) {
      return ParseIntentFileName(name).has_value();
    };
    ScanPlainFiles(store_.intents_dir, is_intent, "not the name of an intent");
    if (!store_.remote()) {
      ScanPlainFiles(store_.pool_dir, IsUnique, "not the name of a recycled file");
    }
  }

  // By name alone: there may be thousands, and each looks at its own.
  void ScanNodeNames(const std::string& nodes) {
    const auto names = env_.List(nodes, kDirectoryNamesMax);
    for (const std::string& name : names.value_or(std::vector<std::string>())) {
      if (!CheckJobName(name).ok()) {
        Unknown(JoinPath(nodes, name), "not the name of a node");
      }
    }
  }

  void ScanHomeNames(const std::string& directory,
                     const std::function<HomeEntry(std::string_view)>& parse) {
    const auto names = env_.List(directory, kDirectoryNamesMax);
    if (!names.ok()) {
      return;  // not made yet, or what Prepare tells
    }
    for (const std::string& name : *names) {
      const std::string path = JoinPath(directory, name);
      const HomeEntry entry = parse(name);
      if (entry == HomeEntry::kUnknown) {
        Unknown(path, "not a name of ours");
        continue;
      }
      const absl::StatusOr<FileInfo> info = env_.Info(path);
      const bool directory_wanted = entry == HomeEntry::kDirectory;
      if (info.ok() && !(directory_wanted ? S_ISDIR(info->mode) : S_ISREG(info->mode))) {
        Unknown(path, directory_wanted ? "not a directory" : "not a regular file");
      }
    }
  }

  void ScanPlainFiles(const std::string& directory, bool (*is_ours)(std::string_view name),
                      const char* else_it_is) {
    const auto names = env_.List(directory, kDirectoryNamesMax);
    if (!names.ok()) {
      return;  // not made yet, or what Prepare tells
    }
    for (const std::string& name : *names) {
      const std::string path = JoinPath(directory, name);
      if (!is_ours(name)) {
        Unknown(path, else_it_is);
        continue;
      }
      const absl::StatusOr<FileInfo> info = env_.Info(path);
      if (info.ok() && !S_ISREG(info->mode)) {
        Unknown(path, "not a regular file");
      }
    }
  }

  void ScanJob(const std::string& name) {
    job_ = name;
    const std::string directory = store_.JobDirectory(name);
    if (!IsDirectory(directory)) {
      return;
    }
    const absl::StatusOr<JobIdentity> identity = store_.ReadJobFile(name);
    if (absl::IsNotFound(identity.status())) {
      // Being made or removed just now, or somebody else's.
      return Unknown(directory, "a directory without a file JOB");
    }
    if (!identity.ok()) {
      return Unreadable(JoinPath(directory, kJobFileName), identity.status());
    }
    const auto names = env_.List(directory, kDirectoryNamesMax);
    if (!names.ok()) {
      return Unreadable(directory, names.status());
    }
    JobScan job;
    job.job = *identity;
    for (const std::string& entry : *names) {
      const std::string path = JoinPath(directory, entry);
      if (entry == kJobFileName) {
        continue;
      }
      if (const auto id = ParseStepDirectoryName(entry)) {
        if (IsDirectory(path)) {
          ScanStep(job, *id);
        }
      } else if (const auto attempt = ParseClaimName(entry); attempt && store_.remote()) {
        job.claims.push_back(*attempt);
      } else if (!store_.remote() || !ParseRemovedName(entry).has_value()) {
        TemporaryOrUnknown(directory, entry);
      }
    }
    std::sort(job.claims.begin(), job.claims.end());
    std::sort(job.checkpoints.begin(), job.checkpoints.end(),
              [](const auto& a, const auto& b) { return a.id < b.id; });
    out_.jobs.push_back(std::move(job));
  }

  void TemporaryOrUnknown(const std::string& directory, const std::string& name) {
    const std::string path = JoinPath(directory, name);
    if (!ParseTemporaryName(name).has_value()) {
      return Unknown(path, "not a name of ours");
    }
    constexpr size_t kTailBytes = 32 + 4;  // "<unique>.tmp"
    const std::string unique = name.substr(name.size() - kTailBytes, 32);
    if (!intents_.contains(unique)) {
      LoadIntents();  // again: an intent is older than the files that it names
    }
    const absl::StatusOr<bool> there = store_.Exists(path);
    if (!intents_.contains(unique) && there.ok() && *there) {
      Unknown(path, "a temporary file that no intent names");
    }
  }

  // The intents of this node, or of all nodes that share the directory.
  void LoadIntents() {
    std::vector<std::string> directories = {store_.intents_dir};
    if (store_.remote()) {
      const std::string nodes = ParentDirectory(store_.home);
      const auto names = env_.List(nodes, kDirectoryNamesMax);
      for (const std::string& node : names.value_or(std::vector<std::string>())) {
        directories.push_back(JoinPath(JoinPath(nodes, node), kHomeIntentsName));
      }
    }
    for (const std::string& directory : directories) {
      const auto names = env_.List(directory, kDirectoryNamesMax);
      for (const std::string& name : names.value_or(std::vector<std::string>())) {
        intents_.insert(name.substr(0, name.find('.')));
      }
    }
  }

  void ScanStep(JobScan& job, const CheckpointId& id) {
    const std::string directory = store_.StepDirectory(job.job.name, id);
    const auto names = env_.List(directory, kStepNamesMax);
    if (absl::IsNotFound(names.status())) {
      return;
    }
    if (!names.ok()) {
      return Unreadable(directory, names.status());
    }
    StepNames found;
    for (const std::string& name : *names) {
      const StepFile file = ParseStepFileName(store_.options.kind, name);
      switch (file.role) {
        case StepFileRole::kRecord:
          found.records.emplace_back(file.rank, file.world_size);
          break;
        case StepFileRole::kImage:
          found.images.emplace(file.rank, file.world_size);
          break;
        case StepFileRole::kManifest:
          found.manifest = true;
          break;
        case StepFileRole::kManifestJson:
          break;
        case StepFileRole::kTemporary:
        case StepFileRole::kUnknown:
          TemporaryOrUnknown(directory, name);
          break;
      }
    }
    std::sort(found.records.begin(), found.records.end());
    CheckpointScan step;
    step.id = id;
    const CheckpointName name{job.job.job, job.job.name, id};
    if (found.manifest) {
      const absl::StatusOr<Manifest> manifest = store_.ReadManifest(name);
      if (manifest.ok()) {
        ScanCommitted(name, *manifest, found, step);
      } else if (!absl::IsNotFound(manifest.status())) {
        Unreadable(JoinPath(directory, kManifestName), manifest.status());
        step.manifest_unreadable = true;
        step.manifest_why = manifest.status();
        found.manifest = false;
      } else {
        found.manifest = false;
      }
    }
    if (!found.manifest) {
      ScanRecords(name, found, step);
    }
    if (step.has_manifest || step.manifest_unreadable || !step.copies.empty()) {
      job.checkpoints.push_back(std::move(step));
    }
  }

  bool Busy(const CheckpointName& name, Rank rank) {
    MutexLock hold(store_.mutex);
    return store_.busy.contains({name.job, name.id.attempt, name.id.step, rank});
  }

  // With a manifest no record is read: that the files are there, as long as it says, is all that is
  // asked.
  void ScanCommitted(const CheckpointName& name, const Manifest& manifest, StepNames& found,
                     CheckpointScan& step) {
    step.has_manifest = true;
    step.world_size = manifest.world_size;
    step.descent = manifest.descent;
    step.committed_unix_ms = manifest.committed_unix_ms;
    for (const ManifestShard& shard : manifest.shards) {
      const CopyName copy{{name.job, name.id.attempt, name.id.step, shard.rank},
                          name.job_name,
                          manifest.world_size};
      absl::Status status = CheckLength(store_.RecordPath(copy), shard.record_bytes);
      if (status.ok()) {
        status = CheckLength(store_.ImagePath(copy), shard.image_bytes);
      }
      if (!status.ok()) {
        Unreadable(store_.ImagePath(copy), status);
        continue;
      }
      step.copies.push_back({shard.rank,
                             shard.image_bytes,
                             shard.record_bytes,
                             shard.record_crc,
                             0,
                             shard.layout_hash,
                             shard.WholeBytes(),
                             {},
                             shard.likeness});
    }
    std::set<std::pair<Rank, uint32_t>> others(found.records.begin(), found.records.end());
    others.insert(found.images.begin(), found.images.end());
    for (const auto& [rank, world_size] : others) {
      if (world_size != manifest.world_size) {
        Unknown(store_.ImagePath(
                    {{name.job, name.id.attempt, name.id.step, rank}, name.job_name, world_size}),
                "the step's manifest does not name it");
      }
    }
  }

  absl::Status CheckLength(const std::string& path, uint64_t expected) {
    const absl::StatusOr<FileInfo> info = env_.Info(path);
    if (absl::IsNotFound(info.status())) {
      return absl::DataLossError(absl::StrCat("'", path, "': gone"));
    }
    HF_RETURN_IF_ERROR(info.status());
    if (!S_ISREG(info->mode)) {
      return absl::DataLossError(absl::StrCat("'", path, "': not a regular file"));
    }
    return info->bytes == expected
               ? absl::OkStatus()
               : absl::DataLossError(
                     absl::StrCat("'", path, "': ", info->bytes, " bytes instead of ", expected));
  }

  void ScanRecords(const CheckpointName& name, StepNames& found, CheckpointScan& step) {
    for (const auto& [rank, world_size] : found.records) {
      const CopyName copy{
          {name.job, name.id.attempt, name.id.step, rank}, name.job_name, world_size};
      found.images.erase({rank, world_size});
      if (Busy(name, rank)) {
        continue;
      }
      const absl::Status status = ScanRecord(copy, step);
      if (!status.ok() && !absl::IsNotFound(status)) {
        Unreadable(store_.ImagePath(copy), status);
      }
    }
    for (const auto& [rank, world_size] : found.images) {
      if (!Busy(name, rank)) {
        Unknown(store_.ImagePath(
                    {{name.job, name.id.attempt, name.id.step, rank}, name.job_name, world_size}),
                "an image without a record: being published by another node, or nobody's");
      }
    }
  }

  // One record at a time, and of it what an entry holds. NotFound: it was removed meanwhile.
  absl::Status ScanRecord(const CopyName& copy, CheckpointScan& step) {
    const std::string path = store_.RecordPath(copy);
    HF_ASSIGN_OR_RETURN(const std::string bytes, store_.ReadSmallFile(path, kRecordBytesMax));
    HF_ASSIGN_OR_RETURN(const ShardRecord record, CheckRecordFile(path, bytes, copy));
    if (!store_.remote()) {
      HF_RETURN_IF_ERROR(CheckIsWhole(path, record));
    }
    HF_RETURN_IF_ERROR(CheckLength(store_.ImagePath(copy), FileBytes(record)));
    if (step.copies.empty()) {
      step.world_size = record.world_size;
      step.descent = record.descent;
    } else if (step.world_size != record.world_size || step.descent != record.descent) {
      return absl::DataLossError(
          absl::StrCat("'", path, "': its world size of ", record.world_size,
                       " or its line of descent is not that of the step's other copies"));
    }
    step.copies.push_back({copy.id.rank, FileBytes(record), bytes.size(), RecordCrcOf(bytes),
                           record.sealed_unix_ms, record.layout_hash, record.image_bytes,
                           record.kept ? record.kept->plan : LayoutHash{}, record.likeness});
    return absl::OkStatus();
  }

  CopyStore::Impl& store_;
  Env& env_;
  std::string job_;  // that is being scanned
  DurableScan out_;
  std::set<std::string> intents_;
};

}  // namespace

// What is not found because the mount went away amid the scan is not gone.
absl::StatusOr<DurableScan> CopyStore::ScanAll() {
  absl::StatusOr<DurableScan> scan = Scanner(*impl_).All();
  HF_RETURN_IF_ERROR(impl_->CheckMount());
  return scan;
}

absl::StatusOr<DurableScan> CopyStore::ScanJob(const std::string& job_name) {
  absl::StatusOr<DurableScan> scan = Scanner(*impl_).One(job_name);
  HF_RETURN_IF_ERROR(impl_->CheckMount());
  return scan;
}

}  // namespace holdfast
