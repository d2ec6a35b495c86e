#include "ckptctl/json.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast {
namespace {

using google::protobuf::EnumDescriptor;
using google::protobuf::FieldDescriptor;
using ProtoMessage = google::protobuf::Message;
using google::protobuf::Reflection;
using nlohmann::ordered_json;

// AttemptPhase → "ATTEMPT_PHASE_".
std::string EnumPrefix(const EnumDescriptor& type) {
  std::string prefix;
  for (const char c : type.name()) {
    if (absl::ascii_isupper(c) && !prefix.empty()) {
      prefix += '_';
    }
    prefix += absl::ascii_toupper(c);
  }
  return prefix + "_";
}

ordered_json EnumToJson(const EnumDescriptor& type, int number) {
  const auto* value = type.FindValueByNumber(number);
  if (value == nullptr) {
    return absl::StrCat("unknown_", number);  // of a newer daemon
  }
  const std::string prefix = EnumPrefix(type);
  const std::string& name = value->name();
  return absl::AsciiStrToLower(name.rfind(prefix, 0) == 0 ? name.substr(prefix.size()) : name);
}

// index < 0: the field is not repeated.
ordered_json ValueToJson(const ProtoMessage& message, const FieldDescriptor& field, int index) {
  const Reflection& r = *message.GetReflection();
  const bool one = index < 0;
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return one ? r.GetInt32(message, &field) : r.GetRepeatedInt32(message, &field, index);
    case FieldDescriptor::CPPTYPE_INT64:
      return one ? r.GetInt64(message, &field) : r.GetRepeatedInt64(message, &field, index);
    case FieldDescriptor::CPPTYPE_UINT32:
      return one ? r.GetUInt32(message, &field) : r.GetRepeatedUInt32(message, &field, index);
    case FieldDescriptor::CPPTYPE_UINT64:
      return one ? r.GetUInt64(message, &field) : r.GetRepeatedUInt64(message, &field, index);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return one ? r.GetDouble(message, &field) : r.GetRepeatedDouble(message, &field, index);
    case FieldDescriptor::CPPTYPE_FLOAT:
      return one ? r.GetFloat(message, &field) : r.GetRepeatedFloat(message, &field, index);
    case FieldDescriptor::CPPTYPE_BOOL:
      return one ? r.GetBool(message, &field) : r.GetRepeatedBool(message, &field, index);
    case FieldDescriptor::CPPTYPE_ENUM:
      return EnumToJson(*field.enum_type(), one ? r.GetEnumValue(message, &field)
                                                : r.GetRepeatedEnumValue(message, &field, index));
    case FieldDescriptor::CPPTYPE_STRING: {
      std::string text =
          one ? r.GetString(message, &field) : r.GetRepeatedString(message, &field, index);
      return field.type() == FieldDescriptor::TYPE_BYTES ? HexBytes(text) : text;
    }
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return MessageToJson(one ? r.GetMessage(message, &field)
                               : r.GetRepeatedMessage(message, &field, index));
  }
  return nullptr;
}

}  // namespace

ordered_json MessageToJson(const ProtoMessage& message) {
  ordered_json json = ordered_json::object();
  const auto* type = message.GetDescriptor();
  for (int i = 0; i < type->field_count(); ++i) {
    const FieldDescriptor& field = *type->field(i);
    if (!field.is_repeated()) {
      json[field.name()] = ValueToJson(message, field, -1);
      continue;
    }
    ordered_json array = ordered_json::array();
    const int size = message.GetReflection()->FieldSize(message, &field);
    for (int k = 0; k < size; ++k) {
      array.push_back(ValueToJson(message, field, k));
    }
    json[field.name()] = std::move(array);
  }
  return json;
}

std::string DumpJson(const ordered_json& json) {
  constexpr bool kAsciiOnly = true;
  return json.dump(-1, ' ', kAsciiOnly, ordered_json::error_handler_t::replace);
}

std::string HexBytes(std::string_view bytes) {
  return absl::BytesToHexString(ToAbsl(bytes));
}

}  // namespace holdfast
