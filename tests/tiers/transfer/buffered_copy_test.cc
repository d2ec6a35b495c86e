// Images through a CopyPool: from and to memory and files, good ones, bad ones, over file systems
// that fail.
#include "tiers/transfer/buffered_copy.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/fault_env.h"
#include "base/units.h"
#include "tests/base/temporary_directory.h"
#include "tests/tiers/transfer/transfer_harness.h"
#include "tiers/transfer/assembled_file.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

std::shared_ptr<RevocableMemory> MemoryOf(TestSlot& slot) {
  return std::make_shared<RevocableMemory>(slot.data(), slot.span().size());
}

uint64_t ObjectBytes(const Layout& layout) {
  uint64_t bytes = 0;
  for (const Slice& slice : layout.slices) {
    bytes += slice.kind == SliceKind::kTensor ? 0 : slice.bytes;
  }
  return bytes;
}

class BufferedCopyTest : public ::testing::TestWithParam<size_t> {
 protected:
  void SetUp() override {
    ASSERT_TRUE(env_.CreateDirectory("/r", 0750).ok());
    pool_ = ValueOf(CopyPool::Start({.threads = 3, .piece_bytes = GetParam()}));
    image_->record = sample_.record;
    image_->layout = sample_.layout;
    spec_.image = image_;
  }

  std::shared_ptr<File> Open(const std::string& path, OpenMode mode) {
    return ValueOf(env_.Open(path, mode));
  }
  std::string Content(const std::string& path) { return ValueOf(ReadFile(env_, path, kGiB)); }
  void Publish(const std::string& path) {
    ASSERT_TRUE(WriteFileAtomically(env_, path, sample_.image).ok());
  }

  FaultEnv env_;
  const SampleImage sample_ = MakeTransferImage();
  const std::shared_ptr<RecordAndLayout> image_ = std::make_shared<RecordAndLayout>();
  std::unique_ptr<CopyPool> pool_;
  BufferedCopySpec spec_;
};

INSTANTIATE_TEST_SUITE_P(Pieces, BufferedCopyTest,
                         ::testing::Values(64 * kKiB, kMiB + 4096, 4 * kMiB),
                         ::testing::PrintToStringParamName());

TEST_P(BufferedCopyTest, MemoryToFileToMemory) {
  TestSlot slot(sample_.image.size(), sample_.image);
  spec_.control = std::make_shared<TransferControl>();
  spec_.from_memory = MemoryOf(slot);
  spec_.to_file = Open("/r/image", OpenMode::kCreateExclusive);
  TransferResult result = pool_->Copy(spec_);
  ASSERT_TRUE(result.ok()) << ToString(result.status);
  EXPECT_EQ(result.bytes, sample_.image.size());
  EXPECT_EQ(spec_.control->bytes_done(), sample_.image.size());
  EXPECT_GT(result.cpu_seconds, 0);
  EXPECT_TRUE(Content("/r/image") == sample_.image);

  TestSlot target(sample_.image.size());
  spec_.from_memory = nullptr;
  spec_.from_file = Open("/r/image", OpenMode::kRead);
  spec_.to_file = nullptr;
  spec_.to_memory = MemoryOf(target);
  result = pool_->Copy(spec_);
  ASSERT_TRUE(result.ok()) << ToString(result.status);
  EXPECT_TRUE(target.text(sample_.image.size()) == sample_.image);
  EXPECT_TRUE(target.RestIsUntouched(sample_.image.size()));
}

// Rank 1 of two replicas has half of the tensors in its file, rank 0 the others.
class SharedCopyTest : public BufferedCopyTest {
 protected:
  void SetUp() override {
    BufferedCopyTest::SetUp();
    const size_t tensors = TensorsOf(sample_.layout).slices.size();
    for (size_t i = 0; i < tensors; ++i) {
      owners_.push_back(i % 2 == 0 ? 1 : 0);
    }
    own_ = ValueOf(PlanPart(*image_, owners_, {})).value();
    RecordAndLayout other = *image_;
    other.record.id.rank = 0;
    other_ = ValueOf(PlanPart(other, owners_, {})).value();
    TestSlot slot(sample_.image.size(), sample_.image);
    ASSERT_TRUE(Write(slot, own_, "/r/own").ok());
    ASSERT_TRUE(Write(slot, other_, "/r/other").ok());
  }

