#include "server/runtime/process_watcher.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/process.h"

namespace holdfast {
namespace {

class ProcessWatcherTest : public ::testing::Test {
 protected:
  pid_t Fork() {
    const pid_t pid = ::fork();
    if (pid == 0) {
      for (;;) {
        ::pause();
      }
    }
    return pid;
  }
  void End(pid_t pid) {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }

  std::unique_ptr<Reactor> reactor_ = *Reactor::Create(Clock::System());
  std::vector<ProcessId> ended_;
  ProcessWatcher watcher_{*reactor_, [this](const ProcessId& process) {
                            ended_.push_back(process);
                            reactor_->Stop();
                          }};
};

TEST_F(ProcessWatcherTest, TellsOnceWhenAProcessEnds) {
  const pid_t pid = Fork();
  const ProcessId process = *IdentifyProcess(pid);
  watcher_.Watch(process);
  watcher_.Watch(process);
  EXPECT_EQ(watcher_.watched(), 1u);
  EXPECT_TRUE(ended_.empty());
  End(pid);
  reactor_->Run();
  EXPECT_EQ(ended_, std::vector<ProcessId>{process});
  EXPECT_EQ(watcher_.watched(), 0u);
}

TEST_F(ProcessWatcherTest, AProcessThatIsAlreadyGoneIsToldFromTheLoop) {
  const pid_t pid = Fork();
  const ProcessId process = *IdentifyProcess(pid);
  End(pid);
  watcher_.Watch(process);
  EXPECT_TRUE(ended_.empty()) << "told from within Watch";
  reactor_->Run();
  EXPECT_EQ(ended_, std::vector<ProcessId>{process});
}

TEST_F(ProcessWatcherTest, ALaterProcessOfThatNumberIsSomebodyElse) {
  ProcessId other = ThisProcess();
  other.start_ticks += 1;
  watcher_.Watch(other);
  reactor_->Run();
  EXPECT_EQ(ended_, std::vector<ProcessId>{other});
  EXPECT_TRUE(MayBeAlive(ThisProcess()));
  EXPECT_FALSE(MayBeAlive(other));
}

TEST_F(ProcessWatcherTest, AfterUnwatchNothingIsTold) {
  const pid_t pid = Fork();
  const pid_t other = Fork();
  const ProcessId process = *IdentifyProcess(pid);
  const ProcessId second = *IdentifyProcess(other);
  watcher_.Watch(process);
  watcher_.Unwatch(process);
  End(pid);
  watcher_.Watch(process);    // gone: to be told from the loop …
  watcher_.Unwatch(process);  // … but nobody wants to know any more
  watcher_.Watch(second);
  End(other);
  reactor_->Run();
  EXPECT_EQ(ended_, std::vector<ProcessId>{second});
}

}  // namespace
}  // namespace holdfast
