// What the operations of the durable tiers have in common (drain_operations.h): the store of a
// place, a drive's ring, and what an outcome says of the place or of a copy. For workers' threads.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "server/runtime/tiers/drain_operations.h"

namespace holdfast {

// Opens it if it is not open; what its first sweep has put right is logged.
absl::StatusOr<std::shared_ptr<CopyStore>> StoreOf(TierPlace& place, Operation& operation);
// `drive` none: the remote tier's.
TierPlace& PlaceOf(DrainContext& context, std::optional<size_t> drive);

absl::Status NoteJob(DrainContext& context, size_t drive, CopyStore& store, const JobIdentity& job,
                     Operation& operation);

BlockIoMode ModeOf(const v1::NvmeConfig& config);
// The ring belongs to the thread: it is made with its first transfer, and ends with it.
absl::StatusOr<BlockIo*> ThreadIo(DrainContext& context, TierPlace& place);

// Notes how an operation on the place ended. One that was cancelled, or came to nothing for reasons
// of its own, leaves what was known of the place as it is. Returns the outcome; an error also when
// the place went away meanwhile.
absl::Status Judged(DrainContext& context, TierPlace& place, const absl::Status& status);
// The same whatever it says, with what the place has noted.
TierPlace::Noted Noted(DrainContext& context, TierPlace& place, const absl::Status& status);
Event AwayEvent(DrainContext& context, TierPlace& place, const absl::Status& why);
void Judge(DrainContext& context, TierPlace& place, const absl::Status& status);
// Whether it says that the copy itself is of no use, whoever reads it.
bool IsCopysFault(const absl::Status& status, TierKind tier);
// Of reading it: Unavailable where that read what lies there no more, since a good copy was put in
// its place meanwhile.
absl::Status OfWhatLiesThere(const absl::Status& status, CopyStore::Reading& reading);
absl::Status WrittenAnewMeanwhile(const std::string& location, const absl::Status& status);

// Which opening of an attempt writes, as a claim has it.
std::string OpeningText(uint64_t opening);
// What an operation ends with that does not come to its end.
absl::Status NotYet();
absl::Status Cancelled(std::string_view what);

// In what pieces its image is to be read (BufferedCopySpec::piece_unit): each frame of one that is
// compressed by one thread.
uint32_t PieceUnitOf(const CopyStore::Reading& reading);

// A File that keeps what it belongs to: a thread that hangs in it may outlive everything else.
template <typename Owner>
std::shared_ptr<File> ImageOf(const std::shared_ptr<Owner>& owner) {
  return std::shared_ptr<File>(owner, &owner->image());
}

}  // namespace holdfast
