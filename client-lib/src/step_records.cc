#include "client-lib/src/step_records.h"

#include <algorithm>

namespace holdfast::client {
namespace {

constexpr size_t kHeadBytes = 16;

uint64_t NumberAt(const std::byte* at, size_t size) {
  uint64_t number = 0;
  for (size_t i = 0; i < size; ++i) {
    number |= static_cast<uint64_t>(at[i]) << (8 * i);
  }
  return number;
}

// As holdfast.v1.Tier numbers them.
const char* NameOfTier(uint32_t tier) {
  switch (tier) {
    case 1:
      return "memory";
    case 2:
      return "nvme";
    case 3:
      return "remote";
    default:
      return "peer";
  }
}

}  // namespace

Result<StepRecords> StepRecords::Read(const ShardSource& source, const std::string& job,
                                      CheckpointId checkpoint, uint32_t saved_by,
                                      Deadline deadline) {
  StepRecords records;
  records.job_ = job;
  records.checkpoint_ = checkpoint;
  records.places_.resize(saved_by);
  wire::ReadRecords wanted;
  wanted.job = job;
  wanted.attempt = checkpoint.attempt;
  wanted.step = checkpoint.step;
  // Without them each shard is attached for itself, which takes its time, too.
  wanted.deadline_ms = std::max<uint64_t>(1, deadline.DaemonMillis() / 2);
  const Result<Answer<wire::StepRecords>> answer =
      source.connection->Call<wire::StepRecords>(wanted, deadline);
  if (!answer.ok()) {
    if (!source.connection->alive() || deadline.passed()) {
      return answer.status();
    }
    return records;
  }
  const wire::StepRecords& told = answer->message;
  if (told.world_size != saved_by || told.bytes == 0) {
    return records;
  }
  Result<std::unique_ptr<SlotMapping>> file =
      SlotMapping::Map(answer->descriptors[0].get(), told.bytes, SlotMapping::Access::kReadOnly);
  if (!file.ok()) {
    return records;
  }
  records.job_uuid_ = told.job_uuid;
  records.file_ = *std::move(file);
  records.Index(saved_by);
  return records;
}

// Up to the first head that makes no sense.
void StepRecords::Index(uint32_t saved_by) {
  const uint64_t size = file_->bytes();
  for (uint64_t at = 0; size - at >= kHeadBytes;) {
    const std::byte* const head = file_->data() + at;
    const uint64_t rank = NumberAt(head, 4);
    const uint64_t bytes = NumberAt(head + 8, 8);
    at += kHeadBytes;
    if (rank >= saved_by || bytes > size - at) {
      return;
    }
    places_[rank] = {static_cast<uint32_t>(NumberAt(head + 4, 4)), at, bytes};
    at += bytes;
  }
}

size_t StepRecords::size() const {
  return static_cast<size_t>(std::count_if(places_.begin(), places_.end(),
                                           [](const Place& place) { return place.bytes > 0; }));
}

std::optional<StepRecord> StepRecords::Of(Rank rank) const {
  const Place& place = places_[rank];
  if (place.bytes == 0) {
    return std::nullopt;
  }
  const std::string_view bytes(reinterpret_cast<const char*>(file_->data() + place.offset),
                               place.bytes);
  absl::StatusOr<RecordAndLayout> image = DecodeRecordAndLayout(bytes);
  if (!image.ok()) {
    return std::nullopt;
  }
  const ShardRecord& record = image->record;
  const bool same = record.id.job.ToBytes() == job_uuid_ && record.id.checkpoint() == checkpoint_ &&
                    record.id.rank == rank && record.world_size == places_.size() &&
                    record.job_name == job_;
  if (!same) {
    return std::nullopt;
  }
  return StepRecord{*std::move(image), NameOfTier(place.tier)};
}

}  // namespace holdfast::client
