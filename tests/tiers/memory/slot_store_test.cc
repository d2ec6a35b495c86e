// SlotStore on a FaultEnv that plays tmpfs: budget, the order of a refill, what may be published,
// and what a hand that meddles with the files can do.
#include "tiers/memory/slot_store.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <functional>
#include <span>

#include "base/status.h"
#include "base/units.h"
#include "holdfast/v1/state.pb.h"
#include "tests/tiers/memory/memory_harness.h"
#include "tiers/memory/slot_files.h"

namespace holdfast {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr char kDir[] = "/shm/holdfast";

// Tells of renames and unlinks before they happen, so that a test can do something in between.
class WatchedEnv : public FaultEnv {
 public:
  WatchedEnv() : FaultEnv(Durability::kNone) {}
  absl::Status Rename(const std::string& from, const std::string& to) override {
    log.push_back("rename " + to.substr(to.rfind('/') + 1));
    if (before_rename) {
      before_rename(to);
    }
    return FaultEnv::Rename(from, to);
  }
  absl::Status Unlink(const std::string& path) override {
    log.push_back("unlink " + path.substr(path.rfind('/') + 1));
    return FaultEnv::Unlink(path);
  }
  std::function<void(const std::string&)> before_rename;
  std::vector<std::string> log;
};

class SlotStoreTest : public testing::Test {
 protected:
  void SetUp() override { OpenStore(64 * kSlot); }
  void OpenStore(uint64_t bytes_max) {
    store_.reset();
    absl::StatusOr<std::unique_ptr<SlotStore>> store =
        SlotStore::Open(StoreOptions(env_, kDir, bytes_max));
    ASSERT_TRUE(store.ok()) << ToString(store.status());
    store_ = *std::move(store);
    ASSERT_TRUE(store_->Scan().ok());
  }
  bool Exists(const std::string& name) { return env_.Info(JoinPath(kDir, name)).ok(); }
  absl::Status Cut(SlotId slot, uint64_t bytes) {
    HF_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                        env_.Open(JoinPath(kDir, ImageName(slot)), OpenMode::kReadWrite));
    return file->Truncate(bytes);
  }

  WatchedEnv env_;
  std::unique_ptr<SlotStore> store_;
};

// ---- Opening ----

TEST_F(SlotStoreTest, RefusesWhatIsNotTmpfs) {
  FaultEnv disk(FaultEnv::Durability::kSyncedOnly);
  const absl::Status status = SlotStore::Open(StoreOptions(disk, kDir)).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(Message(status), HasSubstr("on ext4"));
  EXPECT_THAT(Message(status), HasSubstr("/dev/shm"));
}

TEST_F(SlotStoreTest, RefusesABudgetThatTheTmpfsCanNotHold) {
  FaultEnv small(FaultEnv::Durability::kNone);
  small.SetBytesTotal(4 * kSlot);
  const absl::Status status = SlotStore::Open(StoreOptions(small, kDir, 5 * kSlot)).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_THAT(Message(status), HasSubstr("10 MiB"));
  EXPECT_THAT(Message(status), HasSubstr("8 MiB"));
  EXPECT_THAT(Message(status), HasSubstr("remount,size="));
  EXPECT_TRUE(
      absl::IsInvalidArgument(SlotStore::Open(StoreOptions(small, kDir, kSlot - 1)).status()));
}

TEST_F(SlotStoreTest, OneStoreAtATime) {
  const absl::Status status = SlotStore::Open(StoreOptions(env_, kDir)).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << ToString(status);
  EXPECT_THAT(Message(status), HasSubstr(std::to_string(::getpid())));
  store_.reset();
  EXPECT_TRUE(SlotStore::Open(StoreOptions(env_, kDir)).ok());
}

