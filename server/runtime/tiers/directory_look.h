// What lies at the places that settings name, asked in threads of their own: a call into a mount
// that hangs may never return.
//
//   const auto looks = LookAtDirectories(env, {"/mnt/nvme0/holdfast"}, std::chrono::seconds(5));
//   if (looks[0].ok() && looks[0]->filesystem.type == "proc") …
//
// Plain function, any thread. A thread that hangs stays behind: `env` must live as long as the
// process.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/env.h"

namespace holdfast {

struct DirectoryLook {
  std::string there;  // the directory, or the nearest one above it that exists
  uint64_t device = 0;
  FilesystemInfo filesystem;  // of `there`
  // Device and inode of `there` and of each directory above it, up to the root.
  std::vector<std::pair<uint64_t, uint64_t>> above;
  std::vector<std::string> missing;  // names below `there` that are still to be made
};

// One for each, in their order. All are asked at once; DeadlineExceeded for those that have not
// answered after `timeout`. FailedPrecondition: something on the way is no directory.
std::vector<absl::StatusOr<DirectoryLook>> LookAtDirectories(Env& env,
                                                             const std::vector<std::string>& dirs,
                                                             Duration timeout);

// The path without ".", "..", and slashes that say nothing.
std::string NormalPath(std::string_view path);

// Whether a directory is another one, or lies inside it, whatever they are called. Compares what
// the file system says; where neither exists yet, the names below what does.
bool IsWithin(const DirectoryLook& inner, const DirectoryLook& outer);

}  // namespace holdfast
