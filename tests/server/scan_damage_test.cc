// Copies that a look at the tiers finds to be cut, damaged or gone: told, mended, and, where there
// is no good one, left.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/coordinator.h"
#include "server/drive_copies.h"
#include "tests/server/tier_world.h"

namespace holdfast::testing {
namespace {

using ::testing::HasSubstr;

class ScanDamageTest : public ::testing::Test {
 protected:
  FakeTier& In(TierKind tier) { return tier == TierKind::kNvme ? w_.h.nvme : w_.h.remote; }
  void Cut(TierKind tier, Step step, Rank rank, bool only_named = false) {
    In(tier).cut[w_.Shard(step, rank)] = only_named;
  }
  std::string StateOf(TierKind tier, Step step, Rank rank) {
    v1::WhereRequest request;
    request.set_job("job");
    request.set_attempt(1);
    request.set_step(step);
    const auto reply = w_.h.Admin<v1::WhereReply>(request);
    for (const v1::ShardCopy& copy : reply.ok() ? reply->copies() : v1::WhereReply().copies()) {
      if (copy.tier() == TierName(tier) && copy.rank() == rank) {
        return copy.state();
      }
    }
    return "none";
  }
  void Pin(Step step) {
    v1::PinRequest pin;
    pin.set_job("job");
    pin.set_step(step);
    ASSERT_TRUE(w_.h.Admin<v1::PinReply>(pin).ok());
  }
  void Rebuild() {
    w_.h.Advance(std::chrono::seconds(1));
    ASSERT_TRUE(w_.h.Admin<v1::RebuildReply>(v1::RebuildRequest(), 0).ok());
  }
  void ExpectReports(size_t bad, size_t mended, size_t unmended) {
    EXPECT_EQ(w_.h.CountReports(Report::Kind::kCopyBad), bad);
    EXPECT_EQ(w_.h.CountReports(Report::Kind::kCopyMended), mended);
    EXPECT_EQ(w_.h.CountReports(Report::Kind::kCopyUnmended), unmended);
  }