TEST_F(SlotStoreTest, SlotsThatWereThereCountAndNeedAScan) {
  ASSERT_TRUE(SealSlot(*store_, 1, MakeSlotContent(1, 1)).ok());
  store_.reset();
  store_ = SlotStore::Open(StoreOptions(env_, kDir, 2 * kSlot)).value();
  EXPECT_EQ(store_->bytes_used(), kSlot);
  EXPECT_TRUE(absl::IsResourceExhausted(store_->Create(2, 2 * kSlot)));
  EXPECT_TRUE(absl::IsFailedPrecondition(store_->OpenImage(1, false).status()));
  ASSERT_TRUE(store_->Scan().ok());
  EXPECT_TRUE(store_->OpenImage(1, false).ok());
}

// ---- Creating ----

TEST_F(SlotStoreTest, CreatesWholeSlotsOnly) {
  for (const uint64_t bytes : {uint64_t{0}, kSlot - 1, kSlot + 4096}) {
    EXPECT_TRUE(absl::IsInvalidArgument(store_->Create(1, bytes))) << bytes;
  }
  ASSERT_TRUE(store_->Create(1, 3 * kSlot).ok());
  EXPECT_EQ(env_.Info(JoinPath(kDir, "slot-000001")).value().bytes, 3 * kSlot);
  EXPECT_TRUE(absl::IsAlreadyExists(store_->Create(1, kSlot)));
  EXPECT_EQ(store_->bytes_used(), 3 * kSlot);
}

TEST_F(SlotStoreTest, BudgetIsRefusedWithTheNumbers) {
  OpenStore(4 * kSlot);
  ASSERT_TRUE(store_->Create(1, 3 * kSlot).ok());
  const absl::Status status = store_->Create(2, 2 * kSlot);
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  for (const char* part : {"4 MiB wanted", "6 MiB of the budget of 8 MiB", "memory.bytes_max"}) {
    EXPECT_THAT(Message(status), HasSubstr(part));
  }
  EXPECT_FALSE(Exists("slot-000002"));
  EXPECT_TRUE(absl::IsResourceExhausted(store_->Create(2, UINT64_MAX / kSlot * kSlot)))
      << "no overflow";
  EXPECT_TRUE(store_->Create(2, kSlot).ok());
  ASSERT_TRUE(store_->Delete(1).ok());
  EXPECT_EQ(store_->bytes_used(), kSlot);
  EXPECT_TRUE(store_->Create(1, 3 * kSlot).ok());
}

TEST_F(SlotStoreTest, AFullTmpfsLeavesNoHalfSlot) {
  store_.reset();
  env_.SetBytesTotal(4 * kSlot);
  OpenStore(4 * kSlot);
  const std::unique_ptr<File> other = env_.Open("/shm/other", OpenMode::kCreateExclusive).value();
  ASSERT_TRUE(other->Allocate(0, 3 * kSlot).ok());
  const absl::Status status = store_->Create(1, 2 * kSlot);
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  for (const char* part :
       {"4 MiB wanted", "of 8 MiB free", "the budget is 8 MiB", "remount,size="}) {
    EXPECT_THAT(Message(status), HasSubstr(part));
  }
  EXPECT_FALSE(Exists("slot-000001"));
  EXPECT_EQ(store_->bytes_used(), 0u);
  // Room that goes between the question and the reservation.
  ASSERT_TRUE(other->Truncate(kSlot).ok());
  env_.FailMatching("allocate", ENOSPC);
  EXPECT_TRUE(absl::IsResourceExhausted(store_->Create(1, kSlot)));
  EXPECT_FALSE(Exists("slot-000001"));
  env_.FailMatching("allocate", 0);
  ASSERT_TRUE(other->Truncate(0).ok());
  EXPECT_TRUE(store_->Create(1, 2 * kSlot).ok());
}

