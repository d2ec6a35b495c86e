// What a scan makes of whatever lies in the directory: the rules of docs/formats.md, "Memory tier
// directory".
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "base/status.h"
#include "holdfast/v1/state.pb.h"
#include "tests/tiers/memory/memory_harness.h"
#include "tiers/image/frame.h"
#include "tiers/memory/slot_files.h"
#include "tiers/memory/slot_note.h"

namespace holdfast {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr char kDir[] = "/shm/holdfast";

// Slot 1 always holds a good copy: whatever lies beside it must not cost it.
class SlotScanTest : public testing::Test {
 protected:
  void SetUp() override {
    Open();
    ASSERT_TRUE(SealSlot(*store_, 1, good_).ok());
  }
  void TearDown() override {
    const absl::StatusOr<StoredSlot> good = store_->Find(good_.expected.id);
    ASSERT_TRUE(good.ok());
    std::string image(good_.sample.image.size(), '\0');
    ASSERT_TRUE(store_->ReadAt(1, 0, std::as_writable_bytes(std::span<char>(image))).ok());
    EXPECT_EQ(image, good_.sample.image);
    EXPECT_EQ(store_->ReadRecord(1).value(), good_.sample.record_file);
  }

  void Open() {
    store_.reset();
    absl::StatusOr<std::unique_ptr<SlotStore>> store = SlotStore::Open(StoreOptions(env_, kDir));
    ASSERT_TRUE(store.ok()) << ToString(store.status());
    store_ = *std::move(store);
    ASSERT_TRUE(store_->Scan().ok());
  }
  // The daemon is killed, and started again.
  MemoryScan Restart() {
    store_.reset();
    env_.KillProcess();
    store_ = SlotStore::Open(StoreOptions(env_, kDir)).value();
    absl::StatusOr<MemoryScan> scan = store_->Scan();
    EXPECT_TRUE(scan.ok()) << ToString(scan.status());
    return *std::move(scan);
  }
  std::string Path(const std::string& name) { return JoinPath(kDir, name); }
  bool Exists(const std::string& name) { return env_.Info(Path(name)).ok(); }
  std::vector<std::string> Names() { return env_.List(kDir).value(); }
  absl::Status Cut(SlotId slot, uint64_t bytes) {
    HF_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                        env_.Open(Path(ImageName(slot)), OpenMode::kReadWrite));
    return file->Truncate(bytes);
  }
  static const StoredSlot* SlotOf(const MemoryScan& scan, SlotId slot) {
    for (const StoredSlot& stored : scan.slots) {
      if (stored.slot == slot) {
        return &stored;
      }
    }
    return nullptr;
  }
  // Slot 2 was removed whole, and that was told.
  void ExpectDiscarded(const MemoryScan& scan, const std::string& why) {
    EXPECT_EQ(SlotOf(scan, 2), nullptr);
    EXPECT_THAT(Names(), ElementsAre("lock", "reserve", "slot-000001", "slot-000001.note",
                                     "slot-000001.record"));
    EXPECT_EQ(store_->bytes_used(), kSlot);
    if (!why.empty()) {
      EXPECT_THAT(scan.problems, ElementsAre(HasSubstr(why)));
    } else {
      EXPECT_THAT(scan.problems, IsEmpty());
    }
  }
  // Slot 2 is as it was, told of at every scan, counted, and not to be used.
  void ExpectLeftAlone(const MemoryScan& first, const std::string& why) {
    const std::vector<std::string> names = Names();
    for (const MemoryScan& scan : {first, Restart(), store_->Scan().value()}) {
      EXPECT_EQ(SlotOf(scan, 2), nullptr);
      EXPECT_THAT(scan.problems, ElementsAre(HasSubstr(why)));
      EXPECT_THAT(scan.problems, ElementsAre(HasSubstr("/shm/holdfast/slot-000002")));
      EXPECT_EQ(Names(), names);
      EXPECT_EQ(store_->bytes_used(), 2 * kSlot);
      EXPECT_TRUE(absl::IsFailedPrecondition(store_->OpenImage(2, true).status()));
      EXPECT_TRUE(absl::IsFailedPrecondition(store_->Delete(2)));
      EXPECT_TRUE(absl::IsAlreadyExists(store_->Create(2, kSlot)));
    }
  }

