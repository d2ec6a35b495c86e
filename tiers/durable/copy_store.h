// One directory tree of durable copies: an NVMe drive's, or a remote mount's (docs/formats.md,
// "NVMe directory", "Remote directory"). It makes names, publishes, removes, recycles, sweeps,
// lists: all metadata, all through Env. Bytes of images are moved by others, through the File that
// Begin and OpenCopy give (tiers/transfer).
//
//   HF_ASSIGN_OR_RETURN(auto store, CopyStore::Open({.env = env, .kind = DurableKind::kNvme,
//                                                    .dir = "/mnt/nvme0/holdfast"}));
//   store->Sweep();                                            // once, before anything else
//   HF_RETURN_IF_ERROR(store->OpenJob({uuid, "demo", uid, gid}));
//   HF_ASSIGN_OR_RETURN(auto writing, store->Begin({.id = id, .job_name = "demo", …}));
//   … write [0, image_bytes) to writing->image(), in multiples of writing->alignment() …
//   HF_ASSIGN_OR_RETURN(PublishedCopy copy, writing->Publish(record_file));
//
// Thread-safe, without a thread of its own. Every call blocks on I/O, for ever on a mount that
// hangs; no lock is held meanwhile, so that a call that hangs holds up no other. The store outlives
// the Writings and Readings that it gave.
//
// Errors: NotFound, AlreadyExists, ResourceExhausted (no space, quota), as everywhere. DataLoss:
// what is there is torn, damaged, or not what its name says. FailedPrecondition: of a newer format
// version; or the directory belongs to another run (job uuid, opening of the attempt). Unavailable:
// the mount went away, another directory lies in its place, or another daemon has it. Aborted:
// another call, here or on another node, is at work on these very files. After an
// error of Publish or Remove the caller may try again from the start; what was half done is named
// by an intent and is put right by the next call that writes, or by Sweep.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/env.h"
#include "tiers/durable/cluster_mark.h"
#include "tiers/durable/copy_scan.h"
#include "tiers/durable/manifest.h"
#include "tiers/tier.h"

namespace holdfast {

enum class DurableKind { kNvme, kRemote };

// Whose shard, and in which job's directory.
struct CopyName {
  ShardId id;
  std::string job_name;
  uint32_t world_size = 0;  // 0: not known; the remote tier then lists the step's directory
};
struct CheckpointName {
  JobUuid job;
  std::string job_name;
  CheckpointId id;
};

// What the file system under the directory can do; asked when the store first writes.
struct DurableCapabilities {
  bool known = false;
  std::string filesystem;          // "ext4", "lustre", …
  bool hard_links = false;         // link() publishes what may exist only once
  bool rename_no_replace = false;  // renameat2(RENAME_NOREPLACE)
  bool direct = false;             // O_DIRECT
  // Neither of the first two: two nodes that publish the same name could replace each other's, so
  // the directory may serve one node only.
  bool one_node_only() const { return known && !hard_links && !rename_no_replace; }
  std::vector<std::string> notes;  // what was tried and refused, for people
};

// Which directory a store had, to be told from one that lies in its place since: its mount point,
// another mount.
struct KnownDirectory {
  uint64_t device = 0;     // 0: another process knew it, and numbers may have changed
  std::string id;          // of .holdfast/id; empty: not known (nothing could be written there)
  bool own_mount = false;  // it was not on the system's own disk
  bool by_id = false;      // its id alone counts: a directory without it is another one
};

// Who writes in a remote directory under a node's name.
struct NodeOwner {
  std::string state;    // of the daemon's state_dir; empty: not checked
  std::string machine;  // /etc/machine-id
  std::string boot;     // of the kernel
  bool operator==(const NodeOwner&) const = default;
};

struct JobOwner {
  uint32_t uid = 0;
  uint32_t gid = 0;
};

struct PublishedCopy {
  std::string location;  // path of the image
  uint64_t image_bytes = 0;
  uint64_t stored_bytes = 0;  // what its file has: fewer where it is compressed
  uint64_t record_bytes = 0;
  uint64_t record_crc = 0;
  LayoutHash layout_hash{};
};

struct RemovalReport {
  uint64_t copies = 0;
  uint64_t bytes_freed = 0;             // of images, given back to the file system
  uint64_t bytes_recycled = 0;          // of images, now in the pool
  std::vector<UnknownFile> left_alone;  // why a directory is still there
  std::string unfinished;               // one of them that a node still writes; empty: none
};

struct SweepReport {
  std::vector<std::string> done;        // "removed the unfinished …", for the log
  std::vector<UnknownFile> left_alone;  // intents that could not be read or carried out, and why
};

class CopyStore : public Tier {
 public:
  struct Options {
    Env* env = nullptr;
    DurableKind kind = DurableKind::kNvme;
    // NVMe: made if it is not there. Remote: must exist, so that a mount that is missing is not
    // mistaken for an empty one.
    std::string dir;
    std::string node_name;        // remote: names this node's intents; as a job's name
    uint64_t pool_bytes_max = 0;  // NVMe: files of removed copies that are kept for reuse
    bool direct = false;          // images are opened with O_DIRECT where that is possible
    bool set_owner = false;       // files get the job's uid and gid: the daemon is root
    // Remote on Lustre: asked for when it is given; else what the directory has holds.
    std::optional<Striping> striping;
    // The directory is to be this one; Open says Unavailable, and makes nothing, if it is not.
    std::optional<KnownDirectory> same_as;
    NodeOwner owner;  // remote: two of them under one name undo each other's work
    // Remote: the cluster that the directory is to belong to, which it does once somebody has
    // opened it; none: that is not asked. Open says Unavailable, and has read and written nothing
    // else there, if it is another's.
    std::optional<ClusterIdentity> cluster;
  };

