#include "server/peer_codec.h"

#include <google/protobuf/unknown_field_set.h>

#include <span>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "recovery/deletion.h"
#include "recovery/eviction.h"
#include "recovery/policy.h"
#include "server/agent.h"
#include "server/message_texts.h"
#include "server/node_ranges.h"
#include "server/peer_io.h"

namespace holdfast {
namespace {

using peer_internal::Reader;
using peer_internal::Writer;

// The messages that cross, and the field of PeerMessage that each travels in.
#define HF_PEER_TO_COORDINATOR(X)                   \
  X(JoinAsked, join_asked)                          \
  X(SeatLost, seat_lost)                            \
  X(SaveAsked, save_asked)                          \
  X(RoomAsked, room_asked)                          \
  X(SpareAsked, spare_asked)                        \
  X(SaveLost, save_lost)                            \
  X(ShardGood, shard_good)                          \
  X(ShardBad, shard_bad)                            \
  X(AwaitAsked, await_asked)                        \
  X(SessionAsked, session_asked)                    \
  X(LoadReported, load_reported)                    \
  X(AttachAsked, attach_asked)                      \
  X(RecordsAsked, records_asked)                    \
  X(ListAsked, list_asked)                          \
  X(RequestExpired, request_expired)                \
  X(RequestCancelled, request_cancelled)            \
  X(InventoryState, inventory_state)                \
  X(CopiesFound, copies_found)                      \
  X(CopiesAway, copies_away)                        \
  X(ShardDrained, shard_drained)                    \
  X(FlushStalled, flush_stalled)                    \
  X(ManifestDone, manifest_done)                    \
  X(RemovalDone, removal_done)                      \
  X(RemovalStalled, removal_stalled)                \
  X(MemoryCopyGained, memory_copy_gained)           \
  X(FetchFailed, fetch_failed)                      \
  X(DurableRoomAsked, durable_room_asked)           \
  X(FetchRoomAsked, fetch_room_asked)               \
  X(NodeArrived, node_arrived)                      \
  X(RestorePointAsked, restore_point_asked)         \
  X(PinAsked, pin_asked)                            \
  X(RepairAsked, repair_asked)                      \
  X(RemoveCheckpointAsked, remove_checkpoint_asked) \
  X(SetPolicyAsked, set_policy_asked)               \
  X(CollectGarbageAsked, collect_garbage_asked)     \
  X(PrefetchEnded, prefetch_ended)                  \
  X(ReplicasDropped, replicas_dropped)              \
  X(ReplaceAsked, replace_asked)                    \
  X(StopNoticed, stop_noticed)                      \
  X(StepsHeld, steps_held)                          \
  X(NodeLeaving, node_leaving)

#define HF_PEER_TO_AGENT(X)              \
  X(Refused, refused)                    \
  X(JoinAccepted, join_accepted)         \
  X(SavePermitted, save_permitted)       \
  X(RoomAnswered, room_answered)         \
  X(StageReached, stage_reached)         \
  X(SourceOffered, source_offered)       \
  X(StepOffered, step_offered)           \
  X(SessionEnded, session_ended)         \
  X(ShardLocated, shard_located)         \
  X(RecordsLocated, records_located)     \
  X(Listed, listed)                      \
  X(GiveUp, give_up)                     \
  X(CopyUnneeded, copy_unneeded)         \
  X(Superseded, superseded)              \
  X(CopyDoubted, copy_doubted)           \
  X(PersistState, persist_state)         \
  X(RestorePointSet, restore_point_set)  \
  X(FlushWanted, flush_wanted)           \
  X(FlushUnwanted, flush_unwanted)       \
  X(ManifestWanted, manifest_wanted)     \
  X(RemovalWanted, removal_wanted)       \
  X(AdminAnswered, admin_answered)       \
  X(Reported, reported)                  \
  X(PrefetchWanted, prefetch_wanted)     \
  X(PrefetchUnwanted, prefetch_unwanted) \
  X(HoldSteps, hold_steps)               \
  X(LastStepChosen, last_step_chosen)

#define HF_PEER_TO_NODE(X)           \
  X(StateAsked, state_asked)         \
  X(StateTold, state_told)           \
  X(JobHosted, job_hosted)           \
  X(JobSought, job_sought)           \
  X(JobAbsent, job_absent)           \
  X(JobsRemoved, jobs_removed)       \
  X(JobLetGo, job_let_go)            \
  X(StateKept, state_kept)           \
  X(AdminForwarded, admin_forwarded) \
  X(AdminReturned, admin_returned)

// What ckptctl asks that another node can answer.
#define HF_PEER_ADMIN(X)                 \
  X(GetStatus, get_status)               \
  X(ListCheckpoints, list_checkpoints)   \
  X(SetRestorePoint, set_restore_point)  \
  X(RemoveJob, remove_job)               \
  X(Where, where)                        \
  X(Explain, explain)                    \
  X(Timeline, timeline)                  \
  X(CollectGarbage, collect_garbage)     \
  X(Pin, pin)                            \
  X(RemoveCheckpoint, remove_checkpoint) \
  X(SetOptions, set_options)             \
  X(FindShard, find_shard)               \
  X(PlanVerify, plan_verify)             \
  X(ReadShard, read_shard)               \
  X(VerifyPart, verify_part)             \
  X(VerifyMore, verify_more)             \
  X(Replace, replace)                    \
  X(Drain, drain)                        \
  X(Repair, repair)                      \
  X(PlanScrub, plan_scrub)

#define HF_HAS(field) [&p] { return p.has_##field(); }
#define HF_MUTABLE(field) [&p] { return p.mutable_##field(); }

constexpr uint64_t kAny = std::numeric_limits<uint64_t>::max();

constexpr std::pair<SeatLost::How, v1::SeatLost::How> kHows[] = {
    {SeatLost::How::kDisconnected, v1::SeatLost::HOW_DISCONNECTED},
    {SeatLost::How::kProcessEnded, v1::SeatLost::HOW_PROCESS_ENDED},
    {SeatLost::How::kLeft, v1::SeatLost::HOW_LEFT},
};

constexpr std::pair<InventoryState::Kind, v1::InventoryState::Kind> kInventoryKinds[] = {
    {InventoryState::Kind::kNotConfigured, v1::InventoryState::KIND_NOT_CONFIGURED},
    {InventoryState::Kind::kPending, v1::InventoryState::KIND_PENDING},
    {InventoryState::Kind::kKnown, v1::InventoryState::KIND_KNOWN},
    {InventoryState::Kind::kFailed, v1::InventoryState::KIND_FAILED},
};

constexpr std::pair<Report::Kind, v1::ReportKind> kReportKinds[] = {
    {Report::Kind::kShardSealed, v1::REPORT_KIND_SHARD_SEALED},
    {Report::Kind::kStepCommitted, v1::REPORT_KIND_STEP_COMMITTED},
    {Report::Kind::kStepShed, v1::REPORT_KIND_STEP_SHED},
    {Report::Kind::kStepRetired, v1::REPORT_KIND_STEP_RETIRED},
    {Report::Kind::kStepAbandoned, v1::REPORT_KIND_STEP_ABANDONED},
    {Report::Kind::kSaveRefused, v1::REPORT_KIND_SAVE_REFUSED},
    {Report::Kind::kAttemptOpened, v1::REPORT_KIND_ATTEMPT_OPENED},
    {Report::Kind::kSessionDecided, v1::REPORT_KIND_SESSION_DECIDED},
    {Report::Kind::kSessionDone, v1::REPORT_KIND_SESSION_DONE},
    {Report::Kind::kSessionFellBack, v1::REPORT_KIND_SESSION_FELL_BACK},
    {Report::Kind::kSessionFailed, v1::REPORT_KIND_SESSION_FAILED},
    {Report::Kind::kCopyBad, v1::REPORT_KIND_COPY_BAD},
    {Report::Kind::kCopyGood, v1::REPORT_KIND_COPY_GOOD},
    {Report::Kind::kCopyMended, v1::REPORT_KIND_COPY_MENDED},
    {Report::Kind::kCopyUnmended, v1::REPORT_KIND_COPY_UNMENDED},
    {Report::Kind::kSlotQuarantined, v1::REPORT_KIND_SLOT_QUARANTINED},
    {Report::Kind::kSlotReleased, v1::REPORT_KIND_SLOT_RELEASED},
    {Report::Kind::kSlotLost, v1::REPORT_KIND_SLOT_LOST},
    {Report::Kind::kJobRemoved, v1::REPORT_KIND_JOB_REMOVED},
    {Report::Kind::kTierCommitted, v1::REPORT_KIND_TIER_COMMITTED},
    {Report::Kind::kTierShed, v1::REPORT_KIND_TIER_SHED},
    {Report::Kind::kTierTrouble, v1::REPORT_KIND_TIER_TROUBLE},
    {Report::Kind::kTierWell, v1::REPORT_KIND_TIER_WELL},
    {Report::Kind::kTierRemoved, v1::REPORT_KIND_TIER_REMOVED},
    {Report::Kind::kReplicasDiverged, v1::REPORT_KIND_REPLICAS_DIVERGED},
    {Report::Kind::kJobStopping, v1::REPORT_KIND_JOB_STOPPING},
    {Report::Kind::kProtocolError, v1::REPORT_KIND_PROTOCOL_ERROR},
    {Report::Kind::kTrouble, v1::REPORT_KIND_TROUBLE},
};
static_assert(std::size(kReportKinds) == static_cast<size_t>(Report::Kind::kTrouble) + 1);

// ---- What several messages have ----
// Template parameters: Io is Writer or Reader, M the message (const for the Writer), P its
// protobuf message.

template <typename Io, typename M, typename P>
void TakesPart(Io& io, M& m, P& p) {
  io.Within(HF_FIELD(attempt), 1, kAny);
  io.Within(HF_FIELD(rank), 0, kWorldSizeMax - 1);
}

template <typename Io, typename Id, typename P>
void CheckpointOf(Io& io, Id& id, P& p) {
  io.Within(HF_FIELD_AS(id.attempt, attempt), 1, kAny);
  io.Any(HF_FIELD_AS(id.step, step));
}

template <typename Io, typename M, typename P>
void WorldSize(Io& io, M& m, P& p) {
  io.Within(HF_FIELD(world_size), 1, kWorldSizeMax);
}

template <typename Io, typename M, typename P>
void RankOfWorld(Io& io, M& m, P& p) {
  WorldSize(io, m, p);
  io.Within(HF_FIELD(rank), 0, kWorldSizeMax - 1);
  io.Require(m.rank < m.world_size, "rank", "it is not below the world size");
}

template <typename Io, typename T, typename F>
void DurableTier(Io& io, T& tier, F field) {
  io.Tier(tier, field);
  io.Require(tier != TierKind::kMemory, field.name, "memory is not a durable tier");
}

// A name is compared as it is: never mended.
template <typename Io, typename T, typename F>
void NodeName(Io& io, T& name, F field) {
  io.Path(name, field);
  io.Require(name.size() <= kNodeTextBytesMax, field.name, "it is longer than a node's name");
}

// An entry of a list of texts, on its way there or back.
template <typename Add>
auto OneOf(std::string_view name, Add add) {
  return peer_internal::Field{name, [] { return std::string(); }, add};
}
inline auto TakenFrom(std::string_view name, const std::string& entry) {
  return peer_internal::Field{name, [&entry] { return entry; }, [](const auto&) {}};
}

template <typename P>
void RunsInto(const std::vector<RankRun>& runs, P& p) {
  for (const RankRun& run : runs) {
    p.add_first(run.first);
    p.add_stride(run.stride);
    p.add_count(run.count);
  }
}
template <typename Io, typename P>
void RunsFrom(Io& io, std::string_view field, const P& p, std::vector<RankRun>& runs) {
  io.Require(static_cast<size_t>(p.first_size()) <= kRankRunsMax &&
                 p.stride_size() == p.first_size() && p.count_size() == p.first_size(),
             field, "one has too many runs of ranks, or half ones");
  for (int run = 0; run < p.first_size() && io.ok(); ++run) {
    io.Require(p.stride(run) > 0 && p.count(run) > 0, field, "one has a run of no ranks");
    runs.push_back({p.first(run), p.stride(run), p.count(run)});
  }
}

// The nodes that each of some shards is read from: names, each once.
template <typename Io, typename Shards, typename P>
void PeerOfEach(Io& io, Shards& shards, P& p) {
  if constexpr (Io::kWriting) {
    std::map<std::string, uint64_t> places;
    std::vector<uint64_t> column;
    for (const auto& shard : shards) {
      if (shard.peer.empty()) {
        column.push_back(0);
        continue;
      }
      const auto [known, fresh] = places.try_emplace(shard.peer, places.size() + 1);
      if (fresh) {
        NodeName(io, shard.peer, OneOf("peers", [&p](const auto& name) { p.add_peers(name); }));
      }
      column.push_back(known->second);
    }
    io.Column(
        column, [](auto& place) -> auto& { return place; }, *p.mutable_peer(), "peer");
  } else {
    std::vector<uint64_t> column(shards.size());
    io.Column(
        column, [](auto& place) -> auto& { return place; }, *p.mutable_peer(), "peer");
    for (size_t i = 0; i < shards.size() && io.ok(); ++i) {
      io.Require(column[i] <= static_cast<uint64_t>(p.peers_size()), "peer",
                 "there is no such one");
      if (io.ok() && column[i] > 0) {
        NodeName(io, shards[i].peer, TakenFrom("peers", p.peers(static_cast<int>(column[i]) - 1)));
      }
    }
  }
}

template <typename Io, typename M>
void PolicyOf(Io& io, M& policy, v1::Policy& p) {
  io.Message(policy, p);
  const absl::Status status = CheckPolicy(policy);
  io.Require(status.ok(), "policy", Message(status));
}

template <typename Io, typename M, typename P>
void DescentOf(Io& io, M& m, P& p) {
  if (!Io::kWriting || !m.descent.empty()) {
    io.Line(m.descent, *p.mutable_descent());
  }
}

template <typename Io, typename M, typename P>
void WantedOf(Io& io, M& m, P& p) {
  if constexpr (Io::kWriting) {
    if (m.wanted) {
      p.set_wanted_attempt(m.wanted->attempt);
      p.set_wanted_step(m.wanted->step);
    }
  } else {
    io.Require(p.has_wanted_attempt() || p.wanted_step() == 0, "wanted_step", "of no attempt");
    if (p.has_wanted_attempt()) {
      m.wanted = CheckpointId{p.wanted_attempt(), p.wanted_step()};
    }
  }
}

template <typename Io, typename Ids, typename Attempts, typename Steps>
void Checkpoints(Io& io, Ids& ids, Attempts& attempts, Steps& steps, std::string_view name) {
  io.BaseColumn(
      ids, 0, kPeerCheckpointsMax, [](auto& id) -> auto& { return id.attempt; }, attempts, name);
  io.Column(
      ids, [](auto& id) -> auto& { return id.step; }, steps, name);
  for (const CheckpointId& id : ids) {
    io.Require(id.attempt != 0, name, "a checkpoint of attempt 0");
  }
}

template <typename Io, typename M, typename P>
void Useful(Io& io, M& m, P& p) {
  Checkpoints(io, m.useful, *p.mutable_useful_attempt(), *p.mutable_useful_step(), "useful");
}

// ---- Agent → coordinator ----

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::JoinAsked& p) {
  io.Any(HF_FIELD(token));
  io.Any(HF_FIELD(connection));
  io.Process(m.caller.process, *p.mutable_process());
  io.Any(HF_FIELD_AS(m.caller.uid, uid));
  io.Any(HF_FIELD_AS(m.caller.gid, gid));
  RankOfWorld(io, m, p);
  io.Text(HF_FIELD(launch));
  io.Require(m.launch.size() <= kLaunchBytesMax, "launch", "it is too long");
  io.Any(HF_FIELD(attempt));
  io.Any(HF_FIELD(leave_attempt));
  io.Any(HF_FIELD(may_wait));
  PolicyOf(io, m.policy, *p.mutable_policy());
  io.Any(HF_FIELD(opening));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::SeatLost& p) {
  TakesPart(io, m, p);
  io.Process(m.process, *p.mutable_process());
  io.Any(HF_FIELD(connection));
  io.Enum(HF_FIELD(how), kHows);
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::SaveAsked& p) {
  io.Any(HF_FIELD(token));
  TakesPart(io, m, p);
  io.Any(HF_FIELD(step));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::RoomAsked& p) {
  io.Any(HF_FIELD(token));
  TakesPart(io, m, p);
  io.Any(HF_FIELD(step));
  Useful(io, m, p);
  io.BaseColumn(
      m.left, 0, kPeerCheckpointsMax, [](auto& left) -> auto& { return left.checkpoint.attempt; },
      *p.mutable_left_attempt(), "left");
  io.Column(
      m.left, [](auto& left) -> auto& { return left.checkpoint.step; }, *p.mutable_left_step(),
      "left");
  io.Column(
      m.left, [](auto& left) -> auto& { return left.rank; }, *p.mutable_left_rank(), "left");
  for (const RoomAsked::Left& left : m.left) {
    io.Require(left.checkpoint.attempt != 0 && left.rank < kWorldSizeMax, "left",
               "a copy of attempt 0, or of no rank");
  }
  io.Any(HF_FIELD(spare_only));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::SpareAsked& p) {
  io.Within(HF_FIELD(stage), 0, static_cast<uint32_t>(EvictionStage::kDraining));
  io.Any(HF_FIELD(token));
  io.Text(HF_FIELD(for_job));
  const absl::Status name = CheckJobName(m.for_job);
  io.Require(name.ok(), "for_job", Message(name));
  Useful(io, m, p);
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::SaveLost& p) {
  TakesPart(io, m, p);
  io.Any(HF_FIELD(step));
  io.Text(HF_FIELD(why));
}

// (Rows of one step; the first one says what all have in common.)
template <typename Io, typename Rows, typename First>
void SealedRows(Io& io, Rows& rows, First& m, v1::ShardsSealed& p) {
  io.Within(HF_FIELD(attempt), 1, kAny);
  io.Any(HF_FIELD(step));
  WorldSize(io, m, p);
  bool time_unsure = !m.time_sure;
  io.Any(HF_FIELD_AS(time_unsure, time_unsure));
  io.BaseColumn(
      rows, 1, kWorldSizeMax, [](auto& row) -> auto& { return row.rank; }, *p.mutable_rank(),
      "rank");
  io.Column(
      rows, [](auto& row) -> auto& { return row.bytes; }, *p.mutable_bytes(), "bytes");
  io.Column(
      rows, [](auto& row) -> auto& { return row.unix_ms; }, *p.mutable_unix_ms(), "unix_ms");
  io.Likenesses(
      rows, [](auto& row) -> auto& { return row.likeness; }, *p.mutable_likeness());
  for (auto& row : rows) {
    if constexpr (!Io::kWriting) {
      row.attempt = m.attempt;
      row.step = m.step;
      row.world_size = m.world_size;
      row.time_sure = !time_unsure;
    }
    io.Require(row.rank < m.world_size, "rank", "it is not below the world size");
    io.Require(row.bytes <= kImageBytesMax, "bytes", "it is larger than an image may be");
  }
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::StopNoticed& p) {
  TakesPart(io, m, p);
  io.Within(HF_FIELD(left_ms), 0, kGraceMsMax);
  io.Optional(HF_FIELD(last), HF_HAS(last));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::NodeLeaving& p) {
  io.Any(HF_FIELD(leaving));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::StepsHeld& p) {
  io.Within(HF_FIELD(attempt), 1, kAny);
  io.Any(HF_FIELD(round));
  io.Optional(HF_FIELD(passed), HF_HAS(passed));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::ShardGood& p) {
  CheckpointOf(io, m.checkpoint, p);
  io.Within(HF_FIELD(rank), 0, kWorldSizeMax - 1);
  io.Tier(HF_FIELD(tier));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::ShardBad& p) {
  CheckpointOf(io, m.checkpoint, p);
  io.Within(HF_FIELD(rank), 0, kWorldSizeMax - 1);
  io.Tier(HF_FIELD(tier));
  io.Text(HF_FIELD(what));
  NodeName(io, HF_FIELD(node));
  io.Any(HF_FIELD(leave));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::AwaitAsked& p) {
  io.Any(HF_FIELD(token));
  TakesPart(io, m, p);
  io.Any(HF_FIELD(step));
  io.ProtoEnum(HF_FIELD(stage), v1::AwaitSave::Stage_IsValid);
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::SessionAsked& p) {
  io.Any(HF_FIELD(token));
  TakesPart(io, m, p);
  io.Process(m.process, *p.mutable_process());
  WantedOf(io, m, p);
  io.Any(HF_FIELD(may_wait));
  io.Any(HF_FIELD(reads_by_itself));
  io.Any(HF_FIELD(may_reshard));
  io.Any(HF_FIELD(reads_parts));
  io.Any(HF_FIELD(deadline_ms));
  io.Text(HF_FIELD(label));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::LoadReported& p) {
  io.Any(HF_FIELD(token));
  TakesPart(io, m, p);
  io.Any(HF_FIELD(session));
  io.Any(HF_FIELD(round));
  io.Any(HF_FIELD(loaded));
  io.Any(HF_FIELD(copy_is_bad));
  io.Any(HF_FIELD(wants_mismatch));
  io.Text(HF_FIELD(problem));
  io.Any(HF_FIELD(shards_are_bad));
  io.Any(HF_FIELD(of_another_run));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::AttachAsked& p) {
  io.Any(HF_FIELD(token));
  io.Any(HF_FIELD(rank));  // (the reader's own: what is wrong with it the coordinator says)
  WantedOf(io, m, p);
  io.Any(HF_FIELD(any_tier));
  io.Any(HF_FIELD(again));
  io.Any(HF_FIELD(parts));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::RecordsAsked& p) {
  io.Any(HF_FIELD(token));
  CheckpointOf(io, m.checkpoint, p);
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::ListAsked& p) {
  io.Any(HF_FIELD(token));
  if constexpr (Io::kWriting) {
    if (m.before) {
      p.set_before_attempt(m.before->attempt);
      p.set_before_step(m.before->step);
    }
  } else {
    io.Require(p.has_before_attempt() || p.before_step() == 0, "before_step", "of no attempt");
    if (p.has_before_attempt()) {
      m.before = CheckpointId{p.before_attempt(), p.before_step()};
    }
  }
  io.Any(HF_FIELD(may_wait));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::RequestExpired& p) {
  io.Any(HF_FIELD(token));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::RequestCancelled& p) {
  io.Any(HF_FIELD(token));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::InventoryState& p) {
  DurableTier(io, HF_FIELD(tier));
  io.Enum(HF_FIELD(kind), kInventoryKinds);
  io.Text(HF_FIELD(why));
}

// Of what only its names tell of, how long its file is stays at its node.
template <typename Io, typename M>
void BadCopy(Io& io, M& m, v1::FoundBad& p) {
  CheckpointId id = m.copy.copy.id.checkpoint();
  Rank rank = m.copy.copy.id.rank;
  std::string location = m.copy.location;
  CheckpointOf(io, id, p);
  io.Within(HF_FIELD_AS(rank, rank), 0, kWorldSizeMax - 1);
  io.Path(HF_FIELD_AS(location, location));
  io.Text(HF_FIELD(what));
  if constexpr (Io::kWriting) {
    if (m.copy.copy.world_size != 0) {
      std::vector<DurableCopy> copy{m.copy};
      copy.front().location.clear();
      io.Copies(copy, *p.mutable_copy());
    }
  } else {
    std::vector<DurableCopy> copies;
    io.Copies(copies, *p.mutable_copy());
    io.Require(copies.size() <= 1, "bad", "there are several");
    if (!copies.empty()) {
      m.copy = copies.front();
      io.Require(m.copy.copy.id.checkpoint() == id && m.copy.copy.id.rank == rank, "bad",
                 "it is another shard");
    } else {
      m.copy.copy.id = {io.header().job, id.attempt, id.step, rank};
      m.copy.copy.job_name = io.header().job_name;
    }
    m.copy.location = location;
  }
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::CopiesFound& p) {
  DurableTier(io, HF_FIELD(tier));
  io.Time(HF_FIELD_AS(m.began, began_age_ms), HF_HAS(began_age_ms));
  io.Time(HF_FIELD_AS(m.as_of, as_of_age_ms), HF_HAS(as_of_age_ms));
  if (!Io::kWriting || !m.copies.empty()) {
    io.Copies(m.copies, *p.mutable_copies());
  }
  Checkpoints(io, m.manifests, *p.mutable_manifest_attempt(), *p.mutable_manifest_step(),
              "manifests");
  io.Any(HF_FIELD(highest_claim));
  if constexpr (Io::kWriting) {
    io.Require(m.bad.size() <= kBadCopiesMax, "bad", "they are too many");
    for (const BadDurableCopy& bad : m.bad) {
      BadCopy(io, bad, *p.add_bad());
    }
  } else {
    io.Require(static_cast<size_t>(p.bad_size()) <= kBadCopiesMax, "bad", "they are too many");
    for (int i = 0; i < p.bad_size() && io.ok(); ++i) {
      BadCopy(io, m.bad.emplace_back(), *p.mutable_bad(i));
    }
  }
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::CopiesAway& p) {
  DurableTier(io, HF_FIELD(tier));
  io.Path(HF_FIELD(dir));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::ShardDrained& p) {
  CheckpointOf(io, m.checkpoint, p);
  io.Within(HF_FIELD(rank), 0, kWorldSizeMax - 1);
  DurableTier(io, HF_FIELD(to));
  io.Tier(HF_FIELD(from));
  io.Status(m.status, HF_HAS(status), HF_MUTABLE(status));
  io.Any(HF_FIELD(source_bad));
  NodeName(io, HF_FIELD(peer));
  io.Any(HF_FIELD(replaced));
  std::vector<DurableCopy> copies;
  if constexpr (Io::kWriting) {
    if (!m.copy.copy.id.job.IsZero()) {
      copies.push_back(m.copy);
      io.Copies(copies, *p.mutable_copy());
    }
  } else {
    io.Copies(copies, *p.mutable_copy());
    if (!copies.empty()) {
      m.copy = copies.front();
    }
  }
  io.Require(copies.size() <= 1, "copy", "there are several");
  io.Require(!copies.empty() || !m.status.ok(), "copy", "none was written, and that is OK");
  const ShardId& id = m.copy.copy.id;
  io.Require(copies.empty() || (id.checkpoint() == m.checkpoint && id.rank == m.rank), "copy",
             "it is another shard");
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::FlushStalled& p) {
  CheckpointOf(io, m.checkpoint, p);
  DurableTier(io, HF_FIELD(to));
  io.Any(HF_FIELD(stalled));
  io.Text(HF_FIELD(what));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::ManifestDone& p) {
  CheckpointOf(io, m.checkpoint, p);
  io.Status(m.status, HF_HAS(status), HF_MUTABLE(status));
  io.BaseColumn(
      m.missing, 0, kWorldSizeMax, [](auto& rank) -> auto& { return rank; },
      *p.mutable_missing_rank(), "missing_rank");
  for (const Rank rank : m.missing) {
    io.Require(rank < kWorldSizeMax, "missing_rank", "a rank is too large");
  }
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::RemovalDone& p) {
  CheckpointOf(io, m.checkpoint, p);
  DurableTier(io, HF_FIELD(tier));
  io.Status(m.status, HF_HAS(status), HF_MUTABLE(status));
  bool tells = m.ranks_left.has_value();
  io.Any(HF_FIELD_AS(tells, tells_ranks_left));
  if constexpr (!Io::kWriting) {
    io.Require(tells || p.rank_left().empty(), "rank_left", "it says that it does not tell them");
    if (tells) {
      m.ranks_left.emplace();
    }
  }
  if (m.ranks_left) {
    io.BaseColumn(
        *m.ranks_left, 0, kWorldSizeMax, [](auto& rank) -> auto& { return rank; },
        *p.mutable_rank_left(), "rank_left");
    for (const Rank rank : *m.ranks_left) {
      io.Require(rank < kWorldSizeMax, "rank_left", "a rank is too large");
    }
  }
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::RemovalStalled& p) {
  CheckpointOf(io, m.checkpoint, p);
  DurableTier(io, HF_FIELD(tier));
  io.Text(HF_FIELD(what));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::MemoryCopyGained& p) {
  CheckpointOf(io, m.checkpoint, p);
  io.Within(HF_FIELD(rank), 0, kWorldSizeMax - 1);
  io.Within(HF_FIELD(bytes), 0, kImageBytesMax);
  io.Any(HF_FIELD(unix_ms));
  std::span<M> row(&m, 1);
  io.Likenesses(
      row, [](auto& its) -> auto& { return its.likeness; }, *p.mutable_likeness());
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::ReplicasDropped& p) {
  CheckpointOf(io, m.checkpoint, p);
  io.BaseColumn(
      m.ranks, 1, kWorldSizeMax, [](auto& rank) -> auto& { return rank; }, *p.mutable_rank(),
      "rank");
  for (const Rank rank : m.ranks) {
    io.Require(rank < kWorldSizeMax, "rank", "it is too large");
  }
  io.Text(HF_FIELD(why));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::FetchFailed& p) {
  io.Any(HF_FIELD(token));
  TakesPart(io, m, p);
  io.Any(HF_FIELD(session));
  io.Any(HF_FIELD(round));
  io.Within(HF_FIELD_AS(m.checkpoint.attempt, fetched_attempt), 1, kAny);
  io.Any(HF_FIELD_AS(m.checkpoint.step, fetched_step));
  DurableTier(io, HF_FIELD(from));
  io.Status(m.status, HF_HAS(status), HF_MUTABLE(status));
  io.Any(HF_FIELD(source_bad));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::PrefetchEnded& p) {
  CheckpointOf(io, m.checkpoint, p);
  io.Within(HF_FIELD(rank), 0, kWorldSizeMax - 1);
  DurableTier(io, HF_FIELD(from));
  io.Status(m.status, HF_HAS(status), HF_MUTABLE(status));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::DurableRoomAsked& p) {
  DurableTier(io, HF_FIELD(tier));
  io.Any(HF_FIELD(bytes));
  io.Within(HF_FIELD(stage), 0, static_cast<uint32_t>(RoomStage::kEndedJobs));
  io.Any(HF_FIELD(for_another));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::FetchRoomAsked& p) {
  io.Any(HF_FIELD(token));
  io.Within(HF_FIELD_AS(m.fetched.attempt, fetched_attempt), 1, kAny);
  io.Any(HF_FIELD_AS(m.fetched.step, fetched_step));
  Useful(io, m, p);
}

// By its fields `pid` and `start_ticks`.
template <typename Io, typename M, typename P>
void ProcessOf(Io& io, M& m, P& p) {
  v1::Process process;
  process.set_pid(p.pid());
  process.set_start_ticks(p.start_ticks());
  io.Process(m.process, process);
  p.set_pid(process.pid());
  p.set_start_ticks(process.start_ticks());
}

template <typename Io, typename M>
void SeatFields(Io& io, M& m, v1::NodeArrived::Seat& p) {
  TakesPart(io, m, p);
  ProcessOf(io, m, p);
  io.Any(HF_FIELD(connection));
  std::vector<Step> writing(m.writing.begin(), m.writing.end());
  io.BaseColumn(
      writing, 0, kPeerOpenStepsMax, [](auto& step) -> auto& { return step; }, *p.mutable_writing(),
      "writing");
  for (size_t i = 1; i < writing.size(); ++i) {
    io.Require(writing[i - 1] < writing[i], "writing", "the steps do not ascend");
  }
  if constexpr (!Io::kWriting) {
    m.writing.insert(writing.begin(), writing.end());
  }
  io.Optional(HF_FIELD(last_begun), HF_HAS(last_begun));
}

template <typename Io, typename M>
void LabelsOf(Io& io, M& m, v1::NodeArrived& p) {
  constexpr std::string_view kTooManyLabels = "there are too many";
  if constexpr (Io::kWriting) {
    io.Require(m.labels.size() <= kNodeLabelsMax, "labels", kTooManyLabels);
    for (const NodeLabel& label : m.labels) {
      v1::Label& out = *p.add_labels();
      NodeName(io, label.name, OneOf("labels", [&out](const auto& text) { out.set_name(text); }));
      NodeName(io, label.value, OneOf("labels", [&out](const auto& text) { out.set_value(text); }));
    }
  } else {
    io.Require(static_cast<size_t>(p.labels_size()) <= kNodeLabelsMax, "labels", kTooManyLabels);
    for (int i = 0; i < p.labels_size() && io.ok(); ++i) {
      NodeLabel& label = m.labels.emplace_back();
      NodeName(io, label.name, TakenFrom("labels", p.labels(i).name()));
      NodeName(io, label.value, TakenFrom("labels", p.labels(i).value()));
    }
  }
}

template <typename Io, typename M>
void JoiningFields(Io& io, M& m, v1::NodeArrived::Joining& p) {
  io.Within(HF_FIELD(rank), 0, kWorldSizeMax - 1);
  ProcessOf(io, m, p);
}

template <typename Io, typename M>
void JoiningOf(Io& io, M& m, v1::NodeArrived& p) {
  constexpr std::string_view kTooMany = "there are too many";
  if constexpr (Io::kWriting) {
    io.Require(m.joining.size() <= kSeatsMax, "joining", kTooMany);
    for (const NodeArrived::Joining& joining : m.joining) {
      JoiningFields(io, joining, *p.add_joining());
    }
  } else {
    io.Require(static_cast<size_t>(p.joining_size()) <= kSeatsMax, "joining", kTooMany);
    for (int i = 0; i < p.joining_size() && io.ok(); ++i) {
      JoiningFields(io, m.joining.emplace_back(), *p.mutable_joining(i));
    }
  }
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::NodeArrived& p) {
  if (!Io::kWriting || !m.shards.empty()) {
    io.Shards(m.shards, *p.mutable_shards());
  }
  io.Any(HF_FIELD(lends_bytes));
  LabelsOf(io, m, p);
  JoiningOf(io, m, p);
  io.Any(HF_FIELD(reads_remote));
  io.Any(HF_FIELD(leaving));
  if constexpr (Io::kWriting) {
    io.Require(m.seats.size() <= kSeatsMax, "seats", "there are too many");
    for (const NodeArrived::Seat& seat : m.seats) {
      SeatFields(io, seat, *p.add_seats());
    }
  } else {
    io.Require(static_cast<size_t>(p.seats_size()) <= kSeatsMax, "seats", "there are too many");
    for (v1::NodeArrived::Seat& seat : *p.mutable_seats()) {
      if (!io.ok()) {
        return;
      }
      SeatFields(io, m.seats.emplace_back(), seat);
    }
  }
}

// (Texts of requests are the user's: the coordinator says what is wrong with them.)
template <typename Request>
void CutRequest(Request& request) {
  if constexpr (requires { request.job(); }) {
    request.set_job(peer_internal::MendText(request.job()));
  }
}

template <typename Io, typename Request, typename P>
void RequestOf(Io& io, Request& request, P& p) {
  io.Message(request, p);
  if constexpr (Io::kWriting) {
    CutRequest(p);
  } else {
    io.Require(request.job().size() <= kPeerTextBytesMax, "request.job", "it is too long");
  }
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::RestorePointAsked& p) {
  io.Any(HF_FIELD(token));
  RequestOf(io, m.request, *p.mutable_request());
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::PinAsked& p) {
  io.Any(HF_FIELD(token));
  RequestOf(io, m.request, *p.mutable_request());
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::RepairAsked& p) {
  io.Any(HF_FIELD(token));
  RequestOf(io, m.request, *p.mutable_request());
  if constexpr (Io::kWriting) {
    p.mutable_request()->set_tier(peer_internal::MendText(m.request.tier()));
  } else {
    io.Require(m.request.tier().size() <= kPeerTextBytesMax, "request.tier", "it is too long");
  }
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::ReplaceAsked& p) {
  io.Any(HF_FIELD(token));
  RequestOf(io, m.request, *p.mutable_request());
  if constexpr (Io::kWriting) {
    p.mutable_request()->set_node(peer_internal::MendText(m.request.node()));
    p.mutable_request()->set_with(peer_internal::MendText(m.request.with()));
  } else {
    io.Require(m.request.node().size() <= kPeerTextBytesMax, "request.node", "it is too long");
    io.Require(m.request.with().size() <= kPeerTextBytesMax, "request.with", "it is too long");
  }
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::RemoveCheckpointAsked& p) {
  io.Any(HF_FIELD(token));
  RequestOf(io, m.request, *p.mutable_request());
  if constexpr (Io::kWriting) {
    p.mutable_request()->set_tier(peer_internal::MendText(m.request.tier()));
  } else {
    io.Require(m.request.tier().size() <= kPeerTextBytesMax, "request.tier", "it is too long");
  }
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::SetPolicyAsked& p) {
  io.Any(HF_FIELD(token));
  PolicyOf(io, m.policy, *p.mutable_policy());
  io.Text(HF_FIELD(text));
}

template <typename Io, typename M>
void Fields(Io&, M&, v1::CollectGarbageAsked&) {}

// ---- Coordinator → agent ----

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::Refused& p) {
  io.Any(HF_FIELD(token));
  io.FailureOf(m.failure, *p.mutable_failure());
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::JoinAccepted& p) {
  io.Any(HF_FIELD(token));
  io.Within(HF_FIELD(attempt), 1, kAny);
  RankOfWorld(io, m, p);
  io.Any(HF_FIELD(decided));
  DescentOf(io, m, p);
  io.Optional(HF_FIELD(last_step), HF_HAS(last_step));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::SavePermitted& p) {
  io.Any(HF_FIELD(token));
  DescentOf(io, m, p);
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::RoomAnswered& p) {
  io.Any(HF_FIELD(token));
  io.Any(HF_FIELD(made));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::StageReached& p) {
  io.Any(HF_FIELD(token));
  io.ProtoEnum(HF_FIELD(stage), v1::AwaitSave::Stage_IsValid);
  io.Any(HF_FIELD(unix_ms));
}