TEST_F(SlotStoreTest, PopulatesWithinTheSlotAndKeepsWhatIsThere) {
  const SlotContent content = MakeSlotContent(1, 1);
  ASSERT_TRUE(SealSlot(*store_, 1, content, 2 * kSlot).ok());
  EXPECT_TRUE(store_->Populate(1, 0, kSlot).ok());
  EXPECT_TRUE(store_->Populate(1, kSlot, kSlot).ok());
  EXPECT_TRUE(store_->Populate(1, 2 * kSlot, 0).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(store_->Populate(1, kSlot, kSlot + 1)));
  EXPECT_TRUE(absl::IsInvalidArgument(store_->Populate(1, 4096, 4096)));
  EXPECT_TRUE(absl::IsInvalidArgument(store_->Populate(1, kSlot, UINT64_MAX)));
  EXPECT_TRUE(absl::IsNotFound(store_->Populate(2, 0, kSlot)));
  std::string image(content.sample.image.size(), '\0');
  ASSERT_TRUE(store_->ReadAt(1, 0, std::as_writable_bytes(std::span<char>(image))).ok());
  EXPECT_EQ(image, content.sample.image);
  ASSERT_TRUE(Cut(1, kSlot).ok());
  EXPECT_TRUE(absl::IsDataLoss(store_->Populate(1, 0, kSlot)));
}

// ---- Filling and publishing ----

TEST_F(SlotStoreTest, ARefillRemovesTheRecordFirst) {
  ASSERT_TRUE(SealSlot(*store_, 1, MakeSlotContent(1, 1)).ok());
  const absl::Status early = store_->WriteNote(1, NoteOf(2, kSlot));
  EXPECT_TRUE(absl::IsFailedPrecondition(early));
  EXPECT_THAT(Message(early), HasSubstr("record"));
  SlotNote readers = NoteOf(1, kSlot);
  readers.readers = {{{4711, 1}, 7}};
  EXPECT_TRUE(store_->WriteNote(1, readers).ok()) << "who reads may change while it is sealed";
  ASSERT_TRUE(store_->RemoveRecord(1).ok());
  EXPECT_TRUE(absl::IsNotFound(store_->RemoveRecord(1)));
  EXPECT_TRUE(store_->WriteNote(1, NoteOf(2, kSlot)).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(store_->WriteNote(1, NoteOf(1, kSlot))))
      << "generations only grow";
  EXPECT_TRUE(absl::IsFailedPrecondition(PublishSlot(*store_, 1, MakeSlotContent(1, 1)).status()))
      << "the record of the earlier filling";
  const SlotContent next = MakeSlotContent(2, 2);
  ASSERT_TRUE(FillSlot(*store_, 1, next).ok());
  EXPECT_TRUE(PublishSlot(*store_, 1, next).ok());
}

TEST_F(SlotStoreTest, RecordGoesBeforeNoteBeforeImage) {
  ASSERT_TRUE(SealSlot(*store_, 1, MakeSlotContent(1, 1)).ok());
  env_.log.clear();
  ASSERT_TRUE(store_->Delete(1).ok());
  EXPECT_THAT(env_.log, ElementsAre("unlink slot-000001.record", "unlink slot-000001.note",
                                    "unlink slot-000001"));
  EXPECT_TRUE(absl::IsNotFound(store_->Delete(1)));
  EXPECT_EQ(store_->bytes_used(), 0u);
}

TEST_F(SlotStoreTest, ADeletionThatFailsCanBeTriedAgain) {
  for (const char* call :
       {"unlink /shm/holdfast/slot-000001.record", "unlink /shm/holdfast/slot-000001.note",
        "sync directory", "unlink /shm/holdfast/slot-000001"}) {
    ASSERT_TRUE(SealSlot(*store_, 1, MakeSlotContent(1, 1)).ok());
    env_.FailMatching(call, EIO);
    EXPECT_FALSE(store_->Delete(1).ok()) << call;
    env_.FailMatching(call, 0);
    EXPECT_TRUE(store_->Delete(1).ok()) << call;
    EXPECT_FALSE(Exists("slot-000001"));
    EXPECT_EQ(store_->bytes_used(), 0u);
  }
}

