#include "base/program.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <latch>
#include <new>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast {

void OpenStandardDescriptors() {
  // open() gives the lowest number that is free. To be read only: who writes an answer to a closed
  // stdout is to notice it.
  int fd = 0;
  do {
    fd = ::open("/dev/null", O_RDONLY);
  } while (fd >= 0 && fd <= STDERR_FILENO);
  if (fd > STDERR_FILENO) {
    ::close(fd);
  }
}

absl::Status FinishStandardOutput() {
  // (std::cout writes through it.)
  bool failed = std::ferror(stdout) != 0;
  errno = 0;
  if (failed) {
    // Of a write that failed before nobody knows the cause any more: so one more is tried.
    std::clearerr(stdout);
    std::fputc('\n', stdout);
  }
  failed = std::fflush(stdout) != 0 || failed;
  if (!failed) {
    return absl::OkStatus();
  }
  const int error = errno == 0 ? EIO : errno;
  return absl::FailedPreconditionError(
      absl::StrCat(Message(ErrnoStatus(error, "write", "standard output")),
                   "; have it go to a file or a pipe that takes it"));
}

absl::Status CheckThreads(int count) {
  std::vector<std::thread> threads;
  std::latch all_asked(1);
  absl::Status status;
  try {
    threads.reserve(count);
    for (int i = 0; i < count; ++i) {
      threads.emplace_back([&all_asked] { all_asked.wait(); });
    }
  } catch (const std::system_error& error) {
    status = ThreadError(error, absl::StrCat(count, " are needed, ", threads.size(), " started"));
  } catch (const std::bad_alloc&) {
    status = absl::ResourceExhaustedError(
        "start a thread: no memory for it; raise the limit on memory (ulimit -v)");
  }
  all_asked.count_down();
  for (std::thread& thread : threads) {
    thread.join();
  }
  return status;
}

absl::Status ThreadError(const std::system_error& error, const std::string& what) {
  return absl::ResourceExhaustedError(absl::StrCat(
      "start a thread (", what, "): ", error.code().message(),
      "; raise the limit on the user's processes and threads (ulimit -u), the service's or "
      "container's (TasksMax=, pids.max), or on memory (ulimit -v)"));
}

}  // namespace holdfast
