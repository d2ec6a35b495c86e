// YAML text → a protobuf message that is the schema. Unknown keys, wrong types and duplicate keys are errors that
// name file, line and key ("ckptd.yaml:4: memory.byte_max: unknown setting; did you mean memory.bytes_max?").
// Sizes and durations may be written with units where the field's name ends in _bytes/_bytes_max or _ms.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace google::protobuf {
class Message;
}

namespace holdfast {

// Fields that the text does not name keep the value they have in `config`: fill the defaults in before.
absl::Status ParseConfig(std::string_view text, std::string_view file_name, google::protobuf::Message& config);

}  // namespace holdfast
