// What every slice and every layout must obey, in one place: PlanImage applies these rules to what
// a user gives, DecodeLayout applies the same ones to what a file says. For tiers/image; for
// client-lib, which checks and quotes names by the same rules; and for recovery/ownership.cc, which
// orders the slices of many layouts. Pure functions, thread-safe, they own nothing.
//
//   HF_ASSIGN_OR_RETURN(slice.bytes, CheckSlice(slice));
//   if (CompareSlices(a, b) < 0) { … a lies before b in the image … }
#pragma once

#include <compare>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "tiers/image/layout.h"

namespace holdfast::image_internal {

inline constexpr std::string_view kReservedPrefix = "holdfast:";
inline constexpr std::string_view kMetadataKey = "__metadata__";
// Digits of the rank in a header key: as many as kWorldSizeMax - 1 has, so that the header's
// length, and with it every offset of the layout, does not depend on the rank.
inline constexpr int kRankDigits = 7;

bool IsValidUtf8(std::string_view text);

// 'name', escaped and cut short, for messages.
std::string QuoteName(std::string_view name);

// Everything that can be said of one slice alone, but for `key`, `image_offset` and `bytes`.
// Returns its length in bytes.
absl::StatusOr<uint64_t> CheckSlice(const Slice& slice);

// Elements of a shape; nothing when the product of the dimensions that are not 0 exceeds 2^63 - 1.
bool CheckedElementCount(std::span<const uint64_t> shape, uint64_t& count);

// The image's order: element size (largest first), name, place. Equal only for the same part of the
// same name.
std::strong_ordering CompareSlices(const Slice& a, const Slice& b);

// Slices of one name that contradict each other, or are the same twice. `slices` are in image
// order.
absl::Status CheckAgreement(const std::vector<Slice>& slices);

// The `key` that slices[i] must have, `slices` being in image order.
std::string KeyFor(const std::vector<Slice>& slices, size_t i);

// Header and image lengths within limits and aligned; data_bytes is the sum of the slices' lengths.
absl::Status CheckImageLengths(uint64_t header_bytes, uint64_t image_bytes);

}  // namespace holdfast::image_internal
