// The disk under state_dir is full, cannot be written, or hangs: jobs start, save and restore from
// memory all the same, people are told once, and when the disk is well again so is the catalog.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/futex.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <sstream>
#include <thread>

#include "tests/integration/harness.h"

namespace holdfast {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr uint64_t kStateBytes = 8 << 20;

class StateDirTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!node_.has_own_state()) {
      GTEST_SKIP() << "needs to mount a tmpfs";
    }
  }

  std::vector<std::string> Problems() {
    const auto status = node_.Status();
    EXPECT_TRUE(status.has_value());
    return status.has_value() ? std::vector<std::string>(status->daemon().problems().begin(),
                                                         status->daemon().problems().end())
                              : std::vector<std::string>();
  }
  bool UntilThereAre(int problems) {
    return node_.Until([problems](const v1::GetStatusReply& status) {
      return status.daemon().problems_size() == problems;
    });
  }
  // A new process of the job, which restores `step` (none: there is nothing) and saves the next.
  void StartAgain(const std::string& job, uint64_t step) {
    Rank rank(node_, {.job = job});
    ASSERT_THAT(rank.Do("open"), HasSubstr("ok attempt="));
    ASSERT_THAT(rank.Do("restore"),
                HasSubstr(step == 0 ? "NOTHING_TO_RESTORE" : "step=" + std::to_string(step)));
    ASSERT_EQ(rank.Do("save " + std::to_string(step + 1)), "ok sealed");
    ASSERT_EQ(rank.Do("committed"), "ok committed");
  }
  // What the catalog alone knows of the job after a clean stop.
  void ExpectTheCatalogKnows(const std::string& job) {
    EXPECT_EQ(node_.Stop(), 0);
    for (const std::string& name : FilesIn(node_.memory_dir(), "")) {
      std::filesystem::remove(node_.memory_dir() + "/" + name);
    }
    ASSERT_TRUE(node_.Start());
    EXPECT_TRUE(node_.Job(job).has_value());
  }
  size_t LogLinesWith(const std::string& text) {
    const std::string log = node_.Log();
    size_t lines = 0;
    for (size_t at = log.find(text); at != std::string::npos; at = log.find(text, at + 1)) {
      ++lines;
    }
    return lines;
  }

  Node node_{{.own_state_bytes = kStateBytes}};
};

TEST_F(StateDirTest, WhenItFillsUpJobsGoOnAndTheCatalogHeals) {
  ASSERT_TRUE(node_.Start());
  StartAgain("old", 0);
  std::optional<FullDisk> full(node_.state_dir());
  Rank rank(node_, {.job = "running"});
  ASSERT_EQ(rank.Do("open"), "ok attempt=1");
  ASSERT_THAT(rank.Do("restore"), HasSubstr("NOTHING_TO_RESTORE"));
  uint64_t step = 0;
  // The last pages of its files take some writes still.
  while (Problems().empty() && step < 5000) {
    ASSERT_EQ(rank.Do("save " + std::to_string(++step)), "ok sealed");
    ASSERT_EQ(rank.Do("committed"), "ok committed");
    full->TakeTheRest();
  }
  EXPECT_THAT(Problems(), ::testing::ElementsAre(HasSubstr("No space left on device")));
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(rank.Do("save " + std::to_string(++step)), "ok sealed");
    ASSERT_EQ(rank.Do("committed"), "ok committed");
  }
  StartAgain("old", 1);
  StartAgain("new", 0);
  EXPECT_EQ(Problems().size(), 1u);
  EXPECT_LE(LogLinesWith("jobs go on without the catalog"), 2u);
  // It can be started over a full disk, again and again.
  for (uint64_t i = 0; i < 3; ++i) {
    full->TakeTheRest();
    if (i == 1) {
      EXPECT_EQ(node_.Stop(), 0) << "what the catalog lacks, memory.dir has";
    } else {
      node_.Kill();
    }
    ASSERT_TRUE(node_.Start());
    StartAgain("old", 2 + i);
    const Node::Verified verified = node_.Verify("old");
    EXPECT_TRUE(verified.ok) << verified.error;
    EXPECT_TRUE(verified.bad.empty());
  }
  full.reset();
  EXPECT_TRUE(UntilThereAre(0));
  EXPECT_TRUE(FilesIn(node_.state_dir() + "/catalog", "LOG").empty());
  ExpectTheCatalogKnows("new");
}

