// Parts of a shard out of other nodes' slots, both ends real: by whatever way, from whichever node.
#include "server/runtime/part_reader.h"

#include <gmock/gmock.h>
#include <sys/mman.h>

#include <cstring>
#include <deque>
#include <map>

#include "base/mutex.h"
#include "server/peers/pull_client.h"
#include "server/runtime/passed_files.h"
#include "server/runtime/remote_parts.h"
#include "tests/server/runtime/pull_source.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

constexpr DrainId kOpened = 9;
constexpr auto kPatience = std::chrono::seconds(30);

// What a client has of it: the memory, mapped.
class Mapped {
 public:
  explicit Mapped(const DurableOpened& opened)
      : bytes_(opened.parts_bytes),
        at_(::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, opened.files->descriptors[0].get(), 0)) {
    EXPECT_NE(at_, MAP_FAILED);
    const int record = opened.files->descriptors[1].get();
    record_.resize(static_cast<size_t>(::lseek(record, 0, SEEK_END)));
    EXPECT_EQ(::pread(record, record_.data(), record_.size(), 0),
              static_cast<ssize_t>(record_.size()));
    for (const UniqueFd& fd : opened.files->descriptors) {
      EXPECT_NE(::ftruncate(fd.get(), 1), 0) << "it could be cut short";
    }
  }
  ~Mapped() { ::munmap(at_, bytes_); }
  std::string At(uint64_t place, uint64_t bytes) const {
    return {static_cast<const char*>(at_) + place, bytes};
  }
  const std::string& record() const { return record_; }

 private:
  const uint64_t bytes_;
  void* const at_;
  std::string record_;
};

class PartReaderTest : public ::testing::Test {
 protected:
  void Serve(const std::map<std::string, Source*>& sources) {
    PullClient::Options options;
    options.self = "a";
    options.env = Env::System();
    pulls_ = std::make_shared<PullClient>(std::move(options));
    ChangePeers peers;
    for (const auto& [name, source] : sources) {
      peers.up[name] = {source->Serve(), 1};
    }
    pulls_->ChangePeers(peers);
    reader_.emplace(PartReader::Options{"a", pulls_, fabric_.get(), remote_parts_,
                                        [this](Event event) {
                                          const MutexLock lock(mutex_);
                                          events_.push_back(std::move(event));
                                          changed_.NotifyAll();
                                        },
                                        [this] {
                                          const MutexLock lock(mutex_);
                                          ++ended_;
                                          changed_.NotifyAll();
                                        }});
  }
  void WithFabric() {
    store_ = OpenStore(dir_.path());
    fabric_ = OpenPort(store_);
  }
  template <typename What>
  std::optional<What> Await() {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    const MutexLock lock(mutex_);
    while (events_.empty() && changed_.WaitUntil(mutex_, until)) {
    }
    if (events_.empty() || std::get_if<What>(&events_.front()) == nullptr) {
      return std::nullopt;
    }
    What what = std::get<What>(events_.front());
    events_.pop_front();
    return what;
  }
  bool AwaitEnded(int shards) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    const MutexLock lock(mutex_);
    while (ended_ < shards && changed_.WaitUntil(mutex_, until)) {
    }
    return ended_ == shards;
  }
  absl::Status Open(std::vector<std::string> nodes) {
    OpenDurable open;
    open.drain = kOpened;
    open.tier = TierKind::kPeer;
    open.key = {content_.expected.id, content_.expected.job_name, content_.expected.world_size};
    open.peers = std::move(nodes);
    reader_->Open(open);
    const auto opened = Await<DurableOpened>();
    if (!opened) {
      return absl::InternalError("it was not answered");
    }
    EXPECT_EQ(opened->drain, kOpened);
    EXPECT_FALSE(opened->bad);
    if (opened->status.ok()) {
      EXPECT_EQ(opened->copy.id, content_.expected.id);
      mapped_.emplace(*opened);
      const auto record = DecodeRecordAndLayout(mapped_->record());
      EXPECT_TRUE(record.ok()) << record.status();
    }
    return opened->status;
  }
  absl::Status Read(const std::vector<PartRun>& parts, bool contradicted = false) {
    reader_->Read({kOpened, ++token_, parts, contradicted});
    const auto read = Await<PartsRead>();
    if (!read || read->token != token_) {
      return absl::InternalError("it was not answered");
    }
    return read->status;
  }
  void ExpectRead(const std::vector<PartRun>& parts, bool contradicted = false) {
    const absl::Status read = Read(parts, contradicted);
    ASSERT_TRUE(read.ok()) << read;
    for (const PartRun& part : parts) {
      EXPECT_TRUE(mapped_->At(part.place, part.bytes) == Image().substr(part.offset, part.bytes))
          << part.bytes << " bytes from " << part.offset << " on";
    }
  }
  const std::string& Image() const { return content_.sample.image; }
  std::vector<PartRun> SomeParts() const {
    const uint64_t size = Image().size();
    return {{size / 2, size / 3, 4096}, {0, 100, 0}, {size - 1, 1, kPartsBytes - 1}};
  }

  const SlotContent content_ = MakeSlotContent(5, 1);
  const SharedMemoryDirectory dir_;
  std::shared_ptr<SlotStore> store_;
  std::unique_ptr<FabricPort> fabric_;
  Source b_{content_, "b"};
  Source c_{content_, "c"};
  std::shared_ptr<PullClient> pulls_;
  std::shared_ptr<RemoteParts> remote_parts_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<Event> events_ GUARDED_BY(mutex_);
  int ended_ GUARDED_BY(mutex_) = 0;
  uint64_t token_ = 0;
  std::optional<Mapped> mapped_;
  std::optional<PartReader> reader_;
};