  TransferResult Write(TestSlot& slot, const PartImage& part, const std::string& path) {
    BufferedCopySpec spec;
    spec.from_memory = MemoryOf(slot);
    spec.to_file = Open(path, OpenMode::kCreateExclusive);
    spec.image = std::make_shared<RecordAndLayout>(part.file);
    spec.gather = std::make_shared<ImageMap>(part.from_whole);
    return pool_->Copy(spec);
  }
  TransferResult Read(TestSlot& target) {
    const RecordAndLayout own{own_.record, sample_.layout};
    const RecordAndLayout other{other_.record, sample_.layout};
    const auto file = std::make_shared<AssembledFile>(
        ValueOf(WholeMap(own, {{&other, "/r/other"}})),
        std::vector<std::shared_ptr<File>>{Open("/r/own", OpenMode::kRead),
                                           Open("/r/other", OpenMode::kRead)});
    spec_.from_file = file;
    spec_.source_name = [file](uint64_t offset) { return file->PathAt(offset); };
    spec_.to_memory = MemoryOf(target);
    return pool_->Copy(spec_);
  }

  std::vector<Rank> owners_;
  PartImage own_;
  PartImage other_;
};

INSTANTIATE_TEST_SUITE_P(Pieces, SharedCopyTest,
                         ::testing::Values(64 * kKiB, kMiB + 4096, 4 * kMiB),
                         ::testing::PrintToStringParamName());

TEST_P(SharedCopyTest, GatheredIntoFilesAndPutTogetherAgain) {
  EXPECT_EQ(Content("/r/own").size(), FileBytes(own_.record));
  EXPECT_EQ(Content("/r/own").size() + Content("/r/other").size(),
            sample_.image.size() - sample_.layout.header_bytes + own_.record.kept->header_bytes +
                other_.record.kept->header_bytes + ObjectBytes(sample_.layout));
  TestSlot target(sample_.image.size());
  const TransferResult result = Read(target);
  ASSERT_TRUE(result.ok()) << ToString(result.status);
  EXPECT_TRUE(target.text(sample_.image.size()) == sample_.image);
  EXPECT_TRUE(target.RestIsUntouched(sample_.image.size()));
}

TEST_P(SharedCopyTest, ABadBlockIsFoundOnBothWaysAndItsFileIsNamed) {
  for (const bool in_own : {true, false}) {
    const std::string path = in_own ? "/r/own" : "/r/other";
    const auto file = Open(path, OpenMode::kReadWrite);
    const uint64_t last = ValueOf(file->Info()).bytes - 1;
    FlipBitIn(*file, last);
    TestSlot target(sample_.image.size());
    const TransferResult result = Read(target);
    EXPECT_TRUE(absl::IsDataLoss(result.status)) << ToString(result.status);
    EXPECT_EQ(result.faulty, FaultySide::kSource);
    EXPECT_THAT(ToString(result.status), HasSubstr(absl::StrCat("'", path, "' of ")));
    FlipBitIn(*file, last);
  }
  // In memory, where it is of a slice that stays.
  std::string bad = sample_.image;
  bad[own_.from_whole.runs.back().source_offset] ^= 1;
  TestSlot slot(bad.size(), bad);
  const TransferResult written = Write(slot, own_, "/r/again");
  EXPECT_TRUE(absl::IsDataLoss(written.status)) << ToString(written.status);
  EXPECT_EQ(written.faulty, FaultySide::kSource);
}

