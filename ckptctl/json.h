// Machine-readable answers. One JSON object on stdout per run, one line, ASCII only (a terminal
// shows it safely). Field names are those of admin.proto, all present, also when empty; 64-bit
// numbers are numbers, bytes are hex, enum values are lower case without their prefix ("running",
// "all_nodes"). docs/ckptctl.md names the fields.
//
//   out << DumpJson(MessageToJson(reply)) << "\n";
//
// Pure and thread-safe.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace google::protobuf {
class Message;
}

namespace holdfast {

nlohmann::ordered_json MessageToJson(const google::protobuf::Message& message);

// Invalid UTF-8 becomes U+FFFD.
std::string DumpJson(const nlohmann::ordered_json& json);

std::string HexBytes(std::string_view bytes);

}  // namespace holdfast
