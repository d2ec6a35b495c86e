// Direct copies over file systems that fail: through threads, whose files a FaultEnv can be, and
// through a ring where the kernel itself fails.
#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/fault_env.h"
#include "base/units.h"
#include "tests/base/temporary_directory.h"
#include "tests/tiers/transfer/transfer_harness.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

class DirectCopyFaultsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    io_ = ValueOf(CreateBlockIo({.mode = BlockIoMode::kThreads, .depth = 4}));
    ASSERT_TRUE(env_.CreateDirectory("/d", 0750).ok());
    options_.piece_bytes = kMiB;
  }

  FaultEnv env_;
  std::unique_ptr<BlockIo> io_;
  DirectCopyOptions options_;
  const SampleImage sample_ = MakeTransferImage();
};

TEST_F(DirectCopyFaultsTest, EveryCallThatFailsIsTheDestinations) {
  TestSlot slot(sample_.image.size(), sample_.image);
  int calls = 0;
  {
    const auto file = ValueOf(env_.Open("/d/whole", OpenMode::kCreateExclusive));
    const int before = env_.calls();
    const TransferResult result =
        WriteImage(*io_, slot.span(), *file, sample_.record, sample_.layout, options_);
    ASSERT_TRUE(result.ok()) << ToString(result.status);
    calls = env_.calls() - before;
  }
  ASSERT_GT(calls, 4);
  for (const int error : {ENOSPC, EIO, EDQUOT, EROFS, ESTALE}) {
    for (int n = 1; n <= calls; ++n) {
      const std::string path = "/d/" + std::to_string(error) + "." + std::to_string(n);
      const auto file = ValueOf(env_.Open(path, OpenMode::kCreateExclusive));
      env_.FailCall(n, error);
      const TransferResult result =
          WriteImage(*io_, slot.span(), *file, sample_.record, sample_.layout, options_);
      EXPECT_EQ(result.status.code(), ErrnoStatus(error, "write", path).code());
      EXPECT_THAT(Message(result.status), HasSubstr(path));
      EXPECT_EQ(result.faulty, FaultySide::kDestination);
      EXPECT_EQ(io_->in_flight(), 0u);
      ASSERT_TRUE(env_.Unlink(path).ok());
    }
  }
  EXPECT_TRUE(slot.text(sample_.image.size()) == sample_.image);
}

TEST_F(DirectCopyFaultsTest, EveryCallThatFailsWhileLoadingIsTheSources) {
  TestSlot slot(sample_.image.size(), sample_.image);
  {
    const auto file = ValueOf(env_.Open("/d/image", OpenMode::kCreateExclusive));
    ASSERT_TRUE(
        WriteImage(*io_, slot.span(), *file, sample_.record, sample_.layout, options_).ok());
  }
  const auto file = ValueOf(env_.Open("/d/image", OpenMode::kRead));
  TestSlot target(sample_.image.size());
  const int before = env_.calls();
  ASSERT_TRUE(ReadImage(*io_, *file, target.span(), sample_.record, sample_.layout, options_).ok());
  const int calls = env_.calls() - before;
  for (int n = 1; n <= calls; ++n) {
    env_.FailCall(n, EIO);
    const TransferResult result =
        ReadImage(*io_, *file, target.span(), sample_.record, sample_.layout, options_);
    EXPECT_TRUE(absl::IsDataLoss(result.status)) << ToString(result.status);
    EXPECT_EQ(result.faulty, FaultySide::kSource);
    EXPECT_EQ(io_->in_flight(), 0u);
  }
}

TEST_F(DirectCopyFaultsTest, DriveThatFillsUpInTheMiddle) {
  TestSlot slot(sample_.image.size(), sample_.image);
  const auto file = ValueOf(env_.Open("/d/image", OpenMode::kCreateExclusive));
  env_.SetBytesTotal(3 * kMiB);
  const TransferResult result =
      WriteImage(*io_, slot.span(), *file, sample_.record, sample_.layout, options_);
  EXPECT_TRUE(absl::IsResourceExhausted(result.status)) << ToString(result.status);
  EXPECT_EQ(result.faulty, FaultySide::kDestination);
}

