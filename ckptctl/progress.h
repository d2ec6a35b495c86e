// A line on the terminal that says how far a command is: drawn over itself, at most ten times a
// second, not before the command has taken a second, and gone when the answer comes. Where nobody
// looks (no terminal, --json) nothing is drawn.
//
//   ProgressLine line(context);
//   for (…) { line.Draw([&] { return absl::StrCat("planning: ", done, " of ", ranks); }); … }
//
//   { const WaitingLine waiting(context, "waiting for ckptd"); … a call that blocks … }
//
// Whoever writes to the context's streams clears the line first, or has ended it. One thread uses a
// ProgressLine. A WaitingLine has a thread of its own, which its end waits for.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "base/clock.h"
#include "ckptctl/commands.h"

namespace holdfast {

inline constexpr std::chrono::seconds kProgressAfter(1);

class ProgressLine {
 public:
  explicit ProgressLine(const Context& context, Duration first_after = kProgressAfter);
  ~ProgressLine() { Clear(); }
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  // The text is made only when it is shown; names of others in it are escaped.
  void Draw(const std::function<std::string()>& text);
  void Clear();

 private:
  const Context& context_;
  MonotonicTime next_;
  bool drawn_ = false;
};

class WaitingLine {
 public:
  // "rebuild: waiting for ckptd, 3 s": the command, what it does, for how long.
  WaitingLine(const Context& context, const std::string& what,
              Duration first_after = kProgressAfter);
  ~WaitingLine();
  WaitingLine(const WaitingLine&) = delete;
  WaitingLine& operator=(const WaitingLine&) = delete;

 private:
  struct Drawing;
  std::unique_ptr<Drawing> drawing_;  // null: nobody looks
};

}  // namespace holdfast
