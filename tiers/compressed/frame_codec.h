// One frame of a compressed image: a whole Zstandard frame, which needs no other to be read.
//
//   std::vector<std::byte> stored(kStoredFrameBytesMax);
//   HF_ASSIGN_OR_RETURN(size_t bytes, CompressFrame(3, part, stored));
//   HF_RETURN_IF_ERROR(DecompressFrame({stored.data(), bytes}, part));
//
// Thread-safe. What Zstandard works in is kept for the next call, of a few threads.
#pragma once

#include <cstddef>
#include <span>

#include "absl/status/statusor.h"

namespace holdfast {

// `level`: 1 to 19. How long the frame is; `out` has kStoredFrameBytesMax bytes.
absl::StatusOr<size_t> CompressFrame(int level, std::span<const std::byte> part,
                                     std::span<std::byte> out);

// DataLoss, without a file's name: it is no Zstandard frame, is damaged, or does not hold exactly
// as many bytes as `out` has. However much it claims to hold, nothing beyond `out` is written, and
// no memory is taken for it.
absl::Status DecompressFrame(std::span<const std::byte> stored, std::span<std::byte> out);

}  // namespace holdfast