template <typename Io, typename Readers>
void ReadersOf(Io& io, Readers& readers, v1::SourceOffered& p) {
  constexpr std::string_view kTooMany = "there are too many";
  if constexpr (Io::kWriting) {
    io.Require(readers.size() <= kRemoteReadersMax, "readers", kTooMany);
    for (const RemoteReader& reader : readers) {
      v1::SourceOffered::Reader& out = *p.add_readers();
      NodeName(io, reader.node, OneOf("readers", [&out](const auto& n) { out.set_node(n); }));
      RunsInto(reader.ranks, out);
    }
  } else {
    io.Require(static_cast<size_t>(p.readers_size()) <= kRemoteReadersMax, "readers", kTooMany);
    for (int i = 0; i < p.readers_size() && io.ok(); ++i) {
      RemoteReader& reader = readers.emplace_back();
      NodeName(io, reader.node, TakenFrom("readers", p.readers(i).node()));
      RunsFrom(io, "readers", p.readers(i), reader.ranks);
    }
  }
}

template <typename Io, typename Peers, typename P>
void PeersOf(Io& io, Peers& peers, P& p) {
  constexpr std::string_view kTooMany = "there are too many";
  if constexpr (Io::kWriting) {
    io.Require(peers.size() <= kPeersNamedMax, "peers", kTooMany);
    for (const std::string& peer : peers) {
      NodeName(io, peer, OneOf("peers", [&p](const auto& name) { p.add_peers(name); }));
    }
  } else {
    io.Require(static_cast<size_t>(p.peers_size()) <= kPeersNamedMax, "peers", kTooMany);
    for (int i = 0; i < p.peers_size() && io.ok(); ++i) {
      NodeName(io, peers.emplace_back(), TakenFrom("peers", p.peers(i)));
    }
  }
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::SourceOffered& p) {
  io.Any(HF_FIELD(token));
  TakesPart(io, m, p);
  io.Any(HF_FIELD(session));
  io.Any(HF_FIELD(round));
  io.Within(HF_FIELD_AS(m.checkpoint.attempt, offered_attempt), 1, kAny);
  io.Any(HF_FIELD_AS(m.checkpoint.step, offered_step));
  io.Tier(HF_FIELD(from));
  io.Text(HF_FIELD(why));
  io.Within(HF_FIELD(bytes), 0, kImageBytesMax);
  PeersOf(io, m.peers, p);
  ReadersOf(io, m.readers, p);
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::StepOffered& p) {
  io.Any(HF_FIELD(token));
  TakesPart(io, m, p);
  io.Any(HF_FIELD(session));
  io.Any(HF_FIELD(round));
  io.Within(HF_FIELD_AS(m.checkpoint.attempt, offered_attempt), 1, kAny);
  io.Any(HF_FIELD_AS(m.checkpoint.step, offered_step));
  WorldSize(io, m, p);
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::SessionEnded& p) {
  io.Any(HF_FIELD(token));
  io.Any(HF_FIELD(session));
  io.Any(HF_FIELD(round));
  io.Any(HF_FIELD_AS(m.checkpoint.attempt, attempt));
  io.Any(HF_FIELD_AS(m.checkpoint.step, step));
  DescentOf(io, m, p);
  io.Text(HF_FIELD(passed_over));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::ShardLocated& p) {
  io.Any(HF_FIELD(token));
  CheckpointOf(io, m.checkpoint, p);
  WorldSize(io, m, p);
  io.Text(HF_FIELD(elsewhere));
  if constexpr (Io::kWriting) {
    for (const ShardLocated::Place& place : m.places) {
      v1::ShardLocated::Place& added = *p.add_places();
      added.set_tier(io.WireOf(place.tier, "places"));
      added.set_why_not(peer_internal::MendText(place.why_not));
    }
  } else {
    io.Require(static_cast<size_t>(p.places_size()) <= kTierKinds, "places", "there are too many");
    for (int i = 0; i < p.places_size() && io.ok(); ++i) {
      io.Require(p.places(i).why_not().size() <= kPeerTextBytesMax, "why_not", "it is too long");
      m.places.push_back({io.TierOf(p.places(i).tier(), "places"), p.places(i).why_not()});
    }
  }
  TierSet tiers = 0;
  for (const ShardLocated::Place& place : m.places) {
    io.Require((tiers & SetOf(place.tier)) == 0, "places", "a tier is there twice");
    tiers |= SetOf(place.tier);
  }
  PeersOf(io, m.peers, p);
  NodeName(io, HF_FIELD(remote_reader));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::RecordsLocated& p) {
  io.Any(HF_FIELD(token));
  CheckpointOf(io, m.checkpoint, p);
  WorldSize(io, m, p);
  if constexpr (Io::kWriting) {
    for (const RecordsLocated::Holder& holder : m.holders) {
      NodeName(io, holder.node, OneOf("node", [&p](const auto& name) { p.add_node(name); }));
      p.add_remote(holder.remote ? 1 : 0);
    }
    for (const RecordsLocated::Run& run : m.runs) {
      p.add_holder(run.holder);
      p.add_count(run.count);
    }
  } else {
    io.Require(p.remote_size() == p.node_size() && p.count_size() == p.holder_size(), "holder",
               "columns of different lengths");
    for (int i = 0; i < p.node_size() && io.ok(); ++i) {
      RecordsLocated::Holder& holder = m.holders.emplace_back();
      NodeName(io, holder.node, TakenFrom("node", p.node(i)));
      holder.remote = p.remote(i) != 0;
    }
    for (int i = 0; i < p.holder_size() && io.ok(); ++i) {
      m.runs.push_back({p.holder(i), p.count(i)});
    }
  }
  uint64_t ranks = 0;
  for (const RecordsLocated::Run& run : m.runs) {
    io.Require(run.count > 0 && run.holder <= m.holders.size(), "holder",
               "a run of no ranks, or of a holder that there is not");
    ranks += run.count;
  }
  io.Require(ranks <= m.world_size, "count", "there are more ranks than the step has");
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::Listed& p) {
  io.Any(HF_FIELD(token));
  io.Message(m.listing, *p.mutable_listing());
  if constexpr (Io::kWriting) {
    p.mutable_listing()->set_unread(peer_internal::MendText(m.listing.unread()));
  } else {
    io.Require(m.listing.unread().size() <= kPeerTextBytesMax, "unread", "it is too long");
  }
  io.Require(static_cast<size_t>(m.listing.checkpoints_size()) <= kListedMax, "checkpoints",
             "there are too many");
  for (const v1::ListedCheckpoint& each : m.listing.checkpoints()) {
    io.Require(each.attempt() != 0, "checkpoints", "one is of attempt 0");
    io.Require(static_cast<size_t>(each.tiers_size()) <= kTierKinds, "tiers", "there are too many");
    for (const std::string& tier : each.tiers()) {
      const bool known = std::any_of(kAllTiers.begin(), kAllTiers.end(),
                                     [&](TierKind one) { return tier == TierName(one); });
      io.Require(known, "tiers", "one is unknown");
    }
  }
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::GiveUp& p) {
  CheckpointOf(io, m.checkpoint, p);
  io.FailureOf(m.failure, *p.mutable_failure());
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::HoldSteps& p) {
  io.Within(HF_FIELD(attempt), 1, kAny);
  io.Any(HF_FIELD(round));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::LastStepChosen& p) {
  io.Within(HF_FIELD(attempt), 1, kAny);
  io.Any(HF_FIELD(step));
  io.Within(HF_FIELD(left_ms), 0, kGraceMsMax);
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::CopyUnneeded& p) {
  CheckpointOf(io, m.checkpoint, p);
  io.Within(HF_FIELD(rank), 0, kWorldSizeMax - 1);
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::Superseded& p) {
  io.Within(HF_FIELD(by), 1, kAny);
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::CopyDoubted& p) {
  CheckpointOf(io, m.checkpoint, p);
  io.Within(HF_FIELD(rank), 0, kWorldSizeMax - 1);
}

