// What a step is made of, as a whole: which tensors ranks have split or have alike, which are
// single ranks' own, what cannot be had whole (docs/elastic.md). No tensor is read.
//
//   HF_TRY_ASSIGN(SavedItems items, SavedItems::Of(shards));
//   const SavedItem& item = items.items()[3];
//
// Constant once it is made.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "client-lib/src/deadline.h"
#include "client-lib/src/step_shards.h"
#include "holdfast/checkpoint_reader.h"

namespace holdfast::client {

class SavedItems {
 public:
  // kDeadlineExceeded: planning it all took longer.
  static Result<SavedItems> Of(const StepShards& shards, Deadline deadline);

  const std::vector<SavedItem>& items() const { return items_; }
  // Of an object: its number in the shards' objects.
  size_t object(size_t item) const { return objects_[item]; }

 private:
  // Tensors that ranks saved in ways that contradict each other, and what was said of that.
  using Contradictions = std::map<std::string, std::string>;

  Status AddTensors(const StepShards& shards, Deadline deadline);
  Status AddOwn(const StepShards& shards, const Contradictions& contradictions, Deadline deadline);
  void AddObjects(const StepShards& shards);
  void Order();

  std::vector<SavedItem> items_;
  std::vector<size_t> objects_;  // by item
};

}  // namespace holdfast::client
