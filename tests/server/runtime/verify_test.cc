// What counts as damage of a copy, and what only keeps a verification from looking at it.
#include "server/runtime/verify.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <functional>
#include <set>
#include <string>
#include <utility>

#include "base/status.h"
#include "server/runtime/admin_service.h"
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
    size_t good = 0;
    VerifyRun run(
        *store_, std::move(shards),
        {.hold = [&](const ReadableShard& shard) -> absl::StatusOr<std::unique_ptr<ReadLease>> {
           EXPECT_EQ(held_, 0) << "one at a time";
           paid_when_held_.push_back(paid_);
           if (gone_.contains(shard.slot)) {
             return absl::NotFoundError("gone");
           }
           ++held_;
           return std::make_unique<ReadLease>([this] { --held_; });
         },
         .bad = [&](const ReadableShard&, const std::string& what) { reported.push_back(what); },
         .good = [&](const ReadableShard&) { ++good; },
         .durable =
             [this](const ReadableShard& shard, const std::function<bool(uint64_t)>& advance,
                    const std::shared_ptr<Pacer>&) {
               advance(shard.copy.image_bytes / 2);
               return durable_(shard);
             },
         .listed = [this](const ReadableShard& shard) { return listed_(shard); }},
        pacer_);
    bool done = false;
    while (!done) {
      done = run.WaitFor(std::chrono::seconds(1), &verified.progress);
      for (const v1::BadShard& bad : verified.progress.bad()) {
        verified.bad.push_back(bad.what());
      }
    }
    verified.result = run.result();
    EXPECT_EQ(reported, verified.bad);
    EXPECT_EQ(good + reported.size(), verified.progress.shards_checked());
    EXPECT_EQ(held_, 0);
    return verified;
  }

  // Counts what is asked of a pacer.
  class Counts : public PacerGate {
   public:
    explicit Counts(int& paid) : paid_(paid) {}
    bool Holds() override {
      ++paid_;
      return false;
    }
    void BeginWait() override {}
    void EndWait() override {}

   private:
    int& paid_;
  };

  std::shared_ptr<Pacer> pacer_;
  int paid_ = 0;  // pieces
  std::vector<int> paid_when_held_;
  int held_ = 0;
  std::set<SlotId> gone_;  // before their turn
  std::function<absl::StatusOr<std::string>(const ReadableShard&)> durable_;
  std::function<absl::StatusOr<bool>(const ReadableShard&)> listed_;
  FaultEnv env_{FaultEnv::Durability::kNone};
  std::unique_ptr<SlotStore> store_;
};

TEST_F(VerifyTest, GoodCopiesAreGood) {
  const Verified verified = Verify();
  EXPECT_TRUE(verified.result.ok()) << verified.result;
  EXPECT_THAT(verified.bad, IsEmpty());
  EXPECT_EQ(verified.progress.shards_checked(), 2u);
}

TEST_F(VerifyTest, WhatIsGoneWhenItsTurnComesIsSkippedAndSaidSo) {
  gone_ = {1};
  const Verified verified = Verify();
  EXPECT_TRUE(verified.result.ok()) << verified.result;
  EXPECT_EQ(verified.progress.shards_checked(), 1u);
  EXPECT_EQ(verified.progress.shards_skipped(), 1u);
  EXPECT_EQ(verified.progress.bytes_done(), verified.progress.bytes_total());
}

// So that whoever comes next owes no more than one of them; and before it is held: a save may need
// the slot.
TEST_F(VerifyTest, MemoryIsPaidForInPiecesBeforeItIsHeld) {
  pacer_ = std::make_shared<Pacer>(0, std::make_shared<Counts>(paid_));
  ReadableShard large;
  large.slot = 1;
  large.copy.image_bytes = (40 << 20) + 1;
  ReadableShard small = large;
  small.copy.image_bytes = 1;
  gone_ = {1};
  const Verified verified = Verify({large, small});
  EXPECT_TRUE(verified.result.ok()) << verified.result;
  EXPECT_THAT(paid_when_held_, ::testing::ElementsAre(11, 12));
  EXPECT_EQ(paid_, 12);
}

ReadableShard InRemote(Rank rank) {
  ReadableShard shard;
  shard.copy.id.rank = rank;
  shard.copy.image_bytes = 1000;
  shard.tier = TierKind::kRemote;
  shard.location = "/remote/" + std::to_string(rank);
  return shard;
}

