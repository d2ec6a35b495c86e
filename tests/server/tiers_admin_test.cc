// What people ask about copies in every tier (docs/ckptctl.md): where, explain, timeline, set,
// rebuild.
#include <gtest/gtest.h>

#include "base/status.h"
#include "tests/server/tier_world.h"

namespace holdfast::testing {
namespace {

using Steps = std::vector<Step>;

// Where the job's step is said to be, tiers in order, one for each copy.
std::vector<std::string> Where(TierWorld& w, Step step) {
  v1::WhereRequest where;
  where.set_job("job");
  where.set_step(step);
  std::vector<std::string> tiers;
  if (const auto reply = w.h.Admin<v1::WhereReply>(where); reply.ok()) {
    for (const v1::ShardCopy& copy : reply->copies()) {
      tiers.push_back(copy.tier());
    }
  }
  return tiers;
}

// What a scan of the tier would tell now; for those that are told late.
TierScanned Scanned(const TierWorld& w, TierKind tier, DrainId drain, const std::string& job) {
  TierScanned scanned;
  scanned.tier = tier;
  scanned.drain = drain;
  scanned.dir = tier == TierKind::kNvme ? "/nvme0" : "";
  scanned.job_name = job;
  scanned.jobs = (tier == TierKind::kNvme ? w.h.nvme : w.h.remote).Find(job);
  return scanned;
}

v1::SetOptionsRequest Set(const std::string& job, const std::string& name,
                          const std::string& value) {
  v1::SetOptionsRequest request;
  request.set_job(job);
  auto& option = *request.add_options();
  option.set_name(name);
  option.set_value(value);
  return request;
}

TEST(TierAdmin, WhereNamesEveryCopy) {
  TierWorld w(2);
  ASSERT_TRUE(w.Save(1));
  v1::WhereRequest where;
  where.set_job("job");
  where.set_step(1);
  const auto reply = w.h.Admin<v1::WhereReply>(where);
  ASSERT_TRUE(reply.ok());
  ASSERT_EQ(reply->copies_size(), 6);
  for (const v1::ShardCopy& copy : reply->copies()) {
    EXPECT_EQ(copy.state(), "good");
    EXPECT_NE(copy.location(), "");
    EXPECT_EQ(copy.node(), copy.tier() == "remote" ? "" : "node");
  }
  where.set_step(9);
  EXPECT_EQ(w.h.Admin<v1::WhereReply>(where).status().code(), absl::StatusCode::kNotFound);
  where.set_step(1);
  EXPECT_FALSE(w.h.Admin<v1::WhereReply>(where, 4711).ok()) << "another user's";
}

// Steps and tiers of what a verification would read.
std::set<std::pair<Step, TierKind>> Listed(TierWorld& w, const v1::VerifyRequest& request) {
  std::set<std::pair<Step, TierKind>> all;
  if (const auto reply = w.h.Admin<ListedShards>(request); reply.ok()) {
    for (const ReadableShard& shard : reply->shards) {
      all.insert({shard.copy.id.step, shard.tier});
    }
  }
  return all;
}

TEST(TierAdmin, ACopyThatIsKnownToBeBadIsListedStill) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  v1::VerifyRequest named;
  named.set_job("job");
  named.set_attempt(1);
  named.set_step(1);
  named.set_tier("remote");
  const std::set<std::pair<Step, TierKind>> there = {{1, TierKind::kRemote}};
  EXPECT_EQ(Listed(w, named), there);
  // The step cannot be restored any more, and what was found gone is still asked for.
  w.Reboot();
  for (const TierKind tier : {TierKind::kNvme, TierKind::kRemote}) {
    w.h.Feed(
        DurableCopyJudged{tier, w.Shard(1), "the copy is gone: somebody else removed it", true});
  }
  EXPECT_EQ(Listed(w, named), there);
  EXPECT_FALSE(w.h.Status("job").protection(1).any());
  named.set_attempt(7);
  EXPECT_TRUE(Listed(w, named).empty());
}

TEST(TierAdmin, TheNewestOfATierIsTheNewestThatItHas) {
  TierWorld w(
      2, [](v1::DaemonConfig& c) { c.mutable_policy()->mutable_remote()->set_every_steps(10); });
  v1::VerifyRequest newest;
  newest.set_job("job");
  newest.set_newest(true);
  newest.set_tier("remote");
  EXPECT_EQ(w.h.Admin<ListedShards>(newest).status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(w.Save(10));
  ASSERT_TRUE(w.Save(11));
  EXPECT_EQ(Listed(w, newest), (std::set<std::pair<Step, TierKind>>{{10, TierKind::kRemote}}));
  newest.set_tier("nvme");
  EXPECT_EQ(Listed(w, newest), (std::set<std::pair<Step, TierKind>>{{11, TierKind::kNvme}}));
  newest.set_tier("");
  EXPECT_EQ(Listed(w, newest),
            (std::set<std::pair<Step, TierKind>>{{11, TierKind::kMemory}, {11, TierKind::kNvme}}));
  // After a reboot memory has none.
  w.Reboot();
  newest.set_tier("memory");
  EXPECT_TRUE(Listed(w, newest).empty());
}

TEST(TierAdmin, AStepThatNobodyKnowsIsNotExplained) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  v1::ExplainRequest explain;
  explain.set_job("job");
  explain.set_step(7);
  const auto unknown = w.h.Admin<v1::ExplainReply>(explain);
  EXPECT_EQ(unknown.status().code(), absl::StatusCode::kNotFound);
  EXPECT_NE(unknown.status().message().find("has no step 7"), std::string::npos)
      << unknown.status();
  explain.set_step(1);
  EXPECT_TRUE(w.h.Admin<v1::ExplainReply>(explain).ok());
  explain.set_attempt(9);
  EXPECT_EQ(w.h.Admin<v1::ExplainReply>(explain).status().code(), absl::StatusCode::kNotFound);
  explain.set_all_steps(true);
  EXPECT_TRUE(w.h.Admin<v1::ExplainReply>(explain).ok());
}

TEST(TierAdmin, WhatIsWrongWithASettingIsSaidByItsName) {
  TierWorld w;
  v1::SetOptionsRequest twice = Set("job", "nvme.keep_last", "3");
  *twice.add_options() = twice.options(0);
  for (const auto& [request, said] : std::vector<std::pair<v1::SetOptionsRequest, std::string>>{
           {Set("job", "nvme.no_such", "1"), "set: nvme.no_such: unknown setting"},
           {Set("job", "nvme.keep_last", "many"), "set: nvme.keep_last: "},
           {Set("job", "nvme.keep_last", "0"), "set: nvme.keep_last: 0 is not within"},
           {Set("job", "tape.keep_last", "1"), "set: tape: unknown setting"},
           {Set("job", "nvme.every_steps", "-1"),
            "set: nvme.every_steps: '-1' is neither a number (10) nor a size (4GiB), a time "
            "(10min) "
            "or a word"},
           {Set("job", "a.b.c", "1"), "set: 'a.b.c=1': expected TIER.SETTING=VALUE"},
           {twice, "set: nvme.keep_last: given twice"},
           {Set("", "nvme.bandwidth_bytes_per_s_max", "many"),
            "set: nvme.bandwidth_bytes_per_s_max: "}}) {
    const absl::Status refused = w.h.Admin<v1::SetOptionsReply>(request, 0).status();
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
    EXPECT_EQ(std::string(refused.message()).substr(0, said.size()), said) << refused;
  }
}

TEST(TierAdmin, ExplainSaysWhy) {
  TierWorld w(2);
  ASSERT_TRUE(w.Save(1));
  w.h.nvme.damaged.insert(w.Shard(1, 0));
  w.h.remote.damaged.insert(w.Shard(1, 0));
  w.Reboot();
  EXPECT_FALSE(w.Restore().done);
  v1::ExplainRequest explain;
  explain.set_job("job");
  explain.set_step(1);
  const auto reply = w.h.Admin<v1::ExplainReply>(explain);
  ASSERT_TRUE(reply.ok());
  ASSERT_EQ(reply->steps_size(), 1);
  EXPECT_FALSE(reply->steps(0).restorable());
  EXPECT_TRUE(reply->steps(0).on_line());
  EXPECT_GT(reply->steps(0).reasons_size(), 0);
}

TEST(TierAdmin, TimelineShowsEachStage) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  v1::TimelineRequest timeline;
  timeline.set_job("job");
  const auto reply = w.h.Admin<v1::TimelineReply>(timeline);
  ASSERT_TRUE(reply.ok());
  ASSERT_EQ(reply->steps_size(), 1);
  std::set<std::string> stages;
  for (const v1::StageTime& stage : reply->steps(0).stages()) {
    stages.insert(stage.stage());
    EXPECT_LE(stage.begin_unix_us(), stage.end_unix_us());
    EXPECT_EQ(stage.outcome(), "done");
  }
  EXPECT_EQ(stages, (std::set<std::string>{"write", "commit", "nvme", "manifest", "remote"}));
}

