// What agent and coordinator say to each other. Every message names the attempt (and step, and
// rank) that it is about, so that a late one is recognised as late; nothing here names a slot, a
// connection or a descriptor.
//
// A RequestToken names one unanswered request of a client. The agent makes them and keeps their
// deadlines; the coordinator answers each once, or is told that it expired or was cancelled.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"
#include "base/ids.h"
#include "base/one_of.h"
#include "holdfast/v1/client.pb.h"
#include "holdfast/v1/state.pb.h"
#include "recovery/replicas.h"
#include "server/events.h"
#include "tiers/image/record.h"

namespace holdfast {

using RequestToken = uint64_t;  // 0: nobody waits

// A prefetch that has not ended by then ends: nobody restores that late. The job's host and each
// node count by themselves.
inline constexpr Duration kPrefetchDeadline = std::chrono::minutes(10);

// Whoever is told to end has no more time than this.
inline constexpr uint32_t kGraceMsMax = 24u * 3600 * 1000;

// The time at which an event is handled.
struct EventTime {
  MonotonicTime now;
  int64_t unix_ms = 0;
};

// Checkpoints of a Listing: a client's frame holds 65,536 bytes, each takes at most some 90.
inline constexpr size_t kListedMax = 256;

inline constexpr size_t kPeersNamedMax = 8;  // to read one shard from

inline constexpr size_t kRemovedBeforeMax = 16;  // removed jobs of one name that are remembered

struct Failure {
  absl::StatusCode code = absl::StatusCode::kUnknown;
  v1::Failure::Reason reason = v1::Failure::REASON_UNSPECIFIED;
  std::string message;
};

// ---- Agent → coordinator of a job ----

struct JoinAsked {
  RequestToken token = 0;
  ConnectionId connection = 0;  // tells two clients of one process apart
  Caller caller;
  Rank rank = 0;
  uint32_t world_size = 0;
  std::string launch;
  Attempt attempt = 0;
  Attempt leave_attempt = 0;
  bool may_wait = false;  // for a rank that is still ending
  v1::Policy policy;
  uint64_t opening = 0;  // random: of this request alone, and the attempt's that it opens
};
// A rank that had been told that it belongs to the attempt.
struct SeatLost {
  enum class How { kDisconnected, kProcessEnded, kLeft };
  Attempt attempt = 0;
  Rank rank = 0;
  ProcessId process;
  ConnectionId connection = 0;
  How how = How::kDisconnected;
};
// Without a token: its node has permitted it, since the attempt is decided. What is refused then is
// given up.
struct SaveAsked {
  RequestToken token = 0;
  Attempt attempt = 0;
  Rank rank = 0;
  Step step = 0;
};
// The agent has no slot for it. `useful`: the checkpoints whose shards here would make room.
struct RoomAsked {
  RequestToken token = 0;
  Attempt attempt = 0;
  Rank rank = 0;
  Step step = 0;
  std::vector<CheckpointId> useful;
  // Copies here that would make room, of ranks that are not here: they ran here before.
  struct Left {
    CheckpointId checkpoint;
    Rank rank = 0;
  };
  std::vector<Left> left{};
  bool spare_only = false;  // what nobody would restore: other jobs are asked before more than that
};
// Another job is short of memory: what this one can give up (recovery/eviction.h).
struct SpareAsked {
  RequestToken token = 0;
  std::string for_job;  // the name of the job that is asked: another user's
  std::vector<CheckpointId> useful;
  uint32_t stage = 0;  // EvictionStage
};
// This rank's shard of the step will never be sealed.
struct SaveLost {
  Attempt attempt = 0;
  Rank rank = 0;
  Step step = 0;
  std::string why;
};
struct ShardSealed {
  Attempt attempt = 0;
  Rank rank = 0;
  Step step = 0;
  uint32_t world_size = 0;
  uint64_t bytes = 0;
  int64_t unix_ms = 0;
  bool time_sure = true;
  Likeness likeness{};
};
struct ShardGood {
  CheckpointId checkpoint;
  Rank rank = 0;
  TierKind tier = TierKind::kMemory;
};
struct ShardBad {
  CheckpointId checkpoint;
  Rank rank = 0;
  std::string what;
  TierKind tier = TierKind::kMemory;
  std::string node{};  // whose copy it is; empty: the sender's
  bool leave = false;  // it is not written anew by itself
};
// What the node knows of a tier. Until it knows it, something newer than what is seen may lie
// there.
struct InventoryState {
  enum class Kind { kNotConfigured, kPending, kKnown, kFailed };
  TierKind tier = TierKind::kNvme;
  Kind kind = Kind::kPending;
  std::string why;  // kFailed
};
// What a scan of a tier that began at `began` found of the job. What the coordinator believed to be
// there before `as_of`, if that is set, and is not among these, good or bad, is gone.
struct CopiesFound {
  TierKind tier = TierKind::kNvme;
  MonotonicTime began{};
  MonotonicTime as_of{};
  std::vector<DurableCopy> copies;
  std::vector<CheckpointId> manifests;
  Attempt highest_claim = 0;
  std::vector<BadDurableCopy> bad{};  // at most kBadCopiesMax
  // FoundJob::begun. Only a host scans remote, so no message between nodes carries it.
  std::vector<CheckpointId> begun{};
};
// What lies in one of the tier's directories is out of reach. An InventoryState follows, and
// CopiesFound when it is back.
struct CopiesAway {
  TierKind tier = TierKind::kNvme;
  std::string dir;
};
// A flush of one shard has ended.
struct ShardDrained {
  CheckpointId checkpoint;
  Rank rank = 0;
  TierKind to = TierKind::kNvme;
  TierKind from = TierKind::kMemory;
  absl::Status status;
  bool source_bad = false;
  DurableCopy copy;
  std::string peer{};  // to kPeer: the node that it was read from
  // A bad copy was written anew, or was to be. (Older daemons do not know how, and say that all is
  // well when a copy is there.)
  bool replaced = false;
};
struct FlushStalled {
  CheckpointId checkpoint;
  TierKind to = TierKind::kNvme;
  bool stalled = false;
  std::string what;
};
struct ManifestDone {
  CheckpointId checkpoint;
  absl::Status status;
  std::vector<Rank> missing{};  // of an error: whose copies are not there any more
};
struct RemovalDone {
  CheckpointId checkpoint;
  TierKind tier = TierKind::kNvme;
  absl::Status status;
  std::optional<std::vector<Rank>> ranks_left =
      std::nullopt;  // of an error; not given: perhaps all
};
struct RemovalStalled {
  CheckpointId checkpoint;
  TierKind tier = TierKind::kNvme;
  std::string what;
};
// A slot was filled from another tier.
struct MemoryCopyGained {
  CheckpointId checkpoint;
  Rank rank = 0;
  uint64_t bytes = 0;
  int64_t unix_ms = 0;
  Likeness likeness{};  // none: of an older version
};
// Replicas that the node kept went: it needs the memory itself.
struct ReplicasDropped {
  CheckpointId checkpoint;
  std::vector<Rank> ranks;
  std::string why;
};
// The rank's shard could not be brought into memory.
struct FetchFailed {
  RequestToken token = 0;
  Attempt attempt = 0;
  Rank rank = 0;
  uint64_t session = 0;
  uint32_t round = 0;
  CheckpointId checkpoint;
  TierKind from = TierKind::kNvme;
  absl::Status status;
  bool source_bad = false;
};
// The shard is in memory, or could not be brought there ahead of a restore.
struct PrefetchEnded {
  CheckpointId checkpoint;
  Rank rank = 0;
  TierKind from = TierKind::kNvme;
  absl::Status status;
};
// The tier's budget is short: what its own rules do not hold may go.
struct DurableRoomAsked {
  TierKind tier = TierKind::kNvme;
  uint64_t bytes = 0;
  uint32_t stage = 0;        // RoomStage (recovery/deletion.h)
  bool for_another = false;  // job: then one that runs gives nothing
};
// What a memory copy is needed for is a fetch, not a save.
struct FetchRoomAsked {
  RequestToken token = 0;
  CheckpointId fetched;
  std::vector<CheckpointId> useful;
};
struct RepairAsked {
  RequestToken token = 0;
  v1::RepairRequest request;
};
struct PinAsked {
  RequestToken token = 0;
  v1::PinRequest request;
};
struct ReplaceAsked {
  RequestToken token = 0;
  v1::ReplaceRequest request;
};
struct RemoveCheckpointAsked {
  RequestToken token = 0;
  v1::RemoveCheckpointRequest request;
};
struct SetPolicyAsked {
  RequestToken token = 0;
  v1::Policy policy;
  std::string text;
};
struct CollectGarbageAsked {};
struct AwaitAsked {
  RequestToken token = 0;
  Attempt attempt = 0;
  Rank rank = 0;
  Step step = 0;
  v1::AwaitSave::Stage stage = v1::AwaitSave::STAGE_UNSPECIFIED;
};
struct SessionAsked {
  RequestToken token = 0;
  Attempt attempt = 0;
  Rank rank = 0;
  ProcessId process;
  std::optional<CheckpointId> wanted;  // absent: newest; attempt 0: on the line
  bool may_wait = false;               // for the other ranks
  bool reads_by_itself = false;        // the rank needs no source: it only wants to hear the step
  bool may_reshard = false;            // what another world size has saved will do, too
  bool reads_parts = false;            // of other ranks' shards also what lies on other nodes
  uint64_t deadline_ms = 0;            // how long the rank waits; 0: not known, of an older node
  std::string label{};                 // of the run; empty: none
};
struct LoadReported {
  RequestToken token = 0;
  Attempt attempt = 0;
  Rank rank = 0;
  uint64_t session = 0;
  uint32_t round = 0;
  bool loaded = false;
  bool copy_is_bad = false;
  bool wants_mismatch = false;
  std::string problem;
  bool shards_are_bad = false;  // not loaded: of another rank's shard that it needs no copy will do
  bool of_another_run = false;  // not loaded: the step has another label than the rank's
};
// A process of that rank was told to end, and is killed in so long (docs/protocol.md, "The last
// step"). Said again to a host that comes anew, with what an earlier one has chosen.
struct StopNoticed {
  Attempt attempt = 0;
  Rank rank = 0;
  uint32_t left_ms = 0;
  std::optional<Step> last = std::nullopt;
};
// The node is being drained, or is not any more.
struct NodeLeaving {
  bool leaving = false;
};
// The node's ranks go on to no further step until they hear of the last one, or some time is over.
struct StepsHeld {
  Attempt attempt = 0;
  uint64_t round = 0;
  std::optional<Step> passed = std::nullopt;  // the highest one that any of them is beyond
};
// A reader, which takes no part in an attempt, wants that rank's shard of a committed checkpoint.
// Tiers that are still being read, and may hold a newer one or the one that is named, are waited
// for.
struct AttachAsked {
  RequestToken token = 0;
  Rank rank = 0;
  std::optional<CheckpointId> wanted;  // absent: the newest; attempt 0: on the line
  bool any_tier = false;               // else memory alone will do, and nothing is waited for
  bool again = false;                  // it was told of `wanted` before, and its copy failed
  bool parts = false;                  // what lies on other nodes will do, too
};
// Where the records of all shards of a checkpoint are.
struct RecordsAsked {
  RequestToken token = 0;
  CheckpointId checkpoint;
};
struct ListAsked {
  RequestToken token = 0;
  std::optional<CheckpointId> before;  // the page behind this one; absent: the first
  bool may_wait = false;               // for tiers that are still being read
};
struct RequestExpired {
  RequestToken token = 0;
};
struct RequestCancelled {  // nobody would hear the answer
  RequestToken token = 0;
};
struct RestorePointAsked {
  RequestToken token = 0;
  v1::SetRestorePointRequest request;
};
struct StateWritten {
  uint64_t version = 0;
  absl::Status status;
};
struct WakeUp {};
// A sealed copy in a node's memory, and who may still write into its slot.
struct FoundShard {
  SealedCopy copy;
  std::optional<ProcessId> writer;
  bool replica = false;  // kept for another node
};
// The node that this comes from takes part from now on, or again: all that it has in memory, and
// the ranks that live there. What it has in nvme is told next.
struct NodeArrived {
  struct Seat {
    Attempt attempt = 0;
    Rank rank = 0;
    ProcessId process;
    ConnectionId connection = 0;
    std::set<Step> writing;  // begun there, and neither sealed nor lost
    std::optional<Step> last_begun;
  };
  // Asked to be let in over an earlier meeting, and has not heard the answer: it may have been.
  struct Joining {
    Rank rank = 0;
    ProcessId process;
  };
  std::vector<FoundShard> shards;
  std::vector<Seat> seats;
  uint64_t lends_bytes = 0;         // of its memory, to replicas of what other nodes have
  std::vector<NodeLabel> labels{};  // its failure domains
  bool reads_remote = false;        // it has the remote tier
  std::vector<Joining> joining{};
  bool leaving = false;  // it is being drained
};
// What that node has is out of reach. `ended`: its processes count as ended, too.
struct NodeLeft {
  bool ended = false;
  std::string why;
};
// The job is being removed: all its copies go.
struct JobRemoved {
  bool removed = true;        // false: it stays, with whatever its tiers are found to have
  bool agreed_first = false;  // in a cluster: it is to be durable → RemovalAgreed
};

using AnyToCoordinator = std::variant<
    JoinAsked, SeatLost, SaveAsked, RoomAsked, SpareAsked, SaveLost, ShardSealed, ShardBad,
    ShardGood, AwaitAsked, SessionAsked, LoadReported, AttachAsked, RecordsAsked, ListAsked,
    RequestExpired, RequestCancelled, RestorePointAsked, StateWritten, WakeUp, JobRemoved,
    InventoryState, CopiesFound, CopiesAway, ShardDrained, FlushStalled, ManifestDone, RemovalDone,
    RemovalStalled, MemoryCopyGained, FetchFailed, DurableRoomAsked, FetchRoomAsked, PinAsked,
    RepairAsked, RemoveCheckpointAsked, SetPolicyAsked, CollectGarbageAsked, NodeArrived, NodeLeft,
    PrefetchEnded, ReplicasDropped, ReplaceAsked, StopNoticed, StepsHeld, NodeLeaving>;
extern template class OneOf<AnyToCoordinator>;
struct ToCoordinator : OneOf<AnyToCoordinator> {
  using OneOf::OneOf;
};

// ---- Coordinator → agent ----

struct Refused {
  RequestToken token = 0;
  Failure failure;
};
struct JoinAccepted {
  RequestToken token = 0;
  Attempt attempt = 0;
  Rank rank = 0;
  uint32_t world_size = 0;
  bool decided = false;
  std::vector<Descent> descent;
  std::optional<Step> last_step;
};
struct SavePermitted {
  RequestToken token = 0;
  std::vector<Descent> descent;
};
// Something was given up (GiveUp came before this), or nothing can be.
struct RoomAnswered {
  RequestToken token = 0;
  bool made = false;
};
struct StageReached {
  RequestToken token = 0;
  v1::AwaitSave::Stage stage = v1::AwaitSave::STAGE_UNSPECIFIED;
  int64_t unix_ms = 0;
};
struct SourceOffered {
  RequestToken token = 0;
  Attempt attempt = 0;  // the rank's own
  Rank rank = 0;
  uint64_t session = 0;
  uint32_t round = 0;
  CheckpointId checkpoint;
  TierKind from = TierKind::kMemory;
  std::string why;  // not from memory: what became of the nearer copies
  uint64_t bytes = 0;
  std::vector<std::string> peers{};     // from kPeer: the nodes that have it, to be tried in order
  std::vector<RemoteReader> readers{};  // from kRemote: who reads there at the same time
};
// A step that another world size has saved: the rank reads what it wants of all its shards.
struct StepOffered {
  RequestToken token = 0;
  Attempt attempt = 0;  // the rank's own
  Rank rank = 0;
  uint64_t session = 0;
  uint32_t round = 0;
  CheckpointId checkpoint;
  uint32_t world_size = 0;
};
struct SessionEnded {
  RequestToken token = 0;
  uint64_t session = 0;
  uint32_t round = 0;
  CheckpointId checkpoint;
  std::vector<Descent> descent;
  std::string passed_over{};  // a newer step that was saved and could not be restored, and why
};
// Which checkpoint a reader gets, and in which tiers its node can read the shard.
struct ShardLocated {
  struct Place {
    TierKind tier = TierKind::kMemory;
    std::string why_not;  // empty: it can be read there
  };
  RequestToken token = 0;
  CheckpointId checkpoint;
  uint32_t world_size = 0;
  std::vector<Place> places;         // of the tiers that there are, the nearest first
  std::string elsewhere;             // "memory of node-b": where else it lies; empty: nowhere
  std::vector<std::string> peers{};  // of kPeer: the nodes that have it, in the order to ask them
  std::string remote_reader{};  // of kRemote, in parts: the node that reads it for all; empty: none
};
// Runs of ranks, together all of them; of none of the holders, `holder` is how many there are.
struct RecordsLocated {
  struct Holder {
    std::string node;
    bool remote = false;  // in the remote tier, which that node reads for all
  };
  struct Run {
    uint32_t holder = 0;
    uint32_t count = 0;
  };
  RequestToken token = 0;
  CheckpointId checkpoint;
  uint32_t world_size = 0;
  std::vector<Holder> holders;
  std::vector<Run> runs;
};
// The committed checkpoints, newest first: a page.
struct Listed {
  RequestToken token = 0;
  v1::Listing listing;
};
// All shards of the checkpoint go, and what is still being written of it is lost. `failure` is what
// its writers hear.
struct GiveUp {
  CheckpointId checkpoint;
  Failure failure;
};
// The node's copy in memory of that shard alone goes: its rank has another one, where it runs.
struct CopyUnneeded {
  CheckpointId checkpoint;
  Rank rank = 0;
};
// → StepsHeld
struct HoldSteps {
  Attempt attempt = 0;
  uint64_t round = 0;
};
// The first step that a rank reaches which is not below it is the job's last one.
struct LastStepChosen {
  Attempt attempt = 0;
  Step step = 0;
  uint32_t left_ms = 0;  // until the ranks are killed
};
// Attempts below this one can change nothing any more.
struct Superseded {
  Attempt by = 0;
};
// A rank found that its shard's bytes contradict their digests.
struct CopyDoubted {
  CheckpointId checkpoint;
  Rank rank = 0;
};
struct PersistState {
  v1::JobState state;
  bool on_disk = false;  // it is written when it would outlive a loss of power
};
// That the job is removed is durable, and agreed on: its copies may go. (In a cluster; to its own
// node.)
struct RemovalAgreed {};
struct RestorePointSet {
  RequestToken token = 0;
  std::string text;
};
struct Reported {
  Report report;
};
// Copies of these shards are to be written into the tier → a ShardDrained for each. To kPeer: are
// to be read from the memory of the nodes that are named, and kept in this one's.
struct FlushWanted {
  struct Shard {
    Rank rank = 0;
    TierKind from = TierKind::kMemory;
    uint64_t bytes = 0;
    uint32_t group = 0;  // 1: the first of `groups`; 0: none, it is written whole
    std::string peer{};  // to kPeer: the node that has it in memory
  };
  // Ranks whose shards have this content, whatever their nodes.
  struct Group {
    LayoutHash content{};
    std::vector<RankRun> ranks;
  };
  CheckpointId checkpoint;
  TierKind to = TierKind::kNvme;
  uint32_t world_size = 0;
  std::vector<Shard> shards;
  uint64_t opening = 0;
  v1::TierPolicy::Verify verify = v1::TierPolicy::VERIFY_SAMPLE;
  std::vector<Group> groups;  // remote: of replicas that share what they write
  uint32_t zstd_level = 0;    // remote: images are compressed; 0: they are not
  uint32_t zstd_threads = 0;  // at work for one of them at once; 0: all there are
  // They are bad there: written anew aside, verified, then put in place of what is there.
  bool replace = false;
};
struct FlushUnwanted {
  CheckpointId checkpoint;
  TierKind to = TierKind::kNvme;
};
// → ManifestDone
struct ManifestWanted {
  CheckpointId checkpoint;
  uint32_t world_size = 0;
  uint64_t opening = 0;
  std::vector<Descent> descent;
  std::vector<DurableCopy> shards;
};
// → RemovalDone
struct RemovalWanted {
  CheckpointId checkpoint;
  TierKind tier = TierKind::kNvme;
  uint32_t world_size = 0;
};
// These shards are to be brought into memory ahead of a restore, as far as there is free room → a
// PrefetchEnded for each.
struct PrefetchWanted {
  struct Shard {
    Rank rank = 0;
    TierKind from = TierKind::kNvme;
    uint64_t bytes = 0;
    std::string peer{};  // from kPeer: the node that has it
  };
  CheckpointId checkpoint;
  uint32_t world_size = 0;
  std::vector<Shard> shards;
};
struct PrefetchUnwanted {
  CheckpointId checkpoint;
};
struct AdminAnswered {
  RequestToken token = 0;
  std::variant<v1::PinReply, v1::RemoveCheckpointReply, v1::SetOptionsReply, v1::ReplaceReply,
               v1::RepairReply>
      reply;
};

using AnyToAgent =
    std::variant<Refused, JoinAccepted, SavePermitted, RoomAnswered, StageReached, SourceOffered,
                 StepOffered, SessionEnded, ShardLocated, RecordsLocated, Listed, GiveUp,
                 CopyUnneeded, Superseded, CopyDoubted, PersistState, RestorePointSet, Reported,
                 FlushWanted, FlushUnwanted, ManifestWanted, RemovalWanted, AdminAnswered,
                 PrefetchWanted, PrefetchUnwanted, RemovalAgreed, HoldSteps, LastStepChosen>;
extern template class OneOf<AnyToAgent>;
struct ToAgent : OneOf<AnyToAgent> {
  using OneOf::OneOf;
};

// Which node's agent it is for. An answer to a request goes to whoever asked.
inline constexpr NodeId kEveryNode = UINT32_MAX;  // of the job
struct ForAgent {
  NodeId to = kHere;
  ToAgent message;
};

}  // namespace holdfast
