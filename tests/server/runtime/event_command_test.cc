#include "server/runtime/event_command.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "tests/base/temporary_directory.h"

namespace holdfast {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

constexpr auto kPatience = std::chrono::seconds(60);

class EventCommandTest : public ::testing::Test {
 protected:
  EventCommandTest() { ::signal(SIGPIPE, SIG_IGN); }  // as ckptd does

  // Whose journal is stopped first.
  class Running : public EventCommand {
   public:
    Running(EventCommand::Options options, EventJournal& journal)
        : EventCommand(std::move(options), journal), journal_(journal) {}
    ~Running() { journal_.Stop(); }

   private:
    EventJournal& journal_;
  };

  // What the shell is told; $D is a directory of this test's own.
  EventCommand::Options Shell(const std::string& script) {
    EventCommand::Options options;
    options.command = {"/bin/sh", "-c", "D=" + dir_.path() + "; " + script};
    options.node = "gpu-17";
    options.pause = std::chrono::milliseconds(1);
    return options;
  }
  void Happens(const std::string& text, v1::Severity severity = v1::SEVERITY_WARNING,
               const std::string& job = "") {
    v1::DaemonEvent event;
    event.set_kind("trouble");
    event.set_text(text);
    event.set_job(job);
    event.set_severity(severity);
    event.set_unix_ms(1'700'000'000'250);
    journal_.Add(std::move(event), std::nullopt);
  }
  std::string Contents(const std::string& name) {
    std::ifstream file(dir_.Path(name));
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }
  std::vector<json> Lines(const std::string& name) {
    std::istringstream all(Contents(name));
    std::vector<json> lines;
    for (std::string line; std::getline(all, line);) {
      lines.push_back(json::parse(line));
    }
    return lines;
  }
  bool Until(const std::function<bool()>& so) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (!so()) {
      if (std::chrono::steady_clock::now() > until) {
        return false;
      }
      std::this_thread::sleep_for(
          std::chrono::milliseconds(1));  // (its lock is to be had in between)
    }
    return true;
  }

  const TemporaryDirectory dir_;
  EventJournal journal_{1, {0}};
};

TEST_F(EventCommandTest, GetsEachEventAsALine) {
  Running command(Shell("cat >> $D/got; echo run >> $D/runs"), journal_);
  Happens("a \"quoted\"\nline \xc3\xa4", v1::SEVERITY_ERROR, "llama");
  ASSERT_TRUE(Until([&] { return Contents("runs") == "run\n"; }));
  const std::vector<json> got = Lines("got");
  ASSERT_THAT(got, SizeIs(1));
  EXPECT_EQ(got[0]["node"], "gpu-17");
  EXPECT_EQ(got[0]["number"], 1);
  EXPECT_EQ(got[0]["unix_ms"], 1'700'000'000'250);
  EXPECT_EQ(got[0]["time"], "2023-11-14T22:13:20.250Z");
  EXPECT_EQ(got[0]["severity"], "error");
  EXPECT_EQ(got[0]["kind"], "trouble");
  EXPECT_EQ(got[0]["job"], "llama");
  EXPECT_EQ(got[0]["text"], "a \"quoted\"\nline \xc3\xa4");
  EXPECT_EQ(command.problem(), "");
}

// Nobody waits for the old one, which may hang: the new one is told what that had not taken.
TEST_F(EventCommandTest, AnotherCommandTakesOverAtOnce) {
  Running command(Shell("echo run >> $D/old; exec sleep 1000"), journal_);
  Happens("first");
  ASSERT_TRUE(Until([&] { return Contents("old") == "run\n"; }));
  command.Change(Shell("cat >> $D/got").command, v1::SEVERITY_WARNING, kPatience);
  ASSERT_TRUE(Until([&] { return Lines("got").size() == 1; }));
  EXPECT_EQ(Lines("got")[0]["text"], "first");
  EXPECT_EQ(Contents("old"), "run\n") << "it is not tried again";
  ASSERT_TRUE(Until([&] { return command.problem().empty(); }));
}

TEST_F(EventCommandTest, WhatIsMilderIsNotTold) {
  Running command(Shell("cat >> $D/got"), journal_);
  Happens("mild", v1::SEVERITY_INFO);
  Happens("bad");
  ASSERT_TRUE(Until([&] { return !Contents("got").empty(); }));
  journal_.Stop();
  command.Stop();
  ASSERT_THAT(Lines("got"), SizeIs(1));
  EXPECT_EQ(Lines("got")[0]["text"], "bad");
}

TEST_F(EventCommandTest, IsTriedAgainWithTheSameEvents) {
  Running command(Shell("cat > $D/now; if [ ! -e $D/failed ]; then touch $D/failed; exit 1; fi; "
                        "cat $D/now >> $D/got"),
                  journal_);
  Happens("once");
  ASSERT_TRUE(Until([&] { return !Contents("got").empty(); }));
  ASSERT_THAT(Lines("got"), SizeIs(1));
  EXPECT_EQ(Lines("got")[0]["text"], "once");
}

