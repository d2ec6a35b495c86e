// Elements of one floating-point type made into those of another: rounded to the nearest, ties to
// even; what is too large becomes infinite, a NaN stays one.
//
//   if (Convertible(from, to)) ConvertElements(from, source, to, target, elements);
//
// Pure, thread-safe. Nothing need be aligned.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tiers/image/layout.h"

namespace holdfast::client {

// Of the same type: copied. Else of two that are Convertible (recovery/reshard.h).
void ConvertElements(DType from, const std::byte* source, DType to, std::byte* target,
                     uint64_t elements);

}  // namespace holdfast::client
