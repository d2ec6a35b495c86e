#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "recovery/protection.h"
#include "recovery/retention.h"
#include "tests/recovery/random_inventory.h"

namespace holdfast {
namespace {

constexpr TierSet kMem = SetOf(TierKind::kMemory);
constexpr TierSet kNv = SetOf(TierKind::kNvme);
constexpr TierSet kRem = SetOf(TierKind::kRemote);
const std::vector<Descent> kLine{{2, {1, 20}}, {1, {}}};

// `ranks` says for each rank in which tiers its good copies lie; 100 bytes each.
CheckpointView View(CheckpointId id, const std::vector<TierSet>& ranks) {
  ModelCheckpoint model;
  model.flags.id = id;
  model.flags.world_size = static_cast<uint32_t>(ranks.size());
  model.flags.complete = true;
  model.good = ranks;
  model.bad.resize(ranks.size());
  return ViewOf(model);
}

struct Plan {
  std::vector<CheckpointId> goes;
  std::map<CheckpointId, std::string> why;
};
Plan Nvme(const std::vector<CheckpointView>& views, const RetentionRules& rules,
          uint64_t bytes_wanted = 0, const std::vector<Descent>& line = kLine) {
  Plan plan;
  for (const RetentionVerdict& verdict :
       PlanRetention(TierKind::kNvme, views, line, rules, bytes_wanted)) {
    if (verdict.goes) {
      plan.goes.push_back(verdict.id);
    }
    plan.why[verdict.id] = verdict.why;
  }
  return plan;
}
using Ids = std::vector<CheckpointId>;

TEST(TierRetention, KeepsTheLastOnTheLine) {
  const std::vector<CheckpointView> views{View({2, 40}, {kNv, kNv}), View({1, 10}, {kNv, kNv}),
                                          View({2, 30}, {kNv, kNv}), View({2, 50}, {kMem, kMem}),
                                          View({1, 20}, {kNv, kNv})};
  const Plan plan = Nvme(views, {.keep_last = 2});
  EXPECT_EQ(plan.goes, (Ids{{1, 10}, {1, 20}}));
  EXPECT_EQ(plan.why.at({1, 10}), "older than the 2 that keep_last keeps");
  EXPECT_EQ(plan.why.at({2, 30}), "keep_last 2 keeps it");
  EXPECT_EQ(plan.why.at({2, 40}), "newest step on the line in nvme");
  EXPECT_EQ(plan.why.count({2, 50}), 0u) << "nothing of it lies there";
  EXPECT_EQ(Nvme(views, {.keep_last = 0}).goes.size(), 3u) << "the newest stays in any case";
}

// Whom a file needs that leaves slices out is not known exactly, and what was found bad may prove
// good: nothing is thrown away on a doubt, as long as there is nothing newer.
TEST(TierRetention, WhatMayBeNeededByABadOneStays) {
  CheckpointView doubted = View({2, 40}, {kMem, 0, kRem, kRem});
  doubted.at(TierKind::kRemote).doubted = 1;
  doubted.at(TierKind::kRemote).bad = 1;
  const auto judge = [&](const std::vector<CheckpointView>& views) {
    Plan plan;
    for (const RetentionVerdict& verdict : PlanRetention(TierKind::kRemote, views, kLine, {}, 0)) {
      plan.why[verdict.id] = (verdict.goes ? "goes: " : "stays: ") + verdict.why;
    }
    return plan.why.at({2, 40});
  };
  const CheckpointView older = View({2, 30}, {kRem, kRem, kRem, kRem});
  EXPECT_EQ(judge({doubted, older}),
            "stays: may be whole: files leave out what is in others, which are bad or gone now");
  EXPECT_EQ(judge({doubted, older, View({2, 50}, {kRem, kRem, kRem, kRem})}),
            "goes: only 2 of 4 shards are good here; the step cannot be restored from anywhere");
  doubted.at(TierKind::kRemote).doubted = 0;
  doubted.at(TierKind::kRemote).bad = 0;
  EXPECT_EQ(judge({doubted, older}),
            "goes: only 2 of 4 shards are good here; the step cannot be restored from anywhere");
}

// Of a step that went bad the other ranks' shards are good, and somebody may have the rest.
TEST(TierRetention, WhatWentBadGoesWhenItsTurnComes) {
  const auto whole = [](Step step) { return View({2, step}, {kNv, kNv}); };
  const auto bad = [](CheckpointId id, bool lies) {
    ModelCheckpoint model;
    model.flags.id = id;
    model.flags.world_size = 2;
    model.flags.complete = true;
    model.good = {kNv, 0};
    model.bad = {0, lies ? kNv : TierSet{0}};
    return ViewOf(model);
  };
  const std::string stays =
      "only 1 of 2 shards are good here, the others bad; it stays as long as the rules would keep "
      "it, for them to be put back";
  Plan plan = Nvme({whole(30), bad({2, 40}, true), whole(50), whole(60)}, {.keep_last = 3});
  EXPECT_EQ(plan.goes, Ids{}) << "the one that is whole has its place still";
  EXPECT_EQ(plan.why.at({2, 40}), stays);
  plan = Nvme({bad({2, 40}, true), whole(50), whole(60), whole(70)}, {.keep_last = 3});
  EXPECT_EQ(plan.goes, (Ids{{2, 40}}));
  EXPECT_EQ(plan.why.at({2, 40}),
            "only 1 of 2 shards are good here; the step cannot be restored from anywhere");
  // Those of which nothing is whole are not collected without end.
  plan = Nvme({View({1, 10}, {kMem, kMem}), bad({2, 40}, true), bad({2, 41}, true)}, {});
  EXPECT_EQ(plan.goes, (Ids{{2, 40}}));
  // As an archive keeps it, it stays.
  EXPECT_EQ(Nvme({bad({2, 40}, true), whole(50), whole(60)}, {.keep_every_steps = 40}).goes,
            (Ids{{2, 50}}));
  // But not what lies nowhere, what another branch has, or where room is short.
  EXPECT_EQ(Nvme({bad({2, 40}, false), whole(30)}, {.keep_last = 3}).goes, (Ids{{2, 40}}));
  EXPECT_EQ(Nvme({bad({1, 40}, true), whole(30)}, {.keep_last = 3}).goes, (Ids{{1, 40}}));
  EXPECT_EQ(Nvme({bad({2, 40}, true), whole(50), whole(60)}, {.keep_last = 3}, 100).goes,
            (Ids{{2, 40}}));
}

// It is all that the job has: what was found bad may prove good.
TEST(TierRetention, StepsThatWereWholeStayAsLongAsNothingElseCanBeRestored) {
  ModelCheckpoint wreck;
  wreck.flags.id = {2, 40};
  wreck.flags.world_size = 2;
  wreck.flags.complete = true;
  wreck.good = {kNv, 0};
  wreck.bad = {0, kNv};
  ModelCheckpoint older = wreck;
  older.flags.id = {2, 30};
  ModelCheckpoint newer = wreck;  // of which nobody has anything of rank 1
  newer.flags.id = {2, 50};
  newer.bad = {0, 0};
  const Plan plan = Nvme({ViewOf(older), ViewOf(newer), ViewOf(wreck)}, {});
  // Which of them will prove good nobody knows: of the newest, one rank may have all that is bad.
  EXPECT_EQ(plan.goes, (Ids{{2, 50}}));
  for (const Step step : {30, 40}) {
    EXPECT_EQ(plan.why.at({2, step}),
              "nothing can be restored, and what is bad of this step may prove good");
  }
  EXPECT_EQ(Nvme({ViewOf(wreck)}, {.bytes_max = 1}, 1000).goes, Ids{});
  const CheckpointView whole = View({1, 10}, {kMem, kMem});
  EXPECT_EQ(Nvme({ViewOf(wreck), whole, View({2, 45}, {kNv, kNv})}, {}).goes, (Ids{{2, 40}}));
}

TEST(TierRetention, BranchesStayUntilTheLineHasItsOwn) {
  std::vector<CheckpointView> views{View({1, 25}, {kNv}), View({1, 30}, {kNv}),
                                    View({2, 21}, {kNv})};
  EXPECT_EQ(Nvme(views, {.keep_last = 2}).goes, Ids{});
  EXPECT_EQ(Nvme(views, {.keep_last = 2}).why.at({1, 25}),
            "of a branch that was left, which stays until the line has 2 in nvme");
  views.push_back(View({2, 22}, {kNv}));
  EXPECT_EQ(Nvme(views, {.keep_last = 2}).goes, (Ids{{1, 25}, {1, 30}}));
  EXPECT_EQ(Nvme(views, {.keep_last = 2}).why.at({1, 30}),
            "of a branch that was left; the line has 2 in nvme");
}

TEST(TierRetention, KeepEveryIsForEver) {
  const std::vector<CheckpointView> views{View({1, 10}, {kNv}), View({1, 15}, {kNv}),
                                          View({2, 30}, {kNv}), View({2, 31}, {kNv})};
  Plan plan = Nvme(views, {.keep_last = 1, .keep_every_steps = 10});
  EXPECT_EQ(plan.goes, (Ids{{1, 15}}));
  EXPECT_EQ(plan.why.at({1, 10}), "divisible by keep_every_steps 10");
  plan = Nvme(views, {.keep_last = 1, .keep_every_steps = 10, .bytes_max = 200});
  EXPECT_EQ(plan.goes, (Ids{{1, 15}}));
  EXPECT_EQ(plan.why.at({1, 10}),
            "divisible by keep_every_steps 10; it stays although 100 B more should become free");
}

TEST(TierRetention, WhatIsInUseStays) {
  const RetentionRules rules{.keep_last = 1};
  const auto why = [&](void (*change)(CheckpointView&)) {
    std::vector<CheckpointView> views{View({1, 10}, {kNv, kNv}), View({2, 30}, {kNv, kNv})};
    change(views[0]);
    const Plan plan = Nvme(views, rules, 1000);
    return plan.goes.empty() ? plan.why.at({1, 10}) : "goes";
  };
  EXPECT_EQ(why([](CheckpointView&) {}), "goes");
  EXPECT_EQ(why([](CheckpointView& v) { v.held = true; }), "a restore may be using it");
  EXPECT_EQ(why([](CheckpointView& v) { v.pinned = true; }), "pinned");
  EXPECT_EQ(why([](CheckpointView& v) { v.at(TierKind::kNvme).flushing = true; }),
            "is being written to nvme");
  EXPECT_EQ(why([](CheckpointView& v) { v.at(TierKind::kNvme).source = true; }),
            "is being read for another tier");
}

TEST(TierRetention, PartsThatCanNeverBecomeWholeGo) {
  std::vector<CheckpointView> views{View({1, 10}, {kNv, 0}),     // no use to anybody
                                    View({1, 11}, {kNv, kRem}),  // whole together
                                    View({1, 12}, {kNv | kRem, kRem}),
                                    View({2, 30}, {kNv | kRem, kNv | kRem})};
  Plan plan = Nvme(views, {.keep_last = 2});
  EXPECT_EQ(plan.goes, (Ids{{1, 10}, {1, 12}}));
  EXPECT_EQ(plan.why.at({1, 10}),
            "only 1 of 2 shards are good here; the step cannot be restored from anywhere");
  EXPECT_EQ(plan.why.at({1, 11}), "with what lies in other tiers it makes the step whole");
  EXPECT_EQ(plan.why.at({1, 12}), "only 1 of 2 shards are good here; remote has it whole");
  // Nor while it is still wanted there.
  views[0].at(TierKind::kNvme).wanted = true;
  EXPECT_EQ(Nvme(views, {.keep_last = 2}).goes, (Ids{{1, 12}}));
  // With memory they survive a process, alone with remote they would survive a reboot.
  views = {View({1, 10}, {kMem | kNv, kMem | kRem}), View({2, 30}, {kNv | kRem, kNv | kRem})};
  EXPECT_EQ(Nvme(views, {.keep_last = 2}).goes, Ids{});
}

TEST(TierRetention, WhatIsStillBeingSavedIsNotDead) {
  std::vector<CheckpointView> views{View({2, 30}, {kNv, 0}), View({1, 19}, {kNv, 0})};
  views[0].complete = views[1].complete = false;
  const Plan plan = Nvme(views, {});
  EXPECT_EQ(plan.goes, (Ids{{1, 19}}));
  EXPECT_EQ(plan.why.at({2, 30}), "is still being saved");
}

TEST(TierRetention, ShardsWithoutTheirManifestAreNotLost) {
  std::vector<CheckpointView> views{View({1, 10}, {0, 0}), View({1, 11}, {0, 0}),
                                    View({1, 12}, {kNv, 0}), View({1, 13}, {kMem, kMem})};
  views[3].at(TierKind::kRemote).unlisted = 2;
  views[0].at(TierKind::kRemote).unlisted = 2;
  views[1].at(TierKind::kRemote).unlisted = 1;
  views[2].at(TierKind::kRemote).unlisted = 1;
  std::vector<CheckpointId> goes;
  for (const auto& verdict : PlanRetention(TierKind::kRemote, views, kLine, {}, 0)) {
    if (verdict.goes) {
      goes.push_back(verdict.id);
    }
  }
  EXPECT_EQ(goes, (Ids{{1, 11}}));
}

TEST(TierRetention, WaitsForTheTierThatWantsIt) {
  std::vector<CheckpointView> views{View({1, 10}, {kNv}), View({1, 11}, {kNv | kMem}),
                                    View({2, 30}, {kNv})};
  views[0].at(TierKind::kRemote).wanted = true;
  views[1].at(TierKind::kRemote).wanted = true;
  const Plan plan = Nvme(views, {.keep_last = 1});
  EXPECT_EQ(plan.goes, (Ids{{1, 11}}));
  EXPECT_EQ(plan.why.at({1, 10}), "is to be written to remote from here");
  EXPECT_EQ(Nvme(views, {.keep_last = 1}, 200).goes.size(), 2u) << "unless room is short";
}

TEST(TierRetention, RoomIsMadeFromOtherBranchesFirstThenFromTheOldest) {
  const std::vector<CheckpointView> views{View({1, 10}, {kNv}), View({1, 25}, {kNv}),
                                          View({2, 21}, {kNv}), View({2, 30}, {kNv})};
  EXPECT_EQ(Nvme(views, {.keep_last = 5}).goes, Ids{});
  EXPECT_EQ(Nvme(views, {.keep_last = 5, .bytes_max = 399}).goes, (Ids{{1, 25}}));
  EXPECT_EQ(Nvme(views, {.keep_last = 5, .bytes_max = 300}, 101).goes, (Ids{{1, 25}, {1, 10}}));
  Plan plan = Nvme(views, {.keep_last = 5, .bytes_max = 1});
  EXPECT_EQ(plan.goes, (Ids{{1, 25}, {1, 10}, {2, 21}}));
  EXPECT_EQ(plan.why.at({2, 21}), "the job's bytes_max in nvme is 1 B");
  plan = Nvme(views, {.keep_last = 5}, 1);
  EXPECT_EQ(plan.why.at({1, 25}), "room is short in nvme");
  // What goes anyway is counted first.
  EXPECT_EQ(Nvme(views, {.keep_last = 2}, 200).goes, (Ids{{1, 25}, {1, 10}}));
}

TEST(TierRetention, TheOnlyCopyOfTheNewestStepStaysOnAnyBranch) {
  // A job begun anew: its line has nothing yet.
  const std::vector<Descent> anew{{3, {}}};
  const std::vector<CheckpointView> views{View({1, 10}, {kNv}), View({2, 30}, {kNv})};
  Plan plan = Nvme(views, {.keep_last = 1}, 1000, anew);
  EXPECT_EQ(plan.goes, (Ids{{1, 10}}));
  EXPECT_EQ(plan.why.at({2, 30}),
            "newest step of any branch that would outlive a reboot of the node");
  // Two tiers have it only together.
  const std::vector<CheckpointView> parts{View({2, 30}, {kNv, kMem}), View({1, 10}, {kNv, kNv})};
  plan = Nvme(parts, {.keep_last = 1}, 1000);
  EXPECT_EQ(plan.goes, Ids{});
  EXPECT_EQ(plan.why.at({2, 30}),
            "newest step on the line that would outlive the end of its processes");
}

// What anybody could rely on, from the copies themselves.
std::vector<std::optional<CheckpointId>> Relied(const Inventory& inventory) {
  std::vector<std::optional<CheckpointId>> relied;
  for (size_t i = 0; i < kFailureKinds; ++i) {
    const auto survives = static_cast<FailureKind>(i);
    relied.push_back(NewestSurviving(inventory.checkpoints, &inventory.line, survives));
    if (!relied.back()) {
      relied.back() = NewestSurviving(inventory.checkpoints, nullptr, survives);
    }
  }
  return relied;
}

class RandomRetention : public testing::TestWithParam<int> {};

TEST_P(RandomRetention, RemovalsInTheirOrderLowerNothing) {
  std::mt19937_64 random(GetParam());
  size_t removed = 0;
  for (int round = 0; round < 400; ++round) {
    Inventory inventory = RandomInventory(random);
    const auto tier = kAllTiers[random() % kTierKinds];
    RetentionRules rules;
    rules.keep_last = random() % 4;
    rules.keep_every_steps = random() % 3 == 0 ? 4 : 0;
    rules.bytes_max = random() % 3 == 0 ? random() % 2000 : 0;
    const uint64_t wanted = random() % 3 == 0 ? random() % 2000 : 0;
    const auto views = ViewsOf(inventory.checkpoints);
    const auto plan = PlanRetention(tier, views, inventory.line, rules, wanted);
    const auto relied = Relied(inventory);

    std::set<CheckpointId> seen;
    bool stays_begun = false;
    for (const RetentionVerdict& verdict : plan) {
      ASSERT_TRUE(seen.insert(verdict.id).second);
      ASSERT_FALSE(verdict.why.empty());
      ASSERT_FALSE(verdict.goes && stays_begun) << "those that go come first";
      stays_begun = stays_begun || !verdict.goes;
      auto& model = *std::find_if(inventory.checkpoints.begin(), inventory.checkpoints.end(),
                                  [&](const auto& m) { return m.flags.id == verdict.id; });
      const TierPresence here = ViewOf(model).at(tier);
      EXPECT_EQ(verdict.bytes, here.bytes);
      if (!verdict.goes) {
        continue;
      }
      ++removed;
      EXPECT_FALSE(model.flags.held || model.flags.pinned || here.flushing || here.source);
      EXPECT_FALSE(rules.keep_every_steps > 0 && here.good == model.flags.world_size &&
                   model.flags.consistent && verdict.id.step % rules.keep_every_steps == 0);
      // A crash may come between any two ranks.
      for (size_t rank = 0; rank < model.good.size(); ++rank) {
        model.good[rank] &= ~SetOf(tier);
        model.bad[rank] &= ~SetOf(tier);
        ASSERT_EQ(Relied(inventory), relied)
            << "seed " << GetParam() << " round " << round << ", " << TierName(tier) << " attempt "
            << verdict.id.attempt << " step " << verdict.id.step << ": " << verdict.why;
      }
      model.unlisted = tier == TierKind::kRemote ? 0 : model.unlisted;
    }
    for (const CheckpointView& view : views) {
      const TierPresence& here = view.at(tier);
      EXPECT_EQ(seen.count(view.id) > 0, here.bytes > 0 || here.flushing);
    }
    if (wanted == 0) {
      for (const auto& verdict :
           PlanRetention(tier, ViewsOf(inventory.checkpoints), inventory.line, rules, 0)) {
        EXPECT_FALSE(verdict.goes) << "a second run finds nothing to do: " << verdict.why;
      }
    }
  }
  EXPECT_GT(removed, 400u) << "the test has something to judge";
}

// Without need nothing goes that the rules keep; with need, no more than is needed.
TEST_P(RandomRetention, KeepsWhatTheRulesKeep) {
  std::mt19937_64 random(GetParam() + 1000);
  for (int round = 0; round < 400; ++round) {
    const Inventory inventory = RandomInventory(random);
    const auto tier = kAllTiers[random() % kTierKinds];
    const RetentionRules rules{.keep_last = static_cast<uint32_t>(1 + random() % 3)};
    const auto views = ViewsOf(inventory.checkpoints);
    const auto calm = PlanRetention(tier, views, inventory.line, rules, 0);
    std::set<CheckpointId> gone;
    uint64_t freed = 0;
    for (const auto& verdict : calm) {
      if (verdict.goes) {
        gone.insert(verdict.id);
        freed += verdict.bytes;
      }
    }
    std::vector<CheckpointId> line_here;
    for (const CheckpointView& view : views) {
      if (view.CommittedAt(tier) && OnLine(inventory.line, view.id)) {
        line_here.push_back(view.id);
      }
    }
    std::sort(line_here.rbegin(), line_here.rend());
    for (size_t i = 0; i < std::min<size_t>(line_here.size(), rules.keep_last); ++i) {
      EXPECT_EQ(gone.count(line_here[i]), 0u);
    }
    const uint64_t more = 1 + random() % 500;
    uint64_t freed_short = 0;
    uint64_t largest = 0;
    for (const auto& verdict : PlanRetention(tier, views, inventory.line, rules, freed + more)) {
      if (verdict.goes) {
        freed_short += verdict.bytes;
        largest = std::max(largest, gone.count(verdict.id) == 0 ? verdict.bytes : 0);
      } else {
        EXPECT_EQ(gone.count(verdict.id), 0u) << "need makes nothing stay";
      }
    }
    EXPECT_TRUE(largest == 0 || freed_short < freed + more + largest) << "one too many";
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomRetention, testing::Range(1, 11));

}  // namespace
}  // namespace holdfast
