#include "tests/integration/harness.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <utility>

namespace holdfast {
namespace {

using SteadyClock = std::chrono::steady_clock;

int MillisUntil(SteadyClock::time_point until) {
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(until - SteadyClock::now()).count();
  return static_cast<int>(std::max<int64_t>(left, 0));
}

std::pair<UniqueFd, UniqueFd> Pipe() {
  std::array<int, 2> ends = {-1, -1};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    ADD_FAILURE() << "pipe2: errno " << errno;
  }
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

// In the child, between fork and exec: system calls only.
[[noreturn]] void BecomeProgram(const Child::Options& options, std::vector<char*>& arguments,
                                std::vector<char*>& environment, int in, int out, int err) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // no test leaves a daemon behind
  if (in >= 0) {
    ::dup2(in, STDIN_FILENO);
    ::dup2(out, STDOUT_FILENO);
  }
  if (err >= 0) {
    ::dup2(err, STDERR_FILENO);
  }
  if (options.uid != 0 && (::setresgid(options.uid, options.uid, options.uid) != 0 ||
                           ::setresuid(options.uid, options.uid, options.uid) != 0)) {
    ::_exit(126);
  }
  ::execve(arguments[0], arguments.data(), environment.data());
  ::_exit(127);
}

// In a mount namespace of this thread's own, so that nothing stays mounted whatever happens.
bool MountOwn(const std::string& path, uint64_t bytes) {
  return ::unshare(CLONE_NEWNS) == 0 &&
         ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         ::mount("tmpfs", path.c_str(), "tmpfs", 0, ("size=" + std::to_string(bytes)).c_str()) == 0;
}

}  // namespace

