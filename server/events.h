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
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"
#include "base/ids.h"
#include "base/one_of.h"
#include "holdfast/v1/admin.pb.h"
#include "holdfast/v1/client.pb.h"
#include "holdfast/v1/config.pb.h"
#include "holdfast/v1/state.pb.h"
#include "recovery/replicas.h"
#include "server/membership/membership.h"
#include "server/peers/peer_events.h"
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
  Likeness likeness{};  // not known: of a version that had none
};

// One slot as found in memory.dir at start.
struct FoundSlot {
  SlotId slot = 0;
  uint64_t bytes = 0;
  v1::SlotNote note;  // writer and readers already reduced to those that are alive
  std::optional<SealedCopy>
      sealed;  // absent: no record, or one that is torn, foreign or of another generation
  uint64_t record_bytes = 0;  // of its record, in memory beside the slot
};

// ---- Durable tiers (nvme, remote) ----

using DrainId =
    uint64_t;  // names one flush, fetch, removal or scan; never reused in a daemon's life

// Which copy, and whose: what a durable tier needs to name and find it.
struct CopyKey {
  ShardId id;
  std::string job_name;
  uint32_t world_size = 0;
};
// One copy as its tier describes it.
struct DurableCopy {
  SealedCopy copy;  // generation 0
  uint64_t record_bytes = 0;
  uint64_t record_crc = 0;     // RecordCrcOf (tiers/durable/manifest.h): what a manifest says of it
  bool from_manifest = false;  // its record was not read: the time of sealing is the commit's
  std::string location;        // for people
  // Remote, of a file that leaves slices out: its length, and KeptSlices::plan where the record was
  // read. 0: it has all.
  uint64_t file_bytes = 0;
  LayoutHash plan{};
};
// One that belongs where it lies, and is of no use: its image or record is damaged, cut or gone.
// World size 0: nothing tells of it but its names. Then it has an identity and a location, and
// image_bytes is what its image's file has.
struct BadDurableCopy {
  DurableCopy copy;
  std::string what;
};
inline constexpr size_t kBadCopiesMax = 4096;  // of one job that are told at a time
// What a scan found of one job.
struct FoundJob {
  JobUuid uuid;
  std::string name;
  uint32_t uid = 0;
  uint32_t gid = 0;
  std::vector<DurableCopy> copies;
  std::vector<CheckpointId> manifests;  // remote: those that have one
  Attempt highest_claim = 0;            // remote: attempts up to this one were opened by somebody
  std::vector<BadDurableCopy> bad{};
  // Remote: those that are marked as being written, and have no manifest: nothing was promised yet.
  std::vector<CheckpointId> begun{};
};

// A slot file that the daemon must not touch (a newer version's, another boot's, unreadable): its
// number is taken, and its bytes count.
struct LeftAloneSlot {
  SlotId slot = 0;
  uint64_t bytes = 0;
};

// ---- Replies ----

// kOpenedCopy: of a copy in a durable tier, which DurableOpened brought.
enum class Descriptors { kNone, kWritableImage, kReadOnlyImageAndRecord, kOpenedCopy };

struct PassedFiles;  // open files on their way to a client (server/runtime/passed_files.h)

struct SendReply {  // → HandOverFailed, if it has descriptors and they could not be had
  ConnectionId connection = 0;
  v1::DaemonFrame frame;
  Descriptors descriptors = Descriptors::kNone;
  SlotId slot = 0;  // whose descriptors
  Generation generation = 0;
  ReadHold hold{};  // kReadOnlyImageAndRecord: by which the slot is held for them
  std::shared_ptr<PassedFiles> files = nullptr;  // kOpenedCopy
  // An Attach that this answers, and that may be answered from another tier if it fails.
  std::shared_ptr<const v1::ClientFrame> attach = nullptr;
};

// ---- Events ----

