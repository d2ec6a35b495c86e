// Under which further names a step's state has a tensor that was saved once (tied weights), as the
// object holdfast.state says (docs/formats.md, "The state of Python programs").
//
//   for (const TiedName& tied : TiedNames(json)) …     // tied.name is the tensor tied.same_as
//
// Pure. Of what is no such tree nothing is taken, and no name is trusted: it may be of a tensor
// that there is not.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace holdfast {

inline constexpr char kStateTree[] = "holdfast.state";

struct TiedName {
  std::string name;
  std::string same_as;
  bool operator==(const TiedName&) const = default;
};

// In the order of the tree.
std::vector<TiedName> TiedNames(std::string_view state_tree);

}  // namespace holdfast
