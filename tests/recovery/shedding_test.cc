#include "recovery/shedding.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace holdfast {
namespace {

using Kind = ShedChoice::Kind;

ShedChoice Choice(CheckpointId id, Kind kind, bool useful = true) {
  ShedChoice choice;
  choice.id = id;
  choice.kind = kind;
  choice.useful = useful;
  return choice;
}

TEST(Shedding, OrderOfTheRules) {
  std::vector<ShedChoice> all{
      Choice({1, 1}, Kind::kOnLine),      Choice({1, 2}, Kind::kOnLine),
      Choice({1, 9}, Kind::kOffLine),     Choice({2, 3}, Kind::kDead),
      Choice({2, 4}, Kind::kUncommitted), Choice({2, 5}, Kind::kUncommitted)};
  const CheckpointId begun{2, 6};
  std::vector<CheckpointId> order;
  while (auto victim = ChooseVictim(all, begun)) {
    order.push_back(victim->id);
    for (ShedChoice& choice : all) {
      choice.is_protected = choice.is_protected || choice.id == victim->protect;
    }
    std::erase_if(all, [&](const ShedChoice& c) { return c.id == victim->id; });
  }
  EXPECT_EQ(order, (std::vector<CheckpointId>{{2, 3}, {1, 9}, {1, 1}, {2, 4}}));
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].id, (CheckpointId{1, 2}));  // the newest committed one
  EXPECT_TRUE(all[1].is_protected);            // and the step that gets its chance
}

TEST(Shedding, OnlyWhatMakesRoom) {
  EXPECT_FALSE(ChooseVictim(std::vector<ShedChoice>{Choice({1, 1}, Kind::kUncommitted, false),
                                                    Choice({1, 0}, Kind::kDead, false)},
                            {1, 2}));
}

TEST(Shedding, TheStepBegunIsNeverGivenUp) {
  EXPECT_FALSE(ChooseVictim(std::vector<ShedChoice>{Choice({1, 2}, Kind::kUncommitted)}, {1, 2}));
}

TEST(Shedding, WhileTheLineHasNothingTheNewestOfAnyBranchStays) {
  const std::vector<ShedChoice> all{Choice({1, 1}, Kind::kOffLine), Choice({1, 2}, Kind::kOffLine)};
  EXPECT_EQ(ChooseVictim(all, {2, 1})->id, (CheckpointId{1, 1}));
  EXPECT_FALSE(ChooseVictim(std::vector<ShedChoice>{all[1]}, {2, 1}));
}

TEST(Shedding, ARestorePointYieldsLast) {
  ShedChoice pinned = Choice({1, 1}, Kind::kOnLine);
  pinned.pinned = true;
  const ShedChoice newest = Choice({1, 2}, Kind::kOnLine);
  ShedChoice open = Choice({1, 3}, Kind::kUncommitted);
  EXPECT_EQ(ChooseVictim(std::vector<ShedChoice>{pinned, newest, open}, {1, 4})->id, open.id);
  open.is_protected = true;
  EXPECT_FALSE(ChooseVictim(std::vector<ShedChoice>{pinned, newest, open}, {1, 4}));
  EXPECT_EQ(ChooseVictim(std::vector<ShedChoice>{pinned, newest}, {1, 4})->rule, ShedRule::kPinned);
  EXPECT_FALSE(ChooseSpare(std::vector<ShedChoice>{pinned, newest}));
}

