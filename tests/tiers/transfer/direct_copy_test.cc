// Images straight from slots to files and back, by both kinds of BlockIo, direct and buffered.
#include "tiers/transfer/direct_copy.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <thread>

#include "base/errno_status.h"
#include "base/fault_env.h"
#include "base/units.h"
#include "tests/base/temporary_directory.h"
#include "tests/tiers/transfer/transfer_harness.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

struct Way {
  BlockIoMode mode;
  bool direct;
  size_t depth;
  size_t piece_bytes;
};

class DirectCopyTest : public ::testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    auto io = CreateBlockIo({.mode = GetParam().mode, .depth = GetParam().depth});
    if (absl::IsPermissionDenied(io.status())) {
      GTEST_SKIP() << "io_uring is not allowed here";
    }
    ASSERT_TRUE(io.ok()) << ToString(io.status());
    io_ = *std::move(io);
  }

  std::unique_ptr<File> Open(OpenMode mode) {
    auto file =
        ValueOf(Env::System()->Open(dir_.Path("image"), mode, {.direct = GetParam().direct}));
    options_.piece_bytes = GetParam().piece_bytes;
    if (GetParam().direct) {
      const DirectAlignment alignment = ValueOf(file->Alignment());
      options_.alignment = std::max(alignment.memory_bytes, alignment.offset_bytes);
    }
    return file;
  }

  // A file that holds the image, as a flush leaves it.
  void Publish(const SampleImage& sample) {
    const auto file = Open(OpenMode::kCreateExclusive);
    TestSlot slot(sample.image.size(), sample.image);
    const TransferResult result =
        WriteImage(*io_, slot.span(), *file, sample.record, sample.layout, options_);
    ASSERT_TRUE(result.ok()) << ToString(result.status);
    ASSERT_TRUE(file->Truncate(sample.image.size()).ok());
  }

  TemporaryDirectory dir_{"/var/tmp"};  // a disk's file system, where there is one
  std::unique_ptr<BlockIo> io_;
  DirectCopyOptions options_;
};

INSTANTIATE_TEST_SUITE_P(Ways, DirectCopyTest,
                         ::testing::Values(Way{BlockIoMode::kIoUring, true, 4, 4 * kMiB},
                                           Way{BlockIoMode::kIoUring, true, 32, kMiB},
                                           Way{BlockIoMode::kIoUring, true, 1, 64 * kKiB},
                                           Way{BlockIoMode::kIoUring, false, 4, kMiB},
                                           Way{BlockIoMode::kThreads, true, 4, kMiB},
                                           Way{BlockIoMode::kThreads, false, 3, 128 * kKiB}),
                         [](const auto& param) {
                           return std::string(param.param.mode == BlockIoMode::kIoUring
                                                  ? "ring"
                                                  : "threads") +
                                  (param.param.direct ? "Direct" : "Buffered") +
                                  std::to_string(param.param.depth) + "x" +
                                  std::to_string(param.param.piece_bytes / kKiB);
                         });

TEST_P(DirectCopyTest, ImageComesBackAsItWas) {
  const SampleImage sample = MakeTransferImage();
  const auto file = Open(OpenMode::kCreateExclusive);
  TestSlot slot(sample.image.size(), sample.image);
  TransferControl control;
  options_.control = &control;
  TransferResult result =
      WriteImage(*io_, slot.span(), *file, sample.record, sample.layout, options_);
  ASSERT_TRUE(result.ok()) << ToString(result.status);
  EXPECT_EQ(result.bytes, sample.image.size());
  EXPECT_EQ(control.bytes_done(), sample.image.size());
  EXPECT_EQ(control.doing(), "");
  EXPECT_GT(result.cpu_seconds, 0);
  EXPECT_EQ(io_->in_flight(), 0u);

  // Behind the image there is the padding of its last block, all zeros: nothing of what the slot
  // held before.
  const std::string written = ContentOf(dir_.Path("image"));
  EXPECT_EQ(written.size(), RoundUp(sample.image.size(), options_.alignment));
  EXPECT_TRUE(written.substr(0, sample.image.size()) == sample.image);
  EXPECT_EQ(written.find_first_not_of('\0', sample.image.size()), std::string::npos);

  ASSERT_TRUE(file->Truncate(sample.image.size()).ok());
  TestSlot target(sample.image.size());
  result = ReadImage(*io_, *file, target.span(), sample.record, sample.layout, options_);
  ASSERT_TRUE(result.ok()) << ToString(result.status);
  EXPECT_EQ(result.bytes, sample.image.size());
  EXPECT_TRUE(target.text(sample.image.size()) == sample.image);
  EXPECT_TRUE(target.RestIsUntouched(sample.image.size()));
}

