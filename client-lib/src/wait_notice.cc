#include "client-lib/src/wait_notice.h"

#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast::client {
namespace {

// Never destroyed: a thread may be kept to the end of the process.
Warn& DefaultWarn() {
  static Warn& warn = *new Warn();
  return warn;
}

}  // namespace

void SetDefaultWarn(Warn warn) {
  DefaultWarn() = std::move(warn);
}

void SayWaiting(const Warn& warn, std::string_view what, std::chrono::nanoseconds kept,
                std::string_view why) {
  const auto tenths = std::chrono::round<std::chrono::duration<int64_t, std::deci>>(kept).count();
  const std::string line = absl::StrCat(ToAbsl(what), " has waited for ", tenths / 10, ".",
                                        tenths % 10, " s: ", ToAbsl(why));
  if (warn) {
    warn(line);
  } else if (DefaultWarn()) {
    DefaultWarn()(line);
  } else {
    std::fprintf(stderr, "holdfast: %s\n", line.c_str());
  }
}

void Tell(WaitNotice::Next next, std::chrono::nanoseconds kept, DaemonLink& link, const Warn& warn,
          const Waiting& waiting) {
  if (next == WaitNotice::Next::kAsk) {
    link.Ask();
  }
  if (next != WaitNotice::Next::kSay) {
    return;
  }
  const std::string holdup = link.Holdup();
  SayWaiting(warn, absl::StrCat("job '", link.identity().job, "': ", waiting.what), kept,
             holdup.empty() ? waiting.why : holdup);
}

}  // namespace holdfast::client