TEST_P(SharedCopyTest, WhatIsGatheredMustBeThere) {
  const auto written = [&](const std::function<void(ImageMap&)>& change) {
    TestSlot slot(sample_.image.size(), sample_.image);
    PartImage part = own_;
    change(part.from_whole);
    static int files = 0;
    return Write(slot, part, absl::StrCat("/r/refused", ++files)).status;
  };
  EXPECT_TRUE(absl::IsInvalidArgument(
      written([](ImageMap& m) { m.runs.back().source_offset = uint64_t{1} << 40; })));
  EXPECT_TRUE(absl::IsInvalidArgument(written([](ImageMap& m) { m.runs.back().source = 1; })));
  EXPECT_TRUE(absl::IsInvalidArgument(written([](ImageMap& m) { m.runs.pop_back(); })));
  EXPECT_TRUE(absl::IsInvalidArgument(written([](ImageMap& m) { ++m.image_bytes; })));
}

TEST_P(SharedCopyTest, WhatAFileHasIsScatteredToItsPlacesAndTold) {
  const RecordAndLayout own{own_.record, sample_.layout};
  const ImageMap places = PlacesInImage(own);
  TestSlot target(sample_.image.size());
  BufferedCopySpec spec;
  spec.from_file = Open("/r/own", OpenMode::kRead);
  spec.to_memory = MemoryOf(target);
  spec.image = std::make_shared<RecordAndLayout>(FileImage(own));
  spec.scatter = std::make_shared<ImageMap>(places);
  std::mutex mutex;
  std::map<uint64_t, uint64_t> told;
  spec.arrived = [&](uint64_t offset, uint64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    EXPECT_TRUE(told.emplace(offset, bytes).second) << offset;
  };
  const TransferResult result = pool_->Copy(spec);
  ASSERT_TRUE(result.ok()) << ToString(result.status);
  // Each byte of the file was told of once.
  uint64_t next = 0;
  for (const auto& [offset, bytes] : told) {
    EXPECT_EQ(offset, next);
    next += bytes;
  }
  EXPECT_EQ(next, FileBytes(own_.record));
  // What it keeps lies where it belongs, and nothing anywhere else.
  std::string expected(sample_.image.size(), target.text(sample_.image.size())[0]);
  for (const ImageRun& run : places.runs) {
    expected.replace(run.source_offset, run.bytes, sample_.image, run.source_offset, run.bytes);
  }
  EXPECT_TRUE(target.text(sample_.image.size()) == expected);

  ImageMap beyond = places;
  beyond.runs.back().source_offset = uint64_t{1} << 40;
  spec.scatter = std::make_shared<ImageMap>(beyond);
  EXPECT_TRUE(absl::IsInvalidArgument(pool_->Copy(spec).status));
}

TEST_P(SharedCopyTest, AFileThatWasCutIsNamed) {
  ASSERT_TRUE(Open("/r/other", OpenMode::kReadWrite)->Truncate(5000).ok());
  TestSlot target(sample_.image.size());
  const TransferResult result = Read(target);
  EXPECT_TRUE(absl::IsOutOfRange(result.status)) << ToString(result.status);
  EXPECT_EQ(result.faulty, FaultySide::kSource);
  EXPECT_THAT(ToString(result.status), HasSubstr("/r/other"));
}

TEST_P(BufferedCopyTest, FileToFile) {
  Publish("/r/source");
  spec_.from_file = Open("/r/source", OpenMode::kRead);
  spec_.to_file = Open("/r/image", OpenMode::kCreateExclusive);
  const TransferResult result = pool_->Copy(spec_);
  ASSERT_TRUE(result.ok()) << ToString(result.status);
  EXPECT_TRUE(Content("/r/image") == sample_.image);
}

