// How far a restore is, for whoever wants to hear it (RestoreOptions::progress).
//
//   RestoreMeter meter;
//   meter.Begin(checkpoint);
//   meter.Announce(all);  meter.BeginReading(bytes);  options.read = &meter.read();
//   progress(meter.Now());
//
// Told and asked by the thread that restores; what has been read is counted by any.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "base/ids.h"
#include "holdfast/job.h"

namespace holdfast::client {

class RestoreMeter {
 public:
  // A step is loaded from here on: nothing of it has been read.
  void Begin(CheckpointId checkpoint) {
    progress_ = {true, checkpoint.step, checkpoint.attempt, 0, 0};
    begun_ = 0;
    read_ = 0;
  }
  // So much of it will be read, unless something has to be read again.
  void Announce(uint64_t bytes) { progress_.bytes_of = std::max(progress_.bytes_of, bytes); }
  // So much of it is read now.
  void BeginReading(uint64_t bytes) {
    Announce(begun_ += bytes);
    touched_ = touched_ || bytes > 0;
  }
  // Nothing is left to be done but to wait for others.
  void Wait() { progress_.loading = false; }
  // Whether anything may have been written into the tensors, of this step or an earlier one.
  bool touched() const { return touched_; }

  std::atomic<uint64_t>& read() { return read_; }
  RestoreProgress Now() const {
    RestoreProgress now = progress_;
    now.bytes = std::min(read_.load(std::memory_order_relaxed), now.bytes_of);
    return now;
  }

 private:
  RestoreProgress progress_;
  uint64_t begun_ = 0;
  bool touched_ = false;
  std::atomic<uint64_t> read_{0};
};

}  // namespace holdfast::client
