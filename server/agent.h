// The agent knows the node: connections, processes, slots, read holds. It alone says who may touch
// a slot (docs/protocol.md §3). What a step is worth, and what is given up, the job's coordinator
// says.
//
//   agent.Handle(event, time);             // events of clients, processes and slots
//   agent.Take(job, message, time);        // what a coordinator said
//   agent.actions(), agent.messages()      // what came of it, in order; the caller empties both
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
#include <utility>
#include <variant>
#include <vector>

#include "holdfast/v1/config.pb.h"
#include "recovery/eviction.h"
#include "server/coordinator.h"
#include "server/drive_copies.h"
#include "server/durable_room.h"
#include "server/ended_jobs.h"
#include "server/known_job.h"
#include "server/messages.h"
#include "server/problems.h"
#include "server/seats.h"

namespace holdfast {

inline constexpr size_t kJobsMax = 4096;        // per node
inline constexpr size_t kJobsPerUidMax = 1024;  // so that one user cannot shut the others out
// Ranks on this node, of jobs that live or linger: of all, of one user, of one process. One user or
// process cannot shut the others out.
inline constexpr size_t kSeatsMax = 65'536;
inline constexpr size_t kSeatsPerUidMax = 16'384;
inline constexpr size_t kSeatsPerProcessMax = 1024;
inline constexpr size_t kReadersPerSlotMax = 256;  // a slot's note stays small
// Shards of other nodes that processes of this one read in parts: each costs a thread, and memory.
inline constexpr size_t kPartsMax = 128;
inline constexpr size_t kPartsPerReaderMax = 4;
inline constexpr size_t kPartsPerUserMax = 96;
inline constexpr size_t kPartRunsMax = 1024;  // of one request
// A little longer than it takes to find that some cannot be had.
inline constexpr Duration kRecordsLongest = std::chrono::seconds(70);
inline constexpr size_t kLaunchBytesMax = 256;
inline constexpr size_t kLabelBytesMax = 256;
// Of a client's text that is kept: why it could not load, why it gave a save up.
inline constexpr size_t kProblemBytesMax = 512;
inline constexpr size_t kWhyBytesMax = 128;
// How long a request that may not wait for others waits for the daemon itself: a note, a record, a
// state to be written.
inline constexpr Duration kSettle = std::chrono::seconds(10);
inline constexpr uint32_t kSlotFailuresMax = 2;  // in a row; then it is not filled again
inline constexpr Duration kEndingLook =
    std::chrono::milliseconds(100);  // whether what was cancelled has ended
inline constexpr Duration kDeleteRetry = std::chrono::seconds(10);
inline constexpr Duration kRoomLook = std::chrono::seconds(5);  // time alone may have made room
inline constexpr Duration kRescan =
    std::chrono::seconds(10);                     // of what could not be read, or is away
inline constexpr size_t kUnknownFilesMax = 1024;  // shown
inline constexpr size_t kLookupsMax = 4096;       // joins that wait for a tier
inline constexpr size_t kDriveScansMax = 64;      // whose beginning is remembered
inline constexpr size_t kLeftMax = 64;            // copies of ranks that went, named at a time
inline constexpr size_t kPrefetchesAtOnce = 4;    // fetches under way ahead of restores, on a node
inline constexpr size_t kLoadsAtOnce = 4;         // from drives here, for other nodes
inline constexpr size_t kReplicasAtOnce = 4;      // that are being read from other nodes
inline constexpr size_t kCancelledJoinsMax = 4096;  // that a host may have admitted
inline constexpr size_t kFlushedMax = 4096;         // ends of flushes that are remembered
// How long the ranks of a job that is told to end stand still until the last step is known; longer
// than its host asks for (StopAgreement::kRoundMax).
inline constexpr Duration kStandMax = std::chrono::seconds(2);
// When it did not come about, for lack of a host: until it is tried again.
inline constexpr Duration kStopAgain = std::chrono::seconds(10);
// How long a request that has expired waits for its host, which knows better what was missing.
inline constexpr Duration kHostGrace = std::chrono::milliseconds(50);
// How long who does not wait is kept waiting for the host's answer.
inline constexpr Duration kHostAtOnce = std::chrono::milliseconds(50);

// A rebuild of what the daemon knows (ckptctl rebuild) that is under way.
struct RebuildRun {
  AdminToken token = 0;
  MonotonicTime since{};
  std::set<std::string> drives;  // that have not answered
  DrainId nvme_scan = 0;         // theirs
  bool nvme_read = false;        // they were asked, and those that answered could be read
  DrainId remote = 0;            // 0: answered, or not asked
  bool remote_asked = false;
  bool remote_read = false;  // it answered, and could be read
  bool told = false;         // the coordinators have been; answered when they have heard it
  // Told when all have answered: of a step whose shards lie in several places nothing is judged by
  // those that answer first.
  std::map<JobUuid, CopiesFound> nvme;
  std::map<JobUuid, CopiesFound> in_remote;
  std::map<std::string, std::string> hidden_in_remote;
  std::set<JobUuid> asked_anew;  // whose remote copies were forgotten since: their own scan tells
  // What was written and removed in durable tiers meanwhile: those that read them may have missed
  // it.
  std::vector<std::variant<IndexShard, UnindexCopies>> changes;
  v1::RebuildReply reply;
};

class Agent {
 public:
  Agent(const v1::DaemonConfig& config, std::string node_name, uint64_t seed, uint32_t daemon_uid);

  void Start(const Started& event, EventTime time);
  void Handle(const Event& event, EventTime time);
  void Take(const JobUuid& job, const ToAgent& message, EventTime time);
  void Take(const JobUuid& job, const std::vector<ForAgent>& messages, EventTime time);
  void Expire(EventTime time);
  // Gives slots that came free to whoever waits for them.
  void Settle(EventTime time);