  FaultEnv env_{FaultEnv::Durability::kNone};
  std::unique_ptr<SlotStore> store_;
  const SlotContent good_ = MakeSlotContent(1, 1);
  const SlotContent other_ = MakeSlotContent(2, 4);
};

TEST_F(SlotScanTest, FindsSealedWritingAndFreeSlots) {
  SlotNote note = NoteOf(7, 2 * kSlot);
  note.writer = ProcessId{4711, 99};
  note.readers = {{{4712, 100}, 7}};
  ASSERT_TRUE(store_->Create(2, 2 * kSlot).ok());
  ASSERT_TRUE(store_->WriteNote(2, note).ok());
  const MemoryScan scan = Restart();
  EXPECT_THAT(scan.problems, IsEmpty());
  ASSERT_THAT(scan.slots, SizeIs(2));
  ASSERT_TRUE(scan.slots[0].record.has_value());
  EXPECT_EQ(scan.slots[0].record->id, good_.expected.id);
  EXPECT_EQ(scan.slots[0].record->descent, good_.expected.descent);
  EXPECT_TRUE(scan.slots[0].record->layout_bytes.empty());
  EXPECT_TRUE(scan.slots[0].record->digests.empty());
  EXPECT_EQ(scan.slots[0].note.generation, 1u);
  EXPECT_FALSE(scan.slots[1].record.has_value());
  EXPECT_EQ(scan.slots[1].bytes, 2 * kSlot);
  EXPECT_EQ(scan.slots[1].note.boot_id, kTestBoot);
  EXPECT_EQ(scan.slots[1].note.generation, 7u);
  EXPECT_EQ(scan.slots[1].note.writer, note.writer);
  EXPECT_EQ(scan.slots[1].note.readers, note.readers);
  EXPECT_EQ(store_->bytes_used(), 3 * kSlot);
}

TEST_F(SlotScanTest, SweepsInterruptedWritesOnly) {
  JobUuid job;
  for (const std::string& name :
       {std::string("slot-000001.note.tmp"), std::string("slot-000001.record.tmp"),
        std::string("slot-000005.record.tmp"), JobStateName(job) + ".tmp"}) {
    ASSERT_TRUE(OverwriteFile(env_, Path(name), "half").ok());
  }
  ASSERT_TRUE(OverwriteFile(env_, Path("notes.tmp"), "mine").ok());
  ASSERT_TRUE(OverwriteFile(env_, Path("slot-000001.record~"), "mine").ok());
  ASSERT_TRUE(env_.CreateDirectory(Path("folder"), 0700).ok());
  const MemoryScan scan = Restart();
  EXPECT_THAT(Names(),
              ElementsAre("folder", "lock", "notes.tmp", "reserve", "slot-000001",
                          "slot-000001.note", "slot-000001.record", "slot-000001.record~"));
  EXPECT_THAT(scan.problems,
              ElementsAre(HasSubstr("/folder: not a name"), HasSubstr("/notes.tmp: not a name"),
                          HasSubstr("/slot-000001.record~: not a name")));
  EXPECT_THAT(scan.unreadable, IsEmpty());
}

// ---- Interrupted creations and deletions ----

TEST_F(SlotScanTest, ASlotWithoutNoteAndRecordWasNeverGivenToAnybody) {
  ASSERT_TRUE(store_->Create(2, kSlot).ok());
  const MemoryScan live = store_->Scan().value();
  ASSERT_NE(SlotOf(live, 2), nullptr) << "its note is still to come";
  EXPECT_EQ(SlotOf(live, 2)->note.generation, 0u);
  EXPECT_TRUE(store_->WriteNote(2, NoteOf(1, kSlot)).ok());
  ASSERT_TRUE(env_.Unlink(Path("slot-000002.note")).ok());
  ExpectDiscarded(Restart(), "");
  ASSERT_TRUE(OverwriteFile(env_, Path("slot-000002"), "").ok());
  ExpectDiscarded(Restart(), "");
}

// ---- Notes ----

TEST_F(SlotScanTest, ARecordWhoseNoteIsGoneIsLeftAlone) {
  ASSERT_TRUE(SealSlot(*store_, 2, other_).ok());
  ASSERT_TRUE(env_.Unlink(Path("slot-000002.note")).ok());
  const MemoryScan scan = Restart();
  EXPECT_THAT(scan.unreadable, SizeIs(1));
  ExpectLeftAlone(scan, "its note is gone");
}

