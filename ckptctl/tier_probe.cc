#include "ckptctl/tier_probe.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

#include "absl/strings/str_cat.h"
#include "base/env.h"
#include "base/unique_fd.h"

namespace holdfast {
namespace {

enum class Call : int { kLook, kSpace, kWrite, kLink, kDirect, kUnlink, kDone };

// What the child tells, whole, before each call: its parent knows then in which one it hangs.
struct Report {
  Call call = Call::kLook;
  int look_error = 0;
  int write_error = 0;
  int direct_error = 0;
  int link_error = 0;
  bool is_directory = false;
  uint64_t bytes_total = 0;
  uint64_t bytes_free = 0;
};
static_assert(sizeof(Report) <= PIPE_BUF, "a report is written at once or not at all");

constexpr size_t kPieceBytes = 4096;
alignas(kPieceBytes) char piece[kPieceBytes];

std::string NameOf(Call call) {
  switch (call) {
    case Call::kLook:
      return "stat";
    case Call::kSpace:
      return "statvfs";
    case Call::kWrite:
      return "writing a file";
    case Call::kLink:
      return "link";
    case Call::kDirect:
      return "writing with O_DIRECT";
    case Call::kUnlink:
      return "unlink";
    case Call::kDone:
      return "";
  }
  return "";
}

// In the child, which is a copy of one thread of a process that may have had more: only calls that
// are safe in a signal handler, no memory from the heap.
class Child {
 public:
  Child(int pipe, const char* dir, const char* file, const char* link)
      : pipe_(pipe), dir_(dir), file_(file), link_(link) {}

  void Run() {
    struct stat info;
    report_.look_error = ::stat(dir_, &info) == 0 ? 0 : errno;
    report_.is_directory = report_.look_error == 0 && S_ISDIR(info.st_mode);
    if (report_.is_directory) {
      Try();
    }
    Tell(Call::kDone);
  }

 private:
  void Tell(Call next) {
    report_.call = next;
    static_cast<void>(!::write(pipe_, &report_, sizeof(report_)));
  }

  void Try() {
    Tell(Call::kSpace);
    struct statvfs space;
    if (::statvfs(dir_, &space) == 0) {
      report_.bytes_total = uint64_t{space.f_blocks} * space.f_frsize;
      report_.bytes_free = uint64_t{space.f_bavail} * space.f_frsize;
    }
    Tell(Call::kWrite);
    report_.write_error = WritePiece(O_CREAT | O_EXCL);
    if (report_.write_error == 0) {
      Tell(Call::kLink);
      report_.link_error = ::link(file_, link_) == 0 ? 0 : errno;
      Tell(Call::kDirect);
      report_.direct_error = WritePiece(O_DIRECT);
    }
    if (report_.write_error != EEXIST) {  // then it is not ours
      Tell(Call::kUnlink);
      if (report_.link_error == 0) {
        ::unlink(link_);
      }
      ::unlink(file_);
    }
  }

  int WritePiece(int flags) const {
    const int fd = ::open(file_, O_WRONLY | O_CLOEXEC | flags, 0600);
    if (fd < 0) {
      return errno;
    }
    const ssize_t written = ::pwrite(fd, piece, kPieceBytes, 0);
    int error = written < 0 ? errno : written == static_cast<ssize_t>(kPieceBytes) ? 0 : ENOSPC;
    if (error == 0 && ::fsync(fd) != 0) {
      error = errno;
    }
    ::close(fd);
    return error;
  }

  const int pipe_;
  const char* const dir_;
  const char* const file_;
  const char* const link_;
  Report report_;
};

struct Running {
  DirectoryProbe* probe = nullptr;
  pid_t pid = -1;
  UniqueFd pipe;
  Report report;
};

// Whoever reads our output waits until its last writer is gone: a child that hangs must not be one.
void CloseAllBut(int fd) {
  const int most = static_cast<int>(std::min<long>(::sysconf(_SC_OPEN_MAX), 1 << 16));
  for (int other = 0; other < most; ++other) {
    if (other != fd) {
      ::close(other);
    }
  }
}

Running Start(DirectoryProbe& probe, size_t index) {
  Running running;
  running.probe = &probe;
  const std::string file =
      JoinPath(probe.dir, absl::StrCat(".holdfast-doctor-", ::getpid(), "-", index));
  const std::string link = file + ".link";
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    probe.start_error = errno;
    return running;
  }
  running.pipe.reset(ends[0]);
  const UniqueFd write_end(ends[1]);
  running.pid = ::fork();
  if (running.pid == 0) {
    CloseAllBut(write_end.get());
    Child(write_end.get(), probe.dir.c_str(), file.c_str(), link.c_str()).Run();
    ::_exit(0);
  }
  if (running.pid < 0) {
    probe.start_error = errno;
    running.pipe.reset();
  }
  return running;
}

// Takes what there is. False: nothing more will come.
bool Read(Running& running) {
  Report report;
  const ssize_t got = ::read(running.pipe.get(), &report, sizeof(report));
  if (got != static_cast<ssize_t>(sizeof(report))) {
    return got < 0 && errno == EINTR;
  }
  running.report = report;
  return report.call != Call::kDone;
}

void WaitForAll(std::vector<Running>& all, Duration timeout) {
  const MonotonicTime until = Clock::System()->Now() + timeout;
  for (;;) {
    std::vector<pollfd> fds;
    std::vector<Running*> whose;
    for (Running& running : all) {
      if (running.pipe.valid()) {
        fds.push_back({running.pipe.get(), POLLIN, 0});
        whose.push_back(&running);
      }
    }
    const auto left = (until - Clock::System()->Now()) / std::chrono::milliseconds(1);
    if (fds.empty() || left <= 0) {
      return;
    }
    ::poll(fds.data(), fds.size(), static_cast<int>(std::min<int64_t>(left + 1, INT_MAX)));
    for (size_t i = 0; i < fds.size(); ++i) {
      if (fds[i].revents != 0 && !Read(*whose[i])) {
        whose[i]->pipe.reset();
      }
    }
  }
}

void Conclude(Running& running) {
  DirectoryProbe& probe = *running.probe;
  const Report& report = running.report;
  probe.look_error = report.look_error;
  probe.is_directory = report.is_directory;
  probe.write_error = report.write_error;
  probe.direct_error = report.direct_error;
  probe.link_error = report.link_error;
  probe.bytes_total = report.bytes_total;
  probe.bytes_free = report.bytes_free;
  if (running.pid < 0) {
    return;
  }
  if (report.call != Call::kDone) {
    probe.stuck_in = NameOf(report.call);
    ::kill(running.pid, SIGKILL);
    // Not waited for: in an uninterruptible call it outlives even that.
    ::waitpid(running.pid, nullptr, WNOHANG);
    return;
  }
  while (::waitpid(running.pid, nullptr, 0) < 0 && errno == EINTR) {
  }
}

}  // namespace

std::vector<DirectoryProbe> ProbeDirectories(const std::vector<std::string>& dirs,
                                             Duration timeout) {
  std::vector<DirectoryProbe> probes(dirs.size());
  std::vector<Running> all;
  for (size_t i = 0; i < dirs.size(); ++i) {
    probes[i].dir = dirs[i];
    all.push_back(Start(probes[i], i));
  }
  WaitForAll(all, timeout);
  for (Running& running : all) {
    Conclude(running);
  }
  return probes;
}

}  // namespace holdfast
