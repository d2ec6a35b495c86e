// Drives that fill up, lose their power, stall: real XFS and ext4 on loop devices. What was told to
// be whole is there afterwards, nothing partial is offered, and the job goes on all the while.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/integration/loop_device.h"
#include "tests/integration/tier_fixture.h"

namespace holdfast {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr uint64_t kDeviceBytes = 320 << 20;  // XFS takes no less than 300 MiB

NodeOptions OnDrive(const LoopMount& mount) {
  NodeOptions options = TierNode();
  options.drives = 0;
  options.nvme_dirs = {mount.path() + "/drive"};
  options.nvme = "stall_timeout_ms: 1000, ";
  return options;
}

class DriveFaults : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!mount_.mounted()) {
      GTEST_SKIP() << mount_.why();
    }
  }
  LoopMount mount_{GetParam(), kDeviceBytes};
};

class FaultyRun : public TierTest {
 public:
  explicit FaultyRun(const LoopMount& mount) : TierTest(OnDrive(mount)) {
    bytes_ = 6'000'000;  // seconds at the least bandwidth that can be set
    EXPECT_TRUE(node_.Start());
    Begin();
  }
  void TestBody() override {}
  using TierTest::DurableFiles;
  using TierTest::KillRanks;
  using TierTest::Launch;
  using TierTest::node_;
  using TierTest::PowerCut;
  using TierTest::ranks_;
  using TierTest::Restored;
  using TierTest::Save;
  using TierTest::SaveEverywhere;

  // Committed, and for seconds on its way to the drive: of that some is written, and not all.
  void SaveSlowly(uint64_t step) {
    Limit("1MiB");
    Save(step, "");
    EXPECT_TRUE(UntilTiers([&](const v1::JobStatus& job, const v1::DaemonStatus&) {
      const v1::TierProgress& nvme = job.tiers(0);
      return nvme.flushing_size() > 0 && nvme.flushing(0).step() == step &&
             !DurableFiles(".tmp").empty();
    })) << Ctl(node_, {"status", "job"}).text;
  }
  void Unthrottle() { Limit("0"); }
  bool FailureSaid() {
    return UntilTiers([](const v1::JobStatus& job, const v1::DaemonStatus& daemon) {
      return !daemon.tiers(0).healthy() && daemon.tiers(1).healthy() &&
             job.tiers(0).problem().find("(EIO)") != std::string::npos;
    });
  }
  void Limit(const std::string& bandwidth) {
    EXPECT_EQ(Ctl(node_, {"set", "nvme.bandwidth_bytes_per_s_max=" + bandwidth}).exit_code, 0);
  }

  bool UntilTiers(const std::function<bool(const v1::JobStatus&, const v1::DaemonStatus&)>& so,
                  std::chrono::milliseconds at_most = std::chrono::seconds(90)) {
    return node_.Until(
        [&](const v1::GetStatusReply& reply) {
          return reply.jobs_size() == 1 && reply.jobs(0).tiers_size() == 2 &&
                 so(reply.jobs(0), reply.daemon());
        },
        at_most);
  }
};

TEST_P(DriveFaults, FullItIsSaidAndItGoesOnWhenThereIsRoom) {
  FaultyRun run(mount_);
  run.SaveEverywhere(1);
  auto full = std::make_unique<FullDisk>(mount_.path());
  for (uint64_t step = 2; step <= 6; ++step) {
    run.Save(step, "remote");  // training and the other tier go on
    full->TakeTheRest();
  }
  EXPECT_TRUE(run.UntilTiers([](const v1::JobStatus& job, const v1::DaemonStatus&) {
    return job.tiers(0).step() < 6 && !job.tiers(0).problem().empty();
  }));
  EXPECT_THAT(Ctl(run.node_, {"status", "job"}).text, HasSubstr("space"));
  full.reset();
  EXPECT_TRUE(run.UntilTiers([](const v1::JobStatus& job, const v1::DaemonStatus&) {
    return job.tiers(0).step() == 6;
  })) << Ctl(run.node_, {"status", "job"}).text;
  run.SaveEverywhere(7);
  EXPECT_EQ(Ctl(run.node_, {"verify", "job", "--all"}).exit_code, 0);
}

