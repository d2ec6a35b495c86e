#include "recovery/protection.h"

#include <gtest/gtest.h>

namespace holdfast {
namespace {

TEST(Protection, MemoryOfOneNodeSurvivesProcessesOnly) {
  const std::vector<Descent> line{{2, {1, 10}}, {1, {}}};
  const std::vector<CheckpointSummary> all{{{1, 9}, 2, 2, 0, true},
                                           {{1, 10}, 2, 2, 0, true},
                                           {{1, 99}, 2, 2, 0, true},
                                           {{2, 11}, 2, 1, 0, true}};
  const auto table = ProtectionOnOneNode(all, line);
  ASSERT_EQ(table.size(), 4u);
  EXPECT_EQ(table[0].kind, FailureKind::kProcess);
  EXPECT_EQ(table[0].survives, (CheckpointId{1, 10}));
  for (size_t i = 1; i < table.size(); ++i) {
    EXPECT_FALSE(table[i].survives);
  }
  EXPECT_EQ(table[3].kind, FailureKind::kAllNodes);
}

TEST(Protection, NothingCommittedNothingSurvives) {
  const std::vector<Descent> line{{1, {}}};
  EXPECT_FALSE(ProtectionOnOneNode({}, line)[0].survives);
  const std::vector<CheckpointSummary> bad{{{1, 1}, 2, 1, 1, true}};
  EXPECT_FALSE(ProtectionOnOneNode(bad, line)[0].survives);
}

}  // namespace
}  // namespace holdfast
