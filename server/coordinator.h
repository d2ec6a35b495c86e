// The coordinator of one job: attempts and their ranks, which steps are sealed by whom, which are
// committed, what is given up, and the restore session (docs/protocol.md §2, §4 to §6). It speaks
// of (attempt, step, rank), never of slots.
//
//   std::vector<ForAgent> out;
//   coordinator.Handle(ShardSealed{…}, node, time, out);   // → GiveUp, StageReached, PersistState,
//   …
//
// The ranks may run on several nodes, each with an agent of its own: every message comes from one,
// and says to which what follows from it goes.
//
// Its durable part is a JobState. What it intends is in memory at once; whoever must not hear of it
// before it is durable is answered when the write of that version has completed. One write is under
// way at a time, a failed one is repeated.
//
// Owned by NodeCore; not thread-safe; no I/O, no clock.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/status/statusor.h"
#include "holdfast/v1/admin.pb.h"
#include "recovery/deletion.h"
#include "recovery/drain_schedule.h"
#include "recovery/explain.h"
#include "recovery/fall_back.h"
#include "recovery/kept_placement.h"
#include "recovery/lineage.h"
#include "recovery/protection.h"
#include "recovery/restorable.h"
#include "recovery/shedding.h"
#include "server/checkpoint.h"
#include "server/joined_before.h"
#include "server/members.h"
#include "server/messages.h"
#include "server/node_inventories.h"
#include "server/node_names.h"
#include "server/pending_joins.h"
#include "server/session.h"
#include "server/sharing.h"
#include "server/stop_agreement.h"

namespace holdfast {

// Limits of one job, beside the configured ones.
inline constexpr size_t kAttemptsMax = 256;       // remembered
inline constexpr size_t kPendingJoinsMax = 4096;  // waiting for a rank that is still ending
inline constexpr size_t kReadersMax = 4096;       // waiting for tiers that are still being read
inline constexpr size_t kFatesMax = 128;  // steps of the current attempt whose end is remembered
inline constexpr size_t kLossesMax = 32;  // shown in the status of the job; of all jobs: the newest
inline constexpr size_t kEventsMax = 64;
inline constexpr size_t kLossesInOverview = 4;
inline constexpr size_t kEventsInOverview = 8;
inline constexpr size_t kNodesNamedMax = 4096;  // of one job; of all jobs:
inline constexpr size_t kNodesInOverview = 4;
inline constexpr Duration kRoomWait = std::chrono::seconds(2);  // for nodes that may be back soon
inline constexpr size_t kReleasedMax = 128;    // given up in memory lately; the oldest is forgotten
inline constexpr size_t kOpenStepsMax = 1024;  // begun, neither committed nor lost
inline constexpr Duration kStateRetry = std::chrono::seconds(1);
inline constexpr Duration kStateLaziness = std::chrono::seconds(5);

inline constexpr size_t kShardsExplained = 8;  // that a step lacks
inline constexpr Duration kPrefetchRetry = std::chrono::seconds(10);
inline constexpr Duration kPrefetchLook = std::chrono::milliseconds(100);  // between two looks
inline constexpr uint32_t kPrefetchFewRanks = 256;                         // at so few at once
inline constexpr size_t kTimelineMax = 256;
inline constexpr size_t kStagesMax = 64;  // of each of these
inline constexpr size_t kPinsMax = 1024;
inline constexpr size_t kDrainsMax =
    2;  // checkpoints of a job on their way into one tier at a time, but for those that hang
inline constexpr size_t kDrainsOpenMax = 8;  // and with them
// After the time by which a job's processes were to end: if they live on, it is a job like others.
inline constexpr Duration kStopCounts = std::chrono::minutes(5);
inline constexpr Duration kDrainRetryMin = std::chrono::seconds(1);
inline constexpr Duration kDrainRetryMax = std::chrono::seconds(60);
// Of a tier that was full: others make room there, and nobody tells of it.
inline constexpr Duration kDrainRetryFullMax = std::chrono::seconds(10);
inline constexpr Duration kRemovalRetry = std::chrono::seconds(10);
inline constexpr size_t kRepairsAtOnce = 2;  // of one job's copies in one tier, by one node
inline constexpr size_t kRepairsOfJobAtOnce = 64;
inline constexpr Duration kRepairRetryMin = std::chrono::seconds(1);
inline constexpr Duration kRepairRetryMax = std::chrono::minutes(10);
// Of what was refused, and will be again until somebody sees to it: each try reads a whole copy.
inline constexpr Duration kRefusedRepairRetryMax = std::chrono::hours(24);
inline constexpr size_t kMendedMax = 256;           // that are remembered
inline constexpr size_t kBadToldMax = 1024;         // named in one answer
inline constexpr size_t kRemovedMax = 256;          // removals that are remembered
inline constexpr size_t kRemovalsStuckMax = 64;     // that hang; the next one is waited for
inline constexpr int64_t kRemovalsFailedMax = 256;  // that failed; then retention waits for them

struct CoordinatorSettings {
  Duration commit_deadline{};
  int64_t retention_grace_ms = 0;
  int64_t keep_ended_ms = 0;
  Duration wait_for_copies{};  // of the newest saved step, before a restore uses an older one
  bool fall_back = true;       // else it is refused instead
  uint32_t keep_committed = 0;
  uint32_t slots_per_rank = 3;
  bool nvme = false;  // is there such a tier
  bool remote = false;
  bool peers = false;                   // other nodes can be read from
  size_t remote_writes_max = SIZE_MAX;  // images on their way there at a time
  v1::Policy policy;                    // of jobs that say nothing; every field set
  NodeNames* nodes = nullptr;
};

// Slots are multiples of it.
inline constexpr uint64_t kSlotBytesUnit = 2ull << 20;

class Coordinator {
 public:
  Coordinator(const CoordinatorSettings& settings, JobUuid uuid, std::string name, uint32_t uid,
              uint32_t gid, uint64_t first_session);

  // At start, in this order: the durable state, then the copies. Load refuses a state that
  // contradicts itself.
  absl::Status Load(const v1::JobState& state);
  void Resume(const std::vector<FoundShard>& shards, EventTime time, std::vector<ForAgent>& out);

