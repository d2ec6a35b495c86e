// The frame around small files (docs/formats.md, "Frame of small files"): what a torn, damaged,
// foreign or newer file is told apart by before its body is looked at.
//
//   offset  bytes
//   0       8      magic: what kind of file it is
//   8       4      format version, little-endian
//   12      4      zero
//   16      8      body length n, little-endian
//   24      n      body: an encoded protobuf message
//   24+n    8      CRC-64/XZ of all bytes before, little-endian
//
// Pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace holdfast {

enum class FrameKind {
  kSlotNote,      // "HFSLNOTE"
  kJobState,      // "HFJOBSTA"
  kIntent,        // "HFINTENT"
  kJobIdentity,   // "HFJOBIDN"
  kAttemptClaim,  // "HFATCLAI"
  kManifest,      // "HFMANIFE"
  kMembership,    // "HFMEMBER"
  kWitness,       // "HFWITNES"
};

inline constexpr uint32_t kFrameFormatVersion = 1;
inline constexpr size_t kFrameOverheadBytes = 32;
// Of whole files. A note holds at most a few thousand processes, a job state a few thousand
// attempts.
inline constexpr uint64_t kNoteBytesMax = uint64_t{1} << 20;
inline constexpr uint64_t kJobStateBytesMax = uint64_t{16} << 20;

std::string EncodeFrame(FrameKind kind, std::string_view body);

// The body, pointing into `bytes`. DataLoss: torn, damaged or another kind of file.
// FailedPrecondition: of a newer format version (the message names both).
absl::StatusOr<std::string_view> DecodeFrame(FrameKind kind, std::string_view bytes);

}  // namespace holdfast
