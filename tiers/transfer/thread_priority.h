// How much of the machine a thread that drains may have: its I/O priority and its niceness. By
// thread id, so that an owner can change them while the thread runs.
//
//   ThreadPriority priority{.io = 6, .nice = 10};
//   SetThreadPriority(CurrentThreadId(), priority);
//
// Plain functions, any thread.
#pragma once

#include <sys/types.h>

#include "absl/status/status.h"

namespace holdfast {

inline constexpr int kIoPriorityIdle = 8;

struct ThreadPriority {
  int io =
      6;  // 0 (first) to 7: best effort; kIoPriorityIdle: only when nobody else wants the drive
  int nice = 10;  // 0 to 19
  bool operator==(const ThreadPriority&) const = default;
};

pid_t CurrentThreadId();
// InvalidArgument when out of range.
absl::Status CheckThreadPriority(const ThreadPriority& priority);
// The same; PermissionDenied when raising it is not allowed to this user
// (what can be set is set); NotFound when the thread has ended.
absl::Status SetThreadPriority(pid_t thread, const ThreadPriority& priority);

}  // namespace holdfast
