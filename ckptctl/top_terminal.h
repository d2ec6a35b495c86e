// The terminal while something is drawn on it over and over: its alternate screen, and what it was
// before on every way out: the end of the object, SIGINT, SIGTERM, and the watchdog.
//
//   TopTerminal terminal;                      // stdout is a terminal
//   terminal.Draw(RenderTop(model, terminal.screen()));
//
// One at a time. SIGINT and SIGTERM end the program while it lives, with exit code 0; Ctrl-Z gives
// the terminal back until the program goes on.
#pragma once

#include <string>

#include "ckptctl/top_view.h"

namespace holdfast {

// Whether texts may be UTF-8: as LC_ALL, LC_CTYPE or LANG says, the first that is set.
bool LocaleIsUtf8(const char* lc_all, const char* lc_ctype, const char* lang);
bool LocaleIsUtf8();

// A terminal that can be drawn on: not TERM=dumb, nor without a name.
bool CanDraw(const char* term);

// "\x1b[H" and the lines, each cleared to its end, so that nothing of the frame before stays.
std::string Redraw(const std::string& frame);

class TopTerminal {
 public:
  TopTerminal();
  ~TopTerminal();
  TopTerminal(const TopTerminal&) = delete;
  TopTerminal& operator=(const TopTerminal&) = delete;

  TopScreen screen() const;  // as large as it is now
  void Draw(const std::string& frame);
};

}  // namespace holdfast
