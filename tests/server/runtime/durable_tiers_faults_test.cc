// Flushes whose calls fail, whose mount goes away in the middle, whose bytes are lost on the way:
// what they end with, that the other tier goes on, and that it is over when the fault is. And what
// is left of replacements that do not come to their end.
#include <fcntl.h>

#include <future>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "base/errno_status.h"
#include "base/unique_fd.h"
#include "tests/server/runtime/durable_tiers_fixture.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

struct TierFault {
  std::string name;
  std::string call;
  int error = 0;
  absl::StatusCode code = absl::StatusCode::kOk;
};

class TierFaultTest : public DurableTiersTest,
                      public ::testing::WithParamInterface<std::tuple<TierKind, TierFault>> {
 protected:
  TierKind tier() const { return std::get<0>(GetParam()); }
  TierKind other() const { return tier() == TierKind::kNvme ? TierKind::kRemote : TierKind::kNvme; }
};

TEST_P(TierFaultTest, ItEndsAloneIsNamedAndLeavesNothing) {
  const TierFault& fault = std::get<1>(GetParam());
  DrainId drain = 0;
  for (const TierKind each : {tier(), other()}) {
    ASSERT_EQ(Do(Flush(++drain, 1, TierKind::kMemory, each)).status, absl::OkStatus());
  }
  AwaitIdle();
  const std::vector<std::string> before = Leftovers(tier());
  const size_t open_files = OpenFiles();

  env_.Meddle({.dir = DirOf(tier()), .call = fault.call, .error = fault.error});
  const FlushShard flush = Flush(++drain, 2, TierKind::kMemory, tier());
  const FlushEnded failed = Do(flush);
  EXPECT_EQ(failed.status.code(), fault.code) << failed.status;
  EXPECT_FALSE(failed.source_bad);
  const auto named = ::testing::AllOf(
      HasSubstr(fault.call + " '" + DirOf(tier()) + "/"), HasSubstr(".safetensors"),
      HasSubstr("(" + fault.name.substr(0, fault.name.find('_')) + ")"));
  EXPECT_THAT(Message(failed.status), named);
  EXPECT_FALSE(Tier(tier()).healthy());
  EXPECT_THAT(Tier(tier()).state(), named);
  // The other tier goes on.
  const FlushShard beside = Flush(++drain, 2, TierKind::kMemory, other());
  const FlushEnded went = Do(beside);
  EXPECT_EQ(went.status, absl::OkStatus());
  EXPECT_EQ(Verified(beside, went), "");
  EXPECT_TRUE(Tier(other()).healthy());
  // Nothing is left of it.
  AwaitIdle();
  EXPECT_EQ(Leftovers(tier()), before);
  AwaitOpenFiles(open_files);
  // And when the fault is gone it is as if it had not been.
  env_.Meddle({});
  FlushShard again = flush;
  again.drain = ++drain;
  const FlushEnded ended = Do(again);
  EXPECT_EQ(ended.status, absl::OkStatus());
  EXPECT_EQ(Verified(again, ended), "");
  EXPECT_TRUE(Tier(tier()).healthy()) << Tier(tier()).state();
  AwaitIdle();
  EXPECT_EQ(Leftovers(tier()), before);
}

INSTANTIATE_TEST_SUITE_P(
    All, TierFaultTest,
    ::testing::Combine(
        ::testing::Values(TierKind::kNvme, TierKind::kRemote),
        ::testing::Values(
            TierFault{"ENOSPC", "write", ENOSPC, absl::StatusCode::kResourceExhausted},
            TierFault{"EDQUOT", "write", EDQUOT, absl::StatusCode::kResourceExhausted},
            TierFault{"EIO", "write", EIO, absl::StatusCode::kDataLoss},
            TierFault{"EROFS", "write", EROFS, absl::StatusCode::kInternal},
            TierFault{"ESTALE", "write", ESTALE, absl::StatusCode::kInternal},
            TierFault{"EIO_sync", "sync", EIO, absl::StatusCode::kDataLoss},
            TierFault{"ENOSPC_sync", "sync", ENOSPC, absl::StatusCode::kResourceExhausted},
            TierFault{"ENOSPC_allocate", "allocate", ENOSPC,
                      absl::StatusCode::kResourceExhausted})),
    [](const auto& at) {
      return std::string(TierName(std::get<0>(at.param))) + "_" + std::get<1>(at.param).name;
    });