TEST(TierAdmin, SetChangesTheJobsPolicyForGood) {
  TierWorld w;
  ASSERT_TRUE(w.h.Admin<v1::SetOptionsReply>(Set("job", "nvme.every_steps", "5")).ok());
  for (Step step = 1; step <= 6; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  EXPECT_EQ(w.Nvme(), (Steps{1, 5}));
  w.RestartDaemon();
  EXPECT_EQ(w.h.Status("job").policy().nvme().every_steps(), 5u);
  v1::SetOptionsRequest clear;
  clear.set_job("job");
  clear.set_clear(true);
  ASSERT_TRUE(w.h.Admin<v1::SetOptionsReply>(clear).ok());
  EXPECT_EQ(w.h.Status("job").policy().nvme().every_steps(), 1u);
  EXPECT_EQ(w.h.Admin<v1::SetOptionsReply>(Set("job", "nvme.keep_last", "0")).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(w.h.Admin<v1::SetOptionsReply>(Set("job", "nvme.keep_last", "1\nx: 2")).ok());
  EXPECT_FALSE(w.h.Admin<v1::SetOptionsReply>(Set("job", "nvme.keep_last", "2"), 4711).ok());
}

TEST(TierAdmin, LimitsAreTheOperatorsToSet) {
  TierWorld w;
  EXPECT_EQ(w.h.Admin<v1::SetOptionsReply>(Set("", "nvme.bandwidth_bytes_per_s_max", "524288000"))
                .status()
                .code(),
            absl::StatusCode::kPermissionDenied);
  const auto set =
      w.h.Admin<v1::SetOptionsReply>(Set("", "nvme.bandwidth_bytes_per_s_max", "524288000"), 0);
  ASSERT_TRUE(set.ok()) << set.status();
  ASSERT_TRUE(w.h.limits);
  EXPECT_EQ(w.h.limits->nvme.bandwidth_bytes_per_s_max(), 500ull << 20);
  EXPECT_FALSE(w.h.Admin<v1::SetOptionsReply>(Set("", "nvme.dirs", "x"), 0).ok());
  // The ranges are those of the configuration.
  const auto slow =
      w.h.Admin<v1::SetOptionsReply>(Set("", "nvme.bandwidth_bytes_per_s_max", "1"), 0);
  EXPECT_EQ(Message(slow.status()),
            "set: nvme.bandwidth_bytes_per_s_max: 1 bytes (1 B) is not within 1 MiB to 1 TiB, nor "
            "0");
  EXPECT_FALSE(w.h.Admin<v1::SetOptionsReply>(Set("", "remote.io_priority", "9"), 0).ok());
  EXPECT_FALSE(w.h.Admin<v1::SetOptionsReply>(Set("", "remote.nice", "20"), 0).ok());
  EXPECT_EQ(w.h.limits->nvme.bandwidth_bytes_per_s_max(), 500ull << 20);
  const auto nice = w.h.Admin<v1::SetOptionsReply>(Set("", "nvme.nice", "3"), 0);
  ASSERT_TRUE(nice.ok()) << nice.status();
  EXPECT_NE(nice->text().find("if it refuses"), std::string::npos) << nice->text();
  EXPECT_EQ(set->text().find("if it refuses"), std::string::npos) << set->text();
}

TEST(TierAdmin, RebuildFindsWhatIsThereAndForgetsWhatIsNot) {
  TierWorld w(2, [](v1::DaemonConfig& c) { c.mutable_policy()->mutable_nvme()->set_keep_last(5); });
  for (Step step = 1; step <= 3; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  w.h.Advance(std::chrono::seconds(1));
  std::erase_if(w.h.nvme.copies, [](const auto& c) { return c.first.step == 2; });
  const auto reply = w.h.Admin<v1::RebuildReply>(v1::RebuildRequest(), 0);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->jobs(), 1u);
  v1::WhereRequest where;
  where.set_job("job");
  where.set_step(2);
  const auto found = w.h.Admin<v1::WhereReply>(where);
  ASSERT_TRUE(found.ok());
  for (const auto& copy : found->copies()) {
    EXPECT_NE(copy.tier(), "nvme");
  }
  EXPECT_FALSE(w.h.Admin<v1::RebuildReply>(v1::RebuildRequest(), 1000).ok());
}

TEST(TierAdmin, ARebuildJudgesNoStepBeforeAllDrivesHaveAnswered) {
  TierWorld w(2, [](v1::DaemonConfig& c) {
    c.clear_remote();
    c.mutable_nvme()->add_dirs("/nvme1");
  });
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  const auto all = w.h.nvme.copies;
  std::erase_if(w.h.nvme.copies, [](const auto& c) { return c.first.step == 2; });
  w.Reboot();
  ASSERT_EQ(w.h.Committed("job").front(), "1:1");
  w.h.nvme.copies = all;  // somebody brought them back
  DrainId scan = 0;
  w.h.delay = [&](const Action& a) {
    const auto* nvme = std::get_if<ScanNvme>(&a);
    scan = nvme != nullptr ? nvme->drain : scan;
    return nvme != nullptr;
  };
  w.h.Admin<v1::RebuildReply>(v1::RebuildRequest(), 0).IgnoreError();
  w.h.delayed.clear();
  for (const Rank rank : {0u, 1u}) {
    TierScanned drive = Scanned(w, TierKind::kNvme, scan, "");
    drive.dir = rank == 0 ? "/nvme0" : "/nvme1";
    std::erase_if(drive.jobs.at(0).copies,
                  [&](const DurableCopy& copy) { return copy.copy.id.rank != rank; });
    w.h.Feed(drive);
  }
  EXPECT_EQ(w.h.Committed("job").front(), "1:2");
}

// What the catalog says of the durable tiers is what lies there.
void ExpectIndexed(const TierWorld& w) {
  for (const TierKind tier : {TierKind::kNvme, TierKind::kRemote}) {
    std::set<ShardId> rows;
    for (const auto& [row, location] : w.h.index) {
      if (row.first == tier) {
        rows.insert(row.second);
      }
    }
    std::set<ShardId> there;
    for (const auto& [id, copy] : (tier == TierKind::kNvme ? w.h.nvme : w.h.remote).copies) {
      there.insert(id);
    }
    EXPECT_TRUE(rows == there) << TierName(tier) << ": " << rows.size() << ", " << there.size();
  }
}

TEST(TierAdmin, ARebuildMakesTheIndexAnew) {
  TierWorld w(2, [](v1::DaemonConfig& c) { c.mutable_policy()->mutable_nvme()->set_keep_last(5); });
  for (Step step = 1; step <= 3; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  ExpectIndexed(w);
  w.h.Advance(std::chrono::seconds(1));
  std::erase_if(w.h.nvme.copies, [](const auto& c) { return c.first.step == 2; });
  w.h.remote.copies.erase(w.Shard(3, 1));
  // The drives have answered when one more step is written and an old one goes.
  w.h.delay = [](const Action& a) { return std::holds_alternative<ScanRemote>(a); };
  w.h.Admin<v1::RebuildReply>(v1::RebuildRequest(), 0).IgnoreError();
  w.h.delay = nullptr;
  ASSERT_TRUE(w.Save(4));
  v1::RemoveCheckpointRequest rm;
  rm.set_job("job");
  rm.set_step(1);
  rm.set_tier("nvme");
  rm.set_force(true);
  ASSERT_TRUE(w.h.Admin<v1::RemoveCheckpointReply>(rm).ok());
  w.h.PerformDelayed();
  w.h.Advance(std::chrono::seconds(1));
  EXPECT_EQ(w.h.nvme.copies.count(w.Shard(4)), 1u);
  EXPECT_EQ(w.h.nvme.copies.count(w.Shard(1)), 0u);
  ExpectIndexed(w);
}

TEST(TierAdmin, ARemovedJobLeavesTheIndex) {
  TierWorld w(2);
  ASSERT_TRUE(w.Save(1));
  EXPECT_FALSE(w.h.index.empty());
  for (const TestClient& rank : w.ranks) {
    w.h.Kill(rank);
  }
  v1::RemoveJobRequest rm;
  rm.set_job("job");
  const auto removed = w.h.Admin<v1::RemoveJobReply>(rm);
  ASSERT_TRUE(removed.ok()) << removed.status();
  EXPECT_TRUE(w.h.index.empty());
}

TEST(TierAdmin, RebuildForgetsATierThatIsEmptyNow) {
  for (const TierKind tier : {TierKind::kNvme, TierKind::kRemote}) {
    TierWorld w;
    ASSERT_TRUE(w.Save(1));
    w.h.Advance(std::chrono::seconds(1));
    (tier == TierKind::kNvme ? w.h.nvme : w.h.remote).Wipe();
    v1::RebuildRequest rebuild;
    rebuild.set_tier(tier == TierKind::kNvme ? "remote" : "nvme");
    ASSERT_TRUE(w.h.Admin<v1::RebuildReply>(rebuild, 0).ok());
    EXPECT_EQ(Where(w, 1), (std::vector<std::string>{"memory", "nvme", "remote"}))
        << "the other one was asked";
    rebuild.set_tier(std::string(TierName(tier)));
    const auto reply = w.h.Admin<v1::RebuildReply>(rebuild, 0);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->shards(), 2u) << "as it is when that is known";
    const std::string other = tier == TierKind::kNvme ? "remote" : "nvme";
    EXPECT_EQ(Where(w, 1), (std::vector<std::string>{"memory", other}));
    EXPECT_EQ(w.h.Daemon().tiers(tier == TierKind::kNvme ? 0 : 1).bytes_used(), 0u);
  }
}

TEST(TierAdmin, NothingInMemoryIsReadAgain) {
  TierWorld w;
  v1::RebuildRequest rebuild;
  rebuild.set_tier("memory");
  const absl::Status refused = w.h.Admin<v1::RebuildReply>(rebuild, 0).status();
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_NE(Message(refused).find("what lies in memory is read when ckptd starts"),
            std::string::npos)
      << refused;
}

TEST(TierAdmin, RebuildForgetsNothingWhereATierCouldNotBeRead) {
  for (const TierKind tier : {TierKind::kNvme, TierKind::kRemote}) {
    TierWorld w;
    ASSERT_TRUE(w.Save(1));
    w.h.Advance(std::chrono::seconds(1));
    FakeTier& asked = tier == TierKind::kNvme ? w.h.nvme : w.h.remote;
    asked.scan = absl::UnavailableError("input/output error");
    const auto reply = w.h.Admin<v1::RebuildReply>(v1::RebuildRequest(), 0);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->problems_size(), 1);
    EXPECT_EQ(Where(w, 1), (std::vector<std::string>{"memory", "nvme", "remote"}));
  }
}

// One directory could not be read, the others were.
TEST(TierAdmin, ARebuildForgetsNothingThatAScanMayHaveMissed) {
  for (const TierKind tier : {TierKind::kNvme, TierKind::kRemote}) {
    TierWorld w(1,
                [](v1::DaemonConfig& c) { c.mutable_policy()->mutable_nvme()->set_keep_last(5); });
    ASSERT_TRUE(w.Save(1));
    ASSERT_TRUE(w.Save(2));
    w.h.Advance(std::chrono::seconds(1));
    DrainId drain = 0;
    w.h.delay = [&](const Action& a) {
      const auto* nvme = std::get_if<ScanNvme>(&a);
      const auto* remote = std::get_if<ScanRemote>(&a);
      drain = nvme != nullptr ? nvme->drain : remote != nullptr ? remote->drain : drain;
      return nvme != nullptr || remote != nullptr;
    };
    v1::RebuildRequest rebuild;
    rebuild.set_tier(std::string(TierName(tier)));
    w.h.Admin<v1::RebuildReply>(rebuild, 0).IgnoreError();
    ASSERT_EQ(w.h.delayed.size(), 1u);
    w.h.delayed.clear();
    w.h.delay = nullptr;
    TierScanned scanned = Scanned(w, tier, drain, "");
    scanned.dir = tier == TierKind::kNvme ? "/nvme0" : "/remote";
    scanned.hidden["job"] = "list '2-a1': Input/output error (EIO)";
    std::erase_if(scanned.jobs.at(0).copies,
                  [](const DurableCopy& copy) { return copy.copy.id.step == 2; });
    w.h.Feed(scanned);
    EXPECT_EQ(Where(w, 2), (std::vector<std::string>{"memory", "nvme", "remote"}));
    const std::string name(TierName(tier));
    EXPECT_NE(w.Tier(name).problem().find("EIO"), std::string::npos) << w.Tier(name).problem();
    w.h.Advance(std::chrono::seconds(20));
    EXPECT_EQ(w.Tier(name).problem(), "") << name << " was read again";
  }
}

TEST(TierAdmin, RebuildCountsTheJobThatItFinds) {
  TierWorld w(2);
  ASSERT_TRUE(w.Save(1));
  w.EndAll();
  w.h.states.clear();
  w.h.config.clear_remote();
  w.h.late_drives = true;
  w.h.Restart(true);
  const auto reply = w.h.Admin<v1::RebuildReply>(v1::RebuildRequest(), 0);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->jobs(), 1u);
  EXPECT_EQ(reply->checkpoints(), 1u);
  EXPECT_EQ(reply->shards(), 2u);
}

