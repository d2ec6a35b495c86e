// The coordinator of one job: attempts and their ranks, which steps are sealed by whom, which are
// committed, what is given up, and the restore session (docs/protocol.md §2, §4 to §6). It speaks
// of (attempt, step, rank), never of slots.
//
//   std::vector<ToAgent> out;
//   coordinator.Handle(ShardSealed{…}, time, out);   // → GiveUp, StageReached, PersistState, …
//
// Its durable part is a JobState. What it intends is in memory at once; whoever must not hear of it
// before it is durable is answered when the write of that version has completed. One write is under
// way at a time, a failed one is repeated.
//
// Owned by NodeCore; not thread-safe; no I/O, no clock.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "holdfast/v1/admin.pb.h"
#include "recovery/lineage.h"
#include "recovery/restorable.h"
#include "recovery/shedding.h"
#include "server/messages.h"
#include "server/session.h"

namespace holdfast {

// Limits of one job, beside the configured ones.
inline constexpr size_t kAttemptsMax = 256;       // remembered
inline constexpr size_t kPendingJoinsMax = 4096;  // waiting for a rank that is still ending
inline constexpr size_t kFatesMax = 128;  // steps of the current attempt whose end is remembered
inline constexpr size_t kLossesMax = 32;  // shown in the status of the job; of all jobs: the newest
inline constexpr size_t kEventsMax = 64;
inline constexpr size_t kLossesInOverview = 4;
inline constexpr size_t kEventsInOverview = 8;
inline constexpr size_t kOpenStepsMax = 1024;  // begun, neither committed nor lost
inline constexpr Duration kStateRetry = std::chrono::seconds(1);
inline constexpr Duration kStateLaziness = std::chrono::seconds(5);

struct CoordinatorSettings {
  Duration commit_deadline{};
  uint32_t keep_committed = 0;
};

// A sealed copy found at start, and who may still write into its slot.
struct FoundShard {
  SealedCopy copy;
  std::optional<ProcessId> writer;
};

class Coordinator {
 public:
  Coordinator(const CoordinatorSettings& settings, JobUuid uuid, std::string name, uint32_t uid,
              uint32_t gid, uint64_t first_session);

  // At start, in this order: the durable state, then the copies. Load refuses a state that
  // contradicts itself.
  absl::Status Load(const v1::JobState& state);
  void Resume(const std::vector<FoundShard>& shards, EventTime time, std::vector<ToAgent>& out);

  void Handle(const ToCoordinator& message, EventTime time, std::vector<ToAgent>& out);
  // When it wants a WakeUp at the latest.
  std::optional<MonotonicTime> NextWake() const;

  const JobUuid& uuid() const { return uuid_; }
  const std::string& name() const { return name_; }
  uint32_t uid() const { return uid_; }
  Attempt attempt() const { return attempts_.empty() ? 0 : attempts_.rbegin()->first; }
  bool IsMember(Rank rank, const ProcessId& process) const;
  std::vector<std::pair<Rank, ProcessId>> LivingMembers() const;
  int64_t LastOpenedUnixMs() const;  // its newest attempt
  bool AnythingCommitted() const;    // ever, whether it is still there or not
  uint32_t world_size() const;       // of the newest attempt; 0: there is none
  size_t RanksAlive() const;
  bool WriteInFlight() const { return in_flight_version_ != 0; }
  bool Idle() const;  // no request of anybody waits here

  // For Attach and the admin service. `wanted` absent: newest on the line; its attempt 0: on the
  // line.
  absl::StatusOr<CheckpointId> FindCommitted(std::optional<CheckpointId> wanted) const;
  std::vector<CheckpointId> AllCheckpoints() const;
  bool IsCommitted(CheckpointId id) const;
  Failure NothingCommitted() const;
  enum class Detail { kOverview, kWhole };
  void FillStatus(v1::JobStatus& status, EventTime time, Detail detail) const;
  void FillList(v1::ListCheckpointsReply& reply) const;

