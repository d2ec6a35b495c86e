#include "tiers/memory/slot_record.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tiers/image/layout.h"

namespace holdfast {
namespace {

template <typename Value>
absl::Status Differs(absl::string_view what, const Value& said, const Value& expected) {
  return absl::InvalidArgumentError(
      absl::StrCat("record: its ", what, " is ", said, ", expected ", expected));
}

}  // namespace

absl::StatusOr<ShardRecord> DecodeSlotRecord(std::string_view bytes) {
  HF_ASSIGN_OR_RETURN(ShardRecord record, DecodeRecord(bytes));
  HF_RETURN_IF_ERROR(
      DecodeLayout(record.layout_bytes, record.header_bytes, record.image_bytes).status());
  if (record.kept) {
    return absl::InvalidArgumentError("record: it is of an image that leaves slices out");
  }
  if (record.generation == 0) {
    return absl::InvalidArgumentError("record: it has no generation, so it is not of a slot");
  }
  record.layout_bytes.clear();
  record.layout_bytes.shrink_to_fit();
  record.digests.clear();
  record.digests.shrink_to_fit();
  return record;
}

absl::Status CheckExpectation(const ShardRecord& record, const RecordExpectation& expected) {
  if (record.id != expected.id) {
    return Differs("shard", record.id.ToString(), expected.id.ToString());
  }
  if (record.job_name != expected.job_name) {
    return Differs("job name", record.job_name, expected.job_name);
  }
  if (record.world_size != expected.world_size) {
    return Differs("world size", record.world_size, expected.world_size);
  }
  if (record.generation != expected.generation) {
    return Differs("generation", record.generation, expected.generation);
  }
  if (record.descent != expected.descent) {
    return absl::InvalidArgumentError(
        absl::StrCat("record: its line of descent (", record.descent.size(),
                     " attempts) is not that of attempt ", expected.id.attempt, " (",
                     expected.descent.size(), " attempts)"));
  }
  return absl::OkStatus();
}

}  // namespace holdfast
