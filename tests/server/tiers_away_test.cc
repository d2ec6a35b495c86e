// Drives and mounts that go away while the daemon runs, and come back (docs/protocol.md §10).
#include <gtest/gtest.h>

#include "tests/server/tier_world.h"

namespace holdfast::testing {
namespace {

using std::chrono::minutes;
using std::chrono::seconds;
using Steps = std::vector<Step>;

v1::RemoveCheckpointRequest ByForce(Step step, const std::string& tier) {
  v1::RemoveCheckpointRequest request;
  request.set_job("job");
  request.set_step(step);
  request.set_tier(tier);
  request.set_force(true);
  return request;
}

TEST(Away, WhatLiesThereDoesNotCountUntilItIsBack) {
  TierWorld w(2);
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  // If a process ends, the node reboots, is lost, its failure domain is, all nodes are.
  ASSERT_EQ(w.Protection(), (Steps{2, 2, 2, 2, 2}));
  w.h.remote.scan = absl::UnavailableError("'/remote' is away");
  w.h.Feed(TierAway{TierKind::kRemote, "/remote", w.h.remote.scan});
  EXPECT_EQ(w.Protection(), (Steps{2, 2, 0, 0, 0}));
  EXPECT_NE(w.Tier("remote").problem().find("'/remote' is away"), std::string::npos);
  w.h.nvme.scan = absl::UnavailableError("'/nvme0' is away");
  w.h.Feed(TierAway{TierKind::kNvme, "/nvme0", w.h.nvme.scan});
  EXPECT_EQ(w.Protection(), (Steps{2, 0, 0, 0, 0}));
  EXPECT_EQ(w.h.Daemon().tiers(0).bytes_used(), 2 * kSlot) << "it is there, and takes its room";
  EXPECT_EQ(w.h.Daemon().tiers(1).bytes_used(), 2 * kSlot);
  w.h.Advance(minutes(2));
  EXPECT_EQ(w.Protection(), (Steps{2, 0, 0, 0, 0}));
  w.h.nvme.scan = w.h.remote.scan = absl::OkStatus();
  w.h.Advance(minutes(1));
  EXPECT_EQ(w.Protection(), (Steps{2, 2, 2, 2, 2}));
  EXPECT_EQ(w.h.Daemon().tiers(0).bytes_used(), 2 * kSlot);
  EXPECT_EQ(w.h.Daemon().tiers(1).bytes_used(), 2 * kSlot);
  EXPECT_EQ(w.Tier("remote").problem(), "");
}

TEST(Away, WhileAManifestIsBeingPublishedNothingIsCalledWhole) {
  TierWorld w(1, [](v1::DaemonConfig& c) { c.mutable_nvme()->clear_dirs(); });
  w.h.delay = [](const Action& a) { return std::holds_alternative<PublishManifest>(a); };
  ASSERT_TRUE(w.Save(1));
  ASSERT_EQ(w.Delayed<PublishManifest>(), 1u);
  w.h.delay = nullptr;
  w.h.remote.scan = absl::UnavailableError("'/remote' is away");
  w.h.Feed(TierAway{TierKind::kRemote, "/remote", w.h.remote.scan});
  w.EndAll();
  w.h.PerformDelayed();
  EXPECT_FALSE(w.Reported("is whole in remote"));
  EXPECT_TRUE(w.Reported("went out of reach meanwhile"));
  EXPECT_EQ(w.Protection(), (Steps{1, 0, 0, 0, 0}));
  w.h.remote.scan = absl::OkStatus();
  w.h.Advance(minutes(1));
  EXPECT_EQ(w.Protection(), (Steps{1, 1, 1, 1, 1}));
}

// Two ranks, each with a drive of its own.
class TwoDrives : public ::testing::Test {
 protected:
  explicit TwoDrives(uint32_t keep_last = 1)
      : w(2, [keep_last](v1::DaemonConfig& c) {
          c.mutable_nvme()->add_dirs("/nvme1");
          c.mutable_policy()->mutable_nvme()->set_keep_last(keep_last);
        }) {}
  void LoseDrive() {
    w.h.failing_drive = "/nvme1";
    w.h.Feed(TierAway{TierKind::kNvme, "/nvme1", absl::UnavailableError("'/nvme1' is away")});
  }
  // What rank 1 has of a step cannot be removed.
  void FailRemovalOf(Step step) {
    w.h.delay = [this, step](const Action& a) {
      const auto* remove = std::get_if<RemoveCopies>(&a);
      const bool it =
          remove != nullptr && remove->tier == TierKind::kNvme && remove->checkpoint.step == step;
      removal = it ? remove->drain : removal;
      return it;
    };
  }
  void EndRemoval() {
    w.h.delayed.clear();
    w.h.Feed(CopiesRemoved{removal, absl::UnavailableError("EIO"), {{Rank{1}}}});
  }
  uint64_t Used() { return w.h.Daemon().tiers(0).bytes_used(); }