  std::string CheckInvariants() const;

 private:
  struct AttemptInfo {
    std::string launch;
    uint32_t world_size = 0;
    bool decided = false;
    CheckpointId parent;
    bool any_committed = false;
    Step last_committed_step = 0;
    int64_t opened_unix_ms = 0;
  };
  struct Member {
    ProcessId process;
    ConnectionId connection = 0;  // 0: its connection has gone
    bool alive = false;
    bool told = false;  // it knows that it is a member: only its end makes it none
  };
  struct ShardState {
    uint64_t bytes = 0;
    int64_t unix_ms = 0;
    bool bad = false;
  };
  struct Checkpoint {
    uint32_t world_size = 0;
    bool committed = false;
    bool dead = false;           // a copy is bad, or its shards contradict each other
    bool contradictory = false;  // the latter: that does not mend
    bool is_protected = false;
    uint32_t good = 0;  // shards that are not bad
    uint64_t bytes = 0;
    int64_t unix_ms = 0;  // of the newest shard
    MonotonicTime begun;
    std::set<Rank> writing;  // began it and have not sealed it
    std::map<Rank, ShardState> shards;
  };
  // How a step of the current attempt ended, for those who ask late.
  struct Fate {
    bool committed = false;  // and given up later
    int64_t unix_ms = 0;
    Failure failure;
  };
  struct PendingJoin {
    JoinAsked join;
    Failure at_deadline;
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
  // One Handle call's surroundings.
  struct Turn {
    EventTime time;
    std::vector<ToAgent>& out;
  };

  // coordinator.cc
  void On(const StateWritten& m, Turn& t);
  void On(const WakeUp& m, Turn& t);
  void On(const JobRemoved& m, Turn& t);
  void On(const RequestExpired& m, Turn& t);
  void On(const RequestCancelled& m, Turn& t);
  void On(const RestorePointAsked& m, Turn& t);
  void Persist(Turn& t);  // this version must become durable now
  void PersistLazily(Turn& t);
  void FlushState(Turn& t);
  v1::JobState State() const;
  // When everything intended so far is durable; or, if given, when that version is.
  void Answer(ToAgent message, Turn& t);
  void AnswerWhenDurable(RequestToken token, ToAgent message, Turn& t,
                         std::optional<uint64_t> version = std::nullopt);
  void Refuse(RequestToken token, Failure failure, Turn& t);
  void Tell(Report::Kind kind, std::string text, uint64_t bytes, Turn& t);
  void PruneAttempts();
  void ForgetDurableWaits(RequestToken token, Turn& t);
  void LoadMembers(const v1::JobState& state);

  // coordinator_attempts.cc
  void On(const JoinAsked& m, Turn& t);
  void On(const SeatLost& m, Turn& t);
  Verdict Judge(const JoinAsked& j) const;
  Verdict JudgeReturn(const JoinAsked& j) const;
  Verdict JudgeLeaver(const JoinAsked& j) const;
  Verdict JudgeLaunch(const JoinAsked& j) const;
  Verdict JudgeFresh(const JoinAsked& j) const;
  std::optional<Verdict> JudgeHolder(const JoinAsked& j) const;
  Verdict JudgeWorld(const JoinAsked& j) const;
  bool HeldByOther(const JoinAsked& j) const;
  bool OthersAlive(const JoinAsked& j) const;
  bool WasIn(const JoinAsked& j) const;
  void Admit(const JoinAsked& j, const Verdict& verdict, Turn& t);
  void OpenAttempt(const JoinAsked& j, Turn& t);
  void RetryJoins(Turn& t);
  Failure SupersededFailure(Attempt attempt) const;
  std::optional<Rank> RankLostFor(CheckpointId id) const;
  bool IsCurrent(Attempt attempt, RequestToken token, Turn& t);
  void Decide(CheckpointId parent, uint64_t restore_point_change, Turn& t);
  void ComputeLine();