// The files of ranks 1 and 2 are not there. The core has given up the copy of rank 1 itself.
TEST_F(VerifyTest, OfWhatIsGoneTheCoreSaysWhetherItShouldBeThere) {
  durable_ = [](const ReadableShard& shard) -> absl::StatusOr<std::string> {
    return shard.copy.id.rank == 0 ? absl::StatusOr<std::string>("") : absl::NotFoundError("gone");
  };
  listed_ = [](const ReadableShard& shard) { return shard.copy.id.rank == 2; };
  const Verified verified = Verify({InRemote(0), InRemote(1), InRemote(2)});
  EXPECT_TRUE(verified.result.ok()) << verified.result;
  EXPECT_THAT(verified.bad, ::testing::ElementsAre("the copy is gone: somebody else removed it"));
  EXPECT_EQ(verified.progress.shards_checked(), 2u);
  EXPECT_EQ(verified.progress.shards_skipped(), 1u);
  EXPECT_EQ(verified.progress.bytes_done(), 1000u) << "of what was read";
  EXPECT_EQ(verified.progress.bytes_total(), 1000u);
}

// Retention gives a copy up, and a newer one overwrites its file, while it is being read.
TEST_F(VerifyTest, WhatWasGivenUpWhileItWasReadIsNotBad) {
  durable_ = [](const ReadableShard&) { return "block 3 differs"; };
  listed_ = [](const ReadableShard& shard) { return shard.copy.id.rank == 1; };
  const Verified verified = Verify({InRemote(0), InRemote(1)});
  EXPECT_TRUE(verified.result.ok()) << verified.result;
  EXPECT_THAT(verified.bad, ::testing::ElementsAre("block 3 differs"));
  EXPECT_EQ(verified.progress.shards_checked(), 1u);
  EXPECT_EQ(verified.progress.shards_skipped(), 1u);
  EXPECT_EQ(verified.progress.bytes_done(), verified.progress.bytes_total());
}

// Damage behind a copy that cannot be read is found all the same.
TEST_F(VerifyTest, WhatCannotBeReadHidesNothingElse) {
  durable_ = [](const ReadableShard& shard) -> absl::StatusOr<std::string> {
    if (shard.copy.id.rank == 0) {
      return ErrnoStatus(EACCES, "open", "/remote/0.record");
    }
    return shard.copy.id.rank == 1 ? "block 3 differs" : "";
  };
  listed_ = [](const ReadableShard&) { return true; };
  const Verified verified = Verify({InRemote(0), InRemote(1), InRemote(2)});
  EXPECT_EQ(verified.result.code(), absl::StatusCode::kPermissionDenied) << verified.result;
  EXPECT_THAT(Message(verified.result), HasSubstr("/remote/0.record"));
  EXPECT_THAT(verified.bad, ::testing::ElementsAre("block 3 differs"));
  EXPECT_EQ(verified.progress.shards_checked(), 2u);
  // Of a tier that is away, or of which nothing can be read, not each copy is asked for.
  int asked = 0;
  durable_ = [&](const ReadableShard&) {
    ++asked;
    return absl::UnavailableError("it is away");
  };
  std::vector<ReadableShard> many;
  for (Rank rank = 0; rank < 100; ++rank) {
    many.push_back(InRemote(rank));
  }
  EXPECT_TRUE(absl::IsUnavailable(Verify(many).result));
  EXPECT_EQ(asked, 1);
  durable_ = [&](const ReadableShard&) {
    ++asked;
    return ErrnoStatus(EIO, "read", "/remote/0.record");
  };
  EXPECT_TRUE(absl::IsDataLoss(Verify(many).result));
  EXPECT_LT(asked, 50);
}

TEST_F(VerifyTest, WhereTheCoreDoesNotSayNothingIsJudged) {
  durable_ = [](const ReadableShard&) { return absl::NotFoundError("gone"); };
  listed_ = [](const ReadableShard&) { return absl::UnavailableError("the daemon is stopping"); };
  const Verified verified = Verify({InRemote(0)});
  EXPECT_TRUE(absl::IsUnavailable(verified.result)) << verified.result;
  EXPECT_THAT(std::string(verified.result.message()), HasSubstr("the daemon is stopping"));
  EXPECT_THAT(verified.bad, IsEmpty());
}

TEST(VerifySeats, AUserHasOneAndTheNodeAFew) {
  VerifySeats seats;
  EXPECT_TRUE(seats.Take(1000).ok());
  EXPECT_EQ(seats.Take(1000).code(), absl::StatusCode::kResourceExhausted);
  for (uint32_t uid = 1; uid < VerifySeats::kMax; ++uid) {
    EXPECT_TRUE(seats.Take(uid).ok());
  }
  EXPECT_EQ(seats.Take(77).code(), absl::StatusCode::kResourceExhausted);
  seats.Leave(1000);
  EXPECT_TRUE(seats.Take(77).ok());
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
