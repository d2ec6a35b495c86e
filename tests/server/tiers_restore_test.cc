// Where a restore finds its step when copies are lost (docs/protocol.md §6 and §10).
#include <gtest/gtest.h>

#include "tests/server/tier_world.h"

namespace holdfast::testing {
namespace {

using std::chrono::seconds;
using Steps = std::vector<Step>;
using Names = std::vector<std::string>;

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(RestoreFromTiers, MemoryThenNvmeThenRemote) {
  TierWorld w(2);
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  Restored got = w.Restore();
  EXPECT_EQ(got.tiers, (Names{"memory", "memory"}));
  EXPECT_EQ(got.whys[0], "");
  w.Reboot();
  got = w.Restore();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 2u);
  EXPECT_EQ(got.tiers, (Names{"nvme", "nvme"}));
  EXPECT_EQ(got.whys[0], "memory copy absent (node rebooted)");
  w.h.nvme.Wipe();
  w.Reboot();
  got = w.Restore();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 2u);
  EXPECT_EQ(got.tiers, (Names{"remote", "remote"}));
  EXPECT_TRUE(Contains(got.whys[0], "nvme copy absent")) << got.whys[0];
  ASSERT_TRUE(w.Save(3)) << "and it goes on";
  EXPECT_EQ(w.Protection(), (Steps{3, 3, 3, 3, 3}));
}

// If it is killed and hangs amid that, its threads may write on.
TEST(RestoreFromTiers, WhileTheDaemonFillsASlotItsNoteSaysSo) {
  TierWorld w(1);
  ASSERT_TRUE(w.Save(1));
  w.Reboot();
  std::vector<bool> fills;
  w.h.fail = [&](const Action& action) {
    if (const auto* note = std::get_if<WriteNote>(&action)) {
      fills.push_back(note->daemon_fills);
    }
    return absl::OkStatus();
  };
  const Restored got = w.Restore();
  EXPECT_EQ(got.tiers, Names{"nvme"});
  ASSERT_GE(fills.size(), 2u);
  EXPECT_TRUE(fills.front());
  EXPECT_FALSE(fills.back()) << "it is the rank's to read";
}

TEST(RestoreFromTiers, WithTheDaemonsStateGoneTheJobIsFoundByItsName) {
  TierWorld w(2);
  ASSERT_TRUE(w.Save(7));
  const JobUuid uuid = w.Uuid();
  const uint32_t uid = w.h.Status("job").uid();
  w.h.nvme.Wipe();
  w.EndAll();
  w.h.states.clear();
  w.h.Restart(true);
  const Restored got = w.Restore();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 7u);
  EXPECT_EQ(got.attempt, 1u);
  EXPECT_EQ(w.Uuid(), uuid);
  EXPECT_EQ(w.h.Status("job").uid(), uid);
  EXPECT_EQ(w.h.Status("job").attempt(), 2u);
  TestClient thief = w.h.Connect(9000, 4711);
  EXPECT_EQ(thief.Reason(TestClient::JoinFrame("job", 0, 2)), v1::Failure::REASON_OTHER_OWNER);
}

TEST(RestoreFromTiers, AJobFoundOnADriveIsLookedForInRemoteToo) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  w.FailFlushes(TierKind::kNvme, absl::UnavailableError("EIO"));
  ASSERT_TRUE(w.Save(2));
  w.h.fail = nullptr;
  ASSERT_EQ(w.Nvme(), Steps{1});
  ASSERT_EQ(w.Manifests(), (Steps{1, 2}));
  w.EndAll();
  w.h.states.clear();
  // The remote tier answers last.
  w.h.delay = [](const Action& a) { return std::holds_alternative<ScanRemote>(a); };
  w.h.Restart(true);
  w.Launch();
  const uint64_t id = w.ranks[0].Send(TestClient::JoinFrame("job", 0, 1, 60'000));
  EXPECT_FALSE(w.ranks[0].Take(id)) << "it waits";
  w.h.PerformDelayed();
  ASSERT_TRUE(w.ranks[0].Take(id));
  const Restored got = w.Enter();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 2u) << "the newest is in remote alone";
}

