// What the parts of CopyStore share. Internal to tiers/durable.
//
// Nothing here holds `mutex` during I/O. Two things keep this process's own calls apart: `live`
// names the intents that a call is busy with, which Sweep leaves alone; `busy` the shards whose
// files a call is putting in place, taking away or putting right.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "tiers/durable/copy_store.h"
#include "tiers/durable/names.h"
#include "tiers/durable/small_files.h"

namespace holdfast {

inline constexpr uint32_t kFileMode = 0640;
inline constexpr uint32_t kDirectoryMode = 0750;
inline constexpr uint32_t kHomeMode = 0700;  // of what lies beside the copies
// Of names in one directory: two files for every rank and some more; jobs, steps and claims.
inline constexpr size_t kStepNamesMax = 4 * size_t{kWorldSizeMax};
inline constexpr size_t kDirectoryNamesMax = size_t{1} << 20;

// Whether the answer means "not to be had here" rather than "failed".
bool MeansNotHere(const absl::Status& status);

// How far a publication came, for whoever undoes it.
enum class Standing {
  kTemporaries,    // only those can be there
  kImageInPlace,   // the image has its final name
  kRecordInPlace,  // the record too; it is taken back
  kUnknown,        // as a crash left it: a record that is there stays
};

struct CopyStore::Impl {
  explicit Impl(const Options& o);

  const Options options;
  Env& env;
  const std::string home;         // this node's part of <dir>/.holdfast
  const std::string intents_dir;  // in it
  const std::string pool_dir;     // in it
  uint64_t device = 0;            // of `dir` when the store was opened

  Mutex preparing;  // held during the I/O of a preparation, and nothing else
  std::unique_ptr<FileLock> lock GUARDED_BY(preparing);
  uint64_t lock_inode GUARDED_BY(preparing) = 0;  // of the file that it is on
  bool pool_loaded GUARDED_BY(preparing) = false;

  mutable Mutex mutex;
  DurableCapabilities capabilities GUARDED_BY(mutex);
  std::map<std::string, uint64_t> pool GUARDED_BY(mutex);  // name → bytes
  uint64_t pool_bytes GUARDED_BY(mutex) = 0;
  std::set<std::string> live GUARDED_BY(mutex);  // unique parts of intents
  std::set<ShardId> busy GUARDED_BY(mutex);
  bool unswept GUARDED_BY(mutex) = false;  // an intent of this process was left behind
  bool reserve_given_up GUARDED_BY(mutex) = false;
  // Of `dir`, as it was last known to be the same.
  uint64_t directory_inode GUARDED_BY(mutex) = 0;
  uint64_t directory_born_ns GUARDED_BY(mutex) = 0;
  std::string directory_id GUARDED_BY(mutex);
  bool own_mount GUARDED_BY(mutex) = false;
  std::string refusal GUARDED_BY(mutex);
  // Of the cluster that has the directory: what its file was like when that was found out, and why
  // it says nothing of us yet.
  std::string cluster_id GUARDED_BY(mutex);
  FileInfo cluster_file GUARDED_BY(mutex);
  absl::Status cluster_unmarked GUARDED_BY(mutex);
  struct OpenedJob {
    JobIdentity identity;
    uint64_t inode = 0;  // of its file JOB
  };
  std::map<std::string, OpenedJob> jobs GUARDED_BY(mutex);  // by name
  std::map<std::pair<JobUuid, Attempt>, std::string> claims GUARDED_BY(mutex);

  // ---- copy_store.cc: paths, small steps that all share ----

  bool remote() const { return options.kind == DurableKind::kRemote; }
  std::string JobDirectory(std::string_view job_name) const;
  std::string StepDirectory(std::string_view job_name, const CheckpointId& id) const;
  std::string ImagePath(const CopyName& name, ImageForm form) const;
  std::string RecordPath(const CopyName& name) const;

  void Note(const std::string& note);

