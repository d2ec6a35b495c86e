// Durable tiers end to end: what was saved comes back from the drives and from the remote
// directory, whatever else was lost, and what it costs stays bounded.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>

#include "tests/integration/tier_fixture.h"

namespace holdfast {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class TiersTest : public TierTest {
 protected:
  void SetUp() override { ASSERT_TRUE(node_.Start()); }
};

TEST_F(TiersTest, MemoryLostTheStepComesFromTheDrives) {
  Begin();
  for (const uint64_t step : {1, 2, 3}) {
    Save(step, "nvme");
  }
  PowerCut();
  ASSERT_TRUE(node_.Start());
  Launch();
  EXPECT_THAT(Restored(), Each(AllOf(HasSubstr("attempt=1 step=3 source=nvme why="),
                                     HasSubstr("memory copy absent"))));
  SaveEverywhere(4);  // and on it goes
  // What was fetched or saved since is in memory again.
  KillRanks();
  Launch();
  EXPECT_THAT(Restored(), Each(::testing::EndsWith("attempt=2 step=4")));
}

TEST_F(TiersTest, AnEmptyNodeTakesTheJobFromTheRemoteDirectory) {
  Begin();
  SaveEverywhere(1);
  SaveEverywhere(2);
  PowerCut();
  EmptyDrives();
  EmptyDirectory(node_.state_dir());
  ASSERT_TRUE(node_.Start());
  Launch();
  EXPECT_THAT(Restored(), Each(AllOf(HasSubstr("attempt=1 step=2 source=remote why="),
                                     HasSubstr("memory copy absent"), HasSubstr("nvme copy"))));
  SaveEverywhere(3);
  EXPECT_TRUE(std::filesystem::exists(Image("nvme", 3, 0, 2)));
  EXPECT_TRUE(std::filesystem::exists(Image("remote", 3, 1, 2)));
}

// A mount that is away for a minute: nothing of it is taken for lost, nothing for removed.
TEST_F(TiersTest, ARemoteDirectoryThatIsAwayIsNeitherLostNorEmptied) {
  Begin("other");
  SaveEverywhere(5);
  KillRanks();
  Begin();
  SaveEverywhere(1);
  SaveEverywhere(2);
  PowerCut();
  EmptyDrives();
  ASSERT_TRUE(node_.Start());
  ASSERT_TRUE(node_.Until([](const v1::GetStatusReply& status) {
    return status.jobs_size() == 2 && status.jobs(0).tiers_size() == 2 &&
           status.jobs(0).tiers(1).any() && status.jobs(1).tiers_size() == 2 &&
           status.jobs(1).tiers(1).any();
  }));
  const std::string away = node_.remote_dir() + ".away";
  std::filesystem::rename(node_.remote_dir(), away);
  Launch();
  EXPECT_THAT(Restored(), Each(HasSubstr("error UNAVAILABLE")));
  EXPECT_THAT(Ctl(node_, {"verify", "other"}).exit_code, ::testing::Ne(0));
  const CtlAnswer removed = Ctl(node_, {"rm", "other", "--yes"});
  EXPECT_NE(removed.exit_code, 0);
  EXPECT_THAT(removed.errors + removed.text, HasSubstr("is not there"));
  EXPECT_FALSE(std::filesystem::exists(node_.remote_dir())) << "made by nobody";
  std::filesystem::rename(away, node_.remote_dir());
  ASSERT_TRUE(node_.Until([](const v1::GetStatusReply& status) {
    return status.jobs(0).tiers(1).any() && status.jobs(1).tiers(1).any();
  })) << "it is looked for again by itself";
  EXPECT_THAT(Restored(), Each(HasSubstr("attempt=1 step=2 source=remote")));
  EXPECT_EQ(Ctl(node_, {"rm", "other", "--yes"}).exit_code, 0);
  EXPECT_TRUE(
      node_.Until([this](const v1::GetStatusReply&) { return DurableFiles("/other").empty(); }));
}

// The kernel tells a daemon that has a file's lease when somebody opens the file.
TEST_F(TiersTest, AFileThatSomebodyOpensDuringItsLeaseEndsNobody) {
  Begin();
  ASSERT_EQ(::kill(node_.pid(), SIGIO), 0);
  SaveEverywhere(1);
  EXPECT_TRUE(node_.running());
}

TEST_F(TiersTest, WhatAKilledDaemonHadNotFlushedIsFlushedByTheNext) {
  Begin();
  Save(1, "remote");
  for (const uint64_t step : {2, 3, 4}) {
    Save(step, "");
  }
  node_.Kill();
  ASSERT_TRUE(node_.Start());
  EXPECT_TRUE(node_.Until([](const v1::GetStatusReply& status) {
    return status.jobs_size() == 1 && status.jobs(0).tiers_size() == 2 &&
           status.jobs(0).tiers(0).step() == 4 && status.jobs(0).tiers(1).step() == 4;
  }));
}

TEST_F(TiersTest, AJobsOwnPolicyHolds) {
  Begin("job",
        "nvme.every_steps=2 nvme.keep_last=1 remote.every_steps=4 remote.every_ms=0 "
        "remote.keep_every_steps=4 remote.keep_last=1");
  for (uint64_t step = 1; step <= 9; ++step) {
    Save(step, step % 4 == 0 ? "remote" : step % 2 == 0 ? "nvme" : "");
  }
  EXPECT_EQ(Image("nvme", 5, 0), "") << "an odd step is not the first of its two";
  EXPECT_NE(Image("nvme", 8, 0), "");
  EXPECT_TRUE(std::filesystem::exists(Image("remote", 4, 0)));
  EXPECT_TRUE(std::filesystem::exists(Image("remote", 8, 0)));
  EXPECT_FALSE(std::filesystem::exists(Image("remote", 6, 0)));
  EXPECT_TRUE(node_.Until([this](const v1::GetStatusReply&) {
    return Image("nvme", 2, 0).empty() && Image("nvme", 4, 0).empty() &&
           Image("nvme", 6, 1).empty();
  })) << "keep_last 1";
  const auto job = node_.Job("job");
  ASSERT_TRUE(job.has_value());
  EXPECT_EQ(job->policy().nvme().every_steps(), 2u);
  EXPECT_EQ(job->policy().nvme().keep_last(), 1u);
  EXPECT_EQ(job->policy().remote().keep_every_steps(), 4u);
}

TEST_F(TiersTest, RemovedJobsLeaveNothingInAnyTier) {
  Begin("other");
  SaveEverywhere(7);
  KillRanks();
  Begin();
  SaveEverywhere(1);
  SaveEverywhere(2);
  EXPECT_EQ(Ctl(node_, {"rm", "job", "--yes"}).exit_code, 4) << "its processes live";
  KillRanks();
  ASSERT_TRUE(node_.Until([](const v1::GetStatusReply& status) {
    return status.jobs(0).ranks_alive() == 0 && status.jobs(1).ranks_alive() == 0;
  }));
  const CtlAnswer removed = Ctl(node_, {"rm", "job", "--yes"});
  EXPECT_EQ(removed.exit_code, 0) << removed.errors;
  EXPECT_TRUE(node_.Until([this](const v1::GetStatusReply&) {
    return DurableFiles("/job").empty() && DurableFiles(".intent").empty();
  })) << ::testing::PrintToString(DurableFiles("/job"));
  PowerCut();
  ASSERT_TRUE(node_.Start());
  EXPECT_TRUE(node_.Until([](const v1::GetStatusReply& status) {
    return status.jobs_size() == 1 && status.jobs(0).name() == "other" &&
           status.jobs(0).tiers_size() == 2 && status.jobs(0).tiers(0).any();
  })) << "the other job is as it was";
  Begin();  // the name is free again
  SaveEverywhere(1);
}

// ---- Nothing grows ----

uint64_t ResidentKiB(pid_t pid) {
  return NumberAfter(ReadText("/proc/" + std::to_string(pid) + "/status"), "VmRSS:").value_or(0);
}

// Without the catalog's: RocksDB opens and closes its files as it likes.
size_t Descriptors(const Node& node) {
  size_t count = 0;
  const std::string directory = "/proc/" + std::to_string(node.pid()) + "/fd/";
  for (const std::string& number : FilesIn(directory, "")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(directory + number, gone);
    count += StartsWith(target, node.state_dir() + "/catalog") ? 0 : 1;
  }
  return count;
}

size_t Threads(const Node& node) {
  return FilesIn("/proc/" + std::to_string(node.pid()) + "/task", "").size();
}

TEST_F(TiersTest, FiftyCyclesOfFlushAndRetentionLeaveNothingBehind) {
  Begin();
  const auto quiet = [this] {
    // Retention has caught up: three steps of two ranks in each tier, nothing under way.
    EXPECT_TRUE(node_.Until([this](const v1::GetStatusReply& status) {
      return status.jobs_size() == 1 && status.jobs(0).tiers_size() == 2 &&
             status.jobs(0).tiers(0).checkpoints() <= 3 &&
             status.jobs(0).tiers(1).checkpoints() <= 3 && DurableFiles(".intent").empty() &&
             DurableFiles(".tmp").empty() &&
             DurableFiles(".safetensors").size() + DurableFiles(".record").size() <= 24;
    })) << ::testing::PrintToString(DurableFiles("/"));
  };
  size_t descriptors = 0;
  size_t threads = 0;
  uint64_t resident = 0;
  uint64_t files = 0;
  for (uint64_t step = 1; step <= 60; ++step) {
    SaveEverywhere(step);
    if (step == 10) {
      quiet();
      descriptors = Descriptors(node_);
      threads = Threads(node_);
      resident = ResidentKiB(node_.pid());
      files = DurableFiles(".safetensors").size() + DurableFiles(".record").size();
    }
  }
  quiet();
  // One a cycle would be fifty; gRPC's own come and go.
  EXPECT_LE(Descriptors(node_), descriptors + 8);
  EXPECT_LE(Threads(node_), threads + 8);
  EXPECT_LE(DurableFiles(".safetensors").size() + DurableFiles(".record").size(), files);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LE(ResidentKiB(node_.pid()), resident + 8 * 1024);
#endif
  // What is kept to be overwritten is bounded by what was ever there at a time.
  EXPECT_LE(DurableFiles("/.holdfast/pool/").size(), 16u);
}

}  // namespace
}  // namespace holdfast
