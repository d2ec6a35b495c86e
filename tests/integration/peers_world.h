// Several ckptds with an etcd of their own, and a job whose ranks, all in this process, run on
// whichever of them the test says.
//
//   class MyTest : public PeersTest {};
//   ASSERT_NO_FATAL_FAILURE(StartNodes({.nodes = 3}));
//   Save(model, 2, 1);        // rank 0 on the first node, rank 1 on the second
//   places_ = {2};
//   const auto all = Load(model, 1, 1);
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/integration/ctl.h"
#include "tests/integration/etcd_server.h"
#include "tests/integration/harness.h"
#include "tests/integration/slot_damage.h"
#include "tests/integration/split_model.h"

namespace holdfast {

inline constexpr Milliseconds kPeersDeadline{60'000};

struct ClusterOptions {
  size_t nodes = 2;
  std::string fabric = "auto";
  uint32_t replicas = 0;
  uint32_t drives = 0;
  std::string remote_dir;  // of all nodes
};

class PeersTest : public ::testing::Test {
 protected:
  void StartNodes(const ClusterOptions& options = {}) {
    ASSERT_TRUE(etcd_.Start());
    for (size_t i = 0; i < options.nodes; ++i) {
      NodeOptions node;
      node.drives = options.drives;
      node.remote_dir = options.remote_dir;
      std::string policy = "replicas: " + std::to_string(options.replicas);
      policy += options.drives > 0 ? ", nvme: {every_steps: 1}" : "";
      policy += options.remote_dir.empty() ? "" : ", remote: {every_steps: 1, every_ms: 0}";
      node.config =
          "node_name: n" + std::to_string(i + 1) +
          "\ncluster:\n  listen_address: \"127.0.0.1:0\"\n  advertise_address: \"127.0.0.1:0\"\n"
          "  etcd: {endpoints: [\"" +
          etcd_.endpoint() + "\"], lease_ttl_ms: 1h}\nfabric: {provider: " + options.fabric +
          "}\npolicy: {" + policy + "}\n";
      nodes_.push_back(std::make_unique<Node>(node));
      ASSERT_TRUE(nodes_.back()->Start()) << nodes_.back()->Log();
    }
    for (const auto& node : nodes_) {
      AwaitMembers(*node, options.nodes);
    }
  }
  // All processes die, and what the nodes' memory held is gone.
  void PowerCut() {
    for (const auto& node : nodes_) {
      node->Kill();
      std::filesystem::remove_all(node->memory_dir());
    }
    for (const auto& node : nodes_) {
      ASSERT_TRUE(node->Start());
    }
    for (const auto& node : nodes_) {
      ASSERT_NO_FATAL_FAILURE(AwaitMembers(*node, nodes_.size()));
    }
  }
  static void AwaitMembers(Node& node, size_t members) {
    ASSERT_TRUE(node.Until([&](const v1::GetStatusReply&) {
      const CtlAnswer said = Ctl(node, {"nodes", "--json"});
      return said.exit_code == 0 && said.parsed["nodes"].size() == members;
    })) << node.Log();
  }

  // Rank r runs on the (r modulo so many)th of `places`.
  SplitRank Of(uint32_t rank, uint32_t ranks) const {
    return {rank, ranks, launch_, nodes_[places_[rank % places_.size()]]->socket()};
  }
  void Save(const Model& model, uint32_t ranks, uint64_t step,
            const std::vector<Object>& objects = {},
            const std::vector<Stage>& until = {Stage::kCommitted}) {
    ++launch_;
    ForAllRanks(ranks, [&](uint32_t rank) {
      const std::unique_ptr<Job> job = OpenRank(Of(rank, ranks));
      ASSERT_NE(job, nullptr);
      SaveRank(*job, Of(rank, ranks), model, step, objects, until, kPeersDeadline);
    });
  }
  // `between`: called by rank 0 when it knows what there is, before it reads any of it.
  std::vector<Outcome> Load(const Model& model, uint32_t ranks, uint64_t step,
                            const std::function<void()>& between = nullptr) {
    ++launch_;
    std::vector<Outcome> all(ranks, Outcome(Status(Code::kInternal, "")));
    ForAllRanks(ranks, [&](uint32_t rank) {
      const std::unique_ptr<Job> job = OpenRank(Of(rank, ranks));
      ASSERT_NE(job, nullptr);
      Parts parts = PartsOf(model, rank, ranks);
      State state;
      all[rank] = job->Restore(
          [&](const Saved&) -> Result<State> {
            if (between != nullptr && rank == 0) {
              between();
            }
            state = StateOf(parts);
            return state;
          },
          {.deadline = kPeersDeadline});
      if (all[rank].ok()) {
        EXPECT_EQ(Differs(model, parts, step), "") << "rank " << rank << " of " << ranks;
        EXPECT_EQ(all[rank]->step, step);
      }
    });
    return all;
  }

  std::string Damage(size_t node, uint32_t rank, uint64_t step) {
    return DamageSlot(nodes_[node]->memory_dir(), rank, step);
  }

  // The host hears a moment later that nobody uses it any more.
  void RemoveJob() {
    std::string said;
    ASSERT_TRUE(nodes_[0]->Until([&](const v1::GetStatusReply&) {
      said = nodes_[0]->Remove("elastic");
      return said.empty();
    })) << said;
  }

  EtcdServer etcd_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<size_t> places_ = {0, 1};
  int launch_ = 0;
};

}  // namespace holdfast
