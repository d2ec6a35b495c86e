#include "ckptctl/tied_names.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"

namespace holdfast {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kDepthMax = 200;  // the tree itself has at most 150 levels

std::string Join(const std::string& path, const std::string& key) {
  return path.empty() ? key : absl::StrCat(path, ".", key);
}

// A dictionary's key; only those of which paths are made in one way.
std::optional<std::string> KeyOf(const Json& key) {
  if (key.is_string()) {
    return key.get<std::string>();
  }
  return key.is_number_integer() ? std::optional(key.dump()) : std::nullopt;
}

void Walk(const Json& node, const std::string& path, int depth, std::vector<TiedName>& found);

void WalkDict(const Json& pairs, const std::string& path, int depth, std::vector<TiedName>& found) {
  for (const Json& pair : pairs) {
    if (!pair.is_array() || pair.size() != 2) {
      continue;
    }
    if (const std::optional<std::string> key = KeyOf(pair[0])) {
      Walk(pair[1], Join(path, *key), depth, found);
    }
  }
}

void Walk(const Json& node, const std::string& path, int depth, std::vector<TiedName>& found) {
  if (!node.is_object() || depth > kDepthMax) {
    return;
  }
  for (const auto& [kind, content] : node.items()) {
    if ((kind == "tensor" || kind == "array") && content.is_string()) {
      if (std::string name = content.get<std::string>(); name != path) {
        found.push_back({path, std::move(name)});
      }
    } else if (kind == "module" && content.is_object()) {
      for (const auto& [key, each] : content.items()) {
        Walk(each, Join(path, key), depth + 1, found);
      }
    } else if (kind == "dict" && content.is_array()) {
      WalkDict(content, path, depth + 1, found);
    } else if ((kind == "list" || kind == "tuple") && content.is_array()) {
      for (size_t i = 0; i < content.size(); ++i) {
        Walk(content[i], Join(path, absl::StrCat(i)), depth + 1, found);
      }
    } else if (kind == "stateful") {
      Walk(content, path, depth + 1, found);
    }
  }
}

}  // namespace

std::vector<TiedName> TiedNames(std::string_view state_tree) {
  std::vector<TiedName> found;
  const Json tree = Json::parse(state_tree, nullptr, /*allow_exceptions=*/false);
  if (!tree.is_discarded()) {
    Walk(tree, "", 0, found);
  }
  return found;
}

}  // namespace holdfast
