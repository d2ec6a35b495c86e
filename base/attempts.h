// How far attempts are counted.
#pragma once

#include "base/ids.h"

namespace holdfast {

// No job has had so many. What says a higher number is none of ours: a file's name must not be able
// to use the numbers up.
inline constexpr Attempt kAttemptMax = 1'000'000'000'000;

}  // namespace holdfast
