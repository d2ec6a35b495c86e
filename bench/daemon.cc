#include "bench/daemon.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

namespace holdfast::bench {
namespace {

constexpr int kReadyDeadlineMs = 30'000;

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "holdfast_bench: %s: %s\n", what.c_str(), std::strerror(errno));
  std::exit(1);
}

std::string MakeDirectory(std::string pattern) {
  if (mkdtemp(pattern.data()) == nullptr) {
    Die("mkdtemp " + pattern);
  }
  return pattern;
}

int BindNotifySocket(const std::string& path) {
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::snprintf(address.sun_path, sizeof address.sun_path, "%s", path.c_str());
  if (fd < 0 || bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    Die("bind " + path);
  }
  return fd;
}

}  // namespace

Daemon::Daemon(uint64_t memory_bytes, int slots_per_rank)
    : memory_dir_(MakeDirectory("/dev/shm/holdfast-bench-XXXXXX")),
      work_dir_(MakeDirectory("/tmp/holdfast-bench-XXXXXX")),
      socket_(work_dir_ + "/ckptd.sock") {
  const std::string config = work_dir_ + "/ckptd.yaml";
  std::ofstream(config) << "state_dir: " << work_dir_ << "/state\n"
                        << "socket: {path: " << socket_ << "}\n"
                        << "admin: {path: " << work_dir_ << "/admin.sock}\n"
                        << "metrics: {address: 'off'}\n"
                        << "memory: {dir: " << memory_dir_ << ", bytes_max: " << memory_bytes
                        << ", slots_per_rank: " << slots_per_rank << "}\n"
                        << "log: {level: warning}\n";
  const std::string notify = work_dir_ + "/notify.sock";
  const int notify_fd = BindNotifySocket(notify);
  const std::string program =
      std::filesystem::read_symlink("/proc/self/exe").parent_path() / "ckptd";
  pid_ = fork();
  if (pid_ == 0) {
    setenv("NOTIFY_SOCKET", notify.c_str(), 1);
    execl(program.c_str(), program.c_str(), "--config", config.c_str(), nullptr);
    Die("exec " + program);
  }
  pollfd waiting{notify_fd, POLLIN, 0};
  if (poll(&waiting, 1, kReadyDeadlineMs) != 1) {
    std::fprintf(stderr, "holdfast_bench: ckptd was not ready within %d s\n",
                 kReadyDeadlineMs / 1000);
    std::exit(1);
  }
  close(notify_fd);
}

Daemon::~Daemon() {
  kill(pid_, SIGTERM);
  waitpid(pid_, nullptr, 0);
  std::error_code ignored;
  std::filesystem::remove_all(memory_dir_, ignored);
  std::filesystem::remove_all(work_dir_, ignored);
}

}  // namespace holdfast::bench
