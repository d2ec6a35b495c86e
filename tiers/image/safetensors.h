// A strict reader of safetensors headers: for images whose record is gone, for tests, for import.
// Trusts nothing: bounds, overflow, depth, duplicate keys, holes and overlaps are errors.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "tiers/image/layout.h"

namespace holdfast {

struct SafetensorsEntry {
  std::string key;
  DType dtype = DType::kU8;
  std::vector<uint64_t> shape;
  uint64_t begin = 0;  // from the start of the data, as in the file
  uint64_t end = 0;
};
struct SafetensorsHeader {
  uint64_t header_bytes = 0;              // 8 + JSON with padding
  std::vector<SafetensorsEntry> entries;  // by begin
  std::map<std::string, std::string> metadata;
};

// `prefix` holds at least the header; `image_bytes` is the whole file's length.
absl::StatusOr<SafetensorsHeader> ParseSafetensors(std::string_view prefix, uint64_t image_bytes);

}  // namespace holdfast
