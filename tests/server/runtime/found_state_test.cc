#include "server/runtime/found_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rocksdb/db.h>

#include "base/status.h"
#include "tests/base/temporary_directory.h"
#include "tests/tiers/memory/memory_harness.h"

namespace holdfast {
namespace {

using ::testing::IsEmpty;

TEST(FindState, WhatIsInMemoryIsFoundWithoutACatalog) {
  TemporaryDirectory dir;
  rocksdb::Options create;
  create.create_if_missing = true;
  rocksdb::DB* db = nullptr;  // holds the catalog's LOCK
  ASSERT_TRUE(rocksdb::DB::Open(create, dir.Path("catalog"), &db).ok());
  const std::unique_ptr<rocksdb::DB> holder(db);
  const std::unique_ptr<Catalog> catalog = Catalog::Open(Env::System(), dir.path()).value();

  FaultEnv env(FaultEnv::Durability::kNone);
  const std::unique_ptr<SlotStore> store = SlotStore::Open(StoreOptions(env, "/shm/h")).value();
  ASSERT_TRUE(store->Scan().ok());
  const SlotContent content = MakeSlotContent(1, 1);
  ASSERT_TRUE(SealSlot(*store, 1, content).ok());
  v1::JobState state;
  state.set_job_uuid(content.expected.id.job.ToBytes());
  state.set_name(content.expected.job_name);
  state.set_version(7);
  ASSERT_TRUE(store->WriteJobState(content.expected.id.job, state.SerializeAsString()).ok());

  const absl::StatusOr<Started> started = FindState(*store, *catalog, 64 * kSlot);
  ASSERT_TRUE(started.ok()) << started.status();
  EXPECT_THAT(started->problems, IsEmpty());
  ASSERT_EQ(started->jobs.size(), 1u);
  EXPECT_EQ(started->jobs[0].version(), 7u);
  ASSERT_EQ(started->slots.size(), 1u);
  EXPECT_TRUE(started->slots[0].sealed.has_value());
}

}  // namespace
}  // namespace holdfast