TEST_P(DirectCopyTest, ImagesOfEveryLengthAroundABlock) {
  for (const uint64_t elements : {1u, 511u, 512u, 513u, 4095u, 4096u, 4097u}) {
    const SampleImage sample =
        MakeSampleImage({Whole("w", DType::kU8, {elements})}, SampleRecord());
    Publish(sample);
    EXPECT_TRUE(ContentOf(dir_.Path("image")) == sample.image) << elements;
    TestSlot target(sample.image.size());
    const auto file = Open(OpenMode::kRead);
    const TransferResult result =
        ReadImage(*io_, *file, target.span(), sample.record, sample.layout, options_);
    EXPECT_TRUE(result.ok()) << elements << ToString(result.status);
    EXPECT_TRUE(target.text(sample.image.size()) == sample.image) << elements;
    EXPECT_TRUE(target.RestIsUntouched(sample.image.size())) << elements;
    ASSERT_TRUE(Env::System()->Unlink(dir_.Path("image")).ok());
  }
}

TEST_P(DirectCopyTest, FilesOfRemovedCopiesAreOverwritten) {
  const SampleImage longer = MakeTransferImage(7 * kMiB);
  const SampleImage sample = MakeTransferImage();
  Publish(longer);
  const auto file = Open(OpenMode::kReadWrite);
  TestSlot slot(sample.image.size(), sample.image);
  const TransferResult result =
      WriteImage(*io_, slot.span(), *file, sample.record, sample.layout, options_);
  ASSERT_TRUE(result.ok()) << ToString(result.status);
  ASSERT_TRUE(file->Truncate(sample.image.size()).ok());
  EXPECT_TRUE(ContentOf(dir_.Path("image")) == sample.image);
}

TEST_P(DirectCopyTest, FlippedBitInMemoryIsTheSources) {
  const SampleImage sample = MakeTransferImage();
  const auto file = Open(OpenMode::kCreateExclusive);
  // In the header, in a big slice's second block, in a small slice, in the very last byte.
  const Slice& big = *std::find_if(sample.layout.slices.begin(), sample.layout.slices.end(),
                                   [](const Slice& s) { return s.name == "big"; });
  const uint64_t places[] = {17, big.image_offset + kMiB + 5, sample.layout.header_bytes + 3,
                             sample.image.size() - 1};
  for (const uint64_t place : places) {
    TestSlot slot(sample.image.size(), sample.image);
    slot.data()[place] ^= std::byte{4};
    const TransferResult result =
        WriteImage(*io_, slot.span(), *file, sample.record, sample.layout, options_);
    EXPECT_TRUE(absl::IsDataLoss(result.status)) << ToString(result.status);
    EXPECT_EQ(result.faulty, FaultySide::kSource);
    ASSERT_TRUE(result.bad_block.has_value());
    EXPECT_LE(result.bad_block->image_offset, place);
    EXPECT_GT(result.bad_block->image_offset + result.bad_block->bytes, place);
    EXPECT_THAT(Message(result.status), HasSubstr("memory"));
    EXPECT_THAT(Message(result.status), HasSubstr(result.bad_block->slice));
    EXPECT_EQ(io_->in_flight(), 0u);
  }
}

