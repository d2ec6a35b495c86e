// What every Env refuses before it looks at the file system. For implementations of Env only.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace holdfast {

// Absolute, no zero byte, shorter than PATH_MAX.
absl::Status CheckPath(std::string_view operation, const std::string& path);
// offset + bytes fits a file offset.
absl::Status CheckRange(std::string_view operation, const std::string& path, uint64_t offset,
                        uint64_t bytes);
// "a' to 'b", the thing of an error about two paths.
std::string TwoPaths(const std::string& from, const std::string& to);

}  // namespace holdfast