TEST_F(EventCommandTest, WhatCouldNotBeToldIsCounted) {
  Running command(Shell("cat > $D/now; if [ ! -e $D/works ]; then echo no luck >&2; exit 7; "
                        "fi; cat $D/now >> $D/got"),
                  journal_);
  Happens("never told");
  ASSERT_TRUE(Until([&] { return !command.problem().empty(); }));
  EXPECT_THAT(command.problem(), HasSubstr("exit code 7: no luck"));
  EXPECT_THAT(command.problem(), HasSubstr("1 events have not been told"));
  std::ofstream(dir_.Path("works")) << "";
  Happens("told");
  ASSERT_TRUE(Until([&] { return command.problem().empty(); }));
  const std::vector<json> got = Lines("got");
  ASSERT_THAT(got, SizeIs(2));
  EXPECT_EQ(got[0]["kind"], "events_lost");
  EXPECT_THAT(got[0]["text"], HasSubstr("1 events happened before"));
  EXPECT_EQ(got[1]["text"], "told");
}

TEST_F(EventCommandTest, OneThatHangsIsKilledWithItsChildren) {
  EventCommand::Options options = Shell("sleep 1000 & echo $! > $D/pid; wait");
  options.timeout = std::chrono::milliseconds(200);
  Running command(options, journal_);
  Happens("x");
  ASSERT_TRUE(Until([&] { return !command.problem().empty(); }));
  EXPECT_THAT(command.problem(), HasSubstr("it was killed"));
  const pid_t child = std::stoi(Contents("pid"));
  EXPECT_TRUE(Until([&] {  // (as a zombie it is init's)
    std::ifstream stat("/proc/" + std::to_string(child) + "/stat");
    std::string pid;
    std::string name;
    std::string state = "gone";
    stat >> pid >> name >> state;
    return state == "gone" || state == "Z";
  }));
}

TEST_F(EventCommandTest, SaysWhatSignalEndedIt) {
  Running command(Shell("kill -9 $$"), journal_);
  Happens("x");
  ASSERT_TRUE(Until([&] { return !command.problem().empty(); }));
  EXPECT_THAT(command.problem(), HasSubstr("ended by signal 9"));
}

TEST_F(EventCommandTest, OneThatIsNotThere) {
  EventCommand::Options options = Shell("");
  options.command = {dir_.Path("absent")};
  Running command(options, journal_);
  Happens("x");
  ASSERT_TRUE(Until([&] { return !command.problem().empty(); }));
  EXPECT_THAT(command.problem(), HasSubstr("No such file"));
}

// More than a pipe holds, and nobody reads it: that is no failure.
TEST_F(EventCommandTest, OneThatReadsNothing) {
  for (size_t i = 0; i < 200; ++i) {
    Happens(std::string(EventJournal::kTextBytesMax, 'x'));
  }
  Running command(Shell("echo run >> $D/runs"), journal_);
  ASSERT_TRUE(Until([&] { return Contents("runs") == "run\n"; }));
  journal_.Stop();
  command.Stop();
  EXPECT_EQ(command.problem(), "");
}

TEST_F(EventCommandTest, InheritsNothingOfTheDaemon) {
  sigset_t blocked;
  ::sigemptyset(&blocked);
  ::sigaddset(&blocked, SIGTERM);
  ::pthread_sigmask(SIG_BLOCK, &blocked, nullptr);
  const int leaks = ::open("/dev/null", O_RDONLY);  // no close-on-exec
  ::setenv("SECRET", "s", 1);
  // (The mask is read by the shell itself: while it starts a program it blocks all signals.)
  Running command(Shell("ls /proc/$$/fd > $D/fds; env > $D/env; "
                        "while read line; do case $line in SigBlk*) echo $line;; esac; done "
                        "< /proc/$$/status > $D/mask; echo done > $D/done"),
                  journal_);
  Happens("x");
  ASSERT_TRUE(Until([&] { return !Contents("done").empty(); }));
  ::close(leaks);
  ::pthread_sigmask(SIG_UNBLOCK, &blocked, nullptr);
  EXPECT_THAT(Contents("fds"), Not(HasSubstr(std::to_string(leaks) + "\n")));
  EXPECT_THAT(Contents("env"), Not(HasSubstr("SECRET")));
  EXPECT_THAT(Contents("env"), HasSubstr("HOLDFAST_NODE=gpu-17"));
  EXPECT_THAT(Contents("mask"), HasSubstr("0000000000000000"));
}

// What happened before is told, if it does not take long; nobody waits for one that hangs.
TEST_F(EventCommandTest, StopsInTime) {
  EventCommand::Options options = Shell("cat > /dev/null; echo began > $D/began; sleep 1000");
  options.stop_patience = std::chrono::milliseconds(50);
  Running command(options, journal_);
  Happens("x");
  ASSERT_TRUE(Until([&] { return !Contents("began").empty(); }));
  journal_.Stop();
  command.Stop();  // (the test would not end)
  EXPECT_THAT(command.problem(), HasSubstr("ckptd was to stop"));
}

TEST_F(EventCommandTest, WhatHappenedJustBeforeTheStopIsTold) {
  EventCommand::Options options = Shell("cat >> $D/got");
  options.stop_patience = kPatience;
  {
    Running command(options, journal_);
    Happens("last words");
    journal_.Stop();
  }
  ASSERT_THAT(Lines("got"), SizeIs(1));
}

}  // namespace
}  // namespace holdfast