template <typename Io>
void CheckState(Io& io, const PeerHeader& header, const v1::JobState& state) {
  io.Require(state.job_uuid() == header.job.ToBytes(), "state.job_uuid", "of another job");
  io.Require(state.name() == header.job_name, "state.name", "of another job");
  io.Require(state.epoch() <= kEpochMax && state.highest_epoch() <= kEpochMax, "state.epoch",
             "it is larger than any");
  io.Require(state.boot_id().size() <= kPeerTextBytesMax, "state.boot_id", "it is too long");
  io.Require(state.attempts_size() <= static_cast<int>(kDescentMax), "state.attempts",
             "there are too many");
  for (const v1::AttemptState& a : state.attempts()) {
    io.Require(a.attempt() != 0 && a.world_size() != 0 && a.world_size() <= kWorldSizeMax &&
                   a.parent_attempt() < a.attempt(),
               "state.attempts", "one contradicts itself");
    io.Require(a.launch().size() <= kLaunchBytesMax, "state.attempts", "a launch id is too long");
  }
  for (const v1::MemberState& m : state.members()) {
    io.Require(m.rank() < kWorldSizeMax && m.process().pid() >= 0, "state.members",
               "one has no rank, or is no process");
  }
  const absl::Status nodes = CheckNodeRanges(state.nodes());
  io.Require(nodes.ok(), "state.nodes", Message(nodes));
  io.Require(state.writer().size() <= kPeerTextBytesMax, "state.writer", "it is too long");
  io.Require(state.removed_before_size() <= static_cast<int>(kRemovedBeforeMax),
             "state.removed_before", "there are too many");
  for (const std::string& uuid : state.removed_before()) {
    io.Require(JobUuid::FromBytes(uuid).ok(), "state.removed_before", "one is no uuid");
  }
  io.Require(state.pins_size() <= static_cast<int>(kPeerCheckpointsMax), "state.pins",
             "there are too many");
  for (const v1::Policy* policy : {&state.policy(), &state.policy_set()}) {
    const absl::Status status = CheckPolicy(*policy);
    io.Require(status.ok(), "state.policy", Message(status));
  }
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::PersistState& p) {
  io.Message(m.state, *p.mutable_state());
  io.Any(HF_FIELD(on_disk));
  CheckState(io, io.header(), m.state);
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::RestorePointSet& p) {
  io.Any(HF_FIELD(token));
  io.Text(HF_FIELD(text));
}

