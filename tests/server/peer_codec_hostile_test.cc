// What comes from another daemon may be anything: each field that is not what it may be is refused
// and named, nothing crashes, and nothing large is made of little.
#include <google/protobuf/unknown_field_set.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "holdfast/v1/peer.pb.h"
#include "server/agent.h"
#include "server/peer_codec.h"

namespace holdfast {
namespace {

using P = v1::PeerMessage;

const std::string kUuid(16, 'u');

absl::Status Judge(const std::string& bytes) {
  PeerContext context;
  context.now = {{1'000'000'000'000}, 0};
  return DecodePeer(bytes, context).status();
}

struct Case {
  std::string what;               // the error has it
  std::function<void(P&)> build;  // a message that is right but for one thing
};

P Valid() {
  P p;
  p.set_job_name("job");
  p.set_job_uuid(kUuid);
  p.set_epoch(1);
  return p;
}

v1::SaveAsked& Save(P& p) {
  v1::SaveAsked& m = *p.mutable_save_asked();
  m.set_attempt(1);
  return m;
}
v1::JoinAsked& Join(P& p) {
  v1::JoinAsked& m = *p.mutable_join_asked();
  m.set_world_size(8);
  m.set_rank(7);
  return m;
}
v1::ShardsSealed& Sealed(P& p) {
  v1::ShardsSealed& m = *p.mutable_shards_sealed();
  m.set_attempt(1);
  m.set_world_size(8);
  m.add_rank(0);
  m.add_rank(1);
  return m;
}
v1::CopiesFound& Found(P& p) {
  v1::CopiesFound& m = *p.mutable_copies_found();
  m.set_tier(v1::TIER_NVME);
  return m;
}
// Two copies of attempt 3 on the line 3 ← 2 ← 1.
v1::CopyRun& Run(P& p, v1::CopySet& set) {
  p.set_job_name("job");
  v1::Line& line = *set.add_lines();
  for (const int delta : {3, -1, -1}) {
    line.add_attempt(delta);
  }
  for (const int delta : {2, -1, -1}) {
    line.add_parent_attempt(delta);
  }
  v1::CopyRun& run = *set.add_runs();
  run.set_attempt(3);
  run.set_world_size(8);
  run.set_line(1);
  run.add_rank(0);
  run.add_rank(1);
  return run;
}
v1::CopyRun& FoundRun(P& p) {
  return Run(p, *Found(p).mutable_copies());
}
v1::FoundBad& FoundBad(P& p) {
  p.set_job_name("job");
  v1::FoundBad& bad = *Found(p).add_bad();
  bad.set_attempt(3);
  return bad;
}
v1::NodeArrived::Seat& Seat(P& p) {
  v1::NodeArrived::Seat& seat = *p.mutable_node_arrived()->add_seats();
  seat.set_attempt(1);
  return seat;
}
v1::ShardDrained& Drained(P& p) {
  v1::ShardDrained& m = *p.mutable_shard_drained();
  m.set_attempt(3);
  m.set_to(v1::TIER_NVME);
  m.set_from(v1::TIER_MEMORY);
  m.mutable_status()->set_code(1);
  return m;
}
v1::FlushWanted& Flush(P& p) {
  v1::FlushWanted& m = *p.mutable_flush_wanted();
  m.set_attempt(1);
  m.set_to(v1::TIER_NVME);
  m.set_world_size(8);
  m.add_rank(7);
  m.add_from(v1::TIER_MEMORY);
  return m;
}
v1::FlushWanted::Group& Group(P& p) {
  v1::FlushWanted::Group& group = *Flush(p).add_groups();
  group.set_content(kUuid);
  return group;
}
v1::SourceOffered::Reader& Reader(P& p) {
  v1::SourceOffered& m = *p.mutable_source_offered();
  m.set_attempt(2);
  m.set_session(1);
  m.set_round(1);
  m.set_offered_attempt(1);
  m.set_from(v1::TIER_REMOTE);
  v1::SourceOffered::Reader& reader = *m.add_readers();
  reader.set_node("b");
  return reader;
}
v1::PrefetchWanted& Ahead(P& p) {
  v1::PrefetchWanted& m = *p.mutable_prefetch_wanted();
  m.set_attempt(1);
  m.set_world_size(8);
  m.add_rank(7);
  m.add_from(v1::TIER_NVME);
  return m;
}
v1::PrefetchEnded& AheadEnded(P& p) {
  v1::PrefetchEnded& m = *p.mutable_prefetch_ended();
  m.set_attempt(1);
  m.set_from(v1::TIER_NVME);
  return m;
}
v1::JobState& State(P& p) {
  v1::JobState& state = *p.mutable_persist_state()->mutable_state();
  state.set_job_uuid(kUuid);
  state.set_name("job");
  return state;
}
v1::AttemptState& AttemptOf(P& p) {
  v1::AttemptState& a = *State(p).add_attempts();
  a.set_attempt(2);
  a.set_world_size(8);
  return a;
}

const std::string kLong(kPeerTextBytesMax + 1, 'x');

std::vector<Case> Cases() {
  return {
      // Whom it is about
      {"it names no job", [](P& p) { Save(p), p.clear_job_name(), p.clear_job_uuid(); }},
      {"job_name", [](P& p) { Save(p), p.set_job_name("../etc"); }},
      {"job_name", [](P& p) { Join(p), p.clear_job_name(); }},
      {"job_name", [](P& p) { FoundRun(p), p.clear_job_name(); }},
      {"job_uuid", [](P& p) { Save(p), p.set_job_uuid("short"); }},
      {"job_uuid", [](P& p) { Save(p), p.set_job_uuid(std::string(17, 'u')); }},
      {"job_uuid", [](P& p) { Save(p), p.set_job_uuid(std::string(16, '\0')); }},
      {"body: there is none", [](P&) {}},
      {"body: field 999 is unknown",
       [](P& p) { p.GetReflection()->MutableUnknownFields(&p)->AddLengthDelimited(999, "later"); }},
      // Numbers
      {"SaveAsked: attempt: 0", [](P& p) { Save(p).set_attempt(0); }},
      {"SaveAsked: rank: 1048576", [](P& p) { Save(p).set_rank(kWorldSizeMax); }},
      {"JoinAsked: world_size: 0", [](P& p) { Join(p).set_world_size(0); }},
      {"JoinAsked: world_size: 1048577", [](P& p) { Join(p).set_world_size(kWorldSizeMax + 1); }},
      {"JoinAsked: rank", [](P& p) { Join(p).set_rank(8); }},
      {"JoinAsked: process", [](P& p) { Join(p).mutable_process()->set_pid(-1); }},
      {"JoinAsked: launch",
       [](P& p) { Join(p).set_launch(std::string(kLaunchBytesMax + 1, 'l')); }},
      {"JoinAsked: policy",
       [](P& p) { Join(p).mutable_policy()->mutable_nvme()->set_keep_last(0); }},
      {"SetPolicyAsked: policy",
       [](P& p) {
         p.mutable_set_policy_asked()->mutable_policy()->mutable_remote()->set_verify(
             static_cast<v1::TierPolicy::Verify>(9));
       }},
      {"Superseded: by", [](P& p) { p.mutable_superseded(); }},
      {"GiveUp: attempt", [](P& p) { p.mutable_give_up()->mutable_failure()->set_code(1); }},
      {"MemoryCopyGained: bytes",
       [](P& p) {
         p.mutable_memory_copy_gained()->set_attempt(1);
         p.mutable_memory_copy_gained()->set_bytes(kImageBytesMax + 1);
       }},
      {"MemoryCopyGained: likeness",
       [](P& p) {
         p.mutable_memory_copy_gained()->set_attempt(1);
         p.mutable_memory_copy_gained()->set_likeness(kUuid);
       }},
      {"FetchRoomAsked: fetched_attempt", [](P& p) { p.mutable_fetch_room_asked(); }},
      // Enums
      {"SeatLost: how", [](P& p) { p.mutable_seat_lost()->set_attempt(1); }},
      {"InventoryState: kind",
       [](P& p) {
         p.mutable_inventory_state()->set_tier(v1::TIER_NVME);
         p.mutable_inventory_state()->set_kind(static_cast<v1::InventoryState::Kind>(5));
       }},
      {"InventoryState: tier: memory",
       [](P& p) {
         p.mutable_inventory_state()->set_tier(v1::TIER_MEMORY);
         p.mutable_inventory_state()->set_kind(v1::InventoryState::KIND_KNOWN);
       }},
      {"ShardGood: tier: tier 0", [](P& p) { p.mutable_shard_good()->set_attempt(1); }},
      {"ShardGood: tier: tier 5",
       [](P& p) {
         p.mutable_shard_good()->set_attempt(1);
         p.mutable_shard_good()->set_tier(static_cast<v1::Tier>(5));
       }},
      {"AwaitAsked: stage",
       [](P& p) {
         p.mutable_await_asked()->set_attempt(1);
         p.mutable_await_asked()->set_stage(static_cast<v1::AwaitSave::Stage>(6));
       }},
      {"Reported: kind", [](P& p) { p.mutable_reported()->set_tier(v1::TIER_MEMORY); }},
      {"AdminAnswered: reply", [](P& p) { p.mutable_admin_answered()->set_token(1); }},
      // Statuses
      {"Refused: failure.code", [](P& p) { p.mutable_refused()->set_token(1); }},
      {"Refused: failure.code", [](P& p) { p.mutable_refused()->mutable_failure()->set_code(17); }},
      {"Refused: failure.code", [](P& p) { p.mutable_refused()->mutable_failure()->set_code(-1); }},
      {"Refused: failure.reason",
       [](P& p) {
         p.mutable_refused()->mutable_failure()->set_code(1);
         p.mutable_refused()->mutable_failure()->set_reason(static_cast<v1::Failure::Reason>(99));
       }},
      {"ShardDrained: status", [](P& p) { Drained(p).mutable_status()->set_code(0); }},
      {"ShardDrained: status", [](P& p) { Drained(p).mutable_status()->set_code(17); }},
      {"ShardDrained: status",
       [](P& p) { Drained(p).mutable_status()->set_reason(v1::Failure::REASON_SHED); }},
      {"ShardDrained: status", [](P& p) { Drained(p).mutable_status()->set_message(kLong); }},
      // Texts and names
      {"SaveLost: why",
       [](P& p) {
         p.mutable_save_lost()->set_attempt(1);
         p.mutable_save_lost()->set_why(kLong);
       }},
      {"SpareAsked: for_job", [](P& p) { p.mutable_spare_asked()->set_for_job("a/b"); }},
      {"SpareAsked: stage", [](P& p) { p.mutable_spare_asked()->set_stage(4); }},
      {"CopiesAway: dir",
       [](P& p) {
         p.mutable_copies_away()->set_tier(v1::TIER_NVME);
         p.mutable_copies_away()->set_dir(kLong);
       }},
      {"PinAsked: request.job",
       [](P& p) { p.mutable_pin_asked()->mutable_request()->set_job(kLong); }},
      {"ReplaceAsked: request.node",
       [](P& p) { p.mutable_replace_asked()->mutable_request()->set_node(kLong); }},
      {"ReplaceAsked: request.with",
       [](P& p) { p.mutable_replace_asked()->mutable_request()->set_with(kLong); }},
      {"RemoveCheckpointAsked: request.tier",
       [](P& p) { p.mutable_remove_checkpoint_asked()->mutable_request()->set_tier(kLong); }},
      {"AdminAnswered: reply.text",
       [](P& p) { p.mutable_admin_answered()->mutable_pin()->set_text(kLong); }},
      // Columns
      {"ShardsSealed: rank: 0", [](P& p) { Sealed(p).clear_rank(); }},
      {"ShardsSealed: rank", [](P& p) { Sealed(p).set_rank(0, -1); }},
      {"ShardsSealed: rank", [](P& p) { Sealed(p).set_rank(1, 8); }},
      {"ShardsSealed: rank", [](P& p) { Sealed(p).set_rank(1, int64_t{1} << 32); }},
      {"ShardsSealed: bytes", [](P& p) { Sealed(p).add_bytes(1); }},
      {"ShardsSealed: likeness", [](P& p) { Sealed(p).set_likeness(kUuid); }},
      {"ShardsSealed: bytes",
       [](P& p) { Sealed(p), p.mutable_shards_sealed()->mutable_bytes()->Resize(2, -1); }},
      {"ShardsSealed: unix_ms",
       [](P& p) { Sealed(p), p.mutable_shards_sealed()->mutable_unix_ms()->Resize(3, 1); }},
      {"ShardsSealed: world_size", [](P& p) { Sealed(p).set_world_size(0); }},
      {"RoomAsked: useful",
       [](P& p) {
         p.mutable_room_asked()->set_attempt(1);
         p.mutable_room_asked()->add_useful_attempt(0);
       }},
      {"RoomAsked: useful",
       [](P& p) {
         p.mutable_room_asked()->set_attempt(1);
         p.mutable_room_asked()->mutable_useful_attempt()->Resize(kPeerCheckpointsMax + 1, 1);
       }},
      {"RoomAsked: left",
       [](P& p) {
         p.mutable_room_asked()->set_attempt(1);
         p.mutable_room_asked()->add_left_attempt(0);
       }},
      {"RoomAsked: left",
       [](P& p) {
         p.mutable_room_asked()->set_attempt(1);
         p.mutable_room_asked()->add_left_attempt(1);
         p.mutable_room_asked()->add_left_rank(int64_t{1} << 20);
       }},
      {"RoomAsked: left",
       [](P& p) {
         p.mutable_room_asked()->set_attempt(1);
         p.mutable_room_asked()->add_left_attempt(1);
         p.mutable_room_asked()->mutable_left_rank()->Resize(2, 1);
       }},
      {"RemovalDone: rank_left",
       [](P& p) {
         p.mutable_removal_done()->set_attempt(1);
         p.mutable_removal_done()->set_tier(v1::TIER_NVME);
         p.mutable_removal_done()->add_rank_left(1);
       }},
      {"RemovalDone: rank_left",
       [](P& p) {
         p.mutable_removal_done()->set_attempt(1);
         p.mutable_removal_done()->set_tier(v1::TIER_NVME);
         p.mutable_removal_done()->set_tells_ranks_left(true);
         p.mutable_removal_done()->add_rank_left(kWorldSizeMax);
       }},
      {"SessionAsked: wanted_step",
       [](P& p) {
         p.mutable_session_asked()->set_attempt(1);
         p.mutable_session_asked()->set_wanted_step(5);
       }},
      {"StepOffered: offered_attempt",
       [](P& p) {
         p.mutable_step_offered()->set_attempt(2);
         p.mutable_step_offered()->set_world_size(4);
       }},
      {"StepOffered: world_size",
       [](P& p) {
         p.mutable_step_offered()->set_attempt(2);
         p.mutable_step_offered()->set_offered_attempt(1);
       }},
      {"RecordsLocated: holder",
       [](P& p) {
         p.mutable_records_located()->set_attempt(2);
         p.mutable_records_located()->set_world_size(4);
         p.mutable_records_located()->add_node("b");
         p.mutable_records_located()->add_remote(0);
         p.mutable_records_located()->add_holder(2);
         p.mutable_records_located()->add_count(4);
       }},
      {"RecordsLocated: holder",
       [](P& p) {
         p.mutable_records_located()->set_attempt(2);
         p.mutable_records_located()->set_world_size(4);
         p.mutable_records_located()->add_node("b");
       }},
      {"RecordsLocated: count",
       [](P& p) {
         p.mutable_records_located()->set_attempt(2);
         p.mutable_records_located()->set_world_size(4);
         for (int i = 0; i < 2; ++i) {
           p.mutable_records_located()->add_holder(0);
           p.mutable_records_located()->add_count(UINT32_MAX);
         }
       }},
      {"ShardLocated: peers",
       [](P& p) {
         p.mutable_shard_located()->set_attempt(2);
         p.mutable_shard_located()->set_world_size(4);
         for (size_t i = 0; i <= kPeersNamedMax; ++i) {
           p.mutable_shard_located()->add_peers("b");
         }
       }},
      {"FlushWanted: from", [](P& p) { Flush(p).clear_from(); }},
      {"FlushWanted: from", [](P& p) { Flush(p).set_from(0, v1::TIER_UNSPECIFIED); }},
      {"FlushWanted: rank", [](P& p) { Flush(p).set_rank(0, 8); }},
      {"FlushWanted: bytes", [](P& p) { Flush(p).add_bytes(-1); }},
      {"FlushWanted: verify",
       [](P& p) { Flush(p).set_verify(static_cast<v1::TierPolicy::Verify>(4)); }},
      {"FlushWanted: zstd_level", [](P& p) { Flush(p).set_zstd_level(20); }},
      {"FlushWanted: zstd_threads", [](P& p) { Flush(p).set_zstd_threads(65); }},
      {"FlushWanted: group", [](P& p) { Flush(p).add_group(1); }},
      {"FlushWanted: group", [](P& p) { Group(p), p.mutable_flush_wanted()->add_group(-1); }},
      {"FlushWanted: groups", [](P& p) { Group(p).set_content("short"); }},
      {"SourceOffered: readers", [](P& p) { Reader(p).add_first(1); }},
      {"SourceOffered: readers",
       [](P& p) {
         v1::SourceOffered::Reader& reader = Reader(p);
         reader.add_first(1);
         reader.add_stride(0);
         reader.add_count(1);
       }},
      {"SourceOffered: readers",
       [](P& p) {
         for (size_t i = 0; i <= kRemoteReadersMax; ++i) {
           Reader(p);
         }
       }},
      {"SourceOffered: readers", [](P& p) { Reader(p).set_node(std::string(10'000, 'n')); }},
      {"FlushWanted: groups", [](P& p) { Group(p).add_first(1); }},
      {"FlushWanted: groups", [](P& p) { Group(p).add_count(1); }},
      {"FlushWanted: groups",
       [](P& p) {
         v1::FlushWanted::Group& group = Group(p);
         for (size_t i = 0; i <= kRankRunsMax; ++i) {
           group.add_first(0);
           group.add_stride(1);
           group.add_count(1);
         }
       }},
      {"FlushWanted: groups",
       [](P& p) {
         const v1::FlushWanted::Group group = Group(p);
         *p.mutable_flush_wanted()->add_groups() = group;
       }},
      {"FlushWanted: peer", [](P& p) { Flush(p).add_peer(1); }},
      {"FlushWanted: peer",
       [](P& p) {
         Flush(p).add_peers("b");
         p.mutable_flush_wanted()->add_peer(-1);
       }},
      {"FlushWanted: peers",
       [](P& p) {
         Flush(p).add_peers(std::string(256, 'n'));
         p.mutable_flush_wanted()->add_peer(1);
       }},
      {"NodeArrived: labels",
       [](P& p) { p.mutable_node_arrived()->add_labels()->set_name(std::string(256, 'n')); }},
      {"NodeArrived: labels",
       [](P& p) {
         for (int i = 0; i < 65; ++i) {
           p.mutable_node_arrived()->add_labels();
         }
       }},
      {"SourceOffered: peers",
       [](P& p) {
         p.mutable_source_offered()->set_attempt(1);
         p.mutable_source_offered()->set_offered_attempt(1);
         p.mutable_source_offered()->set_from(v1::TIER_PEER);
         for (int i = 0; i < 9; ++i) {
           p.mutable_source_offered()->add_peers("b");
         }
       }},
      {"StopNoticed: attempt", [](P& p) { p.mutable_stop_noticed()->set_rank(1); }},
      {"StopNoticed: rank",
       [](P& p) {
         p.mutable_stop_noticed()->set_attempt(1);
         p.mutable_stop_noticed()->set_rank(kWorldSizeMax);
       }},
      {"StopNoticed: left_ms",
       [](P& p) {
         p.mutable_stop_noticed()->set_attempt(1);
         p.mutable_stop_noticed()->set_left_ms(kGraceMsMax + 1);
       }},
      {"StepsHeld: attempt", [](P& p) { p.mutable_steps_held()->set_passed(1); }},
      {"HoldSteps: attempt", [](P& p) { p.mutable_hold_steps()->set_round(1); }},
      {"LastStepChosen: attempt", [](P& p) { p.mutable_last_step_chosen()->set_step(1); }},
      {"LastStepChosen: left_ms",
       [](P& p) {
         p.mutable_last_step_chosen()->set_attempt(1);
         p.mutable_last_step_chosen()->set_left_ms(UINT32_MAX);
       }},
      {"ReplicasDropped: rank", [](P& p) { p.mutable_replicas_dropped()->set_attempt(1); }},
      {"ReplicasDropped: rank",
       [](P& p) {
         p.mutable_replicas_dropped()->set_attempt(1);
         p.mutable_replicas_dropped()->add_rank(kWorldSizeMax);
       }},
      {"FlushWanted: to: memory", [](P& p) { Flush(p).set_to(v1::TIER_MEMORY); }},
      {"PrefetchWanted: from", [](P& p) { Ahead(p).clear_from(); }},
      {"PrefetchWanted: from: memory", [](P& p) { Ahead(p).set_from(0, v1::TIER_MEMORY); }},
      {"PrefetchWanted: rank", [](P& p) { Ahead(p).set_rank(0, 8); }},
      {"PrefetchWanted: world_size", [](P& p) { Ahead(p).set_world_size(0); }},
      {"PrefetchWanted: attempt", [](P& p) { Ahead(p).set_attempt(0); }},
      {"PrefetchUnwanted: attempt", [](P& p) { p.mutable_prefetch_unwanted()->set_step(3); }},
      {"PrefetchEnded: from: memory", [](P& p) { AheadEnded(p).set_from(v1::TIER_MEMORY); }},
      {"PrefetchEnded: rank", [](P& p) { AheadEnded(p).set_rank(kWorldSizeMax); }},
      {"PrefetchEnded: attempt", [](P& p) { AheadEnded(p).set_attempt(0); }},
      // Lines of descent
      {"SavePermitted: descent",
       [](P& p) { p.mutable_save_permitted()->mutable_descent()->add_attempt(0); }},
      {"SavePermitted: descent",
       [](P& p) {
         v1::Line& line = *p.mutable_save_permitted()->mutable_descent();
         line.add_attempt(3);
         line.add_parent_attempt(3);
       }},
      {"SavePermitted: descent",
       [](P& p) {
         v1::Line& line = *p.mutable_save_permitted()->mutable_descent();
         line.add_attempt(3);
         line.add_attempt(-2);
         line.add_parent_attempt(2);
         line.add_parent_attempt(-2);
       }},
      {"SavePermitted: descent",
       [](P& p) {
         v1::Line& line = *p.mutable_save_permitted()->mutable_descent();
         line.mutable_attempt()->Resize(kDescentMax + 1, 1);
       }},
      {"SavePermitted: descent",
       [](P& p) {
         v1::Line& line = *p.mutable_save_permitted()->mutable_descent();
         line.add_attempt(1);
         line.mutable_parent_step()->Resize(2, 1);
       }},
      // Copies
      {"CopiesFound: copies", [](P& p) { FoundRun(p).set_attempt(0); }},
      {"CopiesFound: copies", [](P& p) { FoundRun(p).set_attempt(4); }},
      {"CopiesFound: copies", [](P& p) { FoundRun(p).set_world_size(1); }},
      {"CopiesFound: copies", [](P& p) { FoundRun(p).set_world_size(kWorldSizeMax + 1); }},
      {"CopiesFound: copies", [](P& p) { FoundRun(p), p.clear_job_uuid(); }},
      {"CopiesFound: line", [](P& p) { FoundRun(p).set_line(2); }},
      {"CopiesFound: rank", [](P& p) { FoundRun(p).clear_rank(); }},
      {"CopiesFound: rank",
       [](P& p) { FoundRun(p).mutable_rank()->Resize(kPeerCopiesMax + 1, 0); }},
      {"CopiesFound: image_bytes", [](P& p) { FoundRun(p).add_image_bytes(1); }},
      {"CopiesFound: copies", [](P& p) { FoundRun(p).mutable_image_bytes()->Resize(2, -1); }},
      {"CopiesFound: layout_hash", [](P& p) { FoundRun(p).set_layout_hash(kUuid); }},
      {"CopiesFound: likeness", [](P& p) { FoundRun(p).set_likeness(kUuid); }},
      {"CopiesFound: plan", [](P& p) { FoundRun(p).set_plan(kUuid); }},
      {"CopiesFound: plan",  // of files that leave nothing out
       [](P& p) { FoundRun(p).set_plan(std::string(32, 'p')); }},
      {"CopiesFound: file_bytes",  // an image of 5, a file of 5
       [](P& p) {
         v1::CopyRun& run = FoundRun(p);
         for (const int delta : {5, 0}) {
           run.add_image_bytes(delta);
           run.add_file_bytes(delta);
         }
       }},
      {"CopiesFound: record_bytes",
       [](P& p) {
         FoundRun(p).mutable_record_bytes()->Resize(2, static_cast<int64_t>(kRecordBytesMax) + 1);
       }},
      {"CopiesFound: record_crc", [](P& p) { FoundRun(p).add_record_crc(1); }},
      {"CopiesFound: from_manifest",
       [](P& p) { FoundRun(p).mutable_from_manifest()->Resize(2, 1); }},
      {"CopiesFound: location_bytes",
       [](P& p) { FoundRun(p).mutable_location_bytes()->Resize(2, 1); }},
      {"CopiesFound: location_bytes",
       [](P& p) {
         v1::CopyRun& run = FoundRun(p);
         run.set_locations(kLong);
         run.add_location_bytes(static_cast<int64_t>(kLong.size()));
         run.add_location_bytes(-static_cast<int64_t>(kLong.size()));
       }},
      {"CopiesFound: location",
       [](P& p) {
         v1::CopyRun& run = FoundRun(p);
         run.set_locations("\xE2\x82\xAC");  // one character, cut between two copies
         run.add_location_bytes(1);
         run.add_location_bytes(1);
       }},
      {"CopiesFound: locations", [](P& p) { FoundRun(p).set_locations("more"); }},
      {"CopiesFound: writer", [](P& p) { FoundRun(p).add_writer(1); }},
      {"CopiesFound: began_age_ms", [](P& p) { Found(p).set_began_age_ms(~uint64_t{0}); }},
      {"CopiesFound: as_of_age_ms", [](P& p) { Found(p).set_as_of_age_ms(uint64_t{1} << 53); }},
      {"CopiesFound: manifests", [](P& p) { Found(p).add_manifest_attempt(0); }},
      {"CopiesFound: attempt", [](P& p) { FoundBad(p).set_attempt(0); }},
      {"CopiesFound: rank", [](P& p) { FoundBad(p).set_rank(kWorldSizeMax); }},
      {"CopiesFound: location", [](P& p) { FoundBad(p).set_location(kLong); }},
      {"CopiesFound: what", [](P& p) { FoundBad(p).set_what(kLong); }},
      {"CopiesFound: bad", [](P& p) { Run(p, *FoundBad(p).mutable_copy()); }},  // two
      {"CopiesFound: bad",                                                      // another rank's
       [](P& p) {
         Run(p, *FoundBad(p).mutable_copy()).mutable_rank()->Resize(1, 0);
         p.mutable_copies_found()->mutable_bad(0)->set_rank(1);
       }},
      {"CopiesFound: bad",
       [](P& p) {
         for (size_t i = 0; i <= kBadCopiesMax; ++i) {
           FoundBad(p);
         }
       }},
      {"CopiesFound: descent",
       [](P& p) {  // little on the wire, much in memory
         v1::CopySet& set = *Found(p).mutable_copies();
         v1::Line& line = *set.add_lines();
         line.mutable_attempt()->Resize(kDescentMax, -1);
         line.set_attempt(0, kDescentMax);
         line.mutable_parent_attempt()->Resize(kDescentMax, -1);
         line.set_parent_attempt(0, kDescentMax - 1);
         for (int i = 0; i < 2; ++i) {
           v1::CopyRun& run = *set.add_runs();
           run.set_attempt(kDescentMax);
           run.set_world_size(kWorldSizeMax);
           run.set_line(1);
           run.mutable_rank()->Resize(600, 1);
         }
       }},
      {"ShardDrained: copy", [](P& p) { Run(p, *Drained(p).mutable_copy()); }},
      {"ShardDrained: copy",
       [](P& p) {
         v1::ShardDrained& m = Drained(p);
         Run(p, *m.mutable_copy()).mutable_rank()->RemoveLast();
         m.set_rank(1);
       }},
      {"ShardDrained: copy", [](P& p) { Drained(p).clear_status(); }},
      {"ManifestWanted: shards",
       [](P& p) {
         p.mutable_manifest_wanted()->set_attempt(3);
         p.mutable_manifest_wanted()->set_step(1);
         p.mutable_manifest_wanted()->set_world_size(8);
         Run(p, *p.mutable_manifest_wanted()->mutable_shards());
       }},
      {"NodeArrived: writer",
       [](P& p) {
         Run(p, *p.mutable_node_arrived()->mutable_shards())
             .mutable_writer()
             ->Resize(2, int64_t{1} << 32);
       }},
      {"NodeArrived: writer_start_ticks",
       [](P& p) {
         Run(p, *p.mutable_node_arrived()->mutable_shards())
             .mutable_writer_start_ticks()
             ->Resize(2, 5);
       }},
      {"NodeArrived: record_bytes",
       [](P& p) {
         Run(p, *p.mutable_node_arrived()->mutable_shards()).mutable_record_bytes()->Resize(2, 5);
       }},
      {"NodeArrived: writing",
       [](P& p) {
         Seat(p).add_writing(5);
         p.mutable_node_arrived()->mutable_seats(0)->add_writing(0);
       }},
      {"NodeArrived: writing",
       [](P& p) { Seat(p).mutable_writing()->Resize(kPeerOpenStepsMax + 1, 1); }},
      {"NodeArrived: process", [](P& p) { Seat(p).set_pid(-5); }},
      {"NodeArrived: attempt", [](P& p) { Seat(p).set_attempt(0); }},
      {"NodeArrived: rank",
       [](P& p) { p.mutable_node_arrived()->add_joining()->set_rank(kWorldSizeMax); }},
      {"NodeArrived: joining",
       [](P& p) {
         for (size_t i = 0; i <= kSeatsMax; ++i) {
           p.mutable_node_arrived()->add_joining();
         }
       }},
      {"NodeArrived: seats",
       [](P& p) {
         for (size_t i = 0; i <= kSeatsMax; ++i) {
           Seat(p);
         }
       }},
      // The job's state
      {"PersistState: state.job_uuid", [](P& p) { State(p).set_job_uuid(std::string(16, 'v')); }},
      {"PersistState: state.name", [](P& p) { State(p).set_name("other"); }},
      {"PersistState: state.attempts", [](P& p) { AttemptOf(p).set_attempt(0); }},
      {"PersistState: state.attempts", [](P& p) { AttemptOf(p).set_world_size(0); }},
      {"PersistState: state.attempts", [](P& p) { AttemptOf(p).set_parent_attempt(2); }},
      {"PersistState: state.attempts",
       [](P& p) { AttemptOf(p).set_launch(std::string(kLaunchBytesMax + 1, 'l')); }},
      {"PersistState: state.attempts",
       [](P& p) {
         for (size_t i = 0; i <= kDescentMax; ++i) {
           AttemptOf(p);
         }
       }},
      {"PersistState: state.members",
       [](P& p) { State(p).add_members()->set_rank(kWorldSizeMax); }},
      {"PersistState: state.members",
       [](P& p) { State(p).add_members()->mutable_process()->set_pid(-1); }},
      {"PersistState: state.nodes", [](P& p) { State(p).add_nodes(); }},
      {"PersistState: state.writer", [](P& p) { State(p).set_writer(kLong); }},
      {"PersistState: state.boot_id", [](P& p) { State(p).set_boot_id(kLong); }},
      {"PersistState: state.policy",
       [](P& p) { State(p).mutable_policy_set()->mutable_nvme()->set_keep_last(0); }},
      {"PersistState: state.pins",
       [](P& p) {
         State(p);
         for (size_t i = 0; i <= kPeerCheckpointsMax; ++i) {
           p.mutable_persist_state()->mutable_state()->add_pins();
         }
       }},
      {"StateKept: state.name",
       [](P& p) {
         v1::JobState state = State(p);
         state.set_name("other");
         *p.mutable_state_kept()->mutable_state() = state;
       }},
      {"JobHosted: rank",
       [](P& p) {
         p.mutable_job_hosted()->set_world_size(1);
         p.mutable_job_hosted()->add_rank(1);
         p.mutable_job_hosted()->add_pid(1);
       }},
      {"JobHosted: pid",
       [](P& p) {
         p.mutable_job_hosted()->set_world_size(1);
         p.mutable_job_hosted()->add_rank(0);
       }},
      {"JobHosted: pid",
       [](P& p) {
         p.mutable_job_hosted()->set_world_size(1);
         p.mutable_job_hosted()->add_rank(0);
         p.mutable_job_hosted()->add_pid(-1);
       }},
      {"JobHosted: world_size",
       [](P& p) { p.mutable_job_hosted()->set_world_size(kWorldSizeMax + 1); }},
      {"JobHosted: job_uuid",
       [](P& p) {
         p.mutable_job_hosted();
         p.clear_job_uuid();
       }},
      {"parts",
       [](P& p) {
         State(p);
         for (size_t i = 0; i <= kPeerPartsMax; ++i) {
           p.mutable_persist_state()->mutable_state()->add_members();
         }
       }},
      {"parts",
       [](P& p) {
         Save(p);
         for (size_t i = 0; i <= kPeerPartsMax; ++i) {
           p.GetReflection()->MutableUnknownFields(&p)->AddVarint(999, 1);
         }
       }},
  };
}

TEST(PeerCodecHostileTest, EachIsRefusedAndNamed) {
  int i = 0;
  for (const Case& c : Cases()) {
    P p = Valid();
    c.build(p);
    const absl::Status status = Judge(p.SerializeAsString());
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << "case " << i << ": " << c.what;
    EXPECT_NE(Message(status).find(c.what), std::string::npos)
        << "case " << i << ": " << c.what << " is not in: " << ToString(status);
    ++i;
  }
}

// What the cases begin with is right, so each is refused for its one thing.
TEST(PeerCodecHostileTest, WhatTheCasesBeginWithIsTaken) {
  const std::vector<std::function<void(P&)>> builds = {
      [](P& p) { Save(p); },     [](P& p) { Join(p); },     [](P& p) { Sealed(p); },
      [](P& p) { Found(p); },    [](P& p) { FoundRun(p); }, [](P& p) { Seat(p); },
      [](P& p) { Drained(p); },  [](P& p) { Flush(p); },    [](P& p) { State(p); },
      [](P& p) { AttemptOf(p); }};
  for (size_t i = 0; i < builds.size(); ++i) {
    P p = Valid();
    builds[i](p);
    EXPECT_TRUE(Judge(p.SerializeAsString()).ok())
        << i << ": " << ToString(Judge(p.SerializeAsString()));
  }
}

TEST(PeerCodecHostileTest, BytesThatAreNoMessageAreRefused) {
  EXPECT_FALSE(Judge("").ok());
  EXPECT_FALSE(Judge("\xFF\xFF\xFF").ok());
  EXPECT_FALSE(Judge(std::string(kPeerMessageBytesMax + 1, '\0')).ok());
  P p = Valid();
  Save(p);
  const std::string bytes = p.SerializeAsString();
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(Judge(bytes.substr(0, length)).ok()) << length;
  }
  p.mutable_save_lost()->set_attempt(1);
  p.mutable_save_lost()->set_why("!!");
  std::string text = p.SerializeAsString();
  text.replace(text.find("!!"), 2, "\xC3\x28");
  EXPECT_NE(Message(Judge(text)).find("SaveLost: why: it is not UTF-8"), std::string::npos);
}

// A newer daemon may say more of what is known.
TEST(PeerCodecHostileTest, FieldsOfLaterVersionsAreSkipped) {
  P p = Valid();
  v1::SaveAsked& m = Save(p);
  m.GetReflection()->MutableUnknownFields(&m)->AddVarint(99, 1);
  p.GetReflection()->MutableUnknownFields(&p)->AddLengthDelimited(999, "later");
  EXPECT_TRUE(Judge(p.SerializeAsString()).ok());
}

TEST(PeerCodecHostileTest, WhatIsTooLargeToBeTakenIsNotSaid) {
  PersistState persist;
  persist.state.set_job_uuid(kUuid);
  persist.state.set_name("job");
  for (int i = 0; i < 1'000'000; ++i) {
    v1::MemberState& member = *persist.state.add_members();
    member.set_rank(kWorldSizeMax - 1);
    member.mutable_process()->set_start_ticks(~uint64_t{0});
  }
  PeerHeader header{"job", *JobUuid::FromBytes(kUuid), 1};
  EXPECT_EQ(EncodePeer(header, ToAgent(persist)).status().code(),
            absl::StatusCode::kResourceExhausted);
  // Or of too many parts, few bytes as they are.
  persist.state.clear_members();
  for (size_t i = 0; i < kPeerPartsMax; ++i) {
    persist.state.add_members();
  }
  EXPECT_EQ(EncodePeer(header, ToAgent(persist)).status().code(),
            absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace holdfast