  // In a cluster (agent_cluster.cc; docs/protocol.md §16). The caller empties the notices.
  std::deque<AgentNotice>& notices() { return notices_; }
  NodeNames& nodes() { return nodes_; }
  // Who knows why the host of a job is not heard (Router::WhyNotHeard).
  void AskWhyNotHeard(std::function<std::string(const std::string& name)> ask) {
    why_not_heard_ = std::move(ask);
  }
  // This node hosts the name from now on. With a state the job's coordinator is made of it, at
  // once. Without one what this node and the remote tier know is looked up; if that is nothing,
  // there is none until somebody wants it.
  // False: it cannot be, and the problem was noted.
  bool BeginHosting(const std::string& name, const v1::JobState* state, EventTime time);
  // Whether a coordinator could be made of it.
  absl::Status CheckState(const std::string& name, const v1::JobState& state) const;
  // Its coordinator is dropped. What clients asked stays unanswered: the next host answers.
  void EndHosting(const std::string& name);
  // On the host: a client of another node wants to join it, or those of this one that WhoJoins
  // tells of.
  void Want(const std::string& name, const JobWanter& wanter, EventTime time);
  void WantHere(const std::string& name, EventTime time);
  // Its host says that there is no such job, or no node and no tier knows it: readers hear so.
  void SayAbsent(const std::string& name, EventTime time);
  // → NodeArrived with all that lies and runs here, what lies in nvme, then what waited for it.
  void Meet(const MeetJob& job, EventTime time);
  // Of jobs that were removed (agent_removal.cc). At the host: the other nodes have let go, or not
  // yet; and the jobs that had the name. Elsewhere: all that is here goes → JobGoing for each.
  void OthersLetGo(const JobUuid& job, uint64_t bytes, EventTime time);
  void OthersAreLate(const JobUuid& job, const absl::Status& why, EventTime time);
  std::vector<JobUuid> RemovedBefore(const std::string& name) const;
  // What any node says to a coordinator that is here.
  void Overhear(const JobUuid& job, const ToCoordinator& message, EventTime time);
  void LetGo(const std::string& name, const std::vector<JobUuid>& jobs, EventTime time);
  // What this node keeps of the job; if that is copies only, what they tell: version 0.
  std::optional<v1::JobState> KeptState(const std::string& name) const;
  // Written if it is newer than what is kept, by (epoch, version), or of the same and a higher
  // epoch was noted.
  void KeepState(const v1::JobState& state, EventTime time);

  // Whether it is hosted here, has been looked for, and is not there.
  bool IsAbsent(const std::string& name) const;
  // Clients that wait until its host is met: those that join, or those that read.
  bool AnyWaitsForHost(const std::string& name, bool joins) const;
  // Of the joins that wait for it the one that does so longest.
  std::optional<JobWanter> WhoJoins(const std::string& name) const;
  std::string JobName(const JobUuid& job) const;  // empty: it is not known here
  bool Waits(RequestToken token) const { return pending_.count(token) > 0; }
  uint64_t RanksHere(const JobUuid& job) const;
  // Whether the caller may see and change the job of that name, if it is known here.
  bool MayTouch(const std::string& name, const Caller& caller) const;
  uint32_t SavesBeingWritten() const;  // shards that processes here are writing now
  std::optional<uint32_t> OwnerOf(const std::string& name) const;  // the uid, if it is known here
  v1::DaemonStatus DescribeDaemon(const Caller& caller, EventTime time) const;
  CoordinatorSettings Settings();                 // of coordinators, as the configuration now is
  Coordinator* Hosted(const JobUuid& job) const;  // null: it is not hosted here

  Jobs& jobs() { return jobs_; }
  const Jobs& jobs() const { return jobs_; }
  std::deque<Action>& actions() { return actions_; }
  std::deque<std::pair<JobUuid, ToCoordinator>>& messages() { return messages_; }
  std::optional<MonotonicTime> NextDeadline() const;
  std::string CheckInvariants() const;

 private:
  enum class SlotState {
    kCreating,
    kPopulating,
    kFree,
    kNoting,
    kHanding,
    kWriting,
    kPublishing,
    kFetching,
    kSealed,
    kUnpublishing,
    kQuarantined,
    kDeleting
  };