  absl::StatusOr<bool> Exists(const std::string& path);
  // Has the copy's image opened in the form in which it is there. In both, which a crash, a repair
  // or people may leave: in the one that fits. `open`: DataLoss where it does not.
  absl::Status OpenForm(const CopyName& name, const std::function<absl::Status(ImageForm)>& open);
  // Those that an image can have here.
  std::span<const ImageForm> Forms() const;
  absl::Status CheckDirectory(const std::string& path);      // one, and no symbolic link
  absl::Status RemoveIfThere(const std::string& path);       // of a file
  absl::Status RemoveIfEmpty(const std::string& directory);  // and durably; OK if it is not empty
  // What `take` makes of the file's bytes (a StatusOr). Of an error the file is read once more,
  // past the page cache: a cable, a cache or a bus may have flipped a bit.
  template <typename Take>
  auto ReadTwice(const std::string& path, uint64_t bytes_max, const Take& take)
      -> decltype(take(std::string())) {
    const auto read = [&]() -> decltype(take(std::string())) {
      HF_ASSIGN_OR_RETURN(std::string bytes, ReadSmallFile(path, bytes_max));
      return take(std::move(bytes));
    };
    auto taken = read();
    if (taken.ok() || absl::IsNotFound(taken.status())) {
      return taken;
    }
    DropCached(path);
    return read();
  }
  void DropCached(const std::string& path);
  absl::StatusOr<std::string> ReadSmallFile(const std::string& path, uint64_t bytes_max);
  absl::Status GiveToOwner(File& file, uint32_t uid, uint32_t gid);
  absl::Status GiveDirectoryToOwner(const std::string& path, uint32_t gid);
  absl::Status WriteNewFile(const std::string& path, std::string_view bytes, uint32_t uid,
                            uint32_t gid);
  // By whatever the file system has. AlreadyExists if `to` is there.
  absl::Status MoveWithoutReplacing(const std::string& from, const std::string& to);
  absl::Status RenameIfFree(const std::string& from, const std::string& to);
  // A file that may exist once: written aside, then given its name. False: there is one already.
  // Durable either way. `uid` kKeepOwner: it stays the daemon's.
  // Given up if `may` says so, asked when it is there under its temporary name.
  absl::StatusOr<bool> PublishOnce(const std::string& directory, std::string_view name,
                                   std::string_view unique, std::string_view bytes, uint32_t uid,
                                   uint32_t gid, const std::function<absl::Status()>& may = {});

  // ---- durable_home.cc: the directory itself ----

  std::string LockPath() const;
  absl::Status MakeOwn(const std::string& path);
  absl::Status CheckOwn(const std::string& directory);
  absl::StatusOr<uint32_t> OwnerOfWhatWeMake(const std::string& directory);
  absl::Status TakeLock() REQUIRES(preparing);
  absl::Status DropLockOfAFileThatIsGone() REQUIRES(preparing);
  absl::Status LockHome() REQUIRES(preparing);
  absl::Status Prepare();  // once; what every call that writes begins with
  // Somebody removed what Prepare made: all of it anew. OK: the intents have a directory again.
  absl::Status PrepareAgain();
  absl::Status Probe(DurableCapabilities& found);
  absl::Status CheckMount();  // that `dir` is the directory that was opened
  absl::StatusOr<FileInfo> InfoOfDirectory();
  absl::Status See();  // which directory it is: what CheckMount compares with
  // NotFound only while the mount is there: else it says nothing about the copy.
  absl::Status SinceMounted(absl::Status status);
  std::string IdPath() const;
  absl::StatusOr<std::string> ReadId();
  absl::StatusOr<std::string> ReadIdOnce();
  absl::Status MakeId();
  absl::StatusOr<bool> IsOwnMount(uint64_t its_device);
  absl::Status CheckSame(const KnownDirectory& before);
  absl::Status CheckHasId(const std::string& id);
  absl::Status NotTheSame(std::string_view why, const absl::Status& its_id,
                          std::string_view way_out) const;
  absl::Status IdUnread(const absl::Status& why) const;  // an error other than NotFound
  absl::Status LockName() REQUIRES(preparing);
  absl::Status CheckOwner() REQUIRES(preparing);
  absl::StatusOr<bool> PublishInHome(const std::string& path, std::string_view text);
  absl::Status ReplaceInHome(const std::string& path, std::string_view text);
  absl::StatusOr<std::string> WriteAside(std::string_view text);  // its path
  std::string WitnessPath() const;

  // ---- durable_cluster.cc: which cluster has the directory ----

  std::string ClusterPath() const;
  ClusterIdentity Us();
  absl::StatusOr<std::optional<ClusterMark>> ReadCluster();
  absl::Status WriteCluster(ClusterMark mark, bool replace);
  absl::Status Refused(const ClusterMark& noted, const ClusterIdentity& us) const;
  // Unavailable: it is another's. Takes it if nobody has it, and it can be written.
  enum class Claiming { kReads, kWrites };
  absl::Status ClaimCluster(Claiming why) REQUIRES(preparing);
  absl::Status MarkCluster()
      REQUIRES(preparing);      // the same; an error also if it cannot be written
  absl::Status CheckCluster();  // the same as the first, if the file has changed

  // ---- durable_sweep.cc: intents ----

