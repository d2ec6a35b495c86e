// Tiers that answer late, or not at first, and jobs whose state was lost meanwhile.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "tests/server/tier_world.h"

namespace holdfast::testing {
namespace {

using std::chrono::seconds;
using Steps = std::vector<Step>;

void NoRemote(v1::DaemonConfig& config) {
  config.clear_remote();
}

// Two attempts, of which the drives know only the older.
void LoseTheState(TierWorld& w) {
  ASSERT_TRUE(w.Save(1));
  ASSERT_EQ(w.Restore().step, 1u);
  ASSERT_TRUE(w.Save(2));
  ASSERT_EQ(w.h.remote.copies.count(w.Shard(2, 0, 2)), 1u);
  w.h.nvme.copies.erase(w.Shard(2, 0, 2));
  ASSERT_EQ(w.h.nvme.copies.count(w.Shard(1)), 1u);
  w.EndAll();
  w.h.states.clear();
}

void KeepThree(v1::DaemonConfig& config) {
  config.mutable_policy()->mutable_nvme()->set_keep_last(3);
  config.mutable_policy()->mutable_remote()->set_keep_last(3);
  config.mutable_save()->set_commit_deadline_ms(1000);
}

TEST(LostState, ADaemonWithoutARemoteTierTakesNewJobsAtAnyTime) {
  TierWorld w(1, NoRemote);
  ASSERT_TRUE(w.joined) << w.join_failure.message();
  ASSERT_TRUE(w.Save(1));
  EXPECT_EQ(w.Nvme(), Steps{1});
}

TEST(LostState, ADriveThatCannotBeReadIsNotTakenForAnEmptyOne) {
  TierWorld w(1, NoRemote);
  ASSERT_TRUE(w.Save(1));
  w.EndAll();
  w.h.states.clear();
  w.h.nvme.scan = absl::UnavailableError("EIO");
  w.h.Restart(true);
  w.Launch();
  w.Join();
  EXPECT_FALSE(w.joined);
  EXPECT_EQ(w.join_failure.code(), static_cast<int>(absl::StatusCode::kUnavailable));
  EXPECT_NE(w.join_failure.message().find("/nvme0: EIO"), std::string::npos)
      << w.join_failure.message();
  w.h.nvme.scan = absl::OkStatus();
  w.h.Advance(seconds(31));
  EXPECT_EQ(w.Restore().step, 1u);
}

TEST(LostState, WhatATierHadNotAnsweredForBecomesWholeWhenItDoes) {
  TierWorld w(2, KeepThree);
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  w.h.nvme.copies.erase(w.Shard(2, 1));
  w.EndAll();
  w.h.remote.scan = absl::UnavailableError("ESTALE");
  w.h.Restart(true);
  w.h.Advance(seconds(5));  // past the commit deadline
  EXPECT_EQ(w.h.Committed("job").front(), "1:1") << "of step 2 only one shard is known";
  w.h.remote.scan = absl::OkStatus();
  w.h.Advance(seconds(31));
  EXPECT_EQ(w.h.Committed("job").front(), "1:2");
  EXPECT_EQ(w.Restore().step, 2u);
}

// Of the steps on a drive that was away while the state was lost no state knows: not even that
// there are some.
TEST(LostState, ADriveThatIsBackIsReadBeforeAnybodyHearsThatNothingIsLeft) {
  TierWorld w(2, NoRemote);
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  const auto away = w.h.nvme.copies.extract(w.Shard(2, 1));
  w.h.nvme.copies.erase(w.Shard(1, 0));
  w.h.nvme.copies.erase(w.Shard(1, 1));
  w.EndAll();
  w.h.states.clear();
  w.Reboot();
  EXPECT_EQ(w.Restore().failure.reason(), v1::Failure::REASON_UNREADABLE);
  EXPECT_EQ(w.h.nvme.copies.count(w.Shard(2, 0)), 1u) << "what is there of the step stays";
  w.EndAll();
  w.h.nvme.copies.insert({away.key(), away.mapped()});
  w.h.late_drives = true;
  w.Reboot();
  w.Launch();
  w.Join();
  const uint64_t a = w.ranks[0].Send(TestClient::EnterFrame(60'000));
  const uint64_t b = w.ranks[1].Send(TestClient::EnterFrame(60'000));
  EXPECT_FALSE(w.ranks[0].Take(a)) << "the drives are being read";
  w.h.late_drives = false;
  w.h.AnswerDrives();
  for (const auto& [rank, id] : {std::pair(0, a), std::pair(1, b)}) {
    const auto answer = w.ranks[rank].Take(id);
    ASSERT_TRUE(answer);
    EXPECT_EQ(answer->frame.enter_session().step(), 2u) << answer->frame.failure().message();
  }
}

// The whole node went while the first step was on its way to remote: a part of it is there.
TEST(LostState, WhatWasOnlyBegunInRemoteIsNothingThatWasSaved) {
  TierWorld w(2, [](v1::DaemonConfig& config) { config.clear_nvme(); });
  ASSERT_TRUE(w.Save(1));
  const std::pair step{w.Shard(1).job, w.Shard(1).checkpoint()};
  ASSERT_EQ(w.h.remote.manifests.count(step), 1u);
  w.h.remote.copies.erase(w.Shard(1, 1));
  const auto lose_all_but_remote = [&] {
    w.EndAll();
    w.h.states.clear();
    w.Reboot();
  };
  // With a manifest it was saved, mark or not; and one that has lost it was saved.
  w.h.remote.marks.insert(step.second);
  lose_all_but_remote();
  EXPECT_EQ(w.Restore().failure.reason(), v1::Failure::REASON_UNREADABLE);
  w.h.remote.manifests.clear();
  w.h.remote.marks.clear();
  lose_all_but_remote();
  EXPECT_EQ(w.Restore().failure.reason(), v1::Failure::REASON_UNREADABLE);
  w.h.remote.marks.insert(step.second);
  lose_all_but_remote();
  EXPECT_EQ(w.Restore().failure.reason(), v1::Failure::REASON_NOTHING_TO_RESTORE);
  EXPECT_TRUE(w.Save(1)) << "it starts from scratch";
  EXPECT_EQ(w.h.remote.copies.count(w.Shard(1, 0)), 1u) << "what was begun stays";
}

TEST(LostState, AJoinWaitsUntilItIsKnownWhichAttemptsThereWere) {
  TierWorld w(1, KeepThree);
  LoseTheState(w);
  w.h.delay = [](const Action& a) { return std::holds_alternative<ScanRemote>(a); };
  w.h.Restart(true);
  w.Launch();
  const uint64_t id = w.ranks[0].Send(TestClient::JoinFrame("job", 0, 1, 60'000));
  EXPECT_FALSE(w.ranks[0].Take(id)) << "remote may know attempts that nobody else does";
  w.h.PerformDelayed();
  const auto answer = w.ranks[0].Take(id);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->frame.join().attempt(), 3u) << answer->frame.failure().message();
  const Restored got = w.Enter();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 2u);
}

TEST(LostState, AnAttemptThatWroteNothingButItsClaimCounts) {
  TierWorld w(1, KeepThree);
  ASSERT_TRUE(w.Save(1));
  w.EndAll();
  w.h.states.clear();
  w.h.remote.claimed = 5;
  w.h.Restart(true);
  w.Launch();
  const uint64_t id = w.ranks[0].Send(TestClient::JoinFrame("job", 0, 1, 60'000));
  const auto answer = w.ranks[0].Take(id);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->frame.join().attempt(), 6u) << answer->frame.failure().message();
}

TEST(LostState, AnAttemptThatWasOpenedUnderATakenNumberGivesWay) {
  TierWorld w(1, KeepThree);
  LoseTheState(w);
  w.h.remote.scan = absl::UnavailableError("ESTALE");
  w.h.Restart(true);
  w.Launch();
  w.Join();
  ASSERT_TRUE(w.joined) << w.join_failure.message();
  const Restored refused = w.Enter();
  EXPECT_FALSE(refused.done) << "remote may have something newer";
  w.h.remote.scan = absl::OkStatus();
  w.h.Advance(seconds(31));
  const Restored over = w.Enter();
  EXPECT_EQ(over.failure.reason(), v1::Failure::REASON_SUPERSEDED) << over.failure.message();
  const Restored got = w.Restore();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 2u);
  ASSERT_TRUE(w.Save(3));
  EXPECT_EQ(w.h.Committed("job").front(), "3:3");
  w.Reboot();
  EXPECT_EQ(w.Restore().step, 3u) << "the state that was written does not contradict itself";
}

// A manifest tells when a step was committed, not when its shards were sealed.
TEST(LostState, WhatAManifestTellsIsTheSameSave) {
  for (const bool drives_first : {false, true}) {
    TierWorld w(2, KeepThree);
    ASSERT_TRUE(w.Save(1));
    for (auto& [id, copy] : w.h.remote.copies) {
      copy.from_manifest = true;
      copy.copy.sealed_unix_ms += 1234;
    }
    w.h.nvme.damaged.insert(w.Shard(1, 1));
    w.EndAll();
    w.h.delay = [drives_first](const Action& a) {
      return drives_first && std::holds_alternative<ScanRemote>(a);
    };
    w.h.Restart(true);
    w.h.PerformDelayed();
    const Restored got = w.Restore();
    EXPECT_TRUE(got.done) << got.failure.message();
    EXPECT_EQ(got.tiers, (std::vector<std::string>{"nvme", "remote"})) << drives_first;
  }
}

TEST(LostState, AnotherSaveByTheSameNameIsLeftAlone) {
  TierWorld w(1, KeepThree);
  ASSERT_TRUE(w.Save(1));
  w.h.remote.copies.at(w.Shard(1)).copy.sealed_unix_ms += 1234;
  w.Reboot();
  EXPECT_TRUE(std::any_of(w.h.reports.begin(), w.h.reports.end(), [](const Report& report) {
    return report.text.find("is another save than the one that is known") != std::string::npos;
  }));
}

// Of an earlier attempt: all shards are in remote, and its manifest is on its way. That some of
// them are in memory, too, does not make it one of which only parts are left.
TEST(LostState, AStepThatLacksItsManifestIsNotGivenUpForWhatMemoryHasOfIt) {
  TierWorld w(2);
  w.h.fail = [](const Action& a) {
    return std::holds_alternative<PublishManifest>(a) ? absl::UnavailableError("ENOSPC")
                                                      : absl::OkStatus();
  };
  ASSERT_TRUE(w.Save(1));
  ASSERT_EQ(w.h.remote.copies.size(), 2u);
  ASSERT_EQ(w.Restore().step, 1u);  // attempt 2
  w.EndAll();
  std::erase_if(w.h.files, [](const auto& file) {
    return file.second.record && file.second.record->id.rank == 1;
  });
  w.h.nvme.Wipe();
  w.h.fail = nullptr;
  w.h.delay = [](const Action& a) { return std::holds_alternative<PublishManifest>(a); };
  w.h.Restart();
  w.h.Advance(std::chrono::seconds(1));
  w.h.PerformDelayed();
  w.h.Advance(std::chrono::minutes(1));
  EXPECT_EQ(w.h.remote.copies.size(), 2u);
  EXPECT_EQ(w.h.remote.manifests.size(), 1u);
  const Restored got = w.Restore();
  EXPECT_TRUE(got.done) << got.failure.message();
  EXPECT_EQ(got.step, 1u);
}

// The node that was to commit it is gone, and another one opened that attempt: no try of this one
// will ever be let in.
TEST(LostState, AManifestThatIsAnothersToPublishIsNotTriedForEver) {
  TierWorld w(1, [](v1::DaemonConfig& c) { c.mutable_nvme()->clear_dirs(); });
  w.h.fail = [](const Action& a) {
    const auto* publish = std::get_if<PublishManifest>(&a);
    return publish != nullptr && publish->checkpoint.step == 2
               ? absl::FailedPreconditionError("attempt 1 was claimed by another opening of it")
               : absl::OkStatus();
  };
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  EXPECT_NE(w.Tier("remote").problem().find("another opening"), std::string::npos)
      << "as long as the attempt runs it is said";
  w.Reboot();
  w.h.Advance(std::chrono::minutes(1));
  ASSERT_EQ(w.Restore().step, 1u);  // attempt 2
  ASSERT_TRUE(w.Save(3));
  w.h.Advance(std::chrono::minutes(5));
  EXPECT_EQ(w.Tier("remote").problem(), "");
  EXPECT_TRUE(w.Reported("is not this daemon's to commit"));
  EXPECT_EQ(w.Manifests(), (std::vector<Step>{1, 3}));
}

}  // namespace
}  // namespace holdfast::testing