  // A reader's descriptors wait for the note that names it.
  struct ReadWait {
    uint64_t note_version = 0;
    RequestToken token = 0;
    ReadHold hold;
    v1::DaemonFrame frame;
  };
  struct Slot {
    SlotId id = 0;
    uint64_t bytes = 0;
    SlotState state = SlotState::kCreating;
    bool populate = false;  // made by Reserve: its pages are wanted before the first save
    bool populated = false;
    bool bad = false;       // not to be filled again: its file misbehaves
    uint32_t failures = 0;  // fillings in a row that its files would not take
    bool foreign = false;   // found at start with a copy that is nobody's: left alone
    // Whose it is. Unowned: found at start, nobody has claimed it.
    bool owned = false;
    JobUuid job;
    Rank rank = 0;
    uint32_t uid = 0;
    // Who may have it mapped for writing, and the connection over which the descriptor went last.
    std::optional<ProcessId> writer;
    ConnectionId mapped_on = 0;
    Generation generation = 0;
    // The filling: from kNoting to kSealed.
    ShardId shard;
    uint32_t world_size = 0;
    ConnectionId filled_by = 0;
    RequestToken token = 0;       // the BeginSave or Seal that waits for this slot
    std::optional<Failure> lost;  // the filling will never be sealed, and why
    std::vector<Descent> descent;
    SealedCopy copy;        // kSealed
    uint64_t beside = 0;    // kSealed: bytes beyond the slot that it takes (BesideSlot)
    bool removing = false;  // kUnpublishing: the record is on its way out
    std::set<ReadHold> readers;
    std::set<AdminToken> admin_readers;
    std::set<DrainId> drains;  // flushes that read it
    bool fetch = false;        // kNoting, kFetching: it is filled from another tier
    bool ahead = false;        // kCreating: made for a prefetch
    // Filled ahead of a restore from memory that nobody is entitled to: no rank's, and deleted as
    // soon as it is empty.
    bool extra = false;
    // Of the memory that this node lends: it holds what is kept for other nodes, or is to (extra,
    // too; kept when it is empty, for the next ones).
    bool lent = false;
    bool loaded = false;  // lent, for those who read it now alone: goes when the last one has
    std::vector<ReadWait> read_waits;
    // ReleaseReads that are answered when a note of that version no longer names the reader.
    std::vector<std::pair<uint64_t, RequestToken>> release_waits;
    uint64_t note_version = 0;
    uint64_t grant_note = 0;  // kNoting: the note that names the writer
  };
  struct Connection {
    Caller caller;
    SeatId seat = 0;
    std::set<RequestToken> pending;
  };
  struct Process {
    uint32_t references = 0;  // connections, seats, slots it writes, holds
  };
  // What is short: the rank's slots, the user's memory, the node's.
  enum class Limit { kNone, kRank, kUser, kBudget };
  enum class Where {
    kCoordinator,
    kLookup,
    kRoom,
    kAsking,
    kSlot,
    kFetch,
    kSource,
    kReserve,
    kHanding,
    kOpening,   // a reader: for its copy in a durable tier, or on another node
    kParts,     // for parts of what another node has
    kRecords,   // for those of a step to be gathered
    kStanding,  // a rank: for the last step to be agreed on
    kHost       // for the node that hosts the job to be heard of
  };
  // A reader's request for a shard, from whatever tier.
  struct Attaching {
    Attaching(const v1::Attach& request, MonotonicTime at_most);
    CheckpointId checkpoint;  // as its coordinator says
    Rank rank = 0;
    MonotonicTime until{};
    std::set<TierKind> without;               // that the reader does not want
    std::map<TierKind, absl::Status> failed;  // that were tried
    DrainId opening = 0;
  };
  // A shard of another node that a reader gets in parts.
  struct Parts {
    ConnectionId connection = 0;
    uint64_t hold = 0;         // as the reader calls it; 0: it waits for this one no more
    bool open = false;         // the reader has heard of it
    uint64_t bytes = 0;        // of the memory that they go into
    RequestToken reading = 0;  // 0: nothing is under way
  };
  struct Pending {
    ConnectionId connection = 0;
    uint64_t frame_id = 0;
    v1::ClientFrame::RequestCase kind = v1::ClientFrame::REQUEST_NOT_SET;
    Where where = Where::kCoordinator;
    std::optional<MonotonicTime> deadline;
    JobUuid job;
    SeatId seat = 0;
    uint64_t hold = 0;  // reads: what the client calls it
    // Saves and reserves.
    Step step = 0;               // also of a rank that stands
    std::optional<Step> passed;  // joins: that the rank had gone on beyond before
    uint64_t bytes = 0;
    uint32_t slots = 0;
    uint32_t ready = 0;
    bool expired = false;
    bool at_once = false;  // asks for what is known now
    bool overdue = false;  // it expired, and its host on another node was told
    bool may_wait = false;
    std::vector<Descent> descent;
    bool no_create = false;  // making a slot failed; again when memory came back
    std::string create_problem;
    std::set<EvictionAsk> asked;         // jobs that had nothing to give up
    EvictionAsk asking;                  // kAsking: which one is asked
    Limit limit = Limit::kNone;          // what it was short of when it last asked for room
    std::optional<SourceOffered> fetch;  // the source that is to be brought into memory for it
    TierKind source_tier = TierKind::kMemory;  // where the source that it gets lay
    std::string source_why;
    std::optional<Attaching> attach;
    // What was asked, where it is judged anew later: kLookup, kHost, and readers.
    std::shared_ptr<const v1::ClientFrame> request;
  };
  // One operation of a durable tier that is under way.
  struct DrainOp {
    enum class Kind {
      kFlush,
      kFetch,
      kManifest,
      kRemove,
      kRemoveJob,
      kScan,
      kOpen
    } kind = Kind::kFlush;
    JobUuid job;
    CheckpointId checkpoint;
    Rank rank = 0;
    TierKind tier = TierKind::kNvme;    // where it writes, or what it reads for a fetch
    TierKind from = TierKind::kMemory;  // flushes
    std::optional<SlotId> slot;         // that it reads or fills
    std::optional<SlotId> replaces;     // a fetch: whose record it removes when it is done
    uint64_t bytes = 0;
    std::string stalled;
    bool replace = false;       // flushes: in the place of a bad copy
    bool source_hangs = false;  // flushes: cancelled because it hung where it reads from
    std::string job_name;       // scans
    RequestToken reader = 0;    // kOpen: who waits for it
    bool in_parts = false;      // kOpen: the reader gets it in parts
    MonotonicTime begun{};
  };
  // A slot that is being filled from another tier, and who waits for that.
  struct Fetch {
    DrainId drain = 0;  // 0: its note is being written
    SlotId slot = 0;
    TierKind from = TierKind::kNvme;
    std::set<RequestToken> waiting;
    std::vector<std::string> peers{};     // from kPeer
    std::vector<RemoteReader> readers{};  // from kRemote
  };
  // A shard that is to be brought into memory ahead of a restore.
  struct Prefetch {
    uint64_t turn = 0;  // when it was asked for
    TierKind from = TierKind::kNvme;
    uint64_t bytes = 0;
    uint32_t world_size = 0;
    MonotonicTime until{};
    std::optional<SlotId> slot = std::nullopt;  // that is made or filled for it
    std::string peer{};                         // from kPeer
  };
  // A shard that is to be kept here for another node, and is not here yet.
  struct Replica {
    uint64_t turn = 0;  // when it was asked for
    TierKind from = TierKind::kMemory;
    std::string peer;  // which has it
    uint64_t bytes = 0;
    uint32_t world_size = 0;
    std::optional<SlotId> slot = std::nullopt;  // that is made or filled for it
  };
  // A shard on a drive here that other nodes want to read: on its way into a lent slot, for as long
  // as they read it.
  struct Load {
    uint64_t turn = 0;  // when it was asked for
    std::vector<AdminToken> waiting;
    uint64_t bytes = 0;
    uint32_t world_size = 0;
    MonotonicTime until{};
    std::optional<SlotId> slot = std::nullopt;  // that is made or filled for it
  };
  // Joins of a job that is not known here: whether a durable tier knows it.
  struct Lookup {
    DrainId scan = 0;  // 0: the remote tier has answered, or there is none
    std::vector<RequestToken> waiting;
    std::string failure;
  };
  struct Drive {
    bool answered = false;
    bool was_read = false;  // by this daemon, at some time: what is not known of now is not there
    std::string problem;
    std::map<std::string, std::string> hidden;  // TierScanned, of the last scan
    DrainId first_scan = 0;                     // what older ones tell is past
    DrainId first_flush = 0;                    // older ones wrote below the directory that went
  };
  struct Removal {
    AdminToken token = 0;
    uint64_t bytes = 0;
    bool state_removed = false;
    std::set<TierKind> tiers_left;  // whose removals have not begun
    absl::Status failure;
    // In a cluster.
    bool for_host = false;                    // another node is its host, and waits
    bool waits = false;                       // for the other nodes, which come first
    bool agreed = false;                      // they have been told
    std::optional<MonotonicTime> again;       // it failed
    std::optional<MonotonicTime> busy_until;  // by then what was on its way there has ended
    std::vector<std::string> away;            // nodes that were
    bool holds_told = false;                  // that processes have its memory mapped
  };
  // A job's name that this node hosts.
  struct Hosting {
    DrainId first_scan = 0;        // what older ones tell is past
    bool looked_up = false;        // no tier knows it
    std::string unread;            // why that cannot be told now
    JobWanters wanted;             // on other nodes
    std::vector<JobUuid> removed;  // had the name before, while no job has it; the newest first
    uint64_t version = 0;          // of the state that says so: what follows it is newer
  };
  // Requests that wait for a job's host.
  struct HostWait {
    std::vector<RequestToken> waiting;
  };
  // A job of whose ranks one was told to end.
  struct Stop {
    Attempt attempt = 0;
    std::optional<Rank> told;    // which; none: on other nodes
    MonotonicTime by{};          // its processes are killed then
    std::optional<Step> last;    // once it is agreed on
    MonotonicTime held_until{};  // its ranks stand still until then, or `last` is known
    MonotonicTime again_at{};    // the host is not asked again before
  };
  struct AdminWait {
    AdminToken token = 0;
    std::optional<MonotonicTime> deadline;
    JobUuid job;
  };
  struct Allocation {
    Slot* slot = nullptr;  // take this one
    bool coming = false;   // one is on its way
    Limit limit = Limit::kNone;
  };

