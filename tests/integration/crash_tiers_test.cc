// SIGKILL of the daemon at every sync point of the durable tiers (tests/sync_points.txt): while it
// flushes, fetches, publishes a manifest, removes. Afterwards every step that a rank was told to be
// whole in a tier is there, bit for bit, also when the memory is lost; nothing partial is offered;
// no temporaries and no intents stay.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>

#include "absl/strings/match.h"
#include "tests/integration/crash_asking.h"
#include "tests/integration/tier_fixture.h"

namespace holdfast {
namespace {

using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;

class CrashRun : public TierTest {
 public:
  explicit CrashRun(std::string point) : point_(std::move(point)) {
    EXPECT_TRUE(node_.Start(point_));
  }
  bool died() const { return died_; }

  // New processes restore, then save; each step is awaited in both tiers. Returns when all is done
  // or the daemon has died.
  void Incarnation(int steps) {
    ranks_ = StartRanks(node_, {.bytes = 300'000}, 2);
    if (!All("open", "ok attempt=") || !RestoreAll()) {
      return;
    }
    for (int i = 0; i < steps; ++i) {
      ++step_;
      if (!All("save " + std::to_string(step_), "ok sealed") || !All("committed", "ok committed")) {
        return;
      }
      for (const auto& [tier, whole] :
           {std::pair{"nvme", &whole_nvme_}, std::pair{"remote", &whole_remote_}}) {
        const std::vector<std::string> answers =
            AskUntilDeath(node_, ranks_, std::string("tier ") + tier);
        for (const std::string& answer : answers) {
          if (answer == std::string("ok ") + tier) {
            *whole = step_;  // one that was told so suffices
          }
        }
        if (!AllOk(answers, "ok ")) {
          return;
        }
      }
    }
  }

  // Memory is lost, and perhaps more; the daemon starts again.
  void Lose(bool drives_too) {
    ranks_.clear();
    if (!node_.running()) {
      EXPECT_EQ(node_.WaitExit(), -SIGKILL);
      died_ = true;
    } else {
      node_.Kill();
    }
    EmptyDirectory(node_.memory_dir());
    at_least_ = whole_nvme_;
    if (drives_too) {
      EmptyDrives();
      EmptyDirectory(node_.state_dir());
      at_least_ = whole_remote_;
      whole_nvme_ = 0;
    }
    ASSERT_TRUE(node_.Start(died_ ? "" : point_));
  }

  static bool TiersRead(const v1::JobStatus& job) {
    return std::none_of(job.tiers().begin(), job.tiers().end(), [](const v1::TierProgress& tier) {
      return absl::StrContains(tier.problem(), "still being read");
    });
  }

  void CheckTheEnd() {
    // 1. What is listed as committed is good to the last byte, wherever it lies.
    EXPECT_TRUE(node_.Until([this](const v1::GetStatusReply& status) {
      return status.jobs_size() == 1 && DurableFiles(".tmp").empty() &&
             DurableFiles(".intent").empty() && TiersRead(status.jobs(0));
    })) << ::testing::PrintToString(DurableFiles("/"));
    const Node::Verified verified = node_.Verify("job");
    EXPECT_TRUE(verified.ok) << verified.error;
    EXPECT_TRUE(verified.bad.empty());
    // 2. Another node finds every step with a manifest whole.
    Lose(true);
    Incarnation(1);
    EXPECT_FALSE(::testing::Test::HasFailure());
    ranks_.clear();
    // 3. Nothing of the job stays anywhere.
    ASSERT_TRUE(node_.Until([](const v1::GetStatusReply& status) {
      return status.jobs_size() == 1 && status.jobs(0).ranks_alive() == 0;
    }));
    if (!node_.Remove("job").empty()) {
      ASSERT_TRUE(node_.WaitExit().has_value());
      died_ = true;
      ASSERT_TRUE(node_.Start());
      node_.Remove("job");
    }
    EXPECT_TRUE(node_.Until([this](const v1::GetStatusReply& status) {
      return status.jobs_size() == 0 && DurableFiles("/job").empty() &&
             DurableFiles(".intent").empty();
    })) << ::testing::PrintToString(DurableFiles("/job"));
    EXPECT_EQ(node_.Stop(), 0);
  }

 private:
  void TestBody() override {}
  bool AllOk(const std::vector<std::string>& answers, const std::string& wanted) {
    const bool all = std::all_of(answers.begin(), answers.end(), [&](const std::string& answer) {
      return StartsWith(answer, wanted);
    });
    if (!all && !AnyDied(node_, ranks_)) {
      ADD_FAILURE() << wanted << ": " << ::testing::PrintToString(answers);
    }
    return all && !AnyDied(node_, ranks_);
  }
  bool All(const std::string& command, const std::string& wanted) {
    return AllOk(AskUntilDeath(node_, ranks_, command), wanted);
  }
  bool RestoreAll() {
    const std::vector<std::string> answers = AskUntilDeath(node_, ranks_, "restore");
    bool lost = false;
    bool all = true;
    for (const std::string& answer : answers) {
      EXPECT_THAT(answer, ::testing::Not(HasSubstr("CONTENT")));
      if (StartsWith(answer, "ok ")) {
        const uint64_t step = *NumberAfter(answer, "step=");
        EXPECT_GE(step, at_least_) << "a step that was told to be whole was lost";
        EXPECT_LE(step, step_) << "a step that nobody saved";
      } else if (!AnyDied(node_, ranks_)) {
        // Committed in memory alone, and that is gone: said so, and never taken for a first start.
        EXPECT_THAT(answer, AnyOf(HasSubstr("NOTHING_TO_RESTORE"), HasSubstr("UNREADABLE")));
        EXPECT_EQ(at_least_, 0u);
        lost = lost || answer.find("UNREADABLE") != std::string::npos;
      }
      all = all && !answer.empty();
    }
    if (lost && !AnyDied(node_, ranks_)) {
      v1::SetRestorePointRequest anew;
      anew.set_job("job");
      anew.set_from_scratch(true);
      EXPECT_EQ(node_.SetRestorePoint(anew), "");
      for (const std::string& answer : AskUntilDeath(node_, ranks_, "restore")) {
        EXPECT_THAT(answer, AnyOf(HasSubstr("NOTHING_TO_RESTORE"), ""));
      }
    }
    return all && !AnyDied(node_, ranks_);
  }

  const std::string point_;
  bool died_ = false;
  uint64_t step_ = 0;
  uint64_t whole_nvme_ = 0;
  uint64_t whole_remote_ = 0;
  uint64_t at_least_ = 0;
};

// A step that lies on a drive alone, while an older one is in the remote tier, too.
class TheDriveIsGone : public TierTest {
 public:
  TheDriveIsGone() : TierTest(Options()) {}
  // Saves two steps with a daemon that dies at `point`. If a rank heard that step 3 is in nvme, the
  // node then loses its power and its drives. Returns whether the daemon died.
  bool DiesAt(const std::string& point) {
    EXPECT_TRUE(node_.Start(point));
    ranks_ = StartRanks(node_, {.bytes = 300'000, .policy = "remote.every_steps=2"}, 2);
    std::vector<std::string> last;
    for (const std::string command : {"open", "restore", "save 2", "committed", "tier nvme",
                                      "tier remote", "save 3", "committed", "tier nvme"}) {
      last = AskUntilDeath(node_, ranks_, command);
      step_ = StartsWith(command, "save ") ? *NumberAfter(command, "save ") : step_;
      if (AnyDied(node_, ranks_)) {
        break;
      }
    }
    const bool died = !node_.running();
    if (!died) {
      EXPECT_THAT(last, Each("ok nvme"));
    }
    if (step_ == 3 && std::count(last.begin(), last.end(), "ok nvme") > 0) {
      LosePowerAndDrives(died);
    }
    return died;
  }

 private:
  void TestBody() override {}
  static NodeOptions Options() {
    NodeOptions options = TierNode();
    options.config += "restore: {wait_for_copies_ms: 0}\n";
    return options;
  }
  void LosePowerAndDrives(bool died) {
    ranks_.clear();
    if (died) {
      EXPECT_EQ(node_.WaitExit(), -SIGKILL);
    } else {
      node_.Kill();
    }
    EmptyDirectory(node_.memory_dir());
    for (uint32_t drive = 0; drive < node_.drives(); ++drive) {
      std::filesystem::rename(node_.nvme_dir(drive), node_.nvme_dir(drive) + ".away");
    }
    EXPECT_TRUE(node_.Start());
    Launch();
    EXPECT_THAT(Restored(), Each(HasSubstr("step=2")));
    EXPECT_THAT(DoAll(ranks_, "notes"), Each(HasSubstr("step 3"))) << "a step was passed over";
  }
  uint64_t step_ = 0;
};

// The daemon dies each time before it writes a job's state into the catalog; at last it does not.
TEST(CrashBeforeTheCatalog, WhatWasToldToLieOnADriveIsNotForgotten) {
  int write = 1;
  while (TheDriveIsGone().DiesAt("daemon.catalog.job_taken:kill@" + std::to_string(write))) {
    ++write;
  }
  EXPECT_GT(write, 3) << "the catalog was hardly written";
}

class CrashTiers : public ::testing::TestWithParam<std::string> {};

TEST_P(CrashTiers, WhatWasToldToBeWholeIsAndNothingElseStays) {
  bool passed = false;
  // The first pass, the second, and one when older steps go already.
  for (const std::string when : {":kill", ":kill@2", ":kill@7"}) {
    SCOPED_TRACE(GetParam() + when);
    CrashRun run(GetParam() + when);
    for (const bool drives_too : {false, false, true, false}) {
      run.Incarnation(5);
      run.Lose(drives_too);
      if (::testing::Test::HasFailure()) {
        return;
      }
    }
    run.Incarnation(2);
    run.Lose(false);
    run.CheckTheEnd();
    passed = passed || run.died();
  }
  EXPECT_TRUE(passed) << GetParam() << " was never passed";
}

INSTANTIATE_TEST_SUITE_P(All, CrashTiers, ::testing::ValuesIn(PointsOfDurableTiers()),
                         [](const auto& point) {
                           std::string name = point.param;
                           std::replace(name.begin(), name.end(), '.', '_');
                           return name;
                         });

}  // namespace
}  // namespace holdfast
