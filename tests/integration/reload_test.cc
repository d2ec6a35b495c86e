// Settings that are read again by a ckptd that runs (SIGHUP).
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "tests/integration/harness.h"

namespace holdfast {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kPatienceMs = static_cast<int>(std::chrono::milliseconds(kPatience).count());
constexpr char kCommon[] = "metrics: {address: \"off\"}\nnode_name: node-1\n";

// With what the test says of memory; the harness says nothing.
class Reload : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(node_.Start());
    Write("memory: {bytes_max: 64MiB}\n");
    Hup([](const v1::GetStatusReply& s) { return s.daemon().memory_bytes_max() == 64u << 20; });
  }
  void Write(const std::string& yaml) {
    WriteText(node_.config_file(), std::string(kCommon) + yaml);
  }
  // Until the daemon's status says so.
  void Hup(const std::function<bool(const v1::GetStatusReply&)>& so) {
    ASSERT_EQ(::kill(node_.pid(), SIGHUP), 0);
    ASSERT_TRUE(node_.Until(so)) << node_.Log();
  }
  std::vector<std::string> Problems() {
    const auto status = node_.Status();
    return status ? std::vector<std::string>(status->daemon().problems().begin(),
                                             status->daemon().problems().end())
                  : std::vector<std::string>{"no status"};
  }
  static bool HasProblem(const v1::GetStatusReply& status, const std::string& text) {
    return std::any_of(status.daemon().problems().begin(), status.daemon().problems().end(),
                       [&](const std::string& p) { return p.find(text) != std::string::npos; });
  }

  Node node_{{.memory_bytes = "", .config = std::string(kCommon) + "memory: {bytes_max: 32MiB}\n"}};
};

TEST_F(Reload, WhatMayChangeHoldsAtOnceAndTheJobGoesOn) {
  Rank rank(node_, {.job = "a", .bytes = 1 << 20});
  ASSERT_TRUE(StartsWith(rank.Do("open"), "ok"));
  rank.Do("restore");
  ASSERT_EQ(rank.Do("save 1"), "ok sealed");
  ASSERT_EQ(rank.Do("committed"), "ok committed");
  Write(
      "memory: {bytes_max: 48MiB}\npolicy: {nvme: {every_steps: 7}}\nlog: {level: debug}\n"
      "save: {commit_deadline_ms: 3min}\n");
  Hup([](const v1::GetStatusReply& s) {
    return s.daemon().memory_bytes_max() == 48u << 20 && s.jobs_size() == 1 &&
           s.jobs(0).policy().nvme().every_steps() == 7;
  });
  EXPECT_THAT(node_.Log(), HasSubstr("the settings were read again: changed: "));
  EXPECT_THAT(node_.Log(), HasSubstr("save.commit_deadline_ms"));
  EXPECT_THAT(Problems(), Not(Contains(HasSubstr("settings"))));
  // The same process, on the same connection, with what it had.
  ASSERT_EQ(rank.Do("save 2"), "ok sealed");
  ASSERT_EQ(rank.Do("committed"), "ok committed");
  EXPECT_EQ(node_.List("a").size(), 2u);
  EXPECT_EQ(node_.Stop(), 0);
}

TEST_F(Reload, TheLogGoesByItsNewLevel) {
  const auto budget = [](uint64_t mib) {
    return
        [mib](const v1::GetStatusReply& s) { return s.daemon().memory_bytes_max() == mib << 20; };
  };
  Write("memory: {bytes_max: 50MiB}\nlog: {level: error}\n");
  Hup(budget(50));
  Write("memory: {bytes_max: 51MiB}\nlog: {level: error}\nsession: {deadline_max_ms: 2h}\n");
  Hup(budget(51));
  Write("memory: {bytes_max: 52MiB}\nlog: {level: info}\nsave: {commit_deadline_ms: 2min}\n");
  Hup(budget(52));
  ASSERT_EQ(node_.Stop(), 0);  // what was logged is out
  EXPECT_THAT(node_.Log(), Not(HasSubstr("memory.bytes_max, session.deadline_max_ms")));
  EXPECT_THAT(node_.Log(), HasSubstr("save.commit_deadline_ms"));
}