TEST_F(PartReaderTest, ByTheStream) {
  Serve({{"b", &b_}});
  ASSERT_TRUE(Open({"b"}).ok());
  for (int i = 0; i < 3; ++i) {
    ExpectRead(SomeParts());
  }
  EXPECT_EQ(b_.asked(), 1) << "it was opened once for all";
}

TEST_F(PartReaderTest, ByOneSidedReads) {
  WithFabric();
  b_.OpenFabric();
  Serve({{"b", &b_}});
  ASSERT_TRUE(Open({"b"}).ok());
  for (int i = 0; i < 3; ++i) {
    ExpectRead(SomeParts());
  }
  EXPECT_EQ(b_.asked(), 1);
}

TEST_F(PartReaderTest, WhatTheClientFindsWrongIsReadAnotherWayThenFromAnotherNode) {
  WithFabric();
  // One-sided reads of b bring bytes of another slot.
  const SharedMemoryDirectory elsewhere;
  const auto others = OpenStore(elsewhere.path());
  ASSERT_TRUE(SealSlot(*others, kFrom, content_).ok());
  {
    auto image = others->OpenImageFile(kFrom, true);
    ASSERT_TRUE(image.ok());
    const std::string zeros(Image().size(), '\0');
    ASSERT_TRUE((*image)->WriteAt(0, std::as_bytes(std::span(zeros))).ok());
  }
  b_.OpenFabric(others);
  Serve({{"b", &b_}, {"c", &c_}});
  ASSERT_TRUE(Open({"b", "c"}).ok());
  ASSERT_TRUE(Read(SomeParts()).ok());
  EXPECT_FALSE(mapped_->At(4096, 10) == Image().substr(Image().size() / 2, 10));
  ExpectRead(SomeParts(), /*contradicted=*/true);  // over the daemons' own connection
  EXPECT_EQ(c_.asked(), 0);
  ExpectRead(SomeParts());
  b_.FlipBit();
  ASSERT_TRUE(Read(SomeParts()).ok()) << "digests are the client's to compare";
  ExpectRead(SomeParts(), /*contradicted=*/true);
  EXPECT_EQ(c_.asked(), 1);
}

TEST_F(PartReaderTest, WhenTwoNodesContradictItIsRatherThisOne) {
  Serve({{"b", &b_}, {"c", &c_}});
  ASSERT_TRUE(Open({"b", "c"}).ok());
  ExpectRead(SomeParts());
  ExpectRead(SomeParts(), /*contradicted=*/true);
  EXPECT_EQ(c_.asked(), 1);
  const absl::Status read = Read(SomeParts(), /*contradicted=*/true);
  EXPECT_TRUE(absl::IsUnavailable(read)) << read;
  EXPECT_THAT(std::string(read.message()), HasSubstr("b and from c"));
}

