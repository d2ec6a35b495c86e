#include "client-lib/src/saved_items.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "client-lib/src/errors.h"
#include "client-lib/src/state_plan.h"
#include "recovery/reshard.h"

namespace holdfast::client {
namespace {

// Parts of tensors that one plan looks at, so that it takes little memory and is within limits.
constexpr uint64_t kPartsOfPlan = 200'000;

SavedItem ItemOf(const Tensor& tensor) {
  SavedItem item;
  item.name = tensor.name;
  item.type = tensor.type;
  item.shape = tensor.global_shape;
  item.elements = 1;
  for (const uint64_t n : item.shape) {
    item.elements *= n;  // (that it is not too many was checked when the record was read)
  }
  item.bytes = item.elements * TypeBytes(item.type);
  return item;
}

SavedItem ItemOf(const StepShards::Content& content) {
  const Object& object = content.content.object;
  SavedItem item;
  item.name = object.name;
  item.kind = object.json ? SavedItem::Kind::kJson : SavedItem::Kind::kOpaque;
  item.codec = object.codec;
  item.shape = {content.bytes};
  item.elements = item.bytes = content.bytes;
  item.ranks = content.content.ranks;
  return item;
}

// What stands in the way of each of them, were it wanted whole.
Result<std::vector<ReshardProblem>> ProblemsOf(const StepShards& shards,
                                               const std::vector<Tensor>& tensors,
                                               std::optional<Rank> only) {
  std::vector<Want> wants;
  wants.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    wants.push_back({ToSlice(tensor), {}, false});
  }
  absl::StatusOr<ReshardPlanner> planner = ReshardPlanner::For(std::move(wants));
  HF_TRY(FromAbslStatus(planner.status(), "plan"));
  HF_TRY(shards.AddTo(*planner, only));
  return planner->Plan(shards.Sources(/*reader=*/0, /*own=*/false, {})).problems;
}

Status Late(Deadline deadline) {
  deadline.Look();
  return deadline.passed() ? Status(Code::kDeadlineExceeded, "what ranks saved was being compared")
                           : Status();
}

}  // namespace

Result<SavedItems> SavedItems::Of(const StepShards& shards, Deadline deadline) {
  SavedItems items;
  HF_TRY(items.AddTensors(shards, deadline));
  items.AddObjects(shards);
  items.Order();
  return items;
}

Status SavedItems::AddTensors(const StepShards& shards, Deadline deadline) {
  const std::vector<Tensor> tensors = shards.Tensors();
  const std::vector<uint32_t> ranks = shards.TensorRanks();
  Contradictions contradictions;
  for (size_t first = 0; first < tensors.size();) {
    HF_TRY(Late(deadline));
    size_t behind = first;
    for (uint64_t parts = 0; behind < tensors.size() && parts < kPartsOfPlan; ++behind) {
      parts += ranks[behind];
    }
    const std::vector<Tensor> some(tensors.begin() + static_cast<ptrdiff_t>(first),
                                   tensors.begin() + static_cast<ptrdiff_t>(behind));
    HF_TRY_ASSIGN(const std::vector<ReshardProblem> found, ProblemsOf(shards, some, std::nullopt));
    std::map<std::string, std::string> problems;
    for (const ReshardProblem& problem : found) {
      (problem.kind == ReshardProblem::Kind::kContradiction ? contradictions : problems)
          .emplace(problem.tensor, problem.text);
    }
    for (const Tensor& tensor : some) {
      if (contradictions.count(tensor.name) == 0) {
        items_.push_back(ItemOf(tensor));
        items_.back().problem = problems[tensor.name];
      }
    }
    first = behind;
  }
  return contradictions.empty() ? Status() : AddOwn(shards, contradictions, deadline);
}

// What each rank that has any of it has all of is its own; else ranks that should have the same
// have not, and nobody can say what is right.
Status SavedItems::AddOwn(const StepShards& shards, const Contradictions& contradictions,
                          Deadline deadline) {
  std::set<std::string> names;
  for (const auto& [name, text] : contradictions) {
    names.insert(name);
  }
  std::map<std::string, std::vector<SavedItem>> own;
  for (Rank rank = 0; rank < shards.saved_by(); ++rank) {
    HF_TRY(Late(deadline));
    HF_TRY_ASSIGN(const std::vector<Tensor> tensors, shards.TensorsOf(rank, names));
    if (tensors.empty()) {
      continue;
    }
    HF_TRY_ASSIGN(const std::vector<ReshardProblem> found, ProblemsOf(shards, tensors, rank));
    for (const Tensor& tensor : tensors) {
      own[tensor.name].push_back(ItemOf(tensor));
      own[tensor.name].back().ranks = {rank};
    }
    for (const ReshardProblem& problem : found) {
      names.erase(problem.tensor);
      own.erase(problem.tensor);
    }
  }
  for (const Tensor& tensor : shards.Tensors()) {
    const auto text = contradictions.find(tensor.name);
    if (text != contradictions.end() && names.count(tensor.name) == 0) {
      items_.push_back(ItemOf(tensor));
      items_.back().problem = text->second;
    }
  }
  for (std::pair<const std::string, std::vector<SavedItem>>& each : own) {
    std::move(each.second.begin(), each.second.end(), std::back_inserter(items_));
  }
  return Status();
}

void SavedItems::AddObjects(const StepShards& shards) {
  objects_.resize(items_.size());
  for (size_t i = 0; i < shards.objects().size(); ++i) {
    items_.push_back(ItemOf(shards.objects()[i]));
    objects_.push_back(i);
  }
}

void SavedItems::Order() {
  std::vector<size_t> order(items_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto key = [&](size_t i) {
    const SavedItem& item = items_[i];
    return std::tuple(item.kind != SavedItem::Kind::kTensor, std::string_view(item.name),
                      item.ranks.empty() ? 0 : item.ranks.front());
  };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return key(a) < key(b); });
  std::vector<SavedItem> items;
  std::vector<size_t> objects;
  for (const size_t i : order) {
    items.push_back(std::move(items_[i]));
    objects.push_back(objects_[i]);
  }
  items_ = std::move(items);
  objects_ = std::move(objects);
}

}  // namespace holdfast::client
