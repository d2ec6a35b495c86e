#include "server/quiet_windows.h"

#include <algorithm>

namespace holdfast {

void QuietWindows::Says(uint64_t who, NetworkFlag flag, MonotonicTime now) {
  const auto [it, is_new] = speakers_.try_emplace(who, Speaker{flag, now});
  Speaker& speaker = it->second;
  // A stretch begins when it is first seen: the client's clock is not believed, and one that
  // nobody saw held nothing.
  if (!is_new && (flag.stretch != speaker.flag.stretch || speaker.flag.open == 0)) {
    speaker.since = now;
  }
  speaker.flag = flag;
}

void QuietWindows::Gone(uint64_t who) {
  speakers_.erase(who);
}

bool QuietWindows::Counts(const Speaker& speaker, MonotonicTime now) {
  return speaker.flag.open > 0 && now - speaker.since < kBusyStretchMax;
}

size_t QuietWindows::busy(MonotonicTime now) const {
  return static_cast<size_t>(
      std::count_if(speakers_.begin(), speakers_.end(),
                    [now](const auto& one) { return Counts(one.second, now); }));
}

bool QuietWindows::Holds(MonotonicTime now) {
  Note(now);
  holding_ = busy(now) > 0 && HeldLately(now) < kHeldMax;
  noted_until_ = now;
  return holding_;
}

void QuietWindows::NobodyWaits(MonotonicTime now) {
  Note(now);
  holding_ = false;
}

// The time since the last look, which was a held one.
void QuietWindows::Note(MonotonicTime now) {
  if (!holding_ || now <= noted_until_) {
    return;
  }
  held_ += now - noted_until_;
  int64_t from = std::max(noted_until_.ns, now.ns - kHeldPeriod.count());
  while (from < now.ns) {
    const int64_t number = from / kPart.count();
    const int64_t end = std::min(now.ns, (number + 1) * kPart.count());
    Part& part = parts_[static_cast<size_t>(number) % parts_.size()];
    if (part.number != number) {
      part = {number, Duration(0)};
    }
    part.held += Duration(end - from);
    from = end;
  }
  noted_until_ = now;
}

// In the last period, and in what is left of the part in which it began: rather more than less.
Duration QuietWindows::HeldLately(MonotonicTime now) const {
  const int64_t last = now.ns / kPart.count();
  Duration sum{0};
  for (const Part& part : parts_) {
    if (part.number + static_cast<int64_t>(parts_.size()) > last) {
      sum += part.held;
    }
  }
  return sum;
}

}  // namespace holdfast