TEST(RestoreFromTiers, ASaveDoesNotPushAsideWhatIsNotKnownYet) {
  TierWorld w;
  ASSERT_TRUE(w.Save(5));
  w.EndAll();
  w.h.states.clear();
  w.h.remote.scan = absl::UnavailableError("ESTALE");
  w.h.Restart(true);
  w.Launch();
  w.Join();
  ASSERT_TRUE(w.joined) << w.join_failure.message();
  const v1::DaemonFrame saved = w.ranks[0].Call(TestClient::BeginFrame(1));
  EXPECT_EQ(saved.failure().code(), static_cast<int>(absl::StatusCode::kUnavailable))
      << saved.ShortDebugString();
}

TEST(RestoreFromTiers, WhatARemoteTierThatAnsweredBeforeTheDriveHasIsNotWaitedForForEver) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  w.h.remote.Wipe();
  w.EndAll();
  w.h.states.clear();
  w.h.late_drives = true;
  w.h.Restart(true);
  w.Launch();
  w.Join();
  EXPECT_FALSE(w.joined) << "it is being looked for";
  w.h.AnswerDrives();
  const Restored got = w.Enter();  // (the join was answered meanwhile)
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 1u);
}

TEST(RestoreFromTiers, WhileRemoteCannotBeReadNothingOlderIsTakenForTheNewest) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  w.FailFlushes(TierKind::kNvme, absl::UnavailableError("EIO"));
  ASSERT_TRUE(w.Save(2));
  w.h.fail = nullptr;
  w.h.remote.scan = absl::UnavailableError("Stale file handle");
  w.Reboot();
  Restored got = w.Restore();
  EXPECT_FALSE(got.done);
  EXPECT_TRUE(w.Reported("Stale file handle"));
  EXPECT_TRUE(w.Reported("ckptctl restore job --step 1")) << "a way out";
  w.h.remote.scan = absl::OkStatus();
  w.h.Advance(seconds(20));
  got = w.GoOn();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 2u);
}

TEST(RestoreFromTiers, WhatIsHereIsUsedWhenRemoteCanHaveNothingNewer) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  w.h.remote.scan = absl::UnavailableError("hangs");
  w.Reboot();
  const Restored got = w.Restore();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 2u);
}

// Attempt 1 came further in remote than the step that attempt 2 went back to.
TEST(RestoreFromTiers, TheBoundOfWhatRemoteHoldsFollowsTheLine) {
  TierWorld w(1, [](v1::DaemonConfig& c) {
    c.mutable_policy()->mutable_nvme()->set_keep_last(10);
    c.mutable_policy()->mutable_remote()->set_keep_last(10);
  });
  for (Step step = 1; step <= 5; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  ASSERT_EQ(w.Restore(nullptr, CheckpointId{1, 3}).step, 3u);
  // Step 3 is left in remote alone, step 2 on the drive.
  std::erase_if(w.h.nvme.copies, [](const auto& c) { return c.first.step >= 3; });
  w.h.remote.scan = absl::UnavailableError("hangs");
  w.Reboot();
  const Restored got = w.Restore();
  EXPECT_FALSE(got.done) << "step " << got.step << " is not what attempt 2 stood on";
  EXPECT_TRUE(w.Reported("may be whole with what cannot be read now")) << "it is waited for";
}

TEST(RestoreFromTiers, AJoinOfAnUnknownNameWaitsForRemote) {
  TierWorld w;
  w.h.remote.scan = absl::UnavailableError("Transport endpoint is not connected");
  TestClient a = w.h.Connect(7000);
  const v1::DaemonFrame refused = a.Call(TestClient::JoinFrame("new", 0, 1, 500));
  EXPECT_EQ(refused.failure().code(), static_cast<int>(absl::StatusCode::kUnavailable));
  EXPECT_TRUE(Contains(refused.failure().message(), "/remote")) << refused.failure().message();
  w.h.remote.scan = absl::OkStatus();
  EXPECT_TRUE(a.Join("new", 0, 1));
  w.h.delay = [](const Action& action) { return std::holds_alternative<ScanRemote>(action); };
  TestClient b = w.h.Connect(7001);
  const uint64_t id = b.Send(TestClient::JoinFrame("newer", 0, 1, 500));
  EXPECT_FALSE(b.Take(id));
  w.h.Advance(seconds(11));
  const auto late = b.Take(id);
  ASSERT_TRUE(late) << "every wait has an end";
  EXPECT_TRUE(Contains(late->frame.failure().message(), "durable tiers"));
}

TEST(RestoreFromTiers, APendingInventoryIsWaitedFor) {
  TierWorld w(2);
  ASSERT_TRUE(w.Save(1));
  w.EndAll();
  w.h.nvme.Wipe();
  w.h.delay = [](const Action& a) { return std::holds_alternative<ScanRemote>(a); };
  w.h.Restart(true);
  w.Launch();
  w.Join();
  Restored got = w.Enter();
  EXPECT_FALSE(got.done);
  EXPECT_EQ(got.failure.message(), "");
  w.h.PerformDelayed();
  got = w.GoOn();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 1u);
}

