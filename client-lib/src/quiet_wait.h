// When a caller that minds silence gives a daemon up: after ten slices of its wait in which nothing
// came, though the daemon was asked after five of them.
//
//   QuietWait quiet(deadline, heard);
//   while (!arrived) {
//     switch (quiet.Look(heard)) { … }
//     Wait(quiet.Slice(deadline));
//   }
//
// Time in which this process did not run counts as one slice: a machine that stood still is no
// daemon that hangs. A value, of the one who waits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "client-lib/src/deadline.h"

namespace holdfast::client {

class QuietWait {
 public:
  enum class Next { kWait, kAsk, kGiveUp };

  static constexpr int kSlices = 10;
  static constexpr int kAskAfter = 5;

  // `heard`: a count that grows with whatever comes from the daemon.
  QuietWait(Deadline deadline, uint64_t heard)
      : slice_(std::max(Milliseconds(1), deadline.silence() / kSlices)),
        end_(Deadline::In(slice_)),
        heard_(heard) {}

  Deadline Slice(Deadline deadline) const {
    return deadline.may_mind_silence() ? deadline.Earlier(end_) : deadline;
  }
  Next Look(uint64_t heard) {
    if (heard != heard_) {
      heard_ = heard;
      quiet_ = 0;
      end_ = Deadline::In(slice_);
      return Next::kWait;
    }
    if (!end_.passed()) {
      return Next::kWait;
    }
    end_ = Deadline::In(slice_);
    ++quiet_;
    return quiet_ >= kSlices ? Next::kGiveUp : quiet_ == kAskAfter ? Next::kAsk : Next::kWait;
  }

 private:
  Milliseconds slice_;
  Deadline end_;
  uint64_t heard_;
  int quiet_ = 0;  // slices
};

}  // namespace holdfast::client
