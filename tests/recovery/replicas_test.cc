// Which ranks are replicas, and how they are told.
#include "recovery/replicas.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

Likeness Like(uint8_t tensors, uint8_t content) {
  Likeness likeness;
  likeness.tensors.fill(tensors);
  likeness.content.fill(content);
  return likeness;
}

TEST(ReplicasTest, SameTensorsAndSameBytes) {
  // Two stages of two replicas each, a rank that is alone, one that nothing is known of.
  std::vector<RankLikeness> ranks = {{0, Like(1, 11)}, {1, Like(2, 21)}, {2, Like(1, 11)},
                                     {3, Like(2, 21)}, {4, Like(3, 31)}, {5, {}},
                                     {6, {}}};
  for (int round = 0; round < 10; ++round) {
    const Replicas found = FindReplicas(ranks);
    ASSERT_THAT(found.groups, SizeIs(2));
    EXPECT_THAT(found.groups[0].ranks, ElementsAre(0, 2));
    EXPECT_EQ(found.groups[0].content, Like(1, 11).content);
    EXPECT_THAT(found.groups[1].ranks, ElementsAre(1, 3));
    EXPECT_THAT(found.divergence, IsEmpty());
    std::shuffle(ranks.begin(), ranks.end(), std::mt19937(static_cast<unsigned>(round)));
  }
}

TEST(ReplicasTest, OneThatDivergedIsNamedAndSharesNothing) {
  const Replicas found = FindReplicas(
      {{0, Like(1, 12)}, {1, Like(1, 11)}, {2, Like(1, 11)}, {3, Like(2, 22)}, {4, Like(2, 21)}});
  ASSERT_THAT(found.groups, SizeIs(1));
  EXPECT_THAT(found.groups[0].ranks, ElementsAre(1, 2));
  ASSERT_THAT(found.divergence, SizeIs(2));
  EXPECT_THAT(found.divergence[0].contents, ElementsAre(ElementsAre(1, 2), ElementsAre(0)));
  EXPECT_THAT(found.divergence[1].contents, ElementsAre(ElementsAre(3), ElementsAre(4)));
}

TEST(RankRunsTest, MeshesAreOneRun) {
  EXPECT_THAT(*RunsOf(std::vector<Rank>{}), IsEmpty());
  EXPECT_THAT(*RunsOf(std::vector<Rank>{5}), ElementsAre(RankRun{5, 1, 1}));
  EXPECT_THAT(*RunsOf(std::vector<Rank>{3, 11, 19, 27}), ElementsAre(RankRun{3, 8, 4}));
  EXPECT_THAT(*RunsOf(std::vector<Rank>{0, 1, 2, 8, 9, 10}),
              ElementsAre(RankRun{0, 1, 3}, RankRun{8, 1, 3}));
}

TEST(RankRunsTest, WhatIsToldIsWhatWasThere) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    std::vector<Rank> ranks;
    for (Rank rank = 0; rank < 60; ++rank) {
      if (random() % 3 == 0) {
        ranks.push_back(rank);
      }
    }
    const auto runs = RunsOf(ranks);
    ASSERT_TRUE(runs.has_value());
    EXPECT_EQ(*RanksOf(*runs, 60), ranks);
  }
}

TEST(RankRunsTest, TooManyRunsAreNotTold) {
  std::vector<Rank> ranks;  // no three of them in a row: each run has two
  for (Rank i = 0; i < 2 * kRankRunsMax; ++i) {
    ranks.push_back(i * i + i / 2);
  }
  EXPECT_TRUE(RunsOf(ranks).has_value());
  ranks.push_back(1'000'000);
  EXPECT_FALSE(RunsOf(ranks).has_value());
}

TEST(RankRunsTest, HostileRunsAreRefused) {
  using Runs = std::vector<RankRun>;
  EXPECT_TRUE(RanksOf(Runs{{0, 1, 4}}, 4).has_value());
  EXPECT_FALSE(RanksOf(Runs{{0, 1, 5}}, 4).has_value());
  EXPECT_FALSE(RanksOf(Runs{{4, 1, 1}}, 4).has_value());
  EXPECT_FALSE(RanksOf(Runs{{0, 1, 0}}, 4).has_value());
  EXPECT_FALSE(RanksOf(Runs{{0, 0, 2}}, 4).has_value());
  EXPECT_FALSE(RanksOf(Runs{{1, 1, 2}, {2, 1, 1}}, 4).has_value());
  EXPECT_FALSE(RanksOf(Runs{{1, 1, 1}, {0, 1, 1}}, 4).has_value());
  EXPECT_FALSE(RanksOf(Runs{{3, UINT32_MAX, UINT32_MAX}}, 4).has_value());
}

}  // namespace
}  // namespace holdfast