  // coordinator_saves.cc
  void On(const SaveAsked& m, Turn& t);
  void On(const RoomAsked& m, Turn& t);
  void On(const SpareAsked& m, Turn& t);
  void On(const SaveLost& m, Turn& t);
  void On(const ShardSealed& m, Turn& t);
  void On(const ShardBad& m, Turn& t);
  void On(const ShardGood& m, Turn& t);
  void On(const AwaitAsked& m, Turn& t);
  void AddShard(CheckpointId id, const ShardSealed& m, Turn& t);
  void Commit(CheckpointId id, Checkpoint& checkpoint, Turn& t);
  void Abandon(CheckpointId id, const std::string& why, Turn& t);
  void AbandonWithout(Rank rank, std::optional<Step> below, const std::string& why, Turn& t);
  void LetGo(CheckpointId id, Failure failure, Turn& t);
  void Retire(CheckpointId id, Failure failure, Turn& t);
  void Retain(Turn& t);
  void AnswerAwaits(Step step, Turn& t);
  bool AnswerAwait(RequestToken token, const AwaitWaiter& waiter, Turn& t);
  std::vector<ShedChoice> Choices(const std::vector<CheckpointId>* useful) const;
  bool Held(CheckpointId id) const;
  std::string ShedReason(const Victim& victim, const RoomAsked& m) const;

  // coordinator_session.cc
  void On(const SessionAsked& m, Turn& t);
  void On(const LoadReported& m, Turn& t);
  void EnterDecided(const SessionAsked& m, Turn& t);
  void ReportDecided(const LoadReported& m, Turn& t);
  void BeginSession(Turn& t);
  std::optional<Failure> ChooseCandidates(std::vector<CheckpointId>& candidates) const;
  void Doubt(const LoadReported& m, CheckpointId checkpoint, Turn& t);
  void FallBack(const LoadReported& m, Turn& t);
  void FinishSession(Turn& t);
  void FailSession(const Failure& failure, Turn& t, RequestToken asker = 0);
  void DropFromSession(Rank rank, ProcessId process);
  bool SessionOpen() const { return session_ != nullptr; }
  std::vector<CheckpointSummary> Summaries() const;
  std::vector<CheckpointId> CommittedOnLine() const;
  std::string CommittedText() const;
  std::string DoubtedText() const;
  Failure Unreadable() const;
  bool EverCommitted() const;

  const CoordinatorSettings settings_;
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
  uint64_t version_ = 0;                // intended
  uint64_t needed_version_ = 0;  // somebody waits for this one; what is above it is written lazily
  uint64_t durable_version_ = 0;
  uint64_t in_flight_version_ = 0;          // 0: no write under way
  std::optional<MonotonicTime> write_due_;  // a lazy write, or the repetition of a failed one
  std::string write_problem_;
  std::deque<DurableWait> durable_waits_;
  bool removed_ = false;  // nothing is written any more

  // Of the current (newest) attempt.
  std::map<Rank, Member> members_;  // durable, but for their connections
  std::map<Rank, Step> last_begun_;
  bool any_save_ = false;
  std::map<Step, Fate> fates_;
  std::map<RequestToken, AwaitWaiter> awaits_;
  std::unique_ptr<Session> session_;
  uint64_t next_session_ = 1;
  uint64_t last_session_ = 0;            // the last one that failed or was decided
  std::optional<Failure> last_failure_;  // absent: it was decided
  // What the last decision may still need if it turns out not to be durable.
  std::vector<CheckpointId> held_until_durable_;
  uint64_t decision_version_ = 0;  // the state that first said it

  std::vector<Descent> line_;  // of the newest decided attempt
  std::map<CheckpointId, Checkpoint> checkpoints_;
  std::deque<PendingJoin> joins_;
  std::deque<Loss> losses_;  // newest first; not what was merely retired
  std::deque<Past> events_;
};

}  // namespace holdfast
