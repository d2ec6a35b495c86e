// A rank's file in the remote tier that leaves slices out is read there, and what other ranks'
// files have comes from the nodes that read those at the same time: so that a cold start reads each
// byte once (docs/protocol.md §20).
//
// Plain function, for workers' threads.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "server/events.h"
#include "server/runtime/passed_on.h"
#include "server/runtime/tiers/drain_operations.h"
#include "server/runtime/tiers/operation.h"
#include "server/runtime/tiers/shared_slices.h"
#include "tiers/image/record.h"
#include "tiers/transfer/revocable_memory.h"
#include "tiers/transfer/transfer_result.h"

namespace holdfast {

struct ReadOnceResult {
  // Of the rank's own file, which is read first and whole, into `memory` and for the others.
  TransferResult own;
  // Of the rest: whatever it is that failed, the files in the remote tier may have it.
  absl::Status rest;
  uint64_t remote_bytes = 0;  // of other ranks' files, read there since no node had them
};
// `image` is of the rank's own file, whole.files[0]; `passed`: as this node's readers know it.
ReadOnceResult ReadOnce(const Context& context, const FetchShard& action, const WholeCopy& whole,
                        const RecordAndLayout& image, PassedOnFile& passed,
                        const std::shared_ptr<RevocableMemory>& memory, Operation& operation);

}  // namespace holdfast
