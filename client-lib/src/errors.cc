#include "client-lib/src/errors.h"

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tiers/image/layout_rules.h"

namespace holdfast::client {
namespace {

Code FromAbslCode(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kOk:
      return Code::kOk;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
      return Code::kInvalidArgument;
    case absl::StatusCode::kNotFound:
      return Code::kNotFound;
    case absl::StatusCode::kDeadlineExceeded:
      return Code::kDeadlineExceeded;
    case absl::StatusCode::kUnavailable:
      return Code::kUnavailable;
    case absl::StatusCode::kDataLoss:
      return Code::kCorrupt;
    case absl::StatusCode::kResourceExhausted:
      return Code::kNoRoom;
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kFailedPrecondition:
      return Code::kRefused;
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kCancelled:
      return Code::kAbandoned;
    default:
      return Code::kInternal;
  }
}

}  // namespace

Status FromAbslStatus(const absl::Status& status, std::string_view context) {
  if (status.ok()) {
    return Status();
  }
  return Status(FromAbslCode(status.code()), absl::StrCat(ToAbsl(context), ": ", status.message()));
}

Status WithContext(const Status& status, std::string_view context) {
  return status.ok() ? status
                     : Status(status.code(), absl::StrCat(ToAbsl(context), ": ", status.message()),
                              status.reason());
}

Status SystemError(Code code, int error, std::string_view what) {
  const char* description = ::strerrordesc_np(error);
  const char* name = ::strerrorname_np(error);
  return Status(code, description != nullptr && name != nullptr
                          ? absl::StrCat(ToAbsl(what), ": ", description, " (", name, ")")
                          : absl::StrCat(ToAbsl(what), ": error ", error));
}

Code CodeOfFileError(int error) {
  switch (error) {
    case EIO:
    case ENXIO:
    case ENODEV:
    case EISDIR:
    case ESTALE:
    case EBADMSG:
    case EUCLEAN:
    case EHWPOISON:
      return Code::kCorrupt;
    default:
      return Code::kInternal;
  }
}

std::string ForWire(std::string_view text, size_t bytes_max) {
  std::string_view cut = text.substr(0, bytes_max);
  // A character that the cut went through has at most three bytes left.
  for (int i = 0;
       i < 3 && cut.size() < text.size() && !cut.empty() && !image_internal::IsValidUtf8(cut);
       ++i) {
    cut.remove_suffix(1);
  }
  std::string out(cut);
  if (!image_internal::IsValidUtf8(out)) {
    for (char& c : out) {
      if (static_cast<unsigned char>(c) >= 0x80) {
        c = '?';
      }
    }
  }
  return out;
}

Status ForkedError() {
  return Status(Code::kForked,
                "this process was forked from the one that opened the job and has no part in it: "
                "open a job of its own, "
                "or leave checkpoints to the parent");
}

}  // namespace holdfast::client