  // Reads only, but for NVMe's lock. Unavailable: another daemon has it. A directory that cannot be
  // written (read-only, full) is opened all the same: reading works, and whatever writes tries
  // again and says why not.
  static absl::StatusOr<std::unique_ptr<CopyStore>> Open(const Options& options);
  ~CopyStore() override;
  // By a person's order: the directory is taken over from the cluster that has the id `from`.
  // FailedPrecondition, and nothing was changed, if that one has it not. Also if `from` is the
  // remote directory that was noted, which this one replaces.
  static absl::Status Adopt(const Options& options, const std::string& from);

  const std::string& dir() const;
  // As known so far; no I/O.
  DurableCapabilities capabilities() const;
  KnownDirectory place() const;
  // Why nothing is written here, though it could be read: another daemon has this node's name.
  // Empty: no such reason. As known so far; no I/O.
  std::string refusal() const;
  uint64_t pool_bytes() const;
  // ---- NVMe: what the drive says of the node's drives (recovery/witnesses.h) ----

  // The message in `.holdfast/witness`. NotFound: it has none. DataLoss: it is damaged.
  // FailedPrecondition: of a newer version.
  absl::StatusOr<std::string> ReadWitness();
  absl::Status WriteWitness(std::string_view message);
  // Names of jobs that have a directory here.
  absl::StatusOr<std::vector<std::string>> JobNames();

  // The id of the cluster that has it: options.cluster's, or the one that was taken on in its
  // place. Empty: that is not asked. As known so far; no I/O.
  std::string cluster_id() const;
  // Whether another cluster has taken the directory over since (Unavailable).
  absl::Status CheckCluster();
  // Whether the directory is still the one of Open (Unavailable if not), and its room.
  absl::StatusOr<FilesystemInfo> Space();

  // Completes or undoes what this node's intents name, but for what this process is doing at the
  // moment. An error only when the intents cannot be listed.
  absl::StatusOr<SweepReport> Sweep();

  // ---- Jobs and attempts ----

  struct JobFileWritten {
    JobIdentity job;       // as JOB has it now
    bool written = false;  // else it was there
  };

  // Makes the job's directory, or checks that it is this job's: FailedPrecondition, naming both,
  // when another run has it.
  absl::Status OpenJob(const JobIdentity& job);
  // NotFound if there is none.
  absl::StatusOr<JobIdentity> FindJob(const std::string& job_name);
  // On a person's word: a file JOB that is gone or damaged is written again for this owner, with
  // the uuid that the records name. One that can be read stays as it is. NotFound: nothing of the
  // job lies here. DataLoss: no record can be read, or they are of two jobs.
  absl::StatusOr<JobFileWritten> WriteJobFile(const std::string& job_name, const JobOwner& owner);
  // Remote only. Once per attempt, before its first Begin or PublishManifest here: the attempt is
  // this `opening`'s (bytes that no other opening of it has). FailedPrecondition when another
  // opening claimed it: then this one may write nothing here.
  absl::Status ClaimAttempt(const JobIdentity& job, Attempt attempt, std::string_view opening);

