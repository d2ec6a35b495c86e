// Readers that take no part in the job, against a real ckptd: any rank's shard from whatever tier
// is nearest, what there is, and a restart with another world size that reads by itself.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>

#include "base/unique_fd.h"
#include "server/runtime/passed_memory.h"
#include "tests/integration/hanging_fs.h"
#include "tests/integration/raw_client.h"
#include "tests/integration/tier_fixture.h"

namespace holdfast {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class AttachTiersTest : public TierTest {
 protected:
  explicit AttachTiersTest(const NodeOptions& options = TierNode()) : TierTest(options) {}
  void SetUp() override { ASSERT_TRUE(node_.Start()); }
  void SavedThenMemoryLost() {
    ASSERT_NO_FATAL_FAILURE(Begin());
    ASSERT_NO_FATAL_FAILURE(SaveEverywhere(1));
    ASSERT_NO_FATAL_FAILURE(SaveEverywhere(2));
    ASSERT_NO_FATAL_FAILURE(ReadAfterPowerCut());
  }
  // A reader takes the first tier of which it is known what it has: both are.
  void ReadAfterPowerCut() {
    PowerCut();
    ASSERT_TRUE(node_.Start());
    ASSERT_TRUE(node_.Until([](const v1::GetStatusReply& reply) {
      return reply.jobs_size() == 1 && reply.jobs(0).tiers_size() > 1 &&
             reply.jobs(0).tiers(0).step() > 0 && reply.jobs(0).tiers(1).step() > 0;
    }));
  }
  std::unique_ptr<Rank> Reader() {
    return std::make_unique<Rank>(node_, RankOptions{.rank = 7, .world_size = 99});
  }
  void FlipByte(const std::string& path, uint64_t from_end) {
    const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    const auto at = static_cast<off_t>(std::filesystem::file_size(path) - from_end);
    char byte = 0;
    ASSERT_EQ(::pread(fd.get(), &byte, 1, at), 1);
    byte = static_cast<char>(byte ^ 1);
    ASSERT_EQ(::pwrite(fd.get(), &byte, 1, at), 1);
  }
};

TEST_F(AttachTiersTest, MemoryThenTheDrivesThenTheRemoteDirectory) {
  SavedThenMemoryLost();
  const auto reader = Reader();
  for (const std::string rank : {"0", "1"}) {
    EXPECT_THAT(reader->Do("attach rank=" + rank),
                AllOf(StartsWith("ok step=2 source=nvme"), HasSubstr("memory copy absent")));
    EXPECT_EQ(reader->Do("read"), "ok tensors=2 world=2");
  }
  EXPECT_THAT(FilesIn(node_.memory_dir(), "slot-"), ::testing::IsEmpty()) << "nothing is fetched";
  EXPECT_THAT(reader->Do("attach rank=2"), StartsWith("error TOPOLOGY"));
  EmptyDrives();
  node_.Kill();
  ASSERT_TRUE(node_.Start());
  for (const std::string rank : {"0", "1"}) {
    EXPECT_THAT(reader->Do("attach step=1 rank=" + rank), StartsWith("ok step=1 source=remote"));
    EXPECT_EQ(reader->Do("read"), "ok tensors=2 world=2");
  }
  // With the daemon's own state gone it is looked for by its name.
  node_.Kill();
  EmptyDirectory(node_.memory_dir());
  EmptyDirectory(node_.state_dir());
  ASSERT_TRUE(node_.Start());
  EXPECT_THAT(reader->Do("attach rank=1"), StartsWith("ok step=2 source=remote"));
}

TEST_F(AttachTiersTest, ItsOwnerReadsItAndAnotherUserDoesNot) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "needs root";
  }
  Rank owner(node_, {.job = "mine", .uid = 4711});
  ASSERT_THAT(owner.Do("open"), StartsWith("ok"));
  ASSERT_EQ(owner.Do("save 1"), "ok sealed");
  ASSERT_EQ(owner.Do("tier remote"), "ok remote");
  owner.Kill();
  ASSERT_NO_FATAL_FAILURE(ReadAfterPowerCut());
  Rank reader(node_, {.job = "mine", .uid = 4711});
  EXPECT_THAT(reader.Do("attach"), StartsWith("ok step=1 source=nvme"));
  EXPECT_THAT(reader.Do("attach without=nvme"), StartsWith("ok step=1 source=remote"));
  EXPECT_EQ(reader.Do("read"), "ok tensors=2 world=1");
  EXPECT_THAT(reader.Do("list"), StartsWith("ok 1:1/1,nvme,remote"));
  Rank thief(node_, {.job = "mine", .uid = 4712});
  EXPECT_THAT(thief.Do("attach"), StartsWith("error REFUSED"));
  EXPECT_THAT(thief.Do("list"), StartsWith("error REFUSED"));
}

