// SIGKILL at every named sync point (tests/sync_points.txt), of the daemon and of a rank, then
// restart: what was acknowledged as sealed by all ranks is there bit for bit, all ranks agree on
// one step, what was not is gone, and its memory is free again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>

#include "tests/integration/crash_asking.h"
#include "tests/integration/harness.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kWorldSize = 2;

// The run of a job with two ranks: steps are saved, the job is started anew, more steps. Something
// dies once on the way.
class CrashRun {
 public:
  CrashRun(const std::string& daemon_point, std::string client_point)
      : client_point_(std::move(client_point)) {
    EXPECT_TRUE(node_.Start(daemon_point));
  }

  bool died() const { return died_; }

  // One incarnation of the job: new processes, restore, steps. False when something died in it.
  bool Incarnation(int steps) {
    StartProcesses();
    if (!Together("open", "ok attempt=") || !Restore()) {
      return false;
    }
    Together("reserve", "ok ready=");
    for (int i = 0; i < steps && !Interrupted(); ++i) {
      Save(++step_);
    }
    return !Interrupted();
  }

  // Restarts what died, and everything that hangs on it.
  void Recover() {
    died_ = true;
    client_point_.clear();
    ranks_.clear();
    if (!node_.running()) {
      EXPECT_EQ(node_.WaitExit(), -SIGKILL);
      ASSERT_TRUE(node_.Start());
    }
  }

  void CheckNothingIsLeftBehind() {
    if (!node_.running()) {
      Recover();
    }
    ranks_.clear();
    // No record without a slot that the daemon knows, nothing half made.
    EXPECT_TRUE(node_.Until([](const v1::GetStatusReply& status) {
      return status.daemon().slots_quarantined() == 0 && status.jobs_size() == 1 &&
             status.jobs(0).ranks_alive() == 0;
    }));
    const auto status = node_.Status();
    ASSERT_TRUE(status.has_value());
    EXPECT_LE(status->daemon().slots(), 3 * kWorldSize);
    const Node::Verified verified = node_.Verify("job");
    EXPECT_TRUE(verified.ok) << verified.error;
    EXPECT_TRUE(verified.bad.empty());
    if (!node_.Remove("job").empty()) {
      EXPECT_TRUE(node_.WaitExit().has_value());
      Recover();  // it died while it removed: asked again, it finds the rest
      EXPECT_EQ(node_.Remove("job"), "");
    }
    EXPECT_TRUE(node_.Until([](const v1::GetStatusReply& reply) {
      return reply.daemon().memory_bytes_used() == 0 && reply.daemon().slots() == 0;
    }));
    EXPECT_TRUE(FilesIn(node_.memory_dir(), "slot-").empty())
        << ::testing::PrintToString(FilesIn(node_.memory_dir(), ""));
    EXPECT_TRUE(FilesIn(node_.memory_dir(), "job-").empty());
    EXPECT_EQ(node_.Stop(), 0);
  }

 private:
  void StartProcesses() {
    ranks_.clear();
    for (uint32_t rank = 0; rank < kWorldSize; ++rank) {
      RankOptions options{.rank = rank, .world_size = kWorldSize, .bytes = 300'000};
      options.sync_point = rank == 0 ? client_point_ : "";
      ranks_.push_back(std::make_unique<Rank>(node_, options));
    }
  }

  bool Interrupted() { return AnyDied(node_, ranks_); }
  std::vector<std::string> Ask(const std::string& command) {
    return AskUntilDeath(node_, ranks_, command);
  }

  bool Together(const std::string& command, const std::string& wanted) {
    const std::vector<std::string> answers = Ask(command);
    const bool all = std::all_of(answers.begin(), answers.end(), [&](const std::string& answer) {
      return StartsWith(answer, wanted);
    });
    if (!all && !Interrupted()) {
      ADD_FAILURE() << command << ": " << ::testing::PrintToString(answers);
    }
    return all && !Interrupted();
  }

  bool Restore() {
    const std::vector<std::string> answers = Ask("restore");
    std::vector<uint64_t> steps;
    for (const std::string& answer : answers) {
      EXPECT_THAT(answer, ::testing::Not(HasSubstr("CONTENT")));
      if (StartsWith(answer, "ok ")) {
        steps.push_back(*NumberAfter(answer, "step="));
      }
    }
    for (const uint64_t step : steps) {
      EXPECT_EQ(step, steps[0]) << "all ranks agree";
      EXPECT_GE(step, sealed_by_all_) << "a step that all ranks were told to be sealed was lost";
      EXPECT_LE(step, step_) << "a step that nobody saved";
    }
    if (Interrupted()) {
      return false;
    }
    if (steps.empty() && sealed_by_all_ == 0) {
      for (const std::string& answer : answers) {
        EXPECT_THAT(answer, HasSubstr("NOTHING_TO_RESTORE"));
      }
      return true;
    }
    EXPECT_EQ(steps.size(), answers.size()) << ::testing::PrintToString(answers);
    return steps.size() == answers.size();
  }

  void Save(uint64_t step) {
    const std::vector<std::string> sealed = Ask("save " + std::to_string(step));
    const auto ok = [](const std::string& wanted) {
      return [wanted](const std::string& answer) { return answer == wanted; };
    };
    if (std::all_of(sealed.begin(), sealed.end(), ok("ok sealed"))) {
      sealed_by_all_ = step;
    } else if (!Interrupted()) {
      ADD_FAILURE() << "save " << step << ": " << ::testing::PrintToString(sealed);
    }
    if (!Interrupted()) {
      Together("committed", "ok committed");
    }
  }

  Node node_;
  std::string client_point_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  uint64_t step_ = 0;
  uint64_t sealed_by_all_ = 0;
  bool died_ = false;
};

class CrashPoints : public ::testing::TestWithParam<std::string> {};

TEST_P(CrashPoints, NothingAcknowledgedIsLostAndNothingElseStays) {
  const std::string point = GetParam();
  const bool of_client = StartsWith(point, "client.");
  bool passed = false;
  // The first pass, and one in the middle of the run. A point that is not passed so often never
  // kills.
  for (const std::string when : {":kill", ":kill@4"}) {
    SCOPED_TRACE(point + when);
    CrashRun run(of_client ? "" : point + when, of_client ? point + when : "");
    if (::testing::Test::HasFailure()) {
      return;
    }
    for (const int steps : {5, 5, 5, 2}) {
      if (!run.Incarnation(steps)) {
        run.Recover();
      }
      if (::testing::Test::HasFailure()) {
        return;
      }
    }
    run.CheckNothingIsLeftBehind();
    passed = passed || run.died();
  }
  // A name that no run passes is a name that no test covers.
  EXPECT_TRUE(passed) << point << " was never passed";
}

INSTANTIATE_TEST_SUITE_P(All, CrashPoints, ::testing::ValuesIn(PointsWithoutDurableTiers()),
                         [](const auto& point) {
                           std::string name = point.param;
                           std::replace(name.begin(), name.end(), '.', '_');
                           return name;
                         });

}  // namespace
}  // namespace holdfast
