// Recycled files: what is overwritten is nobody's any more.
#include <gtest/gtest.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tests/tiers/durable/durable_harness.h"

namespace holdfast {
namespace {

class DurablePoolTest : public testing::TestWithParam<bool> {
 protected:
  DurablePoolTest() : harness_({.kind = DurableKind::kNvme, .real = GetParam()}) {
    const absl::Status status = harness_.Start();
    EXPECT_TRUE(status.ok()) << ToString(status);
  }
  CopyStore& store() { return harness_.store(); }
  Env& env() { return harness_.env(); }
  std::string Pool() const { return harness_.dir() + "/.holdfast/pool"; }
  std::vector<std::string> PoolFiles() { return env().List(Pool()).value(); }

  void Publish(const SampleImage& sample) {
    const auto copy = PublishShard(store(), sample);
    ASSERT_TRUE(copy.ok()) << ToString(copy.status());
  }
  void PublishAndRemove(const SampleImage& sample) {
    ASSERT_NO_FATAL_FAILURE(Publish(sample));
    const auto removed = store().RemoveCopy(NameOf(sample));
    ASSERT_TRUE(removed.ok()) << ToString(removed.status());
    ASSERT_EQ(removed->bytes_recycled, sample.image.size());
  }
  // Whether the next copy of that size is written over a recycled file.
  bool Recycles(const SampleImage& sample) {
    const auto writing = store().Begin(NewCopyOfShard(sample));
    EXPECT_TRUE(writing.ok()) << ToString(writing.status());
    return writing.ok() && (*writing)->recycled();
  }

