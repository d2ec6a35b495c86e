// How committed steps get into the durable tiers (docs/protocol.md §10).
#include <gtest/gtest.h>

#include <cerrno>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "tests/server/tier_world.h"

namespace holdfast::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;
using Steps = std::vector<Step>;

TEST(Flush, AStepGoesToNvmeAndFromThereToRemote) {
  TierWorld w(2);
  w.DelayFlushes();
  ASSERT_TRUE(w.Save(1));
  EXPECT_EQ(w.Delayed<FlushShard>([](const FlushShard& f) { return f.to == TierKind::kNvme; }), 2u);
  EXPECT_EQ(w.Delayed<FlushShard>([](const FlushShard& f) { return f.to == TierKind::kRemote; }),
            0u)
      << "behind nvme";
  std::vector<TierKind> from;
  w.h.fail = [&](const Action& action) {
    if (const auto* flush = std::get_if<FlushShard>(&action);
        flush != nullptr && flush->to == TierKind::kRemote) {
      from.push_back(flush->from);
    }
    if (std::get_if<PublishManifest>(&action) != nullptr) {
      EXPECT_EQ(w.Remote(), Steps{1}) << "the manifest comes last";
    }
    return absl::OkStatus();
  };
  w.h.PerformDelayed();
  EXPECT_EQ(from, (std::vector<TierKind>{TierKind::kNvme, TierKind::kNvme}));
  EXPECT_EQ(w.Nvme(), Steps{1});
  EXPECT_EQ(w.Manifests(), Steps{1});
  EXPECT_EQ(w.Protection(), (Steps{1, 1, 1, 1, 1}));
  EXPECT_EQ(w.Tier("remote").step(), 1u);
  EXPECT_TRUE(w.Reached(1, v1::AwaitSave::STAGE_REMOTE));
}

TEST(Flush, WhatGoesToRemoteIsCompressedIfThePolicySaysSo) {
  for (const bool zstd : {false, true}) {
    TierWorld w(1, [zstd](v1::DaemonConfig& c) {
      v1::TierPolicy& remote = *c.mutable_policy()->mutable_remote();
      remote.set_compression(zstd ? v1::TierPolicy::COMPRESSION_ZSTD
                                  : v1::TierPolicy::COMPRESSION_NONE);
      remote.set_compression_level(7);
      remote.set_compression_threads(2);
    });
    std::map<TierKind, FlushShard> flushes;
    w.h.fail = [&](const Action& action) {
      if (const auto* flush = std::get_if<FlushShard>(&action)) {
        flushes[flush->to] = *flush;
      }
      return absl::OkStatus();
    };
    ASSERT_TRUE(w.Save(1));
    ASSERT_EQ(flushes.size(), 2u);
    EXPECT_EQ(flushes[TierKind::kNvme].zstd_level, 0u);
    EXPECT_EQ(flushes[TierKind::kRemote].zstd_level, zstd ? 7u : 0u);
    EXPECT_EQ(flushes[TierKind::kRemote].zstd_threads, zstd ? 2u : 0u);
  }
}

// Steps that hang are given to one drive; the next ones go to another, up to a limit.
TEST(Flush, StepsThatHangTakeNoOnesTurn) {
  TierWorld w(1, [](v1::DaemonConfig& c) {
    c.mutable_memory()->set_slots_per_rank(14);
    c.mutable_memory()->set_keep_committed(14);
    c.mutable_policy()->mutable_nvme()->set_keep_last(20);
    c.mutable_policy()->mutable_remote()->set_every_steps(0);
  });
  std::vector<DrainId> flushes;
  Step hang_to = 2;
  w.h.delay = [&](const Action& a) {
    const auto* flush = std::get_if<FlushShard>(&a);
    if (flush == nullptr || flush->key.id.step > hang_to) {
      return false;
    }
    flushes.push_back(flush->drain);
    return true;
  };
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  ASSERT_TRUE(w.Save(3));
  EXPECT_TRUE(w.Nvme().empty()) << "two are under way, and may end any moment";
  ASSERT_EQ(flushes.size(), 2u);
  w.h.Feed(DrainStalled{flushes[0], true, "no progress for 60 s"});
  EXPECT_EQ(w.Nvme(), Steps{3});
  w.h.Feed(DrainStalled{flushes[1], true, "no progress for 60 s"});
  ASSERT_TRUE(w.Save(4));
  EXPECT_EQ(w.Nvme(), (Steps{3, 4}));
  hang_to = 20;
  for (Step step = 5; step <= 12; ++step) {
    ASSERT_TRUE(w.Save(step));
    w.h.Feed(DrainStalled{flushes.back(), true, "no progress for 60 s"});
  }
  EXPECT_EQ(flushes.size(), 8u) << "as many as may be under way in all";
  w.h.PerformDelayed();
  const Steps there = w.Nvme();
  EXPECT_EQ(there.front(), 1u);
  EXPECT_EQ(there.back(), 12u) << "and those that hung are written when they get on";
}

TEST(Flush, RemoteCopiesCountWithTheirManifestOnly) {
  TierWorld w;
  w.h.delay = [](const Action& a) { return std::holds_alternative<PublishManifest>(a); };
  ASSERT_TRUE(w.Save(1));
  EXPECT_EQ(w.Remote(), Steps{1});
  EXPECT_EQ(w.Protection(), (Steps{1, 1, 0, 0, 0}));
  EXPECT_FALSE(w.Reached(1, v1::AwaitSave::STAGE_REMOTE));
  w.h.PerformDelayed();
  EXPECT_EQ(w.Protection(), (Steps{1, 1, 1, 1, 1}));
}

