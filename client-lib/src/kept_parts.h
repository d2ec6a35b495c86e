// Parts of a step's tensors that are planned now and copied a little later, in one go or some at a
// time (holdfast.dcp.Reader). Shards of this node are held from the plan on; no shard is attached
// in which nothing is wanted.
//
//   HF_TRY_ASSIGN(std::unique_ptr<KeptParts> kept, KeptParts::Of(open, std::move(parts)));
//   HF_TRY(kept->CopyTo(memory));     // memory[i]: of parts[i], or null: not this time
//
// What several ranks saved of the wanted elements is the same in all of them, or it is an error.
// Used by one thread at a time.
#pragma once

#include <memory>
#include <vector>

#include "client-lib/src/copy_engine.h"
#include "client-lib/src/fork_guard.h"
#include "client-lib/src/open_step.h"
#include "client-lib/src/reshard.h"
#include "client-lib/src/restore_meter.h"
#include "holdfast/state.h"

namespace holdfast::client {

class KeptParts {
 public:
  // Parts of one tensor must not share elements. kInvalidArgument: something that was not saved, or
  // that ranks saved with different values.
  static Result<std::unique_ptr<KeptParts>> Of(std::shared_ptr<const OpenStep> open,
                                               std::vector<Tensor> parts);
  ~KeptParts();
  KeptParts(const KeptParts&) = delete;
  KeptParts& operator=(const KeptParts&) = delete;

  // Verified; within the step's window_deadline. An error leaves in memory what came before it.
  Status CopyTo(const std::vector<void*>& memory);

 private:
  KeptParts(std::shared_ptr<const OpenStep> open, std::vector<Tensor> parts);
  Status Plan();

  const ForkOwner owner_;
  const std::shared_ptr<const OpenStep> open_;
  State wanted_;
  RestoreMeter meter_;
  std::unique_ptr<CopyEngine> engine_;
  Resharding resharding_;
};

}  // namespace holdfast::client
