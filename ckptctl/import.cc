// ckptctl import: `python -m holdfast import`, which reads what other programs have saved, under
// the name at which one looks for it. This process becomes that one: what it says, and its exit
// code, are the answer.
#include "ckptctl/import.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status.h"
#include "base/units.h"
#include "ckptctl/commands.h"

extern char** environ;

namespace holdfast {
namespace {

constexpr Duration kPythonAnswersWithin = std::chrono::seconds(60);  // from a cold network mount
constexpr auto kPythonLook = std::chrono::milliseconds(5);
constexpr int kNoPackage = 77;
// (A folder of that name in the working directory is no package.)
constexpr char kFindPackage[] =
    "import importlib.util, sys; found = importlib.util.find_spec('holdfast'); "
    "sys.exit(77 if found is None or found.origin is None else 0)";
constexpr char kWayOut[] =
    "set HOLDFAST_PYTHON to the python that has it (HOLDFAST_PYTHON=~/venv/bin/python ckptctl "
    "import …), or call that one: python -m holdfast import …";

std::vector<char*> Pointers(std::vector<std::string>& words) {
  std::vector<char*> pointers;
  for (std::string& word : words) {
    pointers.push_back(word.data());
  }
  pointers.push_back(nullptr);
  return pointers;
}

absl::Status NotStarted(const std::string& python, int error) {
  return absl::NotFoundError(absl::StrCat("import: it runs the Python package holdfast, and '",
                                          python, "' cannot be run: ", std::strerror(error), "; ",
                                          kWayOut));
}

// How the child ended, as waitpid tells it.
absl::StatusOr<int> WaitForPython(pid_t pid, Duration answers_within) {
  const auto end = std::chrono::steady_clock::now() + answers_within;
  for (;;) {
    int status = 0;
    const pid_t ended = ::waitpid(pid, &status, WNOHANG);
    if (ended == pid) {
      return status;
    }
    if (ended < 0 && errno != EINTR) {
      return absl::InternalError(absl::StrCat("wait for python: ", std::strerror(errno)));
    }
    if (std::chrono::steady_clock::now() >= end) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, &status, 0);
      return absl::AbortedError(absl::StrCat("no answer within ", FormatDuration(answers_within)));
    }
    std::this_thread::sleep_for(kPythonLook);
  }
}

std::vector<std::string> ImportWords(const Context& context, const ImportArguments& arguments,
                                     const std::string& python) {
  std::vector<std::string> words = {python, "-m", "holdfast", "import"};
  const auto add = [&words](const char* option, const std::string& value) {
    if (!value.empty()) {
      words.push_back(absl::StrCat(option, "=", value));
    }
  };
  add("--step", absl::StrCat(arguments.step));
  add("--key", arguments.key);
  add("--only", arguments.only);
  add("--socket", arguments.client_socket);
  if (arguments.wait) {
    add("--timeout",
        absl::StrFormat("%.3f", std::chrono::duration<double>(*arguments.wait).count()));
  }
  if (context.json) {
    words.emplace_back("--json");
  }
  words.insert(words.end(), {"--", arguments.job, arguments.source});
  return words;
}

}  // namespace

// Asked before: what python itself says of a package that is not there names no way out.
absl::Status CheckPythonPackage(const std::string& python, Duration answers_within) {
  std::vector<std::string> words = {python, "-c", kFindPackage};
  const std::vector<char*> argv = Pointers(words);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  pid_t pid = -1;
  const int error = ::posix_spawnp(&pid, argv[0], &files, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&files);
  if (error != 0) {
    return NotStarted(python, error);
  }
  const absl::StatusOr<int> ended = WaitForPython(pid, answers_within);
  if (ended.ok() && WIFEXITED(*ended) && WEXITSTATUS(*ended) == 0) {
    return absl::OkStatus();
  }
  if (ended.ok() && WIFEXITED(*ended) && WEXITSTATUS(*ended) == kNoPackage) {
    return absl::FailedPreconditionError(absl::StrCat(
        "import: '", python, "' has no package holdfast: pip install it there, or ", kWayOut));
  }
  const std::string how = !ended.ok()         ? Message(ended.status())
                          : WIFEXITED(*ended) ? absl::StrCat("exit code ", WEXITSTATUS(*ended))
                                              : absl::StrCat("signal ", WTERMSIG(*ended));
  return absl::FailedPreconditionError(
      absl::StrCat("import: '", python, "' does not say whether it has the package holdfast (", how,
                   "): is it a python? Else ", kWayOut));
}

ExitCode RunImport(const Context& context, const ImportArguments& arguments) {
  const char* chosen = std::getenv("HOLDFAST_PYTHON");
  const std::string python = chosen == nullptr || *chosen == '\0' ? "python3" : chosen;
  if (const absl::Status status = CheckPythonPackage(python, kPythonAnswersWithin); !status.ok()) {
    return ReportError(context, status);
  }
  std::vector<std::string> words = ImportWords(context, arguments, python);
  ::execvp(python.c_str(), Pointers(words).data());
  return ReportError(context, NotStarted(python, errno));
}

}  // namespace holdfast
