// plan against a daemon that has two ranks' records, each of half of one matrix of 4 MiB.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "base/units.h"
#include "ckptctl/commands.h"
#include "tests/base/temporary_directory.h"
#include "tests/ckptctl/console.h"
#include "tests/ckptctl/fake_admin.h"
#include "tiers/image/record.h"

namespace holdfast {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string HalfRecord(Rank rank) {
  Slice weight;
  weight.name = "weight";
  weight.dtype = DType::kF32;
  weight.global_shape = {1024, 1024};
  weight.place = BoxPlace{.offset = {512 * uint64_t{rank}, 0}, .shape = {512, 1024}};
  auto plan = PlanImage({weight}, rank);
  EXPECT_TRUE(plan.ok()) << plan.status();
  ShardRecord record;
  record.id.job = *JobUuid::FromString("1b4e28ba-2fa1-41d2-883f-0016d3cca427");
  record.id.attempt = 1;
  record.id.step = 900;
  record.id.rank = rank;
  record.job_name = "llama";
  record.world_size = 2;
  record.generation = 7;
  record.image_bytes = plan->layout.image_bytes;
  record.header_bytes = plan->layout.header_bytes;
  record.layout_hash = plan->layout_hash;
  record.layout_bytes = plan->layout_bytes;
  record.digests.resize(DigestCount(plan->layout), rank + 1);
  record.sealed_unix_ms = 1'714'564'800'000;
  return EncodeRecord(record);
}

// Rank 0's shard in that tier of node a, rank 1's of node b.
FakeAdmin::Answers Halves(const std::string& tier) {
  return {
      .inspect =
          [](const v1::InspectShardRequest& request, v1::InspectShardReply& reply) {
            reply.set_record(HalfRecord(request.rank()));
            reply.set_location("slot-000001");
            return absl::OkStatus();
          },
      .where =
          [tier](const v1::WhereRequest&, v1::WhereReply& reply) {
            for (uint32_t rank = 0; rank < 2; ++rank) {
              v1::ShardCopy& copy = *reply.add_copies();
              copy.set_attempt(1);
              copy.set_step(900);
              copy.set_rank(rank);
              copy.set_world_size(2);
              copy.set_node(tier == "remote" ? "" : rank == 0 ? "a" : "b");
              copy.set_tier(tier);
              copy.set_state("good");
              copy.set_location("slot-000001");
            }
            return absl::OkStatus();
          },
  };
}

class PlanTest : public ::testing::Test {
 protected:
  // `text`: of the layout file.
  PlanArguments Arguments(const std::string& text) {
    const std::string path = directory_.Path("new.yaml");
    std::ofstream(path) << text;
    // Unlike each other.
    return {.job = "llama",
            .layout_file = path,
            .rates = {.memory = kMiB,
                      .nvme = 2 * kMiB,
                      .network = kMiB / 2,
                      .remote = kMiB / 4,
                      .remote_all = kMiB / 8,
                      .told = {"memory", "nvme", "network", "remote", "remote-all"}},
            .ranks_per_node = 1};
  }
  static json Parsed(const std::string& tier, const PlanArguments& arguments) {
    FakeAdmin admin(Halves(tier));
    Console console(admin.socket());
    EXPECT_EQ(RunPlan(console.Json(), arguments), ExitCode::kOk) << console.err();
    return console.Parsed();
  }
  static std::string Text(const std::string& tier, const PlanArguments& arguments) {
    FakeAdmin admin(Halves(tier));
    Console console(admin.socket());
    RunPlan(console.context(), arguments);
    return console.out() + console.err();
  }