class TierMiddleTest : public DurableTiersTest, public ::testing::WithParamInterface<TierKind> {
 protected:
  void SealBig() { elements_ = 3'000'000; }
};

TEST_P(TierMiddleTest, AMountThatGoesAwayAmidAFlushIsNotWrittenTo) {
  DrainId drain = 0;
  ASSERT_EQ(Do(Flush(++drain, 1, TierKind::kMemory, GetParam())).status, absl::OkStatus());
  const std::string dir = DirOf(GetParam());
  env_.Meddle({.dir = dir, .at_write = [dir] { env_.Unmount(dir); }});
  const FlushShard flush = Flush(++drain, 2, TierKind::kMemory, GetParam());
  const absl::Status failed = Do(flush).status;
  EXPECT_TRUE(absl::IsUnavailable(failed)) << failed;
  EXPECT_THAT(Message(failed), ::testing::AllOf(HasSubstr(dir), HasSubstr("mount it again")));
  EXPECT_EQ(Await<TierAway>().dir, dir);
  env_.Meddle({});
  const TierKind other = GetParam() == TierKind::kNvme ? TierKind::kRemote : TierKind::kNvme;
  EXPECT_EQ(Do(Flush(++drain, 2, TierKind::kMemory, other)).status, absl::OkStatus());
  env_.Unmount("");
  FlushShard again = flush;
  again.drain = ++drain;
  const FlushEnded ended = Do(again);
  EXPECT_EQ(ended.status, absl::OkStatus());
  EXPECT_EQ(Verified(again, ended), "");
  AwaitIdle();
  EXPECT_THAT(Leftovers(GetParam()), ::testing::Each(::testing::Not(::testing::EndsWith(".tmp"))));
}

// What was written is read again, as much of it as the policy says.
TEST_P(TierMiddleTest, WhatWasWrittenIsReadBackAsThePolicySays) {
  SealBig();
  std::map<v1::TierPolicy::Verify, uint64_t> read;
  DrainId drain = 0;
  FlushShard flush;
  for (const auto verify : {v1::TierPolicy::VERIFY_UNSPECIFIED, v1::TierPolicy::VERIFY_SAMPLE,
                            v1::TierPolicy::VERIFY_ALL}) {
    ++drain;
    flush = Flush(drain, drain, TierKind::kMemory, GetParam());
    flush.verify = verify;
    env_.TakeReadBack();
    ASSERT_EQ(Do(flush).status, absl::OkStatus());
    read[verify] = env_.TakeReadBack();
  }
  EXPECT_GT(read[v1::TierPolicy::VERIFY_UNSPECIFIED], 0u) << "never none";
  EXPECT_GT(read[v1::TierPolicy::VERIFY_SAMPLE], 0u);
  EXPECT_LT(read[v1::TierPolicy::VERIFY_SAMPLE], flush.image_bytes / 2);
  EXPECT_GE(read[v1::TierPolicy::VERIFY_ALL], flush.image_bytes);
}

TEST_P(TierMiddleTest, OfWhatWasWrittenFivePercentAtMostAreReadBack) {
  elements_ = 17'000'000;  // more than 64 MiB
  FlushShard flush = Flush(1, 1, TierKind::kMemory, GetParam());
  ASSERT_GE(flush.image_bytes, uint64_t{64} << 20);
  env_.TakeReadBack();
  const FlushEnded ended = Do(flush);
  ASSERT_EQ(ended.status, absl::OkStatus());
  const uint64_t read = env_.TakeReadBack() + ended.copy.record_bytes;
  EXPECT_GT(read, ended.copy.record_bytes);
  EXPECT_LE(20 * read, flush.image_bytes + ended.copy.record_bytes);
  RecordProperty("read_back", std::to_string(read));
  RecordProperty("written", std::to_string(flush.image_bytes + ended.copy.record_bytes));
}

