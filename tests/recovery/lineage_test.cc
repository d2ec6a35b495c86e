#include "recovery/lineage.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace holdfast {
namespace {

using Attempts = std::map<Attempt, AttemptParent>;

TEST(Lineage, FirstAttemptIsItsOwnLine) {
  const Attempts attempts{{1, {true, {}}}};
  const auto line = LineOf(attempts, 1, kLineMax);
  ASSERT_EQ(line.size(), 1u);
  EXPECT_TRUE(OnLine(line, {1, 0}));
  EXPECT_TRUE(OnLine(line, {1, UINT64_MAX}));
  EXPECT_FALSE(OnLine(line, {2, 1}));
  EXPECT_FALSE(OnLine(line, {0, 1}));
  EXPECT_FALSE(LineRestoredAnything(line));
}

TEST(Lineage, RollbackDiscardsTheBranch) {
  // 1 ran to 1000, 2 went back to 900, 3 restored 2's step 950.
  const Attempts attempts{{1, {true, {}}}, {2, {true, {1, 900}}}, {3, {true, {2, 950}}}};
  const auto line = LineOf(attempts, 3, kLineMax);
  EXPECT_TRUE(OnLine(line, {3, 1}));
  EXPECT_TRUE(OnLine(line, {2, 950}));
  EXPECT_FALSE(OnLine(line, {2, 951}));
  EXPECT_TRUE(OnLine(line, {1, 900}));
  EXPECT_FALSE(OnLine(line, {1, 901}));
  EXPECT_TRUE(LineRestoredAnything(line));
}

TEST(Lineage, UndecidedAttemptsLeaveNoTrace) {
  const Attempts attempts{{1, {true, {}}}, {2, {false, {}}}, {3, {false, {1, 5}}}};
  EXPECT_EQ(NewestDecided(attempts), 1u);
  EXPECT_TRUE(LineOf(attempts, 3, kLineMax).empty());
  EXPECT_TRUE(LineOf(attempts, 9, kLineMax).empty());
  EXPECT_FALSE(OnLine(LineOf(attempts, 3, kLineMax), {1, 5}));
  EXPECT_EQ(NewestDecided({}), 0u);
}

TEST(Lineage, DamagedParentsEndTheLine) {
  const Attempts attempts{
      {2, {true, {3, 1}}}, {3, {true, {2, 1}}}, {4, {true, {4, 1}}}, {5, {true, {1, 7}}}};
  EXPECT_EQ(LineOf(attempts, 3, kLineMax).size(), 2u);
  EXPECT_FALSE(OnLine(LineOf(attempts, 2, kLineMax), {3, 1}));
  EXPECT_EQ(LineOf(attempts, 4, kLineMax).size(), 1u);
  // The parent is not remembered any more: its restored steps are still on the line.
  EXPECT_TRUE(OnLine(LineOf(attempts, 5, kLineMax), {1, 7}));
  EXPECT_FALSE(OnLine(LineOf(attempts, 5, kLineMax), {1, 8}));
}

TEST(Lineage, LengthIsBounded) {
  Attempts attempts;
  for (Attempt a = 1; a <= 5000; ++a) {
    attempts[a] = {true, {a - 1, a}};
  }
  EXPECT_EQ(LineOf(attempts, 5000, kLineMax).size(), kLineMax);
  static_assert(kLineMax <= kDescentMax);
}

// The definition, word by word: A's steps; then, if A restored (P, s), P's steps up to s; and so
// on.
bool OnLineByDefinition(const Attempts& attempts, Attempt a, CheckpointId c) {
  const AttemptParent& info = attempts.at(a);
  if (c.attempt == a) {
    return true;
  }
  if (info.parent.attempt == 0) {
    return false;
  }
  if (c.attempt == info.parent.attempt) {
    return c.step <= info.parent.step;
  }
  return OnLineByDefinition(attempts, info.parent.attempt, c);
}

TEST(Lineage, AgreesWithTheDefinitionOnRandomHistories) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 500; ++round) {
    Attempts attempts;
    const Attempt count = 1 + random() % 8;
    for (Attempt a = 1; a <= count; ++a) {
      const Attempt parent = random() % a;
      attempts[a] = {true, {parent, parent == 0 ? 0 : random() % 6}};
    }
    for (Attempt a = 1; a <= count; ++a) {
      const auto line = LineOf(attempts, a, kLineMax);
      for (Attempt c = 1; c <= count; ++c) {
        for (Step s = 0; s < 6; ++s) {
          EXPECT_EQ(OnLine(line, {c, s}), OnLineByDefinition(attempts, a, {c, s}))
              << "round " << round << " line of " << a;
        }
      }
    }
  }
}

}  // namespace
}  // namespace holdfast
