// ckptctl. Its command line is defined in arguments.h; what the commands do is in their own files.
#include <csignal>
#include <iostream>

#include "base/program.h"
#include "base/status.h"
#include "ckptctl/arguments.h"

int main(int argc, char** argv) {
  holdfast::OpenStandardDescriptors();
  // ulimit -f: the call that fails says so, and what was begun is tidied up.
  std::signal(SIGXFSZ, SIG_IGN);
  holdfast::Arguments arguments;
  const int exit_code = arguments.Run(argc, argv);
  std::cout.flush();
  if (const absl::Status written = holdfast::FinishStandardOutput(); !written.ok()) {
    std::cerr << "ckptctl: " << holdfast::Message(written) << "\n";
    return static_cast<int>(holdfast::ExitCode::kRefused);
  }
  return exit_code;
}