TEST(RestoreFromTiers, WhatTheNodePublishedJustBeforeItWentDownIsWaitedFor) {
  TierWorld w(1);
  ASSERT_TRUE(w.Save(1));
  const std::map<std::string, v1::JobState> noted = w.h.states;
  w.h.fail = [](const Action& a) {
    const auto* flush = std::get_if<FlushShard>(&a);
    return flush != nullptr && flush->to == TierKind::kRemote ? absl::UnavailableError("EIO")
                                                              : absl::OkStatus();
  };
  ASSERT_TRUE(w.Save(2));
  ASSERT_EQ(w.Nvme().back(), 2u);
  w.EndAll();
  w.h.states = noted;
  w.h.late_drives = true;
  w.h.Restart(true);
  w.Launch();
  w.Join();
  Restored got = w.Enter();
  EXPECT_FALSE(got.done) << "remote has step 1, and nvme may have a newer one";
  EXPECT_EQ(got.failure.message(), "");
  w.h.AnswerDrives();
  got = w.GoOn();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 2u);
}

TEST(RestoreFromTiers, ABadMemoryCopyWaitsForATierThatIsStillBeingRead) {
  TierWorld w(2);
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  w.EndAll();
  w.h.late_drives = true;
  w.h.delay = [](const Action& a) { return std::holds_alternative<ScanRemote>(a); };
  w.h.Restart();
  w.Launch();
  w.Join();
  const auto bad_in_memory = [](Rank rank, const v1::SessionOutcome& outcome) {
    return rank == 1 && outcome.source().tier() == "memory" && outcome.step() == 2;
  };
  Restored got = w.Enter(bad_in_memory);
  EXPECT_FALSE(got.done) << "not back to step 1 while nvme may have step 2";
  EXPECT_EQ(got.failure.message(), "");
  w.h.AnswerDrives();
  w.h.PerformDelayed();
  got = w.GoOn(bad_in_memory);
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 2u);
  EXPECT_EQ(got.tiers[1], "nvme");
}

// It has two slots: one has the bad copy, the other the step that all would fall back to.
TEST(RestoreFromTiers, ABadMemoryCopyGoesIfThereIsNoOtherRoomForTheOneThatReplacesIt) {
  TierWorld w(2, [](v1::DaemonConfig& c) {
    c.mutable_memory()->set_slots_per_rank(2);
    c.mutable_policy()->mutable_nvme()->set_keep_last(1);
    c.mutable_policy()->mutable_remote()->set_keep_last(1);
  });
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  ASSERT_EQ(w.Nvme(), Steps{2});
  const Restored got = w.Restore([](Rank rank, const v1::SessionOutcome& outcome) {
    return rank == 1 && outcome.source().tier() == "memory" && outcome.step() == 2;
  });
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 2u);
  EXPECT_EQ(got.tiers, (Names{"memory", "nvme"}));
  ASSERT_TRUE(w.Save(3)) << "and it goes on";
}

TEST(RestoreFromTiers, ABadMemoryCopyGoesBeforeAnyStepThatAllCouldFallBackTo) {
  TierWorld w(2, [](v1::DaemonConfig& c) {
    c.mutable_memory()->set_slots_per_rank(3);
    c.mutable_policy()->mutable_nvme()->set_keep_last(1);
    c.mutable_policy()->mutable_remote()->set_keep_last(1);
  });
  for (const Step step : {1, 2, 3}) {
    ASSERT_TRUE(w.Save(step));
  }
  const Restored got = w.Restore([](Rank rank, const v1::SessionOutcome& outcome) {
    return rank == 1 && outcome.source().tier() == "memory" && outcome.step() == 3;
  });
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 3u);
  EXPECT_EQ(got.tiers, (Names{"memory", "nvme"}));
  EXPECT_EQ(w.h.Committed("job"), (Names{"1:3", "1:2", "1:1"}));
}

