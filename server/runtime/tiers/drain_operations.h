// What the workers of the durable tiers do, one function for each kind of operation. They block on
// I/O, on mounts that hang for ever; what they use they hold by shared_ptr.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/mutex.h"
#include "holdfast/v1/config.pb.h"
#include "server/events.h"
#include "server/runtime/remote_parts.h"
#include "server/runtime/tiers/drive_index.h"
#include "server/runtime/tiers/drive_witnesses.h"
#include "server/runtime/tiers/operation.h"
#include "server/runtime/tiers/shared_slices.h"
#include "server/runtime/tiers/tier_place.h"
#include "server/runtime/tiers/training_cores.h"
#include "tiers/memory/slot_store.h"
#include "tiers/transfer/block_io.h"
#include "tiers/transfer/buffered_copy.h"
#include "tiers/transfer/pacer.h"
#include "tiers/transfer/thread_priority.h"

namespace holdfast {

class FabricPort;
class PassedOn;
class PullClient;
class WorkerGroup;

// What a drive's threads are to run with now. Thread-safe.
class WantedPriority {
 public:
  void Set(const ThreadPriority& priority) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    priority_ = priority;
  }
  ThreadPriority Get() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return priority_;
  }

 private:
  Mutex mutex_;
  ThreadPriority priority_ GUARDED_BY(mutex_);
};

struct DrainContext {
  explicit DrainContext(std::shared_ptr<EventOutlet> o) : outlet(std::move(o)) {}
  const std::shared_ptr<EventOutlet> outlet;  // for what no operation was asked: TierAway
  Env* env = nullptr;
  std::shared_ptr<SlotStore> slots;
  v1::NvmeConfig nvme;
  std::shared_ptr<Pacer> nvme_pacer = std::make_shared<Pacer>();
  std::shared_ptr<Pacer> remote_pacer = std::make_shared<Pacer>();
  // Of what a flush reads back there: no ceiling, but it waits while the network is busy.
  std::shared_ptr<Pacer> read_back_pacer = std::make_shared<Pacer>();
  std::vector<std::shared_ptr<TierPlace>> drives;
  std::shared_ptr<TierPlace> remote;
  std::shared_ptr<CopyPool> pool;  // the remote tier's
  // By drive: for what goes from there to the remote tier, so that a drive that hangs holds threads
  // of its own only.
  std::vector<std::shared_ptr<CopyPool>> relays;
  std::shared_ptr<TrainingCores> training_cores = std::make_shared<TrainingCores>();
  // To read from other nodes' memory, where there are any; and with one-sided reads, where there is
  // a fabric.
  std::shared_ptr<PullClient> pulls;
  std::string node_name;
  // What others need of what is read here from the remote tier.
  std::shared_ptr<PassedOn> passed_on;
  FabricPort* fabric = nullptr;
  std::shared_ptr<Pacer> peer_pacer = std::make_shared<Pacer>();
  WantedPriority nvme_priority;
  DriveIndex index;
  SliceOwners owners;
  std::shared_ptr<DriveWitnesses> witnesses;
};

using Context = std::shared_ptr<DrainContext>;

FlushEnded FlushToDrive(const Context& context, size_t drive, const FlushShard& action,
                        Operation& operation);
// `drive`: the source's, if that is one.
FlushEnded FlushToRemote(const Context& context, std::optional<size_t> drive,
                         const FlushShard& action, Operation& operation);
// FlushShard::replace: a good copy in place of a bad one (tiers/durable/copy_replace.cc), read from
// memory or the other durable tier. `drive`: the one that is read, or written.
FlushEnded ReplaceCopy(const Context& context, std::optional<size_t> drive,
                       const FlushShard& action, Operation& operation);
FetchEnded FetchFromDrive(const Context& context, size_t drive, const FetchShard& action,
                          Operation& operation);
FetchEnded FetchFromRemote(const Context& context, const FetchShard& action, Operation& operation);
// From the memory of the first of the nodes named that has it, good.
FetchEnded FetchFromPeers(const Context& context, const FetchShard& action, Operation& operation);
// Files whose descriptors are closed by a worker of that group, as operation `own`, when the last
// who has them lets go: close may hang where they lie. Left to the end of the process when the
// group is gone.
std::shared_ptr<PassedFiles> FilesClosedBy(std::weak_ptr<WorkerGroup> closer, DrainId own);
// Image and record, into `files`. `drive` none: at the remote tier.
DurableOpened OpenForClient(const Context& context, std::optional<size_t> drive,
                            const OpenDurable& action, std::shared_ptr<PassedFiles> files,
                            Operation& operation);
// Of a copy on a drive, as its file has it.
absl::StatusOr<std::string> ReadRecordOf(const Context& context, size_t drive,
                                         const ReadableShard& shard, Operation& operation);
// A file in the remote tier, to be read in parts; `run` lets go of it. `whole`: put together with
// what it leaves out and other ranks' files have.
absl::StatusOr<std::shared_ptr<const RemoteParts::Copy>> OpenForParts(
    const Context& context, const CopyKey& key, bool whole,
    const std::function<void(RemoteParts::Work)>& run);
ManifestPublished PublishRemoteManifest(const Context& context,
                                        const holdfast::PublishManifest& action,
                                        Operation& operation);
// What is wrong with the copy; empty when nothing is.
absl::StatusOr<std::string> VerifyCopy(const Context& context, size_t drive,
                                       const ReadableShard& shard, Pacer* pacer,
                                       Operation& operation);
// `drive`: on which of them; none: at the remote tier.
absl::Status RemoveFrom(const Context& context, std::optional<size_t> drive,
                        const RemoveCopies& action, Operation& operation);
absl::Status RemoveJobFrom(const Context& context, std::optional<size_t> drive,
                           const RemoveJobCopies& action, Operation& operation);
// FailedPrecondition: the job's file JOB names another owner there.
absl::StatusOr<std::string> CheckJobFileIn(const Context& context, std::optional<size_t> drive,
                                           const std::string& job_name, const JobOwner& owner,
                                           Operation& operation);
// CopyStore::WriteJobFile; what became of it, for people.
absl::StatusOr<std::string> WriteJobFileIn(const Context& context, std::optional<size_t> drive,
                                           const std::string& job_name, const JobOwner& owner,
                                           Operation& operation);
// By a person's order, from the cluster of that id. Empty: done.
absl::StatusOr<std::string> AdoptRemoteDirectory(const Context& context, const std::string& from,
                                                 Operation& operation);
// Whether the directory is still there, and what it was; opens it if it is not open.
void LookAt(const Context& context, std::optional<size_t> drive, Operation& operation);
TierScanned ScanDrive(const Context& context, size_t drive, Operation& operation);
// `only_job` empty: all.
TierScanned ScanMount(const Context& context, DrainId drain, const std::string& only_job,
                      Operation& operation);

}  // namespace holdfast
