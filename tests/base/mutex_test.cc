#include "base/mutex.h"

#include <gtest/gtest.h>

#include <thread>

namespace holdfast {
namespace {

struct Shared {
  Mutex mutex;
  CondVar changed;
  int value GUARDED_BY(mutex) = 0;
};

TEST(MutexTest, ExcludesOthers) {
  Shared shared;
  const auto add = [&shared] {
    for (int i = 0; i < 10'000; ++i) {
      MutexLock lock(shared.mutex);
      ++shared.value;
    }
  };
  std::thread other(add);
  add();
  other.join();
  MutexLock lock(shared.mutex);
  EXPECT_EQ(shared.value, 20'000);
}

TEST(CondVarTest, WaitsForTheOtherThread) {
  Shared shared;
  std::thread other([&shared] {
    MutexLock lock(shared.mutex);
    shared.value = 1;
    shared.changed.NotifyAll();
    while (shared.value != 2) {
      shared.changed.Wait(shared.mutex);
    }
    shared.value = 3;
    shared.changed.NotifyAll();
  });
  {
    MutexLock lock(shared.mutex);
    while (shared.value != 1) {
      shared.changed.Wait(shared.mutex);
    }
    shared.value = 2;
    shared.changed.NotifyAll();
    while (shared.value != 3) {
      shared.changed.Wait(shared.mutex);
    }
  }
  other.join();
}

TEST(CondVarTest, WaitUntilEnds) {
  Shared shared;
  MutexLock lock(shared.mutex);
  const auto past = std::chrono::steady_clock::now() - std::chrono::seconds(1);
  EXPECT_FALSE(shared.changed.WaitUntil(shared.mutex, past));
}

}  // namespace
}  // namespace holdfast