TEST(RestoreFromTiers, ADamagedCopyIsReplacedByTheNextTierForItsRankAlone) {
  TierWorld w(2);
  ASSERT_TRUE(w.Save(1));
  w.h.nvme.damaged.insert(w.Shard(1, 1));
  w.Reboot();
  const Restored got = w.Restore();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 1u);
  EXPECT_EQ(got.round, 1u) << "the same step for all, in the same round";
  EXPECT_EQ(got.tiers, (Names{"nvme", "remote"}));
  EXPECT_TRUE(Contains(got.whys[1], "nvme copy bad: ")) << got.whys[1];
}

TEST(RestoreFromTiers, WhenAllCopiesOfOneRankAreBadAllRanksFallBack) {
  TierWorld w(2);
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  w.h.nvme.damaged.insert(w.Shard(2, 1));
  w.h.remote.damaged.insert(w.Shard(2, 1));
  w.Reboot();
  const Restored got = w.Restore();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 1u);
  EXPECT_EQ(got.round, 2u);
}

// Nothing but remote is left, and one file there is bad: that is what all ranks hear, also those
// that come later, and what can be done.
TEST(RestoreFromTiers, AFileThatIsBadIsNamedWhenThereIsNoOther) {
  TierWorld w(2);
  ASSERT_TRUE(w.Save(1));
  w.h.nvme.Wipe();
  w.h.remote.damaged.insert(w.Shard(1, 1));
  w.Reboot();
  const auto check = [&](const Restored& got) {
    EXPECT_FALSE(got.done);
    const std::string& said = got.failure.message();
    EXPECT_EQ(got.failure.reason(), v1::Failure::REASON_UNREADABLE) << said;
    const std::string file = w.h.remote.copies.at(w.Shard(1, 1)).location;
    EXPECT_TRUE(Contains(
        said, "step 1 of attempt 1: rank 1's remote copy (" + file + ") is bad: digests differ"))
        << said;
    EXPECT_TRUE(Contains(said, "ckptctl explain job --step 1 --attempt 1")) << said;
    EXPECT_TRUE(Contains(said, "ckptctl verify job --all")) << said;
    EXPECT_FALSE(Contains(said, "memory")) << said;
  };
  check(w.Restore());
  check(w.Enter());
  check(w.Restore());
}

TEST(RestoreFromTiers, WhatCannotBeReadJustNowIsNotCalledBad) {
  TierWorld w(2);
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  w.h.nvme.unreadable.insert(w.Shard(2, 1));
  w.h.remote.unreadable.insert(w.Shard(2, 1));
  w.Reboot();
  Restored got = w.Restore();
  EXPECT_FALSE(got.done);
  EXPECT_EQ(got.failure.code(), static_cast<int>(absl::StatusCode::kUnavailable));
  EXPECT_EQ(w.h.Committed("job").front(), "1:2") << "it is committed still";
  w.h.nvme.unreadable.clear();
  got = w.Enter();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 2u);
}

TEST(RestoreFromTiers, AMemoryCopyCalledBadIsReplacedFromNvmeInTheSameRound) {
  TierWorld w(2);
  ASSERT_TRUE(w.Save(1));
  bool first = true;
  const Restored got = w.Restore([&](Rank rank, const v1::SessionOutcome&) {
    return rank == 1 && std::exchange(first, false);
  });
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 1u);
  EXPECT_EQ(got.tiers, (Names{"memory", "nvme"}));
  EXPECT_TRUE(Contains(got.whys[1], "memory copy bad")) << got.whys[1];
  ASSERT_TRUE(w.Save(2));
}

TEST(RestoreFromTiers, AFetchMakesItsRoom) {
  TierWorld w(1, [](v1::DaemonConfig& c) {
    c.mutable_memory()->set_slots_per_rank(2);
    c.mutable_policy()->mutable_nvme()->set_keep_last(10);
  });
  for (Step step = 1; step <= 4; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  const Restored got = w.Restore(nullptr, CheckpointId{1, 1});
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.tiers, Names{"nvme"});
  ASSERT_TRUE(w.Save(5));
  ASSERT_TRUE(w.Save(6));
}

