// Which saved slices a state wants: exactly equal in name, type, global shape and place.
//
//   HF_TRY_ASSIGN(StateMatch match, MatchState(state, layout));   // kInvalidArgument names
//   expected and found for (size_t i = 0; i < state.tensors.size(); ++i)
//   Copy(layout.slices[match.tensors[i]], state.tensors[i]);
//
// Pure, thread-safe.
#pragma once

#include <cstddef>
#include <vector>

#include "holdfast/state.h"
#include "holdfast/status.h"
#include "tiers/image/layout.h"

namespace holdfast::client {

struct StateMatch {
  std::vector<size_t> tensors;  // for each wanted tensor, its slice
  std::vector<size_t> objects;  // for each object to be filled, its slice
};

// An empty list of objects wants all that were saved.
Result<StateMatch> MatchState(const State& state, const Layout& layout);

// Whether what of the state does not match the layout may be in other ranks' shards: none of its
// tensors has another type (if that is no matter), or is a part of another shape, than what is
// saved here under its name.
bool MayBeElsewhere(const State& state, const Layout& layout, bool convert_types);

// A saved tensor or object as the public types say it, without bytes.
Tensor ToTensor(const Slice& slice);
Object ToObject(const Slice& slice);

}  // namespace holdfast::client
