// What kind of file system a path lies on and how much room it has. Part of Env::System.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "base/env.h"

namespace holdfast {

absl::StatusOr<FilesystemInfo> AskFilesystem(const std::string& path);

}  // namespace holdfast
