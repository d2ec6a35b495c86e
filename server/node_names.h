// The nodes that a daemon has heard of, by numbers of its own: what is kept per copy and per
// process is a number, what people read is a name.
//
//   NodeNames names("node-a");                  // names.Name(kHere) == "node-a"
//   const NodeId b = names.Number("node-b");    // the same one every time
//
// Owned by NodeCore; not thread-safe.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.h"

namespace holdfast {

class NodeNames {
 public:
  explicit NodeNames(std::string here) : names_{std::move(here)} { numbers_[names_[0]] = kHere; }

  NodeId Number(const std::string& name) {
    const auto [it, fresh] = numbers_.try_emplace(name, static_cast<NodeId>(names_.size()));
    if (fresh) {
      names_.push_back(name);
    }
    return it->second;
  }
  std::optional<NodeId> Find(const std::string& name) const {
    const auto it = numbers_.find(name);
    return it == numbers_.end() ? std::nullopt : std::optional(it->second);
  }
  const std::string& Name(NodeId node) const { return names_.at(node); }
  bool Several() const { return names_.size() > 1; }
  // "pid 4711", where there are several nodes "pid 4711 on node-b".
  std::string Who(const ProcessId& process) const {
    return Several() ? process.ToString() + " on " + Name(process.node) : process.ToString();
  }

 private:
  std::vector<std::string> names_;
  std::map<std::string, NodeId> numbers_;
};

// Some of them.
class NodeMarks {
 public:
  void Set(NodeId node) {
    if (node >= marked_.size()) {
      marked_.resize(node + 1);
    }
    marked_[node] = true;
  }
  bool Has(NodeId node) const { return node < marked_.size() && marked_[node]; }
  std::vector<NodeId> All() const {
    std::vector<NodeId> nodes;
    for (NodeId node = 0; node < marked_.size(); ++node) {
      if (marked_[node]) {
        nodes.push_back(node);
      }
    }
    return nodes;
  }

 private:
  std::vector<bool> marked_;
};

}  // namespace holdfast