// Always the first event: what the daemon found when it started.
struct Started {
  std::vector<FoundSlot> slots;
  std::vector<LeftAloneSlot> left_alone;
  std::vector<v1::JobState> jobs;  // catalog and memory.dir merged: the larger version wins
  uint64_t memory_bytes_max = 0;
  uint64_t nvme_bytes_max = 0;
  std::vector<std::string> problems;  // for the status
  std::string boot_id;  // of this boot: a job's state of another one tells that its memory is gone
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
  uint64_t record_bytes = 0;
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
// A verification read a copy in a durable tier: every digest is right, or what is wrong.
struct DurableCopyJudged {
  TierKind tier = TierKind::kNvme;
  ShardId id;
  std::string what;    // empty: it is good
  bool leave = false;  // it is not written anew by itself
};
// The client has heard nothing. DataLoss, NotFound: the slot's file is at fault; Cancelled: the
// client has gone.
struct HandOverFailed {
  SendReply reply;
  absl::Status status;
};
// (VerifyRequest and InspectShardRequest: of what lies on this node.)
// The runtime wants to read one of the shards that VerifyRequest was answered with, or that another
// node asks for. → ReadableShards with this one, or NotFound: it went meanwhile.
struct HoldShard {
  std::string job;
  ShardId id;
  Generation generation = 0;  // 0: whichever there is, if it is good
  // What lies on this node's drives alone is brought into its memory first, however long that
  // takes.
  bool load = false;
};
// The scrub wants to know what there is to read: every sealed copy in this node's memory and on its
// drives, and, of the jobs that are hosted here, those in the remote tier that no other node reads
// (PlanScrubRequest). → ListedShards
struct ListCopies {};
// Requests by gRPC. The caller's process is the asker's.
using AnyAdminQuery =
    std::variant<v1::GetStatusRequest, v1::ListCheckpointsRequest, v1::InspectShardRequest,
                 v1::VerifyRequest, HoldShard, v1::SetRestorePointRequest, v1::RemoveJobRequest,
                 v1::WhereRequest, v1::ExplainRequest, v1::TimelineRequest,
                 v1::CollectGarbageRequest, v1::PinRequest, v1::RemoveCheckpointRequest,
                 v1::RebuildRequest, v1::SetOptionsRequest, v1::GetNodesRequest,
                 v1::FindShardRequest, v1::PlanVerifyRequest, v1::ReadShardRequest,
                 v1::VerifyPartRequest, v1::VerifyMoreRequest, v1::ReplaceRequest, v1::DrainRequest,
                 v1::RepairRequest, v1::PlanScrubRequest, ListCopies>;
extern template class OneOf<AnyAdminQuery>;
struct AdminQuery : OneOf<AnyAdminQuery> {
  using OneOf::OneOf;
};
struct AdminRequest {
  AdminToken token = 0;
  Caller caller;
  AdminQuery request;
};
// The runtime's reader has let go of the slots that an AdminReply gave it (ReadableShards).
struct AdminReadDone {
  AdminToken token = 0;
};
// A copy was written and published, or not. AlreadyExists counts as an error: the core knows what
// there is.
struct FlushEnded {
  DrainId drain = 0;
  absl::Status status;      // Cancelled: as asked
  bool source_bad = false;  // what was read contradicts its digests: the copy there is bad
  DurableCopy copy;         // when OK
};
// A slot was filled from another tier, verified, and its record published.
struct FetchEnded {
  DrainId drain = 0;
  SlotId slot = 0;
  Generation generation = 0;
  absl::Status status;
  bool source_bad = false;
  SealedCopy copy;  // when OK
  // From kPeer: the node that was tried last, and those whose copy contradicts its digests.
  std::string peer{};
  std::vector<std::string> bad_peers{};
  uint64_t record_bytes = 0;  // when OK
};
// A copy was opened for a client, or not. What nobody sends any more closes with the last who has
// it.
struct DurableOpened {
  DrainId drain = 0;
  absl::Status status;  // FailedPrecondition: of a newer format; Cancelled: as asked
  bool bad = false;     // the copy is of no use, whoever reads it
  SealedCopy copy;      // when OK
  std::shared_ptr<PassedFiles> files = nullptr;  // likewise: image and record
  uint64_t parts_bytes = 0;  // in parts: of the memory that is there in place of the image
  // OK, but without files: the image is compressed, or some of what it needs is, and can be had in
  // parts only.
  bool parts_only = false;
};
// The parts are there, of the shard that was opened, or will not be: then nothing more is to be
// had.
struct PartsRead {
  DrainId opened = 0;
  uint64_t token = 0;
  absl::Status status;
};
// What there is of a step's records; an error: none.
struct RecordsGathered {
  uint64_t gather = 0;
  absl::Status status;
  uint64_t bytes = 0;
  std::shared_ptr<PassedFiles> files = nullptr;
};
// It has got nowhere for a while (the tier's stall_timeout_ms), or does again. It is still under
// way.
struct DrainStalled {
  DrainId drain = 0;
  bool stalled = false;
  std::string what;     // "no progress for 60 s: write '/mnt/…'"
  bool source = false;  // a flush: it hangs where it reads from
};
struct ManifestPublished {
  DrainId drain = 0;
  absl::Status status;  // AlreadyExists: there is one that says something else
  // Of an error: whose copies, which it was to name, are not there.
  std::vector<Rank> missing{};
};
struct CopiesRemoved {
  DrainId drain = 0;
  absl::Status status;  // NotFound counts as OK for the core
  // Of an error, nvme: whose copies still lie there. Not given: perhaps all.
  std::optional<std::vector<Rank>> ranks_left = std::nullopt;
};
// A tier's directory is not there any more, or another one lies in its place: its mount went away.
// What lies there is out of reach until a scan finds it again.
struct TierAway {
  TierKind tier = TierKind::kNvme;
  std::string dir;
  absl::Status status;
};
// What lies in a tier. nvme: one event for each drive, for all jobs; remote: one for each
// ScanRemoteJob. A tier that does not answer is an error first and may come again when it does.
struct TierScanned {
  TierKind tier = TierKind::kNvme;
  std::string dir;       // nvme: which drive
  DrainId drain = 0;     // the scan that asked; 0: the runtime by itself
  std::string job_name;  // remote
  absl::Status status;
  std::vector<FoundJob> jobs;  // remote: at most one
  // Jobs by name, of which not all could be read, and why: what is not told of them may be there.
  std::map<std::string, std::string> hidden;
  std::vector<std::string> problems;
  std::vector<std::string> unknown_files;
};
struct ReadForPeer {  // PeerReads has ended
  AdminToken token = 0;
  absl::Status status;
  std::variant<std::monostate, v1::ReadShardReply, v1::VerifyPartReply, v1::VerifyMoreReply> reply;
};
// The settings were read again: the configuration that holds from now on. What was set since the
// start (`ckptctl set`) stays on top of it; what cannot change while running is as it was.
struct SettingsChanged {
  v1::DaemonConfig config;
};
struct TimerFired {};
// Of the cluster, where one is configured.
struct MembershipTold {
  MembershipEvent event;
};
struct PeerTold {
  PeerEvent event;
};

using AnyEvent =
    std::variant<Started, ConnectionOpened, ClientRequest, ConnectionClosed, ProcessEnded,
                 SlotCreated, SlotPopulated, NoteWritten, RecordPublished, RecordRemoved,
                 SlotDeleted, JobStateWritten, JobStateRemoved, CopyFoundBad, CopyFoundGood,
                 DurableCopyJudged, SlotFileGone, HandOverFailed, AdminRequest, AdminReadDone,
                 FlushEnded, FetchEnded, DurableOpened, PartsRead, RecordsGathered, DrainStalled,
                 ManifestPublished, CopiesRemoved, TierAway, TierScanned, ReadForPeer, TimerFired,
                 MembershipTold, PeerTold, SettingsChanged>;
extern template class OneOf<AnyEvent>;
struct Event : OneOf<AnyEvent> {
  using OneOf::OneOf;
};

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
  bool daemon_fills = false;  // its note names this daemon as a reader, too
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
  bool on_disk = false;  // the catalog is waited for, too, for a few seconds
};
struct RemoveJobState {  // → JobStateRemoved
  JobUuid job;
};
struct IndexShard {  // the catalog: an index, written lazily, no completion
  SealedCopy copy;
  TierKind tier = TierKind::kMemory;
  SlotId slot = 0;       // memory
  std::string location;  // other tiers
};
struct UnindexShard {  // of memory
  ShardId id;
};
// Those of a checkpoint, of a job, or all in a durable tier, as many as there may be; what an
// IndexShard after this one tells of is there again.
struct UnindexCopies {
  TierKind tier = TierKind::kNvme;
  std::optional<JobUuid> job;
  std::optional<CheckpointId> checkpoint;
};
// Writes a sealed shard into a tier, straight from its slot or from its copy in another tier,
// checking digests on the way → FlushEnded. A slot that it reads is held by the core until then.
struct FlushShard {
  DrainId drain = 0;
  TierKind to = TierKind::kNvme;
  CopyKey key;
  uint32_t uid = 0;
  uint32_t gid = 0;
  uint64_t image_bytes = 0;
  TierKind from = TierKind::kMemory;
  SlotId slot = 0;  // from memory
  Generation generation = 0;
  uint64_t opening = 0;  // remote: the attempt's, by which it is claimed
  v1::TierPolicy::Verify verify = v1::TierPolicy::VERIFY_SAMPLE;
  // Remote: the ranks that hold the same tensors, this one among them; each writes some of them
  // once for all. Null: the shard is written whole.
  std::shared_ptr<const Replicas::Group> replicas = nullptr;
  uint32_t zstd_level = 0;    // remote: compressed, if that saves something; 0: it is not
  uint32_t zstd_threads = 0;  // at work for it at once; 0: all there are
  // The copy there is bad: the new one is written aside, verified, and then put in its place.
  bool replace = false;
};
// It ends soon as Cancelled, unless it is done already; nobody touches its slot any more when its
// end is told. One that is stuck in a call lets go of its slot all the same.
struct CancelDrain {
  DrainId drain = 0;
};
// Somebody waits for a fetch that was begun in the background: no ceiling holds it back any more.
struct HurryFetch {
  DrainId drain = 0;
};
// These ranks of the checkpoint are brought back there, from the remote tier as it seems.
struct RemoteReader {
  std::string node;
  std::vector<RankRun> ranks;
};
inline constexpr size_t kRemoteReadersMax = 64;  // named to one of them
// Fills a slot from a copy in another tier, verifies, publishes its record → FetchEnded.
struct FetchShard {
  DrainId drain = 0;
  TierKind from = TierKind::kNvme;
  CopyKey key;
  SlotId slot = 0;
  Generation generation = 0;
  uint64_t slot_bytes = 0;
  // A slot that holds a bad copy of the same shard: its record goes when the good one has been
  // verified, just before that is published.
  std::optional<SlotId> replaces;
  std::vector<std::string> peers{};  // from kPeer: the nodes that have it in memory, in order
  // From kRemote: who reads other ranks' files there at the same time, which may have what this
  // one's leaves out. None: all is read there.
  std::vector<RemoteReader> readers{};
  bool background = false;  // nobody waits for it: held to fabric.bandwidth_bytes_per_s_max
};
// Opens image and record of a copy, read-only, and looks whether they are what they should be; the
// bytes of the image are the reader's to verify → DurableOpened. Where it is wanted in parts: the
// record, and memory for parts, which ReadParts fills until EndParts. CancelDrain ends it likewise.
struct OpenDurable {
  DrainId drain = 0;
  TierKind tier = TierKind::kNvme;
  CopyKey key;
  bool in_parts = false;
  // kPeer: the nodes that have it, in the order to ask them. kRemote, in parts: the node that reads
  // it for all; none: it is read here.
  std::vector<std::string> peers{};
  // kRemote: with what its file leaves out, which other ranks' files have.
  bool whole = false;
};
// Brings parts of a shard that lies on another node into the memory that was opened for it
// → PartsRead.
struct PartRun {
  uint64_t offset = 0;  // in the image
  uint64_t bytes = 0;
  uint64_t place = 0;  // in the memory
};
struct ReadParts {
  DrainId opened = 0;
  uint64_t token = 0;  // the request's
  std::vector<PartRun> parts;
  bool contradicted = false;  // what it brought last was not what the record says
};
// The records of all shards of a step, from wherever they are, into one file for clients
// → RecordsGathered.
struct GatherRecords {
  struct Holder {
    std::string node;
    bool remote = false;
    std::vector<std::pair<Rank, uint32_t>> ranks;  // first, how many; ascending
  };
  uint64_t gather = 0;
  JobUuid job;
  std::string job_name;
  CheckpointId checkpoint;
  uint32_t world_size = 0;
  std::vector<Holder> holders;
};
// Lets go of the shard; a read that is under way ends by itself. No event.
struct EndParts {
  DrainId opened = 0;
};
// The remote commit → ManifestPublished.
struct PublishManifest {
  DrainId drain = 0;
  JobUuid job;
  std::string job_name;
  uint32_t uid = 0;
  uint32_t gid = 0;
  CheckpointId checkpoint;
  uint32_t world_size = 0;
  uint64_t opening = 0;
  std::vector<Descent> descent;
  std::vector<DurableCopy> shards;  // by rank
};
// Every copy of a checkpoint that lies in that tier (nvme: on this node) → CopiesRemoved.
struct RemoveCopies {
  DrainId drain = 0;
  TierKind tier = TierKind::kNvme;
  JobUuid job;
  std::string job_name;
  CheckpointId checkpoint;
  uint32_t world_size = 0;
};
// All that a tier has of a job, its identity included (`ckptctl rm <job>`) → CopiesRemoved.
struct RemoveJobCopies {
  DrainId drain = 0;
  TierKind tier = TierKind::kNvme;
  JobUuid job;
  std::string job_name;
};
// → TierScanned, also when there is no such job. An empty name: all jobs, one event for all.
struct ScanRemote {
  DrainId drain = 0;
  std::string job_name;
};
// Drives anew → TierScanned for each: all (ckptctl rebuild), or those that could not be read.
struct ScanNvme {
  DrainId drain = 0;
  std::vector<std::string> dirs;  // empty: all
};
// Limits changed while running (`ckptctl set`): the values of the whole configuration as it now is.
struct ApplyLimits {
  v1::NvmeConfig nvme;
  v1::RemoteConfig remote;
  v1::FabricConfig fabric;
};
struct SetTimer {  // one timer; the newest setting wins → TimerFired at or after `at`
  MonotonicTime at;
};
// What Membership and PeerNetwork are to do (server/membership/, server/peers/); what comes of it
// is told by MembershipTold and PeerTold.
struct WatchHost {
  std::string job;
};
struct UnwatchHost {
  std::string job;
};
struct CampaignFor {
  std::string job;
  Epoch floor = 0;
};
struct ResignFrom {
  std::string job;
};
struct StoreAgreedState {
  std::string job;
  Epoch epoch = 0;
  uint64_t version = 0;
  std::string state;
};
struct ForgetAgreedState {
  std::string job;
  Epoch epoch = 0;
};
struct ConnectPeer {
  std::string node;
};
struct SayToPeer {
  std::string node;
  PeerChannel channel = 0;
  std::string message;
};
struct ReadableShard {
  SealedCopy copy;
  SlotId slot = 0;  // memory
  TierKind tier = TierKind::kMemory;
  std::string location;  // other tiers
  // For the scrub, remote: how long its host has known it, and when it was read last; 0: not known.
  int64_t known_unix_ms = 0;
  int64_t read_unix_ms = 0;
};
// Shards held for the runtime to read until AdminReadDone.
struct ReadableShards {
  std::vector<ReadableShard> shards;
};
// What there is to verify. Not held: saves go on, and what is in their way goes.
struct ListedShards {
  std::vector<ReadableShard> shards;
  std::string unread;  // why that is not all that was asked for; empty: it is
  std::vector<std::string> hosted_elsewhere;  // ListCopies: jobs whose hosts know the rest
};
using AnyAdminResult =
    std::variant<std::monostate, v1::GetStatusReply, v1::ListCheckpointsReply, ReadableShards,
                 ListedShards, v1::SetRestorePointReply, v1::RemoveJobReply, v1::WhereReply,
                 v1::ExplainReply, v1::TimelineReply, v1::CollectGarbageReply, v1::PinReply,
                 v1::RemoveCheckpointReply, v1::RebuildReply, v1::SetOptionsReply,
                 v1::GetNodesReply, v1::FindShardReply, v1::PlanVerifyReply, v1::ReadShardReply,
                 v1::VerifyPartReply, v1::VerifyMoreReply, v1::ReplaceReply, v1::DrainReply,
                 v1::RepairReply, v1::PlanScrubReply>;
