#include "tiers/transfer/thread_priority.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "base/status.h"

namespace holdfast {
namespace {

long IoPriorityOf(pid_t thread) {
  return ::syscall(SYS_ioprio_get, 1, thread);
}

TEST(ThreadPriorityTest, OfAnotherThreadWhileItRuns) {
  std::atomic<pid_t> id{0};
  std::atomic<bool> stop{false};
  std::thread thread([&] {
    id = CurrentThreadId();
    while (!stop) {
      std::this_thread::yield();
    }
  });
  while (id == 0) {
    std::this_thread::yield();
  }
  const int before = ::getpriority(PRIO_PROCESS, 0);
  EXPECT_TRUE(SetThreadPriority(id, {.io = 7, .nice = 18}).ok());
  EXPECT_EQ(IoPriorityOf(id), 2 << 13 | 7);
  EXPECT_EQ(::getpriority(PRIO_PROCESS, static_cast<id_t>(id.load())), 18);
  EXPECT_TRUE(SetThreadPriority(id, {.io = kIoPriorityIdle, .nice = 19}).ok());
  EXPECT_EQ(IoPriorityOf(id) >> 13, 3);
  EXPECT_EQ(::getpriority(PRIO_PROCESS, static_cast<id_t>(id.load())), 19);
  // Nobody else's.
  EXPECT_EQ(::getpriority(PRIO_PROCESS, 0), before);
  stop = true;
  thread.join();
}

TEST(ThreadPriorityTest, OfNoThreadFails) {
  // Above what the kernel ever gives away (PID_MAX_LIMIT). A thread that was joined would not do:
  // its id may go on for a moment, as the kernel wakes who joins before it takes the thread down.
  const pid_t nobody = 1 << 23;
  EXPECT_FALSE(SetThreadPriority(nobody, {}).ok());
}

TEST(ThreadPriorityTest, HasLimits) {
  EXPECT_TRUE(absl::IsInvalidArgument(SetThreadPriority(CurrentThreadId(), {.io = 9})));
  EXPECT_TRUE(absl::IsInvalidArgument(SetThreadPriority(CurrentThreadId(), {.io = -1})));
  EXPECT_TRUE(absl::IsInvalidArgument(SetThreadPriority(CurrentThreadId(), {.nice = 20})));
  EXPECT_TRUE(absl::IsInvalidArgument(SetThreadPriority(CurrentThreadId(), {.nice = -1})));
}

}  // namespace
}  // namespace holdfast