// Records are passed as memory of ckptd's. Here a user keeps as many pages of ended connections as
// one may have.
TEST_F(AttachTiersTest, WhoKeepsTooMuchPassedMemoryGetsNoRecords) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_NO_FATAL_FAILURE(Save(1, ""));
  const auto reader = RawClient::Greet(node_.socket());
  ASSERT_NE(reader, nullptr);
  v1::ClientFrame read;
  read.mutable_read_records()->set_job("job");
  read.mutable_read_records()->set_attempt(1);
  read.mutable_read_records()->set_step(1);
  v1::ClientFrame hello;
  hello.mutable_hello()->set_protocol(1);
  hello.mutable_hello()->set_network_flag(true);
  std::vector<void*> kept;
  for (bool has_page = true; has_page && kept.size() <= PassedMemory::kFilesPerUserMax;) {
    auto client = RawClient::Connect(node_.socket());
    ASSERT_NE(client, nullptr);
    const auto reply = client->Call(hello);
    has_page = reply && reply->frame.hello().network_flag();
    if (has_page) {
      const int page = reply->descriptors.at(0).get();
      kept.push_back(::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, page, 0));
    }
  }
  auto reply = reader->Call(read);
  ASSERT_TRUE(reply.has_value());
  EXPECT_THAT(reply->frame.failure().message(), HasSubstr("files that ckptd passed to them"))
      << reply->frame.DebugString();
  for (void* const page : kept) {
    ::munmap(page, 4096);
  }
  for (const auto until = std::chrono::steady_clock::now() + kPatience;
       reply && reply->frame.has_failure() && std::chrono::steady_clock::now() < until;) {
    reply = reader->Call(read);
  }
  ASSERT_TRUE(reply.has_value());
  EXPECT_TRUE(reply->frame.has_read_records()) << reply->frame.DebugString();
}

TEST_F(AttachTiersTest, ATruncatedImageIsPassedOver) {
  SavedThenMemoryLost();
  const auto reader = Reader();
  EXPECT_THAT(reader->Do("list"), StartsWith("ok"));  // all tiers have been read
  std::filesystem::resize_file(Image("nvme", 2, 0), 5000);
  EXPECT_THAT(reader->Do("attach rank=0"), AllOf(StartsWith("ok step=2 source=remote"),
                                                 HasSubstr("nvme copy bad"), HasSubstr("cut")));
  EXPECT_EQ(reader->Do("read"), "ok tensors=2 world=2");
  // Of another step, whose copies nobody mends meanwhile. (The daemon may be the first that finds
  // the one in remote bad: when it wants to mend the other one.)
  for (const std::string tier : {"nvme", "remote"}) {
    std::filesystem::resize_file(Image(tier, 1, 0), 5000);
  }
  EXPECT_THAT(reader->Do("attach step=1 rank=0"),
              AllOf(StartsWith("error CORRUPT"), HasSubstr("nvme copy bad"),
                    ContainsRegex("remote copy (is )?bad")));
}

TEST_F(AttachTiersTest, ATornRecordAndOneOfANewerFormatArePassedOver) {
  SavedThenMemoryLost();
  const auto reader = Reader();
  // All tiers have been read: a daemon that still reads them would drop a step with a bad record
  // from this tier, since the other one has it whole.
  EXPECT_THAT(reader->Do("list"), StartsWith("ok"));
  FlipByte(Record("nvme", 2, 0), 30);
  EXPECT_THAT(reader->Do("attach rank=0"),
              AllOf(StartsWith("ok step=2 source=remote"), HasSubstr("nvme copy bad")));
  // The version follows the magic.
  std::string record = ReadText(Record("nvme", 2, 1));
  record[8] = 99;
  WriteText(Record("nvme", 2, 1), record);
  EXPECT_THAT(reader->Do("attach rank=1"),
              AllOf(StartsWith("ok step=2 source=remote"), HasSubstr("version")));
}

TEST_F(AttachTiersTest, AFlippedBitIsFoundByReadAndTheNextTierHasTheTensor) {
  SavedThenMemoryLost();
  FlipByte(Image("nvme", 2, 0), 5000);
  const auto reader = Reader();
  EXPECT_THAT(reader->Do("attach unverified rank=0"), StartsWith("ok step=2 source=nvme"));
  EXPECT_THAT(reader->Do("read"), AllOf(StartsWith("error CORRUPT"), HasSubstr("block")));
  EXPECT_THAT(reader->Do("attach rank=0 step=2 without=nvme"),
              StartsWith("ok step=2 source=remote"));
  EXPECT_EQ(reader->Do("read"), "ok tensors=2 world=2");
}

TEST_F(AttachTiersTest, AFileCutShortUnderItsReaderIsAnErrorAndNoCrash) {
  SavedThenMemoryLost();
  const auto reader = Reader();
  EXPECT_THAT(reader->Do("attach rank=1"), StartsWith("ok step=2 source=nvme"));
  std::filesystem::resize_file(Image("nvme", 2, 1), 8192);
  EXPECT_THAT(reader->Do("read"), AllOf(StartsWith("error CORRUPT"), HasSubstr("cut short")));
  EXPECT_THAT(reader->Do("attach rank=1"), StartsWith("ok step=2 source=remote"));
}

