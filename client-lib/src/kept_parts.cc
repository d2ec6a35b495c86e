#include "client-lib/src/kept_parts.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client-lib/src/errors.h"
#include "client-lib/src/worker_pool.h"

namespace holdfast::client {

Result<std::unique_ptr<KeptParts>> KeptParts::Of(std::shared_ptr<const OpenStep> open,
                                                 std::vector<Tensor> parts) {
  return NoThrow([&]() -> Result<std::unique_ptr<KeptParts>> {
    std::unique_ptr<KeptParts> kept(new KeptParts(std::move(open), std::move(parts)));
    HF_TRY(WithContext(kept->Plan(), kept->open_->Name()));
    return kept;
  });
}

KeptParts::KeptParts(std::shared_ptr<const OpenStep> open, std::vector<Tensor> parts)
    : open_(std::move(open)),
      engine_(MakeHostCopyEngine(CopyThreads(0))),
      resharding_(open_->shards, *engine_, Resharding::Options(), meter_) {
  wanted_.tensors = std::move(parts);
}

// Its threads are the parent's.
KeptParts::~KeptParts() {
  if (owner_.forked()) {
    static_cast<void>(engine_.release());
  }
}

Status KeptParts::Plan() {
  Interrupt interrupt(open_->options.interrupted);
  const Deadline deadline = Deadline::In(open_->options.window_deadline).Or(interrupt);
  HF_TRY(resharding_.Plan(wanted_));
  resharding_.Hold(deadline);
  return resharding_.Compare(deadline);
}

Status KeptParts::CopyTo(const std::vector<void*>& memory) {
  if (memory.size() != wanted_.tensors.size()) {
    return Status(Code::kInvalidArgument,
                  absl::StrCat(memory.size(), " addresses for ", wanted_.tensors.size(), " parts"));
  }
  if (owner_.forked()) {
    return ForkedError();
  }
  return NoThrow([&] {
    Interrupt interrupt(open_->options.interrupted);
    const Deadline deadline = Deadline::In(open_->options.window_deadline).Or(interrupt);
    return WithContext(resharding_.CopySome(memory, deadline), open_->Name());
  });
}

}  // namespace holdfast::client