TEST_F(Reload, ClientsAreCountedAgainstTheNewLimit) {
  Rank first(node_, {.job = "a"});
  ASSERT_TRUE(StartsWith(first.Do("open"), "ok"));
  Write("memory: {bytes_max: 50MiB}\nsocket: {connections_max: 1}\n");
  Hup([](const v1::GetStatusReply& s) { return s.daemon().memory_bytes_max() == 50u << 20; });
  const auto second = RawClient::Connect(node_.socket());
  ASSERT_NE(second, nullptr);
  const auto refused = second->Receive();
  ASSERT_TRUE(refused.has_value());
  EXPECT_THAT(refused->frame.failure().message(), HasSubstr("(socket.connections_max)"));
  first.Do("restore");
  EXPECT_EQ(first.Do("save 1"), "ok sealed") << "who is there stays";
  Write("memory: {bytes_max: 51MiB}\nsocket: {connections_max: 2}\n");
  Hup([](const v1::GetStatusReply& s) { return s.daemon().memory_bytes_max() == 51u << 20; });
  EXPECT_NE(RawClient::Greet(node_.socket()), nullptr);
}

TEST_F(Reload, AWrongFileChangesNothingUntilAGoodOneComes) {
  Write("memory: {bytes_max: 16MiB}\nnvme: {depth: 100000}\n");
  Hup([](const v1::GetStatusReply& s) {
    return HasProblem(s, "nvme.depth: 100000 is not within");
  });
  EXPECT_EQ(node_.Status()->daemon().memory_bytes_max(), 64u << 20);
  EXPECT_THAT(node_.Log(), HasSubstr("settings refused, nothing changes: nvme.depth: 100000"));
  Write("memory: {byte_max: 16MiB}\n");
  Hup([](const v1::GetStatusReply& s) {
    return HasProblem(s, "memory.byte_max: unknown setting");
  });
  EXPECT_THAT(Problems(), Not(Contains(HasSubstr("nvme.depth")))) << "only the newest";
  // What could be parsed, and names what is not there.
  Write("events: {command: [/not/there]}\n");
  Hup([](const v1::GetStatusReply& s) {
    return HasProblem(s, "events.command: run '/not/there'");
  });
  EXPECT_EQ(node_.Status()->daemon().memory_bytes_max(), 64u << 20);
  Write("memory: {bytes_max: 16MiB}\n");
  Hup([](const v1::GetStatusReply& s) { return s.daemon().memory_bytes_max() == 16u << 20; });
  EXPECT_THAT(Problems(), Not(Contains(HasSubstr("settings"))));
}

TEST_F(Reload, WhatNeedsARestartIsNamedUntilItIsAsItRuns) {
  Write("memory: {bytes_max: 40MiB, slots_per_rank: 4}\nremote: {writers: 9}\n");
  Hup([](const v1::GetStatusReply& s) {
    return HasProblem(s,
                      "settings: memory.slots_per_rank, remote.writers differ from what runs: "
                      "restart ckptd");
  });
  EXPECT_EQ(node_.Status()->daemon().memory_bytes_max(), 40u << 20) << "the rest holds";
  // Read once more they differ still.
  Write("memory: {bytes_max: 41MiB, slots_per_rank: 4}\n");
  Hup([](const v1::GetStatusReply& s) { return s.daemon().memory_bytes_max() == 41u << 20; });
  EXPECT_THAT(Problems(), Contains("settings: memory.slots_per_rank differs from what runs: "
                                   "restart ckptd"));
  Write("memory: {bytes_max: 42MiB}\n");
  Hup([](const v1::GetStatusReply& s) { return s.daemon().memory_bytes_max() == 42u << 20; });
  EXPECT_THAT(Problems(), Not(Contains(HasSubstr("settings"))));
}

TEST_F(Reload, ABudgetBelowWhatIsInUseSaysSo) {
  Rank rank(node_, {.job = "a", .bytes = 1 << 20});
  ASSERT_TRUE(StartsWith(rank.Do("open"), "ok"));
  rank.Do("restore");
  ASSERT_EQ(rank.Do("save 1"), "ok sealed");
  ASSERT_EQ(rank.Do("save 2"), "ok sealed");
  ASSERT_GE(node_.Status()->daemon().memory_bytes_used(), 4u << 20);
  Write("memory: {bytes_max: 2MiB}\n");
  Hup([](const v1::GetStatusReply& s) {
    return HasProblem(s, "memory.bytes_max is 2 MiB, and ") && HasProblem(s, "are in use");
  });
  ASSERT_EQ(rank.Do("save 3"), "ok sealed") << "into a slot that it has";
}