TEST_F(DirectCopyFaultsTest, ABlockThatReadsBackOtherwiseIsFound) {
  TestSlot slot(sample_.image.size(), sample_.image);
  const auto inner = ValueOf(env_.Open("/d/image", OpenMode::kCreateExclusive));
  // A drive that loses a bit as soon as it is read.
  class LossyFile : public ForwardingFile {
   public:
    using ForwardingFile::ForwardingFile;
    absl::Status ReadAt(uint64_t offset, std::span<std::byte> out) override {
      HF_RETURN_IF_ERROR(ForwardingFile::ReadAt(offset, out));
      if (offset <= 2 * kMiB && offset + out.size() > 2 * kMiB) {
        out[2 * kMiB - offset] ^= std::byte{1};
      }
      return absl::OkStatus();
    }
  };
  LossyFile file(ValueOf(env_.Open("/d/image", OpenMode::kReadWrite)));
  ASSERT_TRUE(WriteImage(*io_, slot.span(), file, sample_.record, sample_.layout, options_).ok());
  const TransferResult result =
      VerifyFile(*io_, file, sample_.record, sample_.layout, ReadBack::kAll, options_);
  EXPECT_TRUE(absl::IsDataLoss(result.status)) << ToString(result.status);
  ASSERT_TRUE(result.bad_block.has_value());
  EXPECT_LE(result.bad_block->image_offset, 2 * kMiB);
}

TEST_F(DirectCopyFaultsTest, SlotCutShortInTheMiddle) {
  TestSlot slot(sample_.image.size(), sample_.image);
  WatchedFile file(ValueOf(env_.Open("/d/image", OpenMode::kCreateExclusive)), [&](int call) {
    if (call == 3) {
      slot.Cut(0);
    }
    return absl::OkStatus();
  });
  const TransferResult result =
      WriteImage(*io_, slot.span(), file, sample_.record, sample_.layout, options_);
  EXPECT_TRUE(absl::IsDataLoss(result.status)) << ToString(result.status);
  EXPECT_EQ(result.faulty, FaultySide::kSource);
  EXPECT_THAT(Message(result.status), HasSubstr("cut short"));
}

TEST_F(DirectCopyFaultsTest, SlotFilledCutShortInTheMiddle) {
  {
    TestSlot slot(sample_.image.size(), sample_.image);
    const auto file = ValueOf(env_.Open("/d/image", OpenMode::kCreateExclusive));
    ASSERT_TRUE(
        WriteImage(*io_, slot.span(), *file, sample_.record, sample_.layout, options_).ok());
  }
  TestSlot target(sample_.image.size());
  WatchedFile file(ValueOf(env_.Open("/d/image", OpenMode::kRead)), [&](int call) {
    if (call == 3) {
      target.Cut(0);
    }
    return absl::OkStatus();
  });
  const TransferResult result =
      ReadImage(*io_, file, target.span(), sample_.record, sample_.layout, options_);
  EXPECT_TRUE(absl::IsDataLoss(result.status)) << ToString(result.status);
  EXPECT_EQ(result.faulty, FaultySide::kDestination);
}

TEST_F(DirectCopyFaultsTest, CancelledBetweenPieces) {
  TestSlot slot(sample_.image.size(), sample_.image);
  TransferControl control;
  options_.control = &control;
  WatchedFile file(ValueOf(env_.Open("/d/image", OpenMode::kCreateExclusive)), [&](int call) {
    if (call == 2) {
      control.Cancel();
    }
    return absl::OkStatus();
  });
  const TransferResult result =
      WriteImage(*io_, slot.span(), file, sample_.record, sample_.layout, options_);
  EXPECT_TRUE(absl::IsCancelled(result.status)) << ToString(result.status);
  EXPECT_LT(result.bytes, sample_.image.size());
  EXPECT_EQ(io_->in_flight(), 0u);
}

// At a byte a second the first piece goes ahead, and the next one's turn comes in days.
TEST_F(DirectCopyFaultsTest, ALimitHoldsItBackUntilItIsLifted) {
  TestSlot slot(sample_.image.size(), sample_.image);
  Pacer pacer(1);
  TransferControl control;
  options_.pacer = &pacer;
  options_.control = &control;
  std::atomic<int> writes{0};
  WatchedFile file(ValueOf(env_.Open("/d/image", OpenMode::kCreateExclusive)), [&](int /*call*/) {
    ++writes;
    return absl::OkStatus();
  });
  TransferResult result;
  std::thread flush([&] {
    const auto io = ValueOf(CreateBlockIo({.mode = BlockIoMode::kThreads, .depth = 4}));
    result = WriteImage(*io, slot.span(), file, sample_.record, sample_.layout, options_);
  });
  EXPECT_TRUE(Eventually([&] { return writes == 1 && pacer.waiting() == 1; }));
  EXPECT_LE(control.bytes_done(), options_.piece_bytes);
  pacer.SetRate(0);
  flush.join();
  ASSERT_TRUE(result.ok()) << ToString(result.status);
  EXPECT_GT(writes, 1);
  EXPECT_TRUE(ValueOf(ReadFile(env_, "/d/image", kGiB)).substr(0, sample_.image.size()) ==
              sample_.image);
}

