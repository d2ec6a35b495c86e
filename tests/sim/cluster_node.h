// One node of a simulated cluster: a real NodeCore under a runtime that completes its actions late
// and sometimes not at all, its slots, its drive, its states on disk, its clocks. The daemon is
// killed and started; the machine is rebooted, and lost for good.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "server/node_core.h"
#include "server/runtime/passed_files.h"
#include "tests/sim/cluster_options.h"
#include "tests/sim/cluster_timeline.h"
#include "tests/sim/cluster_truth.h"
#include "tests/sim/sim_model.h"
#include "tests/sim/sim_tiers.h"

namespace holdfast::v1 {
class PeerMessage;
}

namespace holdfast::sim::cluster {

class RankProcess;

// Of the remote tier, which all nodes see.
struct Remote {
  SimTier tier;
  std::map<std::pair<JobUuid, CheckpointId>, std::vector<std::pair<ShardId, uint64_t>>> named;
  std::map<std::pair<JobUuid, Attempt>, uint64_t> claims;
  std::map<LayoutHash, std::vector<Rank>> plans;  // by which replicas share
};

// What is passed to a client in place of descriptors: a file, memory for parts, a step's records.
struct SimFiles : PassedFiles {
  FilePtr file;
  std::vector<SealedCopy> records;
};

FilePtr OpenedFile(const TierCopy& copy);

class Node {
 public:
  Node(World& world, uint32_t index, std::string name, v1::DaemonConfig config);
  ~Node();

  const uint32_t index;
  const std::string name;
  // An earlier version's takes it for any other flush when it is to write a bad copy anew.
  const bool knows_mending;
  std::string AsUnderstood(std::string message) const;

  // ---- the machine ----
  bool powered() const { return powered_; }
  bool lost() const { return lost_; }
  void PowerOn();                // boots; its daemon is started a moment later
  void PowerOff(bool for_good);  // memory is gone; for good: the drive, too
  void Boot();                   // a first time
  void JumpWallClock(int64_t off_ms) { clock_.SetWall(off_ms); }
  MonotonicTime Local() const;
  int64_t UnixMs() const;
  int64_t TrueOf(MonotonicTime local) const { return clock_.TrueOf(local); }

  // ---- its daemon ----
  bool up() const { return core_ != nullptr; }
  uint64_t life() const { return life_; }
  uint64_t incarnation() const { return incarnation_; }
  NodeInfo Info() const;
  void NewIncarnation();
  void StartDaemon();
  void KillDaemon();
  // Stopped for a while, as SIGSTOP does it: it takes nothing and says nothing, and time goes on.
  void Suspend(Duration time);
  bool suspended() const;
  // At once, or when it goes on; also if it was killed meanwhile.
  void WhenAwake(std::function<void()> what);
  // In this life of the daemon, and not while it is suspended.
  void After(Duration delay, std::function<void()> what);
  // Told to the core a moment later, in order.
  void Post(Event event);

  // ---- for processes ----
  ConnectionId Open(RankProcess* process);
  void CloseSocket(ConnectionId connection);
  void Send(ConnectionId connection, const v1::ClientFrame& frame, Duration deadline);
  FilePtr FindFile(SlotId slot) const;
  void Ended(const ProcessId& process);
  void Began(const ProcessId& process) { living_.insert(process); }
  int32_t NewPid() { return next_pid_++; }

  // Shards that processes here read in parts.
  size_t parts() const { return parts_.size(); }

  // ---- for people ----
  void Ask(decltype(AdminRequest::request) request, uint32_t uid,
           std::function<void(const AdminReply&)> answer);
  void ReadOtherSettings();

  // ---- what goes wrong ----
  SimTier& nvme() { return nvme_; }
  double state_failures = 0;
  double slot_failures = 0;
  bool HasGood(const ShardId& id, TierKind tier) const;
  bool HoldsGood(const ShardId& id) const;  // in memory
  bool FlipInMemory();
  bool FlipInNvme();
  bool LoseNvmeCopy();
  void RememberDrive();  // as it is now
  // That state of the job, or a newer one, lies on its drive.
  bool Keeps(const v1::JobState& state) const;
  // And that it has heard of the epoch.
  bool HasHeard(const std::string& job, Epoch epoch) const;
  bool RestoreOldDrive();  // while it is off

