// Byte sizes and durations for people: "1.5 GiB", "250 ms"; and back.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "base/clock.h"

namespace holdfast {

inline constexpr uint64_t kKiB = 1024;
inline constexpr uint64_t kMiB = 1024 * kKiB;
inline constexpr uint64_t kGiB = 1024 * kMiB;

inline constexpr uint64_t RoundUp(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::string FormatBytes(uint64_t bytes);                // "0 B", "1023 B", "1.5 GiB"
std::string FormatRate(uint64_t bytes, Duration took);  // "9.8 GB/s" (decimal, as hardware is sold)
std::string FormatDuration(Duration d);                 // "850 ns", "12.3 ms", "4.2 s", "3 min 5 s"
// "2GiB", "512 MiB", "1e9", "4096", "10GB": whole bytes; InvalidArgument with what was expected
// otherwise.
absl::StatusOr<uint64_t> ParseBytes(std::string_view text);
absl::StatusOr<Duration> ParseDuration(std::string_view text);  // "250ms", "10s", "5min", "1h"

}  // namespace holdfast