TEST_P(DirectCopyTest, FlippedBitInTheFileIsFoundOnLoading) {
  const SampleImage sample = MakeTransferImage();
  Publish(sample);
  for (const uint64_t place : {uint64_t{9}, uint64_t{2 * kMiB + 1}, sample.image.size() - 1}) {
    const auto buffered = ValueOf(Env::System()->Open(dir_.Path("image"), OpenMode::kReadWrite));
    FlipBitIn(*buffered, place);
    ASSERT_TRUE(buffered->SyncData().ok());
    const auto file = Open(OpenMode::kRead);
    TestSlot target(sample.image.size());
    TransferResult result =
        ReadImage(*io_, *file, target.span(), sample.record, sample.layout, options_);
    EXPECT_TRUE(absl::IsDataLoss(result.status)) << ToString(result.status);
    EXPECT_EQ(result.faulty, FaultySide::kSource);
    ASSERT_TRUE(result.bad_block.has_value());
    EXPECT_LE(result.bad_block->image_offset, place);
    EXPECT_THAT(Message(result.status), HasSubstr(dir_.Path("image")));

    result = VerifyFile(*io_, *file, sample.record, sample.layout, ReadBack::kAll, options_);
    EXPECT_TRUE(absl::IsDataLoss(result.status)) << ToString(result.status);
    EXPECT_EQ(result.faulty, FaultySide::kSource);
    FlipBitIn(*buffered, place);
    ASSERT_TRUE(buffered->SyncData().ok());
    result = VerifyFile(*io_, *file, sample.record, sample.layout, ReadBack::kAll, options_);
    EXPECT_TRUE(result.ok()) << ToString(result.status);
    EXPECT_EQ(result.bytes, sample.image.size());
  }
}

// Bad blocks are a fact, whatever is behind them: here, bytes that nobody can read.
TEST_P(DirectCopyTest, BadBlocksAreToldThoughReadingEndsBeforeTheEnd) {
  const SampleImage sample = MakeTransferImage();
  Publish(sample);
  FlipBitIn(*ValueOf(Env::System()->Open(dir_.Path("image"), OpenMode::kReadWrite)), 9);
  const auto file = Open(OpenMode::kReadWrite);
  ASSERT_TRUE(file->Truncate(sample.image.size() - 5000).ok());
  options_.count_bad = true;
  options_.piece_bytes = kMiB;
  // One after the other, so that the end is read last.
  const auto io = ValueOf(CreateBlockIo({.mode = GetParam().mode, .depth = 1}));
  const TransferResult result =
      VerifyFile(*io, *file, sample.record, sample.layout, ReadBack::kAll, options_);
  EXPECT_TRUE(absl::IsDataLoss(result.status)) << ToString(result.status);
  EXPECT_FALSE(IsErrno(result.status));
  EXPECT_EQ(result.faulty, FaultySide::kSource);
  ASSERT_TRUE(result.bad_block.has_value());
  EXPECT_EQ(result.bad_block->image_offset, 0u);
  EXPECT_THAT(Message(result.status), HasSubstr("and then: "));
}

TEST_P(DirectCopyTest, FilesOfAnotherLengthAreRefused) {
  const SampleImage sample = MakeTransferImage();
  Publish(sample);
  TestSlot target(sample.image.size());
  for (const int64_t difference : {-1, -5000, 1, 5000}) {
    const auto file = Open(OpenMode::kReadWrite);
    ASSERT_TRUE(file->Truncate(sample.image.size() + static_cast<uint64_t>(difference)).ok());
    TransferResult result =
        ReadImage(*io_, *file, target.span(), sample.record, sample.layout, options_);
    EXPECT_TRUE(absl::IsDataLoss(result.status)) << ToString(result.status);
    EXPECT_EQ(result.faulty, FaultySide::kSource);
    if (difference < 0) {
      result = VerifyFile(*io_, *file, sample.record, sample.layout, ReadBack::kAll, options_);
      EXPECT_FALSE(result.ok());
      EXPECT_EQ(result.faulty, FaultySide::kSource);
    }
  }
}

TEST_P(DirectCopyTest, SamplesReadLittleAndFindWhatTheyHit) {
  const SampleImage sample = MakeTransferImage();
  Publish(sample);
  const auto file = Open(OpenMode::kRead);
  uint64_t bytes = 0;
  for (options_.sample_seed = 1; options_.sample_seed <= 20; ++options_.sample_seed) {
    const TransferResult result =
        VerifyFile(*io_, *file, sample.record, sample.layout, ReadBack::kSample, options_);
    ASSERT_TRUE(result.ok()) << ToString(result.status);
    EXPECT_GT(result.bytes, 0u);
    bytes += result.bytes;
  }
  EXPECT_LT(bytes, 20 * sample.image.size() / 2);

  // Over many seeds every block has its turn.
  FlipBitIn(*ValueOf(Env::System()->Open(dir_.Path("image"), OpenMode::kReadWrite)), 3 * kMiB);
  int found = 0;
  for (options_.sample_seed = 1; options_.sample_seed <= 200; ++options_.sample_seed) {
    found += VerifyFile(*io_, *file, sample.record, sample.layout, ReadBack::kSample, options_).ok()
                 ? 0
                 : 1;
  }
  EXPECT_GT(found, 0);
  EXPECT_LT(found, 200);
}