// Whatever it waits for when it is cancelled, the first piece or the last: nothing failed, and
// nothing was done.
TEST_F(DirectCopyFaultsTest, CancelledWhileALimitHoldsItBack) {
  TestSlot slot(sample_.image.size(), sample_.image);
  {
    const auto file = ValueOf(env_.Open("/d/source", OpenMode::kCreateExclusive));
    ASSERT_TRUE(
        WriteImage(*io_, slot.span(), *file, sample_.record, sample_.layout, options_).ok());
  }
  const auto pieces = static_cast<int>(sample_.image.size() / options_.piece_bytes + 1);
  for (const BlockOp op : {BlockOp::kWrite, BlockOp::kRead}) {
    for (int at = 0; at < pieces; ++at) {
      SCOPED_TRACE(absl::StrCat(op == BlockOp::kWrite ? "writing" : "reading", " piece ", at));
      Pacer pacer;
      TransferControl control;
      options_.pacer = &pacer;
      options_.control = &control;
      const std::string path = op == BlockOp::kRead ? "/d/source" : absl::StrCat("/d/", at);
      // With a depth of one, call n + 1 is that of piece n: its turn does not come.
      WatchedFile file(ValueOf(env_.Open(path, op == BlockOp::kRead ? OpenMode::kRead
                                                                    : OpenMode::kCreateExclusive)),
                       [&](int call) {
                         if (call == at) {
                           pacer.SetRate(1);
                           EXPECT_TRUE(pacer.Acquire(kGiB, nullptr));
                         }
                         return absl::OkStatus();
                       });
      if (at == 0) {
        pacer.SetRate(1);
        ASSERT_TRUE(pacer.Acquire(kGiB, nullptr));
      }
      TransferResult result;
      std::thread flush([&] {
        const auto io = ValueOf(CreateBlockIo({.mode = BlockIoMode::kThreads, .depth = 1}));
        result = op == BlockOp::kWrite
                     ? WriteImage(*io, slot.span(), file, sample_.record, sample_.layout, options_)
                     : ReadImage(*io, file, slot.span(), sample_.record, sample_.layout, options_);
      });
      EXPECT_TRUE(Eventually([&] { return pacer.waiting() == 1; }));
      control.Cancel();
      flush.join();
      EXPECT_TRUE(absl::IsCancelled(result.status)) << ToString(result.status);
      EXPECT_EQ(result.faulty, FaultySide::kNone);
    }
  }
}

// The watcher sees that a drive hangs, and where; nothing is lost when it answers at last.
TEST_F(DirectCopyFaultsTest, DriveThatHangsIsSeen) {
  TestSlot slot(sample_.image.size(), sample_.image);
  TransferControl control;
  options_.control = &control;
  const auto gate = std::make_shared<Gate>();
  HangingFile file(ValueOf(env_.Open("/d/image", OpenMode::kCreateExclusive)), gate, 2 * kMiB);
  TransferResult result;
  std::thread flush([&] {
    const auto io = ValueOf(CreateBlockIo({.mode = BlockIoMode::kThreads, .depth = 2}));
    result = WriteImage(*io, slot.span(), file, sample_.record, sample_.layout, options_);
  });
  gate->WaitForWaiting(2);
  EXPECT_TRUE(Eventually([&] { return control.bytes_done() == 2 * kMiB; }));
  const MonotonicTime stuck_since = control.last_progress();
  EXPECT_EQ(control.doing(), "write '/d/image'");
  gate->Open();
  flush.join();
  EXPECT_TRUE(result.ok()) << ToString(result.status);
  EXPECT_GT(control.last_progress(), stuck_since);
}

}  // namespace
}  // namespace holdfast
