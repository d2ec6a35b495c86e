// Every message that crosses between daemons arrives as it was said, whatever its fields; and
// nothing else arrives.
#include "server/peer_codec.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <google/protobuf/dynamic_message.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "holdfast/v1/peer.pb.h"
#include "recovery/deletion.h"
#include "recovery/eviction.h"
#include "server/node_ranges.h"

namespace holdfast {
namespace {

constexpr NodeId kSender = 7;
constexpr EventTime kNow{{5'000'000'000'000'123}, 1'700'000'000'000};

PeerHeader Header() {
  PeerHeader header{"train-7b", {}, 300};
  for (size_t i = 0; i < header.job.bytes.size(); ++i) {
    header.job.bytes[i] = static_cast<uint8_t>(0xA0 + i);
  }
  return header;
}

PeerContext Context(NodeId from = kSender) {
  PeerContext context;
  context.from = from;
  context.now = kNow;
  return context;
}

// ---- All fields of all messages: a field that is added there does not compile here ----

#define MEMBERS(T, ...)                              \
  template <typename M>                              \
  requires std::is_same_v<std::remove_const_t<M>, T> \
  auto Members(M& m) {                               \
    auto& [__VA_ARGS__] = m;                         \
    return std::tie(__VA_ARGS__);                    \
  }

MEMBERS(ProcessId, pid, start_ticks, node)
MEMBERS(CheckpointId, attempt, step)
MEMBERS(ShardId, job, attempt, step, rank)
MEMBERS(Descent, attempt, parent)
MEMBERS(Caller, process, uid, gid)
MEMBERS(Likeness, tensors, content)
MEMBERS(RankRun, first, stride, count)
MEMBERS(SealedCopy, id, job_name, world_size, generation, image_bytes, layout_hash, descent,
        sealed_unix_ms, likeness)
MEMBERS(DurableCopy, copy, record_bytes, record_crc, from_manifest, location, file_bytes, plan)
MEMBERS(NodeLabel, name, value)
MEMBERS(FoundShard, copy, writer, replica)
MEMBERS(NodeArrived::Seat, attempt, rank, process, connection, writing, last_begun)
MEMBERS(FlushWanted::Shard, rank, from, bytes, group, peer)
MEMBERS(FlushWanted::Group, content, ranks)
MEMBERS(PrefetchWanted::Shard, rank, from, bytes, peer)
MEMBERS(Failure, code, reason, message)
MEMBERS(Report, kind, job, text, bytes, tier)

MEMBERS(JoinAsked, token, connection, caller, rank, world_size, launch, attempt, leave_attempt,
        may_wait, policy, opening)
MEMBERS(SeatLost, attempt, rank, process, connection, how)
MEMBERS(SaveAsked, token, attempt, rank, step)
MEMBERS(RoomAsked::Left, checkpoint, rank)
MEMBERS(RoomAsked, token, attempt, rank, step, useful, left, spare_only)
MEMBERS(SpareAsked, token, for_job, useful, stage)
MEMBERS(SaveLost, attempt, rank, step, why)
MEMBERS(ShardSealed, attempt, rank, step, world_size, bytes, unix_ms, time_sure, likeness)
MEMBERS(ShardGood, checkpoint, rank, tier)
MEMBERS(ShardBad, checkpoint, rank, what, tier, node, leave)
MEMBERS(InventoryState, tier, kind, why)
MEMBERS(BadDurableCopy, copy, what)
// Steps of remote whose writing has only begun stay with the host that has scanned it.
template <typename M>
requires std::is_same_v<std::remove_const_t<M>, CopiesFound>
auto Members(M& m) {
  auto& [tier, began, as_of, copies, manifests, highest_claim, bad, begun] = m;
  return std::tie(tier, began, as_of, copies, manifests, highest_claim, bad);
}
MEMBERS(CopiesAway, tier, dir)
MEMBERS(ShardDrained, checkpoint, rank, to, from, status, source_bad, copy, peer, replaced)
MEMBERS(FlushStalled, checkpoint, to, stalled, what)
MEMBERS(ManifestDone, checkpoint, status, missing)
MEMBERS(RemovalDone, checkpoint, tier, status, ranks_left)
MEMBERS(RemovalStalled, checkpoint, tier, what)
MEMBERS(ReplicasDropped, checkpoint, ranks, why)
MEMBERS(MemoryCopyGained, checkpoint, rank, bytes, unix_ms, likeness)
MEMBERS(FetchFailed, token, attempt, rank, session, round, checkpoint, from, status, source_bad)
MEMBERS(DurableRoomAsked, tier, bytes, stage, for_another)
MEMBERS(FetchRoomAsked, token, fetched, useful)
MEMBERS(PinAsked, token, request)
MEMBERS(RepairAsked, token, request)
MEMBERS(ReplaceAsked, token, request)
MEMBERS(RemoveCheckpointAsked, token, request)
MEMBERS(SetPolicyAsked, token, policy, text)
MEMBERS(StopNoticed, attempt, rank, left_ms, last)
MEMBERS(StepsHeld, attempt, round, passed)
MEMBERS(NodeLeaving, leaving)
MEMBERS(AwaitAsked, token, attempt, rank, step, stage)
MEMBERS(SessionAsked, token, attempt, rank, process, wanted, may_wait, reads_by_itself, may_reshard,
        reads_parts, deadline_ms, label)
MEMBERS(AttachAsked, token, rank, wanted, any_tier, again, parts)
MEMBERS(RecordsAsked, token, checkpoint)
MEMBERS(ListAsked, token, before, may_wait)
MEMBERS(LoadReported, token, attempt, rank, session, round, loaded, copy_is_bad, wants_mismatch,
        problem, shards_are_bad, of_another_run)
MEMBERS(RequestExpired, token)
MEMBERS(RequestCancelled, token)
MEMBERS(RestorePointAsked, token, request)
MEMBERS(NodeArrived::Joining, rank, process)
MEMBERS(NodeArrived, shards, seats, lends_bytes, labels, joining, reads_remote, leaving)
MEMBERS(PrefetchEnded, checkpoint, rank, from, status)

MEMBERS(Refused, token, failure)
MEMBERS(JoinAccepted, token, attempt, rank, world_size, decided, descent, last_step)
MEMBERS(SavePermitted, token, descent)
MEMBERS(RoomAnswered, token, made)
MEMBERS(StageReached, token, stage, unix_ms)
MEMBERS(RemoteReader, node, ranks)
MEMBERS(SourceOffered, token, attempt, rank, session, round, checkpoint, from, why, bytes, peers,
        readers)
MEMBERS(StepOffered, token, attempt, rank, session, round, checkpoint, world_size)
MEMBERS(SessionEnded, token, session, round, checkpoint, descent, passed_over)
MEMBERS(ShardLocated::Place, tier, why_not)
MEMBERS(ShardLocated, token, checkpoint, world_size, places, elsewhere, peers, remote_reader)
MEMBERS(RecordsLocated::Holder, node, remote)
MEMBERS(RecordsLocated::Run, holder, count)
MEMBERS(RecordsLocated, token, checkpoint, world_size, holders, runs)
MEMBERS(Listed, token, listing)
MEMBERS(GiveUp, checkpoint, failure)
MEMBERS(Superseded, by)
MEMBERS(HoldSteps, attempt, round)
MEMBERS(LastStepChosen, attempt, step, left_ms)
MEMBERS(CopyUnneeded, checkpoint, rank)
MEMBERS(CopyDoubted, checkpoint, rank)
MEMBERS(PersistState, state, on_disk)
MEMBERS(RestorePointSet, token, text)
MEMBERS(Reported, report)
MEMBERS(FlushWanted, checkpoint, to, world_size, shards, opening, verify, groups, zstd_level,
        zstd_threads, replace)
MEMBERS(FlushUnwanted, checkpoint, to)
MEMBERS(ManifestWanted, checkpoint, world_size, opening, descent, shards)
MEMBERS(RemovalWanted, checkpoint, tier, world_size)
MEMBERS(AdminAnswered, token, reply)
MEMBERS(PrefetchWanted, checkpoint, world_size, shards)
MEMBERS(PrefetchUnwanted, checkpoint)

MEMBERS(StateTold, highest_epoch, state)
MEMBERS(JobHosted::LocalRank, rank, pid, start_ticks)
MEMBERS(JobHosted, uid, gid, attempt, world_size, ranks)
MEMBERS(JobSought, uid, gid, reads, wait_ms)
MEMBERS(JobsRemoved, jobs)
MEMBERS(JobLetGo, job, bytes, status)
MEMBERS(StateKept, state)
MEMBERS(AdminForwarded, token, uid, gid, request)
MEMBERS(AdminReturned, token, status, reply)

static_assert(std::is_empty_v<CollectGarbageAsked> && std::is_empty_v<StateAsked> &&
              std::is_empty_v<JobAbsent>);
std::tuple<> Members(const CollectGarbageAsked&) {
  return {};
}
std::tuple<> Members(const StateAsked&) {
  return {};
}
std::tuple<> Members(const JobAbsent&) {
  return {};
}

template <typename T>
constexpr bool kLocal =
    std::is_same_v<T, StateWritten> || std::is_same_v<T, WakeUp> || std::is_same_v<T, JobRemoved> ||
    std::is_same_v<T, RemovalAgreed> || std::is_same_v<T, NodeLeft>;

template <typename T>
concept HasMembers = requires(T& t) {
  Members(t);
};
template <typename T>
concept IsProto = std::is_base_of_v<google::protobuf::Message, T>;
template <typename T>
concept IsOptional = requires(T& t) {
  t.has_value();
};
template <typename T>
concept IsList = requires(T& t) {
  t.begin();
  t.size();
}
&&!std::is_same_v<T, std::string> && !std::is_same_v<T, LayoutHash>;
template <typename T>
concept IsVariant = requires(T& t) {
  t.index();
};

// ---- Comparison ----

template <typename T>
void ExpectSame(const T& a, const T& b, const std::string& where) {
  if constexpr (IsProto<T>) {
    EXPECT_EQ(a.ShortDebugString(), b.ShortDebugString()) << where;
  } else if constexpr (std::is_same_v<T, absl::Status>) {
    EXPECT_EQ(ToString(a), ToString(b)) << where;
  } else if constexpr (std::is_same_v<T, MonotonicTime>) {
    EXPECT_EQ(a.ns, b.ns) << where;
  } else if constexpr (std::is_same_v<T, LayoutHash> || std::is_same_v<T, JobUuid>) {
    EXPECT_TRUE(a == b) << where;
  } else if constexpr (IsVariant<T>) {
    ASSERT_EQ(a.index(), b.index()) << where;
    std::visit(
        [&](const auto& value) {
          ExpectSame(value, std::get<std::remove_cvref_t<decltype(value)>>(b), where);
        },
        a);
  } else if constexpr (IsOptional<T>) {
    ASSERT_EQ(a.has_value(), b.has_value()) << where;
    if (a) {
      ExpectSame(*a, *b, where);
    }
  } else if constexpr (IsList<T>) {
    ASSERT_EQ(a.size(), b.size()) << where;
    auto it = b.begin();
    int i = 0;
    for (const auto& each : a) {
      ExpectSame(each, *it++, absl::StrCat(where, "[", i++, "]"));
    }
  } else if constexpr (HasMembers<const T>) {
    const auto x = Members(a);
    const auto y = Members(b);
    [&]<size_t... i>(std::index_sequence<i...>) {
      (ExpectSame(std::get<i>(x), std::get<i>(y), absl::StrCat(where, ".", i)), ...);
    }
    (std::make_index_sequence<std::tuple_size_v<decltype(x)>>());
  } else {
    EXPECT_EQ(a, b) << where;
  }
}

// ---- Distinct values in all fields ----

class Filler {
 public:
  explicit Filler(NodeId node) : node_(node) {}

  template <typename T>
  void Fill(T& value) {
    if constexpr (HasMembers<T>) {
      std::apply([this](auto&... each) { (this->Fill(each), ...); }, Members(value));
      Mend(value);
    } else if constexpr (IsOptional<T>) {
      Fill(value.emplace());
    } else if constexpr (std::is_same_v<T, std::set<Step>>) {
      value = {Next(), Next()};
    } else if constexpr (IsList<T>) {
      value.resize(2);
      for (auto& each : value) {
        Fill(each);
      }
      Mend(value);
    } else if constexpr (std::is_same_v<T, bool>) {
      value = !value;
    } else if constexpr (std::is_same_v<T, std::string>) {
      value = absl::StrCat("text-", Next());
    } else if constexpr (std::is_same_v<T, uint32_t>) {
      value = static_cast<uint32_t>(70'000 + Next());
    } else if constexpr (std::is_integral_v<T>) {
      value =
          static_cast<T>((sizeof(T) == 8 ? int64_t{1} << 41 : 0) + static_cast<int64_t>(Next()));
    } else {
      FillOne(value);
    }
  }

 private:
  uint64_t Next() { return ++next_; }

  void FillOne(JobUuid& job) { job = Header().job; }
  void FillOne(LayoutHash& hash) { hash.fill(static_cast<uint8_t>(Next())); }
  void FillOne(TierKind& tier) {
    tier = tier == TierKind::kNvme ? TierKind::kRemote : TierKind::kNvme;
  }
  void FillOne(SeatLost::How& how) { how = SeatLost::How::kLeft; }
  void FillOne(InventoryState::Kind& kind) { kind = InventoryState::Kind::kFailed; }
  void FillOne(v1::AwaitSave::Stage& stage) { stage = v1::AwaitSave::STAGE_REMOTE; }
  void FillOne(v1::TierPolicy::Verify& verify) { verify = v1::TierPolicy::VERIFY_SAMPLE; }
  void FillOne(v1::Failure::Reason& reason) { reason = v1::Failure::REASON_NO_ROOM; }
  void FillOne(absl::StatusCode& code) { code = absl::StatusCode::kUnauthenticated; }
  void FillOne(absl::Status& status) {
    status = absl::DataLossError(absl::StrCat("broken ", Next()));
  }
  void FillOne(Report::Kind& kind) { kind = Report::Kind::kTierWell; }
  // As long ago as whole milliseconds: so nothing is rounded.
  void FillOne(MonotonicTime& time) {
    time = kNow.now + -std::chrono::milliseconds(static_cast<int64_t>(1000 * Next()));
  }
  void FillOne(v1::Listing& listing) {
    v1::ListedCheckpoint& listed = *listing.add_checkpoints();
    listed.set_attempt(Next());
    listed.set_step(Next());
    listed.set_world_size(static_cast<uint32_t>(Next()));
    listed.set_on_line(true);
    listed.add_tiers("nvme");
    listed.set_bytes(Next());
    listed.set_unix_ms(static_cast<int64_t>(Next()));
    listing.set_more(true);
    listing.set_unread("what lies in remote is still being read");
  }
  void FillOne(v1::Policy& policy) {
    policy.mutable_nvme()->set_every_steps(Next());
    policy.mutable_remote()->set_keep_last(static_cast<uint32_t>(Next()));
    policy.set_replicas(1 + static_cast<uint32_t>(Next() % 4));
  }
  void FillOne(v1::SetRestorePointRequest& request) {
    request.set_job("train-7b");
    request.set_step(Next());
    request.set_attempt(Next());
    request.set_from_scratch(true);
    request.set_clear(true);
  }
  void FillOne(v1::PinRequest& request) {
    request.set_job("train-7b");
    request.set_step(Next());
    request.set_attempt(Next());
    request.set_unpin(true);
  }
  void FillOne(v1::RepairRequest& request) {
    request.set_job("train-7b");
    request.set_step(Next());
    request.set_attempt(Next());
    request.set_tier("nvme");
    request.set_rank(0);
    request.set_look(true);
  }
  void FillOne(v1::ReplaceRequest& request) {
    request.set_job("train-7b");
    request.set_node("n3");
    request.set_with("n9");
  }
  void FillOne(v1::RemoveCheckpointRequest& request) {
    request.set_job("train-7b");
    request.set_step(Next());
    request.set_attempt(Next());
    request.set_tier("nvme");
    request.set_force(true);
  }
  void FillOne(std::variant<v1::PinReply, v1::RemoveCheckpointReply, v1::SetOptionsReply,
                            v1::ReplaceReply, v1::RepairReply>& reply) {
    v1::RemoveCheckpointReply removed;
    removed.set_text("gone");
    removed.set_bytes_freed(Next());
    reply = removed;
  }
  void FillOne(ForwardedRequest& request) {
    v1::ExplainRequest explain;
    explain.set_job("train-7b");
    explain.set_step(Next());
    request = explain;
  }
  void FillOne(ReturnedReply& reply) {
    v1::SetOptionsReply options;
    options.set_text("set");
    reply = options;
  }
  void FillOne(v1::JobState& state) {
    state.set_job_uuid(Header().job.ToBytes());
    state.set_name("train-7b");
    state.set_uid(static_cast<uint32_t>(Next()));
    state.set_version(Next());
    state.set_highest_epoch(Next());
    FillOne(*state.mutable_policy());
    v1::AttemptState& attempt = *state.add_attempts();
    attempt.set_attempt(Next());
    attempt.set_world_size(static_cast<uint32_t>(Next()));
    attempt.set_launch("launch");
    v1::MemberState& member = *state.add_members();
    member.set_rank(static_cast<uint32_t>(Next()));
    member.mutable_process()->set_pid(static_cast<int32_t>(Next()));
    SetNodeRanges({"node-3"}, state.mutable_nodes());
    state.add_pins()->set_attempt(Next());
  }

  // What must fit together.
  template <typename T>
  void Mend(T&) {}
  void Mend(ProcessId& process) { process.node = node_; }
  void Mend(std::vector<Descent>& line) {
    line[1].attempt = line[0].parent.attempt = line[0].attempt - 3;
    line[1].parent.attempt = line[1].attempt - 2;
  }
  void Mend(SealedCopy& copy) {
    copy.job_name = Header().job_name;
    copy.descent[0].attempt = copy.id.attempt;
    Mend(copy.descent);
  }
  void Mend(DurableCopy& copy) {
    copy.record_bytes = 1000 + Next();
    copy.file_bytes = copy.copy.image_bytes - Next();
  }
  void Mend(ShardDrained& m) {
    m.status = absl::OkStatus();  // (that of ManifestDone and others is one)
    m.copy.copy.id.attempt = m.checkpoint.attempt;
    m.copy.copy.id.step = m.checkpoint.step;
    m.copy.copy.id.rank = m.rank;
    Mend(m.copy.copy);
  }
  void Mend(ShardLocated& m) { m.places[1].tier = TierKind::kRemote; }
  void Mend(RecordsLocated& m) {
    m.runs[0].holder = 1;
    m.runs[1].holder = 2;
    m.world_size = m.runs[0].count + m.runs[1].count;
  }
  void Mend(FlushWanted& m) {
    m.world_size = 100'000;
    m.shards[0].group = 2;
    m.shards[1].group = 0;
    m.zstd_level = 7;
    m.zstd_threads = 9;
  }
  void Mend(SpareAsked& m) { m.stage = static_cast<uint32_t>(EvictionStage::kDraining); }
  void Mend(DurableRoomAsked& m) { m.stage = static_cast<uint32_t>(RoomStage::kEndedJobs); }
  void Mend(PrefetchWanted& m) { m.world_size = 100'000; }
  void Mend(JobHosted& m) { m.world_size = 100'000; }
  void Mend(ManifestWanted& m) {
    for (DurableCopy& shard : m.shards) {
      shard.copy.id.attempt = m.checkpoint.attempt;
      shard.copy.id.step = m.checkpoint.step;
      Mend(shard.copy);
    }
  }

  const NodeId node_;
  uint64_t next_ = 100;
};

// The least that a message must say.
class Least {
 public:
  template <typename T>
  void Fill(T& m) {
    if constexpr (requires { m.attempt; } && !std::is_same_v<T, JoinAsked>) {
      m.attempt = 1;
    }
    if constexpr (requires { m.checkpoint; } && !std::is_same_v<T, SessionEnded>) {
      m.checkpoint.attempt = 1;
    }
    if constexpr (requires { m.world_size; }) {
      m.world_size = 1;
    }
    if constexpr (requires { m.fetched; }) {
      m.fetched.attempt = 1;
    }
    if constexpr (std::is_same_v<T, SpareAsked>) {
      m.for_job = "j";
    } else if constexpr (std::is_same_v<T, Superseded>) {
      m.by = 1;
    } else if constexpr (std::is_same_v<T, ShardDrained>) {
      m.status = absl::CancelledError("");
    } else if constexpr (std::is_same_v<T, PersistState> || std::is_same_v<T, StateKept>) {
      m.state.set_job_uuid(Header().job.ToBytes());
      m.state.set_name(Header().job_name);
    } else if constexpr (std::is_same_v<T, AdminReturned>) {
      m.status = absl::CancelledError("");
    } else if constexpr (std::is_same_v<T, ReplicasDropped>) {
      m.ranks = {0};
    } else if constexpr (std::is_same_v<T, JobsRemoved>) {
      m.jobs = {Header().job};
    } else if constexpr (std::is_same_v<T, JobLetGo>) {
      m.job = Header().job;
    }
  }
};

absl::StatusOr<std::string> Encoded(const ToCoordinator& message) {
  return EncodePeer(Header(), message, kNow);
}
absl::StatusOr<std::string> Encoded(const ToAgent& message) {
  return EncodePeer(Header(), message);
}
absl::StatusOr<std::string> Encoded(const NodeMessage& message) {
  return EncodePeer(Header(), message);
}

template <typename Variant, typename T>
void ExpectArrives(const T& said, const T& expected, const std::string& what) {
  const absl::StatusOr<std::string> bytes = Encoded(Variant(said));
  ASSERT_TRUE(bytes.ok()) << what << ": " << ToString(bytes.status());
  const absl::StatusOr<PeerSaid> come = DecodePeer(*bytes, Context());
  ASSERT_TRUE(come.ok()) << what << ": " << ToString(come.status());
  EXPECT_EQ(come->header.job, Header().job);
  EXPECT_EQ(come->header.epoch, 300u);
  if constexpr (!std::is_same_v<Variant, ToCoordinator>) {
    ASSERT_TRUE(std::holds_alternative<Variant>(come->messages)) << what;
    ASSERT_TRUE(std::holds_alternative<T>(std::get<Variant>(come->messages))) << what;
    ExpectSame(std::get<T>(std::get<Variant>(come->messages)), expected, what);
  } else {
    ASSERT_EQ(come->messages.index(), 0u) << what;
    const auto& messages = std::get<std::vector<ToCoordinator>>(come->messages);
    ASSERT_EQ(messages.size(), 1u) << what;
    ASSERT_TRUE(std::holds_alternative<T>(messages.front())) << what;
    ExpectSame(std::get<T>(messages.front()), expected, what);
  }
}

template <typename... Types>
std::variant<Types...> AlternativesOf(const std::variant<Types...>&);

// f.template operator()<T>() for each alternative.
template <typename Named, typename F>
void ForEachKind(const F& f) {
  using Variant = decltype(AlternativesOf(std::declval<Named>()));
  [&]<size_t... i>(std::index_sequence<i...>) {
    (f.template operator()<std::variant_alternative_t<i, Variant>>(i), ...);
  }
  (std::make_index_sequence<std::variant_size_v<Variant>>());
}

template <typename Variant>
void ExpectAllArrive() {
  ForEachKind<Variant>([]<typename T>(size_t i) {
    if constexpr (kLocal<T>) {
      const auto bytes = Encoded(Variant(T()));
      EXPECT_EQ(bytes.status().code(), absl::StatusCode::kInternal) << i;
    } else {
      T said;
      T expected;
      Filler(kHere).Fill(said);
      Filler(kSender).Fill(expected);
      ExpectArrives<Variant>(said, expected, absl::StrCat("filled ", i));
      T least;
      Least().Fill(least);
      T least_expected = least;
      if constexpr (requires { least_expected.process; }) {
        least_expected.process.node = kSender;
      }
      if constexpr (requires { least_expected.caller; }) {
        least_expected.caller.process.node = kSender;
      }
      ExpectArrives<Variant>(least, least_expected, absl::StrCat("least ", i));
    }
  });
}

TEST(PeerCodecTest, WhatAgentsSayArrivesWithAllItsFields) {
  ExpectAllArrive<ToCoordinator>();
}

TEST(PeerCodecTest, WhatCoordinatorsSayArrivesWithAllItsFields) {
  ExpectAllArrive<ToAgent>();
}

TEST(PeerCodecTest, WhatNodesSayArrivesWithAllItsFields) {
  ExpectAllArrive<NodeMessage>();
}

// Of the release before, as tests/compat has it: what it says is what it knows of.
class OlderDaemon {
 public:
  OlderDaemon() {
    std::ifstream file(
        std::string(HOLDFAST_SOURCE_DIR) + "/tests/fixtures/protocol/0.1/schema.binpb",
        std::ios::binary);
    google::protobuf::FileDescriptorSet set;
    EXPECT_TRUE(set.ParseFromIstream(&file));
    for (const google::protobuf::FileDescriptorProto& each : set.file()) {
      EXPECT_NE(pool_.BuildFile(each), nullptr);
    }
  }
  // Empty: it has no such message.
  std::string Says(const std::string& bytes) {
    const google::protobuf::Descriptor* const type =
        pool_.FindMessageTypeByName("holdfast.v1.PeerMessage");
    std::unique_ptr<google::protobuf::Message> message(factory_.GetPrototype(type)->New());
    EXPECT_TRUE(message->ParseFromString(bytes));
    message->DiscardUnknownFields();
    const bool known = message->GetReflection()->HasOneof(*message, type->FindOneofByName("body"));
    return known ? message->SerializeAsString() : "";
  }

 private:
  google::protobuf::DescriptorPool pool_;
  google::protobuf::DynamicMessageFactory factory_;
};

template <typename Variant>
int ExpectUnderstoodOf(OlderDaemon& older) {
  int understood = 0;
  ForEachKind<Variant>([&]<typename T>(size_t i) {
    if constexpr (!kLocal<T>) {
      T said;
      Filler(kHere).Fill(said);
      const std::string bytes = older.Says(*Encoded(Variant(said)));
      if (!bytes.empty()) {
        ++understood;
        const absl::StatusOr<PeerSaid> come = DecodePeer(bytes, Context());
        EXPECT_TRUE(come.ok()) << i << ": " << ToString(come.status());
      }
    }
  });
  return understood;
}

TEST(PeerCodecTest, WhatAnOlderDaemonDoesNotSayIsNotMissed) {
  OlderDaemon older;
  EXPECT_GT(ExpectUnderstoodOf<ToCoordinator>(older), 40);
  EXPECT_GT(ExpectUnderstoodOf<ToAgent>(older), 25);
  EXPECT_GT(ExpectUnderstoodOf<NodeMessage>(older), 9);
}

// Each value of an enum, one after the other: what is not in the codec's tables does not arrive.
template <typename Variant, typename T, typename E>
void ExpectEachArrives(E T::*member, E last) {
  for (int i = 0; i <= static_cast<int>(last); ++i) {
    T m;
    Least().Fill(m);
    m.*member = static_cast<E>(i);
    T expected = m;
    if constexpr (requires { expected.process; }) {
      expected.process.node = kSender;
    }
    ExpectArrives<Variant>(m, expected, absl::StrCat("value ", i));
  }
}

TEST(PeerCodecTest, EveryValueOfAnEnumArrives) {
  ExpectEachArrives<ToCoordinator>(&SeatLost::how, SeatLost::How::kLeft);
  ExpectEachArrives<ToCoordinator>(&InventoryState::kind, InventoryState::Kind::kFailed);
  ExpectEachArrives<ToCoordinator>(&ShardGood::tier, TierKind::kRemote);
  ExpectEachArrives<ToCoordinator>(&AwaitAsked::stage, v1::AwaitSave::STAGE_REMOTE);
  ExpectEachArrives<ToAgent>(&SourceOffered::from, TierKind::kRemote);
  for (const auto verify : {v1::TierPolicy::VERIFY_SAMPLE, v1::TierPolicy::VERIFY_ALL}) {
    FlushWanted m;
    Least().Fill(m);
    m.verify = verify;
    ExpectArrives<ToAgent>(m, m, absl::StrCat("verify ", static_cast<int>(verify)));
  }
  for (int kind = 0; kind <= static_cast<int>(Report::Kind::kTrouble); ++kind) {
    const Reported m{{static_cast<Report::Kind>(kind), "job", "text", 1, TierKind::kMemory}};
    ExpectArrives<ToAgent>(m, m, absl::StrCat("report ", kind));
  }
  for (int code = 1; code <= 16; ++code) {
    const ManifestDone m{{1, 2}, absl::Status(static_cast<absl::StatusCode>(code), "why")};
    ExpectArrives<ToCoordinator>(m, m, absl::StrCat("status ", code));
    for (int reason = 0; v1::Failure::Reason_IsValid(reason); ++reason) {
      const Refused refused{
          1,
          {static_cast<absl::StatusCode>(code), static_cast<v1::Failure::Reason>(reason), "why"}};
      ExpectArrives<ToAgent>(refused, refused, absl::StrCat("failure ", code, " ", reason));
    }
  }
}

TEST(PeerCodecTest, EveryAdminsAnswerArrives) {
  v1::PinReply pin;
  pin.set_text("pinned");
  v1::SetOptionsReply options;
  options.set_text("set");
  v1::ReplaceReply replaced;
  replaced.set_text("gets it");
  replaced.set_ranks(2);
  v1::RepairReply repair;
  repair.add_copies()->set_what("bad");
  repair.add_mended()->set_source("the memory");
  ExpectArrives<ToAgent>(AdminAnswered{1, repair}, AdminAnswered{1, repair}, "repair");
  ExpectArrives<ToAgent>(AdminAnswered{1, pin}, AdminAnswered{1, pin}, "pin");
  ExpectArrives<ToAgent>(AdminAnswered{1, replaced}, AdminAnswered{1, replaced}, "replace");
  ExpectArrives<ToAgent>(AdminAnswered{1, options}, AdminAnswered{1, options}, "options");
}

// Each request that ckptctl makes of another node, and each answer.
TEST(PeerCodecTest, EveryForwardedRequestAndReplyArrives) {
  ForEachKind<ForwardedRequest>([]<typename T>(size_t i) {
    T request;
    if constexpr (requires { request.set_job("train-7b"); }) {
      request.set_job("train-7b");
    } else {
      request.set_node("n3");
    }
    const AdminForwarded said{1, 1000, 1001, request};
    ExpectArrives<NodeMessage>(said, said, absl::StrCat("request ", i));
  });
  ForEachKind<ReturnedReply>([]<typename T>(size_t i) {
    if constexpr (!std::is_same_v<T, std::monostate>) {
      const AdminReturned said{1, absl::OkStatus(), T()};
      ExpectArrives<NodeMessage>(said, said, absl::StrCat("reply ", i));
    }
  });
}

// Of a node, not of a job.
TEST(PeerCodecTest, WhatIsAskedOfANodeNamesNoJob) {
  const auto bytes =
      EncodePeer(PeerHeader{}, NodeMessage(AdminForwarded{1, 0, 0, v1::GetStatusRequest()}));
  ASSERT_TRUE(bytes.ok()) << ToString(bytes.status());
  EXPECT_TRUE(DecodePeer(*bytes, Context()).ok());
  EXPECT_FALSE(EncodePeer(PeerHeader{}, NodeMessage(StateAsked{})).ok());
}

TEST(PeerCodecTest, NumbersAtTheirLimitsArrive) {
  const uint64_t most = std::numeric_limits<uint64_t>::max();
  const SaveAsked save{most, most, kWorldSizeMax - 1, most};
  ExpectArrives<ToCoordinator>(save, save, "save");
  const ShardSealed sealed{most,          kWorldSizeMax - 1, most,
                           kWorldSizeMax, kImageBytesMax,    std::numeric_limits<int64_t>::min(),
                           false};
  ExpectArrives<ToCoordinator>(sealed, sealed, "sealed");
  const RoomAsked room{
      0, 1, 0, 0, {{1, most}, {most, 0}, {2, 5}}, {{{most, 1}, 7}, {{1, most}, 0}}};
  ExpectArrives<ToCoordinator>(room, room, "columns");
}

// ---- Copies ----

SealedCopy CopyOf(Attempt attempt, Step step, Rank rank, std::vector<Descent> descent) {
  SealedCopy copy;
  copy.id = {Header().job, attempt, step, rank};
  copy.job_name = Header().job_name;
  copy.world_size = 64;
  copy.generation = 10 + rank;
  copy.image_bytes = (uint64_t{40} << 30) + rank;
  copy.layout_hash.fill(static_cast<uint8_t>(rank));
  copy.descent = std::move(descent);
  copy.sealed_unix_ms = 1'700'000'000'000 + rank;
  return copy;
}

TEST(PeerCodecTest, CopiesArriveInTheirOrderWhateverTheyHaveInCommon) {
  const std::vector<Descent> one = {{3, {2, 900}}, {2, {1, 100}}, {1, {}}};
  const std::vector<Descent> other = {{3, {2, 800}}, {2, {}}};
  NodeArrived arrived;
  arrived.shards = {{CopyOf(3, 7, 0, one), ProcessId{0, 5}},  // pid 0: of another pid namespace
                    {CopyOf(3, 7, 1, one), std::nullopt},
                    {CopyOf(3, 8, 0, one), ProcessId{INT32_MAX, 0}},
                    {CopyOf(3, 7, 2, other), std::nullopt},
                    {CopyOf(3, 7, 3, {}), std::nullopt},
                    {CopyOf(3, 7, 4, {}), std::nullopt},
                    {CopyOf(2, 7, 0, {{2, {1, 100}}, {1, {}}}), ProcessId{4, 6}}};
  arrived.shards[1].copy.layout_hash = {};
  arrived.shards[5].copy.world_size = 65;
  arrived.seats.resize(3);
  for (NodeArrived::Seat& seat : arrived.seats) {
    seat.attempt = 3;
  }
  arrived.seats[1].writing = {0};  // step 0 is a step
  arrived.seats[2].writing = {0, 1, std::numeric_limits<Step>::max()};
  arrived.seats[2].last_begun = 0;
  NodeArrived expected = arrived;
  for (FoundShard& shard : expected.shards) {
    if (shard.writer) {
      shard.writer->node = kSender;
    }
  }
  for (NodeArrived::Seat& seat : expected.seats) {
    seat.process.node = kSender;
  }
  ExpectArrives<ToCoordinator>(arrived, expected, "arrived");

  CopiesFound found;
  found.copies = {{CopyOf(3, 7, 0, one), 0, 0, true, ""},
                  {CopyOf(3, 7, 1, one), 5, 6, false, "/mnt/a"},
                  {CopyOf(3, 7, 2, one), 7, 0, true, "/mnt/grün"}};
  ExpectArrives<ToCoordinator>(found, found, "found");
  // Bad ones: by a record, and by their names alone.
  found.bad = {{{CopyOf(3, 7, 3, one), 5, 6, false, "/mnt/b"}, "it was cut"}, {}};
  SealedCopy& named = found.bad[1].copy.copy;
  named.id = CopyOf(3, 7, 4, {}).id;
  named.job_name = CopyOf(3, 7, 4, {}).job_name;
  found.bad[1].copy.location = "/mnt/c";
  ExpectArrives<ToCoordinator>(found, found, "bad ones, too");
  CopiesFound said = found;  // how long its file is stays at its node
  said.bad[1].copy.copy.image_bytes = 4711;
  ExpectArrives<ToCoordinator>(said, found, "a length");
  said.bad.resize(kBadCopiesMax + 1, found.bad[1]);
  EXPECT_FALSE(Encoded(ToCoordinator(said)).ok());
}

TEST(PeerCodecTest, OfAnotherJobNoCopyIsSaid) {
  CopiesFound found;
  found.copies = {{CopyOf(3, 7, 0, {}), 0, 0, true, ""}};
  EXPECT_TRUE(Encoded(ToCoordinator(found)).ok());
  CopiesFound other_uuid = found;
  other_uuid.copies[0].copy.id.job.bytes[0] = 0;
  EXPECT_FALSE(Encoded(ToCoordinator(other_uuid)).ok());
  CopiesFound other_name = found;
  other_name.copies[0].copy.job_name = "other";
  EXPECT_FALSE(Encoded(ToCoordinator(other_name)).ok());
}

// A process of a third node is nobody's whom the receiver could name.
TEST(PeerCodecTest, OnlyProcessesOfThisNodeAreSaid) {
  SeatLost lost{1, 0, ProcessId{1, 2, 3}};
  EXPECT_FALSE(Encoded(ToCoordinator(lost)).ok());
}

TEST(PeerCodecTest, AFailedFlushMayHaveACopyOrNone) {
  ShardDrained drained;
  drained.checkpoint = {3, 7};
  drained.rank = 1;
  drained.status = absl::AlreadyExistsError("it is there");
  ExpectArrives<ToCoordinator>(drained, drained, "none");
  drained.copy.copy = CopyOf(3, 7, 1, {});
  ExpectArrives<ToCoordinator>(drained, drained, "one");
  drained.copy.copy = CopyOf(3, 7, 2, {});
  EXPECT_FALSE(Encoded(ToCoordinator(drained)).ok());
  drained.copy = {};
  drained.status = absl::OkStatus();
  EXPECT_FALSE(Encoded(ToCoordinator(drained)).ok());
}

// ---- Times ----

CopiesFound TimesSeen(MonotonicTime began, MonotonicTime as_of, MonotonicTime sender,
                      MonotonicTime receiver, Duration slack) {
  CopiesFound found;
  found.began = began;
  found.as_of = as_of;
  const auto bytes = EncodePeer(Header(), ToCoordinator(found), {sender, 0});
  EXPECT_TRUE(bytes.ok()) << ToString(bytes.status());
  PeerContext context;
  context.now.now = receiver;
  context.slack = slack;
  const auto come = DecodePeer(*bytes, context);
  EXPECT_TRUE(come.ok()) << ToString(come.status());
  return std::get<CopiesFound>(std::get<std::vector<ToCoordinator>>(come->messages).front());
}

TEST(PeerCodecTest, ATimeIsNeverLaterByTheOthersClockThanItWas) {
  // What was 1500.3 ms ago when it was said is 1501 ms and the slack ago when it comes.
  const CopiesFound found =
      TimesSeen({8'499'700'000}, {}, {10'000'000'000}, {77'000'000'000}, std::chrono::seconds(2));
  EXPECT_EQ(found.began.ns, 77'000'000'000 - 1'501'000'000 - 2'000'000'000);
  EXPECT_EQ(found.as_of.ns, 0);  // not set
  const CopiesFound now =
      TimesSeen({10'000'000'000}, {1}, {10'000'000'000}, {77'000'000'000}, Duration(0));
  EXPECT_EQ(now.began.ns, 77'000'000'000);
  EXPECT_EQ(now.as_of.ns, 77'000'000'000 - 10'000'000'000);
}

TEST(PeerCodecTest, ATimeThatIsSetStaysSet) {
  // The receiver's clock began when the time was: by it, it is 0.
  const CopiesFound found =
      TimesSeen({9'000'000'000}, {1'000'000'000}, {10'000'000'000}, {1'000'000'000}, Duration(0));
  EXPECT_EQ(found.began.ns, -1);
  EXPECT_EQ(found.as_of.ns, 1'000'000'000 - 9'000'000'000);
  // A time to come is told as now.
  EXPECT_EQ(TimesSeen({11'000'000'000}, {}, {10'000'000'000}, {5'000'000'000}, {}).began.ns,
            5'000'000'000);
}

// ---- Many at once ----

std::vector<ToCoordinator> SealedBy(int ranks) {
  std::vector<ToCoordinator> sealed;
  for (int i = 0; i < ranks; ++i) {
    sealed.emplace_back(ShardSealed{12,
                                    static_cast<Rank>(12'000 + i),
                                    123'456,
                                    12'288,
                                    (uint64_t{40} << 30) + static_cast<uint64_t>(i * i * 4096),
                                    1'700'000'000'000 + i * 37 % 500,
                                    true,
                                    {}});
    Likeness& likeness = std::get<ShardSealed>(sealed.back()).likeness;
    likeness.tensors.fill(7);
    likeness.content.fill(static_cast<uint8_t>(i));
  }
  return sealed;
}

std::vector<ToCoordinator> Decoded(const std::vector<std::string>& all) {
  std::vector<ToCoordinator> messages;
  for (const std::string& bytes : all) {
    const auto come = DecodePeer(bytes, Context(kHere));
    EXPECT_TRUE(come.ok()) << ToString(come.status());
    const auto& some = std::get<std::vector<ToCoordinator>>(come->messages);
    messages.insert(messages.end(), some.begin(), some.end());
  }
  return messages;
}

TEST(PeerCodecTest, WhatRanksOfANodeSealedOfAStepIsOneMessage) {
  const std::vector<ToCoordinator> said = SealedBy(8);
  const auto encoded = EncodePeer(Header(), said, kNow);
  ASSERT_TRUE(encoded.ok()) << ToString(encoded.status());
  ASSERT_EQ(encoded->size(), 1u);
  const std::vector<ToCoordinator> come = Decoded(*encoded);
  ASSERT_EQ(come.size(), 8u);
  for (size_t i = 0; i < come.size(); ++i) {
    ExpectSame(std::get<ShardSealed>(come[i]), std::get<ShardSealed>(said[i]), absl::StrCat(i));
  }
}

TEST(PeerCodecTest, OnlyWhatIsOfOneStepAndSaidInARowIsOneMessage) {
  const ShardSealed sealed{1, 0, 5, 8, 10, 20, true};
  const auto other = [&](auto change) {
    ShardSealed m = sealed;
    change(m);
    return m;
  };
  const std::vector<ToCoordinator> said = {
      sealed,
      sealed,
      other([](ShardSealed& m) { m.attempt = 2; }),
      sealed,
      other([](ShardSealed& m) { m.step = 6; }),
      sealed,
      other([](ShardSealed& m) { m.world_size = 9; }),
      sealed,
      other([](ShardSealed& m) { m.time_sure = false; }),
      SaveAsked{1, 1, 0, 6},
      other([](ShardSealed& m) { m.time_sure = false; }),
      SaveAsked{1, 1, 0, 6},
  };
  const auto encoded = EncodePeer(Header(), said, kNow);
  ASSERT_TRUE(encoded.ok()) << ToString(encoded.status());
  EXPECT_EQ(encoded->size(), said.size() - 1);
  const std::vector<ToCoordinator> come = Decoded(*encoded);
  ASSERT_EQ(come.size(), said.size());
  for (size_t i = 0; i < come.size(); ++i) {
    ASSERT_EQ(come[i].index(), said[i].index()) << i;
    if (const auto* m = std::get_if<ShardSealed>(&come[i])) {
      ExpectSame(*m, std::get<ShardSealed>(said[i]), absl::StrCat(i));
    }
  }
  EXPECT_TRUE(EncodePeer(Header(), std::vector<ToCoordinator>(), kNow)->empty());
}

// ---- Sizes: they decide what 12,288 ranks cost ----

constexpr size_t kLikenessBytes = 32;
constexpr size_t kUuidBytes = 18;  // with its key and length

size_t SizeOf(const std::string& name, const absl::StatusOr<std::string>& bytes) {
  EXPECT_TRUE(bytes.ok()) << ToString(bytes.status());
  ::testing::Test::RecordProperty(name, static_cast<int>(bytes->size()));
  return bytes->size();
}

TEST(PeerCodecTest, SmallMessagesAreSmall) {
  const uint64_t token = 1'000'000;
  EXPECT_LE(SizeOf("SaveAsked", Encoded(ToCoordinator(SaveAsked{token, 12, 12'287, 123'456}))),
            kUuidBytes + 40);
  EXPECT_LE(SizeOf("ShardSealed", Encoded(SealedBy(1).front())), kUuidBytes + 40 + kLikenessBytes);
  EXPECT_LE(SizeOf("AwaitAsked", Encoded(ToCoordinator(AwaitAsked{token, 12, 12'287, 123'456,
                                                                  v1::AwaitSave::STAGE_REMOTE}))),
            kUuidBytes + 40);
  EXPECT_LE(
      SizeOf("LoadReported",
             Encoded(ToCoordinator(LoadReported{token, 12, 12'287, uint64_t{1} << 50, 3, true}))),
      kUuidBytes + 40);
  EXPECT_LE(
      SizeOf("SavePermitted",
             Encoded(ToAgent(SavePermitted{token, {{12, {11, 900}}, {11, {10, 800}}, {10, {}}}}))),
      kUuidBytes + 40);
  EXPECT_LE(SizeOf("SourceOffered", Encoded(ToAgent(SourceOffered{token,
                                                                  12,
                                                                  12'287,
                                                                  uint64_t{1} << 50,
                                                                  1,
                                                                  {11, 123'456},
                                                                  TierKind::kMemory,
                                                                  "",
                                                                  uint64_t{40} << 30}))),
            kUuidBytes + 60);
  EXPECT_LE(SizeOf("StageReached", Encoded(ToAgent(StageReached{
                                       token, v1::AwaitSave::STAGE_COMMITTED, 1'700'000'000'000}))),
            kUuidBytes + 40);
  EXPECT_LE(SizeOf("RequestCancelled", Encoded(ToCoordinator(RequestCancelled{token}))),
            kUuidBytes + 20);
}

TEST(PeerCodecTest, AStepOfANodeIsSmallAndGrowsByAFewBytesARank) {
  const auto eight = EncodePeer(Header(), SealedBy(8), kNow);
  const auto many = EncodePeer(Header(), SealedBy(256), kNow);
  ASSERT_TRUE(eight.ok() && many.ok());
  RecordProperty("ShardsSealed8", static_cast<int>(eight->front().size()));
  RecordProperty("ShardsSealed256", static_cast<int>(many->front().size()));
  EXPECT_LE(eight->front().size(), 200u + 8 * kLikenessBytes);
  EXPECT_LE((many->front().size() - eight->front().size()) / 248, 12u + kLikenessBytes);
}

// What a node of 8 ranks with 3 slots each tells a coordinator that begins.
TEST(PeerCodecTest, AnInventoryIsSmall) {
  NodeArrived arrived;
  std::vector<Descent> line;
  for (Attempt attempt = 40; attempt > 0; --attempt) {
    line.push_back({attempt, attempt == 1 ? CheckpointId() : CheckpointId{attempt - 1, 1000}});
  }
  for (Step step = 1; step <= 3; ++step) {
    for (Rank rank = 0; rank < 8; ++rank) {
      arrived.shards.push_back({CopyOf(40, step, rank, line), ProcessId{5000, 123'456'789}});
    }
  }
  const size_t bytes = SizeOf("NodeArrived", Encoded(ToCoordinator(arrived)));
  EXPECT_LE(bytes, 40u * 5 + 24 * 40);  // the line once, and its hash and little more a copy
}

// ---- Texts ----

TEST(PeerCodecTest, TextsForPeopleAreCutAndMadeUtf8) {
  std::string text;
  while (text.size() <= kPeerTextBytesMax) {
    text += "\xE2\x82\xAC";
  }
  const SaveLost said{1, 0, 0, text};
  SaveLost cut = said;
  cut.why.resize(kPeerTextBytesMax / 3 * 3);
  ExpectArrives<ToCoordinator>(said, cut, "cut between characters");
  ExpectArrives<ToCoordinator>(SaveLost{1, 0, 0, "at /mnt/gr\xFCn"},
                               SaveLost{1, 0, 0, "at /mnt/gr?n"}, "another encoding");
  const ManifestDone done{{1, 1}, absl::DataLossError("gr\xFCn")};
  ExpectArrives<ToCoordinator>(done, ManifestDone{{1, 1}, absl::DataLossError("gr?n")}, "status");
}

TEST(PeerCodecTest, APathIsNeverChanged) {
  const std::string longest(kPeerPathBytesMax, 'x');
  const CopiesAway away{TierKind::kNvme, longest};
  ExpectArrives<ToCoordinator>(away, away, "longest");
  EXPECT_FALSE(Encoded(ToCoordinator(CopiesAway{TierKind::kNvme, longest + "x"})).ok());
  EXPECT_FALSE(Encoded(ToCoordinator(CopiesAway{TierKind::kNvme, "/gr\xFCn"})).ok());
}

// A stage that only the client knows is refused by the coordinator, as ever.
TEST(PeerCodecTest, AStageThatNobodyKnowsIsNone) {
  AwaitAsked asked{1, 1, 0, 0, static_cast<v1::AwaitSave::Stage>(77)};
  AwaitAsked come = asked;
  come.stage = v1::AwaitSave::STAGE_UNSPECIFIED;
  ExpectArrives<ToCoordinator>(asked, come, "stage");
}

// ---- Whom it is about ----

TEST(PeerCodecTest, TheNameIsSentWhereItIsNeeded) {
  const auto name_of = [](const absl::StatusOr<std::string>& bytes) {
    v1::PeerMessage p;
    EXPECT_TRUE(bytes.ok() && p.ParseFromString(*bytes));
    return p.job_name();
  };
  EXPECT_EQ(name_of(Encoded(ToCoordinator(SaveAsked{1, 1, 0, 0}))), "");
  JoinAsked join;
  join.world_size = 1;
  EXPECT_EQ(name_of(Encoded(ToCoordinator(join))), "train-7b");
  // Before the job's uuid is known.
  PeerHeader by_name = Header();
  by_name.job = {};
  const auto bytes = EncodePeer(by_name, ToCoordinator(RequestCancelled{1}), kNow);
  EXPECT_EQ(name_of(bytes), "train-7b");
  EXPECT_EQ(DecodePeer(*bytes, Context())->header, by_name);
  by_name.job_name = "";
  EXPECT_FALSE(EncodePeer(by_name, ToCoordinator(RequestCancelled{1}), kNow).ok());
  PeerHeader by_uuid = Header();
  by_uuid.job_name = "";
  EXPECT_TRUE(EncodePeer(by_uuid, ToCoordinator(RequestCancelled{1}), kNow).ok());
  EXPECT_FALSE(EncodePeer(by_uuid, ToCoordinator(join), kNow).ok());
}

// ---- Damage ----

template <typename Variant>
void AddSamples(std::vector<std::string>& samples) {
  ForEachKind<Variant>([&]<typename T>(size_t) {
    if constexpr (!kLocal<T>) {
      T filled;
      Filler(kHere).Fill(filled);
      samples.push_back(*Encoded(Variant(filled)));
    }
  });
}

// A bit, a byte, a cut, a repeat, a run of one value.
std::string Damaged(std::string bytes, std::mt19937_64& random) {
  const auto below = [&](size_t n) {
    return std::uniform_int_distribution<size_t>(0, n - 1)(random);
  };
  for (size_t i = 0, changes = 1 + below(4); i < changes && !bytes.empty(); ++i) {
    const size_t at = below(bytes.size());
    const size_t length = 1 + below(std::min<size_t>(16, bytes.size() - at));
    switch (below(6)) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
        break;
      case 1:
        bytes[at] = static_cast<char>(below(256));
        break;
      case 2:
        bytes[at] = static_cast<char>(bytes[at] + 1);
        break;
      case 3:
        bytes.erase(at, length);
        break;
      case 4:
        bytes.insert(at, bytes.substr(at, length));
        break;
      default:
        bytes.insert(at, length, static_cast<char>(below(2) * 0xFF));
        break;
    }
  }
  return bytes;
}

std::vector<std::string> Again(const PeerSaid& said) {
  if (const auto* to_agent = std::get_if<ToAgent>(&said.messages)) {
    const auto bytes = EncodePeer(said.header, *to_agent);
    EXPECT_TRUE(bytes.ok()) << ToString(bytes.status());
    return bytes.ok() ? std::vector<std::string>{*bytes} : std::vector<std::string>();
  }
  if (const auto* to_node = std::get_if<NodeMessage>(&said.messages)) {
    const auto bytes = EncodePeer(said.header, *to_node);
    EXPECT_TRUE(bytes.ok()) << ToString(bytes.status());
    return bytes.ok() ? std::vector<std::string>{*bytes} : std::vector<std::string>();
  }
  const auto all =
      EncodePeer(said.header, std::get<std::vector<ToCoordinator>>(said.messages), kNow);
  EXPECT_TRUE(all.ok()) << ToString(all.status());
  return all.ok() ? *all : std::vector<std::string>();
}

// What is taken can be said again, and is then the same.
TEST(PeerCodecTest, DamageIsRefusedOrMakesAnotherMessageThatCouldHaveBeenSaid) {
  std::vector<std::string> samples;
  AddSamples<ToCoordinator>(samples);
  AddSamples<ToAgent>(samples);
  AddSamples<NodeMessage>(samples);
  std::mt19937_64 random(5);
  size_t taken = 0;
  constexpr int kRounds = 40'000;
  for (int round = 0; round < kRounds && !HasFailure(); ++round) {
    SCOPED_TRACE(absl::StrCat("round ", round));
    const std::string bytes = Damaged(samples[static_cast<size_t>(round) % samples.size()], random);
    const auto said = DecodePeer(bytes, Context(kHere));
    if (!said.ok()) {
      EXPECT_EQ(said.status().code(), absl::StatusCode::kInvalidArgument);
      continue;
    }
    ++taken;
    const std::vector<std::string> once = Again(*said);
    ASSERT_EQ(once.size(), 1u);
    const auto said_again = DecodePeer(once.front(), Context(kHere));
    ASSERT_TRUE(said_again.ok()) << ToString(said_again.status());
    EXPECT_EQ(Again(*said_again), once);
  }
  EXPECT_GT(taken, kRounds / 50);  // so both were tried
  EXPECT_LT(taken, kRounds - kRounds / 50);
}

}  // namespace
}  // namespace holdfast