TEST_F(StateDirTest, FullFromTheFirstStartItIsMadeWhenThereIsRoom) {
  std::optional<FullDisk> full(node_.state_dir());
  ASSERT_TRUE(node_.Start());
  StartAgain("job", 0);
  StartAgain("job", 1);
  EXPECT_EQ(Problems().size(), 1u);
  node_.Kill();
  ASSERT_TRUE(node_.Start());
  StartAgain("job", 2);
  full.reset();
  EXPECT_TRUE(UntilThereAre(0));
  EXPECT_THAT(node_.Log(), HasSubstr("the catalog is written again"));
  ExpectTheCatalogKnows("job");
}

TEST_F(StateDirTest, ReadOnlyItIsAProblemAndNoMore) {
  ASSERT_TRUE(node_.Start());
  StartAgain("job", 0);
  EXPECT_EQ(node_.Stop(), 0);
  const auto remount = [&](unsigned long flags) {
    return ::mount("none", node_.state_dir().c_str(), nullptr, MS_REMOUNT | flags, nullptr) == 0;
  };
  ASSERT_TRUE(remount(MS_RDONLY));
  ASSERT_TRUE(node_.Start());
  EXPECT_THAT(Problems(), ::testing::ElementsAre(HasSubstr("Read-only file system")));
  StartAgain("job", 1);
  StartAgain("job", 2);
  // Nobody else works there, even so.
  TemporaryDirectory memory("/dev/shm");
  TemporaryDirectory scratch;
  std::vector<std::string> arguments = node_.Arguments();
  arguments[4] = memory.Path("m");
  arguments[8] = scratch.Path("s");
  arguments[10] = scratch.Path("a");
  Child second({.arguments = arguments, .error_file = scratch.Path("log")});
  EXPECT_EQ(second.Wait(), 1);
  EXPECT_THAT(ReadText(scratch.Path("log")), HasSubstr("held by another process"));
  ASSERT_TRUE(remount(0));
  EXPECT_TRUE(UntilThereAre(0));
  ExpectTheCatalogKnows("job");
}

TEST_F(StateDirTest, OneThatCannotBeMadeIsAProblemAndNoMore) {
  ::umount2(node_.state_dir().c_str(), MNT_DETACH);
  std::filesystem::remove(node_.state_dir());
  WriteText(node_.state_dir(), "a file");
  ASSERT_TRUE(node_.Start());
  EXPECT_THAT(Problems(), ::testing::ElementsAre(HasSubstr(node_.state_dir())));
  StartAgain("job", 0);
  node_.Kill();
  ASSERT_TRUE(node_.Start());
  StartAgain("job", 1);
  EXPECT_EQ(node_.Stop(), 0) << "what the catalog lacks, memory.dir has";
}

TEST_F(StateDirTest, WhatIsOnTheWayToTheCatalogIsWrittenByACleanStop) {
  ASSERT_TRUE(node_.Start());
  StartAgain("job", 0);
  ExpectTheCatalogKnows("job");
}

