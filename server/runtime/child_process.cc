#include "server/runtime/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/errno_status.h"
#include "base/status.h"
#include "base/utf8.h"

namespace holdfast {
namespace {

constexpr Duration kKillTakes = std::chrono::seconds(1);

struct Pipe {
  UniqueFd read;
  UniqueFd write;
};

absl::StatusOr<Pipe> MakePipe() {
  std::array<int, 2> ends = {};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    return ErrnoStatus(errno, "pipe2", "a program's input or output");
  }
  return Pipe{UniqueFd(ends[0]), UniqueFd(ends[1])};
}

std::vector<char*> Pointers(const std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (const std::string& text : texts) {
    pointers.push_back(const_cast<char*>(text.c_str()));
  }
  pointers.push_back(nullptr);
  return pointers;
}

// posix_spawn's settings, which own memory.
class SpawnSettings {
 public:
  SpawnSettings() {
    ::posix_spawnattr_init(&attributes_);
    ::posix_spawn_file_actions_init(&files_);
  }
  ~SpawnSettings() {
    ::posix_spawnattr_destroy(&attributes_);
    ::posix_spawn_file_actions_destroy(&files_);
  }
  SpawnSettings(const SpawnSettings&) = delete;
  SpawnSettings& operator=(const SpawnSettings&) = delete;

  int Fill(int in, int out) {
    sigset_t none;
    sigset_t all;
    ::sigemptyset(&none);
    ::sigfillset(&all);
    int error = ::posix_spawnattr_setflags(
        &attributes_, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    for (const int next : {::posix_spawnattr_setpgroup(&attributes_, 0),
                           ::posix_spawnattr_setsigmask(&attributes_, &none),
                           ::posix_spawnattr_setsigdefault(&attributes_, &all),
                           ::posix_spawn_file_actions_adddup2(&files_, in, STDIN_FILENO),
                           ::posix_spawn_file_actions_adddup2(&files_, out, STDOUT_FILENO),
                           ::posix_spawn_file_actions_adddup2(&files_, out, STDERR_FILENO),
                           ::posix_spawn_file_actions_addclosefrom_np(&files_, 3)}) {
      error = error == 0 ? next : error;
    }
    return error;
  }
  const posix_spawnattr_t* attributes() const { return &attributes_; }
  const posix_spawn_file_actions_t* files() const { return &files_; }

 private:
  posix_spawnattr_t attributes_;
  posix_spawn_file_actions_t files_;
};

}  // namespace

absl::StatusOr<ChildProcess> ChildProcess::Start(const std::vector<std::string>& command,
                                                 const std::vector<std::string>& environment,
                                                 std::string input) {
  HF_ASSIGN_OR_RETURN(Pipe in, MakePipe());
  HF_ASSIGN_OR_RETURN(Pipe out, MakePipe());
  SpawnSettings settings;
  ChildProcess child;
  child.input_ = std::move(input);
  int error = settings.Fill(in.read.get(), out.write.get());
  if (error == 0) {
    error =
        ::posix_spawn(&child.pid_, command.at(0).c_str(), settings.files(), settings.attributes(),
                      Pointers(command).data(), Pointers(environment).data());
  }
  if (error != 0) {
    child.pid_ = -1;
    return ErrnoStatus(error, "start the program", command.at(0));
  }
  child.to_ = std::move(in.write);
  child.from_ = std::move(out.read);
  ::fcntl(child.to_.get(), F_SETFL, O_NONBLOCK);
  ::fcntl(child.from_.get(), F_SETFL, O_NONBLOCK);
  child.pidfd_ = UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, child.pid_, 0)));
  if (!child.pidfd_.valid()) {
    const absl::Status status = ErrnoStatus(errno, "pidfd_open", command.at(0));
    child.Kill();
    return status;
  }
  return child;
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      status_(other.status_),
      pidfd_(std::move(other.pidfd_)),
      to_(std::move(other.to_)),
      from_(std::move(other.from_)),
      input_(std::move(other.input_)),
      fed_(other.fed_),
      said_(std::move(other.said_)) {}

ChildProcess::~ChildProcess() {
  if (pid_ > 0 && !status_) {
    Kill();
  }
}

bool ChildProcess::Step(Duration at_most) {
  if (status_) {
    return true;
  }
  std::array<pollfd, 3> fds = {pollfd{pidfd_.get(), POLLIN, 0}, pollfd{from_.get(), POLLIN, 0},
                               pollfd{to_.get(), POLLOUT, 0}};  // (-1 is passed over)
  const auto ms = std::max<int64_t>(1, at_most / std::chrono::milliseconds(1));
  ::poll(fds.data(), fds.size(), static_cast<int>(std::min<int64_t>(ms, 60'000)));
  if (fds[2].revents != 0) {
    Feed();
  }
  if (fds[1].revents != 0) {
    Listen();
  }
  return fds[0].revents != 0 && Reap();
}

// One that reads none of it, or not all, may be content.
void ChildProcess::Feed() {
  const ssize_t wrote = ::write(to_.get(), input_.data() + fed_, input_.size() - fed_);
  fed_ += wrote > 0 ? static_cast<size_t>(wrote) : 0;
  const bool broken = wrote < 0 && errno != EAGAIN && errno != EINTR;
  if (broken || fed_ == input_.size()) {
    to_.reset();
  }
}

void ChildProcess::Listen() {
  std::array<char, 4096> some = {};
  const ssize_t got = ::read(from_.get(), some.data(), some.size());
  if (got > 0) {
    said_.append(some.data(), std::min(static_cast<size_t>(got), kSaidBytesMax - said_.size()));
  } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
    from_.reset();
  }
}

bool ChildProcess::Reap() {
  int status = 0;
  if (::waitpid(pid_, &status, WNOHANG) != pid_) {
    return false;
  }
  status_ = status;
  if (from_.valid()) {
    Listen();  // its last words
  }
  ::kill(-pid_, SIGKILL);  // who of its group is left; nobody, mostly
  return true;
}

void ChildProcess::Kill() {
  if (pid_ <= 0 || status_) {
    return;
  }
  ::kill(-pid_, SIGKILL);
  ::kill(pid_, SIGKILL);  // (it may not have its group yet)
  pollfd ended = {pidfd_.get(), POLLIN, 0};
  ::poll(&ended, pidfd_.valid() ? 1 : 0,
         static_cast<int>(kKillTakes / std::chrono::milliseconds(1)));
  static_cast<void>(Reap());
}

absl::Status ChildProcess::Result() const {
  if (!status_) {
    return absl::DeadlineExceededError("it does not end, though it was killed");
  }
  const std::string said(absl::StripAsciiWhitespace(said_));
  const std::string words = said.empty() ? "" : absl::StrCat(": ", PrintableText(said));
  if (WIFSIGNALED(*status_)) {
    return absl::AbortedError(absl::StrCat("it was ended by signal ", WTERMSIG(*status_), words));
  }
  return WEXITSTATUS(*status_) == 0
             ? absl::OkStatus()
             : absl::UnknownError(absl::StrCat("exit code ", WEXITSTATUS(*status_), words));
}

}  // namespace holdfast
