// What the scan of each node's drives has come to, and what that comes to for all of them, kept up
// by its own calls: a job of thousands of nodes hears of each of them when it is taken over.
//
//   NodeInventories nvme;
//   nvme.Set(node, {TierKind::kNvme, InventoryState::Kind::kKnown, ""});
//   if (nvme.Sum(names).kind == InventoryState::Kind::kKnown) …
//
// Owned by a Coordinator; not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <set>

#include "server/messages.h"
#include "server/node_names.h"

namespace holdfast {

class NodeInventories {
 public:
  void Set(NodeId node, const InventoryState& state);
  void Erase(NodeId node);
  // Of all that there are: to be read once more.
  void SetAllPending();
  // Whether its drives may hold what has not been told.
  bool MayHaveMore(NodeId node) const;
  // Whether all that they hold has been told.
  bool Knows(NodeId node) const;
  bool empty() const { return nodes_.empty(); }
  // Any but this one.
  bool AnyPendingElsewhere() const;
  // Any but these. (Goes through the nodes.)
  bool AnyPendingBut(const std::set<NodeId>& nodes) const;
  // Known when every node has told. `why` names the troubled ones, but not thousands.
  InventoryState Sum(const NodeNames& names) const;

 private:
  void Count(NodeId node, const InventoryState& state, int by);

  std::map<NodeId, InventoryState> nodes_;
  std::array<uint32_t, 4> of_kind_{};
  std::set<NodeId> troubled_;  // that failed, or say why they are pending
};

}  // namespace holdfast
