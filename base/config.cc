#include "base/config.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <set>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/config_yaml.h"
#include "base/status.h"
#include "base/units.h"
#include "base/utf8.h"

namespace holdfast {
namespace {

namespace pb = google::protobuf;
using Field = pb::FieldDescriptor;

constexpr size_t kShownBytesMax = 128;  // of a key or a value in a message

std::string Shown(std::string_view text) {
  return absl::StrCat(ToAbsl(text.substr(0, kShownBytesMax)),
                      text.size() > kShownBytesMax ? "…" : "");
}

size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substitute = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substitute});
    }
  }
  return row[b.size()];
}

// The name among `names` that was probably meant; empty if none is near.
std::string Nearest(std::string_view given, const std::vector<std::string>& names) {
  if (given.size() > kShownBytesMax) {
    return "";
  }
  std::string nearest;
  size_t least = std::max<size_t>(2, given.size() / 3) + 1;
  for (const std::string& name : names) {
    const size_t distance = EditDistance(given, name);
    if (distance < least && distance < name.size()) {
      least = distance;
      nearest = name;
    }
  }
  return nearest;
}

bool HasSuffixWord(std::string_view name, std::string_view word) {
  for (const std::string_view limit : {"", "_max", "_min", "_per_s_max", "_per_uid_max"}) {
    const std::string suffix = absl::StrCat(ToAbsl(word), ToAbsl(limit));
    if (name == suffix || name.ends_with("_" + suffix)) {
      return true;
    }
  }
  return false;
}

// TIER_KIND_ for TierKind.
std::string EnumPrefix(const pb::EnumDescriptor& type) {
  std::string prefix;
  for (const char c : type.name()) {
    if (absl::ascii_isupper(static_cast<unsigned char>(c)) && !prefix.empty()) {
      prefix.push_back('_');
    }
    prefix.push_back(absl::ascii_toupper(static_cast<unsigned char>(c)));
  }
  return prefix + "_";
}

// What a field has that nobody set; not for setting.
constexpr char kUnspecified[] = "UNSPECIFIED";

// Without the enum's prefix.
std::string ShortName(const pb::EnumValueDescriptor& value) {
  const std::string prefix = EnumPrefix(*value.type());
  const std::string& full = value.name();
  return full.starts_with(prefix) ? full.substr(prefix.size()) : full;
}

class Reader {
 public:
  explicit Reader(std::string_view file_name) : file_name_(file_name) {}