TEST_P(TierMiddleTest, ABitThatIsLostOnTheWayIsFoundBeforeThePublication) {
  const FlushShard first = Flush(1, 1, TierKind::kMemory, GetParam());
  env_.Meddle({.dir = DirOf(GetParam()), .flips = true});
  FlushShard flush = first;
  flush.verify = v1::TierPolicy::VERIFY_ALL;
  const FlushEnded failed = Do(flush);
  EXPECT_TRUE(absl::IsDataLoss(failed.status)) << failed.status;
  EXPECT_THAT(Message(failed.status), HasSubstr(DirOf(GetParam())));
  EXPECT_FALSE(failed.source_bad) << "the slot is as it was";
  AwaitIdle();
  EXPECT_THAT(Leftovers(GetParam()), ::testing::IsEmpty());
}

TEST_P(TierMiddleTest, NothingIsPublishedFromASlotWithAFlippedBit) {
  const FlushShard flush = Flush(1, 1, TierKind::kMemory, GetParam());
  {
    const auto file = slots_->OpenImageFile(flush.slot, true);
    ASSERT_TRUE(file.ok()) << file.status();
    std::byte byte{};
    ASSERT_EQ((*file)->ReadAt(9000, {&byte, 1}), absl::OkStatus());
    byte ^= std::byte{1};
    ASSERT_EQ((*file)->WriteAt(9000, {&byte, 1}), absl::OkStatus());
  }
  const FlushEnded failed = Do(flush);
  EXPECT_TRUE(absl::IsDataLoss(failed.status)) << failed.status;
  EXPECT_TRUE(failed.source_bad);
  EXPECT_TRUE(Tier(GetParam()).healthy()) << "it is not the tier's doing";
  AwaitIdle();
  EXPECT_THAT(Leftovers(GetParam()), ::testing::IsEmpty());
  for (const auto& entry : std::filesystem::recursive_directory_iterator(DirOf(GetParam()))) {
    EXPECT_THAT(entry.path().string(), ::testing::Not(::testing::EndsWith(".record")));
  }
}

// A bad copy, and good ones in memory and in the other tier.
class ReplacementTest : public TierMiddleTest {
 protected:
  void SetUp() override {
    TierMiddleTest::SetUp();
    SealBig();
    const FlushEnded good = Do(Flush(++drain_, 1, TierKind::kMemory, other()));
    ASSERT_EQ(good.status, absl::OkStatus());
    good_ = good.copy.location;
    const FlushEnded bad = Do(Flush(++drain_, 1, TierKind::kMemory, GetParam()));
    ASSERT_EQ(bad.status, absl::OkStatus());
    bad_ = bad.copy.location;
    std::filesystem::resize_file(bad_, kCut);
  }
  TierKind other() const {
    return GetParam() == TierKind::kNvme ? TierKind::kRemote : TierKind::kNvme;
  }
  FlushShard Replace(TierKind from) {
    FlushShard replace = Flush(++drain_, 1, from, GetParam());
    replace.replace = true;
    return replace;
  }
  void ExpectUntouched() {
    AwaitIdle();
    EXPECT_EQ(std::filesystem::file_size(bad_), kCut);
    EXPECT_THAT(Leftovers(GetParam()), ::testing::IsEmpty());
  }

  static constexpr uint64_t kCut = 4096;
  DrainId drain_ = 0;
  std::string bad_;
  std::string good_;  // in the other tier
};

INSTANTIATE_TEST_SUITE_P(All, ReplacementTest,
                         ::testing::Values(TierKind::kNvme, TierKind::kRemote),
                         [](const auto& at) { return std::string(TierName(at.param)); });

