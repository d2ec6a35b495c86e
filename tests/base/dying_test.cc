// Which processes never run again, by what /proc says. For one that was killed and hangs in a call
// see tests/integration/hung_mount_test.cc.
#include "base/dying.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <string>

#include "base/env.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "tests/base/temporary_directory.h"

namespace holdfast {
namespace {

constexpr uint64_t kExiting = 0x4;      // PF_EXITING
constexpr uint64_t kForkNoExec = 0x40;  // some other flag
constexpr uint64_t kKilled = 0x100;     // SIGKILL is signal 9
constexpr uint64_t kTerminated = 0x4000;

std::string Stat(const std::string& name, char state, uint64_t flags) {
  return "4711 (" + name + ") " + state + " 1 4711 4711 0 -1 " + std::to_string(flags) +
         " 20 0 0 0 2 2 0 0 20 0 2 0 4001589 0 0\n";
}

std::string Status(const std::string& pending) {
  return "Name:\tckptd\nState:\tD (disk sleep)\nThreads:\t2\nSigQ:\t0/9\nSigPnd:\t" + pending +
         "\nShdPnd:\t0000000000000100\nSigBlk:\t0000000000000000\n";
}

TEST(DyingTest, ReadsTheFactsOfAThread) {
  const absl::StatusOr<ThreadFacts> facts =
      ParseThreadFacts(Stat("a) Z 1 (b", 'D', 4194624), Status("0000000000000100"));
  ASSERT_TRUE(facts.ok()) << facts.status();
  EXPECT_EQ(facts->state, 'D');
  EXPECT_EQ(facts->flags, 4194624u);
  EXPECT_EQ(facts->pending, kKilled);
}

TEST(DyingTest, WhatCannotBeReadIsAnError) {
  const std::string stat = Stat("ckptd", 'D', 64);
  const std::string status = Status("0000000000000000");
  EXPECT_FALSE(ParseThreadFacts("", status).ok());
  EXPECT_FALSE(ParseThreadFacts("4711 (ckptd)", status).ok());
  EXPECT_FALSE(ParseThreadFacts("4711 (ckptd) D 1 4711", status).ok());
  EXPECT_FALSE(ParseThreadFacts("4711 (ckptd) D 1 4711 4711 0 -1 many 20", status).ok());
  EXPECT_FALSE(ParseThreadFacts(stat, "").ok());
  EXPECT_FALSE(ParseThreadFacts(stat, Status("none")).ok());
}

TEST(DyingTest, OnlyWhereNoThreadRunsAgain) {
  const ThreadFacts dead{'Z', kExiting, 0};
  const ThreadFacts hangs_killed{'D', kForkNoExec, kKilled};
  const ThreadFacts hangs_exiting{'D', kExiting, 0};
  const ThreadFacts hangs{'D', kForkNoExec, 0};
  const ThreadFacts stopped{'T', kForkNoExec, 0};
  const ThreadFacts traced{'t', kForkNoExec, 0};
  const ThreadFacts asleep{'S', kForkNoExec, 0};
  const ThreadFacts terminated{'D', kForkNoExec, kTerminated};
  EXPECT_TRUE(NeverRunsAgain({dead, hangs_killed}));
  EXPECT_TRUE(NeverRunsAgain({dead, hangs_exiting}));
  EXPECT_TRUE(NeverRunsAgain({hangs_killed}));
  EXPECT_TRUE(NeverRunsAgain({dead}));
  for (const ThreadFacts& may_run : {hangs, stopped, traced, asleep, terminated}) {
    EXPECT_FALSE(NeverRunsAgain({may_run})) << may_run.state;
    EXPECT_FALSE(NeverRunsAgain({dead, hangs_killed, may_run})) << may_run.state;
  }
  EXPECT_FALSE(NeverRunsAgain({}));
}

// A child that says when it is ready, and lives until it is killed.
class Child {
 public:
  explicit Child(const std::function<void(int ready)>& body) {
    int ready[2];
    EXPECT_EQ(::pipe2(ready, O_CLOEXEC), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      body(ready[1]);
      for (;;) {
        ::pause();
      }
    }
    ::close(ready[1]);
    const UniqueFd read_end(ready[0]);
    char byte = 0;
    EXPECT_EQ(::read(read_end.get(), &byte, 1), 1);
  }
  ~Child() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = 0;
};

void SayReady(int ready) {
  const char byte = 'x';
  if (::write(ready, &byte, 1) != 1) {
    ::_exit(1);
  }
}

TEST(DyingTest, WhoLivesIsNot) {
  EXPECT_FALSE(FindDying(::getpid()).has_value());
  const Child child(SayReady);
  EXPECT_FALSE(FindDying(child.pid()).has_value());
}

TEST(DyingTest, WhoIsStoppedIsNot) {
  const Child child(SayReady);
  ::kill(child.pid(), SIGSTOP);
  siginfo_t info = {};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child.pid()), &info, WSTOPPED | WNOWAIT), 0);
  EXPECT_FALSE(FindDying(child.pid()).has_value());
}