// Shards of one checkpoint, and the tier that each is read from.
template <typename Io, typename M, typename P>
void Sources(Io& io, M& m, P& p) {
  io.BaseColumn(
      m.shards, 0, kWorldSizeMax, [](auto& shard) -> auto& { return shard.rank; },
      *p.mutable_rank(), "rank");
  io.Column(
      m.shards, [](auto& shard) -> auto& { return shard.bytes; }, *p.mutable_bytes(), "bytes");
  if constexpr (Io::kWriting) {
    for (const auto& shard : m.shards) {
      p.add_from(io.WireOf(shard.from, "from"));
    }
  } else {
    io.Require(static_cast<size_t>(p.from_size()) == m.shards.size(), "from",
               "it has not as many entries as there are rows");
    for (size_t i = 0; i < m.shards.size() && io.ok(); ++i) {
      m.shards[i].from = io.TierOf(p.from(static_cast<int>(i)), "from");
    }
  }
  for (const auto& shard : m.shards) {
    io.Require(shard.rank < m.world_size, "rank", "it is not below the world size");
    io.Require(shard.bytes <= kImageBytesMax, "bytes", "it is larger than an image may be");
  }
  PeerOfEach(io, m.shards, p);
}

// (What the runs say the agent judges.)
template <typename Io, typename M>
void GroupsOf(Io& io, M& m, v1::FlushWanted& p) {
  io.Column(
      m.shards, [](auto& shard) -> auto& { return shard.group; }, *p.mutable_group(), "group");
  constexpr std::string_view kTooManyGroups = "they are more than its shards";
  if constexpr (Io::kWriting) {
    io.Require(m.groups.size() <= m.shards.size(), "groups", kTooManyGroups);
    for (const FlushWanted::Group& group : m.groups) {
      v1::FlushWanted::Group& out = *p.add_groups();
      out.set_content(group.content.data(), group.content.size());
      RunsInto(group.ranks, out);
    }
  } else {
    io.Require(static_cast<size_t>(p.groups_size()) <= m.shards.size(), "groups", kTooManyGroups);
    for (int i = 0; i < p.groups_size() && io.ok(); ++i) {
      const v1::FlushWanted::Group& in = p.groups(i);
      FlushWanted::Group& group = m.groups.emplace_back();
      io.Require(in.content().size() == group.content.size(), "groups",
                 "one has another hash than of 16 bytes");
      RunsFrom(io, "groups", in, group.ranks);
      if (io.ok()) {
        std::copy(in.content().begin(), in.content().end(),
                  reinterpret_cast<char*>(group.content.data()));
      }
    }
  }
  for (const auto& shard : m.shards) {
    io.Require(shard.group <= m.groups.size(), "group", "there is no such group");
  }
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::FlushWanted& p) {
  CheckpointOf(io, m.checkpoint, p);
  DurableTier(io, HF_FIELD(to));
  WorldSize(io, m, p);
  io.Any(HF_FIELD(opening));
  io.ProtoEnum(HF_FIELD(verify), v1::TierPolicy::Verify_IsValid);
  Sources(io, m, p);
  GroupsOf(io, m, p);
  io.Within(HF_FIELD(zstd_level), 0, kZstdLevelMax);
  io.Within(HF_FIELD(zstd_threads), 0, kZstdThreadsMax);
  io.Any(HF_FIELD(replace));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::FlushUnwanted& p) {
  CheckpointOf(io, m.checkpoint, p);
  DurableTier(io, HF_FIELD(to));
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::ManifestWanted& p) {
  CheckpointOf(io, m.checkpoint, p);
  WorldSize(io, m, p);
  io.Any(HF_FIELD(opening));
  DescentOf(io, m, p);
  if (!Io::kWriting || !m.shards.empty()) {
    io.Copies(m.shards, *p.mutable_shards());
  }
  for (const DurableCopy& shard : m.shards) {
    io.Require(shard.copy.id.checkpoint() == m.checkpoint, "shards", "one is of another step");
  }
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::RemovalWanted& p) {
  CheckpointOf(io, m.checkpoint, p);
  DurableTier(io, HF_FIELD(tier));
  WorldSize(io, m, p);
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::PrefetchWanted& p) {
  CheckpointOf(io, m.checkpoint, p);
  WorldSize(io, m, p);
  Sources(io, m, p);
  for (const PrefetchWanted::Shard& shard : m.shards) {
    io.Require(shard.from != TierKind::kMemory, "from", "memory is not a durable tier");
  }
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::PrefetchUnwanted& p) {
  CheckpointOf(io, m.checkpoint, p);
}

