// What goes into the daemon's control logic and what comes out of it: `NodeCore::Handle(event, now)
// → actions`.
//
// The logic (agent, coordinator, session) has no I/O, threads, locks or clock. The runtime
// (server/runtime/) performs the actions and feeds their completions back as events; so does the
// simulator (tests/sim), with fakes that misbehave.
//
// Order: actions that name the same slot are performed in the order given, one at a time; replies
// to one connection are sent in the order given. Everything else may complete in any order. Every
// action that has a completion gets exactly one, also when it fails (SendReply has one only when it
// fails). A completion that comes for an
// older generation than the core's is ignored by it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"
#include "base/ids.h"
#include "holdfast/v1/admin.pb.h"
#include "holdfast/v1/client.pb.h"
#include "holdfast/v1/state.pb.h"
#include "tiers/image/record.h"

namespace holdfast {

using ConnectionId = uint64_t;  // never reused within one daemon's life
using AdminToken = uint64_t;    // names one admin request until its AdminReply

// Who asks, from SO_PEERCRED.
struct Caller {
  ProcessId process;
  uint32_t uid = 0;
  uint32_t gid = 0;
};

// A sealed copy's record, without layout and digests.
struct SealedCopy {
  ShardId id;
  std::string job_name;
  uint32_t world_size = 0;
  Generation generation = 0;
  uint64_t image_bytes = 0;
  LayoutHash layout_hash{};
  std::vector<Descent> descent;
  int64_t sealed_unix_ms = 0;
};

// One slot as found in memory.dir at start.
struct FoundSlot {
  SlotId slot = 0;
  uint64_t bytes = 0;
  v1::SlotNote note;  // writer and readers already reduced to those that are alive
  std::optional<SealedCopy>
      sealed;  // absent: no record, or one that is torn, foreign or of another generation
};

// A slot file that the daemon must not touch (a newer version's, another boot's, unreadable): its
// number is taken, and its bytes count.
struct LeftAloneSlot {
  SlotId slot = 0;
  uint64_t bytes = 0;
};

// ---- Replies ----

enum class Descriptors { kNone, kWritableImage, kReadOnlyImageAndRecord };

struct SendReply {  // → HandOverFailed, if it has descriptors and they could not be had
  ConnectionId connection = 0;
  v1::DaemonFrame frame;
  Descriptors descriptors = Descriptors::kNone;
  SlotId slot = 0;  // whose descriptors
  Generation generation = 0;
  ReadHold hold{};  // kReadOnlyImageAndRecord: by which the slot is held for them
};

// ---- Events ----

// Always the first event: what the daemon found when it started.
struct Started {
  std::vector<FoundSlot> slots;
  std::vector<LeftAloneSlot> left_alone;
  std::vector<v1::JobState> jobs;  // catalog and memory.dir merged: the larger version wins
  uint64_t memory_bytes_max = 0;
  std::vector<std::string> problems;  // for the status
};
struct ConnectionOpened {
  ConnectionId connection = 0;
  Caller caller;
};
struct ClientRequest {
  ConnectionId connection = 0;
  v1::ClientFrame frame;  // a known request, never Hello (the runtime answers that)
};
struct ConnectionClosed {
  ConnectionId connection = 0;
};
struct ProcessEnded {
  ProcessId process;
};
struct SlotCreated {
  SlotId slot = 0;
  absl::Status status;
};
struct SlotPopulated {
  SlotId slot = 0;
  absl::Status status;
};
struct NoteWritten {
  SlotId slot = 0;
  uint64_t note_version = 0;
  absl::Status status;
};
struct RecordPublished {
  SlotId slot = 0;
  Generation generation = 0;
  absl::Status
      status;       // InvalidArgument: the client's record is torn, hostile or of another identity
  SealedCopy copy;  // when OK
};
struct RecordRemoved {
  SlotId slot = 0;
  Generation generation = 0;
  absl::Status status;  // NotFound counts as OK for the core
};
struct SlotDeleted {
  SlotId slot = 0;
  absl::Status status;
};
struct JobStateWritten {
  JobUuid job;
  uint64_t version = 0;
  absl::Status status;
};
struct JobStateRemoved {
  JobUuid job;
  absl::Status status;
};
// A reader (verify, scrub) found digests contradicted, or the slot file cut short or gone.
struct CopyFoundBad {
  SlotId slot = 0;
  Generation generation = 0;
  std::string what;
};
// The slot's image is not in memory.dir. Of a slot that is being made or deleted it means nothing.
struct SlotFileGone {
  SlotId slot = 0;
};
// A verification read every byte of it, and all digests are right.
struct CopyFoundGood {
  SlotId slot = 0;
  Generation generation = 0;
};
// The client has heard nothing. DataLoss, NotFound: the slot's file is at fault; Cancelled: the
// client has gone.
struct HandOverFailed {
  SendReply reply;
  absl::Status status;
};
// The runtime wants to read one of the shards that VerifyRequest was answered with. →
// ReadableShards with this one, or NotFound: it went meanwhile.
struct HoldShard {
  std::string job;
  ShardId id;
  Generation generation = 0;
};
// Requests by gRPC. The caller's process is the asker's.
struct AdminRequest {
  AdminToken token = 0;
  Caller caller;
  std::variant<v1::GetStatusRequest, v1::ListCheckpointsRequest, v1::InspectShardRequest,
               v1::VerifyRequest, HoldShard, v1::SetRestorePointRequest, v1::RemoveJobRequest>
      request;
};
// The runtime's reader has let go of the slots that an AdminReply gave it (ReadableShards).
struct AdminReadDone {
  AdminToken token = 0;
};
struct TimerFired {};

using Event =
    std::variant<Started, ConnectionOpened, ClientRequest, ConnectionClosed, ProcessEnded,
                 SlotCreated, SlotPopulated, NoteWritten, RecordPublished, RecordRemoved,
                 SlotDeleted, JobStateWritten, JobStateRemoved, CopyFoundBad, CopyFoundGood,
                 SlotFileGone, HandOverFailed, AdminRequest, AdminReadDone, TimerFired>;

// ---- Actions ----

struct CloseConnection {
  ConnectionId connection = 0;
  std::string why;
};
struct WatchProcess {  // → ProcessEnded, at once if it is already gone
  ProcessId process;
};
struct UnwatchProcess {
  ProcessId process;
};
struct CreateSlot {  // file and fallocate → SlotCreated
  SlotId slot = 0;
  uint64_t bytes = 0;
};
struct PopulateSlot {  // in chunks, in the background, with bounded CPU → SlotPopulated
  SlotId slot = 0;
  uint64_t bytes = 0;
};
// boot_id is left empty: the runtime fills it in.
struct WriteNote {  // → NoteWritten
  SlotId slot = 0;
  uint64_t note_version = 0;
  v1::SlotNote note;
};
// Reads the client's record out of the slot, checks it against `expected` (identity, generation,
// lengths, descent) and its own framing, and publishes it → RecordPublished.
struct PublishRecord {
  SlotId slot = 0;
  Generation generation = 0;
  uint64_t record_offset = 0;
  uint64_t record_bytes = 0;
  uint64_t slot_bytes = 0;
  SealedCopy expected;  // image_bytes, layout_hash and time are the client's to tell
};
struct RemoveRecord {  // → RecordRemoved
  SlotId slot = 0;
  Generation generation = 0;
};
struct DeleteSlot {  // record, note, image → SlotDeleted
  SlotId slot = 0;
};
// Into memory.dir, from where the catalog follows (or into the catalog, where memory.dir cannot be
// written) → JobStateWritten. boot_id is left empty here, too.
struct WriteJobState {
  v1::JobState state;
};
struct RemoveJobState {  // → JobStateRemoved
  JobUuid job;
};
struct IndexShard {  // the catalog: an index, written lazily, no completion
  SealedCopy copy;
  SlotId slot = 0;
};
struct UnindexShard {
  ShardId id;
};
struct SetTimer {  // one timer; the newest setting wins → TimerFired at or after `at`
  MonotonicTime at;
};
struct ReadableShard {
  SealedCopy copy;
  SlotId slot = 0;
};
// Shards held for the runtime to read until AdminReadDone.
struct ReadableShards {
  std::vector<ReadableShard> shards;
};
// What there is to verify. Not held: saves go on, and what is in their way goes.
struct ListedShards {
  std::vector<ReadableShard> shards;
};
struct AdminReply {
  AdminToken token = 0;
  absl::Status status;
  std::variant<std::monostate, v1::GetStatusReply, v1::ListCheckpointsReply, ReadableShards,
               ListedShards, v1::SetRestorePointReply, v1::RemoveJobReply>
      reply;
};
// Something of importance happened: log line, job event, metric.
struct Report {
  enum class Kind {
    kShardSealed,
    kStepCommitted,
    kStepShed,     // given up for room before its time
    kStepRetired,  // given up for room when a newer step was committed, as every step is one day
    kStepAbandoned,
    kSaveRefused,
    kAttemptOpened,
    kSessionDecided,
    kSessionDone,
    kSessionFellBack,
    kSessionFailed,
    kCopyBad,
    kCopyGood,  // it was called bad, and is not
    kSlotQuarantined,
    kSlotReleased,
    kSlotLost,
    kJobRemoved,
    kProtocolError,  // a client's doing
    kTrouble,        // the machine's: a disk, memory
  };
  Kind kind = Kind::kShardSealed;
  std::string job;
  std::string text;
  uint64_t bytes = 0;
};

using Action =
    std::variant<SendReply, CloseConnection, WatchProcess, UnwatchProcess, CreateSlot, PopulateSlot,
                 WriteNote, PublishRecord, RemoveRecord, DeleteSlot, WriteJobState, RemoveJobState,
                 IndexShard, UnindexShard, SetTimer, AdminReply, Report>;
using Actions = std::vector<Action>;

}  // namespace holdfast
