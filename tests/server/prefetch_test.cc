// The restore point is brought into memory ahead of the restore (docs/protocol.md §10).
#include <gtest/gtest.h>

#include "tests/server/tier_world.h"

namespace holdfast::testing {
namespace {

using std::chrono::minutes;
using std::chrono::seconds;
using Steps = std::vector<Step>;
using Names = std::vector<std::string>;

void KeepMany(v1::DaemonConfig& config) {
  config.mutable_policy()->mutable_remote()->set_keep_last(10);
}

class Prefetch : public ::testing::Test {
 protected:
  explicit Prefetch(uint32_t world = 1) : w(world, KeepMany) {}

  std::string SetPoint(Step step) {
    v1::SetRestorePointRequest request;
    request.set_job("job");
    request.set_step(step);
    const auto reply = w.h.Admin<v1::SetRestorePointReply>(request);
    EXPECT_TRUE(reply.ok()) << reply.status().ToString();
    return reply.ok() ? reply->text() : "";
  }
  void Clear() {
    v1::SetRestorePointRequest request;
    request.set_job("job");
    request.set_clear(true);
    EXPECT_TRUE(w.h.Admin<v1::SetRestorePointReply>(request).ok());
  }
  v1::Prefetch Explained() {
    v1::ExplainRequest request;
    request.set_job("job");
    request.set_all_steps(true);
    const auto reply = w.h.Admin<v1::ExplainReply>(request);
    EXPECT_TRUE(reply.ok());
    EXPECT_EQ(reply->prefetch().text(), w.h.Status("job").prefetch().text());
    return reply->prefetch();
  }
  // Of all ranks, whatever their job.
  Steps InMemory() const {
    Steps steps;
    for (const auto& [id, file] : w.h.files) {
      if (file.record) {
        steps.push_back(file.record->id.step);
      }
    }
    std::sort(steps.begin(), steps.end());
    return steps;
  }
  void DelayFetches() {
    w.h.delay = [this](const Action& action) {
      const auto* fetch = std::get_if<FetchShard>(&action);
      fetched += fetch != nullptr ? 1 : 0;
      return fetch != nullptr;
    };
  }
  // Another job's only rank saves a step; whether it may.
  ::testing::AssertionResult AnotherJobSaves(uint32_t uid) {
    TestClient other = w.h.Connect(5000, uid);
    if (::testing::AssertionResult joined = other.Join("other", 0, 1); !joined) {
      return joined;
    }
    return other.Save(77);
  }

  TierWorld w;
  int fetched = 0;
};

class PrefetchOfTwo : public Prefetch {
 protected:
  PrefetchOfTwo() : Prefetch(2) {}
};

TEST_F(PrefetchOfTwo, ARestoreFindsItInMemory) {
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  w.Reboot();
  ASSERT_EQ(InMemory(), Steps{});
  DelayFetches();
  EXPECT_EQ(SetPoint(1),
            "the next restore of the job uses step 1 of attempt 1; it is being brought into memory "
            "on 1 node; 0 of 2 ranks have it there; ckptctl explain job shows how far it is");
  EXPECT_EQ(fetched, 2);
  EXPECT_EQ(Explained().under_way(), 2u);
  w.h.PerformDelayed();
  EXPECT_EQ(InMemory(), (Steps{1, 1}));
  EXPECT_EQ(Explained().text(), "all ranks have it in memory");
  const Restored got = w.Restore();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 1u);
  EXPECT_EQ(got.tiers, (Names{"memory", "memory"}));
  EXPECT_EQ(fetched, 2) << "nothing was read again";
  EXPECT_FALSE(w.h.Status("job").has_prefetch()) << "it was used";
  ASSERT_TRUE(w.Save(3)) << "and it goes on";
}

TEST_F(PrefetchOfTwo, WhatIsThereIsNotReadAndAnotherPointEndsTheOneBefore) {
  for (const Step step : {1, 2, 3, 4}) {
    ASSERT_TRUE(w.Save(step));
  }
  w.EndAll();
  w.h.Restart();
  ASSERT_EQ(InMemory(), (Steps{2, 2, 3, 3, 4, 4}));
  DelayFetches();
  EXPECT_EQ(SetPoint(3),
            "the next restore of the job uses step 3 of attempt 1; all ranks have it in memory");
  EXPECT_EQ(fetched, 0);
  SetPoint(1);
  EXPECT_EQ(w.Delayed<FetchShard>(), 2u);
  SetPoint(2);
  EXPECT_EQ(w.Delayed<FetchShard>(), 0u) << "they were cancelled";
  EXPECT_EQ(InMemory(), (Steps{2, 2, 3, 3, 4, 4}));
  EXPECT_EQ(w.h.files.size(), 6u) << "nor are slots left of them";
}

TEST_F(PrefetchOfTwo, ARestoreThatComesEarlierWaitsForTheSameRead) {
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  w.Reboot();
  DelayFetches();
  SetPoint(1);
  ASSERT_EQ(fetched, 2);
  const Restored early = w.Restore();
  EXPECT_FALSE(early.done);
  Clear();  // what a restore waits for is its own by now
  EXPECT_EQ(w.Delayed<FetchShard>(), 2u);
  w.h.PerformDelayed();
  const Restored got = w.GoOn();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 1u);
  EXPECT_EQ(fetched, 2);
}

