#include "tiers/transfer/thread_priority.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast {
namespace {

// From linux/ioprio.h, which libc does not ship everywhere.
constexpr int kWhoThread = 1;  // IOPRIO_WHO_PROCESS: a thread
constexpr int kClassShift = 13;
constexpr int kClassBestEffort = 2;
constexpr int kClassIdle = 3;

}  // namespace

pid_t CurrentThreadId() {
  return static_cast<pid_t>(::syscall(SYS_gettid));
}

absl::Status CheckThreadPriority(const ThreadPriority& priority) {
  if (priority.io < 0 || priority.io > kIoPriorityIdle || priority.nice < 0 || priority.nice > 19) {
    return absl::InvalidArgumentError(absl::StrCat("priority: io ", priority.io, " (0 to 8), nice ",
                                                   priority.nice, " (0 to 19): out of range"));
  }
  return absl::OkStatus();
}

absl::Status SetThreadPriority(pid_t thread, const ThreadPriority& priority) {
  HF_RETURN_IF_ERROR(CheckThreadPriority(priority));
  const int io = priority.io == kIoPriorityIdle ? kClassIdle << kClassShift
                                                : kClassBestEffort << kClassShift | priority.io;
  absl::Status status;
  if (::syscall(SYS_ioprio_set, kWhoThread, thread, io) != 0) {
    status = ErrnoStatus(errno, "set I/O priority", "thread");
  }
  if (::setpriority(PRIO_PROCESS, static_cast<id_t>(thread), priority.nice) != 0 && status.ok()) {
    status = ErrnoStatus(errno, "set nice", "thread");
  }
  if (status.code() == absl::StatusCode::kInternal) {  // ESRCH
    status = absl::NotFoundError(status.message());
  }
  return status;
}

}  // namespace holdfast