// Retention removes the step, its files go into the pool, and newer steps are written: not over
// what somebody has open.
TEST_F(AttachTiersTest, AViewOutlivesTheRemovalOfItsStep) {
  Begin("job", "nvme.keep_last=1 remote.keep_last=1");
  SaveEverywhere(1);
  const auto nvme = Reader();
  const auto remote = Reader();
  EXPECT_THAT(nvme->Do("attach unverified rank=0 without=memory"),
              StartsWith("ok step=1 source=nvme"));
  EXPECT_THAT(remote->Do("attach unverified rank=1 without=memory without=nvme"),
              StartsWith("ok step=1 source=remote"));
  for (const uint64_t step : {2, 3, 4, 5, 6}) {
    SaveEverywhere(step);
  }
  ASSERT_TRUE(node_.Until([this](const v1::GetStatusReply&) {
    return Image("nvme", 1, 0).empty() && !std::filesystem::exists(Image("remote", 1, 1));
  }));
  EXPECT_EQ(nvme->Do("read"), "ok tensors=2 world=2");
  EXPECT_EQ(remote->Do("read"), "ok tensors=2 world=2");
  EXPECT_THAT(nvme->Do("attach step=1 rank=0"), StartsWith("error NOT_FOUND"));
}

TEST_F(AttachTiersTest, TheListSaysWhatThereIsAndWhere) {
  Begin();
  SaveEverywhere(1);
  SaveEverywhere(2);
  KillRanks();
  Launch();
  EXPECT_THAT(DoAll(ranks_, "restore 1"), Each(HasSubstr("step=1")));
  Save(2, "nvme");
  const auto reader = Reader();
  EXPECT_THAT(reader->Do("list"), AllOf(StartsWith("ok 2:2/2,memory,nvme"),
                                        HasSubstr(" 1:2/2-off,"), HasSubstr(" 1:1/2,")));
}

// Two ranks saved; one goes on, then three: each reads all that it needs by itself.
TEST_F(AttachTiersTest, AnotherWorldSizeAdoptsTheStepAndReadsByItself) {
  SavedThenMemoryLost();
  const auto alone = std::make_unique<Rank>(node_, RankOptions{});
  ASSERT_THAT(alone->Do("open"), StartsWith("ok attempt=2"));
  // (What it wants by its own shard's names has another shape.)
  EXPECT_THAT(alone->Do("restore"),
              AllOf(StartsWith("error INVALID_ARGUMENT"), HasSubstr("layers.0.weight")));
  EXPECT_EQ(alone->Do("adopt"), "ok attempt=1 step=2");
  for (const std::string rank : {"0", "1"}) {
    EXPECT_THAT(alone->Do("attach step=2 attempt=1 rank=" + rank), StartsWith("ok step=2"));
    EXPECT_EQ(alone->Do("read"), "ok tensors=2 world=2");
  }
  EXPECT_EQ(alone->Do("save 3"), "ok sealed");
  EXPECT_EQ(alone->Do("tier remote"), "ok remote");
  alone->Kill();
  ranks_ = StartRanks(node_, {.bytes = bytes_}, 3);
  ASSERT_THAT(DoAll(ranks_, "open"), Each(StartsWith("ok attempt=3")));
  EXPECT_THAT(DoAll(ranks_, "adopt"), Each("ok attempt=2 step=3"));
  node_.Kill();  // what was decided is durable
  ASSERT_TRUE(node_.Start());
  EXPECT_THAT(DoAll(ranks_, "save 4"), Each(HasSubstr("ok sealed")));
  EXPECT_THAT(ranks_[0]->Do("list"), HasSubstr(" 2:3/1,"));
}

NodeOptions OnMount(const HangingMount& mount) {
  NodeOptions options = TierNode();
  options.remote = false;
  options.remote_dir = mount.path();
  options.remote_options = "stall_timeout_ms: 60000, ";
  return options;
}

class Mounted {
 protected:
  HangingMount mount_;
};

class AttachHungMountTest : private Mounted, public AttachTiersTest {
 protected:
  AttachHungMountTest() : AttachTiersTest(OnMount(mount_)) {}
  void SetUp() override {
    if (!mount_.mounted()) {
      GTEST_SKIP() << "needs root, /dev/fuse and mounting in a namespace of its own";
    }
    ASSERT_TRUE(node_.Start());
  }
  HangingMount& mount() { return mount_; }
};

TEST_F(AttachHungMountTest, WhatHangsIsAnsweredAtTheDeadlineAndHoldsUpNobody) {
  Begin();
  SaveEverywhere(1);
  mount().HangAtWrite();
  Save(2, "nvme");
  ASSERT_TRUE(mount().AwaitHanging());
  const auto reader = Reader();
  EXPECT_THAT(reader->Do("attach step=1 rank=0 without=memory without=nvme ms=1500"),
              Not(StartsWith("ok")));
  EXPECT_THAT(reader->Do("attach step=1 rank=0 without=memory"),
              StartsWith("ok step=1 source=nvme"));
  Save(3, "nvme");
  mount().Release();
  EXPECT_THAT(reader->Do("attach step=1 rank=0 without=memory without=nvme"),
              StartsWith("ok step=1 source=remote"));
}

}  // namespace
}  // namespace holdfast