// A thread of a process, stopped where it waits for work: what a disk that hangs makes of it.
class StoppedThread {
 public:
  StoppedThread(pid_t process, const std::string& name) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    tasks_ = "/proc/" + std::to_string(process) + "/task/";
    while (thread_ == 0 && std::chrono::steady_clock::now() < until) {
      for (const std::string& task : FilesIn(tasks_, "")) {
        if (ReadText(tasks_ + task + "/comm") == name + "\n") {
          thread_ = std::stoi(task);
        }
      }
    }
    EXPECT_GT(thread_, 0) << "no thread '" << name << "'";
    stopped_ = thread_ > 0 && ::ptrace(PTRACE_SEIZE, thread_, nullptr, nullptr) == 0 && Interrupt();
    // Elsewhere it may hold a lock that others want, too: it goes on until it waits.
    while (stopped_ && !Waits() && std::chrono::steady_clock::now() < until) {
      stopped_ = ::ptrace(PTRACE_CONT, thread_, nullptr, nullptr) == 0;
      std::this_thread::yield();
      stopped_ = stopped_ && Interrupt();
    }
    EXPECT_TRUE(!stopped_ || Waits()) << "it never waits";
  }
  ~StoppedThread() {
    if (stopped_) {
      ::ptrace(PTRACE_DETACH, thread_, nullptr, nullptr);
    }
  }
  StoppedThread(const StoppedThread&) = delete;
  StoppedThread& operator=(const StoppedThread&) = delete;
  bool stopped() const { return stopped_; }
  // Its process has ended meanwhile: lets go of what is left of it.
  void Reap() { ::waitpid(thread_, nullptr, __WALL | WNOHANG); }

 private:
  bool Interrupt() {
    return ::ptrace(PTRACE_INTERRUPT, thread_, nullptr, nullptr) == 0 &&
           ::waitpid(thread_, nullptr, __WALL) == thread_;
  }
  bool Waits() const {
    std::istringstream call(ReadText(tasks_ + std::to_string(thread_) + "/syscall"));
    long number = -1;
    unsigned long address = 0;
    unsigned long operation = 0;
    call >> number >> std::hex >> address >> operation;
    const unsigned long wait = operation & FUTEX_CMD_MASK;
    return call && number == SYS_futex && (wait == FUTEX_WAIT || wait == FUTEX_WAIT_BITSET);
  }

  std::string tasks_;
  pid_t thread_ = 0;
  bool stopped_ = false;
};

TEST_F(StateDirTest, WhileItHangsJobsStartSaveRestoreAndAreRolledBack) {
  ASSERT_TRUE(node_.Start());
  StartAgain("job", 0);
  std::optional<StoppedThread> hang(std::in_place, node_.pid(), "catalog");
  if (!hang->stopped()) {
    GTEST_SKIP() << "needs to trace the daemon";
  }
  StartAgain("job", 1);
  StartAgain("another", 0);
  v1::SetRestorePointRequest request;
  request.set_job("job");
  request.set_step(1);
  EXPECT_EQ(node_.SetRestorePoint(request), "");
  {
    Rank rank(node_, {.job = "job"});
    ASSERT_THAT(rank.Do("open"), HasSubstr("ok attempt="));
    EXPECT_THAT(rank.Do("restore"), HasSubstr("step=1"));
    EXPECT_TRUE(UntilThereAre(1));
    EXPECT_THAT(Problems(), Each(HasSubstr("hangs")));
    EXPECT_EQ(rank.Do("save 7"), "ok sealed");
  }
  EXPECT_THAT(node_.Remove("another"), HasSubstr("did not answer within")) << "and does not hang";
  hang.reset();
  EXPECT_TRUE(UntilThereAre(0));
  EXPECT_EQ(node_.Remove("another"), "");
  ExpectTheCatalogKnows("job");
  EXPECT_FALSE(node_.Job("another").has_value());
}

