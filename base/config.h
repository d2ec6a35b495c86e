// YAML text → a protobuf message that is the schema. Unknown keys, wrong types and duplicate keys
// are errors that name file, line and key ("ckptd.yaml:4: memory.byte_max: unknown setting; did you
// mean memory.bytes_max?"). By a field's name: sizes and durations may be written with units where
// it ends in _bytes or _ms (with or without a further _max, _min or _per_s_max), permission bits
// are octal where it ends in mode. Enums are written by name, in any case, without the enum's
// prefix. A list that the text names replaces the one in `config`. Texts of at most 1 MiB and 32
// levels; no anchors, aliases or tags; no NUL in a value. Nothing in `config` changes when there is
// an error.
//
// A schema has no map fields: protobuf lays them out differently in code compiled for
// ThreadSanitizer than in a library that is not, and reading one by reflection then corrupts
// memory. A list of messages with a name says the same.
//
//   DaemonConfig config = DefaultConfig();
//   HF_RETURN_IF_ERROR(ParseConfig(text, "/etc/holdfast/ckptd.yaml", config));
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace google::protobuf {
class EnumDescriptor;
class Message;
}  // namespace google::protobuf

namespace holdfast {

// Fields that the text does not name keep the value they have in `config`: fill the defaults in
// before.
absl::Status ParseConfig(std::string_view text, std::string_view file_name,
                         google::protobuf::Message& config);

// What a field's name says of its value.
enum class SettingUnit : uint8_t { kNone, kBytes, kMs, kMode };
SettingUnit UnitOf(std::string_view field_name);

// As a value of it is written: "io_uring".
std::string EnumValueText(const google::protobuf::EnumDescriptor& type, int number);
// All that can be.
std::vector<std::string> EnumValueTexts(const google::protobuf::EnumDescriptor& type);

}  // namespace holdfast
