// A good copy in the place of a bad one: what is replaced, what is refused, and who else is at work
// there. (A crash, and a failure, at every call: durable_crash_test.cc.)
#include <chrono>
#include <thread>

#include "base/status.h"
#include "tests/tiers/durable/hostile_fixture.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

class CopyReplaceTest : public HostileTest, public testing::WithParamInterface<DurableKind> {
 protected:
  CopyReplaceTest() : HostileTest(DurablePlace{.kind = GetParam()}) {}

  bool remote() const { return GetParam() == DurableKind::kRemote; }
  void PublishAll() {
    std::vector<PublishedCopy> copies;
    for (const SampleImage& sample : samples_) {
      copies.push_back(Publish(sample));
    }
    if (remote()) {
      const absl::Status status = store().PublishManifest(ManifestOf(samples_, copies));
      ASSERT_TRUE(status.ok()) << ToString(status);
    }
  }
  void FlipImage() {
    std::string bytes = Read(ImageOf(bad_));
    bytes[bytes.size() - 9] ^= 0x10;
    Write(ImageOf(bad_), bytes);
  }
  void FlipRecord() {
    std::string bytes = Read(RecordOf(bad_));
    bytes[bytes.size() / 2] ^= 0x10;
    Write(RecordOf(bad_), bytes);
  }
  absl::Status Mend(const SampleImage& with) {
    HF_ASSIGN_OR_RETURN(const auto writing, store().BeginReplacement(NewCopyOfShard(with)));
    HF_RETURN_IF_ERROR(WriteShard(*writing, with));
    return writing->Publish(with.record_file).status();
  }
  void ExpectMended() {
    const absl::Status mended = Mend(bad_);
    ASSERT_TRUE(mended.ok()) << ToString(mended);
    for (const SampleImage& sample : samples_) {
      const absl::Status good = CheckShard(store(), sample);
      EXPECT_TRUE(good.ok()) << ToString(good);
    }
    EXPECT_TRUE(harness_.Leftovers().empty());
  }
  std::string WhatIsThere() {
    const auto read = [&](const std::string& path) {
      return ReadFile(env(), path, kFileBytesMax).value_or("nothing");
    };
    return read(ImageOf(bad_)) + "|" + read(RecordOf(bad_));
  }

  const std::vector<SampleImage> samples_ = {SampleShard(900, 0, 2), SampleShard(900, 1, 2)};
  const SampleImage& bad_ = samples_[1];
};

INSTANTIATE_TEST_SUITE_P(Kinds, CopyReplaceTest,
                         testing::Values(DurableKind::kNvme, DurableKind::kRemote),
                         [](const auto& kind) {
                           return kind.param == DurableKind::kNvme ? "Nvme" : "Remote";
                         });

TEST_P(CopyReplaceTest, ABadImageIsReplacedUnderTheRecordThatIsThere) {
  PublishAll();
  const std::string record = Read(RecordOf(bad_));
  FlipImage();
  ASSERT_FALSE(CheckShard(store(), bad_).ok());
  ExpectMended();
  EXPECT_EQ(Read(RecordOf(bad_)), record);
}

TEST_P(CopyReplaceTest, WhatIsCutDamagedOrMissing) {
  PublishAll();
  ASSERT_TRUE(Overwrite(env(), ImageOf(bad_), "cut").ok());
  ExpectMended();
  FlipRecord();
  ExpectMended();
  ASSERT_TRUE(env().Unlink(RecordOf(bad_)).ok());
  ExpectMended();
  ASSERT_TRUE(env().Unlink(ImageOf(bad_)).ok());
  ExpectMended();
  ASSERT_TRUE(env().Unlink(ImageOf(bad_)).ok());
  ASSERT_TRUE(env().Unlink(RecordOf(bad_)).ok());
  ExpectMended();
}

// Whoever reads the bad one goes on with its bytes, and the bad one is there to the last moment.
TEST_P(CopyReplaceTest, NothingIsTouchedBeforeTheEnd) {
  PublishAll();
  FlipImage();
  const std::string before = WhatIsThere();
  auto writing = store().BeginReplacement(NewCopyOfShard(bad_));
  ASSERT_TRUE(writing.ok()) << ToString(writing.status());
  ASSERT_TRUE(WriteShard(**writing, bad_).ok());
  EXPECT_EQ(WhatIsThere(), before);
  writing->reset();  // given up
  EXPECT_EQ(WhatIsThere(), before);
  EXPECT_TRUE(harness_.Leftovers().empty());
  ExpectMended();
}