  void Handle(const ToCoordinator& message, NodeId from, EventTime time,
              std::vector<ForAgent>& out);
  // The node's settings were read again. The tiers that there are, and the slots of a rank, stay.
  void ChangeSettings(const CoordinatorSettings& settings, EventTime time,
                      std::vector<ForAgent>& out);
  // When it wants a WakeUp at the latest.
  std::optional<MonotonicTime> NextWake() const;

  const JobUuid& uuid() const { return uuid_; }
  const std::string& name() const { return name_; }
  uint32_t uid() const { return uid_; }
  uint32_t gid() const { return gid_; }
  Attempt attempt() const { return attempts_.empty() ? 0 : attempts_.rbegin()->first; }
  bool IsMember(Rank rank, const ProcessId& process) const;
  std::vector<std::pair<Rank, ProcessId>> LivingMembers() const;
  std::vector<std::pair<Rank, ProcessId>> LivingMembersOn(NodeId node) const;
  // A node that the state names, that may be back at any time, and that has told nothing yet.
  std::optional<NodeId> SilentNode() const;
  int64_t LastOpenedUnixMs() const;  // its newest attempt
  bool AnythingCommitted() const;    // ever, whether it is still there or not
  uint32_t world_size() const;       // of the newest attempt; 0: there is none
  size_t RanksAlive() const;
  bool WriteInFlight() const { return in_flight_version_ != 0; }
  bool Idle() const;  // no request of anybody waits here

  // For the admin service. `wanted` absent: newest on the line; its attempt 0: on the line.
  absl::StatusOr<CheckpointId> FindCommitted(std::optional<CheckpointId> wanted) const;
  std::vector<CheckpointId> AllCheckpoints() const;
  bool IsCommitted(CheckpointId id) const;
  bool IsCommittedIn(TierKind tier, CheckpointId id) const;
  uint32_t WorldSizeOf(CheckpointId id) const;
  bool InventoryPending() const;  // a durable tier is still being read
  enum class Detail { kOverview, kWhole };
  void FillStatus(v1::JobStatus& status, EventTime time, Detail detail) const;
  void FillList(v1::ListCheckpointsReply& reply) const;

  std::string CheckInvariants() const;

  // Whether its memory is known to be gone with an earlier boot. Before Resume.
  void SetRebooted() { rebooted_ = true; }
  // Nothing of it can lie in any tier that this daemon does not know of: it was opened here.
  void SetOpenedHere() { history_known_ = true; }
  // Jobs that had its name and were removed: nodes that come back are to let go of them. What the
  // cluster agreed on of the last one had that version, and the name's versions go on.
  void SetRemovedBefore(std::vector<JobUuid> jobs, uint64_t version) {
    removed_before_ = std::move(jobs);
    version_ = durable_version_ = needed_version_ = version;
  }
  const std::vector<JobUuid>& removed_before() const { return removed_before_; }
  std::vector<std::string> NodesAway() const;                        // that have something of it
  uint64_t BytesAt(TierKind tier) const;                             // copies there
  uint64_t BytesBelow(TierKind tier, const std::string& dir) const;  // of copies in that directory
  std::vector<ShardId> GoodAt(TierKind tier, NodeId node) const;
  bool AnyDurable() const;  // copies in a durable tier, or on their way
  const InventoryState& Inventory(TierKind tier) const {
    return inventory_[static_cast<size_t>(tier)];
  }
  std::string WhyUnread(TierKind tier) const;  // empty: what lies there is known
  bool AllInventoriesKnown() const;            // of the durable tiers
  v1::Policy EffectivePolicy() const;
  const v1::Policy& policy_set() const { return policy_set_; }
  // For ckptctl (coordinator_views.cc).
  void FillWhere(std::optional<CheckpointId> only, v1::WhereReply& reply,
                 EventTime time = {}) const;
  void FillExplain(const v1::ExplainRequest& request, EventTime time,
                   v1::ExplainReply& reply) const;
  void FillTimeline(uint32_t steps_max, v1::TimelineReply& reply) const;
  void FillGarbage(int64_t now_unix_ms, v1::CollectGarbageReply& reply) const;
  // The copies in remote that the scrub of that node (kHere: the host's) is to read
  // (coordinator_scrub.cc). Asking for them, it takes part.
  void FillScrub(NodeId reader, const v1::PlanScrubRequest& request, size_t copies_max,
                 EventTime time, v1::PlanScrubReply& reply);
  // The step that is named on the line (attempt 0) or anywhere, whether it is whole or not.
  absl::StatusOr<CheckpointId> FindKnown(Attempt attempt, Step step) const;