template <typename Io, typename T, typename P>
void ReplyOf(Io& io, T& reply, P& p) {
  io.Message(reply, p);
  if constexpr (Io::kWriting) {
    p.set_text(peer_internal::MendText(p.text()));
  } else {
    io.Require(reply.text().size() <= kPeerTextBytesMax, "reply.text", "it is too long");
  }
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::AdminAnswered& p) {
  io.Any(HF_FIELD(token));
  if constexpr (Io::kWriting) {
    if (const auto* pin = std::get_if<v1::PinReply>(&m.reply)) {
      ReplyOf(io, *pin, *p.mutable_pin());
    } else if (const auto* removed = std::get_if<v1::RemoveCheckpointReply>(&m.reply)) {
      ReplyOf(io, *removed, *p.mutable_remove_checkpoint());
    } else if (const auto* replaced = std::get_if<v1::ReplaceReply>(&m.reply)) {
      ReplyOf(io, *replaced, *p.mutable_replace());
    } else if (const auto* repair = std::get_if<v1::RepairReply>(&m.reply)) {
      io.Message(*repair, *p.mutable_repair());
    } else {
      ReplyOf(io, std::get<v1::SetOptionsReply>(m.reply), *p.mutable_set_options());
    }
  } else {
    switch (p.reply_case()) {
      case v1::AdminAnswered::kPin:
        return ReplyOf(io, m.reply.template emplace<v1::PinReply>(), *p.mutable_pin());
      case v1::AdminAnswered::kRemoveCheckpoint:
        return ReplyOf(io, m.reply.template emplace<v1::RemoveCheckpointReply>(),
                       *p.mutable_remove_checkpoint());
      case v1::AdminAnswered::kReplace:
        return ReplyOf(io, m.reply.template emplace<v1::ReplaceReply>(), *p.mutable_replace());
      case v1::AdminAnswered::kRepair:
        return io.Message(m.reply.template emplace<v1::RepairReply>(), *p.mutable_repair());
      case v1::AdminAnswered::kSetOptions:
        return ReplyOf(io, m.reply.template emplace<v1::SetOptionsReply>(),
                       *p.mutable_set_options());
      case v1::AdminAnswered::REPLY_NOT_SET:
        return io.Require(false, "reply", "there is none that this version knows");
    }
  }
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::Reported& p) {
  io.Enum(HF_FIELD_AS(m.report.kind, kind), kReportKinds);
  io.Text(HF_FIELD_AS(m.report.job, job));
  io.Text(HF_FIELD_AS(m.report.text, text));
  io.Any(HF_FIELD_AS(m.report.bytes, bytes));
  io.Tier(HF_FIELD_AS(m.report.tier, tier));
}

