// A process that a test starts.
//
//   Child child({.arguments = {"/bin/cat"}, .pipes = true});
//   child.WriteLine("hello");
//   EXPECT_EQ(child.ReadLine(), "hello");
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "tests/integration/raw_client.h"

namespace holdfast {

// A child process; killed and reaped at the end.
class Child {
 public:
  struct Options {
    std::vector<std::string> arguments;    // the first is the program
    std::vector<std::string> environment;  // "NAME=value", added to the test's own
    std::string error_file;                // stderr; empty: the test's
    bool pipes = false;                    // stdin and stdout
    uid_t uid = 0;                         // not 0: becomes this user (root only)
  };
  explicit Child(const Options& options);
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  void Signal(int signal_number);
  // How it ended: exit code, or -signal; nothing when it still runs at the deadline.
  std::optional<int> Wait(std::chrono::milliseconds at_most = kPatience);
  bool running() { return !Wait(std::chrono::milliseconds(0)).has_value(); }
  void WriteLine(const std::string& line);
  std::optional<std::string> ReadLine(std::chrono::milliseconds at_most = kPatience);

 private:
  pid_t pid_ = -1;
  UniqueFd pidfd_;
  UniqueFd in_;
  UniqueFd out_;
  std::string buffer_;
  std::optional<int> ended_;
};

}  // namespace holdfast