  // agent.cc: connections, processes, requests
  void OnConnectionOpened(const ConnectionOpened& e);
  void OnConnectionClosed(ConnectionId id);
  void OnProcessEnded(ProcessId process);
  void OnRequest(const ClientRequest& e);
  void Dispatch(ConnectionId id, Connection& connection, const v1::ClientFrame& frame);
  RequestToken NewPending(ConnectionId connection, const v1::ClientFrame& frame,
                          std::optional<MonotonicTime> deadline);
  void SetDeadline(RequestToken token, std::optional<MonotonicTime> deadline);
  Pending* FindPending(RequestToken token);
  void ErasePending(RequestToken token);
  void TakeCancelled(const JoinAccepted& m);
  void NoteCancelled(RequestToken token, const Pending& pending, const Caller& caller);
  void ExpireRequest(RequestToken token);
  void Reply(RequestToken token, v1::DaemonFrame frame,
             Descriptors descriptors = Descriptors::kNone, const Slot* slot = nullptr);
  void Refuse(RequestToken token, const Failure& failure);
  void RefuseNow(ConnectionId connection, uint64_t frame_id, const Failure& failure);
  void ReplyDone(ConnectionId connection, const v1::ClientFrame& frame);
  void Send(const JobUuid& job, ToCoordinator message) {
    messages_.emplace_back(job, std::move(message));
  }
  void Act(Action action) { actions_.push_back(std::move(action)); }
  void Tell(Report::Kind kind, const JobUuid& job, std::string text, uint64_t bytes = 0);
  void Ref(ProcessId process);
  void Unref(ProcessId process);
  MonotonicTime Deadline(uint64_t deadline_ms) const;
  const Seat* FindSeat(SeatId id) const { return seats_.Find(id); }
  SeatId SeatRank(const Seat& seat);
  enum class SeatEnd { kLeft, kProcessEnded, kJoinedAgain };
  void EraseSeat(SeatId id, SeatEnd how);
  KnownJob* FindJob(const std::string& name);
  bool AnyRankAlive(const KnownJob& job) const;
  bool IsMember(const JobUuid& job, Rank rank, const ProcessId& process) const;
  KnownJob& AddJob(const JobUuid& uuid, const std::string& name, uint32_t uid, uint32_t gid);
  Coordinator& MakeCoordinator(KnownJob& job);

  // agent_jobs.cc: joining, leaving, what coordinators say
  // `until`: it has waited, for its host or for the tiers, and does so no longer than this.
  void OnJoin(ConnectionId id, Connection& connection, const v1::ClientFrame& frame,
              std::optional<MonotonicTime> until = std::nullopt);
  void OnLeave(ConnectionId id, Connection& connection, const v1::ClientFrame& frame);
  void AddProblem(std::string problem);
  bool MayOpenJob(uint32_t uid) const;
  size_t JobsOf(uint32_t uid) const;
  bool ForgetAJob(uint32_t uid);
  absl::Status MaySit(const Caller& caller) const;
  KnownJob& OpenJob(const std::string& name, uint32_t uid, uint32_t gid);
  void StartJobs(const Started& event);
  void StartSlots(const Started& event);
  KnownJob* AdoptJob(const SealedCopy& copy);
  JobUuid NewUuid();
  uint64_t NewOpening();
  void TakeMessage(const JobUuid& job, const Refused& m);
  void TakeMessage(const JobUuid& job, const JoinAccepted& m);
  void TakeMessage(const JobUuid& job, const SavePermitted& m);
  void TakeMessage(const JobUuid& job, const RoomAnswered& m);
  void TakeMessage(const JobUuid& job, const StageReached& m);
  void TakeMessage(const JobUuid& job, const SourceOffered& m);
  void TakeMessage(const JobUuid& job, const StepOffered& m);
  void TakeMessage(const JobUuid& job, const SessionEnded& m);
  void TakeMessage(const JobUuid& job, const GiveUp& m);
  void GiveUpSlots(const JobUuid& job, const GiveUp& m, bool replicas_too);
  void TakeMessage(const JobUuid& job, const Superseded& m);
  void TakeMessage(const JobUuid& job, const CopyUnneeded& m);
  void TakeMessage(const JobUuid& job, const CopyDoubted& m);
  void TakeMessage(const JobUuid& job, const PersistState& m);
  void TakeMessage(const JobUuid& job, const RestorePointSet& m);
  void TakeMessage(const JobUuid& job, const Reported& m);

  // agent_saves.cc: a filling from BeginSave to Seal
  void OnBeginSave(ConnectionId id, const Seat& seat, SeatId seat_id, const v1::ClientFrame& frame);
  void OnSeal(ConnectionId id, const Seat& seat, const v1::ClientFrame& frame);
  void OnAbortSave(ConnectionId id, const Seat& seat, const v1::ClientFrame& frame);
  void OnRecordPublished(const RecordPublished& e);
  void TakePermission(RequestToken token, std::vector<Descent> line);
  void StartFilling(Slot& slot, RequestToken token);
  void GrantFilling(Slot& slot, const absl::Status& noted);
  void LoseFilling(Slot& slot, const std::string& why);
  void CountFailure(Slot& slot, const absl::Status& status);
  void RefuseSave(RequestToken token, const Failure& failure);
  Slot* FindFilling(const Seat& seat, SlotId slot, Generation generation, Step step);

  // agent_stops.cc: the last step of a job that is told to end
  void OnReachStep(ConnectionId id, const Seat& seat, SeatId seat_id, const v1::ClientFrame& frame);
  void NotePassed(const Seat& seat, SeatId seat_id, Step passed);
  void TellBeyond(const Seat& seat, Step passed, Step last);
  void AnswerReached(RequestToken token);
  uint32_t LeftMs(const Stop& stop) const;
  Stop& StopOf(const JobUuid& job, Attempt attempt);  // of a newer attempt, if there is one
  void NoteStop(const Seat& seat, uint64_t grace_ms);
  void TellStop(const JobUuid& job, const Stop& stop);
  void TellStopAnew(const JobUuid& job);
  void TakeMessage(const JobUuid& job, const HoldSteps& m);
  void TakeMessage(const JobUuid& job, const LastStepChosen& m);
  std::vector<RequestToken> StandingOf(const JobUuid& job) const;
  void EndStopBelow(const JobUuid& job, Attempt attempt, const Failure& failure);

