// Restores that could use an older step than the newest that was saved (docs/protocol.md §6,
// recovery/fall_back.h): what they wait for, how long, and what is said when they go on without it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/agent.h"
#include "server/coordinator.h"
#include "tests/server/nodes_fixture.h"
#include "tests/server/tier_world.h"

namespace holdfast::testing {
namespace {

using std::chrono::hours;
using std::chrono::minutes;
using std::chrono::seconds;
using ::testing::EndsWith;
using ::testing::HasSubstr;

// Remote has step 2, nvme step 3, and nothing is left in memory.
class FallBackTest : public ::testing::Test {
 protected:
  static v1::DaemonConfig& Adjust(v1::DaemonConfig& c) {
    c.mutable_policy()->mutable_remote()->set_every_steps(2);
    c.mutable_retention()->set_grace_ms(3'600'000);
    return c;
  }
  explicit FallBackTest(bool fall_back = true)
      : w(2, [fall_back](v1::DaemonConfig& c) {
          Adjust(c).mutable_restore()->set_fall_back(fall_back);
        }) {
    for (Step step = 1; step <= 3; ++step) {
      EXPECT_TRUE(w.Save(step));
    }
    EXPECT_EQ(w.Nvme().back(), 3u);
    EXPECT_EQ(w.Remote().back(), 2u);
    w.Reboot();
    w.deadline_ms = 600'000;
  }
  void LoseDrive() {
    w.h.nvme.scan = absl::UnavailableError("'/nvme0' is away");
    w.h.Feed(TierAway{TierKind::kNvme, "/nvme0", w.h.nvme.scan});
  }
  // One rank's copy of step 3 is gone; every place can be read.
  void LoseShard(Rank rank) { ASSERT_EQ(w.h.nvme.copies.erase(w.Shard(3, rank)), 1u); }
  size_t Waits() const {
    return static_cast<size_t>(
        std::count_if(w.h.reports.begin(), w.h.reports.end(), [](const Report& report) {
          return report.text.find("may be whole with what cannot be read now") != std::string::npos;
        }));
  }
  void Pass(Duration time) {
    for (Duration passed{}; passed < time; passed += seconds(1)) {
      w.h.Advance(seconds(1));
    }
    w.GoOn();
  }

