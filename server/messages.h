// What agent and coordinator say to each other. Every message names the attempt (and step, and
// rank) that it is about, so that a late one is recognised as late; nothing here names a slot, a
// connection or a descriptor.
//
// A RequestToken names one unanswered request of a client. The agent makes them and keeps their
// deadlines; the coordinator answers each once, or is told that it expired or was cancelled.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"
#include "base/ids.h"
#include "holdfast/v1/client.pb.h"
#include "holdfast/v1/state.pb.h"
#include "server/events.h"
#include "tiers/image/record.h"

namespace holdfast {

using RequestToken = uint64_t;  // 0: nobody waits

// The time at which an event is handled.
struct EventTime {
  MonotonicTime now;
  int64_t unix_ms = 0;
};

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
};
// Another job is short of memory: what this one can spare.
struct SpareAsked {
  RequestToken token = 0;
  std::string for_job;
  std::vector<CheckpointId> useful;
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
};
struct ShardGood {
  CheckpointId checkpoint;
  Rank rank = 0;
};
struct ShardBad {
  CheckpointId checkpoint;
  Rank rank = 0;
  std::string what;
};
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
// The job is being removed: all its copies go.
struct JobRemoved {
  bool removed = true;  // false: its state could not be removed, it stays, without copies
};

using ToCoordinator =
    std::variant<JoinAsked, SeatLost, SaveAsked, RoomAsked, SpareAsked, SaveLost, ShardSealed,
                 ShardBad, ShardGood, AwaitAsked, SessionAsked, LoadReported, RequestExpired,
                 RequestCancelled, RestorePointAsked, StateWritten, WakeUp, JobRemoved>;

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
};
struct SessionEnded {
  RequestToken token = 0;
  uint64_t session = 0;
  uint32_t round = 0;
  CheckpointId checkpoint;
  std::vector<Descent> descent;
};
// All shards of the checkpoint go, and what is still being written of it is lost. `failure` is what
// its writers hear.
struct GiveUp {
  CheckpointId checkpoint;
  Failure failure;
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
};
struct RestorePointSet {
  RequestToken token = 0;
  std::string text;
};
struct Reported {
  Report report;
};

using ToAgent = std::variant<Refused, JoinAccepted, SavePermitted, RoomAnswered, StageReached,
                             SourceOffered, SessionEnded, GiveUp, Superseded, CopyDoubted,
                             PersistState, RestorePointSet, Reported>;

}  // namespace holdfast