TEST_F(SlotStoreTest, PublishesExactlyWhatIsExpected) {
  const SlotContent good = MakeSlotContent(5, 3);
  ASSERT_TRUE(store_->Create(1, kSlot).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(PublishSlot(*store_, 1, good).status()))
      << "never noted, so never passed on";
  ASSERT_TRUE(store_->WriteNote(1, NoteOf(3, kSlot)).ok());
  ASSERT_TRUE(FillSlot(*store_, 1, good).ok());
  const auto refused = [&](const std::function<void(SlotContent&)>& change) {
    SlotContent other = good;
    change(other);
    const absl::Status status = PublishSlot(*store_, 1, other).status();
    EXPECT_FALSE(Exists("slot-000001.record"));
    return status;
  };
  const auto invalid = [&](const std::function<void(SlotContent&)>& change) {
    return absl::IsInvalidArgument(refused(change));
  };
  EXPECT_TRUE(invalid([](SlotContent& c) { c.expected.id.job.bytes[0] ^= 1; }));
  EXPECT_TRUE(invalid([](SlotContent& c) { c.expected.id.attempt += 1; }));
  EXPECT_TRUE(invalid([](SlotContent& c) { c.expected.id.step += 1; }));
  EXPECT_TRUE(invalid([](SlotContent& c) { c.expected.id.rank += 1; }));
  EXPECT_TRUE(invalid([](SlotContent& c) { c.expected.job_name += "x"; }));
  EXPECT_TRUE(invalid([](SlotContent& c) { c.expected.world_size += 1; }));
  EXPECT_TRUE(invalid([](SlotContent& c) { c.expected.descent.pop_back(); }));
  EXPECT_TRUE(
      absl::IsFailedPrecondition(refused([](SlotContent& c) { c.expected.generation += 1; })));
  // Where the record is said to lie.
  EXPECT_TRUE(invalid([](SlotContent& c) { c.record_offset += 1; }));
  EXPECT_TRUE(invalid([](SlotContent& c) { c.record_offset = 0; }));
  EXPECT_TRUE(invalid([](SlotContent& c) { c.record_offset = kSlot - 4; }));
  EXPECT_TRUE(invalid([](SlotContent& c) { c.record_offset = UINT64_MAX - 4; }));
  EXPECT_TRUE(invalid([](SlotContent& c) { c.sample.record_file.clear(); }));
  EXPECT_TRUE(invalid([](SlotContent& c) { c.sample.record_file.pop_back(); }));
  EXPECT_TRUE(invalid([](SlotContent& c) { c.sample.record_file.resize(3 * kSlot); }));

  const absl::StatusOr<ShardRecord> record = PublishSlot(*store_, 1, good);
  ASSERT_TRUE(record.ok()) << ToString(record.status());
  EXPECT_EQ(record->id, good.expected.id);
  EXPECT_EQ(record->image_bytes, good.sample.image.size());
  EXPECT_EQ(store_->ReadRecord(1).value(), good.sample.record_file);
  EXPECT_EQ(store_->Find(good.expected.id).value().slot, 1u);
  EXPECT_TRUE(absl::IsAlreadyExists(PublishSlot(*store_, 1, good).status())) << "sealed is sealed";
}

// A client's record that is whole and says what was expected, but describes an image that does not
// fit its slot.
TEST_F(SlotStoreTest, RefusesARecordInsideItsImage) {
  SlotContent content = MakeSlotContent(1, 1, 8000);
  content.record_offset = 16384;  // in the middle of the 32,000 bytes
  ASSERT_TRUE(store_->Create(1, kSlot).ok());
  ASSERT_TRUE(store_->WriteNote(1, NoteOf(1, kSlot)).ok());
  ASSERT_TRUE(FillSlot(*store_, 1, content).ok());
  const absl::Status status = PublishSlot(*store_, 1, content).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << ToString(status);
  EXPECT_THAT(Message(status), HasSubstr("does not fit"));
  EXPECT_TRUE(absl::IsInvalidArgument(
      store_
          ->PublishRecordBytes(1, MakeSlotContent(1, 1, kSlot).expected,
                               MakeSlotContent(1, 1, kSlot).sample.record_file)
          .status()));
}