TEST(TierAdmin, ALateScanIsNotJudgedByANewerRebuild) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  DrainId first = 0;
  w.h.delay = [&](const Action& a) {
    const auto* scan = std::get_if<ScanRemote>(&a);
    first = scan != nullptr ? scan->drain : first;
    return scan != nullptr;
  };
  w.RestartDaemon();
  ASSERT_NE(first, 0u);
  w.h.delayed.clear();
  TierScanned late = Scanned(w, TierKind::kRemote, first, "job");
  TierScanned hangs{TierKind::kRemote, "", first, "job", absl::DeadlineExceededError("hangs")};
  w.h.Feed(hangs);
  w.h.delay = nullptr;
  w.h.Advance(std::chrono::seconds(31));
  ASSERT_TRUE(w.Restore().done);
  ASSERT_TRUE(w.Save(2));
  ASSERT_EQ(w.Manifests(), (Steps{1, 2}));
  w.h.Advance(std::chrono::seconds(1));
  w.h.delay = [](const Action& a) { return std::holds_alternative<ScanRemote>(a); };
  w.h.Admin<v1::RebuildReply>(v1::RebuildRequest(), 0).IgnoreError();
  w.h.Feed(late);
  EXPECT_EQ(Where(w, 2), (std::vector<std::string>{"memory", "nvme", "remote"}))
      << "it was written after that scan";
  w.h.PerformDelayed();
  EXPECT_EQ(Where(w, 2), (std::vector<std::string>{"memory", "nvme", "remote"}));
}