  // agent_reserve.cc: slots ahead of the first save
  void OnReserve(ConnectionId id, const Seat& seat, SeatId seat_id, const v1::ClientFrame& frame);
  void PlaceReserve(RequestToken token);
  void HandOver(RequestToken token, uint32_t ready);
  void AnswerReserve(RequestToken token, const Slot* handed);
  void FinishHanding(Slot& slot, const absl::Status& noted);

  // agent_slots.cc: the life of a slot
  void OnSlotCreated(const SlotCreated& e);
  void OnSlotPopulated(const SlotPopulated& e);
  void OnNoteWritten(const NoteWritten& e);
  void OnRecordRemoved(const RecordRemoved& e);
  void OnSlotDeleted(const SlotDeleted& e);
  void OnReleaseSlots(ConnectionId id, const Caller& caller, const v1::ClientFrame& frame);
  Slot& CreateSlotFor(const Seat& seat, uint64_t bytes, bool populate, RequestToken token);
  void NoteSlot(Slot& slot);
  void SetWriter(Slot& slot, std::optional<ProcessId> writer);
  void Unpublish(Slot& slot);
  void BecomeFree(Slot& slot);
  void Quarantine(Slot& slot, const std::string& why);
  void LeaveQuarantine(Slot& slot);
  void Delete(Slot& slot);
  static uint64_t BesideSlot(const Slot& slot, uint64_t record_bytes);
  void HasCopy(Slot& slot, const SealedCopy& copy, uint64_t record_bytes);
  void ReleaseWriter(Slot& slot, const std::string& why);
  void Reclaim(const Seat& seat);
  void ForgetShard(Slot& slot);
  Slot* FindSlot(SlotId id);
  static bool Filling(SlotState state);

  // agent_room.cc: which slot a save gets
  void Place(RequestToken token);
  Allocation Allocate(const Seat& seat, const Pending& pending, RequestToken token);
  bool Fits(const Slot& slot, uint64_t bytes) const;
  bool Stuck(const Slot& slot, const Seat& seat) const;
  bool MineFree(const Slot& slot, const Seat& seat) const;
  bool MayMap(const Seat& seat, uint64_t bytes) const;
  bool Dispensable(const Slot& slot, const Seat& seat, uint64_t bytes) const;
  bool Adoptable(const Slot& slot, const Seat& seat) const;
  bool Deletable(const Slot& slot) const;
  bool Orphan(const Slot& slot) const;
  bool AnySeatOf(const JobUuid& job, Rank rank) const;  // that is not superseded
  uint32_t CountForRank(const Seat& seat) const;
  bool BudgetHas(const Seat& seat, uint64_t bytes, uint32_t count) const;
  std::map<Rank, uint64_t> SlotsByRank(const JobUuid& job) const;
  bool OthersCanHaveTwo(const Seat& seat, uint64_t bytes, uint64_t bytes_left) const;
  bool MakeSpace(const Seat& seat, uint64_t bytes);
  std::vector<CheckpointId> Useful(const JobUuid& job, const Seat& seat, uint64_t bytes,
                                   Limit limit) const;
  std::vector<RoomAsked::Left> LeftHere(const Seat& seat, uint64_t bytes, Limit limit) const;
  std::vector<EvictionAsk> WhomToAsk(const Pending& pending, const Seat& seat) const;
  std::vector<MemoryJob> JobsInMemory() const;
  bool Ask(const EvictionAsk& ask, RequestToken token, Pending& pending, const Seat& seat);
  bool AskForRoom(RequestToken token, const Seat& seat);
  bool Suffices(const Pending& pending, const Seat& seat,
                const std::function<bool(const Slot&)>& goes) const;
  bool LastCopiesSuffice(const Pending& pending, const Seat& seat) const;
  bool RoomMayCome(const Pending& pending, const Seat& seat) const;
  void PopulateNext(const JobUuid& job, Rank rank);
  Failure NoRoom(const Pending& pending, const Seat& seat) const;
  std::string HoldersHere(const Pending& pending, const Seat& seat) const;
  std::map<JobUuid, uint64_t> BytesByJob() const;
  uint64_t BytesOf(uint32_t uid) const;
  uint64_t UserBytesMax() const;
  std::string UserBytesMaxText() const;
  bool MemoryHas(uint32_t uid, uint64_t bytes) const;

  // agent_attach.cc: readers that take no part in an attempt
  struct SourceChoice {
    std::optional<TierKind> tier;  // none: there is none left
    bool last = true;              // there is no other one after it
    std::string why;               // what became of the nearer ones; none left: of all
  };
  void OnAttach(ConnectionId id, const v1::ClientFrame& frame);
  void StartAttach(ConnectionId id, const v1::ClientFrame& frame, MonotonicTime until,
                   bool looked_up);
  const KnownJob* FindReadable(ConnectionId id, const v1::ClientFrame& frame,
                               const std::string& name, MonotonicTime until, bool looked_up);
  void GoOnReading(RequestToken token);
  void TakeMessage(const JobUuid& job, const ShardLocated& m);
  void TakeMessage(const JobUuid& job, const Listed& m);
  void OfferFromMemory(RequestToken token, const ShardLocated& m);
  SourceChoice ChooseSource(const ShardLocated& m, Attaching& attach);
  Failure NoSource(const ShardLocated& m, const Attaching& attach, const std::string& why) const;
  void AttachFailed(RequestToken token, TierKind tier, absl::Status status);
  void OnDurableOpened(const DurableOpened& e);
  void BeginOpening(RequestToken token, OpenDurable open);
  void OpenInParts(RequestToken token, TierKind tier, const SealedCopy& copy);
  // agent_invariants.cc
  std::string CheckParts() const;
  std::string CheckGatherings() const;

  // agent_parts.cc
  absl::Status MayOpenParts(const Pending& pending);
  std::map<DrainId, Parts>::iterator FindParts(ConnectionId connection, uint64_t hold);
  void OnReadParts(ConnectionId id, const v1::ClientFrame& frame);
  static absl::StatusOr<std::vector<PartRun>> RunsOf(const v1::ReadParts& read, uint64_t memory);
  void OnPartsRead(const PartsRead& e);
  void GiveUpParts(RequestToken token);
  bool ReleaseParts(ConnectionId id, uint64_t hold);
  void EndPartsOf(ConnectionId id);
  void EndParts(DrainId opened);
  // agent_records.cc
  void OnReadRecords(ConnectionId id, const v1::ClientFrame& frame);
  void TakeMessage(const JobUuid& job, const RecordsLocated& m);
  void OnRecordsGathered(const RecordsGathered& e);
  void GiveUpRecords(RequestToken token);
  void GiveUpOpening(RequestToken token, const std::string& why);
  void OnList(ConnectionId id, const v1::ClientFrame& frame);
  void StartList(ConnectionId id, const v1::ClientFrame& frame, MonotonicTime until,
                 bool looked_up);

