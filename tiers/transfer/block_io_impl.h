// The two implementations of BlockIo, for CreateBlockIo. Internal to tiers/transfer/.
#pragma once

#include <memory>

#include "tiers/transfer/block_io.h"

namespace holdfast {

// Why there is no ring: an errno's status with the way out.
absl::StatusOr<std::unique_ptr<BlockIo>> CreateUringBlockIo(const BlockIoOptions& options);
// `why`: for the description, "" when threads were asked for.
absl::StatusOr<std::unique_ptr<BlockIo>> CreateThreadBlockIo(const BlockIoOptions& options,
                                                             const std::string& why);

// Not null, not empty, within a file's offsets, bytes_min within bytes and only for reads.
absl::Status CheckBlockRequest(const BlockRequest& request);

// "write" or "read", as in Env's errors.
std::string_view BlockOpName(BlockOp op);
// The file ended after `got` of the bytes wanted.
absl::Status FileEndsTooSoon(const BlockRequest& request, size_t got);

}  // namespace holdfast
