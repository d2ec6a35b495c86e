#include "server/runtime/status_page/status_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"

namespace holdfast {
namespace {

using nlohmann::json;
using testing::HasSubstr;

v1::ShardCopy Copy(uint32_t rank, const std::string& state, const std::string& tier = "nvme",
                   const std::string& node = "node-a") {
  v1::ShardCopy copy;
  copy.set_rank(rank);
  copy.set_state(state);
  copy.set_tier(tier);
  copy.set_node(node);
  copy.set_bytes(100);
  return copy;
}

std::string RowOf(const std::vector<v1::ShardCopy>& copies, uint32_t world_size,
                  size_t cells_max = 64) {
  std::vector<const v1::ShardCopy*> all;
  for (const v1::ShardCopy& copy : copies) {
    all.push_back(&copy);
  }
  return MapRow(all, world_size, cells_max);
}

TEST(MapRow, HasALetterForEachRankWhoseWorstCopyShows) {
  EXPECT_EQ(RowOf({Copy(0, "good"), Copy(2, "writing"), Copy(3, "bad: digests differ"),
                   Copy(4, "out of reach: the node is silent"), Copy(5, "good"),
                   Copy(5, "bad: gone"), Copy(6, "good, not in a manifest yet")},
                  8),
            "g.wbabg.");
  EXPECT_EQ(RowOf({}, 3), "...");
  EXPECT_EQ(RowOf({}, 0), "");
  EXPECT_EQ(RowOf({Copy(7, "good")}, 3), "...");  // of another world
}

TEST(MapRow, OfManyRanksEachLetterIsOfSeveral) {
  std::vector<v1::ShardCopy> copies;
  for (uint32_t rank = 0; rank < 500; ++rank) {
    copies.push_back(Copy(rank, "good"));
    copies.push_back(Copy(rank, "good"));  // a replica counts once
  }
  copies.push_back(Copy(999, "bad: x"));
  EXPECT_EQ(RowOf(copies, 1000, 4), "gg.b");
  copies.resize(900);
  EXPECT_EQ(RowOf(copies, 1000, 4), "gp..");  // 450 of them
  EXPECT_EQ(RowOf(copies, 4'000'000'000, 4).size(), 4u);
}

// Answers as a daemon with jobs of that many ranks; counts what it is asked.
class FakeSource : public StatusSource {
 public:
  absl::StatusOr<v1::GetStatusReply> Status(Duration) override {
    ++asked;
    if (!status_error.ok()) {
      return status_error;
    }
    v1::GetStatusReply reply;
    v1::DaemonStatus& daemon = *reply.mutable_daemon();
    daemon.set_node_name("node-a");
    daemon.set_memory_bytes_max(1000);
    for (int i = 0; i < problems; ++i) {
      daemon.add_problems(absl::StrCat("problem ", i));
    }
    v1::TierStatus& nvme = *daemon.add_tiers();
    nvme.set_tier("nvme");
    nvme.set_bytes_written(77);
    for (int i = 0; i < jobs; ++i) {
      v1::JobStatus& job = *reply.add_jobs();
      job.set_name(absl::StrCat("job-", i));
      job.set_phase(v1::JobStatus::ATTEMPT_PHASE_RUNNING);
      job.set_world_size(world_size);
      job.set_ranks_alive(i == jobs - 1 ? world_size : 0);
      v1::Protection& line = *job.add_protection();
      line.set_kind(v1::Protection::FAILURE_KIND_NODE);
    }
    return reply;
  }
  absl::StatusOr<v1::GetNodesReply> Nodes(Duration) override {
    ++asked;
    v1::GetNodesReply reply;
    for (int i = 0; i < nodes; ++i) {
      v1::NodeStatus& node = *reply.add_nodes();
      node.set_name(std::string("node-") + static_cast<char>('a' + i));
      node.set_here(i == 0);
      node.set_reachable(i != 1);
    }
    return reply;
  }
  absl::StatusOr<v1::ListCheckpointsReply> List(const v1::ListCheckpointsRequest& request,
                                                Duration) override {
    ++asked;
    if (request.job() == broken_job) {
      return absl::UnavailableError("its host is away");
    }
    v1::ListCheckpointsReply reply;
    for (int i = 0; i < steps; ++i) {
      v1::Checkpoint& step = *reply.add_checkpoints();
      step.set_attempt(1);
      step.set_step(static_cast<uint64_t>(steps - i));
      step.set_state(v1::Checkpoint::STATE_COMMITTED);
      step.set_world_size(world_size);
      step.add_tiers("nvme");
    }
    return reply;
  }
  absl::StatusOr<v1::WhereReply> Where(const v1::WhereRequest& request, Duration) override {
    ++asked;
    ++asked_where;
    v1::WhereReply reply;
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      *reply.add_copies() = Copy(rank, "good");
      *reply.add_copies() = Copy(rank, rank == 0 ? "writing" : "good", "remote", "");
    }
    EXPECT_GT(request.step(), 0u);
    return reply;
  }
  absl::StatusOr<v1::TimelineReply> Timeline(const v1::TimelineRequest&, Duration) override {
    ++asked;
    v1::TimelineReply reply;
    v1::StepTimeline& step = *reply.add_steps();
    step.set_step(5);
    for (const int64_t begin : {1000, 1500}) {
      v1::StageTime& stage = *step.add_stages();
      stage.set_stage("write");
      stage.set_begin_unix_us(begin);
      stage.set_end_unix_us(begin + 300);
      stage.set_outcome("done");
    }
    v1::StageTime& open = *step.add_stages();
    open.set_stage("remote");
    open.set_begin_unix_us(2000);
    open.set_outcome("failed: full");
    return reply;
  }

  absl::Status status_error;
  std::string broken_job;
  int jobs = 2;
  int steps = 2;
  int nodes = 3;
  int problems = 1;
  uint32_t world_size = 4;
  int asked = 0;
  int asked_where = 0;
};

json Report(FakeSource& source, const StatusReportLimits& limits = {}) {
  ManualClock clock;
  const absl::StatusOr<std::string> text = StatusReport(source, clock, limits);
  EXPECT_TRUE(text.ok()) << text.status();
  return text.ok() ? json::parse(*text, nullptr, false) : json();
}

TEST(StatusReport, HasNodesTiersJobsStepsAndSaves) {
  FakeSource source;
  const json report = Report(source);
  EXPECT_EQ(report["node"], "node-a");
  EXPECT_EQ(report["tiers"][0]["tier"], "memory");
  EXPECT_EQ(report["tiers"][1]["written"], 77);
  // The one that runs first.
  EXPECT_EQ(report["jobs"][0]["name"], "job-1");
  EXPECT_EQ(report["jobs"][0]["protection"][0]["any"], false);
  const json& step = report["jobs"][0]["steps"][0];
  EXPECT_EQ(step["step"], 2);
  EXPECT_EQ(step["map"]["nvme"]["good"], 4);
  EXPECT_EQ(step["map"]["nvme"]["cells"], "gggg");
  EXPECT_EQ(step["map"]["remote"]["cells"], "wggg");
  EXPECT_EQ(report["jobs"][0]["saves"][0]["stages"],
            json::parse(R"([{"stage":"write","begin_us":1000,"end_us":1800,"failed":false},
                            {"stage":"remote","begin_us":2000,"end_us":null,"failed":true}])"));
  // Out of reach first, then this one. Of two jobs' two steps each: four ranks a step here, three
  // (one is being written) where all reach it.
  EXPECT_EQ(report["nodes"][0]["name"], "node-b");
  EXPECT_EQ(report["nodes"][1]["name"], "node-a");
  EXPECT_EQ(report["nodes"][1]["held"]["nvme"]["shards"], 16);
  EXPECT_EQ(report["nodes"][1]["held"]["nvme"]["bytes"], 1600);
  EXPECT_EQ(report["held_by_all"]["remote"]["shards"], 12);
}

TEST(StatusReport, IsBoundedAndSaysWhatItLeavesOut) {
  FakeSource source;
  source.jobs = 100;
  source.steps = 100;
  source.nodes = 20;
  source.problems = 100;
  const json report = Report(source, {.nodes_max = 5, .jobs_max = 3, .steps_max = 4});
  EXPECT_EQ(report["jobs"].size(), 3u);
  EXPECT_EQ(report["jobs_left_out"], 97);
  EXPECT_EQ(report["jobs"][0]["steps"].size(), 4u);
  EXPECT_EQ(report["jobs"][0]["steps_left_out"], 96);
  EXPECT_EQ(report["nodes"].size(), 5u);
  EXPECT_EQ(report["nodes_left_out"], 15);
  EXPECT_EQ(report["problems"].size(), 16u);
  EXPECT_EQ(report["problems"][15], "problem 99");
  EXPECT_EQ(report["problems_left_out"], 84);
  EXPECT_EQ(source.asked_where, 3 * 4);
  EXPECT_EQ(source.asked, 2 + 3 * (1 + 4 + 1));
}

TEST(StatusReport, WithManyRanksStepsHaveNoMapWhenTheCopiesAreUsedUp) {
  FakeSource source;
  source.jobs = 1;
  source.steps = 4;
  source.world_size = 100;
  const json report = Report(source, {.copies_max = 900});  // two steps of four tiers
  EXPECT_EQ(source.asked_where, 2);
  EXPECT_FALSE(report["jobs"][0]["steps"][1]["map"].is_null());
  EXPECT_TRUE(report["jobs"][0]["steps"][2]["map"].is_null());
  EXPECT_EQ(report["jobs"][0]["steps"][2]["tiers"], json::parse(R"(["nvme"])"));
  source.world_size = 4'000'000'000;
  source.asked_where = 0;
  EXPECT_TRUE(Report(source)["jobs"][0]["steps"][0]["map"].is_null());
  EXPECT_EQ(source.asked_where, 0);
}

TEST(StatusReport, WhatOneJobLacksIsToldThere) {
  FakeSource source;
  source.broken_job = "job-0";
  const json report = Report(source);
  EXPECT_EQ(report["jobs"][0]["problem"], "");
  EXPECT_EQ(report["jobs"][1]["problem"], "its host is away");
  EXPECT_EQ(report["jobs"][1]["steps"].size(), 0u);
  EXPECT_EQ(report["jobs"][1]["saves"].size(), 1u);
}

TEST(StatusReport, WithoutAStatusThereIsNone) {
  FakeSource source;
  source.status_error = absl::DeadlineExceededError("the daemon did not answer");
  ManualClock clock;
  EXPECT_TRUE(absl::IsDeadlineExceeded(StatusReport(source, clock).status()));
}

TEST(StatusReport, TheTimeThatIsLeftIsWhatIsGivenForAQuestion) {
  struct Slow : FakeSource {
    explicit Slow(ManualClock& manual) : clock(manual) {}
    absl::StatusOr<v1::ListCheckpointsReply> List(const v1::ListCheckpointsRequest& request,
                                                  Duration at_most) override {
      given.push_back(at_most);
      clock.Advance(at_most);
      return FakeSource::List(request, at_most);
    }
    ManualClock& clock;
    std::vector<Duration> given;
  };
  ManualClock clock;
  Slow source(clock);
  source.jobs = 3;
  ASSERT_TRUE(StatusReport(source, clock, {.time_max = std::chrono::seconds(8)}).ok());
  EXPECT_EQ(source.given,
            (std::vector<Duration>{std::chrono::seconds(5), std::chrono::seconds(3), Duration(0)}));
}

}  // namespace
}  // namespace holdfast