TEST_F(SlotScanTest, ADamagedNoteCostsNoRecord) {
  ASSERT_TRUE(SealSlot(*store_, 2, other_).ok());
  ASSERT_TRUE(FlipBitOf(env_, Path("slot-000002.note"), 30).ok());
  ExpectLeftAlone(Restart(), "CRC");
}

TEST_F(SlotScanTest, ADamagedNoteWithoutARecordGoesWithItsSlot) {
  ASSERT_TRUE(SealSlot(*store_, 2, other_).ok());
  ASSERT_TRUE(store_->RemoveRecord(2).ok());
  ASSERT_TRUE(OverwriteFile(env_, Path("slot-000002.note"), "HFSL").ok());
  ExpectDiscarded(Restart(), "held no sealed copy");
}

TEST_F(SlotScanTest, NotesOfAnotherBootAreLeftAlone) {
  ASSERT_TRUE(SealSlot(*store_, 2, other_).ok());
  SlotNote note = NoteOf(other_.expected.generation, kSlot);
  note.boot_id = "another";
  EXPECT_TRUE(absl::IsInvalidArgument(store_->WriteNote(2, note)));
  ASSERT_TRUE(OverwriteFile(env_, Path("slot-000002.note"), EncodeSlotNote(note).value()).ok());
  ExpectLeftAlone(Restart(), "another boot");
}

TEST_F(SlotScanTest, NotesOfANewerVersionAreLeftAlone) {
  ASSERT_TRUE(store_->Create(2, kSlot).ok());
  ASSERT_TRUE(store_->WriteNote(2, NoteOf(3, kSlot)).ok());
  std::string newer = EncodeFrame(FrameKind::kSlotNote, "of the future");
  newer[8] = 2;
  ASSERT_TRUE(OverwriteFile(env_, Path("slot-000002.note"), newer).ok());
  ExpectLeftAlone(Restart(), "format version 2");
}

TEST_F(SlotScanTest, WhatCanNotBeReadJustNowIsLeftAlone) {
  ASSERT_TRUE(SealSlot(*store_, 2, other_).ok());
  for (const char* call :
       {"open /shm/holdfast/slot-000002.note", "read /shm/holdfast/slot-000002.record",
        "stat /shm/holdfast/slot-000002"}) {
    env_.FailMatching(call, EIO);
    const MemoryScan scan = store_->Scan().value();
    EXPECT_EQ(SlotOf(scan, 2), nullptr) << call;
    EXPECT_THAT(scan.problems, ElementsAre(HasSubstr("EIO"))) << call;
    env_.FailMatching(call, 0);
    const MemoryScan again = store_->Scan().value();
    ASSERT_NE(SlotOf(again, 2), nullptr) << call;
    EXPECT_TRUE(SlotOf(again, 2)->record.has_value()) << call;
  }
}

// ---- Records ----

TEST_F(SlotScanTest, TornRecordsGoAndTheirSlotsAreFree) {
  for (const size_t length : {size_t{0}, size_t{7}, other_.sample.record_file.size() - 1,
                              other_.sample.record_file.size() + 1}) {
    ASSERT_TRUE(SealSlot(*store_, 2, other_).ok());
    std::string torn = other_.sample.record_file;
    torn.resize(length);
    ASSERT_TRUE(OverwriteFile(env_, Path("slot-000002.record"), torn).ok());
    const MemoryScan scan = Restart();
    ASSERT_NE(SlotOf(scan, 2), nullptr) << length;
    EXPECT_FALSE(SlotOf(scan, 2)->record.has_value());
    EXPECT_FALSE(Exists("slot-000002.record"));
    EXPECT_THAT(scan.unreadable, SizeIs(1));
    EXPECT_THAT(store_->Scan().value().problems, IsEmpty()) << "told once";
    EXPECT_TRUE(store_->Delete(2).ok());
  }
}

