#include "ckptctl/way_out.h"

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/errno_status.h"
#include "base/units.h"

namespace holdfast {

std::string WayOutOfDirectory(const absl::Status& failed, uint64_t bytes_left,
                              const std::string& again) {
  if (IsNoSpace(failed)) {
    return absl::StrCat("; make room for ", FormatBytes(bytes_left), " there, and ", again);
  }
  switch (ErrnoOf(failed).value_or(0)) {
    case EFBIG:
      return absl::StrCat(
          "; raise the limit on a file's size (ulimit -f), or, where the file system itself has "
          "none that large, name a directory on another; and ",
          again);
    case EROFS:
      return "; name a directory that can be written to: this file system is mounted read-only";
    case ENOTDIR:
    case EISDIR:
    case EEXIST:
      return "; something else has that name: move it away, or name another directory";
    case ENAMETOOLONG:
      return "; name a directory with a shorter path";
    default:
      return "";
  }
}

}  // namespace holdfast
