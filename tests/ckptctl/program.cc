#include "tests/ckptctl/program.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

extern char** environ;

namespace holdfast {

std::string Contents(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

Program::Program(const std::string& script, std::vector<std::string> arguments)
    : arguments_(std::move(arguments)) {
  EXPECT_NE(::mkdtemp(directory_), nullptr);
  arguments_.insert(arguments_.begin(), HOLDFAST_BIN_DIR "/ckptctl");
  if (!script.empty()) {
    arguments_.insert(arguments_.begin(), {"/bin/sh", "-c", script});
  }
  std::vector<char*> argv;
  for (std::string& argument : arguments_) {
    argv.push_back(argument.data());
  }
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, Path("out").c_str(), O_CREAT | O_WRONLY,
                                   0600);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, Path("err").c_str(), O_CREAT | O_WRONLY,
                                   0600);
  EXPECT_EQ(::posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ), 0) << argv[0];
  posix_spawn_file_actions_destroy(&actions);
}

Program::~Program() {
  ::unlink(Path("out").c_str());
  ::unlink(Path("err").c_str());
  ::rmdir(directory_);
}

int Program::Wait() {
  int status = 0;
  EXPECT_EQ(::waitpid(pid_, &status, 0), pid_);
  out_ = Contents(Path("out"));
  err_ = Contents(Path("err"));
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

}  // namespace holdfast
