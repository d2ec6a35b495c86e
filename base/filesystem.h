// What kind of file system a path lies on and how much room it has. Part of Env::System.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "base/env.h"

namespace holdfast {

absl::StatusOr<FilesystemInfo> AskFilesystem(const std::string& path);

// By its type, as statfs or mountinfo name it: made by the kernel as it is looked at, so that
// nothing can be kept there.
bool KeepsNoFiles(std::string_view type);

}  // namespace holdfast
