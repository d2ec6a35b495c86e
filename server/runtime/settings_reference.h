// The reference of ckptd's settings, docs/configuration.md, as the program knows them: names and
// meaning out of the schema and its comments (holdfast/v1/config.proto), defaults, limits and what
// takes effect at once out of the code that has them.
//
//   HF_ASSIGN_OR_RETURN(const std::string markdown, SettingsReference());
//
// Plain functions, thread-safe.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace google::protobuf {
class Descriptor;
class FieldDescriptor;
class Message;
}  // namespace google::protobuf

namespace holdfast {

struct SettingRow {
  std::string name;  // "nvme.depth"
  std::string type;
  std::string fallback;  // the default
  std::string limits;
  std::string effect;
  std::string meaning;
};

// What a comment says: "budget for all slots; default: half of …", in two.
struct SettingComment {
  std::string meaning;
  std::string fallback;  // empty: it says none
};
SettingComment ReadSettingComment(std::string_view comment);

// A setting's default: by its comment, or of the code, as `defaults` (the section that it is in)
// have it. An error when neither has one, or both.
absl::StatusOr<std::string> DefaultText(const google::protobuf::FieldDescriptor& field,
                                        const SettingComment& comment,
                                        const google::protobuf::Message& defaults);

// Of all settings, in the schema's order. An error names the setting that lacks a description, a
// default, or, if it is a number, limits.
absl::StatusOr<std::vector<SettingRow>> SettingRows();

absl::StatusOr<std::string> SettingsReference();

}  // namespace holdfast
