#include "ckptctl/watchdog.h"

#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "ckptctl/commands.h"
#include "ckptctl/json.h"
#include "ckptctl/text.h"

namespace holdfast {
namespace {

// Whoever keeps its deadlines is never overtaken.
constexpr Duration kGrace = std::chrono::seconds(2);

bool enabled = false;
bool tell_json = false;
// Set while no timer runs, read by the signal handler.
std::string message;       // NOLINT(runtime/string)
std::string json_message;  // NOLINT(runtime/string)
std::string farewell;      // NOLINT(runtime/string)

void OnAlarm(int) {
  static_cast<void>(!::write(STDOUT_FILENO, farewell.data(), farewell.size()));
  static_cast<void>(!::write(STDERR_FILENO, message.data(), message.size()));
  static_cast<void>(!::write(STDOUT_FILENO, json_message.data(), json_message.size()));
  ::_exit(static_cast<int>(ExitCode::kUnreachable));
}

void SetAlarm(Duration in) {
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(in).count();
  itimerval timer = {};
  timer.it_value.tv_sec = us / 1'000'000;
  timer.it_value.tv_usec = us % 1'000'000;
  ::setitimer(ITIMER_REAL, &timer, nullptr);
}

}  // namespace

void EnableWatchdog(bool json) {
  struct sigaction action {};
  action.sa_handler = OnAlarm;
  ::sigaction(SIGALRM, &action, nullptr);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGALRM);  // whoever started us may have blocked it
  ::pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  enabled = true;
  tell_json = json;
}

void SetWatchdogFarewell(const std::string& text) {
  farewell = text;
}

bool WatchdogEnabled() {
  return enabled;
}

Watchdog::Watchdog(Duration timeout, const std::string& socket) {
  if (!enabled) {
    return;
  }
  const std::string text =
      absl::StrCat("no answer from the daemon at ", socket, " within ",
                   std::chrono::duration<double>(timeout).count(),
                   " s, and the wait for it did not end by itself: are threads or memory limited "
                   "(ulimit -u, ulimit -v, pids.max)?");
  message = absl::StrCat("ckptctl: ", EscapeText(text), "\n");
  json_message.clear();
  if (tell_json) {
    nlohmann::ordered_json json;
    json["error"] = {{"code", "DEADLINE_EXCEEDED"},
                     {"message", text},
                     {"exit_code", static_cast<int>(ExitCode::kUnreachable)}};
    json_message = DumpJson(json) + "\n";
  }
  SetAlarm(timeout + kGrace);
}

Watchdog::~Watchdog() {
  if (enabled) {
    SetAlarm(Duration(0));
  }
}

}  // namespace holdfast
