// How a transfer of an image ended. A value.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "tiers/image/record.h"

namespace holdfast {

enum class FaultySide {
  kNone,         // it succeeded, was cancelled, or was called wrongly
  kSource,       // what was read is gone, cut short, or contradicts its digests
  kDestination,  // what was written cannot be, or reads back otherwise
};

struct TransferResult {
  absl::Status status;
  FaultySide faulty = FaultySide::kNone;
  // Set when digests disagree: status is DataLoss and `faulty` says on which side.
  std::optional<BadBlock> bad_block;
  uint64_t bytes = 0;      // of the image, moved and verified
  double cpu_seconds = 0;  // of the threads that took part, the kernel's own workers excepted

  bool ok() const { return status.ok(); }
};

}  // namespace holdfast
