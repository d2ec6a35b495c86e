#include "base/sync_point.h"

#ifdef HOLDFAST_SYNC_POINTS

#include <signal.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <string>
#include <string_view>

namespace holdfast {
namespace {

struct SyncPoint {
  std::string name;
  int signal_number = 0;
  uint64_t pass = 1;
  std::atomic<uint64_t> passes{0};
};

[[noreturn]] void Refuse(std::string_view entry) {
  std::fprintf(
      stderr,
      "HOLDFAST_SYNC_POINT: '%.*s': expected <name>:kill or <name>:stop, with or without @<pass>\n",
      static_cast<int>(entry.size()), entry.data());
  std::abort();
}

void ParseEntry(std::string_view entry, std::deque<SyncPoint>& points) {
  const size_t colon = entry.find(':');
  if (colon == std::string_view::npos || colon == 0) {
    Refuse(entry);
  }
  SyncPoint& point = points.emplace_back();
  point.name = entry.substr(0, colon);
  std::string_view action = entry.substr(colon + 1);
  const size_t at = action.find('@');
  if (at != std::string_view::npos) {
    const std::string_view digits = action.substr(at + 1);
    if (digits.empty() || digits.size() > 9 ||
        digits.find_first_not_of("0123456789") != std::string_view::npos) {
      Refuse(entry);
    }
    point.pass = std::strtoull(std::string(digits).c_str(), nullptr, 10);
    action = action.substr(0, at);
  }
  if (point.pass == 0) {
    Refuse(entry);
  }
  if (action == "kill") {
    point.signal_number = SIGKILL;
  } else if (action == "stop") {
    point.signal_number = SIGSTOP;
  } else {
    Refuse(entry);
  }
}

// Never destroyed: threads may pass sync points while the process exits.
std::deque<SyncPoint>* ParseEnvironment() {
  auto* points = new std::deque<SyncPoint>();
  const char* text = std::getenv("HOLDFAST_SYNC_POINT");
  std::string_view rest = text == nullptr ? "" : text;
  while (!rest.empty()) {
    const size_t comma = rest.find(',');
    ParseEntry(rest.substr(0, comma), *points);
    rest = comma == std::string_view::npos ? "" : rest.substr(comma + 1);
  }
  return points;
}

enum State : int { kNotParsed, kNone, kSome };
std::atomic<int> g_state{kNotParsed};

}  // namespace

void PassSyncPoint(const char* name) {
  if (g_state.load(std::memory_order_relaxed) == kNone) {
    return;
  }
  static std::deque<SyncPoint>* const points = ParseEnvironment();
  g_state.store(points->empty() ? kNone : kSome, std::memory_order_relaxed);
  for (SyncPoint& point : *points) {
    if (point.name == name &&
        point.passes.fetch_add(1, std::memory_order_relaxed) + 1 == point.pass) {
      ::raise(point.signal_number);  // this thread goes no further, whatever the others do
    }
  }
}

}  // namespace holdfast

#endif  // HOLDFAST_SYNC_POINTS
