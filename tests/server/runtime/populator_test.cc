#include "server/runtime/populator.h"

#include <gtest/gtest.h>

#include <future>

#include "base/process.h"
#include "tests/base/temporary_directory.h"

namespace holdfast {
namespace {

constexpr uint64_t kMiBytes = 1 << 20;

class PopulatorTest : public ::testing::Test {
 protected:
  PopulatorTest() {
    auto store = SlotStore::Open({Env::System(), dir_.Path("m"), 64 * kMiBytes, BootId()});
    EXPECT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    EXPECT_TRUE(store_->Create(1, 16 * kMiBytes).ok());
    config_.set_populate_chunk_bytes(2 * kMiBytes);
    config_.set_populate_cpu_percent(100);
  }

  TemporaryDirectory dir_{"/dev/shm"};
  std::unique_ptr<SlotStore> store_;
  v1::MemoryConfig config_;
};

TEST_F(PopulatorTest, PopulatesTheWholeSlot) {
  Populator populator(*store_, config_);
  EXPECT_TRUE(populator.Populate(1, 16 * kMiBytes).ok());
}

TEST_F(PopulatorTest, CancelAndStopEndIt) {
  Populator populator(*store_, config_);
  populator.Cancel(1);
  EXPECT_EQ(populator.Populate(1, 16 * kMiBytes).code(), absl::StatusCode::kCancelled);
  populator.Forget(1);
  EXPECT_TRUE(populator.Populate(1, 16 * kMiBytes).ok());
  populator.Stop();
  EXPECT_EQ(populator.Populate(1, 16 * kMiBytes).code(), absl::StatusCode::kCancelled);
}

TEST_F(PopulatorTest, ARestIsInterrupted) {
  config_.set_populate_cpu_percent(1);
  Populator populator(*store_, config_);
  auto populating =
      std::async(std::launch::async, [&] { return populator.Populate(1, 16 * kMiBytes); });
  populator.Stop();
  ASSERT_EQ(populating.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  EXPECT_EQ(populating.get().code(), absl::StatusCode::kCancelled);
}

TEST_F(PopulatorTest, AMissingSlotIsAnError) {
  Populator populator(*store_, config_);
  EXPECT_FALSE(populator.Populate(7, 2 * kMiBytes).ok());
}

}  // namespace
}  // namespace holdfast
