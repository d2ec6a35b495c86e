#include "server/node_inventories.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"

namespace holdfast {
namespace {

using Kind = InventoryState::Kind;
constexpr size_t kTroubledNamed = 8;  // of thousands, perhaps

}  // namespace

void NodeInventories::Count(NodeId node, const InventoryState& state, int by) {
  uint32_t& count = of_kind_[static_cast<size_t>(state.kind)];
  by > 0 ? ++count : --count;
  if (state.kind == Kind::kFailed || !state.why.empty()) {
    by > 0 ? void(troubled_.insert(node)) : void(troubled_.erase(node));
  }
}

bool NodeInventories::MayHaveMore(NodeId node) const {
  const auto it = nodes_.find(node);
  return it != nodes_.end() && it->second.kind != Kind::kKnown;
}

bool NodeInventories::Knows(NodeId node) const {
  const auto it = nodes_.find(node);
  return it != nodes_.end() && it->second.kind == Kind::kKnown;
}

void NodeInventories::Set(NodeId node, const InventoryState& state) {
  const auto [it, fresh] = nodes_.try_emplace(node, state);
  if (!fresh) {
    Count(node, it->second, -1);
    it->second = state;
  }
  Count(node, state, 1);
}

void NodeInventories::Erase(NodeId node) {
  if (const auto it = nodes_.find(node); it != nodes_.end()) {
    Count(node, it->second, -1);
    nodes_.erase(it);
  }
}

void NodeInventories::SetAllPending() {
  for (auto& [node, state] : nodes_) {
    state = {TierKind::kNvme, Kind::kPending, ""};
  }
  of_kind_ = {};
  of_kind_[static_cast<size_t>(Kind::kPending)] = static_cast<uint32_t>(nodes_.size());
  troubled_.clear();
}

bool NodeInventories::AnyPendingElsewhere() const {
  const auto here = nodes_.find(kHere);
  const uint32_t own = here != nodes_.end() && here->second.kind == Kind::kPending ? 1 : 0;
  return of_kind_[static_cast<size_t>(Kind::kPending)] > own;
}

bool NodeInventories::AnyPendingBut(const std::set<NodeId>& nodes) const {
  return std::any_of(nodes_.begin(), nodes_.end(), [&](const auto& node) {
    return node.second.kind == Kind::kPending && nodes.count(node.first) == 0;
  });
}

InventoryState NodeInventories::Sum(const NodeNames& names) const {
  InventoryState sum{TierKind::kNvme, Kind::kKnown, ""};
  if (nodes_.empty() || of_kind_[static_cast<size_t>(Kind::kPending)] > 0) {
    sum.kind = Kind::kPending;
  } else if (of_kind_[static_cast<size_t>(Kind::kFailed)] > 0) {
    sum.kind = Kind::kFailed;
  }
  size_t named = 0;
  for (const NodeId node : troubled_) {
    if (named++ == kTroubledNamed) {
      absl::StrAppend(&sum.why, "; and ", troubled_.size() - kTroubledNamed, " more nodes");
      break;
    }
    absl::StrAppend(&sum.why, named == 1 ? "" : "; ",
                    names.Several() ? names.Name(node) + ": " : "", nodes_.at(node).why);
  }
  return sum;
}

}  // namespace holdfast
