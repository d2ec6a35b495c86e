// The frames of proto/holdfast/v1/client.proto, without a protobuf runtime: plain structs, one
// encoder, one strict decoder. tests/client-lib/wire_test.cc holds them against the generated code,
// both ways.
//
//   HF_TRY_ASSIGN(std::string frame, wire::EncodeFrame(7, wire::BeginSave{.step = 12, .slot_bytes =
//   4 << 20})); HF_TRY_ASSIGN(wire::DaemonFrame reply, wire::DecodeFrame(message));
//
// Pure, thread-safe. Strings that are encoded must be valid UTF-8 (ForWire).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/ids.h"
#include "holdfast/status.h"
#include "tiers/image/record.h"

namespace holdfast::client::wire {

inline constexpr uint32_t kProtocol = 1;
inline constexpr size_t kFrameHeaderBytes = 4;
inline constexpr size_t kMessageBytesMax = 65'536;

enum class Choice : uint32_t { kNewest = 0, kStep = 1 };
enum class Stage : uint32_t { kUnspecified = 0, kSealed, kCommitted, kNvme, kRemote, kPeer };
enum class Reason : uint32_t {
  kUnspecified = 0,
  kNothingToRestore,
  kSuperseded,
  kShed,
  kAbandoned,
  kNoRoom,
  kOtherOwner,
  kRankTaken,
  kTopology,
  kUnreadable,
  kUnknownSession,
  kTooLarge,
  kNotRestored,
  kNotYet,
};

// ---- To the daemon ----

struct Hello {
  uint32_t protocol = kProtocol;
  std::string client;
  bool network_flag = false;
};
struct Join {
  std::string job;
  uint32_t rank = 0;
  uint32_t world_size = 0;
  std::string launch;
  uint64_t attempt = 0;
  uint64_t leave_attempt = 0;
  uint64_t deadline_ms = 0;
  std::string policy;  // encoded holdfast.v1.Policy; EncodePolicy makes it
  std::optional<uint64_t> passed_step = std::nullopt;
};
// One tier's part of a policy: what is absent is not sent.
struct TierPolicy {
  std::optional<uint64_t> every_steps;
  std::optional<uint64_t> every_ms;
  std::optional<uint64_t> keep_last;
  std::optional<uint64_t> keep_every_steps;
  std::optional<uint64_t> bytes_max;
};
std::string EncodePolicy(const TierPolicy& nvme, const TierPolicy& remote,
                         std::optional<uint32_t> replicas);
struct Reserve {
  uint64_t slot_bytes = 0;
  uint32_t slots = 0;
  uint64_t deadline_ms = 0;
};
struct BeginSave {
  uint64_t step = 0;
  uint64_t slot_bytes = 0;
  uint64_t deadline_ms = 0;
};
struct Seal {
  uint64_t step = 0;
  uint32_t slot = 0;
  uint64_t generation = 0;
  uint64_t record_offset = 0;
  uint64_t record_bytes = 0;
};
struct AbortSave {
  uint64_t step = 0;
  uint32_t slot = 0;
  uint64_t generation = 0;
  std::string why;
};
struct AwaitSave {
  uint64_t step = 0;
  Stage stage = Stage::kUnspecified;
  uint64_t deadline_ms = 0;
};
struct EnterSession {
  Choice choice = Choice::kNewest;
  uint64_t step = 0;
  uint64_t attempt = 0;
  uint64_t deadline_ms = 0;
  uint64_t hold = 0;
  bool reads_by_itself = false;
  bool may_reshard = false;
  bool reads_parts = false;
  std::string label;
};
struct ReportLoad {
  uint64_t session = 0;
  uint32_t round = 0;
  bool loaded = false;
  std::string problem;
  bool copy_is_bad = false;
  uint64_t deadline_ms = 0;
  bool wants_mismatch = false;
  uint64_t hold = 0;
  bool shards_are_bad = false;
  bool of_another_run = false;
};
struct Attach {
  std::string job;
  uint32_t rank = 0;
  Choice choice = Choice::kNewest;
  uint64_t step = 0;
  uint64_t attempt = 0;
  uint64_t hold = 0;
  uint64_t deadline_ms = 0;
  bool any_tier = false;
  std::vector<std::string> without;
  bool parts = false;
  bool parts_of_files = false;
};
struct ReadParts {
  uint64_t hold = 0;
  std::vector<uint64_t> offset;
  std::vector<uint64_t> bytes;
  std::vector<uint64_t> place;
  bool contradicted = false;
  uint64_t deadline_ms = 0;
};
struct ReadRecords {
  std::string job;
  uint64_t attempt = 0;
  uint64_t step = 0;
  uint64_t deadline_ms = 0;
};
struct ConfirmRead {
  uint32_t slot = 0;
  uint64_t generation = 0;
};
struct ReleaseRead {
  uint64_t hold = 0;
};
struct ReleaseSlots {
  std::vector<uint32_t> slots;
};
struct Leave {};
struct List {
  std::string job;
  bool before = false;
  uint64_t before_attempt = 0;
  uint64_t before_step = 0;
  uint64_t deadline_ms = 0;
};

struct ReachStep {
  uint64_t step = 0;
  bool told_to_stop = false;
  uint64_t grace_ms = 0;
  std::optional<uint64_t> passed_step = std::nullopt;
};

using Request = std::variant<Hello, Join, Reserve, BeginSave, Seal, AbortSave, AwaitSave,
                             EnterSession, ReportLoad, Attach, ConfirmRead, ReleaseRead,
                             ReleaseSlots, Leave, List, ReadParts, ReadRecords, ReachStep>;

// Length prefix and message. kInvalidArgument when it would exceed the limit.
Result<std::string> EncodeFrame(uint64_t id, const Request& request);

// ---- From the daemon ----

struct Failure {
  int32_t code = 0;
  std::string message;
  Reason reason = Reason::kUnspecified;
};
struct Done {};
struct HelloReply {
  uint32_t protocol = 0;
  std::string daemon_version;
  std::string boot_id;
  bool network_flag = false;
};
struct JoinReply {
  std::string job_uuid;
  uint64_t attempt = 0;
  std::vector<Descent> descent;
  bool decided = false;
  uint64_t last_step = 0;
  bool any_step = false;
};
struct ReserveReply {
  uint32_t ready = 0;
  uint32_t wanted = 0;
  uint64_t slot_bytes = 0;
  bool descriptor = false;
  uint32_t slot = 0;
};
struct Grant {
  uint32_t slot = 0;
  uint64_t generation = 0;
  uint64_t slot_bytes = 0;
  bool descriptor = false;
  std::string job_uuid;
  uint64_t attempt = 0;
  std::vector<Descent> descent;
};
struct Sealed {
  int64_t sealed_unix_ms = 0;
};
struct SaveProgress {
  Stage stage = Stage::kUnspecified;
  int64_t unix_ms = 0;
};
struct Source {
  uint32_t slot = 0;
  uint64_t generation = 0;
  uint64_t image_bytes = 0;
  uint64_t attempt = 0;
  uint64_t step = 0;
  std::string job_uuid;
  uint32_t rank = 0;
  uint32_t world_size = 0;
  uint64_t hold = 0;
  std::string tier;  // empty: a daemon that knows memory only
  std::string why;
  uint64_t parts_bytes = 0;
};
struct StepRecords {
  std::string job_uuid;
  uint32_t world_size = 0;
  uint64_t bytes = 0;
};
struct StepReached {
  bool stop = false;
  bool stopping = false;
  uint64_t left_ms = 0;
};
struct SessionOutcome {
  uint64_t session = 0;
  uint32_t round = 0;
  bool done = false;
  uint64_t attempt = 0;
  uint64_t step = 0;
  std::optional<Source> source;
  std::vector<Descent> descent;
  uint32_t reshard = 0;
  std::string passed_over;
};

struct ListedCheckpoint {
  uint64_t attempt = 0;
  uint64_t step = 0;
  uint32_t world_size = 0;
  bool on_line = false;
  std::vector<std::string> tiers;
  uint64_t bytes = 0;
  int64_t unix_ms = 0;
};
struct Listing {
  std::vector<ListedCheckpoint> checkpoints;
  bool more = false;
  std::string unread;
};

using Reply = std::variant<Done, Failure, HelloReply, JoinReply, ReserveReply, Grant, Sealed,
                           SaveProgress, SessionOutcome, Source, Listing, StepRecords, StepReached>;

struct DaemonFrame {
  uint64_t id = 0;
  Reply reply;
};

// The message without its length. kInternal, saying what is wrong with it, for anything but exactly
// one reply.
Result<DaemonFrame> DecodeFrame(std::string_view message);

// How many descriptors come with a reply.
size_t DescriptorCount(const Reply& reply);

}  // namespace holdfast::client::wire