TEST_P(ReplacementTest, ThatIsCalledOffTouchesNothing) {
  for (const TierKind from : {TierKind::kMemory, other()}) {
    SCOPED_TRACE(TierName(from));
    std::promise<void> writes;
    std::promise<void> called_off;
    std::shared_future<void> goes_on = called_off.get_future().share();
    env_.Meddle({.dir = DirOf(GetParam()),
                 .at_write = [&, first = std::make_shared<std::atomic<bool>>(true)] {
                   if (first->exchange(false)) {
                     writes.set_value();
                   }
                   goes_on.wait_for(kPatience);
                 }});
    const FlushShard replace = Replace(from);
    tiers_->Perform(replace);
    ASSERT_EQ(writes.get_future().wait_for(kPatience), std::future_status::ready);
    tiers_->Perform(CancelDrain{replace.drain});
    called_off.set_value();
    EXPECT_TRUE(absl::IsCancelled(AwaitFlush(replace.drain).status));
    AwaitIdle();
    env_.Meddle({});
    ExpectUntouched();
  }
  EXPECT_EQ(Do(Replace(other())).status, absl::OkStatus());
}

// What no manifest names is the attempt's first opening's: another one of that number is refused.
TEST_P(ReplacementTest, OfAnotherOpeningIsRefused) {
  if (GetParam() == TierKind::kNvme) {
    GTEST_SKIP() << "a drive is one node's";
  }
  FlushShard replace = Replace(TierKind::kMemory);
  replace.opening = 8;
  EXPECT_FALSE(Do(replace).status.ok());
  ExpectUntouched();
}

// The good one, while it is read: its end, when its beginning has been written.
TEST_P(ReplacementTest, WhoseSourceGoesBadMeanwhileTouchesNothing) {
  for (const TierKind from : {other(), TierKind::kMemory}) {
    SCOPED_TRACE(TierName(from));
    const FlushShard replace = Replace(from);
    const uint64_t place = replace.image_bytes - 100;
    const auto flip = [&](File& file) {
      std::byte byte{};
      EXPECT_EQ(file.ReadAt(place, {&byte, 1}), absl::OkStatus());
      byte ^= std::byte{1};
      EXPECT_EQ(file.WriteAt(place, {&byte, 1}), absl::OkStatus());
    };
    env_.Meddle({.dir = DirOf(GetParam()),
                 .at_write = [&, first = std::make_shared<std::atomic<bool>>(true)] {
                   if (!first->exchange(false)) {
                     return;
                   }
                   const auto file = from == TierKind::kMemory
                                         ? slots_->OpenImageFile(replace.slot, true)
                                         : Env::System()->Open(good_, OpenMode::kReadWrite);
                   ASSERT_TRUE(file.ok()) << file.status();
                   flip(**file);
                 }});
    const FlushEnded ended = Do(replace);
    AwaitIdle();
    env_.Meddle({});
    EXPECT_TRUE(absl::IsDataLoss(ended.status)) << ended.status;
    EXPECT_TRUE(ended.source_bad);
    ExpectUntouched();
  }
}

INSTANTIATE_TEST_SUITE_P(All, TierMiddleTest, ::testing::Values(TierKind::kNvme, TierKind::kRemote),
                         [](const auto& at) { return std::string(TierName(at.param)); });

