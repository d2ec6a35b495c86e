// plan-capacity's numbers, each worked out by hand beside it (docs/capacity.md has the first
// example).
#include "ckptctl/capacity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast {
namespace {

using testing::HasSubstr;

// 100 billion parameters of 14 bytes on 80 ranks of 10 nodes.
CapacityInput Example() {
  CapacityInput input;
  input.state_bytes = 1'400'000'000'000;
  input.ranks = 80;
  input.step_seconds = 20;
  input.save_every_steps = 3;
  input.replicas = 1;
  input.nvme = {.on = true, .steps = 6};
  input.nvme_drives = 2;
  input.nvme_bytes = 15'360'000'000'000;
  input.nodes_per_domain = 5;
  input.rates.memory = 20'000'000'000;
  input.rates.network = 10'000'000'000;
  input.rates.nvme = 7'000'000'000;
  input.rates.remote = 1'000'000'000;
  input.rates.remote_all = 20'000'000'000;
  return input;
}

CapacityPlan PlanOf(const CapacityInput& input) {
  const absl::StatusOr<CapacityPlan> plan = PlanCapacity(input);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? *plan : CapacityPlan{};
}

std::vector<std::string> ProblemsOf(const CapacityInput& input) {
  std::vector<std::string> problems;
  for (const CapacityPlan::Problem& problem : PlanOf(input).problems) {
    problems.push_back(absl::StrCat(problem.what, " => ", problem.change));
  }
  return problems;
}

TEST(Capacity, Memory) {
  const CapacityPlan plan = PlanOf(Example());
  EXPECT_EQ(plan.nodes, 10u);
  EXPECT_EQ(plan.image_bytes, 17'500'000'000u);   // 1.4e12 / 80
  EXPECT_EQ(plan.slot_bytes, 17'500'733'440u);    // 8345 × 2 MiB; 8344 are 1,363,712 bytes short
  EXPECT_EQ(plan.node_bytes, 140'000'000'000u);   // 8 ranks
  EXPECT_EQ(plan.slots_bytes, 420'017'602'560u);  // 8 × 3 slots
  EXPECT_EQ(plan.peer_bytes, 280'011'735'040u);   // 8 slots of another node, of two steps
  EXPECT_EQ(plan.memory_bytes(), 700'029'337'600u);
}

TEST(Capacity, Tiers) {
  const CapacityPlan plan = PlanOf(Example());
  EXPECT_DOUBLE_EQ(plan.save_interval, 60);
  EXPECT_DOUBLE_EQ(plan.save_time, 7);  // 140 GB at 20 GB/s

  EXPECT_EQ(plan.peers.save_bytes, 140'000'000'000u);
  EXPECT_DOUBLE_EQ(plan.peers.time, 14);
  EXPECT_DOUBLE_EQ(plan.peers.lag, 21);
  EXPECT_DOUBLE_EQ(plan.peers.busy(), 14.0 / 60);

  EXPECT_DOUBLE_EQ(plan.nvme.interval, 120);  // each sixth step of 20 s
  EXPECT_DOUBLE_EQ(plan.nvme.time, 20);
  EXPECT_DOUBLE_EQ(plan.nvme.lag, 27);
  EXPECT_EQ(plan.nvme_recycle_bytes, 70'000'000'000u);   // four ranks on a drive
  EXPECT_EQ(plan.nvme_budget_bytes, 777'777'777'778u);   // 5 × 140 GB are 90 % of it
  EXPECT_EQ(plan.nvme_day_bytes, 100'800'000'000'000u);  // 720 times 140 GB
  EXPECT_DOUBLE_EQ(plan.drive_writes_a_day, 6.5625);     // of 15.36 TB

  EXPECT_EQ(plan.remote.save_bytes, 1'400'000'000'000u);
  EXPECT_DOUBLE_EQ(plan.remote.interval, 600);
  EXPECT_DOUBLE_EQ(plan.remote.time, 140);  // a node's tenth at 1 GB/s; all at 20 GB/s: 70 s
  EXPECT_DOUBLE_EQ(plan.remote.lag, 167);   // after nvme
  EXPECT_EQ(plan.remote_capacity_bytes, 5'600'000'000'000u);
  EXPECT_NEAR(plan.remote_bytes_per_s, 2'333'333'333.33, 0.01);
  EXPECT_EQ(plan.problems.size(), 0u);
}

TEST(Capacity, LostWork) {
  const CapacityPlan plan = PlanOf(Example());
  const auto of = [&](Loss loss) { return plan.losses[static_cast<size_t>(loss)]; };
  // 10 nodes × 365 days / 250.
  EXPECT_DOUBLE_EQ(of(Loss::kProcess).failures_a_year, 14.6);
  EXPECT_EQ(of(Loss::kProcess).from, "memory");
  EXPECT_DOUBLE_EQ(of(Loss::kProcess).lost(), 30 + 7 + 7);
  // Replicas are newer (30 + 21) than what is on the drives (60 + 27).
  EXPECT_EQ(of(Loss::kReboot).from, "peer");
  EXPECT_DOUBLE_EQ(of(Loss::kReboot).lost(), 30 + 21 + 14 + 7);
  EXPECT_EQ(of(Loss::kNode).from, "peer");
  EXPECT_DOUBLE_EQ(of(Loss::kNode).failures_a_year, 3.65);
  EXPECT_DOUBLE_EQ(of(Loss::kDomain).failures_a_year, 0.0365);  // two domains
  EXPECT_EQ(of(Loss::kCluster).from, "remote");
  EXPECT_DOUBLE_EQ(of(Loss::kCluster).lost(), 300 + 167 + 140 + 7);
  // (14.6 × 44 + (7.3 + 3.65 + 0.0365) × 72 + 614) / 3600.
  EXPECT_NEAR(plan.hours_a_year, 0.56873, 0.000005);
  // (14.6 × 29 + 10.9865 × 57 + 464) / 3600, (14.6 × 74 + 10.9865 × 102 + 914) / 3600.
  EXPECT_NEAR(plan.hours_a_year_twice_as_often, 0.420453, 0.000005);
  EXPECT_NEAR(plan.hours_a_year_half_as_often, 0.865284, 0.000005);
}

TEST(Capacity, WithoutReplicasTheDrivesOrRemoteAreWhatIsLeft) {
  CapacityInput input = Example();
  input.replicas = 0;
  const CapacityPlan plan = PlanOf(input);
  EXPECT_FALSE(plan.peers.on);
  EXPECT_EQ(plan.peer_bytes, 0u);
  EXPECT_EQ(plan.losses[1].from, "nvme");
  EXPECT_DOUBLE_EQ(plan.losses[1].lost(), 60 + 27 + 20 + 7);
  EXPECT_EQ(plan.losses[2].from, "remote");
  EXPECT_EQ(plan.losses[3].from, "remote");
}

TEST(Capacity, OneDomainKeepsNoReplicaOfItselfElsewhere) {
  CapacityInput input = Example();
  input.nodes_per_domain = 10;
  EXPECT_EQ(PlanOf(input).losses[3].from, "remote");
  input.nodes_per_domain = 0;
  EXPECT_FALSE(PlanOf(input).losses[3].possible);
  // Nor has a single node another one.
  input.ranks = 8;
  input.state_bytes = 140'000'000'000;
  EXPECT_EQ(PlanOf(input).losses[2].from, "remote");
}

TEST(Capacity, ReplicasOfTheModelHoldTheirShareAgain) {
  CapacityInput input = Example();
  input.state_bytes = 1'000'000'000'000;
  input.ranks = 8;
  input.data_parallel = 4;
  input.alike_share = kShareUnits / 2;
  CapacityPlan plan = PlanOf(input);
  // Half of it four times, the other half once: 2.5 TB on 8 ranks.
  EXPECT_EQ(plan.image_bytes, 312'500'000'000u);
  EXPECT_EQ(plan.remote.save_bytes, 1'000'000'000'000u);  // each byte once
  // Read once (1000 s by one node), passed on (2.5 TB at 10 GB/s), copied (2.5 TB at 20 GB/s).
  EXPECT_DOUBLE_EQ(plan.losses[4].restore, 1000 + 250 + 125);
  input.share_replicas = false;
  plan = PlanOf(input);
  EXPECT_EQ(plan.remote.save_bytes, 2'500'000'000'000u);
  EXPECT_DOUBLE_EQ(plan.losses[4].restore, 2500 + 125);
}

TEST(Capacity, IntervalsAreThoseOfThePolicy) {
  CapacityInput input = Example();
  input.nvme = {.on = true, .steps = 2};  // less often than that nothing is saved
  EXPECT_DOUBLE_EQ(PlanOf(input).nvme.interval, 60);
  input.nvme = {.on = true, .steps = 0, .seconds = 61};  // the next save after it
  EXPECT_DOUBLE_EQ(PlanOf(input).nvme.interval, 120);
  input.remote = {.on = true, .steps = 0, .seconds = 1};
  EXPECT_DOUBLE_EQ(PlanOf(input).remote.interval, 60);
  input.remote_keep_every_steps = 4320;  // once a day
  EXPECT_EQ(PlanOf(input).remote_day_bytes, 1'400'000'000'000u);
}

TEST(Capacity, SaysWhatDoesNotFitAndWhatWould) {
  CapacityInput input = Example();
  input.memory_bytes = 600'000'000'000;
  EXPECT_THAT(ProblemsOf(input),
              testing::ElementsAre(testing::AllOf(
                  HasSubstr("memory of a node: 652 GiB are needed, 558.8 GiB are there"),
                  // 16 slots and the replicas; 24 slots alone.
                  HasSubstr("--slots-per-rank 2 needs 521.6 GiB"),
                  HasSubstr("--replicas 0 needs 391.2 GiB"))));
  input.memory_bytes = 700'029'337'600;  // to the byte
  EXPECT_THAT(ProblemsOf(input), testing::IsEmpty());

  input.nvme_bytes = 700'000'000'000;
  input.remote_bytes = 5'000'000'000'000;
  EXPECT_THAT(ProblemsOf(input),
              testing::ElementsAre(HasSubstr("--nvme-keep-last 1 needs 579.5 GiB"),  // 560 GB / 0.9
                                   HasSubstr("remote: 5.1 TiB are needed, 4.5 TiB are there")));
}

TEST(Capacity, SaysWhatDoesNotKeepUpAndWhatWould) {
  CapacityInput input = Example();
  input.rates.network = 2'000'000'000;     // 70 s
  input.rates.nvme = 1'000'000'000;        // 140 s
  input.rates.remote_all = 2'000'000'000;  // 700 s
  EXPECT_THAT(ProblemsOf(input),
              testing::ElementsAre(testing::AllOf(HasSubstr("replicas: one step takes 1 min 10 s"),
                                                  HasSubstr("--save-every 6,")),
                                   testing::AllOf(HasSubstr("nvme: one step takes 2 min 20 s"),
                                                  HasSubstr("--nvme-every-steps 9,")),
                                   HasSubstr("--remote-every-ms 700s,")));
  input = Example();
  input.drive_writes_max = 3;
  // 6.5625 each 120 s are 3 each 262.5 s: each fifteenth step, as saves come.
  EXPECT_THAT(ProblemsOf(input), testing::ElementsAre(HasSubstr("--nvme-every-steps 15")));
  input.nvme = {.on = true, .steps = 15};
  EXPECT_THAT(ProblemsOf(input), testing::IsEmpty());
}

TEST(Capacity, SaysWhatNothingSurvives) {
  CapacityInput input = Example();
  input.remote.on = false;
  EXPECT_THAT(ProblemsOf(input),
              testing::ElementsAre(HasSubstr("nothing survives the loss of all nodes")));
  const CapacityPlan plan = PlanOf(input);
  // Only what comes back is counted: (14.6 × 44 + 10.9865 × 72) / 3600.
  EXPECT_NEAR(plan.hours_a_year, 0.398174, 0.000005);
  const auto json = nlohmann::json::parse(CapacityToJson(input, plan));
  EXPECT_EQ(json["losses"][4]["hours_a_year"], nullptr);
  EXPECT_EQ(json["losses"][4]["survives"], false);
  EXPECT_EQ(json["remote"], nullptr);
  EXPECT_EQ(json["fits"], false);
  input.nvme.on = false;
  input.replicas = 0;
  EXPECT_EQ(ProblemsOf(input).size(), 4u);
}

TEST(Capacity, RefusesWhatIsBeyondAllSizes) {
  CapacityInput input = Example();
  input.state_bytes = uint64_t{1} << 60;
  input.remote_keep = 1'000'000;
  EXPECT_THAT(Message(PlanCapacity(input).status()), HasSubstr("more than 16 EiB"));
  input.remote_keep = 3;
  input.data_parallel = 80;
  input.alike_share = kShareUnits;
  EXPECT_THAT(Message(PlanCapacity(input).status()), HasSubstr("more than 16 EiB"));
  input = Example();
  input.data_parallel = 3;
  EXPECT_THAT(Message(PlanCapacity(input).status()), HasSubstr("cannot be divided"));
}

}  // namespace
}  // namespace holdfast
