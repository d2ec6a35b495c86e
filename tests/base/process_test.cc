#include "base/process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "base/env.h"
#include "base/status.h"

namespace holdfast {
namespace {

// A child process that lives until the test kills it or goes away.
class Child {
 public:
  explicit Child(const std::function<void()>& body = [] {}) {
    int ready[2];
    EXPECT_EQ(::pipe2(ready, O_CLOEXEC), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      body();
      const char byte = 'x';
      if (::write(ready[1], &byte, 1) != 1) {
        ::_exit(1);
      }
      for (;;) {
        ::pause();
      }
    }
    ::close(ready[1]);
    char byte = 0;
    EXPECT_EQ(::read(ready[0], &byte, 1), 1);
    ::close(ready[0]);
  }
  ~Child() {
    ::kill(pid_, SIGKILL);
    Reap();
  }
  pid_t pid() const { return pid_; }
  // Ends it and waits until it is a zombie that nobody reaped.
  void BecomeZombie() {
    ::kill(pid_, SIGKILL);
    siginfo_t info = {};
    EXPECT_EQ(::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT), 0);
  }
  void Reap() {
    if (!reaped_) {
      ::waitpid(pid_, nullptr, 0);
      reaped_ = true;
    }
  }

 private:
  pid_t pid_ = 0;
  bool reaped_ = false;
};

bool Readable(const UniqueFd& fd, int timeout_ms) {
  pollfd p = {fd.get(), POLLIN, 0};
  return ::poll(&p, 1, timeout_ms) == 1;
}

TEST(ProcessTest, ThisProcessIsItself) {
  const ProcessId id = ThisProcess();
  EXPECT_EQ(id.pid, ::getpid());
  EXPECT_GT(id.start_ticks, 0u);
  EXPECT_EQ(*IdentifyProcess(::getpid()), id);
}

TEST(ProcessTest, ForkedChildrenAreSomebodyElse) {
  const Child child;
  EXPECT_NE(*IdentifyProcess(child.pid()), ThisProcess());
}

TEST(ProcessTest, NamesWithParenthesesAndSpaces) {
  const Child child([] { ::prctl(PR_SET_NAME, "a) Z 1 (b"); });
  const absl::StatusOr<ProcessId> id = IdentifyProcess(child.pid());
  ASSERT_TRUE(id.ok()) << id.status();
  EXPECT_GE(id->start_ticks, ThisProcess().start_ticks);
}

TEST(ProcessTest, ImpossiblePids) {
  EXPECT_EQ(IdentifyProcess(0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(IdentifyProcess(-5).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(IdentifyProcess(INT32_MAX).status().code(), absl::StatusCode::kNotFound);
}

TEST(ProcessTest, ZombiesAndTheReapedAreGone) {
  Child child;
  const ProcessId id = *IdentifyProcess(child.pid());
  child.BecomeZombie();
  EXPECT_EQ(IdentifyProcess(child.pid()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(OpenPidfd(id).status().code(), absl::StatusCode::kNotFound);
  child.Reap();
  EXPECT_EQ(IdentifyProcess(child.pid()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(OpenPidfd(id).status().code(), absl::StatusCode::kNotFound);
}

TEST(ProcessTest, WatchTellsTheEnd) {
  Child child;
  const absl::StatusOr<UniqueFd> watch = OpenPidfd(*IdentifyProcess(child.pid()));
  ASSERT_TRUE(watch.ok()) << watch.status();
  EXPECT_FALSE(Readable(*watch, 0));
  child.BecomeZombie();
  EXPECT_TRUE(Readable(*watch, 60'000));
}

TEST(ProcessTest, ALaterProcessOfThatPidIsNotMeant) {
  const Child child;
  ProcessId id = *IdentifyProcess(child.pid());
  id.start_ticks -= 1;
  EXPECT_EQ(OpenPidfd(id).status().code(), absl::StatusCode::kNotFound);
}

// The leader's entry says zombie, but another thread still has the memory, and may be writing into
// a slot.
TEST(ProcessTest, AnEndedLeaderWithLivingThreadsIsNotGone) {
  int ready[2];
  ASSERT_EQ(::pipe2(ready, O_CLOEXEC), 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    static int ready_fd;
    ready_fd = ready[1];
    pthread_t thread;
    ::pthread_create(
        &thread, nullptr,
        [](void*) -> void* {
          // Says so only when the leader is a zombie.
          const std::string path = "/proc/" + std::to_string(::getpid()) + "/stat";
          while (ReadKernelFile(path)->find(") Z ") == std::string::npos) {
            ::sched_yield();
          }
          const char byte = 'x';
          if (::write(ready_fd, &byte, 1) == 1) {
            for (;;) {
              ::pause();
            }
          }
          return nullptr;
        },
        nullptr);
    ::syscall(SYS_exit, 0);  // this thread only
  }
  ::close(ready[1]);
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  ::close(ready[0]);
  const absl::StatusOr<ProcessId> id = IdentifyProcess(pid);
  EXPECT_TRUE(id.ok()) << id.status();
  const absl::StatusOr<UniqueFd> watch = OpenPidfd(id.value_or(ProcessId{}));
  EXPECT_TRUE(watch.ok()) << watch.status();
  ::kill(pid, SIGKILL);
  if (watch.ok()) {
    EXPECT_TRUE(Readable(*watch, 60'000));
  }
  ::waitpid(pid, nullptr, 0);
}

TEST(ProcessTest, BootIdIsAUuidWithoutLineBreak) {
  EXPECT_EQ(BootId().size(), 36u);
  EXPECT_EQ(BootId(), BootId());
}

}  // namespace
}  // namespace holdfast