// Nor one whose drive hung, nor what a rebuild sees in between.
TEST(TierAdmin, ALateScanDoesNotBringBackARemovedJob) {
  for (const TierKind tier : {TierKind::kNvme, TierKind::kRemote}) {
    TierWorld w;
    ASSERT_TRUE(w.Save(1));
    DrainId first = 0;
    w.h.delay = [&](const Action& a) {
      const auto* remote = std::get_if<ScanRemote>(&a);
      const auto* nvme = std::get_if<ScanNvme>(&a);
      const bool this_one = tier == TierKind::kNvme ? nvme != nullptr : remote != nullptr;
      first = this_one ? (nvme != nullptr ? nvme->drain : remote->drain) : first;
      return this_one;
    };
    w.h.nvme.scan = absl::UnavailableError("input/output error");
    w.EndAll();
    w.RestartDaemon();
    w.h.nvme.scan = absl::OkStatus();
    w.h.Advance(std::chrono::seconds(31));  // drives that failed are read again
    ASSERT_EQ(w.h.delayed.size(), 1u);
    w.h.delayed.clear();
    w.h.delay = nullptr;
    TierScanned late = Scanned(w, tier, first, tier == TierKind::kNvme ? "" : "job");
    TierScanned hangs = late;
    hangs.status = absl::DeadlineExceededError("hangs");
    hangs.jobs.clear();
    w.h.Feed(hangs);
    w.h.Advance(std::chrono::seconds(1));
    v1::RemoveJobRequest rm;
    rm.set_job("job");
    const auto removed = w.h.Admin<v1::RemoveJobReply>(rm, 0);
    ASSERT_TRUE(removed.ok()) << removed.status();
    w.h.Advance(std::chrono::seconds(1));
    w.h.Feed(late);
    EXPECT_EQ(w.h.Status("job").name(), "");
  }
}

