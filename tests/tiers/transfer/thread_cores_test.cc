#include "tiers/transfer/thread_cores.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "base/status.h"
#include "tiers/transfer/thread_priority.h"

namespace holdfast {
namespace {

TEST(CoresBeside, WhatIsNobodysIsLeft) {
  const Cores own = {0, 1, 2, 3};
  EXPECT_EQ(CoresBeside(own, {}), own);
  EXPECT_EQ(CoresBeside(own, {{0}, {1}}), (Cores{2, 3}));
  EXPECT_EQ(CoresBeside(own, {{7}}), own);
  EXPECT_EQ(CoresBeside(own, {{2, 3, 9}}), (Cores{0, 1}));
}

TEST(CoresBeside, WhereNoneWouldBeLeftAllAre) {
  EXPECT_EQ(CoresBeside({0, 1}, {{0}, {1}}), (Cores{0, 1}));
}

// A process that is pinned to nothing may run anywhere: that says nothing about any core.
TEST(CoresBeside, WhoMayRunEverywhereHasNoneOfItsOwn) {
  EXPECT_EQ(CoresBeside({0, 1}, {{0, 1, 2, 3}}), (Cores{0, 1}));
  EXPECT_EQ(CoresBeside({0, 1}, {{0}, {0, 1, 2, 3}}), (Cores{1}));
}

TEST(ThreadCores, AreSetAndRead) {
  const auto all = CoresOf(0);
  ASSERT_TRUE(all.ok()) << ToString(all.status());
  ASSERT_FALSE(all->empty());
  const Cores last = {*all->rbegin()};
  std::thread thread([&] {
    ASSERT_TRUE(SetThreadCores(CurrentThreadId(), last).ok());
    EXPECT_EQ(*CoresOf(0), last);
    EXPECT_EQ(::sched_getcpu(), *last.begin());
  });
  thread.join();
  EXPECT_EQ(*CoresOf(0), *all) << "another thread's are its own";
}

TEST(ThreadCores, WhatCannotBeIsTold) {
  const pid_t ended = ::fork();
  if (ended == 0) {
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(ended, nullptr, 0), ended);
  EXPECT_TRUE(absl::IsNotFound(CoresOf(ended).status()));
  EXPECT_TRUE(absl::IsNotFound(SetThreadCores(ended, {0})));
  EXPECT_TRUE(absl::IsInvalidArgument(SetThreadCores(0, {})));
}

}  // namespace
}  // namespace holdfast
