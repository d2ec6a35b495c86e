#include "ckptctl/tensor_choice.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "ckptctl/export_plan.h"
#include "ckptctl/layout_file.h"
#include "ckptctl/text.h"

namespace holdfast {

absl::StatusOr<std::vector<size_t>> ChooseTensors(const std::vector<SavedItem>& items,
                                                  const TensorChoice& choice) {
  HF_RETURN_IF_ERROR(CheckKeys(items, {}, choice.only));
  std::vector<size_t> chosen;
  for (size_t i = 0; i < items.size(); ++i) {
    const std::string& name = items[i].name;
    const bool under = choice.only.empty() ||
                       std::any_of(choice.only.begin(), choice.only.end(),
                                   [&](const std::string& key) { return IsUnder(name, key); });
    if (items[i].kind == SavedItem::Kind::kTensor && under &&
        (choice.pattern.empty() || FitsPattern(choice.pattern, name))) {
      chosen.push_back(i);
    }
  }
  if (chosen.empty() && !choice.pattern.empty()) {
    return absl::NotFoundError(
        absl::StrCat("no tensor's name fits '", choice.pattern,
                     "' (the whole name; * stands for any characters, ? for one)"));
  }
  return chosen;
}

std::string ShownName(const SavedItem& item) {
  const std::string name = EscapeText(item.name);
  return item.ranks.empty() ? name : absl::StrCat(name, " (rank ", item.ranks.front(), ")");
}

std::string ShapeText(const std::vector<uint64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ","), "]");
}

std::vector<ElementRange> TensorBytes::Ranges() const {
  std::vector<ElementRange> ranges;
  ranges.reserve(tensors_.size());
  for (const size_t tensor : tensors_) {
    ranges.push_back({tensor, 0, items_[tensor].elements});
  }
  return ranges;
}

}  // namespace holdfast
