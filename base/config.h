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

#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace google::protobuf {
class Message;
}

namespace holdfast {

// Fields that the text does not name keep the value they have in `config`: fill the defaults in
// before.
absl::Status ParseConfig(std::string_view text, std::string_view file_name,
                         google::protobuf::Message& config);

}  // namespace holdfast
