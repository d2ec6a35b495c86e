// A simulated node: one NodeCore under a runtime that completes its actions late, out of order and
// sometimes not at all, clients that train, save, restore and die, launchers that restart them,
// processes that keep to no rule, an administrator, slots whose files fail for good, and a daemon
// that is killed. Everything follows from one seed.
//
//   World world(seed, WorldOptions{});
//   world.Run();
//   EXPECT_EQ(world.violation(), "");
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tests/sim/sim_model.h"
#include "tests/sim/sim_tiers.h"

namespace holdfast::sim {

inline constexpr uint64_t kSlotBytes = 2ull << 20;
// What two rude processes may have mapped: two ranks each, in attempts that supersede each other.
inline constexpr uint64_t kRudeSlots = 40;
// How late an answer may be: what the core waits for the runtime (10 s), and the runtime's own
// lateness.
inline constexpr Duration kAnswerSlack = std::chrono::seconds(25);

struct WorldOptions {
  Duration stormy = std::chrono::minutes(4);  // with faults
  Duration calm = std::chrono::minutes(2);  // without: jobs must commit again, and nothing may leak
  // What the core does not stand yet (tests/server/found_by_sim_test.cc).
  bool trace = false;
  bool cramped = false;  // one job, and hardly more than two slots for each of its ranks
};

class Client;
class Rude;

// A process with connections to the daemon.
class Peer {
 public:
  Peer(ProcessId process, uint32_t uid) : process_(process), uid_(uid) {}
  virtual ~Peer() = default;
  virtual void OnReply(const SendReply& reply, const FilePtr& file) = 0;
  virtual void OnClosed(ConnectionId connection) = 0;
  // Whether the process has itself made this answer void (it let go of the slot meanwhile): what
  // comes with it is not to be judged.
  virtual bool Forsook(const SendReply&) const { return false; }
  bool alive() const { return alive_; }  // its process exists
  bool running() const { return alive_ && !dying_; }
  ProcessId process() const { return process_; }
  uint32_t uid() const { return uid_; }

 protected:
  bool alive_ = true;
  bool dying_ = false;  // its sockets are closed, its threads may write on

 private:
  const ProcessId process_;
  const uint32_t uid_;
};

// One job as its user runs it.
struct JobPlan {
  std::string name;
  uint32_t uid = 0;
  uint32_t world_size = 1;
  bool launch_ids = false;
  std::string launch;
  int launches = 0;
  std::optional<CheckpointId> choice;  // what its ranks ask for when they restore
  int64_t pace_ms = 200;
  bool uneven = false;  // its rank 0 is the slowest by far
  uint64_t slot_bytes = kSlotBytes;
  std::vector<Client*> ranks;      // the process that the launcher takes for each rank
  std::map<Rank, uint64_t> saves;  // begun since the last commit that a client saw; per rank
  bool ended = false;
};

// Requests that may bring a hold name it; 0 for the others.
uint64_t NameHold(v1::ClientFrame& frame, uint64_t hold);

class World {
 public:
  World(uint64_t seed, WorldOptions options);
  ~World();
  void Run();
  const std::string& violation() const { return oracle_.violation(); }
  std::string Summary() const;

  // ---- chance and time ----
  bool Chance(double probability) {
    return std::uniform_real_distribution<>(0, 1)(random_) < probability;
  }
  uint64_t Below(uint64_t limit) { return limit == 0 ? 0 : random_() % limit; }
  Duration Latency();
  MonotonicTime now() const { return now_; }
  int64_t unix_ms() const { return 1'700'000'000'000 + now_.ns / 1'000'000; }
  void After(Duration delay, std::function<void()> what);
  void Trace(const std::string& text);
  bool stormy() const { return stormy_; }
  bool roomy() const { return roomy_; }
  const WorldOptions& options() const { return options_; }
  uint64_t NextHold() { return next_hold_++; }
  uint64_t life() const { return life_; }