  DurableHarness harness_;
};

INSTANTIATE_TEST_SUITE_P(Files, DurablePoolTest, testing::Values(false, true),
                         [](const testing::TestParamInfo<bool>& real) {
                           return real.param ? "Real" : "FaultEnv";
                         });

TEST_P(DurablePoolTest, AFileOfARemovedCopyIsOverwritten) {
  const SampleImage first = SampleShard(7, 0, 2);
  PublishAndRemove(first);
  EXPECT_EQ(store().pool_bytes(), first.image.size());
  const uint64_t inode = env().Info(JoinPath(Pool(), PoolFiles().at(0)))->inode;
  const SampleImage second = SampleShard(14, 0, 2);
  const auto writing = store().Begin(NewCopyOfShard(second));
  ASSERT_TRUE(writing.ok());
  EXPECT_TRUE((*writing)->recycled());
  EXPECT_EQ(store().pool_bytes(), 0u);
  ASSERT_TRUE(WriteShard(**writing, second).ok());
  ASSERT_TRUE((*writing)->Publish(second.record_file).ok());
  EXPECT_EQ(env().Info(store().ImagePath(NameOf(second)))->inode, inode);
  EXPECT_EQ(env().Info(store().ImagePath(NameOf(second)))->bytes, second.image.size());
  EXPECT_TRUE(CheckShard(store(), second).ok());
}

TEST_P(DurablePoolTest, ThePoolIsFoundAgainAfterARestart) {
  PublishAndRemove(SampleShard(7, 0, 2));
  harness_.Stop();
  ASSERT_TRUE(harness_.Start().ok());
  EXPECT_EQ(store().pool_bytes(), SampleShard(7, 0, 2).image.size());
  EXPECT_TRUE(Recycles(SampleShard(14, 0, 2)));
}

// Files of a job that is gone do not keep those of the next one out.
TEST_P(DurablePoolTest, FilesThatFitNobodyGiveWay) {
  const uint64_t bytes = SampleShard(7, 0, 2).image.size();
  harness_.Stop();
  harness_.options().pool_bytes_max = 2 * bytes;
  // As left by a job with much smaller shards.
  for (int i = 0; i < 8; ++i) {
    const std::string path = JoinPath(Pool(), absl::StrCat("0123456789abcdef0123456789abcde", i));
    ASSERT_TRUE(Overwrite(env(), path, std::string(bytes / 4, 'x')).ok());
  }
  ASSERT_TRUE(harness_.Start().ok());
  ASSERT_EQ(store().pool_bytes(), 8 * (bytes / 4));
  PublishAndRemove(SampleShard(7, 0, 2));
  EXPECT_LE(store().pool_bytes(), 2 * bytes);
  EXPECT_GE(PoolFiles().size(), 4u) << "no more went than had to";
  EXPECT_TRUE(Recycles(SampleShard(14, 0, 2)));
}

TEST_P(DurablePoolTest, FilesThatWouldServeAsWellStay) {
  harness_.Stop();
  harness_.options().pool_bytes_max = SampleShard(7, 0, 2).image.size() + 100;
  ASSERT_TRUE(harness_.Start().ok());
  Publish(SampleShard(7, 0, 2));
  PublishAndRemove(SampleShard(14, 0, 2));
  const std::vector<std::string> before = PoolFiles();
  const auto removed = store().RemoveCopy(NameOf(SampleShard(7, 0, 2)));
  ASSERT_TRUE(removed.ok());
  EXPECT_EQ(removed->bytes_recycled, 0u);
  EXPECT_EQ(PoolFiles(), before);
}

TEST_P(DurablePoolTest, ALowerLimitShrinksAPoolThatIsThere) {
  PublishAndRemove(SampleShard(7, 0, 2));
  harness_.Stop();
  harness_.options().pool_bytes_max = 0;  // none at all
  ASSERT_TRUE(harness_.Start().ok());
  EXPECT_EQ(store().pool_bytes(), 0u);
  EXPECT_TRUE(PoolFiles().empty());
  Publish(SampleShard(14, 0, 2));
  const auto removed = store().RemoveCopy(NameOf(SampleShard(14, 0, 2)));
  ASSERT_TRUE(removed.ok());
  EXPECT_EQ(removed->bytes_freed, SampleShard(14, 0, 2).image.size());
  EXPECT_TRUE(PoolFiles().empty());
}

TEST_P(DurablePoolTest, OnlyFilesThatFitAreTaken) {
  PublishAndRemove(SampleShard(7, 0, 2));
  NewCopy large = NewCopyOfShard(SampleShard(14, 0, 2));
  large.image_bytes *= 2;
  EXPECT_FALSE((*store().Begin(large))->recycled()) << "half of it would be fresh";
  NewCopy small = NewCopyOfShard(SampleShard(14, 0, 2));
  small.image_bytes /= 3;
  EXPECT_FALSE((*store().Begin(small))->recycled()) << "most of it would be given away";
  NewCopy longer = NewCopyOfShard(SampleShard(14, 0, 2));
  longer.image_bytes += 100;
  EXPECT_TRUE((*store().Begin(longer))->recycled()) << "a rank's images differ by a little";
}

TEST_P(DurablePoolTest, ThePoolHasALimitAndShrinks) {
  harness_.Stop();
  const uint64_t bytes = SampleShard(7, 0, 2).image.size();
  harness_.options().pool_bytes_max = 2 * bytes;
  ASSERT_TRUE(harness_.Start().ok());
  for (const Step step : {7, 14, 21}) {
    Publish(SampleShard(step, 0, 2));
  }
  RemovalReport sum;
  for (const Step step : {7, 14, 21}) {
    const auto removed = store().RemoveCopy(NameOf(SampleShard(step, 0, 2)));
    ASSERT_TRUE(removed.ok());
    sum.bytes_freed += removed->bytes_freed;
    sum.bytes_recycled += removed->bytes_recycled;
  }
  EXPECT_EQ(sum.bytes_recycled, 2 * bytes);
  EXPECT_EQ(sum.bytes_freed, bytes);
  EXPECT_EQ(store().pool_bytes(), 2 * bytes);
  ASSERT_TRUE(store().TrimPool(bytes).ok());
  EXPECT_EQ(store().pool_bytes(), bytes);
  EXPECT_EQ(PoolFiles().size(), 1u);
  ASSERT_TRUE(store().TrimPool(0).ok());
  EXPECT_EQ(PoolFiles().size(), 0u);
}

// A process that has the file of a removed copy mapped, or open, or under another name, keeps what
// it saw.
TEST_P(DurablePoolTest, AMappedFileIsNeverOverwritten) {
  const SampleImage old = SampleShard(7, 0, 2);
  Publish(old);
  std::unique_ptr<Mapping> mapping;
  {
    auto file = env().Open(store().ImagePath(NameOf(old)), OpenMode::kRead);
    ASSERT_TRUE(file.ok());
    mapping = env().Map(**file, 0, old.image.size(), false).value();
  }
  ASSERT_TRUE(store().RemoveCopy(NameOf(old)).ok());
  const SampleImage next = SampleShard(14, 0, 2);
  const auto writing = store().Begin(NewCopyOfShard(next));
  ASSERT_TRUE(writing.ok());
  EXPECT_FALSE((*writing)->recycled());
  ASSERT_TRUE(WriteShard(**writing, next).ok());
  ASSERT_TRUE((*writing)->Publish(next.record_file).ok());
  EXPECT_EQ(std::string_view(reinterpret_cast<const char*>(mapping->data()), mapping->bytes()),
            old.image);
  EXPECT_EQ(PoolFiles().size(), 0u) << "it went without a name";
}

TEST_P(DurablePoolTest, AnOpenFileIsNeverOverwritten) {
  const SampleImage old = SampleShard(7, 0, 2);
  Publish(old);
  const auto reading = store().OpenCopy(NameOf(old), {});
  ASSERT_TRUE(reading.ok());
  ASSERT_TRUE(store().RemoveCopy(NameOf(old)).ok());
  Publish(SampleShard(14, 0, 2));
  std::string image(old.image.size(), '\0');
  ASSERT_TRUE((*reading)->image().ReadAt(0, std::as_writable_bytes(std::span<char>(image))).ok());
  EXPECT_EQ(image, old.image);
  EXPECT_TRUE((*reading)->Confirm().ok());
}

TEST_P(DurablePoolTest, AFileWithASecondNameIsNeverOverwritten) {
  const SampleImage old = SampleShard(7, 0, 2);
  Publish(old);
  const std::string second = harness_.dir() + "/.holdfast/second";
  ASSERT_TRUE(env().Link(store().ImagePath(NameOf(old)), second).ok());
  ASSERT_TRUE(store().RemoveCopy(NameOf(old)).ok());
  EXPECT_EQ(store().pool_bytes(), 0u);
  Publish(SampleShard(14, 0, 2));
  EXPECT_EQ(ReadFile(env(), second, 1 << 20).value_or(""), old.image);
  // The same when the second name comes later.
  PublishAndRemove(SampleShard(21, 0, 2));
  const std::string third = harness_.dir() + "/.holdfast/third";
  ASSERT_TRUE(env().Link(JoinPath(Pool(), PoolFiles().at(0)), third).ok());
  EXPECT_FALSE(Recycles(SampleShard(28, 0, 2)));
  EXPECT_EQ(ReadFile(env(), third, 1 << 20).value_or(""), SampleShard(21, 0, 2).image);
}

TEST_P(DurablePoolTest, AFullDriveTakesItsRoomFromThePool) {
  FaultEnv* faults = harness_.faults();
  if (faults == nullptr) {
    GTEST_SKIP() << "a real drive does not get full here";
  }
  harness_.Stop();
  harness_.options().pool_bytes_max = uint64_t{1} << 20;
  ASSERT_TRUE(harness_.Start().ok());
  NewCopy large = NewCopyOfShard(SampleShard(7, 0, 2));
  for (Step step = 7; step <= 70; step += 7) {
    Publish(SampleShard(step, 0, 2));
  }
  for (Step step = 7; step <= 70; step += 7) {
    ASSERT_TRUE(store().RemoveCopy(NameOf(SampleShard(step, 0, 2))).ok());
  }
  const uint64_t pooled = store().pool_bytes();
  ASSERT_GT(pooled, 8 * large.image_bytes);
  uint64_t used = pooled;
  for (const std::string& file : harness_.Files()) {
    used += env().Info(JoinPath(harness_.dir(), file))->bytes;
  }
  faults->SetBytesTotal(used + 1000);  // room for an intent, not for an image
  large.image_bytes *= 4;              // none in the pool fits
  const auto writing = store().Begin(large);
  ASSERT_TRUE(writing.ok()) << ToString(writing.status());
  EXPECT_FALSE((*writing)->recycled());
  EXPECT_LT(store().pool_bytes(), pooled);
  EXPECT_GT(store().pool_bytes(), 0u) << "no more than was wanted";
}

TEST_P(DurablePoolTest, WithoutLeasesNothingIsRecycled) {
  FaultEnv* faults = harness_.faults();
  if (faults == nullptr) {
    GTEST_SKIP() << "this file system has leases";
  }
  PublishAndRemove(SampleShard(7, 0, 2));
  faults->SetLeases(false);
  EXPECT_FALSE(Recycles(SampleShard(14, 0, 2)));
  EXPECT_EQ(store().pool_bytes(), 0u);
}

TEST_P(DurablePoolTest, StrangersInThePoolAreLeftAlone) {
  const std::string stranger = JoinPath(Pool(), "mine.safetensors");
  ASSERT_TRUE(Overwrite(env(), stranger, std::string(10'000, 'x')).ok());
  harness_.Stop();
  ASSERT_TRUE(harness_.Start().ok());
  EXPECT_EQ(harness_.problems().size(), 1u);
  EXPECT_FALSE(Recycles(SampleShard(14, 0, 2)));
  ASSERT_TRUE(store().TrimPool(0).ok());
  EXPECT_EQ(PoolFiles().size(), 1u);
}

}  // namespace
}  // namespace holdfast
