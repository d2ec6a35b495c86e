#include "recovery/shedding.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace holdfast {
namespace {

using Kind = ShedChoice::Kind;

TEST(Surplus, OtherBranchesFirstThenOldest) {
  const std::vector<ShedChoice> all{{{1, 1}, Kind::kOnLine},
                                    {{1, 2}, Kind::kOnLine},
                                    {{1, 8}, Kind::kOffLine},
                                    {{2, 3}, Kind::kOnLine},
                                    {{2, 4}, Kind::kUncommitted}};
  EXPECT_TRUE(Surplus(all, 0).empty());
  EXPECT_TRUE(Surplus(all, 4).empty());
  EXPECT_EQ(Surplus(all, 3), (std::vector<CheckpointId>{{1, 8}}));
  EXPECT_EQ(Surplus(all, 1), (std::vector<CheckpointId>{{1, 8}, {1, 1}, {1, 2}}));
}

TEST(Surplus, NeverLowersProtectionOrTakesWhatIsHeld) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 2000; ++round) {
    std::vector<ShedChoice> all;
    for (Step step = 0; step < 6; ++step) {
      ShedChoice choice{{1 + random() % 2, step}, static_cast<Kind>(random() % 4)};
      choice.held = random() % 4 == 0;
      choice.pinned = random() % 4 == 0;
      all.push_back(choice);
    }
    const uint32_t keep = random() % 5;
    const auto surplus = Surplus(all, keep);
    size_t committed = 0;
    for (const ShedChoice& choice : all) {
      const bool gone = std::count(surplus.begin(), surplus.end(), choice.id) > 0;
      const bool is_committed = choice.kind == Kind::kOnLine || choice.kind == Kind::kOffLine;
      committed += is_committed && !gone ? 1 : 0;
      EXPECT_FALSE(
          gone && (choice.held || choice.pinned || !is_committed || choice.id == Untouchable(all)));
    }
    EXPECT_TRUE(surplus.empty() || committed >= keep);
    EXPECT_TRUE(keep > 0 || surplus.empty());
  }
}

}  // namespace
}  // namespace holdfast
