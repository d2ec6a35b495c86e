#include "server/node_inventories.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace holdfast {
namespace {

using Kind = InventoryState::Kind;
using ::testing::HasSubstr;
using ::testing::Not;

InventoryState State(Kind kind, const std::string& why = "") {
  return {TierKind::kNvme, kind, why};
}

class NodeInventoriesTest : public ::testing::Test {
 protected:
  Kind SumKind() const { return nvme_.Sum(names_).kind; }
  std::string Why() const { return nvme_.Sum(names_).why; }

  NodeNames names_{"a"};
  const NodeId b_ = names_.Number("b");
  const NodeId c_ = names_.Number("c");
  NodeInventories nvme_;
};

TEST_F(NodeInventoriesTest, IsKnownWhenEveryNodeHasTold) {
  EXPECT_EQ(SumKind(), Kind::kPending) << "nobody has told anything";
  nvme_.Set(kHere, State(Kind::kKnown));
  EXPECT_EQ(SumKind(), Kind::kKnown);
  nvme_.Set(b_, State(Kind::kPending));
  EXPECT_EQ(SumKind(), Kind::kPending);
  EXPECT_TRUE(nvme_.AnyPendingElsewhere());
  nvme_.Set(b_, State(Kind::kKnown));
  EXPECT_EQ(SumKind(), Kind::kKnown);
  EXPECT_FALSE(nvme_.AnyPendingElsewhere());
  nvme_.Set(kHere, State(Kind::kPending));
  EXPECT_EQ(SumKind(), Kind::kPending);
  EXPECT_FALSE(nvme_.AnyPendingElsewhere()) << "only here";
}

TEST_F(NodeInventoriesTest, ANodeThatIsNotThereAnyMoreIsNotWaitedFor) {
  nvme_.Set(kHere, State(Kind::kKnown));
  nvme_.Set(b_, State(Kind::kPending, "out of reach"));
  EXPECT_THAT(Why(), HasSubstr("b: out of reach"));
  nvme_.Erase(b_);
  nvme_.Erase(c_);
  EXPECT_EQ(SumKind(), Kind::kKnown);
  EXPECT_EQ(Why(), "");
  EXPECT_FALSE(nvme_.MayHaveMore(b_));
}

TEST_F(NodeInventoriesTest, OneThatFailedIsNamedAndPendingComesFirst) {
  nvme_.Set(kHere, State(Kind::kKnown));
  nvme_.Set(b_, State(Kind::kFailed, "EIO"));
  EXPECT_EQ(SumKind(), Kind::kFailed);
  EXPECT_EQ(Why(), "b: EIO");
  nvme_.Set(c_, State(Kind::kPending, "out of reach"));
  EXPECT_EQ(SumKind(), Kind::kPending);
  EXPECT_EQ(Why(), "b: EIO; c: out of reach");
  nvme_.Set(b_, State(Kind::kKnown));
  EXPECT_EQ(Why(), "c: out of reach");
}

TEST_F(NodeInventoriesTest, AllAreToBeReadOnceMore) {
  nvme_.Set(kHere, State(Kind::kKnown));
  nvme_.Set(b_, State(Kind::kFailed, "EIO"));
  nvme_.SetAllPending();
  EXPECT_EQ(SumKind(), Kind::kPending);
  EXPECT_EQ(Why(), "");
  nvme_.Set(kHere, State(Kind::kKnown));
  EXPECT_EQ(SumKind(), Kind::kPending);
  nvme_.Set(b_, State(Kind::kKnown));
  EXPECT_EQ(SumKind(), Kind::kKnown);
}

TEST_F(NodeInventoriesTest, OfManyThatAreInTroubleSomeAreNamed) {
  for (int i = 0; i < 10; ++i) {
    nvme_.Set(names_.Number("n" + std::to_string(i)), State(Kind::kFailed, "EIO"));
  }
  EXPECT_THAT(Why(), HasSubstr("; and 2 more nodes"));
  EXPECT_THAT(Why(), Not(HasSubstr("n8")));
}

}  // namespace
}  // namespace holdfast