 private:
  struct AttemptInfo {
    std::string launch;
    uint32_t world_size = 0;
    bool decided = false;
    CheckpointId parent;
    bool any_committed = false;
    Step last_committed_step = 0;
    int64_t opened_unix_ms = 0;
    uint64_t opening = 0;
    std::optional<Step> last_nvme_step;
    std::optional<Step> last_remote_step;
    std::string passed_over;  // by its decision; not durable
  };
  // How a step of the current attempt ended, for those who ask late.
  struct Fate {
    bool committed = false;  // and given up later
    int64_t unix_ms = 0;
    Failure failure;
    uint64_t order = 0;  // in which they ended
  };
  struct Verdict {
    enum class Kind { kJoin, kOpenNext, kWait, kRefuse } kind = Kind::kRefuse;
    Failure failure;  // kRefuse, and what a wait ends with
  };
  struct AwaitWaiter {
    Rank rank = 0;
    Step step = 0;
    v1::AwaitSave::Stage stage = v1::AwaitSave::STAGE_UNSPECIFIED;
  };
  struct Await {
    Step step = 0;
    Rank rank = 0;
    RequestToken token = 0;
    auto operator<=>(const Await&) const = default;
  };
  struct DurableWait {
    uint64_t version = 0;
    RequestToken token = 0;
    ToAgent message;
  };
  struct Loss {
    CheckpointId id;
    std::string why;
    int64_t unix_ms = 0;
  };
  struct Past {
    int64_t unix_ms = 0;
    std::string text;
  };
  // Every node was told that its copies in memory go. Those that have told since that they have
  // some all the same, which were left alone (as another save's), keep them.
  struct Released {
    CheckpointId id;
    std::set<NodeId> kept_on{};
    std::set<NodeId> untold{};  // out of reach then: what they have of it may come back
  };
  // What goes from a tier. It counts as gone for every decision from the beginning, and its bytes
  // as used to the end.
  struct Going {
    CheckpointId id;
    uint64_t bytes = 0;
    RankSet counted{};                         // whose copies `bytes` is made of
    std::set<NodeId> nodes{};                  // where it may still lie
    std::set<NodeId> asked{};                  // of those, who have not answered
    std::string stalled{};                     // what hangs
    std::string problem{};                     // why it failed
    std::map<NodeId, std::string> problems{};  // of each node, the last one
    MonotonicTime not_before{};                // it failed: when it is tried again
  };
  struct Removals {
    std::optional<Going> current;
    std::vector<Going> stuck;  // begun, and hang: others go meanwhile
    // After the current one: asked for by `ckptctl rm`, or tried and failed. What fails holds up
    // no other: it may lie on a drive that is gone for good.
    std::deque<Going> waiting;
    // What was removed lately, and when: a scan of remote that began before may still have seen it.
    // (Of its drives a node tells what is there, whenever it looked.)
    std::map<CheckpointId, MonotonicTime> ended;
    uint64_t pressure = 0;                // bytes that the tier's budget is short of
    RoomStage stage = RoomStage::kUsual;  // how far that goes
    bool collect = true;                  // something changed since nothing was left to remove
  };
  // A node that took part and is not there.
  struct Absence {
    MonotonicTime since{};
    bool ended = false;  // it is gone; else it may be back at any time
  };
  // Who is to keep a rank's replicas, the first one first (coordinator_replicas.cc).
  struct Targets {
    std::vector<NodeId> all;
    std::vector<NodeId> stand_in;  // where it is expected to come up: that one, if there is one
    uint32_t wanted = 0;
  };
  // The restore point on its way into memory (coordinator_prefetch.cc).
  struct Prefetch {
    struct Shard {
      NodeId node = kHere;  // where its rank runs, or ran last
      bool known = false;   // that node is
      bool done = false;    // it was in memory there: not brought there twice
      bool asked = false;
      TierKind from = TierKind::kNvme;
      std::set<TierKind> without{};  // tiers that failed, in this try
      size_t tries = 0;              // which of its peers is asked
      bool last_peer = true;         // that was the last of them
      std::string problem{};
      MonotonicTime retry_at{};
    };
    explicit Prefetch(CheckpointId of) : checkpoint(of) {}
    CheckpointId checkpoint;
    std::optional<MonotonicTime> until;  // absent: it has not begun
    bool look = true;                    // something changed: is there anything to ask for?
    bool over = false;                   // the time is up
    MonotonicTime looked_at{};
    std::optional<MonotonicTime> retry;  // of the first shard that is to be tried again
    std::map<Rank, Shard> shards;
  };
  // A bad copy in a durable tier, to be written anew from a good one (coordinator_repair.cc).
  struct Repair {
    std::optional<CopyPlace> from;  // under way: what it is read from
    NodeId asked = kHere;           // who does it
    MonotonicTime asked_at{};
    std::set<CopyPlace> failed;  // what it could not be taken from, though nothing says it is bad
    MonotonicTime not_before{};
    Duration backoff{};
    std::string problem;  // why the last try failed, or why there is none
    bool no_source = false;
    bool no_room = false;
    bool left = false;  // as it was asked for
  };
  struct RepairKey {
    CheckpointId id;
    Rank rank = 0;
    CopyPlace place;
    auto operator<=>(const RepairKey&) const = default;
  };
  // One Handle call's surroundings.
  struct Turn {
    EventTime time;
    std::vector<ForAgent>& out;
    NodeId from = kHere;  // whose agent says it
    void Say(ToAgent message, NodeId to = kHere) { out.push_back({to, std::move(message)}); }
  };

  // coordinator.cc
  void On(const StateWritten& m, Turn& t);
  void On(const WakeUp& m, Turn& t);
  void On(const JobRemoved& m, Turn& t);
  void On(const NodeArrived& m, Turn& t);
  void On(const NodeLeft& m, Turn& t);
  void TakeShards(const std::vector<FoundShard>& shards, Turn& t);
  void TakeJoining(const NodeArrived& m);
  void TakeSeats(const NodeArrived& m, Turn& t);
  void EndWhoIsNotThere(const NodeArrived& m, const std::map<Rank, const NodeArrived::Seat*>& seats,
                        Turn& t);
  void TakeLastBegun(const NodeArrived::Seat& seat);
  void Miss(NodeId node, bool comes_back, const std::string& why);
  bool MayComeBack(const std::vector<CheckpointId>& candidates) const;
  bool AnyCutOffAbove(const std::vector<CheckpointId>& candidates) const;
  bool CutOff(CheckpointId id, const Checkpoint& checkpoint) const;
  bool CommittedOnce(CheckpointId id) const;
  bool StillToTell() const;
  bool TakesPart(NodeId node) const;
  bool SeatedElsewhere(Rank rank, NodeId node) const;
  Failure TakenElsewhere(Rank rank) const;
  void GiveWay(const NodeArrived& m, Turn& t);
  void LoseWork(const absl::Status& why, const absl::Status& removal, Turn& t);
  void RecheckCutOff(Turn& t);
  void DropLost(NodeId node, TierKind tier, std::set<CopyState::Kind> kinds, const std::string& why,
                Turn& t);
  void ForgetGone(CheckpointId safe, Turn& t);
  void ForgetAwayBelow(CheckpointId id, Turn& t);
  void ForgetDurable(Turn& t);
  // coordinator_readers.cc: who takes no part in an attempt
  using Reader = std::variant<AttachAsked, ListAsked>;
  void On(const AttachAsked& m, Turn& t);
  void On(const RecordsAsked& m, Turn& t);
  void On(const ListAsked& m, Turn& t);
  void KeepWaiting(RequestToken token, Reader reader, Turn& t);
  void RetryReaders(Turn& t);
  bool TryAnswer(const AttachAsked& m, NodeId node, Turn& t);
  bool TryAnswer(const ListAsked& m, NodeId node, Turn& t);
  ShardLocated Locate(CheckpointId id, Rank rank, NodeId node, bool parts) const;
  std::vector<NodeId> RemoteReaders() const;
  std::string RemoteReaderOf(const std::vector<NodeId>& readers, const Checkpoint& checkpoint,
                             Rank rank) const;
  RecordsLocated LocateRecords(CheckpointId id, const Checkpoint& checkpoint, NodeId node) const;
  bool MustWait(const AttachAsked& m) const;
  bool MayBeRead(const std::optional<CheckpointId>& wanted,
                 const std::optional<CheckpointId>& found) const;
  void FillListing(std::optional<CheckpointId> before, v1::Listing& listing) const;
  Failure NothingCommitted() const;