  absl::Status WriteIntent(const Intent& intent);
  // A few blocks for intents, so that a full file system can still be emptied.
  absl::Status FillReserve();
  void GiveUpReserve();
  // Does what remains to be done for an intent and deletes it. Idempotent.
  absl::Status Resolve(const Intent& intent, Standing standing, RemovalReport& report);
  struct UnfinishedCopy {  // the paths of a publication
    std::string image;
    std::string record;
    std::string temporary_image;
    std::string temporary_record;
  };
  absl::StatusOr<bool> GaveImageItsName(const UnfinishedCopy& copy);
  absl::Status MoveBack(const std::string& path, const std::string& temporary);
  absl::Status SyncIfThere(const std::string& directory);
  absl::Status ResolvePublish(const Intent& intent, Standing standing);
  absl::Status ResolveReplace(const Intent& intent);
  absl::Status ResolveRemove(const Intent& intent, RemovalReport& report);
  absl::StatusOr<bool> RemoveImage(const std::string& path, RemovalReport& report);
  absl::Status ResolveSmallFiles(const Intent& intent);
  absl::StatusOr<SweepReport> SweepAll();
  void SweepOne(const std::string& name, SweepReport& report);
  void SweepIfNeeded();
  // Whether the directory of the job's name is its own. One that was removed, or is another run's
  // since, has nothing of it but perhaps temporaries.
  absl::StatusOr<bool> IsStillThere(const Intent& intent);

  // ---- durable_jobs.cc ----

  std::string JobFilePath(std::string_view job_name) const;
  absl::Status OpenJob(const JobIdentity& job);
  absl::StatusOr<JobIdentity> ReadJobFile(const std::string& job_name);
  absl::Status CreateJob(const JobIdentity& job);
  absl::Status WithJobIntent(const JobIdentity& job,
                             const std::function<absl::Status(const std::string& unique)>& make);
  // What the records in a job's directory say of it. The owner is that of their files.
  struct RecordsSay {
    std::optional<JobIdentity> job;
    bool two_jobs = false;    // they contradict each other
    bool two_owners = false;  // in their owner, or in more
    bool anything = false;    // a record, an image or a manifest is there, readable or not
    std::string other_name;   // of a job that is not this directory's
    size_t asked = 0;
  };
  absl::Status CheckNothingIsThere(const JobIdentity& job);
  absl::StatusOr<RecordsSay> AskRecords(const std::string& job_name);
  void AskRecord(const std::string& job_name, const CheckpointId& step, const std::string& name,
                 Rank rank, RecordsSay& say);
  // Whose directory it is when its file JOB is gone or damaged (`why`): what the records in it say.
  // They must agree. Writes JOB again where it can. The owner is the records' owner, or the one
  // that a person names; a daemon that cannot give files away owns them itself. NotFound: nothing
  // was saved there. DataLoss: something was, and no record tells whose it is.
  absl::StatusOr<JobIdentity> RebuildJob(const std::string& job_name, const absl::Status& why,
                                         const std::optional<JobOwner>& owner = std::nullopt);
  absl::Status WriteJobAgain(const JobIdentity& job, bool damaged);
  absl::StatusOr<JobIdentity> CheckJobIs(const JobUuid& job, const std::string& job_name);
  absl::StatusOr<std::string> NameOf(const JobUuid& job);
  // Nothing, too, of one whose directory was removed or replaced since: it is forgotten.
  absl::StatusOr<std::optional<JobIdentity>> KnownJob(const std::string& job_name);
  void ForgetJob(const std::string& job_name);
  // Asked when something has been made there under a temporary name, before it gets its own:
  // FailedPrecondition, Aborted: the job's removal has begun.
  absl::Status CheckGoesOn(const JobUuid& job, const std::string& job_name);
  absl::Status CheckClaimed(const JobUuid& job, Attempt attempt) const;
  absl::Status EnsureStepDirectory(const JobIdentity& job, const CheckpointId& id);

  // ---- step_mark.cc: the mark of a step whose writing has only begun (remote) ----

  // It is there, durably, or the step has a manifest and needs none. Before a file of the step is
  // made; the directory is there.
  absl::Status MarkBegun(const std::string& step_directory, uint32_t gid);
  // The same before a file gets its name, where somebody may have removed the empty step meanwhile.
  absl::Status MarkStillBegun(const std::string& step_directory, uint32_t gid);
  // Beside a manifest it means nothing, and goes. The caller syncs the directory.
  absl::Status DropMarkOfCommitted(const std::string& step_directory);
  // RemoveIfEmpty, of a step: the mark goes with the last file.
  absl::Status RemoveStepIfEmpty(const std::string& step_directory);

  // ---- durable_pool.cc ----

  absl::Status LoadPool();
  absl::StatusOr<bool> IsInPool(const std::string& name);  // still, and a file
  absl::Status DeleteFromPool(const std::string& name);    // nothing but a file
  // Files of it that somebody removed are no more counted on.
  absl::Status ForgetWhatLeftThePool();
  bool MakeRoomInPool(uint64_t bytes);
  // Moves or deletes the file; the caller syncs its directory.
  absl::Status Recycle(const std::string& path, uint64_t bytes, RemovalReport& report);
  // A recycled file under the temporary name, ready to be overwritten; null if there is none.
  absl::StatusOr<std::unique_ptr<File>> TakeFromPool(const std::string& path, uint64_t bytes,
                                                     bool direct);
  absl::Status TrimPool(uint64_t bytes);

