// The names of many nodes in little room: a job's state names all of them, is told to all of them,
// and is written by all of them, with each step. Clusters number their nodes, so that a few ranges
// are enough.
//
//   SetNodeRanges({"gpu-07", "gpu-08", "login"}, state.mutable_nodes());  // two ranges
//   HF_RETURN_IF_ERROR(CheckNodeRanges(state.nodes()));  // of what was read
//   for (const std::string& name : NodesIn(state.nodes())) …
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "holdfast/v1/state.pb.h"

namespace holdfast {

inline constexpr size_t kStateNodesMax = size_t{1} << 16;

using NodeRanges = google::protobuf::RepeatedPtrField<v1::NodeRange>;

// In which order they come is not kept; one that is named twice is there once.
void SetNodeRanges(std::vector<std::string> names, NodeRanges* ranges);

// Whether they are at most kStateNodesMax, each a name that a node can have.
absl::Status CheckNodeRanges(const NodeRanges& ranges);

// Only of what was checked.
std::vector<std::string> NodesIn(const NodeRanges& ranges);

}  // namespace holdfast
