// fio as the ceiling of a drive: io_uring and O_DIRECT on an existing file.
#pragma once

#include <cstdint>
#include <string>

namespace holdfast::bench {

struct FioRun {
  std::string path;  // an existing file of at least `bytes`
  bool write = false;
  uint64_t bytes = 0;
  uint64_t block_bytes = 0;
  size_t depth = 0;
};

// Seconds that the I/O took, by fio's own clock. Ends the program with a message when there is no
// fio.
double TimeFio(const FioRun& run);

}  // namespace holdfast::bench
