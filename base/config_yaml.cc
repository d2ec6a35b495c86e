#include "base/config_yaml.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <exception>
#include <map>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/utf8.h"

namespace holdfast {
namespace {

// Builds the tree from the parser's events. Containers are kept on a stack by value and moved into
// their parent when they end. What is refused leaves as yaml-cpp's own exception, which ParseYaml
// catches.
class TreeBuilder : public YAML::EventHandler {
 public:
  YamlNode TakeRoot() { return std::move(root_); }

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    RefuseAnchor(mark, anchor);
    Add(MakeNode(YamlNode::Kind::kNull, mark), mark);
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    throw YAML::ParserException(mark, "aliases (*name) are not supported");
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    RefuseAnchor(mark, anchor);
    RefuseTag(mark, tag);
    YamlNode node = MakeNode(YamlNode::Kind::kScalar, mark);
    node.text = value;
    node.quoted = tag == "!";  // yaml-cpp's mark for quoted and block scalars; plain ones have "?"
    Add(std::move(node), mark);
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    Begin(YamlNode::Kind::kSequence, mark, tag, anchor);
  }
  void OnSequenceEnd() override { End(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    Begin(YamlNode::Kind::kMap, mark, tag, anchor);
  }
  void OnMapEnd() override { End(); }

 private:
  struct Frame {
    YamlNode node;
    YAML::Mark mark;
    std::map<std::string, int> lines_of_keys;
    bool has_key = false;
    std::string key;
    int key_line = 0;
  };

  static YamlNode MakeNode(YamlNode::Kind kind, const YAML::Mark& mark) {
    YamlNode node;
    node.kind = kind;
    node.line = mark.line + 1;
    return node;
  }
  static void RefuseAnchor(const YAML::Mark& mark, YAML::anchor_t anchor) {
    if (anchor != 0) {
      throw YAML::ParserException(mark, "anchors (&name) are not supported");
    }
  }
  static void RefuseTag(const YAML::Mark& mark, const std::string& tag) {
    if (!tag.empty() && tag != "?" && tag != "!") {
      throw YAML::ParserException(mark, "tags (!name) are not supported");
    }
  }

  void Begin(YamlNode::Kind kind, const YAML::Mark& mark, const std::string& tag,
             YAML::anchor_t anchor) {
    RefuseAnchor(mark, anchor);
    RefuseTag(mark, tag);
    if (stack_.size() >= kConfigDepthMax) {
      throw YAML::ParserException(mark,
                                  absl::StrCat("nested deeper than ", kConfigDepthMax, " levels"));
    }
    Frame& frame = stack_.emplace_back();
    frame.node = MakeNode(kind, mark);
    frame.mark = mark;
  }

  void End() {
    Frame done = std::move(stack_.back());
    stack_.pop_back();
    Add(std::move(done.node), done.mark);
  }

  void Add(YamlNode node, const YAML::Mark& mark) {
    if (stack_.empty()) {
      root_ = std::move(node);
      return;
    }
    Frame& parent = stack_.back();
    if (parent.node.kind == YamlNode::Kind::kSequence) {
      parent.node.items.push_back(std::move(node));
    } else if (parent.has_key) {
      parent.node.entries.push_back({std::move(parent.key), parent.key_line, std::move(node)});
      parent.has_key = false;
    } else {
      AddKey(parent, std::move(node), mark);
    }
  }

  static void AddKey(Frame& map, YamlNode node, const YAML::Mark& mark) {
    if (node.kind != YamlNode::Kind::kScalar) {
      throw YAML::ParserException(mark, "a key must be a text");
    }
    const auto [seen, is_new] = map.lines_of_keys.emplace(node.text, node.line);
    if (!is_new) {
      throw YAML::ParserException(
          mark, absl::StrCat(node.text.substr(0, 128), ": given twice (first in line ",
                             seen->second, ")"));
    }
    map.has_key = true;
    map.key = std::move(node.text);
    map.key_line = node.line;
  }

  std::vector<Frame> stack_;
  YamlNode root_;
};

// The parser would quietly read other encodings, and put replacement characters for what is none.
absl::Status CheckText(std::string_view text, std::string_view file_name) {
  if (text.size() > kConfigBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(ToAbsl(file_name), ": ", text.size(),
                                                   " bytes; a configuration has at most ",
                                                   kConfigBytesMax));
  }
  int line = 1;
  for (size_t i = 0; i < text.size();) {
    const size_t bytes = Utf8SequenceBytes(text.substr(i));
    if (bytes == 0 || text[i] == '\0') {
      return absl::InvalidArgumentError(
          absl::StrCat(ToAbsl(file_name), ":", line, ": not UTF-8 text"));
    }
    line += text[i] == '\n' ? 1 : 0;
    i += bytes;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<YamlNode> ParseYaml(std::string_view text, std::string_view file_name) {
  HF_RETURN_IF_ERROR(CheckText(text, file_name));
  try {
    std::istringstream stream{std::string(text)};
    YAML::Parser parser(stream);
    TreeBuilder builder;
    if (!parser.HandleNextDocument(builder)) {
      return YamlNode();
    }
    YamlNode root = builder.TakeRoot();
    TreeBuilder second;
    if (parser.HandleNextDocument(second)) {
      return absl::InvalidArgumentError(
          absl::StrCat(ToAbsl(file_name), ":", second.TakeRoot().line,
                       ": a second document; everything belongs into one"));
    }
    return root;
  } catch (const YAML::Exception& e) {
    return absl::InvalidArgumentError(
        absl::StrCat(ToAbsl(file_name), ":", e.mark.line + 1, ": ", e.msg));
  } catch (const std::exception& e) {
    return absl::InvalidArgumentError(absl::StrCat(ToAbsl(file_name), ": ", e.what()));
  }
}

}  // namespace holdfast
