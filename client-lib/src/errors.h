// How errors travel inside the client library: as the public holdfast::Status, whose codes the
// caller will see.
//
//   HF_TRY(mapping.Check());
//   HF_TRY_ASSIGN(Grant grant, Begin(step));
//   return FromAbslStatus(record.status(), "restore step 12");
//
// Plain functions, thread-safe.
#pragma once

#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "holdfast/status.h"

#define HF_TRY(expr)                                          \
  do {                                                        \
    if (::holdfast::Status hf_try_ = (expr); !hf_try_.ok()) { \
      return hf_try_;                                         \
    }                                                         \
  } while (false)

#define HF_TRY_CONCAT_INNER_(a, b) a##b
#define HF_TRY_CONCAT_(a, b) HF_TRY_CONCAT_INNER_(a, b)
#define HF_TRY_ASSIGN(lhs, expr) HF_TRY_ASSIGN_IMPL_(HF_TRY_CONCAT_(hf_try_, __LINE__), lhs, expr)
#define HF_TRY_ASSIGN_IMPL_(tmp, lhs, expr) \
  auto tmp = (expr);                        \
  if (!tmp.ok()) {                          \
    return tmp.status();                    \
  }                                         \
  lhs = std::move(tmp).value()

namespace holdfast::client {

Status FromAbslStatus(const absl::Status& status, std::string_view context);

// The same status with "<context>: " before its message.
Status WithContext(const Status& status, std::string_view context);

// "save 'w': No space left on device (ENOSPC)"; always `code`.
Status SystemError(Code code, int error, std::string_view what);

// What a failed call on a file that the daemon passed says: kCorrupt if the file itself can't be
// read, whoever tries; kInternal if this process lacks something.
Code CodeOfFileError(int error);

// Well-formed UTF-8 of at most `bytes_max` bytes: what a protobuf string field may hold.
std::string ForWire(std::string_view text, size_t bytes_max);

Status ForkedError();

// Runs `call` at the public boundary: nothing that it throws (memory that ran out, in the main)
// gets past it.
template <typename Call>
auto NoThrow(const Call& call) noexcept -> decltype(call()) {
  try {
    return call();
  } catch (const std::exception& error) {
    return Status(Code::kInternal, std::string("the client library failed: ") + error.what());
  }
}

}  // namespace holdfast::client