TEST(DyingTest, WhoIsGoneIsNot) {
  EXPECT_FALSE(FindDying(0).has_value());
  EXPECT_FALSE(FindDying(-1).has_value());
  EXPECT_FALSE(FindDying(INT32_MAX).has_value());
  const Child child(SayReady);
  ::kill(child.pid(), SIGKILL);
  siginfo_t info = {};  // a zombie that nobody reaped has nothing left
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child.pid()), &info, WEXITED | WNOWAIT), 0);
  EXPECT_FALSE(FindDying(child.pid()).has_value());
}

TEST(DyingTest, AnEndedLeaderWithALivingThreadIsNot) {
  const Child child([](int ready) {
    static int ready_fd;
    ready_fd = ready;
    pthread_t thread;
    ::pthread_create(
        &thread, nullptr,
        [](void*) -> void* {
          const std::string path = "/proc/" + std::to_string(::getpid()) + "/stat";
          while (ReadKernelFile(path)->find(") Z ") == std::string::npos) {
            ::sched_yield();
          }
          SayReady(ready_fd);
          for (;;) {
            ::pause();
          }
        },
        nullptr);
    ::syscall(SYS_exit, 0);  // this thread only
  });
  EXPECT_FALSE(FindDying(child.pid()).has_value());
}

TEST(HasFlockTest, OneOfThatProcessAndThatFile) {
  const std::string locks =
      "1: POSIX  ADVISORY  WRITE 4711 08:02:118 0 EOF\n"
      "2: FLOCK  ADVISORY  WRITE 4711 00:1c:1180 0 EOF\n"
      "2: -> FLOCK  ADVISORY  WRITE 4712 00:1c:1180 0 EOF\n"
      "3: FLOCK  ADVISORY  WRITE 47 fe:00:18 0 EOF\n";
  EXPECT_TRUE(HasFlock(locks, 4711, 1180));
  EXPECT_TRUE(HasFlock(locks, 47, 18));
  EXPECT_FALSE(HasFlock(locks, 4711, 118)) << "another kind of lock";
  EXPECT_FALSE(HasFlock(locks, 4711, 180)) << "the end of another number";
  EXPECT_FALSE(HasFlock(locks, 471, 1180));
  EXPECT_FALSE(HasFlock(locks, 4712, 1180)) << "it only waits for it";
  EXPECT_FALSE(HasFlock("", 4711, 1180));
}

TEST(HasFlockTest, AsThisKernelWritesIt) {
  const TemporaryDirectory directory;
  const std::string path = directory.Path("lock");
  const std::unique_ptr<FileLock> lock = Env::System()->Lock(path).value();
  const uint64_t inode = Env::System()->Info(path)->inode;
  const std::string locks = *ReadKernelFile("/proc/locks");
  EXPECT_TRUE(HasFlock(locks, ::getpid(), inode)) << locks;
  EXPECT_FALSE(HasFlock(locks, ::getpid(), inode + 1)) << locks;
  EXPECT_FALSE(HasFlock(locks, ::getppid(), inode)) << locks;
}

}  // namespace
}  // namespace holdfast
