// Whole images on their way into a store, as flushes move them: to a drive by WriteImage, to a
// remote directory by a CopyPool. Calls that fail, syncs that fail, writes that the kernel takes a
// part of.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "tests/tiers/durable/durable_harness.h"
#include "tests/tiers/transfer/transfer_harness.h"
#include "tiers/transfer/buffered_copy.h"
#include "tiers/transfer/direct_copy.h"

// In place of libc's, for this program: while short_writes is set, the kernel takes only the first
// part of every write of more than a page, as it may at any time.
namespace {
std::atomic<bool> short_writes{false};
std::atomic<int> writes_cut{0};

ssize_t WritePart(int fd, const void* data, size_t bytes, off_t offset) {
  constexpr size_t kPage = 4096;
  if (short_writes.load() && bytes > kPage) {
    bytes = std::max(bytes / 3 / kPage, size_t{1}) * kPage;
    ++writes_cut;
  }
  return ::syscall(SYS_pwrite64, fd, data, bytes, offset);
}
}  // namespace

extern "C" ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) {
  return WritePart(fd, data, bytes, offset);
}
extern "C" ssize_t pwrite64(int fd, const void* data, size_t bytes, off64_t offset) {
  return WritePart(fd, data, bytes, offset);
}

namespace holdfast {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kBigSliceBytes = (uint64_t{1} << 20) + 13;

SampleImage TransferShard() {
  SampleImage sample = MakeTransferImage(kBigSliceBytes);
  sample.record.id.attempt = 3;  // that the harness claims
  sample.record.descent = {{3, {0, 0}}};
  sample.record_file = EncodeRecord(sample.record);
  return sample;
}

class DurableTransferTest : public testing::TestWithParam<DurableKind> {
 protected:
  bool remote() const { return GetParam() == DurableKind::kRemote; }
  CopyStore& store() { return harness_->store(); }
  Env& env() { return harness_->env(); }

  void Fresh(bool real = false) {
    harness_ = std::make_unique<DurableHarness>(
        DurablePlace{.kind = GetParam(), .real = real, .direct = !remote() && !real});
    const absl::Status started = harness_->Start();
    ASSERT_TRUE(started.ok()) << ToString(started);
  }
  void SetUp() override {
    image_->record = sample_.record;
    image_->layout = sample_.layout;
    io_ = ValueOf(CreateBlockIo({.mode = BlockIoMode::kThreads, .depth = 1}));
    // One thread: the calls of every run come in the same order.
    pool_ = ValueOf(CopyPool::Start({.threads = 1, .piece_bytes = 256 * kKiB}));
    slot_ = std::make_unique<TestSlot>(sample_.image.size(), sample_.image);
    ASSERT_NO_FATAL_FAILURE(Fresh());
  }

  TransferResult Move(const std::shared_ptr<CopyStore::Writing>& writing) {
    if (!remote()) {
      return WriteImage(*io_, slot_->span(), writing->image(), sample_.record, sample_.layout,
                        {.piece_bytes = 256 * kKiB, .alignment = writing->alignment()});
    }
    BufferedCopySpec spec;
    spec.from_memory = std::make_shared<RevocableMemory>(slot_->data(), slot_->span().size());
    spec.to_file = std::shared_ptr<File>(writing, &writing->image());
    spec.to_alignment = writing->alignment();
    spec.image = image_;
    return pool_->Copy(spec);
  }
  absl::Status Flush() {
    HF_ASSIGN_OR_RETURN(std::shared_ptr<CopyStore::Writing> writing,
                        store().Begin(NewCopyOfShard(sample_)));
    const TransferResult moved = Move(writing);
    if (!moved.ok()) {
      EXPECT_EQ(moved.faulty, FaultySide::kDestination);
      return moved.status;
    }
    EXPECT_EQ(moved.bytes, sample_.image.size());
    return writing->Publish(sample_.record_file).status();
  }

