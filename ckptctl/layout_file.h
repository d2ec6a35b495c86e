// What the ranks of another mesh would want of a job's tensors, as a layout file says it
// (proto/holdfast/v1/layout.proto).
//
//   HF_ASSIGN_OR_RETURN(const MeshLayout layout, MeshLayout::Parse(text, "new.yaml"));
//   for (Rank rank = 0; rank < layout.ranks(); ++rank) {
//     HF_ASSIGN_OR_RETURN(std::vector<Want> wants, layout.WantsOf(rank, tensors));
//   }
//
// Pure, thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "holdfast/v1/layout.pb.h"
#include "recovery/reshard.h"
#include "tiers/image/layout.h"

namespace holdfast {

// Of a mesh that a plan is made for.
inline constexpr uint64_t kMeshRanksMax = kWorldSizeMax;

class MeshLayout {
 public:
  // InvalidArgument, naming file, line and key, or the rule: it is not one.
  static absl::StatusOr<MeshLayout> Parse(std::string_view text, std::string_view file_name);

  uint32_t ranks() const { return ranks_; }
  // Of these tensors, whole. InvalidArgument names the rule and the tensor that do not go together.
  absl::StatusOr<std::vector<Want>> WantsOf(Rank rank, std::span<const Slice> tensors) const;
  // Rules that none of these names fits, as they are written.
  std::vector<std::string> Unused(std::span<const Slice> tensors) const;

 private:
  explicit MeshLayout(v1::LayoutFile file) : file_(std::move(file)) {}
  absl::Status Check();
  const v1::LayoutFile::Rule* RuleFor(std::string_view name) const;
  // Where the rank stands on an axis, and how many ranks that has.
  struct Stand {
    uint32_t at = 0;
    uint32_t ranks = 1;
  };
  Stand On(std::string_view axis, Rank rank) const;
  absl::StatusOr<std::optional<Want>> WantOf(Rank rank, const Slice& tensor,
                                             const v1::LayoutFile::Rule& rule) const;

  v1::LayoutFile file_;
  uint32_t ranks_ = 1;
};

// Whether a name fits a pattern of * and ?.
bool FitsPattern(std::string_view pattern, std::string_view name);

}  // namespace holdfast