TEST_F(Prefetch, NothingIsGivenUpForItAndItIsTriedAgain) {
  for (const Step step : {1, 2, 3, 4}) {
    ASSERT_TRUE(w.Save(step));
  }
  w.EndAll();
  w.h.bytes_max = 3 * kSlot;
  w.h.Restart();
  ASSERT_EQ(InMemory(), (Steps{2, 3, 4}));
  SetPoint(1);
  EXPECT_EQ(InMemory(), (Steps{2, 3, 4}));
  EXPECT_EQ(Explained().text(),
            "it is not being brought into memory now; 0 of 1 ranks have it there; rank 0: no free "
            "room for 2 MiB: the node holds 6 MiB of 6 MiB (memory.bytes_max)");
  v1::RemoveCheckpointRequest remove;
  remove.set_job("job");
  remove.set_step(2);
  remove.set_tier("memory");
  ASSERT_TRUE(w.h.Admin<v1::RemoveCheckpointReply>(remove).ok());
  w.h.Advance(seconds(11));
  EXPECT_EQ(InMemory(), (Steps{1, 3, 4})) << "there is room now";
}

TEST_F(Prefetch, ItIsNotTriedAgainAndAgainForAnotherNumberOfRanks) {
  for (const Step step : {1, 2, 3, 4}) {
    ASSERT_TRUE(w.Save(step));
  }
  w.EndAll();
  w.h.bytes_max = 3 * kSlot;
  w.h.Restart();
  SetPoint(1);  // there is no room for it: that is looked at again after a while
  TestClient next = w.h.Connect(700);
  ASSERT_FALSE(next.Call(TestClient::JoinFrame("job", 0, 2, 0, "of two")).has_failure());
  w.h.now = w.h.now + seconds(11);
  w.h.timer.reset();
  w.h.Feed(TimerFired{});
  ASSERT_TRUE(w.h.timer);
  EXPECT_GT(*w.h.timer, w.h.now) << "the timer is set for a time that is over";
}

TEST_F(Prefetch, ARankThatRunsKeepsRoomForAllSlotsThatItMayHave) {
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  w.h.bytes_max = 3 * kSlot;
  w.Reboot();
  ASSERT_EQ(w.Restore().step, 2u);
  SetPoint(1);
  EXPECT_EQ(InMemory(), Steps{2});
  EXPECT_EQ(Explained().text(),
            "it is not being brought into memory now; 0 of 1 ranks have it there; rank 0: no free "
            "room for 2 MiB: the node holds 2 MiB of 6 MiB (memory.bytes_max), and keeps 4 MiB for "
            "the next saves of ranks that run here");
}

TEST_F(Prefetch, BesideTheSlotsOfARankThatRunsAndGoneWithItsUse) {
  for (const Step step : {1, 2, 3, 4}) {
    ASSERT_TRUE(w.Save(step));
  }
  SetPoint(1);
  EXPECT_EQ(InMemory(), (Steps{1, 2, 3, 4}));
  for (const Step step : {5, 6, 7}) {
    ASSERT_TRUE(w.Save(step));
  }
  EXPECT_EQ(InMemory(), (Steps{1, 5, 6, 7})) << "saves take their own slots";
  const Restored got = w.Restore();
  EXPECT_EQ(got.step, 1u);
  EXPECT_EQ(got.tiers, Names{"memory"});
  for (const Step step : {8, 9, 10}) {
    ASSERT_TRUE(w.Save(step));
  }
  v1::RemoveCheckpointRequest remove;
  remove.set_job("job");
  remove.set_step(1);
  remove.set_tier("memory");
  ASSERT_TRUE(w.h.Admin<v1::RemoveCheckpointReply>(remove).ok());
  EXPECT_EQ(w.h.files.size(), 3u) << "the slot that was made for it is gone";
}

TEST_F(Prefetch, KeepCommittedDoesNotThrowItAway) {
  TierWorld one(1, [](v1::DaemonConfig& config) {
    KeepMany(config);
    config.mutable_memory()->set_keep_committed(1);
  });
  ASSERT_TRUE(one.Save(1));
  ASSERT_TRUE(one.Save(2));
  v1::SetRestorePointRequest request;
  request.set_job("job");
  request.set_step(1);
  ASSERT_TRUE(one.h.Admin<v1::SetRestorePointReply>(request).ok());
  ASSERT_TRUE(one.Save(3));
  EXPECT_EQ(one.Restore().tiers, Names{"memory"});
}

