#include "base/program.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "base/status.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

TEST(CheckThreadsTest, AFewCanBeHad) {
  EXPECT_EQ(CheckThreads(8), absl::OkStatus());
}

TEST(CheckThreadsTest, TooManyAreAStatusWithTheWayOut) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need more address space than there is";
#endif
  const auto try_it = [] {
    const rlimit limit = {256u << 20, 256u << 20};  // a thread's stack takes 8 MiB of it
    ::setrlimit(RLIMIT_AS, &limit);
    const absl::Status status = CheckThreads(200);
    std::fprintf(stderr, "%s\n", Message(status).c_str());
    std::exit(absl::IsResourceExhausted(status) ? 0 : 1);
  };
  EXPECT_EXIT(try_it(), testing::ExitedWithCode(0),
              "start a thread \\(200 are needed, [0-9]+ started\\).*ulimit -u.*ulimit -v");
}

TEST(OpenStandardDescriptorsTest, WhatIsClosedIsOpened) {
  const auto try_it = [](int closed) {
    for (int fd = 0; fd <= 2; ++fd) {
      if ((closed >> fd & 1) != 0) {
        ::close(fd);
      }
    }
    OpenStandardDescriptors();
    for (int fd = 0; fd <= 2; ++fd) {
      if (::fcntl(fd, F_GETFD) < 0) {
        ::_exit(1);
      }
    }
    ::_exit(::open("/dev/null", O_RDONLY) > 2 ? 0 : 2);
  };
  for (int closed = 0; closed < 8; ++closed) {
    EXPECT_EXIT(try_it(closed), testing::ExitedWithCode(0), "") << closed;
  }
}

}  // namespace
}  // namespace holdfast
