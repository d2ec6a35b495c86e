// Whether an image that goes to the remote tier is compressed: if the policy asks for it, and some
// of the image says that it saves something (tiers/compressed/sample.h).
//
// Plain functions; any thread.
#pragma once

#include <cstdint>
#include <optional>

#include "base/env.h"
#include "server/events.h"
#include "server/runtime/tiers/operation.h"
#include "tiers/image/kept.h"
#include "tiers/transfer/revocable_memory.h"

namespace holdfast {

// Where the image that will be written lies now: in memory, or in a file.
struct SampledSource {
  RevocableMemory* memory = nullptr;
  const ImageMap* gather = nullptr;  // where in memory it lies; null: as it is
  File* file = nullptr;
  uint32_t alignment = 1;  // of reads of that
};

// The level, if it is to be. A source that cannot be sampled is not compressed: what is wrong with
// it shows when it is copied.
std::optional<int> ZstdLevelOf(const FlushShard& action, const SampledSource& source,
                               uint64_t image_bytes, Operation& operation);

}  // namespace holdfast
