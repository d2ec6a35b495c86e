#include "base/fault_guard.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <filesystem>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "base/env.h"
#include "base/unique_fd.h"
#include "tests/base/temporary_directory.h"

namespace holdfast {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kBytes = 16 * kPage;

// A file on tmpfs, mapped, that the test cuts short.
class FaultGuardTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto file = Env::System()->Open(dir_.Path("slot"), OpenMode::kCreateExclusive);
    ASSERT_TRUE(file.ok()) << file.status();
    file_ = *std::move(file);
    ASSERT_TRUE(file_->Allocate(0, kBytes).ok());
    mapping_ = *Env::System()->Map(*file_, 0, kBytes, true);
    // Nameless from here on: a death test's child runs SetUp again and never gets to clean up.
    std::filesystem::remove_all(dir_.path());
    for (size_t i = 0; i < kBytes; ++i) {
      data()[i] = 0x5a;
    }
  }
  void CutTo(size_t bytes) { ASSERT_TRUE(file_->Truncate(bytes).ok()); }
  volatile uint8_t* data() { return reinterpret_cast<volatile uint8_t*>(mapping_->data()); }

  const TemporaryDirectory dir_{"/dev/shm"};
  std::unique_ptr<File> file_;
  std::unique_ptr<Mapping> mapping_;
};

TEST_F(FaultGuardTest, NothingHappensToAWholeFile) {
  const FaultGuard guard(mapping_->data(), kBytes);
  ASSERT_TRUE(guard.ok());
  EXPECT_EQ(data()[kBytes - 1], 0x5a);
  EXPECT_FALSE(guard.faulted());
}

TEST_F(FaultGuardTest, ReadingATruncatedFileGivesZerosAndTheMark) {
  const FaultGuard guard(mapping_->data(), kBytes);
  CutTo(4 * kPage);
  EXPECT_EQ(data()[4 * kPage - 1], 0x5a);
  EXPECT_FALSE(guard.faulted());
  EXPECT_EQ(data()[9 * kPage + 17], 0);
  EXPECT_TRUE(guard.faulted());
  EXPECT_EQ(data()[kBytes - 1], 0);     // the rest of the range does not fault again
  EXPECT_EQ(data()[4 * kPage + 5], 0);  // before the first fault it does, and survives too
  EXPECT_EQ(data()[4 * kPage - 1], 0x5a);
}

TEST_F(FaultGuardTest, WritingIntoATruncatedFileDoesNotReachIt) {
  const FaultGuard guard(mapping_->data(), kBytes);
  CutTo(kPage);
  for (size_t i = 0; i < kBytes; ++i) {
    data()[i] = 0x77;
  }
  EXPECT_TRUE(guard.faulted());
  EXPECT_EQ(file_->Info()->bytes, kPage);
}

TEST_F(FaultGuardTest, AnEmptyFileFaultsAtItsFirstByte) {
  const FaultGuard guard(mapping_->data(), kBytes);
  CutTo(0);
  EXPECT_EQ(data()[0], 0);
  EXPECT_TRUE(guard.faulted());
}