template <typename Io, typename M>
void Fields(Io&, M&, v1::StateAsked&) {}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::StateTold& p) {
  io.Within(HF_FIELD(highest_epoch), 0, kEpochMax);
  if constexpr (Io::kWriting) {
    if (m.state) {
      io.Message(*m.state, *p.mutable_state());
    }
  } else if (p.has_state()) {
    io.Message(m.state.emplace(), *p.mutable_state());
  }
  if (m.state) {
    CheckState(io, io.header(), *m.state);
  }
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::JobHosted& p) {
  io.Any(HF_FIELD(uid));
  io.Any(HF_FIELD(gid));
  io.Any(HF_FIELD(attempt));
  io.Within(HF_FIELD(world_size), 0, kWorldSizeMax);
  io.Require(!io.header().job.IsZero(), "job_uuid", "there is none");
  io.BaseColumn(
      m.ranks, 0, kWorldSizeMax, [](auto& one) -> auto& { return one.rank; }, *p.mutable_rank(),
      "rank");
  io.Column(
      m.ranks, [](auto& one) -> auto& { return one.pid; }, *p.mutable_pid(), "pid");
  io.Column(
      m.ranks, [](auto& one) -> auto& { return one.start_ticks; }, *p.mutable_start_ticks(),
      "start_ticks");
  for (const JobHosted::LocalRank& one : m.ranks) {
    io.Require(one.rank < m.world_size, "rank", "it is not below the world size");
    io.Require(one.pid > 0, "pid", "it is no process");
  }
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::JobSought& p) {
  io.Any(HF_FIELD(uid));
  io.Any(HF_FIELD(gid));
  io.Any(HF_FIELD(reads));
  io.Any(HF_FIELD(wait_ms));
}