TEST_F(SlotStoreTest, RefusesHostileRecords) {
  const SlotContent good = MakeSlotContent(1, 1);
  ASSERT_TRUE(store_->Create(1, kSlot).ok());
  ASSERT_TRUE(store_->WriteNote(1, NoteOf(1, kSlot)).ok());
  const auto publish = [&](ShardRecord record) {
    return store_->PublishRecordBytes(1, good.expected, EncodeRecord(record)).status();
  };
  ShardRecord record = good.sample.record;
  record.image_bytes += 4096;
  EXPECT_TRUE(absl::IsInvalidArgument(publish(record))) << "longer than its layout";
  record = good.sample.record;
  record.header_bytes += 4096;
  EXPECT_FALSE(publish(record).ok());
  record = good.sample.record;
  record.digests.pop_back();
  EXPECT_FALSE(publish(record).ok());
  record = good.sample.record;
  record.layout_bytes[0] ^= 1;
  EXPECT_FALSE(publish(record).ok());
  record = good.sample.record;
  record.generation = 0;
  EXPECT_FALSE(publish(record).ok());
  const absl::Status newer =
      store_->PublishRecordBytes(1, good.expected, FrameRecordBody("x", kRecordFormatVersion + 1))
          .status();
  EXPECT_TRUE(absl::IsFailedPrecondition(newer));
  EXPECT_THAT(Message(newer), HasSubstr(std::to_string(kRecordFormatVersion + 1)));
  for (size_t at = 0; at < good.sample.record_file.size(); ++at) {
    std::string torn = good.sample.record_file;
    torn[at] = static_cast<char>(torn[at] ^ 4);
    EXPECT_FALSE(store_->PublishRecordBytes(1, good.expected, torn).ok()) << at;
  }
  EXPECT_FALSE(Exists("slot-000001.record"));
  EXPECT_FALSE(Exists("slot-000001.record.tmp"));
  EXPECT_TRUE(publish(good.sample.record).ok());
}

TEST_F(SlotStoreTest, OneSlotPerShard) {
  const SlotContent content = MakeSlotContent(1, 1);
  ASSERT_TRUE(SealSlot(*store_, 1, content).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(SealSlot(*store_, 2, content)));
  ASSERT_TRUE(store_->RemoveRecord(1).ok());
  EXPECT_TRUE(PublishSlot(*store_, 2, content).ok());
  EXPECT_EQ(store_->Find(content.expected.id).value().slot, 2u);
}

TEST_F(SlotStoreTest, APublicationThatFailsTakesItsRecordBack) {
  const SlotContent content = MakeSlotContent(1, 1);
  for (const char* call :
       {"create /shm/holdfast/slot-000001.record", "write /shm/holdfast/slot-000001.record",
        "fdatasync", "rename", "stat /shm/holdfast/slot-000001"}) {
    store_->Delete(1).IgnoreError();
    ASSERT_TRUE(store_->Create(1, kSlot).ok());
    ASSERT_TRUE(store_->WriteNote(1, NoteOf(1, kSlot)).ok());
    ASSERT_TRUE(FillSlot(*store_, 1, content).ok());
    env_.FailMatching(call, EIO);
    EXPECT_FALSE(PublishSlot(*store_, 1, content).ok()) << call;
    env_.FailMatching(call, 0);
    EXPECT_FALSE(Exists("slot-000001.record")) << call;
    EXPECT_FALSE(Exists("slot-000001.record.tmp")) << call;
    EXPECT_TRUE(PublishSlot(*store_, 1, content).ok()) << call;
  }
}