TEST(RestoreFromTiers, AFetchThatHasNoRoomSaysSo) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  w.h.bytes_max = kSlot / 4;
  w.Reboot();
  const Restored got = w.Restore();
  EXPECT_FALSE(got.done);
  EXPECT_TRUE(Contains(got.failure.message(), "memory.bytes_max")) << got.failure.message();
}

TEST(RestoreFromTiers, AStalledFetchIsLeftForTheNextTier) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  w.Reboot();
  w.h.delay = [](const Action& a) {
    const auto* fetch = std::get_if<FetchShard>(&a);
    return fetch != nullptr && fetch->from == TierKind::kNvme;
  };
  Restored got = w.Restore();
  ASSERT_FALSE(got.done);
  ASSERT_EQ(w.Delayed<FetchShard>(), 1u);
  w.h.Feed(DrainStalled{std::get<FetchShard>(w.h.delayed[0]).drain, true, "no progress for 60 s"});
  got = w.GoOn();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.tiers, Names{"remote"});
}

TEST(RestoreFromTiers, AFetchThatHangsForGoodIsLeftBehind) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  w.Reboot();
  w.h.fetches_hang = true;
  w.h.delay = [](const Action& a) {
    const auto* fetch = std::get_if<FetchShard>(&a);
    return fetch != nullptr && fetch->from == TierKind::kNvme;
  };
  Restored got = w.Restore();
  ASSERT_FALSE(got.done);
  ASSERT_EQ(w.Delayed<FetchShard>(), 1u);
  w.h.Feed(DrainStalled{std::get<FetchShard>(w.h.delayed[0]).drain, true, "no progress for 60 s"});
  got = w.GoOn();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.tiers, Names{"remote"});
  // When the drive answers, what it brought is of no use, and its slot is free again.
  w.h.PerformDelayed();
  EXPECT_EQ(w.h.Committed("job").front(), "1:1");
  for (Step step = 2; step <= 6; ++step) {
    ASSERT_TRUE(w.Save(step)) << step;
  }
}

