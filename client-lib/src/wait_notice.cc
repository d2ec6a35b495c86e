#include "client-lib/src/wait_notice.h"

#include <cstdio>

#include "absl/strings/str_cat.h"

namespace holdfast::client {

void Tell(WaitNotice::Next next, std::chrono::nanoseconds kept, DaemonLink& link, const Warn& warn,
          const Waiting& waiting) {
  if (next == WaitNotice::Next::kAsk) {
    link.Ask();
  }
  if (next != WaitNotice::Next::kSay) {
    return;
  }
  const std::string holdup = link.Holdup();
  const auto tenths = std::chrono::round<std::chrono::duration<int64_t, std::deci>>(kept).count();
  const std::string line =
      absl::StrCat("job '", link.identity().job, "': ", waiting.what, " has waited for ",
                   tenths / 10, ".", tenths % 10, " s: ", holdup.empty() ? waiting.why : holdup);
  if (warn) {
    warn(line);
  } else {
    std::fprintf(stderr, "holdfast: %s\n", line.c_str());
  }
}

}  // namespace holdfast::client
