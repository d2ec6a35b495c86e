#include "server/runtime/job_gauges.h"

#include <gtest/gtest.h>

#include <string>

namespace holdfast {
namespace {

constexpr int64_t kNow = 1'000'000'000;  // ms: 1000000 s

v1::JobStatus Job(const std::string& name, uint32_t alive = 2) {
  v1::JobStatus job;
  job.set_name(name);
  job.set_attempt(1);
  job.set_world_size(2);
  job.set_ranks_alive(alive);
  return job;
}

void Survives(v1::JobStatus& job, v1::Protection::FailureKind kind, int64_t age_ms,
              uint64_t attempt = 1) {
  v1::Protection& line = *job.add_protection();
  line.set_kind(kind);
  line.set_any(true);
  line.set_attempt(attempt);
  line.set_age_ms(age_ms);
}

void InTier(v1::JobStatus& job, const std::string& tier, std::optional<int64_t> age_ms) {
  v1::TierProgress& progress = *job.add_tiers();
  progress.set_tier(tier);
  progress.set_any(age_ms.has_value());
  progress.set_age_ms(age_ms.value_or(0));
}

class JobGaugesTest : public ::testing::Test {
 protected:
  std::string Text() const { return registry_.Text(); }
  bool Has(const std::string& line) const {
    return registry_.Text().find(line + "\n") != std::string::npos;
  }
  void Set(const std::vector<v1::JobStatus>& jobs, int64_t unix_ms = kNow) {
    gauges_.Set({jobs.begin(), jobs.end()}, unix_ms);
  }

