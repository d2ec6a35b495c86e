// What a record and an image must fulfil to be a copy where they lie. Internal to tiers/durable.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "tiers/durable/copy_store.h"
#include "tiers/image/record.h"

namespace holdfast {

// DataLoss: damaged, or of another shard than the name says (world size 0: any).
// FailedPrecondition: of a newer version.
absl::StatusOr<ShardRecord> CheckRecordFile(const std::string& path, std::string_view bytes,
                                            const CopyName& name);
// DataLoss if the image leaves slices out.
absl::Status CheckIsWhole(const std::string& path, const ShardRecord& record);
// DataLoss if they differ.
absl::Status CheckImageLength(const std::string& path, uint64_t actual, uint64_t expected);

}  // namespace holdfast