  const SampleImage sample_ = TransferShard();
  const std::shared_ptr<RecordAndLayout> image_ = std::make_shared<RecordAndLayout>();
  std::unique_ptr<TestSlot> slot_;
  std::unique_ptr<BlockIo> io_;
  std::unique_ptr<CopyPool> pool_;
  std::unique_ptr<DurableHarness> harness_;
};

INSTANTIATE_TEST_SUITE_P(Kinds, DurableTransferTest,
                         testing::Values(DurableKind::kNvme, DurableKind::kRemote),
                         [](const testing::TestParamInfo<DurableKind>& kind) {
                           return kind.param == DurableKind::kNvme ? "Nvme" : "Remote";
                         });

TEST_P(DurableTransferTest, EveryCallThatFailsEndsTheFlushAndNotTheNext) {
  for (const int error : {ENOSPC, EIO, EROFS, EDQUOT, ESTALE}) {
    bool reached = true;
    int failed = 0;
    for (int n = 1; reached; ++n) {
      SCOPED_TRACE(absl::StrCat("call ", n, " fails with ", ::strerrorname_np(error)));
      ASSERT_NO_FATAL_FAILURE(Fresh());
      FaultEnv& faults = *harness_->faults();
      const int before = faults.calls();
      faults.FailCall(n, error);
      const absl::Status flushed = Flush();
      reached = faults.calls() - before >= n;
      if (!reached) {
        ASSERT_TRUE(flushed.ok()) << ToString(flushed);
        break;
      }
      if (!flushed.ok()) {
        ++failed;
        EXPECT_THAT(Message(flushed), HasSubstr(::strerrorname_np(error)));
        EXPECT_TRUE(absl::IsNotFound(CheckShard(store(), sample_)));
        const absl::Status again = Flush();
        ASSERT_TRUE(again.ok()) << ToString(again);
      }
      ASSERT_TRUE(store().Sweep().ok());
      EXPECT_THAT(harness_->Leftovers(), IsEmpty());
      harness_->Stop();
      harness_->Crash();
      ASSERT_TRUE(harness_->Start().ok());
      const absl::Status found = CheckShard(store(), sample_);
      ASSERT_TRUE(found.ok()) << ToString(found);
    }
    EXPECT_GT(failed, 10);
  }
}

// The kernel may have dropped what it could not write, and says OK the next time: nothing of that
// file is built upon.
TEST_P(DurableTransferTest, AFailedSyncEndsThatCopyAndTheNextIsAFreshOne) {
  FaultEnv& faults = *harness_->faults();
  uint64_t inode = 0;
  {
    const std::shared_ptr<CopyStore::Writing> writing =
        ValueOf(store().Begin(NewCopyOfShard(sample_)));
    inode = writing->image().Info()->inode;
    ASSERT_TRUE(Move(writing).ok());
    faults.FailMatching("fdatasync", EIO);
    const absl::Status published = writing->Publish(sample_.record_file).status();
    EXPECT_THAT(Message(published), HasSubstr("fdatasync"));
    EXPECT_THAT(Message(published), HasSubstr("EIO"));
    faults.FailMatching("fdatasync", 0);
    EXPECT_TRUE(absl::IsFailedPrecondition(writing->Publish(sample_.record_file).status()))
        << "a sync that is tried again says OK and means nothing";
  }
  EXPECT_TRUE(absl::IsNotFound(CheckShard(store(), sample_)));
  EXPECT_THAT(harness_->Leftovers(), IsEmpty());
  EXPECT_EQ(store().pool_bytes(), 0u) << "nor is the file kept for another copy";
  {
    const std::shared_ptr<CopyStore::Writing> writing =
        ValueOf(store().Begin(NewCopyOfShard(sample_)));
    EXPECT_FALSE(writing->recycled());
    EXPECT_NE(writing->image().Info()->inode, inode);
    ASSERT_TRUE(Move(writing).ok());
    ASSERT_TRUE(writing->Publish(sample_.record_file).ok());
  }
  harness_->Stop();
  faults.Crash();
  ASSERT_TRUE(harness_->Start().ok());
  const absl::Status found = CheckShard(store(), sample_);
  EXPECT_TRUE(found.ok()) << ToString(found);
}

TEST_P(DurableTransferTest, ShortWritesAreProgress) {
  ASSERT_NO_FATAL_FAILURE(Fresh(true));
  writes_cut = 0;
  short_writes = true;
  const absl::Status flushed = Flush();
  short_writes = false;
  ASSERT_TRUE(flushed.ok()) << ToString(flushed);
  EXPECT_GT(writes_cut, 10);
  const absl::Status found = CheckShard(store(), sample_);
  EXPECT_TRUE(found.ok()) << ToString(found);
}

}  // namespace
}  // namespace holdfast