TEST_F(Reload, ACommandForEventsIsHeardFromThenOn) {
  TemporaryDirectory dir;
  const std::string told = dir.Path("told");
  ASSERT_EQ(::mkfifo(told.c_str(), 0600), 0);
  const UniqueFd pipe(::open(told.c_str(), O_RDWR | O_CLOEXEC));
  Write("events: {command: [/usr/bin/tee, " + told + "], least: info}\n");
  Hup([](const v1::GetStatusReply&) { return true; });
  std::string heard;
  std::array<char, 4096> piece = {};
  while (heard.find("settings_read") == std::string::npos) {
    pollfd ready = {pipe.get(), POLLIN, 0};
    ASSERT_EQ(::poll(&ready, 1, kPatienceMs), 1);
    const ssize_t bytes = ::read(pipe.get(), piece.data(), piece.size());
    ASSERT_GT(bytes, 0);
    heard.append(piece.data(), static_cast<size_t>(bytes));
  }
  EXPECT_THAT(heard, HasSubstr("events.command"));
  EXPECT_THAT(heard, Not(HasSubstr("daemon_started"))) << "what was before is not told";
}

// The kernel's own SIGHUP: the terminal is gone, and ckptd goes with it, as it always did.
TEST(ReloadTerminal, TheEndOfItsTerminalStopsIt) {
  TemporaryDirectory memory("/dev/shm");
  TemporaryDirectory dir;
  UniqueFd terminal(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  ASSERT_TRUE(terminal.valid());
  ASSERT_EQ(::grantpt(terminal.get()), 0);
  ASSERT_EQ(::unlockpt(terminal.get()), 0);
  const std::string name = ::ptsname(terminal.get());
  WriteText(dir.Path("ckptd.yaml"), kCommon);
  std::vector<std::string> arguments = {std::string(HOLDFAST_BIN_DIR) + "/ckptd",
                                        "--config",
                                        dir.Path("ckptd.yaml"),
                                        "--memory-dir",
                                        memory.Path("m"),
                                        "--state-dir",
                                        dir.Path("state"),
                                        "--socket",
                                        dir.Path("s"),
                                        "--admin",
                                        dir.Path("a"),
                                        "--memory-bytes",
                                        "16MiB"};
  std::vector<char*> argv;
  for (std::string& one : arguments) {
    argv.push_back(one.data());
  }
  argv.push_back(nullptr);
  const pid_t pid = ::fork();
  ASSERT_GE(pid, 0);
  if (pid == 0) {
    ::setsid();
    const int slave = ::open(name.c_str(), O_RDWR);
    ::ioctl(slave, TIOCSCTTY, 0);
    ::dup2(slave, STDERR_FILENO);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  // Whatever happens, it does not stay.
  struct Ending {
    pid_t pid;
    ~Ending() {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  };
  const Ending ending{pid};
  std::string log;
  std::array<char, 4096> piece = {};
  while (log.find("ready version=") == std::string::npos) {
    pollfd ready = {terminal.get(), POLLIN, 0};
    ASSERT_EQ(::poll(&ready, 1, kPatienceMs), 1) << log;
    const ssize_t bytes = ::read(terminal.get(), piece.data(), piece.size());
    ASSERT_GT(bytes, 0) << log;
    log.append(piece.data(), static_cast<size_t>(bytes));
  }
  terminal = UniqueFd();
  const UniqueFd ended(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  pollfd over = {ended.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&over, 1, kPatienceMs), 1) << "it did not stop";
  siginfo_t how = {};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(pid), &how, WEXITED | WNOWAIT), 0);
  EXPECT_EQ(how.si_code, CLD_EXITED) << "by itself";
  EXPECT_EQ(how.si_status, 0);
}

}  // namespace
}  // namespace holdfast
