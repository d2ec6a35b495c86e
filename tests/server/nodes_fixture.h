// One job whose ranks run on several nodes, as its coordinator sees it: every message comes from a
// node, and says to which its answer goes.
//
//   TEST_F(NodesTest, …) { TwoRanks(); SaveBoth(1); EXPECT_TRUE(Committed(1)); }
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/coordinator.h"

namespace holdfast {

inline constexpr uint64_t kShardBytes = 4096;

class NodesTest : public ::testing::Test {
 protected:
  NodesTest() {
    settings_.commit_deadline = std::chrono::minutes(10);
    settings_.slots_per_rank = 3;
    settings_.nodes = &nodes_;
    settings_.nvme = true;
    settings_.remote = true;
    settings_.policy.mutable_nvme()->set_every_steps(1);
    settings_.policy.mutable_nvme()->set_keep_last(1);
    settings_.policy.mutable_remote()->set_every_steps(1);
    settings_.policy.mutable_remote()->set_keep_last(2);
    MakeCoordinator();
    job_->SetOpenedHere();
    for (const NodeId node : {kHere, b_, c_}) {
      Say(node, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
    }
    Say(kHere, InventoryState{TierKind::kRemote, InventoryState::Kind::kKnown, ""});
    out_.clear();
  }

  void MakeCoordinator() {
    JobUuid uuid;
    uuid.bytes[0] = 7;
    job_ = std::make_unique<Coordinator>(settings_, uuid, "job", 1000, 1000, 1);
  }

  // What is to be written is written at once.
  void Say(NodeId from, const ToCoordinator& message) {
    std::vector<ForAgent> out;
    job_->Handle(message, from, Time(), out);
    for (ForAgent& each : out) {
      if (const auto* state = std::get_if<PersistState>(&each.message)) {
        written_ = state->state;
        if (agrees_) {
          Say(kHere, StateWritten{state->state.version(), absl::OkStatus()});
        }
        continue;
      }
      out_.push_back(std::move(each));
    }
    EXPECT_EQ(job_->CheckInvariants(), "");
  }

  EventTime Time() const { return {now_, 1'000'000}; }
  ProcessId Process(NodeId node, Rank rank, int incarnation = 0) const {
    return {static_cast<int32_t>(100 + rank), 5u + static_cast<unsigned>(incarnation), node};
  }

  RequestToken Join(NodeId node, Rank rank, uint32_t world, const std::string& launch = "one",
                    int incarnation = 0) {
    return Ask(node, Joining(node, rank, world, launch, incarnation));
  }
  JoinAsked Joining(NodeId node, Rank rank, uint32_t world, const std::string& launch,
                    int incarnation) {
    JoinAsked join;
    join.connection = ++token_;
    join.caller = {Process(node, rank, incarnation), 1000, 1000};
    join.rank = rank;
    join.world_size = world;
    join.launch = launch;
    join.opening = 99 + token_;
    return join;
  }
  RequestToken Ask(NodeId node, JoinAsked join) {
    join.token = ++token_;
    Say(node, join);
    return token_;
  }
  template <typename T>
  std::vector<std::pair<NodeId, T>> All() const {
    std::vector<std::pair<NodeId, T>> all;
    for (const ForAgent& each : out_) {
      if (const T* message = std::get_if<T>(&each.message)) {
        all.emplace_back(each.to, *message);
      }
    }
    return all;
  }
  template <typename T>
  const T* Answer(RequestToken token) const {
    const T* found = nullptr;
    for (const ForAgent& each : out_) {
      if (const T* message = std::get_if<T>(&each.message); message && message->token == token) {
        found = message;
      }
    }
    return found;
  }

  void Begin(NodeId node, Rank rank, Step step) {
    Say(node, SaveAsked{++token_, job_->attempt(), rank, step});
    ASSERT_NE(Answer<SavePermitted>(token_), nullptr);
  }
  void Seal(NodeId node, Rank rank, Step step) {
    Say(node, ShardSealed{job_->attempt(), rank, step, job_->world_size(), kShardBytes, 1000});
  }
  void Save(NodeId node, Rank rank, Step step) {
    Begin(node, rank, step);
    Seal(node, rank, step);
  }
  // Rank 0 on the coordinator's node, rank 1 on b.
  void TwoRanks() {
    Join(kHere, 0, 2);
    Join(b_, 1, 2);
  }
  // Their processes end, and attempt 2 begins where they were.
  void StartBothAnew() {
    Say(kHere, SeatLost{1, 0, Process(kHere, 0), 0, SeatLost::How::kProcessEnded});
    Say(b_, SeatLost{1, 1, Process(b_, 1), 0, SeatLost::How::kProcessEnded});
    Join(kHere, 0, 2, "two", 1);
    Join(b_, 1, 2, "two", 1);
  }
  void SaveBoth(Step step) {
    Begin(kHere, 0, step);
    Begin(b_, 1, step);
    Seal(kHere, 0, step);
    Seal(b_, 1, step);
  }
  bool Committed(Step step) const { return job_->IsCommitted({1, step}); }

  void Drained(NodeId node, Rank rank, Step step, TierKind to, TierKind from,
               absl::Status status = absl::OkStatus()) {
    ShardDrained drained{{1, step}, rank, to, from, std::move(status), false, {}};
    drained.copy.location = "/drive/x";
    Say(node, drained);
  }
  // All the way: nvme of both nodes, then remote with its manifest.
  void Flush(Step step) {
    Drained(kHere, 0, step, TierKind::kNvme, TierKind::kMemory);
    Drained(b_, 1, step, TierKind::kNvme, TierKind::kMemory);
    Drained(kHere, 0, step, TierKind::kRemote, TierKind::kNvme);
    Drained(b_, 1, step, TierKind::kRemote, TierKind::kNvme);
    Say(kHere, ManifestDone{{1, step}, absl::OkStatus()});
  }
  RequestToken Enter(NodeId node, Rank rank, int incarnation) {
    SessionAsked asked;
    asked.token = ++token_;
    asked.attempt = job_->attempt();
    asked.rank = rank;
    asked.process = Process(node, rank, incarnation);
    asked.may_wait = true;
    Say(node, asked);
    return token_;
  }
  FoundShard Found(Rank rank, Step step) const {
    FoundShard found;
    found.copy.id = {job_->uuid(), 1, step, rank};
    found.copy.job_name = "job";
    found.copy.world_size = 2;
    found.copy.image_bytes = kShardBytes;
    found.copy.sealed_unix_ms = 1000;
    found.copy.descent = {{1, {}}};
    return found;
  }
  // Both ranks live on b, have saved step 1, and are at step 2.
  void BothOnBWriteTheSecond() {
    for (const Rank rank : {0, 1}) {
      Join(b_, rank, 2);
    }
    Save(b_, 0, 1);
    Save(b_, 1, 1);
    Begin(b_, 0, 2);
    Begin(b_, 1, 2);
  }
  NodeArrived WithBothOfTwoSteps() const {
    NodeArrived arrived;
    arrived.shards = {Found(0, 1), Found(1, 1), Found(0, 2), Found(1, 2)};
    return arrived;
  }
  NodeArrived::Seat Seat(NodeId node, Rank rank, std::optional<Step> last) const {
    return {1, rank, Process(node, rank), 7, {}, last};
  }

  // Another node, with what was written, has the job from now on.
  void TakeOver(NodeNames& nodes, bool tiers) {
    now_ = now_ + kStateLaziness;
    Say(kHere, WakeUp{});
    settings_.nodes = &nodes;
    settings_.nvme = settings_.remote = tiers;
    MakeCoordinator();
    ASSERT_TRUE(job_->Load(written_).ok());
    std::vector<ForAgent> out;
    job_->Resume({}, Time(), out);
    if (tiers) {
      Say(kHere, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
      Say(kHere, InventoryState{TierKind::kRemote, InventoryState::Kind::kKnown, ""});
    }
    out_.clear();
  }
  RequestToken Await(Rank rank, Step step, v1::AwaitSave::Stage stage) {
    Say(kHere, AwaitAsked{++token_, job_->attempt(), rank, step, stage});
    return token_;
  }
  CopiesFound FoundOnNvme(const std::vector<std::pair<Rank, Step>>& shards) const {
    CopiesFound found;
    found.tier = TierKind::kNvme;
    found.began = now_;
    for (const auto& [rank, step] : shards) {
      DurableCopy copy;
      copy.copy = Found(rank, step).copy;
      found.copies.push_back(copy);
    }
    return found;
  }

  NodeNames nodes_{"a"};
  const NodeId b_ = nodes_.Number("b");
  const NodeId c_ = nodes_.Number("c");
  CoordinatorSettings settings_;
  std::unique_ptr<Coordinator> job_;
  std::vector<ForAgent> out_;
  v1::JobState written_;
  bool agrees_ = true;  // at once, to each state
  MonotonicTime now_{1'000'000'000'000};
  RequestToken token_ = 0;
};

}  // namespace holdfast
