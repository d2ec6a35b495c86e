#include "ckptctl/top_terminal.h"

#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <string_view>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "ckptctl/watchdog.h"

namespace holdfast {
namespace {

constexpr std::string_view kEnter = "\x1b[?1049h\x1b[?25l";  // alternate screen, no cursor
constexpr std::string_view kLeave = "\x1b[?25h\x1b[?1049l";
constexpr size_t kColumnsElse = 80;  // where the terminal does not say
constexpr size_t kRowsElse = 24;

// (Also of signal handlers. A terminal that is gone takes nothing.)
void Write(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(STDOUT_FILENO, text.data(), text.size());
    if (written <= 0) {
      if (written < 0 && errno == EINTR) {
        continue;
      }
      return;
    }
    text.remove_prefix(static_cast<size_t>(written));
  }
}

void OnEnd(int) {
  Write(kLeave);
  ::_exit(0);
}

void OnStop(int) {
  const int before = errno;
  Write(kLeave);
  ::raise(SIGSTOP);
  Write(kEnter);
  errno = before;
}

void Handle(int signal, void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  ::sigaction(signal, &action, nullptr);
}

}  // namespace

bool LocaleIsUtf8(const char* lc_all, const char* lc_ctype, const char* lang) {
  for (const char* name : {lc_all, lc_ctype, lang}) {
    if (name != nullptr && *name != '\0') {
      const std::string lower = absl::AsciiStrToLower(name);
      return absl::StrContains(lower, "utf-8") || absl::StrContains(lower, "utf8");
    }
  }
  return false;
}

bool LocaleIsUtf8() {
  return LocaleIsUtf8(std::getenv("LC_ALL"), std::getenv("LC_CTYPE"), std::getenv("LANG"));
}

bool CanDraw(const char* term) {
  return term != nullptr && *term != '\0' && std::string_view(term) != "dumb";
}

std::string Redraw(const std::string& frame) {
  std::string out = "\x1b[H";
  std::string_view gap;
  // The last line has no end: the screen would move up.
  for (const auto line : absl::StrSplit(absl::StripSuffix(frame, "\n"), '\n')) {
    out.append(gap).append(FromAbsl(line)).append("\x1b[K");
    gap = "\r\n";
  }
  return out.append("\x1b[J");
}

TopTerminal::TopTerminal() {
  SetWatchdogFarewell(std::string(kLeave));
  Handle(SIGINT, OnEnd);
  Handle(SIGTERM, OnEnd);
  Handle(SIGTSTP, OnStop);
  Write(kEnter);
}

TopTerminal::~TopTerminal() {
  Write(kLeave);
  Handle(SIGTSTP, SIG_DFL);
  Handle(SIGINT, SIG_DFL);
  Handle(SIGTERM, SIG_DFL);
  SetWatchdogFarewell("");
}

TopScreen TopTerminal::screen() const {
  TopScreen screen{kColumnsElse, kRowsElse, LocaleIsUtf8()};
  winsize size = {};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 && size.ws_row > 0) {
    screen.columns = size.ws_col;
    screen.rows = size.ws_row;
  }
  return screen;
}

void TopTerminal::Draw(const std::string& frame) {
  Write(Redraw(frame));
}

}  // namespace holdfast
