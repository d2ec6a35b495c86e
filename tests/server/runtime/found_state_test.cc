#include "server/runtime/found_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rocksdb/db.h>

#include "base/process.h"
#include "base/status.h"
#include "server/runtime/process_watcher.h"
#include "tests/base/temporary_directory.h"
#include "tests/tiers/memory/memory_harness.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
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

// Its last call may still write there, until it is gone.
TEST(FindState, WhatADyingDaemonWasFillingIsHeldByIt) {
  TemporaryDirectory dir;
  const std::unique_ptr<Catalog> catalog = Catalog::Open(Env::System(), dir.path()).value();
  FaultEnv env(FaultEnv::Durability::kNone);
  SlotStore::Options options = StoreOptions(env, "/shm/h");
  options.boot_id = CurrentBoot();
  const ProcessId daemon = ThisProcess();
  const std::unique_ptr<SlotStore> before = SlotStore::Open(options).value();
  ASSERT_TRUE(before->Scan().ok());
  // 1: filled and sealed. 2: being filled. Both notes name the daemon.
  ASSERT_TRUE(SealSlot(*before, 1, MakeSlotContent(1, 1)).ok());
  ASSERT_TRUE(before->Create(2, kSlot).ok());
  for (const SlotId slot : {1, 2}) {
    SlotNote note = NoteOf(1, kSlot);
    note.readers = {{daemon, 0}};
    ASSERT_TRUE(before->WriteNote(slot, note).ok());
  }

  options.find_dying = [&](int32_t, uint64_t) { return std::optional<ProcessId>(daemon); };
  const std::unique_ptr<SlotStore> store = SlotStore::Open(options).value();
  EXPECT_THAT(store->dying(), ElementsAre(daemon));
  const absl::StatusOr<Started> started = FindState(*store, *catalog, 64 * kSlot);
  ASSERT_TRUE(started.ok()) << started.status();
  EXPECT_THAT(started->problems, IsEmpty());
  ASSERT_EQ(started->slots.size(), 2u);
  EXPECT_TRUE(started->slots[0].sealed.has_value());
  EXPECT_EQ(started->slots[0].note.readers_size(), 0);
  EXPECT_FALSE(started->slots[1].sealed.has_value());
  ASSERT_EQ(started->slots[1].note.readers_size(), 1);
  EXPECT_EQ(started->slots[1].note.readers(0).pid(), daemon.pid);
}

}  // namespace
}  // namespace holdfast
