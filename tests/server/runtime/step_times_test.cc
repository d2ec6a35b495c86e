#include "server/runtime/step_times.h"

#include <gtest/gtest.h>

#include <string>

namespace holdfast {
namespace {

constexpr int64_t kHostedSince = 1'000'000;  // ms

Report Said(Report::Kind kind, const std::string& job) {
  Report report;
  report.kind = kind;
  report.job = job;
  return report;
}

v1::StepTimeline& AddStep(v1::TimelineReply& timeline, uint64_t attempt, uint64_t step) {
  v1::StepTimeline& out = *timeline.add_steps();
  out.set_attempt(attempt);
  out.set_step(step);
  return out;
}

void AddStage(v1::StepTimeline& step, const std::string& name, int64_t begin_ms, int64_t end_ms,
              const std::string& outcome = "done") {
  v1::StageTime& stage = *step.add_stages();
  stage.set_stage(name);
  stage.set_begin_unix_us(begin_ms * 1000);
  stage.set_end_unix_us(end_ms * 1000);
  stage.set_outcome(outcome);
}

class StepTimesTest : public ::testing::Test {
 protected:
  StepTimesTest() { times_.Count(Said(Report::Kind::kAttemptOpened, "job"), kHostedSince); }
  bool Has(const std::string& line) const {
    return registry_.Text().find(line + "\n") != std::string::npos;
  }

  Metrics registry_;
  StepTimes times_{registry_};
};

TEST_F(StepTimesTest, AStepIsTimedToItsCommitAndOnToEachTier) {
  v1::TimelineReply timeline;
  v1::StepTimeline& step = AddStep(timeline, 1, 5);
  AddStage(step, "write", kHostedSince + 100, kHostedSince + 2100);
  AddStage(step, "commit", kHostedSince + 2350, kHostedSince + 2350);
  AddStage(step, "nvme", kHostedSince + 2400, kHostedSince + 5100);
  times_.Count("job", timeline);
  EXPECT_TRUE(Has("holdfast_step_commit_seconds_sum 2.25"));
  EXPECT_TRUE(Has("holdfast_step_tier_seconds_sum{tier=\"nvme\"} 3"));
  EXPECT_TRUE(Has("holdfast_step_tier_seconds_count{tier=\"remote\"} 0"));
  // What comes later counts, what has counted does not again.
  AddStage(step, "nvme", kHostedSince + 9000, kHostedSince + 9500);
  AddStage(step, "remote", kHostedSince + 2400, kHostedSince + 62'100);
  times_.Count("job", timeline);
  times_.Count("job", timeline);
  EXPECT_TRUE(Has("holdfast_step_commit_seconds_count 1"));
  EXPECT_TRUE(Has("holdfast_step_tier_seconds_count{tier=\"nvme\"} 1"));
  EXPECT_TRUE(Has("holdfast_step_tier_seconds_sum{tier=\"remote\"} 60"));
}

TEST_F(StepTimesTest, WhatWasFoundHasNoTime) {
  v1::TimelineReply timeline;
  // Begun before this node hosted the job.
  v1::StepTimeline& before = AddStep(timeline, 1, 4);
  AddStage(before, "write", kHostedSince - 1, kHostedSince + 1);
  AddStage(before, "commit", kHostedSince + 9000, kHostedSince + 9000);
  AddStage(before, "nvme", kHostedSince + 9000, kHostedSince + 9000);
  // It lay in the tier, nobody knows since when.
  v1::StepTimeline& found = AddStep(timeline, 1, 5);
  AddStage(found, "write", kHostedSince + 1, kHostedSince + 2);
  AddStage(found, "remote", 0, kHostedSince + 9000);
  // Not written, not whole.
  v1::StepTimeline& shed = AddStep(timeline, 1, 6);
  AddStage(shed, "write", kHostedSince + 1, kHostedSince + 2);
  AddStage(shed, "nvme", kHostedSince + 3, kHostedSince + 9000, "shed: no room");
  AddStep(timeline, 1, 7);
  times_.Count("job", timeline);
  times_.Count("another job", timeline);
  EXPECT_TRUE(Has("holdfast_step_commit_seconds_count 0"));
  EXPECT_TRUE(Has("holdfast_step_tier_seconds_count{tier=\"nvme\"} 0"));
  EXPECT_TRUE(Has("holdfast_step_tier_seconds_count{tier=\"remote\"} 0"));
}

TEST_F(StepTimesTest, ClocksThatDisagreeMakeNoNegativeTimes) {
  v1::TimelineReply timeline;
  v1::StepTimeline& step = AddStep(timeline, 1, 5);
  AddStage(step, "write", kHostedSince + 1000, kHostedSince + 9000);
  AddStage(step, "commit", kHostedSince + 500, kHostedSince + 500);
  times_.Count("job", timeline);
  EXPECT_TRUE(Has("holdfast_step_commit_seconds_count 1"));
  EXPECT_TRUE(Has("holdfast_step_commit_seconds_sum 0"));
}

TEST_F(StepTimesTest, JobsAreAskedInTurnAFewAtATime) {
  for (int i = 10; i < 30; ++i) {
    times_.Count(Said(Report::Kind::kStepCommitted, "job" + std::to_string(i)), 0);
  }
  times_.Count(Said(Report::Kind::kShardSealed, "job10"), 0);  // nothing to ask for
  std::vector<std::string> first = times_.TakeDue();
  EXPECT_EQ(first.size(), StepTimes::kDueAtOnceMax);
  EXPECT_EQ(first.front(), "job10");
  times_.Count(Said(Report::Kind::kTierCommitted, "job10"), 0);  // again: behind the others
  EXPECT_EQ(times_.TakeDue().front(), "job18");
  EXPECT_EQ(times_.TakeDue(),
            (std::vector<std::string>{"job26", "job27", "job28", "job29", "job10"}));
  EXPECT_FALSE(times_.any_due());
  EXPECT_TRUE(times_.TakeDue().empty());
}

TEST_F(StepTimesTest, JobsThatAreGoneAreForgottenAndTheirNumberIsBounded) {
  times_.Count(Said(Report::Kind::kStepCommitted, "job"), kHostedSince);
  times_.KeepOnly({"other"});
  EXPECT_FALSE(times_.any_due());
  for (size_t i = 0; i < StepTimes::kJobsMax; ++i) {
    times_.Count(Said(Report::Kind::kAttemptOpened, "j" + std::to_string(i)), 0);
  }
  times_.Count(Said(Report::Kind::kStepCommitted, "one too many"), 0);
  EXPECT_FALSE(times_.any_due());
  times_.Count(Said(Report::Kind::kStepCommitted, ""), 0);
  EXPECT_FALSE(times_.any_due());
}

}  // namespace
}  // namespace holdfast
