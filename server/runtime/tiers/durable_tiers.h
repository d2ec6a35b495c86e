// Everything that ckptd does with NVMe drives and the remote mount: a thread with a ring of its own
// for each drive, a pool of threads for the mount, and others for what only verifies. Performs the
// core's actions on durable tiers and answers each with its event. What clients only want to have
// opened has threads of its own: it waits for no flush, and no flush for a call of it that hangs.
//
//   HF_ASSIGN_OR_RETURN(auto tiers, DurableTiers::Create(config, slots, post));
//   tiers->Perform(FlushShard{…});        // → post(FlushEnded{…}), from another thread
//   tiers->CheckStalls(now);              // now and then
//
// Owner: the Daemon; its calls come from the reactor's thread. Nothing here waits for a disk.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "holdfast/v1/admin.pb.h"
#include "holdfast/v1/config.pb.h"
#include "server/events.h"
#include "server/runtime/tiers/live_operations.h"
#include "server/runtime/tiers/tier_place.h"
#include "server/runtime/tiers/worker_group.h"
#include "tiers/memory/slot_store.h"

namespace holdfast {

class FabricPort;
class Pacer;
class PassedOn;
class TrainingCores;
class PullClient;
class RemoteOwner;
class RemoteParts;

class DurableTiers {
 public:
  struct Options {
    v1::DaemonConfig config;
    Env* env = nullptr;
    std::shared_ptr<SlotStore> slots;
    std::function<void(Event)> post;  // any thread
    // Before what goes over the network and nobody waits for; may be null.
    std::shared_ptr<PacerGate> gate;
    // RemoteOwner::Options::note_remote.
    std::function<void(std::string id, std::string instead_of)> note_remote =
        [](const std::string&, const std::string&) {};
  };
  static absl::StatusOr<std::unique_ptr<DurableTiers>> Create(Options options);
  ~DurableTiers();

  // Other nodes' memory, to be read from. Before anything is performed; both outlive this object,
  // and either may be null.
  absl::Status SetPeers(std::shared_ptr<PullClient> pulls, FabricPort* fabric);
  // What is read here from the remote tier, for other nodes.
  std::shared_ptr<PassedOn> passed_on() const;
  // To be told of the processes that train here.
  std::shared_ptr<TrainingCores> training_cores() const;
  // Likewise, in parts, as they are asked for; null: without a remote tier.
  std::shared_ptr<RemoteParts> remote_parts() const { return remote_parts_; }
  // Which cluster the remote directory is to belong to; null: without a remote tier.
  std::shared_ptr<RemoteOwner> remote_owner() const { return remote_owner_; }
  // Reads the drives that it names, or every one; one TierScanned for each.
  void ScanDrives(const ScanNvme& action);
  void Perform(FlushShard action);
  void Perform(const CancelDrain& action);
  void Perform(const HurryFetch& action);
  void Perform(FetchShard action);
  void Perform(OpenDurable action);
  void Perform(PublishManifest action);
  void Perform(const RemoveCopies& action);
  void Perform(const RemoveJobCopies& action);
  void Perform(const ScanRemote& action);
  void Perform(const ApplyLimits& action);

  // Reads a copy whole, in threads of which nothing is written; any thread may wait here. What is
  // wrong with it, empty when nothing is. NotFound: it is gone. A copy that is removed meanwhile
  // may be read as damaged, when its file is used again. Cancelled when `advance`, which is asked
  // some times a second, answers false: then it does not wait for calls that hang.
  absl::StatusOr<std::string> Verify(const ReadableShard& shard,
                                     const std::function<bool(uint64_t)>& advance,
                                     std::shared_ptr<Pacer> pacer = nullptr);

  // The remote directory is this cluster's from now on; waits as Verify does.
  absl::Status AdoptRemote(const std::string& from, const std::function<bool()>& gone);

  // The record of a copy on a drive, as its file has it; waits as Verify does.
  absl::StatusOr<std::string> ReadRecord(const ReadableShard& shard,
                                         const std::function<bool()>& gone);

