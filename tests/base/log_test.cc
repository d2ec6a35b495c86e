#include "base/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/env.h"
#include "base/status.h"
#include "tests/base/temporary_directory.h"

namespace holdfast {
namespace {

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

}  // namespace
}  // namespace holdfast
