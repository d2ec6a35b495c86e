// What an operator does to durable tiers with ckptctl, against the real daemon.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "tests/integration/tier_fixture.h"

namespace holdfast {
namespace {

using nlohmann::json;
using ::testing::Each;
using ::testing::HasSubstr;

class TiersCtlTest : public TierTest {
 protected:
  void SetUp() override {
    ASSERT_TRUE(node_.Start());
    Begin();
    SaveEverywhere(10);
    SaveEverywhere(20);
  }
  CtlAnswer Ask(std::vector<std::string> arguments) {
    CtlAnswer answer = Ctl(node_, std::move(arguments));
    EXPECT_EQ(answer.exit_code, 0) << answer.errors << answer.text;
    return answer;
  }
  // Steps that list says to be in a tier.
  std::set<uint64_t> StepsIn(const std::string& tier) {
    std::set<uint64_t> steps;
    for (const v1::Checkpoint& checkpoint : node_.List("job")) {
      for (const std::string& one : checkpoint.tiers()) {
        if (one == tier) {
          steps.insert(checkpoint.step());
        }
      }
    }
    return steps;
  }
  void AwaitEnd() {
    KillRanks();
    ASSERT_TRUE(node_.Until([](const v1::GetStatusReply& status) {
      return status.jobs_size() == 1 && status.jobs(0).ranks_alive() == 0;
    }));
  }
};

TEST_F(TiersCtlTest, WhereNamesEveryFile) {
  const json copies = Ask({"where", "job", "--step", "20", "--json"}).parsed["copies"];
  std::set<std::string> tiers;
  for (const json& copy : copies) {
    EXPECT_EQ(copy["state"], "good") << copy;
    tiers.insert(copy["tier"]);
    if (copy["tier"] != "memory") {
      const std::string path = copy["location"];
      EXPECT_EQ(path, Image(copy["tier"], 20, copy["rank"]));
      EXPECT_EQ(std::filesystem::file_size(path), copy["bytes"].get<uint64_t>());
    }
  }
  EXPECT_EQ(copies.size(), 6u) << copies;
  EXPECT_EQ(tiers, (std::set<std::string>{"memory", "nvme", "remote"}));
}

TEST_F(TiersCtlTest, StatusExplainAndTimelineTellOfTheTiers) {
  const json status = Ask({"status", "job", "--json"}).parsed;
  ASSERT_EQ(status["daemon"]["tiers"].size(), 2u);
  for (const json& tier : status["daemon"]["tiers"]) {
    EXPECT_EQ(tier["state"], "ok") << tier;
    EXPECT_GT(tier["bytes_written"], 0) << tier;
  }
  for (const json& line : status["jobs"][0]["protection"]) {
    EXPECT_EQ(line["step"], 20) << line;
  }
  const json explained = Ask({"explain", "job", "--json"}).parsed;
  EXPECT_THAT(explained["next_restore"].get<std::string>(), HasSubstr("step 20"));
  EXPECT_TRUE(explained["steps"][0]["restorable"].get<bool>());

  const TemporaryDirectory scratch;
  const std::string file = scratch.Path("trace.json");
  const json timeline = Ask({"timeline", "job", "--trace", file, "--json"}).parsed;
  std::set<std::string> stages;
  for (const json& stage : timeline["steps"].back()["stages"]) {
    EXPECT_EQ(stage["outcome"], "done") << stage;
    EXPECT_GE(stage["end_unix_us"], stage["begin_unix_us"]) << stage;
    stages.insert(stage["stage"]);
  }
  EXPECT_THAT(stages, ::testing::IsSupersetOf({"write", "commit", "nvme", "remote"}));
  // What is no plain file is written into, not replaced: a device, a pipe, a link.
  const std::string link = scratch.Path("link");
  const std::string target = scratch.Path("target");
  std::filesystem::create_symlink(target, link);
  Ask({"timeline", "job", "--trace", link, "--json"});
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_FALSE(json::parse(ReadText(target), nullptr, false).is_discarded());
  const json trace = json::parse(ReadText(file), nullptr, false);
  ASSERT_FALSE(trace.is_discarded());
  const json& events = trace.is_array() ? trace : trace["traceEvents"];
  EXPECT_GT(events.size(), 10u);
  for (const json& event : events) {
    EXPECT_TRUE(event.contains("ph") && event.contains("pid")) << event;
  }
}

TEST_F(TiersCtlTest, PinnedStepsOutliveEveryRetention) {
  Ask({"pin", "job", "--step", "10"});
  for (const uint64_t step : {30, 40, 50, 60}) {
    SaveEverywhere(step);
  }
  const std::set<uint64_t> wanted = {10, 40, 50, 60};
  const auto kept = [&](const v1::GetStatusReply&) {
    return StepsIn("nvme") == wanted && StepsIn("remote") == wanted;
  };
  EXPECT_TRUE(node_.Until(kept)) << ::testing::PrintToString(StepsIn("nvme"));
  EXPECT_EQ(Ctl(node_, {"rm", "job", "--step", "10"}).exit_code, 4) << "it is pinned";
  const json dry = Ask({"gc", "--dry-run", "--json"}).parsed;
  for (const json& verdict : dry["verdicts"]) {
    EXPECT_FALSE(verdict["goes"].get<bool>()) << verdict;
    if (verdict["step"] == 10) {
      EXPECT_THAT(verdict["why"].get<std::string>(), HasSubstr("pinned"));
    }
  }
  // A pin is durable.
  node_.Kill();
  ASSERT_TRUE(node_.Start());
  EXPECT_TRUE(node_.Until(kept));
  Ask({"unpin", "job", "--step", "10"});
  Ask({"gc", "job"});
  EXPECT_TRUE(node_.Until([&](const v1::GetStatusReply&) {
    return StepsIn("nvme").count(10) == 0 && StepsIn("remote").count(10) == 0 &&
           DurableFiles("/10-a1").empty();
  })) << ::testing::PrintToString(DurableFiles("/10-a1"));
}

TEST_F(TiersCtlTest, StepsAreRemovedFromOneTierOrFromAll) {
  Ask({"rm", "job", "--step", "10", "--tier", "nvme"});
  EXPECT_TRUE(node_.Until([&](const v1::GetStatusReply&) {
    return Image("nvme", 10, 0).empty() && Image("nvme", 10, 1).empty() &&
           StepsIn("nvme") == std::set<uint64_t>{20};
  }));
  EXPECT_TRUE(std::filesystem::exists(Image("remote", 10, 0)));
  Ask({"rm", "job", "--step", "10"});
  EXPECT_TRUE(node_.Until([&](const v1::GetStatusReply&) {
    return DurableFiles("/10-a1").empty() && StepsIn("remote") == std::set<uint64_t>{20};
  }));
  const CtlAnswer refused = Ctl(node_, {"rm", "job", "--step", "20", "--tier", "remote"});
  EXPECT_EQ(refused.exit_code, 4) << "nothing would survive the loss of the node";
  EXPECT_TRUE(std::filesystem::exists(Image("remote", 20, 1)));
  Ask({"rm", "job", "--step", "20", "--tier", "remote", "--force"});
  EXPECT_TRUE(node_.Until(
      [&](const v1::GetStatusReply&) { return DurableFiles("remote/job/20").empty(); }));
}

TEST_F(TiersCtlTest, FilesOfOthersAreReportedAndSurvive) {
  const std::vector<std::string> theirs = {
      node_.nvme_dir(0) + "/notes.txt", node_.remote_dir() + "/job/README",
      std::filesystem::path(Image("nvme", 10, 0)).parent_path().string() + "/mine.bin",
      std::filesystem::path(Image("remote", 10, 0)).parent_path().string() + "/.hidden"};
  for (const std::string& path : theirs) {
    WriteText(path, "not yours");
  }
  ASSERT_NO_FATAL_FAILURE(AwaitEnd());
  Ask({"rebuild"});
  const std::string dry = Ask({"gc", "--dry-run"}).text;
  for (const std::string& path : theirs) {
    EXPECT_THAT(dry, HasSubstr(path));
  }
  ASSERT_EQ(Ctl(node_, {"rm", "job", "--yes"}).exit_code, 0);
  EXPECT_TRUE(node_.Until([&](const v1::GetStatusReply&) {
    return DurableFiles("/job").size() == 4 + 3 && DurableFiles(".intent").empty();
  })) << ::testing::PrintToString(DurableFiles("/job"));
  for (const std::string& path : theirs) {
    EXPECT_EQ(ReadText(path), "not yours") << path;
  }
}

TEST_F(TiersCtlTest, RebuildMakesTheCatalogFromTheTiersAlone) {
  const auto listed = [this] { return Ask({"list", "job", "--json"}).parsed["checkpoints"]; };
  const json before = listed();
  PowerCut();
  std::filesystem::remove_all(node_.state_dir() + "/catalog");
  ASSERT_TRUE(node_.Start());
  const CtlAnswer rebuilt = Ctl(node_, {"rebuild", "--json"});
  EXPECT_EQ(rebuilt.exit_code, 0) << rebuilt.text << rebuilt.errors;
  EXPECT_EQ(rebuilt.parsed["jobs"], 1) << rebuilt.text;
  EXPECT_EQ(rebuilt.parsed["checkpoints"], 2) << rebuilt.text;
  const json after = listed();
  ASSERT_EQ(after.size(), before.size()) << after;
  for (size_t i = 0; i < after.size(); ++i) {
    for (const char* field : {"attempt", "step", "state", "on_line", "shards", "world_size"}) {
      EXPECT_EQ(after[i][field], before[i][field]) << field << after;
    }
    EXPECT_EQ(after[i]["tiers"], (json{"nvme", "remote"})) << after;
  }
  Launch();
  EXPECT_THAT(Restored(), Each(HasSubstr("step=20 source=nvme")));
}

TEST_F(TiersCtlTest, VerifyReadsEveryTier) {
  const json good = Ask({"verify", "job", "--all", "--json"}).parsed["jobs"][0];
  EXPECT_EQ(good["shards_checked"], 12) << good;
  const std::string image = Image("remote", 20, 1);
  std::string bytes = ReadText(image);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 16);
  WriteText(image, bytes);
  const CtlAnswer bad = Ctl(node_, {"verify", "job", "--tier", "remote", "--json"});
  EXPECT_EQ(bad.exit_code, 1) << bad.text;
  ASSERT_EQ(bad.parsed["jobs"][0]["bad"].size(), 1u) << bad.text;
  EXPECT_EQ(bad.parsed["jobs"][0]["bad"][0]["location"], image);
  EXPECT_THAT(Ask({"where", "job", "--step", "20"}).text, HasSubstr("bad: "));
}

TEST_F(TiersCtlTest, LimitsAndPoliciesAreSetWhileItRuns) {
  Ask({"set", "nvme.bandwidth_bytes_per_s_max=20MiB", "remote.io_priority=7"});
  EXPECT_TRUE(node_.Until([](const v1::GetStatusReply& status) {
    return status.daemon().tiers(0).bandwidth_bytes_per_s_max() == 20u << 20;
  }));
  SaveEverywhere(30);
  Ask({"set", "job", "nvme.every_steps=100", "remote.every_steps=0", "nvme.keep_last=1"});
  const json policy = Ask({"status", "job", "--json"}).parsed["jobs"][0]["policy"];
  EXPECT_EQ(policy["nvme"]["every_steps"], 100) << policy;
  EXPECT_EQ(policy["remote"]["every_steps"], 0) << policy;
  Save(40, "");
  Save(110, "nvme");  // the first of its hundred
  EXPECT_EQ(Image("nvme", 40, 0), "");
  EXPECT_FALSE(std::filesystem::exists(Image("remote", 110, 0)));
  EXPECT_EQ(Ctl(node_, {"set", "job", "nvme.no_such=1"}).exit_code, 4);
  EXPECT_EQ(Ctl(node_, {"set", "nvme.bandwidth_bytes_per_s_max=many"}).exit_code, 4);
}

}  // namespace
}  // namespace holdfast