TEST(Shedding, NeverTheNewestCommittedNorAnythingHeld) {
  std::mt19937_64 random(4);
  for (int round = 0; round < 5000; ++round) {
    std::vector<ShedChoice> all;
    std::optional<CheckpointId> newest;
    for (Step step = 0; step < 1 + random() % 7; ++step) {
      ShedChoice choice = Choice({1, step}, static_cast<Kind>(random() % 4), random() % 4 > 0);
      choice.held = random() % 5 == 0;
      choice.pinned = random() % 5 == 0;
      choice.is_protected = choice.kind == Kind::kUncommitted && random() % 4 == 0;
      newest = choice.kind == Kind::kOnLine ? choice.id : newest;
      all.push_back(choice);
    }
    const CheckpointId begun{1, random() % 8};
    const auto victim = ChooseVictim(all, begun);
    if (!victim) {
      continue;
    }
    const auto chosen = std::find_if(all.begin(), all.end(),
                                     [&](const ShedChoice& c) { return c.id == victim->id; });
    ASSERT_NE(chosen, all.end());
    EXPECT_TRUE(chosen->useful);
    EXPECT_FALSE(chosen->held);
    EXPECT_FALSE(chosen->is_protected);
    EXPECT_NE(chosen->id, newest);
    EXPECT_FALSE(chosen->kind == Kind::kUncommitted && chosen->id == begun);
    // Nothing of a gentler rule could have gone instead.
    for (const ShedChoice& other : all) {
      const bool could =
          other.useful && !other.held && !other.pinned && other.id != Untouchable(all);
      EXPECT_FALSE(could && other.kind < chosen->kind) << "round " << round;
      EXPECT_FALSE(could && other.kind == chosen->kind && !other.is_protected &&
                   other.id < chosen->id && other.id != begun && !chosen->pinned);
    }
  }
}

// A job whose ranks all live, of which one is `lag` steps behind the others, each with `slots`
// slots: whatever the order of their saves, it commits within a bounded number of them (invariant
// 13).
TEST(Shedding, AHealthyJobCommitsWithinABoundedNumberOfSaves) {
  for (const size_t slots : {2u, 3u, 4u}) {
    for (const int ranks : {2, 3, 5}) {
      for (const Step lag : {0u, 1u, 3u, 10u}) {
        std::mt19937_64 random(slots * 1000 + static_cast<size_t>(ranks) * 100 + lag);
        std::map<Step, std::set<int>> open;  // step → ranks that sealed it
        std::set<Step> lost;
        std::set<Step> committed;
        std::optional<Step> guarded;
        std::vector<Step> next(static_cast<size_t>(ranks), 0);
        Step since_commit = 0;
        const auto lose = [&](Step step) {
          open.erase(step);
          lost.insert(step);
          guarded = guarded == step ? std::nullopt : guarded;
        };
        for (int turn = 0; turn < 3000; ++turn) {
          const Step slowest = *std::min_element(next.begin(), next.end());
          const int rank = static_cast<int>(random() % static_cast<size_t>(ranks));
          Step& step = next[static_cast<size_t>(rank)];
          if (step > slowest + lag) {
            continue;
          }
          const Step saving = step++;
          since_commit = rank == 0 ? since_commit + 1 : since_commit;
          ASSERT_LT(since_commit, 3 * (lag + 4))
              << slots << " slots, " << ranks << " ranks, lag " << lag;
          if (lost.count(saving) > 0) {
            continue;
          }
          open[saving];
          const auto holds = [&](Step s) {
            return committed.count(s) > 0 || open[s].count(rank) > 0;
          };
          bool room = false;
          while (!room) {
            size_t held = committed.size();
            std::vector<ShedChoice> choices;
            for (const Step s : committed) {
              choices.push_back(Choice({1, s}, Kind::kOnLine, holds(s)));
            }
            for (const auto& [s, sealed] : open) {
              held += sealed.count(rank);
              choices.push_back(Choice({1, s}, Kind::kUncommitted, sealed.count(rank) > 0));
              choices.back().is_protected = guarded == s;
            }
            if (held < slots) {
              room = true;
              break;
            }
            const auto victim = ChooseVictim(choices, {1, saving});
            if (!victim) {
              break;
            }
            if (victim->protect) {
              guarded = victim->protect->step;
            }
            if (committed.erase(victim->id.step) == 0) {
              lose(victim->id.step);
            }
          }
          if (!room) {
            lose(saving);
            continue;
          }
          open[saving].insert(rank);
          if (open[saving].size() == static_cast<size_t>(ranks)) {
            open.erase(saving);
            committed.insert(saving);
            guarded = guarded == saving ? std::nullopt : guarded;
            since_commit = 0;
          }
        }
        EXPECT_FALSE(committed.empty());
      }
    }
  }
}

}  // namespace
}  // namespace holdfast