TEST_P(DirectCopyTest, CancelledInTheMiddle) {
  const SampleImage sample = MakeTransferImage();
  const auto file = Open(OpenMode::kCreateExclusive);
  TestSlot slot(sample.image.size(), sample.image);
  TransferControl control;
  options_.control = &control;
  control.Cancel();
  TransferResult result =
      WriteImage(*io_, slot.span(), *file, sample.record, sample.layout, options_);
  EXPECT_TRUE(absl::IsCancelled(result.status)) << ToString(result.status);
  EXPECT_EQ(result.faulty, FaultySide::kNone);
  EXPECT_EQ(io_->in_flight(), 0u);

  // By somebody else, while it waits for its share of the drive.
  TransferControl second;
  Pacer pacer(kMiB);
  options_.control = &second;
  options_.pacer = &pacer;
  std::thread canceller([&] {
    EXPECT_TRUE(Eventually([&] { return second.bytes_done() > 0 || second.doing() != ""; }));
    second.Cancel();
  });
  result = WriteImage(*io_, slot.span(), *file, sample.record, sample.layout, options_);
  canceller.join();
  EXPECT_TRUE(absl::IsCancelled(result.status)) << ToString(result.status);
  EXPECT_EQ(io_->in_flight(), 0u);
}

TEST_P(DirectCopyTest, SlotCutShortIsAnErrorAndNoSignal) {
  const SampleImage sample = MakeTransferImage();
  const auto file = Open(OpenMode::kCreateExclusive);
  {
    TestSlot slot(sample.image.size(), sample.image);
    slot.Cut(kMiB);
    const TransferResult result =
        WriteImage(*io_, slot.span(), *file, sample.record, sample.layout, options_);
    EXPECT_TRUE(absl::IsDataLoss(result.status)) << ToString(result.status);
    EXPECT_THAT(Message(result.status), HasSubstr("cut short"));
    EXPECT_EQ(result.faulty, FaultySide::kSource);
    EXPECT_EQ(io_->in_flight(), 0u);
  }
  ASSERT_TRUE(Env::System()->Unlink(dir_.Path("image")).ok());
  Publish(sample);
  TestSlot target(sample.image.size());
  target.Cut(kMiB);
  const auto source = Open(OpenMode::kRead);
  const TransferResult result =
      ReadImage(*io_, *source, target.span(), sample.record, sample.layout, options_);
  EXPECT_TRUE(absl::IsDataLoss(result.status)) << ToString(result.status);
  EXPECT_EQ(result.faulty, FaultySide::kDestination);
}

TEST_P(DirectCopyTest, WhatCannotBeMeantIsRefused) {
  const SampleImage sample = MakeTransferImage();
  const SampleImage other = MakeTransferImage(kMiB);
  const auto file = Open(OpenMode::kCreateExclusive);
  TestSlot slot(sample.image.size(), sample.image);
  const auto write = [&](const Layout& layout, const DirectCopyOptions& options,
                         std::span<std::byte> memory) {
    return WriteImage(*io_, memory, *file, sample.record, layout, options).status;
  };
  EXPECT_TRUE(absl::IsInvalidArgument(write(other.layout, options_, slot.span())));
  EXPECT_TRUE(absl::IsInvalidArgument(
      write(sample.layout, options_, slot.span().first(sample.image.size() - 1))));
  DirectCopyOptions options = options_;
  options.alignment = 3;
  EXPECT_TRUE(absl::IsInvalidArgument(write(sample.layout, options, slot.span())));
  options = options_;
  options.piece_bytes = 100'000;
  EXPECT_TRUE(absl::IsInvalidArgument(write(sample.layout, options, slot.span())));
}

}  // namespace
}  // namespace holdfast
