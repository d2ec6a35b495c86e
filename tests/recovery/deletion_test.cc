#include "recovery/deletion.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "recovery/protection.h"
#include "tests/recovery/random_inventory.h"

namespace holdfast {
namespace {

constexpr TierSet kMem = SetOf(TierKind::kMemory);
constexpr TierSet kNv = SetOf(TierKind::kNvme);
constexpr TierSet kRem = SetOf(TierKind::kRemote);
const std::vector<Descent> kLine{{2, {1, 20}}, {1, {}}};
constexpr int64_t kSealed = 1'000'000;

// `ranks` says for each rank in which tiers its good copies lie; 100 bytes each.
CheckpointView View(CheckpointId id, const std::vector<TierSet>& ranks) {
  ModelCheckpoint model;
  model.flags.id = id;
  model.flags.world_size = static_cast<uint32_t>(ranks.size());
  model.flags.complete = true;
  model.flags.unix_ms = kSealed;
  model.good = ranks;
  model.bad.resize(ranks.size());
  return ViewOf(model);
}

struct Plan {
  std::vector<CheckpointId> goes;
  std::map<CheckpointId, std::string> why;
};
Plan Nvme(const std::vector<CheckpointView>& views, const DeletionRules& rules,
          uint64_t bytes_wanted = 0, const std::vector<Descent>& line = kLine) {
  Plan plan;
  for (const DeletionVerdict& verdict :
       PlanDeletion(TierKind::kNvme, views, line, rules, bytes_wanted)) {
    if (verdict.goes) {
      plan.goes.push_back(verdict.id);
    }
    plan.why[verdict.id] = verdict.why;
  }
  return plan;
}
using Ids = std::vector<CheckpointId>;

TEST(Deletion, KeepsTheLastOnTheLine) {
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

// Of rank 0 of two nvme has a good copy; of the other one `rest` says what it has.
enum class Rest { kNothing, kCorrupt };
CheckpointView Parts(CheckpointId id, Rest rest = Rest::kNothing, bool complete = true) {
  ModelCheckpoint model;
  model.flags.id = id;
  model.flags.world_size = 2;
  model.flags.complete = complete;
  model.flags.unix_ms = kSealed;
  model.good = {kNv, 0};
  model.bad = {0, rest == Rest::kCorrupt ? kNv : TierSet{0}};
  return ViewOf(model);
}
CheckpointView Whole(CheckpointId id) {
  return View(id, {kNv, kNv});
}

// The rule: what is missing or corrupt of a step is no reason to delete the rest of it.
TEST(Deletion, IncompleteStepsStayUntilNewerStepsCoverThem) {
  for (const Rest rest : {Rest::kNothing, Rest::kCorrupt}) {
    const std::vector<CheckpointView> views{Parts({2, 40}, rest), Whole({2, 30}), Whole({2, 50})};
    const Plan plan = Nvme(views, {.keep_last = 2});
    EXPECT_EQ(plan.goes, Ids{});
    EXPECT_EQ(
        plan.why.at({2, 40}),
        "only 1 of 2 shards are good here; it stays until the line has 2 later in nvme, to be "
        "repaired or put back");
    std::vector<CheckpointView> covered = views;
    covered.push_back(Whole({2, 60}));
    EXPECT_EQ(Nvme(covered, {.keep_last = 2}).goes, (Ids{{2, 30}, {2, 40}}));
    EXPECT_EQ(Nvme(covered, {.keep_last = 3}).goes, Ids{});
  }
  // Also if it is all that there is, however much there is of it.
  EXPECT_EQ(Nvme({Parts({2, 40}), Parts({2, 50}), Parts({1, 10})}, {}).goes, Ids{});
}

TEST(Deletion, AStepOfAnotherBranchCoversNothing) {
  // Attempt 2 went back to step 20 of attempt 1: 30 and 40 of attempt 1 are not on the line.
  const std::vector<CheckpointView> views{Parts({1, 15}), Whole({1, 30}), Whole({1, 40})};
  const Plan plan = Nvme(views, {.keep_last = 1});
  EXPECT_EQ(plan.goes, Ids{});
  EXPECT_EQ(Nvme({Parts({1, 15}), Whole({1, 20}), Whole({1, 40})}, {.keep_last = 1}).goes,
            (Ids{{1, 15}}));
}

// Step 30 of attempt 2 is later than step 40 of attempt 1: what counts is (attempt, step).
TEST(Deletion, BranchesStayUntilTheLineHasLaterSteps) {
  std::vector<CheckpointView> views{View({1, 10}, {kNv}), View({1, 20}, {kNv}),
                                    View({1, 30}, {kNv}), View({1, 40}, {kNv}),
                                    View({2, 21}, {kNv})};
  EXPECT_EQ(Nvme(views, {.keep_last = 2}).goes, (Ids{{1, 10}}));
  EXPECT_EQ(Nvme(views, {.keep_last = 2}).why.at({1, 30}),
            "of a branch that was left, which stays until the line has 2 later in nvme");
  views.push_back(View({2, 22}, {kNv}));
  EXPECT_EQ(Nvme(views, {.keep_last = 2}).goes, (Ids{{1, 30}, {1, 40}, {1, 10}, {1, 20}}));
  EXPECT_EQ(Nvme(views, {.keep_last = 2}).why.at({1, 30}),
            "of a branch that was left; the line has 2 later in nvme");
}

TEST(Deletion, TheGraceTimeIsOfIncompleteStepsAndOfBranches) {
  std::vector<CheckpointView> views{Parts({1, 10}), Whole({1, 15}), Whole({1, 30}), Whole({2, 40})};
  views[2].left_unix_ms = kSealed;
  DeletionRules rules{.keep_last = 1, .now_unix_ms = kSealed + 999, .grace_ms = 1000};
  Plan plan = Nvme(views, rules);
  EXPECT_EQ(plan.goes, (Ids{{1, 15}})) << "what is older on the line goes at once";
  EXPECT_EQ(plan.why.at({1, 10}),
            "only 1 of 2 shards are good here; it stays for retention.grace_ms (1 s), to be "
            "repaired or put back");
  EXPECT_EQ(plan.why.at({1, 30}),
            "of a branch that was left, which stays for retention.grace_ms (1 s)");
  rules.now_unix_ms = kSealed + 1000;
  EXPECT_EQ(Nvme(views, rules).goes, (Ids{{1, 30}, {1, 15}, {1, 10}}));
  // A clock that went back ends nothing; nor does a time that nobody knows.
  rules.now_unix_ms = 0;
  EXPECT_EQ(Nvme(views, rules).goes, (Ids{{1, 15}}));
  rules.now_unix_ms = kSealed + 1000;
  views[0].unix_ms = 0;
  EXPECT_EQ(Nvme(views, rules).goes, (Ids{{1, 30}, {1, 15}}));
}

TEST(Deletion, IncompleteStepsOfAnArchiveStay) {
  const std::vector<CheckpointView> views{Parts({2, 40}), Whole({2, 50}), Whole({2, 60})};
  EXPECT_EQ(Nvme(views, {.keep_every_steps = 40}).goes, (Ids{{2, 50}}));
  EXPECT_EQ(Nvme(views, {.keep_every_steps = 40}, 300).goes, (Ids{{2, 50}, {2, 40}}))
      << "unless room is short";
}

TEST(Deletion, RemoteKeepsEightStepsOfTheLineWhoseWritingDidNotEnd) {
  std::vector<CheckpointView> views;
  for (Step step = 21; step <= 28; ++step) {
    views.push_back(View({2, step}, {kRem, 0}));
  }
  for (Step step = 30; step <= 40; ++step) {
    views.push_back(View({1, step}, {kRem, 0}));  // passed over: attempt 2 went back to 20
  }
  const auto goes = [&](TierKind tier, const DeletionRules& rules) {
    Ids ids;
    for (const DeletionVerdict& verdict : PlanDeletion(tier, views, kLine, rules, 0)) {
      if (verdict.goes) {
        ids.push_back(verdict.id);
      }
    }
    return ids;
  };
  const DeletionRules rules{.now_unix_ms = kSealed + 1, .grace_ms = 1000};
  EXPECT_EQ(goes(TierKind::kRemote, rules), Ids{});
  views.push_back(View({2, 29}, {0, kRem}));
  EXPECT_EQ(goes(TierKind::kRemote, rules), (Ids{{2, 21}}));
  DeletionRules unread = rules;
  unread.unread = true;
  EXPECT_EQ(goes(TierKind::kRemote, unread), Ids{});
  DeletionRules for_ever = rules;
  for_ever.keep_every_steps = 7;
  EXPECT_EQ(goes(TierKind::kRemote, for_ever), Ids{}) << "21 and 28 stay, and do not count";
  // What was whole there, and is damaged now, may be put back: it stays, and does not count.
  for (const size_t promised : {size_t{0}, views.size() - 1}) {
    views[promised].at(TierKind::kRemote).promised = true;
    EXPECT_EQ(goes(TierKind::kRemote, rules), Ids{});
    views[promised].at(TierKind::kRemote).promised = false;
  }
  views.front().pinned = true;
  EXPECT_EQ(goes(TierKind::kRemote, rules), Ids{})
      << "what stays for another reason does not count";
  for (CheckpointView& view : views) {
    std::swap(view.tiers[static_cast<size_t>(TierKind::kRemote)],
              view.tiers[static_cast<size_t>(TierKind::kNvme)]);
  }
  EXPECT_EQ(goes(TierKind::kNvme, rules), Ids{}) << "nvme has a budget";
}

TEST(Deletion, NothingIncompleteGoesWhileATierIsUnread) {
  const std::vector<CheckpointView> views{Parts({2, 40}), Whole({2, 50}), Whole({2, 60})};
  EXPECT_EQ(Nvme(views, {.unread = true}).goes, (Ids{{2, 50}}));
  EXPECT_EQ(Nvme(views, {.unread = true}, 10'000).goes, (Ids{{2, 50}}));
  EXPECT_EQ(Nvme(views, {}).goes, (Ids{{2, 50}, {2, 40}}));
}

// A living attempt's step is never incomplete.
TEST(Deletion, WhatIsStillBeingSavedStays) {
  const std::vector<CheckpointView> views{Parts({2, 30}, Rest::kNothing, false), Whole({2, 31}),
                                          Parts({1, 19}, Rest::kNothing, false)};
  const Plan plan = Nvme(views, {}, 10'000);
  EXPECT_EQ(plan.goes, (Ids{{1, 19}}));
  EXPECT_EQ(plan.why.at({2, 30}), "is still being saved");
}

TEST(Deletion, RoomTakesSupersededThenIncompleteThenBranches) {
  std::vector<CheckpointView> views{Parts({1, 5}),  Whole({1, 15}), Whole({1, 35}), Whole({2, 40}),
                                    Parts({2, 50}), Parts({2, 60}), Parts({2, 70})};
  views[2].left_unix_ms = kSealed;
  DeletionRules rules{.keep_last = 9, .now_unix_ms = kSealed + 1, .grace_ms = 1000};
  EXPECT_EQ(Nvme(views, rules).goes, Ids{});
  const Ids order{{1, 15}, {1, 5}, {2, 50}, {1, 35}};
  EXPECT_EQ(Nvme(views, rules, 100'000).goes, (Ids{{1, 15}, {1, 5}, {2, 50}}))
      << "above the high watermark nobody is short of room yet";
  rules.room_stage = RoomStage::kLeftBranches;
  for (size_t n = 1; n <= order.size(); ++n) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < n; ++i) {
      bytes += std::find_if(views.begin(), views.end(),
                            [&](const CheckpointView& v) { return v.id == order[i]; })
                   ->at(TierKind::kNvme)
                   .bytes;
    }
    EXPECT_EQ(Nvme(views, rules, bytes).goes.size(), n);
  }
  EXPECT_EQ(Nvme(views, rules, 100'000).goes, order)
      << "the newest complete step, and the two newest incomplete ones, never go";
}

TEST(Deletion, EndedJobsGiveWayWhereRemoteHasTheStepThenAfterALongTime) {
  const auto goes = [](const std::vector<CheckpointView>& views, DeletionRules rules) {
    rules.keep_ended_ms = 1000;
    return Nvme(views, rules, 100'000).goes;
  };
  const auto at = [](RoomStage stage, bool ended, int64_t since_ms) {
    return DeletionRules{.now_unix_ms = kSealed + since_ms, .room_stage = stage, .ended = ended};
  };
  const std::vector<CheckpointView> only{Whole({2, 40})};
  const std::vector<CheckpointView> both{View({2, 40}, {kNv | kRem, kNv | kRem})};
  for (const RoomStage stage : {RoomStage::kUsual, RoomStage::kIncomplete}) {
    EXPECT_EQ(goes(both, at(stage, true, 5000)), Ids{});
  }
  for (const RoomStage stage :
       {RoomStage::kEndedInRemote, RoomStage::kLeftBranches, RoomStage::kEndedJobs}) {
    EXPECT_EQ(goes(both, at(stage, true, 0)), (Ids{{2, 40}}));
    EXPECT_EQ(goes(both, at(stage, false, 0)), Ids{}) << "it runs";
    EXPECT_EQ(goes(only, at(stage, true, 999)), Ids{});
    EXPECT_EQ(goes(only, at(stage, true, 1000)),
              stage == RoomStage::kEndedJobs ? (Ids{{2, 40}}) : Ids{});
  }
  std::vector<CheckpointView> pinned = both;
  pinned.front().pinned = true;
  EXPECT_EQ(goes(pinned, at(RoomStage::kEndedJobs, true, 5000)), Ids{});
  std::vector<CheckpointView> half{View({2, 40}, {kNv | kRem, kNv})};
  EXPECT_EQ(goes(half, at(RoomStage::kEndedInRemote, true, 0)), Ids{}) << "not whole in remote";
  EXPECT_EQ(goes({Parts({2, 40})}, at(RoomStage::kEndedJobs, true, 5000)), (Ids{{2, 40}}));
  EXPECT_EQ(goes({Parts({2, 40})}, at(RoomStage::kLeftBranches, true, 5000)), Ids{});
}

TEST(Deletion, KeepEveryIsForEver) {
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

TEST(Deletion, WhatIsInUseStays) {
  const DeletionRules rules{.keep_last = 1};
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

// Other nodes' memory is no safe place: what is of no use there goes, as before.
TEST(Deletion, InPeersMemoryPartsThatAreOfNoUseGo) {
  const TierSet peer = SetOf(TierKind::kPeer);
  const std::vector<CheckpointView> views{View({1, 10}, {peer, 0}), View({1, 11}, {peer, kRem}),
                                          View({1, 12}, {peer | kRem, kRem}),
                                          View({2, 30}, {peer | kRem, peer | kRem})};
  Ids goes;
  std::map<CheckpointId, std::string> why;
  for (const auto& v : PlanDeletion(TierKind::kPeer, views, kLine, {.keep_last = 2}, 0)) {
    why[v.id] = v.why;
    if (v.goes) {
      goes.push_back(v.id);
    }
  }
  EXPECT_EQ(goes, (Ids{{1, 10}, {1, 12}}));
  EXPECT_EQ(why.at({1, 10}),
            "only 1 of 2 shards are good here; the step cannot be restored from anywhere");
  EXPECT_EQ(why.at({1, 11}), "with what lies in other tiers it makes the step whole");
  EXPECT_EQ(why.at({1, 12}), "only 1 of 2 shards are good here; remote has it whole");
}

TEST(Deletion, ShardsWithoutTheirManifestStay) {
  std::vector<CheckpointView> views{View({1, 10}, {0, 0}), View({1, 11}, {0, 0})};
  views[0].at(TierKind::kRemote).unlisted = 2;
  views[1].at(TierKind::kRemote).unlisted = 1;
  std::map<CheckpointId, std::string> why;
  for (const auto& verdict : PlanDeletion(TierKind::kRemote, views, kLine, {}, 0)) {
    EXPECT_FALSE(verdict.goes);
    why[verdict.id] = verdict.why;
  }
  EXPECT_EQ(why.at({1, 10}),
            "no manifest names its shards; it stays until the line has 1 later in remote, to be "
            "repaired or put back");
  EXPECT_EQ(why.at({1, 11}),
            "only 1 of 2 shards are good here; it stays until the line has 1 later in remote, to "
            "be repaired or put back");
}

TEST(Deletion, WaitsForTheTierThatWantsIt) {
  std::vector<CheckpointView> views{View({1, 10}, {kNv}), View({1, 11}, {kNv | kMem}),
                                    View({2, 30}, {kNv})};
  views[0].at(TierKind::kRemote).wanted = true;
  views[1].at(TierKind::kRemote).wanted = true;
  const Plan plan = Nvme(views, {.keep_last = 1});
  EXPECT_EQ(plan.goes, (Ids{{1, 11}}));
  EXPECT_EQ(plan.why.at({1, 10}), "is to be written to remote from here");
  EXPECT_EQ(Nvme(views, {.keep_last = 1}, 200).goes.size(), 2u) << "unless room is short";
}

TEST(Deletion, RoomIsMadeFromOtherBranchesFirstThenFromTheOldest) {
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

TEST(Deletion, TheOnlyCopyOfTheNewestStepStaysOnAnyBranch) {
  // A job begun anew: its line has nothing yet.
  const std::vector<Descent> anew{{3, {}}};
  const std::vector<CheckpointView> views{View({1, 10}, {kNv}), View({2, 30}, {kNv})};
  const DeletionRules short_of_room{.keep_last = 1, .room_stage = RoomStage::kLeftBranches};
  Plan plan = Nvme(views, short_of_room, 1000, anew);
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

class RandomDeletion : public testing::TestWithParam<int> {};

TEST_P(RandomDeletion, RemovalsInTheirOrderLowerNothing) {
  std::mt19937_64 random(GetParam());
  size_t removed = 0;
  for (int round = 0; round < 400; ++round) {
    Inventory inventory = RandomInventory(random);
    const auto tier = kAllTiers[random() % kTierKinds];
    DeletionRules rules;
    rules.keep_last = random() % 4;
    rules.keep_every_steps = random() % 3 == 0 ? 4 : 0;
    rules.bytes_max = random() % 3 == 0 ? random() % 2000 : 0;
    const uint64_t wanted = random() % 3 == 0 ? random() % 2000 : 0;
    const auto views = ViewsOf(inventory.checkpoints);
    const auto plan = PlanDeletion(tier, views, inventory.line, rules, wanted);
    const auto relied = Relied(inventory);

    std::set<CheckpointId> seen;
    bool stays_begun = false;
    for (const DeletionVerdict& verdict : plan) {
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
           PlanDeletion(tier, ViewsOf(inventory.checkpoints), inventory.line, rules, 0)) {
        EXPECT_FALSE(verdict.goes) << "a second run finds nothing to do: " << verdict.why;
      }
    }
  }
  EXPECT_GT(removed, 400u) << "the test has something to judge";
}

// The rule, from the copies themselves.
TEST_P(RandomDeletion, WithoutNeedOnlyWhatLaterStepsCoverGoes) {
  std::mt19937_64 random(GetParam() + 2000);
  size_t judged = 0;
  for (int round = 0; round < 400; ++round) {
    Inventory inventory = RandomInventory(random);
    for (ModelCheckpoint& model : inventory.checkpoints) {
      model.flags.unix_ms = kSealed + static_cast<int64_t>(random() % 1000);
      model.flags.left_unix_ms = OnLine(inventory.line, model.flags.id) ? 0 : kSealed + 500;
    }
    const auto tier = random() % 2 == 0 ? TierKind::kNvme : TierKind::kRemote;
    const DeletionRules rules{.keep_last = static_cast<uint32_t>(1 + random() % 3),
                              .unread = random() % 8 == 0,
                              .now_unix_ms = kSealed + 1000,
                              .grace_ms = static_cast<int64_t>(random() % 1500)};
    const auto complete = [&](const ModelCheckpoint& model) {
      return model.flags.consistent && std::all_of(model.good.begin(), model.good.end(),
                                                   [&](TierSet in) { return Has(in, tier); });
    };
    for (const auto& verdict :
         PlanDeletion(tier, ViewsOf(inventory.checkpoints), inventory.line, rules, 0)) {
      if (!verdict.goes) {
        continue;
      }
      ++judged;
      size_t later = 0;
      size_t later_parts = 0;
      for (const ModelCheckpoint& model : inventory.checkpoints) {
        const bool after = verdict.id < model.flags.id && OnLine(inventory.line, model.flags.id);
        later += after && complete(model);
        later_parts += after && !complete(model);
      }
      if (tier == TierKind::kRemote && later_parts >= 8 && !rules.unread) {
        continue;  // (RemoteKeepsEightStepsOfTheLineWhoseWritingDidNotEnd)
      }
      for (const ModelCheckpoint& model : inventory.checkpoints) {
        if (model.flags.id != verdict.id) {
          continue;
        }
        const bool left = !OnLine(inventory.line, verdict.id);
        EXPECT_FALSE(!complete(model) && rules.unread);
        EXPECT_FALSE(!complete(model) && rules.now_unix_ms - model.flags.unix_ms < rules.grace_ms);
        EXPECT_FALSE(complete(model) && left && 500 < rules.grace_ms);
      }
      EXPECT_GE(later, rules.keep_last) << verdict.why;
    }
  }
  EXPECT_GT(judged, 100u);
}

// Without need nothing goes that the rules keep; with need, no more than is needed.
TEST_P(RandomDeletion, KeepsWhatTheRulesKeep) {
  std::mt19937_64 random(GetParam() + 1000);
  for (int round = 0; round < 400; ++round) {
    const Inventory inventory = RandomInventory(random);
    const auto tier = kAllTiers[random() % kTierKinds];
    const DeletionRules rules{.keep_last = static_cast<uint32_t>(1 + random() % 3)};
    const auto views = ViewsOf(inventory.checkpoints);
    const auto calm = PlanDeletion(tier, views, inventory.line, rules, 0);
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
    for (const auto& verdict : PlanDeletion(tier, views, inventory.line, rules, freed + more)) {
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

INSTANTIATE_TEST_SUITE_P(Seeds, RandomDeletion, testing::Range(1, 11));

}  // namespace
}  // namespace holdfast