  TierWorld w;
  DrainId removal = 0;
};

TEST_F(TwoDrives, WhatLiesOnTheOtherIsNoCandidateAlone) {
  ASSERT_TRUE(w.Save(1));
  LoseDrive();
  EXPECT_EQ(w.Protection(), (Steps{1, 1, 1, 1, 1})) << "remote has it";
  EXPECT_EQ(Used(), kSlot) << "both shards take their room";
  v1::WhereRequest where;
  where.set_job("job");
  where.set_step(1);
  const auto found = w.h.Admin<v1::WhereReply>(where);
  ASSERT_TRUE(found.ok());
  for (const auto& copy : found->copies()) {
    EXPECT_TRUE(copy.tier() != "nvme" || copy.rank() == 0) << copy.ShortDebugString();
  }
  w.h.failing_drive.clear();
  w.h.Advance(seconds(20));
  EXPECT_EQ(Used(), kSlot);
}

TEST_F(TwoDrives, WhatLiesOnTheOtherCanBeVerified) {
  ASSERT_TRUE(w.Save(1));
  LoseDrive();
  v1::VerifyRequest verify;
  verify.set_job("job");
  verify.set_step(1);
  verify.set_tier("nvme");
  const auto listed = w.h.Admin<ListedShards>(verify);
  ASSERT_TRUE(listed.ok()) << listed.status();
  ASSERT_EQ(listed->shards.size(), 1u);
  EXPECT_EQ(listed->shards[0].copy.id.rank, 0u);
  EXPECT_NE(listed->unread.find("'/nvme1' is away"), std::string::npos) << listed->unread;
  verify.set_tier("remote");
  const auto remote = w.h.Admin<ListedShards>(verify);
  ASSERT_TRUE(remote.ok()) << remote.status();
  EXPECT_EQ(remote->unread, "") << "it was not asked for";
  w.h.Feed(TierAway{TierKind::kNvme, "/nvme0", absl::UnavailableError("'/nvme0' is away")});
  verify.set_tier("nvme");
  EXPECT_TRUE(absl::IsUnavailable(w.h.Admin<ListedShards>(verify).status()))
      << "there is nothing left to read";
}

class TwoDrivesKeepTwo : public TwoDrives {
 protected:
  TwoDrivesKeepTwo() : TwoDrives(2) {}
};

TEST_F(TwoDrivesKeepTwo, WhatFailsToGoIsNoRoomThatIsComing) {
  w.EndAll();
  w.h.nvme_bytes_max = 3 * kSlot;
  w.h.Restart(true);
  w.Restore();
  for (Step step = 1; step <= 2; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  FailRemovalOf(1);
  ASSERT_TRUE(w.Save(3));
  ASSERT_NE(removal, 0u);
  EndRemoval();
  ASSERT_EQ(Used(), 5 * kSlot / 2);
  // As much is short as the one that fails has; it is not what makes the room.
  ASSERT_TRUE(w.Save(4));
  w.h.Advance(seconds(5));
  const std::vector<Step> there = w.Nvme();
  EXPECT_EQ(there.back(), 4u);
  EXPECT_EQ(std::count(there.begin(), there.end(), 2u), 0);
}

TEST_F(TwoDrives, ARemovalByForceOfWhatIsSeenInPartFreesThat) {
  ASSERT_TRUE(w.Save(1));
  FailRemovalOf(1);
  LoseDrive();
  v1::RemoveCheckpointRequest rm = ByForce(1, "nvme");
  ASSERT_TRUE(w.h.Admin<v1::RemoveCheckpointReply>(rm).ok());
  ASSERT_NE(removal, 0u);
  EndRemoval();
  EXPECT_EQ(Used(), kSlot / 2) << "what is out of reach, once";
}

TEST_F(TwoDrives, ARebuildThatTheDriveLeavesEnds) {
  ASSERT_TRUE(w.Save(1));
  w.h.delay = [](const Action& a) { return std::holds_alternative<ScanNvme>(a); };
  w.h.Admin<v1::RebuildReply>(v1::RebuildRequest(), 0).IgnoreError();
  w.h.delay = nullptr;
  LoseDrive();
  w.h.failing_drive.clear();
  w.h.PerformDelayed();  // it was read before it went
  EXPECT_NE(w.Tier("nvme").problem().find("'/nvme1' is away"), std::string::npos);
  const auto again = w.h.Admin<v1::RebuildReply>(v1::RebuildRequest(), 0);
  EXPECT_TRUE(again.ok()) << again.status() << ": the first one has ended";
}

// Remote has answered, then goes, and the drives answer last.
TEST(Away, ARebuildDoesNotBringBackWhatWentAfterItWasRead) {
  TierWorld w(1);
  ASSERT_TRUE(w.Save(1));
  w.h.Advance(seconds(1));
  w.h.delay = [](const Action& a) { return std::holds_alternative<ScanNvme>(a); };
  w.h.Admin<v1::RebuildReply>(v1::RebuildRequest(), 0).IgnoreError();
  w.h.delay = nullptr;
  w.h.remote.scan = absl::UnavailableError("'/remote' is away");
  w.h.Feed(TierAway{TierKind::kRemote, "/remote", w.h.remote.scan});
  w.h.PerformDelayed();
  EXPECT_EQ(w.Protection(), (Steps{1, 1, 0, 0, 0}));
  EXPECT_NE(w.Tier("remote").problem().find("'/remote' is away"), std::string::npos);
  w.h.remote.scan = absl::OkStatus();
  w.h.Advance(minutes(1));
  EXPECT_EQ(w.Protection(), (Steps{1, 1, 1, 1, 1}));
}

// It says that it was written, and was begun before the directory went: below which one it lies
// nobody knows.
TEST(Away, AFlushThatEndsAfterItsDirectoryWentDoesNotCount) {
  for (const TierKind tier : {TierKind::kNvme, TierKind::kRemote}) {
    TierWorld w(1);
    const bool nvme = tier == TierKind::kNvme;
    const std::string dir = nvme ? "/nvme0" : "/remote";
    w.h.delay = [&](const Action& a) {
      const auto* flush = std::get_if<FlushShard>(&a);
      return flush != nullptr && flush->to == tier;
    };
    ASSERT_TRUE(w.Save(1));
    ASSERT_EQ(w.Delayed<FlushShard>(), 1u) << dir;
    w.h.delay = nullptr;
    FakeTier& fake = nvme ? w.h.nvme : w.h.remote;
    fake.scan = absl::UnavailableError("it is away");
    w.h.Feed(TierAway{tier, dir, fake.scan});
    w.h.PerformDelayed();  // it ends well
    EXPECT_EQ(fake.copies.size(), 1u);
    EXPECT_FALSE(w.Reported(nvme ? "is whole in nvme" : "is whole in remote")) << dir;
    fake.scan = absl::OkStatus();
    w.h.Advance(minutes(2));
    EXPECT_EQ(w.Protection(), (Steps{1, 1, 1, 1, 1})) << dir;
  }
}

TEST_F(TwoDrives, NothingOlderIsTakenForWhatWasWholeWithTheLostOne) {
  ASSERT_TRUE(w.Save(1));
  // Step 2: of rank 1 in nvme alone, of rank 0 in memory alone.
  w.h.fail = [](const Action& a) {
    const auto* flush = std::get_if<FlushShard>(&a);
    const bool fails = flush != nullptr && flush->key.id.step == 2 &&
                       (flush->to == TierKind::kRemote || flush->key.id.rank == 0);
    return fails ? absl::UnavailableError("EIO") : absl::OkStatus();
  };
  ASSERT_TRUE(w.Save(2));
  ASSERT_EQ(w.h.nvme.copies.count(w.Shard(2, 1)), 1u);
  w.Launch();
  w.Join();
  LoseDrive();
  const Restored refused = w.Enter([](Rank rank, const v1::SessionOutcome& outcome) {
    return rank == 1 && outcome.step() == 2;
  });
  EXPECT_FALSE(refused.done) << "step " << refused.step;
  EXPECT_FALSE(w.Restore().done) << "nor is it then: the drive may have rank 1's";
  w.h.failing_drive.clear();
  w.h.Advance(seconds(20));
  EXPECT_EQ(w.Restore().step, 2u);
}

TEST(Away, ARankThatComesBackHearsThatItsStepIsOutOfReach) {
  TierWorld w(1);
  ASSERT_TRUE(w.Save(1));
  w.Reboot();
  w.h.late_drives = false;
  ASSERT_EQ(w.Restore().step, 1u);
  w.Reboot();
  w.h.nvme.scan = w.h.remote.scan = absl::UnavailableError("ESTALE");
  w.h.Feed(TierAway{TierKind::kNvme, "/nvme0", w.h.nvme.scan});
  w.h.Feed(TierAway{TierKind::kRemote, "/remote", w.h.remote.scan});
  const Restored refused = w.Restore();
  EXPECT_EQ(refused.failure.reason(), v1::Failure::REASON_UNSPECIFIED)
      << refused.failure.ShortDebugString();
  EXPECT_EQ(refused.failure.code(), static_cast<int>(absl::StatusCode::kUnavailable));
}

TEST(Away, NothingOlderIsTakenForTheNewestMeanwhile) {
  TierWorld w(
      1, [](v1::DaemonConfig& c) { c.mutable_policy()->mutable_remote()->set_every_steps(2); });
  for (Step step = 1; step <= 3; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  w.Reboot();
  w.h.nvme.scan = absl::UnavailableError("'/nvme0' is away");
  w.h.Feed(TierAway{TierKind::kNvme, "/nvme0", w.h.nvme.scan});
  EXPECT_FALSE(w.Restore().done) << "remote has step 2 only";
  EXPECT_TRUE(w.Reported("'/nvme0' is away"));
  w.h.nvme.scan = absl::OkStatus();
  w.h.Advance(minutes(1));
  EXPECT_EQ(w.Restore().step, 3u);
}

TEST(Away, AJobOfANewNameStartsAllTheSame) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  w.h.nvme.scan = absl::UnavailableError("'/nvme0' is away");
  w.h.Feed(TierAway{TierKind::kNvme, "/nvme0", w.h.nvme.scan});
  w.name = "another";
  const Restored restored = w.Restore();
  EXPECT_TRUE(w.joined) << w.join_failure.ShortDebugString();
  EXPECT_EQ(restored.failure.reason(), v1::Failure::REASON_NOTHING_TO_RESTORE)
      << restored.failure.ShortDebugString();
  EXPECT_TRUE(w.Save(1));
}

}  // namespace
}  // namespace holdfast::testing