// ---- Meddling ----

TEST_F(SlotStoreTest, ASlotCutOrDeletedWhileItIsPublishedIsNotSealed) {
  const SlotContent content = MakeSlotContent(1, 1);
  for (const bool cut : {true, false}) {
    const SlotId slot = cut ? 1 : 2;
    ASSERT_TRUE(store_->Create(slot, kSlot).ok());
    ASSERT_TRUE(store_->WriteNote(slot, NoteOf(1, kSlot)).ok());
    ASSERT_TRUE(FillSlot(*store_, slot, content).ok());
    env_.before_rename = [&](const std::string&) {
      EXPECT_TRUE((cut ? Cut(slot, 4096) : env_.Unlink(JoinPath(kDir, ImageName(slot)))).ok());
    };
    const absl::Status status = PublishSlot(*store_, slot, content).status();
    env_.before_rename = nullptr;
    EXPECT_TRUE(absl::IsDataLoss(status)) << ToString(status);
    EXPECT_FALSE(Exists(RecordName(slot)));
    EXPECT_FALSE(store_->Find(content.expected.id).ok());
    EXPECT_TRUE(store_->Delete(slot).ok()) << "it can be replaced";
  }
  EXPECT_EQ(store_->bytes_used(), 0u);
}

TEST_F(SlotStoreTest, EveryCallNoticesACutExtendedDeletedOrReplacedSlot) {
  const SlotContent content = MakeSlotContent(1, 1);
  const std::vector<std::function<absl::Status(SlotId)>> harms = {
      [&](SlotId slot) { return Cut(slot, kSlot - 1); },
      [&](SlotId slot) { return Cut(slot, kSlot + 1); },
      [&](SlotId slot) { return env_.Unlink(JoinPath(kDir, ImageName(slot))); },
      [&](SlotId slot) { return OverwriteFile(env_, JoinPath(kDir, ImageName(slot)), "short"); },
  };
  for (size_t i = 0; i < harms.size(); ++i) {
    const SlotId slot = static_cast<SlotId>(i + 1);
    ASSERT_TRUE(store_->Create(slot, kSlot).ok());
    ASSERT_TRUE(store_->WriteNote(slot, NoteOf(1, kSlot)).ok());
    ASSERT_TRUE(FillSlot(*store_, slot, content).ok());
    const std::unique_ptr<File> open = store_->OpenImageFile(slot, false).value();
    ASSERT_TRUE(harms[i](slot).ok());
    EXPECT_TRUE(absl::IsDataLoss(PublishSlot(*store_, slot, content).status())) << i;
    EXPECT_TRUE(absl::IsDataLoss(store_->OpenImage(slot, true).status())) << i;
    EXPECT_TRUE(absl::IsDataLoss(store_->OpenImage(slot, false).status())) << i;
    EXPECT_TRUE(absl::IsDataLoss(store_->Populate(slot, 0, kSlot))) << i;
    EXPECT_TRUE(absl::IsDataLoss(store_->WriteNote(slot, NoteOf(2, kSlot)))) << i;
    std::byte byte{};
    EXPECT_TRUE(absl::IsDataLoss(store_->ReadAt(slot, 0, {&byte, 1}))) << i;
    EXPECT_TRUE(store_->Delete(slot).ok()) << i;
  }
}

