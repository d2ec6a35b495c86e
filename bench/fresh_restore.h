// A restore in a process that was just started, as after a crash: nothing of the slot is mapped in
// it yet. The process is this program, started again with kFreshRestoreChild; it measures itself,
// and the ceiling beside it, and tells its figures on its standard output.
#pragma once

#include <string>
#include <vector>

#include "bench/harness.h"

namespace holdfast::bench {

inline constexpr char kFreshRestoreChild[] = "--restore-in-fresh-process";

struct FreshRestore {
  double whole = 0;             // seconds of the call
  double copied = 0;            // of that, mapping, copying and verifying
  std::vector<double> ceiling;  // seconds of each of PlainCopies
};

// Starts the process and waits for its figures; ends the program with a message if there are none.
FreshRestore RestoreInFreshProcess(const Daemon& daemon, const std::string& job, const Size& size,
                                   int threads);

// The process' own main.
int RunFreshRestoreChild(int argc, char** argv);

}  // namespace holdfast::bench