  // agent_reads.cc: sources and holds
  void OnConfirmRead(ConnectionId id, const Caller& caller, const v1::ClientFrame& frame);
  void OnReleaseRead(ConnectionId id, const Caller& caller, const v1::ClientFrame& frame);
  void OnEnterSession(ConnectionId id, const Seat& seat, SeatId seat_id,
                      const v1::ClientFrame& frame);
  void OnReportLoad(ConnectionId id, const Seat& seat, SeatId seat_id,
                    const v1::ClientFrame& frame);
  void OnCopyFoundBad(const CopyFoundBad& e);
  void OnSlotFileGone(const SlotFileGone& e);
  void OnCopyFoundGood(const CopyFoundGood& e);
  void OnHandOverFailed(const HandOverFailed& e);
  void ReadingFailed(const SendReply& reply, const absl::Status& status);
  Slot* FindSealed(const ShardId& shard);
  void Offer(RequestToken token, Slot& slot, v1::DaemonFrame frame);
  void FinishReleases(Slot& slot, const NoteWritten& e);
  void FinishOffer(Slot& slot, const ReadWait& wait, const absl::Status& noted);
  void DropHold(Slot& slot, ReadHold hold);
  Slot* FindHeld(const ReadHold& hold);
  void AfterHold(Slot& slot);
  void MarkBad(Slot& slot, const std::string& what);

  // agent_drains.cc: flushes, manifests, removals, what the durable tiers hold
  void OnFlushEnded(const FlushEnded& told);
  bool WroteBelowWhatWent(DrainId drain, TierKind tier, const std::string& location) const;
  void OnManifestPublished(const ManifestPublished& e);
  void OnCopiesRemoved(const CopiesRemoved& e);
  void OnDrainStalled(const DrainStalled& e);
  void OnTierScanned(const TierScanned& e);
  void OnTierAway(const TierAway& e);
  void TakeRemoteScan(const TierScanned& e, const DrainOp& op);
  void OnDriveScanned(const TierScanned& e);
  CopiesFound TakeDriveCopies(const FoundJob& found, MonotonicTime began);
  void ChangeIndex(std::variant<IndexShard, UnindexCopies> change);
  void NoteBad(const ShardId& shard, TierKind tier, bool bad);
  bool OnTheWay(DrainOp::Kind kind, const JobUuid& job, CheckpointId checkpoint, TierKind tier,
                std::optional<Rank> rank = std::nullopt) const;
  const DurableCopy* FlushedBefore(const ShardId& shard, TierKind tier, uint64_t bytes) const;
  void NoteFlushed(const DurableCopy& copy);
  void ForgetFlushed(const JobUuid& job, CheckpointId checkpoint);
  void IndexAnew(TierKind tier, const std::map<JobUuid, CopiesFound>& found);
  void OnRemoteScanned(const TierScanned& e);
  void TakeMessage(const JobUuid& job, const FlushWanted& m);
  void TakeMessage(const JobUuid& job, const FlushUnwanted& m);
  void TakeMessage(const JobUuid& job, const ManifestWanted& m);
  void TakeMessage(const JobUuid& job, const RemovalWanted& m);
  void TakeMessage(const JobUuid& job, const AdminAnswered& m);
  bool HasTier(TierKind tier) const;
  uint64_t TierBytesUsed(TierKind tier) const;
  void AskDurableRoom(const JobUuid& job, TierKind tier, uint64_t bytes);
  std::string HoldersIn(TierKind tier, uint32_t uid) const;
  void CheckWatermark(const JobUuid& job);
  DrainId BeginDrain(DrainOp op);
  std::optional<DrainOp> EndDrain(DrainId id);
  void CancelDrainsOf(Slot& slot);
  void TellStalled(const DrainOp& of);
  void ScanDrives(std::vector<std::string> dirs = {});
  MonotonicTime DriveScanBegan(DrainId scan) const;
  KnownJob* AdoptFound(const FoundJob& found, MonotonicTime began);
  void TellAnotherRun(const FoundJob& found, const TierScanned& e, MonotonicTime began);
  std::string HiddenOnDrives(const std::string& job_name) const;
  void TellInventory(const JobUuid& job, TierKind tier);
  void ScanRemoteFor(const std::string& name);
  void LookUp(ConnectionId id, const v1::ClientFrame& frame, MonotonicTime until);
  void AdvanceLookups();
  bool HeldByAnybody(const Slot& slot) const {
    return !slot.readers.empty() || !slot.admin_readers.empty() || !slot.drains.empty();
  }

  // agent_fetch.cc: copies brought into memory for a restore
  void FetchSource(RequestToken token, const SourceOffered& m);
  bool JoinFetch(RequestToken token, const ShardId& id);
  void PlaceFetch(RequestToken token);
  void StartFetch(Slot& slot, RequestToken token);
  void FetchNoted(Slot& slot, const absl::Status& noted);
  void OnFetchEnded(const FetchEnded& e);
  Fetch TakeFetch(Slot& slot);
  void GiveUpFetch(const DrainOp& op, DrainId drain, const std::string& why);
  void OfferSession(RequestToken token, Slot& slot);
  void FailFetch(RequestToken token, TierKind from, const absl::Status& status, bool source_bad);
  void FetchWithoutRoom(RequestToken token, const Seat& seat);
  bool DropWhatItReplaces(const ShardId& shard);

  void FillFrom(Slot& slot, const ShardId& shard, uint32_t uid, uint32_t world_size, TierKind from,
                std::vector<std::string> peers);
  void EndAhead(const ShardId& shard, const absl::Status& status, const std::string& peer = "");

  // agent_replicas.cc: what is kept here for other nodes
  uint64_t LendsBytes() const;
  uint64_t LentBytes() const;
  void TakeReplicas(const JobUuid& job, const FlushWanted& m);
  template <typename Waiting>
  void StartInTurn(const Waiting& waiting, size_t at_once, void (Agent::*place)(const ShardId&));
  void AdvanceReplicas();
  void PlaceReplica(const ShardId& shard);
  Slot* FreeLentSlot(const ShardId& shard, uint32_t uid, uint64_t bytes);
  bool ReplicaSlotMade(Slot& slot);
  bool ReplicaSlotFailed(SlotId id, const absl::Status& status);
  void EndReplica(const ShardId& shard, const absl::Status& status, const std::string& peer);
  void AnswerReplica(const ShardId& shard, TierKind from, absl::Status status,
                     const std::string& peer);
  void StopReplica(const ShardId& shard, const Failure& why);
  uint64_t StopFillingReplicas(uint64_t bytes);
  bool ComesBack(const Slot& slot) const;
  bool ComesInto(const ShardId& shard, const Slot& slot) const;
  void StopReplicas(const JobUuid& job, std::optional<CheckpointId> checkpoint, const Failure& why);
  void RemoveReplicas(const JobUuid& job, const RemovalWanted& m);
  bool TakeFromReplicas(uint64_t bytes, Limit limit);
  void Adopt(Slot& slot);
  static TierKind TierOf(const Slot& slot) {
    return slot.lent ? TierKind::kPeer : TierKind::kMemory;
  }
  google::protobuf::RepeatedPtrField<v1::Label> OwnLabels() const;