TEST_F(SlotStoreTest, ConfirmTellsAnotherFillingFromHarm) {
  const SlotContent content = MakeSlotContent(1, 1);
  ASSERT_TRUE(SealSlot(*store_, 1, content).ok());
  const std::unique_ptr<File> open = store_->OpenImageFile(1, false).value();
  EXPECT_TRUE(store_->Confirm(1, 1, *open).ok());
  EXPECT_TRUE(absl::IsNotFound(store_->Confirm(1, 2, *open)));
  ASSERT_TRUE(store_->RemoveRecord(1).ok());
  EXPECT_TRUE(absl::IsNotFound(store_->Confirm(1, 1, *open)));
  ASSERT_TRUE(store_->WriteNote(1, NoteOf(2, kSlot)).ok());
  const SlotContent next = MakeSlotContent(2, 2);
  ASSERT_TRUE(FillSlot(*store_, 1, next).ok());
  ASSERT_TRUE(PublishSlot(*store_, 1, next).ok());
  EXPECT_TRUE(absl::IsNotFound(store_->Confirm(1, 1, *open))) << "refilled";
  EXPECT_TRUE(store_->Confirm(1, 2, *open).ok());
  // Deleted and made again with the same generation: another file.
  ASSERT_TRUE(store_->Delete(1).ok());
  EXPECT_TRUE(absl::IsNotFound(store_->Confirm(1, 2, *open)));
  ASSERT_TRUE(SealSlot(*store_, 1, next).ok());
  EXPECT_TRUE(absl::IsDataLoss(store_->Confirm(1, 2, *open)));
  const std::unique_ptr<File> again = store_->OpenImageFile(1, false).value();
  EXPECT_TRUE(store_->Confirm(1, 2, *again).ok());
  ASSERT_TRUE(env_.Unlink(JoinPath(kDir, "slot-000001.record")).ok());
  EXPECT_TRUE(absl::IsNotFound(store_->Confirm(1, 2, *again)))
      << "its record was taken away by hand";
  EXPECT_TRUE(absl::IsNotFound(store_->Confirm(9, 1, *again)));
}

// ---- Descriptors and job states ----

TEST_F(SlotStoreTest, DescriptorsAreWhatWasAskedFor) {
  const SlotContent content = MakeSlotContent(1, 1);
  ASSERT_TRUE(SealSlot(*store_, 1, content).ok());
  const UniqueFd writable = store_->OpenImage(1, true).value();
  EXPECT_NE(::fcntl(writable.get(), F_GETFD) & FD_CLOEXEC, 0);
  char byte = 0;
  EXPECT_EQ(::pread(writable.get(), &byte, 1, 0), 1);
  EXPECT_EQ(byte, content.sample.image[0]);
  const UniqueFd record = store_->OpenRecord(1).value();
  EXPECT_EQ(::pread(record.get(), &byte, 1, 0), 1);
  EXPECT_EQ(byte, 'H');
  ASSERT_TRUE(store_->RemoveRecord(1).ok());
  EXPECT_TRUE(absl::IsNotFound(store_->OpenRecord(1).status()));
  EXPECT_TRUE(absl::IsNotFound(store_->OpenImage(2, false).status()));
}

TEST_F(SlotStoreTest, JobStatesComeBack) {
  v1::JobState state;
  JobUuid job;
  job.bytes[0] = 9;
  state.set_job_uuid(job.ToBytes());
  state.set_name("demo");
  state.set_version(1);
  ASSERT_TRUE(store_->WriteJobState(job, state.SerializeAsString()).ok());
  state.set_version(2);
  ASSERT_TRUE(store_->WriteJobState(job, state.SerializeAsString()).ok());
  OpenStore(64 * kSlot);
  const MemoryScan scan = store_->Scan().value();
  EXPECT_THAT(scan.job_states, ElementsAre(state.SerializeAsString()));
  EXPECT_TRUE(scan.problems.empty());
  JobUuid other = job;
  other.bytes[0] = 8;
  EXPECT_TRUE(absl::IsInvalidArgument(store_->WriteJobState(other, state.SerializeAsString())));
  EXPECT_TRUE(store_->RemoveJobState(job).ok());
  EXPECT_TRUE(absl::IsNotFound(store_->RemoveJobState(job)));
  EXPECT_TRUE(store_->Scan().value().job_states.empty());
}

}  // namespace
}  // namespace holdfast
