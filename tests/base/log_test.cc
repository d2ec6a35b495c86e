#include "base/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/env.h"
#include "base/log_limit.h"
#include "base/log_queue.h"
#include "base/mutex.h"
#include "base/status.h"
#include "tests/base/temporary_directory.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::string Contents(const std::string& path) {
  return ReadFile(*Env::System(), path, 1 << 20).value_or("no file");
}

TEST(LogTest, LevelsByName) {
  EXPECT_EQ(*ParseLogLevel("debug"), LogLevel::kDebug);
  EXPECT_EQ(*ParseLogLevel("Info"), LogLevel::kInfo);
  EXPECT_EQ(*ParseLogLevel("warning"), LogLevel::kWarning);
  EXPECT_EQ(*ParseLogLevel("ERROR"), LogLevel::kError);
  for (const char* text : {"", "warn", "2", "trace"}) {
    EXPECT_EQ(ParseLogLevel(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(LogTest, WritesLinesFromTheLevelUp) {
  const TemporaryDirectory dir;
  ASSERT_TRUE(StartLog(LogLevel::kWarning, dir.Path("log")).ok());
  LogDebug("one");
  LogInfo("two");
  LogWarning("three step=900");
  LogError("four");
  const std::string text = Contents(dir.Path("log"));
  EXPECT_THAT(text, Not(HasSubstr("one")));
  EXPECT_THAT(text, Not(HasSubstr("two")));
  EXPECT_THAT(text, HasSubstr(" warning three step=900\n"));
  EXPECT_THAT(text, HasSubstr(" error four\n"));
}

TEST(LogTest, WhatMustLeaveATraceDoesWhateverTheLevel) {
  const TemporaryDirectory dir;
  ASSERT_TRUE(StartLog(LogLevel::kError, dir.Path("log")).ok());
  LogFrom(LogLevel::kWarning, "uid=1", "one");
  LogAlways("uid=1", "two");
  const std::string text = Contents(dir.Path("log"));
  EXPECT_THAT(text, Not(HasSubstr("one")));
  EXPECT_THAT(text, HasSubstr(" info two\n"));
}

TEST(LogTest, AppendsToWhatIsThere) {
  const TemporaryDirectory dir;
  ASSERT_TRUE(StartLog(LogLevel::kInfo, dir.Path("log")).ok());
  LogInfo("first");
  ASSERT_TRUE(StartLog(LogLevel::kInfo, dir.Path("log")).ok());
  LogInfo("second");
  EXPECT_THAT(Contents(dir.Path("log")), HasSubstr("first\n"));
  EXPECT_THAT(Contents(dir.Path("log")), HasSubstr("second\n"));
}

TEST(LogTest, HostileTextStaysOneLineAndIsNoFormat) {
  const TemporaryDirectory dir;
  ASSERT_TRUE(StartLog(LogLevel::kInfo, dir.Path("log")).ok());
  LogInfo("job=a\n2030-01-01 error forged\x1b[31m {} %s");
  EXPECT_THAT(Contents(dir.Path("log")),
              HasSubstr("info job=a\\n2030-01-01 error forged\\x1b[31m {} %s\n"));
}

TEST(LogTest, AFileThatCannotBeOpenedIsAStatus) {
  const TemporaryDirectory dir;
  const absl::Status status = StartLog(LogLevel::kInfo, dir.path());
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(Message(status), HasSubstr("open log '" + dir.path() + "'"));
}

TEST(LogTest, LongLinesAreCut) {
  const TemporaryDirectory dir;
  ASSERT_TRUE(StartLog(LogLevel::kInfo, dir.Path("log")).ok());
  LogInfo(std::string(1 << 20, 'x') + "end");
  // Never in the middle of a character.
  LogInfo(std::string(kLogLineBytesMax - 1, 'y') + "\xc3\xa4");
  LogFrom(LogLevel::kInfo, "job=a", std::string(1 << 20, 'z'));
  const std::string text = Contents(dir.Path("log"));
  EXPECT_LT(text.size(), 3 * kLogLineBytesMax);
  EXPECT_THAT(text, HasSubstr(absl::StrCat("xxx... (", (1 << 20) + 3 - kLogLineBytesMax,
                                           " bytes more)\n")));
  EXPECT_THAT(text, HasSubstr("yyy... (2 bytes more)\n"));
  EXPECT_THAT(text, Not(HasSubstr("\xc3")));
  EXPECT_THAT(text, HasSubstr(absl::StrCat("zzz... (", (1 << 20) - kLogLineFromBytesMax,
                                           " bytes more)\n")));
}

TEST(LogTest, OneSourceCannotFillIt) {
  const TemporaryDirectory dir;
  ASSERT_TRUE(StartLog(LogLevel::kInfo, dir.Path("log")).ok());
  constexpr int kLines = 100'000;
  for (int i = 0; i < kLines; ++i) {
    LogFrom(LogLevel::kWarning, "job=noisy", "gave up");
  }
  LogFrom(LogLevel::kInfo, "job=quiet", "sealed");
  StopLog(std::chrono::seconds(1));
  const std::string text = Contents(dir.Path("log"));
  EXPECT_LT(std::count(text.begin(), text.end(), '\n'), kLines / 2);
  EXPECT_THAT(text, HasSubstr(" of job=noisy\n"));
  EXPECT_THAT(text, HasSubstr("sealed\n"));
}

TEST(LogTest, ItsThreadsWriteEverythingBeforeTheEnd) {
  const TemporaryDirectory dir;
  ASSERT_TRUE(StartLog(LogLevel::kInfo, dir.Path("log")).ok());
  ASSERT_TRUE(StartLogThreads().ok());
  LogInfo("first");
  ASSERT_TRUE(FlushLog(std::chrono::seconds(30)));
  EXPECT_THAT(Contents(dir.Path("log")), HasSubstr(" info first\n"));
  LogInfo("last but one");
  ASSERT_TRUE(StopLog(std::chrono::seconds(30)));
  EXPECT_THAT(Contents(dir.Path("log")), HasSubstr(" info last but one\n"));
  LogInfo("last");
  EXPECT_THAT(Contents(dir.Path("log")), HasSubstr(" info last\n"));
}

// A place that takes lines only when the test lets it.
class Gate {
 public:
  bool Write(const LogLine& line) {
    MutexLock lock(mutex_);
    writing_ = true;
    cv_.NotifyAll();
    while (!open_) {
      cv_.Wait(mutex_);
    }
    lines_.push_back(line.text);
    return !full_;
  }
  void Set(bool open) {
    MutexLock lock(mutex_);
    open_ = open;
    cv_.NotifyAll();
  }
  void SetFull(bool full) {
    MutexLock lock(mutex_);
    full_ = full;
  }
  void AwaitWriter() {
    MutexLock lock(mutex_);
    while (!writing_) {
      cv_.Wait(mutex_);
    }
  }
  std::vector<std::string> lines() {
    MutexLock lock(mutex_);
    return lines_;
  }

 private:
  Mutex mutex_;
  CondVar cv_;
  bool open_ GUARDED_BY(mutex_) = false;
  bool full_ GUARDED_BY(mutex_) = false;
  bool writing_ GUARDED_BY(mutex_) = false;
  std::vector<std::string> lines_ GUARDED_BY(mutex_);
};

LogLine Line(const std::string& text) {
  return {std::chrono::system_clock::now(), LogLevel::kInfo, text};
}

TEST(LogQueueTest, AStuckPlaceHoldsNobodyAndLosesCountedLines) {
  const auto gate = std::make_shared<Gate>();
  auto queue = LogQueue::Start({.lines_max = 3, .bytes_max = 1 << 20},
                               [gate](const LogLine& line) { return gate->Write(line); });
  ASSERT_TRUE(queue.ok());
  for (int i = 1; i <= 1000; ++i) {
    EXPECT_TRUE((*queue)->Push(Line(std::to_string(i))));
  }
  EXPECT_FALSE((*queue)->Flush(std::chrono::milliseconds(1)));
  gate->Set(true);
  ASSERT_TRUE((*queue)->Stop(std::chrono::seconds(30)));
  EXPECT_THAT(gate->lines(), ElementsAre("1", "2", "3", HasSubstr("997 lines were dropped")));
  EXPECT_FALSE((*queue)->Push(Line("the caller writes")));
}

TEST(LogQueueTest, BytesAreLimitedToo) {
  const auto gate = std::make_shared<Gate>();
  auto queue = LogQueue::Start({.lines_max = 1000, .bytes_max = 10'000},
                               [gate](const LogLine& line) { return gate->Write(line); });
  ASSERT_TRUE(queue.ok());
  (*queue)->Push(Line(std::string(6000, 'a')));
  (*queue)->Push(Line(std::string(6000, 'b')));
  gate->Set(true);
  ASSERT_TRUE((*queue)->Stop(std::chrono::seconds(30)));
  EXPECT_THAT(gate->lines(),
              ElementsAre(std::string(6000, 'a'), HasSubstr("1 lines were dropped")));
}

TEST(LogQueueTest, StopLeavesAStuckPlaceBehind) {
  const auto gate = std::make_shared<Gate>();
  auto queue = LogQueue::Start({}, [gate](const LogLine& line) { return gate->Write(line); });
  ASSERT_TRUE(queue.ok());
  (*queue)->Push(Line("stuck"));
  gate->AwaitWriter();
  EXPECT_FALSE((*queue)->Stop(std::chrono::milliseconds(1)));
  queue->reset();
  gate->Set(true);  // what was left behind ends by itself
}

TEST(LogQueueTest, LinesThatCouldNotBeWrittenAreCounted) {
  const auto gate = std::make_shared<Gate>();
  gate->Set(true);
  gate->SetFull(true);
  auto queue = LogQueue::Start({}, [gate](const LogLine& line) { return gate->Write(line); });
  ASSERT_TRUE(queue.ok());
  (*queue)->Push(Line("a"));
  (*queue)->Push(Line("b"));
  ASSERT_TRUE((*queue)->Flush(std::chrono::seconds(30)));
  gate->SetFull(false);
  (*queue)->Push(Line("c"));
  ASSERT_TRUE((*queue)->Stop(std::chrono::seconds(30)));
  EXPECT_THAT(gate->lines(), ElementsAre("a", "b", "c", HasSubstr("2 lines were dropped")));
}

constexpr LogLimiter::Limits kLimits = {
    .per_second = 2, .burst = 4, .all_per_second = 4, .all_burst = 6, .sources_max = 8};

int Admitted(LogLimiter& limiter, const std::string& source, int lines,
             LogLevel level = LogLevel::kInfo) {
  int admitted = 0;
  for (int i = 0; i < lines; ++i) {
    admitted += limiter.Admit(source, level) ? 1 : 0;
  }
  return admitted;
}

TEST(LogLimiterTest, BoundsEachSourceAndAllTogether) {
  ManualClock clock;
  LogLimiter limiter(&clock, kLimits);
  EXPECT_EQ(Admitted(limiter, "a", 10), 4);
  EXPECT_EQ(Admitted(limiter, "b", 10), 2);  // all together: 6
  clock.Advance(std::chrono::milliseconds(1500));
  EXPECT_EQ(Admitted(limiter, "a", 10), 3);
  EXPECT_EQ(Admitted(limiter, "c", 10), 3);
}

TEST(LogLimiterTest, ChatterDoesNotHideErrors) {
  ManualClock clock;
  LogLimiter limiter(&clock, kLimits);
  EXPECT_EQ(Admitted(limiter, "a", 10), 4);
  EXPECT_EQ(Admitted(limiter, "b", 10), 2);
  EXPECT_EQ(Admitted(limiter, "a", 10, LogLevel::kError), 4);
}

TEST(LogLimiterTest, SaysOnceASecondWhatWasLeftOut) {
  ManualClock clock;
  LogLimiter limiter(&clock, kLimits);
  EXPECT_EQ(limiter.TakeLeftOut(true), "");
  Admitted(limiter, "a", 10);
  Admitted(limiter, "b", 3);
  EXPECT_EQ(limiter.TakeLeftOut(), "");
  clock.Advance(std::chrono::seconds(1));
  EXPECT_EQ(limiter.TakeLeftOut(), "log: left out 7 lines, as they came too fast: 6 of a, 1 of b");
  EXPECT_EQ(limiter.TakeLeftOut(true), "");
  Admitted(limiter, "a", 10);
  EXPECT_EQ(limiter.TakeLeftOut(), "");
  EXPECT_THAT(limiter.TakeLeftOut(true), HasSubstr(" of a"));
}

TEST(LogLimiterTest, ManySourcesAreRememberedBounded) {
  ManualClock clock;
  LogLimiter::Limits limits = kLimits;
  limits.all_burst = 1e6;
  LogLimiter limiter(&clock, limits);
  int admitted = 0;
  for (int i = 0; i < 1000; ++i) {
    admitted += Admitted(limiter, absl::StrCat("job=", i), 1);
  }
  // Eight of their own, or rather seven and what the others share.
  EXPECT_LE(admitted, 8 + 4);
  EXPECT_THAT(limiter.TakeLeftOut(true), HasSubstr(" of others"));
  clock.Advance(std::chrono::seconds(60));
  EXPECT_EQ(Admitted(limiter, "job=new", 3), 3);
}

}  // namespace
}  // namespace holdfast
