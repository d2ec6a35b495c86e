// Which of two states of a job is true: the one that a later host agreed on, then the one that it
// wrote later, then the one in which a higher epoch was noted.
#pragma once

#include <tuple>

#include "holdfast/v1/state.pb.h"

namespace holdfast {

inline bool IsNewerState(const v1::JobState& a, const v1::JobState& b) {
  return std::tuple(a.epoch(), a.version(), a.highest_epoch()) >
         std::tuple(b.epoch(), b.version(), b.highest_epoch());
}

}  // namespace holdfast