  TierWorld w_{2};
};

struct Case {
  TierKind tier;
  bool only_named;
};

class EveryScanDamageTest : public ScanDamageTest, public ::testing::WithParamInterface<Case> {};
INSTANTIATE_TEST_SUITE_P(All, EveryScanDamageTest,
                         ::testing::Values(Case{TierKind::kNvme, false},
                                           Case{TierKind::kNvme, true},
                                           Case{TierKind::kRemote, false}));

TEST_P(EveryScanDamageTest, IsMendedFromMemoryAfterARestart) {
  ASSERT_TRUE(w_.Save(1));
  ASSERT_TRUE(w_.Save(2));
  for (const Step step : {Step{1}, Step{2}}) {
    Cut(GetParam().tier, step, 1, GetParam().only_named);
  }
  w_.RestartDaemon();
  EXPECT_EQ(StateOf(GetParam().tier, 1, 1), "good");
  EXPECT_EQ(StateOf(GetParam().tier, 2, 1), "good");
  EXPECT_TRUE(In(GetParam().tier).cut.empty());
  EXPECT_TRUE(w_.Reported("it was bad: the image was cut"));
  ExpectReports(2, 2, 0);
}

TEST_P(EveryScanDamageTest, IsMendedFromTheOtherTierAfterAReboot) {
  ASSERT_TRUE(w_.Save(1));
  Cut(GetParam().tier, 1, 1, GetParam().only_named);
  w_.Reboot();
  EXPECT_EQ(StateOf(GetParam().tier, 1, 1), "good");
  EXPECT_TRUE(In(GetParam().tier).cut.empty());
  ExpectReports(1, 1, 0);
  EXPECT_EQ(w_.Restore().step, 1u);
}

// Before, it was forgotten, and its repair with it.
TEST_P(EveryScanDamageTest, IsMendedWhenARebuildFindsIt) {
  ASSERT_TRUE(w_.Save(1));
  Cut(GetParam().tier, 1, 1, GetParam().only_named);
  Rebuild();
  EXPECT_EQ(StateOf(GetParam().tier, 1, 1), "good");
  EXPECT_TRUE(In(GetParam().tier).cut.empty());
  ExpectReports(1, 1, 0);
}

TEST_P(EveryScanDamageTest, WhatIsBadStaysBadInARebuild) {
  ASSERT_TRUE(w_.Save(1));
  Pin(1);
  w_.FailFlushes(GetParam().tier, absl::InternalError("not now"));
  Cut(GetParam().tier, 1, 1, GetParam().only_named);
  Rebuild();
  EXPECT_THAT(StateOf(GetParam().tier, 1, 1), HasSubstr("bad: the image was cut"));
  Rebuild();
  EXPECT_THAT(StateOf(GetParam().tier, 1, 1), HasSubstr("bad: the image was cut"));
  EXPECT_EQ(w_.h.CountReports(Report::Kind::kCopyBad), 1u);
  w_.FailFlushes(GetParam().tier, absl::OkStatus());
  w_.h.Advance(std::chrono::minutes(10));
  EXPECT_EQ(StateOf(GetParam().tier, 1, 1), "good");
}

TEST_F(ScanDamageTest, WithoutAGoodCopyItIsToldAndLeft) {
  ASSERT_TRUE(w_.Save(1));
  ASSERT_TRUE(w_.Save(2));
  Pin(2);
  Cut(TierKind::kNvme, 2, 1);
  Cut(TierKind::kRemote, 2, 1);
  w_.Reboot();
  EXPECT_THAT(StateOf(TierKind::kNvme, 2, 1), HasSubstr("bad"));
  EXPECT_THAT(StateOf(TierKind::kRemote, 2, 1), HasSubstr("bad"));
  ExpectReports(2, 0, 2);
  EXPECT_EQ(In(TierKind::kNvme).cut.size(), 1u);
  EXPECT_EQ(In(TierKind::kRemote).cut.size(), 1u);
  EXPECT_EQ(w_.Restore().step, 1u) << "the next older one";
  EXPECT_TRUE(w_.h.remote.copies.count(w_.Shard(2, 0)) > 0) << "it is pinned";
}

// Of a shard that nothing else tells of it is not known how large it is.
TEST_F(ScanDamageTest, WhatNothingElseTellsOfIsToldOnce) {
  ASSERT_TRUE(w_.Save(1));
  ASSERT_TRUE(w_.Save(2));
  w_.h.remote.Wipe();
  Cut(TierKind::kNvme, 2, 1, true);
  w_.Reboot();
  ExpectReports(0, 0, 1);
  EXPECT_TRUE(w_.Reported("nothing else tells of that shard"));
  EXPECT_EQ(w_.Restore().step, 1u);
}

// What was published while the tier was looked at is not bad because it was not there before.
TEST_F(ScanDamageTest, WhatWasWrittenSinceIsNotBad) {
  ASSERT_TRUE(w_.Save(1));
  const ShardId shard = w_.Shard(1, 1);
  TierScanned old;
  old.dir = w_.h.config.nvme().dirs(0);
  FoundJob found{
      w_.Uuid(), "job", w_.h.nvme.jobs.at(w_.Uuid()).uid, w_.h.nvme.jobs.at(w_.Uuid()).gid, {}, {}};
  found.bad.push_back({w_.h.nvme.copies.at(shard), "the image was cut"});
  old.jobs = {found};
  w_.h.Feed(old);  // (the runtime's first, which began at the start)
  EXPECT_EQ(StateOf(TierKind::kNvme, 1, 1), "good");
  ExpectReports(0, 0, 0);
}

// As its host hears it when it meets the node: never as good first.
TEST(ScanDamageOfANodeTest, ADriveTellsWhatIsBadThere) {
  DriveCopies copies;
  DurableCopy copy;
  copy.copy.id = {JobUuid{}, 1, 7, 0};
  copy.copy.id.job.bytes[0] = 1;
  copy.copy.world_size = 2;
  copy.copy.image_bytes = 4096;
  copy.location = "/a/7";
  ASSERT_TRUE(copies.Seen(copy, {1}));
  EXPECT_TRUE(copies.SeenBad({FakeTier::Named(copy), "cut"}, {2}));
  EXPECT_EQ(copies.Find(copy.copy.id)->unread, "cut");
  EXPECT_TRUE(copies.Find(copy.copy.id)->bad);
  EXPECT_EQ(copies.Find(copy.copy.id)->copy.copy.world_size, 2u) << "that is known still";
  copies.Written(copy, {5});
  EXPECT_FALSE(copies.Find(copy.copy.id)->bad);
  EXPECT_FALSE(copies.SeenBad({copy, "cut"}, {4})) << "that was before";
  DurableCopy other = copy;
  other.location = "/b/7";
  EXPECT_FALSE(copies.SeenBad({other, "cut"}, {6})) << "another drive has a good one";
  EXPECT_TRUE(copies.SeenBad({copy, "cut"}, {6}));
  EXPECT_EQ(copies.Bytes(), 4096u);
  copies.SetBad(copy.copy.id, false);  // somebody has read it
  EXPECT_EQ(copies.Find(copy.copy.id)->unread, "");
}

}  // namespace
}  // namespace holdfast::testing