TEST_P(BufferedCopyTest, DirectFiles) {
  const TemporaryDirectory dir("/var/tmp");
  TestSlot slot(sample_.image.size(), sample_.image);
  const std::shared_ptr<File> file =
      ValueOf(Env::System()->Open(dir.Path("image"), OpenMode::kCreateExclusive, {.direct = true}));
  const DirectAlignment alignment = ValueOf(file->Alignment());
  spec_.from_memory = MemoryOf(slot);
  spec_.to_file = file;
  spec_.to_alignment = std::max(alignment.memory_bytes, alignment.offset_bytes);
  TransferResult result = pool_->Copy(spec_);
  ASSERT_TRUE(result.ok()) << ToString(result.status);
  const std::string written = ContentOf(dir.Path("image"));
  EXPECT_TRUE(written.substr(0, sample_.image.size()) == sample_.image);
  EXPECT_EQ(written.find_first_not_of('\0', sample_.image.size()), std::string::npos);
  ASSERT_TRUE(file->Truncate(sample_.image.size()).ok());

  BufferedCopySpec back;
  back.image = image_;
  back.from_file = file;
  back.from_alignment = spec_.to_alignment;
  back.to_file = Open("/r/image", OpenMode::kCreateExclusive);
  result = pool_->Copy(back);
  ASSERT_TRUE(result.ok()) << ToString(result.status);
  EXPECT_TRUE(Content("/r/image") == sample_.image);
}

TEST_P(BufferedCopyTest, FlippedBitsAreTheSources) {
  for (const uint64_t place : {uint64_t{3}, 2 * kMiB + 1, sample_.image.size() - 1}) {
    TestSlot slot(sample_.image.size(), sample_.image);
    slot.data()[place] ^= std::byte{2};
    BufferedCopySpec spec = spec_;
    spec.from_memory = MemoryOf(slot);
    spec.to_file = Open("/r/" + std::to_string(place), OpenMode::kCreateExclusive);
    TransferResult result = pool_->Copy(spec);
    EXPECT_TRUE(absl::IsDataLoss(result.status)) << ToString(result.status);
    EXPECT_EQ(result.faulty, FaultySide::kSource);
    ASSERT_TRUE(result.bad_block.has_value());
    EXPECT_LE(result.bad_block->image_offset, place);
    EXPECT_GT(result.bad_block->image_offset + result.bad_block->bytes, place);

    const std::string path = "/r/bad" + std::to_string(place);
    Publish(path);
    ASSERT_TRUE(env_.FlipBit(path, place, 1).ok());
    for (const bool to_memory : {false, true}) {
      TestSlot target(sample_.image.size());
      spec = spec_;
      spec.from_file = Open(path, OpenMode::kRead);
      if (to_memory) {
        spec.to_memory = MemoryOf(target);
      } else {
        spec.to_file = Open(path + ".copy", OpenMode::kCreateExclusive);
      }
      result = pool_->Copy(spec);
      EXPECT_TRUE(absl::IsDataLoss(result.status)) << ToString(result.status);
      EXPECT_EQ(result.faulty, FaultySide::kSource);
      EXPECT_THAT(Message(result.status), HasSubstr(path));
    }
  }
}

TEST_P(BufferedCopyTest, EveryCallThatFails) {
  TestSlot slot(sample_.image.size(), sample_.image);
  spec_.from_memory = MemoryOf(slot);
  int failed = 0;
  for (int n = 1;; ++n) {
    const std::string path = "/r/" + std::to_string(n);
    spec_.to_file = Open(path, OpenMode::kCreateExclusive);
    const int before = env_.calls();
    env_.FailCall(n, ENOSPC);
    const TransferResult result = pool_->Copy(spec_);
    if (env_.calls() - before < n) {
      EXPECT_TRUE(result.ok()) << ToString(result.status);
      break;
    }
    ++failed;
    EXPECT_TRUE(absl::IsResourceExhausted(result.status)) << ToString(result.status);
    EXPECT_EQ(result.faulty, FaultySide::kDestination);
    ASSERT_TRUE(env_.Unlink(path).ok());
  }
  EXPECT_GE(failed, 2);
}

TEST_P(BufferedCopyTest, ReadsThatFail) {
  Publish("/r/source");
  TestSlot target(sample_.image.size());
  spec_.to_memory = MemoryOf(target);
  spec_.from_file = Open("/r/source", OpenMode::kRead);
  for (int n = 1; n <= 3; ++n) {
    env_.FailCall(n, ESTALE);
    const TransferResult result = pool_->Copy(spec_);
    EXPECT_FALSE(result.ok());
    EXPECT_EQ(result.faulty, FaultySide::kSource);
  }
}