TEST(TierAdmin, ALateScanDoesNotBringBackWhatARemovalThatFailedTook) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  w.EndAll();
  w.h.nvme.scan = absl::UnavailableError("input/output error");
  w.RestartDaemon();
  w.h.nvme.scan = absl::OkStatus();
  DrainId first = 0;
  w.h.delay = [&](const Action& a) {
    const auto* nvme = std::get_if<ScanNvme>(&a);
    first = nvme != nullptr && first == 0 ? nvme->drain : first;
    return nvme != nullptr;
  };
  w.h.Advance(std::chrono::seconds(31));
  ASSERT_EQ(w.h.delayed.size(), 1u);
  w.h.delayed.clear();
  const TierScanned late = Scanned(w, TierKind::kNvme, first, "");
  w.h.Advance(std::chrono::seconds(1));
  w.h.fail = [](const Action& a) {
    const auto* remove = std::get_if<RemoveJobCopies>(&a);
    return remove != nullptr && remove->tier == TierKind::kRemote ? absl::UnavailableError("EROFS")
                                                                  : absl::OkStatus();
  };
  v1::RemoveJobRequest rm;
  rm.set_job("job");
  EXPECT_FALSE(w.h.Admin<v1::RemoveJobReply>(rm).ok());
  w.h.Feed(late);
  EXPECT_EQ(Where(w, 1), std::vector<std::string>{"remote"});
  const FakeTier before = w.h.remote;
  w.h.PerformDelayed();
  // Of all jobs: it began before the next removal that fails, and ends after it.
  w.h.Advance(std::chrono::seconds(1));
  w.h.delay = [](const Action& a) {
    const auto* scan = std::get_if<ScanRemote>(&a);
    return scan != nullptr && scan->job_name.empty();
  };
  w.h.Admin<v1::RebuildReply>(v1::RebuildRequest(), 0).IgnoreError();
  w.h.Advance(std::chrono::seconds(1));
  w.h.remote.copies.clear();
  w.h.remote.manifests.clear();
  EXPECT_FALSE(w.h.Admin<v1::RemoveJobReply>(rm).ok());
  EXPECT_TRUE(Where(w, 1).empty());
  w.h.remote = before;
  w.h.PerformDelayed();
  EXPECT_TRUE(Where(w, 1).empty());
}

