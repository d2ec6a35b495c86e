// What a record must fulfil to count in a slot. Internal to tiers/memory; pure functions.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tiers/memory/slot_store.h"

namespace holdfast {

// Decodes a record file whole, its layout included, and returns it without layout and digests.
// Errors are DecodeRecord's; InvalidArgument also when the layout does not fit the lengths or there
// is no generation.
absl::StatusOr<ShardRecord> DecodeSlotRecord(std::string_view bytes);

// InvalidArgument, naming the first difference, unless the record is the one expected.
absl::Status CheckExpectation(const ShardRecord& record, const RecordExpectation& expected);

}  // namespace holdfast