  absl::Status ReadMessage(const YamlNode& node, const std::string& path, pb::Message& message) {
    if (node.kind == YamlNode::Kind::kNull) {
      return absl::OkStatus();  // "memory:" with everything below it commented out
    }
    if (node.kind != YamlNode::Kind::kMap) {
      return Error(node.line, path, "expected settings (key: value)");
    }
    std::set<const pb::OneofDescriptor*> chosen;
    for (const YamlEntry& entry : node.entries) {
      const Field* field = message.GetDescriptor()->FindFieldByName(entry.key);
      const std::string field_path = Below(path, entry.key);
      if (field == nullptr) {
        return Unknown(entry, path, *message.GetDescriptor());
      }
      const pb::OneofDescriptor* oneof = field->real_containing_oneof();
      if (oneof != nullptr && !chosen.insert(oneof).second) {
        return Error(
            entry.line, field_path,
            absl::StrCat("only one setting of the group ", oneof->name(), " may be given"));
      }
      HF_RETURN_IF_ERROR(ReadField(entry.value, field_path, *field, message));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Error(int line, std::string_view path, std::string_view what) const {
    const std::string where = path.empty() ? "" : absl::StrCat(Shown(path), ": ");
    return absl::InvalidArgumentError(
        absl::StrCat(file_name_, ":", line, ": ", where, ToAbsl(what)));
  }

  static std::string Below(const std::string& path, std::string_view key) {
    return path.empty() ? std::string(key) : absl::StrCat(path, ".", ToAbsl(key));
  }

  absl::Status Unknown(const YamlEntry& entry, const std::string& path,
                       const pb::Descriptor& type) const {
    std::vector<std::string> names;
    for (int i = 0; i < type.field_count(); ++i) {
      names.push_back(type.field(i)->name());
    }
    const std::string nearest = Nearest(entry.key, names);
    const std::string hint = nearest.empty()
                                 ? absl::StrCat("known here: ", absl::StrJoin(names, ", "))
                                 : absl::StrCat("did you mean ", Below(path, nearest), "?");
    return Error(entry.line, Below(path, entry.key), "unknown setting; " + hint);
  }

  // A list that the text names replaces what `message` had.
  absl::Status ReadField(const YamlNode& node, const std::string& path, const Field& field,
                         pb::Message& message) {
    const pb::Reflection& reflection = *message.GetReflection();
    if (field.is_map()) {
      return absl::InternalError(absl::StrCat("configuration schema: ", field.full_name(),
                                              ": map fields are not supported: use a list"));
    }
    if (!field.is_repeated()) {
      if (field.cpp_type() == Field::CPPTYPE_MESSAGE) {
        return ReadMessage(node, path, *reflection.MutableMessage(&message, &field));
      }
      return ReadScalar(node, path, field, message);
    }
    if (node.kind != YamlNode::Kind::kSequence) {
      return Error(node.line, path, "expected a list ([] for an empty one)");
    }
    reflection.ClearField(&message, &field);
    for (size_t i = 0; i < node.items.size(); ++i) {
      const std::string item_path = absl::StrCat(path, "[", i, "]");
      if (field.cpp_type() == Field::CPPTYPE_MESSAGE) {
        HF_RETURN_IF_ERROR(
            ReadMessage(node.items[i], item_path, *reflection.AddMessage(&message, &field)));
      } else {
        HF_RETURN_IF_ERROR(ReadScalar(node.items[i], item_path, field, message));
      }
    }
    return absl::OkStatus();
  }

  absl::Status ReadScalar(const YamlNode& node, const std::string& path, const Field& field,
                          pb::Message& message) {
    if (node.kind == YamlNode::Kind::kNull) {
      return Error(node.line, path, "has no value");
    }
    if (node.kind != YamlNode::Kind::kScalar) {
      return Error(node.line, path, "expected a single value");
    }
    switch (field.cpp_type()) {
      case Field::CPPTYPE_INT32:
        return ReadInteger(node, path, field, message, &pb::Reflection::SetInt32,
                           &pb::Reflection::AddInt32);
      case Field::CPPTYPE_INT64:
        return ReadInteger(node, path, field, message, &pb::Reflection::SetInt64,
                           &pb::Reflection::AddInt64);
      case Field::CPPTYPE_UINT32:
        return ReadInteger(node, path, field, message, &pb::Reflection::SetUInt32,
                           &pb::Reflection::AddUInt32);
      case Field::CPPTYPE_UINT64:
        return ReadInteger(node, path, field, message, &pb::Reflection::SetUInt64,
                           &pb::Reflection::AddUInt64);
      case Field::CPPTYPE_DOUBLE:
        return ReadReal(node, path, field, message, &pb::Reflection::SetDouble,
                        &pb::Reflection::AddDouble);
      case Field::CPPTYPE_FLOAT:
        return ReadReal(node, path, field, message, &pb::Reflection::SetFloat,
                        &pb::Reflection::AddFloat);
      case Field::CPPTYPE_BOOL:
        return ReadBool(node, path, field, message);
      case Field::CPPTYPE_ENUM:
        return ReadEnum(node, path, field, message);
      case Field::CPPTYPE_STRING:
        if (node.text.find('\0') != std::string::npos) {
          // The system's calls would take what stands before it.
          return Error(node.line, path,
                       absl::StrCat("'", PrintableText(Shown(node.text)),
                                    "': no setting can have a NUL in it; take it out"));
        }
        Store(message, field, &pb::Reflection::SetString, &pb::Reflection::AddString, node.text);
        return absl::OkStatus();
      case Field::CPPTYPE_MESSAGE:
        break;
    }
    return absl::InternalError(
        absl::StrCat("configuration schema: ", field.full_name(), ": not a scalar"));
  }

  template <typename Value>
  using Setter = void (pb::Reflection::*)(pb::Message*, const Field*, Value) const;

  template <typename Value, typename Given>
  static void Store(pb::Message& message, const Field& field, Setter<Value> set, Setter<Value> add,
                    Given value) {
    const pb::Reflection& reflection = *message.GetReflection();
    (reflection.*(field.is_repeated() ? add : set))(&message, &field, static_cast<Value>(value));
  }

  template <typename Value>
  absl::Status ReadInteger(const YamlNode& node, const std::string& path, const Field& field,
                           pb::Message& message, Setter<Value> set, Setter<Value> add) {
    const SettingUnit unit = UnitOf(field.name());
    const bool is_bytes = unit == SettingUnit::kBytes;
    const bool is_ms = unit == SettingUnit::kMs;
    Value value = 0;
    if (unit == SettingUnit::kMode) {
      return ReadMode(node, path, field, message, set, add);
    }
    if (is_bytes || is_ms) {
      // Plain numbers count bytes and milliseconds.
      if (!absl::SimpleAtoi(node.text, &value)) {
        const absl::StatusOr<uint64_t> parsed =
            is_bytes ? ParseBytes(node.text) : ParseMillis(node.text);
        if (!parsed.ok()) {
          return Error(node.line, path, Message(parsed.status()));
        }
        if (*parsed > static_cast<uint64_t>(std::numeric_limits<Value>::max())) {
          return OutOfRange<Value>(node, path);
        }
        value = static_cast<Value>(*parsed);
      }
    } else if (node.quoted || !IsIntegerText(node.text)) {
      return Error(node.line, path,
                   absl::StrCat("expected a whole number, not '", Shown(node.text), "'"));
    } else if (!absl::SimpleAtoi(node.text, &value)) {
      return OutOfRange<Value>(node, path);
    }
    Store(message, field, set, add, value);
    return absl::OkStatus();
  }

  static bool IsIntegerText(std::string_view text) {
    if (!text.empty() && (text.front() == '-' || text.front() == '+')) {
      text.remove_prefix(1);
    }
    // "0666" would be octal to some readers and decimal to others.
    const bool ambiguous = text.size() > 1 && text.front() == '0';
    return !text.empty() && !ambiguous &&
           text.find_first_not_of("0123456789") == std::string_view::npos;
  }

  // Permission bits are octal however they are written: 0660, 0o660, 660.
  template <typename Value>
  absl::Status ReadMode(const YamlNode& node, const std::string& path, const Field& field,
                        pb::Message& message, Setter<Value> set, Setter<Value> add) {
    constexpr size_t kDigitsMax = 4;
    std::string_view digits = node.text;
    if (digits.starts_with("0o")) {
      digits.remove_prefix(2);
    }
    if (digits.empty() || digits.size() > kDigitsMax ||
        digits.find_first_not_of("01234567") != std::string_view::npos) {
      return Error(node.line, path,
                   absl::StrCat("expected permission bits in octal, as in 0660, not '",
                                Shown(node.text), "'"));
    }
    uint32_t bits = 0;
    for (const char digit : digits) {
      bits = bits * 8 + static_cast<uint32_t>(digit - '0');
    }
    Store(message, field, set, add, bits);
    return absl::OkStatus();
  }

  template <typename Value>
  absl::Status OutOfRange(const YamlNode& node, const std::string& path) const {
    return Error(
        node.line, path,
        absl::StrCat("'", Shown(node.text), "' is out of range; from ",
                     std::numeric_limits<Value>::min(), " to ", std::numeric_limits<Value>::max()));
  }

  static absl::StatusOr<uint64_t> ParseMillis(std::string_view text) {
    HF_ASSIGN_OR_RETURN(const Duration duration, ParseDuration(text));
    constexpr int64_t kNanosPerMilli = 1'000'000;
    if (duration.count() % kNanosPerMilli != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("duration '", Shown(text), "': must be whole milliseconds"));
    }
    return static_cast<uint64_t>(duration.count() / kNanosPerMilli);
  }

  template <typename Value>
  absl::Status ReadReal(const YamlNode& node, const std::string& path, const Field& field,
                        pb::Message& message, Setter<Value> set, Setter<Value> add) {
    double value = 0;
    if (node.quoted || !absl::SimpleAtod(node.text, &value) ||
        !std::isfinite(static_cast<Value>(value))) {
      return Error(node.line, path,
                   absl::StrCat("expected a number, not '", Shown(node.text), "'"));
    }
    Store(message, field, set, add, value);
    return absl::OkStatus();
  }

  absl::Status ReadBool(const YamlNode& node, const std::string& path, const Field& field,
                        pb::Message& message) {
    if (node.quoted || (node.text != "true" && node.text != "false")) {
      return Error(node.line, path,
                   absl::StrCat("expected true or false, not '", Shown(node.text), "'"));
    }
    Store(message, field, &pb::Reflection::SetBool, &pb::Reflection::AddBool, node.text == "true");
    return absl::OkStatus();
  }

  absl::Status ReadEnum(const YamlNode& node, const std::string& path, const Field& field,
                        pb::Message& message) {
    const pb::EnumDescriptor& type = *field.enum_type();
    std::string given = absl::AsciiStrToUpper(node.text);
    std::replace(given.begin(), given.end(), '-', '_');
    for (int i = 0; i < type.value_count(); ++i) {
      const pb::EnumValueDescriptor& value = *type.value(i);
      const std::string name = ShortName(value);
      if (name != kUnspecified && (given == name || given == value.name())) {
        Store(message, field, &pb::Reflection::SetEnumValue, &pb::Reflection::AddEnumValue,
              value.number());
        return absl::OkStatus();
      }
    }
    return Error(node.line, path,
                 absl::StrCat("'", Shown(node.text),
                              "' is not one of: ", absl::StrJoin(EnumValueTexts(type), ", ")));
  }

  const std::string file_name_;
};

}  // namespace

