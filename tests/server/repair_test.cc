// Bad copies in the durable tiers: written anew from a good one, by themselves and when asked for;
// what cannot be mended stays.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/coordinator.h"
#include "tests/server/tier_world.h"

namespace holdfast::testing {
namespace {

using ::testing::HasSubstr;

class RepairTest : public ::testing::Test {
 protected:
  void FindBad(TierKind tier, Step step, Rank rank = 0, bool leave = false) {
    const ShardId shard = w_.Shard(step, rank);
    (tier == TierKind::kNvme ? w_.h.nvme : w_.h.remote).damaged.insert(shard);
    w_.h.Feed(DurableCopyJudged{tier, shard, "a block differs", leave});
  }
  std::string StateOf(TierKind tier, Step step, Rank rank = 0) {
    v1::WhereRequest request;
    request.set_job("job");
    request.set_attempt(1);
    request.set_step(step);
    const auto reply = w_.h.Admin<v1::WhereReply>(request);
    for (const v1::ShardCopy& copy : reply.ok() ? reply->copies() : v1::WhereReply().copies()) {
      if (copy.tier() == TierName(tier) && copy.rank() == rank) {
        return copy.state();
      }
    }
    return "none";
  }
  v1::RepairReply Repair(bool look = false) {
    v1::RepairRequest request;
    request.set_job("job");
    request.set_all_steps(true);
    request.set_look(look);
    const auto reply = w_.h.Admin<v1::RepairReply>(request);
    EXPECT_TRUE(reply.ok()) << reply.status();
    return reply.ok() ? *reply : v1::RepairReply();
  }
  // Else retention takes what can be restored no more.
  void Pin(Step step) {
    v1::PinRequest pin;
    pin.set_job("job");
    pin.set_step(step);
    EXPECT_TRUE(w_.h.Admin<v1::PinReply>(pin).ok());
  }
  size_t Replacing() const {
    return w_.Delayed<FlushShard>([](const FlushShard& flush) { return flush.replace; });
  }