TEST(TierAdmin, AfterARemovalThatFailedTheTiersAreReadAnew) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  w.EndAll();
  w.RestartDaemon();
  w.h.fail = [](const Action& a) {
    const auto* remove = std::get_if<RemoveJobCopies>(&a);
    return remove != nullptr && remove->tier == TierKind::kRemote ? absl::UnavailableError("EROFS")
                                                                  : absl::OkStatus();
  };
  v1::RemoveJobRequest rm;
  rm.set_job("job");
  EXPECT_FALSE(w.h.Admin<v1::RemoveJobReply>(rm).ok());
  EXPECT_EQ(Where(w, 1), std::vector<std::string>{"remote"});
}

TEST(TierAdmin, OnlyTheDriveThatFailedIsReadAgain) {
  TierWorld w(1, [](v1::DaemonConfig& c) { c.mutable_nvme()->add_dirs("/nvme1"); });
  w.h.failing_drive = "/nvme1";
  w.h.unknown_files = {"/nvme0/what: not ckptd's"};
  w.Reboot();
  w.h.drives_read.clear();
  for (int i = 0; i < 3; ++i) {
    w.h.Advance(std::chrono::minutes(1));
  }
  ASSERT_GE(w.h.drives_read.size(), 2u);
  for (const std::string& dir : w.h.drives_read) {
    EXPECT_EQ(dir, "/nvme1");
  }
  w.h.failing_drive.clear();
  w.h.Advance(std::chrono::minutes(1));
  w.h.drives_read.clear();
  w.h.Advance(std::chrono::minutes(3));
  EXPECT_TRUE(w.h.drives_read.empty()) << "all of them are known";
}

