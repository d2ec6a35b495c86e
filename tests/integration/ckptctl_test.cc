// ckptctl against the real daemon and real ranks.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "tests/integration/ctl.h"
#include "tests/integration/harness.h"

namespace holdfast {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

// A job of two ranks that has committed steps 10 and 20.
class CkptctlTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(node_.Start());
    Launch();
    for (const std::string& answer : DoAll(ranks_, "restore")) {
      ASSERT_THAT(answer, HasSubstr("NOTHING_TO_RESTORE"));
    }
    for (const char* step : {"10", "20"}) {
      ASSERT_THAT(DoAll(ranks_, std::string("save ") + step), ::testing::Each("ok sealed"));
      ASSERT_THAT(DoAll(ranks_, "committed"), ::testing::Each("ok committed"));
    }
  }
  void Launch() {
    ranks_ = StartRanks(node_, {.job = "llama"}, 2);
    for (const std::string& answer : DoAll(ranks_, "open")) {
      ASSERT_THAT(answer, HasSubstr("ok attempt="));
    }
  }
  void KillRanks() {
    for (const auto& rank : ranks_) {
      rank->Kill();
    }
    ranks_.clear();
  }

  Node node_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

TEST_F(CkptctlTest, StatusListAndInspectAgree) {
  const CtlAnswer status = Ctl(node_, {"status", "llama", "--json"});
  ASSERT_EQ(status.exit_code, 0) << status.errors;
  const json& job = status.parsed["jobs"][0];
  EXPECT_EQ(job["phase"], "running");
  EXPECT_EQ(job["ranks_alive"], 2);
  for (const json& line : job["protection"]) {
    EXPECT_EQ(line["any"], line["kind"] == "process") << line;
    EXPECT_EQ(line["step"], line["kind"] == "process" ? 20 : 0) << line;
  }
  const CtlAnswer list = Ctl(node_, {"list", "llama", "--json"});
  ASSERT_EQ(list.exit_code, 0) << list.errors;
  ASSERT_EQ(list.parsed["checkpoints"].size(), 2u);
  EXPECT_EQ(list.parsed["checkpoints"][0]["step"], 20);
  EXPECT_EQ(list.parsed["checkpoints"][1]["state"], "committed");
  const CtlAnswer shard = Ctl(node_, {"inspect", "llama", "--step", "10", "--rank", "1", "--json"});
  ASSERT_EQ(shard.exit_code, 0) << shard.errors;
  EXPECT_EQ(shard.parsed["step"], 10);
  EXPECT_EQ(shard.parsed["rank"], 1);
  EXPECT_EQ(shard.parsed["job_uuid"], job["uuid"]);
  for (const char* command : {"status", "list", "inspect"}) {
    EXPECT_EQ(Ctl(node_, {command, "llama"}).exit_code, 0) << command;
  }
}

