#include "base/process.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/env.h"
#include "base/status.h"

namespace holdfast {
namespace {

absl::Status Gone(int32_t pid) {
  return absl::NotFoundError(absl::StrCat("pid ", pid, ": no such process"));
}

struct ProcessStat {
  char state = '?';
  uint64_t threads = 0;
  uint64_t start_ticks = 0;
};

// /proc/<pid>/stat: "pid (comm) state ppid …"; comm may hold anything, ')' and spaces included, so
// fields are counted from the last ')'.
absl::StatusOr<ProcessStat> ParseStat(int32_t pid, const std::string& text) {
  constexpr size_t kThreadsField = 20 - 3;  // proc(5) counts from 1; after the ')' comes field 3
  constexpr size_t kStartField = 22 - 3;
  const size_t paren = text.rfind(')');
  if (paren != std::string::npos && paren + 2 < text.size()) {
    const std::vector<std::string> fields = absl::StrSplit(text.substr(paren + 2), ' ');
    ProcessStat stat;
    if (fields.size() > kStartField && fields[0].size() == 1 &&
        absl::SimpleAtoi(fields[kThreadsField], &stat.threads) &&
        absl::SimpleAtoi(fields[kStartField], &stat.start_ticks)) {
      stat.state = fields[0][0];
      return stat;
    }
  }
  return absl::InternalError(absl::StrCat("/proc/", pid, "/stat: cannot be understood"));
}

}  // namespace

absl::StatusOr<ProcessId> IdentifyProcess(int32_t pid) {
  if (pid <= 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "pid ", pid, ": not a process of this pid namespace (is the peer in another container?)"));
  }
  const absl::StatusOr<std::string> text = ReadKernelFile(absl::StrCat("/proc/", pid, "/stat"));
  if (!text.ok()) {
    // A /proc mounted with hidepid shows other users' processes as if they did not exist; to take
    // one for dead would give its memory away.
    if (::kill(pid, 0) == 0 || errno != ESRCH) {
      return Annotate(text.status(),
                      absl::StrCat("pid ", pid, " exists, but /proc does not show it"));
    }
    return Gone(pid);
  }
  HF_ASSIGN_OR_RETURN(const ProcessStat stat, ParseStat(pid, *text));
  // A leader that called pthread_exit is a zombie too, while its threads go on writing.
  const bool dead =
      stat.state == 'X' || stat.state == 'x' || (stat.state == 'Z' && stat.threads <= 1);
  if (dead) {
    return Gone(pid);
  }
  return ProcessId{pid, stat.start_ticks};
}

ProcessId ThisProcess() {
  const int32_t pid = static_cast<int32_t>(::getpid());
  const absl::StatusOr<ProcessId> id = IdentifyProcess(pid);
  return id.ok() ? *id : ProcessId{pid, 0};
}

absl::StatusOr<UniqueFd> OpenPidfd(const ProcessId& process) {
  UniqueFd fd(static_cast<int>(::syscall(SYS_pidfd_open, process.pid, 0)));
  if (!fd.valid()) {
    return errno == ESRCH ? Gone(process.pid)
                          : ErrnoStatus(errno, "pidfd_open", process.ToString());
  }
  // The descriptor now holds on to whatever has this pid; who that is can be asked without a race.
  HF_ASSIGN_OR_RETURN(const ProcessId now, IdentifyProcess(process.pid));
  if (now.start_ticks != process.start_ticks) {
    return absl::NotFoundError(
        absl::StrCat("pid ", process.pid, ": ended; its number belongs to a later process"));
  }
  pollfd ended = {fd.get(), POLLIN, 0};
  if (::poll(&ended, 1, 0) > 0) {
    return Gone(process.pid);
  }
  return fd;
}

std::string BootId() {
  static const std::string id = [] {
    std::string text = ReadKernelFile("/proc/sys/kernel/random/boot_id").value_or("");
    while (!text.empty() && text.back() == '\n') {
      text.pop_back();
    }
    return text;
  }();
  return id;
}

}  // namespace holdfast
