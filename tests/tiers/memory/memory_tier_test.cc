// What the memory tier promises beyond what all tiers do: slots shared with another owner, room
// made by free ones, and slots that somebody may still touch.
#include "tiers/memory/memory_tier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <span>

#include "base/process.h"
#include "base/status.h"
#include "tests/tiers/memory/memory_harness.h"
#include "tiers/memory/slot_files.h"

namespace holdfast {
namespace {

using testing::HasSubstr;

constexpr char kDir[] = "/shm/holdfast";
constexpr uint64_t kBudget = 4 * kSlot;

class MemoryTierTest : public testing::Test {
 protected:
  void SetUp() override { Start(0, 1000); }
  void Start(SlotId begin, SlotId end) {
    tier_.reset();
    store_.reset();
    store_ = SlotStore::Open(StoreOptions(env_, kDir, kBudget)).value();
    tier_ =
        MemoryTier::Start({.store = store_.get(), .slots_begin = begin, .slots_end = end}).value();
  }
  // A copy whose slot has `slots` times 2 MiB.
  absl::Status Publish(Step step, uint64_t slots = 1) {
    const SlotContent content = Content(step, slots);
    HF_ASSIGN_OR_RETURN(
        const std::unique_ptr<CopyWriter> writer,
        tier_->Create({.id = content.expected.id, .image_bytes = content.sample.image.size()}));
    HF_RETURN_IF_ERROR(
        writer->WriteAt(0, std::as_bytes(std::span<const char>(content.sample.image))));
    return writer->Publish(content.sample.record_file);
  }
  static SlotContent Content(Step step, uint64_t slots = 1) {
    return MakeSlotContent(step, 1, (slots - 1) * kSlot / 4 + 1000);
  }
  static ShardId Id(Step step) { return Content(step).expected.id; }
  StoredSlot SlotOf(Step step) { return store_->Find(Id(step)).value(); }

