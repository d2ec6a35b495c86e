// Who takes the room that somebody lacks, for people. Other users' jobs are not named.
//
//   HoldersText({{"a", 3 << 30, true}, {"", 1 << 30, false}})
//   // "; of your jobs 'a' holds 3 GiB, jobs of other users hold 1 GiB"
//
// Plain function, thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace holdfast {

struct Holder {
  std::string job;
  uint64_t bytes = 0;
  bool own = false;  // of the user who is told
};

// Empty, or it begins with "; ".
std::string HoldersText(std::vector<Holder> holders);

}  // namespace holdfast