  void On(const RequestExpired& m, Turn& t);
  void On(const RequestCancelled& m, Turn& t);
  void On(const RestorePointAsked& m, Turn& t);
  void Persist(Turn& t);  // this version must become durable now
  void PersistLazily(Turn& t);
  void FlushState(Turn& t);
  NodeMarks NodesOfIt() const;
  v1::JobState State(const NodeMarks& nodes, MonotonicTime now) const;
  // When everything intended so far is durable; or, if given, when that version is.
  void Answer(ToAgent message, Turn& t);
  void AnswerWhenDurable(RequestToken token, ToAgent message, Turn& t,
                         std::optional<uint64_t> version = std::nullopt);
  void Refuse(RequestToken token, Failure failure, Turn& t);
  void Tell(Report::Kind kind, std::string text, uint64_t bytes, Turn& t,
            TierKind tier = TierKind::kMemory);
  void PruneAttempts();
  // The ranks that were to be told by it that they are members, and are none any more.
  std::set<Rank> ForgetDurableWaits(RequestToken token, Turn& t);
  void RetryJoinsFor(const std::set<Rank>& ranks, Turn& t);
  void LoadMembers(const v1::JobState& state);

  // coordinator_attempts.cc
  void On(const JoinAsked& m, Turn& t);
  void On(const SeatLost& m, Turn& t);
  Verdict Judge(const JoinAsked& j) const;
  Verdict JudgeByWhatIsKnown(const JoinAsked& j) const;
  Verdict JudgeReturn(const JoinAsked& j) const;
  Verdict JudgeLeaver(const JoinAsked& j) const;
  Verdict JudgeLaunch(const JoinAsked& j) const;
  Verdict JudgeFresh(const JoinAsked& j) const;
  std::optional<Verdict> JudgeHolder(const JoinAsked& j) const;
  Verdict JudgeWorld(const JoinAsked& j) const;
  bool HeldByOther(const JoinAsked& j) const;
  bool OthersAlive(const JoinAsked& j) const;
  std::optional<NodeId> MayHaveRanksUnheard() const;
  bool WasIn(const JoinAsked& j) const;
  bool WasSeen(Rank rank) const;
  bool NamesWhoJoined() const;
  bool IsToBeNamed(Rank rank) const;
  bool LetInAlready(const JoinAsked& j) const;
  bool AsksAgain(const JoinAsked& j) const;
  void Admit(const JoinAsked& j, const Verdict& verdict, Turn& t);
  void OpenAttempt(const JoinAsked& j, Turn& t);
  void EndAttempt(Attempt number, const Failure& superseded, Turn& t);
  void RetryJoins(Turn& t, std::optional<Rank> rank = std::nullopt);
  Failure SupersededFailure(Attempt attempt) const;
  std::optional<Rank> RankLostFor(CheckpointId id) const;
  std::string HowGone(Rank rank) const;
  bool IsCurrent(Attempt attempt, RequestToken token, Turn& t);
  void Decide(CheckpointId parent, uint64_t restore_point_change, Turn& t);
  void ComputeLine();

  // coordinator_saves.cc
  void On(const SaveAsked& m, Turn& t);
  void RefuseSave(const SaveAsked& m, Failure failure, Turn& t);
  void On(const RoomAsked& m, Turn& t);
  bool MakeRoom(const RoomAsked& m, NodeId node, Turn& t);
  void RetryRoom(Turn& t);
  bool LetGoOfLeft(const RoomAsked& m, NodeId node, Turn& t);
  void NoteReleased(CheckpointId id);
  std::optional<Failure> WhyGivenUp(CheckpointId id, NodeId node);
  bool GoesFromMemory(CheckpointId id, NodeId node) const;
  bool ComesAnyway(const std::vector<CheckpointId>& useful, NodeId node) const;
  void On(const SpareAsked& m, Turn& t);
  std::optional<std::pair<CheckpointId, std::string>> ForAnother(const SpareAsked& m) const;
  void On(const SaveLost& m, Turn& t);
  void On(const ShardSealed& m, Turn& t);
  void On(const ShardBad& m, Turn& t);
  void On(const ShardGood& m, Turn& t);
  void On(const AwaitAsked& m, Turn& t);
  void AddShard(const ShardSealed& m, TierKind tier, CopyDetail detail, Turn& t);
  void AddCopy(const ShardSealed& m, TierKind tier, CopyState copy, Turn& t);
  void TellBad(CheckpointId id, Rank rank, CopyPlace place, const std::string& what, Turn& t);
  void Recheck(CheckpointId id, Turn& t);
  void Erase(CheckpointId id, Failure failure, Turn& t);
  static bool DrainsFromMemory(const Checkpoint& checkpoint);
  static bool WaitsForMemory(const Checkpoint& checkpoint);
  void EraseIfGone(CheckpointId id, const Failure& failure, Turn& t);
  void Commit(CheckpointId id, Checkpoint& checkpoint, Turn& t);
  void Abandon(CheckpointId id, const std::string& why, Turn& t);
  void AbandonWithout(Rank rank, std::optional<Step> below, const std::string& why, Turn& t);
  void AbandonLost(NodeId node, Turn& t);
  bool AllOfItIsKnown(Rank rank) const;
  void LetGo(CheckpointId id, Failure failure, Turn& t);
  void Retire(CheckpointId id, Failure failure, Turn& t);
  void Retain(Turn& t);
  void AnswerAwaits(Step step, Turn& t);
  void AnswerAwaitsOf(std::optional<Rank> rank, Step step, Turn& t);
  void ForgetAwait(RequestToken token);
  bool AnswerAwait(RequestToken token, const AwaitWaiter& waiter, Turn& t);
  bool AnswerDurableAwait(RequestToken token, const AwaitWaiter& waiter,
                          const Checkpoint& checkpoint, Turn& t);
  std::vector<ShedChoice> Choices(const std::vector<CheckpointId>* useful) const;
  bool Held(CheckpointId id) const;
  bool HeldUntilDurable(CheckpointId id) const;
  std::string ShedReason(const Victim& victim, const RoomAsked& m) const;

