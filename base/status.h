// Errors are values: absl::Status and absl::StatusOr everywhere inside Holdfast.
//
// A message names the operation, the thing, the cause and, where there is one, the way out:
//   "open '/dev/shm/holdfast/slot-000003': No space left on device (ENOSPC)".
// The call that failed adds operation, thing and errno; callers add context only when it says
// something new.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace holdfast {

// Status for a failed system call. The code follows errno: ENOENT → NotFound, EEXIST →
// AlreadyExists, ENOSPC/EDQUOT/ENOMEM/EMFILE/ENFILE → ResourceExhausted, EACCES/EPERM →
// PermissionDenied, EINVAL → InvalidArgument, ENOTEMPTY → FailedPrecondition,
// EAGAIN/EINTR/ECONN*/EPIPE → Unavailable, ETIMEDOUT → DeadlineExceeded, EIO → DataLoss, otherwise
// Internal.
absl::Status ErrnoStatus(int error, std::string_view operation, std::string_view thing);

// The same status with "<context>: " before its message; OK stays OK.
absl::Status Annotate(const absl::Status& status, std::string_view context);

// "NOT_FOUND: open …" without Abseil's view types leaking into callers.
std::string ToString(const absl::Status& status);
std::string Message(const absl::Status& status);

// absl::string_view is a type of its own in the Abseil that Debian 12 ships; these two cross the
// border.
inline absl::string_view ToAbsl(std::string_view s) {
  return {s.data(), s.size()};
}
inline std::string_view FromAbsl(absl::string_view s) {
  return {s.data(), s.size()};
}

}  // namespace holdfast

#define HF_CONCAT_INNER_(a, b) a##b
#define HF_CONCAT_(a, b) HF_CONCAT_INNER_(a, b)

// HF_RETURN_IF_ERROR(env->Sync(path));
#define HF_RETURN_IF_ERROR(expr)                              \
  do {                                                        \
    if (absl::Status hf_status_ = (expr); !hf_status_.ok()) { \
      return hf_status_;                                      \
    }                                                         \
  } while (false)

// HF_ASSIGN_OR_RETURN(const std::string text, env->ReadFile(path, limit));
#define HF_ASSIGN_OR_RETURN(lhs, expr) \
  HF_ASSIGN_OR_RETURN_IMPL_(HF_CONCAT_(hf_or_, __LINE__), lhs, expr)
#define HF_ASSIGN_OR_RETURN_IMPL_(tmp, lhs, expr) \
  auto tmp = (expr);                              \
  if (!tmp.ok()) {                                \
    return std::move(tmp).status();               \
  }                                               \
  lhs = std::move(tmp).value()