  // Writes the file JOB of a job again wherever it is lost or damaged: a person says whose it is.
  // What became of it, a line for each directory of this node that has something of the job; an
  // error where it is nowhere then. Waits as Verify does, for all of them at once.
  absl::StatusOr<std::vector<std::string>> WriteJobFiles(const std::string& job_name,
                                                         const JobOwner& owner,
                                                         const std::function<bool()>& gone);

  void CheckStalls(MonotonicTime now);
  // Whether the directories are there, and what they were: now and then, for those that are idle.
  void LookAtPlaces();
  bool configured() const { return !drives_.empty() || remote_ != nullptr || peers_ != nullptr; }
  bool idle() const;
  void Cancel();  // the daemon stops: nothing is begun any more, what runs ends soon
  void FillStatus(v1::DaemonStatus& status);
  // `ckptctl forget-drive`: what came of it. Any thread; waits until it is noted.
  absl::StatusOr<std::string> ForgetDrive(const std::string& id);
  // Each drive by itself, and the remote mount.
  struct PlaceState {
    TierKind tier = TierKind::kNvme;
    std::string dir;
    TierPlace::Health health;
  };
  std::vector<PlaceState> Places();

 private:
  struct Drive;
  struct Removal {
    struct Place {
      std::optional<size_t> drive;  // none: the remote tier
      bool counts = true;           // whether a failure there is one of the whole
    };
    DrainId drain = 0;
    LiveOperations::Key key;
    std::vector<Place> places;
    std::function<absl::Status(std::optional<size_t> drive, Operation&)> work;
    std::function<std::vector<Rank>()> ranks_left;  // asked after a failure; null: not known
  };
  struct Shared;  // what operations use that may outlive this object

  explicit DurableTiers(Options options);
  absl::Status Open();
  static bool IsWell(Drive& drive);
  absl::Status MakeWitnesses();
  std::shared_ptr<RemoteParts> MakeRemoteParts(const std::shared_ptr<WorkerGroup>& workers);
  std::vector<WorkerGroup*> Groups() const;
  Drive* DriveOf(const ShardId& shard);
  Drive& DriveFor(const FlushShard& action);
  std::shared_ptr<Operation> MakeOperation(DrainId drain, LiveOperations::Key key,
                                           std::function<Event(Operation&)> work,
                                           std::function<Event()> cancelled);
  void StartRemoval(Removal removal);
  using TextWork = std::function<absl::StatusOr<std::string>(Operation&)>;
  struct TextOutcome;  // of one, as soon as it is there
  std::shared_ptr<TextOutcome> Run(WorkerGroup& workers, TextWork work);
  struct PlaceText {
    std::string dir;
    absl::StatusOr<std::string> text;
  };
  // On each drive and in remote at the same time.
  std::vector<PlaceText> RunEverywhere(
      const std::function<TextWork(std::optional<size_t> drive)>& work,
      const std::function<bool()>& gone);
  // `advance` is asked now and then whether it goes on.
  static absl::StatusOr<std::string> Wait(TextOutcome& outcome,
                                          const std::function<bool(uint64_t)>& advance);
  void Start(WorkerGroup& group, std::shared_ptr<Operation> operation, bool urgent);

  const Options options_;
  const std::shared_ptr<EventOutlet> outlet_;
  std::shared_ptr<Shared> shared_;
  std::vector<std::unique_ptr<Drive>> drives_;
  std::shared_ptr<WorkerGroup> state_writer_;  // of the witness in the state directory
  std::shared_ptr<RemoteOwner> remote_owner_;
  std::unique_ptr<WorkerGroup> remote_;
  std::unique_ptr<WorkerGroup> remote_verifier_;
  std::shared_ptr<WorkerGroup> remote_opener_;
  // Fetches of a node that has peers: some of them wait for what other nodes read, and all of a
  // node's ranks must get to their own files meanwhile. (Their bytes go through the one CopyPool.)
  std::shared_ptr<WorkerGroup> remote_fetcher_;
  std::shared_ptr<RemoteParts> remote_parts_;
  std::unique_ptr<WorkerGroup> peers_;
  // Names operations that the core did not ask for; above all of its own.
  using OwnOperations = std::atomic<DrainId>;
  const std::shared_ptr<OwnOperations> next_own_ =
      std::make_shared<OwnOperations>(DrainId{1} << 63);
};

}  // namespace holdfast