TEST_F(SlotScanTest, EveryFlippedBitOfARecordIsFound) {
  ASSERT_TRUE(SealSlot(*store_, 2, other_).ok());
  for (size_t at = 0; at < other_.sample.record_file.size(); at += 3) {
    std::string bad = other_.sample.record_file;
    bad[at] = static_cast<char>(bad[at] ^ 0x40);
    ASSERT_TRUE(OverwriteFile(env_, Path("slot-000002.record"), bad).ok());
    const MemoryScan scan = store_->Scan().value();
    EXPECT_THAT(scan.unreadable, SizeIs(1)) << at;
    EXPECT_FALSE(store_->Find(other_.expected.id).ok()) << at;
  }
}

TEST_F(SlotScanTest, RecordsOfANewerVersionAreLeftAlone) {
  ASSERT_TRUE(SealSlot(*store_, 2, other_).ok());
  ASSERT_TRUE(OverwriteFile(env_, Path("slot-000002.record"),
                            FrameRecordBody("x", kRecordFormatVersion + 1))
                  .ok());
  ExpectLeftAlone(Restart(), "version " + std::to_string(kRecordFormatVersion + 1));
}

TEST_F(SlotScanTest, RecordsOfAnotherFillingGo) {
  ASSERT_TRUE(SealSlot(*store_, 2, other_).ok());
  ASSERT_TRUE(store_->RemoveRecord(2).ok());
  ASSERT_TRUE(store_->WriteNote(2, NoteOf(5, kSlot)).ok());
  ASSERT_TRUE(OverwriteFile(env_, Path("slot-000002.record"), other_.sample.record_file).ok());
  const MemoryScan scan = Restart();
  ASSERT_NE(SlotOf(scan, 2), nullptr);
  EXPECT_FALSE(SlotOf(scan, 2)->record.has_value());
  EXPECT_EQ(SlotOf(scan, 2)->note.generation, 5u);
  EXPECT_THAT(scan.problems, ElementsAre(HasSubstr("filling 4")));
}

TEST_F(SlotScanTest, ARecordWithoutAGenerationIsNotOfASlot) {
  ASSERT_TRUE(store_->Create(2, kSlot).ok());
  ASSERT_TRUE(store_->WriteNote(2, NoteOf(0, kSlot)).ok());
  ASSERT_TRUE(
      OverwriteFile(env_, Path("slot-000002.record"), MakeSlotContent(2, 0).sample.record_file)
          .ok());
  EXPECT_FALSE(SlotOf(Restart(), 2)->record.has_value());
}

TEST_F(SlotScanTest, TheSameShardTwiceIsReportedNotChosenFrom) {
  const SlotContent twin = MakeSlotContent(1, 4);
  ASSERT_TRUE(store_->Create(2, kSlot).ok());
  ASSERT_TRUE(store_->WriteNote(2, NoteOf(4, kSlot)).ok());
  ASSERT_TRUE(OverwriteFile(env_, Path("slot-000002.record"), twin.sample.record_file).ok());
  ExpectLeftAlone(Restart(), "which slot 1 holds already");
}

TEST_F(SlotScanTest, RecordsUnderAnotherJobsIdentityAreLeftAlone) {
  v1::JobState state;
  const JobUuid job = good_.expected.id.job;
  state.set_job_uuid(job.ToBytes());
  state.set_name(good_.expected.job_name);
  ASSERT_TRUE(store_->WriteJobState(job, state.SerializeAsString()).ok());
  ShardRecord impostor = other_.sample.record;
  impostor.job_name = "impostor";
  ASSERT_TRUE(store_->Create(2, kSlot).ok());
  ASSERT_TRUE(store_->WriteNote(2, NoteOf(4, kSlot)).ok());
  ASSERT_TRUE(OverwriteFile(env_, Path("slot-000002.record"), EncodeRecord(impostor)).ok());
  ExpectLeftAlone(Restart(), "'impostor'");
}

// ---- Images ----

TEST_F(SlotScanTest, ACutImageLosesItsRecord) {
  ASSERT_TRUE(SealSlot(*store_, 2, other_).ok());
  ASSERT_TRUE(Cut(2, other_.sample.image.size() - 1).ok());
  const MemoryScan scan = Restart();
  EXPECT_THAT(scan.unreadable, SizeIs(1));
  ExpectDiscarded(scan, "was cut to");
}