  // agent_prefetch.cc: copies brought into memory ahead of a restore
  void TakeMessage(const JobUuid& job, const PrefetchWanted& m);
  void TakeMessage(const JobUuid& job, const PrefetchUnwanted& m);
  void AdvancePrefetches();
  void PlacePrefetch(const ShardId& shard);
  Slot* FreeSlotFor(const ShardId& shard, uint32_t uid, uint64_t bytes);
  uint64_t BytesPromised(uint64_t bytes_at_least) const;
  void StartPrefetch(Slot& slot, const ShardId& shard);
  void PrefetchSlotMade(Slot& slot);
  void PrefetchSlotFailed(SlotId id, const absl::Status& status);
  bool StopPrefetch(const ShardId& shard, const Prefetch& prefetch, const Failure& why);
  void EndPrefetch(const ShardId& shard, const absl::Status& status);
  bool TakeFromPrefetches(const Seat& seat, uint64_t bytes, Limit limit);
  bool HasExtra(const JobUuid& job) const;
  void ExpirePrefetches();

  // agent_tier_admin.cc
  void Admin(const AdminRequest& e, const v1::WhereRequest& request);
  void Admin(const AdminRequest& e, const v1::ExplainRequest& request);
  void Admin(const AdminRequest& e, const v1::TimelineRequest& request);
  void Admin(const AdminRequest& e, const v1::CollectGarbageRequest& request);
  void Admin(const AdminRequest& e, const v1::PinRequest& request);
  void Admin(const AdminRequest& e, const v1::ReplaceRequest& request);
  void Admin(const AdminRequest& e, const v1::DrainRequest& request);
  void Admin(const AdminRequest& e, const v1::RemoveCheckpointRequest& request);
  void Admin(const AdminRequest& e, const v1::RebuildRequest& request);
  void Admin(const AdminRequest& e, const v1::SetOptionsRequest& request);
  void OnSettingsChanged(const SettingsChanged& e);
  void Admin(const AdminRequest& e, const v1::GetNodesRequest& request);
  // agent_copies_admin.cc
  void Admin(const AdminRequest& e, const v1::FindShardRequest& request);
  void Admin(const AdminRequest& e, const v1::PlanVerifyRequest& request);
  template <typename NodeRequest>
  void OfThisNode(const AdminRequest& e, const NodeRequest& request);
  void Admin(const AdminRequest& e, const v1::ReadShardRequest& request);
  void Admin(const AdminRequest& e, const v1::VerifyPartRequest& request);
  void Admin(const AdminRequest& e, const v1::VerifyMoreRequest& request);
  absl::StatusOr<const KnownJob*> FindCopiesOf(const Caller& caller, const std::string& name);
  void ListMemory(const JobUuid& job, std::optional<CheckpointId> only, ListedShards& out) const;
  void ListDurable(const KnownJob& job, TierKind tier, std::optional<CheckpointId> only,
                   ListedShards& out) const;
  void FillTierStatus(v1::DaemonStatus& daemon) const;
  RequestToken AwaitJob(AdminToken token, const JobUuid& job);
  void AdvanceRebuild();
  void AnswerRebuild();

  // agent_cluster.cc: jobs that other nodes host
  bool clustered() const { return config_.has_cluster(); }
  bool Told(const KnownJob& job) const;
  bool Tells(const KnownJob& job, TierKind tier) const;
  absl::Status HostedElsewhere(const std::string& name) const;
  void RefuseReaders(const std::string& name);
  absl::Status CheckLoads(const KnownJob& job, const v1::JobState& state) const;
  KnownJob* KnowJob(const JobUuid& uuid, const std::string& name, uint32_t uid, uint32_t gid);
  void NameSecond(const KnownJob& other, const JobUuid& uuid);
  bool HasAnything(const JobUuid& job) const;
  bool OpenHosted(KnownJob& job, const v1::JobState* state);
  void LookUpHosted(const std::string& name);
  void LookedUp(const std::string& name);
  void EndLookup(const std::string& name, const std::string& failure);
  static const std::string& JobAskedFor(const v1::ClientFrame& frame);
  Failure NotHosted(const v1::ClientFrame& frame) const;
  static Failure NotLookedUp(const std::string& name, const std::string& why);
  std::vector<JobWanter> Joining(const std::string& name) const;
  void OpenWanted(const std::string& name);
  bool TakesRemote(const FoundJob& found);
  void RemoveAgain(const std::string& name, const JobUuid& uuid);
  const SealedCopy* NewestOf(const JobUuid& job, const Caller& caller, Rank rank) const;
  bool ReturnsByItself(const KnownJob& job, const Caller& caller, const v1::Join& join) const;
  void ReturnByItself(const KnownJob& job, ConnectionId id, const v1::ClientFrame& frame);
  void WaitForHost(ConnectionId id, const v1::ClientFrame& frame, MonotonicTime until);
  void GoOnWithHost(const std::string& name);
  void AddSeats(const MeetJob& job, const KnownJob& known);
  void AddSeat(const Seat& seat);
  NodeArrived Arrival(const JobUuid& job) const;
  std::set<Step> WritingOf(SeatId id, const Seat& seat) const;
  void TellDrives(const KnownJob& job);
  bool ForgetElsewhere(std::optional<uint32_t> uid);
  void WriteAgain();

  // agent_admin.cc
  void OnAdminRequest(const AdminRequest& e);
  void OnAdminReadDone(const AdminReadDone& e);
  void Admin(const AdminRequest& e, const v1::GetStatusRequest& request);
  void Admin(const AdminRequest& e, const v1::ListCheckpointsRequest& request);
  void Admin(const AdminRequest& e, const v1::InspectShardRequest& request);
  void Admin(const AdminRequest& e, const v1::VerifyRequest& request);
  void Admin(const AdminRequest& e, const HoldShard& request);
  void Admin(const AdminRequest& e, const ListCopies& request);
  void Admin(const AdminRequest& e, const v1::PlanScrubRequest& request);
  void Admin(const AdminRequest& e, const v1::RepairRequest& request);
  void Admin(const AdminRequest& e, const v1::SetRestorePointRequest& request);
  bool Visible(const Caller& caller, const KnownJob& job) const;
  absl::StatusOr<Coordinator*> FindVisible(const Caller& caller, const std::string& name);
  void RefuseAdmin(AdminToken token, absl::Status status);
  void HandShard(AdminToken token, Slot& slot);