// A bad copy that is being read while a good one is put in its place: what is found of the file
// that was there is no verdict on the one that is.
class MendedMeanwhileTest : public DurableTiersTest,
                            public ::testing::WithParamInterface<TierKind> {
 protected:
  void SetUp() override {
    DurableTiersTest::SetUp();
    written_ = Flush(1, 1, TierKind::kMemory, GetParam());
    copy_ = Do(written_);
    ASSERT_EQ(copy_.status, absl::OkStatus());
    std::filesystem::copy_file(copy_.copy.location, dir_.Path("good"));
    ASSERT_EQ(FlipBitOf(*Env::System(), copy_.copy.location, written_.image_bytes - 100),
              absl::OkStatus());
  }
  // When its image is read for the first time.
  void MendAtTheFirstRead() {
    env_.Meddle({.dir = DirOf(GetParam()),
                 .at_read = [this, first = std::make_shared<std::atomic<bool>>(true)](uint64_t) {
                   if (first->exchange(false)) {
                     std::filesystem::rename(dir_.Path("good"), copy_.copy.location);
                   }
                 }});
  }

  FetchEnded Fetch() {
    FetchShard fetch;
    fetch.drain = 2;
    fetch.from = GetParam();
    fetch.key = written_.key;
    fetch.slot = 100;
    fetch.generation = 1;
    fetch.slot_bytes = 2 * kSlot;
    EXPECT_EQ(slots_->Create(fetch.slot, fetch.slot_bytes), absl::OkStatus());
    EXPECT_EQ(slots_->WriteNote(fetch.slot, NoteOf(1, fetch.slot_bytes)), absl::OkStatus());
    tiers_->Perform(fetch);
    return Await<FetchEnded>();
  }

  // What reads the copy while it is mended ends, blames nothing, and goes well the next time.
  void ExpectItIsTriedAgain(FlushShard flush) {
    flush.drain = 8;
    const FlushEnded ended = Do(flush);
    EXPECT_TRUE(absl::IsUnavailable(ended.status)) << ended.status;
    EXPECT_FALSE(ended.source_bad);
    for (const TierKind tier : {TierKind::kNvme, TierKind::kRemote}) {
      EXPECT_TRUE(Tier(tier).healthy()) << Tier(tier).state();
    }
    flush.drain = 9;
    EXPECT_EQ(Do(flush).status, absl::OkStatus());
  }

  FlushShard written_;
  FlushEnded copy_;
};

INSTANTIATE_TEST_SUITE_P(All, MendedMeanwhileTest,
                         ::testing::Values(TierKind::kNvme, TierKind::kRemote),
                         [](const auto& at) { return std::string(TierName(at.param)); });

TEST_P(MendedMeanwhileTest, AVerificationJudgesWhatLiesThere) {
  EXPECT_NE(Verified(written_, copy_), "");
  MendAtTheFirstRead();
  EXPECT_EQ(Verified(written_, copy_), "");
}

TEST_P(MendedMeanwhileTest, ARestoreCallsNothingBad) {
  MendAtTheFirstRead();
  const FetchEnded ended = Fetch();
  EXPECT_TRUE(absl::IsUnavailable(ended.status)) << ended.status;
  EXPECT_THAT(Message(ended.status), HasSubstr("written anew"));
  EXPECT_FALSE(ended.source_bad);
}

// The bit is as it should be again when the copy is read for the second time: as soon as any part
// of it is read again (several threads read it, in no order).
TEST_P(MendedMeanwhileTest, ARestoreCondemnsNothingOnOneReading) {
  struct Reads {
    std::mutex mu;
    std::multiset<uint64_t> of;
    bool mended = false;
  };
  const auto reads = std::make_shared<Reads>();
  env_.Meddle({.dir = DirOf(GetParam()), .at_read = [this, reads](uint64_t offset) {
                 const std::lock_guard lock(reads->mu);
                 const bool again = reads->of.contains(offset);
                 reads->of.insert(offset);
                 if (again && !std::exchange(reads->mended, true)) {
                   EXPECT_EQ(
                       FlipBitOf(*Env::System(), copy_.copy.location, written_.image_bytes - 100),
                       absl::OkStatus());
                 }
               }});
  ASSERT_TRUE(slots_->RemoveRecord(written_.slot).ok());  // (there is room for one of it)
  EXPECT_EQ(Fetch().status, absl::OkStatus());
  EXPECT_EQ(reads->of.count(0), 2);
}

TEST_P(MendedMeanwhileTest, ARestoreCondemnsWhatIsBadTwice) {
  const FetchEnded ended = Fetch();
  EXPECT_TRUE(absl::IsDataLoss(ended.status)) << ended.status;
  EXPECT_TRUE(ended.source_bad);
}

