// What counts as damage of a copy, and what only keeps a verification from looking at it.
#include "server/runtime/verify.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <utility>

#include "base/status.h"
#include "server/runtime/found_state.h"
#include "tests/tiers/memory/memory_harness.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr char kDir[] = "/shm/holdfast";

struct Verified {
  absl::Status result;
  std::vector<std::string> bad;  // what was said of each, in both ways
  v1::VerifyProgress progress;
};

class VerifyTest : public ::testing::Test {
 protected:
  void SetUp() override {
    store_ = SlotStore::Open(StoreOptions(env_, kDir)).value();
    ASSERT_TRUE(store_->Scan().ok());
    for (const SlotId slot : {1, 2}) {
      ASSERT_TRUE(SealSlot(*store_, slot, MakeSlotContent(slot, 1)).ok());
    }
  }

  Verified Verify() {
    std::vector<ReadableShard> shards;
    const MemoryScan scan = store_->Scan().value();
    for (const StoredSlot& stored : scan.slots) {
      EXPECT_TRUE(stored.record.has_value());
      shards.push_back({ToSealedCopy(*stored.record), stored.slot});
    }
    return Verify(std::move(shards));
  }

  Verified Verify(std::vector<ReadableShard> shards) {
    Verified verified;
    std::vector<std::string> reported;
    VerifyRun run(*store_, std::move(shards),
                  [&](const ReadableShard&, const std::string& what) { reported.push_back(what); });
    bool done = false;
    while (!done) {
      done = run.WaitFor(std::chrono::seconds(1), &verified.progress);
      for (const v1::BadShard& bad : verified.progress.bad()) {
        verified.bad.push_back(bad.what());
      }
    }
    verified.result = run.result();
    EXPECT_EQ(reported, verified.bad);
    return verified;
  }

  FaultEnv env_{FaultEnv::Durability::kNone};
  std::unique_ptr<SlotStore> store_;
};

TEST_F(VerifyTest, GoodCopiesAreGood) {
  const Verified verified = Verify();
  EXPECT_TRUE(verified.result.ok()) << verified.result;
  EXPECT_THAT(verified.bad, IsEmpty());
  EXPECT_EQ(verified.progress.shards_checked(), 2u);
}

TEST_F(VerifyTest, DamageIsReportedAndTheRestIsLookedAt) {
  ASSERT_TRUE(FlipBitOf(env_, std::string(kDir) + "/slot-000001", 9000).ok());
  const Verified verified = Verify();
  EXPECT_TRUE(verified.result.ok()) << verified.result;
  ASSERT_THAT(verified.bad, SizeIs(1));
  EXPECT_THAT(verified.bad[0], HasSubstr("digest"));
  EXPECT_EQ(verified.progress.shards_checked(), 2u);
}

// The shards are asked for before the files are meddled with: a scan removes what is torn.
TEST_F(VerifyTest, ARecordThatIsDamagedOrGoneIsDamage) {
  std::vector<ReadableShard> shards;
  const MemoryScan scan = store_->Scan().value();
  for (const StoredSlot& stored : scan.slots) {
    shards.push_back({ToSealedCopy(*stored.record), stored.slot});
  }
  ASSERT_TRUE(FlipBitOf(env_, std::string(kDir) + "/slot-000001.record", 60).ok());
  ASSERT_TRUE(env_.Unlink(std::string(kDir) + "/slot-000002.record").ok());
  const Verified verified = Verify(shards);
  EXPECT_TRUE(verified.result.ok()) << verified.result;
  EXPECT_THAT(verified.bad, SizeIs(2));
}

TEST_F(VerifyTest, WhatOnlyKeepsItFromReadingIsNoDamageAndEndsIt) {
  std::vector<ReadableShard> shards;
  const MemoryScan scan = store_->Scan().value();
  for (const StoredSlot& stored : scan.slots) {
    shards.push_back({ToSealedCopy(*stored.record), stored.slot});
  }
  // EINVAL of a system call is no record that cannot be decoded.
  for (const int error : {EMFILE, EACCES, EINVAL}) {
    int failed = 0;
    for (;; ++failed) {
      env_.FailCall(failed + 1, error);
      const Verified verified = Verify(shards);
      if (verified.result.ok()) {
        break;  // it was done before that call
      }
      EXPECT_EQ(verified.result.code(), ErrnoStatus(error, "", "").code()) << verified.result;
      EXPECT_THAT(Message(verified.result), HasSubstr("slot-00000"));
      EXPECT_THAT(verified.bad, IsEmpty());
      EXPECT_LT(verified.progress.shards_checked(), 2u);
    }
    EXPECT_GE(failed, 4);  // at least record and image of both
  }
}

}  // namespace
}  // namespace holdfast