// Whoever asks late hears when it was, not when the answer was given.
TEST(Flush, AStageIsToldWithTheTimeWhenItWasReached) {
  TierWorld w(2);
  const auto asked = [&w](v1::AwaitSave::Stage stage) {
    return w.ranks[0].Call(TestClient::AwaitFrame(1, stage)).await_save().unix_ms();
  };
  ASSERT_TRUE(w.Save(1));
  const int64_t nvme = asked(v1::AwaitSave::STAGE_NVME);
  const int64_t remote = asked(v1::AwaitSave::STAGE_REMOTE);
  const int64_t committed = asked(v1::AwaitSave::STAGE_COMMITTED);
  EXPECT_GT(committed, 0);
  EXPECT_LE(committed, nvme);
  EXPECT_LE(nvme, remote);
  w.h.Advance(seconds(100));
  EXPECT_EQ(asked(v1::AwaitSave::STAGE_NVME), nvme);
  EXPECT_EQ(asked(v1::AwaitSave::STAGE_REMOTE), remote);
  EXPECT_EQ(asked(v1::AwaitSave::STAGE_COMMITTED), committed);
}

TEST(Flush, ATierThatIsWholeLaterIsToldWithThatTime) {
  TierWorld w;
  w.h.delay = [](const Action& a) { return std::holds_alternative<PublishManifest>(a); };
  ASSERT_TRUE(w.Save(1));
  const uint64_t waiting =
      w.ranks[0].Send(TestClient::AwaitFrame(1, v1::AwaitSave::STAGE_REMOTE, 3'600'000));
  w.h.Advance(seconds(100));
  w.h.PerformDelayed();
  const auto answer = w.ranks[0].Take(waiting);
  ASSERT_TRUE(answer);
  const int64_t remote = answer->frame.await_save().unix_ms();
  const v1::DaemonFrame nvme =
      w.ranks[0].Call(TestClient::AwaitFrame(1, v1::AwaitSave::STAGE_NVME));
  EXPECT_EQ(remote - nvme.await_save().unix_ms(), 100'000);
}

// Not before a state that says so outlives a loss of power: then the tier may be unreadable.
TEST(Flush, ThatAStepIsWholeInATierIsToldWhenTheStateThatSaysSoIsOnDisk) {
  TierWorld w;
  w.h.delay = [](const Action& a) {
    const auto* write = std::get_if<WriteJobState>(&a);
    return write != nullptr && write->on_disk;
  };
  ASSERT_TRUE(w.Save(1));
  const v1::DaemonFrame committed =
      w.ranks[0].Call(TestClient::AwaitFrame(1, v1::AwaitSave::STAGE_COMMITTED));
  EXPECT_FALSE(committed.has_failure()) << "what memory has needs no disk";
  const uint64_t nvme =
      w.ranks[0].Send(TestClient::AwaitFrame(1, v1::AwaitSave::STAGE_NVME, 3'600'000));
  EXPECT_FALSE(w.ranks[0].Take(nvme));
  w.h.PerformDelayed();
  EXPECT_TRUE(w.ranks[0].Take(nvme));
}

TEST(Flush, WhatADaemonFindsInATierIsToldWithoutATime) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  const int64_t committed = w.ranks[0]
                                .Call(TestClient::AwaitFrame(1, v1::AwaitSave::STAGE_COMMITTED))
                                .await_save()
                                .unix_ms();
  w.RestartDaemon();
  w.ranks[0] = w.h.Connect(w.ranks[0].process().pid);
  const v1::DaemonFrame joined =
      w.ranks[0].Call(TestClient::JoinFrame("job", 0, 1, 1000, "", /*attempt=*/1));
  ASSERT_FALSE(joined.has_failure()) << joined.ShortDebugString();
  for (const auto stage : {v1::AwaitSave::STAGE_NVME, v1::AwaitSave::STAGE_REMOTE}) {
    const v1::DaemonFrame frame = w.ranks[0].Call(TestClient::AwaitFrame(1, stage));
    EXPECT_EQ(frame.await_save().stage(), stage) << frame.ShortDebugString();
    EXPECT_EQ(frame.await_save().unix_ms(), 0);
  }
  EXPECT_EQ(w.ranks[0]
                .Call(TestClient::AwaitFrame(1, v1::AwaitSave::STAGE_COMMITTED))
                .await_save()
                .unix_ms(),
            committed)
      << "the records tell";
}