  TemporaryDirectory directory_;
};

constexpr char kRows[] =
    "mesh: [{name: dp, ranks: 2}]\nrules: [{tensors: weight, splits: [{axis: dp, dimension: 0}]}]";

TEST_F(PlanTest, TheEstimateKnowsWhichNodesHaveWhat) {
  // Each wants what one node has: 2 MiB.
  const json memory = Parsed("memory", Arguments(kRows))["estimate"];
  EXPECT_EQ(memory["near"]["total_ms"], 2000);
  EXPECT_EQ(memory["near"]["memory_ms"], 2000);
  EXPECT_EQ(memory["near"]["waits_for"], "memory");
  EXPECT_EQ(memory["far"]["total_ms"], 4000);
  EXPECT_EQ(memory["far"]["network_ms"], 4000);
  EXPECT_EQ(memory["far"]["waits_for"], "network");
  EXPECT_EQ(memory["nodes"], 2);
  EXPECT_EQ(memory["ranks_per_node"], 1);
  const json nvme = Parsed("nvme", Arguments(kRows))["estimate"];
  EXPECT_EQ(nvme["near"]["total_ms"], 1000);
  EXPECT_EQ(nvme["near"]["nvme_ms"], 1000);
  EXPECT_EQ(nvme["far"]["total_ms"], 5000);
}

TEST_F(PlanTest, RemoteBytesThatSeveralWantCountOnce) {
  // Both want all 4 MiB: 32 s for all nodes together. Each gets 2 MiB of the other.
  const json whole = Parsed("remote", Arguments("mesh: [{name: dp, ranks: 2}]"));
  EXPECT_EQ(whole["read_bytes_by_tier"]["remote"], 8 * kMiB);
  EXPECT_EQ(whole["estimate"]["near"]["remote_ms"], 32'000);
  EXPECT_EQ(whole["estimate"]["near"]["network_ms"], 4000);
  EXPECT_EQ(whole["estimate"]["near"], whole["estimate"]["far"]);
  EXPECT_EQ(whole["estimate"]["near"]["waits_for"], "remote");
}

TEST_F(PlanTest, TheEstimateIsCalledOneAndSaysFromWhat) {
  PlanArguments arguments = Arguments(kRows);
  EXPECT_THAT(Text("memory", arguments),
              AllOf(HasSubstr("may take       2 s to 4 s, if the rates below are right\n"),
                    HasSubstr("    near         2 s: ranks run where most of what they read lies; "
                              "rank 0 is the last: memory 2 s\n"),
                    HasSubstr("    far          4 s: they run on other nodes; rank 0 is the last: "
                              "network 4 s\n"),
                    HasSubstr("told         1 rank a node (2 nodes), memory 1 MB/s a node, "),
                    Not(HasSubstr("assumed")), HasSubstr("not counted")));
  EXPECT_THAT(Text("remote", arguments),
              HasSubstr("may take       32 s, if the rates below are right; rank 0 is the last: "
                        "remote 32 s\n"));
  arguments.rates = PlanRates();
  ASSERT_TRUE(SetRate("nvme=3GB/s", arguments.rates).ok());
  arguments.ranks_per_node.reset();
  EXPECT_THAT(Text("memory", arguments),
              AllOf(HasSubstr("assumed      8 ranks a node (1 node), memory 10 GB/s a node, "
                              "network 3 GB/s a node each way, remote 1 GB/s a node, remote-all "
                              "10 GB/s all nodes together\n"),
                    HasSubstr("told         nvme 3 GB/s a node\n")));
  const json machine = Parsed("memory", arguments)["estimate"];
  EXPECT_EQ(machine["rates_bytes_per_s"]["nvme"], 3'000'000'000);
  EXPECT_EQ(machine["rates_bytes_per_s"]["remote-all"], 10'000'000'000);
  EXPECT_EQ(machine["rates_told"], json({"nvme"}));
}

TEST_F(PlanTest, WhatIsNearMayBeTheSlowerOne) {
  PlanArguments arguments = Arguments(kRows);
  arguments.rates.memory = kMiB / 8;
  EXPECT_THAT(Text("memory", arguments),
              AllOf(HasSubstr("may take       4 s to 16 s, "), HasSubstr("near         16 s: "),
                    HasSubstr("far          4 s: ")));
}

TEST_F(PlanTest, NoEstimateOfAPartOrOfWhatCannotBe) {
  PlanArguments arguments = Arguments("mesh: [{name: dp, ranks: 65}]");
  const json some = Parsed("memory", arguments);
  EXPECT_EQ(some["ranks_planned"], 64);
  EXPECT_TRUE(some["estimate"].is_null());
  EXPECT_THAT(std::string(some["no_estimate"]), HasSubstr("--all-ranks"));
  EXPECT_THAT(Text("memory", arguments),
              AllOf(HasSubstr("no estimate"), Not(HasSubstr("may take"))));
  arguments.all_ranks = true;
  const json all = Parsed("memory", arguments);
  EXPECT_EQ(all["no_estimate"], "");
  EXPECT_EQ(all["estimate"]["nodes"], 65);
  EXPECT_THAT(Text("memory", Arguments("rules: [{tensors: weight, dtype: I64}]")),
              AllOf(HasSubstr("it cannot be restored so"), Not(HasSubstr("may take"))));
}

}  // namespace
}  // namespace holdfast
