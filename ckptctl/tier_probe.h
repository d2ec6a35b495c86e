// Tries what the durable tiers need of a directory: writing, O_DIRECT, hard links. In a process of
// its own for each directory, since a call into a hung file system may never return, and a process
// with a thread in such a call cannot end either.
//
//   for (const DirectoryProbe& probe : ProbeDirectories({"/mnt/nvme0", "/mnt/lustre"}, 3 s)) …
//
// Leaves nothing behind, unless the file system hangs in the middle: then a file
// `.holdfast-doctor-…`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"

namespace holdfast {

struct DirectoryProbe {
  std::string dir;
  int start_error = 0;   // errno: the process that should look could not be started
  std::string stuck_in;  // the call that did not return in time; what comes after it is not known
  int look_error = 0;    // errno of stat; 0 for each that worked
  bool is_directory = false;
  int write_error = 0;   // of creating, writing and syncing a file
  int direct_error = 0;  // of writing it with O_DIRECT
  int link_error = 0;    // of a hard link to it
  uint64_t bytes_total = 0;
  uint64_t bytes_free = 0;
};

// One for each, in their order. All at once; waits for `timeout` at most.
std::vector<DirectoryProbe> ProbeDirectories(const std::vector<std::string>& dirs,
                                             Duration timeout);

}  // namespace holdfast