  FaultEnv env_{FaultEnv::Durability::kNone};
  std::unique_ptr<SlotStore> store_;
  std::unique_ptr<MemoryTier> tier_;
};

TEST_F(MemoryTierTest, RemoveWaitsForNobody) {
  ASSERT_TRUE(Publish(1).ok());
  std::unique_ptr<CopyReader> one = tier_->Open(Id(1)).value();
  std::unique_ptr<CopyReader> two = tier_->Open(Id(1)).value();
  const absl::Status status = tier_->Remove(Id(1));
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(Message(status), HasSubstr("2 readers"));
  one.reset();
  EXPECT_TRUE(absl::IsFailedPrecondition(tier_->Remove(Id(1))));
  EXPECT_TRUE(two->Confirm().ok());
  two.reset();
  EXPECT_TRUE(tier_->Remove(Id(1)).ok());
}

TEST_F(MemoryTierTest, AFailedOpenHoldsNothing) {
  ASSERT_TRUE(Publish(1).ok());
  env_.FailMatching("open", EMFILE);
  EXPECT_TRUE(absl::IsResourceExhausted(tier_->Open(Id(1)).status()));
  env_.FailMatching("open", 0);
  EXPECT_TRUE(tier_->Remove(Id(1)).ok());
}

TEST_F(MemoryTierTest, StandsBesideAnotherOwnersSlots) {
  Start(100, 102);
  ASSERT_TRUE(SealSlot(*store_, 5, MakeSlotContent(1, 7)).ok());
  // Read at once, though the tier did not publish it; but not the tier's to remove or refill.
  std::unique_ptr<CopyReader> reader = tier_->Open(Id(1)).value();
  EXPECT_TRUE(reader->Confirm().ok());
  EXPECT_THAT(Message(tier_->Remove(Id(1))), HasSubstr("not this tier's"));
  EXPECT_TRUE(absl::IsAlreadyExists(Publish(1)));
  ASSERT_TRUE(Publish(2).ok());
  EXPECT_EQ(SlotOf(2).slot, 100u);
  // Its owner may remove it under a reader: then the reader is told.
  ASSERT_TRUE(store_->RemoveRecord(5).ok());
  EXPECT_TRUE(absl::IsNotFound(reader->Confirm()));
  reader.reset();
  ASSERT_TRUE(Publish(3).ok());
  EXPECT_EQ(SlotOf(3).slot, 101u) << "a free slot of somebody else's is not taken";
  EXPECT_EQ(tier_->bytes_free_slots(), 0u);
  EXPECT_TRUE(absl::IsResourceExhausted(Publish(4))) << "no more ids";
  Start(100, 102);
  EXPECT_EQ(tier_->bytes_free_slots(), 0u);
  EXPECT_TRUE(tier_->DeleteFreeSlots().ok());
  EXPECT_EQ(store_->bytes_used(), 3 * kSlot);
}

TEST_F(MemoryTierTest, FreeSlotsOfOtherSizesMakeRoom) {
  for (Step step = 1; step <= 4; ++step) {
    ASSERT_TRUE(Publish(step).ok());
  }
  EXPECT_TRUE(absl::IsResourceExhausted(Publish(5)));
  for (Step step = 1; step <= 4; ++step) {
    ASSERT_TRUE(tier_->Remove(Id(step)).ok());
  }
  EXPECT_EQ(tier_->bytes_free_slots(), kBudget);
  ASSERT_TRUE(Publish(6, 3).ok());
  EXPECT_EQ(SlotOf(6).bytes, 3 * kSlot);
  EXPECT_EQ(tier_->bytes_free_slots(), kSlot) << "no more than needed went";
  EXPECT_TRUE(Publish(7).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(Publish(8)));
  ASSERT_TRUE(tier_->Remove(Id(6)).ok());
  ASSERT_TRUE(tier_->Remove(Id(7)).ok());
  EXPECT_TRUE(Publish(9, 4).ok()) << "the whole budget can be had again";
}

TEST_F(MemoryTierTest, AFreeSlotThatWasCutOrDeletedIsReplaced) {
  for (const bool cut : {true, false}) {
    ASSERT_TRUE(Publish(1).ok());
    const std::string path = JoinPath(kDir, ImageName(SlotOf(1).slot));
    ASSERT_TRUE(tier_->Remove(Id(1)).ok());
    if (cut) {
      ASSERT_TRUE(env_.Open(path, OpenMode::kReadWrite).value()->Truncate(1).ok());
    } else {
      ASSERT_TRUE(env_.Unlink(path).ok());
    }
    ASSERT_TRUE(Publish(2).ok());
    EXPECT_TRUE(tier_->Open(Id(2)).value()->Confirm().ok());
    EXPECT_EQ(store_->bytes_used(), kSlot);
    ASSERT_TRUE(tier_->Remove(Id(2)).ok());
  }
}

TEST_F(MemoryTierTest, ADeletedImageIsNotConfirmed) {
  ASSERT_TRUE(Publish(1).ok());
  const std::unique_ptr<CopyReader> reader = tier_->Open(Id(1)).value();
  ASSERT_TRUE(env_.Unlink(JoinPath(kDir, ImageName(SlotOf(1).slot))).ok());
  EXPECT_TRUE(absl::IsDataLoss(reader->Confirm()));
}

// A process of an earlier daemon's life may still have the slot mapped.
TEST_F(MemoryTierTest, SlotsThatALivingProcessHoldsAreNotRefilled) {
  const pid_t child = ::fork();
  if (child == 0) {
    for (;;) {
      ::pause();
    }
  }
  const ProcessId process = IdentifyProcess(child).value();
  SlotNote note = NoteOf(3, kSlot);
  note.writer = process;
  ASSERT_TRUE(store_->Create(1, kSlot).ok());
  ASSERT_TRUE(store_->WriteNote(1, note).ok());
  Start(0, 1000);
  EXPECT_EQ(tier_->bytes_free_slots(), 0u);
  ASSERT_TRUE(Publish(1).ok());
  EXPECT_NE(SlotOf(1).slot, 1u);
  EXPECT_GT(SlotOf(1).record->generation, 3u);

  ASSERT_EQ(::kill(child, SIGKILL), 0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  ASSERT_TRUE(tier_->Scan().ok());
  EXPECT_EQ(tier_->bytes_free_slots(), kSlot);
  ASSERT_TRUE(Publish(2).ok());
  EXPECT_EQ(SlotOf(2).slot, 1u);
}

// A pid that came round is another process.
TEST_F(MemoryTierTest, AReusedPidHoldsNothing) {
  SlotNote note = NoteOf(1, kSlot);
  note.writer = ThisProcess();
  note.writer->start_ticks -= 1;
  ASSERT_TRUE(store_->Create(1, kSlot).ok());
  ASSERT_TRUE(store_->WriteNote(1, note).ok());
  Start(0, 1000);
  EXPECT_EQ(tier_->bytes_free_slots(), kSlot);
}

TEST_F(MemoryTierTest, AScanWhileACopyIsWrittenKeepsItsSlot) {
  const SlotContent content = Content(1);
  const std::unique_ptr<CopyWriter> writer =
      tier_->Create({.id = content.expected.id, .image_bytes = content.sample.image.size()})
          .value();
  ASSERT_TRUE(writer->WriteAt(0, std::as_bytes(std::span<const char>(content.sample.image))).ok());
  ASSERT_TRUE(tier_->Scan().ok());
  EXPECT_EQ(tier_->bytes_free_slots(), 0u);
  ASSERT_TRUE(Publish(2).ok());
  ASSERT_TRUE(writer->Publish(content.sample.record_file).ok());
  EXPECT_NE(SlotOf(1).slot, SlotOf(2).slot);
}

}  // namespace
}  // namespace holdfast
