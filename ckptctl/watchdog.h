// Ends the program when a wait that is bounded does not end: gRPC waits for ever, whatever the
// deadline, when it cannot have the threads or the memory to notice it.
//
//   EnableWatchdog(json);                       // in main
//   { Watchdog watchdog(timeout, "status"); … } // the wait
//
// One at a time. Without EnableWatchdog it does nothing: a test's process is not ckptctl's.
#pragma once

#include <string>

#include "base/clock.h"

namespace holdfast {

// What SIGALRM does from now on. With `json` the error is told on stdout too.
void EnableWatchdog(bool json);
bool WatchdogEnabled();  // whether this is the program, and no test

// What it writes to stdout before it says anything: what leaves the terminal as it was. Empty:
// none.
void SetWatchdogFarewell(const std::string& text);

class Watchdog {
 public:
  // Somewhat later than the timeout, the program says that `socket` did not answer, and exits as it
  // does for every daemon that does not (ExitCode::kUnreachable).
  Watchdog(Duration timeout, const std::string& socket);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
};

}  // namespace holdfast
