#include "client-lib/src/copy_engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "client-lib/src/background.h"
#include "client-lib/src/deadline.h"
#include "client-lib/src/worker_pool.h"

namespace holdfast::client {
namespace {

struct Tensors {
  explicit Tensors(const std::vector<size_t>& sizes) {
    std::mt19937_64 random(7);
    for (const size_t size : sizes) {
      std::vector<unsigned char>& from = source.emplace_back(size);
      for (size_t i = 0; i < size; i += sizeof(uint64_t)) {
        const uint64_t word = random();
        std::memcpy(from.data() + i, &word, std::min(sizeof(word), size - i));
      }
      total += size;
    }
    slot.resize(total);
    size_t at = 0;
    size_t digest = 0;
    for (const size_t size : sizes) {
      digest += DigestBlockCount(size);
    }
    digests.resize(digest);
    digest = 0;
    for (const std::vector<unsigned char>& from : source) {
      ranges.push_back({slot.data() + at, from.data(), from.size(), digests.data() + digest});
      at += from.size();
      digest += DigestBlockCount(from.size());
    }
  }
  std::vector<CopyOutRange> Out(std::vector<std::vector<unsigned char>>& to) const {
    std::vector<CopyOutRange> out;
    to.clear();
    to.reserve(ranges.size());
    for (const CopyInRange& range : ranges) {
      to.emplace_back(range.bytes);
      out.push_back({to.back().data(), range.to, range.bytes, range.digests});
    }
    return out;
  }

  std::vector<std::vector<unsigned char>> source;
  std::vector<unsigned char> slot;
  std::vector<uint64_t> digests;
  std::vector<CopyInRange> ranges;
  size_t total = 0;
};

std::vector<size_t> MixedSizes() {
  std::vector<size_t> sizes = {0, 1, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 0, 9'999'999, 3};
  sizes.insert(sizes.end(), 5000, 777);
  return sizes;
}

class CopyEngineTest : public testing::TestWithParam<uint32_t> {};

TEST_P(CopyEngineTest, CopiesAndDigestsEveryBlock) {
  Tensors tensors(MixedSizes());
  const std::unique_ptr<CopyEngine> engine = MakeHostCopyEngine(GetParam());
  for (int round = 0; round < 3; ++round) {
    std::fill(tensors.slot.begin(), tensors.slot.end(), 0);
    std::fill(tensors.digests.begin(), tensors.digests.end(), 0);
    ASSERT_TRUE(engine->CopyIn(tensors.ranges, {}).ok());
    std::vector<uint64_t> expected;
    size_t at = 0;
    for (const std::vector<unsigned char>& from : tensors.source) {
      ASSERT_TRUE(
          std::equal(from.begin(), from.end(), tensors.slot.begin() + static_cast<ptrdiff_t>(at)));
      AppendBlockDigests(std::as_bytes(std::span(from)), expected);
      at += from.size();
    }
    EXPECT_EQ(tensors.digests, expected);
  }
}

// A matrix of so many rows and columns, of which a box of its own and a few rows are wanted.
struct Matrix {
  static constexpr uint64_t kRows = 3000;
  static constexpr uint64_t kColumns = 1001;
  static constexpr uint64_t kBlock = kDigestBlockBytes / sizeof(float);  // elements

  Matrix() : saved(kRows * kColumns), box(2000 * 500, -1.0F), rows(10 * kColumns, -1.0) {
    for (size_t i = 0; i < saved.size(); ++i) {
      saved[i] = static_cast<float>(i);
    }
    AppendBlockDigests(std::as_bytes(std::span(saved)), digests);
    scatter.dtype = DType::kF32;
    scatter.parts.resize(2);
    scatter.parts[0].copy.from = 500 * kColumns + 250;
    scatter.parts[0].copy.run = 500;
    scatter.parts[0].copy.loops = {{2000, kColumns, 500}};
    scatter.parts[0].to = box.data();
    scatter.parts[0].dtype = DType::kF32;
    scatter.parts[1].copy.from = 700 * kColumns;
    scatter.parts[1].copy.run = 10 * kColumns;
    scatter.parts[1].to = rows.data();
    scatter.parts[1].dtype = DType::kF64;
  }
  // From one block of it to just before another.
  CopyOutRange Blocks(uint64_t first, uint64_t behind) const {
    CopyOutRange range;
    range.from = saved.data() + first * kBlock;
    range.bytes =
        (std::min<uint64_t>(behind * kBlock, saved.size()) - first * kBlock) * sizeof(float);
    range.digests = digests.data() + first;
    range.scatter = &scatter;
    range.in_slice = first * kDigestBlockBytes;
    return range;
  }
  void ExpectCopied() const {
    for (size_t i = 0; i < box.size(); ++i) {
      const size_t row = 500 + i / 500;
      ASSERT_EQ(box[i], saved[row * kColumns + 250 + i % 500]) << i;
    }
    for (size_t i = 0; i < rows.size(); ++i) {
      ASSERT_EQ(rows[i], static_cast<double>(saved[700 * kColumns + i])) << i;
    }
  }

