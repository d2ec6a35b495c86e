// Who is named to a rank that is brought back from the remote tier, so that each byte is read there
// once (docs/protocol.md §20): on the real coordinator, as after the loss of all else.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/coordinator.h"

namespace holdfast {
namespace {

constexpr uint64_t kBytes = 4096;

class RemoteReadersTest : public ::testing::Test {
 protected:
  // One rank a node, of which every `groups`th holds the same; or it is not known which do.
  void ColdStart(uint32_t ranks, uint32_t groups, bool known) {
    CoordinatorSettings settings;
    settings.commit_deadline = std::chrono::minutes(10);
    settings.slots_per_rank = 3;
    settings.nodes = &nodes_;
    settings.remote = true;
    settings.peers = true;
    settings.policy.mutable_remote()->set_every_steps(1);
    settings.policy.mutable_remote()->set_share_replicas(true);
    for (Rank rank = 1; rank < ranks; ++rank) {
      nodes_.Number(NodeOf(rank));
    }
    JobUuid uuid;
    uuid.bytes[0] = 7;
    job_ = std::make_unique<Coordinator>(settings, uuid, "job", 1000, 1000, 1);
    job_->SetOpenedHere();
    CopiesFound found;
    found.tier = TierKind::kRemote;
    found.began = now_;
    found.manifests = {{1, 10}};
    for (Rank rank = 0; rank < ranks; ++rank) {
      DurableCopy copy;
      copy.copy.id = {uuid, 1, 10, rank};
      copy.copy.job_name = "job";
      copy.copy.world_size = ranks;
      copy.copy.image_bytes = kBytes;
      copy.copy.descent = {{1, {}}};
      copy.record_bytes = 1000;
      copy.record_crc = rank;
      copy.from_manifest = true;
      if (known) {
        copy.copy.likeness.tensors.fill(1);
        copy.copy.likeness.content.fill(static_cast<uint8_t>(1 + rank % groups));
      }
      found.copies.push_back(std::move(copy));
    }
    Say(kHere, found);
    Say(kHere, InventoryState{TierKind::kRemote, InventoryState::Kind::kKnown, ""});
    for (Rank rank = 0; rank < ranks; ++rank) {
      JoinAsked join;
      join.token = ++token_;
      join.connection = token_;
      join.caller = {Process(rank), 1000, 1000};
      join.rank = rank;
      join.world_size = ranks;
      join.launch = "two";
      join.opening = join.token;
      Say(rank, join);
    }
    for (Rank rank = 0; rank < ranks; ++rank) {
      SessionAsked asked;
      asked.token = ++token_;
      asked.attempt = job_->attempt();
      asked.rank = rank;
      asked.process = Process(rank);
      asked.may_wait = true;
      Say(rank, asked);
    }
    ASSERT_EQ(offers_.size(), ranks);
  }

  std::vector<std::string> Named(Rank rank) const {
    std::vector<std::string> names;
    for (const RemoteReader& reader : offers_.at(rank).readers) {
      names.push_back(reader.node);
    }
    return names;
  }
  // How many nodes read what that rank's file has: those that have it from nobody.
  size_t ReadersOfFile(Rank owner, uint32_t ranks, uint32_t groups) const {
    size_t readers = 0;
    for (Rank rank = owner % groups; rank < ranks; rank += groups) {
      const std::vector<std::string> named = Named(rank);
      const bool from_a_peer =
          rank != owner && std::find(named.begin(), named.end(), NodeOf(owner)) != named.end();
      readers += from_a_peer ? 0 : 1;
    }
    return readers;
  }
  static std::string NodeOf(Rank rank) {
    return rank == 0 ? "node-0" : absl::StrCat("node-", rank);
  }

 private:
  static ProcessId Process(Rank rank) { return {static_cast<int32_t>(100 + rank), 5, rank}; }

  void Say(NodeId from, const ToCoordinator& message) {
    std::vector<ForAgent> out;
    job_->Handle(message, from, {now_, 1'000'000}, out);
    for (ForAgent& each : out) {
      if (const auto* state = std::get_if<PersistState>(&each.message)) {
        Say(kHere, StateWritten{state->state.version(), absl::OkStatus()});
      } else if (auto* offer = std::get_if<SourceOffered>(&each.message)) {
        EXPECT_EQ(offer->from, TierKind::kRemote);
        offers_[offer->rank] = std::move(*offer);
      }
    }
  }

  NodeNames nodes_{"node-0"};
  std::unique_ptr<Coordinator> job_;
  MonotonicTime now_{1'000'000'000};
  RequestToken token_ = 0;
  std::map<Rank, SourceOffered> offers_;
};

TEST_F(RemoteReadersTest, AreTheNodesOfThoseThatHoldTheSameHoweverManyThereAre) {
  constexpr uint32_t kRanks = 4 * kRemoteReadersMax;
  constexpr uint32_t kGroups = 4;
  ColdStart(kRanks, kGroups, true);
  for (Rank rank = 0; rank < kRanks; ++rank) {
    const std::vector<std::string> named = Named(rank);
    ASSERT_EQ(named.size(), kRanks / kGroups);
    EXPECT_EQ(named[0], NodeOf(rank)) << "its own first";
    EXPECT_EQ(named[1], NodeOf((rank + kGroups) % kRanks)) << "then who follows it";
    EXPECT_EQ(ReadersOfFile(rank, kRanks, kGroups), 1u) << "each byte is read once";
  }
}

TEST_F(RemoteReadersTest, OfMoreThanMayBeNamedThoseThatFollow) {
  constexpr uint32_t kRanks = 3 * kRemoteReadersMax;
  ColdStart(kRanks, 1, true);
  for (const Rank rank : {Rank{0}, Rank{77}, kRanks - 1}) {
    const std::vector<std::string> named = Named(rank);
    ASSERT_EQ(named.size(), kRemoteReadersMax);
    for (size_t i = 0; i < named.size(); ++i) {
      EXPECT_EQ(named[i], NodeOf((rank + static_cast<Rank>(i)) % kRanks));
    }
  }
}

TEST_F(RemoteReadersTest, WhereItIsNotKnownWhoHoldsTheSameThoseThatFollow) {
  ColdStart(5, 1, false);
  EXPECT_EQ(Named(3), (std::vector<std::string>{"node-3", "node-4", "node-0", "node-1", "node-2"}));
}

}  // namespace
}  // namespace holdfast
