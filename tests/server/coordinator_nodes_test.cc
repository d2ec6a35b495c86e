// One job whose ranks run on several nodes, as its coordinator sees it: every message comes from a
// node, and says to which its answer goes.
#include "server/coordinator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "server/node_ranges.h"
#include "server/peer_codec.h"
#include "tests/server/nodes_fixture.h"
#include "tiers/image/kept.h"

namespace holdfast {
namespace {

constexpr uint64_t kBytes = kShardBytes;

TEST_F(NodesTest, AStepIsCommittedWhenTheRanksOfAllNodesHaveSealedIt) {
  TwoRanks();
  Begin(kHere, 0, 1);
  Begin(b_, 1, 1);
  Seal(kHere, 0, 1);
  EXPECT_FALSE(Committed(1));
  Seal(b_, 1, 1);
  EXPECT_TRUE(Committed(1));
}

TEST_F(NodesTest, TwoNodesMayHaveProcessesThatLookTheSame) {
  const RequestToken first = Join(kHere, 0, 1);
  ASSERT_NE(Answer<JoinAccepted>(first), nullptr);
  const RequestToken second = Join(b_, 0, 1);  // the same pid, started at the same tick
  const Refused* refused = Answer<Refused>(second);
  ASSERT_NE(refused, nullptr);
  EXPECT_EQ(refused->failure.reason, v1::Failure::REASON_RANK_TAKEN);
  EXPECT_TRUE(absl::StrContains(refused->failure.message, "pid 100 on a"))
      << refused->failure.message;
}

TEST_F(NodesTest, WhatIsGivenUpIsGivenUpOnEveryNode) {
  TwoRanks();
  Begin(kHere, 0, 1);
  Begin(b_, 1, 1);
  Seal(kHere, 0, 1);
  Say(b_, SaveLost{1, 1, 1, "the client gave it up"});
  const auto given_up = All<GiveUp>();
  ASSERT_EQ(given_up.size(), 1u);
  EXPECT_EQ(given_up[0].first, kEveryNode);
}

TEST_F(NodesTest, EachNodeIsAskedForTheFlushOfWhatItHas) {
  TwoRanks();
  SaveBoth(1);
  const auto wanted = All<FlushWanted>();
  ASSERT_EQ(wanted.size(), 2u);
  for (const auto& [node, flush] : wanted) {
    ASSERT_EQ(flush.shards.size(), 1u);
    EXPECT_EQ(flush.shards[0].rank, node == kHere ? 0u : 1u);
    EXPECT_EQ(flush.to, TierKind::kNvme);
  }
  Drained(kHere, 0, 1, TierKind::kNvme, TierKind::kMemory);
  Drained(kHere, 1, 1, TierKind::kNvme, TierKind::kMemory);  // not that node's to tell
  EXPECT_FALSE(job_->IsCommittedIn(TierKind::kNvme, {1, 1}));
  Drained(b_, 1, 1, TierKind::kNvme, TierKind::kMemory);
  EXPECT_TRUE(job_->IsCommittedIn(TierKind::kNvme, {1, 1}));
}

// Eight ranks on two nodes, three tickets.
TEST_F(NodesTest, SoManyImagesGoToRemoteAtATime) {
  settings_.remote_writes_max = 3;
  settings_.nvme = false;
  MakeCoordinator();
  job_->SetOpenedHere();
  Say(kHere, InventoryState{TierKind::kRemote, InventoryState::Kind::kKnown, ""});
  const auto node_of = [&](Rank rank) { return rank < 4 ? b_ : c_; };
  for (Rank rank = 0; rank < 8; ++rank) {
    Join(node_of(rank), rank, 8);
  }
  out_.clear();
  for (Rank rank = 0; rank < 8; ++rank) {
    Begin(node_of(rank), rank, 1);
  }
  for (Rank rank = 0; rank < 8; ++rank) {
    Seal(node_of(rank), rank, 1);
  }
  std::set<Rank> asked;
  size_t messages = 0;
  const auto take = [&] {
    for (const auto& [node, flush] : All<FlushWanted>()) {
      ++messages;
      for (const FlushWanted::Shard& shard : flush.shards) {
        EXPECT_EQ(node, node_of(shard.rank));
        EXPECT_TRUE(asked.insert(shard.rank).second) << shard.rank << " is asked for twice";
      }
    }
    out_.clear();
  };
  take();
  EXPECT_EQ(asked, (std::set<Rank>{0, 1, 2}));
  EXPECT_EQ(messages, 1u);
  Drained(b_, 1, 1, TierKind::kRemote, TierKind::kMemory);
  take();
  EXPECT_EQ(asked, (std::set<Rank>{0, 1, 2, 3}));
  // One that fails gives its ticket back; what a node does unasked takes none.
  Drained(b_, 0, 1, TierKind::kRemote, TierKind::kMemory, absl::UnavailableError("hiccup"));
  Drained(c_, 7, 1, TierKind::kRemote, TierKind::kMemory);
  take();
  EXPECT_EQ(asked, (std::set<Rank>{0, 1, 2, 3, 4}));
  // A node that is lost takes its tickets with it.
  Say(b_, NodeLeft{false, "no answer"});
  take();
  EXPECT_EQ(asked, (std::set<Rank>{0, 1, 2, 3, 4, 5, 6}));
  for (const Rank rank : {4, 5, 6}) {
    Drained(c_, rank, 1, TierKind::kRemote, TierKind::kMemory);
  }
  take();
  EXPECT_EQ(asked.size(), 7u);
}

// A second step for which there is no ticket at all yet.
TEST_F(NodesTest, AStepThatNobodyWasAskedForIsShedAtOnce) {
  settings_.remote_writes_max = 1;
  settings_.nvme = false;
  MakeCoordinator();
  job_->SetOpenedHere();
  Say(kHere, InventoryState{TierKind::kRemote, InventoryState::Kind::kKnown, ""});
  TwoRanks();
  SaveBoth(1);
  SaveBoth(2);
  ASSERT_EQ(All<FlushWanted>().size(), 1u);
  RemoveCheckpointAsked remove;
  remove.token = ++token_;
  remove.request.set_attempt(1);
  remove.request.set_step(2);
  remove.request.set_force(true);
  Say(kHere, remove);
  out_.clear();
  Drained(kHere, 0, 1, TierKind::kRemote, TierKind::kMemory);
  Drained(b_, 1, 1, TierKind::kRemote, TierKind::kMemory);
  for (const auto& [node, flush] : All<FlushWanted>()) {
    EXPECT_EQ(flush.checkpoint.step, 1u);
  }
}

TEST_F(NodesTest, WhatIsNotWantedAnyMoreIsNotAskedFor) {
  settings_.remote_writes_max = 1;
  settings_.nvme = false;
  MakeCoordinator();
  job_->SetOpenedHere();
  Say(kHere, InventoryState{TierKind::kRemote, InventoryState::Kind::kKnown, ""});
  TwoRanks();
  SaveBoth(1);
  ASSERT_EQ(All<FlushWanted>().size(), 1u);
  out_.clear();
  // The step is removed while one of its images is on its way, and the other waits.
  RemoveCheckpointAsked remove;
  remove.token = ++token_;
  remove.request.set_attempt(1);
  remove.request.set_step(1);
  remove.request.set_force(true);
  Say(kHere, remove);
  Drained(kHere, 0, 1, TierKind::kRemote, TierKind::kMemory, absl::CancelledError("not wanted"));
  EXPECT_TRUE(All<FlushWanted>().empty());
}

TEST_F(NodesTest, AFlushOfANodeThatGoesAwayIsRepeatedWhenItIsBack) {
  TwoRanks();
  SaveBoth(1);
  Drained(kHere, 0, 1, TierKind::kNvme, TierKind::kMemory);
  Say(b_, NodeLeft{false, "no answer"});
  EXPECT_FALSE(Committed(1));
  out_.clear();
  NodeArrived back;
  back.shards = {Found(1, 1)};
  back.seats = {Seat(b_, 1, 1)};
  Say(b_, back);
  Say(b_, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
  EXPECT_TRUE(Committed(1));
  now_ = now_ + kDrainRetryMax;
  Say(kHere, WakeUp{});
  bool again = false;
  for (const auto& [node, flush] : All<FlushWanted>()) {
    again = again || (node == b_ && flush.to == TierKind::kNvme && flush.shards[0].rank == 1);
  }
  EXPECT_TRUE(again);
}

TEST_F(NodesTest, ANodeThatHasNothingHoldsUpNothingWhenItIsOutOfReach) {
  TwoRanks();
  Say(c_, NodeLeft{false, "no answer"});
  SaveBoth(1);
  std::set<std::pair<NodeId, Rank>> to_nvme;
  for (const auto& [node, flush] : All<FlushWanted>()) {
    if (flush.to == TierKind::kNvme) {
      to_nvme.insert({node, flush.shards[0].rank});
    }
  }
  EXPECT_EQ(to_nvme, (std::set<std::pair<NodeId, Rank>>{{kHere, 0}, {b_, 1}}));
  Flush(1);
  SaveBoth(2);
  out_.clear();
  Flush(2);
  std::set<NodeId> removes;
  for (const auto& [node, removal] : All<RemovalWanted>()) {
    EXPECT_EQ(removal.checkpoint, (CheckpointId{1, 1}));
    removes.insert(node);
  }
  EXPECT_EQ(removes, (std::set<NodeId>{kHere, b_})) << "nvme keeps one step";
  Say(c_, NodeArrived{});
  Say(c_, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
  EXPECT_TRUE(job_->IsCommittedIn(TierKind::kNvme, {1, 2}));
}

// c's drives have not been read yet.
class NodeStillReadTest : public NodesTest {
 protected:
  NodeStillReadTest() {
    settings_.policy.mutable_nvme()->set_every_steps(1000);
    MakeCoordinator();
    job_->SetOpenedHere();
    for (const NodeId node : {kHere, b_}) {
      Say(node, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
    }
    Say(kHere, InventoryState{TierKind::kRemote, InventoryState::Kind::kKnown, ""});
    Say(c_, NodeArrived{});
    TwoRanks();
    SaveBoth(1);
    SaveBoth(2);
  }
  std::set<NodeId> FlushToNvme(Step step) const {
    std::set<NodeId> nodes;
    for (const auto& [node, flush] : All<FlushWanted>()) {
      if (flush.to == TierKind::kNvme && flush.checkpoint.step == step) {
        nodes.insert(node);
      }
    }
    return nodes;
  }
};

TEST_F(NodeStillReadTest, WhenItIsGoneInsteadAllGoesOnAsIfItHadTold) {
  EXPECT_EQ(FlushToNvme(1), std::set<NodeId>{});
  Say(c_, NodeLeft{true, "its lease has ended"});
  EXPECT_EQ(FlushToNvme(1), (std::set<NodeId>{kHere, b_}));
}

TEST_F(NodeStillReadTest, WhoWaitsForAStepThatDoesNotGoThereHearsOfIt) {
  const RequestToken token = ++token_;
  Say(kHere, AwaitAsked{token, 1, 0, 2, v1::AwaitSave::STAGE_NVME});
  EXPECT_EQ(Answer<Refused>(token), nullptr);
  Say(c_, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
  ASSERT_NE(Answer<Refused>(token), nullptr);
}

// Of a large job no one answer could hold it all.
TEST_F(NodesTest, WhatTheScrubIsToReadIsToldPartByPart) {
  TwoRanks();
  for (const Step step : {Step{1}, Step{2}}) {
    SaveBoth(step);
    Flush(step);
  }
  std::vector<std::pair<Step, Rank>> told;
  v1::PlanScrubRequest request;
  for (bool more = true; more;) {
    v1::PlanScrubReply reply;
    job_->FillScrub(kHere, request, 1, Time(), reply);
    ASSERT_EQ(reply.copies_size(), 1);
    told.emplace_back(reply.copies(0).step(), reply.copies(0).rank());
    *request.mutable_after() = reply.copies(0);
    more = reply.more();
    ASSERT_LE(told.size(), 4u);
  }
  const std::vector<std::pair<Step, Rank>> all = {{1, 0}, {1, 1}, {2, 0}, {2, 1}};
  EXPECT_EQ(told, all);
  v1::PlanScrubReply behind;
  job_->FillScrub(kHere, request, 1, Time(), behind);
  EXPECT_EQ(behind.copies_size(), 0);
}

TEST_F(NodesTest, WhatIsOutOfReachIsNeitherOfferedNorGivenUp) {
  TwoRanks();
  SaveBoth(1);
  Say(b_, NodeLeft{false, "no answer"});
  EXPECT_FALSE(Committed(1));
  // Rank 0 goes on, and needs room: the step that is whole again when b is back stays.
  Begin(kHere, 0, 2);
  out_.clear();
  Say(kHere, RoomAsked{++token_, 1, 0, 2, {{1, 1}}});
  EXPECT_TRUE(All<GiveUp>().empty());
  EXPECT_EQ(Answer<RoomAnswered>(token_), nullptr);  // b may be back in a moment
  now_ = now_ + kRoomWait;
  Say(kHere, WakeUp{});
  EXPECT_TRUE(All<GiveUp>().empty());
  ASSERT_NE(Answer<RoomAnswered>(token_), nullptr);
  EXPECT_FALSE(Answer<RoomAnswered>(token_)->made);
  // Nor does its deadline end it.
  now_ = now_ + std::chrono::hours(1);
  Say(kHere, WakeUp{});
  for (const auto& [node, gone] : All<GiveUp>()) {
    EXPECT_NE(gone.checkpoint, (CheckpointId{1, 1}));
  }

  NodeArrived back;
  back.shards = {Found(1, 1)};
  back.seats = {Seat(b_, 1, 1)};
  Say(b_, back);
  EXPECT_TRUE(Committed(1));
}

TEST_F(NodesTest, ANodeThatComesBackEmptyHasLostWhatItHad) {
  TwoRanks();
  SaveBoth(1);
  Say(b_, NodeLeft{false, "no answer"});
  Say(b_, NodeArrived{});  // it was rebooted
  EXPECT_FALSE(Committed(1));
  v1::JobStatus status;
  job_->FillStatus(status, Time(), Coordinator::Detail::kWhole);
  EXPECT_EQ(status.ranks_alive(), 1u);
  // And no rank takes the place of the one that ended.
  Say(kHere, SaveAsked{++token_, 1, 0, 2});
  ASSERT_NE(Answer<Refused>(token_), nullptr);
  EXPECT_EQ(Answer<Refused>(token_)->failure.reason, v1::Failure::REASON_ABANDONED);
}

// Whether the host noticed that it was away, or it was back before that.
TEST_F(NodesTest, WhatANodeDoesNotTellOfAnyMoreIsNotThere) {
  for (const bool noticed : {true, false}) {
    SCOPED_TRACE(noticed);
    MakeCoordinator();
    job_->SetOpenedHere();
    TwoRanks();
    SaveBoth(1);
    Flush(1);
    if (noticed) {
      Say(b_, NodeLeft{false, "no answer"});
    }
    Say(b_, NodeArrived{});
    Say(b_, FoundOnNvme({{1, 1}}));
    Say(b_, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
    v1::WhereReply where;
    job_->FillWhere(std::nullopt, where);
    std::vector<std::string> on_b;
    for (const v1::ShardCopy& copy : where.copies()) {
      if (copy.node() == "b") {
        on_b.push_back(absl::StrCat(copy.tier(), ": ", copy.state()));
      }
    }
    EXPECT_EQ(on_b, std::vector<std::string>{"nvme: good"});
  }
}

TEST_F(NodesTest, WhatANodeLostWhileItWasAwayIsAbandonedForAll) {
  TwoRanks();
  Begin(kHere, 0, 1);
  Begin(b_, 1, 1);
  Begin(kHere, 0, 2);
  Begin(b_, 1, 2);
  Say(b_, NodeLeft{false, "no answer"});
  out_.clear();
  NodeArrived back;
  back.seats = {Seat(b_, 1, 2)};
  back.seats[0].writing = {2};
  Say(b_, back);
  const auto given_up = All<GiveUp>();
  ASSERT_EQ(given_up.size(), 1u);
  EXPECT_EQ(given_up[0].second.checkpoint, (CheckpointId{1, 1}));
  Seal(kHere, 0, 2);
  Seal(b_, 1, 2);
  EXPECT_TRUE(Committed(2));
}

// The host has let it begin, and that was lost with the channel: its node asks again.
class LostPermissionTest : public NodesTest {
 protected:
  LostPermissionTest() {
    TwoRanks();
    Begin(kHere, 0, 5);
    Begin(b_, 1, 5);  // SavePermitted is lost
    Say(b_, NodeLeft{false, "its channel broke"});
    out_.clear();
  }
  void ComeBack(std::set<Step> writing, std::optional<Step> last) {
    NodeArrived back;
    back.seats = {Seat(b_, 1, last)};
    back.seats[0].writing = std::move(writing);
    Say(b_, back);
  }
};

TEST_F(LostPermissionTest, WhatANodeNeverHeardThatItMayBeginIsAskedForAgain) {
  ComeBack({}, std::nullopt);
  EXPECT_TRUE(All<GiveUp>().empty());
  Begin(b_, 1, 5);
  Seal(kHere, 0, 5);
  Seal(b_, 1, 5);
  EXPECT_TRUE(Committed(5));
}

TEST_F(LostPermissionTest, WhatItHasBegunAndLostIsAbandoned) {
  ComeBack({}, 5);
  ASSERT_EQ(All<GiveUp>().size(), 1u);
  EXPECT_EQ(All<GiveUp>()[0].second.checkpoint, (CheckpointId{1, 5}));
}

TEST_F(LostPermissionTest, WhatWasAbandonedMeanwhileIsRefusedWithTheReason) {
  Begin(kHere, 0, 6);
  Say(kHere, SaveLost{1, 0, 5, "the client gave it up"});
  ComeBack({}, std::nullopt);
  Say(b_, SaveAsked{++token_, 1, 1, 5});
  const Refused* refused = Answer<Refused>(token_);
  ASSERT_NE(refused, nullptr);
  EXPECT_EQ(refused->failure.code, absl::StatusCode::kAborted);
  EXPECT_EQ(refused->failure.reason, v1::Failure::REASON_ABANDONED) << refused->failure.message;
  Begin(b_, 1, 6);
}

TEST_F(NodesTest, WhatNobodyElseHasBegunIsAskedForAgainToo) {
  settings_.nvme = settings_.remote = false;
  MakeCoordinator();
  job_->SetOpenedHere();
  TwoRanks();
  SaveBoth(1);
  Begin(b_, 1, 5);
  Say(b_, NodeLeft{false, "its channel broke"});
  NodeArrived back;
  back.shards = {Found(1, 1)};
  back.seats = {Seat(b_, 1, 1)};
  Say(b_, back);
  SaveBoth(5);
  EXPECT_TRUE(Committed(5));
}

// It has gone on since it asked, and does not ask again: that is known when it begins the next one.
TEST_F(LostPermissionTest, WhatItDoesNotAskForAgainIsAbandonedWhenItGoesOn) {
  ComeBack({}, std::nullopt);
  Seal(kHere, 0, 5);
  Begin(b_, 1, 6);
  ASSERT_EQ(All<GiveUp>().size(), 1u);
  EXPECT_EQ(All<GiveUp>()[0].second.checkpoint, (CheckpointId{1, 5}));
}

TEST_F(NodesTest, RanksOfALostNodeGetTheNewestStepThatTheyCanLoadWhereTheyAreNow) {
  TwoRanks();
  SaveBoth(1);
  Flush(1);
  EXPECT_TRUE(job_->IsCommittedIn(TierKind::kRemote, {1, 1}));
  SaveBoth(2);  // in memory only, so far
  EXPECT_TRUE(Committed(2));
  Say(b_, NodeLeft{true, "its lease has ended"});
  // The launcher starts both again, rank 1 on c.
  Say(kHere, SeatLost{1, 0, Process(kHere, 0), 0, SeatLost::How::kProcessEnded});
  ASSERT_NE(Answer<JoinAccepted>(Join(kHere, 0, 2, "two", 1)), nullptr);
  ASSERT_NE(Answer<JoinAccepted>(Join(c_, 1, 2, "two", 1)), nullptr);
  EXPECT_EQ(job_->attempt(), 2u);
  const RequestToken zero = Enter(kHere, 0, 1);
  const RequestToken one = Enter(c_, 1, 1);
  const SourceOffered* first = Answer<SourceOffered>(zero);
  const SourceOffered* second = Answer<SourceOffered>(one);
  ASSERT_TRUE(first != nullptr && second != nullptr);
  EXPECT_EQ(first->checkpoint, (CheckpointId{1, 1}));
  EXPECT_EQ(first->from, TierKind::kMemory);
  EXPECT_EQ(second->checkpoint, (CheckpointId{1, 1}));
  EXPECT_EQ(second->from, TierKind::kRemote);
}

TEST_F(NodesTest, AStepInTheMemoryOfAnotherNodeIsNotOfferedAndTheReasonSaysWhere) {
  TwoRanks();
  SaveBoth(1);  // in memory only
  Say(kHere, SeatLost{1, 0, Process(kHere, 0), 0, SeatLost::How::kProcessEnded});
  Say(b_, SeatLost{1, 1, Process(b_, 1), 0, SeatLost::How::kProcessEnded});
  Join(kHere, 0, 2, "two", 1);
  Join(c_, 1, 2, "two", 1);  // b lives, but the rank is on c now
  Enter(kHere, 0, 1);
  const RequestToken one = Enter(c_, 1, 1);
  const Refused* refused = Answer<Refused>(one);
  ASSERT_NE(refused, nullptr);
  EXPECT_EQ(refused->failure.reason, v1::Failure::REASON_UNREADABLE);
  EXPECT_TRUE(absl::StrContains(refused->failure.message,
                                "the shard of rank 1 lies in memory of b, and the rank runs on c"))
      << refused->failure.message;
}

// Its shards lie in memory of two nodes, and the one rank that there is now runs on a third.
class ElsewhereTest : public NodesTest {
 protected:
  void SavedByTwoNowOnOne(bool peers) {
    settings_.peers = peers;
    MakeCoordinator();
    job_->SetOpenedHere();
    for (const NodeId node : {kHere, b_, c_}) {
      NodeArrived there;
      there.reads_remote = true;
      Say(node, there);
      Say(node, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
    }
    Say(kHere, InventoryState{TierKind::kRemote, InventoryState::Kind::kKnown, ""});
    TwoRanks();
    SaveBoth(1);
    Say(kHere, SeatLost{1, 0, Process(kHere, 0), 0, SeatLost::How::kProcessEnded});
    Say(b_, SeatLost{1, 1, Process(b_, 1), 0, SeatLost::How::kProcessEnded});
    Join(c_, 0, 1, "two", 1);
  }
  RequestToken EnterAs(bool may_reshard, bool by_itself, bool parts = true) {
    SessionAsked asked;
    asked.token = ++token_;
    asked.attempt = job_->attempt();
    asked.process = Process(c_, 0, 1);
    asked.may_wait = true;
    asked.may_reshard = may_reshard;
    asked.reads_by_itself = by_itself;
    asked.reads_parts = parts;
    Say(c_, asked);
    return token_;
  }
  const ShardLocated* Locate(Rank rank, bool parts) {
    AttachAsked asked{++token_, rank, CheckpointId{1, 1}, true};
    asked.parts = parts;
    Say(c_, asked);
    return Answer<ShardLocated>(token_);
  }
};

TEST_F(ElsewhereTest, AStepOfAnotherWorldIsOfferedWhereItCanBeReadInParts) {
  SavedByTwoNowOnOne(true);
  const StepOffered* offered = Answer<StepOffered>(EnterAs(true, false));
  ASSERT_NE(offered, nullptr);
  EXPECT_EQ(offered->checkpoint, (CheckpointId{1, 1}));
}

TEST_F(ElsewhereTest, RanksThatReadByThemselvesHearOfItToo) {
  SavedByTwoNowOnOne(true);
  const SessionEnded* ended = Answer<SessionEnded>(EnterAs(false, true));
  ASSERT_NE(ended, nullptr);
  EXPECT_EQ(ended->checkpoint, (CheckpointId{1, 1}));
}

// Where there is no way to other nodes, or the ranks' library is older.
TEST_F(ElsewhereTest, ItIsNoneForWhoCannotReadInParts) {
  for (const auto& [peers, by_itself, parts] :
       {std::tuple{true, true, false}, {true, false, false}, {false, false, true}}) {
    SavedByTwoNowOnOne(peers);
    const Refused* refused = Answer<Refused>(EnterAs(!by_itself, by_itself, parts));
    ASSERT_NE(refused, nullptr);
    EXPECT_TRUE(absl::StrContains(refused->failure.message, "not every node"))
        << refused->failure.message;
  }
}

TEST_F(ElsewhereTest, WhoTakesPartsIsToldWhichNodesHaveAShard) {
  SavedByTwoNowOnOne(true);
  for (const auto& [rank, node] : {std::pair<Rank, std::string>{0, "a"}, {1, "b"}}) {
    const ShardLocated* located = Locate(rank, true);
    ASSERT_NE(located, nullptr);
    EXPECT_EQ(located->peers, std::vector{node});
    EXPECT_EQ(located->elsewhere, "");
    std::vector<TierKind> tiers;
    for (const ShardLocated::Place& place : located->places) {
      tiers.push_back(place.tier);
      EXPECT_EQ(place.why_not.empty(), place.tier == TierKind::kPeer) << place.why_not;
    }
    EXPECT_EQ(tiers, (std::vector{TierKind::kMemory, TierKind::kNvme, TierKind::kPeer,
                                  TierKind::kRemote}));
    located = Locate(rank, false);
    ASSERT_NE(located, nullptr);
    EXPECT_TRUE(located->peers.empty());
    EXPECT_EQ(located->elsewhere, "memory of " + node);
    EXPECT_EQ(located->places.size(), 3u);
  }
}

TEST_F(ElsewhereTest, EachNodeReadsItsShareOfTheRemoteTierForAll) {
  SavedByTwoNowOnOne(true);
  EXPECT_EQ(Locate(0, true)->remote_reader, "") << "one node alone reads by itself";
  Say(c_, SeatLost{2, 0, Process(c_, 0), 0, SeatLost::How::kProcessEnded});
  Join(b_, 0, 2, "three", 2);
  Join(c_, 1, 2, "three", 2);
  const std::string first = Locate(0, true)->remote_reader;
  const std::string second = Locate(1, true)->remote_reader;
  EXPECT_EQ((std::set{first, second}), (std::set<std::string>{"b", "c"}));
  EXPECT_EQ(Locate(0, false)->remote_reader, "");
}

TEST_F(ElsewhereTest, WhoHasNoRemoteTierReadsNothingThereForOthers) {
  SavedByTwoNowOnOne(true);
  Say(c_, SeatLost{2, 0, Process(c_, 0), 0, SeatLost::How::kProcessEnded});
  Join(b_, 0, 2, "three", 2);
  Join(c_, 1, 2, "three", 2);
  NodeArrived anew;
  anew.seats = {{3, 1, Process(c_, 1), 7, {}, std::nullopt}};
  Say(c_, anew);
  for (const Rank rank : {0, 1}) {
    EXPECT_EQ(Locate(rank, true)->remote_reader, "b") << rank;
  }
}

TEST_F(ElsewhereTest, WhereTheRecordsOfAStepAre) {
  SavedByTwoNowOnOne(true);
  const auto where = [&](Step step) {
    Say(c_, RecordsAsked{++token_, {1, step}});
    std::vector<std::string> of_rank;
    if (const auto* located = Answer<RecordsLocated>(token_)) {
      for (const RecordsLocated::Run& run : located->runs) {
        for (uint32_t i = 0; i < run.count; ++i) {
          const bool none = run.holder == located->holders.size();
          of_rank.push_back(none ? "nowhere"
                                 : located->holders[run.holder].node +
                                       (located->holders[run.holder].remote ? " remote" : ""));
        }
      }
    }
    return of_rank;
  };
  EXPECT_EQ(where(1), (std::vector<std::string>{"a", "b"}));
  // What the one who asks has itself comes first, wherever else it is.
  Say(c_, MemoryCopyGained{{1, 1}, 0, kBytes, 1000});
  EXPECT_EQ(where(1), (std::vector<std::string>{"c", "b"}));
  Say(c_, ShardBad{{1, 1}, 0, "a bit has flipped", TierKind::kMemory});
  EXPECT_TRUE(where(2).empty());
  EXPECT_NE(Answer<Refused>(token_), nullptr) << "there is no such step";
  // From the remote tier, where memory has them no more: its reader, here the one that asks.
  Flush(1);
  for (const auto& [node, rank] : {std::pair{kHere, Rank{0}}, {b_, Rank{1}}}) {
    for (const TierKind tier : {TierKind::kMemory, TierKind::kNvme}) {
      Say(node, ShardBad{{1, 1}, rank, "a bit has flipped", tier});
    }
  }
  EXPECT_EQ(where(1), (std::vector<std::string>{"c remote", "c remote"}));
}

TEST_F(NodesTest, ARemovalAsksEveryNodeThatHasSomethingAndOnlyThoseAgainThatFailed) {
  TwoRanks();
  SaveBoth(1);
  Flush(1);
  out_.clear();
  SaveBoth(2);
  Flush(2);  // keep_last of nvme is 1
  auto wanted = All<RemovalWanted>();
  std::erase_if(wanted, [](const auto& w) { return w.second.tier != TierKind::kNvme; });
  ASSERT_EQ(wanted.size(), 2u);
  EXPECT_NE(wanted[0].first, wanted[1].first);
  Say(kHere, RemovalDone{{1, 1}, TierKind::kNvme, absl::OkStatus(), std::nullopt});
  Say(b_, RemovalDone{{1, 1}, TierKind::kNvme, absl::UnavailableError("EIO"), std::nullopt});
  out_.clear();
  now_ = now_ + kRemovalRetry;
  Say(kHere, WakeUp{});
  wanted = All<RemovalWanted>();
  ASSERT_EQ(wanted.size(), 1u);
  EXPECT_EQ(wanted[0].first, b_);
  Say(b_, RemovalDone{{1, 1}, TierKind::kNvme, absl::OkStatus(), std::nullopt});
  EXPECT_FALSE(job_->IsCommittedIn(TierKind::kNvme, {1, 1}));
  EXPECT_TRUE(job_->Inventory(TierKind::kNvme).why.empty());
}

// There is room for so many; the end of an old step may be news.
TEST_F(NodesTest, HowAnOldStepEndedIsRememberedAsThatOfANewOneIs) {
  settings_.nvme = settings_.remote = false;
  MakeCoordinator();
  job_->SetOpenedHere();
  TwoRanks();
  SaveBoth(1);
  for (Step step = 2; step <= 1 + kFatesMax; ++step) {
    Begin(kHere, 0, step);
    Say(kHere, SaveLost{1, 0, step, "the client gave it up"});
  }
  RemoveCheckpointAsked rm;
  rm.token = ++token_;
  rm.request.set_step(1);
  rm.request.set_force(true);
  Say(kHere, rm);
  ASSERT_FALSE(Committed(1));
  const RequestToken old = Await(0, 1, v1::AwaitSave::STAGE_COMMITTED);
  EXPECT_NE(Answer<StageReached>(old), nullptr) << "it was committed before it was removed";
  // What ended first has made room for it.
  const RequestToken first = Await(0, 2, v1::AwaitSave::STAGE_COMMITTED);
  const Refused* refused = Answer<Refused>(first);
  ASSERT_NE(refused, nullptr);
  EXPECT_TRUE(absl::StrContains(refused->failure.message, "not known any more"))
      << refused->failure.message;
}

// A scan that began before saw it there.
TEST_F(NodesTest, TheRemovalOfAnOldStepIsRememberedAsThatOfANewOneIs) {
  settings_.nvme = false;
  settings_.policy.mutable_remote()->set_keep_last(1);
  MakeCoordinator();
  job_->SetOpenedHere();
  Say(kHere, InventoryState{TierKind::kRemote, InventoryState::Kind::kKnown, ""});
  TwoRanks();
  const auto save = [&](Step step) {
    SaveBoth(step);
    Drained(kHere, 0, step, TierKind::kRemote, TierKind::kMemory);
    Drained(b_, 1, step, TierKind::kRemote, TierKind::kMemory);
    Say(kHere, ManifestDone{{1, step}, absl::OkStatus(), {}});
    Say(kHere, RemovalDone{{1, step - 1}, TierKind::kRemote, absl::OkStatus()});
  };
  save(1);
  PinAsked pin;
  pin.token = ++token_;
  pin.request.set_step(1);
  Say(kHere, pin);
  for (Step step = 2; step <= kRemovedMax + 2; ++step) {
    save(step);
    now_ = now_ + std::chrono::seconds(1);
  }
  ASSERT_TRUE(job_->IsCommittedIn(TierKind::kRemote, {1, 1}));
  CopiesFound late;
  late.tier = TierKind::kRemote;
  late.began = now_;
  for (const Rank rank : {0u, 1u}) {
    DurableCopy copy;
    copy.copy = Found(rank, 1).copy;
    late.copies.push_back(copy);
  }
  late.manifests = {{1, 1}};
  now_ = now_ + std::chrono::seconds(1);
  pin.token = ++token_;
  pin.request.set_unpin(true);
  Say(kHere, pin);
  Say(kHere, RemovalDone{{1, 1}, TierKind::kRemote, absl::OkStatus()});
  ASSERT_FALSE(job_->IsCommittedIn(TierKind::kRemote, {1, 1}));
  Say(kHere, late);
  EXPECT_FALSE(job_->IsCommittedIn(TierKind::kRemote, {1, 1}));
}

// Its host removes from there what others have written.
TEST_F(NodesTest, WhatGoesFromTheRemoteTierNobodyRemembersToHaveWritten) {
  TwoRanks();
  for (const Step step : {1, 2, 3}) {
    SaveBoth(step);
    Flush(step);
  }
  const auto forgotten = All<FlushUnwanted>();
  ASSERT_EQ(forgotten.size(), 1u);
  EXPECT_EQ(forgotten[0].first, kEveryNode);
  EXPECT_EQ(forgotten[0].second.checkpoint, (CheckpointId{1, 1}));
  EXPECT_EQ(forgotten[0].second.to, TierKind::kRemote);
}

TEST_F(NodesTest, ARemovalDoesNotWaitForANodeThatGoesAway) {
  TwoRanks();
  SaveBoth(1);
  Flush(1);
  SaveBoth(2);
  Flush(2);
  Say(kHere, RemovalDone{{1, 1}, TierKind::kNvme, absl::OkStatus(), std::nullopt});
  v1::CollectGarbageReply going;
  job_->FillGarbage(0, going);
  EXPECT_TRUE(absl::StrContains(going.DebugString(), "is being removed"));
  const MonotonicTime began = now_;
  now_ = now_ + std::chrono::seconds(1);
  Say(b_, NodeLeft{false, "no answer"});
  v1::CollectGarbageReply gone;
  job_->FillGarbage(0, gone);
  EXPECT_FALSE(absl::StrContains(gone.DebugString(), "is being removed")) << gone.DebugString();
  // What it has not removed is found there when it is back, and goes then: although it began to
  // look before the removal ended here. (What it has removed meanwhile it does not tell.)
  out_.clear();
  NodeArrived back;
  back.shards = {Found(1, 2)};
  back.seats = {Seat(b_, 1, 2)};
  Say(b_, back);
  now_ = now_ + std::chrono::seconds(1);
  CopiesFound found = FoundOnNvme({{1, 1}, {1, 2}});
  found.began = began;
  Say(b_, found);
  Say(b_, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
  const auto wanted = All<RemovalWanted>();
  ASSERT_EQ(wanted.size(), 1u);
  EXPECT_EQ(wanted[0].first, b_);
  EXPECT_EQ(wanted[0].second.checkpoint, (CheckpointId{1, 1}));
}

// Rank 1's copy of step 1 on b, or on c, is bad.
class NodesRepairTest : public NodesTest {
 protected:
  NodesRepairTest() {
    TwoRanks();
    SaveBoth(1);
    Flush(1);
  }
  void FindBad(NodeId node) { Say(node, ShardBad{{1, 1}, 1, "a block differs", TierKind::kNvme}); }
  // Since that was asked last.
  size_t Asked(NodeId node) {
    const auto wanted = All<FlushWanted>();
    out_.clear();
    return static_cast<size_t>(std::count_if(wanted.begin(), wanted.end(), [&](const auto& each) {
      return each.first == node && each.second.replace;
    }));
  }
  void TellDrive(NodeId node) {
    Say(node, FoundOnNvme({{1, 1}}));
    Say(node, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
  }
};

// What it was asked for, or its answer, may be lost with the channel.
TEST_F(NodesRepairTest, IsAskedForAgainWhenItsNodeTellsAnewWhatItHas) {
  FindBad(b_);
  ASSERT_EQ(Asked(b_), 1u);
  NodeArrived back;
  back.shards = {Found(1, 1)};
  back.seats = {Seat(b_, 1, 1)};
  Say(b_, back);  // in the same moment: before it can have heard what it was asked
  Say(kHere, WakeUp{});
  EXPECT_EQ(Asked(b_), 0u);
  now_ = now_ + std::chrono::milliseconds(1);
  Say(b_, back);
  TellDrive(b_);
  FindBad(b_);
  now_ = now_ + kRepairRetryMin;
  Say(kHere, WakeUp{});
  EXPECT_EQ(Asked(b_), 1u);
}

// Else the step would never go from its tiers.
TEST_F(NodesRepairTest, IsNotAskedOfANodeThatIsGone) {
  Say(c_, NodeArrived());
  TellDrive(c_);
  FindBad(c_);
  ASSERT_EQ(Asked(c_), 1u);
  Say(c_, NodeLeft{true, "its lease has ended"});
  SaveBoth(2);
  Flush(2);
  now_ = now_ + kRepairRetryMin;
  Say(kHere, WakeUp{});
  EXPECT_EQ(Asked(c_), 0u);
}

TEST_F(NodesTest, WhatIsLeftOfAStepStaysInNvmeWhileANodeIsMissing) {
  TwoRanks();
  SaveBoth(1);
  Flush(1);
  Say(b_, NodeLeft{true, "its lease has ended"});
  out_.clear();
  Say(kHere, CollectGarbageAsked{});
  EXPECT_TRUE(All<RemovalWanted>().empty());
  EXPECT_TRUE(All<GiveUp>().empty());
}

TEST_F(NodesTest, ASessionWaitsForANodeThatMayComeBackAndNotForOneThatIsGone) {
  TwoRanks();
  SaveBoth(1);
  Flush(1);
  SaveBoth(2);
  Say(b_, NodeLeft{false, "no answer"});
  Say(kHere, SeatLost{1, 0, Process(kHere, 0), 0, SeatLost::How::kProcessEnded});
  Join(kHere, 0, 2, "two", 1);
  Join(c_, 1, 2, "two", 1);
  const RequestToken zero = Enter(kHere, 0, 1);
  const RequestToken one = Enter(c_, 1, 1);
  EXPECT_EQ(Answer<SourceOffered>(zero), nullptr);
  EXPECT_EQ(Answer<Refused>(zero), nullptr);
  Say(b_, NodeLeft{true, "its lease has ended"});
  ASSERT_NE(Answer<SourceOffered>(zero), nullptr);
  EXPECT_EQ(Answer<SourceOffered>(zero)->checkpoint, (CheckpointId{1, 1}));
  ASSERT_NE(Answer<SourceOffered>(one), nullptr);
}

// Step 2 lies on b alone, which is out of reach and may be back; all ranks have entered.
class WaitingSessionTest : public NodesTest {
 protected:
  WaitingSessionTest() {
    TwoRanks();
    SaveBoth(1);
    Flush(1);
    SaveBoth(2);
    Say(b_, NodeLeft{false, "no answer"});
    Say(kHere, SeatLost{1, 0, Process(kHere, 0), 0, SeatLost::How::kProcessEnded});
    Join(kHere, 0, 2, "two", 1);
    Join(c_, 1, 2, "two", 1);
    zero_ = Enter(kHere, 0, 1);
    one_ = Enter(c_, 1, 1);
    EXPECT_EQ(Answer<SourceOffered>(zero_), nullptr);
    EXPECT_EQ(Answer<Refused>(zero_), nullptr);
  }
  void Choose(const std::function<void(v1::SetRestorePointRequest&)>& what) {
    RestorePointAsked asked;
    asked.token = ++token_;
    what(asked.request);
    Say(kHere, asked);
    EXPECT_NE(Answer<RestorePointSet>(asked.token), nullptr);
  }
  RequestToken zero_ = 0;
  RequestToken one_ = 0;
};

TEST_F(WaitingSessionTest, GoesOnWithTheStepThatIsChosenMeanwhile) {
  Choose([](auto& request) { request.set_step(1); });
  for (const RequestToken token : {zero_, one_}) {
    ASSERT_NE(Answer<SourceOffered>(token), nullptr);
    EXPECT_EQ(Answer<SourceOffered>(token)->checkpoint, (CheckpointId{1, 1}));
  }
}

TEST_F(WaitingSessionTest, StartsFromScratchWhenThatIsChosenMeanwhile) {
  Choose([](auto& request) { request.set_from_scratch(true); });
  for (const RequestToken token : {zero_, one_}) {
    ASSERT_NE(Answer<Refused>(token), nullptr);
    EXPECT_EQ(Answer<Refused>(token)->failure.reason, v1::Failure::REASON_NOTHING_TO_RESTORE);
  }
}

TEST_F(WaitingSessionTest, GoesOnWaitingWhenNothingIsChosen) {
  Choose([](auto& request) { request.set_clear(true); });
  EXPECT_EQ(Answer<SourceOffered>(zero_), nullptr);
  EXPECT_EQ(Answer<Refused>(zero_), nullptr);
}

TEST_F(WaitingSessionTest, NamesTheWayOutAtItsDeadline) {
  Say(kHere, RequestExpired{zero_});
  ASSERT_NE(Answer<Refused>(zero_), nullptr);
  const std::string& message = Answer<Refused>(zero_)->failure.message;
  EXPECT_EQ(Answer<Refused>(zero_)->failure.code, absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(message, ::testing::HasSubstr("out of reach and may have a newer step: b;"));
  EXPECT_THAT(message, ::testing::HasSubstr("ckptctl restore job --step N"));
}

// A coordinator that has not heard of all nodes yet does not give up what they may complete.
TEST_F(NodesTest, ANewCoordinatorGivesUpNothingThatAMissingNodeMayComplete) {
  TwoRanks();
  SaveBoth(1);
  now_ = now_ + kStateLaziness;
  Say(kHere, WakeUp{});
  NodeNames nodes("c");
  settings_.nodes = &nodes;
  settings_.nvme = settings_.remote = false;
  const NodeId a = nodes.Number("a");
  const NodeId b = nodes.Number("b");
  MakeCoordinator();
  ASSERT_TRUE(job_->Load(written_).ok());
  std::vector<ForAgent> out;
  job_->Resume({}, Time(), out);
  out_.clear();
  NodeArrived first;
  first.shards = {Found(0, 1)};
  first.seats = {Seat(a, 0, 1)};
  Say(a, first);
  EXPECT_TRUE(All<GiveUp>().empty());
  // Its own processes end: the next attempt does not give it up either.
  Say(a, SeatLost{1, 0, Process(a, 0), 7, SeatLost::How::kProcessEnded});
  Join(a, 0, 2, "two", 1);
  for (const auto& [node, gone] : All<GiveUp>()) {
    ADD_FAILURE() << gone.failure.message;
  }
  NodeArrived second;
  second.shards = {Found(1, 1)};
  Say(b, second);
  EXPECT_TRUE(Committed(1));
}

// Attempt 2 runs on a and b, and c has only what is left of attempt 1: it never comes back. While
// nobody hosted the job rank 0 sealed step 11, which rank 1 did not.
class LeftOverTest : public NodesTest {
 protected:
  void Start(bool tiers) {
    settings_.nvme = settings_.remote = tiers;
    MakeCoordinator();
    job_->SetOpenedHere();
    Join(kHere, 0, 2);
    Join(c_, 1, 2);
    Save(kHere, 0, 1);
    Save(c_, 1, 1);
    Say(kHere, SeatLost{1, 0, Process(kHere, 0), 0, SeatLost::How::kProcessEnded});
    Say(c_, SeatLost{1, 1, Process(c_, 1), 0, SeatLost::How::kProcessEnded});
    Join(kHere, 0, 2, "two", 1);
    Join(b_, 1, 2, "two", 1);
    RestorePointAsked anew;
    anew.token = ++token_;
    anew.request.set_from_scratch(true);
    Say(kHere, anew);
    SaveBoth(10);
    ASSERT_TRUE(job_->IsCommitted({2, 10}));
    TakeOver(elsewhere_, tiers);
    Say(gone_, NodeLeft{true, "its lease has ended"});
    Arrive(first_, 0, {10, 11}, 11);
  }
  void Arrive(NodeId node, Rank rank, const std::vector<Step>& steps, std::optional<Step> last,
              bool read = true) {
    NodeArrived arrived;
    for (const Step step : steps) {
      FoundShard found = Found(rank, step);
      found.copy.id.attempt = 2;
      found.copy.descent = {{1, {}}, {2, {}}};
      arrived.shards.push_back(found);
    }
    arrived.seats = {{2, rank, Process(node, rank, 1), 7, {}, last}};
    Say(node, arrived);
    if (settings_.nvme && read) {
      Say(node, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
    }
  }
  std::vector<Step> GivenUp() const {
    std::vector<Step> steps;
    for (const auto& [node, gone] : All<GiveUp>()) {
      steps.push_back(gone.checkpoint.step);
    }
    return steps;
  }
  // Two slots a rank: there is room for the next one.
  void SavesGoOn(Step step) {
    Begin(second_, 1, step);
    Begin(first_, 0, step);
    Seal(second_, 1, step);
    Seal(first_, 0, step);
    EXPECT_TRUE(job_->IsCommitted({2, step}));
  }

  NodeNames elsewhere_{"d"};
  const NodeId first_ = elsewhere_.Number("a");
  const NodeId second_ = elsewhere_.Number("b");
  const NodeId gone_ = elsewhere_.Number("c");
};

TEST_F(LeftOverTest, WhatALivingRankHasLostIsGivenUpThoughAnotherNodeWasNeverHeard) {
  Start(false);
  EXPECT_EQ(GivenUp(), std::vector<Step>{});
  Arrive(second_, 1, {10}, 11);
  EXPECT_TRUE(job_->IsCommitted({2, 10}));
  EXPECT_EQ(GivenUp(), std::vector<Step>{11});
  SavesGoOn(12);
}

TEST_F(LeftOverTest, ButNotBeforeItsDrivesAreRead) {
  Start(true);
  Arrive(second_, 1, {10}, 11, false);
  EXPECT_EQ(GivenUp(), std::vector<Step>{});
  Begin(second_, 1, 12);
  EXPECT_EQ(GivenUp(), std::vector<Step>{});
  Say(second_, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
  EXPECT_EQ(GivenUp(), std::vector<Step>{11});
}

TEST_F(LeftOverTest, WhatItsDrivesHaveIsThere) {
  Start(true);
  Arrive(second_, 1, {10}, 11, false);
  CopiesFound found = FoundOnNvme({{1, 11}});
  found.copies[0].copy.id.attempt = 2;
  Say(second_, found);
  Say(second_, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
  EXPECT_TRUE(job_->IsCommitted({2, 11}));
  EXPECT_EQ(GivenUp(), std::vector<Step>{});
}

TEST_F(LeftOverTest, WhatALivingRankGoesOnWithoutIsGivenUp) {
  Start(false);
  Arrive(second_, 1, {10}, 10);
  EXPECT_EQ(GivenUp(), std::vector<Step>{}) << "it may begin that one yet";
  SavesGoOn(12);
  EXPECT_EQ(GivenUp(), std::vector<Step>{11});
}

TEST_F(LeftOverTest, WhatALivingRankMayBeginYetIsCommittedWhenItHas) {
  Start(false);
  Arrive(second_, 1, {10}, 10);
  Begin(second_, 1, 11);
  Seal(second_, 1, 11);
  EXPECT_TRUE(job_->IsCommitted({2, 11}));
}

TEST_F(NodesTest, NvmeIsKnownWhenEveryNodeHasTold) {
  Say(c_, InventoryState{TierKind::kNvme, InventoryState::Kind::kPending, ""});
  EXPECT_TRUE(job_->InventoryPending());
  Say(b_, InventoryState{TierKind::kNvme, InventoryState::Kind::kFailed, "EIO"});
  EXPECT_TRUE(job_->InventoryPending());
  Say(c_, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
  EXPECT_FALSE(job_->InventoryPending());
  EXPECT_FALSE(job_->AllInventoriesKnown());
  EXPECT_EQ(job_->Inventory(TierKind::kNvme).why, "b: EIO");
  Say(b_, NodeLeft{true, "its lease has ended"});
  EXPECT_TRUE(job_->AllInventoriesKnown());
}

TEST_F(NodesTest, WhatOneNodesDriveLostTheOtherNodesKeep) {
  TwoRanks();
  SaveBoth(1);
  Flush(1);
  Say(b_, CopiesAway{TierKind::kNvme, "/drive"});
  v1::WhereReply where;
  job_->FillWhere(std::nullopt, where);
  std::vector<std::string> on_nvme;
  for (const v1::ShardCopy& copy : where.copies()) {
    if (copy.tier() == "nvme") {
      on_nvme.push_back(copy.node());
    }
  }
  EXPECT_EQ(on_nvme, std::vector<std::string>{"a"});
}

// What a coordinator writes tells the next one, on another node, which nodes to wait for; they tell
// who the ranks are.
TEST_F(NodesTest, AnotherNodeTakesTheJobOver) {
  TwoRanks();
  SaveBoth(1);
  NodeNames nodes("c");
  settings_.nodes = &nodes;
  const NodeId a = nodes.Number("a");
  const NodeId b = nodes.Number("b");
  MakeCoordinator();
  ASSERT_TRUE(job_->Load(written_).ok());
  std::vector<ForAgent> out;
  job_->Resume({}, Time(), out);
  EXPECT_EQ(job_->attempt(), 1u);
  for (const auto& [node, rank] : {std::pair{a, 0u}, {b, 1u}}) {
    NodeArrived there;
    there.shards = {Found(rank, 1)};
    there.seats = {Seat(node, rank, 1)};
    Say(node, there);
  }
  EXPECT_TRUE(Committed(1));
  EXPECT_TRUE(job_->IsMember(0, Process(a, 0)));
  EXPECT_TRUE(job_->IsMember(1, Process(b, 1)));
  Begin(a, 0, 2);
  Begin(b, 1, 2);
  Seal(a, 0, 2);
  Seal(b, 1, 2);
  EXPECT_TRUE(Committed(2));
}

// Of a job of many nodes each would else be one write more of a state that names them all.
// What the host before brought to remote, it could not have agreed on any more.
class RemoteStillReadTest : public NodesTest {
 protected:
  // c takes the job over, and the remote tier is still being read; a has step 1, and `left`.
  void TakeOverWith(const std::vector<FoundShard>& left) {
    TwoRanks();
    SaveBoth(1);
    now_ = now_ + kStateLaziness;
    Say(kHere, WakeUp{});
    settings_.nodes = &others_;
    MakeCoordinator();
    ASSERT_TRUE(job_->Load(written_).ok());
    job_->SetRebooted();
    std::vector<ForAgent> out;
    job_->Resume({}, Time(), out);
    NodeArrived arrived;
    arrived.shards = {Found(0, 1), Found(1, 1)};
    arrived.shards.insert(arrived.shards.end(), left.begin(), left.end());
    Say(a_, arrived);
    for (const NodeId node : {kHere, a_}) {
      Say(node, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
    }
    Say(others_.Number("b"), NodeLeft{true, "its lease has ended"});
    Join(a_, 0, 2, "two", 1);
    Join(a_, 1, 2, "two", 1);
    zero_ = Enter(a_, 0, 1);
    Enter(a_, 1, 1);
  }
  NodeNames others_{"c"};
  const NodeId a_ = others_.Number("a");
  RequestToken zero_ = 0;
};

TEST_F(RemoteStillReadTest, AStepOfWhichPartsAreLeftIsWaitedFor) {
  ASSERT_NO_FATAL_FAILURE(TakeOverWith({Found(0, 2)}));
  EXPECT_EQ(Answer<SourceOffered>(zero_), nullptr);
  CopiesFound found = FoundOnNvme({{0, 2}, {1, 2}});
  found.tier = TierKind::kRemote;
  found.manifests = {{1, 2}};
  for (DurableCopy& copy : found.copies) {
    copy.from_manifest = true;
  }
  Say(kHere, found);
  Say(kHere, InventoryState{TierKind::kRemote, InventoryState::Kind::kKnown, ""});
  ASSERT_NE(Answer<SourceOffered>(zero_), nullptr);
  EXPECT_EQ(Answer<SourceOffered>(zero_)->checkpoint, (CheckpointId{1, 2}));
}

TEST_F(RemoteStillReadTest, NotForLongIfItCannotBeRead) {
  ASSERT_NO_FATAL_FAILURE(TakeOverWith({Found(0, 2)}));
  EXPECT_EQ(Answer<SourceOffered>(zero_), nullptr);
  Say(kHere, InventoryState{TierKind::kRemote, InventoryState::Kind::kFailed, "it hangs"});
  ASSERT_NE(Answer<SourceOffered>(zero_), nullptr);
  EXPECT_EQ(Answer<SourceOffered>(zero_)->checkpoint, (CheckpointId{1, 1}));
}

TEST_F(RemoteStillReadTest, NobodyWaitsForWhatNothingIsLeftOf) {
  ASSERT_NO_FATAL_FAILURE(TakeOverWith({}));
  ASSERT_NE(Answer<SourceOffered>(zero_), nullptr);
  EXPECT_EQ(Answer<SourceOffered>(zero_)->checkpoint, (CheckpointId{1, 1}));
}

TEST_F(NodesTest, WhoJoinsFromANodeThatTheStateNamesWaitsForNoOtherState) {
  TwoRanks();
  SaveBoth(1);
  ASSERT_NE(Answer<JoinAccepted>(Join(kHere, 0, 2, "two", 1)), nullptr);
  const uint64_t version = written_.version();
  EXPECT_THAT(NodesIn(written_.nodes()), ::testing::Contains("b")) << "where copies lie";
  ASSERT_NE(Answer<JoinAccepted>(Join(b_, 1, 2, "two", 1)), nullptr);
  EXPECT_EQ(written_.version(), version);
}

// Else the next host would give its number a second time.
TEST_F(NodesTest, AnAttemptThatIsOpenedFromANodeThatTheStateNamesIsInOneFirst) {
  TwoRanks();
  SaveBoth(1);
  const uint64_t version = written_.version();
  ASSERT_THAT(NodesIn(written_.nodes()), ::testing::Contains("b"));
  ASSERT_NE(Answer<JoinAccepted>(Join(b_, 1, 2, "two", 1)), nullptr);
  EXPECT_GT(written_.version(), version);
  EXPECT_EQ(written_.highest_attempt(), 2u);
}

// The next host would give the rank away while its node is silent.
TEST_F(NodesTest, WhoJoinsFromANodeThatNoStateNamesWaitsForOne) {
  Join(kHere, 0, 2);
  const uint64_t version = written_.version();
  EXPECT_THAT(NodesIn(written_.nodes()), ::testing::Not(::testing::Contains("b")));
  Join(b_, 1, 2);
  EXPECT_GT(written_.version(), version);
  EXPECT_THAT(NodesIn(written_.nodes()), ::testing::Contains("b"));
}

TEST_F(NodesTest, ANodeWithRanksOfAnOlderAttemptHearsThatTheyAreSuperseded) {
  TwoRanks();
  SaveBoth(1);
  Say(b_, NodeLeft{true, "its lease has ended"});
  Say(kHere, SeatLost{1, 0, Process(kHere, 0), 0, SeatLost::How::kProcessEnded});
  Join(kHere, 0, 2, "two", 1);
  out_.clear();
  NodeArrived zombie;  // cut off, and not dead
  zombie.shards = {Found(1, 1), Found(1, 2)};
  zombie.seats = {Seat(b_, 1, 2)};
  Say(b_, zombie);
  const auto superseded = All<Superseded>();
  ASSERT_EQ(superseded.size(), 1u);
  EXPECT_EQ(superseded[0].first, b_);
  EXPECT_EQ(superseded[0].second.by, 2u);
  // What it sealed since is of no step that the attempt committed, once all that it has is known.
  Say(b_, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
  bool gone = false;
  for (const auto& [node, given_up] : All<GiveUp>()) {
    gone = gone || given_up.checkpoint == CheckpointId{1, 2};
  }
  EXPECT_TRUE(gone);
  out_.clear();
  Say(b_, ShardSealed{1, 1, 3, 2, kBytes, 1000});
  ASSERT_EQ(All<GiveUp>().size(), 1u);
  EXPECT_EQ(All<GiveUp>()[0].second.failure.reason, v1::Failure::REASON_SUPERSEDED);
}

// The state names the ranks of its writer's node. One that has moved away from there is on another
// node before anybody hears so: the next host would believe the state, and turn it out.
TEST_F(NodesTest, ARankThatMovesAwayFromTheHostsNodeIsWrittenFirst) {
  TwoRanks();
  Say(kHere, SeatLost{1, 0, Process(kHere, 0), 0, SeatLost::How::kProcessEnded});
  agrees_ = false;
  const RequestToken moved = Join(b_, 0, 2);
  EXPECT_EQ(Answer<JoinAccepted>(moved), nullptr);
  agrees_ = true;
  Say(kHere, StateWritten{written_.version(), absl::OkStatus()});
  ASSERT_NE(Answer<JoinAccepted>(moved), nullptr);
  for (const v1::MemberState& member : written_.members()) {
    EXPECT_NE(member.rank(), 0u) << member.ShortDebugString();
  }
}

// Told twice, since it had not heard the first time: what goes makes nothing whole meanwhile,
// though it was all sealed by then and the next attempt is open.
TEST_F(NodesTest, WhatANodeWasToldToGiveUpIsNotTakenBeforeItHasHeard) {
  BothOnBWriteTheSecond();
  Say(b_, SaveLost{1, 0, 2, "gone"});
  for (const Rank rank : {0, 1}) {
    Say(b_, SeatLost{1, rank, Process(b_, rank), 0, SeatLost::How::kProcessEnded});
  }
  Join(b_, 0, 2, "two", 1);
  ASSERT_EQ(job_->attempt(), 2u);
  out_.clear();
  Say(b_, WithBothOfTwoSteps());
  EXPECT_TRUE(Committed(1));
  EXPECT_FALSE(Committed(2));
  const auto again = All<GiveUp>();
  ASSERT_EQ(again.size(), 2u);
  for (const auto& [node, gone] : again) {
    EXPECT_EQ(node, b_);
    EXPECT_EQ(gone.checkpoint, (CheckpointId{1, 2}));
  }
}

// A node that began a save by itself gives up all that it has of the step when that is refused: so
// nobody may count on it, though the rank that was missing seals it yet.
TEST_F(NodesTest, AStepThatOneNodeIsToldToGiveUpIsOverForAll) {
  for (const bool told_before : {true, false}) {
    SCOPED_TRACE(told_before);
    MakeCoordinator();
    job_->SetOpenedHere();
    Join(kHere, 0, 3);
    Join(b_, 1, 3);
    Join(b_, 2, 3);
    Begin(kHere, 0, 1);
    Begin(b_, 1, 1);
    if (told_before) {
      Seal(b_, 1, 1);
    }
    Say(kHere, SeatLost{1, 0, Process(kHere, 0), 0, SeatLost::How::kProcessEnded});
    out_.clear();
    Say(b_, SaveAsked{0, 1, 2, 1});
    EXPECT_FALSE(All<GiveUp>().empty());
    Seal(kHere, 0, 1);
    if (!told_before) {
      Seal(b_, 1, 1);
    }
    Seal(b_, 2, 1);
    EXPECT_FALSE(Committed(1));
  }
}

// Its node meets this one anew before it was told: it asks again, and has not ended.
TEST_F(NodesTest, WhoIsLetInAndNotToldYetIsThereWhenItsNodeIsMetAnew) {
  Join(kHere, 0, 2);
  Begin(kHere, 0, 1);  // from scratch
  agrees_ = false;
  const JoinAsked join = Joining(b_, 1, 2, "one", 0);
  const RequestToken asked = Ask(b_, join);
  ASSERT_EQ(Answer<JoinAccepted>(asked), nullptr) << "it is not durable";
  Say(b_, RequestCancelled{asked});  // by its node's arrival
  NodeArrived arrived;
  arrived.joining = {{1, Process(b_, 1)}};
  Say(b_, arrived);
  agrees_ = true;
  Say(kHere, StateWritten{written_.version(), absl::OkStatus()});
  ASSERT_NE(Answer<JoinAccepted>(Ask(b_, join)), nullptr);
  Seal(kHere, 0, 1);
  Save(b_, 1, 1);
  EXPECT_TRUE(Committed(1));
}

// Nor if a part of it that lies on a drive is still to be removed.
TEST_F(NodesTest, WhatANodeWasToldToGiveUpIsNotTakenWhileAPartOfItIsOnADrive) {
  BothOnBWriteTheSecond();
  Seal(b_, 0, 2);
  Say(b_, FoundOnNvme({{0, 2}}));
  Say(b_, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
  Say(b_, SaveLost{1, 1, 2, "gone"});
  ASSERT_FALSE(All<GiveUp>().empty());
  for (const bool away : {false, true}) {
    SCOPED_TRACE(away);
    if (away) {
      Say(b_, NodeLeft{true, "its lease has ended"});
    }
    out_.clear();
    NodeArrived arrived;
    arrived.shards = {Found(0, 1), Found(1, 1), Found(0, 2)};
    Say(b_, arrived);
    const auto again = All<GiveUp>();
    ASSERT_EQ(again.size(), 1u);
    EXPECT_EQ(again[0].first, b_);
    EXPECT_EQ(again[0].second.checkpoint, (CheckpointId{1, 2}));
    v1::WhereReply where;
    job_->FillWhere(std::nullopt, where);
    for (const v1::ShardCopy& copy : where.copies()) {
      EXPECT_FALSE(copy.step() == 2 && copy.tier() == "memory") << copy.ShortDebugString();
    }
  }
}

// But one that was not told has it still, and it is whole.
TEST_F(NodesTest, WhatWasGivenUpWhileItsNodeWasOutOfReachComesBackWithIt) {
  BothOnBWriteTheSecond();
  Say(b_, NodeLeft{true, "its lease has ended"});
  Join(kHere, 0, 2, "two", 1);
  ASSERT_EQ(job_->attempt(), 2u);
  out_.clear();
  Say(b_, WithBothOfTwoSteps());
  EXPECT_TRUE(Committed(2));
  EXPECT_TRUE(All<GiveUp>().empty());
}

// Of a step that goes on in another tier: it was told so, and had not heard it yet when it told of
// its copy in memory, which goes.
class CrossedTest : public NodesTest {
 protected:
  // Step 1 is on the drives, and gone from memory.
  void RetireTheFirst() {
    TwoRanks();
    SaveBoth(1);
    Flush(1);
    SaveBoth(2);
    Begin(b_, 1, 3);
    out_.clear();
    Say(b_, RoomAsked{++token_, 1, 1, 3, {{1, 1}}});
    ASSERT_EQ(All<GiveUp>().size(), 1u);
    ASSERT_EQ(All<GiveUp>()[0].second.checkpoint, (CheckpointId{1, 1}));
    out_.clear();
  }
  void ArriveWithBothSteps() {
    NodeArrived arrived;
    arrived.shards = {Found(1, 1), Found(1, 2)};
    arrived.seats = {Seat(b_, 1, 3)};
    arrived.seats[0].writing = {3};
    Say(b_, arrived);
  }
  bool InMemoryOfB(Step step) const {
    v1::WhereReply where;
    job_->FillWhere(CheckpointId{1, step}, where);
    return std::any_of(where.copies().begin(), where.copies().end(), [](const auto& copy) {
      return copy.rank() == 1 && copy.tier() == "memory" && copy.state() == "good";
    });
  }
};

TEST_F(CrossedTest, WhatANodeTellsOfThatItIsToGiveUpDoesNotCount) {
  RetireTheFirst();
  ArriveWithBothSteps();
  const auto given_up = All<GiveUp>();
  ASSERT_EQ(given_up.size(), 1u) << "it may never have heard the first one";
  EXPECT_EQ(given_up[0].first, b_);
  EXPECT_EQ(given_up[0].second.checkpoint, (CheckpointId{1, 1}));
  EXPECT_FALSE(InMemoryOfB(1)) << "it goes";
  EXPECT_TRUE(InMemoryOfB(2));
  EXPECT_TRUE(job_->IsCommittedIn(TierKind::kNvme, {1, 1}));
}

TEST_F(CrossedTest, WhatWasBroughtBackSinceStays) {
  RetireTheFirst();
  Say(b_, MemoryCopyGained{{1, 1}, 1, kBytes, 1000});
  ArriveWithBothSteps();
  EXPECT_TRUE(All<GiveUp>().empty());
  EXPECT_TRUE(InMemoryOfB(1));
}

// ---- Who waits ----

TEST_F(NodesTest, WhoWaitsForNvmeHearsOfWhatAScanFindsThere) {
  TwoRanks();
  SaveBoth(1);
  const RequestToken zero = Await(0, 1, v1::AwaitSave::STAGE_NVME);
  const RequestToken one = Await(1, 1, v1::AwaitSave::STAGE_NVME);
  Say(kHere, FoundOnNvme({{0, 1}, {1, 1}}));
  EXPECT_NE(Answer<StageReached>(zero), nullptr);
  EXPECT_NE(Answer<StageReached>(one), nullptr);
}

TEST_F(NodesTest, WhoWaitsHearsThatAnotherRanksShardContradictsTheStep) {
  TwoRanks();
  Save(kHere, 0, 1);
  const RequestToken zero = Await(0, 1, v1::AwaitSave::STAGE_COMMITTED);
  Begin(b_, 1, 1);
  Say(b_, ShardSealed{1, 1, 1, 3, kBytes, 1000});
  EXPECT_NE(Answer<Refused>(zero), nullptr);
}

// ---- What is kept while nodes are out of reach ----

TEST_F(NodesTest, AWholeStepIsNotGivenUpForANewerOneThatIsCutOff) {
  TwoRanks();
  SaveBoth(1);
  SaveBoth(2);
  Say(kHere, MemoryCopyGained{{1, 1}, 1, kBytes, 1000});
  Say(b_, NodeLeft{false, "no answer"});
  EXPECT_TRUE(Committed(1));
  EXPECT_FALSE(Committed(2));
  Begin(kHere, 0, 3);
  out_.clear();
  Say(kHere, RoomAsked{++token_, 1, 0, 3, {{1, 1}, {1, 2}}});
  EXPECT_TRUE(All<GiveUp>().empty());
  Say(kHere, SpareAsked{++token_, "other", {{1, 1}, {1, 2}}});
  EXPECT_TRUE(All<GiveUp>().empty());
}

// Three steps are committed in memory alone, the first of them pinned, and both ranks ask for room.
class AskTogetherTest : public NodesTest {
 protected:
  AskTogetherTest() {
    settings_.nvme = settings_.remote = false;
    MakeCoordinator();
    job_->SetOpenedHere();
    TwoRanks();
    for (const Step step : {1, 2, 3}) {
      SaveBoth(step);
    }
    PinAsked pin;
    pin.token = ++token_;
    pin.request.set_step(1);
    Say(kHere, pin);
    Begin(kHere, 0, 4);
    Begin(b_, 1, 4);
    out_.clear();
  }
  bool RoomFor(NodeId node, Rank rank, std::vector<CheckpointId> useful = kAll) {
    Say(node, RoomAsked{++token_, 1, rank, 4, std::move(useful)});
    const RoomAnswered* answer = Answer<RoomAnswered>(token_);
    return answer != nullptr && answer->made;
  }
  std::vector<Step> GivenUp() const {
    std::vector<Step> steps;
    for (const auto& [node, gone] : All<GiveUp>()) {
      steps.push_back(gone.checkpoint.step);
    }
    return steps;
  }
  static const inline std::vector<CheckpointId> kAll = {{1, 1}, {1, 2}, {1, 3}};
};

TEST_F(AskTogetherTest, OneStepIsGivenUpForAll) {
  EXPECT_TRUE(RoomFor(kHere, 0));
  EXPECT_TRUE(RoomFor(b_, 1)) << "what was given up for the other rank is on its way to this one";
  EXPECT_EQ(GivenUp(), std::vector<Step>{2});
  EXPECT_TRUE(Committed(1)) << "pinned, and whole in memory alone";
}

TEST_F(AskTogetherTest, OtherJobsAndRestoresDoNotCostAnotherOneEither) {
  EXPECT_TRUE(RoomFor(kHere, 0, {{1, 2}}));
  Say(b_, SpareAsked{++token_, "other", kAll});
  EXPECT_TRUE(Answer<RoomAnswered>(token_)->made);
  Say(b_, FetchRoomAsked{++token_, {1, 9}, kAll});
  EXPECT_TRUE(Answer<RoomAnswered>(token_)->made);
  EXPECT_EQ(GivenUp(), std::vector<Step>{2});
}

// It has heard of it: what it names now is what it still has.
TEST_F(AskTogetherTest, WhoAsksAgainWithoutItIsGivenMore) {
  EXPECT_TRUE(RoomFor(kHere, 0));
  EXPECT_TRUE(RoomFor(b_, 1, {{1, 1}, {1, 3}}));
  EXPECT_EQ(GivenUp(), (std::vector<Step>{2, 1}));
}

// Its question is repeated as it was, and what it tells has no copy of that step.
TEST_F(AskTogetherTest, WhoseAnswerWasLostIsNotGivenAnotherOne) {
  EXPECT_TRUE(RoomFor(b_, 1));
  Say(b_, NodeLeft{false, "its channel broke"});
  NodeArrived back;
  back.shards = {Found(1, 1), Found(1, 3)};
  back.seats = {Seat(b_, 1, 4)};
  back.seats[0].writing = {4};
  Say(b_, back);
  EXPECT_TRUE(RoomFor(b_, 1));
  EXPECT_EQ(GivenUp(), std::vector<Step>{2});
}

// What was said of it is lost with the channel, and said again.
TEST_F(AskTogetherTest, WhoDidNotHearOfItIsNotGivenAnotherOneEither) {
  EXPECT_TRUE(RoomFor(kHere, 0));
  Say(b_, NodeLeft{false, "its channel broke"});
  NodeArrived back;
  back.shards = {Found(1, 1), Found(1, 2), Found(1, 3)};
  back.seats = {Seat(b_, 1, 4)};
  back.seats[0].writing = {4};
  Say(b_, back);
  EXPECT_TRUE(RoomFor(b_, 1));
  EXPECT_EQ(GivenUp(), (std::vector<Step>{2, 2}));
}

// A copy that is left alone, as another save's, is in the node's way for good: to promise it room
// for that would go on for ever.
TEST_F(NodesTest, ACopyThatIsLeftAloneIsNotOnItsWayOut) {
  TwoRanks();
  for (const Step step : {1, 2, 3}) {
    SaveBoth(step);
    Flush(step);
  }
  Begin(kHere, 0, 4);
  Begin(b_, 1, 4);
  Say(kHere, RoomAsked{++token_, 1, 0, 4, {{1, 2}}});
  ASSERT_TRUE(Answer<RoomAnswered>(token_)->made);
  ASSERT_EQ(All<GiveUp>().size(), 1u);
  Say(b_, NodeLeft{false, "its channel broke"});
  NodeArrived back;
  back.shards = {Found(1, 1), Found(1, 2), Found(1, 3)};
  back.shards[1].copy.image_bytes = 2 * kBytes;
  back.seats = {Seat(b_, 1, 4)};
  back.seats[0].writing = {4};
  Say(b_, back);
  out_.clear();
  Say(b_, RoomAsked{++token_, 1, 1, 4, {{1, 1}, {1, 2}}});
  EXPECT_TRUE(Answer<RoomAnswered>(token_)->made);
  ASSERT_EQ(All<GiveUp>().size(), 1u);
  EXPECT_EQ(All<GiveUp>()[0].second.checkpoint, (CheckpointId{1, 1}));
}

TEST_F(NodesTest, ANewCoordinatorWaitsForNodesThatHaveCopiesAndNoRanksAnyMore) {
  TwoRanks();
  SaveBoth(1);
  Say(kHere, SeatLost{1, 0, Process(kHere, 0), 0, SeatLost::How::kProcessEnded});
  Say(b_, SeatLost{1, 1, Process(b_, 1), 0, SeatLost::How::kProcessEnded});
  Join(kHere, 0, 2, "two", 1);
  NodeNames nodes("c");
  TakeOver(nodes, false);
  const NodeId a = nodes.Number("a");
  const NodeId b = nodes.Number("b");
  NodeArrived first;
  first.shards = {Found(0, 1)};
  Say(a, first);
  EXPECT_TRUE(All<GiveUp>().empty());
  NodeArrived second;
  second.shards = {Found(1, 1)};
  Say(b, second);
  EXPECT_TRUE(Committed(1));
}

TEST_F(NodesTest, ACommittedStepHasNoDeadlineForANodeThatANewCoordinatorHasNotHeardOf) {
  TwoRanks();
  SaveBoth(1);
  NodeNames nodes("c");
  TakeOver(nodes, true);
  const NodeId a = nodes.Number("a");
  const NodeId b = nodes.Number("b");
  NodeArrived first;
  first.shards = {Found(0, 1)};
  first.seats = {Seat(a, 0, 1)};
  Say(a, first);
  Say(a, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
  now_ = now_ + std::chrono::hours(1);
  Say(kHere, WakeUp{});
  EXPECT_TRUE(All<GiveUp>().empty());
  NodeArrived second;
  second.shards = {Found(1, 1)};
  second.seats = {Seat(b, 1, 1)};
  Say(b, second);
  EXPECT_TRUE(Committed(1));
}

TEST_F(NodesTest, WhatOnlyAMissingNodeHadIsGivenUpWhenItComesWithoutIt) {
  TwoRanks();
  SaveBoth(1);
  NodeNames nodes("c");
  TakeOver(nodes, false);
  const NodeId a = nodes.Number("a");
  const NodeId b = nodes.Number("b");
  NodeArrived first;
  first.shards = {Found(0, 1)};
  first.seats = {Seat(a, 0, 1)};
  Say(a, first);
  now_ = now_ + std::chrono::hours(1);
  Say(kHere, WakeUp{});
  EXPECT_TRUE(All<GiveUp>().empty());
  Say(b, NodeArrived{});  // it was rebooted
  Say(kHere, WakeUp{});
  EXPECT_EQ(All<GiveUp>().size(), 1u);
}

TEST_F(NodesTest, WhatANodesDrivesDoNotHaveAnyMoreIsNotOutOfReachForEver) {
  TwoRanks();
  SaveBoth(1);
  Flush(1);
  PinAsked pin;  // or retention would do away with it
  pin.token = ++token_;
  pin.request.set_step(1);
  Say(kHere, pin);
  Say(b_, NodeLeft{false, "no answer"});
  Say(b_, NodeArrived{});
  Say(b_, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
  v1::WhereReply where;
  job_->FillWhere(std::nullopt, where);
  for (const v1::ShardCopy& copy : where.copies()) {
    EXPECT_NE(copy.state(), "out of reach") << copy.DebugString();
  }
}

TEST_F(NodesTest, WhatIsLeftOfAStepGoesWhenNewerOnesAreSafeWithoutTheNodeThatIsGone) {
  TwoRanks();
  SaveBoth(1);
  Flush(1);
  Say(b_, NodeLeft{true, "its lease has ended"});
  Say(kHere, SeatLost{1, 0, Process(kHere, 0), 0, SeatLost::How::kProcessEnded});
  Join(kHere, 0, 2, "two", 1);
  Join(c_, 1, 2, "two", 1);
  Enter(kHere, 0, 1);
  Enter(c_, 1, 1);
  for (const auto& [node, rank] : {std::pair{kHere, 0u}, {c_, 1u}}) {
    LoadReported loaded{++token_, 2, rank, 1, 1, true, false, false, ""};
    Say(node, loaded);
  }
  ASSERT_NE(Answer<SessionEnded>(token_), nullptr);
  out_.clear();
  for (const Step step : {2, 3}) {
    Begin(kHere, 0, step);
    Begin(c_, 1, step);
    Seal(kHere, 0, step);
    Seal(c_, 1, step);
    for (const TierKind to : {TierKind::kNvme, TierKind::kRemote}) {
      for (const auto& [node, rank] : {std::pair{kHere, 0u}, {c_, 1u}}) {
        ShardDrained drained{{2, step}, rank, to, TierKind::kNvme, absl::OkStatus(), false, {}};
        Say(node, drained);
      }
    }
    Say(kHere, ManifestDone{{2, step}, absl::OkStatus()});
  }
  Say(kHere, CollectGarbageAsked{});
  bool goes = false;
  for (const auto& [node, removal] : All<RemovalWanted>()) {
    EXPECT_NE(node, b_);
    goes = goes || (removal.checkpoint == CheckpointId{1, 1} && removal.tier == TierKind::kNvme);
  }
  EXPECT_TRUE(goes);
}

TEST_F(NodesTest, ANodeThatNeverTookPartIsNotWaitedFor) {
  TwoRanks();
  SaveBoth(1);
  Say(nodes_.Number("d"), NodeLeft{false, "no answer"});
  EXPECT_FALSE(job_->InventoryPending());
}

// ---- Work that a node will not do ----

TEST_F(NodesTest, ARemovalThatANodeCouldNotDoIsNotAskedOfItWhenItIsGone) {
  TwoRanks();
  SaveBoth(1);
  Flush(1);
  SaveBoth(2);
  Flush(2);
  Say(b_, RemovalDone{{1, 1}, TierKind::kNvme, absl::UnavailableError("EIO"), std::nullopt});
  Say(b_, NodeLeft{true, "its lease has ended"});
  out_.clear();
  Say(kHere, RemovalDone{{1, 1}, TierKind::kNvme, absl::OkStatus(), std::nullopt});
  now_ = now_ + kRemovalRetry;
  Say(kHere, WakeUp{});
  for (const auto& [node, wanted] : All<RemovalWanted>()) {
    EXPECT_NE(node, b_);
  }
  v1::CollectGarbageReply garbage;
  job_->FillGarbage(0, garbage);
  EXPECT_FALSE(absl::StrContains(garbage.DebugString(), "is being removed"));
}

TEST_F(NodesTest, ABadCopyOnANodeThatIsGoneHoldsUpNoRemoval) {
  TwoRanks();
  SaveBoth(1);
  Flush(1);
  Say(b_, ShardBad{{1, 1}, 1, "its digests are wrong", TierKind::kNvme});
  Say(b_, NodeLeft{true, "its lease has ended"});
  out_.clear();
  RemoveCheckpointAsked remove;
  remove.token = ++token_;
  remove.request.set_step(1);
  remove.request.set_tier("nvme");
  remove.request.set_force(true);
  Say(kHere, remove);
  const auto wanted = All<RemovalWanted>();
  ASSERT_EQ(wanted.size(), 1u);
  EXPECT_EQ(wanted[0].first, kHere);
}

// Its channel was opened anew: what it was asked for, or what it answered, may be lost.
TEST_F(NodesTest, ANodeThatComesAgainIsAskedAgain) {
  TwoRanks();
  SaveBoth(1);
  out_.clear();
  NodeArrived again;
  again.shards = {Found(1, 1)};
  again.seats = {Seat(b_, 1, 1)};
  Say(b_, again);
  Say(b_, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
  Drained(kHere, 0, 1, TierKind::kNvme, TierKind::kMemory);
  now_ = now_ + kDrainRetryMax;
  Say(kHere, WakeUp{});
  auto wanted = All<FlushWanted>();
  std::erase_if(wanted, [](const auto& w) { return w.second.to != TierKind::kNvme; });
  ASSERT_EQ(wanted.size(), 1u);
  EXPECT_EQ(wanted[0].first, b_);

  Flush(1);
  SaveBoth(2);
  Flush(2);
  Say(kHere, RemovalDone{{1, 1}, TierKind::kNvme, absl::OkStatus(), std::nullopt});
  again.shards = {Found(1, 2)};
  again.seats = {Seat(b_, 1, 2)};
  Say(b_, again);
  Say(b_, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
  out_.clear();
  now_ = now_ + kRemovalRetry;
  Say(kHere, WakeUp{});
  const auto removals = All<RemovalWanted>();
  ASSERT_EQ(removals.size(), 1u);
  EXPECT_EQ(removals[0].first, b_);
}

TEST_F(NodesTest, AFlushWaitsForItsNodeAndWhatIsInTheRemoteTierDoesNot) {
  TwoRanks();
  SaveBoth(1);
  Drained(kHere, 0, 1, TierKind::kNvme, TierKind::kMemory);
  Drained(b_, 1, 1, TierKind::kNvme, TierKind::kMemory);
  Drained(b_, 1, 1, TierKind::kRemote, TierKind::kNvme);
  SaveBoth(2);
  Say(b_, NodeLeft{false, "no answer"});
  Drained(kHere, 0, 2, TierKind::kNvme, TierKind::kMemory);
  now_ = now_ + kDrainRetryMax;
  Say(kHere, WakeUp{});
  out_.clear();
  // All of step 1 is in the remote tier: it is committed there without that node.
  Drained(kHere, 0, 1, TierKind::kRemote, TierKind::kNvme);
  ASSERT_EQ(All<ManifestWanted>().size(), 1u);
  Say(kHere, ManifestDone{{1, 1}, absl::OkStatus()});
  EXPECT_TRUE(Committed(1));
  NodeArrived back;
  back.shards = {Found(1, 1), Found(1, 2)};
  back.seats = {Seat(b_, 1, 2)};
  Say(b_, back);
  Say(b_, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
  now_ = now_ + kDrainRetryMax;
  Say(kHere, WakeUp{});
  bool again = false;
  for (const auto& [node, flush] : All<FlushWanted>()) {
    again = again || (node == b_ && flush.checkpoint == CheckpointId{1, 2});
  }
  EXPECT_TRUE(again);
}

// Its memory was needed, and while a node is missing a committed step may be more than is known
// here. With the last flush that fails there is nothing left of it that could wait for that node.
TEST_F(NodesTest, AStepThatWentFromMemoryIsGoneWhenItsFlushFailsThoughANodeIsMissing) {
  settings_.nvme = false;
  settings_.slots_per_rank = 2;
  MakeCoordinator();
  job_->SetOpenedHere();
  Say(kHere, InventoryState{TierKind::kRemote, InventoryState::Kind::kKnown, ""});
  TwoRanks();
  SaveBoth(1);
  SaveBoth(2);
  ASSERT_TRUE(Committed(2));
  NodeArrived old;  // it takes part by what it has of an older step
  old.shards = {Found(0, 1)};
  Say(c_, old);
  Say(c_, NodeLeft{false, "no answer"});
  Begin(b_, 1, 3);
  Say(b_, RoomAsked{++token_, 1, 1, 3, {{1, 1}}});
  ASSERT_EQ(All<GiveUp>().size(), 1u);
  EXPECT_EQ(All<GiveUp>()[0].second.checkpoint.step, 1u);
  Drained(kHere, 0, 1, TierKind::kRemote, TierKind::kMemory, absl::ResourceExhaustedError("full"));
  Drained(b_, 1, 1, TierKind::kRemote, TierKind::kMemory, absl::ResourceExhaustedError("full"));
  EXPECT_FALSE(Committed(1));
}

// ---- Who is who ----

// It may have been suspended for longer than its lease, with ranks that live on.
TEST_F(NodesTest, ASaveThatIsRefusedForANodeThatIsGoneSaysThatItMayComeBack) {
  TwoRanks();
  SaveBoth(1);
  Say(b_, NodeLeft{true, "its lease has ended"});
  Say(kHere, SaveAsked{++token_, 1, 0, 2});
  const Refused* refused = Answer<Refused>(token_);
  ASSERT_NE(refused, nullptr);
  EXPECT_TRUE(absl::StrContains(refused->failure.message, "unless that node comes back"))
      << refused->failure.message;
  // A process that was seen to end does not.
  NodeArrived back;
  back.shards = {Found(1, 1)};
  Say(b_, back);
  Say(kHere, SaveAsked{++token_, 1, 0, 3});
  refused = Answer<Refused>(token_);
  ASSERT_NE(refused, nullptr);
  EXPECT_TRUE(absl::StrContains(refused->failure.message, "commits nothing any more"))
      << refused->failure.message;
}

// Nobody has seen it end.
TEST_F(NodesTest, AStepGivenUpForANodeThatIsGoneSaysSo) {
  TwoRanks();
  SaveBoth(1);
  Begin(kHere, 0, 2);
  const RequestToken awaits = Await(0, 2, v1::AwaitSave::STAGE_COMMITTED);
  Seal(kHere, 0, 2);
  Say(b_, NodeLeft{true, "its lease has ended"});
  const Refused* refused = Answer<Refused>(awaits);
  ASSERT_NE(refused, nullptr);
  EXPECT_TRUE(absl::StrContains(refused->failure.message,
                                "counts as ended, that node being gone, without having begun it"))
      << refused->failure.message;
}

TEST_F(NodesTest, ARankThatWaitedOnANodeThatIsGoneIsNotLetIn) {
  TwoRanks();
  JoinAsked join;
  join.token = ++token_;
  join.connection = token_;
  join.caller = {Process(b_, 0, 1), 1000, 1000};
  join.world_size = 2;
  join.launch = "one";
  join.may_wait = true;
  Say(b_, join);  // rank 0 is alive on a
  Say(b_, NodeLeft{true, "its lease has ended"});
  Say(kHere, SeatLost{1, 0, Process(kHere, 0), 0, SeatLost::How::kProcessEnded});
  EXPECT_FALSE(job_->IsMember(0, Process(b_, 0, 1)));
  EXPECT_NE(Answer<JoinAccepted>(Join(c_, 0, 2, "one", 2)), nullptr);
}

// What failed before is not tried again by itself then.
TEST_F(NodesTest, ARemovalIsAgreedOnThoughTheLastWriteFailed) {
  TwoRanks();
  std::vector<ForAgent> out;
  job_->Handle(SetPolicyAsked(), kHere, Time(), out);
  uint64_t failing = 0;
  for (const ForAgent& each : out) {
    if (const auto* state = std::get_if<PersistState>(&each.message)) {
      failing = state->state.version();
    }
  }
  ASSERT_NE(failing, 0u);
  out.clear();
  job_->Handle(StateWritten{failing, absl::ResourceExhaustedError("disk full")}, kHere, Time(),
               out);
  out.clear();
  job_->Handle(JobRemoved{true, true}, kHere, Time(), out);
  EXPECT_TRUE(std::any_of(out.begin(), out.end(), [](const ForAgent& each) {
    const auto* state = std::get_if<PersistState>(&each.message);
    return state != nullptr && state->state.removed();
  }));
}

// The attempt has not begun to save: another process has taken the rank of a node that seemed gone.
TEST_F(NodesTest, OnlyTheNodeWhereTheRankIsMaySaveOrRestoreInIt) {
  TwoRanks();
  Say(b_, NodeLeft{true, "its lease has ended"});
  ASSERT_NE(Answer<JoinAccepted>(Join(c_, 1, 2)), nullptr);
  NodeArrived zombie;
  zombie.seats = {Seat(b_, 1, std::nullopt)};
  Say(b_, zombie);
  Say(b_, SaveAsked{++token_, 1, 1, 1});
  EXPECT_EQ(Answer<SavePermitted>(token_), nullptr);
  ASSERT_NE(Answer<Refused>(token_), nullptr);
  EXPECT_EQ(Answer<Refused>(token_)->failure.reason, v1::Failure::REASON_RANK_TAKEN);
  Enter(b_, 1, 0);
  EXPECT_NE(Answer<Refused>(token_), nullptr);
  Begin(c_, 1, 1);
}

// A session loads step 1, and rank 1 on b has become rank 1 on c.
class ReplacedInSessionTest : public NodesTest {
 protected:
  ReplacedInSessionTest() {
    TwoRanks();
    SaveBoth(1);
    Flush(1);
    StartBothAnew();
    mine_ = Enter(kHere, 0, 1);
    Enter(b_, 1, 1);
    session_ = Answer<SourceOffered>(token_)->session;
    Say(b_, NodeLeft{true, "its lease has ended"});
    EXPECT_NE(Answer<JoinAccepted>(Join(c_, 1, 2, "two", 2)), nullptr);
    theirs_ = Enter(c_, 1, 2);
    EXPECT_NE(Answer<SourceOffered>(theirs_), nullptr);
    NodeArrived back;
    back.shards = {Found(1, 1)};
    back.seats = {{2, 1, Process(b_, 1, 1), 7, {}, std::nullopt}};
    Say(b_, back);
    out_.clear();
  }
  void ExpectRefused() {
    const Refused* refused = Answer<Refused>(token_);
    ASSERT_NE(refused, nullptr);
    EXPECT_EQ(refused->failure.reason, v1::Failure::REASON_RANK_TAKEN);
  }
  // All ranks restore step 1, nobody else.
  void ExpectGoesOn() {
    EXPECT_EQ(Answer<Refused>(mine_), nullptr);
    EXPECT_EQ(Answer<Refused>(theirs_), nullptr);
    EXPECT_TRUE(All<SourceOffered>().empty());
    Say(kHere, LoadReported{++token_, 2, 0, session_, 1, true, false, false, ""});
    EXPECT_EQ(Answer<SessionEnded>(token_), nullptr);
    Say(c_, LoadReported{++token_, 2, 1, session_, 1, true, false, false, ""});
    ASSERT_NE(Answer<SessionEnded>(token_), nullptr);
    EXPECT_EQ(Answer<SessionEnded>(token_)->checkpoint, (CheckpointId{1, 1}));
  }

  RequestToken mine_ = 0;
  RequestToken theirs_ = 0;
  uint64_t session_ = 0;
};

TEST_F(ReplacedInSessionTest, WhatItsFirstProcessHasLoadedCountsForNothing) {
  Say(b_, LoadReported{++token_, 2, 1, session_, 1, true, false, false, ""});
  ExpectRefused();
  ExpectGoesOn();
}

TEST_F(ReplacedInSessionTest, WhatItsFirstProcessCannotLoadEndsNothing) {
  Say(b_, LoadReported{++token_, 2, 1, session_, 1, false, false, false, "no memory"});
  ExpectRefused();
  ExpectGoesOn();
}

TEST_F(ReplacedInSessionTest, WhatItsFirstProcessCannotFetchEndsNothing) {
  Say(b_, FetchFailed{++token_,
                      2,
                      1,
                      session_,
                      1,
                      {1, 1},
                      TierKind::kRemote,
                      absl::UnavailableError("no room"),
                      false});
  ExpectRefused();
  ExpectGoesOn();
}

// Rank 1 has moved from b to c, and b, which alone has its shard of step 1, cannot be read just
// now.
class SourceWaitTest : public NodesTest {
 protected:
  SourceWaitTest() {
    settings_.nvme = settings_.remote = false;
    settings_.peers = true;
    MakeCoordinator();
    job_->SetOpenedHere();
    TwoRanks();
    SaveBoth(1);
    Say(kHere, SeatLost{1, 0, Process(kHere, 0), 0, SeatLost::How::kProcessEnded});
    Say(b_, SeatLost{1, 1, Process(b_, 1), 0, SeatLost::How::kProcessEnded});
    Join(kHere, 0, 2, "two", 1);
    Join(c_, 1, 2, "two", 1);
    mine_ = Enter(kHere, 0, 1);
    theirs_ = Enter(c_, 1, 1);
    EXPECT_NE(Offer(), nullptr);
    offer_ = Offer() != nullptr ? *Offer() : SourceOffered{};
    EXPECT_EQ(offer_.from, TierKind::kPeer);
    EXPECT_EQ(offer_.peers, std::vector<std::string>{"b"});
    loaded_ = ++token_;
    Say(kHere, LoadReported{loaded_, 2, 0, offer_.session, 1, true, false, false, ""});
    out_.clear();
  }
  const SourceOffered* Offer() { return Answer<SourceOffered>(theirs_); }
  void CannotRead(absl::Status why = absl::UnavailableError("node 'b' was started anew")) {
    Say(c_, FetchFailed{theirs_,
                        2,
                        1,
                        offer_.session,
                        offer_.round,
                        {1, 1},
                        TierKind::kPeer,
                        std::move(why),
                        false});
  }
  void Pass(Duration by) {
    now_ = now_ + by;
    Say(kHere, WakeUp{});
  }
  // The time at which the coordinator wants to be woken comes.
  void PassToWake() {
    ASSERT_TRUE(job_->NextWake().has_value());
    ASSERT_LE(*job_->NextWake(), now_ + std::chrono::seconds(1));
    Pass(std::max(*job_->NextWake() - now_, Duration(0)));
  }

  RequestToken mine_ = 0;
  RequestToken theirs_ = 0;
  RequestToken loaded_ = 0;
  SourceOffered offer_;
};

TEST_F(SourceWaitTest, ItIsTriedAgainUntilItCanBeRead) {
  for (int i = 0; i < 5; ++i) {
    CannotRead();
    EXPECT_EQ(Offer(), nullptr);
    PassToWake();
    ASSERT_NE(Offer(), nullptr);
    EXPECT_EQ(Offer()->peers, std::vector<std::string>{"b"});
    EXPECT_EQ(Answer<Refused>(theirs_), nullptr);
    out_.clear();
  }
  Say(c_, LoadReported{theirs_, 2, 1, offer_.session, 1, true, false, false, ""});
  ASSERT_NE(Answer<SessionEnded>(theirs_), nullptr);
  EXPECT_EQ(Answer<SessionEnded>(theirs_)->checkpoint, (CheckpointId{1, 1}));
  ASSERT_NE(Answer<SessionEnded>(loaded_), nullptr);
}

TEST_F(SourceWaitTest, NotForEver) {
  const MonotonicTime began = now_;
  while (Answer<Refused>(theirs_) == nullptr && now_ < began + std::chrono::minutes(1)) {
    out_.clear();
    CannotRead();
    if (Answer<Refused>(theirs_) == nullptr) {
      PassToWake();
    }
  }
  EXPECT_GE(now_, began + std::chrono::seconds(10));
  EXPECT_LE(now_, began + std::chrono::seconds(11));
  for (const RequestToken token : {theirs_, loaded_}) {
    ASSERT_NE(Answer<Refused>(token), nullptr);
    EXPECT_EQ(Answer<Refused>(token)->failure.code, absl::StatusCode::kUnavailable);
    EXPECT_TRUE(absl::StrContains(Answer<Refused>(token)->failure.message, "was started anew"));
  }
  EXPECT_FALSE(job_->NextWake().has_value() && *job_->NextWake() < now_ + std::chrono::seconds(1));
}

// It was started anew: for a moment nothing is known of it.
TEST_F(SourceWaitTest, ANodeThatIsGoneAndBackIsReadAgain) {
  CannotRead();
  Say(b_, NodeLeft{true, "its lease has ended"});
  Pass(std::chrono::seconds(2));
  EXPECT_EQ(Offer(), nullptr);
  EXPECT_EQ(Answer<Refused>(theirs_), nullptr);
  NodeArrived back;
  back.shards = {Found(1, 1)};
  Say(b_, back);
  Pass(std::chrono::milliseconds(500));
  ASSERT_NE(Offer(), nullptr);
  EXPECT_EQ(Offer()->peers, std::vector<std::string>{"b"});
}

TEST_F(SourceWaitTest, ANodeThatDoesNotComeBackEndsIt) {
  CannotRead();
  Say(b_, NodeLeft{true, "its lease has ended"});
  for (int i = 0; i < 22 && Answer<Refused>(theirs_) == nullptr; ++i) {
    Pass(std::chrono::milliseconds(500));
  }
  ASSERT_NE(Answer<Refused>(theirs_), nullptr);
  EXPECT_EQ(Answer<Refused>(theirs_)->failure.code, absl::StatusCode::kUnavailable);
  EXPECT_NE(Answer<Refused>(loaded_), nullptr);
}

TEST_F(SourceWaitTest, WhatItsNodeDoesNotGetOverIsNotWaitedFor) {
  CannotRead(absl::ResourceExhaustedError("no room"));
  ASSERT_NE(Answer<Refused>(theirs_), nullptr);
}

TEST_F(SourceWaitTest, WhoEntersAgainWaitsAnew) {
  CannotRead();
  const RequestToken again = Enter(c_, 1, 1);
  ASSERT_NE(Answer<Refused>(theirs_), nullptr);
  EXPECT_EQ(Answer<Refused>(theirs_)->failure.code, absl::StatusCode::kAborted);
  EXPECT_NE(Answer<SourceOffered>(again), nullptr);
}

TEST_F(SourceWaitTest, WhenTheRestoreEndsItHears) {
  CannotRead();
  SessionAsked other;
  other.token = ++token_;
  other.attempt = 2;
  other.rank = 0;
  other.process = Process(kHere, 0, 1);
  other.may_wait = true;
  other.wanted = {CheckpointId{1, 7}};
  Say(kHere, other);
  ASSERT_NE(Answer<Refused>(theirs_), nullptr);
  EXPECT_EQ(Offer(), nullptr);
  EXPECT_FALSE(job_->NextWake().has_value() && *job_->NextWake() < now_ + std::chrono::seconds(1));
}

// The step lies nowhere else: all ranks get the one before.
TEST_F(NodesTest, ACopyThatIsNotInMemoryAfterAllEndsNoSession) {
  TwoRanks();
  SaveBoth(1);
  Flush(1);
  SaveBoth(2);
  StartBothAnew();
  Enter(kHere, 0, 1);
  const RequestToken theirs = Enter(b_, 1, 1);
  const SourceOffered first = *Answer<SourceOffered>(theirs);
  ASSERT_EQ(first.checkpoint, (CheckpointId{1, 2}));
  const RequestToken loaded = ++token_;
  Say(kHere, LoadReported{loaded, 2, 0, first.session, first.round, true, false, false, ""});
  Say(b_, FetchFailed{theirs,
                      2,
                      1,
                      first.session,
                      first.round,
                      {1, 2},
                      TierKind::kMemory,
                      absl::NotFoundError("its copy is gone"),
                      false});
  for (const RequestToken token : {loaded, theirs}) {
    EXPECT_EQ(Answer<Refused>(token), nullptr);
    ASSERT_NE(Answer<SourceOffered>(token), nullptr);
    EXPECT_EQ(Answer<SourceOffered>(token)->checkpoint, (CheckpointId{1, 1}));
  }
}

// Its other half comes back when all have restored the step before, and before that is agreed on:
// another host may still decide for it.
TEST_F(NodesTest, WhatTurnsOutToBeWholeBeforeADecisionIsDurableStays) {
  settings_.policy.mutable_nvme()->set_keep_last(2);
  settings_.policy.mutable_remote()->set_every_steps(2);
  MakeCoordinator();
  job_->SetOpenedHere();
  for (const NodeId node : {kHere, b_, c_}) {
    Say(node, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
  }
  Say(kHere, InventoryState{TierKind::kRemote, InventoryState::Kind::kKnown, ""});
  TwoRanks();
  SaveBoth(1);
  Drained(kHere, 0, 1, TierKind::kNvme, TierKind::kMemory);
  Drained(b_, 1, 1, TierKind::kNvme, TierKind::kMemory);
  SaveBoth(2);
  Flush(2);
  SaveBoth(3);
  Drained(kHere, 0, 3, TierKind::kNvme, TierKind::kMemory);
  Say(kHere, SeatLost{1, 0, Process(kHere, 0), 0, SeatLost::How::kProcessEnded});
  Say(b_, NodeLeft{true, "its lease has ended"});
  Join(kHere, 0, 2, "two", 1);
  Join(c_, 1, 2, "two", 1);
  Enter(kHere, 0, 1);
  Enter(c_, 1, 1);
  ASSERT_NE(Answer<SourceOffered>(token_), nullptr);
  const SourceOffered offered = *Answer<SourceOffered>(token_);
  ASSERT_EQ(offered.checkpoint, (CheckpointId{1, 2}));
  out_.clear();
  agrees_ = false;
  Say(kHere, LoadReported{++token_, 2, 0, offered.session, offered.round, true, false, false, ""});
  Say(c_, LoadReported{++token_, 2, 1, offered.session, offered.round, true, false, false, ""});
  ASSERT_EQ(Answer<SessionEnded>(token_), nullptr);
  Say(b_, NodeArrived{});
  Say(b_, FoundOnNvme({{1, 1}, {1, 2}, {1, 3}}));
  Say(b_, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
  ASSERT_TRUE(Committed(3));
  Say(kHere, CollectGarbageAsked{});
  const auto goes = [&] {
    const auto removals = All<RemovalWanted>();
    return std::any_of(removals.begin(), removals.end(), [](const auto& removal) {
      return removal.second.checkpoint == CheckpointId{1, 3};
    });
  };
  EXPECT_FALSE(goes());
  agrees_ = true;
  Say(kHere, StateWritten{written_.version(), absl::OkStatus()});
  EXPECT_NE(Answer<SessionEnded>(token_), nullptr);
  EXPECT_FALSE(goes()) << "of a branch that is left now, and nothing is later than it";
}

TEST_F(NodesTest, AProcessThatWasReplacedAbandonsNoStep) {
  TwoRanks();
  Say(b_, NodeLeft{true, "its lease has ended"});
  ASSERT_NE(Answer<JoinAccepted>(Join(c_, 1, 2)), nullptr);
  NodeArrived zombie;
  zombie.seats = {Seat(b_, 1, std::nullopt)};
  Say(b_, zombie);
  Save(kHere, 0, 1);
  Begin(c_, 1, 1);
  Say(b_, SaveLost{1, 1, 1, "gone"});
  Seal(c_, 1, 1);
  EXPECT_TRUE(Committed(1));
}

TEST_F(NodesTest, ARankThatLivesOnIsThereAgainWhenItsNodeIsBackAndNobodyTookItsPlace) {
  TwoRanks();
  SaveBoth(1);
  Say(b_, NodeLeft{true, "its lease has ended"});
  NodeArrived back;
  back.shards = {Found(1, 1)};
  back.seats = {Seat(b_, 1, 1)};
  Say(b_, back);
  EXPECT_TRUE(job_->IsMember(1, Process(b_, 1)));
  SaveBoth(2);
  EXPECT_TRUE(Committed(2));
}

TEST_F(NodesTest, ABadCopyIsNotGoodAgainBecauseItsNodeTellsOfIt) {
  TwoRanks();
  SaveBoth(1);
  Say(b_, ShardBad{{1, 1}, 1, "its digests are wrong", TierKind::kMemory});
  EXPECT_FALSE(Committed(1));
  Say(b_, NodeLeft{false, "no answer"});
  NodeArrived back;
  back.shards = {Found(1, 1)};
  back.seats = {Seat(b_, 1, 1)};
  Say(b_, back);
  EXPECT_FALSE(Committed(1));
}

TEST_F(NodesTest, AnotherSaveOfTheSameNameDoesNotCount) {
  for (const std::string other : {"size", "time", "digests"}) {
    SCOPED_TRACE(other);
    settings_.nvme = settings_.remote = false;
    MakeCoordinator();
    job_->SetOpenedHere();
    TwoRanks();
    SaveBoth(1);
    MemoryCopyGained told{{1, 1}, 1};
    told.likeness.content[0] = 1;
    Say(b_, told);
    Say(b_, NodeLeft{false, "no answer"});
    NodeArrived back;
    back.shards = {Found(1, 1)};
    SealedCopy& copy = back.shards[0].copy;
    copy.image_bytes += other == "size" ? 1 : 0;
    copy.sealed_unix_ms += other == "time" ? 1 : 0;
    copy.likeness = told.likeness;
    copy.likeness.content[0] += other == "digests" ? 1 : 0;
    back.seats = {Seat(b_, 1, 1)};
    Say(b_, back);
    EXPECT_FALSE(Committed(1));
  }
}

TEST_F(NodesTest, ACoordinatorWhoseStateIsOlderThanANodesGivesWay) {
  TwoRanks();
  SaveBoth(1);
  Enter(kHere, 0, 0);
  out_.clear();
  NodeArrived newer;
  newer.shards = {Found(1, 5)};
  newer.shards[0].copy.id.attempt = 3;
  newer.shards[0].copy.descent = {{3, {1, 1}}, {1, {}}};
  newer.seats = {{3, 1, Process(b_, 1, 1), 7, {}, 5}};
  Say(b_, newer);
  EXPECT_EQ(job_->attempt(), 3u);
  EXPECT_FALSE(job_->IsMember(0, Process(kHere, 0)));
  EXPECT_TRUE(job_->IsMember(1, Process(b_, 1, 1)));
  const auto superseded = All<Superseded>();
  ASSERT_EQ(superseded.size(), 1u);
  EXPECT_EQ(superseded[0].first, kEveryNode);
  EXPECT_EQ(superseded[0].second.by, 3u);
}

TEST_F(NodesTest, TheNumberOfAnAttemptThatANodeHasSeatsOfIsNotGivenAgain) {
  TwoRanks();
  NodeArrived newer;
  newer.seats = {{5, 1, Process(c_, 1, 1), 7, {}, std::nullopt}};
  Say(c_, newer);
  EXPECT_EQ(job_->RanksAlive(), 0u);  // which of the two is the newest is not known here
  bool told = false;
  for (const auto& [node, superseded] : All<Superseded>()) {
    told = told || superseded.by > 5;
  }
  EXPECT_TRUE(told);
  Join(kHere, 0, 2, "two", 1);
  EXPECT_EQ(job_->attempt(), 6u);
}

// ---- Sessions ----

TEST_F(NodesTest, ASessionThatFallsBackWaitsForANodeThatMayComeBack) {
  TwoRanks();
  SaveBoth(1);
  Flush(1);
  SaveBoth(2);
  SaveBoth(3);
  StartBothAnew();
  Enter(kHere, 0, 1);
  Enter(b_, 1, 1);
  ASSERT_EQ(Answer<SourceOffered>(token_)->checkpoint, (CheckpointId{1, 3}));
  Say(b_, NodeLeft{false, "no answer"});
  LoadReported bad{++token_, 2, 0, 1, 1, false, true, false, "a digest is wrong"};
  Say(kHere, bad);
  EXPECT_EQ(Answer<SourceOffered>(bad.token), nullptr);  // not step 1: 2 may be whole again
  EXPECT_EQ(Answer<Refused>(bad.token), nullptr);
  NodeArrived back;
  back.shards = {Found(1, 1), Found(1, 2), Found(1, 3)};
  back.seats = {{2, 1, Process(b_, 1, 1), 7, {}, std::nullopt}};
  Say(b_, back);
  Say(b_, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
  ASSERT_NE(Answer<SourceOffered>(bad.token), nullptr);
  EXPECT_EQ(Answer<SourceOffered>(bad.token)->checkpoint, (CheckpointId{1, 2}));
}

// ---- What a new host does not know ----

// The node that hosted the job is gone and was never heard. Of an attempt that was opened since it
// has nothing: what that lacks is not out of reach.
TEST_F(NodesTest, AStepOfANewAttemptIsNotCutOffByANodeThatWasNeverHeard) {
  TwoRanks();
  NodeNames nodes("c");
  TakeOver(nodes, false);
  const NodeId b = nodes.Number("b");
  Say(b, NodeArrived{{}, {Seat(b, 1, std::nullopt)}});
  Say(nodes.Number("a"), NodeLeft{true, "its lease has ended"});
  Join(kHere, 0, 2, "two", 1);
  Join(b, 1, 2, "two", 1);
  ASSERT_EQ(job_->attempt(), 2u);
  Save(kHere, 0, 5);
  out_.clear();
  Say(b, SeatLost{2, 1, Process(b, 1, 1), 0, SeatLost::How::kProcessEnded});
  const auto given_up = All<GiveUp>();
  ASSERT_EQ(given_up.size(), 1u);
  EXPECT_EQ(given_up[0].second.checkpoint, (CheckpointId{2, 5}));
}

// Attempt 2 has restored step 1, and another node hosts it by now.
class DecidedElsewhereTest : public NodesTest {
 protected:
  DecidedElsewhereTest() {
    TwoRanks();
    SaveBoth(1);
    StartBothAnew();
    Enter(kHere, 0, 1);
    Enter(b_, 1, 1);
    const uint64_t session = Answer<SourceOffered>(token_)->session;
    Say(kHere, LoadReported{++token_, 2, 0, session, 1, true, false, false, ""});
    Say(b_, LoadReported{++token_, 2, 1, session, 1, true, false, false, ""});
    EXPECT_NE(Answer<SessionEnded>(token_), nullptr);
    TakeOver(elsewhere_, false);
  }
  void Arrive(const std::vector<FoundShard>& shards) {
    NodeArrived arrived;
    arrived.shards = shards;
    arrived.seats = {{2, 1, Process(other_, 1, 1), 7, {}, std::nullopt}};
    Say(other_, arrived);
  }

  NodeNames elsewhere_{"c"};
  const NodeId other_ = elsewhere_.Number("b");
};

TEST_F(DecidedElsewhereTest, ARankThatEntersAgainGetsItsOwnShardWhoeverIsSilent) {
  Arrive({Found(1, 1)});
  const SourceOffered* offered = Answer<SourceOffered>(Enter(other_, 1, 1));
  ASSERT_NE(offered, nullptr);
  EXPECT_EQ(offered->checkpoint, (CheckpointId{1, 1}));
  EXPECT_EQ(offered->from, TierKind::kMemory);
}

TEST_F(DecidedElsewhereTest, WhatANodeMayHaveThatIsSilentIsNotCalledUnreadable) {
  Arrive({});
  const Refused* refused = Answer<Refused>(Enter(other_, 1, 1));
  ASSERT_NE(refused, nullptr);
  EXPECT_EQ(refused->failure.code, absl::StatusCode::kUnavailable) << refused->failure.message;
  EXPECT_THAT(refused->failure.message, ::testing::HasSubstr(": a;"));
}

// Its state was older than what a node has: the attempt that goes on may have ranks on a node that
// is silent.
TEST_F(NodesTest, OfAnAttemptThatANodeToldOfASilentNodeMayHaveRanks) {
  TwoRanks();
  NodeNames nodes("c");
  TakeOver(nodes, false);
  const NodeId b = nodes.Number("b");
  NodeArrived newer;
  newer.shards = {Found(1, 5)};
  newer.shards[0].copy.id.attempt = 3;
  newer.shards[0].copy.descent = {{3, {}}};
  newer.seats = {{3, 1, Process(b, 1, 1), 7, {}, 5}};
  Say(b, newer);
  ASSERT_EQ(job_->attempt(), 3u);
  const Refused* refused = Answer<Refused>(Join(kHere, 0, 2, "", 1));
  ASSERT_NE(refused, nullptr);
  EXPECT_THAT(refused->failure.message, ::testing::HasSubstr("may live on a"));
}

TEST_F(NodesTest, ATokenThatIsSaidTwiceIsAnsweredForTheLastOne) {
  TwoRanks();
  Begin(kHere, 0, 1);
  Begin(b_, 1, 1);
  Begin(kHere, 0, 2);
  Begin(b_, 1, 2);
  const RequestToken token = Await(0, 1, v1::AwaitSave::STAGE_COMMITTED);
  Say(kHere, AwaitAsked{token, 1, 0, 2, v1::AwaitSave::STAGE_COMMITTED});
  Seal(kHere, 0, 1);
  Seal(b_, 1, 1);
  ASSERT_TRUE(Committed(1));
  EXPECT_EQ(Answer<StageReached>(token), nullptr);
  Seal(kHere, 0, 2);
  Seal(b_, 1, 2);
  EXPECT_NE(Answer<StageReached>(token), nullptr);
}

// ---- Nodes that come and go at any time ----

// ---- Found by the simulator of a cluster ----

// A step that has its turn to commit, and is cut off then, does not have it still when it is back:
// another one has by then.
TEST_F(NodesTest, AStepThatIsCutOffIsNotProtectedAnyMore) {
  TwoRanks();
  SaveBoth(1);
  NodeNames nodes("c");
  const NodeId a = nodes.Number("a");
  const NodeId b = nodes.Number("b");
  TakeOver(nodes, false);
  NodeArrived first;
  first.shards = {Found(0, 1)};
  first.seats = {Seat(a, 0, 1)};
  Say(a, first);
  const auto make_room = [&](Step shed, Step for_step) {
    Begin(a, 0, shed);
    Begin(a, 0, for_step);
    Say(a, RoomAsked{++token_, 1, 0, for_step, {{1, shed}}});
    const RoomAnswered* room = Answer<RoomAnswered>(token_);
    EXPECT_TRUE(room != nullptr && room->made);
  };
  make_room(2, 3);
  Seal(a, 0, 3);  // the other rank's node may have the rest: nobody has heard of it yet
  make_room(4, 5);
  NodeArrived second;
  second.shards = {Found(1, 1)};
  second.seats = {Seat(b, 1, 1)};
  Say(b, second);  // its invariants are checked
  EXPECT_TRUE(Committed(1));
}

// The step that comes next may be cut off already, when it is protected.
TEST_F(NodesTest, OneStepIsProtectedAtATimeAlsoIfThatIsCutOff) {
  Join(kHere, 0, 3);
  Join(kHere, 1, 3);
  Join(b_, 2, 3);
  for (const auto& [node, rank] : {std::pair(kHere, 0u), std::pair(kHere, 1u), std::pair(b_, 2u)}) {
    Save(node, rank, 1);
  }
  ASSERT_TRUE(Committed(1));
  NodeNames nodes("c");
  const NodeId a = nodes.Number("a");
  nodes.Number("b");
  TakeOver(nodes, false);
  NodeArrived first;
  for (const Rank rank : {0u, 1u}) {
    FoundShard found = Found(rank, 1);
    found.copy.world_size = 3;
    first.shards.push_back(found);
    first.seats.push_back(Seat(a, rank, 1));
  }
  Say(a, first);
  const auto make_room = [&](Rank rank, Step shed, Step for_step) {
    Say(a, RoomAsked{++token_, 1, rank, for_step, {{1, shed}}});
    const RoomAnswered* room = Answer<RoomAnswered>(token_);
    EXPECT_TRUE(room != nullptr && room->made) << for_step;
  };
  Begin(a, 0, 2);
  Begin(a, 1, 2);
  Save(a, 0, 3);  // the third rank may have sealed it, for all that is known
  Begin(a, 1, 3);
  make_room(1, 2, 3);
  Begin(a, 0, 4);
  Begin(a, 0, 5);
  make_room(0, 4, 5);  // its invariants are checked
}

// The node whose drives were the last that had to be read is gone: what is incomplete goes now.
TEST_F(NodesTest, WhatIsIncompleteGoesWhenTheLastNodeThatHadToTellIsGone) {
  TwoRanks();
  Save(kHere, 0, 1);
  NodeArrived again;
  again.seats = {Seat(b_, 1, std::nullopt)};
  Say(b_, again);  // its drives are read anew
  Join(kHere, 0, 2, "two", 1);
  ASSERT_EQ(job_->attempt(), 2u);
  out_.clear();
  Say(b_, NodeLeft{true, "its lease has ended"});
  const auto given_up = All<GiveUp>();
  ASSERT_EQ(given_up.size(), 1u);
  EXPECT_EQ(given_up[0].second.checkpoint, (CheckpointId{1, 1}));
}

// Ranks went back behind a step that was cut off with a lost node: its memory is free.
TEST_F(NodesTest, AStepThatIsCutOffOnADiscardedBranchMakesRoom) {
  TwoRanks();
  SaveBoth(1);
  Flush(1);
  SaveBoth(2);
  Say(b_, NodeLeft{true, "its lease has ended"});
  Say(kHere, SeatLost{1, 0, Process(kHere, 0), 0, SeatLost::How::kProcessEnded});
  Join(kHere, 0, 2, "two", 1);
  Join(c_, 1, 2, "two", 1);
  const std::vector<RequestToken> entered = {Enter(kHere, 0, 1), Enter(c_, 1, 1)};
  for (const Rank rank : {0u, 1u}) {
    const SourceOffered* offered = Answer<SourceOffered>(entered[rank]);
    ASSERT_NE(offered, nullptr);
    ASSERT_EQ(offered->checkpoint, (CheckpointId{1, 1}));
    LoadReported loaded{++token_, 2, rank, offered->session, offered->round};
    loaded.loaded = true;
    Say(rank == 0 ? kHere : c_, loaded);
  }
  ASSERT_NE(Answer<SessionEnded>(token_), nullptr);
  Begin(kHere, 0, 2);
  Say(kHere, RoomAsked{++token_, 2, 0, 2, {{1, 2}}});
  const RoomAnswered* room = Answer<RoomAnswered>(token_);
  ASSERT_NE(room, nullptr);
  EXPECT_TRUE(room->made);
}

// A restore gets the memory that a save would get.
TEST_F(NodesTest, ARestoreGetsTheMemoryOfAnOlderCommittedStep) {
  TwoRanks();
  SaveBoth(1);
  SaveBoth(2);
  Say(kHere, FetchRoomAsked{++token_, {1, 7}, {{1, 1}, {1, 2}}});
  const RoomAnswered* room = Answer<RoomAnswered>(token_);
  ASSERT_NE(room, nullptr);
  EXPECT_TRUE(room->made);
  EXPECT_FALSE(Committed(1));
  EXPECT_TRUE(Committed(2));
  Say(kHere, FetchRoomAsked{++token_, {1, 7}, {{1, 2}}});
  room = Answer<RoomAnswered>(token_);
  ASSERT_NE(room, nullptr);
  EXPECT_FALSE(room->made);  // the newest one is what there is
}

// The rank comes back to where older steps, each whole in memory alone, have all of its slots: the
// oldest of what the restore could fall back to goes, for otherwise it never gets anywhere; one
// stays.
TEST_F(NodesTest, ARestoreGetsTheMemoryOfTheOldestStepThatItCouldFallBackTo) {
  TwoRanks();
  for (const Step step : {1, 2, 3, 4}) {
    SaveBoth(step);
  }
  Flush(4);
  StartBothAnew();
  Enter(kHere, 0, 1);
  const SourceOffered* offered = Answer<SourceOffered>(Enter(b_, 1, 1));
  ASSERT_NE(offered, nullptr);
  ASSERT_EQ(offered->checkpoint, (CheckpointId{1, 4}));
  out_.clear();
  const auto room = [&](std::vector<CheckpointId> useful) {
    Say(b_, FetchRoomAsked{++token_, {1, 4}, std::move(useful)});
    return Answer<RoomAnswered>(token_)->made;
  };
  EXPECT_TRUE(room({{1, 1}, {1, 2}, {1, 3}}));
  EXPECT_FALSE(Committed(1));
  EXPECT_TRUE(Committed(2));
  EXPECT_TRUE(room({{1, 2}, {1, 3}}));
  EXPECT_FALSE(Committed(2));
  EXPECT_FALSE(room({{1, 3}})) << "if step 4 turns out to be bad, this is what is left";
  EXPECT_TRUE(Committed(3));
  EXPECT_TRUE(Committed(4));
}

// Three ranks on three nodes of which two are cut off now and then, and what really lies where.
class RandomNodesTest : public NodesTest {
 protected:
  using Shard = std::pair<Step, Rank>;
  struct Node {
    bool there = true;
    std::set<Shard> memory;
    std::set<Shard> nvme;
    std::set<Step> writing;
    Step last = 0;
    std::vector<ToAgent> todo;
  };

  uint32_t Below(uint32_t n) { return static_cast<uint32_t>(random_() % n); }

  void Hear() {
    std::vector<ForAgent> heard;
    std::swap(heard, out_);
    for (const ForAgent& each : heard) {
      for (NodeId node = 0; node < world_.size(); ++node) {
        if (world_[node].there && (each.to == node || each.to == kEveryNode)) {
          HearOn(world_[node], each.message);
        }
      }
    }
  }
  void HearOn(Node& node, const ToAgent& message) {
    if (const auto* given_up = std::get_if<GiveUp>(&message)) {
      const Step step = given_up->checkpoint.step;
      std::erase_if(node.memory, [step](const Shard& shard) { return shard.first == step; });
      node.writing.erase(step);
    } else if (std::holds_alternative<FlushWanted>(message) ||
               std::holds_alternative<RemovalWanted>(message) ||
               std::holds_alternative<ManifestWanted>(message)) {
      node.todo.push_back(message);
    }
  }
  void Tell(NodeId node, const ToCoordinator& message) {
    if (world_[node].there) {
      Say(node, message);
      Hear();
    }
  }
  void DoSomething(NodeId id, bool well) {
    Node& node = world_[id];
    if (node.todo.empty()) {
      return;
    }
    const ToAgent task = node.todo.front();
    node.todo.erase(node.todo.begin());
    if (const auto* flush = std::get_if<FlushWanted>(&task)) {
      for (const FlushWanted::Shard& each : flush->shards) {
        const Shard shard{flush->checkpoint.step, each.rank};
        const auto& from = each.from == TierKind::kMemory ? node.memory : node.nvme;
        const bool done = from.count(shard) > 0 && (well || Below(4) > 0);
        if (done) {
          (flush->to == TierKind::kNvme ? node.nvme : remote_).insert(shard);
        }
        ShardDrained drained{flush->checkpoint,
                             each.rank,
                             flush->to,
                             each.from,
                             done ? absl::OkStatus() : absl::UnavailableError("EIO"),
                             false,
                             {}};
        Tell(id, drained);
      }
    } else if (const auto* removal = std::get_if<RemovalWanted>(&task)) {
      const bool done = well || Below(4) > 0;
      if (done) {
        std::erase_if(removal->tier == TierKind::kNvme ? node.nvme : remote_,
                      [&](const Shard& s) { return s.first == removal->checkpoint.step; });
        if (removal->tier == TierKind::kRemote) {
          manifests_.erase(removal->checkpoint.step);
        }
      }
      Tell(id, RemovalDone{removal->checkpoint, removal->tier,
                           done ? absl::OkStatus() : absl::UnavailableError("EIO"), std::nullopt});
    } else if (const auto* manifest = std::get_if<ManifestWanted>(&task)) {
      manifests_.insert(manifest->checkpoint.step);
      Tell(id, ManifestDone{manifest->checkpoint, absl::OkStatus()});
    }
  }
  void BeginOn(NodeId id, Step step) {
    Node& node = world_[id];
    if (!node.there || node.last >= step || !node.writing.empty()) {
      return;
    }
    const RequestToken token = ++token_;
    Say(id, SaveAsked{token, 1, id, step});
    if (Answer<SavePermitted>(token) != nullptr) {
      node.writing.insert(step);
      node.last = step;
    } else if (Answer<Refused>(token) != nullptr) {
      node.last = step;
    }
    Hear();
  }
  void SealOn(NodeId id) {
    Node& node = world_[id];
    if (!node.writing.empty()) {
      const Step step = *node.writing.begin();
      node.writing.erase(step);
      node.memory.insert({step, id});
      Tell(id, ShardSealed{1, id, step, 3, kBytes, 1000});
    }
  }
  void LeaveOn(NodeId id) {
    if (world_[id].there) {
      Say(id, NodeLeft{Below(2) == 0, "no answer"});
      world_[id].there = false;
      Hear();
    }
  }
  void ArriveOn(NodeId id) {
    Node& node = world_[id];
    node.there = true;
    node.todo.clear();  // it is asked again
    NodeArrived arrived;
    for (const auto& [step, rank] : node.memory) {
      arrived.shards.push_back(Three(rank, step));
    }
    arrived.seats = {Seat(id, id, node.last)};
    arrived.seats[0].writing = node.writing;
    Tell(id, arrived);
    now_ = now_ + std::chrono::milliseconds(1);
    CopiesFound found;
    found.tier = TierKind::kNvme;
    found.began = now_;
    for (const auto& [step, rank] : node.nvme) {
      DurableCopy copy;
      copy.copy = Three(rank, step).copy;
      found.copies.push_back(copy);
    }
    Tell(id, found);
    Tell(id, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
  }
  FoundShard Three(Rank rank, Step step) const {
    FoundShard found = Found(rank, step);
    found.copy.world_size = 3;
    return found;
  }
  // Whether each shard lies somewhere; `reachable`: where it can be read now.
  bool Whole(Step step, bool reachable) const {
    for (Rank rank = 0; rank < 3; ++rank) {
      const Shard shard{step, rank};
      bool any = manifests_.count(step) > 0 && remote_.count(shard) > 0;
      for (const Node& node : world_) {
        any = any || ((node.there || !reachable) &&
                      (node.memory.count(shard) > 0 || node.nvme.count(shard) > 0));
      }
      if (!any) {
        return false;
      }
    }
    return true;
  }
  void Check(Step newest) {
    for (Step step = 1; step <= newest; ++step) {
      if (Committed(step)) {
        EXPECT_TRUE(Whole(step, true)) << step;
        highest_ = std::max(highest_, step);
      }
    }
    if (highest_ > 0) {
      EXPECT_TRUE(Whole(highest_, false)) << "the newest committed step " << highest_ << " is lost";
    }
  }

  std::mt19937 random_;
  std::vector<Node> world_ = std::vector<Node>(3);
  std::set<Shard> remote_;
  std::set<Step> manifests_;
  Step highest_ = 0;
};

TEST_F(RandomNodesTest, TheNewestCommittedStepIsNeverLostAndAllGoesOnWhenTheyAreBack) {
  settings_.keep_committed = 1;
  for (uint32_t seed = 1; seed <= 60 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    random_.seed(seed);
    world_.assign(3, Node());
    remote_.clear();
    manifests_.clear();
    highest_ = 0;
    MakeCoordinator();
    job_->SetOpenedHere();
    Say(kHere, InventoryState{TierKind::kRemote, InventoryState::Kind::kKnown, ""});
    for (NodeId node = 0; node < 3; ++node) {
      Say(node, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
      Join(node, node, 3);
    }
    out_.clear();
    Step step = 1;
    for (int i = 0; i < 400 && !HasFailure(); ++i) {
      const NodeId node = Below(3);
      switch (Below(9)) {
        case 0:
        case 1:
          step += Below(4) == 0 ? 1 : 0;
          BeginOn(node, step);
          break;
        case 2:
        case 3:
          SealOn(node);
          break;
        case 4:
        case 5:
          if (world_[node].there || Below(2) == 0) {
            DoSomething(node, false);
          }
          break;
        case 6:
          if (node != kHere && Below(3) == 0) {
            LeaveOn(node);
          }
          break;
        case 7:
          if (node != kHere && (!world_[node].there || Below(8) == 0)) {
            ArriveOn(node);
          }
          break;
        default:
          now_ = now_ + std::chrono::seconds(Below(20));
          Tell(kHere, WakeUp{});
      }
      Check(step);
    }
    for (NodeId node = 1; node < 3; ++node) {
      ArriveOn(node);
    }
    for (int round = 0; round < 6; ++round) {
      ++step;
      for (NodeId node = 0; node < 3; ++node) {
        SealOn(node);
        BeginOn(node, step);
        SealOn(node);
      }
      for (int i = 0; i < 60; ++i) {
        now_ = now_ + kDrainRetryMax;
        Tell(kHere, WakeUp{});
        for (NodeId node = 0; node < 3; ++node) {
          DoSomething(node, true);
        }
      }
      Check(step);
    }
    EXPECT_TRUE(Committed(step));
    EXPECT_TRUE(job_->IsCommittedIn(TierKind::kNvme, {1, step}));
    EXPECT_TRUE(job_->IsCommittedIn(TierKind::kRemote, {1, step}));
    v1::WhereReply where;
    job_->FillWhere(std::nullopt, where);
    for (const v1::ShardCopy& copy : where.copies()) {
      EXPECT_NE(copy.state(), "out of reach");
    }
  }
}

// ---- Replicas: who shares what is written to remote ----

class ReplicasOnNodesTest : public NodesTest {
 protected:
  // Four ranks, two a node; straight to remote.
  void SetUp() override {
    settings_.nvme = false;
    settings_.policy.mutable_remote()->set_share_replicas(true);
    Restart();
    for (Rank rank = 0; rank < 4; ++rank) {
      Join(NodeOf(rank), rank, 4);
    }
    out_.clear();
  }
  void Restart() {
    MakeCoordinator();
    job_->SetOpenedHere();
    Say(kHere, InventoryState{TierKind::kRemote, InventoryState::Kind::kKnown, ""});
  }
  NodeId NodeOf(Rank rank) const { return rank < 2 ? kHere : b_; }
  static Likeness Like(uint8_t tensors, uint8_t content) {
    Likeness likeness;
    likeness.tensors.fill(tensors);
    likeness.content.fill(content);
    return likeness;
  }
  void SaveAll(Step step, const std::vector<Likeness>& likeness) {
    for (Rank rank = 0; rank < 4; ++rank) {
      Begin(NodeOf(rank), rank, step);
    }
    for (Rank rank = 0; rank < 4; ++rank) {
      Say(NodeOf(rank), ShardSealed{1, rank, step, 4, kBytes, 1000, true, likeness[rank]});
    }
  }
  // By rank: with whom it was told to share.
  std::map<Rank, std::vector<Rank>> Groups() const {
    std::map<Rank, std::vector<Rank>> groups;
    for (const auto& [node, flush] : All<FlushWanted>()) {
      for (const FlushWanted::Shard& shard : flush.shards) {
        EXPECT_EQ(node, NodeOf(shard.rank));
        groups[shard.rank] = shard.group == 0
                                 ? std::vector<Rank>()
                                 : *RanksOf(flush.groups[shard.group - 1].ranks, flush.world_size);
      }
    }
    return groups;
  }
  LayoutHash Plan(const Likeness& likeness, std::vector<Rank> ranks) const {
    return PlanHash(likeness.content, ranks);
  }
  void Written(Rank rank, Step step, uint64_t file_bytes, const LayoutHash& plan) {
    ShardDrained drained{{1, step}, rank, TierKind::kRemote, TierKind::kMemory, absl::OkStatus(),
                         false,     {}};
    drained.copy.location = "/remote/x";
    drained.copy.file_bytes = file_bytes;
    drained.copy.plan = plan;
    Say(NodeOf(rank), drained);
  }
  std::vector<std::string> Divergences() const {
    std::vector<std::string> texts;
    for (const auto& [node, reported] : All<Reported>()) {
      if (reported.report.kind == Report::Kind::kReplicasDiverged) {
        texts.push_back(reported.report.text);
      }
    }
    return texts;
  }
};

TEST_F(ReplicasOnNodesTest, RanksThatAreAlikeAreToldSoWhateverTheirNodes) {
  SaveAll(1, {Like(1, 1), Like(2, 2), Like(1, 1), Like(2, 2)});
  EXPECT_EQ(Groups(), (std::map<Rank, std::vector<Rank>>{
                          {0, {0, 2}}, {1, {1, 3}}, {2, {0, 2}}, {3, {1, 3}}}));
  EXPECT_TRUE(Divergences().empty());
}

TEST_F(ReplicasOnNodesTest, APartOfAFlushNamesItsOwnGroups) {
  settings_.remote_writes_max = 1;
  Restart();
  for (Rank rank = 0; rank < 4; ++rank) {
    Join(NodeOf(rank), rank, 4);
  }
  out_.clear();
  const std::vector<Likeness> likeness = {Like(1, 1), Like(2, 2), Like(1, 1), Like(2, 2)};
  SaveAll(1, likeness);
  for (Rank rank = 0; rank < 4; ++rank) {
    const auto flushes = All<FlushWanted>();
    ASSERT_EQ(flushes.size(), 1u);
    const FlushWanted& flush = flushes[0].second;
    EXPECT_EQ(flush.groups.size(), 1u);
    EXPECT_TRUE(EncodePeer(PeerHeader{"job", job_->uuid(), 1}, ToAgent(flush)).ok());
    EXPECT_EQ(Groups(),
              (std::map<Rank, std::vector<Rank>>{
                  {rank, rank % 2 == 0 ? std::vector<Rank>{0, 2} : std::vector<Rank>{1, 3}}}));
    out_.clear();
    Written(
        rank, 1, 100,
        Plan(likeness[rank], rank % 2 == 0 ? std::vector<Rank>{0, 2} : std::vector<Rank>{1, 3}));
  }
}

TEST_F(ReplicasOnNodesTest, TheManifestTellsBothLengths) {
  const Likeness like = Like(1, 1);
  SaveAll(1, {like, like, like, Like(2, 2)});
  const LayoutHash plan = Plan(like, {0, 1, 2});
  Written(0, 1, 100, plan);
  Written(1, 1, 0, {});  // whole: it fits as well
  Written(2, 1, 300, plan);
  Written(3, 1, 0, {});
  const auto manifests = All<ManifestWanted>();
  ASSERT_EQ(manifests.size(), 1u);
  const std::vector<DurableCopy>& shards = manifests[0].second.shards;
  ASSERT_EQ(shards.size(), 4u);
  EXPECT_EQ(shards[0].file_bytes, 100u);
  EXPECT_EQ(shards[0].copy.image_bytes, kBytes);
  EXPECT_EQ(shards[1].file_bytes, 0u);
  EXPECT_EQ(shards[2].plan, plan);
  Say(kHere, ManifestDone{{1, 1}, absl::OkStatus()});
  EXPECT_TRUE(job_->IsCommittedIn(TierKind::kRemote, {1, 1}));
  EXPECT_EQ(job_->BytesAt(TierKind::kRemote), 100 + kBytes + 300 + kBytes);
  // Where it lies, and where the rest.
  v1::WhereReply where;
  job_->FillWhere(CheckpointId{1, 1}, where, Time());
  std::map<Rank, std::string> rest;
  for (const v1::ShardCopy& copy : where.copies()) {
    if (copy.tier() == "remote" && copy.shard_bytes() != 0) {
      rest[copy.rank()] = copy.rest_in();
      EXPECT_EQ(copy.shard_bytes(), kBytes);
      EXPECT_EQ(copy.bytes(), copy.rank() == 0 ? 100u : 300u);
    }
  }
  EXPECT_EQ(rest, (std::map<Rank, std::string>{{0, "ranks 1, 2"}, {2, "ranks 0, 1"}}));
}

// Nothing of it can be relied on: not even the ranks that fit together are committed.
TEST_F(ReplicasOnNodesTest, AFileOfAnotherPlanIsNeverCommitted) {
  const Likeness like = Like(1, 1);
  SaveAll(1, {like, like, like, like});
  const LayoutHash plan = Plan(like, {0, 1, 2, 3});
  Written(0, 1, 100, plan);
  Written(1, 1, 100, plan);
  Written(2, 1, 100, Plan(like, {0, 1, 2}));
  Written(3, 1, 100, plan);
  EXPECT_TRUE(All<ManifestWanted>().empty());
  EXPECT_FALSE(job_->IsCommittedIn(TierKind::kRemote, {1, 1}));
  EXPECT_TRUE(Committed(1)) << "in memory it is as it was";
}

TEST_F(ReplicasOnNodesTest, OneThatDivergedIsToldOnceAStepAndSharesNothing) {
  SaveAll(1, {Like(1, 1), Like(1, 9), Like(1, 1), Like(1, 1)});
  EXPECT_EQ(Groups(), (std::map<Rank, std::vector<Rank>>{
                          {0, {0, 2, 3}}, {1, {}}, {2, {0, 2, 3}}, {3, {0, 2, 3}}}));
  ASSERT_EQ(Divergences().size(), 1u);
  EXPECT_TRUE(absl::StrContains(Divergences()[0],
                                "rank 1 holds the same tensors as ranks 0, 2, 3 with other bytes"))
      << Divergences()[0];
  // A try that fails and is repeated says nothing new.
  ShardDrained failed{
      {1, 1}, 0, TierKind::kRemote, TierKind::kMemory, absl::UnavailableError("hiccup"), false, {}};
  Say(kHere, failed);
  for (const Rank rank : {1u, 2u, 3u}) {
    Written(rank, 1, 0, {});
  }
  out_.clear();
  now_ = now_ + std::chrono::minutes(2);
  Say(kHere, WakeUp{});
  EXPECT_EQ(Groups(), (std::map<Rank, std::vector<Rank>>{{0, {0, 2, 3}}}));
  EXPECT_TRUE(Divergences().empty());
  // explain names it.
  v1::ExplainRequest request;
  request.set_step(1);
  v1::ExplainReply reply;
  job_->FillExplain(request, Time(), reply);
  ASSERT_EQ(reply.steps_size(), 1);
  bool named = false;
  for (const std::string& reason : reply.steps(0).reasons()) {
    named = named || absl::StrContains(reason, "replicas have diverged: rank 1");
  }
  EXPECT_TRUE(named);
}

// As long as it is not known of all ranks what they hold, a later plan might be another.
TEST_F(ReplicasOnNodesTest, WhereOneIsNotKnownNothingIsShared) {
  SaveAll(1, {Like(1, 1), Like(1, 1), Like(1, 1), {}});
  EXPECT_EQ(Groups(), (std::map<Rank, std::vector<Rank>>{{0, {}}, {1, {}}, {2, {}}, {3, {}}}));
}

TEST_F(ReplicasOnNodesTest, AJobMayHaveEveryFileWhole) {
  settings_.policy.mutable_remote()->set_share_replicas(false);
  Restart();
  for (Rank rank = 0; rank < 4; ++rank) {
    Join(NodeOf(rank), rank, 4);
  }
  const Likeness like = Like(1, 1);
  SaveAll(1, {like, like, like, Like(1, 2)});
  EXPECT_EQ(Groups(), (std::map<Rank, std::vector<Rank>>{{0, {}}, {1, {}}, {2, {}}, {3, {}}}));
  EXPECT_TRUE(Divergences().empty());
}

// The node of rank 2 goes before its file is written. Nothing changes for the others: the step is
// whole when that rank's file is there, whoever wrote what before.
TEST_F(ReplicasOnNodesTest, AnOwnerThatGoesAndComesBackWritesItsPart) {
  const Likeness like = Like(1, 1);
  SaveAll(1, {like, like, like, like});
  const LayoutHash plan = Plan(like, {0, 1, 2, 3});
  Written(0, 1, 100, plan);
  Written(1, 1, 100, plan);
  Written(3, 1, 100, plan);
  Say(b_, NodeLeft{false, "its channel broke"});
  EXPECT_TRUE(All<ManifestWanted>().empty());
  out_.clear();
  NodeArrived back;
  for (const Rank rank : {2u, 3u}) {
    FoundShard found = Found(rank, 1);
    found.copy.world_size = 4;
    found.copy.likeness = like;
    back.shards.push_back(found);
    back.seats.push_back(Seat(b_, rank, 1));
  }
  Say(b_, back);
  now_ = now_ + std::chrono::minutes(2);
  Say(kHere, WakeUp{});
  EXPECT_EQ(Groups(), (std::map<Rank, std::vector<Rank>>{{2, {0, 1, 2, 3}}}));
  Written(2, 1, 100, plan);
  ASSERT_EQ(All<ManifestWanted>().size(), 1u);
  Say(kHere, ManifestDone{{1, 1}, absl::OkStatus()});
  EXPECT_TRUE(job_->IsCommittedIn(TierKind::kRemote, {1, 1}));
}

// All daemons were started anew when the files were written, and nothing of it is in memory.
TEST_F(ReplicasOnNodesTest, FilesThatWereFoundAreCommittedUnderTheSamePlan) {
  const Likeness like = Like(1, 1);
  SaveAll(1, {like, like, like, like});
  NodeNames nodes("a");
  now_ = now_ + kStateLaziness;
  Say(kHere, WakeUp{});
  settings_.nodes = &nodes;
  MakeCoordinator();
  ASSERT_TRUE(job_->Load(written_).ok());
  std::vector<ForAgent> out;
  job_->Resume({}, Time(), out);
  out_.clear();
  CopiesFound found;
  found.tier = TierKind::kRemote;
  found.began = now_;
  for (Rank rank = 0; rank < 4; ++rank) {
    DurableCopy copy;
    copy.copy = Found(rank, 1).copy;
    copy.copy.world_size = 4;
    copy.copy.likeness = like;
    copy.file_bytes = rank == 3 ? 0 : 100;
    copy.plan = rank == 3 ? LayoutHash{} : Plan(like, {0, 1, 2, 3});
    found.copies.push_back(copy);
  }
  Say(kHere, found);
  Say(kHere, InventoryState{TierKind::kRemote, InventoryState::Kind::kKnown, ""});
  const auto manifests = All<ManifestWanted>();
  ASSERT_EQ(manifests.size(), 1u);
  EXPECT_EQ(manifests[0].second.shards[0].file_bytes, 100u);
}

// Nine steps lie in remote without their manifests, which hang there, all but one; the ninth waits
// for its turn, and its files do not fit together. A restore does not wait for it any longer.
TEST_F(ReplicasOnNodesTest, ARestoreDoesNotWaitForAManifestThatIsNotToBe) {
  const Likeness like = Like(1, 1);
  SaveAll(1, {like, like, like, like});
  for (Rank rank = 0; rank < 4; ++rank) {
    Say(NodeOf(rank),
        SeatLost{1, rank, Process(NodeOf(rank), rank), 0, SeatLost::How::kProcessEnded});
  }
  for (Rank rank = 0; rank < 4; ++rank) {
    Join(NodeOf(rank), rank, 4, "two", 1);
  }
  NodeNames nodes("a");
  now_ = now_ + kStateLaziness;
  Say(kHere, WakeUp{});
  settings_.nodes = &nodes;
  MakeCoordinator();
  ASSERT_TRUE(job_->Load(written_).ok());
  std::vector<ForAgent> out;
  job_->Resume({}, Time(), out);
  NodeArrived arrived;
  for (const Rank rank : {2u, 3u}) {
    arrived.seats.push_back({2, rank, Process(b_, rank, 1), 7, {}, std::nullopt});
  }
  Say(b_, arrived);
  CopiesFound found;
  found.tier = TierKind::kRemote;
  found.began = now_;
  for (Step step = 1; step <= 9; ++step) {
    for (Rank rank = 0; rank < 4; ++rank) {
      DurableCopy copy;
      copy.copy = Found(rank, step).copy;
      copy.copy.world_size = 4;
      copy.copy.likeness = like;
      copy.file_bytes = 100;
      copy.plan = Plan(
          like, step < 9 || rank != 3 ? std::vector<Rank>{0, 1, 2, 3} : std::vector<Rank>{0, 1, 2});
      found.copies.push_back(copy);
    }
  }
  Say(kHere, found);
  Say(kHere, InventoryState{TierKind::kRemote, InventoryState::Kind::kKnown, ""});
  std::vector<RequestToken> entered;
  for (Rank rank = 0; rank < 4; ++rank) {
    entered.push_back(Enter(NodeOf(rank), rank, 1));
  }
  for (Step step = 1; step < 8; ++step) {
    Say(kHere, FlushStalled{{1, step}, TierKind::kRemote, true, "no answer"});
  }
  EXPECT_EQ(All<ManifestWanted>().size(), 8u);
  EXPECT_EQ(Answer<SourceOffered>(entered[0]), nullptr);
  Say(kHere, ManifestDone{{1, 8}, absl::OkStatus()});
  EXPECT_EQ(All<ManifestWanted>().size(), 8u);
  for (const RequestToken token : entered) {
    ASSERT_NE(Answer<SourceOffered>(token), nullptr);
    EXPECT_EQ(Answer<SourceOffered>(token)->checkpoint, (CheckpointId{1, 8}));
  }
}

// ---- Replicas: who relies on whose file ----

class BadOwnersTest : public ReplicasOnNodesTest {
 protected:
  static constexpr const char* kWithoutRank0 =
      "incomplete: what it leaves out may be in rank 0's copy, which is bad or gone";
  // Ranks 0 and 2 hold the same, and so do 1 and 3: each file leaves out what the other one has.
  const std::vector<Likeness> pairs_ = {Like(1, 1), Like(2, 2), Like(1, 1), Like(2, 2)};

  void SaveToRemote(Step step) {
    SaveAll(step, pairs_);
    for (Rank rank = 0; rank < 4; ++rank) {
      Written(rank, step, 100, PlanOf(rank));
    }
    Say(kHere, ManifestDone{{1, step}, absl::OkStatus()});
    ASSERT_TRUE(job_->IsCommittedIn(TierKind::kRemote, {1, step}));
  }
  LayoutHash PlanOf(Rank rank) const {
    return Plan(pairs_[rank], rank % 2 == 0 ? std::vector<Rank>{0, 2} : std::vector<Rank>{1, 3});
  }
  void FindBad(Rank rank, Step step) {
    Say(NodeOf(rank),
        ShardBad{{1, step}, rank, "its bytes at 77 contradict their digest", TierKind::kRemote});
  }
  // Ranks 2 and 3 are left with what remote has.
  void LoseNodeB() { Say(b_, NodeLeft{true, "its lease has ended"}); }
  // By kind of failure: the step that outlives it, 0 for none.
  std::vector<Step> Protection() const {
    v1::JobStatus status;
    job_->FillStatus(status, Time(), Coordinator::Detail::kOverview);
    std::vector<Step> steps;
    for (const v1::Protection& line : status.protection()) {
      steps.push_back(line.any() ? line.step() : 0);
    }
    return steps;
  }
  // What remote has of the step, by rank.
  std::map<Rank, std::string> Where(Step step) const {
    v1::WhereReply where;
    job_->FillWhere(CheckpointId{1, step}, where, Time());
    std::map<Rank, std::string> states;
    for (const v1::ShardCopy& copy : where.copies()) {
      if (copy.tier() == "remote") {
        states[copy.rank()] = copy.state();
      }
    }
    return states;
  }
  std::string Explained(Step step) const {
    v1::ExplainRequest request;
    request.set_step(step);
    v1::ExplainReply reply;
    job_->FillExplain(request, Time(), reply);
    std::string text = reply.next_restore();
    for (const std::string& reason : reply.steps(0).reasons()) {
      text += "\n" + reason;
    }
    return text;
  }
  // As a node tells it that has the step's shards of these ranks in memory.
  NodeArrived Arrival(const std::vector<Rank>& ranks, Step step) const {
    NodeArrived arrived;
    for (const Rank rank : ranks) {
      FoundShard found = Found(rank, step);
      found.copy.world_size = 4;
      found.copy.likeness = pairs_[rank];
      arrived.shards.push_back(found);
    }
    return arrived;
  }
  // As a scan tells the step once it has its manifest: no record is read.
  CopiesFound Committed(Step step, const std::set<Rank>& ranks) const {
    CopiesFound found;
    found.tier = TierKind::kRemote;
    found.began = found.as_of = now_;
    found.manifests = {{1, step}};
    for (const Rank rank : ranks) {
      DurableCopy copy;
      copy.copy = Found(rank, step).copy;
      copy.copy.world_size = 4;
      copy.file_bytes = 100;
      copy.from_manifest = true;
      copy.location = "/remote/x";
      found.copies.push_back(copy);
    }
    return found;
  }
};

TEST_F(BadOwnersTest, AFileThatLeavesOutWhatABadOneHasIsNothingToRelyOn) {
  SaveToRemote(1);
  EXPECT_EQ(Protection(), (std::vector<Step>{1, 1, 1, 1, 1}));
  FindBad(0, 1);
  EXPECT_TRUE(job_->IsCommitted({1, 1})) << "memory has it";
  EXPECT_EQ(Where(1),
            (std::map<Rank, std::string>{{0, "bad: its bytes at 77 contradict their digest"},
                                         {1, "good"},
                                         {2, kWithoutRank0},
                                         {3, "good"}}));
  LoseNodeB();
  EXPECT_FALSE(job_->IsCommitted({1, 1})) << "rank 2's file cannot be read";
  EXPECT_EQ(Protection(), (std::vector<Step>{0, 0, 0, 0, 0}));
  const std::string said = Explained(1);
  EXPECT_TRUE(absl::StrContains(said, "no tier has a good copy of 1 of 4 shards")) << said;
  EXPECT_TRUE(absl::StrContains(
      said,
      "and in remote, in a file that leaves out what rank 0's may have, which is bad: its bytes at "
      "77 contradict their digest"))
      << said;
  EXPECT_TRUE(absl::StrContains(said,
                                "remote: 2 of 4 shards good, 1 bad, 1 that leave out what a bad or "
                                "missing one has"))
      << said;
  // It was put right.
  Say(kHere, ShardGood{{1, 1}, 0, TierKind::kRemote});
  EXPECT_TRUE(job_->IsCommitted({1, 1}));
  EXPECT_EQ(Protection(), (std::vector<Step>{1, 1, 1, 1, 1}));
  EXPECT_EQ(Where(1)[2], "good");
}

TEST_F(BadOwnersTest, WhoHoldsSomethingElseDoesNotNeedIt) {
  const std::vector<Likeness> likeness = {Like(9, 9), Like(2, 2), Like(2, 2), Like(2, 2)};
  SaveAll(1, likeness);
  Written(0, 1, 0, {});
  for (const Rank rank : {1u, 2u, 3u}) {
    Written(rank, 1, 100, Plan(likeness[rank], {1, 2, 3}));
  }
  Say(kHere, ManifestDone{{1, 1}, absl::OkStatus()});
  FindBad(0, 1);
  LoseNodeB();
  EXPECT_TRUE(job_->IsCommitted({1, 1}));
  EXPECT_EQ(Protection(), (std::vector<Step>{1, 0, 0, 0, 0}));
}

// A whole file needs nobody, though others need it.
TEST_F(BadOwnersTest, AFileThatHasEverythingCountsAsBefore) {
  SaveAll(1, pairs_);
  Written(0, 1, 100, PlanOf(0));
  Written(1, 1, 100, PlanOf(1));
  Written(2, 1, 0, {});
  Written(3, 1, 100, PlanOf(3));
  Say(kHere, ManifestDone{{1, 1}, absl::OkStatus()});
  FindBad(0, 1);
  LoseNodeB();
  EXPECT_TRUE(job_->IsCommitted({1, 1}));
  FindBad(1, 1);
  EXPECT_FALSE(job_->IsCommitted({1, 1})) << "rank 3's file leaves out what rank 1's had";
}

TEST_F(BadOwnersTest, WhatIsGoneIsMissedAsWhatIsBad) {
  SaveToRemote(1);
  LoseNodeB();
  EXPECT_TRUE(job_->IsCommitted({1, 1}));
  now_ = now_ + std::chrono::seconds(1);
  Say(kHere, Committed(1, {1, 2, 3}));
  EXPECT_FALSE(job_->IsCommitted({1, 1})) << "rank 2's file leaves out what rank 0's had";
  EXPECT_EQ(Where(1)[2], kWithoutRank0);
  Say(kHere, Committed(1, {0, 1, 2, 3}));
  EXPECT_TRUE(job_->IsCommitted({1, 1})) << "it was put back";
}

// All ranks start again where the step before is whole, and are not sent to what cannot be read.
TEST_F(BadOwnersTest, ARestoreIsOfferedWhatCanBeRead) {
  SaveToRemote(1);
  SaveToRemote(2);
  for (Rank rank = 0; rank < 2; ++rank) {
    Say(kHere, SeatLost{1, rank, Process(kHere, rank), 0, SeatLost::How::kProcessEnded});
  }
  LoseNodeB();
  FindBad(0, 2);
  const auto node_of = [&](Rank rank) { return rank < 2 ? kHere : c_; };
  for (Rank rank = 0; rank < 4; ++rank) {
    Join(node_of(rank), rank, 4, "two", 1);
  }
  std::vector<RequestToken> entered;
  for (Rank rank = 0; rank < 4; ++rank) {
    entered.push_back(Enter(node_of(rank), rank, 1));
  }
  for (const RequestToken token : entered) {
    const SourceOffered* offered = Answer<SourceOffered>(token);
    ASSERT_NE(offered, nullptr);
    EXPECT_EQ(offered->checkpoint, (CheckpointId{1, 1}));
  }
}

// The state and the manifest say nothing of who holds what: it may be anybody whom a file needs
// until the nodes have told what they have. From then on it is known.
TEST_F(BadOwnersTest, ANewHostTakesEachFileForNeededUntilItIsTold) {
  SaveToRemote(1);
  LoseNodeB();
  NodeNames nodes("a");
  now_ = now_ + kStateLaziness;
  Say(kHere, WakeUp{});
  settings_.nodes = &nodes;
  MakeCoordinator();
  ASSERT_TRUE(job_->Load(written_).ok());
  std::vector<ForAgent> out;
  job_->Resume(Arrival({0, 1}, 1).shards, Time(), out);
  Say(kHere, Committed(1, {0, 1, 2, 3}));
  Say(kHere, InventoryState{TierKind::kRemote, InventoryState::Kind::kKnown, ""});
  ASSERT_EQ(nodes.Number("b"), b_);
  Say(b_, NodeLeft{true, "its lease has ended"});
  EXPECT_TRUE(job_->IsCommitted({1, 1}));
  FindBad(0, 1);
  EXPECT_FALSE(job_->IsCommitted({1, 1}));
  EXPECT_EQ(Where(1)[1], "good");
  EXPECT_EQ(Where(1)[3], kWithoutRank0);
  EXPECT_EQ(Protection(), (std::vector<Step>{0, 0, 0, 0, 0}));
  // Node b is back with what rank 2 has, and rank 3 is brought into memory there, too.
  Say(b_, Arrival({2}, 1));
  EXPECT_FALSE(job_->IsCommitted({1, 1}));
  EXPECT_EQ(Where(1)[3], kWithoutRank0);
  Say(b_, MemoryCopyGained{{1, 1}, 3, kBytes, 1000, pairs_[3]});
  EXPECT_TRUE(job_->IsCommitted({1, 1}));
  EXPECT_EQ(Where(1)[3], "good");
  // That stays known.
  Say(b_, NodeLeft{true, "its lease has ended"});
  EXPECT_FALSE(job_->IsCommitted({1, 1}));
  EXPECT_EQ(Where(1)[2], kWithoutRank0);
  EXPECT_EQ(Where(1)[3], "good");
}

// All nodes were lost with all that they had, and of what remote has one file is bad: that is what
// every rank hears, and not that some memory is gone.
TEST_F(BadOwnersTest, TheBadFileIsNamedToAllRanks) {
  SaveToRemote(1);
  NodeNames nodes("new");
  now_ = now_ + kStateLaziness;
  Say(kHere, WakeUp{});
  settings_.nodes = &nodes;
  MakeCoordinator();
  ASSERT_TRUE(job_->Load(written_).ok());
  std::vector<ForAgent> out;
  job_->Resume({}, Time(), out);
  Say(kHere, Committed(1, {0, 1, 2, 3}));
  Say(kHere, InventoryState{TierKind::kRemote, InventoryState::Kind::kKnown, ""});
  for (const char* lost : {"a", "b"}) {
    Say(nodes.Number(lost), NodeLeft{true, "its lease has ended"});
  }
  for (Rank rank = 0; rank < 4; ++rank) {
    Join(kHere, rank, 4, "two", 1);
  }
  const std::string found = "'/remote/shard-00000-of-00004.safetensors': the block at offset 64 …";
  const auto check = [&](RequestToken token, const std::string& others) {
    const Refused* refused = Answer<Refused>(token);
    ASSERT_NE(refused, nullptr);
    const std::string& said = refused->failure.message;
    EXPECT_EQ(refused->failure.reason, v1::Failure::REASON_UNREADABLE) << said;
    for (const std::string& part :
         {"rank 2's remote copy (/remote/x) is bad: " + found, others,
          std::string("ckptctl explain job --step 1 --attempt 1"),
          std::string("ckptctl verify job --all"), std::string("ckptctl explain job")}) {
      EXPECT_TRUE(absl::StrContains(said, part)) << part << "\nis not in: " << said;
    }
    EXPECT_FALSE(absl::StrContains(said, "memory")) << said;
  };
  std::vector<RequestToken> entered;
  for (Rank rank = 0; rank < 4; ++rank) {
    entered.push_back(Enter(kHere, rank, 1));
  }
  const SourceOffered* offered = Answer<SourceOffered>(entered[2]);
  ASSERT_NE(offered, nullptr);
  const uint64_t session = offered->session;
  const uint32_t round = offered->round;
  const std::string three = "; and 3 more ranks have no copy that can be read";
  for (const Rank rank : {2u, 0u}) {  // what rank 0's file leaves out is there, too
    Say(kHere, FetchFailed{++token_,
                           job_->attempt(),
                           rank,
                           session,
                           round,
                           {1, 1},
                           TierKind::kRemote,
                           absl::DataLossError(found),
                           true});
    check(token_, three);
  }
  // Who asks once more hears what is known by then.
  entered.clear();
  for (Rank rank = 0; rank < 4; ++rank) {
    entered.push_back(Enter(kHere, rank, 1));
  }
  for (const RequestToken token : entered) {
    check(token, "rank 0's remote copy (/remote/x) is bad: " + found);
    check(token, "; and 2 more ranks have no copy that can be read");
  }
}

// Remote has a file of rank 1 that cannot be read, so its copy in nvme is the last one.
TEST_F(BadOwnersTest, RetentionDoesNotRelyOnItEither) {
  settings_.nvme = true;
  MakeCoordinator();
  job_->SetOpenedHere();
  for (const NodeId node : {kHere, b_}) {
    Say(node, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
  }
  Say(kHere, InventoryState{TierKind::kRemote, InventoryState::Kind::kKnown, ""});
  TwoRanks();
  const Likeness like = Like(1, 1);
  for (Rank rank = 0; rank < 2; ++rank) {
    Begin(rank == 0 ? kHere : b_, rank, 1);
  }
  for (Rank rank = 0; rank < 2; ++rank) {
    Say(rank == 0 ? kHere : b_, ShardSealed{1, rank, 1, 2, kBytes, 1000, true, like});
  }
  Drained(kHere, 0, 1, TierKind::kNvme, TierKind::kMemory);
  Drained(b_, 1, 1, TierKind::kNvme, TierKind::kMemory);
  for (Rank rank = 0; rank < 2; ++rank) {
    ShardDrained drained{{1, 1}, rank, TierKind::kRemote, TierKind::kNvme, absl::OkStatus(),
                         false,  {}};
    drained.copy.file_bytes = 100;
    drained.copy.plan = Plan(like, {0, 1});
    Say(rank == 0 ? kHere : b_, drained);
  }
  Say(kHere, ManifestDone{{1, 1}, absl::OkStatus()});
  ASSERT_TRUE(job_->IsCommittedIn(TierKind::kRemote, {1, 1}));
  Say(kHere, ShardBad{{1, 1}, 0, "bad", TierKind::kRemote});
  Say(kHere, ShardBad{{1, 1}, 0, "bad", TierKind::kNvme});
  Say(b_, ShardBad{{1, 1}, 1, "bad", TierKind::kMemory});
  out_.clear();
  Say(kHere, CollectGarbageAsked{});
  EXPECT_TRUE(job_->IsCommitted({1, 1})) << "rank 0 from memory, rank 1 from nvme";
  for (const auto& [node, removal] : All<RemovalWanted>()) {
    EXPECT_NE(removal.tier, TierKind::kNvme);
  }
}

class PeersTest : public NodesTest {
 protected:
  PeersTest() {
    settings_.nvme = settings_.remote = false;
    settings_.peers = true;
    settings_.policy.set_replicas(1);
    MakeCoordinator();
    job_->SetOpenedHere();
    for (const NodeId node : {kHere, b_, c_}) {
      NodeArrived arrived;
      arrived.lends_bytes = uint64_t{1} << 30;
      Say(node, arrived);
    }
    TwoRanks();
  }
  // Until each of its shards is kept by another node: by which.
  std::map<Rank, NodeId> Replicate(Step step) {
    out_.clear();
    SaveBoth(step);
    std::map<Rank, NodeId> kept;
    for (const auto& [node, wanted] : All<FlushWanted>()) {
      for (const FlushWanted::Shard& shard : wanted.shards) {
        kept[shard.rank] = node;
        Drained(node, shard.rank, step, TierKind::kPeer, TierKind::kMemory);
      }
    }
    return kept;
  }
};

// (Found by the simulator: such a replica stayed where it was, and nobody knew of it.)
TEST_F(PeersTest, AReplicaThatIsToldOfWhileItsStepIsRemovedGoesToo) {
  const std::map<Rank, NodeId> kept = Replicate(1);
  ASSERT_EQ(kept.size(), 2u);
  ASSERT_EQ(Replicate(2).size(), 2u);
  ASSERT_FALSE(All<RemovalWanted>().empty()) << "the step before goes";
  out_.clear();
  NodeArrived back;
  back.lends_bytes = uint64_t{1} << 30;
  back.shards.push_back(Found(0, 1));
  back.shards.back().replica = true;
  Say(kept.at(0), NodeLeft{false, "cut off"});
  Say(kept.at(0), back);
  const auto wanted = All<RemovalWanted>();
  EXPECT_TRUE(std::any_of(wanted.begin(), wanted.end(), [&](const auto& each) {
    return each.first == kept.at(0) && each.second.checkpoint == CheckpointId{1, 1} &&
           each.second.tier == TierKind::kPeer;
  }));
}

}  // namespace
}  // namespace holdfast