TEST(RestoreFromTiers, OneRankThatAsksTwiceAtOnceIsServedOnce) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  w.Reboot();
  w.Launch();
  w.Join();
  w.h.delay = [](const Action& a) { return std::holds_alternative<CreateSlot>(a); };
  const uint64_t first = w.ranks[0].Send(TestClient::EnterFrame(60'000, std::nullopt));
  const uint64_t second = w.ranks[0].Send(TestClient::EnterFrame(60'000, std::nullopt));
  w.h.PerformDelayed();
  const auto a = w.ranks[0].Take(first);
  const auto b = w.ranks[0].Take(second);
  ASSERT_TRUE(b);
  EXPECT_EQ(b->frame.enter_session().step(), 1u) << b->frame.failure().message();
  ASSERT_TRUE(a) << "every request has an answer";
}

TEST(RestoreFromTiers, RanksThatDieWhileTheirShardIsFetched) {
  TierWorld w(2);
  ASSERT_TRUE(w.Save(1));
  w.Reboot();
  w.h.delay = [](const Action& a) { return std::holds_alternative<FetchShard>(a); };
  Restored got = w.Restore();
  EXPECT_EQ(w.Delayed<FetchShard>(), 2u);
  w.h.Kill(w.ranks[1]);
  w.h.Close(w.ranks[0]);
  w.h.PerformDelayed();
  got = w.Restore();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 1u);
  ASSERT_TRUE(w.Save(2));
}

TEST(RestoreFromTiers, ADaemonThatDiesWhileItFetchesStartsOver) {
  TierWorld w(2);
  ASSERT_TRUE(w.Save(1));
  w.Reboot();
  w.h.delay = [](const Action& a) { return std::holds_alternative<FetchShard>(a); };
  w.Restore();
  w.h.delay = nullptr;
  w.RestartDaemon();
  const Restored got = w.Restore();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 1u);
}

TEST(RestoreFromTiers, ABranchThatWasLeftIsNoCandidateFromAnyTier) {
  TierWorld w(1, [](v1::DaemonConfig& c) {
    c.mutable_policy()->mutable_nvme()->set_keep_last(10);
    c.mutable_policy()->mutable_remote()->set_keep_last(10);
  });
  for (Step step = 1; step <= 5; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  ASSERT_EQ(w.Restore(nullptr, CheckpointId{1, 2}).step, 2u);
  ASSERT_TRUE(w.Save(3));
  EXPECT_EQ(w.Nvme().size(), 6u);
  w.Reboot();
  Restored got = w.Restore();
  EXPECT_EQ(got.step, 3u);
  EXPECT_EQ(got.attempt, 2u);
  // Also where nothing else of the new branch is left.
  std::erase_if(w.h.nvme.copies, [](const auto& c) { return c.first.attempt == 2; });
  std::erase_if(w.h.remote.copies, [](const auto& c) { return c.first.attempt == 2; });
  std::erase_if(w.h.remote.manifests, [](const auto& m) { return m.second.attempt == 2; });
  w.Reboot();
  got = w.Restore();
  EXPECT_FALSE(got.done && got.step > 3) << got.step;
}

TEST(RestoreFromTiers, AnotherWorldSizeIsToldSo) {
  TierWorld w(2);
  ASSERT_TRUE(w.Save(1));
  w.Reboot();
  w.world = 1;
  const Restored got = w.Restore();
  EXPECT_FALSE(got.done);
  EXPECT_TRUE(Contains(got.failure.message(), "saved by 2 ranks")) << got.failure.message();
}

// A memory copy is as new as anything that remote can have, and then turns out bad.
// Whoever reads through bad memory of its own calls every copy bad.
TEST(RestoreFromTiers, ARankThatCallsEveryCopyBadIsNotFedForEver) {
  TierWorld w(1);
  for (Step step = 1; step <= 2; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  w.EndAll();
  size_t fed = 0;
  const Restored got = w.Restore([&](Rank, const v1::SessionOutcome&) { return ++fed < 100; });
  EXPECT_FALSE(got.done);
  EXPECT_LE(fed, 6u) << "each step from memory, nvme and remote";
}

TEST(RestoreFromTiers, AFallbackDoesNotPassOverWhatWasNotKnownAtFirst) {
  TierWorld w(1,
              [](v1::DaemonConfig& c) { c.mutable_policy()->mutable_remote()->set_keep_last(3); });
  for (Step step = 1; step <= 3; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  for (auto& [slot, file] : w.h.files) {
    if (file.record && file.record->id.step == 2) {
      file.record.reset();
    }
  }
  w.h.nvme.Wipe();
  w.EndAll();
  w.h.delay = [](const Action& a) { return std::holds_alternative<ScanRemote>(a); };
  w.h.fail = [](const Action& a) {
    return std::holds_alternative<FlushShard>(a) ? absl::UnavailableError("the drive is away")
                                                 : absl::OkStatus();
  };
  w.h.Restart();
  Restored got = w.Restore([](Rank, const v1::SessionOutcome&) { return true; });
  EXPECT_FALSE(got.done) << "step 2 or 3 may be there";
  EXPECT_EQ(got.failure.message(), "");
  w.h.PerformDelayed();
  got = w.GoOn();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 3u);
  EXPECT_EQ(got.tiers, Names{"remote"});
}

// Shards reach the remote tier, and no manifest names them.
absl::Status NothingBecomesWhole(const Action& a) {
  const auto* flush = std::get_if<FlushShard>(&a);
  return (flush != nullptr && flush->to == TierKind::kNvme) ||
                 std::holds_alternative<PublishManifest>(a)
             ? absl::UnavailableError("EIO")
             : absl::OkStatus();
}

TEST(RestoreFromTiers, WhatBecomesWholeWhileAnOlderStepIsLoadedIsNotDiscarded) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  w.h.fail = NothingBecomesWhole;
  ASSERT_TRUE(w.Save(2));
  ASSERT_EQ(w.Nvme(), Steps{1});
  w.Reboot();
  w.h.delay = [](const Action& a) { return std::holds_alternative<FetchShard>(a); };
  Restored got = w.Restore();
  ASSERT_EQ(w.Delayed<FetchShard>(), 1u) << "step 2 has no manifest, and that is in trouble";
  w.h.fail = nullptr;
  w.h.Advance(std::chrono::seconds(20));
  ASSERT_EQ(w.Manifests().back(), 2u);
  w.h.PerformDelayed();
  got = w.GoOn();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 2u);
  EXPECT_EQ(got.round, 2u);
}

// Nothing else is taken for it, and it is not said that there is nothing else.
TEST(RestoreFromTiers, ARestorePointThatIsBadNamesWhatElseThereIs) {
  TierWorld w(1,
              [](v1::DaemonConfig& c) { c.mutable_policy()->mutable_remote()->set_keep_last(3); });
  for (Step step = 1; step <= 3; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  w.Reboot();
  v1::SetRestorePointRequest request;
  request.set_job("job");
  request.set_step(2);
  ASSERT_TRUE(w.h.Admin<v1::SetRestorePointReply>(request).ok());
  const Restored got = w.Restore([](Rank, const v1::SessionOutcome&) { return true; });
  EXPECT_FALSE(got.done);
  EXPECT_EQ(got.failure.reason(), v1::Failure::REASON_UNREADABLE);
  const std::string& said = got.failure.message();
  EXPECT_TRUE(Contains(said, "asked for by a restore point")) << said;
  EXPECT_TRUE(Contains(said, "on the line there are: 3")) << said;
  EXPECT_TRUE(Contains(said, "ckptctl restore job --clear")) << said;
  EXPECT_FALSE(Contains(said, "nothing of its line")) << said;
}

// The older step turns out to be bad before all have it: what has become whole is next.
TEST(RestoreFromTiers, WhatBecomesWholeWhileAnOlderStepFailsIsGoneOnWith) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  w.h.fail = NothingBecomesWhole;
  ASSERT_TRUE(w.Save(2));
  w.Reboot();
  w.h.delay = [](const Action& a) { return std::holds_alternative<FetchShard>(a); };
  Restored got = w.Restore();
  ASSERT_EQ(w.Delayed<FetchShard>(), 1u) << "step 2 has no manifest, and that is in trouble";
  w.h.fail = nullptr;
  w.h.Advance(std::chrono::seconds(20));
  ASSERT_EQ(w.Manifests().back(), 2u);
  w.h.nvme.damaged.insert(w.Shard(1, 0));
  w.h.remote.damaged.insert(w.Shard(1, 0));
  w.h.delay = nullptr;
  w.h.PerformDelayed();
  got = w.GoOn();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 2u);
}