  // ---- for clients ----
  ConnectionId Open(Peer* peer);
  void CloseSocket(ConnectionId connection);
  void SendFrame(ConnectionId connection, const v1::ClientFrame& frame, Duration deadline);
  bool DaemonUp() const { return core_ != nullptr; }
  uint64_t NewToken() { return next_token_++; }
  FilePtr FindFile(SlotId slot);
  void Ended(Peer* peer);          // its process is gone for good
  void RankEnded(Client* client);  // …and its launcher notices
  Oracle& oracle() { return oracle_; }
  const std::map<SlotId, FilePtr>& files() const { return files_; }
  std::map<std::string, v1::JobState>& states() { return states_; }
  const v1::JobState* StateOf(const std::string& job) const;
  // The newest step of the job that a rank of it can load now, as the oracle sees it.
  bool CanRestore(const JobPlan& job) const;
  void Began(const std::string& job, CheckpointId id);
  void CountCommit(const std::string& job);
  void ClearRestorePoint(const JobPlan& job);
  std::vector<JobPlan>& jobs() { return jobs_; }
  // A peer was told that it is this rank: nobody else may be it, in this life of the daemon.
  void Seated(const Peer* peer, const std::string& job, Attempt attempt, Rank rank);
  void Unseated(const Peer* peer);  // it left
  void Launch(JobPlan& job, Rank rank);

 private:
  struct Request {
    MonotonicTime due;
    std::string what;
  };
  // sim_runtime.cc: the fake runtime; sim_checks.cc: Check…, and what is told
  void StartDaemon();
  void KillDaemon();
  void Feed(const Event& event);
  void Perform(const Actions& actions);
  void OnSlot(SlotId slot, std::function<void()> effect);
  void Complete(Event event);
  absl::Status MaybeFail(double probability);
  void Do(const SendReply& a);
  void Do(const CloseConnection& a);
  void Do(const WatchProcess& a);
  void Do(const UnwatchProcess& a);
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
  // sim_tiers.cc
  void Do(const FlushShard& a);
  void Do(const FetchShard& a);
  void Do(const OpenDurable& a);
  void Do(const CancelDrain& a);
  void Do(const HurryFetch&) {}  // nothing is held back here
  void Do(const ReadParts&) {}   // no other node has anything
  void Do(const EndParts&) {}
  void Do(const GatherRecords&) {}
  void Do(const PublishManifest& a);
  void Do(const RemoveCopies& a);
  void Do(const RemoveJobCopies& a);
  void Do(const ScanRemote& a);
  void Do(const ScanNvme& a);
  void Do(const ApplyLimits&) {}
  // A node that is alone has nobody to speak with.
  void Do(const WatchHost&) { std::abort(); }
  void Do(const UnwatchHost&) { std::abort(); }
  void Do(const CampaignFor&) { std::abort(); }
  void Do(const ResignFrom&) { std::abort(); }
  void Do(const StoreAgreedState&) { std::abort(); }
  void Do(const ForgetAgreedState&) { std::abort(); }
  void Do(const ChangePeers&) { std::abort(); }
  void Do(const ConnectPeer&) { std::abort(); }
  void Do(const SayToPeer&) { std::abort(); }
  void Do(const PeerReads&) { std::abort(); }
  void MakeTiers();
  bool TierChance(double probability);
  uint64_t TierBelow(uint64_t limit);
  Duration TierLatency(TierKind tier);
  SimTier& TierOf(TierKind tier);
  absl::Status TierFault(TierKind kind);
  void RunDrain(DrainId id, SimDrain drain);
  void TryDrain(DrainId id, uint64_t life);
  FlushEnded FlushNow(const FlushShard& a, const FilePtr& file,
                      const std::optional<FileRecord>& record, bool cancelled);
  FoundJob FoundIn(const SimTier& tier, const JobUuid& uuid) const;
  void DropDrains();
  void LosePower();
  void SyncFlushed(const FlushShard& a, FlushEnded ended, uint64_t life);
  void JudgeRemoval(const RemoveCopies& a);
  void JudgeCover(const RemoveCopies& a, const v1::JobState& state);
  void RemovalGranted(const Report& a, CheckpointId id);
  void BeginRemoval(const RemoveCopies& a);
  void JudgeReaders(const RemoveCopies& a);
  std::string TextOf(const RemoveCopies& a) const;
  void JudgeTierCommitted(const Report& a, CheckpointId id);
  void CopiesLost();
  void TierTrouble();
  void TierAdmin(SimTier& tier);
  void MakeRoomByHand(TierKind kind);
  void AskTiers(const AdminRequest& request, const std::string& job_name, CheckpointId id);
  void TierGoesAway(TierKind kind);
  void RemovalAnswered(AdminToken token, bool done);
  void CalmTiers();
  void CheckTiersInCalm();
  void CheckTiersAtTheEnd();
  void Do(const AdminReply& a);
  void HoldListed(const ListedShards& listed);
  void Do(const Report& a);
  void Deliver(const SendReply& a, FilePtr file);
  bool OpenFails(const SendReply& a, const FilePtr& file);
  absl::Status FaultOf(File& file, Fault fault, double probability);
  void CheckGrant(const SendReply& a, Peer& peer, const FilePtr& file);
  void AttemptOpened(const Report& a);
  void CheckAttempt(const JobUuid& job, Attempt attempt);
  void JudgeEviction(const Report& a, CheckpointId id);
  void CheckForeign(SlotId slot, const char* what);
  void CheckDeadlines();
  bool InLife(uint64_t life) const { return core_ != nullptr && life == life_; }
  bool Lives(const ProcessId& process) const;

