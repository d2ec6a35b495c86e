#include "base/daemon_lock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>

#include "base/fault_env.h"
#include "base/process.h"
#include "base/status.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kPath[] = "/shm/lock";

std::optional<ProcessId> Dying(int32_t pid, uint64_t /*inode*/) {
  return ProcessId{pid, 1};
}

std::optional<ProcessId> Living(int32_t /*pid*/, uint64_t /*inode*/) {
  return std::nullopt;
}

class DaemonLockTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(env_.CreateDirectories("/shm", 0700).ok()); }
  DaemonLock Take(const DaemonLock::Judge& judge) {
    absl::StatusOr<DaemonLock> lock = DaemonLock::Take(env_, kPath, judge);
    EXPECT_TRUE(lock.ok()) << lock.status();
    return lock.ok() ? *std::move(lock) : DaemonLock();
  }
  absl::Status Refused() { return DaemonLock::Take(env_, kPath, Living).status(); }
  std::vector<std::string> Files() { return env_.List("/shm").value(); }

  FaultEnv env_;
  const ProcessId us_{static_cast<int32_t>(::getpid()), 1};
};

TEST_F(DaemonLockTest, IsOneFileAsARule) {
  const DaemonLock lock = Take(Living);
  EXPECT_TRUE(lock.held());
  EXPECT_THAT(lock.dying(), IsEmpty());
  EXPECT_THAT(Files(), ElementsAre("lock"));
  EXPECT_EQ(Refused().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Message(Refused()), HasSubstr("held by"));
  EXPECT_THAT(Files(), ElementsAre("lock"));
}

TEST_F(DaemonLockTest, WhoIsDyingKeepsNobodyOut) {
  const DaemonLock before = Take(Living);
  const DaemonLock lock = Take(Dying);
  EXPECT_TRUE(lock.held());
  EXPECT_THAT(lock.dying(), ElementsAre(us_));
  EXPECT_THAT(Files(), ElementsAre("lock", "lock.1"));
  // And the next one, after that has died as well.
  const DaemonLock next = Take(Dying);
  EXPECT_THAT(next.dying(), ElementsAre(us_));
  EXPECT_THAT(Files(), ElementsAre("lock", "lock.1", "lock.2"));
}

TEST_F(DaemonLockTest, WhoCameAfterTheDyingOneKeepsOthersOut) {
  DaemonLock before = Take(Living);
  DaemonLock lock = Take(Dying);
  before = DaemonLock();  // the dying one is gone
  EXPECT_EQ(Refused().code(), absl::StatusCode::kUnavailable);
  lock = DaemonLock();
  const DaemonLock next = Take(Living);  // what is left of the files keeps nobody out
  EXPECT_THAT(next.dying(), IsEmpty());
  EXPECT_FALSE(env_.Lock("/shm/lock").ok());
  EXPECT_EQ(Refused().code(), absl::StatusCode::kUnavailable);
}

// Who holds the second file keeps others out when the first one is free again.
TEST_F(DaemonLockTest, TheFirstFileAloneIsNotThePlace) {
  auto before = std::make_unique<DaemonLock>(Take(Living));
  const DaemonLock lock = Take(Dying);
  before.reset();
  EXPECT_TRUE(env_.Lock("/shm/lock").ok());
  EXPECT_EQ(Refused().code(), absl::StatusCode::kUnavailable);
}

TEST_F(DaemonLockTest, AsManyFilesAsHangAtATimeHoweverManyHaveHung) {
  for (int i = 0; i < 3 * kDaemonLocksMax; ++i) {
    const DaemonLock dies = Take(Living);
    const DaemonLock after = Take(Dying);
    EXPECT_THAT(after.dying(), ElementsAre(us_)) << i;
  }
  EXPECT_THAT(Files(), ElementsAre("lock", "lock.1"));
}

// Between our two looks the dying one ends, and another daemon gets its file.
TEST_F(DaemonLockTest, WhoComesMeanwhileIsSeen) {
  auto before = std::make_unique<DaemonLock>(Take(Living));
  std::unique_ptr<FileLock> another;
  const absl::Status status = DaemonLock::Take(env_, kPath, [&](int32_t pid, uint64_t inode) {
                                if (before == nullptr) {
                                  return Living(pid, inode);
                                }
                                before.reset();
                                another = env_.Lock(kPath).value();
                                return Dying(pid, inode);
                              }).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_TRUE(env_.Lock("/shm/lock.1").ok()) << "what it had taken stays locked";
}

TEST_F(DaemonLockTest, WhoEndsMeanwhileIsNotNamed) {
  auto before = std::make_unique<DaemonLock>(Take(Living));
  const absl::StatusOr<DaemonLock> lock =
      DaemonLock::Take(env_, kPath, [&](int32_t pid, uint64_t inode) {
        before.reset();
        return Dying(pid, inode);
      });
  ASSERT_TRUE(lock.ok()) << lock.status();
  EXPECT_THAT(lock->dying(), IsEmpty());
  EXPECT_EQ(Refused().code(), absl::StatusCode::kUnavailable);
}

TEST_F(DaemonLockTest, SoManyMayHangAndNoMore) {
  std::vector<DaemonLock> before;
  for (int i = 0; i < kDaemonLocksMax; ++i) {
    before.push_back(Take(Dying));
  }
  EXPECT_EQ(DaemonLock::Take(env_, kPath, Dying).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(DaemonLockTest, RemovesItsOwnFilesOnly) {
  const DaemonLock before = Take(Living);
  DaemonLock lock = Take(Dying);
  lock.Remove(env_);
  EXPECT_FALSE(lock.held());
  EXPECT_THAT(Files(), ElementsAre("lock"));
  EXPECT_EQ(Refused().code(), absl::StatusCode::kUnavailable);
}

TEST_F(DaemonLockTest, WaitsForWhoIsGoneSoon) {
  const DaemonLock before = Take(Living);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) {
      ::pause();
    }
  }
  const absl::StatusOr<ProcessId> child = IdentifyProcess(pid);
  ASSERT_TRUE(child.ok()) << child.status();
  const auto is_dying = [&](int32_t, uint64_t) { return std::optional<ProcessId>(*child); };
  EXPECT_THAT(AwaitDying(env_, {"/shm/none", kPath}, Duration(0), is_dying), ElementsAre(*child));
  ::kill(pid, SIGKILL);
  EXPECT_THAT(AwaitDying(env_, {"/shm/none", kPath}, std::chrono::minutes(1), is_dying), IsEmpty());
  ::waitpid(pid, nullptr, 0);
  EXPECT_THAT(AwaitDying(env_, {kPath}, std::chrono::minutes(1), is_dying), IsEmpty());
  EXPECT_THAT(AwaitDying(env_, {kPath}, std::chrono::minutes(1), Living), IsEmpty());
}

}  // namespace
}  // namespace holdfast
