#include "server/runtime/network_flags.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "base/network_flag.h"
#include "client-lib/src/busy_flag.h"
#include "tiers/transfer/pacer.h"
#include "tiers/transfer/transfer_control.h"

namespace holdfast {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

v1::ClientFrame Await(uint64_t id, v1::AwaitSave::Stage stage) {
  v1::ClientFrame frame;
  frame.set_id(id);
  frame.mutable_await_save()->set_stage(stage);
  return frame;
}

v1::DaemonFrame AnswerTo(uint64_t id) {
  v1::DaemonFrame frame;
  frame.set_id(id);
  frame.mutable_await_save();
  return frame;
}

// Until so many are held back.
bool Wait(const Pacer& pacer, size_t waiting) {
  const auto until = std::chrono::steady_clock::now() + seconds(60);
  while (pacer.waiting() < waiting && std::chrono::steady_clock::now() < until) {
    std::this_thread::yield();
  }
  return pacer.waiting() >= waiting;
}

// A client, as its library has it.
struct Client {
  Client(NetworkFlags& flags, ConnectionId id) {
    absl::StatusOr<UniqueFd> page = flags.Make(id);
    EXPECT_TRUE(page.ok()) << page.status();
    if (page.ok()) {
      busy.Attach(page->get());
    }
  }
  client::BusyFlag busy;
};

TEST(NetworkFlagsTest, WhatAClientSaysIsSeenAtOnce) {
  ManualClock clock;
  NetworkFlags flags(&clock);
  Client one(flags, 1);
  Client two(flags, 2);
  EXPECT_FALSE(flags.Holds());
  one.busy.Enter();
  EXPECT_TRUE(flags.Holds());
  two.busy.Enter();
  one.busy.Leave();
  EXPECT_TRUE(flags.Holds());
  EXPECT_EQ(flags.Status().busy_processes(), 1u);
  two.busy.Enter();
  two.busy.Leave();
  EXPECT_TRUE(flags.Holds());
  two.busy.Leave();
  EXPECT_FALSE(flags.Holds());
  two.busy.Leave();  // one too many
  EXPECT_FALSE(flags.Holds());
  two.busy.Enter();
  EXPECT_TRUE(flags.Holds());
}

TEST(NetworkFlagsTest, ItEndsWithTheConnection) {
  ManualClock clock;
  NetworkFlags flags(&clock);
  Client client(flags, 7);
  client.busy.Enter();
  EXPECT_TRUE(flags.Holds());
  flags.Closed(7);
  EXPECT_FALSE(flags.Holds());
  // The next connection hears of it.
  const absl::StatusOr<UniqueFd> page = flags.Make(8);
  ASSERT_TRUE(page.ok());
  client.busy.Attach(page->get());
  EXPECT_TRUE(flags.Holds());
  client.busy.Detach();
  client.busy.Leave();
  EXPECT_TRUE(flags.Holds());  // said to nobody: the connection's end, or time, ends it
  clock.Advance(kBusyStretchMax);
  EXPECT_FALSE(flags.Holds());
}

TEST(NetworkFlagsTest, AClientCannotCutThePageShort) {
  ManualClock clock;
  NetworkFlags flags(&clock);
  const absl::StatusOr<UniqueFd> page = flags.Make(1);
  ASSERT_TRUE(page.ok());
  EXPECT_NE(::ftruncate(page->get(), 0), 0);
  EXPECT_NE(::ftruncate(page->get(), 1 << 20), 0);
  EXPECT_NE(::fcntl(page->get(), F_ADD_SEALS, F_SEAL_WRITE), 0);
  void* const at =
      ::mmap(nullptr, kNetworkFlagPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, page->get(), 0);
  ASSERT_NE(at, MAP_FAILED);
  // Whatever stands there is only ever a number of windows.
  for (const uint64_t word : {~uint64_t{0}, uint64_t{1}, uint64_t{0xffffffff}}) {
    static_cast<NetworkFlagWord*>(at)->store(word);
    EXPECT_TRUE(flags.Holds());
  }
  ::munmap(at, kNetworkFlagPageBytes);
}

TEST(NetworkFlagsTest, NothingIsHeldWhileSomebodyWaitsForIt) {
  ManualClock clock;
  NetworkFlags flags(&clock);
  Client client(flags, 1);
  client.busy.Enter();
  flags.Asked(2, Await(5, v1::AwaitSave::STAGE_COMMITTED));
  flags.Asked(2, Await(6, v1::AwaitSave::STAGE_NVME));
  EXPECT_TRUE(flags.Holds());
  flags.Asked(2, Await(7, v1::AwaitSave::STAGE_REMOTE));
  EXPECT_FALSE(flags.Holds());
  flags.Asked(3, Await(7, v1::AwaitSave::STAGE_PEER));
  flags.Answered(2, AnswerTo(7));
  EXPECT_FALSE(flags.Holds());
  flags.Answered(3, AnswerTo(8));
  EXPECT_FALSE(flags.Holds());
  flags.Closed(3);
  EXPECT_TRUE(flags.Holds());

  for (int which = 0; which < 5; ++which) {
    v1::ClientFrame asked;
    asked.set_id(100);
    switch (which) {
      case 0:
        asked.mutable_enter_session();
        break;
      case 1:
        asked.mutable_report_load();
        break;
      case 2:
        asked.mutable_attach();
        break;
      case 3:
        asked.mutable_begin_save();
        break;
      default:
        asked.mutable_reserve();
    }
    flags.Asked(2, asked);
    EXPECT_FALSE(flags.Holds()) << which;
    flags.Answered(2, AnswerTo(100));
    EXPECT_TRUE(flags.Holds()) << which;
  }
}

TEST(NetworkFlagsTest, HowLongThingsWaitedIsTold) {
  ManualClock clock;
  NetworkFlags flags(&clock);
  Client client(flags, 1);
  client.busy.Enter();
  EXPECT_TRUE(flags.Holds());
  flags.BeginWait();
  flags.BeginWait();
  clock.Advance(milliseconds(10));
  flags.EndWait();
  EXPECT_TRUE(flags.Holds());
  EXPECT_TRUE(flags.Status().holding());
  clock.Advance(milliseconds(10));
  flags.EndWait();
  clock.Advance(seconds(5));
  EXPECT_EQ(flags.Status().held_ms(), 20u);
  EXPECT_FALSE(flags.Status().holding());
}

// What stays in the page is what was said last, whatever the order in which threads say it.
TEST(NetworkFlagsTest, ThreadsThatComeAndGoLeaveNothingBehind) {
  ManualClock clock;
  NetworkFlags flags(&clock);
  Client client(flags, 1);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&client] {
        for (int n = 0; n < 1000; ++n) {
          client.busy.Enter();
          client.busy.Enter();
          client.busy.Leave();
          client.busy.Leave();
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    EXPECT_FALSE(flags.Holds());
    client.busy.Enter();
    EXPECT_TRUE(flags.Holds());
    client.busy.Leave();
  }
}

TEST(NetworkFlagsTest, BytesGoWhenTheWindowEnds) {
  const auto flags = std::make_shared<NetworkFlags>(Clock::System());
  Client client(*flags, 1);
  Pacer pacer(0, flags);
  EXPECT_TRUE(pacer.Acquire(1, nullptr));
  client.busy.Enter();
  std::atomic<int> passed = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      EXPECT_TRUE(pacer.Acquire(1 << 20, nullptr));
      ++passed;
    });
  }
  EXPECT_TRUE(Wait(pacer, 3));
  EXPECT_EQ(passed, 0);
  client.busy.Leave();
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(passed, 3);
}

TEST(NetworkFlagsTest, WhatIsHeldCanBeCancelled) {
  const auto flags = std::make_shared<NetworkFlags>(Clock::System());
  Client client(*flags, 1);
  Pacer pacer(0, flags);
  client.busy.Enter();
  TransferControl control;
  std::thread waits([&] { EXPECT_FALSE(pacer.Acquire(1, &control)); });
  EXPECT_TRUE(Wait(pacer, 1));
  control.Cancel();
  waits.join();
}

}  // namespace
}  // namespace holdfast
