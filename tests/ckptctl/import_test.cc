// The Python that `ckptctl import` would run: one that answers, one that does not, one that hangs.
#include "ckptctl/import.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "tests/base/temporary_directory.h"

namespace holdfast {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using testing::AllOf;
using testing::HasSubstr;

class ImportTest : public testing::Test {
 protected:
  // A program that is called as python is.
  std::string Python(const std::string& does) {
    std::string path = directory_.Path("python");
    std::ofstream(path) << "#!/bin/bash\n" << does << "\n";
    EXPECT_EQ(::chmod(path.c_str(), 0755), 0);
    return path;
  }
  // None that runs, and none that was not waited for.
  static bool HasChildren() { return ::waitpid(-1, nullptr, WNOHANG) != -1 || errno != ECHILD; }

  const TemporaryDirectory directory_;
};

TEST_F(ImportTest, APythonSaysWhetherItHasThePackage) {
  EXPECT_EQ(CheckPythonPackage(Python(R"([ "$1" = -c ])"), hours(1)), absl::OkStatus());
  const absl::Status has_none = CheckPythonPackage(Python("exit 77"), hours(1));
  EXPECT_TRUE(absl::IsFailedPrecondition(has_none)) << has_none;
  EXPECT_THAT(std::string(has_none.message()), HasSubstr("has no package holdfast"));
  EXPECT_FALSE(HasChildren());
}

TEST_F(ImportTest, WhatIsNoPythonIsNamed) {
  const absl::Status ends = CheckPythonPackage(Python("exit 3"), hours(1));
  EXPECT_TRUE(absl::IsFailedPrecondition(ends)) << ends;
  EXPECT_THAT(std::string(ends.message()), HasSubstr("exit code 3"));
  const absl::Status dies = CheckPythonPackage(Python("kill -TERM $$"), hours(1));
  EXPECT_TRUE(absl::IsFailedPrecondition(dies)) << dies;
  EXPECT_THAT(std::string(dies.message()), HasSubstr("signal 15"));
  const absl::Status none = CheckPythonPackage("/no/such/python", hours(1));
  EXPECT_TRUE(absl::IsNotFound(none)) << none;
  EXPECT_FALSE(HasChildren());
}

// Python runs what lies in the working directory (importing_test.py has it do so).
TEST_F(ImportTest, APythonDoesNotLookIntoTheWorkingDirectory) {
  const std::string python = Python(R"(
[[ $2 == 'import sys; '*'sys.path.pop(0); import importlib.util;'* ]] || exit 3
[ "$PYTHONSAFEPATH" = 1 ] || exit 4
[ "$PYTHONPATH" = "$EXPECTED" ] || exit 5)");
  ASSERT_EQ(::setenv("PYTHONSAFEPATH", "", 1), 0);
  for (const auto& [path, expected] :
       {std::pair(":/a::/b c:.:", "/a:/b c:."), std::pair(":", "")}) {
    ASSERT_EQ(::setenv("PYTHONPATH", path, 1), 0);
    ASSERT_EQ(::setenv("EXPECTED", expected, 1), 0);
    EXPECT_EQ(CheckPythonPackage(python, hours(1)), absl::OkStatus()) << path;
  }
  ::unsetenv("PYTHONSAFEPATH");
  ::unsetenv("PYTHONPATH");
  ::unsetenv("EXPECTED");
}

TEST_F(ImportTest, OneThatHangsIsKilled) {
  // Left alone it answers, after a minute.
  const std::string pipe = directory_.Path("pipe");
  const std::string answered = directory_.Path("answered");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const std::string python =
      Python("read -r -t 60 nothing <> " + pipe + "; : > " + answered + "; exit 0");
  const absl::Status hangs = CheckPythonPackage(python, milliseconds(200));
  EXPECT_TRUE(absl::IsFailedPrecondition(hangs)) << hangs;
  EXPECT_THAT(
      std::string(hangs.message()),
      AllOf(HasSubstr(python), HasSubstr("no answer within 200 ms"), HasSubstr("HOLDFAST_PYTHON")));
  EXPECT_FALSE(HasChildren());
  EXPECT_FALSE(std::filesystem::exists(answered));
}

}  // namespace
}  // namespace holdfast
