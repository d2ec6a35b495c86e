// What peers are told of this node's slots, and for how long that holds.
#include "server/runtime/fabric_port.h"

#include <gtest/gtest.h>

#include <thread>

#include "base/process.h"
#include "tests/base/temporary_directory.h"
#include "tests/tiers/peer/refused_registrations.h"

namespace holdfast {
namespace {

constexpr SlotId kSlot = 7;
constexpr uint64_t kMiBytes = 1 << 20;
constexpr uint64_t kSlotBytes = 2 * kMiBytes;

JobUuid Job(char fill) {
  return *JobUuid::FromBytes(std::string(16, fill));
}

class FabricPortTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto store = SlotStore::Open({Env::System(), dir_.Path("m"), 64 * kMiBytes, BootId()});
    ASSERT_TRUE(store.ok()) << store.status();
    slots_ = *std::move(store);
    ASSERT_TRUE(slots_->Scan().ok());
    ASSERT_TRUE(slots_->Create(kSlot, kSlotBytes).ok());
    v1::FabricConfig config;
    config.set_provider("tcp");
    auto port = FabricPort::Open({config, "127.0.0.1:7070", slots_, Env::System()});
    ASSERT_TRUE(port.ok()) << port.status();
    port_ = *std::move(port);
  }
  v1::PullSource Offer(const JobUuid& job, const std::string& provider = "tcp") {
    ReadableShard shard;
    shard.slot = kSlot;
    shard.copy.id.job = job;
    shard.copy.image_bytes = kSlotBytes;
    v1::PullSource source;
    port_->Offer(provider, shard, source);
    return source;
  }

  TemporaryDirectory dir_{"/dev/shm"};
  std::shared_ptr<SlotStore> slots_;
  std::unique_ptr<FabricPort> port_;
};

TEST_F(FabricPortTest, ASlotIsRegisteredOnceForItsJob) {
  const v1::PullSource first = Offer(Job('a'));
  ASSERT_EQ(first.regions_size(), 1);
  EXPECT_EQ(first.regions(0).bytes(), kSlotBytes);
  EXPECT_EQ(first.provider(), "tcp");
  EXPECT_EQ(Offer(Job('a')).regions(0).key(), first.regions(0).key());
  port_->BecomesOf(kSlot, Job('a'));
  EXPECT_EQ(Offer(Job('a')).regions(0).key(), first.regions(0).key());
}

TEST_F(FabricPortTest, WhoWasToldOfAnotherJobsSlotReadsItNoMore) {
  const v1::PullSource first = Offer(Job('a'));
  port_->BecomesOf(kSlot, Job('b'));
  const v1::PullSource then = Offer(Job('b'));
  ASSERT_EQ(then.regions_size(), 1);
  EXPECT_NE(then.regions(0).key(), first.regions(0).key());
  port_->Drop(kSlot);
  EXPECT_NE(Offer(Job('b')).regions(0).key(), then.regions(0).key());
}

TEST_F(FabricPortTest, WhatAJobHasSealedIsRegisteredBeforeAnybodyAsks) {
  ASSERT_TRUE(port_->Expect(kSlot, Job('a')));
  EXPECT_FALSE(port_->Expect(kSlot, Job('a'))) << "it is on its way";
  std::thread registers([this] { port_->RegisterExpected(kSlot); });
  const v1::PullSource first = Offer(Job('a'));  // waits for that one
  registers.join();
  ASSERT_EQ(first.regions_size(), 1);
  EXPECT_FALSE(port_->Expect(kSlot, Job('a'))) << "it is there";
  port_->RegisterExpected(kSlot);  // nobody expects it
  EXPECT_EQ(Offer(Job('a')).regions(0).key(), first.regions(0).key());
}

TEST_F(FabricPortTest, WhatWasDroppedOrIsAnothersIsNotRegisteredLate) {
  ASSERT_TRUE(port_->Expect(kSlot, Job('a')));
  port_->BecomesOf(kSlot, Job('b'));
  port_->RegisterExpected(kSlot);
  EXPECT_TRUE(port_->Expect(kSlot, Job('a'))) << "another job's";
  port_->Drop(kSlot);
  ASSERT_TRUE(slots_->Delete(kSlot).ok());
  port_->RegisterExpected(kSlot);
  EXPECT_EQ(port_->problem(), "") << "of a slot that nobody wants any more";
  EXPECT_TRUE(port_->Expect(kSlot, Job('a')));
}

// The slot went, and came back for the same job, while it was being registered.
TEST_F(FabricPortTest, ALateRegistrationIsNotTakenForTheNewSlots) {
  int registrations = 0;
  const RefusedRegistrations counted(port_->fabric(), 100, [&] {
    if (++registrations == 1) {
      port_->Drop(kSlot);
      ASSERT_TRUE(port_->Expect(kSlot, Job('a')));
    }
  });
  ASSERT_TRUE(port_->Expect(kSlot, Job('a')));
  port_->RegisterExpected(kSlot);
  port_->RegisterExpected(kSlot);
  EXPECT_EQ(registrations, 2);
  EXPECT_EQ(Offer(Job('a')).regions_size(), 1);
}

TEST_F(FabricPortTest, MemoryThatMayNotBePinnedGoesAnotherWayAndItIsSaid) {
  {
    RefusedRegistrations refused(port_->fabric(), 0);
    ASSERT_TRUE(port_->Expect(kSlot, Job('a')));
    port_->RegisterExpected(kSlot);
    EXPECT_NE(port_->problem().find("LimitMEMLOCK"), std::string::npos) << port_->problem();
    EXPECT_EQ(Offer(Job('a')).regions_size(), 0) << "the bytes come in the stream";
  }
  EXPECT_EQ(Offer(Job('a')).regions_size(), 1);
  EXPECT_EQ(port_->problem(), "");
}

TEST_F(FabricPortTest, AReaderOfAnotherProviderIsToldNothing) {
  EXPECT_EQ(Offer(Job('a'), "verbs").regions_size(), 0);
  EXPECT_EQ(Offer(Job('a'), "").regions_size(), 0);
}

TEST_F(FabricPortTest, ASlotWhoseFileIsGoneIsNotToldOf) {
  ASSERT_TRUE(slots_->Delete(kSlot).ok());
  EXPECT_EQ(Offer(Job('a')).regions_size(), 0);
  EXPECT_NE(port_->problem(), "");
}

}  // namespace
}  // namespace holdfast