  // ---- copy_replace.cc ----

  absl::StatusOr<std::unique_ptr<Writing>> BeginReplacement(const NewCopy& copy, bool direct);
  // Whether anything is left of the copy that would be mended: a part of it, or a manifest.
  absl::StatusOr<bool> AnythingOf(const CopyName& name);
  // Remote: that the manifest, if there is one, names this record.
  absl::Status CheckManifestNames(const CopyName& name, std::string_view record,
                                  uint64_t image_bytes);

  // ---- copy_write.cc, copy_read.cc, copy_removal.cc, durable_manifests.cc, copy_scan.cc ----

  absl::StatusOr<std::unique_ptr<Writing>> Begin(const NewCopy& copy, bool direct,
                                                 std::optional<int> zstd_level);
  // Makes the file that long, with room for all of it; the pool makes room when there is none.
  absl::Status Reserve(File& file, uint64_t bytes);
  // A file for an image of that length, as long as that in whole units of its alignment: a recycled
  // one, or a fresh one.
  struct NewImage {
    std::unique_ptr<File> file;
    uint32_t alignment = 1;
    bool recycled = false;
  };
  absl::StatusOr<NewImage> OpenNewImage(const std::string& path, uint64_t bytes, bool direct);
  // A record, before it gets its name: durable, and read back past the page cache. DataLoss: it is
  // not what was written.
  absl::Status WriteRecord(const std::string& path, std::string_view record, uint32_t uid,
                           uint32_t gid);
  // The record is whole, and this copy's. `what`: "publish", for the error.
  absl::StatusOr<ShardRecord> CheckOwnRecord(const char* what, const NewCopy& copy,
                                             std::string_view record_file) const;
  absl::StatusOr<CopyName> FindWorldSize(const CopyName& name);
  absl::StatusOr<std::unique_ptr<Reading>> OpenCopy(const CopyName& name,
                                                    const ReadOptions& options);
  // Buffered, as it lies there.
  absl::StatusOr<std::unique_ptr<File>> OpenImageFile(const std::string& path);
  // Buffered, and decompressed where it is not plain. DataLoss if the image has not as many bytes.
  absl::StatusOr<std::unique_ptr<File>> OpenImage(const std::string& path, ImageForm form,
                                                  uint64_t image_bytes);
  absl::StatusOr<RemovalReport> RemoveCopy(const CopyName& copy);
  absl::StatusOr<RemovalReport> RemoveCheckpoint(const CheckpointName& name,
                                                 const MayGoOn& may_go_on);
  absl::StatusOr<RemovalReport> RemoveJob(const JobUuid& job, const std::string& job_name,
                                          const MayGoOn& may_go_on);
  absl::StatusOr<bool> RemoveSteps(const JobUuid& job, const std::string& job_name,
                                   const MayGoOn& may_go_on, RemovalReport& report);
  absl::StatusOr<bool> RemoveTemporaries(const std::string& directory);
  absl::StatusOr<bool> HasIntent(std::string_view temporary_name);
  absl::StatusOr<RemovalReport> RemoveRanks(const CheckpointName& name, uint32_t world_size,
                                            std::vector<Rank> ranks, bool manifest,
                                            const MayGoOn& may_go_on);
  absl::StatusOr<Manifest> ReadManifest(const CheckpointName& name);
};

// An intent of this process from before it is written until it is gone from the disk. Destroyed
// with the intent still there, it leaves it to the next sweep.
class LiveIntent {
 public:
  LiveIntent(CopyStore::Impl& store, Intent intent);
  ~LiveIntent();
  LiveIntent(const LiveIntent&) = delete;
  LiveIntent& operator=(const LiveIntent&) = delete;

  const Intent& intent() const { return intent_; }
  absl::Status Write();
  // All is done: deletes the intent. If that fails, the next sweep does it.
  void Finish();
  absl::Status Resolve(Standing standing, RemovalReport& report);
  absl::Status Resolve(Standing standing);

 private:
  absl::Status MakeRoom();
  bool DiscardTemporary();  // whether it is gone

  CopyStore::Impl& store_;
  const Intent intent_;
  bool written_ = false;
};

// Shards whose files one call changes. Empty-handed if another has one of them.
class BusyShards {
 public:
  BusyShards(CopyStore::Impl& store, const JobUuid& job, const CheckpointId& id,
             const std::vector<Rank>& ranks);
  ~BusyShards();
  BusyShards(const BusyShards&) = delete;
  BusyShards& operator=(const BusyShards&) = delete;
  bool taken() const { return taken_; }

 private:
  CopyStore::Impl& store_;
  std::vector<ShardId> shards_;
  bool taken_ = false;
};

}  // namespace holdfast
