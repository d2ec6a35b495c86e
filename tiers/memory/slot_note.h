// Encoding of SlotNote (holdfast.v1.SlotNote inside a frame) without a protobuf runtime, and the
// two fields of a holdfast.v1.JobState that the directory itself is checked by. Pure functions; a
// test proves them compatible with proto/holdfast/v1/state.proto.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "tiers/memory/slot_store.h"
#include "tiers/tier.h"

namespace holdfast {

inline constexpr size_t kNoteReadersMax = 16384;
inline constexpr size_t kBootIdBytesMax = 128;

// The whole note file. InvalidArgument beyond the limits above.
absl::StatusOr<std::string> EncodeSlotNote(const SlotNote& note);
// DataLoss: torn or damaged, also when the body contradicts itself. FailedPrecondition: of a newer
// version.
absl::StatusOr<SlotNote> DecodeSlotNote(std::string_view bytes);

// Whose history a job state is: uuid and name.
absl::StatusOr<JobIdentity> DecodeJobIdentity(std::string_view job_state);

}  // namespace holdfast