TEST(RestoreFromTiers, WhatLeftMemoryBeforeADriveAnsweredIsFoundThere) {
  TierWorld w(1, [](v1::DaemonConfig& c) { c.mutable_memory()->set_slots_per_rank(2); });
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  w.h.late_drives = true;
  w.RestartDaemon();
  TestClient back = w.h.Connect(w.ranks[0].process().pid);
  ASSERT_FALSE(back.Call(TestClient::JoinFrame("job", 0, 1, 0, "", 1)).has_failure());
  for (Step step = 3; step <= 4; ++step) {
    ASSERT_TRUE(back.Save(step));
  }
  w.h.AnswerDrives();
  EXPECT_EQ(w.h.Committed("job").front(), "1:4");
  EXPECT_EQ(w.Nvme().back(), 4u);
}

TEST(RestoreFromTiers, ADecidedAttemptBringsItBackAgain) {
  TierWorld w(2);
  ASSERT_TRUE(w.Save(1));
  w.Reboot();
  ASSERT_TRUE(w.Restore().done);
  // Both enter again; memory has it by now.
  const Restored again = w.Enter();
  EXPECT_TRUE(again.done) << again.failure.message();
  EXPECT_EQ(again.step, 1u);
}

TEST(RestoreFromTiers, TheOwnersStepsGoOnGrowingAfterADaemonRestart) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  for (auto& [slot, file] : w.h.files) {
    file.record.reset();  // its memory copies are lost, the process lives
  }
  w.RestartDaemon();
  TestClient back = w.h.Connect(w.ranks[0].process().pid);
  ASSERT_FALSE(back.Call(TestClient::JoinFrame("job", 0, 1, 0, "", 1)).has_failure());
  EXPECT_EQ(back.Call(TestClient::BeginFrame(2)).failure().code(),
            static_cast<int>(absl::StatusCode::kInvalidArgument))
      << "its name is taken in nvme";
  EXPECT_TRUE(back.Begin(3));
}

}  // namespace
}  // namespace holdfast::testing
