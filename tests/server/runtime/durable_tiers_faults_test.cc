// Flushes whose calls fail, whose mount goes away in the middle, whose bytes are lost on the way:
// what they end with, that the other tier goes on, and that it is over when the fault is.
#include "base/errno_status.h"
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
  for (const auto verify :
       {v1::TierPolicy::VERIFY_NONE, v1::TierPolicy::VERIFY_SAMPLE, v1::TierPolicy::VERIFY_ALL}) {
    ++drain;
    flush = Flush(drain, drain, TierKind::kMemory, GetParam());
    flush.verify = verify;
    env_.TakeReadBack();
    ASSERT_EQ(Do(flush).status, absl::OkStatus());
    read[verify] = env_.TakeReadBack();
  }
  EXPECT_EQ(read[v1::TierPolicy::VERIFY_NONE], 0u);
  EXPECT_GT(read[v1::TierPolicy::VERIFY_SAMPLE], 0u);
  EXPECT_LT(read[v1::TierPolicy::VERIFY_SAMPLE], flush.image_bytes / 2);
  EXPECT_GE(read[v1::TierPolicy::VERIFY_ALL], flush.image_bytes);
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
  // Unasked nobody sees it, until it is read.
  FlushShard unasked = first;
  unasked.drain = 2;
  unasked.verify = v1::TierPolicy::VERIFY_NONE;
  const FlushEnded published = Do(unasked);
  ASSERT_EQ(published.status, absl::OkStatus());
  EXPECT_NE(Verified(unasked, published), "");
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

INSTANTIATE_TEST_SUITE_P(All, TierMiddleTest, ::testing::Values(TierKind::kNvme, TierKind::kRemote),
                         [](const auto& at) { return std::string(TierName(at.param)); });

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
