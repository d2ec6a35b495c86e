#include "server/runtime/catalog_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rocksdb/db.h>

#include <atomic>
#include <chrono>
#include <future>
#include <tuple>

#include "server/runtime/found_state.h"
#include "tests/base/temporary_directory.h"
#include "tests/tiers/memory/memory_harness.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr std::chrono::seconds kPatience{30};

v1::JobState State(const JobUuid& job, uint64_t version) {
  v1::JobState state;
  state.set_job_uuid(job.ToBytes());
  state.set_name("job");
  state.set_version(version);
  return state;
}

v1::CatalogShard Shard(const ShardId& id) {
  SealedCopy copy;
  copy.id = id;
  return ToCatalogShard(copy, 1);
}

class CatalogWriterTest : public ::testing::Test {
 protected:
  void SetUp() override {
    store_ = SlotStore::Open(StoreOptions(env_, "/shm/h")).value();
    ASSERT_TRUE(store_->Scan().ok());
    catalog_ = Catalog::Open(Env::System(), dir_.path()).value();
  }
  std::unique_ptr<CatalogWriter> Start() {
    return std::make_unique<CatalogWriter>(
        *catalog_, *store_,
        CatalogWriter::Options{.retry_after = std::chrono::milliseconds(1),
                               .retry_after_max = std::chrono::milliseconds(10),
                               .failed = [this] { ++failures_; }});
  }
  // From here on nothing can be written, until it is reset.
  std::unique_ptr<rocksdb::DB> Block() {
    EXPECT_TRUE(catalog_->Close().ok());
    catalog_.reset();
    rocksdb::DB* db = nullptr;  // holds the catalog's LOCK
    EXPECT_TRUE(rocksdb::DB::Open(rocksdb::Options(), dir_.Path("catalog"), &db).ok());
    catalog_ = Catalog::Open(Env::System(), dir_.path()).value();
    EXPECT_FALSE(catalog_->open_status().ok());
    return std::unique_ptr<rocksdb::DB>(db);
  }
  static absl::Status Stop(CatalogWriter& writer) {
    std::promise<absl::Status> stopped;
    writer.Stop([&](const absl::Status& status) { stopped.set_value(status); });
    return stopped.get_future().get();
  }
  // What the next daemon finds.
  std::vector<uint64_t> Versions() {
    catalog_.reset();
    catalog_ = Catalog::Open(Env::System(), dir_.path()).value();
    std::vector<std::string> problems;
    std::vector<uint64_t> versions;
    const auto states = catalog_->JobStates(&problems).value();
    for (const v1::JobState& state : states) {
      versions.push_back(state.version());
    }
    return versions;
  }
  std::vector<uint64_t> Steps() {
    std::vector<uint64_t> steps;
    const auto shards = catalog_->Shards().value();
    for (const v1::CatalogShard& shard : shards) {
      steps.push_back(shard.step());
    }
    return steps;
  }

  // Until one was begun from here on and has failed.
  void FailAWrite() {
    const int before = failures_;  // (one more may be under way, that took less)
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (failures_ < before + 2 && std::chrono::steady_clock::now() < until) {
    }
    ASSERT_GE(failures_, before + 2);
  }
  static v1::CatalogShard Row(const JobUuid& job, uint64_t step, Rank rank,
                              const char* tier = "nvme") {
    v1::CatalogShard shard = Shard({job, 1, step, rank});
    shard.set_tier(tier);
    return shard;
  }
  using Key = std::tuple<std::string, JobUuid, uint64_t, Rank>;
  std::vector<Key> Left() {
    EXPECT_THAT(Versions(), testing::SizeIs(testing::Le(1)));  // opens it again
    std::vector<Key> left;
    const auto shards = catalog_->Shards().value();
    for (const v1::CatalogShard& shard : shards) {
      left.emplace_back(shard.tier(), JobUuid::FromBytes(shard.job_uuid()).value(), shard.step(),
                        shard.rank());
    }
    return left;
  }

  const JobUuid job_ = MakeSlotContent(1, 1).expected.id.job;
  const JobUuid other_ = [this] {
    JobUuid other = job_;
    other.bytes[0] ^= 1;
    return other;
  }();
  TemporaryDirectory dir_;
  FaultEnv env_{FaultEnv::Durability::kNone};
  std::unique_ptr<SlotStore> store_;
  std::unique_ptr<Catalog> catalog_;
  std::atomic<int> failures_{0};
};

TEST_F(CatalogWriterTest, WritesTheNewestOfEachAndAllOfItBeforeItStops) {
  const auto writer = Start();
  for (uint64_t version = 1; version <= 100; ++version) {
    writer->WriteJobState(State(job_, version));
    writer->IndexShard(Shard({job_, 1, version, 0}));
    if (version > 2) {
      writer->UnindexShard({job_, 1, version - 2, 0});
    }
  }
  EXPECT_TRUE(Stop(*writer).ok());
  EXPECT_THAT(Versions(), ElementsAre(100));
  EXPECT_THAT(Steps(), ElementsAre(99, 100));
  EXPECT_EQ(failures_, 0);
}

