// What is read of an opened shard, verified.
//
//   HF_TRY(CopyOutOf(shard, engine, ranges, slices, options));
//   HF_TRY_ASSIGN(std::vector<Object> objects, ReadObjects(shard, compare));
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "client-lib/src/copy_engine.h"
#include "client-lib/src/sealed_shard.h"
#include "holdfast/state.h"
#include "holdfast/status.h"

namespace holdfast::client {

// Each range is one of a slice, or (none) of the header.
using ShardRanges = std::vector<CopyOutRange>;
using ShardSlices = std::vector<std::optional<size_t>>;

// kCorrupt: a block is not what was saved, naming it, or the copy was cut short meanwhile.
Status CopyOutOf(const SealedShard& shard, CopyEngine& engine, const ShardRanges& ranges,
                 const ShardSlices& slices, CopyOptions options);

// Objects in the layout's order; the header is verified with them. `compare` copies and verifies.
Result<std::vector<Object>> ReadObjects(
    const SealedShard& shard,
    const std::function<Status(const ShardRanges& ranges, const ShardSlices& slices)>& compare);

}  // namespace holdfast::client
