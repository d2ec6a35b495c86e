#include "base/status.h"

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace holdfast {
namespace {

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
  return absl::Status(CodeOfErrno(error), message);
}

absl::Status Annotate(const absl::Status& status, std::string_view context) {
  if (status.ok()) {
    return status;
  }
  return absl::Status(status.code(), absl::StrCat(ToAbsl(context), ": ", status.message()));
}

std::string ToString(const absl::Status& status) {
  return status.ToString();
}

std::string Message(const absl::Status& status) {
  return std::string(status.message());
}

}  // namespace holdfast