TEST_P(BufferedCopyTest, FilesOfAnotherLengthAreRefused) {
  TestSlot target(sample_.image.size());
  spec_.to_memory = MemoryOf(target);
  for (const std::string& content : {sample_.image + "x", sample_.image.substr(1)}) {
    ASSERT_TRUE(WriteFileAtomically(env_, "/r/image", content).ok());
    spec_.from_file = Open("/r/image", OpenMode::kRead);
    const TransferResult result = pool_->Copy(spec_);
    EXPECT_TRUE(absl::IsDataLoss(result.status)) << ToString(result.status);
    EXPECT_EQ(result.faulty, FaultySide::kSource);
  }
}

TEST_P(BufferedCopyTest, SlotCutShortIsAnErrorAndNoSignal) {
  TestSlot slot(sample_.image.size(), sample_.image);
  slot.Cut(kMiB);
  spec_.from_memory = MemoryOf(slot);
  spec_.to_file = Open("/r/image", OpenMode::kCreateExclusive);
  TransferResult result = pool_->Copy(spec_);
  EXPECT_TRUE(absl::IsDataLoss(result.status)) << ToString(result.status);
  EXPECT_THAT(Message(result.status), HasSubstr("cut short"));
  EXPECT_EQ(result.faulty, FaultySide::kSource);

  Publish("/r/source");
  TestSlot target(sample_.image.size());
  target.Cut(kMiB);
  spec_ = {};
  spec_.image = image_;
  spec_.from_file = Open("/r/source", OpenMode::kRead);
  spec_.to_memory = MemoryOf(target);
  result = pool_->Copy(spec_);
  EXPECT_TRUE(absl::IsDataLoss(result.status)) << ToString(result.status);
  EXPECT_EQ(result.faulty, FaultySide::kDestination);
}

// At a byte a second the first part goes ahead, and the next one's turn comes in a day.
TEST_P(BufferedCopyTest, ALimitHoldsItBackUntilItIsLifted) {
  TestSlot slot(sample_.image.size(), sample_.image);
  for (const bool lifted : {true, false}) {
    const std::string path = lifted ? "/r/lifted" : "/r/cancelled";
    pool_ = ValueOf(CopyPool::Start({.threads = 2, .piece_bytes = GetParam()}));
    spec_.pacer = std::make_shared<Pacer>(1);
    spec_.control = std::make_shared<TransferControl>();
    spec_.from_memory = MemoryOf(slot);
    std::atomic<int> writes{0};
    spec_.to_file = std::make_shared<WatchedFile>(
        ValueOf(env_.Open(path, OpenMode::kCreateExclusive)), [&](int /*call*/) {
          ++writes;
          return absl::OkStatus();
        });
    TransferResult result;
    std::thread copy([&] { result = pool_->Copy(spec_); });
    const size_t held = std::min<size_t>(2, (sample_.image.size() - 1) / GetParam() + 1);
    EXPECT_TRUE(Eventually([&] { return writes == 1 && spec_.pacer->waiting() == held; }));
    const uint64_t moved = spec_.control->bytes_done();
    EXPECT_GT(moved, 0u);
    EXPECT_LT(moved, sample_.image.size());
    lifted ? spec_.pacer->SetRate(0) : spec_.control->Cancel();
    copy.join();
    if (lifted) {
      ASSERT_TRUE(result.ok()) << ToString(result.status);
      EXPECT_GT(writes, 1);
      EXPECT_TRUE(Content(path) == sample_.image);
    } else {
      EXPECT_TRUE(absl::IsCancelled(result.status)) << ToString(result.status);
      EXPECT_EQ(writes, 1);
      EXPECT_EQ(spec_.control->bytes_done(), moved);
    }
  }
}