TEST(TierAdmin, WhatSeveralScansFindIsToldOnce) {
  TierWorld w;
  w.h.unknown_files = {"/nvme0/what: not ckptd's"};
  w.Reboot();
  for (int i = 0; i < 3; ++i) {
    TierScanned again;
    again.tier = TierKind::kNvme;
    again.dir = "/nvme0";
    again.unknown_files = w.h.unknown_files;
    again.problems = {"'/nvme0/image': a bad record"};
    w.h.Feed(again);
  }
  v1::CollectGarbageRequest gc;
  gc.set_dry_run(true);
  const auto reply = w.h.Admin<v1::CollectGarbageReply>(gc, 0);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->unknown_files_size(), 1);
  std::vector<Report> told;
  std::copy_if(w.h.reports.begin(), w.h.reports.end(), std::back_inserter(told),
               [](const Report& r) { return r.text == "'/nvme0/image': a bad record"; });
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0].tier, TierKind::kNvme) << "it counts as that tier's";
}

// One shard lies in nvme alone, the other in remote alone: each is what makes the step whole.
TEST(TierAdmin, ARebuildJudgesNothingBeforeAllOfItHasBeenRead) {
  for (const bool drives_first : {false, true}) {
    TierWorld w(2, [](v1::DaemonConfig& c) {
      c.mutable_policy()->mutable_nvme()->set_keep_last(4);
      c.mutable_policy()->mutable_remote()->set_keep_last(4);
    });
    for (Step step = 1; step <= 3; ++step) {
      ASSERT_TRUE(w.Save(step));
    }
    w.Reboot();
    w.h.nvme.copies.erase(w.Shard(2, 0));
    w.h.remote.copies.erase(w.Shard(2, 1));
    w.h.Advance(std::chrono::seconds(1));
    w.h.delay = [drives_first](const Action& a) {
      return drives_first ? std::holds_alternative<ScanRemote>(a)
                          : std::holds_alternative<ScanNvme>(a);
    };
    w.h.Admin<v1::RebuildReply>(v1::RebuildRequest(), 0).IgnoreError();
    w.h.delay = nullptr;
    w.h.PerformDelayed();
    w.h.Advance(std::chrono::minutes(1));
    EXPECT_EQ(w.h.nvme.copies.count(w.Shard(2, 1)), 1u) << drives_first;
    EXPECT_EQ(w.h.remote.copies.count(w.Shard(2, 0)), 1u) << drives_first;
    const Restored got = w.Restore(nullptr, CheckpointId{0, 2});
    EXPECT_TRUE(got.done) << got.failure.message();
    EXPECT_EQ(got.tiers, (std::vector<std::string>{"remote", "nvme"}));
  }
}

