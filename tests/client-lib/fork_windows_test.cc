// Another thread may fork at any moment: in the middle of a connect, between the arrival of a
// descriptor and its use, while a slot is mapped. The child must not have any of it.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/network_flag.h"
#include "client-lib/src/busy_flag.h"
#include "client-lib/src/fork_guard.h"
#include "client-lib/src/socket.h"
#include "tests/base/temporary_directory.h"
#include "tests/client-lib/fake_daemon.h"

namespace {

// Called where a mapping is there and is about to be kept from children.
std::function<void()>* before_dontfork = nullptr;

}  // namespace

// In place of libc's, for this program.
extern "C" int madvise(void* at, size_t bytes, int advice) noexcept {
  if (advice == MADV_DONTFORK && before_dontfork != nullptr) {
    (*before_dontfork)();
  }
  return static_cast<int>(::syscall(SYS_madvise, at, bytes, advice));
}

namespace holdfast {
namespace {

const Milliseconds kLong(60'000);

// Runs `check` in a child; true when it returned true.
template <typename Check>
bool InChild(const Check& check) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    ::_exit(check() ? 0 : 1);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// Open descriptors whose file is called so in /proc.
int OpenFiles(const std::string& name) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // that of the listing itself
    const std::string file = std::filesystem::read_symlink(entry.path(), gone).string();
    count += file.find(name) != std::string::npos ? 1 : 0;
  }
  return count;
}

int MappedFiles(const std::string& name) {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find(name) != std::string::npos ? 1 : 0;
  }
  return count;
}

// Until there are so many; false: there never were.
bool WaitForFiles(const std::string& name, int count) {
  const client::Deadline deadline = client::Deadline::In(kLong);
  while (OpenFiles(name) != count) {
    if (deadline.passed()) {
      return false;
    }
    std::this_thread::yield();
  }
  return true;
}

UniqueFd Memfd(const char* name, size_t bytes) {
  UniqueFd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(::ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  return fd;
}

// A socket at which nobody accepts and whose queue is full: to connect takes for ever.
class BusyListener {
 public:
  BusyListener() {
    struct sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path_.data(), path_.size());
    const auto* const at = reinterpret_cast<const struct sockaddr*>(&address);
    EXPECT_EQ(::bind(listener_.get(), at, sizeof(address)), 0);
    EXPECT_EQ(::listen(listener_.get(), 0), 0);
    do {
      waiting_.emplace_back(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    } while (::connect(waiting_.back().get(), at, sizeof(address)) == 0);
    EXPECT_EQ(errno, EAGAIN);
  }
  const std::string& path() const { return path_; }
  void Close() { listener_.reset(); }

 private:
  const TemporaryDirectory dir_;
  const std::string path_ = dir_.Path("socket");
  UniqueFd listener_{::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  std::vector<UniqueFd> waiting_;
};

TEST(ForkWindows, ASocketThatIsNotConnectedYetIsNotInherited) {
  BusyListener listener;
  const int sockets = OpenFiles("socket:");
  auto connecting = std::async(std::launch::async, [&] {
    return client::ConnectUnix(listener.path(), client::Deadline::In(kLong)).status();
  });
  ASSERT_TRUE(WaitForFiles("socket:", sockets + 1));
  EXPECT_TRUE(InChild([&] { return OpenFiles("socket:") == sockets; }));
  listener.Close();
  EXPECT_EQ(connecting.get().code(), Code::kUnavailable);
}

TEST(ForkWindows, ADescriptorThatHasComeIsNotInherited) {
  const UniqueFd sent = Memfd("passed", 1 << 20);
  FakeDaemon daemon;
  daemon.SetHook([&](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    if (frame.has_begin_save()) {
      // The descriptor with the first half of its frame. The second never comes.
      peer.SendRaw(std::string("\x10\0\0\0", 4), {sent.get()});
    }
    return frame.has_begin_save();
  });
  JobOptions options = daemon.Options();
  options.call_deadline = kLong;
  Result<std::unique_ptr<Job>> job = Job::Open(options);
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  std::vector<uint8_t> w(1 << 20, 1);
  const State state{{{"w", Type::kU8, {w.size()}, w.data()}}, {}};
  auto handle = (*job)->SaveAsync(1, state, {.hold = true});  // which waits for the answer
  ASSERT_TRUE(WaitForFiles("memfd:passed", 2));
  EXPECT_TRUE(InChild([] { return OpenFiles("memfd:passed") == 1; }));
  daemon.Stop();
  EXPECT_FALSE(handle->Wait(Stage::kSealed, kLong).ok());
  handle.reset();
  job = Status(Code::kUnavailable, "closed");
  EXPECT_EQ(OpenFiles("memfd:passed"), 1);
}

// A child that another thread forks while a slot, and the page that says that the network is busy,
// are mapped.
TEST(ForkWindows, AMappingThatIsBeingMadeIsNotInherited) {
  std::atomic<int> forked{0};
  std::atomic<int> inherited{0};
  std::function<void()> fork_now = [&] {
    std::thread([&] {
      ++forked;
      inherited += InChild([] { return MappedFiles("memfd:") == 0; }) ? 0 : 1;
    }).join();
  };
  FakeDaemon daemon;
  Result<std::unique_ptr<Job>> job = Job::Open(daemon.Options());
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  std::vector<uint8_t> w(1 << 20, 1);
  before_dontfork = &fork_now;
  EXPECT_TRUE((*job)->Save(1, {{{"w", Type::kU8, {w.size()}, w.data()}}, {}}).ok());
  EXPECT_GE(forked, 1);
  EXPECT_EQ(inherited, 0);
  const UniqueFd page = Memfd("flag", kNetworkFlagPageBytes);
  ASSERT_EQ(::fcntl(page.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  const int forked_before = forked;
  client::BusyFlag busy;
  busy.Attach(page.get());
  before_dontfork = nullptr;
  EXPECT_GE(forked, forked_before + 1);
  EXPECT_EQ(inherited, 0);
  EXPECT_GE(MappedFiles("memfd:flag"), 1);
}

TEST(ForkClosedFd, IsClosedOnceAndLeavesAnothersNumberAlone) {
  std::optional<client::ForkClosedFd> fd(Memfd("closed", 1));
  const int number = fd->get();
  EXPECT_TRUE(InChild([&] {
    if (::fcntl(number, F_GETFD) != -1 || ::dup2(STDERR_FILENO, number) != number) {
      return false;
    }
    fd.reset();  // what has that number now is the child's
    return ::fcntl(number, F_GETFD) != -1;
  }));
  client::ForkClosedFd moved = *std::move(fd);
  fd.reset();
  EXPECT_NE(::fcntl(number, F_GETFD), -1);
  EXPECT_TRUE(InChild([&] { return OpenFiles("memfd:closed") == 0; }));
  moved = client::ForkClosedFd(UniqueFd());
  EXPECT_EQ(::fcntl(number, F_GETFD), -1);
}

}  // namespace
}  // namespace holdfast
