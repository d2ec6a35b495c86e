#include "recovery/explain.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace holdfast {
namespace {

constexpr TierSet kMem = SetOf(TierKind::kMemory);
constexpr TierSet kNv = SetOf(TierKind::kNvme);
constexpr TierSet kRem = SetOf(TierKind::kRemote);
const std::vector<Descent> kLine{{3, {2, 30}}, {2, {1, 20}}, {1, {}}};

CheckpointView View(CheckpointId id, const std::vector<TierSet>& ranks) {
  CheckpointView view;
  view.id = id;
  view.world_size = static_cast<uint32_t>(ranks.size());
  view.complete = true;
  for (TierSet in : ranks) {
    view.AddRank(in);
  }
  return view;
}

using Lines = std::vector<std::string>;

TEST(Explain, AWholeStepNamesItsSources) {
  const CheckpointView view = View({3, 40}, {kMem | kNv, kNv});
  const StepReasons r = ExplainStep(view, {.line = kLine, .world_size = 2});
  EXPECT_TRUE(r.restorable);
  EXPECT_TRUE(r.on_line);
  EXPECT_EQ(r.reasons, (Lines{"whole: memory for 1 rank, nvme for 1 rank",
                              "memory: 1 of 2 shards good, 1 missing", "nvme: all of 2 shards",
                              "remote: nothing"}));
}

TEST(Explain, PeersAreNamedWhereTheyHaveSomething) {
  constexpr TierSet kPeer = SetOf(TierKind::kPeer);
  const CheckpointView view = View({3, 40}, {kMem | kPeer, kPeer});
  const StepReasons r = ExplainStep(view, {.line = kLine, .world_size = 2});
  EXPECT_EQ(r.reasons, (Lines{"whole: memory for 1 rank, peer for 1 rank",
                              "memory: 1 of 2 shards good, 1 missing", "nvme: nothing",
                              "peer: all of 2 shards", "remote: nothing"}));
}

TEST(Explain, WhatIsMissingBadOrUnlistedIsCounted) {
  CheckpointView view = View({3, 40}, {kNv, 0, 0});
  view.at(TierKind::kNvme).bad = 1;
  view.at(TierKind::kRemote).unlisted = 2;
  view.at(TierKind::kRemote).flushing = true;
  view.complete = false;
  view.pinned = true;
  const StepReasons r =
      ExplainStep(view, {.line = kLine, .world_size = 3, .configured = kNv | kRem});
  EXPECT_FALSE(r.restorable);
  EXPECT_EQ(
      r.reasons,
      (Lines{"cannot be restored: no tier has a good copy of 2 of 3 shards",
             "not every rank has sealed it", "nvme: 1 of 3 shards good, 1 bad, 1 missing",
             "remote: 0 of 3 shards good, 2 that no manifest names, 1 missing; is being written",
             "pinned: no retention removes it"}));
}

TEST(Explain, OtherBranchesAndWorldSizes) {
  StepReasons r = ExplainStep(View({2, 35}, {kMem}), {.line = kLine, .world_size = 2});
  EXPECT_TRUE(r.restorable);
  EXPECT_FALSE(r.on_line);
  EXPECT_EQ(r.reasons[1],
            "not on the line of descent: attempt 3 went back to step 30 of attempt 2; "
            "ckptctl restore --step 35 --attempt 2 takes it all the same");
  EXPECT_EQ(r.reasons[2],
            "it was saved by 1 rank and the job has 2 now, so each reads what it wants of all that "
            "was saved");
  const std::vector<Descent> anew{{4, {}}};
  r = ExplainStep(View({2, 35}, {kMem}), {.line = anew});
  EXPECT_EQ(r.reasons[1].substr(0, 66),
            "not on the line of descent: attempt 4 does not descend from attemp");
  r = ExplainStep(View({2, 35}, {kMem}), {});
  EXPECT_EQ(r.reasons[1], "no attempt has decided yet what it descends from");
  CheckpointView odd = View({3, 41}, {kMem});
  odd.consistent = false;
  EXPECT_EQ(ExplainStep(odd, {.line = kLine}).reasons[0],
            "cannot be restored: its shards disagree about the number of ranks");
}

TEST(Explain, TheChoiceIsTheNewestThatCanBeUsed) {
  std::vector<CheckpointView> all{View({2, 25}, {kNv, kRem}), View({3, 31}, {kMem, kMem}),
                                  View({2, 99}, {kMem, kMem})};
  RestoreContext context{.line = kLine, .world_size = 2};
  EXPECT_EQ(ExplainChoice(all, context), "step 31 of attempt 3: memory for 2 ranks");
  all[1] = View({3, 31}, {kMem, 0});
  EXPECT_EQ(ExplainChoice(all, context),
            "step 25 of attempt 2: nvme for 1 rank, remote for 1 rank; not the newer step 31 of "
            "attempt 3: cannot be restored: no tier has a good copy of 1 of 2 shards");
  context.world_size = 4;
  EXPECT_EQ(ExplainChoice(std::span(all).first(1), context),
            "step 25 of attempt 2: nvme for 1 rank, remote for 1 rank; it was saved by 2 ranks and "
            "the job has 4 now, so each reads what it wants of all that was saved");
  EXPECT_EQ(ExplainChoice({}, context), "none: no step on the line of descent is known");
}

TEST(Explain, ARestorePointDecides) {
  const std::vector<CheckpointView> all{View({2, 25}, {kNv, kRem}), View({3, 31}, {kMem, kMem})};
  RestoreContext context{.line = kLine, .world_size = 2, .restore_point = CheckpointId{2, 25}};
  EXPECT_EQ(ExplainChoice(all, context),
            "step 25 of attempt 2, as ckptctl restore asked: nvme for 1 rank, remote for 1 rank");
  context.restore_point = CheckpointId{2, 26};
  EXPECT_EQ(ExplainChoice(all, context),
            "none: ckptctl restore asked for step 26 of attempt 2, but nothing of it is left");
  context.from_scratch = true;
  EXPECT_EQ(ExplainChoice(all, context),
            "none: ckptctl restore --from-scratch asked to begin anew");
}

}  // namespace
}  // namespace holdfast