  // ---- Writing ----

  class Writing;
  // Room for a copy, and its image under a temporary name. Opens the job by itself, as `NewCopy`
  // says. AlreadyExists if there is such a copy. Remote: FailedPrecondition without a claim.
  // `zstd_level`: the image is compressed on its way (1 to 19; remote only), else it is not.
  absl::StatusOr<std::unique_ptr<Writing>> Begin(const NewCopy& copy,
                                                 std::optional<int> zstd_level = std::nullopt);

  // For a copy that is bad: a new one in its place. What is there stays, and is read as before,
  // until Publish has all of the new one on the disk; then the new image takes the name of the old
  // one, and the record, if it is not the same, follows. Nothing of a copy that has gone meanwhile
  // is brought back: NotFound. (What is not there at all at the beginning is written as by Begin on
  // NVMe; in the remote tier, where the step has no manifest either, it is NotFound.) Publish says
  // FailedPrecondition, and nothing was touched, for a record that is not the one that the step's
  // manifest names; AlreadyExists, for one that differs from an undamaged one that is there.
  absl::StatusOr<std::unique_ptr<Writing>> BeginReplacement(const NewCopy& copy);

  // ---- Reading ----

  class Reading;
  struct ReadOptions {
    bool direct = false;  // O_DIRECT if Options wants it and the file system has it
    // Remote: what the copy is checked against. Null: the step's manifest is read, if there is one.
    std::shared_ptr<const Manifest> manifest;
    // What lies there is to be judged, not what the page cache still has of it: O_DIRECT, whatever
    // Options say, wherever a read with it succeeds. (A compressed image is read buffered.)
    bool past_cache = false;
  };
  absl::StatusOr<std::unique_ptr<Reading>> OpenCopy(const CopyName& name,
                                                    const ReadOptions& options);
  // The record alone, whatever its image is like. DataLoss: it is damaged, or another shard's.
  absl::StatusOr<std::string> ReadRecordFile(const CopyName& name);
  // The image alone, buffered, of a copy that was opened before, when it had that many bytes.
  // DataLoss: it is gone, or has not.
  absl::StatusOr<std::unique_ptr<File>> OpenImage(const CopyName& name, uint64_t image_bytes);

  // ---- Removing ----

  using MayGoOn = std::function<bool()>;
  // NotFound if there is none. Remote: FailedPrecondition while its step has a manifest.
  absl::StatusOr<RemovalReport> RemoveCopy(const CopyName& name);
  // All copies of the step that lie here, whole or damaged, with its manifest; NotFound if the step
  // has no directory. Files that are not ours stay, and the directory with them.
  // `may_go_on`, here and below: asked before each part; Cancelled when it is no more. What had
  // been begun then is a smaller step, or job, that can be removed again.
  absl::StatusOr<RemovalReport> RemoveCheckpoint(const CheckpointName& name,
                                                 const MayGoOn& may_go_on = nullptr);
  // All steps, claims, and JOB. FailedPrecondition when the directory is another run's. Aborted
  // when something there is still being written: claims and JOB stay, for the next try. Remote:
  // what any node was writing goes, too, and cannot be published any more.
  absl::StatusOr<RemovalReport> RemoveJob(const JobUuid& job, const std::string& job_name,
                                          const MayGoOn& may_go_on = nullptr);
  // Deletes recycled files until at most `bytes` are left.
  absl::Status TrimPool(uint64_t bytes);

  // ---- Manifests (remote only) ----

  // The commit: all copies that it names must be there (FailedPrecondition, and `missing` says of
  // which ranks they are not). OK also if another published the same before (`adopted` then says
  // so); AlreadyExists, naming the difference, if another published something else.
  absl::Status PublishManifest(const Manifest& manifest, bool* adopted = nullptr,
                               std::vector<Rank>* missing = nullptr);
  // NotFound: not committed. Checked against the name that it was found under.
  absl::StatusOr<Manifest> ReadManifest(const CheckpointName& name);