// That a step is whole in a tier waits for the catalog (the state that says so), but not for long.
TEST_F(StateDirTest, WhileItHangsAStepThatIsInATierIsToldAllTheSame) {
  Node node({.config = "policy: {nvme: {every_steps: 1}}\n",
             .own_state_bytes = kStateBytes,
             .drives = 1});
  ASSERT_TRUE(node.Start());
  Rank rank(node, {.job = "job"});
  ASSERT_THAT(rank.Do("open"), HasSubstr("ok attempt="));
  ASSERT_THAT(rank.Do("restore"), HasSubstr("NOTHING_TO_RESTORE"));
  std::optional<StoppedThread> hang(std::in_place, node.pid(), "catalog");
  if (!hang->stopped()) {
    GTEST_SKIP() << "needs to trace the daemon";
  }
  for (int step = 1; step <= 3; ++step) {
    ASSERT_EQ(rank.Do("save " + std::to_string(step)), "ok sealed");
    EXPECT_EQ(rank.Do("tier nvme"), "ok nvme");
  }
}

TEST_F(StateDirTest, WhileItHangsAStopEndsByItsDeadline) {
  ASSERT_TRUE(node_.Start());
  StoppedThread hang(node_.pid(), "catalog");
  if (!hang.stopped()) {
    GTEST_SKIP() << "needs to trace the daemon";
  }
  StartAgain("job", 0);
  ::kill(node_.pid(), SIGTERM);
  std::optional<int> code;
  for (const auto until = std::chrono::steady_clock::now() + kPatience;
       !code.has_value() && std::chrono::steady_clock::now() < until;) {
    hang.Reap();
    code = node_.WaitExit(std::chrono::milliseconds(20));
  }
  EXPECT_EQ(code, 1);
  EXPECT_THAT(node_.Log(), HasSubstr("the last write to the catalog did not end within"));
  EXPECT_FALSE(FilesIn(node_.memory_dir(), "job-").empty());
}

TEST(MemoryDir, FilledUpBySomebodyElseItTakesNotesRecordsAndStatesStill) {
  Node node({.memory_bytes = "32MiB", .own_tmpfs_bytes = 64 << 20});
  if (!node.has_own_tmpfs()) {
    GTEST_SKIP() << "needs to mount a tmpfs";
  }
  ASSERT_TRUE(node.Start());
  auto rank = std::make_unique<Rank>(node, RankOptions{});
  ASSERT_EQ(rank->Do("open"), "ok attempt=1");
  ASSERT_THAT(rank->Do("restore"), HasSubstr("NOTHING_TO_RESTORE"));
  ASSERT_THAT(rank->Do("reserve"), HasSubstr("ok ready="));
  std::optional<FullDisk> full(std::in_place, node.memory_dir());
  uint64_t step = 0;
  const auto save = [&] {
    ASSERT_EQ(rank->Do("save " + std::to_string(++step)), "ok sealed");
    ASSERT_EQ(rank->Do("committed"), "ok committed");
  };
  for (int i = 0; i < 10; ++i) {
    save();
  }
  rank = std::make_unique<Rank>(node, RankOptions{});
  ASSERT_EQ(rank->Do("open"), "ok attempt=2");
  ASSERT_THAT(rank->Do("restore"), HasSubstr("step=10"));
  save();
  node.Kill();
  ASSERT_TRUE(node.Start());
  full.reset();
  save();
  rank.reset();
  EXPECT_EQ(std::filesystem::file_size(node.memory_dir() + "/reserve"), 1u << 20);
}

TEST(MemoryDir, WhenNothingFitsThereTheCatalogTakesTheStates) {
  Node node({.memory_bytes = "32MiB", .own_tmpfs_bytes = 64 << 20});
  if (!node.has_own_tmpfs()) {
    GTEST_SKIP() << "needs to mount a tmpfs";
  }
  ASSERT_TRUE(node.Start());
  FullDisk full(node.memory_dir());
  {
    std::filesystem::resize_file(node.memory_dir() + "/reserve", 0);
    full.TakeTheRest();
    Rank rank(node, {});
    EXPECT_EQ(rank.Do("open"), "ok attempt=1");
    EXPECT_THAT(rank.Do("restore"), HasSubstr("NOTHING_TO_RESTORE"));
  }
  node.Kill();
  ASSERT_TRUE(node.Start());
  EXPECT_TRUE(node.Job("job").has_value());
}

}  // namespace
}  // namespace holdfast
