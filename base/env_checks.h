// What every Env refuses before it looks at the file system. For implementations of Env only.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "base/env.h"

namespace holdfast {

// Absolute, no zero byte, shorter than PATH_MAX.
absl::Status CheckPath(std::string_view operation, const std::string& path);
// offset + bytes fits a file offset.
absl::Status CheckRange(std::string_view operation, const std::string& path, uint64_t offset,
                        uint64_t bytes);
// "a' to 'b", the thing of an error about two paths.
std::string TwoPaths(const std::string& from, const std::string& to);

// Refusals that both Envs word alike.
absl::Status NoDirect(std::string_view operation, const std::string& path);
absl::Status NoAllocate(const std::string& path);
absl::Status IsSymlink(std::string_view operation, const std::string& path);
absl::Status TooManyNames(const std::string& directory, size_t names_max);

// The value of Lustre's extended attribute "lustre.lov" that sets the striping: lov_user_md_v1 of
// lustre_user.h, little-endian.
std::string EncodeLustreStriping(const Striping& striping);

}  // namespace holdfast
