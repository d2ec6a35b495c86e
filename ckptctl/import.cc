// ckptctl import: what `python -m holdfast import` does, which reads what other programs have
// saved, under the name at which one looks for it. This process becomes that one: what it says, and
// its exit code, are the answer.
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

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "base/units.h"
#include "ckptctl/commands.h"

extern char** environ;

namespace holdfast {
namespace {

constexpr Duration kPythonAnswersWithin = std::chrono::seconds(60);  // from a cold network mount
constexpr auto kPythonLook = std::chrono::milliseconds(5);
constexpr int kNoPackage = 77;
// Python looks into the working directory before everything else, where what was downloaded may
// hold a torch.py. From 3.11 on a variable forbids that; an older one is told before it has
// imported anything that is a file. (-I would hide what PYTHONPATH names, too; -m comes too late.)
constexpr char kForbidWorkingDirectory[] = "PYTHONSAFEPATH=1";
constexpr char kLeaveWorkingDirectory[] =
    "import sys; getattr(sys.flags, 'safe_path', False) or sys.path.pop(0); ";
// (A folder of that name without an __init__.py is no package.)
constexpr char kFindPackage[] =
    "import importlib.util; found = importlib.util.find_spec('holdfast'); "
    "sys.exit(77 if found is None or found.origin is None else 0)";
constexpr char kRunPackage[] =
    "import runpy; runpy.run_module('holdfast', run_name='__main__', alter_sys=True)";
constexpr char kWayOut[] =
    "set HOLDFAST_PYTHON to the python that has it (HOLDFAST_PYTHON=~/venv/bin/python ckptctl "
    "import …), or call that one: python -m holdfast import …";

// This process's, without the working directory as a place of modules: what is empty between the
// colons of PYTHONPATH stands for it ("$PYTHONPATH:/opt/modules" of a shell that has none).
std::vector<std::string> PythonEnvironment() {
  constexpr absl::string_view kPath = "PYTHONPATH=";
  std::vector<std::string> variables = {kForbidWorkingDirectory};
  for (char** variable = environ; *variable != nullptr; ++variable) {
    absl::string_view said = *variable;
    if (absl::StartsWith(said, "PYTHONSAFEPATH=")) {
      continue;
    }
    if (absl::ConsumePrefix(&said, kPath)) {
      variables.push_back(
          absl::StrCat(kPath, absl::StrJoin(absl::StrSplit(said, ':', absl::SkipEmpty()), ":")));
    } else {
      variables.emplace_back(said);
    }
  }
  return variables;
}

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
  std::vector<std::string> words = {python, "-c", absl::StrCat(kLeaveWorkingDirectory, kRunPackage),
                                    "import"};
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
  std::vector<std::string> words = {python, "-c",
                                    absl::StrCat(kLeaveWorkingDirectory, kFindPackage)};
  std::vector<std::string> variables = PythonEnvironment();
  const std::vector<char*> argv = Pointers(words);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  pid_t pid = -1;
  const int error =
      ::posix_spawnp(&pid, argv[0], &files, nullptr, argv.data(), Pointers(variables).data());
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
        "import: '", python, "' has no package holdfast: pip install Holdfast's wheel there, or ",
        kWayOut));
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
  std::vector<std::string> variables = PythonEnvironment();
  ::execvpe(python.c_str(), Pointers(words).data(), Pointers(variables).data());
  return ReportError(context, NotStarted(python, errno));
}

}  // namespace holdfast
