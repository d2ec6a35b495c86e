// A committed step of which everything is known and nothing is read yet, opened by a process that
// takes no part in the job.
//
//   HF_TRY_ASSIGN(const std::shared_ptr<const OpenStep> open, OpenStep::Of(options, info));
//   for (const SavedItem& item : open->items.items()) { … }
//
// One exchange with the daemon brings the records of all ranks, however many there are. Constant
// once it is open.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "client-lib/src/saved_items.h"
#include "client-lib/src/step_shards.h"
#include "holdfast/checkpoint_reader.h"
#include "holdfast/job.h"

namespace holdfast::client {

struct OpenStep {
  // `info`: which attempt and step, and how many ranks saved it; nothing else is read of it.
  static Result<std::shared_ptr<const OpenStep>> Of(const CheckpointOptions& options,
                                                    const CheckpointInfo& info);

  std::string Name() const;  // for messages
  // These of the items, which are objects, each from one of the ranks that have it.
  Result<std::vector<Object>> ReadObjects(const std::vector<size_t>& which) const;

  CheckpointOptions options;
  CheckpointInfo info;
  StepShards shards;
  SavedItems items;
};

}  // namespace holdfast::client