extern template class OneOf<AnyAdminResult>;
struct AdminResult : OneOf<AnyAdminResult> {
  using OneOf::OneOf;
};
struct AdminReply {
  AdminToken token = 0;
  absl::Status status;
  AdminResult reply;
};
// Another node asks for what only the runtime can do → ReadForPeer.
struct PeerReads {
  AdminToken token = 0;
  Caller caller;  // who asked there
  std::variant<v1::ReadShardRequest, v1::VerifyPartRequest, v1::VerifyMoreRequest> request;
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
    kCopyGood,      // it was called bad, and is not
    kCopyMended,    // it was bad, and was written anew from a good one
    kCopyUnmended,  // it is bad, and there is no good one
    kSlotQuarantined,
    kSlotReleased,
    kSlotLost,
    kJobRemoved,
    kTierCommitted,     // a step is whole in a durable tier
    kTierShed,          // a step that was due there is not written: a newer one takes its place
    kTierTrouble,       // a durable tier fails, stalls, is full
    kTierWell,          // what was stalled there gets on again
    kTierRemoved,       // retention
    kReplicasDiverged,  // ranks hold the same tensors with other bytes
    kJobStopping,       // it was told to end; its last step
    kProtocolError,     // a client's doing
    kTrouble,           // the machine's: a disk, memory
  };
  Kind kind = Kind::kShardSealed;
  std::string job;
  std::string text;
  uint64_t bytes = 0;
  TierKind tier = TierKind::kMemory;  // kTier…: which
};

using AnyAction =
    std::variant<SendReply, CloseConnection, WatchProcess, UnwatchProcess, CreateSlot, PopulateSlot,
                 WriteNote, PublishRecord, RemoveRecord, DeleteSlot, WriteJobState, RemoveJobState,
                 IndexShard, UnindexShard, UnindexCopies, FlushShard, CancelDrain, HurryFetch,
                 FetchShard, OpenDurable, ReadParts, EndParts, GatherRecords, PublishManifest,
                 RemoveCopies, RemoveJobCopies, ScanRemote, ScanNvme, ApplyLimits, SetTimer,
                 AdminReply, PeerReads, Report, WatchHost, UnwatchHost, CampaignFor, ResignFrom,
                 StoreAgreedState, ForgetAgreedState, ChangePeers, ConnectPeer, SayToPeer>;
extern template class OneOf<AnyAction>;
struct Action : OneOf<AnyAction> {
  using OneOf::OneOf;
};
using Actions = std::vector<Action>;

}  // namespace holdfast