  // ---- Listing ----

  // Reads every record, but for remote steps with a manifest: there file names and lengths are
  // compared with its entries. What is being written at the moment is not listed. An error only
  // when the directory itself cannot be listed.
  absl::StatusOr<DurableScan> ScanAll();
  // NotFound if there is no such job.
  absl::StatusOr<DurableScan> ScanJob(const std::string& job_name);

  // Path of an image; of its record with ".record" for ".safetensors" and what follows.
  // `world_size` is needed for remote.
  std::string ImagePath(const CopyName& name, ImageForm form = ImageForm::kPlain) const;
  // Whether any image of the step is compressed here, by the names alone.
  absl::StatusOr<bool> HasCompressed(const CheckpointName& name);

  // ---- The contract of all tiers, over the above: buffered, jobs found by their uuid ----

  std::string_view kind() const override;
  absl::StatusOr<std::unique_ptr<CopyWriter>> Create(const NewCopy& copy) override;
  absl::StatusOr<std::unique_ptr<CopyReader>> Open(const ShardId& id) override;
  absl::Status Remove(const ShardId& id) override;
  absl::StatusOr<Inventory> Scan() override;

  struct Impl;  // internal to tiers/durable

 private:
  explicit CopyStore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// A copy that is not yet one. Destroyed without a Publish that went well, it leaves nothing behind.
// For one thread at a time.
class CopyStore::Writing {
 public:
  virtual ~Writing() = default;
  virtual const NewCopy& copy() const = 0;
  // As long as image_bytes rounded up to alignment(), with room reserved where the file system can.
  // One that is compressed takes whole frames (kFrameBytes of tiers/compressed), each once.
  virtual File& image() = 0;
  // All of the image was written; from here on image() can be read. Publish does it by itself.
  virtual absl::Status FinishImage() = 0;
  // What the page cache has of the image and was synced goes, so that the next reads bring what
  // lies there. (A request: nothing, where there is no such cache.)
  virtual void DropCached() = 0;
  // What the image's file has then.
  virtual uint64_t stored_bytes() const = 0;
  // For writes to image(): 1 when it is buffered. Bytes behind image_bytes are cut off by Publish.
  virtual uint32_t alignment() const = 0;
  virtual bool direct() const = 0;
  virtual bool recycled() const = 0;
  // Everything was written. The record is checked against the copy (InvalidArgument: it may be
  // tried again with the right one), gets generation 0, and makes the copy visible. Any other error
  // is the end of this copy: it is not there. AlreadyExists: another was published meanwhile.
  virtual absl::StatusOr<PublishedCopy> Publish(std::string_view record_file) = 0;
};

// An open copy. Its bytes stay while it lives, also when the copy is removed. For one thread at a
// time, but for image(), which is as thread-safe as File.
class CopyStore::Reading {
 public:
  virtual ~Reading() = default;
  virtual const CopyInfo& info() const = 0;
  virtual const ShardRecord& record() const = 0;
  virtual const std::string& record_file() const = 0;
  // The file that has it. Aborted if it has something else by now.
  virtual absl::StatusOr<std::unique_ptr<File>> OpenRecord() = 0;
  virtual File& image() = 0;
  // Nothing but the image is wanted any more; the Reading is of no more use.
  virtual std::unique_ptr<File> TakeImage() = 0;
  virtual uint32_t alignment() const = 0;  // for reads of image(); 1 when it is buffered
  virtual bool direct() const = 0;
  // Its file is: image() is what it holds, and has no descriptor to give away.
  virtual bool compressed() const = 0;
  // After the last byte: DataLoss if the file was cut or extended meanwhile. What is overwritten in
  // place fails its digests; a file that is removed or replaced keeps its bytes for this Reading.
  virtual absl::Status Confirm() = 0;
  // Another image has its name by now (BeginReplacement): what is wrong with this one says nothing
  // of that. False also where nothing can be told.
  virtual bool WasReplaced() = 0;
};

}  // namespace holdfast