  // sim_world.cc: the world around
  void Step();
  void MakeJobs();
  void RestartJob(JobPlan& job, bool all);
  void KillClient(Client* client, Duration linger);
  void StartReader(JobPlan& job);
  void StartRude();
  void Calm();
  void AdminInCalm();
  void CheckTheEnd();
  void EndAll();
  bool HasEnough() const;

  // sim_trouble.cc: what goes wrong
  void Trouble();
  bool MayDamage() const;
  void FlipABit();
  void FlipNewest(JobPlan& job);
  void GoBack(JobPlan& job);
  void BreakASlot();
  void BreakInCalm();
  void PlantSlots();
  void MarkForeign();
  void Reboot();
  void AdminSomething();
  std::optional<CheckpointId> PickCopy(const JobPlan& job);
  void RemoveJob(const std::string& name, uint32_t uid);

  const WorldOptions options_;
  std::mt19937_64 random_;
  MonotonicTime now_{1'000'000'000};
  std::map<std::pair<int64_t, uint64_t>, std::function<void()>> queue_;
  uint64_t next_event_ = 0;
  bool stormy_ = true;
  double failure_rate_ = 0;
  bool tmpfs_full_ = false;
  bool roomy_ = false;

  std::mt19937_64 tier_random_;
  bool tiers_ = false;
  SimTier nvme_;
  SimTier remote_;
  std::map<DrainId, SimDrain> drains_;
  std::map<AdminToken, std::pair<std::string, CheckpointId>> rm_asked_;
  std::set<std::pair<std::string, CheckpointId>> forced_;
  std::set<std::pair<std::string, CheckpointId>> removed_by_hand_;
  uint64_t nvme_bytes_max_ = 0;
  int boots_ = 1;
  int pins_ = 0;
  v1::DaemonConfig config_;
  uint64_t bytes_max_ = 0;
  std::unique_ptr<NodeCore> core_;
  uint64_t life_ = 0;
  uint64_t timer_ = 0;
  std::map<SlotId, FilePtr> files_;
  std::map<std::string, v1::JobState> states_;
  std::set<ProcessId> watched_;
  std::map<SlotId, Generation> granted_;  // the last filling by that number, in this life
  std::map<SlotId, int64_t> slot_busy_until_;
  std::map<ConnectionId, int64_t> socket_busy_until_;
  std::map<ConnectionId, Peer*> connections_;
  std::map<std::pair<ConnectionId, uint64_t>, Request> requests_;
  ConnectionId next_connection_ = 1;
  uint64_t next_hold_ = 1;
  AdminToken next_admin_ = 1;
  std::map<AdminToken, std::string> admin_;
  uint64_t next_token_ = 1;
  int32_t next_pid_ = 1000;

  std::vector<JobPlan> jobs_;
  std::vector<std::unique_ptr<Client>> clients_;
  std::vector<std::unique_ptr<Rude>> rudes_;
  bool rude_ = false;  // there are processes that keep to no rule
  int planted_ = 0;
  // Who was told so, in this life of the daemon.
  std::map<std::tuple<std::string, Attempt, Rank>, std::set<const Peer*>> seats_;
  std::set<std::tuple<std::string, CheckpointId, uint64_t>> begun_;  // by job and life
  bool over_ = false;
  Oracle oracle_;
  uint64_t events_ = 0;
  uint64_t commits_ = 0;
  uint64_t restores_ = 0;
  uint64_t kills_ = 0;
  uint64_t restarts_ = 0;

  friend class Client;
  friend class Rude;
};

}  // namespace holdfast::sim
