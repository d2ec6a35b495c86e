// What goes from the durable tiers, and what never does (docs/protocol.md §11).
#include <gtest/gtest.h>

#include "server/agent.h"
#include "server/coordinator.h"
#include "tests/server/tier_world.h"

namespace holdfast::testing {
namespace {

using std::chrono::minutes;
using std::chrono::seconds;
using Steps = std::vector<Step>;

v1::PinRequest Pin(Step step, bool unpin = false) {
  v1::PinRequest request;
  request.set_job("job");
  request.set_step(step);
  request.set_unpin(unpin);
  return request;
}

v1::RemoveCheckpointRequest Rm(Step step, const std::string& tier = "", bool force = false) {
  v1::RemoveCheckpointRequest request;
  request.set_job("job");
  request.set_step(step);
  request.set_tier(tier);
  request.set_force(force);
  return request;
}

TEST(Retention, KeepLastAndKeepEvery) {
  TierWorld w(2, [](v1::DaemonConfig& c) {
    c.mutable_policy()->mutable_nvme()->set_keep_last(3);
    c.mutable_policy()->mutable_remote()->set_keep_last(1);
    c.mutable_policy()->mutable_remote()->set_keep_every_steps(4);
  });
  for (Step step = 1; step <= 10; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  EXPECT_EQ(w.Nvme(), (Steps{8, 9, 10}));
  EXPECT_EQ(w.Manifests(), (Steps{4, 8, 10}));
}

TEST(Retention, TheJobsOwnBudget) {
  TierWorld w(1, [](v1::DaemonConfig& c) {
    c.mutable_policy()->mutable_nvme()->set_keep_last(10);
    c.mutable_policy()->mutable_nvme()->set_bytes_max(3 * kSlot / 2);  // three images
  });
  for (Step step = 1; step <= 8; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  EXPECT_EQ(w.Nvme(), (Steps{6, 7, 8}));
}

TEST(Retention, PinsStayAcrossRestarts) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.h.Admin<v1::PinReply>(Pin(1)).ok());
  w.RestartDaemon();
  w.Restore();
  for (Step step = 2; step <= 6; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  EXPECT_EQ(w.Nvme(), (Steps{1, 5, 6}));
  EXPECT_EQ(w.Manifests(), (Steps{1, 5, 6}));
  EXPECT_FALSE(w.h.Admin<v1::RemoveCheckpointReply>(Rm(1)).ok()) << "pinned";
  ASSERT_TRUE(w.h.Admin<v1::PinReply>(Pin(1, true)).ok());
  EXPECT_EQ(w.Nvme(), (Steps{5, 6})) << "and then goes by itself";
  EXPECT_FALSE(w.h.Admin<v1::PinReply>(Pin(77)).ok());
}

TEST(Retention, WhatLiesNowhereIsNotRemoved) {
  TierWorld w(
      1, [](v1::DaemonConfig& c) { c.mutable_policy()->mutable_remote()->set_every_steps(10); });
  ASSERT_TRUE(w.Save(10));
  ASSERT_TRUE(w.Save(11));
  const auto refused = w.h.Admin<v1::RemoveCheckpointReply>(Rm(11, "remote"));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kNotFound);
  EXPECT_NE(refused.status().message().find("step 11 of attempt 1 has no copies in remote"),
            std::string::npos)
      << refused.status();
  EXPECT_FALSE(w.h.Admin<v1::RemoveCheckpointReply>(Rm(11, "remote", true)).ok());
  // What is on its way there is stopped.
  w.DelayFlushes(TierKind::kRemote);
  ASSERT_TRUE(w.Save(20));
  const auto stopped = w.h.Admin<v1::RemoveCheckpointReply>(Rm(20, "remote"));
  EXPECT_TRUE(stopped.ok()) << stopped.status();
  w.h.PerformDelayed();
  EXPECT_EQ(w.Manifests(), Steps{10});
}

TEST(Retention, WhatASessionHoldsStays) {
  TierWorld w(1, [](v1::DaemonConfig& c) { c.mutable_policy()->mutable_nvme()->set_keep_last(4); });
  for (Step step = 1; step <= 4; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  w.Launch();
  w.Join();
  const uint64_t entered = w.ranks[0].Send(TestClient::EnterFrame(60'000));
  ASSERT_TRUE(w.ranks[0].Take(entered));
  v1::SetOptionsRequest set;
  set.set_job("job");
  auto& option = *set.add_options();
  option.set_name("nvme.keep_last");
  option.set_value("1");
  ASSERT_TRUE(w.h.Admin<v1::SetOptionsReply>(set).ok());
  EXPECT_EQ(w.Nvme(), (Steps{1, 2, 3, 4}));
  EXPECT_FALSE(w.h.Admin<v1::RemoveCheckpointReply>(Rm(2, "", true)).ok());
  ASSERT_TRUE(w.Restore().done);
  ASSERT_TRUE(w.Save(5));
  EXPECT_EQ(w.Nvme(), Steps{5});
}

TEST(Retention, WhatIsStillToBeCopiedOnStays) {
  TierWorld w(1, [](v1::DaemonConfig& c) {
    c.mutable_memory()->set_slots_per_rank(2);
    c.mutable_policy()->mutable_nvme()->set_keep_last(1);
  });
  w.DelayFlushes(TierKind::kRemote);
  for (Step step = 1; step <= 9; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  const Steps kept = w.Nvme();
  EXPECT_EQ(kept, (Steps{1, 2, 9})) << "two under way to remote";
  w.h.PerformDelayed();
  EXPECT_EQ(w.Nvme(), Steps{9});
  EXPECT_EQ(w.Manifests().back(), 9u);
}

TEST(Retention, NothingGoesBeforeAllTiersAreKnown) {
  TierWorld w(1, [](v1::DaemonConfig& c) { c.mutable_policy()->mutable_nvme()->set_keep_last(3); });
  for (Step step = 1; step <= 3; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  w.EndAll();
  w.h.config.mutable_policy()->mutable_nvme()->set_keep_last(1);
  w.h.delay = [](const Action& a) { return std::holds_alternative<ScanRemote>(a); };
  w.h.Restart();
  EXPECT_EQ(w.Nvme(), (Steps{1, 2, 3}));
  v1::CollectGarbageRequest gc;
  gc.set_job("job");
  gc.set_dry_run(true);
  const auto said = w.h.Admin<v1::CollectGarbageReply>(gc);
  ASSERT_TRUE(said.ok());
  for (const auto& verdict : said->verdicts()) {
    EXPECT_FALSE(verdict.goes());
  }
  w.h.PerformDelayed();
  EXPECT_EQ(w.Nvme(), Steps{3});
}

TEST(Retention, DryRunSaysWhatGcDoes) {
  TierWorld w(2, [](v1::DaemonConfig& c) {
    c.mutable_policy()->mutable_nvme()->set_keep_last(5);
    c.mutable_policy()->mutable_remote()->set_keep_last(5);
  });
  for (Step step = 1; step <= 5; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  w.EndAll();
  w.h.config.mutable_policy()->mutable_nvme()->set_keep_last(2);
  w.h.config.mutable_policy()->mutable_remote()->set_keep_last(1);
  // Removals take their time: what is said is what has not begun.
  w.h.delay = [](const Action& a) { return std::holds_alternative<ScanNvme>(a); };
  w.h.late_drives = true;
  w.h.Restart(true);
  w.h.delay = [](const Action& a) { return std::holds_alternative<RemoveCopies>(a); };
  w.h.AnswerDrives();
  v1::CollectGarbageRequest gc;
  gc.set_job("job");
  gc.set_dry_run(true);
  const auto said = w.h.Admin<v1::CollectGarbageReply>(gc);
  ASSERT_TRUE(said.ok());
  std::set<std::pair<std::string, Step>> stay;
  for (const auto& verdict : said->verdicts()) {
    EXPECT_FALSE(verdict.why().empty());
    if (!verdict.goes()) {
      stay.insert({verdict.tier(), verdict.step()});
    }
  }
  w.h.PerformDelayed();
  gc.set_dry_run(false);
  ASSERT_TRUE(w.h.Admin<v1::CollectGarbageReply>(gc).ok());
  std::set<std::pair<std::string, Step>> there;
  for (const Step step : w.Nvme()) {
    there.insert({"nvme", step});
  }
  for (const Step step : w.Manifests()) {
    there.insert({"remote", step});
  }
  EXPECT_EQ(stay, there);
  EXPECT_EQ(w.Nvme(), (Steps{4, 5}));
}

TEST(Retention, AFailedRemovalIsTriedAgainAlsoAfterGc) {
  TierWorld w;
  w.h.fail = [](const Action& a) {
    return std::holds_alternative<RemoveCopies>(a) ? absl::UnavailableError("EROFS")
                                                   : absl::OkStatus();
  };
  for (Step step = 1; step <= 3; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  EXPECT_EQ(w.Nvme(), (Steps{1, 2, 3}));
  EXPECT_NE(w.Tier("nvme").problem().find("EROFS"), std::string::npos);
  v1::CollectGarbageRequest gc;
  gc.set_job("job");
  ASSERT_TRUE(w.h.Admin<v1::CollectGarbageReply>(gc).ok());
  EXPECT_EQ(w.Nvme().size(), 3u);
  w.h.fail = nullptr;
  w.h.Advance(seconds(30));
  EXPECT_EQ(w.Nvme(), (Steps{2, 3}));
  EXPECT_EQ(w.Manifests(), (Steps{2, 3}));
  w.h.Advance(minutes(10));
  EXPECT_TRUE(!w.h.timer || *w.h.timer > w.h.now);
}

TEST(Retention, ARemovalThatHangsHoldsUpNoOther) {
  TierWorld w(1, [](v1::DaemonConfig& c) {
    c.mutable_nvme()->add_dirs("/nvme1");
    c.mutable_policy()->mutable_nvme()->set_keep_last(1);
  });
  DrainId hangs = 0;
  w.h.delay = [&](const Action& a) {
    const auto* remove = std::get_if<RemoveCopies>(&a);
    const bool first =
        remove != nullptr && remove->tier == TierKind::kNvme && remove->checkpoint.step == 1;
    hangs = first ? remove->drain : hangs;
    return first;
  };
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  ASSERT_NE(hangs, 0u);
  ASSERT_TRUE(w.Save(3));
  EXPECT_EQ(w.Nvme(), (Steps{1, 2, 3})) << "it may end any moment";
  w.h.Feed(DrainStalled{hangs, true, "no progress for 60 s: unlink '/nvme1/…'"});
  EXPECT_EQ(w.Nvme(), (Steps{1, 3}));
  EXPECT_TRUE(w.Reported("no progress for 60 s"));
  EXPECT_NE(w.Tier("nvme").problem().find("no progress for 60 s"), std::string::npos);
  ASSERT_TRUE(w.Save(4));
  EXPECT_EQ(w.Nvme(), (Steps{1, 4}));
  EXPECT_EQ(w.h.Daemon().tiers(0).bytes_used(), kSlot) << "its bytes count until they are gone";
  EXPECT_FALSE(w.h.Admin<v1::RemoveCheckpointReply>(Rm(1)).ok()) << "it is being removed already";
  v1::WhereRequest where;
  where.set_job("job");
  where.set_step(1);
  const auto found = w.h.Admin<v1::WhereReply>(where);
  for (int i = 0; found.ok() && i < found->copies_size(); ++i) {
    EXPECT_NE(found->copies(i).tier(), "nvme");
  }
  w.h.PerformDelayed();
  EXPECT_EQ(w.Nvme(), Steps{4});
  EXPECT_EQ(w.h.Daemon().tiers(0).bytes_used(), kSlot / 2);
  EXPECT_EQ(w.Tier("nvme").problem(), "");
  ASSERT_TRUE(w.Save(5));
  EXPECT_EQ(w.Nvme(), Steps{5});
}

TEST(Retention, ARemovalThatHungAndFailedIsTriedAgain) {
  TierWorld w(1, [](v1::DaemonConfig& c) { c.mutable_policy()->mutable_nvme()->set_keep_last(1); });
  std::vector<DrainId> removals;
  w.h.delay = [&](const Action& a) {
    const auto* remove = std::get_if<RemoveCopies>(&a);
    const bool first =
        remove != nullptr && remove->tier == TierKind::kNvme && remove->checkpoint.step == 1;
    if (first) {
      removals.push_back(remove->drain);
    }
    return first;
  };
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  ASSERT_EQ(removals.size(), 1u);
  w.h.Feed(DrainStalled{removals[0], true, "no progress for 60 s"});
  // It gets on, and fails.
  w.h.Feed(DrainStalled{removals[0], false, ""});
  w.h.delayed.clear();
  w.h.Feed(CopiesRemoved{removals[0], absl::UnavailableError("EIO")});
  w.h.Advance(seconds(11));
  ASSERT_EQ(removals.size(), 2u);
  EXPECT_EQ(w.h.Daemon().tiers(0).bytes_used(), kSlot);
  w.h.PerformDelayed();
  EXPECT_EQ(w.Nvme(), Steps{2});
  EXPECT_EQ(w.h.Daemon().tiers(0).bytes_used(), kSlot / 2);
}

// So many may hang that the next one is waited for: no longer than until one of them has ended.
TEST(Retention, TheRemovalAfterTooManyThatHangIsLeftWhenOneOfThemEnds) {
  TierWorld w(1, [](v1::DaemonConfig& c) {
    c.mutable_policy()->mutable_nvme()->set_keep_last(1);
    c.clear_remote();
  });
  std::vector<DrainId> removals;
  w.h.delay = [&](const Action& a) {
    const auto* remove = std::get_if<RemoveCopies>(&a);
    if (remove != nullptr) {
      removals.push_back(remove->drain);
    }
    return remove != nullptr;
  };
  Step step = 1;
  ASSERT_TRUE(w.Save(step++));
  while (removals.size() < kRemovalsStuckMax + 1) {
    ASSERT_TRUE(w.Save(step++));
    ASSERT_EQ(removals.size(), step - 2);
    w.h.Feed(DrainStalled{removals.back(), true, "no progress for 60 s"});
  }
  ASSERT_TRUE(w.Save(step++));
  EXPECT_EQ(removals.size(), kRemovalsStuckMax + 1) << "one more would be too many";
  w.h.Feed(CopiesRemoved{removals[0], absl::OkStatus()});
  EXPECT_EQ(removals.size(), kRemovalsStuckMax + 2) << "the last one still hangs";
}

// What `gc --dry-run` says would go is what goes.
TEST(Retention, AsLongAsTooManyRemovalsFailNoneIsToldToGo) {
  TierWorld w(1, [](v1::DaemonConfig& c) {
    c.mutable_policy()->mutable_nvme()->set_keep_last(1);
    c.clear_remote();
  });
  w.h.fail = [](const Action& a) {
    return std::holds_alternative<RemoveCopies>(a) ? absl::UnavailableError("EIO")
                                                   : absl::OkStatus();
  };
  for (Step step = 1; step <= static_cast<Step>(kRemovalsFailedMax) + 3; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  v1::CollectGarbageRequest gc;
  gc.set_dry_run(true);
  const auto reply = w.h.Admin<v1::CollectGarbageReply>(gc, 0);
  ASSERT_TRUE(reply.ok()) << reply.status();
  int64_t goes = 0;
  for (const v1::RetentionVerdict& verdict : reply->verdicts()) {
    goes += verdict.goes() ? 1 : 0;
    if (!verdict.goes() && verdict.step() < static_cast<Step>(kRemovalsFailedMax)) {
      EXPECT_NE(verdict.why().find("removals have failed"), std::string::npos) << verdict.why();
    }
  }
  EXPECT_EQ(goes, kRemovalsFailedMax) << "those that have begun";
}

TEST(Retention, ARemovalThatFailsHoldsUpNoOther) {
  TierWorld w(2, [](v1::DaemonConfig& c) { c.mutable_policy()->mutable_nvme()->set_keep_last(1); });
  std::vector<DrainId> removals;
  w.h.delay = [&](const Action& a) {
    const auto* remove = std::get_if<RemoveCopies>(&a);
    const bool first =
        remove != nullptr && remove->tier == TierKind::kNvme && remove->checkpoint.step == 1;
    if (first) {
      removals.push_back(remove->drain);
    }
    return first;
  };
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  ASSERT_EQ(removals.size(), 1u);
  w.h.delayed.clear();
  // What rank 1 has lies on a drive that is gone.
  w.h.Feed(CopiesRemoved{removals[0], absl::UnavailableError("'/nvme1' is away"), {{Rank{1}}}});
  EXPECT_TRUE(w.Reported("'/nvme1' is away"));
  EXPECT_NE(w.Tier("nvme").problem().find("'/nvme1' is away"), std::string::npos);
  EXPECT_EQ(w.h.Daemon().tiers(0).bytes_used(), 3 * kSlot / 2) << "two shards, and what is left";
  for (Step step = 3; step <= 5; ++step) {
    ASSERT_TRUE(w.Save(step));
    EXPECT_EQ(w.Nvme(), (Steps{1, step})) << "the others go meanwhile";
  }
  v1::CollectGarbageRequest gc;
  gc.set_job("job");
  gc.set_dry_run(true);
  const auto said = w.h.Admin<v1::CollectGarbageReply>(gc);
  ASSERT_TRUE(said.ok());
  const auto goes =
      std::find_if(said->verdicts().begin(), said->verdicts().end(),
                   [](const auto& v) { return v.tier() == "nvme" && v.step() == 1 && v.goes(); });
  ASSERT_NE(goes, said->verdicts().end());
  EXPECT_EQ(goes->why(), "is being removed, and tried again: '/nvme1' is away");
  w.h.Advance(seconds(11));
  ASSERT_EQ(removals.size(), 2u) << "it is tried again";
  w.h.delay = nullptr;
  w.h.PerformDelayed();
  EXPECT_EQ(w.Nvme(), Steps{5});
  EXPECT_EQ(w.Tier("nvme").problem(), "");
  EXPECT_EQ(w.h.Daemon().tiers(0).bytes_used(), kSlot);
}

TEST(Retention, GoesOnWithoutADriveThatCannotBeRead) {
  TierWorld w(2, [](v1::DaemonConfig& c) {
    c.mutable_nvme()->add_dirs("/nvme1");
    c.mutable_policy()->mutable_nvme()->set_keep_last(1);
  });
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  EXPECT_EQ(w.Nvme(), Steps{2});
  w.h.failing_drive = "/nvme1";
  w.h.Feed(TierAway{TierKind::kNvme, "/nvme1", absl::UnavailableError("'/nvme1' is away")});
  EXPECT_NE(w.Tier("nvme").problem().find("'/nvme1' is away"), std::string::npos);
  for (Step step = 3; step <= 5; ++step) {
    ASSERT_TRUE(w.Save(step));
    EXPECT_EQ(w.Nvme(), (Steps{2, step})) << "only a part of 2 is seen";
  }
  w.RestartDaemon();
  ASSERT_TRUE(w.Restore().done) << "memory has what is newest";
  ASSERT_TRUE(w.Save(6));
  EXPECT_EQ(w.Nvme(), (Steps{2, 6})) << "nor does it have to be read once more";
  // Of a step that has parts here the rest may lie there.
  w.h.nvme.copies.erase(w.Shard(6, 1, 2));
  w.Reboot();
  ASSERT_TRUE(w.Restore().done);
  ASSERT_TRUE(w.Save(7));
  EXPECT_EQ(w.Nvme(), (Steps{2, 7}));
  EXPECT_EQ(w.h.nvme.copies.count(w.Shard(6, 0, 2)), 1u);
  w.h.failing_drive.clear();
  w.h.Advance(seconds(40));
  ASSERT_TRUE(w.Save(8));
  EXPECT_EQ(w.h.nvme.copies.count(w.Shard(6, 0, 2)), 0u) << "it has been read, and has not";
  EXPECT_EQ(w.Nvme(), Steps{8});
}

TEST(Retention, WaitsUntilARestoreIsDecided) {
  TierWorld w(1, [](v1::DaemonConfig& c) { c.mutable_policy()->mutable_nvme()->set_keep_last(1); });
  w.h.delay = [](const Action& a) {
    const auto* remove = std::get_if<RemoveCopies>(&a);
    return remove != nullptr && remove->tier == TierKind::kNvme;
  };
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  w.h.delayed.clear();  // the daemon dies before it has removed any
  w.h.late_drives = true;
  w.Reboot();
  w.h.late_drives = false;
  w.h.delay = nullptr;
  w.Launch();
  w.Join();
  w.h.AnswerDrives();
  EXPECT_EQ(w.Nvme(), (Steps{1, 2})) << "step 2 has not been read yet, and may be bad";
  ASSERT_TRUE(w.Enter().done);
  EXPECT_EQ(w.Nvme(), Steps{2});
}

TEST(Retention, AStepBeingRemovedIsNoCandidateAndNotCounted) {
  TierWorld w(1, [](v1::DaemonConfig& c) { c.mutable_policy()->mutable_nvme()->set_keep_last(1); });
  w.h.delay = [](const Action& a) { return std::holds_alternative<RemoveCopies>(a); };
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  ASSERT_EQ(w.Nvme().size(), 2u);
  v1::WhereRequest where;
  where.set_job("job");
  where.set_step(1);
  const auto found = w.h.Admin<v1::WhereReply>(where);
  ASSERT_TRUE(found.ok());
  for (const auto& copy : found->copies()) {
    EXPECT_NE(copy.tier(), "nvme");
  }
  EXPECT_EQ(w.h.Daemon().tiers(0).bytes_used(), kSlot) << "its bytes count until they are gone";
  w.RestartDaemon();
  EXPECT_EQ(w.Nvme().size(), 2u) << "and when the daemon died in between, it is judged anew";
  w.h.PerformDelayed();
}

TEST(Removal, OfAStepAsksForForceWhileATierCannotBeRead) {
  TierWorld w(1,
              [](v1::DaemonConfig& c) { c.mutable_policy()->mutable_remote()->set_keep_last(9); });
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  w.h.remote.scan = absl::UnavailableError("ESTALE");
  w.RestartDaemon();
  const auto refused = w.h.Admin<v1::RemoveCheckpointReply>(Rm(1));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(refused.status().message().find("ESTALE"), std::string::npos);
  EXPECT_TRUE(w.h.Admin<v1::RemoveCheckpointReply>(Rm(1, "nvme")).ok()) << "that can be judged";
  EXPECT_TRUE(w.h.Admin<v1::RemoveCheckpointReply>(Rm(1, "remote", true)).ok());
}

TEST(Removal, OfAStepAsksForForceWhereItProtects) {
  TierWorld w(2);
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  const auto refused = w.h.Admin<v1::RemoveCheckpointReply>(Rm(2));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(refused.status().message().find("--force"), std::string::npos);
  const auto removed = w.h.Admin<v1::RemoveCheckpointReply>(Rm(1));
  ASSERT_TRUE(removed.ok()) << removed.status();
  EXPECT_EQ(removed->bytes_freed(), 2 * 3 * kSlot / 2) << "two ranks, three tiers";
  EXPECT_EQ(w.Nvme(), Steps{2});
  EXPECT_EQ(w.Manifests(), Steps{2});
  EXPECT_EQ(w.h.Committed("job"), std::vector<std::string>{"1:2"});
  ASSERT_TRUE(w.h.Admin<v1::RemoveCheckpointReply>(Rm(2, "nvme", true)).ok());
  EXPECT_TRUE(w.Nvme().empty());
  EXPECT_EQ(w.Manifests(), Steps{2});
  ASSERT_TRUE(w.h.Admin<v1::RemoveCheckpointReply>(Rm(2, "", true)).ok());
  EXPECT_TRUE(w.h.remote.copies.empty());
  EXPECT_TRUE(w.h.Committed("job").empty());
  EXPECT_FALSE(w.h.Admin<v1::RemoveCheckpointReply>(Rm(2)).ok()) << "there is none";
  EXPECT_EQ(w.h.Admin<v1::RemoveCheckpointReply>(Rm(2, "tape")).status().code(),
            absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(w.Save(3));
  EXPECT_EQ(w.Manifests(), Steps{3});
}

TEST(Removal, OfAStepThatIsBeingWrittenThere) {
  for (const bool lets_go : {true, false}) {
    TierWorld w;
    ASSERT_TRUE(w.Save(1));
    w.h.delay = [&](const Action& a) {
      const auto* flush = std::get_if<FlushShard>(&a);
      return (flush != nullptr && flush->to == TierKind::kNvme) ||
             (!lets_go && std::holds_alternative<CancelDrain>(a));
    };
    ASSERT_TRUE(w.Save(2));
    ASSERT_TRUE(w.h.Admin<v1::RemoveCheckpointReply>(Rm(2, "nvme", true)).ok());
    if (!lets_go) {  // it was too late: the copy is published, and goes then
      w.h.PerformDelayed();
    }
    w.h.delay = nullptr;
    w.h.Advance(minutes(2));
    EXPECT_EQ(w.Nvme(), Steps{1}) << "it is not written again, and nothing of it stays";
    EXPECT_EQ(w.Manifests(), (Steps{1, 2})) << "remote takes it from memory";
  }
}

TEST(Removal, OfAStepThatIsBeingReadThere) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  w.DelayFlushes(TierKind::kRemote);
  ASSERT_TRUE(w.Save(2));
  ASSERT_TRUE(w.h.Admin<v1::RemoveCheckpointReply>(Rm(2, "nvme", true)).ok());
  EXPECT_EQ(w.Nvme(), (Steps{1, 2})) << "remote is being written from it";
  w.h.PerformDelayed();
  EXPECT_EQ(w.Nvme(), Steps{1});
  EXPECT_EQ(w.Manifests(), (Steps{1, 2}));
}

TEST(Removal, OfOneStepAfterTheOther) {
  TierWorld w(1, [](v1::DaemonConfig& c) { c.mutable_policy()->mutable_nvme()->set_keep_last(9); });
  for (Step step = 1; step <= 5; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  w.h.delay = [](const Action& a) { return std::holds_alternative<RemoveCopies>(a); };
  for (Step step = 1; step <= 3; ++step) {
    ASSERT_TRUE(w.h.Admin<v1::RemoveCheckpointReply>(Rm(step, "nvme")).ok());
  }
  EXPECT_FALSE(w.h.Admin<v1::RemoveCheckpointReply>(Rm(2, "nvme")).ok()) << "already going";
  EXPECT_EQ(
      w.Delayed<RemoveCopies>([](const RemoveCopies& r) { return r.tier == TierKind::kNvme; }), 1u);
  // What waits for its turn is gone for every decision: a restore does not choose it.
  const Restored got = w.Restore(nullptr, CheckpointId{1, 3});
  EXPECT_NE(got.tiers, std::vector<std::string>{"nvme"});
  w.h.PerformDelayed();
  EXPECT_EQ(w.Nvme(), (Steps{4, 5}));
}

TEST(Removal, OfAJobTakesItFromEveryTier) {
  TierWorld w(2);
  ASSERT_TRUE(w.Save(1));
  w.DelayFlushes();
  ASSERT_TRUE(w.Save(2));
  v1::RemoveJobRequest rm;
  rm.set_job("job");
  EXPECT_FALSE(w.h.Admin<v1::RemoveJobReply>(rm).ok()) << "it is in use";
  for (const TestClient& rank : w.ranks) {
    w.h.Kill(rank);
  }
  ASSERT_TRUE(w.h.Admin<v1::RemoveJobReply>(rm).ok());
  EXPECT_TRUE(w.h.nvme.copies.empty());
  EXPECT_TRUE(w.h.remote.copies.empty());
  EXPECT_TRUE(w.h.remote.manifests.empty());
  EXPECT_TRUE(w.h.states.empty());
  EXPECT_TRUE(w.h.files.empty());
  w.h.delay = nullptr;
  const Restored fresh = w.Restore();
  EXPECT_EQ(fresh.failure.reason(), v1::Failure::REASON_NOTHING_TO_RESTORE);
}

TEST(Removal, OfAJobWhoseTierFailsIsSaidAndTriedAgain) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  w.h.Kill(w.ranks[0]);
  w.h.fail = [](const Action& a) {
    const auto* remove = std::get_if<RemoveJobCopies>(&a);
    return remove != nullptr && remove->tier == TierKind::kRemote ? absl::UnavailableError("EIO")
                                                                  : absl::OkStatus();
  };
  v1::RemoveJobRequest rm;
  rm.set_job("job");
  EXPECT_EQ(w.h.Admin<v1::RemoveJobReply>(rm).status().code(), absl::StatusCode::kUnavailable);
  w.h.fail = nullptr;
  EXPECT_TRUE(w.h.Admin<v1::RemoveJobReply>(rm).ok());
  EXPECT_TRUE(w.h.remote.copies.empty());
}

// A flush that was cancelled is answered before its last write has returned.
TEST(Removal, OfAJobWaitsForWhatWasCancelledToEnd) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  w.h.Kill(w.ranks[0]);
  bool ended = false;
  w.h.fail = [&](const Action& a) {
    const auto* remove = std::get_if<RemoveJobCopies>(&a);
    return remove != nullptr && remove->tier == TierKind::kRemote && !ended
               ? absl::AbortedError("it has not ended")
               : absl::OkStatus();
  };
  v1::RemoveJobRequest rm;
  rm.set_job("job");
  AdminToken token = w.h.next_token;
  EXPECT_FALSE(w.h.Admin<v1::RemoveJobReply>(rm).ok());
  w.h.Advance(std::chrono::seconds(3));
  ASSERT_EQ(w.h.admin_replies.count(token), 0u) << "it waits";
  ended = true;
  w.h.Advance(kEndingLook);
  ASSERT_EQ(w.h.admin_replies.count(token), 1u);
  EXPECT_TRUE(w.h.admin_replies.at(token).status.ok());
  EXPECT_TRUE(w.h.remote.copies.empty());
  EXPECT_TRUE(w.h.states.empty());
}

TEST(Removal, OfAJobDoesNotWaitForEverForWhatHangs) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  w.h.Kill(w.ranks[0]);
  w.h.fail = [](const Action& a) {
    return std::holds_alternative<RemoveJobCopies>(a) ? absl::AbortedError("it has not ended")
                                                      : absl::OkStatus();
  };
  v1::RemoveJobRequest rm;
  rm.set_job("job");
  const AdminToken token = w.h.next_token;
  EXPECT_FALSE(w.h.Admin<v1::RemoveJobReply>(rm).ok());
  w.h.Advance(kSettle + kEndingLook);
  ASSERT_EQ(w.h.admin_replies.count(token), 1u);
  EXPECT_TRUE(absl::IsAborted(w.h.admin_replies.at(token).status));
}

TEST(Removal, OfAJobThatFailsHalfwayLeavesWhatItsTiersReallyHave) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  w.EndAll();
  w.h.Restart(true);
  w.h.fail = [](const Action& a) {
    const auto* remove = std::get_if<RemoveJobCopies>(&a);
    return remove != nullptr && remove->tier == TierKind::kRemote ? absl::UnavailableError("EROFS")
                                                                  : absl::OkStatus();
  };
  w.h.delay = [](const Action& a) { return std::holds_alternative<ScanRemote>(a); };
  v1::RemoveJobRequest rm;
  rm.set_job("job");
  EXPECT_EQ(w.h.Admin<v1::RemoveJobReply>(rm).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(w.h.Daemon().tiers(0).bytes_used(), 0u) << "nvme is empty";
  EXPECT_TRUE(w.h.Committed("job").empty()) << "nobody has looked yet what remote has left";
  EXPECT_EQ(w.Protection(), Steps(5));
  const Restored early = w.Restore();
  EXPECT_FALSE(early.done);
  EXPECT_EQ(early.failure.code(), 0u) << "it waits: " << early.failure.ShortDebugString();
  w.h.PerformDelayed();
  EXPECT_EQ(w.h.Committed("job"), (std::vector<std::string>{"1:2", "1:1"}));
  const Restored got = w.GoOn();
  EXPECT_TRUE(got.done) << got.failure.ShortDebugString();
  EXPECT_EQ(got.step, 2u);
  EXPECT_EQ(got.tiers, std::vector<std::string>{"remote"});
}

TEST(Removal, OfAJobThatHangsIsSaidAndGoesOn) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  w.h.Kill(w.ranks[0]);
  w.h.delay = [](const Action& a) {
    const auto* remove = std::get_if<RemoveJobCopies>(&a);
    return remove != nullptr && remove->tier == TierKind::kRemote;
  };
  v1::RemoveJobRequest rm;
  rm.set_job("job");
  const AdminToken token = w.h.next_token;
  EXPECT_FALSE(w.h.Admin<v1::RemoveJobReply>(rm).ok());
  ASSERT_EQ(w.Delayed<RemoveJobCopies>(), 1u);
  ASSERT_EQ(w.h.admin_replies.count(token), 0u);
  w.h.Feed(DrainStalled{std::get<RemoveJobCopies>(w.h.delayed[0]).drain, true,
                        "no progress for 60 s: remove a job in '/remote'"});
  ASSERT_EQ(w.h.admin_replies.count(token), 1u);
  const absl::Status told = w.h.admin_replies.at(token).status;
  EXPECT_EQ(told.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(told.message().find("remove a job in '/remote'"), std::string::npos) << told.message();
  w.h.PerformDelayed();
  EXPECT_TRUE(w.h.remote.copies.empty());
  EXPECT_TRUE(w.h.states.empty());
}

// A name that is forgotten to make room for another job is only forgotten.
TEST(Removal, AForgottenNameTakesNoCopiesWithIt) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  w.EndAll();
  w.h.nvme.Wipe();
  w.h.remote.scan = absl::UnavailableError("hangs");
  w.h.Restart(true);
  ASSERT_FALSE(w.h.remote.copies.empty());
  // One user's jobs up to the limit, all ended, none with a copy.
  w.h.remote.scan = absl::OkStatus();
  for (int i = 0; i < 1030; ++i) {
    w.h.remote.scan = absl::OkStatus();
    TestClient a = w.h.Connect(20'000 + i);
    a.Call(TestClient::JoinFrame("job" + std::to_string(i), 0, 1));
    w.h.Kill(a);
  }
  EXPECT_FALSE(w.h.remote.copies.empty());
}

}  // namespace
}  // namespace holdfast::testing
