// A remote file system that hangs in the middle of a flush: nothing else waits for it, and when it
// answers again the flush goes on by itself.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>

#include "tests/integration/hanging_fs.h"
#include "tests/integration/tier_fixture.h"

namespace holdfast {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;

NodeOptions OnMount(const HangingMount& mount) {
  NodeOptions options = TierNode();
  options.remote = false;
  options.remote_dir = mount.path();
  options.remote_options = "stall_timeout_ms: 1000, ";
  return options;
}

bool HasNoCatalog(const v1::GetStatusReply& reply) {
  const auto& problems = reply.daemon().problems();
  return std::any_of(problems.begin(), problems.end(), [](const std::string& problem) {
    return problem.find("without the catalog") != std::string::npos;
  });
}

class Mounted {
 protected:
  HangingMount mount_;
};

class HungMountTest : private Mounted, public TierTest {
 protected:
  HungMountTest() : TierTest(OnMount(mount_)) {}
  void SetUp() override {
    if (!mount_.mounted()) {
      GTEST_SKIP() << "needs root, /dev/fuse and mounting in a namespace of its own";
    }
    ASSERT_TRUE(node_.Start());
    Begin();
    SaveEverywhere(1);
    // The next write gets stuck, and everything after it.
    mount_.HangAtWrite();
    Save(2, "nvme");
    ASSERT_TRUE(mount_.AwaitHanging());
  }
  bool Stalled() {
    return node_.Until([](const v1::GetStatusReply& status) {
      return status.daemon().tiers_size() == 2 && status.daemon().tiers(1).stalled() > 0;
    });
  }
  HangingMount& mount() { return mount_; }
};

TEST_F(HungMountTest, NothingElseWaitsAndItGoesOnByItself) {
  EXPECT_TRUE(Stalled());
  for (const uint64_t step : {3, 4, 5, 6, 7, 8}) {
    Save(step, "nvme");
  }
  const CtlAnswer status = Ctl(node_, {"status", "job"});
  EXPECT_EQ(status.exit_code, 0) << status.errors;
  EXPECT_THAT(status.text, HasSubstr("STALLED")) << status.text;
  EXPECT_EQ(Ctl(node_, {"gc", "--dry-run"}).exit_code, 0);
  EXPECT_EQ(Ctl(node_, {"explain", "job"}).exit_code, 0);
  KillRanks();
  Launch();
  EXPECT_THAT(Restored(), Each(HasSubstr("step=8")));
  Save(9, "nvme");
  mount().Release();
  EXPECT_TRUE(node_.Until([](const v1::GetStatusReply& reply) {
    return reply.jobs(0).tiers(1).step() == 9 && reply.daemon().tiers(1).stalled() == 0;
  }));
  SaveEverywhere(10);
}

TEST_F(HungMountTest, TheCheckOfTheSettingsSaysWhatDoesNotAnswer) {
  const TemporaryDirectory scratch;
  std::vector<std::string> arguments = node_.Arguments();
  arguments.push_back("--check-config");
  Child check({.arguments = arguments, .error_file = scratch.Path("err"), .pipes = true});
  EXPECT_EQ(check.Wait(), 0);
  EXPECT_THAT(ReadText(scratch.Path("err")),
              HasSubstr("not checked: remote.dir: '" + mount().path() + "' did not answer within"));
  mount().Release();
}

TEST_F(HungMountTest, TheDaemonEndsInTimeAndTheNextRestoresFromTheDrives) {
  EXPECT_TRUE(Stalled());
  KillRanks();
  const auto began = std::chrono::steady_clock::now();
  node_.Terminate();
  // The process as such may only be gone when the kernel lets its thread go; what it serves ends.
  EXPECT_TRUE(node_.WaitExit(std::chrono::seconds(20)).has_value())
      << "after " << (std::chrono::steady_clock::now() - began) / std::chrono::milliseconds(1);
  EmptyDirectory(node_.memory_dir());
  ASSERT_TRUE(node_.Start()) << "with a remote directory that hangs";
  Launch();
  EXPECT_THAT(Restored(), Each(AllOf(HasSubstr("step=2"), HasSubstr("source=nvme"))));
  Save(3, "nvme");
  mount().Release();
  EXPECT_TRUE(node_.Until([](const v1::GetStatusReply& reply) {
    return reply.jobs_size() == 1 && reply.jobs(0).tiers(1).step() == 3;
  }));
}

// The kernel keeps the process for a call that no signal ends, and with it its locks, its sockets
// and their connections.
TEST_F(HungMountTest, WhoWasKilledAndHangsKeepsNoOtherDaemonFromServingMemory) {
  EXPECT_TRUE(Stalled());
  mount().IgnoreInterrupts();
  KillRanks();
  const pid_t pid = node_.pid();
  const std::unique_ptr<Child> dying = node_.KillAndLeave();
  ASSERT_TRUE(node_.Start()) << node_.Log();
  ASSERT_TRUE(dying->running()) << "it ended: this test tests nothing";
  EXPECT_THAT(node_.Log(), HasSubstr("pid " + std::to_string(pid) +
                                     ", the ckptd from before, was "
                                     "killed and hangs in a call"));
  const std::string hangs = "pid " + std::to_string(pid) + ", the ckptd from before, was killed";
  EXPECT_THAT(Ctl(node_, {"status"}).text, HasSubstr(hangs));
  Launch();
  EXPECT_THAT(Restored(), Each(AllOf(HasSubstr("step=2"), Not(HasSubstr("source=")))));
  Save(3, "");
  // One that lives keeps others out, whether the first one is gone or not.
  const TemporaryDirectory scratch;
  Child other({.arguments = node_.Arguments(), .error_file = scratch.Path("err"), .pipes = true});
  // (It has looked at the mount, too, and cannot end before that answers.)
  const std::string refused = "held by pid " + std::to_string(node_.pid()) + ";";
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (ReadText(scratch.Path("err")).find(refused) == std::string::npos &&
         std::chrono::steady_clock::now() < until) {
    other.Wait(std::chrono::milliseconds(10));
  }
  EXPECT_THAT(ReadText(scratch.Path("err")), HasSubstr(refused));
  // The next one may hang as well.
  KillRanks();
  const std::unique_ptr<Child> second = node_.KillAndLeave();
  ASSERT_TRUE(node_.Start()) << node_.Log();
  Launch();
  EXPECT_THAT(Restored(), Each(AllOf(HasSubstr("step=3"), Not(HasSubstr("source=")))));
  Save(4, "");
  EXPECT_TRUE(node_.Until(HasNoCatalog));  // the killed one has it
  EXPECT_TRUE(dying->running());
  mount().Release();
  EXPECT_TRUE(dying->Wait().has_value());
  EXPECT_TRUE(second->Wait().has_value());
  // What they held is free: the drives, the mount and the catalog are used again.
  SaveEverywhere(5);
  EXPECT_THAT(Ctl(node_, {"status"}).text, Not(HasSubstr("the ckptd from before")));
  EXPECT_TRUE(node_.Until([](const v1::GetStatusReply& reply) { return !HasNoCatalog(reply); }));
}

// Their connections to the killed one stay open.
TEST_F(HungMountTest, RanksGoOnWithTheDaemonAfterOneThatWasKilledAndHangs) {
  EXPECT_TRUE(Stalled());
  mount().IgnoreInterrupts();
  const std::unique_ptr<Child> dying = node_.KillAndLeave();
  ASSERT_TRUE(node_.Start()) << node_.Log();
  ASSERT_TRUE(dying->running()) << "it ended: this test tests nothing";
  const auto until = std::chrono::steady_clock::now() + kPatience;
  uint64_t step = 2;
  std::vector<std::string> saved;
  do {
    saved = DoAll(ranks_, "save " + std::to_string(++step));
  } while (saved != std::vector<std::string>(2, "ok sealed") &&
           std::chrono::steady_clock::now() < until);
  EXPECT_THAT(saved, Each("ok sealed"));
  EXPECT_THAT(DoAll(ranks_, "committed"), Each("ok committed"));
  EXPECT_TRUE(dying->running());
  mount().Release();
  EXPECT_TRUE(dying->Wait().has_value());
}

}  // namespace
}  // namespace holdfast
