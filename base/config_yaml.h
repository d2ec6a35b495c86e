// YAML text → a tree in which every node knows its line. Part of ParseConfig. A strict subset: one
// document; keys are texts, each once in its map; no anchors, aliases or tags, which a file of
// settings does not need and which make small texts expand without bound.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace holdfast {

struct YamlEntry;

struct YamlNode {
  enum class Kind { kNull, kScalar, kSequence, kMap };
  Kind kind = Kind::kNull;
  int line = 1;
  bool quoted = false;             // of a scalar
  std::string text;                // of a scalar
  std::vector<YamlNode> items;     // of a sequence
  std::vector<YamlEntry> entries;  // of a map, in the order of the text
};

struct YamlEntry {
  std::string key;
  int line = 1;
  YamlNode value;
};

inline constexpr size_t kConfigBytesMax = size_t{1} << 20;
inline constexpr size_t kConfigDepthMax = 32;

// An empty text is a null node. Errors start with "<file_name>:<line>: ".
absl::StatusOr<YamlNode> ParseYaml(std::string_view text, std::string_view file_name);

}  // namespace holdfast
