// A program that is given some bytes on its stdin, and what it says.
//
//   HF_ASSIGN_OR_RETURN(ChildProcess child, ChildProcess::Start({"/usr/bin/env"}, {"A=1"}, input));
//   while (!child.Step(100ms)) {
//     if (late) { child.Kill(); break; }
//   }
//   HF_RETURN_IF_ERROR(child.Result());
//
// It has a process group of its own, the usual signals, no descriptor but 0 to 2, and the
// environment that is named. Whatever of its group still runs at the end is killed. One thread. The
// caller's process ignores SIGPIPE: the program need not read all that it is given.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/unique_fd.h"

namespace holdfast {

class ChildProcess {
 public:
  static constexpr size_t kSaidBytesMax = 1024;

  static absl::StatusOr<ChildProcess> Start(const std::vector<std::string>& command,
                                            const std::vector<std::string>& environment,
                                            std::string input);
  ~ChildProcess();
  ChildProcess(ChildProcess&&) noexcept;
  ChildProcess& operator=(ChildProcess&&) = delete;

  // Moves what can be moved, for at most so long. True: it has ended.
  bool Step(Duration at_most);
  // The group. It may take a moment, or hang in the kernel: then pid() is left for the caller to
  // reap.
  void Kill();
  // Of one that has ended: an error with the exit code, or the signal, and what it said.
  absl::Status Result() const;
  // Of one that was killed and has not ended yet.
  std::optional<pid_t> left_behind() const {
    return pid_ > 0 && !status_ ? std::optional<pid_t>(pid_) : std::nullopt;
  }

 private:
  ChildProcess() = default;
  void Feed();
  void Listen();
  bool Reap();

  pid_t pid_ = -1;
  std::optional<int> status_;  // as waitpid has it
  UniqueFd pidfd_;
  UniqueFd to_;
  UniqueFd from_;
  std::string input_;
  size_t fed_ = 0;
  std::string said_;
};

}  // namespace holdfast