TEST_F(CatalogWriterTest, WhoeverAsksIsToldWhenItIsThere) {
  const auto writer = Start();
  std::promise<absl::Status> written;
  writer->WriteJobState(State(job_, 3), [&](const absl::Status& s) { written.set_value(s); });
  EXPECT_TRUE(written.get_future().get().ok());
  std::promise<absl::Status> removed;
  ASSERT_TRUE(store_->WriteJobState(job_, State(job_, 3).SerializeAsString()).ok());
  writer->RemoveJobState(job_, [&](const absl::Status& s) { removed.set_value(s); });
  EXPECT_TRUE(removed.get_future().get().ok());
  EXPECT_THAT(*store_->JobStates(), IsEmpty());
  EXPECT_TRUE(Stop(*writer).ok());
  EXPECT_THAT(Versions(), IsEmpty());
}

TEST_F(CatalogWriterTest, AfterFailuresItSaysWhatMemoryHolds) {
  ASSERT_TRUE(SealSlot(*store_, 1, MakeSlotContent(5, 1)).ok());
  auto blocked = Block();
  const auto writer = Start();
  EXPECT_THAT(writer->problem(), HasSubstr("catalog"));
  ASSERT_TRUE(store_->WriteJobState(job_, State(job_, 7).SerializeAsString()).ok());
  writer->WriteJobState(State(job_, 7));
  writer->IndexShard(Shard(MakeSlotContent(5, 1).expected.id));
  // Somebody who waits is told at once, between the retries.
  std::promise<absl::Status> written;
  writer->WriteJobState(State(job_, 8), [&](const absl::Status& s) { written.set_value(s); });
  EXPECT_FALSE(written.get_future().get().ok());
  std::promise<absl::Status> removed;
  writer->RemoveJobState(job_, [&](const absl::Status& s) { removed.set_value(s); });
  EXPECT_FALSE(removed.get_future().get().ok());
  EXPECT_EQ(store_->JobStates()->size(), 1u) << "the catalog is the first";
  EXPECT_GT(failures_, 1);
  blocked.reset();
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (!writer->problem().empty() && std::chrono::steady_clock::now() < until) {
  }
  EXPECT_EQ(writer->problem(), "");
  EXPECT_TRUE(Stop(*writer).ok());
  EXPECT_THAT(Versions(), ElementsAre(7));
  EXPECT_THAT(Steps(), ElementsAre(5));
}

TEST_F(CatalogWriterTest, MoreThanItKeepsIsForgottenAndTakenFromMemory) {
  ASSERT_TRUE(SealSlot(*store_, 1, MakeSlotContent(5, 1)).ok());
  ASSERT_TRUE(store_->WriteJobState(job_, State(job_, 7).SerializeAsString()).ok());
  auto blocked = Block();
  const auto writer = Start();
  writer->WriteJobState(State(job_, 7));
  for (uint64_t step = 1000; step < 1000 + 3 * CatalogWriter::kChangesMax; ++step) {
    writer->IndexShard(Shard({job_, 1, step, 0}));
    writer->UnindexShard({job_, 1, step, 0});
  }
  blocked.reset();
  EXPECT_TRUE(Stop(*writer).ok());
  EXPECT_THAT(Versions(), ElementsAre(7));
  EXPECT_THAT(Steps(), ElementsAre(5));
}

// Nothing else remembers what lies in the other tiers.
TEST_F(CatalogWriterTest, WhatAScanOfATierFindsIsKeptUntilItIsWritten) {
  auto blocked = Block();
  const auto writer = Start();
  const size_t count = 3 * CatalogWriter::kChangesMax;
  for (uint64_t step = 1; step <= count; ++step) {
    v1::CatalogShard shard = Shard({job_, 1, step, 0});
    shard.set_tier("nvme");
    writer->IndexShard(std::move(shard));
    writer->IndexShard(Shard({job_, 1, step, 0}));
    writer->UnindexShard({job_, 1, step, 0});
  }
  blocked.reset();
  EXPECT_TRUE(Stop(*writer).ok());
  EXPECT_THAT(Versions(), IsEmpty());
  EXPECT_EQ(Steps().size(), count) << "of nvme; memory has none";
}