 private:
  friend class World;
  struct Request {
    std::string what;
    MonotonicTime due;
  };
  // A slot that another daemon holds for this one, in one of that one's lives.
  struct Hold {
    Node* at = nullptr;
    uint64_t life = 0;
    AdminToken token = 0;
  };
  // A shard that is read from other nodes, one after the other.
  struct PeerPull {
    FetchShard action;
    FilePtr into;
    FetchEnded ended;
    size_t next = 0;    // of the peers
    uint64_t turn = 0;  // what is heard of an older one comes too late
    bool from_drive = false;
    std::optional<Hold> hold;
  };
  // A shard that a process here reads in parts: from one node, else from the next.
  struct Parts {
    OpenDurable action;
    std::shared_ptr<SimFiles> files;  // the memory, as the process has it
    bool told = false;                // that it is open, or is not
    bool cancelled = false;
    ConnectionId connection = 0;      // which has been told
    std::vector<std::string> places;  // empty: here, in the remote tier
    size_t place = 0;
    size_t tried = 0;   // since it was last served
    uint64_t turn = 0;  // what is heard of an older one comes too late
    bool served = false;
    std::optional<Hold> hold;  // of a node's slot
    FilePtr source;            // which is that
    SealedCopy copy;
    std::optional<ReadParts> reading;
    std::set<std::string> contradicted;
    absl::Status status;
  };
  struct OldDrive {
    SimTier nvme;
    std::map<std::string, v1::JobState> states;
  };

  void Feed(const Event& event);
  void Perform(const Actions& actions);
  void Pump();
  void Complete(Event event, std::optional<Duration> after = std::nullopt);
  void InLife(uint64_t life, std::function<void()> what);
  void OnSlot(SlotId slot, std::function<void()> effect);
  Duration Latency();
  absl::Status MaybeFail(double probability);
  // cluster_messages.cc
  void CheckOldCommand(const std::string& from, const v1::PeerMessage& message,
                       const Actions& actions);
  void CheckOldMeeting(const std::string& from, const v1::PeerMessage& message,
                       const Actions& actions);
  void NoteMeetings(const Event& event);
  void CheckArrival(const std::string& from, const PeerSpoke& spoke,
                    const v1::PeerMessage& message);

  void Do(const SendReply& a);
  void Do(const CloseConnection& a);
  void Do(const WatchProcess& a);
  void Do(const UnwatchProcess& a) { watched_.erase(a.process); }
  void Do(const CreateSlot& a);
  void Do(const PopulateSlot& a);
  void Do(const WriteNote& a);
  void Do(const PublishRecord& a);
  void Do(const RemoveRecord& a);
  void Do(const DeleteSlot& a);
  void Do(const WriteJobState& a);
  void Do(const RemoveJobState& a);
  void Do(const IndexShard&) {}
  void Do(const UnindexShard&) {}
  void Do(const UnindexCopies&) {}
  void Do(const SetTimer& a);
  void Do(const AdminReply& a);
  void Do(const Report& a);
  void Do(const ApplyLimits&) {}
  void Do(const PeerReads& a);
  template <typename ToEtcd>
  void DoEtcd(const ToEtcd& a);
  void Do(const WatchHost& a) { DoEtcd(a); }
  void Do(const UnwatchHost& a) { DoEtcd(a); }
  void Do(const CampaignFor& a) { DoEtcd(a); }
  void Do(const ResignFrom& a) { DoEtcd(a); }
  void Do(const StoreAgreedState& a) { DoEtcd(a); }
  void Do(const ForgetAgreedState& a);
  void Do(const ChangePeers& a);
  void Do(const ConnectPeer& a);
  void Do(const SayToPeer& a);
  // cluster_tiers.cc
  void Do(const FlushShard& a);
  void Do(const FetchShard& a);
  void Do(const OpenDurable& a);
  void Do(const CancelDrain& a);
  void Do(const HurryFetch&) {}  // nothing is held back here
  void Do(const PublishManifest& a);
  void Do(const RemoveCopies& a);
  void Do(const RemoveJobCopies& a);
  void Do(const ScanRemote& a);
  void Do(const ScanNvme& a);

