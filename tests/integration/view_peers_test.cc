// Views of shards that lie on other nodes: several ckptds, real libfabric.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tests/integration/peers_world.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

const Whole kLarge{"large", Type::kF32, {6001, 1000}};  // more than one batch of parts
const Whole kSmall{"small", Type::kI64, {77}};

// Ranks 0 and 1 have saved on the first two nodes; whoever looks is on another.
class ViewPeersTest : public PeersTest {
 protected:
  const Model model_{{kLarge, kSmall}, {Split::kRows, Split::kReplicated}};
  const std::vector<Object> objects_ = {{.name = "of_rank", .json = false, .codec = "text"}};

  size_t from_ = 2;  // where whoever looks is

  Result<std::unique_ptr<View>> Look(uint32_t rank, std::vector<std::string> without = {}) {
    return Attach({.job = "elastic",
                   .rank = rank,
                   .newest = false,
                   .step = 1,
                   .socket = nodes_[from_]->socket(),
                   .without = std::move(without)});
  }
  // Of the tensor of that name.
  static size_t Index(const View& view, const std::string& name) {
    size_t i = 0;
    while (i < view.tensors().size() && view.tensors()[i].name != name) {
      ++i;
    }
    return i;
  }
  void ExpectAll(View& view, uint32_t rank) const {
    Parts parts = PartsOf(model_, rank, 2);
    ASSERT_EQ(view.tensors().size(), parts.size());
    for (const auto& part : parts) {
      const size_t i = Index(view, part->tensor.name);
      ASSERT_EQ(view.tensors()[i].bytes, part->elements.size() * TypeBytes(part->tensor.type));
      EXPECT_EQ(view.tensors()[i].data, nullptr) << "there is nothing here to point to";
      const Status read = view.Read(i, part->bytes.data());
      ASSERT_TRUE(read.ok()) << read.message();
    }
    EXPECT_EQ(Differs(model_, parts, 1), "");
    ASSERT_EQ(view.objects().size(), 1u);
    EXPECT_EQ(view.objects()[0].bytes, std::to_string(rank));
  }
};

TEST_F(ViewPeersTest, AreReadWhereverTheyLie) {
  ASSERT_NO_FATAL_FAILURE(StartNodes({.nodes = 3}));
  Save(model_, 2, 1, objects_);
  for (const uint32_t rank : {0U, 1U}) {
    const auto view = Look(rank);
    ASSERT_TRUE(view.ok()) << view.status().message();
    EXPECT_EQ((*view)->tier(), "peer");
    EXPECT_EQ((*view)->world_size(), 2u);
    ExpectAll(**view, rank);
    const Status verified = (*view)->Verify();
    EXPECT_TRUE(verified.ok()) << verified.message();
    EXPECT_TRUE((*view)->verified());
  }
}

// Of a process the one that was read last stays open.
TEST_F(ViewPeersTest, ManyAtATime) {
  ASSERT_NO_FATAL_FAILURE(StartNodes({.nodes = 3}));
  Save(model_, 2, 1, objects_);
  std::vector<std::unique_ptr<View>> views;
  for (int i = 0; i < 10; ++i) {
    auto view = Look(static_cast<uint32_t>(i) % 2);
    ASSERT_TRUE(view.ok()) << i << ": " << view.status().message();
    views.push_back(*std::move(view));
  }
  for (size_t i = 0; i < views.size(); ++i) {
    ExpectAll(*views[i], static_cast<uint32_t>(i) % 2);
  }
}

// Where it lies in remote, too, it is read there when no node has it any more.
TEST_F(ViewPeersTest, FromRemoteWhenNoNodeHasItAnyMore) {
  const TemporaryDirectory remote;
  ASSERT_NO_FATAL_FAILURE(StartNodes({.nodes = 3, .remote_dir = remote.path()}));
  places_ = {0};
  ++launch_;
  OpenRank(Of(0, 1)).reset();  // so the first node hosts the job
  places_ = {0, 1};
  Save(model_, 2, 1, objects_, {Stage::kRemote});
  const auto view = Look(1);
  ASSERT_TRUE(view.ok()) << view.status().message();
  EXPECT_EQ((*view)->tier(), "peer");
  nodes_[1]->Kill();
  ExpectAll(**view, 1);
  // Nor when it is gone before it is looked at.
  const auto later = Look(1);
  ASSERT_TRUE(later.ok()) << later.status().message();
  EXPECT_EQ((*later)->tier(), "remote");
  EXPECT_NE((*later)->tensors()[0].data, nullptr);
}

TEST_F(ViewPeersTest, ItsNodeOrItsDaemonIsGoneInBetween) {
  ASSERT_NO_FATAL_FAILURE(StartNodes({.nodes = 4, .replicas = 1}));
  places_ = {1};
  ++launch_;
  OpenRank(Of(0, 1)).reset();  // so the second node, which stays, hosts the job
  places_ = {0, 1};
  Save(model_, 2, 1, objects_, {Stage::kPeer});
  const CtlAnswer where = Ctl(*nodes_[0], {"where", "elastic", "--step", "1", "--json"});
  ASSERT_EQ(where.exit_code, 0) << where.errors;
  for (const auto& copy : where.parsed["copies"]) {
    if (copy["rank"] == 0 && copy["tier"] == "peer" && copy["node"] == "n3") {
      from_ = 3;  // the third has the replica
    }
  }
  const auto view = Look(0);
  ASSERT_TRUE(view.ok()) << view.status().message();
  EXPECT_EQ((*view)->tier(), "peer");
  nodes_[0]->Kill();
  ExpectAll(**view, 0);
  nodes_[from_]->Kill();
  ASSERT_TRUE(nodes_[from_]->Start());
  ExpectAll(**view, 0);
}

TEST_F(ViewPeersTest, WhatIsDamagedOrGoneIsSaidSo) {
  ASSERT_NO_FATAL_FAILURE(StartNodes({.nodes = 3}));
  Save(model_, 2, 1, objects_);
  ASSERT_EQ(Damage(0, 0, 1), "");
  auto view = Look(0);
  ASSERT_TRUE(view.ok()) << view.status().message();
  const Tensor& damaged = (*view)->tensors()[0];  // as it lies in the slot
  std::vector<std::byte> into(damaged.bytes);
  Status read = (*view)->Read(0, into.data());
  EXPECT_EQ(read.code(), Code::kCorrupt) << read.message();
  EXPECT_THAT(read.message(), HasSubstr("'" + damaged.name + "'"));
  read = (*view)->Read(1, nullptr);
  EXPECT_TRUE(read.ok()) << read.message();
  EXPECT_FALSE((*view)->Verify().ok());
  EXPECT_FALSE((*view)->verified());
  EXPECT_FALSE(Look(0, {"peer"}).ok());
  // Its node is gone, and nobody else has it.
  view = Look(1);
  ASSERT_TRUE(view.ok()) << view.status().message();
  nodes_[1]->Kill();
  read = (*view)->Read(Index(**view, "large"), nullptr);
  EXPECT_EQ(read.code(), Code::kUnavailable) << read.message();
}

}  // namespace
}  // namespace holdfast
