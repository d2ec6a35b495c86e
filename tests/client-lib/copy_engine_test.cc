#include "client-lib/src/copy_engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>
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
      background.Take()->HandTo([&done] { ++done; });
      const Result<Background::Turn> turn = background.Take();
      ASSERT_TRUE(turn.ok());
      ASSERT_EQ(done, i + 1);
    }
    background.Take()->HandTo([&done] { ++done; });
  }
  EXPECT_EQ(done, 501);
}

TEST(Background, WhoHasTheTurnDoesNotWaitForItself) {
  Background background;
  const Result<Background::Turn> turn = background.Take();
  EXPECT_EQ(background.Take().status().code(), Code::kRefused);
  std::thread other([&] {
    EXPECT_EQ(background.Take(Deadline::In(Milliseconds(1))).status().code(),
              Code::kDeadlineExceeded);
  });
  other.join();
}

}  // namespace
}  // namespace holdfast::client
