#include "recovery/protection.h"

#include <gtest/gtest.h>

#include "tests/recovery/random_inventory.h"

namespace holdfast {
namespace {

constexpr TierSet kMem = SetOf(TierKind::kMemory);
constexpr TierSet kNv = SetOf(TierKind::kNvme);
constexpr TierSet kRem = SetOf(TierKind::kRemote);

CheckpointView View(CheckpointId id, const std::vector<TierSet>& ranks) {
  CheckpointView view;
  view.id = id;
  view.world_size = static_cast<uint32_t>(ranks.size());
  for (TierSet in : ranks) {
    view.AddRank(in);
  }
  return view;
}

TEST(ProtectionTable, EachFailureLeavesItsTiers) {
  const std::vector<Descent> line{{2, {1, 10}}, {1, {}}};
  const std::vector<CheckpointView> all{
      View({1, 5}, {kRem | kNv, kRem}), View({2, 20}, {kNv | kMem, kNv | kMem}),
      View({2, 30}, {kMem, kMem}), View({2, 40}, {kMem, 0}), View({1, 99}, {kRem, kRem})};
  const auto table = ProtectionTable(all, line, kEveryTier);
  ASSERT_EQ(table.size(), kFailureKinds);
  const auto expect = [&](FailureKind kind, std::optional<CheckpointId> survives,
                          const std::string& from) {
    const ProtectionLine& entry = table[static_cast<size_t>(kind)];
    EXPECT_EQ(entry.kind, kind);
    EXPECT_EQ(entry.survives, survives);
    EXPECT_EQ(entry.from, from);
  };
  expect(FailureKind::kProcess, CheckpointId{2, 30}, "memory");
  expect(FailureKind::kReboot, CheckpointId{2, 20}, "nvme");
  expect(FailureKind::kNode, CheckpointId{1, 5}, "remote");
  expect(FailureKind::kDomain, CheckpointId{1, 5}, "remote");
  expect(FailureKind::kAllNodes, CheckpointId{1, 5}, "remote");
  EXPECT_FALSE(ProtectionTable(all, line, kMem | kNv)[4].survives) << "no such tier";
  EXPECT_FALSE(ProtectionTable(all, {}, kEveryTier)[0].survives) << "no line";
}

TEST(ProtectionTable, APeersMemoryOutlivesTheNode) {
  constexpr TierSet kPeer = SetOf(TierKind::kPeer);
  const std::vector<Descent> line{{1, {}}};
  const auto from = [&](CheckpointView view, FailureKind kind) {
    return ProtectionTable(std::vector{view}, line, kEveryTier)[static_cast<size_t>(kind)].from;
  };
  CheckpointView both = View({1, 1}, {kMem | kPeer, kMem | kPeer});
  EXPECT_EQ(from(both, FailureKind::kProcess), "memory");
  EXPECT_EQ(from(both, FailureKind::kReboot), "memory+peer");
  EXPECT_EQ(from(both, FailureKind::kNode), "memory+peer");
  EXPECT_EQ(from(both, FailureKind::kDomain), "") << "in the same one";
  EXPECT_EQ(from(both, FailureKind::kAllNodes), "");
  both.apart = true;
  EXPECT_EQ(from(both, FailureKind::kDomain), "memory+peer");
  EXPECT_EQ(from(View({1, 1}, {kMem | kPeer, kMem}), FailureKind::kNode), "")
      << "one rank has none";
  EXPECT_EQ(from(View({1, 1}, {kPeer, kPeer}), FailureKind::kNode), "")
      << "nothing else is left, should that node be the one";
  EXPECT_EQ(from(View({1, 1}, {kPeer | kNv, kPeer | kNv}), FailureKind::kNode), "nvme+peer");
  EXPECT_EQ(from(View({1, 1}, {kPeer | kMem, kRem}), FailureKind::kNode), "memory+peer+remote");
}

TEST(ProtectionTable, NothingWholeNothingSurvives) {
  const std::vector<Descent> line{{1, {}}};
  EXPECT_FALSE(ProtectionTable({}, line, kEveryTier)[0].survives);
  CheckpointView odd = View({1, 1}, {kMem});
  odd.consistent = false;
  const std::vector<CheckpointView> none{odd, View({1, 2}, {kMem, 0}), View({1, 3}, {})};
  for (const ProtectionLine& entry : ProtectionTable(none, line, kEveryTier)) {
    EXPECT_FALSE(entry.survives);
    EXPECT_EQ(entry.from, "");
  }
}

TEST(ProtectionTable, TiersThatHaveItOnlyTogether) {
  const std::vector<Descent> line{{1, {}}};
  const auto from = [&](const std::vector<TierSet>& ranks, FailureKind kind) {
    return ProtectionTable(std::vector{View({1, 1}, ranks)}, line,
                           kEveryTier)[static_cast<size_t>(kind)]
        .from;
  };
  EXPECT_EQ(from({kMem, kNv}, FailureKind::kProcess), "memory+nvme");
  EXPECT_EQ(from({kMem, kNv}, FailureKind::kReboot), "");
  EXPECT_EQ(from({kNv, kRem}, FailureKind::kReboot), "nvme+remote");
  EXPECT_EQ(from({kMem, kNv, kRem}, FailureKind::kProcess), "memory+nvme+remote");
  EXPECT_EQ(from({kMem | kRem, kNv | kRem}, FailureKind::kProcess), "remote")
      << "one tier that has all comes before two that have it together";
  EXPECT_EQ(from({kMem | kNv, kNv}, FailureKind::kProcess), "nvme");
}

TEST(ProtectionTable, AgreesWithTheCopiesThemselves) {
  for (uint64_t seed = 1; seed <= 2000; ++seed) {
    std::mt19937_64 random(seed);
    const Inventory inventory = RandomInventory(random);
    const TierSet configured = random() % kTierSets;
    for (const ProtectionLine& entry :
         ProtectionTable(ViewsOf(inventory.checkpoints), inventory.line, configured)) {
      EXPECT_EQ(entry.survives,
                NewestSurviving(inventory.checkpoints, &inventory.line, entry.kind, configured))
          << "seed " << seed;
      EXPECT_EQ(entry.from.empty(), !entry.survives);
    }
  }
}

TEST(CheckpointView, WithoutATierIsAsIfItHadNeverLainThere) {
  for (uint64_t seed = 1; seed <= 500; ++seed) {
    std::mt19937_64 random(seed);
    for (ModelCheckpoint& model : RandomInventory(random).checkpoints) {
      const TierKind tier = kAllTiers[random() % kTierKinds];
      const CheckpointView left = ViewOf(model).Without(tier);
      for (TierSet& in : model.good) {
        in &= ~SetOf(tier);
      }
      const CheckpointView expected = ViewOf(model);
      EXPECT_EQ(left.ranks_in, expected.ranks_in);
      EXPECT_EQ(left.restorable, expected.restorable);
      for (TierKind other : kAllTiers) {
        EXPECT_EQ(left.at(other).good, expected.at(other).good);
        EXPECT_EQ(left.at(other).good, left.RanksIn(SetOf(other)));
      }
      EXPECT_EQ(left.at(tier).bytes, 0u);
    }
  }
}

}  // namespace
}  // namespace holdfast