  TierWorld w;
};

TEST_F(FallBackTest, APlaceThatIsAwayIsWaitedFor) {
  LoseDrive();
  EXPECT_FALSE(w.Restore().done) << "remote has step 2 only";
  EXPECT_EQ(w.result.failure.message(), "");
  EXPECT_EQ(Waits(), 1u);
  EXPECT_TRUE(w.Reported("'/nvme0' is away"));
  EXPECT_TRUE(w.Reported("ckptctl restore job --step 2"));
  Pass(seconds(30));
  EXPECT_FALSE(w.result.done);
  EXPECT_EQ(Waits(), 4u) << "every ten seconds";
  w.h.nvme.scan = absl::OkStatus();
  Pass(kRescan);
  EXPECT_EQ(w.result.step, 3u);
  EXPECT_EQ(w.result.passed_over, "");
}

TEST_F(FallBackTest, WhenItDoesNotComeBackTheOlderStepIsUsedAndEveryRankHearsWhy) {
  LoseDrive();
  EXPECT_FALSE(w.Restore().done);
  Pass(minutes(2) - seconds(1));
  EXPECT_FALSE(w.result.done);
  Pass(seconds(1));
  EXPECT_EQ(w.result.step, 2u);
  EXPECT_THAT(w.result.passed_over, HasSubstr("the newer step 3 of attempt 1 is passed over"));
  EXPECT_THAT(w.result.passed_over, HasSubstr("'/nvme0' is away"));
  EXPECT_GT(w.h.CountReports(Report::Kind::kSessionFellBack), 0u);
}

TEST_F(FallBackTest, WhatEarlierRestoresHaveWaitedCounts) {
  LoseDrive();
  EXPECT_FALSE(w.Restore().done);
  Pass(seconds(80));
  EXPECT_FALSE(w.result.done);
  w.h.Restart();
  EXPECT_FALSE(w.Restore().done);
  Pass(seconds(25));
  EXPECT_FALSE(w.result.done);
  Pass(seconds(35));  // (what is noted may be some seconds old)
  EXPECT_EQ(w.result.step, 2u);
}

TEST_F(FallBackTest, SomeOfTheRanksTimeIsLeftForTheRestore) {
  w.deadline_ms = 90'000;
  LoseDrive();
  EXPECT_FALSE(w.Restore().done);
  Pass(seconds(59));
  EXPECT_FALSE(w.result.done);
  Pass(seconds(1));
  EXPECT_EQ(w.result.step, 2u);
}

TEST_F(FallBackTest, WhoIsChosenMeanwhileIsRestored) {
  LoseDrive();
  EXPECT_FALSE(w.Restore().done);
  v1::SetRestorePointRequest choose;
  choose.set_job("job");
  choose.set_step(2);
  ASSERT_TRUE(w.h.Admin<v1::SetRestorePointReply>(choose).ok());
  w.GoOn();
  EXPECT_EQ(w.result.step, 2u);
  EXPECT_EQ(w.result.passed_over, "") << "it was asked for";
}

TEST_F(FallBackTest, WhatWasReadEverywhereIsNotWaitedFor) {
  LoseShard(1);
  EXPECT_EQ(w.Restore().step, 2u);
  EXPECT_THAT(w.result.passed_over, HasSubstr("the newer step 3 of attempt 1 is passed over"));
  EXPECT_EQ(Waits(), 0u);
}

TEST_F(FallBackTest, ARankThatEntersAfterTheDecisionHearsWhatWasPassedOver) {
  LoseShard(1);
  ASSERT_EQ(w.Restore().step, 2u);
  const v1::DaemonFrame offer = w.ranks[1].Call(TestClient::EnterFrame(60'000));
  ASSERT_EQ(offer.enter_session().step(), 2u) << offer.ShortDebugString();
  const v1::DaemonFrame done =
      w.ranks[1].Call(TestClient::ReportFrame(offer.enter_session(), true));
  EXPECT_TRUE(done.enter_session().done());
  EXPECT_THAT(done.enter_session().passed_over(), HasSubstr("step 3 of attempt 1 is passed over"));
}

// Kept for the grace time, though the line has covered it long ago; its end wakes.
TEST_F(FallBackTest, WhatWasPassedOverStaysForTheGraceTimeAndNoLonger) {
  LoseShard(1);
  ASSERT_EQ(w.Restore().step, 2u);
  for (Step step = 3; step <= 6; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  const ShardId left = w.Shard(3, 0, 1);
  EXPECT_EQ(w.h.nvme.copies.count(left), 1u);
  EXPECT_EQ(w.h.nvme.copies.count(w.Shard(3, 0, 2)), 0u) << "the line's own goes by policy";
  w.h.Advance(minutes(59));
  EXPECT_EQ(w.h.nvme.copies.count(left), 1u);
  w.h.Advance(minutes(2));  // nothing else happens
  EXPECT_EQ(w.h.nvme.copies.count(left), 0u);
}

class NoFallBackTest : public FallBackTest {
 protected:
  NoFallBackTest() : FallBackTest(false) {}
};

TEST_F(NoFallBackTest, ItIsRefusedInsteadAndSaysWhatDecidesThat) {
  LoseShard(1);
  const Restored refused = w.Restore();
  EXPECT_FALSE(refused.done);
  EXPECT_EQ(refused.failure.reason(), v1::Failure::REASON_UNREADABLE);
  EXPECT_THAT(refused.failure.message(), HasSubstr("restore.fall_back"));
  EXPECT_THAT(refused.failure.message(), HasSubstr("ckptctl restore job --step 2"));
  EXPECT_THAT(refused.failure.message(), EndsWith("ckptctl explain job"));
  EXPECT_EQ(w.Enter(nullptr, CheckpointId{0, 2}).step, 2u) << "who asks for it gets it";
}

TEST_F(NoFallBackTest, APlaceThatIsAwayIsWaitedForFirst) {
  LoseDrive();
  EXPECT_FALSE(w.Restore().done);
  Pass(minutes(2) - seconds(1));
  EXPECT_EQ(w.result.failure.message(), "");
  Pass(seconds(1));
  EXPECT_EQ(w.result.failure.reason(), v1::Failure::REASON_UNREADABLE);
}

// Step 1 is in remote, step 2 on two nodes alone, of which one has gone.
class GoneNodeTest : public NodesTest {
 protected:
  explicit GoneNodeTest(uint32_t replicas = 0) {
    settings_.wait_for_copies = minutes(2);
    settings_.peers = replicas > 0;
    settings_.policy.set_replicas(replicas);
    MakeCoordinator();
    job_->SetOpenedHere();
    for (const NodeId node : {kHere, b_, c_}) {
      Say(node, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
    }
    Say(kHere, InventoryState{TierKind::kRemote, InventoryState::Kind::kKnown, ""});
    TwoRanks();
    SaveBoth(1);
    Flush(1);
    SaveBoth(2);
    out_.clear();
    Say(b_, NodeLeft{true, "its lease has ended"});
    Say(kHere, SeatLost{1, 0, Process(kHere, 0), 0, SeatLost::How::kProcessEnded});
  }
  void EnterBoth() {
    Join(kHere, 0, 2, "two", 1);
    Join(c_, 1, 2, "two", 1);
    zero_ = Enter(kHere, 0, 1);
    Enter(c_, 1, 1);
  }
  void Pass(Duration time) {
    for (Duration passed{}; passed < time; passed += seconds(1)) {
      now_ = now_ + seconds(1);
      if (const auto wake = job_->NextWake(); wake && *wake <= now_) {
        Say(kHere, WakeUp{});
      }
    }
  }
  std::optional<Step> Offered() const {
    const auto* offer = Answer<SourceOffered>(zero_);
    return offer == nullptr ? std::nullopt : std::optional(offer->checkpoint.step);
  }
  RequestToken zero_ = 0;
};

TEST_F(GoneNodeTest, IsWaitedForWhereItHasTheNewestStepAlone) {
  EnterBoth();
  Pass(minutes(2) - seconds(1));
  EXPECT_EQ(Offered(), std::nullopt);
  EXPECT_EQ(Answer<Refused>(zero_), nullptr);
  Pass(seconds(1));
  EXPECT_EQ(Offered(), 1u);
}

TEST_F(GoneNodeTest, IsWaitedForNoLongerWhenItHasLostItsMemory) {
  EnterBoth();
  Say(b_, NodeArrived{});
  Say(b_, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
  EXPECT_EQ(Offered(), 1u);
}

class ReplacedNodeTest : public GoneNodeTest {
 protected:
  ReplacedNodeTest() : GoneNodeTest(1) {}
};

TEST_F(ReplacedNodeTest, IsNotWaitedForWhenSomebodySaidSo) {
  NodeArrived arrived;
  arrived.lends_bytes = uint64_t{1} << 30;
  Say(c_, arrived);
  Say(c_, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
  ReplaceAsked replace;
  replace.token = ++token_;
  replace.request.set_node("b");
  replace.request.set_with("c");
  Say(kHere, replace);
  if (const auto* refused = Answer<Refused>(replace.token)) {
    FAIL() << refused->failure.message;
  }
  EnterBoth();
  EXPECT_EQ(Offered(), 1u);
}

}  // namespace
}  // namespace holdfast::testing