  std::vector<float> saved;
  std::vector<uint64_t> digests;
  std::vector<float> box;
  std::vector<double> rows;
  Scatter scatter;
};

TEST_P(CopyEngineTest, ScattersWhatIsWantedOfEachBlock) {
  Matrix matrix;
  const std::unique_ptr<CopyEngine> engine = MakeHostCopyEngine(GetParam());
  // In three runs, with what nobody wants left out.
  const std::vector<CopyOutRange> ranges = {matrix.Blocks(1, 3), matrix.Blocks(3, 4),
                                            matrix.Blocks(4, 10)};
  const auto copied = engine->CopyOut(ranges, {});
  ASSERT_TRUE(copied.ok());
  EXPECT_FALSE(copied->has_value());
  matrix.ExpectCopied();
}

TEST_P(CopyEngineTest, ScattersInOnePieceWhatStaysTogether) {
  Matrix matrix;
  std::vector<float> all(matrix.saved.size());
  matrix.scatter.parts = {{StridedCopy{.run = all.size()}, all.data(), DType::kF32}};
  const std::unique_ptr<CopyEngine> engine = MakeHostCopyEngine(GetParam());
  const auto copied =
      engine->CopyOut(std::vector<CopyOutRange>{matrix.Blocks(0, matrix.digests.size())}, {});
  ASSERT_TRUE(copied.ok());
  EXPECT_FALSE(copied->has_value());
  EXPECT_EQ(all, matrix.saved);
}

// Long runs of one part are digested while they are copied, what lies between them by itself.
TEST_P(CopyEngineTest, ScattersLongRunsAndDigestsWhatLiesBetween) {
  constexpr uint64_t kRows = 100;
  constexpr uint64_t kColumns = 60'000;
  constexpr uint64_t kWantedRows = 90;
  constexpr uint64_t kWanted = 40'001;  // columns from the 10,000th on
  std::vector<float> saved(kRows * kColumns);
  for (size_t i = 0; i < saved.size(); ++i) {
    saved[i] = static_cast<float>(i);
  }
  std::vector<uint64_t> digests;
  AppendBlockDigests(std::as_bytes(std::span(saved)), digests);
  std::vector<float> box(kWantedRows * kWanted, -1.0F);
  Scatter scatter;
  scatter.dtype = DType::kF32;
  scatter.parts.resize(1);
  scatter.parts[0].copy.from = 5 * kColumns + 10'000;
  scatter.parts[0].copy.run = kWanted;
  scatter.parts[0].copy.loops = {{kWantedRows, kColumns, kWanted}};
  scatter.parts[0].to = box.data();
  scatter.parts[0].dtype = DType::kF32;
  CopyOutRange range;
  range.from = saved.data();
  range.bytes = saved.size() * sizeof(float);
  range.digests = digests.data();
  range.scatter = &scatter;
  const std::unique_ptr<CopyEngine> engine = MakeHostCopyEngine(GetParam());
  const auto copied = engine->CopyOut(std::vector{range}, {});
  ASSERT_TRUE(copied.ok());
  EXPECT_FALSE(copied->has_value());
  for (size_t i = 0; i < box.size(); ++i) {
    ASSERT_EQ(box[i], saved[(5 + i / kWanted) * kColumns + 10'000 + i % kWanted]) << i;
  }
  // A bit in a run, one in between, one before the first and one behind the last.
  for (const uint64_t element :
       {20 * kColumns + 30'000, 20 * kColumns + 9'999, uint64_t{0}, kRows * kColumns - 1}) {
    const float was = std::exchange(saved[element], -2.0F);
    const auto bad = engine->CopyOut(std::vector{range}, {});
    ASSERT_TRUE(bad.ok());
    ASSERT_TRUE(bad->has_value()) << element;
    EXPECT_EQ((*bad)->block, element * sizeof(float) / kDigestBlockBytes);
    saved[element] = was;
  }
}

TEST_P(CopyEngineTest, ScatteringFindsABlockThatIsNotWhatWasSaved) {
  Matrix matrix;
  matrix.saved[5 * Matrix::kBlock + 1] += 1;
  const std::unique_ptr<CopyEngine> engine = MakeHostCopyEngine(GetParam());
  const auto copied =
      engine->CopyOut(std::vector<CopyOutRange>{matrix.Blocks(1, 3), matrix.Blocks(3, 10)}, {});
  ASSERT_TRUE(copied.ok());
  ASSERT_TRUE(copied->has_value());
  EXPECT_EQ((*copied)->range, 1U);
  EXPECT_EQ((*copied)->block, 2U);
}

TEST_P(CopyEngineTest, CopiesOutAndNamesTheFirstBadBlock) {
  Tensors tensors(MixedSizes());
  const std::unique_ptr<CopyEngine> engine = MakeHostCopyEngine(GetParam());
  ASSERT_TRUE(engine->CopyIn(tensors.ranges, {}).ok());
  std::vector<std::vector<unsigned char>> to;
  const std::vector<CopyOutRange> out = tensors.Out(to);
  Result<std::optional<CopyMismatch>> mismatch = engine->CopyOut(out, {});
  ASSERT_TRUE(mismatch.ok());
  EXPECT_FALSE(mismatch->has_value());
  EXPECT_EQ(to, tensors.source);

  // Two bad blocks: the earlier is named, whichever thread sees which first.
  const size_t big = 7;  // 9,999,999 bytes
  auto* const in_slot = static_cast<unsigned char*>(tensors.ranges[big].to);
  in_slot[(5 << 20) + 17] ^= 1;
  in_slot[9'999'998] ^= 1;
  mismatch = engine->CopyOut(out, {});
  ASSERT_TRUE(mismatch.ok());
  ASSERT_TRUE(mismatch->has_value());
  EXPECT_EQ((*mismatch)->range, big);
  EXPECT_EQ((*mismatch)->block, 5u);
}

TEST_P(CopyEngineTest, ChecksWithoutCopying) {
  Tensors tensors({3 << 20, 5});
  const std::unique_ptr<CopyEngine> engine = MakeHostCopyEngine(GetParam());
  ASSERT_TRUE(engine->CopyIn(tensors.ranges, {}).ok());
  std::vector<CopyOutRange> check;
  for (const CopyInRange& range : tensors.ranges) {
    check.push_back({nullptr, range.to, range.bytes, range.digests});
  }
  EXPECT_FALSE((*engine->CopyOut(check, {})).has_value());
  tensors.slot.back() ^= 0x80;
  const Result<std::optional<CopyMismatch>> mismatch = engine->CopyOut(check, {});
  ASSERT_TRUE((*mismatch).has_value());
  EXPECT_EQ((*mismatch)->range, 1u);
}

TEST_P(CopyEngineTest, AnInterruptLeavesTheRestOut) {
  Tensors tensors({64 << 20});
  const std::unique_ptr<CopyEngine> engine = MakeHostCopyEngine(GetParam());
  ASSERT_TRUE(engine->CopyIn(tensors.ranges, {}).ok());
  std::vector<std::vector<unsigned char>> to;
  const std::vector<CopyOutRange> out = tensors.Out(to);
  const std::thread::id caller = std::this_thread::get_id();
  bool stop = false;
  Interrupt interrupt([&] {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    return stop;
  });
  CopyOptions options;
  options.interrupt = &interrupt;
  EXPECT_TRUE(engine->CopyOut(out, options).ok());
  EXPECT_EQ(to, tensors.source);
  to[0].assign(to[0].size(), 0);
  stop = true;
  EXPECT_EQ(engine->CopyOut(out, options).status().code(), Code::kDeadlineExceeded);
  EXPECT_NE(to, tensors.source);
}

TEST_P(CopyEngineTest, NothingToCopyIsFine) {
  const std::unique_ptr<CopyEngine> engine = MakeHostCopyEngine(GetParam());
  EXPECT_TRUE(engine->CopyIn({}, {}).ok());
  EXPECT_TRUE(engine->CopyOut({}, {}).ok());
}

INSTANTIATE_TEST_SUITE_P(Threads, CopyEngineTest, testing::Values(1, 2, 5));

TEST(WorkerPool, EveryRunEndsWithAllItsHelpersDone) {
  WorkerPool pool(4);
  for (int i = 0; i < 2000; ++i) {
    std::atomic<int> inside{0};
    std::atomic<int> next{0};
    pool.Run(4, [&] {
      ++inside;
      while (next.fetch_add(1) < 8) {
      }
      --inside;
    });
    ASSERT_EQ(inside.load(), 0);
    ASSERT_GE(next.load(), 8);
  }
}

TEST(WorkerPool, ThreadsDefaultToWhatIsAllowed) {
  EXPECT_GE(CopyThreads(0), 1u);
  EXPECT_LE(CopyThreads(0), 4u);
  EXPECT_EQ(CopyThreads(7), 7u);
}

TEST(Background, DoesOnePieceOfWorkAfterTheOther) {
  int done = 0;  // no lock: never two at a time, and the turns order them
  {
    Background background;
    for (int i = 0; i < 500; ++i) {
      background.Take("a test", Deadline::Never())->HandTo([&done] { ++done; });
      const Result<Background::Turn> turn = background.Take("a test", Deadline::Never());
      ASSERT_TRUE(turn.ok());
      ASSERT_EQ(done, i + 1);
    }
    background.Take("a test", Deadline::Never())->HandTo([&done] { ++done; });
  }
  EXPECT_EQ(done, 501);
}

TEST(Background, WhoHasTheTurnDoesNotWaitForItself) {
  Background background;
  const Result<Background::Turn> turn = background.Take("a test", Deadline::Never());
  EXPECT_EQ(background.Take("a test", Deadline::Never()).status().code(), Code::kRefused);
  std::thread other([&] {
    EXPECT_EQ(background.Take("a test", Deadline::In(Milliseconds(1))).status().code(),
              Code::kDeadlineExceeded);
  });
  other.join();
}

}  // namespace
}  // namespace holdfast::client
