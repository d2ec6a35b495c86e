#include "server/runtime/serial_executor.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <map>

namespace holdfast {
namespace {

using Lane = SerialExecutor::Lane;
constexpr std::chrono::seconds kPatience{30};

TEST(SerialExecutor, TasksOfOneKeyRunInOrderAndNeverTogetherAcrossLanes) {
  SerialExecutor executor;
  std::map<uint64_t, std::vector<int>>
      order;  // each vector is touched by its key's tasks alone: TSan would tell
  for (uint64_t key = 0; key < 8; ++key) {
    order[key];
  }
  for (int i = 0; i < 400; ++i) {
    const uint64_t key = static_cast<uint64_t>(i) % 8;
    const Lane lane = static_cast<Lane>(i / 8 % 4);
    executor.Submit(key, lane, [&list = order[key], i] { list.push_back(i); });
  }
  ASSERT_TRUE(executor.WaitIdle(kPatience));
  for (const auto& [key, list] : order) {
    EXPECT_EQ(list.size(), 50u);
    EXPECT_TRUE(std::is_sorted(list.begin(), list.end())) << "key " << key;
  }
}

TEST(SerialExecutor, ALongTaskStopsNeitherOtherLanesNorOtherKeys) {
  SerialExecutor executor;
  std::promise<void> release;
  std::shared_future<void> released(release.get_future());
  executor.Submit(1, Lane::kPopulate, [released] { released.wait(); });
  executor.Submit(2, Lane::kSlots, [released] { released.wait(); });
  std::promise<void> slot_work;
  std::promise<void> state_work;
  executor.Submit(3, Lane::kSlots, [&] { slot_work.set_value(); });
  executor.Submit(4, Lane::kState, [&] { state_work.set_value(); });
  EXPECT_EQ(slot_work.get_future().wait_for(kPatience), std::future_status::ready);
  EXPECT_EQ(state_work.get_future().wait_for(kPatience), std::future_status::ready);
  EXPECT_FALSE(executor.WaitIdle(std::chrono::milliseconds(1)));
  release.set_value();
  EXPECT_TRUE(executor.WaitIdle(kPatience));
}

TEST(SerialExecutor, TheDestructorRunsWhatWasSubmittedTasksOfTasksIncluded) {
  int ran = 0;
  {
    SerialExecutor executor;
    executor.Submit(1, Lane::kSlots, [&] {
      ++ran;
      executor.Submit(1, Lane::kState, [&] { ++ran; });
    });
  }
  EXPECT_EQ(ran, 2);
}

}  // namespace
}  // namespace holdfast
