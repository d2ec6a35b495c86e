// ckptctl as a process, for tests.
//
//   Program program({"status", "--socket", admin.socket()});
//   EXPECT_EQ(program.Wait(), 0) << program.err();
//
// One thread uses a Program.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace holdfast {

std::string Contents(const std::string& path);

class Program {
 public:
  explicit Program(std::vector<std::string> arguments) : Program("", std::move(arguments)) {}
  // Under a shell: `script` runs "$0" with "$@".
  Program(const std::string& script, std::vector<std::string> arguments);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  pid_t pid() const { return pid_; }
  // Its exit code; 1000 and more when a signal ended it.
  int Wait();
  const std::string& out() const { return out_; }
  const std::string& err() const { return err_; }

 private:
  std::string Path(const std::string& name) const { return std::string(directory_) + "/" + name; }

  std::vector<std::string> arguments_;
  char directory_[32] = "/tmp/holdfast-program-XXXXXX";
  pid_t pid_ = -1;
  std::string out_;
  std::string err_;
};

}  // namespace holdfast