  // agent_loads.cc: what other nodes want to read of the drives here
  void LoadFor(AdminToken token, const ShardId& shard);
  void AdvanceLoads();
  void PlaceLoad(const ShardId& shard);
  bool LoadSlotMade(Slot& slot);
  bool LoadSlotFailed(SlotId id, const absl::Status& status);
  void EndLoad(const ShardId& shard, const absl::Status& status);
  void ExpireLoads();
  bool Awaited(const ShardId& shard, const Fetch& fetch) const;

  // agent_removal.cc: whole jobs that go
  void Admin(const AdminRequest& e, const v1::RemoveJobRequest& request);
  std::set<ProcessId> UsersOf(const JobUuid& job) const;
  absl::Status WhyInUse(const Coordinator& job) const;
  Removal& BeginRemoval(const JobUuid& job, const std::vector<TierKind>& tiers);
  void RemoveJob(const JobUuid& job, AdminToken token);
  void AdvanceRemoval(const JobUuid& job);
  bool AwaitEnding(Removal& removal, TierKind tier);
  void GiveUpAll(const JobUuid& job);
  void StopFetches(const JobUuid& job, const Failure& why);
  void TellOfHolds(const JobUuid& uuid);
  void RemovalFailed(const JobUuid& job, const absl::Status& why);
  void RemovalIsLate(const JobUuid& job, AdminToken token, const absl::Status& why);
  void RetryRemovals();
  void KeepJob(const JobUuid& job);
  void UnindexJob(const JobUuid& job);
  void OnJobStateRemoved(const JobStateRemoved& e);
  void ForgetRemoved(const JobUuid& job, const std::string& name);
  static std::vector<JobUuid> RemovedIn(const v1::JobState& state);
  bool WasRemoved(const std::string& name, const JobUuid& job) const;
  bool FinishRemoval(const std::string& name, const v1::JobState& state);
  void TakeMessage(const JobUuid& job, const RemovalAgreed& m);

  v1::DaemonConfig config_;  // as it is now: SettingsChanged and ckptctl set change it
  std::map<std::string, std::string> limits_set_;  // by ckptctl set: name → value as typed
  NodeNames nodes_;
  const uint32_t daemon_uid_;
  uint64_t random_;
  uint64_t bytes_max_ = 0;
  uint64_t bytes_used_ = 0;
  Problems problems_;
  EventTime time_;  // of the event being handled

  Jobs jobs_;
  std::map<std::string, JobUuid> names_;
  uint64_t first_session_ = 1;
  std::map<ConnectionId, Connection> connections_;
  std::map<ProcessId, Process> processes_;
  SeatTable seats_;
  EndedJobs ended_jobs_;
  std::map<SlotId, Slot> slots_;
  std::set<std::pair<MonotonicTime, SlotId>> deletes_again_;
  std::map<SlotId, Generation> retired_;  // the last generation of ids that may be used again
  std::map<ShardId, SlotId> shards_;      // fillings that are not lost, and sealed copies
  std::map<RequestToken, Pending> pending_;
  // Joins that nobody waits for any more, and that their host may admit before it hears that.
  struct CancelledJoin {
    JobUuid job;
    ProcessId process;
    uint32_t uid = 0;
    ConnectionId connection = 0;
  };
  std::map<RequestToken, CancelledJoin> cancelled_joins_;
  std::set<std::pair<MonotonicTime, RequestToken>> deadlines_;
  RequestToken next_token_ = 1;
  std::set<RequestToken> waiting_for_room_;  // saves and reserves, oldest first
  bool slots_changed_ = false;
  std::map<AdminToken, std::set<SlotId>> admin_reads_;
  std::map<RequestToken, AdminWait> admin_waits_;
  std::map<JobUuid, Stop> stops_;  // of jobs with ranks here
  bool draining_ = false;          // no rank is let in, no replica taken
  std::map<JobUuid, Removal> removals_;
  // In a cluster.
  std::deque<AgentNotice> notices_;
  std::map<std::string, Hosting> hosting_;
  std::map<std::string, HostWait> host_waits_;  // by job name
  std::function<std::string(const std::string&)> why_not_heard_;
  std::set<JobUuid> found_unmet_;  // jobs of which slots were found at start, before a host is met
  std::map<JobUuid, MonotonicTime> states_again_;  // that could not be written
  std::map<ShardId, DurableCopy> flushed_;         // to the remote tier, by this node
  // Durable tiers.
  std::map<DrainId, DrainOp> drains_;
  std::map<DrainId, Parts> parts_;  // by what opened them
  // Records of a step that are being gathered, for all who have asked meanwhile.
  struct Gathering {
    JobUuid job;
    CheckpointId checkpoint;
    uint32_t world_size = 0;
    std::set<RequestToken> waiting;
  };
  std::map<uint64_t, Gathering> gatherings_;
  DrainId next_drain_ = 1;
  uint64_t nvme_bytes_max_ = 0;
  std::string boot_id_;
  std::map<std::string, Drive> drives_;
  DriveCopies drive_copies_;
  DurableRoom durable_room_;
  std::optional<MonotonicTime> drives_again_;  // when those that failed are read again
  std::optional<MonotonicTime> room_again_;    // when who waits for room is looked at again
  MonotonicTime started_{};
  std::map<DrainId, MonotonicTime> drive_scans_;    // when they began: the newest ones
  std::map<JobUuid, MonotonicTime> removed_jobs_;   // a scan that began before may show them
  std::map<JobUuid, std::string> remote_problems_;  // of jobs whose remote copies are not known
  std::set<JobUuid> remote_known_;
  std::map<JobUuid, uint64_t> remote_away_bytes_;   // likewise
  DrainId remote_first_scan_ = 0;                   // likewise
  std::map<std::string, MonotonicTime> rescan_at_;  // by job name
  std::map<std::string, Lookup> lookups_;           // by job name
  std::map<ShardId, Fetch> fetches_;
  std::map<ShardId, Prefetch> prefetches_;
  bool prefetch_due_ = false;  // one of them may go on
  std::map<ShardId, Load> loads_;
  bool loads_due_ = false;  // likewise
  std::map<ShardId, Replica> replicas_;
  uint64_t turns_ = 0;         // given to these three
  bool replicas_due_ = false;  // likewise
  std::set<std::string> unknown_files_;
  std::optional<RebuildRun> rebuild_;
  std::deque<Action> actions_;
  std::deque<std::pair<JobUuid, ToCoordinator>> messages_;
};

}  // namespace holdfast