TEST_P(CopyReplaceTest, AnotherShardsRecordIsRefused) {
  PublishAll();
  FlipImage();
  const std::string before = WhatIsThere();
  auto writing = store().BeginReplacement(NewCopyOfShard(bad_));
  ASSERT_TRUE(writing.ok());
  const absl::Status refused = (*writing)->Publish(samples_[0].record_file).status();
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << ToString(refused);
  writing->reset();
  EXPECT_EQ(WhatIsThere(), before);
}

// The same identity with other bytes: on a drive what is undamaged says which is right; in the
// remote tier the manifest does.
TEST_P(CopyReplaceTest, ARecordOfOtherBytesIsRefused) {
  PublishAll();
  FlipImage();
  const std::string before = WhatIsThere();
  ShardRecord identity = bad_.record;
  identity.digests.clear();
  const SampleImage other = MakeSampleImage({Whole("v", DType::kF32, {77})}, identity);
  const absl::Status refused = Mend(other);
  EXPECT_TRUE(remote() ? absl::IsFailedPrecondition(refused) : absl::IsAlreadyExists(refused))
      << ToString(refused);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("nothing was touched"));
  EXPECT_EQ(WhatIsThere(), before);
  EXPECT_TRUE(harness_.Leftovers().empty());
}

TEST_P(CopyReplaceTest, AStepThatWasRemovedMeanwhileDoesNotComeBack) {
  PublishAll();
  FlipImage();
  auto writing = store().BeginReplacement(NewCopyOfShard(bad_));
  ASSERT_TRUE(writing.ok());
  ASSERT_TRUE(WriteShard(**writing, bad_).ok());
  const auto removed = store().RemoveCheckpoint(CheckpointOf(bad_));
  ASSERT_TRUE(removed.ok()) << ToString(removed.status());
  const absl::Status late = (*writing)->Publish(bad_.record_file).status();
  EXPECT_TRUE(absl::IsNotFound(late)) << ToString(late);
  writing->reset();
  EXPECT_TRUE(harness_.Leftovers().empty());
  EXPECT_FALSE(env().Info(Path("demo/900-a3")).ok());
}

// By another node, between the renames of the image and of a record that is written anew as well.
TEST_P(CopyReplaceTest, AStepThatAnotherNodeRemovesAmidItDoesNotComeBackInParts) {
  if (!remote()) {
    GTEST_SKIP() << "a drive has one node";
  }
  CopyStore::Options options = harness_.options();
  options.node_name = "node-2";
  const auto other = CopyStore::Open(options);
  ASSERT_TRUE(other.ok()) << ToString(other.status());
  for (const std::string& before : {ImageOf(bad_), RecordOf(bad_)}) {
    SCOPED_TRACE(before);
    PublishAll();
    FlipRecord();
    auto writing = store().BeginReplacement(NewCopyOfShard(bad_));
    ASSERT_TRUE(writing.ok());
    ASSERT_TRUE(WriteShard(**writing, bad_).ok());
    const size_t name = before.rfind('/') + 1;
    const std::string call =
        "rename " + before.substr(0, name) + "." + before.substr(name);  // of its temporary
    harness_.faults()->StallMatching(call);
    absl::Status late;
    std::thread publisher([&] { late = (*writing)->Publish(bad_.record_file).status(); });
    ASSERT_TRUE(harness_.faults()->WaitForStalled(1, std::chrono::seconds(60)));
    const auto removed = (*other)->RemoveCheckpoint(CheckpointOf(bad_));
    EXPECT_TRUE(removed.ok()) << ToString(removed.status());
    harness_.faults()->ReleaseStalled(call);
    publisher.join();
    EXPECT_TRUE(absl::IsNotFound(late)) << ToString(late);
    writing->reset();
    EXPECT_FALSE(env().Info(ImageOf(bad_)).ok());
    EXPECT_FALSE(env().Info(RecordOf(bad_)).ok());
    EXPECT_TRUE(harness_.Leftovers().empty());
  }
}

TEST_P(CopyReplaceTest, TwoWhoMendTheSame) {
  PublishAll();
  FlipImage();
  auto first = store().BeginReplacement(NewCopyOfShard(bad_));
  auto second = store().BeginReplacement(NewCopyOfShard(bad_));
  ASSERT_TRUE(first.ok() && second.ok());
  ASSERT_TRUE(WriteShard(**first, bad_).ok());
  ASSERT_TRUE(WriteShard(**second, bad_).ok());
  EXPECT_TRUE((*first)->Publish(bad_.record_file).ok());
  EXPECT_TRUE((*second)->Publish(bad_.record_file).ok());
  first->reset();
  second->reset();
  EXPECT_TRUE(CheckShard(store(), bad_).ok());
  EXPECT_TRUE(harness_.Leftovers().empty());
}

}  // namespace
}  // namespace holdfast
