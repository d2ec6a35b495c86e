// What to do where a directory that a command was told to write into cannot take it.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace holdfast {

// Goes on behind the error's own words; empty where the directory is not to blame:
//   "; make room for 1.2 GiB there, and the same command goes on"
std::string WayOutOfDirectory(const absl::Status& failed, uint64_t bytes_left,
                              const std::string& again);

}  // namespace holdfast
