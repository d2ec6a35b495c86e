#include "server/runtime/settings_reference.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <google/protobuf/message.h>

#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/config.h"
#include "base/setting_range.h"
#include "base/status.h"
#include "holdfast/v1/config.pb.h"
#include "proto/config_comments.h"
#include "recovery/policy.h"
#include "server/membership/cluster_config.h"
#include "server/runtime/daemon_config.h"
#include "server/runtime/settings_change.h"
#include "server/tier_limits.h"

namespace holdfast {
namespace {

namespace pb = google::protobuf;
using Field = pb::FieldDescriptor;

constexpr std::string_view kDefault = "default: ";
constexpr char kSchema[] = "holdfast.v1.DaemonConfig";
// TierPolicy is of both tiers; CheckPolicy refuses these.
constexpr std::string_view kNoSettings[] = {"policy.nvme.share_replicas", "policy.nvme.compression",
                                            "policy.nvme.compression_level",
                                            "policy.nvme.compression_threads"};

struct Section {
  std::string name;  // empty: what is in no section
  std::string intro;
  std::vector<SettingRow> rows;
};

struct Described {
  std::map<std::string, SettingRange> ranges;
  std::vector<Section> sections;
};

// One line of all.
std::string OneLine(const std::string& comment) {
  std::vector<std::string> lines = absl::StrSplit(comment, '\n');
  for (std::string& line : lines) {
    absl::StripAsciiWhitespace(&line);
  }
  std::string text = absl::StrJoin(lines, " ");
  absl::StripAsciiWhitespace(&text);
  return text;
}

template <typename Descriptor>
std::string CommentOf(const Descriptor& descriptor) {
  pb::SourceLocation location;
  if (!descriptor.GetSourceLocation(&location)) {
    return "";
  }
  return OneLine(absl::StrCat(location.leading_comments, " ", location.trailing_comments));
}

// "of local drives" → "Of local drives. "
std::string Sentence(std::string text) {
  if (text.empty()) {
    return text;
  }
  text[0] = absl::ascii_toupper(static_cast<unsigned char>(text[0]));
  return absl::StrCat(text, text.back() == '.' ? " " : ". ");
}

bool IsInteger(const Field& field) {
  return !field.is_repeated() &&
         (field.cpp_type() == Field::CPPTYPE_UINT32 || field.cpp_type() == Field::CPPTYPE_UINT64 ||
          field.cpp_type() == Field::CPPTYPE_INT32 || field.cpp_type() == Field::CPPTYPE_INT64);
}

std::string TypeText(const Field& field) {
  std::string text = "text";
  if (field.cpp_type() == Field::CPPTYPE_MESSAGE) {
    std::vector<std::string> names;
    for (int i = 0; i < field.message_type()->field_count(); ++i) {
      names.push_back(field.message_type()->field(i)->name());
    }
    text = absl::StrCat("{", absl::StrJoin(names, ", "), "}");
  } else if (field.cpp_type() == Field::CPPTYPE_ENUM) {
    text = absl::StrJoin(EnumValueTexts(*field.enum_type()), ", ");
  } else if (field.cpp_type() == Field::CPPTYPE_BOOL) {
    text = "true, false";
  } else if (IsInteger(field)) {
    switch (UnitOf(field.name())) {
      case SettingUnit::kBytes:
        text = absl::StrContains(field.name(), "_per_s") ? "size per second" : "size";
        break;
      case SettingUnit::kMs:
        text = "time";
        break;
      case SettingUnit::kMode:
        text = "permission bits";
        break;
      case SettingUnit::kNone:
        text = "number";
        break;
    }
  }
  return field.is_repeated() ? absl::StrCat("list of ", text) : text;
}

SettingRange::Unit RangeUnit(SettingUnit unit) {
  switch (unit) {
    case SettingUnit::kBytes:
      return SettingRange::Unit::kBytes;
    case SettingUnit::kMs:
      return SettingRange::Unit::kMs;
    case SettingUnit::kMode:
      return SettingRange::Unit::kMode;
    case SettingUnit::kNone:
      break;
  }
  return SettingRange::Unit::kCount;
}

// As it may stand in the file; empty: the code sets none.
std::string ValueText(const Field& field, const pb::Message& section) {
  const pb::Reflection& reflection = *section.GetReflection();
  if (field.is_repeated() || (field.has_presence() && !reflection.HasField(section, &field))) {
    return "";
  }
  switch (field.cpp_type()) {
    case Field::CPPTYPE_STRING:
      return reflection.GetString(section, &field);
    case Field::CPPTYPE_BOOL:
      return reflection.GetBool(section, &field) ? "true" : "false";
    case Field::CPPTYPE_ENUM:
      return EnumValueText(*field.enum_type(), reflection.GetEnumValue(section, &field));
    default:
      break;
  }
  if (!IsInteger(field)) {
    return "";
  }
  const uint64_t value = field.cpp_type() == Field::CPPTYPE_UINT32
                             ? reflection.GetUInt32(section, &field)
                             : reflection.GetUInt64(section, &field);
  if (value == 0) {
    return field.has_presence() ? "0" : "";
  }
  return absl::StrReplaceAll(SettingText(value, RangeUnit(UnitOf(field.name()))), {{" ", ""}});
}

std::map<std::string, SettingRange> RangesOf(const v1::DaemonConfig& config) {
  std::map<std::string, SettingRange> ranges;
  const auto add = [&](const std::string& prefix, const std::vector<SettingRange>& some) {
    for (const SettingRange& range : some) {
      ranges[absl::StrCat(prefix, ToAbsl(range.setting))] = range;
    }
  };
  add("", NodeRanges(config));
  add("", TierRanges(config.nvme(), config.remote(), config.fabric()));
  add("", ClusterRanges(config.cluster()));
  add("policy.", PolicyRanges(config.policy()));
  return ranges;
}

absl::Status Lacks(const std::string& name, const std::string& what) {
  return absl::FailedPreconditionError(
      absl::StrCat("reference of the settings: ", name, ": ", what));
}

// Elements of a list have no defaults: there is no element unless somebody writes it.
absl::StatusOr<SettingRow> ElementRow(const Field& field, const std::string& name,
                                      const std::string& effect) {
  SettingRow row;
  row.name = name;
  row.type = TypeText(field);
  row.fallback = field.is_repeated() ? "none" : "needed";
  row.effect = effect;
  row.meaning = CommentOf(field);
  if (row.meaning.empty()) {
    return Lacks(name, "it has no description: give it a comment in the schema");
  }
  return row;
}

std::string EffectText(SettingEffect effect) {
  return effect == SettingEffect::kAtOnce ? "at once" : "restart";
}

// `root` and `user`: the section, with the defaults of root and of an ordinary user.
absl::StatusOr<SettingRow> RowOf(const Field& field, const std::string& name,
                                 const pb::Message& root, const pb::Message& user,
                                 const Described& all) {
  SettingRow row;
  row.name = name;
  row.type = TypeText(field);
  const SettingComment comment = ReadSettingComment(CommentOf(field));
  if (comment.meaning.empty()) {
    return Lacks(name, "it has no description: give it a comment in the schema");
  }
  row.meaning = comment.meaning;
  const auto effect = EffectOf(name);
  if (!effect) {
    return Lacks(name, "nobody has said whether it takes effect at once (settings_change.cc)");
  }
  row.effect = EffectText(*effect);
  const auto range = all.ranges.find(name);
  if (range != all.ranges.end()) {
    row.limits = RangeText(range->second);
    if (field.is_repeated() && !row.limits.empty()) {
      row.limits += " of them";
    }
  } else if (IsInteger(field)) {
    return Lacks(name, "it has no limits: give it a row in the table of its section's ranges");
  }
  absl::StatusOr<std::string> fallback = DefaultText(field, comment, root);
  if (!fallback.ok()) {
    return Lacks(name, Message(fallback.status()));
  }
  row.fallback = *fallback;
  const Field& known = *user.GetDescriptor()->FindFieldByName(field.name());
  if (const std::string of_users = ValueText(known, user);
      !of_users.empty() && comment.fallback.empty() && of_users != ValueText(known, root)) {
    absl::StrAppend(&row.fallback, "; for users `", of_users, "`");
  }
  return row;
}

// Sections within a section follow it.
absl::Status Describe(const pb::Descriptor& schema, const std::string& name,
                      const std::string& intro, const pb::Message& root, const pb::Message& user,
                      Described& all) {
  const std::string prefix = name.empty() ? "" : name + ".";
  const size_t here = all.sections.size();
  all.sections.push_back({name, intro, {}});
  for (int i = 0; i < schema.field_count(); ++i) {
    const Field& field = *schema.field(i);
    const std::string path = prefix + field.name();
    if (field.cpp_type() == Field::CPPTYPE_MESSAGE && !field.is_repeated()) {
      const Field& known = *root.GetDescriptor()->FindFieldByName(field.name());
      HF_RETURN_IF_ERROR(
          Describe(*field.message_type(), path,
                   OneLine(absl::StrCat(Sentence(ReadSettingComment(CommentOf(field)).meaning),
                                        Sentence(CommentOf(*field.message_type())))),
                   root.GetReflection()->GetMessage(root, &known),
                   user.GetReflection()->GetMessage(user, &known), all));
      continue;
    }
    if (std::find(std::begin(kNoSettings), std::end(kNoSettings), path) != std::end(kNoSettings)) {
      continue;
    }
    HF_ASSIGN_OR_RETURN(SettingRow row, RowOf(field, path, root, user, all));
    const std::string effect = row.effect;
    all.sections[here].rows.push_back(std::move(row));
    if (field.cpp_type() == Field::CPPTYPE_MESSAGE) {
      for (int j = 0; j < field.message_type()->field_count(); ++j) {
        const Field& part = *field.message_type()->field(j);
        HF_ASSIGN_OR_RETURN(SettingRow element,
                            ElementRow(part, absl::StrCat(path, "[].", part.name()), effect));
        all.sections[here].rows.push_back(std::move(element));
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Described> DescribeAll() {
  // 1. The schema, with its comments.
  pb::FileDescriptorSet files;
  const std::string_view bytes = ConfigComments();
  if (!files.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return absl::InternalError("reference of the settings: the schema that was built in is broken");
  }
  pb::DescriptorPool pool;
  for (const pb::FileDescriptorProto& file : files.file()) {
    if (pool.BuildFile(file) == nullptr) {
      return absl::InternalError(absl::StrCat("reference of the settings: ", file.name(),
                                              " of the schema that was built in is broken"));
    }
  }
  const pb::Descriptor* schema = pool.FindMessageTypeByName(kSchema);
  if (schema == nullptr) {
    return absl::InternalError(absl::StrCat("reference of the settings: no ", kSchema));
  }
  // 2. The defaults, of settings that are there only where somebody asks for them, too.
  const auto complete = [](Surroundings where) {
    where.host = "<the host's name>";
    v1::DaemonConfig config = DefaultConfig(where);
    config.mutable_cluster()->mutable_etcd();
    CompleteConfig(&config);
    return config;
  };
  const v1::DaemonConfig root = complete({.root = true});
  const v1::DaemonConfig user = complete({.root = false,
                                          .uid = "<uid>",
                                          .host = "",
                                          .state_dir = "$XDG_STATE_HOME/holdfast",
                                          .runtime_dir = "$XDG_RUNTIME_DIR"});
  // 3. Both together.
  Described all;
  all.ranges = RangesOf(root);
  HF_RETURN_IF_ERROR(Describe(*schema, "", "", root, user, all));
  return all;
}

// In a cell of a table.
std::string Cell(const std::string& text) {
  return absl::StrReplaceAll(text, {{"|", "\\|"}});
}

constexpr char kHead[] =
    R"(<!-- Made by `ckptd --print-reference`. Change the comments in proto/holdfast/v1/config.proto, or the code, and make it anew. -->
# Settings of ckptd

`/etc/holdfast/ckptd.yaml`, for users `$XDG_CONFIG_HOME/holdfast/ckptd.yaml` (`~/.config`), or what `--config` names: YAML, a section per heading below. All are optional. What ckptd does not know
is an error, with what was probably meant. `ckptd --check-config` checks a file and all the places that it names; `deploy/ckptd.yaml` is an example with comments.

- A *size* is in bytes, or with a unit: `64GiB`, `500MB`. A *time* is in milliseconds, or with a unit: `250ms`, `10s`, `5min`, `1h`. *Permission bits* are octal: `0660`.
- *change*: what a changed file does when ckptd is told to read it again (`systemctl reload ckptd`, or SIGHUP; [operations.md](operations.md#settings-that-are-read-again)). `at once`: it holds from
  then on. `restart`: ckptd goes on with what it started with, and says in its status that they differ.
- Paths are absolute. Of a list, `x[].y` is what each element has.
)";

}  // namespace

SettingComment ReadSettingComment(std::string_view comment) {
  const size_t at = comment.rfind(kDefault);
  SettingComment read;
  read.meaning = std::string(comment.substr(0, at));
  if (at != std::string_view::npos) {
    read.fallback = std::string(comment.substr(at + kDefault.size()));
  }
  while (!read.meaning.empty() && (read.meaning.back() == ' ' || read.meaning.back() == ';')) {
    read.meaning.pop_back();
  }
  return read;
}

absl::StatusOr<std::string> DefaultText(const google::protobuf::FieldDescriptor& field,
                                        const SettingComment& comment,
                                        const google::protobuf::Message& defaults) {
  const Field* known = defaults.GetDescriptor()->FindFieldByName(field.name());
  const std::string value = known == nullptr ? "" : ValueText(*known, defaults);
  if (!value.empty() && !comment.fallback.empty()) {
    return absl::FailedPreconditionError(absl::StrCat("its default is in its comment ('",
                                                      comment.fallback, "') and in the code ('",
                                                      value, "'): take it out of the comment"));
  }
  if (!comment.fallback.empty()) {
    return comment.fallback;
  }
  if (!value.empty()) {
    return absl::StrCat("`", value, "`");
  }
  if (field.is_repeated()) {
    return std::string("none");
  }
  return absl::FailedPreconditionError(
      "it has no default: give it one in DefaultConfig, or say at the end of its comment what "
      "holds without it ('default: …')");
}

absl::StatusOr<std::vector<SettingRow>> SettingRows() {
  HF_ASSIGN_OR_RETURN(Described all, DescribeAll());
  std::vector<SettingRow> rows;
  for (Section& section : all.sections) {
    for (SettingRow& row : section.rows) {
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

absl::StatusOr<std::string> SettingsReference() {
  HF_ASSIGN_OR_RETURN(const Described all, DescribeAll());
  std::string text = kHead;
  for (const Section& section : all.sections) {
    absl::StrAppend(&text, "\n## ", section.name.empty() ? "The node" : section.name, "\n\n");
    if (!section.intro.empty()) {
      absl::StrAppend(&text, section.intro, "\n\n");
    }
    if (section.rows.empty()) {
      continue;
    }
    absl::StrAppend(&text, "| setting | type | default | limits | change | meaning |\n",
                    "|---|---|---|---|---|---|\n");
    for (const SettingRow& row : section.rows) {
      absl::StrAppend(&text, "| `", row.name, "` | ", Cell(row.type), " | ", Cell(row.fallback),
                      " | ", Cell(row.limits), " | ", row.effect, " | ", Cell(row.meaning), " |\n");
    }
  }
  return text;
}

}  // namespace holdfast
