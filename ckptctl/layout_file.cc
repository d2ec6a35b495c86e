#include "ckptctl/layout_file.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/config.h"
#include "base/status.h"

namespace holdfast {
namespace {

// What one of so many has of n: from the first to just before the last.
std::pair<uint64_t, uint64_t> Share(uint64_t n, uint32_t at, uint32_t ranks) {
  // Without n * at, which may be too large.
  const auto border = [&](uint64_t i) { return n / ranks * i + n % ranks * i / ranks; };
  return {border(at), border(uint64_t{at} + 1)};
}

absl::Status Wrong(const v1::LayoutFile::Rule& rule, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("the rule for '", rule.tensors(), "': ", what));
}

}  // namespace

bool FitsPattern(std::string_view pattern, std::string_view name) {
  // Where to go on when what follows the last star does not fit: one character later.
  size_t star = std::string_view::npos;
  size_t again = 0;
  size_t p = 0;
  size_t n = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      again = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p;
      ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++again;
    } else {
      return false;
    }
  }
  return std::all_of(pattern.begin() + static_cast<ptrdiff_t>(p), pattern.end(),
                     [](char c) { return c == '*'; });
}

absl::StatusOr<MeshLayout> MeshLayout::Parse(std::string_view text, std::string_view file_name) {
  v1::LayoutFile file;
  HF_RETURN_IF_ERROR(ParseConfig(text, file_name, file));
  MeshLayout layout(std::move(file));
  if (absl::Status checked = layout.Check(); !checked.ok()) {
    return Annotate(checked, file_name);
  }
  return layout;
}

absl::Status MeshLayout::Check() {
  uint64_t ranks = 1;
  for (const v1::LayoutFile::Axis& axis : file_.mesh()) {
    if (axis.name().empty() || axis.ranks() == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("mesh: axis '", axis.name(), "' has ", axis.ranks(),
                       " ranks; each axis has a name and at least one rank"));
    }
    const auto same = std::count_if(file_.mesh().begin(), file_.mesh().end(),
                                    [&](const auto& other) { return other.name() == axis.name(); });
    if (same > 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("mesh: there are two axes '", axis.name(), "'"));
    }
    ranks *= axis.ranks();
    if (ranks > kMeshRanksMax) {
      return absl::InvalidArgumentError(absl::StrCat("mesh: more than ", kMeshRanksMax, " ranks"));
    }
  }
  ranks_ = static_cast<uint32_t>(ranks);
  const auto known = [&](const std::string& name) {
    return name.empty() || std::any_of(file_.mesh().begin(), file_.mesh().end(),
                                       [&](const auto& axis) { return axis.name() == name; });
  };
  for (const v1::LayoutFile::Rule& rule : file_.rules()) {
    if (rule.tensors().empty()) {
      return absl::InvalidArgumentError(
          "rules: a rule without `tensors`, the names that it is for");
    }
    for (const v1::LayoutFile::Split& split : rule.splits()) {
      if (split.axis().empty() || !known(split.axis())) {
        return Wrong(rule, absl::StrCat("the mesh has no axis '", split.axis(), "'"));
      }
    }
    for (const std::string& axis : {rule.flat(), rule.only()}) {
      if (!known(axis)) {
        return Wrong(rule, absl::StrCat("the mesh has no axis '", axis, "'"));
      }
    }
    if (!rule.flat().empty() && rule.splits_size() > 0) {
      return Wrong(rule, "a tensor is split by dimensions or as a flat one, not both");
    }
    if (!rule.only().empty() && rule.only_rank() >= On(rule.only(), 0).ranks) {
      return Wrong(rule, absl::StrCat("axis '", rule.only(), "' has no rank ", rule.only_rank()));
    }
    if (!rule.dtype().empty()) {
      HF_RETURN_IF_ERROR(ParseDType(rule.dtype()).status());
    }
  }
  return absl::OkStatus();
}

const v1::LayoutFile::Rule* MeshLayout::RuleFor(std::string_view name) const {
  const auto found =
      std::find_if(file_.rules().begin(), file_.rules().end(),
                   [&](const auto& rule) { return FitsPattern(rule.tensors(), name); });
  return found == file_.rules().end() ? nullptr : &*found;
}

MeshLayout::Stand MeshLayout::On(std::string_view name, Rank rank) const {
  for (const v1::LayoutFile::Axis& axis : file_.mesh()) {
    if (axis.name() == name) {
      return {rank % axis.ranks(), axis.ranks()};
    }
    rank /= axis.ranks();
  }
  return {};
}

absl::StatusOr<std::vector<Want>> MeshLayout::WantsOf(Rank rank,
                                                      std::span<const Slice> tensors) const {
  static const v1::LayoutFile::Rule kWhole;
  std::vector<Want> wants;
  for (const Slice& tensor : tensors) {
    const v1::LayoutFile::Rule* rule = RuleFor(tensor.name);
    HF_ASSIGN_OR_RETURN(std::optional<Want> want,
                        WantOf(rank, tensor, rule == nullptr ? kWhole : *rule));
    if (want.has_value()) {
      wants.push_back(*std::move(want));
    }
  }
  return wants;
}

absl::StatusOr<std::optional<Want>> MeshLayout::WantOf(Rank rank, const Slice& tensor,
                                                       const v1::LayoutFile::Rule& rule) const {
  if (rule.left_out() || (!rule.only().empty() && On(rule.only(), rank).at != rule.only_rank())) {
    return std::nullopt;
  }
  Want want{tensor, {}, false};
  if (!rule.dtype().empty()) {
    HF_ASSIGN_OR_RETURN(want.slice.dtype, ParseDType(rule.dtype()));
    want.convert = true;
  }
  if (!rule.flat().empty()) {
    const Stand stand = On(rule.flat(), rank);
    uint64_t elements = 1;
    for (const uint64_t n : tensor.global_shape) {
      elements *= n;
    }
    const auto [begin, end] = Share(elements, stand.at, stand.ranks);
    want.slice.place = FlatPlace{begin, end - begin};
    return want;
  }
  if (rule.splits_size() == 0) {
    return want;
  }
  BoxPlace box{std::vector<uint64_t>(tensor.global_shape.size(), 0), tensor.global_shape};
  for (const v1::LayoutFile::Split& split : rule.splits()) {
    const auto dimensions = static_cast<int64_t>(box.shape.size());
    const int64_t wanted =
        split.dimension() < 0 ? dimensions + split.dimension() : int64_t{split.dimension()};
    if (wanted < 0 || wanted >= dimensions) {
      return Wrong(rule, absl::StrCat("tensor '", tensor.name, "' has ", dimensions,
                                      " dimensions, and none that is ", split.dimension()));
    }
    const auto d = static_cast<size_t>(wanted);
    const Stand stand = On(split.axis(), rank);
    const auto [begin, end] = Share(box.shape[d], stand.at, stand.ranks);
    box.offset[d] += begin;
    box.shape[d] = end - begin;
  }
  want.slice.place = std::move(box);
  return want;
}

std::vector<std::string> MeshLayout::Unused(std::span<const Slice> tensors) const {
  std::vector<std::string> unused;
  for (const v1::LayoutFile::Rule& rule : file_.rules()) {
    const bool used = std::any_of(tensors.begin(), tensors.end(), [&](const Slice& tensor) {
      return RuleFor(tensor.name) == &rule;
    });
    if (!used) {
      unused.push_back(rule.tensors());
    }
  }
  return unused;
}

}  // namespace holdfast