// For files that take whole frames only, whatever the pool's pieces are.
TEST_P(BufferedCopyTest, PiecesAreWholeUnits) {
  TestSlot slot(sample_.image.size(), sample_.image);
  std::mutex mutex;
  std::map<uint64_t, size_t> writes;
  class Noted : public ForwardingFile {
   public:
    Noted(std::unique_ptr<File> file, std::function<void(uint64_t, size_t)> note)
        : ForwardingFile(std::move(file)), note_(std::move(note)) {}
    absl::Status WriteAt(uint64_t offset, std::span<const std::byte> data) override {
      note_(offset, data.size());
      return ForwardingFile::WriteAt(offset, data);
    }

   private:
    const std::function<void(uint64_t, size_t)> note_;
  };
  spec_.from_memory = MemoryOf(slot);
  spec_.to_file = std::make_shared<Noted>(
      ValueOf(env_.Open("/r/units", OpenMode::kCreateExclusive)), [&](uint64_t at, size_t bytes) {
        const std::lock_guard lock(mutex);
        EXPECT_TRUE(writes.emplace(at, bytes).second);
      });
  spec_.piece_unit = kMiB;
  const TransferResult result = pool_->Copy(spec_);
  ASSERT_TRUE(result.ok()) << ToString(result.status);
  EXPECT_TRUE(Content("/r/units") == sample_.image);
  for (const auto& [at, bytes] : writes) {
    EXPECT_EQ(at % kMiB, 0u);
    EXPECT_EQ(bytes, std::min<uint64_t>(kMiB, sample_.image.size() - at));
  }
  spec_.piece_unit = 3;
  EXPECT_TRUE(absl::IsInvalidArgument(pool_->Copy(spec_).status));
}

// What is written behind a piece that stands still is kept in memory: no more than was allowed for.
TEST_P(BufferedCopyTest, NobodyRunsAheadFurtherThanMayBe) {
  const SampleImage large = MakeTransferImage(40 * kMiB);
  const auto image = std::make_shared<RecordAndLayout>();
  image->record = large.record;
  image->layout = large.layout;
  const uint64_t piece = RoundUp(GetParam(), kMiB);
  TestSlot slot(large.image.size(), large.image);
  const auto gate = std::make_shared<Gate>();
  std::atomic<uint64_t> furthest{0};
  class FirstHangs : public ForwardingFile {
   public:
    FirstHangs(std::unique_ptr<File> file, std::shared_ptr<Gate> gate,
               std::atomic<uint64_t>& furthest)
        : ForwardingFile(std::move(file)), gate_(std::move(gate)), furthest_(furthest) {}
    absl::Status WriteAt(uint64_t offset, std::span<const std::byte> data) override {
      if (offset == 0) {
        gate_->Pass();
      }
      for (uint64_t seen = furthest_; seen < offset + data.size();) {
        furthest_.compare_exchange_weak(seen, offset + data.size());
      }
      return ForwardingFile::WriteAt(offset, data);
    }

   private:
    const std::shared_ptr<Gate> gate_;
    std::atomic<uint64_t>& furthest_;
  };
  spec_.image = image;
  spec_.from_memory = MemoryOf(slot);
  spec_.to_file = std::make_shared<FirstHangs>(
      ValueOf(env_.Open("/r/ahead", OpenMode::kCreateExclusive)), gate, furthest);
  spec_.piece_unit = kMiB;
  spec_.ahead_max = 3 * piece;
  std::thread copy([&, spec = spec_] {
    const TransferResult result = pool_->Copy(spec);
    EXPECT_TRUE(result.ok()) << ToString(result.status);
  });
  gate->WaitForWaiting(1);
  EXPECT_TRUE(Eventually([&] { return furthest == 3 * piece; }));
  // Whoever is free by now does something else, and would have begun the next piece before that.
  BufferedCopySpec other;
  other.image = image_;
  TestSlot small(sample_.image.size(), sample_.image);
  other.from_memory = MemoryOf(small);
  other.to_file = Open("/r/other", OpenMode::kCreateExclusive);
  EXPECT_TRUE(pool_->Copy(other).ok());
  EXPECT_EQ(furthest, 3 * piece);
  gate->Open();
  copy.join();
  EXPECT_TRUE(Content("/r/ahead") == large.image);
}