TEST_F(FaultGuardTest, FaultsInOtherThreadsAreSurvivedToo) {
  const FaultGuard guard(mapping_->data(), kBytes);
  CutTo(0);
  std::vector<std::thread> threads;
  std::atomic<int> zeros{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (size_t i = 0; i < kBytes; i += kPage) {
        zeros += data()[i] == 0 ? 1 : 0;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(zeros.load(), 4 * 16);
  EXPECT_TRUE(guard.faulted());
}

TEST_F(FaultGuardTest, EveryGuardWhosePagesWereReplacedIsTold) {
  const FaultGuard whole(mapping_->data(), kBytes);
  const FaultGuard tail(mapping_->data() + 10 * kPage, 2 * kPage);
  const FaultGuard head(mapping_->data(), 2 * kPage);
  CutTo(4 * kPage);
  EXPECT_EQ(data()[5 * kPage], 0);
  EXPECT_TRUE(whole.faulted());
  EXPECT_TRUE(tail.faulted());
  EXPECT_FALSE(head.faulted());
}

TEST_F(FaultGuardTest, ANewGuardStartsUnmarked) {
  {
    const FaultGuard guard(mapping_->data(), kBytes);
    CutTo(0);
    EXPECT_EQ(data()[0], 0);
    EXPECT_TRUE(guard.faulted());
  }
  std::vector<uint8_t> other(100);
  const FaultGuard guard(other.data(), other.size());
  EXPECT_FALSE(guard.faulted());
}

TEST_F(FaultGuardTest, MemoryNextToTheRangeIsLeftAlone) {
  const FaultGuard guard(mapping_->data() + 4 * kPage, 4 * kPage);
  CutTo(5 * kPage);
  EXPECT_EQ(data()[6 * kPage], 0);
  EXPECT_TRUE(guard.faulted());
  ASSERT_TRUE(file_->Truncate(kBytes).ok());
  data()[12 * kPage] = 0x33;  // still the file's
  std::byte byte{};
  ASSERT_TRUE(file_->ReadAt(12 * kPage, {&byte, 1}).ok());
  EXPECT_EQ(byte, std::byte{0x33});
}

TEST_F(FaultGuardTest, RacingGuardsAndFaults) {
  // Guards come and go in one thread while another keeps faulting in its own range.
  std::atomic<bool> done{false};
  std::thread churn([&done] {
    std::vector<uint8_t> bytes(64);
    while (!done.load()) {
      const FaultGuard a(bytes.data(), 32);
      const FaultGuard b(bytes.data() + 32, 32);
      EXPECT_FALSE(a.faulted() || b.faulted());
    }
  });
  CutTo(0);
  for (int i = 0; i < 2000; ++i) {
    void* const fresh = ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, file_->fd(), 0);
    ASSERT_NE(fresh, MAP_FAILED);
    {
      const FaultGuard guard(fresh, kPage);
      EXPECT_EQ(*static_cast<volatile uint8_t*>(fresh), 0);
      EXPECT_TRUE(guard.faulted());
    }
    ::munmap(fresh, kPage);
  }
  done = true;
  churn.join();
}

TEST(FaultGuardTableTest, SaysWhenItIsFullAndRecovers) {
  uint8_t byte = 0;
  {
    std::vector<std::unique_ptr<FaultGuard>> guards;
    for (int i = 0; i < kFaultGuardsMax; ++i) {
      guards.push_back(std::make_unique<FaultGuard>(&byte, 1));
      ASSERT_TRUE(guards.back()->ok()) << i;
    }
    const FaultGuard one_more(&byte, 1);
    EXPECT_FALSE(one_more.ok());
    EXPECT_FALSE(one_more.faulted());
  }
  const FaultGuard guard(&byte, 1);
  EXPECT_TRUE(guard.ok());
}

TEST(FaultGuardTableTest, ARangeThatWrapsAroundIsRefused) {
  uint8_t byte = 0;
  const FaultGuard guard(&byte, SIZE_MAX);
  EXPECT_FALSE(guard.ok());
}

// The handler is installed once a process, so what it passes on is tested in children of this
// process that run one scenario each; the death test starts them afresh.
class PassOnDeathTest : public FaultGuardTest {
 protected:
  PassOnDeathTest() { ::testing::FLAGS_gtest_death_test_style = "threadsafe"; }

  void TouchUnguarded() {
    std::vector<uint8_t> other(1);
    const FaultGuard guard(other.data(),
                           other.size());  // installs the handler, guards something else
    CutTo(0);
    const uint8_t value = data()[0];
    ::_exit(value == 0 ? 10 : 11);
  }
};

void ExitWith42(int) {
  ::_exit(42);
}
void ExitWith43(int, siginfo_t* info, void*) {
  ::_exit(info->si_addr != nullptr ? 43 : 44);
}

TEST_F(PassOnDeathTest, WithNoHandlerTheProcessDiesOfSigbus) {
  EXPECT_EXIT(
      {
        ::signal(SIGBUS, SIG_DFL);
        TouchUnguarded();
      },
      ::testing::KilledBySignal(SIGBUS), "");
}

TEST_F(PassOnDeathTest, IgnoringDoesNotHelpAgainstATrueFault) {
  EXPECT_EXIT(
      {
        ::signal(SIGBUS, SIG_IGN);
        TouchUnguarded();
      },
      ::testing::KilledBySignal(SIGBUS), "");
}

TEST_F(PassOnDeathTest, TheHandlerThatWasThereIsCalled) {
  EXPECT_EXIT(
      {
        ::signal(SIGBUS, ExitWith42);
        TouchUnguarded();
      },
      ::testing::ExitedWithCode(42), "");
}

TEST_F(PassOnDeathTest, TheHandlerThatWasThereIsToldTheAddress) {
  EXPECT_EXIT(
      {
        struct sigaction action = {};
        action.sa_sigaction = ExitWith43;
        action.sa_flags = SA_SIGINFO;
        ::sigaction(SIGBUS, &action, nullptr);
        TouchUnguarded();
      },
      ::testing::ExitedWithCode(43), "");
}

TEST_F(PassOnDeathTest, ASignalThatWasSentIsNotOurs) {
  EXPECT_EXIT(
      {
        ::signal(SIGBUS, SIG_DFL);
        const FaultGuard guard(mapping_->data(), kBytes);
        ::raise(SIGBUS);
        ::_exit(0);
      },
      ::testing::KilledBySignal(SIGBUS), "");
}

TEST_F(PassOnDeathTest, ASignalThatWasSentAndIsIgnoredStaysIgnored) {
  EXPECT_EXIT(
      {
        ::signal(SIGBUS, SIG_IGN);
        const FaultGuard guard(mapping_->data(), kBytes);
        ::raise(SIGBUS);
        ::_exit(guard.faulted() ? 1 : 0);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST_F(FaultGuardTest, AForkedChildInheritsNoRange) {
  const FaultGuard guard(mapping_->data(), kBytes);
  ASSERT_TRUE(guard.ok());
  const pid_t child = ::fork();
  if (child == 0) {
    static_cast<void>(file_->Truncate(0));
    const uint8_t value = data()[0];
    ::_exit(value == 0 ? 10 : 11);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS) << status;
}

}  // namespace
}  // namespace holdfast