SettingUnit UnitOf(std::string_view field_name) {
  return HasSuffixWord(field_name, "bytes")  ? SettingUnit::kBytes
         : HasSuffixWord(field_name, "ms")   ? SettingUnit::kMs
         : HasSuffixWord(field_name, "mode") ? SettingUnit::kMode
                                             : SettingUnit::kNone;
}

std::string EnumValueText(const pb::EnumDescriptor& type, int number) {
  const pb::EnumValueDescriptor* value = type.FindValueByNumber(number);
  return value == nullptr ? "" : absl::AsciiStrToLower(ShortName(*value));
}

std::vector<std::string> EnumValueTexts(const pb::EnumDescriptor& type) {
  std::vector<std::string> texts;
  for (int i = 0; i < type.value_count(); ++i) {
    if (ShortName(*type.value(i)) != kUnspecified) {
      texts.push_back(EnumValueText(type, type.value(i)->number()));
    }
  }
  return texts;
}

absl::Status ParseConfig(std::string_view text, std::string_view file_name,
                         google::protobuf::Message& config) {
  HF_ASSIGN_OR_RETURN(const YamlNode root, ParseYaml(text, file_name));
  // Into a copy first: a text with an error changes nothing.
  const std::unique_ptr<pb::Message> parsed(config.New());
  parsed->CopyFrom(config);
  HF_RETURN_IF_ERROR(Reader(file_name).ReadMessage(root, "", *parsed));
  config.GetReflection()->Swap(&config, parsed.get());
  return absl::OkStatus();
}

}  // namespace holdfast