  // coordinator_session.cc
  void On(const SessionAsked& m, Turn& t);
  void On(const LoadReported& m, Turn& t);
  void EnterDecided(const SessionAsked& m, Turn& t);
  void ReportDecided(const LoadReported& m, Turn& t);
  void BeginSession(Turn& t);
  std::optional<Failure> ChooseCandidates(std::vector<CheckpointId>& candidates) const;
  bool WaitsForAnyStep(std::optional<Failure>& failure) const;
  Failure OtherWorld(CheckpointId id, uint32_t saved_by) const;
  void Doubt(const LoadReported& m, CheckpointId checkpoint, Turn& t);
  void OfferSource(RequestToken token, Rank rank, uint64_t session, uint32_t round, CheckpointId id,
                   Turn& t);
  void NextSource(const FetchFailed& m, Turn& t);
  std::set<TierKind> SourcesSpent(Rank rank, const std::string& problem);
  std::optional<TierKind> NearestFor(const Checkpoint& checkpoint, Rank rank, NodeId node,
                                     std::set<TierKind> without) const;
  std::vector<std::string> PeerNames(const Checkpoint& checkpoint, Rank rank, NodeId node) const;
  std::vector<RemoteReader> RemoteReaders(CheckpointId id, Rank rank);
  const std::vector<RankRun>& RunsReadOn(CheckpointId id, NodeId node);
  NodeId SeatOf(Rank rank) const;
  std::vector<CheckpointId> Loadable() const;
  std::optional<Rank> RankWithout(const Checkpoint& checkpoint) const;
  std::string WhyOutOfReach(CheckpointId id, const Checkpoint& checkpoint, Rank rank) const;
  std::string WhyNotNearer(const Checkpoint& checkpoint, Rank rank, NodeId node,
                           TierKind chosen) const;
  std::string WhyNot(const Checkpoint& checkpoint, Rank rank, NodeId node, TierKind tier,
                     const std::string& failure) const;
  std::optional<Failure> WaitForInventory(const std::vector<CheckpointId>& candidates) const;
  bool ManifestMissing(const Checkpoint& checkpoint) const;
  bool ManifestComing(const std::vector<CheckpointId>& candidates) const;
  std::optional<CheckpointId> NewestOnLine(
      const std::function<std::optional<Step>(const AttemptInfo&)>& last_of) const;
  std::optional<CheckpointId> NewestIn(TierKind tier) const;
  bool MayHoldNewer(TierKind tier, const std::vector<CheckpointId>& candidates) const;
  std::optional<CheckpointId> NewestInParts(std::optional<TierKind> tier) const;
  void GoOnWithTier(TierKind tier, Turn& t);
  void GoOnWithSession(Turn& t);
  void On(const FetchFailed& m, Turn& t);
  void FallBack(const LoadReported& m, Turn& t);
  Failure ReadInVain() const;
  // Not saved by as many ranks as the attempt has: each reads what it wants of all its shards.
  bool OfAnotherWorld(const Checkpoint& checkpoint) const;
  // Whether ranks of the session read of all shards of the checkpoint, wherever they run.
  bool ReadsOfAll(const Checkpoint& checkpoint) const;
  void GoOnWithFallBack(bool read_since, Turn& t);
  bool TurnToNewer(Turn& t);
  std::string WhatTheSessionWaitsFor() const;
  std::string HowNotToWait() const;
  std::string NamesOf(const std::set<NodeId>& nodes) const;
  void NextRound(std::vector<CheckpointId> candidates, Turn& t);
  void EndRound(const LoadReported& m, Session::Found found, Turn& t);
  void FinishSession(Turn& t);
  void StartOver(Turn& t);
  void BeginFromScratch(const Failure& why, uint64_t restore_point_change, Turn& t);
  void FailSession(const Failure& failure, Turn& t, RequestToken asker = 0);
  void DropFromSession(Rank rank, ProcessId process, Turn& t);
  bool SessionOpen() const { return session_ != nullptr; }
  std::vector<CheckpointSummary> Summaries() const;
  std::vector<CheckpointId> CommittedOnLine() const;
  std::string CommittedText() const;
  std::string DoubtedText() const;
  std::optional<Failure> OutOfReach(CheckpointId id) const;
  Failure Unreadable() const;
  Failure ChosenUnreadable() const;
  std::string WhyNothingOfTheLine(CheckpointId newest, std::optional<CheckpointId>& named) const;
  std::string HowFar(const Checkpoint& checkpoint, v1::AwaitSave::Stage stage) const;
  std::string WhyNotWhole(CheckpointId id, const Checkpoint& checkpoint) const;
  std::string OtherBranchText() const;
  bool EverCommitted() const;
  bool AnythingSaved() const;

  // coordinator_fall_back.cc: an older step than the newest that was saved
  struct NamedBad;
  std::optional<CheckpointId> NewestSaved(CheckpointId restored, const NamedBad** named) const;
  std::optional<NewerStep> NewerThan(CheckpointId usable) const;
  std::string WhyNotUsed(CheckpointId id, const NamedBad* named) const;
  void AddUnread(CheckpointId usable, NewerStep& newer) const;
  bool MayUse(CheckpointId step, Turn& t);
  void EndWaitForCopies(Turn& t);
  void ForgetWaitForCopies(Turn& t);
  std::string WhatIsPassedOver(CheckpointId restored) const;
  void LoadStepWait(const v1::StepWait& wait);
  void SaveStepWait(MonotonicTime now, v1::JobState& state) const;

  // coordinator_prefetch.cc: the restore point, ahead of the restore
  void BeginPrefetch(Turn& t);
  void EndPrefetch(Turn& t);
  void AdvancePrefetch(Turn& t);
  void LookForPrefetch(const ToCoordinator& message, NodeId from);
  std::optional<NodeId> LastSeatOf(const Checkpoint& checkpoint, Rank rank) const;
  void On(const PrefetchEnded& m, Turn& t);
  std::optional<MonotonicTime> PrefetchWake() const;
  v1::Prefetch PrefetchState() const;
  v1::Restore RestoreState() const;
  void FetchAhead(Rank rank, Turn& t);
  void EndFetchAhead(Turn& t);