// (Nothing is flushed from the remote tier.)
class MendedOnADriveTest : public MendedMeanwhileTest {};
INSTANTIATE_TEST_SUITE_P(Nvme, MendedOnADriveTest, ::testing::Values(TierKind::kNvme));

TEST_P(MendedOnADriveTest, AFlushThatReadsItCallsNothingBad) {
  MendAtTheFirstRead();
  ExpectItIsTriedAgain(Flush(2, 1, TierKind::kNvme, TierKind::kRemote));
}

TEST_P(MendedMeanwhileTest, WhatIsMendedFromItCallsNothingBad) {
  const TierKind other = GetParam() == TierKind::kNvme ? TierKind::kRemote : TierKind::kNvme;
  const FlushEnded bad = Do(Flush(2, 1, TierKind::kMemory, other));
  ASSERT_EQ(bad.status, absl::OkStatus());
  std::filesystem::resize_file(bad.copy.location, 4096);
  MendAtTheFirstRead();
  FlushShard mend = Flush(2, 1, GetParam(), other);
  mend.replace = true;
  ExpectItIsTriedAgain(mend);
}

// Else it is this machine's memory that is compared with itself.
TEST_F(DurableTiersTest, WhatWasWrittenToAMountIsReadBackFromThere) {
  for (const bool replaces : {false, true}) {
    FlushShard flush = Flush(replaces ? 2 : 1, 1, TierKind::kMemory, TierKind::kRemote);
    flush.verify = v1::TierPolicy::VERIFY_ALL;
    flush.replace = replaces;
    Mutex mutex;  // nobody reads before the first has counted
    std::optional<size_t> pages;
    std::string image;
    env_.Meddle({.dir = DirOf(TierKind::kRemote), .at_read = [&](uint64_t) {
                   const MutexLock lock(mutex);
                   for (const std::string& path : Leftovers(TierKind::kRemote)) {
                     if (!pages && path.find(".safetensors") != std::string::npos) {
                       image = path;
                       pages = PagesInCache(path);
                     }
                   }
                 }});
    const FlushEnded ended = Do(flush);
    env_.Meddle({});
    ASSERT_EQ(ended.status, absl::OkStatus());
    const UniqueFd direct(::open(ended.copy.location.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT));
    if (!direct.valid()) {
      GTEST_SKIP() << "where temporary files lie there is nothing but the page cache";
    }
    EXPECT_EQ(pages, 0u) << image;
    std::filesystem::resize_file(ended.copy.location, 4096);  // to be replaced
  }
}

// A manifest that cannot be read just now: the step counts as committed, none of it is opened,
// called bad or removed.
TEST_F(DurableTiersTest, AManifestThatCannotBeReadIsNoDamage) {
  FlushShard flush = Flush(1, 1, TierKind::kMemory, TierKind::kRemote);
  const FlushEnded flushed = Do(flush);
  ASSERT_EQ(flushed.status, absl::OkStatus());
  const std::string directory = std::filesystem::path(flushed.copy.location).parent_path();
  std::filesystem::create_symlink("nowhere", directory + "/MANIFEST");
  tiers_->Perform(RemoveCopies{2, TierKind::kRemote, flush.key.id.job, flush.key.job_name,
                               flush.key.id.checkpoint(), flush.key.world_size});
  const absl::Status removed = Await<CopiesRemoved>().status;
  EXPECT_FALSE(removed.ok() || absl::IsNotFound(removed)) << removed;
  EXPECT_THAT(Message(removed), HasSubstr("/MANIFEST"));
  EXPECT_TRUE(std::filesystem::exists(flushed.copy.location));
  tiers_->Perform(ScanRemote{3, flush.key.job_name});
  const auto scanned = Await<TierScanned>();
  EXPECT_FALSE(scanned.status.ok()) << "one rank of four: what else there is is not known";
  EXPECT_THAT(Message(scanned.status), HasSubstr("/MANIFEST"));
}

}  // namespace
}  // namespace holdfast
