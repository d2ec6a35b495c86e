// What an operator does to durable tiers with ckptctl, against the real daemon.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <algorithm>

#include <filesystem>
#include <fstream>
#include <set>

#include "tests/integration/tier_fixture.h"

namespace holdfast {
namespace {

using nlohmann::json;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;

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
  bool Healthy(const std::string& tier) {
    const json tiers = Ask({"status", "--json"}).parsed["daemon"]["tiers"];
    return tiers[tier == "nvme" ? 0 : 1]["healthy"].get<bool>();
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
  json dry;
  const auto nothing_goes = [&](const v1::GetStatusReply&) {  // the last removal may have to end
    dry = Ask({"gc", "--dry-run", "--json"}).parsed;
    return std::none_of(dry["verdicts"].begin(), dry["verdicts"].end(),
                        [](const json& verdict) { return verdict["goes"].get<bool>(); });
  };
  EXPECT_TRUE(node_.Until(nothing_goes)) << dry;
  for (const json& verdict : dry["verdicts"]) {
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

TEST_F(TiersCtlTest, ARemovalThatATierRefusesIsToldInTheDaemonsWords) {
  ASSERT_NO_FATAL_FAILURE(AwaitEnd());
  std::filesystem::rename(node_.remote_dir(), node_.remote_dir() + ".away");
  const CtlAnswer refused = Ctl(node_, {"rm", "job", "--yes"});
  EXPECT_EQ(refused.exit_code, 4) << refused.errors;
  EXPECT_THAT(refused.errors, HasSubstr("not all copies of the job could be removed; try again"));
  EXPECT_THAT(refused.errors, Not(HasSubstr("closed the connection")));
  std::filesystem::rename(node_.remote_dir() + ".away", node_.remote_dir());
  EXPECT_TRUE(node_.Until([&](const v1::GetStatusReply&) {
    return Ctl(node_, {"rm", "job", "--yes"}).exit_code == 0;
  }));
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

// A name is bytes. One that is no UTF-8 is no reason to answer nothing.
TEST_F(TiersCtlTest, NamesThatAreNoTextAreReportedToo) {
  const std::string record = Record("nvme", 10, 0);
  WriteText(node_.nvme_dir(0) + "/notes-\xe4.txt", "not yours");
  WriteText(std::filesystem::path(record).parent_path().string() + "/\xff\xfe", "not yours");
  std::filesystem::create_directory(node_.remote_dir() + "/job-\xc3");
  WriteText(node_.remote_dir() + "/job/20-a1\xf0", "not yours");
  const std::vector<std::string> shown = {"/notes-\\xe4.txt", "/\\xff\\xfe", "/job-\\xc3",
                                          "/20-a1\\xf0"};
  const auto expect_all = [&](const json& parsed) {
    const std::string files = parsed["unknown_files"].dump();
    for (const std::string& name : shown) {
      const std::string in_json = json(name).dump();
      EXPECT_THAT(files, HasSubstr(in_json.substr(1, in_json.size() - 2)));
    }
  };
  expect_all(Ask({"rebuild", "--json"}).parsed);
  expect_all(Ask({"gc", "--dry-run", "--json"}).parsed);
  EXPECT_THAT(Ask({"gc", "--dry-run"}).text, HasSubstr("notes-\\\\xe4.txt"));
  Ask({"status"});
  Ask({"where", "job"});
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
  Ask({"repair", "job"});
  EXPECT_THAT(Ask({"where", "job", "--step", "20"}).text, Not(HasSubstr("bad: ")));
  Ask({"verify", "job", "--all", "--tier", "remote"});
}

// Somebody else removed files: what the daemon goes on naming is missing, and counts no more.
TEST_F(TiersCtlTest, VerifySaysWhichFilesAreGoneAndTheTableIsLowered) {
  const std::filesystem::path in_remote = std::filesystem::path(Image("remote", 20, 0));
  const std::string on_a_drive = Image("nvme", 20, 1);
  std::filesystem::remove_all(in_remote.parent_path());
  std::filesystem::remove(Record("nvme", 20, 1));
  std::filesystem::remove(on_a_drive);
  const CtlAnswer gone = Ctl(node_, {"verify", "job", "--tier", "remote", "--json"});
  EXPECT_EQ(gone.exit_code, 1) << gone.text << gone.errors;
  const json remote = gone.parsed["jobs"][0];
  EXPECT_EQ(remote["bad_count"], 2) << remote;
  EXPECT_EQ(remote["shards_skipped"], 0) << remote;
  EXPECT_EQ(remote["bytes_checked"], 0) << remote;
  ASSERT_EQ(remote["bad"].size(), 2u) << remote;
  for (const json& bad : remote["bad"]) {
    EXPECT_THAT(bad["what"].get<std::string>(), HasSubstr("is gone: somebody else removed it"));
  }
  EXPECT_EQ(remote["bad"][0]["location"], in_remote.string());
  const CtlAnswer drive = Ctl(node_, {"verify", "job", "--all", "--tier", "nvme"});
  EXPECT_EQ(drive.exit_code, 1) << drive.text << drive.errors;
  EXPECT_THAT(drive.text, HasSubstr("BAD: job step 20 (attempt 1) rank 1, " + on_a_drive +
                                    ": the copy is gone: somebody else removed it\n"));
  EXPECT_THAT(drive.text, HasSubstr("1 shard is BAD: 4 shards"));
  // On the drive it is written anew; a step that was removed from remote does not come back.
  Ask({"repair", "job", "--tier", "nvme"});
  EXPECT_EQ(Ctl(node_, {"repair", "job", "--tier", "remote"}).exit_code, 1);
  EXPECT_FALSE(std::filesystem::exists(in_remote));
  const json where = Ask({"where", "job", "--json"}).parsed;
  for (const json& copy : where["copies"]) {
    EXPECT_EQ(copy["state"] == "good", std::filesystem::exists(copy["location"])) << copy;
  }
  const json status = Ask({"status", "job", "--json"}).parsed;
  for (const json& line : status["jobs"][0]["protection"]) {
    const bool here = line["kind"] == "process" || line["kind"] == "reboot";
    EXPECT_EQ(line["step"], here ? 20 : 10) << line;
  }
}

// A directory that is away says nothing about the copies in it.
TEST_F(TiersCtlTest, VerifyOfATierThatIsAwayFailsAndNothingIsBad) {
  for (const std::string& dir : {node_.remote_dir(), node_.nvme_dir(0)}) {
    const std::string tier = dir == node_.remote_dir() ? "remote" : "nvme";
    std::filesystem::rename(dir, dir + ".away");
    const CtlAnswer away = Ctl(node_, {"verify", "job", "--all", "--tier", tier});
    EXPECT_EQ(away.exit_code, 4) << away.text << away.errors;
    EXPECT_THAT(away.errors, HasSubstr("'" + dir + "' is not there"));
    EXPECT_THAT(away.errors, Not(HasSubstr("closed the connection")));
    EXPECT_FALSE(Healthy(tier)) << "it is known now";
    EXPECT_EQ(Ctl(node_, {"verify", "job", "--all"}).exit_code, 4) << "nor is the rest all";
    std::filesystem::rename(dir + ".away", dir);
    EXPECT_TRUE(node_.Until([this, &tier](const v1::GetStatusReply&) { return Healthy(tier); }))
        << "it is looked for again by itself";
    Ask({"verify", "job", "--all", "--tier", tier});
    EXPECT_TRUE(Healthy(tier));
  }
  EXPECT_EQ(Ask({"where", "job", "--json"}).text.find("bad"), std::string::npos);
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
  // The newest that remote has is an older one.
  const CtlAnswer older = Ctl(node_, {"verify", "job", "--tier", "remote", "--json"});
  EXPECT_EQ(older.exit_code, 0) << older.errors;
  EXPECT_EQ(older.parsed["jobs"][0]["shards_checked"], 2) << older.text;
  const CtlAnswer nothing = Ctl(node_, {"rm", "job", "--step", "110", "--tier", "remote"});
  EXPECT_EQ(nothing.exit_code, 4);
  EXPECT_THAT(nothing.errors, HasSubstr("step 110 of attempt 1 has no copies in remote"));
  const CtlAnswer unknown = Ctl(node_, {"explain", "job", "--step", "7"});
  EXPECT_EQ(unknown.exit_code, 4) << unknown.text;
  EXPECT_THAT(unknown.errors, HasSubstr("has no step 7"));
  const CtlAnswer name = Ctl(node_, {"set", "job", "nvme.no_such=1"});
  EXPECT_EQ(name.exit_code, 2);
  EXPECT_THAT(name.errors, HasSubstr("ckptctl: set: nvme.no_such: unknown setting; "));
  const CtlAnswer value = Ctl(node_, {"set", "nvme.bandwidth_bytes_per_s_max=many"});
  EXPECT_EQ(value.exit_code, 2);
  EXPECT_THAT(value.errors, HasSubstr("ckptctl: set: nvme.bandwidth_bytes_per_s_max: "));
}

// The table counts what lies on a tmpfs as if it outlived a reboot: so it is said.
TEST(TiersCtl, ATierOnATmpfsIsNoted) {
  const TemporaryDirectory shared("/dev/shm");
  std::filesystem::create_directory(shared.Path("remote"));
  NodeOptions options;
  options.nvme_dirs = {shared.Path("drive")};
  options.remote_dir = shared.Path("remote");
  Node node(options);
  ASSERT_TRUE(node.Start());
  ASSERT_TRUE(node.Until([](const v1::GetStatusReply& status) {
    return status.daemon().tiers(0).notes_size() > 0;
  })) << "as soon as the drive was read";
  EXPECT_THAT(Ctl(node, {"status"}).text,
              HasSubstr("nvme   note: " + shared.Path("drive") +
                        ": it lies on a tmpfs, and is empty after a reboot; use a drive\n"));
  Ctl(node, {"rebuild"});
  EXPECT_THAT(Ctl(node, {"status"}).text,
              HasSubstr("remote note: " + shared.Path("remote") +
                        ": it lies on a tmpfs, and is empty after a reboot; use a file system that "
                        "outlives the node\n"));
}

}  // namespace
}  // namespace holdfast