  // coordinator_views.cc
  std::string WhereCopyLies(const ShardState::Copy& copy, EventTime time) const;
  static std::string BadOrGone(const Checkpoint& checkpoint, Rank rank);
  std::string WhyAway(NodeId node, EventTime time) const;
  std::string ExplainShard(const Checkpoint& checkpoint, Rank rank, EventTime time) const;
  CheckpointView SeatView(CheckpointId id) const;
  bool ReadableWhereItRuns(const Checkpoint& checkpoint, Rank rank, TierKind tier) const;
  Unreadables WhatIsMissing(const std::vector<CheckpointView>& views, EventTime time) const;

  // coordinator_tiers.cc: the way into the durable tiers
  void On(const InventoryState& m, Turn& t);
  void On(const CopiesFound& m, Turn& t);
  void On(const CopiesAway& m, Turn& t);
  std::vector<CheckpointId> DropCopies(
      CopyPlace place, const std::function<bool(CheckpointId, Rank, const CopyState&)>& which);
  void SumUpNvme();
  void On(const ShardDrained& m, Turn& t);
  void On(const FlushStalled& m, Turn& t);
  void On(const ManifestDone& m, Turn& t);
  void WriteAgain(const ManifestDone& m, Turn& t);
  void On(const MemoryCopyGained& m, Turn& t);
  bool Configured(TierKind tier) const;
  void Learn(const SealedCopy& copy, bool& learned);
  void GiveWay(const CopiesFound& m, Turn& t);
  bool MayLieThere(const CopiesFound& m, CheckpointId id, const Turn& t);
  bool MayCount(const CopiesFound& m, const DurableCopy& found, Turn& t);
  void NoteBegun(const SealedCopy& copy);
  bool IsAnotherSave(const SealedCopy& copy, TierKind tier, const std::string& location,
                     bool time_known, Turn& t);
  void PruneIncomplete(Turn& t);
  bool MayBeFound(const Checkpoint& checkpoint) const;
  bool NoteThere(CheckpointId id, TierKind tier);
  void ChooseTiers(CheckpointId id, Turn& t);
  bool MayGiveWay(CheckpointId id, TierKind tier) const;
  void ChooseForMissing(TierKind tier, Turn& t);
  void Want(CheckpointId id, TierKind tier, Turn& t);
  void BeginWanting(CheckpointId id, TierKind tier);
  void Unwant(CheckpointId id, TierKind tier, const std::string& why, Turn& t);
  void PumpDrains(Turn& t);
  bool StartDrain(CheckpointId id, TierKind tier, Turn& t);
  void TellDivergence(CheckpointId id, const Sharing& sharing, Turn& t);
  void AskForFlushes(Turn& t);
  bool NvmeMoves() const;
  void EndDrainRound(CheckpointId id, TierKind tier, Turn& t);
  void EndUnwanted(CheckpointId id, TierKind tier, Turn& t);
  void LoseDrain(CheckpointId id, TierKind tier, const std::string& why, Turn& t);
  void BeginManifest(CheckpointId id, Turn& t);
  void TierCommitted(CheckpointId id, TierKind tier, Turn& t);
  void DrainFailed(CheckpointId id, TierKind tier, const absl::Status& status, Turn& t);
  static std::optional<CopyPlace> FlushSource(const Checkpoint& checkpoint, Rank rank, TierKind to,
                                              bool nvme_moves);
  static CopyDetail DetailOf(const DurableCopy& copy);
  const v1::TierPolicy& TierPolicyOf(const v1::Policy& policy, TierKind tier) const;
  void NoteStage(CheckpointId id, const std::string& stage, int64_t begin_ms, int64_t end_ms,
                 const std::string& outcome, uint64_t bytes);
  void FillTiers(v1::JobStatus& status, EventTime time) const;
  std::string PolicyText(TierKind tier) const;  // "every 10th step and every 10 min"

  // coordinator_replicas.cc: copies in the memory of other nodes
  void On(const ReplicasDropped& m, Turn& t);
  uint32_t ReplicasWanted() const;
  bool LacksReplicas(const Checkpoint& checkpoint) const;
  void NoteRefusal(const ShardDrained& m, Drain& drain, NodeId target) const;
  bool StartReplication(CheckpointId id, Turn& t);
  std::optional<FlushWanted::Shard> NextReplica(const Checkpoint& checkpoint, Rank rank,
                                                const std::vector<NodeId>& targets,
                                                NodeId& target) const;
  std::map<Rank, Targets> ReplicaTargets(const Checkpoint& checkpoint);
  bool GoneForGood(std::optional<NodeId> node) const;
  void EndReplicationRound(CheckpointId id, Turn& t);
  void TakeLateReplica(const ShardDrained& m, Turn& t);
  void ReplicateAgain(Turn& t);
  void DropReplicas(const std::string& why, Turn& t);
  std::optional<NodeId> HomeOf(const Checkpoint& checkpoint, Rank rank) const;
  std::vector<std::string> DomainLevels() const;
  NodeId DomainOf(NodeId node) const;

  // coordinator_leaving.cc: nodes that are being drained
  void On(const NodeLeaving& m, Turn& t);
  void Rescue(Turn& t);
  const std::pair<const CheckpointId, Checkpoint>* NewestCommitted() const;
  bool LiesOnLeaving(const Checkpoint& checkpoint, Rank rank) const;
  bool AnyLiesOnLeaving(const Checkpoint& checkpoint) const;
  bool GoesToRemoteAtAll() const;
  std::string NotKnownOf(NodeId node) const;
  v1::Leaving LeavingState(NodeId node) const;
  std::string WhyNotElsewhere(const Checkpoint& checkpoint) const;

  // coordinator_stop.cc: the last step of a job that is told to end
  void On(const StopNoticed& m, Turn& t);
  void On(const StepsHeld& m, Turn& t);
  std::set<NodeId> NodesAlive() const;
  void ChooseLastStep(Turn& t);
  LastStepChosen LastStep(const Turn& t) const;
  void TellLastStep(Turn& t);
  void TellOfStop(NodeId node, Turn& t);
  bool EndsAttempt(CheckpointId id) const;
  bool IsLastStep(CheckpointId id, MonotonicTime now) const;
  void SendEndOfRun(Turn& t);

  // coordinator_stand_ins.cc: spares
  void On(const ReplaceAsked& m, Turn& t);
  std::string WhyFewerReplicas() const;
  uint64_t BytesOfRanksOn(NodeId node) const;
  absl::Status CheckReplace(const v1::ReplaceRequest& request) const;
  std::map<NodeId, NodeId> StandIns() const;