  Metrics registry_;
  JobGauges gauges_{registry_};
};

TEST_F(JobGaugesTest, WhatWouldBeLostIsSaidByTheTimeOfWhatSurvives) {
  v1::JobStatus job = Job("a");
  Survives(job, v1::Protection::FAILURE_KIND_PROCESS, 5'000);
  Survives(job, v1::Protection::FAILURE_KIND_NODE, 60'000);
  job.add_protection()->set_kind(v1::Protection::FAILURE_KIND_ALL_NODES);
  Set({job});
  EXPECT_TRUE(Has("holdfast_jobs 1"));
  EXPECT_TRUE(Has("holdfast_job_ranks_alive{job_name=\"a\"} 2"));
  const std::string lost = "holdfast_job_loss_from_timestamp_seconds{";
  EXPECT_TRUE(Has(lost + "failure=\"process\",job_name=\"a\"} 999995"));
  EXPECT_TRUE(Has(lost + "failure=\"node\",job_name=\"a\"} 999940"));
  EXPECT_TRUE(Has(lost + "failure=\"all_nodes\",job_name=\"a\"} 1000000"));  // seen just now
  // Nothing survives still: all since then would be lost.
  Set({job}, kNow + 30'000);
  EXPECT_TRUE(Has(lost + "failure=\"all_nodes\",job_name=\"a\"} 1000000"));
}

TEST_F(JobGaugesTest, APauseBetweenAttemptsIsNoTrainingThatCouldBeLost) {
  v1::JobStatus job = Job("a");
  job.set_attempt(2);
  Survives(job, v1::Protection::FAILURE_KIND_PROCESS, 3'600'000, 1);
  Survives(job, v1::Protection::FAILURE_KIND_ALL_NODES, 3'700'000, 1);
  Set({job});
  const std::string lost = "holdfast_job_loss_from_timestamp_seconds{";
  EXPECT_TRUE(Has(lost + "failure=\"process\",job_name=\"a\"} 1000000"));
  EXPECT_TRUE(Has(lost + "failure=\"all_nodes\",job_name=\"a\"} 999900"));
  // A step of this attempt speaks for itself.
  job = Job("a");
  job.set_attempt(2);
  Survives(job, v1::Protection::FAILURE_KIND_PROCESS, 1'000, 2);
  Survives(job, v1::Protection::FAILURE_KIND_ALL_NODES, 3'760'000, 1);
  Set({job}, kNow + 60'000);
  EXPECT_TRUE(Has(lost + "failure=\"process\",job_name=\"a\"} 1000059"));
  EXPECT_TRUE(Has(lost + "failure=\"all_nodes\",job_name=\"a\"} 999900"));
}

TEST_F(JobGaugesTest, ATierLagsBehindTheNewestCommittedStep) {
  v1::JobStatus job = Job("a");
  Survives(job, v1::Protection::FAILURE_KIND_PROCESS, 5'000);
  InTier(job, "nvme", 5'000);
  InTier(job, "remote", 65'000);
  InTier(job, "peer", std::nullopt);
  job.mutable_tiers(1)->add_flushing();
  job.mutable_tiers(1)->set_waiting(true);
  Set({job});
  EXPECT_TRUE(Has("holdfast_job_tier_lag_seconds{job_name=\"a\",tier=\"nvme\"} 0"));
  EXPECT_TRUE(Has("holdfast_job_tier_lag_seconds{job_name=\"a\",tier=\"remote\"} 60"));
  EXPECT_TRUE(Has("holdfast_job_tier_lag_seconds{job_name=\"a\",tier=\"peer\"} 0"));
  EXPECT_TRUE(Has("holdfast_job_tier_steps_waiting{job_name=\"a\",tier=\"remote\"} 2"));
  EXPECT_TRUE(Has("holdfast_job_tier_steps_waiting{job_name=\"a\",tier=\"nvme\"} 0"));
  // A step later, 100 s on: there is still nothing in the tier. An idle job's lag does not grow.
  for (const int64_t later : {100'000, 500'000}) {
    v1::JobStatus next = Job("a");
    Survives(next, v1::Protection::FAILURE_KIND_PROCESS, later - 95'000);
    InTier(next, "peer", std::nullopt);
    Set({next}, kNow + later);
    EXPECT_TRUE(Has("holdfast_job_tier_lag_seconds{job_name=\"a\",tier=\"peer\"} 100"));
  }
  EXPECT_EQ(Text().find("tier=\"remote\""), std::string::npos);  // it has none any more
}

TEST_F(JobGaugesTest, WithoutAnyStepNoTierLags) {
  v1::JobStatus job = Job("a");
  InTier(job, "remote", std::nullopt);
  Set({job});
  Set({job}, kNow + 1'000'000);
  EXPECT_TRUE(Has("holdfast_job_tier_lag_seconds{job_name=\"a\",tier=\"remote\"} 0"));
}

TEST_F(JobGaugesTest, SeriesGoWithTheirJob) {
  Set({Job("a"), Job("b")});
  Set({Job("b")});
  EXPECT_EQ(Text().find("job_name=\"a\""), std::string::npos);
  EXPECT_TRUE(Has("holdfast_job_ranks{job_name=\"b\"} 2"));
  Set({});
  EXPECT_EQ(Text().find("job_name"), std::string::npos);
  EXPECT_TRUE(Has("holdfast_jobs 0"));
}

std::vector<v1::JobStatus> Many(size_t jobs, uint32_t alive) {
  std::vector<v1::JobStatus> all;
  for (size_t i = 0; i < jobs; ++i) {
    all.push_back(Job("job" + std::to_string(100 + i), alive));
  }
  return all;
}

TEST_F(JobGaugesTest, TheRestIsOneSeriesWithSumsAndTheWorstTimes) {
  std::vector<v1::JobStatus> jobs = Many(JobGauges::kNamedMax, 2);
  v1::JobStatus young = Job("x");
  Survives(young, v1::Protection::FAILURE_KIND_NODE, 1'000);
  v1::JobStatus old = Job("y");
  Survives(old, v1::Protection::FAILURE_KIND_NODE, 9'000);
  v1::JobStatus ended = Job("z", 0);
  Survives(ended, v1::Protection::FAILURE_KIND_NODE, 900'000);
  jobs.insert(jobs.end(), {young, old, ended});
  Set(jobs);
  EXPECT_TRUE(Has("holdfast_jobs " + std::to_string(JobGauges::kNamedMax + 3)));
  EXPECT_TRUE(Has("holdfast_job_ranks{job_name=\"(others)\"} 6"));
  EXPECT_TRUE(Has("holdfast_job_ranks_alive{job_name=\"(others)\"} 4"));
  EXPECT_TRUE(Has(
      "holdfast_job_loss_from_timestamp_seconds{failure=\"node\",job_name=\"(others)\"} 999991"));
  EXPECT_EQ(Text().find("job_name=\"y\""), std::string::npos);
}

TEST_F(JobGaugesTest, WhoHasANameKeepsIt) {
  std::vector<v1::JobStatus> jobs = Many(JobGauges::kNamedMax, 2);
  Set(jobs);
  jobs.push_back(Job("a-comes-first-by-name"));
  Set(jobs);
  EXPECT_EQ(Text().find("a-comes-first"), std::string::npos);
  EXPECT_TRUE(Has("holdfast_job_ranks{job_name=\"job100\"} 2"));
  // One that has ended gives way to one that runs.
  jobs[3].set_ranks_alive(0);
  Set(jobs);
  EXPECT_TRUE(Has("holdfast_job_ranks{job_name=\"a-comes-first-by-name\"} 2"));
  EXPECT_EQ(Text().find("job_name=\"job103\""), std::string::npos);
  EXPECT_TRUE(Has("holdfast_job_ranks{job_name=\"(others)\"} 2"));
}

TEST_F(JobGaugesTest, EndedJobsHaveWhatNamesAreLeft) {
  std::vector<v1::JobStatus> jobs = Many(JobGauges::kNamedMax, 0);
  jobs.push_back(Job("runs"));
  Set(jobs);
  EXPECT_TRUE(Has("holdfast_job_ranks{job_name=\"runs\"} 2"));
  EXPECT_TRUE(Has("holdfast_job_ranks_alive{job_name=\"(others)\"} 0"));
}

// Names that CheckJobName refuses do not come here; if one did, the text would still be whole.
TEST_F(JobGaugesTest, AHostileNameStaysInItsLabel) {
  Set({Job("x\"} 1\nholdfast_jobs 7\n\\")});
  EXPECT_TRUE(Has("holdfast_jobs 1"));
  EXPECT_FALSE(Has("holdfast_jobs 7"));
  EXPECT_TRUE(Has("holdfast_job_ranks{job_name=\"x\\\"} 1\\nholdfast_jobs 7\\n\\\\\"} 2"));
}

}  // namespace
}  // namespace holdfast