TEST_F(Prefetch, TakenBackItEnds) {
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  w.Reboot();
  DelayFetches();
  SetPoint(1);
  ASSERT_EQ(w.Delayed<FetchShard>(), 1u);
  Clear();
  EXPECT_EQ(w.Delayed<FetchShard>(), 0u);
  EXPECT_FALSE(w.h.Status("job").has_prefetch());
  w.h.Advance(minutes(1));
  EXPECT_EQ(fetched, 1);
  EXPECT_EQ(InMemory(), Steps{});
}

TEST_F(Prefetch, ItHasADeadline) {
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  w.Reboot();
  DelayFetches();
  SetPoint(1);
  ASSERT_EQ(w.Delayed<FetchShard>(), 1u);
  w.h.Advance(minutes(10));
  EXPECT_EQ(w.Delayed<FetchShard>(), 0u);
  EXPECT_EQ(Explained().text(),
            "it is not being brought into memory now; 0 of 1 ranks have it there; the time for "
            "that, 10 min 0 s, is up");
  EXPECT_EQ(fetched, 1);
  w.h.delay = nullptr;
  EXPECT_EQ(w.Restore().tiers, Names{"nvme"}) << "the restore does what it always did";
}

TEST_F(Prefetch, AnotherJobsSaveTakesTheRoomBackWhileItIsBeingRead) {
  for (const Step step : {1, 2, 3, 4}) {
    ASSERT_TRUE(w.Save(step));
  }
  w.h.bytes_max = 4 * kSlot;
  w.EndAll();
  w.h.Restart();
  DelayFetches();
  SetPoint(1);
  ASSERT_EQ(w.Delayed<FetchShard>(), 1u);
  EXPECT_TRUE(AnotherJobSaves(2000)) << "as if there was no prefetch";
  EXPECT_EQ(w.Delayed<FetchShard>(), 0u);
  EXPECT_EQ(InMemory(), (Steps{2, 3, 4, 77})) << "and nothing was given up";
}

TEST_F(Prefetch, AndWhenItIsThere) {
  for (const Step step : {1, 2, 3, 4}) {
    ASSERT_TRUE(w.Save(step));
  }
  w.h.bytes_max = 4 * kSlot;
  w.EndAll();
  w.h.Restart();
  ASSERT_EQ(w.Restore().step, 4u);
  SetPoint(1);
  ASSERT_EQ(InMemory(), (Steps{1, 2, 3, 4}));
  EXPECT_TRUE(AnotherJobSaves(2000));
  EXPECT_EQ(InMemory(), (Steps{2, 3, 4, 77})) << "of a job that runs, and of another user";
}

TEST_F(Prefetch, ABadSourceIsMarkedAndTheNextOneUsed) {
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  w.h.nvme.damaged.insert(w.Shard(2));
  w.Reboot();
  SetPoint(2);
  EXPECT_EQ(InMemory(), Steps{2});
  EXPECT_TRUE(w.Reported("its nvme copy: "));
  EXPECT_EQ(w.Restore().tiers, Names{"memory"});
}

TEST_F(Prefetch, ASourceThatCannotBeReadIsTriedAgain) {
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  w.h.nvme.unreadable.insert(w.Shard(2));
  w.h.remote.unreadable.insert(w.Shard(2));
  w.Reboot();
  SetPoint(2);
  EXPECT_EQ(InMemory(), Steps{});
  EXPECT_EQ(Explained().text(),
            "it is not being brought into memory now; 0 of 1 ranks have it there; rank 0: remote "
            "copy: input/output error");
  w.h.remote.unreadable.clear();
  w.h.Advance(seconds(11));
  EXPECT_EQ(InMemory(), Steps{2});
}

TEST_F(Prefetch, ADaemonThatWasStartedAnewGoesOnWithIt) {
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  w.Reboot();
  DelayFetches();
  SetPoint(1);
  ASSERT_EQ(w.Delayed<FetchShard>(), 1u);
  w.h.delay = nullptr;
  w.h.Restart();
  EXPECT_EQ(InMemory(), Steps{1});
  EXPECT_EQ(Explained().text(), "all ranks have it in memory");
  EXPECT_EQ(w.Restore().tiers, Names{"memory"});
}

class PrefetchOfSix : public Prefetch {
 protected:
  PrefetchOfSix() : Prefetch(6) {}
};

TEST_F(PrefetchOfSix, AFewAtATime) {
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  w.Reboot();
  DelayFetches();
  SetPoint(1);
  EXPECT_EQ(fetched, 4);
  EXPECT_EQ(Explained().under_way(), 6u);
  w.h.PerformDelayed();  // and the others after them
  EXPECT_EQ(InMemory(), (Steps{1, 1, 1, 1, 1, 1}));
}

}  // namespace
}  // namespace holdfast::testing