TEST_F(SlotScanTest, ACutBehindTheImageHarmsNoCopy) {
  ASSERT_TRUE(SealSlot(*store_, 2, other_).ok());
  ASSERT_TRUE(Cut(2, other_.sample.image.size()).ok());
  const MemoryScan scan = Restart();
  ASSERT_NE(SlotOf(scan, 2), nullptr);
  EXPECT_TRUE(SlotOf(scan, 2)->record.has_value());
  EXPECT_EQ(SlotOf(scan, 2)->bytes, other_.sample.image.size());
  EXPECT_THAT(scan.problems, ElementsAre(HasSubstr("the image in it is whole")));
  EXPECT_THAT(scan.unreadable, IsEmpty());
  std::string image(other_.sample.image.size(), '\0');
  ASSERT_TRUE(store_->ReadAt(2, 0, std::as_writable_bytes(std::span<char>(image))).ok());
  EXPECT_EQ(image, other_.sample.image);
  ASSERT_TRUE(store_->RemoveRecord(2).ok());
  EXPECT_TRUE(absl::IsDataLoss(store_->WriteNote(2, NoteOf(5, image.size()))));
  EXPECT_TRUE(absl::IsDataLoss(store_->WriteNote(2, NoteOf(5, kSlot))))
      << "but it is not refilled as the slot that it was";
  ExpectDiscarded(Restart(), "cut or extended");
}

TEST_F(SlotScanTest, ADeletedImageIsReported) {
  ASSERT_TRUE(SealSlot(*store_, 2, other_).ok());
  ASSERT_TRUE(env_.Unlink(Path("slot-000002")).ok());
  const MemoryScan scan = Restart();
  EXPECT_THAT(scan.unreadable, SizeIs(1));
  ExpectDiscarded(scan, "was deleted");
}

TEST_F(SlotScanTest, ACutSlotWithoutARecordIsReplaced) {
  ASSERT_TRUE(store_->Create(2, kSlot).ok());
  ASSERT_TRUE(store_->WriteNote(2, NoteOf(1, kSlot)).ok());
  ASSERT_TRUE(Cut(2, 3 * kSlot).ok());
  ExpectDiscarded(Restart(), "cut or extended");
  EXPECT_TRUE(store_->Create(2, kSlot).ok());
}

TEST_F(SlotScanTest, WhatIsNotAFileIsLeftAlone) {
  ASSERT_TRUE(env_.CreateDirectory(Path("slot-000003"), 0700).ok());
  ASSERT_TRUE(env_.CreateDirectory(Path("slot-000004.record"), 0700).ok());
  const MemoryScan scan = Restart();
  EXPECT_THAT(scan.problems, SizeIs(2));
  EXPECT_THAT(Names(), Contains("slot-000003"));
  EXPECT_THAT(Names(), Contains("slot-000004.record"));
}

// ---- Job states ----

TEST_F(SlotScanTest, BadJobStatesAreReportedAndLeftAlone) {
  JobUuid job;
  job.bytes[0] = 1;
  JobUuid other;
  other.bytes[0] = 2;
  JobUuid newer;
  newer.bytes[0] = 3;
  JobUuid good;
  good.bytes[0] = 4;
  v1::JobState state;
  state.set_job_uuid(good.ToBytes());
  state.set_name("good");
  const std::string framed = EncodeFrame(FrameKind::kJobState, state.SerializeAsString());
  std::string version = framed;
  version[8] = 9;
  ASSERT_TRUE(OverwriteFile(env_, Path(JobStateName(job)), framed.substr(0, 40)).ok());
  ASSERT_TRUE(OverwriteFile(env_, Path(JobStateName(other)), framed).ok());
  ASSERT_TRUE(OverwriteFile(env_, Path(JobStateName(newer)), version).ok());
  ASSERT_TRUE(OverwriteFile(env_, Path(JobStateName(good)), framed).ok());
  for (int round = 0; round < 2; ++round) {
    const MemoryScan scan = Restart();
    EXPECT_THAT(scan.job_states, ElementsAre(state.SerializeAsString()));
    EXPECT_THAT(scan.problems, ElementsAre(HasSubstr("torn"), HasSubstr("state of another job"),
                                           HasSubstr("version 9")));
    EXPECT_THAT(Names(), SizeIs(4 + 5));
  }
}

}  // namespace
}  // namespace holdfast