  // cluster_scrub.cc
  void Scrub();
  void ReadAgain(const std::vector<ReadableShard>& shards);
  void ReadSlotAgain(const ReadableShard& shard);
  void ReadCopyAgain(const ReadableShard& shard);
  std::string CommanderOf(const JobUuid& uuid) const;
  bool IsUnderWayFor(const std::string& commander, int64_t then) const;
  bool HasHeardSince(const std::string& node, int64_t then) const;
  void JudgeRepair(const FlushShard& a, const std::string& commander);
  void JudgeRemoval(const RemoveCopies& a);
  // cluster_parts.cc
  void Do(const ReadParts& a);
  void Do(const EndParts& a);
  void Do(const GatherRecords& a);
  void OpenParts(const OpenDurable& a);
  static bool Doubted(const Parts& parts, const std::string& place);
  void FindSource(DrainId opened);
  void AskForSource(DrainId opened, Node& other);
  void HearFrom(DrainId opened, uint64_t turn, Node& other, uint64_t others_life);
  void ReadRemoteParts(DrainId opened, uint64_t turn);
  void SourceFailed(DrainId opened, uint64_t turn, absl::Status status);
  void SourceFound(DrainId opened);
  void ReadPartsNow(DrainId opened, uint64_t turn);
  absl::Status ReadFromSource(Parts& parts);
  void EndReading(Parts& parts, absl::Status status);
  void LeaveWhenIdle(DrainId opened, uint64_t turn);
  void LeaveSource(Parts& parts);
  void CancelParts(DrainId opened);
  void ForgetParts();
  void NoteReader(const SendReply& a);
  void CheckPartsOf(ConnectionId connection);
  void CheckRecords(const SendReply& a) const;
  Parts* FindParts(DrainId opened, uint64_t turn);
  bool Hears(const Node& other) const;
  // cluster_pulls.cc
  void Pull(const FetchShard& a, const FilePtr& into);
  void PullFromNext(DrainId drain);
  void PullHeld(DrainId drain, uint64_t turn, Node& other, const Hold& hold,
                const AdminReply& reply);
  void PullRead(DrainId drain, const SealedCopy& held, const FilePtr& source);
  void EndPull(DrainId drain);
  void CancelPull(DrainId drain);
  void ForgetPulls();
  PeerPull* FindPull(DrainId drain, uint64_t turn);
  void AwaitPull(DrainId drain, uint64_t turn, Node& other, uint64_t others_life);
  void LetGo(const Hold& hold);
  // cluster_tiers.cc
  void EndFetch(const FetchEnded& ended);
  void Fetched(const FetchShard& a, const SealedCopy& copy, uint64_t token, const ShardId& content,
               const FilePtr& file, FetchEnded& ended);
  FilePtr FindSealed(const ShardId& id) const;
  SimTier& TierOf(TierKind tier);
  Place PlaceOf(TierKind tier) const;
  Duration TierLatency(TierKind tier);
  absl::Status TierFault(TierKind tier, bool writes);
  void RunDrain(DrainId id, SimDrain drain);
  void TryDrain(DrainId id);
  void LeaveOut(const FlushShard& a, TierCopy& written);
  void CheckShared(const holdfast::PublishManifest& a, const std::string& what);
  FlushEnded FlushNow(const FlushShard& a, const FilePtr& file,
                      const std::optional<FileRecord>& record);
  FoundJob FoundIn(const SimTier& tier, const JobUuid& uuid) const;
  void Deliver(const SendReply& a, const FilePtr& file);
  void CheckGrant(const SendReply& a, const RankProcess& process, const FilePtr& file);
  void RecordGone(File& file, Truth::Why why);
  void WipeMemory();
  void WipeDrive();

  World& w_;
  v1::DaemonConfig config_;
  NodeClock clock_;
  bool powered_ = false;
  bool lost_ = false;
  int boots_ = 0;
  int32_t next_pid_ = 100;

  std::unique_ptr<NodeCore> core_;
  uint64_t life_ = 0;  // grows with each start and each end of the daemon
  uint64_t incarnation_ = 0;
  int64_t suspended_until_ = 0;
  uint64_t starts_ = 0;
  uint64_t checks_ = 0;
  uint64_t timer_ = 0;
  std::optional<MonotonicTime> timer_at_;
  std::deque<Event> inbox_;
  bool pumping_ = false;
  std::map<SlotId, FilePtr> files_;
  std::map<SlotId, int64_t> slot_busy_until_;
  std::map<std::string, int64_t> state_busy_until_;
  std::map<SlotId, Generation> granted_;
  std::map<ConnectionId, int64_t> socket_busy_until_;
  std::map<ConnectionId, RankProcess*> connections_;
  std::map<std::pair<ConnectionId, uint64_t>, Request> requests_;
  std::set<std::pair<MonotonicTime, std::pair<ConnectionId, uint64_t>>> due_;
  ConnectionId next_connection_ = 1;
  std::set<ProcessId> living_;
  std::set<ProcessId> watched_;
  std::map<AdminToken, std::function<void(const AdminReply&)>> asked_;
  AdminToken next_asked_ = 1;
  // On disk.
  std::map<std::string, v1::JobState> states_;
  SimTier nvme_;
  std::optional<OldDrive> old_drive_;
  std::map<DrainId, SimDrain> drains_;
  std::map<DrainId, PeerPull> pulls_;
  std::map<DrainId, Parts> parts_;
  // What this daemon has obeyed: the highest epoch under which a host met it, by job.
  std::map<std::string, uint64_t> obeyed_;
  // Who has told this daemon, as a host under that epoch, what it has, and was not lost since.
  struct Meeting {
    std::string node;
    std::string job;  // its uuid's bytes
    uint64_t epoch = 0;
    auto operator<=>(const Meeting&) const = default;
  };
  std::set<Meeting> met_here_;
  // Who commands what is performed just now, and when this daemon lost whom last.
  std::string heard_of_;
  std::map<std::string, int64_t> lost_at_;
  int64_t members_at_ = 0;
  // What repairs here were told to have found bad where they read, by which host they were wanted,
  // and when; when they were begun.
  std::map<std::pair<ShardId, TierKind>, std::pair<std::string, int64_t>> known_bad_;
  std::map<std::pair<ShardId, TierKind>, std::deque<int64_t>> tries_;
};

}  // namespace holdfast::sim::cluster
