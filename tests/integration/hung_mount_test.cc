// A remote file system that hangs in the middle of a flush: nothing else waits for it, and when it
// answers again the flush goes on by itself.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>

#include "tests/integration/hanging_fs.h"
#include "tests/integration/tier_fixture.h"

namespace holdfast {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

NodeOptions OnMount(const HangingMount& mount) {
  NodeOptions options = TierNode();
  options.remote = false;
  options.remote_dir = mount.path();
  options.remote_options = "stall_timeout_ms: 1000, ";
  return options;
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

}  // namespace
}  // namespace holdfast