TEST_P(BufferedCopyTest, NoMoreThreadsThanMayBeAreAtWorkForIt) {
  TestSlot slot(sample_.image.size(), sample_.image);
  std::atomic<int> now{0};
  std::atomic<int> most{0};
  class Counted : public ForwardingFile {
   public:
    Counted(std::unique_ptr<File> file, std::atomic<int>& now, std::atomic<int>& most)
        : ForwardingFile(std::move(file)), now_(now), most_(most) {}
    absl::Status WriteAt(uint64_t offset, std::span<const std::byte> data) override {
      const int at_once = ++now_;
      for (int seen = most_; seen < at_once;) {
        most_.compare_exchange_weak(seen, at_once);
      }
      const absl::Status status = ForwardingFile::WriteAt(offset, data);
      --now_;
      return status;
    }

   private:
    std::atomic<int>& now_;
    std::atomic<int>& most_;
  };
  spec_.from_memory = MemoryOf(slot);
  spec_.to_file = std::make_shared<Counted>(
      ValueOf(env_.Open("/r/threads", OpenMode::kCreateExclusive)), now, most);
  spec_.threads_max = 1;
  const TransferResult result = pool_->Copy(spec_);
  ASSERT_TRUE(result.ok()) << ToString(result.status);
  EXPECT_EQ(most, 1);
  EXPECT_TRUE(Content("/r/threads") == sample_.image);
}

// ---- Where its threads run ----

class CopyCoresTest : public BufferedCopyTest {
 protected:
  void SetUp() override {
    BufferedCopyTest::SetUp();
    if (all_.size() < 2) {
      GTEST_SKIP() << "there is one core only";
    }
    Publish("/r/source");
  }
  // From a file that tells where it is read, before each read, to one that tells where it is
  // written.
  BufferedCopySpec Watched(const std::string& to, const Cores& cores, WatchedFile::Before before) {
    BufferedCopySpec spec;
    spec.image = image_;
    spec.cores = cores;
    spec.from_file = std::make_shared<WatchedFile>(ValueOf(env_.Open("/r/source", OpenMode::kRead)),
                                                   std::move(before));
    spec.to_file = std::make_shared<WatchedFile>(ValueOf(env_.Open(to, OpenMode::kCreateExclusive)),
                                                 [expected = cores.empty() ? all_ : cores](int) {
                                                   EXPECT_EQ(ValueOf(CoresOf(0)), expected);
                                                   return absl::OkStatus();
                                                 });
    return spec;
  }

  const Cores all_ = ValueOf(CoresOf(0));
  const Cores one_ = {*all_.begin()};
};

INSTANTIATE_TEST_SUITE_P(Pieces, CopyCoresTest, ::testing::Values(64 * kKiB, 4 * kMiB),
                         ::testing::PrintToStringParamName());

TEST_P(CopyCoresTest, EachCopyHasItsOwnWhoeverElseIsUnderWay) {
  Gate both;
  const auto copy = [&](const std::string& to, const Cores& cores) {
    const TransferResult result = pool_->Copy(Watched(to, cores, [&](int call) {
      if (call == 1) {
        both.Pass();  // neither is over before the other has begun
      }
      EXPECT_EQ(ValueOf(CoresOf(0)), cores.empty() ? all_ : cores) << to << ", read " << call;
      return absl::OkStatus();
    }));
    EXPECT_TRUE(result.ok()) << ToString(result.status);
  };
  std::thread confined(copy, "/r/confined", one_);
  std::thread anywhere(copy, "/r/anywhere", Cores());
  both.WaitForWaiting(2);
  both.Open();
  confined.join();
  anywhere.join();
  // One behind the other: what the first one left behind says nothing.
  copy("/r/confined-again", one_);
  copy("/r/anywhere-again", {});
}

