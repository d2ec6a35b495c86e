// The line that says how far a command is: when it is drawn, when it goes, and where it never is.
#include "ckptctl/progress.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <sstream>

#include "base/mutex.h"
#include "base/unique_fd.h"
#include "holdfast/v1/admin.pb.h"
#include "tests/ckptctl/console.h"
#include "tests/ckptctl/program.h"

namespace holdfast {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

constexpr char kClear[] = "\r\x1b[K";

class ProgressLineTest : public testing::Test {
 protected:
  ProgressLineTest() {
    context_.err = &err_;
    context_.clock = &clock_;
    context_.progress = true;
    context_.command = "plan";
  }
  std::string Drawn(ProgressLine& line, const std::string& text) {
    err_.str("");
    line.Draw([&] { return text; });
    return err_.str();
  }
  ManualClock clock_;
  std::ostringstream err_;
  Context context_;
};

TEST_F(ProgressLineTest, ComesAfterASecondAndTenTimesASecond) {
  ProgressLine line(context_);
  EXPECT_EQ(Drawn(line, "1 of 9"), "");
  clock_.Advance(milliseconds(999));
  EXPECT_EQ(Drawn(line, "2 of 9"), "");
  clock_.Advance(milliseconds(1));
  EXPECT_EQ(Drawn(line, "3 of 9"), std::string(kClear) + "3 of 9");
  clock_.Advance(milliseconds(99));
  EXPECT_EQ(Drawn(line, "4 of 9"), "");
  clock_.Advance(milliseconds(1));
  EXPECT_EQ(Drawn(line, "5 of 9"), std::string(kClear) + "5 of 9");
  err_.str("");
  line.Clear();
  EXPECT_EQ(err_.str(), kClear);
  line.Clear();  // nothing is there any more
  EXPECT_EQ(err_.str(), kClear);
}

TEST_F(ProgressLineTest, IsNeverDrawnForJsonOrWithoutATerminal) {
  for (const bool json : {true, false}) {
    context_.json = json;
    context_.progress = json;
    {
      ProgressLine line(context_, Duration(0));
      EXPECT_EQ(Drawn(line, "1 of 9"), "");
      const WaitingLine waiting(context_, "waiting for ckptd", Duration(0));
    }
    EXPECT_EQ(err_.str(), "");
  }
}

// What is written to it can be waited for.
class Watched : public std::stringbuf {
 public:
  void WaitFor(const std::string& part) {
    MutexLock lock(mutex_);
    while (seen_.find(part) == std::string::npos) {
      more_.Wait(mutex_);
    }
  }
  std::string Seen() {
    MutexLock lock(mutex_);
    return seen_;
  }

 protected:
  std::streamsize xsputn(const char* text, std::streamsize size) override {
    MutexLock lock(mutex_);
    seen_.append(text, static_cast<size_t>(size));
    more_.NotifyAll();
    return size;
  }

 private:
  Mutex mutex_;
  CondVar more_;
  std::string seen_ GUARDED_BY(mutex_);
};

TEST(WaitingLine, IsDrawnAgainUntilTheAnswerComes) {
  Watched watched;
  std::ostream err(&watched);
  Context context{.err = &err, .progress = true, .command = "rebuild"};
  {
    const WaitingLine waiting(context, "waiting for ckptd", milliseconds(1));
    watched.WaitFor("rebuild: waiting for ckptd, 0.1 s");
    watched.WaitFor("rebuild: waiting for ckptd, 0.5 s");
  }
  EXPECT_THAT(watched.Seen(), testing::EndsWith(kClear));
}

// ckptctl with its answers in a file and a terminal as its stderr.
class OnTerminal {
 public:
  OnTerminal(std::vector<std::string> arguments, const std::string& out)
      : terminal_(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC)) {
    EXPECT_TRUE(terminal_.valid() && ::grantpt(terminal_.get()) == 0 &&
                ::unlockpt(terminal_.get()) == 0);
    const std::string name = ::ptsname(terminal_.get());
    arguments.insert(arguments.begin(), {name, out});
    program_ = std::make_unique<Program>(
        "program=$0 terminal=$1 out=$2; shift 2; exec \"$program\" \"$@\" 2>\"$terminal\" "
        ">\"$out\"",
        std::move(arguments));
  }
  // What has come until `part` has; all that comes, when it never does before the end.
  std::string ReadUntil(const std::string& part) {
    std::array<char, 4096> bytes = {};
    while (seen_.find(part) == std::string::npos) {
      const ssize_t size = ::read(terminal_.get(), bytes.data(), bytes.size());
      if (size > 0) {
        seen_.append(bytes.data(), static_cast<size_t>(size));
      } else if (size == 0 || errno != EINTR) {
        break;  // EIO: nobody has the terminal open any more
      }
    }
    return seen_;
  }
  int Wait() { return program_->Wait(); }

 private:
  UniqueFd terminal_;
  std::unique_ptr<Program> program_;
  std::string seen_;
};

// Of a call that takes long: a line on the terminal, which is gone when the answer comes.
TEST(Progress, OnATerminalACallThatTakesLongSaysSo) {
  Gate gate;
  FakeAdmin admin({.rebuild = [&](const auto&, v1::RebuildReply& reply) {
    gate.Wait();
    reply.set_jobs(1);
    return absl::OkStatus();
  }});
  const std::string out = admin.directory() + "/out";
  OnTerminal ckptctl({"rebuild", "--timeout", "1min", "--socket", admin.socket()}, out);
  EXPECT_THAT(ckptctl.ReadUntil("rebuild: waiting for ckptd, 1 s"),
              HasSubstr("rebuild: waiting for ckptd, 1 s"));
  gate.Open();
  EXPECT_EQ(ckptctl.Wait(), 0);
  const std::string seen = ckptctl.ReadUntil("never");
  EXPECT_THAT(seen, testing::EndsWith(kClear));
  const std::string answer = Contents(out);
  EXPECT_THAT(answer, HasSubstr("of 1 job"));
  EXPECT_THAT(answer, testing::Not(HasSubstr("waiting")));
  ::unlink(out.c_str());
}

// With --json nothing but an error is ever on stderr, terminal or not.
TEST(Progress, OnATerminalJsonHasNone) {
  FakeAdmin admin({.verify = [](const v1::VerifyRequest&, const FakeAdmin::SendProgress& send) {
    v1::VerifyProgress progress;
    progress.set_bytes_total(4000);
    send(progress);
    progress.set_done(true);
    send(progress);
    return absl::OkStatus();
  }});
  const std::string out = admin.directory() + "/out";
  {
    OnTerminal ckptctl({"verify", "j", "--socket", admin.socket()}, out);
    EXPECT_EQ(ckptctl.Wait(), 0);
    EXPECT_THAT(ckptctl.ReadUntil("never"), HasSubstr("0 B of 3.9 KiB"));
  }
  OnTerminal ckptctl({"verify", "j", "--json", "--socket", admin.socket()}, out);
  EXPECT_EQ(ckptctl.Wait(), 0);
  EXPECT_EQ(ckptctl.ReadUntil("never"), "");
  EXPECT_THAT(Contents(out), HasSubstr("\"ok\":true"));
  ::unlink(out.c_str());
}

}  // namespace
}  // namespace holdfast