TEST_P(DriveFaults, CutOffInTheMiddleNothingToldIsLost) {
  FaultyRun run(mount_);
  uint64_t step = 0;
  for (int round = 0; round < 4; ++round) {
    run.Save(++step, "nvme");
    const uint64_t told = step;
    run.SaveSlowly(++step);  // its flush is under way
    ASSERT_TRUE(mount_.CutOff());
    run.Unthrottle();
    run.Save(++step, "remote");  // the drive fails, the job and the other tier go on
    EXPECT_TRUE(run.FailureSaid()) << Ctl(run.node_, {"status", "job"}).text;
    run.PowerCut();
    ASSERT_TRUE(mount_.Remount());
    // Whether the remote directory has more is not the question.
    EmptyDirectory(run.node_.remote_dir());
    ASSERT_TRUE(run.node_.Start());
    run.Launch();
    const std::vector<std::string> restored = run.Restored();
    for (const std::string& answer : restored) {
      EXPECT_THAT(answer, HasSubstr("source=nvme"));
      EXPECT_GE(NumberAfter(answer, "step=").value_or(0), told);
    }
    EXPECT_EQ(restored[0], restored[1]);
    EXPECT_EQ(Ctl(run.node_, {"verify", "job", "--all", "--tier", "nvme"}).exit_code, 0);
    EXPECT_TRUE(run.UntilTiers([&](const v1::JobStatus&, const v1::DaemonStatus&) {
      return run.DurableFiles(".tmp").empty();
    })) << ::testing::PrintToString(run.DurableFiles("/"));
    step += 10;
  }
  run.SaveEverywhere(step);
}

// The same daemon goes on, once the file system has been unmounted and mounted.
TEST_P(DriveFaults, CutOffItGoesOnByItselfWhenItIsMountedAgain) {
  FaultyRun run(mount_);
  run.Save(1, "nvme");
  run.SaveSlowly(2);
  ASSERT_TRUE(mount_.CutOff());
  run.Unthrottle();
  run.Save(3, "remote");
  EXPECT_TRUE(run.FailureSaid()) << Ctl(run.node_, {"status", "job"}).text;
  ASSERT_TRUE(mount_.Detach());
  ASSERT_TRUE(run.node_.Until([&](const v1::GetStatusReply&) { return mount_.Mount(); },
                              std::chrono::seconds(90)))
      << "it lets go of what is gone";
  EXPECT_TRUE(run.UntilTiers([](const v1::JobStatus& job, const v1::DaemonStatus& daemon) {
    return job.tiers(0).step() == 3 && daemon.tiers(0).healthy() && job.tiers(0).problem().empty();
  })) << Ctl(run.node_, {"status", "job"}).text;
  run.SaveEverywhere(4);
  EXPECT_EQ(Ctl(run.node_, {"verify", "job", "--all"}).exit_code, 0);
  EXPECT_TRUE(run.UntilTiers([&](const v1::JobStatus&, const v1::DaemonStatus&) {
    return run.DurableFiles(".tmp").empty();
  })) << ::testing::PrintToString(run.DurableFiles("/"));
}

TEST_P(DriveFaults, FrozenItStallsAloneAndGoesOnWhenItThaws) {
  FaultyRun run(mount_);
  run.SaveEverywhere(1);
  ASSERT_TRUE(mount_.Freeze());
  for (uint64_t step = 2; step <= 6; ++step) {
    run.Save(step, "");
  }
  EXPECT_TRUE(run.UntilTiers([](const v1::JobStatus&, const v1::DaemonStatus& daemon) {
    return daemon.tiers(0).stalled() > 0;
  })) << Ctl(run.node_, {"status", "job"}).text;
  EXPECT_THAT(Ctl(run.node_, {"status", "job"}).text, HasSubstr("STALLED"));
  run.Save(7, "remote");  // from memory
  run.KillRanks();
  run.Launch();
  EXPECT_THAT(run.Restored(), Each(HasSubstr("step=7")));
  ASSERT_TRUE(mount_.Thaw());
  EXPECT_TRUE(run.UntilTiers([](const v1::JobStatus& job, const v1::DaemonStatus& daemon) {
    return job.tiers(0).step() == 7 && daemon.tiers(0).stalled() == 0;
  })) << Ctl(run.node_, {"status", "job"}).text;
  run.SaveEverywhere(8);
}

INSTANTIATE_TEST_SUITE_P(All, DriveFaults, ::testing::Values("xfs", "ext4"),
                         [](const auto& type) { return type.param; });

}  // namespace
}  // namespace holdfast
