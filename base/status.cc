#include "base/status.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/errno_status.h"

namespace holdfast {
namespace {

constexpr absl::string_view kErrnoPayload = "holdfast/errno";

absl::StatusCode CodeOfErrno(int error) {
  switch (error) {
    case ENOENT:
      return absl::StatusCode::kNotFound;
    case EEXIST:
      return absl::StatusCode::kAlreadyExists;
    case ENOSPC:
    case EDQUOT:
    case ENOMEM:
    case EMFILE:
    case ENFILE:
      return absl::StatusCode::kResourceExhausted;
    case EACCES:
    case EPERM:
      return absl::StatusCode::kPermissionDenied;
    case EINVAL:
      return absl::StatusCode::kInvalidArgument;
    case ENOTEMPTY:
      return absl::StatusCode::kFailedPrecondition;
    case EAGAIN:
    case EINTR:
    case ECONNREFUSED:
    case ECONNRESET:
    case ECONNABORTED:
    case EPIPE:
      return absl::StatusCode::kUnavailable;
    case ETIMEDOUT:
      return absl::StatusCode::kDeadlineExceeded;
    case EIO:
      return absl::StatusCode::kDataLoss;
    default:
      return absl::StatusCode::kInternal;
  }
}

}  // namespace

absl::Status ErrnoStatus(int error, std::string_view operation, std::string_view thing) {
  // strerrordesc_np and strerrorname_np are thread-safe and independent of the locale; strerror is
  // neither.
  const char* description = ::strerrordesc_np(error);
  const char* name = ::strerrorname_np(error);
  std::string message = absl::StrCat(ToAbsl(operation), " '", ToAbsl(thing), "': ");
  if (description != nullptr && name != nullptr) {
    absl::StrAppend(&message, description, " (", name, ")");
  } else {
    absl::StrAppend(&message, "error ", error);
  }
  absl::Status status(CodeOfErrno(error), message);
  status.SetPayload(kErrnoPayload, absl::Cord(absl::StrCat(error)));
  return status;
}

std::optional<int> ErrnoOf(const absl::Status& status) {
  const auto error = status.GetPayload(kErrnoPayload);
  int number = 0;
  return error && absl::SimpleAtoi(std::string(*error), &number) ? std::optional<int>(number)
                                                                 : std::nullopt;
}

bool IsErrno(const absl::Status& status) {
  return ErrnoOf(status).has_value();
}

bool IsNoSpace(const absl::Status& status) {
  const std::optional<int> error = ErrnoOf(status);
  return error == ENOSPC || error == EDQUOT;
}

bool MayPass(const absl::Status& status) {
  const std::optional<int> error = ErrnoOf(status);
  constexpr std::array<int, 10> kPassing = {EIO,    ESTALE, ETIMEDOUT, EACCES, EPERM,
                                            ENOMEM, EMFILE, ENFILE,    EINTR,  EAGAIN};
  return error && std::find(kPassing.begin(), kPassing.end(), *error) != kPassing.end();
}

bool IsNotADirectory(const absl::Status& status) {
  return ErrnoOf(status) == ENOTDIR;
}

absl::Status Annotate(const absl::Status& status, std::string_view context) {
  if (status.ok()) {
    return status;
  }
  absl::Status annotated(status.code(), absl::StrCat(ToAbsl(context), ": ", status.message()));
  status.ForEachPayload([&](absl::string_view type, const absl::Cord& payload) {
    annotated.SetPayload(type, payload);
  });
  return annotated;
}

std::string ToString(const absl::Status& status) {
  // Not what Abseil makes of it, which shows payloads.
  return status.ok()
             ? "OK"
             : absl::StrCat(absl::StatusCodeToString(status.code()), ": ", status.message());
}

std::string Message(const absl::Status& status) {
  return std::string(status.message());
}

}  // namespace holdfast
