#include "recovery/restorable.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

namespace holdfast {
namespace {

TEST(Restorable, CountsEachRankOnce) {
  const std::vector<ShardPresence> shards{
      {{1, 5}, 0, 2, false}, {{1, 5}, 0, 2, false}, {{1, 5}, 1, 2, true}};
  const auto all = Summarize(shards);
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].sealed, 1u);
  EXPECT_EQ(all[0].bad, 1u);
  EXPECT_FALSE(all[0].committed());
}

TEST(Restorable, AGoodCopyOutweighsABadOne) {
  for (const bool bad_first : {true, false}) {
    const std::vector<ShardPresence> shards{{{1, 5}, 0, 1, bad_first}, {{1, 5}, 0, 1, !bad_first}};
    EXPECT_TRUE(Summarize(shards)[0].committed());
  }
}

TEST(Restorable, DisagreementAboutTheWorldFailsClosed) {
  EXPECT_FALSE(Summarize(std::vector<ShardPresence>{
      {{1, 5}, 0, 2, false}, {{1, 5}, 1, 3, false}, {{1, 5}, 1, 2, false}})[0]
                   .committed());
  EXPECT_FALSE(
      Summarize(std::vector<ShardPresence>{{{1, 5}, 0, 1, false}, {{1, 5}, 1, 1, false}})[0]
          .committed());
  EXPECT_FALSE(Summarize(std::vector<ShardPresence>{{{1, 5}, 0, 0, false}})[0].committed());
  EXPECT_TRUE(Summarize({}).empty());
}

TEST(Restorable, CandidatesAreWholeOnTheLineAndOfThisWorld) {
  const std::vector<Descent> line{{3, {1, 10}}, {1, {}}};
  std::vector<CheckpointSummary> all;
  for (const CheckpointId id : {CheckpointId{1, 9}, {1, 10}, {1, 11}, {2, 4}, {3, 2}}) {
    all.push_back({id, 2, 2, 0, true});
  }
  all.push_back({{3, 3}, 2, 1, 0, true});   // not whole
  all.push_back({{3, 4}, 4, 4, 0, true});   // another world
  all.push_back({{3, 5}, 2, 2, 0, false});  // contradicts itself
  EXPECT_EQ(Candidates(all, line, 2), (std::vector<CheckpointId>{{3, 2}, {1, 10}, {1, 9}}));
  // Who reads by itself can read any world's.
  EXPECT_EQ(Candidates(all, line, std::nullopt),
            (std::vector<CheckpointId>{{3, 4}, {3, 2}, {1, 10}, {1, 9}}));
}

// Oracle: count by hand.
TEST(Restorable, AgreesWithCountingOnRandomInventories) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 500; ++round) {
    std::vector<ShardPresence> shards;
    const uint32_t world = 1 + random() % 4;
    for (size_t i = random() % 20; i > 0; --i) {
      shards.push_back(
          {{1, random() % 4}, static_cast<Rank>(random() % world), world, random() % 4 == 0});
    }
    for (const CheckpointSummary& summary : Summarize(shards)) {
      bool whole = true;
      for (Rank rank = 0; rank < world; ++rank) {
        whole = whole && std::any_of(shards.begin(), shards.end(), [&](const ShardPresence& s) {
                  return s.checkpoint == summary.id && s.rank == rank && !s.bad;
                });
      }
      EXPECT_EQ(summary.committed(), whole);
    }
  }
}

}  // namespace
}  // namespace holdfast