TEST_F(CkptctlTest, VerifyFindsAFlippedByteAndTheStepIsNotOfferedAgain) {
  const CtlAnswer good = Ctl(node_, {"verify", "llama", "--all", "--json"});
  EXPECT_EQ(good.exit_code, 0) << good.errors;
  EXPECT_EQ(good.parsed["jobs"][0]["shards_checked"], 4);
  const CtlAnswer shard = Ctl(node_, {"inspect", "llama", "--step", "20", "--rank", "1", "--json"});
  ASSERT_EQ(shard.exit_code, 0) << shard.errors;
  const std::string image = node_.memory_dir() + "/" + shard.parsed["location"].get<std::string>();
  const auto offset = static_cast<off_t>(shard.parsed["slices"][0]["image_offset"].get<uint64_t>());
  const UniqueFd fd(::open(image.c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_TRUE(fd.valid()) << image;
  char byte = 0;
  ASSERT_EQ(::pread(fd.get(), &byte, 1, offset), 1);
  byte = static_cast<char>(byte ^ 1);
  ASSERT_EQ(::pwrite(fd.get(), &byte, 1, offset), 1);

  const CtlAnswer bad = Ctl(node_, {"verify", "--json"});
  EXPECT_EQ(bad.exit_code, 1) << bad.text << bad.errors;
  ASSERT_EQ(bad.parsed["jobs"][0]["bad"].size(), 1u) << bad.text;
  EXPECT_EQ(bad.parsed["jobs"][0]["bad"][0]["step"], 20);
  EXPECT_EQ(bad.parsed["jobs"][0]["bad"][0]["rank"], 1);
  EXPECT_THAT(bad.parsed["jobs"][0]["bad"][0]["what"].get<std::string>(),
              HasSubstr(std::to_string(offset)));
  EXPECT_EQ(Ctl(node_, {"list", "llama", "--json"}).parsed["checkpoints"][0]["state"], "bad");
  KillRanks();
  Launch();
  EXPECT_THAT(DoAll(ranks_, "restore"), ::testing::Each(HasSubstr("step=10")));
}

TEST_F(CkptctlTest, RestoreDecidesTheNextSession) {
  EXPECT_EQ(Ctl(node_, {"restore", "llama", "--step", "15"}).exit_code, 4);
  EXPECT_EQ(Ctl(node_, {"restore", "llama", "--step", "10"}).exit_code, 0);
  EXPECT_THAT(Ctl(node_, {"status", "llama"}).text, HasSubstr("\n  next restore "));
  KillRanks();
  Launch();
  EXPECT_THAT(DoAll(ranks_, "restore"), ::testing::Each(HasSubstr("step=10")));
  const CtlAnswer list = Ctl(node_, {"list", "llama", "--json"});
  for (const json& checkpoint : list.parsed["checkpoints"]) {
    EXPECT_EQ(checkpoint["on_line"], checkpoint["step"] == 10)
        << checkpoint;  // the later step was left
  }
  EXPECT_EQ(Ctl(node_, {"restore", "llama", "--from-scratch", "--yes"}).exit_code, 0);
  EXPECT_EQ(Ctl(node_, {"restore", "llama", "--clear"}).exit_code, 0);
  EXPECT_EQ(Ctl(node_, {"status", "llama", "--json"}).parsed["jobs"][0]["restore_point"], "");
}

TEST_F(CkptctlTest, RemoveWaitsForTheProcessesToEnd) {
  const CtlAnswer asked = Ctl(node_, {"rm", "llama"});
  EXPECT_EQ(asked.exit_code, 4);
  EXPECT_THAT(asked.errors, HasSubstr("nothing was removed"));
  const CtlAnswer refused = Ctl(node_, {"rm", "llama", "--yes"});
  EXPECT_EQ(refused.exit_code, 4);
  EXPECT_THAT(refused.errors, HasSubstr("is in use"));
  KillRanks();
  ASSERT_TRUE(node_.Until(
      [](const v1::GetStatusReply& reply) { return reply.jobs(0).ranks_alive() == 0; }));
  const CtlAnswer removed = Ctl(node_, {"rm", "llama", "--yes", "--json"});
  EXPECT_EQ(removed.exit_code, 0) << removed.errors;
  EXPECT_GT(removed.parsed["bytes_freed"], 0);
  EXPECT_EQ(Ctl(node_, {"list", "llama"}).exit_code, 4);
  EXPECT_EQ(Ctl(node_, {"status", "--json"}).parsed["daemon"]["memory_bytes_used"], 0);
}

// It asks again and again, over more connections than one user may have at a time.
TEST_F(CkptctlTest, DrainWaitsForLongerThanItHasConnections) {
  const CtlAnswer drained = Ctl(node_, {"drain", "--wait", "6s", "--json"});
  EXPECT_EQ(drained.exit_code, 1) << drained.text << drained.errors;
  EXPECT_EQ(drained.parsed["safe"], false);
  EXPECT_EQ(drained.parsed["jobs"][0]["job"], "llama");
  EXPECT_EQ(Ctl(node_, {"drain", "--undo"}).exit_code, 0);
}

TEST_F(CkptctlTest, DoctorAndAKilledDaemon) {
  const json well = Ctl(node_, {"doctor", "--json"}).parsed;
  for (const json& finding : well["findings"]) {
    for (const char* check : {"daemon", "admin socket", "client socket", "pidfd"}) {
      EXPECT_TRUE(finding["check"] != check || finding["verdict"] == "ok") << finding;
    }
    if (finding["check"] == "config") {
      EXPECT_EQ(finding["text"], node_.config_file() + " is understood") << "the daemon's own";
    }
  }
  node_.Kill();
  const CtlAnswer gone = Ctl(node_, {"status"});
  EXPECT_EQ(gone.exit_code, 3);
  EXPECT_THAT(gone.errors, HasSubstr("what was sealed is kept"));
  EXPECT_EQ(Ctl(node_, {"doctor"}).exit_code, 1);
}

}  // namespace
}  // namespace holdfast