// A thread inherits those of whoever starts it, which may be one that waits, confined, for a copy.
TEST_P(CopyCoresTest, WhoTakesAStuckThreadsPlaceRunsWhereTheOthersDo) {
  pool_ = ValueOf(CopyPool::Start({.threads = 1,
                                   .piece_bytes = GetParam(),
                                   .stuck_after = std::chrono::milliseconds(10),
                                   .threads_max = 2}));
  Gate gate;
  std::thread hanging([&] {
    ASSERT_TRUE(SetThreadCores(0, one_).ok());
    EXPECT_TRUE(pool_
                    ->Copy(Watched("/r/hanging", {},
                                   [&](int call) {
                                     if (call == 1) {
                                       gate.Pass();
                                     }
                                     return absl::OkStatus();
                                   }))
                    .ok());
  });
  gate.WaitForWaiting(1);
  EXPECT_TRUE(Eventually([&] { return pool_->threads_stuck() == 1; }));
  std::thread other([&] {
    ASSERT_TRUE(SetThreadCores(0, one_).ok());
    EXPECT_TRUE(pool_
                    ->Copy(Watched("/r/other", {},
                                   [&](int) {
                                     EXPECT_EQ(ValueOf(CoresOf(0)), all_);
                                     return absl::OkStatus();
                                   }))
                    .ok());
  });
  other.join();
  gate.Open();
  hanging.join();
}

// Of cores that are not there: it is copied all the same.
TEST_P(CopyCoresTest, WhatCannotBeConfinedRunsWhereItDid) {
  BufferedCopySpec spec = Watched("/r/nowhere", {}, [](int) { return absl::OkStatus(); });
  spec.cores = {4000};
  EXPECT_TRUE(pool_->Copy(std::move(spec)).ok());
  EXPECT_TRUE(Content("/r/nowhere") == sample_.image);
}

TEST_P(BufferedCopyTest, SeveralAtATime) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 6; ++i) {
    threads.emplace_back([&, i] {
      TestSlot slot(sample_.image.size(), sample_.image);
      const std::string path = "/r/" + std::to_string(i);
      BufferedCopySpec spec;
      spec.image = image_;
      spec.from_memory = MemoryOf(slot);
      spec.to_file = Open(path, OpenMode::kCreateExclusive);
      const TransferResult result = pool_->Copy(spec);
      EXPECT_TRUE(result.ok()) << ToString(result.status);
      EXPECT_TRUE(Content(path) == sample_.image);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST_P(BufferedCopyTest, WhatCannotBeMeantIsRefused) {
  TestSlot slot(sample_.image.size(), sample_.image);
  EXPECT_TRUE(absl::IsInvalidArgument(pool_->Copy(spec_).status));
  spec_.from_memory = MemoryOf(slot);
  EXPECT_TRUE(absl::IsInvalidArgument(pool_->Copy(spec_).status));
  spec_.to_memory = MemoryOf(slot);
  EXPECT_TRUE(absl::IsInvalidArgument(pool_->Copy(spec_).status));
  spec_.to_memory = nullptr;
  spec_.to_file = Open("/r/image", OpenMode::kCreateExclusive);
  spec_.from_memory = std::make_shared<RevocableMemory>(slot.data(), sample_.image.size() - 1);
  EXPECT_TRUE(absl::IsInvalidArgument(pool_->Copy(spec_).status));
  EXPECT_FALSE(CopyPool::Start({.threads = 0}).ok());
  EXPECT_FALSE(CopyPool::Start({.piece_bytes = 100'000}).ok());
}

TEST_P(BufferedCopyTest, NothingLeaks) {
  TestSlot slot(sample_.image.size(), sample_.image);
  const size_t threads = CountThreads();
  const size_t descriptors = CountDescriptors();
  for (int i = 0; i < 20; ++i) {
    auto pool = ValueOf(CopyPool::Start({.threads = 8}));
    BufferedCopySpec spec = spec_;
    spec.from_memory = MemoryOf(slot);
    spec.to_file = Open("/r/" + std::to_string(i), OpenMode::kCreateExclusive);
    EXPECT_TRUE(pool->Copy(std::move(spec)).ok());
  }
  EXPECT_TRUE(Eventually([&] { return CountThreads() <= threads; }));
  EXPECT_TRUE(Eventually([&] { return CountDescriptors() <= descriptors; }));
}

}  // namespace
}  // namespace holdfast