TEST(TierAdmin, ARebuildDoesNotBringBackWhatIsKnownToBeBadOrWasJustRemoved) {
  TierWorld w(1, [](v1::DaemonConfig& c) { c.mutable_policy()->mutable_nvme()->set_keep_last(5); });
  w.h.fail = [](const Action& action) {
    const auto* flush = std::get_if<FlushShard>(&action);
    return flush != nullptr && flush->replace ? absl::InternalError("what is bad stays so")
                                              : absl::OkStatus();
  };
  ASSERT_TRUE(w.Save(1));
  ASSERT_TRUE(w.Save(2));
  w.h.nvme.damaged.insert(w.Shard(2));
  w.Reboot();
  ASSERT_TRUE(w.Restore().done);
  EXPECT_EQ(w.h.Status("job").protection(1).from(), "remote");
  w.h.Advance(std::chrono::seconds(1));
  // The drives' answer is of before the removal.
  w.h.delay = [](const Action& a) { return std::holds_alternative<ScanNvme>(a); };
  w.h.Admin<v1::RebuildReply>(v1::RebuildRequest(), 0).IgnoreError();
  v1::RemoveCheckpointRequest rm;
  rm.set_job("job");
  rm.set_step(1);
  rm.set_tier("nvme");
  EXPECT_EQ(w.h.Admin<v1::RemoveCheckpointReply>(rm).status().code(),
            absl::StatusCode::kUnavailable);
  rm.set_force(true);
  ASSERT_TRUE(w.h.Admin<v1::RemoveCheckpointReply>(rm).ok());
  w.h.PerformDelayed();
  EXPECT_TRUE(w.h.nvme.copies.count(w.Shard(1)) == 0) << "when the drives have been read";
  EXPECT_EQ(w.h.Status("job").protection(1).from(), "remote") << "the bad copy is bad still";
  v1::WhereRequest where;
  where.set_job("job");
  where.set_step(1);
  const auto reply = w.h.Admin<v1::WhereReply>(where);
  ASSERT_TRUE(reply.ok());
  for (const auto& copy : reply->copies()) {
    EXPECT_NE(copy.tier(), "nvme") << "it was removed while the scan went on";
  }
}

// The removal that failed made the core forget what lies there: only a scan of its own tells.
TEST(TierAdmin, ARebuildDoesNotAnswerForAJobWhoseRemovalFailedMeanwhile) {
  TierWorld w(1, [](v1::DaemonConfig& c) { c.mutable_nvme()->add_dirs("/nvme1"); });
  ASSERT_TRUE(w.Save(1));
  w.h.Kill(w.ranks[0]);
  w.h.Advance(std::chrono::seconds(1));
  w.h.delay = [](const Action& a) {
    return std::holds_alternative<ScanNvme>(a);  // remote answers at once
  };
  w.h.Admin<v1::RebuildReply>(v1::RebuildRequest(), 0).IgnoreError();
  w.h.fail = [](const Action& a) {
    const auto* rm = std::get_if<RemoveJobCopies>(&a);
    return rm != nullptr && rm->tier == TierKind::kRemote ? absl::UnavailableError("EIO")
                                                          : absl::OkStatus();
  };
  w.h.remote.scan = absl::UnavailableError("EIO: the directory");
  v1::RemoveJobRequest rm;
  rm.set_job("job");
  w.h.Admin<v1::RemoveJobReply>(rm).IgnoreError();
  w.h.delay = nullptr;
  w.h.fail = nullptr;
  w.h.PerformDelayed();
  EXPECT_NE(w.Tier("remote").problem().find("EIO"), std::string::npos)
      << w.Tier("remote").problem();
  w.h.remote.scan = absl::OkStatus();
  w.h.Advance(std::chrono::minutes(1));
  EXPECT_EQ(w.Tier("remote").problem(), "");
  EXPECT_EQ(w.Restore().step, 1u) << "from remote";
}

TEST(TierAdmin, StatusTellsOfEachTier) {
  TierWorld w;
  ASSERT_TRUE(w.Save(1));
  const v1::DaemonStatus daemon = w.h.Daemon();
  ASSERT_EQ(daemon.tiers_size(), 2);
  EXPECT_EQ(daemon.tiers(0).tier(), "nvme");
  EXPECT_EQ(daemon.tiers(0).bytes_used(), kSlot / 2);
  EXPECT_TRUE(daemon.tiers(0).healthy());
  w.h.nvme.scan = absl::UnavailableError("input/output error");
  w.RestartDaemon();
  EXPECT_FALSE(w.h.Daemon().tiers(0).healthy());
  EXPECT_NE(w.Tier("nvme").problem().find("input/output error"), std::string::npos);
}

}  // namespace
}  // namespace holdfast::testing