  // coordinator_repair.cc: bad copies in the durable tiers, written anew
  void On(const RepairAsked& m, Turn& t);
  void WantRepair(const RepairKey& key, bool leave);
  void LookForRepairs(const ToCoordinator& message);
  void AdvanceRepairs(Turn& t);
  void StartRepair(const RepairKey& key, Repair& repair, Turn& t);
  bool HasItsTurn(TierKind tier, NodeId by) const;
  CopyPlace StopMending(const RepairKey& key, Repair& repair);
  std::optional<CopyPlace> RepairSource(const RepairKey& key, const Repair& repair) const;
  std::string WhyNoSource(const RepairKey& key) const;
  void EndRepair(const ShardDrained& m, Turn& t);
  void LoseRepairs(NodeId node, const std::string& why, Turn& t);
  void RepairFailed(const RepairKey& key, const absl::Status& why, Turn& t);
  std::optional<MonotonicTime> RepairWake() const;
  // Whether a copy of it there is written anew just now, or read for that.
  bool BeingMended(CheckpointId id, TierKind tier) const;
  // The same, or it is to be, soon: retention, which takes from a tier what is not whole there
  // while another one has it, leaves it alone.
  bool ToBeMended(CheckpointId id, TierKind tier) const;
  std::string SourceText(const CopyPlace& from) const;
  void FillBadCopy(const RepairKey& key, const CopyState& copy, v1::BadCopy& out) const;
  void ForEachBad(std::optional<CheckpointId> only, const v1::RepairRequest& request,
                  const std::function<void(const RepairKey&, const CopyState&)>& visit) const;
  void FillRepair(std::optional<CheckpointId> only, const v1::RepairRequest& request,
                  v1::RepairReply& reply) const;

  // coordinator_source_waits.cc: nodes that are read from, and are not there for a moment
  bool WaitsForSource(const FetchFailed& m, Turn& t);
  bool LoadsInRound(const FetchFailed& m) const;
  void AdvanceSourceWaits(Turn& t);
  void TryAgain(const FetchFailed& m, Turn& t);
  void EndSourceWait(Rank rank, const Failure& why, Turn& t);
  std::optional<MonotonicTime> SourceWaitsWake() const;

  // coordinator_scrub.cc
  NodeId ScrubReaderOf(Rank rank, MonotonicTime now) const;
  void FillScrubCopy(std::pair<const CheckpointId, Checkpoint>& of, Rank rank, EventTime time,
                     v1::PlanScrubReply& reply);

  // coordinator_damage.cc: copies that a look at a tier found to be bad
  void TakeBad(const CopiesFound& m, Turn& t);
  void TakeBad(const BadDurableCopy& bad, const CopiesFound& m, Turn& t);
  void TakeNamedBad(CheckpointId id, Rank rank, Turn& t);
  void CountAsBad(const RepairKey& key, const std::string& location, const std::string& what,
                  Turn& t);
  void ForgetNamedBad(const std::function<bool(const RepairKey&, const std::string&)>& which);
  void MendFound(Turn& t);

  // coordinator_retention.cc: what goes from the durable tiers
  void On(const RemovalDone& m, Turn& t);
  void On(const RemovalStalled& m, Turn& t);
  void On(const DurableRoomAsked& m, Turn& t);
  void On(const FetchRoomAsked& m, Turn& t);
  void On(const PinAsked& m, Turn& t);
  void On(const RemoveCheckpointAsked& m, Turn& t);
  void On(const SetPolicyAsked& m, Turn& t);
  void On(const CollectGarbageAsked& m, Turn& t);
  std::vector<CheckpointView> Views() const;
  int64_t LeftUnixMs(CheckpointId id) const;
  std::vector<DeletionVerdict> Verdicts(TierKind tier, const std::vector<CheckpointView>& views,
                                        int64_t now_unix_ms, uint64_t bytes_wanted) const;
  void RetainDurable(Turn& t);
  void NoteGrace(TierKind tier, const std::vector<CheckpointView>& views, EventTime time);
  void EndGrace(MonotonicTime now);
  void BeginRemoval(CheckpointId id, TierKind tier, const std::string& why, Turn& t);
  Going TakeFrom(CheckpointId id, TierKind tier, Turn& t);
  std::string WhyNothingGoes(TierKind tier) const;
  static void LeaveStuck(Removals& removals);
  std::vector<const Going*> AllGoing(TierKind tier) const;
  // `failed`: among those that were tried before, or that were not.
  std::optional<Going> NextWaiting(TierKind tier, bool failed, MonotonicTime now);
  bool Remove(std::optional<Going> next, TierKind tier, Turn& t);
  void NoteLeft(Going& going, const RemovalDone& m, Turn& t);
  void EndRemoval(Going going, TierKind tier, Turn& t);
  void RetryFlushes(TierKind tier);
  bool IsGoing(CheckpointId id, TierKind tier) const;
  uint64_t BytesGoing(TierKind tier) const;
  bool Removing(CheckpointId id) const;
  Removals& RemovalsOf(TierKind tier) { return removals_[static_cast<size_t>(tier)]; }
  const Removals& RemovalsOf(TierKind tier) const { return removals_[static_cast<size_t>(tier)]; }
  bool Pinned(CheckpointId id) const;

  CoordinatorSettings settings_;
  const JobUuid uuid_;
  const std::string name_;
  const uint32_t uid_;
  const uint32_t gid_;

  // Durable.
  std::map<Attempt, AttemptInfo> attempts_;
  Attempt highest_attempt_ = 0;
  uint64_t highest_epoch_ = 0;
  v1::RestorePoint restore_point_;
  uint64_t restore_point_changes_ = 0;  // tells two restore points apart; not durable itself
  std::optional<Prefetch> prefetch_;    // of the restore point; not durable either
  std::optional<CheckpointId> ahead_;   // of the open attempt, by those of its ranks that have come
  std::set<NodeId> ahead_nodes_;        // that were asked for some of it
  uint64_t version_ = 0;                // intended
  uint64_t on_disk_version_ = 0;        // is to outlive a loss of power before it counts as durable
  uint64_t needed_version_ = 0;  // somebody waits for this one; what is above it is written lazily
  uint64_t durable_version_ = 0;
  // The nodes that the newest state names which was given out to be written: whoever joins from one
  // of them needs no other.
  NodeMarks named_;
  uint64_t named_version_ = 0;
  uint64_t in_flight_version_ = 0;          // 0: no write under way
  std::optional<MonotonicTime> write_due_;  // a lazy write, or the repetition of a failed one
  std::string write_problem_;
  std::deque<DurableWait> durable_waits_;
  bool removed_ = false;                     // nothing is written any more, but for that it is
  std::optional<uint64_t> removal_version_;  // of the state that says so
  std::vector<JobUuid> removed_before_;      // the newest first