Child::Child(const Options& options) {
  std::vector<std::string> texts = options.arguments;
  std::vector<char*> arguments;
  for (std::string& text : texts) {
    arguments.push_back(text.data());
  }
  arguments.push_back(nullptr);
  std::vector<std::string> added = options.environment;
  std::vector<char*> environment;
  for (char** one = ::environ; *one != nullptr; ++one) {
    environment.push_back(*one);
  }
  for (std::string& one : added) {
    environment.push_back(one.data());
  }
  environment.push_back(nullptr);
  std::pair<UniqueFd, UniqueFd> in;
  std::pair<UniqueFd, UniqueFd> out;
  if (options.pipes) {
    in = Pipe();
    out = Pipe();
  }
  UniqueFd err;
  if (!options.error_file.empty()) {
    err = UniqueFd(
        ::open(options.error_file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  }
  pid_ = ::fork();
  if (pid_ == 0) {
    BecomeProgram(options, arguments, environment, in.first.get(), out.second.get(), err.get());
  }
  pidfd_ = UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
  in_ = std::move(in.second);
  out_ = std::move(out.first);
}

Child::~Child() {
  if (!ended_.has_value()) {
    Signal(SIGKILL);
    Wait();
  }
}

void Child::Signal(int signal_number) {
  if (!ended_.has_value()) {
    ::syscall(SYS_pidfd_send_signal, pidfd_.get(), signal_number, nullptr, 0);
  }
}

std::optional<int> Child::Wait(std::chrono::milliseconds at_most) {
  const auto until = SteadyClock::now() + at_most;
  while (!ended_.has_value()) {
    pollfd ended = {pidfd_.get(), POLLIN, 0};
    if (::poll(&ended, 1, MillisUntil(until)) == 0) {
      return std::nullopt;
    }
    int status = 0;
    if (::waitpid(pid_, &status, WNOHANG) == pid_) {
      ended_ = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
    }
  }
  return ended_;
}

void Child::WriteLine(const std::string& line) {
  const std::string text = line + "\n";
  // A child that has ended is found out by the answer that does not come.
  [[maybe_unused]] const ssize_t written = ::write(in_.get(), text.data(), text.size());
}

std::optional<std::string> Child::ReadLine(std::chrono::milliseconds at_most) {
  const auto until = SteadyClock::now() + at_most;
  for (;;) {
    const size_t end = buffer_.find('\n');
    if (end != std::string::npos) {
      std::string line = buffer_.substr(0, end);
      buffer_.erase(0, end + 1);
      return line;
    }
    pollfd readable = {out_.get(), POLLIN, 0};
    if (::poll(&readable, 1, MillisUntil(until)) == 0) {
      return std::nullopt;
    }
    std::array<char, 4096> bytes;
    const ssize_t got = ::read(out_.get(), bytes.data(), bytes.size());
    if (got == 0) {
      return std::nullopt;
    }
    buffer_.append(bytes.data(), got > 0 ? static_cast<size_t>(got) : 0);
  }
}

Node::Node(const NodeOptions& options) : options_(options) {
  ::signal(SIGPIPE, SIG_IGN);
  ::chmod(state_.path().c_str(), 0755);  // another user's client reaches the socket
  if (options_.own_tmpfs_bytes > 0) {
    has_own_tmpfs_ = MountOwn(memory_.path(), options_.own_tmpfs_bytes);
  }
  if (options_.drives > 0 || options_.remote) {
    durable_ = std::make_unique<TemporaryDirectory>(HOLDFAST_BIN_DIR);
    for (uint32_t drive = 0; drive < options_.drives; ++drive) {
      std::filesystem::create_directory(nvme_dir(drive));
    }
    if (options_.remote) {
      std::filesystem::create_directory(remote_dir());
    }
  }
  if (options_.own_state_bytes > 0) {
    std::filesystem::create_directory(state_dir());
    has_own_state_ = MountOwn(state_dir(), options_.own_state_bytes);
  }
}

Node::~Node() {
  if (child_ != nullptr && ::testing::Test::HasFailure()) {
    std::fprintf(stderr, "--- log of ckptd\n%s---\n", Log().c_str());
  }
  child_.reset();
  if (has_own_tmpfs_) {
    ::umount2(memory_.path().c_str(), MNT_DETACH);
  }
  if (has_own_state_) {
    ::umount2(state_dir().c_str(), MNT_DETACH);
  }
}

size_t Node::drives() const {
  return options_.nvme_dirs.empty() ? options_.drives : options_.nvme_dirs.size();
}

std::string Node::nvme_dir(uint32_t drive) const {
  return options_.nvme_dirs.empty() ? durable_->Path("nvme-" + std::to_string(drive))
                                    : options_.nvme_dirs.at(drive);
}

std::string Node::remote_dir() const {
  return options_.remote ? durable_->Path("remote") : options_.remote_dir;
}

std::string Node::TierSettings() const {
  std::string text;
  for (uint32_t drive = 0; drive < drives(); ++drive) {
    text += (drive == 0 ? "nvme: {" + options_.nvme + "dirs: [" : ", ") + nvme_dir(drive);
  }
  text += text.empty() ? "" : "]}\n";
  const std::string remote = remote_dir();
  return remote.empty() ? text
                        : text + "remote: {" + options_.remote_options + "dir: " + remote + "}\n";
}

std::vector<std::string> Node::Arguments() const {
  std::vector<std::string> arguments = {std::string(HOLDFAST_BIN_DIR) + "/ckptd",
                                        "--config",
                                        config_file(),
                                        "--memory-dir",
                                        memory_dir(),
                                        "--state-dir",
                                        state_dir(),
                                        "--socket",
                                        socket(),
                                        "--admin",
                                        admin_socket()};
  if (!options_.memory_bytes.empty()) {
    arguments.insert(arguments.end(), {"--memory-bytes", options_.memory_bytes});
  }
  return arguments;
}

bool Node::Start(const std::string& sync_point) {
  const std::string config =
      options_.config.find("metrics:") == std::string::npos ? "metrics: {address: \"off\"}\n" : "";
  WriteText(config_file(), config + "log: {level: " + options_.log_level + "}\n" + TierSettings() +
                               options_.config);
  // The daemon says that it is ready as it says it to systemd.
  const std::string notify_path = state_.Path("notify");
  ::unlink(notify_path.c_str());
  const UniqueFd notify(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  notify_path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  if (::bind(notify.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return false;
  }
  Child::Options options;
  options.arguments = Arguments();
  options.environment = {"NOTIFY_SOCKET=" + notify_path, "HOLDFAST_SYNC_POINT=" + sync_point};
  options.error_file = log_file();
  child_ = std::make_unique<Child>(options);
  const auto until = SteadyClock::now() + kPatience;
  while (SteadyClock::now() < until) {
    std::array<pollfd, 2> ready = {pollfd{notify.get(), POLLIN, 0}, pollfd{-1, POLLIN, 0}};
    const UniqueFd ended(static_cast<int>(::syscall(SYS_pidfd_open, child_->pid(), 0)));
    ready[1].fd = ended.get();
    if (::poll(ready.data(), ready.size(), MillisUntil(until)) <= 0) {
      continue;
    }
    std::array<char, 64> text = {};
    if ((ready[0].revents & POLLIN) != 0 &&
        ::recv(notify.get(), text.data(), text.size() - 1, 0) > 0 &&
        std::string(text.data()) == "READY=1") {
      return true;
    }
    if (ready[1].revents != 0) {
      return false;
    }
  }
  return false;
}

void Node::Kill() {
  child_->Signal(SIGKILL);
  child_->Wait();
}

std::unique_ptr<Child> Node::KillAndLeave() {
  child_->Signal(SIGKILL);
  return std::move(child_);
}

std::optional<int> Node::Stop() {
  child_->Signal(SIGTERM);
  return child_->Wait();
}

std::string Node::Log() const {
  return ReadText(log_file());
}

Rank::Rank(const Node& node, const RankOptions& options)
    : child_({.arguments = {std::string(HOLDFAST_BIN_DIR) + "/holdfast_test_rank", node.socket(),
                            options.job, std::to_string(options.rank),
                            std::to_string(options.world_size), std::to_string(options.bytes),
                            options.launch, options.policy},
              .environment = {"HOLDFAST_SYNC_POINT=" + options.sync_point},
              .error_file = "",
              .pipes = true,
              .uid = options.uid}) {}

std::string Rank::Answer() {
  const std::optional<std::string> line = child_.ReadLine();
  if (line.has_value()) {
    return *line;
  }
  return child_.Wait(std::chrono::milliseconds(1000)).has_value() ? "gone" : "timeout";
}

std::string Rank::Do(const std::string& command) {
  Send(command);
  return Answer();
}

void Rank::Kill() {
  child_.Signal(SIGKILL);
  child_.Wait();
}

std::vector<std::string> DoAll(std::vector<std::unique_ptr<Rank>>& ranks,
                               const std::string& command) {
  for (const std::unique_ptr<Rank>& rank : ranks) {
    rank->Send(command);
  }
  std::vector<std::string> answers;
  for (const std::unique_ptr<Rank>& rank : ranks) {
    answers.push_back(rank->Answer());
  }
  return answers;
}

std::vector<std::unique_ptr<Rank>> StartRanks(const Node& node, RankOptions options,
                                              uint32_t world_size) {
  std::vector<std::unique_ptr<Rank>> ranks;
  options.world_size = world_size;
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    options.rank = rank;
    ranks.push_back(std::make_unique<Rank>(node, options));
  }
  return ranks;
}

void EmptyDirectory(const std::string& directory) {
  for (const std::string& name : FilesIn(directory, "")) {
    std::filesystem::remove_all(directory + "/" + name);
  }
}

std::vector<std::string> SyncPoints() {
  std::vector<std::string> points;
  std::ifstream file(std::string(HOLDFAST_SOURCE_DIR) + "/tests/sync_points.txt");
  for (std::string line; std::getline(file, line);) {
    if (!line.empty() && line[0] != '#') {
      points.push_back(line);
    }
  }
  return points;
}

FullDisk::FullDisk(const std::string& directory)
    : path_(directory + "/taken"),
      file_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600)) {
  TakeTheRest();
}

FullDisk::~FullDisk() {
  ::unlink(path_.c_str());
}

void FullDisk::TakeTheRest() {
  const std::vector<char> block(1 << 20, 'x');
  for (size_t piece = block.size(); piece > 0;) {
    const ssize_t wrote = ::pwrite(file_.get(), block.data(), piece, static_cast<off_t>(bytes_));
    if (wrote > 0) {
      bytes_ += static_cast<uint64_t>(wrote);
    } else {
      piece /= 2;
    }
  }
}

std::vector<std::string> FilesIn(const std::string& directory, const std::string& prefix) {
  std::vector<std::string> names;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(directory, ignored)) {
    const std::string name = entry.path().filename();
    if (StartsWith(name, prefix)) {
      names.push_back(name);
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

void WriteText(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

bool StartsWith(const std::string& text, const std::string& prefix) {
  return text.compare(0, prefix.size(), prefix) == 0;
}

std::optional<uint64_t> NumberAfter(const std::string& text, const std::string& key) {
  const size_t at = text.find(key);
  return at == std::string::npos
             ? std::nullopt
             : std::optional<uint64_t>(std::strtoull(text.c_str() + at + key.size(), nullptr, 10));
}

}  // namespace holdfast
