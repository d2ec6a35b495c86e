// A lease that somebody breaks, for real: another process opens the file just while we have the
// lease of it. The kernel then sends us SIGIO, which ends a process that does not expect it.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <string>

#include "base/env.h"
#include "tests/base/temporary_directory.h"

namespace {

std::string open_during_lease;  // path; empty: nobody opens anything
bool lease_was_broken = false;

// In a process of its own: whether its open met a lease.
void OpenInAnotherProcess() {
  const pid_t child = ::fork();
  if (child == 0) {
    const int fd = ::open(open_during_lease.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    ::_exit(fd < 0 && errno == EWOULDBLOCK ? 0 : 1);
  }
  int status = -1;
  lease_was_broken = ::waitpid(child, &status, 0) == child && status == 0;
}

int FcntlWithGuests(int fd, int command, long argument) {
  if (command == F_SETLEASE && argument == F_UNLCK && !open_during_lease.empty()) {
    OpenInAnotherProcess();
  }
  return static_cast<int>(::syscall(SYS_fcntl, fd, command, argument));
}

}  // namespace

// In place of libc's, for this program: before a lease is given back, somebody opens the file.
extern "C" int fcntl(int fd, int command, ...) {
  va_list arguments;
  va_start(arguments, command);
  const long argument = va_arg(arguments, long);
  va_end(arguments);
  return FcntlWithGuests(fd, command, argument);
}
extern "C" int fcntl64(int fd, int command, ...) {
  va_list arguments;
  va_start(arguments, command);
  const long argument = va_arg(arguments, long);
  va_end(arguments);
  return FcntlWithGuests(fd, command, argument);
}

namespace holdfast {
namespace {

class LeaseTest : public ::testing::Test {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "fast");
    file_ = Env::System()->Open(dir_.Path("file"), OpenMode::kCreateExclusive).value();
    const absl::StatusOr<bool> alone = file_->NobodyElseHasIt();
    if (!alone.ok() || !*alone) {
      GTEST_SKIP() << "this file system has no leases";
    }
  }
  // 0: it went well, and the lease was broken meanwhile.
  [[noreturn]] void AskWhileSomebodyOpensIt() {
    open_during_lease = dir_.Path("file");
    const absl::StatusOr<bool> alone = file_->NobodyElseHasIt();
    std::_Exit(!lease_was_broken ? 2 : !alone.ok() ? 3 : 0);
  }

  TemporaryDirectory dir_;
  std::unique_ptr<File> file_;
};

TEST_F(LeaseTest, WhoIgnoresTheSignalGoesOn) {
  EXPECT_EXIT(
      {
        ::signal(SIGIO, SIG_IGN);  // as the daemon does (server/runtime/daemon.cc)
        AskWhileSomebodyOpensIt();
      },
      ::testing::ExitedWithCode(0), "");
}

// Why the daemon does: this is how it would end.
TEST_F(LeaseTest, WhoDoesNotIsEndedByTheKernel) {
  EXPECT_EXIT(
      {
        ::signal(SIGIO, SIG_DFL);
        AskWhileSomebodyOpensIt();
      },
      ::testing::KilledBySignal(SIGIO), "");
}

}  // namespace
}  // namespace holdfast