TEST(Flush, PolicyByStepsAndByTime) {
  TierWorld w(1, [](v1::DaemonConfig& c) {
    c.mutable_policy()->mutable_nvme()->set_every_steps(3);
    c.mutable_policy()->mutable_nvme()->set_keep_last(100);
    c.mutable_policy()->mutable_remote()->set_every_steps(0);
    c.mutable_policy()->mutable_remote()->set_every_ms(60'000);
    c.mutable_policy()->mutable_remote()->set_keep_last(100);
  });
  for (Step step = 1; step <= 10; ++step) {
    ASSERT_TRUE(w.Save(step));
    w.h.Advance(seconds(25));
  }
  EXPECT_EQ(w.Nvme(), (Steps{1, 3, 6, 9}));
  EXPECT_EQ(w.Remote(), (Steps{1, 4, 7, 10}));
  const v1::Failure no = w.Await(10, v1::AwaitSave::STAGE_NVME);
  EXPECT_EQ(no.code(), static_cast<int>(absl::StatusCode::kFailedPrecondition));
  EXPECT_NE(no.message().find("the first of each 3 steps"), std::string::npos) << no.message();
}

TEST(Flush, TheNewestStepGoesToNvmeWhenTheLastRankHasLeft) {
  TierWorld w(
      2, [](v1::DaemonConfig& c) { c.mutable_policy()->mutable_nvme()->set_every_steps(100); });
  for (Step step = 1; step <= 3; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  ASSERT_EQ(w.Nvme(), Steps{1});
  v1::ClientFrame leave;
  leave.mutable_leave();
  w.ranks[0].Call(leave);
  EXPECT_EQ(w.Nvme(), Steps{1}) << "the other one may go on";
  w.ranks[1].Call(leave);
  EXPECT_EQ(w.Nvme(), (Steps{1, 3}));
}

// Nobody tells when others have made room.
TEST(Flush, AFullTierIsTriedAgainWithinTenSeconds) {
  TierWorld w(1);
  w.FailFlushes(TierKind::kNvme, absl::ResourceExhaustedError("No space left on device"));
  ASSERT_TRUE(w.Save(1));
  w.h.Advance(seconds(95));
  ASSERT_TRUE(w.Nvme().empty());
  const v1::Failure late = w.Await(1, v1::AwaitSave::STAGE_NVME);
  EXPECT_NE(late.message().find("No space left on device"), std::string::npos) << late.message();
  w.h.fail = nullptr;
  w.h.Advance(seconds(10));
  EXPECT_EQ(w.Nvme(), Steps{1});
}

TEST(Flush, SavesThatOvertakeASlowTierShedWhatWaitsAndGoOn) {
  for (const uint32_t slots : {2u, 3u}) {
    TierWorld w(2, [&](v1::DaemonConfig& c) { c.mutable_memory()->set_slots_per_rank(slots); });
    for (int round = 0; round < 5; ++round) {
      w.DelayFlushes();
      for (Step step = 1; step <= 6; ++step) {
        ASSERT_TRUE(w.Save(static_cast<Step>(round) * 10 + step));
        ASSERT_TRUE(w.ranks[0].Committed(static_cast<Step>(round) * 10 + step));
      }
      // At most two under way, one waits.
      EXPECT_LE(w.Delayed<FlushShard>(), 4u);
      w.h.PerformDelayed();
      ASSERT_FALSE(w.Nvme().empty()) << slots;
      EXPECT_GT(w.Nvme().back(), static_cast<Step>(round) * 10) << "it commits there again";
      EXPECT_GT(w.Manifests().back(), static_cast<Step>(round) * 10);
    }
    EXPECT_GT(w.h.CountReports(Report::Kind::kTierShed), 0u);
    EXPECT_TRUE(w.Reported("does not go to nvme")) << "it says what it shed";
  }
}

TEST(Flush, WithThreeSlotsOneFlushIsLetFinish) {
  TierWorld w(1,
              [](v1::DaemonConfig& c) { c.mutable_policy()->mutable_nvme()->set_keep_last(10); });
  w.DelayFlushes(TierKind::kNvme);
  for (Step step = 1; step <= 9; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  EXPECT_EQ(w.Delayed<FlushShard>([](const FlushShard& f) { return f.key.id.step == 1; }), 1u)
      << "the first one was never given up";
  w.h.PerformDelayed();
  EXPECT_EQ(w.Nvme().front(), 1u);
}

// Invariant 13: also where the budget is what gives two slots.
TEST(Flush, AFlushYieldsWhenTheJobCouldNotSaveOtherwise) {
  CoreHarness* harness = nullptr;
  TierWorld w(2);
  harness = &w.h;
  harness->bytes_max = 4 * kSlot;
  w.EndAll();
  harness->Restart();
  w.Restore();
  w.DelayFlushes();
  for (Step step = 1; step <= 8; ++step) {
    ASSERT_TRUE(w.Save(step));
    ASSERT_TRUE(w.ranks[0].Committed(step));
  }
  EXPECT_TRUE(w.Reported("which was on its way to another tier"));
}

TEST(Flush, ASlotThatIsReadByAFlushIsNotFilledBeforeThatHasEnded) {
  TierWorld w(1, [](v1::DaemonConfig& c) { c.mutable_memory()->set_slots_per_rank(2); });
  std::vector<Action> cancels;
  w.h.delay = [&](const Action& a) {  // the runtime is slow to let go
    return std::holds_alternative<FlushShard>(a) || std::holds_alternative<CancelDrain>(a);
  };
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  TestClient& rank = w.ranks[0];
  const uint64_t begun = rank.Send(TestClient::BeginFrame(3, kSlot, 5000));
  EXPECT_FALSE(rank.Take(begun)) << "the flush still reads the only slot that could be had";
  w.h.delay = nullptr;
  std::vector<Action> delayed;
  delayed.swap(w.h.delayed);
  for (const Action& action : delayed) {
    if (const auto* flush = std::get_if<FlushShard>(&action);
        flush != nullptr && flush->key.id.step == 1) {
      w.h.Feed(FlushEnded{flush->drain, absl::CancelledError("as asked"), false, {}});
    }
  }
  const auto granted = rank.Take(begun);
  ASSERT_TRUE(granted);
  EXPECT_FALSE(granted->frame.has_failure()) << granted->frame.failure().message();
}

// Others may have filled it: to remove our steps would not help, and would cost us.
// Of older steps only, and of a tier with a budget of its own not even those.
TEST(Flush, AFullRemoteFileSystemIsANeedForRoom) {
  for (const int error : {ENOSPC, EDQUOT, EIO}) {
    for (const uint64_t budget : {uint64_t{0}, uint64_t{1} << 40}) {
      TierWorld w(1, [&](v1::DaemonConfig& c) {
        c.mutable_policy()->mutable_remote()->set_keep_last(3);
        c.mutable_remote()->set_bytes_max(budget);
      });
      for (Step step = 1; step <= 3; ++step) {
        ASSERT_TRUE(w.Save(step));
      }
      ASSERT_EQ(w.Manifests(), (Steps{1, 2, 3}));
      w.FailFlushes(TierKind::kRemote, ErrnoStatus(error, "write", "/remote/x"));
      ASSERT_TRUE(w.Save(4));
      w.h.Advance(minutes(30));
      EXPECT_EQ(w.Manifests(), budget == 0 && error != EIO ? Steps{3} : (Steps{1, 2, 3}))
          << error << " " << budget;
    }
  }
}

TEST(Flush, ADriveIsEmptiedWhenItIsFullAndNotForWantOfDescriptors) {
  for (const auto& [error, emptied] : {std::pair{EMFILE, false}, std::pair{ENOSPC, true}}) {
    TierWorld w(1,
                [](v1::DaemonConfig& c) { c.mutable_policy()->mutable_nvme()->set_keep_last(3); });
    for (Step step = 1; step <= 3; ++step) {
      ASSERT_TRUE(w.Save(step));
    }
    w.FailFlushes(TierKind::kNvme, ErrnoStatus(error, "open", "/nvme0/x"));
    ASSERT_TRUE(w.Save(4));
    w.h.Advance(seconds(30));
    EXPECT_EQ(w.Nvme().front() > 1, emptied) << error;
  }
}

TEST(Flush, WhatLacksOnlyItsManifestIsNotPushedAside) {
  TierWorld w;
  w.h.fail = [](const Action& a) {
    return std::holds_alternative<PublishManifest>(a) ? absl::UnavailableError("EIO")
                                                      : absl::OkStatus();
  };
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  EXPECT_TRUE(w.Manifests().empty());
  w.h.fail = nullptr;
  w.h.Advance(seconds(120));
  EXPECT_FALSE(w.Manifests().empty());
  EXPECT_EQ(w.Remote(), w.Manifests()) << "nothing lies there that no manifest names";
}

TEST(Flush, AfterARestartTheManifestComesBeforeOlderSteps) {
  TierWorld w(1, [](v1::DaemonConfig& c) {
    c.mutable_policy()->mutable_nvme()->set_keep_last(3);
    c.mutable_policy()->mutable_remote()->set_keep_last(3);
  });
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  w.h.nvme.copies.erase(w.Shard(2));
  w.h.remote.copies.erase(w.Shard(1));
  w.h.remote.manifests.clear();
  w.Reboot();
  EXPECT_EQ(w.Manifests(), Steps{2});
  EXPECT_EQ(w.Restore().step, 2u);
}

TEST(Flush, FailuresAreSaidTriedAgainAndOver) {
  std::vector<absl::Status> faults = {
      absl::UnavailableError("its mount went away, or another one lies over it"),
      absl::DeadlineExceededError("no progress for 60 s")};
  for (const int error : {EIO, ENOSPC, EROFS, EDQUOT, ESTALE, EACCES, EMFILE}) {
    faults.push_back(ErrnoStatus(error, "write", "/x/image"));
  }
  for (const TierKind tier : {TierKind::kNvme, TierKind::kRemote}) {
    for (const absl::Status& fault : faults) {
      TierWorld w(2);
      const std::string name(TierName(tier));
      w.FailFlushes(tier, fault);
      for (Step step = 1; step <= 4; ++step) {
        ASSERT_TRUE(w.Save(step));
        ASSERT_TRUE(w.ranks[0].Committed(step));
        w.h.Advance(seconds(5));
      }
      EXPECT_NE(w.Tier(name).problem().find(std::string(fault.message())), std::string::npos);
      EXPECT_TRUE(tier == TierKind::kNvme ? w.Nvme().empty() : w.Manifests().empty());
      EXPECT_FALSE(tier == TierKind::kNvme ? w.Manifests().empty() : w.Nvme().empty())
          << "the other tier goes on";
      const size_t reports = w.h.CountReports(Report::Kind::kTierTrouble);
      EXPECT_LE(reports, 8u) << "said once for each step";
      w.h.fail = nullptr;
      w.h.Advance(minutes(2));
      EXPECT_EQ(w.Nvme().back(), 4u) << "by itself, after " << fault;
      EXPECT_EQ(w.Manifests().back(), 4u) << fault;
      EXPECT_EQ(w.Tier(name).problem(), "");
    }
  }
}

TEST(Flush, AFailedManifestIsPublishedLater) {
  TierWorld w;
  w.h.fail = [](const Action& a) {
    return std::holds_alternative<PublishManifest>(a) ? absl::UnavailableError("ESTALE")
                                                      : absl::OkStatus();
  };
  ASSERT_TRUE(w.Save(1));
  EXPECT_EQ(w.Remote(), Steps{1});
  EXPECT_TRUE(w.Manifests().empty());
  w.h.fail = nullptr;
  w.h.Advance(seconds(2));
  EXPECT_EQ(w.Manifests(), Steps{1});
}

// What waits for others is not waked for: a past time to wake at would keep the daemon busy.
TEST(Flush, NothingSpinsWhileTriesWaitForTheirTurn) {
  TierWorld w(1, [](v1::DaemonConfig& c) { c.mutable_memory()->set_slots_per_rank(6); });
  w.FailFlushes(TierKind::kNvme, absl::UnavailableError("EIO"));
  ASSERT_TRUE(w.Save(1));
  w.h.fail = nullptr;
  w.DelayFlushes();
  w.h.Advance(seconds(1));
  ASSERT_TRUE(w.Save(2));
  w.FailFlushes(TierKind::kNvme, absl::UnavailableError("EIO"));
  ASSERT_TRUE(w.Save(3));
  ASSERT_TRUE(w.Save(4));
  w.h.Advance(minutes(10));
  EXPECT_TRUE(!w.h.timer || *w.h.timer > w.h.now);
}

TEST(Flush, AStepLargerThanTheBudgetCostsNoOther) {
  TierWorld w(1,
              [](v1::DaemonConfig& c) { c.mutable_policy()->mutable_remote()->set_keep_last(9); });
  for (Step step = 1; step <= 3; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  w.EndAll();
  w.h.config.mutable_remote()->set_bytes_max(kSlot / 4);  // half of an image
  w.h.Restart();
  ASSERT_EQ(w.Restore().step, 3u);
  ASSERT_TRUE(w.Save(4));
  EXPECT_EQ(w.Remote(), (Steps{1, 2, 3})) << "nothing that goes would help";
  EXPECT_NE(w.Tier("remote").problem().find("more than all of remote.bytes_max"), std::string::npos)
      << w.Tier("remote").problem();
}

TEST(Flush, AFullBudgetSaysWhoHoldsItAndWhatToDo) {
  TierWorld w(1, [](v1::DaemonConfig& c) {
    c.mutable_remote()->set_bytes_max(kSlot / 4 * 3);  // an image and a half
  });
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  ASSERT_EQ(w.Manifests(), Steps{1}) << "the only one that is there stays";
  const std::string problem = w.Tier("remote").problem();
  EXPECT_NE(problem.find("; of your jobs 'job' holds "), std::string::npos) << problem;
  EXPECT_NE(problem.find("; ckptctl gc --dry-run shows"), std::string::npos) << problem;
}

// "job" of one user has ended; another user's job finds no room for its second step.
void FillWithAnotherJob(TierWorld& w) {
  ASSERT_TRUE(w.Save(1));
  for (const TestClient& rank : w.ranks) {
    w.h.Kill(rank);
  }
  w.ranks.clear();
  TestClient other = w.h.Connect(900, 2000);
  ASSERT_TRUE(other.Join("other", 0, 1));
  ASSERT_TRUE(other.Save(1));
  ASSERT_TRUE(other.Save(2));
  for (int i = 0; i < 20; ++i) {
    w.h.Advance(seconds(10));
  }
}

TEST(Flush, AnEndedJobGivesItsRoomInNvmeIfRemoteHasItsStep) {
  for (const bool in_remote : {true, false}) {
    TierWorld w(1, [&](v1::DaemonConfig& c) {
      c.mutable_nvme()->set_keep_ended_ms(0);
      if (!in_remote) {
        c.mutable_policy()->mutable_remote()->set_every_steps(0);
      }
    });
    w.h.nvme_bytes_max = kSlot;  // two images
    w.h.Restart();
    w.Restore();
    const ShardId ended = w.Shard(1, 0, 2);
    FillWithAnotherJob(w);
    EXPECT_EQ(w.h.nvme.copies.count(ended), in_remote ? 0u : 1u);
    EXPECT_EQ(w.Reported("step 2 of attempt 1 is whole in nvme"), in_remote);
  }
}

TEST(Flush, AnEndedJobsLastStepStaysForItsTime) {
  for (const uint64_t keep_ms : {0, 3600'000, 60'000}) {
    TierWorld w(1, [&](v1::DaemonConfig& c) {
      c.mutable_nvme()->set_keep_ended_ms(keep_ms);
      c.mutable_policy()->mutable_remote()->set_every_steps(0);
    });
    w.h.nvme_bytes_max = kSlot;
    w.h.Restart();
    w.Restore();
    const ShardId ended = w.Shard(1, 0, 2);
    FillWithAnotherJob(w);
    EXPECT_EQ(w.h.nvme.copies.count(ended), keep_ms == 60'000 ? 0u : 1u) << keep_ms;
  }
}

// Files that are kept to be overwritten have their part of nvme.bytes_max: the number is not the
// one that was set.
TEST(Flush, OfNvmeItIsSaidThatItsBudgetIsWhatIsLeftForCopies) {
  TierWorld w;
  w.EndAll();
  w.h.nvme_bytes_max = kSlot / 4;
  w.h.Restart();
  w.Restore();
  ASSERT_TRUE(w.Save(1));
  EXPECT_NE(w.Tier("nvme").problem().find(
                absl::StrCat("more than the ", FormatBytes(kSlot / 4),
                             " that nvme.bytes_max leaves for copies; raise it")),
            std::string::npos)
      << w.Tier("nvme").problem();
}

TEST(Flush, AStalledTierHoldsUpNothingElse) {
  TierWorld w(2);
  w.DelayFlushes(TierKind::kNvme);
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  EXPECT_TRUE(w.Manifests().empty()) << "remote waits for nvme";
  std::vector<DrainId> hung;
  for (const Action& action : w.h.delayed) {
    hung.push_back(std::get<FlushShard>(action).drain);
  }
  ASSERT_EQ(hung.size(), 4u);
  for (const DrainId drain : hung) {
    w.h.Feed(DrainStalled{drain, true, "no progress for 60 s"});
  }
  EXPECT_EQ(w.Manifests().back(), 2u) << "and takes it from memory when that hangs";
  EXPECT_EQ(w.Tier("nvme").problem(), "no progress for 60 s");
  EXPECT_TRUE(w.Tier("nvme").flushing(0).stalled());
  for (Step step = 3; step <= 6; ++step) {
    ASSERT_TRUE(w.Save(step));
    EXPECT_EQ(w.Manifests().back(), step) << "also what only waits for nvme's turn";
  }
  EXPECT_EQ(w.h.Daemon().tiers(0).state(), "no progress for 60 s");
  // One of two shards goes on: the step is stalled still.
  w.h.Feed(DrainStalled{hung[0], false, ""});
  EXPECT_TRUE(w.Tier("nvme").flushing(0).stalled());
  w.h.PerformDelayed();
  EXPECT_EQ(w.Nvme().back(), 6u);
  EXPECT_EQ(w.Tier("nvme").problem(), "");
}

TEST(Flush, ADriveThatHangsWhileItIsReadIsLeftForMemory) {
  TierWorld w(2);
  w.DelayFlushes(TierKind::kRemote);
  ASSERT_TRUE(w.Save(1));
  ASSERT_EQ(w.Nvme(), Steps{1});
  std::vector<DrainId> hung;
  for (const Action& action : w.h.delayed) {
    EXPECT_EQ(std::get<FlushShard>(action).from, TierKind::kNvme);
    hung.push_back(std::get<FlushShard>(action).drain);
  }
  ASSERT_EQ(hung.size(), 2u);
  std::vector<TierKind> from;
  w.h.delay = nullptr;
  w.h.fail = [&](const Action& action) {
    if (const auto* flush = std::get_if<FlushShard>(&action); flush != nullptr) {
      from.push_back(flush->from);
    }
    return absl::OkStatus();
  };
  for (const DrainId drain : hung) {
    w.h.Feed(DrainStalled{drain, true, "no progress for 60 s: read '/nvme0/image'", true});
  }
  w.h.Advance(minutes(1));
  EXPECT_EQ(from, (std::vector<TierKind>{TierKind::kMemory, TierKind::kMemory}));
  EXPECT_EQ(w.Manifests(), Steps{1});
  EXPECT_TRUE(w.Reported("no progress for 60 s: read '/nvme0/image'"));
  // From the drive again, once that answers.
  from.clear();
  ASSERT_TRUE(w.Save(2));
  EXPECT_EQ(from.back(), TierKind::kNvme);
}

// Cancelled while it hung, and published when the mount answered again.
TEST(Flush, ACopyThatIsPublishedLateIsKnown) {
  TierWorld w;
  w.DelayFlushes(TierKind::kRemote);
  ASSERT_TRUE(w.Save(1));
  ASSERT_EQ(w.h.delayed.size(), 1u);
  const auto flush = std::get<FlushShard>(w.h.delayed[0]);
  FlushEnded late{flush.drain, absl::OkStatus(), false, w.h.nvme.copies.at(w.Shard(1))};
  w.h.fail = [](const Action& a) {
    return std::holds_alternative<FlushShard>(a) ? absl::UnavailableError("ESTALE")
                                                 : absl::OkStatus();
  };
  w.h.Feed(FlushEnded{flush.drain, absl::CancelledError("as asked"), false, {}});
  w.h.delayed.clear();
  w.h.Feed(late);
  v1::WhereRequest where;
  where.set_job("job");
  where.set_step(1);
  const auto reply = w.h.Admin<v1::WhereReply>(where);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(std::any_of(reply->copies().begin(), reply->copies().end(),
                          [](const auto& copy) { return copy.tier() == "remote"; }));
}

TEST(Flush, WhatHangsInRemoteIsLeftToEnd) {
  TierWorld w;
  w.DelayFlushes(TierKind::kRemote);
  ASSERT_TRUE(w.Save(1));
  ASSERT_EQ(w.h.delayed.size(), 1u);
  const DrainId drain = std::get<FlushShard>(w.h.delayed[0]).drain;
  w.h.Feed(DrainStalled{drain, true, "no progress for 60 s: write '/remote/image'"});
  EXPECT_EQ(w.Tier("remote").flushing_size(), 1);
  EXPECT_TRUE(w.Manifests().empty());
  w.h.PerformDelayed();
  EXPECT_EQ(w.Manifests(), Steps{1});
}

TEST(Flush, RemoteIsNotFedFromNvmeWhileThatHangs) {
  TierWorld w(1, [](v1::DaemonConfig& c) {
    c.mutable_policy()->mutable_remote()->set_every_steps(10);  // only the first
    c.mutable_policy()->mutable_remote()->set_every_ms(0);
  });
  w.DelayFlushes(TierKind::kRemote);
  ASSERT_TRUE(w.Save(1));
  ASSERT_EQ(w.Nvme(), Steps{1});
  ASSERT_EQ(w.Delayed<FlushShard>(), 1u);
  const auto first = std::get<FlushShard>(w.h.delayed[0]);
  ASSERT_EQ(first.from, TierKind::kNvme);
  w.DelayFlushes(TierKind::kNvme);
  ASSERT_TRUE(w.Save(2));
  ASSERT_EQ(w.Delayed<FlushShard>(), 2u);
  w.h.Feed(DrainStalled{std::get<FlushShard>(w.h.delayed[1]).drain, true, "no progress for 60 s"});
  std::vector<TierKind> from;
  w.h.fail = [&](const Action& action) {
    if (const auto* flush = std::get_if<FlushShard>(&action);
        flush != nullptr && flush->to == TierKind::kRemote) {
      from.push_back(flush->from);
    }
    return absl::OkStatus();
  };
  w.h.delayed.erase(w.h.delayed.begin());
  w.h.Feed(FlushEnded{first.drain, absl::UnavailableError("ESTALE"), false, {}});
  w.h.Advance(minutes(2));
  EXPECT_EQ(from, std::vector<TierKind>{TierKind::kMemory});
  EXPECT_EQ(w.Manifests(), Steps{1});
}

TEST(Flush, ASourceThatIsBadIsNotPublishedAndNotUsedAgain) {
  TierWorld w;
  w.h.delay = [](const Action& a) { return std::holds_alternative<FlushShard>(a); };
  ASSERT_TRUE(w.Save(1));
  const auto flush = std::get<FlushShard>(w.h.delayed.at(0));
  w.h.delayed.clear();
  w.h.delay = nullptr;
  w.h.Feed(FlushEnded{flush.drain, absl::DataLossError("digests differ"), true, {}});
  EXPECT_TRUE(w.Nvme().empty());
  EXPECT_TRUE(w.Remote().empty());
  EXPECT_TRUE(w.h.Committed("job").empty()) << "its only copy is bad";
  ASSERT_TRUE(w.Save(2));
  EXPECT_EQ(w.Nvme(), Steps{2});
}

TEST(Flush, ABadNvmeCopyIsNotCopiedOn) {
  TierWorld w;
  w.DelayFlushes(TierKind::kRemote);
  ASSERT_TRUE(w.Save(1));
  w.h.nvme.damaged.insert(w.Shard(1));
  w.h.PerformDelayed();
  EXPECT_TRUE(w.Manifests().empty());
  w.h.Advance(seconds(5));
  EXPECT_EQ(w.Manifests(), Steps{1}) << "from memory";
  EXPECT_EQ(w.Protection()[1], 1u) << "remote";
}

TEST(Flush, TheBudgetIsReservedBeforeTheFirstByte) {
  TierWorld w(1, [](v1::DaemonConfig& c) {
    c.mutable_remote()->set_bytes_max(kSlot + kSlot / 4);  // two images and a half
  });
  w.DelayFlushes(TierKind::kRemote);
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  EXPECT_EQ(w.Delayed<FlushShard>(), 2u);
  w.h.PerformDelayed();
  EXPECT_EQ(w.Manifests(), (Steps{1, 2}));
  w.h.delay = [](const Action& a) { return std::holds_alternative<RemoveCopies>(a); };
  ASSERT_TRUE(w.Save(3));
  EXPECT_EQ(w.Remote(), (Steps{1, 2})) << "what is being removed takes its room to the end";
  EXPECT_NE(w.Tier("remote").problem().find("remote.bytes_max"), std::string::npos);
  w.h.PerformDelayed();
  w.h.Advance(seconds(2));
  EXPECT_EQ(w.Manifests(), (Steps{2, 3}));
}

TEST(Flush, AboveTheHighWatermarkOldOnesGo) {
  TierWorld w(1,
              [](v1::DaemonConfig& c) { c.mutable_policy()->mutable_nvme()->set_keep_last(10); });
  w.h.nvme_bytes_max = 5 * kSlot;  // ten images
  w.EndAll();
  w.h.Restart();
  w.Restore();
  // Above the high one (90 % of ten) down to the low one (80 %), and not again with every step.
  std::set<size_t> kept;
  for (Step step = 1; step <= 20; ++step) {
    ASSERT_TRUE(w.Save(step));
    EXPECT_LE(w.Nvme().size(), 9u);
    if (step >= 10) {
      kept.insert(w.Nvme().size());
    }
  }
  EXPECT_EQ(kept, (std::set<size_t>{8, 9}));
  EXPECT_EQ(w.Nvme().back(), 20u);
}

TEST(Flush, AwaitTellsWhatWasShedAndWhatWasRemoved) {
  TierWorld w(1, [](v1::DaemonConfig& c) { c.mutable_memory()->set_slots_per_rank(8); });
  w.DelayFlushes();
  for (Step step = 1; step <= 4; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  const v1::Failure shed = w.Await(3, v1::AwaitSave::STAGE_NVME);
  EXPECT_EQ(shed.reason(), v1::Failure::REASON_SHED);
  EXPECT_NE(shed.message().find("step 4 takes its place"), std::string::npos) << shed.message();
  w.h.PerformDelayed();
  ASSERT_TRUE(w.Save(5));
  ASSERT_TRUE(w.Save(6));
  const v1::Failure gone = w.Await(1, v1::AwaitSave::STAGE_NVME);
  EXPECT_EQ(gone.reason(), v1::Failure::REASON_SHED) << gone.message();
}

TEST(Flush, TwoJobsShareTheTiersAndStayApart) {
  TierWorld w;
  TestClient other = w.h.Connect(5000);
  ASSERT_TRUE(other.Join("other", 0, 1));
  other.Call(TestClient::EnterFrame());
  for (Step step = 1; step <= 3; ++step) {
    ASSERT_TRUE(w.Save(step));
    ASSERT_TRUE(other.Save(step * 100));
  }
  EXPECT_EQ(w.h.nvme.copies.size(), 4u) << "keep_last 2 of each";
  for (const auto& [id, copy] : w.h.nvme.copies) {
    EXPECT_EQ(copy.copy.job_name, id.step >= 100 ? "other" : "job");
  }
}

TEST(Flush, ASupersededAttemptsStepStillArrives) {
  TierWorld w(2);
  w.DelayFlushes();
  ASSERT_TRUE(w.Save(1));
  EXPECT_EQ(w.Restore().step, 1u);
  w.h.PerformDelayed();
  EXPECT_EQ(w.Nvme(), Steps{1});
  EXPECT_EQ(w.Manifests(), Steps{1});
}

TEST(Flush, ADaemonThatDiesInAnyPhaseLosesNothingAndCountsNothingPartial) {
  struct Case {
    const char* phase;
    std::function<bool(const Action&)> delay;
  };
  int seen = 0;
  const Case cases[] = {
      {"all flushes", [](const Action& a) { return std::holds_alternative<FlushShard>(a); }},
      {"one shard of two",
       [&](const Action& a) { return std::holds_alternative<FlushShard>(a) && ++seen % 2 == 0; }},
      {"remote",
       [](const Action& a) {
         const auto* flush = std::get_if<FlushShard>(&a);
         return flush != nullptr && flush->to == TierKind::kRemote;
       }},
      {"manifest", [](const Action& a) { return std::holds_alternative<PublishManifest>(a); }}};
  for (const Case& one : cases) {
    TierWorld w(2);
    w.h.delay = one.delay;
    ASSERT_TRUE(w.Save(1));
    w.h.delay = nullptr;
    EXPECT_EQ(w.Protection()[4], 0u) << one.phase;
    w.RestartDaemon();
    EXPECT_EQ(w.Nvme(), Steps{1}) << one.phase << ": it goes on by itself";
    EXPECT_EQ(w.Manifests(), Steps{1}) << one.phase;
    EXPECT_EQ(w.Protection(), (Steps{1, 1, 1, 1, 1})) << one.phase;
  }
}

TEST(Flush, AManifestIsStillPublishedWhenOnlyTheRemoteCopiesAreLeft) {
  TierWorld w(2);
  w.h.delay = [](const Action& a) { return std::holds_alternative<PublishManifest>(a); };
  ASSERT_TRUE(w.Save(1));
  w.h.delay = nullptr;
  w.h.nvme.Wipe();
  w.Reboot();
  EXPECT_EQ(w.Manifests(), Steps{1});
  const Restored got = w.Restore();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 1u);
  EXPECT_EQ(got.tiers, (std::vector<std::string>{"remote", "remote"}));
}

TEST(Flush, PartOfAStepIsNeverACandidate) {
  TierWorld w(2);
  ASSERT_TRUE(w.Save(1));
  w.h.delay = [&](const Action& a) {  // rank 1 gets nowhere
    const auto* flush = std::get_if<FlushShard>(&a);
    return flush != nullptr && flush->key.id.rank == 1;
  };
  ASSERT_TRUE(w.Save(2));
  w.h.delay = nullptr;
  w.Reboot();
  const Restored got = w.Restore();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 1u);
}

TEST(Flush, WhatIsGivenUpInMemoryIsNotCountedWhenItEndsInTheMiddle) {
  TierWorld w(2, [](v1::DaemonConfig& c) { c.mutable_memory()->set_slots_per_rank(2); });
  int flushes = 0;
  w.h.delay = [&](const Action& a) {  // only the first one of each step is performed
    return std::holds_alternative<FlushShard>(a) && ++flushes > 1;
  };
  ASSERT_TRUE(w.Save(1));
  for (Step step = 2; step <= 4; ++step) {
    ASSERT_TRUE(w.Save(step));
    ASSERT_TRUE(w.ranks[1].Committed(step));
  }
  EXPECT_EQ(w.Protection()[1], 0u) << "half of step 1";
  EXPECT_EQ(w.Protection()[0], 4u);
  w.h.PerformDelayed();
  w.h.Advance(seconds(5));
  EXPECT_EQ(w.Protection()[1], 4u);
  for (const auto& [id, copy] : w.h.nvme.copies) {
    EXPECT_GE(id.step, 3u) << "the half is removed";
  }
}

}  // namespace
}  // namespace holdfast::testing
