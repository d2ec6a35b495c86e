// Reads a durable tier's directory: every name is ours, or reported; every record is read, or told
// by a manifest.
#include "tiers/durable/copy_scan.h"

#include <sys/stat.h>

#include <algorithm>
#include <functional>
#include <map>
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
    std::map<std::pair<Rank, uint32_t>, ImageForm> images;
    bool manifest = false;
    bool mark = false;
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

  // Judged by what was read. What the system says about a call is no copy's fault: it may be the
  // drive's, or the mount's.
  static bool IsCopysFault(const absl::Status& why) {
    return absl::IsDataLoss(why) && !IsErrno(why);
  }
  void Damaged(CheckpointScan& step, DamagedEntry damaged, const absl::Status& why) {
    if (damaged_count_ == kScanDamagedMax) {
      return;
    }
    ++damaged_count_;
    damaged.why = Message(why);
    step.damaged.push_back(std::move(damaged));
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
    if (S_ISLNK(info->mode)) {  // somebody has moved it; what it leads to is not read
      out_.hidden.try_emplace(job_, absl::FailedPreconditionError(absl::StrCat(
                                        "'", path, "' is a link: put the directory itself there")));
    }
    return S_ISDIR(info->mode);
  }

  // The mark of a step; anything else of that name was put there by somebody.
  bool IsFile(const std::string& path) {
    const absl::StatusOr<FileInfo> info = env_.Info(path);
    if (info.ok() && !S_ISREG(info->mode)) {
      Unknown(path, "not a regular file");
    }
    return info.ok() && S_ISREG(info->mode);
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
    absl::StatusOr<JobIdentity> identity = store_.ReadJobFile(name);
    if (absl::IsNotFound(identity.status()) || IsCopysFault(identity.status())) {
      identity = store_.RebuildJob(name, identity.status());
    }
    if (absl::IsNotFound(identity.status())) {
      // Being made or removed just now, or somebody else's.
      return Unknown(directory, "a directory without a file JOB, or with another job's");
    }
    if (!identity.ok()) {
      out_.hidden.try_emplace(name, identity.status());  // something of it may lie there
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

  // Of this node, or of all nodes that share the directory.
  std::vector<std::string> IntentDirectories() {
    std::vector<std::string> directories = {store_.intents_dir};
    if (store_.remote()) {
      const std::string nodes = ParentDirectory(store_.home);
      const auto names = env_.List(nodes, kDirectoryNamesMax);
      for (const std::string& node : names.value_or(std::vector<std::string>())) {
        directories.push_back(JoinPath(JoinPath(nodes, node), kHomeIntentsName));
      }
    }
    return directories;
  }

  void LoadIntents() {
    for (const std::string& directory : IntentDirectories()) {
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
          // (Plain where it is there in both forms: that is what is read.)
          if (const auto [it, fresh] =
                  found.images.try_emplace({file.rank, file.world_size}, file.form);
              !fresh) {
            it->second = ImageForm::kPlain;
          }
          break;
        case StepFileRole::kManifest:
          found.manifest = true;
          break;
        case StepFileRole::kManifestJson:
          break;
        case StepFileRole::kMark:
          found.mark = IsFile(JoinPath(directory, name));
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
    step.begun = found.mark && !found.manifest && !step.manifest_unreadable;
    if (!found.manifest) {
      ScanRecords(name, found, step);
    }
    if (step.has_manifest || step.manifest_unreadable || !step.copies.empty() ||
        !step.damaged.empty()) {
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
      ImageForm form = FormOf(found, copy);
      absl::Status status = CheckLength(store_.RecordPath(copy), shard.record_bytes);
      if (status.ok()) {
        status = CheckImage(copy, shard.image_bytes, form);
      }
      const CopyEntry entry{shard.rank,
                            shard.image_bytes,
                            shard.record_bytes,
                            shard.record_crc,
                            0,
                            shard.layout_hash,
                            shard.WholeBytes(),
                            {},
                            shard.likeness,
                            form};
      if (status.ok()) {
        step.copies.push_back(entry);
        continue;
      }
      Unreadable(store_.ImagePath(copy, form), status);
      if (IsCopysFault(status)) {
        Damaged(step, {entry, manifest.world_size, manifest.descent, ""}, status);
      }
    }
    // What goes is not damaged: a removal takes the manifest first.
    const std::string path = JoinPath(store_.StepDirectory(name.job_name, name.id), kManifestName);
    if (!step.damaged.empty() && !store_.Exists(path).value_or(false)) {
      damaged_count_ -= step.damaged.size();
      step.damaged.clear();
    }
    std::set<std::pair<Rank, uint32_t>> others(found.records.begin(), found.records.end());
    for (const auto& [of, form] : found.images) {
      others.insert(of);
    }
    for (const auto& [rank, world_size] : others) {
      if (world_size != manifest.world_size) {
        const CopyName copy{
            {name.job, name.id.attempt, name.id.step, rank}, name.job_name, world_size};
        Unknown(store_.ImagePath(copy, FormOf(found, copy)),
                "the step's manifest does not name it");
      }
    }
  }

  static ImageForm FormOf(const StepNames& found, const CopyName& copy) {
    const auto it = found.images.find({copy.id.rank, copy.world_size});
    return it != found.images.end() ? it->second : ImageForm::kPlain;
  }

  // As it was listed in `form`; if it does not fit so, in whichever it does.
  absl::Status CheckImage(const CopyName& copy, uint64_t image_bytes, ImageForm& form) {
    const absl::Status listed = CheckForm(copy, form, image_bytes);
    if (!absl::IsDataLoss(listed) || IsErrno(listed) || store_.Forms().size() == 1) {
      return listed;
    }
    const absl::Status any = store_.OpenForm(copy, [&](ImageForm other) {
      form = other;
      return CheckForm(copy, other, image_bytes);
    });
    return any.ok() ? any : listed;
  }

  // Of a compressed one only its seek table says how long it should be: that is read.
  absl::Status CheckForm(const CopyName& copy, ImageForm form, uint64_t image_bytes) {
    const std::string path = store_.ImagePath(copy, form);
    if (form == ImageForm::kPlain) {
      return CheckLength(path, image_bytes);
    }
    const absl::Status opened = store_.OpenImage(path, form, image_bytes).status();
    return absl::IsFailedPrecondition(opened) ? absl::DataLossError(opened.message()) : opened;
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

  // What intents name as not finished, of this node or, in the remote tier, of any: an image that
  // lies there without its record is being written or removed. False if they cannot be told now.
  bool Unfinished(const CopyName& copy, bool& unfinished) {
    for (const std::string& directory : IntentDirectories()) {
      const auto names = env_.List(directory, kDirectoryNamesMax);
      if (!names.ok() && !absl::IsNotFound(names.status())) {
        Unreadable(directory, names.status());
        return false;
      }
      for (const std::string& name : names.value_or(std::vector<std::string>())) {
        if (!ParseIntentFileName(name) || ParseTemporaryName(name)) {
          continue;
        }
        const std::string path = JoinPath(directory, name);
        const absl::StatusOr<Intent> intent = store_.ReadTwice(
            path, kIntentBytesMax, [](const std::string& bytes) { return DecodeIntent(bytes); });
        if (!intent.ok() && MayPass(intent.status())) {
          Unreadable(path, intent.status());
          return false;
        }
        unfinished = unfinished || (intent.ok() && Names(*intent, copy));
      }
    }
    return true;
  }

  static bool Names(const Intent& intent, const CopyName& copy) {
    return intent.job == copy.id.job && intent.checkpoint == copy.id.checkpoint() &&
           std::find(intent.ranks.begin(), intent.ranks.end(), copy.id.rank) != intent.ranks.end();
  }

  void ScanRecords(const CheckpointName& name, StepNames& found, CheckpointScan& step) {
    for (const auto& [rank, world_size] : found.records) {
      const CopyName copy{
          {name.job, name.id.attempt, name.id.step, rank}, name.job_name, world_size};
      ImageForm form = FormOf(found, copy);
      found.images.erase({rank, world_size});
      if (Busy(name, rank)) {
        continue;
      }
      DamagedEntry damaged;
      const absl::Status status = ScanRecord(copy, form, step, damaged);
      if (status.ok() || absl::IsNotFound(status)) {
        continue;
      }
      Unreadable(store_.ImagePath(copy, form), status);
      if (MayBeDamaged(status, damaged, step)) {
        NoteDamaged(copy, form, std::move(damaged), status, step);
      }
    }
    for (const auto& [of, form] : found.images) {
      const CopyName copy{
          {name.job, name.id.attempt, name.id.step, of.first}, name.job_name, of.second};
      if (!Busy(name, of.first)) {
        ScanWithoutRecord(copy, form, step);
      }
    }
  }

  // In the remote tier others write, and a step that is marked as being written promises nothing.
  void ScanWithoutRecord(const CopyName& copy, ImageForm form, CheckpointScan& step) {
    const std::string path = store_.ImagePath(copy, form);
    bool unfinished = step.begun;
    if (!unfinished && !Unfinished(copy, unfinished)) {
      return;
    }
    const bool record = store_.Exists(store_.RecordPath(copy)).value_or(true);
    if (record || !store_.Exists(path).value_or(false)) {
      return;  // published or removed since the directory was listed
    }
    if (unfinished) {
      return Unknown(path,
                     "an image without a record: what was writing or removing it has not "
                     "ended, or was broken off");
    }
    const absl::Status why =
        absl::DataLossError(absl::StrCat("'", path, "': its record is gone, the image is there"));
    Unreadable(path, why);
    NoteDamaged(copy, form, {}, why, step);
  }

  // `damaged`: as far as a record tells. One that contradicts the step's others may be right, or
  // they are. In the remote tier a manifest says what belongs to a step; where there is none, what
  // lies in a step that is not being written belongs to it.
  bool MayBeDamaged(const absl::Status& status, const DamagedEntry& damaged,
                    const CheckpointScan& step) const {
    const bool told = damaged.world_size != 0 && !step.copies.empty();
    const bool fits =
        !told || (damaged.world_size == step.world_size && damaged.descent == step.descent);
    return !step.begun && IsCopysFault(status) && fits;
  }

  void NoteDamaged(const CopyName& copy, ImageForm form, DamagedEntry damaged,
                   const absl::Status& why, CheckpointScan& step) {
    CopyEntry& entry = damaged.entry;
    if (damaged.world_size == 0) {
      const absl::StatusOr<FileInfo> image = env_.Info(store_.ImagePath(copy, form));
      entry.rank = copy.id.rank;
      entry.form = form;
      entry.image_bytes = entry.shard_bytes =
          image.ok() && S_ISREG(image->mode) ? std::min(image->bytes, kImageBytesMax) : 0;
    }
    Damaged(step, std::move(damaged), why);
  }

  static CopyEntry EntryOf(const ShardRecord& record, std::string_view file, ImageForm form) {
    return {record.id.rank,        FileBytes(record),
            file.size(),           RecordCrcOf(file),
            record.sealed_unix_ms, record.layout_hash,
            record.image_bytes,    record.kept ? record.kept->plan : LayoutHash{},
            record.likeness,       form};
  }

  // One record at a time, and of it what an entry holds. NotFound: it was removed meanwhile.
  // `damaged`: what the record says of an image that does not fit.
  absl::Status ScanRecord(const CopyName& copy, ImageForm& form, CheckpointScan& step,
                          DamagedEntry& damaged) {
    const std::string path = store_.RecordPath(copy);
    std::string bytes;
    HF_ASSIGN_OR_RETURN(const ShardRecord record,
                        store_.ReadTwice(path, kRecordBytesMax, [&](std::string read) {
                          bytes = std::move(read);
                          return CheckRecordFile(path, bytes, copy);
                        }));
    if (!store_.remote()) {
      HF_RETURN_IF_ERROR(CheckIsWhole(path, record));
    }
    if (absl::Status image = CheckImage(copy, FileBytes(record), form); !image.ok()) {
      damaged = {EntryOf(record, bytes, form), record.world_size, record.descent, ""};
      return image;
    }
    if (step.copies.empty()) {
      step.world_size = record.world_size;
      step.descent = record.descent;
    } else if (step.world_size != record.world_size || step.descent != record.descent) {
      damaged = {EntryOf(record, bytes, form), record.world_size, record.descent, ""};
      return absl::DataLossError(
          absl::StrCat("'", path, "': its world size of ", record.world_size,
                       " or its line of descent is not that of the step's other copies"));
    }
    step.copies.push_back(EntryOf(record, bytes, form));
    return absl::OkStatus();
  }

  CopyStore::Impl& store_;
  Env& env_;
  std::string job_;  // that is being scanned
  DurableScan out_;
  std::set<std::string> intents_;
  size_t damaged_count_ = 0;
};

}  // namespace

// What a call that failed had left is put right first: else it would be taken for damage. What is
// not found because the mount went away amid the scan is not gone.
absl::StatusOr<DurableScan> CopyStore::ScanAll() {
  impl_->SweepIfNeeded();
  absl::StatusOr<DurableScan> scan = Scanner(*impl_).All();
  HF_RETURN_IF_ERROR(impl_->CheckMount());
  return scan;
}

absl::StatusOr<DurableScan> CopyStore::ScanJob(const std::string& job_name) {
  impl_->SweepIfNeeded();
  absl::StatusOr<DurableScan> scan = Scanner(*impl_).One(job_name);
  HF_RETURN_IF_ERROR(impl_->CheckMount());
  return scan;
}

}  // namespace holdfast