// Rows of files that went while nobody looked are nowhere but in the catalog.
TEST_F(CatalogWriterTest, ATierThatIsReadAnewHasTheRowsThatFollowAndNoOthers) {
  const auto row = [&](uint64_t step, const char* tier) {
    v1::CatalogShard shard = Shard({job_, 1, step, 0});
    shard.set_tier(tier);
    return shard;
  };
  for (const bool failing : {false, true}) {
    SCOPED_TRACE(failing);
    ASSERT_TRUE(catalog_->UpdateShards("nvme", {row(1, "nvme"), row(2, "nvme")}, {}).ok());
    ASSERT_TRUE(catalog_->UpdateShards("remote", {row(3, "remote")}, {}).ok());
    auto blocked = failing ? Block() : nullptr;
    const auto writer = Start();
    writer->IndexShard(row(4, "nvme"));
    writer->UnindexCopies({"nvme", std::nullopt, std::nullopt});
    writer->IndexShard(row(2, "nvme"));
    writer->IndexShard(row(5, "nvme"));
    if (failing) {
      FailAWrite();
    }
    blocked.reset();
    EXPECT_TRUE(Stop(*writer).ok());
    EXPECT_THAT(Versions(), IsEmpty());  // opens it again
    EXPECT_THAT(Steps(), ElementsAre(2, 5, 3));
  }
}

TEST_F(CatalogWriterTest, WhatIsUnindexedGoesWithAllItsRanksAndNothingElse) {
  for (const bool failing : {false, true}) {
    SCOPED_TRACE(failing);
    ASSERT_TRUE(catalog_
                    ->UpdateShards("nvme",
                                   {Row(job_, 1, 0), Row(job_, 2, 0), Row(job_, 2, 70'000),
                                    Row(job_, 3, 0), Row(other_, 2, 0)},
                                   {})
                    .ok());
    ASSERT_TRUE(catalog_->UpdateShards("remote", {Row(job_, 9, 0, "remote")}, {}).ok());
    auto blocked = failing ? Block() : nullptr;
    const auto writer = Start();
    writer->IndexShard(Row(job_, 2, 1));  // it waits, or is written
    writer->UnindexCopies({"nvme", job_, CheckpointId{1, 2}});
    writer->IndexShard(Row(job_, 2, 2));  // after it
    writer->UnindexCopies({"remote", job_, std::nullopt});
    if (failing) {
      FailAWrite();
    }
    writer->IndexShard(Row(job_, 2, 3));  // (what was tried is put back beside it)
    blocked.reset();
    EXPECT_TRUE(Stop(*writer).ok());
    EXPECT_THAT(Left(), UnorderedElementsAre(Key{"nvme", job_, 1, 0}, Key{"nvme", job_, 2, 2},
                                             Key{"nvme", job_, 2, 3}, Key{"nvme", job_, 3, 0},
                                             Key{"nvme", other_, 2, 0}));
  }
}

// While a write is under way that will fail: what it took comes after what it is put back to.
TEST_F(CatalogWriterTest, WhatIsUnindexedWhileItIsWrittenDoesNotComeBack) {
  const CatalogRange ranges[] = {{"nvme", job_, CheckpointId{1, 2}},
                                 {"nvme", job_, std::nullopt},
                                 {"nvme", std::nullopt, std::nullopt}};
  for (const CatalogRange& range : ranges) {
    auto blocked = Block();
    const auto writer = Start();
    std::promise<void> tried;
    writer->IndexShard(Row(job_, 2, 0));
    writer->WriteJobState(State(job_, 1), [&](const absl::Status& status) {
      EXPECT_FALSE(status.ok());
      writer->UnindexCopies(range);  // between the taking and the putting back
      tried.set_value();
    });
    tried.get_future().get();
    FailAWrite();
    blocked.reset();
    EXPECT_TRUE(Stop(*writer).ok());
    EXPECT_THAT(Left(), IsEmpty());
  }
}

// The writer cannot write: what waits is bounded, also what waits in ranges.
TEST_F(CatalogWriterTest, ARangeTakesThePlaceOfAllThatItCovers) {
  auto blocked = Block();
  const auto writer = Start();
  for (uint64_t step = 1; step <= CatalogWriter::kDurableChangesMax + 10; ++step) {
    writer->UnindexCopies({"nvme", job_, CheckpointId{1, step}});
  }
  writer->UnindexCopies({"nvme", job_, std::nullopt});
  FailAWrite();
  writer->IndexShard(Row(other_, 5, 0));  // there is room again
  blocked.reset();
  EXPECT_TRUE(Stop(*writer).ok());
  EXPECT_THAT(Left(), UnorderedElementsAre(Key{"nvme", other_, 5, 0}));
}

TEST_F(CatalogWriterTest, AStopDoesNotWaitForADiskThatFails) {
  const auto blocked = Block();
  const auto writer = Start();
  EXPECT_FALSE(Stop(*writer).ok());
}

TEST_F(CatalogWriterTest, AnOlderStateInMemoryNeverReplacesANewerOne) {
  ASSERT_TRUE(catalog_->WriteJobState(State(job_, 9)).ok());
  ASSERT_TRUE(store_->WriteJobState(job_, State(job_, 7).SerializeAsString()).ok());
  const auto writer = Start();  // begins with what memory.dir holds
  EXPECT_TRUE(Stop(*writer).ok());
  EXPECT_THAT(Versions(), ElementsAre(9));
}

}  // namespace
}  // namespace holdfast
