// SIGKILL of the daemon at every named sync point of its own (tests/sync_points.txt), while the
// ranks live on: the same processes go on by themselves, commit again after a few saves, and
// nothing of the memory, which suffices for two slots a rank and no more, stays held by anybody.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>

#include "tests/integration/crash_asking.h"
#include "tests/integration/harness.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kWorldSize = 2;
constexpr uint64_t kSlotsMax = 2 * kWorldSize;
constexpr int kTriesMax = 5;  // of what a death may have spoilt

// Where a slot is deleted there is none of a rank that lives (crash_points_test.cc has these).
bool PassedWithLivingRanks(const std::string& point) {
  return !StartsWith(point, "client.") && point != "daemon.slot.deleted" &&
         point != "memory.delete.after_record";
}

std::vector<std::string> PointsOfTheDaemon() {
  std::vector<std::string> points = PointsWithoutDurableTiers();
  std::erase_if(points, [](const std::string& point) { return !PassedWithLivingRanks(point); });
  return points;
}

class SurvivorRun {
 public:
  explicit SurvivorRun(const std::string& point) {
    EXPECT_TRUE(node_.Start(point));
    ranks_ = StartRanks(node_, {.bytes = 300'000}, kWorldSize);
  }

  bool died() const { return died_; }

  // A death spoils what is under way, and that again when its consequences come later.
  void All(const std::string& command, const std::string& wanted) {
    std::vector<std::string> answers;
    for (int tries = 0; tries < kTriesMax; ++tries) {
      answers = Ask(command);
      if (std::all_of(answers.begin(), answers.end(), [&](const std::string& answer) {
            return answer.find(wanted) != std::string::npos;
          })) {
        return;
      }
      if (!died_) {
        break;
      }
    }
    FAIL() << command << ": " << ::testing::PrintToString(answers);
  }

  void Commits(int steps) {
    for (int i = 0; i < steps; ++i) {
      int tries = 0;
      while (!Commit()) {
        ASSERT_TRUE(died_) << last_;
        ASSERT_LT(++tries, kTriesMax) << last_;
      }
    }
  }
  // Nothing is in the way any more.
  void CommitsEachTime(int steps) {
    for (int i = 0; i < steps; ++i) {
      ASSERT_TRUE(Commit()) << last_;
    }
  }
  void RestoresTheNewest() {
    ASSERT_NO_FATAL_FAILURE(All("restore", "step=" + std::to_string(committed_)));
  }

  void CheckNothingIsHeld() {
    const auto status = node_.Status();
    ASSERT_TRUE(status.has_value());
    EXPECT_LE(status->daemon().slots(), kSlotsMax);
    EXPECT_EQ(status->daemon().slots_quarantined(), 0u);
    const Node::Verified verified = node_.Verify("job");
    EXPECT_TRUE(verified.ok) << verified.error;
    EXPECT_TRUE(verified.bad.empty());
    ranks_.clear();
    EXPECT_TRUE(node_.Until([](const v1::GetStatusReply& reply) {
      return reply.jobs_size() == 1 && reply.jobs(0).ranks_alive() == 0;
    }));
    EXPECT_EQ(node_.Remove("job"), "");
    EXPECT_TRUE(FilesIn(node_.memory_dir(), "slot-").empty());
  }

 private:
  // Sends to all; a daemon that dies is started again while they wait.
  std::vector<std::string> Ask(const std::string& command) {
    for (auto& rank : ranks_) {
      rank->Send(command);
    }
    std::vector<std::string> answers(ranks_.size());
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (std::count(answers.begin(), answers.end(), "") > 0 &&
           std::chrono::steady_clock::now() < until) {
      for (size_t i = 0; i < ranks_.size(); ++i) {
        if (answers[i].empty()) {
          answers[i] = ranks_[i]->child().ReadLine(std::chrono::milliseconds(10)).value_or("");
        }
      }
      StartAgainIfItDied();
    }
    // Its sockets close a moment before it counts as ended.
    if (!died_ && std::any_of(answers.begin(), answers.end(), [](const std::string& answer) {
          return answer.find("UNAVAILABLE") != std::string::npos;
        })) {
      EXPECT_TRUE(node_.WaitExit().has_value()) << ::testing::PrintToString(answers);
      StartAgainIfItDied();
    }
    return answers;
  }
  void StartAgainIfItDied() {
    if (!node_.running()) {
      EXPECT_FALSE(died_) << "once is what was asked for";
      EXPECT_EQ(node_.WaitExit(), -SIGKILL);
      died_ = true;
      EXPECT_TRUE(node_.Start());
    }
  }

  bool Commit() {
    ++step_;
    const std::vector<std::string> sealed = Ask("save " + std::to_string(step_));
    last_ = ::testing::PrintToString(sealed);
    if (std::count(sealed.begin(), sealed.end(), "ok sealed") != kWorldSize) {
      return false;
    }
    const std::vector<std::string> committed = Ask("committed 10000");
    last_ += ::testing::PrintToString(committed);
    if (std::count(committed.begin(), committed.end(), "ok committed") != kWorldSize) {
      return false;
    }
    committed_ = step_;
    return true;
  }

  Node node_{{.memory_bytes = "8MiB", .config = "memory: {slots_per_rank: 2}\n"}};
  std::vector<std::unique_ptr<Rank>> ranks_;
  uint64_t step_ = 0;
  uint64_t committed_ = 0;
  std::string last_;
  bool died_ = false;
};

class CrashSurvivors : public ::testing::TestWithParam<std::string> {};

TEST_P(CrashSurvivors, GoOnAndCommitWithNoRoomToSpare) {
  bool passed = false;
  for (const std::string when : {":kill", ":kill@2", ":kill@5"}) {
    SCOPED_TRACE(GetParam() + when);
    SurvivorRun run(GetParam() + when);
    ASSERT_NO_FATAL_FAILURE(run.All("open", "ok attempt="));
    ASSERT_NO_FATAL_FAILURE(run.All("restore", "NOTHING_TO_RESTORE"));
    ASSERT_NO_FATAL_FAILURE(run.All("reserve", "ok ready="));
    ASSERT_NO_FATAL_FAILURE(run.Commits(3));
    ASSERT_NO_FATAL_FAILURE(run.RestoresTheNewest());
    ASSERT_NO_FATAL_FAILURE(run.Commits(3));
    ASSERT_NO_FATAL_FAILURE(run.RestoresTheNewest());
    ASSERT_NO_FATAL_FAILURE(run.Commits(1));
    ASSERT_NO_FATAL_FAILURE(run.CommitsEachTime(4));
    ASSERT_NO_FATAL_FAILURE(run.CheckNothingIsHeld());
    passed = passed || run.died();
  }
  // A name that no run passes is a name that no test covers.
  EXPECT_TRUE(passed) << GetParam() << " was never passed";
}

INSTANTIATE_TEST_SUITE_P(All, CrashSurvivors, ::testing::ValuesIn(PointsOfTheDaemon()),
                         [](const auto& point) {
                           std::string name = point.param;
                           std::replace(name.begin(), name.end(), '.', '_');
                           return name;
                         });

// Who lets go while nobody listens is not taken for a reader by the next daemon.
TEST(Survivors, AViewThatIsLetGoOfWhileTheDaemonIsDownHoldsNothingAfterwards) {
  Node node({.memory_bytes = "4MiB", .config = "memory: {slots_per_rank: 2}\n"});
  ASSERT_TRUE(node.Start());
  Rank rank(node, {});
  ASSERT_EQ(rank.Do("open"), "ok attempt=1");
  ASSERT_THAT(rank.Do("restore"), HasSubstr("NOTHING_TO_RESTORE"));
  ASSERT_EQ(rank.Do("save 1"), "ok sealed");
  ASSERT_EQ(rank.Do("committed"), "ok committed");
  ASSERT_EQ(rank.Do("attach"), "ok step=1");
  node.Kill();
  EXPECT_EQ(rank.Do("detach"), "ok");
  ASSERT_TRUE(node.Start());
  int commits = 0;
  for (int step = 2; step < 8; ++step) {
    commits += rank.Do("save " + std::to_string(step)) == "ok sealed" &&
                       rank.Do("committed 10000") == "ok committed"
                   ? 1
                   : 0;
  }
  EXPECT_GE(commits, 4);
}

}  // namespace
}  // namespace holdfast
