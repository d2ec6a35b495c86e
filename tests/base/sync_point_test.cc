#include "base/sync_point.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

namespace holdfast {
namespace {

// What the environment says is read once a process: each case runs in a child of its own.
template <typename Body>
int StatusOfChild(const char* setting, int wait_options, Body body) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    if (setting == nullptr) {
      ::unsetenv("HOLDFAST_SYNC_POINT");
    } else {
      ::setenv("HOLDFAST_SYNC_POINT", setting, 1);
    }
    ::_exit(body());
  }
  int status = 0;
  EXPECT_EQ(::waitpid(pid, &status, wait_options), pid);
  if (WIFSTOPPED(status)) {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
  return status;
}

int PassTwoPoints() {
  HF_SYNC_POINT("test.first");
  HF_SYNC_POINT("test.second");
  return 7;
}

TEST(SyncPointTest, NothingHappensUnlessAsked) {
  EXPECT_EQ(WEXITSTATUS(StatusOfChild(nullptr, 0, PassTwoPoints)), 7);
  EXPECT_EQ(WEXITSTATUS(StatusOfChild("", 0, PassTwoPoints)), 7);
  EXPECT_EQ(WEXITSTATUS(StatusOfChild("test.other:kill,test.third:stop@2", 0, PassTwoPoints)), 7);
  EXPECT_EQ(WEXITSTATUS(StatusOfChild("test.first:kill@2", 0, PassTwoPoints)), 7);
}

TEST(SyncPointTest, KillsOnTheFirstPass) {
  const int status = StatusOfChild("test.other:stop,test.second:kill", 0, PassTwoPoints);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGKILL);
}

TEST(SyncPointTest, KillsOnTheNthPass) {
  const auto body = [] {
    for (int i = 0; i < 2; ++i) {
      HF_SYNC_POINT("test.first");
    }
    if (::getenv("HOLDFAST_SYNC_POINT") == nullptr) {
      return 1;
    }
    HF_SYNC_POINT("test.first");
    return 2;
  };
  EXPECT_TRUE(WIFSIGNALED(StatusOfChild("test.first:kill@3", 0, body)));
  EXPECT_EQ(WEXITSTATUS(StatusOfChild("test.first:kill@4", 0, body)), 2);
}

TEST(SyncPointTest, Stops) {
  const int status = StatusOfChild("test.second:stop", WUNTRACED, PassTwoPoints);
  EXPECT_TRUE(WIFSTOPPED(status));
  EXPECT_EQ(WSTOPSIG(status), SIGSTOP);
}

TEST(SyncPointTest, NonsenseAborts) {
  for (const char* setting : {"test.first", "test.first:", ":kill", "test.first:explode",
                              "test.first:kill@", "test.first:kill@0", "test.first:kill@x",
                              "test.first:kill@9999999999", ",", "a:kill,,b:kill"}) {
    const int status = StatusOfChild(setting, 0, [] {
      ::close(STDERR_FILENO);
      return PassTwoPoints();
    });
    EXPECT_TRUE(WIFSIGNALED(status)) << setting;
    EXPECT_EQ(WTERMSIG(status), SIGABRT) << setting;
  }
}

}  // namespace
}  // namespace holdfast