  TierWorld w_{2};
};

TEST_F(RepairTest, ABadCopyIsMendedByItself) {
  ASSERT_TRUE(w_.Save(1));
  for (const TierKind tier : {TierKind::kNvme, TierKind::kRemote}) {
    FindBad(tier, 1, 1);
    EXPECT_EQ(StateOf(tier, 1, 1), "good");
    EXPECT_TRUE((tier == TierKind::kNvme ? w_.h.nvme : w_.h.remote).damaged.empty());
  }
  EXPECT_EQ(w_.h.CountReports(Report::Kind::kCopyBad), 2u);
  EXPECT_EQ(w_.h.CountReports(Report::Kind::kCopyMended), 2u);
  EXPECT_TRUE(
      w_.Reported("written anew from the memory and verified; it was bad: a block differs"));
  const v1::RepairReply reply = Repair(true);
  EXPECT_EQ(reply.copies_size(), 0);
  ASSERT_EQ(reply.mended_size(), 2);
  EXPECT_EQ(reply.mended(0).source(), "the memory");
  EXPECT_EQ(reply.mended(1).tier(), "remote");
}

// Memory is gone: each durable tier mends the other.
TEST_F(RepairTest, FromTheOtherDurableTier) {
  ASSERT_TRUE(w_.Save(1));
  w_.Reboot();
  FindBad(TierKind::kNvme, 1);
  EXPECT_EQ(StateOf(TierKind::kNvme, 1), "good");
  FindBad(TierKind::kRemote, 1);
  EXPECT_EQ(StateOf(TierKind::kRemote, 1), "good");
  EXPECT_TRUE(w_.Reported("from the remote tier"));
  EXPECT_TRUE(w_.Reported("from nvme"));
}

TEST_F(RepairTest, WithoutAGoodCopyNothingIsTouched) {
  ASSERT_TRUE(w_.Save(1));
  Pin(1);
  w_.Reboot();
  w_.DelayFlushes();
  FindBad(TierKind::kNvme, 1);
  ASSERT_EQ(Replacing(), 1u);
  // The source goes bad meanwhile.
  w_.h.remote.damaged.insert(w_.Shard(1));
  w_.h.delay = nullptr;
  w_.h.PerformDelayed();
  EXPECT_THAT(StateOf(TierKind::kNvme, 1), HasSubstr("bad"));
  EXPECT_THAT(StateOf(TierKind::kRemote, 1), HasSubstr("bad"));
  EXPECT_EQ(w_.h.CountReports(Report::Kind::kCopyUnmended), 2u);
  EXPECT_EQ(w_.h.CountReports(Report::Kind::kCopyMended), 0u);
  const v1::RepairReply reply = Repair();
  ASSERT_EQ(reply.copies_size(), 2);
  EXPECT_EQ(reply.copies(0).state(), v1::BadCopy::STATE_NO_SOURCE);
  EXPECT_THAT(reply.copies(0).problem(), HasSubstr("no good copy"));
  EXPECT_EQ(w_.h.CountReports(Report::Kind::kCopyUnmended), 4u) << "whoever asks is told again";
  // One turns out to be good: it mends the other.
  w_.h.remote.damaged.clear();
  w_.h.Feed(DurableCopyJudged{TierKind::kRemote, w_.Shard(1), "", false});
  EXPECT_EQ(StateOf(TierKind::kNvme, 1), "good");
}

// The good one that is read first goes bad meanwhile: the next one is taken.
TEST_F(RepairTest, ASourceThatIsBadIsPassedOver) {
  ASSERT_TRUE(w_.Save(1));
  w_.DelayFlushes();
  FindBad(TierKind::kRemote, 1);
  ASSERT_EQ(Replacing(), 1u);
  w_.h.damaged_in_memory.insert(w_.Shard(1));
  w_.h.delay = nullptr;
  w_.h.PerformDelayed();
  EXPECT_THAT(StateOf(TierKind::kMemory, 1), HasSubstr("bad"));
  EXPECT_EQ(StateOf(TierKind::kRemote, 1), "good");
  EXPECT_TRUE(w_.Reported("was written anew from nvme"));
}

TEST_F(RepairTest, WhatIsToBeLeftIsLeftUntilItIsNamed) {
  ASSERT_TRUE(w_.Save(1));
  FindBad(TierKind::kNvme, 1, 0, true);
  EXPECT_THAT(StateOf(TierKind::kNvme, 1), HasSubstr("bad"));
  EXPECT_EQ(Repair(true).copies(0).state(), v1::BadCopy::STATE_LEFT);
  Repair();
  EXPECT_EQ(StateOf(TierKind::kNvme, 1), "good");
  EXPECT_EQ(Repair(true).mended_size(), 1);
}

TEST_F(RepairTest, AFailedTryIsToldAndTriedAgain) {
  ASSERT_TRUE(w_.Save(1));
  w_.FailFlushes(TierKind::kNvme, absl::InternalError("the drive is on fire"));
  FindBad(TierKind::kNvme, 1);
  EXPECT_THAT(StateOf(TierKind::kNvme, 1), HasSubstr("bad"));
  const v1::BadCopy waits = Repair(true).copies(0);
  EXPECT_EQ(waits.state(), v1::BadCopy::STATE_WAITS);
  EXPECT_THAT(waits.problem(), HasSubstr("on fire"));
  EXPECT_TRUE(w_.Reported("could not be written anew yet, trying again"));
  w_.FailFlushes(TierKind::kNvme, absl::OkStatus());
  w_.h.Advance(std::chrono::minutes(10));
  EXPECT_EQ(StateOf(TierKind::kNvme, 1), "good");
}

// Each try reads a whole copy: what nobody sees to is not tried every few minutes for ever. Who
// asks for it gets it at once.
TEST_F(RepairTest, WhatIsRefusedIsTriedSeldom) {
  ASSERT_TRUE(w_.Save(1));
  Pin(1);
  size_t tries = 0;
  absl::Status refused = absl::NotFoundError("somebody else removed it");
  w_.h.fail = [&](const Action& action) {
    const auto* flush = std::get_if<FlushShard>(&action);
    const bool replaces = flush != nullptr && flush->replace;
    tries += replaces ? 1 : 0;
    return replaces ? refused : absl::OkStatus();
  };
  FindBad(TierKind::kNvme, 1);
  for (int hour = 0; hour < 48; ++hour) {
    w_.h.Advance(std::chrono::hours(1));
  }
  EXPECT_GT(tries, 5u);
  EXPECT_LT(tries, 25u) << "every ten minutes would be nearly 300";
  refused = absl::OkStatus();
  Repair();
  EXPECT_EQ(StateOf(TierKind::kNvme, 1), "good");
}

// The limit holds for each tier; who waits for others' ends sets no timer, which would fire for
// ever.
TEST_F(RepairTest, WhoWaitsForOthersWaitsForNoTime) {
  for (Step step = 1; step <= 2; ++step) {
    ASSERT_TRUE(w_.Save(step));
    Pin(step);
  }
  w_.FailFlushes(TierKind::kNvme, absl::InternalError("not now"));
  for (Step step = 1; step <= 2; ++step) {
    for (const Rank rank : {Rank{0}, Rank{1}}) {
      FindBad(TierKind::kNvme, step, rank);
    }
  }
  w_.FailFlushes(TierKind::kNvme, absl::OkStatus());
  w_.DelayFlushes();
  w_.h.now = w_.h.now + std::chrono::minutes(1);
  w_.h.timer.reset();
  w_.h.Feed(TimerFired{});
  EXPECT_EQ(Replacing(), kRepairsAtOnce);
  EXPECT_TRUE(!w_.h.timer || *w_.h.timer > w_.h.now);
  EXPECT_EQ(Repair(true).copies(0).state(), v1::BadCopy::STATE_WAITS);
  EXPECT_EQ(Repair(true).copies(0).problem(), "") << "its turn comes";
  FindBad(TierKind::kRemote, 1, 0);
  EXPECT_EQ(Replacing(), kRepairsAtOnce + 1) << "the other tier has a limit of its own";
  w_.h.delay = nullptr;
  w_.h.PerformDelayed();
  EXPECT_EQ(Repair(true).copies_size(), 0);
}

// The step goes on to the tier by itself: that mends what is bad of it, and there is one answer.
TEST_F(RepairTest, WhatIsOnItsWayThereIsMendedWithIt) {
  bool fails = true;
  w_.h.fail = [&](const Action& action) {
    const auto* flush = std::get_if<FlushShard>(&action);
    const bool one = flush != nullptr && flush->to == TierKind::kNvme && flush->key.id.rank == 1;
    return one && fails ? absl::InternalError("not now") : absl::OkStatus();
  };
  ASSERT_TRUE(w_.Save(1));
  ASSERT_EQ(StateOf(TierKind::kNvme, 1, 0), "good");
  w_.DelayFlushes();
  FindBad(TierKind::kNvme, 1, 0);
  EXPECT_EQ(Replacing(), 0u);
  EXPECT_THAT(Repair(true).copies(0).problem(), HasSubstr("is being written to nvme"));
  fails = false;
  w_.h.delay = nullptr;
  w_.h.PerformDelayed();
  w_.h.Advance(std::chrono::minutes(10));
  EXPECT_EQ(StateOf(TierKind::kNvme, 1, 0), "good");
  EXPECT_EQ(StateOf(TierKind::kNvme, 1, 1), "good");
  EXPECT_TRUE(w_.h.nvme.damaged.empty());
  EXPECT_EQ(Repair(true).copies_size(), 0);
}

// What retention has begun to take away is not written anew, and what is written anew stays until
// that has ended.
TEST_F(RepairTest, RetentionWaitsForARepair) {
  ASSERT_TRUE(w_.Save(1));
  w_.DelayFlushes(TierKind::kNvme);
  FindBad(TierKind::kNvme, 1);
  ASSERT_EQ(Replacing(), 1u);
  v1::RemoveCheckpointRequest remove;
  remove.set_job("job");
  remove.set_attempt(1);
  remove.set_step(1);
  remove.set_tier("nvme");
  remove.set_force(true);
  ASSERT_TRUE(w_.h.Admin<v1::RemoveCheckpointReply>(remove).ok());
  EXPECT_THAT(w_.Nvme(), ::testing::ElementsAre(1)) << "it was removed under the repair";
  w_.h.delay = nullptr;
  w_.h.PerformDelayed();
  EXPECT_THAT(w_.Nvme(), ::testing::ElementsAre());
  EXPECT_EQ(StateOf(TierKind::kNvme, 1), "none");
}

TEST_F(RepairTest, AStepThatIsNotKnownIsRefused) {
  ASSERT_TRUE(w_.Save(1));
  v1::RepairRequest request;
  request.set_job("job");
  request.set_step(9);
  EXPECT_TRUE(absl::IsNotFound(w_.h.Admin<v1::RepairReply>(request).status()));
  request.set_all_steps(true);
  request.set_tier("memory");
  EXPECT_TRUE(absl::IsInvalidArgument(w_.h.Admin<v1::RepairReply>(request).status()));
  EXPECT_FALSE(w_.h.Admin<v1::RepairReply>(request, 4711).ok()) << "another user's";
}

}  // namespace
}  // namespace holdfast::testing