  // Of the current (newest) attempt.
  Members members_;  // durable, but for their connections
  absl::btree_map<Rank, Step> last_begun_;
  bool any_save_ = false;
  StopAgreement stop_;
  std::map<Step, Fate> fates_;
  uint64_t last_fate_ = 0;
  absl::btree_map<RequestToken, AwaitWaiter> awaits_;
  absl::btree_set<Await> awaits_of_;
  std::unique_ptr<Session> session_;
  uint64_t next_session_ = 1;
  uint64_t last_session_ = 0;            // the last one that failed or was decided
  std::optional<Failure> last_failure_;  // absent: it was decided
  // What the last decision may still need if it turns out not to be durable.
  std::vector<CheckpointId> held_until_durable_;
  uint64_t decision_version_ = 0;  // the state that first said it

  std::vector<Descent> line_;  // of the newest decided attempt
  std::map<CheckpointId, Checkpoint> checkpoints_;

  // Durable tiers.
  v1::Policy policy_;            // durable: as the job said
  v1::Policy policy_set_;        // durable: by `ckptctl set`
  std::set<CheckpointId> pins_;  // durable
  // Taken back by the state of that version: they count until that is durable, or a crash would
  // leave pins of steps that are gone.
  std::map<CheckpointId, uint64_t> unpinned_;
  std::array<InventoryState, kTierKinds> inventory_;
  NodeInventories nvme_on_;  // of which inventory_ has the sum
  // The nodes that are there, and what they lend to replicas of what others have.
  struct Lender {
    uint64_t lends_bytes = 0;
    std::vector<NodeLabel> labels;  // coarsest failure domain first
    bool reads_remote = false;
  };
  std::map<NodeId, Lender> lenders_;
  KeptPlacement placement_;
  // By which, as somebody said. Best effort: a host that comes anew has not heard it.
  std::map<NodeId, NodeId> replaced_;
  mutable std::map<NodeId, NodeId> domains_;  // theirs, as far as asked for since they changed
  // Nodes that took part and are not there: what they have may make a step whole that is not. Those
  // that may be back at any time are waited for.
  std::set<NodeId> missing_;
  std::set<NodeId> unreachable_;
  std::map<NodeId, Absence> absent_;  // those that this coordinator saw go
  std::set<NodeId> leaving_;          // are being drained
  Attempt loaded_attempt_ = 0;        // what the state that it began with called the newest
  std::set<NodeId> unheard_;  // by this coordinator, ever: what they have may have been committed
  std::set<NodeId> to_tell_;  // that state named them; they have not told all that they have
  JoinedBefore joined_before_;
  std::array<LastDrained, kTierKinds> last_drained_;
  std::map<NodeId, MonotonicTime> scrub_readers_;  // when each asked last what it is to read
  std::map<RepairKey, Repair> repairs_;
  std::set<RepairKey> mending_;  // those of repairs_ that are under way
  bool repairs_wait_for_drains_ = false;
  bool look_for_repairs_ = false;   // something changed: is there anything to ask for?
  bool look_for_sources_ = false;   // and what had no good copy may have one now
  std::set<CheckpointId> touched_;  // something of these changed
  std::optional<MonotonicTime> repair_wake_;
  // Copies that are bad, and known by their names alone, of shards of which nothing else tells yet.
  struct NamedBad {
    std::string location;
    std::string what;
    bool told = false;
  };
  std::map<RepairKey, NamedBad> named_bad_;
  std::set<RepairKey> to_mend_;       // found to be bad: when all tiers have been read
  std::deque<v1::BadCopy> mended_;    // newest last
  std::set<CheckpointId> to_remote_;  // of which flushes may be under way, or wait for a ticket
  std::array<Removals, kTierKinds> removals_;
  std::optional<MonotonicTime> grace_ends_;  // of the first step that may go then
  MonotonicTime forgotten_at_{};  // what scans that began before tell of the tiers is past
  bool rebooted_ = false;
  // What its attempts brought into the durable tiers is known, also while those cannot be read.
  bool history_known_ = false;
  // Sources that failed a rank in this session, though nothing says that they are bad.
  std::map<Rank, std::map<TierKind, std::string>> failed_sources_;
  std::map<Rank, TierKind> offered_from_;  // where each rank's last source lay
  struct SourceWait {
    std::optional<FetchFailed> failed = std::nullopt;  // none: it is tried just now
    MonotonicTime again{};
    MonotonicTime until{};
  };
  std::map<Rank, SourceWait> source_waits_;  // in this round
  // RunsReadOn, for as long as ranks do nothing but ask for their sources: each of thousands that
  // start at a time is told of dozens of nodes.
  std::map<std::pair<CheckpointId, NodeId>, std::vector<RankRun>> runs_read_on_;
  bool waits_for_inventory_ = false;  // the session does, to begin or to fall back
  FallBackRule fall_back_;
  struct Stage {
    std::string name;
    int64_t begin_unix_ms = 0;
    int64_t end_unix_ms = 0;  // 0: not ended
    std::string outcome;
    uint64_t bytes = 0;
  };
  struct Times {
    uint64_t bytes = 0;
    uint32_t world_size = 0;
    std::string fate;
    std::vector<Stage> stages;
  };
  std::map<CheckpointId, Times> times_;  // the newest ones
  PendingJoins joins_;
  std::map<RequestToken, std::pair<Reader, NodeId>> readers_;  // and where they are
  // Ranks that need a slot, while nodes are missing with which a step may be whole, and another one
  // not needed: until when they wait.
  struct RoomWait {
    RoomAsked asked;
    NodeId node = kHere;
    MonotonicTime until{};
  };
  std::vector<RoomWait> room_waits_;
  std::deque<Released> released_;  // newest last
  std::deque<Loss> losses_;        // newest first; not what was merely retired
  std::deque<Past> events_;
};

}  // namespace holdfast