TEST_F(PartReaderTest, TheNextNodeWhereOneDoesNotHaveIt) {
  b_.Refuse(absl::NotFoundError("it has no such shard"));
  Serve({{"b", &b_}, {"c", &c_}});
  ASSERT_TRUE(Open({"b", "gone", "c"}).ok());
  ExpectRead(SomeParts());
  EXPECT_EQ(c_.asked(), 1);
}

TEST_F(PartReaderTest, TheNextNodeWhereOneLeavesInTheMiddle) {
  Serve({{"b", &b_}, {"c", &c_}});
  ASSERT_TRUE(Open({"b", "c"}).ok());
  ExpectRead(SomeParts());
  ChangePeers change;
  change.down = {"b"};
  pulls_->ChangePeers(change);
  ExpectRead(SomeParts());
  EXPECT_EQ(c_.asked(), 1);
}

TEST_F(PartReaderTest, WhatWasRefilledMeanwhileIsAskedForAnew) {
  Serve({{"b", &b_}});
  ASSERT_TRUE(Open({"b"}).ok());
  ExpectRead(SomeParts());
  b_.Refill();  // the same content, of another filling
  ExpectRead(SomeParts());
  EXPECT_EQ(b_.asked(), 2);
}

TEST_F(PartReaderTest, ANodeThatServesAsManyAsItMayIsAskedAgain) {
  b_.Refuse(absl::ResourceExhaustedError("32 are served"));
  Serve({{"b", &b_}});
  OpenDurable open;
  open.drain = kOpened;
  open.tier = TierKind::kPeer;
  open.key = {content_.expected.id, content_.expected.job_name, content_.expected.world_size};
  open.peers = {"b"};
  reader_->Open(open);
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (b_.asked() < 3 && std::chrono::steady_clock::now() < until) {
    std::this_thread::yield();
  }
  EXPECT_GE(b_.asked(), 3);
  reader_->End(kOpened);  // whoever waits has had enough
  const auto opened = Await<DurableOpened>();
  ASSERT_TRUE(opened.has_value());
  EXPECT_FALSE(opened->status.ok());
  EXPECT_TRUE(AwaitEnded(1));
}

TEST_F(PartReaderTest, WhoHasNothingSaysSo) {
  b_.Refuse(absl::NotFoundError("it has no such shard"));
  Serve({{"b", &b_}});
  const absl::Status opened = Open({"b"});
  EXPECT_TRUE(absl::IsUnavailable(opened)) << opened << ": what others say is no verdict";
  EXPECT_THAT(std::string(opened.message()), HasSubstr("it has no such shard"));
  EXPECT_TRUE(absl::IsUnavailable(Open({})));
}

TEST_F(PartReaderTest, AnotherShardsRecordIsNotTaken) {
  const SlotContent other = MakeSlotContent(6, 1);
  Source stranger(other, "d");
  stranger.AnswerAnything();
  Serve({{"d", &stranger}, {"c", &c_}});
  ASSERT_TRUE(Open({"d", "c"}).ok());
  ExpectRead(SomeParts());
}

TEST_F(PartReaderTest, BehindTheImageThereIsNothing) {
  Serve({{"b", &b_}});
  ASSERT_TRUE(Open({"b"}).ok());
  EXPECT_TRUE(absl::IsOutOfRange(Read({{Image().size(), 1, 0}})));
  EXPECT_TRUE(absl::IsOutOfRange(Read({{UINT64_MAX, 1, 0}})));
  ExpectRead(SomeParts());
  EXPECT_EQ(b_.asked(), 1) << "nothing is tried for a mistake";
}

TEST_F(PartReaderTest, WhatIsEndedEnds) {
  Serve({{"b", &b_}});
  ASSERT_TRUE(Open({"b"}).ok());
  reader_->End(kOpened);
  EXPECT_TRUE(AwaitEnded(1));
  reader_->Reap();
  reader_->Read({kOpened, 1, SomeParts(), false});
  reader_->End(kOpened);
  // And all that is left, when the reader goes.
  ASSERT_TRUE(Open({"b"}).ok());
  reader_.reset();
  EXPECT_TRUE(AwaitEnded(2));
}

}  // namespace
}  // namespace holdfast