template <typename Io, typename M>
void Fields(Io&, M&, v1::JobAbsent&) {}

// The job itself, not the one that the name has now.
template <typename Io>
void NamedJob(Io& io, JobUuid& job, const std::string& bytes) {
  const absl::StatusOr<JobUuid> uuid = JobUuid::FromBytes(bytes);
  const bool good = uuid.ok() && !uuid->IsZero();
  io.Require(good, "job_uuid", "it is not a job's 16 bytes");
  job = good ? *uuid : JobUuid();
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::JobsRemoved& p) {
  const size_t count = Io::kWriting ? m.jobs.size() : static_cast<size_t>(p.job_uuid_size());
  io.Require(count > 0 && count <= kRemovedBeforeMax, "job_uuid", "there are none, or too many");
  if constexpr (Io::kWriting) {
    for (const JobUuid& job : m.jobs) {
      p.add_job_uuid(job.ToBytes());
    }
  } else if (io.ok()) {
    for (const std::string& bytes : p.job_uuid()) {
      NamedJob(io, m.jobs.emplace_back(), bytes);
    }
  }
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::JobLetGo& p) {
  if constexpr (Io::kWriting) {
    p.set_job_uuid(m.job.ToBytes());
  } else {
    NamedJob(io, m.job, p.job_uuid());
  }
  io.Any(HF_FIELD(bytes));
  io.Status(
      m.status, [&p] { return p.has_failure(); }, [&p] { return p.mutable_failure(); });
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::StateKept& p) {
  io.Message(m.state, *p.mutable_state());
  CheckState(io, io.header(), m.state);
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::AdminForwarded& p) {
  io.Any(HF_FIELD(token));
  io.Any(HF_FIELD(uid));
  io.Any(HF_FIELD(gid));
  if constexpr (Io::kWriting) {
#define HF_SAY(T, field)                                               \
  if (const auto* request = std::get_if<v1::T##Request>(&m.request)) { \
    *p.mutable_##field() = *request;                                   \
    CutRequest(*p.mutable_##field());                                  \
  }
    HF_PEER_ADMIN(HF_SAY)
#undef HF_SAY
  } else {
    switch (p.request_case()) {
#define HF_TAKE(T, field)                        \
  case v1::AdminForwarded::k##T:                 \
    m.request = std::move(*p.mutable_##field()); \
    return;
      HF_PEER_ADMIN(HF_TAKE)
#undef HF_TAKE
      case v1::AdminForwarded::REQUEST_NOT_SET:
        return io.Require(false, "request", "there is none that this version knows");
    }
  }
}

template <typename Io, typename M>
void Fields(Io& io, M& m, v1::AdminReturned& p) {
  io.Any(HF_FIELD(token));
  io.Status(
      m.status, [&p] { return p.has_failure(); }, [&p] { return p.mutable_failure(); });
  if constexpr (Io::kWriting) {
#define HF_SAY(T, field)                                         \
  if (const auto* reply = std::get_if<v1::T##Reply>(&m.reply)) { \
    *p.mutable_##field() = *reply;                               \
    MakeUtf8(*p.mutable_##field());                              \
  }
    HF_PEER_ADMIN(HF_SAY)
#undef HF_SAY
  } else {
    switch (p.reply_case()) {
#define HF_TAKE(T, field)                      \
  case v1::AdminReturned::k##T:                \
    m.reply = std::move(*p.mutable_##field()); \
    return;
      HF_PEER_ADMIN(HF_TAKE)
#undef HF_TAKE
      case v1::AdminReturned::REPLY_NOT_SET:
        return io.Require(!m.status.ok(), "reply", "there is none that this version knows");
    }
  }
}

// ---- The whole ----

// Which messages need the job's name.
template <typename T>
constexpr bool kNeedsName =
    std::is_same_v<T, JoinAsked> || std::is_same_v<T, JoinAccepted> ||
    std::is_same_v<T, NodeArrived> || std::is_same_v<T, CopiesFound> ||
    std::is_same_v<T, ShardDrained> || std::is_same_v<T, PersistState> ||
    std::is_same_v<T, FlushWanted> || std::is_same_v<T, ManifestWanted> ||
    std::is_same_v<T, RemovalWanted> || std::is_same_v<T, StateAsked> ||
    std::is_same_v<T, StateTold> || std::is_same_v<T, JobHosted> || std::is_same_v<T, JobSought> ||
    std::is_same_v<T, JobAbsent> || std::is_same_v<T, JobsRemoved> || std::is_same_v<T, JobLetGo> ||
    std::is_same_v<T, StateKept>;

// Of nodes, not of a job.
template <typename T>
constexpr bool kNeedsNoJob = std::is_same_v<T, AdminForwarded> || std::is_same_v<T, AdminReturned>;

absl::Status CheckHeader(const PeerHeader& header, bool needs_name, bool needs_job = true) {
  if (needs_job && header.job.IsZero() && header.job_name.empty()) {
    return absl::InvalidArgumentError("peer message: it names no job");
  }
  if (header.epoch > kEpochMax) {
    return absl::InvalidArgumentError("peer message: epoch: it is larger than any");
  }
  if (needs_name || !header.job_name.empty()) {
    if (const absl::Status name = CheckJobName(header.job_name); !name.ok()) {
      return Annotate(name, "peer message: job_name");
    }
  }
  return absl::OkStatus();
}

template <typename T>
constexpr bool kCrosses = false;
#define HF_CROSSES(T, field) \
  template <>                \
  constexpr bool kCrosses<T> = true;
HF_PEER_TO_COORDINATOR(HF_CROSSES)
HF_PEER_TO_AGENT(HF_CROSSES)
HF_PEER_TO_NODE(HF_CROSSES)
#undef HF_CROSSES

#define HF_BODY(T, field)                       \
  v1::T& BodyOf(v1::PeerMessage& p, const T&) { \
    return *p.mutable_##field();                \
  }
HF_PEER_TO_COORDINATOR(HF_BODY)
HF_PEER_TO_AGENT(HF_BODY)
HF_PEER_TO_NODE(HF_BODY)
#undef HF_BODY

// What stays on its node.
std::string NameOf(const StateWritten&) {
  return "StateWritten";
}
std::string NameOf(const WakeUp&) {
  return "WakeUp";
}
std::string NameOf(const JobRemoved&) {
  return "JobRemoved";
}
std::string NameOf(const RemovalAgreed&) {
  return "RemovalAgreed";
}
std::string NameOf(const NodeLeft&) {
  return "NodeLeft";
}

absl::StatusOr<std::string> Finish(const PeerHeader& header, bool needs_name, v1::PeerMessage& p,
                                   bool needs_job = true) {
  HF_RETURN_IF_ERROR(CheckHeader(header, needs_name, needs_job));
  if (needs_name || header.job.IsZero()) {
    p.set_job_name(header.job_name);
  }
  if (!header.job.IsZero()) {
    p.set_job_uuid(header.job.ToBytes());
  }
  p.set_epoch(header.epoch);
  std::string bytes;
  if (!p.SerializeToString(&bytes) || bytes.size() > kPeerMessageBytesMax) {
    return absl::ResourceExhaustedError(
        absl::StrCat("encode peer message of job '", header.job_name, "': it has ",
                     p.ByteSizeLong(), " bytes, at most ", kPeerMessageBytesMax, " are allowed"));
  }
  if (bytes.size() > kPeerPartsMax) {  // fewer bytes are fewer parts
    if (const absl::Status parts = peer_internal::Prescan(bytes); !parts.ok()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("encode peer message of job '", header.job_name, "': ", Message(parts)));
    }
  }
  return bytes;
}

template <typename T>
absl::StatusOr<std::string> EncodeOne(const PeerHeader& header, const T& message, EventTime now) {
  if constexpr (!kCrosses<T>) {
    return absl::InternalError(
        absl::StrCat("encode peer message: ", NameOf(message), " never leaves its node"));
  } else {
    v1::PeerMessage p;
    auto& body = BodyOf(p, message);
    Writer io(body.GetDescriptor()->name(), header, now);
    Fields(io, message, body);
    HF_RETURN_IF_ERROR(io.status());
    return Finish(header, kNeedsName<T>, p, !kNeedsNoJob<T>);
  }
}

absl::StatusOr<std::string> EncodeSealed(const PeerHeader& header,
                                         const std::vector<ShardSealed>& rows) {
  v1::PeerMessage p;
  Writer io("ShardsSealed", header, {});
  SealedRows(io, rows, rows.front(), *p.mutable_shards_sealed());
  HF_RETURN_IF_ERROR(io.status());
  return Finish(header, false, p);
}

bool OfOneMessage(const ShardSealed& a, const ShardSealed& b) {
  return a.attempt == b.attempt && a.step == b.step && a.world_size == b.world_size &&
         a.time_sure == b.time_sure;
}

template <typename T, typename P>
absl::StatusOr<T> DecodeBody(P& body, const PeerHeader& header, const PeerContext& context) {
  HF_RETURN_IF_ERROR(CheckHeader(header, kNeedsName<T>, !kNeedsNoJob<T>));
  T message;
  Reader io(body.GetDescriptor()->name(), header, context);
  Fields(io, message, body);
  HF_RETURN_IF_ERROR(io.status());
  return message;
}

absl::Status UnknownBody(const v1::PeerMessage& p) {
  const google::protobuf::UnknownFieldSet& unknown = p.GetReflection()->GetUnknownFields(p);
  return absl::InvalidArgumentError(
      unknown.empty()
          ? "peer message: body: there is none"
          : absl::StrCat("peer message: body: field ", unknown.field(0).number(),
                         " is unknown: the other ckptd is of a newer version, use the same one"));
}

absl::Status DecodeMessages(v1::PeerMessage& p, const PeerContext& context, PeerSaid& said) {
  switch (p.body_case()) {
#define HF_TO_COORDINATOR(T, field)                                                            \
  case v1::PeerMessage::k##T: {                                                                \
    HF_ASSIGN_OR_RETURN(T message, DecodeBody<T>(*p.mutable_##field(), said.header, context)); \
    said.messages.emplace<std::vector<ToCoordinator>>().push_back(std::move(message));         \
    return absl::OkStatus();                                                                   \
  }
    HF_PEER_TO_COORDINATOR(HF_TO_COORDINATOR)
#undef HF_TO_COORDINATOR
#define HF_TO_AGENT(T, field)                                                                  \
  case v1::PeerMessage::k##T: {                                                                \
    HF_ASSIGN_OR_RETURN(T message, DecodeBody<T>(*p.mutable_##field(), said.header, context)); \
    said.messages.emplace<ToAgent>(std::move(message));                                        \
    return absl::OkStatus();                                                                   \
  }
    HF_PEER_TO_AGENT(HF_TO_AGENT)
#undef HF_TO_AGENT
#define HF_TO_NODE(T, field)                                                                   \
  case v1::PeerMessage::k##T: {                                                                \
    HF_ASSIGN_OR_RETURN(T message, DecodeBody<T>(*p.mutable_##field(), said.header, context)); \
    said.messages.emplace<NodeMessage>(std::move(message));                                    \
    return absl::OkStatus();                                                                   \
  }
    HF_PEER_TO_NODE(HF_TO_NODE)
#undef HF_TO_NODE
    case v1::PeerMessage::kShardsSealed: {
      HF_RETURN_IF_ERROR(CheckHeader(said.header, false));
      Reader io("ShardsSealed", said.header, context);
      std::vector<ShardSealed> rows;
      ShardSealed common;
      SealedRows(io, rows, common, *p.mutable_shards_sealed());
      HF_RETURN_IF_ERROR(io.status());
      said.messages.emplace<std::vector<ToCoordinator>>(rows.begin(), rows.end());
      return absl::OkStatus();
    }
    case v1::PeerMessage::BODY_NOT_SET:
      break;
  }
  return UnknownBody(p);
}

}  // namespace

absl::StatusOr<std::string> EncodePeer(const PeerHeader& header, const ToCoordinator& message,
                                       EventTime now) {
  return std::visit(
      [&](const auto& m) -> absl::StatusOr<std::string> {
        if constexpr (std::is_same_v<decltype(m), const ShardSealed&>) {
          return EncodeSealed(header, {m});
        } else {
          return EncodeOne(header, m, now);
        }
      },
      message);
}

absl::StatusOr<std::string> EncodePeer(const PeerHeader& header, const ToAgent& message) {
  return std::visit([&](const auto& m) { return EncodeOne(header, m, {}); }, message);
}

absl::StatusOr<std::string> EncodePeer(const PeerHeader& header, const NodeMessage& message) {
  return std::visit([&](const auto& m) { return EncodeOne(header, m, {}); }, message);
}

absl::StatusOr<std::vector<std::string>> EncodePeer(const PeerHeader& header,
                                                    const std::vector<ToCoordinator>& messages,
                                                    EventTime now) {
  std::vector<std::string> encoded;
  for (size_t i = 0; i < messages.size();) {
    std::vector<ShardSealed> rows;
    for (; i < messages.size(); ++i) {
      const auto* sealed = std::get_if<ShardSealed>(&messages[i]);
      if (sealed == nullptr || (!rows.empty() && !OfOneMessage(rows.front(), *sealed))) {
        break;
      }
      rows.push_back(*sealed);
    }
    HF_ASSIGN_OR_RETURN(std::string bytes, rows.empty() ? EncodePeer(header, messages[i++], now)
                                                        : EncodeSealed(header, rows));
    encoded.push_back(std::move(bytes));
  }
  return encoded;
}

absl::StatusOr<PeerSaid> DecodePeer(std::string_view bytes, const PeerContext& context) {
  if (bytes.size() > kPeerMessageBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("peer message: it has ", bytes.size(),
                                                   " bytes, at most ", kPeerMessageBytesMax,
                                                   " are allowed"));
  }
  if (const absl::Status parts = peer_internal::Prescan(bytes); !parts.ok()) {
    return absl::InvalidArgumentError(Message(parts));
  }
  v1::PeerMessage p;
  if (!p.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return absl::InvalidArgumentError("peer message: it is damaged");
  }
  PeerSaid said;
  said.header.job_name = p.job_name();
  said.header.epoch = p.epoch();
  if (!p.job_uuid().empty()) {
    absl::StatusOr<JobUuid> uuid = JobUuid::FromBytes(p.job_uuid());
    if (!uuid.ok() || uuid->IsZero()) {
      return absl::InvalidArgumentError("peer message: job_uuid: it is not a job's 16 bytes");
    }
    said.header.job = *uuid;
  }
  HF_RETURN_IF_ERROR(CheckHeader(said.header, false, false));  // (each body says if it needs one)
  HF_RETURN_IF_ERROR(DecodeMessages(p, context, said));
  return said;
}

}  // namespace holdfast
